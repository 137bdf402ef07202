"""The results of a simulation: times, loads of links, the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringcoll.errors import ArgumentError
from ringcoll.schedule import Schedule, Shown
from ringcoll.simulation.links import Link, Number
from ringcoll.simulation.picture import SimulatedSpan, document
from ringcoll.simulation.topology import Topology


class LinkLoad(NamedTuple):
    """Bytes that a link has carried, and the share of its capacity that they used.

    ``share`` is a fraction of the time of the run; ``None`` for a link that is never full.
    """

    link: Link
    nbytes: Any
    share: Any


class PathStep(NamedTuple):
    """A part of the critical path: it begins when the part before it ends.

    Parameters
    ----------
    rank
        The rank that ends a wave at ``end_s``.
    waits_for
        The rank whose message this rank took last; ``None`` if it waited for its own work.
    step
        The step of the message, or the last step of the wave.
    begin_s, end_s
        Seconds: from the post of the message, or the beginning of the wave, to its end.
    """

    rank: int
    waits_for: int | None
    step: int
    begin_s: Any
    end_s: Any


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedRun(Shown):
    """One simulated run of a schedule; all times are in seconds.

    Parameters
    ----------
    schedule, nbytes, topology, segments, late, slowness
        The arguments of `ringcoll.simulation.simulate`.
    engine
        The engine that ran it, one of `ringcoll.simulation.simulate_call.ENGINES`.
    seconds
        Time at which the last rank has ended.
    ends
        Time at which each rank has ended.
    waited_s
        Seconds that each rank has waited for messages of others.
    link_nbytes
        Bytes that each link of the topology has carried.
    path
        The critical path: its parts follow each other without a gap, and the last one ends the
        run.
    num_messages
        Messages of all ranks.
    spans
        All times of all ranks; ``None`` without ``trace=True``.
    """

    schedule: Schedule
    nbytes: int
    topology: Topology
    segments: int
    engine: str
    seconds: Any
    ends: tuple[Any, ...] = field(repr=False)
    waited_s: tuple[Any, ...] = field(repr=False)
    link_nbytes: tuple[Any, ...] = field(repr=False)
    path: tuple[PathStep, ...] = field(repr=False)
    num_messages: int
    late: Mapping[int, Any] = field(default_factory=dict)
    slowness: Mapping[int, Any] = field(default_factory=dict)
    spans: tuple[SimulatedSpan, ...] | None = field(default=None, repr=False)

    def loads(self) -> list[LinkLoad]:
        """The links that have carried anything, those with the highest share first."""
        loads = [
            LinkLoad(link, nbytes, self._share(link, nbytes))
            for link, nbytes in zip(self.topology.links, self.link_nbytes, strict=True)
            if nbytes
        ]
        return sorted(loads, key=lambda load: (-(load.share or 0), -load.nbytes))

    @property
    def busiest_s(self) -> Any:
        """Seconds that the busiest link would take for what it has carried, if it never waited."""
        loads = zip(self.topology.links, self.link_nbytes, strict=True)
        return max((nbytes / link.capacity for link, nbytes in loads if link.capacity), default=0)

    def _share(self, link: Link, nbytes: Number) -> Any:
        full = link.capacity
        return nbytes / (full * self.seconds) if full is not None and self.seconds else None

    def picture(self) -> dict[str, Any]:
        """The run in the Trace Event Format, which Perfetto reads, as ``ringcoll trace`` writes it.

        Raises
        ------
        ArgumentError
            The run was simulated without ``trace=True``.
        """
        if self.spans is None:
            raise ArgumentError("the run has no trace", argument="trace", expected=True, got=False)
        return document(
            self.spans, self.ends, self.schedule, self.segments, str(self.topology.name), str(self)
        )

    def as_json(self) -> dict[str, Any]:
        """The numbers of the run, as JSON can hold them."""
        return {
            "collective": self.schedule.collective,
            "algorithm": self.schedule.algorithm,
            "world_size": self.schedule.world_size,
            "nbytes": self.nbytes,
            "segments": self.segments,
            "engine": self.engine,
            "topology": self.topology.name,
            "source": self.topology.source,
            "seconds": float(self.seconds),
            "messages": self.num_messages,
            "ends_s": [float(end) for end in self.ends],
            "waited_s": [float(waited) for waited in self.waited_s],
            "links": [
                {
                    "link": load.link.name,
                    "bytes": float(load.nbytes),
                    "share": None if load.share is None else float(load.share),
                }
                for load in self.loads()
            ],
            "path": list(map(_step_as_json, self.path)),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        name = f"{self.schedule.algorithm} {self.schedule.collective}"
        pieces = f" in {self.segments} segments" if self.segments > 1 else ""
        yield f"{name} of {self.nbytes} bytes{pieces} on {self.schedule.world_size} ranks"
        yield f"{self.topology.name}: {float(self.seconds) * 1e6:.6g} us"
        for load in self.loads()[:1]:
            share = "" if load.share is None else f", {float(load.share):.0%} of its capacity"
            yield f"fullest link: {load.link.name}, {float(load.nbytes):.6g} bytes{share}"
        waited = [float(seconds) for seconds in self.waited_s]
        slowest = max(range(len(waited)), key=waited.__getitem__)
        yield f"longest wait for messages: rank {slowest}, {waited[slowest] * 1e6:.6g} us"
        ranks = [str(self.path[0].rank)] if self.path else []
        for part in self.path:
            if part.waits_for is not None:
                ranks[-1:] = [str(part.waits_for), str(part.rank)]
        if len(ranks) > 8:
            ranks = [*ranks[:4], "...", *ranks[-4:]]
        yield f"critical path: rank {' -> '.join(ranks)}" if ranks else "critical path: none"


def _step_as_json(part: PathStep) -> dict[str, Any]:
    return part._asdict() | {"begin_s": float(part.begin_s), "end_s": float(part.end_s)}
