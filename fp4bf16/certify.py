"""Certificates: how far the FP4 or dual result of a product can lie from the BF16 one.

Three numbers, from strongest claim to sharpest: a proven bound from norms (the quantiser's own sums of
squares and upper bounds of singular values), what FP32 sums may add to it, and a randomised estimate that
holds with a stated confidence. The formulas are `python_ref.certify`'s, where they are derived. Gemm and
convolution share this module: a convolution passes its weight as (Cout, kh kw Cin) and
``factor=conv_factor(kernel, stride)``.
"""

from __future__ import annotations

import contextvars
import itertools
import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .dispatch import backend_for
from .fallbacks import Fallbacks, fallbacks
from .formats import QuantizedArray, QuantStats
from .python_ref import certify as formulas
from .python_ref.certify import LIPSCHITZ, conv_factor, sketch_factor

__all__ = [
    "ActivationNorms", "Certificate", "Fallbacks", "WeightNorms", "activation_norms", "added_norms",
    "certificate", "conv_factor", "device_certificate", "fallbacks", "quant_stats", "quantized_weight_norms",
    "sketch", "sketch_factor", "sketched_master", "sketching", "spectral_norm_upper", "weight_norms",
]  # fmt: skip

#: FP32 rounding of bias, activation (exp, erfc) and residual relative to what goes in, with room.
_EPILOGUE = 2.0**-20
_FLOAT32_RANGE = 2.0**127


@dataclass(frozen=True)
class Certificate:
    """How far a result can lie from the BF16 track's result of the same call, in the Frobenius norm.

    ``|y - y_bf16|_F <= bound + accumulation`` always, and ``<= estimate + accumulation`` with probability
    `confidence` over the sketch's own random numbers.

    Attributes:
        bound: from quantisation and the rounding of the outputs. Infinite where a block overflowed its outer
            scale or a sum might leave the range of its dtype. With an activation it is multiplied by the
            largest slope: 1.0999 for SiLU, 1.1290 for GELU.
        accumulation: what the sums of the two tracks can add: FP32, K 2^-22 times the norms of their factors;
            on FP8 tensor cores 1.6e-2 times those of the FP4 track more (`device_certificate`).
        estimate: upper limit from a Gaussian sketch of the products; None with ``certify="bound"``.
        confidence: of `estimate`, 0.999 unless asked otherwise; None without one.
        relative: `limit` before the activation's slope, over the norm of x @ w as computed.
        reference: what the BF16 track multiplies: "master" (the BF16 weight) or "original" (the weight that a
            `QuantizedArray` was made from, known by its recorded error alone), or "quantized" where no error
            was recorded and the decoded weight stands for itself.
        terms: the norms that went in.
        rows: float64 (M,), `bound` for each row of the result; None for a convolution.
        refused: with ``threshold=``, the `relative` of an FP4 result that was over it: what was returned is
            the BF16 result, and this its certificate. Else None.

    >>> import numpy as np, fp4bf16 as fb
    >>> x = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    >>> y, cert = fb.matmul(x, x.T, track="fp4", certify=True)
    >>> bool(np.linalg.norm(y - fb.matmul(x, x.T)) <= cert.bound + cert.accumulation), cert.ok(0.5)
    (True, True)
    """

    bound: float
    accumulation: float
    estimate: float | None = None
    confidence: float | None = None
    relative: float = 0.0
    reference: str = "master"
    terms: dict[str, float] = field(default_factory=dict, repr=False)
    rows: np.ndarray | None = field(default=None, repr=False, compare=False)
    refused: float | None = None

    @property
    def limit(self) -> float:
        """The distance that is claimed: the lesser of `bound` and `estimate`, plus `accumulation`."""
        best = self.bound if self.estimate is None else min(self.bound, self.estimate)
        return best + self.accumulation

    def ok(self, threshold: float) -> bool:
        """Whether the claimed distance is at most `threshold` times the norm of the result, e.g. 0.1."""
        return self.relative <= threshold

    def __repr__(self) -> str:
        estimate = "" if self.estimate is None else f", estimate {self.estimate:.4g} at {self.confidence:.4%}"
        return (
            f"Certificate(bound {self.bound:.4g}, accumulation {self.accumulation:.2g}{estimate}, "
            f"relative {self.relative:.3g} against the {self.reference} weight)"
        )


# ---- linear algebra without BLAS threads that spin on, beside the kernels of the next call -----------------
def norm(x: np.ndarray) -> float:
    """Frobenius norm, summed in float64 on this thread (np.linalg.norm's dot wakes BLAS's own threads)."""
    flat = np.ascontiguousarray(x).reshape(-1)
    return math.sqrt(float(np.einsum("i,i->", flat, flat, dtype=np.float64)))


def row_norms(x: np.ndarray) -> np.ndarray:
    """Norm of each row of `x` (M, K), float64 (M,)."""
    return np.sqrt(np.einsum("mk,mk->m", x, x, dtype=np.float64))


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b in float64 on the kernels' threads."""
    kernels, out = backend_for(a, b), np.empty((a.shape[0], b.shape[1]))
    left, right = (kernels.plain_matrix(m, rounding=False, exact=True) for m in (a, b))
    kernels.product(left, right, out)
    return out


def spectral_norm_upper(w: np.ndarray) -> float:
    """An upper bound of the largest singular value of `w`, two axes, within 1 % on ordinary matrices.

    >>> 3 <= spectral_norm_upper(np.diag([1.0, 2.0, 3.0])) < 3.01
    True
    """
    return formulas.spectral_norm_upper(w, multiply=_multiply)


# ---- norms of the operands ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class ActivationNorms:
    """Frobenius norms of the activations, upper bounds: of bf16(x), of what is multiplied, of the difference.

    Each is float64 (rows,); the norm of the tensor is the root of their squares' sum. `overflow` counts
    blocks beyond their outer scale.
    """

    rows: np.ndarray
    rows_used: np.ndarray
    rows_error: np.ndarray
    overflow: int = 0

    @property
    def norm(self) -> float:
        return norm(self.rows)

    @property
    def used(self) -> float:
        return norm(self.rows_used)

    @property
    def error(self) -> float:
        return norm(self.rows_error)


def activation_norms(stats: QuantStats, k: int, exact: bool | None = None) -> ActivationNorms:
    """Norms from the quantiser's sums; `k` elements a row.

    The BF16 track rounds x to bfloat16 first, which adds 2^-8 of the norm to the error unless x is bfloat16
    already (`exact`; by default known from ``stats.source_dtype``).
    """
    rows, used, error = (
        np.sqrt(s) for s in (stats.row_norm_sq, stats.row_quantized_norm_sq, stats.row_error_sq)
    )
    if not (stats.source_dtype == "bfloat16" if exact is None else exact):
        rounding = formulas.bf16_rounding(rows, k)
        rows, error = rows + rounding, error + rounding
    return ActivationNorms(rows, used, error, stats.overflow)


def plain_norms(x: np.ndarray, rounded: bool) -> ActivationNorms:
    """Norms of unquantised rows (M, K), multiplied as they are: `rounded` to bfloat16 already, or not."""
    rows = row_norms(x)
    error = np.zeros_like(rows) if rounded else formulas.bf16_rounding(rows, x.shape[1])
    return ActivationNorms(rows + error, rows, error)


@dataclass(frozen=True)
class WeightNorms:
    """Of a weight W and of W', what is multiplied in its place: Frobenius norms, and *upper* bounds of the
    largest singular values of W, W' and W - W'. For a dual weight W' is the twin, `sigma_error` belongs to
    W - D U - W', and the branch's norms are those of D and U. `decoded`: what a sketch multiplies in place
    of W is W', so that what W' lost has to be added to it."""

    norm: float
    used: float
    sigma: float
    sigma_used: float
    sigma_error: float
    reference: str = "master"
    overflow: int = 0
    down: float = 0.0
    up: float = 0.0
    sigma_up: float = 0.0
    rank: int = 0
    decoded: bool = False


def weight_norms(w: np.ndarray, used: np.ndarray, branch: np.ndarray | None = None) -> WeightNorms:
    """Norms of a weight `w` (any two axes) with bfloat16 values and of `used`, multiplied in its place.

    `branch` (the product D U) is part of what is multiplied on the dual track.
    """
    w, used = np.asarray(w, np.float64), np.asarray(used, np.float64)
    error = w - used if branch is None else w - used - branch
    sigmas = (spectral_norm_upper(m) for m in (w, used, error))
    return WeightNorms(norm(w), norm(used), *sigmas)


_known: dict[tuple[int, str], tuple[weakref.ref, Any]] = {}


def once(owner: Any, make: Callable[[], Any], kind: str = "norms") -> Any:
    """make(), kept as long as `owner` lives; one of each kind."""
    key = id(owner), kind
    found = _known.get(key)
    if found is None or found[0]() is not owner:
        found = _known[key] = (weakref.ref(owner, lambda _: _known.pop(key, None)), make())
    return found[1]


def quantized_weight_norms(
    q: QuantizedArray, decode: Callable[[], np.ndarray], master: np.ndarray | None = None
) -> WeightNorms:
    """Norms of a prepared weight; `decode` gives its values as two axes. Computed once for each quantisation.

    The weight it was made from is known by the recorded norm of its error alone, and |dW|_F >= sigma(dW).
    Without stats (a loaded container) the decoded weight stands for the original. `master`: that weight, in
    any shape of `decode`'s elements in their order; then sigma(dW) is a singular value's bound, several times
    less, and every later call for `q` gets these norms.
    """
    owner = q.stats if q.stats is not None else q.packed
    if master is None:
        return once(owner, lambda: _quantized_weight_norms(q, decode()))
    held = _known.get((id(owner), "norms"))
    if held is not None and held[0]() is owner and held[1].reference != "master":  # known less well so far
        _known.pop((id(owner), "norms"), None)  # unless another thread was first
    return once(owner, lambda: _master_norms(q, decode(), master))


def _master_norms(q: QuantizedArray, used: np.ndarray, master: np.ndarray) -> WeightNorms:
    """Cheap enough for every step of a training: sigma(W) <= sigma(W') + sigma(dW), float32 Gram matrices."""
    sigma, sigma_error, error = backend_for().twin_norms(master, used)
    if q.stats is None:
        size, full, overflow = norm(used), norm(used) + error, 0
    else:
        rows = activation_norms(q.stats, q.k)
        size, full, overflow = rows.used, rows.norm, rows.overflow
    sigmas = sigma + sigma_error, sigma, sigma_error
    return WeightNorms(full, size, *sigmas, overflow=overflow, decoded=True)


def _quantized_weight_norms(q: QuantizedArray, used: np.ndarray) -> WeightNorms:
    sigma, size = spectral_norm_upper(used), norm(used)
    if q.stats is None:
        return WeightNorms(size, size, sigma, sigma, 0.0, "quantized")
    # The BF16 track multiplies the original rounded to bfloat16
    rows = activation_norms(q.stats, q.k)
    parts = sigma + rows.error, sigma, rows.error, "original", q.stats.overflow
    return WeightNorms(rows.norm, size, *parts, decoded=True)


# ---- the certificate ---------------------------------------------------------------------------------------
def added_norms(rows: int, bias: np.ndarray | None, residual: np.ndarray | None) -> np.ndarray:
    """|bias| + |residual row| of each row, float64 (rows,): what is added is rounded with the product."""
    added = np.zeros(rows)
    if bias is not None:
        added += norm(bias)
    if residual is not None:
        added += row_norms(residual.reshape(rows, residual.size // max(1, rows)).astype(np.float64))
    return added


def certificate(
    x: ActivationNorms,
    w: WeightNorms,
    *,
    k: int,
    columns: int,
    dtype: str = "float32",
    activation: str | None = None,
    added: np.ndarray | float = 0.0,
    epilogue: bool = False,
    factor: float = 1.0,
    hidden: np.ndarray | None = None,
    hidden_rows: int = 1,
    product_norm: float = 0.0,
    estimate: float | None = None,
    confidence: float | None = None,
    accumulate: str = "fp32",
    outer: tuple[np.ndarray | float, np.ndarray | float] | None = None,
) -> Certificate:
    """The certificate of a product of rows with norms `x` and a weight with norms `w`.

    Args:
        k: length of the sums. columns: of the result; with the rows of `x` they make its elements.
        dtype: the result's. activation, epilogue: whether anything follows the product, and which activation.
        added: norms of bias and residual, a row each (`added_norms`). factor: `conv_factor`, 1 for a product.
        hidden: norms (rows,) of T = bf16(x D) on the dual track, each of `hidden_rows` rows of T.
        product_norm: |x @ w|_F as computed.
        estimate: `sketch` of the products, confidence: its own.
        accumulate: how the FP4 product was summed: "fp32", or "promoted" or "fast" on FP8 tensor cores.
        outer: outer (decode) scales of x, one a row, and of w, one a column; a number stands for all of them.
            Needed on FP8 tensor cores alone, and there only where an operand's scales were not found from
            the largest element of each of its rows of K (a tensor's, an image's, a static one).
    """
    size, used, error = (factor * v for v in (x.rows, x.rows_used, x.rows_error))
    hidden = np.zeros_like(size) if hidden is None else hidden
    step = math.sqrt(hidden_rows) * formulas.hidden_rounding(k, w.rank)
    rows = formulas.dual_bound(size, error, hidden, w.sigma_used, w.sigma_error, w.sigma_up, step)
    bf16_rows, fp4_rows = size * w.sigma, used * w.sigma_used + hidden * w.sigma_up
    rounding = formulas.output_rounding(dtype, columns, bf16_rows, fp4_rows, added)
    pairs = [(norm(size), w.norm), (norm(used), w.used)]
    pairs += [(norm(hidden), w.up), (norm(size) * w.sigma_up, w.down)]
    accumulation = formulas.accumulation_bound(k, size.size * columns, *pairs)
    accumulation += _tensor_cores(accumulate, k, (used, columns), (norm(used), w.used), outer)
    if epilogue or activation is not None:
        accumulation += _EPILOGUE * norm(bf16_rows + fp4_rows + 2 * added)
    slope, exact = LIPSCHITZ[activation], norm(rows)
    accumulation *= formulas.accumulated_rounding(dtype)
    accumulation = math.inf if math.isnan(accumulation) else accumulation  # zeros times Inf
    largest = np.maximum(bf16_rows + rows, fp4_rows) + added
    if x.overflow or w.overflow or not _in_range(dtype, size, rows + added, largest, w.norm):
        rows = np.full_like(rows, math.inf)
    bound = slope * norm(rows) + norm(rounding)
    bound = bound if math.isfinite(bound) else math.inf  # a NaN norm proves nothing either
    linear = exact
    if estimate is not None:  # the weight's own error was not seen by the sketch
        linear = estimate + (norm(size) * w.sigma_error if w.decoded else 0.0)
        estimate = slope * linear + norm(rounding) if math.isfinite(bound) else math.inf
    best = min(exact, linear) + norm(rounding) + accumulation if math.isfinite(bound) else math.inf
    relative = best / product_norm if 0 < product_norm < math.inf else (0.0 if best == 0 else math.inf)
    terms = {
        "x": norm(size), "x_used": norm(used), "x_error": norm(error), "hidden": norm(hidden),
        "rounding": norm(rounding), "product": product_norm,
    }  # fmt: skip
    terms |= {"w": w.norm, "w_used": w.used, "sigma_w": w.sigma}
    terms |= {name: getattr(w, name) for name in ("sigma_used", "sigma_error", "sigma_up")}
    return Certificate(
        bound, slope * accumulation, estimate, confidence if estimate is not None else None, relative,
        w.reference, terms, slope * rows + rounding if factor == 1.0 else None,
    )  # fmt: skip


def _tensor_cores(accumulate: str, k: int, shape, norms, outer) -> float:
    """What the sums of the FP4 product lose beside FP32's rounding."""
    if accumulate not in formulas.ACCUMULATE:
        raise ValueError(
            f"certificate: accumulate is {accumulate!r}, but 'fp32', 'promoted' or 'fast' is needed"
        )
    if outer is None:
        return formulas.ACCUMULATE[accumulate](k) * norms[0] * norms[1]
    rows, columns = shape
    scales = np.broadcast_to(outer[0], rows.shape), np.broadcast_to(outer[1], (columns,))
    x, w = (formulas.subnormal_norm(n, o, k) for n, o in zip(norms, scales, strict=True))
    return formulas.ACCUMULATE[accumulate](k, subnormal=0) * x * w


def _in_range(dtype, size, apart, largest, w_norm) -> bool:
    """Whether neither an operand rounded to BF16 nor an FP32 sum nor a result can overflow.

    |any partial sum of x W| <= |x row| |W|_F, those of the FP4 product are `apart` from them or under
    `largest`, what the results' rows are under.
    """
    if size.size == 0:
        return True
    top = max(float(np.max(size * w_norm + apart)), float(np.max(largest)), float(np.max(size)), w_norm)
    return top < _FLOAT32_RANGE and (dtype != "float16" or float(np.max(largest)) < 65504)


def quant_stats(sums: np.ndarray, counts: np.ndarray | None = None, source_dtype="float32") -> QuantStats:
    """`QuantStats` of what the device's quantiser left, copied to the host: `sums` float64 (rows, 3),
    `counts` (5,): clipped elements, underflowed, zero, overflowed and non-finite blocks."""
    sums = np.asarray(sums, np.float64).reshape(-1, 3)
    clipped, underflowed, zero, overflow, _ = (int(c) for c in (np.zeros(5) if counts is None else counts))
    return QuantStats(*np.ascontiguousarray(sums.T), clipped, underflowed, zero, overflow, source_dtype)


def device_certificate(
    x: QuantStats | ActivationNorms,
    w: WeightNorms,
    *,
    k: int,
    columns: int,
    accumulate: str = "promoted",
    **more: Any,
) -> Certificate:
    """The certificate of a product on the GPU, from small arrays that were copied to the host.

    The copies synchronise with the stream that wrote them. Nothing but norms is needed, so there is no
    estimate unless the caller makes one: `sketch` of host copies of x, w and the product.

    Args:
        x: `quant_stats` of the activations as quantised in this call, or their norms.
        w: `quantized_weight_norms` or `dual_norms` of the weight, once a weight.
        accumulate: that of the call. An FP4 product in formats that E4M3 does not hold (`nvfp4`, `mxfp4`)
            runs on the BF16 tensor cores: "fp32".
        more: as in `certificate`: outer, dtype, activation, added, epilogue, hidden, product_norm, ...

    >>> stats = quant_stats(np.float64([[4.0, 3.9, 0.1]]), source_dtype="bfloat16")
    >>> w = WeightNorms(norm=2.0, used=2.0, sigma=1.0, sigma_used=1.0, sigma_error=0.1)
    >>> cert = device_certificate(stats, w, k=1024, columns=64, product_norm=1.5)
    >>> round(cert.bound, 3), round(cert.accumulation, 3)
    (0.516, 0.066)
    """
    if isinstance(x, QuantStats):
        x = activation_norms(x, k)
    return certificate(x, w, k=k, columns=columns, accumulate=accumulate, **more)


def same(dtype: str = "float32") -> Certificate:
    """The certificate of a call that ran on the BF16 track itself: no distance."""
    return Certificate(0.0, 0.0, 0.0, 1.0)


# ---- the sketch --------------------------------------------------------------------------------------------
_calls = itertools.count()
_sketching: contextvars.ContextVar[tuple | None] = contextvars.ContextVar("fp4bf16_sketch", default=None)
#: The weight whose twin is multiplied, where `sketching` knows it.
sketched_master: contextvars.ContextVar[np.ndarray | None] = contextvars.ContextVar("master", default=None)


@contextmanager
def sketching(seed: int, step: int, call: int, master: np.ndarray | None = None) -> Iterator[None]:
    """Sketches inside are drawn from these numbers, so that they repeat; each certified call needs its own
    `call` within a step for the confidence to hold.

    master: the weight (O, ...) whose twin is multiplied inside, its norms known against it: the sketch then
    sees what the twin lost.
    """
    token, held = _sketching.set((seed, step, call)), sketched_master.set(master)
    try:
        yield
    finally:
        sketched_master.reset(held)
        _sketching.reset(token)


def gaussian(n: int, columns: int, call: int | None = None, step: int = 0, seed: int = 0) -> np.ndarray:
    """(n, columns) standard normals, float64, by counter-based Philox from (seed, step, call) alone.

    Without `call` each use takes the numbers of `sketching`, or else the next of this process, so that no two
    certificates share a sketch.
    """
    if call is None and (given := _sketching.get()) is not None:
        seed, step, call = given
    call = next(_calls) if call is None else call
    generator = np.random.Philox(key=seed, counter=[0, 0, call, step])
    return np.random.Generator(generator).standard_normal((n, columns))


def sketch(
    x: np.ndarray,
    w: np.ndarray,
    y: np.ndarray,
    columns: int = 16,
    delta: float = 1e-3,
    call: int | None = None,
    step: int = 0,
) -> float:
    """A limit that |x @ w - y|_F exceeds with probability `delta` at most; x (M, K), w (K, N), y (M, N).

    |x (w G) - y G|_F^2 / columns estimates the square without bias (Gaussian Freivalds, arXiv:1705.10449);
    the limit is its root times sqrt(columns / chi-square_{columns, delta}), 2.015 at 16 and 1e-3, which is
    sharp where the difference has rank one. Costs 2 columns (MK + KN + MN) operations, in float64.
    """
    g = gaussian(y.shape[1], columns, call, step)
    x, w, y = (np.asarray(m, np.float64) for m in (x, w, y))
    d = _multiply(x, _multiply(w, g)) - _multiply(y, g)
    return norm(d) * sketch_factor(columns, delta) / math.sqrt(columns)


def dual_norms(w: np.ndarray, twin: np.ndarray, down: np.ndarray, up: np.ndarray) -> WeightNorms:
    """Norms of a dual weight: master `w` (K, N), decoded `twin` (K, N), branch (K, r), (r, N)."""
    norms = weight_norms(w, twin, _multiply(down.astype(np.float64), up.astype(np.float64)))
    return replace(norms, down=norm(down), up=norm(up), sigma_up=spectral_norm_upper(up), rank=len(up))
