"""Accuracy of what a client predicts with, and the floor below it."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from feddbe.measures import measure
from feddbe.measures.rows import Value

if TYPE_CHECKING:
    from feddbe.data.dataset import Dataset
    from feddbe.data.split import Split

__all__ = ["accuracy", "majority_floor"]


@measure
def accuracy(logits: Tensor, y: Tensor) -> Value:
    """Share of the labels that are hit; a fraction, so that over clients it is all hits over all samples."""
    return Fraction(int((logits.argmax(1) == y).sum()), len(y)), len(y)


def majority_floor(dataset: Dataset, split: Split, members: int | None = None) -> float:
    """Weighted accuracy if each client always predicts its own most frequent training label; of the first
    `members` clients only, as the accuracy of a run with newcomers."""
    y = dataset.y.numpy()
    correct = total = 0
    for train, test in list(zip(split.train, split.test, strict=True))[:members]:
        label = int(np.bincount(y[train], minlength=dataset.classes).argmax())
        correct += int((y[test] == label).sum())
        total += len(test)
    return correct / total if total else 0.0
