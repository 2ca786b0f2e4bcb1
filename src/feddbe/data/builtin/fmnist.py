"""Fashion-MNIST: 70,000 grey images of 28x28 in ten classes, from the publisher's four IDX files."""

from __future__ import annotations

from pathlib import Path

from feddbe.data.dataset import Dataset
from feddbe.data.io.download import Progress, folders, missing
from feddbe.data.io.formats import find_in, get_files, read_set

__all__ = ["find", "get", "load", "sums"]

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
"""The four files (without .gz) and the publisher's sums of the gzipped ones."""
CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def find(data_dir: Path | None) -> Path | None:
    """The first place that has all four files, gzipped or not."""
    return find_in([*folders("fmnist", data_dir), DEBIAN], MD5)


def load(data_dir: Path | None) -> Dataset:
    """Train set then test set, in file order."""
    folder = find(data_dir)
    if folder is None:
        debian = f"install the Debian package dataset-fashion-mnist (it goes to {DEBIAN})"
        files = f"the four files ({', '.join(f'{name}.gz' for name in MD5)})"
        raise missing("Fashion-MNIST", "fmnist", data_dir, files, debian)
    other = "not Fashion-MNIST as published, 7,000 of each class (MNIST's files?)"
    return read_set(folder, "fmnist", [7000] * 10, other, CLASSES)


def sums() -> dict[str, str | None]:
    """The publisher's files and their sums."""
    return {f"{name}.gz": f"md5:{md5}" for name, md5 in MD5.items()}


def get(data_dir: Path | None, progress: Progress | None = None, again: bool = False) -> Path:
    """Download the four files; what is already there and whole is kept."""
    return get_files("fmnist", URL, MD5, data_dir, progress, again)
