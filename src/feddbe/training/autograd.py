"""Any plan, by torch's autograd.

With PRBM or MR before a linear classifier h(z) = W z + b the end of the step is written out, because many
small operations and their gradients cost more than their arithmetic. For B samples, with z = f(x) + p and
G = (softmax(h(z)) - one-hot(y)) / B,

    dW = G^T z      db = sum_i G_i      dp = sum_i (G W)_i      df(x)_i = (G W)_i + dMR

and only f is left to autograd. The others stay as they are: their bits are those of runs that were made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.state import State
from feddbe.training.plan import FitPlan, Fitted, Losses, Samples, check_values, fold, no_losses
from feddbe.training.terms import CROSS_ENTROPY, At, Batch, MeanPull

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
        end = fold(_step_by_hand if _known(plan) else _step, start, plan, plan.model, plan.batches)
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
    return _moved(now, plan, grads, losses[0], [carry for _, carry in parts], len(samples.y))


def _moved(
    now: _Moving,
    plan: FitPlan,
    grads: Sequence[Tensor | None],
    loss: Tensor,
    carries: list[State],
    samples: int,
) -> _Moving:
    """After a step along these gradients."""
    if now.optimiser is None:
        _descend(now, plan, grads)
    else:
        _optimise(now, plan, grads)
    return now._replace(carries=carries, losses=now.losses.add(loss, samples))


def _descend(now: _Moving, plan: FitPlan, grads: Sequence[Tensor | None]) -> None:
    """A step of plain SGD: p <- p - rate (grad + correction)."""
    for (name, rate), p, grad in zip(plan.rates.items(), now.values, grads, strict=True):
        if grad is not None:
            p.add_(grad, alpha=-rate)  # of a sparse gradient only its rows
        if name in plan.correction:
            p.add_(plan.correction[name], alpha=-rate)


def _known(plan: FitPlan) -> bool:
    """Whether the end of the step is written out for this plan."""
    terms = [type(term.apply) for term in plan.terms]
    wanted = plan.loss is CROSS_ENTROPY and (terms == [MeanPull] or (not terms and "prbm" in plan.extras))
    return wanted and plan.extras.keys() <= {"prbm"} and bool(plan.model.linear_head)


def _step_by_hand(now: _Moving, plan: FitPlan, samples: Samples, key: int) -> _Moving:
    model, (matrix, *bias) = plan.model, plan.model.linear_head.values()
    traced = model.features(now.params, samples.x)
    with torch.no_grad():
        z_g, prbm, weight = traced.detach(), now.extras.get("prbm"), now.params[matrix]
        z = z_g if prbm is None else z_g + prbm
        logits = F.linear(z, weight, *(now.params[name] for name in bias))
        chances = F.log_softmax(logits, 1)
        loss, size = F.nll_loss(chances, samples.y), len(samples.y)
        hits = samples.y.unsqueeze(1)
        slope = chances.exp_().scatter_add_(1, hits, -torch.ones_like(hits, dtype=z.dtype)).div_(size)
        back = slope @ weight
        found: dict[str, Tensor | None] = {matrix: slope.T @ z, "prbm": back.sum(0)}
        found |= {name: slope.sum(0) for name in bias}
        carries = now.carries
        for term in plan.terms:
            assert isinstance(term.apply, MeanPull)
            carry = term.apply.next(now.carries[1], z_g)
            carries = [now.carries[0], carry]
            if "mean" in term.const:
                back += term.apply.pull(carry, term.const["mean"], size)
    leaves = {name: leaf for name, leaf in zip(plan.rates, now.leaves, strict=True) if name not in found}
    if leaves and traced.requires_grad:
        grads = torch.autograd.grad(traced, list(leaves.values()), back, allow_unused=True)
        found |= dict(zip(leaves, grads, strict=True))
    return _moved(now, plan, [found.get(name) for name in plan.rates], loss, carries, size)


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
