"""Steps of the UNet on a GPU and a digest of all that they made, as JSON.

test_launch_gpu.py compares those of two processes, since whether kernels overlap is asked once a process.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np

from fp4bf16 import device, nn
from fp4bf16.backends import cuda_diffusion
from fp4bf16.nn.cuda.graph import Graph
from fp4bf16.nn.cuda.optim import DeviceAdamW

ROUTES = {
    "bf16": {"*": "bf16"},
    "fp4": {"conv_in*": "bf16", "conv_out*": "bf16", "*time_emb*": "bf16", "*conv_shortcut*": "bf16",
            "*downsamplers*": "bf16", "*to_out*": "bf16", "*": "fp4"},
}  # fmt: skip
REPLAYS, BATCH = 20, 6


def digest(*arrays) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def steps(route, cupy) -> dict[str, str]:
    """A forward, a forward and a backward, and replays of a training step."""
    config = nn.UNetConfig.ddpm_cifar10_32(block_out_channels=(64, 128, 128, 128))
    model = nn.UNet2D(config, seed=1)
    model.apply_route(route)
    model.cuda(cupy)
    rng = np.random.default_rng(2)
    x = cupy.asarray(rng.standard_normal((BATCH, 32, 32, 3)).astype(np.float32))
    t = cupy.asarray(rng.integers(0, 1000, BATCH))
    found, flat = {}, model.flat
    with nn.no_grad():
        found["forward"] = digest(device.to_host(model(x, t).data))
    output = model(x, t)
    flat.grad.owner.fill(0)
    output.backward(cupy.asarray(rng.standard_normal(x.shape).astype(np.float32)))
    found["gradients"] = digest(*flat.state(flat.grad).values())
    optimizer, graph = DeviceAdamW(flat, lr=1e-3), Graph(x)

    def train(stream):
        flat.grad.owner.fill(0)
        output = model(x, t)
        prediction = device.operand(output.data, "output")
        gradient = device.empty(prediction.shape, "float32", like=prediction)
        cuda_diffusion.squared_error_backward(prediction, device.operand(x, "target"), None, gradient, stream)
        output.backward(gradient.owner)
        optimizer.step(stream)
        return cupy.asarray(output.data)

    result = graph.capture(train)
    for _ in range(REPLAYS):
        optimizer.prepare(stream=0)
        graph.replay(0)
    found["prediction"] = digest(cupy.asnumpy(result))
    found["weights"] = digest(*flat.to_host().values())
    return found


def main() -> None:
    import cupy

    print(json.dumps({name: steps(route, cupy) for name, route in ROUTES.items()}))


if __name__ == "__main__":
    main()
