"""Launches with a condition on the device (`run_if`): nothing where it is 0, else the bits of the same launch
without one; alone, and in a graph whose condition changes between its replays."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import test_cuda_norm as norms
from conv_kernels import Geometry, point, poisoned
from graphs import captured
from test_cuda_certificate import WAYS, made
from test_cuda_conv import Forward
from test_cuda_conv_phases import PhasedForward, small
from test_cuda_gemm import DTYPES, Product

from fp4bf16.backends import cuda_gemm
from fp4bf16.errors import ShapeError
from fp4bf16.interop import BFLOAT16 as BF16

gpu_only = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _free(request):
    yield
    if "gpu" in request.fixturenames:
        request.getfixturevalue("gpu").free()


class Conditional:
    """A launch that writes `outputs`, (address, bytes) each: launch(run_if address, stream)."""

    def __init__(self, gpu, launch, outputs):
        self.gpu, self.launch, self.outputs = gpu, launch, outputs
        self.flag = gpu.put(np.array([0], np.int32))

    def poison(self) -> None:
        for address, size in self.outputs:
            self.gpu.check(self.gpu.rt.cudaMemset(address, self.gpu.POISON, size))

    def found(self) -> list[bytes]:
        return [self.gpu.get(address, (size,), np.uint8).tobytes() for address, size in self.outputs]

    def set(self, value: int) -> None:
        host, kind = np.array([value], np.int32), self.gpu.rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.gpu.check(self.gpu.rt.cudaMemcpy(self.flag, host.ctypes.data, 4, kind))

    def check(self, graph: bool = True) -> None:
        """Nothing where the flag is 0, the unconditional result where it is anything else."""
        self.poison()
        nothing = self.found()
        self.launch(0, 0)
        want = self.found()
        assert want != nothing
        for value in (0, 1, 0, -5):
            self.poison(), self.set(value)
            self.launch(self.flag, 0)
            assert self.found() == (want if value else nothing)
        if graph:
            with captured(self.gpu, lambda stream: self.launch(self.flag, stream)) as replay:
                for value in (1, 0, 0, 1):
                    self.poison(), self.set(value)
                    replay()
                    assert self.found() == (want if value else nothing)


GEO = Geometry(5, 16, 16, 64, 136)
CONVOLUTIONS = {
    "fp4": (Forward, GEO, dict(c8=64)), "fast": (Forward, GEO, dict(c8=64, accumulate=1)),
    "bf16": (Forward, GEO, dict(c16=64)),
    "dual": (Forward, GEO, dict(c8=64, c16=40, branch=True, residual=1)),
    "1x1, one pixel": (Forward, point(3, 1, 1, 64, 16), dict(c16=64, bias=0)),
    "many tiles": (Forward, Geometry(40, 16, 16, 16, 256), dict(c16=16)),
    "float32": (Forward, Geometry(2, 7, 5, 16, 40, stride=2), dict(c16=16, d_dtype=0)),
    "phases": (PhasedForward, small(5, 8, 8, 32, 136), dict(c16=32)),
    "phases, fast": (PhasedForward, small(5, 8, 8, 32, 136), dict(c8=32, accumulate=1)),
    "any padding": (Forward, Geometry(2, 6, 6, 16, 16, top=40, bottom=40, left=40, right=40), dict(c16=16)),
}  # fmt: skip


@gpu_only
@pytest.mark.parametrize("function", ["conv2d", "conv2d_simple"])
@pytest.mark.parametrize("kind, geo, options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_with_a_condition(library, gpu, rng, function, kind, geo, options):
    """Every configuration; in graphs, too."""
    p = kind(library, gpu, rng, geo, **options)
    d = poisoned(gpu, (geo.n, geo.oh, geo.ow, geo.o), DTYPES[p.d_dtype])
    place = dict(d=d.data, d_strides=d.strides)
    names = range(1 if function == "conv2d_simple" else 64)
    taken = 0
    for config in names:
        args = p.args(function, config=config, **place)
        if config and not library._text(library.lib.fp4bf16_conv2d_config(args, config)):
            break

        def launch(run_if, stream, config=config):
            library.call(function, p.args(function, config=config, run_if=run_if, **place), stream)

        try:
            launch(0, 0)
        except ValueError as error:  # numbered, but for other operands
            assert config > 0 and "config" in str(error)
            continue
        Conditional(gpu, launch, [(d.address, d.held.nbytes)]).check()
        taken += 1
    assert taken


@gpu_only
@pytest.mark.parametrize("function", ["conv2d", "conv2d_simple"])
def test_what_is_made_of_a_convolution_s_result_with_a_condition(library, gpu, rng, function):
    """Sums and FP4 codes beside it."""
    geo = Geometry(5, 16, 16, 32, 128)
    p = Forward(library, gpu, rng, geo, c8=32, accumulate=1)
    d = poisoned(gpu, (geo.n, geo.oh, geo.ow, geo.o), BF16)
    place = dict(d=d.data, d_strides=d.strides)
    parts = int(library.lib.fp4bf16_conv2d_sum_parts(p.args(**place)))
    assert parts > 0
    sums, codes = gpu.empty(8 * geo.n * parts * geo.o), gpu.empty(d.held.nbytes // 2)
    place |= dict(sums=sums, expanded=codes)

    def launch(run_if, stream):
        library.call(function, p.args(function, run_if=run_if, **place), stream)

    outputs = [(d.address, d.held.nbytes), (sums, 8 * geo.n * parts * geo.o), (codes, d.held.nbytes // 2)]
    Conditional(gpu, launch, outputs).check()


@gpu_only
@pytest.mark.parametrize("function", ["gemm", "gemm_simple"])
@pytest.mark.parametrize("fields", [dict(k8=256), dict(k8=256, accumulate=1), dict(k16=200),
                                    dict(k8=128, k16=72, batch=(3, 1, 3, 1, 3))], ids=str)  # fmt: skip
def test_products_with_a_condition(library, gpu, rng, function, fields):
    p = Product(library, gpu, rng, 300, 264, d_dtype=1, **fields)
    size = p.batch[0] * 300 * p.d_stride * 2
    d, taken = gpu.empty(size), 0
    for config in range(1 if function == "gemm_simple" else 64):
        if config and not library._text(library.lib.fp4bf16_gemm_config(p.args(d=d), config)):
            break

        def launch(run_if, stream, config=config):
            library.call(function, p.args(d=d, config=config, run_if=run_if), stream)

        try:
            launch(0, 0)
        except ValueError as error:
            assert config > 0 and "config" in str(error)
            continue
        Conditional(gpu, launch, [(d, size)]).check()
        taken += 1
    assert taken


@gpu_only
@pytest.mark.parametrize("n, pixels, c, groups", WAYS)
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("wanted", [dict(), dict(expanded=True), dict(y=False, expanded=True, packed=True)],
                         ids=str)  # fmt: skip
def test_norms_with_a_condition(library, gpu, rng, n, pixels, c, groups, given, wanted):
    norm = made(library, gpu, rng, n, pixels, c, groups, given, silu=True)
    norm.forward(**wanted)
    sizes = {"y": 2 * n * pixels * c, "expanded": n * pixels * c, "packed": n * pixels * c // 2,
             "block_scale": n * pixels * c // 16, "outer_scale": 4, "mean": 4 * n * groups,
             "rstd": 4 * n * groups}  # fmt: skip
    outputs = [(norm.fields[k], size) for k, size in sizes.items() if k in norm.fields]
    if "expanded" in norm.fields:
        parts = library.lib.fp4bf16_group_norm_norm_parts(norm.args("group_norm"))
        norm.fields["norms"] = gpu.empty(8 * parts)
        outputs.append((norm.fields["norms"], 8 * parts))
    held = [(address, size) for address, size in outputs if address != norm.fields.get("y")]
    if "y" in norm.fields:  # behind it lies a margin that the first run has checked
        held.append((norm.fields["y"], sizes["y"] + 2 * norms.SPARE))

    args = norm.args("group_norm")  # whose workspace no capture may allocate

    def launch(run_if, stream):
        args.run_if = library.ffi.cast("int32_t*", run_if)
        library.call("group_norm", args, stream)

    Conditional(gpu, launch, held).check()


@gpu_only
def test_kernels_around_products_with_a_condition(library, gpu, rng):
    """Upsampling, patches and the convolution to few outputs."""
    x16 = rng.standard_normal((2, 5, 6, 16)).astype(BF16)
    x, weight = gpu.put(x16), gpu.put(rng.standard_normal((3, 3, 3, 16)).astype(BF16))
    odd = gpu.put(rng.standard_normal((2, 5, 6, 5)).astype(BF16))
    up, up_odd, wide, few = (gpu.empty(size) for size in (4 * x16.nbytes, 4 * 600, 2 * 60 * 144, 4 * 180))
    launches = {
        "upsample": ((x, 2, 2, 5, 6, 16, [480, 96, 16], up, [1920, 192, 16]), up, 4 * x16.nbytes),
        "upsample ": ((odd, 2, 2, 5, 6, 5, [150, 30, 5], up_odd, [600, 60, 5]), up_odd, 4 * 600),
        "patches": ((x, 1, 2, 5, 6, 16, [480, 96, 16], 5, 6, 3, 3, 1, 1, 1, wide, 144), wide, 2 * 60 * 144),
        "conv2d_few": ((x, 2, 5, 6, 16, [480, 96, 16], weight, 5, 6, 3, 3, 3, 1, 1, 0, few, [90, 18, 3]), few,
                       4 * 180),
    }  # fmt: skip
    for name, (arguments, out, size) in launches.items():

        def launch(run_if, stream, name=name, arguments=arguments):
            library.call(name.strip(), *arguments, run_if, stream)

        Conditional(gpu, launch, [(out, size)]).check()


def test_a_condition_is_one_int32(host_device):
    for shape, dtype in (((2,), "int32"), ((1,), "float32")):
        with pytest.raises(ShapeError, match="one int32 is needed"):
            cuda_gemm.condition(host_device(shape, dtype))
    assert cuda_gemm.condition(None) == 0


@pytest.fixture
def host_device():
    """An array by shape and dtype alone."""
    return lambda shape, dtype: SimpleNamespace(shape=shape, size=math.prod(shape), dtype=dtype, address=64)
