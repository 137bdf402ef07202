"""Events, run on symbols: what each place holds, and with it the references of a schedule.

A format names places only, and a reference here names the chunk as well. Data that is not the chunk of
its output place goes to a slot. So does an input that is needed after the output of its chunk was
written; otherwise a program for separate buffers were wrong with input and output in one place.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringcoll.errors import ScheduleError
from ringcoll.formats.block_events import Event, EventKind, Place
from ringcoll.formats.places import Places
from ringcoll.schedule import Buffer, Ref, inp, out, tmp

_SUMS = (EventKind.REDUCE, EventKind.ADD)
_Value = tuple[int, int]  # the chunk, and the ranks that contributed, as bits
_Input = tuple[int, int]  # rank and chunk


class Run:
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

    @property
    def num_slots(self) -> int:
        """Slots that a rank needs, at most."""
        return max(map(len, self.slots))

    def take_slots(self, late: set[int]) -> None:
        """Give slots to messages that are received early."""
        for number in late:
            rank = self.events[number].rank
            for index in range(len(self.events[number].targets)):
                self.slots[rank][number, index] = len(self.slots[rank])

    def _add(self, rank: int, source: Place, target: Place) -> None:
        """Copy, beside what the original does."""
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
            arrived = self.values[event.message]
            values = [self._join(event, *two) for two in zip(values, arrived, strict=True)]
        elif event.kind is EventKind.ADD:
            total = values[0]
            for value in values[1:]:
                total = self._join(event, total, value)
            values = [total]
        if event.writes:
            pairs_written = zip(event.writes, values, strict=True)
            event.targets = tuple(self._write(event, *pair) for pair in pairs_written)
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

    def _join(self, event: Event, ours: _Value, theirs: _Value) -> _Value:
        if ours[0] != theirs[0]:
            raise ScheduleError(f"{event.where} adds chunk {theirs[0]} to chunk {ours[0]}")
        return ours[0], ours[1] | theirs[1]
