"""The engine's policy training on the CPU: every objective, all parameters or adapters, exact resumption."""

from __future__ import annotations

import math

import numpy as np
import pytest
from bases import base_data
from often import in_ci

from fp4bf16 import tracks
from fp4bf16.align.dpo import phase_drift
from fp4bf16.align.rollout import Rollout
from fp4bf16.diffusion import subseed
from fp4bf16.errors import ConfigError, ShapeError
from fp4bf16.train.config import get_preset, override
from fp4bf16.train.data import Vocabulary, load_pairs
from fp4bf16.train.denoiser import Denoiser
from fp4bf16.train.engine import HostEngine
from fp4bf16.train.policy import (
    PairData,
    SampleData,
    TrajectoryData,
    _share,
    batches,
    filled,
    make_data,
    pair_data,
)

OBJECTIVES, PARAMETERS = ("dpo", "nft", "ppo"), ("full", "lora")
SHORT = ["model.block_out_channels=[8,16]", "base.batch=8", "diffusion.chunk=8", "align.steps=4",
         "align.explore_steps=4", "align.timestep_fraction=0.75", "align.timesteps=2", "align.batch=5",
         "lora.rank=2", "lora.alpha=4"]  # fmt: skip
BOTH = pytest.mark.parametrize("parameters", PARAMETERS)
ALL = pytest.mark.parametrize("objective", OBJECTIVES)
BATCHES = (1, 1), (5, 2), (7, 1), (64, 1)  # with the passes over them
PAIRS = [(o, p) for o in OBJECTIVES for p in PARAMETERS]


def configured(objective: str, parameters: str = "full", *more: str):
    chosen = [f"align.objective={objective}", f"align.parameters={parameters}"]
    return override(get_preset("ci"), [*SHORT, *chosen, *more])


def engine_of(config, steps: int = 1) -> HostEngine:
    """An engine that begins to align, after a step or more of the base training."""
    pairs = load_pairs(config.size).select(role="policy", word=config.word)
    engine = HostEngine(Denoiser(config, Vocabulary.of(pairs.captions)), config)
    data = base_data(pairs, engine.model, lambda purpose: len(purpose))
    for step in range(steps):
        engine.base_step(data, step, 3e-3)
    engine.begin_alignment()
    return engine


def seed(purpose: str) -> int:
    return subseed(11, purpose)


def brightness(pictures: np.ndarray) -> np.ndarray:
    return pictures.mean((1, 2, 3), dtype=np.float64)


def rollout_of(engine: HostEngine, iteration: int = 0, prompts: int = 2, keep: int = 4, broken: int = 0):
    """What a rollout gives: pictures of the policy, labelled by their brightness; `broken` ones unhealthy."""
    captions = load_pairs(16).select(role="policy", word="face").captions[:prompts]
    kept = np.arange(prompts * keep, dtype=np.uint64) + np.uint64(1000 * iteration)
    rows = [c for c in captions for _ in range(keep)]
    pictures = engine.collect(kept, rows, engine.config.align.steps)
    labels = brightness(pictures)
    labels[:broken], pictures[:broken] = np.nan, np.nan
    shape = prompts, keep
    pictures, labels, kept = pictures.reshape(*shape, 16, 16, 3), labels.reshape(shape), kept.reshape(shape)
    columns = np.tile(np.arange(keep), (prompts, 1))
    return Rollout(pictures, labels, kept, list(captions), kept, labels, columns)


def iterate(engine: HostEngine, number: int, lr: float = 1e-3, made=None) -> list:
    """One iteration: a rollout, its data, all batches, the old policy."""
    made = rollout_of(engine, number) if made is None else made
    data = make_data(engine.config, engine, seed, made, number)
    engine.begin(data)
    results = [engine.policy_step(data, some, lr) for some in batches(engine.config, data)]
    engine.end_iteration(number)
    return results


def same(a: dict, b: dict) -> None:
    assert set(a) == set(b)
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


# ---- what an objective does
@in_ci("objective, parameters", PAIRS, ("dpo", "full"), ("nft", "lora"), ("ppo", "full"))
def test_loss_of_a_batch_falls(objective, parameters):
    """The same batch again and again: the loss falls, and its reward is what the policy moves to."""
    # Without a hold, which is another aim; a beta that the loss does not run out of, a wide clip.
    more = "align.hold=0", "align.batch=64", "align.beta=100", "ppo.clip=0.2"
    config = configured(objective, parameters, *more)
    engine = engine_of(config)
    data = make_data(config, engine, seed, rollout_of(engine), 0)
    engine.begin(data)
    results = [engine.policy_step(data, slice(0, len(data)), 3e-4) for _ in range(6)]
    losses = [r.loss for r in results]
    assert all(r.finite and r.norm > 0 for r in results) and engine.updates == 6
    assert losses[-1] < losses[0] and np.mean(losses[3:]) < np.mean(losses[:3])
    assert results[0].stats["kl"] == 0 < results[-1].stats["kl"]
    assert results[0].stats["drift"] == 0
    if objective == "ppo":
        assert results[-1].stats["ratio_spread"] > 0 and results[0].stats["clipfrac"] == 0
    else:
        assert results[0].stats["rewards/margins"] == 0 < results[-1].stats["rewards/margins"]
        assert results[0].stats["rewards/accuracies"] == 0.5 < results[-1].stats["rewards/accuracies"]


@BOTH
def test_dpo_begins_with_ln_2(parameters):
    engine = engine_of(configured("dpo", parameters))
    first = iterate(engine, 0)[0]
    assert first.loss == math.log(2) and first.stats["rewards/chosen"] == first.stats["kl"] == 0.0


@in_ci("batch, passes, parameters", [(*b, p) for b in BATCHES for p in PARAMETERS],
       (1, 1, "full"), (5, 2, "lora"), (7, 1, "full"), (64, 1, "lora"))  # fmt: skip
def test_ratio_is_exactly_one_before_the_first_update(parameters, batch, passes):
    """In every batch, the last, short one as well: no update has taken place yet (their rate is 0)."""
    config = configured("ppo", parameters, f"align.batch={batch}", f"ppo.epochs={passes}",
                        "align.timestep_fraction=1")  # fmt: skip
    engine = engine_of(config)
    made = rollout_of(engine, prompts=2, keep=2)
    results = iterate(engine, 0, lr=0.0, made=made)
    total = 4 * 3  # the last of the four steps draws nothing
    assert len(results) == passes * math.ceil(total / batch)
    for result in results:
        assert result.stats["ratio"] == 1.0
        assert result.stats["ratio_spread"] == result.stats["clipfrac"] == result.stats["approx_kl"] == 0.0
    moved = iterate(engine, 0, lr=1e-2, made=made)
    assert moved[0].stats["ratio_spread"] == 0
    assert len(moved) == 1 or (moved[-1].stats["ratio_spread"] > 0 and moved[-1].stats["approx_kl"] > 0)


@BOTH
def test_first_update_of_ppo_is_the_policy_gradient(parameters):
    """Its loss is minus the mean advantage, whose gradient is not 0 all the same."""
    engine = engine_of(configured("ppo", parameters, "align.batch=64", "align.hold=0"))
    data = make_data(engine.config, engine, seed, rollout_of(engine), 0)
    engine.begin(data)
    result = engine.policy_step(data, slice(0, len(data)), 1e-3)
    assert result.loss == pytest.approx(-data.advantage[data.row].mean(), abs=1e-6)
    assert result.norm > 0


@in_ci("parameters", PARAMETERS, "full")
def test_hold_keeps_the_phases_together(parameters):
    """Trained on its own pictures alone PPO drifts into a grid; the weight of the presets halves that."""
    drifts = []
    for weight in (0, get_preset("faces16").align.hold):
        config = configured("ppo", parameters, f"align.hold={weight}", "align.batch=64", "ppo.clip=0.9")
        engine = engine_of(config)
        data = make_data(config, engine, seed, rollout_of(engine), 0)
        engine.begin(data)
        results = [engine.policy_step(data, slice(0, len(data)), 3e-4) for _ in range(8)]
        assert results[-1].loss < results[0].loss
        drifts.append(np.mean([r.stats["drift"] for r in results[4:]]))
    assert 0 < drifts[1] < 0.6 * drifts[0]


# ---- the old policy, the reference
def test_old_policy_follows_and_draws():
    """After iteration 0 it is the policy; later it keeps a share. Rollouts are its pictures."""
    engine = engine_of(configured("nft"))
    start = engine.parameters.data.copy()
    np.testing.assert_array_equal(engine.old, start)
    iterate(engine, 0)
    np.testing.assert_array_equal(engine.old, engine.parameters.data)
    before = engine.old.copy()
    iterate(engine, 250)
    want = np.float32(0.25) * before + np.float32(0.75) * engine.parameters.data
    np.testing.assert_allclose(engine.old, want, rtol=1e-6, atol=1e-8)
    assert not np.array_equal(engine.old, engine.parameters.data)
    drawn = engine.collect([1, 2], ["angry face"] * 2, 3)
    assert not np.array_equal(drawn, engine.draw([1, 2], ["angry face"] * 2, 3))
    kept = engine.parameters.data.copy()
    engine.parameters.data[...] = engine.old
    engine.parameters.touch()
    np.testing.assert_array_equal(drawn, engine.draw([1, 2], ["angry face"] * 2, 3))
    engine.parameters.data[...] = kept


@in_ci("objective", OBJECTIVES, "nft")  # which has the old policy's adapters, too
def test_adapters_leave_the_base_as_it_is(objective):
    """Base, reference and what a checkpoint calls the average are one array; the first pictures are its."""
    engine = engine_of(configured(objective, "lora"))
    base = engine.model.unet.flat
    before, base.grad[...] = base.data.copy(), 0
    assert engine.ema is None and engine.average is base.data and engine.trained < engine.size / 2
    with engine.lora.disabled():
        pictures = engine.draw([3], ["angry face"], 3)
    np.testing.assert_array_equal(engine.draw([3], ["angry face"], 3), pictures)
    for number in range(2):
        iterate(engine, number)
    np.testing.assert_array_equal(base.data, before)
    assert not base.grad.any() and engine.parameters is engine.lora.flat
    with engine.lora.disabled():
        np.testing.assert_array_equal(engine.draw([3], ["angry face"], 3), pictures)
    for track in ("bf16", "fp4"):
        with engine.lora.disabled():
            without = engine.draw([3], ["angry face"], 3, track)
        assert not np.array_equal(engine.draw([3], ["angry face"], 3, track), without)


@in_ci("objective", OBJECTIVES, "nft", "dpo")
def test_reference_of_adapters_is_the_bases_output(objective, rng):
    """Bit for bit that of a network that has never had adapters, before updates and after them, with the old
    policy in between; the policy has left it.
    """
    engine = engine_of(configured(objective, "lora"))
    plain = Denoiser(engine.config, engine.model.vocabulary)
    plain.unet.flat.data[...] = engine.model.unet.flat.data
    plain.unet.flat.touch()
    x = rng.standard_normal((3, *plain.shape)).astype(np.float32)
    t, bags = np.array([0, 500, 999]), plain.encode(["angry face", "", "red heart"])
    with tracks("bf16"):
        base = plain.evaluate(x, t, bags)
    np.testing.assert_array_equal(engine._reference(x, t, bags), base)
    for number in (0, 250):
        iterate(engine, number)
        engine.collect([1], ["angry face"], 2)
        np.testing.assert_array_equal(engine._reference(x, t, bags), base)
    assert not np.array_equal(engine.model.policy(x, t, bags).data, base)
    if objective == "nft":
        with engine.lora.using(engine.old), tracks("bf16"):
            assert not np.array_equal(engine.model.evaluate(x, t, bags), base)


@in_ci("objective", OBJECTIVES, "nft")
def test_checkpoint_of_adapters_holds_merged_weights(objective):
    """Who reads ``policy.*`` alone draws the policy's pictures, to rounding."""
    engine = engine_of(configured(objective, "lora"))
    iterate(engine, 0, lr=5e-3)
    plain = Denoiser(engine.config, engine.model.vocabulary)
    arrays = engine.state()
    plain.unet.load_state_dict({k[7:]: a for k, a in arrays.items() if k.startswith("policy.")})
    seeds, captions = [1, 2], ["angry face"] * 2
    want = engine.draw(seeds, captions, 4)
    with engine.lora.disabled():
        base = engine.draw(seeds, captions, 4)
    got = plain.draw(seeds, captions, 4)
    assert np.linalg.norm(got - want) < 0.2 * np.linalg.norm(base - want)


# ---- state
# dpo: test_resume.py, to the bytes
@in_ci("objective, parameters", PAIRS, ("nft", "full"), ("nft", "lora"), ("ppo", "full"))
def test_restored_engine_goes_on_bit_for_bit(objective, parameters):
    config = configured(objective, parameters)
    whole, parted = engine_of(config), engine_of(config)
    for number in range(2):
        iterate(whole, number)
    iterate(parted, 0)
    saved, updates = {k: a.copy() for k, a in parted.state().items()}, parted.updates
    again = engine_of(config, steps=2)  # of other weights, before they are restored
    again.restore(saved, updates, aligning=True)
    same(again.state(), saved)
    results = iterate(again, 1)
    same(again.state(), whole.state())
    assert again.updates == whole.updates > 0 and all(r.finite for r in results)
    kinds = {name.split(".")[0] for name in saved}
    assert kinds == ({"policy", "ema", "adam"} | ({"lora"} if parameters == "lora" else set())
                     | ({"old"} if objective == "nft" else set()))  # fmt: skip


def test_state_before_alignment_is_the_base_trainings():
    """An engine that aligns adapters can take up the base training again."""
    config = configured("nft", "lora")
    pairs = load_pairs(16).select(role="policy", word="face")
    engine = HostEngine(Denoiser(config, Vocabulary.of(pairs.captions)), config)
    data = base_data(pairs, engine.model, lambda purpose: len(purpose))
    engine.base_step(data, 0, 1e-3)
    saved = {k: a.copy() for k, a in engine.state().items()}
    assert {name.split(".")[0] for name in saved} == {"policy", "ema", "adam"}
    want = engine.base_step(data, 1, 1e-3)
    after = {k: a.copy() for k, a in engine.state().items()}
    engine.begin_alignment()
    iterate(engine, 0)
    engine.restore(saved, 1, aligning=False)
    assert engine.lora is None and engine.old is None
    assert engine.base_step(data, 1, 1e-3) == want
    same(engine.state(), after)


@pytest.mark.parametrize("missing, objective, parameters", [("old", "nft", "full"), ("lora", "dpo", "lora"),
                                                            ("old", "nft", "lora")])  # fmt: skip
def test_state_of_another_objective_is_refused(missing, objective, parameters):
    engine = engine_of(configured(objective, parameters))
    state = {k: a for k, a in engine.state().items() if not k.startswith(f"{missing}.")}
    with pytest.raises(ShapeError, match="is on one side only"):
        engine.restore(state, 0, aligning=True)


@in_ci("objective, parameters", PAIRS, ("dpo", "full"), ("nft", "lora"), ("ppo", "full"))
def test_taken_back_is_as_before(objective, parameters):
    engine = engine_of(configured(objective, parameters))
    iterate(engine, 0)
    before, updates, snapshot = engine.state(), engine.updates, engine.snapshot()
    before = {k: a.copy() for k, a in before.items()}
    first = iterate(engine, 300)
    assert any(not np.array_equal(a, before[k]) for k, a in engine.state().items())
    engine.take_back(snapshot)
    same(engine.state(), before)
    assert engine.updates == updates
    drawn = engine.draw([5], ["angry face"], 3, "fp4")
    assert iterate(engine, 300) == first
    engine.take_back(snapshot)
    np.testing.assert_array_equal(engine.draw([5], ["angry face"], 3, "fp4"), drawn)  # twins are made anew


@ALL
@BOTH
def test_gradient_that_is_not_finite_updates_nothing(objective, parameters):
    engine = engine_of(configured(objective, parameters))
    data = make_data(engine.config, engine, seed, rollout_of(engine), 0)
    part = {"dpo": "chosen", "nft": "pictures", "ppo": "latents"}[objective]
    getattr(data, part)[...] = np.nan
    before = {k: a.copy() for k, a in engine.state().items()}
    engine.begin(data)
    with np.errstate(invalid="ignore"):
        result = engine.policy_step(data, batches(engine.config, data)[0], 1e-3)
    assert not result.finite and engine.updates == 0
    same(engine.state(), before)


# ---- trajectories
@BOTH
@pytest.mark.parametrize("schedule", ["cosine", "ve"])
@pytest.mark.parametrize("count", [0, 1, 5, 16])
def test_trajectories_end_on_the_samplers_pictures(parameters, schedule, count):
    """Bit for bit, with guidance off whatever the configuration has; and they begin with its noise."""
    engine = engine_of(configured("ppo", parameters, f"diffusion.schedule={schedule}"))
    seeds, captions = list(range(count)), ["angry face"] * count
    found = engine.trajectories(seeds, captions, 5)
    want = engine.model.draw(seeds, captions, 5, sampler="ancestral")
    np.testing.assert_array_equal(found.pictures, want)
    np.testing.assert_array_equal(engine.collect(seeds, captions, 5), want)
    assert found.latents.shape == (6, count, *engine.model.shape) and found.latents.dtype == np.float32
    if count:
        scale = engine.model.schedule.start_scale
        assert found.latents[0].std() == pytest.approx(scale, rel=0.1)
        np.testing.assert_array_equal(engine.trajectories(seeds[:1], captions[:1], 5).latents[:, 0],
                                      found.latents[:, 0])  # fmt: skip


def test_trajectories_of_the_fp4_track():
    engine = engine_of(configured("ppo"))
    seeds, captions = [1, 2, 3], ["angry face"] * 3
    found = engine.trajectories(seeds, captions, 3, "fp4")
    want = engine.model.draw(seeds, captions, 3, "fp4", sampler="ancestral")
    np.testing.assert_array_equal(found.pictures, want)


def test_collect_draws_as_the_configuration_says_elsewhere():
    engine = engine_of(configured("dpo", "full", "diffusion.sampler=heun", "diffusion.guidance=2"))
    seeds, captions = [1, 2], ["angry face"] * 2
    want = engine.model.draw(seeds, captions, 3, sampler="heun", guidance=2.0)
    np.testing.assert_array_equal(engine.collect(seeds, captions, 3), want)


# ---- data
@ALL
def test_data_of_a_rollout(objective):
    """What is unhealthy is in none of it; every entry points at what belongs to it."""
    engine = engine_of(configured(objective, "full", "align.timestep_fraction=0.5"))
    made = rollout_of(engine, prompts=3, broken=2)
    data = make_data(engine.config, engine, seed, made, 3)
    levels = engine.model.schedule.timesteps(4)[:2].tolist()
    if objective == "dpo":
        assert isinstance(data, PairData) and len(data) == 2 * len(data.chosen) == 2 * len(made.pairs()[2])
        np.testing.assert_array_equal(data.chosen, engine.model.fold(made.pairs()[0]))
        assert set(data.t) <= set(levels) and np.bincount(data.row).tolist() == [2] * len(data.chosen)
        return
    count, labels = 10, made.labels.reshape(-1)[2:]
    assert len(data.advantage) == count and np.isfinite(data.advantage).all()
    assert np.corrcoef(data.advantage[2:], labels[2:] - np.repeat(made.labels[1:].mean(1), 4))[0, 1] > 0.99
    np.testing.assert_array_equal(data.captions, np.repeat(engine.model.encode(made.prompts), 4, 0)[2:])
    if objective == "nft":
        assert isinstance(data, SampleData) and np.bincount(data.row).tolist() == [2] * count
        np.testing.assert_array_equal(
            data.pictures, engine.model.fold(made.pictures.reshape(-1, 16, 16, 3)[2:])
        )
        assert set(data.t) == set(levels)  # both of a picture's levels are taken from both halves
        return
    assert isinstance(data, TrajectoryData) and len(data) == 2 * count
    assert sorted(zip(data.row.tolist(), data.step.tolist(), strict=True)) == [
        (r, s) for r in range(count) for s in (0, 1)
    ]
    np.testing.assert_array_equal(
        data.latents[-1], engine.model.fold(made.pictures.reshape(-1, 16, 16, 3)[2:])
    )


@pytest.mark.parametrize("fraction, steps, count", [
    (0.55, 20, 11), (0.6, 4, 2), (0.29, 100, 29), (0.99, 10, 9), (1.0, 7, 7), (0.1, 4, 1)
])  # fmt: skip
def test_share_of_the_steps_is_rounded_down(fraction, steps, count):
    """0.55 times 20 is 11.000000000000002 and 0.29 times 100 is 28.999999999999996."""
    assert _share(fraction, steps) == count


@pytest.mark.parametrize("sampler", ["ddim", "heun"])
def test_levels_are_those_at_which_the_sampler_asks(sampler):
    """Heun's method has a coarser grid than its steps: none of the other levels is ever met."""
    config = configured("nft", "full", f"diffusion.sampler={sampler}", "align.steps=7",
                        "align.timesteps=7")  # fmt: skip
    engine = engine_of(config)
    data = make_data(config, engine, seed, rollout_of(engine), 0)
    seen = []
    engine.model.evaluate = lambda x, t, c: (seen.append(int(t[0])), np.zeros_like(x))[1]
    engine.draw([1], ["angry face"], 7)
    met = sorted(set(seen), reverse=True)
    assert len(seen) == 7 and len(met) == (7 if sampler == "ddim" else 5)
    assert set(data.t) == set(met[: int(0.75 * len(met))])


@ALL
def test_iterations_differ_and_repeat(objective):
    engine = engine_of(configured(objective))
    made = rollout_of(engine)
    one, again, other = (make_data(engine.config, engine, seed, made, i) for i in (1, 1, 2))
    np.testing.assert_array_equal(one.row, again.row)
    assert not np.array_equal(one.row, other.row)
    if objective != "ppo":
        np.testing.assert_array_equal(one.t, again.t)
        assert one.noise == again.noise != other.noise


def test_rollout_without_anything_to_learn():
    """All unhealthy: no entries and no batches."""
    for objective in OBJECTIVES:
        engine = engine_of(configured(objective))
        data = make_data(engine.config, engine, seed, rollout_of(engine, broken=8), 0)
        assert len(data) == 0 and batches(engine.config, data) == []
        engine.begin(data)
        engine.end_iteration(0)
        assert engine.updates == 0


def test_pairs_of_others(rng):
    """Offline: any pictures with captions become comparisons, which begin with ln 2 too."""
    engine = engine_of(configured("dpo"))
    chosen, rejected = rng.uniform(-1, 1, (2, 3, 16, 16, 3)).astype(np.float32)
    data = pair_data(
        engine.config, engine.model, seed, chosen, rejected, ["a face", "nobody knows this", ""], 0
    )
    engine.begin(data)
    results = [engine.policy_step(data, some, 1e-3) for some in batches(engine.config, data)]
    assert results[0].loss == math.log(2) and len(results) == 2 and all(r.finite for r in results)
    with pytest.raises(ShapeError, match="3 chosen and 3 rejected pictures and 2 captions"):
        pair_data(engine.config, engine.model, seed, chosen, rejected, ["a", "b"], 0)


def test_batches_and_what_fills_them():
    config = configured("ppo", "full", "ppo.epochs=3")
    data = TrajectoryData(*[np.zeros(1)] * 4, np.zeros(12, int), np.zeros(12, int))
    assert [(s.start, s.stop) for s in batches(config, data)] == 3 * [(0, 5), (5, 10), (10, 12)]
    assert len(batches(config, data, passes=1)) == 3
    index, live = filled(slice(10, 12), 5)
    assert index.tolist() == [10, 11, 11, 11, 11] and live.tolist() == [1, 1, 0, 0, 0]
    index, live = filled(slice(2, 9), 5)  # more than a batch is no less than it is
    assert index.tolist() == list(range(2, 9)) and live.all()


def test_pictures_of_another_sampler_are_refused():
    """The labels would belong to other pictures than the trajectories lead to."""
    engine = engine_of(configured("ppo"))
    made = rollout_of(engine)
    made.pictures[...] = engine.model.draw(made.kept.reshape(-1), [p for p in made.prompts for _ in range(4)],
                                           4).reshape(made.pictures.shape)  # fmt: skip
    with pytest.raises(ConfigError, match="are not those of the trajectories.*engine.collect"):
        make_data(engine.config, engine, seed, made, 0)


def test_steps_without_begin_are_refused():
    engine = engine_of(configured("nft"))
    data = make_data(engine.config, engine, seed, rollout_of(engine), 0)
    with pytest.raises(ConfigError, match="call begin"):
        engine.policy_step(data, slice(0, 2), 1e-3)
    engine.begin(data)
    engine.policy_step(data, slice(0, 2), 1e-3)
    engine.end_iteration(0)
    with pytest.raises(ConfigError, match="call begin"):
        engine.policy_step(data, slice(0, 2), 1e-3)


def test_phase_drift_is_where_it_was():
    """`align.dpo` goes on naming it."""
    assert phase_drift(np.float32([[[[3.0, 1.0]]]]), np.zeros((1, 1, 1, 2)), 2).tolist() == [1.0, -1.0]
