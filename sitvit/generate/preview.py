"""Previews of a run: the same few images, of the same noise and labels, every so many steps.

They are drawn by the job that samples a checkpoint, from a copy of the weights' average, so the training
network, its compiled code and torch's generators stay as they are.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from .. import runtime
from ..flow.guidance import Guidance
from ..flow.sampler import Sampler
from ..flow.samplers import find_sampler
from ..train.trainer import Row, Trainer
from .job import Job
from .samples import write_image
from .trained import Trained, of_trainer

ROWS, COLUMNS = 4, 8
NUM_STEPS = 25
"""Of Heun for a SiT, of DDIM for a DiT: fewer than for samples, since training waits."""


class Preview:
    """A hook that writes RUN/previews/step_0001000.png every `train.preview_every` steps, 0: never.

    The main process draws while the others wait. What keeps it from drawing (a disk that is full, an
    autoencoder that is gone, images that are not finite) is said, and training goes on.
    """

    def __call__(self, trainer: Trainer, row: Row | None) -> None:
        """Draw, where this step is one that draws."""
        every = trainer.settings.preview_every
        if not every or trainer.step % every:
            return
        with beside_training():
            trained = of_trainer(trainer)
            if trainer.handle.is_main_process:
                try:
                    write_preview(trainer, trained)
                except (ValueError, OSError, FloatingPointError) as error:
                    runtime.say(f"no preview of step {trainer.step}: {error}")
        trainer.handle.wait_for_everyone()


def write_preview(trainer: Trainer, trained: Trained) -> Path:
    """Draw the preview of the step that `trainer` is at, of its weights `trained`; returns its file.

    Raises:
        ValueError: the autoencoder is not there, or another.
        FloatingPointError: the images are not finite.
        OSError: the disk cannot be written.
    """
    job = preview_job(trained, trainer.handle.device)
    images = job.batch(range(job.num_images))
    path = trainer.run / "previews" / f"step_{trainer.step:07d}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_image(path, grid_of(images, COLUMNS))
    return path


def preview_job(trained: Trained, device: torch.device) -> Job:
    """Its images: classes in turn, seed 0, without guidance."""
    count = ROWS * COLUMNS
    return Job(trained, count, "balanced", 0, _sampler(trained), Guidance(1.0), count, device)


def _sampler(trained: Trained) -> Sampler:
    return find_sampler("dit-ddim" if trained.is_discrete else "heun", {"num_steps": NUM_STEPS})


def grid_of(images: np.ndarray, columns: int) -> np.ndarray:
    """Images (B, H, W, 3), row by row, as one (rows H, columns W, 3); `columns` divides B."""
    count, height, width, channels = images.shape
    cells = images.reshape(count // columns, columns, height, width, channels)
    return cells.swapaxes(1, 2).reshape(count // columns * height, columns * width, channels)


@contextlib.contextmanager
def beside_training() -> Iterator[None]:
    """Torch's generators and choice of TF32 are a fresh process's inside, and what they were afterwards."""
    matrices, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    with torch.random.fork_rng():
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(matrices)
            torch.backends.cudnn.allow_tf32 = convolutions
