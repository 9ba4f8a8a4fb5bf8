"""The router: what it decides from what it observed, what users pin, what is replayed and restored."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fp4bf16 import ConfigError
from fp4bf16.nn import UNet2D, UNetConfig
from fp4bf16.routing import (
    Decision,
    LayerInfo,
    Router,
    RouteSet,
    free_track,
    layers_of,
    modelled,
    settle,
)

PINS = {"conv_in*": "bf16", "*embedding*": "bf16", "*": "fp4"}
NAMES = ["conv_in.weight", "time_embedding.linear_1.weight", *(f"blocks.{i}.weight" for i in range(10))]
LAYERS = {name: LayerInfo(100 * (i + 1), 1e6 * (i + 1)) for i, name in enumerate(NAMES)}
LAYERS["mid.attentions.0"] = LayerInfo(0, 5e5, certified=False)
FREE = [name for name in NAMES if name.startswith("blocks")]


def observed(router: Router, rng, step: int = 0, names=FREE, **more) -> None:
    omega = {name: float(10 ** rng.uniform(-6, -2)) for name in names}
    times = {name: {"bf16": float(rng.uniform(20, 60)), "fp4": float(rng.uniform(5, 20))} for name in names}
    router.observe(step, **{"omega": omega, "loss": 0.5, "latency": times, **more})


def run(router: Router, rng, steps: int, every: int = 5) -> list[Decision]:
    for step in range(0, steps, every):
        observed(router, rng, step)
        if rng.random() < 0.3:
            router.demote(step, str(rng.choice(FREE)), "for a test", step + 7)
        router.decide(step, float(rng.uniform(0.2, 5)))
    return router.decisions


# ---- what users pin ----
def test_pins_win_whatever_is_measured(rng):
    pins = {"blocks.3*": "fp4", "blocks.4*": "dual", "conv_in*": "reference", "mid*": "fp4", "*": "fp4"}
    router = Router(LAYERS, pins)
    omega = dict.fromkeys(FREE, 1e-9) | {"blocks.3.weight": math.nan, "blocks.4.weight": 1e9}
    observed(router, rng, omega=omega, demoted={"blocks.3.weight": (0.0, 1.0)})
    assert not router.demote(0, "blocks.3.weight", "an outlier")
    router.decide(0)
    for step in (0, 1):
        route = router.route(step)
        assert route["blocks.3.weight"] == "fp4" and route["blocks.4.weight"] == "dual"
        assert route["conv_in.weight"] == "reference" and route["mid.attentions.0"] == "fp4"
    assert router.route(1)["blocks.5.weight"] == "fp4"
    assert "pinned by 'blocks.3*'" in router.explain(1)


def test_what_is_free_and_where_it_may_go():
    assert free_track({}, "a.weight")[:2] == (None, "fp4")
    assert free_track({"*": "dual"}, "a.weight")[:2] == (None, "dual")
    assert free_track({"*": "bf16"}, "a.weight")[0] == "bf16"
    assert free_track({"a*": "fp4", "*": "dual"}, "a.weight")[0] == "fp4"
    assert free_track({"*": "fp4", "a*": "bf16"}, "a.weight")[0] is None  # the first that matches decides
    assert Router(LAYERS, PINS).free == FREE
    assert Router(LAYERS).free == NAMES  # never what has no certificate
    assert Router(LAYERS, {"*": "bf16"}).free == []
    with pytest.raises(ConfigError, match=r"pins: '\*': 'fp5' is not a track"):
        Router(LAYERS, {"*": "fp5"})


def test_the_rest_may_go_to_the_dual_track(rng):
    router = Router(LAYERS, {**PINS, "*": "dual"}, budget=1e9)
    observed(router, rng)
    router.observe(0, latency={name: {"dual": 1.0} for name in FREE})
    router.decide(0)
    assert all(router.route(1)[name] == "dual" for name in FREE) and router.saved_us(FREE[0]) > 0


def test_a_layer_without_a_certificate_stays_on_bf16():
    router = Router(LAYERS, PINS, start="fp4")
    assert router.route(0)["mid.attentions.0"] == "bf16" and router.route(0)["blocks.0.weight"] == "fp4"
    assert "no certificate" in router.pinned("mid.attentions.0") and router.pinned(FREE[0]) is None


# ---- decisions ----
def test_a_decision_holds_from_the_step_that_it_says(rng):
    for ahead in (1, 4):
        router = Router(LAYERS, PINS, ahead=ahead, budget=1e9)
        observed(router, rng)
        decision = router.decide(10)
        assert decision.holds_from == 10 + ahead
        before = {router.route(step)["blocks.0.weight"] for step in range(11, 10 + ahead)}
        assert before <= {"bf16"} and router.route(10)["blocks.0.weight"] == "bf16"
        assert all(router.route(step)["blocks.0.weight"] == "fp4" for step in (10 + ahead, 99999))
        assert [c["name"] for c in decision.changes] == FREE
        assert {(c["from"], c["to"], c["bucket"]) for c in decision.changes} == {("bf16", "fp4", None)}


def test_the_budget_is_a_share_of_the_loss_and_the_loop_moves_it(rng):
    router = Router(LAYERS, PINS, budget=0.02)
    observed(router, rng, loss=-0.5)  # an objective may be negative: its magnitude counts
    assert router.decide(0, factor=4.0).budget == pytest.approx(0.02 * 4 * 0.5)
    shares = []
    for factor in (0.0, 0.125, 1.0, 8.0, 1e6):
        fresh = Router(LAYERS, PINS, budget=0.02)
        observed(fresh, np.random.default_rng(3))
        decision = fresh.decide(0, factor)
        assert decision.spent <= decision.budget and decision.budget == pytest.approx(0.01 * factor)
        shares.append(fresh.fp4_share(1))
    assert shares == sorted(shares) and shares[0] == 0 and len(set(shares)) > 2
    total = sum(info.flops for info in LAYERS.values())
    assert shares[-1] == pytest.approx(sum(LAYERS[n].flops for n in FREE) / total)


def test_latency_moves_the_threshold(rng):
    router = Router(LAYERS, PINS, budget=0.02, decay=0.0, hysteresis=0.0)
    omega = {name: 0.004 for name in FREE}
    times = {name: {"bf16": 20.0 + i, "fp4": 10.0} for i, name in enumerate(FREE)}
    router.observe(0, omega=omega, loss=0.5, latency=times)
    first = router.decide(0)
    assert [n for n in FREE if router.route(1)[n] == "fp4"] == FREE[-2:]
    assert first.threshold == pytest.approx(18 / 0.004) and first.unit == "us"
    slow = {name: {"fp4": 100.0} for name in FREE[-2:]}
    router.observe(1, latency=slow)
    second = router.decide(1)
    assert [n for n in FREE if router.route(2)[n] == "fp4"] == FREE[-4:-2]
    assert second.threshold < first.threshold and "saves nothing" in second.reasons[FREE[-1]]
    assert {c["name"] for c in second.changes} == set(FREE[-4:])


def test_where_a_time_is_missing_operations_stand_for_all(rng):
    router = Router(LAYERS, PINS, budget=1.0)
    observed(router, rng, latency={name: {"bf16": 5.0, "fp4": 9.0} for name in FREE[1:]})
    decision = router.decide(0)
    assert decision.unit == "MFLOP" and decision.saved == pytest.approx(
        sum(LAYERS[n].flops for n in FREE) / 1e6
    )
    router.observe(1, latency={FREE[0]: {"bf16": 5.0, "fp4": 1.0}})
    assert router.decide(1).unit == "us" and router.route(2)[FREE[0]] == "fp4"
    assert router.route(2)[FREE[1]] == "bf16"


def test_what_is_not_known_stays_on_bf16(rng):
    router = Router(LAYERS, PINS)
    nothing = router.decide(0)
    assert set(nothing.training.values()) == {"bf16"} and nothing.budget is None and not nothing.changes
    assert nothing.reasons[FREE[0]] == "its sensitivity has not been measured yet"
    router.observe(1, omega=dict.fromkeys(FREE, 1e-9))
    assert "no loss has been observed" in router.decide(1).reasons[FREE[0]]
    router.observe(2, loss=math.nan)
    assert router.decide(2).budget is None
    router.observe(3, loss=1.0)
    assert router.decide(3).training[FREE[0]] == "fp4"


def test_an_omega_that_is_not_finite_takes_its_layer_off_until_one_is(rng):
    router = Router(LAYERS, PINS)
    router.observe(0, omega=dict.fromkeys(FREE, 1e-9), loss=1.0)
    assert router.decide(0).training[FREE[2]] == "fp4"
    router.observe(1, omega={FREE[2]: math.nan, FREE[3]: math.inf})
    decision = router.decide(1)
    assert [n for n in FREE if decision.training[n] == "bf16"] == FREE[2:4]
    assert decision.reasons[FREE[2]] == "its sensitivity was nan at step 1"
    router.observe(2, omega={FREE[2]: 1e-9})
    decision = router.decide(2)
    assert decision.training[FREE[2]] == "fp4" and decision.training[FREE[3]] == "bf16"


def test_an_omega_that_is_not_finite_at_some_noise_levels_is_not_mended_by_other_levels():
    router = Router(LAYERS, PINS, buckets=2)
    good = dict.fromkeys(FREE, 1e-9)
    for step, omega in enumerate(([good | {FREE[2]: math.nan}, good], [good | {FREE[2]: math.nan}, None])):
        router.observe(step, omega=omega, loss=1.0)
        router.observe(step, omega=good)  # nor by all levels together
        decision = router.decide(step)
        assert [n for n in FREE if decision.training[n] == "bf16"] == [FREE[2]], step
        assert decision.reasons_of(0)[FREE[2]] == f"its sensitivity was nan at step {step}"
    again = Router(LAYERS, PINS, buckets=2)
    again.restore(json.loads(json.dumps(router.state(), allow_nan=False)))
    router = again
    router.observe(2, omega=[good, None])
    assert router.decide(2).training[FREE[2]] == "fp4"


def test_a_cost_beyond_all_numbers_keeps_its_layer_on_bf16():
    router = Router(LAYERS, PINS)
    router.observe(0, omega=dict.fromkeys(FREE, 1e-9) | {FREE[0]: 1e300}, loss=1.0,
                   noise={FREE[0]: 1e5}, variance={FREE[0]: 1e-10})  # fmt: skip
    decision = router.decide(0)
    assert [n for n in FREE if decision.training[n] == "bf16"] == [FREE[0]]
    assert decision.reasons[FREE[0]] == "its predicted rise of the loss is inf"
    assert settle(decision.to_dict()["inputs"]) == decision


def test_averages_forget_without_the_bias_of_the_beginning(rng):
    router = Router(LAYERS, decay=0.8)
    values = rng.standard_normal(20).tolist()
    for i, value in enumerate(values):
        router.observe(i, omega={FREE[0]: value}, loss=value)
        weights = 0.8 ** np.arange(i, -1, -1)
        expected = float(np.average(values[: i + 1], weights=weights))
        assert router.omega(FREE[0]) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert router.omega(FREE[1]) is None and router.saved_us(FREE[1]) is None


def test_a_gradient_that_drowns_takes_its_layer_off_until_it_does_not(rng):
    router = Router(LAYERS, PINS, budget=1e9)
    observed(router, rng, demoted={FREE[4]: (0.1, 0.2)})
    decision = router.decide(0)
    assert [n for n in FREE if decision.training[n] == "bf16"] == [FREE[4]]
    assert "0.1 under sqrt(3) times the noise of FP4, 0.2" in decision.reasons[FREE[4]]
    router.observe(1, demoted=[FREE[5]])
    decision = router.decide(1)
    assert [n for n in FREE if decision.training[n] == "bf16"] == [FREE[5]]
    router.observe(2)  # nothing said: as it was
    assert router.decide(2).training == decision.training
    router.observe(3, demoted={})
    assert "bf16" not in [router.decide(3).training[n] for n in FREE]


def test_noise_beyond_that_of_sampling_makes_a_layer_dearer():
    """Two layers alike but for the gradient's variance: n^2 B / tr Sigma is 0.5 and 8."""
    router = Router({n: LAYERS[n] for n in FREE[:2]}, budget=0.01, batch=4)
    times = {name: {"bf16": 10.0, "fp4": 5.0} for name in FREE[:2]}
    noise, variance = dict.fromkeys(FREE[:2], 1.0), {FREE[0]: 0.5, FREE[1]: 8.0}
    router.observe(0, omega=dict.fromkeys(FREE[:2], 0.006), loss=1.0, latency=times)
    assert router.disturbance(FREE[0]) is None
    router.observe(1, noise=noise, variance=variance)
    assert (router.disturbance(FREE[0]), router.disturbance(FREE[1])) == (8.0, 0.5)
    decision = router.decide(1)
    assert decision.training == {FREE[0]: "bf16", FREE[1]: "fp4"}
    assert decision.spent == 0.006 and "0.048 of loss" in decision.reasons[FREE[0]]
    router.observe(2, variance={FREE[0]: 2.0}, noise={FREE[0]: 3.0})  # averages already: the last ones count
    assert router.disturbance(FREE[0]) == 18.0
    router.observe(3, variance={FREE[0]: -100.0})  # an estimate below zero says nothing
    assert router.disturbance(FREE[0]) is None


# ---- noise levels ----
def test_buckets_are_routed_on_their_own(rng):
    router = Router(LAYERS, PINS, buckets=2, budget=0.01)
    low, high = {n: 1e-9 for n in FREE}, {n: 1.0 for n in FREE}
    router.observe(0, omega=[low, high], loss=1.0)
    decision = router.decide(0)
    assert {router.route(1, 0)[n] for n in FREE} == {"fp4"} and {router.route(1, 1)[n] for n in FREE} == {
        "bf16"
    }
    assert {router.route(1)[n] for n in FREE} == {"bf16"}  # all levels: the mean of both
    assert router.omega(FREE[0]) == pytest.approx(0.5) and router.omega(FREE[0], 0) == 1e-9
    assert router.fp4_share(1, 0) > router.fp4_share(1) == router.fp4_share(1, 1) == 0
    assert {c["bucket"] for c in decision.changes} == {0} and "noise levels 1 of 2" in router.explain(1, 0)
    assert "within the budget" in router.explain(1, 0) and "within the budget" not in router.explain(1)
    saved = sum(LAYERS[n].flops for n in FREE) / 1e6  # each route with what it costs and saves itself
    assert decision.totals(0) == (pytest.approx(1e-9 * len(FREE)), pytest.approx(saved))
    assert decision.totals() == decision.totals(1) == (0.0, 0.0)
    assert f"saves {saved:.4g} MFLOP" in router.explain(1, 0) and "saves 0 MFLOP" in router.explain(1, 1)


def test_a_bucket_without_its_own_measurement_has_that_of_all_levels():
    router = Router(LAYERS, PINS, buckets=3, budget=0.01)
    router.observe(0, omega=dict.fromkeys(FREE, 1e-9), loss=1.0)
    router.observe(0, omega=dict.fromkeys(FREE, 1.0), bucket=1)
    router.decide(0)
    tracks = [router.route(1, b)[FREE[0]] for b in (0, 1, 2, None)]
    assert tracks == ["fp4", "bf16", "fp4", "fp4"]


# ---- held for a while ----
def test_a_layer_is_held_at_once_and_comes_back(rng):
    router = Router(LAYERS, PINS, budget=1e9)
    observed(router, rng)
    router.decide(0)
    assert router.demote(5, FREE[1], "certified ratio 0.9 over 0.5", until=9)
    tracks = [router.route(step)[FREE[1]] for step in range(4, 11)]
    assert tracks == ["fp4", "bf16", "bf16", "bf16", "bf16", "fp4", "fp4"]
    assert router.held(5) == {FREE[1]: "certified ratio 0.9 over 0.5"} and not router.held(9)
    assert "held on BF16: certified ratio" in router.explain(6)
    router.decide(6)  # a decision meanwhile does not take it away for longer
    assert [router.route(step)[FREE[1]] for step in (8, 9)] == ["bf16", "fp4"]
    router.demote(7, FREE[1], "again", until=8)  # the later end holds
    assert router.route(8)[FREE[1]] == "bf16"
    router.demote(20, FREE[1], "for good")
    router.demote(21, FREE[1], "shorter", until=22)
    router.decide(25)
    assert router.route(10**9)[FREE[1]] == "bf16"
    with pytest.raises(ValueError, match="until is 5, but it must come after step 5"):
        router.demote(5, FREE[1], "", until=5)
    with pytest.raises(ValueError, match="'blocks' *, which is no layer here"):
        router.demote(5, "blocks", "")


# ---- replayed and restored ----
def test_a_decision_is_a_function_of_its_inputs_to_the_bit(rng):
    for buckets in (1, 3):
        router = Router(LAYERS, PINS, buckets=buckets)
        for step in range(0, 40, 10):
            if buckets > 1:
                parts = [{n: float(10 ** rng.uniform(-6, -2)) for n in FREE} for _ in range(buckets)]
                router.observe(step, omega=parts)
            observed(
                router, rng, step, variance=dict.fromkeys(FREE, float(rng.uniform())), noise={FREE[0]: 2.0}
            )
            decision = router.decide(step, float(rng.uniform(0.1, 8)))
            written = json.loads(json.dumps(decision.to_dict(), allow_nan=False))
            assert Decision.from_dict(written) == decision == settle(written["inputs"])
            assert Decision.from_dict({"stage": "router", **written}) == decision


def test_replaying_gives_the_routes_without_a_measurement(rng):
    first = Router(LAYERS, PINS)
    written = []
    for step in range(0, 50, 5):
        observed(first, rng, step)
        written.append(json.loads(json.dumps(first.decide(step).to_dict())))
    second = Router(LAYERS, PINS)
    for data in written:
        second.replay(data)
    for step in range(50):
        past = [d for d in written if d["holds_from"] <= step]
        assert second.route(step) == (past[-1]["training"] if past else second.route(0))
    observed(second, rng, 50)
    assert second.decide(20) == Decision.from_dict(written[4])  # not made again
    again = second.replay(written[4])
    assert sum(d.step == again.step for d in second.decisions) == 1


def test_a_restored_router_goes_on_to_the_bit(rng):
    for buckets in (1, 2):
        seed = int(rng.integers(1 << 30))
        whole = Router(LAYERS, PINS, buckets=buckets)
        source = np.random.default_rng(seed)
        run(whole, source, 30)
        saved, position = json.loads(json.dumps(whole.state(), allow_nan=False)), source.bit_generator.state
        resumed = Router(LAYERS, PINS, buckets=buckets)
        resumed.restore(saved)
        assert resumed.state() == whole.state()
        for router in (whole, resumed):
            source.bit_generator.state = position
            for step in range(30, 60, 5):
                observed(router, source, step)
                router.decide(step)
        assert resumed.state() == whole.state()
        assert all(resumed.route(s, b) == whole.route(s, b) for s in range(30, 70) for b in (None, 0))


def test_pins_win_over_a_decision_that_was_made_without_them(rng):
    before = Router(LAYERS, PINS, budget=1e9)
    observed(before, rng)
    data = before.decide(0).to_dict()
    after = Router(LAYERS, {"blocks.0*": "bf16", "blocks.1*": "dual", **PINS})
    after.replay(data)
    assert [after.route(1)[n] for n in FREE[:3]] == ["bf16", "dual", "fp4"]
    assert "pinned by 'blocks.0*'" in after.explain(1)


def test_what_does_not_fit_is_refused(rng):
    router = Router(LAYERS, PINS)
    observed(router, rng)
    data = router.decide(0).to_dict()
    other = Router({n: LAYERS[n] for n in FREE})
    with pytest.raises(ConfigError, match="another network: they differ in 'conv_in.weight'"):
        other.replay(data)
    with pytest.raises(ConfigError, match=r"has 1 buckets, but there are 2.*loop\.buckets=1"):
        Router(LAYERS, PINS, buckets=2).replay(data)
    with pytest.raises(ConfigError, match="a decision lacks routes, training"):
        router.replay({k: v for k, v in data.items() if k not in ("routes", "training")})
    with pytest.raises(ConfigError, match="holds from 0"):
        router.replay({**data, "holds_from": 0})
    with pytest.raises(ConfigError, match="'fp5' is not a track"):
        router.replay({**data, "training": {**data["training"], FREE[0]: "fp5"}})
    with pytest.raises(ConfigError, match="state is of 13 layers and 1 buckets, but there are 10 and 1"):
        other.restore(router.state())
    with pytest.raises(ConfigError, match="1 buckets, but there are 13 and 2"):
        Router(LAYERS, PINS, buckets=2).restore(router.state())


def test_only_what_is_needed_of_the_past_is_kept(rng):
    router = Router(LAYERS, PINS)
    run(router, rng, 500)
    assert len(router.decisions) <= 2
    with pytest.raises(ValueError, match=r"decide\(3\) comes after the decision of step 495"):
        router.decide(3)


# ---- bad input ----
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"buckets": 0}, "buckets is 0"), ({"buckets": 1.5}, "buckets is 1.5"), ({"ahead": 0}, "ahead is 0"),
        ({"budget": -0.1}, "budget is -0.1"), ({"budget": math.inf}, "budget is inf"),
        ({"batch": 0}, "batch is 0"), ({"hysteresis": math.nan}, "hysteresis is nan"),
        ({"decay": 1.0}, "decay is 1.0"), ({"decay": "a"}, "decay is 'a'"),
        ({"buckets": True}, "buckets is True"),
        ({"start": "fp5"}, "start is 'fp5'; did you mean 'fp4'"),
        ({"start": RouteSet([{}, {}], {}), "buckets": 3}, "start has routes of 2 buckets"),
    ],
)  # fmt: skip
def test_bad_settings(how, text):
    with pytest.raises(ConfigError, match=text):
        Router(LAYERS, **how)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"omega": {"conv_on.weight": 1.0}}, "omega names 'conv_on.weight'.*did you mean 'conv_in.weight'"),
        ({"omega": [{"conv_on.weight": 1.0}]}, "omega names"), ({"omega": [{}, {}]}, "omega is a list of 2"),
        ({"omega": {}, "bucket": 1}, "bucket is 1, but there are 0 to 0"),
        ({"omega": [{}], "bucket": 0}, "no bucket= beside it"),
        ({"variance": {"x": 1.0}}, "variance names 'x'"), ({"noise": {"x": 1.0}}, "noise names 'x'"),
        ({"demoted": ["x"]}, "demoted names 'x'"), ({"latency": {"x": {}}}, "latency names 'x'"),
        ({"latency": {FREE[0]: {"fp4": -1.0}}}, "latency of blocks.0.weight on fp4 is -1.0"),
        ({"latency": {FREE[0]: {"fp4": math.nan}}}, "is nan, but microseconds"),
    ],
)  # fmt: skip
def test_bad_observations_change_nothing(how, text):
    router = Router(LAYERS, PINS)
    before = router.state()
    with pytest.raises(ValueError, match=text):
        router.observe(0, **{"loss": 1.0, "omega": {FREE[0]: 1.0}, **how})
    assert router.state() == before


def test_a_factor_or_bucket_that_cannot_be():
    router = Router(LAYERS, PINS)
    for factor in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="factor is"):
            router.decide(0, factor)
    for bucket in (1, -1, "0"):
        with pytest.raises(ValueError, match="there are 0 to 0"):
            router.route(0, bucket)


# ---- a network ----
def test_on_a_unet_from_the_model_of_the_time(rng):
    unet = UNet2D(UNetConfig.tiny(caption_vocabulary=5))
    shape = (256, 8, 8, 12)
    layers = layers_of(unet, shape)
    router = Router(layers, {"conv_in*": "bf16", "conv_out*": "bf16", "*": "fp4"}, budget=0.05)
    products = [n for n, info in layers.items() if info.certified]
    router.observe(0, omega=dict.fromkeys(products, 1e-5), loss=0.3, latency=modelled(unet, shape))
    decision = router.decide(0)
    route = router.route(1)
    assert unet.apply_route(route) == route and list(route) == list(layers)
    fast = [n for n in products if route[n] == "fp4"]
    assert fast and all(router.saved_us(n) > 0 for n in fast) and decision.unit == "us"
    assert not {"conv_in.weight", "conv_out.weight", "caption_embedding.weight"} & set(fast)
    text = router.explain()
    lines = text.splitlines()
    assert len(lines) == 2 + len(layers) + 2 and all(line.split()[0] in layers for line in lines[2:-2])
    assert f"{100 * router.fp4_share(1):.1f} % of the FLOPs" in lines[0]
    shares = [float(line[lines[1].index("%") :].split()[0]) for line in lines[2:-2]]
    assert sum(shares) == pytest.approx(100, abs=0.005 * len(layers))


def test_a_network_without_layers_and_one_without_work():
    for layers in ({}, {"a": LayerInfo(0, 0.0)}):
        router = Router(layers)
        router.observe(0, loss=1.0)
        assert router.decide(0).training == dict.fromkeys(layers, "bf16")
        assert router.fp4_share(1) == 0.0 and "0.0 % of the FLOPs" in router.explain()
