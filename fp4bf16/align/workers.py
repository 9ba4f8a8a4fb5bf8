"""Processes that draw chunks of a pool: the pictures are the same with any number of them, and with none.

Each worker is a fresh interpreter (spawn) with a pipe of its own, builds its own draw function, and is given
one chunk at a time. Nothing is shared but the file of the weights, so that a worker may be killed at any
moment: its chunk goes to another. Results come back in the order of the chunks, whoever made them.

The cores are shared: a worker runs ``cores // count`` threads, and BLAS as many. The kernels' results do not
depend on the number of threads: products are cut into panels of rows, and a row's sum runs in the same order
in any panel, as far as the BLAS at hand keeps to that. NumPy's OpenBLAS does: 1 to 32 threads gave the same
bits for the networks of all presets, in batches of 1 to 100, on both tracks; tests hold it.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from ..backends.threads import blas_limit, num_threads, set_num_threads
from ..errors import ConfigError
from .pool import Draw, Job

#: Builds a worker's draw function, and the function that takes up new weights by name. It is pickled, so it
#: must be a function or an instance of a class at the top of a module.
MakeDraw = Callable[[], tuple[Draw, Callable[[Mapping[str, np.ndarray]], None]]]

_WEIGHTS = ".explorer-weights.npz"
_TRIES = 2  # workers that may fail at one chunk before it is drawn in the main process
_START = 600.0  # seconds for a worker to begin
_GONE = (EOFError, OSError)  # of a pipe whose other end is closed


# ----------------------------------------------------------------------------------- in the worker's process


def _end_with_parent() -> None:
    """A worker must not outlive the run, however that ended: not even for the rest of a chunk."""
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _serve(pipe: Any, make_draw: MakeDraw, threads: int) -> None:
    """Draw what comes through `pipe`, until it says None. A failure is answered, and ends the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends this one
    threading.Thread(target=_end_with_parent, daemon=True).start()
    set_num_threads(threads)
    version = 0
    with blas_limit(threads), contextlib.suppress(*_GONE):
        try:
            draw, load = make_draw()
            pipe.send(None)
            while (message := pipe.recv()) is not None:
                newest, path, job = message
                if newest != version:
                    with np.load(path, allow_pickle=False) as file:
                        load(dict(file))
                    version = newest
                pipe.send((np.ascontiguousarray(draw(*job)), None))
        except Exception as error:  # whatever it is: the main process tells of it
            pipe.send((None, f"{type(error).__name__}: {error}"))


# ------------------------------------------------------------------------------------- in the main process


class _Worker:
    """One process, and the number of the chunk that it draws."""

    def __init__(self, make_draw: MakeDraw, threads: int):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, make_draw, threads), name="fp4bf16-explorer", daemon=True
        )
        self.number: int | None = None
        self.ready = False  # its draw function is built
        self.until = time.monotonic() + _START  # when it must have answered
        try:
            with _without_interrupts():
                self.process.start()
        except BaseException:  # Ctrl-C as soon as it was started, among them
            if self.process.pid is not None:
                self.end()
            self.pipe.close()
            raise
        finally:
            theirs.close()

    @property
    def busy(self) -> bool:
        """Whether an answer of it is due: that it has begun, or its chunk."""
        return not self.ready or self.number is not None

    def end(self, at_once: bool = True) -> str:
        """Stop the process and wait for its end: how it ended, in words."""
        if at_once:
            self.process.terminate()
        self.process.join(5.0)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        self.process.close()
        self.pipe.close()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code}"


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started inside never sees Ctrl-C; one that comes meanwhile is seen here, after."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # it unblocks the signals that it blocks: not in the middle of this
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Round:
    """The chunks of one call: which are to be drawn, which are done but not yet given out."""

    jobs: Iterator[Job]
    window: int  # chunks that may be under way or wait for one before them: what bounds the memory
    position: int = 0  # of the next one to be given out
    begun: int = 0
    open: dict[int, Job] = field(default_factory=dict)  # all that are not done
    waiting: deque[int] = field(default_factory=deque)  # those of them that nobody draws
    done: dict[int, np.ndarray] = field(default_factory=dict)
    failures: Counter[int] = field(default_factory=Counter)

    def fill(self) -> bool:
        """Take as many jobs as the window holds; whether anything is left to do or to give out."""
        while self.begun < self.position + self.window:
            job = next(self.jobs, None)
            if job is None:
                break
            self.open[self.begun] = job
            self.waiting.append(self.begun)
            self.begun += 1
        return bool(self.open or self.done)

    def take(self, worker: bool, alone: bool = False) -> int | None:
        """Number of the next chunk for a worker, or for the main process: one that failed too often, and
        where it is `alone` any.
        """
        for number in self.waiting:
            if alone or worker == (self.failures[number] < _TRIES):
                self.waiting.remove(number)
                return number
        return None

    def put(self, number: int, pictures: np.ndarray) -> None:
        self.done[number] = pictures
        del self.open[number]

    def failed(self, number: int) -> None:
        self.failures[number] += 1
        self.waiting.appendleft(number)


class Explorer:
    """`count` processes that draw the chunks of a pool, for ``rollout(..., explorer=...)``.

    make_draw: called in each worker, gives (draw, load): its draw function, and what takes up the weights
    by name that `refresh` is given (`MakeDraw`). threads: of a worker, by default the cores that there are
    divided by `count`. seconds: for a chunk; a worker that has not answered by then hangs, and is ended as if
    it had died. replacements: how many workers that died, raised or hung are replaced, in all; when none is
    left, the main process draws the rest, as it does a chunk that two workers failed at. say: is told in a
    sentence of each; by default a warning.
    folder: where the weights are laid for the workers, by default a temporary one; what a killed run leaves
    there is overwritten by the next.

    Use it as a context manager: at its end, and at Ctrl-C, no process is left. A script that makes one needs
    the usual ``if __name__ == "__main__":``, for the workers import it anew. Raises `ConfigError` where
    `count` is negative, `seconds` are not positive or `make_draw` cannot be pickled.

    >>> with Explorer(dict, 0) as explorer:  # no workers: everything is drawn here
    ...     draw = lambda seeds, prompts, steps, track: np.zeros((len(seeds), 1, 1, 3))
    ...     [p.shape for p in explorer.pictures([Job(np.arange(2), ["a", "b"], 4, "fp4")], draw)]
    [(2, 1, 1, 3)]
    """

    def __init__(
        self,
        make_draw: MakeDraw,
        count: int,
        *,
        threads: int | None = None,
        seconds: float = 600.0,
        replacements: int = 3,
        say: Callable[[str], None] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ):
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 0:
            raise ConfigError(f"workers: is {count!r}, but it must be a whole number; 0 explores without any")
        if not seconds > 0:
            raise ConfigError(
                f"workers: a chunk is given {seconds} seconds; give a positive number, or math.inf"
            )
        try:
            pickle.dumps(make_draw)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"Explorer: make_draw cannot be sent to a worker ({error}); give a function, or an instance "
                f"of a class, from the top of a module"
            ) from None
        self.make_draw, self.count = make_draw, int(count)
        self.threads = max(1, num_threads() // max(1, self.count)) if threads is None else int(threads)
        self.seconds = float(seconds)
        self.replacements, self._say = int(replacements), say or _warn
        self._folder, self._own = None if folder is None else Path(folder), None
        self._workers: list[_Worker] = []
        self._version, self._path, self._started = 0, "", 0

    # -------------------------------------------------------------------------------------------- life

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and wait for them; what they were drawing is dropped. May be called again."""
        for worker in self._workers:
            with contextlib.suppress(*_GONE, ValueError):
                worker.process.terminate()  # all at once, then wait
        while self._workers:
            self._workers.pop().end()
        if self._path:
            Path(self._path).unlink(missing_ok=True)
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
        self._own, self._path = None, ""

    @property
    def processes(self) -> list[int]:
        """Process numbers of the workers that are running."""
        return [w.process.pid for w in self._workers]

    def refresh(self, weights: Mapping[str, np.ndarray]) -> None:
        """Give all workers these weights (float arrays by name) before their next chunk.

        Call it whenever the model has changed: a worker knows nothing of the main process's.
        """
        if not self.count:
            return
        if self._folder is None:
            self._own = self._own or tempfile.mkdtemp(prefix="fp4bf16-")
        path = Path(self._own or self._folder) / _WEIGHTS
        try:
            part = path.with_suffix(".part.npz")
            np.savez(part, **weights)
            os.replace(part, path)
        except OSError as error:
            self._say(
                f"explorer: the weights cannot be laid out for workers ({error}); the main process explores"
            )
            self.close()
            self.count = 0
            return
        self._version, self._path = self._version + 1, str(path)

    # ----------------------------------------------------------------------------------------- drawing

    def pictures(self, jobs: Iterable[Job], draw: Draw) -> Iterator[np.ndarray]:
        """The pictures of every job, in their order. `draw` is the main process's own, for what is left to
        it: where there are no workers, where none is left, and where a chunk failed in two of them.
        """
        state = _Round(iter(jobs), 2 * self.count + 1)
        self._drop([w for w in self._workers if w.number is not None])  # of a call that was broken off
        try:
            while state.fill():
                self._start(state)
                self._give(state)
                if state.position in state.done:
                    pictures = state.done.pop(state.position)
                    state.position += 1
                    yield pictures
                    del pictures
                elif (number := state.take(worker=False, alone=not self._workers)) is not None:
                    state.put(number, draw(*state.open[number]))
                else:
                    self._receive(state)
        except BaseException:  # of the caller, Ctrl-C among them: nobody waits for what is under way
            self._drop([w for w in self._workers if w.number is not None])
            raise

    def _start(self, state: _Round) -> None:
        """Start the workers, no more than there are chunks for; later what replaces those that ended."""
        busy = sum(w.number is not None for w in self._workers)
        wanted = min(self.count, busy + len(state.waiting))
        while len(self._workers) < wanted and self._started < self.count + self.replacements:
            self._started += 1
            try:
                self._workers.append(_Worker(self.make_draw, self.threads))
            except OSError as error:
                self._started = self.count + self.replacements
                left = f"{len(self._workers)} workers go on" if self._workers else "the main process explores"
                self._say(f"explorer: a worker cannot be started ({error}); {left}")

    def _give(self, state: _Round) -> None:
        """A chunk for every worker that has none."""
        for worker in [w for w in self._workers if w.ready and w.number is None]:
            if (number := state.take(worker=True)) is None:
                return
            worker.number, worker.until = number, time.monotonic() + self.seconds
            try:
                worker.pipe.send((self._version, self._path, state.open[number]))
            except _GONE:
                self._lost(worker, state, None)

    def _receive(self, state: _Round) -> None:
        """Wait until a worker answers or ends, or has had its time."""
        waited = {w.pipe: w for w in self._workers} | {w.process.sentinel: w for w in self._workers}
        until = min((w.until for w in self._workers if w.busy), default=math.inf)
        seconds = min(max(0.0, until - time.monotonic()), 3600.0)  # no more than a system call takes
        answered = {id(w): w for w in map(waited.get, connection.wait(list(waited), seconds))}
        for worker in answered.values():
            try:
                if not worker.pipe.poll():  # it ended without a word
                    raise EOFError
                answer = worker.pipe.recv()
            except (*_GONE, pickle.UnpicklingError):
                self._lost(worker, state, None)
                continue
            if answer is None:
                worker.ready = True
            elif answer[1] is None:
                state.put(worker.number, answer[0])
                worker.number = None
            else:
                self._lost(worker, state, f"raised {answer[1]}")
        now = time.monotonic()  # an answer that is there, though late, is one: those were taken above
        for worker in [w for w in self._workers if w.busy and w.until <= now and id(w) not in answered]:
            given = self.seconds if worker.ready else _START
            self._lost(worker, state, f"did not answer within {given:g} s and was killed")

    def _lost(self, worker: _Worker, state: _Round, what: str | None) -> None:
        """A worker died (None), or did `what`: its chunk goes to another, and the user is told."""
        number, ready = worker.number, worker.ready
        self._workers.remove(worker)
        ended = worker.end(at_once=what is not None)
        where = f"at chunk {number}" if number is not None else "" if ready else "before its first chunk"
        if number is not None:
            state.failed(number)
        if self._started < self.count + self.replacements:
            then = "a new one takes its place"
        elif self._workers:
            then = f"{len(self._workers)} others do its work"
        else:
            then = "none is left, so the main process draws the rest"
        hint = "" if ready or what else _HINT
        self._say(f"explorer: a worker {what or ended} {where}".rstrip() + f"; nothing is lost: {then}{hint}")

    def _drop(self, workers: list[_Worker]) -> None:
        """End workers whose chunk nobody wants any more; others will be started, as if these had not been."""
        for worker in workers:
            self._workers.remove(worker)
            worker.end()
            self._started -= 1


_HINT = ' (a script that explores with workers needs `if __name__ == "__main__":` around its start)'


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
