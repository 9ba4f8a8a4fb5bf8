"""Adapters of a network on the emulated GPU in a run: taken back, restored on either device, stopped and gone
on with, with an old policy, in the closed loop.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from host_cuda import host_cuda  # noqa: E402, F401  (a fixture)
from parting import same_bytes_when_parted  # noqa: E402
from test_loop_device import ROUTER, engine_of, same, steps  # noqa: E402
from test_lora_device import ALL, FLOAT32, aligning, kind, settings  # noqa: E402
from test_train_device import gpu, pair_of_engines, said, tiny  # noqa: E402, F401  (a fixture)
from test_train_device_policy import rollout_of, taught  # noqa: E402

from fp4bf16.train import checkpoint  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.device import CudaEngine  # noqa: E402
from fp4bf16.train.policy import make_data  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402

SOME = pytest.mark.parametrize("objective", ["dpo", "nft"])  # without an old policy, and with one


@ALL
def test_restored_on_either_device(gpu, objective):  # noqa: F811
    """Bit for bit on the same; a checkpoint of one is one of the other, with the same old policy and base."""
    host, whole = aligning(objective)
    again = CudaEngine(Denoiser(whole.config, whole.model.vocabulary), whole.config)
    taught(whole)
    saved, updates = whole.state(), whole.updates
    taught(whole, 1)
    again.restore(saved, updates, aligning=True)
    same(again.state(), saved)
    taught(again, 1)
    same(again.state(), whole.state())
    assert again.updates == whole.updates > updates > 0
    host.restore(saved, updates, aligning=True)
    for name, a in host.state().items():  # its own merge of the same adapters: one rounding apart
        limit = 2 * FLOAT32 * np.abs(a).max() if name.startswith("policy.") else 0
        assert np.abs(a - saved[name]).max() <= limit, name
    taught(host, 1)
    again.restore(host.state(), host.updates, aligning=True)
    same({n: a for n, a in again.state().items() if not n.startswith("policy.")},
         {n: a for n, a in host.state().items() if not n.startswith("policy.")})  # fmt: skip


@SOME
def test_taken_back_is_as_before(gpu, objective):  # noqa: F811
    _, ours = aligning(objective)
    taught(ours)
    before, updates, snapshot = ours.state(), ours.updates, ours.snapshot()
    drawn = ours.draw([5], ["angry face"], 2, "fp4")
    data = make_data(ours.config, ours, len, rollout_of(ours), 300)
    first = taught(ours, 300, data=data)
    assert any(not np.array_equal(a, before[name]) for name, a in ours.state().items())
    ours.take_back(snapshot)
    same(ours.state(), before)
    assert ours.updates == updates
    np.testing.assert_array_equal(ours.draw([5], ["angry face"], 2, "fp4"), drawn)
    assert taught(ours, 300, data=data) == first
    assert sum(a.nbytes for a in snapshot.arrays.values()) < ours.network.data.nbytes


def test_old_policy_draws_what_is_collected(gpu):  # noqa: F811
    """With its own adapters in the same weights and graphs; the policy has its own again afterwards."""
    _, ours = aligning("nft")
    seeds, captions = [1, 2], ["angry face"] * 2
    start = ours.draw(seeds, captions, 3)
    data = make_data(ours.config, ours, len, rollout_of(ours), 0)
    ours.begin(data)
    ours.policy_step(data, slice(0, 4), 1e-2)
    moved, held = ours.draw(seeds, captions, 3), ours.state()
    graphs = {key for key in ours._graphs if key[0] == "sample"}
    np.testing.assert_array_equal(ours.collect(seeds, captions, 3), start)
    same(ours.state(), held)
    np.testing.assert_array_equal(ours.draw(seeds, captions, 3), moved)
    assert not np.array_equal(moved, start)
    assert {key for key in ours._graphs if key[0] == "sample"} == graphs
    ours.end_iteration(0)  # the old one becomes the new one
    np.testing.assert_array_equal(ours.collect(seeds, captions, 3), moved)


def test_base_training_is_as_without_adapters(gpu):  # noqa: F811
    """Before alignment, and taken up again after it."""
    config = settings("nft")
    _, ours, data = pair_of_engines(config)
    _, plain, _ = pair_of_engines(tiny())
    assert ours.base_step(data, 0, 1e-3) == plain.base_step(data, 0, 1e-3)
    saved = ours.state()
    same(saved, plain.state())
    assert {name.split(".")[0] for name in saved} == {"policy", "ema", "adam"}
    want = plain.base_step(data, 1, 1e-3)
    ours.begin_alignment()
    taught(ours)
    ours.restore(saved, 1, aligning=False)
    assert ours.lora is None and ours.old is None
    assert ours.base_step(data, 1, 1e-3) == want
    same(ours.state(), plain.state())


def test_run_stops_and_goes_on_to_the_same_bytes(gpu, tmp_path, monkeypatch):  # noqa: F811
    more = "align.parameters=lora", "lora.rank=2", "base.steps=2", "align.iterations=2"
    config = tiny(*more)
    train(config, tmp_path / "whole", said(), "cuda")
    same_bytes_when_parted(config, tmp_path, ("align", 1), monkeypatch, said)
    arrays, _ = checkpoint.load(tmp_path / "whole" / "checkpoint.safetensors")
    adapters = kind(arrays, "lora")
    assert np.isfinite(adapters).all() and 0 < adapters.size < kind(arrays, "ema").size / 4


# ---- the closed loop ---------------------------------------------------------------------------------------
@SOME
def test_closed_loop(gpu, objective):  # noqa: F811
    """Policy, reference and old policy run on one route; gradients are those of adapters, as on the CPU, and
    steps move them alone.
    """
    config = settings(objective, *ROUTER)
    ours, data = engine_of(config)
    steps(ours, data, 0, 2)
    ours.begin_alignment()
    assert ours.loop.router.fp4_share(ours.loop.number) > 0
    made = make_data(config, ours, len, rollout_of(ours), 0)
    base = ours.average.to_host()
    for result in taught(ours, lr=0.0, data=made):
        assert result.finite and result.norm > 0 and result.stats["drift"] == 0
        if objective == "dpo":
            assert result.loss == math.log(2) and result.stats["kl"] == 0
    snapshot, before = ours.snapshot(), ours.state()
    moved = taught(ours, 1, 1e-3, made)
    assert all(r.finite for r in moved) and ours.loop.line()["fp4_share"] > 0
    same(ours.average.to_host(), base)
    found = ours.gradients()
    assert set(found) == {f"{n}.weight" for n in ours.lora.adapted} & set(ours.loop.router.layers)
    assert any(not np.array_equal(a, before[name]) for name, a in ours.state().items())
    ours.take_back(snapshot)
    same(ours.state(), before)
