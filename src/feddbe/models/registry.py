"""Models by name, such as `fasttext(rep=logsoftmax)`, and from users' files."""

from __future__ import annotations

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
from feddbe.models.split_model import Halves, SplitModel, accepted_arguments, call_builder
from feddbe.seeds import torch_seed, torch_seeded


def cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """conv 5x5 (32), conv 5x5 (64), each with 2x2 pooling and ReLU, FC 512, FC: for images from 16x16."""
    channels, height, width = shape
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return blocks(
        conv1=[nn.Conv2d(channels, 32, 5), nn.MaxPool2d(2), nn.ReLU()],
        conv2=[nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU()],
        fc1=[nn.Flatten(), nn.Linear(64 * rows * columns, 512), nn.ReLU()],
        fc=[nn.Linear(512, classes)],
    )


def cnn_small(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """conv 3x3 (16), conv 3x3 (32), padded, each with 2x2 pooling and ReLU, FC 64, FC; images from 4x4."""
    channels, height, width = shape
    return blocks(
        conv1=[nn.Conv2d(channels, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()],
        conv2=[nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()],
        fc1=[nn.Flatten(), nn.Linear(32 * (height // 4) * (width // 4), 64), nn.ReLU()],
        fc=[nn.Linear(64, classes)],
    )


def mlp(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """FC 64 with ReLU, FC: for plain features of any shape."""
    size = 1
    for side in shape:
        size *= side
    return blocks(
        fc1=[nn.Flatten(), nn.Linear(size, 64), nn.ReLU()],
        fc=[nn.Linear(64, classes)],
    )


def blocks(**blocks: list[nn.Module]) -> nn.Sequential:
    """Named blocks in a row; a block of one layer is that layer."""
    layers = {name: block[0] if len(block) == 1 else nn.Sequential(*block) for name, block in blocks.items()}
    return nn.Sequential(OrderedDict(layers))


def har_cnn(shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """conv 1x9 (32), conv 1x9 (64), each with 1x2 pooling and ReLU, FC 1024, FC 512, FC; from 28 steps."""
    signals, _, steps = shape
    left = ((steps - 8) // 2 - 8) // 2
    return blocks(
        conv1=[nn.Conv2d(signals, 32, (1, 9)), nn.MaxPool2d((1, 2)), nn.ReLU()],
        conv2=[nn.Conv2d(32, 64, (1, 9)), nn.MaxPool2d((1, 2)), nn.ReLU()],
        fc1=[nn.Flatten(), nn.Linear(64 * left, 1024), nn.ReLU()],
        fc2=[nn.Linear(1024, 512), nn.ReLU()],
        fc=[nn.Linear(512, classes)],
    )


SIZE = 32


class MeanEmbedding(nn.Module):
    """The mean of the word vectors over all positions of (batch, length) word numbers.

    Number 0, unknown or padding, is a vector of zeros that gets no gradient; its positions count in the mean.
    The start is that of `nn.Embedding`, N(0, 1).
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
        # Each word of the batch once, times its share of each text. Fewer rows than positions; and a word's
        # gradients are summed before they are added to its vector, as in the dense gradient.
        words, place = torch.unique(x, return_inverse=True)
        shares = self.weight.new_zeros(len(x), len(words)).scatter_add_(
            1, place, (x != 0).to(self.weight) / x.shape[1]
        )
        return shares @ F.embedding(words, self.weight, sparse=True)


@dataclass(frozen=True)
class Representation(Parameters):
    """As published the log-softmax meant for the logits comes before the last layer as soon as the model is
    split there."""

    name: ClassVar[str] = "fasttext"

    rep: str = parameter(
        "linear",
        "representation: the hidden layer, or as published its log-softmax",
        choices=("linear", "logsoftmax"),
    )


def fasttext(words: int, classes: int, rep: str = "linear") -> nn.Sequential:
    """Vectors of 32 numbers, their mean, FC 32 without activation, FC; `rep`: see `Representation`."""
    layers: dict[str, nn.Module] = {"embedding": MeanEmbedding(words, SIZE), "fc1": nn.Linear(SIZE, SIZE)}
    if rep == "logsoftmax":
        layers["logsoftmax"] = nn.LogSoftmax(1)
    return nn.Sequential(OrderedDict(layers, fc=nn.Linear(SIZE, classes)))


CUTS = {"conv": "maxpool", "b1": "layer1", "b2": "layer2", "b3": "layer3", "b4": "layer4", "pool": "flatten"}
"""The paper's names of the six places between stem and classifier."""


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, and around them the identity, or a 1x1 convolution where shapes change."""

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
        around = x if self.downsample is None else self.downsample(x)
        inside = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out: Tensor = self.relu(inside + around)
        return out


class ResNet18(nn.Module):
    """Stem, four layers of two blocks each, mean over the image, linear classifier."""

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
        """Convolutions normal with variance 2/fan-out; BatchNorm 1 and 0, its statistics too; fc as torch."""
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
    """ResNet-18 for images of this shape (channels, height, width)."""
    return ResNet18(shape[0], classes)


Shape = tuple[int, ...]
Builder = Callable[..., nn.Module | Halves]
ModelSource = str | nn.Module | Halves | Builder
"""A model's name, a module with its initial weights, a pair (features, classifier), or a builder.

A builder is a function of those of (shape of one input, classes, words) that it names. It returns a module or
a pair, and is called under the run's seed.
"""


@dataclass(frozen=True)
class ModelEntry:
    """A built-in model."""

    build: Callable[..., nn.Module | Halves]
    """A `Builder`; for texts, a function of (words, classes); options are further arguments."""
    describe_inputs: str
    """Description of the supported inputs."""
    fits: Callable[[Shape], bool]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of its cuts."""
    channels_last: bool = True
    """Whether the channels-last layout is faster, as measured."""
    texts: bool = False
    """Whether inputs are word indices."""
    options: type[Parameters] = Parameters


def _images(builder: Builder, least: int) -> ModelEntry:
    takes = f"images (channels, height, width) of at least {least}x{least}"
    return ModelEntry(builder, takes, lambda s: len(s) == 3 and min(s[1:]) >= least)


MODELS: dict[str, ModelEntry] = {
    "cnn": _images(cnn, 16),
    "cnn_small": _images(cnn_small, 4),
    "har_cnn": ModelEntry(
        har_cnn,
        "signals (signals, 1, steps) of at least 28 steps",
        lambda s: len(s) == 3 and s[1] == 1 and s[2] >= 28,
    ),
    "mlp": ModelEntry(mlp, "inputs of any shape", lambda s: True),
    "resnet18": replace(_images(resnet18, 16), aliases=CUTS, channels_last=False),
    "fasttext": ModelEntry(
        fasttext, "texts as word numbers", lambda s: len(s) == 1, texts=True, options=Representation
    ),
}
"""In the order in which they are tried if no model is named."""


RESERVED = {"alpha", "mean", "prbm"}
"""Names in states that are not parameters of a model; all others contain a slash."""


def default_model(shape: Shape, words: int = 0) -> str:
    """Return the default model for inputs of this shape; `words` is the vocabulary size of texts."""
    return next(name for name, k in MODELS.items() if k.texts == bool(words) and k.fits(shape))


def find_model(text: str, defaults: parameters.Defaults | None = None) -> parameters.ParsedName[Parameters]:
    """Return the model that `text` names, with its options."""
    known = {name: model.options for name, model in MODELS.items()}
    return parameters.find_class("model", text, known, defaults, other_names=["FILE.py:FUNCTION"])


def build_model(
    source: ModelSource,
    sample: Tensor,
    classes: int,
    cut: str | None,
    seed: int,
    *,
    words: int = 0,
) -> SplitModel:
    """Return the model at theta^0, divided at the cut.

    Args:
        source: Name, module, pair of modules, or builder.
        sample: Inputs with a batch axis.
        classes: Number of classes.
        cut: Name of the cut; None: before the last linear layer.
        seed: Seed of the run.
        words: Size of the vocabulary if inputs are word indices.
    """
    shape = tuple(sample.shape[1:])
    with torch_seeded(torch_seed(seed, "model")):
        module = _module(source, shape, classes, words)
    # oneDNN and channels-last are faster from about 16x16 pixels, and for long signals.
    onednn = len(shape) == 3 and (min(shape[1:]) >= 16 or max(shape[1:]) >= 128)
    known = MODELS[find_model(source).name] if isinstance(source, str) else None
    aliases, channels_last = (known.aliases, known.channels_last) if known else ({}, True)
    try:
        model = SplitModel(module, sample, cut, onednn=onednn, channels_last=channels_last, aliases=aliases)
    except InvalidInputError:
        raise
    except Exception as error:  # a layer may raise any error for a wrong shape
        if words and isinstance(error, IndexError):
            raise InvalidInputError(
                f"the model has no vector for the word number {int(sample.max())}: {_misfit(module, sample)}"
                f"its embedding must have {words} words, as many as the data; a builder with a parameter "
                "`words` receives their number"
            ) from error
        raise InvalidInputError(
            f"the model does not take inputs of shape {shape}: {_misfit(module, sample)}{one_line(error)}"
        ) from error
    if isinstance(source, ModelFromFile):
        model.remake = partial(source, shape, classes, words)
    if clash := RESERVED & model.parameters.keys():
        raise InvalidInputError(
            f"the model has a parameter '{clash.pop()}', a name reserved by feddbe; rename it"
        )
    if model.classes != classes:
        raise InvalidInputError(f"the model gives {model.classes} logits, the data has {classes} classes")
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


def _module(source: ModelSource, shape: Shape, classes: int, words: int) -> nn.Module | Halves:
    if isinstance(source, nn.Module | tuple):
        return source
    if callable(source):
        return (
            source(shape, classes, words)
            if isinstance(source, ModelFromFile)
            else call_builder(source, shape, classes, words)
        )
    chosen = find_model(source)
    known = MODELS[chosen.name]
    if known.texts != bool(words) or not known.fits(shape):
        kind = "texts as word numbers" if words else "inputs"
        raise InvalidInputError(
            f"model '{chosen.name}' takes {known.describe_inputs}, the data has {kind} of shape {shape}; "
            f"fitting: {default_model(shape, words)}"
        )
    return known.build(words if known.texts else shape, classes, **asdict(chosen.options))


def _misfit(module: nn.Module | Halves, sample: Tensor) -> str:
    """Describe the layer that fails on the sample and its input; empty if no layer was reached."""
    whole = nn.Sequential(*module) if isinstance(module, tuple) else module
    entered: list[str] = []

    def enter(name: str, layer: nn.Module, inputs: tuple[object, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            entered.append(f"{layer} was given {tuple(inputs[0].shape)} at '{name}': ")

    leaves = [(name, layer) for name, layer in whole.named_modules() if not [*layer.children()]]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs, name=name: enter(name, layer, inputs))
        for name, layer in leaves
    ]
    try:
        with torch.no_grad():
            whole.eval()(sample)
    except Exception:  # the error that is being explained
        return entered[-1] if entered else ""
    finally:
        for hook in hooks:
            hook.remove()
    return ""


@dataclass(frozen=True)
class ModelFromFile:
    """A model builder in a user's file; its errors are reported in one line."""

    user_object: UserObject

    def __reduce__(self) -> tuple[Any, ...]:
        return resolve_builder, self.user_object.reload

    def __call__(self, shape: tuple[int, ...], classes: int, words: int = 0) -> nn.Module | Halves:
        path, build = self.user_object.path, self.user_object.value
        try:
            arguments, keywords = accepted_arguments(build, shape, classes, words)
        except InvalidInputError as error:
            raise InvalidInputError(f"in '{path}': {error}") from None
        call_text = ", ".join(
            [*map(str, arguments), *(f"{name}={value}" for name, value in keywords.items())]
        )
        where = f"{self.user_object.name}({call_text}) in '{path}'"
        try:
            built = build(*arguments, **keywords)
        except Exception as error:  # a user's code may raise anything
            raise InvalidInputError(f"{where} failed{user_code.describe_failure(error, path)}") from error
        is_pair = (
            isinstance(built, tuple) and len(built) == 2 and all(isinstance(m, nn.Module) for m in built)
        )
        if not is_pair and not isinstance(built, nn.Module):
            raise InvalidInputError(
                f"{where} returned {type(built).__name__}; expected an nn.Module or a pair of them "
                "(features, classifier)"
            )
        return built  # type: ignore[no-any-return]


def resolve_builder(model: str, sha256: str = "") -> ModelFromFile:
    """Return the builder that `FILE.py:FUNCTION` names."""
    return ModelFromFile(user_code.load_object("model", "function", model, callable, sha256))
