"""``python -m fp4bf16 eval``: what a run has learnt, and what the FP4 track makes of it, in numbers.

The base, the aligned model on BF16 and the aligned model on the FP4 track draw the same captions from the
same seeds; other seeds on BF16 say how far two sets differ that differ by their seeds alone. All of them are
compared with real pictures (`distances`), scored by the run's judges (`intervals`), and laid beside the
pictures that the model was trained on (`neighbours`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError
from .distances import FeatureSet, KernelTable
from .engine import make_sampler
from .evaluation_numbers import distances, feature_sets, neighbours, noise_floor, score_changes, scored
from .evaluation_sets import (
    Drawn,
    Plan,
    Real,
    Scores,
    Weights,
    cases,
    draw_set,
    drawing,
    load_scores,
    load_weights,
    real_pictures,
)
from .extractors import NAMES, NOT_FID, Extractor, featurise, make_extractors
from .folder import versions
from .neighbours import Nearest
from .progress import Progress
from .state import peak_rss_mb

FORMAT = "fp4bf16-eval-1"
SHOWN = 24  # pictures of each set on a sheet
ABOUT_A_SET = ("name", "weights", "track", "seeds", "n", "unhealthy")


@dataclass(frozen=True)
class Settings:
    """What an evaluation does; None takes what the run's own evaluation has.

    n: pictures a set; floor_seeds: further BF16 sets from other seeds; extractors: of
    `extractors.NAMES`, None: all that are installed; at_infinity: also extrapolate the Fréchet distance.
    """

    n: int | None = None
    steps: int | None = None
    sampler: str | None = None
    guidance: float | None = None
    seed: int | None = None
    device: str = "cpu"
    floor_seeds: int = 3
    extractors: tuple[str, ...] | None = None
    at_infinity: bool = False
    route: str | None = None  # file of the routes of FP4 pictures; None: the run's

    def checked(self, weights: Weights) -> Settings:
        """These settings with every None filled in; `ConfigError` for one that cannot be."""
        given = self.guidance
        if given is not None and not (math.isfinite(given) and given >= 0):
            raise ConfigError(f"--guidance {given}: must be a finite number of at least 0; 1 is off")
        config = drawing(weights.config, self.sampler, self.guidance)
        c = config.diffusion
        steps = config.eval.steps if self.steps is None else self.steps
        if not 1 <= steps <= c.timesteps:
            raise ConfigError(f"--steps {steps}: must be from 1 to the {c.timesteps} timesteps of the run")
        if self.n is not None and not 2 <= self.n <= 10**6:
            raise ConfigError(f"--n {self.n}: a set has from 2 to 1000000 pictures")
        if not 0 <= self.floor_seeds <= 100:
            raise ConfigError(f"--floor-seeds {self.floor_seeds}: must be from 0 to 100 sets")
        seed = config.seed if self.seed is None else self.seed
        if not 0 <= seed < 2**63:
            raise ConfigError(f"--seed {seed}: must be a whole number from 0 to 2^63 - 1")
        return Settings(self.n, steps, c.sampler, c.guidance, seed, self.device, self.floor_seeds,
                        self.extractors, self.at_infinity, self.route)  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """`report`: what goes to ``report.json``; `sets`: what was drawn; `captions`: of each picture; `shown`:
    which pictures of a set were kept.
    """

    report: dict[str, Any]
    sets: dict[str, Drawn]
    captions: list[str]
    shown: np.ndarray
    real: Real


def draw_all(weights: Weights, settings: Settings, real: Real, plan: Plan, base: bool = True) -> list[Drawn]:
    """The sets, in order: the base (where the model is aligned and `base` asks for it), the model on BF16, on
    FP4, and on BF16 from other seeds. `settings` are `checked`. The nearest training pictures are looked up
    for all but the last.
    """
    config = drawing(weights.config, settings.sampler, settings.guidance)
    captions, seeds = cases(weights, real.captions, settings.n, settings.seed)
    model, on_gpu = "aligned" if weights.aligned else "base", settings.device == "cuda"
    drawn = []
    if base and weights.aligned:
        draw = make_sampler(settings.device, weights.model("base", config, on_gpu))
        drawn.append(draw_set(draw, ("base bf16", "base", "bf16", "seeds 1"), captions, seeds, plan, True))
    draw = make_sampler(settings.device, weights.model(model, config, on_gpu))
    for track in ("bf16", "fp4"):
        identity = (f"{model} {track}", model, track, "seeds 1")
        drawn.append(draw_set(draw, identity, captions, seeds, plan, True))
    for number in range(2, settings.floor_seeds + 2):
        _, others = cases(weights, real.captions, len(captions), settings.seed, f"evaluation/seeds {number}")
        identity = (f"{model} bf16, seeds {number}", model, "bf16", f"seeds {number}")
        drawn.append(draw_set(draw, identity, captions, others, plan))
    return drawn


def evaluate(folder: Path, settings: Settings, progress: Progress | None = None) -> Evaluation:
    """Evaluate the run in `folder`; nothing is written.

    Raises `ConfigError` and `CheckpointError` with a sentence, `ImportError` for an extractor that is asked
    for but not installed.
    """
    began = time.monotonic()
    progress = progress or Progress()
    weights = load_weights(folder).on(settings.route)
    settings = settings.checked(weights)
    for sentence in weights.check_routes(settings.device):
        progress.say(f"warning: --route {settings.route}: {sentence}")
    if settings.device == "cuda":
        from .device_sampler import place

        place()  # where there is no GPU, it is said at once
    real = real_pictures(weights.config)
    first = next(iter(real.references.values()))
    extractors, absent = make_extractors(settings.extractors, first)
    judges = load_scores(weights)
    captions, _ = cases(weights, real.captions, settings.n, settings.seed)
    progress.say(f"eval: reading {len(real.train)} training pictures, to find neighbours among them")
    nearest, of_heldout = _neighbourhood(real, extractors)
    sets = 2 + settings.floor_seeds + weights.aligned
    progress.stage("eval", sets * len(captions), 0, _plan_line(weights, settings, len(captions), sets))
    different = len(set(captions))
    shown = np.unique(np.linspace(0, different - 1, min(SHOWN, different)).astype(int))

    def say(count: int) -> None:
        progress.step(count, **{"images/s": count / max(1e-9, time.monotonic() - clock[0])})
        clock[0] = time.monotonic()

    clock = [time.monotonic()]
    plan = Plan(weights.config.size, settings.steps, extractors, judges, nearest, shown, say)
    try:
        drawn = draw_all(weights, settings, real, plan)
    finally:
        progress.end()
    progress.say(f"eval: distances of {len(drawn)} sets by {', '.join(e.name for e in extractors)}")
    numbers, floors = _measure(drawn, real, extractors, settings)
    if judges is not None:
        numbers += _scored(drawn, captions, judges, settings.seed)
    paired = [d for d in drawn if d.distances]
    numbers += neighbours(paired, of_heldout, len(real.train))
    report = _header(weights, settings, extractors, absent, judges) | {
        "references": [{"name": name, "n": len(p)} for name, p in real.references.items()],
        "sets": [{k: getattr(d, k) for k in ABOUT_A_SET} for d in drawn],
        "numbers": numbers,
        "noise_floor": floors,
        "about": {"versions": versions(), "device": settings.device, "peak_rss_mb": peak_rss_mb(),
                  "seconds": round(time.monotonic() - began, 1)},
    }  # fmt: skip
    return Evaluation(report, {d.name: d for d in drawn}, captions, shown, real)


def _plan_line(weights: Weights, s: Settings, n: int, sets: int) -> str:
    stage = weights.meta["stage"]
    return f"run at stage {stage}: {sets} sets of {n} pictures, {s.sampler}, {s.steps} steps"


def _neighbourhood(
    real: Real, extractors: list[Extractor]
) -> tuple[dict[str, Nearest], dict[str, np.ndarray]]:
    """Nearest training pictures by pixels and by the class network, and how far held-out pictures lie."""
    spaces = {"pixels": lambda x: x}
    spaces |= {e.name: lambda x, e=e: featurise(e, x) for e in extractors if e.name == NAMES["classes"]}
    nearest = {name: Nearest(see(real.train)) for name, see in spaces.items()}
    heldout = {
        name: nearest[name](see(real.heldout))[0] if len(real.heldout) else np.empty(0)
        for name, see in spaces.items()
    }
    return nearest, heldout


def compare_sets(
    extractor: Extractor, drawn: list[Drawn], real: Real, seed: int
) -> tuple[dict[str, FeatureSet], KernelTable, list[str], list[dict]]:
    """(sets, table, references, noise floors) of one extractor: see `noise_floor`.

    No floors where the BF16 set or the FP4 set has no 2 healthy pictures.
    """
    references = [name for name, pictures in real.references.items() if len(pictures) >= 2]
    known = {name: featurise(extractor, real.references[name]) for name in references}
    sets = feature_sets(extractor, drawn, known)
    table = KernelTable(sets, seed)
    model = [d for d in drawn if d.weights == drawn[-1].weights]
    fp4 = next(d.name for d in model if d.track == "fp4")
    bf16 = [d.name for d in model if d.track == "bf16" and d.name in sets]
    if fp4 not in sets or model[0].name not in sets:
        return sets, table, references, []
    floors = [{"extractor": extractor.name} | noise_floor(table, fp4, bf16, name) for name in references]
    return sets, table, references, floors


def _measure(
    drawn: list[Drawn], real: Real, extractors: list[Extractor], settings: Settings
) -> tuple[list[dict], list[dict]]:
    """(distances, noise floors) of every extractor."""
    numbers, floors = [], []
    for e in extractors:
        sets, table, references, found = compare_sets(e, drawn, real, settings.seed)
        numbers += distances(e, sets, table, references, settings.at_infinity, settings.seed)
        floors += found
    return numbers, floors


def _scored(drawn: list[Drawn], captions: list[str], scores: Scores, seed: int) -> list[dict]:
    """Scores of each set and their changes along base -> aligned -> FP4."""
    found = scored(drawn, captions, scores, seed)
    same = [d for d in drawn if d.seeds == "seeds 1"]
    for before, after in pairwise(same):
        found += score_changes(before, after, captions, scores, seed)
    return found


def _header(
    weights: Weights, settings: Settings, extractors: list[Extractor], absent: dict[str, str], judges: Any
) -> dict[str, Any]:
    meta = weights.meta
    return {
        "format": FORMAT,
        "not_fid": NOT_FID,
        "run": {
            "folder": str(weights.folder), "preset": weights.config.preset, "stage": meta["stage"],
            "step": meta["step"], "aligned": weights.aligned, "reward": weights.config.align.reward,
            "judges": judges is not None,
        },
        "settings": asdict(settings),
        "routes": weights.fp4_routes().to_dict(),
        "extractors": {e.name: {"dimension": e.dimension, "about": e.about} for e in extractors},
        "left_out": absent,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ folder


def check_target(target: Path) -> None:
    """`ConfigError` unless `target` can be written: not there, empty, or an evaluation and nothing else."""
    try:
        there = {p.name for p in target.iterdir()} if target.exists() else set()
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"--out {target}: cannot be made a folder ({error.strerror}); name another"
        ) from None
    if not there:
        return
    try:
        ours = set(json.loads((target / "report.json").read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    if foreign := sorted(there - ours, key=lambda name: (name.startswith("."), name)):
        raise ConfigError(
            f"--out {target}: holds {foreign[0]!r}, which no evaluation wrote; move it away or name another "
            f"folder"
        )


def write_folder(target: Path, files: dict[str, bytes]) -> None:
    """Put `files` into the folder `target`, in place of an older evaluation, all of them or none.

    They are written into a hidden folder beside it, which then takes its name; what a crash left of earlier
    times is cleared away. Raises `ConfigError` (see `check_target`) and `OSError`; `target` is then as it
    was.
    """
    check_target(target)
    fresh, old = (target.parent / f".{target.name}.{word}.{os.getpid()}" for word in ("new", "old"))
    for left in target.parent.glob(f".{target.name}.*.*"):
        if left.name.split(".")[-2] in ("new", "old") and not _running(left.name.split(".")[-1]):
            shutil.rmtree(left, ignore_errors=True)
    try:
        fresh.mkdir()
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        if target.exists():
            os.replace(target, old)
        try:
            os.replace(fresh, target)
        except OSError:
            if old.exists():
                os.replace(old, target)
            raise
    finally:
        for folder in (fresh, old):
            shutil.rmtree(folder, ignore_errors=True)


def _running(process: str) -> bool:
    """Whether the process of that number is there."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        pass
    return True
