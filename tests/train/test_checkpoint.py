"""Whatever stops a save, what was saved before is whole, and the next run finds it."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sitvit import runtime
from sitvit.train import checkpoint
from sitvit.train.checkpoint import RECORD, latest_checkpoint, prune_checkpoints, step_folders

from ..conftest import ROOT
from .saving import is_of_one_step, network, save_steps

KILLING = """
import sys
from pathlib import Path
from tests.train.test_checkpoint import kill_saves
kill_saves(Path(sys.argv[1]), int(sys.argv[2]))
"""


def kill_saves(run: Path, rounds: int) -> None:
    """Kill -9 a process that saves, at a random moment; then what it said to have saved is there."""
    model, moments, newest = network(), random.Random(0), 0
    for _ in range(rounds):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            save_steps(run, model, newest + 1, 10**6, writing)
        os.close(writing)
        time.sleep(moments.uniform(0, 0.25))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = os.read(reading, 1 << 16)
        os.close(reading)
        said = int.from_bytes(told[-8:], "little") if told else newest
        found = latest_checkpoint(run, verify=True)
        assert (found.step if found else 0) in (said, said + 1)  # renamed, and killed before it said so
        if found:
            assert is_of_one_step(found)
            newest = found.step
    save_steps(run, model, newest + 1, newest + 3)
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert kept == [f"step_{newest + 2:07d}", f"step_{newest + 3:07d}"]  # and nothing half beside them


@pytest.mark.parametrize("rounds", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_of_saving_costs_no_finished_checkpoint(tmp_path, rounds):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # a fork of a process with threads may hang
    command = [sys.executable, "-c", KILLING, str(tmp_path), str(rounds)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)


def test_what_a_killed_save_left_is_gone_before_the_next_one_needs_its_space(tmp_path, monkeypatch):
    left = tmp_path / "checkpoints" / ".step_0000001.1.partial"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"half")
    monkeypatch.setattr(
        checkpoint, "save_file", lambda *_, **__: pytest.fail("too late") if left.exists() else None
    )
    save_steps(tmp_path, network(), 2, 2)
    assert not left.exists()


def test_a_file_size_limit_in_the_middle_of_a_save_leaves_the_one_before(tmp_path):
    save_steps(tmp_path, network(), 1, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        with pytest.raises(OSError, match="cannot write .*step_0000002"):
            save_steps(tmp_path, network(), 2, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_0000001"]
    assert is_of_one_step(latest_checkpoint(tmp_path, verify=True))


@pytest.fixture
def small_disk(tmp_path):
    """mount(megabytes, *options): a file system of its own, where the system lets one be mounted."""
    mounted = []

    def mount(megabytes: int, *options: str) -> Path:
        folder = tmp_path / f"disk{len(mounted)}"
        folder.mkdir()
        how = ",".join([f"size={megabytes}m", *options])
        command = ["mount", "-t", "tmpfs", "-o", how, "sitvit-test", str(folder)]
        if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be mounted here")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_of_30_mb_fills_up_with_the_last_checkpoint_whole(small_disk):
    disk = small_disk(30)
    (disk / "others").write_bytes(bytes(20 << 20))
    with pytest.raises(OSError, match=r"cannot write .*No space left|cannot write .*os error 28"):
        save_steps(disk / "run", network(), 1, 3)
    assert is_of_one_step(latest_checkpoint(disk / "run", verify=True))
    assert not list((disk / "run" / "checkpoints").glob(".*"))
    last = latest_checkpoint(disk / "run").step
    (disk / "others").unlink()
    save_steps(disk / "run", network(), last + 1, last + 1)
    assert latest_checkpoint(disk / "run", verify=True).step == last + 1


def test_a_read_only_disk_is_told_and_keeps_what_it_has(small_disk):
    disk = small_disk(30)
    save_steps(disk, network(), 1, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(OSError, match="Read-only file system.*step_0000002"):
        save_steps(disk, network(), 2, 2)
    assert is_of_one_step(latest_checkpoint(disk, verify=True))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["save_file", "write_json", "sha256_of_file"])
def test_an_error_of_the_disk_at_any_file_is_told_and_leaves_the_one_before(
    tmp_path, monkeypatch, number, call
):
    save_steps(tmp_path, network(), 1, 1)

    def failing(*arguments, **options):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(runtime if call == "write_json" else checkpoint, call, failing)
        with pytest.raises(OSError, match="cannot write .*step_0000002"):
            save_steps(tmp_path, network(), 2, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_0000001"]


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(OSError, match="cannot write .*step_0000001"):
        save_steps(tmp_path, network(), 1, 1)
    assert (tmp_path / "checkpoints").read_text() == "mine"


def test_the_newest_and_every_mth_checkpoint_are_kept(tmp_path):
    for step in range(1, 11):
        save_checkpoint_of(tmp_path, step)
    prune_checkpoints(tmp_path, keep=2, keep_every=4)
    assert [path.name[-2:] for path in step_folders(tmp_path)] == ["10", "09", "08", "04"]


def save_checkpoint_of(run: Path, step: int) -> None:
    """A checkpoint of almost no bytes."""
    folder = run / "checkpoints" / f"step_{step:07d}"
    folder.mkdir(parents=True)
    record = {"format": 1, "step": step, "class_names": [], "autoencoder": {}, "files": {}}
    runtime.write_json(folder / RECORD, record)


def test_a_deletion_that_was_killed_leaves_no_half_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        save_checkpoint_of(tmp_path, step)

    def killed(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in step_folders(tmp_path)] == ["step_0000002"]
    prune_checkpoints(tmp_path, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_0000002"]


def test_a_checkpoint_of_a_later_version_is_not_passed_over_for_an_older_one(tmp_path):
    for step in (1, 2):
        save_checkpoint_of(tmp_path, step)
    path = tmp_path / "checkpoints" / "step_0000002" / RECORD
    runtime.write_json(path, {**runtime.read_json(path), "format": 99})
    with pytest.raises(ValueError, match="step_0000002 has checkpoint format 99, this version reads 1"):
        latest_checkpoint(tmp_path)


def test_a_checkpoint_records_the_versions_that_its_bits_depend_on(trained_run):
    record = latest_checkpoint(trained_run).record
    assert record["versions"].keys() == {
        "python", "sitvit", "torch", "accelerate", "diffusers", "safetensors", "numpy",
    }  # fmt: skip
