"""The thread pool: chunks cover the range, errors reach the caller, nesting and forking do not hang."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from fp4bf16.backends import threads
from fp4bf16.backends.threads import blas_limit, num_threads, parallel_chunks, scratch, set_num_threads
from fp4bf16.errors import ConfigError


@pytest.fixture
def four():
    before = num_threads()
    set_num_threads(4)
    yield
    set_num_threads(before)


@pytest.mark.parametrize(
    "n, least, chunks", [(0, 1, 0), (1, 1, 1), (3, 1, 3), (10, 1, 4), (10, 4, 2), (10, 99, 1)]
)
def test_chunks_cover_the_range_once(four, n, least, chunks):
    seen = []
    parallel_chunks(n, lambda start, stop: seen.append((start, stop)), least)
    seen.sort()
    assert len(seen) == chunks
    assert [i for start, stop in seen for i in range(start, stop)] == list(range(n))


def test_chunks_run_on_threads_and_nested_calls_inline(four):
    meet, names, inner = threading.Barrier(4, timeout=20), set(), []

    def chunk(start, stop):
        meet.wait()  # all four at once, or the barrier breaks
        names.add(threading.get_ident())
        parallel_chunks(100, lambda i, j: inner.append((i, j)))

    parallel_chunks(4, chunk)
    assert len(names) == 4 and threading.get_ident() in names and inner == [(0, 100)] * 4


@pytest.mark.parametrize("where", [0, 3])
def test_an_error_reaches_the_caller_after_all_chunks_ended(four, where):
    ended = []

    def chunk(start, stop):
        if start == where:
            raise ArithmeticError(f"chunk {start}")
        ended.append(start)

    with pytest.raises(ArithmeticError, match=f"chunk {where}"):
        parallel_chunks(4, chunk)
    assert sorted(ended) == [i for i in range(4) if i != where]
    parallel_chunks(4, lambda start, stop: ended.append(start))  # the pool still works
    assert len(ended) == 7


def test_several_callers_take_turns(four):
    totals = [0] * 6

    def covered(n):
        parts = []
        parallel_chunks(n, lambda start, stop: parts.append(stop - start))
        return sum(parts)

    def caller(i):
        for _ in range(50):
            totals[i] += covered(40)

    callers = [threading.Thread(target=caller, args=(i,)) for i in range(6)]
    for t in callers:
        t.start()
    for t in callers:
        t.join(30)
    assert totals == [2000] * 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_pool_of_its_own():
    code = (
        "import os\n"
        "from fp4bf16.backends.threads import parallel_chunks, set_num_threads\n"
        "set_num_threads(3)\n"
        "total = lambda: (n := [], parallel_chunks(9, lambda i, j: n.append(j - i)), sum(n))[2]\n"
        "assert total() == 9\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    os._exit(total())\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), total())"
    )
    run = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["9", "9"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_another_thread_computes_does_not_wait_for_it():
    code = (
        "import os, threading\n"
        "from fp4bf16.backends.threads import parallel_chunks, set_num_threads\n"
        "set_num_threads(2)\n"
        "begun, end = threading.Event(), threading.Event()\n"
        "def chunk(i, j):\n"
        "    begun.set(), end.wait()\n"
        "busy = threading.Thread(target=parallel_chunks, args=(4, chunk))\n"
        "busy.start(), begun.wait()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    n = []\n"
        "    parallel_chunks(9, lambda i, j: n.append(j - i))\n"
        "    os._exit(sum(n))\n"
        "late = threading.Timer(20, os.kill, (pid, 9))\n"
        "late.start()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "late.cancel(), end.set()"
    )
    run = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["9"]


def test_blas_is_held_to_one_thread_inside(four):
    blas = threads._blas()
    if blas is None:
        pytest.skip("NumPy's BLAS is not OpenBLAS")
    before, inside = blas.get(), []
    parallel_chunks(4, lambda start, stop: inside.append(blas.get()))
    assert inside == [1] * 4 and blas.get() == before
    with pytest.raises(KeyError):
        with blas_limit(1):
            raise KeyError
    assert blas.get() == before


def test_the_number_of_threads(monkeypatch):
    monkeypatch.setattr(threads, "_threads", None)
    monkeypatch.setenv("FP4BF16_NUM_THREADS", "3")
    assert num_threads() == 3
    for text in ("0", "two", "-1", "1.5", "\u00b2"):
        monkeypatch.setattr(threads, "_threads", None)
        monkeypatch.setenv("FP4BF16_NUM_THREADS", text)
        with pytest.raises(ConfigError, match=f"NUM_THREADS: '{text}' is not a positive whole number"):
            num_threads()
    with pytest.raises(ValueError, match="n is 0, but at least 1"):
        set_num_threads(0)


def test_scratch_is_kept_a_thread(four):
    a = scratch("test", (4, 8), np.float32)
    assert np.shares_memory(a, scratch("test", (2, 3), np.float64))
    assert not np.shares_memory(a, scratch("other", (4, 8), np.float32))
    assert scratch("test", (50, 8), np.float32).shape == (50, 8)  # grown
    big = scratch("test", (100, 100), np.float32, most=1000)
    assert not np.shares_memory(big, scratch("test", (2,), np.uint8))
    others, meet = [], threading.Barrier(4, timeout=20)

    def chunk(start, stop):
        meet.wait()
        others.append(scratch("test", (4, 8), np.float32))

    parallel_chunks(4, chunk)
    assert not any(np.shares_memory(x, y) for i, x in enumerate(others) for y in others[:i])
