"""Tar and zip archives, read member by member where they lie.

Nothing is unpacked, so nothing can land outside of its folder; links and devices, and more than was expected,
refuse the archive.
"""

from __future__ import annotations

import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from lzma import LZMAError
from pathlib import Path
from typing import IO, Any, Self

from feddbe.data import rows
from feddbe.errors import BadInput

_MEMBERS = 10_000
_NAME = 1 << 16
"""Bytes of a long name in a tar archive, which is read before its size could be counted."""

DAMAGE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    LZMAError,
    EOFError,
    OSError,
    NotImplementedError,  # a zip's unknown compression
    RuntimeError,  # a zip with a password
)
"""What reading a damaged archive can raise."""


def damaged(archive: Path, error: BaseException) -> BadInput:
    """The line for an archive that cannot be read."""
    reason = str(error).partition("\n")[0].rstrip(":") or type(error).__name__
    return BadInput(f"cannot read {archive}: {reason}; fetch it again")


def members(archive: Path, limit: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of each file in the archive, which together may have `limit` bytes.

    A member's content ends where its entry says, so the sizes there are those that count.
    """
    left = limit
    for name, size, content in _zipped(archive) if zipfile.is_zipfile(archive) else _tarred(archive):
        left -= size
        if left < 0:
            raise BadInput(
                f"{archive} unpacks to more than the {limit} bytes that were expected; fetch it again"
            )
        yield name, content


def check_zip(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse a user's zip that would unpack to more than 256 MB and than a hundred times what it holds."""
    try:
        rows.check_unpacked(archive, path)
    except ValueError as error:
        raise BadInput(str(error)) from None


def _zipped(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if (info.external_attr >> 16) & 0o170000 == 0o120000:
                raise BadInput(f"{archive} has a link, '{info.filename}'; only plain files are read")
            if not info.is_dir():
                with opened.open(info) as content:
                    yield info.filename, info.file_size, content


def _tarred(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    with tarfile.open(archive, tarinfo=_Info) as tar:
        for number, member in enumerate(tar):
            if number == _MEMBERS:
                raise BadInput(f"{archive} has more than {_MEMBERS} entries; fetch it again")
            if member.isdir():
                continue
            found = tar.extractfile(member) if member.isfile() else None
            if found is None:
                raise BadInput(f"{archive} has a link or device, '{member.name}'; only plain files are read")
            yield member.name, member.size, found


class _Info(tarfile.TarInfo):
    """An entry; those that hold a name or attributes of the next one must be small."""

    @classmethod
    def frombuf(cls, *given: Any, **more: Any) -> Self:
        entry = super().frombuf(*given, **more)
        if entry.size > _NAME and not (entry.isfile() or entry.isdir()):
            raise tarfile.TarError(f"a name or attributes of {entry.size} bytes")
        return entry
