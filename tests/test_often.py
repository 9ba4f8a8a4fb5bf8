"""Which cases run in CI."""

from __future__ import annotations

import pytest
from often import in_ci


def test_the_others_are_long():
    mark = in_ci("a, b", [(1, 2), (3, 4), (5, 6)], (3, 4), (1, 2)).mark
    assert mark.args[0] == "a, b" and [p.values for p in mark.args[1]] == [(1, 2), (3, 4), (5, 6)]
    assert [[m.name for m in p.marks] for p in mark.args[1]] == [[], [], ["long"]]


def test_cases_of_a_generator():
    mark = in_ci("a", (x for x in "ab"), "b").mark
    assert [(p.values, len(p.marks)) for p in mark.args[1]] == [(("a",), 1), (("b",), 0)]


@pytest.mark.parametrize("often", [("c",), ("a", "c"), (("a",),), ()])
def test_what_is_no_case_is_refused(often):
    with pytest.raises(AssertionError, match="name some of them"):
        in_ci("a", "ab", *often)
