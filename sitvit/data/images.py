"""One image: read from a file or from bytes, and cut to size.

One rule for reading, on every path: the first frame, turned by its EXIF orientation, transparency over
white, 16-bit gray scaled to 8 bits (v / 257, rounded), everything else by Pillow's conversion to RGB (16-bit
colour keeps its high byte). What cannot be decoded whole is refused by name, never filled with gray.
"""

import os
import warnings
from typing import IO

import numpy as np
import PIL
from PIL import Image, ImageOps

MAX_PIXELS = 64_000_000
"""Larger images are refused. At the limit, reading and cropping one took 981 MiB (WebP) or at most 614 MiB
(progressive JPEG, PNG with transparency or 16 bits); encoding reads several at once."""

STRIP = 1 << 20
"""Pixels converted at once; a row at least."""

PHOTOMETRIC = 262
"""The TIFF tag that is 0 where white is zero."""

WIDEST = 8
"""Images whose sides differ by more than this factor are resized in the window that the crop keeps."""


def read_image(path: str | os.PathLike[str]) -> np.ndarray:
    """An image file as uint8 (H, W, 3); ValueError naming the file that cannot be decoded whole."""
    try:
        with open(path, "rb") as file:
            return decode_image(file, str(path))
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def decode_image(file: IO[bytes], name: str) -> np.ndarray:
    """`read_image` of an open binary file that messages call `name`."""
    _limit_pixels()
    try:
        with Image.open(file) as image:
            pixels = image.width * image.height
            if pixels > max_pixels():
                raise Image.DecompressionBombError(f"{image.width} x {image.height} = {pixels:,} pixels")
            image.load()
            ImageOps.exif_transpose(image, in_place=True)
            return _to_rgb(image)
    except Image.DecompressionBombError as error:
        reason = str(error).rstrip(".")
        raise ValueError(
            f"{name} is too large to be read safely: {reason}; the limit is {max_pixels():,} pixels. If the "
            "file is what it should be, set SITVIT_MAX_IMAGE_PIXELS=NUMBER to raise it"
        ) from None
    except Exception as error:  # damaged files make Pillow's decoders trip over almost anything
        reason = str(error).partition("<_io.")[0].strip() or type(error).__name__
        raise ValueError(f"{name} cannot be read as an image ({reason})") from None


def max_pixels() -> int:
    """`MAX_PIXELS`, or what the environment variable SITVIT_MAX_IMAGE_PIXELS says instead."""
    asked = os.environ.get("SITVIT_MAX_IMAGE_PIXELS", MAX_PIXELS)
    try:
        if int(asked) >= 1:
            return int(asked)
    except ValueError:
        pass
    raise ValueError(f"SITVIT_MAX_IMAGE_PIXELS must be a number of pixels from 1, got {asked!r}")


def _limit_pixels() -> None:
    """Give Pillow our limit: it warns at MAX_IMAGE_PIXELS and refuses twice that, before it decodes."""
    Image.MAX_IMAGE_PIXELS = max(max_pixels() // 2, 1)
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def _to_rgb(image: Image.Image) -> np.ndarray:
    """A decoded image as uint8 (H, W, 3), by strips so that there is no second copy of all of it."""
    rgb = np.empty((image.height, image.width, 3), dtype=np.uint8)
    white_is_zero = getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0
    rows = max(STRIP // image.width, 1)
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        rgb[top : top + rows] = _strip_to_rgb(strip, white_is_zero)
    return rgb


def _strip_to_rgb(image: Image.Image, white_is_zero: bool) -> np.ndarray:
    if image.mode == "F":
        raise ValueError("its values are floats, of a range that nothing tells; save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16-bit gray arrives as I;16, I;16B or I
        values = np.asarray(image, dtype=np.int32)
        # Pillow turns such a TIFF's values round where they have 8 bits, and not where they have 16.
        values = 65535 - values if white_is_zero else values
        return _deep_gray_to_rgb(values, image.info.get("transparency"))
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB"))


def _deep_gray_to_rgb(values: np.ndarray, transparent: int | None) -> np.ndarray:
    if values.min() < 0 or values.max() > 65535:
        raise ValueError(f"its values run from {values.min()} to {values.max()}, beyond 16 bits")
    values = np.where(values == transparent, 65535, values)
    gray = ((values + 128) // 257).astype(np.uint8)
    return np.repeat(gray[..., None], 3, axis=2)


def center_crop(image: np.ndarray, size: int) -> np.ndarray:
    """ADM's centre crop to uint8 (size, size, 3): halve by BOX, resize by BICUBIC, cut the middle.

    As in guided-diffusion's image_datasets, to the bit; an image that has the size already is returned
    unchanged. Of long images only what the crop keeps is resized: 1 x 4000 at size 256 would pass through
    256 x 1,024,000.
    """
    picture = Image.fromarray(image)
    while min(picture.size) >= 2 * size:
        picture = picture.resize((picture.width // 2, picture.height // 2), Image.Resampling.BOX)
    scale = size / min(picture.size)
    width, height = round(picture.width * scale), round(picture.height * scale)
    top, left = (height - size) // 2, (width - size) // 2
    if max(width, height) > WIDEST * size:
        return _resized_window(np.asarray(picture), width, height, top, left, size)
    if scale != 1:
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(picture)[top : top + size, left : left + size]


def _resized_window(image: np.ndarray, width: int, height: int, top: int, left: int, size: int) -> np.ndarray:
    """[top : top + size, left : left + size] of `image` resized to (height, width), and no more of it.

    Pillow resizes in two passes, rounding to 8 bits in between; so do we. The pass along rows comes first,
    but since Pillow 13 (its change 9549) not where the height shrinks by more than twice what the width does.
    """
    columns = _Taps(image.shape[1], width, left, size)
    rows = _Taps(image.shape[0], height, top, size)
    shrinks = image.shape[0] - height, image.shape[1] - width
    if int(PIL.__version__.partition(".")[0]) >= 13 and shrinks[0] > max(2 * shrinks[1], 0):
        return columns.apply(rows.apply(image[:, columns.first : columns.last], axis=0), axis=1)
    return rows.apply(columns.apply(image[rows.first : rows.last], axis=1), axis=0)


class _Taps:
    """Pillow's bicubic weights (a = -0.5, 22 fractional bits) for outputs `start` .. `start + count` - 1.

    Output o has its centre at (o + 0.5) scale, scale = num_in / num_out, and sees the inputs within
    2 max(scale, 1) of it, with weights that sum to one. (Pillow, src/libImaging/Resample.c.)
    """

    BITS = 22

    def __init__(self, num_in: int, num_out: int, start: int, count: int) -> None:
        scale = num_in / num_out
        stretch = max(scale, 1.0)
        centers = (np.arange(start, start + count) + 0.5) * scale
        first = np.maximum((centers - 2 * stretch + 0.5).astype(np.int64), 0)
        last = np.minimum((centers + 2 * stretch + 0.5).astype(np.int64), num_in)
        self.first, self.last = int(first.min()), int(last.max())
        index = first[:, None] + np.arange((last - first).max())
        weights = _bicubic((index - centers[:, None] + 0.5) / stretch)
        weights[index >= last[:, None]] = 0
        total = np.zeros(count)
        for tap in weights.T:  # in Pillow's order: the last bit of a sum depends on it
            total += tap
        weights /= total[:, None]
        self.weights = np.trunc(weights * (1 << self.BITS) + np.where(weights < 0, -0.5, 0.5)).astype(
            np.int64
        )
        self.index = np.minimum(index, self.last - 1) - self.first
        self.num_in = num_in

    def apply(self, image: np.ndarray, axis: int) -> np.ndarray:
        """Resize uint8 (H, W, 3) along `axis`; it may be the whole axis or [first, last) of it."""
        offset = self.first if image.shape[axis] == self.num_in else 0
        moved = np.moveaxis(image, axis, 0)
        half = 1 << (self.BITS - 1)
        total = np.full((len(self.index), *moved.shape[1:]), half, dtype=np.int64)
        for tap in range(self.index.shape[1]):
            weights = self.weights[:, tap].reshape(-1, 1, 1)
            total += weights * moved[self.index[:, tap] + offset]
        return np.moveaxis((total >> self.BITS).clip(0, 255).astype(np.uint8), 0, axis)


def _bicubic(x: np.ndarray) -> np.ndarray:
    """Keys' cubic kernel with a = -0.5, evaluated as Pillow writes it."""
    a, x = -0.5, np.abs(x)
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
