"""The last operation of a trace, as ``ringcoll trace`` and simulated runs write it, read for pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ringcoll.errors import ArgumentError

_BARS = {"send": "sends", "wait": "waits", "reduce": "adds"}  # what pictures call these events

Event = Mapping[str, Any]


class TracedMessage(NamedTuple):
    """A message, from when it is posted to when it has arrived; in microseconds."""

    step: int
    source: int
    target: int
    begin: float
    end: float
    nbytes: float


class TracedBar(NamedTuple):
    """A time of a rank, in microseconds; ``kind`` is "sends", "waits" or "adds"."""

    kind: str
    rank: int
    begin: float
    end: float
    about: str


class TracedRun(NamedTuple):
    """An operation of all ranks; times are from its beginning, in microseconds."""

    name: str
    world_size: int
    where: str
    duration: float
    messages: list[TracedMessage]
    bars: list[TracedBar]


def last_run(trace: Event, name: str | None = None) -> TracedRun:
    """Read the last operation of a trace, or the last one of a name such as "ring all_reduce".

    Raises
    ------
    ArgumentError
        It is no trace, or has no such operation.
    """
    try:
        events: Sequence[Event] = trace["traceEvents"]
        other = trace["otherData"]
        operations = [event for event in events if event.get("cat") == "operation"]
        wanted = [event for event in operations if name in (None, event["name"])]
        if wanted:
            number = max((event["args"]["group"], event["args"]["number"]) for event in wanted)
            return _run(events, number, other["world_size"], str(other["transport"]))
        names = {f"{event['name']} on {other['world_size']} ranks" for event in operations}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_trace(error) from None
    raise ArgumentError(
        "the trace is of something else", argument="trace", expected=name or "an operation",
        got=", ".join(sorted(names)) or "no operation",
    )  # fmt: skip


def last_step(trace: Event) -> TracedRun:
    """Read the last step of a trainer from a trace: its phases ("computes" or "awaits"), and its collectives ("communicates").

    Raises
    ------
    ArgumentError
        It is no trace of a trainer.
    """
    try:
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        other = trace["otherData"]
        steps = {}
        for event in sorted(events, key=lambda event: float(event["ts"])):
            if event["cat"] == "phase" and event["args"]["depth"] == 0:
                steps[event["pid"]] = event  # the last one of each rank
        zero = min((event["ts"] for event in steps.values()), default=0.0)
        bars = []
        for event in events:
            begin, kind = event["ts"] - zero, event["cat"]
            is_phase = kind == "phase" and event["args"]["depth"] == 1
            # Another rank may begin its last step before this rank has ended the step before.
            own = steps.get(event["pid"])
            if (is_phase or kind == "operation") and own and event["ts"] >= own["ts"]:
                about = event["args"]
                word = "communicates"
                if (
                    is_phase
                ):  # one that mostly waits, or does what others wait for, computes nothing
                    word = "computes" if 4 * about["computing_s"] > about["total_s"] else "awaits"
                end = begin + event["dur"]
                bars.append(TracedBar(word, event["pid"], begin, end, event["name"]))
        ends = [event["ts"] + event["dur"] - zero for event in steps.values()]
        where = str(other["transport"])
        world_size = int(other["world_size"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_trace(error) from None
    if not steps:
        raise ArgumentError(
            "the trace is of something else", argument="trace", expected="steps of a trainer",
            got="no phase",
        )  # fmt: skip
    name = f"one {next(iter(steps.values()))['name']} of training"
    return TracedRun(name, world_size, where, max(ends), [], bars)


def _no_trace(error: Exception) -> ArgumentError:
    return ArgumentError(
        "not a trace", argument="trace", expected="what ringcoll trace writes",
        got=f"nothing under {error}" if isinstance(error, KeyError) else "something else",
    )  # fmt: skip


def _run(
    events: Sequence[Event], number: tuple[int, int], world_size: int, where: str
) -> TracedRun:
    own = [
        event
        for event in events
        if "args" in event and (event["args"].get("group"), event["args"].get("number")) == number
    ]
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    wholes = [event for event in own if event["cat"] == "operation"]
    zero = min(event["ts"] for event in wholes)
    # Posts of sends and arrivals come in the same order for a step and a pair of ranks.
    arrivals: dict[tuple[int, int, int], list[float]] = {}
    for event in own:
        if event["ph"] == "b" and event["args"]["way"] == "receive":
            about = event["args"]
            key = about["step"], about["peer"], event["pid"]
            arrivals.setdefault(key, []).append(ends[event["id"]] - zero)
    messages, bars = [], []
    for event in own:
        kind, begin, about = event["cat"], event["ts"] - zero, event["args"]
        is_send = event["ph"] == "b" and about["way"] == "send"
        if is_send:
            arrived = arrivals.get((about["step"], event["pid"], about["peer"]))
            end = ends[event["id"]] - zero
            arrival = arrived.pop(0) if arrived else end
            messages.append(
                TracedMessage(
                    about["step"], event["pid"], about["peer"], begin, arrival, about["bytes"]
                )
            )
        else:
            end = begin + event.get("dur", 0.0)
        if kind in _BARS and (is_send or (event["ph"] == "X" and end > begin)):
            bars.append(TracedBar(_BARS[kind], event["pid"], begin, end, event["name"]))
    duration = max(event["ts"] + event["dur"] for event in wholes) - zero
    return TracedRun(wholes[0]["name"], world_size, where, duration, messages, bars)
