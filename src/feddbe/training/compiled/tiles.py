"""Memory layout and innermost loops of the compiled trainer.

The innermost loops are LLVM vector code: sums of scaled rows that stay in registers, which loops that numba
compiles keep in memory. Offsets count numbers from the start of an array; nothing here looks where an array
ends. A vector has LANES numbers of the arrays' type, float32 or float64 (of which the machine then needs two
registers). A sum's order depends on LANES alone, never on where an array lies: the same bits in every process
of a machine.

Every number is in one array, and a layer is a record of offsets into it. An image lies as (height, width,
channels) with its frame of zeros; channels and features fill whole vectors, batches whole groups of ROWS.
Convolution weights lie as [outputs][rows][columns x channels] and once more turned, linear ones as torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

_FEATURES = llvm.get_host_cpu_features()
LANES = 16 if _FEATURES.get("avx512f") else 8 if _FEATURES.get("avx") else 4
_WORD = ir.IntType(64)
_FAST = ("contract", "reassoc", "nsz")
Value = Any
"""One of LLVM's."""


class _Code:
    """What the body of one intrinsic is written with: arrays are pointers, literals are constants."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.builder, self.arguments = builder, []
        for kind, argument in zip(signature.args, arguments, strict=True):
            if isinstance(kind, types.Array):
                argument = context.make_array(kind)(context, builder, argument).data
            elif isinstance(kind, types.Literal):
                argument = ir.Constant(_WORD, kind.literal_value)
            self.arguments.append(argument)
        single = signature.args[0].dtype == types.float32
        self.vector = ir.VectorType(ir.FloatType() if single else ir.DoubleType(), LANES)
        self.zero = ir.Constant(self.vector, [0.0] * LANES)
        self._align = 4 if single else 8

    def at(self, base: Value, *terms: Any) -> Value:
        """The address `base` + the sum of the terms; a tuple is a product."""
        index = ir.Constant(_WORD, 0)
        for term in terms:
            if isinstance(term, tuple):
                term = self.builder.mul(*map(_word, term))
            index = self.builder.add(index, _word(term))
        return self.builder.gep(base, [index])

    def load(self, base: Value, *terms: Any) -> Value:
        place = self.builder.bitcast(self.at(base, *terms), self.vector.as_pointer())
        value = self.builder.load(place)
        value.align = self._align
        return value

    def store(self, value: Value, base: Value, *terms: Any) -> None:
        place = self.builder.bitcast(self.at(base, *terms), self.vector.as_pointer())
        self.builder.store(value, place).align = self._align

    def spread(self, number: Value) -> Value:
        """The number in all lanes."""
        vector = ir.VectorType(number.type, LANES)
        one = self.builder.insert_element(ir.Constant(vector, ir.Undefined), number, _word(0))
        return self.shuffled(one, [0] * LANES)

    def shuffled(self, vector: Value, order: list[int]) -> Value:
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), order)
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)

    def spread_from(self, base: Value, *terms: Any) -> Value:
        return self.spread(self.builder.load(self.at(base, *terms)))

    def add_product(self, total: Value, x: Value, y: Value) -> Value:
        return self.builder.fadd(total, self.builder.fmul(x, y, flags=_FAST), flags=_FAST)

    def loop(
        self, count: Value, start: list[Value], body: Callable[[Value, list[Value]], list[Value]]
    ) -> Any:
        """for i in range(count): values = body(i, values). The last values; count > 0."""
        builder, before = self.builder, self.builder.block
        inside, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(inside)
        builder.position_at_end(inside)
        i = builder.phi(_WORD)
        i.add_incoming(_word(0), before)
        values = [builder.phi(value.type) for value in start]
        for phi, value in zip(values, start, strict=True):
            phi.add_incoming(value, before)
        new = body(i, values)
        following = builder.add(i, _word(1))
        i.add_incoming(following, builder.block)
        for phi, value in zip(values, new, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, count), inside, after)
        builder.position_at_end(after)
        return new


_emitted: Any = intrinsic
_with_literals: Any = intrinsic(prefer_literal=True)


def _word(number: Any) -> Value:
    return ir.Constant(_WORD, number) if isinstance(number, int) else number


@_with_literals
def tile(context, out, o, o_step, a, offsets, first, a0, a_row, a_step, m, m0, m_step, rows, run, P, V, add):  # type: ignore[no-untyped-def]
    """P rows of V vectors of a product of matrices, `add`ed to `out` or in its place:

    out[o + p o_step + v] = sum over r < rows, k < run of
        a[a0 + offsets[first + p] + r a_row + k a_step] * m[m0 + (r run + k) m_step + v]
    """

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c = _Code(context, builder, signature, arguments)
        out, o, o_step, a, offsets, first, a0, a_row, a_step, m, m0, m_step, rows, run, *_ = c.arguments
        p_, v_ = range(P.literal_value), range(V.literal_value)
        base = [c.at(a, a0, builder.load(c.at(offsets, first, p))) for p in p_]

        def row(r: Value, totals: list[Value]) -> Any:
            along, down = builder.mul(r, a_row), c.at(m, m0, (builder.mul(r, run), m_step))

            def step(k: Value, totals: list[Value]) -> list[Value]:
                weights = [c.load(down, (k, m_step), v * LANES) for v in v_]
                scales = [c.spread_from(base[p], along, (k, a_step)) for p in p_]
                return [c.add_product(totals[p * len(v_) + v], scales[p], weights[v]) for p in p_ for v in v_]

            return c.loop(run, totals, step)

        for i, total in enumerate(c.loop(rows, [c.zero] * (len(p_) * len(v_)), row)):
            to = c.at(out, o, (o_step, i // len(v_)), i % len(v_) * LANES)
            c.store(builder.fadd(total, c.load(to)) if add.literal_value else total, to)
        return context.get_dummy_value()

    return types.void(
        out, o, o_step, a, offsets, first, a0, a_row, a_step, m, m0, m_step, rows, run, P, V, add
    ), code


@_with_literals
def add_scaled_rows(context, out, o, o_row, o_step, values, places, first, n, m, m0, m_row, m_step, rows, V):  # type: ignore[no-untyped-def]
    """V vectors for each r < rows:

    out[o + r o_row + v o_step] += sum over i < n of
        values[first + i] * m[m0 + r m_row + places[first + i] + v m_step]
    """

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c = _Code(context, builder, signature, arguments)
        out, o, o_row, o_step, values, places, first, n, m, m0, m_row, m_step, rows, _ = c.arguments
        places, values, v_ = c.at(places, first), c.at(values, first), range(V.literal_value)

        def row(r: Value, _: list[Value]) -> list[Value]:
            to, base = c.at(out, o, (r, o_row)), c.at(m, m0, (r, m_row))

            def step(i: Value, totals: list[Value]) -> list[Value]:
                line = c.at(base, builder.sext(builder.load(c.at(places, i)), _WORD))
                scale = c.spread_from(values, i)
                return [c.add_product(totals[v], scale, c.load(line, (m_step, v))) for v in v_]

            for v, total in enumerate(c.loop(n, [c.load(to, (o_step, v)) for v in v_], step)):
                c.store(total, to, (o_step, v))
            return []

        c.loop(rows, [], row)
        return context.get_dummy_value()

    return types.void(out, o, o_row, o_step, values, places, first, n, m, m0, m_row, m_step, rows, V), code


@_with_literals
def dots(context, out, o, o_step, a, a0, a_step, m, m0, m_step, n, P, Q):  # type: ignore[no-untyped-def]
    """P times Q inner products of n numbers, a multiple of LANES:

    out[o + p o_step + q] = sum over k < n of a[a0 + p a_step + k] * m[m0 + q m_step + k]
    """

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c = _Code(context, builder, signature, arguments)
        out, o, o_step, a, a0, a_step, m, m0, m_step, n, *_ = c.arguments
        p_, q_ = range(P.literal_value), range(Q.literal_value)

        def step(k: Value, totals: list[Value]) -> list[Value]:
            k = builder.mul(k, _word(LANES))
            left = [c.load(a, a0, (a_step, p), k) for p in p_]
            right = [c.load(m, m0, (m_step, q), k) for q in q_]
            return [c.add_product(totals[p * len(q_) + q], left[p], right[q]) for p in p_ for q in q_]

        sums = c.loop(builder.udiv(n, _word(LANES)), [c.zero] * (len(p_) * len(q_)), step)
        for i, total in enumerate(sums):
            half = LANES // 2
            while half:  # the upper half of what is left onto the lower
                order = [min(lane + half, LANES - 1) for lane in range(LANES)]
                total = builder.fadd(total, c.shuffled(total, order), flags=_FAST)
                half //= 2
            to = c.at(out, o, (o_step, i // len(q_)), i % len(q_))
            builder.store(builder.extract_element(total, _word(0)), to)
        return context.get_dummy_value()

    return types.void(out, o, o_step, a, a0, a_step, m, m0, m_step, n, P, Q), code


@_emitted
def largest(context, out, o, rows, r0, window, r_step, n, bias, b0, relu, chosen, c0):  # type: ignore[no-untyped-def]
    """Pooling, bias and ReLU of n numbers, a multiple of LANES: the first largest of `window` rows, plus
    bias, and 0 for what is less than 0 if `relu`. `chosen` is which row it was, and `window` where ReLU gave
    0. What is no number wins and stays none, as in torch."""

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c = _Code(context, builder, signature, arguments)
        out, o, rows, r0, window, r_step, n, bias, b0, relu, chosen, c0 = c.arguments
        small, bytes_ = ir.IntType(32), ir.VectorType(ir.IntType(8), LANES)
        rectified = c.spread(builder.icmp_signed("!=", relu, _word(0)))
        none = c.spread(builder.trunc(window, small))

        def part(f: Value, _: list[Value]) -> list[Value]:
            f = builder.mul(f, _word(LANES))

            def larger(i: Value, best: list[Value]) -> list[Value]:
                value = c.load(rows, r0, (i, r_step), f)
                more = builder.fcmp_ordered(">", value, best[0])
                more = builder.or_(more, builder.fcmp_unordered("uno", value, value))
                at = c.spread(builder.trunc(i, small))
                return [builder.select(more, value, best[0]), builder.select(more, at, best[1])]

            first = [c.load(rows, r0, f), ir.Constant(none.type, [0] * LANES)]
            top, at = c.loop(window, first, larger)
            top = builder.fadd(top, c.load(bias, b0, f))
            off = builder.and_(rectified, builder.fcmp_ordered("<=", top, c.zero))
            c.store(builder.select(off, c.zero, top), out, o, f)
            at = builder.trunc(builder.select(off, none, at), bytes_)
            builder.store(at, builder.bitcast(c.at(chosen, c0, f), bytes_.as_pointer())).align = 1
            return []

        c.loop(builder.udiv(n, _word(LANES)), [], part)
        return context.get_dummy_value()

    return types.void(out, o, rows, r0, window, r_step, n, bias, b0, relu, chosen, c0), code


@_emitted
def get(context, array, i):  # type: ignore[no-untyped-def]
    """array[i], i >= 0."""

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load(builder.gep(data, [arguments[1]]))

    return array.dtype(array, types.int64), code


@_emitted
def put(context, array, i, value):  # type: ignore[no-untyped-def]
    """array[i] = value, i >= 0."""

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.store(arguments[2], builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), code


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
