"""The device front end with PyTorch's arrays, CPU tensors taken for CUDA ones."""

from __future__ import annotations

import time
import timeit
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest
from host_cuda import host_cuda  # noqa: F401  (a fixture)

import fp4bf16 as fb
from fp4bf16 import adapters, device
from fp4bf16.backends import cuda_gemm, cuda_tape
from fp4bf16.python_ref import quantize as reference

torch = pytest.importorskip("torch")


class HostTorch(adapters.Torch):
    """Says of every tensor that it is on the device, number -1, whose current stream is 0."""

    def __init__(self):
        super().__init__(torch)
        self.raw_stream, self.current_device = (lambda place: 0), (lambda: -1)

    def on_device(self, x) -> bool:
        return x.device.type == "cpu"

    def device_context(self, place):
        return nullcontext()


@pytest.fixture(autouse=True)
def on_host(monkeypatch, host_cuda):  # noqa: F811
    adapter, host_cuda.tracked = HostTorch(), False
    monkeypatch.setitem(device._FRAMEWORKS, "torch", adapter)
    for kind in (torch.Tensor, torch.nn.Parameter):
        monkeypatch.setitem(device._KINDS, kind, adapter)


def check(xq, want) -> None:
    for name in ("packed", "block_scale", "outer_scale"):
        got, ref = getattr(xq, name), getattr(want, name)
        assert (got is None) == (ref is None), name
        if ref is not None:
            assert type(got) is torch.Tensor
            np.testing.assert_array_equal(got.numpy(), ref, err_msg=name)


@pytest.mark.parametrize("fmt", ["nvfp4_exact", "nvfp4", "mxfp4", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_quantize_equals_reference(rng, fmt, dtype):
    x = torch.from_numpy(rng.standard_normal((4, 6, 40)).astype(np.float32)).to(getattr(torch, dtype))
    plain = x.float().numpy()
    for axis in range(3):
        xq = fb.quantize(x, fmt, axis)
        check(xq, reference.quantize(plain, fmt, axis))
        want = reference.dequantize(reference.quantize(plain, fmt, axis))
        back = fb.dequantize(xq, dtype=x.dtype)
        assert back.dtype == x.dtype
        assert torch.equal(back, torch.from_numpy(np.ascontiguousarray(want)).to(x.dtype))
        zeros = reference.quantize(np.zeros_like(plain), fmt, axis)
        out = torch.empty(x.shape, dtype=x.dtype)
        assert fb.dequantize(xq, dtype=dtype, out=out) is out and torch.equal(out, back)
        check(fb.quantize(torch.zeros_like(x), fmt, axis, out=xq), zeros)


def test_views(rng):
    x = torch.from_numpy(rng.standard_normal((6, 8, 34)).astype(np.float32))
    views = [
        x, x.mT, x.permute(2, 0, 1), x[:, ::2], x[1:, :, 1:], x[..., :1].expand(6, 8, 34), x[:1],
        x.as_strided((4, 4, 8), (3, 40, 2)),
    ]  # fmt: skip
    for view in views:
        for axis in range(view.ndim):
            for rounding in ("nearest", "stochastic"):
                want = reference.quantize(view.numpy(), axis=axis, rounding=rounding, seed=3)
                check(fb.quantize(view, axis=axis, rounding=rounding, seed=3), want)


def test_parameters_and_gradients(rng):
    x = torch.nn.Parameter(torch.from_numpy(rng.standard_normal((4, 32)).astype(np.float32)))
    want = reference.quantize(x.detach().numpy())
    check(fb.quantize(x), want)
    check(fb.quantize(x * 1), want)
    assert not fb.dequantize(fb.quantize(x)).requires_grad


def test_out_is_what_is_returned(monkeypatch):
    monkeypatch.setattr(cuda_tape, "_local", type(cuda_tape._local)())  # no plans of another emulation
    cuda_gemm._struct.cache_clear()
    a, b, out = torch.randn(8, 32), torch.randn(32, 4), torch.zeros(8, 4, requires_grad=True)
    for track in ("bf16", "fp4", "reference"):
        for _ in range(2):  # the second by a plan
            assert fb.matmul(a, b, track=track, out=out) is out
            assert torch.allclose(out, a @ b, atol=4) and out.abs().max() > 4
            out.detach().zero_()


def test_what_is_not_taken():
    x = torch.ones(4, 32)
    for bad, sentence in (
        (x.to_sparse(), r"layout torch.sparse_coo.*pass x.to_dense\(\)"),
        (torch.view_as_complex(torch.ones(4, 32, 2)).conj().imag, r"negates numbers.*pass x.resolve_neg\(\)"),
        (torch.ones(4, 32, dtype=torch.complex64).conj(), r"pass x.resolve_conj\(\)"),
        (torch.ones(4, 32, dtype=torch.int32), "has dtype int32, but one of"),
        (torch.ones(4, 32, dtype=torch.float8_e4m3fn), "has dtype uint8, but one of"),
    ):
        with pytest.raises(TypeError, match=sentence):
            fb.quantize(bad)
    released = torch.ones(4, 32)
    released.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="whose memory was released"):
        fb.quantize(released)
    with pytest.raises(TypeError, match=r"x: is a PyTorch tensor on meta, which has a shape but no numbers"):
        fb.quantize(torch.ones(4, 32, device="meta"))
    with pytest.raises(TypeError, match="x: is a PyTorch tensor without memory of its own"):
        torch.func.vmap(lambda row: fb.dequantize(fb.quantize(row)))(x)


def test_bytes_of_other_dtypes(rng):
    want = reference.quantize(rng.standard_normal((4, 32)).astype(np.float32))
    kinds = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    packed, scale = (torch.from_numpy(a).view(k) for a, k in zip(want[:2], kinds, strict=True))
    xq = fb.QuantizedArray(packed, scale, torch.from_numpy(want.outer_scale), "nvfp4_exact", (4, 32), (0, 1))
    np.testing.assert_array_equal(fb.dequantize(xq).numpy(), reference.dequantize(want))
    np.testing.assert_array_equal(np.asarray(xq), reference.dequantize(want))
    assert xq.copy().packed.dtype == kinds[0]


def test_exponents_are_exact():
    e = torch.arange(-130, 140)
    got = device.powers_of_two(device.operand(e, "e"))
    np.testing.assert_array_equal(got.owner.numpy(), np.exp2(np.clip(np.arange(-130, 140), -119, 120)))
    like = device.operand(torch.ones(1), "x")
    host = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16)
    made = device.from_host(host, like)
    assert made.dtype == "bfloat16" and (device.to_host(made.owner) == host).all()


def test_stream_objects():
    class Like:
        cuda_stream, device = 8, torch.device("cuda", 2)

    assert device.stream_handle("op", Like(), 2) == 8
    with pytest.raises(TypeError, match="stream is of cuda:2 but the operands are on cuda:0"):
        device.stream_handle("op", Like(), 0)


def test_a_wrap_is_cheap():
    """About a microsecond of this thread's time, whatever else the machine does; ten, for a slower core."""
    x = torch.ones(64, 64)
    timer = timeit.Timer(lambda: device.operand(x, "x"), timer=time.thread_time)
    best = min(timer.repeat(number=2000, repeat=5)) / 2000
    assert best < 10e-6


def test_nested_tensors_are_refused():
    x = torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)])
    for call in (lambda: fb.quantize(x), lambda: fb.matmul(torch.ones(2, 32), torch.ones(32, 4), residual=x)):
        with pytest.raises(TypeError, match="is a nested PyTorch tensor, but one shape is needed; pass"):
            call()
