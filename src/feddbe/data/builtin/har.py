"""UCI HAR: 10,299 windows of 128 steps of 9 signals from the waists of 30 people, in six activities.

The inputs are the raw inertial signals, without normalization; a person is a client. The publisher's archive
(packed) or folder is decoded once into a cache.

The published code transposes a window (9, 128) to (128, 9) and then *reshapes* it to (9, 1, 128). Each
channel is then a mixture of signals. The layout `scrambled` reproduces this error for comparison.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from feddbe.config.parameters import parameter
from feddbe.data.dataset import Dataset, DatasetOptions
from feddbe.data.files import (
    READ_ERRORS,
    NewArray,
    Publisher,
    damaged_file_error,
    find_first_path,
    iterate_members,
    load_cached,
    missing_data_error,
)
from feddbe.errors import InvalidInputError

FOLDER = "UCI HAR Dataset"
ARCHIVES = (f"{FOLDER}.zip", f"{FOLDER}.tar.xz", "uci-har-inertial.tar.xz")
publisher = Publisher(  # 61 MB; no checksum is published
    "https://archive.ics.uci.edu/ml/machine-learning-databases/00240/", {ARCHIVES[0]: None}
)
PARTS = ("train", "test")
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
STEPS, CLASSES = 128, 6
LABEL_NAMES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
WINDOWS = 10_299
_MAX_UNPACKED_BYTES = 500_000_000
"""Limit of the unpacked archive; the publisher's has 283 MB."""
_MAX_FILE_BYTES = 30_000_000
"""Limit of one of its tables; the publisher's have up to 15 MB."""

Array = npt.NDArray[Any]
Tables = dict[str, Array]


def _part_files(part: str) -> list[str]:
    """Return the files of one part in the data set's folder: labels, persons, then the signals in order."""
    signals = [f"{part}/Inertial Signals/{signal}_{part}.txt" for signal in SIGNALS]
    return [f"{part}/y_{part}.txt", f"{part}/subject_{part}.txt", *signals]


FILES = [name for part in PARTS for name in _part_files(part)]


def find(data_dir: Path | None) -> Path | None:
    """Return the first folder or archive with the data set, or None."""
    first_file = FILES[0]
    path = find_first_path("har", data_dir, [f"{FOLDER}/{first_file}", first_file, *ARCHIVES])
    if path and path.name == Path(first_file).name:
        return path.parent.parent
    return path


def load(data_dir: Path | None) -> Dataset:
    """Return the training set, then the test set, in file order; x is (n, 9, 1, 128)."""
    path = find(data_dir)
    if path is None:
        raise missing_data_error("UCI HAR", "har", data_dir, f"{ARCHIVES[0]} (or the folder in it)")
    sources = [path] if path.is_file() else [path / name for name in FILES if (path / name).is_file()]
    cached = load_cached("har", data_dir, "inertial", sources, lambda new: _decode(path, new))
    return Dataset(
        name="har",
        x=torch.from_numpy(cached.arrays["x"]),
        y=torch.from_numpy(cached.arrays["y"]),
        classes=CLASSES,
        client=cached.arrays["client"],
        label_names=LABEL_NAMES,
        known_sha256=cached.sha256,
    )


def scramble(dataset: Dataset) -> Dataset:
    """Return the published layout: value (c, t) is signal (128 c + t) mod 9 at time (128 c + t) div 9."""
    x = dataset.x.transpose(1, 3).reshape(dataset.x.shape)
    known = {name: sha256 for name, sha256 in dataset.known_sha256.items() if name != "x"}
    return replace(dataset, x=x, known_sha256=known)


@dataclass(frozen=True)
class Options(DatasetOptions):
    """Options of UCI HAR: the layout of a window."""

    name: ClassVar[str] = "har"

    layout: str = parameter(
        "channels", "windows: one signal per channel, or as published", choices=("channels", "scrambled")
    )

    def apply(self, dataset: Dataset) -> Dataset:
        return scramble(dataset) if self.layout == "scrambled" else dataset


def _decode(path: Path, new: NewArray) -> None:
    """Fill `x`, `y` and `client` from a folder or an archive."""
    tables: Tables = {}
    try:
        for name, text in _read_files(path):
            if name in tables:
                raise InvalidInputError(f"{path} has '{name}' twice; fetch it again")
            tables[name] = _parse_table(name, text, path)
    except READ_ERRORS as error:
        raise damaged_file_error(path, error) from None
    missing = [name for name in FILES if name not in tables]
    if missing:
        raise InvalidInputError(f"{path} has no '{missing[0]}'; fetch it again")
    sizes = [len(tables[f"{part}/y_{part}.txt"]) for part in PARTS]
    x = new("x", (sum(sizes), len(SIGNALS), 1, STEPS), np.float32)
    y = new("y", (sum(sizes),), np.int64)
    client = new("client", (sum(sizes),), np.int64)
    start = 0
    for part, size in zip(PARTS, sizes, strict=True):
        rows = slice(start, start + size)
        start += size
        labels, persons, *signals = _part_files(part)
        y[rows] = _read_numbers(tables, labels, size, path)
        client[rows] = _read_numbers(tables, persons, size, path)
        for channel, name in enumerate(signals):
            if tables[name].shape != (size, STEPS):
                raise InvalidInputError(
                    f"'{name}' in {path} has a table of {tables[name].shape}, expected {(size, STEPS)}; "
                    "fetch it again"
                )
            x[rows, channel, 0] = tables.pop(name)
    if y.max() > CLASSES - 1:
        raise InvalidInputError(f"{path} has the label {y.max() + 1}, expected 1..{CLASSES}; fetch it again")
    client[:] = np.unique(client, return_inverse=True)[1]


def _read_files(path: Path) -> Iterator[tuple[str, bytes]]:
    """Iterate over the required files by name, in the order of the archive, which is read only once."""
    if path.is_dir():
        for name in FILES:
            if (path / name).is_file():
                with (path / name).open("rb") as file:
                    yield name, file.read(_MAX_FILE_BYTES + 1)
        return
    for member, content in iterate_members(path, _MAX_UNPACKED_BYTES):
        name = member.rpartition(f"{FOLDER}/")[2]
        if name in FILES:
            yield name, content.read(_MAX_FILE_BYTES + 1)


def _parse_table(name: str, text: bytes, path: Path) -> Array:
    lines = text.count(b"\n")
    if len(text) > _MAX_FILE_BYTES or lines > WINDOWS:
        raise InvalidInputError(
            f"'{name}' in {path} has {lines} lines or more, {len(text)} bytes; expected are up to {WINDOWS} "
            f"lines in {_MAX_FILE_BYTES} bytes; fetch it again"
        )
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):  # an empty file
            table: Array = np.loadtxt(BytesIO(text), dtype=np.float32, ndmin=2)
    except (ValueError, UserWarning) as error:
        raise InvalidInputError(
            f"'{name}' in {path} is not a table of numbers: {error}; fetch it again"
        ) from None
    if table.size > WINDOWS * STEPS:
        raise InvalidInputError(f"'{name}' in {path} has a table of {table.shape}; fetch it again")
    if not np.isfinite(table).all():
        raise InvalidInputError(f"'{name}' in {path} has values that are not finite; fetch it again")
    return table


def _read_numbers(tables: Tables, name: str, size: int, path: Path) -> Array:
    """Return a file's whole numbers, which start at 1, as numbers from 0."""
    values = tables[name]
    if values.shape != (size, 1) or (values < 1).any() or (values != values.round()).any():
        raise InvalidInputError(
            f"'{name}' in {path} has shape {values.shape} or values that are not 1, 2, ...; "
            f"expected one number for each of {size} windows; fetch it again"
        )
    return values[:, 0].astype(np.int64) - 1
