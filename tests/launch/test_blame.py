"""Whose error a run of several ranks raises, and what it tells of the others; the ranks are ends of pipes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from ringcoll.runtime.launch import RankError, Ranks, processes

Send = Callable[..., None]


@pytest.fixture
def ranks() -> Iterator[tuple[Ranks, list[Connection]]]:
    """Three ranks, and their ends of the pipes."""
    with ExitStack() as stack:
        pipes = [multiprocessing.Pipe() for _ in range(3)]
        for pipe in pipes:
            for connection in pipe:
                stack.enter_context(connection)
        made = object.__new__(Ranks)
        made.world_size = 3
        made._all_wait = False
        made._connections = [near for near, _ in pipes]
        gone: Any = SimpleNamespace(join=lambda limit_s: None, exitcode=-9)
        made.processes = [gone] * 3
        yield made, [far for _, far in pipes]


def fails(connection: Connection, kind: str) -> None:
    connection.send(("error", ((kind, f"text of {kind}"), f"trace of {kind}")))


def test_results_are_in_the_order_of_ranks(ranks: tuple[Ranks, list[Connection]]) -> None:
    made, ends = ranks
    reports: list[Any] = []
    for rank in (2, 0, 1):
        ends[rank].send(("report", f"{rank} is here"))
        ends[rank].send(("result", 10 * rank))
    assert made._results(reports.append, 10.0) == [0, 10, 20]
    assert sorted(reports) == ["0 is here", "1 is here", "2 is here"]


@pytest.mark.parametrize(
    "kinds, blamed",
    [
        ({0: "PeerLostError", 1: "ValueError", 2: "PeerLostError"}, 1),
        ({0: "PeerLostError", 1: "PeerLostError", 2: "ValueError"}, 2),
        ({0: "CollectiveTimeoutError", 1: "PeerLostError"}, 0),
        ({1: "PeerLostError", 2: "PeerLostError"}, 1),
    ],
)
def test_who_has_lost_a_peer_is_not_to_blame(
    ranks: tuple[Ranks, list[Connection]], kinds: dict[int, str], blamed: int
) -> None:
    """The error of the rank that has only lost another one may come first."""
    made, ends = ranks
    for rank in range(3):
        if rank in kinds:
            fails(ends[rank], kinds[rank])
        else:
            ends[rank].send(("result", None))
    with pytest.raises(RankError) as raised:
        made._results(None, 10.0)
    assert raised.value.rank == blamed
    assert raised.value.failures == {
        rank: (kind, f"text of {kind}") for rank, kind in kinds.items()
    }
    assert f"trace of {kinds[blamed]}" in raised.value.details
    assert made._all_wait, "all have answered: the ranks may be used again"


def test_a_rank_that_has_died_is_to_blame(ranks: tuple[Ranks, list[Connection]]) -> None:
    made, ends = ranks
    fails(ends[0], "PeerLostError")
    ends[1].send(("result", None))
    ends[2].close()
    with pytest.raises(RankError, match="exit code -9") as raised:
        made._results(None, 10.0)
    assert raised.value.rank == 2
    assert not made._all_wait


def test_of_ranks_that_fail_later_the_cause_is_waited_for(
    ranks: tuple[Ranks, list[Connection]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of a rank that says nothing, not for longer than a moment."""
    made, ends = ranks
    monkeypatch.setattr(processes, "_GRACE_S", 0.3)
    monkeypatch.setattr(processes, "_LOOK_S", 0.05)
    fails(ends[0], "PeerLostError")
    begin_s = time.monotonic()
    with pytest.raises(RankError) as raised:
        made._results(None, 60.0)
    assert 0.2 <= time.monotonic() - begin_s < 30
    assert raised.value.rank == 0
    assert not made._all_wait


def test_ranks_that_are_not_done_in_time_are_named(
    ranks: tuple[Ranks, list[Connection]],
) -> None:
    made, ends = ranks
    ends[1].send(("result", None))
    with pytest.raises(TimeoutError, match=r"ranks \[0, 2\] were not done after 0.1 s"):
        made._results(None, 0.1)
