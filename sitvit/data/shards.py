"""Writes a latent cache (`latents.py` has its layout), whoever fills it: settings, shards, manifest.

Shards are cut by image index alone. One that is there is whole, so a killed job goes on with the rest.
"""

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from .. import runtime
from .autoencoder import AutoencoderIdentity
from .demo import sha256_of_file
from .latents import map_safetensors, shard_name


def begin(out: Path, settings: dict[str, Any]) -> None:
    """Write the settings, or check that those of an earlier run at `out` are the same.

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
    for key, value in settings.items():
        if found.get(key) != value and key == "images_fingerprint":
            raise ValueError(
                f"{out} was begun with other images: files in {settings['images']} were added, removed or "
                "written since; choose another --out, or delete that folder"
            )
        if found.get(key) != value:
            raise ValueError(
                f"{out} holds latents made with {key} = {_short(found.get(key))}, not {_short(value)}; "
                "choose another --out, or delete that folder"
            )


def unfinished(out: Path, num_shards: int) -> list[int]:
    """The shards that are still to be written."""
    return [i for i in range(num_shards) if not (out / shard_name(i)).is_file()]


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
