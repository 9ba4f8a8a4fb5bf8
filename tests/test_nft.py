"""DiffusionNFT: its loss in plain Python, its gradient against finite differences, its reading of a batch."""

from __future__ import annotations

import numpy as np
import pytest

from fp4bf16 import tracks
from fp4bf16.align.drift import hold, phase_drift
from fp4bf16.align.nft import NFT_STATS, NFTSettings, nft_backward, nft_loss, old_share
from fp4bf16.diffusion import PREDICTIONS, cosine, get_schedule
from fp4bf16.errors import ConfigError, ShapeError
from fp4bf16.nn.tape import no_grad
from fp4bf16.nn.unet import UNet2D, UNetConfig

SCHEDULES = ("cosine", "linear", "ve")
SETTINGS = NFTSettings(beta=0.7, kl=0.3, advantage_clip=4.0)


def _batch(rng, prediction="v", schedule="cosine", n=3, shape=(2, 2, 4), dtype=np.float64):
    """(output, old, reference, x_t, x0, (a, b), advantage), t: a policy not far from the old one."""
    s = get_schedule(schedule, 50)
    x0, eps = rng.uniform(-1, 1, (n, *shape)).astype(dtype), rng.standard_normal((n, *shape)).astype(dtype)
    t = rng.integers(0, 50, n)
    x_t, target = s.add_noise(x0, eps, t), s.target(x0, eps, t, prediction)
    output, old, reference = (target + 0.3 * rng.standard_normal(x0.shape).astype(dtype) for _ in range(3))
    advantage = rng.uniform(-5, 5, n)
    return (output, old, reference, x_t, x0, s.x0_coefficients(t, prediction, x0.ndim, dtype), advantage), t


def _plain(output, old, reference, x_t, x0, coefficients, advantage, settings, frozen=None):
    """The loss as the module's text has it, a picture and an element at a time. `frozen`: the weights w."""
    beta, kl, c, total, weights = settings.beta, settings.kl, settings.advantage_clip, 0.0, []
    for i in range(len(output)):
        a, b = (float(k.reshape(-1)[i]) for k in coefficients)
        unit, r = max(1.0, abs(b)), min(1.0, max(0.0, min(c, max(-c, float(advantage[i]))) / (2 * c) + 0.5))
        errors = []
        for sign in (1, -1):
            mixed = [(1 - sign * beta) * vo + sign * beta * v
                     for v, vo in zip(output[i].ravel(), old[i].ravel(), strict=True)]  # fmt: skip
            known = zip(mixed, x_t[i].ravel(), x0[i].ravel(), strict=True)
            errors.append([(a * x + b * v - y) / unit for v, x, y in known])
        w = [max(1e-5, sum(abs(e) for e in es) / len(es)) for es in errors]
        weights.append(w)
        w = w if frozen is None else frozen[i]
        means = [sum(e * e for e in es) / len(es) for es in errors]
        total += c * (r * means[0] / w[0] + (1 - r) * means[1] / w[1]) / beta / len(output)
    distance = output - reference
    return total + kl * float(np.mean(distance**2)), weights


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loss_in_plain_python(prediction, schedule, rng):
    batch, _ = _batch(rng, prediction, schedule)
    found = nft_loss(*batch, SETTINGS)
    stats = dict(zip(NFT_STATS, found.values, strict=True))
    want, _ = _plain(*batch, SETTINGS)
    assert stats["loss"] == pytest.approx(want, rel=1e-9)
    parts = stats["loss/positive"] + stats["loss/negative"] + stats["loss/kl"]
    assert parts == pytest.approx(want, rel=1e-9)
    assert stats["kl"] == pytest.approx(np.mean((batch[0] - batch[2]) ** 2))
    assert stats["moved"] == pytest.approx(np.mean((batch[0] - batch[1]) ** 2))


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradient_is_finite_differences(prediction, schedule, rng):
    """Along every element, with the weights w held where they are: they are constants of the loss."""
    batch, _ = _batch(rng, prediction, schedule, n=2, shape=(1, 3, 2))
    gradient, h = nft_loss(*batch, SETTINGS).gradient, 1e-6
    _, weights = _plain(*batch, SETTINGS)
    assert gradient.shape == batch[0].shape and gradient.dtype == np.float64
    for at in np.ndindex(batch[0].shape):
        ends = []
        for step in (h, -h):
            output = batch[0].copy()
            output[at] += step
            ends.append(_plain(output, *batch[1:], SETTINGS, weights)[0])
        assert gradient[at] == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_pictures_that_fill_a_batch_up_are_left_out(dtype, rng):
    """A batch that is all live has the bits of one without `live`; what is not live adds nothing to loss,
    statistics or gradient, whatever it is.
    """
    batch, _ = _batch(rng, n=5, dtype=dtype)
    plain, whole = nft_loss(*batch, SETTINGS), nft_loss(*batch, SETTINGS, np.ones(5))
    np.testing.assert_array_equal(plain.values, whole.values)
    np.testing.assert_array_equal(plain.gradient, whole.gradient)
    coefficients = tuple(k[:3] for k in batch[5])
    alone = nft_loss(*(b[:3] for b in batch[:5]), coefficients, batch[6][:3], SETTINGS)
    live, limit = np.array([1.0, 1.0, 1.0, 0.0, 0.0]), 1e-12 if dtype == np.float64 else 1e-5
    for i, a in enumerate(batch[:5]):
        a[3:] += i + 1
    batch[6][3:] = 5.0, -5.0
    found = nft_loss(*batch, SETTINGS, live)
    np.testing.assert_allclose(found.values, alone.values, rtol=limit)
    np.testing.assert_allclose(found.gradient[:3], alone.gradient, rtol=limit, atol=limit * 1e-2)
    assert not found.gradient[3:].any()


def test_published_values_by_hand():
    """beta 1, kl 1e-4, clip 5, no hold, of one picture of two elements, with A = 2.5, which is r = 3/4.

    v+ = v, v- = 2 v_old - v. e+ = (-0.5, 0.1), w+ = 0.3, mean square 0.13; e- = (-0.7, 0.3), w- = 0.5, mean
    square 0.29: L = 5 (3/4 0.13 / 0.3 + 1/4 0.29 / 0.5) + 1e-4 0.04 = 2.350004. dL/dv = 5 (3/4 e+ / 0.3 - 1/4
    e- / 0.5) + 1e-4 (v - v_ref).
    """
    output, old, reference = (np.array(v).reshape(1, 1, 1, 2) for v in ((0.5, 0.1), (0.4, 0.2), (0.3, 0.3)))
    x0 = np.array([1.0, 0.0]).reshape(1, 1, 1, 2)

    class Output:
        data = output

        def backward(self, gradient):
            self.gradient = gradient

    policy = Output()
    noise, t, advantage = np.zeros_like(x0), np.array([20]), np.array([2.5])
    others = (lambda *a: old), (lambda *a: reference)
    loss, stats = nft_backward(lambda *a: policy, *others, x0, None, t, noise, advantage, cosine(50), "x0")
    assert loss == pytest.approx(2.350004, rel=1e-12)
    want = [-4.5 + 1e-4 * 0.2, 0.5 - 1e-4 * 0.2]
    np.testing.assert_allclose(policy.gradient.ravel(), want, rtol=1e-12)
    assert stats["loss/kl"] == pytest.approx(4e-6) and stats["kl"] == pytest.approx(0.04)


def test_mixing_outputs_is_mixing_pictures(rng):
    """v+ and v- of the papers, in velocities, give the x0 that the loss mixes."""
    s, n = cosine(50), 4
    x0, eps, v, old = rng.standard_normal((4, n, 2, 2, 4))
    t, beta = rng.integers(0, 50, n), 0.6
    x_t = s.add_noise(x0, eps, t)

    def clean(velocity):
        return s.to_x0_eps(velocity, x_t, t, "v")[0]

    plus, minus = beta * v + (1 - beta) * old, (1 + beta) * old - beta * v
    np.testing.assert_allclose(clean(plus), beta * clean(v) + (1 - beta) * clean(old), atol=1e-12)
    np.testing.assert_allclose(clean(minus), (1 + beta) * clean(old) - beta * clean(v), atol=1e-12)


def test_at_the_old_policy_only_the_advantage_pulls(rng):
    """No advantage, no gradient; and an advantage of either sign moves the picture's error its own way."""
    batch, _ = _batch(rng)
    output, _, _, x_t, x0, (a, b), _ = batch
    same = (output, output, output, x_t, x0, (a, b))
    none = nft_loss(*same, np.zeros(3))
    assert np.abs(none.gradient).max() < 1e-15
    error = a * x_t + b * output - x0
    for advantage in (np.full(3, 2.0), np.full(3, -2.0)):
        slope = nft_loss(*same, advantage).gradient  # descent moves the output by -slope, x0 by -b slope
        towards = -(b * slope * error).reshape(3, -1).sum(1)
        assert (np.sign(towards) == -np.sign(advantage)).all()
    whole = nft_loss(*same, np.full(3, 1e9)).gradient  # clipped: r is 1
    np.testing.assert_array_equal(whole, nft_loss(*same, np.full(3, 5.0)).gradient)
    np.testing.assert_allclose(nft_loss(*same, np.full(3, 2.5)).gradient, whole / 2, rtol=1e-12)


def test_rewards_are_of_the_right_pictures(rng):
    batch, _ = _batch(rng, n=4)
    output, old, reference, x_t, x0, (a, b), _ = batch
    stats = dict(zip(NFT_STATS, nft_loss(*batch[:6], np.array([3.0, -1.0, 0.0, 2.0])).values, strict=True))
    error, anchor = (np.mean((a * x_t + b * o - x0) ** 2, (1, 2, 3)) for o in (output, reference))
    reward = anchor - error
    assert stats["rewards/chosen"] == pytest.approx(reward[[0, 3]].mean())
    assert stats["rewards/rejected"] == pytest.approx(reward[1])
    assert stats["rewards/margins"] == pytest.approx(reward[[0, 3]].mean() - reward[1])
    right = [reward[0] > 0, reward[3] > 0, reward[1] < 0]
    assert stats["rewards/accuracies"] == pytest.approx(np.mean(right))
    assert stats["advantage"] == pytest.approx(1.0)
    flat = dict(zip(NFT_STATS, nft_loss(*batch[:6], np.zeros(4)).values, strict=True))
    assert flat["rewards/chosen"] == flat["rewards/rejected"] == 0 and flat["rewards/accuracies"] == 0.5


def test_noise_levels_share_the_gradient_whatever_is_predicted(rng):
    """With eps, x0 is off by sigma / alpha times the output's error, hundreds where alpha is next to nothing:
    one such level must not be all of the gradient."""
    s, n = cosine(1000), 2
    x0, eps = rng.standard_normal((2, n, 4, 4, 3))
    t = np.array([999, 500])
    x_t = s.add_noise(x0, eps, t)
    output = eps + 0.1 * rng.standard_normal(eps.shape)
    loss = nft_loss(
        output, output, output, x_t, x0, s.x0_coefficients(t, "eps", 4, np.float64), np.full(2, 5.0)
    )
    size = np.linalg.norm(loss.gradient.reshape(n, -1), axis=1)
    assert 0.2 < size[0] / size[1] < 5 and np.isfinite(loss.values).all()


def test_perfect_pictures_give_no_nan(rng):
    """The weights have a least value: an error of exactly 0 divides by no 0."""
    x0 = rng.standard_normal((2, 2, 2, 3))
    loss = nft_loss(x0, x0, x0, x0, x0, (np.zeros(2), np.ones(2)), np.array([1.0, -1.0]))
    assert loss.values[0] == 0 and not loss.gradient.any()


# ---- the network


def _tiny(dtype) -> UNet2D:
    config = UNetConfig.tiny(block_out_channels=(8, 16), norm_num_groups=4, caption_vocabulary=5)
    return UNet2D(config, seed=3).to(dtype)


@pytest.mark.parametrize("kept", [0.0, 2.0])
def test_network_gradient_is_finite_differences(kept, rng):
    """Whole chain in float64 on the unrounded track; the weights w are taken from the middle."""
    model, s, n = _tiny(np.float64), cosine(100), 3
    old, reference = (model.flat.data + 0.02 * rng.standard_normal(model.flat.data.shape) for _ in range(2))
    x0, eps = rng.standard_normal((2, n, 8, 8, 12))
    bags, t = (rng.random((n, 5)) < 0.5).astype(np.float64), rng.integers(0, 100, n)
    advantage, seen = rng.uniform(-4, 4, n), {}
    x_t, coefficients = s.add_noise(x0, eps, t), s.x0_coefficients(t, "v", 4, np.float64)

    def frozen(weights):
        def run(x, t, c):
            with model.using(weights), no_grad():
                return model(x, t, captions=c).data

        return run

    def policy(x, t, c):
        seen["output"] = model(x, t, captions=c)
        return seen["output"]

    with tracks("reference"):
        others = frozen(old)(x_t, t, bags), frozen(reference)(x_t, t, bags)
        model.zero_grad()
        loss, stats = nft_backward(policy, frozen(old), frozen(reference), x0, bags, t, eps, advantage, s,
                                   "v", SETTINGS, kept, phases=4)  # fmt: skip
        batch = (*others, x_t, x0, coefficients, advantage)
        middle = seen["output"].data
        want, weights = _plain(middle, *batch, SETTINGS)
        assert loss == pytest.approx(want, rel=1e-9)
        d = phase_drift(middle, others[1], 4)
        assert stats["drift"] == pytest.approx(np.sqrt(np.mean(d**2)))

        def value() -> float:
            model.flat.touch()
            with no_grad():
                output = policy(x_t, t, bags).data
            d = phase_drift(output, others[1], 4)
            added = SETTINGS.advantage_clip * kept * np.mean(d**2)
            return _plain(output, *batch, SETTINGS, weights)[0] + added

        gradient, direction = model.flat.grad.copy(), rng.standard_normal(model.flat.data.shape)
        direction[gradient == 0] = 0
        h, start = 1e-6, model.flat.data.copy()
        model.flat.data[...] = start + h * direction
        up = value()
        model.flat.data[...] = start - h * direction
        numeric = (up - value()) / (2 * h)
    assert gradient @ direction == pytest.approx(numeric, rel=1e-5)


def test_hold_leaves_out_what_fills_a_batch_up(rng):
    output, reference = rng.standard_normal((2, 5, 2, 2, 8))
    live = np.array([1.0, 1.0, 1.0, 0.0, 0.0])
    whole, part = np.zeros_like(output), np.zeros_like(output[:3])
    a = hold(whole, output, reference, 4, 0.7, live)
    b = hold(part, output[:3], reference[:3], 4, 0.7)
    assert a == pytest.approx(b) and not whole[3:].any()
    np.testing.assert_allclose(whole[:3], part, rtol=1e-12, atol=1e-15)


# ---- bad input


@pytest.mark.parametrize("name, value, sentence", [
    ("beta", 0.0, "nft.beta: is 0.0, but it must be positive"),
    ("beta", -1.0, "nft.beta: is -1.0"),
    ("kl", -1e-4, "nft.kl: is -0.0001, but it must be 0 or more"),
    ("advantage_clip", np.inf, "nft.advantage_clip: is inf"),
    ("beta", np.nan, "nft.beta: is nan"),
])  # fmt: skip
def test_settings_that_cannot_be(name, value, sentence):
    with pytest.raises(ConfigError, match=sentence):
        NFTSettings(**{name: value})


def test_shapes_that_do_not_belong_together(rng):
    batch, _ = _batch(rng)
    for at, name in enumerate(("old", "reference", "x_t", "x0"), start=1):
        with pytest.raises(
            ShapeError, match=rf"nft_loss: {name} has shape \(2, 2, 2, 4\) but output has shape"
        ):
            nft_loss(*(b[:2] if i == at else b for i, b in enumerate(batch)))
    with pytest.raises(ShapeError, match=r"advantage has shape \(2,\) but there are 3 pictures"):
        nft_loss(*batch[:6], batch[6][:2])
    with pytest.raises(ShapeError, match=r"live has shape \(2,\) but there are 3 pictures"):
        nft_loss(*batch, SETTINGS, np.ones(2))
    with pytest.raises(ShapeError, match="holds no picture"):
        empty = batch[0][:0]
        nft_loss(empty, empty, empty, empty, empty, (np.zeros(0), np.zeros(0)), np.zeros(0))


def test_old_policy_follows_slowly_first():
    assert [old_share(i) for i in (0, 1, 100, 499, 500, 5000)] == [0.0, 0.001, 0.1, 0.499, 0.5, 0.5]
