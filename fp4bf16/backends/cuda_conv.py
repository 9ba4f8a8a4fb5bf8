"""Convolutions on a GPU: the arguments of `fp4bf16_conv2d` and of its gradients, and their launch.

Pictures are (N, H, W, C) with channels side by side, any other strides; weights (O, kh, kw, C), rows of an
output channel contiguous. Nothing is checked here that the library checks, and nothing is converted: what
the kernels cannot read is copied by `conv_cuda` before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..device import DeviceArray
from . import cuda
from .cuda_gemm import ACCUMULATE, ACTIVATIONS, DTYPES, condition, filled
from .cuda_tape import call, empty


class Geometry(NamedTuple):
    """A convolution's sizes; output pixel (p, q) meets input pixels (p * stride - top + i, q * stride - left
    + j), those outside the picture being zero.
    """

    n: int
    h: int
    w: int
    oh: int
    ow: int
    o: int
    kh: int
    kw: int
    stride: int
    top: int
    left: int


def strides(x: DeviceArray) -> tuple[int, int, int]:
    """Strides of the three outer axes of pictures; an axis of one element, whose stride means nothing, gets
    the one that it would have beside its inner axes.
    """
    found = [0, 0, 0]
    natural = x.shape[3]
    for axis in (2, 1, 0):
        found[axis] = x.strides[axis] if x.shape[axis] > 1 else natural
        natural = found[axis] * max(1, x.shape[axis])
    return tuple(found)


def _row(w: DeviceArray) -> int:
    """Stride from output channel to output channel of a weight."""
    return w.strides[0] if w.shape[0] > 1 else w.size


def _added(fields: dict, name: str, x: DeviceArray | None) -> None:
    """Address and dtype of what is added to the sums."""
    if x is not None:
        fields[name] = x.address
        fields[f"{name}_dtype"] = DTYPES[x.dtype]


def _scale(fields: dict, name: str, x: DeviceArray | None) -> None:
    """A scale with one element for each index, or one for all."""
    if x is not None:
        fields |= {name: x.address, f"{name}_step": int(x.size > 1)}


def _arguments(
    geo: Geometry, d: DeviceArray, *,
    x8: DeviceArray | None = None, w8: DeviceArray | None = None,
    x16: DeviceArray | None = None, w16: DeviceArray | None = None, on_output: bool = False,
    image_scale: DeviceArray | None = None, col_scale: DeviceArray | None = None, alpha: float = 1.0,
    activation: str | None = None, bias: DeviceArray | None = None, bias2: DeviceArray | None = None,
    image_bias: DeviceArray | None = None, residual: DeviceArray | None = None, accumulate: str = "promoted",
    config: int = 0, expanded: DeviceArray | None = None, expanded_exponent: int = 0, phases: bool = False,
    run_if: DeviceArray | None = None,
) -> Any:  # fmt: skip
    """The struct of a convolution; see `forward`."""
    fields = geo._asdict() | {
        "d": d.address, "d_dtype": DTYPES[d.dtype], "d_strides": strides(d), "alpha": alpha,
        "activation": ACTIVATIONS[activation], "accumulate": ACCUMULATE[accumulate], "config": config,
        "phases": int(phases),
    }  # fmt: skip
    for bits, x, w in ((8, x8, w8), (16, x16, w16)):
        if x is not None:
            fields |= {
                f"c{bits}": x.shape[3], f"x{bits}": x.address, f"w{bits}": w.address,
                f"x{bits}_strides": strides(x), f"w{bits}_stride": _row(w),
            }  # fmt: skip
    fields["x16_on_output"] = int(on_output)
    _scale(fields, "image_scale", image_scale)
    _scale(fields, "col_scale", col_scale)
    for name, x in (("bias", bias), ("image_bias", image_bias), ("residual", residual)):
        _added(fields, name, x)
    if bias2 is not None:
        fields |= {"bias2": bias2.address, "bias_dtype": DTYPES[bias2.dtype]}
    if image_bias is not None:
        fields["image_bias_stride"] = image_bias.strides[0] if geo.n > 1 else geo.o
    if residual is not None:
        fields["residual_strides"] = strides(residual)
    if expanded is not None:
        fields |= {"expanded": expanded.address, "expanded_exponent": expanded_exponent}
    if run_if is not None:
        fields["run_if"] = condition(run_if)
    return filled("fp4bf16_conv2d_args", fields)


#: The sums of a convolution: memory for them, or a function that makes it for a number of parts.
Sums = DeviceArray | Callable[[int], DeviceArray] | None


def forward(geo: Geometry, d: DeviceArray, stream: int, *, simple: bool = False, sums: Sums = None,
            **options: Any) -> DeviceArray | None:  # fmt: skip
    """d (N, OH, OW, O) = activation(alpha * (scales * (x8 conv w8) + x16 conv w16) + bias + bias2 +
    image_bias) + residual; without x8 the scales apply to the BF16 product.

    Options:
        x8, w8: E4M3 bytes (N, H, W, C), (O, kh, kw, C). x16, w16: bfloat16 likewise, or with `on_output`
            (N, OH, OW, C16) and (O, C16), a 1x1 convolution on the result's own pixels.
        image_scale: float32, one a picture or one for all. col_scale: float32, one an output channel or one.
        alpha, activation (None, "silu", "gelu"), accumulate ("promoted", "fast").
        bias, bias2: (O,), of one dtype. image_bias: (N, O). residual: (N, OH, OW, O).
        sums: float32 (N, `sum_parts`, O, 2), becomes the sums and sums of squares of a bfloat16 d; or a
            function of the number of parts that gives it, called where there are any. It is returned.
        expanded: uint8 (N, OH, OW, O), O a multiple of 16, becomes a bfloat16 d in nvfp4_exact (fast search,
            E4M3) under the outer scale 2^`expanded_exponent`, -119 to 120.
        phases: x counts as upsampled to twice its size; weights are those of `phase_weights`, (O, 4 * kh * kw
            * C) a row, and col_scale has 4 elements an output channel.
        run_if: (1,) int32; nothing is done where it is 0 when the kernel starts.
        config: a configuration by its number, 0: by shape. simple: the kernel without tensor cores.
    """
    args = _arguments(geo, d, **options)
    if callable(sums):
        parts = parts_of(args)
        sums = sums(parts) if parts else None
    if sums is not None:
        args.sums = cuda.load().ffi.cast("float*", sums.address)
    call("conv2d_simple" if simple else "conv2d", args, stream)
    return sums


def sum_parts(geo: Geometry, d: DeviceArray, **options: Any) -> int:
    """Parts of an image that `sums` of `forward` with these operands and options has; 0: there are none. They
    depend on where d lies and on its strides, too: the d of the launch is needed.
    """
    return parts_of(_arguments(geo, d, **options))


def parts_of(args: Any) -> int:
    """`sum_parts` of a filled struct."""
    return int(cuda.load().lib.fp4bf16_conv2d_sum_parts(args))


def dgrad(geo: Geometry, g: DeviceArray, w16: DeviceArray, dx: DeviceArray, stream: int, *,
          residual: DeviceArray | None = None, config: int = 0, phases: bool = False,
          simple: bool = False) -> None:  # fmt: skip
    """dx (N, H, W, C) = the gradient in the pictures, of g (N, OH, OW, O) and w16 (O, kh, kw, C), both
    bfloat16, + residual. phases: as in `forward`.
    """
    fields = geo._asdict() | {
        "c": dx.shape[3], "g": g.address, "w16": w16.address, "dx": dx.address, "g_strides": strides(g),
        "w16_stride": _row(w16), "dx_strides": strides(dx), "dx_dtype": DTYPES[dx.dtype], "config": config,
        "phases": int(phases),
    }  # fmt: skip
    _added(fields, "residual", residual)
    if residual is not None:
        fields["residual_strides"] = strides(residual)
    args = filled("fp4bf16_conv2d_dgrad_args", fields)
    call("conv2d_dgrad_simple" if simple else "conv2d_dgrad", args, stream)


def phase_weights(weight: DeviceArray, out: DeviceArray, stream: int) -> None:
    """out (O, 2, 2, 2, 2, C) = what a 3x3 kernel (O, 3, 3, C) behind a nearest upsampling is on the small
    pictures, one 2x2 kernel for each phase (a, b) of the result's pixels: `nn.fused.phase_weights`. float32.
    """
    call("phase_weights", weight.address, weight.shape[0], weight.shape[3], out.address, stream)


def wgrad(geo: Geometry, g: DeviceArray, x: DeviceArray, dw: DeviceArray, stream: int, *,
          db: DeviceArray | None = None, accumulate: bool = False, simple: bool = False) -> None:  # fmt: skip
    """dw (O, kh, kw, C) float32 = the gradient in the weights, of g (N, OH, OW, O) and x (N, H, W, C), both
    bfloat16; db (O,) float32 = the sum of g over the pixels. With `accumulate` both are added to.
    """
    fields = geo._asdict() | {
        "c": x.shape[3], "g": g.address, "x": x.address, "dw": dw.address, "g_strides": strides(g),
        "x_strides": strides(x), "dw_stride": _row(dw), "accumulate": int(accumulate),
        "db": 0 if db is None else db.address,
    }  # fmt: skip
    args = filled("fp4bf16_conv2d_wgrad_args", fields)
    library = cuda.load()
    size = int(library.lib.fp4bf16_conv2d_wgrad_workspace_size(args))
    if size > 0:
        workspace = empty((size,), "uint8", like=g)  # which has to live until the launch
        args.workspace = library.ffi.cast("void*", workspace.address)
    call("conv2d_wgrad_simple" if simple else "conv2d_wgrad", args, stream)
