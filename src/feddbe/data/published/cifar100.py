"""CIFAR-100: 60,000 colour images of 32x32 in a hundred classes, from either of the publisher's archives.

The binary and the python version hold the same images in the same order; an archive need not be unpacked.
Labels are the fine ones. Decoded once into a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from feddbe.data.dataset import Dataset
from feddbe.data.files import safe_pickle
from feddbe.data.files.archives import DAMAGE, damaged, members
from feddbe.data.files.cache import New, cached
from feddbe.data.files.download import Progress, download
from feddbe.data.files.images import images_of
from feddbe.data.files.places import cache_folder, find_first, missing
from feddbe.errors import BadInput

__all__ = ["find", "get", "load", "sums"]

URL = "https://www.cs.toronto.edu/~kriz/"
ARCHIVE = "cifar-100-binary.tar.gz"
MD5 = "03b5dce01913d631647c71ecec9e9cb8"
SIZES = {"train": 50_000, "test": 10_000}
_LIMIT = 500_000_000
"""Bytes of an unpacked archive, generously."""
"""Images in each part, in the order in which they are joined."""

Images = tuple[npt.NDArray[np.uint8], npt.NDArray[Any]]
"""(n, 3072) pixels, red plane first, and (n,) fine labels."""


def find(data_dir: Path | None) -> Path | None:
    """The first folder or archive of either version."""
    # the python version has files called train and test, as many a folder has: look for its own name only
    place = find_first(
        "cifar100",
        data_dir,
        [
            "cifar-100-binary/test.bin",
            "test.bin",
            ARCHIVE,
            "cifar-100-python/test",
            "cifar-100-python.tar.gz",
        ],
    )
    return place.parent if place and place.name in ("test.bin", "test") else place


def load(data_dir: Path | None) -> Dataset:
    """Train set then test set, in file order."""
    place = find(data_dir)
    if place is None:
        raise missing("CIFAR-100", "cifar100", data_dir, f"{ARCHIVE} or cifar-100-python.tar.gz")
    sources = [place] if place.is_file() else [_file(place, part) for part in SIZES]
    found = cached("cifar100", data_dir, "images", sources, lambda new: _decode(place, new))
    return images_of(found, "cifar100", 100)


def sums() -> dict[str, str | None]:
    """The publisher's file and its sum."""
    return {ARCHIVE: f"md5:{MD5}"}


def get(data_dir: Path | None, progress: Progress | None = None, again: bool = False) -> Path:
    """Download the binary archive, 161 MB."""
    target = cache_folder("cifar100", data_dir) / ARCHIVE
    download(f"{URL}{ARCHIVE}", target, f"md5:{MD5}", progress, again)
    return target


def _file(folder: Path, part: str) -> Path:
    path = next((path for path in (folder / f"{part}.bin", folder / part) if path.is_file()), None)
    if path is None:
        raise BadInput(f"{folder} has no file for the {part} set; fetch the archive again")
    return path


def _decode(place: Path, new: New) -> None:
    total = sum(SIZES.values())
    x, y = new("x", (total, 3, 32, 32), np.uint8), new("y", (total,), np.int64)
    found = set()
    try:
        for name, stream in _files(place):
            images, labels = _binary(stream, name) if name.endswith(".bin") else _python(stream, name)
            part = _part(name)
            _check(part, images, labels, place)
            start = 0 if part == "train" else SIZES["train"]
            rows = slice(start, start + SIZES[part])
            x[rows], y[rows] = images.reshape(-1, 3, 32, 32), labels
            found.add(part)
    except DAMAGE as error:
        raise damaged(place, error) from None
    if found != set(SIZES):
        raise BadInput(f"{place} has no {' and no '.join(set(SIZES) - found)} set; fetch it again")


def _part(name: str) -> str:
    return name.rpartition("/")[2].removesuffix(".bin")


def _files(place: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The train and the test file with their names, in the order of the archive: it is read only once."""
    if place.is_dir():
        for part in SIZES:
            path = _file(place, part)
            with path.open("rb") as file:
                yield str(path), file
        return
    for name, content in members(place, _LIMIT):
        if _part(name) in SIZES:
            yield f"{place}:{name}", content


def _binary(stream: IO[bytes], name: str) -> Images:
    expected = 3074 * SIZES[_part(name)]
    content = np.frombuffer(stream.read(expected + 1), np.uint8)  # no more: the archive may lie
    if content.size != expected:
        found = "more" if content.size > expected else f"only {content.size}"
        raise BadInput(f"{name} has {found} bytes, expected {expected}; fetch the archive again")
    rows = content.reshape(-1, 3074)  # coarse label, fine label, pixels
    return rows[:, 2:], rows[:, 1]


def _python(stream: IO[bytes], name: str) -> Images:
    values = safe_pickle.load(stream, encoding="bytes")
    if not isinstance(values, dict) or not {b"data", b"fine_labels"} <= set(values):
        raise BadInput(f"{name} has no data and fine_labels; fetch the archive again")
    return np.asarray(values[b"data"]), np.asarray(values[b"fine_labels"])


def _check(part: str, images: npt.NDArray[np.uint8], labels: npt.NDArray[Any], place: Path) -> None:
    n = SIZES[part]
    if [images.shape, images.dtype.name, labels.shape] != [(n, 3072), "uint8", (n,)]:
        raise BadInput(
            f"the {part} set in {place} has pixels {images.dtype}{images.shape} and labels {labels.shape}, "
            f"expected uint8({n}, 3072) and ({n},); fetch it again"
        )
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() > 99:
        raise BadInput(f"the {part} set in {place} has labels outside of 0..99; fetch it again")
