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
    y, classes = dataset.y.numpy(), dataset.classes
    train, test = split.train[:members], split.test[:members]
    some = max(1, 2**20 // classes)  # clients at a time, for whose counts there is room
    labels = [train[k : k + some].counts(y, classes).argmax(1) for k in range(0, max(1, len(train)), some)]
    correct = y[test.flat] == np.concatenate(labels)[test.owners]
    return int(correct.sum()) / len(correct) if len(correct) else 0.0
