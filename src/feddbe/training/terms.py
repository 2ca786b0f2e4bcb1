"""Terms that a local loss can have. A term is a pure function and closes over no tensor: what it needs of
other tensors is its `const`, what it keeps from batch to batch its `carry`. One that is a class with fields,
not a mere function, can be recognised by a trainer that has it written out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.models.split_model import SplitModel
from feddbe.state import State, sum_by_name


class Batch(NamedTuple):
    """A batch after the forward pass."""

    x: Tensor
    y: Tensor
    z_g: Tensor
    z: Tensor
    logits: Tensor


class Gradient(NamedTuple):
    """The gradient of the cross-entropy, its value, and BatchNorm's statistics after the pass."""

    of: State
    loss: Tensor
    statistics: State


class Steps(NamedTuple):
    """So many times p <- p - rate (grad + pull (p - anchor)), of the cross-entropy on one batch."""

    times: int
    rate: float
    pull: float
    anchor: State


class Moved(NamedTuple):
    """The parameters after steps, the mean of the losses before each, and BatchNorm's statistics."""

    params: State
    loss: Tensor
    statistics: State


def by_autograd(
    model: SplitModel, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> Gradient:
    """The gradient at `params`, in training mode. What is frozen has a gradient of 0."""
    work = {name: p.detach().requires_grad_() for name, p in params.items()}
    moved = {name: b.clone() for name, b in statistics.items()}
    with model.bind(work, moved, training=True):
        loss = F.cross_entropy(model.forward(work, x).logits, y)
        grads = torch.autograd.grad(loss, list(work.values()))
    dense = {name: g.to_dense() for name, g in zip(work, grads, strict=True)}
    of = {name: torch.zeros_like(g) if name in model.frozen else g for name, g in dense.items()}
    return Gradient(of, loss.detach(), moved)


class At(NamedTuple):
    """Where a term is evaluated: the model and its parameters now, the term's constants, and the batch."""

    model: SplitModel
    params: Mapping[str, Tensor]
    const: State
    batch: Batch
    key: int
    """Seeds what is random in it."""
    differentiate: Callable[..., Gradient] = by_autograd
    """For a term that needs gradients at other parameters: by whoever trains."""


TermFunction = Callable[[At, State], tuple[Tensor | None, State]]
"""(at, carry) -> (loss or None, carry)."""


class Term(NamedTuple):
    """One summand of the local loss, with its constants and the carry that each `fit` starts from."""

    apply: TermFunction
    const: State = {}  # noqa: RUF012  (never written to)
    carry: State = {}  # noqa: RUF012
    at_end: bool = False
    """Whether all that it looks at is z_g, z and logits, as numbers that came from somewhere, and parameters:
    then the passes through the model can be compiled and only what comes after them is autograd's. Not so a
    term that differentiates what the batch has by parameters or inputs."""


def cross_entropy(at: At, carry: State) -> tuple[Tensor, State]:
    return F.cross_entropy(at.batch.logits, at.batch.y), carry


CROSS_ENTROPY = Term(cross_entropy)


@dataclass(frozen=True)
class Prox:
    """weight/2 sum_k (p_k - anchor_k)^2, the anchor being the constants."""

    weight: float

    def __call__(self, at: At, carry: State) -> tuple[Tensor, State]:
        distances = {name: F.mse_loss(at.params[name], at.const[name], reduction="sum") for name in at.const}
        return 0.5 * self.weight * sum_by_name(distances), carry


def prox(weight: float, anchor: Mapping[str, Tensor]) -> Term:
    """A pull of the parameters towards `anchor`."""
    return Term(Prox(weight), dict(anchor))


@lru_cache(8)
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> State:
    """Nobody writes into a carry."""
    return {"r": torch.zeros(shape, dtype=dtype), "weight": torch.zeros((), dtype=dtype)}


@dataclass(frozen=True)
class MeanPull:
    """MR: a running mean r of z_g, and a pull of it towards the constant `mean`, zbar:

        r <- (1 - mu) stop(r) + mu mean_batch z_g          loss: factor mean_k (r_k / d - zbar_k)^2

    d is 1 or, if `corrected`, r's total weight 1 - (1 - mu)^b after b batches. Without `mean` there is no
    loss, r is only observed. The carry has r and its total weight.
    """

    mu: float
    factor: float = 0.0
    corrected: bool = False

    def start(self, shape: tuple[int, ...]) -> State:
        """The carry before the first batch."""
        return _zeros(shape, torch.get_default_dtype(), torch.get_default_device())

    def __call__(self, at: At, carry: State) -> tuple[Tensor | None, State]:
        new = self.next(carry, at.batch.z_g)
        if "mean" not in at.const:
            return None, {name: t.detach() for name, t in new.items()}
        apart = F.mse_loss(self.mean_of(new) if self.corrected else new["r"], at.const["mean"])
        return self.factor * apart, {name: t.detach() for name, t in new.items()}

    def next(self, carry: State, z_g: Tensor) -> State:
        """r and its weight after a batch."""
        batch = z_g.mean(0)
        if self.mu == 1:  # the same, but cheaper: small steps add up
            return {"r": batch, "weight": torch.ones(())}
        r = torch.lerp(carry["r"], batch, self.mu)
        return {"r": r, "weight": (1 - self.mu) * carry["weight"] + self.mu}

    def mean_of(self, carry: State) -> Tensor:
        """r divided by its total weight; at mu = 0 there is none and r stays 0."""
        return carry["r"] / carry["weight"] if self.mu else carry["r"]

    # the same, as a trainer that writes the step out needs it

    def weights(self, start: float, batches: int) -> npt.NDArray[np.floating[Any]]:
        """r's total weight after each batch: 1 - (1 - mu)^b (1 - start)."""
        return 1 - (1 - self.mu) ** np.arange(1, batches + 1) * (1 - start)

    def slope(self, features: int, batch: int) -> float:
        """dL/dz_g of each sample is slope / d (r / d - zbar)."""
        return 2 * self.factor * self.mu / (features * batch)

    def pull(self, carry: State, mean: Tensor, batch: int) -> Tensor:
        """That of one sample, after the carry's batch."""
        r, weight = carry["r"], float(carry["weight"]) if self.corrected and self.mu else 1.0
        return (r / weight - mean) * (self.slope(mean.numel(), batch) / weight)
