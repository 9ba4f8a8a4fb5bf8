"""Convolutions to few outputs on a GPU, and the same tests of their emulation without one."""

from __future__ import annotations

import numpy as np
import pytest
from host_elementwise import Held
from test_cuda_elementwise import FRAMES, place  # noqa: F401  (a fixture)

from fp4bf16.interop import BFLOAT16

F32, F64 = np.float32, np.float64

CASES = [  # n, h, w, c; o, kh, kw, top, left; oh, ow
    ((1, 1, 1, 8), (1, 1, 1, 0, 0), (1, 1)),
    ((2, 5, 7, 24), (3, 3, 3, 1, 1), (5, 7)),
    ((3, 9, 40, 64), (3, 3, 3, 1, 1), (9, 40)),
    ((2, 3, 2, 40), (2, 2, 4, 3, 2), (6, 3)),
    ((1, 40, 70, 16), (4, 5, 3, 2, 1), (40, 70)),
    ((5, 32, 32, 128), (3, 3, 3, 1, 1), (32, 32)),
    ((2, 16, 16, 1024), (4, 3, 3, 1, 1), (16, 16)),
    ((1, 12, 9, 136), (7, 3, 3, -1, 0), (9, 7)),
    ((1, 3, 20, 16), (1, 8, 8, 4, 4), (3, 20)),
    ((2, 4, 3, 0), (3, 3, 3, 1, 1), (4, 3)),
    ((2, 0, 3, 8), (2, 3, 3, 2, 1), (2, 3)),
    ((0, 4, 4, 8), (3, 3, 3, 1, 1), (4, 4)),
]


def summed(x, weight, kernel, size):
    """(result, sum of magnitudes) in float64."""
    (o, kh, kw, top, left), (oh, ow) = kernel, size
    (n, h, w, c), found = x.shape, []
    for power in (1, 2):
        a, b = (v.astype(F64) if power == 1 else np.abs(v.astype(F64)) for v in (x, weight))
        framed = np.zeros((n, h + abs(top) + oh + kh, w + abs(left) + ow + kw, c))
        framed[:, max(top, 0) : max(top, 0) + h, max(left, 0) : max(left, 0) + w] = a
        framed = framed[:, max(-top, 0) :, max(-left, 0) :]
        total = np.zeros((n, oh, ow, o))
        for r, s in np.ndindex(kh, kw):
            total += framed[:, r : r + oh, s : s + ow] @ b[:, r, s].T
        found.append(total)
    return found


@pytest.mark.parametrize("shape, kernel, size", CASES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_sums_over_channels_and_taps(place, rng, shape, kernel, size, with_bias):  # noqa: F811
    library, memory = place
    c, (o, kh, kw, *_), (oh, ow) = shape[-1], kernel, size
    x = rng.standard_normal(shape).astype(BFLOAT16)
    weight = rng.standard_normal((o, kh, kw, c)).astype(BFLOAT16)
    bias = rng.standard_normal(o).astype(F32)
    want, magnitude = summed(x, weight, kernel, size)
    want, magnitude = (v + with_bias * b for v, b in ((want, bias.astype(F64)), (magnitude, np.abs(bias))))
    # The tensor cores' sums: 16 products and the sum so far are cut below 2^-24 of the largest, seventeen
    # terms a step; then each tap and the bias are one rounding of FP32.
    bound = (17 * (c // 16 + 2) + kh * kw + 1) * 2.0**-24 * magnitude
    for pad, front in FRAMES:
        for pads in ((tuple(8 * p for p in pad), ()), ((), pad)):
            held = Held(memory, x, pads[0], 8 * front)
            out = Held(memory, pad=pads[1], front=front, shape=want.shape, dtype=F32)
            added = memory.put(bias) if with_bias else 0
            library.call("conv2d_few", held.address, *shape, held.strides, memory.put(weight), oh, ow,
                         *kernel, added, out.address, out.strides, 0, 0)  # fmt: skip
            assert (np.abs(out.get() - want) <= bound).all()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"o": 8}, "8 outputs of 3 x 3 taps, but at most 64"),
        ({"c": 12}, "c is 12, but must be a multiple of 8 up to 1024"),
        ({"c": 1032}, "c is 1032, but must be"),
        ({"kh": 0}, "kh is 0, but must be 1"),
        ({"x": 72}, "x is 8 bytes past a multiple of 16"),
        ({"x_strides": [16, 8, 4]}, "stride 2 of x is 4 elements, but must be a multiple of 8"),
        ({"x_strides": 0}, "the strides of x are NULL"),
        ({"weight": 0}, "weight is NULL"),
        ({"run_if": 66}, "run_if is 2 bytes past a multiple of 4"),
        ({"out_strides": 0}, "the strides of out are NULL"),
        ({"top": 1 << 20}, "top is 1048576, but must be -32768 to 32768"),
    ],
)
def test_bad_arguments_are_refused_before_any_launch(library, change, sentence):
    arguments = {
        "x": 64, "n": 1, "h": 4, "w": 4, "c": 8, "x_strides": [128, 32, 8], "weight": 64, "oh": 4, "ow": 4,
        "o": 3, "kh": 3, "kw": 3, "top": 1, "left": 1, "bias": 0, "out": 64,
        "out_strides": [48, 12, 3], "run_if": 0, "stream": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=sentence):
        library.call("conv2d_few", *(arguments | change).values())
