"""Memory layout of a network in one array, for batches of one size, and the network with its passes."""

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
from feddbe.training.compiled.inner_loops import (
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
    Arrays,
    Record,
)

KINDS = {"words": WORDS, "conv": CONV, "pool": POOL, "linear": LINEAR}
PADDING = 64
"""Numbers after each piece, because whole vectors are read."""
CACHE_LINE_BYTES = 64


def round_up(n: int, multiple: int = WIDTH) -> int:
    """Return the smallest multiple that is at least n."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class ArrayView:
    """Offset, shape and strides of a parameter or activation in the array."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, numbers: Tensor, shift: int = 0) -> Tensor:
        return numbers.as_strided(self.shape, self.strides, self.offset + shift)


@dataclass(frozen=True)
class ImageLayout:
    """Memory layout of a layer's input image with its zero padding."""

    channels: int
    height: int
    width: int
    pixel_size: int
    """Numbers per pixel."""
    left: int = 0
    right: int = 0
    above: int = 0
    below: int = 0

    @property
    def row(self) -> int:
        return (self.width + self.left + self.right) * self.pixel_size

    @property
    def size(self) -> int:
        return (self.height + self.above + self.below) * self.row

    @property
    def corner(self) -> int:
        return self.above * self.row + self.left * self.pixel_size

    def image_view(self, offset: int) -> ArrayView:
        """Return the view (channels, height, width) of one image."""
        shape = (self.channels, self.height, self.width)
        return ArrayView(offset + self.corner, shape, (1, self.row, self.pixel_size))

    def batch_view(self, offset: int, size: int) -> ArrayView:
        image = self.image_view(offset)
        return ArrayView(image.offset, (size, *image.shape), (self.size, *image.strides))


def allocate(n: int, number: np.dtype[Any]) -> Array:
    """Return n zeros aligned to a cache line, which is a quarter faster than any other address."""
    raw = np.zeros(n * number.itemsize + CACHE_LINE_BYTES, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE_BYTES
    return raw[start : start + n * number.itemsize].view(number)


def image_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return (channels, height, width); features are channels of one pixel."""
    channels, height, width = (*shape, 1, 1)[:3]
    return channels, height, width


def boundary_layouts(stack: LayerStack) -> list[ImageLayout]:
    """Return the layouts of each step's input, and of the logits."""
    image = image_shape(stack.shape)
    frames = list[ImageLayout]()
    for step in stack.steps:
        narrow = step.kind == "conv" and not frames  # an image has few channels
        frames.append(ImageLayout(*image, image[0] if narrow else round_up(image[0]), *step.padding))
        if len(step.output_shape) == 3 or step.kind != "pool":  # ReLU keeps the layout
            image = image_shape(step.output_shape)
    return [*frames, ImageLayout(*image, round_up(image[0]))]


class Layout:
    """Memory layout of a stack of layers for batches of `size`.

    `with_cut` reserves the vectors of PRBM and MR, `momentum` the last step of every parameter.
    """

    def __init__(
        self,
        stack: LayerStack,
        size: int,
        dtype: torch.dtype,
        words: int,
        *,
        with_cut: bool,
        momentum: bool,
    ) -> None:
        self.stack = stack
        self.size = size
        self.rows = round_up(size, ROWS)
        self.layouts = boundary_layouts(stack)
        self.parts: dict[str, ArrayView] = {}
        self.steps, self.nets = np.zeros(len(stack.steps), STEP), np.zeros(1, NET)
        self.net: Record = self.nets[0]
        self._end = PADDING
        self._table = list[Array]()
        self._table_length = 0
        self._max_sizes = {"argmax": 0, "block": 0, "list": 0, "counts": 0}
        for step, record, frame in zip(stack.steps, self.steps, self.layouts, strict=False):
            self._lay_out_parameters(step, record, frame, words)
        self.drift_offset = self._end
        self.net["drift_offset"] = self.drift_offset
        self._end += self.drift_offset * (1 + momentum)  # drifts or gradients, then last steps
        self._lay_out_activations(with_cut=with_cut)
        number, most = torch.empty((), dtype=dtype).numpy().dtype, self._max_sizes
        self.arrays = Arrays(
            allocate(self._end, number),
            allocate(self._table_length, np.dtype(np.int64)),
            allocate(most["argmax"] + PADDING, np.dtype(np.uint8)),
            allocate(most["block"] + PADDING, number),
            allocate(most["list"] + PADDING, number),
            allocate(most["list"] + PADDING, np.dtype(np.int32)),
            allocate(most["counts"] + PADDING, np.dtype(np.int64)),
        )
        np.concatenate(self._table, out=self.arrays.table)
        self.numbers = torch.from_numpy(self.arrays.numbers)
        if with_cut:
            self.cut_vector("feature_mask").fill_(1)

    def cut_vector(self, name: str) -> Tensor:
        """Return a vector at the cut, such as PRBM's, in the model's shape."""
        return self.layouts[self.stack.cut].image_view(int(self.net[name])).view(self.numbers)

    def batch_at(self, boundary: int, offset: int) -> Tensor:
        """Return the numbers at `offset` as a batch between two steps."""
        return self.layouts[boundary].batch_view(offset, self.size).view(self.numbers)

    def set_updates(self, rates: Mapping[str, float], decays: Mapping[str, float]) -> None:
        """Set each parameter's rate (0: frozen) and decay, and from these the gradients that are needed."""
        needed = [len(self.steps)]  # boundaries whose gradient is needed
        if self.net["cut"] >= 0:
            needed.append(int(self.net["cut"]))
        for i, (step, record) in enumerate(zip(self.stack.steps, self.steps, strict=True)):
            for kind in ("weight", "bias"):
                name = step.names.get(kind, "")
                record[f"{kind}_rate"] = rates.get(name, 0.0)
                record[f"{kind}_decay"] = decays.get(name, 0.0)
                if rates.get(name):
                    needed.append(i + 1)
        self.net["first_layer"] = max(0, min(needed) - 1)
        self.steps["needs_input_grad"] = np.arange(len(self.steps)) >= min(needed)

    def _reserve_numbers(self, n: int) -> int:
        start = self._end
        self._end += round_up(n, 16) + PADDING
        return start

    def _add_to_table(self, offsets: Array) -> int:
        """Append offsets to the table and return their start."""
        start = self._table_length
        self._table.append(np.asarray(offsets, np.int64).ravel())
        self._table_length += self._table[-1].size
        return start

    def _raise_max_sizes(self, **sizes: int) -> None:
        for name, size in sizes.items():
            self._max_sizes[name] = max(self._max_sizes[name], size)

    def _lay_out_parameters(self, step: LayerStep, record: Record, frame: ImageLayout, words: int) -> None:
        outputs, stored = round_up(step.output_shape[0]), frame.pixel_size
        weight: ArrayView | None = None
        if step.kind == "conv":
            (kh, kw), run = step.kernel, step.kernel[1] * stored
            padded = round_up(run, LANES)
            record["rows"] = kh
            record["run"] = run
            record["padded_run"] = padded
            shape = (step.output_shape[0], frame.channels, kh, kw)
            weight = ArrayView(
                self._reserve_numbers(outputs * kh * padded), shape, (kh * padded, 1, padded, stored)
            )
        elif step.kind == "linear":
            record["inputs"] = frame.size
            shape = (step.output_shape[0], frame.channels, frame.height, frame.width)
            weight = ArrayView(
                self._reserve_numbers(outputs * frame.size), shape, (frame.size, 1, frame.row, stored)
            )
        elif step.kind == "words":
            record["inputs"] = words
            weight = ArrayView(
                self._reserve_numbers(words * outputs), (words, step.output_shape[0]), (outputs, 1)
            )
        else:
            outputs = stored if len(step.output_shape) == 3 else frame.size
        record["kind"] = KINDS[step.kind]
        record["relu"] = step.relu
        record["outputs"] = outputs
        record["bias"] = self._reserve_numbers(outputs)
        if weight:
            record["weight"] = weight.offset
            self.parts[step.names["weight"]] = weight
        if "bias" in step.names:
            self.parts[step.names["bias"]] = ArrayView(int(record["bias"]), step.output_shape[:1], (1,))

    def _lay_out_activations(self, *, with_cut: bool) -> None:
        sources = []
        inputs = []
        grads = []
        for boundary, frame in enumerate(self.layouts):
            inputs.append(self._reserve_numbers(self.rows * frame.size))
            grads.append(self._reserve_numbers(self.rows * frame.size))
            is_cut = with_cut and boundary == self.stack.cut
            sources.append(self._reserve_numbers(self.rows * frame.size) if is_cut else inputs[-1])
        for i, (step, record) in enumerate(zip(self.stack.steps, self.steps, strict=True)):
            record["input"], record["input_grad"] = inputs[i], grads[i]
            record["output"], record["output_grad"] = sources[i + 1], grads[i + 1]
            if step.kind in ("conv", "pool"):
                self._lay_out_windows(step, record, self.layouts[i], self.layouts[i + 1])
            else:
                self._lay_out_vectors(step, record)
        self._lay_out_ends(sources[0], inputs[-1], grads[-1])
        self.net["cut"] = -1
        if with_cut:
            cut = self.stack.cut
            self.net["cut"], self.net["z_size"] = cut, self.layouts[cut].size
            self.net["z_g"] = sources[cut]
            self.net["z"] = inputs[cut]
            self.net["z_grad"] = grads[cut]
            for name in ("prbm", "prbm_step", "running_mean", "global_mean", "feature_mask", "sums"):
                self.net[name] = self._reserve_numbers(self.layouts[cut].size)
            self.extra_z_grad = self._reserve_numbers(self.rows * self.layouts[cut].size)

    def _lay_out_windows(
        self, step: LayerStep, record: Record, input_layout: ImageLayout, output_layout: ImageLayout
    ) -> None:
        """Write the offsets of a convolution's or pooling's positions and results to the table."""
        outputs = int(record["outputs"])
        window = math.prod(step.window)
        images = np.arange(self.rows)
        if len(step.output_shape) == 3:
            _, height, width = step.output_shape
            i, j, a, b = np.ix_(*map(np.arange, (height, width, *step.window)))
            y, x = i * step.window[0] + a, j * step.window[1] + b
            inputs_in_image = y * input_layout.row + x * input_layout.pixel_size
            outputs_in_image = i * output_layout.row + j * output_layout.pixel_size + output_layout.corner
        else:
            inputs_in_image = outputs_in_image = np.zeros(1, np.int64)
        group = math.lcm(TILE_ROWS, window) if step.kind == "conv" else window
        input_offsets = images[:, None] * input_layout.size + inputs_in_image.ravel()
        output_offsets = (
            int(record["output"]) + images[:, None] * output_layout.size + outputs_in_image.ravel()
        )
        windows = outputs_in_image.size
        record["row"] = input_layout.row
        record["size"] = input_layout.size
        record["group_size"] = group
        record["windows"], record["window"] = windows, window
        padded_offsets = np.concatenate([input_offsets.ravel(), np.zeros(group, np.int64)])
        record["input_offsets"] = self._add_to_table(padded_offsets)
        record["output_offsets"] = self._add_to_table(output_offsets)
        record["argmax"] = self._max_sizes["argmax"]
        self._max_sizes["argmax"] += self.rows * windows * outputs
        self._raise_max_sizes(block=group * outputs)
        if step.kind == "conv":
            rows, run, padded = (int(record[name]) for name in ("rows", "run", "padded_run"))
            record["transposed"] = self._reserve_numbers(rows * run * outputs)
            record["weight_grad"] = self._reserve_numbers(outputs * rows * padded)
            record["bias_grad"] = self._reserve_numbers(outputs)
            lists = self.rows * windows * (window + 1)
            self._raise_max_sizes(list=lists * outputs, counts=lists)

    def _lay_out_vectors(self, step: LayerStep, record: Record) -> None:
        """Reserve memory of a linear layer or word vectors."""
        outputs = int(record["outputs"])
        record["bias_grad"] = self._reserve_numbers(outputs)
        record["row_offsets"] = self._add_to_table(np.concatenate([np.arange(ROWS) * outputs, np.arange(8)]))
        length = math.prod(step.input_shape) if step.kind == "words" else 1
        self._raise_max_sizes(list=self.rows * length * outputs, counts=int(record["inputs"]))

    def _lay_out_ends(self, source: int, logits: int, grad: int) -> None:
        first = self.layouts[0]
        last = self.layouts[-1]
        net = self.net
        net["input"], net["input_size"] = source + first.corner, first.size
        net["input_row"], net["input_pixel"] = first.row, first.pixel_size
        net["logits"] = logits
        net["logits_grad"] = grad
        net["logits_size"] = last.size
        c, h, w = np.ix_(*map(np.arange, (last.channels, last.height, last.width)))
        class_offsets = c + h * last.row + w * last.pixel_size
        net["classes"], net["class_offsets"] = class_offsets.size, self._add_to_table(class_offsets)


MAX_NETWORKS = 6
"""Maximum number of networks of a model, each for one batch size."""


class Inputs(NamedTuple):
    """Inputs of a compiled pass: images, or texts."""

    x: Array
    texts: Array


class Network(Layout):
    """A stack of layers with its own memory.

    Views that do not change between fits are created once: a small client's step takes less time than
    creating a dozen views.
    """

    def __init__(
        self,
        stack: LayerStack,
        size: int,
        dtype: torch.dtype,
        words: int,
        *,
        with_cut: bool,
        momentum: bool,
    ) -> None:
        super().__init__(stack, size, dtype, words, with_cut=with_cut, momentum=momentum)
        self.views = {name: part.view(self.numbers) for name, part in self.parts.items()}
        """Parameters."""
        self.drifts = {name: part.view(self.numbers, self.drift_offset) for name, part in self.parts.items()}
        """Drifts or gradients of the parameters."""
        names = ("prbm", "prbm_step", "running_mean", "global_mean") if with_cut else ()
        self.vectors = {name: self.cut_vector(name) for name in names}
        boundaries = {"logits": len(self.steps)} | ({"z_g": stack.cut, "z": stack.cut} if with_cut else {})
        self.activations = {name: self.batch_at(end, int(self.net[name])) for name, end in boundaries.items()}
        """Activations of a batch after a forward pass."""
        grad_offsets = {"logits": int(self.net["logits_grad"])}
        if with_cut:
            grad_offsets["z_g"] = self.extra_z_grad
        self.output_grads = {
            name: self.batch_at(boundaries[name], offset) for name, offset in grad_offsets.items()
        }
        """Gradients from which a backward pass starts: of the logits, and an additional one of z_g."""
        self._targets, self._shapes = [*self.views.values()], [view.shape for view in self.views.values()]
        self._written, self._versions = list[Tensor](), list[tuple[int, int]]()
        """Tensors that were written last, with their ids and versions; empty if the network changed since."""
        self._updates: object = None
        self._images = np.zeros((0, 1, 1, 1), self.arrays.numbers.dtype)
        self._texts = np.zeros((0, 1), np.int32)
        self._last_inputs = Inputs(self._images, self._texts)
        """Inputs of the last forward pass."""

    def write(self, params: Mapping[str, Tensor]) -> None:
        """Copy parameters into the network, unless it has them already, as when clients share a model."""
        values = [params[name] for name in self.views]
        is_versioned = not any(p.is_inference() for p in values)  # inference tensors have none
        versions = [(id(p), p._version) for p in values] if is_versioned else []
        if versions and versions == self._versions:
            return
        shaped = [p if p.dim() == len(s) else p.reshape(s) for p, s in zip(values, self._shapes, strict=True)]
        with torch.no_grad():
            torch._foreach_copy_(self._targets, shaped)
        kernels.transpose_weights(self.arrays, self.steps)
        self._written, self._versions = values, versions

    def set_vectors(self, values: Mapping[str, Tensor | None]) -> None:
        """Set vectors at the cut; None: zeros."""
        for name, value in values.items():
            view = self.vectors[name]
            view.zero_() if value is None else view.copy_(value.reshape(view.shape))

    def read(self, params: Mapping[str, Tensor], *, drifts: bool = False) -> State:
        """Return new tensors like `params` with the parameters or, if `drifts`, drifts or gradients."""
        views = self.drifts if drifts else self.views
        return {
            name: views[name].clone(memory_format=torch.contiguous_format).view(p.shape)
            for name, p in params.items()
            if name in views
        }

    def is_finite(self) -> bool:
        """Return True if all parameters and PRBM's vector are finite; the padding between them is 0."""
        tensors = [self.numbers[: self.drift_offset]]
        if "prbm" in self.vectors:
            tensors.append(self.vectors["prbm"])
        return all(math.isfinite(extreme) for tensor in tensors for extreme in torch.aminmax(tensor))

    def set_updates(self, rates: Mapping[str, float], decays: Mapping[str, float]) -> None:
        if (moves := (dict(rates), dict(decays))) != self._updates:
            super().set_updates(rates, decays)
            self._updates = moves

    def train(self, x: Tensor, y: Tensor, size: int, divisors: Array) -> float:
        """Train on these samples and return the sum of the batches' cross-entropies."""
        return self._train(self._prepare_inputs(x), y, size, divisors, is_forward_done=False)

    def backward(self, y: Tensor, grads: Mapping[str, Tensor | None], divisors: Array) -> None:
        """Complete a step on the batch of the last `forward`, from these gradients; None: zeros."""
        for name, grad in grads.items():
            view = self.output_grads[name][: len(y)]
            view.zero_() if grad is None else view.copy_(grad.reshape(view.shape))
        self._train(self._last_inputs, y, len(y), divisors, is_forward_done=True)

    def _train(
        self, inputs: Inputs, y: Tensor, size: int, divisors: Array, *, is_forward_done: bool
    ) -> float:
        self._written, self._versions = [], []
        return float(
            kernels.train(
                self.arrays, self.steps, self.nets, *inputs, y.numpy(), size, divisors, is_forward_done
            )
        )

    def add(self, changes: Mapping[str, Tensor]) -> None:
        """Add changes to parameters and to PRBM's vector."""
        for name, change in changes.items():
            view = self.views[name] if name in self.views else self.vectors[name]
            view.add_(change.reshape(view.shape))
        if changes:
            kernels.transpose_weights(self.arrays, self.steps)

    def forward(self, x: Tensor, names: Sequence[str]) -> list[Tensor]:
        """Return copies of these activations of one batch, at most as large as the network's."""
        size, self._last_inputs = x.shape[0], self._prepare_inputs(x)
        kernels.forward(self.arrays, self.steps, self.nets, *self._last_inputs, size)
        return [self.activations[name][:size].clone(memory_format=torch.contiguous_format) for name in names]

    def _prepare_inputs(self, x: Tensor) -> Inputs:
        if self.stack.steps[0].kind == "words":
            low, high = (int(word) for word in torch.aminmax(x)) if x.shape[0] else (0, 0)
            words = int(self.steps[0]["inputs"])
            if low < 0 or high >= words:  # compiled code does not check bounds
                raise InvalidInputError(
                    f"a text has word {low if low < 0 else high}, the model has {words} words"
                )
            return Inputs(self._images, x.to(torch.int32).contiguous().numpy())
        image = x.to(self.numbers.dtype).reshape(x.shape[0], *(*self.stack.shape, 1, 1)[:3])
        return Inputs(image.contiguous().numpy(), self._texts)


class _NetworkCache(threading.local):
    """Networks of one thread by model; threads cannot share them, because passes write to them."""

    def __init__(self) -> None:
        self.by_model: WeakKeyDictionary[SplitModel, dict[object, Network]] = WeakKeyDictionary()


_cache = _NetworkCache()


def find_network(
    model: SplitModel, stack: LayerStack, size: int, dtype: torch.dtype, *, with_cut: bool, momentum: bool
) -> Network:
    """Return the cached or new network of the model, or of its last layers, for batches of this size."""
    networks, key = _cache.by_model.setdefault(model, {}), (len(stack.steps), size, dtype, with_cut, momentum)
    if key not in networks:
        if len(networks) >= MAX_NETWORKS:
            del networks[next(iter(networks))]
        words = [len(model.parameters[step.names["weight"]]) for step in stack.steps if step.kind == "words"]
        networks[key] = Network(stack, size, dtype, *words or [0], with_cut=with_cut, momentum=momentum)
    return networks[key]
