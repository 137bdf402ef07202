"""Groups whose ranks die, leave and come: what is computed, and by whom, is exact."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from ringcoll.errors import GroupBrokenError, PeerLostError
from tests.fakes.hosts import Hosts, reason_why_not
from tests.programs import mortal
from tests.programs.mortal import Ended, Learned, run_mortals, value_of

pytestmark = [pytest.mark.processes, pytest.mark.slow]

DEAD = Ended(-9)


def over(transport: str) -> str:
    """A transport that is installed."""
    if transport == "ucx" and find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    return transport


def sum_of(ranks: Iterable[int], numel: int) -> torch.Tensor:
    """The sum of the vectors of some ranks."""
    return torch.stack([value_of(rank, numel) for rank in ranks]).sum(0)


def check_training(results: list[Any], steps: int, dead: set[int]) -> list[Learned]:
    """The losses are those of one process that learns from whoever was there."""
    assert {rank for rank, result in enumerate(results) if isinstance(result, Ended)} == dead
    assert all(results[rank].exit_code == -9 for rank in dead), results
    left = [result for result in results if not isinstance(result, Ended)]
    assert all(isinstance(result, Learned) for result in left), left
    before = [results[rank].told for rank in dead]
    losses, final = mortal.expected([*left, *before], steps)
    for result in left:
        for step, (rank, _, loss) in result.seen.items():
            assert loss == pytest.approx(losses[step][rank], rel=1e-9)
        assert result.final == pytest.approx(final, rel=1e-9)
        assert result.final == left[0].final, "bitwise the same"
    return left


@pytest.mark.parametrize(
    "kind, deaths",
    [
        ("by hand", {2: 3}),
        ("by hand", {0: 2}),
        ("by hand", {1: 3, 2: 3}),
        ("by hand", {0: 2, 1: 5}),
        ("ddp", {0: 2}),
        ("ddp", {1: 3, 2: 3}),
        ("bucketed", {2: 3}),
        ("bucketed", {0: 2, 1: 5}),
    ],
    ids=str,
)
def test_training_goes_on_without_the_dead(kind: str, deaths: dict[int, int]):
    results = run_mortals(mortal.train, 4, "auto", kind, 8, deaths, {}, store_dies=0 in deaths)
    left = check_training(results, 8, {*deaths})
    assert sum(len(change.lost) for change in left[0].changes) == len(deaths)
    assert left[0].seen[7][1] == 4 - len(deaths)


@pytest.mark.parametrize("transport", ["gloo", "ucx"])
def test_training_goes_on_over_every_transport(transport: str):
    results = run_mortals(mortal.train, 3, over(transport), "by hand", 6, {1: 3}, {})
    check_training(results, 6, {1})


def test_new_ranks_join_and_get_the_state():
    results = run_mortals(
        mortal.train, 2, "auto", "by hand", 9, {1: 5}, {2: 3, 3: 3}, newcomers=2
    )  # fmt: skip
    left = check_training(results, 9, {1})
    assert [change.joined for change in left[0].changes if change.joined] in ([2], [1, 1])
    assert left[0].seen[8][1] == 3
    assert min(left[1].seen) >= 3, "it had no part in what was before"


def test_a_newcomer_takes_the_place_of_the_dead():
    results = run_mortals(mortal.train, 3, "auto", "ddp", 9, {2: 2}, {3: 5}, newcomers=1)
    left = check_training(results, 9, {2})
    assert [change.world_size for change in left[0].changes] == [2, 3]


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    if reason := reason_why_not():
        pytest.skip(reason)
    with Hosts(2, apart=("net", "ipc", "mount", "uts")) as hosts:
        yield hosts


@pytest.mark.parametrize("deaths", [{0: 2}, {1: 3}, {0: 2, 3: 4}, {2: 3, 3: 3}], ids=str)
def test_training_goes_on_between_hosts(two_hosts: Hosts, deaths: dict[int, int]):
    """Also when all ranks of a host die, or as many as are left: it is known that they are dead."""
    how: dict[str, Any] = {"hosts": two_hosts, "where": (0, 0, 1, 1), "store_dies": 0 in deaths}
    results = run_mortals(mortal.train, 4, "auto", "by hand", 7, deaths, {}, **how)
    left = check_training(results, 7, {*deaths})
    assert left[0].seen[6][1] == 4 - len(deaths)


def test_who_joins_may_be_on_another_host(two_hosts: Hosts):
    how: dict[str, Any] = {"newcomers": 1, "hosts": two_hosts, "where": (0, 1, 1)}
    results = run_mortals(mortal.train, 2, "auto", "ddp", 9, {1: 2}, {2: 5}, **how)
    left = check_training(results, 9, {1})
    assert [change.world_size for change in left[0].changes] == [1, 2]


@pytest.mark.parametrize("numel", [1, 300_000])
@pytest.mark.parametrize("victims", [[0], [1, 3]], ids=str)
def test_sums_are_over_those_who_are_there(victims: list[int], numel: int):
    results = run_mortals(mortal.operations, 4, "auto", victims, numel, store_dies=True)
    left = [rank for rank in range(4) if rank not in victims]
    for rank, result in enumerate(results):
        if rank in victims:
            assert result == DEAD
            continue
        for number in range(5):
            who = range(4) if number < 2 else left
            wanted = sum_of(who, numel)
            assert torch.equal(result[f"sum {number}"], wanted), (rank, number)
        *place, lost = result["size"]
        assert place == [left.index(rank), len(left)]
        assert sorted(rank for ranks in lost for rank in ranks) != []


def test_what_depends_on_who_is_there_is_not_tried_again():
    results = run_mortals(mortal.rooted, 4, 1)
    for rank, result in zip((0, 2, 3), (results[0], results[2], results[3]), strict=True):
        kind, text, x = result["first"]
        assert kind == "GroupChangedError"
        assert "lost ranks [1] and has 3 ranks now" in text
        assert torch.equal(x, value_of(rank, 10)), "as before"
        # Rank 2 of those who are left was rank 3.
        assert torch.equal(result["second"], value_of(3, 10))
        wanted = [value_of(peer, 10) for peer in (0, 2, 3)]
        assert all(map(torch.equal, result["rows"], wanted))


@pytest.mark.parametrize(
    "first,second,moment",
    [
        (2, 1, "coming"),
        (2, 0, "coming"),
        (0, 1, "coming"),  # the one that would lead next
        (2, 0, "forming"),
        (2, 3, "forming"),
        (2, 0, "0"),  # leads, and dies before it answers anybody
        (2, 0, "1"),  # after it has answered one of three
        (0, 1, "1"),
    ],
)
def test_a_second_rank_dies_while_they_agree(first: int, second: int, moment: str):
    results = run_mortals(mortal.dies_agreeing, 5, first, second, moment, store_dies=True)
    left = [rank for rank in range(5) if rank not in (first, second)]
    wanted = sum_of(left, 1000)
    for rank, result in enumerate(results):
        if rank not in left:
            assert result == DEAD, rank
        else:
            assert not isinstance(result, BaseException), result
            x, count, *place = result
            assert place == [left.index(rank), 3]
            assert torch.equal(x, wanted)
            assert count == 3


@pytest.mark.parametrize("name", ["all_reduce", "barrier"])
def test_what_others_have_come_through_is_not_tried_again(name: str):
    for rank, (x, y, size, lost) in enumerate(run_mortals(mortal.late_failure, 3, name)):
        wanted = sum_of(range(3), 1000) if name == "all_reduce" else value_of(rank, 1000)
        assert torch.equal(x, wanted)
        assert y.tolist() == [3.0] * 5
        assert (size, lost) == (3, [()])


def test_what_was_changed_on_its_way_is_sent_again():
    """Nobody is left out for it: the ranks connect anew, and call again."""
    for are_right, losses, size in run_mortals(mortal.corrupted, 3):
        assert are_right
        assert losses, "no message was changed"
        assert losses == [[]] * len(losses)
        assert size == 3


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_stopped_is_left_out_and_told_so(victim: int):
    """Also the one that holds the stores; with a limit of 2 s the others go on after some 4."""
    results = run_mortals(mortal.stopped, 3, victim, store_dies=True)
    left = [rank for rank in range(3) if rank != victim]
    for rank in left:
        x, size, seconds = results[rank]
        assert size == 2
        assert torch.equal(x, sum_of(left, 100))
        assert seconds < 15, "19 s with a wait in vain for the store"
    assert isinstance(results[victim], GroupBrokenError), results[victim]
    assert "went on without this rank" in str(results[victim])


def test_a_rank_is_told_in_time_that_the_rank_with_the_store_is_stopped():
    """In a group that is not resilient, and when the group has not met; and it leaves in time."""
    for texts, seconds in run_mortals(mortal.stopped_with_the_store, 3, store_dies=True)[1:]:
        late, broken = texts
        # A rank that has given up breaks its connections; the store cannot say why.
        assert late[0] in ("CollectiveTimeoutError", "PeerLostError"), late
        assert "rank 0" in late[1]
        assert broken[0] in ("CollectiveTimeoutError", "PeerLostError"), broken
        assert "rank" in broken[1]
        assert seconds < 12, "two limits of 2 s, and a quarter of each for the store's answer"


def test_a_rank_that_sleeps_until_the_others_have_ended_does_not_go_on_alone():
    first, dead, third, last = run_mortals(mortal.sleeps, 4)
    assert dead == DEAD
    for x in (first, third):
        assert torch.equal(x, sum_of((0, 2), 100))
    assert isinstance(last, GroupBrokenError), last
    assert "went on without this rank" in str(last)


def test_a_rank_may_leave_and_one_that_fails_leaves():
    failed, left, *others = run_mortals(mortal.leaves, 4)
    assert (failed, left) == ("nothing here", "left")
    for (x, size), y, size_after in others:
        assert (size, size_after) == (3, 2)
        assert torch.equal(x, sum_of((0, 2, 3), 100))
        assert torch.equal(y, sum_of((2, 3), 100))


def test_what_is_refused():
    for texts in run_mortals(mortal.refused, 2):
        planned, coalesced, sparse, again, nowhere, nobody, pigeons, after = texts
        for text in (planned, coalesced, sparse):
            assert text.startswith("ArgumentError")
            assert "a group that keeps its ranks" in text
        assert "cannot be made resilient" in again
        assert "no address" in nowhere
        assert "expected HOST:PORT, got nowhere" in nowhere
        assert nobody.startswith(PeerLostError.__name__)
        assert "127.0.0.1:1" in nobody
        assert "pigeons" in pigeons
        assert after == "[2.0, 2.0, 2.0]"
