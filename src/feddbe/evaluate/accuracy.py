"""Accuracy of what clients predict with: per client, over clients, and the floor below it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from feddbe.data.dataset import Dataset
from feddbe.data.partition import Split
from feddbe.document import Accuracy

__all__ = ["Measure", "majority_floor", "measure", "over_clients"]


class Measure(NamedTuple):
    """One client's predictions on its test data."""

    samples: int
    correct: int
    auc: float | None
    """Micro-average over one-hot labels and softmax; None without samples."""
    loss: float
    """Mean cross-entropy."""
    train_loss: float | None = None
    """The same on the client's training data, where it was asked for."""


def measure(logits: Tensor, y: Tensor) -> Measure:
    """Count the hits, rank the scores, average the loss."""
    if not len(y):
        return Measure(0, 0, None, 0.0)
    correct = int((logits.argmax(1) == y).sum())
    return Measure(len(y), correct, _auc(logits, y), float(F.cross_entropy(logits, y)))


def _auc(logits: Tensor, y: Tensor) -> float:
    """Area under the ROC curve over all (sample, class) pairs: how often a true pair outranks a false one.

    From the rank sum of the true pairs, ties at their middle rank (Mann-Whitney).
    """
    from scipy.stats import rankdata  # comes with scikit-learn; slow to import

    ranks = rankdata(F.softmax(logits.double(), 1).reshape(-1).numpy())
    true = F.one_hot(y, logits.shape[1]).reshape(-1).numpy().astype(bool)
    positives, negatives = int(true.sum()), int((~true).sum())
    return float((ranks[true].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def over_clients(samples: Sequence[int], correct: Sequence[int]) -> Accuracy | None:
    """The four readings of one round; clients without test samples are left out."""
    n = np.array(samples, dtype=np.float64)
    hits = np.array(correct, dtype=np.float64)[n > 0]
    n = n[n > 0]
    if not len(n):
        return None
    each = np.sort(hits / n)
    return {
        "weighted": float(hits.sum() / n.sum()),
        "mean": float(each.mean()),
        "worst_tenth": float(each[: math.ceil(len(each) / 10)].mean()),
        "std": float(each.std()),
    }


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
