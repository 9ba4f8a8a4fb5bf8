"""Arrays at the door of the primitives: what is taken as it is, and what is refused in a sentence."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.errors import DTypeError, ShapeError
from fp4bf16.interop import shares_memory


@pytest.fixture
def operands(rng):
    return rng.standard_normal((4, 32)).astype(np.float32), rng.standard_normal((32, 6)).astype(np.float32)


# ---- operands ----------------------------------------------------------------------------------------------
def test_masked_arrays_are_refused(operands):
    a, b = operands
    masked = np.ma.masked_array(a, a > 0)
    out = np.ma.zeros((4, 6), np.float32)
    for call in (lambda: fb.matmul(masked, b), lambda: fb.quantize(masked), lambda: fb.matmul(a, b, out=out),
                 lambda: fb.linear(a, b.T, masked[0])):  # fmt: skip
        with pytest.raises(TypeError, match="is a masked array, whose masked elements have no value"):
            call()


class Odd(np.ndarray):
    """A subclass with rules of its own, which must not reach into the kernels."""

    def __mul__(self, other):
        raise AssertionError("the subclass's own product was called")

    __imul__ = __mul__


@pytest.mark.parametrize("track", ("fp4", "bf16", "reference"))
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_subclasses_are_taken_as_the_arrays_that_they_are(operands, track, tmp_path):
    a, b = operands
    a.tofile(tmp_path / "a")
    want = fb.matmul(a, b, track=track)
    for x in (a.view(Odd), a.view(np.matrix), np.memmap(tmp_path / "a", np.float32, "r", shape=a.shape)):
        y = fb.matmul(x, b, track=track)
        assert type(y) is np.ndarray
        np.testing.assert_array_equal(y, want)
        np.testing.assert_array_equal(fb.matmul(x, b[:, 0], track=track), fb.matmul(a, b[:, 0], track=track))


def test_ragged_lists_name_their_operand():
    with pytest.raises(TypeError, match=r"^b: is no array .* one length"):
        fb.matmul([[1.0, 2.0]], [[1.0], [2.0, 3.0]])


def test_torch_tensors_without_plain_numbers(operands):
    torch = pytest.importorskip("torch")
    a, b = map(torch.from_numpy, operands)
    for x, sentence in (
        (a.to("meta"), "on meta, which has a shape but no numbers"),
        (a.to_sparse(), r"layout torch.sparse_coo.*a.to_dense\(\)"),
        (torch._neg_view(a), r"negates numbers when it is read.*a.resolve_neg\(\)"),
        (a.to(torch.complex64).conj(), r"a.resolve_conj\(\)"),
        (a.to(torch.float8_e5m2), "dtype torch.float8_e5m2 that has no NumPy view"),
        (a.int(), r"has dtype int32.*convert it with a.float\(\)"),
    ):
        with pytest.raises(TypeError, match=sentence):
            fb.matmul(x, b)
    with pytest.raises(TypeError, match="that has no NumPy view"):
        torch.vmap(lambda x: fb.matmul(x, b))(a[None])


# ---- out ---------------------------------------------------------------------------------------------------
def test_out_that_repeats_its_memory(operands):
    """Writing rows over each other would return the last one everywhere."""
    a, b = operands
    row = np.zeros(6, np.float32)
    repeated = np.lib.stride_tricks.as_strided(row, (4, 6), (0, 4))
    with pytest.raises(ValueError, match="repeats the same memory"):
        fb.matmul(a, b, out=repeated)
    assert fb.matmul(a[:0], b, out=np.empty((0, 6), np.float32)).shape == (0, 6)  # whose strides are 0 too
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="repeats the same memory"):
        fb.matmul(torch.from_numpy(a), torch.from_numpy(b), out=torch.zeros(1, 6).expand(4, 6))
    assert not row.any()


def test_out_that_cannot_be_written_to(operands):
    a, b = (x.astype(np.float64) for x in operands)
    with pytest.raises(TypeError, match="out is a list, which cannot be written to"):
        fb.matmul(a, b, out=[[0.0] * 6] * 4)
    with pytest.raises(DTypeError, match="out has dtype >f8 but .* float64; allocate out with that dtype$"):
        fb.matmul(a, b, out=np.zeros((4, 6), ">f8"))


def test_overlap_of_odd_strides_ends_soon():
    """Whether two strided arrays meet is NP-hard; NumPy alone looks for as long as it takes."""
    memory = np.zeros(4_000_000, np.uint8)
    view = np.lib.stride_tricks.as_strided
    a = view(memory, (40,) * 4, (1009, 1511, 2003, 3001))
    b = view(memory[1:], (40,) * 4, (1013, 1523, 2011, 3011))
    assert shares_memory(a, b)
    assert not shares_memory(memory[::2], memory[1::2])


# ---- containers --------------------------------------------------------------------------------------------
def test_a_failed_call_leaves_out_as_it_was(operands):
    a, _ = operands
    for out in (fb.quantize(a), fb.quantize(a, outer="tensor")):
        out.outer_scale.flags.writeable = out.outer_scale.size == 1
        before = fb.dequantize(out)
        with pytest.raises(ValueError, match=r"outer_scale (is read-only|has shape \(1, 1\), but outer=)"):
            fb.quantize(7 * a, out=out)
        np.testing.assert_array_equal(fb.dequantize(out), before)


def test_signed_bytes_are_bytes(operands):
    a, b = operands
    q = fb.quantize(a)
    signed = fb.QuantizedArray(q.packed.view(np.int8), q.block_scale.view(np.int8), q.outer_scale, q.format,
                               q.shape, q.order)  # fmt: skip
    np.testing.assert_array_equal(fb.dequantize(signed), fb.dequantize(q))
    np.testing.assert_array_equal(fb.matmul(signed, b), fb.matmul(q, b))
    fb.quantize(2 * a, out=signed)
    np.testing.assert_array_equal(fb.dequantize(signed), fb.dequantize(fb.quantize(2 * a)))


@pytest.mark.parametrize("format", ("nvfp4_exact", "mxfp4", "fp8"))
def test_more_numbers_than_bytes_are_never_read(format, operands):
    a, b = operands
    q = fb.quantize(a, format)
    q.shape = (4, 320)
    for call in (lambda: fb.dequantize(q), lambda: fb.matmul(q, np.tile(b, (10, 1)))):
        with pytest.raises(ShapeError, match=r"packed of a .* of shape \(4, 320\) .* must be \(4, "):
            call()
    with pytest.raises(ShapeError, match="packed of a .* must be"):
        pickle.loads(pickle.dumps(q))


def test_parts_that_are_no_arrays(operands):
    q = fb.quantize(operands[0])
    with pytest.raises(TypeError, match="packed is a list, but an array is needed"):
        fb.QuantizedArray(q.packed.tolist(), q.block_scale, q.outer_scale, q.format, q.shape, q.order)
    with pytest.raises(TypeError, match="outer_scale is a float"):
        fb.QuantizedArray(q.packed, q.block_scale, 1.0, q.format, q.shape, q.order)
    with pytest.raises(ShapeError, match=r"axes \(0, 5\) are not a permutation of the 2 axes"):
        q.transpose(0, 5)
    with pytest.raises(ValueError, match=r"format: \['fp8'\] is not a format"):
        fb.quantize(operands[0], ["fp8"])


# ---- files -------------------------------------------------------------------------------------------------
def test_names_of_files_and_tensors(operands, tmp_path):
    path = tmp_path / ("n" * 255)  # as long as a name may be
    fb.save(path, {"a": operands[0]})
    np.testing.assert_array_equal(fb.load(path)["a"], operands[0])
    with pytest.raises(ValueError, match="is no UTF-8"):
        fb.save(path, {"\ud800": operands[0]})
    for given in ({"arrays": [1]}, {"arrays": {}, "metadata": [1]}):
        with pytest.raises(TypeError, match="is a list, but a dict by name is needed"):
            fb.save(path, **given)
    np.testing.assert_array_equal(fb.load(path)["a"], operands[0])
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_empty_tensor_of_axes_beyond_counting(tmp_path):
    header = b'{"a":{"dtype":"F64","shape":[0,2305843009213693952,2305843009213693952],"data_offsets":[0,0]}}'
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="cannot be read as safetensors: a tensor of shape"):
        fb.load(tmp_path / "a")


def test_eight_bit_floats_have_no_form_in_torch(tmp_path):
    pytest.importorskip("torch")
    header = b'{"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}'
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + b"xx")
    with pytest.raises(DTypeError, match="dtype float8_e4m3fn has no form in PyTorch"):
        fb.load(tmp_path / "a", "torch")
