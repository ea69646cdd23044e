"""The training stream: what happens at global position i of step s follows from (seed, s, i) alone.

Which image, whether it is mirrored, its posterior noise, its path noise x_0, its time and whether its
label is dropped are drawn from a counter-based generator (Philox-4x64, Salmon et al. 2011) whose key
is (seed, purpose) and whose counter is (i, s). So nothing has to be saved for a resume, any number of
processes with the same global batch sees the same stream, and two networks trained with one seed see
the same images, noise and times: their comparison is paired.

Images come in a fresh permutation each epoch; a batch may straddle two epochs, so each image is seen
exactly once an epoch and a data set smaller than the batch is no special case.

A step is one item of the stream, so a DataLoader can cut batches in other processes:
DataLoader(Slices(stream, positions, num_steps), batch_size=None, num_workers=2). None are needed.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from .autoencoder import latents_of_moments
from .latents import Latents, check_shared_memory

PERMUTATION, TRAINING, SAMPLING, LABELS, ANALYSIS = range(5)
"""Purposes: the second word of the key, so that no two uses of one seed share a draw."""


def generator(seed: int, purpose: int, step: int, position: int) -> np.random.Generator:
    """The generator of one (seed, purpose, step, position); its first 2^64 draws are its own."""
    counter = np.array([0, 0, position, step], dtype=np.uint64)
    return np.random.Generator(
        np.random.Philox(key=np.array([seed, purpose], dtype=np.uint64), counter=counter)
    )


@dataclass(frozen=True)
class TrainingBatch:
    """A process's slice of a global batch: `ids` (B,) are cache positions, `u` (B,) uniform draws in [0, 1]
    of which a distribution makes the times; noise `x_0`, latents `x_1` and `labels` as everywhere."""

    ids: np.ndarray
    x_0: Tensor
    x_1: Tensor
    u: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> "TrainingBatch":
        """The batch with its tensors on `device`."""
        tensors = (self.x_0, self.x_1, self.u, self.labels)
        return TrainingBatch(self.ids, *(tensor.to(device, non_blocking=True) for tensor in tensors))

    def parts(self, size: int) -> list["TrainingBatch"]:
        """The batch cut into parts of `size` samples, which divides it."""
        assert len(self.ids) % size == 0
        starts = range(0, len(self.ids), size)
        return [
            TrainingBatch(
                self.ids[i : i + size],
                self.x_0[i : i + size],
                self.x_1[i : i + size],
                self.u[i : i + size],
                self.labels[i : i + size],
            )
            for i in starts
        ]


class TrainingStream:
    """Cuts training batches out of `cache`.

    Args:
        seed: a whole number from 0.
        batch_size: the global batch, over all processes.
        flip: mirror half of the images (the cache must hold the mirrored moments).
        class_dropout_prob: how often a label becomes `null_label`.
    """

    def __init__(
        self,
        cache: Latents,
        seed: int,
        batch_size: int,
        flip: bool,
        class_dropout_prob: float,
        null_label: int,
    ) -> None:
        if flip and not cache.has_flip:
            raise ValueError(
                f"data.flip is on, but {cache.where} was encoded without --flip; encode again with it"
            )
        self.cache, self.seed, self.batch_size = cache, seed, batch_size
        self.flip, self.class_dropout_prob, self.null_label = flip, class_dropout_prob, null_label
        self._orders: dict[int, np.ndarray] = {}

    def batch(self, step: int, positions: range) -> TrainingBatch:
        """Positions `positions` (within 0 .. batch_size - 1) of step `step`, counted from 0."""
        uniforms, noises = [], []
        for position in positions:
            draw = generator(self.seed, TRAINING, step, position)
            uniforms.append(draw.random(3))
            noises.append(draw.standard_normal((2, *self.cache.latent_shape), dtype=np.float32))
        time, flip, drop = np.stack(uniforms, axis=1)
        posterior_noise, x_0 = torch.from_numpy(np.stack(noises, axis=1))
        ids = self.ids(step, positions)
        moments = self.cache.moments(ids, flip < 0.5 if self.flip else np.zeros(len(ids), bool))
        self.cache.expect(self.ids(step + 1, positions))
        labels = np.where(drop < self.class_dropout_prob, self.null_label, self.cache.labels[ids])
        return TrainingBatch(
            ids=ids,
            x_0=x_0,
            x_1=latents_of_moments(moments, posterior_noise.to(moments.device), self.cache.autoencoder),
            u=torch.from_numpy(time.astype(np.float32)),
            labels=torch.from_numpy(labels),
        )

    def ids(self, step: int, positions: range) -> np.ndarray:
        """The images at `positions` of step `step`."""
        return np.array([self._image(step * self.batch_size + position) for position in positions])

    def _image(self, global_position: int) -> int:
        epoch, offset = divmod(global_position, len(self.cache))
        if epoch not in self._orders:
            draws = generator(self.seed, PERMUTATION, epoch, 0).bit_generator.random_raw(len(self.cache))
            order = np.argsort(draws, kind="stable")
            # The running epoch and the next; a batch larger than the data set spans more.
            kept = {e: self._orders[e] for e in self._orders if abs(e - epoch) <= 1}
            self._orders = {**kept, epoch: order}
        return int(self._orders[epoch][offset])


class Slices(Dataset[TrainingBatch]):
    """Item s is what a process trains on at step s: `positions` of the stream; `num_steps` items."""

    def __init__(self, stream: TrainingStream, positions: range, num_steps: int) -> None:
        self.stream, self.positions, self.num_steps = stream, positions, num_steps

    def __len__(self) -> int:
        return self.num_steps

    def __getitem__(self, step: int) -> TrainingBatch:
        batch = self.stream.batch(step, self.positions)
        check_shared_memory(sum(t.nbytes for t in (batch.x_0, batch.x_1, batch.u, batch.labels)))
        return batch
