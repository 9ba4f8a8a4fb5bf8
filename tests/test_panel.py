"""Panels: specifications, normalised sums, training, exact state; and the measures of pixels in them."""

import io
import pickle
import sys

import numpy as np
import pytest

from fp4bf16.align import guards, panel, rewards
from fp4bf16.align.judges import Judge, train_judge
from fp4bf16.align.measures import Captioned, Learning, Measure, PanelData
from fp4bf16.align.panel import KINDS, Panel, Part, Running, parse_weights
from fp4bf16.align.rewards import Reward, reward_name, score
from fp4bf16.diffusion.noise import subseed
from fp4bf16.errors import CheckpointError, ConfigError, NonFiniteError, RewardError, ShapeError
from fp4bf16.train import data

QUICK = Learning(steps=30, batch=16, width=8, seed=3)


@pytest.fixture(scope="module")
def pairs():
    return data.load_pairs(16)


@pytest.fixture(scope="module")
def learning_data(pairs):
    def of(**which):
        found = pairs.select(**which)
        return Captioned(found.style("noto"), found.captions, found.style("twemoji"))

    return PanelData(of(role="reward"), of(role="heldout"), of(role="policy"), of(role="evaluation"))


@pytest.fixture
def pictures(pairs, rng):
    chosen = rng.permutation(len(pairs))[:40]
    return pairs.images[0, chosen], [pairs.captions[i] for i in chosen]


class Fixed(Measure):
    """Answers with what it was made with."""

    kind = "fixed"

    def __init__(self, function, role="reward"):
        super().__init__(role)
        self.function = function

    def _values(self, images, prompts):
        return np.asarray(self.function(images), np.float64)


def _panel(*functions, weights=None):
    parts = []
    for i, function in enumerate(functions):
        weight = 1.0 if weights is None else weights[i]
        watching = Fixed(lambda x, f=function: -f(x), "heldout")
        parts.append(Part(f"part{i}", weight, "", Fixed(function), watching))
    return Panel(parts)


# ---- specifications
@pytest.mark.parametrize("spec, weights, name", [
    ("style", {"style": 1}, "style"),
    (" -jpeg ", {"jpeg": -1}, "-jpeg"),
    ("style + 0.5 colourfulness", {"style": 1, "colourfulness": 0.5}, "style + 0.5 colourfulness"),
    ("colourfulness - 0.5 jpeg", {"colourfulness": 1, "jpeg": -0.5}, "colourfulness - 0.5 jpeg"),
    ("2*class-jpeg+.25colorfulness", {"class": 2, "jpeg": -1, "colourfulness": 0.25},
     "2 class - jpeg + 0.25 colourfulness"),
    ("1e-3 caption", {"caption": 1e-3}, "0.001 caption"),
])  # fmt: skip
def test_specifications(spec, weights, name):
    made = Panel.parse(spec)
    assert parse_weights(spec) == weights == {p.name: p.weight for p in made.parts}
    assert made.name == name and Panel.parse(name).name == name
    assert reward_name(made) == name and isinstance(made, Reward)
    for part in made.parts:
        assert (part.reward.role, part.heldout.role) == ("reward", "heldout")
        assert part.heldout.name == f"{part.name} (held out)" and part.unit == part.heldout.unit


@pytest.mark.parametrize("spec, text", [
    ("", "align.reward: is '', but it must name a reward; known: style, preference, caption"),
    ("   ", "must name a reward"),
    (None, "is None, but it must name a reward"),
    ("stile", "'stile' in 'stile' is no reward; did you mean 'style'?"),
    ("style + 0.5 colorful", "'colorful' in .* did you mean 'colourfulness'?"),
    ("style + 0 jpeg", "the weight of jpeg is 0 in 'style . 0 jpeg'; give it a finite weight other than 0"),
    ("-0.0 style", "the weight of style is -0 "),
    ("nan style", "the weight of style is nan"),
    ("style - inf jpeg", "the weight of jpeg is -inf"),
    ("1e999 style", "the weight of style is inf"),
    ("style + jpeg + style", "style stands twice in .*; add up its weights"),
    ("colorfulness + colourfulness", "colourfulness stands twice"),
    ("style jpeg", "'style jpeg' cannot be read from 'jpeg' on; write names with weights, such as"),
    ("style +", r"cannot be read from '\+' on"),
    ("style + 0.5", r"cannot be read from '\+ 0.5' on"),
    ("* style", "cannot be read"), ("--jpeg", "cannot be read"), ("0.5", "cannot be read"),
    ("style, jpeg", "cannot be read from ', jpeg' on"), ("style (jpeg)", "cannot be read"),
])  # fmt: skip
def test_bad_specifications_are_named(spec, text):
    with pytest.raises(ConfigError, match=text):
        Panel.parse(spec)


def test_a_panel_needs_a_part():
    with pytest.raises(ConfigError, match="a panel without parts"):
        Panel([])


# ---- the running scale
def test_running_is_the_mean_and_deviation_of_everything(rng):
    values = rng.normal(1e6, 2.0, 500)
    running = Running()
    for part in np.split(values, np.sort(rng.integers(0, 500, 7))):
        running.add(part)
    assert running.count == 500
    assert running.mean == pytest.approx(values.mean(), rel=1e-12)
    assert running.std == pytest.approx(values.std(), rel=1e-7)
    again = Running()
    again.from_array(running.to_array())
    np.testing.assert_array_equal(again.normalise(values), running.normalise(values))
    assert abs(running.normalise(values).mean()) < 1e-6


@pytest.mark.parametrize("value", [0.0, 0.1, -1e9, 1e-30])
def test_a_constant_reward_contributes_nothing(value):
    running = Running()
    for n in (3, 1, 7):
        running.add(np.full(n, np.float32(value)))
    assert running.std == 0 and not running.normalise(np.full(5, value)).any()
    made = _panel(lambda x: x.mean(axis=(1, 2, 3)), lambda x: np.full(len(x), value))
    x = np.linspace(-1, 1, 6, dtype=np.float32)[:, None, None, None] * np.ones((1, 8, 8, 3), np.float32)
    made.observe(x, ["p"] * 6)
    only = x[:, 0, 0, 0] / x[:, 0, 0, 0].std()
    np.testing.assert_allclose(made.reward(x, ["p"] * 6), only, atol=1e-5)


# ---- sums
def test_one_part_is_its_weight_times_its_value_and_needs_no_scale(pictures):
    x, prompts = pictures
    for weight in (1.0, -2.5):
        made = _panel(lambda images: images.mean(axis=(1, 2, 3)), weights=[weight])
        values, watched = made.reward(x, prompts), made.heldout(x, prompts)
        assert values.dtype == np.float32 and watched.dtype == np.float64
        np.testing.assert_allclose(values, weight * x.mean(axis=(1, 2, 3)), rtol=1e-5)
        np.testing.assert_allclose(watched, -values, rtol=1e-6)
        made.observe(x, prompts)
        np.testing.assert_array_equal(made.reward(x, prompts), values)


def test_several_parts_are_brought_to_one_scale(pictures):
    x, prompts = pictures
    functions = lambda i: i.mean(axis=(1, 2, 3)), lambda i: 1e4 * i.std(axis=(1, 2, 3)) + 7  # noqa: E731
    made = _panel(*functions, weights=[1.0, -0.5])
    with pytest.raises(RewardError, match=r"reward part0 - 0.5 part1: .*nothing was observed.*call observe"):
        made.reward(x, prompts)
    made.observe(x[:25], prompts[:25])
    made.observe(x[25:], prompts[25:])
    z = [(f(x.astype(np.float64)) - f(x).mean()) / f(x).std() for f in functions]
    np.testing.assert_allclose(made.reward(x, prompts), z[0] - 0.5 * z[1], atol=2e-3)
    np.testing.assert_allclose(made.heldout(x, prompts), -(z[0] - 0.5 * z[1]), atol=2e-3)


def test_what_is_shown_stays_on_one_scale(learning_data, pictures):
    """The running scales move with every observation; pictures of two times are compared on fixed ones."""
    x, prompts = pictures
    made = Panel.parse("colourfulness - 0.5 jpeg")
    made.observe(x, prompts)
    for shown in (made.shown_reward, made.shown_heldout):
        with pytest.raises(RewardError, match="no fixed scales were set to show them on; run its trainers"):
            shown(x, prompts)
    made.trainers(learning_data, QUICK)[-1]()
    before = made.shown_reward(x, prompts), made.shown_heldout(x, prompts)
    assert all(v.dtype == np.float64 and v.shape == (len(x),) for v in before)
    # the training pictures alone have been seen: both scales are the same
    np.testing.assert_array_equal(before[0].astype(np.float32), made.reward(x, prompts))
    np.testing.assert_array_equal(before[1], made.heldout(x, prompts))
    terms = []
    for name, weight in (("colourfulness", 1.0), ("jpeg", -0.5)):
        part = Panel.parse(name)
        seen = [part.reward(p, d.captions) for d in (learning_data.reward, learning_data.heldout)
                for p in d.pictures()]  # fmt: skip
        seen = np.concatenate(seen).astype(np.float64)
        terms.append(weight * (part.reward(x, prompts) - seen.mean()) / seen.std())
    np.testing.assert_allclose(before[0], np.sum(terms, axis=0), rtol=1e-9, atol=1e-9)

    moved = made.reward(x, prompts)
    for _ in range(3):
        made.observe(np.tanh(3 * x[:20]), prompts[:20])
    assert not np.array_equal(made.reward(x, prompts), moved)
    again = Panel.parse(made.name)
    again.load_state_dict(made.state_dict())
    for panel_ in (made, again, pickle.loads(pickle.dumps(made))):
        np.testing.assert_array_equal(panel_.shown_reward(x, prompts), before[0])
        np.testing.assert_array_equal(panel_.shown_heldout(x, prompts), before[1])
        np.testing.assert_array_equal(panel_.reward(x, prompts), made.reward(x, prompts))
    assert made.shown_reward(x[:0], []).shape == (0,)
    without = {k: v for k, v in made.state_dict().items() if k != "jpeg.heldout.fixed"}
    with pytest.raises(CheckpointError, match=r"no fixed scale of jpeg \(heldout\); resume with .* new run"):
        Panel.parse(made.name).load_state_dict(without)


@pytest.mark.parametrize("spec", ["colourfulness", "-2.5 jpeg"])
def test_one_part_is_shown_as_its_weight_times_its_value(pictures, spec):
    x, prompts = pictures
    made = Panel.parse(spec)
    np.testing.assert_array_equal(made.shown_reward(x, prompts).astype(np.float32), made.reward(x, prompts))
    np.testing.assert_array_equal(made.shown_heldout(x, prompts), made.heldout(x, prompts))
    assert made.shown_reward(x, prompts).dtype == np.float64


def test_a_part_that_is_not_finite_is_passed_on_to_who_asks(pictures):
    """One picture of which one part has no number: the pool tries another seed for it (see test_pool)."""
    x, prompts = pictures

    def holes(images):
        values = images.mean(axis=(1, 2, 3))
        return np.where(values == values.max(), np.nan, np.where(values == values.min(), np.inf, values))

    most, least = x.mean(axis=(1, 2, 3)).argmax(), x.mean(axis=(1, 2, 3)).argmin()
    for functions in ((holes,), (lambda i: i.std(axis=(1, 2, 3)), holes)):
        made = _panel(*functions)
        if len(functions) > 1:
            rest = np.delete(np.arange(len(x)), [most, least])
            fine = _panel(functions[0], lambda i: i.mean(axis=(1, 2, 3)))
            fine.observe(x[rest], prompts[: len(rest)])
            made.load_state_dict(fine.state_dict())
        values = made.reward(x, prompts)
        assert np.isnan(values[most]) and np.isinf(values[least])
        assert np.isfinite(np.delete(values, [most, least])).all()
        with pytest.raises(RewardError, match="is not finite for 2 of 40 pictures"):
            score(made, x, prompts)
        with pytest.raises(RewardError, match="returned .* for picture"):  # whoever watches must answer
            made.heldout(x, prompts)


def test_the_pool_tries_another_seed_where_a_part_has_no_number(pictures):
    """A panel among rollouts: one picture without a number is retried; a reward without any is refused."""
    from fp4bf16.align.pool import Settings, explore

    x, _ = pictures
    bad, first = x[3], dict(enumerate(x))

    def draw(seeds, prompts, steps, track):
        return np.stack([first.get(int(s), x[int(s) % 40]) for s in seeds])

    def hole(images):
        values = images.mean(axis=(1, 2, 3))
        return np.where((images == bad).all((1, 2, 3)), np.nan, values)

    seeds, settings = np.arange(40, dtype=np.uint64)[None], Settings(keep=2)
    for functions in ((hole,), (lambda i: i.std(axis=(1, 2, 3)), hole)):
        made = _panel(*functions)
        made.observe(np.delete(x, 3, 0), ["p"] * 39)
        pool = explore(draw, made, seeds, ["p"], settings)
        assert pool.counts["nonfinite_rewards"] == 1 <= pool.counts["retried"] and pool.counts["lost"] == 0
        assert pool.retried.sum() == 1 and pool.retried[0, 3] and np.isfinite(pool.rewards).all()
    made = _panel(lambda i: np.full(len(i), np.nan))
    with pytest.raises(RewardError, match="reward part0: returned nan for picture 0"):
        explore(draw, made, seeds, ["p"], settings)


def test_a_constant_part_hides_no_hole():
    running = Running()
    running.add(np.ones(3))
    np.testing.assert_array_equal(running.normalise(np.array([1, 5, np.nan])), [0, 0, np.nan])


def test_a_score_does_not_depend_on_order_or_batches(pictures):
    """A pool may be scored in any pieces, by any process, again after a failure."""
    x, prompts = pictures
    made = Panel.parse("colourfulness - 0.5 jpeg")
    made.observe(x, prompts)
    whole = made(x, prompts)
    back = np.concatenate([made(x[i : i + 1], prompts[i : i + 1]) for i in range(len(x))][::-1])[::-1]
    np.testing.assert_array_equal(whole, back)
    assert made(x[:0], []).shape == (0,) and made.heldout(x[:0], []).shape == (0,)
    other = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(other(x, prompts), whole)


def test_opposing_rewards_pull_apart(pictures):
    """What is more colourful has more bytes: the sum gains from neither alone."""
    x, prompts = pictures
    grey = np.repeat(x.mean(-1, keepdims=True), 3, -1)
    both = Panel.parse("colourfulness + jpeg")
    both.observe(np.concatenate([x, grey]), prompts * 2)
    values = {n: Panel.parse(n)(np.concatenate([x, grey]), prompts * 2) for n in ("colourfulness", "jpeg")}
    lost, gained = (values[n][len(x) :] - values[n][: len(x)] for n in ("colourfulness", "jpeg"))
    assert (lost < 0).mean() > 0.9 and (gained >= 0).mean() > 0.9
    total = both(grey, prompts) - both(x, prompts)
    scaled = lost / values["colourfulness"].std() + gained / values["jpeg"].std()
    np.testing.assert_allclose(total, scaled, atol=1e-3)
    assert np.abs(total).mean() < np.abs(lost / values["colourfulness"].std()).mean()


def test_a_bad_part_is_named(pictures):
    x, prompts = pictures
    made = _panel(lambda i: i.mean(axis=(1, 2, 3)), lambda i: np.full(len(i), np.nan))
    with pytest.raises(RewardError, match="reward fixed: returned nan for picture 0"):
        made.observe(x, prompts)
    with pytest.raises(NonFiniteError, match="reward jpeg: 1 of 2 pictures hold NaN"):
        Panel.parse("jpeg").reward(np.stack([x[0], x[0] * np.nan]), ["a", "b"])
    with pytest.raises(RewardError, match="40 pictures but 2 prompts"):
        Panel.parse("jpeg").reward(x, ["a", "b"])
    with pytest.raises(ShapeError, match=r"reward colourfulness: images have shape .*; pass .* H and W >= 8"):
        Panel.parse("colourfulness").reward(x[:, :4], prompts)


# ---- measures of pixels
def test_jpeg_is_minus_the_bytes_and_png_watches(pictures):
    image = pytest.importorskip("PIL.Image")
    x, prompts = pictures
    made = Panel.parse("jpeg")
    (part,) = made.parts
    for format, options, values in (("JPEG", {"quality": 95}, made.reward(x, prompts)),
                                    ("PNG", {"optimize": True}, made.heldout(x, prompts))):  # fmt: skip
        for picture, value in zip(x, values, strict=True):
            file = io.BytesIO()
            pixels = np.clip(np.round((picture + 1) * 127.5), 0, 255).astype(np.uint8)
            image.fromarray(pixels).save(file, format, **options)
            assert value == -len(file.getvalue())
    np.testing.assert_array_equal(part.shown(x, prompts), -made.reward(x, prompts))
    np.testing.assert_array_equal(part.shown_heldout(x, prompts), -made.heldout(x, prompts))
    assert part.unit == "bytes"
    np.testing.assert_array_equal(Panel.parse("-jpeg").reward(x, prompts), -made.reward(x, prompts))
    blank, noise = np.zeros_like(x[:1]), np.random.default_rng(0).uniform(-1, 1, x[:1].shape).astype("f")
    for values in (made.reward, made.heldout):
        assert values(blank, ["p"]) > values(x, prompts).max()
        assert values(noise, ["p"]) < np.median(values(x, prompts))
    assert np.corrcoef(made.reward(x, prompts), made.heldout(x, prompts))[0, 1] > 0.3


def test_a_missing_package_is_named_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ImportError, match=r"reward jpeg needs the package pillow.*'fp4bf16\[train\]'"):
        Panel.parse("style + jpeg").require()
    Panel.parse("style + class + colourfulness").require()


def test_colourfulness_and_chroma(pictures):
    x, prompts = pictures
    made = Panel.parse("colourfulness")
    np.testing.assert_allclose(made.reward(x, prompts), guards.colourfulness(x), rtol=1e-6)
    np.testing.assert_allclose(made.heldout(x, prompts), rewards.chroma(x), rtol=1e-6)
    # CIELAB of the corners of sRGB (D65), as colour tables give them
    corners = {(1, -1, -1): 104.55, (-1, 1, -1): 119.78, (-1, -1, 1): 133.81, (1, 1, -1): 96.91, (1, 1, 1): 0}
    for corner, expected in corners.items():
        found = rewards.chroma(np.float32(corner) * np.ones((1, 8, 8, 1), np.float32))
        assert found == pytest.approx(expected, abs=0.05)
    grey = np.repeat(x.mean(-1, keepdims=True), 3, -1)
    assert np.abs(rewards.chroma(grey)).max() < 1e-3
    assert np.corrcoef(made.reward(x, prompts), made.heldout(x, prompts))[0, 1] > 0.6


# ---- training
def test_style_judges_are_trained_as_before_and_watch(learning_data, pairs):
    made = Panel.parse("style")
    trainers = made.trainers(learning_data, QUICK)
    assert [(t.name, t.steps) for t in trainers] == [("style/reward", 30), ("style/heldout", 30)]
    x = pairs.images[0, :9]
    with pytest.raises(ConfigError, match="reward style: it has learnt nothing yet; train it or load"):
        made.reward(x, [""] * 9)
    steps = []
    for trainer in trainers:
        found = trainer(lambda step, loss: steps.append(step))
        assert set(found) == {"loss", "accuracy"} and 0 <= found["accuracy"] <= 1
    assert steps == [*range(30)] * 2
    for role in ("reward", "heldout"):
        alone = Judge(role, 8, seed=3)
        seed = subseed(3, f"judge/{role}")
        train_judge(alone, *pairs.select(role=role).images, steps=30, batch=16, seed=seed)
        alone.calibrate(*pairs.select(role="policy").images)
        measure = getattr(made.parts[0], role)
        np.testing.assert_array_equal(measure(x, [""] * 9), alone(x))
        np.testing.assert_array_equal(measure.shown(x, [""] * 9), alone.probability(x))
    shown, watched = made.shown(x, [""] * 9)["style"]
    assert shown.dtype == np.float64 and not np.array_equal(shown, watched)
    assert ((0 < watched) & (watched < 1)).all()
    assert type(made.parts[0].reward.judge.network) is not type(made.parts[0].heldout.judge.network)


def test_preference_judges_learn_what_was_chosen(learning_data, rng):
    """Chosen: the brighter of two pictures, whichever style; nothing but the labels tells the judge."""
    parts = []
    for known in (learning_data.reward, learning_data.heldout, learning_data.policy):
        dark = np.clip(known.winners - 0.5, -1, 1)
        parts.append(Captioned(known.winners, known.captions, dark))
    test = parts.pop()
    made = Panel.parse("preference")
    own = PanelData(*parts, test=test)
    for trainer in made.trainers(own, Learning(steps=60, batch=32, width=8, seed=1)):
        trainer()
    for measure in (made.parts[0].reward, made.parts[0].heldout):
        won = measure(test.winners, test.captions) > measure(test.losers, test.captions)
        assert won.mean() > 0.8, measure.name


def test_pictures_without_losers_train_no_preference(learning_data):
    known = learning_data.reward
    alone = PanelData(Captioned(known.winners, known.captions), learning_data.heldout)
    with pytest.raises(ConfigError, match="style: it learns from pairs, but the 550 pictures .* no losers"):
        Panel.parse("style").trainers(alone, QUICK)[0]()


def test_fixed_rewards_need_no_training_but_a_sum_needs_scales(learning_data, pictures):
    assert Panel.parse("-jpeg").trainers(learning_data, QUICK) == []
    assert Panel.parse("class").trainers(learning_data, QUICK) == []
    made = Panel.parse("colourfulness + 0.5 style")
    trainers = made.trainers(learning_data, QUICK)
    assert [t.name for t in trainers] == ["style/reward", "style/heldout", "scales"]
    for trainer in trainers:
        found = trainer()
    assert {"colourfulness/reward/std", "style/heldout/std"} <= set(found) and min(found.values()) > 0
    assert np.isfinite(made.reward(*pictures)).all()
    seen = 2 * (len(learning_data.reward) + len(learning_data.heldout))
    assert made.state_dict()["style.reward.scale"][0] == seen
    made.trainers(learning_data, QUICK)[-1]()  # interrupted and begun again
    assert made.state_dict()["style.reward.scale"][0] == seen


def test_data_is_checked(learning_data):
    known = learning_data.reward
    with pytest.raises(ConfigError, match="panel data: 550 captions are in both roles, such as '.*split by"):
        PanelData(known, known)
    with pytest.raises(ShapeError, match=r"winners: shape is \(550, 16, 16, 3\) for 2 captions"):
        Captioned(known.winners, ("a", "b"))
    with pytest.raises(ShapeError, match="losers: shape is .*; pass pairs"):
        Captioned(known.winners, known.captions, known.winners[:3])
    some = known.where([c.startswith("a") for c in known.captions])
    assert 0 < len(some) < 550 and all(c.startswith("a") for c in some.captions)


# ---- state
def test_state_brings_back_the_same_bits(learning_data, pictures):
    made = Panel.parse("style + 0.5 colourfulness - 0.1 class")
    for trainer in made.trainers(learning_data, QUICK):
        trainer()
    made.observe(*pictures)
    state = {k: v.copy() for k, v in made.state_dict().items()}
    assert all(isinstance(v, np.ndarray) and v.dtype.kind in "fiu" for v in state.values())
    sent = pickle.loads(pickle.dumps(made))  # as to another process
    np.testing.assert_array_equal(sent.reward(*pictures), made.reward(*pictures))
    again = Panel.parse(made.name)
    again.load_state_dict(state)
    np.testing.assert_array_equal(again.reward(*pictures), made.reward(*pictures))
    np.testing.assert_array_equal(again.heldout(*pictures), made.heldout(*pictures))
    made.observe(*pictures), again.observe(*pictures)
    np.testing.assert_array_equal(again.reward(*pictures), made.reward(*pictures))

    with pytest.raises(CheckpointError, match="reward style: .* holds '.*', which is of another reward"):
        Panel.parse("style").load_state_dict(state)
    with pytest.raises(CheckpointError, match="the state holds nothing of jpeg"):
        Panel.parse("style + jpeg").load_state_dict(state)
    broken = {k: v for k, v in state.items() if k != "style.reward.head.weight"}
    with pytest.raises(CheckpointError, match="judge reward of width 8: .*missing: head.weight"):
        Panel.parse(made.name).load_state_dict(broken)
    with pytest.raises(CheckpointError, match="reward colourfulness: learns nothing, but the state holds"):
        Panel.parse(made.name).load_state_dict(state | {"colourfulness.reward.x": np.zeros(1)})


def test_state_before_training(pictures):
    made = Panel.parse("style")
    again = Panel.parse("style")
    again.load_state_dict(made.state_dict())
    again.load_state_dict({k: v for k, v in made.state_dict().items() if not k.endswith(".fixed")})
    with pytest.raises(ConfigError, match="learnt nothing yet"):
        again.reward(*pictures)


def test_every_kind_has_a_judge_of_another_make():
    for name, (reward, heldout) in KINDS.items():
        assert reward.kind == heldout.kind == name and reward.unit == heldout.unit
        made = Panel.parse(name).parts[0]
        assert made.reward is not made.heldout
        if reward is heldout:  # one class, two networks: style and preference by `role`, class by the weights
            assert name in ("style", "preference", "class")
    assert set(panel.ALIASES.values()) <= set(KINDS)
    assert score(lambda i, p: np.zeros(len(i)), np.zeros((1, 8, 8, 3), "f"), [""]).shape == (1,)
