"""The bench of rollouts: the FP16 network, the stress set (activations x 10^3), and the script's parts."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys

import numpy as np
import pytest

import fp4bf16 as fb
from fp4bf16.nn.tape import no_grad
from fp4bf16.nn.unet import UNet2D, UNetConfig

torch = pytest.importorskip("torch", reason="the extra 'peers' is not installed")

BENCH = pathlib.Path(__file__).resolve().parents[1] / "bench"


def load(name):
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fp16():
    before, path = torch.get_num_threads(), list(sys.path)
    yield load("fp16_unet")
    torch.set_num_threads(before)
    sys.path[:] = path


@pytest.fixture(scope="module")
def script(fp16):
    return load("rollouts")


def case(rng, **changes):
    """(network of ours, its input) with captions, norms and biases moved from 1 and 0."""
    config = UNetConfig.tiny(caption_vocabulary=5, block_out_channels=(16, 32), norm_num_groups=4, **changes)
    unet = UNet2D(config, seed=2)
    for p in unet.parameters():
        if p.ndim == 1:
            p.assign(p.data + 0.1 * rng.standard_normal(p.shape).astype(np.float32))
    x = rng.standard_normal((3, 8, 8, 12)).astype(np.float32)
    bags = (rng.random((3, 5)) < 0.5).astype(np.float32)
    bags[0] = 0
    return unet, x, rng.integers(0, 1000, 3), bags


def ours(unet, x, t, bags):
    with fb.tracks("reference"), no_grad():
        return unet(x, t, captions=bags).data


def sizes(network, x, t, bags):
    """Largest result of each layer by name."""
    found = {}
    for name, module in network.named_modules():
        module.register_forward_hook(
            lambda m, i, out, name=name: found.update({name: float(out.detach().abs().max())})
        )
    network.predict(x, t, bags)
    return found


ATTENTION = {"down_block_types": ("AttnDownBlock2D", "DownBlock2D"),
             "up_block_types": ("UpBlock2D", "AttnUpBlock2D")}  # fmt: skip


@pytest.mark.parametrize("changes", [{}, ATTENTION])
def test_the_network_is_ours_and_fp16_rounds_it(changes, fp16, rng):
    unet, x, t, bags = case(rng, **changes)
    want, state = ours(unet, x, t, bags), unet.state_dict()
    exact = fp16.Fp16UNet(unet.config, state, fp16=False).predict(x, t, bags)
    np.testing.assert_allclose(exact, want, atol=1e-4 * np.abs(want).max())
    half = fp16.Fp16UNet(unet.config, state)
    error = np.abs(half.predict(x, t, bags) - want).max() / np.abs(want).max()
    assert 1e-5 < error < 0.02  # 2^-11 a layer
    kinds = {type(m).__name__ for m in half.modules()}
    assert {"Fp16Conv2d", "Fp16Linear", "Fp32GroupNorm"} <= kinds and not kinds & {"Conv2d", "Linear"}


@pytest.mark.parametrize("changes", [{}, ATTENTION])
def test_the_stress_set_is_the_same_function_with_larger_numbers(changes, fp16, rng):
    unet, x, t, bags = case(rng, norm_eps=1e-9, **changes)
    want, state = ours(unet, x, t, bags), unet.state_dict()
    loud = fp16.louder(state, 1e3)
    before, after = (sizes(fp16.Fp16UNet(unet.config, s, fp16=False), x, t, bags) for s in (state, loud))
    convolutions = [n for n in before if "conv" in n and "norm" not in n and n != "conv_out"]
    assert len(convolutions) > 10 and before["conv_out"] == pytest.approx(after["conv_out"], rel=1e-3)
    for name in [*convolutions, *(n for n in before if "to_out.0" in n or "time_emb_proj" in n)]:
        assert after[name] == pytest.approx(1e3 * before[name], rel=1e-3), name
    assert fp16.largest(fp16.Fp16UNet(unet.config, loud, fp16=False), x, t, bags) == max(after.values())
    unet.load_state_dict(loud)
    np.testing.assert_allclose(ours(unet, x, t, bags), want, atol=1e-3 * np.abs(want).max())
    with no_grad(), fb.tracks("bf16"):  # what has the range of FP32 does not mind
        assert np.isfinite(unet(x, t, captions=bags).data).all()
    beyond = fp16.louder(state, 1e6)
    assert not np.isfinite(fp16.Fp16UNet(unet.config, beyond).predict(x, t, bags)).all()
    assert np.isfinite(fp16.Fp16UNet(unet.config, beyond, fp16=False).predict(x, t, bags)).all()


def test_loss_scaling_does_not_help_the_forward_pass(fp16, rng):
    unet, x, t, bags = case(rng)
    batches = [(x, t, bags, rng.standard_normal(x.shape).astype(np.float32))] * 4
    state = unet.state_dict()
    good = fp16.train_fp16(fp16.Fp16UNet(unet.config, state), batches, 1e-3)
    assert good["losses_not_finite"] == good["updates_left_out"] == 0
    assert good["last_loss"] < good["first_loss"] and good["last_scale"] == 2.0**16
    bad = fp16.train_fp16(fp16.Fp16UNet(unet.config, fp16.louder(state, 1e6)), batches, 1e-3)
    assert bad["losses_not_finite"] == bad["updates_left_out"] == 4
    assert bad["last_scale"] == 2.0**12  # halved every time, in vain


def test_an_infinite_prediction_is_not_clipped_to_a_pixel(script):
    def network(x):
        out = np.array(x)
        out[1, 0, 0, 0] = np.inf
        return out

    got = script.watched(network)(np.zeros((3, 2, 2, 1), np.float32))
    assert np.isnan(got[1]).all() and (got[[0, 2]] == 0).all()


def test_quick_run_is_written_and_taken_up(script, tmp_path, capsys, monkeypatch):
    out = tmp_path / "found" / "rollouts.json"
    weights = tmp_path / "weights.npz"
    arguments = [
        "--quick",
        "--out",
        str(out),
        "--weights",
        str(weights),
        "--parts",
        "success,scaling,fidelity",
    ]
    assert script.main(arguments) == 0
    found, printed = json.loads(out.read_text()), capsys.readouterr().out
    assert len(found["success"]) == 6 and sum("activations x 10^3" in name for name in found["success"]) == 3
    for name, arm in found["success"].items():
        assert arm["rollouts"] == 64 and arm["success_low"] <= arm["success_rate"] <= arm["success_high"]
        assert arm["retries"] == (2 if "fp4+bf16" in name else 0)
        assert arm["success_rate"] == 1 - arm["lost"] / 64 and name in printed
    assert found["success"]["ordinary data: bf16"]["success_rate"] == 1.0
    assert "activations x 10^3" in found["explained"]["success"]
    assert "activations x 10^3" in found["explained"]["dynamic loss scaling"]
    rows = found["fidelity"]["before alignment"]["style judge"]
    assert [r["spearman"] for r in rows if (r["track"], r["steps"]) == ("bf16", 10)] == [pytest.approx(1)]
    assert len(rows) == 10

    def never(*_):
        raise AssertionError("an arm was measured again")

    for name in ("success", "scaling", "fidelity"):
        monkeypatch.setattr(script, name, never)
    assert script.main(arguments) == 0  # everything is there
    with pytest.raises(AssertionError, match="measured again"):
        script.main([*arguments, "--again"])
    del found["success"]["ordinary data: fp16"]
    out.write_text(json.dumps(found))
    with pytest.raises(AssertionError, match="measured again"):
        script.main(arguments)
    with pytest.raises(SystemExit):
        script.main(["--parts", "sucess"])


def test_memory_is_that_of_a_chunk(script):
    """A process of its own explores pools of 400 and of 8000: 96 MB of pictures, of which it keeps none."""
    small, large = (script.memory_in_a_process(size) for size in (400, 8000))
    assert large["all_pictures_mb"] > 90
    assert large["peak_rss_mb"] - small["peak_rss_mb"] < 0.2 * large["all_pictures_mb"]
