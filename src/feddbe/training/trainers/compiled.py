"""Stacks of convolutions and linear layers, and word vectors, in machine code (numba).

A step of ten samples is little arithmetic, and calling torch for it costs more than it does. So the step is
written out for any row of Conv2d (stride 1), MaxPool2d, ReLU, Flatten and Linear, `MeanEmbedding` first,
with cross-entropy, PRBM and MR at any cut, frozen layers, a rate for each parameter, and what is linear in
the parameters: SCAFFOLD's correction, the proximal pull. Up to rounding it gives autograd's numbers, in
float32 or float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from feddbe.errors import one_line
from feddbe.models.split import Forward, SplitModel
from feddbe.state import State
from feddbe.training.plan import FitPlan, Fitted, Samples, check, check_values, differentiate, no_losses
from feddbe.training.terms import CROSS_ENTROPY, MeanPull, Prox
from feddbe.training.trainers._compiled.stack import Refused, Stack, read

if TYPE_CHECKING:
    from feddbe.training.trainers._compiled.networks import Network

__all__ = [
    "RANK", "Predictor", "available", "gradient", "refuses", "refuses_layers", "refuses_machine",
    "refuses_model", "refuses_types", "train",
]  # fmt: skip

RANK = 10
CHUNK = 64
"""Batches that are made numbers at once."""
PREDICT = 32
"""Samples that are predicted at once: a part of what `Local.predict` gives, small enough for the cache."""


def available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def refuses(plan: FitPlan) -> str:
    if reason := refuses_model(plan.model):
        return reason
    if plan.params.keys() != plan.model.parameters.keys() or not plan.extras.keys() <= {"prbm"}:
        return "the method trains more than the model and PRBM"
    if not replace(plan.optimiser, weight_decay=0.0).plain:
        return "the optimiser is not plain SGD"
    if plan.loss is not CROSS_ENTROPY:
        return "the method has a loss of its own"
    kinds = [type(term.apply) for term in plan.terms]
    if len(set(kinds)) < len(kinds) or not {*kinds} <= {MeanPull, Prox}:
        return "the method has a term of its own in the loss"
    return refuses_types([*plan.params.values(), *plan.extras.values(), *plan.correction.values()])


def refuses_types(tensors: Iterable[Tensor]) -> str:
    tensors = list(tensors)
    if any(t.device.type != "cpu" for t in tensors):
        return "it is on a GPU"
    fits = {t.dtype for t in tensors} in ({torch.float32}, {torch.float64})
    return "" if fits else "parameters are not all float32, or all float64"


def refuses_model(model: SplitModel) -> str:
    """Why it does not take this model, in any plan."""
    return refuses_layers(model) or refuses_machine(model)


def refuses_layers(model: SplitModel) -> str:
    """Why it does not take this model, on any machine."""
    found = _stack(model)
    return found if isinstance(found, str) else refuses_types(model.parameters.values())


def refuses_machine(model: SplitModel) -> str:
    """Why it does not work here. At first it is compiled, and tried once."""
    stack = _stack(model)
    if model not in _tried and isinstance(stack, Stack):
        _tried[model] = _try(model, stack)
    return _tried[model]


def _try(model: SplitModel, stack: Stack) -> str:
    """One gradient and pass against autograd's: a tool chain can be missing or broken."""
    if not available():
        return "numba is not installed"
    generator, (first, *_) = torch.Generator().manual_seed(0), model.parameters.values()
    shape = (3, *model.input_shape)
    if stack.steps[0].kind == "words":
        x = torch.randint(len(first), shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator, dtype=first.dtype)
    samples = Samples(x, torch.arange(len(x)) % model.classes)
    try:
        found, _ = gradient(model, model.parameters, samples)
        found["logits"] = Predictor(model, model.parameters, None)(x).logits
    except Exception as error:  # of numba, LLVM or the system
        return f"numba does not work here ({one_line(error)})"
    wanted = differentiate(model, model.parameters, model.buffers, samples).of
    wanted["logits"] = model.forward(model.parameters, x).logits.detach()
    scale = max(float(g.abs().max()) for g in wanted.values())
    apart = max(float((found[name] - g).abs().max()) for name, g in wanted.items())
    return "" if apart <= 1e-3 * scale else "its first step is not autograd's: numba is broken here"


_tried: WeakKeyDictionary[SplitModel, str] = WeakKeyDictionary()
_stacks: WeakKeyDictionary[SplitModel, Stack | str] = WeakKeyDictionary()


def _stack(model: SplitModel) -> Stack | str:
    """The model's layers, or why not."""
    if model not in _stacks:
        try:
            _stacks[model] = read(model)
        except Refused as reason:
            _stacks[model] = str(reason)
    return _stacks[model]


def _network(model: SplitModel, size: int, dtype: torch.dtype, *, translated: bool) -> Network:
    from feddbe.training.trainers._compiled import networks

    stack = _stack(model)
    assert isinstance(stack, Stack)
    return networks.find(model, stack, size, dtype, translated=translated)


def train(plan: FitPlan) -> Fitted:
    fit, losses = _Fit(plan), no_losses()
    for x, y, size in plan.batches.gathered():
        for some, labels in _chunks(x, y, size * CHUNK):
            loss = fit.train(plan.batches.dataset.numbers(some), labels, size)
            losses = losses.add(torch.tensor(loss, dtype=torch.float64), labels.shape[0])
        check(losses, plan.batches)
    params, extras = fit.values()
    if not fit.network.finite():
        check_values(params | extras, plan.batches)
    return Fitted(params, extras, [plan.loss.carry, *fit.carries()], losses)


def _chunks(x: Tensor, y: Tensor, size: int) -> Iterable[tuple[Tensor, Tensor]]:
    """So many samples at a time; most clients have no more."""
    if y.shape[0] <= size:
        return [(x, y)]
    return zip(torch.split(x, size), torch.split(y, size), strict=True)


class _Fit:
    """A fit under way, in the network's own memory."""

    def __init__(self, plan: FitPlan) -> None:
        self.plan = plan
        self.term = next((t for t in plan.terms if isinstance(t.apply, MeanPull)), None)
        size = min(plan.batches.size, len(plan.batches.rows))
        translated = bool(plan.extras) or self.term is not None
        dtype = next(iter(plan.params.values())).dtype
        self.network = network = _network(plan.model, size, dtype, translated=translated)
        network.write(plan.params)
        _set_moves(network, plan)
        self.pull = self.term.apply if self.term and isinstance(self.term.apply, MeanPull) else MeanPull(0.0)
        self.weight, self.distance, self.batches = 0.0, 0.0, 0
        if translated:
            const, carry = (self.term.const, self.term.carry) if self.term else ({}, {})
            self.weight = float(carry.get("weight", 0.0))
            vectors = {"prbm": plan.extras.get("prbm"), "mean": carry.get("r"), "goal": const.get("mean")}
            network.set_vectors(vectors)
            network.net["prbm_rate"], network.net["mu"] = plan.rates.get("prbm", 0.0), self.pull.mu
            slope = self.pull.slope(math.prod(plan.model.feature_shape), size)
            network.net["slope"] = slope if "mean" in const else 0.0

    def train(self, x: Tensor, y: Tensor, size: int) -> float:
        """Steps on these batches; the mean of their cross-entropies."""
        batches = y.shape[0] // size
        weights = self.pull.weights(self.weight, batches)
        divisors = weights if self.pull.corrected and self.pull.mu else np.ones(batches)
        loss, distance = self.network.train(x, y, size, divisors)
        self.weight, self.distance = float(weights[-1]), self.distance + distance
        self.batches += batches
        return float(loss / batches)

    def values(self) -> tuple[State, State]:
        """New parameters and extras."""
        prbm = {name: self._at_cut("prbm") for name in self.plan.extras}
        return self.network.read(self.plan.params), prbm

    def carries(self) -> list[State]:
        """Of each term."""
        return [self._mean() if term is self.term else term.carry for term in self.plan.terms]

    def _mean(self) -> State:
        assert self.term
        old = self.term.carry
        new = {"r": self._at_cut("mean"), "weight": old["weight"].new_tensor(self.weight)}
        if "size" in old:
            new |= {"size": old["size"] + self.distance / 2, "batches": old["batches"] + self.batches}
        return new

    def _at_cut(self, name: str) -> Tensor:
        found = self.network.vectors[name].clone(memory_format=torch.contiguous_format)
        return found.view(self.plan.model.feature_shape)


def _set_moves(network: Network, plan: FitPlan) -> None:
    """How each parameter moves: its rate, and what it moves by beside the gradient."""
    from feddbe.training.trainers._compiled.records import DRIFT, PLAIN

    weight, anchor = next(
        ((t.apply.weight, t.const) for t in plan.terms if isinstance(t.apply, Prox)), (0.0, {})
    )
    to_zero = dict.fromkeys(plan.params, plan.optimiser.weight_decay)
    drifts = bool(plan.correction or anchor or plan.optimiser.weight_decay)
    network.net["mode"] = DRIFT if drifts else PLAIN
    rates = {name: plan.rates.get(name, 0.0) for name in network.parts}
    to_anchor = {name: rate * weight if name in anchor else 0.0 for name, rate in rates.items()}
    network.set_moves(rates, {name: to_anchor[name] + rates[name] * to_zero.get(name, 0.0) for name in rates})
    if drifts:
        for name, drift in network.beside.items():
            drift.zero_()
            if name in anchor:
                drift.add_(anchor[name].reshape(drift.shape), alpha=to_anchor[name])
            if name in plan.correction:
                drift.sub_(plan.correction[name].reshape(drift.shape), alpha=rates[name])


def gradient(model: SplitModel, params: Mapping[str, Tensor], samples: Samples) -> tuple[State, float]:
    """The gradient of the cross-entropy, 0 for what is frozen, and its value."""
    from feddbe.training.trainers._compiled.records import GRADIENT

    dtype, size = next(iter(params.values())).dtype, len(samples.y)
    network = _network(model, size, dtype, translated=False)
    network.write(params)
    network.numbers[network.aside : 2 * network.aside].zero_()
    network.net["mode"] = GRADIENT
    network.set_moves({name: -float(name not in model.frozen) for name in network.parts}, {})
    loss, _ = network.train(samples.x, samples.y, size, np.ones(1))
    return network.read(params, aside=True), loss


class Predictor:
    """Forward passes at these parameters and this vector of PRBM."""

    def __init__(self, model: SplitModel, params: Mapping[str, Tensor], prbm: Tensor | None) -> None:
        dtype = params[next(iter(model.parameters))].dtype
        self.model, self.params = model, params
        self.network = _network(model, PREDICT, dtype, translated=True)
        self.network.write(params)
        self.network.set_vectors({"prbm": prbm})
        self.network.net["mu"] = 0.0

    def __call__(self, x: Tensor) -> Forward:
        return Forward(*self._pass(x, Forward._fields))

    def logits(self, x: Tensor) -> Tensor:
        """Only these."""
        (logits,) = self._pass(x, ("logits",))
        return logits

    def _pass(self, x: Tensor, names: Sequence[str]) -> list[Tensor]:
        if x.shape[0] <= PREDICT:
            return self._batch(x, names)
        parts = [self._batch(some, names) for some in torch.split(x, PREDICT)]
        return [torch.cat(some) for some in zip(*parts, strict=True)]

    def _batch(self, x: Tensor, names: Sequence[str]) -> list[Tensor]:
        shapes = {"logits": (self.model.classes,)}
        found = zip(names, self.network.forward(x, names), strict=True)
        return [t.view(x.shape[0], *shapes.get(name, self.model.feature_shape)) for name, t in found]
