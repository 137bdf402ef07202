"""The pool of processes: errors arrive, and nobody is left behind."""

from __future__ import annotations

import pickle
import time

import pytest
import torch.distributed as dist

from ringcoll.launch import RankError, Ranks, report
from ringcoll.transport.gloo import _listening

pytestmark = pytest.mark.processes


def rank_of() -> int:
    return dist.get_rank()


def unpicklable() -> object:
    return lambda: None


def failing(rank: int) -> int:
    if dist.get_rank() == rank:
        raise LookupError("nothing here")
    return dist.get_rank()


def reporting() -> None:
    for number in range(3):
        report((dist.get_rank(), number))


def sleeping(seconds: float) -> None:
    time.sleep(seconds)


def listening() -> list[str]:
    return sorted({host for host, _ in _listening()})


def test_results_are_in_order_and_reports_arrive(pool):
    ranks = pool(3)
    assert ranks.run(rank_of) == [0, 1, 2]
    seen: list[tuple[int, int]] = []
    ranks.run(reporting, on_report=seen.append)
    assert sorted(seen) == [(rank, number) for rank in range(3) for number in range(3)]


def test_an_error_of_one_rank_is_raised_with_its_name_and_ends_the_others():
    with Ranks(2) as ranks:
        with pytest.raises(RankError, match="rank 1 raised LookupError: nothing here") as caught:
            ranks.run(failing, 1)
        assert caught.value.rank == 1
        assert caught.value.kind == "LookupError"
        assert "failing" in caught.value.details, "the traceback of the rank"
        assert not any(process.is_alive() for process in ranks.processes)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))


def test_a_result_that_cannot_be_sent_is_an_error_of_the_rank():
    with Ranks(1) as ranks, pytest.raises(RankError, match="pickle"):
        ranks.run(unpicklable)


def test_a_run_has_a_time_limit_and_leaves_nobody_behind():
    begin = time.monotonic()
    with Ranks(1) as ranks:
        assert ranks.run(rank_of) == [0]
        with pytest.raises(TimeoutError, match=r"ranks \[0\] were not done"):
            ranks.run(sleeping, 60.0, timeout_s=0.5)
    assert not any(process.is_alive() for process in ranks.processes)
    assert time.monotonic() - begin < 30


def test_nothing_but_the_loopback_interface_is_listened_on(pool):
    pool(2).run(rank_of)
    assert pool(2).run(listening) == [["127.0.0.1"]] * 2
    before = _listening()
    with Ranks(1) as ranks:
        ranks.run(rank_of)
        own = _listening() - before
    assert {host for host, _ in own} == {"127.0.0.1"}
