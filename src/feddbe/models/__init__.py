"""Models by name, and the cut that makes a SplitModel of any of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from feddbe.errors import BadInput, unknown
from feddbe.models.cnn import cnn, cnn_small, mlp
from feddbe.models.split import Forward, Halves, SplitModel
from feddbe.seeds import torch_seed, torch_seeded

__all__ = ["MODELS", "Forward", "ModelSource", "SplitModel", "build", "fitting"]

Builder = Callable[[tuple[int, ...], int], nn.Module]
ModelSource = str | nn.Module | Halves | Builder
"""A model's name, a module whose weights are the start, a pair (features, classifier), or a function that
makes a module for (shape of one input, classes), called under the run's seed."""

MODELS: dict[str, tuple[Builder, int]] = {"cnn": (cnn, 16), "cnn_small": (cnn_small, 4), "mlp": (mlp, 0)}
"""Name -> builder and the smallest image side it takes (0: anything)."""


RESERVED = {"alpha", "mean", "prbm"}
"""Names in states that are not a model's parameters; all others have a slash in them."""


def fitting(shape: tuple[int, ...]) -> str:
    """The model for inputs of this shape, when none is named."""
    side = min(shape[1:]) if len(shape) == 3 else 0
    return next(name for name, (_, least) in MODELS.items() if side >= least)


def build(source: ModelSource, sample: Tensor, classes: int, cut: str | None, seed: int) -> SplitModel:
    """The model at theta^0 for inputs like `sample` (with a batch axis), cut at `cut`."""
    shape = tuple(sample.shape[1:])
    with torch_seeded(torch_seed(seed, "model")):
        module = _module(source, shape, classes)
    # oneDNN and channels-last pay off from about 16x16 on
    onednn = len(shape) == 3 and min(shape[1:]) >= 16
    try:
        model = SplitModel(module, sample, cut, onednn=onednn)
    except BadInput:
        raise
    except Exception as error:  # a layer may answer a wrong shape with any kind of error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInput(f"the model does not take inputs of shape {shape}: {reason}") from error
    if clash := RESERVED & model.parameters.keys():
        raise BadInput(
            f"the model has a parameter '{clash.pop()}', a name that feddbe uses itself; rename it"
        )
    if model.classes != classes:
        raise BadInput(f"the model gives {model.classes} logits, the data has {classes} classes")
    return model


def _module(source: ModelSource, shape: tuple[int, ...], classes: int) -> nn.Module | Halves:
    if isinstance(source, nn.Module | tuple):
        return source
    if callable(source):
        return source(shape, classes)
    if source not in MODELS:
        raise unknown("model", source, MODELS)
    builder, least = MODELS[source]
    if least and (len(shape) != 3 or min(shape[1:]) < least):
        raise BadInput(
            f"model '{source}' takes images (channels, height, width) of at least {least}x{least}, "
            f"the data has inputs of shape {shape}; fitting: {fitting(shape)}"
        )
    return builder(shape, classes)
