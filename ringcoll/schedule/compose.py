"""Build programs from programs: renumber them, run them side by side or on earlier results.

Running one after the other needs no helper: ``yield from first; yield from
second``. Hierarchical and multi-channel algorithms need no more than this module. An
all-reduce on hosts of 4 ranks, for instance, is a reduce-scatter inside each
host, an all-reduce between the hosts and an all-gather inside each host::

    yield from unfinished(renumber(reduce_scatter(local, 4), peer=inside))
    yield from in_place(renumber(all_reduce(host, hosts), peer=across, chunk=own))
    yield from renumber(all_gather(local, 4), peer=inside)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from ringcoll.schedule.ir import (
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

    def refs(old_refs: Iterable[Ref]) -> tuple[Ref, ...]:
        return tuple(ref for old in old_refs for ref in _finer_refs(old, finer(old.chunk)))

    def rewritten(old: Operation) -> Iterable[Operation]:
        match old:
            case Send() | Recv():
                yield replace(old, refs=refs(old.refs))
            case RecvReduce():
                yield replace(old, into=refs(old.into), local=refs(old.local))
            case Copy():
                yield from map(Copy, refs([old.into]), refs([old.source]))
            case Reduce():
                sources = (refs([source]) for source in old.sources)
                for into, *operands in zip(refs([old.into]), *sources, strict=True):
                    yield replace(old, into=into, sources=tuple(operands))

    for step in program:
        yield Step(*(operation for old in step for operation in rewritten(old)))


def _finer_refs(old: Ref, chunks: Sequence[int]) -> Iterator[Ref]:
    """The places of finer chunks that stand for one place."""
    for index, chunk in enumerate(chunks):
        slot = old.slot * len(chunks) + index if old.buffer is Buffer.SCRATCH else old.slot
        yield Ref(old.buffer, chunk, slot)
