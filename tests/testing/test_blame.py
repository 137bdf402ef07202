"""Of several ranks that fail, the first in time is the cause."""

from __future__ import annotations

import pickle

import pytest

from ringcoll.errors import PeerLostError
from ringcoll.launch import RankError
from ringcoll.testing.pool import Failure, RanksTraceback, _raise_cause, attempt, raise_first


def failure(time_s: float, rank: int, error: BaseException, *, sent: bool = True) -> Failure:
    kind, text = type(error).__name__, str(error)
    written = pickle.dumps(error) if sent else b""
    return Failure(time_s, rank, kind, text, f"trace of rank {rank}\n", written)


LATE = failure(2.0, 0, PeerLostError("rank 2 is gone", peer=2))
FIRST = failure(1.0, 2, ValueError("the cause"))
LAST = failure(3.0, 1, LookupError("not\nthis"))


@pytest.mark.parametrize("order", [[LATE, FIRST, LAST], [LAST, LATE, FIRST], [FIRST, LAST, LATE]])
def test_the_first_in_time_is_raised_whichever_came_first(order: list[Failure]) -> None:
    with pytest.raises(ValueError, match="the cause") as raised:
        raise_first(order, 4)
    cause = raised.value.__cause__
    assert isinstance(cause, RanksTraceback)
    assert str(cause) == (
        "rank 2 of 4:\ntrace of rank 2\n\n"
        "rank 0 failed after it: PeerLostError: rank 2 is gone\n"
        "rank 1 failed after it: LookupError: not"
    )


def test_an_error_that_cannot_be_sent_is_told_with_its_rank() -> None:
    first = failure(1.0, 3, ValueError("the cause"), sent=False)
    with pytest.raises(RankError, match="the cause") as raised:
        raise_first([LATE, first], 4)
    assert raised.value.rank == 3
    assert set(raised.value.failures) == {0, 3}


@pytest.mark.parametrize(
    "kind, outcome", [("Failed", pytest.fail), ("Skipped", pytest.skip), ("XFailed", pytest.xfail)]
)
def test_what_a_test_says_to_pytest_is_said_again(kind: str, outcome: object) -> None:
    first = Failure(1.0, 0, kind, "why", "", b"")
    with pytest.raises(outcome.Exception, match="why"):  # type: ignore[attr-defined]
        raise_first([LATE, first], 2)


def test_of_no_failure_nothing_is_raised() -> None:
    raise_first([], 2)


def test_a_death_comes_before_all_that_ranks_have_told() -> None:
    error = RankError(0, {0: ("PeerLostError", ""), 2: ("ProcessDied", "exit code -9")}, "")
    with pytest.raises(RankError, match="exit code -9") as raised:
        _raise_cause(error, [LATE], 3)
    assert raised.value.rank == 2
    assert raised.value.failures[0] == ("PeerLostError", LATE.text)
    told = RankError(0, {0: ("_FailedError", "")}, "")
    with pytest.raises(ValueError, match="the cause"):
        _raise_cause(told, [LATE, FIRST], 3)
    with pytest.raises(RankError) as itself:
        _raise_cause(told, [], 3)
    assert itself.value is told


def test_a_failure_says_what_was_raised_where() -> None:
    def fails() -> None:
        raise LookupError("no such thing")

    found = attempt(5, fails)
    assert isinstance(found, Failure)
    assert (found.rank, found.kind, found.text) == (5, "LookupError", "no such thing")
    assert "in fails" in found.trace
    assert "ringcoll/testing" not in found.trace
    assert isinstance(pickle.loads(found.error), LookupError)
    assert pickle.loads(attempt(0, lambda: [1, 2])) == [1, 2]  # type: ignore[arg-type]
