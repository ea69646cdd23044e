"""What goes wrong in a long run: values that are not finite, time limits, other settings, other processes."""

import math
from pathlib import Path

import pytest
import torch

from sitvit import runtime
from sitvit.cli.frame import duration
from sitvit.config import Config, load_config
from sitvit.data.latents import LatentCache
from sitvit.data.stream import TrainingStream
from sitvit.flow.objective import Objective
from sitvit.train.checkpoint import WEIGHTS, find_checkpoint, latest_checkpoint
from sitvit.train.continuation import check_continuation
from sitvit.train.loop import train
from sitvit.train.metrics import read_metrics


def weights(run, name="model"):
    return find_checkpoint(str(run)).tensors(f"{name}/{WEIGHTS}")


def seen_by(monkeypatch):
    """Steps of the stream in the order in which they were asked for."""
    steps, original = [], TrainingStream.batch

    def batch(self, step, positions):
        steps.append(step)
        return original(self, step, positions)

    monkeypatch.setattr(TrainingStream, "batch", batch)
    return steps


def poison(monkeypatch, position):
    """The noise of one position of the stream is infinite, whenever it is asked for."""
    original = TrainingStream.batch

    def batch(self, step, positions):
        made = original(self, step, positions)
        if step == position:
            made.x_0[1, 0, 0, 0] = math.inf
        return made

    monkeypatch.setattr(TrainingStream, "batch", batch)


def test_a_skipped_step_names_its_sample_and_leaves_no_trace_but_its_count(
    tiny_config, cache, tmp_path, monkeypatch, capsys
):
    poison(monkeypatch, 4)
    train(tiny_config("run", "train.on_nonfinite=skip"))
    stream = TrainingStream(cache, 0, 8, True, 0.1, 10).batch(4, range(8))
    told = f"at step 5: image {stream.ids[1]} at t = {stream.u[1]:.4g} on process 0: skipped"
    assert told in capsys.readouterr().out
    checkpoint = find_checkpoint(str(tmp_path / "run"))
    assert checkpoint.record["num_nonfinite"] == 1
    for name in checkpoint.networks:
        assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run", name).values())
    assert all(math.isfinite(row["loss"]) for row in read_metrics(tmp_path / "run"))
    moments = checkpoint.tensors("optimizer.safetensors")
    assert {value.item() for name, value in moments.items() if name.startswith("step.")} == {5.0}


def test_more_skips_than_allowed_stop_the_run(tiny_config, tmp_path, monkeypatch):
    poison(monkeypatch, 4)
    with pytest.raises(ValueError, match=r"at step 5: image.*more than train.max_nonfinite.*step_0000003"):
        train(tiny_config("run", "train.on_nonfinite=skip", "train.max_nonfinite=0"))
    assert latest_checkpoint(tmp_path / "run").step == 3


@pytest.mark.parametrize("reaction", ["skip", "rollback"])
def test_as_many_as_allowed_do_not_stop_it(tiny_config, tmp_path, monkeypatch, reaction):
    poison(monkeypatch, 4)
    train(tiny_config("run", f"train.on_nonfinite={reaction}", "train.max_nonfinite=1"))
    assert find_checkpoint(str(tmp_path / "run")).record["num_nonfinite"] == 1


def test_a_rollback_takes_the_last_checkpoint_and_other_images(tiny_config, tmp_path, monkeypatch):
    poison(monkeypatch, 4)
    steps = seen_by(monkeypatch)
    train(tiny_config("run", "train.on_nonfinite=rollback"))
    # step 5 is the poisoned one; it is known after step 6 was begun; then from step 4 on with later images
    assert steps == [0, 1, 2, 3, 4, 5, 5, 6, 7]
    record = find_checkpoint(str(tmp_path / "run")).record
    assert (record["step"], record["stream_shift"], record["num_nonfinite"]) == (6, 2, 1)
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [2, 4, 6]
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run").values())
    train(tiny_config("run", "train.on_nonfinite=rollback", "train.num_steps=8", "train.decay_steps=0"))
    assert steps[-2:] == [8, 9]  # the shift lives in the checkpoint


def test_a_rollback_without_a_checkpoint_stops(tiny_config, monkeypatch):
    poison(monkeypatch, 1)
    with pytest.raises(ValueError, match="at step 2: image.*there is no checkpoint to go back to"):
        train(tiny_config("run", "train.on_nonfinite=rollback"))


def test_a_loss_that_is_not_finite_in_the_last_step_is_not_saved(tiny_config, tmp_path, monkeypatch):
    poison(monkeypatch, 5)
    with pytest.raises(ValueError, match="at step 6: image"):
        train(tiny_config("run"))
    assert latest_checkpoint(tmp_path / "run").step == 3


def test_a_time_limit_saves_and_the_run_continues_bit_for_bit(tiny_config, tmp_path):
    train(tiny_config("whole"))
    with pytest.raises(runtime.Stopped, match="stopped after step 2, which is saved"):
        train(tiny_config("run"), max_seconds=1e-9)
    train(tiny_config("run"))
    whole, run = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(whole[key], run[key]) for key in whole)


@pytest.mark.parametrize(
    ("text", "seconds"), [("300s", 300), ("90m", 5400), ("1.5h", 5400), ("01:30:05", 5405)]
)
def test_a_time_limit_as_people_write_it(text, seconds):
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "90", "-5m", "nanh", "1:2", "infs"])
def test_what_is_no_time_is_refused(text):
    import argparse

    with pytest.raises(argparse.ArgumentTypeError, match="is no time"):
        duration(text)


def test_a_changed_setting_is_said_and_taken_only_where_it_is_accepted(tiny_config, tmp_path, capsys):
    train(tiny_config("run"))
    other = ("train.lr=1e-4", "train.seed=3", "train.num_steps=8")
    with pytest.raises(ValueError, match=r"lr was 0.001, now 0.0001; train.seed was 0.*--accept-changes"):
        train(tiny_config("run", *other))
    train(tiny_config("run", *other), accept_changes=True)
    told = capsys.readouterr().out
    assert "continued with another setting: train.lr was 0.001, now 0.0001" in told
    assert "continued with another setting: train.num_steps was 6, now 8" in told
    assert latest_checkpoint(tmp_path / "run").step == 8


def test_a_network_of_another_shape_is_never_accepted(tiny_config):
    train(tiny_config("run"))
    with pytest.raises(ValueError, match="model.depth was 2, now 1") as caught:
        train(tiny_config("run", "model.depth=1", "train.num_steps=8"), accept_changes=True)
    assert "--accept-changes" not in str(caught.value)


def test_classes_under_other_names_are_not_continued_unsaid(trained_run, tmp_path):
    """The numbers of the labels are the same, so nothing else would tell."""
    checkpoint = find_checkpoint(str(trained_run))
    config = load_config(checkpoint.folder / "config.yaml", [], Config)
    cache = LatentCache(Path(config.data.latents))
    check_continuation(config, cache, checkpoint)
    cache.class_names = cache.class_names[::-1]
    with pytest.raises(ValueError, match=r"the classes were \['T-shirt/top'.*--accept-changes"):
        check_continuation(config, cache, checkpoint)


def test_another_share_of_dropped_labels_fits_the_weights_and_can_be_accepted(tiny_config, tmp_path):
    train(tiny_config("run"))
    other = tiny_config("run", "model.class_dropout_prob=0.2", "train.num_steps=8")
    with pytest.raises(ValueError, match="class_dropout_prob was 0.1, now 0.2.*--accept-changes"):
        train(other)
    train(other, accept_changes=True)
    assert latest_checkpoint(tmp_path / "run").step == 8


def test_hooks_see_every_step_and_change_nothing(tiny_config, tmp_path):
    seen = []

    def look(trainer, row):
        seen.append((trainer.step, row is not None))
        trainer.model.eval()(torch.randn(1, 4, 8, 8), torch.rand(1), torch.tensor([0]))
        trainer.model.train()
        if row is not None:
            row["noticed"] = 1.0

    train(tiny_config("with"), hooks=[look])
    train(tiny_config("without"))
    assert seen == [(1, False), (2, True), (3, False), (4, True), (5, False), (6, True)]
    assert all(row["noticed"] == 1.0 for row in read_metrics(tmp_path / "with"))
    a, b = weights(tmp_path / "with"), weights(tmp_path / "without")
    assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("at", [4, 5])
def test_what_fails_beside_training_ends_the_run_and_costs_no_step(tiny_config, tmp_path, capsys, at):
    """An evaluation whose images are gone, say; step 4 is one that logs. Then it goes on as the whole run."""

    def fail(trainer, row):
        if trainer.step == at:
            raise OSError("the images are gone")

    train(tiny_config("whole"))
    with pytest.raises(OSError, match="the images are gone"):
        train(tiny_config("run"), hooks=[fail])
    assert f"step {at} is saved before the run ends by an error" in capsys.readouterr().out
    assert latest_checkpoint(tmp_path / "run").step == at
    train(tiny_config("run"))
    whole, run = (
        [(row["step"], row["loss"]) for row in read_metrics(tmp_path / name)] for name in ("whole", "run")
    )
    assert whole == run
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_step_that_is_saved_is_not_written_again_where_the_run_ends_by_an_error(
    tiny_config, tmp_path, capsys
):
    def look(trainer, row):
        if trainer.step == 5:
            trainer.save()
            trainer.rescue()

    train(tiny_config("run"), hooks=[look])
    assert "is saved before" not in capsys.readouterr().out
    folders = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert not [name for name in folders if "damaged" in name]


def test_a_rate_that_blows_the_network_up_stops_before_a_weight_is_not_finite(tiny_config, tmp_path):
    blown = ["train.lr=1e30", "train.warmup_steps=0", "train.save_every=1", "train.num_steps=20"]
    with pytest.raises(ValueError, match=r"training stopped: loss .* at step \d+: image"):
        train(tiny_config("run", *blown))
    saved = latest_checkpoint(tmp_path / "run")
    for name in saved.networks:
        assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "run", name).values())


def test_an_objective_that_turns_infinite_names_both_figures(tiny_config, monkeypatch):
    original = Objective.loss
    monkeypatch.setattr(Objective, "loss", lambda *arguments: original(*arguments) * math.inf)
    with pytest.raises(ValueError, match="loss inf, gradient norm nan at step 1"):
        train(tiny_config("run"))


def test_a_gradient_alone_that_is_not_finite_is_told_as_such(tiny_config, monkeypatch):
    """sqrt has a finite value and an infinite slope at zero."""
    original = Objective.loss

    def steep(*arguments):
        losses = original(*arguments)
        return losses + (losses - losses.detach()).abs().sqrt()

    monkeypatch.setattr(Objective, "loss", steep)
    with pytest.raises(
        ValueError, match="gradient norm nan at step 1: each sample's loss is finite, the grad"
    ):
        train(tiny_config("run"))
