"""Networks that turn images into the features whose distributions are compared.

An extractor has a name, the name of the distance that it makes, a hash of its weights, a feature
width, `class_names`, and maps uint8 images to float32 features and logits.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..data.autoencoder import images_to_pixels, sha256_of_weights
from .classifier import EMBEDDED_CLASSIFIER, FEATURE_DIM, IMAGE_SIZE, load_classifier


class FeatureExtractor(Protocol):
    """What evaluation needs of a feature network."""

    name: str
    distance_name: str
    sha256: str
    num_features: int
    class_names: list[str]

    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (B, H, W, 3) -> features (B, num_features) and logits (B, classes), float32."""


class FashionFeatures:
    """Penultimate features of the embedded classifier; images of other sizes are area-averaged."""

    name = "fashion-classifier"
    distance_name = "FD-fashion"
    num_features = FEATURE_DIM

    def __init__(self, device: torch.device) -> None:
        network, self.class_names = load_classifier(EMBEDDED_CLASSIFIER)
        self._network, self._device = network.to(device), device
        self.sha256 = sha256_of_weights(network)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 (B, H, W, 3) -> features (B, 64) and logits (B, 10)."""
        pixels = images_to_pixels(images.to(self._device))
        if pixels.shape[-2:] != (IMAGE_SIZE, IMAGE_SIZE):
            pixels = F.interpolate(pixels, (IMAGE_SIZE, IMAGE_SIZE), mode="area")
        features, logits = self._network(pixels)
        return features.cpu(), logits.cpu()


EXTRACTORS: dict[str, Callable[[torch.device], FeatureExtractor]] = {FashionFeatures.name: FashionFeatures}
"""Feature networks by name."""
