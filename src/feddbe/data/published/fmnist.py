"""Fashion-MNIST: 70,000 grey images of 28x28 in ten classes, from the publisher's four IDX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from feddbe.data.dataset import Dataset
from feddbe.data.files.download import Progress, download
from feddbe.data.files.idx import read_idx
from feddbe.data.files.places import cache_folder, folders, missing
from feddbe.errors import BadInput

__all__ = ["find", "get", "load", "sums"]

URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
MD5 = {
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}
"""The four files (without .gz) and the publisher's sums of the gzipped ones."""
_LIMIT = 100_000_000
"""Bytes of an unpacked file, generously: 60,000 images of 28x28 are 47 MB."""
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


def _places(data_dir: Path | None) -> list[Path]:
    return [*folders("fmnist", data_dir), DEBIAN]


def _file(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.gz", folder / name)
    return next((path for path in candidates if path.is_file()), None)


def find(data_dir: Path | None) -> Path | None:
    """The first place that has all four files, gzipped or not."""
    return next((place for place in _places(data_dir) if all(_file(place, name) for name in MD5)), None)


def load(data_dir: Path | None) -> Dataset:
    """Train set then test set, in file order."""
    folder = find(data_dir)
    if folder is None:
        debian = f"install the Debian package dataset-fashion-mnist (it goes to {DEBIAN})"
        files = f"the four files ({', '.join(f'{name}.gz' for name in MD5)})"
        raise missing("Fashion-MNIST", "fmnist", data_dir, files, debian)
    parts = [_pair(folder, part) for part in ("train", "t10k")]
    y = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    published = (np.bincount(y, minlength=10) == 7000).all()
    return Dataset(
        name="fmnist",
        x=torch.from_numpy(np.concatenate([images for images, _ in parts])[:, np.newaxis]),
        y=torch.from_numpy(y),
        classes=10,
        scale=2 / 255,
        shift=-1.0,
        note="" if published else "not Fashion-MNIST as published, 7,000 of each class (MNIST's files?)",
    )


def _pair(folder: Path, part: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    paths = [_file(folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")]
    images, labels = (read_idx(path, _LIMIT) for path in paths if path)
    if images.shape[1:] != (28, 28) or labels.shape != images.shape[:1]:
        raise BadInput(
            f"{paths[0]} has shape {images.shape} and {paths[1]} {labels.shape}; "
            "expected (n, 28, 28) and (n,): fetch the four files again"
        )
    if labels.max(initial=0) > 9:
        raise BadInput(f"{paths[1]} has the label {labels.max()}, expected 0..9; fetch the four files again")
    return images, labels


def sums() -> dict[str, str | None]:
    """The publisher's files and their sums."""
    return {f"{name}.gz": f"md5:{md5}" for name, md5 in MD5.items()}


def get(data_dir: Path | None, progress: Progress | None = None, again: bool = False) -> Path:
    """Download the four files; what is already there and whole is kept."""
    folder = cache_folder("fmnist", data_dir)
    for name, md5 in MD5.items():
        download(f"{URL}{name}.gz", folder / f"{name}.gz", f"md5:{md5}", progress, again)
    return folder
