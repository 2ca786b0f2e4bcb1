"""Models by name, such as `fasttext(rep=logsoftmax)`, and from users' files."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddbe.config import parameters, user_code
from feddbe.config.parameters import Parameters, parameter
from feddbe.config.user_code import UserObject
from feddbe.errors import InvalidInputError, one_line
from feddbe.models.split_model import Halves, SplitModel, builder_arguments, call_builder
from feddbe.seeds import torch_seed, torch_seeded


def cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Return the CNN for images from 16x16.

    conv 5x5 (32), conv 5x5 (64), each with 2x2 pooling and ReLU, FC 512, FC.
    """
    channels, height, width = shape
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return named_sequential(
        conv1=[nn.Conv2d(channels, 32, 5), nn.MaxPool2d(2), nn.ReLU()],
        conv2=[nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU()],
        fc1=[nn.Flatten(), nn.Linear(64 * rows * columns, 512), nn.ReLU()],
        fc=[nn.Linear(512, classes)],
    )


def cnn_small(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Return the CNN for images from 4x4.

    conv 3x3 (16), conv 3x3 (32), padded, each with 2x2 pooling and ReLU, FC 64, FC.
    """
    channels, height, width = shape
    return named_sequential(
        conv1=[nn.Conv2d(channels, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()],
        conv2=[nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()],
        fc1=[nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), 64), nn.ReLU()],
        fc=[nn.Linear(64, classes)],
    )


def mlp(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Return the perceptron for inputs of any shape: FC 64 with ReLU, FC."""
    return named_sequential(
        fc1=[nn.Flatten(), nn.Linear(math.prod(shape), 64), nn.ReLU()],
        fc=[nn.Linear(64, classes)],
    )


def named_sequential(**blocks: list[nn.Module]) -> nn.Sequential:
    """Return a Sequential of named blocks; a block of one layer is that layer."""
    layers = OrderedDict[str, nn.Module]()
    for name, block in blocks.items():
        layers[name] = block[0] if len(block) == 1 else nn.Sequential(*block)
    return nn.Sequential(layers)


def har_cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """Return the CNN for signals from 28 steps.

    conv 1x9 (32), conv 1x9 (64), each with 1x2 pooling and ReLU, FC 1024, FC 512, FC.
    """
    channels, _, steps = shape
    remaining_steps = ((steps - 8) // 2 - 8) // 2
    return named_sequential(
        conv1=[nn.Conv2d(channels, 32, (1, 9)), nn.MaxPool2d((1, 2)), nn.ReLU()],
        conv2=[nn.Conv2d(32, 64, (1, 9)), nn.MaxPool2d((1, 2)), nn.ReLU()],
        fc1=[nn.Flatten(), nn.Linear(64 * remaining_steps, 1024), nn.ReLU()],
        fc2=[nn.Linear(1024, 512), nn.ReLU()],
        fc=[nn.Linear(512, classes)],
    )


EMBEDDING_SIZE = 32


class MeanEmbedding(nn.Module):
    """Mean of the word vectors over all positions of (batch, length) word indices.

    Index 0, unknown or padding, is a vector of zeros without gradient; its positions count in the mean. The
    initialization is that of `nn.Embedding`, N(0, 1).
    """

    def __init__(self, words: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_()[0] = 0

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return F.embedding_bag(x, self.weight, mode="mean")
        # Look up each word of the batch once and multiply by its share of each text. There are fewer words
        # than positions, and a word's gradients are summed before they are added, as in the dense gradient.
        words, positions = torch.unique(x, return_inverse=True)
        shares = self.weight.new_zeros(len(x), len(words)).scatter_add_(
            1, positions, (x != 0).to(self.weight) / x.shape[1]
        )
        return shares @ F.embedding(words, self.weight, sparse=True)


@dataclass(frozen=True)
class FastTextOptions(Parameters):
    """Options of fastText.

    In the published code, the log-softmax of the logits moves before the last layer if the model is split
    there.
    """

    name: ClassVar[str] = "fasttext"

    rep: str = parameter(
        "linear",
        "representation: the hidden layer, or its log-softmax, as published",
        choices=("linear", "logsoftmax"),
    )


def fasttext(words: int, classes: int, rep: str = "linear") -> nn.Sequential:
    """Return fastText: mean of word vectors of size 32, FC 32 without activation, FC."""
    layers: dict[str, nn.Module] = {
        "embedding": MeanEmbedding(words, EMBEDDING_SIZE),
        "fc1": nn.Linear(EMBEDDING_SIZE, EMBEDDING_SIZE),
    }
    if rep == "logsoftmax":
        layers["logsoftmax"] = nn.LogSoftmax(1)
    return nn.Sequential(OrderedDict(layers, fc=nn.Linear(EMBEDDING_SIZE, classes)))


RESNET18_CUTS = {
    "conv": "maxpool",
    "b1": "layer1",
    "b2": "layer2",
    "b3": "layer3",
    "b4": "layer4",
    "pool": "flatten",
}
"""Names of the paper for the six cuts between stem and classifier."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut: the identity, or a 1x1 convolution if shapes change."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride > 1 or channels != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        residual = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu(residual + shortcut)
        return out


class ResNet18(nn.Module):
    """ResNet-18: stem, four layers of two blocks each, mean over the image, linear classifier."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize convolutions with variance 2/fan-out, and BatchNorm and fc as torch does."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(layer, nn.BatchNorm2d | nn.Linear):
                layer.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out


def resnet18(shape: tuple[int, ...], classes: int) -> ResNet18:
    """Return ResNet-18 for images of this shape (channels, height, width)."""
    return ResNet18(shape[0], classes)


Shape = tuple[int, ...]
Builder = Callable[..., nn.Module | Halves]
ModelSource = str | nn.Module | Halves | Builder
"""A model's name, a module with its initial weights, a pair (features, classifier), or a builder.

A builder is a function of any of shape (of one input), classes and words. It returns a module or a pair, and
is called under the run's seed.
"""


@dataclass(frozen=True)
class ModelEntry:
    """A built-in model."""

    build: Callable[..., nn.Module | Halves]
    """Function of (shape, classes), or of (words, classes) for texts; options are further arguments."""
    supported_inputs: str
    """Description of the supported inputs."""
    supports_shape: Callable[[Shape], bool]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of cuts."""
    channels_last: bool = True
    """True if the channels-last layout is faster, as measured."""
    is_text_model: bool = False
    """True if inputs are word indices."""
    options: type[Parameters] = Parameters


def _image_model(builder: Builder, min_size: int) -> ModelEntry:
    supported_inputs = f"images (channels, height, width) of at least {min_size}x{min_size}"
    return ModelEntry(builder, supported_inputs, lambda shape: len(shape) == 3 and min(shape[1:]) >= min_size)


MODELS: dict[str, ModelEntry] = {
    "cnn": _image_model(cnn, 16),
    "cnn_small": _image_model(cnn_small, 4),
    "har_cnn": ModelEntry(
        har_cnn,
        "signals (signals, 1, steps) of at least 28 steps",
        lambda shape: len(shape) == 3 and shape[1] == 1 and shape[2] >= 28,
    ),
    "mlp": ModelEntry(mlp, "inputs of any shape", lambda shape: True),
    "resnet18": replace(_image_model(resnet18, 16), aliases=RESNET18_CUTS, channels_last=False),
    "fasttext": ModelEntry(
        fasttext,
        "texts as word indices",
        lambda shape: len(shape) == 1,
        is_text_model=True,
        options=FastTextOptions,
    ),
}
"""Built-in models; by default the first that supports the data's inputs is used."""


RESERVED = {"alpha", "mean", "prbm"}
"""Names in states that are not parameters of a model; all others contain a slash."""


def default_model(shape: Shape, words: int = 0) -> str:
    """Return the default model for inputs of this shape; `words` is the vocabulary size of texts."""
    return next(name for name, entry in MODELS.items() if _supports(entry, shape, words))


def _supports(entry: ModelEntry, shape: Shape, words: int) -> bool:
    return entry.is_text_model == bool(words) and entry.supports_shape(shape)


def parse_model(text: str, defaults: parameters.Defaults | None = None) -> parameters.ParsedName[Parameters]:
    """Return the name of a built-in model and its options from text like `fasttext(rep=linear)`."""
    options_by_name = {name: model.options for name, model in MODELS.items()}
    return parameters.find_class("model", text, options_by_name, defaults, other_names=["FILE.py:FUNCTION"])


def build_model(
    source: ModelSource,
    sample: Tensor,
    classes: int,
    cut: str | None,
    seed: int,
    *,
    words: int = 0,
) -> SplitModel:
    """Return the model at theta^0, split at the cut.

    Args:
        source: Name, module, pair of modules, or builder.
        sample: Inputs with a batch axis.
        classes: Number of classes.
        cut: Name of the cut; None: before the last linear layer.
        seed: Seed of the run.
        words: Size of the vocabulary if inputs are word indices.

    Raises:
        InvalidInputError: The model is unknown, does not fit the data or cannot be split.
    """
    shape = tuple(sample.shape[1:])
    with torch_seeded(torch_seed(seed, "model")):
        module = _build_module(source, shape, classes, words)
    # oneDNN and channels-last are faster from about 16x16 pixels, and for long signals.
    onednn = len(shape) == 3 and (min(shape[1:]) >= 16 or max(shape[1:]) >= 128)
    aliases: Mapping[str, str] = {}
    channels_last = True
    if isinstance(source, str):
        entry = MODELS[parse_model(source).name]
        aliases, channels_last = entry.aliases, entry.channels_last
    try:
        model = SplitModel(module, sample, cut, onednn=onednn, channels_last=channels_last, aliases=aliases)
    except InvalidInputError:
        raise
    except Exception as error:  # a layer may raise any error for a wrong shape
        layer = _describe_failing_layer(module, sample)
        if words and isinstance(error, IndexError):
            raise InvalidInputError(
                f"the model has no vector for word index {int(sample.max())}: {layer}"
                f"its embedding needs {words} words, as many as the data has; a builder with a parameter "
                "`words` receives that number"
            ) from error
        raise InvalidInputError(
            f"the model does not take inputs of shape {shape}: {layer}{one_line(error)}"
        ) from error
    if isinstance(source, ModelFromFile):
        model.rebuild_module = partial(source, shape, classes, words)
    reserved = RESERVED & model.parameters.keys()
    if reserved:
        raise InvalidInputError(
            f"the model has a parameter '{reserved.pop()}', a name reserved by feddbe; rename it"
        )
    if model.classes != classes:
        raise InvalidInputError(f"the model returns {model.classes} logits, the data has {classes} classes")
    _check_logits(model, sample)
    return model


def _check_logits(model: SplitModel, sample: Tensor) -> None:
    """Raise an error if the model ends in a softmax.

    The loss applies the softmax, and with a second one a model hardly learns.
    """
    with torch.no_grad():
        out = model.forward(model.parameters | model.buffers, sample).logits
    if bool((out >= 0).all()) and torch.allclose(out.sum(dim=1), out.new_ones(()), atol=1e-4):
        raise InvalidInputError(
            "the model ends in a softmax: it returns probabilities, but the loss expects logits and applies "
            "the softmax; remove the model's last layer"
        )


def _build_module(source: ModelSource, shape: Shape, classes: int, words: int) -> nn.Module | Halves:
    if isinstance(source, nn.Module | tuple):
        return source
    if isinstance(source, ModelFromFile):
        return source(shape, classes, words)
    if callable(source):
        module: nn.Module | Halves = call_builder(source, shape, classes, words)
        return module
    parsed = parse_model(source)
    entry = MODELS[parsed.name]
    if not _supports(entry, shape, words):
        kind = "texts as word indices" if words else "inputs"
        raise InvalidInputError(
            f"model '{parsed.name}' takes {entry.supported_inputs}, the data has {kind} of shape {shape}; "
            f"use {default_model(shape, words)}"
        )
    return entry.build(words if entry.is_text_model else shape, classes, **asdict(parsed.options))


def _describe_failing_layer(module: nn.Module | Halves, sample: Tensor) -> str:
    """Describe the layer that fails on the sample and its input; empty if no layer was reached."""
    model = nn.Sequential(*module) if isinstance(module, tuple) else module
    descriptions: list[str] = []

    def record_layer(name: str, layer: nn.Module, inputs: tuple[object, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            descriptions.append(f"{layer} at '{name}' received {tuple(inputs[0].shape)}: ")

    leaves = [(name, layer) for name, layer in model.named_modules() if not [*layer.children()]]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs, name=name: record_layer(name, layer, inputs))
        for name, layer in leaves
    ]
    try:
        with torch.no_grad():
            model.eval()(sample)
    except Exception:  # the error that is described
        return descriptions[-1] if descriptions else ""
    finally:
        for hook in hooks:
            hook.remove()
    return ""


@dataclass(frozen=True)
class ModelFromFile:
    """A model builder in a user's file; its errors are reported in one line."""

    user_object: UserObject

    def __reduce__(self) -> tuple[Any, ...]:
        return load_builder, self.user_object.reload

    def __call__(self, shape: tuple[int, ...], classes: int, words: int = 0) -> nn.Module | Halves:
        path, build = self.user_object.path, self.user_object.value
        try:
            arguments, keywords = builder_arguments(build, shape, classes, words)
        except InvalidInputError as error:
            raise InvalidInputError(f"in '{path}': {error}") from None
        argument_texts = [*map(str, arguments), *(f"{name}={value}" for name, value in keywords.items())]
        call = f"{self.user_object.name}({', '.join(argument_texts)}) in '{path}'"
        try:
            built = build(*arguments, **keywords)
        except Exception as error:  # a user's code may raise anything
            raise InvalidInputError(f"{call} failed{user_code.describe_failure(error, path)}") from error
        is_pair = (
            isinstance(built, tuple) and len(built) == 2 and all(isinstance(m, nn.Module) for m in built)
        )
        if not is_pair and not isinstance(built, nn.Module):
            raise InvalidInputError(
                f"{call} returned {type(built).__name__}; expected an nn.Module or a pair of them "
                "(features, classifier)"
            )
        return built  # type: ignore[no-any-return]


def load_builder(reference: str, sha256: str = "") -> ModelFromFile:
    """Return the builder that `FILE.py:FUNCTION` names."""
    return ModelFromFile(user_code.load_object("model", "function", reference, callable, sha256))
