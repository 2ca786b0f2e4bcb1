"""Loops for numba, which is imported here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = ["fasttext_epoch"]

Array = npt.NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])


def _machine_code(function: Function) -> Function:
    """Compiled at its first call, which takes seconds, and kept on disk for later ones if that can be."""
    try:
        return cast(Function, njit(cache=True)(function))
    except RuntimeError:  # nowhere to keep it
        return cast(Function, njit(function))


@_machine_code
def fasttext_epoch(
    texts: Array,
    y: Array,
    size: int,
    vectors: Array,
    vectors_rate: float,
    weights: tuple[Array, ...],
    biases: tuple[Array, ...],
    rates: Array,
    cut: int,
    prbm: Array,
    prbm_rate: float,
    r: Array,
    mu: float,
    divisor: Array,
    zbar: Array,
    pull: float,
    inputs: tuple[Array, ...],
    grads: tuple[Array, ...],
) -> float:
    """SGD in batches of `size` through `texts`, in place; the mean of the batches' cross-entropies.

    Of the linear layers those before `cut` are f's; `rates` are of each one's weight and bias. `r` is the
    running mean of z_g with momentum `mu`; for L's term pull/2 |r / divisor[b] - zbar|^2 in batch b, `pull`
    has the factors mu and 1 / `size` of dr/dz_g already. `inputs` of each layer with the logits at the end,
    and `grads`, dL/d of these, are room to work in.
    """
    depth = len(weights)
    words = size * texts.shape[1]
    place, order = np.full(len(vectors), -1), np.zeros(words, np.int64)
    sums = np.zeros((words, vectors.shape[1]), vectors.dtype)
    loss = 0.0
    for b in range(len(texts) // size):
        batch, labels = texts[b * size : (b + 1) * size], y[b * size : (b + 1) * size]
        _mean(batch, vectors, inputs[0])
        for layer in range(depth):
            if layer == cut:
                _advance(inputs[layer], r, mu)
                _translate(inputs[layer], prbm)
            _linear(inputs[layer], weights[layer], biases[layer], inputs[layer + 1])
        loss += _cross_entropy(inputs[depth], labels, grads[depth])
        for layer in range(depth - 1, -1, -1):
            _linear_back(grads[layer + 1], weights[layer], grads[layer])
            _linear_move(inputs[layer], grads[layer + 1], weights[layer], biases[layer], rates[layer])
            if layer == cut:
                _move(prbm, grads[layer], prbm_rate)
                _translate(grads[layer], pull / divisor[b] * (r / divisor[b] - zbar))
        _mean_move(batch, grads[0], vectors, vectors_rate, place, order, sums, b * words)
    return loss / (len(texts) // size)


@_machine_code
def _mean(texts: Array, vectors: Array, out: Array) -> None:
    """Of the vectors of each text's words; a 0 is no word, but counts."""
    share = vectors.dtype.type(1 / texts.shape[1])
    for i in range(len(texts)):
        for k in range(vectors.shape[1]):
            out[i, k] = 0
        for word in texts[i]:
            if word != 0:
                for k in range(vectors.shape[1]):
                    out[i, k] += vectors[word, k]
        for k in range(vectors.shape[1]):
            out[i, k] *= share


@_machine_code
def _mean_move(
    texts: Array,
    grad: Array,
    vectors: Array,
    rate: float,
    place: Array,
    order: Array,
    sums: Array,
    first: int,
) -> None:
    """A word's gradients are summed before they move its vector. `place[word]` - `first` is where; what is
    below `first` is of batches before."""
    count, width = 0, vectors.shape[1]
    for i in range(len(texts)):
        for word in texts[i]:
            if word != 0:
                if place[word] < first:
                    place[word], order[count] = first + count, word
                    for k in range(width):
                        sums[count, k] = 0
                    count += 1
                at = place[word] - first
                for k in range(width):
                    sums[at, k] += grad[i, k]
    step = vectors.dtype.type(rate / texts.shape[1])
    for at in range(count):
        word = order[at]
        for k in range(width):
            vectors[word, k] -= step * sums[at, k]


@_machine_code
def _linear(x: Array, weight: Array, bias: Array, out: Array) -> None:
    across = weight.T.copy()  # so that the inner loop, over outputs, is one that processors do in parallel
    for i in range(len(x)):
        for j in range(len(bias)):
            out[i, j] = bias[j]
        for k in range(len(across)):
            for j in range(len(bias)):
                out[i, j] += x[i, k] * across[k, j]


@_machine_code
def _linear_back(grad: Array, weight: Array, below: Array) -> None:
    """dL/dinput of dL/doutput."""
    for i in range(len(grad)):
        for k in range(weight.shape[1]):
            below[i, k] = 0
        for j in range(len(weight)):
            for k in range(weight.shape[1]):
                below[i, k] += grad[i, j] * weight[j, k]


@_machine_code
def _linear_move(x: Array, grad: Array, weight: Array, bias: Array, rates: Array) -> None:
    row = np.zeros(weight.shape[1], weight.dtype)
    for j in range(len(weight)):
        row[:] = 0
        for i in range(len(x)):
            for k in range(weight.shape[1]):
                row[k] += grad[i, j] * x[i, k]
        for k in range(weight.shape[1]):
            weight[j, k] -= rates[0] * row[k]
    _move(bias, grad, rates[1])


@_machine_code
def _move(vector: Array, grad: Array, rate: float) -> None:
    """What is added to all of a batch has the sum of their gradients."""
    for k in range(len(vector)):
        vector[k] -= rate * _sum(grad, k)


@_machine_code
def _translate(rows: Array, by: Array) -> None:
    for i in range(len(rows)):
        for k in range(len(by)):
            rows[i, k] += by[k]


@_machine_code
def _advance(z_g: Array, r: Array, mu: float) -> None:
    """r <- (1 - mu) r + mu mean."""
    for k in range(len(r)):
        r[k] = (1 - mu) * r[k] + mu * (_sum(z_g, k) / len(z_g))


@_machine_code
def _sum(rows: Array, k: int) -> Any:
    total = rows[0, k]
    for i in range(1, len(rows)):
        total += rows[i, k]
    return total


@_machine_code
def _cross_entropy(logits: Array, y: Array, grad: Array) -> float:
    """The batch's mean; its gradient is softmax - one-hot, over the batch's size."""
    size, loss = len(y), 0.0
    for i in range(size):
        top = logits[i].max()
        total = 0.0
        for j in range(logits.shape[1]):
            total += math.exp(logits[i, j] - top)
        for j in range(logits.shape[1]):
            grad[i, j] = math.exp(logits[i, j] - top) / total / size
        grad[i, y[i]] -= 1 / size
        loss += math.log(total) - (logits[i, y[i]] - top)
    return loss / size
