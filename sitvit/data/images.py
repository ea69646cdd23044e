"""Images as they lie on disk: where they are, which class each has, and how one is read.

Every source has `class_names`, `labels` (N,), `notices` (what was passed over), `len`, `name(i)`,
`read(i)` -> uint8 (H, W, 3) and `fingerprint()`. One rule for reading, on every path: the first frame,
turned by its EXIF orientation, transparency over white, 16-bit gray scaled to 8, everything else by
Pillow's conversion to RGB.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
from PIL import Image, ImageOps

from .demo import FashionMnist, embedded_fashion

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}


class ImageSource(Protocol):
    """Labelled images; `read` gives uint8 (H, W, 3)."""

    class_names: list[str]
    labels: np.ndarray
    notices: list[str]

    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> np.ndarray: ...
    def fingerprint(self) -> str: ...


class ImageFolder:
    """A folder with one folder of images per class; labels follow the order of the class names.

    Names that are all whole numbers are ordered as numbers, others as text. Hidden and system folders
    and class folders without an image are passed over; `notices` says which.

    Raises:
        ValueError: no such folder, no class folders, or no images in them.
    """

    def __init__(self, folder: Path) -> None:
        classes, self.notices = _class_folders(folder)
        self.folder = folder
        self.class_names = [path.name for path in classes]
        self.paths: list[Path] = []
        labels: list[int] = []
        for label, path in enumerate(classes):
            images = image_files(path)
            self.paths += images
            labels += [label] * len(images)
        self.labels = np.array(labels, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        """Where image `index` comes from, for messages."""
        return str(self.paths[index])

    def read(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, 3)."""
        return read_image(self.paths[index])

    def fingerprint(self) -> str:
        """Changes when a file is added, removed, renamed or written again."""
        digest = hashlib.sha256()
        for path, label in zip(self.paths, self.labels, strict=True):
            stat = path.stat()
            name = path.relative_to(self.folder).as_posix()
            digest.update(f"{name}\0{label}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()


EMBEDDED: dict[str, Callable[[], ImageSource]] = {"fashion-mnist": embedded_fashion}
"""Image sources that ship with the package, by name."""


def open_images(where: str) -> ImageSource:
    """An embedded set by name, a Fashion-MNIST IDX file, or a folder of class folders.

    Raises:
        ValueError: nothing usable there, naming what was looked for.
    """
    if where in EMBEDDED:
        return EMBEDDED[where]()
    if not where:
        raise ValueError("name a folder of images, or an embedded set: " + ", ".join(EMBEDDED))
    path = Path(where)
    if path.name.endswith("-images-idx3-ubyte.gz"):
        return FashionMnist(path)
    if path.is_dir():
        return ImageFolder(path)
    if path.exists():
        raise ValueError(f"{path} is a file; give a folder that holds one folder per class")
    raise ValueError(f"there is no folder {path} (the embedded image set is called {', '.join(EMBEDDED)})")


def source_name(where: str) -> str:
    """How records name a source: an embedded one as it is, a path in full."""
    return where if where in EMBEDDED else str(Path(where).resolve())


def _class_folders(folder: Path) -> tuple[list[Path], list[str]]:
    entries = sorted(folder.iterdir())
    folders = [path for path in entries if path.is_dir()]
    junk = [path for path in folders if path.name.startswith((".", "__"))]
    candidates = [path for path in folders if path not in junk]
    empty = [path for path in candidates if not image_files(path)]
    classes = [path for path in candidates if path not in empty]
    loose = [path for path in entries if is_image(path)]
    if not classes:
        if loose:
            raise ValueError(
                f"{folder} has {len(loose)} images but no class folders; put the images of each class "
                "into a folder of its own (one folder for all is fine)"
            )
        idx = [path.name for path in entries if path.name.endswith("-images-idx3-ubyte.gz")]
        if idx:
            raise ValueError(f"{folder} has IDX files; name one of them, such as {folder / idx[0]}")
        raise ValueError(
            f"{folder} has no images; expected class folders with {', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    if all(path.name.isdecimal() for path in classes):
        classes.sort(key=lambda path: int(path.name))
    notices = [f"passed over {path}: hidden or system folder" for path in junk]
    notices += [f"passed over {path}: no images in it" for path in empty]
    if loose:
        notices.append(f"passed over {len(loose)} images that lie outside the class folders")
    return classes, notices


def is_image(path: Path) -> bool:
    """A visible file with the suffix of an image format."""
    name = path.name
    return path.suffix.lower() in IMAGE_SUFFIXES and not name.startswith(".") and not path.is_dir()


def image_files(folder: Path) -> list[Path]:
    """The image files in `folder` and below, in order of their path; links are followed."""
    found = []
    for root, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        found += [Path(root, name) for name in sorted(files) if is_image(Path(root, name))]
    return found


def read_image(path: str | os.PathLike[str]) -> np.ndarray:
    """An image file as uint8 (H, W, 3); ValueError naming the file that cannot be decoded whole."""
    try:
        with Image.open(path) as image:
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except Image.DecompressionBombError as error:
        raise ValueError(f"{path} is too large to be read safely ({error})") from None
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        # Pillow repeats the path in some of its messages; once is enough.
        reason = str(error).replace(str(path), "").replace(repr(str(path)), "").strip() or "damaged"
        raise ValueError(f"{path} cannot be read as an image ({reason})") from None


def _to_rgb(image: Image.Image) -> np.ndarray:
    if image.mode.startswith("I") or image.mode == "F":  # 16-bit gray arrives as I;16, I or F
        values = np.asarray(image, dtype=np.float64)
        gray = np.clip(values / 257 + 0.5, 0, 255).astype(np.uint8)
        return np.repeat(gray[..., None], 3, axis=2)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.array(image.convert("RGB"))


def read_all(source: ImageSource, size: int) -> np.ndarray:
    """Every image of a source that fits in memory, cropped, uint8 (N, size, size, 3)."""
    return np.stack([center_crop(source.read(index), size) for index in range(len(source))])


def center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """ADM's centre crop to uint8 (size, size, 3): halve by BOX, resize by BICUBIC, cut the middle.

    As in guided-diffusion's image_datasets; an image that has the size already is returned unchanged.
    """
    picture = Image.fromarray(image)
    while min(picture.size) >= 2 * size:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = size / min(picture.size)
    if scale != 1:
        scaled = round(picture.width * scale), round(picture.height * scale)
        picture = picture.resize(scaled, Image.Resampling.BICUBIC)
    top, left = (picture.height - size) // 2, (picture.width - size) // 2
    return np.asarray(picture)[top : top + size, left : left + size]
