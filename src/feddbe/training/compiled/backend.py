"""Stacks of convolutions and linear layers, and word vectors, in machine code (numba).

A step of ten samples is little arithmetic, and calling torch for it costs more than it does. So the step is
written out for any row of Conv2d (stride 1), MaxPool2d, ReLU, Flatten and Linear, `MeanEmbedding` first,
with cross-entropy, PRBM and MR at any cut, frozen layers, a rate for each parameter, and what is linear in
the parameters: SCAFFOLD's correction, the proximal pull, weight decay, momentum. A method's own terms that
say they are `at_end` are left to autograd, between the passes. Up to rounding all gives autograd's numbers,
in float32 or float64."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from feddbe.data.dataset import Dataset
from feddbe.errors import one_line
from feddbe.models.registry import MeanEmbedding
from feddbe.models.split_model import Forward, SplitModel, has_hooks
from feddbe.state import State
from feddbe.training.plan import FitPlan, FitResult
from feddbe.training.terms import Gradient, Prox, ProximalSteps, StepsResult, gradient_by_autograd

if TYPE_CHECKING:
    from feddbe.training.compiled.network import Network


Shape = tuple[int, ...]


class UnsupportedLayerError(Exception):
    """The reason, in words."""


@dataclass(frozen=True)
class LayerStep:
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


class LayerStack(NamedTuple):
    """Steps one after the other; PRBM and MR act before step `cut`, at the end if it is their number."""

    shape: Shape
    """Of one sample as the first step takes it."""
    steps: tuple[LayerStep, ...]
    cut: int
    cut_shape: Shape


def read_layers(model: SplitModel) -> LayerStack:
    """All layers of both halves, or Refused."""
    body, head = model.layers
    layers = [*body, *head]
    if any(has_hooks(layer) for layer, _ in layers):
        raise UnsupportedLayerError("a layer has hooks or a replaced forward")
    names = [name for _, own in layers for name in own.values()]
    if len(set(names)) < len(names) or set(names) != model.parameters.keys():
        raise UnsupportedLayerError("layers share a parameter, or one belongs to no layer")
    steps: list[LayerStep] = []
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
        raise UnsupportedLayerError("the last layer gives no logits")
    return LayerStack(start, tuple(steps), cut, cut_shape)


def _step(layer: nn.Module, own: Mapping[str, str], shape: Shape, *, first: bool) -> LayerStep:
    """A layer that begins a step."""
    if type(layer) is nn.Conv2d and len(shape) == 3:
        return _convolution(layer, own, shape)
    if type(layer) is nn.Linear and len(shape) == 1:
        return LayerStep("linear", own, shape, (layer.out_features,))
    if type(layer) is MeanEmbedding and first:
        return LayerStep("words", own, shape, (layer.weight.shape[1],))
    if type(layer) is nn.MaxPool2d and len(shape) == 3:
        return _pooled(LayerStep("pool", {}, shape, shape), _window(layer))
    if type(layer) is nn.ReLU:
        return LayerStep("pool", {}, shape, shape, relu=True)
    if [*layer.children()]:
        raise UnsupportedLayerError(f"the model is more than a row of layers ({type(layer).__name__})")
    known = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.Flatten, MeanEmbedding)
    where = f" on inputs of shape {shape}" if type(layer) in known else ""
    raise UnsupportedLayerError(f"the model has a {type(layer).__name__}{where}")


def _convolution(layer: nn.Conv2d, own: Mapping[str, str], shape: Shape) -> LayerStep:
    if (layer.stride, layer.dilation, layer.groups, layer.padding_mode) != ((1, 1), (1, 1), 1, "zeros"):
        raise UnsupportedLayerError("a Conv2d has a stride, dilation, groups or a padding of its own kind")
    left, right, above, below = layer._reversed_padding_repeated_twice
    kernel = layer.kernel_size[0], layer.kernel_size[1]
    height, width = shape[1] + above + below - kernel[0] + 1, shape[2] + left + right - kernel[1] + 1
    given = (layer.out_channels, height, width)
    return LayerStep("conv", own, shape, given, kernel, (left, right, above, below))


def _join(step: LayerStep, layer: nn.Module, shape: Shape) -> LayerStep | None:
    """The step with this layer in it, if it can be; `shape` is flat if there was a Flatten between."""
    if type(layer) is nn.ReLU and step.kind != "words":
        return replace(step, relu=True) if shape == step.given else None
    if type(layer) is nn.MaxPool2d and step.kind == "conv" and step.window == (1, 1) and len(shape) == 3:
        return _pooled(step, _window(layer))
    return None


def _pooled(step: LayerStep, window: tuple[int, int]) -> LayerStep:
    channels, height, width = step.given
    return replace(step, window=window, given=(channels, height // window[0], width // window[1]))


def _window(layer: nn.MaxPool2d) -> tuple[int, int]:
    rows, columns = _pair(layer.kernel_size)
    plain = _pair(layer.stride) == (rows, columns) and _pair(layer.padding) == (0, 0)
    plain = plain and _pair(layer.dilation) == (1, 1) and not layer.ceil_mode and not layer.return_indices
    if not plain or rows * columns > 255:
        raise UnsupportedLayerError("a MaxPool2d has windows that overlap, have padding or are large")
    return rows, columns


def _pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


PRIORITY = 10
PREDICT = 32
"""Samples that are predicted at once: a part of what `Local.predict` gives, small enough for the cache."""


PATIENCE = 3.0
"""Seconds after which a user who waits at a terminal is told why."""


def packages() -> list[str]:
    return ["numba"] if _available() else []


def warm_up_kernels(model: SplitModel, tell: Callable[[str], None]) -> None:
    """Compile the program and try one step, if the model's layers can be compiled."""
    if unsupported_layers(model):
        return
    words = "compiling the trainer, once on this machine: some 20 seconds"
    word = threading.Timer(PATIENCE, tell if sys.stderr.isatty() else str, [words])
    word.daemon = True
    word.start()
    reason = unsupported_machine(model)
    word.cancel()
    word.join()
    if reason:
        tell(f"autograd trains, several times slower than compiled: {reason}")


def _available() -> bool:
    """Return whether numba is installed."""
    return find_spec("numba") is not None


def unsupported_reason(plan: FitPlan) -> str:
    if reason := unsupported_model(plan.model):
        return reason
    from feddbe.training.compiled.fits import COMPILED, find_open_terms, needs_autograd

    own, known = find_open_terms(plan), [type(t.apply) for t in plan.terms if type(t.apply) in COMPILED]
    if any(not term.outputs_only for term in own) or len(set(known)) < len(known):
        return "the method has a loss or a term of its own, which is not said to be `at_end`"
    beside = {*plan.correction, *(n for t in plan.terms if isinstance(t.apply, Prox) for n in t.const)}
    names = plan.model.parameters.keys()
    if not plan.params.keys() >= names or not plan.extras.keys() <= {"prbm"} or not beside <= names:
        return "the method trains other than the model and PRBM"
    linear = replace(plan.optimizer, momentum=0.0, weight_decay=0.0)
    if not (plan.optimizer if needs_autograd(plan) else linear).is_plain_sgd:
        return "the optimiser is not plain SGD"
    return unsupported_types([*plan.params.values(), *plan.extras.values(), *plan.correction.values()])


def unsupported_pass_reason(model: SplitModel, params: Mapping[str, Tensor]) -> str:
    names = model.parameters
    if not params.keys() >= names.keys():
        return "these are no parameters of the model"
    return unsupported_model(model) or unsupported_types([params[name] for name in names])


def unsupported_types(tensors: Sequence[Tensor]) -> str:
    if any(t.device.type != "cpu" for t in tensors):
        return "it is on a GPU"
    fits = {t.dtype for t in tensors} in ({torch.float32}, {torch.float64})
    return "" if fits else "parameters are not all float32, or all float64"


def unsupported_model(model: SplitModel) -> str:
    """Why it does not take this model, in any plan."""
    return unsupported_layers(model) or unsupported_machine(model)


def unsupported_layers(model: SplitModel) -> str:
    """Why it does not take this model, on any machine."""
    found = _stack(model)
    return found if isinstance(found, str) else ""


def unsupported_machine(model: SplitModel) -> str:
    """Why it does not work here. At first it is compiled, and tried once."""
    stack = _stack(model)
    if model not in _tried and isinstance(stack, LayerStack):
        _tried[model] = _try(model, stack)
    return _tried[model]


def _try(model: SplitModel, stack: LayerStack) -> str:
    """One gradient and pass against autograd's: a tool chain can be missing or broken."""
    if not _available():
        return "numba is not installed"
    generator, (first, *_) = torch.Generator().manual_seed(0), model.parameters.values()
    shape = (3, *model.input_shape)
    if stack.steps[0].kind == "words":
        x = torch.randint(len(first), shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator, dtype=first.dtype)
    y = torch.arange(len(x)) % model.classes
    try:
        found = gradient(model, model.parameters, {}, x, y).gradients
        found["logits"] = Predictor(model, model.parameters, None)(x).logits
    except Exception as error:  # of numba, LLVM or the system
        return f"numba does not work here ({one_line(error)})"
    wanted = gradient_by_autograd(model, model.parameters, model.buffers, x, y).gradients
    wanted["logits"] = model.forward(model.parameters, x).logits.detach()
    scale = max(float(g.abs().max()) for g in wanted.values())
    apart = max(float((found[name] - g).abs().max()) for name, g in wanted.items())
    return "" if apart <= 1e-3 * scale else "its first step is not autograd's: numba is broken here"


_tried: WeakKeyDictionary[SplitModel, str] = WeakKeyDictionary()
_stacks: WeakKeyDictionary[SplitModel, LayerStack | str] = WeakKeyDictionary()


def _stack(model: SplitModel) -> LayerStack | str:
    """The model's layers, or why not."""
    if model not in _stacks:
        try:
            _stacks[model] = unsupported_types(list(model.parameters.values())) or read_layers(model)
        except UnsupportedLayerError as reason:
            _stacks[model] = str(reason)
    return _stacks[model]


def _layers(model: SplitModel) -> LayerStack:
    """Those of a model that it takes."""
    stack = _stack(model)
    assert isinstance(stack, LayerStack)
    return stack


def train(plan: FitPlan) -> FitResult:
    from feddbe.training.compiled.fits import is_body_frozen
    from feddbe.training.compiled.fits import train as fits_train

    stack = _layers(plan.model)
    return fits_train(plan, stack, _features(plan) if is_body_frozen(plan, stack) else None)


def _features(plan: FitPlan) -> Dataset:
    """What the body gives for the samples of a plan."""
    dataset, rows = plan.batches.dataset, torch.from_numpy(plan.batches.indices)
    body = Predictor(plan.model, plan.params, None)
    parts = [
        body(dataset.kernel_inputs(dataset.x.index_select(0, some))).z_g for some in torch.split(rows, 1024)
    ]
    return Dataset(dataset.name, torch.cat(parts), dataset.y.index_select(0, rows), dataset.classes)


def gradient(
    model: SplitModel, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> Gradient:
    """Of the cross-entropy, 0 for what is frozen."""
    from feddbe.training.compiled.fits import gradient as fits_gradient

    return fits_gradient(model, _layers(model), params, x, y)._replace(statistics=dict(statistics))


def proximal_steps(
    model: SplitModel, params: State, statistics: State, x: Tensor, y: Tensor, steps: ProximalSteps
) -> StepsResult:
    """These steps on one batch."""
    from feddbe.training.compiled.fits import proximal_steps as fits_descend

    return fits_descend(model, _layers(model), params, x, y, steps)._replace(statistics=statistics)


def predictor(model: SplitModel, params: Mapping[str, Tensor], prbm: Tensor | None) -> Predictor:
    return Predictor(model, params, prbm)


class Predictor:
    """Forward passes at these parameters and this vector of PRBM."""

    def __init__(self, model: SplitModel, params: Mapping[str, Tensor], prbm: Tensor | None) -> None:
        from feddbe.training.compiled.network import find_network

        dtype = params[next(iter(model.parameters))].dtype
        self.model, self.params = model, params
        self.network: Network = find_network(
            model, _layers(model), PREDICT, dtype, translated=True, momentum=False
        )
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
