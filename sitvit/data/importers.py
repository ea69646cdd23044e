"""Latent caches of other projects, brought into ours. Each says what it holds; nothing is scaled twice.

    REPA / EDM2    [vae-sd/]dataset.json + 00000/img-mean-std-00000000.npy: float32 (2C, h, w), mean and
                   STANDARD DEVIATION of the posterior, unscaled. REPA's tool encodes pixels in [-1, 1],
                   EDM2's own pixels in [0, 1].
    LightningDiT   *.safetensors with latents, latents_flip (N, C, h, w) and labels (N,): one draw of the
                   posterior, unscaled; its latents_stats.pt normalises each channel (here:
                   --normalize-channels measures the same).
    fast-DiT       *_features/0.npy (1, C, h, w) and *_labels/0.npy (1,): one draw of the posterior,
                   already times 0.18215, of an image that was mirrored or not once and for all. Its
                   tool lets several processes overwrite each other's files, which nothing here can see.

A draw is kept as a point mass: training on it has no posterior noise of its own.

The files do not say which autoencoder made them, of which pixels, or whether they are scaled. So 64 are
looked at. An autoencoder's scale makes latents of about mean 0 and spread 1; others are refused (SD-VAE's of
pixels in [0, 1] have channel means of 0.64 by EDM2's constants, root mean square; scaled twice, a spread of
0.2). They are decoded too, and refused where fewer than one pixel value in a hundred is below -0.5; the range
found is printed, to be judged.
"""

import hashlib
import re
import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from .. import runtime
from . import shards
from .arrays import check_labels
from .autoencoder import Autoencoder, AutoencoderIdentity, latents_of_moments
from .encode import CROP
from .latents import FORMAT, LatentCache, shard_ranges

FAST_DIT_SCALE = 0.18215
LIGHTNING = {"latents", "latents_flip", "labels"}
FLOATS, INTEGERS = ("BF16", "F16", "F32", "F64"), ("I32", "I64")
LEAST_STD = 1e-6
USUAL_SPREAD = (0.5, 2.0)
USUAL_MEAN = 0.5
DARK = -0.5


class ForeignCache(Protocol):
    """`paths` of the latents, `labels` (N,), whether there are mirrored ones, `read(indices)` -> unscaled."""

    kind: str
    paths: list[Path]
    labels: np.ndarray
    has_flip: bool

    def name(self, index: int) -> str: ...
    def read(self, indices: range, flip: bool) -> np.ndarray: ...


class Edm2Cache:
    """REPA's or EDM2's folder of mean-std files."""

    kind, has_flip = "REPA/EDM2", False

    def __init__(self, folder: Path) -> None:
        entries = runtime.read_record(folder / "dataset.json", ["labels"])["labels"]
        if not entries:
            raise ValueError(f"{folder / 'dataset.json'} has no labels")
        for entry in entries if isinstance(entries, list) else [entries]:
            if not (isinstance(entry, list) and len(entry) == 2 and type(entry[1]) is int):
                raise ValueError(
                    f"{folder / 'dataset.json'} must list [file, whole number] under labels, has "
                    f"{repr(entry)[:80]}"
                )
        entries = sorted(entries)
        twice = [a[0] for a, b in pairwise(entries) if a[0] == b[0]]
        if twice:
            raise ValueError(f"{folder / 'dataset.json'} lists {len(twice)} files twice, such as {twice[0]}")
        self.paths = [folder / name for name, _ in entries]
        self.labels = np.array([label for _, label in entries], dtype=np.int64)
        listed = {name for name, _ in entries}
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*.npy")}
        if there - listed:
            runtime.say(
                f"passed over {len(there - listed)} files that {folder / 'dataset.json'} does not list, such "
                f"as {min(there - listed)}"
            )

    def name(self, index: int) -> str:
        """Where latent `index` comes from, for messages."""
        return str(self.paths[index])

    def read(self, indices: range, flip: bool) -> np.ndarray:
        """Mean and log-variance, float32 (n, 2C, h, w)."""
        values = _stacked([self.paths[i] for i in indices])
        if values.ndim != 4 or values.shape[1] % 2:
            raise ValueError(f"{self.paths[indices[0]]} holds {values.shape[1:]}, expected (2C, h, w)")
        mean, std = np.split(values, 2, axis=1)
        if (std < 0).any():
            raise ValueError(f"{self.paths[indices[0]]} holds no mean and standard deviation")
        return np.concatenate([mean, 2 * np.log(np.maximum(std, LEAST_STD))], axis=1)


class LightningCache:
    """LightningDiT's folder of safetensors, in the order of their names."""

    kind = "LightningDiT"

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*.safetensors"))
        self.files = [_opened(path) for path in self.paths]
        first = self.files[0]["latents"].get_shape()[1:] if "latents" in self.files[0] else None
        for path, file in zip(self.paths, self.files, strict=True):
            shapes = {name: entry.get_shape() for name, entry in file.items()}
            counts = {shape[0] for name, shape in shapes.items() if name in LIGHTNING}
            if not {"latents", "labels"} <= file.keys() or len(counts) > 1:
                found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
                raise ValueError(f"{path} has no latents with as many labels; it has {found}")
            for name in LIGHTNING & file.keys():
                dtype, wanted = file[name].get_dtype(), INTEGERS if name == "labels" else FLOATS
                if dtype not in wanted:
                    raise ValueError(f"{path}: {name} are {dtype}, needed is {' or '.join(wanted)}")
                if name != "labels" and shapes[name][1:] != first:
                    raise ValueError(f"{path} holds latents of another shape than {first}")
        self.labels = np.concatenate([file["labels"][:].long().numpy() for file in self.files])
        self.has_flip = all("latents_flip" in file for file in self.files)
        self.starts = np.cumsum([0, *(file["labels"].get_shape()[0] for file in self.files)])

    def name(self, index: int) -> str:
        """Where latent `index` comes from, for messages."""
        file = int(np.searchsorted(self.starts, index, side="right")) - 1
        return f"{self.paths[file]}[{index - self.starts[file]}]"

    def read(self, indices: range, flip: bool) -> np.ndarray:
        """Draws, float32 (n, C, h, w)."""
        key = "latents_flip" if flip else "latents"
        of = np.searchsorted(self.starts, np.array(indices), side="right") - 1
        rows = [self.files[f][key][int(i - self.starts[f])] for i, f in zip(indices, of, strict=True)]
        return torch.stack(rows).float().numpy()


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
        self.labels = np.array([_label(labels / name) for name in ordered], dtype=np.int64)

    def name(self, index: int) -> str:
        """Where latent `index` comes from, for messages."""
        return str(self.paths[index])

    def read(self, indices: range, flip: bool) -> np.ndarray:
        """Draws, their scale taken off, float32 (n, C, h, w)."""
        values = _stacked([self.paths[i] for i in indices])
        if values.ndim != 5 or values.shape[1] != 1:
            raise ValueError(f"{self.paths[indices[0]]} holds {values.shape[1:]}, expected (1, C, h, w)")
        return values[:, 0] / FAST_DIT_SCALE


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
        ValueError: no known cache, one that `autoencoder` cannot have made or whose scale is another, or
            latents that are not finite.
    """
    start = time.monotonic()
    cache = open_foreign(folder)
    check_labels(str(folder), cache.labels)
    identity = autoencoder.identity
    first = cache.read(range(min(64, len(cache.labels))), False)
    _check_channels(folder, first, identity)
    count = len(cache.labels)
    some = _half(folder, cache, range(0, count, max(count // 64, 1))[:64], False)
    means = latents_of_moments(some, torch.zeros(1), identity)
    _check_scale(folder, means, identity, normalize_channels)
    _check_pixels(folder, means, autoencoder)
    if normalize_channels:
        identity = replace(identity, channel_mean=None, channel_std=None)
    settings = {
        "format": FORMAT,
        "images": str(folder.resolve()),
        "images_fingerprint": _fingerprint(cache),
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
    todo = shards.unfinished(out, settings, ranges, cache.labels, whole=True)
    with runtime.progress(sum(len(ranges[i]) for i in todo), 0, "importing", " latents") as bar:
        for i in todo:
            moments = _half(folder, cache, ranges[i], False)
            flipped = _half(folder, cache, ranges[i], True) if cache.has_flip else None
            index = np.arange(ranges[i].start, ranges[i].stop, dtype=np.int64)
            shards.write_shard(out, i, moments, flipped, cache.labels[index], index)
            bar.update(len(index))
    shards.finish(out, settings, ranges, start, {"imported_from": cache.kind, "skipped": []})
    runtime.say(f"{out}: imported {len(cache.labels)} latents of {cache.kind}")


def _fingerprint(cache: ForeignCache) -> str:
    """Changes with a label, and when a file of latents is written again."""
    digest = hashlib.sha256(cache.labels.tobytes())
    for path in cache.paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror})") from None
        digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _check_channels(folder: Path, moments: np.ndarray, identity: AutoencoderIdentity) -> None:
    channels = identity.latent_channels
    if moments.ndim != 4 or moments.shape[1] not in (channels, 2 * channels):
        raise ValueError(
            f"{folder} holds arrays of shape {moments.shape[1:]}, which autoencoder {identity.name} with "
            f"{channels} channels cannot have made; name the right one with --autoencoder"
        )


def _check_scale(folder: Path, latents: Tensor, identity: AutoencoderIdentity, normalized: bool) -> None:
    """ValueError unless the means of scaled `latents` (n, C, h, w) are about 0 and their spread 1.

    Not where they are to be `normalized`, nor for an autoencoder of scale 1, which promises neither.
    """
    mean = latents.mean(dim=(0, 2, 3), keepdim=True)
    far, spread = mean.square().mean().sqrt().item(), (latents - mean).std().item()
    found = f"channel means {far:.2f} from 0, standard deviation {spread:.2f}"
    usual = far <= USUAL_MEAN and USUAL_SPREAD[0] <= spread <= USUAL_SPREAD[1]
    if not usual and not normalized and identity.scaling_factor != 1:
        raise ValueError(
            f"the latents in {folder}, scaled by {identity.scaling_factor:g} of autoencoder {identity.name}, "
            f"have {found}, where 0 and 1 are usual: another autoencoder made them, they were scaled "
            "already, or are of pixels in [0, 1] (EDM2's own tool). If they are what they should be, give "
            "--normalize-channels, which takes this out"
        )
    runtime.say(f"{len(latents)} of the latents as the network sees them: {found}")


def _check_pixels(folder: Path, latents: Tensor, autoencoder: Autoencoder) -> None:
    pixels = np.concatenate([autoencoder.decode(some).cpu().numpy().ravel() for some in latents.split(8)])
    low, middle, high = np.quantile(pixels, [0.01, 0.5, 0.99])
    found = f"{low:.2f} ... {high:.2f}, half of them below {middle:.2f}"
    if low > DARK:  # in [-1, 1] some pixels of 64 images are dark
        raise ValueError(
            f"the latents in {folder} decode to {found}: they were made of pixels in [0, 1], as EDM2's own "
            "tool does, where sitvit and REPA use [-1, 1], or were scaled already; encode again"
        )
    runtime.say(f"their pixels, decoded: {found}; they should span about -1 ... 1")


def _half(folder: Path, cache: ForeignCache, places: range, flip: bool) -> Tensor:
    half = torch.from_numpy(cache.read(places, flip)).to(torch.float16)
    bad = (~torch.isfinite(half.flatten(1)).all(dim=1)).nonzero()
    if len(bad):
        name = cache.name(places[int(bad[0])])
        raise ValueError(f"{name} in {folder} holds latents that are not finite numbers in float16")
    return half


def _stacked(paths: list[Path]) -> np.ndarray:
    """The arrays of npy files as one; ValueError naming the first of another shape."""
    arrays = [_load(path) for path in paths]
    for path, array in zip(paths, arrays, strict=True):
        if array.shape != arrays[0].shape or array.dtype.kind != "f":
            raise ValueError(
                f"{path} holds {array.dtype} {array.shape}, others {arrays[0].dtype} {arrays[0].shape}"
            )
    return np.stack(arrays)


def _label(path: Path) -> int:
    values = _load(path)
    if values.size != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"{path} holds {values.dtype} {values.shape}, needed is one whole number")
    return int(values.item())


def _load(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read as an npy file ({error})") from None


def _opened(path: Path) -> dict[str, Any]:
    """The tensors of a safetensors file, read as they are indexed, those in bfloat16 too."""
    try:
        file = safe_open(path, framework="pt")
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # of safetensors, which has a class of its own for what it finds
        raise ValueError(f"{path} cannot be read as a safetensors file ({error})") from None
