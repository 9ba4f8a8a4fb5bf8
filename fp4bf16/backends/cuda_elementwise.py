"""What surrounds products and convolutions on a GPU: upsampling, patches, sums, SiLU, embeddings, with their
adjoints.

Each function fills device arrays that the caller made, on the stream with that handle, and returns nothing.
Activations and their gradients are bfloat16, gradients of parameters float32; `src/cuda/fp4bf16.h` has the
formulas. Checked here is only what the library cannot know: shapes and dtypes that would make it read or
write past an array's end.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import device
from ..device import DeviceArray
from ..errors import DTypeError, ShapeError
from .cuda_conv import Geometry
from .cuda_gemm import DTYPES, condition, uniform

#: Rows of partial sums that `column_sums` needs at most.
_PARTS = 256


# ---- checks
def fits(op: str, name: str, x: DeviceArray, shape: Sequence[int], dtype: str | None = None) -> None:
    """Raise unless `x` has that shape, that dtype, and its last axis contiguous."""
    if x.shape != tuple(shape):
        raise ShapeError(f"{op}: {name} has shape {x.shape}, but {tuple(shape)} is needed; allocate it with "
                         f"that shape")  # fmt: skip
    if dtype is not None and x.dtype != dtype:
        raise DTypeError(f"{op}: {name} has dtype {x.dtype}, but {dtype} is needed; convert it first")
    if x.size and x.ndim and x.shape[-1] > 1 and x.strides[-1] != 1:
        raise ValueError(f"{op}: the last axis of {name} has stride {x.strides[-1]}, but must be contiguous; "
                         f"copy it first")  # fmt: skip


def whole(op: str, name: str, x: DeviceArray, shape: Sequence[int], dtype: str | None = None) -> int:
    """`fits` and C-contiguous; its address."""
    fits(op, name, x, shape, dtype)
    if not x.c_contiguous:
        raise ValueError(f"{op}: {name} has strides {x.strides}, but must be C-contiguous; copy it first")
    return x.address


def row_stride(op: str, name: str, x: DeviceArray) -> int:
    """The one stride of the rows of x (..., C); `ValueError` where they are not evenly spaced."""
    step = uniform(x.shape[:-1], x.strides[:-1])
    if step is None:
        raise ValueError(f"{op}: the rows of {name} {x.shape} are not evenly spaced (strides {x.strides}); "
                         f"copy it first")  # fmt: skip
    return step


def _rows(x: DeviceArray) -> int:
    return x.size // x.shape[-1] if x.size else 0


# ---- pictures
def upsample(x: DeviceArray, y: DeviceArray, stream: int, run_if: DeviceArray | None = None) -> None:
    """y (N, 2H, 2W, C) = each pixel of x (N, H, W, C) four times; any dtype of one or two bytes. run_if: (1,)
    int32; nothing is done where it is 0 when the kernel starts.
    """
    n, h, w, c = x.shape
    fits("upsample", "x", x, x.shape)
    fits("upsample", "y", y, (n, 2 * h, 2 * w, c), x.dtype)
    device.call("upsample", x.address, x.itemsize, n, h, w, c, list(x.strides[:3]), y.address,
                list(y.strides[:3]), condition(run_if), stream)  # fmt: skip


def upsample_backward(g: DeviceArray, dx: DeviceArray, stream: int, add: DeviceArray | None = None) -> None:
    """dx (N, H, W, C) = the sum of each 2 x 2 patch of g (N, 2H, 2W, C), + add; bfloat16."""
    n, h, w, c = dx.shape
    fits("upsample_backward", "g", g, (n, 2 * h, 2 * w, c), "bfloat16")
    fits("upsample_backward", "dx", dx, dx.shape, "bfloat16")
    if add is not None:
        fits("upsample_backward", "add", add, dx.shape, "bfloat16")
    device.call("upsample_backward", g.address, n, h, w, c, list(g.strides[:3]),
                0 if add is None else add.address, [0] * 3 if add is None else list(add.strides[:3]),
                dx.address, list(dx.strides[:3]), stream)  # fmt: skip


# ---- convolutions of few channels
def _float_dtype(op: str, name: str, x: DeviceArray) -> int:
    if x.dtype not in ("float32", "bfloat16"):
        raise DTypeError(f"{op}: {name} has dtype {x.dtype}, but float32 or bfloat16 is needed; convert it "
                         f"first")  # fmt: skip
    return DTYPES[x.dtype]


def patches(
    x: DeviceArray, out: DeviceArray, geo: Geometry, stream: int, run_if: DeviceArray | None = None
) -> None:  # fmt: skip
    """out (N, OH, OW, width) bfloat16, contiguous = the kh * kw * C values of x (N, H, W, C) float32 or
    bfloat16 that each output pixel of the convolution meets, in the order of a weight's row, then zeros.
    run_if: as of `upsample`.
    """
    dtype, c, width = _float_dtype("patches", "x", x), x.shape[3], out.shape[3]
    fits("patches", "x", x, (geo.n, geo.h, geo.w, c))
    to = whole("patches", "out", out, (geo.n, geo.oh, geo.ow, width), "bfloat16")
    device.call("patches", x.address, dtype, *x.shape, list(x.strides[:3]), geo.oh, geo.ow, geo.kh, geo.kw,
                geo.stride, geo.top, geo.left, to, width, condition(run_if), stream)  # fmt: skip


def conv2d_few(
    x: DeviceArray, weight: DeviceArray, bias: DeviceArray | None, out: DeviceArray, geo: Geometry,
    stream: int, run_if: DeviceArray | None = None,
) -> None:  # fmt: skip
    """out (N, OH, OW, O) float32 = the convolution of stride 1 of x (N, H, W, C) bfloat16, C a multiple of 8,
    with weight (O, kh, kw, C) bfloat16, + bias (O,) float32; O * kh * kw at most 64.
    run_if: as of `upsample`.
    """
    op, c = "conv2d_few", x.shape[3]
    fits(op, "x", x, (geo.n, geo.h, geo.w, c), "bfloat16")
    fits(op, "out", out, (geo.n, geo.oh, geo.ow, geo.o), "float32")
    factor = whole(op, "weight", weight, (geo.o, geo.kh, geo.kw, c), "bfloat16")
    added = 0 if bias is None else whole(op, "bias", bias, (geo.o,), "float32")
    device.call(op, x.address, *x.shape, list(x.strides[:3]), factor, *out.shape[1:], geo.kh, geo.kw, geo.top,
                geo.left, added, out.address, list(out.strides[:3]), condition(run_if), stream)  # fmt: skip


def spread_taps(g: DeviceArray, y: DeviceArray, geo: Geometry, stream: int) -> None:
    """y (N, H, W, width) bfloat16, contiguous = what each pixel of a convolution of stride 1 gets of the
    gradient g (N, OH, OW, O) float32 or bfloat16 by each output and tap, then zeros.
    """
    dtype, width = _float_dtype("spread_taps", "g", g), y.shape[3]
    fits("spread_taps", "g", g, (geo.n, geo.oh, geo.ow, geo.o))
    to = whole("spread_taps", "y", y, (geo.n, geo.h, geo.w, width), "bfloat16")
    device.call("spread_taps", g.address, dtype, *g.shape, list(g.strides[:3]), geo.h, geo.w, geo.kh, geo.kw,
                geo.top, geo.left, to, width, stream)  # fmt: skip


# ---- rows
def add(a: DeviceArray, b: DeviceArray, out: DeviceArray, stream: int) -> None:
    """out (..., C) = a + b, bfloat16; rows evenly spaced. `out` may be `a` or `b`."""
    arguments: list[int] = []
    for name, x in (("a", a), ("b", b), ("out", out)):
        fits("add", name, x, out.shape, "bfloat16")
        arguments += [x.address, row_stride("add", name, x)]
    device.call("add", *arguments[:4], _rows(out), out.shape[-1], *arguments[4:], stream)


def column_sums(x: DeviceArray, sums: DeviceArray, stream: int) -> None:
    """sums (C,) float32 += the sum of x (..., C) bfloat16 over all its rows, which are evenly spaced."""
    c, rows = x.shape[-1], _rows(x)
    fits("column_sums", "x", x, x.shape, "bfloat16")
    whole("column_sums", "sums", sums, (c,), "float32")
    workspace = device.empty((min(_PARTS, rows), c), "float32", like=x)
    device.call("column_sums", x.address, rows, c, row_stride("column_sums", "x", x), sums.address,
                workspace.address, stream)  # fmt: skip


# ---- SiLU
def silu(x: DeviceArray, y: DeviceArray, stream: int) -> None:
    """y = x sigmoid(x), both contiguous, of one shape and dtype, float32 or bfloat16; `y` may be `x`."""
    dtype = _float_dtype("silu", "x", x)
    arguments = (whole("silu", "x", x, x.shape), x.size, dtype, whole("silu", "y", y, x.shape, x.dtype))
    device.call("silu", *arguments, stream)


def silu_backward(g: DeviceArray, x: DeviceArray, dx: DeviceArray, stream: int) -> None:
    """dx = g times the derivative of `silu` at x, all of one shape and dtype."""
    dtype = _float_dtype("silu_backward", "x", x)
    g_at, x_at, dx_at = (
        whole("silu_backward", name, array, x.shape, x.dtype)
        for name, array in (("g", g), ("x", x), ("dx", dx))
    )
    device.call("silu_backward", g_at, x_at, x.size, dtype, dx_at, stream)


# ---- embeddings
def timestep_embedding(
    t: DeviceArray, out: DeviceArray, stream: int, *, flip: bool, freq_shift: float, max_period=10000.0
) -> None:
    """out (B, dim) bfloat16: `nn.layers.timestep_embedding` of t int64 (B,), or (1,) for all rows."""
    rows, dim = out.shape
    fits("timestep_embedding", "out", out, out.shape, "bfloat16")
    fits("timestep_embedding", "t", t, (1,) if t.shape == (1,) else (rows,), "int64")
    step = 0 if t.shape == (1,) else 1
    device.call("timestep_embedding", t.address, step, rows, dim, int(flip), freq_shift, max_period,
                out.address, out.strides[0], stream)  # fmt: skip


def take_rows(weight: DeviceArray, index: DeviceArray, out: DeviceArray, stream: int) -> None:
    """out (B, dim) bfloat16 = rows index (B,) int64 of weight (count, dim) float32; zeros out of range."""
    (rows, dim), count = out.shape, weight.shape[0]
    weight_at = whole("take_rows", "weight", weight, (count, dim), "float32")
    index_at = whole("take_rows", "index", index, (rows,), "int64")
    fits("take_rows", "out", out, out.shape, "bfloat16")
    device.call("take_rows", weight_at, count, dim, index_at, rows, out.address, out.strides[0], stream)


def take_rows_backward(g: DeviceArray, index: DeviceArray, dweight: DeviceArray, stream: int) -> None:
    """dweight[index[i]] += g[i] for i = 0, 1, ...; g (B, dim) bfloat16, dweight (count, dim) float32."""
    (rows, dim), count = g.shape, dweight.shape[0]
    fits("take_rows_backward", "g", g, g.shape, "bfloat16")
    index_at = whole("take_rows_backward", "index", index, (rows,), "int64")
    to = whole("take_rows_backward", "dweight", dweight, (count, dim), "float32")
    device.call("take_rows_backward", g.address, g.strides[0], index_at, rows, dim, to, count, stream)
