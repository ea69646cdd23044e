"""The bench of training: what it says of a folder that is to be the yardstick."""

import pytest
import torch

from sitvit.bench.train import NUM_DRAWS, bench_train, seconds_of_data
from sitvit.data.stream import TrainingStream


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is no checkout of SiT: it has no models.py"),
        ("DiT_models = {}", "is no checkout of SiT: its models.py has no SiT_models"),
        ("import no_such_package", "cannot be run: No module named 'no_such_package'; install what it needs"),
    ],
)
def test_a_folder_that_is_no_checkout_of_sit_is_told_before_any_network_is_made(
    tmp_path, monkeypatch, content, words
):
    monkeypatch.setattr("sitvit.bench.train.build_model", lambda name: pytest.fail("made a network"))
    if content is not None:
        (tmp_path / "models.py").write_text(content)
    with pytest.raises(ValueError, match=words):
        bench_train("S", 1, "fp32", 1, "none", tmp_path)


def test_the_wait_for_data_is_a_batchs_way_from_the_cache_to_the_device(monkeypatch):
    """By a clock that goes on by half a second at each batch that is drawn, and at nothing else."""
    clock, draw = [0.0], TrainingStream.batch

    def drawn(*args):
        clock[0] += 0.5
        return draw(*args)

    monkeypatch.setattr(TrainingStream, "batch", drawn)
    monkeypatch.setattr("sitvit.bench.train.time.perf_counter", lambda: clock[0])
    assert seconds_of_data(4, torch.device("cpu")) == 0.5
    assert clock == [0.5 * NUM_DRAWS]
