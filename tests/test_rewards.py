"""Rewards are checked, judges learn a style, and no judge ever runs on the FP4 track."""

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.align.augment import Augmentation, augment, drawn
from fp4bf16.align.judges import ARCHITECTURES, Judge, train_judge
from fp4bf16.align.rewards import Reward, reward_name, score
from fp4bf16.errors import CheckpointError, ConfigError, NonFiniteError, RewardError, ShapeError
from fp4bf16.train import data

NAMES = tuple(ARCHITECTURES)


@pytest.fixture(scope="module")
def pairs():
    return data.load_pairs(16)


@pytest.fixture
def pictures(rng):
    return rng.uniform(-1, 1, (5, 16, 16, 3)).astype(np.float32)


def test_score_returns_float32_in_order(pictures):
    def brightness(images, prompts):
        return [float(x.mean()) + len(p) for x, p in zip(images, prompts, strict=True)]

    values = score(brightness, pictures, ["a", "bb", "ccc", "dddd", "eeeee"])
    assert values.dtype == np.float32 and isinstance(brightness, Reward)
    np.testing.assert_allclose(values - pictures.mean(axis=(1, 2, 3)), [1, 2, 3, 4, 5], rtol=1e-5)


@pytest.mark.parametrize("answer, text", [
    (lambda n: np.zeros(n - 1), r"reward bad: returned shape \(4,\) for 5 pictures; it must return one"),
    (lambda n: np.zeros((n, 1)), r"returned shape \(5, 1\) for 5 pictures"),
    (lambda n: 1.0, r"returned shape \(\) for 5 pictures"),
    (lambda n: np.ones(n) + 1j, "returned ndarray, no numbers; it must return 5 numbers"),
    (lambda n: np.ma.masked_array(np.ones(n), [0, 0, 1, 0, 0]), r"nan for picture 2 \('p2'\)"),
    (lambda n: [1e300] + [0.0] * (n - 1), r"inf for picture 0 \('p0'\)"),
    (lambda n: [0.0, 1.0, np.nan, 1.0, np.inf], r"nan for picture 2 \('p2'\), and is not finite for 2 of 5"),
    (lambda n: ["good"] * n, "returned list, no numbers; it must return 5 numbers"),
])  # fmt: skip
def test_a_bad_reward_is_named(pictures, answer, text):
    def bad(images, prompts):
        return answer(len(images))

    with pytest.raises(RewardError, match=text):
        score(bad, pictures, [f"p{i}" for i in range(5)])


def test_a_reward_cannot_change_what_it_looks_at(pictures):
    def vandal(images, prompts):
        images[...] = 7
        prompts.clear()
        return np.zeros(len(images))

    before, prompts = pictures.copy(), ["p"] * 5
    score(vandal, pictures, prompts)
    assert np.array_equal(pictures, before) and prompts == ["p"] * 5


def test_a_reward_may_answer_with_a_tensor_that_wants_a_gradient(pictures):
    torch = pytest.importorskip("torch")
    values = score(lambda images, prompts: torch.arange(5.0, requires_grad=True), pictures, ["p"] * 5)
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_prompts_must_match_and_names_are_found(pictures):
    with pytest.raises(RewardError, match="5 pictures but 2 prompts; pass one a picture"):
        score(lambda images, prompts: np.zeros(5), pictures, ["a", "b"])
    assert reward_name(Judge("heldout", 8)) == "heldout" and reward_name(score) == "score"


def test_augmentation_is_a_pure_function_and_alike_for_both_styles(pairs):
    x = np.stack([pairs.images[0, :24]] * 2)  # the same drawing as both styles
    a, b = augment(x, 3, 7), augment(x, 3, 7)
    assert a.dtype == np.float32 and np.abs(a).max() <= 1 and a.shape == x.shape
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, augment(x, 3, 8)) and not np.array_equal(a, augment(x, 4, 7))
    still = Augmentation(noise=0)
    both = augment(x, 3, 7, still)
    np.testing.assert_array_equal(both[0], both[1])
    assert np.abs(both[0] - x[0]).mean() > 0.02
    same = augment(x, 3, 7, Augmentation(*[0] * 8))
    for made, source in zip(same[0], x[0], strict=True):  # what is left is mirroring
        assert min(np.abs(made - source).max(), np.abs(made - source[:, ::-1]).max()) < 1e-6


def test_augmentation_plants_periodic_patterns_and_noise(pairs):
    x = np.zeros((2, 400, 16, 16, 3), np.float32)
    only = dict.fromkeys(Augmentation.__dataclass_fields__, 0)
    pattern = augment(x, 1, 0, Augmentation(**only | {"pattern": 0.2}))[0]
    amplitude = np.abs(pattern).max(axis=(1, 2, 3))
    assert 0.35 < (amplitude > 0).mean() < 0.65 and 0.07 < amplitude.max() <= 0.2
    np.testing.assert_array_equal(pattern[:, 4:], pattern[:, :-4])
    np.testing.assert_array_equal(pattern[:, :, 4:], pattern[:, :, :-4])
    fine = np.abs(pattern[:, 2:] - pattern[:, :-2]).max(axis=(1, 2, 3)) == 0
    assert 0.3 < (fine & (amplitude > 0)).sum() / (amplitude > 0).sum() < 0.7
    noise = augment(x, 1, 0, Augmentation(**only | {"noise": 0.15}))
    spread = noise.std(axis=(2, 3, 4))
    assert 0.35 < (spread[0] > 0).mean() < 0.65 and spread.max() < 0.2
    noisy = spread[0] > 0
    np.testing.assert_allclose(spread[0][noisy], spread[1][noisy], rtol=0.25)
    assert not np.array_equal(noise[0], noise[1])


def test_every_kind_of_change_occurs_for_winners_and_losers_alike(pairs, monkeypatch):
    """What a judge is shown in training: blur, noise, colour jitter and small patterns on both classes."""
    x, shown, steps, batch = pairs.images[0, :64], [], 12, 64
    judge = Judge("reward", 8)
    forward = judge.network.forward
    monkeypatch.setattr(judge.network, "forward", lambda y: shown.append(np.array(y)) or forward(y))
    train_judge(judge, x, x, steps=steps, batch=batch, seed=4)  # the same drawings as winners and losers
    amounts = [drawn(4, step, batch // 2) for step in range(steps)]
    amounts = {kind: np.concatenate([a[kind] for a in amounts]) for kind in amounts[0]}
    for kind in ("blur", "noise", "pattern"):
        largest, values = getattr(Augmentation(), kind), amounts[kind]
        assert (
            0.4 < (values > 0).mean() < 0.6 and 0.9 * largest < values.max() <= largest and values.min() == 0
        )
    for kind in ("brightness", "contrast", "saturation", "hue"):
        largest = getattr(Augmentation(), kind)
        assert (
            -largest <= amounts[kind].min() < -0.9 * largest
            and 0.9 * largest < amounts[kind].max() <= largest
        )
    assert len(shown) == steps
    winners, losers = np.concatenate([s.reshape(2, batch // 2, 16, 16, 3) for s in shown], axis=1)
    apart = (winners - losers).std(axis=(1, 2, 3))
    assert not apart[amounts["noise"] == 0].any()  # all but the noise is the same, and that is as strong
    noisy = amounts["noise"] > 0.02
    plain = np.abs(np.clip(winners, -0.97, 0.97) - winners).max(axis=(1, 2, 3)) == 0  # nothing was clipped
    assert (apart[noisy] > 0.004).all() and (apart <= 1.2 * np.sqrt(2) * amounts["noise"] + 1e-6).all()
    chosen = noisy & plain
    if chosen.any():
        np.testing.assert_allclose(apart[chosen], np.sqrt(2) * amounts["noise"][chosen], rtol=0.2)


def test_hue_turns_about_grey(rng):
    x = rng.uniform(-0.3, 0.3, (1, 50, 8, 8, 3)).astype(np.float32)
    x[0, :, :4] = x[0, :, :4, :, :1]  # the upper half is grey
    only = dict.fromkeys(Augmentation.__dataclass_fields__, 0)
    y = augment(x, 2, 1, Augmentation(**only | {"hue": 3.0}))
    mirrored = np.abs(y.mean(-1) - x.mean(-1)).max(axis=(0, 2, 3)) > 1e-6
    x[:, mirrored] = x[:, mirrored, :, ::-1]
    np.testing.assert_allclose(y.mean(-1), x.mean(-1), atol=1e-6)
    np.testing.assert_allclose(y[:, :, :4], x[:, :, :4], atol=1e-6)
    np.testing.assert_allclose(y.std(-1), x.std(-1), atol=1e-6)  # length of the chroma
    assert np.abs(y - x).max() > 0.1
    grey = augment(x, 2, 1, Augmentation(**only | {"saturation": 1.0}))
    ratio = grey.std(-1)[0, :, 4:].mean(axis=(1, 2)) / x.std(-1)[0, :, 4:].mean(axis=(1, 2))
    assert ratio.min() < 0.4 and 1.6 < ratio.max() <= 2.01


def _area_under_curve(judge, winners, losers):
    return float((judge(winners)[:, None] > judge(losers)[None]).mean())


@pytest.mark.parametrize("name", NAMES)
def test_a_judge_learns_the_style_and_carries_it_to_faces(pairs, name):
    train = pairs.select(role=name)
    faces = pairs.select(word="face")
    judge = Judge(name, 16, seed=0)
    before = _area_under_curve(judge, *faces.images)
    losses = []
    last = train_judge(
        judge, *train.images, steps=120, batch=48, lr=6e-3, on_step=lambda step, loss: losses.append(loss)
    )
    assert len(losses) == 120 and last < np.mean(losses[:10]) - 0.1
    after = _area_under_curve(judge, *faces.images)
    assert after > max(0.78, before + 0.1), (before, after)

    policy = faces.select(role="policy").images
    shift = judge.calibrate(*policy)
    assert abs(np.median(judge(policy[0])) + np.median(judge(policy[1]))) < 0.05 and np.isfinite(shift)
    assert judge.accuracy(*faces.select(role="evaluation").images) > 0.6
    odds, probability = judge(faces.images[0]), judge.probability(faces.images[0])
    np.testing.assert_allclose(np.log(probability) - np.log1p(-probability), odds, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_training_begun_again_gives_the_same_bits(pairs, name):
    x = pairs.select(role=name).images[:, :64]
    states = []
    for _ in range(2):
        judge = Judge(name, 8, seed=5)
        train_judge(judge, *x, steps=4, batch=16, seed=11)
        states.append(judge.state_dict())
    for key, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][key])
    other = Judge(name, 8, seed=5)
    train_judge(other, *x, steps=4, batch=16, seed=12)
    assert any(not np.array_equal(v, states[0][k]) for k, v in other.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_judges_never_run_on_the_fp4_track(pairs, name, monkeypatch):
    judge = Judge(name, 16, seed=2)
    x = pairs.images[0, :20]
    expected = judge(x)
    with fb.tracks("fp4"):
        np.testing.assert_array_equal(judge(x), expected)
        trained = Judge(name, 8)
        train_judge(trained, x, pairs.images[1, :20], steps=2, batch=8)
        inside = fb.matmul(np.ones((2, 16), np.float32) * 1.2345, np.ones((16, 2), np.float32))
    assert abs(inside[0, 0] - 16 * 1.2345) > 1e-2  # the override was in force around the judge
    monkeypatch.setenv("FP4BF16_TRACK", "fp4")
    np.testing.assert_array_equal(judge(x), expected)
    plain = Judge(name, 8)
    train_judge(plain, x, pairs.images[1, :20], steps=2, batch=8)
    for key, value in plain.state_dict().items():
        np.testing.assert_array_equal(value, trained.state_dict()[key])
    reference = Judge.from_state(name, 16, judge.state_dict(), track="reference")(x)
    assert 0 < np.abs(reference - expected).max() < 0.1  # BF16 rounds, but little


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [16, 32])
def test_state_round_trips_and_batches_do_not_matter(rng, name, size):
    judge = Judge(name, 8, seed=3)
    x = rng.uniform(-1, 1, (300, size, size, 3)).astype(np.float32)  # more than one chunk
    odds = judge(x)
    assert odds.shape == (300,) and odds.dtype == np.float32 and np.isfinite(odds).all()
    again = Judge.from_state(name, 8, {k: v.copy() for k, v in judge.state_dict().items()})
    np.testing.assert_array_equal(again(x), odds)
    np.testing.assert_allclose(judge(x[250:270], ["a prompt"] * 20), odds[250:270], atol=2e-3)
    assert len(judge(x[:0])) == 0


def test_the_two_judges_differ_in_architecture():
    shapes = [sorted(v.shape for v in Judge(name, 16).state_dict().values()) for name in NAMES]
    assert NAMES == ("reward", "heldout") and shapes[0] != shapes[1]
    seeds = [Judge("reward", 8, seed=s).state_dict()["head.weight"] for s in (0, 0, 1)]
    np.testing.assert_array_equal(seeds[0], seeds[1])
    assert not np.array_equal(seeds[0], seeds[2])


@pytest.mark.parametrize("call, error, text", [
    (lambda: Judge("rewards"), ConfigError, "'rewards' is no judge; did you mean 'reward'"),
    (lambda: Judge("reward", 12), ConfigError, "width is 12, but it must be a multiple of 8"),
    (lambda: Judge("reward", 8, track="fp4"), ConfigError, "track is 'fp4', but judges run on 'bf16'"),
    (lambda: Judge("heldout", 8)(np.zeros((2, 18, 16, 3))), ShapeError, r"have shape \(2, 18, 16, 3\)"),
    (lambda: Judge("heldout", 8)(np.zeros((16, 16, 3))), ShapeError, r"takes \(n, H, W, 3\)"),
    (lambda: Judge.from_state("reward", 8, Judge("reward", 16).state_dict()), CheckpointError, "width 8"),
    (lambda: Judge.from_state("heldout", 8, Judge("reward", 8).state_dict()), CheckpointError, "missing: "),
    (lambda: train_judge(Judge("reward", 8), np.zeros((4, 16, 16, 3)), np.zeros((3, 16, 16, 3)), steps=1),
     ShapeError, r"losers: shape is \(3, 16, 16, 3\), but winners have \(4"),
])  # fmt: skip
def test_bad_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_diverging_judge_says_so(pairs, monkeypatch):
    judge = Judge("reward", 8)
    judge.network.head.bias.assign(np.float32([np.inf]))
    with pytest.raises(NonFiniteError, match="judge reward: loss is nan at step 0; lower its lr"):
        train_judge(judge, *pairs.images[:, :8], steps=3, batch=4)
