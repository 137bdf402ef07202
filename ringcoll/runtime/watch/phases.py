"""Phases of a training step, and waits for messages of another rank, for `ringcoll.trace`.

::

    with ringcoll.trace("trace.json"):
        for inputs, targets in batches:
            with phase("step"):
                with phase("forward"):
                    value = loss(model(inputs), targets)
                with phase("backward"):
                    value.backward()

Phases may be nested: the time of a phase is without the phases in it. Collectives note their waits
themselves; code that receives messages says for whom it waits::

    with waiting(src, group):
        work.wait()

Only a thread that has entered a trace is recorded, so ranks that are threads do not mix. Without
a trace, `phase` and `waiting` look up an attribute of the thread and return an empty context: 0.5
to 0.9 us for the whole block. In a trace a block costs 4 us, and where the peak of memory is
measured 50 us (``timeit``, Python 3.12, a busy 2-core machine).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from ringcoll.runtime.machine import Peaks


@dataclass(slots=True, eq=False)
class PhaseSpan:
    """A phase from ``begin`` to ``end``, in ns; ``peak_nbytes`` includes the phases in it.

    ``depth`` is the number of phases around it, ``about`` what distinguishes it from others of
    its name, such as a micro-batch.
    """

    name: str
    about: Mapping[str, int]
    depth: int
    begin: int
    end: int = 0
    peak_nbytes: int | None = None


class ThreadWait(NamedTuple):
    """A wait of the thread from ``begin`` to ``end``, in ns.

    It is for a message of the rank ``peer``. If ``peer`` is -1, it is for asynchronous operations
    of the traced group with the number ``group``, or of any traced group if that is -1, too.
    """

    begin: int
    end: int
    peer: int
    group: int = -1


class Awaited:
    """For whom a block of `waiting` waits: a rank in the group, or ``None`` if not known yet."""

    def __init__(self, peer: int | None) -> None:
        self.peer = peer


class _Thread(threading.local):
    log: PhaseLog | None = None


_thread = _Thread()


class PhaseLog:
    """The phases and waits of one thread, by a clock in nanoseconds.

    At most ``most`` phases, and waits, are kept; further ones are counted in ``left_out``.
    ``peaks`` measures peaks of memory; ``None`` if they cannot be measured.
    """

    def __init__(self, clock: Callable[[], int], most: int, peaks: Peaks | None = None) -> None:
        self.phases: list[PhaseSpan] = []
        self.waits: list[ThreadWait] = []
        self.left_out = 0
        self._clock, self._most, self._peaks = clock, most, peaks
        self._open: list[PhaseSpan] = []

    @property
    def is_recording(self) -> bool:
        """Whether it records this thread."""
        return _thread.log is self

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record this thread in a block; phases that are open at its end, end there."""
        before, _thread.log = _thread.log, self
        try:
            yield
        finally:
            _thread.log = before
            for span in self._open:
                span.end = self._clock()

    @contextmanager
    def phase(self, name: str, about: Mapping[str, int]) -> Iterator[None]:
        """Record a phase."""
        if len(self.phases) >= self._most:
            self.left_out += 1
            yield
            return
        self._note_peak()
        span = PhaseSpan(name, about, len(self._open), self._clock())
        self.phases.append(span)
        self._open.append(span)
        try:
            yield
        finally:
            if not span.end:
                span.end = self._clock()
                self._note_peak()
            self._open.remove(span)

    @contextmanager
    def waiting(self, awaited: Awaited, group: Any = None, number: int = -1) -> Iterator[Awaited]:
        """Record a wait for a rank of a group, or for an operation of the group with a number."""
        begin = self._clock()
        try:
            yield awaited
        finally:
            peer = -1 if awaited.peer is None else awaited.peer
            if peer >= 0 and isinstance(group, dist.ProcessGroup):
                peer = dist.get_global_rank(group, peer)
            if len(self.waits) >= self._most:
                self.left_out += 1
            else:
                self.waits.append(ThreadWait(begin, self._clock(), peer, number))

    def _note_peak(self) -> None:
        """The memory since the last look belongs to all phases that are open."""
        if self._peaks is None:
            return
        peak = self._peaks()
        for span in self._open:
            span.peak_nbytes = max(peak, span.peak_nbytes or 0)


_UNRECORDED = nullcontext(Awaited(None))


def phase(name: str, **about: int) -> AbstractContextManager[object]:
    """Name what a block does, for a trace of this thread.

    Parameters
    ----------
    name
        Name of the phase, other than ``"total"``; times of equal names are added up.
    about
        Numbers that the picture shows beside the name.

    Examples
    --------
    >>> with phase("forward", microbatch=3):
    ...     pass
    """
    log = _thread.log
    return _UNRECORDED if log is None else log.phase(name, about)


def waiting(peer: int | None, group: Any = None) -> AbstractContextManager[Awaited]:
    """Say that a block waits for a message, or for a message to be taken.

    Parameters
    ----------
    peer
        Rank in the group; ``None`` if the message may come from any rank: the block then sets
        ``.peer`` of the context's value when it knows the rank. If it does not, the block waits for
        asynchronous operations, by other ways than their works.
    group
        A process group of torch; for other groups ``None``.
    """
    log = _thread.log
    return _UNRECORDED if log is None else log.waiting(Awaited(peer), group)
