"""The UNet ddpm-cifar10-32 on a GPU beside diffusers under PyTorch: forward, training step, memory.

    python bench/network.py [--part forward|train|memory|kernels ...] [--batches 1024 256 64] [--rounds 8]
                            [--json FILE] [--goals] [--no-compile]

All arms of one part alternate in one run: ours as replayed CUDA graphs; diffusers' network (the same weights)
under FP16 autocast as PyTorch runs it, and with BF16 weights through torch.compile. The training step holds
forward, mean squared error, backward and AdamW; with gradient scaling under FP16. "memory" gives the peak of
one training step and what it consists of. "kernels" times each launch of ours alone, beside the roofline
(bench/roofline.py). Predictions are compared first: error beyond BF16's is a wrong result and exit 1; with
--goals a missed goal is, too. Needs the extras `cuda` and `peers`.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from fp4bf16 import device, nn  # noqa: E402
from fp4bf16.backends import cuda_diffusion  # noqa: E402
from fp4bf16.cli.bench import record  # noqa: E402
from fp4bf16.nn.cuda.graph import Graph  # noqa: E402
from fp4bf16.nn.cuda.optim import DeviceAdamW  # noqa: E402
from fp4bf16.routing import flops  # noqa: E402

#: What the router would choose by cost: first and last convolution, embeddings and 1x1 shortcuts (which ride
#: in the launch of an FP4 convolution) and the three strided convolutions in BF16.
ROUTE = {"conv_in*": "bf16", "conv_out*": "bf16", "*time_emb*": "bf16", "*conv_shortcut*": "bf16",
         "*downsamplers*": "bf16", "*to_out*": "bf16", "*": "fp4"}  # fmt: skip
BF16 = {"*": "bf16"}
FLOPS = 12.44e9  # multiplications and additions a picture, forward, of 3x3 kernels on upsampled pictures
GIB = 1 << 30
#: Relative L2 distance of the prediction from FP32's: a tenth more than the CPU's FP4 track has on these
#: weights (0.259); three times what BF16 has there and here (0.007, 0.009).
WRONG = {"fp4": 0.285, "bf16": 0.03}


def network(route, phases=True, **how):
    import cupy

    config = nn.UNetConfig.ddpm_cifar10_32()
    model = nn.UNet2D(config, seed=0)
    model.apply_route(route)
    model.upsample_by_phases(phases)
    return model.cuda(cupy, **how)


def operands(batch: int):
    import cupy

    rng = np.random.default_rng(batch)
    x = rng.standard_normal((batch, 32, 32, 3)).astype(np.float32)
    t = rng.integers(0, 1000, batch)
    return cupy.asarray(x), cupy.asarray(t)


# ---- arms: a name and a function that does one step
class Ours:
    """Our network; `step` replays a graph."""

    def __init__(self, name, batch, route, train=False, **how):
        self.name, self.batch = name, batch
        self.model = network(route, **how)
        self.flops = math.fsum(flops(self.model).values())
        self.x, self.t = operands(batch)
        self.graph = Graph(self.x)
        self.optimizer = DeviceAdamW(self.model.flat, lr=1e-4) if train else None
        self.result = self.graph.capture(self._train if train else self._forward)

    def _forward(self, stream):
        with nn.no_grad():
            return self.model(self.x, self.t).data

    def _train(self, stream):
        import cupy

        self.model.flat.grad.owner.fill(0)
        output = self.model(self.x, self.t)
        prediction = device.operand(output.data, "output")
        gradient = device.empty(prediction.shape, "float32", like=prediction)
        target = device.operand(self.x, "target")
        cuda_diffusion.squared_error_backward(prediction, target, None, gradient, stream)
        output.backward(gradient.owner)
        self.optimizer.step(stream)
        return cupy.asarray(output.data)

    def __call__(self):
        if self.optimizer is not None:
            self.optimizer.prepare(stream=0)
        self.graph.replay(0)

    def memory(self) -> dict[str, int]:
        """Bytes on the GPU: of the graph's pool, the weights and their copies, and the moments."""
        found = dict(self.model.inventory())
        moments = 2 * self.optimizer.first.nbytes
        kinds = "weights", "gradients", "weights in BF16", "FP4 twins", "weights by phases"
        fixed = sum(found.get(k, 0) for k in kinds)
        return found | {"moments": moments, "pool of the step": self.graph.memory,
                        "peak": fixed + moments + self.graph.memory}  # fmt: skip


def peer(state=None):
    """diffusers' network in PyTorch, with our weights where given."""
    import torch
    from diffusers import UNet2DModel

    config = {k: v for k, v in nn.UNetConfig.ddpm_cifar10_32().to_dict().items() if k != "caption_vocabulary"}
    model = UNet2DModel(**config).cuda()
    if state is not None:
        own = model.state_dict()
        for name, value in state.items():
            value = value.transpose(0, 3, 1, 2) if value.ndim == 4 else value
            own[name].copy_(torch.from_numpy(np.ascontiguousarray(value)))
    return model


class Peer:
    """diffusers' network; kind: "fp32", "fp16 amp eager" or "bf16 compiled"."""

    def __init__(self, kind, batch, train=False, model=None):
        import torch

        self.name, self.batch, self.torch, self.train = f"diffusers {kind}", batch, torch, train
        self.flops = FLOPS
        self.model = model or peer()
        x, t = operands(batch)
        self.x = torch.as_tensor(x, device="cuda").permute(0, 3, 1, 2).contiguous()
        self.t = torch.as_tensor(t)
        self.amp = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(kind[:4])
        if kind.startswith("bf16") and not train:  # weights in BF16, nothing left to autocast
            self.model, self.x, self.amp = self.model.to(torch.bfloat16), self.x.to(torch.bfloat16), None
        if kind.startswith("bf16"):
            self.model = torch.compile(self.model.to(memory_format=torch.channels_last))
            self.x = self.x.to(memory_format=torch.channels_last)
        if train:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
            self.scaler = torch.amp.GradScaler(enabled=kind.startswith("fp16"))

    def forward(self):
        with self.torch.autocast("cuda", self.amp, enabled=self.amp is not None):
            return self.model(self.x, self.t).sample

    def __call__(self):
        if not self.train:
            with self.torch.no_grad():
                return self.forward()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.torch.nn.functional.mse_loss(self.forward().float(), self.x.float())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


# ---- timing
def alternate(arms, rounds, seconds=0.12):
    """Milliseconds of a step: name -> one reading a round, arms in turn, each long enough to hide its start.
    """
    import torch

    def reading(arm, count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            arm()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    found = {arm.name: [] for arm in arms}
    for arm in arms:  # compiles, tunes, warms
        reading(arm, 2)
    counts = {arm.name: max(1, round(seconds * 1e3 / reading(arm, 2))) for arm in arms}
    for i in range(rounds):
        for arm in arms[i % len(arms):] + arms[: i % len(arms)]:
            found[arm.name].append(reading(arm, counts[arm.name]))
    return found


def operations(arms, train=False):
    """By name, what is multiplied a picture: in a step by the forward, the gradient in the pictures, and that
    in the weights, which is of upsampled pictures everywhere.
    """
    return {arm.name: 2 * arm.flops + FLOPS if train else arm.flops for arm in arms}


def report(part, batch, found, counts):
    rows = []
    for name, values in found.items():
        ms = statistics.median(values)
        rows.append({"part": part, "batch": batch, "arm": name, "ms": ms, "min": min(values),
                     "max": max(values), "images_per_s": batch / ms * 1e3,
                     "tflop_s": batch * counts[name] / ms / 1e9})  # fmt: skip
    base = {r["arm"]: r["ms"] for r in rows}
    for r in rows:
        for peer_name in ("diffusers fp16 amp eager", "diffusers bf16 compiled"):
            if peer_name in base:
                r["x " + peer_name.split()[1]] = base[peer_name] / r["ms"]
        extra = "".join(f" | {v:5.2f} {k}" for k, v in r.items() if k.startswith("x "))
        print(f"{part:8s} B={batch:5d} {r['arm']:26s} | {r['ms']:8.2f} ms | "
              f"{r['images_per_s']:8.0f} images/s | {r['tflop_s']:6.0f} TFLOP/s{extra}",
              flush=True)  # fmt: skip
    return rows


def peers(args, batch, train=False):
    kinds = ["fp16 amp eager"] + ([] if args.no_compile else ["bf16 compiled"])
    return [Peer(kind, batch, train) for kind in kinds]


# ---- parts
def agreement():
    """Relative L2 distance of our predictions from diffusers' in FP32, on shared weights."""
    import torch

    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = {}
    want = None
    for name, route in (("bf16", BF16), ("fp4", ROUTE)):
        model = network(route)
        x, t = operands(16)
        with nn.no_grad():
            y = torch.as_tensor(model(x, t).data).permute(0, 3, 1, 2)
        if want is None:
            other = peer(model.flat.to_host())
            with torch.no_grad():
                picture = torch.as_tensor(x).permute(0, 3, 1, 2).contiguous()
                want = other(picture, torch.as_tensor(t)).sample
                half = other.to(torch.bfloat16)(picture.to(torch.bfloat16), torch.as_tensor(t)).sample.float()
            found["diffusers bf16"] = float((half - want).norm() / want.norm())
        found[name] = float((y - want).norm() / want.norm())
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32
    rounded = {k: float(f"{v:.2g}") for k, v in found.items()}
    print("distance of the prediction from diffusers FP32:", rounded, flush=True)
    return found


def forward(args):
    rows = []
    for batch in args.batches:
        arms = [Ours("fp4", batch, ROUTE), Ours("bf16", batch, BF16), *peers(args, batch)]
        if batch == max(args.batches):
            arms.insert(1, Ours("fp4 promoted", batch, ROUTE, accumulate="promoted"))
        rows += report("forward", batch, alternate(arms, args.rounds), operations(arms))
    return rows


def train(args):
    arms = [Ours("fp4", 256, ROUTE, train=True), Ours("bf16", 256, BF16, train=True)]
    arms += peers(args, 256, train=True)
    return report("train", 256, alternate(arms, args.rounds), operations(arms, train=True))


def memory(args):
    """Peaks of one training step at B = 256."""
    import torch

    rows = []
    for name, route, how in (
        ("fp4", ROUTE, {}), ("fp4, inputs saved in BF16", ROUTE, {"save": "bf16"}),
        ("fp4, inputs recomputed", ROUTE, {"save": "recompute"}), ("bf16", BF16, {}),
    ):  # fmt: skip
        arm = Ours(name, 256, route, train=True, **how)
        arm()
        rows.append({"part": "memory", "arm": name, **arm.memory()})
        del arm
    for kind in ("fp32", "fp16 amp eager"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        arm = Peer(kind, 256, train=True)
        arm(), arm()
        rows.append({"part": "memory", "arm": arm.name, "peak": torch.cuda.max_memory_allocated() - before})
        del arm
    base = next(r["peak"] for r in rows if r["arm"] == "diffusers fp32")
    for r in rows:
        r["share of fp32"] = r["peak"] / base
        parts = ", ".join(f"{k} {v / GIB:.2f}" for k, v in r.items() if isinstance(v, int) and k != "peak")
        print(f"memory   {r['arm']:26s} | {r['peak'] / GIB:6.2f} GiB | "
              f"{100 * r['share of fp32']:5.1f} % of FP32 | {parts}", flush=True)  # fmt: skip
    return rows


def kernels(args):
    import roofline

    forward_arm, step = Ours("fp4", 1024, ROUTE), Ours("fp4", 256, ROUTE, train=True)
    return roofline.breakdown(lambda: forward_arm._forward(0), "forward fp4 B=1024") + roofline.breakdown(
        lambda: step._train(0), "train fp4 B=256"
    )


GOALS = (
    ("forward", 1024, "fp4", "images_per_s", 60e3), ("forward", 1024, "fp4", "x fp16", 6.0),
    ("forward", 1024, "fp4", "x bf16", 2.2), ("forward", 1024, "bf16", "x bf16", 1.5),
    ("train", 256, "fp4", "x fp16", 3.0), ("train", 256, "fp4", "x bf16", 1.7),
)  # fmt: skip


def goals(rows):
    """(what, goal, measured) of every goal that the rows speak of."""
    found = []
    for part, batch, arm, key, goal in GOALS:
        which = part, batch, arm
        found += [(f"{part} B={batch} {arm} {key}", goal, r[key]) for r in rows
                  if (r["part"], r.get("batch"), r.get("arm")) == which and key in r]  # fmt: skip
    rate = {r["batch"]: r["images_per_s"] for r in rows if (r["part"], r.get("arm")) == ("forward", "fp4")}
    for batch, share in ((256, 0.85), (64, 0.6)):
        if {batch, 1024} <= rate.keys():
            found.append((f"forward B={batch} over B=1024", share, rate[batch] / rate[1024]))
    found += [("memory, share of FP32 left", 0.73, 1 - r["share of fp32"]) for r in rows
              if r["part"] == "memory" and r["arm"] == "fp4"]  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = {"forward": forward, "train": train, "memory": memory, "kernels": kernels}
    parser.add_argument("--part", nargs="*", choices=parts, default=list(parts))
    parser.add_argument("--batches", nargs="*", type=int, default=[1024, 256, 64])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json")
    parser.add_argument("--goals", action="store_true")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    import torch

    torch.backends.cudnn.benchmark = True
    distances = agreement()
    bad = [k for k, limit in WRONG.items() if not distances[k] < limit]
    rows = []
    for part in args.part:  # written after each: what compiles may use up the time that there is
        rows += parts[part](args)
        if args.json:
            out = {"benchmark": "network", "about": record.gpu(torch), "route": ROUTE, "distance": distances,
                   "rows": rows}  # fmt: skip
            pathlib.Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    if args.goals:
        for what, goal, value in goals(rows):
            print(f"{'ok  ' if value >= goal else 'MISS'} {what}: {value:.4g} (goal {goal:g})")
            bad += [] if value >= goal else [what]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
