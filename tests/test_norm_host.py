"""Who takes which pixel in the streaming group norm, by the kernel's own plan on the host: norm_host.cu."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from host_code import HOPPER, compiled

MOST = 64  # passes of a segment: bits of a thread's special blocks
START = 2  # passes that an image's statistics cost


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    library = compiled(tmp_path_factory, "norm_host", HOPPER)
    for name in ("host_segments", "host_take"):
        getattr(library, name).restype = ctypes.c_int64
    return Host(library)


class Host:
    def __init__(self, library):
        self.host = library

    def plan(self, *shape):
        out = np.zeros(4, np.int64)
        self.host.host_plan(*map(ctypes.c_int64, shape), ctypes.c_void_p(out.ctypes.data))
        return out.tolist()

    def starts(self, *shape):
        out = np.full(self.plan(*shape)[1] + 1, -1, np.int64)
        self.host.host_starts(*map(ctypes.c_int64, shape), ctypes.c_void_p(out.ctypes.data))
        return out

    def segments(self, shape, block, most):
        out = np.full((most, 3), -1, np.int64)
        more = ctypes.c_uint32(block), ctypes.c_int64(most), ctypes.c_void_p(out.ctypes.data)
        found = self.host.host_segments(*map(ctypes.c_int64, shape), *more)
        return out[:found]

    def take(self, n, pixels, vectors, slots):
        taken, written = np.zeros((n, pixels, vectors), np.int32), np.zeros(n, np.int32)
        more = [ctypes.c_void_p(a.ctypes.data) for a in (taken, written)]
        without = self.host.host_take(*map(ctypes.c_int64, (n, pixels, vectors, slots)), *more)
        return taken, written, without


#: (n, pixels, vectors, slots): the UNet's layers, one of all, more slots than passes, images of many
#: segments, vectors and pixels that divide nothing, one slot.
SHAPES = [
    (40, 1024, 8, 528), (64, 256, 16, 528), (5, 1024, 24, 528), (600, 64, 32, 528), (3, 1024, 16, 396),
    (1, 1, 1, 528), (1, 1, 256, 528), (7, 1, 3, 528), (1, 5000, 2, 528), (1, 300, 256, 2), (2, 20000, 1, 3),
    (700, 5, 2, 528), (529, 1, 1, 528), (2, 33, 255, 528), (3, 1023, 4, 1), (13, 97, 129, 100),
]  # fmt: skip


def check_takes(host, shape):
    taken, written, without = host.take(*shape)
    assert (taken == 1).all(), shape
    assert (written == 1).all() and without == 0, shape


@pytest.mark.parametrize("shape", SHAPES)
def test_each_pixel_is_taken_once_behind_its_images_statistics(host, shape):
    check_takes(host, shape)


def test_random_shapes(host, rng):
    for _ in range(60):
        vectors = int(rng.integers(1, 257))
        pixels = int(rng.integers(1, 1 + min(3000, 200000 // vectors)))
        n = int(rng.integers(1, 2 + 400000 // (pixels * vectors)))
        check_takes(host, (n, pixels, vectors, int(rng.integers(1, 700))))


#: Near 2^32 blocks of results, the most that the kernel takes, and slots beyond the most thread blocks.
LARGE = [
    (2**32 - 1, 1, 1, 528), (1, 2**32 - 1, 1, 528), (65537, 65535, 1, 528), (1, 2**24 - 1, 256, 528),
    (2**31 - 1, 2, 1, 396), (2**20 + 7, 1024, 3, 528), (3, 2**30 + 1, 1, 2**20), (2**16, 255, 256, 65535),
    (65536, 65535, 1, 65536), (65535, 65535, 1, 65535), (2**32 // 24, 1, 24, 17),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_shares_are_even_and_their_segments_complete(host, rng, shape):
    n, pixels, vectors, slots = shape
    passes, blocks, threads, rows = host.plan(*shape)
    assert rows == min(256 // vectors, pixels) and passes == -(-pixels // rows)
    assert rows * vectors <= threads <= 256 and threads % 32 == 0
    total = n * passes
    assert 1 <= blocks <= min(slots, total, 65535)
    starts = host.starts(*shape)
    assert starts[0] == 0 and starts[-1] == total
    shares = np.diff(starts)
    assert shares.min() >= total // blocks and shares.max() <= -(-total // blocks)
    if blocks % n == 0:
        np.testing.assert_array_equal(starts[:: blocks // n], np.arange(n + 1) * passes)
    for b in {0, blocks - 1, *rng.integers(0, blocks, 20).tolist()}:
        segments = host.segments(shape, b, 1000)
        image, first, count = segments.T
        assert (count >= 1).all() and (count <= MOST).all() and (first + count <= passes).all()
        at = image * passes + first
        assert at[0] == starts[b]
        np.testing.assert_array_equal(at[1:], (at + count)[:-1])
        assert len(segments) == 1000 or (at + count)[-1] == starts[b + 1]


def slowest(n, passes, blocks):
    """Of a plan, by counting: passes of the slowest thread block, its images' statistics included."""
    starts = np.arange(blocks + 1) * (n * passes) // blocks
    images = (starts[1:] - 1) // passes - starts[:-1] // passes + 1
    return (np.diff(starts) + START * images).max()


@pytest.mark.parametrize("n", [1, 2, 7, 32, 64, 100, 132, 200, 256, 263, 265, 396, 527, 528, 529, 1024])
@pytest.mark.parametrize("pixels, vectors", [(1024, 8), (1024, 16), (256, 16), (256, 32), (1024, 24)])
def test_few_images_are_not_slower_than_by_whole_chunks_of_them(host, n, pixels, vectors):
    """A plan is about as good as the best of those that give each image the same number of thread blocks."""
    passes, blocks, _, _ = host.plan(n, pixels, vectors, 528)
    whole = [slowest(n, passes, n * k) for k in range(1, passes + 1) if n * k <= 528]
    best = min(whole, default=slowest(n, passes, 528))
    assert slowest(n, passes, blocks) <= best
