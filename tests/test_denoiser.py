"""The model of a run: a picture that diverges spoils itself alone."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")

from fp4bf16.diffusion import normal  # noqa: E402
from fp4bf16.tracks import tracks  # noqa: E402
from fp4bf16.train.config import get_preset, override  # noqa: E402
from fp4bf16.train.data import Vocabulary, load_pairs  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402


@pytest.fixture
def model():
    captions = load_pairs(16).select(role="policy", word="face").captions
    config = override(get_preset("ci"), ["model.block_out_channels=[16,32]", "diffusion.chunk=6"])
    made = Denoiser(config, Vocabulary.of(captions))
    made.unet.flat.data += np.float32(0.05) * normal(0, 99, made.unet.flat.data.size)
    made.unet.flat.touch()
    return made


@pytest.mark.parametrize("track", ["bf16", "fp4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_a_picture_that_is_not_finite_leaves_the_others_alone(model, rng, track, bad):
    """1e38 is finite where it enters, and overflows inside."""
    x = rng.standard_normal((6, *model.shape)).astype(np.float32)
    t, captions = np.full(6, 500), np.zeros((6, len(model.vocabulary)), np.float32)
    with tracks(None if track == "fp4" else track):
        want = model.evaluate(x, t, captions)
        broken = x.copy()
        rows = rng.permutation(6)[:2]
        broken[rows, 0, 0] = bad
        with np.errstate(all="ignore"):
            got = model.evaluate(broken, t, captions)
            nothing = model.evaluate(np.full_like(x, bad), t, captions)
    others = np.setdiff1d(np.arange(6), rows)
    np.testing.assert_array_equal(got[others], want[others])
    assert np.isfinite(want).all()
    if not np.isfinite(bad):
        assert np.isnan(got[rows]).all() and np.isnan(nothing).all()
    assert (np.isnan(got).all((1, 2, 3)) | np.isfinite(got).all((1, 2, 3))).all()


def test_weights_that_overflow_give_no_picture(model):
    model.unet.conv_in.weight.data[:] = np.float32(3e38)
    model.unet.flat.touch()
    captions = ["face"] * 3
    with np.errstate(all="ignore"):
        for track in ("bf16", "fp4"):
            assert np.isnan(model.draw([1, 2, 3], captions, 2, track)).all()
