"""The latent cache: whole or unfinished, the same however it was made, refused when it does not fit."""

import itertools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader

from sitvit.data import encode as encoding
from sitvit.data import latents
from sitvit.data.autoencoder import Autoencoder, images_to_pixels, new_autoencoder
from sitvit.data.demo import sha256_of_file
from sitvit.data.encode import encode
from sitvit.data.latents import LatentCache

from ..conftest import FirstImages


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Ten images a shard, so that 64 make seven."""
    for module in (latents, encoding):
        monkeypatch.setattr(
            module, "shard_ranges", lambda n: [range(i, min(i + 10, n)) for i in range(0, n, 10)]
        )


def content(folder):
    return {path.name: path.read_bytes() for path in folder.glob("shard_*")}


def make(images, autoencoder, folder, **options):
    settings = {"image_size": 32, "batch_size": 4, "flip": True, **options}
    encode(images, "fashion-mnist", autoencoder, out=folder, **settings)
    return LatentCache(folder)


def test_each_latent_is_its_own_images(images, autoencoder, tmp_path):
    cache = make(images, autoencoder, tmp_path / "c")
    for index in (0, 9, 10, 63):
        pixels = images_to_pixels(torch.from_numpy(images.read(index)[None].copy()))
        for flip in (False, True):
            expected = autoencoder.encode(pixels.flip(-1) if flip else pixels)
            found = cache.moments(np.array([index]), np.array([flip])).float()
            # float16 has 11 bits; other batch shapes round differently
            torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    assert np.array_equal(cache.labels, images.labels)
    assert len(cache) == 64


def test_several_processes_write_the_same_bytes(images, autoencoder, tmp_path):
    make(images, autoencoder, tmp_path / "one")
    folder = tmp_path / "three"
    encode_part(images, autoencoder, folder, 3)
    assert content(tmp_path / "one") == content(folder)


def encode_part(images, autoencoder, folder, num_processes, image_size=32):
    """All processes of a job in one, each on a thread, with a real barrier."""
    from threading import Barrier, Thread

    barrier = Barrier(num_processes)
    errors = []

    def run(index):
        try:
            encode(
                images, "fashion-mnist", autoencoder, image_size, folder, 4, True, index, num_processes,
                barrier.wait,
            )  # fmt: skip
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [Thread(target=run, args=(index,)) for index in range(num_processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


class Dies(FirstImages):
    """Fails at its nth read, as a killed process would."""

    def __init__(self, images, after):
        super().__init__(images.source, images.count)
        self.reads = itertools.count()
        self.after = after

    def read(self, index):
        if next(self.reads) >= self.after:
            raise KeyboardInterrupt
        return super().read(index)


def test_a_killed_job_continues_to_the_same_bytes_and_keeps_finished_work(images, autoencoder, tmp_path):
    make(images, autoencoder, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        make(Dies(images, 35), autoencoder, tmp_path / "killed")
    done = content(tmp_path / "killed")
    assert 0 < len(done) < 7
    with pytest.raises(ValueError, match="unfinished latent cache"):
        LatentCache(tmp_path / "killed")
    make(Dies(images, 64 - 10 * len(done)), autoencoder, tmp_path / "killed")
    assert content(tmp_path / "killed") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "key"),
    [({"flip": False}, "flip"), ({"image_size": 64}, "image_size")],
)
def test_other_settings_are_refused_by_key_and_nothing_is_changed(
    images, autoencoder, tmp_path, options, key
):
    make(images, autoencoder, tmp_path / "c")
    before = content(tmp_path / "c")
    with pytest.raises(ValueError, match=f"{key} = "):
        make(images, autoencoder, tmp_path / "c", **options)
    assert content(tmp_path / "c") == before


def test_another_autoencoder_and_other_images_are_refused(images, autoencoder, tmp_path):
    make(images, autoencoder, tmp_path / "c")
    with pytest.raises(ValueError, match="begun with other images"):
        make(FirstImages(images.source, 63), autoencoder, tmp_path / "c")
    new_autoencoder(32, [8, 8, 8], 4, 4, seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r'autoencoder = {"name": "fash.*", "sha256": "8.*", "scal'
    ) as caught:
        make(images, Autoencoder(str(tmp_path / "other"), "cpu"), tmp_path / "c")
    assert "downsampling" not in str(caught.value)  # which is the same


def test_an_autoencoder_that_was_moved_to_another_folder_continues_its_cache(images, tmp_path, capsys):
    """Its weights say which it is, and not its name; the settings then say where it lies now."""
    new_autoencoder(32, [8, 8, 8], 4, 4, seed=1).save_pretrained(tmp_path / "here")
    with pytest.raises(KeyboardInterrupt):
        make(Dies(images, 35), Autoencoder(str(tmp_path / "here"), "cpu"), tmp_path / "c")
    done = content(tmp_path / "c")
    (tmp_path / "here").rename(tmp_path / "there")
    moved = Autoencoder(str(tmp_path / "there"), "cpu")
    cache = make(Dies(images, 64 - 10 * len(done)), moved, tmp_path / "c")
    assert cache.autoencoder.name == str(tmp_path / "there")
    cache.verify()
    (tmp_path / "there").rename(tmp_path / "here")
    make(images, Autoencoder(str(tmp_path / "here"), "cpu"), tmp_path / "c").verify()
    assert "64 images are encoded already" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["half", "empty", "gone"])
def test_a_damaged_shard_is_named_before_training(images, autoencoder, tmp_path, damage):
    make(images, autoencoder, tmp_path / "c")
    shard = tmp_path / "c" / "shard_00003.safetensors"
    if damage == "gone":
        shard.unlink()
    else:
        with open(shard, "r+b") as file:
            file.truncate(0 if damage == "empty" else shard.stat().st_size // 2)
    with pytest.raises(ValueError, match="shard_00003.safetensors is damaged"):
        LatentCache(tmp_path / "c")


def test_a_folder_of_other_files_is_not_written_into(images, autoencoder, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="not a latent cache"):
        make(images, autoencoder, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_latent_that_is_not_finite_names_its_image(images, autoencoder, tmp_path, monkeypatch):
    encode_whole = autoencoder.encode

    def broken(pixels):
        moments = encode_whole(pixels)
        moments[2] = float("inf")
        return moments

    monkeypatch.setattr(autoencoder, "encode", broken)
    with pytest.raises(ValueError, match=r"\[2\] is not finite"):
        make(images, autoencoder, tmp_path / "c")


class Unreadable(FirstImages):
    """Two of the images cannot be read."""

    def read(self, index):
        if index in (7, 40):
            raise ValueError(f"image {index} cannot be read")
        return super().read(index)


def test_an_image_that_cannot_be_read_ends_the_job_before_any_other_is_read(images, autoencoder, tmp_path):
    bad = Unreadable(images.source, images.count)
    reads = []
    bad.read = lambda index: reads.append(index) or Unreadable.read(bad, index)
    with pytest.raises(ValueError, match="^image 7 cannot be read. --check lists every such image"):
        make(bad, autoencoder, tmp_path / "c")
    assert max(reads) < 20  # what was read ahead, and not all 64 once more


def rewritten(path, change):
    """A shard with other tensors, still a whole safetensors file."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def put(name, value):
    return lambda tensors: tensors.__setitem__(name, value(tensors[name]))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("labels", lambda t: t + 1), "its images are not in order, or have other labels"),
        (put("index", lambda t: t + 10), "its images are not 20 to 29"),
        (put("index", lambda t: t.clamp(max=25)), "its images are not in order"),
        (put("moments", lambda t: t[:, :, :-1].contiguous()), "its moments are float16"),
        (put("moments", lambda t: t.float()), "its moments are float32"),
        (lambda tensors: tensors.pop("moments_flip"), "it holds index, labels, moments in place of"),
    ],
)
def test_a_kept_shard_that_is_another_is_made_again_and_told(
    images, autoencoder, tmp_path, capsys, change, why
):
    make(images, autoencoder, tmp_path / "c")
    before = content(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    rewritten(tmp_path / "c" / "shard_00002.safetensors", change)
    make(images, autoencoder, tmp_path / "c")
    assert content(tmp_path / "c") == before
    assert f"shard_00002.safetensors is not what it should be: {why}" in capsys.readouterr().out


@pytest.mark.parametrize("data", [b"", b"\x08", b"\xff" * 100, b"\x02" + bytes(7) + b"[]", None])
def test_a_kept_file_that_is_no_shard_is_made_again_and_told(images, autoencoder, tmp_path, capsys, data):
    make(images, autoencoder, tmp_path / "c")
    before = content(tmp_path / "c")
    (tmp_path / "c" / "manifest.json").unlink()
    shard = tmp_path / "c" / "shard_00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100] if data is None else data)
    make(images, autoencoder, tmp_path / "c")
    assert content(tmp_path / "c") == before
    assert "shard_00002.safetensors is not what it should be" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_latents", 63),
        ("skipped", ["x"]),
        ("num_images", 65),
        ("class_names", [str(i) for i in range(11)]),
    ],
)
def test_verify_compares_the_manifest_with_settings_and_shards(images, autoencoder, tmp_path, key, value):
    make(images, autoencoder, tmp_path / "c")
    path = tmp_path / "c" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ValueError, match=r"manifest.json is not this cache's, or was changed"):
        LatentCache(tmp_path / "c").verify()


def test_verify_finds_images_that_are_there_twice(images, autoencoder, tmp_path):
    make(images, autoencoder, tmp_path / "c")
    shard = tmp_path / "c" / "shard_00002.safetensors"
    rewritten(shard, put("index", lambda t: t - 10))
    path = tmp_path / "c" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["shards"][2]["sha256"] = sha256_of_file(shard)
    manifest["shards"][2]["bytes"] = shard.stat().st_size
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="the shards do not hold each image once"):
        LatentCache(tmp_path / "c").verify()


def test_a_plain_dataloader_collates_the_cache(cache):
    batches = list(DataLoader(cache, batch_size=50))
    assert [len(labels) for _, labels in batches] == [50, 14]
    expected = cache.moments(np.arange(64), np.zeros(64, dtype=bool))
    assert torch.equal(torch.cat([moments for moments, _ in batches]), expected)
    assert torch.cat([labels for _, labels in batches]).tolist() == cache.labels.tolist()


@pytest.mark.parametrize("content", ['{"format": 2}', "[]", "{"])
def test_a_strange_manifest_is_refused_by_name(images, autoencoder, tmp_path, content):
    make(images, autoencoder, tmp_path / "c")
    (tmp_path / "c" / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match="manifest.json"):
        LatentCache(tmp_path / "c")


def test_a_shard_with_a_strange_header_is_refused_by_name(images, autoencoder, tmp_path):
    make(images, autoencoder, tmp_path / "c")
    with open(tmp_path / "c" / "shard_00001.safetensors", "r+b") as file:
        file.write(b"\xff" * 40)
    with pytest.raises(ValueError, match="shard_00001.safetensors is damaged: its header"):
        LatentCache(tmp_path / "c")
