"""Which cases of a test run in CI."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_ci(names: str, cases: Iterable[Any], *often: Any) -> pytest.MarkDecorator:
    """Parametrize `names` by all `cases`; those that are not among `often` run with ``-m long`` alone.

    `often`: at least one, all of them of the cases; one that is not would leave its test to ``-m long``.
    """
    cases, marked = list(cases), []
    unknown = [case for case in often if case not in cases]
    assert often and not unknown, f"often: {unknown or 'nothing'} of the cases {cases}; name some of them"
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=[pytest.mark.long] * (case not in often)))
    return pytest.mark.parametrize(names, marked)
