"""fp4bf16_gemm and fp4bf16_gemm_simple on a GPU against float64 of the decoded operands."""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np
import pytest
from test_cuda import gemm_args

from fp4bf16.python_ref.formats import E4M3
from fp4bf16.python_ref.gemm import gelu, silu

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = [np.dtype(np.float32), BF16, np.dtype(np.float16)]
ROUNDING = [2.0**-21, 2.0**-8, 2.0**-10.9]  # relative error of an output, that of expf and erfcf included
ACTIVATIONS = [lambda x: x, silu, gelu]
NAN8, POISON = 0x7F, 0xA5

# Bytes of the FP4 track: codes times the scales of nvfp4_exact.
_SCALES = np.array([8 * (i // 3 + 1) + 2 * (i % 3) for i in range(37)], np.uint8)  # (37,)
_CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_VALUES = _CODES * E4M3[_SCALES][:, None]  # (37, 8)
BYTES = _VALUES.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
assert (E4M3[BYTES] == _VALUES).all()


@pytest.fixture(autouse=True)
def _free(gpu):
    yield
    gpu.free()


# ---- operands
def e4m3_bytes(rng, batch, rows, k, data="signed"):
    """(batch, rows, k) bytes whose scales differ from block to block."""
    block = rng.integers(12, 25, (batch, rows, -(-k // 16)))
    if data == "heavy":
        block = np.where(rng.random(block.shape) < 0.02, 36, block)
    byte = BYTES[np.repeat(block, 16, axis=-1)[..., :k], rng.integers(0, 8, (batch, rows, k))]
    sign = 0 if data == "positive" else rng.integers(0, 2, byte.shape, np.uint8) << 7
    return byte | sign


def bf16(rng, batch, rows, k, data="signed"):
    x = rng.standard_normal((batch, rows, k), np.float32)
    if data == "heavy":
        x *= np.where(rng.random(x.shape) < 0.01, np.float32(50), np.float32(1))
    return (abs(x) if data == "positive" else x).astype(BF16)


def stored(x, stride, fill, gap=0):
    """`x` (batch, rows, k) in rows of `stride` elements, the rest `fill`; `gap` elements behind a matrix."""
    batch, rows, k = x.shape
    out = np.full((batch, rows * stride + gap), fill, x.dtype)
    out[:, : rows * stride].reshape(batch, rows, stride)[..., :k] = x
    return out


def up(n, multiple):
    return -(-n // multiple) * multiple


class Product:
    """One product: the operands on the host and on the device, its arguments, its float64 result.

    `batch` = (count, a_div, a_mod, b_div, b_mod). What lies between k and a stride is NaN, what lies
    between n and d_stride poison. `pad`: elements that strides are longer than needed, times 16 bytes
    unless `odd`.
    """

    def __init__(self, library, gpu, rng, m, n, k8=0, k16=0, *, batch=(1, 1, 1, 1, 1), data="signed", pad=0,
                 odd=False, m_major=False, n_major=False, row=None, col=None, bias=None, residual=None,
                 d_dtype=0, **fields):  # fmt: skip
        self.loaded, self.gpu, self.m, self.n, self.batch, self.d_dtype = library, gpu, m, n, batch, d_dtype
        count, _, a_mod, _, b_mod = batch
        self.x = {"a8": e4m3_bytes(rng, a_mod, m, k8, data), "b8": e4m3_bytes(rng, b_mod, n, k8, data),
                  "a16": bf16(rng, a_mod, m, k16, data), "b16": bf16(rng, b_mod, n, k16, data)}  # fmt: skip
        self.row = self.col = self.bias = self.residual = None
        steps = {"scalar": 0, "vector": 1}
        if row:
            self.row = np.exp2(rng.integers(-3, 4, (a_mod, m if row == "vector" else 1))).astype(np.float32)
        if col:
            self.col = rng.uniform(0.5, 2, (b_mod, n if col == "vector" else 1)).astype(np.float32)
        if bias is not None:
            self.bias = (10 * rng.standard_normal(n)).astype(DTYPES[bias])
        if residual is not None:
            self.residual = (10 * rng.standard_normal((count, m, n))).astype(DTYPES[residual])
        self.unit = 1 if odd else 16
        self.d_stride = n + pad * (1 if odd else 8)
        self.fields = dict(
            m=m, n=n, k8=k8, k16=k16, a16_m_major=int(m_major), b16_n_major=int(n_major),
            row_scale_step=steps.get(row, 0), col_scale_step=steps.get(col, 0), alpha=1.0,
            bias_dtype=bias or 0, residual_dtype=residual or 0, d_dtype=d_dtype, batch_count=count,
            a_batch_div=batch[1], a_batch_mod=a_mod, b_batch_div=batch[3], b_batch_mod=b_mod,
            d_stride=self.d_stride, d_batch_stride=m * self.d_stride, residual_stride=n + pad,
            residual_batch_stride=m * (n + pad),
        ) | fields  # fmt: skip
        self.majors = {"a16": m_major, "b16": n_major}
        self.pad = pad
        self.upload()

    def upload(self) -> None:
        """Puts the operands on the device, strides and addresses included."""
        gpu, fields, pad = self.gpu, self.fields, self.pad
        for name, x in self.x.items():
            if x.shape[-1] == 0 or x.shape[1] == 0:
                continue
            x = np.swapaxes(x, 1, 2) if self.majors.get(name) else x
            unit = max(1, self.unit // x.itemsize)
            stride = up(x.shape[2] + pad * unit, unit)
            held = stored(x, stride, NAN8 if x.itemsize == 1 else np.nan, gap=pad * unit)
            fields |= {name: gpu.put(held), f"{name}_stride": stride, f"{name}_batch_stride": held.shape[1]}
        for name, x in (("row_scale", self.row), ("col_scale", self.col)):
            if x is not None:
                fields |= {name: gpu.put(x), f"{name}_batch_stride": x.shape[1]}
        if self.bias is not None:
            fields["bias"] = gpu.put(self.bias)
        if self.residual is not None:
            fields["residual"] = gpu.put(stored(self.residual, self.n + pad, np.nan))

    def args(self, **fields):
        return gemm_args(self.loaded, **self.fields | fields)

    def run(self, function="gemm", stream=0, **fields) -> np.ndarray:
        """D (count, m, n), after a look at everything around it."""
        dtype = DTYPES[self.d_dtype]
        shape = (self.batch[0], self.m, self.d_stride)
        d = self.gpu.empty(int(np.prod(shape)) * dtype.itemsize)
        self.loaded.call(function, self.args(d=d, **fields), stream)
        got = self.gpu.get(d, shape, dtype)
        assert (np.ascontiguousarray(got[..., self.n :]).view(np.uint8) == POISON).all(), "wrote between rows"
        return got[..., : self.n]

    def results(self, function="gemm", **fields):
        """(name, D) of every configuration that takes these arguments; gemm_simple has one."""
        if function == "gemm_simple":
            yield function, self.run(function, **fields)
            return
        args, number, taken = self.args(d=1024, **fields), 0, 0  # d is not written
        while name := self.loaded._text(self.loaded.lib.fp4bf16_gemm_config(args, number)):
            try:
                yield f"{number} {name}", self.run(function, config=number, **fields)
                taken += number > 0
            except ValueError as error:  # numbered, but for other operands
                assert number > 0 and "config" in str(error), f"{number} {name}: {error}"
            number += 1
        assert taken or "simple" in self.loaded._text(self.loaded.lib.fp4bf16_gemm_config(args, 0))

    def expected(self):
        """float64 D, and the sum of |products| in its units: what an accumulation error is relative to."""
        f = self.fields
        z = np.arange(self.batch[0])
        za = z // self.batch[1] % self.batch[2]
        zb = z // self.batch[3] % self.batch[4]
        scale = np.float64(1) if self.row is None else self.row[za][..., None].astype(np.float64)
        scale = scale if self.col is None else scale * self.col[zb][:, None, :]
        y, size = _products(self.x["a8"][za], self.x["b8"][zb])
        y16, size16 = _products(self.x["a16"][za], self.x["b16"][zb])
        with np.errstate(invalid="ignore", over="ignore"):
            if f["k8"]:
                y, size = y * scale + y16, size * scale + size16
            else:
                y, size = y16 * scale, size16 * scale
            y = y * f["alpha"] + (0 if self.bias is None else self.bias.astype(np.float64))
            y = ACTIVATIONS[f.get("activation", 0)](y)
            y = y + (0 if self.residual is None else self.residual.astype(np.float64))
        return y, size * abs(f["alpha"])

    def check(self, function="gemm", **fields) -> None:
        """Every configuration against float64: as a whole, and each element."""
        y, size = self.expected()
        fast = self.fields.get("accumulate", 0) == 1 and self.fields["k8"] > 0 and function == "gemm"
        # What FP8 tensor cores lose, by python_ref.accumulator on such operands at K = 4096: promoted 4e-4 of
        # a result and 6e-4 of the sum of |products|; fast 1.2e-3 and 1e-3 of signed ones.
        limit = 2e-5 if fast else (1e-6, 1e-5, 1e-5)[self.d_dtype]
        tensor_cores = 2**-7 if fast else 2**-9 if self.fields["k8"] else 2**-14
        part = tensor_cores if function == "gemm" else 2**-16
        bound = 1.2 * part * size + ROUNDING[self.d_dtype] * abs(y) + 5e-5
        for name, got in self.results(function, **fields):
            d = got.astype(np.float64)
            diff = 1 - 2 * (d * y).sum() / ((d * d).sum() + (y * y).sum())
            assert diff < limit, f"{name}: calc_diff {diff:.2e}"
            worst = np.unravel_index(np.argmax(abs(d - y) / bound), d.shape)
            assert abs(d - y)[worst] <= bound[worst], f"{name}: D{worst} is {d[worst]}, not {y[worst]}"


def _products(a, b):
    """a @ b^T and |a| @ |b|^T in float64, on the GPU where PyTorch is there."""
    a, b = (E4M3[x] if x.dtype == np.uint8 else x.astype(np.float32) for x in (a, b))
    if a.shape[-1] == 0:
        zero = np.zeros((len(a), a.shape[1], b.shape[1]))
        return zero, zero
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            a, b = (torch.from_numpy(np.ascontiguousarray(x)).cuda().double() for x in (a, b))
            return (a @ b.mT).cpu().numpy(), (a.abs() @ b.mT.abs()).cpu().numpy()
    a, b = a.astype(np.float64), np.swapaxes(b, 1, 2).astype(np.float64)
    with np.errstate(invalid="ignore"):
        return a @ b, abs(a) @ abs(b)


functions = pytest.mark.parametrize("function", ["gemm", "gemm_simple"])
SHAPES = [
    (1, 1, 16), (1, 256, 128), (257, 1, 64), (3, 5, 1), (64, 96, 7), (100, 52, 100), (129, 257, 130),
    (128, 256, 128), (384, 512, 1152), (1000, 77, 333), (31, 640, 4608),
]  # fmt: skip


# ---- shapes, tracks
@functions
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("track", ["fp4", "bf16", "dual"])
def test_shapes(library, gpu, rng, function, shape, track):
    m, n, k = shape
    k8, k16 = {"fp4": (k, 0), "bf16": (0, k), "dual": (k, 1 + k // 7)}[track]
    Product(library, gpu, rng, m, n, k8, k16, pad=m % 3).check(function)


@pytest.mark.parametrize("tracks", [dict(k8=384), dict(k16=200), dict(k8=256, k16=48)])
def test_more_tiles_than_multiprocessors(library, gpu, rng, tracks):
    """Several tiles a thread block: what one leaves behind must not reach the next."""
    for d_dtype in (0, 1):
        p = Product(library, gpu, rng, 2500, 4104, row="vector", col="vector", d_dtype=d_dtype, **tracks)
        p.check("gemm")


@functions
def test_a_real_layer(library, gpu, rng, function):
    p = Product(library, gpu, rng, 2048, 4608, 1152, 32, row="vector", col="vector", bias=1, activation=1,
                residual=1, d_dtype=1)  # fmt: skip
    p.check(function)


@functions
@pytest.mark.parametrize("data", ["signed", "positive", "heavy"])
def test_data(library, gpu, rng, function, data):
    for k8, k16 in ((4096, 0), (2048, 64), (0, 2048)):
        Product(library, gpu, rng, 160, 320, k8, k16, data=data, row="vector").check(function)


@functions
def test_fast_accumulation(library, gpu, rng, function):
    for k16 in (0, 32):
        Product(library, gpu, rng, 200, 264, 4096, k16, accumulate=1, col="vector").check(function)


@functions
@pytest.mark.parametrize("m_major", [False, True])
@pytest.mark.parametrize("n_major", [False, True])
def test_transposes_of_the_bf16_track(library, gpu, rng, function, m_major, n_major):
    for m, n, k in ((1, 1, 1), (130, 72, 200), (256, 384, 128), (97, 513, 65)):
        Product(library, gpu, rng, m, n, 0, k, m_major=m_major, n_major=n_major, pad=1).check(function)


def test_simple_kernel_takes_transposes_in_a_dual_product_and_any_alignment(library, gpu, rng):
    for m, n, k8, k16 in ((65, 33, 47, 13), (3, 130, 1, 64)):
        p = Product(library, gpu, rng, m, n, k8, k16, odd=True, pad=3, m_major=True, n_major=True)
        p.check("gemm_simple")


# ---- epilogue
@functions
@pytest.mark.parametrize("row", [None, "scalar", "vector"])
@pytest.mark.parametrize("col", [None, "scalar", "vector"])
def test_scales_stand_between_the_tracks(library, gpu, rng, function, row, col):
    for k8, k16 in ((96, 0), (96, 48), (0, 96)):
        Product(library, gpu, rng, 70, 136, k8, k16, row=row, col=col).check(function)


@functions
@pytest.mark.parametrize("activation", [0, 1, 2])
@pytest.mark.parametrize("d_dtype", [0, 1, 2])
def test_epilogue(library, gpu, rng, function, activation, d_dtype):
    for i, option in enumerate(
        [dict(bias=0, residual=2), dict(bias=1), dict(residual=0, alpha=-0.75), dict(bias=2, residual=1)]
    ):
        n = (200, 131, 64, 1)[i]
        # small products: the activations' bends are met
        p = Product(library, gpu, rng, 150, n, 0 if i == 1 else 64, 24, pad=i % 2, row="scalar",
                    activation=activation, d_dtype=d_dtype, **dict(alpha=2.0**-6) | option)  # fmt: skip
        p.check(function)


@functions
def test_residual_in_place(library, gpu, rng, function):
    p = Product(library, gpu, rng, 90, 104, 64, 0, residual=0)
    d = gpu.put(p.residual)
    library.call(function, p.args(residual=d, d=d), 0)
    np.testing.assert_allclose(gpu.get(d, p.residual.shape, np.float32), p.expected()[0], rtol=1e-3, atol=0.5)


@functions
def test_without_products_the_epilogue_of_zero(library, gpu, rng, function):
    p = Product(library, gpu, rng, 33, 65, bias=1, residual=0, activation=1, pad=1)
    p.check(function)
    plain = Product(library, gpu, rng, 5, 40)
    assert (plain.run(function) == 0).all()


@functions
def test_empty(library, gpu, rng, function):
    for m, n, k in ((0, 8, 16), (8, 0, 16), (0, 0, 0)):
        p = Product(library, gpu, rng, m, n, k, k)
        assert p.run(function).shape == (1, m, n)


# ---- batch
@functions
@pytest.mark.parametrize("batch", [(3, 1, 3, 1, 3), (6, 3, 2, 1, 3), (6, 1, 3, 3, 2), (4, 1, 4, 1, 1),
                                   (4, 1, 1, 1, 4), (2, 1, 1, 1, 1)], ids=str)  # fmt: skip
def test_batch(library, gpu, rng, function, batch):
    options = dict(batch=batch, row="vector", col="vector", bias=0, residual=1, pad=1)
    for m, n, k8, k16 in ((40, 150, 80, 0), (130, 72, 96, 33), (1, 24, 0, 64)):
        Product(library, gpu, rng, m, n, k8, k16, **options).check(function)
    Product(library, gpu, rng, 100, 136, 0, 72, m_major=True, n_major=True, **options).check(function)


@functions
def test_batches_interleaved_in_d(library, gpu, rng, function):
    """D (m, batch, n): what attention heads look like."""
    p = Product(library, gpu, rng, 48, 40, 64, 0, batch=(3, 1, 3, 1, 1))
    d = gpu.empty(48 * 3 * 40 * 4)
    library.call(function, p.args(d=d, d_stride=3 * 40, d_batch_stride=40), 0)
    got = gpu.get(d, (48, 3, 40), np.float32).swapaxes(0, 1)
    np.testing.assert_array_equal(got, p.run(function))


@functions
def test_batch_fields_that_are_not_read(library, gpu, rng, function):
    """A single product takes any batch fields; a residual may lie backwards."""
    p = Product(library, gpu, rng, 20, 40, 64, 16, row="vector")
    p.check(function, a_batch_div=3, a_batch_mod=5, a8_batch_stride=7, b16_batch_stride=-9, d_batch_stride=-1)
    p = Product(library, gpu, rng, 20, 40, 64, 0, batch=(3, 1, 3, 1, 1), residual=0)
    plain, size = p.run(function), 20 * 40
    p.fields["residual"] += 2 * size * 4
    backwards = p.run(function, residual_batch_stride=-size)
    np.testing.assert_allclose(backwards - p.residual[::-1], plain - p.residual, rtol=1e-4, atol=1e-3)


# ---- bits
@functions
@pytest.mark.parametrize("track", ["fp4", "bf16", "dual"])
def test_twice_the_same_bits(library, gpu, rng, function, track):
    k8, k16 = {"fp4": (1024, 0), "bf16": (0, 1024), "dual": (1024, 64)}[track]
    p = Product(library, gpu, rng, 300, 520, k8, k16, row="vector", col="vector", bias=0, d_dtype=1)
    for (name, first), (_, again) in zip(p.results(function), p.results(function), strict=True):
        assert first.tobytes() == again.tobytes(), name


@functions
def test_non_finite_operands_spoil_their_own_rows(library, gpu, rng, function):
    p = Product(library, gpu, rng, 140, 264, 256, 64)
    p.x["a8"][0, 7, 100] = NAN8
    p.x["b8"][0, 200, 255] = 0xFF
    p.x["a16"][0, 33, 5], p.x["b16"][0, 44, 63] = np.nan, np.inf
    p.upload()
    want = p.expected()[0]
    for name, got in p.results(function):
        nan, inf = np.isnan(want), np.isinf(want)
        np.testing.assert_array_equal(np.isnan(got), nan, err_msg=name)
        np.testing.assert_array_equal(got[inf], want[inf], err_msg=name)
        rest = ~(nan | inf)
        assert nan.any() and inf.any() and np.isfinite(got[rest]).all(), name
        np.testing.assert_allclose(got[rest], want[rest], rtol=1e-2, atol=1.0, err_msg=name)


@functions
def test_captured_in_a_graph_and_replayed(library, gpu, rng, function):
    rt = gpu.rt
    p = Product(library, gpu, rng, 70, 136, 128, 32, row="vector", bias=1)
    stream = gpu.check(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
    d = gpu.empty(70 * 136 * 4)
    args = p.args(d=d)
    gpu.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    library.call(function, args, int(stream))
    graph = gpu.check(rt.cudaStreamEndCapture(stream))
    run = gpu.check(rt.cudaGraphInstantiate(graph, 0))
    for _ in range(3):
        p.x["a8"] = e4m3_bytes(rng, 1, 70, 128)
        held = p.x["a8"]
        kind = rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        gpu.check(rt.cudaMemcpy(p.fields["a8"], held.ctypes.data, held.nbytes, kind))
        gpu.check(rt.cudaGraphLaunch(run, stream))
        gpu.check(rt.cudaStreamSynchronize(stream))
        replayed = gpu.get(d, (1, 70, 136), np.float32)
        np.testing.assert_array_equal(replayed, p.run(function))
    gpu.check(rt.cudaGraphExecDestroy(run))
    gpu.check(rt.cudaStreamDestroy(stream))


# ---- misuse
def test_misaligned_operands_are_refused_and_nothing_sticks(library, gpu, rng):
    p = Product(library, gpu, rng, 64, 64, 64, 64, pad=1)
    major = int(library.device(0).compute_capability.split(".")[0])
    refused = [
        (dict(a16=p.fields["a16"] + 1), "a16 is 1 bytes past a multiple of"),
        (dict(row_scale=p.fields["a8"] + 2), "row_scale is 2 bytes past a multiple of 4"),
    ]
    if major == 9:  # TMA's demands
        refused += [
            (dict(a8=p.fields["a8"] + 4), "a8 is 4 bytes past a multiple of 16"),
            (dict(b16=p.fields["b16"] + 8), "b16 is 8 bytes past a multiple of 16"),
            (dict(b8_stride=p.fields["b8_stride"] - 8), "row stride of b8 is 72 bytes.* multiple of 16"),
            (dict(a16_stride=67), "row stride of a16 is 134 bytes.* multiple of 16"),
            (dict(config=10**6), "config"),
        ]
    for fields, sentence in refused:
        with pytest.raises(ValueError, match=sentence):
            p.run("gemm", **fields)
        p.check("gemm")
        p.check("gemm_simple")
    gpu.check(gpu.rt.cudaDeviceSynchronize())
