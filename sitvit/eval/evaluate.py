"""The evaluation: open both sides, extract features, compare, and write the numbers with their protocol."""

import glob
import hashlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .. import runtime
from ..data.encode import CROP
from ..data.sources import open_images
from ..generate.samples import RECORD
from ..generate.trained import Trained
from .extraction import Extracted, extract, forget
from .features import FEATURES, FashionFeatures, FeatureExtractor, find_extractor
from .manifold import precision_recall
from .metrics import Gaussian, distance_of_gaussians, inception_score, kernel_distance
from .protocol import Protocol, read_metrics, write_metrics
from .reference import (
    MANIFOLD_IMAGES,
    Reference,
    check_new_file,
    is_statistics,
    manifold_rows,
    read_statistics,
    reference_of_arrays,
    reference_of_images,
    write_statistics,
)
from .sets import ImageSet, open_set
from .settings import EvaluationConfig
from .uncertainty import bootstrap_spread, infinite_distance

FEW_IMAGES = 2_048
"""Below this many images a distance is mostly bias."""


@dataclass(frozen=True)
class Side:
    """The reference before its features are there: what it is, its arrays or images, and its size."""

    about: dict[str, Any]
    arrays: dict[str, np.ndarray] | None
    images: ImageSet | None
    num_images: int | None


def evaluate(
    config: EvaluationConfig, extractor: FeatureExtractor | None = None, trained: Trained | None = None
) -> tuple[dict[str, float], Path]:
    """Measure what `config` names; returns the metrics and the file that holds them with their protocol.

    `extractor` replaces the one that `config.features` names, `trained` the checkpoint's network. In every
    process of the job: the features are shared out, and the numbers are the main one's (the others return
    what it wrote).

    Raises:
        ValueError: a side that is not there, unfinished, damaged, of another size or of other features.
    """
    start = time.monotonic()
    state = runtime.processes()
    images = _open_samples(config, state.device, trained)
    if len(images.images) < 2:
        raise ValueError(f"{config.samples} has {len(images.images)} image(s); at least 2 can be measured")
    reference_name = config.reference or (images.trained_on and images.trained_on[0])
    if not reference_name:
        raise ValueError(f"name the images to compare {config.samples} with: --reference")
    extractor = extractor or open_extractor(config, images, state)
    side = open_reference(reference_name, extractor, images, config.reference is None, state.device)
    metrics = tuple(config.metrics or extractor.metrics)
    check_metrics(metrics, extractor, side, len(images.images), config.neighbours)
    protocol = Protocol(
        samples=images.about,
        num_samples=len(images.images),
        reference=side.about,
        num_reference=side.num_images,
        features={
            "network": extractor.name,
            "sha256": extractor.sha256,
            "num_features": extractor.num_features,
            "precision": "float32, no TF32",
            "batch_size": config.batch_size,
        },
        measures=measures_of(config, metrics),
    )
    identity = hashlib.sha256(json.dumps(side.about, sort_keys=True).encode()).hexdigest()
    path = Path(config.out) if config.out else default_path(config, images, identity)
    known = read_metrics(path, protocol)
    state.wait_for_everyone()  # all have looked before one writes
    if known is not None:
        runtime.say(f"{path} was measured before")
        if state.is_main_process:
            _forget_features(path)
        return known, path
    _check_sizes(side, images)
    runtime.say(f"{len(images.images):,} images of {config.samples or config.checkpoint}")
    warn_of_few(len(images.images), side.num_images)
    scratch = _scratch(path, images, extractor, config.batch_size)
    sampled = extract(images, None, extractor, config.batch_size, scratch, "samples", state)
    found: dict[str, float] = {}
    real = _reference_features(
        path, side, images, extractor, config.batch_size, "pr" in metrics or "kid" in metrics, state
    )
    if sampled is not None and real is not None:
        found = _measure(config, metrics, extractor, images, sampled, real, state.device)
        write_metrics(path, found, protocol, time.monotonic() - start)
        _forget_features(path)
    state.wait_for_everyone()
    return (found or read_metrics(path, protocol) or {}), path


def make_reference(config: EvaluationConfig, reference: str, out: Path, image_size: int | None) -> Path:
    """Write the statistics of the images `reference`, cropped to `image_size`, with their provenance.

    Raises:
        ValueError: no images there, or a file at `out`.
    """
    state = runtime.processes()
    check_new_file(out)
    images = replace(open_set(reference, state.device), trained_on=None)
    extractor = open_extractor(config, images, state)
    size = image_size or images.image_size
    scratch = _scratch(out, images, extractor, config.batch_size, size)
    extracted = extract(images, size, extractor, config.batch_size, scratch, "reference", state)
    if extracted is not None:
        network = {"network": extractor.name, "sha256": extractor.sha256}
        provenance = {
            "images": images.about,
            "num_images": len(images.images),
            "image_shape": list(extracted.image_shape),
            "crop": CROP if size else "none",
            "features": network,
        }
        write_statistics(out, extracted, provenance)
        _forget_features(out)
        runtime.say(f"{out}: statistics of {len(images.images):,} images")
    state.wait_for_everyone()
    return out


def _open_samples(config: EvaluationConfig, device: Any, trained: Trained | None) -> ImageSet:
    if config.samples is not None:
        return open_set(config.samples, device)
    from .online import open_checkpoint_set

    return open_checkpoint_set(config, device, trained)


def open_extractor(config: EvaluationConfig, images: ImageSet, state: Any) -> FeatureExtractor:
    """The feature network that `config` names, or the one that fits: Fashion-MNIST's own has its own.

    Raises:
        ValueError: no such network, weights of another one, or weights that are missing or damaged.
    """
    name = config.features
    if name is None:
        is_fashion = images.images.class_names == FashionFeatures(state.device).class_names
        name = FashionFeatures.name if is_fashion else "inception"
        if not is_fashion:
            runtime.say(f"features: {name} (others with --features: {', '.join(FEATURES)})")
    given = {"inception": config.inception_weights, "dinov2": config.dinov2_weights}
    for other, file in given.items():
        if file and other != name:
            raise ValueError(
                f"--{other}-weights {file}, but the features are {name}'s: add --features {other}, or leave "
                "the weights out"
            )
    weights = Path(given[name] or "") if given.get(name) else None
    first: FeatureExtractor | None = None
    if state.is_main_process:
        first = find_extractor(name, state.device, weights)  # one process downloads
    state.wait_for_everyone()
    return first or find_extractor(name, state.device, weights)


def open_reference(
    name: str, extractor: FeatureExtractor, samples: ImageSet, implied: bool, device: Any
) -> Side:
    """The reference `name`, checked against the samples; `implied` where nobody named it.

    Raises:
        ValueError: it is not there, damaged, of other features, or changed since the run was trained.
    """
    path = Path(name)
    if is_statistics(path):
        arrays, about = read_statistics(path, extractor)
        held = open_set(name, device) if "features" not in arrays and _has_images(path) else None
        count = about.get("provenance", {}).get("num_images")
        return Side(about, arrays, held, count)
    source = open_images(name) if implied else None
    images = open_set(name, device)
    if source is not None and samples.trained_on and source.fingerprint() != samples.trained_on[1]:
        raise ValueError(
            f"the images in {name} are not those that were encoded: files were added, removed or "
            f"written since. To measure against them all the same, give --reference {name}"
        )
    if len(images.images) < 2:
        raise ValueError(f"{name} has {len(images.images)} images; a reference needs at least 2")
    about = {
        "name": name,
        "fingerprint": images.fingerprint,
        "image_size": samples.image_size,
        "crop": CROP if samples.image_size else "none",
    }
    return Side(about, None, images, len(images.images))


def _has_images(path: Path) -> bool:
    with np.load(path, allow_pickle=False) as file:
        return "arr_0" in file.files


def check_metrics(
    metrics: tuple[str, ...], extractor: FeatureExtractor, side: Side, num_samples: int, neighbours: int
) -> None:
    """ValueError naming the first metric that features, reference or sample count do not allow."""
    if "sfid" in metrics and not extractor.num_spatial:
        raise ValueError(f"{extractor.name} has no spatial features, which sFID needs; leave out sfid")
    if "sfid" in metrics and side.arrays is not None and "mu_s" not in side.arrays:
        raise ValueError(f"{side.about['file']} has no mu_s and sigma_s, which sFID needs; leave out sfid")
    if "is" in metrics and (extractor.class_names or not extractor.num_spatial):
        raise ValueError(f"{extractor.name} has no logits of an Inception Score; leave out is")
    named = [metric for metric in ("pr", "kid") if metric in metrics]
    if not named:
        return
    least = neighbours + 1 if "pr" in metrics else 2
    held = _num_features_held(side)
    if held < least:
        raise ValueError(
            f"{' and '.join(named)} need the features of {least} or more reference images; "
            f"{side.about.get('file') or side.about.get('name')} has {held}. Give one with images, or leave "
            f"them out: --metrics {' '.join(m for m in metrics if m not in named) or 'fid'}"
        )
    if num_samples < least:
        raise ValueError(f"{' and '.join(named)} need at least {least} samples, got {num_samples}")
    if "pr" in metrics and held < MANIFOLD_IMAGES:
        runtime.say(
            f"precision and recall against {held:,} reference images; published ones are against "
            f"{MANIFOLD_IMAGES:,}, so do not compare"
        )


def _num_features_held(side: Side) -> int:
    if side.arrays is not None and "features" in side.arrays:
        return len(side.arrays["features"])
    return len(side.images.images) if side.images is not None else 0


def measures_of(config: EvaluationConfig, metrics: tuple[str, ...]) -> dict[str, Any]:
    """How each metric is computed, for the protocol."""
    how: dict[str, Any] = {
        "fid": {"covariance": "unbiased", "trace": "nuclear norm"},
        "sfid": {"covariance": "unbiased", "trace": "nuclear norm"},
        "is": {"split_size": config.split_size, "arithmetic": "float32"},
        "pr": {
            "neighbours": config.neighbours,
            "distances": config.distances,
            "most_reference_images": MANIFOLD_IMAGES,
        },
        "kid": {"subsets": config.kid_subsets, "most_in_a_subset": config.kid_subset_size, "seed": 2020},
        "spread": {"resamples": config.resamples, "seed": 0},
        "infinity": {"points": 15, "seed": 0},
    }
    return {metric: how[metric] for metric in metrics}


def warn_of_few(num_samples: int, num_reference: int | None) -> None:
    """Say that a distance of few images is biased."""
    counts = [num_samples, *([num_reference] if num_reference is not None else [])]
    if min(counts) < FEW_IMAGES:
        runtime.say(
            f"few images ({' against '.join(map(str, counts))}): below {FEW_IMAGES:,} the distance is biased "
            "upwards; compare it only with others of the same counts"
        )


def _reference_features(
    path: Path,
    side: Side,
    samples: ImageSet,
    extractor: FeatureExtractor,
    batch_size: int,
    needs_features: bool,
    state: Any,
) -> Reference | None:
    """The reference with its features; None on processes other than the main one."""
    if side.arrays is not None and not (needs_features and side.images is not None):
        return reference_of_arrays(side.arrays, None, side.num_images)
    assert side.images is not None
    size = samples.image_size if side.arrays is None else None  # a file's images are as they were counted
    scratch = _scratch(path, side.images, extractor, batch_size, size)
    extracted = extract(side.images, size, extractor, batch_size, scratch, "reference", state)
    if extracted is None:
        return None
    if side.arrays is None:
        return reference_of_images(extracted)
    pool = extracted.pool[manifold_rows(len(extracted.pool))]
    return reference_of_arrays(side.arrays, pool, side.num_images)


def _check_sizes(side: Side, samples: ImageSet) -> None:
    """ValueError where the reference is of images of another size than the samples, and is not cropped."""
    made, shape = samples.shape_of_all(), side.about.get("provenance", {}).get("image_shape")
    is_cropped = side.arrays is None and samples.image_size is not None
    if shape is None and side.images is not None and not is_cropped:
        shape = side.images.shape_of_all()
    if shape is not None and tuple(shape) != made:
        found, wanted = (f"{s[1]} x {s[0]}" for s in (made, shape))
        name = side.about.get("file") or side.about["name"]
        crop = "; --make-reference NPZ crops images to --image-size" if side.arrays is None else ""
        raise ValueError(f"the samples have {found} pixels, but {name} is of images of {wanted}{crop}")


def _measure(
    config: EvaluationConfig,
    metrics: tuple[str, ...],
    extractor: FeatureExtractor,
    images: ImageSet,
    sampled: Extracted,
    real: Reference,
    device: Any,
) -> dict[str, float]:
    found: dict[str, float] = {}
    name = extractor.distance_name
    if "fid" in metrics:
        made = Gaussian.of(sampled.statistics.mean, sampled.statistics.covariance)
        found[name] = distance_of_gaussians(made, real.pool)
    if "sfid" in metrics and sampled.spatial is not None and real.spatial is not None:
        spatial = Gaussian.of(sampled.spatial.mean, sampled.spatial.covariance)
        found["sFID"] = distance_of_gaussians(spatial, real.spatial)
    if "is" in metrics and sampled.logits is not None:
        found["IS"] = inception_score(sampled.logits, config.split_size)
    if "pr" in metrics and real.features is not None:
        total = 2 * len(sampled.pool) + len(real.features)
        with runtime.progress(total, 0, "precision and recall", " rows") as bar:
            found["precision"], found["recall"] = precision_recall(
                real.features, sampled.pool, config.distances, config.neighbours, device, bar.update
            )
    if "kid" in metrics and real.features is not None:
        size = min(config.kid_subset_size, len(sampled.pool), len(real.features))
        if size < config.kid_subset_size:
            runtime.say(f"KID of subsets of {size} images, as there are no more")
        found["KID"], found["KID_std"] = kernel_distance(
            sampled.pool, real.features, config.kid_subsets, config.kid_subset_size
        )
    if "spread" in metrics:
        with runtime.progress(config.resamples, 0, "resamples", " distances") as bar:
            found[f"{name}_std"] = bootstrap_spread(
                sampled.pool, real.pool, config.resamples, device=device, progress=bar.update
            )
    if "infinity" in metrics:
        with runtime.progress(15, 0, "extrapolation", " distances") as bar:
            found[f"{name}_infinity"] = infinite_distance(
                sampled.pool, real.pool, device=device, progress=bar.update
            )
    names = extractor.class_names
    if names and images.images.class_names == names and sampled.logits is not None:
        right = sampled.logits.argmax(axis=1) == images.images.labels
        found["class_agreement"] = float(right.mean())
    return found


def _scratch(
    path: Path, images: ImageSet, extractor: FeatureExtractor, batch_size: int, size: int | None = None
) -> Path:
    """Where the features of a set wait until the numbers are written: beside `path`, named by content."""
    size = size or images.image_size
    of = f"{images.fingerprint} {len(images.images)} {size} {extractor.sha256} {batch_size}"
    return path.with_name(f".{path.name}.{hashlib.sha256(of.encode()).hexdigest()[:12]}.features")


def _forget_features(path: Path) -> None:
    """Remove the features that waited for `path`, an interrupted evaluation's too, as it is written now."""
    for scratch in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 12}.features"):
        forget(scratch)


def default_path(config: EvaluationConfig, images: ImageSet, identity: str) -> Path:
    """Beside the samples, named after the reference; other images get a place of their own."""
    name = f"metrics_{identity[:8]}.json"
    if config.samples is None:
        return Path("runs/evaluations") / f"online-{images.fingerprint[:12]}" / name
    samples = Path(config.samples)
    ours = samples.is_dir() and any((samples / mark).is_file() for mark in (RECORD, "settings.json"))
    return samples / name if ours else Path("runs/evaluations") / samples.name / name
