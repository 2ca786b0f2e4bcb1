"""A convolution with the pooling, bias and ReLU that follow it, forwards and backwards."""

from __future__ import annotations

import numpy as np

from feddbe.training.compiled.records import TILE_ROWS, Array, Record, Room, inner, move
from feddbe.training.compiled.tiles import LANES, add_scaled_rows, get, largest, put, tile


@inner
def forward(room: Room, step: Record, size: int) -> None:
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
def input_grad(room: Room, step: Record, size: int) -> None:
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
def weight_grad(room: Room, step: Record, size: int) -> None:
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
def move_both(numbers: Array, step: Record, net: Record) -> None:
    """Weights and bias; of the weights' rows only what is not padding."""
    for i in range(0, step.outputs * step.rows * step.padded_run, step.padded_run):
        weight, grad = step.weight + i, step.weight_grad + i
        move(numbers, weight, grad, step.run, step.weight_rate, step.weight_pull, net)
    move(numbers, step.bias, step.bias_grad, step.outputs, step.bias_rate, step.bias_pull, net)
    turn(numbers, step)


@inner
def turn(numbers: Array, step: Record) -> None:
    """The convolution's weights once more, as [rows x run][outputs]."""
    row = step.rows * step.padded_run
    for c in range(0, step.outputs, 8):
        for k in range(step.rows):
            for r in range(step.run):
                to = step.turned + (k * step.run + r) * step.outputs + c
                source = step.weight + c * row + k * step.padded_run + r
                for i in range(8):
                    put(numbers, to + i, get(numbers, source + i * row))
