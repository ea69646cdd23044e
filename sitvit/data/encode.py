"""Encodes images to the latent cache of `latents.py`, in as many processes as there are.

Shards and the batches in them are cut by image index alone, so a killed job goes on where it was and any
number of processes writes the same bytes. Images are read ahead by threads while others are encoded.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from . import shards
from .archives import ArchiveImages
from .arrays import ArrayImages, damaged_arrays
from .autoencoder import Autoencoder, images_to_pixels
from .images import center_crop
from .latents import FORMAT, LatentCache, shard_name, shard_ranges
from .sources import ImageFolder, ImageSource

CROP = "adm-center"
AHEAD = 3
"""Batches that are read while one is encoded."""


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
    on_error: str = "fail",
    normalize_channels: bool = False,
) -> None:
    """Encode every image of `source` into the cache `out`, or finish one that was begun.

    Process `process_index` of `num_processes` writes every `num_processes`-th shard; `wait` is their
    barrier. With `flip` the moments of the mirrored images are kept too. `on_error` "skip" leaves out the
    images that cannot be read, and records them. `normalize_channels` measures each channel's mean and
    spread, which training and sampling then divide out and put back.

    Raises:
        ValueError: an image that cannot be read (with "skip": none can), an image size that does not fit
            the autoencoder, or a cache of other settings at `out`; nothing there is changed.
    """
    start = time.monotonic()
    identity = autoencoder.identity
    if normalize_channels:
        identity = replace(identity, channel_mean=None, channel_std=None)
    ranges = shard_ranges(len(source))
    settings = {
        "format": FORMAT,
        "images": source_name,
        "images_fingerprint": source.fingerprint(),
        "num_images": len(source),
        "class_names": source.class_names,
        "image_size": image_size,
        "crop": CROP,
        "flip": flip,
        "autoencoder": asdict(identity),
        "latent_size": autoencoder.latent_size(image_size),
        "normalize_channels": normalize_channels,
    }
    if isinstance(source, ImageFolder | ArchiveImages):
        settings["image_files"] = source.file_fingerprints(ranges)
    if process_index == 0:
        shards.begin(out, settings)
    wait()
    if (out / "manifest.json").is_file():
        _check_finished(out, on_error)
        return
    todo = shards.unfinished(out, settings, ranges, source.labels, on_error == "fail")
    wait()  # no process writes before all have looked
    mine = [i for i in todo if i % num_processes == process_index]
    if process_index == 0 and len(todo) < len(ranges):
        runtime.say(f"continuing {out}: {len(ranges) - len(todo)} shards are there already")
    total, begun = sum(len(ranges[i]) for i in mine), time.monotonic()
    batches = {i: [ranges[i][k : k + batch_size] for k in range(0, len(ranges[i]), batch_size)] for i in mine}
    with runtime.progress(total, 0, "encoding", " images") as bar, ThreadPoolExecutor(_readers()) as readers:
        everything = [batch for i in mine for batch in batches[i]]
        images = ReadAhead(source, everything, image_size, readers)
        for i in mine:
            _encode_shard(source, images, len(batches[i]), autoencoder, flip, on_error, out, i, bar.update)
    spent = time.monotonic() - begun
    wait()
    if process_index == 0:
        skipped = _skipped(source, out, len(ranges))
        if len(skipped) == len(source):
            raise ValueError(f"none of the {len(source)} images can be read; the first: {skipped[0]}")
        waiting = images.waited / spent
        about = {"on_error": on_error, "skipped": skipped, "waiting_for_images": round(waiting, 3)}
        shards.finish(out, settings, ranges, start, about)
        runtime.say(
            f"{out}: encoded {len(source) - len(skipped)} images of {len(source.class_names)} classes, "
            f"skipped {len(skipped)}; {total / spent:.1f} images/s, {waiting:.0%} of the time waiting for "
            "images"
        )
    wait()


def _check_finished(out: Path, on_error: str) -> None:
    """Say what a finished cache holds; ValueError if a shard was damaged since, or lacks what was asked."""
    cache = LatentCache(out)
    cache.verify()
    skipped = cache.manifest["skipped"]
    if skipped and on_error == "fail":
        raise ValueError(
            f"{out} is finished, but without {len(skipped)} images that could not be read ({skipped[0]}); "
            f"take it so with --on-error skip, or delete {out / 'manifest.json'} to try these again"
        )
    without = f" and {len(skipped)} skipped" if skipped else ""
    runtime.say(f"{out}: {len(cache)} images are encoded already{without}")


class ReadAhead:
    """Iterates over batches as (indices, images read): uint8 (size, size, 3), or the error of each.

    `waited` is how many seconds the iteration has waited for images.
    """

    def __init__(
        self, source: ImageSource, batches: list[range], image_size: int, readers: ThreadPoolExecutor
    ) -> None:
        self.source, self.image_size, self.readers = source, image_size, readers
        self.waited = 0.0
        self._coming = iter(batches)
        self._ahead: deque[tuple[range, list[Future[np.ndarray]]]] = deque()

    def __iter__(self) -> Iterator[tuple[range, list[np.ndarray | ValueError]]]:
        return self

    def __next__(self) -> tuple[range, list[np.ndarray | ValueError]]:
        for batch in islice(self._coming, AHEAD + 1 - len(self._ahead)):
            self._ahead.append((batch, [self.readers.submit(self._read, index) for index in batch]))
        if not self._ahead:
            raise StopIteration
        batch, futures = self._ahead.popleft()
        start = time.monotonic()
        images = [_result(future) for future in futures]
        self.waited += time.monotonic() - start
        return batch, images

    def _read(self, index: int) -> np.ndarray:
        return center_crop(self.source.read(index), self.image_size)


def _result(future: "Future[np.ndarray]") -> np.ndarray | ValueError:
    try:
        return future.result()
    except ValueError as error:
        return error


def _readers() -> int:
    return min(32, (os.cpu_count() or 1) + 2)


@torch.no_grad()
def _encode_shard(
    source: ImageSource,
    images: ReadAhead,
    num_batches: int,
    autoencoder: Autoencoder,
    flip: bool,
    on_error: str,
    out: Path,
    number: int,
    on_images: Callable[[int], object],
) -> None:
    index: list[int] = []
    moments, flipped = [], []
    for batch, read in islice(images, num_batches):
        whole = [(i, image) for i, image in zip(batch, read, strict=True) if isinstance(image, np.ndarray)]
        if len(whole) < len(batch) and on_error == "fail":
            raise ValueError(_unreadable([str(error) for error in read if isinstance(error, ValueError)]))
        if whole:
            ids = [i for i, _ in whole]
            pixels = images_to_pixels(torch.from_numpy(np.stack([image for _, image in whole])))
            moments.append(_finite(autoencoder.encode(pixels), source, ids))
            if flip:
                flipped.append(_finite(autoencoder.encode(pixels.flip(-1)), source, ids))
            index += ids
        on_images(len(batch))
    if not moments:  # a shard without images, of the shape that others have
        blank = torch.zeros(1, 3, images.image_size, images.image_size)
        moments.append(autoencoder.encode(blank)[:0].cpu())
        flipped = moments
    places = np.array(index, dtype=np.int64)
    shards.write_shard(
        out, number, torch.cat(moments), torch.cat(flipped) if flip else None, source.labels[places], places
    )


def _finite(moments: Tensor, source: ImageSource, ids: list[int]) -> Tensor:
    half = moments.to(torch.float16).cpu()
    bad = (~torch.isfinite(half.flatten(1)).all(dim=1)).nonzero()
    if len(bad):
        raise ValueError(f"the latent of {source.name(ids[int(bad[0])])} is not finite")
    return half


def _skipped(source: ImageSource, out: Path, num_shards: int) -> list[str]:
    """Why each image that is in no shard was left out."""
    there = {int(i) for n in range(num_shards) for i in shards.map_safetensors(out / shard_name(n))["index"]}
    return [_problem(source, i) or source.name(i) for i in range(len(source)) if i not in there]


def _problem(source: ImageSource, index: int) -> str | None:
    try:
        source.read(index)
    except ValueError as error:
        return str(error)
    return None


def problems(source: ImageSource) -> list[str]:
    """A sentence for each image of `source` that cannot be decoded, in one pass over all."""
    found = damaged_arrays(source.path) if isinstance(source, ArrayImages) else []
    with (
        ThreadPoolExecutor(_readers()) as readers,
        runtime.progress(len(source), 0, "checking", " images") as bar,
    ):
        for first in range(0, len(source), 1000):
            block = range(first, min(first + 1000, len(source)))
            found += [text for text in readers.map(lambda i: _problem(source, i), block) if text]
            bar.update(len(block))
    return found


def _unreadable(errors: list[str]) -> str:
    """What to do about the first images that cannot be read."""
    more = f", and {len(errors) - 1} more of its batch" if len(errors) > 1 else ""
    return (
        f"{errors[0]}{more}. --check lists every such image; repair or remove them, or go on without them: "
        "--on-error skip"
    )
