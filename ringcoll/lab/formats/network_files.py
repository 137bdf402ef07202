"""Networks in files of others: the XML that NCCL writes.

The network of a host's GPUs is in the XML that NCCL writes to the file that ``NCCL_TOPO_DUMP_FILE``
names. A rank is a GPU. Links get the rates with which NCCL counts (``src/graph/topo.h`` and
``topo.cc``): GB/s of a cable of NVLink by the GPU's compute capability, of a lane of PCI Express by
its transfers, of the cables between processors by their model. Latencies are those of
`ringcoll.lab.simulation.PRESETS`, which the XML does not have. All switches of NVLink are one, as
in NCCL. Network cards count where the XML has several hosts, and meet in one switch.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from typing import NamedTuple

from ringcoll.errors import ArgumentError, ScheduleError
from ringcoll.lab.formats.documents import XmlElement, parse_xml
from ringcoll.lab.simulation import Link, Topology

_INSIDE = {
    "": "system", "system": "cpu", "cpu": "pci nic", "pci": "pci gpu nic pcilink", "nic": "net",
    "gpu": "nvlink c2c", "nvlink": "", "c2c": "", "net": "", "pcilink": "",
}  # fmt: skip
_NVLINK = {100: 40.1, 90: 20.6, 87: 20.0, 86: 12.0, 70: 20.0, 0: 18.0}  # from a capability on
_LANE = {"2.5": 1.5, "5": 3.0, "8": 6.0, "16": 12.0, "32": 24.0, "64": 48.0}  # Gbit/s by GT/s
_INTEL = {207: 40.0, 143: 22.0, 85: 10.0, 0: 6.0}  # from a model on
_OTHERS = {"AuthenticAMD": 16.0, "ppc64": 32.0}
_SLOW = 6.0
_NVLINK_S, _PCI_S, _NETWORK_S = 3.4e-6, 5.7e-6, 14e-6  # of a whole way
# Classes of the devices at the end of a cable; all others are switches.
_TO_GPU, _TO_PROCESSOR = "0x03", "0x068001"
_USUAL_MBIT = 10_000  # of a network card whose speed is not known


class _Card(NamedTuple):
    gpu: XmlElement
    rank: int
    processor: str


class _Network:
    """The nodes and links of a document; network cards count where there are several hosts."""

    def __init__(self, system: XmlElement) -> None:
        self.links: dict[tuple[int | str, int | str], tuple[float, float]] = {}  # GB/s, seconds
        self.cards: dict[tuple[str, str], _Card] = {}  # by host and address
        by_host: dict[str, list[XmlElement]] = {}
        for element in system.children:
            by_host.setdefault(element.attributes.get("host_hash", ""), []).append(element)
        self._has_network = len(by_host) > 1
        for number, (host, elements) in enumerate(by_host.items()):
            prefix = f"host{number}_" * self._has_network
            named = [(_word(f"{prefix}cpu{each.word('numaid')}"), each) for each in elements]
            for name, element in named:
                self._add_devices(element, name, host, name)
            for (first, element), (second, _) in combinations(named, 2):
                self._join(first, second, _between_processors(element), 0.0)
        self._add_cables()

    def _add(self, first: int | str, second: int | str, rate: float, latency_s: float) -> None:
        """Add one way of a cable."""
        known = self.links.get((first, second), (0.0, 0.0))[0]
        self.links[first, second] = known + rate, latency_s

    def _join(self, first: int | str, second: int | str, rate: float, latency_s: float) -> None:
        """Add a cable."""
        self._add(first, second, rate, latency_s)
        self._add(second, first, rate, latency_s)

    def _add_devices(self, parent: XmlElement, node: str, host: str, processor: str) -> None:
        """Add the devices below a processor or a bridge."""
        for element in parent.children:
            gpu = next((each for each in element.children if each.name == "gpu"), None)
            if element.name == "nic" and self._has_network:
                for card in element.children:
                    if "dev" in card.attributes and card.attributes.get("net") != "0":
                        speed = card.number("speed", -1) if "speed" in card.attributes else 0
                        rate = (speed if speed > 0 else _USUAL_MBIT) / 8e3
                        self._join(node, "net", rate, (_NETWORK_S - _PCI_S) / 2)
            elif gpu is not None and "rank" in gpu.attributes:
                rank = gpu.number("rank")
                if any(rank == card.rank for card in self.cards.values()):
                    raise gpu.error(f"rank {rank} is there twice")
                self.cards[host, element.word("busid")] = _Card(gpu, rank, processor)
                self._join(rank, node, _pci_rate(element), _PCI_S / 2)
            elif element.name == "pci" and gpu is None:
                below = _word(f"{node}_{element.word('busid')}")
                self._join(below, node, _pci_rate(element), 0.0)
                self._add_devices(element, below, host, processor)

    def _add_cables(self) -> None:
        """Add the links of GPUs to each other, to NVLink's switch, and to their processors."""
        for (host, _), (gpu, rank, processor) in self.cards.items():
            capability = gpu.number("sm")
            each = next(rate for least, rate in _NVLINK.items() if capability >= least)
            for cable in gpu.children:
                rate, kind = cable.number("count", 1) * each, cable.attributes.get("tclass", "")
                if cable.name == "c2c":
                    rate = cable.number("bw", 1) * cable.number("count", 1) / 1e3
                    known = self.links.pop((rank, processor), (0.0, 0.0))[0]  # by PCI
                    self.links.pop((processor, rank), None)
                    self._join(rank, processor, max(rate, known), _NVLINK_S / 2)
                elif kind.startswith(_TO_PROCESSOR):
                    self._join(rank, processor, rate, _NVLINK_S / 2)
                elif not kind.startswith(_TO_GPU):
                    self._join(rank, "nvswitch", rate, _NVLINK_S / 2)
                elif peer := self.cards.get((host, cable.word("target"))):
                    self._add(rank, peer.rank, rate, _NVLINK_S)  # the peer says the way back

    def without_dead_ends(self) -> tuple[Link, ...]:
        """The links, but to switches that lead nowhere; the fastest first, as routes prefer."""
        while True:
            ways = Counter(first for first, _ in self.links)
            ends = {node for node, number in ways.items() if isinstance(node, str) and number == 1}
            if not ends:
                break
            self.links = {pair: value for pair, value in self.links.items() if not ends & {*pair}}
        links = [
            Link(first, second, rate * 1e9, latency_s)
            for (first, second), (rate, latency_s) in self.links.items()
        ]
        return tuple(sorted(links, key=lambda link: -link.bandwidth))


def topology_from_nccl(text: str, *, name: str = "nccl") -> Topology:
    """Read the network of the GPUs in a file of ``NCCL_TOPO_DUMP_FILE``.

    Parameters
    ----------
    text
        The XML.
    name
        The topology in words.

    Raises
    ------
    ArgumentError
        The text is no such file, or has no ranks; the message names the line.

    Examples
    --------
    >>> cards = "".join(
    ...     f'<pci busid="{rank}" link_speed="16.0 GT/s PCIe" link_width="16">'
    ...     f'<gpu rank="{rank}" sm="80"><nvlink target="{1 - rank}" count="12" tclass="0x030200"/>'
    ...     "</gpu></pci>"
    ...     for rank in range(2)
    ... )
    >>> pair = topology_from_nccl(f'<system><cpu numaid="0">{cards}</cpu></system>')
    >>> [(link.name, link.bandwidth / 1e9) for link in pair.links][::2]
    [('0 -> 1', 240.0), ('0 -> cpu0', 24.0), ('1 -> cpu0', 24.0)]
    """
    try:
        network = _Network(parse_xml(text, _INSIDE))
    except ScheduleError as error:
        raise ArgumentError(f"no topology of NCCL: {error}", "text") from None
    ranks = sorted(card.rank for card in network.cards.values())
    if ranks != list(range(max(1, len(ranks)))):
        message = "the ranks of the GPUs do not go from 0 up without a gap"
        expected = "a file that NCCL has written for all of a group's ranks"
        raise ArgumentError(message, "text", expected, ranks)
    return Topology(
        world_size=len(ranks),
        links=network.without_dead_ends(),
        name=name,
        source="rates: NCCL, src/graph/topo.h; "
        "latency: NCCL, src/graph/tuning.cc, ring, protocol Simple",
    )


def _word(text: str) -> str:
    return re.sub(r"\W", "_", text, flags=re.ASCII)


def _pci_rate(element: XmlElement) -> float:
    """GB/s of a card's link to its slot; an unknown one has 16 lanes of 8 GT/s, as in NCCL."""
    speed = element.attributes.get("link_speed", "").partition(" ")[0].removesuffix(".0")
    width = element.number("link_width") if element.attributes.get("link_width") else 0
    return _LANE.get(speed, 6.0) * (width or 16) / 8


def _between_processors(element: XmlElement) -> float:
    """GB/s between two processors of a host."""
    vendor = element.attributes.get("vendor", "")
    if vendor == "GenuineIntel":
        model = element.number("modelid")
        return next(rate for least, rate in _INTEL.items() if model >= least)
    return _OTHERS.get(vendor) or _OTHERS.get(element.attributes.get("arch", ""), _SLOW)
