"""``loop.limit`` on the emulated GPU: certificates made in the graph of a step, and faults under a limit."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from host_cuda import host_cuda  # noqa: E402, F401  (a fixture)
from test_loop_device import FP4, LAYER, _sampler, engine_of, same, steps  # noqa: E402
from test_train_device import gpu, tiny  # noqa: E402, F401  (a fixture)

from fp4bf16.nn.cuda.certificates import Fallback  # noqa: E402
from fp4bf16.nn.cuda.watch import watching  # noqa: E402
from fp4bf16.routing import RouteSet  # noqa: E402


def test_limit_holds_the_layers_over_it(gpu):  # noqa: F811
    """Certified in the graph: those over the limit are on BF16 in the step that found them, which is that on
    the route without them, to the bit; and for the cooldown.
    """
    still = ("loop.every=50", "loop.decide=50", "loop.curvature_every=50", "loop.jump=0", "base.batch=4")
    first, data = engine_of(tiny(*FP4, *still, "loop.limit=1e6"))
    steps(first, data, 0, 1)
    ratios = first.loop.constraint.ratios
    known = first.loop.router.layers
    assert set(ratios) == {n for n, t in first.loop.route().items() if t == "fp4" and known[n].certified}
    order = sorted(ratios, key=ratios.get)
    assert ratios[order[-1]] < 3  # promoted: summed fast they would be up to 7
    limit = math.sqrt(ratios[order[-5]] * ratios[order[-4]])
    (ours, _), (other, _) = (engine_of(tiny(*FP4, *still, f"loop.limit={x}")) for x in (limit, "1e6"))
    a = steps(ours, data, 0, 1)
    held = ours.loop.constraint.held(0)
    assert set(order[-4:]) <= set(held) and len(held) < len(order) / 2
    assert all("certified ratio" in reason for reason in held.values())
    assert ours.loop.line()["fallbacks"] == len(held)
    other.loop._plain = RouteSet([other.loop._plain.training | dict.fromkeys(held, "bf16")])
    assert a == steps(other, data, 0, 1)
    same(ours.state(), other.state())
    assert set(ours.loop.constraint.held(3)) >= set(held) and not ours.loop.constraint.held(4)


def test_weights_that_jump_under_a_limit(gpu):  # noqa: F811
    """A ratio knows no scale, the averages do; taken up again in between, to the bit."""
    still = ("loop.every=50", "loop.decide=50", "loop.curvature_every=50", "base.batch=4", "loop.limit=50")
    (ours, data), (again, _) = engine_of(tiny(*FP4, *still)), engine_of(tiny(*FP4, *still))
    steps(ours, data, 0, 7)
    kept = ours.state(), ours.updates, json.loads(json.dumps(ours.loop.state()))
    again.restore(*kept[:2], aligning=False)
    again.loop.restore(kept[2])
    results = []
    for engine in (ours, again):
        state = engine.parameters.to_host()
        engine.parameters.from_host(state | {LAYER: state[LAYER] * 1000})
        results.append(steps(engine, data, 7, 10))
        (event,) = [e for e in engine.loop.drain() if e["layer"] == LAYER]
        assert event["step"] == 7 and "norm of its" in event["reason"]
    assert results[0] == results[1] and all(r.finite for r in results[0])
    same(ours.state(), again.state())


def test_pictures_drawn_under_a_threshold(gpu):  # noqa: F811
    """Graphs of their own for as long as the fallback is in force: each replay is counted, and all of it is
    BF16's where every product is over the threshold.
    """
    model, sampler = _sampler(tiny("diffusion.chunk=4"), None)
    seeds, captions = [5, 6, 7], ["angry face"] * 3

    def drawn(track="fp4"):
        return sampler.draw(seeds, captions, 3, track)

    plain, bf16, never = drawn(), drawn("bf16"), Fallback(model.unet, math.inf)
    always, graphs = Fallback(model.unet, 0.0), len(sampler._graphs)
    for fallback, want in ((always, bf16), (never, plain), (always, bf16)):
        with watching(fallback):
            np.testing.assert_array_equal(drawn(), want)
    assert len(sampler._graphs) == graphs + 2
    assert always.calls == 2 * never.calls > 0 and not never.counts
    assert sum(always.counts.values()) >= always.calls and set(always.counts.values()) == {6}
    np.testing.assert_array_equal(drawn(), plain)
    assert always.calls == 2 * never.calls
