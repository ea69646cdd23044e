"""Reading images: one rule for every format, a sentence for what cannot be read."""

import gzip
import re
import shutil
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sitvit.data import images as image_reading
from sitvit.data.demo import FASHION_FOLDER, FASHION_SHA256, embedded_fashion, fetch_fashion, sha256_of_file
from sitvit.data.images import center_crop, read_image
from sitvit.data.sources import open_images

RED = (255, 0, 0)


def write(path, color=RED, size=(8, 8), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)


def test_the_embedded_images_are_the_published_files():
    listed = dict(line.split()[::-1] for line in (FASHION_FOLDER / "SHA256SUMS").read_text().splitlines())
    for name, expected in listed.items():
        assert sha256_of_file(FASHION_FOLDER / name) == expected == FASHION_SHA256[name]


def test_the_embedded_images_are_padded_and_gray():
    source = embedded_fashion()
    image = source.read(0)
    assert len(source) == 10_000
    assert image.shape == (32, 32, 3)
    assert not image[:2].any()
    assert not image[:, -2:].any()
    assert np.array_equal(image[..., 0], image[..., 2])
    assert image.any()
    assert np.bincount(source.labels).tolist() == [1000] * 10


def test_a_damaged_image_is_refused_by_name(tmp_path):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    for name in ("half.jpg", "short.jpg", "flipped.png"):
        noise.save(tmp_path / name)
    data = (tmp_path / "half.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(data[: len(data) // 2])
    (tmp_path / "short.jpg").write_bytes(data[:-30])
    flipped = bytearray((tmp_path / "flipped.png").read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF
    (tmp_path / "flipped.png").write_bytes(flipped)
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "text.png").write_text("not an image")
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(ValueError, match=re.escape(path.name)):
            read_image(path)


def pixel(tmp_path, image, name, **options):
    image.save(tmp_path / name, **options)
    return read_image(tmp_path / name)[2, 2].tolist()


def test_every_mode_becomes_three_channels_by_one_rule(tmp_path):
    assert pixel(tmp_path, Image.new("L", (8, 8), 100), "l.png") == [100, 100, 100]
    assert pixel(tmp_path, Image.new("1", (8, 8), 1), "one.png") == [255, 255, 255]
    assert pixel(tmp_path, Image.new("I;16", (8, 8), 65535 // 2), "deep.png") == [127, 127, 127]
    transparent = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
    assert pixel(tmp_path, transparent, "rgba.png") == [255, 255, 255]
    assert pixel(tmp_path, Image.new("LA", (8, 8), (0, 0)), "la.png") == [255, 255, 255]
    assert pixel(tmp_path, Image.new("P", (8, 8)), "p.png", transparency=0) == [255, 255, 255]
    red, green, blue = pixel(tmp_path, Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "cmyk.jpg")
    assert red > 200
    assert green < 60
    assert blue < 60


def sixteen_bit_rgb(path, value):
    """An 8 x 8 PNG of 16-bit colour, which Pillow itself does not write."""
    rows = b"".join(b"\0" + struct.pack(">3H", *value) * 8 for _ in range(8))
    chunks = [
        (b"IHDR", struct.pack(">2I5B", 8, 8, 16, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n"
    for kind, body in chunks:
        data += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    path.write_bytes(data)


def test_sixteen_bits_are_scaled_and_never_saturated(tmp_path):
    values = np.arange(0, 65536, 256, dtype=np.uint16).reshape(16, 16)
    expected = np.round(values / 257).astype(np.uint8)
    Image.fromarray(values).save(tmp_path / "deep.png")
    Image.fromarray(values).save(tmp_path / "deep.tif")
    big = Image.frombytes("I;16B", (16, 16), values.astype(">u2").tobytes())
    big.save(tmp_path / "big.tif")
    for name in ("deep.png", "deep.tif", "big.tif"):
        assert np.array_equal(read_image(tmp_path / name)[..., 1], expected), name
    sixteen_bit_rgb(tmp_path / "colour.png", (0xFFFF, 0x8000, 0x0100))
    assert read_image(tmp_path / "colour.png")[3, 3].tolist() == [255, 128, 1]


@pytest.mark.parametrize(("mode", "dtype"), [("I;16", np.uint16), ("L", np.uint8)])
def test_a_tiff_whose_white_is_zero_is_turned_round(tmp_path, mode, dtype):
    values = np.linspace(0, np.iinfo(dtype).max, 64).astype(dtype).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "black.tif")
    data = bytearray((tmp_path / "black.tif").read_bytes())
    place = data.index(struct.pack("<2HLH", 262, 3, 1, 1)) + 8  # BlackIsZero
    data[place] = 0
    (tmp_path / "white.tif").write_bytes(data)
    black, white = (read_image(tmp_path / f"{name}.tif").astype(int) for name in ("black", "white"))
    assert np.abs(white - (255 - black)).max() <= 1  # rounded from either end


def test_wide_images_are_converted_by_pixels_and_not_by_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(image_reading, "STRIP", 1000)
    sizes, convert = [], image_reading._strip_to_rgb
    monkeypatch.setattr(
        image_reading, "_strip_to_rgb", lambda strip, white: sizes.append(strip.size) or convert(strip, white)
    )
    values = np.random.default_rng(0).integers(0, 256, (40, 300, 3), dtype=np.uint8)
    Image.fromarray(values).save(tmp_path / "x.png")
    assert np.array_equal(read_image(tmp_path / "x.png"), values)
    assert max(width * height for width, height in sizes) <= 1000


def test_values_of_no_known_range_are_refused(tmp_path):
    Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)).save(tmp_path / "float.tif")
    Image.fromarray(np.full((4, 4), 1 << 20, dtype=np.int32)).save(tmp_path / "wide.tif")
    with pytest.raises(ValueError, match=r"float.tif .*floats"):
        read_image(tmp_path / "float.tif")
    with pytest.raises(ValueError, match=r"wide.tif .*beyond 16 bits"):
        read_image(tmp_path / "wide.tif")


def test_colours_of_every_kind_of_cmyk_are_the_right_way_round(tmp_path):
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red.save(tmp_path / "inverted.jpg")  # Adobe's way: Pillow writes the marker and inverts
    red.save(tmp_path / "plain.tif")
    for name in ("inverted.jpg", "plain.tif"):
        r, g, b = read_image(tmp_path / name)[8, 8]
        assert (r > 200, g < 60, b < 60) == (True, True, True)


def test_partly_transparent_colours_are_mixed_with_white(tmp_path):
    half = Image.new("RGBA", (4, 4), (255, 0, 0, 128))
    assert pixel(tmp_path, half, "half.png") == [255, 127, 127]
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 255, 255, 0, 0])
    assert pixel(tmp_path, palette, "some.png", transparency=bytes([255, 128])) == [255, 127, 127]


def test_the_content_and_not_the_suffix_decides(tmp_path):
    Image.new("RGB", (8, 8), RED).save(tmp_path / "x.png")
    (tmp_path / "x.png").rename(tmp_path / "x.JPEG")
    assert read_image(tmp_path / "x.JPEG")[0, 0].tolist() == [255, 0, 0]


def test_animated_and_progressive_files_are_read(tmp_path):
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, (0, 255, 0))]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    frames[0].save(tmp_path / "a.jpg", progressive=True, quality=95)
    for name in ("a.webp", "a.jpg"):
        assert read_image(tmp_path / name)[4, 4].tolist() == pytest.approx([255, 0, 0], abs=3)


def claims(path, width, height):
    """A small PNG whose header claims another size."""
    Image.new("L", (4, 4)).save(path)
    data = bytearray(path.read_bytes())
    data[16:24] = struct.pack(">2I", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)


def test_a_decompression_bomb_is_refused_by_name_with_the_limit(tmp_path):
    claims(tmp_path / "bomb.png", 20_000, 20_000)
    with pytest.raises(ValueError, match=r"bomb.png is too large .*400000000.*64,000,000.*SITVIT_MAX"):
        read_image(tmp_path / "bomb.png")


def test_the_limit_of_pixels_can_be_changed_on_purpose(tmp_path, monkeypatch):
    Image.new("RGB", (64, 64), RED).save(tmp_path / "x.png")
    monkeypatch.setenv("SITVIT_MAX_IMAGE_PIXELS", "4095")
    with pytest.raises(ValueError, match=r"x.png is too large .*4,096 pixels|4096"):
        read_image(tmp_path / "x.png")
    monkeypatch.setenv("SITVIT_MAX_IMAGE_PIXELS", "4096")
    assert read_image(tmp_path / "x.png").shape == (64, 64, 3)
    monkeypatch.setenv("SITVIT_MAX_IMAGE_PIXELS", "many")
    with pytest.raises(ValueError, match="^SITVIT_MAX_IMAGE_PIXELS must be a number"):
        read_image(tmp_path / "x.png")


@pytest.mark.parametrize("limit", ["many", "0", "-5"])
def test_a_limit_of_pixels_that_is_none_is_told_before_any_image_is_blamed(tmp_path, monkeypatch, limit):
    Image.new("RGB", (8, 8), RED).save(tmp_path / "x.png")
    monkeypatch.setenv("SITVIT_MAX_IMAGE_PIXELS", limit)
    with pytest.raises(ValueError, match=f"^SITVIT_MAX_IMAGE_PIXELS must be .* from 1, got '{limit}'"):
        open_images(str(tmp_path))


def test_images_above_pillows_warning_are_read_in_silence(tmp_path, recwarn, monkeypatch):
    monkeypatch.setenv("SITVIT_MAX_IMAGE_PIXELS", "100")
    Image.new("RGB", (9, 9), RED).save(tmp_path / "x.png")  # Pillow warns at half of its limit
    assert read_image(tmp_path / "x.png").shape == (9, 9, 3)
    assert not recwarn.list


def test_a_gif_whose_second_frame_lies_far_out_gives_its_first(tmp_path):
    frames = [Image.new("P", (24, 24), color) for color in (0, 1)]
    frames[0].putpalette([255, 0, 0, 0, 255, 0])
    frames[0].save(tmp_path / "far.gif", save_all=True, append_images=frames[1:])
    data = bytearray((tmp_path / "far.gif").read_bytes())
    second = data.rindex(b"\x2c")
    data[second + 1 : second + 5] = struct.pack("<2H", 45_000, 45_000)
    (tmp_path / "far.gif").write_bytes(data)
    assert read_image(tmp_path / "far.gif")[0, 0].tolist() == [255, 0, 0]


def adm_crop(image, size):
    """The recipe as it is published, without a thought for memory."""
    picture = Image.fromarray(image)
    while min(*picture.size) >= 2 * size:
        picture = picture.resize(tuple(x // 2 for x in picture.size), resample=Image.Resampling.BOX)
    scale = size / min(*picture.size)
    picture = picture.resize(tuple(round(x * scale) for x in picture.size), resample=Image.Resampling.BICUBIC)
    array = np.array(picture)
    y, x = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    return array[y : y + size, x : x + size]


@settings(max_examples=300, deadline=None)
@given(
    short=st.integers(1, 90), ratio=st.floats(1, 60), tall=st.booleans(), size=st.integers(1, 64),
    two_values=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_the_crop_equals_the_published_recipe_bit_for_bit(short, ratio, tall, size, two_values, seed):
    shape = (round(short * ratio), short) if tall else (short, round(short * ratio))
    image = np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)
    image = np.where(image > 127, 255, 0).astype(np.uint8) if two_values else image  # these overshoot
    assert np.array_equal(center_crop(image, size), adm_crop(image, size))


@pytest.mark.parametrize("shape", [(1, 4000), (4000, 1), (3, 30_000)])
def test_the_crop_of_extreme_shapes_takes_little_memory(shape):
    """The recipe itself passes 1 x 4000 through 256 x 1,024,000 pixels."""
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    tracemalloc.start()
    cropped = center_crop(image, 256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert cropped.shape == (256, 256, 3)
    assert peak < 20e6


def test_the_first_frame_of_an_animation_counts(tmp_path):
    frames = [Image.new("RGB", (8, 8), color) for color in (RED, (0, 255, 0))]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert read_image(tmp_path / "a.gif")[0, 0].tolist() == [255, 0, 0]


def test_exif_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (64, 32))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").shape == (64, 32, 3)


def test_the_crop_keeps_the_middle_and_the_size():
    image = np.zeros((40, 100, 3), dtype=np.uint8)
    image[:, 30:70] = 200
    cropped = center_crop(image, 20)
    assert cropped.shape == (20, 20, 3)
    assert cropped[:, 2:-2].min() > 190


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (1, 50), (50, 1)])
def test_tiny_and_thin_images_are_scaled_up(size):
    assert center_crop(np.full((*size, 3), 7, dtype=np.uint8), 16).tolist() == [[[7] * 3] * 16] * 16


def test_an_image_of_the_size_is_untouched():
    image = np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    assert np.array_equal(center_crop(image, 16), image)


def test_fetching_checks_each_file_and_keeps_nothing_wrong(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for name in FASHION_SHA256:
        with gzip.open(source / name, "wb") as file:
            file.write(b"something else")
    with pytest.raises(ValueError, match="sha256"):
        list(fetch_fashion(out, source))
    assert not list(out.iterdir())


def test_fetching_takes_what_is_right_and_names_what_is_missing(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="train-images-idx3-ubyte.gz"):
        list(fetch_fashion(out, FASHION_FOLDER))
    assert {path.name for path in out.iterdir()} == {path.name for path in FASHION_FOLDER.glob("*.gz")}


def test_an_idx_file_is_a_source_of_its_own(tmp_path):
    for path in FASHION_FOLDER.glob("*.gz"):
        shutil.copy(path, tmp_path)
    source = open_images(str(tmp_path / "t10k-images-idx3-ubyte.gz"))
    assert np.array_equal(source.read(5), embedded_fashion().read(5))
    with open(tmp_path / "t10k-labels-idx1-ubyte.gz", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte.gz is not a whole gzip file"):
        open_images(str(tmp_path / "t10k-images-idx3-ubyte.gz"))
