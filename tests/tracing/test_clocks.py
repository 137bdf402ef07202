"""One clock for all ranks, from messages whose true times are known."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.errors import TraceError
from ringcoll.tools.tracing import Records, trace_events
from ringcoll.tools.tracing.clocks import Clock, Sighting, agree
from tests.cases.effort import effort


class World:
    """Ranks whose clocks are wrong by a known amount."""

    def __init__(self, seed: int, offsets: list[int], rates: list[float] | None = None) -> None:
        self.random, self.offsets = Random(seed), offsets
        self.rates = rates or [0.0] * len(offsets)

    def seen(self, rank: int, true: int) -> int:
        """What the clock of a rank shows."""
        return true - self.offsets[rank] + round(self.rates[rank] * true)

    def message(self, source: int, target: int, true: int) -> Sighting:
        delay = self.random.randrange(1, 50_000)
        return Sighting(source, target, self.seen(source, true), self.seen(target, true + delay))

    def pings(self, true: int) -> list[Sighting]:
        found = []
        for rank in range(1, len(self.offsets)):
            for _ in range(4):
                true += 100_000
                found.append(self.message(rank, 0, true))
                found.append(self.message(0, rank, true + 60_000))
        return found

    def traffic(self, count: int, since: int, until: int) -> list[Sighting]:
        found = []
        for _ in range(count):
            source, target = self.random.sample(range(len(self.offsets)), 2)
            found.append(self.message(source, target, self.random.randrange(since, until)))
        return found


def lateness(clocks: list[Clock], messages: list[Sighting]) -> int:
    """By how much some message seems to arrive before it was sent, at most."""
    return max(
        clocks[source].corrected(sent) - clocks[target].corrected(received)
        for source, target, sent, received in messages
    )


@effort(100)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=6),
)
def test_offsets_are_found_within_the_uncertainty(seed: int, offsets: list[int]):
    offsets = [0, *offsets]
    world = World(seed, offsets)
    begin, end = world.pings(10**9), world.pings(3 * 10**9)
    between = world.traffic(30, 10**9 + 10**8, 3 * 10**9)
    clocks = agree(len(offsets), begin, end, between)
    assert lateness(clocks, [*begin, *between, *end]) <= 0
    for clock, offset in zip(clocks, offsets, strict=True):
        assert abs(clock.offset_ns - offset) <= clock.uncertainty_ns < 60_000
        assert (clock.rate, clock.slack_ns) == (0, 0)
    assert clocks[0].offset_ns == clocks[0].uncertainty_ns == 0


def test_messages_make_it_more_certain():
    world = World(1, [0, 500, -700])
    begin, end = world.pings(0), world.pings(10**9)
    between = world.traffic(300, 10**8, 10**9)
    alone, together = agree(3, begin, end), agree(3, begin, end, between)
    assert sum(one.uncertainty_ns for one in together) < sum(one.uncertainty_ns for one in alone)


def test_a_clock_that_is_too_fast():
    world = World(2, [0, 10**12, 0], [0.0, 1e-3, 0.0])
    begin, end = world.pings(0), world.pings(10**9)
    between = world.traffic(50, 10**7, 10**9)
    clocks = agree(3, begin, end, between)
    assert clocks[1].rate == pytest.approx(-1e-3, rel=0.1)
    assert clocks[0].rate == clocks[2].rate == 0
    assert lateness(clocks, [*begin, *between, *end]) <= clocks[0].slack_ns + 2
    for true in (0, 5 * 10**8, 10**9):
        error = abs(clocks[1].corrected(world.seen(1, true)) - true)
        assert error <= clocks[1].uncertainty_ns + 50_000


def test_a_clock_that_jumps_is_said_not_to_fit():
    world = World(3, [0, 0])
    begin = world.pings(0)
    before = world.traffic(20, 10**7, 10**8)
    world.offsets = [0, -(10**7)]
    after = world.traffic(20, 10**8, 2 * 10**8)
    world.offsets = [0, 0]
    end = world.pings(10**9)
    messages = [*begin, *before, *after, *end]
    clocks = agree(2, begin, end, [*before, *after])
    assert 0 < lateness(clocks, messages) <= clocks[1].slack_ns
    assert clocks[1].uncertainty_ns > 10**6


def test_without_messages_both_ways_there_is_no_answer():
    world = World(4, [0, 0, 0])
    begin = [item for item in world.pings(0) if item.target != 2]
    with pytest.raises(TraceError, match="rank 2"):
        agree(3, begin, begin)


def test_alone():
    assert agree(1, [], []) == [Clock(0, 0)]


def test_a_file_has_clocks_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = [Clock(0, 0), Clock(1500, 2500, 3e-6, 7, 4500)]
    monkeypatch.setattr(trace_events, "agree", lambda *_: clocks)
    written = trace_events.document([Records(rank, 2, "shared") for rank in range(2)])
    assert written["otherData"]["clocks"] == [
        {"rank": 0, "offset_us": 0, "uncertainty_us": 0, "rate": 0.0, "slack_us": 0},
        {"rank": 1, "offset_us": 1.5, "uncertainty_us": 2.5, "rate": 3e-6, "slack_us": 4.5},
    ]
    assert written["otherData"]["world_size"] == 2
