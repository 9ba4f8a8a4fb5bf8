"""matmul, linear, DualWeight and gradients from PyTorch and CuPy on a GPU, beside the CPU's results."""

from __future__ import annotations

import threading

import ml_dtypes
import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import device
from fp4bf16.backends import cuda
from fp4bf16.gemm import branch_vjp

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("nvfp4_exact", "nvfp4", "mxfp4", "fp8")
SHAPES = [(37, 100, 19), (1, 64, 33), (130, 48, 1), (33, 17, 65), (256, 1152, 320), (4, 8, 8)]


class WithTorch:
    name = "torch"

    def __init__(self):
        self.m = pytest.importorskip("torch")

    def put(self, array):
        array = np.asarray(array)
        if array.dtype == BF16:
            return self.m.from_numpy(array.view(np.int16)).cuda().view(self.m.bfloat16)
        return self.m.from_numpy(array).cuda()

    def stream(self):
        return self.m.cuda.Stream()

    def sync(self):
        self.m.cuda.synchronize()


class WithCupy:
    name = "cupy"

    def __init__(self):
        self.m = pytest.importorskip("cupy")

    def put(self, array):
        return self.m.asarray(array)

    def stream(self):
        return self.m.cuda.Stream(non_blocking=True)

    def sync(self):
        self.m.cuda.Device().synchronize()


@pytest.fixture(params=[WithTorch, WithCupy], ids=lambda c: c.name)
def xp(request, library):
    if not cuda.devices():
        pytest.skip("no GPU")
    return request.param()


@pytest.fixture
def torch(library):
    module = pytest.importorskip("torch")
    if not cuda.devices() or not module.cuda.is_available():
        pytest.skip("no GPU")
    return module


def host(x) -> np.ndarray:
    return device.to_host(x).astype(np.float64)


def calc_diff(x, y):
    x, y = (np.asarray(v, np.float64) for v in (x, y))
    total = (x * x + y * y).sum()
    return 0.0 if total == 0 else 1 - 2 * (x * y).sum() / total


def sqnr(y, want):
    y, want = np.asarray(y, np.float64), np.asarray(want, np.float64)
    error = np.square(y - want).sum()
    return np.inf if error == 0 else 10 * np.log10(np.square(want).sum() / error)


def draw(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


def weight(rng, k, n):
    return draw(rng, k, n) + (draw(rng, k, 4) @ draw(rng, 4, n))


# ---- values ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("track,fmt", [("bf16", None), ("reference", None)] + [("fp4", f) for f in FORMATS])
def test_product_is_the_cpus(rng, xp, shape, track, fmt):
    m, k, n = shape
    a, b = draw(rng, m, k), draw(rng, k, n)
    want = fb.matmul(a, b, track=track, format=fmt)
    x, w = xp.put(a), xp.put(b)
    for _ in range(2):  # the second by the plan of the first
        y = fb.matmul(x, w, track=track, format=fmt)
        assert type(y) is type(x) and y.shape == want.shape
        assert calc_diff(host(y), want) < 1e-6
        y = fb.linear(x, xp.put(np.ascontiguousarray(b.T)), track=track, format=fmt, dtype="bfloat16")
        assert calc_diff(host(y), want) < 1e-5
    if track == "fp4":
        aq, wq = fb.quantize(x, fmt, search="fast"), fb.quantize(w, fmt, axis=-2)
        for accumulate in ("promoted", "fast"):
            for left, right in ((x, wq), (aq, wq), (aq, w)):
                for _ in range(2):
                    y = fb.matmul(left, right, track="fp4", accumulate=accumulate)
                    assert calc_diff(host(y), want) < (1e-6 if accumulate == "promoted" else 2e-5)


@pytest.mark.parametrize("shapes", [
    ((32,), (32, 7)), ((5, 32), (32,)), ((32,), (32,)), ((2, 3, 5, 32), (32, 7)), ((2, 3, 5, 32), (3, 32, 7)),
    ((32,), (3, 32, 7)), ((2, 5, 32), (1, 32, 7)), ((2, 5, 32), (32,)), ((2, 0, 32), (2, 32, 4)), ((1, 5, 32),
    (4, 32, 3)), ((2, 1, 5, 48), (4, 48, 16)), ((3, 2, 1, 48), (48, 16)), ((0, 32), (32, 8)),
    ((5, 0), (0, 3)),
])  # fmt: skip
@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
def test_batches(rng, xp, shapes, track):
    a, b = (draw(rng, *s) for s in shapes)
    want = fb.matmul(a, b, track=track)
    y = fb.matmul(xp.put(a), xp.put(b), track=track)
    assert y.shape == np.shape(want) and calc_diff(host(y), want) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("track", ["bf16", "fp4"])
def test_dtypes_epilogue_and_out(rng, xp, dtype, track):
    dtype = fb.interop.np_dtype(dtype)
    a, b, bias, residual = (draw(rng, *s).astype(dtype) for s in ((2, 33, 96), (96, 40), (40,), (2, 33, 40)))
    for activation in (None, "silu", "gelu"):
        how = {"track": track, "activation": activation}
        want = fb.matmul(a, b, bias=bias, residual=residual, **how)
        x, w, v, r = map(xp.put, (a, b, bias, residual))
        out = xp.put(np.full(want.shape, 7, dtype))
        for _ in range(2):
            y = fb.matmul(x, w, bias=v, residual=r, out=out, **how)
            assert y is out and calc_diff(host(y), want) < (1e-6 if dtype.itemsize >= 4 else 1e-5)
    wide = xp.put(np.full((2, 33, 80), 7, dtype))
    fb.matmul(x, w, track=track, out=wide[..., ::2])
    assert calc_diff(host(wide)[..., ::2], fb.matmul(a, b, track=track)) < 1e-5
    assert (host(wide)[..., 1::2] == 7).all()


def test_any_strides(rng, xp):
    base = draw(rng, 64, 96).astype(BF16)
    x = xp.put(base)
    views = [
        (lambda v: v[::2]),
        (lambda v: v[:, 1:]),
        (lambda v: v[3:, ::2]),
        (lambda v: v.T),
        (lambda v: v[:, 3:4]),
    ]
    if xp.name == "cupy":  # PyTorch has no negative strides
        views += [lambda v: v[::-1], lambda v: v[:, ::-1], lambda v: v.T[::-1, ::-3]]
    for view in views:
        a = view(base)
        b = draw(rng, a.shape[1], 24).astype(BF16)
        for track in ("bf16", "fp4"):
            want = fb.matmul(a, b, track=track, dtype="float32")
            for _ in range(2):
                y = fb.matmul(view(x), xp.put(b), track=track, dtype="float32")
                assert calc_diff(host(y), want) < 1e-6
            y = fb.matmul(xp.put(np.ascontiguousarray(b.T)), view(x).T, track=track, dtype="float32")
            assert calc_diff(host(y), want.T) < (1e-6 if track == "bf16" else 1e-2)
    flat = xp.put(draw(rng, 33 * 64 + 1).astype(BF16))  # two bytes off
    a = flat[1:].reshape(33, 64)
    want = fb.matmul(device.to_host(a), b[:1].repeat(64, 0), dtype="float32")
    assert calc_diff(host(fb.matmul(a, xp.put(b[:1].repeat(64, 0)), dtype="float32")), want) < 1e-6


# ---- dual --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("outliers", [0, [3, 50]])
@pytest.mark.parametrize(
    "shape", [(37, 100, 19, 8), (1, 64, 33, 4), (300, 1152, 320, 64), (64, 96, 48, 0)], ids=str
)
def test_dual_product(rng, xp, fmt, outliers, shape):
    m, k, n, rank = shape
    x, dense, bias = draw(rng, m, k), weight(rng, k, n), draw(rng, n)
    on_cpu = fb.DualWeight(dense, rank, fmt, outliers)
    w = fb.DualWeight(xp.put(dense), rank, fmt, outliers)
    down, up = w.branch_factors()
    masked = x.copy()
    masked[:, w.outlier_index] = 0
    x4 = fb.dequantize(fb.quantize(masked, fmt, search="fast")).astype(np.float64)
    twin = host(fb.dequantize(w.twin))
    unfused = x4 @ twin + (x.astype(BF16).astype(np.float64) @ down) @ up + bias
    for _ in range(2):
        y = fb.matmul(xp.put(x), w, bias=xp.put(bias))
        assert sqnr(host(y), unfused) > 40
    assert calc_diff(host(y), fb.matmul(x, on_cpu, bias=bias)) < 1e-2
    for track in ("bf16", "fp4"):
        assert calc_diff(host(fb.matmul(xp.put(x), w, track=track)),
                         fb.matmul(x, on_cpu, track=track)) < 1e-2  # fmt: skip
    y, cert = fb.matmul(xp.put(x), w, certify=True)
    exact = x.astype(BF16).astype(np.float64) @ dense.astype(BF16).astype(np.float64)
    assert np.linalg.norm(host(y) - exact) <= cert.bound + cert.accumulation


def test_refresh_in_place(rng, xp):
    dense, new = weight(rng, 96, 40).astype(BF16), weight(rng, 96, 40).astype(BF16)
    w = fb.DualWeight(xp.put(dense), rank=6, outliers=[7])

    def addresses():
        parts = w.twin.packed, w.twin.block_scale, w.twin.outer_scale, w.twin.expanded, w.down, w.up
        return [device.operand(p, "part").address for p in parts]

    before, x = addresses(), draw(rng, 20, 96)
    for factors in (False, True):
        w.refresh(xp.put(new), factors=factors)
        exact = x.astype(BF16).astype(np.float64) @ new.astype(np.float64)
        assert sqnr(host(fb.matmul(xp.put(x), w)), exact) > 12
        residual = new.astype(np.float64) - host(w.down) @ host(w.up)
        residual[7] = 0
        twin = host(fb.dequantize(w.twin))
        assert sqnr(twin, np.asarray(fb.quantize(residual, axis=0))) > 30 and not twin[7].any()
    assert addresses() == before


def test_large_weight_by_randomised_svd(rng, xp):
    dense = weight(rng, 1536, 256)
    w = fb.DualWeight(xp.put(dense), rank=8)
    left = dense - device.to_host(w.down).astype(np.float32) @ device.to_host(w.up).astype(np.float32)
    s = np.linalg.svd(dense.astype(np.float64), compute_uv=False)
    assert np.linalg.norm(left) < 1.02 * np.sqrt((s[8:] ** 2).sum())


# ---- gradients ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    "shapes", [((37, 100), (100, 19)), ((2, 3, 5, 32), (3, 32, 7)), ((2, 9, 48), (48, 24))]
)
def test_gradients_are_the_cpus(rng, xp, fmt, shapes):
    a, b = (draw(rng, *s) for s in shapes)
    g = draw(rng, *np.matmul(a, b).shape)
    for track in ("bf16", "fp4", "reference"):
        want = fb.matmul_vjp(g, a, b, track=track, format=fmt)
        got = fb.matmul_vjp(xp.put(g), xp.put(a), xp.put(b), track=track, format=fmt)
        for y, exact in zip(got, want, strict=True):
            assert y.shape == exact.shape and calc_diff(host(y), exact) < (1e-4 if fmt == "fp8" else 1e-6)
    if b.ndim == 2:
        wt = np.ascontiguousarray(b.T)
        for y, exact in zip(fb.linear_vjp(*map(xp.put, (g, a, wt)), track="fp4", format=fmt),
                            fb.linear_vjp(g, a, wt, track="fp4", format=fmt), strict=True):  # fmt: skip
            assert y.shape == exact.shape and calc_diff(host(y), exact) < 1e-4


@pytest.mark.parametrize("outliers", [0, [3, 50]])
def test_dual_gradients(rng, xp, outliers):
    x, dense, g = draw(rng, 40, 64), weight(rng, 64, 24), draw(rng, 40, 24)
    on_cpu, w = fb.DualWeight(dense, 6, outliers=outliers), fb.DualWeight(xp.put(dense), 6, outliers=outliers)
    for how in ({}, {"save": "bf16"}, {"backward": "master"}):
        for y, exact in zip(fb.linear_vjp(xp.put(g), xp.put(x), w, **how), fb.linear_vjp(g, x, on_cpu, **how),
                            strict=True):  # fmt: skip
            assert calc_diff(host(y), exact) < 1e-2
    ddown, dup = branch_vjp(xp.put(g), xp.put(x), w)
    product = host(ddown) @ host(w.up)  # the factors' signs are free, their products are not
    want_down, want_up = branch_vjp(g, x, on_cpu)
    assert calc_diff(product, want_down.astype(np.float64) @ np.asarray(on_cpu.up, np.float64)) < 1e-2
    assert calc_diff(host(w.down) @ host(dup), np.asarray(on_cpu.down, np.float64) @ want_up) < 1e-2


# ---- streams, graphs, memory -------------------------------------------------------------------------------
def calls(xp, rng):
    """name -> (function of x, x): every way through the device path that may be captured."""
    w = draw(rng, 96, 48).astype(BF16)
    x, y = xp.put(draw(rng, 33, 96).astype(BF16)), xp.put(w)
    wq, dual = fb.quantize(y, axis=-2), fb.DualWeight(xp.put(w.copy()), 8, outliers=[5])
    any_scale, fp8 = fb.quantize(y, "nvfp4", axis=-2), fb.quantize(y, "fp8", axis=-2)
    g = xp.put(draw(rng, 33, 48).astype(BF16))
    wq.expanded  # noqa: B018  (made once, before)
    return x, {
        "bf16": lambda v: fb.matmul(v, y),
        "fp4": lambda v: fb.matmul(v, y, track="fp4"),
        "prepared": lambda v: fb.matmul(v, wq),
        "nvfp4": lambda v: fb.matmul(v, any_scale),
        "fp8": lambda v: fb.matmul(v, fp8, activation="gelu"),
        "dual": lambda v: fb.matmul(v, dual, activation="silu"),
        "gradients": lambda v: fb.matmul_vjp(g, v, dual)[1],
        "refresh": lambda v: (dual.refresh(factors=False), fb.matmul(v, dual))[1],
        "odd": lambda v: fb.matmul(v[:, 1:], y[1:], dtype="float32"),
    }


def test_graph_replays_with_new_contents(rng, torch):
    xp = WithTorch()
    x, functions = calls(xp, rng)
    for name, f in functions.items():
        for warm in (True, False):
            if warm:
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(2):
                        f(x)
                torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = f(x)
            x.copy_(xp.put(draw(rng, *x.shape).astype(BF16)))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, f(x)), f"{name}: the replay differs"


def test_graph_of_cupy_replays(rng):
    """Memory that a call frees while it is captured must not go to anybody else: the graph still uses it."""
    cupy = pytest.importorskip("cupy")
    if not cuda.devices():
        pytest.skip("no GPU")
    x = cupy.asarray(draw(rng, 64, 96).astype(BF16))
    w = fb.DualWeight(cupy.asarray(draw(rng, 96, 40).astype(BF16)), rank=8, outliers=2)
    b = cupy.asarray(draw(rng, 96, 40).astype(BF16))
    functions = {
        "dual": lambda: fb.matmul(x, w, activation="silu"),
        "fp4 of both": lambda: fb.matmul(x, b, track="fp4"),
        "nvfp4": lambda: fb.matmul(x, b, track="fp4", format="nvfp4", activation="gelu"),
        "vjp": lambda: fb.matmul_vjp(fb.matmul(x, b), x, b, track="fp4")[1],
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
                x.set(draw(rng, 64, 96).astype(BF16), stream=stream)
                others = [cupy.full((96, 96), 7, np.float32) for _ in range(16)]
                graph.launch(stream)
                stream.synchronize()
                assert all((cupy.asnumpy(o) == 7).all() for o in others), name
                got = cupy.asnumpy(y)
                assert np.array_equal(got, cupy.asnumpy(f())), f"{name}: the replay differs"


def test_no_call_synchronises(rng, torch):
    x, functions = calls(WithTorch(), rng)
    torch.cuda.synchronize()
    for f in functions.values():
        f(x)  # modules are loaded, plans made
    torch.cuda.set_sync_debug_mode("error")
    try:
        for f in functions.values():
            f(x), f(x)
        fb.matmul(x[:, 2:], torch.ones(94, 8, device="cuda"), track="fp4")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_streams(rng, xp):
    a, b = xp.put(draw(rng, 64, 96).astype(BF16)), xp.put(draw(rng, 96, 40).astype(BF16))
    want = host(fb.matmul(a, b))
    xp.sync()
    stream = xp.stream()
    for given in (stream, getattr(stream, "cuda_stream", None) or stream.ptr):
        y = fb.matmul(a, b, stream=given)
        xp.sync()
        assert (host(y) == want).all()
    with pytest.raises(TypeError, match="a stream is needed"):
        fb.matmul(a, b, stream="side")


def test_threads_share_no_plan(rng, xp):
    a, b = draw(rng, 64, 96).astype(BF16), draw(rng, 96, 40).astype(BF16)
    want, wrong = fb.matmul(a, b, dtype="float32"), []

    def work(scale):
        x, y = xp.put((a.astype(np.float32) * scale).astype(BF16)), xp.put(b)
        for _ in range(50):
            if calc_diff(host(fb.matmul(x, y, dtype="float32")), want * scale) > 1e-6:
                wrong.append(scale)

    threads = [threading.Thread(target=work, args=(2.0**i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_a_full_gpu_is_the_frameworks_own_error(xp):
    big = xp.put(np.ones((1 << 20, 16), BF16))
    error = xp.m.cuda.OutOfMemoryError if xp.name == "torch" else xp.m.cuda.memory.OutOfMemoryError
    with pytest.raises(error):
        fb.matmul(big, big.T, dtype="float32")
    y = fb.matmul(big[:64], big[:32].T)
    assert (host(y) == 16).all()


def test_two_devices(rng, torch):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    a, b = torch.ones(4, 32, device="cuda:0"), torch.ones(32, 4, device="cuda:1")
    with pytest.raises(TypeError, match="a is a torch array on cuda:0 but b is a torch array on cuda:1"):
        fb.matmul(a, b)
    y = fb.matmul(a.to("cuda:1"), b)  # while cuda:0 is current
    assert y.device.index == 1 and (host(y) == 32).all()


def test_host_and_device_do_not_mix(torch):
    a = torch.ones(4, 32, device="cuda")
    with pytest.raises(TypeError, match="a is a torch array on cuda:0 but b is a torch array on the host"):
        fb.matmul(a, torch.ones(32, 4))
    with pytest.raises(TypeError, match="b is a numpy array on the host"):
        fb.matmul(a, np.ones((32, 4), np.float32))
    assert fb.matmul(torch.nn.Parameter(a), a.T).requires_grad is False
