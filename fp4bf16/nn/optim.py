"""Optimizer over one flat parameter buffer."""

from __future__ import annotations

import math
from typing import Any

from ..backends.threads import blas_limit
from ..errors import ShapeError
from .xp import namespace

_BLOCK = 1 << 15  # elements at a time, so that the temporaries stay in the cache


def clip_norm(gradient: Any, limit: float | None) -> float:
    """Scale the flat float32 `gradient` in place so that its L2 norm is at most `limit`; the norm before
    that.

    A norm that is not finite is returned as it is and nothing is scaled: the caller decides.

    >>> import numpy as np
    >>> g = np.array([3.0, 4.0], np.float32)
    >>> clip_norm(g, 1.0), g.round(2).tolist()
    (5.0, [0.6000000238418579, 0.800000011920929])
    """
    xp = namespace(gradient)
    with blas_limit(1):
        norm = math.sqrt(max(float(xp.dot(gradient, gradient)), 0.0)) if gradient.size else 0.0
    if limit is not None and math.isfinite(norm) and norm > limit:
        gradient *= xp.float32(limit / norm)
    return norm


class AdamW:
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2) on flat float32 `parameters`
    (n,).

    State: `first`, `second` (float32 (n,), the moment estimates) and `count` (updates so far).

    >>> import numpy as np
    >>> p = np.ones(4, np.float32)
    >>> AdamW(p, lr=0.1).step(np.ones(4, np.float32))
    >>> p.round(3).tolist()
    [0.8999999761581421, 0.8999999761581421, 0.8999999761581421, 0.8999999761581421]
    """

    def __init__(
        self,
        parameters: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        xp = namespace(parameters)
        if parameters.ndim != 1:
            raise ShapeError(
                f"AdamW: parameters have shape {parameters.shape}; pass the module's flat buffer"
            )
        self.parameters, self.lr, self.betas = parameters, lr, betas
        self.eps, self.weight_decay, self.count = eps, weight_decay, 0
        self.first, self.second = xp.zeros_like(parameters), xp.zeros_like(parameters)
        self._temporary = [xp.empty(min(_BLOCK, parameters.size), parameters.dtype) for _ in range(2)]

    def step(self, gradient: Any, lr: float | None = None) -> None:
        """One update of the parameters in place from `gradient` (n,), with `lr` in place of the default."""
        xp = namespace(self.parameters)
        if gradient.shape != self.parameters.shape:
            raise ShapeError(
                f"AdamW: gradient has shape {gradient.shape} but the parameters {self.parameters.shape}"
            )
        self.count += 1
        beta1, beta2 = self.betas
        lr = self.lr if lr is None else lr
        f = self.parameters.dtype.type
        size = f(lr / (1 - beta1**self.count))
        correction = f(1 / math.sqrt(1 - beta2**self.count))
        for start in range(0, self.parameters.size, _BLOCK):
            block = slice(start, min(start + _BLOCK, self.parameters.size))
            p, g, m, v = self.parameters[block], gradient[block], self.first[block], self.second[block]
            a, b = self._temporary[0][: p.size], self._temporary[1][: p.size]
            xp.multiply(g, g, out=a)  # v <- b2 v + (1 - b2) g²
            a *= f(1 - beta2)
            v *= f(beta2)
            v += a
            xp.multiply(g, f(1 - beta1), out=a)  # m <- b1 m + (1 - b1) g
            m *= f(beta1)
            m += a
            xp.sqrt(v, out=b)  # p <- p - lr m^ / (sqrt(v^) + eps) - lr wd p
            b *= correction
            b += f(self.eps)
            xp.divide(m, b, out=a)
            a *= size
            if self.weight_decay:
                p *= f(1 - lr * self.weight_decay)
            p -= a

    def state(self) -> dict[str, Any]:
        """The moments by name, for a checkpoint; `count` is kept beside them."""
        return {"first": self.first, "second": self.second}

    def load_state(self, state: dict[str, Any], count: int) -> None:
        """Take up moments that `state` gave; `ShapeError` when they belong to another network."""
        for name, mine in self.state().items():
            if state[name].shape != mine.shape:
                raise ShapeError(
                    f"AdamW: {name} has shape {state[name].shape} but the parameters have {mine.shape}"
                )
            mine[...] = state[name]
        self.count = int(count)
