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
_MOST_WORK = 1 << 24  # a minute
_DEPTH = 8  # of devices inside devices
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
    nodes: dict[str, int | str] = {node: re.sub(r"\W", "_", node, flags=re.ASCII) for node in graph}
    if len(set(nodes.values())) < len(nodes):
        raise ArgumentError("two nodes differ only in signs that are no letters", argument="text")
    nodes |= {node: rank for rank, node in enumerate(ranks)}
    links: list[Link] = []
    left_out: dict[str, None] = {}
    for first, second, values in graph.edges(data=True):
        rate = _number(values.get("bandwidth"), _RATES)
        if rate is None:
            left_out[str(values.get("link"))] = None
            continue
        link = Link(
            nodes[first], nodes[second], rate, _number(values.get("latency"), _TIMES) or 0.0
        )
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
    try:  # what needs no such file needs no such package
        from infragraph.infragraph_service import InfraGraphService, Infrastructure
    except ImportError as error:
        extra = "pip install 'ringcoll[infragraph]'"
        raise MissingExtraError(f"networks of InfraGraph need {extra}: {error}") from error
    service = InfraGraphService()
    try:
        infrastructure = Infrastructure().deserialize(text)
        work = _work(infrastructure)
        if work <= _MOST_WORK:
            service.set_graph(infrastructure)
    except Exception as error:  # of several packages
        words = " ".join(str(error).split()) or type(error).__name__
        raise ArgumentError(f"no graph of InfraGraph: {words[:200]}", argument="text") from error
    if work > _MOST_WORK:
        raise ArgumentError(
            "the graph is too large", argument="text", got=work,
            expected=f"at most {_MOST_WORK} nodes times edges of a device, for all devices",
        )  # fmt: skip
    return service.get_networkx_graph()


def _work(infrastructure: Any) -> int:
    """Nodes times edges of each device, which is how long the package takes for it, for all instances."""
    devices = {device.name: device for device in infrastructure.devices}

    def nodes(component: Any, depth: int) -> int:
        inside = devices.get(component.name) if component.choice == "device" else None
        if inside is None or not depth:
            return int(component.count) * (1 if inside is None else _MOST_WORK)
        return int(component.count) * sum(nodes(each, depth - 1) for each in inside.components)

    def work(device: Any) -> int:
        number = {each.name: nodes(each, _DEPTH) for each in device.components}
        edges = 0
        for edge in device.edges:
            ends = [
                number.get(re.split(r"[.[]", end.component)[0], 1) for end in (edge.ep1, edge.ep2)
            ]
            edges += prod(ends) if edge.scheme == "many2many" else max(ends)
        return sum(number.values()) * max(edges, 1)

    of_devices = {name: work(device) for name, device in devices.items()}
    return sum(
        int(each.count) * of_devices.get(each.device, 0) for each in infrastructure.instances
    )


def _number(text: str | None, units: dict[str, float]) -> float | None:
    """A value such as ``"400 Gbps"``, in units of SI; ``None`` without a known unit, or if it is 0."""
    value, _, unit = (text or "").partition(" ")
    return float(value) * units[unit] or None if unit in units else None
