"""CIFAR-10: 60,000 colour images of 32x32 in ten classes, from either of the publisher's archives.

Decoded once into a cache.
"""

from __future__ import annotations

from pathlib import Path

from feddbe.data.dataset import Dataset
from feddbe.data.io.cache import cached
from feddbe.data.io.download import Progress, cache_folder, download, find_first, missing
from feddbe.data.io.formats import Form, decode, file_of
from feddbe.data.io.images import images_of

__all__ = ["find", "get", "load", "sums"]

URL = "https://www.cs.toronto.edu/~kriz/"
ARCHIVE = "cifar-10-binary.tar.gz"
MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
SIZES = {**{f"data_batch_{k}": 10_000 for k in range(1, 6)}, "test_batch": 10_000}
"""Images in each part, in the order in which they are joined."""
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def find(data_dir: Path | None) -> Path | None:
    """The first folder or archive of either version."""
    place = find_first(
        "cifar10",
        data_dir,
        [
            "cifar-10-batches-bin/test_batch.bin",
            "test_batch.bin",
            ARCHIVE,
            "cifar-10-batches-py/test_batch",
            "test_batch",
            "cifar-10-python.tar.gz",
        ],
    )
    return place.parent if place and place.name in ("test_batch.bin", "test_batch") else place


def load(data_dir: Path | None) -> Dataset:
    """The five training batches, then the test set, in file order."""
    place = find(data_dir)
    if place is None:
        raise missing("CIFAR-10", "cifar10", data_dir, f"{ARCHIVE} or cifar-10-python.tar.gz")
    form = Form(SIZES, 1, b"labels", 10)
    sources = [place] if place.is_file() else [file_of(place, part) for part in SIZES]
    found = cached("cifar10", data_dir, "images", sources, lambda new: decode(place, form, new))
    return images_of(found, "cifar10", 10, CLASSES)


def sums() -> dict[str, str | None]:
    """The publisher's file and its sum."""
    return {ARCHIVE: f"md5:{MD5}"}


def get(data_dir: Path | None, progress: Progress | None = None, again: bool = False) -> Path:
    """Download the binary archive, 162 MB."""
    target = cache_folder("cifar10", data_dir) / ARCHIVE
    download(f"{URL}{ARCHIVE}", target, f"md5:{MD5}", progress, again)
    return target
