"""AdamW, the average and the copies in one pass through the C ABI: the bits of the CPU's, step after step;
the norm of the gradient.
"""

from __future__ import annotations

import ctypes
import math

import ml_dtypes
import numpy as np
import pytest
from host_code import compiled
from host_cuda import host_cuda  # noqa: F401  (a fixture)

from fp4bf16 import device
from fp4bf16.backends import cuda_optimizer
from fp4bf16.backends.cuda_optimizer import Entry, step_scalars, tensor_table
from fp4bf16.diffusion.ema import EMA
from fp4bf16.nn.optim import AdamW, clip_norm
from fp4bf16.python_ref.quantize import expand, quantize

BF16 = np.dtype(ml_dtypes.bfloat16)
#: (rows, columns, twin): rows for a warp and for a thread block, in its memory and beyond; ragged, single,
#: empty, spans of one unit and of several, a bias, and kernels of ddpm-cifar10-32.
SHAPES = [
    (1, 16, True), (7, 48, True), (5, 512, True), (3, 528, True), (256, 2304, True), (2, 4608, True),
    (3, 4624, True), (2, 9 * 1024, True), (1, 1, False), (1, 3459, False), (0, 16, True), (1, 256, False),
    (2, 2048, False), (9, 777, False), (128, 27, False), (6, 128, False),
]  # fmt: skip


def weights(rng, rows: int, columns: int) -> np.ndarray:
    """Rows of mixed magnitudes with zero blocks, ties and -0."""
    x = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-9, 3, (rows, 1)))
    x *= np.exp2(rng.integers(-6, 5, x.shape) * (rng.random(x.shape) < 0.1))
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(x), 1e-30))) - 2)
    x = np.where(rng.random(x.shape) < 0.3, np.round(x / step) * step, x)  # few bits: ties
    x[:, :16] *= rng.random((rows, 1)) < 0.8
    x[rng.random(x.shape) < 0.02] = -0.0
    return x.astype(np.float32)


class Case:
    """The flat arrays of `SHAPES` with gaps of zeros between them, and what the CPU makes of them."""

    def __init__(self, rng, shapes=SHAPES, weight_decay=0.01, decay=0.999):
        self.entries, self.size, self.twin_size, self.scales, parts = [], 0, 0, 0, []
        for rows, columns, twin in shapes:
            self.entries.append(Entry(self.size, rows, columns, self.twin_size if twin else -1, self.scales))
            parts.append((self.size, weights(rng, rows, columns).reshape(-1)))
            self.size += -(-rows * columns // 16) * 16 + 32
            if twin:
                self.twin_size += rows * columns + 16
                self.scales += rows + 3
        self.p = np.zeros(self.size, np.float32)
        for start, x in parts:
            self.p[start : start + x.size] = x
        self.inside = np.zeros(self.size, bool)
        for start, x in parts:
            self.inside[start : start + x.size] = True
        self.betas, self.eps, self.weight_decay, self.decay = (0.9, 0.999), 1e-8, weight_decay, decay
        self.optimizer = AdamW(self.p, 1e-3, self.betas, self.eps, weight_decay)
        self.ema = EMA(self.p, decay)

    def gradient(self, rng) -> np.ndarray:
        g = rng.standard_normal(self.size) * np.exp2(rng.integers(-20, 4, self.size))
        return (g * self.inside * (rng.random(self.size) < 0.95)).astype(np.float32)

    def step(self, g, lr: float) -> None:
        self.optimizer.step(g, lr)
        self.ema.update(self.p, self.optimizer.count - 1)

    def scalars(self, lr: float) -> np.ndarray:
        """Of the step that the CPU takes next."""
        return step_scalars(self.optimizer.count + 1, lr, self.betas, self.weight_decay, self.decay)

    def twins(self):
        """(bytes, scales) with the poison of what lies between."""
        bytes_, scales = np.full(self.twin_size, 0xA5, np.uint8), np.full(4 * self.scales, 0xA5, np.uint8)
        scales = scales.view(np.float32)
        for e in self.entries:
            if e.twin >= 0 and e.rows:
                x = self.p[e.offset : e.offset + e.rows * e.columns].reshape(e.rows, e.columns)
                q = quantize(x, "nvfp4_exact", outer="row", nan="propagate")
                bytes_[e.twin : e.twin + x.size] = expand(q).reshape(-1)
                scales[e.scale : e.scale + e.rows] = q.outer_scale[:, 0]
        return bytes_, scales

    def half(self) -> np.ndarray:
        """The BF16 copy with the poison between."""
        half = np.full(2 * self.size, 0xA5, np.uint8).view(BF16)
        half[self.inside] = self.p[self.inside].astype(BF16)
        return half


class Device:
    """The same on the GPU, driven by the C ABI."""

    def __init__(self, library, gpu, case: Case, average=True, copies=True, stream=0):
        self.loaded, self.gpu, self.case, self.stream = library, gpu, case, stream
        tensors, self.units = tensor_table(case.entries)
        zeros = np.zeros(case.size, np.float32)
        self.at = {
            "tensors": gpu.put(tensors), "parameters": gpu.put(case.p), "gradient": gpu.put(zeros),
            "first": gpu.put(zeros), "second": gpu.put(zeros), "scalars": gpu.put(np.zeros(8, np.float32)),
        }  # fmt: skip
        if average:
            self.at["average"] = gpu.put(case.p)
        if copies:
            self.at |= {"bf16": gpu.empty(2 * case.size), "twin": gpu.empty(case.twin_size),
                        "twin_scale": gpu.empty(4 * case.scales)}  # fmt: skip
        self.args = library.ffi.new("fp4bf16_adamw_args*")
        for name, address in self.at.items():
            kind = dict(library.ffi.typeof("fp4bf16_adamw_args").fields)[name].type
            setattr(self.args, name, library.ffi.cast(kind, address))
        self.args.tensor_count, self.args.units = len(tensors), self.units
        self.args.beta1, self.args.beta2 = case.betas
        self.args.eps = case.eps

    def write(self, name, array) -> None:
        array = np.ascontiguousarray(array)
        kind = self.gpu.rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.gpu.check(self.gpu.rt.cudaMemcpy(self.at[name], array.ctypes.data, array.nbytes, kind))

    def flat(self, name, dtype=np.float32) -> np.ndarray:
        return self.gpu.get(self.at[name], (self.case.size,), dtype)

    def run(self) -> None:
        self.loaded.call("adamw", self.args, self.stream)

    def check(self) -> None:
        """Every array has the CPU's bits."""
        case, want = self.case, {"parameters": self.case.p, **self.case.optimizer.state()}
        if "average" in self.at:
            want["average"] = case.ema.average
        for name, array in want.items():
            same(self.flat(name), array, name)
        if "bf16" in self.at:
            same(self.flat("bf16", BF16), case.half(), "bf16")
            bytes_, scales = case.twins()
            same(self.gpu.get(self.at["twin"], bytes_.shape, np.uint8), bytes_, "twin")
            same(self.gpu.get(self.at["twin_scale"], scales.shape, np.float32), scales, "twin_scale")


def same(got, want, what: str) -> None:
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8), err_msg=what)


# ---- on a GPU
@pytest.mark.gpu
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_have_the_bits_of_the_cpu(library, gpu, rng, weight_decay):
    case = Case(rng, weight_decay=weight_decay)
    on_gpu = Device(library, gpu, case)
    for lr in (1e-3, 3e-4, 0.02, 1e-3):
        g = case.gradient(rng)
        on_gpu.write("gradient", g)
        on_gpu.write("scalars", case.scalars(lr))
        case.step(g, lr)
        on_gpu.run()
        on_gpu.check()
    gaps = ~case.inside
    for name in ("parameters", "first", "second", "average"):
        assert (on_gpu.flat(name)[gaps].view(np.uint32) == 0).all(), f"{name} between the tensors"
    gpu.free()


@pytest.mark.gpu
def test_the_gradient_is_scaled(library, gpu, rng):
    case = Case(rng)
    on_gpu = Device(library, gpu, case)
    g, scalars = case.gradient(rng), case.scalars(1e-3)
    scalars[3] = 0.37
    on_gpu.write("gradient", g)
    on_gpu.write("scalars", scalars)
    case.step(g * np.float32(0.37), 1e-3)
    on_gpu.run()
    on_gpu.check()
    gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["flag", "no gradient"])
def test_only_the_copies(library, gpu, rng, how):
    """The flag is 0 and the gradient NaN, or there is none: numbers stay, copies are made."""
    case = Case(rng)
    on_gpu = Device(library, gpu, case)
    g = case.gradient(rng)
    on_gpu.write("gradient", g)
    on_gpu.write("scalars", case.scalars(1e-3))
    case.step(g, 1e-3)
    on_gpu.run()
    scalars = case.scalars(1e-3)
    scalars[3:5] = np.nan, 0
    on_gpu.write("scalars", scalars)
    on_gpu.write("gradient", np.full(case.size, np.nan, np.float32))
    if how == "no gradient":
        for name in ("gradient", "first", "second", "average", "scalars"):
            setattr(on_gpu.args, name, library.ffi.NULL)
    for name, count in (("bf16", 2 * case.size), ("twin", case.twin_size), ("twin_scale", 4 * case.scales)):
        on_gpu.write(name, np.full(count, 0xA5, np.uint8))
    on_gpu.run()
    on_gpu.check()
    gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("average, copies", [(False, True), (True, False), (False, False)])
def test_parts_may_be_left_out(library, gpu, rng, average, copies):
    case = Case(rng)
    on_gpu = Device(library, gpu, case, average, copies)
    g = case.gradient(rng)
    on_gpu.write("gradient", g)
    on_gpu.write("scalars", case.scalars(1e-3))
    case.step(g, 1e-3)
    on_gpu.run()
    on_gpu.check()
    gpu.free()


@pytest.mark.gpu
def test_twins_of_extreme_rows(library, gpu, rng):
    """NaN and Inf, subnormal and huge rows, zero rows, every exponent: as quantize(nan="propagate")."""
    shapes = [(40, 64, True), (40, 1040, True), (6, 4640, True)]
    case = Case(rng, shapes)
    for e in case.entries:
        x = case.p[e.offset : e.offset + e.rows * e.columns].reshape(e.rows, e.columns)
        x *= np.exp2(rng.integers(-140, 120, (e.rows, 1))).astype(np.float32)
        x[0], x[1, ::3] = 0, 0
        x[2, 5], x[3, 17], x[4, -1] = np.nan, np.inf, -np.inf
        x[5] *= np.float32(2.0**-130)
        x[5, 0] = 2.0**127
    on_gpu = Device(library, gpu, case)
    on_gpu.args.gradient = library.ffi.NULL
    on_gpu.run()
    bytes_, scales = case.twins()
    same(gpu.get(on_gpu.at["twin"], bytes_.shape, np.uint8), bytes_, "twin")
    same(gpu.get(on_gpu.at["twin_scale"], scales.shape, np.float32), scales, "twin_scale")
    gpu.free()


@pytest.mark.gpu
def test_one_tensor_and_none(library, gpu, rng):
    for shapes in ([(1, 1, False)], [(1, 16, True)], [(0, 16, True)], [(33, 4608, True)], []):
        case = Case(rng, shapes)
        on_gpu = Device(library, gpu, case)
        g = case.gradient(rng)
        on_gpu.write("gradient", g)
        on_gpu.write("scalars", case.scalars(1e-3))
        case.step(g, 1e-3)
        on_gpu.run()
        on_gpu.check()
        gpu.free()


@pytest.mark.gpu
def test_many_tensors_are_found(library, gpu, rng):
    """More tensors than a warp looks at in two rounds, empty ones among them."""
    shapes = [((1, 3), (2, 16), (0, 16), (1, 40))[i % 4] + (i % 4 in (1, 2),) for i in range(1500)]
    case = Case(rng, shapes)
    on_gpu = Device(library, gpu, case)
    g = case.gradient(rng)
    on_gpu.write("gradient", g)
    on_gpu.write("scalars", case.scalars(1e-3))
    case.step(g, 1e-3)
    on_gpu.run()
    on_gpu.check()
    gpu.free()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [0, 1, 3, 4099, 1 << 20, 4 * 256 * 4 * 1024 * 3 + 7])
@pytest.mark.parametrize("shift", [0, 1])
def test_sum_of_squares(library, gpu, rng, count, shift):
    """Within 2^-40 of the sum in extended precision: float64 terms, added in trees and runs of 64."""
    x = rng.standard_normal(count + shift) * np.exp2(rng.integers(-40, 20, count + shift))
    x = x.astype(np.float32)
    squares, work = gpu.empty(8), gpu.empty(8192)
    address = gpu.put(x) + 4 * shift
    found = []
    for _ in range(2):
        library.call("sum_of_squares", address, count, squares, work, 0)
        found.append(float(gpu.get(squares, (1,), np.float64)[0]))
    want = float(np.sum(x[shift:].astype(np.longdouble) ** 2))
    assert found[0] == found[1] and abs(found[0] - want) <= 2.0**-40 * want
    gpu.free()


@pytest.mark.gpu
def test_squares_that_are_not_finite(library, gpu, rng):
    squares, work = gpu.empty(8), gpu.empty(8192)
    for bad in (np.nan, np.inf, -np.inf):
        x = rng.standard_normal(5000).astype(np.float32)
        x[4321] = bad
        library.call("sum_of_squares", gpu.put(x), x.size, squares, work, 0)
        assert not math.isfinite(gpu.get(squares, (1,), np.float64)[0])
    gpu.free()


@pytest.mark.gpu
def test_clip_scalars(library, gpu):
    scalars, norm = gpu.empty(32), gpu.empty(8)
    for squares, loss, limit, factor, flag in CLIPS:
        library.call("clip_scalars", gpu.put(np.float64([squares])),
                     0 if loss is None else gpu.put(np.float64([loss])), limit, scalars, norm, 0)  # fmt: skip
        got = gpu.get(scalars, (8,), np.float32)
        assert got[4] == flag and (not flag or got[3] == np.float32(factor)), (squares, loss, limit)
        np.testing.assert_array_equal(gpu.get(norm, (1,), np.float64), np.sqrt(squares))
        assert (got.view(np.uint32)[[0, 1, 2, 5, 6, 7]] == 0xA5A5A5A5).all()
    gpu.free()


#: squares, loss, limit -> factor, flag
CLIPS = [
    (25.0, None, 0.3, 0.3 / 5, 1), (25.0, 1.5, 10.0, 1, 1), (25.0, 0.0, 0.0, 1, 1), (0.0, None, 1.0, 1, 1),
    (np.inf, 1.0, 1.0, 1, 0), (np.nan, 1.0, 1.0, 1, 0), (4.0, np.nan, 1.0, 0.5, 0),
    (4.0, -np.inf, 1.0, 0.5, 0),
]  # fmt: skip


# ---- the arithmetic, compiled for the host
@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return compiled(tmp_path_factory, "optimizer_host")


def _address(array):
    return ctypes.c_void_p(array.ctypes.data)


def test_arithmetic_of_twins(host, rng):
    for low, high in ((-3, 3), (-140, 120)):
        x = weights(rng, 200, 320) * np.exp2(rng.integers(low, high, (200, 1))).astype(np.float32)
        x[0], x[1, 7], x[2, 0], x[3, 1] = 0, np.nan, -np.inf, 3e38
        bytes_, scales = np.empty(x.shape, np.uint8), np.empty(len(x), np.float32)
        host.host_twin(_address(x), ctypes.c_int64(200), ctypes.c_int64(320), _address(bytes_),
                       _address(scales))  # fmt: skip
        want = quantize(x, "nvfp4_exact", outer="row", nan="propagate")
        same(scales, np.ascontiguousarray(want.outer_scale[:, 0]), "scale")
        same(bytes_, expand(want), "bytes")


def test_arithmetic_of_a_step(host, rng):
    case = Case(rng)
    p, average = case.p.copy(), case.ema.average.copy()
    m, v = np.zeros_like(p), np.zeros_like(p)
    for lr in (1e-3, 0.05, 1e-4):
        g, scalars = case.gradient(rng), case.scalars(lr)
        host.host_adamw(ctypes.c_int64(p.size), *map(_address, (g, p, m, v, average, scalars)),
                        ctypes.c_double(0.9), ctypes.c_double(0.999), ctypes.c_float(1e-8))  # fmt: skip
        case.step(g, lr)
        for got, want in ((p, case.p), (m, case.optimizer.first), (v, case.optimizer.second),
                          (average, case.ema.average)):  # fmt: skip
            same(got, want, f"lr {lr}")


# ---- the emulation, which the front end is tested with
def test_emulated_steps_have_the_bits_of_the_cpu(host_cuda, rng):  # noqa: F811
    from host_cuda import put

    case = Case(rng)
    tensors, units = tensor_table(case.entries)
    zeros = np.zeros_like(case.p)
    flat = {name: device.operand(put(x), name) for name, x in {
        "parameters": case.p, "gradient": zeros, "first": zeros, "second": zeros, "average": case.p,
        "bf16": np.full(2 * case.size, 0xA5, np.uint8).view(BF16), "scalars": np.zeros(8, np.float32),
        "twin": np.full(case.twin_size, 0xA5, np.uint8),
        "twin_scale": np.full(4 * case.scales, 0xA5, np.uint8).view(np.float32), "tensors": tensors,
    }.items()}  # fmt: skip
    table = cuda_optimizer.Table(flat.pop("tensors"), units)
    for lr in (1e-3, 0.02):
        g = case.gradient(rng)
        flat["gradient"].owner.array[:], flat["scalars"].owner.array[:] = g, case.scalars(lr)
        case.step(g, lr)
        names = ("parameters", "gradient", "first", "second", "scalars")
        copies = {n: flat[n] for n in ("average", "bf16", "twin", "twin_scale")}
        cuda_optimizer.adamw(table, *(flat[n] for n in names), 0, **copies, betas=case.betas, eps=case.eps)
        want = {"parameters": case.p, "average": case.ema.average, **case.optimizer.state()}
        want |= {"bf16": case.half(), **dict(zip(("twin", "twin_scale"), case.twins(), strict=True))}
        for name, array in want.items():
            same(flat[name].owner.array, array, name)


def test_emulated_norm(host_cuda, rng):  # noqa: F811
    from host_cuda import put

    x = rng.standard_normal(1000).astype(np.float32)
    squares, norm = (device.operand(put(np.zeros(1)), n) for n in ("squares", "norm"))
    cuda_optimizer.sum_of_squares(device.operand(put(x), "x"), squares, 0)
    assert math.isclose(squares.owner.array[0], np.sum(x.astype(np.float64) ** 2), rel_tol=1e-13)
    for given, loss, limit, factor, flag in CLIPS:
        scalars = device.operand(put(np.zeros(8, np.float32)), "scalars")
        squares.owner.array[0] = given
        loss = None if loss is None else device.operand(put(np.float64([loss])), "loss")
        cuda_optimizer.clip_scalars(squares, scalars, 0, limit=limit, loss=loss, norm=norm)
        got = scalars.owner.array
        assert got[4] == flag and (not flag or got[3] == np.float32(factor))
        np.testing.assert_array_equal(norm.owner.array, np.sqrt(given))


def test_the_factor_is_that_of_clip_norm(host_cuda, rng):  # noqa: F811
    """Up to the rounding of the norm, which BLAS sums in float32: a few units of 2^-24 at this length."""
    from host_cuda import put

    x = rng.standard_normal(300).astype(np.float32)
    clipped = x.copy()
    clip_norm(clipped, 0.5)
    squares = device.operand(put(np.zeros(1)), "squares")
    scalars = device.operand(put(np.zeros(8, np.float32)), "scalars")
    cuda_optimizer.sum_of_squares(device.operand(put(x), "x"), squares, 0)
    cuda_optimizer.clip_scalars(squares, scalars, 0, limit=0.5)
    np.testing.assert_allclose(x * scalars.owner.array[3], clipped, rtol=1e-5)


# ---- without a GPU
@pytest.mark.parametrize(
    "name, value, sentence",
    [
        ("units", -1, "units is -1 and tensor_count is 1"),
        ("tensor_count", 0, "tensor_count is 0, but units is 1"),
        ("tensors", 0, "tensors is NULL"),
        ("parameters", 0, "parameters is NULL"),
        ("parameters", 72, "parameters is 8 bytes past a multiple of 16"),
        ("gradient", 68, "gradient is 4 bytes past"),
        ("first", 0, "first is NULL"),
        ("second", 0, "second is NULL"),
        ("scalars", 0, "scalars is NULL"),
        ("average", 66, "average is 2 bytes past"),
        ("bf16", 72, "bf16 is 8 bytes past"),
        ("twin", 65, "twin is 1 bytes past"),
        ("twin_scale", 0, "twin_scale is NULL"),
        ("beta1", 1.0, "beta1 and beta2 are 1 and 0.999"),
        ("beta2", math.nan, "beta1 and beta2 are 0.9 and nan"),
        ("eps", -1.0, "eps is -1"),
    ],
)
def test_bad_arguments_are_refused_before_any_launch(library, name, value, sentence):
    args = library.ffi.new("fp4bf16_adamw_args*")
    types = dict(library.ffi.typeof("fp4bf16_adamw_args").fields)
    pointers = ("tensors", "parameters", "gradient", "first", "second", "scalars", "average", "bf16", "twin")
    good = dict.fromkeys((*pointers, "twin_scale"), 64)
    good |= {"tensor_count": 1, "units": 1, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, name: value}
    for field, v in good.items():
        setattr(args, field, library.ffi.cast(types[field].type, v))
    with pytest.raises(ValueError, match=sentence):
        library.call("adamw", args, 0)
    args.units = 0
    if name not in ("units",):
        library.call("adamw", args, 0)  # nothing to do, and no error is left behind


def test_bad_norms_are_refused(library):
    call = library.call
    with pytest.raises(ValueError, match="x is NULL"):
        call("sum_of_squares", 0, 5, 64, 64, 0)
    with pytest.raises(ValueError, match="workspace is NULL"):
        call("sum_of_squares", 64, 5, 64, 0, 0)
    with pytest.raises(ValueError, match="squares is 4 bytes past"):
        call("sum_of_squares", 64, 5, 68, 64, 0)
    with pytest.raises(ValueError, match="limit is -1"):
        call("clip_scalars", 64, 0, -1.0, 64, 0, 0)
    with pytest.raises(ValueError, match="scalars is NULL"):
        call("clip_scalars", 64, 0, 1.0, 0, 0, 0)


def test_units(library):
    units = library.lib.fp4bf16_adamw_units
    assert units(0, 16, 1) == units(5, 0, 1) == units(0, 0, 0) == 0
    for bad in ((-1, 16, 1), (1, -1, 0), (3, 24, 1), (1 << 30, 1 << 30, 0)):
        assert units(*bad) == -1
    with pytest.raises(ValueError, match="3 rows of 24 columns and its twin lies at 0"):
        tensor_table([Entry(0, 3, 24, 0, 0)])
