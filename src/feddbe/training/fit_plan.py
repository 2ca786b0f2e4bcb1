"""A client's local training as a value, and the loop over its batches.

A `FitPlan` states the initial parameters, the learning rates of those that are trained, the loss and the
batches; a backend (`backends.py`) executes it. A method whose local steps are not plain SGD iterates over the
same batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from feddbe import seeds
from feddbe.data.dataset import Dataset
from feddbe.errors import DivergenceError
from feddbe.models.split_model import SplitModel
from feddbe.state import State
from feddbe.training.loss_terms import Term
from feddbe.training.task import PLAIN, Optimizer

Carry = TypeVar("Carry")
Const = TypeVar("Const")


class Samples(NamedTuple):
    """Inputs and labels of a batch."""

    x: Tensor
    y: Tensor


class Losses(NamedTuple):
    """Sum of a loss over the samples trained on, and their number.

    The tensor is not read before the end of an epoch: on some devices reading waits for all pending work.
    """

    total: Tensor
    samples: int = 0

    def add(self, loss: Tensor, samples: int) -> Losses:
        """Return the sum with the mean loss of `samples` more samples."""
        return Losses(torch.add(self.total, loss.detach(), alpha=samples), self.samples + samples)


def no_losses() -> Losses:
    """Return an empty sum of losses."""
    return Losses(torch.zeros((), dtype=torch.float64))


@dataclass(frozen=True)
class Batches:
    """One client's batches of one round.

    Batches are consecutive slices of a new permutation per epoch, or with `is_shuffled=False` of the samples
    as they are. The incomplete last batch is dropped; a client with fewer samples than a batch has one short
    batch.
    """

    dataset: Dataset
    indices: npt.NDArray[np.int64]
    size: int
    epochs: int
    seed: int
    round: int
    client: int
    is_shuffled: bool = True

    @property
    def key(self) -> int:
        """Seed of the random operations of training other than the order of batches."""
        return seeds.torch_seed(self.seed, "torch", self.round, self.client)

    def iterate(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yield each epoch's inputs and labels in their order, and the batch size."""
        n = len(self.indices)
        size = min(self.size, n)
        for order in self._draw_orders(n):
            indices = torch.from_numpy(self.indices[order[: n // size * size]]).to(self.dataset.y.device)
            yield self.dataset.x.index_select(0, indices), self.dataset.y.index_select(0, indices), size

    def _draw_orders(self, n: int) -> list[npt.NDArray[np.int64]]:
        """Return the order of the client's n samples in each epoch."""
        if not self.is_shuffled:
            return [np.arange(n)] * self.epochs
        return seeds.sample_permutations(self.epochs, n, self.seed, "batches", self.round, self.client)


@dataclass(frozen=True)
class FitPlan:
    """SGD from `params` on `loss` plus `terms`.

    Each name with a rate is updated by p <- p - rate (grad + correction), or by the optimizer's step on (grad
    + correction).
    """

    model: SplitModel
    params: State
    """Initial values; a backend works on copies."""
    extras: State
    """Private tensors that are trained with the model's parameters, such as PRBM's vector."""
    rates: Mapping[str, float]
    """Learning rates of the trained parameters and extras."""
    loss: Term
    terms: tuple[Term, ...]
    correction: State
    statistics: State
    """BatchNorm statistics, which training updates in place."""
    batches: Batches
    optimizer: Optimizer = PLAIN


class FitResult(NamedTuple):
    """Result of a fit: new values, the last carry of the loss and of each term, and the losses."""

    params: State
    extras: State
    carries: list[State]
    losses: Losses


def iterate_batches(
    step: Callable[[Carry, Const, Samples, int], Carry],
    carry: Carry,
    const: Const,
    model: SplitModel,
    batches: Batches,
) -> Carry:
    """Apply `step(carry, const, batch, key)` to all batches and return the last carry.

    If the carry has `losses`, they are checked after each epoch. Every call sees the same batches in the same
    order, and torch's generator (dropout) in the same state, independent of earlier training.
    """
    key = batches.key % 2**62
    with seeds.torch_seeded(batches.key):
        for x, y, size in batches.iterate():
            for raw_inputs, labels in zip(torch.split(x, size), torch.split(y, size), strict=True):
                inputs = model.to_memory_format(batches.dataset.inputs(raw_inputs), copy=False)
                carry = step(carry, const, Samples(inputs, labels), key)
                key += 1
            check_losses(getattr(carry, "losses", None), batches)
    return carry


def check_losses(losses: Losses | None, batches: Batches) -> None:
    """Raise `DivergenceError` if the loss is not finite."""
    if losses is None:
        return
    total = float(losses.total)
    if not math.isfinite(total):
        raise DivergenceError(batches.client, batches.round, "loss", total)


def check_values(values: Mapping[str, Tensor], batches: Batches) -> None:
    """Raise `DivergenceError` if a trained value is not finite; every backend calls this."""
    for name, p in values.items():
        if p.numel() and not torch.stack(torch.aminmax(p)).isfinite().all():  # a single pass without a copy
            raise DivergenceError(batches.client, batches.round, f"update of {name}", p.abs().max().item())
