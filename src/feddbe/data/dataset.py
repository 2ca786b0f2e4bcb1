"""Data sets in memory: one array of samples, one label column, and the preprocessing of raw rows.

`Preprocessing` is stored with a run, so that new rows are encoded like the training rows (`data/rows.py`).
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddbe.config.parameters import Parameters
from feddbe.data import rows
from feddbe.errors import InvalidInputError, truncate

if TYPE_CHECKING:
    from feddbe.data.split import Split


@dataclass(frozen=True)
class Column:
    """One column of a table: a number, or one input of 0 or 1 for each category."""

    name: str
    categories: tuple[str, ...] = ()
    """Categories in the order of their inputs; empty for a number."""
    mean: tuple[float, ...] = ()
    """Mean of each input over the training rows, which replaces missing values; empty until fitted."""
    deviation: float = 1.0
    """Standard deviation of a number over the training rows; 1 for a constant."""


@dataclass(frozen=True)
class Preprocessing:
    """Conversion of raw rows to inputs, as a plain value: `data/rows.py` applies its JSON to new rows."""

    kind: str
    """`table`, `texts`, `images`, or `arrays`, which are used unchanged."""
    shape: tuple[int, ...]
    """Shape of one input."""
    columns: tuple[Column, ...] = ()
    """Columns of a table, or of texts, which are joined in this order."""
    missing: str = ""
    """Treatment of missing values: `drop` the row, use the `mean`, or empty if they are an error."""
    comma: bool = False
    """True if numbers may have a decimal comma."""
    vocabulary: tuple[str, ...] = ()
    """Words in the order of their numbers."""
    words: int = 0
    """Size of the vocabulary if inputs are word numbers, else 0."""
    scale: float = 1.0
    shift: float = 0.0
    """Normalization of uint8 pixels: input = pixel * scale + shift."""
    resized: bool = False
    """True if images were resized to `shape`."""

    @property
    def is_fitted(self) -> bool:
        """True unless the statistics of a table's columns are still unknown."""
        return self.kind != "table" or all(column.mean for column in self.columns)

    def fit(self, raw: npt.NDArray[np.float64]) -> Preprocessing:
        """Return a copy with the means and deviations of the columns in `raw`, the training rows."""
        columns = []
        start = 0
        for column in self.columns:
            stop = start + max(1, len(column.categories))
            present = [values[~np.isnan(values)] for values in raw[:, start:stop].T]
            start = stop
            mean = tuple(float(values.mean()) if len(values) else 0.0 for values in present)
            deviation = 1.0
            if not column.categories and len(present[0]):
                deviation = float(present[0].std()) or 1.0
            columns.append(replace(column, mean=mean, deviation=deviation))
        return replace(self, columns=tuple(columns))

    def scale_inputs(self, raw: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Return the raw columns of a table as inputs of a model."""
        return rows.standardize([asdict(column) for column in self.columns], raw)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Preprocessing:
        """Return the preprocessing that `to_json` converted."""

        def lists_to_tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
            return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}

        columns = tuple(Column(**lists_to_tuples(column)) for column in values["columns"])
        return cls(**lists_to_tuples(values) | {"columns": columns})

    def restore(self, stored: Any) -> Preprocessing:
        """Return the preprocessing that a run stored, if it produces inputs of the same form as this one.

        Names, means, deviations, categories and words are those of the run: the training data may have been
        edited since.

        Args:
            stored: A JSON value, not trusted.

        Raises:
            ValueError: The value is not a preprocessing of such inputs.
        """
        if not _has_structure(stored, self.to_json()):
            raise ValueError("not a preprocessing of these inputs")
        restored = Preprocessing.from_json(stored)
        fixed = ("kind", "shape", "words", "scale", "shift", "resized")
        is_same = all(getattr(restored, key) == getattr(self, key) for key in fixed)
        if not is_same or any(column.deviation <= 0 for column in restored.columns):
            raise ValueError("not a preprocessing of these inputs")
        return restored


def _has_structure(value: Any, expected: Any) -> bool:
    """Return True if a JSON value has the keys, lengths and types of `expected`, and finite numbers."""
    if isinstance(expected, dict):
        has_keys = isinstance(value, dict) and value.keys() == expected.keys()
        return has_keys and all(_has_structure(value[key], expected[key]) for key in expected)
    if isinstance(expected, tuple | list):
        has_length = isinstance(value, tuple | list) and len(value) == len(expected)
        return has_length and all(map(_has_structure, value, expected))
    if isinstance(expected, int | float) and not isinstance(expected, bool):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is type(expected)


class RemoteData(Protocol):
    """Rows of a data set that other machines hold: all that is known of them, and their engine.

    The data set itself then has no rows, and its split only the numbers of samples (`feddbe/federation`).
    """

    @property
    def majority_hits(self) -> tuple[int, ...]:
        """Test samples of each client that have its most frequent training label."""

    def describe(self) -> Any:
        """Return the JSON value that a run stores to find the same rows when it is resumed."""

    def create_engine(self, experiment: Any, folder: Path, timeouts: Any) -> Any:
        """Return the engine of a run in this folder."""

    def finish_run(self, experiment: Any, store: Any, on_message: Callable[[str], None]) -> None:
        """Complete a run whose last round is stored."""


@dataclass(frozen=True)
class Dataset:
    """Samples in their smallest type; `inputs` converts a batch of `x` for a model."""

    name: str
    x: Tensor
    """(n, ...) uint8 images, int32 tokens or float32 numbers, the publisher's training set first. Columns of
    a table are float64 with nan for missing values until `fit_preprocessing`."""
    y: Tensor
    """(n,) int64 labels in 0..classes-1."""
    classes: int
    scale: float = 1.0
    shift: float = 0.0
    """Normalization of uint8 images: inputs = x * scale + shift."""
    client: npt.NDArray[np.int64] | None = None
    """(n,) natural client of each sample, if known."""
    split: Split | None = None
    """Split among clients, if the data was published with one."""
    num_words: int = 0
    """Number of words if `x` contains word numbers, else 0."""
    note: str = ""
    """Note for readers of results, for example that the data is a subset."""
    label_names: tuple[str, ...] = ()
    """Names of the classes in order; empty if they have only numbers."""
    client_names: tuple[str, ...] = ()
    """Names of the clients in the `client` column in order; empty if they have only numbers."""
    shift_labels: tuple[str, ...] = ()
    """Description of each client's image shift (`--shift`)."""
    preprocessing: Preprocessing | None = None
    """Preprocessing of raw rows, if the arrays do not determine it; see `preprocessing_spec`."""
    remote: RemoteData | None = None
    """Holder of the rows, if they are on other machines; then `x` and `y` are empty."""
    known_sha256: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of fields that were hashed when they were cached, so that they are not read at each start."""

    def __len__(self) -> int:
        return len(self.y)

    @property
    def labels(self) -> tuple[str, ...]:
        """Name of each class."""
        return self.label_names or tuple(map(str, range(self.classes)))

    def check_classes(self) -> None:
        """Raise an error if all samples have one label: then there is nothing to learn."""
        if self.classes < 2:
            raise InvalidInputError(
                f"{self.name} has only the label '{truncate(self.labels[0])}'; at least 2 classes are needed"
            )

    def describe_client(self, client: int) -> str:
        """Return a client as messages call it: by its name if it has one, as in `client 'Ulm'`."""
        return f"client '{self.client_names[client]}'" if self.client_names else f"client {client}"

    @property
    def preprocessing_spec(self) -> Preprocessing:
        """Preprocessing of raw rows, derived from the arrays if `preprocessing` is not set."""
        if self.preprocessing is not None:
            return self.preprocessing
        shape = tuple(self.x.shape[1:])
        is_image = self.x.dtype == torch.uint8 and len(shape) == 3 and shape[0] in (1, 3)
        kind = "images" if is_image else "arrays"
        return Preprocessing(kind, shape, words=self.num_words, scale=self.scale, shift=self.shift)

    def fit_preprocessing(self, train_indices: npt.NDArray[np.int64]) -> Dataset:
        """Return a copy with a table's columns standardized by the training rows; other data is unchanged."""
        if self.preprocessing is None or self.preprocessing.is_fitted:
            return self
        raw = self.x.numpy()
        fitted = self.preprocessing.fit(raw[train_indices])
        return replace(self, x=torch.from_numpy(fitted.scale_inputs(raw)), preprocessing=fitted)

    def inputs(self, x: Tensor) -> Tensor:
        """Return a batch of `x` as normalized float32; tokens as int64."""
        if self.num_words:
            return x.long()
        if x.dtype != torch.uint8:
            return x
        return x.to(torch.float32).mul_(self.scale).add_(self.shift)

    def example(self) -> Tensor:
        """Return one input with a batch axis, from which a model is built; zeros if no rows are here.

        If inputs are word numbers, it contains the largest one.
        """
        if not len(self):
            return self.inputs(self.x.new_full((1, *self.x.shape[1:]), max(0, self.num_words - 1)))
        index = int(self.x.argmax()) // self.x[0].numel() if self.num_words else 0
        return self.inputs(self.x[index : index + 1])

    def kernel_inputs(self, x: Tensor) -> Tensor:
        """Return a batch of `x` for the compiled backend, which uses tokens unchanged."""
        return x if self.num_words else self.inputs(x)

    def sha256(self) -> str:
        """Return the hash of the content: a run's hash depends on the data, not on the file's path."""
        header = f"{self.x.dtype}{tuple(self.x.shape)}{self.classes} {self.scale} {self.shift}"
        if self.num_words:
            header += f" {self.num_words} tokens"
        hashes = [header]
        for name, values in (("x", self.x.numpy()), ("y", self.y.numpy()), ("client", self.client)):
            if values is not None:
                known = self.known_sha256.get(name)
                hashes.append(known or hashlib.sha256(np.ascontiguousarray(values).data).hexdigest())
        return hashlib.sha256(" ".join(hashes).encode()).hexdigest()


@dataclass(frozen=True)
class DatasetOptions(Parameters):
    """Options of a built-in data set, as in `har(layout=scrambled)`; most have none."""

    def apply(self, dataset: Dataset) -> Dataset:
        """Return the data set with these options."""
        return dataset


TEXT_LENGTH = 200
"""Words kept of each text, as in the published experiments."""
UNKNOWN_WORD = "<unk>"


def tokenize(texts: Iterable[str], length: int = TEXT_LENGTH) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Convert texts to word numbers.

    Words are numbered from 1 by falling frequency in all the texts, ties in alphabetical order. Number 0 is
    `<unk>`, also if a text contains that word.

    Args:
        texts: The texts.
        length: Number of words to which texts are truncated, or padded with 0.

    Returns:
        (texts, length) word numbers, and the vocabulary in the order of its numbers.
    """
    first_numbers = {UNKNOWN_WORD: 0}  # in order of appearance
    flat_numbers, lengths = array("i"), array("q")
    for text in texts:
        numbers = [first_numbers.setdefault(word, len(first_numbers)) for word in rows.split_words(text)]
        flat_numbers.extend(numbers)
        lengths.append(len(numbers))
    flat, sizes = np.asarray(flat_numbers), np.asarray(lengths)
    counts = np.bincount(flat, minlength=len(first_numbers))
    vocabulary = sorted(
        first_numbers, key=lambda word: (word != UNKNOWN_WORD, -counts[first_numbers[word]], word)
    )
    final_numbers = np.empty(len(vocabulary), np.int32)
    final_numbers[[first_numbers[word] for word in vocabulary]] = np.arange(len(vocabulary), dtype=np.int32)

    x = np.zeros((len(sizes), length), np.int32)
    text_index = np.repeat(np.arange(len(sizes)), sizes)
    position = np.arange(len(flat)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    kept = position < length
    x[text_index[kept], position[kept]] = final_numbers[flat[kept]]
    return x, vocabulary
