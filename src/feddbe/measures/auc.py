"""How well a client's predictions are ranked."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from feddbe.measures import measure
from feddbe.measures.rows import Value

__all__ = ["auc"]


@measure
def auc(logits: Tensor, y: Tensor) -> Value | None:
    """Area under the ROC curve over all (sample, class) pairs, the micro-average over one-hot labels and
    softmax: how often a true pair outranks a false one. With one class there are no false pairs.

    From the rank sum of the true pairs, ties at their middle rank (Mann-Whitney).
    """
    from scipy.stats import rankdata  # comes with scikit-learn; slow to import

    ranks = rankdata(F.softmax(logits.double(), 1).reshape(-1).numpy())
    true = F.one_hot(y, logits.shape[1]).reshape(-1).numpy().astype(bool)
    positives, negatives = int(true.sum()), int((~true).sum())
    if not negatives:
        return None
    return float((ranks[true].sum() - positives * (positives + 1) / 2) / (positives * negatives)), len(y)
