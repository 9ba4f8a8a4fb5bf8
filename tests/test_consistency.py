"""The consistency term and its gradient, the constraint before a step, fallbacks, sketches in a network."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16 import nn
from fp4bf16.consistency import Consistency, Constraint, Fallback, Sketcher, certified_ratio
from fp4bf16.errors import ConfigError
from fp4bf16.nn import ops as F

ROUTE = {"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"}


def network(rng):
    unet = nn.UNet2D(nn.UNetConfig.tiny(), seed=int(rng.integers(1 << 30)))
    route = unet.apply_route(ROUTE)
    return unet, [n for n, m in watched(unet).items() if route[n] == "fp4"]


def watched(unet):
    """The layers whose products are watched, by name."""
    return {m.key: m for _, m in unet.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}


def batch(rng, n=2):
    return rng.standard_normal((n, 8, 8, 12)).astype(np.float32), rng.integers(0, 1000, n)


def linear(rng, k=48, n=20, track="fp4"):
    layer = nn.Linear(k, n, seed=int(rng.integers(1 << 30)))
    layer.apply_route({"*": track})
    layer.flat  # noqa: B018  (packs, so that there are gradients to add to)
    return layer


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


# ---- the term ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("weight", [0.0, 3.0, 3000.0])
@pytest.mark.parametrize("track", ["fp4", "dual"])
def test_term_and_gradient_are_those_of_the_formula(rng, weight, track):
    """The term written out on the tape, beside the same products, gives the same gradients."""
    layer, c = linear(rng, 128, 64, track), draw(rng, 9, 64)
    x = nn.Variable(draw(rng, 9, 128), requires_grad=True)
    consistency = Consistency(weight)
    consistency.begin(3, [".weight"])
    with nn.watching(consistency):
        y = layer(x)
    with fb.tracks("bf16"):
        other = layer(x).data
    ratio = np.sum((y.data - other) ** 2, dtype=float) / np.sum(other**2, dtype=float)
    assert np.isclose(consistency.term, ratio, rtol=1e-5) and 1e-4 < ratio < 0.1
    assert consistency.by_layer == {".weight": consistency.term}
    found = nn.grad((y * c).sum(), [x, layer.weight, layer.bias])
    y = layer(x)
    term = ((y - other) ** 2).sum() * (weight / np.sum(other**2, dtype=float))
    want = nn.grad((y * c).sum() + term, [x, layer.weight, layer.bias])
    plain = nn.grad((layer(x) * c).sum(), [x, layer.weight, layer.bias])
    for f, w, p in zip(found, want, plain, strict=True):
        if weight == 0:
            assert np.array_equal(f.data, p.data)
        else:
            # The gradients that the bf16 products round may differ in the last bit of bfloat16
            assert np.abs(f.data - w.data).max() < 2.0**-7 * np.abs(w.data).max()
    if weight == 3000:
        assert np.abs(found[0].data - plain[0].data).max() > 2.0**-5 * np.abs(want[0].data).max()


def test_layers_and_calls_count_with_their_means(rng):
    """Two layers, one of them called twice: what is added to each gradient is the derivative of the mean."""
    one, two = linear(rng, 32, 8), linear(rng, 32, 8)
    one.key, two.key = "one", "two"
    xs = [draw(rng, 5, 32) for _ in range(3)]
    consistency = Consistency(weight=1.0, layers_per_step=2)
    consistency.begin(0, ["one", "two"])
    with nn.watching(consistency):
        ys = [one(xs[0]), one(xs[1]), two(xs[2])]
    with fb.tracks("bf16"):
        others = [one(xs[0]).data, one(xs[1]).data, two(xs[2]).data]
    squares = [np.sum(o.astype(float) ** 2) for o in others]
    ratios = [
        np.sum((y.data - o).astype(float) ** 2) / s for y, o, s in zip(ys, others, squares, strict=True)
    ]
    assert np.isclose(consistency.term, ((ratios[0] + ratios[1]) / 2 + ratios[2]) / 2, rtol=1e-5)
    assert np.isclose(consistency.by_layer["one"], (ratios[0] + ratios[1]) / 2, rtol=1e-5)
    one.zero_grad(), two.zero_grad()
    (ys[0].sum() * 0.0 + ys[1].sum() * 0.0 + ys[2].sum() * 0.0).backward()  # the added gradient alone
    shares = [0.25, 0.25, 0.5]
    want = [2 * share * (y.data - o) / s for y, o, s, share in zip(ys, others, squares, shares, strict=True)]
    assert np.allclose(one.bias.grad, (want[0] + want[1]).sum(0), rtol=1e-4, atol=1e-7)
    assert np.allclose(two.bias.grad, want[2].sum(0), rtol=1e-4, atol=1e-7)


def test_training_on_the_term_brings_the_tracks_together(rng):
    """The term alone, straight through the quantiser, moves a layer to where FP4 and BF16 agree better."""
    layer, x = linear(rng, 64, 16), draw(rng, 64, 64)
    consistency, terms = Consistency(weight=1.0), []
    optimizer = nn.AdamW(layer.flat.data, 1e-3)
    for step in range(60):
        consistency.begin(step, [".weight"])
        with nn.watching(consistency):
            y = layer(x)
        layer.zero_grad()
        (y.sum() * 0.0).backward()
        optimizer.step(layer.flat.grad, 1e-3)
        layer.flat.touch()
        terms.append(consistency.term)
    assert np.mean(terms[-10:]) < 0.97 * np.mean(terms[:3])


def test_sampled_layers_are_a_function_of_seed_and_step(rng):
    names = [f"layer{i}" for i in range(17)]
    a, b, c = Consistency(0.0, 4, seed=1), Consistency(0.0, 4, seed=1), Consistency(0.0, 4, seed=2)
    chosen = []
    for step in range(40):
        for consistency in (a, c):
            consistency.begin(step, names)
        b.begin(step, rng.permutation(names))  # whatever the order of the names
        assert a.chosen == b.chosen and len(a.chosen) == 4
        chosen.append((a.chosen, c.chosen))
    # 40 draws of 4 among 17 leave a layer out with probability 17 (13/17)^40 = 4e-4 ... and are not all equal
    assert len({one for one, _ in chosen}) > 20 and any(one != two for one, two in chosen)
    counts = [sum(name in one for one, _ in chosen) for name in names]
    assert max(counts) < 30
    a.begin(0, names[:2])
    assert a.chosen == {"layer0", "layer1"}
    a.begin(0, [])
    assert a.chosen == set() and a.term == 0.0 and a.by_layer == {}


def test_only_sampled_fp4_layers_on_the_tape_are_measured(rng):
    unet, names = network(rng)
    consistency = Consistency(1.0, layers_per_step=len(names))
    args = batch(rng)
    consistency.begin(0, [*names, "conv_in.weight"])
    with nn.watching(consistency), nn.no_grad():
        unet(*args)
    assert consistency.by_layer == {}
    with nn.watching(consistency), fb.tracks("bf16"):
        unet(*args)
    assert consistency.by_layer == {}
    with nn.watching(consistency):
        unet(*args)
    assert set(consistency.by_layer) <= set(names) and len(consistency.by_layer) >= len(names) - 1
    assert all(0 < ratio < 0.2 for ratio in consistency.by_layer.values())
    consistency.begin(1, names[:1])
    with nn.watching(consistency):
        unet(*args)
    assert list(consistency.by_layer) == names[:1]


def test_the_term_passes_by_what_is_not_finite_or_nothing(rng):
    layer = linear(rng, 32, 8)
    layer.bias.data[...] = 0
    consistency = Consistency(1.0)
    consistency.begin(0, [".weight"])
    with nn.watching(consistency):
        y = layer(np.zeros((2, 32), np.float32))
    y.sum().backward()
    assert consistency.term == 0.0 and np.isfinite(layer.weight.grad).all()
    layer.bias.data[...] = np.nan
    consistency.begin(1, [".weight"])
    with nn.watching(consistency):
        layer(draw(rng, 2, 32))
    assert not math.isfinite(consistency.term)


@pytest.mark.parametrize(
    "make,sentence",
    [
        (lambda: Consistency(-1.0), "Consistency: weight is -1.0, but a number from 0"),
        (lambda: Consistency(math.nan), "weight is nan"),
        (lambda: Consistency("a"), "weight is 'a'"),
        (lambda: Consistency(1.0, 0), "layers_per_step is 0, but a whole number from 1"),
        (lambda: Consistency(1.0, 1.5), "layers_per_step is 1.5, but a whole number"),
        (lambda: Constraint(-1.0), "Constraint: limit is -1.0"),
        (lambda: Constraint(math.inf), "limit is inf"),
        (lambda: Constraint(2.0, 0.5), "jump is 0.5, but a factor over 1"),
        (lambda: Constraint(2.0, 8.0, -1), "cooldown is -1, but a whole number from 0"),
        (lambda: Fallback(None), "Fallback: threshold is None"),
        (lambda: Fallback(True), "threshold is True"),
        (lambda: Sketcher(0), "Sketcher: every is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, sentence):
    with pytest.raises(ConfigError) as error:
        make()
    assert sentence in str(error.value)


# ---- the constraint ----------------------------------------------------------------------------------------
def run(constraint, step, layers, x, poison=None):
    """One attempt at a step of a few layers side by side; (violations, whether anything was redone)."""
    constraint.begin(step)
    for layer in layers:
        layer.track = "bf16" if layer.key in constraint.held(step) else "fp4"
        layer.zero_grad()
    with nn.watching(constraint):
        y = layers[0](x)
        for layer in layers[1:]:
            y = y + layer(x)
    if np.isfinite(y.data).all():
        (y * y).mean().backward()
    if poison is not None:
        poison.weight.grad[0, 0] = np.nan
    return constraint.violations({layer.key: layer.weight.grad for layer in layers})


def three(rng):
    layers = [linear(rng) for _ in range(3)]
    for i, layer in enumerate(layers):
        layer.key = f"layer{i}.weight"
    return layers


def test_sound_layers_may_step(rng):
    layers, constraint = three(rng), Constraint(limit=2.0, cooldown=5)
    for step in range(12):
        for layer in layers:  # as a training moves them
            layer.weight.data *= rng.uniform(0.9, 1.1)
            layer.weight.touch()
        assert run(constraint, step, layers, draw(rng, 16, 48)) == {}
        assert set(constraint.ratios) == {layer.key for layer in layers} and constraint.held(step) == {}
        assert all(0.05 < ratio < 2 for ratio in constraint.ratios.values())


def test_a_new_network_is_within_the_default_limit(rng):
    unet, names = network(rng)
    constraint = Constraint(limit=2.0)
    constraint.begin(0)
    with nn.watching(constraint):
        y = unet(*batch(rng))
    unet.zero_grad()
    (y * y).mean().backward()
    gradients = {name: p.grad for name, p in unet.named_parameters().items()}
    assert constraint.violations(gradients) == {}
    assert set(names) - set(constraint.ratios) <= {n for n in names if "attentions" in n and "to_" not in n}


FAULTS = {
    "weights a thousand times larger": ("norm of its", lambda layer, x: layer.weight.data.__imul__(1000)),
    "weights a thousand times smaller": ("norm of its", lambda layer, x: layer.weight.data.__imul__(1e-3)),
    "NaN in the weights": ("NaN or Inf", lambda layer, x: layer.weight.data.__setitem__((0, 0), np.nan)),
    "Inf in the weights": ("NaN or Inf", lambda layer, x: layer.weight.data.__setitem__((0, 0), np.inf)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_at_once_and_cooled_down(rng, fault):
    layers, constraint = three(rng), Constraint(limit=2.0, jump=8.0, cooldown=4)
    for step in range(6):
        assert run(constraint, step, layers, draw(rng, 16, 48)) == {}
    reason, break_it = FAULTS[fault]
    break_it(layers[1], None)
    layers[1].weight.touch()
    found = run(constraint, 6, layers, draw(rng, 16, 48))
    assert list(found) == ["layer1.weight"] and reason in found["layer1.weight"]
    constraint.punish(6, found)
    for step in (6, 7, 8, 9, 10):
        assert constraint.held(step) == found
        found_now = run(constraint, step, layers, draw(rng, 16, 48))
        assert found_now == {} and "layer1.weight" not in constraint.ratios
    assert constraint.held(11) == {}


def test_outliers_in_the_input_raise_the_certified_ratio(rng):
    """One channel that dwarfs the others but meets a weight of nearly nothing: the bound knows no better."""
    layers = three(rng)
    constraint = Constraint(limit=2.0, jump=0)
    x = draw(rng, 16, 48)
    assert run(constraint, 0, layers, x) == {}
    x[:, 7] = 300
    layers[2].weight.data[:, 7] *= 1e-4
    layers[2].weight.touch()
    found = run(constraint, 1, layers, x)
    assert "layer2.weight" in found and "is over 2" in found["layer2.weight"]


def test_a_gradient_that_is_not_finite_is_a_violation(rng):
    layers, constraint = three(rng), Constraint(limit=2.0, cooldown=2)
    found = run(constraint, 0, layers, draw(rng, 16, 48), poison=layers[0])
    assert found == {"layer0.weight": "its gradient is not finite"}
    constraint.punish(0, found)
    assert (
        run(constraint, 0, layers, draw(rng, 16, 48), poison=layers[0]) == {}
    )  # no longer FP4's to answer for


def test_an_overflowing_twin_proves_nothing(rng):
    constraint, layer = Constraint(limit=0.0), linear(rng)
    certificate = fb.Certificate(math.inf, 0.0, terms={"product": 1.0, "x": 1.0, "w": 1.0})
    constraint.begin(0)
    constraint.product(layer, None, nn.Variable(np.ones((2, 2), np.float32)), None, certificate)
    assert "certified ratio is inf" in constraint.violations()[".weight"]


def test_zero_products_are_no_violation(rng):
    constraint = Constraint(limit=2.0)
    zero = nn.Conv2d(16, 4, 3, padding=1, zero=True)
    layer = linear(rng)
    zero.apply_route({"*": "fp4"})
    zero.key = "zero"
    for step in range(8):
        constraint.begin(step)
        with nn.watching(constraint):
            zero(draw(rng, 1, 4, 4, 16))
            layer(np.zeros((3, 48), np.float32))
        assert constraint.violations() == {} and constraint.ratios == {"zero": 0.0, ".weight": 0.0}


def test_jumps_are_measured_against_clean_steps_alone(rng):
    """Neither a violation nor what it did to the others enters the averages, nor a step that never ended."""
    layers, constraint = three(rng), Constraint(limit=0.0, jump=8.0, cooldown=0)
    x = draw(rng, 16, 48)
    for step in range(6):
        run(constraint, step, layers, x)
    before = constraint.state()["averages"]
    run(constraint, 6, layers, x)  # folds step 5 in
    averages = constraint.state()["averages"]
    assert all(averages[n]["product"][1] == before[n]["product"][1] + 1 for n in averages)
    constraint.begin(6)  # again: nothing was folded in
    assert constraint.state()["averages"] == averages
    found = run(constraint, 6, layers, 20 * x)
    assert len(found) == 3 and all("norm of its product" in reason for reason in found.values())
    constraint.punish(6, found)
    assert run(constraint, 6, layers, 20 * x) == {}
    assert run(constraint, 7, layers, 20 * x) == {}  # punished layers learn anew what is usual


def test_constraint_off(rng):
    layers, constraint = three(rng), Constraint(limit=0.0, jump=0.0)
    for step, factor in enumerate((1, 1, 1, 1, 1, 1, 1e4)):
        assert run(constraint, step, layers, factor * draw(rng, 16, 48)) == {}


def test_products_outside_the_tape_are_not_judged(rng):
    layer, constraint = linear(rng), Constraint(limit=1e-6)
    constraint.begin(0)
    with nn.watching(constraint), nn.no_grad():
        layer(draw(rng, 3, 48))
        assert constraint.ratios == {} and constraint.violations() == {}
        with pytest.raises(fb.NonFiniteError):
            layer(np.full((3, 48), np.nan, np.float32))
    with nn.watching(constraint):
        layer(draw(rng, 3, 48))
    assert list(constraint.violations()) == [".weight"]


def test_constraint_goes_on_from_its_state(rng):
    """Through JSON, at any step, mid-cooldown: the same violations and the same numbers afterwards."""
    layers, other = three(rng), None
    constraint = Constraint(limit=2.0, jump=4.0, cooldown=3)
    stop = int(rng.integers(0, 14))
    for step in range(16):
        layers[0].weight.data *= 30 if step == 7 else 1
        layers[0].weight.touch()
        x = draw(rng, 16, 48)
        if step == stop:
            other = Constraint(limit=2.0, jump=4.0, cooldown=3)
            other.restore(json.loads(json.dumps(constraint.state())))
        for c in (constraint, other):
            if c is not None:
                c.punish(step, run(c, step, layers, x))
        if other is not None:
            assert other.state() == constraint.state() and other.held(step) == constraint.held(step)


def test_certified_ratio():
    terms = {"product": 4.0, "x": 1.0, "w": 1.0}
    assert certified_ratio(fb.Certificate(1.0, 1.0, estimate=0.1, terms=terms)) == 0.5  # a proof, no estimate
    assert certified_ratio(fb.Certificate(0.0, 0.0)) == 0.0
    assert certified_ratio(fb.Certificate(1.0, 0.0, terms=terms | {"product": 0.0})) == math.inf
    assert certified_ratio(fb.Certificate(1e-6, 0.0, terms=terms | {"product": 0.0, "w": 1e-38})) == 0.0
    assert math.isnan(certified_ratio(fb.Certificate(math.nan, 0.0, terms=terms)))


# ---- fallbacks ---------------------------------------------------------------------------------------------
def test_fallback_redoes_and_counts(rng):
    unet, names = network(rng)
    args = batch(rng)
    seen = Constraint(limit=0.0)
    seen.begin(0)
    with nn.watching(seen):
        y = unet(*args).data
    ratios = np.sort(list(seen.ratios.values()))
    never, all_, some = Fallback(ratios[-1] * 1.01), Fallback(0.0), Fallback(float(np.median(ratios)))
    with nn.watching(never), nn.no_grad():
        assert np.array_equal(unet(*args).data, y)
    assert never.calls == len(ratios) and not never.counts
    unet.apply_route({"*attentions.0": "bf16", **ROUTE})  # softmax(Q K) V has no certificate
    with nn.watching(all_), nn.no_grad():
        z = unet(*args).data
    with fb.tracks("bf16"), nn.no_grad():
        assert np.array_equal(unet(*args).data, z)
    assert set(all_.counts.values()) == {1} and len(all_.counts) == len(ratios)
    with nn.watching(some), nn.no_grad():
        unet(*args)
    assert 0 < len(some.counts) < len(ratios)


def test_fallback_survives_what_the_quantiser_refuses(rng):
    layer, fallback = linear(rng), Fallback(1.0)
    x = draw(rng, 3, 48)
    x[1, 5] = np.nan
    with nn.watching(fallback):
        y = layer(x)
    assert np.isnan(y.data[1]).all() and np.isfinite(y.data[[0, 2]]).all()
    assert dict(fallback.counts) == {".weight": 1}


def test_fallback_trains_through_the_bf16_product(rng):
    layer, x = linear(rng), draw(rng, 5, 48)
    with nn.watching(Fallback(0.0)):
        (layer(x) ** 2).sum().backward()
    got = layer.weight.grad.copy()
    layer.weight.grad[...] = 0
    with fb.tracks("bf16"):
        (layer(x) ** 2).sum().backward()
    assert np.array_equal(got, layer.weight.grad)


# ---- sketches ----------------------------------------------------------------------------------------------
def test_one_product_in_every_is_sketched(rng):
    unet, names = network(rng)
    args, sketcher = batch(rng), Sketcher(every=5, seed=3)
    sampled, per_step = set(), None
    for step in range(12):
        sketcher.begin(step)
        before = sketcher.calls
        with nn.watching(sketcher), nn.no_grad():
            unet(*args)
        per_step = sketcher.calls - before
        assert abs(len(sketcher.estimates) - per_step / 5) <= 1
        sampled |= set(sketcher.estimates)
    assert sketcher.sketches == pytest.approx(sketcher.calls / 5, abs=12)
    assert len(sampled) > 2 * per_step / 5  # not the same ones in each step


def test_sketches_repeat_by_step_and_bound_the_distance(rng):
    """At 1e-3 a call, over 4 failures of 200 have probability 3e-4 ** 1.6 or less (Poisson: 2.3e-6)."""
    layer, failures = linear(rng), 0
    one, two = (Sketcher(every=1, seed=int(rng.integers(1 << 30))) for _ in range(2))
    for step in range(200):
        x = draw(rng, 5, 48)
        found = []
        for sketcher in (one, one, two):
            sketcher.begin(step)
            with nn.watching(sketcher), nn.no_grad():
                y = layer(x).data
            found.append(sketcher.estimates[".weight"])
        assert found[0] == found[1] != found[2]
        with fb.tracks("bf16"):
            distance = np.linalg.norm(y - layer(x).data)
        size = np.linalg.norm(y - layer.bias.data)
        failures += distance > (found[0] + 48 * 2.0**-20) * size  # both sums are float32
    assert failures <= 4


def test_watchers_work_together(rng):
    """All four at once, over training steps with a fault: finite weights, and the fault is named."""
    unet, names = network(rng)
    layers = watched(unet)
    constraint, consistency = Constraint(2.0, cooldown=3), Consistency(0.1, 4)
    sketcher, events = Sketcher(5), {}
    optimizer = nn.AdamW(unet.flat.data, 1e-3)
    for step in range(8):
        if step == 6:
            broken = names[int(rng.integers(len(names)))]
            layers[broken].weight.data *= 1000
            unet.flat.touch()
        constraint.begin(step)
        for _ in range(len(names)):
            held = constraint.held(step)
            unet.apply_route({**dict.fromkeys(held, "bf16"), **ROUTE})
            consistency.begin(step, [n for n in names if n not in held])
            sketcher.begin(step)
            with nn.watching(constraint, consistency, sketcher):
                y = unet(*batch(rng))
            unet.zero_grad()
            F.mean_squared_error(y, np.zeros(y.shape, np.float32)).backward()
            found = constraint.violations({n: layers[n].weight.grad for n in names})
            if not found:
                break
            events.setdefault(step, {}).update(found)
            constraint.punish(step, found)
        nn.clip_norm(unet.flat.grad, 1.0)
        optimizer.step(unet.flat.grad, 1e-3)
        unet.flat.touch()
    assert set(events) == {6} and broken in events[6] and np.isfinite(unet.flat.data).all()
    assert broken in constraint.held(7) and consistency.term > 0 and sketcher.estimates
