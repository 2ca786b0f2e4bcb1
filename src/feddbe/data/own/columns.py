"""What becomes of the columns of a table: numbers, categories as one input each, texts, or images.

A column of numbers stays one when some of its cells are missing; one that has a few other words among its
numbers is neither, and is named: taken for text it would be another experiment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from feddbe.data import rows
from feddbe.data.files.images import decode, preprocessed
from feddbe.data.own.arrays import Array, names_of
from feddbe.data.own.choice import Choice
from feddbe.data.preprocessing import Column, Preprocessing
from feddbe.data.text import tokenize
from feddbe.errors import BadInput, short

if TYPE_CHECKING:
    from feddbe.data.own.table import Table

__all__ = ["Part", "Samples", "columns_of", "gaps", "images", "numbers", "samples"]

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
    empty = rows.MISSING if number else {""}
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
        found = [rows.number(value, comma) for value in values]
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
    read = [rows.number(value, table.comma) for value in values]
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
    return rows.one_hot(part.values.tolist(), categories)[0], Column(part.name, categories)


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
