"""Compiled kernels: the layers forwards and backwards, and the functions that Python calls.

A convolution includes the pooling, bias and ReLU that follow it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit

from feddbe.training.compiled import tiles
from feddbe.training.compiled.tiles import (
    CONV,
    DOT_COLUMNS,
    LANES,
    LINEAR,
    MOMENTUM,
    POOL,
    ROWS,
    TILE_ROWS,
    TILE_VECTORS,
    Array,
    Record,
    Room,
    add_scaled_rows,
    begin,
    dots,
    end,
    get,
    inner,
    largest,
    move,
    put,
    tile,
)


@inner
def conv_forward(room: Room, step: Record, size: int) -> None:
    numbers, table, block = room.numbers, room.table, room.block
    n, window, rows, run, windows = step.outputs, step.window, step.rows, step.run, size * step.windows
    source, row, turned = step.input, step.row, step.turned
    at_once = step.group // window
    for g in range(0, windows, at_once):
        first = step.positions + g * window
        for t in range(0, step.group, TILE_ROWS):
            f = 0
            while f + 2 * LANES <= n:
                tile(
                    block, t * n + f, n, numbers, table, first + t, source, row, 1, numbers, turned + f, n,
                    rows, run, TILE_ROWS, 2, False,
                )  # fmt: skip
                f += 2 * LANES
            if f < n:
                tile(
                    block, t * n + f, n, numbers, table, first + t, source, row, 1, numbers, turned + f, n,
                    rows, run, TILE_ROWS, 1, False,
                )  # fmt: skip
        for w in range(g, min(g + at_once, windows)):
            largest(
                numbers, get(table, step.places + w), block, (w - g) * window * n, window, n, n, numbers,
                step.bias, step.relu, room.chosen, step.chosen + w * n,
            )  # fmt: skip


@inner
def _add_rows(
    room: Room, out: int, o_row: int, first: int, n: int, source: int, s_row: int, rows: int, vectors: int
) -> None:
    """To `rows` rows of `vectors` vectors from `out` on: the sum of the n listed rows, each times its
    value."""
    m, values, lines = room.numbers, room.values, room.lines
    while vectors > 0:
        v = vectors if vectors <= 10 else (vectors + 1) // 2 if vectors <= 20 else 10
        if v == 10:
            add_scaled_rows(m, out, o_row, LANES, values, lines, first, n, m, source, s_row, LANES, rows, 10)
        elif v == 9:
            add_scaled_rows(m, out, o_row, LANES, values, lines, first, n, m, source, s_row, LANES, rows, 9)
        elif v >= 6:
            v = 6
            add_scaled_rows(m, out, o_row, LANES, values, lines, first, n, m, source, s_row, LANES, rows, 6)
        elif v == 5:
            add_scaled_rows(m, out, o_row, LANES, values, lines, first, n, m, source, s_row, LANES, rows, 5)
        elif v >= 3:
            v = 3
            add_scaled_rows(m, out, o_row, LANES, values, lines, first, n, m, source, s_row, LANES, rows, 3)
        else:
            v = 1
            add_scaled_rows(m, out, o_row, LANES, values, lines, first, n, m, source, s_row, LANES, rows, 1)
        out, source, vectors = out + v * LANES, source + v * LANES, vectors - v


@inner
def conv_input_grad(room: Room, step: Record, size: int) -> None:
    """Each position that was the largest of its window gives its weights, times its gradient."""
    numbers, table, values, lines, counts = room.numbers, room.table, room.values, room.lines, room.counts
    n, window, rows, run = step.outputs, step.window, step.rows, step.padded_run
    windows, shift, lists = size * step.windows, step.output_grad - step.output, step.window + 1
    counts[: windows * lists] = 0
    for w in range(windows):
        grad, chosen = get(table, step.places + w) + shift, step.chosen + w * n
        for c in range(n):
            at = w * lists + np.int64(get(room.chosen, chosen + c))
            count = get(counts, at)
            put(values, at * n + count, get(numbers, grad + c))
            put(lines, at * n + count, np.int32(c * rows * run))
            put(counts, at, count + 1)
    numbers[step.input_grad : step.input_grad + size * step.size] = 0
    for k in range(rows):
        for w in range(windows):
            for i in range(window):
                at = w * lists + i
                count = get(counts, at)
                if count > 0:
                    out = step.input_grad + get(table, step.positions + w * window + i) + k * step.row
                    _add_rows(room, out, 0, at * n, count, step.weight + k * run, 0, 1, run // LANES)


@inner
def conv_weight_grad(room: Room, step: Record, size: int) -> None:
    numbers, table, values, lines = room.numbers, room.table, room.values, room.lines
    n, window, rows, run, windows = step.outputs, step.window, step.rows, step.padded_run, step.windows
    shift, zero = step.output_grad - step.output, numbers.dtype.type(0)
    numbers[step.weight_grad : step.weight_grad + n * rows * run] = 0
    numbers[step.bias_grad : step.bias_grad + n] = 0
    for image in range(size):
        chosen, from_ = step.chosen + image * windows * n, step.places + image * windows
        at = step.positions + image * windows * window
        for c in range(n):
            count, total = 0, zero
            for w in range(windows):
                i = np.int64(get(room.chosen, chosen + w * n + c))
                grad = get(numbers, get(table, from_ + w) + shift + c)
                put(values, count, grad)
                put(lines, count, np.int32(get(table, at + w * window + i)))  # of i = window no use is made
                count += i < window
                total += grad if i < window else zero
            put(numbers, step.bias_grad + c, get(numbers, step.bias_grad + c) + total)
            if count > 0:
                out = step.weight_grad + c * rows * run
                m, source, row = numbers, step.input, step.row
                if run == LANES and rows == 5:
                    add_scaled_rows(m, out, 0, LANES, values, lines, 0, count, m, source, 0, row, 1, 5)
                elif run == LANES and rows == 3:
                    add_scaled_rows(m, out, 0, LANES, values, lines, 0, count, m, source, 0, row, 1, 3)
                else:
                    _add_rows(room, out, run, 0, count, source, row, rows, run // LANES)


@inner
def conv_move(numbers: Array, step: Record, net: Record) -> None:
    """Weights and bias; of the weights' rows only what is not padding."""
    for i in range(0, step.outputs * step.rows * step.padded_run, step.padded_run):
        weight, grad = step.weight + i, step.weight_grad + i
        move(numbers, weight, grad, step.run, step.weight_rate, step.weight_pull, net)
    move(numbers, step.bias, step.bias_grad, step.outputs, step.bias_rate, step.bias_pull, net)
    conv_turn(numbers, step)


@inner
def conv_turn(numbers: Array, step: Record) -> None:
    """The convolution's weights once more, as [rows x run][outputs]."""
    row = step.rows * step.padded_run
    for c in range(0, step.outputs, 8):
        for k in range(step.rows):
            for r in range(step.run):
                to = step.turned + (k * step.run + r) * step.outputs + c
                source = step.weight + c * row + k * step.padded_run + r
                for i in range(8):
                    put(numbers, to + i, get(numbers, source + i * row))


@inner
def linear_forward(numbers: Array, step: Record, rows: int) -> None:
    k, n, zero = step.inputs, step.outputs, numbers.dtype.type(0)
    for j in range(0, n, DOT_COLUMNS):
        for i in range(0, rows, ROWS):
            dots(
                numbers, step.output + i * n + j, n, numbers, step.input + i * k, k, numbers,
                step.weight + j * k, k, k, ROWS, DOT_COLUMNS,
            )  # fmt: skip
    bias = numbers[step.bias : step.bias + n]
    for i in range(rows):
        out = numbers[step.output + i * n : step.output + (i + 1) * n]
        if step.relu:
            for j in range(n):
                value = out[j] + bias[j]
                out[j] = zero if value <= zero else value
        else:
            for j in range(n):
                out[j] += bias[j]


@inner
def linear_back(room: Room, step: Record, rows: int, net: Record) -> None:
    """The gradient of the input, if it is wanted, and the move, in one pass over the weights."""
    numbers, scaled = room.numbers, room.values
    k, n, rate = step.inputs, step.outputs, numbers.dtype.type(step.weight_rate)
    if step.relu:
        _relu_back(numbers, step.output, step.output_grad, rows * n)
    if step.back:
        numbers[step.input_grad : step.input_grad + rows * k] = 0
    for i in range(rows * n):
        put(scaled, i, -rate * get(numbers, step.output_grad + i))
    for j in range(0, n, 8):
        if step.back:
            _input_grad(numbers, room.table, step, rows, j)
        if step.weight_rate != 0:
            to = begin(numbers, step.weight + j * k, 8 * k, step.weight_pull, net)
            _weight_move(room, step, rows, to, j)
            _weight_move(room, step, rows, to + 4 * k, j + 4)
            end(numbers, step.weight + j * k, 8 * k, net)
    if step.bias_rate != 0:
        numbers[step.bias_grad : step.bias_grad + n] = 0
        for i in range(rows):
            for j in range(n):
                numbers[step.bias_grad + j] += numbers[step.output_grad + i * n + j]
        move(numbers, step.bias, step.bias_grad, n, step.bias_rate, step.bias_pull, net)


@inner
def _input_grad(numbers: Array, table: Array, step: Record, rows: int, j: int) -> None:
    """What eight outputs from `j` on give."""
    m, k, n, grad = numbers, step.inputs, step.outputs, step.input_grad
    for i in range(0, rows, ROWS):
        at, source, weight = 0, step.output_grad + i * n + j, step.weight + j * k
        while at + TILE_VECTORS * LANES <= k:
            tile(
                m, grad + i * k + at, k, m, table, step.spread, source, 0, 1, m, weight + at, k, 1, 8,
                ROWS, TILE_VECTORS, True,
            )  # fmt: skip
            at += TILE_VECTORS * LANES
        while at < k:
            tile(
                m, grad + i * k + at, k, m, table, step.spread, source, 0, 1, m, weight + at, k, 1, 8,
                ROWS, 1, True,
            )  # fmt: skip
            at += LANES


@inner
def _weight_move(room: Room, step: Record, rows: int, to: int, j: int) -> None:
    """The weights of four outputs from `j` on."""
    numbers, table, by_one = room.numbers, room.table, step.spread + ROWS
    k, n, at = step.inputs, step.outputs, 0
    while at + TILE_VECTORS * LANES <= k:
        tile(
            numbers, to + at, k, room.values, table, by_one, j, 0, n, numbers, step.input + at, k, 1, rows, 4,
            TILE_VECTORS, True,
        )  # fmt: skip
        at += TILE_VECTORS * LANES
    while at < k:
        tile(
            numbers, to + at, k, room.values, table, by_one, j, 0, n, numbers, step.input + at, k, 1, rows, 4,
            1, True,
        )  # fmt: skip
        at += LANES


@inner
def _relu_back(numbers: Array, result: int, grad: int, n: int) -> None:
    zero = numbers.dtype.type(0)
    for i in range(n):
        put(numbers, grad + i, zero if get(numbers, result + i) <= zero else get(numbers, grad + i))


@inner
def pool(room: Room, step: Record, size: int) -> None:
    """With a window of one position it is ReLU alone."""
    numbers, table, block = room.numbers, room.table, room.block
    n, window = step.outputs, step.window
    for w in range(size * step.windows):
        for i in range(window):
            source = step.input + get(table, step.positions + w * window + i)
            for c in range(n):
                put(block, i * n + c, get(numbers, source + c))
        largest(
            numbers, get(table, step.places + w), block, 0, window, n, n, numbers, step.bias, step.relu,
            room.chosen, step.chosen + w * n,
        )  # fmt: skip


@inner
def pool_back(room: Room, step: Record, size: int) -> None:
    numbers, table = room.numbers, room.table
    n, window, shift = step.outputs, step.window, step.output_grad - step.output
    numbers[step.input_grad : step.input_grad + size * step.size] = 0
    for w in range(size * step.windows):
        grad, chosen = get(table, step.places + w) + shift, step.chosen + w * n
        for c in range(n):
            i = np.int64(get(room.chosen, chosen + c))
            if i < window:
                to = step.input_grad + get(table, step.positions + w * window + i) + c
                put(numbers, to, get(numbers, to) + get(numbers, grad + c))


@inner
def words(numbers: Array, step: Record, texts: Array) -> None:
    """The mean of the vectors of each text's words; a 0 is no word, but counts."""
    n, share = step.outputs, numbers.dtype.type(1 / texts.shape[1])
    for i in range(len(texts)):
        out = numbers[step.output + i * n : step.output + (i + 1) * n]
        out[:] = 0
        for word in texts[i]:
            if word != 0:
                vector = numbers[step.weight + word * n : step.weight + (word + 1) * n]
                for k in range(n):
                    out[k] += vector[k]
        for k in range(n):
            out[k] *= share


@inner
def words_back(room: Room, step: Record, texts: Array, first: int, net: Record) -> None:
    """A word's gradients are summed before they move its vector. `counts[word]` - `first` is where; what is
    below `first` is of batches before."""
    numbers, place, order, sums = room.numbers, room.counts, room.lines, room.values
    n, count = step.outputs, 0
    to = begin(numbers, step.weight, step.inputs * n, step.weight_pull, net)
    for i in range(len(texts)):
        grad = step.output_grad + i * n
        for word in texts[i]:
            if word != 0:
                if get(place, np.int64(word)) < first:
                    put(place, np.int64(word), np.int64(first + count))
                    put(order, count, np.int32(word))
                    sums[count * n : (count + 1) * n] = 0
                    count += 1
                at = (get(place, np.int64(word)) - first) * n
                for k in range(n):
                    put(sums, at + k, get(sums, at + k) + get(numbers, grad + k))
    rate = numbers.dtype.type(step.weight_rate / texts.shape[1])
    for i in range(count):
        vector = to + np.int64(get(order, i)) * n
        for k in range(n):
            put(numbers, vector + k, get(numbers, vector + k) - rate * get(sums, i * n + k))
    end(numbers, step.weight, step.inputs * n, net)


Function = TypeVar("Function", bound=Callable[..., Any])


def _kept(make: Callable[[str], Function]) -> Function:
    """Compiled at its first call, which takes seconds, and kept on disk for later ones if that can be.

    numba keeps by the file of the function alone, and by what it closes over: here a fingerprint of the
    other module that is compiled into it.
    """
    source = Path(str(tiles.__file__)).read_bytes()
    function = make(f"{tiles.LANES} {hashlib.sha256(source).hexdigest()}")
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
def _add_prbm_and_update_mean(numbers: Array, net: Record, size: int) -> None:
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
def _prbm_and_mr_backward(numbers: Array, net: Record, size: int, divisor: float) -> None:
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
            _add_prbm_and_update_mean(room.numbers, net, size)
        if step.kind == CONV:
            conv_forward(room, step, size)
        elif step.kind == LINEAR:
            linear_forward(room.numbers, step, (size + ROWS - 1) // ROWS * ROWS)
        elif step.kind == POOL:
            pool(room, step, size)
        else:
            words(room.numbers, step, texts)
    if net.cut == len(steps):
        _add_prbm_and_update_mean(room.numbers, net, size)


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
                _prbm_and_mr_backward(room.numbers, net, size, divisors[b])
            for layer in range(len(steps) - 1, net.first - 1, -1):
                _back(room, steps[layer], net, some, size, b * some.size)
                if layer == net.cut:
                    _prbm_and_mr_backward(room.numbers, net, size, divisors[b])
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
