"""Fixtures that all tests share: a seeded generator whose seed is shown, and hypothesis profiles."""

from __future__ import annotations

import os
import pathlib
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"  # peers' answers, where they are at hand

for _name, _examples in (("default", 50), ("thorough", 1000)):
    settings.register_profile(
        _name, max_examples=_examples, deadline=None, suppress_health_check=list(HealthCheck)
    )
settings.load_profile(os.environ.get("FP4BF16_HYPOTHESIS", "default"))

_SEED = int(os.environ.get("FP4BF16_TEST_SEED", int.from_bytes(os.urandom(4), "little")))


def pytest_report_header() -> str:
    return f"fp4bf16: random seed {_SEED} (repeat it with FP4BF16_TEST_SEED={_SEED})"


def pytest_terminal_summary(terminalreporter) -> None:
    """Under ``-q`` there is no header, but a failure needs the seed."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(pytest_report_header())


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator of the run's seed and the test's name; the seed stands in the header of the report."""
    return np.random.default_rng([_SEED, zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def shared() -> pathlib.Path:
    """Folder of the peers' answers; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no peers' answers at hand")
    return SHARED
