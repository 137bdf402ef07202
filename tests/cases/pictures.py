"""What a trace has to be, whatever was traced: valid, whole, and the schedule's messages.

Written from the description of the format and from `ringcoll.schedules.ir.steps`; nothing of
`ringcoll.tools.tracing` is used.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from math import isclose
from typing import Any

from ringcoll.schedules import Schedule, Send, contract

__all__ = ["PictureError", "check", "check_schedule", "messages"]

_NESTED = ("phase", "idle")
_TINY = 2e-3  # us: times are written with three digits behind the point

Message = tuple[int, int, int, int, int]
"""(source, target, step, bytes, tag) of one operation."""


class PictureError(Exception):
    """A trace is not what it should be."""


def check(document: dict[str, Any]) -> None:
    """Check a trace by itself.

    Raises
    ------
    PictureError
        Something is not in order.
    """
    events = document["traceEvents"]
    _phases(events)
    _tracks(events)
    _inside_operations(events)
    _flights(events)
    _arrows(events)
    _ends_agree(events)
    _shares(document)
    _phase_times(document)


def _require(condition: object, message: str, what: object) -> None:
    if not condition:
        raise PictureError(f"{message}: {what}")


def _phases(events: list[dict[str, Any]]) -> None:
    times = [event["ts"] for event in events if event["ph"] != "M"]
    for event in events:
        _require(event["ph"] in "MXbesf", "unknown phase", event)
        _require(isinstance(event["pid"], int) and isinstance(event["tid"], int), "row", event)
        _require(event["ph"] == "M" or event["ts"] > -_TINY, "before the first operation", event)
    for before, after in pairwise(times):
        _require(before <= after, "events are not in order", (before, after))
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    _require(named >= {event["pid"] for event in events}, "a rank without a name", named)


def _slices(events: list[dict[str, Any]], category: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def _tracks(events: list[dict[str, Any]]) -> None:
    """On a track one thing comes after the other; phases and their waits may lie in others."""
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            _require(event["dur"] >= 0, "ends before it begins", event)
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        if track[0]["cat"] in _NESTED:
            _require(all(event["cat"] in _NESTED for event in track), "a mixed track", track)
            _nested(track)
            continue
        for before, after in pairwise(track):
            end = before["ts"] + before["dur"]
            _require(end <= after["ts"] + _TINY, "two at once on a track", (before, after))


def _nested(track: list[dict[str, Any]]) -> None:
    around: list[dict[str, Any]] = []
    for event in track:
        while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"] + _TINY:
            around.pop()
        if event["cat"] == "phase":
            depth = sum(one["cat"] == "phase" for one in around)
            _require(depth == event["args"]["depth"], "another depth", event)
        if around:
            ends = [one["ts"] + one["dur"] for one in (event, around[-1])]
            _require(ends[0] <= ends[1] + _TINY, "a phase is left too late", (event, around[-1]))
        around.append(event)


def _phase_times(document: dict[str, Any]) -> None:
    """The parts of each phase add up, for it alone and for the rank; no time counts twice."""
    slices = _slices(document["traceEvents"], "phase")
    ranks = document["otherData"]["phases"]
    _require(len(ranks) == document["otherData"]["world_size"], "ranks", len(ranks))
    for rank, phases in enumerate(ranks):
        own = [event for event in slices if event["pid"] == rank]
        names = {event["args"]["phase"] for event in own}
        _require(names | ({"total"} if own else set()) == phases.keys(), "phases", phases.keys())
        for parts in (*phases.values(), *(event["args"] for event in own)):
            _phase_adds_up(parts, rank)
        outermost = sum(event["dur"] for event in own if not event["args"]["depth"])
        whole = phases["total"]["total_s"] * 1e6 if own else 0.0
        _require(abs(whole - outermost) < 1 + 1e-4 * whole, "the total is another", rank)
        for name in phases.keys() - {"total"}:
            for part in ("times", "total_s", "waiting_s"):
                total = sum(event["args"][part] for event in own if event["args"]["phase"] == name)
                _require(isclose(total, phases[name][part], abs_tol=1e-9), part, (rank, name))


def _phase_adds_up(parts: dict[str, Any], rank: int) -> None:
    total = sum(parts[f"{name}_s"] for name in ("computing", "communicating", "waiting"))
    _require(isclose(total, parts["total_s"], abs_tol=1e-8), "parts do not add up", parts)
    _require(min(value for name, value in parts.items() if name.endswith("ing_s")) >= 0, "-", parts)
    _require(parts["beside_s"] <= parts["computing_s"] + 1e-8, "counted twice", parts)
    waited = parts["waiting_for_s"]
    _require(isclose(sum(waited.values()), parts["waiting_s"], abs_tol=1e-8), "waits", parts)
    _require(str(rank) not in waited, "a rank waits for itself", parts)


def _inside_operations(events: list[dict[str, Any]]) -> None:
    """Everything that is done lies in its operation, and says its step."""
    whole = {_key(one): one for one in _slices(events, "operation")}
    _require(len(whole) == len(_slices(events, "operation")), "a number twice", len(whole))
    for category in ("wait", "post", "reduce", "copy"):
        for event in _slices(events, category):
            one = whole[_key(event)]
            _require(event["args"]["step"] >= 0, "no step", event)
            _require(one["ts"] <= event["ts"] + _TINY, "before its operation", event)
            ends = event["ts"] + event["dur"], one["ts"] + one["dur"]
            _require(ends[0] <= ends[1] + _TINY, "after its operation", event)


def _key(event: dict[str, Any]) -> tuple[int, int, int]:
    return event["pid"], event["args"]["group"], event["args"]["number"]


def _flights(events: list[dict[str, Any]]) -> None:
    """Each begin has one end, later."""
    open_: dict[tuple[int, str, str], dict[str, Any]] = {}
    seen: set[tuple[int, str, str]] = set()
    for event in events:
        if event["ph"] not in "be":
            continue
        key = event["pid"], event["cat"], event["id"]
        if event["ph"] == "b":
            _require(key not in seen, "begins twice", event)
            seen.add(key)
            open_[key] = event
        else:
            _require(key in open_, "ends without a beginning", event)
            _require(open_.pop(key)["ts"] <= event["ts"], "ends before it begins", event)
    _require(not open_, "begins without an end", list(open_))


def _arrows(events: list[dict[str, Any]]) -> None:
    """Each arrow has two ends, one in a post and one in a wait, and goes forward in time."""
    leaves = [event for event in events if event["ph"] == "s"]
    arrives = {event["id"]: event for event in events if event["ph"] == "f"}
    count = sum(event["ph"] == "f" for event in events)
    _require(len({event["id"] for event in leaves}) == len(leaves), "ids repeat", len(leaves))
    _require({event["id"] for event in leaves} == arrives.keys(), "ids do not pair", count)
    _require(count == len(leaves), "ends repeat", count)
    posts, waits = (_by_rank(_slices(events, category)) for category in ("post", "wait"))
    for leave in leaves:
        arrive = arrives[leave["id"]]
        _require(leave["ts"] <= arrive["ts"], "arrives before it was sent", (leave, arrive))
        _require(_within(leave, posts), "leaves from no post", leave)
        _require(_within(arrive, waits), "arrives in no wait", arrive)


def _by_rank(slices: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    ranks: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in slices:
        ranks[event["pid"]].append(event)
    return ranks


def _within(event: dict[str, Any], slices: dict[int, list[dict[str, Any]]]) -> bool:
    return any(
        one["ts"] - _TINY <= event["ts"] <= one["ts"] + one["dur"] + _TINY
        for one in slices[event["pid"]]
    )


def messages(document: dict[str, Any], way: str, group: int = 0) -> dict[int, Counter[Message]]:
    """The sends, or receives, of each operation of a group by number."""
    found: dict[int, Counter[Message]] = defaultdict(Counter)
    for event in document["traceEvents"]:
        if event["ph"] == "b" and event["cat"] == way and event["args"]["group"] == group:
            args = event["args"]
            pair = (event["pid"], args["peer"])
            source, target = pair if way == "send" else pair[::-1]
            key = source, target, args["step"], args["bytes"], args["tag"]
            found[args["number"]][key] += 1
    return found


def _ends_agree(events: list[dict[str, Any]]) -> None:
    """What is sent is received, with the same step, length and tag; and drawn as an arrow."""
    document = {"traceEvents": events}
    total = 0
    for group in {event["args"]["group"] for event in _slices(events, "operation")}:
        sent, received = (messages(document, way, group) for way in ("send", "receive"))
        for number in sent.keys() | received.keys():
            _require(
                sent[number] == received[number],
                f"sent and received differ in operation {number}",
                (sent[number] - received[number], received[number] - sent[number]),
            )
        total += sum(one.total() for one in sent.values())
    arrows = sum(event["ph"] == "s" for event in events)
    _require(total == arrows, "messages and arrows", (total, arrows))
    begun = [event for event in events if event["ph"] == "b"]
    _require(all(event["args"]["complete"] for event in begun), "not complete", len(begun))


def _shares(document: dict[str, Any]) -> None:
    """The parts of each operation add up, for it alone and for the rank."""
    operations = _slices(document["traceEvents"], "operation")
    for event in operations:
        _adds_up(event["args"])
        _require(
            abs(event["args"]["total_s"] * 1e6 - event["dur"]) < 10 * _TINY + 1e-4 * event["dur"],
            "the total is another",
            event,
        )
    for rank, calls in enumerate(document["otherData"]["summary"]):
        for parts in calls.values():
            _adds_up(parts)
        own = [event["args"] for event in operations if event["pid"] == rank]
        for name in ("total_s", "waiting_s", "sent_bytes", "received_bytes", "sent_messages"):
            total = sum(one[name] for one in own)
            _require(abs(total - calls["total"][name]) < 1e-6, f"{name} of rank {rank}", calls)


def _adds_up(parts: dict[str, Any]) -> None:
    names = ("waiting", "moving", "reducing", "python")
    total = sum(parts[f"{name}_s"] for name in names)
    _require(abs(total - parts["total_s"]) < 1e-9, "parts do not add up", parts)
    _require(all(parts[f"{name}_s"] >= -1e-12 for name in names), "a negative part", parts)
    share = sum(parts[f"{name}_share"] for name in names)
    _require(abs(share - bool(parts["total_s"])) < 1e-9, "shares do not add up", parts)


def _length(schedule: Schedule, chunk: int, block: int) -> int:
    """Elements of a chunk: blocks are cut evenly, and the first pieces are longer."""
    per_block = contract(schedule.collective).chunks_per_block(
        schedule.num_chunks, schedule.world_size
    )
    short, longer = divmod(block, per_block)
    return short + (chunk % per_block < longer)


def check_schedule(
    document: dict[str, Any], number: int, schedule: Schedule, block: int, itemsize: int
) -> int:
    """Check that an operation's messages are those of a schedule, one segment each.

    Parameters
    ----------
    document
        The trace.
    number
        Of the operation.
    schedule
        What was to be run.
    block, itemsize
        Elements of a block, and bytes of one.

    Returns
    -------
    int
        How many there are.

    Raises
    ------
    PictureError
        They are others.
    """
    wanted: Counter[tuple[int, int, int, int]] = Counter()
    for rank in range(schedule.world_size):
        for step, operations in enumerate(schedule.steps(rank)):
            for one in operations:
                if isinstance(one, Send):
                    numel = sum(_length(schedule, ref.chunk, block) for ref in one.refs)
                    wanted[rank, one.peer, step, numel * itemsize] += 1
    found: Counter[tuple[int, int, int, int]] = Counter()
    for (*about, _), times in messages(document, "send")[number].items():
        source, target, step, nbytes = about
        found[source, target, step, nbytes] += times
    _require(found == wanted, "not the schedule's messages", (found - wanted, wanted - found))
    return found.total()
