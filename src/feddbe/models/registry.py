"""Models by name, as in `fasttext(rep=logsoftmax)`, and the cut that makes a SplitModel of any of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from feddbe.config import spec, user_code
from feddbe.config.parameters import Parameters
from feddbe.config.user_code import Found
from feddbe.errors import BadInput, one_line
from feddbe.models.architectures import CUTS, Representation, cnn, cnn_small, fasttext, har_cnn, mlp, resnet18
from feddbe.models.split_model import SplitModel, asked, call
from feddbe.models.split_points import Halves
from feddbe.seeds import torch_seed, torch_seeded

Shape = tuple[int, ...]
Builder = Callable[..., nn.Module | Halves]
ModelSource = str | nn.Module | Halves | Builder
"""A model's name, a module whose weights are the start, a pair (features, classifier), or a function that
makes either from those of (shape of one input, classes, words) that it asks for, called under the run's
seed."""


@dataclass(frozen=True)
class Known:
    """A model that is known by name."""

    build: Callable[..., nn.Module | Halves]
    """A `Builder`; of a model for texts, a function of (words, classes); and of its options."""
    takes: str
    """The inputs that it takes, in words."""
    fits: Callable[[Shape], bool]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of its cuts."""
    channels_last: bool = True
    """Whether it is faster so, measured."""
    texts: bool = False
    """Whether it takes word numbers; the others take none."""
    options: type[Parameters] = Parameters


def _images(builder: Builder, least: int) -> Known:
    takes = f"images (channels, height, width) of at least {least}x{least}"
    return Known(builder, takes, lambda s: len(s) == 3 and min(s[1:]) >= least)


MODELS: dict[str, Known] = {
    "cnn": _images(cnn, 16),
    "cnn_small": _images(cnn_small, 4),
    "har_cnn": Known(
        har_cnn,
        "signals (signals, 1, steps) of at least 28 steps",
        lambda s: len(s) == 3 and s[1] == 1 and s[2] >= 28,
    ),
    "mlp": Known(mlp, "inputs of any shape", lambda s: True),
    "resnet18": replace(_images(resnet18, 16), aliases=CUTS, channels_last=False),
    "fasttext": Known(
        fasttext, "texts as word numbers", lambda s: len(s) == 1, texts=True, options=Representation
    ),
}
"""In the order in which they are tried on data for which no model was named."""


RESERVED = {"alpha", "mean", "prbm"}
"""Names in states that are not a model's parameters; all others have a slash in them."""


def fitting(shape: Shape, words: int = 0) -> str:
    """The model for inputs of this shape, when none is named; `words` if they are word numbers."""
    return next(name for name, k in MODELS.items() if k.texts == bool(words) and k.fits(shape))


def find(text: str, defaults: spec.Defaults | None = None) -> spec.Named[Parameters]:
    """The model that `text` names, with its options."""
    known = {name: model.options for name, model in MODELS.items()}
    return spec.find("model", text, known, defaults, also=["FILE.py:FUNCTION"])


def build(
    source: ModelSource,
    sample: Tensor,
    classes: int,
    cut: str | None,
    seed: int,
    *,
    words: int = 0,
) -> SplitModel:
    """The model at theta^0 for inputs like `sample` (with a batch axis), cut at `cut`.

    `words`: the size of the vocabulary if inputs are word numbers.
    """
    shape = tuple(sample.shape[1:])
    with torch_seeded(torch_seed(seed, "model")):
        module = _module(source, shape, classes, words)
    # oneDNN and channels-last pay off from about 16x16 on, and for long signals
    onednn = len(shape) == 3 and (min(shape[1:]) >= 16 or max(shape[1:]) >= 128)
    known = MODELS[find(source).name] if isinstance(source, str) else None
    aliases, channels_last = (known.aliases, known.channels_last) if known else ({}, True)
    try:
        model = SplitModel(module, sample, cut, onednn=onednn, channels_last=channels_last, aliases=aliases)
    except BadInput:
        raise
    except Exception as error:  # a layer may answer a wrong shape with any kind of error
        if words and isinstance(error, IndexError):
            raise BadInput(
                f"the model has no vector for the word number {int(sample.max())}: {_misfit(module, sample)}"
                f"its embedding must have {words} words, as many as the data; build(shape, classes, words) "
                "is told their number"
            ) from error
        raise BadInput(
            f"the model does not take inputs of shape {shape}: {_misfit(module, sample)}{one_line(error)}"
        ) from error
    if isinstance(source, FromFile):
        model.remake = partial(source, shape, classes, words)
    if clash := RESERVED & model.parameters.keys():
        raise BadInput(
            f"the model has a parameter '{clash.pop()}', a name that feddbe uses itself; rename it"
        )
    if model.classes != classes:
        raise BadInput(f"the model gives {model.classes} logits, the data has {classes} classes")
    _check_logits(model, sample)
    return model


def _check_logits(model: SplitModel, sample: Tensor) -> None:
    """Probabilities are no logits: the loss takes the softmax itself, and a second one learns next to
    nothing."""
    with torch.no_grad():
        out = model.forward(model.parameters | model.buffers, sample).logits
    if bool((out >= 0).all()) and torch.allclose(out.sum(dim=1), out.new_ones(()), atol=1e-4):
        raise BadInput(
            "the model ends in a softmax: it gives probabilities, but the loss takes logits and has the "
            "softmax in itself; leave the model's last layer out"
        )


def _module(source: ModelSource, shape: Shape, classes: int, words: int) -> nn.Module | Halves:
    if isinstance(source, nn.Module | tuple):
        return source
    if callable(source):
        return (
            source(shape, classes, words)
            if isinstance(source, FromFile)
            else call(source, shape, classes, words)
        )
    chosen = find(source)
    known = MODELS[chosen.name]
    if known.texts != bool(words) or not known.fits(shape):
        kind = "texts as word numbers" if words else "inputs"
        raise BadInput(
            f"model '{chosen.name}' takes {known.takes}, the data has {kind} of shape {shape}; "
            f"fitting: {fitting(shape, words)}"
        )
    return known.build(words if known.texts else shape, classes, **asdict(chosen.options))


def _misfit(module: nn.Module | Halves, sample: Tensor) -> str:
    """Which layer fails on the sample, what it is and what reached it; nothing if no layer was reached."""
    whole = nn.Sequential(*module) if isinstance(module, tuple) else module
    entered: list[str] = []

    def enter(name: str, layer: nn.Module, given: tuple[object, ...]) -> None:
        if given and isinstance(given[0], Tensor):
            entered.append(f"{layer} was given {tuple(given[0].shape)} at '{name}': ")

    leaves = [(name, layer) for name, layer in whole.named_modules() if not [*layer.children()]]
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given, name=name: enter(name, layer, given))
        for name, layer in leaves
    ]
    try:
        with torch.no_grad():
            whole.eval()(sample)
    except Exception:  # the one that is being explained
        return entered[-1] if entered else ""
    finally:
        for hook in hooks:
            hook.remove()
    return ""


@dataclass(frozen=True)
class FromFile:
    """A function in a user's file, called like any other builder; what goes wrong in it becomes one line."""

    found: Found

    def __reduce__(self) -> tuple[Any, ...]:
        return builder, self.found.again

    def __call__(self, shape: tuple[int, ...], classes: int, words: int = 0) -> nn.Module | Halves:
        path, build = self.found.path, self.found.value
        try:
            places, names = asked(build, shape, classes, words)
        except BadInput as error:
            raise BadInput(f"in '{path}': {error}") from None
        shown = ", ".join([*map(str, places), *(f"{name}={value}" for name, value in names.items())])
        where = f"{self.found.name}({shown}) in '{path}'"
        try:
            made = build(*places, **names)
        except Exception as error:  # a user's code may raise anything
            raise BadInput(f"{where} failed{user_code.failed(error, path)}") from error
        pair = isinstance(made, tuple) and len(made) == 2 and all(isinstance(m, nn.Module) for m in made)
        if not pair and not isinstance(made, nn.Module):
            raise BadInput(
                f"{where} returned {type(made).__name__}; expected an nn.Module or a pair of them "
                "(features, classifier)"
            )
        return made  # type: ignore[no-any-return]


def builder(model: str, sha256: str = "") -> FromFile:
    """The one that `FILE.py:FUNCTION` names."""
    return FromFile(user_code.load("model", "function", model, callable, sha256))
