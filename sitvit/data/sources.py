"""Where images lie, and which class each has.

Every source has `class_names`, `labels` (N,), `notices` (what was passed over, and what the labels mean),
`len`, `name(i)`, `read(i)` -> uint8 (H, W, 3) and `fingerprint()`. Sources can be pickled and read from
several threads. The classes are in the order of their names: as numbers where all are whole numbers, else
as text; so ImageNet's synset folders get the official labels 0..999.
"""

import hashlib
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np

from .demo import FashionMnist, embedded_fashion
from .images import center_crop, max_pixels, read_image

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
NUM_SYNSETS = 1000
SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}
IDX = "-images-idx3-ubyte.gz"


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
    """A folder with one folder of images per class; links are followed.

    Hidden and system folders and class folders without an image are passed over; `notices` says which.

    Raises:
        ValueError: no such folder, no class folders, or no images in them.
    """

    def __init__(self, folder: Path) -> None:
        entries = sorted(folder.iterdir())
        folders = [path for path in entries if path.is_dir()]
        junk = [path for path in folders if is_junk(path.name)]
        files = {path.name: files_below(path) for path in folders if path not in junk}
        images = {name: [path for path in below if is_image(path.name)] for name, below in files.items()}
        loose = [path for path in entries if is_image(path.name) and not path.is_dir()]
        self.class_names = class_order(name for name, below in images.items() if below)
        if not self.class_names:
            raise ValueError(_nothing_in(folder, loose))
        self.folder = folder
        self.paths = [path for name in self.class_names for path in images[name]]
        counts = [len(images[name]) for name in self.class_names]
        self.labels = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        self.notices = [f"passed over {path}: hidden or system folder" for path in junk]
        self.notices += [
            f"passed over {folder / name}: no images in it" for name, below in images.items() if not below
        ]
        if loose:
            self.notices.append(f"passed over {len(loose)} images that lie outside the class folders")
        others = [path.name for below in files.values() for path in below if not is_image(path.name)]
        self.notices += about_others(folder, others)
        self.notices += about_names(self.class_names)
        self.notices += about_one_class(self.class_names, {path.parent for path in self.paths})

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
        return hashlib.sha256(b"".join(map(b"".join, self._records))).hexdigest()

    def file_fingerprints(self, ranges: Sequence[range]) -> dict[str, Any]:
        """Of the names and labels of all images, and of the files in each range: which of them changed."""
        return range_fingerprints(self._records, ranges)

    @cached_property
    def _records(self) -> list[tuple[bytes, bytes]]:
        """Name and label of each file, then its size and time."""
        records = []
        for path, label in zip(self.paths, self.labels, strict=True):
            stat = path.stat() if path.exists() else path.lstat()  # a link may lead nowhere
            name = os.fsencode(path.relative_to(self.folder).as_posix())
            records.append((name + f"\0{label}\0".encode(), f"{stat.st_size}\0{stat.st_mtime_ns}\n".encode()))
        return records


def range_fingerprints(records: Sequence[tuple[bytes, bytes]], ranges: Sequence[range]) -> dict[str, Any]:
    """Hashes of `records` (what an image is called, what tells its content): of all names, of each range."""
    parts = [b"".join(map(b"".join, records[r.start : r.stop])) for r in ranges]
    return {
        "names": hashlib.sha256(b"".join(name for name, _ in records)).hexdigest(),
        "shards": [hashlib.sha256(part).hexdigest() for part in parts],
    }


EMBEDDED: dict[str, Callable[[], ImageSource]] = {"fashion-mnist": embedded_fashion}
"""Image sources that ship with the package, by name."""


def open_images(where: str) -> ImageSource:
    """The images at `where`, whatever they are.

    An embedded set by name; a folder of class folders; a zip or tar of them; an npz file of arrays; a
    Fashion-MNIST IDX file; a folder that `datasets` saved, or `hub:NAME` (`hub:NAME:SPLIT`).

    Raises:
        ValueError: nothing usable there, naming what was looked for; a limit of pixels that is no number.
    """
    from .archives import open_archive
    from .arrays import ArrayImages
    from .hub import HubImages, is_saved_dataset

    max_pixels()  # a limit that is none is not each image's fault
    if where in EMBEDDED:
        return EMBEDDED[where]()
    if not where:
        raise ValueError("name a folder of images, or an embedded set: " + ", ".join(EMBEDDED))
    path = Path(where)
    if where.startswith("hub:") or is_saved_dataset(path):
        return HubImages(where)
    if path.name.endswith(IDX):
        return FashionMnist(path)
    if path.is_dir():
        return ImageFolder(path)
    kinds: dict[str, Callable[[Path], ImageSource]] = {
        ".zip": open_archive,
        ".tar": open_archive,
        ".npz": ArrayImages,
    }
    if path.is_file() and path.suffix.lower() in kinds:
        return kinds[path.suffix.lower()](path)
    if path.exists():
        raise ValueError(
            f"{path} is a file of no known kind; give a folder that holds one folder per class, a zip or "
            "(uncompressed) tar of one, or an npz file"
        )
    raise ValueError(
        f"there is no folder {path} (the embedded image set is called {', '.join(EMBEDDED)}; a data set of "
        f"the Hugging Face hub is hub:NAME)"
    )


def source_name(where: str) -> str:
    """How records name a source: an embedded or hub one as it is, a path in full."""
    return where if where in EMBEDDED or where.startswith("hub:") else str(Path(where).resolve())


def class_order(names: Iterable[str]) -> list[str]:
    """Class names in the order of their labels: as numbers where all are whole numbers, else as text."""
    unique = sorted(set(names))
    if all(name.isdecimal() for name in unique):
        unique.sort(key=int)
    return unique


def about_names(names: list[str]) -> list[str]:
    """What a user should know about the labels that these class names get."""
    if all(name.lower() in SPLITS for name in names):
        return [
            f"the classes are called {', '.join(names)}: if these are splits, name one of them, such as "
            f"FOLDER/{names[0]}"
        ]
    numbers = all(name.isdecimal() for name in names)
    twins = [f"{a} and {b}" for a, b in pairwise(names) if numbers and int(a) == int(b)]
    shifted = [(name, label) for label, name in enumerate(names) if numbers and int(name) != label]
    if twins:
        return [
            f"{twins[0]} are one number, but two classes; if they should be one, put them into one folder"
        ]
    if shifted:
        name, label = shifted[0]
        return [f"the classes are numbers, but not 0 to {len(names) - 1}: class {name} has label {label}"]
    if not all(re.fullmatch(r"n\d{8}", name) for name in names):
        return []
    if len(names) == NUM_SYNSETS:
        return [
            f"{NUM_SYNSETS} synsets: the labels 0 to {NUM_SYNSETS - 1} are in the order of their names, "
            f"which is ImageNet's official one if these are the {NUM_SYNSETS} of its challenge"
        ]
    return [
        f"{len(names)} synsets, not {NUM_SYNSETS}: the labels 0 to {len(names) - 1} are their own and not "
        "ImageNet's official ones"
    ]


def about_one_class(names: list[str], folders: Collection[object]) -> list[str]:
    """A sentence where the images of several `folders` are of one class, as from a folder too high."""
    if len(names) > 1 or len(folders) == 1:
        return []
    return [
        f"all images are of one class, {names[0]}, though they lie in {len(folders)} folders: if these are "
        f"the classes, name {names[0]} itself, with no image beside them"
    ]


def is_junk(name: str) -> bool:
    """Hidden and system files and folders: .ipynb_checkpoints, __MACOSX, .DS_Store, ._x.jpg."""
    return name.startswith((".", "__"))


def is_image(name: str) -> bool:
    """Whether a file of this name is taken for an image."""
    return PurePosixPath(name).suffix.lower() in IMAGE_SUFFIXES and not is_junk(PurePosixPath(name).name)


def about_others(where: Path, names: Iterable[str]) -> list[str]:
    """What was passed over because its suffix is no image's, counted by suffix; hidden files apart."""
    suffixes = [PurePosixPath(name).suffix.lower() or "no suffix" for name in names if not _hidden(name)]
    if not suffixes:
        return []
    counted = ", ".join(f"{suffix} ({count})" for suffix, count in Counter(suffixes).most_common())
    return [f"passed over {len(suffixes)} files in {where} whose suffix is no known image's: {counted}"]


def _hidden(name: str) -> bool:
    return any(is_junk(part) for part in PurePosixPath(name).parts)


def image_files(folder: Path) -> list[Path]:
    """The image files among `files_below`."""
    return [path for path in files_below(folder) if is_image(path.name)]


def files_below(folder: Path) -> list[Path]:
    """The files in `folder` and below, in order of their path; links are followed, once."""
    found, visited = [], set()
    for root, folders, files in os.walk(folder, followlinks=True):
        visited.add(os.path.realpath(root))
        folders[:] = sorted(
            name
            for name in folders
            if not is_junk(name) and os.path.realpath(os.path.join(root, name)) not in visited
        )
        found += [Path(root, name) for name in sorted(files)]
    return found


def read_all(source: ImageSource, size: int) -> np.ndarray:
    """Every image of a source that fits in memory, cropped, uint8 (N, size, size, 3)."""
    return np.stack([center_crop(source.read(index), size) for index in range(len(source))])


def _nothing_in(folder: Path, loose: list[Path]) -> str:
    if loose:
        return (
            f"{folder} has {len(loose)} images but no class folders; put the images of each class into a "
            "folder of its own (one folder for all is fine)"
        )
    idx = [path.name for path in sorted(folder.iterdir()) if path.name.endswith(IDX)]
    if idx:
        return f"{folder} has IDX files; name one of them, such as {folder / idx[0]}"
    return f"{folder} has no images; expected class folders with {', '.join(sorted(IMAGE_SUFFIXES))}"
