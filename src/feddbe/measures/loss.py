"""The loss of what a client predicts with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from feddbe.measures import measure
from feddbe.measures.rows import Value

__all__ = ["loss"]


@measure
def loss(logits: Tensor, y: Tensor) -> Value:
    """Mean cross-entropy."""
    return float(F.cross_entropy(logits, y)), len(y)
