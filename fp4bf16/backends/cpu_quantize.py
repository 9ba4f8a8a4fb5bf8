"""Quantise, decode and expand on the CPU: 2-D C-contiguous rows in, arrays of bytes out.

Rows are cut into one chunk a thread. Statistics are float64 sums of squares, exact but for their own rounding
(relative error under K * 2^-53), so that a certificate may rely on them.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from ..errors import DTypeError, NonFiniteError, ShapeError, nearest
from ..formats import Format, get_format
from ..interop import BFLOAT16
from ..python_ref import stochastic as stochastic_rule
from ..python_ref.quantize import MX_ROUND, SCALE_RULES, outer_exponent
from ..python_ref.random import seed_words
from . import cpu_quantize_kernels as kernels
from . import cpu_stochastic as stochastic
from .cpu_formats import E4M3, E8M0, FLT_MAX, FLT_TINY
from .cpu_quantize_kernels import CODES, NONFINITE, STATS, VALUES
from .threads import parallel_chunks

# Elements worth waking a thread for (50 to 100 us): a search costs about 3 ns an element, the rest under 1.
_LEAST_SEARCH, _LEAST = 1 << 16, 1 << 18
ROUNDINGS = ("nearest", "stochastic")
_SEARCHING = ("nvfp4_exact", "nvfp4")  # formats that try several scales a block, but for rule "te"
_HALF_E4M3 = E4M3 * np.float32(0.5)
_HALF_E8M0 = E8M0 * np.float32(0.5)
_EMPTY = {t: np.empty(0, t) for t in (np.uint8, np.uint16, np.float32, np.float64)}


class QuantizedRows(NamedTuple):
    """`packed` uint8 (R, Kp/2) or fp8 (R, K); `block_scale` uint8 (R, Kp/block) or None; `outer` float32 (R,)
    decode scales or None; `sums` float64 (R, 3), squares of x, of its quantised value, of the difference;
    `counts` int64 (5,): clipped elements, underflowed blocks, zero blocks, overflowed blocks, blocks with NaN
    or Inf.
    """

    packed: np.ndarray
    block_scale: np.ndarray | None
    outer: np.ndarray | None
    sums: np.ndarray
    counts: np.ndarray


# ---- operands ----------------------------------------------------------------------------------------------
def as_rows(x: np.ndarray) -> np.ndarray:
    """`x` (R, K) as the kernels read it, C-contiguous: float32, or bfloat16's bits as uint16; others become
    float32.
    """
    if x.ndim != 2:
        raise ShapeError(
            f"quantize_rows: x has shape {x.shape} but two axes are needed; reshape it to (rows, K)"
        )
    if x.dtype == np.float32 or x.dtype == np.uint16 or x.dtype == BFLOAT16:
        x = x if x.flags.c_contiguous and x.flags.aligned else x.copy()
        return x.view(np.uint16) if x.dtype == BFLOAT16 else x
    if x.dtype.kind != "f":
        raise DTypeError(
            f"quantize_rows: x has dtype {x.dtype}, but a float is needed; use x.astype('float32')"
        )
    with np.errstate(over="ignore"):  # float64 beyond float32's range becomes Inf and is dealt with as such
        return np.ascontiguousarray(x, np.float32)


def transposed(x: np.ndarray) -> np.ndarray:
    """C-contiguous (columns, rows) of C-contiguous `x` (rows, columns), float32, bfloat16 or uint16."""
    rows, columns = x.shape
    out = np.empty((columns, rows), x.dtype)
    source, target = (_flat(a.view(np.uint16) if a.dtype == BFLOAT16 else a) for a in (x, out))
    parallel_chunks(
        columns, lambda i, j: kernels.transpose(source, rows, columns, i, j, target), _least_rows(rows)
    )
    return out


def _flat(a: np.ndarray) -> np.ndarray:
    """One axis over the same memory. Numba compiles a kernel anew for read-only arguments: they get a second
    view, which lives no longer than the call, and no kernel writes to its inputs.
    """
    a = np.ascontiguousarray(a).reshape(-1)
    if a.flags.writeable:
        return a
    if a.size == 0:
        return np.empty(0, a.dtype)
    return np.frombuffer((ctypes.c_uint8 * a.nbytes).from_address(a.ctypes.data), a.dtype)


def _least_rows(k: int, least: int = _LEAST) -> int:
    return -(-least // max(1, k))


def _per_row(outer, rows: int) -> np.ndarray | None:
    """Outer scales as float32 (rows,)."""
    if outer is None:
        return None
    outer = np.asarray(outer, np.float32).reshape(-1)
    if outer.size == rows:
        return np.ascontiguousarray(outer)
    if outer.size != 1:
        raise ShapeError(
            f"outer_rows: {outer.size} outer scales for {rows} rows; pass one a row, or a single one"
        )
    return np.full(rows, outer[0], np.float32)


def amax_rows(x: np.ndarray) -> np.ndarray:
    """Largest finite magnitude of each row of `x` (R, K), float32 (R,)."""
    x = as_rows(x)
    amax, (rows, k) = np.empty(x.shape[0], np.float32), x.shape
    flat = _flat(x)
    parallel_chunks(rows, lambda i, j: kernels.amax_rows(flat, k, i, j, amax), _least_rows(k))
    return amax


# ---- quantise ----------------------------------------------------------------------------------------------
def check_rule(fmt: Format, scale_rule: str | None) -> str | None:
    """The rule, or the format's default; raises `ValueError` for one that it has not."""
    rules = SCALE_RULES[fmt.name]
    if scale_rule is None:
        return rules[0]
    if scale_rule not in rules:
        known = [r for r in rules if r]
        raise ValueError(
            f"scale_rule: {scale_rule!r} is not a rule of {fmt}{nearest(scale_rule, known)}"
            if known
            else f"scale_rule: {fmt} has no scale rules; leave scale_rule=None"
        )
    return scale_rule


def _bound6(rule: str) -> np.float32:
    return np.float32(6 * (448 if rule == "te" or rule.endswith("448") else 256))


def _scales(fmt: Format, rule, outer, amax, rows: int):
    """(amax, encode, decode, found by the kernel?), float32 (R,): from given decode scales, given amax, or
    neither.
    """
    one = np.float32(1)
    if outer is None and amax is None:
        decode = np.empty(rows, np.float32)
        if fmt.name != "nvfp4":
            return decode, decode, decode, True
        return np.empty_like(decode), np.empty_like(decode), decode, True
    with np.errstate(divide="ignore", over="ignore"):
        if outer is not None:
            decode = _per_row(outer, rows)
            encode = one / decode
            amax = _bound6(rule) * decode if fmt.name == "nvfp4" else decode
        elif fmt.name == "nvfp4_exact":
            decode = encode = np.ldexp(one, outer_exponent(amax)).astype(np.float32)
        elif fmt.name == "nvfp4":
            encode = np.minimum(_bound6(rule) / amax, FLT_MAX)
            encode = np.where((amax == 0) | (encode == 0), one, encode)
            decode = one / encode
        else:
            decode = np.where(amax == 0, one, np.maximum(amax / np.float32(448), FLT_TINY))
            encode = decode
    return tuple(_per_row(a, rows) for a in (amax, encode, decode)) + (False,)


def _launch(fmt, rule, search, draw, flat, k, scales, mode, packed, scale, values, sums):
    """fn(start, stop) that runs the format's kernel on a chunk, and the list that gathers the chunks' counts.
    """
    amax, encode, decode, find = scales
    counts: list[np.ndarray] = []
    packed, scale, values, sums = (a.reshape(-1) for a in (packed, scale, values, sums))
    if draw is not None:
        chunk = stochastic.chunk_of(fmt.name, rule, draw, flat, k, scales, mode, packed, scale, values, sums)
    elif fmt.name == "nvfp4_exact":
        full = search == "full"

        def chunk(i, j, total):
            kernels.exact_rows(flat, k, i, j, decode, find, full, mode, packed, scale, values, sums, total)
    elif fmt.name == "nvfp4":
        code, bound6 = (0 if rule == "te" else 2 if "mae" in rule else 1), _bound6(rule)

        def chunk(i, j, total):
            kernels.nvfp4_rows(
                flat,
                k,
                i,
                j,
                amax,
                encode,
                decode,
                find,
                code,
                bound6,
                mode,
                packed,
                scale,
                values,
                sums,
                total,
            )
    elif fmt.name == "mxfp4":
        rounding = np.int32(MX_ROUND[rule])

        def chunk(i, j, total):
            kernels.mxfp4_rows(flat, k, i, j, rounding, mode, packed, scale, values, sums, total)
    else:

        def chunk(i, j, total):
            kernels.fp8_rows(flat, k, i, j, decode, find, mode, packed, values, sums, total)

    def run(i, j):
        total = np.zeros(5, np.int64)
        counts.append(total)  # before the kernel: list.append holds the GIL
        chunk(i, j, total)

    return run, counts


def _draw(rounding: str, seed, after: int, rows: int) -> tuple[int, int, int, int] | None:
    """(seed, stream, call, after) of stochastic rounding; None for nearest."""
    if rounding == "nearest":
        return None
    if rounding != "stochastic":
        raise ValueError(
            f"rounding: {rounding!r} is unknown{nearest(rounding, ROUNDINGS)}; pass 'nearest' or 'stochastic'"
        )
    if rows and (after < 1 or rows % after):
        raise ShapeError(
            f"quantize_rows: after is {after}, but a divisor of the {rows} rows is needed; pass the product "
            f"of the axes of x that follow the blocked one"
        )
    return *seed_words(seed), after


def _run(x, fmt, outer, amax, scale_rule, search, nan, random, mode, packed=None, scale=None, values=None):
    """Quantise rows in the given mode -> (decode scales or None, sums, counts); `random` is (rounding, seed,
    after).
    """
    draw, rule = _draw(*random, x.shape[0]), check_rule(fmt, scale_rule)
    if draw is not None:
        rule = stochastic_rule.scale_rule_of(fmt.name, scale_rule)
    if search not in ("full", "fast"):
        raise ValueError(f"search: {search!r} is not a search{nearest(search, ('full', 'fast'))}")
    if nan not in ("raise", "propagate"):
        raise ValueError(f"nan: {nan!r} is not a policy{nearest(nan, ('raise', 'propagate'))}")
    if fmt.name == "mxfp4" and not (outer is None and amax is None):
        raise ValueError("outer: mxfp4 has no outer scale; pass outer=None")
    rows, k = x.shape
    scales = (None,) * 4 if fmt.name == "mxfp4" else _scales(fmt, rule, outer, amax, rows)
    sums = np.empty((rows, 3), np.float64) if mode & STATS else _EMPTY[np.float64]
    packed, scale = (_EMPTY[np.uint8] if a is None else a for a in (packed, scale))
    values = _EMPTY[x.dtype.type] if values is None else values
    run, counts = _launch(fmt, rule, search, draw, _flat(x), k, scales, mode, packed, scale, values, sums)
    slow = draw is not None or (fmt.name in _SEARCHING and rule != "te")
    parallel_chunks(rows, run, _least_rows(k, _LEAST_SEARCH if slow else _LEAST))
    total = counts[0] if len(counts) == 1 else sum(counts, np.zeros(5, np.int64))
    if total[NONFINITE] and nan == "raise":
        raise NonFiniteError(_where(x))
    return scales[2], sums, total


def _where(x: np.ndarray) -> str:
    values = x.view(BFLOAT16) if x.dtype == np.uint16 else x
    bad = ~np.isfinite(values)
    row, column = np.unravel_index(int(bad.argmax()), bad.shape)
    return (
        f"quantize: x holds {int(bad.sum())} NaN or Inf (or values beyond float32), the first, "
        f"{float(values[row, column])}, in row {row} at k = {column} of the rows along its blocks; "
        f"clean x or pass nan='propagate'"
    )


def quantize_rows(
    x, fmt="nvfp4_exact", outer_rows=None, scale_rule=None, search="fast", nan="raise", *, amax=None,
    out=None, rounding="nearest", seed=0, after=1,
) -> QuantizedRows:  # fmt: skip
    """Quantise the rows of `x` (R, K), bit-equal to `python_ref.quantize.quantize`.

    Args:
        x: float32, bfloat16 (or its bits as uint16), float16 or float64.
        outer_rows: decode scales, one a row or a single one; powers of two for "nvfp4_exact". None: from
            `amax`.
        amax: largest magnitudes, float32 (R,), of the group that shares each row's outer scale; None: of the
            row.
        out: (packed, block_scale) to write to, C-contiguous uint8.
        rounding: "nearest", or "stochastic" by the words of `seed`, an int or (seed, stream, call).
        after: product of the logical axes that follow the blocked one: element (row, k) takes the word of
            index (row // after) * K * after + k * after + row % after.
    """
    fmt, x = get_format(fmt), as_rows(x)
    rows, k = x.shape
    if out is not None:
        packed, scale = out
    else:
        blocks = -(-k // fmt.block) if fmt.block else 0
        packed = np.empty((rows, blocks * fmt.block // 2 if fmt.block else k), np.uint8)
        scale = np.empty((rows, blocks), np.uint8) if fmt.block else None
    random, mode = (rounding, seed, after), CODES | STATS
    outer, sums, counts = _run(
        x, fmt, outer_rows, amax, scale_rule, search, nan, random, mode, packed=packed, scale=scale
    )
    return QuantizedRows(packed, scale, outer, sums, counts)


def fake_quantize_rows(
    x, fmt="nvfp4_exact", outer_rows=None, search="fast", out=None, *, scale_rule=None, nan="raise",
    amax=None, rounding="nearest", seed=0, after=1,
) -> np.ndarray:  # fmt: skip
    """``dequantize_rows(quantize_rows(x))`` in one pass, bit for bit, without codes: float32 or bfloat16 (R,
    K).

    `out` (R, K) is float32, bfloat16 or its bits as uint16; without it, bfloat16 in gives bfloat16, else
    float32.
    """
    fmt, x = get_format(fmt), as_rows(x)
    if out is None:
        out = np.empty(x.shape, BFLOAT16 if x.dtype == np.uint16 else np.float32)
    target = _writable(out, x.shape, "fake_quantize_rows")
    random = rounding, seed, after
    _run(x, fmt, outer_rows, amax, scale_rule, search, nan, random, VALUES, values=target)
    return out


def fake_quantize_sums(x, fmt="nvfp4_exact", search="fast", amax=None) -> tuple:
    """``fake_quantize_rows(x, fmt, None, search, amax=amax)``, bit for bit, with `QuantizedRows`' `sums` and
    `counts` of the same pass: (values float32 (R, K), sums, counts). NaN or Inf: `NonFiniteError`.
    """
    fmt, x = get_format(fmt), as_rows(x)
    out = np.empty(x.shape, np.float32)
    target, random = _writable(out, x.shape, "fake_quantize_sums"), ("nearest", 0, 1)
    _, sums, counts = _run(x, fmt, None, amax, None, search, "raise", random, VALUES | STATS, values=target)
    return out, sums, counts


def _writable(out: np.ndarray, shape: tuple[int, int], where: str) -> np.ndarray:
    view = out.view(np.uint16) if out.dtype == BFLOAT16 else out
    if view.dtype not in (np.float32, np.uint16) or view.shape != tuple(shape) or not view.flags.c_contiguous:
        raise ShapeError(
            f"{where}: out is {out.dtype} of shape {out.shape}, but C-contiguous float32 or bfloat16 "
            f"of shape {tuple(shape)} is needed"
        )
    return view


# ---- back --------------------------------------------------------------------------------------------------
def dequantize_rows(packed, block_scale, outer_rows, fmt, k: int, out=None) -> np.ndarray:
    """Values (R, K) of packed rows, float32 or as `out` has it (float32, bfloat16): (code * scale) * outer.

    `packed` (R, Kp/2) or fp8 (R, K); `block_scale` (R, Kp/block) or None; `outer_rows` one a row, a single
    one, None.
    """
    fmt, rows = get_format(fmt), packed.shape[0]
    if out is None:
        out = np.empty((rows, k), np.float32)
    target = _writable(out, (rows, k), "dequantize_rows").reshape(-1)
    outer = np.ones(rows, np.float32) if outer_rows is None else _per_row(outer_rows, rows)
    _check_bytes(packed, block_scale, fmt, k)
    codes = _flat(packed).view(np.uint8)
    if fmt.block == 0:
        parallel_chunks(
            rows, lambda i, j: kernels.dequantize_fp8_rows(codes, outer, k, i, j, target), _least_rows(k)
        )
        return out
    scale, half = _flat(block_scale).view(np.uint8), _half(fmt)

    def chunk(i, j):
        kernels.dequantize_rows(codes, scale, outer, half, fmt.block, k, i, j, target)

    parallel_chunks(rows, chunk, _least_rows(k))
    return out


def _check_bytes(packed: np.ndarray, block_scale: np.ndarray | None, fmt: Format, k: int) -> None:
    """The kernels read as many bytes as K asks for, whatever there is: a container whose attributes were
    changed by hand must not come so far.
    """
    block = fmt.block or 1
    blocks = -(-k // block)
    want = blocks * block // (2 if fmt.block else 1)
    scales = blocks if block_scale is None else block_scale.shape[1]
    if packed.shape[1] != want or scales != blocks or (block_scale is None) != (fmt.block == 0):
        raise ShapeError(
            f"dequantize: {packed.shape[1]} bytes and {scales} block scales a row, but {k} numbers in {fmt} "
            f"take {want} and {blocks}; make a new QuantizedArray instead of changing one"
        )


def _half(fmt: Format) -> np.ndarray:
    return _HALF_E8M0 if fmt.name == "mxfp4" else _HALF_E4M3


def expand_rows(packed, block_scale, fmt, out=None) -> np.ndarray:
    """E4M3 bytes (R, Kp) of packed rows with the block scale folded in; `ValueError` unless every product is
    exact.
    """
    fmt = get_format(fmt)
    if fmt.block == 0:
        return packed
    rows = packed.shape[0]
    if out is None:
        out = np.empty((rows, 2 * packed.shape[1]), np.uint8)
    if fmt.name == "mxfp4":
        raise ValueError(
            "expand: block scales of mxfp4 span 2^-127 to 2^127, which E4M3 does not hold; use dequantize"
        )
    codes, scale, target = _flat(packed), _flat(block_scale), out.reshape(-1)
    inexact: list[int] = []

    def chunk(i, j):
        inexact.append(kernels.expand_blocks(codes, scale, _HALF_E4M3, i, j, target))

    parallel_chunks(scale.size, chunk, _LEAST // 16)
    if sum(inexact):
        raise ValueError(
            f"expand: {sum(inexact)} of {target.size} products of a code and its block scale need more than "
            f"E4M3's four bits, as those of format {fmt} may; use dequantize, or quantise as 'nvfp4_exact'"
        )
    return out


def round_bf16(x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """`x` (float32, C-contiguous, any shape) rounded to bfloat16, half to even; NaN stays NaN.

    `out` of x's shape, may be x: float32 gets the rounded values, bfloat16 (default) or uint16 the bits.
    """
    if out is None:
        out = np.empty(x.shape, BFLOAT16)
    source = _flat(np.asarray(x, np.float32))
    target = _writable(out.reshape(1, -1), (1, source.size), "round_bf16").reshape(-1)
    parallel_chunks(source.size, lambda i, j: kernels.round_bf16(source, i, j, target), _LEAST)
    return out
