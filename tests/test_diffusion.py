"""Schedules, predictions, samplers: formulas, and one seed gives one picture in any batch."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fp4bf16 import tracks
from fp4bf16.diffusion import (
    EMA,
    PREDICTIONS,
    Schedule,
    ancestral,
    cosine,
    ddim,
    generate,
    get_schedule,
    linear,
    normal,
    picture_errors,
    score_weight,
    squared_error,
    variance_preserving,
    ve,
)
from fp4bf16.errors import ConfigError, ShapeError
from fp4bf16.nn.tape import no_grad
from fp4bf16.nn.unet import UNet2D, UNetConfig

ROUTE = {"conv_in*": "bf16", "conv_out*": "bf16", "*embedding*": "bf16", "*": "fp4"}


@pytest.mark.parametrize(
    "schedule", [linear(1000), cosine(1000), linear(50), cosine(50)], ids=lambda s: s.name
)
def test_alpha_bar_falls(schedule):
    a = schedule.alpha_bar
    assert a.dtype == np.float64 and (np.diff(a) < 0).all() and 0 < a[-1] < a[0] < 1


def test_schedules_by_their_definition():
    beta = [1e-4 + (0.02 - 1e-4) * t / 999 for t in range(1000)]
    product = math.prod(1 - b for b in beta)
    assert linear(1000).alpha_bar[-1] == pytest.approx(product, rel=1e-10)
    f = [math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in (0, 500)]
    assert cosine(1000).alpha_bar[499] == pytest.approx(f[1] / f[0], rel=1e-10)  # where no beta is clipped
    assert (1 - cosine(1000).alpha_bar[1:] / cosine(1000).alpha_bar[:-1]).max() <= 0.999 + 1e-12


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("schedule", [linear(100), cosine(100), ve(100)], ids=lambda s: s.name)
def test_prediction_is_inverted(prediction, schedule, rng):
    x0, eps = rng.standard_normal((2, 20, 4, 4, 3))
    t = rng.integers(0, 90, 20)
    x_t = schedule.add_noise(x0, eps, t)
    output = schedule.target(x0, eps, t, prediction)
    found_x0, found_eps = schedule.to_x0_eps(output, x_t, t, prediction)
    np.testing.assert_allclose(found_x0, x0, atol=1e-9)
    np.testing.assert_allclose(found_eps, eps, atol=1e-9)
    a, b = schedule.x0_coefficients(t, prediction, dtype=np.float64)
    assert a.shape == b.shape == (20, 1, 1, 1)
    np.testing.assert_allclose(a * x_t + b * output, x0, atol=1e-9)
    assert schedule.x0_coefficients(t, prediction)[0].dtype == np.float32
    # linear for outputs of any kind, the target or not
    other = rng.standard_normal(x0.shape)
    np.testing.assert_allclose(
        a * x_t + b * other, schedule.to_x0_eps(other, x_t, t, prediction)[0], atol=1e-9
    )


def test_ve_by_its_definition(rng):
    """Song et al. 2021: sigma_i = sigma_min (sigma_max / sigma_min)^(i / (N - 1)), x_t = x0 + sigma eps."""
    schedule = ve(1000)
    i = np.arange(1000)
    np.testing.assert_allclose(schedule.sigma, 0.01 * 5000 ** (i / 999), rtol=1e-12)
    assert (schedule.alpha == 1).all() and not schedule.preserving and schedule.start_scale == 50
    x0, eps = rng.standard_normal((2, 1000, 2, 2, 1)).astype(np.float32)
    x_t = schedule.add_noise(x0, eps, i)
    assert x_t.dtype == np.float32
    np.testing.assert_allclose(x_t, x0 + schedule.sigma.reshape(-1, 1, 1, 1) * eps, rtol=1e-6, atol=1e-6)
    seen = schedule.scale_input(x_t, i)
    assert seen.dtype == np.float32 and seen.std() == pytest.approx(1, abs=0.05)
    np.testing.assert_allclose(seen, x_t / np.sqrt(1 + schedule.sigma.reshape(-1, 1, 1, 1) ** 2), rtol=1e-6)
    v = schedule.target(x0, eps, i, "v")
    assert v.std() == pytest.approx(1, abs=0.05) and v.dtype == np.float32
    assert len(ve(7, 0.5, 3.0)) == 7 and ve(7, 0.5, 3.0).start_scale == 3.0
    assert len(get_schedule("ve", 1)) == 1 and get_schedule("ve", 1).timesteps(1, "karras").tolist() == [0]


def test_input_of_vp_is_left_alone(rng):
    x = rng.standard_normal((3, 2)).astype(np.float32)
    for schedule in (cosine(50), linear(50)):
        assert schedule.scale_input(x, [0, 20, 49]) is x and schedule.scaled is schedule
        assert schedule.preserving and schedule.start_scale == 1 and (schedule.norm == 1).all()


@pytest.mark.parametrize("schedule", [cosine(100), ve(100)], ids=lambda s: s.name)
def test_score_is_that_of_a_normal_distribution(schedule, rng):
    """Of x0 ~ N(m, s²), x_t is normal, and its score is known; the best eps prediction is that score."""
    m, s, t = 0.4, 0.7, np.arange(90)
    alpha, sigma = (a[:, None] for a in (schedule.alpha[t], schedule.sigma[t]))
    x = rng.standard_normal((90, 5)) * np.sqrt(alpha**2 * s**2 + sigma**2) + alpha * m
    x0 = m + alpha * s**2 / (alpha**2 * s**2 + sigma**2) * (x - alpha * m)
    eps = schedule.eps_from_x0(x0, x, t)
    want = -(x - alpha * m) / (alpha**2 * s**2 + sigma**2)
    for prediction in PREDICTIONS:
        output = schedule.target(x0, eps, t, prediction)
        np.testing.assert_allclose(schedule.score(output, x, t, prediction), want, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("schedule", [cosine(100), ve(100)], ids=lambda s: s.name)
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_losses_are_score_matching(schedule, prediction, rng):
    """The error of an output is `score_weight` times that of the score it stands for."""
    x0, eps = rng.standard_normal((2, 90, 4))
    t = np.arange(90)
    x_t = schedule.add_noise(x0, eps, t)
    output = schedule.target(x0, eps, t, prediction) + 0.1 * rng.standard_normal(x0.shape)
    errors, _ = picture_errors(output, schedule.target(x0, eps, t, prediction))
    true = -eps / schedule.sigma[t][:, None]
    score, _ = picture_errors(schedule.score(output, x_t, t, prediction), true)
    np.testing.assert_allclose(errors, score_weight(schedule, t, prediction) * score, rtol=1e-6)
    if prediction == "eps":
        np.testing.assert_allclose(score_weight(schedule, t, "eps"), schedule.sigma[t] ** 2)


def test_noising_keeps_the_variance(rng):
    x0, eps = rng.standard_normal((2, 64, 32, 32, 1))
    x_t = cosine(1000).add_noise(x0, eps, rng.integers(0, 1000, 64))
    assert x_t.std() == pytest.approx(1.0, abs=0.02)


def test_timesteps():
    s = cosine(1000)
    assert s.timesteps(1).tolist() == [999] and s.timesteps(1000).tolist() == list(range(999, -1, -1))
    assert s.timesteps(4, "leading").tolist() == [750, 500, 250, 0]
    with pytest.raises(ConfigError, match="1001 sampling steps"):
        s.timesteps(1001)


def _perfect(schedule, x0, prediction):
    """A model that knows x0: its output at x_t follows from the noise that x_t must hold."""

    def model(x, t, condition):
        eps = schedule.eps_from_x0(x0, x, t)
        return schedule.target(x0, eps, t, prediction)

    return model


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_samplers_find_what_a_perfect_model_knows(prediction, rng):
    schedule = linear(200)
    x0 = rng.uniform(-0.9, 0.9, (3, 4, 4, 2))
    start = rng.standard_normal(x0.shape)
    model = _perfect(schedule, x0, prediction)
    draw = lambda t: normal(5, t, x0.shape).astype(np.float64)  # noqa: E731
    np.testing.assert_allclose(ddim(model, start, None, schedule, 7, prediction=prediction), x0, atol=1e-6)
    np.testing.assert_allclose(
        ddim(model, start, None, schedule, 7, prediction=prediction, eta=1.0, noise=draw), x0, atol=1e-6
    )
    np.testing.assert_allclose(
        ancestral(model, start, None, schedule, 50, prediction=prediction, noise=draw), x0, atol=1e-6
    )


def test_ancestral_is_ddim_with_eta_one(rng):
    """DDIM's eq. 12 with eta = 1 is the posterior of DDPM: two derivations, one sampler."""
    schedule, start = cosine(100), rng.standard_normal((2, 4, 4, 3)).astype(np.float32)
    w = rng.standard_normal((3, 3)).astype(np.float32)
    model = lambda x, t, c: np.tanh(x @ w + t[:, None, None, None] / 100).astype(np.float32)  # noqa: E731
    draw = lambda t: normal(3, t, start.shape)  # noqa: E731
    a = ancestral(model, start, None, schedule, 20, noise=draw)
    b = ddim(model, start, None, schedule, 20, eta=1.0, noise=draw)
    np.testing.assert_allclose(a, b, atol=2e-4)


def test_gaussian_data_is_sampled_with_its_moments(rng):
    """For x0 ~ N(m, s²) the best eps prediction is known in closed form; samples must have the moments of
    the data.
    """
    m, s, schedule = 0.3, 0.25, cosine(1000)

    def model(x, t, c):
        alpha, sigma = schedule.coefficients(t, x.ndim)
        x0 = m + alpha * s**2 / (alpha**2 * s**2 + sigma**2) * (x - alpha * m)
        return schedule.target(x0, schedule.eps_from_x0(x0, x, t), t, "v")

    seed = int(rng.integers(2**31))
    # 400 steps leave 1 to 2 % of the deviation to the discretisation, 16,384 draws 0.6 % to chance.
    for sampler in ("ddim", "ancestral"):
        x = generate(
            model, range(seed, seed + 256), None, (8, 8, 1), schedule, 400, sampler=sampler, clip=None
        )
        assert x.mean() == pytest.approx(m, abs=0.02) and x.std() == pytest.approx(s, rel=0.05), sampler


@pytest.fixture(scope="module")
def unet():
    model = UNet2D(UNetConfig.tiny(caption_vocabulary=7), seed=1)
    model.apply_route(ROUTE)
    return model


@pytest.mark.parametrize("track", [None, "bf16"])
@pytest.mark.parametrize("sampler", ["ddim", "ancestral"])
def test_one_seed_one_picture_in_any_batch(unet, track, sampler, rng):
    """Bit for bit: alone, among others, in another place of another chunk; on the FP4 track by its route,
    and on BF16.
    """
    bags = (rng.random((23, 7)) < 0.5).astype(np.float32)
    seeds = rng.integers(0, 2**32, 23)

    def model(x, t, c):
        with no_grad():
            return unet(x, t, captions=c).data

    def draw(rows):
        return generate(
            model, seeds[rows], bags[rows], (8, 8, 12), cosine(1000), 2, sampler=sampler, chunk=16
        )

    with tracks(track):
        together = draw(np.arange(23))
        for rows in ([22], [5], [0, 22, 4], rng.permutation(23)):
            np.testing.assert_array_equal(draw(np.array(rows)), together[rows])
    assert len({p.tobytes() for p in together}) == 23


def test_losses_and_their_gradients(rng):
    output, target = rng.standard_normal((2, 3, 4, 4, 2))
    loss, gradient = squared_error(output, target)
    errors, slopes = picture_errors(output, target)
    assert errors.mean() == pytest.approx(loss)
    d, h = rng.standard_normal(output.shape), 1e-6
    numeric = (squared_error(output + h * d, target)[0] - squared_error(output - h * d, target)[0]) / (2 * h)
    assert (gradient * d).sum() == pytest.approx(numeric, rel=1e-6)
    up, down = (picture_errors(output + sign * h * d, target)[0] for sign in (1, -1))
    np.testing.assert_allclose((slopes * d).sum((1, 2, 3)), (up - down) / (2 * h), rtol=1e-6)


def test_average_follows_its_formula(rng):
    p = rng.standard_normal(5).astype(np.float32)
    ema, expected = EMA(p, 0.9), p.astype(np.float64)
    for step in range(30):
        p = rng.standard_normal(5).astype(np.float32)
        ema.update(p, step)
        d = min(0.9, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * p
    np.testing.assert_allclose(ema.average, expected, rtol=1e-4, atol=1e-5)


def test_bad_schedules():
    with pytest.raises(ConfigError, match="did you mean 've'"):
        get_schedule("vee")
    for low, high in ((0, 50), (-1, 50), (2.0, 1.0), (1.0, 1.0), (0.01, math.inf), (math.nan, 50)):
        with pytest.raises(ConfigError, match="ve: sigma runs from"):
            ve(10, low, high)
    with pytest.raises(ShapeError, match=r"alpha has shape \(3,\) but sigma has shape \(2,\)"):
        Schedule("odd", np.ones(3), np.ones(2))
    with pytest.raises(ShapeError, match="at least 1"):
        Schedule("none", np.ones(0), np.ones(0))
    for alpha, sigma in (([1, 1], [2, 1]), ([1, 1], [0, 1]), ([1, 0], [1, 2]), ([1, math.nan], [1, 2])):
        with pytest.raises(ConfigError, match="more noise in every level"):
            Schedule("odd", np.array(alpha, float), np.array(sigma, float))
    for bar in ([0.5, 0.0], [1.0, 0.5], [0.5, math.nan]):
        with pytest.raises(ConfigError, match="must lie between 0 and 1"):
            variance_preserving("odd", np.array(bar))
    with pytest.raises(ConfigError, match="did you mean 'eps'"):
        score_weight(ve(5), [0], "epsilon")


def test_bad_input():
    with pytest.raises(ConfigError, match="did you mean 'cosine'"):
        get_schedule("cosin")
    with pytest.raises(ConfigError, match="prediction: 'eps2'"):
        cosine(10).target(np.zeros((1, 1)), np.zeros((1, 1)), [0], "eps2")
    with pytest.raises(ConfigError, match="did you mean 'ddim'"):
        generate(None, [1], None, (1,), cosine(10), 2, sampler="ddimm")
    with pytest.raises(ShapeError, match="condition has 2 rows but there are 3 seeds"):
        generate(None, [1, 2, 3], np.zeros((2, 4)), (1,), cosine(10), 2)
    with pytest.raises(ConfigError, match="eta is 1.0 but no noise"):
        ddim(None, np.zeros((1, 1)), None, cosine(10), 2, eta=1.0)
    with pytest.raises(ShapeError, match=r"\(2, 1\) but target has shape \(1, 2\)"):
        squared_error(np.zeros((2, 1)), np.zeros((1, 2)))


def test_equals_diffusers(rng):
    """Timesteps, alpha_bar and one whole DDIM run of diffusers' scheduler, where the extra `peers` is
    installed.
    """
    diffusers = pytest.importorskip("diffusers", reason="the extra 'peers' is not installed")
    import torch

    peer = diffusers.DDIMScheduler(
        num_train_timesteps=1000,
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        clip_sample=False,
        timestep_spacing="trailing",
        set_alpha_to_one=True,
    )
    schedule = cosine(1000)
    np.testing.assert_allclose(schedule.alpha_bar, peer.alphas_cumprod.numpy(), rtol=2e-3, atol=1e-7)
    peer.set_timesteps(10)
    assert schedule.timesteps(10).tolist() == peer.timesteps.tolist()
    w = rng.standard_normal((3, 3)).astype(np.float32) / 3
    x = rng.standard_normal((2, 4, 4, 3)).astype(np.float32)
    model = lambda x, t, c: np.tanh(x @ w).astype(np.float32)  # noqa: E731
    ours = ddim(model, x, None, schedule, 10, clip=None)
    for t in peer.timesteps:
        x = peer.step(torch.from_numpy(model(x, None, None)), t, torch.from_numpy(x)).prev_sample.numpy()
    np.testing.assert_allclose(ours, x, atol=2e-3)
