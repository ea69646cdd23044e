"""An evaluation in training gives a checkpoint's numbers and changes no bit of the run."""

import json
import os
import signal
from dataclasses import replace

import pytest

from sitvit import runtime
from sitvit.data import sources as image_sources
from sitvit.eval import while_training
from sitvit.eval.evaluate import evaluate
from sitvit.eval.settings import EvaluationConfig
from sitvit.eval.while_training import Evaluation
from sitvit.train.checkpoint import latest_checkpoint
from sitvit.train.loop import train
from sitvit.train.metrics import read_metrics

EVERY = ("train.log_every=3", "train.ema_decays=[0.5]")
MEASURED = (*EVERY, "train.evaluate_every=3", "train.evaluate_images=12")


@pytest.fixture
def few(monkeypatch, images):
    """Few real images, and few steps of the sampler."""
    monkeypatch.setitem(image_sources.EMBEDDED, "fashion-mnist", lambda: images)
    config_of = while_training._config
    monkeypatch.setattr(
        while_training, "_config", lambda *run: replace(config_of(*run), num_steps=2, sampling_batch_size=5)
    )


def hashes(run):
    saved = latest_checkpoint(run)
    return {name: saved.weights_sha256(name) for name in saved.networks}


def test_the_numbers_are_those_of_the_checkpoint_of_that_step(few, tiny_config, tmp_path):
    train(tiny_config("run", *MEASURED), hooks=[Evaluation()])
    rows = {row["step"]: row for row in read_metrics(tmp_path / "run")}
    for step in (3, 6):
        config = EvaluationConfig(
            checkpoint=str(tmp_path / "run" / "checkpoints" / f"step_{step:07d}"), num_images=12,
            num_steps=2, sampling_batch_size=5, out=str(tmp_path / f"{step}.json"),
        )  # fmt: skip
        found, _ = evaluate(config)
        assert found
        assert {name: rows[step][name] for name in found} == found
        [kept] = (tmp_path / "run" / "evaluations").glob(f"step_{step:07d}-*.json")
        assert json.loads(kept.read_text())["metrics"] == found
    assert rows[3] != rows[6]


def test_a_run_that_is_evaluated_is_the_run_that_is_not_to_the_bit(few, tiny_config, tmp_path):
    train(tiny_config("without", *EVERY))
    train(tiny_config("with", *MEASURED), hooks=[Evaluation()])
    assert hashes(tmp_path / "with") == hashes(tmp_path / "without")
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("with", "without")]
    assert losses[0] == losses[1]


def test_a_reference_that_is_not_there_is_told_after_the_first_step(few, tiny_config, tmp_path):
    steps = []
    config = tiny_config("run", *MEASURED, f"train.evaluate_reference={tmp_path / 'nowhere'}")
    with pytest.raises(ValueError, match="nowhere"):
        train(config, hooks=[lambda trainer, row: steps.append(trainer.step), Evaluation()])
    assert steps == [1]


def test_a_signal_during_an_evaluation_ends_the_run_saved_once_it_is_measured(
    few, tiny_config, tmp_path, monkeypatch
):
    original = while_training.evaluate

    def signalled(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    monkeypatch.setattr(while_training, "evaluate", signalled)
    with pytest.raises(runtime.Stopped):
        train(tiny_config("run", *MEASURED, "train.save_every=100"), hooks=[Evaluation()])
    assert latest_checkpoint(tmp_path / "run").step in (4, 5)
    assert len(list((tmp_path / "run" / "evaluations").glob("step_0000003-*.json"))) == 1


def test_evaluations_fall_on_steps_that_are_logged(tiny_config):
    with pytest.raises(ValueError, match="train.evaluate_every must be a multiple of train.log_every = 2"):
        tiny_config("run", "train.evaluate_every=3")
