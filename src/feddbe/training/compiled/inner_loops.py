"""Memory layout and innermost loops of the compiled trainer.

The innermost loops are LLVM vector code, which keeps sums of scaled rows in registers; numba's own loops keep
them in memory. Offsets count numbers from the start of an array, and bounds are not checked. A vector has
LANES numbers of the arrays' type, float32 or float64 (then in two registers). The order of a sum depends on
LANES alone, never on an address, so all processes of a machine compute the same bits.

Every number is in one array, and a layer is a record of offsets into it. An image is stored as (height,
width, channels) with zero padding; channels and features fill whole vectors, batches whole groups of ROWS.
Convolution weights are stored as [outputs][rows][columns x channels] and transposed, linear ones as in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

_FEATURES = llvm.get_host_cpu_features()
if _FEATURES.get("avx512f"):
    LANES = 16
elif _FEATURES.get("avx"):
    LANES = 8
else:
    LANES = 4
_INT64 = ir.IntType(64)
Value = Any
"""An LLVM value."""


class _VectorBuilder:
    """Builder of an intrinsic's body: arrays become pointers, literals become constants."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.builder, self.arguments = builder, []
        for kind, argument in zip(signature.args, arguments, strict=True):
            if isinstance(kind, types.Array):
                argument = context.make_array(kind)(context, builder, argument).data
            elif isinstance(kind, types.Literal):
                argument = ir.Constant(_INT64, kind.literal_value)
            self.arguments.append(argument)
        single = signature.args[0].dtype == types.float32
        self.vector = ir.VectorType(ir.FloatType() if single else ir.DoubleType(), LANES)
        self.zero = ir.Constant(self.vector, [0.0] * LANES)
        self._align = 4 if single else 8

    def address(self, base: Value, *terms: Any) -> Value:
        """Return the address `base` + the sum of the terms; a tuple is a product."""
        index = ir.Constant(_INT64, 0)
        for term in terms:
            if isinstance(term, tuple):
                term = self.builder.mul(*map(_int64, term))
            index = self.builder.add(index, _int64(term))
        return self.builder.gep(base, [index])

    def load(self, base: Value, *terms: Any) -> Value:
        pointer = self.builder.bitcast(self.address(base, *terms), self.vector.as_pointer())
        value = self.builder.load(pointer)
        value.align = self._align
        return value

    def store(self, value: Value, base: Value, *terms: Any) -> None:
        pointer = self.builder.bitcast(self.address(base, *terms), self.vector.as_pointer())
        self.builder.store(value, pointer).align = self._align

    def fill(self, number: Value) -> Value:
        """Return a vector with the number in all lanes."""
        vector = ir.VectorType(number.type, LANES)
        single = self.builder.insert_element(ir.Constant(vector, ir.Undefined), number, _int64(0))
        return self.shuffle(single, [0] * LANES)

    def shuffle(self, vector: Value, order: list[int]) -> Value:
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), order)
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), lanes)

    def load_fill(self, base: Value, *terms: Any) -> Value:
        return self.fill(self.builder.load(self.address(base, *terms)))

    def add_product(self, total: Value, x: Value, y: Value) -> Value:
        """Return total + x y, rounded once.

        An explicit operation: if LLVM may fuse a product with a sum, code that is compiled and code that is
        loaded from numba's cache can differ in the last bit.
        """
        if not _FEATURES.get("fma"):
            return self.builder.fadd(total, self.builder.fmul(x, y))
        bits = 32 if isinstance(x.type.element, ir.FloatType) else 64
        name = f"llvm.fma.v{LANES}f{bits}"
        signature = ir.FunctionType(x.type, [x.type] * 3)
        fma = cgutils.get_or_insert_function(self.builder.module, signature, name)  # type: ignore[no-untyped-call]
        return self.builder.call(fma, [x, y, total])

    def loop(
        self, count: Value, start: list[Value], body: Callable[[Value, list[Value]], list[Value]]
    ) -> Any:
        """Emit `for i in range(count): values = body(i, values)`, count > 0, and return the last values."""
        builder, before = self.builder, self.builder.block
        inside, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(inside)
        builder.position_at_end(inside)
        i = builder.phi(_INT64)
        i.add_incoming(_int64(0), before)
        values = [builder.phi(value.type) for value in start]
        for phi, value in zip(values, start, strict=True):
            phi.add_incoming(value, before)
        new = body(i, values)
        following = builder.add(i, _int64(1))
        i.add_incoming(following, builder.block)
        for phi, value in zip(values, new, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_unsigned("<", following, count), inside, after)
        builder.position_at_end(after)
        return new


_vector_intrinsic: Any = intrinsic
_literal_intrinsic: Any = intrinsic(prefer_literal=True)


def _int64(number: Any) -> Value:
    return ir.Constant(_INT64, number) if isinstance(number, int) else number


@_literal_intrinsic
def multiply_tile(  # type: ignore[no-untyped-def]
    context, out, o, o_step, a, offsets, first, a0, a_row, a_step, m, m0, m_step, rows, run, P, V, add
):
    """Compute P rows of V vectors of a matrix product, and add them to `out` or, without `add`, replace it:

    out[o + p o_step + v] = sum over r < rows, k < run of
        a[a0 + offsets[first + p] + r a_row + k a_step] * m[m0 + (r run + k) m_step + v]
    """

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c = _VectorBuilder(context, builder, signature, arguments)
        out, o, o_step, a, offsets, first, a0, a_row, a_step, m, m0, m_step, rows, run, *_ = c.arguments
        p_, v_ = range(P.literal_value), range(V.literal_value)
        base = [c.address(a, a0, builder.load(c.address(offsets, first, p))) for p in p_]

        def row(r: Value, totals: list[Value]) -> Any:
            along, down = builder.mul(r, a_row), c.address(m, m0, (builder.mul(r, run), m_step))

            def step(k: Value, totals: list[Value]) -> list[Value]:
                weights = [c.load(down, (k, m_step), v * LANES) for v in v_]
                scales = [c.load_fill(base[p], along, (k, a_step)) for p in p_]
                return [c.add_product(totals[p * len(v_) + v], scales[p], weights[v]) for p in p_ for v in v_]

            return c.loop(run, totals, step)

        for i, total in enumerate(c.loop(rows, [c.zero] * (len(p_) * len(v_)), row)):
            to = c.address(out, o, (o_step, i // len(v_)), i % len(v_) * LANES)
            c.store(builder.fadd(total, c.load(to)) if add.literal_value else total, to)
        return context.get_dummy_value()

    return types.void(
        out, o, o_step, a, offsets, first, a0, a_row, a_step, m, m0, m_step, rows, run, P, V, add
    ), code


@_literal_intrinsic
def add_scaled_rows(context, out, o, o_row, o_step, values, offsets, first, n, m, m0, m_row, m_step, rows, V):  # type: ignore[no-untyped-def]
    """Add sums of scaled rows to V vectors for each r < rows:

    out[o + r o_row + v o_step] += sum over i < n of
        values[first + i] * m[m0 + r m_row + offsets[first + i] + v m_step]
    """

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c = _VectorBuilder(context, builder, signature, arguments)
        out, o, o_row, o_step, values, offsets, first, n, m, m0, m_row, m_step, rows, _ = c.arguments
        offsets = c.address(offsets, first)
        values = c.address(values, first)
        v_ = range(V.literal_value)

        def row(r: Value, _: list[Value]) -> list[Value]:
            to, base = c.address(out, o, (r, o_row)), c.address(m, m0, (r, m_row))

            def step(i: Value, totals: list[Value]) -> list[Value]:
                line = c.address(base, builder.sext(builder.load(c.address(offsets, i)), _INT64))
                scale = c.load_fill(values, i)
                return [c.add_product(totals[v], scale, c.load(line, (m_step, v))) for v in v_]

            for v, total in enumerate(c.loop(n, [c.load(to, (o_step, v)) for v in v_], step)):
                c.store(total, to, (o_step, v))
            return []

        c.loop(rows, [], row)
        return context.get_dummy_value()

    return types.void(out, o, o_row, o_step, values, offsets, first, n, m, m0, m_row, m_step, rows, V), code


@_literal_intrinsic
def dot_products(context, out, o, o_step, a, a0, a_step, m, m0, m_step, n, P, Q):  # type: ignore[no-untyped-def]
    """Compute P times Q inner products of n numbers, a multiple of LANES:

    out[o + p o_step + q] = sum over k < n of a[a0 + p a_step + k] * m[m0 + q m_step + k]
    """

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c = _VectorBuilder(context, builder, signature, arguments)
        out, o, o_step, a, a0, a_step, m, m0, m_step, n, *_ = c.arguments
        p_, q_ = range(P.literal_value), range(Q.literal_value)

        def step(k: Value, totals: list[Value]) -> list[Value]:
            k = builder.mul(k, _int64(LANES))
            left = [c.load(a, a0, (a_step, p), k) for p in p_]
            right = [c.load(m, m0, (m_step, q), k) for q in q_]
            return [c.add_product(totals[p * len(q_) + q], left[p], right[q]) for p in p_ for q in q_]

        sums = c.loop(builder.udiv(n, _int64(LANES)), [c.zero] * (len(p_) * len(q_)), step)
        for i, total in enumerate(sums):
            half = LANES // 2
            while half:  # add the upper half of the remaining lanes to the lower
                order = [min(lane + half, LANES - 1) for lane in range(LANES)]
                total = builder.fadd(total, c.shuffle(total, order))
                half //= 2
            to = c.address(out, o, (o_step, i // len(q_)), i % len(q_))
            builder.store(builder.extract_element(total, _int64(0)), to)
        return context.get_dummy_value()

    return types.void(out, o, o_step, a, a0, a_step, m, m0, m_step, n, P, Q), code


@_vector_intrinsic
def max_pool(context, out, o, rows, r0, window, r_step, n, bias, b0, relu, chosen, c0):  # type: ignore[no-untyped-def]
    """Apply max pooling over `window` rows, bias and, if `relu`, ReLU to n numbers, a multiple of LANES.

    `chosen` receives the index of the first largest row, or `window` if ReLU returned 0. NaN wins and stays
    NaN, as in torch.
    """

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        c = _VectorBuilder(context, builder, signature, arguments)
        out, o, rows, r0, window, r_step, n, bias, b0, relu, chosen, c0 = c.arguments
        small, bytes_ = ir.IntType(32), ir.VectorType(ir.IntType(8), LANES)
        rectified = c.fill(builder.icmp_signed("!=", relu, _int64(0)))
        none = c.fill(builder.trunc(window, small))

        def part(f: Value, _: list[Value]) -> list[Value]:
            f = builder.mul(f, _int64(LANES))

            def larger(i: Value, best: list[Value]) -> list[Value]:
                value = c.load(rows, r0, (i, r_step), f)
                more = builder.fcmp_ordered(">", value, best[0])
                more = builder.or_(more, builder.fcmp_unordered("uno", value, value))
                index = c.fill(builder.trunc(i, small))
                return [builder.select(more, value, best[0]), builder.select(more, index, best[1])]

            first = [c.load(rows, r0, f), ir.Constant(none.type, [0] * LANES)]
            top, index = c.loop(window, first, larger)
            top = builder.fadd(top, c.load(bias, b0, f))
            off = builder.and_(rectified, builder.fcmp_ordered("<=", top, c.zero))
            c.store(builder.select(off, c.zero, top), out, o, f)
            index = builder.trunc(builder.select(off, none, index), bytes_)
            builder.store(index, builder.bitcast(c.address(chosen, c0, f), bytes_.as_pointer())).align = 1
            return []

        c.loop(builder.udiv(n, _int64(LANES)), [], part)
        return context.get_dummy_value()

    return types.void(out, o, rows, r0, window, r_step, n, bias, b0, relu, chosen, c0), code


@_vector_intrinsic
def get(context, array, i):  # type: ignore[no-untyped-def]
    """Return array[i], i >= 0."""

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.load(builder.gep(data, [arguments[1]]))

    return array.dtype(array, types.int64), code


@_vector_intrinsic
def put(context, array, i, value):  # type: ignore[no-untyped-def]
    """Set array[i] = value, i >= 0."""

    def code(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        builder.store(arguments[2], builder.gep(data, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(array, types.int64, array.dtype), code


Array = npt.NDArray[Any]
Record = Any
Function = TypeVar("Function", bound=Callable[..., Any])
TILE_ROWS, DOT_COLUMNS, TILE_VECTORS = (8, 4, 4) if LANES == 16 else (4, 2, 2)
"""Shape of a tile of sums that fits into the registers."""
ROWS = 5
WIDTH = max(8, LANES)
WORDS, CONV, POOL, LINEAR = range(4)
PLAIN, DRIFT, GRADIENT, MOMENTUM = range(4)
"""Updates of parameters: by the gradient; by gradient and drift; none, but the gradient is stored in place of
the drift; with momentum, whose last step is stored after the drifts."""

STEP = np.dtype(
    [(name, np.int64) for name in (
        "kind", "weight", "bias", "transposed", "weight_grad", "bias_grad", "input", "input_grad", "output",
        "output_grad", "rows", "run", "padded_run", "inputs", "outputs", "row", "size", "windows", "window",
        "input_offsets", "output_offsets", "argmax", "row_offsets", "group_size", "relu", "needs_input_grad",
    )] + [(name, np.float64) for name in ("weight_rate", "bias_rate", "weight_decay", "bias_decay")]
)  # fmt: skip
"""A layer with the pooling and ReLU after it.

`rows`, `run`: rows of a kernel, and its columns times channels; `row`, `size`: numbers in a row and in all of
an input image; `window`: positions that are pooled to one; `input_offsets`, `output_offsets`: table index of
the offsets of the positions and of the results; `group_size`: positions computed at a time; `row_offsets`:
table index of the offsets of rows, then of consecutive numbers; `transposed`: weights, transposed; `argmax`:
start in the array of pooled positions; `decay`: p changes by drift - decay p in addition to its gradient.
"""

NET = np.dtype(
    [(name, np.int64) for name in (
        "input", "input_row", "input_pixel", "input_size", "logits", "logits_grad", "logits_size", "classes",
        "class_offsets", "first_layer", "mode", "drift_offset", "cut", "z_g", "z", "z_grad", "z_size", "prbm",
        "running_mean", "global_mean", "feature_mask", "sums", "extra_z_grad", "prbm_step",
    )] + [(name, np.float64) for name in ("prbm_rate", "momentum", "mu", "slope")]
)  # fmt: skip
"""Offsets of inputs and logits, the mode of updates, and the vectors at the cut.

`first_layer`: the first layer whose gradient is needed; `drift_offset`: distance from a parameter to its
drift or gradient; `cut`: the layer before which z = z_g + prbm, or -1; `running_mean`, `global_mean`: r and
zbar; `feature_mask`: 1 for features, 0 for padding; `slope`: MR's; `extra_z_grad`: gradient of z_g from other
terms, or 0 if there is none; `prbm_step`: PRBM's last step with momentum.
"""


class Arrays(NamedTuple):
    """Arrays of a network."""

    numbers: Array
    """Parameters, drifts, activations and gradients."""
    table: Array
    """Offsets into the numbers."""
    argmax: Array
    """Positions that were the largest in their window."""
    block: Array
    """Results of a group of positions."""
    values: Array
    """Factors of listed rows."""
    row_offsets: Array
    """Offsets of listed rows."""
    counts: Array
    """Lengths of lists."""


def kernel_helper(function: Function) -> Function:
    """Compile a function that only compiled functions call; it is cached on disk as a part of these."""
    compiled = njit(error_model="numpy", boundscheck=False)(function)
    return cast(Function, compiled)


@kernel_helper
def begin_update(numbers: Array, p: int, n: int, decay: float, net: Record) -> int:
    """Apply drift - decay p, and return the offset from which rate times the gradient is to be subtracted."""
    decay_, momentum = numbers.dtype.type(decay), numbers.dtype.type(net.momentum)
    drift_offset = net.drift_offset  # read once: otherwise it is read again after every write
    if net.mode == DRIFT:
        for i in range(p, p + n):
            put(numbers, i, get(numbers, i) + (get(numbers, i + drift_offset) - decay_ * get(numbers, i)))
    if net.mode == MOMENTUM:
        step_offset = 2 * drift_offset
        for i in range(p, p + n):
            drift = get(numbers, i + drift_offset) - decay_ * get(numbers, i)
            put(numbers, i + step_offset, momentum * get(numbers, i + step_offset) + drift)
        p += step_offset
    if net.mode == GRADIENT:
        p += drift_offset
    return p


@kernel_helper
def end_update(numbers: Array, p: int, n: int, net: Record) -> None:
    """Add the step to the parameters, if it was computed separately."""
    if net.mode == MOMENTUM:
        step_offset = 2 * net.drift_offset
        for i in range(p, p + n):
            put(numbers, i, get(numbers, i) + get(numbers, i + step_offset))


@kernel_helper
def update(numbers: Array, p: int, grad: int, n: int, rate: float, decay: float, net: Record) -> None:
    """Update p <- p - rate grad, with drift, decay and momentum."""
    rate_, target = numbers.dtype.type(rate), begin_update(numbers, p, n, decay, net)
    for i in range(n):
        put(numbers, target + i, get(numbers, target + i) - rate_ * get(numbers, grad + i))
    end_update(numbers, p, n, net)
