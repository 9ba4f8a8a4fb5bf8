"""`save` and `load`: bit-exact, atomic, readable by others, and a sentence for whatever is not a safetensors
file.
"""

from __future__ import annotations

import json
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fp4bf16 as fb
from fp4bf16.io import DTYPES, load_metadata
from fp4bf16.python_ref.quantize import BLOCK

PARTS = ("packed", "block_scale", "outer_scale")


def _file(header, data=b"", length=None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def _entry(shape=(4,), dtype="U8", offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


# ---- round trips -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fmt", BLOCK)
@pytest.mark.parametrize(
    "shape, axis", [((6, 50), -1), ((6, 50), 0), ((2, 3, 4, 17), 1), ((40,), 0), ((0, 16), 1)]
)
def test_quantized_round_trip(rng, path, fmt, shape, axis):
    xq = fb.quantize(rng.standard_normal(shape).astype(np.float32), fmt, axis=axis)
    fb.save(path, {"w": xq, "w.t": xq.T})
    for name, want in (("w", xq), ("w.t", xq.T)):
        got = fb.load(path)[name]
        assert (got.format, got.shape, got.order, got.stats) == (want.format, want.shape, want.order, None)
        for part in PARTS:
            a, b = getattr(got, part), getattr(want, part)
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype and a.flags.writeable
                np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=list(DTYPES))
def test_array_round_trip(rng, path, dtype):
    """Every byte pattern of the dtype comes back, NaN payloads too; scalars, empty arrays, views."""
    raw = rng.integers(0, 2 if dtype == np.bool_ else 256, 24 * dtype.itemsize, dtype=np.uint8)
    x = raw.view(dtype).reshape(2, 3, 4)
    arrays = {"x": x, "t": x.T, "empty": x[:0], "scalar": x[0, 0, 0].reshape(()), "ragged": x[:, ::2]}
    fb.save(path, arrays)
    back = fb.load(path)
    assert set(back) == set(arrays)
    for name, want in arrays.items():
        assert back[name].dtype == want.dtype and back[name].shape == want.shape
        assert back[name].tobytes() == np.ascontiguousarray(want).tobytes()
        assert back[name].flags.aligned


def test_big_endian_and_names(path):
    arrays = {"big": np.arange(5, dtype=">f4"), 'naïve/名前 \n"': np.ones(2), "": np.zeros(1, np.int8)}
    fb.save(path, arrays, metadata={"note": "größer"})
    back = fb.load(path)
    assert back["big"].dtype == np.dtype("<f4") and back["big"].tolist() == [0, 1, 2, 3, 4]
    assert set(back) == set(arrays) and load_metadata(path)["note"] == "größer"
    fb.save(path, {})
    assert fb.load(path) == {}


def test_torch_round_trip(rng, path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.randn(4, 40)
    fb.save(path, {"q": fb.quantize(x), "bf16": x.bfloat16(), "strided": x.t()})
    back = fb.load(path, framework="torch")
    assert torch.equal(back["bf16"], x.bfloat16()) and torch.equal(back["strided"], x.t())
    assert torch.equal(fb.dequantize(back["q"]), fb.dequantize(fb.quantize(x)))
    with pytest.raises(ValueError, match="framework is 'jax'"):
        fb.load(path, framework="jax")


def test_safetensors_reads_ours_and_we_read_theirs(rng, path):
    safetensors_numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    xq = fb.quantize(rng.standard_normal((6, 40)).astype(np.float32))
    fb.save(path, {"q": xq, "f": np.arange(7.0), "b": np.array([True, False])})
    theirs = safetensors_numpy.load_file(path)
    assert set(theirs) == {"q.packed", "q.block_scale", "q.outer_scale", "f", "b"}
    np.testing.assert_array_equal(theirs["q.packed"], xq.packed)
    np.testing.assert_array_equal(theirs["q.outer_scale"], xq.outer_scale)
    np.testing.assert_array_equal(theirs["f"], np.arange(7.0))
    arrays = {"a": rng.standard_normal((3, 5)).astype(np.float32), "n": np.arange(9), "h": np.float16([1, 2])}
    safetensors_numpy.save_file(arrays, path, metadata={"format": "np"})
    back = fb.load(path)
    assert set(back) == set(arrays) and all(np.array_equal(back[n], a) for n, a in arrays.items())


def test_safetensors_reads_bfloat16_as_torch(rng, path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    x = rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16)
    fb.save(path, {"x": x, "e": x.astype(ml_dtypes.float8_e4m3fn)})
    theirs = safetensors_torch.load_file(path)
    np.testing.assert_array_equal(theirs["x"].float().numpy(), x.astype(np.float32))
    assert theirs["e"].dtype == torch.float8_e4m3fn


def test_reads_the_formats_of_others(shared):
    back = fb.load(shared / "conformance/layouts/f4_sample.safetensors")
    assert any(a.dtype == ml_dtypes.float8_e8m0fnu for a in back.values())
    linear = fb.load(shared / "conformance/layouts/compressed_tensors_nvfp4.safetensors")
    packed = next(a for n, a in linear.items() if n.endswith("weight_packed"))
    assert packed.dtype == np.uint8 and packed.ndim == 2


# ---- writing -----------------------------------------------------------------------------------------------
def test_a_failed_save_leaves_the_old_file(path, monkeypatch):
    fb.save(path, {"x": np.ones(3)})
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        fb.save(path, {"x": np.zeros(1000)})
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_what_save_refuses(path):
    xq = fb.quantize(np.ones((2, 16), np.float32))
    for arrays, error, message in (
        ({"w": xq, "w.packed": np.ones(2)}, ValueError, "two tensors would be called 'w.packed'"),
        ({"__metadata__": np.ones(2)}, ValueError, "reserved"),
        ({3: np.ones(2)}, TypeError, "name 3 is a int"),
        ({"c": np.ones(2, complex)}, TypeError, "c has dtype complex128"),
        ({"o": np.array([None])}, TypeError, "o has dtype object"),
        ({"d": {}}, TypeError, "d: is a builtins.dict"),
    ):
        with pytest.raises(error, match=message):
            fb.save(path, arrays)
    with pytest.raises(ValueError, match="metadata must map strings"):
        fb.save(path, {}, metadata={"n": 3})
    assert not path.exists()


# ---- damaged and foreign files -----------------------------------------------------------------------------
BAD = {
    "empty": b"",
    "short": b"abc",
    "png": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "npz": b"PK\x03\x04" + bytes(60),
    "length": _file({}, length=1 << 62),
    "beyond": _file({}, length=50),
    "not json": _file(b"{not json}"),
    "not utf-8": _file(b"\xff\xfe{}"),
    "a list": _file([1, 2]),
    "deep": _file(b"[" * 200000),
    "twice": _file(b'{"a":{},"a":{}}'),
    "long number": _file(b'{"a":' + b"9" * 5000 + b"}"),
    "no dtype": _file({"a": {"shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
    "extra key": _file({"a": _entry() | {"b": 1}}, bytes(4)),
    "dtype": _file({"a": _entry(dtype="F6_E2M3")}, bytes(4)),
    "dtype list": _file({"a": _entry(dtype=["U8"])}, bytes(4)),
    "odd F4": _file({"a": _entry((3,), "F4")}, bytes(4)),
    "negative": _file({"a": _entry((-4,))}, bytes(4)),
    "float shape": _file({"a": _entry((4.0,))}, bytes(4)),
    "bool shape": _file({"a": _entry((True, 4))}, bytes(4)),
    "huge": _file({"a": _entry((1 << 61, 1 << 61), offsets=(0, 4))}, bytes(4)),
    "axes": _file({"a": _entry([1] * 40, offsets=(0, 1))}, bytes(1)),
    "three offsets": _file({"a": _entry(offsets=(0, 4, 8))}, bytes(4)),
    "backwards": _file({"a": _entry(offsets=(4, 0))}, bytes(4)),
    "hole": _file({"a": _entry(offsets=(4, 8))}, bytes(8)),
    "overlap": _file({"a": _entry(), "b": _entry(offsets=(2, 6))}, bytes(6)),
    "truncated": _file({"a": _entry()}, bytes(3)),
    "trailing": _file({"a": _entry()}, bytes(5)),
    "size": _file({"a": _entry(dtype="F32")}, bytes(4)),
    "bool": _file({"a": _entry(dtype="BOOL")}, b"\x00\x01\x02\x00"),
    "metadata": _file({"__metadata__": {"a": 1}}),
    "ours": _file({"__metadata__": {"fp4bf16": "{"}}),
    "ours, a list": _file({"__metadata__": {"fp4bf16": "[]"}}),
    "version": _file({"__metadata__": {"fp4bf16": '{"version":9,"arrays":{}}'}}),
    "arrays": _file({"__metadata__": {"fp4bf16": '{"version":1,"arrays":{"a":3}}'}}),
    "no parts": _file({"__metadata__": {"fp4bf16": json.dumps(
        {"version": 1, "arrays": {"a": {"format": "nvfp4", "shape": [2, 16], "order": [0, 1]}}})}}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_damaged_files(path, name):
    path.write_bytes(BAD[name])
    with pytest.raises(ValueError, match="x.safetensors cannot be read as safetensors: "):
        fb.load(path)


@pytest.mark.parametrize("change, message", [
    ({"format": "nvfp5"}, "not of a known format"),
    ({"shape": "ab"}, "not of a known format"),
    ({"shape": [3, 32]}, "do not fit together"),
    ({"order": [1, 1]}, "do not fit together"),
    ({"order": [1, 0]}, "do not fit together"),
    ({"format": "mxfp4"}, "outer_scale is there, but mxfp4 has no"),
    ({"shape": [1 << 40, 1 << 40]}, "do not fit together"),
])  # fmt: skip
def test_descriptions_that_lie(path, change, message):
    fb.save(path, {"w": fb.quantize(np.ones((2, 32), np.float32))})
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    ours = json.loads(header["__metadata__"]["fp4bf16"])
    ours["arrays"]["w"] |= change
    header["__metadata__"]["fp4bf16"] = json.dumps(ours)
    path.write_bytes(_file(header, raw[8 + length :]))
    with pytest.raises(ValueError, match=message):
        fb.load(path)


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        fb.load(tmp_path / "nothing.safetensors")


@given(data=st.data())
def test_fuzzed_files_load_or_raise_a_sentence(tmp_path_factory, data):
    """Bytes of a good file changed, cut or repeated: `load` gives arrays or a ValueError with the path,
    nothing else.
    """
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    fb.save(path, {"w": fb.quantize(np.ones((2, 32), np.float32)), "b": np.array([True]), "f": np.ones(3)})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(("set", "cut", "repeat", "insert")))
        if kind == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del raw[at : at + data.draw(st.integers(0, 9))]
        elif kind == "repeat":
            raw[at:at] = raw[at : at + data.draw(st.integers(0, 9))]
        else:
            raw[at:at] = data.draw(st.sampled_from((b"{", b"}", b"[", b"9", b'"', b"null", b"-1", b"1e400")))
        raw = raw or bytearray(b"x")
    path.write_bytes(bytes(raw))
    try:
        back = fb.load(path)
    except ValueError as error:
        assert "cannot be read as safetensors" in str(error)
    else:
        assert all(isinstance(a, np.ndarray | fb.QuantizedArray) for a in back.values())
