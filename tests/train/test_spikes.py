"""A spike of the loss is told once, an ordinary or a falling loss never."""

from types import SimpleNamespace

import numpy as np
import pytest

from sitvit.train.checkpoint import latest_checkpoint
from sitvit.train.loop import train
from sitvit.train.spikes import FACTOR, LEAST, LossSpikes, threshold


def follow(run, losses, first=1):
    """The steps whose rows are marked when `losses` are logged step by step."""
    hook = LossSpikes()
    trainer = SimpleNamespace(run=run, handle=SimpleNamespace(is_main_process=True))
    marked = []
    for step, loss in enumerate(losses, start=first):
        row = {"step": step, "loss": float(loss), "grad_norm": 1.0}
        hook(trainer, None)
        hook(trainer, row)
        if "loss_spike" in row:
            marked.append(step)
    return marked


@pytest.mark.parametrize("seed", range(5))
def test_normal_losses_around_a_falling_curve_are_no_spikes(tmp_path, seed):
    steps = np.arange(1000)
    noise = np.random.default_rng(seed).normal(0, 0.02, 1000)
    assert follow(tmp_path, 0.2 + np.exp(-steps / 100) + noise) == []


def test_a_spike_is_told_with_its_step_and_its_threshold_and_does_not_raise_it(tmp_path, capsys):
    losses = np.full(60, 0.5) + 0.01 * np.cos(np.arange(60))
    losses[[30, 32]] = 2.0
    assert follow(tmp_path, losses) == [31, 33]
    assert "loss spike at step 31: 2, above 0.5" in capsys.readouterr().out


def test_the_threshold_is_eight_standard_deviations_of_normal_losses():
    losses = np.random.default_rng(0).normal(1, 0.1, 20_001)
    # The median absolute deviation of n normal numbers has a relative error of 1.17 / sqrt(n) = 0.8 %.
    assert threshold(list(losses)) == pytest.approx(1 + FACTOR * 0.1, rel=0.03)


def test_nothing_is_told_of_too_few_losses(tmp_path):
    assert threshold([1.0] * (LEAST - 1)) is None
    assert follow(tmp_path, [1.0] * (LEAST - 1) + [100.0]) == []
    assert follow(tmp_path, [1.0] * LEAST + [100.0]) == [LEAST + 1]


def test_a_continued_run_looks_back_on_its_record(tmp_path):
    rows = "".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 21))
    (tmp_path / "metrics.jsonl").write_text(rows)
    assert follow(tmp_path, [3.0, 1.0], first=21) == [21]


def test_steps_that_are_done_again_are_not_looked_back_on(tmp_path):
    rows = "".join(f'{{"step": {step}, "loss": {1.0 if step <= 20 else 9.0}}}\n' for step in range(1, 61))
    (tmp_path / "metrics.jsonl").write_text(rows)
    assert follow(tmp_path, [3.0], first=21) == [21]


def test_watching_for_spikes_changes_no_bit_of_the_run(tiny_config, tmp_path):
    train(tiny_config("plain"))
    train(tiny_config("watched"), hooks=[LossSpikes()])
    plain, watched = (latest_checkpoint(tmp_path / name) for name in ("plain", "watched"))
    for name in plain.networks:
        assert plain.weights_sha256(name) == watched.weights_sha256(name)


def test_losses_that_hardly_differ_have_a_hundredth_of_their_median_as_spread():
    assert threshold([0.5] * LEAST) == pytest.approx(0.5 + FACTOR * 0.005)
