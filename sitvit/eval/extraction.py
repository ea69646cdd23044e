"""Images through a feature network, in any number of processes, continued where it was killed.

The unit of work is a block of consecutive images, whose features are one file, written whole or not at all.
Blocks, and the batches in them, are cut by image index alone, and are put together in order: the features do
not depend on the number of processes by a bit, nor on an interruption.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .. import runtime
from ..data.images import center_crop
from .features import FeatureExtractor, Features
from .sets import ImageSet, LabelledImages
from .statistics import FeatureStatistics

BLOCK = 1_000


@dataclass(frozen=True)
class Extracted:
    """The features of a set, in the order of its images."""

    pool: np.ndarray  # (N, D) float32
    statistics: FeatureStatistics
    logits: np.ndarray | None  # (N, classes) float32
    spatial: FeatureStatistics | None
    image_shape: tuple[int, ...]


def extract(
    images: ImageSet,
    image_size: int | None,
    extractor: FeatureExtractor,
    batch_size: int,
    scratch: Path,
    what: str,
    state: Any,
) -> Extracted | None:
    """The features of `images`, cropped to `image_size`; None on processes other than the main one.

    Every `state.num_processes`-th block is this process's. `scratch` keeps the blocks until `forget`.

    Raises:
        ValueError: an image that is damaged or of another size, naming it; the blocks before are kept.
    """
    blocks = block_ranges(len(images.images), images.block)
    mine = {n: r for n, r in enumerate(blocks) if n % state.num_processes == state.process_index}
    todo = {n: block for n, block in mine.items() if not _is_whole(_path(scratch, n), len(block))}
    if state.is_main_process and len(todo) < len(mine):
        runtime.say(f"continuing with the features of the {what}: {len(mine) - len(todo)} blocks are there")
    total = sum(map(len, todo.values()))
    with (
        runtime.StopRequest() as stop,
        runtime.progress(total, 0, f"features of the {what}", " images") as bar,
    ):
        for number, block in todo.items():
            kept: list[Features] = []
            shape: tuple[int, ...] = ()
            for batch in _batches(images, block, image_size, batch_size):
                kept.append(_on_cpu(extractor(batch)))
                shape = tuple(batch.shape[1:])
                bar.update(len(batch))
                if stop.requested:
                    raise KeyboardInterrupt(
                        "stopped; the same command continues with the blocks that are there"
                    )
            _save(_path(scratch, number), kept, shape)
    state.wait_for_everyone()
    if not state.is_main_process:
        return None
    return _gather(scratch, blocks, extractor, images.images, state.device)


def forget(scratch: Path) -> None:
    """Remove what `extract` kept."""
    shutil.rmtree(scratch, ignore_errors=True)


def block_ranges(total: int, together: int | None) -> list[range]:
    """Blocks of about `BLOCK` images; what is made `together` is not cut."""
    size = max(BLOCK // together, 1) * together if together else BLOCK
    return [range(start, min(start + size, total)) for start in range(0, total, size)]


def _batches(images: ImageSet, block: range, image_size: int | None, batch_size: int) -> Iterator[Tensor]:
    """uint8 (B, H, W, 3), the next one read ahead by threads where the source allows it."""
    source = images.images

    def read(index: int) -> np.ndarray:
        image = source.read(index)
        return image if image_size is None else center_crop(image, image_size)

    cuts = [block[start : start + batch_size] for start in range(0, len(block), batch_size)]
    shape = images.shape_of_all() if image_size is None else (image_size, image_size, 3)
    whose = "its record" if images.shape else source.name(0)
    if images.in_order:
        for cut in cuts:
            yield _stack(source, cut, [read(index) for index in cut], shape, whose)
        return
    with ThreadPoolExecutor(4) as threads:
        ahead: list[list[Future[np.ndarray]]] = []
        try:
            for cut in cuts[:2]:
                ahead.append([threads.submit(read, index) for index in cut])
            for number, cut in enumerate(cuts):
                arrived = [future.result() for future in ahead.pop(0)]
                if number + 2 < len(cuts):
                    ahead.append([threads.submit(read, index) for index in cuts[number + 2]])
                yield _stack(source, cut, arrived, shape, whose)
        finally:
            threads.shutdown(wait=True, cancel_futures=True)


def _stack(
    source: LabelledImages, indices: range, arrays: list[np.ndarray], shape: tuple[int, ...], whose: str
) -> Tensor:
    for index, image in zip(indices, arrays, strict=True):
        if image.shape != shape:
            raise ValueError(
                f"{source.name(index)} has {image.shape[1]} x {image.shape[0]} pixels, but "
                f"{whose} has {shape[1]} x {shape[0]}; all must have one size"
            )
    batch = np.stack(arrays)
    if batch.dtype != np.uint8:
        raise ValueError(f"{source.name(indices[0])} is {batch.dtype}; needed is uint8, values 0 to 255")
    if len(batch) > 1 and batch.max() == 1:
        raise ValueError(
            f"{source.name(indices[0])} and those after it have only the values 0 and 1; needed is uint8 "
            "with values 0 to 255"
        )
    return torch.from_numpy(batch)


def _on_cpu(features: Features) -> Features:
    pool, logits, spatial = (None if x is None else x.cpu() for x in features)
    assert pool is not None
    return Features(pool, logits, spatial)


def _path(scratch: Path, number: int) -> Path:
    return scratch / f"block_{number:05d}.safetensors"


def _save(path: Path, batches: list[Features], shape: tuple[int, ...]) -> None:
    columns = {
        name: torch.cat(parts).contiguous()
        for name, parts in zip(Features._fields, zip(*batches, strict=True), strict=True)
        if parts[0] is not None
    }
    columns["image_shape"] = torch.tensor(shape)
    with runtime.write_aside(path) as temporary:
        save_file(columns, temporary)


def _is_whole(path: Path, count: int) -> bool:
    try:
        with safe_open(path, "pt") as file:
            return file.get_slice("pool").get_shape()[0] == count
    except (OSError, SafetensorError):  # missing, or cut short in a way that write_aside cannot make
        return False


def _gather(
    scratch: Path, blocks: list[range], extractor: FeatureExtractor, images: LabelledImages, device: Any
) -> Extracted:
    total, width = len(images), extractor.num_features
    pool = np.empty((total, width), dtype=np.float32)
    statistics = FeatureStatistics(width, device)
    spatial = FeatureStatistics(extractor.num_spatial, device) if extractor.num_spatial else None
    logits: list[np.ndarray] = []
    shape: tuple[int, ...] = ()
    for number, block in enumerate(blocks):
        with safe_open(_path(scratch, number), "pt") as file:
            pool[block.start : block.stop] = file.get_tensor("pool").numpy()
            statistics.update(pool[block.start : block.stop])
            names = set(file.keys())
            if "logits" in names:
                logits.append(file.get_tensor("logits").numpy())
            if spatial is not None:
                spatial.update(file.get_tensor("spatial"))
            shape = tuple(file.get_tensor("image_shape").tolist())
    return Extracted(pool, statistics, np.concatenate(logits) if logits else None, spatial, shape)
