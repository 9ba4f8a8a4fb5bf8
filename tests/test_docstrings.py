"""Every example of every docstring runs, and every public function has one."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil

import pytest

import fp4bf16 as fb

#: Importing `__main__` runs it; the compiled library ends in .so and is no module; Triton's kernels need it.
LEFT_OUT = {"fp4bf16.__main__", "fp4bf16.libfp4bf16", "fp4bf16.cli.bench.triton_kernels"}
MODULES = sorted({m.name for m in pkgutil.walk_packages(fb.__path__, "fp4bf16.")} - LEFT_OUT)
PUBLIC = [
    getattr(fb, name) for name in fb.__all__ if callable(getattr(fb, name)) and not name.endswith("Error")
]


def _import(name: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("fp4bf16"):
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        result = doctest.testmod(_import(name))
    assert not result.failed, text.getvalue()


def test_there_are_examples_to_run():
    """Both trees are walked, the reference through its link."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ("fp4bf16.gemm", "fp4bf16.backends.threads", "fp4bf16.python_ref.quantize"):
        assert name in MODULES and any(t.examples for t in finder.find(importlib.import_module(name)))


@pytest.mark.parametrize("thing", PUBLIC, ids=lambda f: f.__name__)
def test_public_functions_say_what_they_do_and_show_it(thing):
    text = inspect.getdoc(thing) or ""
    assert len(text.splitlines()[0]) > 20
    if inspect.isfunction(thing) or thing in (fb.DualWeight, fb.QuantizedArray, fb.Certificate):
        assert ">>> " in text, f"{thing.__name__} shows no example"
