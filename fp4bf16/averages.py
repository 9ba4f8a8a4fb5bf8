"""Exponential moving averages without the bias of their beginning, of one number and of rows by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import ConfigError


class Average:
    """An exponential moving average without the bias of its beginning, as Adam's moments: each value counts
    `decay` times the next.

    decay: in [0, 1). total: the sum that is decayed; count: values so far.

    >>> a = Average(0.5)
    >>> a.update(4.0), a.update(1.0), a.count
    (4.0, 2.0, 2)
    """

    __slots__ = ("count", "decay", "total")

    def __init__(self, decay: float, total: float = 0.0, count: int = 0):
        self.decay, self.total, self.count = decay, total, count

    @classmethod
    def of(cls, decay: float, total: Any, count: Any) -> Average:
        """From a state, [total, count]. Raises `ValueError` for what is no average.

        States of earlier versions, [total, 1 - decay^count as a float], are taken too.

        >>> Average.of(0.5, 3.0, 0.75).count
        2
        """
        if isinstance(count, float) and 0 <= count <= 1:
            count = _counted(decay, count)
        whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
        if not (math.isfinite(float(total)) and whole and count >= 0):
            raise ValueError(f"{[total, count]!r} is no sum and its count; pass what state() gave")
        return cls(decay, float(total), int(count))

    def update(self, value: float) -> float:
        """Add one value; returns the average."""
        self.total = self.decay * self.total + (1.0 - self.decay) * value
        self.count += 1
        return self.value

    @property
    def value(self) -> float | None:
        """The average, None before the first value."""
        return self.total / (1.0 - self.decay**self.count) if self.count else None

    def state(self) -> list[float]:
        """[total, count] for a checkpoint; `of` takes them back to the bit."""
        return [self.total, self.count]


def _counted(decay: float, weight: float) -> int | float:
    """The count whose 1 - decay^count is `weight`, within rounding; `weight` itself where there is none."""
    if decay == 0 or weight in (0, 1):
        count = 0 if weight == 0 else 1 << 40  # so many that nothing of the beginning is left
    else:
        count = round(math.log1p(-weight) / math.log(decay))
    # the sum that made the weight was off by 2^-53 / (1 - decay) at most
    return count if abs(1 - decay**count - weight) * (1 - decay) <= 2.0**-50 else weight


class Averages:
    """Moving averages of `columns` numbers a name, each from its first row on.

    Rows with a number that is not finite are left out and counted in `skipped`: one of them would stay in the
    average for ever. where: whose they are, for errors.
    """

    def __init__(self, where: str, decay: float, columns: int):
        if not 0 <= decay < 1:
            raise ConfigError(f"{where}: decay is {decay}, but must be from 0 to below 1; 0.9 is a usual one")
        self.where, self.decay, self.columns = where, decay, columns
        self.skipped: dict[str, int] = {}
        self._rows: dict[str, list[Average]] = {}

    def __iter__(self) -> Iterator[str]:
        """The names, in the order in which they were first seen."""
        return iter(self._rows)

    def add(self, name: str, row: Sequence[float]) -> bool:
        """Add one row; False where it was left out."""
        if not all(math.isfinite(v) for v in row):
            self.skipped[name] = self.skipped.get(name, 0) + 1
            return False
        held = self._rows.setdefault(name, [Average(self.decay) for _ in range(self.columns)])
        for average, value in zip(held, row, strict=True):
            average.update(value)
        return True

    def means(self, name: str) -> list[float]:
        """The averages of a name; `KeyError` before its first row."""
        if name not in self._rows:
            raise KeyError(
                f"{self.where}: nothing is known of {name!r} yet; its gradient has to be given to update()"
            )
        return [average.value for average in self._rows[name]]

    def state(self) -> dict[str, Any]:
        """For a checkpoint, JSON-able: of each name the totals and, last, their common count."""
        sums = {name: [*(a.total for a in row), row[0].count] for name, row in self._rows.items()}
        return {"sums": sums, "skipped": dict(self.skipped)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` gave. Raises `ConfigError` for rows of another length."""
        rows = {}
        for name, numbers in state["sums"].items():
            if len(numbers) != self.columns + 1:
                raise ConfigError(
                    f"{self.where}: the state of {name!r} has {len(numbers)} numbers instead of "
                    f"{self.columns + 1}; restore what state() of this class gave"
                )
            *totals, count = numbers
            rows[str(name)] = [Average.of(self.decay, total, count) for total in totals]
        self._rows, self.skipped = rows, {str(k): int(v) for k, v in state["skipped"].items()}
