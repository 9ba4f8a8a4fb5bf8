"""The README's network example, as it stands there: emulated with a small network, and on a GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from host_cuda import Arrays, FakeArray, host_cuda, put  # noqa: F401  (host_cuda is a fixture)

from fp4bf16 import device, nn
from fp4bf16.backends import cuda, cuda_math

README = Path(__file__).resolve().parents[1] / "README.md"


def example() -> str:
    """The Python block that moves a network to the GPU."""
    blocks = [b.split("```")[0] for b in README.read_text("utf-8").split("```python\n")[1:]]
    (found,) = [b for b in blocks if "model.cuda(cupy)" in b]
    return found


def run() -> dict:
    names: dict = {}
    exec(example(), names)
    assert names["y"].shape == names["x"].shape and names["t"].dtype == np.int64
    return names


def fake_cupy(rng) -> ModuleType:
    module = ModuleType("cupy")
    module.zeros = lambda shape, dtype: put(np.zeros(shape, dtype))
    module.random = SimpleNamespace(
        standard_normal=lambda shape, dtype: put(rng.standard_normal(shape).astype(dtype)),
        randint=lambda low, high, size: put(rng.integers(low, high, size)),
    )
    return module


def test_network_example_emulated(rng, monkeypatch, host_cuda):  # noqa: F811
    whole = nn.UNetConfig.ddpm_cifar10_32()
    kinds = {"down_block_types": whole.down_block_types[:2], "up_block_types": whole.up_block_types[-2:]}
    small = replace(whole, block_out_channels=(32, 32), layers_per_block=1, **kinds)
    monkeypatch.setattr(nn.UNetConfig, "ddpm_cifar10_32", lambda: small)
    monkeypatch.setattr(FakeArray, "__truediv__", lambda a, n: put(a.array / np.float32(n)), raising=False)
    monkeypatch.setitem(cuda_math._KNOWN, "fake", Arrays())
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(rng))
    names = run()
    gradient = device.to_host(names["model"].flat.grad)
    assert np.isfinite(gradient).all() and gradient.any() and host_cuda.calls["conv2d_wgrad"]


@pytest.mark.gpu
def test_network_example_on_a_gpu():
    pytest.importorskip("cupy")
    if not cuda.devices():
        pytest.skip("no GPU")
    gradient = device.to_host(run()["model"].flat.grad)
    assert np.isfinite(gradient).all() and gradient.any()
