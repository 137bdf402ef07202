"""Simulated runs over time: bars and lines lie where the run says, and cover what it says."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.lab.pictures import overlap_picture, time_picture
from ringcoll.lab.simulation import SimulatedRun, simulate, topology_named
from ringcoll.schedules.algorithms import algorithms, schedule_of

SVG = "{http://www.w3.org/2000/svg}"


def run_of(name: str, world_size: int, nbytes: int = 1 << 16, **more: float) -> SimulatedRun:
    topology = topology_named("crossbar", world_size)
    schedule = schedule_of("all_reduce", name, world_size)
    return simulate(schedule, nbytes, topology, trace=True, **more)  # type: ignore[arg-type]


def bars(picture: str, class_: str) -> list[tuple[float, float]]:
    """Left and right ends of the bars of a kind, from 0 to 1 of the time."""
    root = ET.fromstring(picture)
    lane = next(node for node in root.iter(f"{SVG}path") if node.get("class") == "cell")
    left, _, width = (lane.get("d") or "").replace("M", "").replace("h", "").split()
    rects = [
        node for node in root.iter(f"{SVG}rect") if node.get("class") == class_ and node.get("x")
    ]
    found = []
    for rect in rects:
        if rect.find(f"{SVG}title") is not None:  # the others explain the colours
            at, wide = float(rect.get("x", 0)), float(rect.get("width", 0))
            found.append(
                ((at - float(left)) / float(width), (at + wide - float(left)) / float(width))
            )
    return found


@pytest.mark.parametrize(
    "name", [entry.name for entry in algorithms("all_reduce", 8) if not entry.needs_hosts]
)
def test_every_message_is_a_bar_and_a_line_in_the_time_of_the_run(name: str) -> None:
    run = run_of(name, 8)
    picture = time_picture(run)
    assert len(bars(picture, "sends")) == run.num_messages
    root = ET.fromstring(picture)
    lines = [node for node in root.iter(f"{SVG}path") if node.get("class") == "message"]
    assert len(lines) == run.num_messages
    for class_ in ("sends", "waits", "adds"):
        for begin, end in bars(picture, class_):
            assert -0.001 <= begin < end <= 1.001


def test_bars_are_where_the_run_says() -> None:
    run = run_of("tree", 2)
    assert run.spans is not None
    total = float(run.seconds)
    sends = sorted(
        (float(span.wave_s) / total, float(span.end_s) / total)
        for span in run.spans
        if span.kind == "send"
    )
    assert [pytest.approx(ends, abs=0.001) for ends in sends] == sorted(
        bars(time_picture(run), "sends")
    )


def test_additions_are_drawn_where_they_cost_something() -> None:
    topology = replace(topology_named("crossbar", 4), gamma_s_per_byte=1e-9)
    ring = schedule_of("all_reduce", "ring", 4)
    picture = time_picture(simulate(ring, 1 << 20, topology, trace=True))
    assert len(bars(picture, "adds")) == 4 * 3
    assert ">adds</text>" in picture
    assert ">adds</text>" not in time_picture(run_of("ring", 4))


def test_a_run_of_exact_fractions_and_one_without_any_message() -> None:
    topology = topology_named("crossbar", 4, bandwidth=Fraction(10), latency_s=Fraction(1, 3))
    exact = simulate(schedule_of("all_reduce", "ring", 4), 12, topology, trace=True)
    assert isinstance(exact.seconds, Fraction)
    assert len(bars(time_picture(exact), "sends")) == exact.num_messages
    alone = simulate(
        schedule_of("all_reduce", "ring", 1), 12, topology_named("crossbar", 1), trace=True
    )
    assert not bars(time_picture(alone), "sends")


def step_event(
    rank: int, name: str, begin: float, end: float, depth: int, computing: float
) -> dict[str, Any]:
    args = {"depth": depth, "computing_s": computing, "total_s": (end - begin) * 1e-6}
    return {
        "ph": "X",
        "pid": rank,
        "cat": "phase",
        "name": name,
        "ts": begin,
        "dur": end - begin,
        "args": args,
    }


def a_step(zero: float) -> list[dict[str, Any]]:
    """Two ranks whose backward computes, and hides one of two all-reduces."""
    events = []
    for rank in range(2):
        begin = zero + 10 * rank
        events += [
            step_event(rank, "step", begin, begin + 100, 0, 70e-6),
            step_event(rank, "backward", begin + 10, begin + 60, 1, 50e-6),
            step_event(rank, "inner", begin + 20, begin + 30, 2, 10e-6),
            step_event(rank, "average", begin + 60, begin + 90, 1, 1e-6),
        ]
        for at in (30, 65):
            event = {"ph": "X", "pid": rank, "cat": "operation", "name": "ring all_reduce"}
            events.append(
                {**event, "ts": begin + at, "dur": 20.0, "args": {"group": 0, "number": at}}
            )
    return events


def test_the_last_step_of_a_trainer_shows_what_hides_behind_what() -> None:
    other = {"transport": "shared", "world_size": 2}
    # The step before ends, on the second rank, after the first rank has begun the last step.
    trace = {"traceEvents": [*a_step(1000.0), *a_step(934.0)], "otherData": other}
    picture = overlap_picture(trace)
    assert "one step of training, over shared: 110 us" in picture
    # From 0 to 110 us, the second rank 10 us later; the phase within a phase is left out.
    expected = {
        "computes": [(10, 60), (20, 70)],
        "awaits": [(60, 90), (70, 100)],
        "communicates": [(30, 50), (65, 85), (40, 60), (75, 95)],
    }
    for kind, ends in expected.items():
        assert bars(picture, kind) == [
            (pytest.approx(begin / 110, abs=1e-3), pytest.approx(end / 110, abs=1e-3))
            for begin, end in ends
        ]


@pytest.mark.parametrize(
    "trace, message",
    [
        ({}, "not a trace"),
        (
            {"traceEvents": [], "otherData": {"transport": "shared", "world_size": 2}},
            "steps of a trainer",
        ),
        (
            {"traceEvents": a_step(0), "otherData": {"transport": "shared", "world_size": 65}},
            "at most 64, got 65",
        ),
        (
            {"traceEvents": a_step(0), "otherData": {"transport": "shared", "world_size": "two"}},
            "not a trace",
        ),
    ],
)
def test_what_is_no_step_is_refused(trace: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        overlap_picture(trace)


def test_the_axis_has_round_numbers() -> None:
    root = ET.fromstring(time_picture(run_of("ring", 4)))
    marks = [
        node.text or "" for node in root.iter(f"{SVG}text") if (node.text or "").endswith(" us")
    ]
    numbers = [float(mark.removesuffix(" us")) for mark in marks[1:]]  # behind the title
    assert numbers[0] == 0
    assert 3 <= len(numbers) <= 7
    assert len({round(b - a, 6) for a, b in pairwise(numbers)}) == 1


@pytest.mark.slow
def test_what_cannot_be_drawn() -> None:
    plain = simulate(schedule_of("all_reduce", "ring", 4), 64, topology_named("crossbar", 4))
    with pytest.raises(ArgumentError, match="the run has no trace"):
        time_picture(plain)
    with pytest.raises(ArgumentError, match="so many ranks cannot be drawn"):
        time_picture(run_of("tree", 65))
    with pytest.raises(ArgumentError, match="so many messages and waits cannot be drawn"):
        time_picture(run_of("ring", 64, segments=2))
