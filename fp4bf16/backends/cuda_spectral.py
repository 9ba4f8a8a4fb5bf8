"""Upper bounds of singular values on a GPU, by the array framework: nothing is waited for.

In float64: no slack for the Gram matrix is needed, and no setting of the framework (TF32) takes a proof away.
"""

from __future__ import annotations

from typing import Any

from .. import device

_ROOM = 1 + 2.0**-20  # over what float64 loses: docs/certificate.md, section 3


def spectral_norms(xp: Any, w: Any, squarings: int) -> Any:
    """Upper bounds (L,) of the largest singular values of w (L, m, n) float64; NaN where w holds NaN or Inf.

    sqrt(|G^q|_F^(1/q)), G being the smaller Gram matrix over its norm and q = 2^squarings: over sigma by a
    factor of at most m^(1 / 4q) for G (m, m) (`python_ref.certify.spectral_norm_upper`). xp: the framework's
    module, NumPy, CuPy or PyTorch.

    >>> import numpy as np
    >>> bool(3 <= spectral_norms(np, np.diag([1.0, 2.0, 3.0])[None], 5)[0] < 3.01)
    True
    """
    smaller = gram(xp, w if w.shape[1] <= w.shape[2] else w.swapaxes(1, 2))
    tau = frobenius(smaller)
    power = smaller / xp.where(tau > 0, tau, 1.0)[:, None, None]
    for _ in range(squarings):
        power = gram(xp, power)  # symmetric
    radius = tau * frobenius(power) ** 0.5**squarings
    return xp.where(tau == 0, 0.0, radius) ** 0.5 * _ROOM


def gram(xp: Any, x: Any) -> Any:
    """x x^T of each matrix of (L, m, n) float64: by our kernel where the framework's product cannot be
    captured in a graph, as CuPy's cannot.
    """
    if xp.__name__ != "cupy":
        return x @ x.swapaxes(1, 2)
    x = xp.ascontiguousarray(x)
    count, m, n = x.shape
    out = xp.empty((count, m, m), x.dtype)
    device.call("gram", x.data.ptr, count, m, n, out.data.ptr, xp.cuda.get_current_stream().ptr)
    return out


def frobenius(w: Any) -> Any:
    """Norm of each matrix of (L, m, n)."""
    flat = w.reshape(w.shape[0], -1)
    return (flat * flat).sum(1) ** 0.5


def rounded_up(arrays: Any, x: Any) -> Any:
    """float32 of float64 x, not under it; Inf for what is not finite. arrays: `cuda_math.of` it."""
    xp, infinite = arrays.xp, float("inf")
    single = arrays.single(xp.where(arrays.finite(x), x, infinite))
    return xp.nextafter(single, xp.full_like(single, infinite))
