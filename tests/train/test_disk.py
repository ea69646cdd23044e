"""What a run will write is compared with what the disk has free, before the first step."""

import shutil
from collections import namedtuple

import pytest

from sitvit.config import TrainConfig
from sitvit.train import disk
from sitvit.train.checkpoint import find_checkpoint, latest_checkpoint
from sitvit.train.loop import train

from ..conftest import run_script

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch):
    """free(bytes): what each disk has from then on."""

    def set_free(size):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(size, 0, size))

    return set_free


def saved_bytes(run):
    folder = find_checkpoint(str(run)).folder
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_a_disk_without_room_for_the_newest_checkpoints_is_refused_before_anything_is_made(
    tiny_config, tmp_path, free
):
    """51,280 parameters, of which 512 are a frozen table of positions: weights, one average, two moments."""
    each = 4 * 51_280 * 2 + 8 * (51_280 - 512)
    free(3 * each - 1)
    with pytest.raises(ValueError, match=r"has 2.4 MB free, and .*run needs 2.4 MB: a checkpoint has 0.8 MB"):
        train(tiny_config("run", "train.save_every=2"))
    assert not (tmp_path / "run").exists()
    free(3 * each)
    train(tiny_config("run", "train.save_every=2"))
    assert saved_bytes(tmp_path / "run") == pytest.approx(each, rel=0.06)  # the rest are the files' headers


def test_a_run_that_goes_on_needs_room_for_what_is_not_there_yet(tiny_config, tmp_path, free):
    train(tiny_config("run"))
    each = 4 * 51_280 * 2 + 8 * (51_280 - 512)
    free(each)  # two are there, of three
    train(tiny_config("run", "train.num_steps=8"))
    assert latest_checkpoint(tmp_path / "run").step == 8
    free(each - 1)
    with pytest.raises(ValueError, match="needs 0.8 MB"):
        train(tiny_config("run", "train.num_steps=10"))


def test_what_is_kept_for_good_is_told_where_the_disk_will_not_hold_it(tiny_config, tmp_path, free, capsys):
    free(4 << 20)
    train(tiny_config("roomy"))
    assert "free, and" not in capsys.readouterr().out
    train(tiny_config("run", "train.save_every=1", "train.keep_every=1", "train.ema_widths=[0.1]"))
    told = capsys.readouterr().out
    assert "has 4.2 MB free, and" in told
    assert "will need 6.3 MB by its last step, with what train.keep_every and train.ema_widths keep" in told


@pytest.mark.parametrize("every", [1, 2, 3, 4, 6, 100])
@pytest.mark.parametrize("keep", [1, 2, 5])
@pytest.mark.parametrize("last", [1, 2, 3, 8, 13])
def test_the_checkpoints_that_will_lie_there_are_counted_once_each(every, keep, last):
    """Replays the saves: the most that are there at once."""
    settings = TrainConfig(num_steps=last, save_every=2, keep_checkpoints=keep, keep_every=every)
    there: list[int] = []
    most = 0
    for step in [*range(2, last, 2), last]:
        there = [*there, step]
        most = max(most, len(there))
        there = [old for old in there if old in there[-keep:] or old % every == 0]
    assert disk.num_kept(settings) + disk.num_for_good(settings) == most


def test_a_disk_that_does_not_say_its_size_is_no_reason_to_refuse(tiny_config, tmp_path, free):
    free(0)
    train(tiny_config("run"))
    assert latest_checkpoint(tmp_path / "run").step == 6


def test_the_nearest_folder_that_is_there_is_asked(tmp_path):
    assert disk.nearest_folder(tmp_path / "a" / "b") == tmp_path
    assert disk.nearest_folder(tmp_path) == tmp_path


def test_a_dry_run_says_what_the_disk_has(tmp_path, trained_run):
    config = find_checkpoint(str(trained_run)).folder / "config.yaml"
    done = run_script("train_sit", "--config", config, "--dry-run", f"run={tmp_path}/new", cwd=tmp_path)
    assert f"GB on the disk of {tmp_path}" in done.stdout
