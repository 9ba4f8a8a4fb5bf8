"""Samplers on both kinds of schedule: they find the distribution of the data, at the order they claim, with
as many evaluations as asked for, and one seed gives one picture in any batch.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from fp4bf16 import tracks
from fp4bf16.diffusion import (
    PREDICTIONS,
    SAMPLERS,
    Schedule,
    coefficients,
    cosine,
    ddim,
    generate,
    guided,
    heun,
    linear,
    normal,
    plan,
    ve,
)
from fp4bf16.errors import ConfigError
from fp4bf16.nn.tape import no_grad
from fp4bf16.nn.unet import UNet2D, UNetConfig

SCHEDULES = [cosine(1000), linear(1000), ve(1000)]
BY_NAME = dict(ids=lambda s: s.name)
#: A mixture of three normal distributions within [-1, 1]: means, deviations, shares.
MEANS, DEVIATIONS, SHARES = np.array([-0.7, 0.1, 0.8]), np.array([0.05, 0.2, 0.04]), np.array([0.5, 0.3, 0.2])


def best_x0(schedule, means=MEANS, deviations=DEVIATIONS, shares=SHARES):
    """The best x0 prediction for independent numbers of a mixture, in closed form: E[x0 | x_t]."""

    def model(x, t, condition):
        alpha, sigma = (c[..., None] for c in schedule.coefficients(t, x.ndim, np.float64))
        variance = alpha**2 * deviations**2 + sigma**2
        off = x[..., None] - alpha * means
        log = np.log(shares) - off**2 / (2 * variance) - np.log(variance) / 2
        weight = np.exp(log - log.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        return (weight * (means + alpha * deviations**2 / variance * off)).sum(-1)

    return model


def quantiles(count: int) -> np.ndarray:
    """Of the mixture, at (i + 1/2) / count."""
    at = np.linspace(-2, 2, 20001)
    below = sum(
        share * np.array([0.5 * math.erfc((m - u) / s / math.sqrt(2)) for u in at])
        for m, s, share in zip(MEANS, DEVIATIONS, SHARES, strict=True)
    )
    return np.interp((np.arange(count) + 0.5) / count, below, at)


@pytest.fixture(scope="module")
def wanted():
    return quantiles(2000)


def distance(sampler, schedule, steps, wanted, rng, spacing="trailing"):
    """Mean distance of sorted samples from the mixture's quantiles (Wasserstein 1), from start noise at the
    quantiles of the standard normal distribution.
    """
    count = len(wanted)
    start = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])[:, None]
    x = SAMPLERS[sampler](
        best_x0(schedule), start * schedule.start_scale, None, schedule, steps, prediction="x0",
        noise=lambda t: rng.standard_normal((count, 1)), spacing=spacing,
    )  # fmt: skip
    return np.abs(np.sort(x[:, 0]) - wanted).mean()


@pytest.mark.parametrize("schedule", SCHEDULES, **BY_NAME)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samples_come_from_the_data(sampler, schedule, wanted, rng):
    """More evaluations come nearer. The data's deviation is 0.61; the worst of 100 evaluations was 0.0142 of
    the methods without noise; `ancestral` keeps the chance of its draws, so it draws more.
    """
    wanted = quantiles(16_000) if sampler == "ancestral" else wanted
    few, some, many = (distance(sampler, schedule, n, wanted, rng) for n in (5, 25, 100))
    assert few > 2 * some, (few, some)
    assert many < (0.06 if sampler == "ancestral" else 0.02), many
    assert sampler == "ancestral" or some > 1.5 * many, (some, many)


@pytest.mark.parametrize("spacing", ["trailing", "leading", "karras"])
def test_grids(spacing, wanted, rng):
    """Levels of all grids; that of Karras finds the data of VE as well, but "trailing", the default, comes
    nearer with ten evaluations.
    """
    for schedule in SCHEDULES:
        for steps in (1, 2, 7, 1000):
            t = schedule.timesteps(steps, spacing)
            assert t.dtype == np.int64 and len(t) == steps and (np.diff(t) < 0).all() and t[-1] >= 0
            assert t[0] <= 999 and (spacing == "leading" or t[0] == 999)
    if spacing == "karras":
        assert distance("euler", ve(1000), 200, wanted, rng, spacing) < 0.02
        near, far = (distance("euler", ve(1000), 10, wanted, rng, s) for s in ("trailing", spacing))
        assert near < far


def test_grid_of_karras():
    """Equation 5 with rho = 7, from the largest sigma to the smallest, up to the table's own steps."""
    schedule, steps = ve(100_000), 12
    got = schedule.sigma[schedule.timesteps(steps, "karras")]
    want = (50 ** (1 / 7) + np.arange(steps) / (steps - 1) * (0.01 ** (1 / 7) - 50 ** (1 / 7))) ** 7
    np.testing.assert_allclose(got, want, rtol=1e-4)


# ---- the orders of the methods
def errors_on_a_normal_distribution(sampler, schedule, grids):
    """Largest error at each number of evaluations, for x0 ~ N(0.3, 0.25²), whose ODE is solved in closed form
    down to the last level; what one step from there to the clean picture makes of it is the answer.
    """
    m, s = 0.3, 0.25

    def denoise(x, alpha, sigma):
        return m + alpha * s**2 / (alpha**2 * s**2 + sigma**2) * (x - alpha * m)

    def model(x, t, condition):
        return denoise(x, *schedule.coefficients(t, x.ndim, np.float64))

    start = np.linspace(-2, 2, 9)[:, None] * schedule.start_scale
    spread = [np.sqrt(schedule.alpha[i] ** 2 * s**2 + schedule.sigma[i] ** 2) for i in (-1, 0)]
    # x_t - alpha m keeps its number of deviations along the flow (Song et al. 2021, appendix D)
    last = schedule.alpha[0] * m + (start - schedule.alpha[-1] * m) * spread[1] / spread[0]
    want = denoise(last, schedule.alpha[0], schedule.sigma[0])
    options = dict(prediction="x0", clip=None, spacing="karras")
    found = (SAMPLERS[sampler](model, start, None, schedule, n, **options) for n in grids)
    return np.array([np.abs(x - want).max() for x in found])


@pytest.mark.parametrize("sampler, order", [("euler", 1), ("ddim", 1), ("heun", 2)])
@pytest.mark.parametrize("schedule", [ve(100_000), ve(100_000, 0.02, 5.0), linear(20_000, 5e-6, 1e-3)],
                         ids=["ve", "ve5", "linear"])  # fmt: skip
@pytest.mark.parametrize("odd", [0, 1])
def test_orders(sampler, order, schedule, odd):
    """The error falls with the number of evaluations to the power -1 for Euler and DDIM, -2 for Heun."""
    grids = np.array([64, 128, 256]) + odd
    errors = errors_on_a_normal_distribution(sampler, schedule, grids)
    measured = -np.diff(np.log(errors)) / np.diff(np.log(grids))
    np.testing.assert_allclose(measured, order, atol=0.15)


def test_heun_is_nearer_than_euler_for_the_same_evaluations(wanted, rng):
    for schedule, counts in ((ve(1000), (10, 15, 25, 50)), (cosine(1000), (15, 25))):
        for steps in counts:
            a, b = (distance(s, schedule, steps, wanted, rng) for s in ("heun", "euler"))
            assert a < b, (schedule.name, steps)


# ---- samplers and each other
def network(x, t, condition):
    """A model that is neither linear nor the same at all levels, of x as a network sees it."""
    w = np.arange(9, dtype=x.dtype).reshape(3, 3) / 9 - x.dtype.type(0.4)
    return np.tanh(x @ w + (t[:, None, None, None] / 1000).astype(x.dtype))


def seen_by(schedule, model=network):
    return lambda x, t, c: model(schedule.scale_input(x, t), t, c)


@pytest.mark.parametrize("schedule", SCHEDULES, **BY_NAME)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_euler_is_ddim(schedule, prediction):
    model, seeds = seen_by(schedule), range(5)
    for steps in (1, 2, 9):
        a, b = (
            generate(model, seeds, None, (4, 4, 3), schedule, steps, sampler=s, prediction=prediction)
            for s in ("euler", "ddim")
        )
        np.testing.assert_array_equal(a, b)


def reference_of_vp(sampler, model, x, schedule, steps, prediction, clip, noise):
    """DDIM (Song et al. 2021, eq. 12) and ancestral sampling (DDPM, eq. 7) written out for VP, in float32."""
    timesteps, f = schedule.timesteps(steps), np.float32
    for t, then in zip(timesteps, [*timesteps[1:], -1], strict=True):
        here, there = schedule.alpha_bar[t], 1.0 if then < 0 else schedule.alpha_bar[then]
        alpha, sigma = f(np.sqrt(here)), f(np.sqrt(1 - here))
        output = model(x, np.full(len(x), t), None)
        if prediction == "v":
            x0, eps = alpha * x - sigma * output, sigma * x + alpha * output
        else:
            x0, eps = ((x - sigma * output) / alpha, output) if prediction == "eps" else (output, None)
        x0 = x0 if clip is None else np.clip(x0, -clip, clip)
        if eps is None or clip is not None:
            eps = (x - alpha * x0) / sigma
        if sampler == "ddim":
            x = f(np.sqrt(there)) * x0 + f(np.sqrt(1 - there)) * eps
            continue
        beta = 1 - here / there
        x = (f(np.sqrt(there) * beta / (1 - here)) * x0
             + f(np.sqrt(1 - beta) * (1 - there) / (1 - here)) * x)  # fmt: skip
        if then >= 0:
            x += f(np.sqrt(beta * (1 - there) / (1 - here))) * noise(int(t))
    return x


@pytest.mark.parametrize("schedule", [cosine(1000), linear(1000), cosine(50)], **BY_NAME)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("clip", [1.0, None])
def test_vp_has_the_bits_of_its_formulas(schedule, prediction, clip):
    """The pictures that models were trained and judged by are those of DDPM's formulas in float32."""
    shape, seeds = (4, 4, 3), [3, 1, 4]
    for sampler in ("ddim", "ancestral"):
        for steps in (1, 4, 10, 50):
            got = generate(network, seeds, None, shape, schedule, steps, sampler=sampler,
                           prediction=prediction, clip=clip, chunk=3)  # fmt: skip
            start = normal(seeds, 0, shape)
            want = reference_of_vp(sampler, network, start, schedule, steps, prediction, clip,
                                   lambda t: normal(seeds, t + 1, shape))  # fmt: skip
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("clip", [1.0, None])
def test_ve_is_vp_in_the_scale_that_the_network_sees(sampler, prediction, clip, rng):
    schedule, steps = ve(200), 9
    start = rng.standard_normal((3, 4, 4, 3))
    options = dict(prediction=prediction, clip=clip, noise=lambda t: normal(3, t, start.shape).astype(float))
    run = SAMPLERS[sampler]
    a = run(seen_by(schedule), start * 50, None, schedule, steps, **options)
    b = run(network, start * 50 / np.hypot(1, 50), None, schedule.scaled, steps, **options)
    np.testing.assert_allclose(a, b, rtol=1e-7, atol=1e-7 * np.abs(b).max())


def test_ancestral_of_ve_is_eulers_step_down_and_noise_up(rng):
    """Song et al. 2021, appendix F, written out."""
    schedule, x = ve(100), 50 * rng.standard_normal((2, 4, 4, 3))
    model, draw = seen_by(schedule), lambda t: normal(9, t, x.shape).astype(float)
    got = SAMPLERS["ancestral"](model, x, None, schedule, 6, prediction="x0", noise=draw)
    times = schedule.timesteps(6)
    for t, then in zip(times, [*times[1:], -1], strict=True):
        here, there = schedule.sigma[t], 0.0 if then < 0 else schedule.sigma[then]
        up = there * np.sqrt(1 - there**2 / here**2)
        down = np.sqrt(there**2 - up**2)
        slope = (x - np.clip(model(x, np.full(2, t), None), -1, 1)) / here
        x = x + (down - here) * slope + up * draw(t)
    np.testing.assert_allclose(got, x, rtol=0, atol=1e-9)


@pytest.mark.parametrize("schedule", SCHEDULES, **BY_NAME)
def test_heun_is_its_algorithm(schedule, rng):
    """Karras et al. 2022, algorithm 1, in y = x / alpha and s = sigma / alpha, written out."""
    x = rng.standard_normal((2, 4, 4, 3)) * schedule.start_scale
    model = seen_by(schedule)
    for steps, eulers, levels in ((6, 1, 4), (7, 2, 5)):
        got = heun(model, x, None, schedule, steps, prediction="x0", spacing="karras")
        times = schedule.timesteps(levels, "karras")
        y, s = x / schedule.alpha[-1], schedule.sigma / schedule.alpha

        def slope(y, t, s=s):
            return (y - np.clip(model(y * schedule.alpha[t], np.full(2, t), None), -1, 1)) / s[t]

        for i, (t, then) in enumerate(zip(times, [*times[1:], -1], strict=True)):
            change = (0.0 if then < 0 else s[then]) - s[t]
            d = slope(y, t)
            ahead = y + change * d
            y = ahead if then < 0 or i < eulers else y + change * (d + slope(ahead, then)) / 2
        np.testing.assert_allclose(got, y, rtol=0, atol=1e-8)


# ---- what they cost
@pytest.mark.parametrize("schedule", [cosine(100), ve(100)], **BY_NAME)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_steps_are_evaluations(sampler, schedule):
    for guidance, each in ((1.0, 1), (3.0, 2), (0.0, 1)):
        for steps in (1, 2, 3, 4, 5, 10, 99, 100):
            calls = []

            def model(x, t, c, calls=calls):
                calls.append(x.shape)
                return np.zeros_like(x)

            generate(model, [1, 2, 3], np.zeros((3, 2)), (2, 2, 1), schedule, steps, sampler=sampler,
                     chunk=4, guidance=guidance)  # fmt: skip
            assert calls == [(4, 2, 2, 1)] * (steps * each)
    assert [len(plan(sampler, schedule, n)) for n in (1, 6, 7)] == [1, 6, 7]


def test_table_is_the_plan_in_the_scale_of_the_network():
    for schedule in (cosine(100), ve(100)):
        for sampler in SAMPLERS:
            t, table = coefficients(sampler, schedule, 7, clip=0.5)
            assert table.dtype == np.float32 and table.shape == (7, 8)
            for step, level, row in zip(plan(sampler, schedule, 7), t, table, strict=True):
                bar = schedule.alpha_bar[step.t]
                want = [np.sqrt(bar), np.sqrt(1 - bar), *(f or 0 for f in step[1:5]), 0.5, 0]
                assert level == step.t
                np.testing.assert_allclose(row, want, rtol=1e-6)
    assert coefficients("ddim", cosine(100), 3, eta=1.0)[1][0, 5] > 0
    assert coefficients("ddim", cosine(100), 3, clip=None)[1][0, 6] == 0


# ---- guidance
def test_guidance_is_its_formula(rng):
    condition, x = rng.standard_normal((2, 3)).astype(np.float32), np.ones((2, 3), np.float32)
    model = lambda x, t, c: x * c + np.float32(0.25)  # noqa: E731
    for w in (-1.0, 0.0, 0.5, 1.0, 7.5):
        got = guided(model, w)(x, None, condition)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, 0.25 + w * condition, rtol=1e-5, atol=1e-6)
    assert guided(model, 1) is model


def test_guidance_sharpens_towards_the_condition():
    """Two classes at -0.5 and 0.5 of one deviation, half of each where no class is given: a guidance above
    1 goes further from the other class, one below 1 less far, none does not know the class.
    """
    schedule, means, deviations = ve(1000), np.array([-0.5, 0.5]), np.array([0.3, 0.3])

    def model(x, t, condition):
        shares = np.array([0.5, 0.5])
        both = best_x0(schedule, means, deviations, shares)(x, t, None)
        ones = [best_x0(schedule, means[i : i + 1], deviations[:1], shares[:1])(x, t, None) for i in (0, 1)]
        of = condition.reshape(len(x), 2, *(1,) * (x.ndim - 1))
        known = of.sum(1)
        return (known * (of[:, 0] * ones[0] + of[:, 1] * ones[1]) + (1 - known) * both).astype(np.float32)

    second = np.tile([0.0, 1.0], (200, 1)).astype(np.float32)
    found = {w: generate(model, range(200), second, (8, 1, 1), schedule, 40, prediction="x0", clip=None,
                         guidance=w) for w in (0.0, 0.5, 1.0, 2.0)}  # fmt: skip
    mean = {w: float(x.mean()) for w, x in found.items()}
    assert mean[0.0] == pytest.approx(0, abs=0.06) and mean[1.0] == pytest.approx(0.5, abs=0.03)
    assert mean[0.0] + 0.1 < mean[0.5] < mean[1.0] - 0.02 and mean[2.0] > mean[1.0] + 0.05
    assert found[2.0].std() < found[1.0].std()


# ---- one seed, one picture
@pytest.fixture(scope="module")
def unet():
    model = UNet2D(UNetConfig.tiny(block_out_channels=(16, 32), caption_vocabulary=7), seed=1)
    model.apply_route({"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"})
    return model


@pytest.mark.parametrize("track, guidance", [(None, 2.5), ("bf16", 1.0)])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("schedule", [cosine(1000), ve(1000)], **BY_NAME)
def test_one_seed_one_picture_in_any_batch(unet, track, sampler, schedule, guidance, rng):
    """Bit for bit: alone, among others, in another place of another chunk, with other captions around."""
    bags = (rng.random((7, 7)) < 0.5).astype(np.float32)
    seeds = rng.integers(0, 2**32, 7)

    def model(x, t, c):
        with no_grad():
            return unet(schedule.scale_input(x, t), t, captions=c).data

    def draw(rows):
        return generate(model, seeds[rows], bags[rows], (8, 8, 12), schedule, 4, sampler=sampler, chunk=4,
                        guidance=guidance)  # fmt: skip

    with tracks(track):
        together = draw(np.arange(7))
        assert np.isfinite(together).all()
        for rows in ([6], rng.permutation(7)):
            np.testing.assert_array_equal(draw(np.array(rows)), together[rows])
        assert draw(np.arange(0)).shape == (0, 8, 8, 12)
    assert len({p.tobytes() for p in together}) == 7


def test_guidance_of_one_changes_no_bit(unet, rng):
    bags, schedule = (rng.random((3, 7)) < 0.5).astype(np.float32), cosine(1000)

    def model(x, t, c):
        with no_grad():
            return unet(x, t, captions=c).data

    def draw(**more):
        return generate(model, [1, 2, 3], bags, (8, 8, 12), schedule, 3, chunk=4, **more)

    np.testing.assert_array_equal(draw(guidance=1.0), draw())
    assert (draw(guidance=1.5) != draw()).any()


# ---- what is said
def test_bad_input():
    model = lambda x, t, c: np.zeros_like(x)  # noqa: E731
    with pytest.raises(ConfigError, match="guidance is 2.0 but there is no condition"):
        generate(model, [1], None, (1,), cosine(10), 2, guidance=2.0)
    for bad in (math.nan, math.inf):
        with pytest.raises(ConfigError, match="is not a finite number"):
            generate(model, [1], np.zeros((1, 2)), (1,), cosine(10), 2, guidance=bad)
    for name in ("heuns", "Euler", "ddpm"):
        with pytest.raises(ConfigError, match=f"sampler: '{name}' is not known"):
            generate(model, [1], None, (1,), cosine(10), 2, sampler=name)
    with pytest.raises(ConfigError, match="did you mean 'heun'"):
        plan("heuns", cosine(10), 2)
    for sampler in SAMPLERS:
        for steps in (0, -1):
            with pytest.raises(ConfigError, match=f"{steps} sampling steps of a schedule with 10"):
                plan(sampler, cosine(10), steps)
    with pytest.raises(ConfigError, match="11 sampling steps of a schedule with 10"):
        plan("euler", cosine(10), 11)
    with pytest.raises(ConfigError, match="did you mean 'karras'"):
        ddim(model, np.zeros((1, 1)), None, cosine(10), 2, spacing="karas")
    assert isinstance(cosine(10).scaled, Schedule)
