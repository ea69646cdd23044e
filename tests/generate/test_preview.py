"""Previews of a run: what its average draws at that step, and nothing of the run changed."""

import numpy as np
import pytest
import torch

from sitvit.data.images import read_image
from sitvit.generate import preview
from sitvit.generate.preview import Preview, grid_of, preview_job
from sitvit.generate.trained import open_trained
from sitvit.train.checkpoint import latest_checkpoint
from sitvit.train.loop import train
from sitvit.train.metrics import read_metrics


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(preview, "NUM_STEPS", 2)
    monkeypatch.setattr(preview, "ROWS", 1)
    monkeypatch.setattr(preview, "COLUMNS", 3)


def hashes(run):
    saved = latest_checkpoint(run)
    return {name: saved.weights_sha256(name) for name in saved.networks}


def test_a_run_with_previews_is_the_run_without_to_the_bit(quick, tiny_config, tmp_path):
    train(tiny_config("without"))
    torch.manual_seed(1)  # torch's own generator is left where it was, too
    expected = torch.rand(1)
    torch.manual_seed(1)
    train(tiny_config("with", "train.preview_every=2"), hooks=[Preview()])
    assert torch.equal(torch.rand(1), expected)
    assert hashes(tmp_path / "with") == hashes(tmp_path / "without")
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("with", "without")]
    assert losses[0] == losses[1]
    names = sorted(path.name for path in (tmp_path / "with" / "previews").iterdir())
    assert names == ["step_0000002.png", "step_0000004.png", "step_0000006.png"]
    assert not (tmp_path / "without" / "previews").exists()


def test_a_preview_is_what_the_checkpoint_of_its_step_draws(quick, tiny_config, tmp_path):
    train(tiny_config("run", "train.preview_every=3", "train.ema_decays=[0.5]"), hooks=[Preview()])
    trained = open_trained(str(tmp_path / "run"), step=3)
    job = preview_job(trained, torch.device("cpu"))
    drawn = grid_of(job.batch(range(3)), 3)
    assert np.array_equal(read_image(tmp_path / "run" / "previews" / "step_0000003.png"), drawn)


def test_what_keeps_a_preview_from_being_drawn_is_said_and_training_goes_on(tiny_config, tmp_path, capsys):
    def fill(trainer, row):
        (trainer.run / "previews").write_text("a file in the place of the folder")

    train(tiny_config("run", "train.preview_every=6"), hooks=[fill, Preview()])
    assert "no preview of step 6" in capsys.readouterr().out
    assert latest_checkpoint(tmp_path / "run").step == 6


def test_a_run_that_was_killed_before_its_first_save_may_have_previews(quick, tiny_config, tmp_path):
    def kill(trainer, row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny_config("run", "train.preview_every=1"), hooks=[Preview(), kill])
    train(tiny_config("run", "train.preview_every=1"))
    assert latest_checkpoint(tmp_path / "run").step == 6


def test_a_grid_has_its_images_row_by_row():
    images = np.arange(6, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 3, 3), dtype=np.uint8)
    sheet = grid_of(images, 3)
    assert sheet.shape == (4, 9, 3)
    assert sheet[::2, ::3, 0].tolist() == [[0, 1, 2], [3, 4, 5]]
