"""How far a set of images is from a reference set, and whether they show the class that was asked for.

A set is a folder made by scripts/sample.py, a latent cache (its reconstructions: the floor that the
autoencoder sets), or anything that scripts/encode_latents.py takes (real images).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from ..data.autoencoder import Autoencoder, latents_of_moments, pixels_to_images
from ..data.encode import CROP
from ..data.images import center_crop
from ..data.latents import LatentCache
from ..data.sources import open_images
from ..generate.samples import RECORD, Samples
from .features import EXTRACTORS, FashionFeatures, FeatureExtractor
from .metrics import frechet_distance
from .protocol import Protocol as MetricsProtocol
from .protocol import read_metrics, write_metrics
from .statistics import FeatureStatistics

DECODED_AT_ONCE = 50
FEW_IMAGES = 1_000
"""Below this many images a distance in 64 features is mostly bias."""


class LabelledImages(Protocol):
    """What both sides of a comparison are."""

    class_names: list[str]
    labels: np.ndarray

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Measured:
    """Statistics of one set's features, and how often the classifier saw the label."""

    statistics: FeatureStatistics
    agreement: float | None


def evaluate(
    samples: str, reference: str | None, batch_size: int, out: Path | None
) -> tuple[dict[str, float], Path]:
    """Measure `samples` against `reference` (by default the images that the run was trained on).

    Writes the metrics with their protocol to `out`, by default beside the samples, and returns both.

    Raises:
        ValueError: a set that is not there, unfinished or damaged, or of another size.
    """
    start = time.monotonic()
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    state = runtime.processes()
    if state.num_processes > 1:
        raise ValueError(f"evaluation runs as one process, not {state.num_processes}; start it with python")
    device = state.device
    images, about, image_size, trained_on = open_set(samples, device)
    reference_name = reference or (trained_on[0] if trained_on else None)
    if reference_name is None:
        raise ValueError(f"name the images to compare {samples} with: --reference")
    source = open_images(reference_name)
    if reference is None and trained_on and source.fingerprint() != trained_on[1]:
        raise ValueError(
            f"the images in {reference_name} are not those that were encoded: files were added, removed or "
            f"written since. To measure against them all the same, give --reference {reference_name}"
        )
    extractor = EXTRACTORS[FashionFeatures.name](device)
    protocol = MetricsProtocol(
        samples=about,
        num_samples=len(images),
        reference={
            "name": reference_name,
            "fingerprint": source.fingerprint(),
            "image_size": image_size,
            "crop": CROP,
        },
        num_reference=len(source),
        features={
            "network": extractor.name,
            "sha256": extractor.sha256,
            "num_features": extractor.num_features,
            "precision": "float32",
        },
    )
    path = out or default_path(Path(samples), protocol.reference["fingerprint"])
    known = read_metrics(path, protocol)
    if known is not None:
        runtime.say(f"{path} was measured before")
        return known, path
    if min(len(images), len(source)) < FEW_IMAGES:
        runtime.say(
            f"few images ({len(images)} against {len(source)}): the distance is biased upwards; "
            f"compare it only with others of the same counts, better from {FEW_IMAGES} on"
        )
    sampled = measure(images, image_size, extractor, batch_size, "samples")
    real = measure(source, image_size, extractor, batch_size, "reference")
    distance = frechet_distance(sampled.statistics, real.statistics)
    metrics = {extractor.distance_name: distance}
    if sampled.agreement is not None:
        metrics["class_agreement"] = sampled.agreement
    write_metrics(path, metrics, protocol, time.monotonic() - start)
    return metrics, path


def open_set(
    where: str, device: torch.device
) -> tuple[LabelledImages, dict[str, Any], int | None, tuple[str, str] | None]:
    """The images at `where`, what they are, their size (None: as they lie), and what they stand against:

    name and fingerprint of the images that were trained on, or encoded.
    """
    folder = Path(where)
    if (folder / RECORD).is_file() or (folder / "images").is_dir():
        made = Samples(folder)
        record = made.record
        against = record["trained_on"], record["trained_on_fingerprint"]
        return made, record, record["image_size"], against
    if (folder / "settings.json").is_file():
        cache = LatentCache(folder)
        about = {"reconstructions_of": cache.manifest["images"], "latents": cache.fingerprint}
        against = cache.manifest["images"], cache.manifest["images_fingerprint"]
        return Reconstructions(cache, device), about, cache.image_size, against
    source = open_images(where)
    return source, {"images": where, "fingerprint": source.fingerprint()}, None, None


class Reconstructions:
    """What the autoencoder makes of its own posterior means: a latent cache as an image source."""

    def __init__(self, cache: LatentCache, device: torch.device) -> None:
        self.cache, self.class_names, self.labels = cache, cache.class_names, cache.labels
        self._block, self._images = range(0), np.empty(0, dtype=np.uint8)
        self._autoencoder = Autoencoder(cache.autoencoder.name, device)
        self._autoencoder.match(cache.autoencoder)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Which latent, for messages."""
        return f"{self.cache.folder}[{index}]"

    def read(self, index: int) -> np.ndarray:
        """Decode latent `index` to uint8 (H, W, 3)."""
        if index not in self._block:  # images are read in order, so a block is decoded once
            start = index - index % DECODED_AT_ONCE
            self._block = range(start, min(start + DECODED_AT_ONCE, len(self)))
            moments = self.cache.moments(np.array(self._block), np.zeros(len(self._block), dtype=bool))
            means = latents_of_moments(moments, torch.zeros(1), self.cache.autoencoder)
            self._images = pixels_to_images(self._autoencoder.decode(means)).cpu().numpy()
        return self._images[index - self._block.start]


def measure(
    images: LabelledImages,
    image_size: int | None,
    extractor: FeatureExtractor,
    batch_size: int,
    what: str,
) -> Measured:
    """Feature statistics of a set, cropped to `image_size`; the agreement where the classes match."""
    statistics = FeatureStatistics(extractor.num_features)
    right = 0
    with (
        runtime.StopRequest() as stop,
        runtime.progress(len(images), 0, f"features of the {what}", " images") as bar,
    ):
        for indices, batch in _batches(images, image_size, batch_size):
            features, logits = extractor(batch)
            statistics.update(features.numpy())
            right += int((logits.argmax(dim=1).numpy() == images.labels[indices]).sum())
            bar.update(len(indices))
            if stop.requested:
                raise KeyboardInterrupt("stopped; nothing was written")
    knows = images.class_names == extractor.class_names
    return Measured(statistics, right / len(images) if knows else None)


def _batches(
    images: LabelledImages, image_size: int | None, batch_size: int
) -> Iterator[tuple[range, Tensor]]:
    first_shape = None
    for start in range(0, len(images), batch_size):
        indices = range(start, min(start + batch_size, len(images)))
        batch = []
        for index in indices:
            image = images.read(index)
            image = image if image_size is None else center_crop(image, image_size)
            first_shape = first_shape or image.shape
            if image.shape != first_shape:
                raise ValueError(
                    f"{images.name(index)} has {image.shape[1]} x {image.shape[0]} pixels, but "
                    f"{images.name(0)} has {first_shape[1]} x {first_shape[0]}; all must have one size"
                )
            batch.append(image)
        yield indices, torch.from_numpy(np.stack(batch))


def default_path(samples: Path, fingerprint: str) -> Path:
    """Beside the samples, named after the reference; real images get a place of their own."""
    name = f"metrics_{fingerprint[:8]}.json"
    ours = samples.is_dir() and any((samples / mark).is_file() for mark in (RECORD, "settings.json"))
    return samples / name if ours else Path("runs/evaluations") / samples.name / name
