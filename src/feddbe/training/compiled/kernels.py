"""Compiled kernels: forward and backward passes of the layers, and the functions that Python calls.

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

from feddbe.training.compiled import inner_loops
from feddbe.training.compiled.inner_loops import (
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
    Arrays,
    Record,
    add_scaled_rows,
    begin_update,
    dot_products,
    end_update,
    get,
    kernel_helper,
    max_pool,
    multiply_tile,
    put,
    update,
)


@kernel_helper
def conv_forward(arrays: Arrays, step: Record, size: int) -> None:
    """Compute the outputs of a convolution."""
    numbers = arrays.numbers
    table = arrays.table
    block = arrays.block
    n = step.outputs
    window = step.window
    rows = step.rows
    run = step.run
    windows = size * step.windows
    source = step.input
    row = step.row
    transposed = step.transposed
    group_windows = step.group_size // window
    for g in range(0, windows, group_windows):
        first = step.input_offsets + g * window
        for t in range(0, step.group_size, TILE_ROWS):
            f = 0
            while f + 2 * LANES <= n:
                multiply_tile(
                    block, t * n + f, n, numbers, table, first + t, source, row, 1, numbers, transposed + f,
                    n, rows, run, TILE_ROWS, 2, False,
                )  # fmt: skip
                f += 2 * LANES
            if f < n:
                multiply_tile(
                    block, t * n + f, n, numbers, table, first + t, source, row, 1, numbers, transposed + f,
                    n, rows, run, TILE_ROWS, 1, False,
                )  # fmt: skip
        for w in range(g, min(g + group_windows, windows)):
            max_pool(
                numbers, get(table, step.output_offsets + w), block, (w - g) * window * n, window, n, n,
                numbers, step.bias, step.relu, arrays.argmax, step.argmax + w * n,
            )  # fmt: skip


@kernel_helper
def _add_rows(
    arrays: Arrays, out: int, o_row: int, first: int, n: int, source: int, s_row: int, rows: int, vectors: int
) -> None:
    """Add the sum of n listed rows, each times its value, to `rows` rows of `vectors` vectors at `out`."""
    m = arrays.numbers
    values = arrays.values
    row_offsets = arrays.row_offsets
    while vectors > 0:
        if vectors > 20:
            v = 10
        elif vectors > 10:
            v = (vectors + 1) // 2
        else:
            v = vectors
        if v == 10:
            add_scaled_rows(
                m, out, o_row, LANES, values, row_offsets, first, n, m, source, s_row, LANES, rows, 10
            )
        elif v == 9:
            add_scaled_rows(
                m, out, o_row, LANES, values, row_offsets, first, n, m, source, s_row, LANES, rows, 9
            )
        elif v >= 6:
            v = 6
            add_scaled_rows(
                m, out, o_row, LANES, values, row_offsets, first, n, m, source, s_row, LANES, rows, 6
            )
        elif v == 5:
            add_scaled_rows(
                m, out, o_row, LANES, values, row_offsets, first, n, m, source, s_row, LANES, rows, 5
            )
        elif v >= 3:
            v = 3
            add_scaled_rows(
                m, out, o_row, LANES, values, row_offsets, first, n, m, source, s_row, LANES, rows, 3
            )
        else:
            v = 1
            add_scaled_rows(
                m, out, o_row, LANES, values, row_offsets, first, n, m, source, s_row, LANES, rows, 1
            )
        out = out + v * LANES
        source = source + v * LANES
        vectors = vectors - v


@kernel_helper
def conv_input_grad(arrays: Arrays, step: Record, size: int) -> None:
    """Compute the gradient of the input: each pooled position adds its weights times its gradient."""
    numbers = arrays.numbers
    table = arrays.table
    values = arrays.values
    row_offsets = arrays.row_offsets
    counts = arrays.counts
    n = step.outputs
    window = step.window
    rows = step.rows
    run = step.padded_run
    windows = size * step.windows
    shift = step.output_grad - step.output
    lists = step.window + 1
    counts[: windows * lists] = 0
    for w in range(windows):
        grad, argmax = get(table, step.output_offsets + w) + shift, step.argmax + w * n
        for c in range(n):
            entry = w * lists + np.int64(get(arrays.argmax, argmax + c))
            count = get(counts, entry)
            put(values, entry * n + count, get(numbers, grad + c))
            put(row_offsets, entry * n + count, np.int32(c * rows * run))
            put(counts, entry, count + 1)
    numbers[step.input_grad : step.input_grad + size * step.size] = 0
    for k in range(rows):
        for w in range(windows):
            for i in range(window):
                entry = w * lists + i
                count = get(counts, entry)
                if count > 0:
                    out = step.input_grad + get(table, step.input_offsets + w * window + i) + k * step.row
                    _add_rows(arrays, out, 0, entry * n, count, step.weight + k * run, 0, 1, run // LANES)


@kernel_helper
def conv_weight_grad(arrays: Arrays, step: Record, size: int) -> None:
    """Compute the gradient of a convolution's weights."""
    numbers = arrays.numbers
    table = arrays.table
    values = arrays.values
    row_offsets = arrays.row_offsets
    n = step.outputs
    window = step.window
    rows = step.rows
    run = step.padded_run
    windows = step.windows
    shift, zero = step.output_grad - step.output, numbers.dtype.type(0)
    numbers[step.weight_grad : step.weight_grad + n * rows * run] = 0
    numbers[step.bias_grad : step.bias_grad + n] = 0
    for image in range(size):
        argmax, output_offsets = step.argmax + image * windows * n, step.output_offsets + image * windows
        input_offsets = step.input_offsets + image * windows * window
        for c in range(n):
            count, total = 0, zero
            for w in range(windows):
                i = np.int64(get(arrays.argmax, argmax + w * n + c))
                grad = get(numbers, get(table, output_offsets + w) + shift + c)
                put(values, count, grad)
                put(
                    row_offsets, count, np.int32(get(table, input_offsets + w * window + i))
                )  # unused if i = window
                count += i < window
                total += grad if i < window else zero
            put(numbers, step.bias_grad + c, get(numbers, step.bias_grad + c) + total)
            if count > 0:
                out = step.weight_grad + c * rows * run
                m = numbers
                source = step.input
                row = step.row
                if run == LANES and rows == 5:
                    add_scaled_rows(m, out, 0, LANES, values, row_offsets, 0, count, m, source, 0, row, 1, 5)
                elif run == LANES and rows == 3:
                    add_scaled_rows(m, out, 0, LANES, values, row_offsets, 0, count, m, source, 0, row, 1, 3)
                else:
                    _add_rows(arrays, out, run, 0, count, source, row, rows, run // LANES)


@kernel_helper
def conv_update(numbers: Array, step: Record, net: Record) -> None:
    """Update weights and bias; the padding of the weights' rows stays 0."""
    for i in range(0, step.outputs * step.rows * step.padded_run, step.padded_run):
        weight, grad = step.weight + i, step.weight_grad + i
        update(numbers, weight, grad, step.run, step.weight_rate, step.weight_decay, net)
    update(numbers, step.bias, step.bias_grad, step.outputs, step.bias_rate, step.bias_decay, net)
    conv_transpose_weights(numbers, step)


@kernel_helper
def conv_transpose_weights(numbers: Array, step: Record) -> None:
    """Copy the convolution's weights as [rows x run][outputs]."""
    row = step.rows * step.padded_run
    for c in range(0, step.outputs, 8):
        for k in range(step.rows):
            for r in range(step.run):
                target = step.transposed + (k * step.run + r) * step.outputs + c
                source = step.weight + c * row + k * step.padded_run + r
                for i in range(8):
                    put(numbers, target + i, get(numbers, source + i * row))


@kernel_helper
def linear_forward(numbers: Array, step: Record, rows: int) -> None:
    """Compute the outputs of a linear layer."""
    k = step.inputs
    n = step.outputs
    zero = numbers.dtype.type(0)
    for j in range(0, n, DOT_COLUMNS):
        for i in range(0, rows, ROWS):
            dot_products(
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


@kernel_helper
def linear_backward(arrays: Arrays, step: Record, rows: int, net: Record) -> None:
    """Compute the gradient of the input, if needed, and update the weights, in one pass over them."""
    numbers, scaled = arrays.numbers, arrays.values
    k = step.inputs
    n = step.outputs
    rate = numbers.dtype.type(step.weight_rate)
    if step.relu:
        _relu_backward(numbers, step.output, step.output_grad, rows * n)
    if step.needs_input_grad:
        numbers[step.input_grad : step.input_grad + rows * k] = 0
    for i in range(rows * n):
        put(scaled, i, -rate * get(numbers, step.output_grad + i))
    for j in range(0, n, 8):
        if step.needs_input_grad:
            _input_grad(numbers, arrays.table, step, rows, j)
        if step.weight_rate != 0:
            target = begin_update(numbers, step.weight + j * k, 8 * k, step.weight_decay, net)
            _weight_update(arrays, step, rows, target, j)
            _weight_update(arrays, step, rows, target + 4 * k, j + 4)
            end_update(numbers, step.weight + j * k, 8 * k, net)
    if step.bias_rate != 0:
        numbers[step.bias_grad : step.bias_grad + n] = 0
        for i in range(rows):
            for j in range(n):
                numbers[step.bias_grad + j] += numbers[step.output_grad + i * n + j]
        update(numbers, step.bias, step.bias_grad, n, step.bias_rate, step.bias_decay, net)


@kernel_helper
def _input_grad(numbers: Array, table: Array, step: Record, rows: int, j: int) -> None:
    """Add the contribution of eight outputs from `j` on to the gradient of the input."""
    m = numbers
    k = step.inputs
    n = step.outputs
    grad = step.input_grad
    for i in range(0, rows, ROWS):
        column = 0
        source = step.output_grad + i * n + j
        weight = step.weight + j * k
        while column + TILE_VECTORS * LANES <= k:
            multiply_tile(
                m, grad + i * k + column, k, m, table, step.row_offsets, source, 0, 1, m, weight + column, k,
                1, 8, ROWS, TILE_VECTORS, True,
            )  # fmt: skip
            column += TILE_VECTORS * LANES
        while column < k:
            multiply_tile(
                m, grad + i * k + column, k, m, table, step.row_offsets, source, 0, 1, m, weight + column, k,
                1, 8, ROWS, 1, True,
            )  # fmt: skip
            column += LANES


@kernel_helper
def _weight_update(arrays: Arrays, step: Record, rows: int, target: int, j: int) -> None:
    """Update the weights of four outputs from `j` on."""
    numbers = arrays.numbers
    table = arrays.table
    consecutive = step.row_offsets + ROWS
    k = step.inputs
    n = step.outputs
    column = 0
    while column + TILE_VECTORS * LANES <= k:
        multiply_tile(
            numbers, target + column, k, arrays.values, table, consecutive, j, 0, n, numbers, step.input +
            column, k, 1, rows, 4, TILE_VECTORS, True,
        )  # fmt: skip
        column += TILE_VECTORS * LANES
    while column < k:
        multiply_tile(
            numbers, target + column, k, arrays.values, table, consecutive, j, 0, n, numbers, step.input +
            column, k, 1, rows, 4, 1, True,
        )  # fmt: skip
        column += LANES


@kernel_helper
def _relu_backward(numbers: Array, result: int, grad: int, n: int) -> None:
    zero = numbers.dtype.type(0)
    for i in range(n):
        put(numbers, grad + i, zero if get(numbers, result + i) <= zero else get(numbers, grad + i))


@kernel_helper
def pool_forward(arrays: Arrays, step: Record, size: int) -> None:
    """Apply pooling and ReLU; a window of one position is ReLU alone."""
    numbers = arrays.numbers
    table = arrays.table
    block = arrays.block
    n, window = step.outputs, step.window
    for w in range(size * step.windows):
        for i in range(window):
            source = step.input + get(table, step.input_offsets + w * window + i)
            for c in range(n):
                put(block, i * n + c, get(numbers, source + c))
        max_pool(
            numbers, get(table, step.output_offsets + w), block, 0, window, n, n, numbers, step.bias,
            step.relu, arrays.argmax, step.argmax + w * n,
        )  # fmt: skip


@kernel_helper
def pool_backward(arrays: Arrays, step: Record, size: int) -> None:
    """Compute the input gradient of a max pooling layer."""
    numbers, table = arrays.numbers, arrays.table
    n = step.outputs
    window = step.window
    shift = step.output_grad - step.output
    numbers[step.input_grad : step.input_grad + size * step.size] = 0
    for w in range(size * step.windows):
        grad, argmax = get(table, step.output_offsets + w) + shift, step.argmax + w * n
        for c in range(n):
            i = np.int64(get(arrays.argmax, argmax + c))
            if i < window:
                target = step.input_grad + get(table, step.input_offsets + w * window + i) + c
                put(numbers, target, get(numbers, target) + get(numbers, grad + c))


@kernel_helper
def words_forward(numbers: Array, step: Record, texts: Array) -> None:
    """Compute the mean of the vectors of each text's words; 0 is padding, but counts in the mean."""
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


@kernel_helper
def words_backward(arrays: Arrays, step: Record, texts: Array, first: int, net: Record) -> None:
    """Sum the gradients of each word, then update its vector.

    `counts[word]` - `first` is the index of the word's sum; values below `first` are from earlier batches.
    """
    numbers = arrays.numbers
    positions = arrays.counts
    distinct_words = arrays.row_offsets
    sums = arrays.values
    n, count = step.outputs, 0
    target = begin_update(numbers, step.weight, step.inputs * n, step.weight_decay, net)
    for i in range(len(texts)):
        grad = step.output_grad + i * n
        for word in texts[i]:
            if word != 0:
                if get(positions, np.int64(word)) < first:
                    put(positions, np.int64(word), np.int64(first + count))
                    put(distinct_words, count, np.int32(word))
                    sums[count * n : (count + 1) * n] = 0
                    count += 1
                offset = (get(positions, np.int64(word)) - first) * n
                for k in range(n):
                    put(sums, offset + k, get(sums, offset + k) + get(numbers, grad + k))
    rate = numbers.dtype.type(step.weight_rate / texts.shape[1])
    for i in range(count):
        vector = target + np.int64(get(distinct_words, i)) * n
        for k in range(n):
            put(numbers, vector + k, get(numbers, vector + k) - rate * get(sums, i * n + k))
    end_update(numbers, step.weight, step.inputs * n, net)


Function = TypeVar("Function", bound=Callable[..., Any])


def _compile_cached(make: Callable[[str], Function]) -> Function:
    """Return a function that is compiled at its first call and, if possible, cached on disk.

    numba's cache depends on the function's file and closure only. The closure is therefore a fingerprint of
    the other module that is compiled into it.
    """
    source = Path(str(inner_loops.__file__)).read_bytes()
    function = make(f"{inner_loops.LANES} {hashlib.sha256(source).hexdigest()}")
    options: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}
    try:
        return cast(Function, njit(cache=True, **options)(function))
    except RuntimeError:  # no folder for the cache
        return cast(Function, njit(**options)(function))


@kernel_helper
def _copy_inputs(numbers: Array, net: Record, x: Array) -> None:
    """Copy a batch (size, channels, height, width) to the padded input of the first layer."""
    size, channels, height, width = x.shape
    for i in range(size):
        for c in range(channels):
            for h in range(height):
                row = net.input + i * net.input_size + h * net.input_row + c
                for w in range(width):
                    put(numbers, row + w * net.input_pixel, numbers.dtype.type(x[i, c, h, w]))


@kernel_helper
def add_prbm_and_update_mean(numbers: Array, net: Record, size: int) -> None:
    """Compute z = z_g + prbm, and r <- (1 - mu) r + mu mean of z_g."""
    n, mu = net.z_size, numbers.dtype.type(net.mu)
    rest, share = numbers.dtype.type(1 - net.mu), numbers.dtype.type(1 / size)
    sums = net.sums
    prbm = net.prbm
    r = net.running_mean  # read once, not after every write
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


@kernel_helper
def prbm_and_mr_backward(numbers: Array, net: Record, size: int, divisor: float) -> None:
    """Update PRBM's vector, and add the gradients of MR, slope/d (r/d - zbar), and of other terms."""
    n, rate = net.z_size, numbers.dtype.type(net.prbm_rate)
    slope, share = numbers.dtype.type(net.slope / divisor), numbers.dtype.type(1 / divisor)
    momentum, sums = numbers.dtype.type(net.momentum), net.sums
    numbers[sums : sums + n] = 0
    for i in range(size):
        grad = net.z_grad + i * n
        for k in range(n):
            put(numbers, sums + k, get(numbers, sums + k) + get(numbers, grad + k))
    for k in range(n):
        total = get(numbers, sums + k)
        distance = share * get(numbers, net.running_mean + k) - get(numbers, net.global_mean + k)
        p = get(numbers, net.prbm + k)
        if net.mode == MOMENTUM:
            step = (
                momentum * get(numbers, net.prbm_step + k) - rate * get(numbers, net.feature_mask + k) * total
            )
            put(numbers, net.prbm_step + k, step)
            put(numbers, net.prbm + k, p + step)
        else:
            put(numbers, net.prbm + k, p - rate * get(numbers, net.feature_mask + k) * total)
        put(numbers, sums + k, slope * distance)
    for i in range(size):
        grad = net.z_grad + i * n
        for k in range(n):
            put(numbers, grad + k, get(numbers, grad + k) + get(numbers, sums + k))
    if net.extra_z_grad > 0:
        for k in range(size * n):
            put(numbers, net.z_grad + k, get(numbers, net.z_grad + k) + get(numbers, net.extra_z_grad + k))


@kernel_helper
def _cross_entropy(numbers: Array, table: Array, net: Record, y: Array) -> float:
    """Return the batch's mean loss and write its gradient, (softmax - one-hot) / size, to `logits_grad`.

    The gradient of the label's logit is minus the sum of the others', not a rounded softmax minus 1: it is 0
    for a sample that the model is certain of, however large the input.
    """
    size, loss = len(y), 0.0
    for i in range(size):
        z, grad = net.logits + i * net.logits_size, net.logits_grad + i * net.logits_size
        label, others = get(table, net.class_offsets + y[i]), 0.0
        top = get(numbers, z + label)
        for j in range(net.classes):
            top = max(top, get(numbers, z + get(table, net.class_offsets + j)))
        for j in range(net.classes):
            offset = get(table, net.class_offsets + j)
            e = math.exp(get(numbers, z + offset) - top)
            put(numbers, grad + offset, e)
            others += e if offset != label else 0.0
        total = others + get(numbers, grad + label)
        for j in range(net.classes):
            index = grad + get(table, net.class_offsets + j)
            put(numbers, index, numbers.dtype.type(get(numbers, index) / total / size))
        put(numbers, grad + label, numbers.dtype.type(-others / total / size))
        loss += math.log(total) - (get(numbers, z + label) - top)
    return loss / size


@kernel_helper
def _forward(arrays: Arrays, steps: Array, net: Record, x: Array, texts: Array, size: int) -> None:
    if len(x) > 0:
        _copy_inputs(arrays.numbers, net, x)
    for layer in range(len(steps)):
        step = steps[layer]
        if layer == net.cut:
            add_prbm_and_update_mean(arrays.numbers, net, size)
        if step.kind == CONV:
            conv_forward(arrays, step, size)
        elif step.kind == LINEAR:
            linear_forward(arrays.numbers, step, (size + ROWS - 1) // ROWS * ROWS)
        elif step.kind == POOL:
            pool_forward(arrays, step, size)
        else:
            words_forward(arrays.numbers, step, texts)
    if net.cut == len(steps):
        add_prbm_and_update_mean(arrays.numbers, net, size)


@kernel_helper
def _backward_layer(arrays: Arrays, step: Record, net: Record, texts: Array, size: int, first: int) -> None:
    """Compute the backward pass of one layer and update its parameters."""
    if step.kind == CONV:
        if step.needs_input_grad:
            conv_input_grad(arrays, step, size)
        if step.weight_rate != 0 or step.bias_rate != 0:
            conv_weight_grad(arrays, step, size)
            conv_update(arrays.numbers, step, net)
    elif step.kind == LINEAR:
        linear_backward(arrays, step, (size + ROWS - 1) // ROWS * ROWS, net)
    elif step.kind == POOL:
        if step.needs_input_grad:
            pool_backward(arrays, step, size)
    elif step.weight_rate != 0:
        words_backward(arrays, step, texts, first, net)


def _make_train(fingerprint: str) -> Callable[..., float]:
    def train(
        arrays: Arrays, steps: Array, nets: Array, x: Array, texts: Array, y: Array, size: int, divisors:
        Array, is_forward_done: bool,
    ) -> float:  # fmt: skip
        """Train in place by SGD in batches of `size` and return the sum of the batches' cross-entropies.

        MR divides r by divisors[b] after batch b. If `is_forward_done`, there is one batch, whose forward
        pass and gradient of the logits are complete.
        """
        fingerprint  # noqa: B018  (closed over)
        net, loss = nets[0], 0.0
        if len(texts) > 0:
            arrays.counts[:] = -1
        for b in range(len(y) // size):
            inputs, batch_texts = x[b * size : (b + 1) * size], texts[b * size : (b + 1) * size]
            if not is_forward_done:
                _forward(arrays, steps, net, inputs, batch_texts, size)
                loss += _cross_entropy(arrays.numbers, arrays.table, net, y[b * size : (b + 1) * size])
            if net.cut == len(steps):
                prbm_and_mr_backward(arrays.numbers, net, size, divisors[b])
            for layer in range(len(steps) - 1, net.first_layer - 1, -1):
                _backward_layer(arrays, steps[layer], net, batch_texts, size, b * batch_texts.size)
                if layer == net.cut:
                    prbm_and_mr_backward(arrays.numbers, net, size, divisors[b])
        return loss

    return train


def _make_forward(fingerprint: str) -> Callable[..., None]:
    def forward(arrays: Arrays, steps: Array, nets: Array, x: Array, texts: Array, size: int) -> None:
        """Compute the forward pass of one batch."""
        fingerprint  # noqa: B018  (closed over)
        _forward(arrays, steps, nets[0], x, texts, size)

    return forward


def _make_transpose_weights(fingerprint: str) -> Callable[..., None]:
    def transpose_weights(arrays: Arrays, steps: Array) -> None:
        """Transpose the weights of convolutions, after parameters were written."""
        fingerprint  # noqa: B018  (closed over)
        for layer in range(len(steps)):
            if steps[layer].kind == CONV:
                conv_transpose_weights(arrays.numbers, steps[layer])

    return transpose_weights


train = _compile_cached(_make_train)
forward = _compile_cached(_make_forward)
transpose_weights = _compile_cached(_make_transpose_weights)
