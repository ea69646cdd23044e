"""The way of a job's first images from noise to data: the sampler's states, decoded.

The first batch is computed once more, whole, and watched. So the images of the job are what they are without
it, and the end of the way is they, bit for bit.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from ..data.autoencoder import pixels_to_images
from .draws import noise_of
from .job import Job
from .samples import sheet, write_animation, write_image

NUM_IMAGES = 8
NUM_COLUMNS = 8
NUM_FRAMES = 25


def write_trajectory(job: Job, out: Path) -> list[Path]:
    """OUT/trajectory.png, a row an image from noise to data, and OUT/trajectory.gif; returns both."""
    if job.sampler.num_ticks is None and job.sampler.couples_the_batch:
        runtime.say(
            f"{job.sampler.method} does not tell of its steps: the trajectory has noise and image alone"
        )
    strip, animation = out / "trajectory.png", out / "trajectory.gif"
    frames = trajectory(job, NUM_FRAMES)
    columns = frames[evenly(len(frames), NUM_COLUMNS)]
    write_image(strip, sheet(columns.swapaxes(0, 1)))
    write_animation(animation, [sheet(frame[None]) for frame in frames])
    return [strip, animation]


def trajectory(job: Job, num_frames: int) -> np.ndarray:
    """uint8 (T, B, H, W, 3): T up to `num_frames` states of the first images, the noise first, evenly spaced.

    B is `NUM_IMAGES`, or all where there are fewer. What is evenly spaced are the sampler's steps.
    """
    batch = range(job.sampler.block_size or job.batch_size)
    count = min(NUM_IMAGES, job.num_images, len(batch))
    states = [noise_of(job.keys(batch), job.latent_shape)[:count]]

    def keep(x: Tensor) -> None:
        states.append(x[:count].detach().to("cpu", copy=True))

    end = job.latents(batch, keep)
    kept = [states[index] for index in evenly(len(states), num_frames)[:-1]]
    frames = [pixels_to_images(job.decode(state)) for state in kept]
    last = pixels_to_images(job.decode(end))[:count]  # decoded with those that were sampled with it
    return torch.stack([frame.cpu() for frame in (*frames, last)]).numpy()


def evenly(total: int, count: int) -> list[int]:
    """Up to `count` different indices below `total`, from the first to the last."""
    return sorted({round(float(index)) for index in np.linspace(0, total - 1, count)})
