"""The numbers of an evaluation, each with its name, the pictures it is of, its extractor and its interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from .distances import FeatureSet, Gaussian, KernelTable, frechet, frechet_at_infinity, frechet_note
from .evaluation_sets import Drawn, Scores
from .extractors import Extractor
from .intervals import Interval, difference_interval, mean_interval, paired_gain, share_interval
from .neighbours import compare


def number(name: str, of: str, value: float, n: int, **more: Any) -> dict[str, Any]:
    """One entry of ``report.json``; numbers that are not finite become None.

    >>> number("kernel distance", "base bf16", 0.5, 24, low=0.25, high=float("nan"))["high"] is None
    True
    """
    entry = {"name": name, "of": of, "value": value, "low": None, "high": None, "n": n} | more
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in entry.items()}


def of_interval(name: str, of: str, found: Interval, **more: Any) -> dict[str, Any]:
    """`number` of an `Interval`."""
    return (
        number(name, of, found.value, found.n, low=found.low, high=found.high, captions=found.captions) | more
    )


def feature_sets(extractor: Extractor, drawn: Sequence[Drawn], real: Mapping[str, np.ndarray]) -> dict:
    """Name -> `FeatureSet` of one extractor; sets of fewer than 2 healthy pictures are left out.

    real: name -> features of the real pictures.
    """
    sets = {name: FeatureSet(values, name) for name, values in real.items()}
    for one in drawn:
        if len(one.rows) >= 2:
            sets[one.name] = FeatureSet(one.features[extractor.name], one.seeds, one.rows, one.n)
    return sets


def distances(
    extractor: Extractor,
    sets: Mapping[str, FeatureSet],
    table: KernelTable,
    references: Sequence[str],
    at_infinity: bool,
    seed: int,
) -> list[dict[str, Any]]:
    """Kernel and Fréchet distance of every drawn set to every reference."""
    found = []
    fitted = {name: Gaussian.of(s.values, name) for name, s in sets.items()}
    for name in sets:
        for reference in references:
            if name in references:
                continue
            common = {"to": reference, "extractor": extractor.name}
            k, n, m = table.distance(name, reference), len(sets[name].values), len(sets[reference].values)
            found.append(
                number(
                    "kernel distance", name, k.value, n, low=k.low, high=k.high, error=k.error, m=m, **common
                )
            )
            value = frechet(fitted[name], fitted[reference])
            note = frechet_note(n, m, extractor.dimension)
            found.append(number("Fréchet distance", name, value, n, m=m, note=note, **common))
            if at_infinity:
                value = frechet_at_infinity(sets[name].values, fitted[reference], seed)
                few = f"needs at least {8 * extractor.dimension} pictures" if value is None else None
                found.append(
                    number("Fréchet distance, n to infinity", name, value, n, m=m, note=few, **common)
                )
    return found


def noise_floor(table: KernelTable, fp4: str, bf16: Sequence[str], reference: str) -> dict[str, Any]:
    """Does FP4 move the kernel distance to `reference` more than other seeds do?

    fp4 and bf16[0] are drawn from the same seeds, the other BF16 sets from others. `change` is the distance
    of the FP4 set less that of its BF16 twin; `floor` the largest difference between two of the BF16 sets,
    `floor_mean` the mean one; `within` says whether |change| is at most `floor` (None with a single BF16
    set). `between` holds the kernel distances of the sets from each other, all of which are 0 in the mean if
    only the seeds differ.
    """
    to = {name: table.distance(name, reference).value for name in (fp4, *bf16)}
    change = table.change(fp4, bf16[0], reference)
    apart = [abs(to[a] - to[b]) for a, b in combinations(bf16, 2)]
    pairs = [*combinations(bf16, 2), *((fp4, name) for name in bf16)]
    between = {f"{a} | {b}": table.distance(a, b) for a, b in pairs}
    return {
        "reference": reference,
        "fp4": fp4,
        "bf16": list(bf16),
        "distance": to,
        "change": change.value,
        "change_low": change.low,
        "change_high": change.high,
        "floor": max(apart) if apart else None,
        "floor_mean": float(np.mean(apart)) if apart else None,
        "times_floor": abs(change.value) / max(apart) if apart and max(apart) else None,
        "within": abs(change.value) <= max(apart) if apart else None,
        "between": {k: {"value": e.value, "low": e.low, "high": e.high} for k, e in between.items()},
    }


def scored(
    drawn: Sequence[Drawn], captions: Sequence[str], scores: Scores, seed: int
) -> list[dict[str, Any]]:
    """Every score of every set, with 95 % intervals by a bootstrap over captions.

    Of judges that say yes or no also the share of wins: a picture that is not healthy counts as lost, and the
    interval is Wilson's, which takes the pictures as independent.
    """
    found = []
    for one in drawn:
        for name, values in one.scores.items():
            interval = mean_interval(values, captions, seed)
            more = {"unit": scores.units[name], "unhealthy": one.unhealthy}
            found.append(of_interval(name, one.name, interval, **more))
        if scores.shares:
            won = int((np.nan_to_num(one.scores["held-out judge"]) > 0.5).sum())
            found.append(
                of_interval(
                    "held-out judge, share of wins", one.name, share_interval(won, one.n), unit="share"
                )
            )
    return found


def score_changes(
    before: Drawn, after: Drawn, captions: Sequence[str], scores: Scores, seed: int
) -> list[dict[str, Any]]:
    """What becomes of the scores from `before` to `after`, drawn from the same seeds."""
    name = f"{before.name} -> {after.name}"
    found = []
    for score, values in before.scores.items():
        interval = difference_interval(values, after.scores[score], captions, seed)
        found.append(of_interval(f"{score}, change", name, interval, unit=scores.units[score]))
    one, two = before.scores["held-out judge"], after.scores["held-out judge"]
    known = ~np.isnan(one) & ~np.isnan(two)
    preferred = share_interval(int((two[known] > one[known]).sum()), int(known.sum()))
    found.append(of_interval("held-out judge, share that it prefers", name, preferred, unit="share"))
    if scores.shares:
        gain, low, high = paired_gain(np.nan_to_num(one), np.nan_to_num(two), captions)
        more = {"low": low, "high": high, "unit": "percentage points"}
        found.append(number("held-out judge, share of wins, change", name, gain, before.n, **more))
    return found


def neighbours(drawn: Sequence[Drawn], heldout: Mapping[str, np.ndarray], train: int) -> list[dict[str, Any]]:
    """Distances of the sets to their nearest training pictures, beside those of held-out real pictures.

    heldout: space -> distances of real pictures that the model was not trained on. train: training pictures.
    """
    found = []
    for one in drawn:
        for space, distance in one.distances.items():
            c = compare(distance, heldout[space])
            common = {"extractor": space, "train": train, "heldout_n": c["heldout_n"]}
            found.append(
                number(
                    "nearest training picture, median distance", one.name, c["median"], c["n"],
                    smallest=c["smallest"], heldout=c["heldout_median"], limit=c["limit"], **common,
                )
            )  # fmt: skip
            if c["near_copies"] is not None:
                share = c["near_copies"]
                found.append(
                    number(
                        "nearest training picture, share of near-copies", one.name, share["value"], c["n"],
                        low=share["low"], high=share["high"], limit=c["limit"], **common,
                    )
                )  # fmt: skip
    return found
