"""The MNIST family: four IDX files of 28x28 grey images in ten classes, under the same names in each set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from feddbe.data.dataset import Dataset
from feddbe.data.files.download import Progress, download
from feddbe.data.files.idx import read_idx
from feddbe.data.files.places import cache_folder
from feddbe.errors import BadInput

__all__ = ["find_in", "get_files", "read_set"]

_LIMIT = 100_000_000
"""Bytes of an unpacked file, generously: 60,000 images of 28x28 are 47 MB."""


def _file(folder: Path, name: str) -> Path | None:
    candidates = (folder / f"{name}.gz", folder / name)
    return next((path for path in candidates if path.is_file()), None)


def find_in(places: Iterable[Path], names: Iterable[str]) -> Path | None:
    """The first place that has all four files, gzipped or not."""
    return next((place for place in places if all(_file(place, name) for name in names)), None)


def read_set(
    folder: Path, name: str, counts: Sequence[int], other: str, label_names: tuple[str, ...]
) -> Dataset:
    """Train set then test set, in file order. `counts`: the images of each class as published, and `other`
    what to say of files that have others."""
    parts = [_pair(folder, part) for part in ("train", "t10k")]
    y = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    published = np.array_equal(np.bincount(y, minlength=10), counts)
    return Dataset(
        name=name,
        x=torch.from_numpy(np.concatenate([images for images, _ in parts])[:, np.newaxis]),
        y=torch.from_numpy(y),
        classes=10,
        scale=2 / 255,
        shift=-1.0,
        note="" if published else other,
        label_names=label_names,
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


def get_files(
    name: str, url: str, md5: dict[str, str], data_dir: Path | None, progress: Progress | None, again: bool
) -> Path:
    """Download the four files; what is already there and whole is kept."""
    folder = cache_folder(name, data_dir)
    for file, checksum in md5.items():
        download(f"{url}{file}.gz", folder / f"{file}.gz", f"md5:{checksum}", progress, again)
    return folder
