"""Programs of thread blocks as a schedule: what waits for what becomes steps.

Problem: in MSCCL and MSCCL++ the thread blocks of a rank run by themselves; each does its steps in
order, and waits for single steps of others. A schedule here has steps that all ranks count alike, in
which a message is sent and received, and reads see the state before the step.

What a format says becomes *events*, in four stages.

1. Order: an order of all events in which each comes after those that it waits for. There is none if
   the thread blocks wait for each other in a circle; the error names one. Sends do not wait for
   their receiver, as there: a connection has a buffer.
2. Values: the events are run on symbols, which finds out what each place holds: formats name places
   only, and references here name the chunk. Data that is not the chunk of its output place goes to
   a slot. So does an input that is needed after the output of its chunk was written; otherwise a
   program for separate buffers were wrong with input and output in one place.
3. Levels: an event that reads what another wrote is at least one step later; an event that writes
   what another read may share its step, since reads see the state before. A send and its receive
   are one node. The longest way to a node is its step. Where such constraints form a circle
   (a receive that comes late, of a message that was sent early), the message is received into a
   slot of its own, and taken from there later: the slot is the connection's buffer.
4. Steps: the operations of each level, for each rank.

Events that write one place, and do not wait for each other, are a race in the original. It goes
unnoticed: an order is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ringcoll.formats.block_events import Event, EventKind, ordered
from ringcoll.formats.components import levels_of
from ringcoll.formats.places import Places
from ringcoll.formats.values import Run
from ringcoll.schedule import (
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
    tmp,
)

_WAIT = Step()


def levelled(places: Places, name: str, events: list[Event], *, in_place: bool) -> Schedule:
    """Turn events into a schedule, which is still to be verified."""
    order = ordered(events)
    run = Run(places, events, order, in_place=in_place)
    if run.overwritten:
        run = Run(places, events, order, run.overwritten, in_place=in_place)
    staged: set[int] = set()
    while True:
        levels, in_circles = levels_of(*_constraints(places, run, staged))
        late = {number for number in run.order if run.events[number].message in in_circles} - staged
        if not late:
            break
        staged |= late
        run.take_slots(late)
    programs = _programs(places.world_size, run, staged, levels)
    return Schedule(
        collective=places.rules.collective,
        algorithm=name,
        world_size=places.world_size,
        num_chunks=places.num_chunks,
        num_slots=run.num_slots,
        program=lambda rank: _steps(programs[rank]),
        root=places.root,
    )


def _constraints(
    places: Places, run: Run, staged: set[int]
) -> tuple[int, list[tuple[int, int, int]]]:
    """Number of nodes, and (earlier, later, steps between them at least) of the constraints.

    The number of an event is also that of its node. The receive of a message has the node of its
    send, unless the message is staged.
    """
    edges: list[tuple[int, int, int]] = []
    writer: list[dict[tuple[Buffer, int], int]] = [{} for _ in range(places.world_size)]
    readers: list[dict[tuple[Buffer, int], list[int]]] = [{} for _ in range(places.world_size)]
    adding: set[tuple[int, tuple[Buffer, int]]] = set()
    for number in run.order:
        event, rank = run.events[number], run.events[number].rank
        node = number
        if event.message >= 0 and number in staged:
            edges.append((event.message, number, 1))
        elif event.message >= 0:
            node = event.message
        sources = [places.memory(rank, ref) for ref in event.sources]
        targets = [places.memory(rank, ref) for ref in event.targets]
        adds = event.kind is EventKind.REDUCE and number not in staged
        # Reductions of messages into one place may share a step, and are done in order.
        joined = {
            place
            for place, target in zip(sources, targets, strict=False)
            if adds and place == target and (rank, place) in adding
        }
        for place in sources:
            if place in writer[rank] and place not in joined:
                edges.append((writer[rank][place], node, 1))
            readers[rank].setdefault(place, []).append(node)
        for place in targets:
            edges += [(reader, node, 0) for reader in readers[rank].pop(place, ())]
            if place in writer[rank]:
                edges.append((writer[rank][place], node, 0 if place in joined else 1))
            writer[rank][place] = node
            if adds:
                adding.add((rank, place))
            else:
                adding.discard((rank, place))
    return len(run.events), [edge for edge in edges if edge[0] != edge[1]]


def _programs(
    world_size: int, run: Run, staged: set[int], levels: Sequence[int]
) -> list[dict[int, Step]]:
    """The steps of each rank in which it does anything, by their number.

    The operations of a step are in the order of the events, a send in that of its receive: so
    sends and receives of two ranks pair up, and sums are made in the original's order.
    """
    steps: list[dict[int, list[Operation]]] = [{} for _ in range(world_size)]
    for number in run.order:
        event = run.events[number]
        if event.message < 0:
            for operation in _local(event):
                steps[event.rank].setdefault(levels[number], []).append(operation)
            continue
        sender = run.events[event.message]
        level = levels[event.message]
        if number in staged:
            slots = run.slots[event.rank]
            buffer = tuple(
                tmp(slots[number, index], ref.chunk) for index, ref in enumerate(event.targets)
            )
            pairs: Iterator[tuple[Operation, Operation]] = iter(
                [(Send(event.rank, sender.sources), Recv(sender.rank, buffer))]
            )
            own = steps[event.rank].setdefault(levels[number], [])
            own += _taken(event, sender.rank, buffer)
        else:
            pairs = _messages(event, sender)
        for sent, received in pairs:
            steps[sender.rank].setdefault(level, []).append(sent)
            steps[event.rank].setdefault(level, []).append(received)
    return [
        {level: Step(*operations) for level, operations in program.items()} for program in steps
    ]


def _steps(program: dict[int, Step]) -> Iterator[Step]:
    """All steps of a rank; those in which it waits take no memory."""
    return (program.get(level, _WAIT) for level in range(1 + max(program, default=-1)))


def _local(event: Event) -> Iterator[Operation]:
    if event.kind is EventKind.COPY:
        yield from map(Copy, event.targets, event.sources)
    elif event.kind is EventKind.ADD:
        yield Reduce(event.targets[0], event.sources, event.finals[0])


def _messages(event: Event, sender: Event) -> Iterator[tuple[Operation, Operation]]:
    """The send and receive of a message; several of each if only some chunks become complete."""
    for final, group in groupby(range(len(event.targets)), key=event.finals.__getitem__):
        part = list(group)
        into = tuple(event.targets[index] for index in part)
        sent = Send(event.rank, tuple(sender.sources[index] for index in part))
        if event.kind is EventKind.RECV:
            yield sent, Recv(sender.rank, into)
        else:
            local = tuple(event.sources[index] for index in part)
            left = sender.rank < event.rank
            yield sent, RecvReduce(sender.rank, into, local, left, final)


def _taken(event: Event, source: int, buffer: Sequence[Ref]) -> Iterator[Operation]:
    """Take a message from the slots that it was received into."""
    for index, (into, arrived) in enumerate(zip(event.targets, buffer, strict=True)):
        if event.kind is EventKind.RECV:
            yield Copy(into, arrived)
        else:
            local = event.sources[index]
            operands = (arrived, local) if source < event.rank else (local, arrived)
            yield Reduce(into, operands, event.finals[index])
