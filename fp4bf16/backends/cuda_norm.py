"""Group normalisation on a GPU: the arguments of `fp4bf16_group_norm` and of its gradient, and their launch.

Pictures are (N, pixels..., C) BF16, (N, H, W, C) or (N, T, C), with channels side by side and pixels evenly
spaced. Nothing is checked here that the library checks, and nothing is converted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..device import DeviceArray
from ..errors import ShapeError
from . import cuda
from .cuda_gemm import ACTIVATIONS, condition, filled
from .cuda_tape import call, empty


def _steps(x: DeviceArray) -> tuple[int, int]:
    """Elements from image to image and from pixel to pixel; an axis of one element, whose stride means
    nothing, gets the one that it would have beside its inner axes.
    """
    lead = [(n, s) for n, s in zip(x.shape[1:-1], x.strides[1:-1], strict=True) if n != 1]
    pixel, reach = (lead[-1][1], 1) if lead else (x.shape[-1], 1)
    for n, s in reversed(lead):
        if s != reach * pixel:
            raise ShapeError(f"group_norm: {x.name} of shape {x.shape} has strides {x.strides}, but its "
                             f"pixels must be evenly spaced; pass a view that cuts channels or images "
                             f"alone, or a copy")  # fmt: skip
        reach *= n
    return (x.strides[0] if x.shape[0] > 1 else max(reach * pixel, 0)), pixel


def _pictures(fields: dict, **pictures: DeviceArray | None) -> dict:
    for name, x in pictures.items():
        if x is not None:
            fields[name] = x.address
            fields[f"{name}_image"], fields[f"{name}_pixel"] = _steps(x)
    return fields


def _arrays(fields: dict, **arrays: DeviceArray | None) -> dict:
    return fields | {name: x.address for name, x in arrays.items() if x is not None}


def _shape(x: DeviceArray, groups: int, silu: bool) -> dict:
    return {
        "n": x.shape[0], "pixels": math.prod(x.shape[1:-1]), "c": x.shape[-1], "groups": groups,
        "activation": ACTIVATIONS["silu" if silu else None],
    }  # fmt: skip


def group_norm(
    x: DeviceArray, gamma: DeviceArray, beta: DeviceArray, groups: int, eps: float, stream: int, *,
    silu: bool, y: DeviceArray | None = None, expanded: DeviceArray | None = None,
    packed: DeviceArray | None = None, block_scale: DeviceArray | None = None,
    outer_scale: DeviceArray | None = None, mean: DeviceArray | None = None, rstd: DeviceArray | None = None,
    sums: Sequence[DeviceArray] | None = None,
    norms: DeviceArray | Callable[[int], DeviceArray] | None = None, run_if: DeviceArray | None = None,
) -> DeviceArray | None:  # fmt: skip
    """y = (x - mean) * rstd * gamma + beta over each group, through SiLU with `silu`; any of the results.

    Args:
        x, y: (N, pixels..., C) bfloat16. gamma, beta: (C,) float32. mean, rstd: (N, groups) float32.
        expanded: uint8 of x's shape, E4M3. packed: uint8 (N, pixels..., C / 2), with block_scale (N,
            pixels..., C / 16). Either is y in nvfp4_exact with one outer_scale (1,) float32 for all, which
            no y can exceed 288 times of.
        sums: one or two (N, parts, channels, 2) float32, of the first channels of x and of the others: the
            sums and the sums of squares over parts of an image's pixels, as `conv2d` writes them. x is then
            read once. None: the statistics are computed from x.
        norms: float32 (parts, 2), or a function of the number of parts that gives it; becomes upper bounds of
            the sums of (y - decoded)^2 and of decoded^2, y being rounded to bfloat16. It is returned.
        run_if: (1,) int32; nothing is done where it is 0 when the kernel starts.
    """
    fields = _pictures(_shape(x, groups, silu), x=x, y=y)
    fields = _arrays(fields, gamma=gamma, beta=beta, expanded=expanded, packed=packed,
                     block_scale=block_scale, outer_scale=outer_scale, mean=mean, rstd=rstd)  # fmt: skip
    if sums:
        pad = (0,) * (2 - len(sums))
        fields |= {"sums": (*(s.address for s in sums), *pad),
                   "sum_parts": (*(s.shape[1] for s in sums), *pad),
                   "sum_channels": (*(s.shape[2] for s in sums), *pad)}  # fmt: skip
    fields |= {"eps": eps, "run_if": condition(run_if)}
    if callable(norms):
        parts = int(cuda.load().lib.fp4bf16_group_norm_norm_parts(filled("fp4bf16_group_norm_args", fields)))
        norms = norms(parts)
    _launch("group_norm", _arrays(fields, norms=norms), x, stream)
    return norms


def group_norm_backward(
    x: DeviceArray, g: DeviceArray, gamma: DeviceArray, beta: DeviceArray, groups: int, stream: int, *,
    silu: bool, mean: DeviceArray, rstd: DeviceArray, dx: DeviceArray, add: DeviceArray | None = None,
    dgamma: DeviceArray | None = None, dbeta: DeviceArray | None = None, dshift: DeviceArray | None = None,
) -> None:  # fmt: skip
    """dx = the gradient in x + `add` for the gradient g in y; mean and rstd as `group_norm` wrote them.

    dgamma and dbeta (C,) float32 are added to; dshift (N, C) float32 is written: the gradient in a vector
    that was added to every pixel of x before.
    """
    fields = _pictures(_shape(x, groups, silu), x=x, g=g, add=add, dx=dx)
    fields = _arrays(fields, gamma=gamma, beta=beta, mean=mean, rstd=rstd, dgamma=dgamma, dbeta=dbeta,
                     dshift=dshift)  # fmt: skip
    _launch("group_norm_backward", fields, x, stream)


def _launch(name: str, fields: dict, x: DeviceArray, stream: int) -> None:
    args, library = filled(f"fp4bf16_{name}_args", fields), cuda.load()
    size = int(getattr(library.lib, f"fp4bf16_{name}_workspace_size")(args))
    if size > 0:  # -1: bad arguments, of which the call itself tells
        workspace = empty((size,), "uint8", like=x)  # which has to live until the launch
        args.workspace = library.ffi.cast("void*", workspace.address)
    call(name, args, stream)
