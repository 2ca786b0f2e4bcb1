"""Epochs of fastText in machine code, where numba is installed (extra `text`).

A step of ten texts is so little arithmetic that calling torch for it costs ten times as much. So for word
vectors, linear layers and cross-entropy, with PRBM and MR as the add-ons have them, `kernels.py` has the step
written out. All else, and all without numba, is autograd's; both give the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

from feddbe.errors import BadInput
from feddbe.models.fasttext import MeanEmbedding
from feddbe.models.split import SplitModel
from feddbe.state import State
from feddbe.terms import CROSS_ENTROPY, RunningMean, Term

__all__ = ["Compiled", "available", "compiled"]

Epoch = tuple[Tensor, Tensor, int]


def available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def compiled(
    model: SplitModel,
    params: Mapping[str, Tensor],
    extras: Mapping[str, Tensor],
    rates: Mapping[str, float],
    terms: Sequence[Term],
) -> Compiled | None:
    """Epochs that move those of `params` and `extras` that have a rate; None for what is not written out."""
    layers = [layer for half in model.layers for layer in half]
    (words, _), *linear = layers
    names = [name for _, own in layers for name in own.values()]
    if (
        type(words) is not MeanEmbedding
        or any(type(layer) is not nn.Linear for layer, _ in linear)
        or any(_hooked(layer) for layer, _ in layers)
        or len(set(names)) < len(names)  # layers that share a parameter
        or len(terms) > 2
        or terms[0] is not CROSS_ENTROPY
        or not all(term.mean for term in terms[1:])
        or not extras.keys() <= {"prbm"}
        or len({t.dtype for t in (*params.values(), *extras.values())}) > 1
        or not available()
    ):
        return None
    return Compiled(model, params, extras, rates, next((t.mean for t in terms if t.mean), RunningMean(0.0)))


class Compiled:
    """One fit. Its `batches` are whole epochs, and a call trains on one."""

    def __init__(
        self,
        model: SplitModel,
        params: Mapping[str, Tensor],
        extras: Mapping[str, Tensor],
        rates: Mapping[str, float],
        mean: RunningMean,
    ) -> None:
        f, h = model.layers
        (_, words), *linear = [*f, *h]
        self.vectors = params[words["weight"]].detach().numpy()
        number = self.vectors.dtype.type
        self.vectors_rate = number(rates.get(words["weight"], 0.0))
        self.weights = tuple(params[own["weight"]].detach().numpy() for _, own in linear)
        self.biases = tuple(
            params[own["bias"]].detach().numpy() if "bias" in own else np.zeros(len(weight), number)
            for (_, own), weight in zip(linear, self.weights, strict=True)
        )
        kinds = ("weight", "bias")
        self.rates = np.array([[rates.get(own.get(k, ""), 0.0) for k in kinds] for _, own in linear], number)
        self.cut, self.mean = len(f) - 1, mean
        self.prbm = extras["prbm"].detach().numpy() if extras else np.zeros(model.feature_shape, number)
        self.prbm_rate = number(rates.get("prbm", 0.0))

    @staticmethod
    def batches(x: Tensor, y: Tensor, size: int) -> Iterator[Epoch]:
        yield x, y, size

    def __call__(
        self, carries: list[State], consts: list[State], epoch: Epoch, key: int
    ) -> tuple[float, list[State]]:
        """The mean cross-entropy of the epoch's batches, and the new carries."""
        from feddbe.kernels import fasttext_epoch

        x, y, size = epoch
        low, high = (int(word) for word in torch.aminmax(x))
        if low < 0 or high >= len(self.vectors):  # machine code would look no further
            raise BadInput(
                f"a text has word {low if low < 0 else high}, the model has {len(self.vectors)} words"
            )
        number, mean, features = self.vectors.dtype.type, self.mean, len(self.prbm)
        carry = carries[-1] or {"r": torch.zeros(features), "weight": torch.zeros(())}
        r = carry["r"].numpy().astype(number)
        weights = mean.weights(float(carry["weight"]), len(x) // size)
        zbar = consts[-1]["mean"].numpy() if "mean" in consts[-1] else np.zeros(features)
        widths = [self.vectors.shape[1], *(len(bias) for bias in self.biases)]
        inputs, grads = (tuple(np.zeros((size, width), number) for width in widths) for _ in range(2))
        loss = fasttext_epoch(
            x.numpy(),
            y.numpy(),
            size,
            self.vectors,
            self.vectors_rate,
            self.weights,
            self.biases,
            self.rates,
            self.cut,
            self.prbm,
            self.prbm_rate,
            r,
            number(mean.mu),
            (weights if mean.correct else np.ones_like(weights)).astype(number),
            zbar.astype(number),
            number(2 * mean.factor * mean.mu / (features * size)),
            inputs,
            grads,
        )
        new = {"r": torch.from_numpy(r), "weight": torch.tensor(weights[-1], dtype=carry["weight"].dtype)}
        return loss, [*carries[:-1], new] if len(carries) > 1 else carries


def _hooked(layer: nn.Module) -> bool:
    """Whether calling the layer does more than its own arithmetic."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks))
