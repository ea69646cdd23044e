"""A folder of generated images: what it promises, what is there, and whether it is whole.

OUT/settings.json         what is being made; written first
OUT/images/000000.png     image i, written aside and renamed
OUT/samples.json          the record: settings, labels, cost; written last
"""

import os
import zipfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .. import runtime
from ..data.images import read_image
from ..data.sources import is_image

FORMAT = 3
RECORD = "samples.json"
PNG_START, PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


@dataclass(frozen=True)
class SampleSettings:
    """All that an image follows from, beside its index; equal settings give equal images."""

    weights: str
    weights_sha256: str
    autoencoder: dict[str, Any]
    class_names: list[str]
    image_size: int | list[int]  # or height and width, where they differ
    seed: int
    seed_per_image: bool  # image i is the first of seed + i, not image i of seed
    num_images: int
    labels: str | list[int]  # "balanced", "random", or labels used in turn
    path: str  # of a flow, or ddpm
    prediction: str
    sampler: dict[str, Any]  # the fields of a flow.samplers class
    cfg_scale: float
    guidance_interval: list[float]
    guided_channels: int | None  # None: all
    guidance_rescale: float
    autoguidance: dict[str, str] | None  # the weaker network's weights and their hash
    batch_size: int
    precision: str
    uint8_rule: str


def begin(out: Path, settings: SampleSettings) -> None:
    """Claim `out` for `settings`, or check that it was begun with them.

    Raises:
        ValueError: the folder holds something else, or samples of other settings, naming the first.
    """
    path = out / "settings.json"
    wanted = {"format": FORMAT, **asdict(settings)}
    if not path.is_file():
        # A kill while it is written leaves an unfinished copy of it beside it.
        if out.is_dir() and any(not entry.match(f".{path.name}.*.partial") for entry in out.iterdir()):
            raise ValueError(f"{out} has files that are no samples; choose another --out")
        runtime.write_json(path, wanted)
    found = runtime.read_record(path, [])
    old, new = _leaves(found), _leaves(wanted)
    for key in [*new, *old]:
        if old.get(key) != new.get(key):
            raise ValueError(
                f"{out} holds samples made with {key} = {old.get(key)}, not {new.get(key)}; choose another "
                "--out, or delete that folder"
            )


def _leaves(record: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in record.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return leaves


def image_path(out: Path, index: int) -> Path:
    """Where image `index` lies."""
    return out / "images" / f"{index:06d}.png"


def write_image(path: Path, image: np.ndarray) -> None:
    """Write uint8 (H, W, 3), under its name only once it is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        # Not flushed one by one: a continued job decodes every image that it finds.
        Image.fromarray(image).save(temporary, format="png")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}") from error


def sheet(images: np.ndarray) -> np.ndarray:
    """Images uint8 (rows, columns, H, W, 3) on one white sheet, two pixels apart."""
    rows, columns, height, width, _ = images.shape
    page = np.full((rows * (height + 2) - 2, columns * (width + 2) - 2, 3), 255, dtype=np.uint8)
    for row, column in np.ndindex(rows, columns):
        top, left = row * (height + 2), column * (width + 2)
        page[top : top + height, left : left + width] = images[row, column]
    return page


def write_animation(path: Path, frames: list[np.ndarray]) -> None:
    """Write uint8 (H, W, 3) frames as a GIF that runs for ever, resting at the last."""
    pictures = [Image.fromarray(frame) for frame in frames]
    durations = [120] * (len(frames) - 1) + [2000]  # milliseconds
    with runtime.write_aside(path) as temporary:
        pictures[0].save(
            temporary, format="gif", save_all=True, append_images=pictures[1:], duration=durations, loop=0
        )


def is_whole(path: Path, image_size: tuple[int, int]) -> bool:
    """Whether the file is there and decodes to that height and width."""
    try:
        return path.is_file() and read_image(path).shape == (*image_size, 3)
    except ValueError:
        return False


class Samples:
    """A finished sample folder as an image source: `labels`, `len`, `name(i)`, `read(i)`.

    Raises:
        ValueError: unfinished, or not exactly the images that the record promises.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / RECORD).is_file():
            begun = (folder / "settings.json").is_file()
            raise ValueError(
                f"{folder} is unfinished; run the same scripts/sample.py command again"
                if begun
                else f"{folder} has no {RECORD}; make samples with scripts/sample.py"
            )
        self.folder = folder
        keys = ["class_names", "image_labels", "num_images", "image_size", "step", "trained_on"]
        self.record = runtime.read_record(folder / RECORD, [*keys, "trained_on_fingerprint"])
        self.class_names: list[str] = self.record["class_names"]
        self.labels = np.array(self.record["image_labels"], dtype=np.int64)
        _check_names(folder, self.record["num_images"])

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """Where image `index` lies, for messages."""
        return str(image_path(self.folder, index))

    def read(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, 3); ValueError naming its file where that is damaged."""
        try:
            return read_image(image_path(self.folder, index))
        except ValueError as error:
            raise ValueError(
                f"{error}; delete it, and the same scripts/sample.py command makes it again"
            ) from None


def write_npz(samples: Samples) -> Path:
    """`arr_0`, uint8 (N, H, W, 3), as the ADM suite reads it, beside the images."""
    count = len(samples)
    shape = (count, *samples.read(0).shape)
    path = samples.folder / f"samples_{'x'.join(map(str, shape))}.npz"
    header = {"descr": "|u1", "fortran_order": False, "shape": shape}
    with (
        runtime.write_aside(path) as temporary,
        zipfile.ZipFile(temporary, "w") as archive,
        archive.open("arr_0.npy", "w", force_zip64=True) as entry,
    ):
        np.lib.format.write_array_header_2_0(entry, header)
        for index in range(count):
            entry.write(samples.read(index).tobytes())
    return path


def lacking(folder: Path, num_images: int) -> set[str]:
    """Names of the promised images that are not there."""
    return {image_path(folder, index).name for index in range(num_images)} - _found(folder)


def are_there(folder: Path, num_images: int) -> bool:
    """Whether all promised images are there, from a PNG's first to its last byte."""
    paths = (image_path(folder, index) for index in range(num_images))
    return not lacking(folder, num_images) and all(map(_is_closed, paths))


def _is_closed(path: Path) -> bool:
    """Whether the file has a PNG's beginning and its end, which a loss of power would have cost it."""
    with open(path, "rb", buffering=0) as file:
        begins = file.read(len(PNG_START)) == PNG_START
        if not begins or os.fstat(file.fileno()).st_size < len(PNG_START + PNG_END):
            return False
        file.seek(-len(PNG_END), os.SEEK_END)
        return file.read() == PNG_END


def _found(folder: Path) -> set[str]:
    images = folder / "images"
    return {path.name for path in images.iterdir() if is_image(path.name)} if images.is_dir() else set()


def _check_names(folder: Path, num_images: int) -> None:
    missing = lacking(folder, num_images)
    if missing:
        raise ValueError(
            f"{folder / 'images'} lacks {_some(missing)}; the same scripts/sample.py command makes it again"
        )
    foreign = _found(folder) - {image_path(folder, index).name for index in range(num_images)}
    if foreign:
        raise ValueError(
            f"{folder / 'images'} has the foreign {_some(foreign)}; exactly the {num_images} images of its "
            "record must be there"
        )


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
