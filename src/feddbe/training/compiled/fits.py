"""Fits: all steps of SGD compiled, or the passes only, with what a method has at the end of them between."""

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
from feddbe.training.compiled.network import Network, find_network
from feddbe.training.compiled.tiles import DRIFT, GRADIENT, MOMENTUM, PLAIN, Array
from feddbe.training.plan import (
    FitPlan,
    FitResult,
    Losses,
    Samples,
    check_batches,
    check_values,
    iterate_batches,
    no_losses,
)
from feddbe.training.terms import (
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

CHUNK = 64
"""Batches that are made numbers at once."""
COMPILED = (MeanRegularizer, Prox)
"""Terms that a step has in it."""
FEATURES = 1 << 26
"""At most so many numbers are kept of a body that stays as it is."""


def train(plan: FitPlan, stack: LayerStack, features: Dataset | None) -> FitResult:
    """`features`: what the body gives for the plan's samples, if it stays as it is."""
    if needs_autograd(plan):
        return _train_open(plan, stack)
    if features is not None:
        rows = np.arange(len(features))
        plan = replace(plan, batches=replace(plan.batches, dataset=features, indices=rows))
        stack = LayerStack(stack.cut_shape, stack.steps[stack.cut :], 0, stack.cut_shape)
    fit, losses = _Fit(plan, stack), no_losses()
    for x, y, size in plan.batches.iterate():
        for some, labels in _chunks(x, y, size * CHUNK):
            loss = fit.train(plan.batches.dataset.kernel_inputs(some), labels, size)
            losses = losses.add(torch.tensor(loss, dtype=torch.float64), labels.shape[0])
        check_batches(losses, plan.batches)
    return fit.fitted({}, [term.carry for term in (plan.loss, *plan.terms)], losses)


def is_body_frozen(plan: FitPlan, stack: LayerStack) -> bool:
    """Whether it is worth while to have it pass once only: of an epoch it is the most."""
    body = {name for step in stack.steps[: stack.cut] for name in step.names.values()}
    stays = 0 < stack.cut < len(stack.steps) and not any(plan.rates.get(name) for name in body)
    numbers = len(plan.batches.indices) * math.prod(stack.cut_shape)
    return stays and plan.batches.epochs > 1 and numbers <= FEATURES and not needs_autograd(plan)


def find_open_terms(plan: FitPlan) -> list[Term]:
    """The loss and terms that are not compiled."""
    loss = () if plan.loss is CROSS_ENTROPY else (plan.loss,)
    return [*loss, *(term for term in plan.terms if type(term.apply) not in COMPILED)]


def needs_autograd(plan: FitPlan) -> bool:
    """Whether more is trained than what is compiled."""
    return bool(find_open_terms(plan)) or plan.params.keys() != plan.model.parameters.keys()


def _chunks(x: Tensor, y: Tensor, size: int) -> Iterable[tuple[Tensor, Tensor]]:
    """So many samples at a time; most clients have no more."""
    if y.shape[0] <= size:
        return [(x, y)]
    return zip(torch.split(x, size), torch.split(y, size), strict=True)


class _Fit:
    """A fit under way, in the network's own memory. `open`: with room for what terms add."""

    def __init__(self, plan: FitPlan, stack: LayerStack, *, open: bool = False) -> None:
        self.plan, self.stack = plan, stack
        self.term = next((t for t in plan.terms if isinstance(t.apply, MeanRegularizer)), None)
        size = min(plan.batches.size, len(plan.batches.indices))
        translated = bool(plan.extras) or self.term is not None or open
        dtype = next(iter(plan.params.values())).dtype
        momentum = plan.optimizer.momentum > 0
        self.network = network = find_network(
            plan.model, stack, size, dtype, translated=translated, momentum=momentum
        )
        network.write(plan.params)
        _set_moves(network, plan)
        self.pull = (
            self.term.apply
            if self.term and isinstance(self.term.apply, MeanRegularizer)
            else MeanRegularizer(0.0)
        )
        self.weight = 0.0
        if translated:
            const, carry = (self.term.const, self.term.carry) if self.term else ({}, {})
            self.weight = float(carry.get("weight", 0.0))
            vectors = {"prbm": plan.extras.get("prbm"), "mean": carry.get("r"), "goal": const.get("mean")}
            network.set_vectors(vectors | ({"prbm_step": None} if momentum else {}))
            network.net["prbm_rate"], network.net["mu"] = plan.rates.get("prbm", 0.0), self.pull.mu
            slope = self.pull.slope(math.prod(plan.model.feature_shape), size)
            network.net["slope"] = slope if "mean" in const else 0.0
            network.net["more"] = network.more if open else 0

    def train(self, x: Tensor, y: Tensor, size: int) -> float:
        """Steps on these batches; the mean of their cross-entropies."""
        batches = y.shape[0] // size
        return self.network.train(x, y, size, self.divisors(batches)) / batches

    def divisors(self, batches: int) -> Array:
        """What MR divides r by after each of the next batches."""
        weights = self.pull.weights(self.weight, batches)
        self.weight = float(weights[-1])
        return weights if self.pull.corrected and self.pull.mu else np.ones(batches)

    def fitted(self, others: State, carries: list[State], losses: Losses) -> FitResult:
        """What it leaves, if these are numbers; `others`: parameters that are not the model's."""
        params = self.plan.params | self.network.read(self.plan.params) | others
        extras = {name: self.at_cut("prbm") for name in self.plan.extras}
        if not self.network.finite() or others:
            check_values(params | extras, self.plan.batches)
        terms = (self.plan.loss, *self.plan.terms)
        ends = [self._mean() if t is self.term else c for t, c in zip(terms, carries, strict=True)]
        return FitResult(params, extras, ends, losses)

    def _mean(self) -> State:
        assert self.term
        return {"r": self.at_cut("mean"), "weight": self.term.carry["weight"].new_tensor(self.weight)}

    def differentiate(
        self, model: SplitModel, params: Mapping[str, Tensor], statistics: State, x: Tensor, y: Tensor
    ) -> Gradient:
        """In a network of its own."""
        return gradient(model, self.stack, params, x, y)._replace(statistics=statistics)

    def at_cut(self, name: str) -> Tensor:
        found = self.network.vectors[name].clone(memory_format=torch.contiguous_format)
        return found.view(self.plan.model.feature_shape)


def _set_moves(network: Network, plan: FitPlan) -> None:
    """How each parameter moves: its rate, and what it moves by beside the gradient."""
    weight, anchor = next(
        ((t.apply.weight, t.const) for t in plan.terms if isinstance(t.apply, Prox)), (0.0, {})
    )
    to_zero = dict.fromkeys(plan.params, plan.optimizer.weight_decay)
    drifts = bool(plan.correction or anchor or plan.optimizer.weight_decay)
    network.net["momentum"] = momentum = plan.optimizer.momentum
    network.net["mode"] = MOMENTUM if momentum else DRIFT if drifts else PLAIN
    rates = {name: plan.rates.get(name, 0.0) for name in network.parts}
    to_anchor = {name: rate * weight if name in anchor else 0.0 for name, rate in rates.items()}
    network.set_moves(rates, {name: to_anchor[name] + rates[name] * to_zero.get(name, 0.0) for name in rates})
    if momentum:
        network.numbers[2 * network.aside : 3 * network.aside].zero_()
    if drifts or momentum:
        for name, drift in network.beside.items():
            drift.zero_()
            if name in anchor:
                drift.add_(anchor[name].reshape(drift.shape), alpha=to_anchor[name])
            if name in plan.correction:
                drift.sub_(plan.correction[name].reshape(drift.shape), alpha=rates[name])


class _Parameters(Mapping[str, Tensor]):
    """Those of a fit under way. The model's are copied out of the network when a term asks for them."""

    def __init__(self, fit: _Fit, others: State) -> None:
        self.fit, self.others, self.asked = fit, others, dict[str, Tensor]()

    def __getitem__(self, name: str) -> Tensor:
        if name in self.others:
            return self.others[name]
        if name not in self.asked:
            like = {name: self.fit.plan.params[name]}
            self.asked[name] = self.fit.network.read(like)[name].requires_grad_()
        return self.asked[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fit.plan.params)

    def __len__(self) -> int:
        return len(self.fit.plan.params)


class _Moving(NamedTuple):
    """An open fit under way."""

    others: State
    """Parameters that are not the model's; they move in place."""
    carries: list[State]
    losses: Losses


def _train_open(plan: FitPlan, stack: LayerStack) -> FitResult:
    """With terms of the method's own: after each pass autograd finds what they add to the gradients of z_g
    and the logits, from where the compiled pass backwards goes on, and those of parameters they know."""
    fit = _Fit(plan, stack, open=True)
    others = {n: p.detach().clone() for n, p in plan.params.items() if n not in plan.model.parameters}
    for name, p in others.items():
        p.requires_grad_(name in plan.rates)
    start = _Moving(others, [term.carry for term in (plan.loss, *plan.terms)], no_losses())
    end = iterate_batches(_open_step, start, fit, plan.model, plan.batches)
    return fit.fitted({name: p.detach() for name, p in others.items()}, end.carries, end.losses)


def _open_step(now: _Moving, fit: _Fit, samples: Samples, key: int) -> _Moving:
    plan, params, size = fit.plan, _Parameters(fit, now.others), len(samples.y)
    logits, z_g = fit.network.forward(samples.x, ("logits", "z_g"))
    logits, z_g = logits.view(size, -1), z_g.view(size, *plan.model.feature_shape)
    prbm = {name: fit.at_cut(name).requires_grad_() for name in plan.extras}
    ends = {"logits": logits.requires_grad_(), "z_g": z_g.requires_grad_(), **prbm}
    batch = Batch(*samples, z_g, z_g + prbm["prbm"] if prbm else z_g, logits)
    losses, carries = list[Tensor](), list[State]()
    for term, carry in zip((plan.loss, *plan.terms), now.carries, strict=True):
        loss, new = None, carry
        if type(term.apply) not in COMPILED:
            loss, new = term.apply(
                TermContext(plan.model, params, term.const, batch, key, fit.differentiate), carry
            )
        losses += [] if loss is None else [loss]
        carries.append(new)
    moving = {n: p for n, p in (params.asked | now.others).items() if n in plan.rates}
    leaves = ends | moving
    grads = torch.autograd.grad(sum(losses[1:], losses[0]), list(leaves.values()), allow_unused=True)
    found = {name: g.to_dense() for name, g in zip(leaves, grads, strict=True) if g is not None}
    slopes = {name: found.pop(name, None) for name in ("logits", "z_g")}
    fit.network.back(samples.y, slopes, fit.divisors(1))
    fit.network.add({n: -plan.rates[n] * g for n, g in found.items() if n not in now.others})
    with torch.no_grad():
        for name, p in now.others.items():
            if name in found:
                p.sub_(found[name], alpha=plan.rates[name])
    return _Moving(now.others, carries, now.losses.add(losses[0], size))


def gradient(
    model: SplitModel, stack: LayerStack, params: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> Gradient:
    """Of the cross-entropy, 0 for what is frozen."""
    network = find_network(
        model, stack, len(y), next(iter(params.values())).dtype, translated=False, momentum=False
    )
    network.write(params)
    network.numbers[network.aside : 2 * network.aside].zero_()
    network.net["mode"] = GRADIENT
    network.set_moves({name: -float(name not in model.frozen) for name in network.parts}, {})
    loss = network.train(x, y, len(y), np.ones(1))
    return Gradient(network.read(params, aside=True), torch.tensor(loss), {})


def proximal_steps(
    model: SplitModel, stack: LayerStack, params: State, x: Tensor, y: Tensor, steps: ProximalSteps
) -> StepsResult:
    times, size = steps.steps, len(y)
    network = find_network(
        model, stack, size, next(iter(params.values())).dtype, translated=False, momentum=False
    )
    network.write(params)
    network.net["mode"] = DRIFT
    rates = {name: steps.rate * float(name not in model.frozen) for name in network.parts}
    pulls = {name: rate * steps.pull for name, rate in rates.items()}
    network.set_moves(rates, pulls)
    for name, drift in network.beside.items():
        torch.mul(steps.anchor[name].reshape(drift.shape), pulls[name], out=drift)
    loss = network.train(torch.cat([x] * times), y.repeat(times), size, np.ones(times))
    return StepsResult(network.read(params), torch.tensor(loss / times), {})
