"""What a search finds is proved; what it does not find is proved impossible."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringcoll
from ringcoll.errors import ArgumentError, MissingExtraError, VerificationError
from ringcoll.lab.search import (
    METHODS,
    SEARCHED,
    bounds,
    demand_of,
    fastest_times,
    greedy_moves,
    hops_of,
    registered_times,
    solve,
    synthesize,
)
from ringcoll.lab.search.bounds import least_rounds_per_chunk, least_steps
from ringcoll.lab.search.front import _Search
from ringcoll.lab.search.hops import HopGraph, Limit, schedule_of_moves
from ringcoll.lab.search.solvers import SolverAnswer, speeds_of_steps
from ringcoll.lab.simulation import (
    Link,
    Topology,
    crossbar,
    dgx1,
    fat_tree,
    hosts,
    ring,
    simulate,
    topology_from_text,
    torus,
)
from ringcoll.schedules import Buffer, RecvReduce, Schedule, Send, contract, verify
from tests.cases.effort import effort

UNEVEN = topology_from_text(
    """
    0 -- 1 50 1
    1 -- 2 50 1
    2 -- 0 25 1
    2 -- 3 10 2
    3 -- 4 30 1
    4 -> 0 20 1
    0 -> 3 10 1
    """,
    name="uneven",
)
GRID = torus((4, 4), bandwidth=10**10, latency_s=1e-6)


def shapes(front: Any) -> list[tuple[Any, ...]]:
    return [tuple(point.shape) for point in front.points]


# --- SCCL's results ---------------------------------------------------------------------


def test_the_points_of_the_dgx1() -> None:
    front = synthesize("all_gather", dgx1(), most_chunks=6)
    assert shapes(front) == [(2, 3, 2), (3, 7, 6)]
    assert (front.least_steps, front.least_rounds_per_chunk) == (2, Fraction(7, 6))
    # With two steps nothing is below 3/2, for up to 6 chunks.
    assert {(2, 7, 6), (2, 6, 5), (2, 5, 4), (2, 4, 3), (2, 7, 5)} <= {*front.impossible}
    assert not front.unknown
    for point in front.points:
        assert verify(point.schedule).rounds == point.shape.steps


@pytest.mark.parametrize(
    "steps, rounds, chunks", [(1, 9, 1), (2, 1, 1), (2, 2, 2), (3, 6, 6), (3, 2, 1)]
)
def test_what_is_impossible_on_the_dgx1(steps: int, rounds: int, chunks: int) -> None:
    """Too few steps, fewer rounds than steps, and less than the bound of 7/6."""
    answer, moves = solve(hops_of(dgx1()), demand_of("all_gather", 8, chunks), steps, rounds)
    assert (answer, moves) == (SolverAnswer.IMPOSSIBLE, ())


def test_too_little_effort_is_no_proof() -> None:
    demand = demand_of("all_gather", 16, 4)
    answer, _ = solve(hops_of(GRID), demand, 4, 15, effort=0.001)
    assert answer is SolverAnswer.UNKNOWN


def carried(schedule: Schedule, topology: Topology) -> list[dict[int, int]]:
    """The chunks on each link, by step."""
    loads: list[dict[int, int]] = []
    for rank in range(schedule.world_size):
        for number, step in enumerate(schedule.steps(rank)):
            loads += [{} for _ in range(number + 1 - len(loads))]
            for operation in step:
                if isinstance(operation, Send):
                    for link in topology.route(rank, operation.peer):
                        loads[number][link] = loads[number].get(link, 0) + len(operation.refs)
    return loads


@pytest.mark.parametrize(
    "collective, topology",
    [("all_gather", dgx1()), ("reduce_scatter", UNEVEN), ("broadcast", UNEVEN)],
)
def test_rounds_are_what_the_links_need(collective: str, topology: Topology) -> None:
    """Independent of the model: a step takes the rounds of its slowest link, in whole numbers."""
    front = synthesize(collective, topology, most_chunks=4, effort=0.5)
    slowest = min(link.bandwidth for link in topology.links)
    for point in front.points:
        rounds = sum(
            max(
                -(-chunks * slowest // topology.links[link].bandwidth)
                for link, chunks in step.items()
            )
            for step in carried(point.schedule, topology)
        )
        assert rounds <= point.shape.rounds
        assert point.shape.rounds_per_chunk >= front.least_rounds_per_chunk


# --- against the registered algorithms --------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("topology", [GRID, UNEVEN], ids=lambda topology: topology.name)
def test_it_beats_every_registered_algorithm(collective: str, topology: Topology) -> None:
    nbytes = 1 << 20
    front = synthesize(collective, topology, most_chunks=1 if topology is GRID else 4, effort=0.5)
    fastest = min(fastest_times([point.schedule for point in front.points], topology, nbytes))
    assert fastest.seconds < registered_times(collective, topology, nbytes)[0].seconds


def test_the_messages_of_an_algorithm_are_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def estimated(schedule: Schedule, most: int) -> int:
        names.append(schedule.algorithm)
        return 12

    monkeypatch.setattr(bounds, "estimated_messages", estimated)
    times = registered_times("broadcast", ring(4, bandwidth=1e9), 1 << 10)
    assert sorted(names) == sorted(time.algorithm for time in times)


def test_on_the_torus_no_schedule_of_whole_blocks_is_better() -> None:
    """Four steps for four hops, and no schedule of one chunk is between 15/4 and 4 rounds."""
    front = synthesize("all_gather", GRID, most_chunks=1)
    assert shapes(front) == [(4, 4, 1)]
    assert (front.least_steps, front.least_rounds_per_chunk) == (4, Fraction(15, 4))
    assert not front.unknown


# --- every collective, every method -----------------------------------------------------


@pytest.mark.parametrize("collective", SEARCHED)
@pytest.mark.parametrize(
    "topology",
    [UNEVEN, ring(3, bandwidth=1), crossbar(4, bandwidth=1),
     hosts(4, ranks_per_host=2, bandwidth=5, across_bandwidth=2),
     fat_tree(4, ranks_per_leaf=2, bandwidth=1, oversubscription=2), ring(1, bandwidth=1)],
    ids=lambda topology: f"{topology.name} {topology.world_size}",
)  # fmt: skip
def test_schedules_are_proved_and_read_back(collective: str, topology: Topology) -> None:
    root = topology.world_size - 1 if contract(collective).rooted else 0
    front = synthesize(collective, topology, root=root, most_chunks=2, more_steps=1, effort=0.05)
    assert front.points or front.unknown
    for point in front.points:
        proof = verify(point.schedule)
        assert point.schedule.root == root
        assert proof.rounds <= point.shape.steps
        assert Schedule.from_text(point.schedule.to_text()) == point.schedule


ranks = st.integers(2, 6)


@st.composite
def graphs(draw: st.DrawFn) -> Topology:
    """A ring in one direction, so that all are connected, and other links of other speeds."""
    world_size = draw(ranks)
    speeds: st.SearchStrategy[Any] = st.sampled_from([1, 2, 3, Fraction(5, 2), 10])
    ends = {(rank, (rank + 1) % world_size): draw(speeds) for rank in range(world_size)}
    pairs = st.tuples(*[st.integers(0, world_size - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    ends |= draw(st.dictionaries(pairs, speeds, max_size=8))
    links = [Link(*pair, speed, Fraction(1, 10)) for pair, speed in ends.items()]
    return Topology(world_size=world_size, links=tuple(links))


@effort(25)
@given(
    graphs(),
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce"]),
    st.integers(1, 3),
    st.integers(0, 99),
    st.data(),
)
def test_greedy_schedules_of_any_graph(
    topology: Topology, collective: str, chunks: int, seed: int, data: st.DataObject
) -> None:
    rooted = contract(collective).rooted
    root = data.draw(st.integers(0, topology.world_size - 1)) if rooted else 0
    front = synthesize(
        collective, topology, method="greedy", root=root, most_chunks=chunks, seed=seed
    )
    for point in front.points:
        verify(point.schedule)
        assert point.shape.steps >= front.least_steps
        assert point.shape.rounds_per_chunk >= front.least_rounds_per_chunk
        for step in carried(point.schedule, topology):
            for link, number in step.items():
                length = point.shape.rounds / Fraction(point.shape.steps)
                speed = topology.links[link].bandwidth * length
                speed /= min(link.bandwidth for link in topology.links)
                assert number <= -(-speed // 1)
        # Nothing is quicker than the data of the worst cut, at the speed of its links. Of an all-reduce that is the
        # slower phase, and not both: no rank waits for the others' end of the first one.
        run = simulate(point.schedule, 600, topology)
        blocks = 1 if rooted else topology.world_size
        slowest = min(link.bandwidth for link in topology.links)
        least = max(_Search(collective, topology, root).least_rounds)
        assert run.seconds >= least * Fraction(600, blocks) / slowest


def test_the_phases_of_an_all_reduce_overlap_where_no_rank_waits() -> None:
    """A run is quicker than the rounds of both phases, one after the other, and not than the bound."""
    ends = ((0, 1, 1), (1, 2, 1), (2, 0, 2), (0, 2, 1))
    topology = Topology(world_size=3, links=tuple(Link(*end, Fraction(1, 10)) for end in ends))
    front = synthesize("all_reduce", topology, method="greedy", most_chunks=1)
    # The whole vector, 3 blocks of 200 bytes, has to enter rank 1 by its only link, of speed 1.
    assert front.least_rounds_per_chunk == 3
    seconds = min(simulate(point.schedule, 600, topology).seconds for point in front.points)
    assert 3 * 200 <= seconds < 4 * 200


@pytest.mark.slow
@pytest.mark.parametrize("topology", [GRID, UNEVEN, dgx1()], ids=lambda topology: topology.name)
def test_trees_beat_every_registered_broadcast_of_large_data(topology: Topology) -> None:
    nbytes = 1 << 26
    front = synthesize("broadcast", topology, method="trees", most_chunks=4)
    fastest = min(fastest_times([point.schedule for point in front.points], topology, nbytes))
    assert fastest.seconds < registered_times("broadcast", topology, nbytes)[0].seconds


@pytest.mark.parametrize("method, segment_bytes", [("exact", None), ("greedy", 16), ("trees", 8)])
def test_what_was_found_runs(method: str, segment_bytes: int | None) -> None:
    """From its text, on real tensors."""
    front = synthesize("all_reduce", ring(4, bandwidth=1), method=method, most_chunks=1)
    schedule = Schedule.from_text(front.points[0].schedule.to_text())

    def main(group: Any) -> list[float]:
        tensor = torch.arange(11.0) * 10 ** group.rank()
        ringcoll.all_reduce(tensor, group=group, algorithm=schedule, segment_bytes=segment_bytes)
        return [float(value) for value in tensor]

    assert ringcoll.run_threads(main, 4) == [[1111.0 * number for number in range(11)]] * 4


@st.composite
def hop_graphs(draw: st.DrawFn) -> HopGraph:
    """Hops of speeds that are no integers, some of which share a limit."""
    graph = hops_of(draw(graphs()))
    every = range(len(graph.hops))
    shared = draw(st.lists(st.sampled_from(every), min_size=2, unique=True)) if every[1:] else []
    speed = draw(st.sampled_from([Fraction(1), Fraction(3, 2), Fraction(7, 3)]))
    limits = [*graph.limits, Limit(speed, tuple(shared))] if shared else graph.limits
    return replace(graph, limits=tuple(limits))


@effort(60)
@given(hop_graphs(), st.integers(1, 3), st.integers(0, 99))
def test_greedy_rounds_fill_what_the_limits_leave(graph: HopGraph, chunks: int, seed: int) -> None:
    """After n rounds a limit has carried at most n times its speed, and no hop with room was idle."""
    demand = demand_of("all_gather", graph.world_size, chunks)
    held = [
        {c for c, owner in enumerate(demand.owners) if owner == r} for r in range(graph.world_size)
    ]
    carried = [0] * len(graph.limits)
    for number, step in enumerate(greedy_moves(graph, demand, seed=seed)):
        left = [int(each.speed * (number + 1)) - int(each.speed * number) for each in graph.limits]
        arriving = [set(chunks) for chunks in held]
        for chunk, source, target in step:
            assert chunk in held[source]
            assert chunk not in arriving[target]
            arriving[target].add(chunk)
            for index, limit in enumerate(graph.limits):
                if graph.hops.index((source, target)) in limit.hops:
                    carried[index] += 1
                    left[index] -= 1
        for index, limit in enumerate(graph.limits):
            assert carried[index] <= limit.speed * (number + 1)
        for hop, (source, target) in enumerate(graph.hops):
            has_room = all(
                left[index] for index, limit in enumerate(graph.limits) if hop in limit.hops
            )
            assert not (has_room and held[source] - arriving[target])
        held = arriving
    assert held == [set(range(len(demand.owners)))] * graph.world_size


@effort(40)
@given(graphs(), st.integers(1, 3), st.integers(0, 99))
def test_slots_are_as_many_as_chunks_that_pass_a_rank_at_once(
    topology: Topology, chunks: int, seed: int
) -> None:
    """A slot is taken by the step of a chunk's first message to that of its last one, both included."""
    front = synthesize("reduce_scatter", topology, method="greedy", most_chunks=chunks, seed=seed)
    for point in front.points:
        most = 0
        for rank in range(topology.world_size):
            uses: dict[int, list[int]] = {}
            for number, step in enumerate(point.schedule.steps(rank)):
                for operation in step:
                    assert isinstance(operation, Send | RecvReduce)
                    for ref in operation.refs if isinstance(operation, Send) else operation.into:
                        if ref.buffer is Buffer.SCRATCH:
                            uses.setdefault(ref.chunk, []).append(number)
            spans = [(min(steps), max(steps)) for steps in uses.values()]
            times = {begin for begin, _ in spans}
            most = max([most, *(sum(a <= time <= b for a, b in spans) for time in times)])
        assert point.schedule.num_slots == most


# --- trees --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topology, collective, chunks, rounds",
    [
        (dgx1(), "all_gather", 6, 7),
        (dgx1(), "broadcast", 6, 1),
        (GRID, "all_gather", 4, 15),
        (GRID, "reduce", 4, 1),
        (UNEVEN, "all_gather", 2, 3),
    ],
)
def test_trees_reach_the_bound(
    topology: Topology, collective: str, chunks: int, rounds: int
) -> None:
    front = synthesize(collective, topology, method="trees", most_chunks=chunks)
    point = front.points[-1]
    verify(point.schedule)
    assert point.shape[1:] == (rounds, chunks)
    assert point.shape.rounds_per_chunk == front.least_rounds_per_chunk


@effort(25)
@given(
    graphs(),
    st.sampled_from(["all_gather", "reduce_scatter", "broadcast", "reduce"]),
    st.integers(1, 4),
)
def test_trees_of_any_graph_fit_into_their_rounds(
    topology: Topology, collective: str, chunks: int
) -> None:
    front = synthesize(collective, topology, method="trees", most_chunks=chunks)
    slowest = min(link.bandwidth for link in topology.links)
    for point in front.points:
        verify(point.schedule)
        assert point.shape.rounds_per_chunk >= front.least_rounds_per_chunk
        loads: Counter[int] = Counter()
        for step in carried(point.schedule, topology):
            loads.update(step)
        assert all(
            load <= point.shape.rounds * topology.links[link].bandwidth / slowest
            for link, load in loads.items()
        )


# --- backwards, and one after the other --------------------------------------------------


@pytest.mark.parametrize("pair", [("all_gather", "reduce_scatter"), ("broadcast", "reduce")])
def test_the_dual_takes_as_long_on_the_reversed_links(pair: tuple[str, str]) -> None:
    reversed_links = Topology(
        world_size=UNEVEN.world_size,
        links=tuple(
            Link(link.target, link.source, link.bandwidth, link.latency_s) for link in UNEVEN.links
        ),
    )
    straight, dual = (
        synthesize(collective, topology, most_chunks=2, effort=0.5)
        for collective, topology in zip(pair, (UNEVEN, reversed_links), strict=True)
    )
    assert shapes(straight) == shapes(dual)
    for first, second in zip(straight.points, dual.points, strict=True):
        counts = [verify(point.schedule) for point in (first, second)]
        assert counts[0].rounds == counts[1].rounds
        assert counts[0].sent_mean == counts[1].sent_mean


def test_a_dual_whose_tree_is_wrong_is_refused() -> None:
    graph, demand = hops_of(UNEVEN), demand_of("all_gather", 5)
    _, moves = solve(graph, demand, 3, 3)
    verify(schedule_of_moves("reduce_scatter", "right", demand, [moves]))
    for wrong in ([*moves[1:]], [*moves[:-1]], [moves[0][1:], *moves[1:]]):
        with pytest.raises(VerificationError):
            verify(schedule_of_moves("reduce_scatter", "wrong", demand, [wrong]))
        with pytest.raises(VerificationError):
            verify(schedule_of_moves("all_gather", "wrong", demand, [wrong]))


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    front = synthesize("all_reduce", dgx1())
    assert shapes(front)[0] == (4, 6, 2)
    proof = verify(front.points[0].schedule)
    assert (proof.rounds, proof.sent_mean) == (4, Fraction(7, 4))
    assert front.least_rounds_per_chunk == Fraction(7, 3)


# --- bounds, hops, determinism ------------------------------------------------------------

# Two pairs of ranks whose links are never full; one link that may be full joins the pairs.
PAIRS = Topology(
    world_size=4,
    links=tuple(
        Link(*ends, 1, lanes=1 if {*ends} == {1, 2} else None)
        for a, b in ((0, 1), (1, 2), (2, 3))
        for ends in ((a, b), (b, a))
    ),
    name="two pairs",
)


@pytest.mark.parametrize(
    "topology, collective, steps, rounds",
    [
        (dgx1(), "broadcast", 2, Fraction(1, 6)),
        (dgx1(), "scatter", 2, Fraction(7, 6)),
        (GRID, "gather", 4, Fraction(15, 4)),
        (ring(5, bandwidth=1), "all_gather", 2, 2),
        (crossbar(6, bandwidth=3), "all_gather", 1, 5),
        (crossbar(6, bandwidth=3, ports=2), "all_to_all", 1, Fraction(5, 2)),
        (PAIRS, "all_gather", 3, 2),
        (PAIRS, "broadcast", 3, 1),
        # Four blocks come in by a card of a tenth of the speed.
        (hosts(8, ranks_per_host=4, bandwidth=10, across_bandwidth=1), "all_gather", 1, 4),
    ],
)
def test_bounds(topology: Topology, collective: str, steps: int, rounds: Any) -> None:
    graph, demand = hops_of(topology), demand_of(collective, topology.world_size)
    assert least_steps(graph, demand) == steps
    assert least_rounds_per_chunk(topology, graph, demand) == rounds


def test_hops_pass_switches_but_no_ranks() -> None:
    assert len(hops_of(GRID).hops) == len(hops_of(GRID).limits) == 64
    below_switches = hops_of(crossbar(4, bandwidth=2, ports=2))
    assert len(below_switches.hops) == 12
    assert sorted({(limit.speed, len(limit.hops)) for limit in below_switches.limits}) == [
        (1, 1),
        (2, 3),
    ]
    assert below_switches.same_both_ways
    assert not hops_of(UNEVEN).same_both_ways


def test_a_slow_link_may_be_left_out() -> None:
    graphs = speeds_of_steps(hops_of(UNEVEN))
    assert [graph.bandwidth for graph in graphs] == [10**10]  # rank 3 has no faster link to it
    assert [len(graph.hops) for graph in speeds_of_steps(hops_of(dgx1()))] == [32, 16]


@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_schedules(method: str) -> None:
    fronts = [synthesize("all_gather", UNEVEN, method=method, seed=7, effort=0.5) for _ in range(2)]
    texts = [[point.schedule.to_text() for point in front.points] for front in fronts]
    assert texts[0] == texts[1]


def test_another_seed_gives_another_schedule() -> None:
    graph, demand = hops_of(GRID), demand_of("all_gather", 16)
    assert greedy_moves(graph, demand, seed=1) != greedy_moves(graph, demand, seed=2)


# --- wrong calls -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collective, options, argument",
    [
        ("barrier", {}, "collective"),
        ("all_gather", {"method": "best"}, "method"),
        ("all_gather", {"root": 1}, "root"),
        ("broadcast", {"root": 5}, "root"),
        ("all_gather", {"most_chunks": 0}, "most_chunks"),
        ("all_gather", {"more_steps": -1}, "more_steps"),
        ("all_to_all", {"method": "greedy"}, "collective"),
        ("all_to_all", {"method": "trees"}, "collective"),
    ],
)
def test_wrong_calls(collective: str, options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        synthesize(collective, UNEVEN, **options)
    assert caught.value.argument == argument


def test_trees_share_out_what_hops_share() -> None:
    """Below one switch each rank receives what it lacks, and nothing twice: the bound."""
    front = synthesize("all_gather", crossbar(4, bandwidth=1), method="trees")
    assert [point.shape.rounds_per_chunk for point in front.points] == [3, 3]
    assert front.least_rounds_per_chunk == 3


@pytest.mark.parametrize(
    "topology, chunks, rounds",
    [
        (ring(6, bandwidth=1), 6, 5),  # of 6 cables a tree of 6 ranks needs 5
        (GRID, 2, Fraction(1)),  # 32 cables hold two trees of 15
        (hosts(6, ranks_per_host=2, bandwidth=8, across_bandwidth=1), 3, 4),
    ],
)
def test_trees_of_an_all_reduce_go_both_ways_at_once(
    topology: Topology, chunks: int, rounds: int
) -> None:
    front = synthesize("all_reduce", topology, method="trees", most_chunks=chunks)
    point = front.points[-1]
    verify(point.schedule)
    assert point.schedule.num_chunks == chunks
    assert point.shape.rounds == rounds * topology.world_size
    assert point.shape.rounds_per_chunk >= front.least_rounds_per_chunk


def test_trees_of_an_all_reduce_on_links_of_one_direction() -> None:
    one_way = Topology(world_size=4, links=tuple(Link(r, (r + 1) % 4, 1) for r in range(4)))
    point = synthesize("all_reduce", one_way, method="trees", most_chunks=1).points[0]
    verify(point.schedule)
    assert point.shape == (6, 6, 1)


def test_without_or_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(MissingExtraError, match=r"ringcoll\[search\]"):
        synthesize("all_gather", UNEVEN)
    assert synthesize("all_gather", UNEVEN, method="greedy").points
