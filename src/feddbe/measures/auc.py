"""How well a client's predictions are ranked."""

from __future__ import annotations

import math

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from feddbe.measures import measure
from feddbe.measures.rows import Value

__all__ = ["auc"]


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
