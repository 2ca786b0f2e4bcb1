"""Decoded arrays on disk: .npy files with checksums in a folder that is renamed when it is complete.

A cache is the folder `ROOT/NAME/KEY.cache` with one .npy file per array, and `header.json` with the version
of the source files and the SHA-256 of each array. If the sources have changed since, or an array is not the
one of the header, the cache is built again. Arrays are mapped copy-on-write: torch uses them without a copy,
and all processes on the machine share them.
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
"""new(name, shape, dtype): an array of zeros to fill."""

_log = logging.getLogger("feddbe")
_HEADER = "header.json"


@dataclass(frozen=True)
class CachedArrays:
    """The arrays, and the SHA-256 of each one's values."""

    arrays: dict[str, Array]
    sha256: dict[str, str]


def load_cached(
    name: str, data_dir: Path | None, key: str, sources: Sequence[Path], build: Callable[[NewArray], None]
) -> CachedArrays:
    """Load the arrays that `build` makes of `sources`, from the cache if there is an intact one.

    If no folder can be written, the arrays stay in memory, and a warning says so once.

    Args:
        name: The data set.
        data_dir: The first folder to look in and to write to.
        key: Name of the cache: choose another one when `build` changes.
        sources: Files, or folders of files; the cache is built again when one of them changes.
        build: Gets the function `new` and fills the arrays that it returns:

            def build(new):
                new("x", (60000, 3, 32, 32), np.uint8)[:] = decode(...)

    Returns:
        The arrays by name.
    """
    version = _source_version(sources)
    folders = [folder / f"{key}.cache" for folder in cache_folders(name, data_dir)]
    for folder in folders:
        if loaded := _load(folder, version):
            return loaded
    arrays: dict[str, Array] = {}

    def new(array: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        arrays[array] = np.zeros(shape, dtype)
        return arrays[array]

    build(new)
    sha256 = {array: hashlib.sha256(values.data).hexdigest() for array, values in arrays.items()}
    built = CachedArrays(arrays, sha256)
    problem = ""
    for folder in folders:
        try:
            return _save(folder, built, version)
        except OSError as error:
            problem = f"{folder.parent}: {error.strerror or error}"
    _warn_once(f"{name}: no place for a cache ({problem}); the data is decoded into memory at each start")
    return built


@cache
def _warn_once(text: str) -> None:
    _log.warning("feddbe: %s", text)


def _source_version(sources: Sequence[Path]) -> str:
    """Return a hash of the sources' names, sizes and times; ctime changes whenever a file's content does."""
    digest = hashlib.sha256()
    for source in sources:
        for path in sorted(source.iterdir()) if source.is_dir() else [source]:
            stat = path.stat()
            digest.update(repr((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)).encode())
    return digest.hexdigest()


def _save(folder: Path, built: CachedArrays, version: str) -> CachedArrays:
    """Write a cache and load it; or load that of another process, which was faster."""
    temporary = folder.with_name(f".{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if loaded := _load(folder, version):
            return loaded
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        try:
            temporary.mkdir()
            for array, values in built.arrays.items():
                with (temporary / f"{array}.npy").open("wb") as file:
                    header = np.lib.format.header_data_from_array_1_0(values)
                    np.lib.format.write_array_header_1_0(file, header)
                    file.write(values.data)  # unlike numpy's own writing, it says why it failed
            described = {
                array: _describe(values, built.sha256[array]) for array, values in built.arrays.items()
            }
            (temporary / _HEADER).write_text(json.dumps({"sources": version, "arrays": described}, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        loaded = _load(folder, version)
    if loaded is None:
        raise OSError("the files changed while they were written")
    return loaded


def _load(folder: Path, version: str) -> CachedArrays | None:
    """Map the arrays in this folder, if they are intact and made of this version of the sources."""
    try:
        header = json.loads((folder / _HEADER).read_text())
        if header["sources"] != version:
            return None
        arrays: dict[str, Any] = {}
        sha256: dict[str, str] = {}
        for array, described in header["arrays"].items():
            path = folder / f"{array}.npy"
            arrays[array] = np.load(path, mmap_mode="c", allow_pickle=False)
            with path.open("rb") as file:  # not the map: its pages would count as ours
                file.seek(arrays[array].offset)
                sha256[array] = hashlib.file_digest(file, "sha256").hexdigest()
            if _describe(arrays[array], sha256[array]) != described:
                raise ValueError("the array is not the one that was written")
    except OSError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):  # anything may be in a damaged file
        _log.warning("feddbe: %s is damaged, its bytes are not those it was made with", folder)
        return None
    return CachedArrays(arrays, sha256)


def _describe(values: Array, sha256: str) -> dict[str, Any]:
    return {"shape": [*values.shape], "dtype": values.dtype.str, "sha256": sha256}
