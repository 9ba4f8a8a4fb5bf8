"""What an evaluation looks at: the weights of a run, real pictures, and the pictures that the run draws.

Pictures are drawn, scored and turned into features a chunk at a time and then dropped, so that only their
features and scores take memory in the end.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..align.judges import Judge
from ..align.panel import Panel
from ..align.rollout import healthy
from ..diffusion.noise import integers, subseed
from ..diffusion.samplers import plan
from ..errors import CheckpointError, ConfigError, ShapeError
from ..nn.lora import LoRA
from ..routing import RouteSet, flops, load_routes, unmatched
from . import checkpoint
from .config import Config, check, from_dict
from .data import STYLES, Vocabulary
from .denoiser import Denoiser
from .engine import restore_flat
from .evaluate import by_probability, judge, unit
from .extractors import Extractor, featurise
from .folder import RunFolder
from .host_loop import routes_in
from .neighbours import Nearest
from .pictures import to_bytes
from .task import OwnTask, make_task

CHUNK = 512  # pictures drawn and looked at together
MOST = 20_000  # real pictures taken of data of one's own
CLOSEST = 12  # pictures kept that resemble a training picture most
_TRIES = 3  # at a checkpoint that may be replaced while it is read


# ----------------------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class Weights:
    """A checkpoint of a run, read once: all that is drawn comes from the same moment of it."""

    folder: Path
    config: Config
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]
    routes: RouteSet | None = None  # of FP4 pictures, in place of the run's

    def on(self, route: str | os.PathLike | None) -> Weights:
        """These weights, drawing FP4 pictures on the routes of a file (`load_routes`); None: on the run's.

        Raises `ConfigError` for a file that holds no routes.
        """
        if route is None:
            return self
        try:
            routes = load_routes(route)
        except OSError as error:
            raise ConfigError(f"--route {route}: cannot be read ({error.strerror}); name a file that the "
                              f"command route has saved") from error  # fmt: skip
        parts, levels = len(routes.buckets), self.config.diffusion.timesteps
        if parts > levels:
            raise ConfigError(f"--route {route}: is of {parts} parts of the noise levels, but the run has "
                              f"{levels} levels; use routes of {levels} parts or fewer")  # fmt: skip
        return dataclasses.replace(self, routes=routes)

    @property
    def aligned(self) -> bool:
        """Whether the alignment has changed the weights."""
        stage = self.meta["stage"]
        return stage in ("evaluate", "finished") or (stage == "align" and self.meta["step"] > 0)

    def _network(self, config: Config) -> Denoiser:
        """Without its weights."""
        model = Denoiser(config, Vocabulary(tuple(self.meta["words"])))
        model.unet.upsample_by_phases(self.meta.get("phases", False))
        model.routes = self.routes or routes_in(self.config, model, self.meta.get("loop"))
        return model

    def fp4_routes(self) -> RouteSet:
        """The routes that FP4 pictures are drawn on."""
        return self._network(self.config).routes or RouteSet([self.config.route])

    def check_routes(self, device: str) -> list[str]:
        """Sentences about patterns of a file (`on`) that match no layer. Raises `ConfigError` for routes that
        `device` does not run.
        """
        if device == "cuda":
            from .device_loop import check_routes  # not needed on a CPU

            check_routes({}, self.fp4_routes().buckets)
        if self.routes is None:
            return []
        network = self._network(self.config).unet
        names = [m.key for _, m in network.named_modules() if getattr(m, "routed", False)]
        return unmatched([*self.routes.buckets, self.routes.training], names)

    def model(self, which: str, config: Config | None = None, merged: bool = False) -> Denoiser:
        """The "base" or the "aligned" model, drawing as `config` says (default: as the run's).

        Adapters run beside the network, as in the run; merged: they are added into it (for a GPU).
        """
        model = self._network(config or self.config)
        adapters = checkpoint.take(self.arrays, "lora") if which == "aligned" and not merged else {}
        state = checkpoint.take(self.arrays, "ema" if which == "base" or adapters else "policy")
        try:
            model.unet.load_state_dict(state)
            if adapters:
                lora = LoRA(model.unet, self.config.lora.rank, self.config.lora.alpha)
                restore_flat(lora.flat, adapters, lora.flat.data)
                lora.flat.touch()
        except ShapeError as error:
            raise CheckpointError(
                f"{self.folder}: its checkpoint holds no weights of the {which} model ({error}); evaluate "
                f"the run with the version of fp4bf16 that wrote it"
            ) from None
        return model


def load_weights(folder: Path) -> Weights:
    """The last good checkpoint of the run in `folder`, which may be in the course of being written.

    Raises `ConfigError` where there is no run or no checkpoint yet, `CheckpointError` for a damaged one.
    """
    run = RunFolder(folder)
    config = check(from_dict(run.read_config()["config"]))
    for attempt in range(_TRIES):
        try:
            found = checkpoint.load_last(run.checkpoint_file, run.previous_file)
        except CheckpointError:
            if attempt + 1 == _TRIES:
                raise
        else:
            if found is None:
                raise ConfigError(f"{folder}: the run has no checkpoint yet; wait until it has written one")
            if found[2] is None or attempt + 1 == _TRIES:
                return Weights(Path(folder), config, found[0], found[1])
        time.sleep(0.2)  # the run may just have put another file in its place
    raise AssertionError("not reached")


def fp4_share(model: Denoiser, steps: int) -> float:
    """Of the FLOPs of a picture that `model` draws on the FP4 track with `steps` steps, the share on FP4."""
    of = model.config.diffusion
    unet, total, low = model.unet, 0.0, 0.0
    before = {m.key: m.track for _, m in unet.named_modules() if getattr(m, "routed", False)}
    routes = model.routes or RouteSet([before])
    try:
        for step in plan(of.sampler, model.schedule, steps):
            tracks = unet.apply_route(routes.at(step.t, len(model.schedule)))
            costs = flops(unet)  # of this route
            total += sum(costs.values())
            low += sum(cost for name, cost in costs.items() if tracks[name] != "bf16")
    finally:
        unet.apply_route(before)
    return low / total


# ---------------------------------------------------------------------------------------------- pictures


@dataclass(frozen=True)
class Real:
    """Real pictures, float32 (n, H, W, 3) in [-1, 1].

    references: name -> those that samples are compared with; captions: what is drawn; train: all that the
    model was trained on, with their captions; heldout: those of captions that it was not.
    """

    references: dict[str, np.ndarray]
    captions: tuple[str, ...]
    train: np.ndarray
    train_captions: tuple[str, ...]
    heldout: np.ndarray


def real_pictures(config: Config) -> Real:
    """The real pictures of a run: of its own data, or the emoji pairs."""
    task = make_task(config)
    if isinstance(task, OwnTask):
        return _own_pictures(task)
    known = task.pairs.select(word=config.word or None)
    keep = [i for i, role in enumerate(known.roles) if role in ("policy", "evaluation")]
    pictures = known.images[:, keep]
    heldout = [i for i, role in enumerate(known.roles) if role == "evaluation"]
    winner = STYLES.index(config.winner)
    return Real(
        {"real": np.concatenate(list(pictures)), f"real {config.winner}": pictures[winner]},
        task.eval_captions,
        np.concatenate(list(task.trained.images)),
        task.trained.captions * 2,
        np.concatenate(list(known.images[:, heldout])),
    )


def _own_pictures(task: OwnTask) -> Real:
    """Training pictures have captions of the role policy, held-out ones of evaluation; of pairs, both."""
    source = task.pictures or task.pairs
    train, captions = _read(source, "policy")
    try:
        heldout, _ = _read(source, "evaluation")
    except ConfigError:  # a small set may have none: what they are for is then left out
        heldout = train[:0]
    references = {"real": np.concatenate([train, heldout])}
    return Real(references, task.eval_captions, train, tuple(captions), heldout)


def _read(source: Any, role: str) -> tuple[np.ndarray, list[str]]:
    """At most `MOST` pictures of a role, and their captions."""
    pictures, captions = [], []
    for *some, said in source.once(256, role=role):
        pictures += some
        captions += list(said) * len(some)
        if len(captions) >= MOST:
            break
    return np.concatenate(pictures)[:MOST], captions[:MOST]


def cases(weights: Weights, captions: Sequence[str], n: int | None, seed: int, purpose: str = "evaluation"):
    """(captions, seeds) of `n` pictures: caption after caption, from the start again until there are `n`.

    By default as many as the run's own evaluation draws, and from the same noise.
    """
    c = weights.config.eval
    chosen = list(captions)[: c.captions or None]
    n = len(chosen) * c.seeds if n is None else n
    seeds = integers(subseed(seed, purpose), 0, n, 0, 2**32).astype(np.uint64)
    return [chosen[i % len(chosen)] for i in range(n)], seeds


# ------------------------------------------------------------------------------------------------ judges


@dataclass(frozen=True)
class Scores:
    """Names and units of what pictures are scored by; `of(pictures, captions)` gives name -> float64 (n,).

    "reward" is what was trained on and "held-out judge" what watches it; a sum of several rewards has its
    parts beside them, "reward: style" and so on. shares: whether a held-out judge over one half counts as a
    win.
    """

    units: dict[str, str]
    shares: bool
    of: Callable[[np.ndarray, Sequence[str]], dict[str, np.ndarray]]


def load_scores(weights: Weights) -> Scores | None:
    """Reward and held-out judges as the run left them; None where it has not trained them yet."""
    arrays, config = weights.arrays, weights.config
    if weights.meta["stage"] in ("base", "judges"):
        return None
    if state := checkpoint.take(arrays, "panel"):
        panel = Panel.parse(config.align.reward)
        panel.load_state_dict(state)
        return _panel_scores(panel)
    names = {"reward": "reward", "held-out judge": "heldout"}  # of a run before there were panels
    judges = {
        shown: Judge.from_state(name, config.judge.width, checkpoint.take(arrays, f"judge.{name}"))
        for shown, name in names.items()
    }
    return Scores(
        dict.fromkeys(names, "probability"), True,
        lambda pictures, captions: {name: judge.probability(pictures) for name, judge in judges.items()},
    )  # fmt: skip


def _panel_scores(panel: Panel) -> Scores:
    """Of a panel as the trainer shows it."""
    units = dict.fromkeys(("reward", "held-out judge"), unit(panel))
    parts = panel.parts if len(panel.parts) > 1 else ()
    for part in parts:
        units |= {f"reward: {part.name}": part.unit, f"held-out judge: {part.name}": part.unit}

    def of(pictures: np.ndarray, captions: Sequence[str]) -> dict[str, np.ndarray]:
        found = dict(zip(("reward", "held-out judge"), judge(panel, pictures, captions), strict=True))
        for part in parts:
            found[f"reward: {part.name}"] = part.shown(pictures, captions)
            found[f"held-out judge: {part.name}"] = part.shown_heldout(pictures, captions)
        return found

    return Scores(units, by_probability(panel), of)


# -------------------------------------------------------------------------------------------- drawn sets


@dataclass
class Drawn:
    """One set of `n` pictures of a model and a track, as what was measured of them.

    rows: the healthy ones, of which `features` (extractor -> (len(rows), d)) and `distances` (space ->
    distance to the nearest training picture) have a row each. scores: name -> float64 (n,), NaN where a
    picture is not healthy. shown: the pictures at `Plan.shown`. closest: the `CLOSEST` nearest to a training
    picture, as (distance, row, picture, {space: training picture}).
    """

    name: str
    weights: str
    track: str
    seeds: str
    n: int
    rows: np.ndarray
    features: dict[str, np.ndarray]
    scores: dict[str, np.ndarray]
    distances: dict[str, np.ndarray]
    shown: np.ndarray
    closest: list[tuple[float, int, np.ndarray, dict[str, int]]]

    @property
    def unhealthy(self) -> int:
        """Pictures that are not finite, or constant."""
        return self.n - len(self.rows)


@dataclass(frozen=True)
class Plan:
    """What is drawn, `size` pixels a side, and measured of every set: see `Drawn`. `say(pictures)` is called
    as they are done.
    """

    size: int
    steps: int
    extractors: list[Extractor]
    scores: Scores | None
    nearest: dict[str, Nearest]  # "pixels" or the name of an extractor -> nearest training picture
    shown: np.ndarray
    say: Callable[[int], None] = field(default=lambda count: None)


def draw_set(
    draw: Callable[..., np.ndarray],
    identity: tuple[str, str, str, str],
    captions: Sequence[str],
    seeds: np.ndarray,
    plan: Plan,
    neighbours: bool = False,
) -> Drawn:
    """Draw and measure one set. identity: name, weights, track and name of the seeds."""
    n = len(captions)
    names = [e.name for e in plan.extractors]
    spaces = list(plan.nearest) if neighbours else []
    rows: list[np.ndarray] = []
    features: dict[str, list[np.ndarray]] = {name: [] for name in names}
    distances: dict[str, list[np.ndarray]] = {space: [] for space in spaces}
    scores = {name: np.full(n, np.nan) for name in (plan.scores.units if plan.scores else ())}
    shown: dict[int, np.ndarray] = {}
    closest: list[tuple[float, int, np.ndarray, dict[str, int]]] = []
    for start in range(0, n, CHUNK):
        some = slice(start, min(start + CHUNK, n))
        pictures = draw(seeds[some], list(captions[some]), plan.steps, identity[2])
        good = np.flatnonzero(healthy(pictures))
        asked = [captions[start + i] for i in good]
        shown |= {i: to_bytes(pictures[i - start]) for i in plan.shown if some.start <= i < some.stop}
        pictures = pictures[good]
        rows.append(start + good)
        for e in plan.extractors:
            features[e.name].append(featurise(e, pictures))
        if plan.scores is not None and len(good):
            for name, values in plan.scores.of(pictures, asked).items():
                scores[name][start + good] = values
        if spaces and len(good):
            found = {space: plan.nearest[space](_in(space, pictures, features)) for space in spaces}
            for space, (distance, _) in found.items():
                distances[space].append(distance)
            closest = _closer(closest, found, pictures, start + good)
        plan.say(some.stop - some.start)
    return Drawn(
        *identity, n, np.concatenate(rows), {k: np.concatenate(v) for k, v in features.items()},
        scores, {k: np.concatenate(v) if v else np.empty(0) for k, v in distances.items()},
        np.stack([shown[int(i)] for i in plan.shown]), closest,
    )  # fmt: skip


def _in(space: str, pictures: np.ndarray, features: dict[str, list[np.ndarray]]) -> np.ndarray:
    """The pictures as `space` sees them; their features were just appended."""
    return pictures if space == "pixels" else features[space][-1]


def _closer(closest: list, found: dict[str, tuple], pictures: np.ndarray, rows: np.ndarray) -> list:
    """The `CLOSEST` of those kept so far and of these pictures, by the distance in pixels."""
    distance = found["pixels"][0]
    for i in np.argsort(distance, kind="stable")[:CLOSEST]:
        index = {space: int(nearest[1][i]) for space, nearest in found.items()}
        closest = [*closest, (float(distance[i]), int(rows[i]), to_bytes(pictures[i]), index)]
    return sorted(closest, key=lambda entry: entry[:2])[:CLOSEST]


def drawing(config: Config, sampler: str | None, guidance: float | None) -> Config:
    """`config` with the sampler and guidance asked for; `ConfigError` for what cannot be."""
    changes = {"sampler": sampler, "guidance": guidance}
    changes = {k: v for k, v in changes.items() if v is not None}
    diffusion = dataclasses.replace(config.diffusion, **changes)
    align = dataclasses.replace(config.align, explore_steps=config.align.steps)  # nothing is explored here
    return check(dataclasses.replace(config, diffusion=diffusion, align=align))
