"""Grids and primitives."""

from __future__ import annotations

import pytest

from ringcoll.schedules import (
    Program,
    Schedule,
    Step,
    copy,
    grid,
    inp,
    out,
    primitives,
    recv,
    recv_reduce,
    reduce,
    send,
    tmp,
)
from ringcoll.schedules.algorithms import schedule_of
from ringcoll.schedules.algorithms.bruck import bruck_all_gather
from ringcoll.schedules.algorithms.direct import direct_reduce
from ringcoll.schedules.algorithms.ring import chain_broadcast


def every_operation(rank: int) -> Program:
    yield Step()
    yield Step(
        send(1, inp(0), inp(1), inp(2), inp(5)),
        recv(2, out(7)),
        copy(out(3), inp(3)),
        recv_reduce(2, (out(4), out(5)), (inp(4), inp(5)), received_left=True, final=False),
    )
    if rank == 1:
        yield Step(
            recv_reduce(0, out(1), inp(1), received_left=False, final=True),
            reduce(out(2), inp(2), tmp(0, 2), final=False),
            reduce(out(9), inp(9), tmp(1, 9), final=True),
        )


def test_every_kind_of_cell() -> None:
    schedule = Schedule("all_reduce", "drawn", 2, 10, 2, every_operation)
    assert grid(schedule).splitlines() == [
        "step  rank 0                   rank 1",
        "   0  .                        .",
        "   1  >1:0-2,5 <2:7 =3 +2:4-5  >1:0-2,5 <2:7 =3 +2:4-5",
        "   2  .                        +0:1! S2 S9!",
    ]


def test_a_program_is_drawn_like_its_schedule() -> None:
    assert grid(bruck_all_gather, 5) == grid(schedule_of("all_gather", "bruck", 5))
    assert grid(chain_broadcast, 5, root=3) == grid(schedule_of("broadcast", "chain", 5, 3))
    assert grid(chain_broadcast, 5) != grid(chain_broadcast, 5, root=3)


def test_a_program_needs_a_world_size() -> None:
    with pytest.raises(TypeError, match="needs a world_size"):
        grid(bruck_all_gather)


def test_a_mark() -> None:
    lines = grid(direct_reduce, 3, root=1, mark=(1, 1)).splitlines()
    assert lines == [
        "step  rank 0  rank 1     rank 2",
        "   0  >1:0    <0:0 <2:0  >1:0",
        "   1  .       **S0!**    .",
    ]


def test_a_mark_behind_the_last_step() -> None:
    lines = grid(direct_reduce, 2, mark=(1, 3)).splitlines()
    assert lines[-1].split() == ["3", ".", "**.**"]
    assert len(lines) == 5


def test_a_large_grid_is_cut_to_the_neighbourhood_of_its_mark() -> None:
    schedule = schedule_of("all_reduce", "ring", 64)
    lines = grid(schedule, mark=(40, 70)).splitlines()
    assert lines[0].split()[1:] == [word for rank in range(32, 49) for word in ("rank", str(rank))]
    numbers = [int(line.split()[0]) for line in lines[1:]]
    assert numbers == list(range(54, 86))
    (marked,) = (line for line in lines if "**" in line)
    assert marked.startswith("  70  ")


def test_a_mark_where_no_drawn_rank_is_at_work_any_more() -> None:
    def program(rank: int) -> Program:
        for step in range(40 if rank == 0 else 2):
            yield Step(copy(out(step), inp(step)))

    schedule = Schedule("all_reduce", "uneven", 60, 40, 0, program)
    (marked,) = (line for line in grid(schedule, mark=(50, 39)).splitlines() if "**" in line)
    assert marked.split()[0] == "39"
    assert "**.**" in marked


def test_no_line_ends_in_blanks() -> None:
    for line in grid(schedule_of("gather", "binomial_tree", 6, 4)).splitlines():
        assert line == line.rstrip()


@pytest.mark.parametrize(
    "collective, name, rank, expected",
    [
        ("all_reduce", "ring", 2, ["send", "recvReduceSend", "recvReduceSend"]),
        ("all_gather", "ring", 1, ["copySend", "recvCopySend", "recvCopySend", "recv"]),
        ("reduce_scatter", "ring", 0, ["send", "recvReduceSend", "recvReduceSend"]),
        ("all_to_all", "pairwise", 0, ["send | copy", "recv | send"]),
        ("broadcast", "chain", 0, ["copySend"]),
        ("broadcast", "chain", 1, ["recvCopySend"]),
        ("broadcast", "chain", 3, ["recv"]),
        ("reduce", "direct", 0, ["recv | recv | recv | reduceCopy"]),
        ("reduce", "direct", 2, ["send"]),
        ("barrier", "dissemination", 0, ["send", "recvReduceSend", "recvReduceCopy"]),
    ],
)
def test_primitives(collective: str, name: str, rank: int, expected: list[str]) -> None:
    found = primitives(schedule_of(collective, name, 4), rank)
    assert found[: len(expected)] == expected


def test_a_copy_of_its_own() -> None:
    assert primitives(schedule_of("all_reduce", "ring", 1), 0) == ["copy"]
    assert primitives(schedule_of("scatter", "linear", 3), 0) == ["send | send | copy"]
