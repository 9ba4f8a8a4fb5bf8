"""The trainer on a GPU: graphs and calls, a run, its resumption byte for byte, its loss beside the CPU's."""

from __future__ import annotations

import dataclasses
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from bases import base_data  # noqa: E402
from parting import same_bytes_when_parted  # noqa: E402

from fp4bf16.align.rollout import Rollout  # noqa: E402
from fp4bf16.backends import cuda  # noqa: E402
from fp4bf16.nn.cuda import graph  # noqa: E402
from fp4bf16.train import checkpoint, progress  # noqa: E402
from fp4bf16.train.cli import load_model  # noqa: E402
from fp4bf16.train.config import get_preset, override  # noqa: E402
from fp4bf16.train.data import Vocabulary, load_pairs  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.engine import BaseData, HostEngine, make_engine, make_sampler  # noqa: E402
from fp4bf16.train.policy import PairData, batches, make_data  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402
from fp4bf16.train.schedule import learning_rate  # noqa: E402
from fp4bf16.train.state import Run, Stopped  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def cupy(library):
    if not cuda.devices():
        pytest.skip("no GPU")
    return pytest.importorskip("cupy", reason="the extra 'cuda' is not installed")


def said(log: io.StringIO | None = None) -> progress.Progress:
    return progress.Progress(log or io.StringIO())


def lines(out) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def engines(config):
    pairs = load_pairs(config.size).select(role="policy", word=config.word or None)
    model = Denoiser(config, Vocabulary.of(pairs.captions))
    return make_engine("cuda", model, config), base_data(pairs, model, lambda name: len(name))


def test_graphs_do_what_calls_do(monkeypatch, rng):
    """Base and DPO steps, captured and not, bit for bit; a whole emoji32 network, odd last batch and all."""
    config = override(get_preset("emoji32"), ["base.batch=48", "align.prompts=2"])
    states = []
    pictures = np.tanh(rng.standard_normal((2, 3, 16, 16, 12))).astype(np.float32)
    row, t = rng.integers(0, 3, 7), rng.integers(0, 1000, 7)
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(graph, "_Captured", graph._Eager)
        engine, data = engines(config)
        results = [engine.base_step(data, step, 1e-3) for step in range(4)]
        engine.begin_alignment()
        bags = (np.arange(3 * len(engine.model.vocabulary)) % 97 == 0).reshape(3, -1).astype(np.float32)
        pairs = PairData(*pictures, bags, row, t, (1, 2))
        engine.begin(pairs)
        results += [engine.policy_step(pairs, s, 1e-4) for s in (slice(0, 4), slice(4, 7), slice(0, 4))]
        drawn = engine.draw(range(5), ["angry face"] * 5, 3, "fp4")
        assert np.isfinite(drawn).all() and all(r.finite for r in results)
        states.append((results, engine.state(), drawn))
    (a, one, drawn), (b, two, again) = states
    assert a == b
    np.testing.assert_array_equal(drawn, again)
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)
    assert engine.updates == 3
    assert sum(key[0] == "dpo" for key in engine._graphs) == 1  # the last, short batch is filled up


def _aligning(objective: str):
    """An engine that begins to align, and what it draws as a rollout, labelled by its brightness."""
    engine, _ = engines(override(get_preset("emoji32"), [
        f"align.objective={objective}", "align.steps=4", "align.explore_steps=4", "align.batch=5",
        "align.prompts=2",
    ]))  # fmt: skip
    engine.begin_alignment()
    captions, kept = ["angry face", "red heart"], np.arange(6, dtype=np.uint64)
    pictures = engine.collect(kept, [c for c in captions for _ in range(3)], 4)
    labels = pictures.mean((1, 2, 3), dtype=np.float64).reshape(2, 3)
    labels[0, 1] = np.nan
    made = Rollout(pictures.reshape(2, 3, *pictures.shape[1:]), labels, kept.reshape(2, 3), captions,
                   kept.reshape(2, 3), labels, np.tile(np.arange(3), (2, 1)))  # fmt: skip
    return engine, make_data(engine.config, engine, len, made, 0)


def _taught(engine, data) -> list:
    results = []
    for number in (0, 300):
        engine.begin(data)
        results += [engine.policy_step(data, some, 1e-4) for some in batches(engine.config, data)]
        engine.end_iteration(number)
    return results


@pytest.mark.parametrize("objective", ["nft", "ppo"])
def test_graphs_of_other_objectives_do_what_calls_do(objective, monkeypatch):
    """Captured and not, bit for bit: the loss's arrays are CuPy's, whose calls the graph must hold too."""
    states = []
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(graph, "_Captured", graph._Eager)
        engine, data = _aligning(objective)
        results = _taught(engine, data)
        assert all(r.finite and r.norm > 0 for r in results) and engine.updates == len(results)
        if objective == "ppo":
            assert results[0].stats["ratio"] == 1.0 and results[0].stats["ratio_spread"] == 0.0
        states.append((results, engine.state(), engine.collect(range(3), ["angry face"] * 3, 4)))
    (a, one, drawn), (b, two, again) = states
    assert a == b
    np.testing.assert_array_equal(drawn, again)
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


@pytest.mark.parametrize("objective", ["dpo", "nft"])
def test_more_than_there_was_room_for(objective, monkeypatch):
    """The graph of the buffers before is gone: with and without graphs the numbers are the same."""
    runs = []
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(graph, "_Captured", graph._Eager)
        engine, data = _aligning(objective)
        found, room = _taught(engine, data), engine._room[objective][0]
        names = ("chosen", "rejected", "captions") if objective == "dpo" else (
            "pictures", "captions", "advantage")  # fmt: skip
        times = room // len(data.captions) + 2
        more = {n: np.concatenate([getattr(data, n)] * times) for n in names}
        more |= {"row": np.arange(len(more["captions"])), "t": np.resize(data.t, len(more["captions"]))}
        found += _taught(engine, dataclasses.replace(data, **more))
        assert engine._room[objective][0] > room and all(r.finite for r in found)
        assert sum(key[0] == objective for key in engine._graphs) == 1
        runs.append((found, engine.state()))
    (a, one), (b, two) = runs
    assert a == b
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


@pytest.mark.parametrize("objective", ["dpo", "nft", "ppo"])
def test_ragged_iterations_take_no_more_memory(objective):
    """Iterations of other sizes, last batches of other sizes: one graph an objective, and no growth but of
    the little that is written to buffers; a graph takes much more.
    """
    engine, data = _aligning(objective)
    _taught(engine, data)
    before, graphs = engine.memory()["gpu_mb"], set(engine._graphs)
    for count in range(1, len(data)):
        some = {"row": data.row[:count]}
        some |= {"step": data.step[:count]} if objective == "ppo" else {"t": data.t[:count]}
        assert all(r.finite for r in _taught(engine, dataclasses.replace(data, **some)))
    assert set(engine._graphs) == graphs and engine.memory()["gpu_mb"] <= before + 0.5


@pytest.mark.parametrize("objective", ["dpo", "nft", "ppo"])
def test_policy_is_taken_back_and_restored(objective):
    engine, data = _aligning(objective)
    before, snapshot = engine.state(), engine.snapshot()
    first = _taught(engine, data)
    after, updates = engine.state(), engine.updates
    engine.take_back(snapshot)
    for name, array in engine.state().items():
        np.testing.assert_array_equal(array, before[name], err_msg=name)
    assert _taught(engine, data) == first
    other, _ = _aligning(objective)
    other.restore(before, 0, aligning=True)
    assert _taught(other, data) == first and other.updates == updates
    for name, array in other.state().items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)


def test_trajectories_end_on_the_pictures():
    engine, _ = _aligning("ppo")
    seeds, captions = list(range(70)), ["angry face"] * 70  # more than a chunk
    found = engine.trajectories(seeds, captions, 4)
    np.testing.assert_array_equal(found.pictures, engine.collect(seeds, captions, 4))
    np.testing.assert_array_equal(
        engine.trajectories(seeds[66:], captions[66:], 4).latents, found.latents[:, 66:]
    )


def test_broken_gradient_updates_nothing():
    engine, data = engines(get_preset("ci"))
    assert engine.base_step(data, 0, 1e-3).finite
    before = engine.state()
    broken = BaseData(np.full_like(data.pictures, np.nan), data.captions, data.seeds, data.levels)
    result = engine.base_step(broken, 1, 1e-3)
    assert not result.finite and engine.updates == 1
    for name, array in engine.state().items():
        np.testing.assert_array_equal(array, before[name])
    assert engine.base_step(data, 1, 1e-3).finite and engine.updates == 2


def test_memory_does_not_grow():
    engine, data = engines(get_preset("ci"))
    for step in range(3):
        engine.base_step(data, step, 1e-3)
    before = engine.memory()["gpu_mb"]
    for step in range(3, 40):
        engine.base_step(data, step, 1e-3)
    assert engine.memory()["gpu_mb"] == before


def test_unconditional_network_learns():
    """Without captions, and with FP4 in the forward: the loss of one batch falls."""
    from fp4bf16 import nn
    from fp4bf16.diffusion.schedules import get_schedule
    from fp4bf16.train.device import CudaEngine

    config = override(get_preset("ci"), ["base.batch=32"])
    unet = nn.UNet2D(nn.UNetConfig.tiny(block_out_channels=(32, 64)), seed=3)
    unet.apply_route(config.route)
    model = SimpleNamespace(unet=unet, schedule=get_schedule("cosine"), prediction="v", shape=(8, 8, 12),
                            config=config)  # fmt: skip
    pictures = Denoiser(config, Vocabulary.of(["face"])).fold(load_pairs(16).images[0, :32])
    data = BaseData(pictures, None, {"row": 1, "t": 2, "noise": 3, "drop": 4}, 1000)
    losses = [engine_step.loss for engine_step in _steps(CudaEngine(model, config, track=None), data, 60)]
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:5])


def _steps(engine, data, count):
    return [engine.base_step(data, step, 2e-3) for step in range(count)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, cupy):
    """The preset `ci` on the GPU, undisturbed."""
    out = tmp_path_factory.mktemp("gpu") / "run"
    train(get_preset("ci"), out, said(), "cuda")
    return out


def test_run(whole):
    config = json.loads((whole / "config.json").read_text())
    assert config["device"] == f"cuda: {cuda.load().device(0).name}"
    found = lines(whole)
    assert found[-1]["stage"] == "summary" and found[-1]["pictures"] == 24
    assert [line["first_loss"] for line in found if line["stage"] == "align"][0] == np.log(2)
    assert all(line["gpu_mb"] > 0 for line in found if line["stage"] == "base")
    assert found[-1]["unhealthy"] == 0


def test_same_command_gives_the_same_bytes(whole, tmp_path):
    train(get_preset("ci"), tmp_path / "run", said(), "cuda")
    again = (tmp_path / "run" / "checkpoint.safetensors").read_bytes()
    assert again == (whole / "checkpoint.safetensors").read_bytes()


@pytest.mark.parametrize("stage, step", [("base", 17), ("align", 1)])
def test_stopped_and_gone_on_with_gives_the_same_bytes(whole, tmp_path, monkeypatch, stage, step):
    out, real = tmp_path / "run", Run.done

    def done(self, at, save=False):
        if (self.stage, at) == (stage, step):
            self.stop.asked = 2
        real(self, at, save)

    monkeypatch.setattr(Run, "done", done)
    with pytest.raises(Stopped):
        train(get_preset("ci"), out, said(), "cuda")
    monkeypatch.setattr(Run, "done", real)
    train(get_preset("ci"), out, said(), "cuda")
    assert (out / "checkpoint.safetensors").read_bytes() == (whole / "checkpoint.safetensors").read_bytes()


def test_loss_beside_the_cpus(whole, tmp_path):
    """The same draws in the same order: step by step the losses are close, for the CPU rounds the operands of
    products to BF16 and the GPU activations too."""
    config = get_preset("ci")
    pairs = load_pairs(config.size).select(role="policy", word=config.word)
    model = Denoiser(config, Vocabulary.of(pairs.captions))
    from fp4bf16.diffusion.noise import subseed

    host = HostEngine(model, config)
    data, c = base_data(pairs, model, lambda name: subseed(config.seed, name)), config.base
    want = [host.base_step(data, s, learning_rate(s, c.steps, c.lr, c.decay)).loss for s in range(c.steps)]
    got = [line["loss"] for line in lines(whole) if line["stage"] == "base"]
    # Of three seeds on the emulated library the worst were 3.3e-5 (first step), 1.2e-3 (any), 1.7e-4 (mean).
    np.testing.assert_allclose(got[0], want[0], rtol=3e-4)
    np.testing.assert_allclose(got, want, rtol=0.01)
    assert abs(np.mean(got) - np.mean(want)) < 1.5e-3 * np.mean(want)


def test_cpu_draws_the_gpus_pictures_and_goes_on(whole, tmp_path, monkeypatch):
    model, other = load_model(whole), load_model(whole)
    seeds, captions = list(range(70)), ["angry face"] * 70  # more than a chunk
    want, got = model.draw(seeds, captions, 4), make_sampler("cuda", other)(seeds, captions, 4)
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)
    one = make_sampler("cuda", load_model(whole))(seeds[69:], captions[69:], 4)
    np.testing.assert_array_equal(one[0], got[69])  # one seed, one picture, in any batch

    out, real, log = tmp_path / "run", Run.done, io.StringIO()

    def done(self, at, save=False):
        self.stop.asked = 2 if (self.stage, at) == ("base", 35) else 0
        real(self, at, save)

    monkeypatch.setattr(Run, "done", done)
    with pytest.raises(Stopped):
        train(get_preset("ci"), out, said(), "cuda")
    monkeypatch.setattr(Run, "done", real)
    train(get_preset("ci"), out, said(log))
    assert "goes on on cpu: the result will not be bit-identical" in log.getvalue()


def test_checkpoint_is_the_cpus(whole):
    arrays, meta = checkpoint.load(whole / "checkpoint.safetensors")
    assert meta["stage"] == "finished" and meta["updates"] > 0
    policy, average = checkpoint.take(arrays, "policy"), checkpoint.take(arrays, "ema")
    assert set(policy) == set(average) == set(checkpoint.take(arrays, "adam.first"))
    assert {a.dtype for a in policy.values()} == {np.dtype(np.float32)}
    assert any(not np.array_equal(policy[k], average[k]) for k in policy)


# ---- the closed loop ---------------------------------------------------------------------------------------
LOOP = ["loop.forward=router", "loop.every=2", "loop.decide=4", "loop.curvature_every=4", "loop.budget=1",
        "loop.cooldown=2", "loop.buckets=2"]  # fmt: skip
UNSAMPLED = ["loop.forward=fp4", *(f"loop.{name}=1000" for name in ("every", "decide", "curvature_every"))]


@pytest.mark.parametrize("consistency", [0.0, 0.1])
def test_graphs_of_the_loop_do_what_calls_do(consistency, monkeypatch, rng):
    """Steps on several routes, sampled ones, a layer held for a while, DPO on the route, pictures by buckets:
    captured and not, bit for bit.
    """
    config = override(get_preset("emoji32"), [*LOOP, "base.batch=48", "align.prompts=2",
                                              f"loop.consistency={consistency}"])  # fmt: skip
    row, t, states, pictures = rng.integers(0, 3, 7), rng.integers(0, 1000, 7), [], None
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(graph, "_Captured", graph._Eager)
        engine, data = engines(config)
        if pictures is None:
            shape = (2, 3, *engine.model.shape)
            pictures = np.tanh(rng.standard_normal(shape)).astype(np.float32)
        results = [engine.base_step(data, step, 1e-3) for step in range(5)]
        fast = [n for n, track in engine.loop.route().items() if track == "fp4"]
        assert fast
        engine.loop.constraint.punish(engine.loop.number, {fast[0]: "a test"})
        results += [engine.base_step(data, step, 1e-3) for step in range(5, 9)]
        engine.begin_alignment()
        bags = (np.arange(3 * len(engine.model.vocabulary)) % 97 == 0).reshape(3, -1).astype(np.float32)
        pairs = PairData(*pictures, bags, row, t, (1, 2))
        engine.begin(pairs)
        results += [engine.policy_step(pairs, s, 1e-4) for s in (slice(0, 4), slice(4, 7))]
        assert results[9].loss == np.log(2)
        engine.end_iteration(0)
        engine.model.routes = engine.loop.routes()
        drawn = engine.draw(range(5), ["angry face"] * 5, 4, "fp4")
        assert np.isfinite(drawn).all() and all(r.finite for r in results)
        states.append((results, engine.state(), drawn, engine.loop.state()))
    (a, one, drawn, told), (b, two, again, heard) = states
    assert a == b and told == heard
    np.testing.assert_array_equal(drawn, again)
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


def test_graphs_of_many_routes_take_no_more_memory():
    """What is dropped for a new route goes back."""
    from fp4bf16.routing import RouteSet
    from fp4bf16.train.device_sampler import KEPT

    engine, data = engines(override(get_preset("ci"), UNSAMPLED))
    plain, held = engine.loop._plain.training, []
    fast = [n for n, track in plain.items() if track == "fp4"]
    for step in range(3 * KEPT):
        engine.loop._plain = RouteSet([plain | dict.fromkeys(fast[: step % (2 * KEPT)], "bf16")])
        assert engine.base_step(data, step, 1e-3).finite
        held.append(engine.memory()["gpu_mb"])
    assert sum(key[0] == "base" for key in engine._graphs) == KEPT
    assert max(held[2 * KEPT :]) <= 1.05 * max(held[: 2 * KEPT])


def test_weights_that_jump_are_on_bf16_in_the_same_step():
    """Nothing stays of the attempt: state and numbers are those of the route without the layer."""
    from fp4bf16.routing import RouteSet

    config = override(get_preset("ci"), UNSAMPLED)
    found, name = [], "up_blocks.1.resnets.0.conv1.weight"
    for known in (False, True):
        engine, data = engines(config)
        results = [engine.base_step(data, step, 1e-3) for step in range(7)]
        weights = engine.parameters.to_host()
        engine.parameters.from_host(weights | {name: weights[name] * 1000})
        if known:
            engine.loop._plain = RouteSet([engine.loop._plain.training | {name: "bf16"}])
        results.append(engine.base_step(data, 7, 1e-3))
        events = engine.loop.drain()
        assert [e["layer"] for e in events] == ([] if known else [name])
        found.append((results, engine.state()))
    (a, one), (b, two) = found
    assert a == b
    for array, other in zip(one.values(), two.values(), strict=True):
        np.testing.assert_array_equal(array, other)


def test_measured_latencies(tmp_path, monkeypatch):
    """Every product on both tracks, in the table of the cache; plausible beside the step that holds them."""
    monkeypatch.setenv("FP4BF16_CACHE_DIR", str(tmp_path))
    engine, data = engines(override(get_preset("emoji32"), [*LOOP, "base.batch=64", "loop.latency=measured"]))
    for step in range(2):
        engine.base_step(data, step, 1e-3)
    saved = [engine.loop.router.saved_us(name) for name in engine.loop.free]
    assert None not in saved and all(abs(s) < 1e4 for s in saved)
    assert list(tmp_path.rglob("*.json"))


def test_run_with_the_loop_resumes_to_the_same_bytes(tmp_path, monkeypatch):
    config = override(get_preset("ci"), LOOP)
    train(config, tmp_path / "whole", said(), "cuda")
    assert lines(tmp_path / "whole")[0]["loop"]["fp4_share"] is not None
    same_bytes_when_parted(config, tmp_path, ("base", 17), monkeypatch, said)
