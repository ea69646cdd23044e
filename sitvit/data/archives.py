"""Images in a zip or tar, read in place: an index of offsets, and no open file, so any thread or process
may read. The class of an image is the folder that holds it; `photos/cat/1.png` and `cat/1.png` are both of
class cat.
"""

import hashlib
import io
import os
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np

from .images import decode_image
from .sources import about_names, class_order, is_image, is_junk


@dataclass(frozen=True)
class Member:
    """Where the bytes of one file lie: at `offset`, `size` of them, deflated or as they are."""

    name: str
    offset: int
    size: int
    deflated: bool
    checksum: int | None


class ArchiveImages:
    """Images of an archive, labelled by folder."""

    def __init__(self, path: Path, members: Iterable[Member]) -> None:
        everything = sorted(members, key=lambda member: member.name)
        images = [m for m in everything if is_image(m.name)]
        junk = [m for m in images if any(is_junk(part) for part in PurePosixPath(m.name).parts)]
        loose = [m for m in images if len(PurePosixPath(m.name).parts) < 2]
        passed = {m.name for m in [*junk, *loose]}
        kept = [m for m in images if m.name not in passed]
        if not kept:
            raise ValueError(f"{path} has no images in folders; the folder of an image is its class")
        self.path = path
        self.class_names = class_order(_folder(m) for m in kept)
        label_of = {name: label for label, name in enumerate(self.class_names)}
        kept.sort(key=lambda member: label_of[_folder(member)])
        self.members = kept
        self.labels = np.array([label_of[_folder(m)] for m in kept], dtype=np.int64)
        self.notices = [
            f"passed over {len(some)} images in {path}: {why}"
            for some, why in ((junk, "hidden or system folder"), (loose, "outside a folder"))
            if some
        ]
        self.notices += about_names(self.class_names)

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
        """Changes when the archive is written again."""
        stat = self.path.stat()
        digest = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns}\n".encode())
        for member, label in zip(self.members, self.labels, strict=True):
            digest.update(f"{member.name}\0{label}\0{member.size}\0{member.checksum}\n".encode())
        return digest.hexdigest()


def open_archive(path: Path) -> ArchiveImages:
    """The images of a zip or an uncompressed tar; ValueError naming a damaged or compressed one."""
    try:
        members = zip_members(path) if path.suffix.lower() == ".zip" else _tar_members(path)
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path} is damaged or no {path.suffix.lower()[1:]} file ({error})") from None
    twice = [name for name, count in Counter(member.name for member in members).items() if count > 1]
    if twice:
        raise ValueError(f"{path} holds {twice[0]} more than once; unpack it, and give the folder")
    return ArchiveImages(path, members)


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
            members.append(Member(info.filename, info.header_offset, info.compress_size, deflated, info.CRC))
    return members


def _tar_members(path: Path) -> list[Member]:
    with open(path, "rb") as file:
        if file.read(2) in (b"\x1f\x8b", b"BZ", b"\xfd7"):
            raise ValueError(f"{path} is compressed, so an image in it cannot be found; unpack it first")
    with tarfile.open(path, "r:") as archive:
        return [
            Member(entry.name.removeprefix("./"), entry.offset_data, entry.size, False, None)
            for entry in archive
            if entry.isreg() and not entry.issparse()
        ]


def member_bytes(path: Path, member: Member) -> bytes:
    """The content of a member, checked where the archive has a checksum; EOFError where it is short."""
    with open(path, "rb") as file:
        file.seek(member_offset(file, member))
        data = file.read(member.size)
    if len(data) < member.size:
        raise EOFError("the archive ends before")
    content = zlib.decompress(data, -zlib.MAX_WBITS) if member.deflated else data
    if member.checksum is not None and zlib.crc32(content) != member.checksum:
        raise EOFError("its checksum is wrong")
    return content


def member_offset(file: IO[bytes], member: Member) -> int:
    """Where the data begin: in a zip after a local header (30 bytes, then a name and an extra field)."""
    if member.checksum is None:
        return member.offset
    file.seek(member.offset)
    name, extra = struct.unpack("<26xHH", file.read(30))
    return member.offset + 30 + name + extra


def _folder(member: Member) -> str:
    return os.path.basename(os.path.dirname(member.name))
