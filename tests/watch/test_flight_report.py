"""Records of ranks, merged: who has not come, who waits for whom, who called something else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.runtime.watch import SENDS, read_record, related, report

Record = dict[str, Any]
CALL = "all_reduce(sum, float32, 12 elements, algorithm ring)"


def running(number: int, *, call: str = CALL, **more: Any) -> Record:
    waits: Record = {"meets": False, "step": 4, "peer": None, "is_receive": True, "chunks": []}
    return {"number": number, "call": call, **waits, **more}


def call(number: int, words: str = CALL, *, complete: bool = False) -> Record:
    return {"number": number, "call": words, "complete": complete}


def group(rank: int, last: int, world_size: int = 4, **more: Any) -> Record:
    """A rank's end of a group that has come to an operation."""
    now = more.get("running")
    own: Record = {
        "group": "dp",
        "transport": "shared",
        "rank": rank,
        "world_size": world_size,
        "ranks": [],
        "operations": [call(number, complete=True) for number in range(last + 1)],
        "running": None,
        "queued": [],
        "failure": None,
        "pids": {str(peer): 100 + peer for peer in range(world_size) if peer != rank},
        "elsewhere": [],
    }
    if now is not None:
        own["operations"] += [call(now["number"], now["call"])]
    return own | more


def process(rank: int, *groups: Record, **threads: str) -> Record:
    names = {"version": 1, "host": "oak", "pid": 100 + rank, "command": "train.py"}
    return {**names, "threads": {"MainThread": "train.py:9 in main"} | threads, "groups": [*groups]}


def test_who_is_waited_for_comes_first() -> None:
    waits = [running(17, peer=1, chunks=[2]), running(17, call="broadcast(float32, 3 elements)")]
    records = [
        process(0, group(0, 16, running=running(17, peer=3, step=0, chunks=[1, 3]))),
        process(3, group(3, 16, running=waits[0])),
        process(1, group(1, 16, running=waits[1] | {"step": None, "is_receive": False})),
        process(2, group(2, 15), MainThread="train.py:41 in load"),
    ]
    assert report(records) == [
        "group 1, 4 ranks over shared: 3 in an operation",
        f"  the ranks disagree on #18: ranks 0, 3 called {CALL}, "
        "rank 1 called broadcast(float32, 3 elements)",
        "  rank 2 (pid 102) is not in any operation, after all_reduce #16 "
        "(in user code, train.py:41 in load)",
        "  rank 1 (pid 101) is in broadcast #18, waits for no rank; at train.py:9 in main; "
        "rank 3 waits for it",
        "  rank 3 (pid 103) is in all_reduce #18 step 4, waits for chunk 2 of rank 1; "
        "at train.py:9 in main; rank 0 waits for it",
        "  rank 0 (pid 100) is in all_reduce #18 step 0, waits for chunks 1, 3 of rank 3; "
        "at train.py:9 in main",
    ]


def test_a_group_of_some_ranks_has_the_ranks_of_the_program() -> None:
    ranks: Record = {"world_size": 4, "ranks": [2, 3, 5, 7]}
    waits = running(1, peer=3, chunks=[2])
    records = [
        process(2, group(0, 0, running=waits, elsewhere=[2], pids={"1": 103, "3": 107}, **ranks)),
        process(3, group(1, 0, pids={"0": 102}, running=running(1, call="barrier()"), **ranks)),
    ]
    lines = report(records, {107: "is stopped"})
    assert lines[0] == "group 1, ranks 2, 3, 5, 7 over shared: 2 in an operation"
    assert lines[1] == f"  the ranks disagree on #2: rank 2 called {CALL}, rank 3 called barrier()"
    assert [line.split(";")[0].strip() for line in lines[2:]] == [
        "rank 7 (pid 107) is stopped",
        "rank 2 (pid 102) is in all_reduce #2 step 4, waits for chunk 2 of rank 7",
        "rank 3 (pid 103) is in barrier #2, waits for no rank",
        "rank 5 is on another host",
    ]
    assert lines[2].endswith("; rank 2 waits for it")


def line_of(rank: int, *records: Record, silent: dict[int, str] | None = None) -> str:
    (line,) = [line for line in report(records, silent) if line.startswith(f"  rank {rank} ")]
    return line.strip()


def test_messages_of_the_users_own_are_told_if_somebody_waits_for_one() -> None:
    waits = running(0, call="recv(tag 0)", step=None, peer=1)
    for own, is_told in ((group(0, 0), False), (group(0, 0, running=waits), True)):
        sends = own | {"group": "own", "transport": SENDS}
        told = report([process(0, group(0, 0), sends)])
        assert any("over sends and receives" in line for line in told) == is_told, told
    assert report([process(0, sends | {"running": None})])  # there is nothing else to tell


@pytest.mark.parametrize(
    "own, words",
    [
        (group(0, -1), "is not in any operation, and has made none (in user code, "),
        (
            group(0, 0, running=running(1, step=2, peer=1, is_receive=False, chunks=[5])),
            "is in all_reduce #2 step 2, waits until rank 1 takes chunk 5; at ",
        ),
        (group(0, 0, running=running(1, peer=2)), "is in all_reduce #2 step 4, waits for data of"),
        (
            group(0, -1, running=running(0, call="all_reduce", meets=True)),
            "is in all_reduce #1, waits until all ranks have come; at ",
        ),
        (
            group(0, 0, running=running(1), queued=[call(2), call(3), call(4)]),
            "is in all_reduce #2, waits for no rank, 3 more queued, up to #5; at ",
        ),
        (
            group(0, 0, running=running(1, call="recv(tag 3)", step=None, peer=2)),
            "is in recv #2, waits for data of rank 2; at ",
        ),
        (
            group(0, 0, running=running(1, call="recv_anysource(tag 3)", step=None)),
            "is in recv_anysource #2, waits for data of any rank; at ",
        ),
        (
            group(0, 0, running=running(1), failure="rank 0 lost rank 3"),
            "is in a broken group: rank 0 lost rank 3 (in user code, train.py:9 in main)",
        ),
    ],
)
def test_what_a_rank_does(own: Record, words: str) -> None:
    assert line_of(0, process(0, own)).startswith(f"rank 0 (pid 100) {words}")


def test_a_rank_of_which_there_is_no_record() -> None:
    own = group(0, 0, world_size=6, running=running(1, peer=2), elsewhere=[4])
    own["pids"] = {"1": 101, "2": 102, "5": 105}
    lines = report([process(0, own), process(5)], {102: "is stopped"})
    assert [line.strip() for line in lines[1:]] == [
        "rank 2 (pid 102) is stopped; rank 0 waits for it",
        "rank 1 (pid 101) has left no record",
        "rank 3 has not come to the group",
        "rank 5 (pid 105) has closed the group (in user code, train.py:9 in main)",
        "rank 0 (pid 100) is in all_reduce #2 step 4, waits for data of rank 2; "
        "at train.py:9 in main",
        "rank 4 is on another host",
    ]


def order(*records: Record) -> list[str]:
    """The ranks of the only group, as they are told."""
    return [line.split()[1] for line in report(records)[1:]]


def test_who_has_come_less_far_comes_first() -> None:
    """Of those that have come as far, who is in no operation; and then by number."""
    records = [
        process(0, group(0, 15)),
        process(1, group(1, 14, running=running(15))),
        process(2, group(2, 15, running=running(16))),
        process(3, group(3, 14)),
    ]
    assert order(*records) == ["3", "1", "0", "2"]
    # Who has closed the group or left no record, who has made no operation, who is in the first one.
    closed, first = process(3), process(1, group(1, -1, running=running(0)))
    assert order(first, closed, process(0, group(0, -1))) == ["2", "3", "0", "1"]
    many = [process(rank, group(rank, 0, 12, running=running(1))) for rank in range(12)]
    assert order(*many) == [*map(str, range(12))]


def test_ranks_without_a_record_come_in_their_order() -> None:
    own = group(0, 0, running=running(1), pids={"2": 102})
    assert [line.strip() for line in report([process(0, own)])[1:4]] == [
        "rank 1 has not come to the group",
        "rank 2 (pid 102) has left no record",
        "rank 3 has not come to the group",
    ]


def test_who_is_in_a_broken_group_waits_for_nobody() -> None:
    broken = group(0, 0, 2, running=running(1, peer=1), failure="rank 0 lost rank 1")
    other = group(0, 4, 2, running=running(5, peer=1), group="tp", failure="rank 0 lost rank 1")
    lines = report(
        [process(0, broken, other), process(1, group(1, 0, 2), group(1, 4, 2, group="tp"))]
    )
    assert lines[0] == "group 1, 2 ranks over shared: none in an operation, broken for 1"
    assert not any("waits" in line or "but in group" in line for line in lines)


def test_calls_of_one_name_may_disagree() -> None:
    pair = [running(1), running(1, call=CALL.replace("12", "13"))]
    records = [process(rank, group(rank, 0, 2, running=now)) for rank, now in enumerate(pair)]
    assert report(records)[1].endswith(f"rank 0 called {CALL}, rank 1 called {pair[1]['call']}")


def test_a_process_that_does_not_tell_its_threads() -> None:
    record = process(0, group(0, 0, world_size=1)) | {"threads": {}}
    assert report([record])[1].endswith(" (in user code, an unknown place)")


def test_ranks_that_wait_in_two_groups() -> None:
    first = group(0, 0, world_size=2, running=running(1, peer=1))
    second = group(1, 4, world_size=2, running=running(5, peer=0), group="tp")
    quiet = group(0, 9, world_size=2, group="pp")
    records = [
        process(0, first, group(0, 4, world_size=2, group="tp"), quiet),
        process(1, group(1, 0, world_size=2), second, group(1, 9, world_size=2, group="pp")),
    ]
    lines = report(records)
    assert "but in group 2 (at train.py:9 in main); rank 0 waits for it" in lines[1]
    assert "but in group 1 (at train.py:9 in main); rank 1 waits for it" in lines[4]
    assert lines[-1] == "group 3, 2 ranks over shared: none in an operation"


def test_if_nobody_waits_all_groups_are_told() -> None:
    assert len(report([process(0, group(0, 3)), process(1, group(1, 3))])) == 5
    assert report([]) == []


def test_ranks_that_are_threads() -> None:
    names = {"rank-0": "a.py:1 in f", "rank-1": "a.py:2 in g"}
    record = process(0, group(0, 0, world_size=2), group(1, 0, world_size=2), **names)
    assert "a.py:1 in f" in line_of(0, record)
    assert "a.py:2 in g" in line_of(1, record)


def test_what_is_not_resolved_yet_is_no_disagreement() -> None:
    pair = [running(1), running(1, call="all_reduce")]
    records = [process(rank, group(rank, 0, 2, running=now)) for rank, now in enumerate(pair)]
    assert not any("disagree" in line for line in report(records))
    pair[1]["call"] = "barrier"
    records = [process(rank, group(rank, 0, 2, running=now)) for rank, now in enumerate(pair)]
    assert report(records)[1].endswith(f"rank 0 called {CALL}, rank 1 called barrier")


def test_who_is_related() -> None:
    """Through a group of both, or as one names the other, who does not answer."""
    pair = [process(rank, group(rank, 0, world_size=2)) for rank in range(2)]
    stranger = process(7, group(0, 0, world_size=2, group="x", pids={"1": 108}))
    records = [*pair, stranger]
    assert related(records, {100}) == (pair, {100, 101})
    assert related(records, {108}) == ([stranger], {107, 108})
    assert related(records, {5}) == ([], {5})
    strangers = [process(rank, group(rank, 0, world_size=2, pids={})) for rank in range(2)]
    assert related(strangers, {100}) == (strangers, {100, 101})  # they have not met


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"pid": "1"},
        {"threads": {"a": 1}},
        {"threads": []},
        {"groups": ""},
        {"groups": [{}]},
        {"groups": [group(4, 0)]},
        {"groups": [group(0, 0, world_size=1 << 16, pids={}) | {"world_size": (1 << 16) + 1}]},
        {"groups": [group(-1, 0)]},
        {"groups": [group(0, 0) | {"running": {}}]},
        {"groups": [group(0, 0, pids={"1": "2"})]},
        {"groups": [group(0, 0, queued=[{"number": 1}])]},
    ],
)
def test_other_texts_are_refused(change: Record) -> None:
    right = process(0, group(0, 0, running=running(1)), group(7, 0, world_size=1 << 16, pids={}))
    assert read_record(json.dumps(right)) == right
    for text in (json.dumps(right | change), "", "[]", "[" * 100_000):
        with pytest.raises(ArgumentError, match="not the record of a process") as caught:
            read_record(text)
        assert caught.value.got == text[:80]
