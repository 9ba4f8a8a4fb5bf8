"""The emulated library refuses a launch that is given memory which no array holds any more."""

from __future__ import annotations

import numpy as np
import pytest
from host_cuda import host_cuda, put  # noqa: F401  (host_cuda is a fixture)
from host_live import Live

from fp4bf16 import device
from fp4bf16.backends import cuda_conv, cuda_elementwise, cuda_norm

GONE = "points to memory that no array holds any more"


def test_views_keep_memory_and_nothing_else_does():
    live, array = Live(), np.zeros((8, 16), np.float32)
    live.add(array)
    at = array.ctypes.data
    assert live.holds(at) and live.holds(at + 511) and not live.holds(at + 512) and not live.holds(at - 1)
    view = array[2:, ::-1].T
    live.add(view)
    del array
    assert live.holds(at)
    del view
    assert not live.holds(at)


def operand(shape, dtype):
    return device.operand(put(np.ones(shape, dtype)), "x")


def test_an_argument(host_cuda):  # noqa: F811
    x, y = operand(64, np.float32), operand(64, np.float32)
    device.call("silu", x.address, 64, 0, y.address, 0)
    gone = y.address
    del y
    with pytest.raises(ValueError, match=f"argument 3 {GONE}"):
        device.call("silu", x.address, 64, 0, gone, 0)


def test_strides_are_on_the_host(host_cuda):  # noqa: F811
    x = operand((1, 2, 2, 16), np.uint8)
    y = cuda_elementwise.upsample(x, device.empty((1, 4, 4, 16), "uint8", x), 0)
    assert y is None and host_cuda.calls["upsample"] == 1


def test_a_field_of_a_struct(host_cuda, monkeypatch):  # noqa: F811
    """As a workspace was lost once: its address taken, the array dropped before the launch."""

    class Lost:
        def __init__(self, array):
            self.address = array.address

    x = device.empty((2, 4, 4, 32), "bfloat16", operand(1, np.uint8))
    y, gamma = device.empty(x.shape, "bfloat16", x), operand(32, np.float32)
    cuda_norm.group_norm(x, gamma, gamma, 4, 1e-5, 0, silu=True, y=y)
    made = cuda_norm.empty
    monkeypatch.setattr(cuda_norm, "empty", lambda *args, **more: Lost(made(*args, **more)))
    with pytest.raises(ValueError, match=f"workspace {GONE}"):
        cuda_norm.group_norm(x, gamma, gamma, 4, 1e-5, 0, silu=True, y=y)


def test_an_array_of_pointers(host_cuda):  # noqa: F811
    x, sums = operand(64, np.uint8), operand(64, np.float32)
    args = cuda_conv.filled("fp4bf16_group_norm_args", {"x": x.address, "sums": (0, sums.address)})
    del sums
    with pytest.raises(ValueError, match=rf"sums\[1\] {GONE}"):
        device.call("group_norm", args, 0)
