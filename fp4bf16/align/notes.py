"""The journal of a pool: what of it is done, kept where a killed process does not take it along."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

#: Counts of a pool (`pool.Pool`).
COUNTS = ("rollouts", "unhealthy", "nonfinite_rewards", "retried", "lost", "lost_rewards")


class Journal(Protocol):
    """What is done of the current pool, kept where a killed process does not take it along.

    Records are dicts of JSON's own types. A record counts once `append` has returned; one that was cut short
    must not come back from `read`.
    """

    def read(self) -> list[dict[str, Any]]: ...

    def append(self, record: dict[str, Any]) -> None: ...

    def clear(self) -> None: ...


class Forgiving:
    """A journal whose disk may fail: an `OSError` of `journal` is said, and it is not used until it is begun
    or cleared again. So an iteration goes on without one, and would begin anew if it were interrupted.

    journal: a `Journal`; where it also has `begin`, `close` and `path`, as the trainer's has, they are passed
    on. say: is told in a sentence, once until a write succeeds again; by default a warning.

    >>> class Full:
    ...     def read(self): return []
    ...     def append(self, record): raise OSError(28, "No space left on device")
    >>> journal = Forgiving(Full(), say=print)
    >>> journal.append({"chunk": 0}); journal.append({"chunk": 1})  # doctest: +ELLIPSIS
    rollout: the journal cannot be used ([Errno 28] No space left on device); the iteration goes on ...
    """

    def __init__(self, journal: Any, say: Callable[[str], None] | None = None):
        self.journal, self._say = journal, say or _warn
        self._used, self._said = True, False

    @property
    def path(self) -> Any:
        """The journal's own."""
        return self.journal.path

    def begin(self, **key: Any) -> bool:
        """Whether what it holds is of the pool of `key` (the journal's own `begin`); False where it fails."""
        self._used = True
        return bool(self._try(lambda: self.journal.begin(**key)))

    def read(self) -> list[dict[str, Any]]:
        """Its records; none where it fails."""
        return (self._try(self.journal.read) or []) if self._used else []

    def append(self, record: dict[str, Any]) -> None:
        """Add a record, or not."""
        if self._used and self._try(lambda: self.journal.append(record) or True):
            self._said = False

    def clear(self) -> None:
        """Drop all records. Where that fails they stay: of another pool, for whoever reads them next."""
        self._used = True
        self._try(self.journal.clear)

    def close(self) -> None:
        """Close its file."""
        self._try(self.journal.close)

    def _try(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except OSError as error:
            self._used = False
            if not self._said:
                self._said = True
                self._say(
                    f"rollout: the journal cannot be used ({error}); the iteration goes on without, and "
                    f"would begin anew if it were interrupted; free some space, or see to the permissions of "
                    f"its folder"
                )
            return None


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=5)


class Notes:
    """A journal's records of the pool that `key` stands for, in groups of `group` places."""

    def __init__(self, journal: Journal | None, key: str, group: int):
        self.journal = None if journal is None else Forgiving(journal)
        self.key, self.group = key, group

    def read(self) -> Iterator[dict[str, Any]]:
        """Sound records of this pool, no place of it twice. A journal of other pools alone is cleared."""
        if self.journal is None:
            return
        records, taken = self.journal.read(), set()
        mine = [r for r in records if isinstance(r, dict) and r.get("pool") == self.key]
        if records and not mine:
            self.journal.clear()
        for record in mine:
            if _sound(record) and not taken & (groups := self._groups(record)):
                taken |= groups
                yield record

    def append(self, record: dict[str, Any]) -> None:
        """Add a record of this pool."""
        if self.journal is not None:
            whole = {"pool": self.key} | record
            self.journal.append(whole | {"check": _check(whole)})

    def _groups(self, record: Mapping[str, Any]) -> set[int]:
        start = record["start"]
        return set(range(start // self.group, -(-(start + len(record["seeds"])) // self.group)))


def _check(record: Mapping[str, Any]) -> str:
    """Of what a pool reads of a record: numbers that a damaged file changed are not taken up."""
    text = json.dumps([record[k] for k in ("pool", "start", "seeds", "rewards", "retried")])
    text += json.dumps([record["counts"][k] for k in COUNTS])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sound(record: Mapping[str, Any]) -> bool:
    """Whether nothing is missing or changed since it was written."""
    try:
        return record["check"] == _check(record)
    except (KeyError, TypeError, ValueError):
        return False
