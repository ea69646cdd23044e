"""Training straight from images: what the cache gives, without one, and as exact to continue."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sitvit.config import Config, load_config
from sitvit.data.autoencoder import EMBEDDED_AUTOENCODERS, new_autoencoder
from sitvit.data.encode import encode
from sitvit.data.live import LiveLatents
from sitvit.data.sources import open_images
from sitvit.data.stream import TrainingStream
from sitvit.train.checkpoint import find_checkpoint
from sitvit.train.loop import train

from ..conftest import run_script
from ..test_chain import TORCHRUN

LIVE = """
run: {run}
model: {{name: SiT-S/2, hidden_size: 32, depth: 2, num_heads: 2}}
data: {{images: {images}, autoencoder: {autoencoder}, image_size: 32, flip: true}}
train: {{num_steps: 6, batch_size: 8, lr: 1e-3, ema_decays: [0.9], log_every: 2, save_every: 3}}
"""


@pytest.fixture
def photos(images, tmp_path):
    for index in range(24):
        path = tmp_path / "photos" / str(images.labels[index]) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.read(index)).save(path)
    return tmp_path / "photos"


def live_config(tmp_path, photos, run, *overrides, autoencoder="fashion-autoencoder"):
    path = tmp_path / "live.yaml"
    path.write_text(LIVE.format(run=tmp_path / run, images=photos, autoencoder=autoencoder))
    return load_config(path, list(overrides), Config)


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").open()]


def test_training_from_images_sees_what_training_from_their_cache_sees(photos, tmp_path, autoencoder):
    encode(open_images(str(photos)), str(photos), autoencoder, 32, tmp_path / "c", 8, True)
    train(live_config(tmp_path, photos, "live"))
    keys = ("images", "autoencoder", "image_size")
    cached = [f"data.latents={tmp_path / 'c'}", *(f"data.{key}=null" for key in keys)]
    train(live_config(tmp_path, photos, "cached", *cached))
    # the cache keeps 11 bits of each moment
    assert losses(tmp_path / "live") == pytest.approx(losses(tmp_path / "cached"), rel=2e-3)
    live, cache = (find_checkpoint(str(tmp_path / run)).record for run in ("live", "cached"))
    for key in ("class_names", "images", "images_fingerprint", "autoencoder", "image_size"):
        assert live[key] == cache[key]


def test_a_run_from_images_continues_bit_for_bit(photos, tmp_path):
    train(live_config(tmp_path, photos, "whole"))
    train(live_config(tmp_path, photos, "cut", "train.num_steps=3"))
    train(live_config(tmp_path, photos, "cut"))
    weights = [
        load_file(
            find_checkpoint(str(tmp_path / run)).folder / "model" / "diffusion_pytorch_model.safetensors"
        )
        for run in ("whole", "cut")
    ]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_other_images_or_another_autoencoder_cannot_continue_it(photos, tmp_path):
    train(live_config(tmp_path, photos, "run", "train.num_steps=3"))
    shutil.copytree(EMBEDDED_AUTOENCODERS["fashion-autoencoder"], tmp_path / "same")
    train(live_config(tmp_path, photos, "run", "train.num_steps=3", autoencoder=tmp_path / "same"))
    new_autoencoder(32, [8, 8, 8], 4, 4, seed=0).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="are not those that the run was trained on"):
        train(live_config(tmp_path, photos, "run", autoencoder=tmp_path / "other"))
    next(photos.rglob("*.png")).unlink()
    with pytest.raises(ValueError, match="are not those that the run was trained on"):
        train(live_config(tmp_path, photos, "run"))


def test_an_image_that_cannot_be_read_ends_training_with_its_name(photos, tmp_path):
    bad = sorted(photos.rglob("*.png"))[5]
    bad.write_bytes(b"")
    with pytest.raises(ValueError, match=f"{bad} cannot be read as an image"):
        train(live_config(tmp_path, photos, "run", "train.num_steps=12"))


def test_an_image_that_cannot_be_read_costs_no_step_that_was_done(photos, tmp_path):
    live = LiveLatents(str(photos), "fashion-autoencoder", 32, "cpu")
    stream = TrainingStream(live, 0, 8, True, 0.1, len(live.class_names))
    bad = live.source.paths[int(stream.batch(2, range(8)).ids[0])]
    good = bad.read_bytes()
    bad.write_bytes(b"")
    with pytest.raises(ValueError, match="then continue with --accept-changes"):
        train(live_config(tmp_path, photos, "run"))
    assert find_checkpoint(str(tmp_path / "run")).step == 2
    bad.write_bytes(good)
    train(live_config(tmp_path, photos, "run"), accept_changes=True)
    train(live_config(tmp_path, photos, "whole"))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_save_what_was_done_when_one_comes_to_an_image_that_cannot_be_read(photos, tmp_path):
    live = LiveLatents(str(photos), "fashion-autoencoder", 32, "cpu")
    stream = TrainingStream(live, 0, 8, True, 0.1, len(live.class_names))
    bad = live.source.paths[int(stream.batch(2, range(8)).ids[6])]  # of the second process's half
    good = bad.read_bytes()
    bad.write_bytes(b"")
    live_config(tmp_path, photos, "run")
    command = ("train_sit", "--config", tmp_path / "live.yaml")
    done = run_script(*command, cwd=tmp_path, launcher=TORCHRUN)
    assert done.returncode != 0
    assert f"[process 1] error: {bad} cannot be read as an image" in done.stderr
    assert "error: another process came to an image that cannot be read, and names it" in done.stderr
    assert find_checkpoint(str(tmp_path / "run")).step == 2
    bad.write_bytes(good)
    done = run_script(*command, "--accept-changes", cwd=tmp_path, launcher=TORCHRUN)
    assert done.returncode == 0, done.stderr
    train(live_config(tmp_path, photos, "whole"))
    # one process adds the two halves in another order, in float32
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_images_are_read_ahead_once(photos, monkeypatch):
    live = LiveLatents(str(photos), "fashion-autoencoder", 32, "cpu")
    reads = []
    read = live.source.read
    monkeypatch.setattr(live.source, "read", lambda index: reads.append(index) or read(index))
    import numpy as np

    ids = np.array([3, 1, 2])
    live.expect(ids)
    live.moments(ids, np.zeros(3, dtype=bool))
    assert sorted(reads) == [1, 2, 3]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.autoencoder=null"], "training from data.images needs data.autoencoder too"),
        (["data.latents=x"], "leave out data.images, data.autoencoder, data.image_size"),
        (["data.images=null", "data.autoencoder=null", "data.image_size=null"], "data.latents is missing"),
        (["data.image_size=fast"], "data.image_size must be of type int or null"),
    ],
)
def test_a_data_section_that_is_half_of_two_things_is_refused(tmp_path, overrides, words):
    with pytest.raises(ValueError, match=words):
        live_config(tmp_path, "photos", "run", *overrides)


@pytest.mark.parametrize(("size", "words"), [(60, "56 and 64"), (36, "32 and 40"), (4, "8 and 8")])
def test_an_image_size_that_does_not_fit_autoencoder_and_patch_is_refused(photos, tmp_path, size, words):
    expected = rf"image size {size} does not fit .* a multiple of 8 \(autoencoder 4 x patch 2\).* {words}"
    with pytest.raises(ValueError, match=expected):
        train(live_config(tmp_path, photos, "run", f"data.image_size={size}"))
    assert not (tmp_path / "run").exists()
