"""Encoding: every latent is its own image's, whoever encodes, whatever is damaged, however it ends."""

import json
import multiprocessing
import random
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, AutoencoderTiny
from PIL import Image

from sitvit import cli
from sitvit.data import encode as encoding
from sitvit.data import latents
from sitvit.data.autoencoder import (
    Autoencoder,
    images_to_pixels,
    latents_of_moments,
    new_autoencoder,
    pixels_to_images,
)
from sitvit.data.encode import encode
from sitvit.data.latents import LatentCache
from sitvit.data.live import LiveLatents
from sitvit.data.sources import open_images

from ..conftest import run_script
from ..test_chain import TORCHRUN
from .test_latents import content, encode_part

NAMES = [str(n) for n in range(9)] + ["A b", "[a]*", "é"]


@pytest.fixture
def small_shards(monkeypatch):
    for module in (latents, encoding):
        monkeypatch.setattr(
            module, "shard_ranges", lambda n: [range(i, min(i + 10, n)) for i in range(0, n, 10)]
        )


@pytest.fixture
def colours(tmp_path):
    """37 images of one colour each: red says the class, green the image."""
    order = [(c, k) for c in range(12) for k in range(3)] + [(11, 3)]
    random.Random(0).shuffle(order)
    for c, k in order:
        path = tmp_path / "photos" / NAMES[c] / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (20 * c, 40 * k, 7)).save(path)
    return tmp_path / "photos"


def colour_of(cache, index):
    """The mean colour of an item, decoded from its latent without a posterior."""
    moments = cache.moments(np.array([index]), np.zeros(1, dtype=bool))
    z = latents_of_moments(moments, torch.zeros(1), cache.autoencoder)
    return pixels_to_images(Autoencoder("pixels", "cpu").decode(z))[0].float().mean(dim=(0, 1))


def encode_colours(folder, out, num_processes=1, **options):
    source = open_images(str(folder))
    arguments = (source, "photos", Autoencoder("pixels", "cpu"), 8)
    if num_processes == 1:
        encode(*arguments, out, batch_size=4, flip=False, **options)
    else:
        encode_part(source, arguments[2], out, num_processes, image_size=8)
    return LatentCache(out)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_every_label_is_that_of_the_colour(colours, tmp_path, num_processes, small_shards):
    cache = encode_colours(colours, tmp_path / "c", num_processes)
    assert len(cache) == 37
    seen = set()
    for index in range(37):
        red, green, blue = colour_of(cache, index).tolist()
        assert cache.class_names[cache.labels[index]] == NAMES[round(red / 20)]
        seen.add((round(red / 20), round(green / 40)))
        assert blue == 7
    assert len(seen) == 37
    assert cache.source_index.tolist() == list(range(37))


def damage(folder):
    (folder / "0" / "0.png").write_bytes(b"")
    (folder / "é" / "1.png").write_text("not an image")


def test_unreadable_images_are_skipped_only_on_request_and_recorded(colours, tmp_path, small_shards):
    damage(colours)
    with pytest.raises(ValueError, match="0/0.png cannot be read .*--check lists every .*--on-error skip"):
        encode_colours(colours, tmp_path / "c")
    cache = encode_colours(colours, tmp_path / "c", on_error="skip")
    assert (len(cache), cache.manifest["num_images"], cache.manifest["on_error"]) == (35, 37, "skip")
    assert len(cache.manifest["skipped"]) == 2
    assert "0/0.png cannot be read" in cache.manifest["skipped"][0]
    assert sorted(set(range(37)) - set(cache.source_index.tolist())) == [0, 34]
    for index in range(35):
        red = colour_of(cache, index)[0].item()
        assert cache.class_names[cache.labels[index]] == NAMES[round(red / 20)]


def test_the_policy_is_the_one_under_which_images_were_left_out(colours, tmp_path, small_shards, capsys):
    damage(colours)
    encode_colours(colours, tmp_path / "c", on_error="skip")
    with pytest.raises(ValueError, match="finished, but without 2 images .*--on-error skip"):
        encode_colours(colours, tmp_path / "c", on_error="fail")
    encode_colours(colours, tmp_path / "c", on_error="skip")
    assert "35 images are encoded already and 2 skipped" in capsys.readouterr().out
    (tmp_path / "c" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="0/0.png cannot be read"):
        encode_colours(colours, tmp_path / "c", on_error="fail")
    told = capsys.readouterr().out
    assert "shard_00000.safetensors is not what it should be: 1 of its images were skipped" in told


def test_a_shard_of_nothing_but_bad_images_is_passed_with_skip(colours, tmp_path, small_shards):
    paths = open_images(str(colours)).paths
    for path in paths[10:20]:
        path.write_bytes(b"")
    cache = encode_colours(colours, tmp_path / "c", on_error="skip")
    assert cache.source_index.tolist() == [*range(10), *range(20, 37)]
    assert [str(path) in cache.manifest["skipped"][i] for i, path in enumerate(paths[10:20])] == [True] * 10
    reds = [round(colour_of(cache, i)[0].item() / 20) for i in range(27)]
    assert [NAMES[red] for red in reds] == [cache.class_names[label] for label in cache.labels]
    cache.verify()
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="none of the 37 images can be read; the first: .*0/0.png"):
        encode_colours(colours, tmp_path / "d", on_error="skip")


def test_after_a_repair_only_the_shards_of_its_images_are_encoded_again(
    colours, tmp_path, small_shards, capsys
):
    whole = (colours / "é" / "1.png").read_bytes()
    (colours / "é" / "1.png").write_bytes(b"")  # image 34, of the last shard
    with pytest.raises(ValueError, match=r"1.png cannot be read"):
        encode_colours(colours, tmp_path / "c")
    before = {name: (tmp_path / "c" / name).stat().st_mtime_ns for name in content(tmp_path / "c")}
    assert len(before) == 3
    (colours / "é" / "1.png").write_bytes(whole)
    touched = colours / NAMES[0] / "0.png"
    touched.write_bytes(touched.read_bytes())  # image 0, of the first
    cache = encode_colours(colours, tmp_path / "c")
    assert (
        "images of shard_00000.safetensors, shard_00003.safetensors were written" in capsys.readouterr().out
    )
    after = {name: (tmp_path / "c" / name).stat().st_mtime_ns for name in before}
    assert [name for name in before if before[name] != after[name]] == ["shard_00000.safetensors"]
    assert len(cache) == 37
    cache.verify()
    touched.write_bytes(touched.read_bytes())
    with pytest.raises(ValueError, match=r"is finished, but images of shard_00000.*manifest.json"):
        encode_colours(colours, tmp_path / "c")
    (colours / NAMES[0] / "9.png").write_bytes(whole)
    with pytest.raises(ValueError, match="begun with other images|num_images"):
        encode_colours(colours, tmp_path / "c")


def zip_of(folder, path):
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*.png")):
            archive.write(file, file.relative_to(folder).as_posix())
    return path


def test_after_a_repair_in_a_zip_only_the_shards_of_its_images_are_encoded_again(
    colours, tmp_path, small_shards, capsys
):
    """A zip's checksums tell which members changed, whatever became of the file's time."""
    whole = (colours / "é" / "1.png").read_bytes()
    (colours / "é" / "1.png").write_bytes(b"")  # image 34, of the last shard
    packed = zip_of(colours, tmp_path / "x.zip")
    with pytest.raises(ValueError, match=r"x.zip/é/1.png cannot be read"):
        encode_colours(packed, tmp_path / "c")
    before = {name: (tmp_path / "c" / name).stat().st_mtime_ns for name in content(tmp_path / "c")}
    assert len(before) == 3
    (colours / "é" / "1.png").write_bytes(whole)
    Image.new("RGB", (64, 64), (0, 80, 7)).save(colours / NAMES[0] / "0.png")  # image 0, of the first
    cache = encode_colours(zip_of(colours, packed), tmp_path / "c")
    assert "images of shard_00000.safetensors, shard_00003.safetensors were" in capsys.readouterr().out
    after = {name: (tmp_path / "c" / name).stat().st_mtime_ns for name in before}
    assert [name for name in before if before[name] != after[name]] == ["shard_00000.safetensors"]
    assert [round(value) for value in colour_of(cache, 0).tolist()] == [0, 80, 7]
    cache.verify()
    encode_colours(zip_of(colours, packed), tmp_path / "c")
    assert "37 images are encoded already" in capsys.readouterr().out


def test_a_tar_that_was_written_again_is_other_images(colours, tmp_path, small_shards):
    def packed():
        with tarfile.open(tmp_path / "x.tar", "w") as archive:
            archive.add(colours, "photos")
        return tmp_path / "x.tar"

    (colours / "é" / "1.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"é/1.png cannot be read"):
        encode_colours(packed(), tmp_path / "c")
    shutil.copy(colours / "é" / "2.png", colours / "é" / "1.png")
    with pytest.raises(ValueError, match="begun with other images"):
        encode_colours(packed(), tmp_path / "c")


def test_the_check_lists_every_bad_file_and_fails(colours, tmp_path):
    damage(colours)
    done = run_script("encode_latents", "--images", colours, "--check", cwd=tmp_path)
    assert done.returncode == 2
    assert "2 faults in 37 images" in done.stderr
    listed = [line for line in done.stdout.splitlines() if "cannot be read as an image" in line]
    assert [line.split(" cannot")[0][-7:] for line in listed] == ["0/0.png", "é/1.png"]
    assert not (tmp_path / "runs").exists()


def test_the_check_of_good_images_says_so(colours, capsys):
    cli.encode_latents(["--images", str(colours), "--check"])
    assert "all 37 images can be read" in capsys.readouterr().out


def test_the_label_map_is_printed_and_stored(colours, tmp_path, capsys):
    cli.encode_latents(
        [
            "--images",
            str(colours),
            "--autoencoder",
            "pixels",
            "--image-size",
            "8",
            "--out",
            str(tmp_path / "c"),
        ]
    )
    printed = capsys.readouterr().out
    assert "label, class, count: 0 0 (3), 1 1 (3)" in printed
    assert "11 é (4)" in printed
    assert LatentCache(tmp_path / "c").class_names == sorted(NAMES)
    assert "% of the time waiting for images" in printed
    cli.encode_latents(["--verify", "--out", str(tmp_path / "c")])
    assert "37 latents" in capsys.readouterr().out


def test_verify_names_every_shard_whose_content_changed(images, autoencoder, tmp_path, small_shards):
    encode(images, "x", autoencoder, 32, tmp_path / "c", 4, False)
    for number in (1, 3):
        with open(tmp_path / "c" / f"shard_0000{number}.safetensors", "r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x55")
    with pytest.raises(ValueError, match=r"shard_00001.safetensors, .*shard_00003.safetensors is damaged"):
        LatentCache(tmp_path / "c").verify()


def test_channel_statistics_make_unit_channels_and_are_undone_by_decoding(images, tmp_path, small_shards):
    new_autoencoder(32, [8, 8, 8], 4, 4, seed=3).save_pretrained(tmp_path / "a")
    autoencoder = Autoencoder(str(tmp_path / "a"), "cpu")
    encode(images, "x", autoencoder, 32, tmp_path / "c", 4, False, normalize_channels=True)
    cache = LatentCache(tmp_path / "c")
    moments = cache.moments(np.arange(64), np.zeros(64, dtype=bool))
    latents_ = latents_of_moments(moments, torch.randn(64, 4, 8, 8), cache.autoencoder)
    # 4,096 values a channel, neighbours correlated
    torch.testing.assert_close(latents_.std(dim=(0, 2, 3)), torch.ones(4), atol=0.05, rtol=0)
    torch.testing.assert_close(latents_.mean(dim=(0, 2, 3)), torch.zeros(4), atol=0.05, rtol=0)
    plain = replace(cache.autoencoder, channel_mean=None, channel_std=None)
    by_hand = autoencoder.decode(latents_of_moments(moments, torch.zeros(1), plain))
    with pytest.raises(ValueError, match="channel_mean None, expected"):
        autoencoder.identity.check(cache.autoencoder)
    autoencoder.match(cache.autoencoder)
    decoded = autoencoder.decode(latents_of_moments(moments, torch.zeros(1), cache.autoencoder))
    torch.testing.assert_close(decoded, by_hand, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="normalize_channels = true, not false"):
        encode(images, "x", Autoencoder(str(tmp_path / "a"), "cpu"), 32, tmp_path / "c", 4, False)


def test_configured_channel_statistics_are_used(tmp_path):
    network = new_autoencoder(16, [8, 8], 2, 4, seed=0)
    network.register_to_config(scaling_factor=0.5, latents_mean=[1.0, -1.0], latents_std=[2.0, 4.0])
    network.save_pretrained(tmp_path)
    identity = Autoencoder(str(tmp_path), "cpu").identity
    z = torch.randn(3, 2, 4, 4)
    mean, std = torch.tensor([1.0, -1.0]).view(2, 1, 1), torch.tensor([2.0, 4.0]).view(2, 1, 1)
    torch.testing.assert_close(identity.scale(z), (z - mean) * 0.5 / std)
    torch.testing.assert_close(identity.unscale(identity.scale(z)), z)


def test_a_tiny_autoencoder_is_stored_as_a_point_mass(images, tmp_path, small_shards):
    torch.manual_seed(0)
    widths = dict.fromkeys(("encoder_block_out_channels", "decoder_block_out_channels"), (8, 8, 8))
    blocks = {"num_encoder_blocks": (1, 1, 1), "num_decoder_blocks": (1, 1, 1)}
    AutoencoderTiny(**widths, **blocks, latent_channels=4).save_pretrained(tmp_path / "a")
    autoencoder = Autoencoder(str(tmp_path / "a"), "cpu")
    assert autoencoder.identity.downsampling == 4
    encode(images, "x", autoencoder, 32, tmp_path / "c", 4, False)
    cache = LatentCache(tmp_path / "c")
    moments = cache.moments(np.arange(5), np.zeros(5, dtype=bool))
    assert moments.shape == (5, 4, 8, 8)
    draws = [latents_of_moments(moments, torch.randn(5, 4, 8, 8), cache.autoencoder) for _ in range(2)]
    assert torch.equal(*draws)
    pixels = images_to_pixels(torch.from_numpy(np.stack([images.read(i) for i in range(5)])))
    with torch.no_grad():
        expected = AutoencoderTiny.from_pretrained(tmp_path / "a").eval().encode(pixels).latents
    torch.testing.assert_close(draws[0], expected, atol=2e-3, rtol=2e-3)  # float16


def test_sixteen_channels_without_quant_convs_and_with_a_shift_come_through(tmp_path):
    torch.manual_seed(0)
    network = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), norm_num_groups=4, latent_channels=16, scaling_factor=1.5305,
        shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    network.save_pretrained(tmp_path / "repository" / "vae")
    ours = Autoencoder(str(tmp_path / "repository" / "vae"), "cpu")
    assert (ours.identity.latent_channels, ours.latent_size(16)) == (16, 8)
    pixels = torch.rand(2, 3, 16, 16) * 2 - 1
    latents_ = latents_of_moments(ours.encode(pixels), torch.zeros(1), ours.identity)
    with torch.no_grad():
        mean = network.eval().encode(pixels).latent_dist.mean
        torch.testing.assert_close(latents_, (mean - 0.0609) * 1.5305, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(ours.decode(latents_), network.decode(mean).sample, atol=1e-4, rtol=1e-4)


def test_pixels_come_back_exactly(images, tmp_path, small_shards):
    encode(images, "x", Autoencoder("pixels", "cpu"), 32, tmp_path / "c", 4, True)
    cache = LatentCache(tmp_path / "c")
    assert cache.latent_shape == (3, 32, 32)
    for flip in (False, True):
        moments = cache.moments(np.array([3]), np.array([flip]))
        z = latents_of_moments(moments, torch.zeros(1), cache.autoencoder)
        found = pixels_to_images(Autoencoder("pixels", "cpu").decode(z))[0].numpy()
        assert np.array_equal(found, images.read(3)[:, ::-1] if flip else images.read(3))


def test_without_a_network_the_message_says_what_to_fetch_and_where_to_put_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="cannot load the autoencoder") as caught:
        Autoencoder("stabilityai/sd-vae-ft-ema", "cpu")
    words = str(caught.value)
    assert "config.json and diffusion_pytorch_model.safetensors" in words
    assert "https://huggingface.co/stabilityai/sd-vae-ft-ema" in words
    assert "give that folder" in words


def test_the_hub_is_asked_once_where_it_cannot_be_reached(monkeypatch):
    asked = []

    def unreachable(self, repository, **options):
        asked.append(repository)
        raise ConnectionError("no route to host")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", unreachable)
    monkeypatch.setattr("diffusers.AutoencoderKL.load_config", lambda *_, **__: asked.append("again"))
    with pytest.raises(ValueError, match="no such folder here, and the hub answers: no route to host"):
        Autoencoder("someone/some-vae/vae", "cpu")
    assert asked == ["someone/some-vae"]


def test_encoding_as_it_is_needed_gives_the_cached_latents(images, autoencoder, cache, monkeypatch):
    monkeypatch.setattr("sitvit.data.live.open_images", lambda where: images)
    live = LiveLatents("fashion-mnist", "fashion-autoencoder", 32, "cpu")
    ids, flips = np.array([5, 0, 63, 5]), np.array([False, True, True, True])
    live.expect(ids[:2])
    # float16 has 11 bits; other batch shapes round differently
    torch.testing.assert_close(
        live.moments(ids, flips), cache.moments(ids, flips).float(), atol=2e-3, rtol=2e-3
    )
    assert live.latent_shape == cache.latent_shape
    assert live.class_names == cache.class_names


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
def test_a_process_forked_after_the_parent_has_read_reads_too(colours):
    live = LiveLatents(str(colours), "pixels", 8, "cpu")
    ids, flips = np.arange(4), np.zeros(4, dtype=bool)
    expected = live.moments(ids, flips)
    live.expect(ids)

    def child():
        sys.exit(0 if torch.equal(live.moments(ids, flips), expected) else 1)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    process.kill()
    process.join()
    assert process.exitcode == 0


def test_two_gloo_processes_write_what_one_writes(tmp_path):
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "x.npz", images=draw.integers(0, 256, (2500, 8, 8, 3), dtype=np.uint8),
             labels=draw.integers(0, 7, 2500))  # fmt: skip
    common = ["--images", tmp_path / "x.npz", "--autoencoder", "pixels", "--image-size", 8, "--out"]
    for out, launcher in (("one", ()), ("two", TORCHRUN)):
        done = run_script("encode_latents", *common, out, cwd=tmp_path, launcher=launcher)
        assert done.returncode == 0, done.stderr
    assert content(tmp_path / "one") == content(tmp_path / "two")
    assert len(content(tmp_path / "two")) == 3


ENCODER = """
import sys, time
from pathlib import Path
from sitvit.data import encode, latents
from sitvit.data.autoencoder import Autoencoder
from sitvit.data.sources import open_images
for module in (latents, encode):
    module.shard_ranges = lambda n: [range(i, min(i + 5, n)) for i in range(0, n, 5)]
source = open_images(sys.argv[1])
read = source.read
source.read = lambda index: time.sleep(0.01) or read(index)  # an encoder that takes its time
print("begun", flush=True)
encode.encode(source, "x", Autoencoder("pixels", "cpu"), 8, Path(sys.argv[2]), 5, False)
"""


@pytest.mark.parametrize("rounds", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_encoding_that_is_killed_at_random_moments_ends_as_one_that_is_not(tmp_path, rounds):
    images = np.random.default_rng(0).integers(0, 256, (300, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(300) % 7)
    command = [sys.executable, "-c", ENCODER, tmp_path / "x.npz"]
    subprocess.run([*command, tmp_path / "whole"], check=True, capture_output=True)
    draw, cut, killed = random.Random(rounds), tmp_path / "cut", 0
    for _ in range(rounds):
        process = subprocess.Popen([*command, cut], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0, 2 / rounds))  # two seconds in all, longer than it takes
        process.kill()
        process.wait()
        process.stdout.close()
        killed += not (cut / "manifest.json").is_file()
    assert killed > 0
    subprocess.run([*command, cut], check=True, capture_output=True)
    assert content(cut) == content(tmp_path / "whole")
    found, expected = (json.loads((f / "manifest.json").read_text()) for f in (cut, tmp_path / "whole"))
    for key in ("shards", "class_names", "num_latents", "autoencoder", "skipped"):
        assert found[key] == expected[key]
    assert {path.name for path in cut.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()}
    LatentCache(cut).verify()
