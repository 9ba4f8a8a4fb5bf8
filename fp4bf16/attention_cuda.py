"""Attention of device arrays: what the kernels can read, the results in their dtypes, the "reference" track.

The kernels take BF16 with 16-byte strides and one number of channels for q, k and v. What is anything else is
copied first, with zeros for the channels that are missing: they add nothing to a score, and give columns of
the result that are left out. Nothing synchronises, so a call can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from typing import Any

from . import device
from .backends import cuda_attention as kernels
from .backends import cuda_math
from .backends.cuda_gemm import Matrices, copied, round_up
from .backends.cuda_tape import empty
from .device import DeviceArray
from .errors import ShapeError
from .interop import outputs


def on_device(op: str, *operands: Any) -> bool:
    """Whether the operands are device arrays; `TypeError` where they are of several frameworks or devices."""
    if not any(type(x) is DeviceArray for x in operands):
        return False
    device.check_together(op, [(x.name, x) for x in operands])
    return True


def _check_track(op: str, track: str, q: DeviceArray, v: DeviceArray) -> None:
    if track not in ("bf16", "reference"):
        raise ValueError(f"{op}: track is {track!r}, but q is on cuda:{q.device}, where attention runs on "
                         f"'bf16' and 'reference' alone; pass one of these, or host arrays")  # fmt: skip
    most = kernels.MOST_CHANNELS
    for name, x in (("q", q), ("v", v)):
        if track == "bf16" and x.shape[3] > most:
            raise ShapeError(f"{op}: {name} has heads of {x.shape[3]} channels, but at most {most} are taken "
                             f"on a GPU; split them, or pass track='reference'")  # fmt: skip


# ---- operands ----------------------------------------------------------------------------------------------
def _direct(x: DeviceArray, width: int) -> bool:
    """Whether the kernels can read or write `x` where it lies, as heads of `width` channels."""
    if x.dtype != "bfloat16" or x.shape[3] != width or x.address % 16 or (x.strides[3] != 1 and width > 1):
        return False
    return all(s > 0 and s % 8 == 0 for n, s in zip(x.shape[:3], x.strides[:3], strict=True) if n > 1)


def _width(q: DeviceArray, v: DeviceArray) -> int:
    """Channels that the kernels see: a multiple of 8, as their strides have to be."""
    return round_up(max(q.shape[3], v.shape[3]), 8)


def _readable(x: DeviceArray, width: int, stream: int) -> DeviceArray:
    """`x` rounded to BF16, with zeros behind its channels up to `width`; itself where that is what it is."""
    if _direct(x, width):
        return x
    batch, tokens, heads, dim = x.shape
    if x.dtype == "float64":
        x = device.astype(x, "float32")
    if dim > 1 and x.strides[3] != 1:
        x = device.contiguous(x)
    if round_up(dim, 8) == width:
        lead, steps = (batch, tokens), x.strides[:2]
        rows = Matrices(x, lead, steps, heads, x.strides[2] if heads > 1 else 0, dim, 1)
        return copied(rows, "bfloat16", stream).array
    padded = device.full((batch, tokens, heads, width), 0, "bfloat16", like=x)
    device.assign(cuda_math.part(padded, ..., slice(0, dim)), device.astype(x, "bfloat16"))
    return padded


class _Result:
    """Where a result goes: `array` is what the kernels write, `owner` what the caller gets."""

    def __init__(self, op: str, out: Any, shape, dtype: str, inputs: list[DeviceArray], width: int):
        self.out = out
        self.target = device.out_operand(op, out, shape, dtype, inputs[0], inputs)
        self.array = self.target
        if not _direct(self.target, width):
            self.array = empty((*shape[:3], width), "bfloat16", like=inputs[0])

    def store(self) -> Any:
        found, target = self.array, self.target
        if found is not target:
            if found.shape != target.shape:
                found = cuda_math.part(found, ..., slice(0, target.shape[3]))
            device.assign(target, device.astype(found, target.dtype))
        return target.owner if self.out is None else self.out


# ---- the primitive -----------------------------------------------------------------------------------------
def attention(q, k, v, settings, causal: bool, dtype: str, out: Any, stream: Any) -> Any:
    """`fp4bf16.attention` of checked operands; `settings` = (track, whether float64 is kept, scale)."""
    track, exact, scale = settings
    _check_track("attention", track, q, v)
    with device.ordered("attention", stream, [q, k, v]) as handle:
        width = _width(q, v)
        result = _Result("attention", out, (*q.shape[:3], v.shape[3]), dtype, [q, k, v], width)
        if result.target.size == 0:
            return result.store() if out is None else out
        if track == "reference":
            result.array = _reference(q, k, v, scale, causal, exact)
        else:
            sides = [_readable(x, width, handle) for x in (q, k, v)]
            kernels.forward(*sides, result.array, handle, scale=scale, causal=causal)
        return result.store()


def attention_vjp(g, q, k, v, settings, causal: bool, out: Any, stream: Any) -> tuple[Any, Any, Any]:
    """`fp4bf16.attention_vjp` of checked operands. The forward pass is run again for its row sums."""
    track, exact, scale = settings
    _check_track("attention_vjp", track, q, v)
    given = _outputs(out)
    with device.ordered("attention_vjp", stream, [g, q, k, v]) as handle:
        width, inputs = _width(q, v), [g, q, k, v]
        made = [_Result("attention_vjp", o, x.shape, x.dtype, inputs, width)
                for o, x in zip(given, (q, k, v), strict=True)]  # fmt: skip
        if track == "reference":
            found = _reference_vjp(g, q, k, v, scale, causal, exact)
            for result, gradient in zip(made, found, strict=True):
                result.array = gradient
        elif math.prod(q.shape[:3]) or math.prod(k.shape[:3]):
            q, k, v, g = (_readable(x, width, handle) for x in (q, k, v, g))
            forward = empty(q.shape, "bfloat16", like=q)
            lse = empty((q.shape[0], q.shape[2], q.shape[1]), "float32", like=q)
            kernels.forward(q, k, v, forward, handle, scale=scale, causal=causal, lse=lse)
            kernels.backward(q, k, v, forward, lse, g, *(r.array for r in made), handle, scale=scale,
                             causal=causal)  # fmt: skip
        return tuple(result.store() for result in made)


def _outputs(out: Any) -> tuple:
    """`out`, one array or None for each of the three gradients, which must not meet in memory."""
    names = ("dq", "dk", "dv")
    if out is None:
        return (None,) * 3
    if not isinstance(out, tuple | list) or len(out) != 3:
        return outputs("attention_vjp", out, names)  # which says so
    arrays = [(n, device.operand(x, f"out: {n}")) for n, x in zip(names, out, strict=True) if x is not None]
    for i, (name, array) in enumerate(arrays):
        for other, memory in arrays[:i]:
            if device.overlap(array, memory) and not _interleaved(array, memory):
                raise ValueError(f"attention_vjp: out: {other} and {name} overlap in memory; pass arrays "
                                 f"that do not")  # fmt: skip
    return tuple(out)


def _interleaved(a: DeviceArray, b: DeviceArray) -> bool:
    """Whether the two are columns of one matrix, side by side: the same strides, each token's channels apart
    from the other's.
    """
    if a.shape[1:] != b.shape[1:] or a.strides != b.strides or a.itemsize != b.itemsize or a.strides[3] != 1:
        return False
    heads, dim = a.shape[2:]
    span = ((heads - 1) * a.strides[2] if heads > 1 else 0) + dim
    apart = abs(a.address - b.address) // a.itemsize
    tokens = [s for n, s in zip(a.shape[:2], a.strides[:2], strict=True) if n > 1]
    return span <= apart and all(apart + span <= s for s in tokens) and (heads == 1 or a.strides[2] >= dim)


# ---- the "reference" track, by the framework ---------------------------------------------------------------
def _heads_first(x: DeviceArray, dtype: str) -> Any:
    x = device.astype(x, dtype)
    return cuda_math.of(x).raw(device.permute(x, (0, 2, 1, 3)))


def _probabilities(xp: Any, q, k, scale: float, causal: bool) -> Any:
    s = (q @ k.swapaxes(-1, -2)) * scale
    if causal:
        s = xp.where(xp.tril(xp.ones_like(s)) > 0, s, -math.inf)
    p = xp.exp(s - xp.amax(s, axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def _reference(q, k, v, scale: float, causal: bool, exact: bool) -> DeviceArray:
    """The result (batch, seq, heads, dim_v), float32 or float64."""
    dtype, arrays = "float64" if exact else "float32", cuda_math.of(q)
    a, b, c = (_heads_first(x, dtype) for x in (q, k, v))
    y = _probabilities(arrays.xp, a, b, scale, causal) @ c
    return cuda_math.wrapped(y.swapaxes(1, 2), q)


def _reference_vjp(g, q, k, v, scale: float, causal: bool, exact: bool) -> list[DeviceArray]:
    dtype, arrays = "float64" if exact else "float32", cuda_math.of(q)
    flow, a, b, c = (_heads_first(x, dtype) for x in (g, q, k, v))
    p = _probabilities(arrays.xp, a, b, scale, causal)
    ds = flow @ c.swapaxes(-1, -2)
    ds = p * (ds - (p * ds).sum(axis=-1, keepdims=True))
    dq, dk, dv = scale * (ds @ b), scale * (ds.swapaxes(-1, -2) @ a), p.swapaxes(-1, -2) @ flow
    return [cuda_math.wrapped(x.swapaxes(1, 2), like) for x, like in ((dq, q), (dk, k), (dv, v))]
