"""The latent cache: each image's posterior moments, encoded once, read back by position.

    settings.json               what is being made; written first
    shard_00000.safetensors     moments (n, 2C, h, w) float16 ((n, C, h, w) without a posterior),
                                moments_flip alike where asked for, labels (n,) int64, index (n,) int64
                                (places in the source); a shard is written aside and renamed, so one
                                that is there is whole
    manifest.json               settings, autoencoder, counts, what was skipped, and the checksum of each
                                shard; written last

`shards.py` writes it, filled by `encode.py` or `importers.py`. What training reads, a cache or images that
are encoded as they are needed (`live.py`), is a `Latents`.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from .autoencoder import AutoencoderIdentity
from .demo import sha256_of_file

FORMAT = 2


def shard_ranges(num_images: int) -> list[range]:
    """Image indices of each shard: 1,000 a shard, 10,000 in large sets (fewer open files)."""
    size = 1_000 if num_images <= 100_000 else 10_000
    return [range(i, min(i + size, num_images)) for i in range(0, num_images, size)]


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard_{index:05d}.safetensors"


class Latents(Protocol):
    """What the training stream draws from.

    Attributes:
        where: what messages call it.
        class_names, labels (N,), image_size, autoencoder (its identity), has_flip.
        images, images_fingerprint: the source, as an evaluation opens it again.
        latent_shape: (C, h, w) of a latent; the moments have 2C channels, or C without a posterior.
    """

    where: str
    class_names: list[str]
    labels: np.ndarray
    image_size: int
    autoencoder: AutoencoderIdentity
    has_flip: bool
    images: str
    images_fingerprint: str
    latent_shape: tuple[int, int, int]

    def __len__(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    def expect(self, ids: np.ndarray) -> None: ...
    def moments(self, ids: np.ndarray, flips: np.ndarray) -> Tensor: ...


class LatentCache:
    """A finished cache (a `Latents`), memory-mapped; each process that gets it maps it anew.

    Opening it checks that each shard is there in its full size. It is a map-style data set too, of
    (moments, label): DataLoader(cache, batch_size=256, shuffle=True, collate_fn=tuple) reads whole batches.

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
                f"{folder} has cache format {self.manifest['format']}, this version reads {FORMAT}; "
                "encode again"
            )
        keys = ["images", "images_fingerprint", "class_names", "image_size", "flip", "autoencoder"]
        self.manifest = runtime.read_record(path, [*keys, "latent_size", "shards"])
        self.where = str(folder)
        self.images: str = self.manifest["images"]
        self.images_fingerprint: str = self.manifest["images_fingerprint"]
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
        self.labels: np.ndarray = np.concatenate([shard["labels"] for shard in shards])
        self.source_index: np.ndarray = np.concatenate([shard["index"] for shard in shards])
        self._starts = np.cumsum([0, *(len(shard["labels"]) for shard in shards)])
        if not 0 <= self.labels.min() <= self.labels.max() < len(self.class_names):
            raise ValueError(
                f"{folder} has labels from {self.labels.min()} to {self.labels.max()}, but "
                f"{len(self.class_names)} class names"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return LatentCache, (self.folder,)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.moments(np.array([index]), np.zeros(1, dtype=bool))[0], int(self.labels[index])

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        ids = np.asarray(indices)
        return self.moments(ids, np.zeros(len(ids), dtype=bool)), torch.from_numpy(self.labels[ids])

    @property
    def num_bytes(self) -> int:
        """Size of all shards."""
        return sum(shard["bytes"] for shard in self.manifest["shards"])

    def verify(self) -> None:
        """Read everything and compare it with the manifest's checksums; ValueError naming damaged shards."""
        paths = [(self.folder / shard["file"], shard["sha256"]) for shard in self.manifest["shards"]]
        bad = [str(path) for path, expected in paths if sha256_of_file(path) != expected]
        if bad:
            raise self._damaged(", ".join(bad), "its content is not what was written")

    @property
    def fingerprint(self) -> str:
        """Names the cache's content and its scale: the same for the same latents, wherever it lies."""
        about = [shard["sha256"] for shard in self.manifest["shards"]]
        about.append(repr(replace(self.autoencoder, name="")))
        return hashlib.sha256("".join(about).encode()).hexdigest()

    def expect(self, ids: np.ndarray) -> None:
        """Nothing: the system's page cache reads ahead."""

    def moments(self, ids: np.ndarray, flips: np.ndarray) -> Tensor:
        """Moments (n, 2C or C, h, w) float16 of the images `ids` (n,), mirrored where `flips` (n,) bool."""
        shards = np.searchsorted(self._starts, ids, side="right") - 1
        rows = ids - self._starts[shards]
        plain, mirrored = self._moments[False], self._moments[True]
        gathered = np.empty((len(ids), *plain[0].shape[1:]), dtype=np.float16)
        places = zip(shards.tolist(), rows.tolist(), flips.tolist(), strict=True)
        for k, (shard, row, flip) in enumerate(places):
            gathered[k] = (mirrored if flip else plain)[shard][row]
        return torch.from_numpy(gathered)

    def _map_shard(self, shard: dict[str, Any]) -> dict[str, np.ndarray]:
        path = self.folder / shard["file"]
        found = path.stat().st_size if path.is_file() else 0
        if found != shard["bytes"]:
            raise self._damaged(path, f"{found} bytes, expected {shard['bytes']}")
        try:
            return map_safetensors(path)
        except (ValueError, KeyError, TypeError, OverflowError):
            raise self._damaged(path, "its header cannot be read") from None

    def _damaged(self, path: Path | str, how: str) -> ValueError:
        return ValueError(
            f"{path} is damaged: {how}; delete that and {self.folder / 'manifest.json'}, then run the same "
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
        # A plain view: indexing a memmap costs ten times as much.
        arrays[name] = np.asarray(mapped)[begin:end].view(types[entry["dtype"]]).reshape(entry["shape"])
    return arrays
