"""Score-based training end to end: on the variance-exploding schedule a network of each prediction learns,
and every sampler draws pictures from it that are nearer to the data than before.
"""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")

from fp4bf16.diffusion import PREDICTIONS, SAMPLERS, normal  # noqa: E402
from fp4bf16.train.config import get_preset, override  # noqa: E402
from fp4bf16.train.data import Vocabulary, load_pairs  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.engine import BaseData, HostEngine  # noqa: E402

STEPS, EVALUATIONS = 60, 8


@pytest.fixture(scope="module")
def pairs():
    return load_pairs(16).select(role="policy", word="face")


def pictures_of(pairs):
    return np.concatenate([pairs.style("noto"), pairs.style("twemoji")])


def distance(drawn, data) -> float:
    """Root mean square of the differences in each pixel's mean and deviation."""
    drawn = np.clip(drawn, -1, 1)
    return float(np.sqrt(np.mean([(drawn.mean(0) - data.mean(0)) ** 2, (drawn.std(0) - data.std(0)) ** 2])))


def denoised(model, data, bags, sigma: float) -> float:
    """Error of the x0 that the model finds at the level next to `sigma`, as a share of that of x_t itself."""
    x0, schedule = model.fold(data), model.schedule
    t = np.full(len(x0), np.argmin(np.abs(schedule.sigma - sigma)))
    x_t = schedule.add_noise(x0, normal(7, 0, x0.shape), t)
    found, _ = schedule.to_x0_eps(model.evaluate(x_t, t, bags), x_t, t, model.prediction)
    return float(np.linalg.norm(found - x0) / np.linalg.norm(x_t - x0))


# Of x0 it is as of v, by the same limits.
ALL = [pytest.param(p, marks=[pytest.mark.long] * (p == "x0")) for p in PREDICTIONS]


@pytest.mark.parametrize("prediction", ALL)
def test_ve_learns(pairs, prediction, rng):
    settings = [f"seed={rng.integers(1 << 30)}", "diffusion.schedule=ve", "base.batch=16",
                f"diffusion.prediction={prediction}", "diffusion.chunk=16"]  # fmt: skip
    config = override(get_preset("ci"), settings)
    model, data = Denoiser(config, Vocabulary.of(pairs.captions)), pictures_of(pairs)
    assert model.schedule.name == "ve" and model.prediction == prediction
    bags = np.concatenate([model.encode(pairs.captions)] * 2)
    seeds = {name: config.seed + i for i, name in enumerate(("row", "t", "noise", "drop"))}
    engine = HostEngine(model, config)
    captions = [pairs.captions[i % len(pairs.captions)] for i in range(32)]

    def draw(**more):
        return model.draw(range(32), captions, EVALUATIONS, **more)

    before, start = {s: distance(draw(sampler=s), data) for s in SAMPLERS}, denoised(model, data, bags, 1.0)
    noise = distance(normal(list(range(32)), 0, (16, 16, 3)), data)
    learned = BaseData(model.fold(data), bags, seeds, len(model.schedule))
    losses = [engine.base_step(learned, step, 3e-3).loss for step in range(STEPS)]
    after, end = {s: distance(draw(sampler=s), data) for s in SAMPLERS}, denoised(model, data, bags, 1.0)
    # Of six runs each, the worst were 0.80 (losses), 0.79 (found x0) and what stands behind the limits below.
    assert np.mean(losses[-15:]) < 0.9 * np.mean(losses[:5]), losses
    assert end < 0.88 * start, (start, end)
    for sampler, found in after.items():
        if prediction == "eps":  # an error in eps is one of sigma, at first 50, times as much in x0: 0.957
            assert found < 0.99 * before[sampler], (sampler, before, after)
        else:  # 0.63
            assert found < 0.75 * before[sampler] and found < 0.8 * noise, (sampler, before, after)
    assert after["ancestral"] < noise  # 0.97 with eps, 0.46 with others
    guided = draw(sampler="heun", guidance=2.0, track="fp4")  # all of it at once
    assert np.isfinite(guided).all() and (guided != draw(sampler="heun", track="fp4")).any()
