"""Adapters trained on a GPU: graphs and calls, taken back and resumed to the bit, memory, beside the CPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from bases import base_data  # noqa: E402
from test_train_gpu import LOOP, _taught, cupy, said  # noqa: E402, F401  (cupy is a fixture)

from fp4bf16.align.rollout import Rollout  # noqa: E402
from fp4bf16.nn.cuda import graph  # noqa: E402
from fp4bf16.train import checkpoint  # noqa: E402
from fp4bf16.train.config import get_preset, override  # noqa: E402
from fp4bf16.train.data import Vocabulary, load_pairs  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.engine import make_engine  # noqa: E402
from fp4bf16.train.policy import make_data  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402
from fp4bf16.train.state import Run, Stopped  # noqa: E402

pytestmark = pytest.mark.gpu

ALL = pytest.mark.parametrize("objective", ["dpo", "nft", "ppo"])
CAPTIONS = ["angry face", "red heart"]


def settings(objective: str, *more: str, preset: str = "emoji32"):
    return override(get_preset(preset), [
        f"align.objective={objective}", "align.steps=4", "align.explore_steps=4", "align.batch=5",
        "align.prompts=2", "align.parameters=lora", "lora.rank=8", *more,
    ])  # fmt: skip


def engine_of(config, where: str = "cuda"):
    pairs = load_pairs(config.size).select(role="policy", word=config.word or None)
    model = Denoiser(config, Vocabulary.of(pairs.captions))
    return make_engine(where, model, config), base_data(pairs, model, lambda name: len(name))


def data_of(engine, start: int = 0):
    """What the engine draws as a rollout, labelled by its brightness."""
    kept = np.arange(start, start + 6, dtype=np.uint64)
    pictures = engine.collect(kept, [c for c in CAPTIONS for _ in range(3)], 4)
    labels = pictures.mean((1, 2, 3), dtype=np.float64).reshape(2, 3)
    labels[0, 1] = np.nan
    made = Rollout(pictures.reshape(2, 3, *pictures.shape[1:]), labels, kept.reshape(2, 3), CAPTIONS,
                   kept.reshape(2, 3), labels, np.tile(np.arange(3), (2, 1)))  # fmt: skip
    return make_data(engine.config, engine, len, made, start)


def aligning(objective: str, *more: str):
    engine, _ = engine_of(settings(objective, *more))
    engine.begin_alignment()
    return engine, data_of(engine)


def same(a: dict, b: dict) -> None:
    assert set(a) == set(b)
    for name, array in a.items():
        np.testing.assert_array_equal(array, b[name], err_msg=name)


@ALL
@pytest.mark.parametrize("loop", [(), (*LOOP, "base.batch=48")])
def test_graphs_do_what_calls_do(objective, loop, monkeypatch):
    """Steps, the old policy's pictures and the policy's, captured and not, bit for bit; on BF16 and in the
    closed loop.
    """
    runs = []
    for captured in (True, False):
        if not captured:
            monkeypatch.setattr(graph, "_Captured", graph._Eager)
        engine, base = engine_of(settings(objective, *loop))
        results = [engine.base_step(base, step, 1e-3) for step in range(4)]
        engine.begin_alignment()
        if engine.loop is not None:
            engine.model.routes = engine.loop.routes()
        for number in range(2):
            results += _taught(engine, data_of(engine, 10 * number))
        drawn = engine.draw(range(5), ["angry face"] * 5, 3, "fp4"), engine.collect([1], ["red heart"], 4)
        assert all(r.finite for r in results) and all(np.isfinite(x).all() for x in drawn)
        runs.append((results, engine.state(), drawn))
    (a, one, drawn), (b, two, again) = runs
    assert a == b
    same(one, two)
    for x, y in zip(drawn, again, strict=True):
        np.testing.assert_array_equal(x, y)
    assert any(name.startswith("lora.") for name in one)
    if objective == "dpo":
        assert results[4].loss == pytest.approx(np.log(2), rel=1e-14)  # a mean of equal terms


@ALL
def test_taken_back_and_restored(objective):
    engine, data = aligning(objective)
    _taught(engine, data)
    before, updates, snapshot = engine.state(), engine.updates, engine.snapshot()
    drawn = engine.draw([5], ["angry face"], 3, "fp4")
    first = _taught(engine, data)
    after, later = engine.state(), engine.updates
    engine.take_back(snapshot)
    same(engine.state(), before)
    np.testing.assert_array_equal(engine.draw([5], ["angry face"], 3, "fp4"), drawn)
    assert _taught(engine, data) == first
    other, _ = aligning(objective)
    other.restore(before, updates, aligning=True)
    assert _taught(other, data) == first and other.updates == later
    same(other.state(), after)


def test_old_policy_and_policy_take_turns():
    engine, data = aligning("nft")
    seeds = list(range(3))
    start = engine.draw(seeds, CAPTIONS[:1] * 3, 4)
    engine.begin(data)
    engine.policy_step(data, slice(0, 5), 1e-2)
    moved, held = engine.draw(seeds, CAPTIONS[:1] * 3, 4), engine.state()
    np.testing.assert_array_equal(engine.collect(seeds, CAPTIONS[:1] * 3, 4), start)
    np.testing.assert_array_equal(engine.draw(seeds, CAPTIONS[:1] * 3, 4), moved)
    same(engine.state(), held)
    assert not np.array_equal(moved, start)


@ALL
def test_memory(objective):
    """Less than with all weights trained, by what is not kept; and no more after many steps."""
    held = {}
    for parameters in ("lora", "full"):
        engine, data = aligning(objective, f"align.parameters={parameters}")
        _taught(engine, data)
        before = engine.memory()["gpu_mb"]
        for _ in range(5):
            _taught(engine, data)
        assert engine.memory()["gpu_mb"] <= before + 0.5
        held[parameters] = engine.inventory()
        trained, nft = engine.parameters.layout.size, objective == "nft"
        taken = sum(a.nbytes for a in engine.snapshot().arrays.values())
        assert taken == 4 * (3 + nft) * trained and held[parameters]["moments"] == 8 * trained
        assert not nft or held[parameters]["old policy"] >= 4 * trained
        assert held[parameters]["average"] >= 4 * engine.size
    assert held["lora"]["network"] == held["full"]["network"]
    assert held["lora"]["average"] < 0.6 * held["full"]["average"]
    assert sum(held["lora"].values()) < 0.75 * sum(held["full"].values())


def test_first_norm_beside_the_cpus():
    """The same checkpoint, the same data: loss and norm before any update, on both devices."""
    config = settings("nft", "align.beta=20", preset="ci")
    engine, base = engine_of(config)
    for step in range(3):
        engine.base_step(base, step, 1e-3)
    host, _ = engine_of(config, "cpu")
    host.restore(engine.state(), engine.updates, aligning=False)
    for one in (host, engine):
        one.begin_alignment()
    same(checkpoint.take(engine.state(), "lora"), checkpoint.take(host.state(), "lora"))
    data = data_of(host)
    a, b = (_taught(one, data) for one in (host, engine))
    assert b[0].loss == pytest.approx(a[0].loss, rel=0.05, abs=2e-3)
    assert b[0].norm == pytest.approx(a[0].norm, rel=0.03)
    host.restore(engine.state(), engine.updates, aligning=True)
    want, got = engine.draw([3], ["angry face"], 4), host.draw([3], ["angry face"], 4)
    assert np.linalg.norm(got - want) < 0.05 * np.linalg.norm(want)


def test_run_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    config, real = override(get_preset("ci"), ["align.parameters=lora", "lora.rank=4"]), Run.done
    train(config, tmp_path / "whole", said(), "cuda")

    def done(self, at, save=False):
        self.stop.asked = 2 if (self.stage, at) == ("align", 1) else 0
        real(self, at, save)

    for name, later in (("parted", "cuda"), ("moved", "cpu")):
        monkeypatch.setattr(Run, "done", done)
        with pytest.raises(Stopped):
            train(config, tmp_path / name, said(), "cuda")
        monkeypatch.setattr(Run, "done", real)
        assert train(config, tmp_path / name, said(), later)["pictures"] == 24
    whole, parted = ((tmp_path / n / "checkpoint.safetensors").read_bytes() for n in ("whole", "parted"))
    assert whole == parted
