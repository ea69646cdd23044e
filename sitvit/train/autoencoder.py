"""Trains the small autoencoder that ships for the demo: diffusers' `AutoencoderKL`, from scratch.

    loss = mean |decode(z) - pixels| + kl_weight * mean KL(q(z | pixels) || N(0, 1)),  z ~ q

Afterwards the latent channels are centred and brought to one spread by changing the two 1 x 1
convolutions around the latent, which leaves every reconstruction as it was, so that the one number
`scaling_factor` gives each channel unit variance. (SD-VAE's factor was measured in the same sense.)
"""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from ..config import AutoencoderConfig
from ..data.autoencoder import (
    Autoencoder,
    images_to_pixels,
    latents_of_moments,
    new_autoencoder,
    pixels_to_images,
)
from ..data.sources import open_images, read_all
from ..data.stream import TRAINING, generator
from .optim import learning_rate

STATISTICS_IMAGES = 10_000
BATCH = 250


def train_autoencoder(config: AutoencoderConfig) -> None:
    """Train, normalise and save to `config.out` an autoencoder that `from_pretrained` loads.

    Raises:
        ValueError: no such images, sizes that do not fit, or a folder that is there already.
    """
    out = Path(config.out)
    if out.exists():
        raise ValueError(f"{out} is there already; choose another `out`, or delete it")
    start = time.monotonic()
    images = read_all(open_images(config.images), config.image_size)
    held_out = read_all(open_images(config.held_out), config.image_size)
    network = new_autoencoder(
        config.image_size, config.block_out_channels, config.latent_channels,
        config.norm_num_groups, config.seed
    )  # fmt: skip
    num_parameters = sum(p.numel() for p in network.parameters())
    runtime.say(f"{out}: {num_parameters:,} parameters, {len(images):,} images")
    _fit(network, images, config)
    network.eval()
    mean, spread = latent_statistics(network, images[:STATISTICS_IMAGES])
    normalise_latents(network, mean, spread)
    with runtime.write_aside(out) as temporary:
        network.save_pretrained(temporary)
        psnr = reconstruction_psnr(Autoencoder(str(temporary), "cpu"), held_out)
        record = {
            "images": config.images,
            "num_parameters": num_parameters,
            "num_steps": config.num_steps,
            "held_out_images": config.held_out,
            "held_out_psnr_db": round(psnr, 2),
            "command": runtime.command_line(),
            "seconds": round(time.monotonic() - start, 1),
        }
        runtime.write_json(temporary / "training.json", record)
    runtime.say(f"{out}: {psnr:.2f} dB on {len(held_out):,} held-out images")


def _fit(network: Any, images: np.ndarray, config: AutoencoderConfig) -> None:
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.lr, weight_decay=0.0, fused=True)
    with runtime.progress(config.num_steps, 0, "autoencoder", " steps") as bar:
        for step in range(config.num_steps):
            draw = generator(config.seed, TRAINING, step, 0)
            ids = draw.integers(len(images), size=config.batch_size)
            pixels = images_to_pixels(torch.from_numpy(images[ids]))
            posterior = network.encode(pixels).latent_dist
            noise = draw.standard_normal(tuple(posterior.mean.shape), dtype=np.float32)
            z = posterior.mean + posterior.std * torch.from_numpy(noise)
            error = (network.decode(z).sample - pixels).abs().mean()
            kl = posterior.kl().mean() / z[0].numel()
            loss = error + config.kl_weight * kl
            if not math.isfinite(loss.item()):
                raise ValueError(f"the autoencoder's loss is not finite at step {step + 1}; lower lr")
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(
                    step, config.lr, config.num_steps, warmup_steps=20, decay_steps=config.num_steps
                )
            optimizer.step()
            bar.update()
            bar.set_postfix_str(f"error {error.item():.4f}, KL {kl.item():.2f}", refresh=False)


@torch.no_grad()
def latent_statistics(network: Any, images: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each unscaled latent channel, float64 (C,)."""
    means, second_moments = [], []
    for batch in np.split(images, range(BATCH, len(images), BATCH)):
        pixels = images_to_pixels(torch.from_numpy(batch))
        posterior = network.encode(pixels).latent_dist
        mean, variance = posterior.mean.double(), posterior.var.double()
        means.append(mean.mean(dim=(2, 3)))
        second_moments.append((mean.square() + variance).mean(dim=(2, 3)))
    mean = torch.cat(means).mean(dim=0)
    return mean, (torch.cat(second_moments).mean(dim=0) - mean.square()).sqrt()


@torch.no_grad()
def normalise_latents(network: Any, mean: Tensor, spread: Tensor) -> None:
    """Make every channel's mean 0 and spread equal, by quant_conv and post_quant_conv alone.

    z' = r (z - mean) with r = s / spread and s the geometric mean of `spread` (C,): decode(z') is what
    decode(z) was. Sets `scaling_factor` to 1 / s.
    """
    common = spread.log().mean().exp()
    r = (common / spread).float()
    shift = mean.float()
    num_channels = len(spread)
    into, back = network.quant_conv, network.post_quant_conv
    into.weight[:num_channels] *= r.view(-1, 1, 1, 1)
    into.bias[:num_channels] = (into.bias[:num_channels] - shift) * r
    into.bias[num_channels:] += 2 * r.log()
    back.bias += torch.einsum("ocij,c->o", back.weight, shift)
    back.weight /= r.view(1, -1, 1, 1)
    network.register_to_config(scaling_factor=float(1 / common))


def reconstruction_psnr(autoencoder: Autoencoder, images: np.ndarray) -> float:
    """10 log10(255^2 / MSE) in dB of the decoded posterior means, over all `images` (N, H, W, 3)."""
    squared_error = 0.0
    for batch in np.split(images, range(BATCH, len(images), BATCH)):
        original = torch.from_numpy(batch)
        moments = autoencoder.encode(images_to_pixels(original))
        latents = latents_of_moments(moments, torch.zeros(1), autoencoder.identity)
        decoded = pixels_to_images(autoencoder.decode(latents)).cpu()
        squared_error += (decoded.double() - original.double()).square().sum().item()
    return 10 * math.log10(255**2 * images.size / squared_error)
