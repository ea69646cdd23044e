"""Reading images: one rule for every format, a sentence for what cannot be read."""

import gzip
import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from sitvit.data.demo import FASHION_FOLDER, FASHION_SHA256, embedded_fashion, fetch_fashion, sha256_of_file
from sitvit.data.images import ImageFolder, center_crop, open_images, read_image

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


def test_labels_follow_the_folder_of_each_image(tmp_path):
    """Names that sort differently as text and number, mixed case, spaces, brackets, other scripts."""
    names = ["b", "A", "a b", "é", "[a]*", "10", "2"]
    for i, name in enumerate(names):
        for k in range(3):
            write(tmp_path / name / f"{k}.png", (10 * i, k, 0))
    source = ImageFolder(tmp_path)
    assert source.class_names == sorted(names)
    assert len(source) == 21
    for index in range(len(source)):
        red = source.read(index)[0, 0, 0]
        assert source.class_names[source.labels[index]] == names[red // 10]


def test_folders_that_are_all_numbers_are_ordered_as_numbers(tmp_path):
    for name in ("0", "1", "2", "10", "11"):
        write(tmp_path / name / "x.png")
    assert ImageFolder(tmp_path).class_names == ["0", "1", "2", "10", "11"]


def test_hidden_system_and_empty_folders_are_passed_over_with_a_notice(tmp_path):
    write(tmp_path / "cat" / "x.png")
    write(tmp_path / ".ipynb_checkpoints" / "x.png")
    write(tmp_path / "__MACOSX" / "x.png")
    write(tmp_path / "cat" / "._x.png")
    write(tmp_path / "loose.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".DS_Store").write_text("")
    source = ImageFolder(tmp_path)
    assert source.class_names == ["cat"]
    assert len(source) == 1
    told = " ".join(source.notices)
    for word in (".ipynb_checkpoints", "__MACOSX", "empty", "1 images that lie outside"):
        assert word in told


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda folder: folder.rmdir(), "there is no folder"),
        (lambda folder: None, "has no images"),
        (lambda folder: write(folder / "x.png"), "no class folders"),
        (lambda folder: (folder / "a").mkdir(), "has no images"),
    ],
    ids=["missing", "empty", "without classes", "classes without images"],
)
def test_a_folder_that_cannot_serve_is_refused_by_name(tmp_path, prepare, words):
    folder = tmp_path / "photos"
    folder.mkdir()
    prepare(folder)
    with pytest.raises(ValueError, match=words) as caught:
        open_images(str(folder))
    assert "photos" in str(caught.value)


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


def test_the_fingerprint_changes_when_a_file_is_written_renamed_or_added(tmp_path):
    write(tmp_path / "a" / "x.png")
    first = ImageFolder(tmp_path).fingerprint()
    assert ImageFolder(tmp_path).fingerprint() == first
    os.utime(tmp_path / "a" / "x.png", (1, 1))
    touched = ImageFolder(tmp_path).fingerprint()
    (tmp_path / "a" / "x.png").rename(tmp_path / "a" / "y.png")
    renamed = ImageFolder(tmp_path).fingerprint()
    write(tmp_path / "a" / "z.png")
    assert len({first, touched, renamed, ImageFolder(tmp_path).fingerprint()}) == 4
