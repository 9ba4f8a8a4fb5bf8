"""Attention on a GPU: the arguments of `fp4bf16_attention` and of its gradient, and their launch.

q, k, v and what is made of them are (N, tokens, heads, dim) BF16 with channels side by side, any other
strides. Nothing is checked here that the library checks, and nothing is converted: what the kernels cannot
read is copied by `attention_cuda` before.
"""

from __future__ import annotations

from typing import Any

from ..device import DeviceArray
from . import cuda
from .cuda_gemm import filled
from .cuda_tape import call, empty

MOST_CHANNELS = 512  # of a head


def _fields(arrays: dict[str, DeviceArray], lse: DeviceArray | None, scale: float, causal: bool) -> dict:
    q, k = arrays["q"], arrays["k"]
    fields: dict[str, Any] = {
        "n": q.shape[0], "q_tokens": q.shape[1], "heads": q.shape[2], "dim": q.shape[3],
        "k_tokens": k.shape[1], "scale": scale, "causal": int(causal),
        "lse": 0 if lse is None else lse.address,
    }  # fmt: skip
    for name, x in arrays.items():
        fields |= {name: x.address, f"{name}_strides": tuple(x.strides[:3])}
    return fields


def forward(q, k, v, out, stream: int, *, scale: float, causal: bool = False, lse=None) -> None:
    """out (N, Tq, heads, dim) = softmax(scale q k^T) v; `lse` (N, heads, Tq) float32, the logarithm of the
    softmax's sum.
    """
    fields = _fields({"q": q, "k": k, "v": v, "out": out}, lse, scale, causal)
    call("attention", filled("fp4bf16_attention_args", fields), stream)


def backward(q, k, v, out, lse, g, dq, dk, dv, stream: int, *, scale: float, causal: bool = False) -> None:
    """dq, dk, dv for the gradient g in `out`, which is what `forward` wrote, as is `lse`."""
    arrays = {"q": q, "k": k, "v": v, "out": out, "g": g, "dq": dq, "dk": dk, "dv": dv}
    fields = _fields(arrays, lse, scale, causal)
    args, library = filled("fp4bf16_attention_args", fields), cuda.load()
    size = int(library.lib.fp4bf16_attention_backward_workspace_size(args))
    if size > 0:
        workspace = empty((size,), "uint8", like=q)  # which has to live until the launch
        args.workspace = library.ffi.cast("void*", workspace.address)
    call("attention_backward", args, stream)
