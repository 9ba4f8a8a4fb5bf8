"""The example programs run, print what they promise, and are short enough to read in one sitting."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "fp4bf16" / "examples"


def _run(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numpy_matmul():
    text = _run("-m", "fp4bf16.examples.numpy_matmul")
    error = {m[1]: float(m[2]) for m in re.finditer(r"^(\w+) +relative error ([\d.]+)$", text, re.MULTILINE)}
    assert error["bf16"] < 0.005 < error["dual"] < error["fp4"] < 0.2
    distance, bound = map(
        float, re.search(r"FP4 is ([\d.]+) from BF16; certified: at most ([\d.]+)", text).groups()
    )
    assert 0 < distance < bound


def test_the_readme_tells_the_truth():
    """The Python block of the first screen is run; each line of its output stands in the block after it."""
    text = (ROOT / "README.md").read_text()
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    shown = re.search(r"```python\n.*?```\n+```(?:text)?\n(.*?)```", text, re.DOTALL)
    assert len(program[1].strip().splitlines()) <= 12
    assert _run("-c", program[1]).splitlines() == shown[1].splitlines()


def test_the_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "python -m pip install '.[train]' && python -m fp4bf16 train" in text
    assert "python -m pip install '.[test]' && python -m pytest" in text


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 150, path
