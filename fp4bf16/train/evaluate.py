"""Evaluation: the base and the aligned model draw the same captions from the same noise, on BF16 with all
steps.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..align.guards import Guards
from ..align.rollout import healthy
from ..diffusion.noise import integers
from .pictures import from_bytes, grid, png, to_bytes
from .state import Run

PROBE = 64  # pictures looked at after every iteration


def cases(run: Run) -> tuple[list[str], np.ndarray]:
    """(captions, seeds), one entry a picture: every caption `eval.seeds` times, seed after seed."""
    c = run.config.eval
    captions = list(run.eval_captions)[: c.captions or None]
    seeds = integers(run.seed("evaluation"), 0, len(captions) * c.seeds, 0, 2**32).astype(np.uint64)
    return captions * c.seeds, seeds


def measure(run: Run, pictures: np.ndarray) -> dict[str, Any]:
    """Judges of a set of pictures that all are healthy; probabilities are of the winning style."""
    heldout = run.judges["heldout"].probability(pictures)
    return {
        "heldout": float((heldout > 0.5).mean()),
        "heldout_probability": float(heldout.mean()),
        "reward": float(run.judges["reward"].probability(pictures).mean()),
    }


def guards(run: Run) -> Guards:
    """Guards against the real pictures of the winning style and the base model's pictures."""
    real = run.pairs.select(word=run.config.word or None).style(run.config.winner)
    base = from_bytes(run.arrays["base.pictures"])
    return Guards(real, base[healthy(base)])


def evaluate(run: Run, name: str) -> None:
    """Draw the evaluation pictures, score them, keep both under `name` ("base" or "aligned")."""
    captions, seeds = cases(run)
    run.progress.stage("evaluate", len(captions), 0, f"{len(captions)} pictures of the {name} model")
    pictures = run.engine.draw(seeds, captions, run.config.eval.steps, "bf16")
    good = healthy(pictures)
    heldout = np.zeros(len(pictures))
    heldout[good] = run.judges["heldout"].probability(pictures[good])
    run.arrays[f"{name}.pictures"], run.arrays[f"{name}.heldout"] = to_bytes(pictures), heldout
    run.results[name] = measure(run, pictures[good]) | {"unhealthy": int((~good).sum())}
    run.results[name]["heldout"] = float((heldout > 0.5).mean())  # a broken picture counts as lost
    run.results[name]["guards"] = guards(run).check(pictures[good]).as_dict()
    run.log(
        **{k: v for k, v in run.results[name].items() if k != "guards"}, guards=run.results[name]["guards"]
    )
    sheet = grid(run.arrays[f"{name}.pictures"][: min(len(captions), 96)], columns=12)
    (run.folder.samples / f"{name}.png").write_bytes(png(sheet, scale=3))
    run.progress.step(len(captions), heldout=run.results[name]["heldout"], reward=run.results[name]["reward"])


def probe(run: Run) -> dict[str, float]:
    """Judges and guards on a few pictures, always the same captions and noise."""
    captions, seeds = cases(run)
    pictures = run.engine.draw(seeds[:PROBE], captions[:PROBE], run.config.eval.steps, "bf16")
    pictures = pictures[healthy(pictures)]
    if len(pictures) < 2:
        return {"heldout": float("nan"), "reward": float("nan")}
    report = guards(run).check(pictures)
    seen = measure(run, pictures)
    return {
        "heldout": seen["heldout_probability"],
        "reward": seen["reward"],
        "pixel_distance": report["pixel_distance"].value,
        "pattern": report["pattern_2x2"].value,
        "contrast": report["contrast"].value,
        "colourfulness": report["colourfulness"].value,
    }
