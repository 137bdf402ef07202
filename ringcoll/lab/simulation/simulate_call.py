"""`simulate`: checks a call, and lets the engine run it that does so in the least time."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from math import isfinite

from ringcoll.errors import ArgumentError, TooLargeError
from ringcoll.lab.simulation.event_engine import EventEngine
from ringcoll.lab.simulation.lockstep import (
    LockstepEngine,
    RankWave,
    in_segments,
    never_full,
    senders_of,
    waves_of,
)
from ringcoll.lab.simulation.results import RunOutcome, RunSettings, SimulatedRun
from ringcoll.lab.simulation.symmetry import Folding, folded, turned, turned_programs
from ringcoll.lab.simulation.topology import Number, Topology, checked
from ringcoll.schedules import (
    Schedule,
    chunks_of_data,
    estimated_messages,
    tally_of,
    without_collection,
)

ENGINES = {
    "events": "the messages of all ranks, one by one",
    "steps": "all ranks step by step: turned programs, and no link that can be full",
    "symmetry": "the messages of some ranks that stand for all: turned programs and links",
}
"""The engines, and what they run."""

_MOST_NBYTES = 1 << 62
_MOST_SEGMENTS = 1 << 16
_MOST_TRACED = 1 << 20
"""Messages of a trace: a picture with more of them is some GiB."""
_MOST_MESSAGES = 1 << 21
"""Messages of a run by events, which take some 12 us each."""
_MOST_STEPS = 1 << 27
"""Steps of all ranks of a run by steps, which has 9 bytes for each; a message takes some 0.3 us."""
_MOST_PAIRS = 1 << 24
"""Pairs of ranks that exchange messages in turned programs; each has a route, of some 1.3 us."""
_MESSAGE_BY_EVENTS = 40
"""Cost of a message by events in messages by steps; measured at some 12 us and 0.3 us."""


def simulate(
    schedule: Schedule,
    nbytes: int,
    topology: Topology,
    *,
    segments: int = 1,
    late: Mapping[int, Number] | None = None,
    slowness: Mapping[int, Number] | None = None,
    trace: bool = False,
    engine: str = "auto",
) -> SimulatedRun:
    """Simulate a schedule on a topology; the model is that of `ringcoll.lab.simulation`.

    The cost is about linear in the messages: in those of all ranks, or in those of the ranks that
    stand for all, if the programs and the network are alike for all ranks. That is proved before,
    see `ringcoll.lab.simulation.symmetry`. A schedule should be verified before.

    Parameters
    ----------
    schedule
        The schedule, for as many ranks as the topology has.
    nbytes
        Size n of the whole data: the vector, or all blocks of one rank.
    topology
        The links, and the costs of a rank.
    segments
        Number of segments that each chunk is cut into.
    late
        Seconds by which ranks begin late, by rank.
    slowness
        Factors on ``alpha_s``, ``overhead_s`` and ``gamma_s_per_byte``, by rank: 2 is a rank that
        needs twice the time.
    trace
        Whether to keep all messages and waits, for `SimulatedRun.picture`.
    engine
        One of `ENGINES`; by default the one that takes the least time. The results are the same.

    Returns
    -------
    SimulatedRun
        Times in seconds: of type float, or exact fractions if no number of the topology, of
        ``late`` and of ``slowness`` is a float.

    Raises
    ------
    ArgumentError
        The topology has another number of ranks, a number is out of range, the data do not fit
        in the memory of a rank, there are too many messages for a trace, or there is no such
        engine, or it cannot run this schedule here.
    TooLargeError
        The messages would take many minutes, or too much memory.
    ScheduleError
        The collective is unknown, or sends and receives do not pair.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> from ringcoll.lab.simulation import fat_tree
    >>> tree = fat_tree(4, ranks_per_leaf=2, bandwidth=1, oversubscription=2)
    >>> simulate(schedule_of("all_reduce", "recursive_doubling", 4), 12, tree).seconds
    Fraction(36, 1)
    """
    late, slowness = late or {}, slowness or {}
    if engine not in (*ENGINES, "auto"):
        known = ", ".join((*ENGINES, "auto"))
        raise ArgumentError("no such engine", "engine", known, repr(engine))
    if topology.world_size != schedule.world_size:
        message = "the schedule is for another number of ranks"
        expected = f"{schedule.world_size} ranks"
        raise ArgumentError(message, "topology", expected, topology.world_size)
    checked("nbytes", nbytes, whole=True, most=_MOST_NBYTES)
    checked("segments", segments, positive=True, whole=True, most=_MOST_SEGMENTS)
    for name, values in (("late", late), ("slowness", slowness)):
        for rank, value in values.items():
            checked(f"{name}[{rank}]", value, positive=name == "slowness")
            checked(f"a rank of {name}", rank, whole=True, most=schedule.world_size - 1)
    _check_memory(schedule, nbytes, topology)
    if trace and (messages := sum(tally_of(schedule).sends) * segments) > _MOST_TRACED:
        message = "there are too many messages for a trace"
        raise ArgumentError(message, "trace", f"at most {_MOST_TRACED} messages", messages)
    settings = RunSettings(schedule, nbytes, topology, segments, late, slowness)
    with without_collection():
        name, outcome = _outcome(engine, settings, (late, slowness), trace=trace)
    seconds = max(outcome.ends)
    if isinstance(seconds, float) and not isfinite(seconds):
        raise ArgumentError("the run takes longer than a float can say", "topology")
    findings = outcome._asdict()
    link_chunks = findings.pop("link_chunks")
    return SimulatedRun(
        schedule=schedule,
        nbytes=nbytes,
        topology=topology,
        segments=segments,
        late=late,
        slowness=slowness,
        engine=name,
        seconds=seconds,
        link_nbytes=tuple(chunks * settings.unit for chunks in link_chunks),
        **findings,
    )


def _outcome(
    engine: str, settings: RunSettings, of_ranks: tuple[Mapping[int, Number], ...], *, trace: bool
) -> tuple[str, RunOutcome]:
    """Run an engine, or the one that takes the least time; return its name, too."""
    schedule, topology, segments = settings.schedule, settings.topology, settings.segments
    world_size = schedule.world_size
    programs = None if trace or engine == "events" else turned_programs(schedule)
    if programs is not None:
        _check_pairs(schedule, programs)
        folding = None if engine == "steps" else folded(topology, programs, *of_ranks)
        few = folding is not None and folding.period * _MESSAGE_BY_EVENTS <= world_size
        can_be_held = world_size * len(programs[0]) <= _MOST_STEPS
        if segments == 1 and engine != "symmetry" and not few and can_be_held:
            senders = senders_of(programs, world_size)
            if senders is not None and never_full(topology, programs):
                return "steps", LockstepEngine(settings, programs, senders).run()
        if folding is not None:
            sends = sum(len(wave.sends) for program in programs for wave in program)
            _check_messages(settings, sends * folding.period // len(programs))
            waves = []
            for rank in range(folding.period):
                of_rank = partial(turned, by=rank, world_size=world_size)
                steps = map(of_rank, programs[rank % len(programs)])
                waves.append(in_segments(steps, segments))
            return "symmetry", EventEngine(settings, waves, folding).run()
    if engine not in ("auto", "events"):
        message = "the engine cannot run this schedule on this topology"
        raise ArgumentError(message, "engine", "events, or auto", engine)
    _check_messages(settings, estimated_messages(schedule, _MOST_MESSAGES))
    every = [waves_of(schedule, rank, segments) for rank in range(world_size)]
    return "events", EventEngine(settings, every, Folding.none(topology), trace=trace).run()


def _check_pairs(schedule: Schedule, programs: list[list[RankWave]]) -> None:
    """Refuse a run whose routes would take minutes to look up."""
    distances = [{peer for wave in steps for peer, *_ in wave.sends} for steps in programs]
    pairs = sum(map(len, distances)) * schedule.world_size // len(programs)
    if pairs > _MOST_PAIRS:
        raise TooLargeError(
            f"{schedule.algorithm} {schedule.collective} on {schedule.world_size} ranks has "
            f"messages between {pairs:,} pairs of ranks, expected at most {_MOST_PAIRS:,}",
            most=_MOST_PAIRS,
        )


def _check_messages(settings: RunSettings, messages: int) -> None:
    """Refuse a run by events that would take many minutes."""
    if messages * settings.segments > _MOST_MESSAGES:
        schedule, fewer = settings.schedule, _MOST_MESSAGES // max(1, messages)
        hint = f"; {fewer} segments would do" if fewer else ""
        raise TooLargeError(
            f"{schedule.algorithm} {schedule.collective} on {schedule.world_size} ranks has about "
            f"{messages * settings.segments:,} messages here, expected at most "
            f"{_MOST_MESSAGES:,}{hint}",
            most=0 if fewer else _MOST_MESSAGES,
        )


def _check_memory(schedule: Schedule, nbytes: int, topology: Topology) -> None:
    """The data and the scratch slots have to fit, in place, in the memory of a rank."""
    needed = nbytes + schedule.num_slots * Fraction(nbytes, chunks_of_data(schedule))
    if topology.memory_nbytes is not None and needed > topology.memory_nbytes:
        message = "the data and the scratch memory do not fit in the memory of a rank"
        expected = f"at most {topology.memory_nbytes} bytes together"
        raise ArgumentError(message, "nbytes", expected, -(-needed.numerator // needed.denominator))
