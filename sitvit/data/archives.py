"""Images in a zip or tar, read in place: an index of offsets, and no open file, so any thread or process
may read. Folders that hold nothing but one folder are stepped into, and from there on a folder's rule
holds: `photos/cat/1.png` and `cat/side/1.png` are both of class cat. Links within a tar are followed.
"""

import hashlib
import io
import posixpath
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from .images import decode_image, max_pixels
from .sources import (
    about_names,
    about_one_class,
    about_others,
    class_order,
    is_image,
    is_junk,
    range_fingerprints,
)

DAMAGED = (zipfile.BadZipFile, ValueError, OSError, EOFError, zlib.error, struct.error, NotImplementedError)
"""What a damaged zip or npz raises: Python's reader takes a wrong byte for a later version, say."""


@dataclass(frozen=True)
class Member:
    """Where the bytes of one file lie: at `offset`, `size` of them, deflated or as they are; `length` when
    inflated."""

    name: str
    offset: int
    size: int
    length: int
    deflated: bool
    checksum: int | None


class ArchiveImages:
    """Images of an archive, labelled by folder; `notices` adds to what was passed over before."""

    def __init__(self, path: Path, members: Iterable[Member], notices: Iterable[str] = ()) -> None:
        everything = sorted(members, key=lambda member: member.name)
        images = [m for m in everything if is_image(m.name)]
        junk = [m for m in images if any(is_junk(part) for part in PurePosixPath(m.name).parts)]
        loose = [m for m in images if not _folders(m)]
        passed = {m.name for m in [*junk, *loose]}
        kept = [m for m in images if m.name not in passed]
        if not kept:
            raise ValueError(f"{path} has no images in folders; the folder of an image is its class")
        self.path = path
        depth = _depth_of_classes(kept)
        self.class_names = class_order(_folders(m)[depth] for m in kept)
        label_of = {name: label for label, name in enumerate(self.class_names)}
        kept.sort(key=lambda member: label_of[_folders(member)[depth]])
        self.members = kept
        self.labels = np.array([label_of[_folders(m)[depth]] for m in kept], dtype=np.int64)
        self.notices = [*notices]
        self.notices += [
            f"passed over {len(some)} images in {path}: {why}"
            for some, why in ((junk, "hidden or system folder"), (loose, "outside a folder"))
            if some
        ]
        self.notices += about_others(path, [m.name for m in everything if not is_image(m.name)])
        if depth:
            inside = "/".join(_folders(kept[0])[:depth])
            self.notices.append(f"the classes are the folders in {inside} of {path}")
        self.notices += about_names(self.class_names)
        self.notices += about_one_class(self.class_names, {_folders(m) for m in kept})

    def __len__(self) -> int:
        return len(self.members)

    def name(self, index: int) -> str:
        """Where image `index` comes from, for messages."""
        return f"{self.path}/{self.members[index].name}"

    def read(self, index: int) -> np.ndarray:
        """Image `index`, uint8 (H, W, 3)."""
        try:
            data = member_bytes(self.path, self.members[index])
        except (OSError, EOFError, zlib.error, struct.error) as error:
            raise ValueError(f"{self.name(index)} cannot be read ({error})") from None
        return decode_image(io.BytesIO(data), self.name(index))

    def fingerprint(self) -> str:
        """Changes with any member's name or content; a tar has no checksums, so when it is written again."""
        stat = self.path.stat()
        written = "" if self._has_checksums else f"{stat.st_size} {stat.st_mtime_ns}\n"
        return hashlib.sha256(written.encode() + b"".join(map(b"".join, self._records))).hexdigest()

    def file_fingerprints(self, ranges: Sequence[range]) -> dict[str, Any] | None:
        """As `ImageFolder`'s, by a zip's checksums; None for a tar, whose sizes and times prove nothing."""
        return range_fingerprints(self._records, ranges) if self._has_checksums else None

    @property
    def _has_checksums(self) -> bool:
        return self.members[0].checksum is not None

    @cached_property
    def _records(self) -> list[tuple[bytes, bytes]]:
        """Name and label of each member, then its length and checksum."""
        return [
            (
                f"{m.name}\0{label}\0".encode("utf-8", "surrogateescape"),
                f"{m.length}\0{m.checksum}\n".encode(),
            )
            for m, label in zip(self.members, self.labels, strict=True)
        ]


def open_archive(path: Path) -> ArchiveImages:
    """The images of a zip or an uncompressed tar; ValueError naming a damaged or compressed one."""
    notices: list[str] = []
    try:
        members = zip_members(path) if path.suffix.lower() == ".zip" else _tar_members(path, notices)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path} is damaged or no {path.suffix.lower()[1:]} file ({error})") from None
    twice = [name for name, count in Counter(member.name for member in members).items() if count > 1]
    if twice:
        raise ValueError(f"{path} holds {twice[0]} more than once; unpack it, and give the folder")
    return ArchiveImages(path, members, notices)


def zip_members(path: Path) -> list[Member]:
    """The files of a zip: stored or deflated ones; ValueError naming any other."""
    members = []
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.is_dir():
                continue
            if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError(
                    f"{path}: {info.filename} is encrypted or compressed otherwise than by deflate"
                )
            deflated = info.compress_type == zipfile.ZIP_DEFLATED
            place = info.header_offset, info.compress_size, info.file_size
            members.append(Member(info.filename, *place, deflated, info.CRC))
    return members


def _tar_members(path: Path, notices: list[str]) -> list[Member]:
    with open(path, "rb") as file:
        if file.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7"):
            raise ValueError(f"{path} is compressed, so an image in it cannot be found; unpack it first")
    with tarfile.open(path, "r:") as archive:
        entries = [entry for entry in archive if not entry.isdir()]
        _check_end(path, archive.offset)
    regular = {posixpath.normpath(e.name): e for e in entries if e.isreg() and not e.issparse()}
    links = {posixpath.normpath(e.name): _target(e) for e in entries if e.islnk() or e.issym()}
    members, lost = [], []
    for entry in entries:
        found = regular.get(_followed(posixpath.normpath(entry.name), links))
        if found is None:
            lost.append(entry.name)
        else:
            name = entry.name.removeprefix("./")
            members.append(Member(name, found.offset_data, found.size, found.size, False, None))
    if lost:
        notices.append(
            f"passed over {len(lost)} entries of {path} that are no files, such as {lost[0]}: links to "
            "folders or out of the archive, sparse files, devices"
        )
    return members


def _check_end(path: Path, offset: int) -> None:
    """A tar ends with blocks of zeros; tarfile itself stops in silence at whatever is no header."""
    with open(path, "rb") as file:
        file.seek(offset)
        mark = file.read(tarfile.BLOCKSIZE)
        if len(mark) < tarfile.BLOCKSIZE:
            raise ValueError(f"{path} ends before its end mark: it was cut off; fetch or make it again")
        while mark:
            if any(mark):
                raise ValueError(
                    f"{path} is damaged at byte {offset}, or several tars in one: what follows would be "
                    "missing; fetch or make it again"
                )
            mark = file.read(1 << 20)


def _target(entry: tarfile.TarInfo) -> str:
    """The name that a link leads to: a hard link's from the top, a symbolic one's from its own folder."""
    folder = "" if entry.islnk() else posixpath.dirname(entry.name)
    return posixpath.normpath(posixpath.join(folder, entry.linkname))


def _followed(name: str, links: dict[str, str]) -> str:
    """Where `name` ends after at most as many links as Linux follows."""
    for _ in range(40):
        if name not in links:
            break
        name = links[name]
    return name


def member_bytes(path: Path, member: Member) -> bytes:
    """The content of a member, checked where the archive has a checksum; EOFError where it is short."""
    limit = 4 * max_pixels()  # no image within the limit of pixels needs more
    if member.length > limit:
        raise EOFError(f"{member.length:,} bytes, the limit is {limit:,}")
    with open(path, "rb") as file:
        file.seek(member_offset(file, member))
        data = file.read(member.size)
    if len(data) < member.size:
        raise EOFError("the archive ends before")
    content = _inflated(data, member.length) if member.deflated else data
    if member.checksum is not None and zlib.crc32(content) != member.checksum:
        raise EOFError("its checksum is wrong")
    return content


def _inflated(data: bytes, length: int) -> bytes:
    """Inflate to `length` bytes and not beyond, whatever the data say."""
    content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, length + 1)
    if len(content) != length:
        raise EOFError(f"it does not inflate to the {length:,} bytes that the archive says")
    return content


def member_offset(file: IO[bytes], member: Member) -> int:
    """Where the data begin: in a zip after a local header (30 bytes, then a name and an extra field)."""
    if member.checksum is None:
        return member.offset
    file.seek(member.offset)
    name, extra = struct.unpack("<26xHH", file.read(30))
    return member.offset + 30 + name + extra


def _folders(member: Member) -> tuple[str, ...]:
    return PurePosixPath(member.name).parts[:-1]


def _depth_of_classes(members: list[Member]) -> int:
    """How many folders to step into: those that all images share, as long as none lies in them directly."""
    folders = {_folders(member) for member in members}
    first, last = min(folders), max(folders)  # what these share, all share
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    return shared - (first[:shared] in folders)
