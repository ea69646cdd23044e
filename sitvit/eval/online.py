"""A checkpoint's images measured as they are made: nothing is written unless asked for."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..generate.generation import write
from ..generate.job import Job
from ..generate.request import job_of
from ..generate.trained import Trained
from .sets import ImageSet, open_set
from .settings import EvaluationConfig


class Generated:
    """The images of a job as an image source; a batch is made once where images are read in order."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.class_names = job.trained.class_names
        self.labels = job.labels_of(range(job.num_images)).numpy()
        self._batch, self._images = range(0), np.empty(0, dtype=np.uint8)

    def __len__(self) -> int:
        return self.job.num_images

    def name(self, index: int) -> str:
        """Which image, for messages."""
        return f"image {index} of {self.job.trained.where}"

    def read(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, 3)."""
        if index not in self._batch:
            start = index - index % self.job.batch_size
            self._batch = range(start, start + self.job.batch_size)
            self._images = self.job.batch(self._batch)
        return self._images[index - self._batch.start]


def open_checkpoint_set(config: EvaluationConfig, device: Any, trained: Trained | None = None) -> ImageSet:
    """The images of a checkpoint: made when read, or first written to `config.keep_samples`."""
    job = job_of(config, config.sampling_batch_size, device, trained)
    if config.keep_samples is not None:
        return open_set(str(write(job, Path(config.keep_samples))), device)
    about = json.loads(json.dumps({**asdict(job.settings()), **job.sources()}))  # as it will be read again
    fingerprint = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return ImageSet(
        Generated(job), about, fingerprint, job.image_size, job.trained.trained_on, True, job.batch_size
    )
