"""The quantisers from PyTorch and CuPy on a GPU: bit-equal to python_ref, streams, graphs, memory."""

from __future__ import annotations

import gc
import pickle

import ml_dtypes
import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import device
from fp4bf16.backends import cuda
from fp4bf16.python_ref import quantize as reference

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("nvfp4_exact", "nvfp4", "mxfp4", "fp8")


class WithTorch:
    name = "torch"

    def __init__(self):
        import torch

        self.m = torch

    def put(self, array):
        array = np.asarray(array)
        if array.dtype == BF16:
            return self.m.from_numpy(array.view(np.int16)).cuda().view(self.m.bfloat16)
        return self.m.from_numpy(array).cuda()

    def get(self, x) -> np.ndarray:
        x = x.cpu()
        return x.view(self.m.int16).numpy().view(BF16) if x.dtype == self.m.bfloat16 else x.numpy()

    def empty(self, shape):
        return self.m.empty(shape, device="cuda")

    def stream(self):
        return self.m.cuda.Stream()

    def within(self, stream):
        return self.m.cuda.stream(stream)

    def sync(self):
        self.m.cuda.synchronize()


class WithCupy:
    name = "cupy"

    def __init__(self):
        import cupy

        self.m = cupy

    def put(self, array):
        return self.m.asarray(array)

    def get(self, x) -> np.ndarray:
        return self.m.asnumpy(x)

    def empty(self, shape):
        return self.m.empty(shape, np.float32)

    def stream(self):
        return self.m.cuda.Stream(non_blocking=True)

    def within(self, stream):
        return stream

    def sync(self):
        self.m.cuda.Device().synchronize()


@pytest.fixture(params=["torch", "cupy"])
def xp(request):
    module = pytest.importorskip(request.param)
    if not cuda.devices() or (request.param == "torch" and not module.cuda.is_available()):
        pytest.skip("no GPU")
    return WithTorch() if request.param == "torch" else WithCupy()


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    if not cuda.devices() or not module.cuda.is_available():
        pytest.skip("no GPU")
    return module


def data(rng, shape, dtype=np.float32) -> np.ndarray:
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape))
    x *= rng.random(shape) > 0.1
    x[..., :16] *= rng.random((*shape[:-1], 1)) < 0.8
    return x.astype(dtype)


def check(xp, xq, want, what="") -> None:
    for name in ("packed", "block_scale", "outer_scale"):
        got, ref = getattr(xq, name), getattr(want, name)
        assert (got is None) == (ref is None), name
        if ref is not None:
            got, ref = (np.ascontiguousarray(a).view(np.uint8) for a in (xp.get(got), ref))
            np.testing.assert_array_equal(got, ref, err_msg=f"{what} {name}")


# ---- values
@pytest.mark.parametrize("fmt", FORMATS)
def test_quantize_equals_reference(rng, xp, fmt):
    for shape in ((5, 48), (3, 17, 20), (2, 5, 3, 33), (1, 1), (40,), (129, 288)):
        for dtype in (np.float32, BF16, np.float16, np.float64):
            x = data(rng, shape, dtype)
            plain = x.astype(np.float32)
            for axis in range(len(shape)):
                outers = [None] if fmt == "mxfp4" else ["row", "tensor", "image", "head", 3, "array"]
                for outer in outers:
                    if outer == "image" and axis == 0:
                        continue
                    if outer == "head" and (len(shape) != 4 or axis not in (1, 3)):
                        continue
                    if outer == "array":
                        lead = [n for i, n in enumerate(shape) if i != axis]
                        outer = rng.integers(-2, 3, (*lead[:-1], *(1 for _ in lead[-1:]), 1))
                    want = reference.quantize(plain, fmt, axis, outer)
                    wide = fmt in ("nvfp4_exact", "fp8")
                    xq = fb.quantize(xp.put(x), fmt, axis, outer, expand=wide)
                    what = f"{dtype} {shape} axis {axis} outer {outer}"
                    check(xp, xq, want, what)
                    if wide:
                        np.testing.assert_array_equal(xp.get(xq._expanded), reference.expand(want), what)
                    value = reference.dequantize(want)
                    np.testing.assert_array_equal(xp.get(fb.dequantize(xq)), value, what)
        for kind in ("bfloat16", "float16", "float64"):
            got = xp.get(fb.dequantize(xq, kind))
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(got, value.astype(got.dtype))


@pytest.mark.parametrize("fmt", FORMATS)
def test_stochastic_equals_reference(rng, xp, fmt):
    for shape in ((4, 6, 35), (3, 64), (65, 130)):
        x = data(rng, shape, BF16)
        for axis in range(len(shape)):
            seed = tuple(int(s) for s in rng.integers(0, 1 << 31, 3))
            want = reference.quantize(x.astype(np.float32), fmt, axis, rounding="stochastic", seed=seed)
            check(xp, fb.quantize(xp.put(x), fmt, axis, rounding="stochastic", seed=seed), want, str(axis))


def test_rules_and_search(rng, xp):
    x = data(rng, (33, 208))
    for fmt, rules in reference.SCALE_RULES.items():
        for rule in rules:
            check(xp, fb.quantize(xp.put(x), fmt, scale_rule=rule),
                  reference.quantize(x, fmt, scale_rule=rule), rule)  # fmt: skip
    check(xp, fb.quantize(xp.put(x), search="fast"), reference.quantize(x, search="fast"))


def test_layouts(rng, xp):
    base = data(rng, (6, 8, 34))
    on_device = xp.put(base)
    views = [
        lambda x: x[:, ::2], lambda x: x[..., ::2], lambda x: x[1:, :, 1:], lambda x: x[:1],
        lambda x: x[3:, 5:, 7:], lambda x: x.reshape(-1)[1 : 1 + 5 * 8 * 34].reshape(5, 8, 34),
    ]  # fmt: skip
    if xp.name == "cupy":
        transposed = on_device.transpose(2, 0, 1)
        views += [
            lambda x: x[:, ::-1], lambda x: x[..., ::-1],
            lambda x: (np if isinstance(x, np.ndarray) else xp.m).broadcast_to(x[:, :1], x.shape),
        ]  # fmt: skip
    else:
        transposed = on_device.permute(2, 0, 1)
    pairs = [(transposed, base.transpose(2, 0, 1))] + [(v(on_device), v(base)) for v in views]
    for x, plain in pairs:
        for axis in range(3):
            for rounding in ("nearest", "stochastic"):
                want = reference.quantize(plain, axis=axis, rounding=rounding, seed=4)
                xq = fb.quantize(x, axis=axis, rounding=rounding, seed=4)
                check(xp, xq, want, f"{plain.strides} {axis}")
    np.testing.assert_array_equal(xp.get(on_device), base)


def test_empty_and_scalar(xp):
    for shape in ((0, 16), (4, 0), (2, 0, 16)):
        xq = fb.quantize(xp.empty(shape))
        assert xp.get(fb.dequantize(xq)).shape == shape
        assert xq.stats.norm_sq == 0
    with pytest.raises(fb.ShapeError, match="x has no axes"):
        fb.quantize(xp.empty(()))


def test_non_finite(rng, xp):
    x = data(rng, (8, 64))
    x[1, 3], x[2, 40] = np.nan, -np.inf
    for fmt in FORMATS:
        check(xp, fb.quantize(xp.put(x), fmt), reference.quantize(x, fmt, nan="propagate"))
    with pytest.raises(fb.NonFiniteError, match="clean x or pass nan='propagate'"):
        fb.quantize(xp.put(x), nan="raise")


def test_a_real_layer(rng, xp):
    x = data(rng, (4608, 1152), BF16)
    for fmt in FORMATS:
        for axis in (0, 1):
            want = fb.quantize(x, fmt, axis)
            xq = fb.quantize(xp.put(x), fmt, axis)
            check(xp, xq, want)
            for name in ("row_norm_sq", "row_quantized_norm_sq", "row_error_sq"):
                got, ref = getattr(xq.stats, name), getattr(want.stats, name)
                np.testing.assert_allclose(got, ref, rtol=1e-4, atol=1e-30, err_msg=name)
            for name in ("clipped", "underflowed_blocks", "zero_blocks", "overflow"):
                assert getattr(xq.stats, name) == getattr(want.stats, name), (fmt, name)


def test_container(rng, xp, tmp_path):
    x = data(rng, (6, 48))
    want, xq = fb.quantize(x), fb.quantize(xp.put(x))
    np.testing.assert_array_equal(np.asarray(xq), np.asarray(want))
    np.testing.assert_array_equal(xp.get(xq.expanded), want.expanded)
    assert repr(xq) == repr(want) and xq.nbytes == want.nbytes
    for other in (xq.copy(), pickle.loads(pickle.dumps(xq))):
        check(xp, other, want)
        assert type(other.packed) is type(xq.packed) and other.stats.zero_blocks == want.stats.zero_blocks
    fb.save(tmp_path / "w.safetensors", {"w": xq})
    np.testing.assert_array_equal(fb.load(tmp_path / "w.safetensors")["w"].packed, want.packed)
    check(xp, fb.recast(xq, "fp8"), fb.recast(want, "fp8"))
    parts = fb.from_parts(xq.packed, xq.block_scale, xq.outer_scale, "nvfp4_exact", (6, 48))
    check(xp, parts, want)
    y = xp.empty((6, 48))
    assert fb.dequantize(xq.T.T, out=y) is y
    np.testing.assert_array_equal(xp.get(y), np.asarray(want))


# ---- streams
def test_current_stream_is_honoured(rng, xp):
    """Work before and after on the same side stream needs no event; the default stream is left alone."""
    x = data(rng, (512, 1024)) + np.float32(0)  # no -0, which the sums below would lose
    source, want = xp.put(x), reference.quantize(x)
    xp.sync()
    for _ in range(3):
        stream = xp.stream()
        with xp.within(stream):
            late = xp.put(np.zeros_like(x))
            for _ in range(20):  # something that is still running when quantize is called
                late += source
            late -= late
            late += source
            xq = fb.quantize(late)
            y = fb.dequantize(xq)
            stream.synchronize()
            np.testing.assert_array_equal(xp.get(y), reference.dequantize(want))
            check(xp, xq, want)


class Protocol:
    def __init__(self, handle):
        self.handle = handle

    def __cuda_stream__(self):
        return 0, self.handle


def test_stream_argument(rng, xp):
    x = data(rng, (64, 256))
    source, want, stream = xp.put(x), reference.quantize(x), xp.stream()
    handle = stream.cuda_stream if xp.name == "torch" else stream.ptr
    kinds = [handle, Protocol(handle), stream, 0]
    try:
        from cuda.core import Device
    except ImportError:
        try:
            from cuda.core.experimental import Device
        except ImportError:
            Device = None
    if Device is not None:
        place = Device(0)
        place.set_current()
        kinds.append(place.create_stream())
    xp.sync()
    for kind in kinds:
        xq = fb.quantize(source, stream=kind)
        y = fb.dequantize(xq, stream=kind)
        xp.sync()
        check(xp, xq, want, str(kind))
        np.testing.assert_array_equal(xp.get(y), reference.dequantize(want))
    with pytest.raises(TypeError, match="stream is a str"):
        fb.quantize(source, stream="main")


def test_graph_replays_with_new_contents(rng, torch):
    fmt_of = {f: torch.zeros(96, 320, device="cuda", dtype=torch.bfloat16) for f in FORMATS}
    made = {}

    def work():
        for fmt, x in fmt_of.items():
            xq = fb.quantize(x, fmt, expand=fmt in ("nvfp4_exact", "fp8"))
            turned = fb.quantize(x, fmt, axis=0, rounding="stochastic", seed=9)
            made[fmt] = xq, fb.dequantize(xq, "bfloat16"), turned

    work()  # kernels are loaded outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    captured = dict(made)
    for _ in range(3):
        for x in fmt_of.values():
            x.copy_(torch.from_numpy(data(rng, tuple(x.shape))))
        graph.replay()
        torch.cuda.synchronize()
        work()
        for fmt, (xq, y, turned) in captured.items():
            eager, eager_y, eager_turned = made[fmt]
            for got, ref in ((xq, eager), (turned, eager_turned)):
                assert torch.equal(got.packed, ref.packed), fmt
                if got.block_scale is not None:
                    assert torch.equal(got.block_scale, ref.block_scale), fmt
                if got.outer_scale is not None:
                    assert torch.equal(got.outer_scale, ref.outer_scale), fmt
            assert torch.equal(y, eager_y), fmt
            if xq._expanded is not None:
                assert torch.equal(xq._expanded, eager._expanded), fmt


def test_graph_of_cupy(rng):
    cupy = pytest.importorskip("cupy")
    if not cuda.devices():
        pytest.skip("no GPU")
    x = cupy.zeros((96, 320), np.float32)
    fb.dequantize(fb.quantize(x))
    cupy.cuda.Device().synchronize()  # a non-blocking stream does not wait for the zeros
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        xq = fb.quantize(x[:, ::-1])  # copied by the framework, into memory that the graph uses from now on
        y = fb.dequantize(xq)
        graph = stream.end_capture()
        for _ in range(3):
            new = data(rng, x.shape)
            x.set(new, stream=stream)
            others = [cupy.full((96, 320), 7, np.float32) for _ in range(8)]  # memory freed in the capture
            graph.launch(stream)
            stream.synchronize()
            assert all((cupy.asnumpy(o) == 7).all() for o in others)
            want = reference.quantize(new[:, ::-1])
            np.testing.assert_array_equal(cupy.asnumpy(xq.packed), want.packed)
            np.testing.assert_array_equal(cupy.asnumpy(y), reference.dequantize(want))


# ---- memory
def test_no_synchronisation_and_no_memory_of_our_own(rng, torch):
    x = torch.from_numpy(data(rng, (1024, 4096))).cuda().bfloat16()

    def work():
        for fmt in FORMATS:
            outer = 2 if fmt == "fp8" else "default"
            xq = fb.quantize(x, fmt, outer=outer, expand=fmt in ("nvfp4_exact", "fp8"))
            fb.dequantize(xq, "bfloat16")
            fb.quantize(x, fmt, axis=0)

    work()
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() == before


def test_full_gpu_is_the_frameworks_error(torch):
    free = torch.cuda.mem_get_info()[0]
    x = torch.empty((1, 1), device="cuda").expand(1 << 20, max(16, free >> 20))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        fb.quantize(x)  # the copy that it needs does not fit
    assert fb.quantize(torch.ones(2, 16, device="cuda")).packed.shape == (2, 8)  # and nothing is left behind


# ---- refusals
def test_mixed_operands(rng, torch):
    x = torch.ones(4, 32, device="cuda")
    xq = fb.quantize(x)
    with pytest.raises(TypeError, match="is a torch array on cuda:0 but out is a numpy array on the host"):
        fb.dequantize(xq, out=np.empty((4, 32), np.float32))
    with pytest.raises(TypeError, match="torch array on cuda:0 but out is a torch array on the host"):
        fb.dequantize(xq, out=torch.empty(4, 32))
    with pytest.raises(TypeError, match="x is a torch array on cuda:0 but out.packed is a torch array on"):
        fb.quantize(x, out=fb.quantize(x.cpu()))
    with pytest.raises(ValueError, match="out overlaps xq.packed"):
        _dequantize_into_itself(torch)
    if torch.cuda.device_count() > 1:
        with pytest.raises(TypeError, match="cuda:0 but out is a torch array on cuda:1"):
            fb.dequantize(xq, out=torch.empty(4, 32, device="cuda:1"))
        other = fb.quantize(torch.ones(4, 32, device="cuda:1"))
        assert other.packed.device.index == 1 and torch.cuda.current_device() == 0
        assert torch.equal(fb.dequantize(other).cpu(), torch.ones(4, 32))
        with pytest.raises(TypeError, match="stream is of cuda:1"):
            fb.quantize(x, stream=torch.cuda.Stream(device=1))
    cupy = pytest.importorskip("cupy")
    with pytest.raises(TypeError, match="torch array on cuda:0 but out is a cupy array on cuda:0"):
        fb.dequantize(xq, out=cupy.empty((4, 32), np.float32))


def _dequantize_into_itself(torch):
    memory = torch.zeros(4 * 4 * 16 + 64, dtype=torch.uint8, device="cuda")
    out = memory[: 4 * 4 * 16].view(torch.float32).view(4, 16)
    packed, outer = memory[:64].view(4, 16), torch.ones(4, 1, device="cuda")
    return fb.dequantize(fb.QuantizedArray(packed, None, outer, "fp8", (4, 16), (0, 1)), out=out)


def test_a_failed_call_leaves_nothing_behind(torch):
    x = torch.ones(4, 32, device="cuda")
    with pytest.raises(ValueError, match="quantize: "):
        device.call("quantize", cuda.load().ffi.new("fp4bf16_quantize_args*", {"rows": -1}), 0)
    torch.cuda.synchronize()
    assert torch.equal(fb.dequantize(fb.quantize(x)), x)
