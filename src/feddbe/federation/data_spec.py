"""The form of a federation's data, which the operator defines and every node applies to its own rows.

Without it, each node would standardize a table by its own rows, number its own labels, and build its own
vocabulary: the same input would mean something else on every node.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from feddbe import data
from feddbe.data.dataset import Dataset, Preprocessing
from feddbe.errors import InvalidInputError, truncate
from feddbe.federation.protocol import DataMismatchError

_TYPES = ("uint8", "float32", "int32")
_MAX_LABELS = 100_000


@dataclass(frozen=True)
class DataSpec:
    """Type, labels and fitted preprocessing (with the shape) of all nodes' inputs, stored in data.json."""

    dtype: str
    labels: tuple[str, ...]
    preprocessing: Preprocessing

    @classmethod
    def from_example(cls, name_or_path: str) -> DataSpec:
        """Return the form of an example data set; tables are standardized by its rows."""
        if data.is_remote(name_or_path):
            raise InvalidInputError(f"'{name_or_path}' has no rows here; name an example of the nodes' data")
        dataset = data.load_dataset(name_or_path)
        dataset.check_classes()
        dataset = dataset.fit_preprocessing(np.arange(len(dataset)))
        dtype = str(dataset.x.dtype).removeprefix("torch.")
        return cls(dtype, dataset.labels, dataset.preprocessing_spec)

    def to_json(self) -> dict[str, Any]:
        """Return the content of data.json."""
        return {
            "dtype": self.dtype,
            "labels": list(self.labels),
            "preprocessing": self.preprocessing.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DataSpec:
        """Return the form that `to_json` converted.

        Raises:
            ValueError: The value is not the form of data.
        """
        try:
            spec = msgspec.convert(values, cls)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ValueError("not the form of data") from error
        if not spec._is_consistent():
            raise ValueError("not the form of data")
        return spec

    def _is_consistent(self) -> bool:
        """Return True if the values belong together: they may come from another machine."""
        form = self.preprocessing
        columns, vocabulary = form.columns, form.vocabulary
        widths = [max(1, len(column.categories)) for column in columns]
        means = [mean for column in columns for mean in column.mean]
        deviations = [column.deviation for column in columns]
        names = [self.labels, vocabulary, [column.name for column in columns]]
        names += [column.categories for column in columns]
        is_valid = self.dtype in _TYPES and 2 <= len(self.labels) <= _MAX_LABELS
        is_valid &= 1 <= len(form.shape) <= 8 and all(1 <= size < 2**20 for size in form.shape)
        is_valid &= all(len(set(texts)) == len(texts) for texts in names)
        is_valid &= all(math.isfinite(number) for number in (form.scale, form.shift, *means, *deviations))
        is_valid &= all(deviation > 0 for deviation in deviations)
        is_valid &= 0 <= form.words < 2**31
        if form.kind == "table":
            is_valid &= [len(column.mean) for column in columns] == widths
            is_valid &= form.shape == (sum(widths),)
        if form.kind == "texts":
            is_valid &= form.words == len(vocabulary) and len(form.shape) == 1
        return is_valid

    @property
    def sha256(self) -> str:
        """Hash of the whole form."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def empty_inputs(self) -> torch.Tensor:
        """Return inputs of this form without samples."""
        return torch.empty((0, *self.preprocessing.shape), dtype=getattr(torch, self.dtype))

    def conform(self, dataset: Dataset) -> Dataset:
        """Return a node's data in this form: the federation's labels, columns, statistics and words.

        A node may have only some of the labels and categories.

        Raises:
            DataMismatchError: The data does not have this form; the error names both.
        """
        original, required = dataset.preprocessing_spec, self.preprocessing
        if original.kind != required.kind:
            raise DataMismatchError(
                f"the data has {original.kind} {original.shape}; "
                f"the federation has {required.kind} {required.shape}"
            )
        if required.kind == "table":
            x = torch.from_numpy(_conform_table(dataset.x.numpy(), original, required))
        elif required.kind == "texts":
            x = torch.from_numpy(_conform_texts(dataset.x.numpy(), original, required))
        else:
            x = dataset.x
            form = (
                str(x.dtype).removeprefix("torch."),
                original.shape,
                original.scale,
                original.shift,
                original.words,
            )
            expected = (self.dtype, required.shape, required.scale, required.shift, required.words)
            if form != expected:
                raise DataMismatchError(
                    f"the data has {_describe_form(form)}; the federation has {_describe_form(expected)}"
                )
        numbers = {label: number for number, label in enumerate(self.labels)}
        for label in dataset.labels:
            if label not in numbers:
                raise DataMismatchError(
                    f"the data has the label '{truncate(label)}'; "
                    f"the federation has {truncate(', '.join(self.labels))}"
                )
        new_numbers = torch.tensor([numbers[label] for label in dataset.labels])
        return replace(
            dataset,
            x=x,
            y=new_numbers[dataset.y],
            classes=len(self.labels),
            label_names=self.labels,
            num_words=required.words,
            preprocessing=required,
            split=None,
            known_sha256={},
        )


def _describe_form(form: tuple[str, tuple[int, ...], float, float, int]) -> str:
    dtype, shape, scale, shift, words = form
    text = f"{dtype} inputs of shape {shape}"
    if (scale, shift) != (1.0, 0.0):
        text += f", scaled by {scale:g} and shifted by {shift:g}"
    return text + (f", {words} words" if words else "")


def _conform_table(
    raw: npt.NDArray[np.float64], original: Preprocessing, required: Preprocessing
) -> npt.NDArray[np.float32]:
    """Return raw columns as inputs in the federation's order, standardized by its statistics."""
    starts = {}
    start = 0
    for column in original.columns:
        starts[column.name] = column, start
        start += max(1, len(column.categories))
    parts = []
    for column in required.columns:
        name = truncate(column.name)
        if column.name not in starts:
            raise DataMismatchError(
                f"the data has no column '{name}'; it has {truncate(', '.join(starts))}, "
                f"the federation has {truncate(', '.join(c.name for c in required.columns))}"
            )
        own_column, start = starts[column.name]
        if bool(own_column.categories) != bool(column.categories):
            kinds = ("categories", "numbers") if own_column.categories else ("numbers", "categories")
            raise DataMismatchError(
                f"column '{name}' of the data has {kinds[0]}, that of the federation has {kinds[1]}; "
                f"?categories={name} reads numbers as categories"
            )
        if not column.categories:
            parts.append(raw[:, start : start + 1])
            continue
        positions = {category: position for position, category in enumerate(column.categories)}
        part = np.zeros((len(raw), len(positions)))
        part[np.isnan(raw[:, start])] = np.nan
        for offset, category in enumerate(own_column.categories):
            if category not in positions:
                raise DataMismatchError(
                    f"column '{name}' of the data has '{truncate(category)}'; "
                    f"that of the federation has {truncate(', '.join(positions))}"
                )
            part[:, positions[category]] += raw[:, start + offset]
        parts.append(part)
    inputs = required.scale_inputs(np.concatenate(parts, axis=1))
    for row in np.flatnonzero(~np.isfinite(inputs).all(axis=1))[:1]:
        raise DataMismatchError(f"row {row} of the data has a number that is too large to compute with")
    return inputs


def _conform_texts(
    x: npt.NDArray[np.int32], original: Preprocessing, required: Preprocessing
) -> npt.NDArray[np.int32]:
    """Return texts in the federation's vocabulary, truncated or padded to its length."""
    positions = {word: number for number, word in enumerate(required.vocabulary)}
    new_numbers = np.array([positions.get(word, 0) for word in original.vocabulary], np.int32)
    length = required.shape[0]
    conformed = np.zeros((len(x), length), np.int32)
    conformed[:, : x.shape[1]] = new_numbers[x[:, :length]]
    return conformed
