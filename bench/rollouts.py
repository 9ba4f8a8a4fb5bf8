"""Rollouts at scale, measured on the CPU: how many succeed, how well they rank, how much memory they take.

    python bench/rollouts.py [--out bench/results/cpu/rollouts.json] [--parts success,scaling,fidelity,memory]

A model of the preset ``faces16`` is trained (or read from --weights; with ``--preset emoji32`` it is the one
that ships), then:

success    `--rollouts` rollouts of `--steps` steps in three arms, on ordinary data and on the stress set
           (activations x 10^3): the FP4 track with retries on BF16, the BF16 track, and FP16 mixed precision
           as a PyTorch network runs it (`fp16_unet.py`), with Wilson's 95 % intervals. What succeeds, and
           what the stress set (activations x 10^3) is, stands in `SUCCESS`.
scaling    the FP16 network trained with dynamic loss scaling, on ordinary data and on the stress set
           (activations x 10^3).
fidelity   how the rewards of FP4 and BF16 with 2 to 10 steps rank seeds, against BF16 with all steps.
memory     peak memory of the exploration against the size of the pool.

Every arm is written as soon as it is done, and found again by the next call, which does what is missing.
``--quick`` is a test of the script: a model of a few steps, few rollouts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from fp4bf16.align.fidelity import rank_fidelity  # noqa: E402
from fp4bf16.align.guards import colourfulness  # noqa: E402
from fp4bf16.align.judges import Judge, train_judge  # noqa: E402
from fp4bf16.align.pool import GROUP, Settings, digest_of, explore, rewards_of  # noqa: E402
from fp4bf16.align.shares import rates  # noqa: E402
from fp4bf16.cli.bench.record import host, write_json  # noqa: E402
from fp4bf16.diffusion.noise import integers, normal, subseed  # noqa: E402
from fp4bf16.train.config import Config, get_preset, override  # noqa: E402
from fp4bf16.train.data import Pairs, Vocabulary, load_pairs  # noqa: E402
from fp4bf16.train.denoiser import Denoiser  # noqa: E402
from fp4bf16.train.engine import BaseData, HostEngine  # noqa: E402
from fp4bf16.train.state import peak_rss_mb  # noqa: E402
from fp4bf16.train.weights import load_start  # noqa: E402

PARTS = ("success", "scaling", "fidelity", "memory")
STRESS, FACTOR = "stress set (activations x 10^3)", 1e3
SETS = {"ordinary data": 1.0, STRESS: FACTOR}
ARMS = {"fp4+bf16": ("fp4", 2), "bf16": ("bf16", 0), "fp16": ("bf16", 0)}  # track, retries
STEPS = (2, 4, 6, 8, 10)
POOLS = (256, 2560, 25600)
SUCCESS = (
    "A rollout succeeds when no output of the network was infinite or NaN at any step, its picture is "
    f"finite and not constant, and its reward is finite. The {STRESS} is the same network, from the same "
    "seeds, with weights for which the results of its convolutions and attentions are 10^3 times as large; "
    "each is undone by the group norm that follows, so that in exact arithmetic the pictures of the "
    f"{STRESS} are those of ordinary data. Only fp4+bf16 tries what failed anew, on the BF16 track from a "
    "new seed; first_try_rate is without that."
)
SCALING = (
    "Dynamic loss scaling multiplies the loss before the backward pass and divides the gradients after it, "
    "so that small gradients do not vanish in FP16; where a gradient overflows, the update is left out and "
    "the scale halved. It changes nothing in the forward pass: activations have the same size under any "
    "scale, and sampling, which has no backward pass, does not know it. So it does not keep the forward pass "
    f"of an FP16 network from overflowing, on ordinary data or on the {STRESS}."
)
NO_FP8 = "there is no FP8 track in this package, so that no arm of it is measured"


# ------------------------------------------------------------------------------------------------- the model


class Model:
    """The trained model of the bench: network, reward judge, prompts. `digest` is of all weights."""

    def __init__(self, args: argparse.Namespace):
        changes = ["base.steps=30", "judge.steps=10", "diffusion.chunk=16"] if args.quick else []
        preset = "ci" if args.quick else args.preset
        self.config = override(get_preset(preset), [*changes, f"seed={args.seed}"])
        self.pairs = load_pairs(self.config.size)
        self.train = self.pairs.select(role="policy", word=self.config.word or None)
        self.denoiser = Denoiser(self.config, Vocabulary.of(self.train.captions))
        self.judge = Judge("reward", self.config.judge.width, seed=self.config.seed)
        path = args.weights or Path(tempfile.gettempdir()) / f"fp4bf16-rollouts-{_name(self.config)}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as file:
                state = dict(file)
        else:
            state = self._trained()
            np.savez(part := path.with_suffix(".part.npz"), **state)
            os.replace(part, path)
        self.weights = {k[4:]: v for k, v in state.items() if k.startswith("net.")}
        self.denoiser.unet.load_state_dict(self.weights)
        self.judge.network.load_state_dict({k[6:]: v for k, v in state.items() if k.startswith("judge.")})
        self.digest = digest_of(state)

    def _trained(self) -> dict[str, np.ndarray]:
        if self.config.preset == "emoji32":
            start = load_start("base", self.config.preset)
            start.check(self.config, self.denoiser)
            self.denoiser.unet.load_state_dict(start.arrays)
        else:
            self._train_base()
        judged = self.pairs.select(role="reward", without=self.config.word or None)
        styles = [self.config.winner, "twemoji" if self.config.winner == "noto" else "noto"]
        train_judge(self.judge, *(judged.style(s) for s in styles), steps=self.config.judge.steps,
                    batch=self.config.judge.batch, seed=subseed(self.config.seed, "judge"))  # fmt: skip
        self.judge.calibrate(*(self.train.style(s) for s in styles))
        return {f"net.{k}": v for k, v in self.denoiser.unet.state_dict().items()} | {
            f"judge.{k}": v for k, v in self.judge.state_dict().items()
        }

    def _train_base(self) -> None:
        print(f"training the model, {self.config.base.steps} steps", flush=True)
        engine, data, c = HostEngine(self.denoiser, self.config), base_data(self), self.config.base
        for step in range(c.steps):
            left = c.steps * c.decay
            engine.base_step(data, step, c.lr * min(1.0, (c.steps - step) / left))
        self.denoiser.unet.flat.data[...] = engine.ema.average
        self.denoiser.unet.flat.touch()

    def pool(self, prompts: int, seeds: int, purpose: str) -> tuple[np.ndarray, list[str]]:
        """(seeds (prompts, seeds), prompts) of one part of the bench."""
        shape, captions = (prompts, seeds), self.train.captions
        found = integers(subseed(self.config.seed, "bench", purpose), 0, shape, 0, 2**32).astype(np.uint64)
        return found, [captions[i % len(captions)] for i in range(prompts)]


def _name(config: Config) -> str:
    return digest_of(np.frombuffer(json.dumps(config.to_dict(), sort_keys=True).encode(), np.uint8))


def base_data(model: Model) -> BaseData:
    """The pictures of both styles with their captions, as the trainer's base stage takes them."""
    pairs: Pairs = model.train
    pictures = model.denoiser.fold(np.concatenate([pairs.style("noto"), pairs.style("twemoji")]))
    captions = np.concatenate([model.denoiser.encode(pairs.captions)] * 2)
    seeds = {n: subseed(model.config.seed, f"base/{n}") for n in ("row", "t", "noise", "drop")}
    return BaseData(pictures, captions, seeds, len(model.denoiser.schedule))


def watched(network: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """The network, of whose outputs one that is not finite becomes NaN as a whole: the sampler clips an
    infinite prediction to a pixel, and the picture would look healthy.
    """

    def seen(*arguments: Any) -> np.ndarray:
        out = network(*arguments)
        out[~np.isfinite(out).all((1, 2, 3))] = np.nan
        return out

    return seen


def draw_of(model: Model, arm: str, factor: float) -> Callable[..., np.ndarray]:
    """The draw function of an arm on a set."""
    from fp16_unet import Fp16UNet, louder

    weights = model.weights if factor == 1 else louder(model.weights, factor)
    denoiser = Denoiser(model.config, model.denoiser.vocabulary)
    denoiser.unet.load_state_dict(weights)
    network = Fp16UNet(denoiser.unet.config, weights).predict if arm == "fp16" else denoiser.evaluate
    denoiser.evaluate = watched(network)
    return denoiser.draw


# ----------------------------------------------------------------------------------------------------- parts


def success(model: Model, args: argparse.Namespace, arm: str, factor: float) -> dict[str, Any]:
    """One arm on one set: counts, rates with intervals, pictures a second."""
    prompts = min(16, args.rollouts)
    seeds, captions = model.pool(prompts, args.rollouts // prompts, "success")
    track, retries = ARMS[arm]
    settings = Settings(keep=2, explore_steps=args.steps, explore_track=track, retries=retries)
    draw, began = draw_of(model, arm, factor), time.perf_counter()
    pool = explore(draw, _lenient(model.judge), seeds, captions, settings)
    took = time.perf_counter() - began
    return {k: int(v) for k, v in pool.counts.items()} | rates(pool.counts) | {
        "retries": retries, "steps": args.steps, "seconds": round(took, 2),
        "images_per_second": round(seeds.size / took, 1),
    }  # fmt: skip


def _lenient(judge: Judge) -> Callable[..., np.ndarray]:
    """A failure of the reward is counted here like any other."""

    def style(pictures: np.ndarray, prompts: Any) -> np.ndarray:
        return judge(pictures)

    return style


def scaling(model: Model, args: argparse.Namespace, factor: float) -> dict[str, Any]:
    """FP16 training with dynamic loss scaling from the trained weights, on one set."""
    from fp16_unet import Fp16UNet, largest, louder, train_fp16

    data, schedule, c = base_data(model), model.denoiser.schedule, model.config.base
    shape = (c.batch, *model.denoiser.shape)

    def batches() -> Iterator[tuple[np.ndarray, ...]]:
        for step in range(10**6, 10**6 + (5 if args.quick else args.scaling_steps)):  # none of the base's
            row, t, keep = data.draw(step, c.batch, c.drop_caption)
            x0, eps = data.pictures[row], normal(data.seeds["noise"], step, shape)
            noisy = np.ascontiguousarray(schedule.scale_input(schedule.add_noise(x0, eps, t), t))
            bags = np.ascontiguousarray(data.captions[row] * keep[:, None])
            yield noisy, t, bags, schedule.target(x0, eps, t, model.denoiser.prediction)

    weights = model.weights if factor == 1 else louder(model.weights, factor)
    config = model.denoiser.unet.config
    network = Fp16UNet(config, weights)
    found = train_fp16(network, batches(), 1e-5) | {"learning_rate": 1e-5, "batch": c.batch}
    x, t, bags, _ = next(batches())
    exact = Fp16UNet(config, weights, fp16=False)
    return found | {"largest_number_inside": largest(exact, x, t, bags), "largest_fp16": 65504}


def fidelity(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    """Rank fidelity of both tracks at several numbers of steps, for two rewards, against BF16 with all."""
    seeds, captions = model.pool(args.prompts, args.seeds, "fidelity")
    rows = [p for p in captions for _ in range(args.seeds)]
    rewards = {"style judge": _lenient(model.judge), "colourfulness": lambda x, p: colourfulness(x)}

    def arm(track: str, steps: int) -> dict[str, np.ndarray]:
        found, flat = {name: [] for name in rewards}, seeds.reshape(-1)
        for i in range(0, flat.size, GROUP):
            some = rows[i : i + GROUP]
            pictures = model.denoiser.draw(flat[i : i + GROUP], some, steps, track)
            for name, reward in rewards.items():
                found[name].append(rewards_of(reward, pictures, some, strict=False))
        values = {name: np.concatenate(v).reshape(seeds.shape) for name, v in found.items()}
        return {name: np.where(np.isfinite(v), v, np.nan) for name, v in values.items()}

    k = max(1, args.seeds // 8)
    true = arm("bf16", max(STEPS))
    arms = {(track, s): true if (track, s) == ("bf16", max(STEPS)) else arm(track, s)
            for track in ("bf16", "fp4") for s in STEPS}  # fmt: skip
    return {
        "prompts": args.prompts, "seeds": args.seeds, "k": k, "truth": f"bf16, {max(STEPS)} steps",
        "fp8": NO_FP8,
    } | {
        name: [{"track": t, "steps": s} | rank_fidelity(values[name], true[name], k)
               for (t, s), values in arms.items()]
        for name in rewards
    }  # fmt: skip


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak resident memory of an exploration in a process of its own, for pools of several sizes."""
    return [memory_in_a_process(n // 8 if args.quick else n) for n in POOLS]


def memory_in_a_process(size: int) -> dict[str, Any]:
    """`memory_of` this size in a fresh interpreter, whose peak nothing before it has raised."""
    command = [sys.executable, __file__, "--memory-of", str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def memory_of(size: int) -> dict[str, Any]:
    """Explore `size` rollouts of 32 x 32 pictures made from noise; this process's peak before and after."""

    def draw(seeds: np.ndarray, prompts: list[str], steps: int, track: str) -> np.ndarray:
        return normal(seeds, 0, (32, 32, 3))

    def mean(pictures: np.ndarray, prompts: list[str]) -> np.ndarray:
        return pictures.mean((1, 2, 3))

    settings = Settings(keep=2, chunk=256)
    explore(draw, mean, np.arange(512, dtype=np.uint64)[None], ["a"], settings)  # what is there once
    before = _peak_mb()
    explore(draw, mean, np.arange(size, dtype=np.uint64).reshape(4, -1), list("abcd"), settings)
    pictures = size * 32 * 32 * 3 * 4 / 2**20
    return {"pool": size, "peak_rss_mb": _peak_mb(), "peak_rss_mb_of_512": before,
            "all_pictures_mb": round(pictures, 1)}  # fmt: skip


def _peak_mb() -> float:
    """Largest resident memory of this program so far; that of `getrusage` counts its parent's as well."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return round(next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024, 1)
    except (OSError, StopIteration):
        return peak_rss_mb()


# ---------------------------------------------------------------------------------------------------- output


def run(args: argparse.Namespace) -> dict[str, Any]:
    """All parts that are asked for and not there yet; the file is written after each."""
    parts = args.parts.split(",")
    model = Model(args) if set(parts) - {"memory"} else None
    key = {"rollouts": args.rollouts, "steps": args.steps, "prompts": args.prompts, "seeds": args.seeds,
           "scaling_steps": args.scaling_steps, "quick": args.quick, "seed": args.seed,
           "preset": args.preset}  # fmt: skip
    key |= {"weights": model.digest} if model else {}
    result = _read(args, key)
    result["settings"] = result.get("settings", {}) | key
    result["explained"] = {"success": SUCCESS, "dynamic loss scaling": SCALING}

    def part(group: str, name: str, make: Callable[[], Any]) -> None:
        held = result.setdefault(group, {})
        if name not in held:
            print(f"{group}: {name}", flush=True)
            held[name] = make()
            result["about"] = host()
            write_json(str(args.out), result)

    for title, factor in SETS.items():
        for arm in ARMS if "success" in parts else ():
            part("success", f"{title}: {arm}", lambda a=arm, f=factor: success(model, args, a, f))
        if "scaling" in parts:
            part("fp16 with dynamic loss scaling", title, lambda f=factor: scaling(model, args, f))
    if "fidelity" in parts:
        part("fidelity", "before alignment", lambda: fidelity(model, args))
    if "memory" in parts:
        part("memory", "exploration, 32 x 32 pictures, chunks of 256", lambda: memory(args))
    return result


def _read(args: argparse.Namespace, key: dict[str, Any]) -> dict[str, Any]:
    """What an earlier call of the same settings and weights left."""
    if args.again or not args.out.exists():
        return {}
    try:
        found = json.loads(args.out.read_text())
        same = all(found["settings"].get(k, v) == v for k, v in key.items())
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return found if same else {}


def table(result: dict[str, Any]) -> str:
    """What was found, in lines."""
    lines = [f"{'success':48s} | first try | after retries [95 % interval]      | lost"]
    for name, r in result.get("success", {}).items():
        lines.append(f"{name:48s} | {r['first_try_rate']:9.3%} | {r['success_rate']:9.3%} "
                     f"[{r['success_low']:.3%}, {r['success_high']:.3%}] | {r['lost']}")  # fmt: skip
    for name, r in result.get("fp16 with dynamic loss scaling", {}).items():
        left = f"{r['updates_left_out']} of {r['steps']} updates left out"
        scale = f"scale {r['first_scale']:g} -> {r['last_scale']:g}"
        inside = f"largest number inside {r['largest_number_inside']:.4g}"
        lines.append(f"fp16 with dynamic loss scaling, {name}: {left}, {scale}, {inside}")
    for found in result.get("fidelity", {}).values():
        for reward in ("style judge", "colourfulness"):
            for r in found[reward]:
                hits = f"hit@{found['k']} {r['hit_best']:.2f} / {r['hit_worst']:.2f}"
                places = f"mean true rank {r['rank_best']:.1f} / {r['rank_worst']:.1f}"
                arm = f"{reward:16s} {r['track']} {r['steps']:2d} steps"
                lines.append(f"{arm} | Spearman {r['spearman']:.3f} | {hits} | {places}")
    for rows in result.get("memory", {}).values():
        for r in rows:
            lines.append(
                f"pool of {r['pool']:6d}: peak {r['peak_rss_mb']:.0f} MB, of 512: "
                f"{r['peak_rss_mb_of_512']:.0f} MB, all pictures: {r['all_pictures_mb']:.0f} MB"
            )
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(__file__).parent / "results" / "cpu" / "rollouts.json"
    parser.add_argument("--out", type=Path, default=default, help="file to write")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--rollouts", type=int, default=10_000, help="of an arm (default: 10000)")
    parser.add_argument("--steps", type=int, default=10, help="of a rollout (default: 10)")
    parser.add_argument("--prompts", type=int, default=16, help="of the rank fidelity (default: 16)")
    parser.add_argument("--seeds", type=int, default=96, help="a prompt of the rank fidelity (default: 96)")
    parser.add_argument("--scaling-steps", type=int, default=60, help="with loss scaling (default: 60)")
    parser.add_argument("--preset", choices=("faces16", "emoji32"), default="faces16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, help="the trained model; made there if it is missing")
    parser.add_argument("--again", action="store_true", help="do not use what is in --out")
    parser.add_argument("--quick", action="store_true", help="a test of the script")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {sorted(unknown)[0]!r} is none of {', '.join(PARTS)}")
    if args.quick:
        args.rollouts, args.steps, args.prompts, args.seeds = 64, 2, 2, 16
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.memory_of:
        print(json.dumps(memory_of(args.memory_of)))
        return 0
    print(table(run(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
