"""The norms that group normalisation's quantiser adds up, by its own code on the host (block_norms_host.cu):
upper bounds of what every single block loses and of what it decodes to, whatever the block."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from host_code import compiled

from fp4bf16.interop import BFLOAT16
from fp4bf16.python_ref.formats import E2M1, E4M3
from fp4bf16.python_ref.quantize import expand, quantize

SINGLE = 2.0**-22  # of FP32 sums of one block, rounded up


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    return compiled(tmp_path_factory, "block_norms_host")


class Blocks:
    """Blocks of 16 through the host's code; norms are in units of the outer scale's square."""

    def __init__(self, host, bits: np.ndarray, exponent: int = 0, alone: bool = False):
        """`alone`: the expanded bytes are all that is wanted."""
        self.bits = np.ascontiguousarray(bits, np.uint16).reshape(-1, 16)
        self.y, n = self.bits.view(BFLOAT16).astype(np.float64), len(self.bits)
        self.exponent, self.decode = exponent, 2.0**exponent
        self.packed, self.expanded = np.zeros((n, 8), np.uint8), np.zeros((n, 16), np.uint8)
        self.scale, self.way = np.zeros(n, np.uint8), np.full(n, 7, np.uint8)
        norms = np.full((n, 2), np.nan, np.float32)
        results = (self.packed, self.scale, self.expanded, norms, self.way)
        at = [ctypes.c_void_p(a.ctypes.data) for a in (self.bits, *results)]
        host.host_norm_blocks(at[0], ctypes.c_int64(n), ctypes.c_float(self.decode), int(alone), *at[1:])
        self.error, self.used = norms.astype(np.float64).T

    @property
    def decoded(self) -> np.ndarray:
        """In units of the outer scale."""
        return E4M3.astype(np.float64)[self.expanded]

    def check(self) -> None:
        """Of finite blocks: nothing is missing, and no more is added than the derivation gives away."""
        assert set(self.way) <= {0, 1}
        t = self.y / self.decode
        lost, used = ((t - self.decoded) ** 2).sum(1), (self.decoded**2).sum(1)
        assert (lost <= self.error).all(), (lost / self.error).max()
        assert (used <= self.used).all() and (self.used <= used * (1 + SINGLE)).all()
        fast = self.way == 1
        s = E4M3.astype(np.float64)[self.scale[fast]] / 16  # sqrt(E) is at most the true root and 2
        most = s**2 * (9 / 8 * (np.sqrt(lost[fast]) / s + 2) ** 2 + 36)
        assert (self.error[fast] <= most * (1 + SINGLE)).all()
        assert (self.error[~fast] <= lost[~fast] * (1 + SINGLE) + 2.0**-149).all()

    def check_bytes(self) -> None:
        want = quantize(self.y.astype(np.float32), outer=self.exponent, search="fast", nan="propagate")
        np.testing.assert_array_equal(self.packed, want.packed)
        np.testing.assert_array_equal(self.scale, want.block_scale[:, 0])
        np.testing.assert_array_equal(self.expanded, expand(want))


def drawn(rng, n: int, top: int, reach: int) -> np.ndarray:
    """Random numbers of either sign whose largest has the biased exponent `top`, the others up to `reach`
    octaves less."""
    bits = np.maximum(top - rng.integers(0, reach + 1, (n, 16)), 0) << 7 | rng.integers(0, 128, (n, 16))
    bits[np.arange(n), rng.integers(0, 16, n)] = top << 7 | np.arange(n) % 128
    return np.where(rng.random((n, 16)) < 0.5, bits | 0x8000, bits)


@pytest.mark.parametrize("reach", [0, 1, 3, 12])
def test_every_octave_of_the_window_and_beyond_it(host, rng, reach):
    """From blocks far under the least scale to blocks that the largest one clips."""
    for exponent in (-4, 0, 5):
        for top in range(127 + exponent - 24, 127 + exponent + 12):
            made = Blocks(host, drawn(rng, 512, top, reach), exponent)
            made.check()
            made.check_bytes()
            alone = Blocks(host, made.bits, exponent, alone=True)
            for name in ("expanded", "error", "used", "way"):
                np.testing.assert_array_equal(getattr(alone, name), getattr(made, name))


def test_numbers_between_sixteenths(host):
    """Where T and 16 t / s are furthest apart: one largest and fifteen of any other number, every mantissa of
    both and eight octaves between them; then fifteen that are all half a sixteenth off for some scale.
    """
    largest, other = np.arange(128), np.arange(8 * 128)
    bits = np.empty((128, 8 * 128, 16), np.uint16)
    bits[..., 0] = (133 << 7 | largest)[:, None]
    bits[..., 1:] = ((133 << 7) + 127 - other)[:, None]
    kept = bits[bits[..., 1] <= bits[..., 0]]
    for made in (Blocks(host, kept), Blocks(host, kept | np.uint16(0x8000))):
        made.check()
        assert made.way.all()
    halves = (2 * np.arange(96) + 1) / 32.0
    for m in (1.0, 1.25, 1.5):
        rounded = (m * halves).astype(BFLOAT16)  # of those that BF16 holds
        exact = rounded[rounded.astype(np.float64) == m * halves]
        for first in np.concatenate([exact, (m * np.array([5, 5.5, 6], np.float64)).astype(BFLOAT16)]):
            block = np.resize(exact[exact <= first], 15)
            Blocks(host, np.concatenate([[first], block]).astype(BFLOAT16).view(np.uint16)).check()


def test_the_worst_of_many(host, rng):
    """Blocks climb towards the least room under the bound, from random ones."""
    bits = drawn(rng, 4096, 130, 4) & 0x7FFF

    def room(made: Blocks) -> np.ndarray:
        return ((made.y - made.decoded) ** 2).sum(1) / made.error

    made = Blocks(host, bits)
    best = room(made)
    for _ in range(60):
        step = rng.integers(-3, 4, made.bits.shape) * (rng.random(made.bits.shape) < 0.3)
        tried = Blocks(host, np.clip(made.bits.astype(np.int64) + step, 0, 131 << 7))
        tried.check()
        found = room(tried)
        better = found > best
        made.bits[better], best = tried.bits[better], np.maximum(best, found)
    assert 0.8 < best.max() <= 1  # what the search finds comes near


def test_ordinary_numbers(host, rng):
    """Gaussian numbers, 3 to 9 octaves from the outer scale's largest to their deviation: the root of the
    error's bound is 15 % over the error's norm.
    """
    for sigma in 288 / 2.0 ** rng.uniform(3, 9, 8):
        y = (rng.standard_normal((1 << 14, 16)) * sigma).astype(BFLOAT16)
        made = Blocks(host, y.view(np.uint16))
        made.check()
        lost = ((made.y - made.decoded) ** 2).sum()
        assert 1.1 < np.sqrt(made.error.sum() / lost) < 1.2
        relative = np.sqrt(lost / (made.y**2).sum())
        assert 0.085 < relative < 0.1  # it is nvfp4_exact


@pytest.mark.parametrize("exponent", [-119, -40, 0, 60, 119])
def test_blocks_that_the_fast_quantiser_leaves(host, rng, exponent):
    """Zeros, tiny and subnormal numbers, blocks beyond what the outer scale holds; far scales."""
    zeros = np.zeros((4, 16), np.uint16)
    zeros[1:, 3] = 0x8000
    made = Blocks(host, zeros, exponent)
    made.check()
    assert not made.way.any() and not made.error.any() and not made.used.any()
    for top in (0, 1, 20, 31, 32, 33):
        Blocks(host, drawn(rng, 256, top, 3), exponent).check()
    high = min(127 + exponent + 9, 250)
    for top in range(high - 2, min(high + 3, 254)):  # clipped: what is lost is measured
        made = Blocks(host, drawn(rng, 256, top, 2), exponent)
        made.check()
        made.check_bytes()


def test_what_is_not_finite_has_no_bound(host, rng):
    for value in (np.nan, np.inf, -np.inf):
        y = rng.standard_normal((3, 16)).astype(BFLOAT16)
        y[1, rng.integers(16)] = value
        made = Blocks(host, y.view(np.uint16))
        np.testing.assert_array_equal(np.isinf(made.error), [False, True, False])
        np.testing.assert_array_equal(np.isinf(made.used), [False, True, False])
        np.testing.assert_array_equal(made.expanded[1], 0x7F)


def test_codes_agree_with_the_bytes_that_are_expanded(host, rng):
    made = Blocks(host, drawn(rng, 2048, 132, 5))
    nibbles = np.stack([made.packed & 15, made.packed >> 4], 2).reshape(-1, 16)
    values = E2M1.astype(np.float64)[nibbles] * E4M3.astype(np.float64)[made.scale][:, None]
    np.testing.assert_array_equal(values, made.decoded)
