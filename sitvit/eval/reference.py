"""What samples are measured against: ADM's reference npz, a statistics file of ours, or images.

An npz with `mu`, `sigma` (and for sFID `mu_s`, `sigma_s`) holds statistics; without them it holds images.
ADM's files have 10,000 images (`arr_0`) beside the statistics of the whole training set, for precision and
recall alone. Ours have those images' features instead (`features`), and in `provenance` (JSON) what was
measured, with which network, so that a file that does not fit is refused.
"""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__, runtime
from ..data.archives import DAMAGED
from ..data.demo import sha256_of_file
from .extraction import Extracted
from .features import FeatureExtractor
from .metrics import Gaussian

FORMAT = 1
KEYS = ("mu", "sigma", "mu_s", "sigma_s")
MANIFOLD_IMAGES = 10_000
"""Reference images that precision and recall are of, as in ADM's suite."""


@dataclass(frozen=True)
class Reference:
    """The Gaussians of a reference, and the features that precision, recall and KID need."""

    pool: Gaussian
    spatial: Gaussian | None
    features: np.ndarray | None  # (up to 10,000, D) float32
    num_images: int | None  # None: the file does not tell


def is_statistics(path: Path) -> bool:
    """Whether `path` is an npz with statistics; ValueError where it is named .npz and is none."""
    if path.suffix.lower() != ".npz" or not path.is_file():
        return False
    return bool(set(_arrays(path)) & set(KEYS))


def read_statistics(path: Path, extractor: FeatureExtractor) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The checked arrays of a statistics file (float64), and what the protocol should say of it.

    Raises:
        ValueError: keys are missing, an array is damaged or of another width, or the provenance names another
            feature network.
    """
    names = _arrays(path)
    missing = [key for key in ("mu", "sigma") if key not in names]
    if missing or (("mu_s" in names) != ("sigma_s" in names)):
        raise ValueError(
            f"{path} lacks {', '.join(missing or ['mu_s or sigma_s'])}; it has {', '.join(names)}"
        )
    about: dict[str, Any] = {"file": str(path), "sha256": sha256_of_file(path)}
    arrays: dict[str, np.ndarray] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for key in (*KEYS, "features"):
                if key in names:
                    arrays[key] = file[key]
            if "provenance" in names:
                about["provenance"] = json.loads(str(file["provenance"]))
    except DAMAGED as error:
        raise ValueError(f"{path} is damaged ({error})") from None
    _check_network(path, about, extractor)
    widths = {"": extractor.num_features, "_s": extractor.num_spatial}
    for end, width in widths.items():
        if f"mu{end}" in arrays and width:
            _check_moments(path, arrays, end, width, extractor.name)
    if "features" in arrays:
        _check_features(path, arrays["features"], extractor)
    return arrays, about


def _check_features(path: Path, features: np.ndarray, extractor: FeatureExtractor) -> None:
    if features.ndim != 2 or features.shape[1] != extractor.num_features:
        raise ValueError(
            f"{path}: features are {features.shape}; {extractor.name} has (images, {extractor.num_features})"
        )
    if not np.issubdtype(features.dtype, np.floating) or not np.isfinite(features).all():
        raise ValueError(f"{path} is damaged: features has values that are no finite numbers")


def _check_network(path: Path, about: dict[str, Any], extractor: FeatureExtractor) -> None:
    provenance = about.get("provenance", {})
    if not isinstance(provenance, dict):
        raise ValueError(f"{path} is damaged: its provenance is no JSON object")
    network = provenance.get("features")
    if network is None:
        runtime.say(
            f"{path} does not say of which images and features it is; that it fits could be checked by its "
            "shapes alone"
        )
    elif network.get("sha256") != extractor.sha256:
        raise ValueError(
            f"{path} holds statistics of {network.get('network')} (sha256 {str(network.get('sha256'))[:8]}), "
            f"not of {extractor.name} ({extractor.sha256[:8]}); make them again with --make-reference"
        )


def _check_moments(path: Path, arrays: dict[str, np.ndarray], end: str, width: int, network: str) -> None:
    mean, covariance = arrays[f"mu{end}"], arrays[f"sigma{end}"]
    if mean.shape != (width,) or covariance.shape != (width, width):
        raise ValueError(
            f"{path}: mu{end} is {mean.shape} and sigma{end} {covariance.shape}; {network} has {width} "
            f"features, so ({width},) and ({width}, {width}) are needed"
        )
    for key in (f"mu{end}", f"sigma{end}"):
        if not np.issubdtype(arrays[key].dtype, np.floating) or not np.isfinite(arrays[key]).all():
            raise ValueError(f"{path} is damaged: {key} has values that are no finite numbers")
    largest = np.abs(covariance).max()
    if np.abs(covariance - covariance.T).max() > 1e-3 * largest or (np.diagonal(covariance) < 0).any():
        raise ValueError(f"{path} is damaged: sigma{end} is no covariance (symmetric, diagonal from 0)")


def reference_of_arrays(
    arrays: dict[str, np.ndarray], features: np.ndarray | None, num_images: int | None
) -> Reference:
    """A `Reference` of a file's arrays; `features` are those of its images, where it has images instead."""
    spatial = Gaussian.of(arrays["mu_s"], arrays["sigma_s"]) if "mu_s" in arrays else None
    features = arrays.get("features", features)
    return Reference(Gaussian.of(arrays["mu"], arrays["sigma"]), spatial, features, num_images)


def reference_of_images(extracted: Extracted) -> Reference:
    """A `Reference` of images' features; of more than 10,000, those spaced evenly are kept."""
    pool, spatial = extracted.statistics, extracted.spatial
    return Reference(
        Gaussian.of(pool.mean, pool.covariance),
        None if spatial is None else Gaussian.of(spatial.mean, spatial.covariance),
        extracted.pool[manifold_rows(len(extracted.pool))],
        pool.n,
    )


def manifold_rows(count: int) -> np.ndarray:
    """Which of `count` reference images precision and recall are of."""
    return (
        np.arange(count)
        if count <= MANIFOLD_IMAGES
        else np.arange(MANIFOLD_IMAGES) * count // MANIFOLD_IMAGES
    )


def write_statistics(path: Path, extracted: Extracted, provenance: dict[str, Any]) -> None:
    """Write a statistics file with its provenance (JSON values), whole or not at all.

    Raises:
        ValueError: `path` is there already, or is not named .npz.
    """
    arrays: dict[str, Any] = {"mu": extracted.statistics.mean, "sigma": extracted.statistics.covariance}
    if extracted.spatial is not None:
        arrays |= {"mu_s": extracted.spatial.mean, "sigma_s": extracted.spatial.covariance}
    arrays["features"] = extracted.pool[manifold_rows(len(extracted.pool))]
    record = {"format": FORMAT, **provenance, "sitvit": __version__, "command": runtime.command_line()}
    with runtime.write_aside(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, provenance=np.array(json.dumps(record)), **arrays)


def check_new_file(path: Path) -> None:
    """ValueError unless a statistics file can be written at `path`."""
    if path.suffix != ".npz":
        raise ValueError(f"a statistics file is an npz; call it {path.with_suffix('.npz')}")
    if path.exists():
        raise ValueError(f"{path} is there already; choose another name, or delete it")


def _arrays(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except DAMAGED as error:
        raise ValueError(f"{path} cannot be read as an npz file ({error})") from None
    return [name.removesuffix(".npy") for name in names]
