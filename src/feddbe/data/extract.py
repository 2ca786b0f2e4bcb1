"""Tar and zip archives: read member by member, or unpacked so that none leaves the folder, all or nothing."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO

from feddbe.errors import BadInput

__all__ = ["DAMAGE", "damaged", "extract", "members"]

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

_CHUNK = 1 << 20


def damaged(archive: Path, error: BaseException) -> BadInput:
    """The line for an archive that cannot be read."""
    reason = str(error).partition("\n")[0].rstrip(":") or type(error).__name__
    return BadInput(f"cannot read {archive}: {reason}; fetch it again")


def extract(archive: Path, folder: Path, limit: int) -> Path:
    """Put the archive's files below `folder`, which gets its name when all of them are there.

    What has the name already is taken for whole and kept. More than `limit` bytes, a link, a device or a
    name that leads out of the folder refuse the archive.
    """
    if folder.is_dir():
        return folder
    with _writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        left = limit
        for name, content in members(archive):
            left -= _copy(content, temporary / _inside(name, archive), left)
            if left < 0:
                raise BadInput(
                    f"{archive} unpacks to more than the {limit} bytes that were expected; fetch it again"
                )
        with _writing(folder):
            temporary.chmod(0o755)  # mkdtemp's is for its owner alone
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster, and its files are as good
                    raise
    except DAMAGE as error:
        raise damaged(archive, error) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Tell a full disk from a damaged archive: both raise OSError."""
    try:
        yield
    except OSError as error:
        raise BadInput(
            f"cannot write {target}: {error.strerror or error}; choose another --data-dir"
        ) from None


def members(archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Name and content of each file in the archive; folders follow from the names."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                if (info.external_attr >> 16) & 0o170000 == 0o120000:
                    raise BadInput(f"{archive} has a link, '{info.filename}'; only plain files are unpacked")
                if not info.is_dir():
                    with opened.open(info) as content:
                        yield info.filename, content
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isdir():
                continue
            found = tar.extractfile(member) if member.isfile() else None
            if found is None:
                raise BadInput(
                    f"{archive} has a link or device, '{member.name}'; only plain files are unpacked"
                )
            yield member.name, found


def _inside(name: str, archive: Path) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or ":" in path.parts[0]:
        raise BadInput(f"{archive} has a member '{name}' that leads out of its folder; nothing was unpacked")
    return path


def _copy(content: IO[bytes], target: Path, limit: int) -> int:
    """Bytes written, which are more than `limit` if there would be more to write."""
    size = 0
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        file = target.open("xb")
    with file:
        while size <= limit and (chunk := content.read(_CHUNK)):
            with _writing(target):
                size += file.write(chunk)
        with _writing(target):
            file.flush()
            os.fsync(file.fileno())  # the folder's new name must not outlive a power cut without its content
    return size
