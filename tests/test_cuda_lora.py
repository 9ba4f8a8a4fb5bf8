"""Adapters merged into weights, and their gradients from the weights': the kernels' own code on the host, and
through the C ABI on a GPU, against float64; what is refused.
"""

from __future__ import annotations

import ctypes
import math

import numpy as np
import pytest
from host_code import compiled

from fp4bf16.backends.cuda_lora import Entry

#: (rows, columns, transposed): tiles that are full, ragged, and of a single element; columns beyond a tile,
#: fewer than the lanes; layers of ddpm-cifar10-32; no rows.
SHAPES = [
    (16, 128, False), (1, 1, False), (1, 1, True), (17, 129, True), (5, 33, False), (3, 300, True),
    (0, 16, False), (40, 31, True), (33, 576, False), (64, 64, True),
]  # fmt: skip
RANKS = [1, 3, 8, 9, 33]


class Case:
    """Flat arrays of some layers with poison between them, and what float64 makes of them."""

    def __init__(self, rng, rank: int, shapes=SHAPES):
        self.rank, self.scale, self.entries, self.size, self.small = rank, 1.7 / rank, [], 3, 5
        for rows, columns, transposed in shapes:
            down, up = self.small, self.small + rank * columns + 2
            self.entries.append(Entry(rows, columns, self.size, down, up, transposed))
            self.size += rows * columns + 7
            self.small = up + rank * rows + 1
        self.base, self.gradient = (_numbers(rng, self.size) for _ in range(2))
        self.adapters = _numbers(rng, self.small)
        self.base[::29] = 0

    def table(self, units) -> tuple[np.ndarray, list[int]]:
        """int64 (layers, 8) and the units of both functions."""
        rows, total = [], [0, 0]
        for e in self.entries:
            rows.append((*total, *e[:5], int(e.transposed)))
            total = [n + units(e.rows, e.columns, which) for which, n in enumerate(total)]
        return np.array(rows, np.int64).reshape(-1, 8), total

    def matrix(self, flat, start: int, rows: int, columns: int, transposed=False) -> np.ndarray:
        shape = (columns, rows) if transposed else (rows, columns)
        found = flat[start : start + rows * columns].reshape(shape)
        return found.T if transposed else found

    def parts(self, flat, e: Entry) -> tuple[np.ndarray, np.ndarray]:
        """Views (up, down) of an adapter."""
        return (self.matrix(flat, e.up, e.rows, self.rank, e.transposed),
                self.matrix(flat, e.down, self.rank, e.columns, e.transposed))  # fmt: skip

    def check_merged(self, weights, adapters=True) -> None:
        """One rounding of float32, and that of the float64 sum, rank + 2 terms of their magnitudes; between
        the layers the poison."""
        want, allowed = _poison(self.size).astype(np.float64), np.zeros(self.size)
        for e in self.entries:
            base, (up, down) = (
                self.matrix(self.base, e.weight, e.rows, e.columns).astype(np.float64),
                (x.astype(np.float64) for x in self.parts(self.adapters, e)),
            )
            place = want[e.weight : e.weight + e.rows * e.columns]
            value = base + self.scale * (up @ down) if adapters else base
            place[...] = value.reshape(-1)
            terms = np.abs(base) + self.scale * (np.abs(up) @ np.abs(down))
            limit = 2.0**-24 * np.abs(value) + (self.rank + 3) * 2.0**-52 * terms if adapters else 0 * terms
            allowed[e.weight : e.weight + e.rows * e.columns] = limit.reshape(-1)
        assert (np.abs(weights - want) <= allowed).all()
        if not adapters:
            np.testing.assert_array_equal(np.signbit(weights), np.signbit(want))

    def check_gradient(self, found) -> None:
        want, allowed = _poison(self.small).astype(np.float64), np.zeros(self.small)
        for e in self.entries:
            g = self.matrix(self.gradient, e.weight, e.rows, e.columns).astype(np.float64)
            up, down = (x.astype(np.float64) for x in self.parts(self.adapters, e))
            sums = (g @ down.T, up.T @ g), (np.abs(g) @ np.abs(down).T, np.abs(up).T @ np.abs(g))
            counts = e.columns, e.rows
            places = zip(self.parts(want, e), self.parts(allowed, e), *sums, counts, strict=True)
            for place, limit, value, terms, count in places:
                place[...] = self.scale * value
                limit[...] = self.scale * (2.0**-24 * np.abs(value) + (count + 3) * 2.0**-52 * terms)
        assert (np.abs(found - want) <= allowed).all()


def _numbers(rng, size: int) -> np.ndarray:
    return (rng.standard_normal(size) * np.exp2(rng.integers(-6, 4, size))).astype(np.float32)


def _poison(size: int) -> np.ndarray:
    return np.full(4 * size, 0xA5, np.uint8).view(np.float32)


# ---- on the host -------------------------------------------------------------------------------------------
class Arguments(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layer_count", "units", "rank")),
        *((name, ctypes.c_void_p) for name in (
            "layers", "base", "adapters", "weights", "gradient", "adapters_gradient")),
        ("scale", ctypes.c_double),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    library = compiled(tmp_path_factory, "lora_host", optimise="-O1")
    library.host_units.restype = ctypes.c_int64
    library.host_units.argtypes = ctypes.c_int64, ctypes.c_int64, ctypes.c_int32
    return library


def _on_host(host, case: Case, function: str, result: str, **arrays) -> np.ndarray:
    table, units = case.table(host.host_units)
    made = _poison(case.size if result == "weights" else case.small)
    held = {"layers": table, result: made, **arrays}
    pointers = {name: None if a is None else a.ctypes.data for name, a in held.items()}
    total = units[function == "host_gradient"]
    args = Arguments(layer_count=len(table), units=total, rank=case.rank, scale=case.scale, **pointers)
    getattr(host, function)(ctypes.byref(args))
    return made


@pytest.mark.parametrize("rank", RANKS)
def test_merge_on_the_host(host, rng, rank):
    case = Case(rng, rank)
    made = _on_host(host, case, "host_merge", "weights", base=case.base, adapters=case.adapters)
    case.check_merged(made)
    base = _on_host(host, case, "host_merge", "weights", base=case.base, adapters=None)
    case.check_merged(base, adapters=False)
    assert not np.array_equal(made, base)
    for e in case.entries:
        case.parts(case.adapters, e)[0][...] = 0
    again = _on_host(host, case, "host_merge", "weights", base=case.base, adapters=case.adapters)
    np.testing.assert_array_equal(again, base)  # up of zeros: the base to the bit, but for the sign of 0


@pytest.mark.parametrize("rank", RANKS)
def test_gradient_on_the_host(host, rng, rank):
    case = Case(rng, rank)
    arrays = {"gradient": case.gradient, "adapters": case.adapters}
    case.check_gradient(_on_host(host, case, "host_gradient", "adapters_gradient", **arrays))


def test_a_gradient_that_is_not_finite_comes_through(host, rng):
    case = Case(rng, 3, [(5, 33, False), (6, 7, True)])
    e = case.entries[1]
    case.matrix(case.gradient, e.weight, 6, 7)[2, 4] = np.nan
    arrays = {"gradient": case.gradient, "adapters": case.adapters}
    found = _on_host(host, case, "host_gradient", "adapters_gradient", **arrays)
    up, down = case.parts(found, e)
    assert np.isnan(up[2]).all() and np.isfinite(np.delete(up, 2, 0)).all()
    assert np.isnan(down[:, 4]).all() and np.isfinite(np.delete(down, 4, 1)).all()
    assert all(np.isfinite(x).all() for x in case.parts(found, case.entries[0]))


# ---- on the GPU --------------------------------------------------------------------------------------------
def _arguments(library, values: dict):
    args = library.ffi.new("fp4bf16_lora_args*")
    types = dict(library.ffi.typeof("fp4bf16_lora_args").fields)
    for field, value in values.items():
        setattr(args, field, library.ffi.cast(types[field].type, value))
    return args


def _on_gpu(library, gpu, case: Case, function: str, result: str, **arrays) -> np.ndarray:
    table, units = case.table(library.lib.fp4bf16_lora_units)
    size = case.size if result == "weights" else case.small
    out = gpu.put(_poison(size))
    values = {"layer_count": len(table), "units": units[function == "lora_gradient"], "rank": case.rank,
              "scale": case.scale, "layers": gpu.put(table), result: out}  # fmt: skip
    values |= {name: gpu.put(a) for name, a in arrays.items()}
    for _ in range(2):  # the same bits again, from what is there by then
        library.call(function, _arguments(library, values), 0)
        found = gpu.get(out, (size,), np.float32)
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [*RANKS, 64])
def test_merge(library, gpu, rng, rank):
    case = Case(rng, rank, [*SHAPES, (256, 2304, False), (512, 128, True)])
    arrays = {"base": case.base, "adapters": case.adapters}
    case.check_merged(_on_gpu(library, gpu, case, "lora_merge", "weights", **arrays))
    case.check_merged(_on_gpu(library, gpu, case, "lora_merge", "weights", base=case.base), adapters=False)
    gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [*RANKS, 64])
def test_gradient(library, gpu, rng, rank):
    case = Case(rng, rank, [*SHAPES, (256, 2304, False), (512, 128, True)])
    arrays = {"gradient": case.gradient, "adapters": case.adapters}
    found = _on_gpu(library, gpu, case, "lora_gradient", "adapters_gradient", **arrays)
    case.check_gradient(found)
    np.testing.assert_array_equal(
        _on_gpu(library, gpu, case, "lora_gradient", "adapters_gradient", **arrays), found
    )
    gpu.free()


@pytest.mark.gpu
def test_the_hosts_bits(library, gpu, host, rng):
    """The same code in the same order, on the GPU and on the host."""
    case = Case(rng, 9)
    for name, result, arrays in (
        ("merge", "weights", {"base": case.base, "adapters": case.adapters}),
        ("gradient", "adapters_gradient", {"gradient": case.gradient, "adapters": case.adapters}),
    ):
        want = _on_host(host, case, f"host_{name}", result, **arrays)
        got = _on_gpu(library, gpu, case, f"lora_{name}", result, **arrays)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))
    gpu.free()


# ---- what is refused ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("layer_count", 0, "layer_count is 0, but units is 1"),
        ("layer_count", -1, "layer_count is -1"),
        ("units", -1, "units is -1"),
        ("units", 1 << 31, "units is 2147483648"),
        ("rank", 0, "rank is 0"),
        ("scale", math.inf, "scale is inf, but a finite number is needed"),
        ("layers", 0, "layers is NULL"),
        ("layers", 68, "layers is 4 bytes past"),
        ("adapters", 66, "adapters is 2 bytes past"),
        ("base", 0, "base is NULL"),
        ("weights", 0, "weights is NULL"),
        ("gradient", 0, "gradient is NULL"),
        ("adapters_gradient", 0, "adapters_gradient is NULL"),
    ],
)
def test_bad_arguments_are_refused_before_any_launch(library, name, value, sentence):
    values = {"layer_count": 1, "units": 1, "rank": 2, "scale": 1.0, "layers": 64, "base": 64,
              "adapters": 64, "weights": 64, "gradient": 64, "adapters_gradient": 64}  # fmt: skip
    functions = {"base": ["lora_merge"], "weights": ["lora_merge"], "gradient": ["lora_gradient"],
                 "adapters_gradient": ["lora_gradient"]}  # fmt: skip
    for function in functions.get(name, ["lora_merge", "lora_gradient"]):
        with pytest.raises(ValueError, match=f"^{function}: {sentence}"):
            library.call(function, _arguments(library, values | {name: value}), 0)
        nothing = values | {"units": 0, "layers": 0, "layer_count": 0}
        library.call(function, _arguments(library, nothing), 0)  # and no error is left behind


def test_gradient_needs_adapters(library):
    values = {"layer_count": 1, "units": 1, "rank": 2, "scale": 1.0, "layers": 64, "gradient": 64,
              "adapters_gradient": 64}  # fmt: skip
    with pytest.raises(ValueError, match="^lora_gradient: adapters is NULL"):
        library.call("lora_gradient", _arguments(library, values), 0)


def test_units(library):
    units = library.lib.fp4bf16_lora_units
    assert units(0, 16, 0) == units(16, 0, 0) == 0  # nothing to merge; gradients of zeros are written
    assert units(16, 0, 1) == 4 and units(0, 16, 1) == 1
    assert units(16, 128, 0) == 1 and units(17, 129, 0) == 4 and units(5, 33, 1) == 2 + 2
    for bad in ((-1, 16, 0), (16, -1, 1), (1 << 29, 1, 0)):
        assert units(*bad) == -1
