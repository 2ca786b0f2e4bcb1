"""Fits with all steps of SGD compiled, or with compiled passes and a method's own terms by autograd."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from feddbe.data.dataset import Dataset
from feddbe.models.split_model import SplitModel
from feddbe.state import State
from feddbe.training.compiled.backend import LayerStack
from feddbe.training.compiled.inner_loops import DRIFT, GRADIENT, MOMENTUM, PLAIN, Array
from feddbe.training.compiled.network import Network, find_network
from feddbe.training.fit_plan import (
    FitPlan,
    FitResult,
    Losses,
    Samples,
    check_losses,
    check_values,
    iterate_batches,
    no_losses,
)
from feddbe.training.loss_terms import (
    CROSS_ENTROPY,
    Batch,
    Gradient,
    MeanRegularizer,
    Prox,
    ProximalSteps,
    StepsResult,
    Term,
    TermContext,
)

CHUNK_BATCHES = 64
"""Number of batches that are converted to kernel inputs at a time."""
COMPILED = (MeanRegularizer, Prox)
"""Terms that are part of the compiled step."""
MAX_BODY_FEATURES = 1 << 26
"""Maximum number of values that are stored for a frozen body."""


def train(plan: FitPlan, stack: LayerStack, features: Dataset | None) -> FitResult:
    """Execute the plan; `features` are the outputs of a frozen body for the plan's samples."""
    if needs_autograd(plan):
        return _train_with_autograd_terms(plan, stack)
    if features is not None:
        rows = np.arange(len(features))
        plan = replace(plan, batches=replace(plan.batches, dataset=features, indices=rows))
        stack = LayerStack(stack.cut_shape, stack.steps[stack.cut :], 0, stack.cut_shape)
    fit, losses = _Fit(plan, stack), no_losses()
    for x, y, size in plan.batches.iterate():
        for inputs, labels in _split_batch(x, y, size * CHUNK_BATCHES):
            loss = fit.train(plan.batches.dataset.kernel_inputs(inputs), labels, size)
            losses = losses.add(torch.tensor(loss, dtype=torch.float64), labels.shape[0])
        check_losses(losses, plan.batches)
    return fit.result({}, [term.carry for term in (plan.loss, *plan.terms)], losses)


def is_body_frozen(plan: FitPlan, stack: LayerStack) -> bool:
    """Return True if the body is frozen and its outputs should be computed once, not in every epoch."""
    body = {name for step in stack.steps[: stack.cut] for name in step.names.values()}
    is_frozen = 0 < stack.cut < len(stack.steps) and not any(plan.rates.get(name) for name in body)
    is_small = len(plan.batches.indices) * math.prod(stack.cut_shape) <= MAX_BODY_FEATURES
    return is_frozen and plan.batches.epochs > 1 and is_small and not needs_autograd(plan)


def find_autograd_terms(plan: FitPlan) -> list[Term]:
    """Return the loss and terms that are not compiled."""
    loss = () if plan.loss is CROSS_ENTROPY else (plan.loss,)
    return [*loss, *(term for term in plan.terms if type(term.apply) not in COMPILED)]


def needs_autograd(plan: FitPlan) -> bool:
    """Return True if the plan has terms or parameters that are not compiled."""
    return bool(find_autograd_terms(plan)) or plan.params.keys() != plan.model.parameters.keys()


def _split_batch(x: Tensor, y: Tensor, size: int) -> Iterable[tuple[Tensor, Tensor]]:
    """Return chunks of at most `size` samples; most clients have one."""
    if y.shape[0] <= size:
        return [(x, y)]
    return zip(torch.split(x, size), torch.split(y, size), strict=True)


class _Fit:
    """A fit in progress, in the network's memory; `with_autograd_terms` reserves their gradient of z_g."""

    def __init__(self, plan: FitPlan, stack: LayerStack, *, with_autograd_terms: bool = False) -> None:
        self.plan, self.stack = plan, stack
        self.term = next((t for t in plan.terms if isinstance(t.apply, MeanRegularizer)), None)
        size = min(plan.batches.size, len(plan.batches.indices))
        with_cut = bool(plan.extras) or self.term is not None or with_autograd_terms
        dtype = next(iter(plan.params.values())).dtype
        momentum = plan.optimizer.momentum > 0
        self.network = network = find_network(
            plan.model, stack, size, dtype, with_cut=with_cut, momentum=momentum
        )
        network.write(plan.params)
        _set_updates(network, plan)
        self.regularizer = MeanRegularizer(0.0)
        if self.term and isinstance(self.term.apply, MeanRegularizer):
            self.regularizer = self.term.apply
        self.weight = 0.0
        if with_cut:
            const, carry = (self.term.const, self.term.carry) if self.term else ({}, {})
            self.weight = float(carry.get("weight", 0.0))
            vectors = {
                "prbm": plan.extras.get("prbm"),
                "running_mean": carry.get("r"),
                "global_mean": const.get("mean"),
            }
            if momentum:
                vectors["prbm_step"] = None
            network.set_vectors(vectors)
            network.net["prbm_rate"] = plan.rates.get("prbm", 0.0)
            network.net["mu"] = self.regularizer.mu
            slope = self.regularizer.gradient_factor(math.prod(plan.model.feature_shape), size)
            network.net["slope"] = slope if "mean" in const else 0.0
            network.net["extra_z_grad"] = network.extra_z_grad if with_autograd_terms else 0

    def train(self, x: Tensor, y: Tensor, size: int) -> float:
        """Train on these batches and return the mean of their cross-entropies."""
        batches = y.shape[0] // size
        return self.network.train(x, y, size, self.divisors(batches)) / batches

    def divisors(self, batches: int) -> Array:
        """Return the divisors of MR's running mean after each of the next batches."""
        weights = self.regularizer.total_weights(self.weight, batches)
        self.weight = float(weights[-1])
        return weights if self.regularizer.corrected and self.regularizer.mu else np.ones(batches)

    def result(self, others: State, carries: list[State], losses: Losses) -> FitResult:
        """Return the result, checked to be finite; `others` are parameters that are not the model's."""
        params = self.plan.params | self.network.read(self.plan.params) | others
        extras = {name: self.cut_vector("prbm") for name in self.plan.extras}
        if not self.network.is_finite() or others:
            check_values(params | extras, self.plan.batches)
        terms = (self.plan.loss, *self.plan.terms)
        new_carries = list[State]()
        for term, carry in zip(terms, carries, strict=True):
            new_carries.append(self._mean_carry() if term is self.term else carry)
        return FitResult(params, extras, new_carries, losses)

    def _mean_carry(self) -> State:
        """Return MR's carry after the fit."""
        assert self.term
        weight = self.term.carry["weight"].new_tensor(self.weight)
        return {"r": self.cut_vector("running_mean"), "weight": weight}

    def differentiate(
        self, model: SplitModel, params: Mapping[str, Tensor], statistics: State, x: Tensor, y: Tensor
    ) -> Gradient:
        """Return the gradient at other parameters, computed in a separate network."""
        return compute_gradient(model, self.stack, params, x, y)._replace(statistics=statistics)

    def cut_vector(self, name: str) -> Tensor:
        vector = self.network.vectors[name].clone(memory_format=torch.contiguous_format)
        return vector.view(self.plan.model.feature_shape)


def _set_updates(network: Network, plan: FitPlan) -> None:
    """Set each parameter's rate, decay and drift, which are proximal term, weight decay and correction."""
    weight, anchor = next(
        ((t.apply.weight, t.const) for t in plan.terms if isinstance(t.apply, Prox)), (0.0, {})
    )
    weight_decays = dict.fromkeys(plan.params, plan.optimizer.weight_decay)
    has_drift = bool(plan.correction or anchor or plan.optimizer.weight_decay)
    momentum = plan.optimizer.momentum
    network.net["momentum"] = momentum
    if momentum:
        network.net["mode"] = MOMENTUM
    else:
        network.net["mode"] = DRIFT if has_drift else PLAIN
    rates = {name: plan.rates.get(name, 0.0) for name in network.parts}
    to_anchor = dict.fromkeys(rates, 0.0) | {name: rates[name] * weight for name in rates if name in anchor}
    decays = {name: to_anchor[name] + rates[name] * weight_decays.get(name, 0.0) for name in rates}
    network.set_updates(rates, decays)
    if momentum:
        network.numbers[2 * network.drift_offset : 3 * network.drift_offset].zero_()
    if has_drift or momentum:
        for name, drift in network.drifts.items():
            drift.zero_()
            if name in anchor:
                drift.add_(anchor[name].reshape(drift.shape), alpha=to_anchor[name])
            if name in plan.correction:
                drift.sub_(plan.correction[name].reshape(drift.shape), alpha=rates[name])


class _Parameters(Mapping[str, Tensor]):
    """Parameters of a fit in progress; the model's are copied from the network when a term reads them."""

    def __init__(self, fit: _Fit, others: State) -> None:
        self.fit = fit
        self.others = others
        self.copies = dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name in self.others:
            return self.others[name]
        if name not in self.copies:
            template = {name: self.fit.plan.params[name]}
            self.copies[name] = self.fit.network.read(template)[name].requires_grad_()
        return self.copies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fit.plan.params)

    def __len__(self) -> int:
        return len(self.fit.plan.params)


class _StepState(NamedTuple):
    """State of a fit with autograd terms between two batches."""

    others: State
    """Parameters that are not the model's; they are updated in place."""
    carries: list[State]
    losses: Losses


def _train_with_autograd_terms(plan: FitPlan, stack: LayerStack) -> FitResult:
    """Execute a plan with terms that are not compiled.

    After each forward pass autograd computes their gradients with respect to z_g, the logits and parameters.
    The compiled backward pass starts from the first two.
    """
    fit = _Fit(plan, stack, with_autograd_terms=True)
    others = {n: p.detach().clone() for n, p in plan.params.items() if n not in plan.model.parameters}
    for name, p in others.items():
        p.requires_grad_(name in plan.rates)
    start = _StepState(others, [term.carry for term in (plan.loss, *plan.terms)], no_losses())
    end = iterate_batches(_step_with_autograd_terms, start, fit, plan.model, plan.batches)
    return fit.result({name: p.detach() for name, p in others.items()}, end.carries, end.losses)


def _step_with_autograd_terms(state: _StepState, fit: _Fit, samples: Samples, key: int) -> _StepState:
    plan = fit.plan
    params = _Parameters(fit, state.others)
    size = len(samples.y)
    logits, z_g = fit.network.forward(samples.x, ("logits", "z_g"))
    logits, z_g = logits.view(size, -1), z_g.view(size, *plan.model.feature_shape)
    prbm = {name: fit.cut_vector(name).requires_grad_() for name in plan.extras}
    outputs = {"logits": logits.requires_grad_(), "z_g": z_g.requires_grad_(), **prbm}
    batch = Batch(*samples, z_g, z_g + prbm["prbm"] if prbm else z_g, logits)
    losses, carries = list[Tensor](), list[State]()
    for term, carry in zip((plan.loss, *plan.terms), state.carries, strict=True):
        loss, new = None, carry
        if type(term.apply) not in COMPILED:
            loss, new = term.apply(
                TermContext(plan.model, params, term.const, batch, key, fit.differentiate), carry
            )
        losses += [] if loss is None else [loss]
        carries.append(new)
    trained = {n: p for n, p in (params.copies | state.others).items() if n in plan.rates}
    leaves = outputs | trained
    grads = torch.autograd.grad(sum(losses[1:], losses[0]), list(leaves.values()), allow_unused=True)
    by_name = {name: g.to_dense() for name, g in zip(leaves, grads, strict=True) if g is not None}
    output_grads = {name: by_name.pop(name, None) for name in ("logits", "z_g")}
    fit.network.backward(samples.y, output_grads, fit.divisors(1))
    fit.network.add({n: -plan.rates[n] * g for n, g in by_name.items() if n not in state.others})
    with torch.no_grad():
        for name, p in state.others.items():
            if name in by_name:
                p.sub_(by_name[name], alpha=plan.rates[name])
    return _StepState(state.others, carries, state.losses.add(losses[0], size))


def compute_gradient(
    model: SplitModel, stack: LayerStack, params: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> Gradient:
    """Return the gradient of the cross-entropy; 0 for frozen parameters."""
    network = find_network(
        model, stack, len(y), next(iter(params.values())).dtype, with_cut=False, momentum=False
    )
    network.write(params)
    network.numbers[network.drift_offset : 2 * network.drift_offset].zero_()
    network.net["mode"] = GRADIENT
    network.set_updates({name: -float(name not in model.frozen) for name in network.parts}, {})
    loss = network.train(x, y, len(y), np.ones(1))
    return Gradient(network.read(params, drifts=True), torch.tensor(loss), {})


def proximal_steps(
    model: SplitModel, stack: LayerStack, params: State, x: Tensor, y: Tensor, steps: ProximalSteps
) -> StepsResult:
    """Return the result of these proximal steps on one batch."""
    times, size = steps.steps, len(y)
    network = find_network(
        model, stack, size, next(iter(params.values())).dtype, with_cut=False, momentum=False
    )
    network.write(params)
    network.net["mode"] = DRIFT
    rates = {name: steps.rate * float(name not in model.frozen) for name in network.parts}
    decays = {name: rate * steps.weight for name, rate in rates.items()}
    network.set_updates(rates, decays)
    for name, drift in network.drifts.items():
        torch.mul(steps.anchor[name].reshape(drift.shape), decays[name], out=drift)
    loss = network.train(torch.cat([x] * times), y.repeat(times), size, np.ones(times))
    return StepsResult(network.read(params), torch.tensor(loss / times), {})
