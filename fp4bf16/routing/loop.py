"""The closed loop: kernels' latency, router and loss feed one another while a network is trained.

    loop = ClosedLoop(unet, route, settings, timesteps, seed, batch)
    for number in ...:
        with loop.step(number):                      # the route in force, and who watches its products
            if loop.sampled(number):
                loop.observe(number, ...)            # both tracks' gradients of the same pictures
            result = loop.checked(once, gradients)   # again, with violating layers on BF16
        update the weights
        loop.after(number, moments)                  # now and then a decision, for the steps after

Latency moves the router's thresholds, since it allocates by microseconds saved a unit of loss; the measured
consistency moves its budget (`Feedback`); the constraint takes layers to BF16 within the step. An engine on
any device drives it through the same calls; nothing here runs the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..consistency import Consistency, Constraint, Sketcher
from ..errors import ConfigError, NonFiniteError
from ..nn.watch import Watcher, watching
from ..tracks import match_route
from .decision import SLOW, Decision
from .feedback import Feedback
from .latency import modelled
from .observing import Observing
from .pins import FAST, layers_of, unmatched
from .router import Router
from .routes import RouteSet, check_route

FORWARDS = ("fp4", "router")
_SKETCH_EVERY = 20  # products to one that is estimated


class Tolerant(Watcher):
    """Products that the FP4 quantiser refuses, for NaN or Inf, run on BF16: for passes that only look."""

    def refused(self, layer: Any, x: Any, run: Callable[[str], Any], error: Exception) -> Any:
        return run(SLOW)


class ClosedLoop(Observing):
    """Which track each layer runs on at each step of a training, from what the training itself shows.

    Args:
        unet: the network (`UNet2D`), on the host or a device; `apply_route` is called on it.
        route: the user's {pattern: track}. With ``forward="router"`` it pins layers, and "*" names the track
            that the others may go to (`free_track`); with "fp4" it is what runs.
        settings: the section ``loop`` of a run's configuration, or anything with its fields.
        timesteps: noise levels of the schedule, 0..timesteps-1. seed: of all that is drawn. batch: pictures
            of a training step.
        routes: with "router" what runs before the first decision (else BF16 where nothing is pinned), with
            "fp4" what runs instead of `route`.
        shape: (h, w, c) of the network's input, by default its own size.

    Attributes: `number`, of the next step; `router`, `constraint`, `consistency`, `sketcher`, `feedback`,
    `variance`, `demotion`; `decisions`, those that still matter; `events`, dicts that are not logged yet
    (`drain`); `track`, None: the network runs on the route in force.

    Raises `ConfigError` for settings that cannot be.

    >>> from types import SimpleNamespace
    >>> from fp4bf16.nn import UNet2D, UNetConfig
    >>> settings = SimpleNamespace(
    ...     forward="fp4", sensitivity="fisher", budget=0.02, every=20, decide=100, curvature_every=500,
    ...     probes=8, buckets=1, hysteresis=0.25, limit=0.0, jump=8.0, cooldown=50, consistency=0.0,
    ...     consistency_layers=4, target=0.02, feedback=True, latency="model")
    >>> unet = UNet2D(UNetConfig.tiny())
    >>> loop = ClosedLoop(unet, {"conv_in*": "bf16", "*": "fp4"}, settings, 1000, 0, batch=2)
    >>> x = np.linspace(-1, 1, 2 * 8 * 8 * 12, dtype=np.float32).reshape(2, 8, 8, 12)
    >>> with loop.step(0):
    ...     y = loop.checked(lambda: unet(x, 10))
    >>> loop.after(0)
    >>> line = loop.line()
    >>> 0.9 < line["fp4_share"] < 1, 0 < line["certified_mean"] < 1, line["held"]
    (True, True, {})
    """

    track: str | None = None

    def __init__(
        self,
        unet: Any,
        route: Mapping[str, str],
        settings: Any,
        timesteps: int,
        seed: int,
        batch: int,
        *,
        routes: RouteSet | None = None,
        shape: Sequence[int] | None = None,
    ):
        if settings.forward not in FORWARDS:
            raise ConfigError(
                f"loop.forward: is {settings.forward!r}, but a loop runs its forward on fp4 or router; with "
                f"bf16 make none"
            )
        s, self.unet, self.settings, self.timesteps = settings, unet, settings, int(timesteps)
        self.deciding, self._given = s.forward == "router", routes
        self.route_given = check_route(route)
        shape = None if shape is None else (batch, *shape)
        layers = layers_of(unet, shape)
        fixed = RouteSet([self.route_given]) if routes is None else routes
        self._plain = RouteSet(
            [{n: match_route(r, n) for n in layers} for r in fixed.buckets],
            {n: match_route(fixed.training, n) for n in layers},
        )
        self.router = Router(
            layers, self.route_given if self.deciding else self._plain.training, s.buckets, s.budget,
            s.hysteresis, batch=batch, start=SLOW if routes is None or not self.deciding else routes,
        )  # fmt: skip
        self.router.unmatched = unmatched([self.route_given, *fixed.buckets, fixed.training], layers)
        if self.deciding and s.latency == "model":
            self.router.observe(0, latency=modelled(unet, shape, tracks=(SLOW, self.router.fast)))
        self.constraint = Constraint(s.limit, s.jump, s.cooldown)
        self.consistency = Consistency(s.consistency, s.consistency_layers, seed)
        self.sketcher = Sketcher(_SKETCH_EVERY, seed)
        self.feedback = Feedback(s.target, s.feedback)
        self.renew()
        self.number, self._at, self._soonest = 0, 0, 0
        self.events: list[dict[str, Any]] = []
        self.traces: dict[str, float] = {}
        self._frozen: dict[str, str] | None = None
        self._current: dict[str, str] = {}
        self._weights: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._fallbacks = 0

    # ---- when ----
    def expect(self, steps: int) -> str:
        """The run has `steps` steps in all: a router's first decision comes after a quarter of them at the
        latest, for before it nothing leaves BF16. Say it before the first step, and again on resume.

        Returns a sentence where that is sooner than ``every``, or cannot be; else "".
        """
        soon, every = max(1, steps // 4), self.settings.every
        if not self.deciding or soon >= every or steps < 1:
            return ""
        few = f"loop.every: is {every}, but the run has {steps} step{'s' * (steps > 1)} of training in all"
        if steps == 1:
            return f"{few} and none after a decision of the router; train longer, or use loop.forward=fp4"
        self._soonest = soon
        return (
            f"{few}; until the router has decided, nothing leaves the track that it begins on, so its first "
            f"decision comes after step {soon}; to have more of them use loop.every={soon} "
            f"loop.decide={soon} loop.curvature_every={soon}, or train longer"
        )

    def sampled(self, number: int | None = None) -> bool:
        """Whether a step looks at both tracks: the last of every ``every``, and that of the first decision
        where it comes sooner (`expect`); by default the present one.
        """
        number = self._at if number is None else number
        return (number + 1) % self.settings.every == 0 or number + 1 == self._soonest

    def decides(self, number: int | None = None) -> bool:
        """Whether a step ends with a decision: the last of every ``decide``, and the first sampled one."""
        number = self._at if number is None else number
        if not (self.deciding and self.sampled(number)):
            return False
        first = all(d.step >= number for d in self.router.decisions)
        return first or (number + 1) % self.settings.decide == 0

    def curves(self, number: int | None = None) -> bool:
        """Whether a step is to measure the curvature: `observe` is then given `traces`."""
        number = self._at if number is None else number
        if not (self.deciding and self.sampled(number)) or self.settings.sensitivity in ("outputs", "fisher"):
            return False
        return not self.traces or (number + 1) % self.settings.curvature_every == 0

    def clocks(self, number: int | None = None) -> bool:
        """Whether a step is to measure latencies, as every step that decides from measured ones."""
        return self.settings.latency == "measured" and self.decides(number)

    # ---- routes ----
    @property
    def decisions(self) -> list[Decision]:
        """The decision in force and those to come."""
        return self.router.decisions

    def route(self, number: int | None = None, bucket: int | None = None) -> dict[str, str]:
        """The track of every layer at a step (by default the next), in training or in a bucket of noise
        levels, with what is held on BF16.
        """
        number = self.number if number is None else number
        if bucket is None and self._frozen is not None:
            route = dict(self._frozen)
        else:
            route = self.router.route(number, bucket) if self.deciding else self._plain.of(bucket)
        return route | {n: SLOW for n in self.constraint.held(number) if route.get(n) in FAST}

    def routes(self, number: int | None = None) -> RouteSet:
        """The routes that pictures are drawn on at a step, one a bucket, and training's.

        Before the first decision of a router that was given no routes they are the user's, which explored
        before there was a router.
        """
        number = self.number if number is None else number
        training = self.route(number)
        if self.deciding and self._given is None and self.router.in_force(number) is None:
            held = self.constraint.held(number)
            user = {n: SLOW if n in held and t in FAST else t for n, t in self._plain.training.items()}
            return RouteSet([user], training)
        count = self.settings.buckets if self.deciding else len(self._plain.buckets)
        return RouteSet([self.route(number, i) for i in range(count)], training)

    def slow_route(self) -> dict[str, str]:
        """The route in force with every layer that is decided about on BF16."""
        return self.route(self._at) | dict.fromkeys(self.free, SLOW)

    def fast_route(self) -> dict[str, str]:
        """The route in force with every layer that is decided about on the fast track."""
        return self.route(self._at) | dict.fromkeys(self.free, self.router.fast)

    def share(self, route: Mapping[str, str]) -> float:
        """Share of the network's operations that `route` has not on BF16, in [0, 1]."""
        total = math.fsum(info.flops for info in self.router.layers.values())
        fast = math.fsum(info.flops for n, info in self.router.layers.items() if route[n] in FAST)
        return fast / total if total > 0 else 0.0

    @contextmanager
    def routed(self, route: Mapping[str, str], *watchers: Watcher) -> Iterator[None]:
        """Run inside on `route`, watched by `watchers` alone, then on the route in force again."""
        before = {m.key: m.track for _, m in self.unet.named_modules() if getattr(m, "routed", False)}
        self.unet.apply_route(route)
        try:
            with watching(*watchers, Tolerant()):
                yield
        finally:
            self.unet.apply_route(before)

    def freeze(self) -> None:
        """Hold training's route as it is for the next step, until `thaw`, whatever is decided meanwhile: for
        objectives that compare a policy with what it said before. Violations still take layers to BF16.
        """
        self._frozen = None
        self._frozen = self.route(self.number)

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._frozen = None

    # ---- a step ----
    @contextmanager
    def step(self, number: int | None = None) -> Iterator[ClosedLoop]:
        """One training step: its route is applied, and the watchers are in force inside.

        Raises `ValueError` for a number before the next one's.
        """
        number = self.number if number is None else number
        if number < self.number:
            raise ValueError(f"ClosedLoop: step {number} has been made; the next one is {self.number}")
        self._at, self._weights, self._fallbacks = number, [], 0
        self._attempt()
        with watching(*self.watchers()):
            yield self

    def watchers(self) -> tuple[Watcher, ...]:
        """Who watches the products of the present step."""
        bare = self.constraint.limit == 0 and self.constraint.jump == 0
        if bare and not self.sampled():
            return (Tolerant(),)  # nothing to be held to: certificates on sampled steps alone
        return self.constraint, self.sketcher, self.consistency

    def _attempt(self) -> None:
        """Begin the present step, or begin it again."""
        self.constraint.begin(self._at)
        self.sketcher.begin(self._at)
        self._current = self.unet.apply_route(self.route(self._at))
        fast = [n for n, t in self._current.items() if t in FAST and self.router.layers[n].certified]
        self.consistency.begin(self._at, fast if self.sampled() else [])

    def checked(
        self,
        once: Callable[[], Any],
        gradients: Callable[[], Mapping[str, Any]] | None = None,
        violations: Callable[[], Mapping[str, str]] | None = None,
    ) -> Any:
        """What ``once()`` returns: forward and backward of the step, made again with the layers that violate
        the constraint on BF16, until none does.

        Args:
            once: leaves the gradients in place; it may be called as often as there are layers.
            gradients: {layer: array} after it, to be looked through for what is not finite.
            violations: {layer: reason} that the engine has found itself.

        A layer that was found stays on BF16 for ``cooldown`` steps more; each is an event. Call it within
        `step`.
        """
        for _ in self.router.layers:
            try:
                result = once()
                found = self.constraint.violations(None if gradients is None else gradients())
                found |= dict(violations()) if violations is not None else {}
                found |= self._not_finite(gradients)
            except NonFiniteError:  # of a layer that is no product, which nobody watches
                found = self._refused()
                if not found:
                    raise
            found = {n: why for n, why in found.items() if self._current.get(n) in FAST}
            if not found:
                return result
            self._hold(found)
            self._attempt()
        return once()

    def _refused(self) -> dict[str, str]:
        """The layers that may have met NaN or Inf in their quantiser."""
        fast = [n for n, t in self._current.items() if t in FAST]
        unseen = [n for n in fast if not self.router.layers[n].certified]
        known = self.constraint.violations(None)
        return known | dict.fromkeys(unseen or fast, "NaN or Inf met its quantiser")

    def _not_finite(self, gradients: Callable[[], Mapping[str, Any]] | None) -> dict[str, str]:
        """Layers without a certificate in this step are not the constraint's to judge."""
        given = {} if gradients is None else gradients()
        return {
            n: "its gradient is not finite" for n, g in given.items()
            if self._current.get(n) in FAST and n not in self.constraint.ratios and not np.isfinite(g).all()
        }  # fmt: skip

    def _hold(self, found: Mapping[str, str]) -> None:
        number, last = self._at, self._at + self.settings.cooldown
        self.constraint.punish(number, found)
        self._fallbacks += len(found)
        for name, reason in found.items():
            if self.deciding:
                self.router.demote(number, name, reason, last + 1)
            self.events.append(
                {"event": "held", "step": number, "layer": name, "reason": reason, "until": last + 1}
            )

    # ---- after a step ----
    def after(
        self,
        number: int | None = None,
        moments: Mapping[str, Any] | None = None,
        batch: int | None = None,
    ) -> Decision | None:
        """The step is over: sensitivities go to the router, the consistency to the budget, and a step that
        decides does so. Returns the decision.

        moments: {layer: Adam's second moment, corrected for its start}, of a batch of `batch` pictures (by
        default the loop's); needed on sampled steps of ``sensitivity="fisher"`` whose `observe` was given no
        squares.
        """
        number = self._at if number is None else number
        measured = list(self.consistency.by_layer.values())
        if self.sampled(number):
            self.feedback.update(self.consistency.term if measured else None)
            for of in self._weights if self.deciding else ():
                self.router.observe(
                    number, omega=self._omegas(of, moments, batch or self.router.batch), bucket=of["bucket"]
                )
        decision = None
        if self.decides(number):
            decision = self.router.decide(number, self.feedback.factor)
            # What no step to come runs on is let go, so that a resumed run holds what this one does
            now = self.router.in_force(number + 1)
            kept = [d for d in self.router.decisions if d is now or d.holds_from > number + 1]
            self.router.decisions = kept
            self.events.append({"event": "decision", **decision.to_dict()})
        ratios = [r for r in self.constraint.ratios.values() if math.isfinite(r)]
        self._steps.append({
            "share": self.share(self._current or self.route(number)), "ratios": ratios,
            "consistency": self.consistency.term if measured else None, "fallbacks": self._fallbacks,
            "estimates": list(self.sketcher.estimates.values()), "held": self.constraint.held(number),
        })  # fmt: skip
        self.number, self._weights, self._fallbacks = number + 1, [], 0
        return decision

    # ---- what is told ----
    def line(self) -> dict[str, Any]:
        """Numbers of the steps since the last call, for a line of the metrics.

        fp4_share: mean share of the operations not on BF16. budget: share of the loss that FP4 may add, with
        budget_factor, which the feedback moves. consistency: mean over the sampled steps, None without one.
        certified_max, certified_mean: certified ratios of all products; estimated_max: of the sketched ones.
        fallbacks: layers that a step was made again for. held: {layer: reason} on BF16 in the last step.
        """
        steps, self._steps = self._steps, []
        ratios = [r for s in steps for r in s["ratios"]]
        apart = [s["consistency"] for s in steps if s["consistency"] is not None]
        estimates = [e for s in steps for e in s["estimates"]]
        factor = self.feedback.factor
        return {
            "fp4_share": _mean([s["share"] for s in steps]),
            "budget": self.settings.budget * factor if self.deciding else None,
            "budget_factor": factor if self.deciding else None,
            "consistency": _mean(apart),
            "certified_max": max(ratios, default=None), "certified_mean": _mean(ratios),
            "estimated_max": max(estimates, default=None),
            "fallbacks": sum(s["fallbacks"] for s in steps),
            "held": dict(steps[-1]["held"]) if steps else {},
        }  # fmt: skip

    def drain(self) -> list[dict[str, Any]]:
        """The events since the last call, for lines of their own: decisions, and layers held on BF16."""
        events, self.events = self.events, []
        return events

    def explain(self, number: int | None = None, bucket: int | None = None) -> str:
        """`Router.explain` of the next step."""
        return self.router.explain(self.number if number is None else number, bucket)

    # ---- state ----
    def state(self) -> dict[str, Any]:
        """Everything between two steps, as plain values for JSON; `restore` takes it back to the bit."""
        return {
            "number": self.number, "router": self.router.state(), "constraint": self.constraint.state(),
            "feedback": self.feedback.state(), "variance": self.variance.state(),
            "demotion": self.demotion.state(), "traces": _named(self.traces),
            "frozen": None if self._frozen is None else dict(self._frozen),
            "sketched": [self.sketcher.calls, self.sketcher.sketches],
        }  # fmt: skip

    def restore(self, state: Mapping[str, Any]) -> None:
        """Become what `state` described. Raises `ConfigError` where it is of another network or no state."""
        try:
            self.router.restore(state["router"])
            self.constraint.restore(state["constraint"])
            self.feedback.restore(state["feedback"])
            self.variance.restore(state["variance"])
            self.demotion.restore(state["demotion"])
            self.number = self._at = int(state["number"])
            self.traces = {str(n): float(v) for n, v in state["traces"].items()}
            self._frozen = None if state["frozen"] is None else dict(state["frozen"])
            self.sketcher.calls, self.sketcher.sketches = (int(n) for n in state["sketched"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"ClosedLoop: the state lacks what is needed or holds something else ({error!r}); pass what "
                f"state() gave"
            ) from None
        self.events, self._steps, self._weights, self._current = [], [], [], {}

    def replay(self, decisions: Sequence[Mapping[str, Any]]) -> int:
        """Take decisions of steps to come that an interrupted process has made (`Decision.to_dict`): they
        will not be made anew, for what they were made from may depend on the clock. Returns how many.
        """
        if not self.deciding:
            return 0
        coming = [d for d in decisions if isinstance(d.get("step"), int) and d["step"] >= self.number]
        for decision in coming:
            self.router.replay(decision)
        return len(coming)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _named(values: Mapping[str, float]) -> dict[str, float | str]:
    """JSON has no infinity and no NaN: these by name, which float() reads."""
    return {n: v if math.isfinite(v) else str(v) for n, v in values.items()}
