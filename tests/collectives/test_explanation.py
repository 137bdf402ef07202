"""An explanation of what is chosen, with the alternatives."""

from __future__ import annotations

from typing import Any

import pytest

import ringcoll
from ringcoll import UserOp
from ringcoll.algorithms import algorithms
from ringcoll.errors import ArgumentError, RingcollError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALGORITHM", "DEBUG", "TRANSPORT"):
        monkeypatch.delenv(f"RINGCOLL_{name}", raising=False)


def test_an_explanation_shows_the_alternatives() -> None:
    found = ringcoll.run_threads(lambda group: ringcoll.explain("all_reduce", 4096, group), 4)
    assert len({str(one) for one in found}) == 1
    text = str(found[0])
    head, _, chosen = text.splitlines()[0].rpartition(" ")
    assert head == "all_reduce of 4096 bytes on 4 ranks, 1 host, local:"
    assert "why: the least predicted time (costs: built-in)" in text
    every = algorithms("all_reduce", 4, variants=True)
    names = {entry.name for entry in every if not entry.needs_hosts}
    rows = [line.split() for line in text.splitlines()[4:-4]]
    assert {row[-6] for row in rows} == names
    waits = {row[-6]: int(row[-4]) for row in rows}
    assert (waits["direct"], waits["recursive_doubling"], waits["ring"]) == (1, 2, 6)
    assert [row[0] for row in rows].index("*") == 0
    assert [row[1] for row in rows if row[0] == "*"] == [chosen]
    times = [float(row[-3]) for row in rows]
    assert times == sorted(times)


def test_an_explanation_minds_the_operator_and_refuses_nonsense() -> None:
    def main(group: ringcoll.LocalGroup) -> Any:
        own = UserOp(lambda x, y: x)
        told = ringcoll.explain("reduce_scatter", 1 << 20, group, op=own).algorithm
        for bad in (-1, "4K", None, True):
            with pytest.raises(ArgumentError):
                ringcoll.explain("all_reduce", bad, group)  # type: ignore[arg-type]
        with pytest.raises(RingcollError):
            ringcoll.explain("all_sum", 4, group)
        return told

    assert ringcoll.run_threads(main, 3) == ["direct"] * 3
