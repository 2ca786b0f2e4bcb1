"""What a client is to train, as a plain value, and the one loop over its batches.

A `FitPlan` says where the parameters start, which of them move and how fast, what the loss is and on which
batches; a trainer (`trainers/`) carries it out. A method with steps of its own folds them over the same
batches.
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
from feddbe.errors import Diverged
from feddbe.models.split_model import SplitModel
from feddbe.state import State
from feddbe.training.optimizer import PLAIN, Optimiser
from feddbe.training.terms import Term

Carry = TypeVar("Carry")
Const = TypeVar("Const")


class Samples(NamedTuple):
    """A batch as it comes from the data."""

    x: Tensor
    y: Tensor


class Losses(NamedTuple):
    """The sum of a loss over the samples trained on, and their number. Nobody looks into the tensor before
    the end of an epoch: on some devices a look has to wait for all that was begun."""

    total: Tensor
    samples: int = 0

    def add(self, loss: Tensor, samples: int) -> Losses:
        return Losses(torch.add(self.total, loss.detach(), alpha=samples), self.samples + samples)


def no_losses() -> Losses:
    return Losses(torch.zeros((), dtype=torch.float64))


@dataclass(frozen=True)
class Batches:
    """One client's batches of one round: consecutive slices of a fresh permutation per epoch, the incomplete
    last one dropped; of fewer samples than a batch, one short batch."""

    dataset: Dataset
    rows: npt.NDArray[np.int64]
    size: int
    epochs: int
    seed: int
    round: int
    client: int

    @property
    def key(self) -> int:
        """Seeds what is random in training besides the order."""
        return seeds.torch_seed(self.seed, "torch", self.round, self.client)

    def gathered(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Each epoch's data in its order, and the size of a batch."""
        n = len(self.rows)
        size = min(self.size, n)
        for order in seeds.permutations(self.epochs, n, self.seed, "batches", self.round, self.client):
            taken = torch.from_numpy(self.rows[order[: n // size * size]]).to(self.dataset.y.device)
            yield self.dataset.x.index_select(0, taken), self.dataset.y.index_select(0, taken), size


@dataclass(frozen=True)
class FitPlan:
    """SGD from `params` on `loss` plus `terms`: p <- p - rate (grad + correction) for each name with a
    rate, or what the optimiser makes of (grad + correction)."""

    model: SplitModel
    params: State
    """Where they start; a trainer works on copies."""
    extras: State
    """Private tensors that are trained beside the model's parameters, such as PRBM's vector."""
    rates: Mapping[str, float]
    """The learning rates of those of both that move."""
    loss: Term
    terms: tuple[Term, ...]
    correction: State
    statistics: State
    """BatchNorm's, which training moves in place."""
    batches: Batches
    optimiser: Optimiser = PLAIN


class Fitted(NamedTuple):
    """What a trainer leaves: new values, the last carry of the loss and of each term, and the loss."""

    params: State
    extras: State
    carries: list[State]
    losses: Losses


def fold(
    step: Callable[[Carry, Const, Samples, int], Carry],
    carry: Carry,
    const: Const,
    model: SplitModel,
    batches: Batches,
) -> Carry:
    """`step(carry, const, batch, key)` over all batches. If the carry has `losses`, they are looked at after
    each epoch.

    Every fold sees the same batches in the same order, and torch's own generator (dropout) in the same state,
    whatever was trained before it.
    """
    key = batches.key % 2**62
    with seeds.torch_seeded(batches.key):
        for x, y, size in batches.gathered():
            for some, labels in zip(torch.split(x, size), torch.split(y, size), strict=True):
                inputs = model.layout(batches.dataset.inputs(some), copy=False)
                carry = step(carry, const, Samples(inputs, labels), key)
                key += 1
            check(getattr(carry, "losses", None), batches)
    return carry


def check(losses: Losses | None, batches: Batches) -> None:
    """Whether these are numbers."""
    if losses is not None and not math.isfinite(total := float(losses.total)):
        raise Diverged(batches.client, batches.round, "loss", total)


def check_values(values: Mapping[str, Tensor], batches: Batches) -> None:
    """Whether what came of a fit is numbers; every trainer asks."""
    for name, p in values.items():
        if p.numel() and not torch.stack(torch.aminmax(p)).isfinite().all():  # one pass, no copy
            raise Diverged(batches.client, batches.round, f"update of {name}", p.abs().max().item())
