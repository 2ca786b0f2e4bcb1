"""Networks with what goes into them and comes out again: parameters, and batches."""

from __future__ import annotations

import threading
from collections.abc import Mapping
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

KEPT = 4
"""Of a model, for so many sizes of a batch."""


class Inputs(NamedTuple):
    """A batch as it is compiled for: images, or texts."""

    x: Array
    texts: Array


class Network(Layout):
    """A stack of layers in memory of its own."""

    def write(self, params: Mapping[str, Tensor]) -> None:
        for name, part in self.parts.items():
            part.view(self.numbers).copy_(params[name].detach().reshape(part.shape))
        kernels.turn(self.room, self.steps)

    def read(self, params: Mapping[str, Tensor], aside: int = 0) -> State:
        """New tensors like `params`; `aside`: of what lies beside them."""
        found = {}
        for name, part in self.parts.items():
            found[name] = torch.empty_like(params[name], memory_format=torch.contiguous_format)
            found[name].view(part.shape).copy_(part.view(self.numbers, aside))
        return {name: found[name] for name in params if name in found}

    def inputs(self, x: Tensor) -> Inputs:
        if self.stack.steps[0].kind == "words":
            low, high = (int(word) for word in torch.aminmax(x)) if len(x) else (0, 0)
            words = int(self.steps[0]["inputs"])
            if low < 0 or high >= words:  # machine code would look no further
                raise BadInput(f"a text has word {low if low < 0 else high}, the model has {words} words")
            nothing = np.zeros((0, 1, 1, 1), self.room.numbers.dtype)
            return Inputs(nothing, x.to(torch.int32).contiguous().numpy())
        image = x.to(self.numbers.dtype).reshape(len(x), *(*self.stack.shape, 1, 1)[:3])
        return Inputs(image.contiguous().numpy(), np.zeros((0, 1), np.int32))


class _Kept(threading.local):
    """Those of this thread: a network is room to work in."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[SplitModel, dict[object, Network]] = WeakKeyDictionary()


_kept = _Kept()


def find(model: SplitModel, stack: Stack, size: int, dtype: torch.dtype, *, translated: bool) -> Network:
    """The model's network for batches of this size, made if there is none yet."""
    known, key = _kept.of.setdefault(model, {}), (size, dtype, translated)
    if key not in known:
        if len(known) >= KEPT:
            del known[next(iter(known))]
        words = [len(model.parameters[step.names["weight"]]) for step in stack.steps if step.kind == "words"]
        known[key] = Network(stack, size, dtype, *words or [0], translated=translated)
    return known[key]
