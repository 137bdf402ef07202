"""Ranks on several hosts, which are name spaces of this machine that share nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ringcoll.runtime.launch import RankError
from ringcoll.runtime.machine import hosts_of, place
from ringcoll.schedules import CONTRACTS, contract
from ringcoll.schedules.algorithms import schedule_of
from tests.cases.calls import Case
from tests.fakes.hosts import HostRanks, Hosts, reason_why_not
from tests.programs import several_hosts
from tests.programs.ranks import Outcome, join, run_batch
from tests.programs.transports import CONFORMANCE, ENDINGS, conforms

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(reason_why_not()), reason=reason_why_not()),
]

TRANSPORTS = ["gloo", "ucx"]
WITHOUT_UCX = "shared, without ucx"  # shared memory inside the hosts, gloo between them
APART_IN_TURN = (0, 1, 0, 1)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module", params=[*TRANSPORTS, "shared", WITHOUT_UCX])
def ranks(request: Any, two_hosts: Hosts) -> Iterator[tuple[str, HostRanks]]:
    """Two ranks on each of two hosts with equal names."""
    with HostRanks(two_hosts, (0, 0, 1, 1)) as pool:
        name = several_hosts.named(pool, request.param)
        pool.run(join, name)
        yield name, pool


def test_the_hosts_share_nothing(two_hosts: Hosts):
    with HostRanks(two_hosts, APART_IN_TURN) as pool:
        first, second, third, fourth = pool.run(several_hosts.whereabouts)
    assert first == third
    assert second == fourth
    for mine, theirs, same in zip(first, second, (False, True, False), strict=True):
        assert (mine == theirs) is same
    assert place() not in {first[0], second[0]}


def test_every_collective(ranks: tuple[str, HostRanks]):
    _, pool = ranks
    batch = [
        ("world", Case(collective, lengths=(numel,), root=root, async_op=numel == 5))
        for collective in CONTRACTS
        for numel in (0, 1, 5, 4001)
        for root in ((0, 3) if contract(collective).rooted else (0,))
    ]
    results: list[list[Outcome]] = pool.run(run_batch, batch, False)
    for outcomes in results:
        assert [found for outcome in outcomes if outcome for found in outcome[0]] == []
        assert all(outcomes)


@pytest.mark.parametrize("name", [name for name in CONFORMANCE if name not in ENDINGS])
def test_messages(ranks: tuple[str, HostRanks], name: str):
    transport, pool = ranks
    assert pool.run(conforms, transport, name) == [""] * 4


@pytest.mark.parametrize("name", ENDINGS)
@pytest.mark.parametrize("transport", [*TRANSPORTS, WITHOUT_UCX])
def test_giving_up(two_hosts: Hosts, transport: str, name: str):
    with HostRanks(two_hosts, (0, 1, 1)) as pool:
        transport = several_hosts.named(pool, transport)
        assert pool.run(conforms, transport, name) == [""] * 3


@pytest.mark.parametrize("where", [(0, 0, 1, 1), APART_IN_TURN, (1, 0, 0, 1), (0, 0, 0)])
def test_hosts_are_numbered_by_their_lowest_rank(two_hosts: Hosts, where: tuple[int, ...]):
    with HostRanks(two_hosts, where) as pool:
        for transport in TRANSPORTS:
            found = pool.run(several_hosts.connected_hosts, transport)
            total = sum(range(1, len(where) + 1))
            assert found == [((), hosts_of([str(host) for host in where]), total)] * len(where)


@pytest.mark.parametrize(
    "apart", [("net",), ("ipc",), ("pid",), ("mount",), ("ipc", "pid", "mount")], ids="-".join
)
def test_anything_of_its_own_makes_a_host(apart: tuple[str, ...]):
    """Whatever else is shared, and although all have one name: nothing is taken for near.

    Containers may have the network of their machine, or its process ids, or its memory.
    """
    with Hosts(2, apart=apart) as hosts, HostRanks(hosts, (0, 1, 1)) as pool:
        for transport in TRANSPORTS:
            assert pool.run(several_hosts.connected_hosts, transport) == [((), (0, 1, 1), 6)] * 3


def test_a_right_run_over_ucx_ends_in_silence():
    """UCX tells of connections that the other end has closed first, if they were inside a host."""
    program = (
        "from tests.fakes.hosts import HostRanks, Hosts\n"
        "from tests.programs.several_hosts import connected_hosts\n"
        "with Hosts(2) as hosts:\n"
        "    for _ in range(3):\n"
        "        with HostRanks(hosts, (0, 0, 1, 1), backend='ringcoll') as pool:\n"
        "            print(pool.run(connected_hosts, 'shared'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=120,
        check=True,
    )
    assert done.stdout.count("[((), (0, 0, 1, 1), 10)") == 3
    assert "UCX" not in done.stderr


@pytest.mark.parametrize("where", [(0, 0, 1, 1), APART_IN_TURN, (0, 1, 1, 1)])
def test_hierarchical_all_reduce(two_hosts: Hosts, where: tuple[int, ...]):
    """Given as a schedule for just these hosts."""
    text = schedule_of("all_reduce", "hierarchical", 4, hosts=where).to_text()
    with HostRanks(two_hosts, where) as pool:
        for name in (*TRANSPORTS, WITHOUT_UCX):
            transport = several_hosts.named(pool, name)
            for numel in (1, 4001, 50_000):
                assert pool.run(several_hosts.run_schedule, transport, text, numel) == [[0.0]] * 4


# --- gloo's interface ---------------------------------------------------------------------


def test_gloo_finds_the_interface_by_the_way_to_the_store(two_hosts: Hosts):
    with HostRanks(two_hosts, (0, 1), environment={}) as pool:
        assert pool.run(several_hosts.connected_hosts, "gloo") == [((), (0, 1), 3)] * 2


@pytest.fixture(scope="module", params=["", "127.0.1.1"], ids=["named", "as Debian names them"])
def oak_and_elm(request: Any) -> Iterator[Hosts]:
    """Two hosts with names, which each host knows itself by an address of its own, or not."""
    with Hosts(2, names=["oak", "elm"], own=request.param) as hosts:
        for host in hosts.hosts:
            host.ip("link", "add", "bare", "type", "veth", "peer", "name", "other")
            host.ip("link", "set", "bare", "up")
            host.ip("link", "set", "other", "up")
            # A link-local address that the kernel still checks (RFC 4862) cannot be bound.
            host.ip("addr", "add", "fe80::77/64", "dev", "bare", "nodad")
            host.ip("link", "add", "down", "type", "bridge")
        yield hosts


def first_run(
    hosts: Hosts, *interfaces: str | None, limit_s: float = 30.0, at_most_s: float = 20.0
) -> list[tuple[str, list[str]]]:
    with HostRanks(hosts, range(len(interfaces)), environment={}, backend=None) as pool:
        answers = pool.run(several_hosts.first_run, "oak", interfaces, limit_s)
    assert all(seconds < at_most_s for _, seconds, _ in answers), answers
    return [(text, addresses) for text, _, addresses in answers]


def test_the_first_run_finds_the_network(oak_and_elm: Hosts):
    """Nothing is set; rank 0 serves the store under its host's name, as torchrun does."""
    answers = first_run(oak_and_elm, None, None)
    assert [text for text, _ in answers] == ["3 3", "3 3"]
    for (_, addresses), own in zip(answers, ("10.77.0.1", "10.77.0.2"), strict=True):
        assert own in addresses
        assert not any(address.startswith("127.") for address in addresses)


@pytest.mark.parametrize(
    "interfaces, told",
    [
        (("eth0", "lo"), "rank 1 listens on 127.0.0.1, which other hosts cannot reach"),
        (("lo", "lo"), "rank 0 listens on 127.0.0.1, which other hosts cannot reach"),
        ((None, "eth7"), "rank 1 cannot listen for gloo on eth7"),
        (("down", None), "rank 0 cannot listen for gloo on down"),
        (("bare", "eth0"), "rank 0 listens on fe80:"),
    ],
    ids=str,
)
def test_a_wrong_interface_is_told_on_every_host(
    oak_and_elm: Hosts, interfaces: tuple[str | None, ...], told: str
):
    answers = first_run(oak_and_elm, *interfaces)
    for rank, (text, _) in enumerate(answers):
        assert f"TransportError: rank {rank} could not connect to the others: {told}" in text
        assert "set GLOO_SOCKET_IFNAME to the network's interface" in text


def test_an_address_without_a_way_to_it_is_told_on_every_host(oak_and_elm: Hosts):
    """Each host has a network of its own, which looks like any other."""
    for index, host in enumerate(oak_and_elm.hosts):
        host.ip("addr", "replace", f"10.78.{index}.1/24", "dev", "bare")
    for text, _ in first_run(oak_and_elm, "bare", "bare", limit_s=4.0, at_most_s=9.0):
        assert "rank 0 on 10.78.0.1, rank 1 on 10.78.1.1" in text
        assert "set GLOO_SOCKET_IFNAME" in text


def test_gloo_on_the_loopback_interface_is_refused():
    """Names resolve as outside, and the store's host is known by none."""
    with (
        Hosts(2, apart=("net", "uts"), names=["localhost"] * 2) as hosts,
        HostRanks(hosts, (0, 1), environment={"GLOO_SOCKET_IFNAME": "lo"}, backend=None) as pool,
    ):
        for text in pool.run(several_hosts.meet_in_vain, "gloo"):
            assert "rank 0 listens on 127.0.0.1, which other hosts cannot reach" in text
            assert "GLOO_SOCKET_IFNAME" in text


# --- what can go wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 1 << 18])
@pytest.mark.parametrize("dying", [0, 3])
@pytest.mark.parametrize("transport", [*TRANSPORTS, WITHOUT_UCX])
def test_a_killed_rank_is_reported(two_hosts: Hosts, transport: str, dying: int, numel: int):
    reports: list[tuple[int, str, str, int, float]] = []
    with HostRanks(two_hosts, (0, 0, 1, 1)) as pool:
        transport = several_hosts.named(pool, transport)
        how = (transport, dying, numel, 30.0)
        with pytest.raises(RankError) as caught:
            pool.run(several_hosts.lose_a_rank, *how, on_report=reports.append)
    assert set(caught.value.failures) == {dying}
    assert {rank for rank, *_ in reports} == {0, 1, 2, 3} - {dying}
    for _, kind, text, peer, seconds in reports:
        assert (kind, peer) == ("PeerLostError", dying), text
        assert seconds < 2.3  # the rank dies after 0.3


@pytest.mark.parametrize("where", [(0, 1), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_killed_before_the_ranks_have_met_is_reported(where: tuple[int, ...], dying: int):
    """There are no connections yet that could end, and nobody on its host that could see it."""
    reports: list[tuple[int, str, str, int, float]] = []
    with (
        Hosts(len(where)) as hosts,
        HostRanks(hosts, where, backend="ringcoll") as pool,
        pytest.raises(RankError) as caught,
    ):
        pool.run(several_hosts.lose_a_rank_before_they_meet, dying, on_report=reports.append)
    assert set(caught.value.failures) == {dying}
    assert {rank for rank, *_ in reports} == {*range(len(where))} - {dying}
    for _, kind, text, peer, seconds in reports:
        assert (kind, peer) == ("PeerLostError", dying), text
        assert seconds < 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "transport, expected, limit_s, at_most_s, enough",
    [
        # By the keepalive of the connection, or by the time limit.
        ("ucx", "PeerLostError", 25.0, 15.0, 2),
        ("ucx", "CollectiveTimeoutError", 3.0, 5.0, 2),
        ("gloo", "CollectiveTimeoutError", 3.0, 5.0, 3),
    ],
)
def test_a_host_that_vanishes_is_missed(
    transport: str, expected: str, limit_s: float, at_most_s: float, enough: int
):
    """No end of any connection tells. Whoever is cut off from the store takes some seconds more."""
    reports: list[tuple[int, str, str, int, float]] = []
    ready = []

    with Hosts(2) as hosts, HostRanks(hosts, (0, 0, 1), timeout_s=at_most_s + 15) as pool:

        def on_report(item: Any) -> None:
            if item[1] != "ready":
                reports.append(item)
                if len(reports) == enough:
                    raise EnoughError
                return
            ready.append(item)
            if len(ready) == 3:
                time.sleep(0.2)
                hosts.unplug(1)

        with pytest.raises(EnoughError):
            pool.run(
                several_hosts.lose_a_rank, transport, -1, 1 << 18, limit_s, on_report=on_report
            )
    assert len({rank for rank, *_ in reports}) == enough
    for rank, kind, text, _, seconds in reports:
        assert kind == expected, text
        assert seconds < (at_most_s if rank < 2 else at_most_s + 7)


class EnoughError(Exception):
    """All that is wanted has been reported."""


@pytest.mark.parametrize(
    "transport, numel, count",  # sends over gloo wait for the receiver, whatever their length
    [("ucx", 1, 300), ("ucx", 500, 300), ("ucx", 1 << 17, 3), ("gloo", 1 << 17, 3)],
)
def test_who_leaves_is_heard_to_the_end(two_hosts: Hosts, transport: str, numel: int, count: int):
    with HostRanks(two_hosts, (0, 1)) as pool:
        assert pool.run(several_hosts.last_words, transport, numel, count) == [count] * 2


def test_memory_is_not_shared_between_hosts(two_hosts: Hosts):
    with HostRanks(two_hosts, (0, 1)) as pool:
        for rank, told in enumerate(pool.run(several_hosts.share)):
            assert told == (
                f"rank {rank}: argument 'share': memory cannot be shared between hosts "
                "(expected False, or ranks of one host, got True on 2 hosts); not moved"
            )


# --- the hosts themselves ------------------------------------------------------------------


def name_spaces() -> set[str]:
    """Network name spaces of the machine in which a process is."""
    told = subprocess.run(
        ["lsns", "-t", "net", "-n", "-o", "NS"], capture_output=True, text=True, check=True
    )
    return set(told.stdout.split())


def those_of(hosts: Hosts) -> set[str]:
    pids = [space.pid for space in (hosts.switch, *hosts.hosts)]
    return {str(Path(f"/proc/{pid}/ns/net").stat().st_ino) for pid in pids}


def test_nothing_is_left():
    with Hosts(2) as hosts:
        made = those_of(hosts)
        assert len(made) == 3
        assert made <= name_spaces()
    assert not made & name_spaces()


def test_nothing_is_left_behind_an_interruption():
    processes, made = [], set()

    def interrupted() -> None:
        with Hosts(2) as hosts:
            made.update(those_of(hosts))
            processes.extend(HostRanks(hosts, (0, 1)).processes)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    for process in processes:
        process.join(10)
        assert not process.is_alive()
    assert len(made) == 3
    assert not made & name_spaces()


def test_nothing_is_left_behind_a_process_that_is_killed():
    """It cannot tidy up: what it made ends with it."""
    program = (
        "from tests.fakes.hosts import Hosts\n"
        "from tests.transport.test_between_hosts import those_of\n"
        "import time\n"
        "hosts = Hosts(2)\n"
        "print(*those_of(hosts), flush=True)\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        made = set(process.stdout.readline().split())
        process.kill()
    assert len(made) == 3
    deadline = time.monotonic() + 10
    while made & name_spaces():
        assert time.monotonic() < deadline
        time.sleep(0.05)
