"""What is watched while a run trains changes nothing of it."""

import re
import time
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from sitvit.data.stream import TrainingStream
from sitvit.models.presets import preset
from sitvit.models.shapes import SiTShape
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


def test_images_a_second_and_the_share_outside_of_the_steps_are_of_the_time_since_the_row_before(
    tiny_config, tmp_path, monkeypatch
):
    seconds = iter(range(0, 1000, 2))  # each step takes two
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(speed, "time", clock)
    hook = Speed()

    class Run:
        step, step_seconds = 0, 0.0
        settings = SimpleNamespace(batch_size=8, precision="fp32")
        handle = SimpleNamespace(device=speed.torch.device("cpu"), num_processes=2)

    run, row = Run(), {"loss": 1.0, "lr": 1e-4, "grad_norm": 2.0}
    for run.step in range(1, 6):
        run.step_seconds += 1.5
        hook(run, row if run.step == 5 else None)
    assert row["images_per_second"] == pytest.approx(8 / 2, abs=0.1)
    assert row["outside_step"] == 0.25
    assert progress_text(row).startswith("loss 1.0000, lr 1.0e-04, grad 2, 4 img/s")


def test_mfu_is_the_training_flops_of_all_images_over_the_peak_of_all_gpus(monkeypatch):
    monkeypatch.setattr(speed.torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    handle = SimpleNamespace(device=speed.torch.device("cuda"), num_processes=8)
    settings = SimpleNamespace(precision="bf16")
    model = SimpleNamespace(config=asdict(SiTShape(**preset("SiT-XL/2"), input_size=32)))
    run = SimpleNamespace(handle=handle, settings=settings, model=model)
    # Three times a forward pass of 118.6 G multiply-adds of two FLOPs; 989 TFLOP/s a GPU.
    expected = 1000 * 3 * 2 * 118.6e9 / (8 * 989e12)
    assert speed._mfu(run, rate=1000) == pytest.approx(expected, rel=1e-3)


def test_the_time_that_went_to_the_data_is_told_at_the_end(tiny_config, monkeypatch, capsys):
    original = TrainingStream.batch

    def slow(self, step, positions):
        time.sleep(0.3)
        return original(self, step, positions)

    monkeypatch.setattr(TrainingStream, "batch", slow)
    train(tiny_config("run"))
    found = re.search(r"; (\d+\.\d)% of the time went to data, logs", capsys.readouterr().out)
    assert 50 < float(found[1]) < 100
