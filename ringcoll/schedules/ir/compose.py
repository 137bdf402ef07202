"""Build programs from programs: renumber them, run them side by side or on earlier results.

Running one after the other needs no helper: ``yield from first; yield from
second``. Hierarchical and multi-channel algorithms need no more than this module. An
all-reduce on hosts of 4 ranks, for instance, is a reduce-scatter inside each
host, an all-reduce between the hosts and an all-gather inside each host::

    yield from unfinished(renumber(reduce_scatter(local, 4), peer=inside))
    yield from in_place(renumber(all_reduce(host, hosts), peer=across, chunk=own))
    yield from renumber(all_gather(local, 4), peer=inside)

An all-reduce itself falls into two parts: until it has completed its chunks, and from there on.
Between them each chunk is complete on some ranks: on one after a ring, on the root of a tree, on
all after recursive doubling. There the results of several groups can be combined, by any other
all-reduce, and the second part passes on the results. The parts are found by the reductions that
are marked `final`::

    ring, rank 0 of 3   >1:2 +2:1 | >1:1 +2:0! | >1:0 <2:2 | >1:2 <2:1
                                               ^ here rank 0 has chunk 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, zip_longest

from ringcoll.errors import ScheduleError
from ringcoll.schedules.ir.counting import check_work
from ringcoll.schedules.ir.schedule import Schedule
from ringcoll.schedules.ir.steps import (
    Buffer,
    Copy,
    Operation,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Send,
    Step,
    copy,
    inp,
    out,
)


def parallel(*programs: Iterable[Step]) -> Program:
    """Run programs over disjoint data side by side, step by step.

    The programs must not share places: each works on its own chunks and slots
    (`renumber` moves them apart). Shorter programs end earlier.
    """
    for steps in zip_longest(*programs, fillvalue=Step()):
        yield Step(*(operation for step in steps for operation in step))


def _same(number: int) -> int:
    return number


def renumber(
    program: Iterable[Step],
    *,
    peer: Callable[[int], int] = _same,
    chunk: Callable[[int], int] = _same,
    slot: Callable[[int], int] = _same,
) -> Program:
    """Rewrite the numbers of peers, chunks and slots in a program.

    With ``peer`` an algorithm for k ranks runs on a subset, or in mirrored or
    rotated order; with ``chunk`` and ``slot`` it runs on some of the data.
    """

    def ref(old: Ref) -> Ref:
        new_slot = slot(old.slot) if old.buffer is Buffer.SCRATCH else old.slot
        return Ref(old.buffer, chunk(old.chunk), new_slot)

    for step in program:
        yield Step(*(operation.mapped(ref, peer) for operation in step))


def with_copy(program: Program, *chunks: int, on: bool = True) -> Program:
    """Let a rank copy chunks of its input to its output in the first step, if ``on`` says so."""
    if on:
        yield Step(*(copy(out(chunk), inp(chunk)) for chunk in chunks), *next(program))
    yield from program


def in_place(
    program: Iterable[Step],
    *,
    source: Callable[[int], Ref] = out,
    target: Callable[[int], Ref] = out,
) -> Program:
    """Let a program find its input in the output, where an earlier program has left it.

    The program then runs in place. Every algorithm is proved to be right in place as
    well, where its collective allows it. ``source`` and ``target`` are other places for the input
    and for the output, from the chunk. Copies of a place to itself are left out.
    """

    def ref(old: Ref) -> Ref:
        if old.buffer is Buffer.SCRATCH:
            return old
        return (source if old.buffer is Buffer.INPUT else target)(old.chunk)

    for step in program:
        moved = (operation.mapped(ref, _same) for operation in step)
        yield Step(*(op for op in moved if not isinstance(op, Copy) or op.into != op.source))


def unfinished(program: Iterable[Step]) -> Program:
    """Unmark the final reductions of a program, because another program completes the chunks."""
    for step in program:
        yield Step(
            *(
                replace(operation, final=False, unstated_final=False)
                if isinstance(operation, RecvReduce | Reduce)
                else operation
                for operation in step
            )
        )


def split(program: Iterable[Step], finer: Callable[[int], Sequence[int]]) -> Program:
    """Let a program work on finer chunks: each of its chunks stands for several finer ones.

    A message carries all of these, so there are as many messages as before.

    Parameters
    ----------
    program
        The steps. With n finer chunks for each chunk, n slots stand for each slot.
    finer
        The finer chunks that make up a chunk, from the number of the chunk; as many for each.
    """

    def finer_refs(old: Ref) -> Iterator[Ref]:
        chunks = finer(old.chunk)
        for index, chunk in enumerate(chunks):
            slot = old.slot * len(chunks) + index if old.buffer is Buffer.SCRATCH else old.slot
            yield Ref(old.buffer, chunk, slot)

    def refs(old_refs: Iterable[Ref]) -> tuple[Ref, ...]:
        return tuple(chain.from_iterable(map(finer_refs, old_refs)))

    def rewritten(old: Operation) -> Iterable[Operation]:
        match old:
            case Send() | Recv():
                yield replace(old, refs=refs(old.refs))
            case RecvReduce():
                yield replace(old, into=refs(old.into), local=refs(old.local))
            case Copy():
                yield from map(Copy, finer_refs(old.into), finer_refs(old.source))
            case Reduce():
                sources = map(finer_refs, old.sources)
                for into, *operands in zip(finer_refs(old.into), *sources, strict=True):
                    yield replace(old, into=into, sources=tuple(operands))

    for step in program:
        yield Step(*(operation for old in step for operation in rewritten(old)))


@dataclass(frozen=True, slots=True)
class Opening:
    """The place where an all-reduce falls into two parts."""

    first_steps: int
    """Steps of the first part."""
    completed: tuple[tuple[int, ...], ...]
    """Chunks that each rank has completed by then, in their order."""


@lru_cache(maxsize=256)
def step_count(schedule: Schedule) -> int:
    """Number of steps of the rank that has most of them."""
    return max(sum(1 for _ in schedule.steps(rank)) for rank in range(schedule.world_size))


@lru_cache(maxsize=256)
def opening_of(schedule: Schedule) -> Opening:
    """Find the place where an all-reduce falls into two parts.

    A `ScheduleError` says which rank passes on a chunk before all chunks are complete, or completes
    a chunk outside of the output.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> opening_of(schedule_of("all_reduce", "ring", 3))
    Opening(first_steps=2, completed=((0,), (1,), (2,)))
    >>> opening_of(schedule_of("all_reduce", "binomial_tree", 3))
    Opening(first_steps=2, completed=((0,), (), ()))
    """
    if schedule.world_size == 1:
        return Opening(0, (tuple(range(schedule.num_chunks)),))
    check_work(schedule)
    programs = [tuple(schedule.steps(rank)) for rank in range(schedule.world_size)]
    completed: list[dict[Ref, int]] = [{} for _ in programs]  # in which step
    for known, steps in zip(completed, programs, strict=True):
        for number, step in enumerate(steps):
            for operation in step:
                if isinstance(operation, RecvReduce | Reduce) and operation.final:
                    known.update(dict.fromkeys(operation.writes, number))
    first_steps = 1 + max(number for known in completed for number in known.values())
    for rank, (known, steps) in enumerate(zip(completed, programs, strict=True)):
        for number, step in enumerate(steps[:first_steps]):
            for ref in (ref for operation in step for ref in operation.reads):
                if known.get(ref, number) < number:
                    raise _refusal(schedule, rank, ref, f"is passed on in step {number}, too early")
        for ref in known:
            if ref.buffer is not Buffer.OUTPUT:
                raise _refusal(schedule, rank, ref, "is not in the output")
    return Opening(
        first_steps, tuple(tuple(sorted(ref.chunk for ref in refs)) for refs in completed)
    )


def _refusal(schedule: Schedule, rank: int, ref: Ref, reason: str) -> ScheduleError:
    return ScheduleError(
        f"{schedule.algorithm} all_reduce on {schedule.world_size} ranks does not fall into two "
        f"parts, so that a hierarchy can have it only as its outermost algorithm: on rank {rank} "
        f"the complete chunk {ref} {reason}"
    )
