"""A user's table: a label column, perhaps a client column, and columns of numbers, text or images.

Numbers are standardised, each column by its mean and deviation over all rows: with columns of very different
size (age, income) plain SGD gets nowhere. Who wants another scale gives an .npz, which is taken as it is.
Text columns are joined in their order and become the numbers of their words.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from feddbe.data.dataset import Dataset
from feddbe.data.files.images import decode
from feddbe.data.own.arrays import Array, clients_of, made
from feddbe.data.text import tokenize
from feddbe.errors import BadInput, one_line, short, unknown

__all__ = ["Choice", "Table", "as_dataset", "chosen", "label_column", "load_csv"]

LABELS = ("label", "y")
_WHOLE = re.compile("0|[1-9][0-9]*")


@dataclass(frozen=True)
class Choice:
    """Which columns to take; those that are not named are found by their usual names."""

    label: str = ""
    client: str = ""
    x: tuple[str, ...] = ()
    config: str = ""
    """One of several data sets under one name on the hub."""


def chosen(query: str) -> Choice:
    """From `label=target&client=user&x=age,income`; `%26` and `%2C` stand for & and , in names."""
    values: dict[str, Any] = {}
    for item in filter(None, query.split("&")):
        key, _, value = item.partition("=")
        if key not in Choice.__dataclass_fields__:
            raise unknown("word after '?'", key, Choice.__dataclass_fields__)
        names = tuple(map(unquote, value.split(",")))
        values[key] = names if key == "x" else unquote(value)
    return Choice(**values)


@dataclass(frozen=True)
class Table:
    """Named columns of equal length, read when they are asked for."""

    where: str
    names: Sequence[str]
    read: Callable[[str], Array]
    """A column as numbers, or as objects: all str, or all bytes, which are image files."""


def as_dataset(table: Table, choice: Choice, name: str) -> Dataset:
    """Label, client and samples out of the columns of a table."""
    label = label_column(table, choice)
    client = choice.client or ("client" if "client" in table.names else "")
    others = [column for column in table.names if column not in (label, client)]
    known = {*table.names}
    for column in (*filter(None, [client]), *choice.x):
        if column not in known:
            raise _no_column(table, column)
    y, classes = _labels(table.read(label), f"column '{short(label)}' of {table.where}")
    who = None
    if client:
        who = clients_of(_ids(table.read(client)), len(y), f"column '{short(client)}' of {table.where}")
    columns = choice.x or tuple(others)
    if not columns:
        both = f"'{short(label)}' and '{short(client)}'" if client else f"'{short(label)}'"
        raise BadInput(f"{table.where} has no column beside {both}")
    x, tokens = _samples({column: table.read(column) for column in columns}, table)
    return made(name, x, y, classes, who, tokens=tokens)


def label_column(table: Table, choice: Choice) -> str:
    """The column that holds the labels."""
    for column in [choice.label] if choice.label else LABELS:
        if column in table.names:
            return column
    raise _no_column(table, choice.label or "label")


def _no_column(table: Table, column: str) -> BadInput:
    return BadInput(
        f"{table.where} has no column '{short(column)}'; it has: {short(', '.join(table.names))}; "
        "name yours as in 'FILE?label=target&client=user&x=age,income'"
    )


def _labels(values: Array, what: str) -> tuple[npt.NDArray[np.int64], int]:
    """Whatever the labels are, numbered from 0 in sorted order."""
    numbers = _numbers(values)
    if numbers is not None:
        broken = numbers[~(np.isfinite(numbers) & (numbers == np.trunc(numbers)))]
        if broken.size:
            raise BadInput(f"{what} has the label {broken[0]}; labels must be whole numbers or text")
        values = numbers
    elif isinstance(values[0], bytes):
        raise BadInput(f"{what} holds images; labels must be whole numbers or text")
    found, y = np.unique(values, return_inverse=True)
    if len(found) < 2:
        raise BadInput(f"{what} has only the label '{short(found[0])}'; at least 2 classes are needed")
    if len(found) == len(values):
        raise BadInput(f"{what} has another label in each of {len(values)} rows; it must name their classes")
    return y.astype(np.int64), len(found)


def _ids(values: Array) -> Array:
    """Clients in the order of their names; only if all are plain whole numbers, by their value.

    Of any length: an id can have twenty digits.
    """
    if values.dtype != object:
        return values
    names = {*values.tolist()}
    numbers = all(isinstance(name, str) and _WHOLE.fullmatch(name) for name in names)
    ordered = sorted(names, key=lambda name: (len(name), name)) if numbers else sorted(names, key=str)
    place = {name: k for k, name in enumerate(ordered)}
    return np.array([place[name] for name in values], np.int64)


def _samples(columns: dict[str, Array], table: Table) -> tuple[Array, int]:
    """The samples, and the number of words if they are texts."""
    numbers = {name: _numbers(values) for name, values in columns.items()}
    rest = [name for name, values in numbers.items() if values is None]
    images = [name for name in rest if isinstance(columns[name][0], bytes)]
    if images and len(columns) > 1:
        raise BadInput(
            f"{table.where} has images in '{short(images[0])}' beside "
            f"{_listed(name for name in columns if name != images[0])}; choose one: ?x={short(images[0])}"
        )
    if images:
        files = columns[images[0]]
        return decode(files.tolist(), [f"in row {row} of {table.where}" for row in range(len(files))]), 0
    if not rest:
        return np.stack([_standard(name, values, table) for name, values in numbers.items()], 1), 0  # type: ignore[arg-type]
    if len(rest) < len(columns):
        first = columns[rest[0]]
        row = next(row for row, value in enumerate(first) if _number(value) is None)
        others = _listed(name for name, values in numbers.items() if values is not None)
        raise BadInput(
            f"{table.where} has numbers in {others} but text in {short(', '.join(rest))} "
            f"(row {row} of '{short(rest[0])}': '{short(str(first[row])[:20])}'); "
            f"choose columns of one kind: ?x={short(rest[0])}"
        )
    x, vocabulary = tokenize(map(" ".join, zip(*columns.values(), strict=True)))
    if len(vocabulary) < 2:
        raise BadInput(f"the text in {short(', '.join(columns))} of {table.where} has no words")
    longest = int(np.flatnonzero(x.any(0))[-1]) + 1
    return np.ascontiguousarray(x[:, :longest]), len(vocabulary)


def _listed(names: Iterable[str]) -> str:
    return short(", ".join(f"'{name}'" for name in names))


def _standard(name: str, values: npt.NDArray[np.float64], table: Table) -> npt.NDArray[np.float32]:
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        raise BadInput(
            f"column '{short(name)}' of {table.where} is {values[bad[0]]} in row {bad[0]}; replace it"
        )
    with np.errstate(over="ignore"):
        spread = values.std()
        if not np.isfinite(spread):
            raise BadInput(f"column '{short(name)}' of {table.where} has values too large to compute with")
        scaled: npt.NDArray[np.float64] = (values - values.mean()) / (spread or 1.0)
    return scaled.astype(np.float32)


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _numbers(values: Array) -> npt.NDArray[np.float64] | None:
    """A column as numbers, if all of it can be read so."""
    if values.dtype != object:
        return values.astype(np.float64)
    if any(_number(value) is None for value in values):
        return None
    return np.array([*map(float, values)], np.float64)


def load_csv(path: Path, choice: Choice) -> Dataset:
    """The data set in a .csv or .tsv file whose first line names the columns."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter)
            names = next(reader, [])
            rows = []
            for row in filter(None, reader):
                if len(row) != len(names):
                    raise BadInput(
                        f"line {reader.line_num} of {path} has {len(row)} values, its first {len(names)}"
                    )
                rows.append(row)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"cannot read {path} as CSV in UTF-8: {one_line(error)}") from None
    if len(set(names)) < len(names):
        raise BadInput(f"{path} has two columns of one name; it has: {short(', '.join(names))}")
    if not rows:
        raise BadInput(f"{path} has no rows; expected are a line of names, then one line a sample")

    places = {name: at for at, name in enumerate(names)}

    def read(name: str) -> Array:
        at = places[name]
        return np.array([row[at] for row in rows], object)

    return as_dataset(Table(str(path), names, read), choice, path.name)
