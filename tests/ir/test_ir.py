"""The intermediate representation: text, equality, repr."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ringcoll.schedules.ir.steps
from ringcoll.errors import ScheduleError
from ringcoll.schedules import (
    Buffer,
    Copy,
    Operation,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    Step,
    contract,
    copy,
    inp,
    out,
    recv,
    recv_reduce,
    reduce,
    send,
    tmp,
)
from ringcoll.schedules.algorithms import Algorithm, schedule_of
from tests.cases.algorithms import EVERY, worlds_of

# The machine may be busy with other things.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
numbers = st.integers(0, 40)
references = st.one_of(
    st.builds(inp, numbers), st.builds(out, numbers), st.builds(tmp, numbers, numbers)
)
several = st.lists(references, min_size=1, max_size=4).map(tuple)
pairs = st.lists(st.tuples(references, references), min_size=1, max_size=3)


@st.composite
def recv_reduces(draw: st.DrawFn) -> RecvReduce:
    into, local = zip(*draw(pairs), strict=True)
    return RecvReduce(draw(numbers), into, local, draw(st.booleans()), draw(st.booleans()))


operations: st.SearchStrategy[Operation] = st.one_of(
    st.builds(Send, numbers, several),
    st.builds(Recv, numbers, several),
    recv_reduces(),
    st.builds(Copy, references, references),
    st.builds(Reduce, references, several, st.booleans()),
)
steps = st.lists(operations, max_size=4).map(lambda found: Step(*found))
programs = st.lists(st.lists(steps, max_size=5), min_size=1, max_size=4)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    algorithm: Algorithm = draw(st.sampled_from(EVERY))
    world_size = draw(st.sampled_from(worlds_of(algorithm, *range(1, 13))))
    rooted = contract(algorithm.collective).rooted
    return algorithm.schedule(world_size, draw(st.integers(0, world_size - 1)) if rooted else 0)


def of_programs(found: list[list[Step]]) -> Schedule:
    return Schedule("barrier", "any", len(found), 1, 0, lambda rank: found[rank])


@unhurried
@given(schedules())
def test_text_round_trip_of_algorithms(schedule: Schedule) -> None:
    again = Schedule.from_text(schedule.to_text())
    assert again == schedule
    assert hash(again) == hash(schedule)
    assert again.to_text() == schedule.to_text()


@pytest.mark.slow
@unhurried
@given(programs)
def test_text_round_trip_of_any_program(found: list[list[Step]]) -> None:
    schedule = of_programs(found)
    assert Schedule.from_text(schedule.to_text()) == schedule


@unhurried
@given(steps)
def test_repr_evaluates_back(step: Step) -> None:
    names = vars(ringcoll.schedules.ir.steps)
    again = eval(repr(step), names)
    assert again == step
    assert type(again) is Step
    for operation in step:
        assert eval(repr(operation), names) == operation


@unhurried
@given(references)
def test_repr_and_place_of_a_reference(ref: Ref) -> None:
    assert eval(repr(ref), vars(ringcoll.schedules.ir.steps)) == ref
    if ref.buffer is Buffer.SCRATCH:
        assert ref.place == (Buffer.SCRATCH, ref.slot)
        assert str(ref) == f"tmp{ref.slot}[{ref.chunk}]"
    else:
        assert ref.place == (ref.buffer, ref.chunk)
        assert str(ref) == f"{ref.buffer}[{ref.chunk}]"


def test_the_text_form() -> None:
    def program(rank: int) -> list[Step]:
        if rank == 0:
            return [Step(), Step(send(1, inp(0), tmp(2, 1)), copy(out(0), inp(0)))]
        both = (out(0), tmp(1, 1))
        return [
            Step(recv(0, tmp(0, 0))),
            Step(recv_reduce(0, both, (inp(0), inp(1)), received_left=True, final=False)),
            Step(recv_reduce(0, out(0), inp(0), received_left=False, final=True)),
            Step(reduce(out(1), inp(1), tmp(1, 1), tmp(0, 1), final=True)),
        ]

    schedule = Schedule("all_reduce", "example", 2, 2, 3, program)
    assert schedule.to_text() == (
        "schedule all_reduce example world_size=2 num_chunks=2 num_slots=3 root=0\n"
        "rank 0\n"
        "  -\n"
        "  send in[0] tmp2[1] to 1 ; copy out[0] = in[0]\n"
        "rank 1\n"
        "  recv tmp0[0] from 0\n"
        "  recv_reduce out[0] tmp1[1] = recv + in[0] in[1] from 0\n"
        "  recv_reduce out[0] = in[0] + recv from 0 final\n"
        "  reduce out[1] = in[1] + tmp1[1] + tmp0[1] final\n"
    )
    assert Schedule.from_text(schedule.to_text()) == schedule


HEADER = "schedule all_gather x world_size=2 num_chunks=2 num_slots=1 root=0"
GOOD = [HEADER, "rank 0", "  send in[0] to 1", "rank 1", "  recv out[0] from 0"]


def test_the_text_that_is_broken_below_is_good() -> None:
    assert Schedule.from_text("\n".join(GOOD)).world_size == 2


@pytest.mark.parametrize(
    "line, text, message",
    [
        (1, "schedule all_gather x world_size=two", "line 1: expected 'schedule"),
        (1, "", "line 1: expected 'schedule"),
        (1, HEADER + " extra", "line 1: expected 'schedule"),
        (2, "rank 1", "line 2: expected a step or 'rank 0'"),
        (2, "  send in[0] to 1", "line 2: expected a step or 'rank 0'"),
        (3, "send in[0] to 1", "line 3: expected a step or 'rank 1'"),
        (3, "  send in[0] to one", "line 3: 'send in[0] to one' is not an operation"),
        (3, "  send in0[0] to 1", "line 3: 'in0[0]' is not a reference"),
        (3, "  send tmp[0] to 1", "line 3: 'tmp[0]' is not a reference"),
        (3, "  send in[-1] to 1", "line 3: 'in[-1]' is not a reference"),
        (3, "  send into[0] to 1", "line 3: 'into[0]' is not a reference"),
        (3, "  copy out[0] = in[0] in[1]", "line 3: 'copy out[0] = in[0] in[1]' is not"),
        (3, "  reduce out[0] = ", "line 3: 'reduce out[0] =' is not an operation"),
        (5, "  recv out[0] from 0 ;; copy out[1] = in[1]", "line 5: "),
        (5, "  recv out[0] from 0 final", "line 5: 'recv out[0] from 0 final' is not"),
        (5, "  multiply out[0]", "line 5: 'multiply out[0]' is not an operation"),
        (6, "rank 3", "line 6: expected a step or 'rank 2'"),
        (6, "rank 2", "line 6: the text ends after 3 ranks, expected 2"),
    ],
)
def test_malformed_text_names_the_line(line: int, text: str, message: str) -> None:
    lines = [*GOOD[: line - 1], text, *GOOD[line:]]
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_text("\n".join(lines))
    assert str(caught.value).startswith(message)


def test_text_that_ends_too_early() -> None:
    with pytest.raises(ScheduleError, match="line 3: the text ends after 1 ranks, expected 2"):
        Schedule.from_text("\n".join(GOOD[:3]))
    with pytest.raises(ScheduleError, match="line 1: expected"):
        Schedule.from_text("")


def test_equality_is_of_content() -> None:
    ring = schedule_of("all_reduce", "ring", 4)
    same = replace(ring, program=lambda rank: list(ring.steps(rank)))
    assert same == ring
    assert hash(same) == hash(ring)
    assert same != "ring"


@pytest.mark.parametrize(
    "changed",
    [
        {"collective": "barrier"},
        {"algorithm": "circle"},
        {"num_chunks": 8},
        {"num_slots": 1},
        {"root": 3},
        {"program": lambda rank: [*schedule_of("all_reduce", "ring", 4).steps(rank), Step()]},
        {"program": lambda rank: schedule_of("all_reduce", "ring", 4).steps((rank + 1) % 4)},
    ],
)
def test_inequality(changed: dict[str, object]) -> None:
    ring = schedule_of("all_reduce", "ring", 4)
    assert replace(ring, **changed) != ring  # type: ignore[arg-type]  # one field at a time
    assert schedule_of("all_reduce", "ring", 5) != ring


def test_a_schedule_is_lazy() -> None:
    called: list[int] = []

    def program(rank: int) -> list[Step]:
        called.append(rank)
        return []

    schedule = Schedule("barrier", "lazy", 10_000, 1, 0, program)
    assert list(schedule.steps(7_777)) == []
    assert called == [7_777]


@pytest.mark.parametrize("rank", [-1, 4])
def test_steps_of_no_rank(rank: int) -> None:
    with pytest.raises(ScheduleError, match=f"rank {rank} is not in a world of 4 ranks"):
        schedule_of("all_reduce", "ring", 4).steps(rank)


def test_a_schedule_needs_ranks_and_a_root_among_them() -> None:
    with pytest.raises(ScheduleError, match="at least 1, got 0"):
        Schedule("barrier", "none", 0, 1, 0, lambda rank: [])
    with pytest.raises(ScheduleError, match="root 2 is not in a world of 2 ranks"):
        Schedule("broadcast", "none", 2, 1, 0, lambda rank: [], root=2)
    with pytest.raises(ScheduleError, match="root 5"):
        Schedule.from_text("\n".join([GOOD[0].replace("root=0", "root=5"), *GOOD[1:]]))


def test_operations_are_frozen_and_built_by_their_short_names() -> None:
    assert send(3, inp(1), out(2)) == Send(3, (inp(1), out(2)))
    assert recv(3, out(2)) == Recv(3, (out(2),))
    assert copy(out(1), inp(1)) == Copy(out(1), inp(1))
    pair = (inp(1), tmp(0, 1))
    assert reduce(out(1), *pair, final=False) == Reduce(out(1), pair, final=False)
    assert reduce(out(1), *pair) == Reduce(out(1), pair, final=False, unstated_final=True)
    one = recv_reduce(2, out(1), inp(1), received_left=True, final=True)
    assert one == RecvReduce(2, (out(1),), (inp(1),), received_left=True, final=True)
    assert recv_reduce(2, (out(1),), (inp(1),), received_left=False, final=True) != one
    open_one = recv_reduce(2, out(1), inp(1))
    assert open_one == replace(
        one, received_left=False, final=False, unstated_order=True, unstated_final=True
    )
    with pytest.raises(FrozenInstanceError):
        one.peer = 5  # type: ignore[misc]  # that is the point
