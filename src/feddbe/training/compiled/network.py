"""Where everything of a network lies in the one array, for batches of one size."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from feddbe.errors import InvalidInputError
from feddbe.models.split_model import SplitModel
from feddbe.state import State
from feddbe.training.compiled import kernels
from feddbe.training.compiled.backend import LayerStack, LayerStep
from feddbe.training.compiled.tiles import (
    CONV,
    LANES,
    LINEAR,
    NET,
    POOL,
    ROWS,
    STEP,
    TILE_ROWS,
    WIDTH,
    WORDS,
    Array,
    Record,
    Room,
)

KINDS = {"words": WORDS, "conv": CONV, "pool": POOL, "linear": LINEAR}
GAP = 64
"""Numbers after each piece: what is read in whole vectors may end behind it."""
LINE = 64
"""Bytes."""


def _up(n: int, to: int = WIDTH) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Part:
    """A parameter: where it lies, and its shape and strides there."""

    at: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, numbers: Tensor, aside: int = 0) -> Tensor:
        return numbers.as_strided(self.shape, self.strides, self.at + aside)


@dataclass(frozen=True)
class Frame:
    """How an image lies that a layer takes, with its zeros around it."""

    channels: int
    height: int
    width: int
    stored: int
    """Numbers of a pixel."""
    left: int = 0
    right: int = 0
    above: int = 0
    below: int = 0

    @property
    def row(self) -> int:
        return (self.width + self.left + self.right) * self.stored

    @property
    def size(self) -> int:
        return (self.height + self.above + self.below) * self.row

    @property
    def corner(self) -> int:
        return self.above * self.row + self.left * self.stored

    def part(self, at: int) -> Part:
        """One image at `at`, as (channels, height, width)."""
        shape = (self.channels, self.height, self.width)
        return Part(at + self.corner, shape, (1, self.row, self.stored))

    def batch(self, at: int, size: int) -> Part:
        one = self.part(at)
        return Part(one.at, (size, *one.shape), (self.size, *one.strides))


def allocate(n: int, number: np.dtype[Any]) -> Array:
    """Return n zeros that begin at a cache line: a quarter faster than at any other address."""
    raw = np.zeros(n * number.itemsize + LINE, np.uint8)
    start = -raw.ctypes.data % LINE
    return raw[start : start + n * number.itemsize].view(number)


def _image(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(channels, height, width); features are channels of one pixel."""
    channels, height, width = (*shape, 1, 1)[:3]
    return channels, height, width


def _frames(stack: LayerStack) -> list[Frame]:
    """Of what each step takes, and of the logits."""
    image = _image(stack.shape)
    frames = list[Frame]()
    for step in stack.steps:
        narrow = step.kind == "conv" and not frames  # an image has few channels
        frames.append(Frame(*image, image[0] if narrow else _up(image[0]), *step.padding))
        if len(step.given) == 3 or step.kind != "pool":  # ReLU leaves an image as it lies, flat or not
            image = _image(step.given)
    return [*frames, Frame(*image, _up(image[0]))]


class Layout:
    """A stack of layers laid out for batches of `size`; `translated`: with room for PRBM and MR, `momentum`:
    for the last step."""

    def __init__(
        self,
        stack: LayerStack,
        size: int,
        dtype: torch.dtype,
        words: int,
        *,
        translated: bool,
        momentum: bool,
    ) -> None:
        self.stack, self.size, self.rows = stack, size, _up(size, ROWS)
        self.frames = _frames(stack)
        self.parts: dict[str, Part] = {}
        self.steps, self.nets = np.zeros(len(stack.steps), STEP), np.zeros(1, NET)
        self.net: Record = self.nets[0]
        self._top, self._table, self._length = GAP, list[Array](), 0
        self._most = {"chosen": 0, "block": 0, "list": 0, "counts": 0}
        for step, record, frame in zip(stack.steps, self.steps, self.frames, strict=False):
            self._parameters(step, record, frame, words)
        self.aside = self._top
        self.net["aside"] = self.aside
        self._top += self.aside * (1 + momentum)  # as much again, for drifts or gradients
        self._activations(translated=translated)
        number, most = torch.empty((), dtype=dtype).numpy().dtype, self._most
        self.room = Room(
            allocate(self._top, number),
            allocate(self._length, np.dtype(np.int64)),
            allocate(most["chosen"] + GAP, np.dtype(np.uint8)),
            allocate(most["block"] + GAP, number),
            allocate(most["list"] + GAP, number),
            allocate(most["list"] + GAP, np.dtype(np.int32)),
            allocate(most["counts"] + GAP, np.dtype(np.int64)),
        )
        np.concatenate(self._table, out=self.room.table)
        self.numbers = torch.from_numpy(self.room.numbers)
        if translated:
            self.at_cut("live").fill_(1)

    def at_cut(self, name: str) -> Tensor:
        """A vector at the cut, such as PRBM's, in the shape that the model has there."""
        part = self.frames[self.stack.cut].part(int(self.net[name]))
        return part.view(self.numbers)

    def between(self, boundary: int, at: int) -> Tensor:
        """What lies at `at` as a batch, between two steps."""
        return self.frames[boundary].batch(at, self.size).view(self.numbers)

    def set_moves(self, rates: Mapping[str, float], pulls: Mapping[str, float]) -> None:
        """A rate for each parameter, 0 if it stays, and its pull; and so which gradients are wanted."""
        wanted = [len(self.steps), *([int(self.net["cut"])] if self.net["cut"] >= 0 else [])]
        for i, (step, record) in enumerate(zip(self.stack.steps, self.steps, strict=True)):
            for own in ("weight", "bias"):
                name = step.names.get(own, "")
                record[f"{own}_rate"], record[f"{own}_pull"] = rates.get(name, 0.0), pulls.get(name, 0.0)
                if rates.get(name):
                    wanted.append(i + 1)  # of what it gives
        self.net["first"] = max(0, min(wanted) - 1)
        self.steps["back"] = np.arange(len(self.steps)) >= min(wanted)

    def _room(self, n: int) -> int:
        start = self._top
        self._top += _up(n, 16) + GAP
        return start

    def _put(self, offsets: Array) -> int:
        """Into the table."""
        start = self._length
        self._table.append(np.asarray(offsets, np.int64).ravel())
        self._length += self._table[-1].size
        return start

    def _need(self, **sizes: int) -> None:
        for name, size in sizes.items():
            self._most[name] = max(self._most[name], size)

    def _parameters(self, step: LayerStep, record: Record, frame: Frame, words: int) -> None:
        outputs, stored = _up(step.given[0]), frame.stored
        weight: Part | None = None
        if step.kind == "conv":
            (kh, kw), run = step.kernel, step.kernel[1] * stored
            padded = _up(run, LANES)
            record["rows"], record["run"], record["padded_run"] = kh, run, padded
            shape = (step.given[0], frame.channels, kh, kw)
            weight = Part(self._room(outputs * kh * padded), shape, (kh * padded, 1, padded, stored))
        elif step.kind == "linear":
            record["inputs"] = frame.size
            shape = (step.given[0], frame.channels, frame.height, frame.width)
            weight = Part(self._room(outputs * frame.size), shape, (frame.size, 1, frame.row, stored))
        elif step.kind == "words":
            record["inputs"] = words
            weight = Part(self._room(words * outputs), (words, step.given[0]), (outputs, 1))
        else:
            outputs = stored if len(step.given) == 3 else frame.size
        record["kind"], record["relu"], record["outputs"] = KINDS[step.kind], step.relu, outputs
        record["bias"] = self._room(outputs)
        if weight:
            record["weight"] = weight.at
            self.parts[step.names["weight"]] = weight
        if "bias" in step.names:
            self.parts[step.names["bias"]] = Part(int(record["bias"]), step.given[:1], (1,))

    def _activations(self, *, translated: bool) -> None:
        sources, inputs, grads = [], [], []
        for boundary, frame in enumerate(self.frames):
            inputs.append(self._room(self.rows * frame.size))
            grads.append(self._room(self.rows * frame.size))
            apart = translated and boundary == self.stack.cut
            sources.append(self._room(self.rows * frame.size) if apart else inputs[-1])
        for i, (step, record) in enumerate(zip(self.stack.steps, self.steps, strict=True)):
            record["input"], record["input_grad"] = inputs[i], grads[i]
            record["output"], record["output_grad"] = sources[i + 1], grads[i + 1]
            if step.kind in ("conv", "pool"):
                self._windows(step, record, self.frames[i], self.frames[i + 1])
            else:
                self._vectors(step, record)
        self._ends(sources[0], inputs[-1], grads[-1])
        self.net["cut"] = -1
        if translated:
            cut = self.stack.cut
            self.net["cut"], self.net["z_size"] = cut, self.frames[cut].size
            self.net["z_g"], self.net["z"], self.net["z_grad"] = sources[cut], inputs[cut], grads[cut]
            for name in ("prbm", "prbm_step", "mean", "goal", "live", "sums"):
                self.net[name] = self._room(self.frames[cut].size)
            self.more = self._room(self.rows * self.frames[cut].size)

    def _windows(self, step: LayerStep, record: Record, taken: Frame, given: Frame) -> None:
        """Of a convolution or pooling: where its positions lie, and where the results."""
        outputs, window, images = int(record["outputs"]), math.prod(step.window), np.arange(self.rows)
        if len(step.given) == 3:
            _, height, width = step.given
            i, j, a, b = np.ix_(*map(np.arange, (height, width, *step.window)))
            positions = (i * step.window[0] + a) * taken.row + (j * step.window[1] + b) * taken.stored
            places = i * given.row + j * given.stored + given.corner
        else:
            positions = places = np.zeros(1, np.int64)
        group = math.lcm(TILE_ROWS, window) if step.kind == "conv" else window
        every = images[:, None] * taken.size + positions.ravel()
        to = int(record["output"]) + images[:, None] * given.size + places.ravel()
        windows = places.size
        record["row"], record["size"], record["group"] = taken.row, taken.size, group
        record["windows"], record["window"] = windows, window
        record["positions"] = self._put(np.concatenate([every.ravel(), np.zeros(group, np.int64)]))
        record["places"] = self._put(to)
        record["chosen"] = self._most["chosen"]
        self._most["chosen"] += self.rows * windows * outputs
        self._need(block=group * outputs)
        if step.kind == "conv":
            rows, run, padded = (int(record[name]) for name in ("rows", "run", "padded_run"))
            record["turned"] = self._room(rows * run * outputs)
            record["weight_grad"] = self._room(outputs * rows * padded)
            record["bias_grad"] = self._room(outputs)
            lists = self.rows * windows * (window + 1)
            self._need(list=lists * outputs, counts=lists)

    def _vectors(self, step: LayerStep, record: Record) -> None:
        """Of a linear layer or word vectors."""
        outputs = int(record["outputs"])
        record["bias_grad"] = self._room(outputs)
        record["spread"] = self._put(np.concatenate([np.arange(ROWS) * outputs, np.arange(8)]))
        length = math.prod(step.taken) if step.kind == "words" else 1
        self._need(list=self.rows * length * outputs, counts=int(record["inputs"]))

    def _ends(self, source: int, logits: int, grad: int) -> None:
        first, last, net = self.frames[0], self.frames[-1], self.net
        net["entry"], net["entry_size"] = source + first.corner, first.size
        net["entry_row"], net["entry_pixel"] = first.row, first.stored
        net["logits"], net["logits_grad"], net["logits_size"] = logits, grad, last.size
        c, h, w = np.ix_(*map(np.arange, (last.channels, last.height, last.width)))
        places = c + h * last.row + w * last.stored
        net["classes"], net["classes_at"] = places.size, self._put(places)


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
        self,
        stack: LayerStack,
        size: int,
        dtype: torch.dtype,
        words: int,
        *,
        translated: bool,
        momentum: bool,
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
                raise InvalidInputError(
                    f"a text has word {low if low < 0 else high}, the model has {words} words"
                )
            return Inputs(self._images, x.to(torch.int32).contiguous().numpy())
        image = x.to(self.numbers.dtype).reshape(x.shape[0], *(*self.stack.shape, 1, 1)[:3])
        return Inputs(image.contiguous().numpy(), self._texts)


class _Kept(threading.local):
    """Those of this thread: a network is room to work in."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[SplitModel, dict[object, Network]] = WeakKeyDictionary()


_kept = _Kept()


def find_network(
    model: SplitModel, stack: LayerStack, size: int, dtype: torch.dtype, *, translated: bool, momentum: bool
) -> Network:
    """The network of the model, or of its last layers, for batches of this size."""
    known, key = _kept.of.setdefault(model, {}), (len(stack.steps), size, dtype, translated, momentum)
    if key not in known:
        if len(known) >= KEPT:
            del known[next(iter(known))]
        words = [len(model.parameters[step.names["weight"]]) for step in stack.steps if step.kind == "words"]
        known[key] = Network(stack, size, dtype, *words or [0], translated=translated, momentum=momentum)
    return known[key]
