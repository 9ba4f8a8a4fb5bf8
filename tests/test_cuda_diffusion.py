"""Noise, losses and sampler steps on a GPU, and the same tests of their emulation without one.

What has no sum must have the bits of `fp4bf16.diffusion` on the CPU.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from host_cuda import HostCuda, host_cuda, put  # noqa: F401  (host_cuda is a fixture)
from host_elementwise import Held, HostMemory

from fp4bf16 import ConfigError, ShapeError, device
from fp4bf16.align.dpo import dpo_loss
from fp4bf16.backends import cuda_diffusion as wrapped
from fp4bf16.diffusion import coefficients, cosine, linear, losses, samplers
from fp4bf16.diffusion.noise import normal
from fp4bf16.python_ref import random as reference

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
KINDS = wrapped.PREDICTIONS


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def place(request):
    """(library, memory): the kernels on a GPU, or their emulation."""
    if request.param == "emulated":
        yield HostCuda(), HostMemory()
        return
    memory = request.getfixturevalue("gpu")
    yield request.getfixturevalue("library"), memory
    memory.free()


def draw(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


# ---- noise
DRAWS = [(1, 1, 0), (3, 7, 0), (2, 3072, 0), (5, 1025, 1), (2, 8, 2), (0, 4, 0), (3, 0, 0)]


@pytest.mark.parametrize("n, count, front", DRAWS)
def test_normal(place, rng, n, count, front):
    library, memory = place
    seeds = rng.integers(0, 2**64, n, np.uint64)
    seeds[:2] = [0, 2**64 - 1][:n]
    for step, word in ((0, 1), (7, 1), (2**32 - 1, 5)):
        out = Held(memory, front=front, shape=(n, count), dtype=F32)
        step_at = memory.put(np.uint32([step]))
        library.call("normal", memory.put(seeds), n, count, word, step_at, out.address, 0)
        found = out.get()
        assert found.tobytes() == normal(seeds, step, (count,), stream=word).tobytes()
        for row in range(min(n, 2)):
            want = reference.normal(int(seeds[row]), word, step, count)
            assert found[row].tobytes() == want.tobytes()


@pytest.mark.gpu
def test_a_batch_of_normals(library, gpu, rng):
    seeds = rng.integers(0, 2**64, 1024, np.uint64)
    out = gpu.empty(1024 * 3072 * 4)
    library.call("normal", gpu.put(seeds), 1024, 3072, 1, gpu.put(np.uint32([3])), out, 0)
    assert gpu.get(out, (1024, 3072), F32).tobytes() == normal(seeds, 3, (3072,)).tobytes()
    gpu.free()


@pytest.mark.gpu
def test_a_captured_graph_draws_anew(library, gpu, rng):
    rt, seeds = gpu.rt, rng.integers(0, 2**64, 2, np.uint64)
    seeds_at, step_at, out = gpu.put(seeds), gpu.put(np.uint32([0])), gpu.empty(2 * 12 * 4)
    stream = gpu.check(rt.cudaStreamCreateWithFlags(rt.cudaStreamNonBlocking))
    gpu.check(rt.cudaStreamBeginCapture(stream, rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
    library.call("normal", seeds_at, 2, 12, 1, step_at, out, int(stream))
    run = gpu.check(rt.cudaGraphInstantiate(gpu.check(rt.cudaStreamEndCapture(stream)), 0))
    for step in (4, 5):
        held = np.uint32([step])
        kind = rt.cudaMemcpyKind.cudaMemcpyHostToDevice
        gpu.check(rt.cudaMemcpy(step_at, held.ctypes.data, 4, kind))
        gpu.check(rt.cudaGraphLaunch(run, stream))
        gpu.check(rt.cudaStreamSynchronize(stream))
        assert gpu.get(out, (2, 12), F32).tobytes() == normal(seeds, step, (12,)).tobytes()
    gpu.check(rt.cudaGraphExecDestroy(run))
    gpu.check(rt.cudaStreamDestroy(stream))
    gpu.free()


# ---- noisy pictures
@pytest.mark.parametrize("prediction", KINDS)
@pytest.mark.parametrize("n, count, front", DRAWS)
def test_add_noise(place, rng, prediction, n, count, front):
    library, memory = place
    schedule, steps = cosine(50), 50
    pictures, eps = draw(rng, 9, count), draw(rng, n, count)
    t, index = rng.integers(0, steps, n), rng.integers(0, 9, n)
    held = [Held(memory, array, front=front) for array in (pictures, eps)]
    alpha_bar = memory.put(schedule.alpha_bar)

    def run(index, t, both=(True, True)):
        out = [Held(memory, front=front, shape=(n, count), dtype=F32) for _ in both]
        results = [o.address if wanted else 0 for o, wanted in zip(out, both, strict=True)]
        library.call("add_noise", held[0].address, 9, 0 if index is None else memory.put(index),
                     held[1].address, memory.put(t), alpha_bar, steps, n, count, KINDS[prediction], *results,
                     0)  # fmt: skip
        return [o.get() if wanted else None for o, wanted in zip(out, both, strict=True)]

    for rows in (index, None):
        x0 = pictures[np.arange(n) if rows is None else rows]
        want = schedule.add_noise(x0, eps, t), schedule.target(x0, eps, t, prediction)
        for both in ((True, True), (True, False), (False, True)):
            for found, wanted in zip(run(rows, t, both), want, strict=True):
                assert found is None or found.tobytes() == wanted.tobytes()
    for bad in (-1, steps, 2**62):  # its row is NaN, the others are what they were
        late = np.where(np.arange(n) == n - 1, bad, t)
        far = np.where(np.arange(n) == n - 1, bad, index)
        for found in (*run(index, late), *run(far, t)):
            assert np.isnan(found[n - 1 :]).all() and np.isfinite(found[: n - 1]).all()


# ---- losses
@pytest.mark.parametrize("n, count, front", [*DRAWS[:-1], (2, 49153, 0)])
def test_squared_error(place, rng, n, count, front):
    library, memory = place
    output, target = draw(rng, n, count), draw(rng, n, count) * np.float32(3)
    a, b = (Held(memory, array, front=front) for array in (output, target))
    errors = Held(memory, shape=(n,), dtype=F64)
    library.call("squared_error", a.address, b.address, n, count, errors.address, 0)
    found = errors.get()
    for i in range(n):
        d = (output[i] - target[i]).astype(np.float64)
        # positive terms: count / 256 additions a thread, 12 more over the threads, a division
        assert math.isclose(found[i], math.fsum(d * d) / count, rel_tol=(count / 256 + 20) * 2.0**-53)
    if n == 0:
        return
    want, slope = losses.picture_errors(output, target)
    np.testing.assert_allclose(found, want, rtol=1e-12)
    weight, (_, plain) = rng.standard_normal(n), losses.squared_error(output, target)
    weighted = slope * weight.astype(np.float32)[:, None]
    for w, expected in ((memory.put(weight), weighted), (0, plain)):
        gradient = Held(memory, front=front, shape=(n, count), dtype=F32)
        library.call("squared_error_backward", a.address, b.address, w, n, count, gradient.address, 0)
        assert gradient.get().tobytes() == expected.tobytes()


def test_the_sum_does_not_depend_on_alignment(place, rng):
    library, memory = place
    output, target = draw(rng, 3, 5004), draw(rng, 3, 5004)
    found = []
    for front in (0, 0, 1):
        a, b = (Held(memory, array, front=front) for array in (output, target))
        errors = Held(memory, shape=(3,), dtype=F64)
        library.call("squared_error", a.address, b.address, 3, 5004, errors.address, 0)
        found.append(errors.get().tobytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("pairs", [1, 2, 37, 256, 1000])
@pytest.mark.parametrize("beta, spread", [(2000.0, 1e-4), (2000.0, 1.0), (1.0, 0.0)])
def test_dpo(place, rng, pairs, beta, spread):
    library, memory = place
    anchor = rng.uniform(0.1, 1, 2 * pairs)
    errors = anchor + spread * rng.standard_normal(2 * pairs)
    weight, stats = Held(memory, shape=(2 * pairs,), dtype=F64), Held(memory, shape=(9,), dtype=F64)
    library.call("dpo", memory.put(errors), memory.put(anchor), pairs, beta, weight.address, stats.address, 0)
    want = dpo_loss(errors[:pairs], errors[pairs:], anchor[:pairs], anchor[pairs:], beta)
    gradient = np.concatenate([want.chosen_gradient, want.rejected_gradient])
    np.testing.assert_allclose(weight.get(), gradient, rtol=1e-12)
    # rewards have either sign: what cancels is measured by what was summed
    size = beta / 2 * abs(anchor - errors).mean() * 2
    names = wrapped.DPO_STATS
    values = dict(zip(names, stats.get(), strict=True))
    assert math.isclose(values["loss"], want.loss, rel_tol=1e-12)
    for name in names[1:]:
        assert abs(values[name] - want.stats[name]) <= 1e-12 * (abs(want.stats[name]) + size), name


@pytest.mark.gpu
def test_dpo_of_no_pairs_is_nan(library, gpu):
    stats = gpu.empty(72)
    library.call("dpo", 0, 0, 0, 1.0, 0, stats, 0)
    assert np.isnan(gpu.get(stats, (9,), F64)).all()
    gpu.free()


# ---- samplers
class Network:
    """Answers of random numbers, kept with the x that they were for."""

    def __init__(self, rng, shape):
        self.rng, self.shape, self.outputs = rng, shape, []

    def __call__(self, x, t, condition):
        self.outputs.append(draw(self.rng, *self.shape))
        return self.outputs[-1]


def stochastic(schedule, times, eta):
    """Factors b and d of DDIM with noise (Song et al. 2021, eq. 12 and 16), (steps, 2)."""
    here, there = schedule.alpha_bar[times], np.append(schedule.alpha_bar[times[1:]], 1.0)
    s = eta * np.sqrt((1 - there) / (1 - here)) * np.sqrt(1 - here / there)
    return np.stack([np.sqrt(np.maximum(1 - there - s * s, 0)), s], axis=1)


@pytest.mark.parametrize("prediction", KINDS)
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("eta", [0.0, 0.7, None])
@pytest.mark.parametrize("shape, front", [((2, 4, 4, 3), 0), ((1, 1), 0), ((3, 5), 1), ((2, 3072), 0)])
def test_sampler_steps(place, rng, prediction, clip, eta, shape, front):
    """Steps of DDIM, or of ancestral sampling where `eta` is None, have the CPU's bits."""
    library, memory = place
    schedule, steps = (linear(100), cosine(100))[front], 4
    start, noise = draw(rng, *shape), {t: draw(rng, *shape) for t in range(100)}
    network = Network(rng, shape)
    options = dict(prediction=prediction, clip=clip, noise=noise.__getitem__)
    if eta is None:
        want = samplers.ancestral(network, start.copy(), None, schedule, steps, **options)
    else:
        want = samplers.ddim(network, start.copy(), None, schedule, steps, eta=eta, **options)
    x = Held(memory, start, front=front)
    times, table = coefficients("ancestral" if eta is None else "ddim", schedule, steps, clip=clip)
    if eta:
        table[:, [3, 5]] = stochastic(schedule, times, eta)
    for output, t, factors in zip(network.outputs, times, table, strict=True):
        held = [Held(memory, array, front=front) for array in (output, noise[int(t)])]
        noise_at = held[1].address if factors[5] else 0
        library.call("sampler_step", held[0].address, noise_at, memory.put(factors), KINDS[prediction],
                     start.size, x.address, 0)  # fmt: skip
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(x.get(), want)  # +0 equals -0, all else has one pattern


@pytest.mark.parametrize("prediction", KINDS)
@pytest.mark.parametrize("clip", [1.0, None])
@pytest.mark.parametrize("steps", [4, 7])
@pytest.mark.parametrize("shape, front", [((2, 4, 4, 3), 0), ((3, 5), 1)])
def test_steps_of_heun(place, rng, prediction, clip, steps, shape, front):
    """The same function makes them, with the x before a step in place of noise; they have the CPU's bits."""
    library, memory = place
    schedule, start = (linear(100), cosine(100))[front], draw(rng, *shape)
    network = Network(rng, shape)
    want = samplers.heun(network, start.copy(), None, schedule, steps, prediction=prediction, clip=clip)
    x, before = Held(memory, start, front=front), start
    _, table = coefficients("heun", schedule, steps, clip=clip)
    plan = samplers.plan("heun", schedule, steps)
    assert any(step.corrects for step in plan) and len(network.outputs) == len(plan) == steps
    for output, step, factors in zip(network.outputs, plan, table, strict=True):
        before = before if step.corrects else x.get().copy()
        held = [Held(memory, array, front=front) for array in (output, before)]
        library.call("sampler_step", held[0].address, held[1].address, memory.put(factors), KINDS[prediction],
                     start.size, x.address, 0)  # fmt: skip
    assert np.isfinite(want).all()
    np.testing.assert_array_equal(x.get(), want)


def test_a_step_that_lacks_its_noise_gives_nan(place, rng):
    library, memory = place
    factors = np.float32([0.7, 0.7, 0.8, 0.5, 0, 0.3, 1, 0])
    x = Held(memory, draw(rng, 6))
    library.call("sampler_step", memory.put(draw(rng, 6)), 0, memory.put(factors), 1, 6, x.address, 0)
    assert np.isnan(x.get()).all()


# ---- misuse
@pytest.mark.parametrize(
    "name, arguments, sentence",
    [
        ("normal", (64, 1, 4, 1, 64, 66, 0), "out is 2 bytes past a multiple of 4"),
        ("normal", (68, 1, 4, 1, 64, 64, 0), "seeds is 4 bytes past a multiple of 8"),
        ("normal", (64, 1, 4, 1, 0, 64, 0), "step is NULL"),
        ("add_noise", (64, 1, 0, 64, 64, 64, 9, 1, 4, 3, 64, 64, 0), "prediction is 3"),
        ("add_noise", (64, 1, 0, 64, 64, 0, 9, 1, 4, 1, 64, 64, 0), "alpha_bar is NULL"),
        ("add_noise", (64, 1, 0, 64, 0, 64, 9, 1, 4, 1, 64, 64, 0), "t is NULL"),
        ("add_noise", (64, 1, 68, 64, 64, 64, 9, 1, 4, 1, 64, 64, 0), "index is 4 bytes past"),
        ("squared_error", (64, 64, -1, 4, 64, 0), r"output is \(-1, 4\)"),
        ("squared_error", (64, 64, 1, 4, 0, 0), "errors is NULL"),
        ("squared_error_backward", (64, 64, 65, 1, 4, 64, 0), "weight is 1 bytes past"),
        ("dpo", (64, 64, 1, 1.0, 64, 0, 0), "stats is NULL"),
        ("dpo", (64, 0, 1, 1.0, 64, 64, 0), "reference is NULL"),
        ("sampler_step", (64, 0, 0, 1, 4, 64, 0), "coefficients is NULL"),
        ("sampler_step", (64, 66, 64, 1, 4, 64, 0), "noise is 2 bytes past"),
        ("sampler_step", (64, 64, 64, 9, 4, 64, 0), "prediction is 9"),
    ],
)
def test_bad_arguments_are_refused_before_any_launch(library, name, arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        library.call(name, *arguments)


def operands(*arrays):
    return [device.operand(put(array), f"array{i}") for i, array in enumerate(arrays)]


def test_wrappers_fill_device_arrays(host_cuda, rng):  # noqa: F811
    schedule, shape = linear(10), (4, 2, 2, 3)
    times = np.array([0, 3, 9, 1])
    seeds, step, t, alpha_bar = operands(np.arange(4, dtype=np.uint64), np.uint32([6]), times,
                                         schedule.alpha_bar)  # fmt: skip
    pictures, eps, x_t, target, gradient = operands(*(draw(rng, *shape) for _ in range(5)))
    wrapped.normal(seeds, step, eps, 0)
    noise = normal(np.arange(4), 6, shape[1:])
    assert eps.owner.array.tobytes() == noise.tobytes()
    wrapped.add_noise(pictures, t, eps, t, alpha_bar, "v", 0, x_t=x_t)
    assert np.isnan(x_t.owner.array[2]).all()  # index 9 of four pictures
    wrapped.add_noise(pictures, None, eps, t, alpha_bar, "v", 0, x_t=x_t, target=target)
    want = schedule.target(pictures.owner.array, noise, t.owner.array, "v")
    assert target.owner.array.tobytes() == want.tobytes()
    errors, anchor, weight, stats = operands(np.zeros(4), np.full(4, 0.5), np.zeros(4), np.zeros(9))
    wrapped.squared_error(x_t, target, errors, 0)
    wrapped.dpo(errors, anchor, 10.0, weight, stats, 0)
    wrapped.squared_error_backward(x_t, target, weight, gradient, 0)
    want, slope = losses.picture_errors(x_t.owner.array, target.owner.array)
    np.testing.assert_array_equal(errors.owner.array, want)
    assert (weight.owner.array > 0).tolist() == [True, True, False, False]
    factor = weight.owner.array.astype(np.float32).reshape(4, 1, 1, 1)
    np.testing.assert_array_equal(gradient.owner.array, slope * factor)
    (factors,) = operands(np.float32([0.7, 0.7, 1, 0, 0, 0, 1, 0]))
    wrapped.sampler_step(target, None, factors, "x0", x_t, 0)
    np.testing.assert_allclose(x_t.owner.array, target.owner.array.clip(-1, 1), atol=1e-7)


def test_wrappers_refuse_what_would_be_read_past_its_end(host_cuda):  # noqa: F811
    seeds, step = operands(np.zeros(3, np.uint64), np.zeros(1, np.uint32))
    out, odd, factors = operands(np.zeros((4, 8), F32), np.zeros(3), np.zeros(8, F32))
    with pytest.raises(ShapeError, match=r"seeds has shape \(3,\), but \(4,\) is needed"):
        wrapped.normal(seeds, step, out, 0)
    with pytest.raises(ShapeError, match="dpo: errors has 3 elements"):
        wrapped.dpo(odd, odd, 1.0, odd, odd, 0)
    with pytest.raises(ConfigError, match="prediction 'x' is not known"):
        wrapped.sampler_step(out, None, factors, "x", out, 0)
    assert not host_cuda.calls
