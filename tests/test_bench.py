"""The bench without a GPU: command line, goals, chart, timing, and the arms on an emulated library."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from host_cuda import host_cuda  # noqa: F401  (a fixture)

from fp4bf16.__main__ import main
from fp4bf16.cli.bench import arms, chart, cpu, goals, operands, raw, record, timing


# ---- the command
def test_the_command_measures_the_cpu_where_there_is_no_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cpu, "SPIN_SECONDS", 0.0)
    monkeypatch.setattr("fp4bf16.cli.bench.cuda.problem", lambda: "no GPU")
    files = {name: tmp_path / f"rows.{name}" for name in ("csv", "json", "svg")}
    named = ["--csv", str(files["csv"]), "--json", str(files["json"]), "--plot", str(files["svg"])]
    shape = ["--shapes", "16x48x32", "--commit", "0123abc"]
    status = main(["bench", "gemm", "--quick", "--goals", *shape, *named])
    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[0] == "bench: no GPU; measuring the CPU"
    last = json.loads(lines[-1])
    assert last["no float32 copy is kept"]["held"] is True and last["machine"]["commit"] == "0123abc"
    rows = list(csv.DictReader(files["csv"].open()))
    assert {r["shape"] for r in rows} == {"16x48x32"} and {r["commit"] for r in rows} == {"0123abc"}
    report = json.loads(files["json"].read_text())
    assert [r["track"] for r in report["rows"]] == [r["track"] for r in rows]
    assert "fp4 prepared" in files["svg"].read_text()


def test_the_goal_of_the_cpu_can_be_missed():
    kept = {"kept": 0, "float32_operand": 1}
    row = {"shape": list(cpu.GOAL_SHAPE), "track": "fp4 prepared", "x_np": 1.6}
    assert not all(g["held"] for g in cpu.goals([row], kept).values())
    assert all(g["held"] for g in cpu.goals([row | {"x_np": 1.4}], kept).values())
    assert not cpu.goals([], kept | {"kept": 1})["no float32 copy is kept"]["held"]


@pytest.mark.parametrize("arguments, sentence", [
    (["bench", "gemm", "--shapes", "4x4"], "'4x4' is not a shape M x N x K"),
    (["bench", "gem"], "'gem' is not a command; did you mean 'gemm'?"),
    (["bench"], "required"),
    (["bench", "gemm", "--shapes", "9999999999x1x1"], "'9999999999x1x1' is not a shape"),
    (["bench", "gemm", "--seed", "-1"], "'-1' is not a seed; give a whole number from 0"),
    (["bench", "gemm", "--csv", "."], ". is a folder; give the name of a file"),
    (["bench", "gemm", "--json", "/"], "/ is a folder; give"),
    (["bench", "gemm", "--plot", __file__ + "/a.svg"], "a.svg cannot be written, for "),
])  # fmt: skip
def test_wrong_command_lines_are_sentences(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2 and sentence in capsys.readouterr().err


def test_bench_quantize_needs_a_gpu(capsys):
    assert main(["bench", "quantize", "--cpu"]) == 2
    assert "bench/quantize.py" in capsys.readouterr().err


# ---- goals
def _rows(factor: float) -> list[dict]:
    """A run in which every number is `factor` times what its goal needs."""
    rows = []
    speed = {"bf16": 0.97, "fp4": 1.9, "fp4 fast": 2.0, "fp4 of bf16 a": 1.6, "cublas fp8 row": 1.9,
             "cublas fp8 row fast": 2.0}  # fmt: skip
    for shape in goals.SHAPES:
        rows.append({"op": "matmul", "shape": list(shape), "track": arms.YARDSTICK, "us": 1000.0})
        for track, x in speed.items():
            ours = factor if not track.startswith("cublas") else 1.0
            rows.append({"op": "matmul", "shape": list(shape), "track": track, "us": 1000.0 / (x * ours)})
    fp4 = 1000.0 / (1.9 * factor)
    for track, x in (("dual r64", 1.06 / factor), ("fp4, matmul, add", 1.3 * factor)):
        rows.append({"op": "matmul", "shape": list(goals.CUBE4), "track": track, "us": fp4 * x})
    for square in (goals.SQUARE, goals.SQUARE4):
        rows.append({"op": "quantize", "shape": list(square), "track": arms.COPY, "us": 50.0, "gb_s": 4000.0})
        for name in arms.QUANTISERS:
            rate = 4000.0 * (0.4 if "full" in name else 0.7) * factor
            rows.append({"op": "quantize", "shape": list(square), "track": name, "us": 50.0, "gb_s": rate})
        rows.append({"op": "quantize", "shape": list(square), "track": arms.WITH_T, "us": 62.5 / factor})
    for call, us in (("raw launch", 4.0), ("raw launch bf16", 4.0), ("matmul fp4 prepared", 4 + 10 / factor),
                     ("matmul bf16", 4 + 10 / factor)):  # fmt: skip
        rows.append({"op": "host", "shape": [128, 128, 128], "track": call, "us": us})
    return rows


def test_goals_are_held_or_missed_as_the_rows_say():
    held, missed, absent = (goals.results(r) for r in (_rows(1.01), _rows(0.8), []))
    assert all(g["held"] for g in held.values()), {k: g for k, g in held.items() if not g["held"]}
    assert not any(g["held"] for g in missed.values()), {k: g for k, g in missed.items() if g["held"]}
    assert not any(g["held"] for g in absent.values()) and {g["measured"] for g in absent.values()} == {None}
    wrong = goals.results([r | {"wrong": r["track"] == "fp4 fast"} for r in _rows(1.01)])
    assert {k for k, g in wrong.items() if not g["held"]} == {k for k in wrong if k.startswith("fp4 fast")}
    for part in ("bf16 16384x4608x1152", "fp4 32768x3072x768: x cuBLAS FP8", "dual r64", "mxfp4", "overhead"):
        assert any(part in key for key in held)
    json.dumps(held, allow_nan=False)


@pytest.mark.parametrize("factor, status", [(1.01, 0), (0.8, 1)])
def test_the_status_of_a_gpu_run_is_that_of_its_goals(factor, status, monkeypatch, tmp_path, capsys):
    rows = _rows(factor)
    report = {"machine": {"gpu": "NVIDIA H200", "driver": "1.2", "commit": None}}
    monkeypatch.setattr("fp4bf16.cli.bench.cuda.problem", lambda: None)
    monkeypatch.setattr("fp4bf16.cli.bench.cuda.run", lambda options: (report, rows, goals.results(rows)))
    command = ["bench", "gemm", "--commit", "0123abc", "--json", str(tmp_path / "g.json")]
    assert main([*command, "--goals"]) == status
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["machine"] == {"gpu": "NVIDIA H200", "driver": "1.2", "commit": "0123abc"}
    assert main(command) == 0
    assert ("MISSED" in capsys.readouterr().out) == bool(status)


def test_the_fastest_peer_counts():
    rows = [{"op": "matmul", "shape": [1, 1, 1], "track": t, "us": us} for t, us in
            (("x", 10.0), ("slow", 40.0), ("quick", 20.0))]  # fmt: skip
    table = {(r["op"], tuple(r["shape"]), r["track"]): r for r in rows}
    assert goals.times((1, 1, 1), "x", ("slow", "quick", "absent"))(table) == 2.0
    assert math.isnan(goals.times((1, 1, 1), "x", ("absent",))(table))


# ---- chart and lines
def test_the_chart_draws_every_row_that_has_a_rate():
    rows = [{"op": "matmul", "shape": [8, 8, 8], "track": "fp4 <fast>", "tflop_s": 10.0, "x_cublas": 2.0,
             "error": 0.1}, {"op": "matmul", "shape": [8, 8, 8], "track": "cublas bf16", "tflop_s": 5.0},
            {"op": "matmul", "shape": [8, 8, 8], "track": "refused", "tflop_s": None}]  # fmt: skip
    svg = chart.bars(rows, "a & b")
    assert svg.count("<rect") == 3 and "fp4 &lt;fast&gt;" in svg and "a &amp; b" in svg
    widths = [float(w) for w in re.findall(r'width="([\d.]+)" height="17"', svg)]
    assert widths[0] == pytest.approx(2 * widths[1], abs=0.2) and "refused" not in svg
    assert chart.OURS in svg and chart.PEER in svg


def test_lines_show_error_and_rate_or_why_there_is_none():
    arm = timing.Arm("fp4", lambda i: None, 1, flops=2e9, nbytes=10**6, seconds=[1e-3, 2e-3, 3e-3],
                     error=0.125, kernel_error=0.0017)  # fmt: skip
    r = record.row("matmul", (1, 2, 3), arm, 4000.0)
    assert (r["us"], r["us_p20"], r["us_p80"]) == (2e3, 1e3, 3e3)
    assert (r["tflop_s"], r["gb_s"], r["x_cublas"]) == (1.0, 0.5, 2.0)
    parts = [part.strip() for part in record.line(r).split("|")]
    assert parts == ["matmul 1x2x3 fp4", "2000.0", "1", "0", "2.00", "0.12", "0.0017"]
    refused = timing.Arm("x", None, note="ValueError: no")
    assert record.line(record.row("matmul", (1, 2, 3), refused, 1.0)).endswith("| ValueError: no")
    json.dumps(record.row("matmul", (1, 2, 3), refused, None), allow_nan=False)
    for error in (math.inf, 0.02):
        arm.kernel_error = error
        r = record.row("matmul", (1, 2, 3), arm, None)
        assert r["wrong"] and record.line(r).endswith("| WRONG RESULT")
        json.dumps(r, allow_nan=False)


# ---- timing
class FakeTorch:
    """Streams, events and graphs in which a launch takes what `cost` says."""

    def __init__(self):
        self.clock, self.recording = 0.0, None
        outer = self

        class Event:
            def __init__(self, enable_timing):
                self.at = math.nan

            def record(self):
                self.at = outer.clock

            def synchronize(self):
                pass

            def elapsed_time(self, end):
                return (end.at - self.at) * 1e3

        class Graph:
            def __init__(self):
                self.costs = []

            def replay(self):
                outer.clock += sum(self.costs)

        class Capture:
            def __init__(self, graph):
                self.graph = graph

            def __enter__(self):
                outer.recording = self.graph

            def __exit__(self, *error):
                outer.recording = None

        self.cuda = SimpleNamespace(Event=Event, CUDAGraph=Graph, graph=Capture, synchronize=lambda: None)

    def launch(self, cost):
        if self.recording is not None:
            self.recording.costs.append(cost)
        else:
            self.clock += cost


def test_every_reading_is_a_mean_over_cold_sets():
    torch, seen = FakeTorch(), []

    def run(i):
        seen.append(i)
        torch.launch(1e-4)

    slow = timing.Arm("slow", lambda i: torch.launch(3e-3), sets=2)
    arm = timing.Arm("arm", run, sets=3, check=lambda: (0.1, 0.0))
    broken = timing.Arm("broken", lambda i: 1 / 0, sets=3, note="noted")
    absent = timing.Arm("absent", None, note="not installed")
    for one in (arm, slow, broken, absent):
        timing.prepare(torch, one)
    assert broken.graph is None and broken.note == "noted; ZeroDivisionError: division by zero"
    assert absent.graph is None and absent.note == "not installed"
    assert arm.calls % 3 == 0 and arm.calls * 1e-4 >= 0.8 * timing.REGION and slow.calls == 2
    assert seen[-arm.calls :] == [i % 3 for i in range(arm.calls)]
    timing.measure(torch, [arm, slow, broken], rounds=5, warm_up=0.01)
    assert arm.seconds == pytest.approx([1e-4] * 5) and slow.median == pytest.approx(3e-3)
    assert (arm.error, arm.kernel_error, broken.seconds) == (0.1, 0.0, [])
    timing.measure(torch, [broken], rounds=5)  # nothing to do


# ---- bench/quickstart.py
def test_the_quickstarts_goals_bind_the_main_job_alone(capsys):
    path = Path(__file__).resolve().parents[1] / "bench" / "quickstart.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    quickstart = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(quickstart)
    rows = [{"goal": g, "measured": m, "must_be": ">= 0.85", "met": m >= 0.85}
            for g, m in (("a", 0.9), ("b", 0.8))]  # fmt: skip
    assert quickstart.verdict("faces16", rows) == 1 and "MISSED  b: 0.8 (>= 0.85)" in capsys.readouterr().out
    assert quickstart.verdict("faces16", rows[:1]) == 0
    capsys.readouterr()
    assert quickstart.verdict("emoji32", rows) == 0
    said = capsys.readouterr().out
    assert "goals of faces16, which are not set for it" in said and "beyond  b: 0.8 (>= 0.85)" in said


# ---- the arms, on the emulated library
@pytest.fixture
def emulated(host_cuda):  # noqa: F811
    torch, host_cuda.tracked = pytest.importorskip("torch"), False
    return torch, raw.Raw(torch, "cpu")


def test_arms_compute_what_they_say(emulated):
    torch, library = emulated
    sets = [operands.Operands(torch, library, 64, 48, 80) for _ in range(2)]
    made = arms.Arms(torch, library, sets)
    every = [made.cublas_bf16(), made.bf16(), made.fp4(False), made.fp4(True), made.fp4_of_bf16()]
    every += [made.dual(how) for how in ("dual r64", "fp4, matmul, add", "fp4, addmm")]
    for arm in every:
        error, of_kernel = arm.check()
        assert of_kernel < 5e-3, (arm.name, error, of_kernel)
        assert (error < 5e-3) == ("bf16" in arm.name and "fp4" not in arm.name), (arm.name, error)
        assert error < 0.2
    names = {a.name for a in made.all(dual=True, triton=False)}
    assert {a.name for a in every} < names


def test_an_arm_that_writes_nothing_or_something_else_is_found_out(emulated):
    torch, library = emulated
    made = arms.Arms(torch, library, [operands.Operands(torch, library, 32, 32, 32) for _ in range(2)])
    exact = lambda: made.first.exact  # noqa: E731
    idle = made.arm("idle", lambda s: None, exact, exact, 2, 2)
    assert idle.check() == (math.inf, math.inf)
    half = made.arm("half", lambda s: s.d[:16].copy_((s.a @ s.w.T)[:16]), exact, exact, 2, 2)
    assert half.check() == (math.inf, math.inf)
    other = made.arm("other", lambda s: s.d.copy_(s.a @ s.w), exact, exact, 2, 2)
    assert other.check()[1] > 1


def test_quantisers_are_compared_with_the_reference(emulated):
    torch, library = emulated
    made = arms.quantise_arms(torch, library, 32, 96, l2=0, with_t=True)
    assert [a.name for a in made] == [arms.COPY, *arms.QUANTISERS, arms.WITH_T]
    for arm in made:
        for i in range(arm.sets):
            arm.run(i)
        if arm.check is not None and "tensor" not in arm.name:
            error, differing = arm.check()
            assert differing == 0.0 and error < 0.2, (arm.name, error, differing)
    assert made[1].nbytes == 32 * 96 * 3 + 32 * 4


def test_a_quantiser_that_makes_another_t_is_found_out(emulated, monkeypatch):
    torch, library = emulated
    given, held = library.quantize_args, []

    def other(*args, down_t=None, **how):
        held.append(None if down_t is None else 2 * down_t)
        return given(*args, down_t=held[-1], **how)

    monkeypatch.setattr(library, "quantize_args", other)
    arm = arms.quantise_arms(torch, library, 32, 96, l2=0, with_t=True)[-1]
    for i in range(arm.sets):
        arm.run(i)
    error, of_kernel = arm.check()
    assert error > 0.9 and of_kernel == math.inf


def test_operand_sets_exceed_the_cache():
    assert timing.sets_needed(arms.set_bytes((4096, 4096, 4096)), 60 << 20) == 3
    for shape in goals.SHAPES:
        n = timing.sets_needed(arms.set_bytes(shape), 60 << 20)
        assert (n - 1) * arms.set_bytes(shape) >= 2 * (60 << 20)


@pytest.mark.gpu
def test_a_quick_run_on_the_gpu(tmp_path, capsys):
    from fp4bf16.cli.bench import cuda

    if (problem := cuda.problem()) is not None:
        pytest.skip(f"no GPU to measure: {problem}")
    target = tmp_path / "gemm.json"
    main(["bench", "gemm", "--quick", "--no-triton", "--goals", "--json", str(target)])
    held = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = json.loads(target.read_text())["rows"]
    assert held.keys() > goals.results([]).keys()
    for r in rows:
        if r["op"] == "matmul" and not r["track"].startswith("cublas fp8"):
            assert r["us"] > 0 and r["kernel_error"] < 1e-2, r
        if r["op"] == "quantize" and r["track"] != arms.COPY and "tensor" not in r["track"]:
            assert r["us"] > 0 and r["kernel_error"] == 0, r
