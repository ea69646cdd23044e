"""Where images lie: folders, archives, arrays and saved data sets give the same images the same labels."""

import io
import os
import pickle
import sys
import tarfile
import types
import zipfile
import zlib

import numpy as np
import pytest
from PIL import Image

from sitvit.data.archives import Member, member_bytes
from sitvit.data.arrays import ArrayImages
from sitvit.data.encode import problems
from sitvit.data.hub import HubImages
from sitvit.data.sources import ImageFolder, about_names, class_order, open_images

RED = (255, 0, 0)


def write(path, color=RED, size=(8, 8), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)


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


NAMES = ["b", "A", "a b", "é", "[a]*", "10", "2"]


@pytest.fixture
def tree(tmp_path):
    """Three solid colours a class, and junk; red says the class, green the image."""
    for i, name in enumerate(NAMES):
        for k in range(3):
            write(tmp_path / "photos" / name / f"{k}.png", (10 * i, k, 0))
    write(tmp_path / "photos" / ".ipynb_checkpoints" / "x.png")
    write(tmp_path / "photos" / "__MACOSX" / "b" / "._x.png")
    return tmp_path / "photos"


def zipped(tree, path, inner="", compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for file in sorted(tree.rglob("*"), reverse=True):
            archive.write(file, inner + file.relative_to(tree).as_posix())
    return path


def tarred(tree, path, inner="", mode="w"):
    with tarfile.open(path, mode) as archive:
        for file in sorted(tree.rglob("*.png"), reverse=True):
            archive.add(file, inner + file.relative_to(tree).as_posix())
    return path


def content(source):
    return [(source.class_names[source.labels[i]], source.read(i)[0, 0].tolist()) for i in range(len(source))]


@pytest.mark.parametrize("inner", ["", "photos/"])
@pytest.mark.parametrize("pack", [zipped, tarred])
def test_an_archive_gives_the_labels_and_images_of_its_folder(tree, tmp_path, pack, inner):
    source = open_images(str(pack(tree, tmp_path / f"x.{pack.__name__[:3]}", inner)))
    folder = ImageFolder(tree)
    assert source.class_names == folder.class_names == sorted(NAMES)
    assert content(source) == content(folder)
    assert "passed over" in " ".join(source.notices)
    for name, (red, _, _) in content(source):
        assert name == NAMES[red // 10]


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_numbered_folders_have_the_same_labels_in_archives(tmp_path, pack):
    for name in range(12):
        write(tmp_path / "n" / str(name) / "x.png", (name, 0, 0))
    for source in (
        ImageFolder(tmp_path / "n"),
        open_images(str(pack(tmp_path / "n", tmp_path / f"n.{pack.__name__[:3]}"))),
    ):
        assert [source.read(i)[0, 0, 0] for i in range(12)] == source.labels.tolist() == list(range(12))
        assert source.notices == []


@pytest.mark.parametrize("pack", [zipped, tarred])
@pytest.mark.parametrize("inner", ["", "a/b/"])
def test_nested_folders_are_of_the_outermost_class_in_archives_as_in_folders(tmp_path, pack, inner):
    for i, name in enumerate(("cat/front", "cat/side", "dog/front", "dog")):
        write(tmp_path / "photos" / name / "x.png", (i, 0, 0))
    folder = ImageFolder(tmp_path / "photos")
    source = open_images(str(pack(tmp_path / "photos", tmp_path / f"x.{pack.__name__[:3]}", inner)))
    assert source.class_names == folder.class_names == ["cat", "dog"]
    assert sorted(content(source)) == sorted(content(folder))
    assert any("the classes are the folders in a/b" in notice for notice in source.notices) == bool(inner)


def test_one_class_with_images_beside_folders_stays_one_class_and_is_told(tmp_path):
    """One loose image beside the class folders of an archive takes their names away."""
    for name in ("cat", "cat/side", "cat/front"):
        write(tmp_path / "photos" / name / "x.png")
    archive = open_images(str(zipped(tmp_path / "photos", tmp_path / "x.zip")))
    for source in (archive, ImageFolder(tmp_path / "photos")):
        assert source.class_names == ["cat"]
        assert "all images are of one class, cat, though they lie in 3 folders" in source.notices[-1]
    write(tmp_path / "one" / "cat" / "x.png")
    assert ImageFolder(tmp_path / "one").notices == []


@pytest.mark.parametrize("names", [("train", "val"), ("Test",)])
def test_folders_called_as_splits_are_told(tmp_path, names):
    for name in names:
        write(tmp_path / "photos" / name / "cat" / "x.png")
    told = "if these are splits, name one of them"
    assert any(told in notice for notice in ImageFolder(tmp_path / "photos").notices)


def test_numbers_written_in_several_ways_are_told_to_be_classes_of_their_own(tmp_path):
    for name in ("1", "01", "001"):
        write(tmp_path / name / "x.png")
    source = ImageFolder(tmp_path)
    assert len(source.class_names) == 3
    assert source.notices == [
        "001 and 01 are one number, but two classes; if they should be one, put them into one folder"
    ]


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_files_of_unknown_suffixes_are_counted_by_suffix(tmp_path, pack):
    write(tmp_path / "photos" / "cat" / "x.png")
    for name in ("a.jp2", "b.jp2", "c.AVIF", "none", ".hidden"):
        (tmp_path / "photos" / "cat" / name).write_text("")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "photos", "photos")
    packed = tmp_path / "x.tar" if pack is tarred else zipped(tmp_path / "photos", tmp_path / "x.zip")
    for source in (ImageFolder(tmp_path / "photos"), open_images(str(packed))):
        told = " ".join(source.notices)
        assert "passed over 4 files" in told
        assert ".jp2 (2), .avif (1), no suffix (1)" in told


def test_a_tar_that_was_cut_off_anywhere_is_refused(tree, tmp_path):
    whole = tarred(tree, tmp_path / "x.tar").read_bytes()
    with tarfile.open(tmp_path / "x.tar") as archive:
        starts = [entry.offset for entry in archive]
    for end in (starts[3], starts[3] + 100, starts[3] + 600, starts[-1]):
        (tmp_path / "x.tar").write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"x.tar .*(cut off|damaged)"):
            open_images(str(tmp_path / "x.tar"))


def test_a_tar_with_a_broken_header_and_two_tars_in_one_are_refused(tree, tmp_path):
    whole = tarred(tree, tmp_path / "x.tar").read_bytes()
    with tarfile.open(tmp_path / "x.tar") as archive:
        start = list(archive)[4].offset
    for data in (whole[:start] + b"\xff" * 512 + whole[start + 512 :], whole + whole):
        (tmp_path / "x.tar").write_bytes(data)
        with pytest.raises(ValueError, match=r"x.tar is damaged at byte"):
            open_images(str(tmp_path / "x.tar"))


def test_links_within_a_tar_are_followed_and_others_are_told(tmp_path):
    write(tmp_path / "photos" / "cat" / "0.png", (1, 0, 0))
    os.link(tmp_path / "photos" / "cat" / "0.png", tmp_path / "photos" / "cat" / "1.png")
    (tmp_path / "photos" / "dog").mkdir()
    (tmp_path / "photos" / "dog" / "2.png").symlink_to("../cat/1.png")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "photos", "photos")
        out = tarfile.TarInfo("photos/dog/3.png")
        out.type, out.linkname = tarfile.SYMTYPE, "/etc/3.png"
        archive.addfile(out)
    source = open_images(str(tmp_path / "x.tar"))
    assert content(source) == content(ImageFolder(tmp_path / "photos"))
    assert len(source) == 3
    assert "passed over 1 entries" in source.notices[0]
    assert "photos/dog/3.png" in source.notices[0]


def test_a_member_that_inflates_beyond_the_limit_is_refused_unread(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cat/x.png", bytes(100_000))
    monkeypatch.setenv("SITVIT_MAX_IMAGE_PIXELS", "20000")
    with pytest.raises(
        ValueError, match=r"x.zip/cat/x.png cannot be read \(100,000 bytes, the limit is 80,000"
    ):
        open_images(str(tmp_path / "x.zip")).read(0)


def test_a_member_that_inflates_to_more_than_it_says_is_refused(tmp_path):
    data = zlib.compress(bytes(1_000_000))[2:-4]
    (tmp_path / "x").write_bytes(data)
    member = Member("x", 0, len(data), 10, True, None)
    with pytest.raises(EOFError, match="does not inflate to the 10 bytes"):
        member_bytes(tmp_path / "x", member)


def test_stored_archives_and_pickled_sources_read_alike(tree, tmp_path):
    source = open_images(str(zipped(tree, tmp_path / "s.zip", compression=zipfile.ZIP_STORED)))
    assert content(pickle.loads(pickle.dumps(source))) == content(ImageFolder(tree))


def test_a_damaged_member_of_an_archive_is_named(tree, tmp_path):
    path = zipped(tree, tmp_path / "x.zip", compression=zipfile.ZIP_STORED)
    source = open_images(str(path))
    good = member_bytes(path, source.members[4])
    data = path.read_bytes()
    place = data.index(good) + len(good) // 2
    path.write_bytes(data[:place] + bytes([data[place] ^ 255]) + data[place + 1 :])
    with pytest.raises(ValueError, match=r"x.zip/.*png cannot be read \(its checksum is wrong"):
        for index in range(len(source)):
            source.read(index)


def test_archives_that_cannot_serve_are_refused_by_name(tree, tmp_path):
    with pytest.raises(ValueError, match="x.tar is compressed"):
        open_images(str(tarred(tree, tmp_path / "x.tar", mode="w:gz")))
    with pytest.raises(ValueError, match="b.zip: .*deflate"):
        open_images(str(zipped(tree, tmp_path / "b.zip", compression=zipfile.ZIP_BZIP2)))
    (tmp_path / "no.zip").write_text("no")
    with pytest.raises(ValueError, match="no.zip is damaged or no zip file"):
        open_images(str(tmp_path / "no.zip"))
    with zipfile.ZipFile(tmp_path / "e.zip", "w"):
        pass
    with pytest.raises(ValueError, match="e.zip has no images in folders"):
        open_images(str(tmp_path / "e.zip"))
    (tmp_path / "x.rar").write_text("no")
    with pytest.raises(ValueError, match="x.rar is a file of no known kind"):
        open_images(str(tmp_path / "x.rar"))


def test_npz_arrays_are_mapped_and_labelled(tmp_path):
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (5, 6, 7, 3), dtype=np.uint8), np.array([0, 2, 1, 2, 0])
    np.savez(tmp_path / "a.npz", images=images, labels=labels, class_names=["x", "y", "z"])
    np.savez_compressed(tmp_path / "b.npz", arr_0=images, arr_1=labels)
    np.savez(tmp_path / "c.npz", images=images.transpose(0, 3, 1, 2), labels=labels[:, None])
    np.savez(tmp_path / "d.npz", images=images[..., 0])
    for name in "abc":
        source = open_images(str(tmp_path / f"{name}.npz"))
        assert all(np.array_equal(source.read(i), images[i]) for i in range(5))
        assert source.labels.tolist() == labels.tolist()
    assert open_images(str(tmp_path / "a.npz")).class_names == ["x", "y", "z"]
    gray = open_images(str(tmp_path / "d.npz"))
    assert np.array_equal(gray.read(1)[..., 2], images[1, ..., 0])
    assert "no labels" in gray.notices[0]
    mapped = ArrayImages(tmp_path / "a.npz")
    assert isinstance(mapped._images, np.memmap)
    assert len(pickle.dumps(mapped)) < 500


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"images": np.zeros((2, 4, 4, 3))}, "images is float64"),
        ({"images": np.zeros((2, 4, 4, 5), np.uint8)}, r"images is uint8 \(2, 4, 4, 5\)"),
        ({"images": np.zeros((2, 4, 4, 3), np.uint8), "labels": np.array([0])}, "needed are 2 whole numbers"),
        ({"images": np.zeros((2, 4, 4, 3), np.uint8), "labels": np.array([0, -1])}, "needed are 2"),
        ({"mu": np.zeros(3)}, "no array images"),
    ],
)  # fmt: skip
def test_arrays_of_another_kind_are_refused_by_name(tmp_path, arrays, words):
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=f"x.npz.*{words}"):
        open_images(str(tmp_path / "x.npz"))


@pytest.mark.parametrize("label", [2_000_000_000, 10**6])
def test_labels_that_would_need_a_million_classes_are_refused(tmp_path, label):
    np.savez(tmp_path / "x.npz", images=np.zeros((2, 4, 4, 3), np.uint8), labels=np.array([0, label]))
    with pytest.raises(ValueError, match=f"x.npz: labels has a label {label}"):
        open_images(str(tmp_path / "x.npz"))


def test_the_check_finds_a_changed_byte_of_a_stored_array(tmp_path):
    np.savez(tmp_path / "x.npz", images=np.full((9, 4, 4, 3), 7, np.uint8), labels=np.arange(9))
    assert problems(open_images(str(tmp_path / "x.npz"))) == []
    data = bytearray((tmp_path / "x.npz").read_bytes())
    data[data.index(b"\x07" * 48) + 5] = 8
    (tmp_path / "x.npz").write_bytes(data)
    assert [p.split("x.npz")[1] for p in problems(open_images(str(tmp_path / "x.npz")))] == [
        ": the checksum of images.npy is wrong; fetch or make the file again"
    ]


def test_an_npz_with_text_says_which_arrays_it_has(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("notes.txt", "text")
    with pytest.raises(ValueError, match=r"x.npz has no array images \(or arr_0\); it has none"):
        open_images(str(tmp_path / "x.npz"))
    (tmp_path / "y.npz").write_text("text")
    with pytest.raises(ValueError, match="y.npz is no npz file"):
        open_images(str(tmp_path / "y.npz"))


def test_an_npz_that_would_run_code_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", images=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match="x.npz cannot be read"):
        open_images(str(tmp_path / "x.npz"))


def test_synsets_have_imagenets_official_order():
    """Official: ILSVRC2012 numbers its WordNet ids in their order, tench 0 to toilet tissue 999."""
    known = {"n01440764": 0, "n01443537": 1, "n01484850": 2, "n15075141": 999}
    between = [f"n{number:08}" for number in range(2_000_000, 2_000_996)]
    names = class_order([*reversed(between), *known])
    assert {name: names.index(name) for name in known} == known
    assert "official one if these are the 1000 of its challenge" in about_names(names)[0]
    assert "100 synsets, not 1000" in about_names(names[:100])[0]


def test_numbers_with_gaps_are_told_to_be_shifted(tmp_path):
    for name in ("5", "10", "2"):
        write(tmp_path / name / "x.png")
    source = ImageFolder(tmp_path)
    assert source.class_names == ["2", "5", "10"]
    assert source.notices == ["the classes are numbers, but not 0 to 2: class 2 has label 0"]


def test_links_are_followed_once_and_links_to_nothing_are_named(tmp_path):
    write(tmp_path / "real" / "x.png")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "loop").symlink_to(tmp_path / "real")
    (tmp_path / "real" / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "real" / "folder.jpg").mkdir()
    source = ImageFolder(tmp_path / "photos")
    assert [path.name for path in source.paths] == ["gone.png", "x.png"]
    assert len(source.fingerprint()) == 64
    with pytest.raises(ValueError, match=r"gone.png"):
        source.read(0)


class FakeTable:
    """As much of `datasets.Dataset` as is used."""

    _fingerprint = "f"

    def __init__(self, columns, features):
        self.columns, self.features = columns, features

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        return self.columns[key] if isinstance(key, str) else {k: v[key] for k, v in self.columns.items()}

    def select_columns(self, names):
        return FakeTable({n: self.columns[n] for n in names}, {n: self.features[n] for n in names})

    def cast_column(self, name, feature):
        return self


@pytest.fixture
def fake_datasets(monkeypatch):
    """Stands in for the package, which is an extra; a real folder of it is read where it is installed."""

    def keep(self, **arguments):
        self.__dict__.update(arguments)

    kinds = {name: type(name, (), {"__init__": keep}) for name in ("Image", "ClassLabel", "Value")}
    files = []
    for color in ((0, 0, 0), (10, 0, 0), (20, 0, 0)):
        buffer = io.BytesIO()
        Image.new("RGB", (4, 4), color).save(buffer, "png")
        files.append({"bytes": buffer.getvalue(), "path": None})

    def table(labels, feature):
        features = {"picture": kinds["Image"](), "label": feature}
        return FakeTable({"picture": files, "label": labels}, features)

    def load_dataset(name, split):
        if name == "me/flowers":
            return {"test": None, "train": table([0, 2, 1], kinds["ClassLabel"](names=["a", "b", "c"]))}
        if name == "me/text":
            return table(["dog", "cat", "dog"], kinds["Value"]())
        raise ConnectionError("Couldn't reach the Hub")

    module = types.SimpleNamespace(load_dataset=load_dataset, Image=kinds["Image"])
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_data_set_of_the_hub_is_read_by_its_columns(fake_datasets):
    source = open_images("hub:me/flowers")
    assert source.class_names == ["a", "b", "c"]
    assert [(int(source.labels[i]), int(source.read(i)[0, 0, 0])) for i in range(3)] == [
        (0, 0),
        (2, 10),
        (1, 20),
    ]
    assert "taken is train" in source.notices[0]
    text = HubImages("hub:me/text")
    assert (text.class_names, text.labels.tolist()) == (["cat", "dog"], [1, 0, 1])
    with pytest.raises(ValueError, match="cannot open the data set hub:me/none .*save_to_disk"):
        open_images("hub:me/none")


def test_without_the_package_the_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"not installed: pip install 'sitvit\[hub\]'"):
        open_images("hub:me/flowers")
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match="needs the package datasets"):
        open_images(str(tmp_path))


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    images = [Image.new("RGB", (4, 4), (20 * i, 0, 0)) for i in range(6)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "emu"])}
    )
    table = datasets.Dataset.from_dict({"image": images, "label": [0, 1, 2, 0, 1, 2]}, features=features)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(tmp_path / "two")
    for name in ("one", "two"):
        source = open_images(str(tmp_path / name))
        assert source.class_names == ["cat", "dog", "emu"]
        assert source.labels.tolist() == [0, 1, 2, 0, 1, 2]
        assert [int(source.read(i)[0, 0, 0]) for i in range(6)] == [0, 20, 40, 60, 80, 100]
