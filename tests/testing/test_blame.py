"""Of several ranks that fail, the first in time is the cause."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from ringcoll.errors import PeerLostError
from ringcoll.runtime.launch import RankError
from ringcoll.tools.testing.pool import (
    Failure,
    Group,
    RanksTraceback,
    _Pool,
    _raise_cause,
    _RankAnswer,
    attempt,
    raise_first,
)


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
    assert "ringcoll/tools/testing" not in found.trace
    assert isinstance(pickle.loads(found.error), LookupError)
    assert pickle.loads(attempt(0, lambda: [1, 2])) == [1, 2]  # type: ignore[arg-type]


GROUP = Group("gloo", 2, 5.0)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool whose ranks answer, or fail, as ``answers`` says; three processes, of which a test takes two."""
    made: Any = _Pool()

    def run(function: object, call: object, *, on_report: Any, timeout_s: float) -> list[Any]:
        for report in made.reports:
            on_report(report)
        if isinstance(made.answers, BaseException):
            raise made.answers
        return [*made.answers, None]

    monkeypatch.setattr(made, "ready", lambda *_: SimpleNamespace(run=run))
    made.reports, made.answers = [], []
    return made


@pytest.mark.parametrize("intact", [(True, True), (True, False), (False, True)])
def test_a_group_is_made_anew_if_any_rank_has_changed_it(
    pool: Any, intact: tuple[bool, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    pool.answers = [
        _RankAnswer(pickle.dumps(10 * rank), f"hello\nof {rank}\n" * rank, intact[rank])
        for rank in range(2)
    ]
    assert pool.run(GROUP, int, [((), {})] * 2) == [0, 10]
    assert pool._group == (GROUP if all(intact) else None)
    assert pool._number == 1
    assert capsys.readouterr().out == "[rank 1] hello\n[rank 1] of 1\n"
    assert pool.run(GROUP, int, [((), {})] * 2) == [0, 10]
    assert pool._number == (1 if all(intact) else 2)


def test_where_ranks_hang_is_shown_in_their_order(pool: Any) -> None:
    pool.answers = TimeoutError("not done")
    pool.reports = [(1, "line of 1"), LATE, (0, "line of 0")]
    with pytest.raises(TimeoutError, match="not done") as raised:
        pool.run(GROUP, int, [((), {})] * 2)
    shown = str(raised.value.__cause__)
    assert shown == "rank 0 is here:\nline of 0\nrank 1 is here:\nline of 1"
    assert pool._group is None


def test_the_cause_is_among_what_ranks_have_reported(pool: Any) -> None:
    pool.answers = RankError(0, {0: ("_FailedError", "")}, "")
    pool.reports = [LATE, (1, "line"), FIRST]
    with pytest.raises(ValueError, match="the cause"):
        pool.run(GROUP, int, [((), {})] * 2)
    assert pool._group is None
