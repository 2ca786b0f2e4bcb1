"""What became of raw rows before a model saw them: kept with a run, so that new rows can go the same way."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from feddbe.data.rows import words


@dataclass(frozen=True)
class Column:
    """One column of a table: a number, or one input of 0 or 1 for each of its categories."""

    name: str
    categories: tuple[str, ...] = ()
    """In the order of the inputs; none: it is a number."""
    mean: tuple[float, ...] = ()
    """Of each of its inputs, over the training rows: a missing value becomes this. Empty: not yet known."""
    deviation: float = 1.0
    """A number's standard deviation over the training rows; a constant has 1."""


@dataclass(frozen=True)
class Preprocessing:
    """A plain value: `asdict` of it is JSON, which `data/rows.py` applies to new rows."""

    kind: str
    """`table`, `texts`, `images`, or `arrays`, taken as they are."""
    shape: tuple[int, ...]
    """Of one input."""
    columns: tuple[Column, ...] = ()
    """Of a table's numbers and categories, or of its texts, which are joined in this order."""
    missing: str = ""
    """What was done where a value is missing: `drop` the row or take the `mean`; nothing: it was refused."""
    comma: bool = False
    """Whether numbers may have a decimal comma."""
    vocabulary: tuple[str, ...] = ()
    """The words by their numbers."""
    words: int = 0
    """How many words, if inputs are word numbers."""
    scale: float = 1.0
    shift: float = 0.0
    """uint8 pixels: input = pixel * scale + shift."""
    resized: bool = False
    """Whether images were brought to the size of `shape`."""

    @property
    def fitted(self) -> bool:
        """Whether its inputs are what a model takes; else the means of training rows are needed first."""
        return self.kind != "table" or all(column.mean for column in self.columns)

    def fit(self, raw: npt.NDArray[np.float64]) -> Preprocessing:
        """With mean and deviation of the columns in these rows, which must be training rows."""
        columns, at = [], 0
        for column in self.columns:
            part = raw[:, at : at + max(1, len(column.categories))]
            at += part.shape[1]
            there = [values[~np.isnan(values)] for values in part.T]
            mean = tuple(float(values.mean()) if len(values) else 0.0 for values in there)
            number = not column.categories and len(there[0])
            spread = float(there[0].std()) or 1.0 if number else 1.0
            columns.append(replace(column, mean=mean, deviation=spread))
        return replace(self, columns=tuple(columns))

    def scaled(self, raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Raw columns as a model takes them."""
        from feddbe.data import rows  # here: a client that is sent a task has no use for it

        return rows.scaled([asdict(column) for column in self.columns], raw)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> Preprocessing:
        """Back from what a run keeps."""

        def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
            return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}

        columns = tuple(Column(**tuples(column)) for column in about["columns"])
        return cls(**tuples(about) | {"columns": columns})

    def restored(self, stored: Any) -> Preprocessing:
        """Return what a run stored, which may be anything, if it makes inputs of the same form as this one.

        Names, means, deviations, categories and words are those of the run: the training data may have been
        edited since.

        Raises:
            ValueError: It is not the preprocessing of such inputs.
        """
        if not _has_form(stored, self.to_json()):
            raise ValueError("not a preprocessing of these inputs")
        found = Preprocessing.from_json(stored)
        fixed = ("kind", "shape", "words", "scale", "shift", "resized")
        is_same = all(getattr(found, key) == getattr(self, key) for key in fixed)
        if not is_same or any(column.deviation <= 0 for column in found.columns):
            raise ValueError("not a preprocessing of these inputs")
        return found


def _has_form(value: Any, like: Any) -> bool:
    """Whether a JSON value has the keys, lengths and types of another one, and finite numbers."""
    if isinstance(like, dict):
        is_dict = isinstance(value, dict) and value.keys() == like.keys()
        return is_dict and all(_has_form(value[key], like[key]) for key in like)
    if isinstance(like, tuple | list):
        is_list = isinstance(value, tuple | list) and len(value) == len(like)
        return is_list and all(map(_has_form, value, like))
    if isinstance(like, int | float) and not isinstance(like, bool):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is type(like)


LENGTH = 200
"""Words kept of each text: the published experiments'."""
UNKNOWN = "<unk>"


def tokenize(texts: Iterable[str], length: int = LENGTH) -> tuple[npt.NDArray[np.int32], list[str]]:
    """The texts as rows of word numbers, cut or padded with 0 to `length`, and the vocabulary.

    Words are numbered from 1 by falling frequency in all the texts, equally frequent ones in alphabetical
    order; number 0 is `<unk>`, also where a text has that word itself.
    """
    first_seen = {UNKNOWN: 0}
    numbers, lengths = array("i"), array("q")
    for text in texts:
        row = [first_seen.setdefault(word, len(first_seen)) for word in words(text)]
        numbers.extend(row)
        lengths.append(len(row))
    flat, sizes = np.asarray(numbers), np.asarray(lengths)
    counts = np.bincount(flat, minlength=len(first_seen))
    vocabulary = sorted(first_seen, key=lambda w: (w != UNKNOWN, -counts[first_seen[w]], w))
    number = np.empty(len(vocabulary), np.int32)
    number[[first_seen[word] for word in vocabulary]] = np.arange(len(vocabulary), dtype=np.int32)

    x = np.zeros((len(sizes), length), np.int32)
    row_of = np.repeat(np.arange(len(sizes)), sizes)
    place = np.arange(len(flat)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = place < length
    x[row_of[kept], place[kept]] = number[flat[kept]]
    return x, vocabulary
