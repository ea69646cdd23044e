"""The embedded data set: Fashion-MNIST's 10,000 test images (Zalando SE, 2017; MIT licence).

The original gzipped IDX files lie in `sitvit/assets/fashion-mnist`. All 70,000 images come with
`scripts/fetch_data.py fashion-mnist`; any of the IDX image files is a source of its own.
IDX: a big-endian header (magic 2051 for images, 2049 for labels; sizes), then uint8 values.
"""

import gzip
import hashlib
import os
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ..runtime import write_aside

ASSETS = Path(__file__).resolve().parent.parent / "assets"
FASHION_FOLDER = ASSETS / "fashion-mnist"
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FASHION_SHA256 = {
    "t10k-images-idx3-ubyte.gz": "cc1d090a38ace84dfa1aa66e3ada7c336ef481a96936906477e6dd344da56eaa",
    "t10k-labels-idx1-ubyte.gz": "8d3605d196f4be44669e46906da9733c8131fef761fdbfec72c424d5222f1a05",
    "train-images-idx3-ubyte.gz": "b0564c3eedabfbf835052cff8503ea422014ce006caf5b757f851416ee8300c7",
    "train-labels-idx1-ubyte.gz": "0ae29f65d86684f32d1b9c85147786c547b9c6aebcaf235f0400a0cce308b056",
}
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"


class FashionMnist:
    """One IDX pair as an image source: 28 x 28 gray, padded with black to 32 x 32, three channels."""

    PADDING = 2

    def __init__(self, images_file: Path) -> None:
        labels_file = images_file.with_name(images_file.name.replace("images-idx3", "labels-idx1"))
        self.class_names = list(FASHION_CLASSES)
        self.notices: list[str] = []
        self.files = (images_file, labels_file)
        self._images = read_idx(images_file, magic=2051)  # (N, 28, 28)
        self.labels = read_idx(labels_file, magic=2049).astype(np.int64)
        if len(self._images) != len(self.labels):
            raise ValueError(
                f"{images_file} has {len(self._images)} images, but {labels_file} has "
                f"{len(self.labels)} labels"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Where image `index` comes from, for messages."""
        return f"{self.files[0]}[{index}]"

    def read(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (32, 32, 3)."""
        padded = np.pad(self._images[index], self.PADDING)
        return np.repeat(padded[..., None], 3, axis=2)

    def fingerprint(self) -> str:
        """Changes when the images or labels do."""
        return hashlib.sha256("".join(map(sha256_of_file, self.files)).encode()).hexdigest()


def embedded_fashion() -> FashionMnist:
    """The 10,000 embedded images."""
    return FashionMnist(FASHION_FOLDER / "t10k-images-idx3-ubyte.gz")


def read_idx(path: Path, magic: int) -> np.ndarray:
    """The uint8 array of a gzipped IDX file; ValueError naming the file where it is not one."""
    try:
        with gzip.open(path) as file:
            data = file.read()
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error})") from None
    num_dims = magic & 0xFF
    header = np.frombuffer(data[: 4 + 4 * num_dims], ">u4")
    if len(header) != 1 + num_dims or header[0] != magic:
        raise ValueError(f"{path} is not an IDX file with magic number {magic}")
    shape = tuple(int(size) for size in header[1:])
    values = np.frombuffer(data[4 + 4 * num_dims :], np.uint8)
    if values.size != np.prod(shape):
        raise ValueError(f"{path} should hold {np.prod(shape)} values, but has {values.size}")
    return values.reshape(shape)


def fetch_fashion(out: Path, source: Path | None) -> Iterator[str]:
    """Bring the four files to `out`, hash-checked, yielding a line of news per file.

    From the folder `source`; without one from Debian's package if it is installed, else by URL.

    Raises:
        ValueError: `source` lacks a file, or a file's hash is not the published one.
        OSError: the network or the disk failed.
    """
    if source is None and DEBIAN_FOLDER.is_dir():
        source = DEBIAN_FOLDER
    for name, expected in FASHION_SHA256.items():
        target = out / name
        if target.is_file() and sha256_of_file(target) == expected:
            yield f"{target}: already there"
            continue
        with write_aside(target) as temporary:
            with _open_source(name, source) as incoming, open(temporary, "wb") as file:
                shutil.copyfileobj(incoming, file)
            found = sha256_of_file(temporary)
            if found != expected:
                where = source / name if source else FASHION_URL + name
                raise ValueError(
                    f"{where} has sha256 {found[:12]}..., expected {expected[:12]}...: it is damaged "
                    "or another file; nothing was kept"
                )
        yield f"{target}: fetched and checked"


def _open_source(name: str, source: Path | None) -> BinaryIO:
    if source is not None:
        try:
            return open(source / name, "rb")
        except FileNotFoundError:
            raise ValueError(
                f"{source} has no {name}; give a folder with the four original files "
                f"({', '.join(FASHION_SHA256)})"
            ) from None
    try:
        return urllib.request.urlopen(FASHION_URL + name, timeout=60)
    except OSError as error:
        raise OSError(
            f"cannot download {FASHION_URL + name} ({error}); fetch the four files elsewhere and pass "
            "their folder with --source, or install Debian's package dataset-fashion-mnist"
        ) from None


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
