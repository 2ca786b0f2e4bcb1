"""Decoded arrays on disk: .npy files with checksums, in a folder that is renamed when it is complete.

A cache is the folder `ROOT/NAME/KEY.cache` with one .npy file per array. Its `header.json` has the version
of the source files and the SHA-256 of each array. If the sources have changed, or an array does not match
the header, the cache is rebuilt. Arrays are mapped copy-on-write: torch uses them without a copy, and all
processes on the machine share them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock

from feddbe.data.files import cache_folders

Array = npt.NDArray[Any]
NewArray = Callable[[str, tuple[int, ...], npt.DTypeLike], Array]
"""new(name, shape, dtype) returns an array of zeros to fill."""

_log = logging.getLogger("feddbe")
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
        loaded = _load(folder, version)
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
            return _save(folder, built, version)
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


def _save(folder: Path, built: CachedArrays, version: str) -> CachedArrays:
    """Write a cache and load it, unless another process has written it meanwhile."""
    temporary = folder.with_name(f".{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        loaded = _load(folder, version)
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
                name: _describe(values, built.sha256[name]) for name, values in built.arrays.items()
            }
            header = {"sources": version, "arrays": descriptions}
            (temporary / _HEADER).write_text(json.dumps(header, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        loaded = _load(folder, version)
    if loaded is None:
        raise OSError("the files changed while they were written")
    return loaded


def _load(folder: Path, version: str) -> CachedArrays | None:
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
            if _describe(arrays[name], sha256[name]) != description:
                raise ValueError("the array is not the one that was written")
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):  # a damaged file may contain anything
        _log.warning("feddbe: %s is damaged: its checksums do not match; it is rebuilt", folder)
        return None
    return CachedArrays(arrays, sha256)


def _describe(values: Array, sha256: str) -> dict[str, Any]:
    return {"shape": [*values.shape], "dtype": values.dtype.str, "sha256": sha256}
