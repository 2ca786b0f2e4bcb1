"""A user's table: a label column, perhaps a client column, and columns of numbers, names, text or images.

Numbers are standardised, each column by its mean and deviation over the training rows (`Dataset.fitted`, when
it is known which these are): with columns of very different size (age, income) plain SGD gets nowhere. Who
wants another scale gives an .npz, which is taken as it is. What becomes of each column: `columns.py`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from feddbe.data import rows
from feddbe.data.dataset import Dataset
from feddbe.data.own.arrays import Array, Numbered, clients_of, labels_of, labels_of_text, made
from feddbe.data.own.choice import Choice
from feddbe.data.own.columns import Samples, columns_of, gaps, images, samples
from feddbe.errors import BadInput, one_line, short

__all__ = ["Choice", "Table", "as_dataset", "label_column", "load_csv"]

LABELS = ("label", "y")
_WHOLE = re.compile("0|[1-9][0-9]*")


@dataclass(frozen=True)
class Table:
    """Named columns of equal length, read when they are asked for."""

    where: str
    names: Sequence[str]
    read: Callable[[str], Array]
    """A column as numbers with nan for what is missing, or as objects: str or None, or all bytes, which are
    image files. Integers that a float cannot hold beside nan are str."""
    place: Callable[[int], str] = field(default=lambda row: f"row {row}")
    """Where a row is, in words."""
    comma: bool = False
    """Whether numbers may have a decimal comma."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of columns of numbers from 0 on: what they stand for, if the file says it."""


def as_dataset(table: Table, choice: Choice, name: str) -> Dataset:
    """Label, client and samples out of the columns of a table."""
    label = label_column(table, choice)
    client = choice.client or ("client" if "client" in table.names else "")
    known = {*table.names}
    for column in (*filter(None, [client]), *choice.x, *choice.categories):
        if column not in known:
            raise _no_column(table, column)
    wanted = choice.x or tuple(column for column in table.names if column not in (label, client))
    if not wanted:
        both = f"'{short(label)}' and '{short(client)}'" if client else f"'{short(label)}'"
        raise BadInput(f"{table.where} has no column beside {both}")
    parts = columns_of({column: table.read(column) for column in wanted}, choice, table)
    ends = {column: table.read(column) for column in filter(None, [label, client])}
    keep = _kept({column: gaps(values) for column, values in ends.items()}, parts, choice, table)
    if keep is not None:
        parts = [part.rows(keep) for part in parts]
        ends = {column: values[keep] for column, values in ends.items()}
    y = _labels(ends[label], f"column '{short(label)}' of {table.where}", table.labels.get(label, ()))
    who = _clients(ends[client], f"column '{short(client)}' of {table.where}") if client else None
    found: Samples = samples(parts, choice, table)
    notes = [found.note]
    if keep is not None and not keep.all():
        notes.append(f"{int((~keep).sum()):,} of {len(keep):,} rows were left out: values are missing")
    note = "; ".join(filter(None, notes))
    return made(name, found.x, y, who, tokens=found.about.words, preprocessing=found.about, note=note)


def _kept(ends: Mapping[str, Array], parts: Sequence[Any], choice: Choice, table: Table) -> Array | None:
    """The rows to keep; None: all. What is missing is named, unless somebody said what to do about it."""
    inside = {part.name: part.missing for part in parts if part.missing.any()}
    missing = {**{name: gap for name, gap in ends.items() if gap.any()}, **inside}
    if choice.missing == "drop":
        lacking = np.logical_or.reduce([*missing.values(), np.zeros(len(parts[0].missing), bool)])
        if lacking.all():
            raise BadInput(f"{table.where} has no row without a missing value; leave out columns: ?x=")
        return np.asarray(~lacking)
    for name, gap in missing.items():
        if name in ends or choice.missing != "mean":
            ways = "?missing=drop leaves such rows out"
            ways += "" if name in ends else ", ?missing=mean takes the column's mean"
            count = f" and in {gap.sum() - 1:,} more" if gap.sum() > 1 else ""
            row = table.place(int(np.flatnonzero(gap)[0]))
            raise BadInput(
                f"column '{short(name)}' of {table.where} has no value in {row}{count}; fill it in, or {ways}"
            )
    return None


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


def _labels(values: Array, what: str, known: Sequence[str]) -> Numbered:
    """Return labels of any kind, numbered from 0 in sorted order."""
    if values.dtype == object:
        if images(values):
            raise BadInput(f"{what} holds images; labels must be whole numbers or text")
        found = labels_of_text(values.tolist(), what)
    else:
        found = labels_of(values, len(values), what)
    if known and all(name.isdecimal() and int(name) < len(known) for name in found.names):
        return Numbered(found.numbers, tuple(known[int(name)] for name in found.names))
    return found


def _clients(values: Array, what: str) -> Numbered:
    """Clients in the order of their names; only if all are plain whole numbers, by their value.

    Of any length: an id can have twenty digits.
    """
    if values.dtype != object:
        whole = values.dtype.kind == "f" and np.array_equal(values, np.trunc(values))
        return clients_of(values.astype(np.int64) if whole else values, len(values), what)
    names = {*values.tolist()}
    plain = all(isinstance(name, str) and _WHOLE.fullmatch(name) for name in names)
    ordered = sorted(names, key=lambda name: (len(name), name)) if plain else sorted(names, key=str)
    place = {name: k for k, name in enumerate(ordered)}
    return Numbered(np.array([place[name] for name in values], np.int64), tuple(map(str, ordered)))


def load_csv(path: Path, choice: Choice) -> Dataset:
    """The data set in a .csv or .tsv file whose first line names the columns."""
    try:
        names, cells, lines, delimiter = rows.read_csv(path)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"cannot read {path} as CSV in UTF-8: {one_line(error)}") from None
    except ValueError as error:
        raise BadInput(str(error)) from None
    if not cells:
        raise BadInput(f"{path} has no rows; expected are a line of names, then one line a sample")
    places = {name: at for at, name in enumerate(names)}

    def read(name: str) -> Array:
        at = places[name]
        return np.array([row[at] for row in cells], object)

    table = Table(str(path), names, read, lambda row: f"line {lines[row]}", comma=delimiter == ";")
    return as_dataset(table, choice, path.name)
