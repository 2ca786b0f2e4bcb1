"""Training backend in machine code (numba) for stacks of convolutions and linear layers, and word vectors.

A step on ten samples is little arithmetic, and the calls of torch would cost more. The step is therefore
compiled for any sequence of Conv2d (stride 1), MaxPool2d, ReLU, Flatten and Linear, optionally after
`MeanEmbedding`. It has cross-entropy, PRBM and MR at any cut, frozen layers, and a rate per parameter. It
also has updates that are linear in the parameters: SCAFFOLD's correction, the proximal term, weight decay,
momentum. Other terms with `outputs_only` are computed by autograd between the passes. Up to rounding the
results are those of autograd, in float32 or float64.
"""

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
from feddbe.training.fit_plan import FitPlan, FitResult
from feddbe.training.loss_terms import Gradient, Prox, ProximalSteps, StepsResult, gradient_by_autograd

if TYPE_CHECKING:
    from feddbe.training.compiled.network import Network


Shape = tuple[int, ...]


class UnsupportedLayerError(Exception):
    """A layer that is not compiled; the message is the reason."""


@dataclass(frozen=True)
class LayerStep:
    """A layer with the pooling and ReLU after it, unless the cut is between; the two commute."""

    kind: Literal["words", "conv", "pool", "linear"]
    names: Mapping[str, str]
    """Names of `weight` and `bias` in the model."""
    input_shape: Shape
    """Shape of one sample's input: (channels, height, width) or (features,)."""
    output_shape: Shape
    """Shape of one sample's output, before Flatten."""
    kernel: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    """Left, right, above, below."""
    window: tuple[int, int] = (1, 1)
    relu: bool = False


class LayerStack(NamedTuple):
    """A sequence of steps; PRBM and MR act before step `cut`, which may be the end."""

    shape: Shape
    """Shape of one sample's input to the first step."""
    steps: tuple[LayerStep, ...]
    cut: int
    cut_shape: Shape


def read_layers(model: SplitModel) -> LayerStack:
    """Return the layers of both halves of the model as steps.

    Raises:
        UnsupportedLayerError: A layer is not compiled.
    """
    body, head = model.layers
    layers = [*body, *head]
    if any(has_hooks(layer) for layer, _ in layers):
        raise UnsupportedLayerError("a layer has hooks or a replaced forward")
    names = [name for _, layer_names in layers for name in layer_names.values()]
    if len(set(names)) < len(names) or set(names) != model.parameters.keys():
        raise UnsupportedLayerError("layers share a parameter, or one belongs to no layer")
    steps: list[LayerStep] = []
    shape = start = model.input_shape
    cut, cut_shape = 0, start
    is_closed = True  # the last step cannot be extended
    for index, (layer, layer_names) in enumerate(layers):
        if index == len(body):
            cut = len(steps)
            cut_shape = shape
            is_closed = True
        if type(layer) is nn.Flatten and (layer.start_dim, layer.end_dim) == (1, -1):
            shape = (math.prod(shape),)
            start = start if steps else shape
            continue
        joined = None if is_closed else _extend_step(steps[-1], layer, shape)
        if joined:
            steps[-1] = joined
        else:
            steps.append(_start_step(layer, layer_names, shape, is_first=not steps))
        is_closed, shape = False, steps[-1].output_shape
    if not steps or shape != (model.classes,):
        raise UnsupportedLayerError("the last layer does not return logits")
    return LayerStack(start, tuple(steps), cut, cut_shape)


def _start_step(layer: nn.Module, names: Mapping[str, str], shape: Shape, *, is_first: bool) -> LayerStep:
    if type(layer) is nn.Conv2d and len(shape) == 3:
        return _build_convolution(layer, names, shape)
    if type(layer) is nn.Linear and len(shape) == 1:
        return LayerStep("linear", names, shape, (layer.out_features,))
    if type(layer) is MeanEmbedding and is_first:
        return LayerStep("words", names, shape, (layer.weight.shape[1],))
    if type(layer) is nn.MaxPool2d and len(shape) == 3:
        return _add_pooling(LayerStep("pool", {}, shape, shape), _pooling_window(layer))
    if type(layer) is nn.ReLU:
        return LayerStep("pool", {}, shape, shape, relu=True)
    if [*layer.children()]:
        raise UnsupportedLayerError(f"the model is not a sequence of layers ({type(layer).__name__})")
    supported_types = (nn.Conv2d, nn.Linear, nn.MaxPool2d, nn.Flatten, MeanEmbedding)
    where = f" on inputs of shape {shape}" if type(layer) in supported_types else ""
    raise UnsupportedLayerError(f"the model has a {type(layer).__name__}{where}")


def _build_convolution(layer: nn.Conv2d, names: Mapping[str, str], shape: Shape) -> LayerStep:
    if (layer.stride, layer.dilation, layer.groups, layer.padding_mode) != ((1, 1), (1, 1), 1, "zeros"):
        raise UnsupportedLayerError(
            "a Conv2d has a stride, dilation, groups or a padding mode other than zeros"
        )
    left, right, above, below = layer._reversed_padding_repeated_twice
    kernel = layer.kernel_size[0], layer.kernel_size[1]
    height, width = shape[1] + above + below - kernel[0] + 1, shape[2] + left + right - kernel[1] + 1
    output_shape = (layer.out_channels, height, width)
    return LayerStep("conv", names, shape, output_shape, kernel, (left, right, above, below))


def _extend_step(step: LayerStep, layer: nn.Module, shape: Shape) -> LayerStep | None:
    """Return the step extended by this layer, or None; `shape` is flat if there was a Flatten between."""
    if type(layer) is nn.ReLU and step.kind != "words":
        return replace(step, relu=True) if shape == step.output_shape else None
    if type(layer) is nn.MaxPool2d and step.kind == "conv" and step.window == (1, 1) and len(shape) == 3:
        return _add_pooling(step, _pooling_window(layer))
    return None


def _add_pooling(step: LayerStep, window: tuple[int, int]) -> LayerStep:
    channels, height, width = step.output_shape
    return replace(step, window=window, output_shape=(channels, height // window[0], width // window[1]))


def _pooling_window(layer: nn.MaxPool2d) -> tuple[int, int]:
    rows, columns = _as_pair(layer.kernel_size)
    has_default_form = _as_pair(layer.dilation) == (1, 1) and not layer.ceil_mode and not layer.return_indices
    is_disjoint = _as_pair(layer.stride) == (rows, columns) and _as_pair(layer.padding) == (0, 0)

    if not (is_disjoint and has_default_form) or rows * columns > 255:
        raise UnsupportedLayerError("a MaxPool2d has windows that overlap, have padding or are large")
    return rows, columns


def _as_pair(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


PRIORITY = 10
PREDICT_BATCH = 32
"""Samples per forward pass: a part of a batch of `ClientTrainer.predict`, small enough for the cache."""


MESSAGE_DELAY = 3.0
"""Seconds of compilation after which a message is shown at a terminal."""


def list_packages() -> list[str]:
    """Return the packages that this backend needs and that are installed."""
    return ["numba"] if _has_numba() else []


def warm_up_kernels(model: SplitModel, notify: Callable[[str], None]) -> None:
    """Compile the kernels and check one step, if the model's layers are supported."""
    if unsupported_layers(model):
        return
    message = "compiling the trainer, once on this machine: about 20 seconds"
    timer = threading.Timer(MESSAGE_DELAY, notify if sys.stderr.isatty() else str, [message])
    timer.daemon = True
    timer.start()
    reason = unsupported_machine(model)
    timer.cancel()
    timer.join()
    if reason:
        notify(f"autograd trains, several times slower than compiled: {reason}")


def _has_numba() -> bool:
    return find_spec("numba") is not None


def unsupported_reason(plan: FitPlan) -> str:
    """Return why the plan is not supported; empty if it is."""
    reason = unsupported_model(plan.model)
    if reason:
        return reason
    from feddbe.training.compiled.sgd import COMPILED, find_autograd_terms, needs_autograd

    compiled_terms = [type(term.apply) for term in plan.terms if type(term.apply) in COMPILED]
    has_duplicates = len(set(compiled_terms)) < len(compiled_terms)
    if has_duplicates or not all(term.outputs_only for term in find_autograd_terms(plan)):
        return "the method has its own loss or term without `outputs_only`"
    drift_names = set(plan.correction)
    for term in plan.terms:
        if isinstance(term.apply, Prox):
            drift_names |= term.const.keys()
    names = plan.model.parameters.keys()
    if not plan.params.keys() >= names or not plan.extras.keys() <= {"prbm"} or not drift_names <= names:
        return "the method trains parameters other than the model and PRBM"
    linear = replace(plan.optimizer, momentum=0.0, weight_decay=0.0)
    if not (plan.optimizer if needs_autograd(plan) else linear).is_plain_sgd:
        return "the optimizer is not SGD without momentum, weight decay and clipping"
    return unsupported_types([*plan.params.values(), *plan.extras.values(), *plan.correction.values()])


def unsupported_pass_reason(model: SplitModel, params: Mapping[str, Tensor]) -> str:
    """Return why a pass with these parameters is not supported, or an empty text."""
    names = model.parameters
    if not params.keys() >= names.keys():
        return "parameters of the model are missing"
    return unsupported_model(model) or unsupported_types([params[name] for name in names])


def unsupported_types(tensors: Sequence[Tensor]) -> str:
    """Return why the devices or types of these tensors are not supported, or an empty text."""
    if any(t.device.type != "cpu" for t in tensors):
        return "it is on a GPU"
    is_supported = {t.dtype for t in tensors} in ({torch.float32}, {torch.float64})
    return "" if is_supported else "parameters are not all float32, or all float64"


def unsupported_model(model: SplitModel) -> str:
    """Return why this model is not supported, in any plan; empty if it is."""
    return unsupported_layers(model) or unsupported_machine(model)


def unsupported_layers(model: SplitModel) -> str:
    """Return why this model is not supported, on any machine; empty if it is."""
    stack = _stack_or_reason(model)
    return stack if isinstance(stack, str) else ""


def unsupported_machine(model: SplitModel) -> str:
    """Return why compiled code does not work on this machine; the first call compiles and checks it."""
    stack = _stack_or_reason(model)
    if model not in _machine_reasons and isinstance(stack, LayerStack):
        _machine_reasons[model] = _compare_with_autograd(model, stack)
    return _machine_reasons[model]


def _compare_with_autograd(model: SplitModel, stack: LayerStack) -> str:
    """Return why one gradient and pass differ from autograd's: the tool chain may be missing or broken."""
    if not _has_numba():
        return "numba is not installed"
    generator, (first, *_) = torch.Generator().manual_seed(0), model.parameters.values()
    shape = (3, *model.input_shape)
    if stack.steps[0].kind == "words":
        x = torch.randint(len(first), shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator, dtype=first.dtype)
    y = torch.arange(len(x)) % model.classes
    try:
        actual = compute_gradient(model, model.parameters, {}, x, y).gradients
        actual["logits"] = CompiledPredictor(model, model.parameters, None)(x).logits
    except Exception as error:  # from numba, LLVM or the system
        return f"numba does not work on this machine ({one_line(error)})"
    expected = gradient_by_autograd(model, model.parameters, model.buffers, x, y).gradients
    expected["logits"] = model.forward(model.parameters, x).logits.detach()
    scale = max(float(g.abs().max()) for g in expected.values())
    difference = max(float((actual[name] - g).abs().max()) for name, g in expected.items())
    return "" if difference <= 1e-3 * scale else "its first step differs from autograd's: numba is broken"


_machine_reasons: WeakKeyDictionary[SplitModel, str] = WeakKeyDictionary()
_stacks: WeakKeyDictionary[SplitModel, LayerStack | str] = WeakKeyDictionary()


def _stack_or_reason(model: SplitModel) -> LayerStack | str:
    """Return the model's layers, or why they are not supported."""
    if model not in _stacks:
        try:
            _stacks[model] = unsupported_types(list(model.parameters.values())) or read_layers(model)
        except UnsupportedLayerError as reason:
            _stacks[model] = str(reason)
    return _stacks[model]


def _layer_stack(model: SplitModel) -> LayerStack:
    stack = _stack_or_reason(model)
    assert isinstance(stack, LayerStack)
    return stack


def train(plan: FitPlan) -> FitResult:
    """Execute the plan."""
    from feddbe.training.compiled import sgd

    stack = _layer_stack(plan.model)
    features = _body_features(plan) if sgd.is_body_frozen(plan, stack) else None
    return sgd.train(plan, stack, features)


def _body_features(plan: FitPlan) -> Dataset:
    """Return the outputs of the body for the samples of a plan."""
    dataset, rows = plan.batches.dataset, torch.from_numpy(plan.batches.indices)
    body = CompiledPredictor(plan.model, plan.params, None)
    parts = [
        body(dataset.kernel_inputs(dataset.x.index_select(0, chunk))).z_g for chunk in torch.split(rows, 1024)
    ]
    return Dataset(dataset.name, torch.cat(parts), dataset.y.index_select(0, rows), dataset.classes)


def compute_gradient(
    model: SplitModel, params: Mapping[str, Tensor], statistics: Mapping[str, Tensor], x: Tensor, y: Tensor
) -> Gradient:
    """Return the gradient of the cross-entropy; 0 for frozen parameters."""
    from feddbe.training.compiled import sgd

    gradient = sgd.compute_gradient(model, _layer_stack(model), params, x, y)
    return gradient._replace(statistics=dict(statistics))


def proximal_steps(
    model: SplitModel, params: State, statistics: State, x: Tensor, y: Tensor, steps: ProximalSteps
) -> StepsResult:
    """Return the result of these proximal steps on one batch."""
    from feddbe.training.compiled import sgd

    return sgd.proximal_steps(model, _layer_stack(model), params, x, y, steps)._replace(statistics=statistics)


def make_predictor(model: SplitModel, params: Mapping[str, Tensor], prbm: Tensor | None) -> CompiledPredictor:
    """Return a predictor with these parameters."""
    return CompiledPredictor(model, params, prbm)


class CompiledPredictor:
    """Forward passes at fixed parameters and a fixed vector of PRBM."""

    def __init__(self, model: SplitModel, params: Mapping[str, Tensor], prbm: Tensor | None) -> None:
        from feddbe.training.compiled.network import find_network

        dtype = params[next(iter(model.parameters))].dtype
        self.model, self.params = model, params
        self.network: Network = find_network(
            model, _layer_stack(model), PREDICT_BATCH, dtype, with_cut=True, momentum=False
        )
        self.network.write(params)
        self.network.set_vectors({"prbm": prbm})
        self.network.net["mu"] = 0.0

    def __call__(self, x: Tensor) -> Forward:
        return Forward(*self._forward(x, Forward._fields))

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits only."""
        (logits,) = self._forward(x, ("logits",))
        return logits

    def _forward(self, x: Tensor, names: Sequence[str]) -> list[Tensor]:
        if x.shape[0] <= PREDICT_BATCH:
            return self._forward_batch(x, names)
        batches = [self._forward_batch(batch, names) for batch in torch.split(x, PREDICT_BATCH)]
        return [torch.cat(parts) for parts in zip(*batches, strict=True)]

    def _forward_batch(self, x: Tensor, names: Sequence[str]) -> list[Tensor]:
        shapes = {"logits": (self.model.classes,)}
        outputs = zip(names, self.network.forward(x, names), strict=True)
        return [t.view(x.shape[0], *shapes.get(name, self.model.feature_shape)) for name, t in outputs]
