"""The ablation's arms at equal seconds: calibrations, and how many steps follow from them."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("safetensors", reason="the extra 'train' is not installed")
pytest.importorskip("PIL", reason="the extra 'train' is not installed")

from test_bench_ablation import ablation, here  # noqa: E402, F401  (a fixture)
from test_resume import SETTINGS  # noqa: E402


@pytest.fixture
def clock(ablation):  # noqa: F811
    return sys.modules["ablation_clock"]


class Machine:
    """Made-up times of an arm. once: more for the first step; sampled: more for a sampled one; curvature:
    beside it where that is measured; align: of an iteration of 8 updates (the first, plain, with fidelity).
    """

    def __init__(self, rng, loop, fidelity_every):
        self.loop, self.fidelity_every, self.once = loop, fidelity_every, rng.uniform(0, 3)
        self.step = 10 ** rng.uniform(-2.5, -1.8)
        self.sampled = rng.uniform(0.05, 0.3) * (loop.forward != "bf16")
        self.curvature = rng.uniform(0.5, 2) * (loop.sensitivity == "hutchinson")
        plain = rng.uniform(0.3, 1.0)
        self.align = plain + rng.uniform(0, 1), plain, plain + rng.uniform(0, 0.5)

    def took(self, n):
        """Seconds of base step `n`, from 1."""
        looks = n % self.loop.every == 0
        curves = looks and (n == self.loop.every or n % self.loop.curvature_every == 0)
        return self.step + self.once * (n == 1) + self.sampled * looks + self.curvature * curves

    def base(self, count):
        return sum(map(self.took, range(1, count + 1)))

    def iterations(self, count, steps):
        """Seconds of each of `count` iterations after so many base steps."""
        found = []
        for i in range(count):
            at = steps + 8 * i
            looks = (at + 8) // self.loop.every - at // self.loop.every
            which = 0 if i == 0 else 2 if i == count - 1 or i % self.fidelity_every == 0 else 1
            found.append(self.align[which] + self.sampled * looks)
        return found

    def lines(self, box, judges):
        """The metrics of a calibration."""
        found, now, n = [], 0.0, 0
        while not (n and box.full(n, now)):
            n += 1
            now += self.took(n)
            found.append({"stage": "base", "seconds": round(now, 3)})
        now += judges
        found.append({"stage": "probe", "seconds": round(now, 3)})
        for seconds in self.iterations(3, n):
            now += seconds
            found.append({"stage": "align", "seconds": round(now, 3), "updates": 8.0, "skipped": 0.0})
        return found


@pytest.mark.parametrize("forward, sensitivity", [
    ("bf16", "outputs"), ("fp4", "outputs"), ("router", "outputs"), ("router", "hutchinson"),
])  # fmt: skip
def test_equal_seconds_follow_from_the_stamps(ablation, clock, rng, forward, sensitivity):  # noqa: F811
    """Whatever the speed, base training and alignment together take what was asked for."""
    for _ in range(10):
        loop = SimpleNamespace(forward=forward, sensitivity=sensitivity, every=20, decide=100,
                               curvature_every=500)  # fmt: skip
        seconds, machine = rng.uniform(25, 60), Machine(rng, loop, int(rng.integers(1, 7)))
        lines = machine.lines(clock.Box(loop, ablation.BOX), rng.uniform(0, 30))
        config = SimpleNamespace(loop=loop, align=SimpleNamespace(fidelity_every=machine.fidelity_every))
        got = {key: int(value) for key, value in clock.counts(lines, seconds, config).items()}
        steps, n = got["base.steps"], got["align.iterations"]
        # A sampled step or a curvature more or less may fall into the seconds; stamps have milliseconds
        coarse = machine.step + machine.sampled + machine.curvature + 0.01 * seconds
        assert machine.base(steps) == pytest.approx(0.7 * seconds, abs=coarse)
        # In the alignment they are counted by their mean, and may fall on the first or the last update
        wobble = 2 * machine.sampled + machine.curvature + 0.01 * seconds
        assert sum(machine.iterations(n, steps)) <= 0.3 * seconds + wobble
        assert sum(machine.iterations(n + 1, steps)) >= 0.3 * seconds - wobble


def test_a_calibration_is_as_long_as_its_box(clock, rng):
    """After the warm steps, in whole periods: within the seconds, or one period where that is longer."""
    for _ in range(50):
        every = int(rng.integers(1, 60))
        loop = SimpleNamespace(forward=str(rng.choice(["bf16", "fp4", "router"])), every=every,
                               decide=every * int(rng.integers(1, 6)))  # fmt: skip
        step, seconds = 10 ** rng.uniform(-3, 0), rng.uniform(0.1, 6)
        box, n = clock.Box(loop, seconds), 1
        while not box.full(n, n * step):
            n += 1
        counted = n - clock.warm(loop)
        assert clock.warm(loop) >= 40 and counted > 0 and counted % clock.period(loop) == 0
        assert counted * step <= seconds * (1 + 1e-9) or counted == clock.period(loop)
        assert (counted + clock.period(loop)) * step > seconds * (1 - 1e-9)


def test_an_arm_of_so_many_seconds(ablation, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A calibration without evaluation; then as many steps as it says, judged by the judges that it made."""
    started = here(ablation, monkeypatch)
    monkeypatch.setattr(ablation, "BOX", 0.5)
    path = tmp_path / "a.json"
    small = [*(s for s in SETTINGS if not s.startswith("base.steps")), "loop.every=20", "loop.decide=20",
             "loop.curvature_every=20"]  # fmt: skip
    command = ["--preset", "ci", "--out", str(tmp_path), "--json", str(path), "--pictures", "8",
               "--seconds", "1", "--arms", "router", "--"]  # fmt: skip
    command += [part for setting in small for part in ("--set", setting)]
    assert ablation.main(command) == 0
    found, printed = json.loads(path.read_text()), capsys.readouterr().out
    assert len(started) == 2 and list(found["calibration"]) == ["router"]
    lines = ablation.arms.metrics(tmp_path / "calibration-router")
    stages = [line["stage"] for line in lines]
    assert stages.count("align") == 3 and "evaluate" not in stages and "summary" not in stages
    assert stages.count("judges") == 2 and (tmp_path / ablation.JUDGES).exists()  # reward and held-out
    base = [line["seconds"] for line in lines if line["stage"] == "base"]
    assert len(base) > 40 and len(base) % 20 == 0
    # What the box holds, or one period of steps where they are slow
    assert base[-1] - base[39] <= 0.6 or len(base) == 60
    row, times = found["arms"]["router"]["0"], found["calibration"]["router"]
    assert row["steps"] == int(times["base.steps"])
    assert row["iterations"] == int(times["align.iterations"])
    assert f"router: base.steps={times['base.steps']}" in printed and "router, seed 0: " in printed
    lines = ablation.arms.metrics(tmp_path / "router-0")
    assert [line["stage"] for line in lines].count("judges") == 0
