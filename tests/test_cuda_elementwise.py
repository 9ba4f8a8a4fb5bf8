"""Upsampling, sums, SiLU and embeddings on a GPU, and the same tests of their emulation without one."""

from __future__ import annotations

import numpy as np
import pytest
from host_cuda import HostCuda, host_cuda, put  # noqa: F401  (host_cuda is a fixture)
from host_elementwise import Held, HostMemory
from test_cuda_convert import same_bits

from fp4bf16 import DTypeError, ShapeError, device
from fp4bf16.backends import cuda_elementwise as wrapped
from fp4bf16.backends.cuda_conv import Geometry
from fp4bf16.interop import BFLOAT16
from fp4bf16.nn import fused
from fp4bf16.nn.layers import timestep_embedding

F32, I64 = np.dtype(np.float32), np.dtype(np.int64)
ROUNDING = 2.0**-8  # relative, to bfloat16


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """(library, memory): the kernels on a GPU, or their emulation."""
    if request.param == "emulated":
        yield HostCuda(), HostMemory()
        return
    memory = request.getfixturevalue("gpu")
    yield request.getfixturevalue("library"), memory
    memory.free()


def bf16(rng, shape):
    """Numbers of very different sizes, with infinities and NaN."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-12, 12, shape))
    for special in (np.inf, -np.inf, np.nan, -0.0):
        x[rng.random(shape) < 0.01] = special
    return x.astype(np.float32).astype(BFLOAT16)


# ---- pictures
PICTURES = [  # shape, pad, front
    ((1, 1, 1, 1), (), 0),
    ((2, 3, 5, 7), (1, 0, 3), 1),
    ((1, 2, 1, 24), (0, 1, 0), 0),
    ((3, 4, 4, 64), (2, 1, 64), 16),
    ((2, 2, 2, 32), (), 3),
    ((2, 2, 3, 32), (0, 0, 5), 0),
    ((5, 16, 16, 256), (), 0),
    ((0, 4, 4, 8), (), 0),
    ((2, 4, 0, 8), (), 0),
]


@pytest.mark.parametrize("shape, pad, front", PICTURES, ids=str)
@pytest.mark.parametrize("dtype", ["u1", "u2"])
def test_upsample(place, rng, shape, pad, front, dtype):
    library, memory = place
    n, h, w, c = shape
    source = rng.integers(0, 1 << 8 * int(dtype[1]), shape).astype(dtype)
    for x_pad, y_pad in ((pad, ()), ((), pad), (pad, pad)):
        x = Held(memory, source, x_pad, front if x_pad else 0)
        y = Held(memory, pad=y_pad, front=front, shape=(n, 2 * h, 2 * w, c), dtype=dtype)
        library.call("upsample", x.address, int(dtype[1]), n, h, w, c, x.strides, y.address, y.strides, 0,
                     0)  # fmt: skip
        np.testing.assert_array_equal(y.get(), fused.upsample_nearest(source))


@pytest.mark.parametrize("shape, pad, front", PICTURES, ids=str)
@pytest.mark.parametrize("with_add", [False, True])
def test_upsample_backward(place, rng, shape, pad, front, with_add):
    library, memory = place
    n, h, w, c = shape
    g, add = bf16(rng, (n, 2 * h, 2 * w, c)), bf16(rng, shape)
    with np.errstate(invalid="ignore"):
        want = fused.upsample_nearest_vjp(g.astype(np.float32))
        want = (want + add.astype(np.float32) if with_add else want).astype(BFLOAT16)
    for pads in ((pad, (), ()), ((), pad, ()), ((), (), pad), (pad,) * 3):
        x, other = Held(memory, g, pads[0], front), Held(memory, add, pads[1], front)
        dx = Held(memory, pad=pads[2], front=front, shape=shape, dtype=BFLOAT16)
        more = (other.address, other.strides) if with_add else (0, [0, 0, 0])
        library.call("upsample_backward", x.address, n, h, w, c, x.strides, *more, dx.address, dx.strides, 0)
        same_bits(dx.get(), want)


@pytest.mark.gpu
def test_offsets_of_more_than_32_bits(library, gpu, rng):
    far = (1 << 32) + 64
    y, out = gpu.empty(far + 64), gpu.empty(far + 32)
    x = rng.integers(0, 256, (2, 1, 1, 16)).astype("u1")
    library.call("upsample", gpu.put(x), 1, 2, 1, 1, 16, [16, 16, 16], y, [far, 32, 16], 0, 0)
    a = bf16(rng, (2, 16))
    zero = np.zeros_like(a)
    library.call("add", gpu.put(a), 16, gpu.put(zero), 16, 2, 16, out, far // 2, 0)
    for i in range(2):
        found = gpu.get(y + i * far, (2, 2, 16), "u1")
        np.testing.assert_array_equal(found, np.broadcast_to(x[i], found.shape))
        same_bits(gpu.get(out + i * far, (16,), BFLOAT16), (a + zero)[i])
    gpu.free()


# ---- convolutions of few channels
CONVOLUTIONS = [  # shape; kh, kw, stride, top, left; oh, ow
    ((1, 1, 1, 1), (1, 1, 1, 0, 0), (1, 1)),
    ((2, 5, 7, 3), (3, 3, 1, 1, 1), (5, 7)),
    ((3, 9, 4, 5), (3, 3, 2, 0, 1), (4, 3)),
    ((2, 3, 2, 2), (2, 4, 1, 3, 2), (6, 3)),
    ((1, 40, 70, 4), (5, 3, 1, 2, 1), (40, 70)),
    ((7, 32, 32, 3), (3, 3, 1, 1, 1), (32, 32)),
    ((2, 16, 16, 12), (3, 3, 1, 1, 1), (16, 16)),
    ((0, 4, 4, 3), (3, 3, 1, 1, 1), (4, 4)),
    ((2, 4, 0, 3), (3, 3, 1, 1, 2), (4, 2)),
    ((2, 4, 3, 0), (3, 3, 1, 1, 1), (4, 3)),
]
FRAMES = [((), 0), ((1, 0, 5), 3), ((2, 1, 8), 8)]


@pytest.mark.parametrize("shape, kernel, size", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("dtype", [0, 1])
def test_patches(place, rng, shape, kernel, size, dtype):
    library, memory = place
    (n, *_, c), (kh, kw, stride, top, left), (oh, ow) = shape, kernel, size
    x = bf16(rng, shape) if dtype else bf16(rng, shape).astype(F32) * F32.type(1.001)
    framed = np.pad(x, ((0, 0), (top, oh * stride + kh), (left, ow * stride + kw), (0, 0)))
    each = [framed[:, r : r + oh * stride : stride, s : s + ow * stride : stride]
            for r in range(kh) for s in range(kw)]  # fmt: skip
    for extra, (pad, front) in zip((0, 8, 16), FRAMES, strict=True):
        values = kh * kw * c
        width = -(-values // 8) * 8 + extra
        want = np.zeros((n, oh, ow, width), BFLOAT16)
        want[..., :values] = np.concatenate(each, axis=3).astype(BFLOAT16)
        held, out = Held(memory, x, pad, front), memory.empty(2 * want.size)
        library.call("patches", held.address, dtype, *shape, held.strides, oh, ow, *kernel, out, width, 0, 0)
        same_bits(memory.get(out, want.shape, BFLOAT16), want)


@pytest.mark.parametrize("shape, kernel, size", [c for c in CONVOLUTIONS if c[1][2] == 1], ids=str)
@pytest.mark.parametrize("dtype", [0, 1])
def test_taps_of_a_gradient(place, rng, shape, kernel, size, dtype):
    library, memory = place
    (n, h, w, o), (kh, kw, _, top, left), (oh, ow) = shape, kernel, size
    g = bf16(rng, (n, oh, ow, o)) if dtype else bf16(rng, (n, oh, ow, o)).astype(F32) * F32.type(1.001)
    framed = np.zeros((n, max(top + h, oh + kh), max(left + w, ow + kw), o, kh, kw), BFLOAT16)
    for r, s in np.ndindex(kh, kw):
        framed[:, r : r + oh, s : s + ow, :, r, s] = g.astype(BFLOAT16)
    values = o * kh * kw
    found = framed[:, top : top + h, left : left + w].reshape(n, h, w, values)
    for extra, (pad, front) in zip((0, 8, 16), FRAMES, strict=True):
        width = -(-values // 8) * 8 + extra
        want = np.zeros((n, h, w, width), BFLOAT16)
        want[..., :values] = found
        held, y = Held(memory, g, pad, front), memory.empty(2 * want.size)
        library.call("spread_taps", held.address, dtype, n, oh, ow, o, held.strides, h, w, kh, kw, top, left,
                     y, width, 0)  # fmt: skip
        same_bits(memory.get(y, want.shape, BFLOAT16), want)


# ---- rows
ROWS = [(1, 1), (3, 7), (5, 8), (33, 40), (257, 128), (64, 1152), (0, 8), (4, 0)]


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("pads, front", [((0, 0, 0), 0), ((8, 0, 24), 8), ((1, 8, 0), 0), ((0, 0, 8), 1)])
def test_add(place, rng, shape, pads, front):
    library, memory = place
    a, b = bf16(rng, shape), bf16(rng, shape)
    with np.errstate(invalid="ignore"):
        want = (a.astype(np.float32) + b.astype(np.float32)).astype(BFLOAT16)
    x, y = Held(memory, a, pads[:1], front), Held(memory, b, pads[1:2])
    out = Held(memory, pad=pads[2:], front=front, shape=shape, dtype=BFLOAT16)

    def run(to):
        library.call("add", x.address, *x.strides, y.address, *y.strides, *shape, to.address, *to.strides, 0)
        return to.get()

    same_bits(run(out), want)
    same_bits(run(x), want)  # in place


TALL = [(1, 1), (2, 8), (300, 3), (1000, 320), (5000, 128), (77, 1160), (260, 5), (0, 4), (3, 0)]


@pytest.mark.parametrize("rows, c", TALL)
def test_column_sums(place, rng, rows, c):
    library, memory = place
    x, start = rng.standard_normal((rows, c)).astype(BFLOAT16), rng.standard_normal(c).astype(np.float32)
    exact = start + x.astype(np.float64).sum(axis=0)
    # a thread adds rows / 256 / 8 of them at most, then 64 threads', each rounded to FP32
    bound = (rows / 2048 + 66) * 2.0**-24 * (abs(start) + abs(x.astype(np.float64)).sum(axis=0)) + 1e-45
    first = None
    for pad, front in ((0, 0), (0, 0), (8, 0), (3, 1)):
        held, sums = Held(memory, x, (pad,), front), memory.put(start)
        workspace = memory.empty(4 * c * min(256, rows))
        library.call("column_sums", held.address, rows, c, *held.strides, sums, workspace, 0)
        found = memory.get(sums, (c,), F32)
        memory.get(workspace, (4 * c * min(256, rows),), np.uint8)
        assert (abs(found - exact) <= bound).all()
        first = found if first is None else first
        same_bits(found, first)  # whatever the layout


# ---- SiLU
@pytest.mark.parametrize("dtype", [0, 1])
@pytest.mark.parametrize("count, front", [(1, 0), (7, 1), (1000, 0), (4096, 2), (33, 0), (0, 0)])
def test_silu(place, rng, dtype, count, front):
    library, memory = place
    kind = (F32, BFLOAT16)[dtype]
    x = (rng.standard_normal(count) * rng.choice([1, 10, 80], count)).clip(-110, 110).astype(kind)
    g = rng.standard_normal(count).astype(kind)
    x64, g64 = x.astype(np.float64), g.astype(np.float64)
    s, rest = fused.sigmoid(x64), fused.sigmoid(-x64)
    # To first order, in 2^-23 (an ulp at most), with t = exp(-|x|): t within 2 (expf) or 2 + 1.173 |x|
    # (__expf); 1 + t half, its inverse 1, each product half. s = inverse or t * inverse has t's error at most
    # once, and so has s (1 + x (1 - s)) relative to s (1 + |x| (1 - s)), for t pushes s and 1 - s apart.
    exponential = (2.0, 2 + 1.173 * abs(x64))[dtype]
    forward, backward = ((exponential + n) * 2.0**-23 for n in (2.5, 5))
    rounding, least = (0.0, ROUNDING)[dtype], 2.0**-134  # half a step of bfloat16's subnormals
    held, y, dx = (Held(memory, array, front=front) for array in (x, np.full_like(x, 7), np.full_like(x, 7)))
    gradient = Held(memory, g, front=front)
    library.call("silu", held.address, count, dtype, y.address, 0)
    want = x64 * s
    bound = forward * abs(want)
    bound += rounding * (abs(want) + bound) + least
    assert (abs(y.get().astype(np.float64) - want) <= bound).all()
    library.call("silu_backward", gradient.address, held.address, count, dtype, dx.address, 0)
    want = g64 * s * (1 + x64 * rest)
    bound = backward * abs(g64) * s * (1 + abs(x64) * rest)
    bound += rounding * (abs(want) + bound) + least
    assert (abs(dx.get().astype(np.float64) - want) <= bound).all()
    library.call("silu", held.address, count, dtype, held.address, 0)
    same_bits(held.get(), y.get())


# ---- embeddings
@pytest.mark.parametrize("dim, pad", [(2, 0), (1, 0), (7, 3), (128, 0), (320, 8)])
@pytest.mark.parametrize("flip, shift", [(0, 0.0), (1, 0.0), (0, 0.5), (1, 0.5)])
def test_timestep_embedding(place, rng, dim, pad, flip, shift):
    library, memory = place
    t = np.concatenate([[0, 1, 999], rng.integers(0, 1000, 30)])
    for rows, step in ((33, 1), (1, 1), (5, 0), (0, 1)):
        out = Held(memory, pad=(pad,), shape=(rows, dim), dtype=BFLOAT16)
        t_at = memory.put(t[2:] if step == 0 else t)
        library.call("timestep_embedding", t_at, step, rows, dim, flip, shift, 10000.0, out.address,
                     *out.strides, 0)  # fmt: skip
        times = np.full(rows, t[2]) if step == 0 else t[:rows]
        want = timestep_embedding(times, dim, bool(flip), shift)
        # the frequency's exp is good for 4 ulp here and there, which the angle t * frequency keeps
        assert (abs(out.get().astype(np.float64) - want) <= ROUNDING / 2 + times[:, None] * 2.0**-21).all()


TABLES = [(1, 1, 1), (5, 3, 7), (700, 11, 512), (300, 1, 300), (64, 1000, 96), (0, 2, 4)]


@pytest.mark.parametrize("rows, count, dim", TABLES)
def test_rows_of_a_table(place, rng, rows, count, dim):
    library, memory = place
    weight = rng.standard_normal((count, dim)).astype(np.float32)
    index = rng.integers(0, count, rows)
    index[::5] = rng.choice([-1, count, -(1 << 40), 1 << 40], len(index[::5]))
    known = (index >= 0) & (index < count)
    for pad, front in ((0, 0), (4, 4), (3, 1)):
        table, index_at = Held(memory, weight, front=front), memory.put(index)
        out = Held(memory, pad=(pad,), shape=(rows, dim), dtype=BFLOAT16)
        library.call("take_rows", table.address, count, dim, index_at, rows, out.address, *out.strides, 0)
        want = np.zeros((rows, dim), BFLOAT16)
        want[known] = weight[index[known]].astype(BFLOAT16)
        same_bits(out.get(), want)
        g = rng.standard_normal((rows, dim)).astype(BFLOAT16)
        held, want = Held(memory, g, (pad,), front), weight.copy()
        for i in np.flatnonzero(known):
            want[index[i]] += g[i].astype(np.float32)
        library.call("take_rows_backward", held.address, *held.strides, index_at, rows, dim,
                     table.address, count, 0)  # fmt: skip
        same_bits(table.get(), want)


# ---- misuse
@pytest.mark.parametrize(
    "name, arguments, sentence",
    [
        ("upsample", (64, 4, 1, 1, 1, 1, [1] * 3, 64, [1] * 3, 0, 0), "element_bytes is 4, but must be"),
        ("upsample", (64, 1, 1, -1, 1, 1, [1] * 3, 64, [1] * 3, 0, 0), r"\(1, -1, 1, 1\), but each must"),
        ("upsample", (64, 2, 1, 1, 1, 1, [1] * 3, 65, [1] * 3, 0, 0), "y is 1 bytes past a multiple of 2"),
        ("upsample", (64, 2, 1, 1, 1, 1, [1 << 41] * 3, 64, [1] * 3, 0, 0), "stride 0 of x is 2199023255552"),
        ("upsample", (64, 2, 1, 1, 1, 1, 0, 64, [1] * 3, 0, 0), "the strides of x are NULL"),
        ("upsample", (64, 1, 1, 1, 1, 1, [1] * 3, 64, [1] * 3, 66, 0), "run_if is 2 bytes past"),
        ("patches", (64, 0, 1, 4, 4, 3, [1] * 3, 4, 4, 3, 3, 1, 1, 1, 64, 32, 66, 0), "run_if is 2 bytes"),
        ("upsample_backward", (64, 1, 1, 1, 1, [1] * 3, 63, [1] * 3, 64, [1] * 3, 0), "add is 1 bytes past"),
        ("add", (64, 4, 64, 8, 2, 8, 64, 8, 0), "row stride of a is 4 elements, less than its 8 columns"),
        ("patches", (64, 2, 1, 4, 4, 3, [1] * 3, 4, 4, 3, 3, 1, 1, 1, 64, 32, 0, 0), "dtype is 2, but must"),
        ("patches", (64, 0, 1, 4, 4, 3, [1] * 3, 4, 4, 3, 3, 1, 1, 1, 64, 24, 0, 0), "width is 24, .* 27"),
        ("patches", (64, 0, 1, 4, 4, 3, [1] * 3, 4, 4, 3, 3, 0, 1, 1, 64, 32, 0, 0), "stride is 0, but must"),
        ("patches", (64, 0, 1, 4, 4, 3, [1] * 3, 4, 4, 3, 3, 1, 1, 1, 72, 32, 0, 0), "out is 8 bytes past"),
        ("spread_taps", (65, 1, 1, 4, 4, 3, [1] * 3, 4, 4, 3, 3, 1, 1, 64, 32, 0), "g is 1 bytes past"),
        ("silu", (64, 1, 2, 64, 0), r"dtype is 2, but FP4BF16_FLOAT32 \(0\) or FP4BF16_BFLOAT16 \(1\)"),
        ("silu_backward", (0, 64, 1, 0, 64, 0), "silu_backward: g is NULL"),
        ("timestep_embedding", (64, 2, 1, 8, 0, 1.0, 1e4, 64, 8, 0), "t_step is 2"),
        ("timestep_embedding", (64, 1, 1, 8, 0, 4.0, 1e4, 64, 8, 0), "freq_shift is 4 .* dim / 2 = 4"),
        ("take_rows", (66, 1, 4, 64, 1, 64, 4, 0), "weight is 2 bytes past a multiple of 4"),
        ("take_rows_backward", (64, 4, 0, 1, 4, 64, 1, 0), "index is NULL"),
        ("column_sums", (64, 4, 4, 4, 64, 0, 0), "workspace is NULL"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_before_any_launch(library, name, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        library.call(name, *arguments)


def operands(fake, *arrays):
    return [device.operand(put(array), f"array{i}") for i, array in enumerate(arrays)]


def test_wrappers_fill_device_arrays(host_cuda, rng):  # noqa: F811
    wide = put(rng.standard_normal((2, 4, 4, 24)).astype(BFLOAT16))
    x = device.operand(wide[..., 8:16], "x")
    y = device.empty((2, 8, 8, 8), "bfloat16", x)
    wrapped.upsample(x, y, 0)
    same_bits(y.owner.array, fused.upsample_nearest(x.owner.array))
    dx = device.empty(x.shape, "bfloat16", x)
    wrapped.upsample_backward(y, dx, 0)
    wrapped.upsample_backward(y, dx, 0, add=x)
    wrapped.add(x, dx, dx, 0)
    wrapped.silu(dx, dx, 0)
    wrapped.silu_backward(y, y, y, 0)
    sums, table, index = operands(host_cuda, np.zeros(8, F32), np.ones((3, 8), F32), np.array([2, 0]))
    wrapped.column_sums(x, sums, 0)
    want = x.owner.array.astype(np.float64).reshape(-1, 8).sum(axis=0)
    np.testing.assert_allclose(sums.owner.array, want, rtol=1e-6)
    rows = device.empty((2, 8), "bfloat16", x)
    wrapped.take_rows(table, index, rows, 0)
    wrapped.take_rows_backward(rows, index, table, 0)
    np.testing.assert_array_equal(table.owner.array[:, 0], [2, 1, 2])
    wrapped.timestep_embedding(index, rows, 0, flip=True, freq_shift=0)
    np.testing.assert_array_equal(rows.owner.array[1], [1] * 4 + [0] * 4)


def test_wrappers_of_convolutions(host_cuda, rng):  # noqa: F811
    geometry = Geometry(2, 4, 5, 4, 5, 3, 3, 3, 1, 1, 1)
    x, weight, g = operands(host_cuda, *(rng.standard_normal(shape).astype(BFLOAT16) for shape in (
        (2, 4, 5, 8), (3, 3, 3, 8), (2, 4, 5, 3))))  # fmt: skip
    (bias,) = operands(host_cuda, np.ones(3, F32))
    out, wide = device.empty((2, 4, 5, 3), "float32", x), device.empty((2, 4, 5, 32), "bfloat16", x)
    wrapped.conv2d_few(x, weight, None, out, geometry, 0)
    wrapped.spread_taps(g, wide, geometry, 0)
    inner = (out.owner.array * g.owner.array.astype(F32)).sum()
    spread = wide.owner.array[..., :27].astype(F32) @ weight.owner.array.astype(F32).reshape(27, 8)
    np.testing.assert_allclose((x.owner.array.astype(F32) * spread).sum(), inner, rtol=1e-4, atol=1e-4)
    plain = out.owner.array.copy()
    wrapped.conv2d_few(x, weight, bias, out, geometry, 0)
    np.testing.assert_array_equal(out.owner.array, plain + 1)
    wrapped.patches(g, wide, geometry, 0)
    same_bits(wide.owner.array[:, 1:, 1:, :3], g.owner.array[:, :-1, :-1])  # the first tap
    with pytest.raises(ShapeError, match=r"out has shape \(2, 4, 5, 3\), but \(2, 4, 5, 4\) is needed"):
        wrapped.conv2d_few(x, weight, None, out, geometry._replace(o=4), 0)
    with pytest.raises(DTypeError, match="out has dtype float32, but bfloat16 is needed"):
        wrapped.patches(g, out, geometry, 0)
    with pytest.raises(DTypeError, match="g has dtype int32, but float32 or bfloat16"):
        wrapped.spread_taps(*operands(host_cuda, np.zeros((2, 4, 5, 3), np.int32)), wide, geometry, 0)


def test_wrappers_refuse_what_would_be_read_past_its_end(host_cuda):  # noqa: F811
    x, y, f = operands(host_cuda, np.zeros((2, 4, 4, 8), BFLOAT16), np.zeros((2, 8, 8, 8), BFLOAT16),
                       np.zeros((2, 8, 8, 8), F32))  # fmt: skip
    with pytest.raises(ShapeError, match=r"y has shape \(2, 4, 4, 8\), but \(2, 8, 8, 8\) is needed"):
        wrapped.upsample(x, x, 0)
    with pytest.raises(DTypeError, match="g has dtype float32, but bfloat16 is needed"):
        wrapped.upsample_backward(f, x, 0)
    with pytest.raises(ShapeError, match="b has shape"):
        wrapped.add(y, x, y, 0)
    part = device.operand(y.owner[:, :4], "part")
    with pytest.raises(ValueError, match="the rows of a .* are not evenly spaced"):
        wrapped.add(part, part, part, 0)
    with pytest.raises(ValueError, match="last axis of x has stride 512"):
        wrapped.column_sums(device.operand(y.owner.T, "t"), f, 0)
    with pytest.raises(ValueError, match="x has strides .* must be C-contiguous"):
        wrapped.silu(part, part, 0)
    assert not host_cuda.calls
