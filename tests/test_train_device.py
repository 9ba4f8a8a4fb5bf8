"""The trainer's engine for a GPU, on the emulated library: it does what the CPU's engine does.

Activations are BF16 on the device and the CPU rounds only the operands of products, so that results agree to
a few parts in a hundred, not bit for bit; what both draw at random agrees exactly.
"""

from __future__ import annotations

import io
import json
import sys

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from bases import base_data  # noqa: E402
from host_cuda import Arrays, Fake, FakeArray, HostCuda, host_cuda, put  # noqa: E402, F401  (a fixture)
from test_resume import SETTINGS  # noqa: E402

from fp4bf16 import device  # noqa: E402
from fp4bf16.__main__ import main  # noqa: E402
from fp4bf16.backends import cuda, cuda_math  # noqa: E402
from fp4bf16.diffusion import SAMPLERS, coefficients, cosine, linear, normal  # noqa: E402
from fp4bf16.errors import CudaError, LibraryError, NonFiniteError, ShapeError  # noqa: E402
from fp4bf16.train import checkpoint, device_sampler, progress, task  # noqa: E402
from fp4bf16.train.cli import load_model  # noqa: E402
from fp4bf16.train.config import get_preset, override  # noqa: E402
from fp4bf16.train.data import Vocabulary, load_pairs  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.device import CudaEngine, CudaSampler  # noqa: E402
from fp4bf16.train.engine import BaseData, HostEngine  # noqa: E402
from fp4bf16.train.policy import PairData  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402
from fp4bf16.train.state import Stopped  # noqa: E402

#: A run that the emulation, which computes in NumPy, finishes in some seconds.
SHORT = [
    "base.steps=6",
    "base.batch=4",
    "base.checkpoint_every=4",
    "align.prompts=2",
    "align.timesteps=1",
    "eval.captions=4",
    "diffusion.chunk=4",
]


def tiny(*more: str):
    return override(get_preset("ci"), [*SETTINGS, *SHORT, *more])


def emulate(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(cuda_math._KNOWN, "fake", Arrays())
    where = device.operand(put(np.zeros(1, np.float32)), "device")
    patch.setattr(device_sampler, "place", lambda: where)


@pytest.fixture
def gpu(host_cuda, monkeypatch):  # noqa: F811
    """The emulated library in place of a GPU."""
    emulate(monkeypatch)
    return host_cuda


def pair_of_engines(config):
    """(CPU, device, data) on the same weights."""
    pairs = load_pairs(config.size).select(role="policy", word=config.word or None)
    models = [Denoiser(config, Vocabulary.of(pairs.captions)) for _ in range(2)]
    data = base_data(pairs, models[0], lambda purpose: len(purpose))
    return HostEngine(models[0], config), CudaEngine(models[1], config), data


def near(a, b, tolerance: float, name: str = "") -> None:
    assert a.shape == b.shape
    error = np.linalg.norm(a - b)
    assert error <= tolerance * np.linalg.norm(b) + 1e-6, (name, error, np.linalg.norm(b))


def said() -> progress.Progress:
    return progress.Progress(io.StringIO())


# ---- steps
def test_base_step_is_the_cpus(gpu, rng):
    config = tiny(f"seed={rng.integers(1 << 30)}", "base.weight_decay=0.05", "base.drop_caption=0.4")
    host, ours, data = pair_of_engines(config)
    before = {name: a.copy() for name, a in host.state().items()}
    # The device rounds activations to BF16, too. Of 12 seeds the worst were 4.4e-4 (loss), 3.2e-3 (norm), 0.1
    # (what moved), 0.015 and 0.009 (moments); the limits are three to five times that.
    for step in range(3):
        a, b = host.base_step(data, step, 1e-3), ours.base_step(data, step, 1e-3)
        assert b.loss == pytest.approx(a.loss, rel=2e-3) and b.norm == pytest.approx(a.norm, rel=0.015)
    assert host.updates == ours.updates == 3
    want, got = host.state(), ours.state()
    assert set(want) == set(got)
    # The step of Adam is about lr an element whatever the gradient's size, so where a gradient is next to
    # nothing its sign, and all of the step, may differ: most agree, and none is further off than 2 lr a step.
    for name in want:
        assert got[name].dtype == np.float32 and got[name].shape == want[name].shape
        if name.startswith("policy."):
            assert np.abs(got[name] - want[name]).max() <= 3 * 2.1e-3, name
    moved = np.concatenate([(want[n] - before[n]).ravel() for n in want if n.startswith("policy.")])
    device_moved = np.concatenate([(got[n] - before[n]).ravel() for n in want if n.startswith("policy.")])
    near(device_moved, moved, 0.3)
    for kind, tolerance in (("adam.first", 0.05), ("adam.second", 0.04)):
        a, b = (np.concatenate([s[n].ravel() for n in want if n.startswith(kind)]) for s in (got, want))
        near(a, b, tolerance, kind)


def test_one_wait_a_step(gpu):
    _, ours, data = pair_of_engines(tiny())
    ours.base_step(data, 0, 1e-3)
    for step in range(1, 4):
        before = gpu.fake.moved
        ours.base_step(data, step, 1e-3)
        assert gpu.fake.moved - before == 1


def test_network_without_captions_in_fp4(gpu):
    """What comparisons train: no captions, the route's tracks in the forward; near the BF16 track's step."""
    from types import SimpleNamespace

    from fp4bf16 import nn

    config, losses = tiny("base.batch=8"), {}
    for track in ("bf16", None):
        unet = nn.UNet2D(nn.UNetConfig.tiny(block_out_channels=(16, 32)), seed=3)
        unet.apply_route(config.route)
        model = SimpleNamespace(unet=unet, schedule=cosine(100), prediction="eps", shape=(8, 8, 12),
                                config=config)  # fmt: skip
        pictures = np.tanh(np.random.default_rng(1).standard_normal((5, 8, 8, 12))).astype(np.float32)
        data = BaseData(pictures, None, {"row": 1, "t": 2, "noise": 3, "drop": 4}, 100)
        engine = CudaEngine(model, config, track)
        losses[track] = [engine.base_step(data, step, 3e-3).loss for step in range(6)]
    assert losses[None] != losses["bf16"]
    np.testing.assert_allclose(losses[None], losses["bf16"], rtol=0.03)  # of 8 seeds the worst was 0.0096
    assert losses[None][-1] < losses[None][0]


def test_other_pictures_take_the_place_of_those_before(gpu, rng):
    """As many of them: the same graph goes on, and learns from the new ones; others in number: a new one."""
    host, ours, data = pair_of_engines(tiny())
    ours.base_step(data, 0, 1e-3)
    graph = ours._graphs[("base",)]
    for count in (len(data.pictures), 5):
        pictures = np.tanh(rng.standard_normal((count, *data.pictures.shape[1:]))).astype(np.float32)
        other = BaseData(pictures, data.captions[:count], data.seeds, data.levels)
        fresh = pair_of_engines(tiny())[1]
        fresh.restore(ours.state(), ours.updates, aligning=False)
        assert ours.base_step(other, 1, 1e-3) == fresh.base_step(other, 1, 1e-3)
        assert (ours._graphs[("base",)] is graph) == (count == len(data.pictures))


def test_gradient_that_is_not_finite_updates_nothing(gpu):
    _, ours, data = pair_of_engines(tiny())
    assert ours.base_step(data, 0, 1e-3).finite
    data.pictures[...] = np.inf
    broken = type(data)(data.pictures, data.captions, data.seeds, data.levels)
    before = ours.state()
    result = ours.base_step(broken, 1, 1e-3)
    assert not result.finite and ours.updates == 1
    for name, a in ours.state().items():
        np.testing.assert_array_equal(a, before[name])


def test_run_gives_up_after_ten_of_them(gpu, tmp_path, monkeypatch):
    real = task.EmojiTask.base

    def broken(self, run):
        feed = real(self, run)
        feed.data.pictures[...] = np.nan
        return feed

    monkeypatch.setattr(task.EmojiTask, "base", broken)
    with pytest.raises(NonFiniteError, match="10 updates in a row"):
        train(tiny("base.steps=12"), tmp_path / "run", said(), "cuda")


def comparisons(config, host, rng, total=5):
    shape, pairs = host.model.shape, 3
    chosen, rejected = (np.tanh(rng.standard_normal((pairs, *shape))).astype(np.float32) for _ in range(2))
    bags = (rng.random((pairs, len(host.model.vocabulary))) < 0.1).astype(np.float32)
    row, t = rng.integers(0, pairs, total), rng.integers(0, 1000, total)
    return PairData(chosen, rejected, bags, row, t, (7, 3))


@pytest.mark.parametrize("hold", [0, 3])
def test_dpo_step_is_the_cpus(gpu, rng, hold):
    # A small beta keeps the loss near its start, where it is smooth enough to compare over some steps.
    host, ours, data = pair_of_engines(tiny(f"align.hold={hold}", "align.beta=20"))
    for engine in (host, ours):
        engine.base_step(data, 0, 1e-3)
    ours.restore(host.state(), host.updates, aligning=False)
    pairs = comparisons(host.config, host, rng)
    for engine in (host, ours):
        engine.begin_alignment()
        engine.begin(pairs)
    for number, some in enumerate((slice(0, 4), slice(4, 5), slice(0, 4))):  # the second is a smaller batch
        a, b = host.policy_step(pairs, some, 1e-4), ours.policy_step(pairs, some, 1e-4)
        assert set(a.stats) == set(b.stats)
        if number == 0:  # policy and reference are the same network and run through the same kernels
            assert a.loss == b.loss == np.log(2)
            assert b.stats["drift"] == b.stats["kl"] == 0 and b.stats["rewards/accuracies"] == 0.5
        assert b.norm == pytest.approx(a.norm, rel=0.1)
        for name in [name for name in a.stats if name.startswith("errors/")]:
            assert b.stats[name] == pytest.approx(a.stats[name], rel=0.03), name
    average = checkpoint.take(ours.state(), "ema")
    for name, a in checkpoint.take(host.state(), "ema").items():
        np.testing.assert_array_equal(average[name], a)  # DPO leaves the reference as it is


# ---- sampling
@pytest.mark.parametrize("name", ["ddim", "ancestral"])
def test_pictures_are_the_cpus_and_the_same_in_any_batch(gpu, rng, name):
    config = tiny("diffusion.chunk=4", f"seed={rng.integers(1 << 30)}")
    pairs = load_pairs(16).select(role="policy", word="face")
    host, ours = (Denoiser(config, Vocabulary.of(pairs.captions)) for _ in range(2))
    seeds, captions = [5, 6, 7, 8, 9, 10], list(pairs.captions[:6])
    want = host.draw(seeds, captions, 3, sampler=name)
    sampler = CudaSampler(ours)

    def draw(*of, track="bf16"):
        return sampler.draw(*of, 3, track, name)

    got = draw(seeds, captions)
    assert got.shape == want.shape == (6, 16, 16, 3) and got.dtype == np.float32
    near(got, want, 0.03)
    np.testing.assert_array_equal(draw(seeds[3:4], captions[3:4]), got[3:4])
    fp4 = draw(seeds, captions, track="fp4")
    assert 0.005 < np.linalg.norm(fp4 - got) / np.linalg.norm(got) < 0.5  # another track, the same pictures
    np.testing.assert_array_equal(draw(seeds, captions), got)
    assert draw([], []).shape == (0, 16, 16, 3)


def test_sample_on_the_device(gpu, finished, tmp_path, capsys):
    one, many = tmp_path / "one.png", tmp_path / "many.png"
    for n, file in ((1, one), (5, many)):
        arguments = ["--run", str(finished[0]), "--caption", "angry face", "--n", str(n), "--steps", "2"]
        assert main(["sample", *arguments, "--device", "cuda", "--track", "fp4", "--out", str(file)]) == 0
    a, b = (np.asarray(Image.open(f)) for f in (one, many))
    np.testing.assert_array_equal(a, b[: a.shape[0], : a.shape[1]])
    assert "5 pictures of 'angry face'" in capsys.readouterr().out and gpu.calls["sampler_step"] == 6


@pytest.mark.parametrize("sampler", ["ddim", "euler", "ancestral"])
@pytest.mark.parametrize("schedule", [cosine(50), linear(50)])
@pytest.mark.parametrize("clip", [1.0, None])
def test_table_of_coefficients_is_the_sampler(sampler, schedule, clip, rng):
    """The formula of the sampler's kernel on the table gives what the samplers of the CPU give."""
    x = rng.standard_normal((2, 4, 4, 3)).astype(np.float32)

    def model(x, t, condition):
        return np.float32(0.5) * x + np.float32(0.1)

    def noise(t):
        return normal(3, t, x.shape)

    want = SAMPLERS[sampler](model, x, None, schedule, 7, clip=clip, noise=noise)
    timesteps, table = coefficients(sampler, schedule, 7, clip=clip)
    for t, (alpha, sigma, a, b, c, d, bound, _) in zip(timesteps, table, strict=True):
        v = model(x, t, None)
        x0, eps = alpha * x - sigma * v, sigma * x + alpha * v
        if bound:
            x0 = np.clip(x0, -bound, bound)
            eps = (x - alpha * x0) / sigma
        x = a * x0 + b * eps + c * x + (d * noise(int(t)) if d else 0)
    # float32 of other roundings, and 1 / sigma near the clean end
    np.testing.assert_allclose(x, want, rtol=0, atol=2e-5 * np.abs(want).max())


# ---- runs
@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run on the emulated GPU: (folder, summary)."""
    out = tmp_path_factory.mktemp("finished") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        library = HostCuda()
        library.fake = Fake()
        patch.setattr(cuda, "load", lambda: library)
        patch.setitem(device._FRAMEWORKS, "fake", library.fake)
        patch.setitem(device._KINDS, FakeArray, library.fake)
        emulate(patch)
        return out, train(tiny(), out, said(), "cuda")


def test_a_whole_run(finished):
    out, summary = finished
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if line["stage"] == "align"][0]["first_loss"] == np.log(2)
    assert summary["pictures"] == 4
    assert json.loads((out / "config.json").read_text())["device"].startswith("cuda")
    assert {p.name for p in (out / "samples").iterdir()} == {"base.png", "aligned.png", "pairs.png"}
    # The checkpoint is one of the CPU's: its weights draw the same pictures there, up to BF16.
    arrays, _ = checkpoint.load(out / "checkpoint.safetensors")
    model = load_model(out)
    from test_train import _evaluation_seeds

    from fp4bf16.train.pictures import from_bytes

    drawn = model.draw(*_evaluation_seeds(model), model.config.eval.steps)
    near(np.clip(drawn, -1, 1), from_bytes(arrays["result.aligned.pictures"]), 0.1)


@pytest.mark.parametrize("stage, step", [("base", 5), ("align", 1)])
def test_stopped_and_gone_on_with_gives_the_same_bytes(gpu, finished, tmp_path, monkeypatch, stage, step):
    from fp4bf16.train.state import Run

    whole, out = finished[0], tmp_path / "parted"
    real = Run.done

    def done(self, at, save=False):
        if (self.stage, at) == (stage, step):
            self.stop.asked = 2
        real(self, at, save)

    monkeypatch.setattr(Run, "done", done)
    with pytest.raises(Stopped):
        train(tiny(), out, said(), "cuda")
    monkeypatch.setattr(Run, "done", real)
    train(tiny(), out, said(), "cuda")
    assert (out / "checkpoint.safetensors").read_bytes() == (whole / "checkpoint.safetensors").read_bytes()


@pytest.mark.parametrize("forward", ["bf16", "router"])
def test_a_run_of_before_there_were_phases_goes_on_without(gpu, tmp_path, monkeypatch, forward):
    """Its checkpoint does not say: the same bits as a run that has never had phases, not those with them."""
    from fp4bf16.nn.layers import UpsampledConv2d
    from fp4bf16.train.state import Run

    real, config = Run.done, tiny(f"loop.forward={forward}", "loop.every=2")

    def until(step, out, phases):
        def done(self, at, save=False):
            self.stop.asked = 2 * (at == step)
            real(self, at, save)

        with monkeypatch.context() as patch, pytest.raises(Stopped):
            patch.setattr(Run, "done", done)
            patch.setattr(UpsampledConv2d, "phases", phases)
            train(config, tmp_path / out, said(), "cuda")
        return checkpoint.load_run(tmp_path / out / "checkpoint.safetensors")

    want, _ = until(5, "without", False)
    with_phases, meta = until(5, "with", True)
    assert meta["phases"] is True
    arrays, meta = until(3, "parted", False)
    assert meta.pop("format") and meta.pop("phases") is False
    checkpoint.save(tmp_path / "parted" / "checkpoint.safetensors", arrays, meta)
    got, meta = until(5, "parted", True)
    assert meta["phases"] is False and meta["step"] == 5 and set(got) == set(want)
    assert all(np.array_equal(got[name], want[name]) for name in want)
    assert any(not np.array_equal(with_phases[name], want[name]) for name in want)


def test_other_device_goes_on_and_says_so(gpu, tmp_path, monkeypatch):
    from fp4bf16.train.state import Run

    out, real = tmp_path / "run", Run.done

    def done(self, at, save=False):
        self.stop.asked = 2 if (self.stage, at) == ("base", 5) else 0
        real(self, at, save)

    monkeypatch.setattr(Run, "done", done)
    with pytest.raises(Stopped):
        train(tiny(), out, said(), "cuda")
    monkeypatch.setattr(Run, "done", real)
    log = io.StringIO()
    summary = train(tiny(), out, progress.Progress(log))
    assert "the run began on cuda" in log.getvalue()
    assert "goes on on cpu: the result will not be bit-identical" in log.getvalue()
    assert summary["pictures"] == 4


def test_state_that_does_not_fit_changes_nothing(gpu):
    host, ours, _ = pair_of_engines(tiny())
    state, before = host.state(), ours.state()
    state["ema.conv_in.bias"] = np.zeros(3, np.float32)
    state["policy.conv_in.bias"] = state["policy.conv_in.bias"] + 1
    with pytest.raises(ShapeError, match="conv_in.bias has shape"):
        ours.restore(state, 1, aligning=False)
    for name, a in ours.state().items():
        np.testing.assert_array_equal(a, before[name])


# ---- what is said
def refused(capsys, *arguments: str) -> str:
    assert main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and err.count("\n") == 1
    return err


def test_no_cupy(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "cupy", None)
    sentence = refused(capsys, "train", "--preset", "ci", "--device", "cuda", "--out", str(tmp_path / "run"))
    assert "needs the package cupy" in sentence and "pip install 'fp4bf16[cuda]'" in sentence
    assert not (tmp_path / "run").exists()


def test_no_library_and_no_gpu(host_cuda, monkeypatch, capsys, tmp_path):  # noqa: F811
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=()))
    arguments = ["train", "--preset", "ci", "--device", "cuda", "--out", str(tmp_path / "run")]

    def raises(error):
        def function():
            raise error

        return function

    monkeypatch.setattr(host_cuda, "device_count", lambda: 0)
    assert "the driver has no GPU; leave out --device" in refused(capsys, *arguments)
    monkeypatch.setattr(host_cuda, "device_count", raises(CudaError("no CUDA driver was found")))
    assert "no CUDA driver was found" in refused(capsys, *arguments)
    monkeypatch.setattr(cuda, "load", raises(LibraryError("no libfp4bf16.so; install nvcc")))
    assert "install nvcc" in refused(capsys, *arguments)
    assert not (tmp_path / "run").exists()


def test_unknown_device(capsys, tmp_path):
    arguments = ["--device", "cuda:0", "--out", str(tmp_path / "x")]
    assert "did you mean 'cuda'" in refused(capsys, "train", *arguments)
    assert "--device tpu" in refused(
        capsys, "sample", "--device", "tpu", "--run", str(tmp_path), "--out", str(tmp_path / "x.png")
    )


def test_network_that_the_gpu_does_not_take(gpu, capsys, tmp_path):
    said = refused(capsys, "train", "--preset", "ci", "--device", "cuda", "--out", str(tmp_path / "run"),
                   "--set", "model.block_out_channels=[12,24]")  # fmt: skip
    assert "multiples of 8" in said and not (tmp_path / "run").exists()
