"""One thread pool at a time.

OpenBLAS keeps its idle threads spinning for a while after a product; a second pool that starts in that time
shares the cores with them (a factor 6 was seen on two cores). So the package has one small pool of its own:
every kernel and every BLAS call runs on row chunks inside it, with BLAS held to one thread meanwhile.
"""

from __future__ import annotations

import ctypes
import math
import os
import threading
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

import numpy as np

from ..errors import ConfigError

_local = threading.local()  # .inside is True while this thread works on a chunk: nested calls run inline
_buffers = threading.local()  # of `scratch`, by name
_lock = threading.RLock()  # one caller uses the pool at a time
_queue: SimpleQueue | None = None
_workers: list[threading.Thread] = []
_pid = 0
_threads: int | None = None


def _available() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def num_threads() -> int:
    """Threads that a CPU kernel uses: `set_num_threads`, else ``FP4BF16_NUM_THREADS``, else usable cores."""
    global _threads
    if _threads is None:
        text = os.environ.get("FP4BF16_NUM_THREADS", "")
        if text and not (text.isdecimal() and int(text) > 0):
            raise ConfigError(
                f"FP4BF16_NUM_THREADS: {text!r} is not a positive whole number; unset it or give e.g. 2"
            )
        _threads = int(text) if text else _available()
    return _threads


def set_num_threads(n: int) -> None:
    """Use `n` threads (>= 1) from the next call on."""
    global _threads
    if int(n) < 1:
        raise ValueError(f"set_num_threads: n is {n}, but at least 1 thread is needed")
    _threads = int(n)


class _Blas:
    """OpenBLAS's thread-count functions, found in the library that NumPy has loaded."""

    def __init__(self, library: ctypes.CDLL, suffix: str, prefix: str):
        self.get = getattr(library, f"{prefix}openblas_get_num_threads{suffix}")
        self.set = getattr(library, f"{prefix}openblas_set_num_threads{suffix}")
        self.get.restype, self.set.argtypes = ctypes.c_int, [ctypes.c_int]


@cache
def _blas() -> _Blas | None:
    import numpy  # noqa: F401  (its BLAS must be mapped before we look for it)

    try:
        with open("/proc/self/maps") as f:
            paths = {line.split(maxsplit=5)[5].strip() for line in f if "openblas" in line}
    except (OSError, IndexError):
        return None
    for path in sorted(paths):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        for prefix in ("scipy_", ""):
            for suffix in ("64_", ""):
                try:
                    return _Blas(library, suffix, prefix)
                except AttributeError:
                    continue
    return None


def blas_name() -> str:
    """Whether BLAS threads can be held, for ``fp4bf16 info``."""
    held = "OpenBLAS (threads held to one inside a kernel)"
    return held if _blas() else "unknown BLAS (threads left alone)"


class blas_limit:
    """Context manager: hold BLAS to `n` threads inside the block; without OpenBLAS this does nothing."""

    __slots__ = ("before", "n")

    def __init__(self, n: int = 1):
        self.n = n

    def __enter__(self) -> None:
        blas = _blas()
        self.before = blas.get() if blas else self.n
        if self.before != self.n:
            blas.set(self.n)

    def __exit__(self, *error) -> None:
        if self.before != self.n:
            _blas().set(self.before)


class _Group:
    """Chunks still running for one call, and the first error among them."""

    __slots__ = ("done", "error", "lock", "pending")

    def __init__(self, pending: int):
        self.pending, self.error = pending, None
        self.lock, self.done = threading.Lock(), threading.Lock()
        self.done.acquire()  # the last chunk to end releases it: an Event costs three times as much

    def run(self, fn, start, stop):
        _local.inside = True
        try:
            fn(start, stop)
        except BaseException as error:  # handed to the caller's thread
            self.error = self.error or error
        finally:
            _local.inside = False
            with self.lock:
                self.pending -= 1
                last = self.pending == 0
            if last:
                self.done.release()


def _work(queue: SimpleQueue) -> None:
    while True:
        group, fn, start, stop = queue.get()
        group.run(fn, start, stop)
        del group, fn  # while this thread waits, nothing that the call made may live on in it


def _pool(n: int) -> SimpleQueue:
    """The queue that at least `n` workers serve; made anew in a forked child, whose threads are gone."""
    global _queue, _pid
    if _queue is None or _pid != os.getpid():
        _queue, _pid = SimpleQueue(), os.getpid()
        _workers.clear()
    while len(_workers) < n:
        worker = threading.Thread(target=_work, args=(_queue,), name="fp4bf16", daemon=True)
        worker.start()
        _workers.append(worker)
    return _queue


def _after_fork() -> None:
    """In a forked child only the forking thread lives on: whoever held the lock or ran the pool is gone."""
    global _lock, _queue
    _lock, _queue = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def parallel_chunks(n: int, fn: Callable[[int, int], None], min_rows: int = 1) -> None:
    """Call ``fn(start, stop)`` on contiguous chunks that cover ``range(n)``, one chunk a thread.

    The chunks depend on `n`, `min_rows` (the smallest chunk worth a thread) and the thread count alone, so
    results repeat. `fn` must release the GIL where it matters. Calls from inside a chunk run inline. An
    exception of any chunk is raised here after all of them have ended.

    >>> seen = []
    >>> parallel_chunks(10, lambda start, stop: seen.append((start, stop)), min_rows=100)
    >>> seen
    [(0, 10)]
    """
    if n <= 0:
        return
    parts = max(1, min(num_threads(), n // max(1, min_rows)))
    if getattr(_local, "inside", False):
        fn(0, n)
        return
    with _lock, blas_limit(1):
        if parts == 1:
            fn(0, n)
            return
        edges = [n * i // parts for i in range(parts + 1)]
        queue, group = _pool(parts - 1), _Group(parts)
        for i in range(1, parts):
            queue.put((group, fn, edges[i], edges[i + 1]))
        group.run(fn, 0, edges[1])
        group.done.acquire()
        if group.error is not None:
            raise group.error


def run_inline(fn: Callable[[], None]) -> None:
    """Call ``fn()`` on this thread with BLAS held to one; `parallel_chunks` inside it runs inline.

    For work too small to share: it takes the locks and BLAS's thread count once, not for every step.
    """
    if getattr(_local, "inside", False):
        fn()
        return
    with _lock, blas_limit(1):
        _local.inside = True
        try:
            fn()
        finally:
            _local.inside = False


def scratch(name: str, shape: tuple[int, ...], dtype, most: int | None = None) -> np.ndarray:
    """This thread's buffer called `name`, grown when needed and kept: fresh pages cost as much as a copy.

    Its content is whatever was left in it. More than `most` bytes are new memory, freed after use.

    >>> scratch("doc", (2, 3), np.float32).shape
    (2, 3)
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if most is not None and size > most:
        return np.empty(shape, dtype)
    buffer = _buffers.__dict__.get(name)
    if buffer is None or buffer.nbytes < size:
        buffer = _buffers.__dict__[name] = np.empty(size, np.uint8)
    return buffer[:size].view(dtype).reshape(shape)
