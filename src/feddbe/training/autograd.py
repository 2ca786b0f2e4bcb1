"""Training backend for any plan, by torch's autograd.

With PRBM or MR before a linear classifier h(z) = W z + b the end of the step is computed explicitly, because
many small operations and their gradients cost more than their arithmetic. For B samples, with z = f(x) + p
and G = (softmax(h(z)) - one-hot(y)) / B,

    dW = G^T z      db = sum_i G_i      dp = sum_i (G W)_i      df(x)_i = (G W)_i + dMR

and only f is left to autograd. All other plans use autograd alone, which keeps the bits of existing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from feddbe.models.split_model import SplitModel
from feddbe.state import State
from feddbe.training.fit_plan import (
    FitPlan,
    FitResult,
    Losses,
    Samples,
    check_values,
    iterate_batches,
    no_losses,
)
from feddbe.training.loss_terms import (
    CROSS_ENTROPY,
    Batch,
    Gradient,
    MeanRegularizer,
    ProximalSteps,
    StepsResult,
    TermContext,
    gradient_by_autograd,
)

PRIORITY = 100


class _FitState(NamedTuple):
    """State of a fit; its tensors are updated in place, which saves a copy in every step."""

    params: State
    extras: State
    leaves: list[Tensor]
    values: list[Tensor]
    """The leaves, detached from autograd; they share memory."""
    carries: list[State]
    losses: Losses
    optimizer: torch.optim.Optimizer | None
    """None: plain SGD, implemented below."""


def list_packages() -> list[str]:
    """Return the packages that this backend needs: none."""
    return []


def warm_up_kernels(model: SplitModel, notify: Callable[[str], None]) -> None:
    """Do nothing: there is nothing to compile."""


def unsupported_reason(plan: FitPlan) -> str:
    """Return why the plan is not supported: never."""
    return ""


def unsupported_pass_reason(model: SplitModel, params: Mapping[str, Tensor]) -> str:
    """Return an empty text: all passes are supported."""
    return ""


def compute_gradient(
    model: SplitModel, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> Gradient:
    """Return the gradient of the cross-entropy on one batch."""
    return gradient_by_autograd(model, params, statistics, x, y)


def proximal_steps(
    model: SplitModel, params: State, statistics: State, x: Tensor, y: Tensor, steps: ProximalSteps
) -> StepsResult:
    """Return the parameters after repeated proximal steps on one batch."""
    total = torch.zeros(())
    for _ in range(steps.steps):
        result = gradient_by_autograd(model, params, statistics, x, y)
        updated = {}
        for name, p in params.items():
            grad = result.gradients[name] + steps.weight * (p - steps.anchor[name])
            updated[name] = p - steps.rate * grad
        params = updated
        statistics = result.statistics
        total = total + result.loss
    return StepsResult(params, total / steps.steps, statistics)


def make_predictor(model: SplitModel, params: Mapping[str, Tensor], prbm: Tensor | None) -> None:
    """Return None: the model's own passes are torch's."""


def train(plan: FitPlan) -> FitResult:
    """Execute the plan."""
    params = {name: plan.model.to_memory_format(p.detach()) for name, p in plan.params.items()}
    extras = {name: p.detach().clone() for name, p in plan.extras.items()}
    trained = {name: (params | extras)[name].requires_grad_() for name in plan.rates}
    leaves = list(trained.values())
    values = [leaf.detach() for leaf in leaves]
    carries = [term.carry for term in (plan.loss, *plan.terms)]
    optimizer = None if plan.optimizer.is_plain_sgd else plan.optimizer.build(plan.rates, trained, extras)
    start = _FitState(params, extras, leaves, values, carries, no_losses(), optimizer)
    with plan.model.bind(params, plan.statistics, training=True):
        step = _explicit_step if _has_explicit_gradient(plan) else _step
        end = iterate_batches(step, start, plan, plan.model, plan.batches)
    params = {name: p.detach().contiguous() for name, p in params.items()}
    extras = {name: p.detach() for name, p in extras.items()}
    check_values(params | extras, plan.batches)
    return FitResult(params, extras, end.carries, end.losses)


def _step(state: _FitState, plan: FitPlan, samples: Samples, key: int) -> _FitState:
    """Return the state after one batch, with all gradients by autograd."""
    out = plan.model.forward(state.params, samples.x, state.extras.get("prbm"))
    batch = Batch(*samples, *out)
    parts = [
        term.apply(TermContext(plan.model, state.params, term.const, batch, key), term_carry)
        for term, term_carry in zip((plan.loss, *plan.terms), state.carries, strict=True)
    ]
    losses = [value for value, _ in parts if value is not None]
    whole = sum(losses[1:], losses[0])
    grads = torch.autograd.grad(whole, state.leaves, allow_unused=True) if state.leaves else ()
    return _update(state, plan, grads, losses[0], [term_carry for _, term_carry in parts], len(samples.y))


def _update(
    state: _FitState,
    plan: FitPlan,
    grads: Sequence[Tensor | None],
    loss: Tensor,
    carries: list[State],
    samples: int,
) -> _FitState:
    """Update the parameters along these gradients and return the state."""
    if state.optimizer is None:
        _sgd_step(state, plan, grads)
    else:
        _optimizer_step(state, plan, grads)
    return state._replace(carries=carries, losses=state.losses.add(loss, samples))


def _sgd_step(state: _FitState, plan: FitPlan, grads: Sequence[Tensor | None]) -> None:
    """Take a step of plain SGD: p <- p - rate (grad + correction)."""
    for (name, rate), p, grad in zip(plan.rates.items(), state.values, grads, strict=True):
        if grad is not None:
            p.add_(grad, alpha=-rate)  # a sparse gradient updates its rows only
        if name in plan.correction:
            p.add_(plan.correction[name], alpha=-rate)


def _has_explicit_gradient(plan: FitPlan) -> bool:
    """Return True if the end of the step has an explicit gradient for this plan."""
    terms = [type(term.apply) for term in plan.terms]
    is_supported = plan.loss is CROSS_ENTROPY and (
        terms == [MeanRegularizer] or (not terms and "prbm" in plan.extras)
    )
    return is_supported and plan.extras.keys() <= {"prbm"} and bool(plan.model.linear_head)


def _explicit_step(state: _FitState, plan: FitPlan, samples: Samples, key: int) -> _FitState:
    """Return the state after one batch, with the gradients of classifier, PRBM and MR computed explicitly."""
    model, (matrix, *bias) = plan.model, plan.model.linear_head.values()
    features = model.features(state.params, samples.x)
    with torch.no_grad():
        z_g = features.detach()
        prbm = state.extras.get("prbm")
        weight = state.params[matrix]
        z = z_g if prbm is None else z_g + prbm
        logits = F.linear(z, weight, *(state.params[name] for name in bias))
        log_probabilities = F.log_softmax(logits, 1)
        loss, size = F.nll_loss(log_probabilities, samples.y), len(samples.y)
        targets = samples.y.unsqueeze(1)
        logits_grad = (
            log_probabilities.exp_()
            .scatter_add_(1, targets, -torch.ones_like(targets, dtype=z.dtype))
            .div_(size)
        )
        features_grad = logits_grad @ weight
        by_name: dict[str, Tensor | None] = {matrix: logits_grad.T @ z, "prbm": features_grad.sum(0)}
        by_name |= {name: logits_grad.sum(0) for name in bias}
        carries = state.carries
        for term in plan.terms:
            assert isinstance(term.apply, MeanRegularizer)
            term_carry = term.apply.update_carry(state.carries[1], z_g)
            carries = [state.carries[0], term_carry]
            if "mean" in term.const:
                features_grad += term.apply.mr_gradient(term_carry, term.const["mean"], size)
    leaves = {name: leaf for name, leaf in zip(plan.rates, state.leaves, strict=True) if name not in by_name}
    if leaves and features.requires_grad:
        grads = torch.autograd.grad(features, list(leaves.values()), features_grad, allow_unused=True)
        by_name |= dict(zip(leaves, grads, strict=True))
    return _update(state, plan, [by_name.get(name) for name in plan.rates], loss, carries, size)


def _optimizer_step(state: _FitState, plan: FitPlan, grads: Sequence[Tensor | None]) -> None:
    """Take a step of the optimizer on the gradients, clipped first."""
    assert state.optimizer is not None
    for (name, leaf), grad in zip(zip(plan.rates, state.leaves, strict=True), grads, strict=True):
        leaf.grad = torch.zeros_like(leaf) if grad is None else grad.to_dense()
        if name in plan.correction:
            leaf.grad = leaf.grad + plan.correction[name]
    if plan.optimizer.clip_norm is not None:
        # The norm is a sum over names, and decoding a state changes their order.
        by_name = dict(zip(plan.rates, state.leaves, strict=True))
        ordered = [by_name[name] for name in sorted(by_name)]
        torch.nn.utils.clip_grad_norm_(ordered, plan.optimizer.clip_norm)
    state.optimizer.step()
