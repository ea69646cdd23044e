"""The embedded autoencoder, its scale, and the way from pixels to latents and back."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from sitvit.data.autoencoder import (
    EMBEDDED_AUTOENCODERS,
    Autoencoder,
    AutoencoderIdentity,
    images_to_pixels,
    latents_of_moments,
    new_autoencoder,
    pixels_to_images,
)
from sitvit.data.demo import embedded_fashion
from sitvit.train.autoencoder import latent_statistics, normalise_latents, reconstruction_psnr

FOLDER = EMBEDDED_AUTOENCODERS["fashion-autoencoder"]


@pytest.fixture(scope="module")
def held_out():
    """500 images that the embedded autoencoder was not trained on."""
    source = embedded_fashion()
    return np.stack([source.read(i) for i in range(500)])


def test_the_embedded_autoencoder_is_a_plain_diffusers_folder_of_a_megabyte():
    network = AutoencoderKL.from_pretrained(FOLDER)
    assert tuple(network.config.block_out_channels) == (16, 32, 32)
    assert network.config.latent_channels == 4
    assert sum(p.numel() for p in network.parameters()) == 242_327
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1.1e6


def test_its_reconstructions_of_held_out_images_have_24_db(autoencoder, held_out):
    assert reconstruction_psnr(autoencoder, held_out) > 24


def test_its_latents_have_unit_spread_in_each_channel(autoencoder, held_out):
    moments = autoencoder.encode(images_to_pixels(torch.from_numpy(held_out)))
    latents = latents_of_moments(moments, torch.randn(500, 4, 8, 8), autoencoder.identity)
    spread = latents.std(dim=(0, 2, 3))
    torch.testing.assert_close(spread, torch.ones(4), atol=0.05, rtol=0)
    torch.testing.assert_close(latents.mean(dim=(0, 2, 3)), torch.zeros(4), atol=0.05, rtol=0)


def test_encode_and_decode_scale_as_diffusers_users_do_by_hand(autoencoder, held_out):
    network = AutoencoderKL.from_pretrained(FOLDER).eval()
    pixels = images_to_pixels(torch.from_numpy(held_out[:4]))
    with torch.no_grad():
        posterior = network.encode(pixels).latent_dist
        expected = network.decode(posterior.mean).sample
        by_hand = posterior.mean * network.config.scaling_factor
    moments = autoencoder.encode(pixels)
    latents = latents_of_moments(moments, torch.zeros(4, 4, 8, 8), autoencoder.identity)
    torch.testing.assert_close(latents, by_hand)
    torch.testing.assert_close(autoencoder.decode(latents), expected, atol=1e-5, rtol=1e-5)


def test_another_autoencoders_own_scale_and_shift_are_used(tmp_path):
    network = new_autoencoder(16, [8, 8], latent_channels=3, norm_num_groups=4, seed=0)
    network.register_to_config(scaling_factor=0.36, shift_factor=0.11)
    network.save_pretrained(tmp_path)
    ours = Autoencoder(str(tmp_path), "cpu")
    assert ours.identity.downsampling == 2
    mean = torch.randn(2, 3, 8, 8)
    moments = torch.cat([mean, torch.zeros_like(mean)], dim=1)
    latents = latents_of_moments(moments, torch.zeros_like(mean), ours.identity)
    torch.testing.assert_close(latents, (mean - 0.11) * 0.36)
    with torch.no_grad():
        torch.testing.assert_close(
            ours.decode(latents), network.eval().decode(mean).sample, atol=1e-5, rtol=1e-4
        )


def test_normalising_the_latents_changes_no_reconstruction(held_out):
    network = new_autoencoder(32, [8, 8, 8], latent_channels=4, norm_num_groups=4, seed=3).eval()
    pixels = images_to_pixels(torch.from_numpy(held_out[:8]))
    with torch.no_grad():
        before = network.encode(pixels).latent_dist
        decoded = network.decode(before.mean).sample
        mean, spread = latent_statistics(network, held_out)
        normalise_latents(network, mean, spread)
        after = network.encode(pixels).latent_dist
        torch.testing.assert_close(network.decode(after.mean).sample, decoded, atol=1e-5, rtol=1e-4)
        ratio = after.std / before.std
    mean, spread = latent_statistics(network, held_out)
    scaled = spread * network.config.scaling_factor
    torch.testing.assert_close(scaled, torch.ones(4, dtype=torch.float64), atol=1e-5, rtol=0)
    assert mean.abs().max() < 1e-5
    assert ratio.std(dim=(0, 2, 3)).max() < 1e-4  # one factor a channel


def test_the_posterior_noise_is_scaled_by_its_standard_deviation():
    identity = AutoencoderIdentity("x", "0", 2.0, 0.0, 1, 4)
    moments = torch.tensor([[[[1.0]], [[2 * np.log(3.0)]]]])
    latents = latents_of_moments(moments, torch.ones(1, 1, 1, 1), identity)
    torch.testing.assert_close(latents, torch.full((1, 1, 1, 1), 2 * (1 + 3.0)))


def test_uint8_survives_the_round_trip_through_pixels():
    images = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(-1, -1, -1, 3)
    assert torch.equal(pixels_to_images(images_to_pixels(images)), images)


def test_the_uint8_rule_is_the_official_one():
    pixels = torch.linspace(-1.2, 1.2, 999).view(1, 1, 1, -1).expand(1, 3, 1, -1)
    expected = torch.clamp(127.5 * pixels + 128.0, 0, 255).permute(0, 2, 3, 1).to(torch.uint8)
    assert torch.equal(pixels_to_images(pixels), expected)


@pytest.mark.parametrize(
    ("size", "words"), [(30, "28 and 32"), (0, "4 and 8"), (-8, "4 and 8"), (3, "4 and 8")]
)
def test_an_image_size_that_does_not_fit_is_refused_with_the_nearest(autoencoder, size, words):
    with pytest.raises(ValueError, match=words):
        autoencoder.latent_size(size)


def test_a_folder_that_is_no_autoencoder_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="has no config.json"):
        Autoencoder(str(tmp_path), "cpu")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "UNet2DModel"}))
    with pytest.raises(ValueError, match="describes UNet2DModel"):
        Autoencoder(str(tmp_path), "cpu")
    shutil.copy(FOLDER / "config.json", tmp_path)
    with pytest.raises(ValueError, match="cannot load the autoencoder"):
        Autoencoder(str(tmp_path), "cpu")


def test_another_autoencoder_is_refused_naming_the_difference(autoencoder):
    other = SimpleNamespace(**{**vars(autoencoder.identity), "scaling_factor": 0.5, "name": "elsewhere"})
    with pytest.raises(ValueError, match=r"scaling_factor .* expected 0\.5"):
        autoencoder.identity.check(AutoencoderIdentity(**vars(other)))
    autoencoder.identity.check(AutoencoderIdentity(**{**vars(autoencoder.identity), "name": "elsewhere"}))
