"""The device front end of the quantisers on an emulated GPU: bit-equal to python_ref, every sentence."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from host_cuda import POISON, FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

import fp4bf16 as fb
from fp4bf16 import device, dispatch
from fp4bf16.adapters import DeviceArray
from fp4bf16.backends import cuda
from fp4bf16.layout import groups, rows_of
from fp4bf16.python_ref import quantize as reference

pytestmark = pytest.mark.usefixtures("host_cuda")
BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("nvfp4_exact", "nvfp4", "mxfp4", "fp8")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def data(rng, shape, dtype="float32") -> np.ndarray:
    """Mixed magnitudes, zero blocks, -0."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-3, 4, shape))
    x *= rng.random(shape) > 0.1
    x[..., :16] *= rng.random((*shape[:-1], 1)) < 0.8
    return x.astype(BF16 if dtype == "bfloat16" else dtype)


def host(x) -> np.ndarray:
    return x.array if isinstance(x, FakeArray) else x


def check(xq, want, expanded=False) -> None:
    """A container on the device holds the bytes of the reference."""
    for name in ("packed", "block_scale", "outer_scale"):
        got, ref = host(getattr(xq, name)), getattr(want, name)
        assert (got is None) == (ref is None), name
        if ref is not None:
            np.testing.assert_array_equal(got.view(np.uint8), ref.view(np.uint8), err_msg=name)
    if expanded:
        assert xq._expanded is not None
        np.testing.assert_array_equal(host(xq._expanded), reference.expand(want))


# ---- every format, axis, outer scale, dtype
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(5, 48), (3, 17, 20), (2, 5, 3, 33), (1, 1), (40,)], ids=str)
def test_quantize_equals_reference(rng, fmt, shape):
    x = data(rng, shape)
    outers = [None] if fmt == "mxfp4" else ["row", "tensor", "image", "head", 3, "array"]
    for axis in range(len(shape)):
        for outer in outers:
            if outer == "image" and axis == 0 or outer == "head" and (len(shape) != 4 or axis not in (1, 3)):
                continue
            if outer == "array":
                lead = [n for i, n in enumerate(shape) if i != axis]
                outer = rng.integers(-2, 3, (*lead[:-1], *(1 for _ in lead[-1:]), 1))
            want = reference.quantize(x, fmt, axis, outer)
            wide = fmt in ("nvfp4_exact", "fp8")
            xq = fb.quantize(put(x), fmt, axis, outer, expand=wide)
            check(xq, want, wide)
            assert xq.shape == shape and xq.axis == axis
            value = reference.dequantize(want)
            np.testing.assert_array_equal(host(fb.dequantize(xq)), value)
            np.testing.assert_array_equal(np.asarray(xq), value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_dtypes(rng, fmt, dtype):
    x = data(rng, (7, 50), dtype)
    want = reference.quantize(x.astype(np.float32), fmt)
    xq = fb.quantize(put(x), fmt)
    check(xq, want)
    assert xq.stats.source_dtype == dtype
    back = host(fb.dequantize(xq, dtype=dtype))
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, reference.dequantize(want).astype(x.dtype))


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_layouts(rng, rounding, host_cuda):  # noqa: F811
    """Whatever the strides: the values and the random numbers are those of the logical array."""
    base = data(rng, (6, 8, 34))
    views = {
        "plain": (base, 0), "transposed": (base.transpose(2, 0, 1), 0), "swapped": (base.swapaxes(0, 1), 0),
        "every other row": (base[:, ::2], 0), "every other column": (base[..., ::2], 1),
        "negative": (base[:, ::-1], 1), "backwards": (base[..., ::-1], 1), "odd offset": (base[1:, :, 1:], 0),
        "repeated": (np.broadcast_to(base[:, :1], base.shape), 1), "row": (base[:1], 0),
    }  # fmt: skip
    for name, (x, _) in views.items():
        for axis in range(3):
            want = reference.quantize(x, axis=axis, rounding=rounding, seed=(5, 2, 3))
            source = FakeArray(x)
            before = x.copy()
            xq = fb.quantize(source, axis=axis, rounding=rounding, seed=(5, 2, 3))
            check(xq, want)
            np.testing.assert_array_equal(x, before, err_msg=name)


@pytest.mark.parametrize("fmt", FORMATS)
def test_stochastic_is_the_same_as_on_the_cpu(rng, fmt):
    x = data(rng, (4, 6, 35))
    for axis in range(3):
        want = reference.quantize(x, fmt, axis, rounding="stochastic", seed=11)
        on_cpu = fb.quantize(x, fmt, axis, rounding="stochastic", seed=11)
        check(on_cpu, want)
        check(fb.quantize(put(x), fmt, axis, rounding="stochastic", seed=11), want)
    other = fb.quantize(put(x), fmt, rounding="stochastic", seed=(11, 0, 1))
    assert (host(other.packed) != fb.quantize(x, fmt, rounding="stochastic", seed=11).packed).any()


@pytest.mark.parametrize("rule", ["four_over_six", "four_over_six_mae", "four_over_six_448", "te"])
def test_scale_rules(rng, rule):
    x = data(rng, (4, 64))
    check(fb.quantize(put(x), "nvfp4", scale_rule=rule), reference.quantize(x, "nvfp4", scale_rule=rule))
    for other in ("even", "floor", "rceil", "ceil"):
        check(fb.quantize(put(x), "mxfp4", scale_rule=other),
              reference.quantize(x, "mxfp4", scale_rule=other))  # fmt: skip
    check(fb.quantize(put(x), search="fast"), reference.quantize(x, search="fast"))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0, 0), (2, 0, 16)], ids=str)
def test_empty(fmt, shape, host_cuda):  # noqa: F811
    for axis in (-1, 0):
        x = np.empty(shape, np.float32)
        want = fb.quantize(x, fmt, axis)
        xq = fb.quantize(put(x), fmt, axis)
        for name in ("packed", "block_scale", "outer_scale"):
            got, ref = host(getattr(xq, name)), getattr(want, name)
            assert (got is None) == (ref is None)
            if ref is not None:
                np.testing.assert_array_equal(got, ref)
        assert host(fb.dequantize(xq)).shape == shape and xq.stats.norm_sq == 0
    assert not host_cuda.calls


def test_non_finite(rng, host_cuda):  # noqa: F811
    x = data(rng, (4, 64))
    x[1, 3], x[2, 40] = np.nan, -np.inf
    for fmt in FORMATS:
        check(fb.quantize(put(x), fmt), reference.quantize(x, fmt, nan="propagate"))
    assert host_cuda.fake.moved == 0
    with pytest.raises(fb.NonFiniteError, match="in 2 of its blocks; clean x or pass nan='propagate'"):
        fb.quantize(put(x), nan="raise")
    with pytest.raises(fb.NonFiniteError):
        fb.quantize(x)


# ---- nothing is read back
def test_nothing_is_read_back(rng, host_cuda):  # noqa: F811
    x = data(rng, (8, 64))
    xq = fb.quantize(put(x), expand=True)
    fb.dequantize(xq, "bfloat16")
    fb.quantize(put(x), "nvfp4", outer=put(np.int32(2)))
    _ = repr(xq), repr(xq.stats), xq.nbytes, xq.T.shape, xq.expanded
    assert host_cuda.fake.moved == 0
    want = fb.quantize(x).stats
    for name in ("row_norm_sq", "row_quantized_norm_sq", "row_error_sq", "clipped", "zero_blocks"):
        np.testing.assert_array_equal(getattr(xq.stats, name), getattr(want, name))
    assert (xq.stats.norm_sq, xq.stats.overflow) == (want.norm_sq, want.overflow)
    assert host_cuda.fake.moved == 2  # sums and counts, once each
    assert fb.quantize(put(x), stats=False).stats is None


def test_expansion(rng, host_cuda):  # noqa: F811
    x = data(rng, (8, 64))
    xq = fb.quantize(put(x), axis=0)
    np.testing.assert_array_equal(host(xq.expanded), fb.quantize(x, axis=0).expanded)
    assert host_cuda.calls["expand"] == 1 and host_cuda.fake.moved == 0
    fp8 = fb.quantize(put(x), "fp8", expand=True)
    assert fp8._expanded is fp8.packed and fp8.expanded is fp8.packed
    some = np.zeros((2, 16), np.float32)
    some[0] = 6
    np.testing.assert_array_equal(host(fb.quantize(put(some), "nvfp4", outer=0).expanded),
                                  fb.quantize(some, "nvfp4", outer=0).expanded)  # fmt: skip
    with pytest.raises(ValueError, match="products of a code and its block scale need more than E4M3"):
        _ = fb.quantize(put(x), "nvfp4").expanded
    with pytest.raises(ValueError, match="block scales of mxfp4"):
        _ = fb.quantize(put(x), "mxfp4").expanded
    for fmt in ("nvfp4", "mxfp4"):
        for array in (x, put(x)):
            with pytest.raises(ValueError, match=f"expand=True, but {fmt}"):
                fb.quantize(array, fmt, expand=True)
    assert fb.quantize(x, expand=True)._expanded is not None


# ---- out=
def test_out_is_written(rng):
    x, y = data(rng, (6, 40)), data(rng, (6, 40))
    for fmt in FORMATS:
        wide = fmt == "nvfp4_exact"
        xq = fb.quantize(put(x), fmt, expand=wide)
        held = [id(xq.packed), id(xq.outer_scale), id(xq._expanded) if wide else 0]
        assert fb.quantize(put(y), fmt, out=xq, expand=wide) is xq
        assert held == [id(xq.packed), id(xq.outer_scale), id(xq._expanded) if wide else 0]
        check(xq, reference.quantize(y, fmt), wide)
    xq = fb.quantize(put(x), outer=2, expand=True)
    fb.quantize(put(y), outer=2, out=xq)
    check(xq, reference.quantize(y, outer=2))
    assert xq._expanded is None
    for order in ((0, 1), (1, 0)):
        target = FakeArray(np.full(np.array((6, 40))[list(order)], 7, np.float32).transpose(order))
        assert fb.dequantize(xq, out=target) is target
        np.testing.assert_array_equal(target.array, reference.dequantize(reference.quantize(y, outer=2)))
    strided = FakeArray(np.zeros((6, 80), np.float32)[:, ::2])
    fb.dequantize(xq, out=strided)
    np.testing.assert_array_equal(strided.array, target.array)
    wide = FakeArray(np.zeros((6, 40)))
    fb.dequantize(xq, dtype="float64", out=wide)
    np.testing.assert_array_equal(wide.array, target.array)


def test_out_is_checked(rng):
    x = put(data(rng, (6, 40)))
    xq = fb.quantize(x)
    with pytest.raises(fb.ShapeError, match="pass an out made by the same call"):
        fb.quantize(put(np.ones((6, 41), np.float32)), out=xq)
    with pytest.raises(fb.ShapeError, match="out.outer_scale has shape"):
        fb.quantize(x, outer="tensor", out=xq)
    with pytest.raises(TypeError, match="out is a FakeArray, but a QuantizedArray"):
        fb.quantize(x, out=x)
    with pytest.raises(TypeError, match="x is a fake array on cuda:0 but out.packed is a numpy array"):
        fb.quantize(x, out=fb.quantize(x.array))
    bad = copy.copy(xq)
    bad.packed = FakeArray(np.zeros((20, 6), np.uint8).T)
    bad.packed.array = np.zeros((6, 48), np.uint8)[:, ::2]
    with pytest.raises(ValueError, match="out.packed is not contiguous"):
        fb.quantize(x, out=bad)
    bad.packed = FakeArray(x.array.view(np.uint8)[:, :24].copy())
    source = FakeArray(bad.packed.array.view(np.float32))
    with pytest.raises(ValueError, match="out.packed overlaps x"):
        fb.quantize(source, "fp8", out=fb.QuantizedArray(
            FakeArray(bad.packed.array.reshape(-1)[:36].reshape(6, 6)), None,
            put(np.ones((6, 1), np.float32)), "fp8", (6, 6), (0, 1)))  # fmt: skip
    for out, sentence in (
        (put(np.zeros((6, 41), np.float32)), r"out has shape \(6, 41\)"),
        (put(np.zeros((6, 40), np.float16)), "out has dtype float16"),
        (FakeArray(np.broadcast_to(np.float32(0), (6, 40))), "repeats the same memory"),
        (FakeArray(np.ones((6, 40), np.float32), 1), "xq.packed is a fake array on cuda:0 but out is a fake"),
        (np.zeros((6, 40), np.float32), "out is a numpy array on the host"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            fb.dequantize(xq, out=out)
    with pytest.raises(fb.DTypeError, match="dtype is int32"):
        fb.dequantize(xq, "int32")
    fb.dequantize(xq, out=put(np.zeros((6, 40), np.float32)))


# ---- devices and streams
def test_the_operands_device_and_stream_are_current(rng, host_cuda):  # noqa: F811
    fake, x = host_cuda.fake, data(rng, (4, 33))
    xq = fb.quantize(FakeArray(x, 1))  # `Fake` asserts that it allocates on the current device
    assert (xq.packed.device, fake.device) == (1, 0)
    fake.stream = 40
    fb.quantize(FakeArray(x, 1), stream=48)
    fb.dequantize(xq)
    fb.dequantize(xq, stream=Stream((0, 56)))
    assert host_cuda.streams == [0, 48, 40, 56] and fake.stream == 40
    with pytest.raises(fb.NonFiniteError):
        fb.quantize(FakeArray(x * np.nan, 1), nan="raise", stream=48)
    assert (fake.device, fake.stream) == (0, 40)  # also after a failure


class Stream:
    """Follows the protocol of CUDA's Python packages."""

    def __init__(self, answer, device=None):
        self.answer = answer
        if device is not None:
            self.device_id = device

    def __cuda_stream__(self):
        return self.answer


class TorchStream:
    cuda_stream = 77

    class device:
        index = 1


def test_streams(host_cuda):  # noqa: F811
    x = device.operand(put(np.ones((2, 16), np.float32)), "x")
    assert device.launch("op", None, (x,)) == 0
    assert device.launch("op", 9, (x,)) == device.launch("op", np.int64(9), (x,)) == 9
    assert device.launch("op", Stream((0, 5)), (x,)) == device.launch("op", Stream((0, 5), 0), (x,)) == 5
    assert device.launch("op", Stream((0, 5), -1), (x,)) == 5  # CuPy's null stream is of no device
    assert device.stream_handle("op", TorchStream(), 1) == 77
    for stream, sentence in (
        (TorchStream(), "stream is of cuda:1 but the operands are on cuda:0"),
        (Stream((0, 5), 3), "stream is of cuda:3"), (Stream((1, 5)), "version 1 of __cuda_stream__"),
        ("main", "stream is a str, but a stream is needed"), (True, "stream is a bool"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=sentence):
            device.launch("op", stream, (x,))
    with pytest.raises(ValueError, match="stream is -1"):
        device.launch("op", -1, (x,))
    with pytest.raises(ValueError, match="host arrays are computed before the call returns"):
        fb.quantize(np.ones((2, 16), np.float32), stream=1)


def test_mixed_operands_are_refused():
    x, y = (device.operand(FakeArray(np.ones(3, np.float32), i), f"x{i}") for i in (0, 1))
    with pytest.raises(TypeError, match="op: x0 is a fake array on cuda:0 but x1 is a fake array on cuda:1"):
        device.launch("op", None, (x, y))
    with pytest.raises(TypeError, match="x0 is a fake array on cuda:0 but b is a numpy array on the host"):
        device.check_together("op", [("x0", x), ("c", None), ("b", np.ones(3))])
    with pytest.raises(TypeError, match="b: is a numpy array on the host, but an array on the GPU is needed"):
        device.operand(np.ones(3), "b")
    with pytest.raises(fb.DTypeError, match="has dtype int32, but one of float64, float32"):
        fb.quantize(put(np.ones((2, 16), np.int32)))
    with pytest.raises(fb.ShapeError, match="x has no axes"):
        fb.quantize(put(np.float32(1)))
    with pytest.raises(TypeError, match="outer is a fake array on cuda:1"):
        fb.quantize(put(np.ones((2, 16), np.float32)), outer=put(np.int32(1), 1))
    with pytest.raises(fb.DTypeError, match="outer has dtype float32, but exponents"):
        fb.quantize(put(np.ones((2, 16), np.float32)), outer=put(np.float32(1)))
    mixed = fb.quantize(put(np.ones((2, 16), np.float32)))
    mixed.block_scale = host(mixed.block_scale)
    with pytest.raises(TypeError, match="xq.packed is a fake array on cuda:0 but xq.block_scale is a numpy"):
        fb.dequantize(mixed)


def test_host_and_device_arrays_do_not_mix():
    x, w, q = np.ones((1, 4, 4, 16), np.float32), np.ones((16, 3, 3, 16), np.float32), np.ones((1, 4, 2, 8))
    host_first, device_first = (
        "{0}: {1} is a numpy array on the host but {2} is a fake array on cuda:0; move or convert one".format,
        "{0}: {1} is a fake array on cuda:0 but {2} is a numpy array on the host; move or convert one".format,
    )
    for call, sentence in (
        (lambda: fb.conv2d(put(x), w), device_first("conv2d", "x", "w")),
        (lambda: fb.conv2d(x, put(w)), host_first("conv2d", "x", "w")),
        (lambda: fb.conv2d(x, fb.quantize(put(w))), host_first("conv2d", "x", "w")),
        (lambda: fb.conv2d(put(x), put(w), padding=1, out=x), device_first("conv2d", "x", "out")),
        (lambda: fb.conv2d(put(x, 1), put(w)), "x is a fake array on cuda:1 but w is a fake array on cuda:0"),
        (lambda: fb.conv2d_vjp(put(x), x, w), host_first("conv2d_vjp", "x", "g")),
        (lambda: fb.attention(put(q), put(q), q), device_first("attention", "q", "v")),
        (lambda: fb.attention_vjp(put(q), q, q, q), host_first("attention_vjp", "q", "g")),
        (lambda: fb.dequantize(fb.quantize(x), out=put(x)), "out is on 0 but the operands are on the host"),
        (lambda: fb.quantize(x, out=fb.quantize(put(x))),
         "x is a numpy array on the host but out.packed is a fake array on cuda:0"),
        (lambda: fb.compare(put(x)), "x: is a host_cuda.FakeArray, but NumPy arrays and PyTorch tensors"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=sentence):
            call()


def test_exponents_on_the_device(rng):
    x, e = data(rng, (6, 40)), rng.integers(-3, 3, (6, 1)).astype(np.int32)
    check(fb.quantize(put(x), outer=put(e)), reference.quantize(x, outer=e))
    check(fb.quantize(put(x), "nvfp4", outer=put(e)), reference.quantize(x, "nvfp4", outer=e))
    check(fb.quantize(put(x), outer=put(np.int32(1))), reference.quantize(x, outer=1))
    with pytest.raises(fb.ShapeError, match="do not broadcast to the stored rows"):
        fb.quantize(put(x), outer=put(np.ones((5, 1), np.int32)))


# ---- the container
def test_container_on_the_device(rng, tmp_path):
    x = data(rng, (6, 40))
    xq = fb.quantize(put(x), axis=0, expand=True)
    want = fb.quantize(x, axis=0)
    assert repr(xq) == repr(want) and xq.nbytes == want.nbytes
    twin = xq.copy()
    xq.packed.array[...] = 0
    np.testing.assert_array_equal(host(twin.packed), want.packed)
    assert type(twin.stats) is fb.QuantStats and twin.stats.norm_sq == want.stats.norm_sq
    back = pickle.loads(pickle.dumps(twin))
    np.testing.assert_array_equal(host(back.packed), want.packed)
    fb.save(tmp_path / "w.safetensors", {"w": twin, "plain": put(x)})
    read = fb.load(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(read["w"].packed, want.packed)
    np.testing.assert_array_equal(read["plain"], x)
    for view in (twin.T, twin.T.T, fb.quantize(put(data(rng, (2, 3, 32)))).transpose(2, 0, 1)):
        np.testing.assert_array_equal(host(fb.dequantize(view)), np.asarray(view))


def test_foreign_bytes(rng):
    want = fb.quantize(data(rng, (6, 48)))
    parts = (put(p) for p in (want.packed, want.block_scale, want.outer_scale))
    made = fb.from_parts(*parts, "nvfp4_exact")
    check(made, want)
    fp8 = fb.recast(made, "fp8")
    check(fp8, fb.recast(want, "fp8"))
    assert isinstance(fp8.packed, FakeArray)


def test_dispatch():
    x = put(np.ones((2, 16), np.float32))
    assert dispatch.backend_name(x) == dispatch.backend_name(fb.quantize(x)) == "cuda"
    assert dispatch.backend_name(device.operand(x, "x")) == "cuda"
    assert dispatch.backend_name(np.ones(3), fb.quantize(x.array)) == "cpu"
    assert dispatch.available_backends() == ["cpu", "cuda"]


def test_without_the_library(monkeypatch, host_cuda):  # noqa: F811
    """A device array cannot exist without a driver, but it can without our library."""
    monkeypatch.undo()
    monkeypatch.setitem(device._FRAMEWORKS, "fake", host_cuda.fake)
    monkeypatch.setitem(device._KINDS, FakeArray, host_cuda.fake)
    monkeypatch.setenv("FP4BF16_LIBRARY", "/nowhere/libfp4bf16.so")
    cuda.load.cache_clear()
    with pytest.raises(fb.LibraryError, match="FP4BF16_LIBRARY: /nowhere/libfp4bf16.so is no file; unset it"):
        fb.quantize(put(np.ones((2, 16), np.float32)))
    assert dispatch.available_backends() == ["cpu"]
    assert "is no file" in cuda.state()["problem"] and cuda.devices() == []
    monkeypatch.undo()
    cuda.load.cache_clear()


def test_without_a_driver(library, monkeypatch):
    monkeypatch.setattr(cuda, "load", lambda: library)
    if cuda.devices():
        pytest.skip("there is a GPU")
    with pytest.raises(fb.CudaError, match="no (NVIDIA driver|usable GPU)"):
        fb.quantize(put(np.ones((2, 16), np.float32)))
    assert dispatch.available_backends() == ["cpu"]
    assert "no NVIDIA driver" in cuda.state()["problem"] or "no usable GPU" in cuda.state()["problem"]


def test_arrays_are_recognised_without_imports():
    code = (
        "import sys, numpy as np, fp4bf16 as fb\n"
        "fb.quantize(np.ones((2, 16), np.float32))\n"
        "print(fb.quantize.__module__, sorted({'torch', 'cupy', 'cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fp4bf16.quantize", "[]"]


def test_failure_of_a_call_is_a_sentence(host_cuda):  # noqa: F811
    struct = host_cuda.ffi.new("fp4bf16_quantize_args*")
    with pytest.raises(ValueError, match="quantize: "):
        device.call("quantize", struct, 0)
    assert cuda.load() is host_cuda


# ---- pieces
def test_groups_and_rows(rng):
    assert groups((4, 5), (True, True)) == (1, 20) and groups((4, 5), (False, False)) == (20, 1)
    assert groups((4, 5), (True, False)) == (5, 1) and groups((2, 5, 3), (True, False, True)) == (5, 3)
    assert groups((2, 5, 3), (False, True, False)) is None
    for _ in range(200):  # whatever is walked is walked right
        shape = tuple(rng.integers(1, 5, rng.integers(1, 5)))
        base = np.arange(np.prod(shape) * 2 ** len(shape)).reshape([2 * n for n in shape])
        every = rng.integers(1, 3, len(shape))
        x = base[tuple(slice(0, n * s, s) for n, s in zip(shape, every, strict=True))]
        x = x.transpose(rng.permutation(x.ndim))
        steps = [s // x.itemsize for s in x.strides]
        axis = int(rng.integers(x.ndim))
        stored = np.moveaxis(x, axis, -1).reshape(-1, x.shape[axis])
        after = [None, int(np.prod(x.shape[axis + 1 :]))][rng.integers(2)]
        k_stride = steps.pop(axis)
        form = rows_of([n for i, n in enumerate(x.shape) if i != axis], steps, x.shape[axis], k_stride, after)
        if form is None:
            continue
        row, k = np.ogrid[: stored.shape[0], : stored.shape[1]]
        at = row // form.after * form.x_stride + k * form.k_stride + row % form.after
        np.testing.assert_array_equal(base.reshape(-1)[at], stored)
        assert after is None or form.after == after


def test_spans():
    a = np.zeros((8, 8), np.float32)
    whole = device.operand(FakeArray(a), "a")
    assert whole.span() == (a.ctypes.data, a.ctypes.data + a.nbytes) and whole.c_contiguous
    back = device.operand(FakeArray(a[::-1, ::-1]), "b")
    assert back.span() == whole.span() and not back.c_contiguous
    assert not device.overlap(device.operand(FakeArray(a[:4]), "c"), device.operand(FakeArray(a[4:]), "d"))
    assert isinstance(whole, DeviceArray) and POISON == 0xA5
