"""The text of a graph: a topology of any shape, a link a line.

A line names two nodes, the bandwidth of each direction in GB/s, and its latency in microseconds.
A number is a rank, a word is a switch. ``--`` is a cable, with a link in each direction, and ``->``
is a single link::

    # a host with two ranks, and a third rank behind a slow link
    0 -- 1  50  0.5
    1 -- 2  12.5  5
    2 -> 0  6  5
    ranks   0  1.5  0.05

The last line, if it is there, has the costs of a rank: microseconds until a message begins to move,
and until each further one of a wave does, and nanoseconds to reduce a byte. What follows ``#`` is a
comment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ringcoll.errors import ArgumentError
from ringcoll.schedule import LARGEST_WORLD
from ringcoll.simulation.topology import Link, Node, Topology

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?"
_LINK = re.compile(rf"(\w+)\s*(--|->)\s*(\w+)\s+({_NUMBER})(?:\s+({_NUMBER}))?", re.ASCII)
_RANKS = re.compile(rf"ranks\s+({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})", re.ASCII)
_UNITS = {"alpha_s": 1e-6, "overhead_s": 1e-6, "gamma_s_per_byte": 1e-9}  # of the costs of a rank
_SWITCH = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LONGEST_LINE = 1 << 10


def topology_from_text(text: str, *, name: str = "graph", source: str = "") -> Topology:
    r"""Read the links of a topology; there are as many ranks as the largest number says.

    Parameters
    ----------
    text
        The graph, a link a line.
    name, source
        The topology in words, and the source of its numbers.

    Raises
    ------
    ArgumentError
        There is no link, or a line is none, or has no latency, or its bandwidth is not above 0:
        the message names the line. Or two ranks are not connected.

    Examples
    --------
    >>> line = topology_from_text("0 -- 1 50 0.5 # fast" "\n" "1 -- 2 12.5 5")
    >>> line.world_size, [link.name for link in line.links]
    (3, ['0 -> 1', '1 -> 0', '1 -> 2', '2 -> 1'])
    """
    links: dict[tuple[Node, Node], Link] = {}
    costs: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        if match := _RANKS.fullmatch(content[:_LONGEST_LINE]):
            values = map(float, match.groups())
            costs = {name: value * _UNITS[name] for name, value in zip(_UNITS, values, strict=True)}
            continue
        for link in _links(content, number):
            if (link.source, link.target) in links:
                raise _wrong(number, f"the link {link.name} is there twice", content)
            links[link.source, link.target] = link
    if not links:
        raise ArgumentError("the graph has no link", argument="text")
    ranks = [node for ends in links for node in ends if isinstance(node, int)]
    named: dict[str, Any] = {"name": name, "source": source, **costs}
    return Topology(world_size=max(ranks, default=0) + 1, links=tuple(links.values()), **named)


def topology_text(topology: Topology, comments: Mapping[Link, str] | None = None) -> str:
    """Write a topology as a text that `topology_from_text` reads, with comments on links.

    Raises
    ------
    ArgumentError
        The text cannot say it: a link with several lanes, routes by a formula, a name of other
        signs.

    Examples
    --------
    >>> print(topology_text(topology_from_text("0 -- 1 50 0.5")), end="")
    0 -- 1 50 0.5
    """
    nodes = [node for link in topology.links for node in (link.source, link.target)]
    is_named = all(isinstance(node, int) or _SWITCH.fullmatch(node) for node in nodes)
    is_plain = {link.lanes for link in topology.links} == {1}
    if not is_named or not is_plain or topology.router is not None:
        raise ArgumentError(
            "a text cannot say it", argument="topology", got=topology.name,
            expected="links of one lane, the shortest routes, names of letters and digits",
        )  # fmt: skip
    text, links, comments = "", list(topology.links), comments or {}
    while links:
        link = links.pop(0)
        comment = comments.get(link, "")
        # The order of links decides between routes: only two that follow each other are one line.
        is_cable = links[:1] == [link.back] and comments.get(link.back, "") == comment
        del links[: int(is_cable)]
        numbers = f"{float(link.bandwidth) / 1e9:.12g} {float(link.latency_s) * 1e6:.12g}"
        text += f"{link.source} {'--' if is_cable else '->'} {link.target} {numbers}"
        text += f"  # {comment}\n" if comment else "\n"
    costs = [float(getattr(topology, name)) / unit for name, unit in _UNITS.items()]
    return text + f"ranks {' '.join(f'{cost:.12g}' for cost in costs)}\n" * any(costs)


def _links(content: str, number: int) -> list[Link]:
    match = _LINK.fullmatch(content) if len(content) <= _LONGEST_LINE else None
    if match is None:
        raise _wrong(number, "the line is no link", content[:40])
    ends = _node(match[1], number), _node(match[3], number)
    if ends[0] == ends[1]:
        raise _wrong(number, f"the link leads from {ends[0]} to itself", content)
    if match[5] is None:
        raise _wrong(number, "the link has no latency, in microseconds; it may be 0", content)
    try:
        link = Link(*ends, float(match[4]) * 1e9, float(match[5]) * 1e-6)
    except ArgumentError as error:
        what = f"the {str(error.argument).removesuffix('_s')} is out of range"
        raise _wrong(number, what, content) from None
    return [link, link.back] if match[2] == "--" else [link]


def _node(word: str, number: int) -> Node:
    if not word[0].isdigit():
        return word
    if not word.isdigit() or len(word) > 6 or int(word) >= LARGEST_WORLD:
        what = f"a rank is a number below {LARGEST_WORLD}, and a switch begins with a letter"
        raise _wrong(number, what, word)
    return int(word)


def _wrong(number: int, message: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"line {number}: {message}",
        argument="text",
        expected="'0 -- 1 50 0.5': two nodes, GB/s above 0, microseconds",
        got=repr(got),
    )
