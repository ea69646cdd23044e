"""A run's folder belongs to one job at a time."""

import os

import pytest

from sitvit import runtime
from sitvit.train import loop
from sitvit.train.checkpoint import find_checkpoint, latest_checkpoint
from sitvit.train.continuation import LOCK
from sitvit.train.loop import train

from ..conftest import run_script


def contents(run):
    files = (path for path in run.rglob("*") if path.is_file() and "events" not in path.name)
    return {path: path.read_bytes() for path in files}


def test_a_second_job_on_a_run_names_the_first_and_changes_nothing(tiny_config, tmp_path):
    run, seen = tmp_path / "run", []

    def second_job(trainer, row):
        if trainer.step == 3:
            (run / "checkpoints" / ".step_0000004.1.partial").mkdir()  # what the first job is writing
            before = contents(run)
            config = find_checkpoint(str(run)).folder / "config.yaml"
            seen.append(run_script("train_sit", "--config", config, cwd=tmp_path))
            assert contents(run) == before
            assert (run / "checkpoints" / ".step_0000004.1.partial").is_dir()

    train(tiny_config("run", "train.save_every=2", "train.log_every=1"), [second_job])
    assert f"{run} is being worked on by another process, {os.getpid()} on" in seen[0].stderr
    assert "Traceback" not in seen[0].stderr
    assert seen[0].returncode == 2
    assert latest_checkpoint(run).step == 6


def test_a_run_is_free_again_when_its_job_ends_by_an_error(tiny_config, tmp_path):
    def fail(trainer, row):
        raise ValueError("a hook")

    with pytest.raises(ValueError, match="a hook"):
        train(tiny_config("run"), [fail])
    train(tiny_config("run"))
    assert latest_checkpoint(tmp_path / "run").step == 6


def test_what_another_job_trained_while_this_one_began_is_not_begun_from_before(
    tiny_config, tmp_path, monkeypatch
):
    check_disk = loop.check_disk

    def while_another_ends(run, *arguments):
        monkeypatch.setattr(loop, "check_disk", check_disk)
        train(tiny_config("run", "train.num_steps=4"))
        check_disk(run, *arguments)

    monkeypatch.setattr(loop, "check_disk", while_another_ends)
    with pytest.raises(runtime.Taken, match="another process trained .*run just now"):
        train(tiny_config("run"))
    train(tiny_config("run"))
    assert latest_checkpoint(tmp_path / "run").step == 6


def test_where_a_file_system_has_no_locks_training_goes_on(tiny_config, tmp_path, monkeypatch):
    import fcntl

    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    train(tiny_config("run"))
    assert (tmp_path / "run" / LOCK).is_file()
    assert latest_checkpoint(tmp_path / "run").step == 6
