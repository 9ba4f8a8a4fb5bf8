"""Philox, Box-Muller and the draws per (seed, step)."""

import math
import time
from itertools import pairwise

import numpy as np
import pytest

from fp4bf16.backends import cpu_random, threads
from fp4bf16.diffusion import noise
from fp4bf16.errors import DTypeError
from fp4bf16.python_ref import random as reference

# Known answers of Random123 for philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _hex(text):
    return np.array([int(w, 16) for w in text.split()], np.uint32)


@pytest.mark.parametrize("counter, key, expected", KNOWN)
def test_philox_known_answers(counter, key, expected):
    np.testing.assert_array_equal(reference.philox4x32(_hex(counter), _hex(key)), _hex(expected))


def test_words_are_laid_out_by_element(rng):
    seed, stream, call = int(rng.integers(2**63)) * 2 + 1, int(rng.integers(2**32)), int(rng.integers(2**32))
    w = reference.words(seed, stream, call, 1001)
    for i in (0, 1, 5, 1000):
        counter = np.array([i // 4, 0, stream, call], np.uint32)
        key = np.array([seed % 2**32, seed >> 32], np.uint32)
        assert w[i] == reference.philox4x32(counter, key)[i % 4]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 1023, 1024, 1025, 4099])
def test_cpu_backend_has_the_bits_of_the_reference(rng, count):
    seeds = rng.integers(0, 2**64, 3, dtype=np.uint64)
    stream, call = int(rng.integers(2**32)), int(rng.integers(2**32))
    normals = cpu_random.normal(seeds, stream, call, count)
    words = cpu_random.words(seeds, stream, call, count)
    for row, seed in enumerate(seeds.tolist()):
        expected = reference.normal(seed, stream, call, count)
        np.testing.assert_array_equal(normals[row].view(np.uint32), expected.view(np.uint32))
        np.testing.assert_array_equal(words[row], reference.words(seed, stream, call, count))


def test_bits_do_not_depend_on_threads():
    before = threads.num_threads()
    draws = []
    try:
        for n in (1, 2, 5):
            threads.set_num_threads(n)
            draws.append(cpu_random.normal(np.arange(40, dtype=np.uint64), 1, 2, 3000).tobytes())
    finally:
        threads.set_num_threads(before)
    assert draws[0] == draws[1] == draws[2]


def _ulps(mine, exact):
    return max(abs(m - e) / math.ulp(e) for m, e in zip(mine.tolist(), exact, strict=True))


def test_log_is_accurate(rng):
    tiny = (rng.integers(0, 100, 500) + 0.5) * 2.0**-32
    middle = (rng.integers(0, 2**32, 20000) + 0.5) * 2.0**-32
    edge = 2.0 ** -rng.integers(0, 33, 500) * rng.choice([math.sqrt(0.5), 1.0], 500)
    for u in (tiny, 1 - tiny, middle, edge):
        assert _ulps(reference.log_unit(u), [math.log(v) for v in u.tolist()]) <= 3
    assert reference.log_unit(np.array(1.0)) == 0


def test_sincospi_is_accurate(rng):
    x = (rng.integers(0, 2**32, 20000) + 0.5) * 2.0**-31
    sine, cosine = reference.sincospi(x)
    # math.sin(pi x) inherits the rounding of pi x, so reduce to a small angle of the same sine first
    turn = [v if v <= 1 else v - 2 for v in x.tolist()]
    small = [v if abs(v) <= 0.5 else math.copysign(1 - abs(v), v) for v in turn]
    exact_sine = [math.sin(math.pi * v) if abs(v) <= 0.25 else
                  math.copysign(math.cos(math.pi * (0.5 - abs(v))), v) for v in small]
    assert _ulps(sine, exact_sine) <= 4
    shifted = reference.sincospi((x + 0.5) % 2)[0]
    assert np.abs(shifted - cosine).max() <= 4 * 2.0**-53
    assert np.abs(sine**2 + cosine**2 - 1).max() <= 6 * 2.0**-53
    s, c = reference.sincospi(np.array([0, 0.5, 1, 1.5]))
    np.testing.assert_array_equal(s, [0, 1, 0, -1])
    np.testing.assert_array_equal(c, [1, 0, -1, 0])


def test_normals_are_normal(rng):
    n = 1 << 20
    x = np.sort(noise.normal(int(rng.integers(2**62)), 0, n).astype(np.float64))
    z = math.sqrt(n)  # standard errors of the first four moments: 1, sqrt 2, sqrt 15, sqrt 96 over sqrt n
    assert abs(x.mean()) * z < 6
    assert abs((x**2).mean() - 1) * z < 6 * math.sqrt(2)
    assert abs((x**3).mean()) * z < 6 * math.sqrt(15)
    assert abs((x**4).mean() - 3) * z < 6 * math.sqrt(96)
    grid = np.linspace(-4.5, 4.5, 181)  # Kolmogorov-Smirnov on a grid: P(sqrt(n) D > 3) < 2 exp(-18)
    below = np.searchsorted(x, grid) / n
    exact = [0.5 * math.erfc(-g / math.sqrt(2)) for g in grid]
    assert np.abs(below - exact).max() * z < 3
    assert 4.2 < np.abs(x).max() < 6.77


def test_draws_are_uncorrelated(rng):
    seed, n = int(rng.integers(2**62)), 1 << 16
    draws = [noise.normal(seed, 0, n), noise.normal(seed, 1, n), noise.normal(seed + 1, 0, n),
             noise.normal(seed, 0, n, stream=9), noise.normal(seed, 0, n + 1)[1:]]
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() * math.sqrt(n) < 6


def test_one_seed_one_picture_in_any_batch(rng):
    seeds = rng.integers(0, 2**63, 9)
    batch = noise.normal(seeds, 3, (4, 4, 3))
    assert batch.shape == (9, 4, 4, 3) and batch.dtype == np.float32
    order = rng.permutation(9)
    np.testing.assert_array_equal(noise.normal(seeds[order], 3, (4, 4, 3)), batch[order])
    np.testing.assert_array_equal(noise.normal(int(seeds[4]), 3, (4, 4, 3)), batch[4])
    np.testing.assert_array_equal(noise.normal(int(seeds[4]), 3, (48,)), batch[4].ravel())
    for a, b in pairwise(batch):
        assert not np.array_equal(a, b)
    assert noise.normal([], 0, (2, 2)).shape == (0, 2, 2) and noise.normal(0, 0, (0, 3)).shape == (0, 3)


def test_uniform_and_integers(rng):
    seed = int(rng.integers(2**62))
    u = noise.uniform(seed, 5, 100_000)
    assert u.dtype == np.float32 and 0 <= u.min() and u.max() < 1
    assert abs(u.mean() - 0.5) < 6 * math.sqrt(1 / 12 / u.size)
    np.testing.assert_array_equal(u, reference.uniform(seed, noise.UNIFORM, 5, u.size))
    k = noise.integers(seed, 5, (1000, 100), -3, 4)
    counts = np.bincount(k.ravel() + 3, minlength=7)
    assert k.min() == -3 and k.max() == 3 and len(counts) == 7
    expected = k.size / 7
    assert ((counts - expected) ** 2 / expected).sum() < 50  # chi-square with 6 degrees: P < 5e-9
    np.testing.assert_array_equal(k.ravel(), reference.integers(seed, noise.INTEGERS, 5, k.size, -3, 4))
    assert noise.integers(seed, 0, 3, 0, 2**32).max() > 2**20


def test_permutation(rng):
    seed = int(rng.integers(2**62))
    p = noise.permutation(seed, 2, 1000)
    np.testing.assert_array_equal(np.sort(p), np.arange(1000))
    np.testing.assert_array_equal(p, reference.permutation(seed, noise.PERMUTATION, 2, 1000))
    fixed = [int((noise.permutation(seed, e, 50) == np.arange(50)).sum()) for e in range(200)]
    assert 130 < sum(fixed) < 280  # one fixed point each in the mean, variance one


def test_subseeds_differ():
    seeds = {noise.subseed(s, *names) for s in (0, 1) for names in [(), ("a",), ("b",), ("a", 1), ("a", 2)]}
    assert len(seeds) == 10 and all(0 <= s < 2**64 for s in seeds)
    assert noise.subseed(0, "judge") == noise.subseed(0, "judge")


@pytest.mark.parametrize("call, error, text", [
    (lambda: noise.normal(-1, 0, 3), ValueError, r"normal: seed is -1, but .* \[0, 2\^64\)"),
    (lambda: noise.normal(2**64, 0, 3), ValueError, "seed is 18446744073709551616"),
    (lambda: noise.normal([3, -5], 0, 3), ValueError, "seed is -5"),
    (lambda: noise.normal(1.5, 0, 3), DTypeError, "seed is float64; pass whole numbers"),
    (lambda: noise.normal([[1]], 0, 3), ValueError, r"seed has shape \(1, 1\)"),
    (lambda: noise.uniform(1, 2**32, 3), ValueError, "uniform: step is 4294967296"),
    (lambda: noise.uniform(1, -1, 3), ValueError, "uniform: step is -1"),
    (lambda: noise.normal(1, 0, (2, -3)), ValueError, r"shape \(2, -3\) has a negative length"),
    (lambda: noise.integers(1, 0, 3, 5, 5), ValueError, r"\[5, 5\), but it must hold 1 to 2\^32 values"),
    (lambda: noise.permutation([1, 2], 0, 3), ValueError, "seed must be one whole number"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_speed_is_not_the_references():
    seeds, best = np.arange(16, dtype=np.uint64), math.inf
    cpu_random.normal(seeds, 0, 0, 8)
    for _ in range(5):
        start = time.perf_counter()
        cpu_random.normal(seeds, 0, 0, 65536)
        best = min(best, time.perf_counter() - start)
    assert seeds.size * 65536 / best > 2e7, f"{seeds.size * 65536 / best / 1e6:.0f} M normals/s"
