"""What the user sees while a run goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import shutil
import sys
import time
from typing import Any

from ..backends.compiled import FIRST_RUN, kernels_cached
from ..extras import optional


class Progress:
    """Bar of one stage at a time. On a terminal with tqdm it moves; in a log it is a line every few
    seconds.
    """

    def __init__(self, stream=None, every: float = 10.0):
        self.stream = stream or sys.stderr
        self.every = every
        tqdm = optional("tqdm") if getattr(self.stream, "isatty", lambda: False)() else None
        self._tqdm = tqdm.tqdm if tqdm else None
        self._bar: Any = None
        self._name, self._total, self._done, self._said = "", 0, 0, 0.0

    def say(self, text: str) -> None:
        """One line for the user, above the bar where there is one."""
        try:
            if self._bar is not None:
                self._bar.write(text, file=self.stream)
            else:
                print(text, file=self.stream, flush=True)
        except OSError:  # whoever read this went away, or the log's disk is full: the run goes on unseen
            self.stream, self._tqdm, self._bar = io.StringIO(), None, None

    def stage(self, name: str, total: int, done: int = 0, note: str = "") -> None:
        """Begin the stage `name` of `total` steps, `done` of which are behind us."""
        self.end()
        self._name, self._total, self._done, self._said = name, total, done, time.monotonic()
        if self._tqdm is not None:
            # Without tqdm's own rate, so that in 80 columns a bar is left beside the values.
            layout = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
            self._bar = self._tqdm(total=total, initial=done, desc=f"{name:<8}", file=self.stream, leave=True,
                                   dynamic_ncols=True, mininterval=0.2, bar_format=layout)  # fmt: skip
        if note or self._bar is None:
            self.say(
                f"{name}: {note}" if note else f"{name}: {total} steps" + (f", from {done}" if done else "")
            )

    def step(self, n: int = 1, **values: float | str) -> None:
        """`n` more steps are done; `values` are shown beside the bar."""
        self._done += n
        if self._bar is not None:
            parts = [f"{k} {_short(v, 3)}" for k, v in values.items()]
            room = shutil.get_terminal_size().columns - 42  # what the other fields take, and a bar to see
            while len(parts) > 1 and len(" ".join(parts)) > room:
                parts.pop()
            self._bar.set_postfix_str(" ".join(parts), refresh=False)
            self._bar.update(n)
            return
        now = time.monotonic()
        if now - self._said >= self.every or self._done == self._total:
            self._said = now
            shown = ", ".join(f"{k} {_short(v)}" for k, v in values.items())
            self.say(f"{self._name}: {self._done}/{self._total}  {shown}".rstrip())

    def end(self) -> None:
        """Close the bar of the stage."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _short(value: float | str, digits: int = 4) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}g}"


def announce_compilation(say) -> None:
    """Say that the first run compiles, where no compiled kernel is cached yet."""
    if not kernels_cached():
        say(FIRST_RUN)
