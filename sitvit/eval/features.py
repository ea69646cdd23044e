"""Networks that turn images into the features whose distributions are compared.

An extractor has a name, the name of the distance that it makes, a hash of its weights, a feature width,
`class_names`, and maps uint8 images to float32 `Features`. `CallableFeatures` makes one of any function.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.autoencoder import images_to_pixels, sha256_of_weights
from .classifier import EMBEDDED_CLASSIFIER, FEATURE_DIM, IMAGE_SIZE, load_classifier

FEATURES = ("fashion-classifier", "inception", "dinov2")
"""The feature networks that `find_extractor` knows."""


class Features(NamedTuple):
    """What a network says of a batch of images, float32, on the network's device."""

    pool: Tensor  # (B, num_features): what distances, precision and recall are of
    logits: Tensor | None = None  # (B, classes): what the Inception Score or the class agreement is of
    spatial: Tensor | None = None  # (B, S): what sFID is of


class FeatureExtractor(Protocol):
    """What evaluation needs of a feature network."""

    name: str
    distance_name: str
    sha256: str
    num_features: int
    num_spatial: int  # 0: it has no spatial features
    class_names: list[str]  # of its logits, where they answer which class an image shows; else empty
    metrics: tuple[str, ...]  # what is measured with it unless told otherwise

    def __call__(self, images: Tensor) -> Features:
        """uint8 (B, H, W, 3) -> `Features`."""


@contextlib.contextmanager
def float32_island(device: torch.device) -> Iterator[None]:
    """Plain float32, without gradients: no autocast, no TF32, no kernel picked by timing."""
    before = torch.get_float32_matmul_precision()
    with (
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        torch.backends.cudnn.flags(enabled=True, benchmark=False, allow_tf32=False),
    ):
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


class FashionFeatures:
    """Penultimate features of the embedded classifier; images of other sizes are area-averaged."""

    name = "fashion-classifier"
    distance_name = "FD-fashion"
    num_features, num_spatial = FEATURE_DIM, 0
    metrics: tuple[str, ...] = ("fid",)

    def __init__(self, device: torch.device) -> None:
        network, self.class_names = load_classifier(EMBEDDED_CLASSIFIER)
        self._network, self._device = network.to(device), device
        self.sha256 = sha256_of_weights(network)

    def __call__(self, images: Tensor) -> Features:
        """uint8 (B, H, W, 3) -> features (B, 64) and logits (B, 10)."""
        with float32_island(self._device):
            pixels = images_to_pixels(images.to(self._device))
            if pixels.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
                pixels = F.interpolate(pixels, (IMAGE_SIZE, IMAGE_SIZE), mode="area")
            return Features(*self._network(pixels))


class CallableFeatures:
    """Any function from uint8 images (B, H, W, 3) to features (B, D) as an extractor.

    `version` stands for its weights in the protocol: change it when the function changes.
    """

    num_spatial = 0
    metrics: tuple[str, ...] = ("fid",)

    def __init__(
        self, function: Callable[[Tensor], Tensor], name: str, num_features: int, version: str
    ) -> None:
        self._function, self.name, self.num_features = function, name, num_features
        self.distance_name = f"FD-{name}"
        self.class_names: list[str] = []
        self.sha256 = hashlib.sha256(f"{name} {version}".encode()).hexdigest()

    def __call__(self, images: Tensor) -> Features:
        """uint8 (B, H, W, 3) -> features (B, D); ValueError where the function gives another shape."""
        with torch.no_grad():
            pool = self._function(images).float()
        if pool.shape != (len(images), self.num_features):
            raise ValueError(
                f"{self.name} gave features {tuple(pool.shape)}, not {(len(images), self.num_features)}"
            )
        return Features(pool)


def find_extractor(name: str, device: torch.device, weights: Path | None = None) -> FeatureExtractor:
    """The extractor `name`, with `weights` from a file where it has none of its own.

    Raises:
        ValueError: an unknown name, or weights that are missing, damaged or others.
        OSError: weights that cannot be downloaded.
    """
    if name == "fashion-classifier":
        return FashionFeatures(device)
    if name == "inception":
        from .inception import InceptionFeatures

        return InceptionFeatures(device, weights)
    if name == "dinov2":
        from .dinov2 import DinoFeatures

        return DinoFeatures(device, weights)
    raise ValueError(f"no features are called {name!r}; known are {', '.join(FEATURES)}")
