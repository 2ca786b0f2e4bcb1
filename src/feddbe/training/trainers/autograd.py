"""Any plan, by torch's autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from feddbe.state import State
from feddbe.training.plan import FitPlan, Fitted, Losses, Samples, check_values, fold, no_losses
from feddbe.training.terms import At, Batch

__all__ = ["RANK", "refuses", "train"]

RANK = 100


class _Moving(NamedTuple):
    """A fit under way. Its tensors are its own and move in place, which saves a copy in every step."""

    params: State
    extras: State
    leaves: list[Tensor]
    values: list[Tensor]
    """The same memory, unseen by autograd."""
    carries: list[State]
    losses: Losses
    optimiser: torch.optim.Optimizer | None
    """None: plain SGD, written out below."""


def refuses(plan: FitPlan) -> str:
    return ""


def train(plan: FitPlan) -> Fitted:
    params = {name: plan.model.layout(p.detach()) for name, p in plan.params.items()}
    extras = {name: p.detach().clone() for name, p in plan.extras.items()}
    moving = {name: (params | extras)[name].requires_grad_() for name in plan.rates}
    leaves = list(moving.values())
    values, carries = [leaf.detach() for leaf in leaves], [term.carry for term in (plan.loss, *plan.terms)]
    optimiser = None if plan.optimiser.plain else plan.optimiser.over(plan.rates, moving, extras)
    start = _Moving(params, extras, leaves, values, carries, no_losses(), optimiser)
    with plan.model.bind(params, plan.statistics, training=True):
        end = fold(_step, start, plan, plan.model, plan.batches)
    params = {name: p.detach().contiguous() for name, p in params.items()}
    extras = {name: p.detach() for name, p in extras.items()}
    check_values(params | extras, plan.batches)
    return Fitted(params, extras, end.carries, end.losses)


def _step(now: _Moving, plan: FitPlan, samples: Samples, key: int) -> _Moving:
    out = plan.model.forward(now.params, samples.x, now.extras.get("prbm"))
    batch = Batch(*samples, *out)
    parts = [
        term.apply(At(plan.model, now.params, term.const, batch, key), carry)
        for term, carry in zip((plan.loss, *plan.terms), now.carries, strict=True)
    ]
    losses = [value for value, _ in parts if value is not None]
    whole = sum(losses[1:], losses[0])
    grads = torch.autograd.grad(whole, now.leaves, allow_unused=True) if now.leaves else ()
    if now.optimiser is None:
        _descend(now, plan, grads)
    else:
        _optimise(now, plan, grads)
    return now._replace(
        carries=[carry for _, carry in parts], losses=now.losses.add(losses[0], len(samples.y))
    )


def _descend(now: _Moving, plan: FitPlan, grads: Sequence[Tensor | None]) -> None:
    """A step of plain SGD."""
    for (name, rate), p, grad in zip(plan.rates.items(), now.values, grads, strict=True):
        if grad is not None:
            p.add_(grad, alpha=-rate)  # of a sparse gradient only its rows
        if name in plan.correction:
            p.add_(plan.correction[name], alpha=-rate)


def _optimise(now: _Moving, plan: FitPlan, grads: Sequence[Tensor | None]) -> None:
    """A step of the optimiser on the gradients, clipped first, as torch does it."""
    assert now.optimiser is not None
    for (name, leaf), grad in zip(zip(plan.rates, now.leaves, strict=True), grads, strict=True):
        leaf.grad = torch.zeros_like(leaf) if grad is None else grad.to_dense()
        if name in plan.correction:
            leaf.grad = leaf.grad + plan.correction[name]
    if plan.optimiser.clip_norm is not None:  # a sum over names, whose order a decoded state has changed
        by_name = [
            leaf for _, leaf in sorted(zip(plan.rates, now.leaves, strict=True), key=lambda pair: pair[0])
        ]
        torch.nn.utils.clip_grad_norm_(by_name, plan.optimiser.clip_norm)
    now.optimiser.step()
