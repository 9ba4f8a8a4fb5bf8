"""conv2d of device arrays on an emulated GPU, beside the CPU's results.

The emulation sums in float64, so what is compared is which bytes and scales the kernels get, where results
go, every sentence, what is allocated and that nothing is read back.
"""

from __future__ import annotations

import numpy as np
import pytest
from conv_cases import (
    BF16,
    CASES,
    IDS,
    TRACKS,
    close,
    draw,
    gpu,  # noqa: F401  (a fixture)
    image,
    near,
    on_device,
    pictures,
    strong,
)
from host_cuda import FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

import fp4bf16 as fb
from fp4bf16.conv import conv2d_dgrad, conv2d_wgrad

pytestmark = pytest.mark.usefixtures("gpu")


# ---- values ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("track,fmt", TRACKS)
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_convolution_is_the_cpus(rng, case, track, fmt):
    x_shape, w_shape, stride, padding = case
    x, w = pictures(rng, x_shape), draw(rng, w_shape)
    how = {"stride": stride, "padding": padding, "track": track, "format": fmt}
    want = fb.conv2d(x, w, **how)
    for _ in range(2):  # the second time by the plan of the first
        y = fb.conv2d(put(x), put(w), **how)
        assert isinstance(y, FakeArray) and y.dtype == want.dtype
        close(y, want)
    if track == "fp4":
        xq = fb.quantize(x, fmt, outer=image(fmt), search="fast")
        wq = fb.quantize(w, fmt, outer=image(fmt))
        for left, right in ((put(x), on_device(wq)), (on_device(xq), on_device(wq)), (on_device(xq), put(w))):
            for _ in range(2):
                close(fb.conv2d(left, right, **how), want)
        bf16 = how | {"track": "bf16"}
        near(fb.conv2d(on_device(xq), on_device(wq), **bf16), fb.conv2d(xq, wq, **bf16), 1e-5)


@pytest.mark.parametrize("fmt", ["nvfp4_exact", "nvfp4", "fp8"])
@pytest.mark.parametrize("outer", ["row", "tensor", "array", "mixed"])
def test_any_outer_scale(rng, fmt, outer):
    """A scale a pixel is decoded into BF16: exact where it is a power of two, else rounded."""
    x, w = pictures(rng, (3, 5, 6, 40)), draw(rng, (6, 3, 3, 40))
    over = rng.integers(-2, 3, (3, 1, 6, 1)) if outer == "array" else "row" if outer == "mixed" else outer
    xq = fb.quantize(x, fmt, outer=over, search="fast")
    wq = fb.quantize(w, fmt, outer="tensor" if outer in ("array", "mixed") else outer)
    want = fb.conv2d(xq, wq, padding=1)
    exact = fmt == "nvfp4_exact" or outer in ("tensor", "array")
    y = fb.conv2d(on_device(xq), on_device(wq), padding=1)
    close(y, want) if exact else near(y, want, 2.0**-8)  # at most that of an element, and half in the mean
    other = "mxfp4" if outer == "mixed" else fmt
    mixed = fb.conv2d(on_device(xq), on_device(fb.quantize(w, other)), padding=1)
    near(mixed, fb.conv2d(xq, fb.quantize(w, other), padding=1), 2.0**-8)


@pytest.mark.parametrize("dtypes,result", [
    (("float32", "float32"), "float32"), (("bfloat16", "bfloat16"), "bfloat16"), (("float64", "float64"),
    "float64"), (("float16", "float16"), "float16"), (("float32", "bfloat16"), "float32"), (("float64",
    "bfloat16"), "float64"),
])  # fmt: skip
@pytest.mark.parametrize("track", ["bf16", "fp4", "reference"])
def test_result_dtype(rng, dtypes, result, track):
    x, w = (
        draw(rng, s).astype(fb.interop.np_dtype(d))
        for s, d in zip(((2, 5, 5, 24), (8, 3, 3, 24)), dtypes, strict=True)
    )
    for dtype in (None, "float32", "bfloat16", "float64"):
        y = fb.conv2d(put(x), put(w), padding=1, track=track, dtype=dtype)
        assert str(y.dtype) == (dtype or result)
        want = fb.conv2d(x, w, padding=1, track=track, dtype="float64")
        near(y, want, {2: 4e-3, 4: 1e-6, 8: 1e-6}[y.dtype.itemsize])


@pytest.mark.parametrize("track", ["bf16", "fp4", "dual", "reference"])
@pytest.mark.parametrize("fmt", ["nvfp4_exact", "nvfp4"])
@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
def test_epilogue(rng, track, fmt, activation):
    x, w, bias = draw(rng, (2, 7, 6, 32)), strong(rng, (19, 3, 3, 32)), draw(rng, 38)[::2]
    a, b = (fb.DualWeight(w, 4, fmt), fb.DualWeight(put(w), 4, fmt)) if track == "dual" else (w, put(w))
    how = {"track": track, "activation": activation, "padding": 1}
    how["format"] = None if track == "dual" else fmt
    same = near if track == "dual" else close
    for dtype in (np.float32, BF16, np.float64):
        residual = draw(rng, (2, 19, 7, 6)).astype(dtype).transpose(0, 2, 3, 1)
        want = fb.conv2d(x, a, bias=bias, residual=residual, **how)
        for r in (residual, np.ascontiguousarray(residual)):
            for _ in range(2):
                same(fb.conv2d(put(x), b, bias=FakeArray(bias), residual=FakeArray(r), **how), want)
    same(fb.conv2d(put(x), b, residual=put(residual), **how), fb.conv2d(x, a, residual=residual, **how))


def test_any_strides(rng):
    """Channels apart as PyTorch's NCHW has them, steps, negative and zero strides, addresses not aligned."""
    base = draw(rng, (4, 12, 11, 48)).astype(BF16)
    nchw = np.ascontiguousarray(base.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    views = {
        "whole": base, "nchw": nchw, "crop": base[:, 1:-1, 2:], "nchw crop": nchw[:, 1:, 3:, ::2],
        "steps": base[::2, ::3, ::2], "negative": base[:, ::-1, ::-1], "channels": base[..., 8:40],
        "odd": base[..., 3:40], "turned": base.swapaxes(1, 2), "every other": base[..., ::2],
        "repeated": np.broadcast_to(base[:1], base.shape), "one line": base[:, 5:6], "row": base[2:3, :, 4:5],
        "one channel": base[..., 7:8],
    }  # fmt: skip
    for dtype in (BF16, np.float32, np.float64):
        for x in views.values():
            x = x if dtype == BF16 else x.astype(dtype, order="K", copy=False)
            w = draw(rng, (8, x.shape[3], 3, 3)).astype(dtype).transpose(0, 2, 3, 1)
            g = draw(rng, (*x.shape[:3], 8)).astype(dtype)
            for track in ("bf16", "fp4"):
                how = {"padding": 1, "track": track}
                want = fb.conv2d(x, w, dtype="float32", **how)
                for _ in range(2):
                    close(fb.conv2d(FakeArray(x), FakeArray(w), dtype="float32", **how), want)
                got = fb.conv2d_vjp(put(g), FakeArray(x), FakeArray(w), **how)
                for a, b in zip(got, fb.conv2d_vjp(g, x, w, **how), strict=True):
                    near(a, b, 4e-3 if dtype == BF16 else 1e-6)


def test_out(rng):
    makers = [
        lambda s, d: np.full(s, 7, d),
        lambda s, d: np.full((*s[:-1], 16), 7, d)[..., ::2],
        lambda s, d: np.full((*s[:-1], 24), 7, d)[..., 8:16],
        lambda s, d: np.full((s[0], s[3], s[1], s[2]), 7, d).transpose(0, 2, 3, 1),
        lambda s, d: np.full((4, *s[1:]), 7, d)[::-2],
    ]
    x, w, g = draw(rng, (2, 5, 6, 16)), draw(rng, (8, 3, 3, 16)), draw(rng, (2, 5, 6, 8))
    for track in ("bf16", "fp4", "reference"):
        want = fb.conv2d(x, w, padding=1, track=track)
        dx = conv2d_dgrad(g, w, x.shape, padding=1, track=track)
        dw = conv2d_wgrad(g, x, (3, 3), padding=1, track=track)
        for dtype in (np.float32, BF16, np.float64, np.float16):
            for make in makers:
                limit = 4e-3 if np.dtype(dtype).itemsize == 2 else 1e-6
                for _ in range(2):
                    memory = make(want.shape, dtype)
                    out, how = FakeArray(memory), {"padding": 1, "track": track, "dtype": str(memory.dtype)}
                    assert fb.conv2d(put(x), put(w), out=out, **how) is out
                    near(memory, want, limit)
                    if memory.base is not None and memory.base.shape[-1] == 16:
                        assert (memory.base[..., 1::2] == 7).all()
                    if memory.base is not None and memory.base.shape[-1] == 24:
                        assert (memory.base[..., :8] == 7).all() and (memory.base[..., 16:] == 7).all()
                memory = make(dx.shape, dtype) if make is not makers[1] and make is not makers[2] else None
                if memory is not None:
                    conv2d_dgrad(put(g), put(w), x.shape, out=FakeArray(memory), **how)
                    near(memory, dx, limit)
                memory = np.full(dw.shape, 7, dtype)
                conv2d_wgrad(put(g), put(x), (3, 3), out=FakeArray(memory), **how)
                near(memory, dw, limit)
    shared = put(x)
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        fb.conv2d(shared, put(draw(rng, (16, 1, 1, 16))), out=shared)
    with pytest.raises(ValueError, match="out: dx and dw overlap"):
        both = put(np.zeros(8 * 3 * 3 * 16 + 960, np.float32)).array
        dx, dw = both[:960].reshape(x.shape), both[900 : 900 + 1152].reshape(w.shape)
        fb.conv2d_vjp(put(g), put(x), put(w), padding=1, out=(FakeArray(dx), FakeArray(dw), None))


# ---- what is launched --------------------------------------------------------------------------------------
def test_launches_and_memory(rng, gpu):  # noqa: F811
    """Prepared operands: one launch and the result alone. A plain x: one quantiser before it."""
    x, w = put(draw(rng, (2, 6, 6, 32)).astype(BF16)), put(draw(rng, (16, 3, 3, 32)).astype(BF16))
    wq, dual = fb.quantize(w, outer="image"), fb.DualWeight(put(w.array), 8)
    xq = fb.quantize(x, outer="image", search="fast")
    wq.expanded, xq.expanded  # noqa: B018
    g = put(draw(rng, (2, 6, 6, 16)).astype(BF16))
    how = {"padding": 1}
    wanted = {
        "bf16": (lambda: fb.conv2d(x, w, **how), {"conv2d": 1}, 1),
        "view": (lambda: fb.conv2d(FakeArray(x.array[:, 1:, 2:]), w, **how), {"conv2d": 1}, 1),
        "prepared": (lambda: fb.conv2d(xq, wq, **how), {"conv2d": 1}, 1),
        "fp4": (lambda: fb.conv2d(x, wq, **how), {"quantize": 1, "conv2d": 1}, 4),
        "dual": (lambda: fb.conv2d(x, dual, **how), {"quantize": 1, "conv2d": 2}, 5),
        "float32": (lambda: fb.conv2d(put(draw(rng, x.shape)), w, **how), {"convert": 1, "conv2d": 1}, 2),
        "refresh": (lambda: dual.refresh(factors=False), {"quantize": 1, "gemm": 1}, 2),
        "dgrad": (lambda: conv2d_dgrad(g, w, x.shape, **how), {"conv2d_dgrad": 1}, 1),
        "wgrad": (lambda: conv2d_wgrad(g, x, (3, 3), dtype="float32", **how), {"conv2d_wgrad": 1}, 2),
    }
    moved = gpu.fake.moved
    for name, (call, launches, made) in wanted.items():
        for planned in (False, True):  # a plan makes all temporary memory at once
            gpu.calls.clear(), gpu.fake.made.clear()
            call()
            made = min(made, 2) if planned else made
            assert (dict(gpu.calls), len(gpu.fake.made)) == (launches, made), name
    assert gpu.fake.moved == moved, "something was read back"


def test_plans_see_new_contents_and_addresses(rng):
    w = fb.DualWeight(put(strong(rng, (16, 3, 3, 32))), 8)
    for _ in range(4):
        a, b, bias = pictures(rng, (2, 5, 5, 32), BF16), draw(rng, (16, 3, 3, 32)).astype(BF16), draw(rng, 16)
        x, how = put(a), {"padding": 1, "dtype": "float32"}
        close(fb.conv2d(x, put(b), bias=put(bias), **how), fb.conv2d(a, b, bias=bias, **how))
        bq = fb.quantize(put(b), outer="image")
        close(fb.conv2d(x, bq, **how), fb.conv2d(a, b, track="fp4", **how))
        w.refresh(put(b.astype(np.float32)))
        near(fb.conv2d(x, w, **how), fb.conv2d(a, fb.DualWeight(b, 8), **how))
    with fb.tracks("bf16"):
        close(fb.conv2d(x, bq, **how), fb.conv2d(a, fb.quantize(b, outer="image"), **how))
    for padding in (1, ((1, 1), (1, 1)), [[1, 1], [1, 1]]):
        how = {"stride": 2, "padding": padding, "dtype": "float32"}
        close(fb.conv2d(x, put(b), **how), fb.conv2d(a, b, **how))


def test_streams_and_devices(rng, gpu):  # noqa: F811
    a, b = draw(rng, (1, 5, 5, 16)), draw(rng, (4, 3, 3, 16))
    x, w = put(a, 1), put(b, 1)  # device 0 is current
    gpu.streams.clear()
    for stream in (None, 77):
        close(fb.conv2d(x, w, stream=stream), fb.conv2d(a, b))
        g = put(np.ones((1, 3, 3, 4), np.float32), 1)
        near(fb.conv2d_vjp(g, x, w, stream=stream)[0], fb.conv2d_vjp(g.array, a, b)[0])
    assert set(gpu.streams) == {0, 77} and gpu.fake.device == 0 and gpu.fake.stream == 0
    assert fb.conv2d(x, w).device == 1
    with pytest.raises(TypeError, match="x is a fake array on cuda:0 but w is a fake array on cuda:1"):
        fb.conv2d(put(a), w)
    with pytest.raises(TypeError, match="bias is a fake array on cuda:0"):
        fb.conv2d(x, w, bias=put(np.zeros(4, np.float32)))


def test_mixed_host_and_device(rng):
    a, b = draw(rng, (1, 5, 5, 16)), draw(rng, (4, 3, 3, 16))
    pairs = (put(a), b), (a, put(b)), (put(a), fb.quantize(b)), (a, fb.DualWeight(put(b), 2))
    for left, right in pairs:
        with pytest.raises(TypeError, match="x is a .* array on .* but w is a .* array on "):
            fb.conv2d(left, right)
    with pytest.raises(TypeError, match="bias is a numpy array on the host"):
        fb.conv2d(put(a), put(b), bias=np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="bias is a fake array on cuda:0 but the operands are host arrays"):
        fb.conv2d(a, b, bias=put(np.zeros(4, np.float32)))
    for call in (
        lambda: fb.conv2d_vjp(np.zeros((1, 3, 3, 4), np.float32), put(a), put(b)),
        lambda: conv2d_dgrad(np.zeros((1, 3, 3, 4), np.float32), put(b), a.shape),
        lambda: conv2d_wgrad(put(np.zeros((1, 3, 3, 4), np.float32)), a, (3, 3)),
    ):
        with pytest.raises(TypeError, match="on the host"):
            call()


def test_sentences_are_the_cpus(rng):
    """A wrong call on the device raises what it raises on the CPU."""
    x, w, g = draw(rng, (1, 4, 4, 16)), draw(rng, (8, 3, 3, 16)), draw(rng, (1, 2, 2, 8))
    calls = [
        lambda p: fb.conv2d(p(x), p(w[..., :8])),
        lambda p: fb.conv2d(p(x[0]), p(w)),
        lambda p: fb.conv2d(p(x), p(w.reshape(8, -1))),
        lambda p: fb.conv2d(p(x[:, :2]), p(w)),
        lambda p: fb.conv2d(p(x), fb.quantize(p(w), axis=0)),
        lambda p: fb.conv2d(p(x), p(w), stride=0),
        lambda p: fb.conv2d(p(x), p(w), padding="same"),
        lambda p: fb.conv2d(p(x), p(w), padding=-1),
        lambda p: fb.conv2d(p(x), p(w), bias=p(np.ones(3, np.float32))),
        lambda p: fb.conv2d(p(x), p(w), residual=p(x)),
        lambda p: fb.conv2d(p(x.astype(np.int64)), p(w)),
        lambda p: fb.conv2d(p(x), p(w), dtype="int8"),
        lambda p: fb.conv2d(p(x), p(w), activation="relu"),
        lambda p: fb.conv2d(p(x), p(w), track="fp5"),
        lambda p: fb.conv2d(p(x), p(w), track="dual"),
        lambda p: fb.conv2d(p(x), p(w), accumulate="quick"),
        lambda p: fb.conv2d(p(x), p(w), track="fp4", certify="yes"),
        lambda p: fb.conv2d(p(x), fb.DualWeight(p(w[:, 0, 0].T.copy()))),
        lambda p: fb.conv2d(fb.DualWeight(p(w)), p(w)),
        lambda p: fb.conv2d(p(x), p(w), bias=fb.quantize(p(x))),
        lambda p: fb.conv2d(p(x), p(w), out=p(np.ones((1, 2, 2, 7), np.float32))),
        lambda p: fb.conv2d_vjp(p(x[..., :8]), p(x), p(w)),
        lambda p: conv2d_dgrad(p(x[..., :8]), p(w), (1, 9, 9, 16)),
        lambda p: conv2d_wgrad(p(x[..., :8]), p(x), (3, 3)),
        lambda p: fb.conv2d_vjp(fb.quantize(p(g)), p(x), p(w)),
        lambda p: fb.conv2d_vjp(p(g), fb.quantize(p(x)), p(w), save="bf16"),
        lambda p: fb.conv2d_vjp(p(g), p(x), p(w), save="fp5"),
        lambda p: fb.conv2d_vjp(p(g), p(x), p(w), out=(None, None)),
        lambda p: fb.DualWeight(p(w), outliers=1),
        lambda p: fb.DualWeight(p(w), rank=-1),
        lambda p: fb.DualWeight(p(np.full((8, 3, 3, 16), np.nan, np.float32))),
        lambda p: fb.DualWeight(p(w[0])),
    ]
    for i, call in enumerate(calls):
        with pytest.raises(Exception) as there:
            call(np.asarray)
        with pytest.raises(type(there.value)) as here:
            call(put)
        assert str(here.value).replace("fake", "numpy") == str(there.value), i


def test_non_finite_propagates(rng):
    x, w = draw(rng, (2, 4, 4, 16)), draw(rng, (8, 3, 3, 16))
    x[1, 0, 0, 3] = np.nan
    for track in ("bf16", "fp4"):
        y = fb.conv2d(put(x), put(w), padding=1, track=track).array
        assert np.isnan(y[1, :2, :2]).all() and np.isfinite(y[0]).all() and np.isfinite(y[1, 2:]).all()
