"""Where the ranks of a schedule are drawn: the layout that its messages ask for.

Coordinates are in units of the distance between neighbours; y grows downwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

Point = tuple[float, float]
Links = set[tuple[int, int]]


class RankLayout(NamedTuple):
    """A layout, by name, and the place of each rank."""

    name: str
    places: tuple[Point, ...]


def layout_of(
    world_size: int, links: Links, root: int = 0, hosts: Sequence[int] | None = None
) -> RankLayout:
    """Choose the layout of a schedule.

    Parameters
    ----------
    world_size
        Number of ranks.
    links
        The pairs of ranks that exchange messages, the lower rank first.
    root
        The rank at the top of a tree.
    hosts
        Number of the host of each rank, to draw the ranks of a host together.

    Examples
    --------
    >>> layout_of(4, {(0, 1), (1, 2), (2, 3), (0, 3)}).name
    'ring'
    >>> layout_of(4, {(0, 1), (0, 2), (1, 3)}).name
    'tree'
    """
    if hosts is not None and len(set(hosts)) > 1:
        return RankLayout("hosts", _hosts(hosts))
    ways: tuple[tuple[str, Callable[[], tuple[Point, ...] | None]], ...] = (
        ("line", lambda: _line(world_size, links)),
        ("tree", lambda: _tree(world_size, links, root)),
        ("hypercube", lambda: _hypercube(world_size, links)),
        ("grid", lambda: _grid(world_size, links)),
    )
    for name, place in ways:
        if (places := place()) is not None:
            return RankLayout(name, places)
    steps = {min(high - low, world_size - high + low) for low, high in links}
    return RankLayout("ring" if steps <= {1} else "circle", circle(world_size))


# Half of the distance of neighbours on a circle: cards stand beside each other aslant, too.
_ROOM = 0.6


def circle(world_size: int) -> tuple[Point, ...]:
    """Ranks on a circle, clockwise, rank 0 at the top."""
    if world_size == 1:
        return ((0.0, 0.0),)
    radius = max(_ROOM / math.sin(math.pi / world_size), 0.75)
    angles = [2 * math.pi * rank / world_size for rank in range(world_size)]
    return tuple((radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles)


def _line(world_size: int, links: Links) -> tuple[Point, ...] | None:
    """Ranks in a row, if each exchanges messages with the ranks beside it only."""
    if world_size < 3 or links != {(rank, rank + 1) for rank in range(world_size - 1)}:
        return None
    return tuple((float(rank), 0.0) for rank in range(world_size))


def _tree(world_size: int, links: Links, root: int) -> tuple[Point, ...] | None:
    """Ranks below their parents, if the messages make a tree."""
    if world_size < 3 or len(links) != world_size - 1:
        return None
    beside: list[list[int]] = [[] for _ in range(world_size)]
    for low, high in sorted(links):
        beside[low].append(high)
        beside[high].append(low)
    if not beside[root]:
        return None
    places: dict[int, Point] = {}
    leaves = 0
    # Each rank is met twice: on the way down, and when its children have their places.
    stack: list[tuple[int, int, int, bool]] = [(root, -1, 0, False)]
    while stack:
        rank, parent, depth, is_placed = stack.pop()
        children = [peer for peer in beside[rank] if peer != parent]
        if is_placed:
            x = sum(places[child][0] for child in children) / len(children)
            places[rank] = x, float(depth)
        elif children:
            stack.append((rank, parent, depth, True))
            stack += [(child, rank, depth + 1, False) for child in reversed(children)]
        else:
            places[rank] = float(leaves), float(depth)
            leaves += 1
    if len(places) < world_size:
        return None  # some ranks are not connected with the root
    return tuple(places[rank] for rank in range(world_size))


# One direction a bit of the rank; from three bits on with room between the corners.
_SQUARE = ((1.0, 0.0), (0.0, 1.0))
_CUBE = ((2.0, 0.0), (0.0, 2.0), (1.0, -1.0), (4.5, 0.0))


def _hypercube(world_size: int, links: Links) -> tuple[Point, ...] | None:
    """Ranks on the corners of a cube, if messages go along its edges only."""
    bits = world_size.bit_length() - 1
    is_cube = world_size == 1 << bits and 2 <= bits <= len(_CUBE)
    directions = _SQUARE if bits == len(_SQUARE) else _CUBE
    edges = {
        (low, low | 1 << bit)
        for low in range(world_size)
        for bit in range(bits)
        if not low >> bit & 1
    }
    if not is_cube or links != edges:
        return None
    return tuple(
        (
            sum(x for bit, (x, _) in enumerate(directions) if rank >> bit & 1),
            sum(y for bit, (_, y) in enumerate(directions) if rank >> bit & 1),
        )
        for rank in range(world_size)
    )


def _grid(world_size: int, links: Links) -> tuple[Point, ...] | None:
    """Ranks in rows, if messages go to neighbours in the row and in the column, around the edges too."""
    for width in range(2, world_size // 2 + 1):
        height = world_size // width
        if width * height != world_size:
            continue
        beside = {
            (rank, rank // width * width + (rank + 1) % width) for rank in range(world_size)
        } | {(rank, (rank + width) % world_size) for rank in range(world_size)}
        if links == {(min(pair), max(pair)) for pair in beside}:
            # Every second row is shifted a little, so that ways around the edge lie beside the others.
            return tuple(
                (
                    rank % width + 0.15 * (rank // width % 2),
                    rank // width + 0.15 * (rank % width % 2),
                )
                for rank in range(world_size)
            )
    return None


def _hosts(hosts: Sequence[int]) -> tuple[Point, ...]:
    """Hosts on a circle, two of them side by side, and the ranks of each on a circle of its own."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    largest = max(map(len, members.values()))
    apart = 2 * max(abs(x) for x, _ in circle(largest)) + 1.6
    beside = ((-0.5, 0.0), (0.5, 0.0))
    middles = beside if len(members) == len(beside) else circle(len(members))
    places: dict[int, Point] = {}
    for (x, y), ranks in zip(middles, members.values(), strict=True):
        for rank, (right, down) in zip(ranks, circle(len(ranks)), strict=True):
            places[rank] = apart * x + right, apart * y + down
    return tuple(places[rank] for rank in range(len(hosts)))
