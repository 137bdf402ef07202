"""A text of any format that can be read, as a schedule or as a network."""

from __future__ import annotations

import re

from ringcoll.formats.msccl import from_msccl
from ringcoll.formats.mscclpp import from_mscclpp
from ringcoll.formats.network_files import topology_from_infragraph, topology_from_nccl
from ringcoll.schedule import Schedule
from ringcoll.simulation import Topology, topology_from_text

_NETWORKS = {  # by what they begin with, after comments
    "<": topology_from_nccl,
    r"[{%]|---|[\"']?\w+[\"']?\s*:": topology_from_infragraph,
}


def schedule_in(text: str) -> Schedule:
    """Read a schedule: XML of MSCCL, JSON of MSCCL++, or a text of `Schedule.to_text`.

    Raises
    ------
    ScheduleError
        The text is malformed; the message names the line.
    """
    first = text.lstrip("\ufeff \t\r\n")[:1]
    if first == "<":
        return from_msccl(text)
    return from_mscclpp(text) if first == "{" else Schedule.from_text(text)


def topology_in(text: str, *, name: str = "graph") -> Topology:
    """Read a network: XML of NCCL, YAML or JSON of InfraGraph, or a text of `topology_text`.

    Raises
    ------
    ArgumentError
        The text is malformed; the message names the line.
    MissingExtraError
        The text is of InfraGraph, and the package is missing.
    """
    text = text.removeprefix("\ufeff")
    begin = re.sub(r"(\s*#.*)*\s*", "", text, count=1)
    for pattern, reader in _NETWORKS.items():
        if re.match(pattern, begin):
            return reader(text, name=name)
    return topology_from_text(text, name=name)
