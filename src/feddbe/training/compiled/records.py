"""What compiled functions are given: every number in one array, and a layer as a record of offsets into it.

An image lies as (height, width, channels) with its frame of zeros; channels and features fill whole vectors,
batches whole groups of ROWS. Convolution weights lie as [outputs][rows][columns x channels] and once more
turned, linear ones as torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
from numba import njit

from feddbe.training.compiled.tiles import LANES, get, put

Array = npt.NDArray[Any]
Record = Any
Function = TypeVar("Function", bound=Callable[..., Any])
TILE_ROWS, DOT_COLUMNS, TILE_VECTORS = (8, 4, 4) if LANES == 16 else (4, 2, 2)
"""As many sums as there are registers for."""
ROWS = 5
WIDTH = max(8, LANES)
WORDS, CONV, POOL, LINEAR = range(4)
PLAIN, DRIFT, GRADIENT, MOMENTUM = range(4)
"""How parameters move: by the gradient; by more than it; not at all, the gradient goes beside them; by
what is left of the last step, too, which lies behind the drifts."""

STEP = np.dtype(
    [(name, np.int64) for name in (
        "kind", "weight", "bias", "turned", "weight_grad", "bias_grad", "input", "input_grad", "output",
        "output_grad", "rows", "run", "padded_run", "inputs", "outputs", "row", "size", "windows", "window",
        "positions", "places", "chosen", "spread", "group", "relu", "back",
    )] + [(name, np.float64) for name in ("weight_rate", "bias_rate", "weight_pull", "bias_pull")]
)  # fmt: skip
"""A layer with the pooling and ReLU after it.

`rows`, `run`: of a kernel, and its columns times channels; `row`, `size`: of an input image; `window`:
positions that are pooled to one; `positions`, `places`: in the table, where each lies in the input, where
each result in the output; `group`: positions at a time; `spread`: in the table, two ways to walk through a
matrix; `back`: whether the gradient of the input is wanted; `pull`: p moves by drift - pull p beside its
gradient.
"""

NET = np.dtype(
    [(name, np.int64) for name in (
        "entry", "entry_row", "entry_pixel", "entry_size", "logits", "logits_grad", "logits_size", "classes",
        "classes_at", "first", "mode", "aside", "cut", "z_g", "z", "z_grad", "z_size", "prbm", "mean", "goal",
        "live", "sums", "more", "prbm_step",
    )] + [(name, np.float64) for name in ("prbm_rate", "momentum", "mu", "slope")]
)  # fmt: skip
"""Where a batch goes in, where logits come out, what is wanted, and the cut.

`first`: the first layer whose gradient is wanted; `aside`: from a parameter to its drift or gradient;
`cut`: the layer before which z = z_g + prbm, or -1; `mean`, `goal`: r and zbar; `live`: 1 where there is a
feature, 0 in the frame; `slope`: MR's; `more`: what a term adds to the gradient of z_g, if it is not 0;
`prbm_step`: PRBM's last one.
"""


class Room(NamedTuple):
    """The arrays: all numbers, the table of offsets, which position was the largest, and room for a block of
    results and for lists."""

    numbers: Array
    table: Array
    chosen: Array
    block: Array
    values: Array
    lines: Array
    counts: Array


def inner(function: Function) -> Function:
    """Compiled for the use of compiled functions. Nothing of it is kept on disk: what uses it is."""
    compiled = njit(fastmath={"contract", "nsz"}, error_model="numpy", boundscheck=False)(function)
    return cast(Function, compiled)


@inner
def begin(numbers: Array, p: int, n: int, pull: float, net: Record) -> int:
    """A step with what it has beside its gradient, drift - pull p: where rate times the gradient is to be
    taken off."""
    pull_, keep = numbers.dtype.type(pull), numbers.dtype.type(net.momentum)
    aside = net.aside  # once: a record is read again after every number that is written
    if net.mode == DRIFT:
        for i in range(p, p + n):
            put(numbers, i, get(numbers, i) + (get(numbers, i + aside) - pull_ * get(numbers, i)))
    if net.mode == MOMENTUM:
        last = 2 * aside
        for i in range(p, p + n):
            beside = get(numbers, i + aside) - pull_ * get(numbers, i)
            put(numbers, i + last, keep * get(numbers, i + last) + beside)
        p += last
    if net.mode == GRADIENT:
        p += aside
    return p


@inner
def end(numbers: Array, p: int, n: int, net: Record) -> None:
    """Go the step, if it was made apart."""
    if net.mode == MOMENTUM:
        last = 2 * net.aside
        for i in range(p, p + n):
            put(numbers, i, get(numbers, i) + get(numbers, i + last))


@inner
def move(numbers: Array, p: int, grad: int, n: int, rate: float, pull: float, net: Record) -> None:
    """p <- p - rate grad, with what comes beside it."""
    rate_, to = numbers.dtype.type(rate), begin(numbers, p, n, pull, net)
    for i in range(n):
        put(numbers, to + i, get(numbers, to + i) - rate_ * get(numbers, grad + i))
    end(numbers, p, n, net)
