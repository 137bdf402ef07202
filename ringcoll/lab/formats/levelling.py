"""Programs of thread blocks as a schedule: the waits of thread blocks become steps.

Problem: in MSCCL and MSCCL++ the thread blocks of a rank run by themselves; each does its steps in
order, and waits for single steps of others. A schedule here has steps that all ranks count alike,
in which a message is sent and received, and reads see the state before the step.

The actions in a file become *events*, and these a schedule, in four stages.

1. Order: an order of all events in which each comes after those that it waits for. There is none if
   the thread blocks wait for each other in a circle; the error names one. Sends do not wait for
   their receiver, as there: a connection has a buffer.
2. Values: the events are run on symbols, which shows the chunk in each place: formats name places
   only, and references here name the chunk. Data that is not the chunk of its output place goes to
   a slot. So does an input that is needed after the output of its chunk was written; otherwise a
   program for separate buffers were wrong with input and output in one place.
3. Levels: an event that reads what another wrote is at least one step later; an event that writes
   what another read may share its step, since reads see the state before. A send and its receive
   are one node. The longest way to a node is its step. Where such constraints form a circle (a
   receive that comes late, of a message that was sent early), the message is received into a slot
   of its own, and taken from there later: the slot is the connection's buffer.
4. Steps: the operations of each level, for each rank.

Events that write one place, and do not wait for each other, are a race in the original. It goes
unnoticed: an order is chosen.

Source of the components that are strongly connected: M. Sharir, "A strong-connectivity algorithm
and its applications in data flow analysis", 1981; written without recursion.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial, reduce
from graphlib import CycleError, TopologicalSorter
from itertools import groupby

from ringcoll.errors import ScheduleError
from ringcoll.lab.formats.places import Place, Places
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
    inp,
    out,
    tmp,
)

_SHOWN = 6  # events of a circle
_WAIT = Step()


class EventKind(Enum):
    """The kind of an event; `RECV` and `REDUCE` take a message."""

    SEND = auto()
    RECV = auto()
    REDUCE = auto()  # receives, and reduces with the places that are read
    COPY = auto()
    ADD = auto()  # writes the sum of all places that are read
    NOTHING = auto()


@dataclass(slots=True)
class Event:
    """An action of a rank; events that it refers to are numbers."""

    rank: int
    kind: EventKind
    reads: tuple[Place, ...]  # in the order of the message
    writes: tuple[Place, ...]
    before: list[int]  # the events that it waits for
    where: str  # in the original, for errors
    message: int = -1  # the send whose message it receives

    # Results of the run on symbols.
    sources: tuple[Ref, ...] = field(default=(), init=False)
    targets: tuple[Ref, ...] = field(default=(), init=False)
    finals: tuple[bool, ...] = field(default=(), init=False)


def levelled(places: Places, name: str, events: list[Event], *, in_place: bool) -> Schedule:
    """Turn events into a schedule, which is still to be verified."""
    order = _ordered(events)
    run = _Run(places, events, order, in_place=in_place)
    if run.overwritten:
        run = _Run(places, events, order, run.overwritten, in_place=in_place)
    staged: set[int] = set()
    while True:
        levels, in_circles = levels_of(len(run.events), _constraints(places, run, staged))
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
        num_slots=max(map(len, run.slots)),
        program=lambda rank: (
            programs[rank].get(level, _WAIT) for level in range(1 + max(programs[rank], default=-1))
        ),
        root=places.root,
    )


# --- order ----------------------------------------------------------------------------------


def _waits_for(event: Event) -> Sequence[int]:
    return event.before if event.message < 0 else [*event.before, event.message]


def _ordered(events: Sequence[Event]) -> list[int]:
    """An order of the events, or an error that names those in a circle."""
    sorter = TopologicalSorter[int](dict.fromkeys(range(len(events)), ()))
    for number, event in enumerate(events):
        sorter.add(number, *_waits_for(event))
    try:
        return list(sorter.static_order())
    except CycleError as error:
        circle: list[int] = error.args[1][::-1]
    first, *others = dict.fromkeys(events[number].where for number in circle)
    shown = others[: _SHOWN - 1]
    if len(others) > len(shown):
        shown[-1] += " ..."
    circle_in_words = ", which waits for ".join([*shown, first])
    raise ScheduleError(f"{first} waits for {circle_in_words}: this is a deadlock")


# --- values ---------------------------------------------------------------------------------

_SUMS = (EventKind.REDUCE, EventKind.ADD)
_Value = tuple[int, int]  # the chunk, and the ranks that contributed, as bits
_Input = tuple[int, int]  # rank and chunk


class _Run:
    """The events, run on symbols; each gets its references."""

    def __init__(
        self,
        places: Places,
        events: Sequence[Event],
        order: Sequence[int],
        kept: frozenset[_Input] = frozenset(),
        *,
        in_place: bool,
    ) -> None:
        self.places, self.events = places, list(events)
        self.order: list[int] = []
        self.everyone = (1 << places.world_size) - 1
        self.completes = places.rules.reduces and not places.rules.at_least_once
        self.values: list[list[_Value]] = [[] for _ in events]  # that are sent
        self.slots: list[dict[object, int]] = [{} for _ in range(places.world_size)]
        self.written: set[_Input] = set()
        self.overwritten: frozenset[_Input] = frozenset()
        self._kept = kept
        self._outputs = [frozenset(places.outputs(rank)) for rank in range(places.world_size)]
        self.memory: list[dict[Place, tuple[Ref, _Value]]] = [
            {("i", chunk): (inp(chunk), (chunk, 1 << rank)) for chunk in places.inputs(rank)}
            for rank in range(places.world_size)
        ]
        for rank, chunk in sorted(kept):
            self._add(rank, ("i", chunk), ("kept", chunk))
        for number in order:
            self._do(number)
        for rank in range(places.world_size if in_place else 0):
            held = self.memory[rank]
            for chunk in places.outputs(rank):
                if ("io", chunk) not in held and ("i", chunk) in held:  # it was never written
                    self._add(rank, ("io", chunk), ("io", chunk))

    def take_slots(self, late: set[int]) -> None:
        """Give slots to messages that are received early."""
        for number in late:
            rank = self.events[number].rank
            for index in range(len(self.events[number].targets)):
                self.slots[rank][number, index] = len(self.slots[rank])

    def _add(self, rank: int, source: Place, target: Place) -> None:
        """Add a copy that the original does not do."""
        self.events.append(Event(rank, EventKind.COPY, (source,), (target,), [], "the library"))
        self.values.append([])
        self._do(len(self.events) - 1)

    def _do(self, number: int) -> None:
        event = self.events[number]
        self.order.append(number)
        pairs = [self._read(event, place) for place in event.reads]
        event.sources, values = tuple(ref for ref, _ in pairs), [value for _, value in pairs]
        if event.kind is EventKind.SEND:
            self.values[number] = values
        elif event.kind is EventKind.RECV:
            values = self.values[event.message]
        elif event.kind is EventKind.REDUCE:
            both = zip(values, self.values[event.message], strict=True)
            values = [_sum(event, *pair) for pair in both]
        elif event.kind is EventKind.ADD:
            values = [reduce(partial(_sum, event), values)]
        if event.writes:
            written = zip(event.writes, values, strict=True)
            event.targets = tuple(self._write(event, *pair) for pair in written)
            event.finals = tuple(
                self.completes and event.kind in _SUMS and contributors == self.everyone
                for _, contributors in values
            )

    def _read(self, event: Event, place: Place) -> tuple[Ref, _Value]:
        rank, (word, number) = event.rank, place
        if (rank, number) in self._kept and word == "i" and event.writes != (("kept", number),):
            place = ("kept", number)
        held = self.memory[rank].get(place)
        if held is None and word == "io":
            held = self.memory[rank].get(("i", number))
        if held is None:
            name = {"i": "input chunk", "o": "output chunk", "io": "chunk"}.get(word, "scratch")
            raise ScheduleError(f"{event.where} reads {name} {number}, which was never written")
        if held[0].buffer is Buffer.INPUT and (rank, number) in self.written:
            self.overwritten |= {(rank, number)}
        return held

    def _write(self, event: Event, place: Place, value: _Value) -> Ref:
        rank, (word, number) = event.rank, place
        chunk, _ = value
        if word in ("o", "io") and number == chunk and chunk in self._outputs[rank]:
            ref = out(chunk)
            if word == "o" and self.places.rules.in_place and value != (chunk, 1 << rank):
                self.written.add((rank, chunk))
        else:
            ref = tmp(self.slots[rank].setdefault(place, len(self.slots[rank])), chunk)
        self.memory[rank][place] = ref, value
        return ref


def _sum(event: Event, ours: _Value, theirs: _Value) -> _Value:
    if ours[0] != theirs[0]:
        raise ScheduleError(f"{event.where} adds chunk {theirs[0]} to chunk {ours[0]}")
    return ours[0], ours[1] | theirs[1]


# --- levels ---------------------------------------------------------------------------------


def _constraints(places: Places, run: _Run, staged: set[int]) -> list[tuple[int, int, int]]:
    """Constraints: the earlier node, the later one, and the fewest steps between them.

    A node is an event, by its number; a send and its receive are one, unless the message is staged.
    """
    edges: list[tuple[int, int, int]] = []
    writer: list[dict[tuple[Buffer, int], int]] = [{} for _ in range(places.world_size)]
    readers: list[dict[tuple[Buffer, int], list[int]]] = [{} for _ in range(places.world_size)]
    adding: set[tuple[int, tuple[Buffer, int]]] = set()
    for number in run.order:
        event, rank = run.events[number], run.events[number].rank
        is_staged = number in staged
        node = number if is_staged or event.message < 0 else event.message
        if is_staged:
            edges.append((event.message, number, 1))
        sources = [places.memory(rank, ref) for ref in event.sources]
        targets = [places.memory(rank, ref) for ref in event.targets]
        adds = event.kind is EventKind.REDUCE and not is_staged
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
    return [edge for edge in edges if edge[0] != edge[1]]


def levels_of(
    num_nodes: int, edges: Iterable[tuple[int, int, int]]
) -> tuple[list[int], frozenset[int]]:
    """The longest way to each node, which nodes of a circle share; and nodes of wrong circles.

    A circle is wrong if a constraint in it is longer than 0.
    """
    following: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
    for start, end, length in edges:
        following[start].append((end, length))
    components, component_of = _components(following)
    levels = [0] * num_nodes
    bad: set[int] = set()
    for nodes in components:
        level = max(levels[node] for node in nodes)
        for node in nodes:
            levels[node] = level
        for node in nodes:
            for end, length in following[node]:
                if component_of[end] != component_of[node]:
                    levels[end] = max(levels[end], level + length)
                elif length:
                    bad.update(nodes)
    return levels, frozenset(bad)


def _components(
    following: Sequence[Sequence[tuple[int, int]]],
) -> tuple[list[list[int]], list[int]]:
    """The components, those first that nothing leads to, and the number of each node's one."""
    leading: list[list[int]] = [[] for _ in following]
    for node, ends in enumerate(following):
        for end, _ in ends:
            leading[end].append(node)
    ended: list[int] = []  # nodes, in the order in which a search in depth leaves them
    seen = [False] * len(following)
    stack = [*range(len(following))]
    while stack:
        node = stack.pop()
        if node < 0:
            ended.append(~node)
        elif not seen[node]:
            seen[node] = True
            stack.append(~node)
            stack += [end for end, _ in following[node] if not seen[end]]
    component_of = [-1] * len(following)
    components: list[list[int]] = []
    for first in reversed(ended):
        if component_of[first] < 0:
            component: list[int] = []
            stack = [first]
            while stack:
                node = stack.pop()
                if component_of[node] < 0:
                    component_of[node] = len(components)
                    component.append(node)
                    stack += leading[node]
            components.append(component)
    return components, component_of


# --- steps ----------------------------------------------------------------------------------


def _programs(
    world_size: int, run: _Run, staged: set[int], levels: Sequence[int]
) -> list[dict[int, Step]]:
    """The steps of each rank in which it does anything, by their number.

    A send has the place of its receive in the order of the events: so the two pair up.
    """
    steps = [defaultdict[int, list[Operation]](list) for _ in range(world_size)]
    for number in run.order:
        event = run.events[number]
        own = steps[event.rank]
        if event.message < 0:
            for operation in _local(event):
                own[levels[number]].append(operation)
            continue
        sender, level = run.events[event.message], levels[event.message]
        pairs: Iterable[tuple[Operation, Operation]] = _messages(event, sender)
        if number in staged:
            slots = run.slots[event.rank]
            buffer = tuple(
                tmp(slots[number, index], ref.chunk) for index, ref in enumerate(event.targets)
            )
            pairs = [(Send(event.rank, sender.sources), Recv(sender.rank, buffer))]
            own[levels[number]] += _taken(event, sender.rank, buffer)
        for sent, received in pairs:
            steps[sender.rank][level].append(sent)
            own[level].append(received)
    return [
        {level: Step(*operations) for level, operations in program.items()} for program in steps
    ]


def _local(event: Event) -> Iterator[Operation]:
    if event.kind is EventKind.COPY:
        yield from map(Copy, event.targets, event.sources)
    elif event.kind is EventKind.ADD:
        yield Reduce(event.targets[0], event.sources, event.finals[0])


def _messages(event: Event, sender: Event) -> Iterator[tuple[Operation, Operation]]:
    """The send and receive of a message; several of each if only some chunks become complete."""
    for final, group in groupby(range(len(event.targets)), key=event.finals.__getitem__):
        indices = list(group)
        into = tuple(event.targets[index] for index in indices)
        sent = Send(event.rank, tuple(sender.sources[index] for index in indices))
        if event.kind is EventKind.RECV:
            yield sent, Recv(sender.rank, into)
        else:
            local = tuple(event.sources[index] for index in indices)
            is_left = sender.rank < event.rank
            yield sent, RecvReduce(sender.rank, into, local, is_left, final)


def _taken(event: Event, source: int, buffer: Sequence[Ref]) -> Iterator[Operation]:
    """Take a message from the slots that it was received into."""
    for index, (into, arrived) in enumerate(zip(event.targets, buffer, strict=True)):
        if event.kind is EventKind.RECV:
            yield Copy(into, arrived)
        else:
            local = event.sources[index]
            operands = (arrived, local) if source < event.rank else (local, arrived)
            yield Reduce(into, operands, event.finals[index])
