"""Writes a latent cache (`latents.py` has its layout), whoever fills it: settings, shards, manifest.

Shards are cut by image index alone. One that is there and is what it should be is kept, so a killed job
goes on with the rest.
"""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from .. import runtime
from .autoencoder import AutoencoderIdentity
from .demo import sha256_of_file
from .latents import check_shard, map_safetensors, shard_name


def begin(out: Path, settings: dict[str, Any]) -> None:
    """Write the settings, or check that those of an earlier run at `out` are the same.

    Where only the content of some images changed, as `image_files` (of a folder or zip) tells, the
    shards of these are deleted and told, unless the cache is finished.

    Raises:
        ValueError: other settings, naming the first key, or other files; nothing there is changed.
    """
    path = out / "settings.json"
    if not path.exists():
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} has files that are not a latent cache; choose another --out")
        runtime.write_json(path, settings)
        return
    found = runtime.read_record(path, [])
    changed = _changed_shards(found, settings)
    for key, value in settings.items():
        if found.get(key) != value and key == "images_fingerprint" and changed is None:
            raise ValueError(
                f"{out} was begun with other images: files in {settings['images']} were added, removed or "
                "written since; choose another --out, or delete that folder"
            )
        if key not in ("images_fingerprint", "image_files"):
            old, new = _differing(found.get(key), value)
            if old != new:
                raise ValueError(
                    f"{out} holds latents made with {key} = {_short(old)}, not {_short(new)}; choose another "
                    "--out, or delete that folder"
                )
    if changed:
        _forget(out, changed)
    if found != settings and not (out / "manifest.json").exists():
        runtime.write_json(path, settings)


def _differing(old: object, new: object) -> tuple[object, object]:
    """Two settings; of two autoencoders only where they differ, as one may lie in two folders."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return old, new
    keys = [key for key in new if key != "name" and old.get(key) != new[key]]
    names = ["name"] if keys else []
    return {key: old.get(key) for key in names + keys}, {key: new[key] for key in names + keys}


def _changed_shards(found: dict[str, Any], settings: dict[str, Any]) -> list[int] | None:
    """Shards with images that were written anew since; None where more than that changed or nothing tells."""
    before, now = found.get("image_files"), settings.get("image_files")
    if not before or not now or before["names"] != now["names"]:
        return None
    pairs = zip(before["shards"], now["shards"], strict=True)
    return [i for i, (old, new) in enumerate(pairs) if old != new]


def _forget(out: Path, numbers: list[int]) -> None:
    names = ", ".join(shard_name(i) for i in numbers[:5]) + (", ..." if len(numbers) > 5 else "")
    if (out / "manifest.json").exists():
        raise ValueError(
            f"{out} is finished, but images of {names} were written since; choose another --out, or delete "
            f"{out / 'manifest.json'} to encode only these again"
        )
    runtime.say(f"images of {names} were written since {out} was begun; these are encoded again")
    for i in numbers:
        (out / shard_name(i)).unlink(missing_ok=True)


def unfinished(
    out: Path, settings: dict[str, Any], ranges: Sequence[range], labels: np.ndarray, whole: bool
) -> list[int]:
    """The shards that are still to be written, or to be written again: told with the reason.

    One that is there is kept if it has the settings' shape, and images of its range with their `labels` of
    the source (N,); all of them where `whole`.
    """
    todo = []
    for i, places in enumerate(ranges):
        path = out / shard_name(i)
        if not path.exists():
            todo.append(i)
            continue
        try:
            _check_kept(path, settings, places, labels, whole)
        except ValueError as error:
            runtime.say(f"{path} is not what it should be: {error}; it is made again")
            todo.append(i)
    return todo


def _check_kept(path: Path, settings: dict[str, Any], places: range, labels: np.ndarray, whole: bool) -> None:
    tensors = map_safetensors(path)
    size = settings["latent_size"]
    check_shard(tensors, (settings["autoencoder"]["latent_channels"], size, size), settings["flip"])
    index = tensors["index"]
    if len(index) and not places.start <= index.min() <= index.max() < places.stop:
        raise ValueError(f"its images are not {places.start} to {places.stop - 1}")
    if (np.diff(index) <= 0).any() or not np.array_equal(tensors["labels"], labels[index]):
        raise ValueError("its images are not in order, or have other labels")
    if whole and len(index) < len(places):
        raise ValueError(f"{len(places) - len(index)} of its images were skipped")


def write_shard(
    out: Path, number: int, moments: Tensor, flipped: Tensor | None, labels: np.ndarray, index: np.ndarray
) -> None:
    """Write moments (n, 2C or C, h, w) as float16, labels (n,) and places in the source (n,)."""
    tensors = {"moments": moments.to(torch.float16).contiguous()}
    if flipped is not None:
        tensors["moments_flip"] = flipped.to(torch.float16).contiguous()
    tensors |= {"labels": torch.from_numpy(labels), "index": torch.from_numpy(index)}
    with runtime.write_aside(out / shard_name(number)) as temporary:
        save_file(tensors, temporary)


def finish(
    out: Path, settings: dict[str, Any], shards: list[range], start: float, about: dict[str, Any]
) -> None:
    """Write the manifest, when every shard is there; `about` is what else it should record."""
    # Left by processes that were killed, ours and safetensors' own; nobody else writes now.
    for partial in [*out.glob(".*.partial"), *out.glob(".tmp??????")]:
        partial.unlink()
    files = [out / shard_name(i) for i in range(len(shards))]
    mapped = [map_safetensors(path) for path in files]
    if settings["normalize_channels"]:
        identity = AutoencoderIdentity(**settings["autoencoder"])
        mean, std = channel_statistics((shard["moments"] for shard in mapped), identity)
        statistics = {"channel_mean": mean, "channel_std": std}
        settings = {**settings, "autoencoder": {**settings["autoencoder"], **statistics}}
    counts = [len(shard["labels"]) for shard in mapped]
    records = [
        {
            "file": path.name,
            "num_images": count,
            "bytes": path.stat().st_size,
            "sha256": sha256_of_file(path),
        }
        for path, count in zip(files, counts, strict=True)
    ]
    manifest = {
        **settings,
        **about,
        "num_latents": sum(counts),
        "shards": records,
        "command": runtime.command_line(),
        "seconds": round(time.monotonic() - start, 1),
        "peak_memory_mib": runtime.peak_memory_mib(),
    }
    runtime.write_json(out / "manifest.json", manifest)


def channel_statistics(
    moments: Iterable[np.ndarray], identity: AutoencoderIdentity
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation (C,) of the scaled latents, over images, places and posterior noise.

    var = E[mean^2] + E[exp(log-variance)] - E[mean]^2, in float64.
    """
    channels, count = identity.latent_channels, 0
    first, second = np.zeros(channels), np.zeros(channels)
    for shard in moments:
        for block in np.split(shard, range(100, len(shard), 100)):
            values = block.astype(np.float64)
            mean, log_variance = values[:, :channels], values[:, channels:]
            first += mean.sum(axis=(0, 2, 3))
            second += (mean**2).sum(axis=(0, 2, 3))
            if log_variance.shape[1]:
                second += np.exp(log_variance.clip(-30, 20)).sum(axis=(0, 2, 3))
            count += mean[:, 0].size
    mean = first / count
    std = np.sqrt(second / count - mean**2)
    scaled = (mean - identity.shift_factor) * identity.scaling_factor
    return scaled.tolist(), (std * identity.scaling_factor).tolist()


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else text[:300] + "..."
