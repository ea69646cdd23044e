"""Latent caches of other projects, brought into ours. Each says what it holds; nothing is scaled twice.

    REPA / EDM2    [vae-sd/]dataset.json + 00000/img-mean-std-00000000.npy: float32 (2C, h, w), mean and
                   STANDARD DEVIATION of the posterior, unscaled. REPA's tool encodes pixels in [-1, 1],
                   EDM2's own pixels in [0, 1]; the second is found out by decoding, and refused.
    LightningDiT   *.safetensors with latents, latents_flip (N, C, h, w) and labels (N,): one draw of the
                   posterior, unscaled; its latents_stats.pt normalises each channel (here:
                   --normalize-channels measures the same).
    fast-DiT       *_features/0.npy (1, C, h, w) and *_labels/0.npy (1,): one draw of the posterior,
                   already times 0.18215, of an image that was mirrored or not once and for all. Its
                   tool lets several processes overwrite each other's files, which nothing here can see.

A draw is kept as a point mass: training on it has no posterior noise of its own.
"""

import hashlib
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from . import shards
from .autoencoder import Autoencoder, AutoencoderIdentity, latents_of_moments
from .encode import CROP
from .latents import FORMAT, LatentCache, map_safetensors, shard_ranges

FAST_DIT_SCALE = 0.18215
LEAST_STD = 1e-6
UNUSUAL_SPREAD = (0.5, 2.0)


class ForeignCache(Protocol):
    """`labels` (N,), whether there are mirrored ones, and `read(indices)` -> unscaled moments."""

    kind: str
    labels: np.ndarray
    has_flip: bool

    def read(self, indices: range, flip: bool) -> np.ndarray: ...


class Edm2Cache:
    """REPA's or EDM2's folder of mean-std files."""

    kind, has_flip = "REPA/EDM2", False

    def __init__(self, folder: Path) -> None:
        entries = runtime.read_record(folder / "dataset.json", ["labels"])["labels"]
        if not entries:
            raise ValueError(f"{folder / 'dataset.json'} has no labels")
        entries = sorted(entries)
        self.paths = [folder / name for name, _ in entries]
        self.labels = np.array([label for _, label in entries], dtype=np.int64)

    def read(self, indices: range, flip: bool) -> np.ndarray:
        """Mean and log-variance, float32 (n, 2C, h, w)."""
        mean, std = np.split(np.stack([_load(self.paths[i]) for i in indices]), 2, axis=1)
        if (std < 0).any():
            raise ValueError(f"{self.paths[indices[0]]} holds no mean and standard deviation")
        return np.concatenate([mean, 2 * np.log(np.maximum(std, LEAST_STD))], axis=1)


class LightningCache:
    """LightningDiT's folder of safetensors, in the order of their names."""

    kind = "LightningDiT"

    def __init__(self, folder: Path) -> None:
        self.files = [_mapped(path) for path in sorted(folder.glob("*.safetensors"))]
        for path, file in zip(sorted(folder.glob("*.safetensors")), self.files, strict=True):
            if not {"latents", "labels"} <= file.keys() or len(file["latents"]) != len(file["labels"]):
                raise ValueError(f"{path} has no latents with as many labels; it has {', '.join(file)}")
        self.labels = np.concatenate([file["labels"] for file in self.files]).astype(np.int64)
        self.has_flip = all("latents_flip" in file for file in self.files)
        self.starts = np.cumsum([0, *(len(file["labels"]) for file in self.files)])

    def read(self, indices: range, flip: bool) -> np.ndarray:
        """Draws, float32 (n, C, h, w)."""
        key = "latents_flip" if flip else "latents"
        of = np.searchsorted(self.starts, np.array(indices), side="right") - 1
        rows = [self.files[f][key][i - self.starts[f]] for i, f in zip(indices, of, strict=True)]
        return np.stack(rows).astype(np.float32)


class FastDitCache:
    """fast-DiT's two folders of files with one name."""

    kind, has_flip = "fast-DiT", False

    def __init__(self, features: Path, labels: Path) -> None:
        names = {path.name for path in features.glob("*.npy")}
        missing = names ^ {path.name for path in labels.glob("*.npy")}
        if missing or not names:
            some = ", ".join(sorted(missing)[:3]) or "nothing"
            raise ValueError(
                f"{features} and {labels} must hold files of the same names; in one only: {some}"
            )
        ordered = sorted(names, key=lambda name: [int(d) for d in re.findall(r"\d+", name)] or [-1])
        self.paths = [features / name for name in ordered]
        self.labels = np.array([int(_load(labels / name).item()) for name in ordered], dtype=np.int64)

    def read(self, indices: range, flip: bool) -> np.ndarray:
        """Draws, their scale taken off, float32 (n, C, h, w)."""
        return np.concatenate([_load(self.paths[i]) for i in indices]) / FAST_DIT_SCALE


def open_foreign(folder: Path) -> ForeignCache:
    """The cache at `folder`, by what lies there; ValueError where it is none of the known ones."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    for place in (folder, folder / "vae-sd"):
        if (place / "dataset.json").is_file():
            return Edm2Cache(place)
    if any(folder.glob("*.safetensors")):
        return LightningCache(folder)
    features, labels = (sorted(folder.glob(f"*{end}")) for end in ("features", "labels"))
    if len(features) == len(labels) == 1:
        return FastDitCache(features[0], labels[0])
    raise ValueError(
        f"{folder} is no latent cache of a known kind: REPA/EDM2 has dataset.json (also in vae-sd), "
        "LightningDiT *.safetensors, fast-DiT two folders *_features and *_labels"
    )


def import_latents(folder: Path, autoencoder: Autoencoder, out: Path, normalize_channels: bool) -> None:
    """Bring the cache at `folder`, made with `autoencoder`, to `out`, or finish what was begun there.

    Raises:
        ValueError: no known cache, one that `autoencoder` cannot have made, or latents that are not finite.
    """
    start = time.monotonic()
    cache = open_foreign(folder)
    if cache.labels.min() < 0:
        raise ValueError(f"{folder} has a label {cache.labels.min()}; labels start at 0")
    identity = autoencoder.identity
    first = cache.read(range(min(64, len(cache.labels))), False)
    _check_channels(folder, first, identity)
    _check_pixels(folder, torch.from_numpy(first), autoencoder)
    if normalize_channels:
        identity = replace(identity, channel_mean=None, channel_std=None)
    settings = {
        "format": FORMAT,
        "images": str(folder.resolve()),
        "images_fingerprint": hashlib.sha256(first.tobytes() + cache.labels.tobytes()).hexdigest(),
        "num_images": len(cache.labels),
        "class_names": [str(label) for label in range(int(cache.labels.max()) + 1)],
        "image_size": first.shape[-1] * identity.downsampling,
        "crop": CROP,
        "flip": cache.has_flip,
        "autoencoder": asdict(identity),
        "latent_size": first.shape[-1],
        "normalize_channels": normalize_channels,
    }
    shards.begin(out, settings)
    if (out / "manifest.json").is_file():
        LatentCache(out).verify()
        runtime.say(f"{out}: all {len(cache.labels)} latents are there already")
        return
    ranges = shard_ranges(len(cache.labels))
    todo = shards.unfinished(out, len(ranges))
    with runtime.progress(sum(len(ranges[i]) for i in todo), 0, "importing", " latents") as bar:
        for i in todo:
            moments = _half(folder, cache.read(ranges[i], False))
            flipped = _half(folder, cache.read(ranges[i], True)) if cache.has_flip else None
            index = np.arange(ranges[i].start, ranges[i].stop, dtype=np.int64)
            shards.write_shard(out, i, moments, flipped, cache.labels[index], index)
            bar.update(len(index))
    shards.finish(out, settings, ranges, start, {"imported_from": cache.kind, "skipped": []})
    runtime.say(f"{out}: imported {len(cache.labels)} latents of {cache.kind}")
    runtime.say(_about_spread(LatentCache(out)))


def _about_spread(cache: LatentCache) -> str:
    """The spread of what the network will see, which a wrong scale would show."""
    some = np.linspace(0, len(cache) - 1, min(len(cache), 1000)).astype(np.int64)
    moments = cache.moments(some, np.zeros(len(some), dtype=bool))
    noise = torch.randn(1, *cache.latent_shape, generator=torch.Generator().manual_seed(0))
    spread = latents_of_moments(moments, noise, cache.autoencoder).std().item()
    usual = UNUSUAL_SPREAD[0] <= spread <= UNUSUAL_SPREAD[1]
    advice = "" if usual else "; that is far from 1: check the autoencoder, or use --normalize-channels"
    return f"standard deviation of the latents as the network sees them: {spread:.2f}{advice}"


def _check_channels(folder: Path, moments: np.ndarray, identity: AutoencoderIdentity) -> None:
    channels = identity.latent_channels
    if moments.ndim != 4 or moments.shape[1] not in (channels, 2 * channels):
        raise ValueError(
            f"{folder} holds arrays of shape {moments.shape[1:]}, which autoencoder {identity.name} with "
            f"{channels} channels cannot have made; name the right one with --autoencoder"
        )


def _check_pixels(folder: Path, moments: Tensor, autoencoder: Autoencoder) -> None:
    means = latents_of_moments(moments[:8], torch.zeros(1), autoencoder.identity)
    pixels = autoencoder.decode(means)
    if np.quantile(pixels.cpu().numpy(), 0.01) > -0.2:  # in [-1, 1] some pixel is darker than mid-gray
        raise ValueError(
            f"the latents in {folder} decode to {pixels.min():.2f} ... {pixels.max():.2f}: they were made of "
            "pixels in [0, 1], as EDM2's own tool does, where sitvit and REPA use [-1, 1]; encode again"
        )


def _half(folder: Path, moments: np.ndarray) -> Tensor:
    half = torch.from_numpy(moments).to(torch.float16)
    if not torch.isfinite(half).all():
        raise ValueError(f"{folder} has latents that are not finite numbers in float16")
    return half


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an npy file ({error})") from None


def _mapped(path: Path) -> dict[str, np.ndarray]:
    try:
        return map_safetensors(path)
    except (ValueError, KeyError, TypeError, OverflowError):
        raise ValueError(f"{path} cannot be read as a safetensors file") from None
