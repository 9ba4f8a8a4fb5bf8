"""Evaluation within a run: the base and the aligned model draw the same captions from the same noise, on BF16
with all steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..align.guards import GuardReport, Guards
from ..align.panel import Panel
from ..align.rollout import healthy
from ..diffusion.noise import integers
from ..errors import NonFiniteError
from .pictures import from_bytes, grid, to_bytes
from .state import Run

PROBE = 64  # pictures looked at after every iteration


def cases(run: Run) -> tuple[list[str], np.ndarray]:
    """(captions, seeds), one entry a picture: every caption `eval.seeds` times, seed after seed."""
    c = run.config.eval
    captions = list(run.task.eval_captions)[: c.captions or None]
    seeds = integers(run.seed("evaluation"), 0, len(captions) * c.seeds, 0, 2**32).astype(np.uint64)
    return captions * c.seeds, seeds


def by_probability(panel: Panel) -> bool:
    """Whether the panel is one pair of judges that say yes or no: their answers are shown as a share."""
    return len(panel.parts) == 1 and panel.parts[0].unit == "probability" and panel.parts[0].weight > 0


def unit(panel: Panel) -> str:
    """Of the numbers that `judge` gives."""
    if len(panel.parts) > 1:
        return "standard deviations"
    part = panel.parts[0]
    if by_probability(panel):
        return part.unit
    if part.unit == "probability":  # minus log-odds, or so many times them
        return "log-odds"
    return part.unit if abs(part.weight) == 1 else f"{abs(part.weight):g} x {part.unit}".strip()


def judge(panel: Panel, pictures: np.ndarray, captions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """(reward, held-out judge) of pictures, float64 (n,) each: a probability where the judges say yes or no;
    else what is raised, in `unit`. A picture that is not healthy has probability 0, or NaN.
    """
    probability = by_probability(panel)
    found = np.full((2, len(pictures)), 0.0 if probability else np.nan)
    good = np.flatnonzero(healthy(pictures))
    if good.size:
        some, prompts = pictures[good], [captions[i] for i in good]
        part = panel.parts[0]
        found[:, good] = (
            (part.shown(some, prompts), part.shown_heldout(some, prompts))
            if probability
            else (panel.shown_reward(some, prompts), panel.shown_heldout(some, prompts))
        )
    return found[0], found[1]


def guards(run: Run) -> Guards:
    """Guards against the real pictures of what is wanted and the base model's pictures."""
    if run.guards is None:
        base = from_bytes(run.arrays["base.pictures"])
        good = healthy(base)
        if good.sum() < 2:
            raise NonFiniteError(
                f"evaluate: {int((~good).sum())} of the base model's {len(good)} pictures are not finite, or "
                f"constant; train it longer (base.steps), with a lower rate (base.lr), or begin with other "
                f"weights (--from)"
            )
        run.guards = Guards(run.task.real(), base[good])
    return run.guards


def evaluate(run: Run, name: str) -> None:
    """Draw the evaluation pictures, score them, keep both under `name` ("base" or "aligned")."""
    captions, seeds = cases(run)
    run.progress.stage("evaluate", len(captions), 0, f"{len(captions)} pictures of the {name} model")
    pictures = run.engine.draw(seeds, captions, run.config.eval.steps, "bf16")
    good = healthy(pictures)
    reward, heldout = judge(run.panel, pictures, captions)
    run.arrays |= {
        f"{name}.pictures": to_bytes(pictures), f"{name}.heldout": heldout, f"{name}.reward": reward,
    }  # fmt: skip
    results = {"reward": float(np.nanmean(reward)), "unhealthy": int((~good).sum())}
    if by_probability(run.panel):
        results |= {"heldout": float((heldout > 0.5).mean()), "heldout_probability": float(heldout.mean())}
    else:
        results["heldout"] = float(np.nanmean(heldout))
    # A model that draws no two good pictures is told so by the report, not by an error.
    results["guards"] = guards(run).check(pictures[good]).as_dict() if good.sum() > 1 else {}
    run.results[name] = results
    run.log(**results)
    sheet = grid(run.arrays[f"{name}.pictures"][: min(len(captions), 96)], columns=12)
    run.folder.picture(name, sheet, scale=3)
    run.progress.step(len(captions), heldout=results["heldout"], reward=results["reward"])


def probe(run: Run) -> tuple[dict[str, float], GuardReport | None]:
    """Judges and guards on a few pictures, always the same captions and noise; no report where fewer than two
    of them are healthy.
    """
    captions, seeds = cases(run)
    pictures = run.engine.draw(seeds[:PROBE], captions[:PROBE], run.config.eval.steps, "bf16")
    reward, heldout = judge(run.panel, pictures, captions[:PROBE])
    good = healthy(pictures)
    if good.sum() < 2:
        return {"heldout": float("nan"), "reward": float("nan")}, None
    report = guards(run).check(pictures[good])
    seen = {"heldout": float(np.nanmean(heldout)), "reward": float(np.nanmean(reward))}
    names = {"pattern_2x2": "pattern"} | {g.name: g.name for g in report.guards if g.name != "pattern_2x2"}
    return seen | {short: report[name].value for name, short in names.items()}, report
