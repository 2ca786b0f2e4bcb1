"""Confusion matrix and recall of each class, from the predictions of clients on their own test data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from feddbe.errors import truncate
from feddbe.metrics.representations.points import (
    Analysis,
    AnalysisColumn,
    AnalysisResult,
    AnalysisValues,
    FigureKind,
    Points,
)

Matrix = npt.NDArray[np.int64]


def confusion_matrix(points: Points, classes: int) -> Matrix:
    """Return the number of samples for each label (row) and prediction (column); `points` are logits."""
    predicted = points.x.argmax(1)
    return np.bincount(points.y * classes + predicted, minlength=classes**2).reshape(classes, classes)


def check_values(values: Mapping[str, float | None], classes: int) -> None:
    """Raise an error if stored values are not those of a matrix.

    Args:
        values: Values over all clients, from a file that may come from anywhere.
        classes: Number of labels.

    Raises:
        ValueError: A key names no label, or a count is not one.
    """
    for key, value in values.items():
        kind, *labels = key.split(":")
        number = {"count": 2, "recall": 1}.get(kind, 0)
        are_labels = all(re.fullmatch("[0-9]{1,9}", text) and int(text) < classes for text in labels)
        is_count = kind != "count" or (value is not None and 0 <= value <= 2**53)
        if len(labels) != number or not are_labels or not is_count:
            raise ValueError(f"the value '{truncate(key)}'")


def matrix_from_values(values: Mapping[str, float | None], classes: int) -> Matrix:
    """Return the matrix from the values of an analysis, in which counts of zero are left out."""
    matrix = np.zeros((classes, classes), np.int64)
    for key, value in values.items():
        if key.startswith("count:") and value is not None:
            label, predicted = map(int, key.split(":")[1:])
            matrix[label, predicted] = value
    return matrix


def _matrix_values(matrix: Matrix) -> AnalysisValues:
    """Return the accuracy, the recall of each label that occurs, and the counts that are not zero."""
    sizes = matrix.sum(1)
    values: AnalysisValues = {"": float(matrix.trace() / sizes.sum())}
    for label in np.flatnonzero(sizes).tolist():
        values[f"recall:{label}"] = float(matrix[label, label] / sizes[label])
    for label, predicted in np.argwhere(matrix).tolist():
        values[f"count:{label}:{predicted}"] = float(matrix[label, predicted])
    return values


def _compute(points: Points, classes: int, settings: Mapping[str, Any]) -> AnalysisResult:
    by_client = {
        client: confusion_matrix(points.select(points.client == client), classes)
        for client in np.unique(points.client).tolist()
    }
    pooled: Matrix = np.sum(list(by_client.values()), axis=0)
    return AnalysisResult(
        _matrix_values(pooled), {client: _matrix_values(matrix) for client, matrix in by_client.items()}
    )


CONFUSION = Analysis(
    name="confusion",
    title="Confusion matrix and recall of each class",
    description="Predictions of each client's model on its own test data, pooled over clients.",
    compute=_compute,
    settings={},
    columns=(
        AnalysisColumn("value", "accuracy", "%", digits=2),
        AnalysisColumn("recall:*", "recall", "%", digits=2),
    ),
    figure=FigureKind.CONFUSION,
    layers=("logits",),
    uses_all_samples=True,
)
