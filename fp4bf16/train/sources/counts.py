"""What a stream has read, and what it left out and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Why a sample is left out: one of them, several of them.
SKIPPED = {
    "unreadable": ("unreadable picture", "unreadable pictures"),
    "truncated": ("truncated picture", "truncated pictures"),
    "too_large": ("too large", "too large"),
    "no_caption": ("without a caption", "without a caption"),
    "no_picture": ("without a picture", "without a picture"),
    "missing": ("listed but not there", "listed but not there"),
    "tie": ("tie", "ties"),
    "no_label": ("without a label", "without a label"),
}
#: What is wrong with a file rather than with a sample of it.
FAULTS = {
    "truncated_shards": ("shard is cut off", "shards are cut off"),
    "damaged_places": ("damaged place in a shard passed over", "damaged places in shards passed over"),
    "unreadable_files": ("file cannot be read", "files cannot be read"),
    "other_columns": ("file has other columns", "files have other columns"),
    "damaged_groups": ("row group breaks off", "row groups break off"),
    "bad_rows": ("row of a table cannot be read", "rows of tables cannot be read"),
}


class Skip(Exception):  # noqa: N818  (no error: a sample that is left out)
    """A sample is left out for `reason`, one of `SKIPPED`."""

    def __init__(self, reason: str):
        super().__init__(SKIPPED[reason][0])
        self.reason = reason


def _say(number: int, words: tuple[str, str]) -> str:
    return f"{number:,} {words[number != 1]}"


@dataclass
class Counts:
    """How many samples were read, all epochs together.

    read: samples looked at, good or not; skipped: of those, how many were left out, by reason (`SKIPPED`);
    faults: what was wrong with files (`FAULTS`); others: samples whose caption was not asked for (`role`,
    `word`), which are neither read nor skipped.

    >>> counts = Counts()
    >>> counts.read += 9
    >>> counts.skip("unreadable")
    >>> counts.read, counts.skipped
    (10, {'unreadable': 1})
    >>> counts.summary("members")
    '1 of 10 members skipped: 1 unreadable picture'
    """

    read: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    others: int = 0

    def skip(self, reason: str) -> None:
        """One more sample read and left out."""
        self.read += 1
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def fault(self, what: str) -> None:
        """One more thing wrong with a file."""
        self.faults[what] = self.faults.get(what, 0) + 1

    @property
    def good(self) -> int:
        """Samples read and not left out."""
        return self.read - sum(self.skipped.values())

    def copy(self) -> Counts:
        """Counts that go their own way from here."""
        return Counts(self.read, dict(self.skipped), dict(self.faults), self.others)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, as they stand in a state."""
        return {"read": self.read, "skipped": self.skipped, "faults": self.faults, "others": self.others}

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Counts:
        """What `to_dict` gave; `ValueError`, `TypeError` or `KeyError` for anything else."""
        read, others = whole(known["read"]), whole(known["others"])
        skipped = {reason: whole(n) for reason, n in dict(known["skipped"]).items() if SKIPPED[reason]}
        faults = {what: whole(n) for what, n in dict(known["faults"]).items() if FAULTS[what]}
        return cls(read, skipped, faults, others)

    def summary(self, noun: str = "samples") -> str:
        """One sentence, without a full stop: what was skipped, most frequent reason first."""
        parts = sorted(self.skipped.items(), key=lambda item: (-item[1], item[0]))
        left_out = sum(self.skipped.values())
        text = f"{left_out or 'none'} of {self.read:,} {noun} skipped"
        if left_out:
            text = f"{left_out:,} of {self.read:,} {noun} skipped: "
            text += ", ".join(_say(n, SKIPPED[reason]) for reason, n in parts)
        if self.faults:
            text += "; " + ", ".join(_say(n, FAULTS[what]) for what, n in sorted(self.faults.items()))
        return text


def whole(value: Any) -> int:
    """`value`, a whole number of at least 0 from JSON; `ValueError` for anything else."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value
