"""Images in an npz file: `images` and `labels`, or guided-diffusion's `arr_0` and `arr_1`.

Images are uint8 (N, H, W, 3), (N, 3, H, W), (N, H, W, 1) or (N, H, W); labels whole numbers (N,). An
optional `class_names` (text) names the classes, else label k is called "k". What `np.savez` wrote is
mapped, not loaded; `np.savez_compressed` has to be held in memory.
"""

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from .archives import DAMAGED, Member, member_offset, zip_members

KEYS = {"images": "arr_0", "labels": "arr_1"}

MAX_CLASSES = 1_000_000
"""Labels from here on are refused: each label below the largest has a class of its own."""


class ArrayImages:
    """The images of an npz file; without labels all are of one class.

    Raises:
        ValueError: no npz file, no images in it, or arrays of another type or shape.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.notices = path, []
        arrays = _open(path)
        self._images = _checked_images(path, arrays)
        key = next((key for key in ("labels", KEYS["labels"]) if key in arrays), None)
        if key is None:
            self.notices.append(f"{path} has no labels: all images are of one class")
            self.labels = np.zeros(len(self._images), dtype=np.int64)
        else:
            self.labels = _checked_labels(path, key, arrays[key], len(self._images))
        self.class_names = self._names(arrays)

    def __reduce__(self) -> tuple[Any, ...]:
        return ArrayImages, (self.path,)  # another process maps the file itself

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Where image `index` comes from, for messages."""
        return f"{self.path}[{index}]"

    def read(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, 3)."""
        image = np.array(self._images[index])
        if image.ndim == 3 and image.shape[0] == 3 and image.shape[2] != 3:
            return np.ascontiguousarray(image.transpose(1, 2, 0))
        image = image.reshape(*image.shape[:2], -1)
        return image if image.shape[2] == 3 else np.repeat(image, 3, axis=2)

    def fingerprint(self) -> str:
        """Changes when the file is written again."""
        stat = self.path.stat()
        about = f"{stat.st_size} {stat.st_mtime_ns} {self._images.shape}"
        return hashlib.sha256(about.encode() + self.labels.tobytes()).hexdigest()

    def _names(self, arrays: dict[str, np.ndarray]) -> list[str]:
        num_classes = int(self.labels.max()) + 1
        if "class_names" not in arrays:
            return [str(label) for label in range(num_classes)]
        names = [str(name) for name in arrays["class_names"]]
        if len(names) < num_classes or len(set(names)) < len(names):
            raise ValueError(f"{self.path}: class_names must be {num_classes} or more, all different")
        return names


def _open(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file, mapped where they are not compressed."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no npz file, or was cut off")
    try:
        arrays = {}
        with np.load(path, allow_pickle=False) as loaded, open(path, "rb") as file:
            for member in zip_members(path):
                key = member.name.removesuffix(".npy")
                if not member.name.endswith(".npy"):
                    continue  # no array
                if member.deflated:
                    arrays[key] = loaded[key]
                    continue
                file.seek(member_offset(file, member))
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
                shape, fortran, dtype = (read or np.lib.format.read_array_header_2_0)(file)
                if dtype.hasobject:
                    raise ValueError(f"{key} holds objects, not numbers")
                arrays[key] = np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
        return arrays
    except (*DAMAGED, AttributeError) as error:
        raise ValueError(f"{path} cannot be read as an npz file ({error})") from None


def _checked_images(path: Path, arrays: dict[str, np.ndarray]) -> np.ndarray:
    key = next((key for key in ("images", KEYS["images"]) if key in arrays), None)
    if key is None:
        raise ValueError(f"{path} has no array images (or arr_0); it has {', '.join(arrays) or 'none'}")
    images = arrays[key]
    gray = images.ndim == 3
    rgb = images.ndim == 4 and (images.shape[-1] in (1, 3) or images.shape[1] == 3)
    if images.dtype != np.uint8 or not (gray or rgb) or 0 in images.shape:
        raise ValueError(
            f"{path}: {key} is {images.dtype} {images.shape}; needed is uint8 (N, H, W, 3), values 0 to 255"
        )
    return images


def _checked_labels(path: Path, key: str, labels: np.ndarray, count: int) -> np.ndarray:
    whole = np.issubdtype(labels.dtype, np.integer) and labels.size == count == len(labels)
    if not whole or labels.min() < 0:
        raise ValueError(
            f"{path}: {key} is {labels.dtype} {labels.shape}; needed are {count} whole numbers from 0"
        )
    check_labels(f"{path}: {key}", labels)
    return np.array(labels).reshape(-1).astype(np.int64)


def check_labels(what: str, labels: np.ndarray) -> None:
    """ValueError naming `what` unless all `labels` are in [0, MAX_CLASSES)."""
    for label in (labels.min(), labels.max()):
        if not 0 <= label < MAX_CLASSES:
            raise ValueError(
                f"{what} has a label {label}; labels must be from 0 to {MAX_CLASSES - 1}, one number a class"
            )


def damaged_arrays(path: Path) -> list[str]:
    """A sentence for each array of an npz file whose checksum is wrong; reads all of it."""
    found = []
    for member in zip_members(path):
        if not member.deflated and _checksum(path, member) != member.checksum:
            found.append(f"{path}: the checksum of {member.name} is wrong; fetch or make the file again")
    return found


def _checksum(path: Path, member: Member) -> int:
    value, left = 0, member.size
    with open(path, "rb") as file:
        file.seek(member_offset(file, member))
        while left > 0 and (part := file.read(min(left, 1 << 24))):
            value, left = zlib.crc32(part, value), left - len(part)
    return value
