"""A job of images: image i is a pure function of (weights, settings, seed, i).

The unit of work is the batch of indices kB .. (k + 1) B - 1, always computed whole: matrix kernels round
differently for other shapes, so with one batch size the bits do not depend on the number of processes,
on where a killed job went on, or on how many images were asked for. (They do depend, by rounding, on the
kind of device and on a CPU's thread count, which torchrun sets to 1.)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.autoencoder import Autoencoder, pixels_to_images
from ..flow.evaluations import Solution
from ..flow.guidance import Guidance
from ..flow.parameterization import Velocity, as_velocity
from ..flow.sampler import Sampler, no_progress
from ..models.shapes import check_multiple
from .draws import check_labels, check_numbers, keys_of, labels_of, noise_of
from .samples import SampleSettings
from .trained import Trained, without_name

UINT8_RULE = "clamp(127.5 x + 128, 0, 255), truncated"
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What the network computes in; state, times, autoencoder and image are float32 always."""


class Job:
    """Images that are asked for, made batch by batch; nothing is written.

    Args:
        labels: "balanced" (classes in turn), "random", or labels used in turn.
        seed_per_image: image i is the first image of seed + i, not image i of seed.
        weak: the network that autoguidance leads away from.
        image_size: (height, width) in pixels, by default the trained one.

    Raises:
        ValueError: settings that do not fit the network, each before the first image.
    """

    def __init__(
        self,
        trained: Trained,
        num_images: int,
        labels: str | list[int],
        seed: int,
        sampler: Sampler,
        guidance: Guidance,
        batch_size: int,
        device: torch.device | str = "cpu",
        seed_per_image: bool = False,
        weak: Trained | None = None,
        precision: str = "float32",
        image_size: tuple[int, int] | None = None,
    ) -> None:
        check_numbers(num_images, seed, batch_size)
        if seed_per_image:
            check_numbers(num_images, seed + num_images - 1, batch_size)
        check_labels(labels, trained.network.num_classes)
        trained.check_sampler(sampler)
        guidance.check_channels(trained.network.in_channels)
        check_precision(precision)
        if weak is not None:
            check_weak(trained, weak, guidance)
        self.trained, self.sampler, self.guidance, self.weak = trained, sampler, guidance, weak
        self.num_images, self.seed, self.labels = num_images, seed, labels
        self.seed_per_image, self.precision = seed_per_image, precision
        self.batch_size = _whole_blocks(min(batch_size, num_images), sampler.block_size)
        self.image_size = image_size or trained.image_size()
        self.latent_shape = latent_shape(trained, self.image_size)
        self.device = torch.device(device)
        null_label_needed = not guidance.is_off and weak is None
        self.null_label = trained.network.null_label if null_label_needed else None
        self.autoencoder = Autoencoder(trained.autoencoder.name, self.device)
        self.autoencoder.match(trained.autoencoder)
        self.evaluations: list[int] = []
        """Network calls of each batch made so far."""

    def settings(self) -> SampleSettings:
        """What the images follow from."""
        height, width = self.image_size
        guidance, trained, weak = self.guidance, self.trained, self.weak
        return SampleSettings(
            weights=trained.weights,
            weights_sha256=trained.weights_sha256,
            autoencoder=without_name(trained.autoencoder),
            class_names=trained.class_names,
            image_size=height if height == width else [height, width],
            seed=self.seed,
            seed_per_image=self.seed_per_image,
            num_images=self.num_images,
            labels=self.labels,
            path=trained.path,
            prediction=trained.prediction,
            sampler=self.sampler.settings(),
            cfg_scale=guidance.cfg_scale,
            guidance_interval=list(guidance.interval),
            guided_channels=guidance.channels,
            guidance_rescale=guidance.rescale,
            autoguidance=None if weak is None else weak.identity(),
            batch_size=self.batch_size,
            precision=self.precision,
            uint8_rule=UINT8_RULE,
        )

    def sources(self) -> dict[str, Any]:
        """Where the networks of `settings` lay."""
        weak = {} if self.weak is None else {"autoguidance_checkpoint": self.weak.where}
        return {"checkpoint": self.trained.where, "step": self.trained.step, **weak}

    def keys(self, indices: range) -> list[tuple[int, int]]:
        """(seed, index) of each image."""
        return keys_of(self.seed, indices, self.seed_per_image)

    def labels_of(self, indices: range) -> Tensor:
        """Labels (B,) int64 of the images `indices`."""
        num_classes = len(self.trained.class_names)
        return labels_of(self.labels, indices, self.keys(indices), num_classes)

    def batches_of(self, process_index: int = 0, num_processes: int = 1) -> list[range]:
        """The whole batches that fall to a process, of indices that may pass the last image."""
        starts = range(process_index * self.batch_size, self.num_images, num_processes * self.batch_size)
        return [range(first, first + self.batch_size) for first in starts]

    def images(
        self,
        process_index: int = 0,
        num_processes: int = 1,
        on_step: Callable[[Tensor], object] = no_progress,
    ) -> Iterator[tuple[range, np.ndarray]]:
        """Indices and images, uint8 (B, H, W, 3), of this process, batch by batch; none past the last."""
        for batch in self.batches_of(process_index, num_processes):
            indices = range(batch.start, min(batch.stop, self.num_images))
            yield indices, self.batch(batch, on_step)[: len(indices)]

    def batch(
        self,
        indices: range,
        on_step: Callable[[Tensor], object] = no_progress,
        on_call: Callable[[], object] = lambda: None,
    ) -> np.ndarray:
        """The images `indices`, uint8 (B, H, W, 3); FloatingPointError naming them where not finite.

        `on_call` is called before each call of the network, and may end the work by raising.
        """
        try:
            pixels = self.decode(self.latents(indices, on_step, on_call))
        except FloatingPointError as error:
            raise FloatingPointError(f"images {indices.start} to {indices.stop - 1}: {error}") from None
        return pixels_to_images(pixels).cpu().numpy()

    def latents(
        self,
        indices: range,
        on_step: Callable[[Tensor], object] = no_progress,
        on_call: Callable[[], object] = lambda: None,
    ) -> Tensor:
        """The latents (B, C, h, w) float32 of the images `indices`; `on_call` as in `batch`.

        Where the sampler has a `block_size`, images kS .. (k + 1) S - 1 are sampled together in any batch.
        """
        size = self.sampler.block_size
        if size is None:
            return self._sampled(indices, on_step, on_call)
        first = indices.start // size * size
        blocks = [range(start, start + size) for start in range(first, indices.stop, size)]
        made = torch.cat([self._sampled(block, on_step, on_call) for block in blocks])
        return made[indices.start - first :][: len(indices)]

    def _sampled(
        self, indices: range, on_step: Callable[[Tensor], object], on_call: Callable[[], object]
    ) -> Tensor:
        keys, velocity = self.keys(indices), self.velocity(self.labels_of(indices))

        def watched(x: Tensor, t: Tensor) -> Tensor:
            on_call()
            return velocity(x, t)

        solution = sample_latents(
            self.trained,
            self.sampler,
            watched,
            partial(noise_of, keys, self.latent_shape),
            self.device,
            on_step,
        )
        self.evaluations.append(solution.num_evaluations)
        return solution.state

    def velocity(self, labels: Tensor) -> Velocity:
        """The guided network of `labels` (B,), as the sampler takes it."""
        weak = self.weak and self.weak.over_time()
        for trained in filter(None, (self.trained, self.weak)):
            network: Any = trained.network
            network.to(self.device)
        return bind(
            self.trained,
            self.sampler,
            self.guidance,
            labels.to(self.device),
            self.null_label,
            weak,
            self.precision,
        )

    def decode(self, latents: Tensor) -> Tensor:
        """Pixels (B, 3, H, W) float32 of latents; FloatingPointError where they are not finite."""
        return check_finite(self.autoencoder.decode(latents))


def _whole_blocks(count: int, size: int | None) -> int:
    """The next multiple of `size`."""
    return count if size is None else -(-count // size) * size


def check_finite(pixels: Tensor) -> Tensor:
    """`pixels` as they are; FloatingPointError naming the first image of the batch that is not finite."""
    bad = (~torch.isfinite(pixels).flatten(1).all(dim=1)).nonzero().flatten().tolist()
    if bad:
        raise FloatingPointError(
            f"the decoded images are not finite (sample {bad[0]} of the batch, {len(bad)} in all)"
        )
    return pixels


def bind(
    trained: Trained,
    sampler: Sampler,
    guidance: Guidance,
    labels: Tensor,
    null_label: int | None,
    weak: Any = None,
    precision: str = "float32",
) -> Velocity:
    """What the sampler integrates: the network at `labels`, guided, in `precision`, under autocast."""
    guided = guidance.bind(trained.over_time(), labels, null_label, weak)
    dtype = PRECISIONS[precision]

    def computed(x: Tensor, t: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=dtype, enabled=dtype != torch.float32):
            return guided(x, t)

    if sampler.takes_noise:
        return computed
    return as_velocity(computed, trained.flow_path, trained.prediction)


@torch.no_grad()
def sample_latents(
    trained: Trained,
    sampler: Sampler,
    velocity: Velocity,
    noise: Callable[[int], Tensor],
    device: torch.device,
    on_step: Callable[[Tensor], object] = no_progress,
) -> Solution:
    """Latents from draw 0 of `noise`, with draw k + 1 for step k; kernels that repeat their bits."""
    with _repeatable():
        return sampler.sample(
            velocity,
            trained.flow_path,
            trained.prediction,
            noise(0).to(device),
            lambda step: noise(step + 1).to(device),
            on_step,
        )


@torch.no_grad()
def encode_latents(trained: Trained, sampler: Sampler, velocity: Velocity, latents: Tensor) -> Solution:
    """The noise that the sampler carries to `latents`; ValueError where it draws noise on its way."""
    with _repeatable():
        return sampler.encode(velocity, trained.flow_path, trained.prediction, latents)


def _repeatable() -> AbstractContextManager[None]:
    """Kernels that repeat their bits; convolutions keep all of float32, which CUDA's would not."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)


def latent_shape(trained: Trained, image_size: tuple[int, int]) -> tuple[int, int, int]:
    """(C, h, w) of images of that size; ValueError naming the nearest that autoencoder and patches allow."""
    factor, patch = trained.autoencoder.downsampling, trained.network.patch_size
    for side, length in zip(("height", "width"), image_size, strict=True):
        check_multiple(f"image {side}", length, factor * patch, f"autoencoder {factor} x patch {patch} = ")
    return trained.network.in_channels, image_size[0] // factor, image_size[1] // factor


def check_precision(name: str) -> None:
    """ValueError unless `name` is known."""
    if name not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {name!r}")


def check_weak(trained: Trained, weak: Trained, guidance: Guidance) -> None:
    """ValueError unless `weak` is a worse network for the same latents and labels, and guidance is on."""
    if guidance.is_off:
        raise ValueError("autoguidance with cfg_scale 1 does nothing; give a scale above 1")
    for name in ("path", "prediction", "class_names"):
        ours, other = getattr(trained, name), getattr(weak, name)
        if ours != other:
            raise ValueError(f"autoguidance: {weak.where} has {name} {other}, {trained.where} has {ours}")
    weak.autoencoder.check(trained.autoencoder)
