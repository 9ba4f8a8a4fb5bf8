"""The state of a run: position, results, checkpoints, interruption. Its weights are in an engine (`engine`).

All randomness is a pure function of (seed, purpose, step), so no generator has a state to save: a checkpoint
holds weights, moments, the rewards' networks, the position in each stream of data, and counts. What an
iteration has explored so far is in the journal of the folder. The stages move the run on; after each step
they call `Run.done`, the only place where a run can be left and taken up.
"""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import sys
import time
from typing import Any

import numpy as np

from ..align.guards import Guards
from ..align.notes import Forgiving
from ..align.panel import Panel
from ..align.rollout import choose_prompts
from ..diffusion.noise import subseed
from ..errors import CheckpointError, ConfigError, ShapeError
from ..nn.lora import LoRA
from ..routing import ClosedLoop, unmatched
from .checkpoint import give, take
from .config import Config
from .denoiser import Denoiser
from .engine import make_engine
from .folder import RunFolder
from .host_loop import make_loop
from .policy import updates
from .progress import Progress
from .rules import check_device
from .task import check_reward, make_task
from .weights import Start

STAGES = ("base", "judges", "evaluate_base", "align", "evaluate", "finished")


class Stopped(Exception):
    """The user or the system asked the run to stop; what is done is saved."""


class Stop:
    """Ctrl-C and SIGTERM: the first asks the run to stop after its current step, the second stops it at
    once.
    """

    def __init__(self, say):
        self.asked, self._say, self._before = 0, say, {}

    def __enter__(self) -> Stop:
        for name in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[name] = signal.signal(name, self._ask)
            except ValueError:  # not the main thread: the host program handles signals
                pass
        return self

    def __exit__(self, *_: Any) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def _ask(self, number: int, _: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = number
        self._say("stopping after this step, then saving; press Ctrl-C again to stop at once")


def check_adapters(config: Config, model: Denoiser) -> None:
    """`ConfigError` where adapters of that rank do not fit the network; before anything is trained."""
    if config.align.parameters == "lora":
        try:
            LoRA(model.unet, config.lora.rank, config.lora.alpha, 0).detach()
        except ConfigError as error:
            raise ConfigError(f"lora.rank: is {config.lora.rank}, which does not fit ({error})") from None


def warnings_of(
    config: Config, model: Denoiser, loop: ClosedLoop | None, start: Start | None = None
) -> list[str]:
    """Sentences about settings that would do nothing without a word: patterns of the route that match no
    layer, and a run that is too short for its router. The loop is told how long the run is.
    """
    names = [m.key for _, m in model.unet.named_modules() if getattr(m, "routed", False)]
    found = unmatched((config.route, *config.routes), names)
    if loop is not None:
        base = 0 if start is not None else config.base.steps
        found += [loop.expect(base + config.align.iterations * updates(config))]
    return [sentence for sentence in found if sentence]


class Run:
    """The state of a run, in its folder."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        progress: Progress,
        stop: Stop,
        device: str = "cpu",
        start: Start | None = None,
    ):
        self.config, self.folder, self.progress, self.stop = config, folder, progress, stop
        check_device(config, device)
        self.task = make_task(config)
        self.panel = Panel.parse(config.align.reward)
        self.panel.require()
        check_reward(self.task, self.panel)
        if config.align.pairs == "rollouts":  # too few prompts: said before training
            choose_prompts(self.task.prompts, config.align.prompts, 0, 0)
        self.task.panel_data()  # too few pictures of a role: said before training, too
        self.model = Denoiser(config, self.task.words)
        check_adapters(config, self.model)
        if start is not None:
            start.check(config, self.model)
        self.start = start
        self.engine = make_engine(device, self.model, config)
        self.warnings = warnings_of(config, self.model, self.loop, start)
        self.guards: Guards | None = None  # made when the base's pictures are there
        self.arrays: dict[str, np.ndarray] = {}  # pictures and scores of the evaluations
        self.results: dict[str, Any] = {}  # numbers of the evaluations, needed at the end
        self.counters: dict[str, float] = {}  # what is counted over the whole run
        self._streams: dict[str, Any] = {}
        self._positions: dict[str, Any] = {}  # of streams that are not open yet
        self.stage, self.step = STAGES[0], 0
        self._began, self._before = time.monotonic(), 0.0

    # -------------------------------------------------------------------------------------------- position

    def seed(self, purpose: str) -> int:
        """The seed of one purpose of this run."""
        return subseed(self.config.seed, purpose)

    @property
    def seconds(self) -> float:
        """Wall time of this run so far, over all its processes."""
        return self._before + time.monotonic() - self._began

    def log(self, **values: Any) -> None:
        """One line of the metrics, stamped with stage and time; numbers that are not finite become null."""
        line = {"stage": self.stage, **values, "seconds": round(self.seconds, 3)}
        self.folder.log(**{k: _finite(v) for k, v in line.items()})

    @property
    def loop(self) -> ClosedLoop | None:
        """The closed loop of the engine, None where its forward is on BF16."""
        return getattr(self.engine, "loop", None)

    def loop_line(self) -> dict[str, Any]:
        """For the line of a training step: {"loop": what the closed loop measured}; {} without one."""
        return {} if self.loop is None else {"loop": self.loop.line()}

    def log_loop(self) -> None:
        """A line for each event of the closed loop: before the next step, so that its decisions are there
        when they first hold.
        """
        for event in () if self.loop is None else self.loop.drain():
            self.log(**{**event, "stage": "router"})

    def done(self, step: int, save: bool = False) -> None:
        """Step number `step` of the stage (from 1) is complete. Saves where asked or before stopping."""
        self.step = step
        if save or self.stop.asked:
            self.save()
        if self.stop.asked:
            raise Stopped(int(self.stop.asked))

    def enter(self, stage: str) -> None:
        """The stage is complete: go on to the next one, saved."""
        self.stage = stage
        self.done(0, save=True)
        self.folder.journal.clear()

    def begin_with(self, start: Start) -> None:
        """Skip the base training: its model is `start`; and the judges' where `start` has the same ones."""
        self.engine.begin_alignment(start.arrays)
        self.log(step=0, **start.identity())
        taken = False
        if judges := start.judges(self.config, self.task.identity):
            with contextlib.suppress(CheckpointError):  # of another version: trained anew
                self.panel.load_state_dict(judges)
                taken = True
        if taken:
            self.results["judge_accuracy"] = dict(start.accuracy)
            self.progress.say(f"judges: those of {start.source}, which this run would train alike")
        self.enter("evaluate_base" if taken else "judges")

    def stream(self, name: str, source: Any, **which: str | None) -> Any:
        """The stream of `source` (`sources.Source`) that goes by `name`, from where the checkpoint left it.
        which: role and word, as `Source.stream` takes them.
        """
        if name not in self._streams:
            self._streams[name] = source.stream(self._positions.get(name), **which)
        return self._streams[name]

    def close(self) -> None:
        """End the threads of the streams; their positions stay."""
        for stream in self._streams.values():
            stream.close()

    def journal(self, iteration: int) -> Forgiving:
        """The journal of the pool of `iteration`, with what an interrupted process left of it; empty unless
        that was the same iteration, after as many updates, on the same device.
        """
        journal = self.folder.journal
        journal.begin(iteration=iteration, updates=self.engine.updates, device=self.engine.device)
        return journal

    # ------------------------------------------------------------------------------------------ checkpoint

    def save(self) -> None:
        """Write the checkpoint: everything that the next step reads."""
        arrays = self.engine.state()
        arrays |= give(self.panel.state_dict(), "panel")
        opened = {name: stream.state() for name, stream in self._streams.items()}
        meta = {
            "config": self.config.to_dict(),
            "stage": self.stage,
            "step": self.step,
            "updates": self.engine.updates,
            "words": list(self.model.vocabulary.words),
            "results": self.results,
            "counters": self.counters,
            "data": self.task.identity,
            "streams": self._positions | opened,
            "phases": self.model.by_phases,
        }
        if self.loop is not None:
            meta["loop"] = self.loop.state()
        self.folder.save(arrays | give(self.arrays, "result"), meta)

    def restore(self, arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
        """Take up the state that `save` wrote; `CheckpointError` when it does not fit this configuration."""
        same_words = tuple(meta["words"]) == self.model.vocabulary.words
        if not same_words or meta.get("data") != self.task.identity:
            raise CheckpointError(
                f"{self.folder.checkpoint_file}: the data have changed since the run began (now it is "
                f"{self.task.facts}); bring the files back as they were, or name another folder with --out"
            )
        try:
            self._multiply(bool(meta.get("phases", False)))  # older than phases
            self.engine.restore(arrays, int(meta["updates"]), aligning=meta["stage"] != "base")
            self.panel.load_state_dict(take(arrays, "panel"))
            self.arrays, self.results = take(arrays, "result"), meta["results"]
            self.counters = meta.get("counters", {})
            if self.loop is not None:
                self.loop.restore(meta["loop"])
                self.loop.replay(self.folder.decisions)
            self._positions = meta.get("streams", {})
            self.stage, self.step = meta["stage"], int(meta["step"])
            if self.stage not in STAGES:
                raise KeyError(f"stage {self.stage!r}")
        except (KeyError, ShapeError, ValueError) as error:
            raise CheckpointError(
                f"{self.folder.checkpoint_file}: does not fit this version of the trainer ({error}); "
                f"name another folder with --out"
            ) from error
        lines = self.folder.metrics()
        self._before = lines[-1]["seconds"] if lines else 0.0
        self._began = time.monotonic()

    def _multiply(self, phases: bool) -> None:
        """Upsampling convolutions by phases or not, before anything has run; what the loop knows of their
        cost is made anew.
        """
        if phases == self.model.by_phases:
            return
        self.model.unet.upsample_by_phases(phases)
        if self.loop is not None:
            self.engine.use(make_loop(self.config, self.model))
            self.warnings = warnings_of(self.config, self.model, self.loop, self.start)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def peak_rss_mb() -> float:
    """Largest resident memory of this process so far, in MB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (1024 if sys.platform != "darwin" else 1024**2), 1)
