"""fp4bf16_dequantize, fp4bf16_expand and fp4bf16_convert on a GPU: bit-equal to python_ref and NumPy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from fp4bf16.python_ref.formats import E2M1, E4M3, E8M0, encode_e4m3, pack

pytestmark = pytest.mark.gpu
DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
FORMATS = {"nvfp4_exact": 0, "nvfp4": 1, "mxfp4": 2, "fp8": 3}
BLOCK = {"nvfp4_exact": 16, "nvfp4": 16, "mxfp4": 32, "fp8": 1}
SHAPES = [(1, 1), (3, 15), (5, 16), (7, 333), (64, 256), (40, 1152), (9, 5000), (600, 40)]


@pytest.fixture(autouse=True)
def _free(gpu):
    yield
    gpu.free()


def same_bits(got, want, note=""):
    """Equal bit for bit, all NaN being one."""
    assert got.dtype == want.dtype and got.shape == want.shape
    got, want = got.copy(), want.copy()
    if got.dtype.kind != "u":
        nan = np.isnan(want.astype(np.float32))
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan, err_msg=note)
        got[nan] = want[nan] = 0
    word = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(word), want.view(word), err_msg=note)


def quantized(rng, fmt, rows, k, special=True):
    """Random packed codes, scale bytes and their values code * block_scale, (rows, k) float32."""
    block = BLOCK[fmt]
    kp = -(-k // block) * block
    if fmt == "fp8":
        packed = rng.integers(0, 256, (rows, k), np.uint8)
        return packed, np.zeros((rows, 0), np.uint8), E4M3[packed]
    code = rng.integers(0, 16, (rows, kp), np.uint8)
    if fmt == "mxfp4":
        scale = rng.integers(0 if special else 90, 256 if special else 160, (rows, kp // 32), np.uint8)
    else:
        scale = rng.integers(0, 128 if special else 0x7F, (rows, kp // 16), np.uint8)
    table = E8M0 if fmt == "mxfp4" else E4M3
    with np.errstate(over="ignore"):
        value = E2M1[code] * np.repeat(table[scale], block, axis=-1)
    return pack(code), scale, value[:, :k]


def cast(x, dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        return x.astype(dtype)


def groups_of(rows, mid, inner):
    row = np.arange(rows)
    return row // (mid * inner) * inner + row % inner


def dequantize(library, gpu, fmt, rows, k, packed, scale, outer, mid, inner, dtype, after, x_stride, k_stride,
               size):  # fmt: skip
    """x, `size` elements of poison where nothing was written."""
    x = gpu.empty(size * DTYPES[dtype].itemsize)
    library.call(
        "dequantize", FORMATS[fmt], gpu.put(packed), gpu.put(scale) if scale.size else 0,
        0 if outer is None else gpu.put(outer), rows, k, mid, inner, x, dtype, after, x_stride, k_stride, 0,
    )  # fmt: skip
    return gpu.get(x, (size,), DTYPES[dtype])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [0, 1, 2])
def test_dequantize(library, gpu, rng, fmt, dtype):
    poison = np.full(4, 0xA5, np.uint8).view(DTYPES[dtype])[0]
    for i, (rows, k) in enumerate(SHAPES):
        packed, scale, value = quantized(rng, fmt, rows, k)
        mid, inner = [(1, rows), (rows, 1), (3, 1), (2, 3), (1, 1)][i % 5]
        group = groups_of(rows, mid, inner)
        outer = np.ldexp(rng.uniform(1, 2, group.max() + 1), rng.integers(-40, 40, group.max() + 1))
        outer = None if i == 1 else outer.astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            want = cast(value if outer is None else value * outer[group][:, None], DTYPES[dtype])
        for stride in (k, -(-k // 8) * 8 + 8, k + 3):
            got = dequantize(library, gpu, fmt, rows, k, packed, scale, outer, mid, inner, dtype, 1, stride,
                             1, rows * stride).reshape(rows, stride)  # fmt: skip
            same_bits(got[:, :k], want, f"{fmt} {rows}x{k} stride {stride}")
            same_bits(got[:, k:], np.full((rows, stride - k), poison), "wrote between rows")


# Rows without gaps, (rows, k, rows of an outer scale, 0 for all): one row, less than a thread block, pictures
# of which the last is cut, and enough for several vectors a thread, the last of them missing.
FLAT = [(1, 32, 0), (3, 64, 1), (37, 96, 0), (50, 128, 7), (1031, 160, 1), (4096, 128, 1024), (40037, 128, 0),
        (32801, 256, 1024), (9001, 512, 1), (2049, 2304, 1)]  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [0, 1, 2])
def test_dequantize_rows_without_gaps(library, gpu, rng, fmt, dtype):
    for i, (rows, k, mid) in enumerate(FLAT):
        packed, scale, value = quantized(rng, fmt, rows, k)
        mid = mid or rows
        groups = -(-rows // mid)
        outer = np.ldexp(rng.uniform(1, 2, groups), rng.integers(-40, 40, groups)).astype(np.float32)
        if i % 3 == 1:
            outer[rng.integers(groups)] = np.nan
        with np.errstate(over="ignore", invalid="ignore"):
            want = cast(value * outer.repeat(mid)[:rows, None], DTYPES[dtype])
        for m, n in {(mid, 1), (1, rows)} if mid == 1 else {(mid, 1)}:
            got = dequantize(library, gpu, fmt, rows, k, packed, scale, outer, m, n, dtype, 1, k, 1, rows * k)
            same_bits(got.reshape(rows, k), want, f"{fmt} {rows}x{k}, {m} rows a scale, {n} together")
        gpu.free()


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantize_without_gaps_has_the_bits_of_other_layouts(library, gpu, rng, fmt):
    """Every scale byte, both NaN and the sign included, against the kernel of rows further apart."""
    rows, k = 256, 64
    packed, scale, _ = quantized(rng, fmt, rows, k)
    if scale.size:
        scale[:] = np.arange(rows, dtype=np.uint8)[:, None]
    else:
        packed[:] = np.arange(rows, dtype=np.uint8)[:, None]
    outer = np.array([1.37, np.nan, np.inf, -(2.0**-140)], np.float32)
    for dtype in range(3):
        one, two = (
            dequantize(library, gpu, fmt, rows, k, packed, scale, outer, 64, 1, dtype, 1, stride, 1,
                       rows * stride).reshape(rows, stride)[:, :k]
            for stride in (k, k + 8)
        )  # fmt: skip
        same_bits(one, two)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [0, 1, 2])
def test_dequantize_blocks_along_another_axis(library, gpu, rng, fmt, dtype):
    for lead, after, k in ((1, 1, 40), (1, 100, 77), (3, 33, 64), (2, 7, 300), (1, 256, 128)):
        rows = lead * after
        packed, scale, value = quantized(rng, fmt, rows, k, special=False)
        outer = np.exp2(rng.integers(-9, 9, (lead, after))).astype(np.float32)  # one a column of x
        want = cast(value * outer.reshape(rows, 1), DTYPES[dtype]).reshape(lead, after, k).swapaxes(1, 2)
        got = dequantize(library, gpu, fmt, rows, k, packed, scale, outer, 1, rows, dtype, after, k * after,
                         after, rows * k)  # fmt: skip
        same_bits(got.reshape(lead, k, after), want, f"{fmt} {lead} {after} {k}")
        # one scale a row of the logical array's first axis, inner = after
        first = outer[:, :1].repeat(after, 1).reshape(rows, 1)
        want = cast(value * first, DTYPES[dtype]).reshape(lead, after, k).swapaxes(1, 2)
        scales = np.ascontiguousarray(outer[:, 0])
        got = dequantize(library, gpu, fmt, rows, k, packed, scale, scales, after, 1, dtype, after, k * after,
                         after, rows * k)  # fmt: skip
        same_bits(got.reshape(lead, k, after), want)


def test_every_code_times_every_scale(library, gpu):
    """All 16 codes under all 256 scale bytes, dequantised and expanded."""
    code = np.tile(np.arange(16, dtype=np.uint8), (256, 1))
    scale = np.arange(256, dtype=np.uint8)[:, None]
    value = E2M1[code] * E4M3[scale]
    for dtype, kind in enumerate(DTYPES):
        got = dequantize(library, gpu, "nvfp4", 256, 16, pack(code), scale, None, 1, 1, dtype, 1, 16, 1, 4096)
        same_bits(got.reshape(256, 16), cast(value, kind))
    byte = encode_e4m3(value)
    inexact = int((~((E4M3[byte] == value) | np.isnan(value))).sum())
    counter, out = gpu.put(np.zeros(1, np.int32)), gpu.empty(4096)
    library.call("expand", 1, gpu.put(pack(code)), gpu.put(scale), 256, 16, out, 16, counter, 0)
    np.testing.assert_array_equal(gpu.get(out, (256, 16), np.uint8), byte)
    assert int(gpu.get(counter, (1,), np.int32)[0]) == inexact > 0


def test_expand(library, gpu, rng):
    for rows, k in SHAPES:
        packed, scale, _ = quantized(rng, "nvfp4", rows, k, special=False)
        kp = packed.shape[1] * 2
        code = np.stack([packed & 15, packed >> 4], -1).reshape(rows, kp)
        value = E2M1[code] * np.repeat(E4M3[scale], 16, axis=-1)
        want = encode_e4m3(value)
        for stride in (kp, kp + 16, kp + 5):
            out, counter = gpu.empty(rows * stride), gpu.put(np.zeros(1, np.int32))
            library.call("expand", 1, gpu.put(packed), gpu.put(scale), rows, kp, out, stride, counter, 0)
            got = gpu.get(out, (rows, stride), np.uint8)
            np.testing.assert_array_equal(got[:, :kp], want)
            assert (got[:, kp:] == 0).all()
            assert int(gpu.get(counter, (1,), np.int32)[0]) == int((E4M3[want] != value).sum())
            library.call("expand", 1, gpu.put(packed), gpu.put(scale), rows, kp, out, stride, 0, 0)
            np.testing.assert_array_equal(gpu.get(out, (rows, stride), np.uint8), got)


# ---- convert
def _source(rng, shape, dtype):
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 16, shape))
    x[rng.random(shape) < 0.02] = np.inf
    x[rng.random(shape) < 0.02] = np.nan
    x[rng.random(shape) < 0.02] = -0.0
    return cast(x.astype(np.float32), DTYPES[dtype])


def _views(x):
    """Views (batch, rows, k) of `x` (batch, rows, k) in every kind of layout."""
    yield "as it is", x
    yield "transposed", x.swapaxes(1, 2)
    yield "rows first", x.transpose(1, 0, 2)
    yield "rows last", x.transpose(2, 1, 0)
    yield "backwards", x[:, ::-1, ::-1]
    yield "every second", x[:, ::2, ::2]
    yield "broadcast", np.broadcast_to(x[:, :1, :], x.shape)
    yield "one column again", np.broadcast_to(x[:, :, :1], x.shape)
    yield "inner columns", x[:, :, 1:]


@pytest.mark.parametrize("dtype", [0, 1, 2])
@pytest.mark.parametrize("out_dtype", [0, 1, 2])
def test_convert(library, gpu, rng, dtype, out_dtype):
    for shape in ((1, 1, 1), (1, 130, 72), (3, 67, 130), (2, 16, 2560), (1, 3, 777)):
        x = _source(rng, shape, dtype)
        address = gpu.put(x)
        for name, view in _views(x):
            batch, rows, k = view.shape
            strides = [s // x.itemsize for s in view.strides]
            start = address + view.__array_interface__["data"][0] - x.ctypes.data
            for out_stride in {k, -(-k // 16) * 16, k + 8}:
                want = np.zeros((batch, rows, out_stride), DTYPES[out_dtype])
                want[..., :k] = cast(view.astype(np.float32), DTYPES[out_dtype])
                out = gpu.empty(want.nbytes)
                library.call("convert", start, dtype, batch, rows, k, *strides, out, out_dtype, out_stride, 0)
                same_bits(gpu.get(out, want.shape, want.dtype), want, f"{name} {view.shape} to {out_stride}")


def test_convert_of_nothing(library, gpu):
    out = gpu.empty(64)
    library.call("convert", 0, 0, 1, 2, 0, 0, 0, 1, out, 1, 16, 0)  # k = 0: padding alone
    assert (gpu.get(out, (2, 16), np.uint16) == 0).all()
    for batch, rows, k in ((0, 2, 3), (2, 0, 3), (2, 2, 0)):
        library.call("convert", 0, 0, batch, rows, k, 0, 0, 1, 0, 1, k, 0)
