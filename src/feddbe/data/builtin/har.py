"""UCI HAR: 10,299 windows of 128 steps of 9 signals from the waists of 30 people, in six activities.

The raw inertial signals, without normalisation; a person is a client. The publisher's archive or folder is
read as it is (an archive need not be unpacked), once, into a cache.

The published code lays a window out wrongly: it transposes (9, 128) to (128, 9) and then *reshapes* that to
(9, 1, 128), so that each channel is a mixture of signals. `scrambled` does the same, for comparison.
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
from feddbe.data.cache import NewArray, load_cached
from feddbe.data.dataset import Arrangement, Dataset
from feddbe.data.files import (
    DAMAGE,
    Publisher,
    damaged_file_error,
    find_first_folder,
    iterate_members,
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
LABELS = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
WINDOWS = 10_299
_LIMIT = 500_000_000
"""Bytes of an unpacked archive, generously: there are 283 MB."""
_FILE = 30_000_000
"""Bytes of one of its tables: there are up to 15 MB."""

Array = npt.NDArray[Any]
Table = dict[str, Array]


def _names(part: str) -> list[str]:
    """The files of one part below the data set's folder: labels, persons, then the signals in order."""
    signals = [f"{part}/Inertial Signals/{signal}_{part}.txt" for signal in SIGNALS]
    return [f"{part}/y_{part}.txt", f"{part}/subject_{part}.txt", *signals]


NAMES = [name for part in PARTS for name in _names(part)]


def find(data_dir: Path | None) -> Path | None:
    """The first folder or archive."""
    mark = NAMES[0]
    place = find_first_folder("har", data_dir, [f"{FOLDER}/{mark}", mark, *ARCHIVES])
    return place.parent.parent if place and place.name == Path(mark).name else place


def load(data_dir: Path | None) -> Dataset:
    """Train set then test set, in file order; x is (n, 9, 1, 128)."""
    place = find(data_dir)
    if place is None:
        raise missing_data_error("UCI HAR", "har", data_dir, f"{ARCHIVES[0]} (or the folder in it)")
    sources = [place] if place.is_file() else [path for name in NAMES if (path := place / name).is_file()]
    found = load_cached("har", data_dir, "inertial", sources, lambda new: _decode(place, new))
    return Dataset(
        name="har",
        x=torch.from_numpy(found.arrays["x"]),
        y=torch.from_numpy(found.arrays["y"]),
        classes=CLASSES,
        client=found.arrays["client"],
        label_names=LABELS,
        known_sha256=found.sha256,
    )


def scramble(dataset: Dataset) -> Dataset:
    """As published: entry (c, t) is signal (128 c + t) mod 9 at time (128 c + t) div 9."""
    x = dataset.x.transpose(1, 3).reshape(dataset.x.shape)
    known = {name: sha256 for name, sha256 in dataset.known_sha256.items() if name != "x"}
    return replace(dataset, x=x, known_sha256=known)


@dataclass(frozen=True)
class Layout(Arrangement):
    """How a window lies in its array."""

    name: ClassVar[str] = "har"

    layout: str = parameter(
        "channels", "windows: one signal per channel, or as published", choices=("channels", "scrambled")
    )

    def arrange(self, dataset: Dataset) -> Dataset:
        return scramble(dataset) if self.layout == "scrambled" else dataset


def _decode(place: Path, new: NewArray) -> None:
    tables: Table = {}
    try:
        for name, text in _files(place):
            if name in tables:
                raise InvalidInputError(f"{place} has '{name}' twice; fetch it again")
            tables[name] = _numbers(name, text, place)
    except DAMAGE as error:
        raise damaged_file_error(place, error) from None
    if lacking := [name for name in NAMES if name not in tables]:
        raise InvalidInputError(f"{place} has no '{lacking[0]}'; fetch it again")
    sizes = [len(tables[f"{part}/y_{part}.txt"]) for part in PARTS]
    x = new("x", (sum(sizes), len(SIGNALS), 1, STEPS), np.float32)
    y, client = (new(name, (sum(sizes),), np.int64) for name in ("y", "client"))
    end = 0
    for part, size in zip(PARTS, sizes, strict=True):
        rows, end = slice(end, end + size), end + size
        labels, persons, *signals = _names(part)
        y[rows] = _column(tables, labels, size, place)
        client[rows] = _column(tables, persons, size, place)
        for channel, name in enumerate(signals):
            if tables[name].shape != (size, STEPS):
                raise InvalidInputError(
                    f"'{name}' in {place} has a table of {tables[name].shape}, expected {(size, STEPS)}; "
                    "fetch it again"
                )
            x[rows, channel, 0] = tables.pop(name)
    if y.max() > CLASSES - 1:
        raise InvalidInputError(f"{place} has the label {y.max() + 1}, expected 1..{CLASSES}; fetch it again")
    client[:] = np.unique(client, return_inverse=True)[1]


def _files(place: Path) -> Iterator[tuple[str, bytes]]:
    """The files that are needed, by name, in the order of the archive: it is read only once."""
    if place.is_dir():
        yield from ((name, _start(path)) for name in NAMES if (path := place / name).is_file())
        return
    for path_in, content in iterate_members(place, _LIMIT):
        name = path_in.rpartition(f"{FOLDER}/")[2]
        if name in NAMES:
            yield name, content.read(_FILE + 1)


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_FILE + 1)


def _numbers(name: str, text: bytes, place: Path) -> Array:
    lines = text.count(b"\n")
    if len(text) > _FILE or lines > WINDOWS:
        raise InvalidInputError(
            f"'{name}' in {place} has {lines} lines or more, {len(text)} bytes; expected are up to {WINDOWS} "
            f"lines in {_FILE} bytes; fetch it again"
        )
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):  # an empty file
            table: Array = np.loadtxt(BytesIO(text), dtype=np.float32, ndmin=2)
    except (ValueError, UserWarning) as error:
        raise InvalidInputError(
            f"'{name}' in {place} is not a table of numbers: {error}; fetch it again"
        ) from None
    if table.size > WINDOWS * STEPS:
        raise InvalidInputError(f"'{name}' in {place} has a table of {table.shape}; fetch it again")
    if not np.isfinite(table).all():
        raise InvalidInputError(f"'{name}' in {place} has values that are not finite; fetch it again")
    return table


def _column(tables: Table, name: str, size: int, place: Path) -> Array:
    """Whole numbers from 1 on, as indices from 0 on."""
    values = tables[name]
    if values.shape != (size, 1) or (values < 1).any() or (values != values.round()).any():
        raise InvalidInputError(
            f"'{name}' in {place} has shape {values.shape} or values that are not 1, 2, ...; "
            f"expected one number for each of {size} windows; fetch it again"
        )
    return values[:, 0].astype(np.int64) - 1
