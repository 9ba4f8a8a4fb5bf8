"""A function of the GPU captured once as a CUDA graph, and replayed: one launch in place of hundreds.

    graph = Graph(like=x)
    graph.capture(lambda stream: step(x, stream))  # runs it once, then captures it
    graph.replay(stream)                           # again, on what lies in x's memory by then

With CuPy. Another framework's function is called at every replay, so that what is written for a graph runs
anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from ... import device
from ...errors import CudaError
from .placement import Placement, Span, Trace


class Graph:
    """A captured function; `like` is any array of the GPU that it works on.

    The graph's memory comes from a pool of its own, in which what the function frees is used again by what it
    makes later, and by nobody else. It goes back when the graph and all arrays of `result` are dropped. A
    graph is replayed by one stream at a time. A warm-up shows when each array lives, so that the capture lays
    those that it frees in one block little larger than what lives at once.
    """

    def __init__(self, like: Any):
        self._work: _Eager | _Captured | None = None
        self._like = device.operand(like, "like")

    def __del__(self):
        self.release()

    def capture(self, function: Callable[[int], Any], warmups: int = 1) -> Any:
        """Call ``function(stream)`` `warmups` times, which do what they do, then capture one more call, which
        does nothing yet. Returns what that call returned: arrays that each replay writes.

        The function must not wait for the device, read from it, or leave work on other streams. It begins
        after what the current stream holds. The warm-up is waited for.

        Raises:
            CudaError: the function did something that cannot be captured. What the function raises itself
            comes through. Either way the graph is as if capture had not been called.
        """
        self.release()
        kind = _Captured if self._like.framework == "cupy" else _Eager
        work = kind(self._like, function)
        for _ in range(warmups):
            work.warm_up()
        work.capture()
        self._work = work
        return work.result

    def replay(self, stream: int = 0) -> Any:
        """Launch on `stream` (a handle). Returns what the captured call returned."""
        if self._work is None:
            raise ValueError("replay: nothing is captured; call capture(function) first")
        with device.ordered("replay", stream, (self._like,)) as handle:
            return self._work.replay(handle)

    @property
    def captured(self) -> bool:
        """Whether there is something to replay."""
        return self._work is not None

    @property
    def memory(self) -> int:
        """Bytes of the graph's pool; 0 where the function is called instead."""
        return 0 if self._work is None else self._work.memory()

    def release(self) -> None:
        """Drop the graph and its pool; those who still use arrays of the result keep their memory alone."""
        work, self._work = self._work, None
        if work is not None:
            work.close()


class _Eager:
    """In place of a graph: the function itself."""

    def __init__(self, like: device.DeviceArray, function: Callable[[int], Any]):
        self._like, self._function, self.result = like, function, None

    def warm_up(self) -> None:
        with device.ordered("capture", None, (self._like,)) as handle:
            self.result = self._function(handle)

    def capture(self) -> None:
        """Nothing: the result is that of the last call."""

    def replay(self, stream: int) -> Any:
        self.result = self._function(stream)
        return self.result

    def close(self) -> None:
        self.result = None

    @staticmethod
    def memory() -> int:
        return 0


def _of_capture(error: BaseException, runtime: Any) -> bool:
    """Whether `error` says that a call is refused under capture: CUDA's own, or what CuPy raises before it
    asks CUDA ("the current stream is capturing, so D2H transfers are disallowed").
    """
    if isinstance(error, runtime.CUDARuntimeError):
        return True
    if isinstance(error, CudaError) or not isinstance(error, RuntimeError):
        return False
    return re.search("stream (is|was) capturing|stream capture", str(error)) is not None


def _refused(error: BaseException) -> CudaError:
    return CudaError(f"capture: the function cannot be captured ({error}); it must neither wait for the "
                     f"device nor read from it, and it must join every stream that it uses")  # fmt: skip


class _Growth:
    """What a graph's pool is made of. When a capture finds the device full, CuPy's pool would give back, and
    then use again, what the part captured so far goes on using: it is told by an error that it lets through.
    """

    def __init__(self, cuda: Any):
        self._cuda, self.capturing = cuda, False

    def __call__(self, size: int) -> Any:
        try:
            return self._cuda.MemoryPointer(self._cuda.Memory(size), 0)
        except self._cuda.runtime.CUDARuntimeError as error:
            if not self.capturing:
                raise
            raise CudaError(f"capture: the device has no {size} bytes left for the graph's pool ({error}); "
                            f"free memory, or capture with a warm-up") from None  # fmt: skip


class _Pool:
    """A pool of CuPy that its arrays keep, and that gives its blocks back when nobody has it any more.

    CuPy's arrays know their pool weakly, and the free blocks of one that is dropped are lost for good (14.2:
    a free block and the list that it stands in hold each other, by a count that the collector does not see).

    What a warm-up takes on `stream` is traced; after `lay_out` it is taken from one block of the pool, where
    the trace leaves room for it.
    """

    def __init__(self, cuda: Any, place: int, stream: int):
        self._cuda, self._place, self._stream, self.growth = cuda, place, stream, _Growth(cuda)
        self._blocks = cuda.MemoryPool(self.growth)
        self._book: Trace | Placement | None = None
        self._block: Any = None

    def malloc(self, size: int) -> Any:
        # CuPy gives other streams memory of their own: what one frees, another may still be reading.
        book = self._book if size and self._cuda.get_current_stream().ptr == self._stream else None
        span = None if book is None else book.take(size)
        if self._block is None or span is None:
            block = self._traced(size) if isinstance(book, Trace) else self._blocks.malloc(size)
            address = block.ptr
        else:
            block, address = self._block, self._block.ptr + span.offset
        lent = _Lent(self, block, book, span)
        return self._cuda.MemoryPointer(self._cuda.UnownedMemory(address, size, lent, self._place), 0)

    def _traced(self, size: int) -> Any:
        """Memory of a warm-up: from the device and back to it, array by array; a pool would hold more."""
        try:
            return self.growth(size)
        except self._cuda.runtime.CUDARuntimeError:
            return self._blocks.malloc(size)  # which says how much it has not found

    def trace(self) -> Trace:
        """From here on, what is taken is written down."""
        self._book = made = Trace()
        return made

    def lay_out(self) -> None:
        """What was traced gets its places; the free blocks go to the device before theirs is taken."""
        if not isinstance(self._book, Trace):
            return
        self._book = placement = Placement(self._book)
        self.give_back()
        try:
            self._block = self._blocks.malloc(placement.size) if placement.size else None
        except MemoryError:  # of CuPy: what stays in the pool leaves no room for one block
            self._block = None
        if self._block is None:
            self._book = None

    def close(self) -> None:
        """The block goes back with the last array that lies in it, free blocks at once."""
        self._book = self._block = None
        self.give_back()

    def give_back(self) -> None:
        """Free blocks go to the device."""
        self._blocks.free_all_blocks()

    def total_bytes(self) -> int:
        return self._blocks.total_bytes()

    def __del__(self):
        if hasattr(self, "_block"):
            self.close()


class _Lent:
    """What an array holds of a pool: its block, which goes back before the pool may go, and what is written
    down of it.
    """

    __slots__ = ("_pool", "_block", "_book", "_span")

    def __init__(self, pool: _Pool, block: Any, book: Trace | Placement | None, span: Span | None):
        self._pool, self._block, self._book, self._span = pool, block, book, span

    def __del__(self):
        if self._span is not None:
            self._book.free(self._span)
        self._block = None


class _Captured:
    """A graph of CuPy, its pool and the stream that it was captured on. The function is kept, for it holds
    the arrays that the graph reads.
    """

    def __init__(self, like: device.DeviceArray, function: Callable[[int], Any]):
        self._framework = framework = device._FRAMEWORKS["cupy"]
        self._cuda, self._place, self._function = framework.cupy.cuda, like.device, function
        self._graph, self.result = None, None
        with self._cuda.Device(self._place):
            self._stream = self._cuda.Stream(non_blocking=True)
            self._pool = _Pool(self._cuda, self._place, self._stream.ptr)

    @contextmanager
    def _inside(self):
        """The graph's device, stream and pool are the current ones; the stream waits for the caller's."""
        with self._cuda.Device(self._place):
            before = self._cuda.get_current_stream().record()
            self._stream.wait_event(before)
            with self._stream, self._cuda.using_allocator(self._pool.malloc):
                yield self._stream.ptr

    def warm_up(self) -> None:
        with self._inside() as handle:
            trace = self._pool.trace()
            result = self._function(handle)
            trace.returned()
            del result
            self._stream.synchronize()

    def capture(self) -> None:
        with self._inside() as handle:
            self._pool.lay_out()
            self._framework.pooled.add(handle)
            self._pool.growth.capturing = True
            try:
                self._stream.begin_capture(self._cuda.runtime.streamCaptureModeRelaxed)
                try:
                    self.result = self._function(handle)
                except BaseException as error:
                    self._abandon(error)
                    raise
                self._graph = self._end()
            finally:
                self._pool.growth.capturing = False
                self._framework.pooled.discard(handle)

    def _end(self) -> Any:
        try:
            return self._stream.end_capture()
        except self._cuda.runtime.CUDARuntimeError as error:
            self.result = None
            raise _refused(error) from error

    def _abandon(self, error: BaseException) -> None:
        """End the capture that `error` broke off. A refused call of CUDA spoils it, and ending it then gives
        an error once more, which must not be left for the next call.
        """
        self.result = None
        try:
            self._stream.end_capture()
        except self._cuda.runtime.CUDARuntimeError:
            pass
        if _of_capture(error, self._cuda.runtime):
            raise _refused(error) from error

    def close(self) -> None:
        self._graph = self.result = self._function = None
        self._pool.close()

    def replay(self, stream: int) -> Any:
        self._graph.launch(self._cuda.get_current_stream())
        return self.result

    def memory(self) -> int:
        with self._cuda.Device(self._place):
            return self._pool.total_bytes()
