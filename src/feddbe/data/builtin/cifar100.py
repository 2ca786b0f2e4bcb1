"""CIFAR-100: 60,000 colour images of 32x32 in a hundred classes, from either of the publisher's archives.

Labels are the fine ones. Decoded once into a cache.
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
ARCHIVE = "cifar-100-binary.tar.gz"
MD5 = "03b5dce01913d631647c71ecec9e9cb8"
SIZES = {"train": 50_000, "test": 10_000}
"""Images in each part, in the order in which they are joined."""


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
    form = Form(SIZES, 2, b"fine_labels", 100)  # coarse label, fine label, pixels
    sources = [place] if place.is_file() else [file_of(place, part) for part in SIZES]
    found = cached("cifar100", data_dir, "images", sources, lambda new: decode(place, form, new))
    return images_of(found, "cifar100", 100)


def sums() -> dict[str, str | None]:
    """The publisher's file and its sum."""
    return {ARCHIVE: f"md5:{MD5}"}


def get(data_dir: Path | None, progress: Progress | None = None, again: bool = False) -> Path:
    """Download the binary archive, 161 MB."""
    target = cache_folder("cifar100", data_dir) / ARCHIVE
    download(f"{URL}{ARCHIVE}", target, f"md5:{MD5}", progress, again)
    return target
