"""The closed loop in the engine on the CPU: injected faults, training, every objective, settings."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from bases import base_data
from often import in_ci

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from test_engine import SHORT, rollout_of, seed  # noqa: E402

from fp4bf16.errors import ConfigError  # noqa: E402
from fp4bf16.nn.watch import tap  # noqa: E402
from fp4bf16.routing import RouteSet  # noqa: E402
from fp4bf16.train.config import get_preset, override  # noqa: E402
from fp4bf16.train.data import Vocabulary, load_pairs  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.engine import make_engine  # noqa: E402
from fp4bf16.train.exploring import MakeDraw, weights_of  # noqa: E402
from fp4bf16.train.policy import batches, make_data  # noqa: E402
from fp4bf16.tune import LatencyTable  # noqa: E402

ROUTER = ["loop.forward=router", "loop.every=2", "loop.decide=4", "loop.curvature_every=4", "loop.cooldown=5"]
LAYER, UNDER = "up_blocks.0.resnets.1.conv1.weight", "up_blocks.0.resnets.1.norm1.weight"
EVERYWHERE = 'route={"*": "fp4"}'


def configured(*more: str):
    return override(get_preset("ci"), [*SHORT, *ROUTER, *more])


class Base:
    """Base training step by step."""

    def __init__(self, *more: str):
        self.config = configured(*more)
        pairs = load_pairs(self.config.size).select(role="policy", word=self.config.word)
        model = Denoiser(self.config, Vocabulary.of(pairs.captions))
        self.engine = make_engine("cpu", model, self.config)
        self.data = base_data(pairs, model, lambda purpose: len(purpose))
        self.loop, self.number = self.engine.loop, 0

    def steps(self, count: int) -> list[float]:
        found = []
        for _ in range(count):
            found.append(self.engine.base_step(self.data, self.number, 3e-3).loss)
            self.number += 1
        return found

    def layer(self, name: str = LAYER):
        return next(m for _, m in self.engine.model.unet.named_modules() if getattr(m, "key", "") == name)

    def parameter(self, name: str = LAYER) -> np.ndarray:
        return self.engine.parameters.views(self.engine.parameters.data)[name]

    def healthy(self) -> bool:
        return bool(np.isfinite(self.engine.parameters.data).all())


# ---- faults -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["router", "fp4"])
def checkpointed(request):
    """How to make a run that has been on FP4 for long enough that the averages of norms are known."""
    setting = f"loop.forward={request.param}"
    first = Base(setting)
    first.steps(12)
    arrays = {name: a.copy() for name, a in first.engine.state().items()}
    state = json.dumps(first.loop.state())

    def again() -> Base:
        base = Base(setting)
        base.engine.restore(arrays, first.number, aligning=False)
        base.loop.restore(json.loads(state))
        base.number = first.number
        return base

    return again


@pytest.fixture
def trained(checkpointed) -> Base:
    base = checkpointed()
    assert base.loop.route()[LAYER] == "fp4" and base.loop.constraint.held(base.loop.number) == {}
    return base


def survived(base: Base, number: int, names: set[str]) -> dict[str, str]:
    """Some of `names` went to BF16 in step `number` itself, with an event each; training goes on, and after
    the cooldown the layers come back. Returns the reasons.
    """
    held = base.loop.constraint.held(number)
    assert names <= set(held), held
    events = {e["layer"]: e for e in base.loop.drain() if e["event"] == "held" and e["step"] == number}
    assert set(events) == set(held) and {e["until"] for e in events.values()} == {number + 6}
    assert all(base.layer(name).track == "bf16" for name in names)
    assert base.loop.line()["fallbacks"] >= len(names)
    losses = base.steps(5)
    assert all(map(math.isfinite, losses)) and base.healthy()
    assert all(base.loop.route(number + 5).get(n) == "bf16" for n in names)
    return held


def test_weights_of_a_layer_times_1000(trained):
    trained.parameter()[...] *= 1000
    trained.engine.parameters.touch()
    number, before = trained.loop.number, trained.engine.updates
    trained.steps(1)
    held = survived(trained, number, {LAYER})
    assert "norm of its" in held[LAYER] and trained.engine.updates == before + 6


def test_an_outlier_channel(trained):
    trained.parameter(UNDER)[3] *= 1000  # of the group norm in front of the layer
    trained.engine.parameters.touch()
    number = trained.loop.number
    trained.steps(1)
    held = survived(trained, number, {LAYER})
    assert "norm of its product" in held[LAYER]


def test_a_nan_gradient(trained):
    layer, forward = trained.layer(), trained.layer().forward

    def broken(x):
        y = forward(x)
        return tap(y, lambda g: np.full_like(g, np.nan)) if layer.track == "fp4" else y

    layer.forward = broken
    number, before = trained.loop.number, trained.engine.updates
    loss = trained.steps(1)[0]
    assert math.isfinite(loss) and trained.engine.updates == before + 1  # the step was made, on BF16
    held = survived(trained, number, {LAYER})
    assert held[LAYER] == "its gradient is not finite"
    assert trained.engine.updates == before + 6


def test_a_nan_gradient_that_bf16_has_too_is_left_out(trained):
    forward = trained.layer().forward
    trained.layer().forward = lambda x: tap(forward(x), lambda g: np.full_like(g, np.nan))
    weights, before = trained.engine.parameters.data.copy(), trained.engine.updates
    trained.steps(1)
    assert trained.engine.updates == before and np.array_equal(trained.engine.parameters.data, weights)
    assert LAYER in trained.loop.constraint.held(trained.loop.number - 1)


def test_an_infinite_activation_goes_through_on_bf16_and_is_skipped(trained):
    weights = trained.engine.parameters.data.copy()
    trained.parameter("up_blocks.0.resnets.0.norm2.bias")[0] = np.inf
    trained.engine.parameters.touch()
    assert not math.isfinite(trained.steps(1)[0])
    trained.parameter("up_blocks.0.resnets.0.norm2.bias")[0] = 0
    trained.engine.parameters.touch()
    assert math.isfinite(trained.steps(1)[0]) and trained.healthy()
    assert not np.array_equal(trained.engine.parameters.data, weights)


# ---- training ---------------------------------------------------------------------------------------------


def test_without_the_loop_nothing_of_it_runs(monkeypatch):
    base = Base("loop.forward=bf16")
    assert base.loop is None and base.engine.model.track == "bf16" and base.engine.model.routes is None
    monkeypatch.setattr("fp4bf16.nn.layers.watched", None)
    base.steps(3)
    assert {m.track for _, m in base.engine.model.unet.named_modules() if getattr(m, "routed", False)} == {
        "fp4", "bf16"}  # fmt: skip


def test_the_loop_that_leaves_all_on_bf16_trains_to_the_same_bits():
    plain, looped = Base("loop.forward=bf16"), Base("loop.budget=0", "loop.hysteresis=0")
    assert plain.steps(6) == looped.steps(6)
    assert np.array_equal(plain.engine.parameters.data, looped.engine.parameters.data)
    assert set(looped.loop.route().values()) == {"bf16"} and looped.loop.decisions


def test_it_learns_as_bf16_does():
    losses = {h: Base(f"loop.forward={h}", "loop.every=4").steps(24) for h in ("bf16", "router", "fp4")}
    first, last = ({h: np.mean(v[part]) for h, v in losses.items()} for part in (slice(4), slice(16, 24)))
    gain = first["bf16"] - last["bf16"]
    assert gain > 0.1
    for how in ("router", "fp4"):
        assert last[how] < last["bf16"] + gain / 2, (how, first, last)


@pytest.mark.parametrize("how", ["hutchinson", "hutch++"])
def test_curvature_is_measured_on_the_network(how):
    base = Base(f"loop.sensitivity={how}", "loop.probes=3", "loop.every=4")
    base.steps(5)
    assert set(base.loop.traces) == {n for n in base.loop.free if n.endswith(".weight")}
    assert all(map(math.isfinite, base.loop.traces.values())) and max(base.loop.traces.values()) > 0
    assert all(base.loop.router.omega(n) is not None for n in base.loop.free)


def test_latency_is_measured_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("FP4BF16_CACHE_DIR", str(tmp_path))
    base = Base("loop.latency=measured")
    base.steps(2)
    decision = base.loop.decisions[-1]
    assert decision.unit == "us" and (tmp_path / "latency.json").exists()
    table = LatencyTable.load(tmp_path / "latency.json")
    assert len(table) > 10 and all(entry.microseconds > 0 for _, entry in table)
    frozen = [Base("loop.latency=measured") for _ in range(2)]  # of one table: the same decisions
    for other in frozen:
        other.engine.latencies = LatencyTable.load(tmp_path / "latency.json")
        other.engine.latencies.frozen = True
        other.steps(5)
    assert frozen[0].loop.drain() == frozen[1].loop.drain()


def test_noise_levels_are_looked_at_in_turn():
    base = Base("loop.buckets=3", "loop.every=2")
    base.steps(8)
    for bucket in range(3):
        assert base.loop.router.omega(LAYER, bucket) is not None
    assert len(base.loop.routes().buckets) == 3


# ---- policy training --------------------------------------------------------------------------------------


def aligned(objective: str, parameters: str, *more: str):
    """An engine that begins to align after some of the base training, and what it learns from."""
    more = (f"align.objective={objective}", f"align.parameters={parameters}", *more)
    base = Base(*more)
    base.steps(4)
    engine, config = base.engine, base.config
    engine.begin_alignment()
    engine.model.routes = engine.loop.routes()
    return base, make_data(config, engine, seed, rollout_of(engine), 0)


TRAINED = ("full", "router"), ("lora", "router"), ("full", "fp4")


@in_ci("objective, parameters, forward",
       [(o, *how) for o in ("dpo", "nft", "ppo") for how in TRAINED],
       ("dpo", "full", "router"), ("nft", "lora", "router"), ("ppo", "lora", "router"),
       ("ppo", "full", "fp4"))  # fmt: skip
def test_policies_begin_where_the_frozen_networks_are(objective, parameters, forward):
    base, data = aligned(objective, parameters, f"loop.forward={forward}")
    engine, loop = base.engine, base.loop
    assert loop.route()[LAYER] == "fp4"
    engine.begin(data)
    parts = batches(base.config, data)
    first = engine.policy_step(data, parts[0], 1e-4)
    if objective == "dpo":
        assert first.loss == np.log(2)
    elif objective == "ppo":
        assert first.stats["ratio"] == 1.0 and first.stats["ratio_spread"] == 0.0
    else:
        assert first.stats["moved"] == 0.0
    assert first.stats["kl"] == 0.0
    before = engine.parameters.data.copy()
    for some in parts[1:3]:
        assert engine.policy_step(data, some, 1e-4).finite
    engine.end_iteration(0)
    assert not np.array_equal(engine.parameters.data, before)
    assert loop.number == 4 + min(3, len(parts)) and loop.line()["fp4_share"] > 0.2
    if forward == "router":
        assert loop.router.omega(LAYER) > 0 and loop.variance.traces()[LAYER] >= 0


def test_ppo_keeps_its_route_within_an_iteration(monkeypatch):
    base, data = aligned("ppo", "full")
    base.engine.begin(data)
    before = base.loop.route()
    monkeypatch.setattr(base.loop.router, "budget", 0.0)  # the next decision takes all to BF16
    for some in batches(base.config, data):
        base.engine.policy_step(data, some, 1e-4)
    assert base.loop.router.route(base.loop.number)[LAYER] == "bf16" and base.loop.route() == before
    base.engine.end_iteration(0)
    assert base.loop.route()[LAYER] == "bf16"


def test_workers_draw_on_the_routes_that_come_with_the_weights(rng):
    base = Base("loop.buckets=2")
    base.steps(2)
    engine = base.engine
    # Wholly different halves, so that a level on the wrong one shows
    engine.model.routes = RouteSet([{"*": "fp4"}, {"*": "bf16"}], {"*": "bf16"})
    draw, load = MakeDraw(base.config, engine.model.vocabulary.words)()
    load(weights_of(engine))
    given = [int(rng.integers(2**32)) for _ in range(3)], ["angry face"] * 3, 3
    mine, theirs = engine.draw(*given, "fp4"), draw(*given, "fp4")
    assert np.array_equal(mine, theirs)
    for routes in ([{"*": "fp4"}], [{"*": "bf16"}], [{"*": "bf16"}, {"*": "fp4"}]):
        engine.model.routes = RouteSet(routes, routes[0])
        assert not np.array_equal(engine.draw(*given, "fp4"), mine)
    assert np.array_equal(engine.draw(*given, "bf16"), draw(*given, "bf16"))


@pytest.mark.parametrize("setting, sentence", [
    ("loop.forward=fp8", "loop.forward: 'fp8' is not known"),
    ("loop.sensitivity=hessian", "loop.sensitivity: 'hessian' is not known"),
    ("loop.latency=guessed", "loop.latency: 'guessed' is not known"),
    ("loop.every=0", "loop.every: is 0, but it must be positive"),
    ("loop.decide=30", "use a multiple of it"),
    ("loop.curvature_every=50", "use a multiple of it"),
    ("loop.jump=0.5", "a factor over 1"),
    ("loop.budget=-1", "from 0 to 1000"),
    ("loop.buckets=1001", "noise levels"),
    ("loop.probes=0", "positive"),
    ("loop.target=nan", "positive and finite"),
    ('routes=[{"*":"fp4"}]', "the last is that of training"),
    ('routes=[{"*":"fp3"},{"*":"bf16"}]', "has track 'fp3'"),
    ('routes=["fp4"]', "is not a value of type"),
])  # fmt: skip
def test_settings_that_cannot_be(setting, sentence):
    with pytest.raises(ConfigError) as error:
        override(get_preset("ci"), [setting])
    assert sentence in str(error.value)
    with pytest.raises(ConfigError, match="3 or more"):
        override(get_preset("ci"), ["loop.sensitivity=hutch++", "loop.probes=2"])


def test_every_layer_may_be_on_fp4_from_the_command_line():
    base = Base("loop.forward=fp4", EVERYWHERE)
    base.steps(2)
    assert set(base.loop.route().values()) == {"fp4"} and base.loop.line()["fp4_share"] == 1.0
