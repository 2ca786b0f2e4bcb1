"""Publishers' files: data folders, downloads, checksums, archives, and a cache of decoded arrays.

A download gets its name only when it is complete and has the published checksum. Archives are never unpacked,
so nothing can be written outside of its folder. Archives with links, devices or wrong sizes are rejected.

A cache is the folder `ROOT/NAME/KEY.cache` with one .npy file per array, renamed when it is complete. Its
`header.json` has the version of the source files and the SHA-256 of each array. If the sources have changed,
or an array does not match the header, the cache is rebuilt. Arrays are mapped copy-on-write: torch uses them
without a copy, and all processes on the machine share them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from http.client import IncompleteRead
from lzma import LZMAError
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self, cast
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

from feddbe.data import rows
from feddbe.errors import DataMissingError, InvalidInputError, one_line
from feddbe.paths import expand_path

if TYPE_CHECKING:
    from requests import RequestException


# --- data folders


def _data_roots(data_dir: Path | None) -> list[Path]:
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "feddbe"
    roots = (data_dir, os.environ.get("FEDDBE_DATA"), cache_home)
    return [expand_path(root) for root in roots if root]


def search_folders(name: str, data_dir: Path | None) -> list[Path]:
    """Return the folders to search for a data set, in order: each data folder, then its subfolder `name`."""
    return [folder for root in _data_roots(data_dir) for folder in (root, root / name)]


def cache_folders(name: str, data_dir: Path | None) -> list[Path]:
    """Return the folders to which a data set's files can be written, in the order in which to try them."""
    return [root / name for root in _data_roots(data_dir)]


def find_first_path(name: str, data_dir: Path | None, candidates: Sequence[str]) -> Path | None:
    """Return the first of these files or folders that exists in one of the data set's folders, or None."""
    for folder in search_folders(name, data_dir):
        for candidate in candidates:
            path = folder / candidate
            if path.is_file() or path.is_dir():
                return path
    return None


def missing_data_error(
    title: str, name: str, data_dir: Path | None, files: str, *hints: str
) -> DataMissingError:
    """Return the error for a data set that is not on this machine.

    Args:
        title: Full name of the data set.
        name: Name of the data set in feddbe.
        data_dir: The user's data folder.
        files: Description of the files to add.
        hints: Further ways to get the files.
    """
    folders = ", ".join(map(str, search_folders(name, data_dir)))
    target = cache_folders(name, data_dir)[0]
    remedies = [f"run 'feddbe data get {name}'", *hints, f"or put {files} into {target}"]
    return DataMissingError(f"{title} is in none of {folders}; {', '.join(remedies)}")


def require_regular_file(path: Path) -> None:
    """Raise an error if a path is neither file nor folder: a pipe blocks, and a device has no end."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise InvalidInputError(f"{path} is neither a file nor a folder; data is read from these only")


# --- downloads

Progress = Callable[[int, int | None], None]
"""Called with the received and, if the server sends it, the total number of bytes of a file."""

_log = logging.getLogger("feddbe")
_CHUNK = 1 << 18
_TIMEOUT_SECONDS = 30.0
_MAX_ATTEMPTS = 3
_PAUSE_SECONDS = 0.25


class Verification(IntEnum):
    """Result of comparing files with their checksums; for several files, the highest one counts."""

    VERIFIED = 0
    UNCHANGED = 1
    NO_CHECKSUM = 2
    OTHER_CHECKSUM = 3
    NOT_PUBLISHED = 4


VERIFICATION_TEXTS = {
    Verification.VERIFIED: "verified",
    Verification.UNCHANGED: "unchanged since it was downloaded",
    Verification.NO_CHECKSUM: "not verified: no checksum is published",
    Verification.OTHER_CHECKSUM: "not verified: its checksum is not the published one",
    Verification.NOT_PUBLISHED: "not verified: these are not the publisher's files",
}


def download(
    url: str,
    target: Path,
    checksum: str | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> None:
    """Download a file, which gets its name only when its length and checksum are correct.

    Its SHA-256 is stored next to it in `target.sha256`. Other processes wait for it and use the same file.

    Args:
        url: Address of the file.
        target: Path to write.
        checksum: Published checksum, "md5:HEX" or "sha256:HEX".
        progress: Called while bytes arrive.
        force: Download the file even if it exists and is intact.

    Raises:
        InvalidInputError: The file cannot be downloaded or written, or has another checksum.
    """
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target):
            if target.exists() and not force and _is_intact(target, checksum):
                return
            try:
                _fetch(url, target, part, progress)
                actual = _compute_checksum(part, checksum) if checksum else None
                if actual != checksum:
                    raise InvalidInputError(
                        f"{target.name} from {url} has the checksum {actual}, expected {checksum}; the "
                        "download was removed, try again later or fetch the file from elsewhere"
                    )
                digest = _compute_checksum(part, "sha256").removeprefix("sha256:")
                part.replace(target)
            finally:
                part.unlink(missing_ok=True)
            _checksum_path(target).write_text(f"{digest}  {target.name}\n")
        if checksum is None:
            _log.warning(
                "feddbe: %s is not verified, its publisher gives no checksum; its SHA-256 %s is stored in %s",
                target, digest, _checksum_path(target).name,
            )  # fmt: skip
    except OSError as error:
        raise InvalidInputError(
            f"cannot write {target}: {error.strerror or error}; choose another --data-dir"
        ) from None


@dataclass(frozen=True)
class Publisher:
    """Address and checksums of a data set's files."""

    url: str
    """Address of the folder with the files."""
    checksums: Mapping[str, str | None]
    """File names with "md5:HEX", "sha256:HEX", or None if no checksum is published."""

    def download(self, folder: Path, progress: Progress | None = None, force: bool = False) -> None:
        """Download the files into a folder; intact files are kept unless `force`."""
        for name, checksum in self.checksums.items():
            download(self.url + quote(name), folder / name, checksum, progress, force)


def verify(path: Path, checksum: str | None) -> Verification:
    """Compare a file with its published checksum and with the one stored when it was downloaded.

    Returns:
        The result. A file from another source may be packed differently, so another checksum is not an error.

    Raises:
        InvalidInputError: The file was downloaded, and does not have the published or the stored checksum.
    """
    try:
        stored_path = _checksum_path(path)
        stored = f"sha256:{stored_path.read_text().partition(' ')[0]}" if stored_path.exists() else None
        expected_checksums = [expected for expected in (checksum, stored) if expected]
        checks = [(_compute_checksum(path, expected), expected) for expected in expected_checksums]
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"cannot verify {path}: {one_line(error)}; fetch it again with --force"
        ) from None
    for actual, expected in checks:
        if actual != expected and stored:
            raise InvalidInputError(
                f"{path} is damaged: it has the checksum {actual}, expected {expected}; "
                "fetch it again with --force"
            )
        if actual != expected:
            return Verification.OTHER_CHECKSUM
    if checksum:
        return Verification.VERIFIED
    return Verification.UNCHANGED if stored else Verification.NO_CHECKSUM


@contextmanager
def _exclusive(target: Path) -> Iterator[None]:
    """Prevent other processes from downloading this file."""
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


def _checksum_path(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _is_intact(target: Path, checksum: str | None) -> bool:
    """Return True if a file has the published checksum or, if none is published, the stored one."""
    try:
        return verify(target, checksum) in (Verification.VERIFIED, Verification.UNCHANGED)
    except InvalidInputError:
        return False


def _compute_checksum(path: Path, algorithm: str) -> str:
    """Return a file's checksum as "md5:HEX" or "sha256:HEX"; a checksum after `algorithm` is ignored."""
    name = algorithm.partition(":")[0]
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.new(name, usedforsecurity=False))
    return f"{name}:{digest.hexdigest()}"


def _fetch(url: str, target: Path, part: Path, progress: Progress | None) -> None:
    """Download to `part`; temporary failures are retried."""
    import requests
    from pooch import HTTPDownloader

    headers = {"User-Agent": "feddbe", "Accept-Encoding": "identity"}  # archives must arrive packed
    for attempt in range(1, _MAX_ATTEMPTS + 1):
        download_file = HTTPDownloader(
            progressbar=_PoochProgress(progress),
            chunk_size=_CHUNK,
            timeout=_TIMEOUT_SECONDS,
            headers=headers,
        )
        try:
            download_file(url, str(part), None)
            return
        except requests.RequestException as error:
            response = error.response
            if response is not None:
                response.close()  # pooch leaves it open
            if attempt == _MAX_ATTEMPTS or (response is not None and response.status_code < 500):
                raise InvalidInputError(
                    f"cannot fetch {url} ({_describe_failure(error)}); try again later, or fetch "
                    f"{target.name} from there by other means and put it at {target}"
                ) from None
        time.sleep(_PAUSE_SECONDS * attempt)


def _describe_failure(error: RequestException) -> str:
    """Return a short reason for a failed request: requests wraps the cause several times."""
    if error.response is not None:
        return f"the server answers {error.response.status_code} {error.response.reason}"
    cause: BaseException = error
    while cause.__context__:
        cause = cause.__context__
    if isinstance(cause, IncompleteRead):
        received = cast(int, cause.partial)  # urllib3 sets the number of bytes, not the bytes
        total = received + (cause.expected or 0)
        return f"the connection ended after {received} of {total} bytes"
    return one_line(cause)


class _PoochProgress:
    """Progress bar with pooch's interface that calls `progress` when bytes arrive."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.total = 0
        self.done = 0

    def update(self, size: int) -> None:
        """Count a chunk; the last one may be smaller than `size`."""
        done = min(self.done + size, self.total) if self.total else self.done + size
        if self.progress and done > self.done:
            self.progress(done, self.total or None)
        self.done = done

    def reset(self) -> None:
        """Do nothing: pooch resets the bar only to fill it, which `update` has done."""

    def close(self) -> None:
        """Do nothing: no resource is open."""


# --- archives

_MAX_MEMBERS = 10_000
_MAX_NAME_BYTES = 1 << 16
"""Limit of a long name in a tar archive, which is read before its size can be counted."""

READ_ERRORS = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    LZMAError,
    EOFError,
    OSError,
    NotImplementedError,  # a zip's unknown compression
    RuntimeError,  # a zip with a password
)
"""Errors raised when a damaged archive is read."""


def damaged_file_error(archive: Path, error: BaseException) -> InvalidInputError:
    """Return the error for an archive that cannot be read."""
    reason = str(error).partition("\n")[0].rstrip(":") or type(error).__name__
    return InvalidInputError(f"cannot read {archive}: {reason}; fetch it again")


def iterate_members(archive: Path, limit: int) -> Iterator[tuple[str, IO[bytes]]]:
    """Iterate over name and content of each file in an archive.

    A member is read only up to the size in its header, so these sizes can be counted.

    Args:
        archive: A zip or tar file.
        limit: Maximum number of unpacked bytes of all files together.

    Raises:
        InvalidInputError: The archive is larger, has too many members, or links or devices.
    """
    remaining = limit
    members = _iterate_zip(archive) if zipfile.is_zipfile(archive) else _iterate_tar(archive)
    for name, size, content in members:
        remaining -= size
        if remaining < 0:
            raise InvalidInputError(
                f"{archive} unpacks to more than the {limit} bytes that were expected; fetch it again"
            )
        yield name, content


def check_zip(archive: zipfile.ZipFile, path: Path) -> None:
    """Raise an error if a user's zip would unpack to more than 256 MB and a hundred times its size."""
    try:
        rows.check_unpacked_size(archive, path)
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
    with tarfile.open(archive, tarinfo=_CheckedTarInfo) as tar:
        for number, member in enumerate(tar):
            if number == _MAX_MEMBERS:
                raise InvalidInputError(f"{archive} has more than {_MAX_MEMBERS} entries; fetch it again")
            if member.isdir():
                continue
            content = tar.extractfile(member) if member.isfile() else None
            if content is None:
                raise InvalidInputError(
                    f"{archive} has a link or device, '{member.name}'; only plain files are read"
                )
            yield member.name, member.size, content


class _CheckedTarInfo(tarfile.TarInfo):
    """Header of a member; headers that hold a long name or attributes of the next member must be small."""

    @classmethod
    def frombuf(cls, *args: Any, **kwargs: Any) -> Self:
        info = super().frombuf(*args, **kwargs)
        if info.size > _MAX_NAME_BYTES and not (info.isfile() or info.isdir()):
            raise tarfile.TarError(f"a name or attributes of {info.size} bytes")
        return info


# --- cache of decoded arrays

Array = npt.NDArray[Any]
NewArray = Callable[[str, tuple[int, ...], npt.DTypeLike], Array]
"""new(name, shape, dtype) returns an array of zeros to fill."""

_HEADER = "header.json"


@dataclass(frozen=True)
class CachedArrays:
    """Arrays by name, and the SHA-256 of the values of each."""

    arrays: dict[str, Array]
    sha256: dict[str, str]


def load_cached(
    name: str, data_dir: Path | None, key: str, sources: Sequence[Path], build: Callable[[NewArray], None]
) -> CachedArrays:
    """Load the arrays that `build` decodes from `sources`, from an intact cache if possible.

    If no folder is writable, the arrays stay in memory, and a warning is logged once.

    Args:
        name: Name of the data set.
        data_dir: First folder to search and to write to.
        key: Name of the cache; must change if `build` changes.
        sources: Files, or folders of files; the cache is rebuilt when one of them changes.
        build: Fills the arrays that its argument, the function `new`, returns:

            def build(new):
                new("x", (60000, 3, 32, 32), np.uint8)[:] = decode(...)
    """
    version = _source_version(sources)
    folders = [folder / f"{key}.cache" for folder in cache_folders(name, data_dir)]
    for folder in folders:
        loaded = _read_cache(folder, version)
        if loaded:
            return loaded
    arrays: dict[str, Array] = {}

    def new(array_name: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        arrays[array_name] = np.zeros(shape, dtype)
        return arrays[array_name]

    build(new)
    sha256 = {key: hashlib.sha256(values.data).hexdigest() for key, values in arrays.items()}
    built = CachedArrays(arrays, sha256)
    reason = ""
    for folder in folders:
        try:
            return _write_cache(folder, built, version)
        except OSError as error:
            reason = f"{folder.parent}: {error.strerror or error}"
    _warn_once(f"{name}: no folder for a cache ({reason}); the data is decoded into memory at each start")
    return built


@cache
def _warn_once(message: str) -> None:
    _log.warning("feddbe: %s", message)


def _source_version(sources: Sequence[Path]) -> str:
    """Return a hash of the sources' names, sizes and times; ctime changes whenever the content does."""
    digest = hashlib.sha256()
    for source in sources:
        for path in sorted(source.iterdir()) if source.is_dir() else [source]:
            stat = path.stat()
            digest.update(repr((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)).encode())
    return digest.hexdigest()


def _write_cache(folder: Path, built: CachedArrays, version: str) -> CachedArrays:
    """Write a cache and load it, unless another process has written it meanwhile."""
    temporary = folder.with_name(f".{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        loaded = _read_cache(folder, version)
        if loaded:
            return loaded
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
        try:
            temporary.mkdir()
            for name, values in built.arrays.items():
                with (temporary / f"{name}.npy").open("wb") as file:
                    npy_header = np.lib.format.header_data_from_array_1_0(values)
                    np.lib.format.write_array_header_1_0(file, npy_header)
                    file.write(values.data)  # unlike numpy's own function, it reports why it failed
            descriptions = {
                name: _describe_array(values, built.sha256[name]) for name, values in built.arrays.items()
            }
            header = {"sources": version, "arrays": descriptions}
            (temporary / _HEADER).write_text(json.dumps(header, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        loaded = _read_cache(folder, version)
    if loaded is None:
        raise OSError("the files changed while they were written")
    return loaded


def _read_cache(folder: Path, version: str) -> CachedArrays | None:
    """Map the arrays in this folder; return None if they are damaged or of another version of the sources."""
    try:
        header = json.loads((folder / _HEADER).read_text())
        if header["sources"] != version:
            return None
        arrays: dict[str, Any] = {}
        sha256: dict[str, str] = {}
        for name, description in header["arrays"].items():
            path = folder / f"{name}.npy"
            arrays[name] = np.load(path, mmap_mode="c", allow_pickle=False)
            with path.open("rb") as file:  # not the map: its pages would count as this process's memory
                file.seek(arrays[name].offset)
                sha256[name] = hashlib.file_digest(file, "sha256").hexdigest()
            if _describe_array(arrays[name], sha256[name]) != description:
                raise ValueError("the array is not the one that was written")
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):  # a damaged file may contain anything
        _log.warning("feddbe: %s is damaged: its checksums do not match; it is rebuilt", folder)
        return None
    return CachedArrays(arrays, sha256)


def _describe_array(values: Array, sha256: str) -> dict[str, Any]:
    return {"shape": [*values.shape], "dtype": values.dtype.str, "sha256": sha256}
