"""`QuantizedArray` as data: shapes and views, repr, copies, pickle, np.savez, what it refuses."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.python_ref.quantize import BLOCK

PARTS = ("packed", "block_scale", "outer_scale")


@pytest.fixture(params=list(BLOCK))
def xq(request, rng):
    return fb.quantize(rng.standard_normal((3, 5, 50)).astype(np.float32), request.param, axis=1)


def _equal(a: fb.QuantizedArray, b: fb.QuantizedArray) -> None:
    assert (a.format, a.shape, a.order, a.axis) == (b.format, b.shape, b.order, b.axis)
    for name in PARTS:
        p, q = getattr(a, name), getattr(b, name)
        assert (p is None) == (q is None)
        if p is not None:
            assert p.dtype == q.dtype
            np.testing.assert_array_equal(p, q)
    np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_geometry(xq):
    fmt = xq.format
    padded = -(-5 // fmt.multiple) * fmt.multiple
    assert (xq.shape, xq.ndim, xq.axis, xq.order) == ((3, 5, 50), 3, 1, (0, 2, 1))
    assert (xq.lead, xq.rows, xq.k, xq.k_padded, xq.size, len(xq)) == ((3, 50), 150, 5, padded, 750, 3)
    assert xq.packed.shape == (3, 50, padded // 2 if fmt.block else 5)
    assert xq.nbytes == sum(getattr(xq, n).nbytes for n in PARTS if getattr(xq, n) is not None)
    assert xq.dtype == ("float8_e4m3fn" if fmt.name == "fp8" else "float4_e2m1fn")
    if xq.outer_scale is not None:
        assert xq.outer_scale.ndim == 3 and xq.outer_scale.shape[-1] == 1


def test_transposes_are_views(xq):
    value = np.asarray(xq)
    for view, want in (
        (xq.T, value.T),
        (xq.mT, value.swapaxes(-1, -2)),
        (xq.transpose(2, 0, 1), value.transpose(2, 0, 1)),
        (xq.transpose((1, -1, 0)), value.transpose(1, 2, 0)),
        (xq.T.T, value),
    ):
        np.testing.assert_array_equal(np.asarray(view), want)
        assert view.packed is xq.packed and view.shape == want.shape
        assert view.shape[view.axis] == 5
    with pytest.raises(fb.ShapeError, match="not a permutation"):
        xq.transpose(0, 0, 1)
    with pytest.raises(fb.ShapeError, match="fewer than two axes"):
        _ = fb.quantize(np.ones(16, np.float32)).mT


def test_repr_says_what_is_kept(xq):
    text = repr(xq)
    for part in (xq.format.name, "(3, 5, 50)", "along axis 1", f"{xq.nbytes} bytes", "bits an element"):
        assert part in text
    assert "0 bits" in repr(fb.quantize(np.ones((0, 16), np.float32), xq.format.name))


def test_array_protocol(xq):
    value = np.asarray(xq)
    assert value.dtype == np.float32 and value.shape == xq.shape
    np.testing.assert_array_equal(np.asarray(xq, np.float64), value.astype(np.float64))
    np.testing.assert_array_equal(value + 1, np.add(xq, 1))
    with pytest.raises(ValueError, match="decoding makes a new array"):
        xq.__array__(copy=False)


def test_copies_share_nothing(xq):
    for other in (xq.copy(), copy.deepcopy(xq)):
        _equal(xq, other)
        assert not np.shares_memory(xq.packed, other.packed)
        other.packed[...] = 0
        assert xq.packed.any()
        assert other.stats.norm_sq == xq.stats.norm_sq
    assert copy.copy(xq).packed is xq.packed


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickle(xq, protocol):
    if xq.format.name == "nvfp4_exact":
        assert xq.expanded.any()  # the cache is not part of the data
    other = pickle.loads(pickle.dumps(xq, protocol))
    _equal(xq, other)
    assert other._expanded is None
    np.testing.assert_array_equal(other.stats.row_error_sq, xq.stats.row_error_sq)


def test_savez_of_the_fields(xq):
    file = io.BytesIO()
    np.savez(file, **{n: getattr(xq, n) for n in PARTS if getattr(xq, n) is not None}, shape=xq.shape,
             order=xq.order, format=xq.format.name)  # fmt: skip
    file.seek(0)
    z = np.load(file, allow_pickle=False)
    parts = [z[n] if n in z.files else None for n in PARTS]
    _equal(xq, fb.QuantizedArray(*parts, str(z["format"]), z["shape"], z["order"]))


def test_torch_container_pickles_and_copies(rng):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    xq = fb.quantize(torch.randn(4, 40))
    for other in (xq.copy(), pickle.loads(pickle.dumps(xq))):
        assert torch.equal(fb.dequantize(other), fb.dequantize(xq))
        assert other.packed.data_ptr() != xq.packed.data_ptr()


@pytest.mark.parametrize("change, message", [
    ({"packed": np.zeros((4, 8), np.uint8)}, r"packed of a nvfp4_exact .* \(4, 16\), but is \(4, 8\)"),
    ({"packed": None}, r"packed .*is None"),
    ({"block_scale": None}, r"block_scale .*must be \(4, 2\), but is None"),
    ({"order": (0, 0)}, r"order \(0, 0\) is not a permutation"),
    ({"shape": (), "order": ()}, "not a permutation of the 0 axes"),
    ({"format": "fp8"}, r"packed of a fp8 array"),
    ({"outer_scale": None}, r"outer_scale of a nvfp4_exact .* must be \(4, 1\), .* but is None"),
    ({"outer_scale": np.ones(4, np.float32)}, r"outer_scale .* must be \(4, 1\), .* but is \(4,\)"),
    ({"outer_scale": np.ones((3, 1), np.float32)}, r"but is \(3, 1\)"),
])  # fmt: skip
def test_parts_that_do_not_fit(change, message):
    xq = fb.quantize(np.ones((4, 32), np.float32))
    fields = {n: getattr(xq, n) for n in (*PARTS, "format", "shape", "order")} | change
    with pytest.raises(fb.ShapeError, match=message):
        fb.QuantizedArray(**fields)


def test_parts_of_another_kind():
    xq = fb.quantize(np.ones((4, 32), np.float32))
    fields = {n: getattr(xq, n) for n in (*PARTS, "format", "shape", "order")}
    with pytest.raises(fb.DTypeError, match="packed has dtype float32, 4 bytes an element, but bytes"):
        fb.QuantizedArray(**fields | {"packed": np.ones((4, 16), np.float32)})
    mx = fb.quantize(np.ones((4, 32), np.float32), "mxfp4")
    with pytest.raises(fb.ShapeError, match="of a mxfp4 array .* must be None, for the format has none"):
        fb.QuantizedArray(mx.packed, mx.block_scale, np.ones((4, 1), np.float32), "mxfp4", mx.shape, mx.order)


def test_formats():
    assert fb.get_format("mxfp4").bits == 4.25 and fb.get_format("fp8").bits == 8
    assert fb.get_format(fb.FORMATS["nvfp4"]) is fb.FORMATS["nvfp4"]
    with pytest.raises(ValueError, match="'mxfp' is not a format; did you mean 'mxfp4'"):
        fb.get_format("mxfp")


def test_assigned_bytes_are_expanded_anew(rng):
    one, two = (fb.quantize(rng.standard_normal((4, 32)).astype(np.float32)) for _ in range(2))
    for name in ("packed", "block_scale"):
        before = one.expanded
        setattr(one, name, getattr(two, name).copy())
        assert one.expanded is not before
    np.testing.assert_array_equal(one.expanded, two.expanded)
    one.packed[...] = 0
    one.packed = one.packed
    assert not one.expanded.any() and one.expanded is one.expanded
