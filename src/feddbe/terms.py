"""Terms that a local loss can have. A term is a pure function and closes over no tensor, so that clients can
be stacked: what it needs of other tensors is its `const`, what it keeps from batch to batch its `carry`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from feddbe.models.split import SplitModel
from feddbe.state import State, summed

__all__ = ["CROSS_ENTROPY", "At", "Batch", "RunningMean", "Term", "prox"]


class Batch(NamedTuple):
    """A batch after the forward pass."""

    x: Tensor
    y: Tensor
    z_g: Tensor
    z: Tensor
    logits: Tensor


class At(NamedTuple):
    """Where a term is evaluated: the model and its parameters now, the term's constants, and the batch."""

    model: SplitModel
    params: Mapping[str, Tensor]
    const: State
    batch: Batch
    key: int
    """Seeds what is random in it."""


TermFunction = Callable[[At, State], tuple[Tensor | None, State]]
"""(at, carry) -> (loss or None, carry)."""


class RunningMean(NamedTuple):
    """Says of a term that it is factor * mean_k (r_k - zbar_k)^2, of the running mean r of z_g with momentum
    mu; if `correct`, r is divided by its total weight first. carry: r, weight; const, unless factor is 0:
    mean, which is zbar."""

    mu: float
    factor: float = 0.0
    correct: bool = False

    def weights(self, start: float, batches: int) -> npt.NDArray[np.floating[Any]]:
        """r's total weight after each batch: 1 - (1 - mu)^b (1 - start)."""
        return 1 - (1 - self.mu) ** np.arange(1, batches + 1) * (1 - start)


class Term(NamedTuple):
    """One summand of the local loss, with its constants and the carry that each `fit` starts from."""

    apply: TermFunction
    const: State = {}  # noqa: RUF012  (never written to)
    carry: State = {}  # noqa: RUF012
    mean: RunningMean | None = None
    """If it is nothing but that: it can be computed without autograd (`compiled.py`)."""


def cross_entropy(at: At, carry: State) -> tuple[Tensor, State]:
    return F.cross_entropy(at.batch.logits, at.batch.y), carry


CROSS_ENTROPY = Term(cross_entropy)


def prox(weight: float, anchor: Mapping[str, Tensor]) -> Term:
    """weight/2 sum_k (p_k - anchor_k)^2: a pull of the parameters towards `anchor`."""

    def pull(at: At, carry: State) -> tuple[Tensor, State]:
        distances = {name: F.mse_loss(at.params[name], at.const[name], reduction="sum") for name in at.const}
        return 0.5 * weight * summed(distances), carry

    return Term(pull, dict(anchor))
