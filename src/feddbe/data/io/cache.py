"""Decoded arrays on disk: made once, mapped into memory ever after, whole or not at all.

A cache is a folder `ROOT/NAME/KEY.cache` with one .npy file per array and `header.json`, which says what the
arrays were made from (names and SHA-256 of sources) and what they are. It is built under a temporary name,
brought to the disk, and renamed when it is whole. A header that does not fit (another source, another format,
a file that was cut or changed) makes the cache worth nothing: it is built again. Two processes that build the
same one work in folders of their own; the first to rename wins, the other takes what is there. The file
`sources` remembers which files had the header's content, so that they are not read again at each start.

The bytes are compared with the header's SHA-256 when a cache is opened, as bytes can rot on the disk
while a file keeps its time: small arrays, as labels are, each time, large ones (a second for Tiny-ImageNet's
1.23 GB) once after each start of the machine, which the file `verified` remembers.

Arrays are mapped copy-on-write: torch takes them without a copy, pages that were read belong to the system's
file cache, and all processes on the machine share them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from feddbe.data.io.download import cache_folders

__all__ = ["Cached", "New", "Origin", "cached"]

Array = npt.NDArray[Any]
New = Callable[[str, tuple[int, ...], npt.DTypeLike], Array]
"""new(name, shape, dtype): an array of zeros to fill, in a file if there is a place for one."""

_log = logging.getLogger("feddbe")
_VERSION = 2
_HEADER = "header.json"
_VERIFIED = "verified"
_SOURCES = "sources"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_CHUNK = 1 << 22
_SMALL = 1 << 24
"""Bytes of an array that is hashed each time it is opened: ten milliseconds."""
_LEFT_BEHIND = 24 * 3600.0
"""Seconds after which a temporary folder must be that of a process which was killed."""


@dataclass(frozen=True)
class Cached:
    """The arrays, and the SHA-256 of each one's bytes, taken when they were made."""

    arrays: dict[str, Array]
    sha256: dict[str, str]


def cached(
    name: str, data_dir: Path | None, key: str, sources: Sequence[Path], build: Callable[[New], None]
) -> Cached:
    """The arrays that `build` makes of `sources`, from the cache if there is a good one.

    `name` is the data set's, `key` says what is made of it: give another one when `build` changes. `sources`
    are the files, or folders of files, whose content tells whether the cache is still theirs. `build` gets
    the function `new` and fills the arrays that it returns:

        def build(new):
            new("x", (60000, 3, 32, 32), np.uint8)[:] = decode(...)

    Where no place can be written, the arrays are made in memory, and a warning says so once.
    """
    origin = Origin(sources)
    places = [folder / f"{key}.cache" for folder in cache_folders(name, data_dir)]
    for place in places:
        if found := _open(place, origin):
            return found
    problem = "there is none"
    for place in places:
        try:
            temporary = _temporary(place)
        except OSError as error:
            problem = f"{place.parent}: {error.strerror or error}"
            continue
        try:
            return _build(place, temporary, origin, build)
        except _CannotWrite as error:
            problem = f"{place.parent}: {error}"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    _say_once(f"{name}: no place for a cache ({problem}); the data is decoded into memory at each start")
    arrays: dict[str, Array] = {}

    def new(array: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        arrays[array] = np.zeros(shape, dtype)
        return arrays[array]

    build(new)
    return Cached(arrays, {array: _sha256(values) for array, values in arrays.items()})


class _CannotWrite(Exception):
    """The place has no room, or refuses; what `build` itself raises is not this."""


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning("feddbe: %s", text)


def _temporary(place: Path) -> Path:
    """A new folder beside `place`; those that killed processes left behind are removed."""
    place.parent.mkdir(parents=True, exist_ok=True)
    for old in place.parent.glob(f".{place.name}.*"):
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _LEFT_BEHIND:
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))


def _build(place: Path, temporary: Path, origin: Origin, build: Callable[[New], None]) -> Cached:
    arrays: dict[str, np.memmap[Any, Any]] = {}

    def new(array: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        try:
            _reserve(temporary / f"{array}.npy", shape, np.dtype(dtype))
            arrays[array] = np.load(temporary / f"{array}.npy", mmap_mode="r+")
        except OSError as error:
            raise _CannotWrite(error.strerror or str(error)) from None
        return arrays[array]

    build(new)
    sha256 = {array: _sha256(values) for array, values in arrays.items()}
    try:
        for values in arrays.values():
            values.flush()
        header: dict[str, Any] = {"version": _VERSION, "origin": origin.content, "arrays": {}}
        for array, values in arrays.items():
            path = temporary / f"{array}.npy"
            _sync(path)
            stat = path.stat()
            header["arrays"][array] = {
                "shape": values.shape,
                "dtype": values.dtype.str,
                "bytes": stat.st_size,
                "time": stat.st_mtime_ns,
                "sha256": sha256[array],
            }
        (temporary / _HEADER).write_text(json.dumps(header, indent=1) + "\n")
        _sync(temporary / _HEADER)
        _sync(temporary)
        found = _open(temporary, origin)  # before it gets its name: then nobody can take it away
        if found is None:
            raise OSError("the files changed while they were written")
        if not _rename(temporary, place, origin):
            found = _open(place, origin) or found
    except OSError as error:
        raise _CannotWrite(error.strerror or str(error)) from None
    return found


def _reserve(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """A file of zeros, written in full: on a full disk a hole in it would kill the process later (SIGBUS)."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    zeros, left = bytes(_CHUNK), int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        while left > 0:
            left -= file.write(zeros[:left])


def _rename(temporary: Path, place: Path, origin: Origin) -> bool:
    """Give the cache its name; False if another process has put a good one there first."""
    while True:
        try:
            temporary.rename(place)
        except OSError:
            if not place.is_dir():  # a file, or the file system refuses
                raise
            if _open(place, origin):
                return False
            aside = Path(tempfile.mkdtemp(prefix=temporary.name, dir=place.parent))
            with suppress(FileNotFoundError):  # another process was faster
                place.rename(aside / "stale")
            shutil.rmtree(aside, ignore_errors=True)
        else:
            _sync(place.parent)
            return True


def _open(place: Path, origin: Origin) -> Cached | None:
    """The cache at this place, if it is whole and made of the same sources."""
    try:
        header = json.loads((place / _HEADER).read_text())
        if header["version"] != _VERSION or not _is_made_from(place, header["origin"], origin):
            return None
        arrays = {}
        for array, about in header["arrays"].items():
            path = place / f"{array}.npy"
            stat = path.stat()
            if [stat.st_size, stat.st_mtime_ns] != [about["bytes"], about["time"]]:
                return None
            arrays[array] = np.load(path, mmap_mode="c", allow_pickle=False)
            if [list(arrays[array].shape), arrays[array].dtype.str] != [about["shape"], about["dtype"]]:
                return None
        if not _verified(
            place, arrays, {array: about["sha256"] for array, about in header["arrays"].items()}
        ):
            _log.warning("feddbe: %s is damaged, its bytes are not those it was made with", place)
            return None
        return Cached(arrays, {array: about["sha256"] for array, about in header["arrays"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # anything may be in a foreign file
        return None


def _is_made_from(place: Path, content: Any, origin: Origin) -> bool:
    """Whether the sources have this content; those that are as they were then are not read again."""
    mark = place / _SOURCES
    if mark.exists() and mark.read_text() == origin.stamp:
        return True
    if origin.content != content:
        return False
    with suppress(OSError):  # a place that cannot be written has its sources read each time
        mark.write_text(origin.stamp)
    return True


def _verified(place: Path, arrays: dict[str, Any], sha256: dict[str, str]) -> bool:
    """Whether the bytes are those of the header; large arrays are believed until the next start."""
    mark = place / _VERIFIED
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    known = bool(boot) and mark.exists() and mark.read_text() == boot
    for array, values in arrays.items():
        if known and values.nbytes > _SMALL:
            continue
        with (place / f"{array}.npy").open("rb") as file:  # not the map: its pages would count as ours
            file.seek(values.offset)
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256[array]:
                return False
    if boot and not known:
        with suppress(OSError):  # a place that cannot be written is verified each time
            mark.write_text(boot)
    return True


def _sha256(values: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()


def _sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Origin:
    """Files, or folders of files, that something was made from."""

    def __init__(self, sources: Sequence[Path]) -> None:
        self.sources = sources
        self.stamp = _stamp(sources)
        """Changes whenever a file does: the time of a change cannot be set, as that of writing can."""

    @cached_property
    def content(self) -> list[list[str]]:
        """Name of each source and SHA-256 of its bytes; reads all of them."""
        return [[source.name, _origin_sha256(source)] for source in self.sources]


def _stamp(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in (file for source in sources for file in _files(source)):
        stat = path.stat()
        parts = path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_dev, stat.st_ino
        digest.update(repr(parts).encode())
    return digest.hexdigest()


def _origin_sha256(source: Path) -> str:
    """Return the hash of a file, or of the names and hashes of a folder's files."""
    digest = hashlib.sha256()
    for path in _files(source):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.is_file()) if source.is_dir() else [source]
