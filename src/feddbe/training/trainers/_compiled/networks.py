"""Networks with what goes into them and comes out again: parameters, and batches."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from feddbe.errors import BadInput
from feddbe.models.split import SplitModel
from feddbe.state import State
from feddbe.training.trainers._compiled import kernels
from feddbe.training.trainers._compiled.layout import Layout
from feddbe.training.trainers._compiled.records import Array
from feddbe.training.trainers._compiled.stack import Stack

__all__ = ["Inputs", "Network", "find"]

KEPT = 6
"""Of a model, for so many sizes of a batch."""


class Inputs(NamedTuple):
    """A batch as it is compiled for: images, or texts."""

    x: Array
    texts: Array


class Network(Layout):
    """A stack of layers in memory of its own. What does not change from fit to fit is looked up once: a small
    client is through with its step before Python has made a dozen views."""

    def __init__(
        self, stack: Stack, size: int, dtype: torch.dtype, words: int, *, translated: bool, momentum: bool
    ) -> None:
        super().__init__(stack, size, dtype, words, translated=translated, momentum=momentum)
        self.views = {name: part.view(self.numbers) for name, part in self.parts.items()}
        """The parameters."""
        self.beside = {name: part.view(self.numbers, self.aside) for name, part in self.parts.items()}
        """Their drifts or gradients."""
        names = ("prbm", "prbm_step", "mean", "goal") if translated else ()
        self.vectors = {name: self.at_cut(name) for name in names}
        ends = {"logits": len(self.steps)} | ({"z_g": stack.cut, "z": stack.cut} if translated else {})
        self.passing = {name: self.between(end, int(self.net[name])) for name, end in ends.items()}
        """Of a whole batch, after a pass."""
        after = {"logits": int(self.net["logits_grad"])} | ({"z_g": self.more} if translated else {})
        self.slopes = {name: self.between(ends[name], at) for name, at in after.items()}
        """What a pass backwards begins with: the gradient of the logits, and what z_g's has more."""
        self._targets, self._shapes = [*self.views.values()], [view.shape for view in self.views.values()]
        self._written, self._versions = list[Tensor](), list[tuple[int, int]]()
        """What was written last, if it is still there: the tensors, each with the number of its changes."""
        self._moves: object = None
        self._images = np.zeros((0, 1, 1, 1), self.room.numbers.dtype)
        self._texts = np.zeros((0, 1), np.int32)
        self._last = Inputs(self._images, self._texts)
        """What went forward."""

    def write(self, params: Mapping[str, Tensor]) -> None:
        """Unless they are there already: clients evaluate one shared model, one after the other."""
        given = [params[name] for name in self.views]
        known = not any(p.is_inference() for p in given)  # of those nobody counts what is written into them
        versions = [(id(p), p._version) for p in given] if known else []
        if versions and versions == self._versions:
            return
        shaped = [p if p.dim() == len(s) else p.reshape(s) for p, s in zip(given, self._shapes, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(self._targets, shaped)
        kernels.turn(self.room, self.steps)
        self._written, self._versions = given, versions

    def set_vectors(self, values: Mapping[str, Tensor | None]) -> None:
        """At the cut; None: zeros."""
        for name, value in values.items():
            view = self.vectors[name]
            view.zero_() if value is None else view.copy_(value.reshape(view.shape))

    def read(self, params: Mapping[str, Tensor], *, aside: bool = False) -> State:
        """New tensors like `params`; `aside`: of what lies beside them."""
        views = self.beside if aside else self.views
        return {
            name: views[name].clone(memory_format=torch.contiguous_format).view(p.shape)
            for name, p in params.items()
            if name in views
        }

    def finite(self) -> bool:
        """Whether all parameters are numbers, PRBM's vector too: between them are zeros."""
        every = [self.numbers[: self.aside], *(v for name, v in self.vectors.items() if name == "prbm")]
        return all(math.isfinite(end) for some in every for end in torch.aminmax(some))

    def set_moves(self, rates: Mapping[str, float], pulls: Mapping[str, float]) -> None:
        if (moves := (dict(rates), dict(pulls))) != self._moves:
            super().set_moves(rates, pulls)
            self._moves = moves

    def train(self, x: Tensor, y: Tensor, size: int, divisors: Array) -> float:
        """`kernels.train` on these samples; what moves is no longer what was written."""
        return self._train(self._inputs(x), y, size, divisors, begun=False)

    def back(self, y: Tensor, slopes: Mapping[str, Tensor | None], divisors: Array) -> None:
        """The rest of a step on the batch that went `forward` last, with these gradients at its end; None:
        zeros."""
        for name, slope in slopes.items():
            view = self.slopes[name][: len(y)]
            view.zero_() if slope is None else view.copy_(slope.reshape(view.shape))
        self._train(self._last, y, len(y), divisors, begun=True)

    def _train(self, inputs: Inputs, y: Tensor, size: int, divisors: Array, *, begun: bool) -> float:
        self._written, self._versions = [], []
        return float(
            kernels.train(self.room, self.steps, self.nets, *inputs, y.numpy(), size, divisors, begun)
        )

    def add(self, changes: Mapping[str, Tensor]) -> None:
        """To parameters, and to PRBM's vector."""
        for name, change in changes.items():
            view = self.views[name] if name in self.views else self.vectors[name]
            view.add_(change.reshape(view.shape))
        if changes:
            kernels.turn(self.room, self.steps)

    def forward(self, x: Tensor, names: Sequence[str]) -> list[Tensor]:
        """Copies of what these are of one batch, which is no larger than the network's."""
        size, self._last = x.shape[0], self._inputs(x)
        kernels.forward(self.room, self.steps, self.nets, *self._last, size)
        return [self.passing[name][:size].clone(memory_format=torch.contiguous_format) for name in names]

    def _inputs(self, x: Tensor) -> Inputs:
        if self.stack.steps[0].kind == "words":
            low, high = (int(word) for word in torch.aminmax(x)) if x.shape[0] else (0, 0)
            words = int(self.steps[0]["inputs"])
            if low < 0 or high >= words:  # machine code would look no further
                raise BadInput(f"a text has word {low if low < 0 else high}, the model has {words} words")
            return Inputs(self._images, x.to(torch.int32).contiguous().numpy())
        image = x.to(self.numbers.dtype).reshape(x.shape[0], *(*self.stack.shape, 1, 1)[:3])
        return Inputs(image.contiguous().numpy(), self._texts)


class _Kept(threading.local):
    """Those of this thread: a network is room to work in."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[SplitModel, dict[object, Network]] = WeakKeyDictionary()


_kept = _Kept()


def find(
    model: SplitModel, stack: Stack, size: int, dtype: torch.dtype, *, translated: bool, momentum: bool
) -> Network:
    """The network of the model, or of its last layers, for batches of this size."""
    known, key = _kept.of.setdefault(model, {}), (len(stack.steps), size, dtype, translated, momentum)
    if key not in known:
        if len(known) >= KEPT:
            del known[next(iter(known))]
        words = [len(model.parameters[step.names["weight"]]) for step in stack.steps if step.kind == "words"]
        known[key] = Network(stack, size, dtype, *words or [0], translated=translated, momentum=momentum)
    return known[key]
