"""Linear layers, means of word vectors, and pooling that follows no convolution."""

from __future__ import annotations

import numpy as np

from feddbe.training.compiled.records import (
    DOT_COLUMNS,
    ROWS,
    TILE_VECTORS,
    Array,
    Record,
    Room,
    begin,
    end,
    inner,
    move,
)
from feddbe.training.compiled.tiles import LANES, dots, get, largest, put, tile


@inner
def forward(numbers: Array, step: Record, rows: int) -> None:
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
def back(room: Room, step: Record, rows: int, net: Record) -> None:
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
