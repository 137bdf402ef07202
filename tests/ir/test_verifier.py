"""The verifier accepts nothing that is wrong: one case for each check, and mutations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest

from ringcoll.errors import RingcollError, ScheduleError, TooLargeError, VerificationError
from ringcoll.schedules import (
    Buffer,
    Copy,
    Operation,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    Step,
    contract,
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
from ringcoll.schedules.algorithms import Algorithm, find, schedule_of
from ringcoll.schedules.ir import counting
from ringcoll.schedules.ir.verifier import Proof, _Symbols, bitwise_equal, verify
from tests.cases.algorithms import EVERY, each_on, name_of

# --- mutations: a correct schedule with one thing changed -----------------------------

Programs = tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Place:
    """One operation of a schedule."""

    rank: int
    step: int
    index: int


def programs_of(schedule: Schedule) -> Programs:
    return tuple(tuple(schedule.steps(rank)) for rank in range(schedule.world_size))


def with_programs(schedule: Schedule, programs: Programs) -> Schedule:
    return replace(schedule, program=lambda rank: programs[rank], stated_cost=None)


def places(programs: Programs) -> list[Place]:
    return [
        Place(rank, number, index)
        for rank, steps in enumerate(programs)
        for number, step in enumerate(steps)
        for index in range(len(step))
    ]


def operation_at(programs: Programs, place: Place) -> Operation:
    return programs[place.rank][place.step][place.index]


def put(programs: Programs, place: Place, *operations: Operation) -> Programs:
    """Replace one operation by others, or by none."""
    steps = list(programs[place.rank])
    step = steps[place.step]
    steps[place.step] = Step(*step[: place.index], *operations, *step[place.index + 1 :])
    return (*programs[: place.rank], tuple(steps), *programs[place.rank + 1 :])


def append(programs: Programs, rank: int, number: int, operation: Operation) -> Programs:
    """Add an operation to a step, which may lie behind the last one."""
    steps = [*programs[rank]]
    steps += [Step()] * (number + 1 - len(steps))
    steps[number] = Step(*steps[number], operation)
    return (*programs[:rank], tuple(steps), *programs[rank + 1 :])


def refs_of(operation: Operation) -> tuple[Ref, ...]:
    match operation:
        case Send(_, refs) | Recv(_, refs):
            return refs
        case RecvReduce(_, into, local):
            return into + local
        case Copy(into_ref, source):
            return (into_ref, source)
        case Reduce(into_ref, sources):
            return (into_ref, *sources)


def with_refs(operation: Operation, refs: tuple[Ref, ...]) -> Operation:
    match operation:
        case Send() | Recv():
            return replace(operation, refs=refs)
        case RecvReduce(_, into):
            return replace(operation, into=refs[: len(into)], local=refs[len(into) :])
        case Copy():
            return Copy(*refs)
        case Reduce():
            return replace(operation, into=refs[0], sources=refs[1:])


def other_peers(schedule: Schedule, place: Place, operation: Operation) -> Iterator[Operation]:
    if isinstance(operation, Send | Recv | RecvReduce):
        for peer in range(-1, schedule.world_size + 1):
            if peer != operation.peer:
                yield replace(operation, peer=peer)


def other_refs(operation: Operation, change: Callable[[Ref], Ref]) -> Iterator[Operation]:
    refs = refs_of(operation)
    for index, ref in enumerate(refs):
        if (changed := change(ref)) != ref:
            yield with_refs(operation, (*refs[:index], changed, *refs[index + 1 :]))


def other_chunks(schedule: Schedule, place: Place, operation: Operation) -> Iterator[Operation]:
    def next_chunk(ref: Ref) -> Ref:
        return ref._replace(chunk=(ref.chunk + 1) % (schedule.num_chunks + 1))

    yield from other_refs(operation, next_chunk)


def other_slots(schedule: Schedule, place: Place, operation: Operation) -> Iterator[Operation]:
    def next_slot(ref: Ref) -> Ref:
        if ref.buffer is not Buffer.SCRATCH:
            return ref
        return ref._replace(slot=(ref.slot + 1) % schedule.num_slots)

    yield from other_refs(operation, next_slot)


def other_marks(schedule: Schedule, place: Place, operation: Operation) -> Iterator[Operation]:
    if isinstance(operation, RecvReduce | Reduce):
        yield replace(operation, final=not operation.final)


def other_order(schedule: Schedule, place: Place, operation: Operation) -> Iterator[Operation]:
    if isinstance(operation, RecvReduce):
        yield replace(operation, received_left=not operation.received_left)
    if isinstance(operation, Reduce) and len(operation.sources) > 1:
        yield replace(operation, sources=operation.sources[::-1])


Mutant = tuple[str, Schedule]


def rewritten(
    schedule: Schedule, rewrite: Callable[[Schedule, Place, Operation], Iterator[Operation]]
) -> Iterator[Mutant]:
    programs = programs_of(schedule)
    for place in places(programs):
        operation = operation_at(programs, place)
        for changed in rewrite(schedule, place, operation):
            mutant = with_programs(schedule, put(programs, place, changed))
            yield f"{place}: {operation} -> {changed}", mutant


def dropped(schedule: Schedule) -> Iterator[Mutant]:
    programs = programs_of(schedule)
    for place in places(programs):
        yield f"{place}: dropped", with_programs(schedule, put(programs, place))


def doubled(schedule: Schedule) -> Iterator[Mutant]:
    programs = programs_of(schedule)
    for place in places(programs):
        operation = operation_at(programs, place)
        mutant = with_programs(schedule, put(programs, place, operation, operation))
        yield f"{place}: {operation} twice", mutant


def moved(schedule: Schedule, by: int) -> Iterator[Mutant]:
    """One operation a step later or earlier; ranks may then need a step more."""
    programs = programs_of(schedule)
    for place in places(programs):
        if place.step + by < 0:
            continue
        operation = operation_at(programs, place)
        mutant = append(put(programs, place), place.rank, place.step + by, operation)
        yield f"{place}: {operation} moved by {by}", with_programs(schedule, mutant)


def late_messages(schedule: Schedule) -> Iterator[Mutant]:
    """A message a step later at both ends."""
    programs = programs_of(schedule)
    for place in places(programs):
        sending = operation_at(programs, place)
        if not isinstance(sending, Send):
            continue
        before = programs[place.rank][place.step][: place.index]
        number = sum(isinstance(op, Send) and op.peer == sending.peer for op in before)
        ends = [
            Place(sending.peer, place.step, index)
            for index, operation in enumerate(programs[sending.peer][place.step])
            if isinstance(operation, Recv | RecvReduce) and operation.peer == place.rank
        ]
        end = ends[number]
        arriving = operation_at(programs, end)
        late = put(put(programs, place), end)
        late = append(late, place.rank, place.step + 1, sending)
        late = append(late, end.rank, place.step + 1, arriving)
        yield f"{place}: {sending} late at both ends", with_programs(schedule, late)


def accumulate_in_turn(first: Operation, second: Operation) -> bool:
    """Whether both add to one place: in program order, which is then the order of operands."""
    if not (isinstance(first, RecvReduce) and isinstance(second, RecvReduce)):
        return False
    return not {ref.place for ref in first.into}.isdisjoint(ref.place for ref in second.into)


def swapped(schedule: Schedule, *, in_turn: bool) -> Iterator[Mutant]:
    """Neighbours of a step swapped: those that accumulate into one place in turn, or all others."""
    programs = programs_of(schedule)
    for place in places(programs):
        step = programs[place.rank][place.step]
        if place.index + 1 == len(step):
            continue
        if in_turn is not accumulate_in_turn(step[place.index], step[place.index + 1]):
            continue
        behind = Place(place.rank, place.step, place.index + 1)
        mutant = put(put(programs, place, step[behind.index]), behind, step[place.index])
        yield f"{place}: swapped with the next", with_programs(schedule, mutant)


def strayed(schedule: Schedule) -> Iterator[Mutant]:
    """One more operation, which changes nothing and whose place is not there."""
    programs = programs_of(schedule)
    numbers = schedule.num_chunks, schedule.num_slots
    nowhere = inp(numbers[0]), out(numbers[0]), out(-1), tmp(numbers[1], 0), tmp(-1, 0)
    for place in places(programs):
        operation = operation_at(programs, place)
        for ref in nowhere:
            for stray in (copy(ref, ref), reduce(ref, ref, final=False)):
                mutant = put(programs, place, operation, stray)
                yield f"{place}: {stray} behind it", with_programs(schedule, mutant)


def copied(schedule: Schedule) -> Iterator[Mutant]:
    """A place that an operation reads or writes is also copied to itself."""
    programs = programs_of(schedule)
    for place in places(programs):
        operation = operation_at(programs, place)
        for ref in refs_of(operation):
            mutant = put(programs, place, operation, copy(ref, ref))
            yield f"{place}: {ref} copied to itself", with_programs(schedule, mutant)


FATAL: dict[str, Callable[[Schedule], Iterator[Mutant]]] = {
    "drop": dropped,
    "double": doubled,
    "misroute": lambda schedule: rewritten(schedule, other_peers),
    "re-chunk": lambda schedule: rewritten(schedule, other_chunks),
    "stray": strayed,
}
HARMFUL_OR_EQUIVALENT: dict[str, Callable[[Schedule], Iterator[Mutant]]] = {
    "delay": lambda schedule: moved(schedule, 1),
    "hasten": lambda schedule: moved(schedule, -1),
    "delay message": late_messages,
    "swap": lambda schedule: swapped(schedule, in_turn=False),
    "swap turns": lambda schedule: swapped(schedule, in_turn=True),
    "copy to itself": copied,
    "other slot": lambda schedule: rewritten(schedule, other_slots),
}


def root_of(algorithm: Algorithm, world_size: int) -> int:
    return (world_size - 1) // 2 if contract(algorithm.collective).rooted else 0


def some(mutants: Iterator[Mutant], most: int, seed: str) -> list[Mutant]:
    """All of the mutants, or as many of them, drawn alike in every run."""
    everyone = list(mutants)
    return everyone if len(everyone) <= most else random.Random(seed).sample(everyone, most)


def failure(schedule: Schedule, what: str) -> VerificationError:
    try:
        verify(schedule)
    except VerificationError as error:
        return error
    raise AssertionError(f"passes although {what}")


Memory = dict[tuple[str, int], int]


def run_on_numbers(
    schedule: Schedule, inputs: list[Memory], shared: list[set[int]]
) -> list[Memory]:
    """Run a schedule by other means than the verifier; returns what memory holds at the end.

    ``shared`` are the chunks whose input and output are one place, for each rank.
    """
    programs, memory = programs_of(schedule), [dict(values) for values in inputs]

    def where(rank: int, ref: Ref) -> tuple[str, int]:
        if ref.buffer is Buffer.SCRATCH:
            return "tmp", ref.slot
        return ("in" if ref.chunk in shared[rank] else str(ref.buffer), ref.chunk)

    for number in range(max(map(len, programs))):
        now = [steps[number] if number < len(steps) else Step() for steps in programs]
        mail: dict[tuple[int, int], list[list[int]]] = {}
        for rank, step in enumerate(now):
            for operation in step:
                if isinstance(operation, Send):
                    values = [memory[rank][where(rank, ref)] for ref in operation.refs]
                    mail.setdefault((rank, operation.peer), []).append(values)
        for rank, step in enumerate(now):
            before, after = memory[rank], dict[tuple[str, int], int]()
            for operation in step:
                match operation:
                    case Recv(peer, refs):
                        for ref, value in zip(refs, mail[peer, rank].pop(0), strict=True):
                            after[where(rank, ref)] = value
                    case RecvReduce(peer, into, local):
                        arrived = mail[peer, rank].pop(0)
                        for ref, own, value in zip(into, local, arrived, strict=True):
                            place = where(rank, own)
                            again = place in after and place == where(rank, ref)
                            after[where(rank, ref)] = (after if again else before)[place] + value
                    case Copy(into_ref, source):
                        after[where(rank, into_ref)] = before[where(rank, source)]
                    case Reduce(into_ref, sources):
                        shares = [before[where(rank, ref)] for ref in sources]
                        after[where(rank, into_ref)] = sum(shares)
                    case Send():
                        pass
            before.update(after)
    return memory


def runs_right(schedule: Schedule, *, in_place: bool) -> bool:
    """Run a schedule on numbers and look whether the contract is kept.

    Rank r contributes 16**r to a reduction, so a sum tells how often each rank is in
    it; where nothing is reduced, every chunk has its own number.
    """
    rules, world_size, root = contract(schedule.collective), schedule.world_size, schedule.root
    per_block = rules.chunks_per_block(schedule.num_chunks, world_size)

    def chunks(blocks: Sequence[int]) -> set[int]:
        return {block * per_block + part for block in blocks for part in range(per_block)}

    def data(rank: int, chunk: int) -> int:
        return 1 << 4 * rank if rules.reduces else 1000 * rank + chunk

    had = [chunks(rules.inputs(rank, world_size, root)) for rank in range(world_size)]
    wanted = [chunks(rules.outputs(rank, world_size, root)) for rank in range(world_size)]
    shared = [mine & due if in_place else set() for mine, due in zip(had, wanted, strict=True)]
    inputs: list[Memory] = [
        {("in", chunk): data(rank, chunk) for chunk in mine} for rank, mine in enumerate(had)
    ]
    memory = run_on_numbers(schedule, inputs, shared)

    def right(rank: int, chunk: int) -> bool:
        got = memory[rank].get(("in" if chunk in shared[rank] else "out", chunk), -1)
        if rules.at_least_once:
            return all((got >> 4 * other) % 16 for other in range(world_size))
        if rules.reduces:
            return got == sum(
                1 << 4 * other for other in range(rules.contributors(rank, world_size))
            )
        return got == data(rules.owner(chunk // per_block, world_size, root), chunk)

    return all(right(rank, chunk) for rank, due in enumerate(wanted) for chunk in due)


def right_where_run(schedule: Schedule) -> bool:
    aliasings = {False, contract(schedule.collective).in_place}
    return all(runs_right(schedule, in_place=in_place) for in_place in aliasings)


@pytest.mark.parametrize("algorithm, world_size", each_on(1, 2, 3, 5, 8))
def test_what_is_proved_is_right_where_run(algorithm: Algorithm, world_size: int) -> None:
    schedule = algorithm.schedule(world_size, root_of(algorithm, world_size))
    verify(schedule)
    assert right_where_run(schedule)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, world_size", each_on(2, 3, 5, 8))
def test_a_fatal_mutation_fails(algorithm: Algorithm, world_size: int) -> None:
    schedule = algorithm.schedule(world_size, root_of(algorithm, world_size))
    for kind, mutate in FATAL.items():
        mutants = some(mutate(schedule), 15, f"{name_of(algorithm)} {kind}")
        assert mutants, kind
        for what, mutant in mutants:
            error = failure(mutant, what)
            assert error.rank in range(world_size), what
            assert error.step is not None, what
            assert error.grid.count("**") == 2, what


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, world_size", each_on(2, 3, 5, 8))
def test_a_mutation_that_passes_is_equivalent(algorithm: Algorithm, world_size: int) -> None:
    schedule = algorithm.schedule(world_size, root_of(algorithm, world_size))
    original = verify(schedule)
    mutants = (
        (kind, *mutant)
        for kind, mutate in HARMFUL_OR_EQUIVALENT.items()
        for mutant in some(mutate(schedule), 10, f"{name_of(algorithm)} {kind}")
    )
    for kind, what, mutant in mutants:
        try:
            proof = verify(mutant)
        except VerificationError:
            continue
        assert right_where_run(mutant), what
        if kind not in ("delay message", "swap turns"):
            assert proof.orders == original.orders, what
        elif not contract(algorithm.collective).at_least_once:
            # What comes later may be added later, but once; and the proof tells the order.
            assert kind == "delay message" or proof.orders != original.orders, what
            for chunk, order in proof.orders.items():
                assert Counter(order) == Counter(original.order(chunk)), what


def test_mutations_of_both_outcomes_occur() -> None:
    schedule = schedule_of("all_gather", "ring", 4)
    outcomes = Counter[str]()
    for mutants in HARMFUL_OR_EQUIVALENT.values():
        for _, mutant in mutants(schedule):
            try:
                verify(mutant)
            except VerificationError:
                outcomes["fails"] += 1
            else:
                outcomes["passes"] += 1
    assert min(outcomes["fails"], outcomes["passes"]) > 10


REDUCING = tuple(
    algorithm
    for algorithm in EVERY
    if contract(algorithm.collective).reduces and not contract(algorithm.collective).at_least_once
)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, world_size", each_on(2, 3, 5, entries=REDUCING))
def test_a_wrong_final_mark_fails(algorithm: Algorithm, world_size: int) -> None:
    schedule = algorithm.schedule(world_size, root_of(algorithm, world_size))
    mutants = list(rewritten(schedule, other_marks))
    assert mutants or not verify(schedule).reduced  # an exscan of two ranks only moves data
    for what, mutant in mutants:
        assert "marked final" in failure(mutant, what).message


@pytest.mark.slow
@pytest.mark.parametrize("algorithm, world_size", each_on(2, 3, 5, entries=REDUCING))
def test_operands_the_other_way_round_show_in_the_order(
    algorithm: Algorithm, world_size: int
) -> None:
    schedule = algorithm.schedule(world_size, root_of(algorithm, world_size))
    original = verify(schedule)
    for what, mutant in rewritten(schedule, other_order):
        proof = verify(mutant)
        # Of a prefix, `orders` are those on the last rank.
        shown = (proof.orders, proof.same_everywhere, proof.rank_order)
        assert shown != (original.orders, True, original.rank_order), what


# --- one case for each check ----------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A schedule that has to fail, and how."""

    name: str
    text: str
    message: str
    rank: int
    step: int
    cell: str
    peer: int | None = None
    chunk: int | None = None
    expected: object = None
    got: object = None


GLOBAL = (
    "steps are global: all ranks count the same steps, and a rank that waits yields an empty Step()"
)
BROKEN = (
    Broken(
        "two writers",
        """schedule all_gather broken world_size=2 num_chunks=2 num_slots=0 root=0
rank 0
  copy out[0] = in[0] ; send in[0] to 1 ; recv out[1] from 1
rank 1
  copy out[1] = in[1] ; send in[1] to 0 ; recv out[0] from 0 ; copy out[1] = in[1]
""",
        "out[1] has two writers in one step",
        rank=1,
        step=0,
        chunk=1,
        cell="=1 >0:1 <0:0 =1",
    ),
    Broken(
        "a receive and a reduction into one place",
        """schedule all_reduce broken world_size=2 num_chunks=1 num_slots=0 root=0
rank 0
  recv out[0] from 1 ; recv_reduce out[0] = in[0] + recv from 1 final
rank 1
  send in[0] to 0 ; send in[0] to 0
""",
        "out[0] has two writers in one step",
        rank=0,
        step=0,
        chunk=0,
        cell="<1:0 +1:0!",
    ),
    Broken(
        "reading what was never written",
        """schedule broadcast broken world_size=3 num_chunks=1 num_slots=0 root=0
rank 0
  copy out[0] = in[0] ; send in[0] to 1
rank 1
  recv out[0] from 0 ; send out[0] to 2
rank 2
  recv out[0] from 1
""",
        "reads out[0], which was never written",
        rank=1,
        step=0,
        chunk=0,
        cell="<0:0 >2:0",
    ),
    Broken(
        "reading a chunk that is not in the input",
        """schedule scatter broken world_size=2 num_chunks=2 num_slots=0 root=1
rank 0
  copy out[0] = in[0]
rank 1
  copy out[1] = in[1]
""",
        "reads in[0], which is not in its input",
        rank=0,
        step=0,
        chunk=0,
        cell="=0",
    ),
    Broken(
        "writing the input",
        """schedule all_reduce broken world_size=2 num_chunks=1 num_slots=0 root=0
rank 0
  send in[0] to 1 ; recv_reduce in[0] = in[0] + recv from 1 final
rank 1
  send in[0] to 0 ; recv_reduce out[0] = recv + in[0] from 0 final
""",
        "writes in[0], but the input must survive",
        rank=0,
        step=0,
        chunk=0,
        cell=">1:0 +1:0!",
    ),
    Broken(
        "writing an output that the rank does not have",
        """schedule reduce broken world_size=2 num_chunks=1 num_slots=0 root=1
rank 0
  send in[0] to 1 ; copy out[0] = in[0]
rank 1
  recv_reduce out[0] = recv + in[0] from 0 final
""",
        "writes out[0], which is not in its output",
        rank=0,
        step=0,
        chunk=0,
        cell=">1:0 =0",
    ),
    Broken(
        "undeclared scratch",
        """schedule reduce broken world_size=2 num_chunks=1 num_slots=2 root=0
rank 0
  recv_reduce out[0] = in[0] + recv from 1 final
rank 1
  send in[0] to 0 ; copy tmp2[0] = in[0]
""",
        "writes tmp2[0] outside the stated scratch",
        rank=1,
        step=0,
        chunk=0,
        expected="2 slots",
        got="slot 2",
        cell=">0:0 =0",
    ),
    Broken(
        "a slot read as another length than written",
        """schedule all_gather broken world_size=2 num_chunks=2 num_slots=1 root=0
rank 0
  copy tmp0[0] = in[0]
  send tmp0[1] to 1
rank 1
  -
  recv out[1] from 0
""",
        "tmp0[1] holds data of another length class",
        rank=0,
        step=1,
        chunk=1,
        expected="chunk 1",
        got="chunk 0",
        cell=">1:1",
    ),
    Broken(
        "a copy to a place of another length",
        """schedule all_gather broken world_size=2 num_chunks=2 num_slots=0 root=0
rank 0
  copy out[1] = in[0]
rank 1
  -
""",
        "out[1] holds data of another length class",
        rank=0,
        step=0,
        chunk=1,
        expected="chunk 1",
        got="chunk 0",
        cell="=1",
    ),
    Broken(
        "reducing chunks of two lengths",
        """schedule reduce_scatter broken world_size=2 num_chunks=2 num_slots=0 root=0
rank 0
  reduce out[0] = in[0] + in[1]
rank 1
  -
""",
        "in[0] holds data of another length class",
        rank=0,
        step=0,
        chunk=0,
        expected="chunk 0",
        got="chunk 1",
        cell="S0",
    ),
    Broken(
        "a message of other chunks than expected",
        """schedule all_gather broken world_size=2 num_chunks=2 num_slots=1 root=0
rank 0
  recv out[0] from 1
rank 1
  send in[1] to 0
""",
        "the message carries other chunks than the receive expects",
        rank=0,
        step=0,
        peer=1,
        expected=[0],
        got=[1],
        cell="<1:0",
    ),
    Broken(
        "a message of more chunks than expected",
        """schedule reduce_scatter broken world_size=2 num_chunks=2 num_slots=1 root=0
rank 0
  recv_reduce out[0] = in[0] + recv from 1 final
rank 1
  send in[0] in[1] to 0
""",
        "the message carries other chunks than the receive expects",
        rank=0,
        step=0,
        peer=1,
        expected=[0],
        got=[0, 1],
        cell="+1:0!",
    ),
    Broken(
        "messages in the wrong order",
        """schedule gather broken world_size=2 num_chunks=4 num_slots=0 root=0
rank 0
  copy out[0] = in[0] ; copy out[1] = in[1] ; recv out[2] from 1 ; recv out[3] from 1
rank 1
  send in[3] to 0 ; send in[2] to 0
""",
        "the message carries other chunks than the receive expects",
        rank=0,
        step=0,
        peer=1,
        expected=[2],
        got=[3],
        cell="=0 =1 <1:2 <1:3",
    ),
    Broken(
        "a send without a receive",
        """schedule all_gather broken world_size=2 num_chunks=2 num_slots=0 root=0
rank 0
  copy out[0] = in[0] ; send in[0] to 1
rank 1
  copy out[1] = in[1]
  recv out[0] from 0
""",
        f"the message is sent in step 0, but received in step 1; {GLOBAL}",
        rank=0,
        step=0,
        peer=1,
        chunk=0,
        cell="=0 >1:0",
    ),
    Broken(
        "a receive without a send",
        """schedule all_gather broken world_size=2 num_chunks=2 num_slots=0 root=0
rank 0
  copy out[0] = in[0]
  send in[0] to 1
rank 1
  copy out[1] = in[1] ; recv out[0] from 0
""",
        f"the message is received in step 0, but sent in step 1; {GLOBAL}",
        rank=1,
        step=0,
        peer=0,
        chunk=0,
        cell="=1 <0:0",
    ),
    Broken(
        "a rank as its own peer",
        """schedule all_gather broken world_size=2 num_chunks=2 num_slots=0 root=0
rank 0
  copy out[0] = in[0]
  -
  send in[0] to 0 ; recv out[1] from 1
rank 1
  -
""",
        "the peer is not another rank of the world",
        rank=0,
        step=2,
        peer=0,
        expected="0 to 1, not 0",
        got=0,
        cell=">0:0 <1:1",
    ),
    Broken(
        "a peer outside the world",
        """schedule all_gather broken world_size=2 num_chunks=2 num_slots=0 root=0
rank 0
  -
rank 1
  recv out[0] from 2
""",
        "the peer is not another rank of the world",
        rank=1,
        step=0,
        peer=2,
        expected="0 to 1, not 1",
        got=2,
        cell="<2:0",
    ),
    Broken(
        "a contribution that is there twice",
        """schedule all_reduce broken world_size=2 num_chunks=1 num_slots=0 root=0
rank 0
  send in[0] to 1 ; recv_reduce out[0] = in[0] + recv from 1 final
rank 1
  send in[0] to 0 ; recv_reduce out[0] = recv + in[0] from 0 final
  reduce out[0] = out[0] + in[0] final
""",
        "out[0] ends wrong",
        rank=1,
        step=1,
        chunk=0,
        expected="every rank exactly once",
        got="chunk 0 from ranks 0, 1 (2 times)",
        cell="S0!",
    ),
    Broken(
        "a contribution that is missing",
        """schedule all_reduce broken world_size=3 num_chunks=1 num_slots=0 root=0
rank 0
  recv_reduce out[0] = in[0] + recv from 1
  send out[0] to 1 ; send out[0] to 2
rank 1
  send in[0] to 0
  recv out[0] from 0
rank 2
  -
  recv out[0] from 0
""",
        "out[0] ends wrong",
        rank=0,
        step=1,
        chunk=0,
        expected="every rank exactly once",
        got="chunk 0 from ranks 0, 1",
        cell=">1:0 >2:0",
    ),
    Broken(
        "an output that is never written",
        """schedule broadcast broken world_size=3 num_chunks=1 num_slots=0 root=2
rank 0
  recv out[0] from 2
rank 1
rank 2
  copy out[0] = in[0] ; send in[0] to 0
""",
        "out[0] ends wrong",
        rank=1,
        step=0,
        chunk=0,
        expected="the data of rank 2",
        got="nothing",
        cell=".",
    ),
    Broken(
        "wrong only where input and output share memory",
        """schedule all_reduce broken world_size=2 num_chunks=1 num_slots=0 root=0
rank 0
  recv_reduce out[0] = in[0] + recv from 1 final
  send in[0] to 1
rank 1
  send in[0] to 0
  recv_reduce out[0] = recv + in[0] from 0 final
""",
        "out[0] ends wrong when input and output share memory",
        rank=1,
        step=1,
        chunk=0,
        expected="every rank exactly once",
        got="chunk 0 from ranks 0, 1 (2 times)",
        cell="+0:0!",
    ),
    Broken(
        "marked final before it is complete",
        """schedule reduce broken world_size=3 num_chunks=1 num_slots=0 root=1
rank 0
  send in[0] to 1
rank 1
  recv_reduce out[0] = recv + in[0] from 0 final
  recv_reduce out[0] = out[0] + recv from 2 final
rank 2
  -
  send in[0] to 1
""",
        "the reduction of out[0] is marked final",
        rank=1,
        step=0,
        chunk=0,
        expected="the mark where, and only where, a chunk is complete",
        got="chunk 0 from ranks 0, 1",
        cell="+0:0!",
    ),
    Broken(
        "complete and not marked final",
        """schedule reduce broken world_size=2 num_chunks=1 num_slots=1 root=1
rank 0
  send in[0] to 1
rank 1
  recv tmp0[0] from 0
  reduce out[0] = tmp0[0] + in[0]
""",
        "the reduction of out[0] is not marked final",
        rank=1,
        step=1,
        chunk=0,
        expected="the mark where, and only where, a chunk is complete",
        got="chunk 0 from ranks 0, 1",
        cell="S0",
    ),
)


def test_a_rank_that_counts_twice_is_not_forgotten_later() -> None:
    """The last reduction joins contributions that have nobody in common."""

    def program(rank: int) -> Iterator[Step]:
        if rank:
            yield Step()
            yield Step(*[send(0, inp(0))] * (rank == 1))
            yield Step(*[send(0, inp(0))] * (rank == 2))
            return
        yield Step(reduce(tmp(0, 0), inp(0), inp(0), final=False))
        yield Step(recv_reduce(1, tmp(1, 0), tmp(0, 0), received_left=False, final=False))
        yield Step(recv_reduce(2, out(0), tmp(1, 0), received_left=False, final=True))

    with pytest.raises(VerificationError, match=r"from ranks 0 \(2 times\), 1, 2"):
        verify(Schedule("reduce", "twice", 3, 1, 2, program))


@pytest.mark.parametrize("slot", [-1, 2])
@pytest.mark.parametrize("is_received", [False, True])
def test_scratch_outside_of_what_is_stated_is_not_written(slot: int, is_received: bool) -> None:
    def program(rank: int) -> Iterator[Step]:
        if is_received:
            yield Step(send(1 - rank, inp(0)), recv(1 - rank, tmp(slot, 0)))
        else:
            yield Step(copy(tmp(slot, 0), inp(0)))
        yield Step(
            send(1 - rank, inp(0)),
            recv_reduce(1 - rank, out(0), inp(0), received_left=rank == 1, final=True),
        )

    with pytest.raises(VerificationError, match=rf"writes tmp{slot}\[0\] outside the stated"):
        verify(Schedule("all_reduce", "outside", 2, 1, 2, program))


def test_a_copy_and_a_reduction_into_one_place() -> None:
    def program(rank: int) -> Iterator[Step]:
        yield Step(
            copy(out(0), inp(0)),
            send(1 - rank, inp(0)),
            recv_reduce(1 - rank, out(0), inp(0), received_left=rank == 1, final=True),
        )

    with pytest.raises(VerificationError, match=r"out\[0\] has two writers in one step"):
        verify(Schedule("all_reduce", "two writers", 2, 1, 0, program))


@pytest.mark.parametrize(
    "operation, message",
    [
        (copy(out(99), out(99)), "reads out[99], which was never written"),
        (copy(tmp(0, 1), tmp(0, 0)), "tmp0[1] holds data of another length class"),
        (copy(tmp(1, 0), tmp(1, 0)), "reads tmp1[0], which was never written"),
        (copy(inp(0), inp(0)), "writes in[0], but the input must survive"),
        (copy(inp(0), out(0)), "writes in[0], but the input must survive"),
        (reduce(out(9), out(9), final=False), "reads out[9], which was never written"),
    ],
    ids=str,
)
def test_a_copy_within_one_place_is_looked_at(operation: Operation, message: str) -> None:
    def program(rank: int) -> Program:
        yield Step(
            copy(tmp(0, 0), inp(0)), send(1 - rank, inp(0)), recv_reduce(1 - rank, out(0), inp(0))
        )
        yield Step(copy(out(0), out(0)), copy(tmp(0, 0), tmp(0, 0)))
        if rank == 1:
            yield Step(operation)

    error = failure(schedule_with(program, num_slots=1), "an operand is nowhere")
    assert (error.message, error.rank, error.step) == (message, 1, 2)
    assert error.grid.count("**") == 2


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_each_check_fails_where_it_should(broken: Broken) -> None:
    with pytest.raises(VerificationError) as caught:
        verify(Schedule.from_text(broken.text))
    error = caught.value
    assert error.message == broken.message
    assert (error.rank, error.step, error.peer, error.chunk) == (
        broken.rank,
        broken.step,
        broken.peer,
        broken.chunk,
    )
    assert (error.expected, error.got) == (broken.expected, broken.got)
    assert f"**{broken.cell}**" in error.grid
    assert error.grid.count("**") == 2
    assert f"rank {broken.rank}, step {broken.step}" in str(error)
    assert str(error).endswith(error.grid)


def test_the_in_place_failure_is_right_out_of_place() -> None:
    (broken,) = (case for case in BROKEN if "share memory" in case.name)
    schedule = Schedule.from_text(broken.text)
    assert runs_right(schedule, in_place=False)
    assert not runs_right(schedule, in_place=True)


def schedule_with(
    program: Callable[[int], Program], *, collective: str = "all_reduce", num_slots: int = 0
) -> Schedule:
    return Schedule(collective, "broken", 2, 1, num_slots, program)


def raising_at_once(rank: int) -> Program:
    raise KeyError(f"rank {rank}")


def raising_later(rank: int) -> Program:
    yield Step(send(1 - rank, inp(0)), recv(1 - rank, tmp(0, 0)))
    if rank == 1:
        raise ZeroDivisionError("no such step")


@pytest.mark.parametrize(
    "program, rank, step, cause",
    [(raising_at_once, 0, 0, KeyError), (raising_later, 1, 1, ZeroDivisionError)],
)
def test_a_program_that_raises(
    program: Callable[[int], Program], rank: int, step: int, cause: type[Exception]
) -> None:
    with pytest.raises(VerificationError, match=f"the program raised {cause.__name__}: ") as caught:
        verify(schedule_with(program, num_slots=1))
    assert (caught.value.rank, caught.value.step) == (rank, step)
    assert isinstance(caught.value.__cause__, cause)
    assert str(caught.value.__cause__) in caught.value.message
    assert caught.value.message.endswith("of test_verifier.py)")
    assert f"{step}  " in caught.value.grid
    assert caught.value.grid.count("**") == 2
    if step:
        assert "0  >1:0 <1:0  >0:0 <0:0" in caught.value.grid


def raising_behind_a_mistake(rank: int) -> Program:
    yield Step(send(1 - rank, inp(0)))
    raise ZeroDivisionError("never reached, except by drawing")


def test_a_later_fault_does_not_hide_an_earlier_one() -> None:
    with pytest.raises(VerificationError, match="never received"):
        verify(schedule_with(raising_behind_a_mistake))


def without_step(rank: int) -> Iterator[Operation]:
    yield send(1 - rank, inp(0))


def with_a_bare_yield(rank: int) -> Iterator[None]:
    yield


def with_a_word(rank: int) -> Iterator[Step]:
    yield Step("send")  # type: ignore[arg-type]


def reducing_nothing(rank: int) -> Program:
    yield Step(reduce(out(0)))


def with_one_local_chunk_for_two(rank: int) -> Program:
    if rank == 0:
        yield Step(send(1, inp(0), inp(0)))
    else:
        into = (out(0), tmp(0, 0))
        yield Step(recv_reduce(0, into, inp(0), received_left=True, final=True))


def with_an_empty_message(rank: int) -> Program:
    yield Step(send(1 - rank), recv(1 - rank))


def reading_a_negative_slot(rank: int) -> Program:
    """Slot -1 would lie where the output is."""
    yield Step(copy(out(0), inp(0)))
    yield Step(copy(tmp(0, 0), tmp(-1, 0)))


@pytest.mark.parametrize(
    "program, message, rank",
    [
        (without_step, "which is not a Step", 0),
        (with_a_bare_yield, "the program yielded None, which is not a Step", 0),
        (with_a_word, "is not an operation", 0),
        (reducing_nothing, "there is nothing to reduce", 0),
        (with_one_local_chunk_for_two, "as many local as target chunks are needed", 1),
        (with_an_empty_message, "the message has no chunk", 0),
        (reading_a_negative_slot, "was never written", 0),
    ],
)
def test_what_is_not_a_program(program: Callable[[int], Program], message: str, rank: int) -> None:
    with pytest.raises(VerificationError, match=message) as caught:
        verify(schedule_with(program, num_slots=1))
    assert caught.value.rank == rank


@pytest.mark.parametrize(
    "operation, name",
    [
        (send(1, 0), "Send"),  # type: ignore[arg-type]
        (recv(1, inp(0), 0), "Recv"),  # type: ignore[arg-type]
        (recv_reduce(1, 0, 0), "RecvReduce"),  # type: ignore[arg-type]
        (copy(0, 0), "Copy"),  # type: ignore[arg-type]
        (reduce(out(0), inp(0), 0), "Reduce"),  # type: ignore[arg-type]
        (copy(out(0), (inp(0),)), "Copy"),  # type: ignore[arg-type]
        (Send(1, [inp(0)]), "Send"),  # type: ignore[arg-type]
        (send(1, inp(0.0)), "Send"),  # type: ignore[arg-type]
        (copy(out(False), inp(0)), "Copy"),
        (copy(tmp(0.0, 0), inp(0)), "Copy"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_something_else_for_a_reference(operation: Operation, name: str) -> None:
    def program(rank: int) -> Program:
        yield Step(operation) if rank == 0 else Step(send(0, inp(0), inp(0)))

    error = failure(schedule_with(program, num_slots=1), "it has no reference")
    assert error.message == f"{name} has no reference to a chunk"
    assert (error.rank, error.step) == (0, 0)
    assert error.got in ("0", "(inp(0),)", "[inp(0)]", "inp(0.0)", "out(False)", "tmp(0.0, 0)")
    assert error.expected == "inp(chunk), out(chunk) or tmp(slot, chunk)"


def test_a_peer_that_is_no_integer() -> None:
    def program(rank: int) -> Program:
        yield Step(send((1 - rank) / 1, inp(0)))  # type: ignore[arg-type]

    assert "not another rank" in failure(schedule_with(program), "of half a rank").message


# --- facts that a program leaves to the library ----------------------------------------


def with_open_facts(schedule: Schedule, *, order: bool) -> Schedule:
    """A schedule whose reductions leave `final`, and perhaps the order, to the library."""

    def opened(operation: Operation) -> Operation:
        if isinstance(operation, RecvReduce):
            return replace(operation, final=False, unstated_final=True, unstated_order=order)
        if isinstance(operation, Reduce):
            return replace(operation, final=False, unstated_final=True)
        return operation

    programs = tuple(
        tuple(Step(*map(opened, step)) for step in schedule.steps(rank))
        for rank in range(schedule.world_size)
    )
    return with_programs(schedule, programs)


@pytest.mark.parametrize("algorithm, world_size", each_on(1, 2, 3, 5, 8, entries=REDUCING))
def test_final_is_found(algorithm: Algorithm, world_size: int) -> None:
    stated = algorithm.schedule(world_size, root_of(algorithm, world_size))
    opened = with_open_facts(stated, order=False)
    assert opened == stated
    assert opened.to_text() == stated.to_text()
    assert grid(opened) == grid(stated)
    assert [primitives(opened, rank) for rank in range(world_size)] == [
        primitives(stated, rank) for rank in range(world_size)
    ]
    assert verify(opened).orders == verify(stated).orders


def test_one_run_of_all_ranks_finds_final_for_all_of_them() -> None:
    stated, called = schedule_of("all_reduce", "ring", 5), Counter[int]()
    opened = with_open_facts(stated, order=False)

    def program(rank: int) -> Program:
        called[rank] += 1
        return iter(opened.program(rank))

    schedule = replace(opened, program=program)
    for _ in range(3):
        assert tuple(schedule.steps(2)) == tuple(stated.steps(2))
    assert called == {0: 1, 1: 1, 2: 4, 3: 1, 4: 1}


def test_a_wrong_schedule_has_no_finals() -> None:
    opened = with_open_facts(schedule_of("all_reduce", "ring", 3), order=False)
    late = replace(opened, program=lambda rank: [Step()] * rank + [*opened.program(rank)])
    with pytest.raises(VerificationError, match="steps are global"):
        late.to_text()


def test_a_message_that_completes_some_of_its_chunks() -> None:
    """Rank 0 adds the share of rank 1 to chunk 0, and sends chunk 1 as it is."""

    def program(rank: int) -> Program:
        if rank == 1:
            yield Step(send(0, inp(0)))
            yield Step()
            yield Step(send(2, inp(1)))
        elif rank == 0:
            yield Step(recv_reduce(1, tmp(0, 0), inp(0)))
            yield Step(send(2, tmp(0, 0), inp(1)))
        else:
            yield Step()
            yield Step(recv_reduce(0, (out(0), out(1)), (inp(0), inp(1))))
            yield Step(recv_reduce(1, out(1), out(1)))

    schedule = Schedule("reduce", "mixed", 3, 2, 1, program, root=2)
    error = failure(schedule, "one message is final for one chunk only")
    assert "completes some of its chunks" in error.message
    assert (error.rank, error.step) == (2, 1)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["recursive_doubling", "rabenseifner", "binomial_tree"])
def test_the_operand_of_the_lower_rank_is_left(name: str, world_size: int) -> None:
    stated = schedule_of("all_reduce", name, world_size)
    opened = with_open_facts(stated, order=True)
    assert opened == stated
    assert verify(opened).rank_order


# --- a stated cost ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "cost, name, stated, counted",
    [
        ((5, Fraction(3, 2), Fraction(3, 4)), "rounds", "5", "6"),
        ((6, Fraction(2), Fraction(3, 4)), "traffic", "2", "3/2"),
        ((6, Fraction(3, 2), Fraction(0)), "reduced", "0", "3/4"),
    ],
)
def test_a_wrong_cost(
    cost: tuple[int, Fraction, Fraction], name: str, stated: str, counted: str
) -> None:
    ring = schedule_of("all_reduce", "ring", 4)
    error = failure(replace(ring, stated_cost=cost), "its cost is wrong")
    assert (
        f"all_reduce ring on 4 ranks: {name} is stated as {stated} and counted as {counted};"
        in (error.message)
    )
    assert error.grid == grid(ring)


def test_a_cost_in_floats() -> None:
    ring = schedule_of("all_reduce", "ring", 5)
    verify(replace(ring, stated_cost=(8, 2 * 4 / 5, 1 - 1 / 5)))  # type: ignore[arg-type]


def test_an_unknown_collective() -> None:
    with pytest.raises(ScheduleError, match="unknown collective 'gossip'"):
        verify(schedule_with(reducing_nothing, collective="gossip"))


def test_a_failure_is_a_value_error_of_the_library() -> None:
    error = failure(schedule_with(raising_at_once), "it raises")
    assert isinstance(error, RingcollError)
    assert isinstance(error, ValueError)


# --- what a proof says ----------------------------------------------------------------


def test_the_counts_of_a_ring() -> None:
    proof = verify(schedule_of("all_reduce", "ring", 5))
    assert (proof.rounds, proof.traffic, proof.reduced) == (8, Fraction(8, 5), Fraction(4, 5))
    assert (proof.sent_mean, proof.sent_max) == (Fraction(8, 5), Fraction(8, 5))
    assert (proof.messages_mean, proof.messages_max) == (Fraction(8), 8)
    assert (proof.ports, proof.in_flight) == (1, 2)
    assert proof.staged == frozenset()
    assert proof.order(3) == (4, 0, "+", 1, "+", 2, "+", 3, "+")


def test_the_counts_of_unequal_ranks() -> None:
    proof = verify(schedule_of("gather", "linear", 4, 2))
    assert (proof.rounds, proof.traffic, proof.reduced) == (1, Fraction(3, 4), Fraction(0))
    assert (proof.sent_mean, proof.sent_max) == (Fraction(3, 16), Fraction(1, 4))
    assert (proof.messages_mean, proof.messages_max) == (Fraction(3, 4), 1)
    assert (proof.ports, proof.in_flight) == (3, 3)


def test_a_step_without_messages_is_no_round() -> None:
    proof = verify(schedule_of("reduce", "direct", 3))
    assert len(list(proof.schedule.steps(0))) == 2
    assert proof.rounds == 1


def test_staged_where_a_sent_place_is_written() -> None:
    # From the second step on the vector lies in the output; in place, in the first too.
    proof = verify(schedule_of("all_reduce", "recursive_doubling", 4))
    assert proof.staged == {(rank, step) for rank in range(4) for step in range(2)}


def test_staged_where_a_local_operand_is_written() -> None:
    def program(rank: int) -> Program:
        peer = 1 - rank
        yield Step(send(peer, inp(0)), recv(peer, tmp(0, 0)))
        yield Step(
            send(peer, inp(0)),
            send(peer, inp(0)),
            recv(peer, tmp(0, 0)),
            recv_reduce(peer, tmp(1, 0), tmp(0, 0), received_left=True),
        )
        yield Step(reduce(out(0), tmp(0, 0), inp(0), final=True))

    schedule = Schedule("all_reduce", "staging", 2, 1, 2, program)
    # In the last step, only the in-place run writes what it reads.
    assert verify(schedule).staged == {(rank, step) for rank in range(2) for step in (1, 2)}


def test_a_recv_reduce_in_its_own_place_is_not_staged() -> None:
    for name in ("ring", "binary_tree", "double_tree"):
        assert verify(schedule_of("all_reduce", name, 8)).staged == frozenset()


def test_staged_where_one_message_reads_and_writes_crosswise() -> None:
    def program(rank: int) -> Program:
        first, second, third = tmp(0, 0), tmp(1, 0), tmp(2, 0)
        if rank == 0:
            yield Step(recv(2, first), copy(second, inp(0)))
            yield Step(copy(third, first))
            yield Step(recv_reduce(1, (first, second), (second, first)))
            yield Step(reduce(out(0), first, third))
            yield Step(send(1, out(0)), send(2, out(0)))
            return
        yield Step(send(0, inp(0))) if rank == 2 else Step()
        yield Step()
        yield Step(send(0, inp(0), inp(0))) if rank == 1 else Step()
        yield Step()
        yield Step(recv(0, out(0)))

    assert verify(Schedule("all_reduce", "crosswise", 3, 1, 3, program)).staged == {(0, 2)}


def test_a_copy_of_an_input_to_its_own_output_is_not_staged() -> None:
    """In place there is nothing to do."""

    def program(rank: int) -> Program:
        yield Step(copy(out(rank), inp(rank)))
        yield Step(send(1 - rank, inp(rank)), recv(1 - rank, out(1 - rank)))

    assert verify(Schedule("all_gather", "copied", 2, 2, 0, program)).staged == frozenset()


def proof_of(collective: str, name: str, world_size: int, root: int = 0) -> Proof:
    return verify(schedule_of(collective, name, world_size, root))


@pytest.mark.parametrize(
    "first, second, world_size, expected",
    [
        # both combine (0 1)(2 3) ..., the second in as many chunks as ranks
        ("binomial_tree", "recursive_doubling", 8, True),
        ("recursive_doubling", "rabenseifner", 8, True),
        ("recursive_doubling", "rabenseifner", 5, True),
        ("ring", "ring", 5, True),
        # ((0 1)(2 3))4 against ((0 1)2)(3 4)
        ("binomial_tree", "recursive_doubling", 5, False),
        ("direct", "binomial_tree", 4, False),
        ("direct", "binomial_tree", 3, True),
        # each chunk starts elsewhere in the ring
        ("ring", "direct", 4, False),
        ("ring", "bidirectional_ring", 4, False),
        ("binary_tree", "double_tree", 4, False),
        ("ring", "ring", 2, True),
    ],
)
def test_bitwise_equal(first: str, second: str, world_size: int, expected: bool) -> None:
    ours = proof_of("all_reduce", first, world_size)
    theirs = proof_of("all_reduce", second, world_size)
    assert bitwise_equal(ours, theirs) is expected
    assert bitwise_equal(theirs, ours) is expected


def test_not_bitwise_equal_where_ranks_differ() -> None:
    def own_share_first(rank: int) -> Program:
        others = [peer for peer in range(3) if peer != rank]
        yield Step(
            *(send(peer, inp(0)) for peer in others),
            *(recv(peer, tmp(peer, 0)) for peer in others),
        )
        yield Step(reduce(out(0), inp(0), *(tmp(peer, 0) for peer in others), final=True))

    proof = verify(Schedule("all_reduce", "own_share_first", 3, 1, 3, own_share_first))
    assert not proof.same_everywhere
    assert not proof.rank_order
    assert not proof.left_fold
    assert not bitwise_equal(proof, proof)
    direct = proof_of("all_reduce", "direct", 3)
    assert proof.orders == direct.orders  # those of rank 0
    assert not bitwise_equal(proof, direct)
    assert not bitwise_equal(direct, proof)


def test_orders_are_compared_down_to_the_leaves() -> None:
    """A leaf has no operands: the numbers that stand in their place are not values."""
    symbols = _Symbols()
    zero, one, zero_of_1, one_of_1 = [
        symbols.leaf(rank, chunk) for chunk in (0, 1) for rank in (0, 1)
    ]
    first, second = symbols.join(zero, one), symbols.join(zero_of_1, one_of_1)
    turned = symbols.join(one, zero)
    assert symbols.same_order(first, second)
    assert symbols.same_order(second, first)
    assert not symbols.same_order(first, turned)
    symbols.leaf(0, 2)  # the last value, where -1 would lead to
    for leaf in (zero, one, one_of_1):
        assert not symbols.same_order(first, leaf)
        assert not symbols.same_order(leaf, first)
    assert not symbols.same_order(zero, one)
    assert symbols.same_order(zero, zero_of_1)


def test_not_bitwise_equal_across_chunks_that_meet_in_short_vectors_only() -> None:
    """Chunk 2 of 4 and chunk 3 of 8 are apart in a vector of 8, and the same in one of 5."""

    def doubled(rank: int) -> Program:
        for step in find("all_reduce", "direct").program(rank, 2):
            yield Step(*(piece for operation in step for piece in cut(operation)))

    def cut(operation: Operation) -> Iterator[Operation]:
        for chunk in range(4):
            refs = tuple(ref._replace(chunk=chunk) for ref in refs_of(operation))
            slots = tuple(
                ref._replace(slot=4 * ref.slot + chunk) if ref.buffer is Buffer.SCRATCH else ref
                for ref in refs
            )
            changed = with_refs(operation, slots)
            if isinstance(changed, Reduce) and chunk >= 2:
                changed = replace(changed, sources=changed.sources[::-1])
            yield changed

    four = verify(Schedule("all_reduce", "turned", 2, 4, 8, doubled))
    assert four.orders == {chunk: (0, 1, "+") if chunk < 2 else (1, 0, "+") for chunk in range(4)}
    assert bitwise_equal(four, four)
    assert not bitwise_equal(four, proof_of("all_reduce", "direct", 2))


def test_rank_order_and_left_fold() -> None:
    assert proof_of("all_reduce", "binomial_tree", 4).rank_order
    assert not proof_of("all_reduce", "binomial_tree", 4).left_fold
    assert proof_of("all_reduce", "direct", 4).left_fold
    assert proof_of("reduce", "binomial_tree", 4, 0).rank_order
    assert not proof_of("reduce", "binomial_tree", 4, 1).rank_order
    assert not proof_of("all_reduce", "ring", 3).rank_order


def test_reductions_of_all_operands_at_once() -> None:
    assert proof_of("all_reduce", "two_shot", 4).at_once
    assert proof_of("all_reduce", "ring", 2).at_once
    assert not proof_of("all_reduce", "ring", 3).at_once

    def one_by_one(rank: int) -> Program:
        if rank:
            yield Step(send(0, inp(0)))
        else:
            yield Step(recv_reduce(1, out(0), inp(0)), recv_reduce(2, out(0), out(0)))

    proof = verify(Schedule("reduce", "one_by_one", 3, 1, 0, one_by_one))
    assert proof.left_fold
    assert not proof.at_once  # the sum of two is kept until the third comes


TWICE_FINAL = """\
schedule all_reduce twice world_size=2 num_chunks=1 num_slots=1 root=0
rank 0
  send in[0] to 1 ; recv_reduce tmp0[0] = in[0] + recv from 1 final
  reduce out[0] = tmp0[0]{mark}
rank 1
  send in[0] to 0 ; recv_reduce tmp0[0] = recv + in[0] from 0 final
  reduce out[0] = tmp0[0]{mark}
"""


def test_a_reduce_of_one_operand_completes_nothing():
    """An average would be divided twice."""
    assert verify(Schedule.from_text(TWICE_FINAL.format(mark=""))).same_everywhere
    with pytest.raises(VerificationError, match="is marked final") as caught:
        verify(Schedule.from_text(TWICE_FINAL.format(mark=" final")))
    assert (caught.value.rank, caught.value.step, caught.value.chunk) == (0, 1, 0)


def _exchanges_for_ever(rank: int) -> Iterator[Step]:
    while True:
        yield Step(send(1 - rank, inp(0)), recv(1 - rank, out(0)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "programs, error, text",
    [
        (lambda rank: iter(Step, None), TooLargeError, "no end"),
        (_exchanges_for_ever, TooLargeError, "no end"),
        (
            lambda rank: iter(()) if rank else _exchanges_for_ever(0),
            VerificationError,
            "nothing is sent",
        ),
    ],
    ids=["idle", "exchange", "one rank goes on"],
)
def test_programs_without_an_end_are_refused(
    programs: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        verify(Schedule("all_reduce", "endless", 2, 1, 0, programs))


def test_programs_may_have_so_many_steps_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of all ranks of a small schedule are counted together."""
    monkeypatch.setattr(counting, "MOST_STEPS", 12)

    def program(num_steps: int) -> Callable[[int], list[Step]]:
        own = [Step(copy(out(0), inp(0)))]
        return lambda rank: [*own, *[Step()] * (num_steps - 1)]

    verify(Schedule("barrier", "steps", 1, 1, 0, program(12)))
    with pytest.raises(TooLargeError, match="more than 12 steps, or no end"):
        verify(Schedule("barrier", "steps", 1, 1, 0, program(13)))
