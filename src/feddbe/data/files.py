"""Publishers' files: where they are stored, downloads, checksums, and archives read member by member.

A download gets its name only when it is complete and has the published checksum. Archives are never unpacked,
so nothing can be written outside of its folder; links, devices and unexpected sizes refuse the archive.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from http.client import IncompleteRead
from lzma import LZMAError
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote

from filelock import FileLock, Timeout

from feddbe.data import rows
from feddbe.errors import DataMissingError, InvalidInputError, one_line
from feddbe.paths import expand_path

if TYPE_CHECKING:
    from requests import RequestException


# --- where files are


def _roots(data_dir: Path | None) -> list[Path]:
    named = [place for place in (data_dir, os.environ.get("FEDDBE_DATA")) if place]
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "feddbe"
    return [expand_path(root) for root in (*named, home)]


def search_folders(name: str, data_dir: Path | None) -> list[Path]:
    """Return where a data set's files are searched, in order: each data folder, then its subfolder `name`."""
    return [folder for root in _roots(data_dir) for folder in (root, root / name)]


def cache_folders(name: str, data_dir: Path | None) -> list[Path]:
    """Return where a data set's files can be written, in the order in which to try."""
    return [root / name for root in _roots(data_dir)]


def find_first_folder(name: str, data_dir: Path | None, candidates: Sequence[str]) -> Path | None:
    """Return the first of these files or folders that is in one of the data set's folders."""
    places = [folder / candidate for folder in search_folders(name, data_dir) for candidate in candidates]
    return next((place for place in places if place.is_file() or place.is_dir()), None)


def missing_data_error(
    title: str, name: str, data_dir: Path | None, files: str, *also: str
) -> DataMissingError:
    """Return the error for a data set that is nowhere: where it was searched, and what to put where."""
    looked = ", ".join(map(str, search_folders(name, data_dir)))
    ways = [f"run 'feddbe data get {name}'", *also, f"or put {files} into {cache_folders(name, data_dir)[0]}"]
    return DataMissingError(f"{title} is in none of {looked}; {', '.join(ways)}")


def require_regular_file(path: Path) -> None:
    """Refuse what is neither file nor folder: opening a pipe waits for ever, a device has no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InvalidInputError(f"{path} is neither a file nor a folder; data is read from these only")


# --- downloads

Progress = Callable[[int, int | None], None]
"""Called with the bytes of this file that are here and, if the server says so, the bytes in all."""

_log = logging.getLogger("feddbe")
_CHUNK = 1 << 18
_TIMEOUT = 30.0
_TRIES = 3
_PAUSE = 0.25


class Verification(IntEnum):
    """How far files are known to be what was published; of several files the highest counts."""

    VERIFIED = 0
    UNCHANGED = 1
    NO_CHECKSUM = 2
    OTHER_CHECKSUM = 3
    NOT_PUBLISHED = 4


VERIFICATION_TEXTS = {
    Verification.VERIFIED: "verified",
    Verification.UNCHANGED: "unchanged since it was downloaded",
    Verification.NO_CHECKSUM: "not verified: there is no checksum",
    Verification.OTHER_CHECKSUM: "not verified: its checksum is not the published one",
    Verification.NOT_PUBLISHED: "not verified: these are not the publisher's files",
}


def download(
    url: str,
    target: Path,
    checksum: str | None = None,
    progress: Progress | None = None,
    again: bool = False,
) -> None:
    """Fetch a file, which gets its name only when its length and checksum are right.

    Its SHA-256 is stored next to it in `target.sha256`. One process at a time: the second waits, and finds
    the file there.

    Args:
        url: The address of the file.
        target: The path to write.
        checksum: The published one, "md5:HEX" or "sha256:HEX".
        progress: Called while bytes arrive.
        again: Fetch also what is there and right.

    Raises:
        BadInput: If it cannot be fetched or written, or has another checksum.
    """
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target):
            if target.exists() and not again and _is_intact(target, checksum):
                return
            try:
                _fetch(url, target, part, progress)
                if checksum and (actual := _checksum(part, checksum)) != checksum:
                    raise InvalidInputError(
                        f"{target.name} from {url} has the checksum {actual}, expected {checksum}; the "
                        "download was removed, try again later or fetch the file from elsewhere"
                    )
                digest = _checksum(part, "sha256").removeprefix("sha256:")
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
            _record_path(target).write_text(f"{digest}  {target.name}\n")
        if checksum is None:
            _log.warning(
                "feddbe: %s is not verified, its publisher gives no checksum; its SHA-256 %s is kept in %s",
                target, digest, _record_path(target).name,
            )  # fmt: skip
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {target}: {error.strerror or error}; choose another --data-dir"
        ) from None


@dataclass(frozen=True)
class Publisher:
    """The address of a data set's files, and their checksums."""

    url: str
    """The address of the folder with the files."""
    checksums: Mapping[str, str | None]
    """File names with "md5:HEX", "sha256:HEX", or None if no checksum is published."""

    def download(self, folder: Path, progress: Progress | None = None, again: bool = False) -> None:
        """Download the files into a folder; what is already there and whole is kept, unless `again`."""
        for name, checksum in self.checksums.items():
            download(self.url + quote(name), folder / name, checksum, progress, again)


def verify(path: Path, checksum: str | None) -> Verification:
    """Compare a file with its published checksum and with the one that was kept when it was downloaded.

    Returns:
        How far it is verified. A file from elsewhere, perhaps packed differently, is not damaged.

    Raises:
        BadInput: If it was downloaded and is not what was published, or has changed since.
    """
    try:
        record = _record_path(path)
        known = f"sha256:{record.read_text().partition(' ')[0]}" if record.exists() else None
        checks = [(_checksum(path, expected), expected) for expected in (checksum, known) if expected]
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"cannot verify {path}: {one_line(error)}; fetch it anew with --force"
        ) from None
    for actual, expected in checks:
        if actual != expected and known:
            raise InvalidInputError(
                f"{path} is damaged: it has the checksum {actual}, expected {expected}; "
                "fetch it anew with --force"
            )
        if actual != expected:
            return Verification.OTHER_CHECKSUM
    if checksum:
        return Verification.VERIFIED
    return Verification.UNCHANGED if known else Verification.NO_CHECKSUM


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Let no other process download this file meanwhile."""
    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.warning("feddbe: another process downloads %s; waiting for it", target)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _record_path(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _is_intact(target: Path, checksum: str | None) -> bool:
    """Return whether a file has the published checksum or, if none is published, the recorded one."""
    try:
        return verify(target, checksum) in (Verification.VERIFIED, Verification.UNCHANGED)
    except InvalidInputError:
        return False


def _checksum(path: Path, algorithm: str) -> str:
    """Return the file's checksum as "md5:HEX" or "sha256:HEX"; `algorithm` may be followed by a checksum."""
    name = algorithm.partition(":")[0]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(name, usedforsecurity=False))
    return f"{name}:{digest.hexdigest()}"


def _fetch(url: str, target: Path, part: Path, progress: Progress | None) -> None:
    """Download to `part`, trying again where that may help."""
    import requests
    from pooch import HTTPDownloader

    headers = {"User-Agent": "feddbe", "Accept-Encoding": "identity"}  # archives must arrive packed
    for attempt in range(1, _TRIES + 1):
        bar = _Bar(progress)
        fetch = HTTPDownloader(progressbar=bar, chunk_size=_CHUNK, timeout=_TIMEOUT, headers=headers)
        try:
            fetch(url, str(part), None)
            return
        except requests.RequestException as error:
            answer = error.response
            if answer is not None:
                answer.close()  # pooch leaves it open
            if attempt == _TRIES or (answer is not None and answer.status_code < 500):
                raise InvalidInputError(
                    f"cannot fetch {url} ({_reason(error)}); try again later, or fetch {target.name} from "
                    f"there by other means and put it at {target}"
                ) from None
        time.sleep(_PAUSE * attempt)


def _reason(error: RequestException) -> str:
    """Say in short why a request failed: requests wraps the cause several times."""
    if error.response is not None:
        return f"the server answers {error.response.status_code} {error.response.reason}"
    cause: BaseException = error
    while cause.__context__:
        cause = cause.__context__
    if isinstance(cause, IncompleteRead):
        received = cast(int, cause.partial)  # of urllib3's: a number of bytes, not the bytes
        total = received + (cause.expected or 0)
        return f"the connection ended after {received} of {total} bytes"
    return one_line(cause)


class _Bar:
    """A progress bar as pooch expects it, which calls `progress` whenever there are more bytes."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.total = 0
        self.done = 0

    def update(self, size: int) -> None:
        """Count a chunk; the last one is smaller than it says."""
        done = min(self.done + size, self.total) if self.total else self.done + size
        if self.progress and done > self.done:
            self.progress(done, self.total or None)
        self.done = done

    def reset(self) -> None:
        """Pooch begins anew only to reach `total`, which `update` has done."""

    def close(self) -> None:
        """There is nothing to close."""


# --- archives

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


def damaged_file_error(archive: Path, error: BaseException) -> InvalidInputError:
    """Return the error for an archive that cannot be read."""
    reason = str(error).partition("\n")[0].rstrip(":") or type(error).__name__
    return InvalidInputError(f"cannot read {archive}: {reason}; fetch it again")


def iterate_members(archive: Path, limit: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Iterate over name and content of each file in the archive, which together may have `limit` bytes.

    A member's content ends where its entry says, so the sizes there are those that count.
    """
    left = limit
    for name, size, content in (
        _iterate_zip(archive) if zipfile.is_zipfile(archive) else _iterate_tar(archive)
    ):
        left -= size
        if left < 0:
            raise InvalidInputError(
                f"{archive} unpacks to more than the {limit} bytes that were expected; fetch it again"
            )
        yield name, content


def check_zip(archive: zipfile.ZipFile, path: Path) -> None:
    """Refuse a user's zip that would unpack to more than 256 MB and than a hundred times what it holds."""
    try:
        rows.check_unpacked(archive, path)
    except ValueError as error:
        raise InvalidInputError(str(error)) from None


def _iterate_zip(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            if (info.external_attr >> 16) & 0o170000 == 0o120000:
                raise InvalidInputError(f"{archive} has a link, '{info.filename}'; only plain files are read")
            if not info.is_dir():
                with opened.open(info) as content:
                    yield info.filename, info.file_size, content


def _iterate_tar(archive: Path) -> Iterator[tuple[str, int, IO[bytes]]]:
    with tarfile.open(archive, tarinfo=_Info) as tar:
        for number, member in enumerate(tar):
            if number == _MEMBERS:
                raise InvalidInputError(f"{archive} has more than {_MEMBERS} entries; fetch it again")
            if member.isdir():
                continue
            found = tar.extractfile(member) if member.isfile() else None
            if found is None:
                raise InvalidInputError(
                    f"{archive} has a link or device, '{member.name}'; only plain files are read"
                )
            yield member.name, member.size, found


class _Info(tarfile.TarInfo):
    """An entry; those that hold a name or attributes of the next one must be small."""

    @classmethod
    def frombuf(cls, *given: Any, **more: Any) -> Self:
        entry = super().frombuf(*given, **more)
        if entry.size > _NAME and not (entry.isfile() or entry.isdir()):
            raise tarfile.TarError(f"a name or attributes of {entry.size} bytes")
        return entry
