"""A data set in memory: one array, one label column, how raw rows became it, and how a batch becomes inputs.

`Preprocessing` is stored with a run, so that new rows are treated as the training rows were (`data/rows.py`).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddbe.config.parameters import Parameters
from feddbe.data import rows

if TYPE_CHECKING:
    from feddbe.data.split import Split


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
    def is_fitted(self) -> bool:
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

    def scale_inputs(self, raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Raw columns as a model takes them."""
        return rows.scale_values([asdict(column) for column in self.columns], raw)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, about: Mapping[str, Any]) -> Preprocessing:
        """Back from what a run keeps."""

        def tuples(values: Mapping[str, Any]) -> dict[str, Any]:
            return {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}

        columns = tuple(Column(**tuples(column)) for column in about["columns"])
        return cls(**tuples(about) | {"columns": columns})

    def restore(self, stored: Any) -> Preprocessing:
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


@dataclass(frozen=True)
class Dataset:
    """Samples in the smallest type that holds them; `inputs` turns a slice of `x` into what a model takes."""

    name: str
    x: Tensor
    """(n, ...) uint8 images, int32 tokens or float32 numbers, the publisher's train set first, then the test
    set; a table's columns are float64 with nan for what is missing until they are `fitted`."""
    y: Tensor
    """(n,) int64 labels in 0..classes-1."""
    classes: int
    scale: float = 1.0
    shift: float = 0.0
    """uint8 images: inputs = x * scale + shift."""
    client: npt.NDArray[np.int64] | None = None
    """(n,) the natural client of each sample, if there is one."""
    split: Split | None = None
    """Who holds which rows, if the data came divided."""
    tokens: int = 0
    """Size of the vocabulary if `x` holds the numbers of words; 0: it does not."""
    note: str = ""
    """What a reader of results must know of this data, such as that it is a subset."""
    label_names: tuple[str, ...] = ()
    """The classes in their order; none: their numbers are their names."""
    client_names: tuple[str, ...] = ()
    """The clients of the `client` column in their order; none: they have numbers only."""
    shift_labels: tuple[str, ...] = ()
    """What was done to the images of each client (`--shift`), in words."""
    preprocessing: Preprocessing | None = None
    """What became of raw rows, if more than `about` can tell from the arrays."""
    known_sha256: Mapping[str, str] = field(default_factory=dict)
    """Of fields whose bytes were hashed when their cache was made: no need to read them all at each start."""

    def __len__(self) -> int:
        return len(self.y)

    @property
    def labels(self) -> tuple[str, ...]:
        """A name for each class."""
        return self.label_names or tuple(map(str, range(self.classes)))

    @property
    def preprocessing_spec(self) -> Preprocessing:
        """What a raw row of this data goes through before a model sees it."""
        if self.preprocessing is not None:
            return self.preprocessing
        pixels = self.x.dtype == torch.uint8
        kind = "images" if pixels and self.x.dim() == 4 and self.x.shape[1] in (1, 3) else "arrays"
        shape = tuple(self.x.shape[1:])
        return Preprocessing(kind, shape, words=self.tokens, scale=self.scale, shift=self.shift)

    def fit_preprocessing(self, rows: npt.NDArray[np.int64]) -> Dataset:
        """With the columns of a table standardised by these rows, the training rows; other data as it is."""
        if self.preprocessing is None or self.preprocessing.is_fitted:
            return self
        raw = self.x.numpy()
        about = self.preprocessing.fit(raw[rows])
        return replace(self, x=torch.from_numpy(about.scale_inputs(raw)), preprocessing=about)

    def inputs(self, x: Tensor) -> Tensor:
        """A batch of `x` as float32, normalised; tokens as int64."""
        if self.tokens:
            return x.long()
        if x.dtype != torch.uint8:
            return x
        return x.to(torch.float32).mul_(self.scale).add_(self.shift)

    def kernel_inputs(self, x: Tensor) -> Tensor:
        """The same for the compiled trainer, which takes tokens as they are."""
        return x if self.tokens else self.inputs(x)

    def sha256(self) -> str:
        """Fingerprint of the content: a run's hash follows the data, not the file's path."""
        about = f"{self.x.dtype}{tuple(self.x.shape)}{self.classes} {self.scale} {self.shift}"
        about += f" {self.tokens} tokens" if self.tokens else ""
        arrays = {"x": self.x.numpy(), "y": self.y.numpy(), "client": self.client}
        hashes = [
            self.known_sha256.get(name) or hashlib.sha256(np.ascontiguousarray(values).data).hexdigest()
            for name, values in arrays.items()
            if values is not None
        ]
        return hashlib.sha256(" ".join([about, *hashes]).encode()).hexdigest()


@dataclass(frozen=True)
class Arrangement(Parameters):
    """What can be chosen of a data set that is known by name; of most, nothing."""

    def arrange(self, dataset: Dataset) -> Dataset:
        return dataset


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
        row = [first_seen.setdefault(word, len(first_seen)) for word in rows.split_words(text)]
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
