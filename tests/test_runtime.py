"""Files whole or absent, signals as flags, and what an error says."""

import errno
import multiprocessing
import os
import signal
import time

import pytest

from sitvit import runtime
from sitvit.cli import explain


def test_a_block_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    target = tmp_path / "x.json"
    runtime.write_json(target, {"a": 1})
    with pytest.raises(RuntimeError), runtime.write_aside(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert runtime.read_json(target) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_full_disk_is_told_with_the_file_that_was_wanted(tmp_path):
    wanted = "cannot write .*x.bin: .*No space left"
    with pytest.raises(OSError, match=wanted), runtime.write_aside(tmp_path / "x.bin") as temporary:
        temporary.write_bytes(b"")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not list(tmp_path.iterdir())


def test_files_and_folders_get_the_permissions_that_the_user_gives_new_files(tmp_path):
    before = os.umask(0o027)
    try:
        with runtime.write_aside(tmp_path / "folder") as temporary:
            temporary.mkdir()
            (temporary / "a").write_text("")
            (temporary / "a").chmod(0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "folder" / "a").stat().st_mode & 0o777 == 0o640


def test_damaged_and_missing_json_are_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match="x.json is not readable JSON"):
        runtime.read_json(tmp_path / "x.json")
    with pytest.raises(ValueError, match="there is no file .*y.json"):
        runtime.read_json(tmp_path / "y.json")


@pytest.mark.parametrize("number", runtime.StopRequest.SIGNALS)
def test_a_signal_becomes_a_flag_once_and_a_second_one_acts(number):
    previous = signal.getsignal(number)
    seen = []
    signal.signal(number, lambda *_: seen.append(number))
    try:
        with runtime.StopRequest() as stop:
            assert not stop.requested
            os.kill(os.getpid(), number)
            assert stop.requested
            assert not seen
            os.kill(os.getpid(), number)
            assert seen == [number]
        assert signal.getsignal(number) is not None
    finally:
        signal.signal(number, previous)


def test_more_launched_than_joined_processes_are_noticed(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="2 processes were launched, but accelerate joined 1"):
        runtime.check_process_count(1)
    runtime.check_process_count(2)


def test_a_mistake_has_a_sentence_and_a_fault_of_ours_has_none():
    assert explain(ValueError("wrong")) == "wrong"
    assert "smaller batch size" in explain(RuntimeError("CUDA out of memory."))
    assert explain(KeyError("x")) is None
    assert explain(RuntimeError("shape mismatch")) is None


def test_a_lock_falls_with_its_process_and_not_with_the_workers_it_forked(tmp_path):
    with runtime.held(tmp_path / "lock", "it"):
        fork = multiprocessing.get_context("fork")
        begun = fork.Event()
        worker = fork.Process(target=lambda: (begun.set(), time.sleep(60)))
        worker.start()
        assert begun.wait(60)
        with pytest.raises(runtime.Taken, match="it is being worked on by another process"):
            runtime.held(tmp_path / "lock", "it").__enter__()
    with runtime.held(tmp_path / "lock", "it"):
        assert worker.is_alive()
    worker.kill()
    worker.join()


def test_a_lock_of_any_content_is_held_and_one_that_is_no_file_is_named(tmp_path):
    lock = tmp_path / "lock"
    lock.write_bytes(b"\xbd\xff")
    with runtime.held(lock, "it"):
        lock.write_bytes(b"\xbd\xff")
        with pytest.raises(runtime.Taken, match="it is being worked on by another process"):
            runtime.held(lock, "it").__enter__()
    lock.unlink()
    lock.mkdir()
    with pytest.raises(ValueError, match=f"cannot write {lock}, which holds it: Is a directory"):
        runtime.held(lock, "it").__enter__()
