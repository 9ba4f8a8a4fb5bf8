"""A set of captioned pictures, or of preference pairs, wherever it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from ...errors import ConfigError, nearest
from ..data import ROLES
from .counts import Counts
from .order import Changed, Exhausted, IndexOrder, Order, ShardOrder, batch
from .readers import Reader
from .stream import Stream, check_skip

FORMAT = "fp4bf16-source-1"
_SETTINGS = ("seed", "shuffle", "role", "word")


class Source:
    """What `PictureSource` and `PairSource` have in common.

    size: pixels a side; seed: of the order; shuffle: among how many samples of shards the order is drawn
    (0: the order of the files); faults: what was wrong with files when the set was opened; identity: a dict
    of JSON values that tells this set from one whose files have changed.
    """

    pictures = 1  # a sample
    setting = "data.pictures"  # that names the set, for messages

    def __init__(self, path: str, reader: Reader, size: int, seed: int, shuffle: int):
        self.path, self.reader, self.size, self.seed, self.shuffle = path, reader, size, seed, shuffle
        self.noun, self.faults = reader.noun, dict(reader.faults)
        self.identity = reader.identity()
        known = len(reader) if hasattr(reader, "record") else reader.units
        if not known:
            raise self._nothing(Counts(faults=self.faults))

    def stream(
        self, state: Mapping[str, Any] | None = None, role: str | None = None, word: str | None = None
    ) -> Stream:
        """Shuffled samples for ever, from the beginning or from the `state` of an earlier stream.

        role, word: only captions of this role, and with this word. Order and state are a pure function of
        the files, seed, shuffle, role and word, and of how many samples were taken.

        Raises `ConfigError` for a state of other files or settings, or that is no state; and, when samples
        are asked for, where not one is good.
        """
        order = self._order(self.shuffle, role, word)
        settings = {"format": FORMAT, "set": self.identity, "seed": self.seed, "shuffle": self.shuffle}
        settings |= {"role": role, "word": word}
        skip = 0 if state is None else self._restore(order, state, settings)
        return Stream(order, self.pictures, skip, settings, self._explain)

    def once(self, n: int, role: str | None = None, word: str | None = None) -> Iterator[tuple[Any, ...]]:
        """Every good sample once, in the order of the files, `n` at a time and the last time fewer, each as
        `Stream.next` gives them. Raises `ConfigError` where there is none.
        """
        if type(n) is not int or n < 1:
            raise ConfigError(f"once: n is {n!r}, but it must be a whole number of at least 1")
        order = self._order(0, role, word)
        samples = iter(order.draw, None)
        while some := list(islice(samples, n)):
            yield batch(some, self.size, self.pictures)
        if not order.counts.good:
            raise self._nothing(order.counts, role, word)

    def captions(self, limit: int | None = None) -> Iterator[str]:
        """The captions alone, in the order of the files, the first `limit` of them or all; pictures are not
        read, so that the caption of a damaged one is among them. Raises `ConfigError` where there is none.
        """
        if limit is not None and (type(limit) is not int or limit < 0):
            raise ConfigError(f"captions: limit is {limit!r}, but it must be None or at least 0")
        counts = Counts(faults=dict(self.faults))
        yield from islice(self.reader.captions(counts), limit)
        if limit != 0 and not counts.good:
            raise self._nothing(counts)

    def role(self, caption: str) -> str:
        """The part of a run that may see `caption`, one of `fp4bf16.train.data.ROLES`: by a hash of its
        words, or, of the emoji pairs, by their own table.
        """
        return self.reader.role(caption)

    def _order(self, shuffle: int, role: str | None, word: str | None) -> Order:
        if role is not None and role not in ROLES:
            raise ConfigError(f"role: {role!r} is not known{nearest(role, ROLES)}")
        kind = IndexOrder if hasattr(self.reader, "record") else ShardOrder
        return kind(self.reader, self.size, self.seed, shuffle, role, word)

    def _restore(self, order: Order, state: Mapping[str, Any], settings: dict[str, Any]) -> int:
        """Bring the order to the position of a state; how many samples behind it the state stands."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise ConfigError(f"{self.setting}: the saved position is no {FORMAT}; start a new run")
        if state.get("set") != self.identity:
            raise ConfigError(self._changed(state.get("set")))
        for name in _SETTINGS:
            if state.get(name) != settings[name]:
                raise ConfigError(
                    f"{self.setting}: the position was saved with {name} = {state.get(name)!r}, but this run "
                    f"has {settings[name]!r}; use the same, or start a new run"
                )
        try:
            order.restore(state)
            return check_skip(state)
        except Changed:
            raise ConfigError(self._changed(self.identity)) from None
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.setting}: the saved position cannot be used ({error}); start a new run"
            ) from None

    def _changed(self, before: Any) -> str:
        then, now = (
            f"{known['files']:,} files with {known['bytes']:,} bytes"
            if isinstance(known, Mapping) and {type(known.get(k)) for k in ("files", "bytes")} == {int}
            else "other files"
            for known in (before, self.identity)
        )
        what = f"{then} then, {now} now" if then != now else f"{now} as then, but with other names or content"
        return (
            f"{self.setting}: {self.path} has changed since the position was saved ({what}); bring the files "
            f"back as they were, or start a new run"
        )

    def _explain(self, error: BaseException, order: Order) -> BaseException:
        if isinstance(error, Exhausted):
            return self._nothing(order.counts, order.role, order.word)
        return error

    def _nothing(self, counts: Counts, role: str | None = None, word: str | None = None) -> ConfigError:
        asked = [f"the role {role!r}"] * (role is not None) + [f"the word {word!r}"] * (word is not None)
        where = f" with {' and '.join(asked)}" if asked else ""
        others = f", {counts.others:,} have other captions" if counts.others else ""
        return ConfigError(
            f"{self.setting}: {self.path} has not one good sample{where} "
            f"({counts.summary(self.noun)}{others}); looked for {self.reader.looked_for}"
        )


class PictureSource(Source):
    """Captioned pictures; made by `open_pictures`. Samples are (picture, caption)."""


class PairSource(Source):
    """Preference pairs; made by `open_pairs`. Samples are (chosen, rejected, caption)."""

    pictures = 2
    setting = "data.pairs"
