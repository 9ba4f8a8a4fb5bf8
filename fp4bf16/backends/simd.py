"""Short vectors inside numba kernels: 16 lanes of float32, int32, float64, uint8 or bool, as LLVM vector
values.

LLVM turns them into AVX-512, AVX2 or NEON instructions. No operation is contracted or reassociated, so a
kernel written with them rounds as its scalar form does. Operators + - * / & | ^ << >> < <= > >= == work on
two vectors or on a vector and a scalar; the rest are the functions below.

>>> import numba, numpy as np
>>> @numba.njit
... def double(x, y):
...     store(pointer(y), 0, load(pointer(x), 0) * np.float32(2))
>>> y = np.empty(16, np.float32)
>>> double(np.ones(16, np.float32), y); float(y.sum())
32.0
"""

from __future__ import annotations

import operator

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.extending import intrinsic, overload, register_model

LANES = 16


class Vector(types.Type):
    """16 lanes of one numba scalar type."""

    def __init__(self, lane):
        self.lane = lane
        super().__init__(f"Vector({lane})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _llvm(fe_type.lane))


_LLVM = {
    types.float32: ir.FloatType(),
    types.float64: ir.DoubleType(),
    types.int32: ir.IntType(32),
    types.uint16: ir.IntType(16),
    types.uint8: ir.IntType(8),
    types.boolean: ir.IntType(1),
}
F32, F64, I32, U8, MASK = map(Vector, (types.float32, types.float64, types.int32, types.uint8, types.boolean))


def _llvm(lane, lanes=LANES):
    return ir.VectorType(_LLVM[lane], lanes)


def _constant(lane, value, lanes=LANES):
    return ir.Constant(_llvm(lane, lanes), [ir.Constant(_LLVM[lane], value)] * lanes)


def _is(t, *vectors):
    return isinstance(t, Vector) and (not vectors or t in vectors)


@intrinsic
def pointer(typingctx, array):
    """Address of a contiguous array's first element: helpers take it, as arrays would be reference-counted
    there.

    The array must outlive every use of it: take pointers of a kernel's arguments alone.
    """
    if not isinstance(array, types.Array):
        return None

    def codegen(context, builder, signature, args):
        return context.make_array(array)(context, builder, args[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def offset(typingctx, base, index):
    """`base` moved by `index` elements."""
    if not isinstance(base, types.CPointer):
        return None

    def codegen(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return base(base, types.intp), codegen


def _at(builder, base, index, vector):
    return builder.bitcast(builder.gep(base, [index]), vector.as_pointer())


def _first(builder, n):
    """<16 x i1>: lanes under `n`."""
    index = ir.Constant(ir.VectorType(ir.IntType(64), LANES), list(range(LANES)))
    return builder.icmp_signed("<", index, _splat(builder, n))


def _splat(builder, scalar):
    first = builder.insert_element(
        ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined), scalar, _index(0)
    )
    mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [_index(0)] * LANES)
    return builder.shuffle_vector(first, first, mask)


def _index(i):
    return ir.Constant(ir.IntType(32), i)


def _call(builder, name, result, *args):
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, [a.type for a in args]), name
    )
    return builder.call(function, args)


# ---- memory ------------------------------------------------------------------------------------------------
def _accepts(base, *lanes):
    return isinstance(base, types.CPointer) and base.dtype in lanes


@intrinsic
def load(typingctx, base, index):
    """16 float32, or uint16 bits of bfloat16 widened to float32, from `index` on."""
    if not _accepts(base, types.float32, types.uint16):
        return None
    lane, size = base.dtype, base.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        value = builder.load(_at(builder, *args, _llvm(lane)), align=size)
        return value if lane == types.float32 else _widen_bf16(builder, value)

    return F32(base, types.intp), codegen


@intrinsic
def load_first(typingctx, base, index, n):
    """`load` of the first n <= 16 elements, zero beyond; no other memory is touched."""
    if not _accepts(base, types.float32, types.uint16):
        return None
    lane, size = base.dtype, base.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        vector, kind = _llvm(lane), "f32" if lane == types.float32 else "i16"
        address = _at(builder, args[0], args[1], vector)
        zero = ir.Constant(vector, None)
        value = _call(
            builder,
            f"llvm.masked.load.v16{kind}.p0",
            vector,
            address,
            _index(size),
            _first(builder, args[2]),
            zero,
        )
        return value if lane == types.float32 else _widen_bf16(builder, value)

    return F32(base, types.intp, types.intp), codegen


@intrinsic
def store(typingctx, base, index, value):
    """Write 16 float32 lanes at `index`; to uint16 as bfloat16 bits, rounded half to even."""
    if not _accepts(base, types.float32, types.uint16) or not _is(value, F32):
        return None
    lane, size = base.dtype, base.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        vector = args[2] if lane == types.float32 else _round_bf16(builder, args[2])
        builder.store(vector, _at(builder, args[0], args[1], _llvm(lane)), align=size)
        return context.get_dummy_value()

    return types.void(base, types.intp, value), codegen


@intrinsic
def store_first(typingctx, base, index, n, value):
    """`store` of the first n <= 16 lanes alone."""
    if not _accepts(base, types.float32, types.uint16) or not _is(value, F32):
        return None
    lane, size = base.dtype, base.dtype.bitwidth // 8

    def codegen(context, builder, signature, args):
        kind = "f32" if lane == types.float32 else "i16"
        vector = args[3] if lane == types.float32 else _round_bf16(builder, args[3])
        address = _at(builder, args[0], args[1], _llvm(lane))
        _call(
            builder,
            f"llvm.masked.store.v16{kind}.p0",
            ir.VoidType(),
            vector,
            address,
            _index(size),
            _first(builder, args[2]),
        )
        return context.get_dummy_value()

    return types.void(base, types.intp, types.intp, value), codegen


def _widen_bf16(builder, half):
    """<16 x i16> of bfloat16 bits -> <16 x float>, exact."""
    wide = builder.shl(builder.zext(half, _llvm(types.int32)), _constant(types.int32, 16))
    return builder.bitcast(wide, _llvm(types.float32))


def _round_bf16(builder, vector):
    """<16 x float> -> <16 x i16>: bits + 0x7FFF + (bit 16), upper half; a NaN keeps its sign and becomes
    quiet.
    """
    i32 = types.int32
    bits = builder.bitcast(vector, _llvm(i32))
    odd = builder.and_(builder.lshr(bits, _constant(i32, 16)), _constant(i32, 1))
    rounded = builder.add(bits, builder.add(odd, _constant(i32, 0x7FFF)))
    quiet = builder.or_(builder.and_(bits, _constant(i32, -0x80000000)), _constant(i32, 0x7FC00000))
    bits = builder.select(builder.fcmp_unordered("uno", vector, vector), quiet, rounded)
    return builder.trunc(builder.lshr(bits, _constant(i32, 16)), _llvm(types.uint16))


@intrinsic
def store_nibbles(typingctx, base, index, codes):
    """Write 16 int32 codes 0..15 as 8 bytes, the even lane in the low nibble."""
    if not _accepts(base, types.uint8) or not _is(codes, I32):
        return None

    def codegen(context, builder, signature, args):
        pairs = builder.bitcast(builder.trunc(args[2], _llvm(types.uint8)), _llvm(types.uint16, 8))
        both = builder.or_(pairs, builder.lshr(pairs, _constant(types.uint16, 4, 8)))  # even | odd << 4
        value = builder.trunc(both, _llvm(types.uint8, 8))
        builder.store(value, _at(builder, args[0], args[1], value.type), align=1)
        return context.get_dummy_value()

    return types.void(base, types.intp, codes), codegen


@intrinsic
def load_nibbles(typingctx, base, index):
    """16 codes from 8 packed bytes, int32."""
    if not _accepts(base, types.uint8):
        return None

    def codegen(context, builder, signature, args):
        eight = builder.load(_at(builder, *args, _llvm(types.uint8, 8)), align=1)
        wide = builder.zext(eight, _llvm(types.uint16, 8))
        both = builder.or_(wide, builder.shl(wide, _constant(types.uint16, 4, 8)))
        both = builder.and_(both, _constant(types.uint16, 0x0F0F, 8))
        return builder.zext(builder.bitcast(both, _llvm(types.uint8)), _llvm(types.int32))

    return I32(base, types.intp), codegen


@intrinsic
def load_bytes(typingctx, base, index, n):
    """The first n <= 16 bytes as int32, zero beyond."""
    if not _accepts(base, types.uint8):
        return None

    def codegen(context, builder, signature, args):
        vector = _llvm(types.uint8)
        value = _call(
            builder,
            "llvm.masked.load.v16i8.p0",
            vector,
            _at(builder, args[0], args[1], vector),
            _index(1),
            _first(builder, args[2]),
            ir.Constant(vector, None),
        )
        return builder.zext(value, _llvm(types.int32))

    return I32(base, types.intp, types.intp), codegen


@intrinsic
def store_bytes(typingctx, base, index, n, value):
    """Write the low bytes of the first n <= 16 int32 lanes."""
    if not _accepts(base, types.uint8) or not _is(value, I32):
        return None

    def codegen(context, builder, signature, args):
        vector = builder.trunc(args[3], _llvm(types.uint8))
        _call(
            builder,
            "llvm.masked.store.v16i8.p0",
            ir.VoidType(),
            vector,
            _at(builder, args[0], args[1], vector.type),
            _index(1),
            _first(builder, args[2]),
        )
        return context.get_dummy_value()

    return types.void(base, types.intp, types.intp, value), codegen


# ---- lanes -------------------------------------------------------------------------------------------------
@intrinsic
def splat(typingctx, scalar):
    """All 16 lanes equal to a float32, float64 or int32 scalar."""
    if scalar not in (types.float32, types.float64, types.int32):
        return None

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0])

    return Vector(scalar)(scalar), codegen


@intrinsic
def lane(typingctx, vector, index):
    """The lane `index`, a scalar."""
    if not _is(vector):
        return None

    def codegen(context, builder, signature, args):
        return builder.extract_element(args[0], builder.trunc(args[1], ir.IntType(32)))

    return vector.lane(vector, types.intp), codegen


@intrinsic
def select(typingctx, mask, yes, no):
    """Lane by lane: `yes` where `mask`, else `no`."""
    if not _is(mask, MASK) or not _is(yes) or yes != no:
        return None

    def codegen(context, builder, signature, args):
        return builder.select(*args)

    return yes(mask, yes, no), codegen


def _cast(source, target, emit, doc):
    def typer(typingctx, value):
        if not _is(value, source):
            return None

        def codegen(context, builder, signature, args):
            return emit(builder, args[0])

        return target(value), codegen

    typer.__doc__ = doc
    return intrinsic(typer)


bits = _cast(F32, I32, lambda b, v: b.bitcast(v, _llvm(types.int32)), "The bits of float32 lanes, int32.")
from_bits = _cast(I32, F32, lambda b, v: b.bitcast(v, _llvm(types.float32)), "float32 lanes of given bits.")
to_f64 = _cast(F32, F64, lambda b, v: b.fpext(v, _llvm(types.float64)), "float64 lanes, exact.")
to_f32 = _cast(I32, F32, lambda b, v: b.sitofp(v, _llvm(types.float32)), "float32 lanes of int32 values.")


def _operator(function, floats, integers, result=None):
    """Let `function` take two vectors of one type, or a vector and a scalar of its lane type."""

    @intrinsic
    def both(typingctx, a, b):
        emit = floats if _is(a, F32, F64) else integers
        if not _is(a) or a != b or emit is None:
            return None

        def codegen(context, builder, signature, args):
            return emit(builder, *args)

        return (result or a)(a, b), codegen

    @overload(function)
    def implement(a, b):
        if _is(a) and a == b:
            return lambda a, b: both(a, b)
        if _is(a) and b == a.lane:
            return lambda a, b: both(a, splat(b))
        if _is(b) and a == b.lane:
            return lambda a, b: both(splat(a), b)
        return None


B = ir.IRBuilder
_operator(operator.add, B.fadd, B.add)
_operator(operator.sub, B.fsub, B.sub)
_operator(operator.mul, B.fmul, B.mul)
_operator(operator.truediv, B.fdiv, None)
_operator(operator.and_, None, B.and_)
_operator(operator.or_, None, B.or_)
_operator(operator.xor, None, B.xor)
_operator(operator.lshift, None, B.shl)
_operator(operator.rshift, None, B.lshr)
for _function, _sign in (("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="), ("eq", "==")):
    _operator(
        getattr(operator, _function),
        lambda b, x, y, sign=_sign: b.fcmp_ordered(sign, x, y),
        lambda b, x, y, sign=_sign: b.icmp_signed(sign, x, y),
        MASK,
    )


@intrinsic
def add_square(typingctx, total, value):
    """total + value * value on float64 lanes, rounded once where the processor has an instruction for it."""
    if not _is(total, F64) or total != value:
        return None

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.fmuladd.v16f64", args[0].type, args[1], args[1], args[0])

    return total(total, value), codegen


# ---- reductions --------------------------------------------------------------------------------------------
@intrinsic
def max_lane(typingctx, value):
    """Largest int32 lane."""
    if not _is(value, I32):
        return None

    def codegen(context, builder, signature, args):
        return _call(builder, "llvm.vector.reduce.smax.v16i32", ir.IntType(32), args[0])

    return types.int32(value), codegen


@intrinsic
def count(typingctx, mask):
    """Number of true lanes, int32."""
    if not _is(mask, MASK):
        return None

    def codegen(context, builder, signature, args):
        word = builder.bitcast(args[0], ir.IntType(LANES))
        return builder.zext(_call(builder, "llvm.ctpop.i16", ir.IntType(16), word), ir.IntType(32))

    return types.int32(mask), codegen


@intrinsic
def sum_everywhere(typingctx, value):
    """The sum of the lanes in every lane; lane i is added to lane i ^ 8, then ^ 4, ^ 2, ^ 1."""
    if not _is(value, F32):
        return None

    def codegen(context, builder, signature, args):
        total = args[0]
        for step in (8, 4, 2, 1):
            other = [_index(i ^ step) for i in range(LANES)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), LANES), other)
            total = builder.fadd(total, builder.shuffle_vector(total, total, mask))
        return total

    return value(value), codegen


@intrinsic
def sum_lanes(typingctx, value):
    """Sum of the lanes: lane i with i + 8, then + 4, + 2, + 1, in that order."""
    if not _is(value, F64):
        return None

    def codegen(context, builder, signature, args):
        total = args[0]
        for width in (8, 4, 2, 1):
            kind = ir.VectorType(ir.IntType(32), width)
            low, high = (ir.Constant(kind, [_index(first + i) for i in range(width)]) for first in (0, width))
            a, b = builder.shuffle_vector(total, total, low), builder.shuffle_vector(total, total, high)
            total = builder.fadd(a, b)
        return builder.extract_element(total, _index(0))

    return value.lane(value), codegen


@intrinsic
def sums_in_order(typingctx, first, second):
    """The sums of two vectors of float32, ((lane 0 + lane 1) + lane 2) + ..., side by side in one chain of
    additions.
    """
    if not _is(first, F32) or first != second:
        return None
    pair = types.UniTuple(types.float32, 2)

    def codegen(context, builder, signature, args):
        total = None
        for i in range(LANES):
            mask = ir.Constant(ir.VectorType(ir.IntType(32), 2), [_index(i), _index(LANES + i)])
            term = builder.shuffle_vector(*args, mask)
            total = term if total is None else builder.fadd(total, term)
        sums = [builder.extract_element(total, _index(i)) for i in range(2)]
        return context.make_tuple(builder, pair, sums)

    return pair(first, second), codegen
