"""Convolutions beside cuDNN on a GPU: forward on both tracks, and both gradients.

    python bench/conv.py [--shapes NxHxWxCxO ...] [--rounds 20] [--json FILE] [--goals] [--configs]

3x3, stride 1, padding 1, NHWC, all arms interleaved in one run (fp4bf16/cli/bench/timing.py says how). "fp4"
takes prepared operands, as a network has them: its norms write pictures already quantised. "fp4 from bf16"
quantises x in the call. Each result is checked: fp4 against cuDNN's convolution of the decoded operands.
``--configs`` times every configuration of the kernel. Exit 1 where a result is wrong or, with --goals, a goal
is missed.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import fp4bf16 as fb  # noqa: E402
from fp4bf16 import device  # noqa: E402
from fp4bf16.backends import cuda, cuda_conv  # noqa: E402
from fp4bf16.cli.bench import record, timing  # noqa: E402

SHAPES = [(128, 32, 32, 256, 256), (64, 64, 64, 320, 320), (256, 16, 16, 256, 256)]
UNET = [(1024, 32, 32, 128, 128), (1024, 16, 16, 256, 256), (256, 32, 32, 256, 128), (256, 8, 8, 512, 256)]
GOALS = {"bf16": 0.95, "fp4": 1.7}
WRONG = 6e-3  # relative L2 distance of two BF16 results of the same operands


class Operands:
    """One set of operands of a shape, with views of them as the kernels take them."""

    def __init__(self, torch, shape, generator):
        n, h, w, c, o = shape
        make = dict(device="cuda", dtype=torch.bfloat16, generator=generator)
        self.x = torch.randn((n, h, w, c), **make)
        self.w = torch.randn((o, 3, 3, c), **make) * (9 * c) ** -0.5
        self.g = torch.randn((n, h, w, o), **make)
        self.y, self.dx = torch.empty_like(self.g), torch.empty_like(self.x)
        self.dw = torch.empty((o, 3, 3, c), device="cuda")
        self.xq = fb.quantize(self.x, "nvfp4_exact", outer="image", search="fast")
        self.wq = fb.quantize(self.w, "nvfp4_exact", outer="image")
        self.geo = cuda_conv.Geometry(n, h, w, h, w, o, 3, 3, 1, 1, 1)
        view = lambda t: device.operand(t, "t")  # noqa: E731
        self.views = {k: view(getattr(self, k)) for k in ("x", "w", "g", "y", "dx", "dw")}
        self.fp4 = dict(x8=view(self.xq.expanded), w8=view(self.wq.expanded),
                        image_scale=view(self.xq.outer_scale.reshape(-1)),
                        col_scale=view(self.wq.outer_scale.reshape(-1)))  # fmt: skip

    def nchw(self, name):
        return getattr(self, name).permute(0, 3, 1, 2)


def distance(torch, y, want) -> float:
    y, want = y.float(), want.float()
    return float((y - want).norm() / want.norm())


CONFIGS = (  # of the kernel, by what they compute
    ("fp4", {}, (1, 2, 3, 12)), ("fp4", {"accumulate": "fast"}, (4, 5, 6, 10, 11, 13)),
    ("bf16", {}, (4, 5, 6, 10, 11, 13)), ("dgrad", {}, (7, 8, 9)),
)  # fmt: skip


def arms_of(torch, shape, sets, configs):
    """The arms of one shape; operand set i of each is ``sets[i]``."""
    first = sets[0]
    conv, back = torch.nn.functional.conv2d, torch.ops.aten.convolution_backward
    stream = lambda: torch.cuda.current_stream().cuda_stream  # noqa: E731

    def ours(kind, **how):
        def run(i):
            s, v = sets[i], sets[i].views
            if kind == "fp4":
                cuda_conv.forward(s.geo, v["y"], stream(), **s.fp4, **how)
            elif kind == "bf16":
                cuda_conv.forward(s.geo, v["y"], stream(), x16=v["x"], w16=v["w"], **how)
            elif kind == "dgrad":
                cuda_conv.dgrad(s.geo, v["g"], v["w"], v["dx"], stream(), **how)
            elif kind == "wgrad":
                cuda_conv.wgrad(s.geo, v["g"], v["x"], v["dw"], stream(), **how)
            else:
                fb.conv2d(s.x, s.wq, padding=1, track="fp4", out=s.y)

        return run

    def peer_backward(mask):
        return lambda i: back(sets[i].nchw("g"), sets[i].nchw("x"), sets[i].nchw("w"), None, [1, 1], [1, 1],
                              [1, 1], False, [0, 0], 1, mask)  # fmt: skip

    def against(name, want):
        def check():
            d = distance(torch, getattr(first, name), want())
            return d, d

        return check

    decoded = [fb.dequantize(q, dtype="bfloat16").permute(0, 3, 1, 2) for q in (first.xq, first.wq)]
    plain = lambda: conv(first.nchw("x"), first.nchw("w"), padding=1).permute(0, 2, 3, 1)  # noqa: E731
    fp4 = lambda: conv(*decoded, padding=1).permute(0, 2, 3, 1)  # noqa: E731
    gradients = lambda mask: back(  # noqa: E731
        first.nchw("g").float(), first.nchw("x").float(), first.nchw("w").float(),
        None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, mask,
    )  # fmt: skip
    n, h, w, c, o = shape
    pixels, flops = n * h * w, 2.0 * n * h * w * o * c * 9
    table = [
        ("cudnn bf16", lambda i: conv(sets[i].nchw("x"), sets[i].nchw("w"), padding=1),
         2 * pixels * (c + o), None),
        ("bf16", ours("bf16"), 2 * pixels * (c + o), against("y", plain)),
        ("fp4", ours("fp4"), pixels * (c + 2 * o), against("y", fp4)),
        ("fp4 fast", ours("fp4", accumulate="fast"), pixels * (c + 2 * o), against("y", fp4)),
        ("fp4 from bf16", ours("public"), pixels * (2 * c + 2 * o), against("y", fp4)),
        ("cudnn dgrad", peer_backward([True, False, False]), 2 * pixels * (c + o), None),
        ("dgrad", ours("dgrad"), 2 * pixels * (c + o),
         against("dx", lambda: gradients([True, False, False])[0].permute(0, 2, 3, 1))),
        ("cudnn wgrad", peer_backward([False, True, False]), 2 * pixels * (c + o), None),
        ("wgrad", ours("wgrad"), 2 * pixels * (c + o),
         against("dw", lambda: gradients([False, True, False])[1].permute(0, 2, 3, 1))),
    ]  # fmt: skip
    if configs:
        table += [(f"{kind} config {i}", ours(kind, config=i, **how), 0, None)
                  for kind, how, choices in CONFIGS for i in choices]  # fmt: skip
    return [timing.Arm(name, run, len(sets), flops, nbytes, check) for name, run, nbytes, check in table]


def measure(torch, shape, rounds, configs):
    n, h, w, c, o = shape
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    l2 = cuda.load().device(0).l2_cache
    sets = [Operands(torch, shape, generator) for _ in range(min(4, timing.sets_needed(n * h * w * c, l2)))]
    arms = arms_of(torch, shape, sets, configs)
    for arm in arms:
        for s in sets:
            for t in (s.y, s.dx, s.dw):
                t.fill_(float("nan"))
        timing.prepare(torch, arm)
    timing.measure(torch, arms, rounds)
    base = {arm.name: arm.median for arm in arms}
    rows = []
    for arm in arms:
        peer = base.get("cudnn " + arm.name.split()[0], base["cudnn bf16"])
        rows.append({
            "shape": list(shape), "arm": arm.name, "us": arm.median * 1e6, "p20": arm.share(0.2) * 1e6,
            "p80": arm.share(0.8) * 1e6, "tflop_s": arm.flops / arm.median / 1e12,
            "x_cudnn": peer / arm.median, "error": arm.error, "note": arm.note,
        })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*",
                        help="NxHxWxCxO; default: the three of the goals and the UNet's")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json")
    parser.add_argument("--goals", action="store_true")
    parser.add_argument("--configs", action="store_true")
    args = parser.parse_args()
    import torch

    torch.backends.cudnn.benchmark = True
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes] if args.shapes else SHAPES + UNET
    rows, bad = [], 0
    for shape in shapes:
        for row in measure(torch, shape, args.rounds, args.configs):
            rows.append(row)
            wrong = row["error"] is not None and not row["error"] < WRONG
            goal = GOALS.get(row["arm"]) if args.goals and shape in SHAPES else None
            missed = goal is not None and not row["x_cudnn"] >= goal
            bad += wrong or missed
            error = "" if row["error"] is None else f"{row['error']:.1e}"
            print(f"conv {'x'.join(map(str, shape)):22s} {row['arm']:18s} | {row['us']:8.1f} us | "
                  f"{row['tflop_s']:6.0f} TFLOP/s | {row['x_cudnn']:5.2f} x cuDNN | {error:8s}"
                  f"{' WRONG' if wrong else ''}{f' goal {goal} missed' if missed else ''} {row['note']}",
                  flush=True)  # fmt: skip
    if args.json:
        out = {"benchmark": "conv", "about": record.gpu(torch), "rows": rows}
        pathlib.Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
