"""Networks in files of other systems, against what they are by hand."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ringcoll.errors import ArgumentError
from ringcoll.lab.formats import topology_from_nccl, topology_in
from ringcoll.lab.simulation import topology_text
from ringcoll.tools.cli import cli

NETWORKS = Path(__file__).parent / "networks"
SOCKETS, HOSTS = (
    (NETWORKS / name).read_text() for name in ("pair_of_sockets.xml", "two_hosts.xml")
)


def lines(topology):
    """The cables, the ends of each in order, as no order of links is promised."""
    rows = (line.split() for line in topology_text(topology).splitlines())
    return {(*sorted(row[:3:2]), *map(float, row[3:])) for row in rows if row}


class TestNCCL:
    def test_bridges_nvlink_and_processors(self):
        bridge = "cpu0_0000_05_00_0"
        assert lines(topology_from_nccl(SOCKETS)) == {
            ("0", "nvswitch", 240, 1.7),  # 12 cables of 20 GB/s
            ("1", "nvswitch", 240, 1.7),
            ("0", bridge, 24, 2.85),  # 16 lanes of 12 Gbit/s
            ("1", bridge, 24, 2.85),
            ("cpu0", bridge, 24, 0),
            ("cpu0", "cpu1", 16, 0),  # AMD
            ("2", "cpu1", 6, 2.85),  # 8 lanes of 6 Gbit/s
        }  # without the network card, as there is one host

    def test_ways_prefer_nvlink(self):
        topology = topology_from_nccl(SOCKETS)
        ways = [[topology.links[index].name for index in topology.route(0, to)] for to in (1, 2)]
        assert ways[0] == ["0 -> nvswitch", "nvswitch -> 1"]
        assert len(ways[1]) == 4

    def test_hosts_meet_in_a_network(self):
        card = "host1_cpu0_0000_19_00_0"
        assert lines(topology_from_nccl(HOSTS)) == {
            ("0", "host0_cpu0", 48, 2.85),
            ("1", "host1_cpu0", 12, 2.85),  # not said: 16 lanes of 6 Gbit/s
            ("host0_cpu0", "net", 12.5, 4.15),  # a card without an address
            (card, "net", 50, 4.15),
            ("host1_cpu0", card, 48, 0),
        }

    def test_nvlink_between_cards_by_capability(self):
        for sm, rate in ((60, 18), (70, 20), (86, 12), (89, 20), (90, 20.6), (120, 40.1)):
            text = SOCKETS.replace('sm="80"', f'sm="{sm}"')
            text = text.replace('target="0000:d5:00.0"', 'target="0000:87:00.0"', 1)
            text = text.replace('tclass="0x068000"', 'tclass="0x030200"', 1)
            (link,) = (
                link
                for link in topology_from_nccl(text).links
                if (link.source, link.target) == (0, 2)
            )
            assert link.bandwidth == pytest.approx(6 * rate * 1e9)

    def test_a_card_of_an_unknown_kind_is_a_switch_and_cables_add_up(self):
        cables = '<nvlink target="0000:07:00.0" count="{}" tclass="0x030200"/>'
        of_third = (
            "".join(map(cables.format, (2, 3))) + '<nvlink target="x" count="4" tclass="0x060400"/>'
        )
        text = SOCKETS.replace('rank="2" gdr="1"/>', f'rank="2" gdr="1">{of_third}</gpu>')
        found = {link.name: link.bandwidth / 1e9 for link in topology_from_nccl(text).links}
        assert found["2 -> 0"] == pytest.approx(100)  # the other card says no way back
        assert found["2 -> nvswitch"] == pytest.approx(80)

    def test_network_cards_as_nccl_counts_them(self):
        for speed, rate in (("-1", 1.25), ("0", 1.25), ("25000", 3.125)):
            text = HOSTS.replace('speed="100000"', f'speed="{speed}"')
            assert ("host0_cpu0", "net", rate, 4.15) in lines(topology_from_nccl(text))
        net = '<net name="eth0" dev="0"'
        two = HOSTS.replace(
            net, f'<net name="a" dev="1" net="0" speed="9"/><net name="b" speed="9"/>{net}'
        )
        assert lines(topology_from_nccl(two)) == lines(topology_from_nccl(HOSTS))

    @pytest.mark.parametrize("model,rate", [(79, 6), (85, 10), (143, 22), (207, 40)])
    def test_cables_between_processors_of_intel(self, model, rate):
        text = SOCKETS.replace("AuthenticAMD", "GenuineIntel").replace(
            'modelid="49"', f'modelid="{model}"'
        )
        assert ("cpu0", "cpu1", rate, 0) in lines(topology_from_nccl(text))

    def test_chip_to_chip(self):
        cable = '<c2c bw="44712" count="5"/>'
        text = SOCKETS.replace('rank="2" gdr="1"/>', f'rank="2" gdr="1">{cable}</gpu>')
        assert ("2", "cpu1", 223.56, 1.7) in lines(topology_from_nccl(text))

    @pytest.mark.parametrize(
        "text,said",
        [
            (SOCKETS.replace('rank="2"', 'rank="1"'), "line 25: <gpu>: rank 1 is there twice"),
            (SOCKETS.replace('rank="2"', 'rank="3"'), "do not go from 0 up"),
            (SOCKETS.replace(' rank="2"', ""), ""),  # a card that takes no part
            (SOCKETS.replace('sm="80" rank="2"', 'rank="2"'), "<gpu>: has no attribute 'sm'"),
            (SOCKETS.replace('sm="80" rank="2"', 'sm="x" rank="2"'), "is not a number"),
            (SOCKETS.replace("</system>", ""), "no XML"),
            (SOCKETS.replace("gpu", "apu"), "<apu> inside <pci>, expected <pci> or <gpu>"),
            ("<system></system>", "do not go from 0 up"),
            ("<algo/>", "<algo>, expected <system>"),
            ("<system><cpu numaid='0'>" + '<pci busid="1">' * 99, "more than 64 elements"),
            ('<!DOCTYPE a [<!ENTITY b "c">]><system/>', "document type"),
        ],
    )
    def test_bad_files_are_refused(self, text, said):
        if not said:
            assert topology_from_nccl(text).world_size == 2
            return
        with pytest.raises(ArgumentError, match=said):
            topology_from_nccl(text)


def test_the_format_is_found_out():
    assert topology_in(SOCKETS).world_size == 3
    assert topology_in('<?xml version="1.0"?>\n' + HOSTS).world_size == 2
    assert topology_in(SOCKETS, name="rack").name == "rack"
    assert topology_in("\ufeff0 -- 1 50 1").world_size == 2
    assert topology_in("# a comment\n\n0 -- 1 50 1  # fast\n").world_size == 2
    with pytest.raises(ArgumentError, match="line 1"):
        topology_in("nonsense")


def test_commands_read_all_of_them():
    for name in ("pair_of_sockets.xml", "two_hosts.xml"):
        for words in (
            f"simulate ring all_reduce --graph {NETWORKS / name}",
            f"show {NETWORKS / name}",
        ):
            result = CliRunner().invoke(cli, words.split())
            assert result.exit_code == 0, result.output
