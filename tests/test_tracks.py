"""Which track a call is on: every cell of the table, blocks, the environment, routes."""

from __future__ import annotations

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.errors import ConfigError
from fp4bf16.tracks import TRACKS, resolve_track


@pytest.fixture
def operands(rng):
    a, b = rng.standard_normal((5, 64)).astype(np.float32), rng.standard_normal((64, 7)).astype(np.float32)
    return a, {"plain": b, "quantized": fb.quantize(b, axis=-2), "dual": fb.DualWeight(b, rank=4)}


#: (kind of b, track) -> (a as it is multiplied, b as it is multiplied): "bf16" rounded, "fp4" quantised and
#: decoded; "dual" is told apart by its own tests.
TABLE = {
    ("plain", None): ("bf16", "bf16"), ("plain", "bf16"): ("bf16", "bf16"), ("plain", "fp4"): ("fp4", "fp4"),
    ("quantized", None): ("fp4", "fp4"), ("quantized", "bf16"): ("bf16", "fp4"),
    ("quantized", "fp4"): ("fp4", "fp4"), ("dual", "bf16"): ("bf16", "bf16"),
    ("dual", "fp4"): ("fp4", "twin"),
}  # fmt: skip


@pytest.mark.parametrize("kind, track", TABLE)
def test_cells_of_the_table(operands, kind, track):
    a, b = operands
    how_a, how_b = TABLE[kind, track]
    left = a.astype(fb.interop.BFLOAT16) if how_a == "bf16" else np.asarray(fb.quantize(a, search="fast"))
    rights = {"bf16": b["plain"].astype(fb.interop.BFLOAT16), "fp4": b["quantized"], "twin": b["dual"].twin}
    want = np.asarray(left, np.float64) @ np.asarray(rights[how_b], np.float64)
    np.testing.assert_allclose(fb.matmul(a, b[kind], track=track), want, rtol=0, atol=1e-5)


def test_dual_cells(operands):
    a, b = operands
    w = b["dual"]
    rounded = a.astype(fb.interop.BFLOAT16).astype(np.float32)
    hidden = (rounded @ np.float32(w.down)).astype(fb.interop.BFLOAT16)
    bulk = np.asarray(fb.quantize(a, search="fast"), np.float64) @ np.asarray(w.twin, np.float64)
    want = bulk + np.float64(hidden) @ np.float64(w.up)
    for track in (None, "dual"):
        assert np.linalg.norm(fb.matmul(a, w, track=track) - want) < 1e-3 * np.linalg.norm(want)
    for kind in ("plain", "quantized"):
        with pytest.raises(TypeError, match="make it a fp4bf16.DualWeight"):
            fb.matmul(a, b[kind], track="dual")


def test_a_block_goes_before_the_environment_and_both_before_the_argument(monkeypatch):
    assert resolve_track(None, "bf16") == "bf16" and resolve_track("fp4", "bf16") == "fp4"
    monkeypatch.setenv("FP4BF16_TRACK", "dual")
    assert resolve_track("fp4", "bf16") == "dual"
    with fb.tracks("bf16"):
        assert resolve_track("fp4", "fp4") == "bf16"
        with fb.tracks(None):
            assert resolve_track("fp4", "fp4") == "dual"
        assert resolve_track("fp4", "fp4") == "bf16"
    monkeypatch.setenv("FP4BF16_TRACK", "")
    assert resolve_track("fp4", "bf16") == "fp4"
    monkeypatch.setenv("FP4BF16_TRACK", "fp5")
    with pytest.raises(ConfigError, match="FP4BF16_TRACK: 'fp5' is not a track; did you mean 'fp4'"):
        resolve_track(None, "bf16")
    with pytest.raises(ValueError, match="track: 'bf15' is not a track; did you mean 'bf16'"):
        with fb.tracks("bf15"):
            pass


def test_a_block_ends_with_an_exception():
    with pytest.raises(KeyError):
        with fb.tracks("fp4"):
            raise KeyError
    assert resolve_track(None, "bf16") == "bf16"


def test_every_primitive_listens(rng):
    x, w = rng.standard_normal((1, 4, 4, 16)).astype(np.float32), rng.standard_normal((4, 3, 3, 16))
    calls = {
        "matmul": lambda **k: fb.matmul(x[0, 0], x[0, 0].T, **k),
        "linear": lambda **k: fb.linear(x[0, 0], x[0, 1], **k),
        "conv2d": lambda **k: fb.conv2d(x, w.astype(np.float32), padding=1, **k),
        "attention": lambda **k: fb.attention(x, x, x, **k),
    }
    for name, call in calls.items():
        want = call(track="fp4")
        assert not np.array_equal(call(), want), name
        with fb.tracks("fp4"):
            np.testing.assert_array_equal(call(track="bf16"), want, err_msg=name)


def test_route():
    route = {"conv_in*": "bf16", "*.attn?.*": "dual", "*": "fp4"}
    names = {"conv_in.weight": "bf16", "mid.attn1.to_q": "dual", "down.0.conv": "fp4"}
    assert {n: fb.match_route(route, n) for n in names} == names
    assert fb.match_route({"*": "fp4", "conv_in*": "bf16"}, "conv_in.weight") == "fp4"  # the first that fits
    assert fb.match_route({}, "x") == fb.match_route(None, "x") == "bf16"
    assert fb.match_route({"CONV*": "fp4"}, "conv", default="reference") == "reference"
    with pytest.raises(ValueError, match=r"route: '\*': 'fp3' is not a track"):
        fb.match_route({"*": "fp3"}, "x")
    assert TRACKS[:3] == ("fp4", "bf16", "dual")
