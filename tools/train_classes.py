"""Train the two class networks that ship (`fp4bf16.align.classes`) on the emoji pairs, on the CPU.

    python tools/train_classes.py                                     # both, into fp4bf16/align/assets
    python tools/train_classes.py --only heldout --out DIR            # one, into another folder
    python tools/train_classes.py --table                             # writes classes.tsv alone

Writes classes.tsv (the words of the classes with their counts), classes_NAME.safetensors (BF16) and
classes_NAME.json (recipe, SHA-256, accuracies and kernel distances). Network "reward" learns the captions of
the role "reward", "heldout" those of "heldout", and each its half of the policy's captions; captions of the
role "evaluation" are seen by neither, and accuracies are of these.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fp4bf16 import io  # noqa: E402
from fp4bf16._version import __version__  # noqa: E402
from fp4bf16.align import classes  # noqa: E402
from fp4bf16.align.augment import Augmentation, augment, drawn  # noqa: E402
from fp4bf16.align.fit import fit  # noqa: E402
from fp4bf16.align.resize import resize  # noqa: E402
from fp4bf16.cli.bench.record import commit  # noqa: E402
from fp4bf16.diffusion.noise import normal, permutation, subseed, uniform  # noqa: E402
from fp4bf16.nn import Linear, Module  # noqa: E402
from fp4bf16.nn import ops as F  # noqa: E402
from fp4bf16.train.data import Pairs, load_pairs, words_of  # noqa: E402

WORDS = 63
STREAM = 21  # of the random numbers drawn here
SETTINGS = {
    "batch": 32,  # captions a step, both drawings of each
    "lr": 3e-3,
    "weight_decay": 0.1,
    "smoothing": 0.1,  # share of the label that is spread over all classes
    "balance": 0.5,  # a caption is drawn with odds (captions of its class) ** -balance
    "small": [[16, 0.375], [8, 0.125]],  # pixels and share of the pictures that are brought to them and back
    "average": 0.995,  # of the weights; the average ships
    "damage": 4.0,  # weight of the loss by which the features must tell what was done to a picture
}
STRENGTH = Augmentation(shift=2, noise=0.25)
DAMAGES = ("blur", "noise", "pattern", "small")


def table(captions: tuple[str, ...]) -> list[tuple[str, int]]:
    """The `WORDS` words that most captions have, without the function words; ties in alphabetical order."""
    counts = Counter(w for caption in captions for w in set(words_of(caption)))
    named = [(w, n) for w, n in counts.items() if w not in classes.FUNCTION_WORDS]
    return sorted(named, key=lambda item: (-item[1], item[0]))[:WORDS]


def learned(pairs: Pairs, name: str) -> np.ndarray:
    """Which captions the network `name` learns: bool (n,)."""
    return np.array([
        role == name or (role == "policy" and classes.half(caption) == name)
        for caption, role in zip(pairs.captions, pairs.roles, strict=True)
    ])  # fmt: skip


def shrunk(x: np.ndarray, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Some captions' drawings (2, n, ...) brought to fewer pixels and back, as small pictures are, and by
    how many octaves: float32 (n,).
    """
    octaves = np.zeros(x.shape[1], np.float32)
    u = uniform(seed, step, x.shape[1], stream=STREAM + 1)
    for size, share in SETTINGS["small"]:
        chosen = (u >= 0) & (u < share)
        if chosen.any():
            few = x[:, chosen].reshape(-1, *x.shape[2:])
            x[:, chosen] = resize(resize(few, size), classes.SIZE).reshape(2, -1, *x.shape[2:])
            octaves[chosen] = math.log2(classes.SIZE / size)
        u = u - np.float32(share)
    return x, octaves


def learning_pictures(images: np.ndarray, seed: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """(changed drawings (2 n, 32, 32, 3), damage (2 n, 4), each of `DAMAGES` between 0 and 1)."""
    n = images.shape[1]
    amount = drawn(seed, step, n, STRENGTH)
    x, octaves = shrunk(augment(images, seed, step, STRENGTH), seed, step)
    damage = [amount[k] / np.float32(getattr(STRENGTH, k)) for k in DAMAGES[:3]] + [0.5 * octaves]
    return x.reshape(-1, *x.shape[2:]), np.tile(np.stack(damage, axis=1), (2, 1))


def loss_of(logits, labels: np.ndarray):
    """Cross-entropy with smoothed labels, mean over the pictures; logits (n, classes)."""
    count, share = logits.shape[1], SETTINGS["smoothing"]
    target = np.full(logits.shape, share / count, np.float32)
    target[np.arange(len(labels)), labels] += 1 - share
    return F.mul(F.sum(F.mul(F.log_softmax(logits), target)), -1.0 / len(labels))


class Training(Module):
    """A class network with a second head, which is not kept: what was done to the picture.

    A network that learns classes alone from noisy pictures learns not to see the noise, and distances
    between sets of its features would not see it either.
    """

    def __init__(self, network: Module, seed: int):
        self.network = network
        self.damage = Linear(classes.FEATURES, len(DAMAGES), seed=seed)

    def forward(self, x: np.ndarray, labels: np.ndarray, damage: np.ndarray):
        features = self.network.features(x)
        wrong = F.mean_squared_error(self.damage(features), damage)
        return loss_of(self.network.head(features), labels), wrong


def train(name: str, pairs: Pairs, steps: int, seed: int, report=print) -> tuple[classes.ClassNetwork, dict]:
    """(the averaged network, mean losses of the last 100 steps)."""
    model = classes.ClassNetwork.untrained(name, seed)
    seed = subseed(seed, "train_classes", name)
    mine = learned(pairs, name)
    images = pairs.images[:, mine]
    labels = classes.class_index([c for c, keep in zip(pairs.captions, mine, strict=True) if keep])
    odds = np.bincount(labels)[labels] ** -SETTINGS["balance"]
    cumulative = np.cumsum(odds / odds.sum())
    training = Training(model.network, seed)
    average, recent = training.flat.data.copy(), []

    def loss(step: int):
        u = uniform(seed, step, SETTINGS["batch"], stream=STREAM)
        chosen = np.minimum(np.searchsorted(cumulative, u), len(labels) - 1)
        x, damage = learning_pictures(images[:, chosen], seed, step)
        named, wrong = training(x, np.tile(labels[chosen], 2), damage)
        recent[:] = [*recent[-99:], (named.item(), wrong.item())]
        return F.add(named, F.mul(wrong, SETTINGS["damage"]))

    def on_step(step: int, _: float) -> None:
        nonlocal average
        keep = min(SETTINGS["average"], (1 + step) / (10 + step))
        average += np.float32(1 - keep) * (training.flat.data - average)
        if (step + 1) % 200 == 0:
            report(f"{name} step {step + 1}: losses {np.mean(recent, axis=0).round(3)}", flush=True)

    fit(
        training, loss, steps, lr=SETTINGS["lr"], weight_decay=SETTINGS["weight_decay"], warmup=50,
        on_step=on_step, name=f"class network {name}", track=model.track,
    )  # fmt: skip
    state = {k.removeprefix("network."): v for k, v in training.state_dict(average).items()}
    state = {k: v for k, v in state.items() if not k.startswith("damage.")}
    rounded = {k: v.astype(ml_dtypes.bfloat16) for k, v in state.items()}
    model.load_state_dict(rounded)
    return model, dict(zip(("classes", "damage"), map(float, np.mean(recent, axis=0)), strict=True))


def accuracy(model: classes.ClassNetwork, pairs: Pairs, size: int) -> dict[str, float]:
    """Top-1, top-5 and the share of the commonest class, over both drawings of the captions at `size`."""
    labels = np.tile(classes.class_index(pairs.captions), 2)
    pictures = resize(pairs.images.reshape(-1, *pairs.images.shape[2:]), size)
    order = np.argsort(-model.log_probabilities(pictures), axis=1)
    named = labels < WORDS  # without "other"
    return {
        "captions": len(pairs),
        "top1": float((order[:, 0] == labels).mean()),
        "top5": float((order[:, :5] == labels[:, None]).any(axis=1).mean()),
        "majority": float(np.bincount(labels).max() / len(labels)),
        "mean_recall": float(np.mean([(order[labels == c, 0] == c).mean() for c in np.unique(labels)])),
        "top1_without_other": float((order[named, 0] == labels[named]).mean()),
        "majority_without_other": float(np.bincount(labels[named]).max() / named.sum()),
    }


def kernel_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Unbiased squared MMD with the kernel (x.y / d + 1)^3 (Binkowski et al. 2018, section 3)."""

    def k(p, q):
        return (p.astype(np.float64) @ q.T / p.shape[1] + 1) ** 3

    def within(p):
        m = k(p, p)
        return (m.sum() - np.trace(m)) / (len(p) * (len(p) - 1))

    return float(within(a) + within(b) - 2 * k(a, b).mean())


def spoilt(x: np.ndarray, kind: str, amount: float, seed: int = 0) -> np.ndarray:
    """Pictures with blur (passes of (1, 2, 1) / 4), noise (standard deviation), or patches of `amount`
    pixels in random order, another for each picture.
    """
    if kind == "blur":
        for _ in range(int(amount)):
            for axis in (1, 2):
                ends = [(1, 1) if a == axis else (0, 0) for a in range(4)]
                p, n = np.pad(x, ends, mode="edge"), x.shape[axis]
                x = sum(w * p.take(range(i, i + n), axis=axis) for i, w in enumerate((0.25, 0.5, 0.25)))
        return x.astype(np.float32)
    if kind == "noise":
        noise = normal(seed, 0, x.shape, stream=STREAM + 2)
        return np.clip(x + np.float32(amount) * noise, -1, 1)
    n, side, p = len(x), x.shape[1], int(amount)
    tiles = x.reshape(n, side // p, p, side // p, p, 3).transpose(0, 1, 3, 2, 4, 5).reshape(n, -1, p, p, 3)
    tiles = np.stack([t[permutation(seed, i, len(t))] for i, t in enumerate(tiles)])
    grid = tiles.reshape(n, side // p, side // p, p, p, 3).transpose(0, 1, 3, 2, 4, 5)
    return grid.reshape(x.shape)


def noticed(model: classes.ClassNetwork, pairs: Pairs) -> dict[str, float]:
    """Kernel distances of one half of the captions' drawings, spoilt, from the other half's."""
    order = permutation(0, 0, len(pairs), stream=STREAM)
    a, b = (pairs.images[:, order[i::2]].reshape(-1, 32, 32, 3) for i in (0, 1))
    labels = np.tile(classes.class_index([pairs.captions[i] for i in order[1::2]]), 2)
    reference = model.features(a)
    sets = {"nothing": b}
    for kind, amounts in {"blur": (1, 2, 4), "noise": (0.1, 0.2, 0.4), "patches": (16, 8, 4)}.items():
        sets |= {f"{kind} {amount}": spoilt(b, kind, amount) for amount in amounts}
    kept = [i for i, _ in Counter(labels.tolist()).most_common()]
    for count in (32, 8, 1):  # only "other" and the commonest classes are left
        sets[f"classes {count}"] = b[np.isin(labels, kept[:count])]
    return {key: kernel_distance(model.features(x), reference) for key, x in sets.items()}


def measured(model: classes.ClassNetwork, pairs: Pairs) -> dict:
    """What is known of a network: by pictures of captions that it never saw."""
    other = {"reward": "heldout", "heldout": "reward"}[model.name]
    unseen = pairs.select(role="evaluation")
    return {
        "evaluation": {str(size): accuracy(model, unseen, size) for size in (8, 16, 32)},
        f"role {other}": {"32": accuracy(model, pairs.select(role=other), 32)},
        "kernel_distance": noticed(model, pairs.select(role=other)),
    }


def write(model: classes.ClassNetwork, folder: Path, recipe: dict) -> dict:
    """Weights and recipe into `folder`."""
    path = folder / f"classes_{model.name}.safetensors"
    arrays = {k: v.astype(ml_dtypes.bfloat16) for k, v in model.state_dict().items()}
    io.save(path, arrays)
    content = path.read_bytes()
    whole = {
        "file": path.name,
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "parameters": sum(a.size for a in arrays.values()),
        "architecture": type(model.network).__name__,
        **recipe,
    }
    path.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=tuple(classes.ARCHITECTURES))
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true", help="write classes.tsv alone")
    parser.add_argument("--out", type=Path, default=classes.ASSETS)
    args = parser.parse_args()
    pairs = load_pairs(classes.SIZE)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.table or args.out == classes.ASSETS:
        rows = ["word\tcaptions", *(f"{word}\t{count}" for word, count in table(pairs.captions))]
        (args.out / "classes.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    if args.table:
        return
    for name in [args.only] if args.only else classes.ARCHITECTURES:
        began = time.process_time(), time.perf_counter()
        model, losses = train(name, pairs, args.steps, args.seed)
        took = time.process_time() - began[0], time.perf_counter() - began[1]
        recipe = {
            "made_with": "tools/train_classes.py", "steps": args.steps, "seed": args.seed, **SETTINGS,
            "captions": int(learned(pairs, name).sum()),
            "learns": f"captions of the role {name} and its half of the policy's, in both drawing styles",
            "data": "fp4bf16/train/assets/pairs32.npz; see NOTICE there",
            "losses": losses, "cpu_seconds": round(took[0], 1), "seconds": round(took[1], 1),
            "version": __version__, "commit": commit(),
            "measured": measured(model, pairs),
        }  # fmt: skip
        print(json.dumps(write(model, args.out, recipe), indent=1))


if __name__ == "__main__":
    main()
