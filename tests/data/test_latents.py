"""The latent cache: whole or unfinished, the same however it was made, refused when it does not fit."""

import itertools

import numpy as np
import pytest
import torch

from sitvit.data import encode as encoding
from sitvit.data import latents
from sitvit.data.autoencoder import Autoencoder, images_to_pixels, new_autoencoder
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
    with pytest.raises(ValueError, match="autoencoder = "):
        make(images, Autoencoder(str(tmp_path / "other"), "cpu"), tmp_path / "c")


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


def test_all_images_that_cannot_be_read_are_named_in_one_message(images, autoencoder, tmp_path):
    bad = Unreadable(images.source, images.count)
    with pytest.raises(ValueError, match="2 of 64 images cannot be read: image 7 .*; image 40 "):
        make(bad, autoencoder, tmp_path / "c")


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
