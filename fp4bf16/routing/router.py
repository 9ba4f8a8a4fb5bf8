"""The router: observations of every layer in, a track for every layer out, at any step and noise level.

It measures nothing itself. What it is told (sensitivity, loss, gradient variance, latency) goes into moving
averages; now and then `decide` turns these into routes that hold from the next step on. A decision is data:
written down, and on resume replayed rather than made again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..averages import Average
from ..errors import ConfigError, nearest
from ..tracks import match_route
from .decision import SLOW, Decision, settle
from .pins import FAST, LayerInfo, free_track, unmatched
from .routes import RouteSet, check_route
from .table import explain


class Router:
    """Chooses the track of every layer from what it has observed.

    Args:
        layers: {name: LayerInfo} of all layers that a route names (`layers_of`).
        pins: the user's route, which always wins (`free_track`).
        buckets: of noise levels that are routed on their own, from 1. budget: share of the loss that FP4 may
            add by the predictions. hysteresis: of `allocate`. batch: pictures of a training step, for the
            gradient's variance. decay: of the moving averages, in [0, 1). ahead: steps between a decision
            and the first that runs on it, from 1.
        start: what runs before the first decision: a track for the free layers, or saved routes.

    Raises `ConfigError` naming the setting for anything else.

    >>> layers = {"a.weight": LayerInfo(64, 1e6), "b.weight": LayerInfo(64, 1e6)}
    >>> router = Router(layers, {"b*": "bf16", "*": "fp4"}, budget=0.01)
    >>> times = {name: {"bf16": 20.0, "fp4": 12.0} for name in layers}
    >>> router.observe(0, omega={"a.weight": 1e-3}, loss=0.5, latency=times)
    >>> decision = router.decide(0)
    >>> router.route(0), router.route(1)
    ({'a.weight': 'bf16', 'b.weight': 'bf16'}, {'a.weight': 'fp4', 'b.weight': 'bf16'})
    >>> router.fp4_share(1), decision.reasons["a.weight"]
    (0.5, '0.001 of loss for 8 us: within the budget')
    """

    def __init__(
        self,
        layers: Mapping[str, LayerInfo],
        pins: Mapping[str, str] | None = None,
        buckets: int = 1,
        budget: float = 0.02,
        hysteresis: float = 0.25,
        *,
        batch: int = 1,
        decay: float = 0.8,
        ahead: int = 1,
        start: str | RouteSet = SLOW,
    ):
        for what, value, least in (("buckets", buckets, 1), ("batch", batch, 1), ("ahead", ahead, 1)):
            if type(value) is not int or value < least:
                raise ConfigError(f"Router: {what} is {value!r}, but a whole number from {least} is needed")
        for what, value in (("budget", budget), ("hysteresis", hysteresis), ("decay", decay)):
            top = 1 if what == "decay" else math.inf
            if not (isinstance(value, int | float) and 0 <= value < top):
                span = "a number in [0, 1)" if what == "decay" else "a finite number from 0"
                raise ConfigError(f"Router: {what} is {value!r}, but {span} is needed")
        self.layers, self.pins = dict(layers), check_route(pins or {}, "pins")
        self.buckets, self.budget, self.hysteresis = buckets, float(budget), float(hysteresis)
        self.batch, self.decay, self.ahead = batch, float(decay), ahead
        self._settle_pins()
        self.unmatched = unmatched([self.pins], self.layers)  # sentences about pins that do nothing
        self._start = self._first(start)
        self.decisions: list[Decision] = []
        self._held: dict[str, tuple[int, int | None, str]] = {}
        self._forget()

    def _settle_pins(self) -> None:
        self._fixed: dict[str, tuple[str, str]] = {}
        self.fast = "fp4"
        for name, info in self.layers.items():
            pinned, self.fast, reason = free_track(self.pins, name)
            if pinned is not None:
                self._fixed[name] = pinned, reason
            elif not info.certified:
                self._fixed[name] = SLOW, "its product has no certificate, and no pattern but '*' names it"

    def _first(self, start: str | RouteSet) -> list[dict[str, str]]:
        """Routes before the first decision: of each bucket, then of training."""
        if isinstance(start, str):
            if start not in (SLOW, *FAST):
                raise ConfigError(f"Router: start is {start!r}{nearest(start, (SLOW, *FAST))}")
            given = [{"*": start}] * (self.buckets + 1)
        elif len(start.buckets) not in (1, self.buckets):
            raise ConfigError(
                f"Router: start has routes of {len(start.buckets)} buckets, but buckets is {self.buckets}; "
                "save them with as many, or set loop.buckets"
            )
        else:
            each = start.buckets * (self.buckets // len(start.buckets))
            given = [*each, start.training]
        return [
            {n: self._fixed[n][0] if n in self._fixed else match_route(route, n) for n in self.layers}
            for route in given
        ]

    def _forget(self) -> None:
        self._omega: dict[str, Average] = {}
        self._by_bucket: list[dict[str, Average]] = [{} for _ in range(self.buckets)]
        self._variance: dict[str, float] = {}
        self._noise: dict[str, float] = {}
        self._latency: dict[str, dict[str, Average]] = {}
        self._loss = Average(self.decay)
        # Why layers have no usable omega: at all noise levels, then of each bucket
        self._broken: list[dict[str, str]] = [{} for _ in range(self.buckets + 1)]
        self._demoted: dict[str, str] = {}

    @property
    def free(self) -> list[str]:
        """Names of the layers that are decided about."""
        return [name for name in self.layers if name not in self._fixed]

    def pinned(self, name: str) -> str | None:
        """Why a layer is not decided about; None if it is."""
        return self._fixed[name][1] if name in self._fixed else None

    # ---- what is observed ----
    def observe(
        self,
        step: int,
        *,
        omega: Mapping[str, float] | Sequence[Mapping[str, float] | None] | None = None,
        bucket: int | None = None,
        loss: float | None = None,
        variance: Mapping[str, float] | None = None,
        noise: Mapping[str, float] | None = None,
        demoted: Mapping[str, Any] | Collection[str] | None = None,
        latency: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Take in what a sampled step has measured; what is left out stays as it was.

        Args:
            step: at which, for the reasons.
            omega: predicted rise of the loss of each layer (in its units; estimates may be negative), at all
                noise levels, or at those of `bucket`; a list has one mapping, or None, for each bucket. A
                layer whose omega is not finite stays on BF16 until one of the same levels is.
            loss: of the step; one that is not finite is left out.
            variance: tr Sigma of each layer's gradient, a picture. noise: n of each, the norm of what FP4
                changes in its gradient. Both as `GradientVariance` and `Demotion` have averaged them: the
                last ones count, for an average of averages would lag. Where both are known, FP4 costs more
                in a layer whose gradient it disturbs more than drawing another batch does (`settle`).
            demoted: layers whose gradient drowns in the noise of FP4, with (|g|, n) if it is a mapping; they
                replace those of the last call.
            latency: microseconds {layer: {track: time}}.

        Raises `ValueError` for a name that is no layer, a bucket that is not there, and a negative latency.
        """
        for what, given in (("omega", omega), ("variance", variance), ("noise", noise),
                            ("demoted", demoted), ("latency", latency)):  # fmt: skip
            self._known(what, given)
        _check_latency(latency or {})
        if isinstance(omega, Mapping):
            self._take_omega(step, omega, bucket)
        elif omega is not None:
            if len(omega) != self.buckets or bucket is not None:
                raise ValueError(
                    f"Router: omega is a list of {len(omega)}, but a list has one for each of the "
                    f"{self.buckets} buckets, and no bucket= beside it"
                )
            for i, part in enumerate(omega):
                self._take_omega(step, part or {}, i)
        if loss is not None and math.isfinite(loss):
            self._loss.update(float(loss))
        for held, given in ((self._variance, variance), (self._noise, noise)):
            held |= {name: float(value) for name, value in (given or {}).items() if math.isfinite(value)}
        if demoted is not None:
            self._demoted = {name: _demotion(step, name, demoted) for name in demoted}
        self._take_latency(latency or {})

    def forget_gradients(self) -> None:
        """Drop what was observed of gradients (variance, noise, demoted): another objective begins."""
        self._variance, self._noise, self._demoted = {}, {}, {}

    def _known(self, what: str, given: Any) -> None:
        for part in given if what == "omega" and not isinstance(given, Mapping | type(None)) else [given]:
            for name in part or ():
                if name not in self.layers:
                    raise ValueError(
                        f"Router: {what} names {name!r}, which is no layer here{nearest(name, self.layers)}"
                    )

    def _take_omega(self, step: int, omega: Mapping[str, float], bucket: int | None) -> None:
        averages = self._omega if bucket is None else self._bucket(self._by_bucket, bucket)
        broken = self._broken[0 if bucket is None else bucket + 1]
        for name, value in omega.items():
            if math.isfinite(value):
                broken.pop(name, None)
                averages.setdefault(name, Average(self.decay)).update(float(value))
            else:
                broken[name] = f"its sensitivity was {float(value)} at step {step}"

    def _take_latency(self, latency: Mapping[str, Mapping[str, float]]) -> None:
        for name, by_track in latency.items():
            held = self._latency.setdefault(name, {})
            for track, value in by_track.items():
                held.setdefault(track, Average(self.decay)).update(float(value))

    def _bucket(self, parts: Sequence[Any], bucket: int) -> Any:
        if not (isinstance(bucket, int) and 0 <= bucket < self.buckets):
            raise ValueError(f"Router: bucket is {bucket!r}, but there are 0 to {self.buckets - 1}")
        return parts[bucket]

    # ---- what is known ----
    def omega(self, name: str, bucket: int | None = None) -> float | None:
        """Moving average of a layer's omega at all levels, or of a bucket; None if never observed.

        Without an observation at all levels it is the mean over the buckets that have one, for they hold
        equally many levels.
        """
        if bucket is not None:
            held = self._bucket(self._by_bucket, bucket).get(name)
            return None if held is None else held.value
        if name in self._omega:
            return self._omega[name].value
        known = [part[name].value for part in self._by_bucket if name in part]
        return math.fsum(known) / len(known) if known else None

    def saved_us(self, name: str) -> float | None:
        """Microseconds that the fast track saves on a layer; None unless both tracks have been timed."""
        held = self._latency.get(name, {})
        if SLOW not in held or self.fast not in held:
            return None
        return held[SLOW].value - held[self.fast].value

    def disturbance(self, name: str) -> float | None:
        """n^2 / (tr Sigma / B): how much more FP4 disturbs the gradient of a step than its sampling does.

        None if unknown: an estimate of the variance can be 0 or less, which says nothing. n: of a batch.
        """
        if name not in self._noise or name not in self._variance:
            return None
        n, variance = self._noise[name], self._variance[name]
        ratio = n * n * self.batch / variance if variance > 0 else math.inf
        return ratio if math.isfinite(ratio) else None

    # ---- decisions ----
    def decide(self, step: int, factor: float = 1.0) -> Decision:
        """Settle the routes from step + ahead on. factor: on the budget, what the closed loop says.

        Where a decision of that step was replayed, it is that one. Raises `ValueError` for a step before the
        last decision's.
        """
        for held in self.decisions:
            if held.step == step:
                return held
        if self.decisions and step < self.decisions[-1].step:
            raise ValueError(
                f"Router: decide({step}) comes after the decision of step {self.decisions[-1].step}; decide "
                "in the order of the steps"
            )
        if not (math.isfinite(factor) and factor >= 0):
            raise ValueError(f"Router: factor is {factor!r}, but a finite number from 0 is needed")
        decision = settle(self._inputs(step, float(factor)))
        # Of the past only what is in force is needed
        self.decisions = [*self._since(step), decision]
        return decision

    def _inputs(self, step: int, factor: float) -> dict[str, Any]:
        free = self.free
        timed = all(self.saved_us(name) is not None for name in free)
        before = self._planned(step + self.ahead)
        known = {name: why for part in (*reversed(self._broken), self._demoted) for name, why in part.items()}
        held = {name: reason for name, reason in known.items() if name in free}
        # One that is held for a while returns by itself: what it has won is not taken from it meanwhile
        held |= {n: why for n, (_, until, why) in self._held.items() if until is None}
        return {
            "step": step, "holds_from": step + self.ahead, "budget": self.budget, "factor": factor,
            "hysteresis": self.hysteresis, "loss": self._loss.value, "fast": self.fast,
            "unit": "us" if timed else "MFLOP", "order": list(self.layers),
            "fixed": {name: list(value) for name, value in self._fixed.items()}, "held": held,
            "layers": {
                name: {
                    "omega": [self.omega(name, i) for i in range(self.buckets)], "all": self.omega(name),
                    # Where a time is missing, operations stand for all of them
                    "saved": self.saved_us(name) if timed else self.layers[name].flops / 1e6,
                    "flops": self.layers[name].flops, "disturbance": self.disturbance(name),
                }
                for name in free
            },
            "before": before[:-1], "before_training": before[-1],
        }  # fmt: skip

    def _since(self, step: int) -> list[Decision]:
        """The decision in force at `step`, and those after it."""
        past = [i for i, d in enumerate(self.decisions) if d.holds_from <= step]
        return self.decisions[past[-1] :] if past else list(self.decisions)

    def in_force(self, step: int) -> Decision | None:
        """The decision that `step` runs on, None before the first."""
        return next((d for d in reversed(self.decisions) if d.holds_from <= step), None)

    def _planned(self, step: int) -> list[dict[str, str]]:
        """Routes of each bucket, then of training, as decided, without what is held on BF16 for a while."""
        decision = self.in_force(step)
        return self._start if decision is None else [*decision.routes, decision.training]

    def route(self, step: int, bucket: int | None = None) -> dict[str, str]:
        """The track of every layer at `step`: of a bucket of noise levels, or None: of training.

        A route for `Module.apply_route`.
        """
        planned = self._planned(step)
        route = dict(planned[-1] if bucket is None else self._bucket(planned[:-1], bucket))
        route |= dict.fromkeys(self.held(step), SLOW)
        return route | {name: track for name, (track, _) in self._fixed.items()}

    def demote(self, step: int, name: str, reason: str, until: int | None = None) -> bool:
        """Hold a layer on BF16 from `step` on, at once, until before the step `until` (None: for good).

        Afterwards it is back on the track that decisions give it. Returns False for a layer that the user has
        pinned, which stays as it is.
        """
        self._known("demote", [name])
        if until is not None and until <= step:
            raise ValueError(f"Router: until is {until}, but it must come after step {step}")
        if name in self._fixed:
            return False
        held = self._held.get(name)
        if held is not None and held[0] <= step and (held[1] is None or held[1] > step):
            # Both hold: from the first on, until the later
            until = None if None in (held[1], until) else max(held[1], until)
            step = held[0]
        self._held[name] = step, until, reason
        return True

    def held(self, step: int) -> dict[str, str]:
        """Layers that `demote` holds on BF16 at `step`, with the reasons."""
        return {
            name: reason
            for name, (start, until, reason) in self._held.items()
            if start <= step and (until is None or step < until)
        }

    def replay(self, data: Mapping[str, Any]) -> Decision:
        """Take a decision that was written down (`Decision.to_dict`), without measuring or deciding anything.

        It takes the place of one of the same step. Raises `ConfigError` if it is of another network.
        """
        decision = Decision.from_dict(data)
        routes = [*decision.routes, decision.training]
        if len(routes) != self.buckets + 1:
            raise ConfigError(
                f"Router: the decision of step {decision.step} has {len(decision.routes)} buckets, but there "
                f"are {self.buckets}; replay it with loop.buckets={len(decision.routes)}"
            )
        for route in routes:
            check_route(route, f"route: the decision of step {decision.step}")
            if set(route) != set(self.layers):
                other = sorted(set(route) ^ set(self.layers))[0]
                raise ConfigError(
                    f"Router: the decision of step {decision.step} is of another network: they differ in "
                    f"{other!r}"
                )
        others = [d for d in self.decisions if d.step != decision.step]
        self.decisions = sorted([*others, decision], key=lambda d: d.step)
        return decision

    # ---- what is told ----
    def fp4_share(self, step: int, bucket: int | None = None) -> float:
        """Share of the network's operations that is not on BF16 at `step`, in [0, 1]."""
        route, total = self.route(step, bucket), math.fsum(info.flops for info in self.layers.values())
        fast = math.fsum(info.flops for name, info in self.layers.items() if route[name] in FAST)
        return fast / total if total > 0 else 0.0

    def routes_at(self, step: int, **about: Any) -> RouteSet:
        """The routes of `step` for `save_routes`; about: what is kept with them."""
        parts = [self.route(step, i) for i in range(self.buckets)]
        about = {"step": step, "fp4_share": self.fp4_share(step), **about}
        return RouteSet(parts, self.route(step), about)

    def explain(self, step: int | None = None, bucket: int | None = None) -> str:
        """A table: of each layer the track, what it costs and saves, its share of the operations, and why;
        and the pins that match no layer.

        step: by default the first that the last decision holds for.
        """
        if step is None:
            step = self.decisions[-1].holds_from if self.decisions else 0
        return explain(self, step, bucket)

    # ---- state ----
    def state(self) -> dict[str, Any]:
        """Everything, as plain values for JSON; `restore` takes it back to the bit."""

        def plain(averages: Mapping[str, Average]) -> dict:
            return {name: a.state() for name, a in averages.items()}

        return {
            "buckets": self.buckets, "layers": list(self.layers), "omega": plain(self._omega),
            "by_bucket": [plain(part) for part in self._by_bucket], "variance": dict(self._variance),
            "noise": dict(self._noise), "latency": {n: plain(held) for n, held in self._latency.items()},
            "loss": self._loss.state(), "broken": [dict(part) for part in self._broken],
            "demoted": dict(self._demoted), "held": {n: list(value) for n, value in self._held.items()},
            "decisions": [d.to_dict() for d in self.decisions],
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state()` described. Raises `ConfigError` if it is of another network or as many
        buckets.
        """
        if state["buckets"] != self.buckets or state["layers"] != list(self.layers):
            raise ConfigError(
                f"Router: the state is of {len(state['layers'])} layers and {state['buckets']} buckets, but "
                f"there are {len(self.layers)} and {self.buckets}; restore it into a router of the same run"
            )

        def made(averages: Mapping[str, Any]) -> dict[str, Average]:
            return {name: Average.of(self.decay, *value) for name, value in averages.items()}

        self._omega, self._by_bucket = made(state["omega"]), [made(part) for part in state["by_bucket"]]
        self._variance, self._noise = dict(state["variance"]), dict(state["noise"])
        self._latency = {name: made(held) for name, held in state["latency"].items()}
        self._loss = Average.of(self.decay, *state["loss"])
        self._broken, self._demoted = [dict(part) for part in state["broken"]], dict(state["demoted"])
        self._held = {name: tuple(value) for name, value in state["held"].items()}
        self.decisions = [Decision.from_dict(d) for d in state["decisions"]]


def _demotion(step: int, name: str, demoted: Any) -> str:
    if not isinstance(demoted, Mapping):
        return f"its gradient drowned in the noise of FP4 at step {step}"
    norm, noise = (float(v) for v in demoted[name])
    return f"gradient {norm:.3g} under sqrt(3) times the noise of FP4, {noise:.3g}, at step {step}"


def _check_latency(latency: Mapping[str, Mapping[str, float]]) -> None:
    for name, by_track in latency.items():
        for track, value in by_track.items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"Router: latency of {name} on {track} is {value}, but microseconds from 0 are needed"
                )
