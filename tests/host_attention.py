"""Emulation of attention for `host_cuda`: sums in float64, rounded as fp4bf16.h says."""

from __future__ import annotations

import numpy as np
from host_cuda import memory

from fp4bf16.interop import BFLOAT16

WORKSPACE = 48  # bytes; the emulation needs none, but checks that the caller gives it


def define(library) -> None:
    """Add attention and its gradient to a `HostCuda`."""
    found = Attention(library)
    library._define("attention", "const fp4bf16_attention_args*, void*", found.forward)
    library._define("attention_backward", "const fp4bf16_attention_args*, void*", found.backward)
    library.lib.fp4bf16_attention_backward_workspace_size = library.ffi.callback(
        "int64_t(const fp4bf16_attention_args*)", lambda args: WORKSPACE
    )


def rounded(x: np.ndarray) -> np.ndarray:
    """The BF16 numbers nearest to `x`, as float64, by way of float32 like the kernels."""
    return x.astype(np.float32).astype(BFLOAT16).astype(np.float64)


class Attention:
    def __init__(self, library):
        self.at = library.at

    def _stored(self, a, name: str) -> np.ndarray:
        """The array itself, (n, tokens, heads, dim)."""
        tokens = a.k_tokens if name in ("k", "v", "dk", "dv") else a.q_tokens
        address, strides = self.at(getattr(a, name)), tuple(getattr(a, f"{name}_strides"))
        assert address % 2 == 0, f"{name} is not aligned"
        return memory(address, (a.n, tokens, a.heads, a.dim), BFLOAT16, (*strides, 1))

    def _read(self, a, *names: str) -> list[np.ndarray]:
        """float64, (n, heads, tokens, dim)."""
        return [self._stored(a, name).astype(np.float64).swapaxes(1, 2) for name in names]

    def _scores(self, a, q, k) -> np.ndarray:
        s = a.scale * (q @ k.swapaxes(-1, -2))
        return np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf) if a.causal else s

    def _lse(self, a) -> np.ndarray:
        return memory(self.at(a.lse), (a.n, a.heads, a.q_tokens), np.float32)

    def _check(self, a) -> None:
        assert 1 <= a.dim <= 512, f"dim is {a.dim}"
        assert np.isfinite(a.scale), f"scale is {a.scale}"
        assert a.causal in (0, 1), f"causal is {a.causal}"

    def forward(self, a) -> None:
        self._check(a)
        q, k, v = self._read(a, "q", "k", "v")
        s = self._scores(a, q, k)
        top = s.max(-1, keepdims=True, initial=-np.inf)
        with np.errstate(invalid="ignore", divide="ignore"):
            p = rounded(np.exp(s - top))
            total = p.sum(-1, keepdims=True)
            out = np.where(total == 0, 0, p @ v / total)
            lse = (top + np.log(total))[..., 0]
        self._stored(a, "out")[...] = out.swapaxes(1, 2).astype(np.float32).astype(BFLOAT16)
        if self.at(a.lse):
            self._lse(a)[...] = lse

    def backward(self, a) -> None:
        self._check(a)
        assert self.at(a.workspace) and self.at(a.workspace) % 16 == 0, "workspace"
        q, k, v, g = self._read(a, "q", "k", "v", "g")
        p = np.exp(self._scores(a, q, k) - self._lse(a)[..., None].astype(np.float64))
        dp = g @ v.swapaxes(-1, -2)
        ds = rounded(p * (dp - (p * dp).sum(-1, keepdims=True) / p.sum(-1, keepdims=True)))
        gradients = a.scale * (ds @ k), a.scale * (ds.swapaxes(-1, -2) @ q), rounded(p).swapaxes(-1, -2) @ g
        for name, x in zip(("dq", "dk", "dv"), gradients, strict=True):
            self._stored(a, name)[...] = x.swapaxes(1, 2).astype(np.float32).astype(BFLOAT16)
