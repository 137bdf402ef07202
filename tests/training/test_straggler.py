"""A block lasts as long as it is told to, by its clock."""

from __future__ import annotations

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.training import slowed


@pytest.mark.parametrize(
    "factor, least_s, work_s, whole_s",
    [(1.0, 0.0, 2.0, 2.0), (3.0, 0.0, 2.0, 6.0), (1.0, 5.0, 2.0, 5.0), (4.0, 5.0, 2.0, 20.0)],
)
def test_the_time_of_a_block(factor: float, least_s: float, work_s: float, whole_s: float):
    now_s = 100.0

    def spend(seconds: float) -> None:
        nonlocal now_s
        assert seconds > 0
        now_s += seconds

    with slowed(factor, least_s=least_s, clock=lambda: now_s, sleep=spend):
        spend(work_s)
    assert now_s == 100.0 + whole_s


@pytest.mark.parametrize("argument, value", [("factor", 0.5), ("least_s", -1.0)])
def test_bad_arguments(argument: str, value: float):
    values = {"factor": 1.0, "least_s": 0.0, argument: value}
    match = rf"{argument!r}.*expected at least \d, got {value}"
    with (
        pytest.raises(ArgumentError, match=match),
        slowed(values["factor"], least_s=values["least_s"]),
    ):
        pass
