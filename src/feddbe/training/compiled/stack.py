"""A model's layers as the compiled trainer sees them, or why it does not take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from torch import nn

from feddbe.models.architectures import MeanEmbedding
from feddbe.models.split_model import SplitModel
from feddbe.models.split_points import hooked

Shape = tuple[int, ...]


class Refused(Exception):
    """The reason, in words."""


@dataclass(frozen=True)
class Step:
    """A layer with what is computed together with it: the pooling and ReLU after it, unless the cut is
    between. The two commute, values and gradients."""

    kind: Literal["words", "conv", "pool", "linear"]
    names: Mapping[str, str]
    """The model's names of `weight` and `bias`."""
    taken: Shape
    """Of one sample: what goes in, (channels, height, width) or (features,)."""
    given: Shape
    """What comes out, before it is flattened."""
    kernel: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, right, above, below."""
    window: tuple[int, int] = (1, 1)
    relu: bool = False


class Stack(NamedTuple):
    """Steps one after the other; PRBM and MR act before step `cut`, at the end if it is their number."""

    shape: Shape
    """Of one sample as the first step takes it."""
    steps: tuple[Step, ...]
    cut: int
    cut_shape: Shape


def read(model: SplitModel) -> Stack:
    """All layers of both halves, or Refused."""
    body, head = model.layers
    layers = [*body, *head]
    if any(hooked(layer) for layer, _ in layers):
        raise Refused("a layer has hooks or a replaced forward")
    names = [name for _, own in layers for name in own.values()]
    if len(set(names)) < len(names) or set(names) != model.parameters.keys():
        raise Refused("layers share a parameter, or one belongs to no layer")
    steps: list[Step] = []
    shape = start = model.input_shape
    cut, cut_shape, closed = 0, start, True  # closed: nothing can join the last step
    for at, (layer, own) in enumerate(layers):
        if at == len(body):
            cut, cut_shape, closed = len(steps), shape, True
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            shape = (math.prod(shape),)
            start = start if steps else shape
            continue
        joined = None if closed else _join(steps[-1], layer, shape)
        if joined:
            steps[-1] = joined
        else:
            steps.append(_step(layer, own, shape, first=not steps))
        closed, shape = False, steps[-1].given
    if not steps or shape != (model.classes,):
        raise Refused("the last layer gives no logits")
    return Stack(start, tuple(steps), cut, cut_shape)


def _step(layer: nn.Module, own: Mapping[str, str], shape: Shape, *, first: bool) -> Step:
    """A layer that begins a step."""
    if type(layer) is nn.Conv2d and len(shape) == 3:
        return _convolution(layer, own, shape)
    if type(layer) is nn.Linear and len(shape) == 1:
        return Step("linear", own, shape, (layer.out_features,))
    if type(layer) is MeanEmbedding and first:
        return Step("words", own, shape, (layer.weight.shape[1],))
    if type(layer) is nn.MaxPool2d and len(shape) == 3:
        return _pooled(Step("pool", {}, shape, shape), _window(layer))
    if type(layer) is nn.ReLU:
        return Step("pool", {}, shape, shape, relu=True)
    if [*layer.children()]:
        raise Refused(f"the model is more than a row of layers ({type(layer).__name__})")
    known = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.Flatten, MeanEmbedding)
    where = f" on inputs of shape {shape}" if type(layer) in known else ""
    raise Refused(f"the model has a {type(layer).__name__}{where}")


def _convolution(layer: nn.Conv2d, own: Mapping[str, str], shape: Shape) -> Step:
    if (layer.stride, layer.dilation, layer.groups, layer.padding_mode) != ((1, 1), (1, 1), 1, "zeros"):
        raise Refused("a Conv2d has a stride, dilation, groups or a padding of its own kind")
    left, right, above, below = layer._reversed_padding_repeated_twice
    kernel = layer.kernel_size[0], layer.kernel_size[1]
    height, width = shape[1] + above + below - kernel[0] + 1, shape[2] + left + right - kernel[1] + 1
    given = (layer.out_channels, height, width)
    return Step("conv", own, shape, given, kernel, (left, right, above, below))


def _join(step: Step, layer: nn.Module, shape: Shape) -> Step | None:
    """The step with this layer in it, if it can be; `shape` is flat if there was a Flatten between."""
    if type(layer) is nn.ReLU and step.kind != "words":
        return replace(step, relu=True) if shape == step.given else None
    if type(layer) is nn.MaxPool2d and step.kind == "conv" and step.window == (1, 1) and len(shape) == 3:
        return _pooled(step, _window(layer))
    return None


def _pooled(step: Step, window: tuple[int, int]) -> Step:
    channels, height, width = step.given
    return replace(step, window=window, given=(channels, height // window[0], width // window[1]))


def _window(layer: nn.MaxPool2d) -> tuple[int, int]:
    rows, columns = _pair(layer.kernel_size)
    plain = _pair(layer.stride) == (rows, columns) and _pair(layer.padding) == (0, 0)
    plain = plain and _pair(layer.dilation) == (1, 1) and not layer.ceil_mode and not layer.return_indices
    if not plain or rows * columns > 255:
        raise Refused("a MaxPool2d has windows that overlap, have padding or are large")
    return rows, columns


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)
