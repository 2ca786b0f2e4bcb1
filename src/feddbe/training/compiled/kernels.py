"""The compiled functions that Python calls: batches forwards, and steps of SGD."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

from feddbe.training.compiled import convolution, linear, records, tiles
from feddbe.training.compiled.records import CONV, LINEAR, MOMENTUM, POOL, ROWS, Array, Record, Room, inner
from feddbe.training.compiled.tiles import get, put

Function = TypeVar("Function", bound=Callable[..., Any])
conv_forward, conv_turn = convolution.forward, convolution.turn
conv_input_grad, conv_weight_grad = convolution.input_grad, convolution.weight_grad
conv_move = convolution.move_both
linear_forward, linear_back = linear.forward, linear.back
pool, pool_back, words, words_back = linear.pool, linear.pool_back, linear.words, linear.words_back


def _kept(make: Callable[[str], Function]) -> Function:
    """Compiled at its first call, which takes seconds, and kept on disk for later ones if that can be.

    numba keeps by the file of the function alone, and by what it closes over: here a fingerprint of all that
    is compiled into it.
    """
    files = [str(module.__file__) for module in (convolution, linear, records, tiles)]
    hashes = [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
    function = make(" ".join([str(tiles.LANES), *hashes]))
    how: dict[str, Any] = {"fastmath": {"contract", "nsz"}, "error_model": "numpy", "boundscheck": False}
    try:
        return cast(Function, njit(cache=True, **how)(function))
    except RuntimeError:  # nowhere to keep it
        return cast(Function, njit(**how)(function))


@inner
def _take(numbers: Array, net: Record, x: Array) -> None:
    """A batch (size, channels, height, width) into the frame of the first layer."""
    size, channels, height, width = x.shape
    for i in range(size):
        for c in range(channels):
            for h in range(height):
                at = net.entry + i * net.entry_size + h * net.entry_row + c
                for w in range(width):
                    put(numbers, at + w * net.entry_pixel, numbers.dtype.type(x[i, c, h, w]))


@inner
def _translate(numbers: Array, net: Record, size: int) -> None:
    """z = z_g + prbm, and r <- (1 - mu) r + mu mean of z_g."""
    n, mu = net.z_size, numbers.dtype.type(net.mu)
    rest, share = numbers.dtype.type(1 - net.mu), numbers.dtype.type(1 / size)
    sums, prbm, r = net.sums, net.prbm, net.mean  # once, not after every number that is written
    numbers[sums : sums + n] = 0
    for i in range(size):
        z_g, z = net.z_g + i * n, net.z + i * n
        for k in range(n):
            put(numbers, z + k, get(numbers, z_g + k) + get(numbers, prbm + k))
        for k in range(n):
            put(numbers, sums + k, get(numbers, sums + k) + get(numbers, z_g + k))
    for k in range(n):
        mean = share * get(numbers, sums + k)
        put(numbers, r + k, rest * get(numbers, r + k) + mu * mean)


@inner
def _translate_back(numbers: Array, net: Record, size: int, divisor: float) -> None:
    """PRBM's move, MR's gradient, pull/d (r/d - zbar) for each sample, and that of terms."""
    n, rate = net.z_size, numbers.dtype.type(net.prbm_rate)
    pull, share = numbers.dtype.type(net.slope / divisor), numbers.dtype.type(1 / divisor)
    keep, sums = numbers.dtype.type(net.momentum), net.sums
    numbers[sums : sums + n] = 0
    for i in range(size):
        at = net.z_grad + i * n
        for k in range(n):
            put(numbers, sums + k, get(numbers, sums + k) + get(numbers, at + k))
    for k in range(n):
        total = get(numbers, sums + k)
        apart = share * get(numbers, net.mean + k) - get(numbers, net.goal + k)
        p = get(numbers, net.prbm + k)
        if net.mode == MOMENTUM:
            step = keep * get(numbers, net.prbm_step + k) - rate * get(numbers, net.live + k) * total
            put(numbers, net.prbm_step + k, step)
            put(numbers, net.prbm + k, p + step)
        else:
            put(numbers, net.prbm + k, p - rate * get(numbers, net.live + k) * total)
        put(numbers, sums + k, pull * apart)
    for i in range(size):
        at = net.z_grad + i * n
        for k in range(n):
            put(numbers, at + k, get(numbers, at + k) + get(numbers, sums + k))
    if net.more > 0:
        for k in range(size * n):
            put(numbers, net.z_grad + k, get(numbers, net.z_grad + k) + get(numbers, net.more + k))


@inner
def _cross_entropy(numbers: Array, table: Array, net: Record, y: Array) -> float:
    """Return the batch's mean loss and write its gradient, (softmax - one-hot) / size, to `logits_grad`.

    The gradient of the label's logit is minus the sum of the others', not a rounded softmax minus 1: it is 0
    for a sample that the model is certain of, however large the input.
    """
    size, loss = len(y), 0.0
    for i in range(size):
        z, grad = net.logits + i * net.logits_size, net.logits_grad + i * net.logits_size
        label, others = get(table, net.classes_at + y[i]), 0.0
        top = get(numbers, z + label)
        for j in range(net.classes):
            top = max(top, get(numbers, z + get(table, net.classes_at + j)))
        for j in range(net.classes):
            at = get(table, net.classes_at + j)
            e = math.exp(get(numbers, z + at) - top)
            put(numbers, grad + at, e)
            others += e if at != label else 0.0
        total = others + get(numbers, grad + label)
        for j in range(net.classes):
            at = grad + get(table, net.classes_at + j)
            put(numbers, at, numbers.dtype.type(get(numbers, at) / total / size))
        put(numbers, grad + label, numbers.dtype.type(-others / total / size))
        loss += math.log(total) - (get(numbers, z + label) - top)
    return loss / size


@inner
def _forward(room: Room, steps: Array, net: Record, x: Array, texts: Array, size: int) -> None:
    if len(x) > 0:
        _take(room.numbers, net, x)
    for layer in range(len(steps)):
        step = steps[layer]
        if layer == net.cut:
            _translate(room.numbers, net, size)
        if step.kind == CONV:
            conv_forward(room, step, size)
        elif step.kind == LINEAR:
            linear_forward(room.numbers, step, (size + ROWS - 1) // ROWS * ROWS)
        elif step.kind == POOL:
            pool(room, step, size)
        else:
            words(room.numbers, step, texts)
    if net.cut == len(steps):
        _translate(room.numbers, net, size)


@inner
def _back(room: Room, step: Record, net: Record, texts: Array, size: int, before: int) -> None:
    """One layer."""
    if step.kind == CONV:
        if step.back:
            conv_input_grad(room, step, size)
        if step.weight_rate != 0 or step.bias_rate != 0:
            conv_weight_grad(room, step, size)
            conv_move(room.numbers, step, net)
    elif step.kind == LINEAR:
        linear_back(room, step, (size + ROWS - 1) // ROWS * ROWS, net)
    elif step.kind == POOL:
        if step.back:
            pool_back(room, step, size)
    elif step.weight_rate != 0:
        words_back(room, step, texts, before, net)


def _make_train(fingerprint: str) -> Callable[..., float]:
    def train(
        room: Room, steps: Array, nets: Array, x: Array, texts: Array, y: Array, size: int, divisors: Array,
        begun: bool,
    ) -> float:  # fmt: skip
        """Train in place by SGD in batches of `size` and return the sum of the batches' cross-entropies.

        MR divides r by divisors[b] after batch b. If `begun`, the one batch has gone forwards already, and
        the gradient of its logits is there.
        """
        fingerprint  # noqa: B018  (closed over)
        net, loss = nets[0], 0.0
        if len(texts) > 0:
            room.counts[:] = -1
        for b in range(len(y) // size):
            inputs, some = x[b * size : (b + 1) * size], texts[b * size : (b + 1) * size]
            if not begun:
                _forward(room, steps, net, inputs, some, size)
                loss += _cross_entropy(room.numbers, room.table, net, y[b * size : (b + 1) * size])
            if net.cut == len(steps):
                _translate_back(room.numbers, net, size, divisors[b])
            for layer in range(len(steps) - 1, net.first - 1, -1):
                _back(room, steps[layer], net, some, size, b * some.size)
                if layer == net.cut:
                    _translate_back(room.numbers, net, size, divisors[b])
        return loss

    return train


def _make_forward(fingerprint: str) -> Callable[..., None]:
    def forward(room: Room, steps: Array, nets: Array, x: Array, texts: Array, size: int) -> None:
        """One batch forwards."""
        fingerprint  # noqa: B018  (closed over)
        _forward(room, steps, nets[0], x, texts, size)

    return forward


def _make_turn(fingerprint: str) -> Callable[..., None]:
    def turn(room: Room, steps: Array) -> None:
        """After parameters were written: convolutions need their weights turned, too."""
        fingerprint  # noqa: B018  (closed over)
        for layer in range(len(steps)):
            if steps[layer].kind == CONV:
                conv_turn(room.numbers, steps[layer])

    return turn


train, forward, turn = _kept(_make_train), _kept(_make_forward), _kept(_make_turn)
