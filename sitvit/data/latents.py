"""The latent cache: each image's posterior moments, encoded once, read back by position.

    settings.json               what is being made; written first
    shard_00000.safetensors     moments (n, 2C, h, w) float16, moments_flip alike where asked for,
                                labels (n,) int64; a shard is written aside and renamed, so one that
                                is there is whole
    manifest.json               settings, counts and the checksum of each shard; written last

Shards and the batches in them are cut by image index alone, so a killed job goes on where it was and
any number of processes writes the same bytes.
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
from .autoencoder import Autoencoder, AutoencoderIdentity, images_to_pixels
from .demo import sha256_of_file
from .images import ImageSource, center_crop

FORMAT = 1
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


def shard_ranges(num_images: int) -> list[range]:
    """Image indices of each shard: 1,000 a shard, 10,000 in large sets (fewer open files)."""
    size = 1_000 if num_images <= 100_000 else 10_000
    return [range(i, min(i + size, num_images)) for i in range(0, num_images, size)]


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard_{index:05d}.safetensors"


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


class LatentCache:
    """A finished cache, memory-mapped. Opening it checks that each shard is there in its full size.

    Attributes:
        class_names, labels (N,), image_size, autoencoder (its identity), has_flip.
        latent_shape: (C, h, w) of a latent; the moments have 2C channels.
        fingerprint: hash of the manifest's shard checksums and settings, for a run's record.

    Raises:
        ValueError: no finished cache there, or a shard missing or of another size.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "manifest.json").is_file():
            begun = "an unfinished" if (folder / "settings.json").is_file() else "no"
            raise ValueError(
                f"{folder} is {begun} latent cache; make it with "
                f"scripts/encode_latents.py --images FOLDER --out {folder}"
            )
        self.folder = folder
        path = folder / "manifest.json"
        self.manifest = runtime.read_record(path, ["format"])
        if self.manifest["format"] != FORMAT:
            raise ValueError(
                f"{folder} has cache format {self.manifest['format']}, this version reads {FORMAT}"
            )
        keys = ["images", "images_fingerprint", "class_names", "image_size", "flip", "autoencoder"]
        self.manifest = runtime.read_record(path, [*keys, "latent_size", "shards"])
        self.class_names: list[str] = self.manifest["class_names"]
        self.image_size: int = self.manifest["image_size"]
        self.has_flip: bool = self.manifest["flip"]
        self.autoencoder = AutoencoderIdentity(**self.manifest["autoencoder"])
        size = self.manifest["latent_size"]
        self.latent_shape = (self.autoencoder.latent_channels, size, size)
        shards = [self._map_shard(shard) for shard in self.manifest["shards"]]
        self._moments = {
            False: [shard["moments"] for shard in shards],
            True: [shard["moments_flip"] for shard in shards if self.has_flip],
        }
        self.labels = np.concatenate([shard["labels"] for shard in shards])
        self._shard_size = len(shard_ranges(len(self.labels))[0])

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_bytes(self) -> int:
        """Size of all shards."""
        return sum(shard["bytes"] for shard in self.manifest["shards"])

    def verify(self) -> None:
        """Read everything and compare it with the manifest's checksums; ValueError naming a damaged shard."""
        for shard in self.manifest["shards"]:
            path = self.folder / shard["file"]
            if sha256_of_file(path) != shard["sha256"]:
                raise self._damaged(path, "its content is not what was written")

    @property
    def fingerprint(self) -> str:
        """Names the cache's content: the same for the same moments and labels, wherever it lies."""
        import hashlib

        checksums = [shard["sha256"] for shard in self.manifest["shards"]]
        return hashlib.sha256("".join(checksums).encode()).hexdigest()

    def moments(self, ids: np.ndarray, flips: np.ndarray) -> Tensor:
        """Moments (n, 2C, h, w) float16 of the images `ids` (n,), mirrored where `flips` (n,) bool."""
        rows = [
            self._moments[bool(flip)][i // self._shard_size][i % self._shard_size]
            for i, flip in zip(ids, flips, strict=True)
        ]
        return torch.from_numpy(np.stack(rows))

    def _map_shard(self, shard: dict[str, Any]) -> dict[str, np.ndarray]:
        path = self.folder / shard["file"]
        found = path.stat().st_size if path.is_file() else 0
        if found != shard["bytes"]:
            raise self._damaged(path, f"{found} bytes, expected {shard['bytes']}")
        try:
            return map_safetensors(path)
        except (ValueError, KeyError, TypeError, OverflowError):
            raise self._damaged(path, "its header cannot be read") from None

    def _damaged(self, path: Path, how: str) -> ValueError:
        return ValueError(
            f"{path} is damaged: {how}; delete it and {self.folder / 'manifest.json'}, then run the same "
            "encode command again"
        )


def map_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as memory-mapped arrays, read only when touched."""
    types = {"F16": np.float16, "F32": np.float32, "I64": np.int64}
    with open(path, "rb") as file:
        length = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    mapped = np.memmap(path, mode="r", dtype=np.uint8)
    arrays = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        arrays[name] = mapped[begin:end].view(types[entry["dtype"]]).reshape(entry["shape"])
    return arrays
