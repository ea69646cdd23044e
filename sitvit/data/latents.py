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
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

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
        if not len(self.labels):
            raise ValueError(f"{folder} holds no latents")
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
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        ids = np.asarray(indices)
        moments = self.moments(ids, np.zeros(len(ids), dtype=bool))
        check_shared_memory(moments.nbytes)
        return list(zip(moments, self.labels[ids].tolist(), strict=True))  # as a DataLoader collates it

    @property
    def num_bytes(self) -> int:
        """Size of all shards."""
        return sum(shard["bytes"] for shard in self.manifest["shards"])

    def verify(self) -> None:
        """Read everything; ValueError naming shards or values of the manifest that are not as written."""
        wrong = self._wrong_values()
        if wrong:
            raise ValueError(
                f"{self.folder / 'manifest.json'} is not this cache's, or was changed: {'; '.join(wrong)}; "
                "delete it, and run the same encode command again"
            )
        paths = [(self.folder / shard["file"], shard["sha256"]) for shard in self.manifest["shards"]]
        bad = [str(path) for path, expected in paths if sha256_of_file(path) != expected]
        if bad:
            raise self._damaged(", ".join(bad), "its content is not what was written")

    def _wrong_values(self) -> list[str]:
        """What the manifest says and the settings or the shards do not."""
        settings = runtime.read_record(self.folder / "settings.json", ["num_images", "autoencoder"])
        said = dict(self.manifest)
        if settings.get("normalize_channels"):  # measured at the end, so not among the settings
            unknown = {"channel_mean": None, "channel_std": None}
            said["autoencoder"] = {**self.manifest["autoencoder"], **unknown}
        wrong = [f"{key} is not that of settings.json" for key in settings if said.get(key) != settings[key]]
        places, skipped = self.source_index, self.manifest.get("skipped", [])
        if self.manifest.get("num_latents") != len(self):
            wrong.append(f"num_latents {self.manifest.get('num_latents')}, but the shards hold {len(self)}")
        if len(self) + len(skipped) != settings["num_images"]:
            wrong.append(
                f"{len(self)} latents and {len(skipped)} skipped, but {settings['num_images']} images"
            )
        if len(np.unique(places)) < len(places) or not 0 <= places.min() <= places.max() < len(self) + len(
            skipped
        ):
            wrong.append("the shards do not hold each image once")
        return wrong

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
            tensors = map_safetensors(path)
            check_shard(tensors, self.latent_shape, self.has_flip)
        except ValueError as error:
            raise self._damaged(path, str(error)) from None
        if shard.get("num_images", len(tensors["labels"])) != len(tensors["labels"]):
            raise self._damaged(path, f"{len(tensors['labels'])} latents, expected {shard['num_images']}")
        return tensors

    def _damaged(self, path: Path | str, how: str) -> ValueError:
        return ValueError(
            f"{path} is damaged: {how}; delete that and {self.folder / 'manifest.json'}, then run the same "
            "encode command again"
        )


SHARED_MEMORY = Path("/dev/shm")
"""Where Linux keeps what processes share; a container has 64 MB there unless it is told otherwise."""


def check_shared_memory(num_bytes: int) -> None:
    """In a worker of a DataLoader: OSError where no room is left to hand over `num_bytes` from each worker.

    Without room, PyTorch's worker dies of a bus error, which names neither cause nor remedy.
    """
    worker = get_worker_info()
    if worker is None or not SHARED_MEMORY.is_dir():
        return
    free, needed = shutil.disk_usage(SHARED_MEMORY).free, num_bytes * worker.num_workers
    if free < needed:
        raise OSError(
            f"the shared memory is not enough: {SHARED_MEMORY} has {free / 1e6:.1f} MB free, a batch of each "
            f"of {worker.num_workers} workers needs {needed / 1e6:.1f} MB; use num_workers=0, or enlarge it "
            "(docker run --shm-size=8g)"
        )


def check_shard(tensors: dict[str, np.ndarray], latent_shape: tuple[int, int, int], flip: bool) -> None:
    """ValueError in words where these are not the tensors of a shard of latents (C, h, w)."""
    names = {"moments", "labels", "index"} | ({"moments_flip"} if flip else set())
    if tensors.keys() != names:
        raise ValueError(f"it holds {', '.join(sorted(tensors))} in place of {', '.join(sorted(names))}")
    channels, *size = latent_shape
    count = len(tensors["index"])
    for name in sorted(names):
        array = tensors[name]
        shapes = [(count,)] if name in ("labels", "index") else [
            (count, c, *size) for c in (channels, 2 * channels)
        ]  # fmt: skip
        dtype = np.int64 if name in ("labels", "index") else np.float16
        if array.shape not in shapes or array.dtype != dtype:
            raise ValueError(f"its {name} are {array.dtype} {array.shape}, expected {shapes[-1]}")


TYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64, "I32": np.int32, "I64": np.int64}


def map_safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file as memory-mapped arrays, read only when touched.

    Raises:
        ValueError: no such file, or a tensor of a type that is not among `TYPES`; it does not name `path`.
    """
    try:
        with open(path, "rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), path.stat().st_size)
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        mapped = np.memmap(path, mode="r", dtype=np.uint8)
        return {name: _tensor(np.asarray(mapped), 8 + length, name, entry) for name, entry in header.items()}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError, AttributeError, OverflowError):
        raise ValueError("its header cannot be read") from None


def _tensor(content: np.ndarray, start: int, name: str, entry: dict[str, Any]) -> np.ndarray:
    """A plain view of a mapped file: indexing a memmap costs ten times as much."""
    begin, end = (start + offset for offset in entry["data_offsets"])
    if entry["dtype"] not in TYPES:
        raise ValueError(f"its {name} are of type {entry['dtype']}; known are {', '.join(TYPES)}")
    dtype = np.dtype(TYPES[entry["dtype"]])
    shape = tuple(entry["shape"])
    if not start <= begin <= end <= len(content) or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name} {shape} does not fit its {len(content)} bytes")
    return content[begin:end].view(dtype).reshape(shape)
