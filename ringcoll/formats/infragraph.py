"""The network in a file of InfraGraph: accelerators, switches and cards as a graph, YAML or JSON (infragraph.dev).

The package ``infragraph`` reads the file and makes all nodes and edges. Accelerators (``xpu``) are the ranks, in the order of
the file; all else is a switch. An edge is a cable with the bandwidth and the latency of its ``link``.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from ringcoll.errors import ArgumentError, MissingExtraError
from ringcoll.simulation import Link, Topology

_RANKS = ("xpu", "npu")  # the second is the name in old files
_RATES = {"Gbps": 1e9 / 8, "GBps": 1e9}  # bytes per second
_MOST_NODES = 1 << 20
_TIMES = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}  # seconds


def topology_from_infragraph(text: str, *, name: str = "infragraph") -> Topology:
    """Read a network of InfraGraph.

    Edges without a bandwidth, or with one in transfers, are left out: how many lanes they have is not in the file.

    Parameters
    ----------
    text
        The file, YAML or JSON.
    name
        The topology in words.

    Raises
    ------
    ArgumentError
        The text is no such file, or has no ``xpu``, or they are not connected by edges with a bandwidth.
    MissingExtraError
        The package ``infragraph`` is missing.
    """
    graph = _graph(text)
    ranks = [node for node, kind in graph.nodes(data="type") if str(kind) in _RANKS]
    number = {node: rank for rank, node in enumerate(ranks)}
    links: list[Link] = []
    left_out: dict[str, None] = {}
    for first, second, values in graph.edges(data=True):
        rate = _number(values.get("bandwidth"), _RATES)
        if rate is None:
            left_out[str(values.get("link"))] = None
            continue
        source, target = (
            number.get(node, re.sub(r"\W", "_", node, flags=re.ASCII)) for node in (first, second)
        )
        link = Link(source, target, rate, _number(values.get("latency"), _TIMES) or 0.0)
        links += [link, link.back]
    if not ranks:
        raise ArgumentError(
            "the graph has no rank", argument="text", expected="components of type xpu"
        )
    try:
        return Topology(world_size=len(ranks), links=tuple(links), name=name, source="InfraGraph")
    except ArgumentError as error:
        names = ", ".join(left_out) or "none"
        what = f"{error.message}; links without a bandwidth in bits or bytes: {names}"
        raise ArgumentError(what, argument="text") from None


def _graph(text: str) -> Any:
    """The graph of networkx that the package makes."""
    counts = sorted(int(digits[:18]) for digits in re.findall(r"count\W*(\d+)", text, re.ASCII))
    if prod(counts[-2:]) > _MOST_NODES:  # components of a device, and such devices
        raise ArgumentError(
            "the graph has too many nodes", argument="text", expected=f"at most {_MOST_NODES}"
        )
    try:  # what needs no such file needs no such package
        from infragraph.infragraph_service import InfraGraphService
    except ImportError as error:
        extra = "pip install 'ringcoll[infragraph]'"
        raise MissingExtraError(f"networks of InfraGraph need {extra}: {error}") from error
    service = InfraGraphService()
    try:
        service.set_graph(text)
    except Exception as error:  # of several packages
        words = " ".join(str(error).split()) or type(error).__name__
        raise ArgumentError(f"no graph of InfraGraph: {words[:200]}", argument="text") from error
    return service.get_networkx_graph()


def _number(text: str | None, units: dict[str, float]) -> float | None:
    """A value such as ``"400 Gbps"``, in units of SI; ``None`` without a known unit, or if it is 0."""
    value, _, unit = (text or "").partition(" ")
    return float(value) * units[unit] or None if unit in units else None
