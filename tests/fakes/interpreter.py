"""Step semantics on Python lists, straight from the docstring of `ringcoll.schedules.ir.steps`.

An interpreter that shares nothing with the planner and the executor: every place holds a
list of numbers, a step is done for all ranks at once, and all its reads come from a copy of
the state made before it.
"""

from __future__ import annotations

from collections.abc import Callable

from ringcoll.schedules import Buffer, Copy, Recv, RecvReduce, Reduce, Ref, Schedule, Send, Step

__all__ = ["Combine", "Finish", "Memory", "interpret"]

Memory = dict[tuple[Buffer, int], list[int]]
Combine = Callable[[int, int], int]
Finish = Callable[[int], int]


def interpret(
    schedule: Schedule, memory: list[Memory], combine: Combine, finish: Finish, *, in_place: bool
) -> None:
    """Run a schedule on the ranks' memories, in place.

    Parameters
    ----------
    schedule
        The schedule.
    memory
        What each place of each rank holds; input and output chunks that share their
        memory are one entry, that of the output, if ``in_place``.
    combine, finish
        What ``(+)`` does to two numbers, and what is done to a completed one.
    in_place
        Whether a chunk that a rank has as input and as output is one place.
    """
    ranks = range(schedule.world_size)
    programs = [list(schedule.steps(rank)) for rank in ranks]

    def place(rank: int, ref: Ref) -> tuple[Buffer, int]:
        if in_place and ref.buffer is Buffer.INPUT and (Buffer.OUTPUT, ref.chunk) in memory[rank]:
            return Buffer.OUTPUT, ref.chunk
        return ref.place

    def joined(left: list[int], right: list[int], final: bool) -> list[int]:
        totals = [combine(x, y) for x, y in zip(left, right, strict=True)]
        return [finish(total) for total in totals] if final else totals

    for number in range(max(map(len, programs))):
        steps = [steps[number] if number < len(steps) else Step() for steps in programs]
        before = [{where: list(held) for where, held in mine.items()} for mine in memory]
        mail: dict[tuple[int, int], list[list[list[int]]]] = {}
        for rank in ranks:
            for operation in steps[rank]:
                if isinstance(operation, Send):
                    letter = [before[rank][place(rank, ref)] for ref in operation.refs]
                    mail.setdefault((rank, operation.peer), []).append(letter)
        for rank in ranks:
            old, new, accumulated = before[rank], memory[rank], set[tuple[Buffer, int]]()
            for operation in steps[rank]:
                match operation:
                    case Send():
                        pass
                    case Recv(peer, refs):
                        letter = mail[peer, rank].pop(0)
                        for ref, held in zip(refs, letter, strict=True):
                            new[place(rank, ref)] = list(held)
                    case RecvReduce(peer, into, local, received_left, final):
                        letter = mail[peer, rank].pop(0)
                        for target, mine, held in zip(into, local, letter, strict=True):
                            where, source = place(rank, target), place(rank, mine)
                            again = where == source and where in accumulated
                            own = (new if again else old)[source]
                            pair = (held, own) if received_left else (own, held)
                            new[where] = joined(*pair, final)
                            accumulated.add(where)
                    case Copy(target, source_ref):
                        new[place(rank, target)] = list(old[place(rank, source_ref)])
                    case Reduce(target, sources, final):
                        parts = [old[place(rank, ref)] for ref in sources]
                        total = parts[0]
                        for index, part in enumerate(parts[1:], start=2):
                            total = joined(total, part, final and index == len(parts))
                        if len(parts) == 1 and final:
                            total = [finish(value) for value in total]
                        new[place(rank, target)] = list(total)
        assert not any(mail.values()), "a message was not received"
