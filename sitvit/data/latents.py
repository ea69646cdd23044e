"""The latent cache: each image's posterior moments, encoded once, read back by position.

    settings.json               what is being made; written first
    shard_00000.safetensors     moments (n, 2C, h, w) float16, moments_flip alike where asked for,
                                labels (n,) int64; a shard is written aside and renamed, so one that
                                is there is whole
    manifest.json               settings, counts and the checksum of each shard; written last

`encode.py` writes it.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import runtime
from .autoencoder import AutoencoderIdentity
from .demo import sha256_of_file

FORMAT = 1


def shard_ranges(num_images: int) -> list[range]:
    """Image indices of each shard: 1,000 a shard, 10,000 in large sets (fewer open files)."""
    size = 1_000 if num_images <= 100_000 else 10_000
    return [range(i, min(i + size, num_images)) for i in range(0, num_images, size)]


def shard_name(index: int) -> str:
    """File name of shard `index`."""
    return f"shard_{index:05d}.safetensors"


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
