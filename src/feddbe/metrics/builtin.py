"""Accuracy of what a client predicts with, and the floor below it."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from feddbe.metrics.records import ALL, Value
from feddbe.metrics.registry import measure
from feddbe.metrics.representations.discrepancy import mean_distances
from feddbe.metrics.representations.linear_probe import linear_probe
from feddbe.metrics.representations.points import Points

if TYPE_CHECKING:
    from feddbe.data.dataset import Dataset
    from feddbe.data.split import Split


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


@measure
def auc(logits: Tensor, y: Tensor) -> Value | None:
    """Area under the ROC curve over all (sample, class) pairs, the micro-average over one-hot labels and
    softmax: how often a true pair outranks a false one. With one class there are no false pairs.

    From the rank sum of the true pairs, ties at their middle rank (Mann-Whitney): only true pairs need a
    rank, which is where they would be put in among all.
    """
    positives, negatives = len(y), logits.numel() - len(y)
    if not negatives:
        return None
    scores = F.softmax(logits.double(), 1)
    every, true = np.sort(scores.reshape(-1).numpy()), scores.gather(1, y[:, None]).reshape(-1).numpy()
    below, upto = (np.searchsorted(every, true, side) for side in ("left", "right"))
    if np.isnan(every[-1]):  # where nan would be put in is no rank
        return math.nan, positives
    ranks = float((below + upto + 1).sum()) / 2
    return (ranks - positives * (positives + 1) / 2) / (positives * negatives), positives


@measure
def loss(logits: Tensor, y: Tensor) -> Value:
    """Mean cross-entropy."""
    return float(F.cross_entropy(logits, y)), len(y)


@measure
def drift(points: Points) -> dict[int, Value]:
    """Of each client, the distance of its mean z_g from that of the others, in units of the spread within
    clients (`representations/discrepancy.py`); it counts for as many samples as were looked at."""
    counts = dict(zip(*(a.tolist() for a in np.unique(points.client, return_counts=True)), strict=True))
    return {client: (value, counts[client]) for client, value in mean_distances(points).items()}


@measure
def probe(points: Points) -> dict[int, Value]:
    """Accuracy of a linear probe on the pooled z_g (`representations/linear_probe.py`), of all together."""
    return {ALL: (linear_probe(points), len(points.y))}
