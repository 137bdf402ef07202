"""The picture of a simulated run is one of ``ringcoll trace``."""

from __future__ import annotations

from collections import Counter

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.lab.simulation import crossbar, fat_tree, simulate
from ringcoll.lab.simulation.results import TRACKS
from ringcoll.schedules.algorithms import schedule_of
from ringcoll.tools.tracing.trace_events import _TRACKS
from tests.cases.pictures import PictureError, check, check_schedule


@pytest.mark.parametrize(
    "collective, name",
    [
        ("all_reduce", "ring"),
        ("all_reduce", "rabenseifner"),
        ("all_reduce", "two_shot"),
        ("broadcast", "chain"),
        ("all_to_all", "pairwise"),
    ],
)
@pytest.mark.parametrize("segments", [1, 3])
def test_the_picture_is_in_order(collective: str, name: str, segments: int) -> None:
    network = fat_tree(
        4, ranks_per_leaf=2, bandwidth=1e9, oversubscription=2, alpha_s=1e-6, gamma_s_per_byte=1e-10
    )
    schedule = schedule_of(collective, name, 4)
    run = simulate(schedule, 4800, network, segments=segments, late={2: 1e-5}, trace=True)
    picture = run.picture()
    check(picture)
    if segments == 1 and collective != "all_to_all":
        assert check_schedule(picture, 0, schedule, 1200, 4) == run.num_messages
    whole = [event for event in picture["traceEvents"] if event.get("cat") == "operation"]
    assert max(event["ts"] + event["dur"] for event in whole) == pytest.approx(run.seconds * 1e6)
    assert min(event["ts"] for event in whole) == 0


def test_a_spoilt_picture_is_found() -> None:
    run = simulate(schedule_of("all_reduce", "ring", 3), 12, crossbar(3, bandwidth=1), trace=True)
    picture = run.picture()
    check(picture)
    arrow = next(event for event in picture["traceEvents"] if event["ph"] == "f")
    picture["traceEvents"].remove(arrow)
    with pytest.raises(PictureError):
        check(picture)


def test_the_rows_are_those_of_a_trace() -> None:
    assert TRACKS.items() <= _TRACKS.items()


def test_without_a_trace_there_is_no_picture() -> None:
    with pytest.raises(ArgumentError, match="no trace"):
        simulate(schedule_of("all_reduce", "ring", 2), 8, crossbar(2, bandwidth=1)).picture()


def test_messages_that_take_no_time_are_in_the_trace() -> None:
    """On links without latency an empty vector takes none; its messages are drawn all the same."""
    schedule = schedule_of("all_reduce", "ring", 3)
    run = simulate(schedule, 0, crossbar(3, bandwidth=1), trace=True)
    assert run.spans is not None
    assert Counter(span.kind for span in run.spans) == {"send": 12, "receive": 12, "reduce": 6}
