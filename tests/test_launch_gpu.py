"""Kernels that overlap (src/cuda/launch.cuh) on a GPU: what they make is what they make one by one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fp4bf16.backends import cuda
from fp4bf16.nn.cuda.graph import Graph

pytestmark = pytest.mark.gpu
HERE = Path(__file__).resolve().parent
FLOAT32, BFLOAT16 = 0, 1  # fp4bf16_dtype
#: Of the buffer that is written: 32 MiB, some tens of microseconds, beside readers of a few.
ROWS, COLUMNS = 4096, 4096
TURNS, REPLAYS = 6, 200


class Chain:
    """A buffer that long kernels overwrite in turn, and short ones that read what lies in it between: what is
    read too early is of the turn before, what is written too early of the turn after.

    The sources are multiples of 2^-7 under 2, which BF16 holds.
    """

    def __init__(self, cupy, library, rng):
        self.cupy, self.loaded = cupy, library
        self.sources = [cupy.asarray(rng.integers(1, 256, (ROWS, COLUMNS)).astype(np.float32) / 128)
                        for _ in range(2)]  # fmt: skip
        self.buffer = cupy.zeros((ROWS, COLUMNS), np.uint16)
        self.results = [cupy.zeros((64, 64), np.float32) for _ in range(TURNS)]
        self.squares = cupy.zeros((TURNS, 1), np.float64)
        self.room = cupy.zeros(4096, np.float64)

    def write(self, turn, stream):
        """Rows as they are, or turned: kernels of different ends."""
        x = self.sources[turn % 2]
        strides = (COLUMNS, 1) if turn % 4 < 2 else (1, COLUMNS)
        self.loaded.call("convert", x.data.ptr, FLOAT32, 1, ROWS, COLUMNS, 0, *strides, self.buffer.data.ptr,
                          BFLOAT16, COLUMNS, stream)  # fmt: skip

    def read(self, turn, stream):
        """64 x 64 numbers from all over the buffer, the last one included."""
        last = self.buffer.data.ptr + 2 * (63 * COLUMNS + 63)  # every 64th row and column
        self.loaded.call("convert", last, BFLOAT16, 1, 64, 64, 0, 64 * COLUMNS, 64,
                          self.results[turn].data.ptr, FLOAT32, 64, stream)  # fmt: skip

    def add(self, turn, stream):
        """The sum of the result's squares: two kernels, the second of which reads what the first wrote."""
        self.loaded.call("sum_of_squares", self.results[turn].data.ptr, 64 * 64,
                          self.squares[turn].data.ptr, self.room.data.ptr, stream)  # fmt: skip

    def wanted(self, turn):
        x = self.cupy.asnumpy(self.sources[turn % 2])
        return (x if turn % 4 < 2 else x.T)[63::64, 63::64]

    def check(self, what):
        self.cupy.cuda.Device().synchronize()
        for turn in range(TURNS):
            want = self.wanted(turn)
            np.testing.assert_array_equal(self.cupy.asnumpy(self.results[turn]), want, f"{what}, turn {turn}")
            assert float(self.squares[turn, 0]) == np.square(want, dtype=np.float64).sum(), what
            self.results[turn].fill(-1)
        self.squares.fill(-1)

    def ours(self, stream):
        for turn in range(TURNS):
            self.write(turn, stream)
            self.read(turn, stream)
            self.add(turn, stream)

    def between(self, stream):
        """Memsets and another library's kernels, which neither wait nor let others start."""
        for turn in range(TURNS):
            self.write(turn, stream)
            self.read(turn, stream)
            self.buffer.data.memset_async(0xA5, self.buffer.nbytes)
            self.write(turn, stream)
            self.buffer += np.uint16(1)
            self.buffer -= np.uint16(1)
            self.read(turn, stream)
            self.results[turn] *= np.float32(1)
            self.add(turn, stream)


@pytest.mark.parametrize("work", ["ours", "between"])
def test_chains_of_kernels_in_a_graph(work, cupy, library, rng):
    chain = Chain(cupy, library, rng)
    graph = Graph(chain.buffer)
    graph.capture(getattr(chain, work))
    for _ in range(4):
        for _ in range(REPLAYS // 4):
            graph.replay()
        chain.check("graph")


@pytest.mark.parametrize("work", ["ours", "between"])
@pytest.mark.parametrize("kind", ["legacy", "own"])
def test_chains_of_kernels_on_a_stream(work, kind, cupy, library, rng):
    chain = Chain(cupy, library, rng)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True) if kind == "own" else cupy.cuda.Stream.null
    for _ in range(4):
        with stream:
            for _ in range(REPLAYS // 40):
                getattr(chain, work)(stream.ptr)
        chain.check(kind)


def test_kernels_alone_overlap(cupy, library, rng):
    """In a captured graph: the edge between two of our kernels is programmatic, those of a memset are not."""
    runtime = pytest.importorskip("cuda.bindings.runtime")
    if float(cuda.devices()[0].compute_capability) < 9 or os.environ.get("FP4BF16_PDL") == "0":
        pytest.skip("kernels do not overlap here")

    def checked(result):
        assert int(result[0]) == 0, result[0]
        return result[1:]

    chain = Chain(cupy, library, rng)
    chain.ours(0)
    cupy.cuda.Device().synchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    checked(runtime.cudaStreamBeginCapture(stream.ptr, runtime.cudaStreamCaptureMode(2)))
    chain.write(0, stream.ptr)
    chain.read(0, stream.ptr)
    checked(runtime.cudaMemsetAsync(chain.buffer.data.ptr, 0, chain.buffer.nbytes, stream.ptr))
    chain.write(1, stream.ptr)
    (graph,) = checked(runtime.cudaStreamEndCapture(stream.ptr))
    edges = getattr(runtime, "cudaGraphGetEdges_v2", runtime.cudaGraphGetEdges)
    count = checked(edges(graph))[-1]
    kinds = [(int(e.from_port), int(e.type)) for e in checked(edges(graph, count))[2][:count]]
    runtime.cudaGraphDestroy(graph)
    assert sorted(kinds) == [(0, 0), (0, 0), (1, 1)]


def test_a_network_makes_the_same_bits(cupy):
    """Forward, gradients and 20 replayed training steps, in two processes."""
    found = []
    for value in ("1", "0"):
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        run = subprocess.run([sys.executable, str(HERE / "launch_steps.py")], capture_output=True, text=True,
                             env=os.environ | {"FP4BF16_PDL": value, "PYTHONPATH": path})  # fmt: skip
        assert run.returncode == 0, run.stderr[-2000:]
        found.append(json.loads(run.stdout.splitlines()[-1]))
    assert found[0] == found[1]
    assert len({value for of_route in found[0].values() for value in of_route.values()}) == 8
