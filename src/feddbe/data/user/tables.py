"""A user's table: a label column, perhaps a client column, and columns of numbers, names, text or images.

Numbers are standardised, each column by its mean and deviation over the training rows (`Dataset.fitted`, when
it is known which these are): with columns of very different size (age, income) plain SGD gets nowhere. Who
wants another scale gives an .npz, which is taken as it is. What becomes of each column: `columns.py`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from feddbe.data import rows
from feddbe.data.dataset import Dataset
from feddbe.data.io.images import decode, preprocessed
from feddbe.data.preprocessing import Column, Preprocessing, tokenize
from feddbe.data.rows import MISSING, one_hot
from feddbe.data.rows import number as rows_number
from feddbe.data.user.arrays import Array, Numbered, clients_of, labels_of, labels_of_text, made, names_of
from feddbe.data.user.query import Choice
from feddbe.errors import BadInput, one_line, short

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


_CATEGORIES = 100
"""So many different words in a column can be names of kinds; more, or in most rows another, are texts."""


@dataclass(frozen=True)
class Part:
    """One column."""

    name: str
    kind: str
    """`number`, `category`, `text` or `image`."""
    values: Array
    """Numbers with nan, or objects with None."""
    missing: npt.NDArray[np.bool_]

    def rows(self, keep: Array) -> Part:
        return replace(self, values=self.values[keep], missing=self.missing[keep])


class Samples(NamedTuple):
    """What a model is trained on, raw where training rows must be known first."""

    x: Array
    about: Preprocessing
    note: str = ""


def gaps(values: Array, *, number: bool = False) -> npt.NDArray[np.bool_]:
    """Where nothing is: in a column of numbers `NA` and the like, in others an empty cell."""
    if values.dtype != object:
        return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
    empty = MISSING if number else {""}
    return np.array([v is None or (isinstance(v, str) and v.strip().lower() in empty) for v in values], bool)


def images(values: Array) -> bool:
    """Whether it is a column of image files."""
    return values.dtype == object and isinstance(next((v for v in values if v is not None), None), bytes)


def numbers(values: Array, *, comma: bool = False) -> npt.NDArray[np.float64] | None:
    """A column as numbers, nan where one is missing, if all of it can be read so."""
    if values.dtype != object:
        return values.astype(np.float64)
    if images(values):
        return None
    try:
        return values.astype(np.float64)  # the quick way, if nothing is missing
    except (ValueError, TypeError):
        found = [rows_number(value, comma) for value in values]
        return None if None in found else np.array(found, np.float64)


def columns_of(columns: Mapping[str, Array], choice: Choice, table: Table) -> list[Part]:
    """What each of them is; text beside numbers is a category."""
    parts = [_part(name, values, choice, table) for name, values in columns.items()]
    mixed = {part.kind for part in parts} & {"number", "category"}
    return [_category(part, parts, table) if mixed and part.kind == "text" else part for part in parts]


def _part(name: str, values: Array, choice: Choice, table: Table) -> Part:
    if name in choice.categories:
        return Part(name, "category", _names(values), gaps(values))
    found = numbers(values, comma=table.comma)
    if found is not None and not np.isnan(found).all():
        return Part(name, "number", _checked(name, found, table), np.isnan(found))
    if images(values):
        return Part(name, "image", values, gaps(values))
    if found is not None:
        raise BadInput(f"column '{short(name)}' of {table.where} has no values; leave it out: ?x=")
    read = [rows_number(value, table.comma) for value in values]
    there, wrong = (np.flatnonzero(gap) for gap in _read(read))
    if len(there) > len(wrong):
        first = int(wrong[0])
        raise BadInput(
            f"column '{short(name)}' of {table.where} has numbers, but '{short(str(values[first])[:20])}' in "
            f"{table.place(first)}; correct it (empty, if it is missing), or ?categories={short(name)} if "
            "they are names"
        )
    texts = np.array(["" if value is None else value for value in values], object)
    return Part(name, "text", texts, np.zeros(len(values), bool))


def _read(found: Sequence[float | None]) -> tuple[Array, Array]:
    """Where a number was read, and where none was, though something is there."""
    return (
        np.array([value is not None and value == value for value in found], bool),
        np.array([value is None for value in found], bool),
    )


def _names(values: Array) -> Array:
    """What is in a column as names: a number as people write it."""
    if values.dtype == object:
        return values
    missing = gaps(values)
    found = np.empty(len(values), object)
    whole = not missing.all() and bool((values[~missing] == np.trunc(values[~missing])).all())
    found[~missing] = names_of(values[~missing]) if whole else [*map(str, values[~missing].tolist())]
    return found


def _checked(name: str, values: npt.NDArray[np.float64], table: Table) -> npt.NDArray[np.float64]:
    bad = np.flatnonzero(np.isinf(values))
    if bad.size:
        where = table.place(int(bad[0]))
        raise BadInput(f"column '{short(name)}' of {table.where} is {values[bad[0]]} in {where}; replace it")
    with np.errstate(over="ignore"):
        if not np.isfinite(values[~np.isnan(values)].std()):
            raise BadInput(f"column '{short(name)}' of {table.where} has values too large to compute with")
    return values


def _category(part: Part, parts: Sequence[Part], table: Table) -> Part:
    """A column of text beside numbers, if it has few enough different values."""
    known = {*part.values.tolist()} - {""}
    if len(known) <= min(_CATEGORIES, max(1, len(part.values) // 2)):
        return replace(part, kind="category", missing=gaps(part.values))
    others = [other.name for other in parts if other.kind != "text"]
    raise BadInput(
        f"{table.where} has numbers in {_listed(others)} but text in '{short(part.name)}' ({len(known)} "
        f"different in {len(part.values)} rows, as '{short(str(part.values[0])[:20])}'); take the texts "
        f"alone, ?x={short(part.name)}, or the others, ?x={short(','.join(others))}"
    )


def samples(parts: Sequence[Part], choice: Choice, table: Table) -> Samples:
    """All columns together."""
    names = [part.name for part in parts]
    pictures = [part for part in parts if part.kind == "image"]
    if pictures and len(parts) > 1:
        others = [name for name in names if name != pictures[0].name]
        raise BadInput(
            f"{table.where} has images in '{short(pictures[0].name)}' beside {_listed(others)}; "
            f"choose one: ?x={short(pictures[0].name)}"
        )
    if pictures:
        files = pictures[0].values
        where = [f"in {table.place(row)} of {table.where}" for row in range(len(files))]
        x = decode(files.tolist(), where, choice.resize)
        return Samples(x, preprocessed(x, choice.resize))
    if choice.resize:
        raise BadInput(f"?resize= is for images; {table.where} has none")
    if parts[0].kind == "text":
        return _texts(parts, table)
    made = [_inputs(part) for part in parts]
    x = np.concatenate([values for values, _ in made], axis=1)
    columns = tuple(column for _, column in made)
    kinds = [f"{short(c.name)} ({len(c.categories)})" for c in columns if c.categories]
    note = f"one input for each category of {short(', '.join(kinds))}" if kinds else ""
    about = Preprocessing("table", x.shape[1:], columns, missing=choice.missing, comma=table.comma)
    return Samples(x, about, note)


def _inputs(part: Part) -> tuple[npt.NDArray[np.float64], Column]:
    """A column's raw inputs."""
    if part.kind == "number":
        return part.values.astype(np.float64)[:, np.newaxis], Column(part.name)
    known = {*part.values.tolist()} - {None, ""}
    categories = tuple(sorted(map(str, known)))
    return one_hot(part.values.tolist(), categories)[0], Column(part.name, categories)


def _texts(parts: Sequence[Part], table: Table) -> Samples:
    names = [part.name for part in parts]
    x, vocabulary = tokenize(map(" ".join, zip(*(part.values for part in parts), strict=True)))
    if len(vocabulary) < 2:
        raise BadInput(f"the text in {short(', '.join(names))} of {table.where} has no words")
    longest = int(np.flatnonzero(x.any(0))[-1]) + 1
    x = np.ascontiguousarray(x[:, :longest])
    about = Preprocessing(
        "texts", x.shape[1:], tuple(Column(name, mean=(0.0,)) for name in names),
        vocabulary=tuple(vocabulary), words=len(vocabulary),
    )  # fmt: skip
    return Samples(x, about)


def _listed(names: Sequence[str]) -> str:
    return short(", ".join(f"'{name}'" for name in names))
