"""A fit is at least as fast as all that took part, never below its bound, and what it stores is what it found."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringcoll
from ringcoll.errors import ArgumentError, ScheduleError, TuningFileError
from ringcoll.lab.search import (
    FitRange,
    LeastTime,
    SearchTime,
    fit,
    least_time,
    near_order,
    registered_times,
    slower_links,
)
from ringcoll.lab.search.hops import hosts_named
from ringcoll.lab.simulation import (
    Topology,
    crossbar,
    dragonfly,
    fat_tree,
    hosts,
    ring,
    simulate,
    topology_from_text,
    topology_text,
    torus,
)
from ringcoll.runtime.user_files import fit_for, read_fit, write_fit
from ringcoll.schedules import CONTRACTS, chunks_of_data, verify
from ringcoll.schedules.algorithms import algorithms, find
from ringcoll.schedules.cost import Fitted, Range
from tests.cases.effort import effort

SLOW_CABLE = topology_from_text(
    "\n".join(f"{rank} -- {(rank + 1) % 6}  {0.1 if rank == 5 else 1}  1" for rank in range(6))
)
"""A ring of six with one cable ten times slower."""


def three_hosts(host_of: tuple[int, ...], slow: float = 0.025) -> Topology:
    """Hosts of two ranks with cards of 1000, 1000 and (slow) 200 Mbit/s."""
    lines = [f"{rank} -- host{host}  5  1" for rank, host in enumerate(host_of)]
    cards = (0.125, 0.125, slow)
    lines += [f"host{host} -- net  {speed}  20" for host, speed in enumerate(cards)]
    return topology_from_text("\n".join(lines))


HOSTS, SHUFFLED = three_hosts((0, 0, 1, 1, 2, 2)), three_hosts((0, 1, 2, 0, 1, 2))
TORUS = torus((3, 3), bandwidth=1e10, latency_s=1e-6).without(0, 1)
DRAGONFLY = dragonfly(
    8, ranks_per_router=2, routers_per_group=2, global_links=1, bandwidth=1e10, latency_s=1e-6,
    global_bandwidth=2e9, global_latency_s=3e-6,
)  # fmt: skip
NETWORKS = {
    "slow cable": SLOW_CABLE,
    "hosts": HOSTS,
    "shuffled": SHUFFLED,
    "torus": TORUS,
    "dragonfly": DRAGONFLY,
}


# --- Bounds ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collective, expected",
    [
        ("all_reduce", Fraction(6, 4)),  # 2 (k - 1) / k vectors a rank
        ("reduce_scatter", Fraction(3, 4)),
        ("all_gather", Fraction(3, 4)),
        ("all_to_all", Fraction(3, 4)),
        ("broadcast", Fraction(1)),
        ("reduce", Fraction(1)),
        ("gather", Fraction(3, 4)),
        ("scatter", Fraction(3, 4)),
    ],
)
def test_the_bounds_of_equal_ranks_are_those_of_the_literature(
    collective: str, expected: Fraction
) -> None:
    bound = least_time(collective, crossbar(4, bandwidth=1000, latency_s=7))
    assert bound.s_per_byte == pytest.approx(float(expected) / 1000, rel=1e-9)
    assert bound.latency_s == 7  # a crossbar's latency is on the way to its switch
    assert bound.seconds(4_000_000) == pytest.approx(4000 * float(expected), rel=1e-9)


def test_the_bound_names_the_narrowest_cut_and_the_farthest_ranks() -> None:
    bound = least_time("all_reduce", HOSTS)
    assert bound.s_per_byte == pytest.approx(1 / 0.025e9, rel=1e-9)
    assert bound.reason(1 << 20) == "the links around ranks 4, 5"
    assert bound.reason(1) == "the way from rank 0 to rank 2"
    assert bound.latency_s == pytest.approx(42e-6)
    cable = least_time("all_reduce", SLOW_CABLE)
    assert cable.s_per_byte == pytest.approx(2 * 5 / (2 * 5.1e9), rel=1e-9)  # by all six parts


@pytest.mark.slow
@pytest.mark.parametrize("collective", [name for name in CONTRACTS if name != "barrier"])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_registered_algorithm_beats_the_bound(collective: str, name: str) -> None:
    topology = NETWORKS[name]
    bound = least_time(collective, topology)
    for entry in algorithms(collective, topology.world_size):
        for nbytes in (1, 1 << 22):
            run = simulate(entry.schedule(topology.world_size), nbytes, topology, segments=4)
            assert run.seconds >= bound.seconds(nbytes) * (1 - 1e-9), (entry.name, nbytes)


# --- Orders ---------------------------------------------------------------------------------


@effort(40)
@given(st.permutations(range(12)))
def test_near_ranks_stand_beside_each_other(along: list[int]) -> None:
    """On a ring whose ranks are numbered at random the tour follows the cables, or is hardly longer."""
    cables = [f"{along[place - 1]} -- {rank}  1  1" for place, rank in enumerate(along)]
    order = near_order(topology_from_text("\n".join(cables)), 1 << 20)
    assert sorted(order) == list(range(12))
    places = [along.index(rank) for rank in order]
    hops = [abs(places[number - 1] - place) for number, place in enumerate(places)]
    # No turn of a piece makes the tour shorter, which on a ring leaves few ways of more than one cable.
    assert sum(min(hop, 12 - hop) for hop in hops) <= 18


def test_an_order_of_few_ranks_is_the_best_of_all() -> None:
    topology = SHUFFLED

    def seconds(order: tuple[int, ...]) -> float:
        schedule = find("all_gather", "ring~" + ".".join(map(str, order))).schedule(6)
        return float(simulate(schedule, 6 << 20, topology).seconds)

    best = min(seconds((0, *rest)) for rest in permutations(range(1, 6)))
    assert seconds(near_order(topology, 1 << 20)) <= best * (1 + 1e-9)


# --- Fits -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "collective, name",
    [
        *(("all_reduce", name) for name in NETWORKS),
        ("all_gather", "slow cable"),
        ("reduce_scatter", "torus"),
    ],
)
def test_the_winner_beats_all_and_is_near_the_bound(collective: str, name: str) -> None:
    topology = NETWORKS[name]
    sizes = [1 << 12, 1 << 26]
    found = fit(collective, topology, sizes=sizes)
    for nbytes in sizes:
        fastest = registered_times(collective, topology, nbytes)[0]
        assert found.times[nbytes][0].seconds <= fastest.seconds
    longest = found.ranges[-1]
    assert longest.least_s <= longest.winner.seconds <= 1.3 * longest.least_s
    assert longest.nbytes.end == 2 * sizes[-1]
    assert found.ranges[0].nbytes.first == sizes[0] // 2
    for schedule in found.schedules.values():
        verify(schedule)


@pytest.mark.slow
def test_ranges_meet_and_rules_say_what_won() -> None:
    found = fit("all_reduce", SHUFFLED, sizes=[1 << 10, 1 << 14, 1 << 20, 1 << 26])
    ends = [one.nbytes.end for one in found.ranges]
    firsts = [one.nbytes.first for one in found.ranges]
    assert ends[:-1] == firsts[1:]
    assert max(one.gain for one in found.ranges) > 1.2
    fitted = Fitted.from_json(found.fitted("2026-11-28T00:00:00").to_json())
    assert fitted.hosts == (0, 1, 2, 0, 1, 2)
    for rule, one in zip(
        fitted.rules, [one for one in found.ranges if not one.is_left], strict=True
    ):
        assert (rule.nbytes, rule.algorithm) == (one.nbytes, one.winner.algorithm)
        assert (rule.world_size, rule.hosts) == (Range(6, 7), Range(3, 4))
        assert rule.matches("all_reduce", one.size, 6, 3)
        assert not rule.matches("all_reduce", one.size, 6, 1)


def test_a_network_that_a_text_cannot_say_has_its_name(tmp_path: Path) -> None:
    tree = fat_tree(
        4, ranks_per_leaf=2, bandwidth=1e9, oversubscription=2
    )  # with a router of its own
    fitted = fit("all_gather", tree, sizes=[1 << 20], exact=False).fitted("2026-11-28T00:00:00")
    assert (fitted.graph, fitted.hosts) == (f"# {tree.name}", None)
    write_fit(tmp_path / "tree.fit", fitted)
    assert read_fit(tmp_path / "tree.fit") == fitted


def test_what_became_slower_is_told_by_the_ways_between_ranks() -> None:
    """Whatever the nodes are called: a link that was not there before counts, too."""
    before = three_hosts((0, 0, 1, 1, 2, 2), slow=0.125)
    assert slower_links(before, before) == ()
    named = topology_from_text(topology_text(before).replace("host", "machine"))
    assert slower_links(named, before) == ()
    assert all(
        words.endswith(", 0.125 to 0.025 GB/s") and "host2" in words
        for words in slower_links(named, HOSTS)
    )
    assert len(slower_links(named, HOSTS)) == 2
    beside = topology_from_text(topology_text(before) + "host0 -> host1 0.01 20\n")
    assert slower_links(before, beside) == ("host0 -> host1, 0.125 to 0.01 GB/s",)
    noise = three_hosts((0, 0, 1, 1, 2, 2), slow=0.1)
    assert slower_links(before, noise) == ()


def test_hosts_have_names_or_are_not_known() -> None:
    assert hosts_named(SHUFFLED) == (0, 1, 2, 0, 1, 2)
    assert hosts_named(SLOW_CABLE) is None
    assert hosts_named(hosts(4, ranks_per_host=2, bandwidth=1, across_bandwidth=1)) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    "collective, topology, sizes, error",
    [
        ("all_reduce", SLOW_CABLE, [0], ArgumentError),
        ("all_reduce", Topology(world_size=1, links=()), None, ArgumentError),
        ("best", SLOW_CABLE, None, ScheduleError),
    ],
)
def test_wrong_calls(collective: str, topology: Topology, sizes: Any, error: Any) -> None:
    with pytest.raises(error):
        fit(collective, topology, sizes=sizes)


# --- Files and groups -----------------------------------------------------------------------


def _stored(tmp_path: Path, topology: Topology, sizes: list[int]) -> tuple[Path, Fitted]:
    path = tmp_path / "cluster.fit"
    fitted = fit("all_reduce", topology, sizes=sizes).fitted("2026-11-28T00:00:00")
    write_fit(path, fitted)
    return path, fitted


def test_a_file_holds_the_fits_of_several_collectives(tmp_path: Path) -> None:
    path, fitted = _stored(tmp_path, SLOW_CABLE, [1 << 20])
    assert read_fit(path) == fitted
    both = fit("all_gather", SLOW_CABLE, sizes=[1 << 20]).fitted("2026-11-29T00:00:00", fitted)
    assert [rule.collective for rule in both.rules] == ["all_reduce", "all_gather"]
    assert len(both.schedules) == 2
    again = fit("all_reduce", SLOW_CABLE, sizes=[1 << 20]).fitted("2026-11-29T00:00:00", both)
    assert {rule.collective for rule in again.rules} == {"all_reduce", "all_gather"}
    assert len(again.rules) == len(again.schedules) == 2
    write_fit(path, again)
    assert read_fit(path) == again
    with pytest.raises(ArgumentError, match="another network"):
        fit("all_reduce", ring(6, bandwidth=1.0), sizes=[1 << 20]).fitted("2026-11-29", both)


def _sums(group: Any) -> list[str]:
    words = []
    for numel in (5, 70_000, 600_000):
        vector = torch.arange(numel, dtype=torch.float64) * (group.rank() + 1)
        ringcoll.all_reduce(vector, group=group)
        ranks = group.size() * (group.size() + 1) // 2
        assert torch.equal(vector, torch.arange(numel, dtype=torch.float64) * ranks)
        words.append(str(ringcoll.explain("all_reduce", 8 * numel, group)))
    return words


@pytest.mark.slow
def test_a_group_takes_what_was_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fitted = _stored(tmp_path, SLOW_CABLE, [40, 1 << 19, 1 << 22])
    monkeypatch.setenv("RINGCOLL_TUNING", str(path))
    for words in ringcoll.run_threads(_sums, 6):
        reasons = [word.splitlines()[1] for word in words]
        assert all(reason.startswith("why: fitted on 2026-11-28: ") for reason in reasons[1:])
        assert fitted.rules[-1].algorithm in words[-1]
    # Other numbers of ranks go on without it.
    assert "fitted on" not in "".join(ringcoll.run_threads(_sums, 4)[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change, message",
    [
        ({"version": "0.0.1"}, "another version of ringcoll: expected .*, got 0.0.1"),
        ({"hosts": (0, 0, 0, 1, 1, 1)}, "another layout of ranks on hosts"),
        ({"world_size": 4}, "another number of ranks: expected 6, got 4"),
    ],
)
def test_a_fit_for_something_else_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    """By whom names it; the variable says it to the log only, unless the version is another one."""
    path, fitted = _stored(tmp_path, SLOW_CABLE, [1 << 20])
    write_fit(path, replace(fitted, **change))
    with pytest.raises(TuningFileError, match=message) as caught:
        fit_for(str(path), (0,) * 6)
    assert "cluster.fit" in str(caught.value)


def test_the_variable_is_for_groups_that_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, fitted = _stored(tmp_path, SLOW_CABLE, [1 << 20])
    monkeypatch.setenv("RINGCOLL_TUNING", str(path))
    assert fit_for(None, (0,) * 6) == fitted
    assert fit_for(None, (0,) * 4) is None
    write_fit(path, replace(fitted, hosts=(0, 0, 0, 1, 1, 1)))
    assert fit_for(None, (0,) * 6) is None
    assert "cluster.fit is not used: the fit is for another layout" in caplog.text
    write_fit(path, replace(fitted, version="0.0.1"))
    with pytest.raises(TuningFileError, match="another version of ringcoll"):
        fit_for(None, (0,) * 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace("all_reduce", "all_reduction", 1),
        lambda text: text.replace("rank 0\\n", "rank 9\\n", 1),
        lambda text: text.replace("send out[0]", "send out[1]", 1),
        lambda text: text.replace('"world_size": 6', '"world_size": "6"'),
        lambda text: text.replace('"rules"', '"rule"'),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage: Any) -> None:
    path, _ = _stored(tmp_path, SLOW_CABLE, [1 << 20])
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with pytest.raises(TuningFileError, match=r"cluster\.fit"):
        read_fit(path)


@pytest.mark.parametrize(
    "nbytes, gain, is_even, is_left",
    [
        (15, 1.49, True, True),  # short: left, unless far faster
        (15, 1.49, False, True),
        (15, 1.5, False, False),
        (16, 1.49, False, False),  # 16 latencies are long
        (16, 1.03, True, False),
        (16, 1.02, True, True),  # hardly faster
        (16, 1.02, False, False),  # where links differ, "auto" knows less
        (16, 1.03, False, False),
    ],
)
def test_what_is_left_to_auto(nbytes: int, gain: float, is_even: bool, is_left: bool) -> None:
    fitted = FitRange(
        nbytes=Range(1),
        size=nbytes,
        winner=SearchTime(1.0, "found", 1),
        segment_bytes=None,
        plain=SearchTime(gain, "ring", 1),
        bound=LeastTime(1.0, 1.0, "farthest", "narrowest"),
        is_even=is_even,
    )
    assert fitted.is_left is is_left
    assert (fitted.gain, fitted.least_s, fitted.ratio) == (gain, nbytes, 1 / nbytes)


def test_segments_of_a_winner_are_parts_of_a_chunk() -> None:
    size, topology = 1 << 24, topology_from_text("0 -- 1 1 1\n1 -- 2 1 1\n2 -- 3 1 1")
    (fitted,) = fit("broadcast", topology, sizes=[size]).ranges
    assert fitted.winner.segments > 1
    assert fitted.segment_bytes is not None
    chunk = -(-size // chunks_of_data(find("broadcast", fitted.winner.algorithm).schedule(4)))
    assert fitted.segment_bytes == -(-chunk // fitted.winner.segments)
