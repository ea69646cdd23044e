"""A real image to its noise along the ODE, and back: how well sampler and network know it.

    image -> latents x_1 (the posterior's mean) -> noise x_0 (`Sampler.encode`) -> latents -> image

Guidance is applied alike on both ways: the ODE of the guided velocity is run back, and forth again.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..data.autoencoder import images_to_pixels, latents_of_moments, pixels_to_images
from ..data.images import center_crop, read_image
from .job import Job, encode_latents, sample_latents
from .samples import sheet, write_image


@dataclass(frozen=True)
class Reversed:
    """The three images, uint8 (3, H, W, 3): original, the autoencoder's reconstruction, noise and back.

    The errors are root mean squares: of the latents that came back against those that went, in their own
    units (about 1), and of the third image against the second and of the second against the first, of 255.
    """

    images: np.ndarray
    noise: Tensor
    latent_error: float
    pixel_error: float
    autoencoder_error: float


def reverse(job: Job, image: Path) -> Reversed:
    """Carry the image file, cropped as for training, to its noise and back, as the job's first label.

    Raises:
        ValueError: no readable image, a size that is not square, or a sampler that cannot be run back.
        FloatingPointError: the way is not finite.
    """
    height, width = job.image_size
    if height != width:
        raise ValueError(
            f"--reverse crops to a square, but the size is {height} x {width}: give --image-size"
        )
    original = torch.from_numpy(center_crop(read_image(image), height).copy())[None]
    latents = _latents_of(job, original)
    velocity = job.velocity(job.labels_of(range(1)))
    noise = encode_latents(job.trained, job.sampler, velocity, latents).state
    back = sample_latents(job.trained, job.sampler, velocity, lambda draw: noise, job.device).state
    reconstruction, returned = job.decode(latents), job.decode(back)
    images = torch.cat([original, *(pixels_to_images(x).cpu() for x in (reconstruction, returned))])
    return Reversed(
        images=images.numpy(),
        noise=noise.cpu(),
        latent_error=_rmse(back, latents),
        pixel_error=127.5 * _rmse(returned, reconstruction),
        autoencoder_error=127.5 * _rmse(reconstruction, images_to_pixels(original).to(job.device)),
    )


def write_reversed(job: Job, image: Path, out: Path | None) -> tuple[Path, Reversed]:
    """Write the three side by side into the folder `out`, by default HOME/reversed; ValueError if there."""
    label = int(job.labels_of(range(1)))
    step = "" if job.trained.step is None else f"-step_{job.trained.step:07d}"
    name = f"{image.stem}-class{label}{step}-{job.trained.weights}-{job.sampler.name}"
    path = (out or job.trained.home / "reversed") / f"{name}-cfg{job.guidance.cfg_scale:g}.png"
    if path.exists():
        raise ValueError(f"{path} is there already; choose another --out, or delete it")
    found = reverse(job, image)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_image(path, sheet(found.images[None]))
    return path, found


def _latents_of(job: Job, images: Tensor) -> Tensor:
    """The latents (B, C, h, w) of uint8 (B, H, W, 3), without a draw: the mean of the posterior."""
    moments = job.autoencoder.encode(images_to_pixels(images))
    return latents_of_moments(moments, torch.zeros((), device=moments.device), job.autoencoder.identity)


def _rmse(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).square().mean().sqrt())
