"""Policy training on the emulated GPU: every objective does what the CPU's does, and resumes exactly.

As in test_train_device.py numbers agree to a few parts in a hundred with the CPU's; with the device's own,
and of what is drawn at random, to the bit.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from host_cuda import host_cuda  # noqa: E402, F401  (a fixture)
from often import in_ci  # noqa: E402
from test_train_device import gpu, near, pair_of_engines, tiny  # noqa: E402, F401  (a fixture)

from fp4bf16 import device  # noqa: E402
from fp4bf16.align.rollout import Rollout  # noqa: E402
from fp4bf16.errors import ConfigError, ShapeError  # noqa: E402
from fp4bf16.train import checkpoint  # noqa: E402
from fp4bf16.train.data import load_pairs  # noqa: E402
from fp4bf16.train.policy import PairData, SampleData, TrajectoryData, batches, make_data  # noqa: E402

OBJECTIVES = ("dpo", "nft", "ppo")
ALL = pytest.mark.parametrize("objective", OBJECTIVES)


def aligning(objective: str, *more: str):
    """(CPU, device) that begin to align from the same weights, after a step of the base training."""
    steps = "align.steps=3", "align.explore_steps=3"  # the same, as PPO asks
    settings = f"align.objective={objective}", *steps, "align.timestep_fraction=1", "align.batch=5", *more
    host, ours, data = pair_of_engines(tiny(*settings))
    host.base_step(data, 0, 1e-3)
    ours.restore(host.state(), host.updates, aligning=False)
    for engine in (host, ours):
        engine.begin_alignment()
    return host, ours


def rollout_of(engine, prompts: int = 2, keep: int = 3, start: int = 0) -> Rollout:
    """Pictures of an engine, labelled by their brightness, one of them unhealthy."""
    captions = list(load_pairs(16).select(role="policy", word="face").captions[:prompts])
    kept = np.arange(start, start + prompts * keep, dtype=np.uint64)
    rows = [c for c in captions for _ in range(keep)]
    pictures = engine.collect(kept, rows, engine.config.align.steps)
    labels = pictures.mean((1, 2, 3), dtype=np.float64)
    labels[1], pictures[1] = np.nan, np.nan
    grid = prompts, keep
    pictures, labels, kept = pictures.reshape(*grid, 16, 16, 3), labels.reshape(grid), kept.reshape(grid)
    return Rollout(pictures, labels, kept, captions, kept, labels, np.tile(np.arange(keep), (prompts, 1)))


def taught(engine, number: int = 0, lr: float = 1e-3, data=None) -> list:
    """One iteration from pictures of its own, or from `data`."""
    if data is None:
        data = make_data(engine.config, engine, len, rollout_of(engine, start=10 * number), number)
    engine.begin(data)
    results = [engine.policy_step(data, some, lr) for some in batches(engine.config, data)]
    engine.end_iteration(number)
    return results


def scaled(host, data):
    """The data of the CPU as the GPU has them: its latents are in the scale that its network sees. And by
    what each latent was divided.
    """
    if not isinstance(data, TrajectoryData):
        return data, None
    scale = np.append(host.model.schedule.norm[data.timesteps], 1).astype(np.float32)
    return dataclasses.replace(data, latents=data.latents / scale.reshape(-1, 1, 1, 1, 1)), scale


class Told:
    """An output that was computed elsewhere, in place of the network's: it keeps the gradient it is given."""

    def __init__(self, data):
        self.data, self.gradient = data, None

    def backward(self, gradient):
        self.gradient = gradient


def overheard(ours, patch) -> dict:
    """What the device's step says and is told: outputs of the policy, of the old one, of the reference, the
    gradient in the output, each in the list of its name.
    """
    heard = {"output": [], "old": [], "reference": [], "gradient": []}
    by, backward = ours._by, ours._backward

    def _by(*arguments):
        found = by(*arguments)
        heard["old" if arguments[0] is ours.old else "reference"].append(device.to_host(found))
        return found

    def _backward(output, gradient):
        heard["output"].append(device.to_host(device.operand(output.data, "output")))
        heard["gradient"].append(device.to_host(gradient))
        backward(output, gradient)

    patch.setattr(ours, "_by", _by)
    patch.setattr(ours, "_backward", _backward)
    return heard


def of_the_host(host, data, some, heard, patch):
    """(result, gradient in the output) of the CPU's step, with the outputs that the device's network had."""
    count, n = some.stop - some.start, len(heard["output"][-1])
    rows = np.arange(n)  # of the device's batch, which the CPU does not fill up but for PPO
    if isinstance(data, PairData):
        rows = np.append(rows[:count], rows[n // 2 : n // 2 + count])
    elif isinstance(data, SampleData):
        rows = rows[:count]
    told = Told(heard["output"].pop()[rows])
    frozen = [heard[name].pop()[rows] for name in ("old", "reference") if heard[name]]
    patch.setattr(host.model, "policy", lambda *x: told)
    patch.setattr(host, "_frozen", lambda weights: lambda *x: frozen.pop(0))
    result = host.policy_step(data, some, 1e-3)
    assert not frozen
    gradient = heard["gradient"].pop()
    assert not np.delete(gradient, rows, 0).any()  # what fills the batch up
    return result, told.gradient, gradient[rows]


@ALL
@in_ci("schedule", ("cosine", "ve"), "cosine")  # ve: the next test
def test_losses_and_gradients_are_the_cpus_of_the_same_outputs(gpu, objective, schedule, monkeypatch):  # noqa: F811
    """From what the device's networks said the CPU's step has the same loss, statistics and gradient, to the
    rounding of float32: every factor, every row, in full batches and in one that is filled up, at the first
    update and after some, when nothing is 0 any more. The norm is that of the gradient that lies there.
    """
    more = "align.beta=20", "ppo.clip=0.2", "align.hold=3", "nft.kl=0.5", "align.batch=4"
    host, ours = aligning(objective, *more, f"diffusion.schedule={schedule}")
    data = make_data(host.config, host, len, rollout_of(host, keep=6), 0)
    made, scale = scaled(host, data)
    slices = batches(host.config, data)
    assert len(slices) >= 2 and slices[0].stop == 4 and slices[-1].stop - slices[-1].start < 4
    heard = overheard(ours, monkeypatch)
    host.begin(data)
    for number in range(2):
        ours.begin(made)
        if objective == "ppo":  # a density of other units
            host._old_logp = ours._old_logp - np.log(scale[data.step + 1].astype(np.float64))
        for some in slices:
            got = ours.policy_step(made, some, 3e-3)
            want, gradient, slope = of_the_host(host, data, some, heard, monkeypatch)
            np.testing.assert_allclose(slope, gradient, rtol=1e-4, atol=2e-6 * np.abs(gradient).max())
            assert got.loss == pytest.approx(want.loss, rel=1e-5) and set(got.stats) == set(want.stats)
            for name, value in want.stats.items():
                assert got.stats[name] == pytest.approx(value, rel=2e-5, abs=1e-7), name
            there = device.to_host(ours.parameters.grad).astype(np.float64)
            assert got.norm == pytest.approx(np.sqrt((there**2).sum()), rel=1e-5)
            assert not any(heard.values())
        ours.end_iteration(number)
        assert number == 0 or got.stats["drift"] > 1e-3
        if number == 0 and objective == "nft":
            np.testing.assert_array_equal(device.to_host(ours.old.data), device.to_host(ours.parameters.data))


@ALL
@pytest.mark.parametrize("schedule", ["cosine", "ve"])
def test_policy_steps_are_the_cpus(gpu, objective, schedule):  # noqa: F811
    """The same entries on both, through both networks: losses, norms and statistics agree, at the first
    update and after some. Nothing here is random: the worst of all were 0.004 (norm before the first update),
    0.047 (norm), 0.057 (kl) and 0.1 (drift); the limits are three times that, and less than a factor of 1.3.
    """
    more = "align.beta=20", "ppo.clip=0.2", f"diffusion.schedule={schedule}"
    host, ours = aligning(objective, *more)
    data = make_data(host.config, host, len, rollout_of(host), 0)
    made, _ = scaled(host, data)
    for number in range(2):
        both = zip(taught(host, number, 3e-4, data), taught(ours, number, 3e-4, made), strict=True)
        for i, (a, b) in enumerate(both):
            assert set(a.stats) == set(b.stats) and b.finite
            assert b.loss == pytest.approx(a.loss, rel=0.05, abs=2e-3)
            assert b.norm == pytest.approx(a.norm, rel=0.15 if number or i else 0.012)
            for name in [n for n in a.stats if n.startswith(("errors/", "loss/p", "loss/n")) or n == "ratio"]:
                assert b.stats[name] == pytest.approx(a.stats[name], rel=0.05), name
            for name, limit in (("kl", 0.17), ("drift", 0.29)):
                assert b.stats[name] == pytest.approx(a.stats[name], rel=limit, abs=1e-9), name
    assert ours.updates == host.updates >= 2
    if objective == "nft":
        want = checkpoint.take(host.state(), "old")
        for name, a in checkpoint.take(ours.state(), "old").items():
            assert np.abs(a - want[name]).max() <= ours.updates * 2.1 * 3e-4, name


def policy_graphs(engine) -> set:
    return {key for key in engine._graphs if key[0] not in ("sample", "base")}


GRAPHS = {"dpo": {("dpo", 4)}, "nft": {("nft", 4)}, "ppo": {("ppo old", 4), ("ppo", 4)}}


@in_ci("objective", OBJECTIVES, "dpo", "ppo")
def test_iterations_of_any_size_have_one_graph(gpu, objective):  # noqa: F811
    """Last batches of other sizes, iterations of other sizes: no graph and no buffer more than the first had.
    A short batch begins with the numbers of a full one.
    """
    _, ours = aligning(objective, "align.batch=4", "align.seeds=6", "align.keep=6")
    sizes, held = set(), None
    for number, keep in enumerate((4, 6, 3, 5)):
        data = make_data(ours.config, ours, len, rollout_of(ours, keep=keep), number)
        sizes.add(len(data))
        for result in taught(ours, number, 0.0, data):
            assert result.finite and result.stats["kl"] == result.stats["drift"] == 0
            if objective == "dpo":
                assert result.loss == math.log(2) and result.stats["rewards/accuracies"] == 0.5
        held = set(ours.memory_of._held) if held is None else held
        assert policy_graphs(ours) == GRAPHS[objective] and set(ours.memory_of._held) == held
    assert len(sizes) == 4 and any(size % 4 for size in sizes)


@in_ci("objective", OBJECTIVES, "dpo", "ppo")
def test_more_than_there_was_room_for(gpu, objective):  # noqa: F811
    """Buffers and graph are made anew, and nothing of those before stays; the numbers are those of an engine
    that had the room at once.
    """
    _, small = aligning(objective, "align.batch=4")
    _, large = aligning(objective, "align.batch=4", "align.seeds=8", "align.keep=8")
    for number, keep in enumerate((3, 8, 5)):
        data = make_data(large.config, large, len, rollout_of(large, keep=keep), number)
        assert taught(small, number, data=data) == taught(large, number, data=data)
        assert policy_graphs(small) == GRAPHS[objective]
        for engine in (small, large):
            names = [key[0] for key in engine.memory_of._held]
            assert len(set(names)) == len(names), names
    assert objective == "ppo" or small._room[objective] == ((7, 7) if objective == "dpo" else (15, 15))


def test_buffers_of_one_name_differ_in_shape_and_dtype(gpu):  # noqa: F811
    _, ours = aligning("dpo")
    one, other = ours.memory_of("mine", (3,)), ours.memory_of("mine", (3,), "int64")
    assert (one.dtype, other.dtype) == ("float32", "int64") and ours.memory_of("mine", (3,)) is one
    more = ours.memory_of("mine", (4,))
    ours.memory_of("yours", (3,))
    ours.memory_of.drop("mine")
    assert not [key for key in ours.memory_of._held if key[0] == "mine"] and more.shape == (4,)
    assert [key for key in ours.memory_of._held if key[0] == "yours"]


def test_first_batches_of_ppo_have_a_ratio_of_one(gpu):  # noqa: F811
    """On the device as well, and in a batch that is filled up; the loss is minus the mean advantage."""
    _, ours = aligning("ppo")
    results = taught(ours, lr=0.0)
    assert len(results) == 2  # 5 healthy pictures, 2 steps each, by fives
    made = rollout_of(ours, prompts=1, keep=4)
    results += taught(ours, lr=0.0, data=make_data(ours.config, ours, len, made, 1))  # 6 steps, by fives
    assert len(results) == 4
    for result in results:
        assert result.stats["ratio"] == 1.0 and result.norm > 0
        assert result.stats["ratio_spread"] == result.stats["kl"] == result.stats["drift"] == 0
        assert result.stats["approx_kl"] == 0
        assert result.loss == pytest.approx(-result.stats["advantage"], abs=1e-12)


@pytest.mark.parametrize("schedule", ["cosine", "ve"])
def test_trajectories_end_on_the_pictures(gpu, schedule):  # noqa: F811
    """Bit for bit on the same device, in any batch; near the CPU's, in the scale that the network sees."""
    host, ours = aligning("ppo", f"diffusion.schedule={schedule}", "diffusion.guidance=3")
    seeds, captions = list(range(6)), ["angry face"] * 6
    found, cpu = ours.trajectories(seeds, captions, 3), host.trajectories(seeds, captions, 3)
    np.testing.assert_array_equal(found.pictures, ours.collect(seeds, captions, 3))
    np.testing.assert_array_equal(
        ours.draw(seeds, captions, 3, sampler="ancestral", guidance=1.0), found.pictures
    )
    np.testing.assert_array_equal(ours.trajectories(seeds[4:], captions[4:], 3).latents, found.latents[:, 4:])
    np.testing.assert_array_equal(found.timesteps, cpu.timesteps)
    for i, t in enumerate(found.timesteps):
        near(found.latents[i] * np.float32(host.model.schedule.norm[t]), cpu.latents[i], 0.05)
    near(found.latents[-1], ours.model.fold(cpu.pictures), 0.05)
    assert ours.trajectories([], [], 3).latents.shape == (4, 0, *ours.model.shape)


def test_old_policy_draws_what_is_collected(gpu):  # noqa: F811
    """Its graphs are its own: the policy goes on drawing its pictures, and a new old policy is seen."""
    _, ours = aligning("nft")
    seeds, captions = [1, 2], ["angry face"] * 2
    start = ours.draw(seeds, captions, 3)
    np.testing.assert_array_equal(ours.collect(seeds, captions, 3), start)
    data = make_data(ours.config, ours, len, rollout_of(ours), 0)
    ours.begin(data)
    ours.policy_step(data, slice(0, 5), 1e-2)
    moved = ours.draw(seeds, captions, 3)
    np.testing.assert_array_equal(ours.collect(seeds, captions, 3), start)
    assert not np.array_equal(moved, start)
    ours.end_iteration(0)  # the old one becomes the new one
    np.testing.assert_array_equal(ours.collect(seeds, captions, 3), moved)
    np.testing.assert_array_equal(ours.draw(seeds, captions, 3), moved)


@in_ci("objective", OBJECTIVES, "nft", "ppo")  # dpo: test_train_device.py, whole runs to the bytes
def test_restored_policy_goes_on_bit_for_bit(gpu, objective):  # noqa: F811
    (_, whole), (_, parted), (_, again) = (aligning(objective) for _ in range(3))
    for number in range(2):
        taught(whole, number)
    taught(parted)
    taught(again, 5)  # of other weights, and with graphs of another old policy
    again.restore(parted.state(), parted.updates, aligning=True)
    taught(again, 1)
    want = whole.state()
    assert set(want) == set(again.state()) and again.updates == whole.updates > 1
    assert any(name.startswith("old.") for name in want) == (objective == "nft")
    for name, a in again.state().items():
        np.testing.assert_array_equal(a, want[name], err_msg=name)


@in_ci("objective", OBJECTIVES, "nft", "ppo")
def test_taken_back_is_as_before(gpu, objective):  # noqa: F811
    _, ours = aligning(objective)
    taught(ours)
    before, updates, snapshot = ours.state(), ours.updates, ours.snapshot()
    drawn = ours.draw([5], ["angry face"], 2, "fp4")
    first = taught(ours, 300)
    assert any(not np.array_equal(a, before[name]) for name, a in ours.state().items())
    ours.take_back(snapshot)
    for name, a in ours.state().items():
        np.testing.assert_array_equal(a, before[name], err_msg=name)
    assert ours.updates == updates
    np.testing.assert_array_equal(ours.draw([5], ["angry face"], 2, "fp4"), drawn)
    assert taught(ours, 300) == first


@ALL
def test_policy_gradient_that_is_not_finite_updates_nothing(gpu, objective):  # noqa: F811
    _, ours = aligning(objective)
    data = make_data(ours.config, ours, len, rollout_of(ours), 0)
    getattr(data, {"dpo": "chosen", "nft": "pictures", "ppo": "latents"}[objective])[...] = np.nan
    before = ours.state()
    ours.begin(data)
    with np.errstate(invalid="ignore"):
        result = ours.policy_step(data, batches(ours.config, data)[0], 1e-3)
    assert not result.finite and ours.updates == 0
    for name, a in ours.state().items():
        np.testing.assert_array_equal(a, before[name])


def test_policy_steps_without_begin_are_refused(gpu):  # noqa: F811
    _, ours = aligning("nft")
    data = make_data(ours.config, ours, len, rollout_of(ours), 0)
    with pytest.raises(ConfigError, match="call begin"):
        ours.policy_step(data, slice(0, 2), 1e-3)


def test_state_without_the_old_policy_changes_nothing(gpu):  # noqa: F811
    _, ours = aligning("nft")
    before = ours.state()
    state = {name: a + 1 for name, a in before.items() if not name.startswith("old.")}
    with pytest.raises(ShapeError, match="is missing"):
        ours.restore(state, 1, aligning=True)
    for name, a in ours.state().items():
        np.testing.assert_array_equal(a, before[name])
