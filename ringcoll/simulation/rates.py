"""Numbers of pairs, of ranks or of hosts, and what several of them say together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

Pair = tuple[int, int]
"""Two ranks, or two hosts: sender and receiver."""

CLEARLY = 0.8  # of a rate: what is below is another rate
_ABOUT = 0.9  # of a rate: what is above differs by noise


class Sample(NamedTuple):
    """A measured number, and its spread: the interquartile range over the median."""

    value: float
    spread: float = 0.0


Rates = Mapping[Pair, Sample]
"""Bytes per second, or seconds, from rank to rank or from host to host."""


def between(
    rates: Rates, hosts: Sequence[int], join: Callable[[list[Sample]], Sample]
) -> dict[Pair, Sample]:
    """The numbers from host to host, those of their ranks joined by a function."""
    of_hosts: dict[Pair, list[Sample]] = {}
    for (source, target), sample in rates.items():
        if hosts[source] != hosts[target]:
            of_hosts.setdefault((hosts[source], hosts[target]), []).append(sample)
    return {ends: join(samples) for ends, samples in of_hosts.items()}


def total(samples: Sequence[Sample]) -> Sample:
    """The sum, with the mean spread."""
    value = sum(sample.value for sample in samples)
    return Sample(value, sum(value * spread for value, spread in samples) / value)


def typical(samples: Iterable[Sample]) -> Sample:
    """The median of numbers, and of their spreads; 0 without any."""
    both = [*zip(*samples, strict=True)]
    return Sample(*map(median, both)) if both else Sample(0.0)


def capacity(samples: Iterable[Sample]) -> Sample:
    """The capacity of a link: the median of the largest samples, which differ by noise only."""
    known = [*samples]
    most = max((sample.value for sample in known), default=0.0)
    return typical(sample for sample in known if sample.value >= _ABOUT * most)


def carried(flows: Iterable[Rates], inside: set[int], end: int) -> Sample:
    """The most that leaves (``end`` is 0) or enters (1) a set of hosts."""
    crossing = (
        [s for ends, s in rates.items() if ends[end] in inside and ends[1 - end] not in inside]
        for rates in flows
    )
    return capacity(total(samples) for samples in crossing if samples)


def slower(alone: Rates) -> list[Pair]:
    """Pairs of hosts that are clearly slower than others of these hosts, the slowest first."""
    usual = {
        (host, end): capacity(s for ends, s in alone.items() if ends[end] == host).value
        for host in {host for ends in alone for host in ends}
        for end in (0, 1)
    }
    slow = [(a, b) for a, b in alone if alone[a, b].value < CLEARLY * min(usual[a, 0], usual[b, 1])]
    return sorted(slow, key=lambda ends: alone[ends])
