"""Trackers get every row, and nothing that goes wrong with one stops, delays or changes training."""

import shutil
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from sitvit.config import experiment
from sitvit.train import trackers
from sitvit.train.checkpoint import latest_checkpoint
from sitvit.train.loop import train
from sitvit.train.metrics import read_metrics
from sitvit.train.trackers import TRACKERS


def fake_wandb(init, key="key"):
    return SimpleNamespace(
        login=lambda prompt: key is not None and not prompt,
        init=init,
        Settings=lambda **given: SimpleNamespace(**given),
    )


class Run:
    def __init__(self):
        self.rows, self.finished = [], False

    def define_metric(self, name, step_metric):
        assert step_metric == "step"

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture(autouse=True)
def online(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)


def finishes(tiny_config, tmp_path, *names):
    train(tiny_config("run", f"train.trackers=[{','.join(names)}]"))
    assert latest_checkpoint(tmp_path / "run").step == 6
    return read_metrics(tmp_path / "run")


def test_the_schema_and_the_trackers_know_the_same_names():
    assert tuple(TRACKERS) == experiment.TRACKERS


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_package_that_is_not_there_is_said_once_and_training_goes_on(
    tiny_config, tmp_path, monkeypatch, capsys, name
):
    monkeypatch.setitem(sys.modules, name, None)
    finishes(tiny_config, tmp_path, name)
    assert capsys.readouterr().out.count(f"{name} is off") == 1


def test_a_missing_key_is_said_and_nobody_is_asked(tiny_config, tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(lambda **given: asked.append(given), key=None))
    finishes(tiny_config, tmp_path, "wandb")
    assert "wandb is off: it has no key" in capsys.readouterr().out
    assert asked == []


@pytest.mark.parametrize("error", [OSError("no route\nto host"), SystemExit(1), TimeoutError()])
def test_a_network_that_fails_is_said_in_one_line(tiny_config, tmp_path, monkeypatch, capsys, error):
    def init(**given):
        raise error

    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(init))
    finishes(tiny_config, tmp_path, "wandb")
    [line] = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
    assert line.endswith("metrics.jsonl")


def test_a_network_that_never_answers_delays_the_end_alone(tiny_config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    forever = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(lambda **given: forever.wait(60)))
    start = time.monotonic()
    finishes(tiny_config, tmp_path, "wandb")
    assert time.monotonic() - start < 30
    assert "wandb did not answer for 0.2 s" in capsys.readouterr().out
    forever.set()


def test_wandb_gets_the_configuration_and_every_row(tiny_config, tmp_path, monkeypatch):
    run, given = Run(), {}
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(lambda **values: given.update(values) or run))
    rows = finishes(tiny_config, tmp_path, "wandb")
    assert run.rows == rows
    assert run.finished
    assert given["config"]["train"]["batch_size"] == 8
    assert given["resume"] == "allow"


def test_trackio_gets_every_row_at_its_step(tiny_config, tmp_path, monkeypatch):
    logged, ended = [], []
    fake = SimpleNamespace(
        init=lambda project, name, config, resume: None,
        log=lambda row, step: logged.append((row, step)),
        finish=lambda: ended.append(True),
    )
    monkeypatch.setitem(sys.modules, "trackio", fake)
    rows = finishes(tiny_config, tmp_path, "trackio")
    assert logged == [(row, row["step"]) for row in rows]
    assert ended == [True]


def test_tensorboard_has_the_losses_of_the_record(tiny_config, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = finishes(tiny_config, tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("train/loss")
    assert [event.step for event in events] == [row["step"] for row in rows]
    # Events are float32.
    assert [event.value for event in events] == pytest.approx([row["loss"] for row in rows], rel=1e-6)


def test_tensorboard_shows_a_step_that_is_done_again_once(tiny_config, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = ("train.trackers=[tensorboard]", "train.save_every=3")
    train(tiny_config("run", *settings))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_0000006")
    train(tiny_config("run", *settings))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("train/loss")
    assert [event.step for event in events] == [2, 4, 6]


def test_no_tracker_is_a_choice_and_an_unknown_one_is_refused(tiny_config, tmp_path):
    finishes(tiny_config, tmp_path)
    assert not (tmp_path / "run" / "tensorboard").exists()
    with pytest.raises(ValueError, match="train.trackers must be different names of tensorboard"):
        tiny_config("other", "train.trackers=[wandbb]")
