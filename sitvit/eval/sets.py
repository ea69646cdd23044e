"""What can be measured: a folder of scripts/sample.py, a latent cache (its reconstructions: the floor that
the autoencoder sets), or any images: a folder, a zip, an npz file, an embedded set.
"""

import hashlib
import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ..data.archives import ArchiveImages, zip_members
from ..data.autoencoder import Autoencoder, latents_of_moments, pixels_to_images
from ..data.images import read_image
from ..data.latents import LatentCache
from ..data.sources import image_files, is_image, is_junk, open_images
from ..generate.samples import RECORD, Samples

DECODED_AT_ONCE = 50


class LabelledImages(Protocol):
    """What both sides of a comparison are; `class_names` is empty where nobody knows the classes."""

    class_names: list[str]
    labels: np.ndarray

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> np.ndarray: ...


@dataclass(frozen=True)
class ImageSet:
    """Images, how they came about, and what they can be compared with."""

    images: LabelledImages
    about: dict[str, Any]  # for the protocol
    fingerprint: str  # changes when the images do
    shape: tuple[int, int] | None = None  # height and width that are promised; None: the first image's
    trained_on: tuple[str, str] | None = None  # name and fingerprint of the real images
    in_order: bool = False  # reading is quick in order alone, and not for several threads
    block: int | None = None  # what is made together, where that is so

    @property
    def image_size(self) -> int | None:
        """The side that a reference is cropped to; None: as it lies."""
        return self.shape[0] if self.shape and self.shape[0] == self.shape[1] else None

    def shape_of_all(self) -> tuple[int, ...]:
        """(H, W, 3) that each image has to have."""
        return self.images.read(0).shape if self.shape is None else (*self.shape, 3)


def open_set(where: str, device: torch.device) -> ImageSet:
    """The images at `where`.

    Raises:
        ValueError: nothing there, no images, unfinished or damaged.
    """
    folder = Path(where)
    begun = (folder / "settings.json").is_file()
    if (folder / RECORD).is_file() or (begun and (folder / "images").is_dir()):
        made = Samples(folder)
        record = made.record
        against = record["trained_on"], record["trained_on_fingerprint"]
        fingerprint = hashlib.sha256((folder / RECORD).read_bytes()).hexdigest()
        return ImageSet(made, record, fingerprint, shape_of_record(record), against)
    if begun:
        cache = LatentCache(folder)
        about = {"reconstructions_of": cache.manifest["images"], "latents": cache.fingerprint}
        against = cache.manifest["images"], cache.manifest["images_fingerprint"]
        rebuilt, shape = Reconstructions(cache, device), (cache.image_size, cache.image_size)
        return ImageSet(rebuilt, about, cache.fingerprint, shape, against, True, DECODED_AT_ONCE)
    source: Any
    if folder.is_dir() and any(is_image(path.name) for path in folder.iterdir() if path.is_file()):
        source = LooseImages(folder)
    elif folder.suffix.lower() == ".zip" and folder.is_file() and _is_flat(folder):
        source = LooseArchive(folder)
    else:
        source = open_images(where)
    return ImageSet(source, {"images": where, "fingerprint": source.fingerprint()}, source.fingerprint())


def shape_of_record(record: dict[str, Any]) -> tuple[int, int]:
    """Height and width of the images that a record of samples is of."""
    size = record["image_size"]
    return (size, size) if isinstance(size, int) else (size[0], size[1])


class LooseImages:
    """All image files in a folder and below, in the order of their paths, of no known class."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, image_files(folder)
        self.class_names: list[str] = []
        self.labels = np.zeros(len(self.paths), dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """Where image `index` lies, for messages."""
        return str(self.paths[index])

    def read(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, 3)."""
        return read_image(self.paths[index])

    def fingerprint(self) -> str:
        """Changes when a file is added, removed, renamed or written again."""
        digest = hashlib.sha256()
        for path in self.paths:
            stat = path.stat() if path.exists() else path.lstat()  # a link may lead nowhere
            name = os.fsencode(path.relative_to(self.folder).as_posix())
            digest.update(name + f"\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()


class LooseArchive(ArchiveImages):
    """All images of a zip, in the order of their names, of no known class."""

    def __init__(self, path: Path) -> None:
        members = sorted(zip_members(path), key=lambda member: member.name)
        self.path, self.class_names, self.notices = path, [], []
        self.members = [member for member in members if _is_loose_image(member.name)]
        self.labels = np.zeros(len(self.members), dtype=np.int64)


def _is_flat(path: Path) -> bool:
    try:
        return any("/" not in member.name and is_image(member.name) for member in zip_members(path))
    except zipfile.BadZipFile:
        return False  # open_images says it


def _is_loose_image(name: str) -> bool:
    return is_image(name) and not any(is_junk(part) for part in name.split("/"))


class Reconstructions:
    """What the autoencoder makes of its own posterior means: a latent cache as an image source."""

    def __init__(self, cache: LatentCache, device: torch.device) -> None:
        self.cache, self.class_names, self.labels = cache, cache.class_names, cache.labels
        self._block, self._images = range(0), np.empty(0, dtype=np.uint8)
        self._autoencoder = Autoencoder(cache.autoencoder.name, device)
        self._autoencoder.match(cache.autoencoder)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Which latent, for messages."""
        return f"{self.cache.folder}[{index}]"

    def read(self, index: int) -> np.ndarray:
        """Decode latent `index` to uint8 (H, W, 3)."""
        if index not in self._block:  # images are read in order, so a block is decoded once
            start = index - index % DECODED_AT_ONCE
            self._block = range(start, min(start + DECODED_AT_ONCE, len(self)))
            moments = self.cache.moments(np.array(self._block), np.zeros(len(self._block), dtype=bool))
            means = latents_of_moments(moments, torch.zeros(1), self.cache.autoencoder)
            self._images = pixels_to_images(self._autoencoder.decode(means)).cpu().numpy()
        return self._images[index - self._block.start]
