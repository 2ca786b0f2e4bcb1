"""Terms of a local loss.

A term is a pure function that closes over no tensor: other tensors that it needs are its `const`, and what it
keeps from batch to batch is its `carry`. A backend can recognize a term that is a class with fields, such as
`Prox`, and execute it without autograd.
"""

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
    """Gradient of the cross-entropy, its value, and the BatchNorm statistics after the pass."""

    gradients: State
    loss: Tensor
    statistics: State


class ProximalSteps(NamedTuple):
    """Repeated steps p <- p - rate (grad + weight (p - anchor)) on the cross-entropy of one batch."""

    steps: int
    rate: float
    weight: float
    anchor: State


class StepsResult(NamedTuple):
    """Parameters after the steps, mean of the losses before each step, and BatchNorm statistics."""

    params: State
    loss: Tensor
    statistics: State


def gradient_by_autograd(
    model: SplitModel, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> Gradient:
    """Return the gradient at `params` in training mode; frozen parameters have gradient 0."""
    work = {name: p.detach().requires_grad_() for name, p in params.items()}
    updated = {name: b.clone() for name, b in statistics.items()}
    with model.bind(work, updated, training=True):
        loss = F.cross_entropy(model.forward(work, x).logits, y)
        grads = torch.autograd.grad(loss, list(work.values()))
    gradients = {}
    for name, grad in zip(work, grads, strict=True):
        dense = grad.to_dense()
        gradients[name] = torch.zeros_like(dense) if name in model.frozen else dense
    return Gradient(gradients, loss.detach(), updated)


class TermContext(NamedTuple):
    """Arguments of a term: the model and its current parameters, the term's constants, and the batch."""

    model: SplitModel
    params: Mapping[str, Tensor]
    const: State
    batch: Batch
    key: int
    """Seed of random operations in the term."""
    differentiate: Callable[..., Gradient] = gradient_by_autograd
    """Computes gradients at other parameters, by the backend that trains."""


TermFunction = Callable[[TermContext, State], tuple[Tensor | None, State]]
"""(context, carry) -> (loss or None, carry)."""


class Term(NamedTuple):
    """One summand of the local loss, with its constants and the carry at the start of each fit."""

    apply: TermFunction
    const: State = {}  # noqa: RUF012  (never written to)
    carry: State = {}  # noqa: RUF012
    outputs_only: bool = False
    """True if the term reads only z_g, z, logits and parameters. The passes through the model can then be
    compiled, and autograd differentiates the term alone. Not allowed for a term that differentiates values of
    the batch with respect to parameters or inputs."""


def cross_entropy(context: TermContext, carry: State) -> tuple[Tensor, State]:
    """Return the cross-entropy of the batch."""
    return F.cross_entropy(context.batch.logits, context.batch.y), carry


CROSS_ENTROPY = Term(cross_entropy)


@dataclass(frozen=True)
class Prox:
    """Proximal term weight/2 sum_k (p_k - anchor_k)^2; the anchor is the term's constants."""

    weight: float

    def __call__(self, context: TermContext, carry: State) -> tuple[Tensor, State]:
        distances = {
            name: F.mse_loss(context.params[name], context.const[name], reduction="sum")
            for name in context.const
        }
        return 0.5 * self.weight * sum_by_name(distances), carry


def prox(weight: float, anchor: Mapping[str, Tensor]) -> Term:
    """Return the proximal term that attracts the parameters to `anchor`."""
    return Term(Prox(weight), dict(anchor))


@lru_cache(8)
def _initial_carry(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> State:
    """Return the initial carry; it is shared, because a carry is never modified in place."""
    return {"r": torch.zeros(shape, dtype=dtype), "weight": torch.zeros((), dtype=dtype)}


@dataclass(frozen=True)
class MeanRegularizer:
    """MR: a running mean r of z_g, and a penalty on its distance from the constant `mean`, zbar:

        r <- (1 - mu) stop(r) + mu mean_batch z_g          loss: factor mean_k (r_k / d - zbar_k)^2

    d is 1 or, if `corrected`, r's total weight 1 - (1 - mu)^b after b batches. Without `mean`
    the loss is 0 and r is only observed. The carry holds r and its total weight.
    """

    mu: float
    factor: float = 0.0
    corrected: bool = False

    def init_carry(self, shape: tuple[int, ...]) -> State:
        """Return the carry before the first batch."""
        return _initial_carry(shape, torch.get_default_dtype(), torch.get_default_device())

    def __call__(self, context: TermContext, carry: State) -> tuple[Tensor | None, State]:
        new = self.update_carry(carry, context.batch.z_g)
        if "mean" not in context.const:
            return None, {name: t.detach() for name, t in new.items()}
        mean = self.mean_of(new) if self.corrected else new["r"]
        distance = F.mse_loss(mean, context.const["mean"])
        return self.factor * distance, {name: t.detach() for name, t in new.items()}

    def update_carry(self, carry: State, z_g: Tensor) -> State:
        """Return r and its weight after a batch."""
        batch = z_g.mean(0)
        if self.mu == 1:  # equal and cheaper: many small steps add up
            return {"r": batch, "weight": torch.ones(())}
        r = torch.lerp(carry["r"], batch, self.mu)
        return {"r": r, "weight": (1 - self.mu) * carry["weight"] + self.mu}

    def mean_of(self, carry: State) -> Tensor:
        """Return r divided by its total weight; at mu = 0 the weight is 0 and r stays 0."""
        return carry["r"] / carry["weight"] if self.mu else carry["r"]

    # Explicit formulas for backends that compute the step without autograd.

    def total_weights(self, start: float, batches: int) -> npt.NDArray[np.floating[Any]]:
        """Return r's total weight after each batch: 1 - (1 - mu)^b (1 - start)."""
        return 1 - (1 - self.mu) ** np.arange(1, batches + 1) * (1 - start)

    def gradient_factor(self, features: int, batch: int) -> float:
        """Return the factor of dL/dz_g of a sample, which is factor / d (r / d - zbar)."""
        return 2 * self.factor * self.mu / (features * batch)

    def mr_gradient(self, carry: State, mean: Tensor, batch: int) -> Tensor:
        """Return the gradient with respect to one sample's z_g, after the carry's batch."""
        divisor = float(carry["weight"]) if self.corrected and self.mu else 1.0
        return (carry["r"] / divisor - mean) * (self.gradient_factor(mean.numel(), batch) / divisor)
