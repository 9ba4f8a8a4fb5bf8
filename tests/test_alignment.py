"""The alignment of a run: every objective from the command line to the summary, guards that take an iteration
back, data of one's own, workers.
"""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
Image = pytest.importorskip("PIL.Image", reason="the extra 'train' is not installed")

from often import in_ci  # noqa: E402
from test_resume import SETTINGS  # noqa: E402

from fp4bf16.__main__ import main  # noqa: E402
from fp4bf16.align.guards import Guard, GuardReport  # noqa: E402
from fp4bf16.errors import NonFiniteError  # noqa: E402
from fp4bf16.train import alignment, checkpoint, progress  # noqa: E402
from fp4bf16.train.config import get_preset, override, with_objective  # noqa: E402
from fp4bf16.train.data import load_pairs  # noqa: E402
from fp4bf16.train.engine import HostEngine  # noqa: E402
from fp4bf16.train.run import train  # noqa: E402
from fp4bf16.train.state import Run  # noqa: E402
from fp4bf16.train.task import OwnTask, make_task  # noqa: E402


def tiny(*more: str, objective: str = "dpo"):
    steps = ["align.explore_steps=2"] if objective == "ppo" else []
    return override(with_objective(get_preset("ci"), objective), [*SETTINGS, *steps, *more])


def run(out, *more: str, objective: str = "dpo"):
    said = io.StringIO()
    summary = train(tiny(*more, objective=objective), out, progress.Progress(said))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return summary, [line for line in lines if line["stage"] == "align"], said.getvalue()


@in_ci("objective, parameters", [(o, p) for o in ("dpo", "nft", "ppo") for p in ("full", "lora")],
       ("dpo", "full"), ("nft", "lora"), ("ppo", "full"), ("ppo", "lora"))  # fmt: skip
def test_every_objective_from_config_to_summary(tmp_path, objective, parameters):
    more = [f"align.parameters={parameters}", "lora.rank=2"]
    summary, lines, _ = run(tmp_path / "run", *more, objective=objective)
    assert summary["objective"] == objective and len(lines) == 2
    assert all(line["updates"] > 0 and np.isfinite(line["loss"]) for line in lines)
    if objective == "dpo":
        assert lines[0]["first_loss"] == float(np.log(2))
    if objective == "ppo":
        assert [line["first_ratio"] for line in lines] == [1.0, 1.0]
    for key in ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl"):
        assert (key in lines[0]) == (objective != "ppo" or key == "kl"), key
    arrays, _ = checkpoint.load(tmp_path / "run" / "checkpoint.safetensors")
    base, policy = checkpoint.take(arrays, "ema"), checkpoint.take(arrays, "policy")
    moved = {name for name in base if not np.array_equal(base[name], policy[name])}
    assert moved and (parameters == "full" or not any("norm" in name for name in moved))


def test_rollout_statistics_are_logged(tmp_path):
    summary, lines, _ = run(tmp_path / "run")
    assert summary["rollouts"] == 2 * 3 * 4 and summary["success_rate"] == 1.0
    assert round(summary["success_low"], 3) == 0.862 and summary["success_high"] == 1.0  # Wilson, 24 of 24
    for line in lines:
        assert len(line["reward/prompts"]) == 3 and line["success_rate"] == 1.0
        assert {"fidelity/fp4/spearman", "fidelity/fp4/hit_best", "fidelity/fp4/rank_best"} <= set(line)


def report(*broken: str, by: float = 0.5) -> GuardReport:
    """Of two guards, some of them broken by so many widths of their range."""
    names = ("pixel_distance", "contrast")
    return GuardReport(
        tuple(
            Guard(n, 2.0 + 2 * by, 0.0, 2.0, f"{n}: bad") if n in broken else Guard(n, 1.0, 0.0, 2.0, "")
            for n in names
        )
    )


@pytest.fixture
def guarded(monkeypatch):
    """The guards' answers, one a probe: the base's, then one after each iteration."""
    answers = []

    def probe(run):
        return {"heldout": 0.5, "reward": 0.5}, answers.pop(0)

    monkeypatch.setattr(alignment, "probe", probe)
    return answers


def changed(out) -> float:
    arrays, _ = checkpoint.load(out / "checkpoint.safetensors")
    base, policy = checkpoint.take(arrays, "ema"), checkpoint.take(arrays, "policy")
    return max(float(np.abs(base[k] - policy[k]).max()) for k in base)


def test_a_broken_guard_takes_the_iteration_back(tmp_path, guarded):
    guarded[:] = [report(), report("contrast"), report("contrast")]
    summary, lines, said = run(tmp_path / "held")
    assert summary["taken_back"] == 2 and changed(tmp_path / "held") == 0.0
    assert [line["taken_back"] for line in lines] == [True, True]
    assert [line["trust"] for line in lines] == [0.5, 0.25] and lines[1]["lr"] < lines[0]["lr"]
    assert "iteration 1 is taken back: contrast: bad" in said

    guarded[:] = [report(), report("contrast"), report("contrast")]
    summary, lines, said = run(tmp_path / "warned", "align.guard=warn")
    assert summary["taken_back"] == 0 and changed(tmp_path / "warned") > 0
    assert [line["broken"] for line in lines] == [["contrast: bad"]] * 2
    assert [line["trust"] for line in lines] == [1.0, 1.0] and "warning: iteration 2: contrast: bad" in said


def test_a_guard_that_the_base_breaks_holds_nobody_up(tmp_path, guarded):
    guarded[:] = [report("contrast"), report("contrast", by=0.55), report("contrast", by=0.7)]
    summary, lines, said = run(tmp_path / "run")
    assert [line["taken_back"] for line in lines] == [False, True]  # unless it gets worse
    assert changed(tmp_path / "run") > 0 and "the base model breaks a guard" in said


def test_pictures_that_are_not_healthy_are_a_broken_guard(tmp_path, guarded):
    guarded[:] = [report(), None, report()]
    summary, lines, said = run(tmp_path / "run")
    assert summary["taken_back"] == 1 and "not finite, or constant" in said


def test_updates_that_are_not_finite_end_the_run(tmp_path, monkeypatch):
    """Ten in a row, over iterations and a resume; one alone leaves the means of its iteration as they are."""
    step = HostEngine.policy_step
    bad = {"count": 0, "until": 1}

    def broken(self, data, some, lr):
        result = step(self, data, some, lr)
        bad["count"] += 1
        return result._replace(loss=float("nan")) if bad["count"] <= bad["until"] else result

    monkeypatch.setattr(HostEngine, "policy_step", broken)
    summary, lines, _ = run(tmp_path / "one", "align.batch=2")
    assert lines[0]["skipped"] == 1 and np.isfinite(lines[0]["loss"]) and np.isfinite(lines[0]["grad_norm"])
    bad |= {"count": 0, "until": 10**6}
    with pytest.raises(NonFiniteError, match="10 updates in a row .* lower align.lr"):
        run(tmp_path / "all", "align.batch=2", "align.iterations=9")
    with pytest.raises(NonFiniteError, match="10 updates in a row"):
        run(tmp_path / "all", "align.batch=2", "align.iterations=9")
    assert bad["count"] < 20


def test_a_model_that_draws_nothing_is_reported(tmp_path, monkeypatch):
    """Training ends, and its report says what has become of it."""
    draw = HostEngine.draw

    def collapsed(self, seeds, captions, steps, track="bf16"):
        pictures = draw(self, seeds, captions, steps, track)
        return pictures if self.updates == 0 or steps == 1 else np.zeros_like(pictures)

    monkeypatch.setattr(HostEngine, "draw", collapsed)
    monkeypatch.setattr(HostEngine, "collect", draw)
    summary, _, said = run(tmp_path / "run", "align.guard=warn")
    assert summary["guards_broken"] == ["pictures that are finite and not constant"]
    assert "finite and not constant" in (tmp_path / "run" / "report.html").read_text()


def test_workers_change_nothing(tmp_path):
    a, b = tmp_path / "alone", tmp_path / "workers"
    for objective in ("nft",):  # explores with the old policy
        run(a, objective=objective)
        run(b, "align.workers=2", objective=objective)
        (x, _), (y, _) = (checkpoint.load(out / "checkpoint.safetensors") for out in (a, b))
        assert set(x) == set(y)
        for name in x:
            np.testing.assert_array_equal(x[name], y[name])


def test_offline_pairs_of_the_emoji(tmp_path):
    summary, lines, _ = run(tmp_path / "run", "align.pairs=data")
    assert lines[0]["first_loss"] == float(np.log(2)) and lines[0]["pairs"] == 3.0
    assert "rollouts" not in summary and summary["spearman_fp4"] is None
    assert "pairs that others judged" in (tmp_path / "run" / "report.html").read_text()


def test_several_rewards_at_once(tmp_path):
    summary, _, _ = run(tmp_path / "run", "align.reward=style + 0.5 colourfulness - jpeg")
    assert summary["rewards"] == "style + 0.5 colourfulness - jpeg"
    assert summary["heldout_unit"] == "standard deviations" and np.isfinite(summary["heldout_gain"])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "standard deviations" in page and " points<" not in page


def test_a_sum_of_rewards_is_shown_on_one_scale(tmp_path, guarded):
    """What changes nothing in the weights gains nothing, though the scales of the labels have moved."""
    guarded[:] = [report(), report("contrast"), report("contrast")]
    summary, lines, _ = run(tmp_path / "run", "align.reward=colourfulness + jpeg")
    assert summary["taken_back"] == 2 and summary["heldout_gain"] == 0 == summary["heldout_gain_low"]
    assert summary["reward"] == summary["reward_base"]


def test_slopes_and_objective_stand_in_the_report(tmp_path):
    run(tmp_path / "run", objective="ppo")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "aligned by PPO" in page and "slope" in page and "rollouts gave a good picture" in page


# ------------------------------------------------------------------------------------------ data of one's own


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """(a folder of captioned pictures, a folder of pairs with a table), from the emoji."""
    emoji, root = load_pairs(32), tmp_path_factory.mktemp("own")
    (root / "pictures").mkdir()
    (root / "pairs").mkdir()
    rows = ["chosen,rejected,caption"]
    for i in range(120):
        for k, folder in ((0, "pictures"), (0, "pairs"), (1, "pairs")):
            picture = np.rint((emoji.images[k, i] + 1) * 127.5).astype(np.uint8)
            Image.fromarray(picture).save(root / folder / f"{i}_{k}.png")
        (root / "pictures" / f"{i}_0.txt").write_text(emoji.captions[i])
        rows.append(f"{i}_0.png,{i}_1.png,{emoji.captions[i].replace(',', ' ')}")
    (root / "pairs" / "pairs.csv").write_text("\n".join(rows) + "\n")
    return root / "pictures", root / "pairs"


def settings(own, which: str, *more: str) -> list[str]:
    path = own[which == "pairs"]
    return [f"data.{which}={path}", "word=", "data.shuffle=24", "align.prompts=2", *more]


def test_pictures_of_ones_own(tmp_path, own):
    """The stream goes on where it was left: a run stopped anywhere in a window ends on the same bits."""
    one, two = tmp_path / "one", tmp_path / "two"
    more = settings(own, "pictures", "align.reward=colourfulness", "size=16")
    summary, _, said = run(one, *more)
    assert summary["rewards"] == "colourfulness" and "pictures skipped" in said
    done, stops = Run.done, [1, 3, 4, 7, 11, 15]

    def interrupted(self, step, save=False):
        if self.stage == "base" and stops and step == stops[0]:
            stops.pop(0)
            self.stop.asked = 2
        done(self, step, save)

    for _ in range(7):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Run, "done", interrupted)
            try:
                run(two, *more)
            except Exception as error:
                assert type(error).__name__ == "Stopped"
    assert not stops
    (a, _), (b, _) = (checkpoint.load(out / "checkpoint.safetensors") for out in (one, two))
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


@pytest.mark.parametrize("offline", [False, True])
def test_pairs_of_ones_own(tmp_path, own, offline):
    more = ["align.pairs=data"] if offline else []
    summary, lines, _ = run(tmp_path / "run", *settings(own, "pairs", "align.reward=preference", *more))
    assert summary["heldout_unit"] == "points" and lines[0]["first_loss"] == float(np.log(2))
    assert set(summary["judge_accuracy"]) == {"preference/reward", "preference/heldout"}


def test_captions_have_one_role(own):
    task = make_task(tiny(*settings(own, "pairs", "align.reward=preference")))
    assert isinstance(task, OwnTask) and sum(task.counts.values()) == 120
    data = task.panel_data()
    roles = [set(part.captions) for part in (data.reward, data.heldout, data.policy, data.test)]
    assert sum(map(len, roles)) == len(set().union(*roles)) == 120
    assert set(task.prompts) == roles[2] and roles[3] <= set(task.eval_captions)


def fails(capsys, *arguments: str) -> str:
    assert main(["train", "--preset", "ci", *arguments]) == 2
    out, err = capsys.readouterr()
    assert "Traceback" not in err and err.count("\n") == 1
    return err


def test_what_does_not_go_together(tmp_path, own, capsys):
    out = ["--out", str(tmp_path / "run")]
    pictures = str(own[0])
    assert "style learns from pairs, but data.pictures holds pictures alone" in fails(
        capsys, *out, "--data", pictures
    )
    assert "holds pictures without preferences" in fails(
        capsys, *out, "--data", pictures, "--offline", "--reward", "jpeg"
    )
    assert "there is no" in fails(capsys, *out, "--data", str(tmp_path / "nowhere"), "--reward", "jpeg")
    for setting, sentence in (
        ("align.objective=dpoo", "align.objective: 'dpoo' is not known; did you mean 'dpo'"),
        ("align.reward=styl", "did you mean 'style'"),
        ("align.guard=on", "align.guard: 'on' is not known"),
        ("diffusion.sampler=eular", "did you mean 'euler'"),
        ("ppo.clip=0", "ppo.clip: is 0.0, but it must be positive"),
        ("align.workers=-1", "align.workers: is -1"),
        ("lora.rank=0", "lora.rank: is 0"),
    ):
        assert sentence in fails(capsys, *out, "--set", setting)
    assert "needs rewards of its own pictures" in fails(capsys, *out, "--objective", "nft", "--offline")
    assert "needs the likelihood of its own samples" in fails(
        capsys, *out, "--objective", "ppo", "--set", "align.train_on=fp4"
    )
    assert fails(capsys, *out, "--log", "tensorbord").count("tensorboard")
