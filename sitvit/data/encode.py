"""Encodes images to the latent cache of `latents.py`, in as many processes as there are.

Shards and the batches in them are cut by image index alone, so a killed job goes on where it was and any
number of processes writes the same bytes.
"""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from .. import runtime
from .autoencoder import Autoencoder, images_to_pixels
from .demo import sha256_of_file
from .images import ImageSource, center_crop
from .latents import FORMAT, LatentCache, shard_name, shard_ranges

CROP = "adm-center"


def encode(
    source: ImageSource,
    source_name: str,
    autoencoder: Autoencoder,
    image_size: int,
    out: Path,
    batch_size: int,
    flip: bool,
    process_index: int = 0,
    num_processes: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Encode every image of `source` into the cache `out`, or finish one that was begun.

    Process `process_index` of `num_processes` writes every `num_processes`-th shard; `wait` is their
    barrier. With `flip` the moments of the mirrored images are kept too.

    Raises:
        ValueError: an image that cannot be read, an image size that does not fit the autoencoder, or a
            cache of other settings at `out`; nothing there is changed.
    """
    start = time.monotonic()
    latent_size = autoencoder.latent_size(image_size)
    settings = {
        "format": FORMAT,
        "images": source_name,
        "images_fingerprint": source.fingerprint(),
        "num_images": len(source),
        "class_names": source.class_names,
        "image_size": image_size,
        "crop": CROP,
        "flip": flip,
        "autoencoder": asdict(autoencoder.identity),
        "latent_size": latent_size,
    }
    if process_index == 0:
        _begin(out, settings)
    wait()
    if (out / "manifest.json").is_file():
        LatentCache(out).verify()  # says so if a shard went missing or was damaged since
        runtime.say(f"{out}: all {len(source)} images are encoded already")
        return
    shards = shard_ranges(len(source))
    unfinished = [i for i in range(len(shards)) if not (out / shard_name(i)).is_file()]
    mine = [i for i in unfinished if i % num_processes == process_index]
    total = sum(len(shards[i]) for i in mine)
    if process_index == 0 and len(unfinished) < len(shards):
        runtime.say(f"continuing {out}: {len(shards) - len(unfinished)} shards are there already")
    with runtime.progress(total, 0, "encoding", " images") as bar, ThreadPoolExecutor() as readers:
        for i in mine:
            tensors = _encode_shard(
                source, shards[i], autoencoder, image_size, batch_size, flip, readers, bar.update
            )
            with runtime.write_aside(out / shard_name(i)) as temporary:
                save_file(tensors, temporary)
    wait()
    if process_index == 0:
        manifest = {
            **settings,
            "shards": [
                {
                    "file": shard_name(i),
                    "num_images": len(shard),
                    "bytes": (out / shard_name(i)).stat().st_size,
                    "sha256": sha256_of_file(out / shard_name(i)),
                }
                for i, shard in enumerate(shards)
            ],
            "command": runtime.command_line(),
            "seconds": round(time.monotonic() - start, 1),
            "peak_memory_mib": runtime.peak_memory_mib(),
        }
        runtime.write_json(out / "manifest.json", manifest)
        runtime.say(f"{out}: encoded {len(source)} images of {len(source.class_names)} classes")
    wait()


def _begin(out: Path, settings: dict[str, Any]) -> None:
    """Write the settings, or check that those of an earlier run at `out` are the same."""
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


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else text[:300] + "..."


def _encode_shard(
    source: ImageSource,
    indices: range,
    autoencoder: Autoencoder,
    image_size: int,
    batch_size: int,
    flip: bool,
    readers: ThreadPoolExecutor,
    on_images: Callable[[int], object],
) -> dict[str, Tensor]:
    batches = [indices[i : i + batch_size] for i in range(0, len(indices), batch_size)]
    moments, flipped = [], []
    for batch, images in zip(batches, _read_ahead(source, batches, image_size, readers), strict=True):
        pixels = images_to_pixels(images)
        moments.append(_finite(autoencoder.encode(pixels), source, batch))
        if flip:
            flipped.append(_finite(autoencoder.encode(pixels.flip(-1)), source, batch))
        on_images(len(batch))
    tensors = {"moments": torch.cat(moments), "labels": torch.from_numpy(source.labels[indices])}
    return tensors | ({"moments_flip": torch.cat(flipped)} if flip else {})


def _read_ahead(
    source: ImageSource, batches: list[range], image_size: int, readers: ThreadPoolExecutor
) -> Iterator[Tensor]:
    """Yield uint8 (B, H, W, 3) a batch; the next one is decoded while this one is encoded."""

    def read(index: int) -> np.ndarray | ValueError:
        try:
            return center_crop(source.read(index), image_size)
        except ValueError as error:
            return error

    ahead = readers.map(read, batches[0])
    for following in [*batches[1:], range(0)]:
        images, ahead = list(ahead), readers.map(read, following)
        whole = [image for image in images if isinstance(image, np.ndarray)]
        if len(whole) < len(images):
            raise ValueError(unreadable(source, readers))
        yield torch.from_numpy(np.stack(whole))


def unreadable(source: ImageSource, readers: ThreadPoolExecutor) -> str:
    """A sentence on every image of `source` that cannot be read, in one pass over all."""

    def problem(index: int) -> str | None:
        try:
            source.read(index)
        except ValueError as error:
            return str(error)
        return None

    runtime.say("an image cannot be read; looking for others")
    found = [text for text in readers.map(problem, range(len(source))) if text]
    more = f"; and {len(found) - 20} more" if len(found) > 20 else ""
    return (
        f"{len(found)} of {len(source)} images cannot be read: {'; '.join(found[:20])}{more}. Repair or "
        "remove them, then encode into a fresh --out"
    )


def _finite(moments: Tensor, source: ImageSource, batch: range) -> Tensor:
    half = moments.to(torch.float16).cpu().contiguous()
    bad = (~torch.isfinite(half.flatten(1)).all(dim=1)).nonzero()
    if len(bad):
        raise ValueError(f"the latent of {source.name(batch[int(bad[0])])} is not finite")
    return half
