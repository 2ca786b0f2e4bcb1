"""MNIST: 70,000 grey digits of 28x28, from four IDX files.

Its publisher's own address no longer answers; the files are those of the mirror that torchvision downloads
from, with the checksums that have been known for them since.
"""

from __future__ import annotations

from pathlib import Path

from feddbe.data.dataset import Dataset
from feddbe.data.io.download import Progress, folders, missing
from feddbe.data.io.formats import find_in, get_files, read_set

__all__ = ["find", "get", "load", "sums"]

URL = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
"""The four files (without .gz) and the sums of the gzipped ones."""
COUNTS = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
"""Images of each digit, train and test."""


def find(data_dir: Path | None) -> Path | None:
    """The first place that has all four files, gzipped or not."""
    return find_in(folders("mnist", data_dir), MD5)


def load(data_dir: Path | None) -> Dataset:
    """Train set then test set, in file order."""
    folder = find(data_dir)
    if folder is None:
        files = f"the four files ({', '.join(f'{name}.gz' for name in MD5)})"
        raise missing("MNIST", "mnist", data_dir, files)
    other = "not MNIST as published, by the number of each digit (Fashion-MNIST's files?)"
    return read_set(folder, "mnist", COUNTS, other, tuple("0123456789"))


def sums() -> dict[str, str | None]:
    """The files and their sums."""
    return {f"{name}.gz": f"md5:{md5}" for name, md5 in MD5.items()}


def get(data_dir: Path | None, progress: Progress | None = None, again: bool = False) -> Path:
    """Download the four files; what is already there and whole is kept."""
    return get_files("mnist", URL, MD5, data_dir, progress, again)
