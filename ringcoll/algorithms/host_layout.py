"""Layouts: which ranks of each host act in a hierarchy, and for which others.

Problem: the hosts may have different numbers of ranks, in any order. With m ranks on the smallest host, m
of each act; the others are divided among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd, isqrt

Hosts = tuple[int, ...]
"""The host number of every rank."""


@dataclass(frozen=True)
class HostLayout:
    """The ranks that act, and the ranks for which they act.

    Parameters
    ----------
    teams
        ``teams[host][index]`` are the ranks for which the first of them acts.
    """

    teams: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_hosts(self) -> int:
        """Number of hosts H."""
        return len(self.teams)

    @property
    def acting(self) -> int:
        """Ranks that act on each host: m, as many as the smallest host has."""
        return len(self.teams[0])

    @property
    def largest_team(self) -> int:
        """Ranks for which the busiest rank acts, itself included."""
        return max(len(team) for host in self.teams for team in host)

    def find(self, rank: int) -> tuple[int, int, int]:
        """Host, number of the team on it, and number in the team, of a rank."""
        return next(
            (host, index, team.index(rank))
            for host, teams in enumerate(self.teams)
            for index, team in enumerate(teams)
            if rank in team
        )


@lru_cache(maxsize=64)
def layout_of(hosts: Hosts, *, even: bool = False) -> HostLayout:
    """Choose the ranks that act; in an even layout all ranks, in groups of equal size for hosts.

    Examples
    --------
    >>> layout_of((0, 1, 0, 1)).teams
    (((0,), (2,)), ((1,), (3,)))
    >>> layout_of((0, 0, 0, 1, 1)).teams
    (((0, 2), (1,)), ((3,), (4,)))
    >>> layout_of((0, 0, 0, 0, 1, 1), even=True).teams
    (((0,), (1,)), ((2,), (3,)), ((4,), (5,)))
    """
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    groups, acting = [*ranks.values()], min(map(len, ranks.values()))
    if even:
        acting = gcd(*map(len, groups))
        groups = [
            of_host[at : at + acting] for of_host in groups for at in range(0, len(of_host), acting)
        ]
    return HostLayout(
        tuple(tuple(tuple(group[index::acting]) for index in range(acting)) for group in groups)
    )


def rows_of(k: int) -> Hosts:
    """A torus of ``k`` ranks, as square as can be: the row of every rank.

    Examples
    --------
    >>> rows_of(6), rows_of(9), rows_of(5)
    ((0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 0, 0, 0, 0))
    """
    rows = max(rows for rows in range(1, isqrt(k) + 1) if k % rows == 0)
    return tuple(rank * rows // k for rank in range(k))
