"""Softmax attention on the tracks, and its gradient.

q, k are (batch, seq, heads, dim), v and the result (batch, seq, heads, dim_v). What each track multiplies is
made here, heads first; the backend sees three arrays and how the weights P are rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import attention_cuda, device
from .device import DeviceArray
from .dispatch import backend_for, check_stream
from .errors import DTypeError, ShapeError
from .formats import Format, QuantizedArray, get_format
from .interop import FLOATS, Operand, common_dtype, common_framework, float_operand, np_dtype, output, outputs
from .tracks import resolve_track

QUERY_BLOCK = 128  # queries that share one mean (SageAttention3)
_LARGEST = float(np.finfo(np.float32).max)
_ROUNDING = {"reference": None, "bf16": "bf16", "fp4": "e4m3", "dual": "e4m3"}  # of the weights P


class _Operands(NamedTuple):
    """(heads, seq, dim) each: `scores` = (q, k) whose product is S; q, k, v as the gradients see them."""

    scores: tuple[np.ndarray, np.ndarray]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


# ---- what is asked for -------------------------------------------------------------------------------------


def _operand(x: Any, name: str) -> Operand | DeviceArray:
    if isinstance(x, QuantizedArray):
        raise TypeError(f"attention: {name} is a QuantizedArray, but q, k and v are quantised inside, after "
                        f"smoothing; pass the array itself and track='fp4'")  # fmt: skip
    operand = device.float_operand(x, name) if device.is_device(x) else float_operand(x, name)
    if len(operand.shape) != 4:
        raise ShapeError(f"attention: {name} has shape {operand.shape}, but (batch, seq, heads, dim) is "
                         f"needed; transpose (batch, heads, seq, dim) with .swapaxes(1, 2)")  # fmt: skip
    return operand


def _check(q: Operand, k: Operand, v: Operand) -> None:
    """Raise ShapeError unless q (B, Sq, H, D), k (B, Sk, H, D), v (B, Sk, H, Dv) fit and there are keys."""
    for what, axis, a, b in (("batch", 0, q, k), ("batch", 0, q, v), ("heads", 2, q, k), ("heads", 2, q, v),
                             ("dim", 3, q, k), ("seq", 1, k, v)):  # fmt: skip
        if a.shape[axis] != b.shape[axis]:
            raise ShapeError(
                f"attention: {what} of {a.name} {a.shape} is {a.shape[axis]} but {what} of {b.name} "
                f"{b.shape} is {b.shape[axis]}; arrays are (batch, seq, heads, dim)"
            )
    if k.shape[1] == 0 or k.shape[3] == 0:
        raise ShapeError(f"attention: k has shape {k.shape}, but at least one key and one channel are needed")


def _scale(scale: float | None, dim: int) -> float:
    if scale is None:
        return dim**-0.5
    if not isinstance(scale, int | float | np.integer | np.floating) or not abs(scale) <= _LARGEST:
        raise ValueError(f"attention: scale is {scale!r}, but a finite number of float32 is needed; leave it "
                         f"out for 1/sqrt(dim)")  # fmt: skip
    return float(scale)


def _causal(causal: Any) -> bool:
    if isinstance(causal, bool | np.bool_) or (isinstance(causal, int) and causal in (0, 1)):
        return bool(causal)
    raise TypeError(f"attention: causal is a {type(causal).__name__}, but True or False is needed; "
                    f"another mask is not taken")  # fmt: skip


def _settings(track, q: Operand, k: Operand, v: Operand, scale, outliers):
    """(track, whether float64 is kept, scale), all checked."""
    _check(q, k, v)
    track = resolve_track(track, "bf16")
    if not isinstance(outliers, int | np.integer) or outliers < 0:
        raise ValueError(f"attention: outliers is {outliers!r}, but a number of channels is needed; "
                         f"pass 0 for none")  # fmt: skip
    exact = track == "reference" and "float64" in (q.dtype, k.dtype, v.dtype)
    return track, exact, _scale(scale, q.shape[3])


# ---- operands as the track sees them -----------------------------------------------------------------------


def _heads_first(x: np.ndarray) -> np.ndarray:
    """(batch, seq, heads, dim) -> C-contiguous (batch * heads, seq, dim)."""
    batch, seq, heads, dim = x.shape
    return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(batch * heads, seq, dim)


def _seq_first(x: np.ndarray, like: Operand) -> np.ndarray:
    """(batch * heads, seq, dim) -> (batch, seq, heads, dim) with the batch and heads of `like`, a view."""
    batch, _, heads, _ = like.shape
    return x.reshape(batch, heads, *x.shape[1:]).swapaxes(1, 2)


def _mean(x: np.ndarray) -> np.ndarray:
    """Mean over the sequence (heads, 1, dim), summed in float64 and rounded to float32."""
    return x.mean(1, dtype=np.float64, keepdims=True).astype(np.float32)


def _outliers(q: np.ndarray, k: np.ndarray, count: int) -> np.ndarray:
    """Mask (heads, 1, dim) of the `count` channels of largest max|q| * max|k|, the lower one on ties."""
    weight = np.abs(q).max(1, initial=0) * np.abs(k).max(1)
    mask = np.zeros(weight.shape, bool)
    np.put_along_axis(mask, np.argsort(-weight, axis=1, kind="stable")[:, :count], True, axis=1)
    return mask[:, None]


def _quantised(kernels, q, k, v, fmt: Format, outliers: int, backward: bool) -> _Operands:
    """The operands of "fp4" (no outliers) and "dual"; see `attention`. q, k only where the gradient asks."""
    q, k, v = (_heads_first(kernels.values(x.array)) for x in (q, k, v))
    means = np.empty_like(q)
    for start in range(0, q.shape[1], QUERY_BLOCK):
        block = (slice(None), slice(start, start + QUERY_BLOCK))
        means[block] = _mean(q[block])
    q, k = q - means, k - _mean(k)
    q16, k16 = kernels.rounded(means), kernels.rounded(k)  # what meets in BF16
    special = _outliers(q, k, outliers) if outliers else None
    if special is not None:
        q16 += kernels.rounded(np.where(special, q, np.float32(0)))
        q, k = np.where(special, np.float32(0), q), np.where(special, np.float32(0), k)
    q4, k4 = kernels.fake_quantize(q, fmt, "fast", outer="row"), kernels.fake_quantize(k, fmt, "fast")
    v4 = kernels.fake_quantize(np.ascontiguousarray(v.swapaxes(1, 2)), fmt, "fast").swapaxes(1, 2)
    # One product over 2 dim makes S: FP4 by FP4, then BF16 by BF16, into the same sums.
    scores = np.concatenate([q4, q16], 2), np.concatenate([k4, k16], 2)
    if not backward:
        return _Operands(scores, None, None, v4)
    k = k4 if special is None else np.where(special, k16, k4)
    return _Operands(scores, kernels.rounded(q4 + q16), k, v4)


def _operands(kernels, q, k, v, track: str, exact: bool, fmt, outliers: int, backward=False):
    if track in ("fp4", "dual"):
        return _quantised(kernels, q, k, v, get_format(fmt), outliers if track == "dual" else 0, backward)
    arrays = []
    for x in (q, k, v):
        heads = _heads_first(x.array)
        arrays.append(kernels.rounded(heads) if track == "bf16" else kernels.values(heads, exact))
    if exact:
        arrays = [a.astype(np.float64, copy=False) for a in arrays]
    return _Operands((arrays[0], arrays[1]), *arrays)


# ---- the primitive -----------------------------------------------------------------------------------------


def attention(q, k, v, *, track=None, causal=False, scale=None, out=None, stream=None, dtype=None,
              format="nvfp4_exact", outliers=16):  # fmt: skip
    """softmax(scale * q k^T) v, one head at a time (Vaswani et al., arXiv:1706.03762, equation 1).

    Args:
        q: (batch, seq_q, heads, dim). k: (batch, seq_k, heads, dim). v: (batch, seq_k, heads, dim_v). Float
        arrays.
        track: what is rounded, sums being FP32 throughout:

            - "bf16" (default): q, k, v to BF16; exp(S - max S) to BF16, and the row sum is that of the
              rounded weights, so that they sum to one.
            - "fp4": k loses its mean over the sequence (a constant a row of S, which softmax ignores), q the
              mean m of each block of 128 queries, and m k^T is added to S as a BF16 product (SageAttention3,
              arXiv:2505.11594). The rest is quantised: q along dim with one outer scale a row, k along dim
              and v along the tokens with one a (batch, head). The weights are two-level: rows scaled to a
              maximum of 1, then 256 exp(S - max S) rounded to E4M3.
            - "dual": as "fp4", but the `outliers` channels of each head with the largest max|q| * max|k| are
              multiplied in BF16 into the same S.
            - "reference": nothing is rounded.

            On a GPU "bf16" and "reference" run; "bf16" takes heads of up to 512 channels there, and its
            results are rounded to BF16 whatever their dtype.
        causal: query i sees the keys 0..i, counted from the first key as in PyTorch.
        scale: of the scores; 1/sqrt(dim) by default. format: of the FP4 operands.
        out, dtype: of the result, by default the operands' dtype. stream: of device arrays, by default the
        framework's current one; None for host arrays.

    Returns:
        (batch, seq_q, heads, dim_v) of q's framework.

    Raises:
        ShapeError: axes that do not fit, or no keys. DTypeError: a dtype that is no float. TypeError: mixed
            frameworks. NonFiniteError: NaN or Inf in an operand that is quantised.

    >>> import numpy as np, fp4bf16 as fb
    >>> q = np.zeros((1, 2, 1, 16), np.float32)
    >>> fb.attention(q, q, np.ones((1, 2, 1, 4), np.float32), track="fp4")[0, 0, 0]
    array([1., 1., 1., 1.], dtype=float32)
    """
    q, k, v = _operand(q, "q"), _operand(k, "k"), _operand(v, "v")
    if attention_cuda.on_device("attention", q, k, v):
        settings = _settings(track, q, k, v, scale, outliers)
        result = str(_result("attention", dtype, q, k, v))
        return attention_cuda.attention(q, k, v, settings, _causal(causal), result, out, stream)
    check_stream("attention", stream)
    framework = common_framework("attention", q, k, v)
    track, exact, scale = _settings(track, q, k, v, scale, outliers)
    result = _result("attention", dtype, q, k, v)
    shape = (*q.shape[:3], v.shape[3])
    target, returned = output("attention", out, shape, result, framework, (q.array, k.array, v.array))
    kernels = backend_for(q, k, v)
    used = _operands(kernels, q, k, v, track, exact, format, outliers)
    o = np.empty((used.v.shape[0], q.shape[1], v.shape[3]), used.v.dtype)
    if o.size:
        kernels.attention_forward(*used.scores, used.v, o, _causal(causal), scale, _ROUNDING[track])
    kernels.store(_seq_first(o, q), target)
    return returned


def attention_vjp(g, q, k, v, *, track=None, causal=False, scale=None, format="nvfp4_exact", outliers=16,
                  out=None, stream=None):  # fmt: skip
    """Gradients (dq, dk, dv) of sum(g * attention(q, k, v)), in the dtypes of q, k and v.

    The scores and weights are computed again as the track computes them (FlashAttention, arXiv:2205.14135,
    appendix B.2): dv = P^T g, dS = P (g v^T - row sum), dq = scale dS k, dk = scale dS^T q, straight through
    the quantiser. g, P and dS are BF16 where they enter a product, except on the "reference" track. The
    arguments and what is raised are those of `attention`; g is (batch, seq_q, heads, dim_v), `out` has an
    array or None for each of dq, dk, dv.

    >>> import numpy as np, fp4bf16 as fb
    >>> q = np.zeros((1, 2, 1, 16), np.float32)
    >>> g = v = np.ones((1, 2, 1, 4), np.float32)
    >>> dq, dk, dv = fb.attention_vjp(g, q, q, v)
    >>> dv[0, 0, 0]
    array([1., 1., 1., 1.], dtype=float32)
    """
    g, q, k, v = _operand(g, "g"), _operand(q, "q"), _operand(k, "k"), _operand(v, "v")
    if attention_cuda.on_device("attention_vjp", q, k, v, g):
        settings = _settings(track, q, k, v, scale, outliers)
        _check_gradient(g, q, v)
        return attention_cuda.attention_vjp(g, q, k, v, settings, _causal(causal), out, stream)
    check_stream("attention_vjp", stream)
    framework = common_framework("attention_vjp", q, k, v, g)
    track, exact, scale = _settings(track, q, k, v, scale, outliers)
    _check_gradient(g, q, v)
    inputs, out = [o.array for o in (g, q, k, v)], outputs("attention_vjp", out, ("dq", "dk", "dv"))
    made = [output("attention_vjp", given, o.shape, o.array.dtype, framework, inputs)
            for given, o in zip(out, (q, k, v), strict=True)]  # fmt: skip
    kernels = backend_for(g, q, k, v)
    used = _operands(kernels, q, k, v, track, exact, format, outliers, backward=True)
    flow = _heads_first(g.array)
    flow = kernels.values(flow, exact) if track == "reference" else kernels.rounded(flow)
    flow = flow.astype(used.q.dtype, copy=False)
    rounding, causal = _ROUNDING[track], _causal(causal)
    gradients = kernels.attention_backward(flow, used.scores, used[1:], causal, scale, rounding)
    for gradient, (target, _) in zip(gradients, made, strict=True):
        kernels.store(_seq_first(gradient, q), target)
    return tuple(returned for _, returned in made)


def _check_gradient(g: Operand, q: Operand, v: Operand) -> None:
    want = (*q.shape[:3], v.shape[3])
    if g.shape != want:
        raise ShapeError(f"attention_vjp: g has shape {g.shape} but the result has shape {want}; "
                         f"g is the gradient in that result")  # fmt: skip


def _result(op: str, dtype: Any, *operands: Operand | DeviceArray) -> np.dtype:
    """dtype of the result: the one asked for, or that of the operands."""
    result = common_dtype(*operands) if dtype is None else np_dtype(dtype, f"{op}: dtype")
    if str(result) not in FLOATS:
        raise DTypeError(f"{op}: dtype is {result}, but one of {', '.join(FLOATS)} is needed; leave it out "
                         f"for the operands' own")  # fmt: skip
    return result
