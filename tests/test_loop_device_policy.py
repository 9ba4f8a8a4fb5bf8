"""Policy training in the closed loop on the emulated GPU, and a run as a whole with it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from host_cuda import host_cuda  # noqa: E402, F401  (a fixture)
from parting import same_bytes_when_parted  # noqa: E402
from test_loop_device import FP4, LAYER, ROUTER, engine_of, same, steps  # noqa: E402
from test_train_device import gpu, said, tiny  # noqa: E402, F401  (a fixture)
from test_train_device_policy import rollout_of, taught  # noqa: E402

from fp4bf16.train.policy import make_data  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402


# ---- objectives ---------------------------------------------------------------------------------------
def _aligning(objective: str, *more: str):
    ours, data = engine_of(tiny(
        f"align.objective={objective}", "align.steps=3", "align.explore_steps=3", "align.batch=5",
        "align.timestep_fraction=1", *more,
    ))  # fmt: skip
    steps(ours, data, 0, 2)
    ours.begin_alignment()
    return ours


@pytest.mark.parametrize("objective, loop", [("dpo", ROUTER), ("nft", FP4), ("ppo", ROUTER)])
def test_objectives_begin_where_they_must(gpu, objective, loop):  # noqa: F811
    """Policy, reference and old policy run on one route: the first loss is ln 2, the first ratio 1, while the
    route is one that differs from BF16; and so after a layer has been held, and on sampled steps.
    """
    ours = _aligning(objective, *loop)
    assert ours.loop.router.fp4_share(ours.loop.number) > 0
    made = make_data(ours.config, ours, len, rollout_of(ours), 0)
    ours.loop.constraint.punish(ours.loop.number, {LAYER: "a test"})
    results = taught(ours, lr=0.0, data=made)
    assert all(r.finite and r.norm > 0 for r in results)
    for result in results:
        assert result.stats["drift"] == 0
        if objective == "dpo":
            assert result.loss == math.log(2) and result.stats["kl"] == 0
        if objective == "ppo":
            assert result.stats["ratio"] == 1.0 and result.stats["ratio_spread"] == 0
    assert ours.loop.number == 2 + len(results) and ours.loop._frozen is None
    moved = taught(ours, 1, 1e-3, make_data(ours.config, ours, len, rollout_of(ours), 1))
    assert all(r.finite for r in moved) and ours.loop.line()["fp4_share"] > 0
    snapshot, before = ours.snapshot(), ours.state()
    taught(ours, 2)
    ours.take_back(snapshot)
    same(ours.state(), before)


def test_micro_batches_have_the_gradient_of_their_entries(gpu):  # noqa: F811
    """That of a slice is what a batch of these entries has."""
    ours = _aligning("dpo", *ROUTER)
    made = make_data(ours.config, ours, len, rollout_of(ours, keep=4), 0)
    ours.begin(made)
    part, slow = slice(1, 3), ours.loop.slow_route()
    with ours.loop.step():
        found = ours._gradient(lambda some: ours._dpo(made, some), part, slow)
    alone = type(made)(made.chosen, made.rejected, made.captions, made.row[part], made.t[part], made.noise)
    eps = np.array(ours._buffers("dpo")[2].owner.array[part])
    ours.begin(alone)
    ours._buffers("dpo")[2].owner.array[: part.stop - part.start] = eps
    with ours.loop.step():
        again = ours._gradient(lambda some: ours._dpo(alone, some), slice(0, 2), slow)
    same(found, again)
    assert any(g.any() for g in found.values()) and set(found) <= set(ours.loop.router.layers)


# ---- a run -------------------------------------------------------------------------------------------------
def test_stopped_and_gone_on_with_gives_the_same_bytes(gpu, tmp_path, monkeypatch):  # noqa: F811
    config = tiny(*ROUTER, "base.batch=4", "align.prompts=1")
    train(config, tmp_path / "whole", said(), "cuda")
    lines = [json.loads(t) for t in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [line["loop"] for line in lines if line["stage"] == "base"]
    assert len(steps) == config.base.steps and steps[-1]["fp4_share"] > 0.3
    assert [line["first_loss"] for line in lines if line["stage"] == "align"][0] == math.log(2)
    assert any(line.get("event") == "decision" for line in lines if line["stage"] == "router")
    same_bytes_when_parted(config, tmp_path, ("base", 5), monkeypatch, said)
