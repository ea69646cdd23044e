"""What is watched while a run trains changes nothing of it."""

from types import SimpleNamespace

import pytest

from sitvit.train import speed
from sitvit.train.checkpoint import latest_checkpoint
from sitvit.train.loop import train
from sitvit.train.metrics import read_metrics
from sitvit.train.speed import Speed, progress_text


def test_watching_the_speed_changes_no_bit_of_the_run(tiny_config, tmp_path):
    train(tiny_config("plain"))
    train(tiny_config("watched"), hooks=[Speed()])
    plain, watched = (latest_checkpoint(tmp_path / name) for name in ("plain", "watched"))
    assert plain.networks == watched.networks
    for name in plain.networks:
        assert plain.weights_sha256(name) == watched.weights_sha256(name)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("plain", "watched")]
    assert losses[0] == losses[1]
    assert all(row["images_per_second"] > 0 < row["memory_gib"] for row in read_metrics(tmp_path / "watched"))


def test_images_a_second_are_steps_times_the_global_batch_over_the_time(tiny_config, tmp_path, monkeypatch):
    seconds = iter(range(0, 1000, 2))  # each step takes two
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(speed, "time", clock)
    hook = Speed()

    class Run:
        step = 0
        settings = SimpleNamespace(batch_size=8, precision="fp32")
        handle = SimpleNamespace(device=speed.torch.device("cpu"), num_processes=2)

    run, row = Run(), {"loss": 1.0, "lr": 1e-4, "grad_norm": 2.0}
    for run.step in range(1, 6):
        hook(run, row if run.step == 5 else None)
    assert row["images_per_second"] == pytest.approx(8 / 2, abs=0.1)
    assert progress_text(row).startswith("loss 1.0000, lr 1.0e-04, grad 2, 4 img/s")
