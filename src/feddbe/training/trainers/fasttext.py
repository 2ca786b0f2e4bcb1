"""Epochs of fastText in machine code, where numba is installed (extra `text`).

A step of ten texts is so little arithmetic that calling torch for it costs ten times as much. So for word
vectors, linear layers and cross-entropy, with PRBM and MR as the add-ons have them, `_fasttext.py` has the
step written out; up to rounding it gives autograd's numbers.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor, nn

from feddbe.errors import BadInput
from feddbe.models.fasttext import MeanEmbedding
from feddbe.state import State
from feddbe.training.plan import FitPlan, Fitted, check, no_losses
from feddbe.training.terms import CROSS_ENTROPY, MeanPull, Term

__all__ = ["RANK", "available", "refuses", "train"]

RANK = 10


def available() -> bool:
    """Whether numba is installed."""
    return find_spec("numba") is not None


def refuses(plan: FitPlan) -> str:
    (words, _), *linear = layers = [layer for half in plan.model.layers for layer in half]
    names = [name for _, own in layers for name in own.values()]
    if type(words) is not MeanEmbedding or any(type(layer) is not nn.Linear for layer, _ in linear):
        return "the model is not word vectors and linear layers"
    if any(_hooked(layer) for layer, _ in layers) or len(set(names)) < len(names):
        return "a layer does more than its own arithmetic, or shares a parameter"
    if plan.loss is not CROSS_ENTROPY or len(plan.terms) > 1 or not all(map(_written_out, plan.terms)):
        return "the loss has more than cross-entropy and MR"
    if plan.correction or not plan.extras.keys() <= {"prbm"}:
        return "the method corrects gradients, or trains more than PRBM beside the model"
    if len({t.dtype for t in (*plan.params.values(), *plan.extras.values())}) > 1:
        return "the parameters have several types"
    return "" if available() else "numba is not installed (pip install 'feddbe[text]')"


def _written_out(term: Term) -> bool:
    return isinstance(term.apply, MeanPull) and "size" not in term.carry


def train(plan: FitPlan) -> Fitted:
    params = {name: plan.model.layout(p.detach()) for name, p in plan.params.items()}
    extras = {name: p.detach().clone() for name, p in plan.extras.items()}
    epoch, carries, losses = _Epoch(plan, params, extras), [t.carry for t in plan.terms], no_losses()
    for x, y, size in plan.batches.gathered():
        loss, carries = epoch(carries, x, y, size)
        losses = losses.add(torch.tensor(loss, dtype=torch.float64), len(y))
        check(losses, plan.batches)
    return Fitted(params, extras, [plan.loss.carry, *carries], losses)


class _Epoch:
    """The arrays of one fit, which move in place."""

    def __init__(self, plan: FitPlan, params: State, extras: State) -> None:
        f, h = plan.model.layers
        rates = plan.rates
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
        self.cut = len(f) - 1
        self.mean = next((t.apply for t in plan.terms if isinstance(t.apply, MeanPull)), MeanPull(0.0))
        self.zbar = next((t.const.get("mean") for t in plan.terms), None)
        self.prbm = extras["prbm"].detach().numpy() if extras else np.zeros(plan.model.feature_shape, number)
        self.prbm_rate = number(rates.get("prbm", 0.0))

    def __call__(self, carries: list[State], x: Tensor, y: Tensor, size: int) -> tuple[float, list[State]]:
        """The mean cross-entropy of the epoch's batches, and the new carries."""
        from feddbe.training.trainers._fasttext import fasttext_epoch

        low, high = (int(word) for word in torch.aminmax(x))
        if low < 0 or high >= len(self.vectors):  # machine code would look no further
            raise BadInput(
                f"a text has word {low if low < 0 else high}, the model has {len(self.vectors)} words"
            )
        number, mean, features = self.vectors.dtype.type, self.mean, len(self.prbm)
        carry = carries[0] if carries else mean.start((features,))
        r = carry["r"].numpy().astype(number)
        weights = mean.weights(float(carry["weight"]), len(x) // size)
        zbar = np.zeros(features) if self.zbar is None else self.zbar.numpy()
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
            (weights if mean.corrected else np.ones_like(weights)).astype(number),
            zbar.astype(number),
            number(mean.slope(features, size) if self.zbar is not None else 0.0),
            inputs,
            grads,
        )
        new = {"r": torch.from_numpy(r), "weight": torch.tensor(weights[-1], dtype=carry["weight"].dtype)}
        return loss, [new] if carries else []


def _hooked(layer: nn.Module) -> bool:
    """Whether calling the layer does more than its own arithmetic."""
    return any((layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks))
