"""conv2d, its gradients and four-axis DualWeights from PyTorch and CuPy on a GPU, against float64.

The references convolve in float64 what the track multiplies: the operands rounded to BF16, or quantised on
the device (`test_cuda_quantize` compares those bytes with the CPU's) and decoded. Largest calc_diff: 1e-6 of
float32 results (the sums on FP8 tensor cores make 2e-8), 1e-5 of bfloat16 ones (their rounding, 3e-6).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from test_gemm_gpu import BF16, FORMATS, WithTorch, calc_diff, draw, host, sqnr, torch, xp  # noqa: F401

import fp4bf16 as fb
from fp4bf16 import device
from fp4bf16.backends import cuda
from fp4bf16.conv import conv2d_dgrad, conv2d_wgrad
from fp4bf16.python_ref import conv as ref

pytestmark = pytest.mark.gpu
#: x, w, stride, padding: a real layer, ragged, single pixel, unaligned C, asymmetric, pointwise, three
#: channels in and out, stride 3, a large kernel, none of some axis.
CASES = [
    ((4, 16, 16, 64), (128, 3, 3, 64), 1, 1),
    ((3, 7, 9, 5), (4, 3, 3, 5), 1, 1),
    ((1, 1, 1, 16), (8, 1, 1, 16), 1, 0),
    ((2, 6, 5, 20), (7, 5, 2, 20), 2, ((0, 1), (0, 1))),
    ((8, 16, 16, 64), (96, 3, 3, 64), 2, ((0, 1), (0, 1))),
    ((4, 8, 8, 33), (64, 1, 1, 33), 1, 0),
    ((16, 4, 4, 320), (160, 1, 1, 320), 1, 0),
    ((4, 32, 32, 3), (128, 3, 3, 3), 1, 1),
    ((4, 32, 32, 128), (3, 3, 3, 128), 1, 1),
    ((2, 11, 9, 24), (10, 5, 5, 24), 3, ((2, 0), (1, 3))),
    ((5, 1, 1, 8), (8, 3, 3, 8), 1, 1),
    ((0, 4, 4, 16), (8, 3, 3, 16), 1, 1),
    ((2, 4, 4, 16), (0, 3, 3, 16), 1, 1),
    ((2, 4, 4, 0), (8, 3, 3, 0), 1, 1),
]
IDS = [f"{x}*{w}/{s}" for x, w, s, _ in CASES]
TRACKS = [("bf16", None), ("reference", None)] + [("fp4", f) for f in FORMATS]
SINGLE, HALF = 1e-6, 1e-5


def pictures(rng, shape, dtype=np.float32):
    """Of different sizes: a scale that is not each picture's own would be seen."""
    return (draw(rng, *shape) * np.exp2(rng.integers(-2, 3, (shape[0], 1, 1, 1)))).astype(dtype)


def strong(rng, *shape):
    """A weight with a few strong directions, as trained ones have."""
    o, k = shape[0], math.prod(shape[1:])
    return (draw(rng, o, k) + draw(rng, o, 4) @ draw(rng, 4, k)).reshape(shape)


def image(fmt):
    return None if fmt == "mxfp4" else "image"


def used(x, track, fmt, search):
    """float64 of what `track` multiplies of the device array x."""
    if track == "reference":
        return host(x)
    if track == "bf16":
        return device.to_host(x).astype(BF16).astype(np.float64)
    return host(fb.dequantize(fb.quantize(x, fmt, outer=image(fmt), search=search)))


# ---- values ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("track,fmt", TRACKS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_convolution_in_float64(rng, xp, case, track, fmt):  # noqa: F811
    x_shape, w_shape, stride, padding = case
    x, w = xp.put(pictures(rng, x_shape)), xp.put(draw(rng, *w_shape))
    how = {"stride": stride, "padding": padding, "track": track, "format": fmt}
    want = ref.conv2d(used(x, track, fmt, "fast"), used(w, track, fmt, "full"), stride, padding)
    for _ in range(2):  # the second by the plan of the first
        y = fb.conv2d(x, w, **how)
        assert type(y) is type(x) and y.shape == want.shape and calc_diff(host(y), want) < SINGLE
        y = fb.conv2d(x, w, **how, dtype="bfloat16")
        assert calc_diff(host(y), want) < HALF
    if track == "fp4":
        xq = fb.quantize(x, fmt, outer=image(fmt), search="fast")
        wq = fb.quantize(w, fmt, outer=image(fmt))
        for left, right in ((x, wq), (xq, wq), (xq, w)):
            for _ in range(2):
                assert calc_diff(host(fb.conv2d(left, right, **how)), want) < SINGLE
        # python_ref.accumulator, never promoted, on such numbers: at most 6e-7 (fp8; nvfp4_exact 3e-8)
        assert calc_diff(host(fb.conv2d(x, wq, **how, accumulate="fast")), want) < 3e-6


@pytest.mark.parametrize("kernel", [(1, 1), (2, 2), (3, 3), (1, 5), (4, 3), (5, 5)], ids=str)
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_kernels_and_strides(rng, torch, kernel, stride):  # noqa: F811
    """With bfloat16 operands, forward and gradients, for two paddings."""
    put = WithTorch().put
    for padding in (0, ((2, 1), (0, 3))):
        x, w = pictures(rng, (3, 13, 10, 48), BF16), draw(rng, 40, *kernel, 48).astype(BF16)
        how = {"stride": stride, "padding": padding}
        a, b = x.astype(np.float64), w.astype(np.float64)
        want = ref.conv2d(a, b, stride, padding)
        assert calc_diff(host(fb.conv2d(put(x), put(w), dtype="float32", **how)), want) < SINGLE
        g = draw(rng, *want.shape).astype(BF16)
        dx, dw, db = ref.conv2d_vjp(g.astype(np.float64), a, b, stride, padding)
        got = conv2d_dgrad(put(g), put(w), x.shape, dtype="float32", **how)
        assert calc_diff(host(got), dx) < SINGLE
        got = conv2d_wgrad(put(g), put(x), kernel, dtype="float32", **how)
        assert calc_diff(host(got), dw) < SINGLE
        y = fb.conv2d(put(x), put(w), dtype="float32", track="fp4", **how)
        parts = used(put(x), "fp4", "nvfp4_exact", "fast"), used(put(w), "fp4", "nvfp4_exact", "full")
        assert calc_diff(host(y), ref.conv2d(*parts, stride, padding)) < SINGLE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("track", ["bf16", "fp4"])
def test_dtypes_epilogue_and_out(rng, xp, dtype, track):  # noqa: F811
    dtype = fb.interop.np_dtype(dtype)
    shapes = (3, 8, 8, 48), (40, 3, 3, 48), (40,), (3, 8, 8, 40)
    x, w, bias, residual = (xp.put(draw(rng, *s).astype(dtype)) for s in shapes)
    limit = SINGLE if dtype.itemsize >= 4 else HALF
    bulk = ref.conv2d(used(x, track, "nvfp4_exact", "fast"), used(w, track, "nvfp4_exact", "full"), 1, 1)
    for activation in (None, "silu", "gelu"):
        want = ref.epilogue(bulk, bias=host(bias), activation=activation, residual=host(residual))
        out = xp.put(np.full(want.shape, 7, dtype))
        for _ in range(2):
            y = fb.conv2d(x, w, bias=bias, residual=residual, padding=1, activation=activation, track=track,
                          out=out)  # fmt: skip
            assert y is out and calc_diff(host(y), want) < limit
    for view in (lambda v: v[..., ::2], lambda v: v[..., 40:]):
        wide = xp.put(np.full((3, 8, 8, 80), 7, dtype))
        fb.conv2d(x, w, track=track, padding=1, out=view(wide))
        assert calc_diff(host(view(wide)), bulk) < HALF
        assert (host(wide) == 7).sum() >= 3 * 8 * 8 * 40


def test_any_strides(rng, xp):  # noqa: F811
    base = pictures(rng, (4, 12, 11, 48), BF16)
    views = [
        lambda v: v, lambda v: v[:, 1:-1, 2:], lambda v: v[::2, ::3, ::2], lambda v: v[..., 8:40],
        lambda v: v[..., 3:40], lambda v: v[..., ::2], lambda v: v[2:3, :, 4:5], lambda v: v[..., 7:8],
        lambda v: v.swapaxes(1, 2),
    ]  # fmt: skip
    if xp.name == "cupy":  # PyTorch has no negative strides
        views += [lambda v: v[:, ::-1, ::-1], lambda v: v[..., ::-1]]
    whole = xp.put(base)
    nchw = xp.put(np.ascontiguousarray(base.transpose(0, 3, 1, 2)))
    nchw = nchw.permute(0, 2, 3, 1) if xp.name == "torch" else nchw.transpose(0, 2, 3, 1)
    for memory in (whole, nchw):
        for view in views:
            x = view(memory)
            w = xp.put(draw(rng, 8, 3, 3, x.shape[3]).astype(BF16))
            for track in ("bf16", "fp4"):
                want = ref.conv2d(used(x, track, "nvfp4_exact", "fast"),
                                  used(w, track, "nvfp4_exact", "full"), 1, 1)  # fmt: skip
                for _ in range(2):
                    y = fb.conv2d(x, w, padding=1, track=track, dtype="float32")
                    assert calc_diff(host(y), want) < SINGLE
            g = xp.put(draw(rng, *want.shape).astype(BF16))
            dx, dw, _ = fb.conv2d_vjp(g, x, w, padding=1)
            want = ref.conv2d_vjp(host(g), host(x), host(w), 1, 1)
            assert calc_diff(host(dx), want[0]) < HALF and calc_diff(host(dw), want[1]) < HALF


def test_channels_last_modules(rng, torch):  # noqa: F811
    """A PyTorch layer's own tensors, in either memory format, beside its own result."""
    m = torch.nn.Conv2d(32, 48, 3, stride=2, padding=1, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(4, 32, 16, 16, device="cuda", dtype=torch.bfloat16)
    want = m.double()(x.double()).permute(0, 2, 3, 1).detach().cpu().numpy()
    m.bfloat16()
    for form in (torch.channels_last, torch.contiguous_format):
        a, w = x.contiguous(memory_format=form), m.weight.detach().contiguous(memory_format=form)
        y = fb.conv2d(a.permute(0, 2, 3, 1), w.permute(0, 2, 3, 1), stride=2, padding=1, bias=m.bias)
        assert calc_diff(host(y), want) < HALF


def test_many_pictures(rng, torch):  # noqa: F811
    """More tiles than multiprocessors, against PyTorch in float64 on the GPU."""
    f = torch.nn.functional.conv2d
    layer = 64, 32, 128, 128, 3
    shapes = (*layer, 1), (*layer, 2), (32, 16, 256, 512, 3, 1), (128, 8, 256, 256, 1, 1)
    for n, h, c, o, k, stride in shapes:
        x = torch.randn(n, h, h, c, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(o, k, k, c, device="cuda", dtype=torch.bfloat16)
        how = {"stride": stride, "padding": k // 2, "dtype": "float32"}
        for track in ("bf16", "fp4"):
            a, b = x, w
            if track == "fp4":
                a, b = fb.quantize(x, outer="image", search="fast"), fb.quantize(w, outer="image")
                a, b = fb.dequantize(a), fb.dequantize(b)
            a, b = a.double().permute(0, 3, 1, 2), b.double().permute(0, 3, 1, 2)
            want = f(a, b, stride=stride, padding=k // 2).permute(0, 2, 3, 1)
            y = fb.conv2d(x, w, track=track, **how).double()
            difference = ((y - want) ** 2).sum() / (y**2 + want**2).sum()  # = calc_diff
            assert float(difference) < SINGLE, (n, h, c, o, k, stride, track)


# ---- dual --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [
    ((4, 8, 8, 64), (96, 3, 3, 64), 16), ((2, 5, 5, 20), (9, 3, 2, 20), 12),
    ((3, 4, 4, 16), (16, 1, 1, 16), 8), ((2, 8, 8, 3), (32, 3, 3, 3), 5), ((2, 6, 6, 32), (8, 3, 3, 32), 0),
], ids=str)  # fmt: skip
def test_dual_weight(rng, xp, fmt, shape):  # noqa: F811
    x_shape, w_shape, rank = shape
    x, bias = xp.put(pictures(rng, x_shape)), xp.put(draw(rng, w_shape[0]))
    dense = strong(rng, *w_shape)
    w = fb.DualWeight(xp.put(dense), rank, fmt)
    down, up = (m.astype(np.float64) for m in w.branch_factors())
    product = (down @ up).T.reshape(w_shape)
    down, up = down.T.reshape(w.rank, *w_shape[1:]), up.T.reshape(w_shape[0], 1, 1, w.rank)
    exact = used(x, "bf16", fmt, "fast")
    for stride in (1, 2):
        bulk = ref.conv2d(used(x, "fp4", fmt, "fast"), host(fb.dequantize(w.twin)), stride, 1)
        branch = ref.conv2d(ref.conv2d(exact, down, stride, 1), up)
        how = {"stride": stride, "padding": 1}
        for _ in range(2):
            assert sqnr(host(fb.conv2d(x, w, bias=bias, **how)), bulk + branch + host(bias)) > 40
        want = ref.conv2d(exact, dense.astype(BF16).astype(np.float64), stride, 1)
        assert calc_diff(host(fb.conv2d(x, w, track="bf16", **how)), want) < SINGLE
        assert calc_diff(host(fb.conv2d(x, w, track="fp4", **how)), bulk) < SINGLE
    g = xp.put(draw(rng, *bulk.shape))
    rounded = used(g, "bf16", fmt, "fast")
    dx, dw, db = fb.conv2d_vjp(g, x, w, stride=2, padding=1)
    weight = host(fb.dequantize(w.twin)) + product
    assert calc_diff(host(dx), ref.conv2d_dgrad(rounded, weight, x_shape, 2, 1)) < 1e-4
    want = ref.conv2d_wgrad(rounded, used(x, "fp4", fmt, "fast"), w_shape[1:3], 2, 1)
    assert calc_diff(host(dw), want) < HALF
    assert calc_diff(host(db), rounded.sum((0, 1, 2))) < SINGLE


def test_refresh_in_place(rng, xp):  # noqa: F811
    dense, new = (strong(rng, 24, 3, 3, 40).astype(BF16) for _ in range(2))
    w = fb.DualWeight(xp.put(dense), rank=6)

    def addresses():
        parts = w.twin.packed, w.twin.block_scale, w.twin.outer_scale, w.twin.expanded, w.down, w.up
        return [device.operand(p, "part").address for p in parts]

    before = addresses()
    for factors in (False, True):
        w.refresh(xp.put(new), factors=factors)
        left = new.astype(np.float64).reshape(24, -1).T - host(w.down) @ host(w.up)
        twin = host(fb.dequantize(w.twin))
        want = fb.dequantize(fb.quantize(xp.put(left.T.reshape(w.shape).astype(np.float32)), outer="image"))
        assert sqnr(twin, host(want)) > 30
    assert addresses() == before


# ---- gradients ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("track,fmt", TRACKS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_gradients_in_float64(rng, xp, case, track, fmt):  # noqa: F811
    x_shape, w_shape, stride, padding = case
    x, w = xp.put(draw(rng, *x_shape)), xp.put(draw(rng, *w_shape))
    how = {"stride": stride, "padding": padding, "track": track, "format": fmt}
    a, b = used(x, track, fmt, "fast"), used(w, track, fmt, "full")
    g = xp.put(draw(rng, *ref.conv2d(a, b, stride, padding).shape))
    rounded = host(g) if track == "reference" else used(g, "bf16", None, None)
    want = ref.conv2d_vjp(rounded, a, b, stride, padding)
    # outer scales of nvfp4 and fp8 are no powers of two: decoded operands are rounded to BF16
    limit = 1e-4 if fmt in ("nvfp4", "fp8") else SINGLE
    for y, exact in zip(fb.conv2d_vjp(g, x, w, **how), want, strict=True):
        assert y.shape == exact.shape and calc_diff(host(y), exact) < limit
    for dtype in ("float32", "bfloat16"):
        dx = conv2d_dgrad(g, w, x_shape, dtype=dtype, **how)
        dw = conv2d_wgrad(g, x, w_shape[1:3], dtype=dtype, **how)
        assert max(calc_diff(host(dx), want[0]), calc_diff(host(dw), want[1])) < max(limit, HALF)


# ---- certificates ------------------------------------------------------------------------------------------
def test_certificate_holds(rng, xp):  # noqa: F811
    x, dense = xp.put(pictures(rng, (4, 9, 9, 64))), strong(rng, 48, 3, 3, 64)
    w, bias = xp.put(dense), xp.put(draw(rng, 48))
    exact = host(fb.conv2d(x, w, bias=bias, padding=1, activation="silu", track="bf16"))
    weights = [(w, f, "fp4") for f in FORMATS] + [(fb.DualWeight(w, 8), None, "dual"), (w, None, "reference")]
    for weight, fmt, track in weights:
        for accumulate in ("promoted", "fast"):
            y, found = fb.conv2d(x, weight, bias=bias, padding=1, activation="silu", track=track, format=fmt,
                                 certify=True, accumulate=accumulate)  # fmt: skip
            distance = np.linalg.norm(host(y) - exact)
            assert distance <= found.bound + found.accumulation
            assert distance <= found.estimate + found.accumulation and found.rows is None


# ---- streams, graphs, memory -------------------------------------------------------------------------------
def calls(xp, rng):  # noqa: F811
    """name -> (function of x, x): every way through the device path that may be captured."""
    x, w = xp.put(pictures(rng, (4, 9, 8, 32), BF16)), xp.put(draw(rng, 24, 3, 3, 32).astype(BF16))
    wq, dual = fb.quantize(w, outer="image"), fb.DualWeight(xp.put(host(w).astype(BF16)), 8)
    any_scale, fp8 = fb.quantize(w, "nvfp4", outer="image"), fb.quantize(w, "fp8", outer="image")
    g, r = xp.put(draw(rng, 4, 9, 8, 24).astype(BF16)), xp.put(draw(rng, 4, 9, 8, 24))
    wq.expanded  # noqa: B018  (made once, before)
    return x, {
        "bf16": lambda v: fb.conv2d(v, w, padding=1),
        "fp4": lambda v: fb.conv2d(v, w, padding=1, track="fp4", residual=r),
        "prepared": lambda v: fb.conv2d(v, wq, padding=1, stride=2),
        "nvfp4": lambda v: fb.conv2d(v, any_scale, padding=1),
        "fp8": lambda v: fb.conv2d(v, fp8, padding=1, activation="gelu"),
        "dual": lambda v: fb.conv2d(v, dual, padding=1, activation="silu"),
        "gradients": lambda v: fb.conv2d_vjp(g, v, dual, padding=1)[1],
        "dx": lambda v: fb.conv2d_vjp(g, v, dual, padding=1)[0] + fb.conv2d(v, dual, padding=1).sum(),
        "refresh": lambda v: (dual.refresh(factors=False), fb.conv2d(v, dual, padding=1))[1],
        "odd": lambda v: fb.conv2d(v[:, 1:, :, 1:], w[..., 1:], padding=1, dtype="float32"),
        "stride 3": lambda v: fb.conv2d(v, w, padding=1, stride=3),
    }


def test_graph_replays_with_new_contents(rng, torch):  # noqa: F811
    x, functions = calls(put := WithTorch(), rng)
    for name, f in functions.items():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                f(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = f(x)
        x.copy_(put.put(pictures(rng, tuple(x.shape), BF16)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, f(x)), f"{name}: the replay differs"


def test_graph_of_cupy_replays(rng, library):
    """Memory that a call frees while it is captured must not go to anybody else: the graph still uses it."""
    cupy = pytest.importorskip("cupy")
    if not cuda.devices():
        pytest.skip("no GPU")
    x = cupy.asarray(pictures(rng, (4, 9, 8, 32), BF16))
    w = cupy.asarray(draw(rng, 24, 3, 3, 32).astype(BF16))
    g, dual = cupy.asarray(draw(rng, 4, 9, 8, 24).astype(BF16)), fb.DualWeight(w.copy(), 8)
    functions = {
        "dual": lambda: fb.conv2d(x, dual, padding=1, activation="silu"),
        "nvfp4": lambda: fb.conv2d(x, w, padding=1, track="fp4", format="nvfp4", activation="gelu"),
        "dx": lambda: fb.conv2d_vjp(fb.conv2d(x, w, padding=1), x, dual, padding=1)[0],
        "dw": lambda: fb.conv2d_vjp(g, x, w, padding=1, track="fp4")[1],
    }
    stream = cupy.cuda.Stream(non_blocking=True)
    for name, f in functions.items():
        f()
        cupy.cuda.Device().synchronize()  # a non-blocking stream does not wait for the others
        with stream:
            stream.begin_capture()
            y = f()
            graph = stream.end_capture()
            for _ in range(2):
                x.set(pictures(rng, x.shape, BF16), stream=stream)
                others = [cupy.full((96, 96), 7, np.float32) for _ in range(16)]
                graph.launch(stream)
                stream.synchronize()
                assert all((cupy.asnumpy(o) == 7).all() for o in others), name
                assert np.array_equal(cupy.asnumpy(y), cupy.asnumpy(f())), f"{name}: the replay differs"


def test_no_call_synchronises(rng, torch):  # noqa: F811
    x, functions = calls(WithTorch(), rng)
    torch.cuda.synchronize()
    for f in functions.values():
        f(x)  # modules are loaded, plans made
    torch.cuda.set_sync_debug_mode("error")
    try:
        for f in functions.values():
            f(x), f(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams(rng, xp):  # noqa: F811
    x, functions = calls(xp, rng)
    want = {name: host(f(x)) for name, f in functions.items() if name in ("bf16", "fp4")}
    w = xp.put(draw(rng, 24, 3, 3, 32).astype(BF16))
    y = host(fb.conv2d(x, w, padding=1))
    xp.sync()
    stream = xp.stream()
    for given in (stream, getattr(stream, "cuda_stream", None) or stream.ptr):
        found = fb.conv2d(x, w, padding=1, stream=given)
        xp.sync()
        assert (host(found) == y).all()
    for name in want:  # the same bits again
        assert (host(functions[name](x)) == want[name]).all()
    with pytest.raises(TypeError, match="a stream is needed"):
        fb.conv2d(x, w, stream="side")


def test_host_devices_and_frameworks_do_not_mix(torch):  # noqa: F811
    x, w = torch.ones(1, 4, 4, 16, device="cuda"), torch.ones(8, 3, 3, 16)
    with pytest.raises(TypeError, match="x is a torch array on cuda:0 but w is a torch array on the host"):
        fb.conv2d(x, w)
    with pytest.raises(TypeError, match="bias is a numpy array on the host"):
        fb.conv2d(x, w.cuda(), bias=np.ones(8, np.float32))
    cupy = pytest.importorskip("cupy")
    with pytest.raises(TypeError, match="x is a torch array on cuda:0 but w is a cupy array on cuda:0"):
        fb.conv2d(x, cupy.ones((8, 3, 3, 16), np.float32))
    if torch.cuda.device_count() > 1:
        with pytest.raises(TypeError, match="cuda:1"):
            fb.conv2d(x, w.to("cuda:1"))
        assert fb.conv2d(x.to("cuda:1"), w.to("cuda:1")).device.index == 1
    assert fb.conv2d(torch.nn.Parameter(x), w.cuda()).requires_grad is False
