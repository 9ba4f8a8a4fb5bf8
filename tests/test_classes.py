"""The class networks: table, halves, resizing; what the networks that ship know and notice."""

import hashlib
import json
import pickle
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.align import classes
from fp4bf16.align.classes import ClassMeasure, ClassNetwork, class_index, class_names, class_of, half
from fp4bf16.align.resize import resize
from fp4bf16.errors import CheckpointError, ConfigError, NonFiniteError, ShapeError
from fp4bf16.train import data

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import train_classes as tool  # noqa: E402

NAMES = tuple(classes.ARCHITECTURES)


@pytest.fixture(scope="module")
def pairs():
    return data.load_pairs(32)


@pytest.fixture(scope="module", params=NAMES)
def network(request):
    return ClassNetwork(request.param)


# ---- classes of captions
def test_the_table_holds_the_most_frequent_words(pairs):
    counts = Counter(w for c in pairs.captions for w in set(data.words_of(c)))
    names = class_names()
    assert len(names) == 64 == len(set(names)) and names[-1] == "other"
    least = min(counts[w] for w in names[:-1])
    skipped = {w for w, n in counts.items() if n > least} - set(names)
    assert skipped == {w for w in classes.FUNCTION_WORDS if counts[w] > least}
    assert [counts[w] for w in names[:-1]] == sorted((counts[w] for w in names[:-1]), reverse=True)
    rows = (classes.ASSETS / "classes.tsv").read_text().splitlines()
    assert rows[0] == "word\tcaptions" and tool.table(pairs.captions) == [
        (word, int(count)) for word, count in (row.split("\t") for row in rows[1:])
    ]


def test_a_caption_has_the_class_of_its_most_frequent_word(pairs):
    assert class_of("woman with a FACE-like heart") == "face" == ClassNetwork.class_of("heart face")
    assert class_of("heart woman") == "woman" and class_of("with of and") == class_of("") == "other"
    names = class_names()
    for caption in pairs.captions[::7]:
        known = [w for w in data.words_of(caption) if w in names[:-1]]
        assert class_of(caption) == (min(known, key=names.index) if known else "other")
    found = class_index(pairs.captions)
    assert found.dtype == np.int64 and [names[i] for i in found] == [class_of(c) for c in pairs.captions]
    assert class_index([]).shape == (0,)
    with pytest.raises(ConfigError, match="single string 'face'; pass a list"):
        class_index("face")


def test_halves_share_no_family_and_are_even(pairs):
    policy = pairs.select(role="policy").captions
    share = np.mean([half(c) == "reward" for c in policy])
    assert 0.4 < share < 0.6 and {half(c) for c in policy} == set(NAMES)
    assert half("man biking facing right") == half("woman biking") == half("person biking")


def test_evaluation_captions_are_unseen_and_the_networks_share_none(pairs):
    known = {name: set(np.array(pairs.captions)[tool.learned(pairs, name)]) for name in NAMES}
    assert not known["reward"] & known["heldout"]
    assert not (known["reward"] | known["heldout"]) & set(pairs.select(role="evaluation").captions)
    assert set(pairs.select(role="policy").captions) <= known["reward"] | known["heldout"]
    for name in NAMES:
        recipe = json.loads(classes.asset(name, "json").read_text())
        assert recipe["captions"] == len(known[name]) and any("face" in c for c in known[name])


# ---- resizing
def test_resizing_down_is_the_box_mean_and_up_is_linear(rng):
    x = rng.uniform(-1, 1, (3, 32, 32, 3)).astype(np.float32)
    np.testing.assert_allclose(resize(x, 8), data.downsample(x, 8), atol=1e-6)
    assert resize(x, 32) is x or np.array_equal(resize(x, 32), x)
    rows, columns = np.mgrid[:5, :7].astype(np.float32)
    plane = (0.1 * rows - 0.05 * columns)[None, :, :, None] * np.ones(3, np.float32)
    up = resize(plane, 35)[0, :, :, 0]
    at = np.clip((np.arange(35) + 0.5) * 5 / 35 - 0.5, 0, 4), np.clip((np.arange(35) + 0.5) / 5 - 0.5, 0, 6)
    np.testing.assert_allclose(up, 0.1 * at[0][:, None] - 0.05 * at[1], atol=1e-6)
    for size in (1, 8, 20, 33, 64):
        assert resize(x, size).shape == (3, size, size, 3) and resize(x, size).dtype == np.float32
        np.testing.assert_allclose(resize(x * 0 + 0.3, size), 0.3, atol=1e-6)
        if size <= 32:
            np.testing.assert_allclose(resize(x, size).mean(axis=(1, 2)), x.mean(axis=(1, 2)), atol=1e-5)
    assert resize(x[:0], 16).shape == (0, 16, 16, 3)
    for bad in (x[0], x[..., :2], x[:, :0]):
        with pytest.raises(ShapeError, match=r"resize: images have shape .*; pass \(n, H, W, 3\)"):
            resize(bad, 8)


# ---- the networks
def test_what_ships_is_what_the_recipe_says(network):
    recipe = json.loads(classes.asset(network.name, "json").read_text())
    content = classes.asset(network.name, "safetensors").read_bytes()
    assert hashlib.sha256(content).hexdigest() == recipe["sha256"] == network.sha256
    assert len(content) == recipe["bytes"] < 1_000_000
    state = network.state_dict()
    assert recipe["parameters"] == sum(v.size for v in state.values())
    assert recipe["architecture"] == type(network.network).__name__
    assert recipe["cpu_seconds"] < 300
    for value in state.values():
        assert np.array_equal(value, value.astype("bfloat16").astype(np.float32))


def test_the_networks_differ():
    a, b = (ClassNetwork(name) for name in NAMES)
    assert sorted(v.shape for v in a.state_dict().values()) != sorted(
        v.shape for v in b.state_dict().values()
    )


@pytest.mark.parametrize("size", [8, 16, 32, 64, 20])
def test_shapes_and_sizes(network, rng, size):
    x = rng.uniform(-1, 1, (3, size, size + 4, 3)).astype(np.float32)
    features, logs = network.features(x), network.log_probabilities(x)
    assert features.shape == (3, 128) and features.dtype == logs.dtype == np.float32
    assert logs.shape == (3, len(network.classes)) and np.isfinite(features).all()
    np.testing.assert_allclose(np.exp(logs.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
    assert network.features(x[:0]).shape == (0, 128) and network.log_probabilities(x[:0]).shape == (0, 64)
    np.testing.assert_allclose(network.features(x[1:2]), features[1:2], atol=2e-3)


def test_accuracy_on_captions_that_no_network_saw(network, pairs):
    """Far from perfect, and well above always saying the commonest class; as the recipe has it."""
    unseen = pairs.select(role="evaluation")
    recipe = json.loads(classes.asset(network.name, "json").read_text())["measured"]["evaluation"]
    for size in (8, 16, 32):
        found = tool.accuracy(network, unseen, size)
        assert found["majority"] == pytest.approx(32 / 81)
        assert found["top1"] > found["majority"] + 0.08 and found["top5"] > 0.8
        for key, value in found.items():
            assert value == pytest.approx(recipe[str(size)][key], abs=0.02), key
    other = pairs.select(role={"reward": "heldout", "heldout": "reward"}[network.name])
    found = tool.accuracy(network, other, 32)
    assert found["top1_without_other"] > 2 * found["majority_without_other"]


@pytest.mark.parametrize(
    "network", ["heldout", pytest.param("reward", marks=pytest.mark.long)], indirect=True
)
def test_features_notice_what_is_wrong_with_a_set(network, pairs):
    """The kernel distance grows with blur, noise, smaller shuffled patches and missing classes."""
    found = tool.noticed(network, pairs.select(role={"reward": "heldout", "heldout": "reward"}[network.name]))
    floor = found["nothing"]
    ladders = {
        "blur": ("blur 1", "blur 2", "blur 4"),
        "noise": ("noise 0.1", "noise 0.2", "noise 0.4"),
        "patches": ("patches 16", "patches 8", "patches 4"),
        "classes": ("classes 32", "classes 8", "classes 1"),
    }
    for name, steps in ladders.items():
        values = [floor, *(found[step] for step in steps)]
        assert np.all(np.diff(values) > 0), (name, values)
        assert values[-1] > 3 * floor, (name, values)


def test_nothing_outside_changes_the_track(network, pairs):
    x = pairs.images[0, :6]
    expected = network.features(x)
    with fb.tracks("fp4"):
        np.testing.assert_array_equal(network.features(x), expected)
    reference = ClassNetwork(network.name, track="reference")
    assert 0 < np.abs(reference.features(x) - expected).max() < 0.1
    again = pickle.loads(pickle.dumps(network))
    np.testing.assert_array_equal(again.features(x), expected)


def test_training_is_a_function_of_the_seed_and_lowers_the_loss(pairs):
    few = pairs.select(word="button")
    runs = [tool.train("heldout", few, 3, seed, lambda *a, **k: None)[0].state_dict() for seed in (1, 1, 2)]
    for key, value in runs[0].items():
        np.testing.assert_array_equal(value, runs[1][key])
    assert any(not np.array_equal(v, runs[2][k]) for k, v in runs[0].items())


def test_damage_is_what_was_done(pairs):
    x = np.stack([pairs.images[0, :200]] * 2)
    made, damage = tool.learning_pictures(x, 5, 3)
    assert made.shape == (400, 32, 32, 3) and damage.shape == (400, 4)
    assert np.array_equal(damage[:200], damage[200:]) and damage.min() == 0 and damage.max() <= 1
    assert set(np.unique(damage[:, 3])) == {0, 0.5, 1}
    clean = np.abs(damage[:200, :3]).sum(axis=1) == 0
    assert 0.05 < clean.mean() < 0.25
    octave = damage[:200, 3] == 1
    coarse = resize(resize(made[:200], 8), 32)
    assert np.abs(coarse - made[:200])[octave].mean() < 0.5 * np.abs(coarse - made[:200])[~octave].mean()


# ---- the reward
def test_class_reward_is_the_log_probability_of_the_class_of_the_prompt(pairs):
    faces, keycaps = pairs.select(word="face"), pairs.select(word="keycap")
    for role in NAMES:
        reward = ClassMeasure(role)
        x = np.concatenate([faces.style("noto")[:20], keycaps.style("noto")])
        logs = classes.shared(role).log_probabilities(x)
        as_faces = reward(x, ["a face"] * len(x))
        assert as_faces.dtype == np.float32
        np.testing.assert_array_equal(as_faces, logs[:, 0])
        np.testing.assert_array_equal(reward(x, ["sushi"] * len(x)), logs[:, 63])
        assert as_faces[:20].mean() > as_faces[20:].mean() + 1
        assert reward(x[:0], []).shape == (0,) and (reward.shown(x, ["face"] * len(x)) <= 0).all()
        assert (reward.unit, reward.learns) == ("log p", False)


def test_another_package_version_is_noticed_on_resume():
    reward = ClassMeasure("reward")
    state = reward.state_dict()
    ClassMeasure("reward").load_state_dict(state)
    with pytest.raises(CheckpointError, match="made with the weights .*, but this version of fp4bf16 ships"):
        ClassMeasure("heldout").load_state_dict(state)


# ---- bad input
@pytest.mark.parametrize("call, error, text", [
    (lambda: ClassNetwork("rewards"), ConfigError, "'rewards' is no network; did you mean 'reward'"),
    (lambda: ClassNetwork("reward", track="fp4"), ConfigError, "track is 'fp4', but it runs on 'bf16'"),
    (lambda: ClassNetwork("reward").features(np.zeros((8, 8, 3))), ShapeError, r"shape \(8, 8, 3\)"),
    (lambda: ClassNetwork("reward").features(np.zeros((2, 8, 0, 3))), ShapeError, r"it takes \(n, H, W, 3\)"),
    (lambda: ClassNetwork("reward").load_state_dict({}), CheckpointError, "class network reward: .*missing"),
    (lambda: ClassMeasure("reward")(np.zeros((2, 8, 8, 3)), ["a"]), ShapeError, "2 pictures but 1 prompts"),
    (lambda: ClassMeasure("heldout")(np.full((2, 8, 8, 3), np.inf), ["a", "b"]), NonFiniteError,
     r"class \(held out\): 2 of 2 pictures hold NaN or Inf"),
])  # fmt: skip
def test_bad_input_is_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_damaged_weights_are_refused(tmp_path, monkeypatch):
    for file in classes.ASSETS.glob("classes*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(classes, "ASSETS", tmp_path)
    classes._shipped.cache_clear()
    try:
        path = classes.asset("reward", "safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="SHA-256 of classes_reward.safetensors is .*; reinstall"):
            ClassNetwork("reward")
        classes.asset("heldout", "json").unlink()
        with pytest.raises(
            CheckpointError, match="class network heldout: .*classes_heldout.json.*; reinstall"
        ):
            ClassNetwork("heldout")
    finally:
        classes._shipped.cache_clear()
