"""The closed loop on its own: when it samples and decides, what it holds back, what it keeps and replays."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from fp4bf16.errors import ConfigError
from fp4bf16.nn import UNet2D, UNetConfig, watching
from fp4bf16.nn.watch import Watcher, tap
from fp4bf16.routing import ClosedLoop, RouteSet, load_routes, save_routes
from fp4bf16.routing.feedback import WIDEST
from fp4bf16.train.config import LoopConfig

ROUTE = {"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"}
LAYER = "down_blocks.0.resnets.0.conv1.weight"


def network(seed: int = 0) -> UNet2D:
    return UNet2D(
        UNetConfig(
            sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 16), layers_per_block=1,
            down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, norm_num_groups=4,
            attention_head_dim=None, caption_vocabulary=3,
        ),
        seed=seed,
    )  # fmt: skip


def closed(routes: RouteSet | None = None, route: dict | None = None, **settings) -> ClosedLoop:
    """A loop of a small network; sampled every second step, decided every fourth."""
    settings = {"forward": "router", "every": 2, "decide": 4, "curvature_every": 4, "cooldown": 3, **settings}
    c = dataclasses.replace(LoopConfig(), **settings)
    return ClosedLoop(network(), ROUTE if route is None else route, c, 100, 7, batch=4, routes=routes)


class Steps:
    """Training steps of a loop's network on random pictures, as an engine makes them."""

    def __init__(self, loop: ClosedLoop, rng: np.random.Generator):
        self.loop, self.unet = loop, loop.unet
        self.x = rng.standard_normal((4, 8, 8, 4)).astype(np.float32)
        self.weight = rng.standard_normal(self.x.shape).astype(np.float32) / self.x.size
        self.runs = 0

    def once(self) -> float:
        self.runs += 1
        self.unet.zero_grad()
        output = self.unet(self.x, 10, captions=np.ones((4, 3), np.float32))
        output.backward(self.weight)
        return float((output.data * self.weight).sum())

    def gradients(self) -> dict[str, np.ndarray]:
        views = self.unet.flat.views(self.unet.flat.grad)
        return {n: views[n] for n in self.loop.router.layers if n in views}

    def step(self, omega: float = 1e-5) -> float:
        """A step whose measurements are made up: alike for all layers."""
        loop = self.loop
        with loop.step():
            if loop.sampled():
                loop.observe(loss=1.0, batch=2, outputs=256, activation=dict.fromkeys(loop.free, omega))
            result = loop.checked(self.once, self.gradients)
        loop.after()
        return result


@pytest.fixture
def steps(rng) -> Steps:
    return Steps(closed(), rng)


# ---- when, and on which routes ----------------------------------------------------------------------------


def test_steps_that_sample_decide_and_measure():
    loop = closed(sensitivity="hutchinson", latency="measured", every=5, decide=10, curvature_every=20)
    assert [n for n in range(25) if loop.sampled(n)] == [4, 9, 14, 19, 24]
    assert loop.decides(4) and loop.clocks(4) and not loop.decides(3)  # the first sampled one decides
    assert loop.curves(4) and not loop.curves(3)
    loop.traces = {LAYER: 1.0}
    assert [n for n in range(45) if loop.curves(n)] == [19, 39]
    plain = closed(forward="fp4", every=5)
    assert plain.sampled(4) and not any(plain.decides(n) or plain.curves(n) or plain.clocks(n)
                                        for n in range(50))  # fmt: skip
    assert not closed(every=5).clocks(4)


def test_bf16_needs_no_loop():
    with pytest.raises(ConfigError, match="with bf16 make none"):
        closed(forward="bf16")


def test_steps_go_forward(steps):
    steps.step()
    with pytest.raises(ValueError, match="step 0 has been made"), steps.loop.step(0):
        pass


def test_decisions_hold_from_the_next_step_and_pins_win(steps):
    loop = steps.loop
    steps.step()
    assert set(loop.route().values()) == {"bf16"}
    steps.step()  # the first sampled one
    events = loop.drain()
    assert [e["event"] for e in events] == ["decision"] and events[0]["holds_from"] == 2
    assert json.loads(json.dumps(events)) == events and loop.drain() == []
    route = loop.route()
    assert route[LAYER] == "fp4" and route["conv_in.weight"] == route["conv_out.weight"] == "bf16"
    steps.step()
    line = loop.line()
    assert line["fp4_share"] == pytest.approx(loop.share(route) / 3) and line["held"] == {}
    assert 0 < line["certified_mean"] <= line["certified_max"] < 10


def test_pictures_are_drawn_on_the_users_route_until_there_is_a_decision(steps):
    loop = steps.loop
    assert loop.routes().of(0)[LAYER] == "fp4" and loop.routes().of(None)[LAYER] == "bf16"
    steps.step(omega=1e3), steps.step(omega=1e3)
    assert loop.decisions and loop.routes().of(0)[LAYER] == "bf16"


def test_buckets_are_routed_on_their_own(rng, tmp_path):
    loop = closed(buckets=2)
    steps = Steps(loop, rng)
    steps.step()
    with loop.step():
        for bucket, omega in ((None, 1e-6), (0, 1e3), (1, 1e-6)):
            loop.observe(loss=1.0, activation=dict.fromkeys(loop.free, omega), bucket=bucket)
        loop.checked(steps.once)
    loop.after()
    routes = loop.routes()
    assert [routes.of(i)[LAYER] for i in (0, 1, None)] == ["bf16", "fp4", "fp4"]
    assert load_routes(save_routes(tmp_path / "r.json", routes)) == routes
    again = closed(buckets=2, routes=routes)
    assert again.route() == routes.of(None) and again.routes() == RouteSet(routes.buckets, routes.training)


def test_a_fixed_route_runs_as_the_user_gave_it(rng):
    loop = closed(forward="fp4", route={"conv_in*": "bf16", "*": "fp4"})
    assert loop.route()["mid_block.attentions.0"] == "fp4"  # no certificate, but the user says so
    assert loop.free == [] and loop.routes().of(0) == loop.route()
    steps = Steps(loop, rng)
    for _ in range(4):
        steps.step()
    line = loop.line()
    assert line["budget"] is None and line["consistency"] > 0 and loop.drain() == []
    other = RouteSet([{"*": "fp4"}, {"conv_in*": "bf16", "*": "fp4"}], {"*": "bf16"})
    loop = closed(other, forward="fp4")
    assert set(loop.route().values()) == {"bf16"}
    assert [loop.route(bucket=i)["conv_in.weight"] for i in (0, 1)] == ["fp4", "bf16"]


def test_routed_looks_elsewhere_and_comes_back(steps):
    loop, unet = steps.loop, steps.unet
    seen: list[str] = []

    class Names(Watcher):
        def product(self, layer, x, y, run, certificate):
            seen.append(layer.track)
            return y

    with loop.step():
        before = unet.apply_route(loop.route())
        with loop.routed(loop.fast_route(), Names()):
            steps.once()
        assert seen.count("fp4") == len(loop.free)
        assert {m.key: m.track for _, m in unet.named_modules() if getattr(m, "routed", False)} == before
    assert not loop.constraint.ratios  # its own watchers saw nothing of it


def test_a_frozen_route_changes_for_violations_alone(steps):
    loop = steps.loop
    loop.freeze()
    before = loop.route()
    steps.step(), steps.step()
    assert loop.decisions and loop.route() == before
    loop.thaw()
    assert loop.route()[LAYER] == "fp4"
    loop.freeze()
    loop.constraint.punish(loop.number, {LAYER: "for a test"})
    assert loop.route()[LAYER] == "bf16"


# ---- what is held back ------------------------------------------------------------------------------------


def test_a_layer_over_the_limit_is_redone_on_bf16_for_a_while(rng):
    loop = closed(forward="fp4", limit=1e-3)  # no product is that close: every layer in turn
    steps = Steps(loop, rng)
    fast = [n for n, t in loop.route().items() if t == "fp4" and loop.router.layers[n].certified]
    steps.step()
    assert steps.runs == 2 and set(loop.constraint.held(0)) == set(fast)
    events = loop.drain()
    assert [e["layer"] for e in events] == list(loop.constraint.held(0))
    assert {e["event"] for e in events} == {"held"} and {e["until"] for e in events} == {4}
    assert loop.line()["fallbacks"] == len(fast)
    for _ in range(3):
        steps.step()
    assert steps.runs == 5 and loop.line()["fallbacks"] == 0
    steps.step()  # the cooldown is over: tried again, found again
    assert steps.runs == 7


def test_what_is_not_finite_in_a_layer_alone_is_redone(steps):
    loop = steps.loop
    steps.step(), steps.step()
    layer = next(m for _, m in steps.unet.named_modules() if m.key == LAYER)
    forward = layer.forward

    def broken(x):
        y = forward(x)
        return tap(y, lambda g: np.full_like(g, np.nan)) if layer.track == "fp4" else y

    layer.forward = broken
    number = loop.number
    steps.step()
    assert all(np.isfinite(g).all() for g in steps.gradients().values())
    assert loop.constraint.held(number)[LAYER] == "its gradient is not finite"
    assert loop.router.held(number)[LAYER] == "its gradient is not finite"
    assert LAYER in [e.get("layer") for e in loop.drain()] and loop.route()[LAYER] == "bf16"
    assert "its gradient is not finite" in loop.explain()


@pytest.mark.parametrize("bare", [False, True])
def test_it_gives_up_where_bf16_does_not_help(bare, rng):
    loop = closed(forward="fp4", **({"jump": 0.0} if bare else {}))
    steps = Steps(loop, rng)
    steps.weight[...] = np.nan
    steps.step()
    assert steps.runs == 2  # all at once: then nothing is left on FP4 that could be held
    assert all(t == "bf16" for n, t in loop.route().items() if n in steps.gradients())
    assert not np.isfinite(next(iter(steps.gradients().values()))).all()


def test_an_engine_may_find_violations_itself(steps):
    loop, told = steps.loop, []
    steps.step(), steps.step()

    def violations():
        told.append(1)
        return {LAYER: "the device says so", "conv_in.weight": "is on BF16 anyway"}

    with loop.step() as inside:
        assert inside is loop
        loop.checked(steps.once, violations=violations)
    loop.after()
    assert len(told) == 2 and loop.line()["fallbacks"] == 1
    assert [e["reason"] for e in loop.drain() if e["event"] == "held"] == ["the device says so"]


def test_inputs_that_the_quantiser_refuses_run_on_bf16(rng):
    for jump in (8.0, 0.0):
        loop = closed(forward="fp4", jump=jump)
        steps = Steps(loop, rng)
        steps.x[0, 0, 0, 0] = np.inf
        assert not math.isfinite(steps.step())  # said by the loss, not by an error
        certified = {n: t for n, t in loop.fast_route().items() if loop.router.layers[n].certified}
        with loop.routed(certified):  # looking on does not stop at it either
            assert not math.isfinite(steps.once())


def test_without_limits_certificates_are_made_on_sampled_steps_alone(rng):
    loop = closed(forward="fp4", jump=0.0)
    steps = Steps(loop, rng)
    steps.step()
    assert loop.line()["certified_max"] is None
    steps.step()
    assert loop.line()["certified_max"] > 0


# ---- what is measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "count, sizes", [(0, []), (1, [1]), (2, [1, 1]), (7, [1, 1]), (8, [2, 2]), (33, [8, 8])]
)
def test_micro_batches(count, sizes):
    parts = closed().parts(count) if count else closed().parts(0)
    assert [p.stop - p.start for p in parts] == sizes
    assert not parts or (parts[0].start == 0 and parts[-1].stop <= count)


def test_gradients_give_variance_noise_and_demotion(steps, rng):
    loop = steps.loop
    names = list(steps.gradients())
    small = [{n: rng.standard_normal(20) for n in names} for _ in range(2)]
    fast = {n: small[0][n] + (100.0 if n == LAYER else 1e-6) for n in names}
    for turn in range(4):  # a layer must have been seen three times
        assert bool(loop.demotion.demoted()) is (turn == 3)
        with loop.step(2 * turn + 1):
            loop.observe(small=small, fast=fast, batch=1, loss=1.0, activation=dict.fromkeys(loop.free, 1e-6))
        loop.after()
    assert list(loop.demotion.demoted()) == [LAYER]
    assert (
        loop.router.disturbance(LAYER)
        > 10
        > 1e-3
        > loop.router.disturbance("mid_block.resnets.0.conv1.weight")
    )
    decision = loop.decisions[-1]
    assert decision.training[LAYER] == "bf16" and "gradient" in decision.reasons[LAYER]


def test_another_objective_begins_without_the_gradients_of_the_last(steps, rng):
    """Their norms do not compare, and adapters have gradients of other shapes."""
    loop, shape = steps.loop, (3, 4)

    def look(noise: float, shape: tuple[int, ...]) -> None:
        g = {n: rng.standard_normal(shape) for n in loop.free}
        loop.observe(small=[g, g], fast={n: v + noise for n, v in g.items()}, batch=1)

    for _ in range(3):
        look(100.0, shape)
    assert set(loop.router._inputs(0, 1.0)["held"]) == set(loop.free)
    before = loop.router.omega(LAYER), loop.feedback.state()
    loop.renew()
    inputs = loop.router._inputs(0, 1.0)
    assert not inputs["held"] and inputs["layers"][LAYER]["disturbance"] is None
    assert (loop.router.omega(LAYER), loop.feedback.state()) == before
    for _ in range(3):  # as many as are needed before a layer is judged
        look(1e-3, (2, 5))
    assert not loop.router._inputs(0, 1.0)["held"]
    look(100.0, (2, 5))
    assert set(loop.router._inputs(0, 1.0)["held"]) == set(loop.free)


@pytest.mark.parametrize("how", ["outputs", "fisher", "hutchinson"])
def test_sensitivity_of_weights_is_added_to_that_of_products(how):
    loop = closed(sensitivity=how)
    p = loop.unet.flat.named[LAYER]
    given: dict = {"traces": {LAYER: 3.0}} if how == "hutchinson" else {}
    with loop.step(1):
        loop.observe(loss=0.5, outputs=256, batch=1, activation={LAYER: 1e-4}, **given)
    loop.after(moments={LAYER: np.full(p.shape, 1e-8)} if how == "fisher" else None, batch=4)
    error = p.twin().stats.error_norm_sq
    # fisher: 1/2 x (256 / (2 x 0.5)) x 4 pictures x 1e-8; curvature: 1/2 x 3 / elements
    weights = {"fisher": 0.5 * 256 * 4 * 1e-8 * error, "hutchinson": 0.5 * 3 / p.size * error, "outputs": 0.0}
    weight = weights[how]  # outputs: the product has quantised the weight, too
    assert loop.operands == ("both" if how == "outputs" else "activations")
    assert loop.router.omega(LAYER) == pytest.approx(1e-4 + weight, rel=1e-6)
    assert loop.router.omega("mid_block.resnets.0.conv1.weight") is None


def test_a_weight_that_is_not_finite_keeps_its_layer_on_bf16():
    loop = closed()
    p = loop.unet.flat.named[LAYER]
    p.data[0, 0, 0, 0] = np.inf
    p.touch()
    with loop.step(1):
        loop.observe(loss=0.5, activation=dict.fromkeys(loop.free, 1e-6))
    loop.after(moments={LAYER: np.ones(p.shape)})
    assert loop.route()[LAYER] == "bf16" and "inf" in loop.decisions[-1].reasons[LAYER]


def test_a_loss_that_is_not_finite_is_left_out():
    loop = closed()
    with loop.step(1):
        loop.observe(loss=math.nan, activation=dict.fromkeys(loop.free, 1e-6))
    loop.after()
    assert loop.router.omega(LAYER) is None and loop.route()[LAYER] == "bf16"


def test_consistency_moves_the_budget(rng):
    lines = {}
    for target in (1e-6, 10.0):
        loop = closed(target=target)
        steps = Steps(loop, rng)
        for _ in range(8):
            steps.step()
        lines[target] = loop.line()
        assert loop.decisions[-1].inputs["factor"] == pytest.approx(loop.feedback.factor)
        assert lines[target]["budget"] == 0.02 * lines[target]["budget_factor"]
    assert lines[1e-6]["budget_factor"] == 1 / WIDEST and lines[10.0]["budget_factor"] == 1
    loop = closed(target=1e-6, feedback=False)
    steps = Steps(loop, rng)
    for _ in range(4):
        steps.step()
    assert loop.line()["budget_factor"] == 1.0


def test_the_term_reaches_the_gradient_on_sampled_steps(rng):
    found = {}
    for weight in (0.0, 1.0):
        loop = closed(forward="fp4", consistency=weight)
        steps = Steps(loop, np.random.default_rng(3))
        gradients = []
        for _ in range(2):
            steps.step()
            gradients.append(steps.unet.flat.grad.copy())
        found[weight] = gradients
    assert np.array_equal(found[0.0][0], found[1.0][0])
    assert not np.array_equal(found[0.0][1], found[1.0][1])


# ---- state ------------------------------------------------------------------------------------------------


def test_state_goes_on_to_the_bit(rng):
    count, cut = 12, int(rng.integers(1, 12))
    start = np.random.default_rng(int(rng.integers(2**32)))
    x = start.standard_normal((4, 8, 8, 4)).astype(np.float32)

    def run(steps: Steps, numbers) -> list:
        told = []
        for number in numbers:
            steps.x[...] = x * (1 + 0.1 * number)
            steps.step(omega=1e-6 * (1 + number % 5))
            told.append((steps.loop.line(), steps.loop.drain(), steps.loop.route()))
        return told

    whole = run(Steps(closed(consistency=0.5), np.random.default_rng(1)), range(count))
    first = Steps(closed(consistency=0.5), np.random.default_rng(1))
    run(first, range(cut))
    second = Steps(closed(consistency=0.5), np.random.default_rng(1))
    second.loop.restore(json.loads(json.dumps(first.loop.state(), allow_nan=False)))
    assert second.loop.number == cut
    assert run(second, range(cut, count)) == whole[cut:]


def test_decisions_are_replayed_rather_than_made_again(steps):
    loop = steps.loop
    for _ in range(4):
        steps.step()
    made = [e for e in loop.drain() if e["event"] == "decision"]
    assert [d["step"] for d in made] == [1, 3]
    other = closed()
    lines = [{"stage": "router", "seconds": 1.0, **json.loads(json.dumps(d))} for d in made]
    assert other.replay(lines) == 2
    assert set(other.route(0).values()) == {"bf16"} and other.route(2) == made[0]["training"]
    again = Steps(other, np.random.default_rng(0))
    for _ in range(4):
        again.step(omega=1e3)  # decided anew, no layer would be on FP4
    assert other.route() == loop.route() and other.drain()[0]["training"] == made[0]["training"]
    assert closed(forward="fp4").replay(lines) == 0
    late = closed()
    late.number = 2
    assert late.replay(lines) == 1


def test_states_that_do_not_fit(steps):
    state = steps.loop.state()
    with pytest.raises(ConfigError, match="pass what"):
        closed().restore({k: v for k, v in state.items() if k != "number"})
    with pytest.raises(ConfigError, match="buckets"):
        closed(buckets=2).restore(state)


def test_outside_a_step_nobody_watches(steps):
    with watching():
        pass
    with steps.loop.step():
        pass
    steps.once()
    assert not steps.loop.constraint.ratios
