"""Decoded arrays on disk: built once, mapped into memory from then on, whole or not at all.

A cache is a folder `ROOT/NAME/KEY.cache` with one .npy file per array, and `header.json` with the SHA-256 of
the sources and of each array. It is written under a temporary name and renamed when it is whole. One process
writes at a time; the second takes what the first has written. A cache that was made of other sources, or
whose bytes are not those of the header, is built again. The file `sources` remembers which files had the
header's content, so that unchanged sources are not read again at each start.

Arrays are mapped copy-on-write: torch takes them without a copy, and all processes on the machine share them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from feddbe.data.io.download import cache_folders

Array = npt.NDArray[Any]
New = Callable[[str, tuple[int, ...], npt.DTypeLike], Array]
"""new(name, shape, dtype): an array of zeros to fill."""

_log = logging.getLogger("feddbe")
_VERSION = 3
_HEADER = "header.json"
_SOURCES = "sources"


@dataclass(frozen=True)
class Cached:
    """The arrays, and the SHA-256 of each one's values, computed when they were built."""

    arrays: dict[str, Array]
    sha256: dict[str, str]


def cached(
    name: str, data_dir: Path | None, key: str, sources: Sequence[Path], build: Callable[[New], None]
) -> Cached:
    """Load the arrays that `build` makes of `sources`, from the cache if there is a good one.

    Where no folder can be written, the arrays stay in memory, and a warning says so once.

    Args:
        name: The data set.
        data_dir: The first folder to look in and to write to.
        key: What is made of the data set: choose another one when `build` changes.
        sources: Files, or folders of files, whose content tells whether the cache is still theirs.
        build: Gets the function `new` and fills the arrays that it returns:

            def build(new):
                new("x", (60000, 3, 32, 32), np.uint8)[:] = decode(...)

    Returns:
        The arrays by name.
    """
    origin = _Origin(sources)
    folders = [folder / f"{key}.cache" for folder in cache_folders(name, data_dir)]
    for folder in folders:
        if loaded := _load(folder, origin):
            return loaded
    arrays: dict[str, Array] = {}

    def new(array: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        arrays[array] = np.zeros(shape, dtype)
        return arrays[array]

    build(new)
    built = Cached(
        arrays, {array: hashlib.sha256(values.data).hexdigest() for array, values in arrays.items()}
    )
    problem = "there is none"
    for folder in folders:
        try:
            return _save(folder, built, origin)
        except OSError as error:
            problem = f"{folder.parent}: {error.strerror or error}"
    _warn_once(f"{name}: no place for a cache ({problem}); the data is decoded into memory at each start")
    return built


_warnings: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warnings:
        _warnings.add(text)
        _log.warning("feddbe: %s", text)


def _save(folder: Path, built: Cached, origin: _Origin) -> Cached:
    """Write a cache and load it; or load that of another process, which was faster."""
    temporary = folder.with_name(f".{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if loaded := _load(folder, origin):
            return loaded
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        try:
            temporary.mkdir()
            for array, values in built.arrays.items():
                with (temporary / f"{array}.npy").open("wb") as file:
                    header = np.lib.format.header_data_from_array_1_0(values)
                    np.lib.format.write_array_header_1_0(file, header)
                    file.write(values.data)  # unlike numpy's own writing, it says why it failed
            (temporary / _HEADER).write_text(json.dumps(_describe(built, origin.sha256), indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        loaded = _load(folder, origin)
    if loaded is None:
        raise OSError("the files changed while they were written")
    return loaded


def _load(folder: Path, origin: _Origin) -> Cached | None:
    """Map the cache in this folder, if it is whole and made of these sources."""
    try:
        header = json.loads((folder / _HEADER).read_text())
        if header["version"] != _VERSION or not _is_made_from(folder, header["sources"], origin):
            return None
        arrays: dict[str, Any] = {}
        sha256 = {}
        for array in header["arrays"]:
            path = folder / f"{array}.npy"
            arrays[array] = np.load(path, mmap_mode="c", allow_pickle=False)
            with path.open("rb") as file:  # not the map: its pages would count as ours
                file.seek(arrays[array].offset)
                sha256[array] = hashlib.file_digest(file, "sha256").hexdigest()
        found = Cached(arrays, sha256)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # anything may be in a foreign file
        return None
    if _describe(found, header["sources"]) != header:
        _log.warning("feddbe: %s is damaged, its bytes are not those it was made with", folder)
        return None
    return found


def _describe(cache: Cached, sources_sha256: list[list[str]]) -> dict[str, Any]:
    """What `header.json` says of a cache."""
    return {
        "version": _VERSION,
        "sources": sources_sha256,
        "arrays": {
            array: {"shape": [*values.shape], "dtype": values.dtype.str, "sha256": cache.sha256[array]}
            for array, values in cache.arrays.items()
        },
    }


def _is_made_from(folder: Path, sha256: list[list[str]], origin: _Origin) -> bool:
    """Compare the sources' content; of sources that did not change since the last time, only the stamp."""
    remembered = folder / _SOURCES
    if remembered.exists() and remembered.read_text() == origin.stamp:
        return True
    if origin.sha256 != sha256:
        return False
    with suppress(OSError):  # in a folder that cannot be written the sources are read each time
        remembered.write_text(origin.stamp)
    return True


class _Origin:
    """Files, or folders of files, that arrays are made from."""

    def __init__(self, sources: Sequence[Path]) -> None:
        self.sources = sources
        self.stamp = _stamp(sources)
        """Changes whenever a file does: the time of a change cannot be set, unlike that of writing."""

    @cached_property
    def sha256(self) -> list[list[str]]:
        """Name of each source, and SHA-256 of its content; reads all of them."""
        return [[source.name, _hash_source(source)] for source in self.sources]


def _stamp(sources: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in (file for source in sources for file in _files(source)):
        stat = path.stat()
        parts = path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_dev, stat.st_ino
        digest.update(repr(parts).encode())
    return digest.hexdigest()


def _hash_source(source: Path) -> str:
    """SHA-256 of the names and contents of a source's files."""
    digest = hashlib.sha256()
    for path in _files(source):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _files(source: Path) -> list[Path]:
    return sorted(path for path in source.iterdir() if path.is_file()) if source.is_dir() else [source]
