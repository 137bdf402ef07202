"""The registry: looking up, refusing, and adding an algorithm."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest

from ringcoll.algorithms import (
    ALIASES,
    Algorithm,
    Cost,
    algorithms,
    find,
    register,
    schedule_of,
    unregister,
)
from ringcoll.contracts import CONTRACTS
from ringcoll.errors import ScheduleError, UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.schedule import Program, Step, copy, inp, out, recv, send
from ringcoll.verify import verify

EVERY = tuple(algorithms())
FREE = Cost(rounds=lambda k: 1, traffic=lambda k: Fraction(1))


def star_all_gather(rank: int, world_size: int) -> Program:
    """Every rank tells every other one: the dozen lines that a new algorithm takes."""
    others = [peer for peer in range(world_size) if peer != rank]
    yield Step(
        copy(out(rank), inp(rank)),
        *(send(peer, inp(rank)) for peer in others),
        *(recv(peer, out(peer)) for peer in others),
    )


@pytest.fixture
def star() -> Iterator[str]:
    cost = Cost(rounds=lambda k: 1, traffic=lambda k: Fraction(k - 1, k))
    register("all_gather", "star", chunks=lambda k: k, cost=cost)(star_all_gather)
    yield "star"
    unregister("all_gather", "star")


def test_a_new_algorithm(star: str) -> None:
    entry = find("all_gather", star)
    assert entry in tuple(algorithms("all_gather"))
    assert entry.summary.startswith("Every rank tells every other one")
    proof = verify(schedule_of("all_gather", star, 5))
    assert (proof.rounds, proof.traffic) == (entry.cost.rounds(5), entry.cost.traffic(5))
    assert proof.ports == 4


def test_it_is_gone_again() -> None:
    with pytest.raises(UnknownAlgorithmError):
        find("all_gather", "star")
    with pytest.raises(UnknownAlgorithmError, match="'star' for all_gather"):
        unregister("all_gather", "star")


def test_an_unknown_algorithm_lists_the_known_ones() -> None:
    with pytest.raises(UnknownAlgorithmError) as caught:
        schedule_of("all_reduce", "circle", 4)
    message = str(caught.value)
    assert message.startswith("unknown algorithm 'circle' for all_reduce; known: ")
    known = message.partition("known: ")[2].split(", ")
    assert known == [*(entry.name for entry in algorithms("all_reduce")), "tree"]


def test_an_unknown_algorithm_of_a_collective_without_the_alias() -> None:
    with pytest.raises(UnknownAlgorithmError) as caught:
        find("all_to_all", "tree")
    assert str(caught.value).endswith("known: bruck, pairwise")


def test_an_unknown_collective() -> None:
    with pytest.raises(ScheduleError, match="unknown collective 'all_scatter'"):
        list(algorithms("all_scatter"))
    with pytest.raises(ScheduleError, match="unknown collective 'all_scatter'"):
        find("all_scatter", "ring")
    with pytest.raises(ScheduleError, match="unknown collective 'all_scatter'"):
        register("all_scatter", "ring", cost=FREE)


@pytest.mark.parametrize("name", ["ring", "tree", "auto"])
def test_a_name_that_is_taken(name: str) -> None:
    before = tuple(algorithms())
    with pytest.raises(ScheduleError, match=f"all_gather already has an algorithm named '{name}'"):
        register("all_gather", name, cost=FREE)
    assert tuple(algorithms()) == before


def test_aliases_lead_to_algorithms() -> None:
    assert ALIASES["tree"] == "binomial_tree"
    assert find("broadcast", "tree") is find("broadcast", "binomial_tree")
    for full in ALIASES.values():
        assert any(entry.name == full for entry in algorithms())


def test_every_collective_has_an_algorithm() -> None:
    for collective in CONTRACTS:
        assert tuple(algorithms(collective))
    assert len(tuple(algorithms())) == sum(len(tuple(algorithms(name))) for name in CONTRACTS)


def test_a_restriction_is_named() -> None:
    def even(world_size: int) -> str | None:
        return "the ranks are paired off" if world_size % 2 else None

    register("all_gather", "pairs", cost=FREE, chunks=lambda k: k, restriction=even)(
        star_all_gather
    )
    try:
        verify(schedule_of("all_gather", "pairs", 4))
        with pytest.raises(UnsupportedWorldSizeError) as caught:
            schedule_of("all_gather", "pairs", 5)
        assert str(caught.value) == (
            "pairs all_gather cannot run on 5 ranks: the ranks are paired off"
        )
    finally:
        unregister("all_gather", "pairs")


@pytest.mark.parametrize("world_size", [0, -3])
def test_a_world_without_ranks(world_size: int) -> None:
    with pytest.raises(UnsupportedWorldSizeError, match=f"at least 1, got {world_size}"):
        schedule_of("all_reduce", "ring", world_size)


@pytest.mark.parametrize("root", [-1, 4])
def test_a_root_outside_the_world(root: int) -> None:
    with pytest.raises(ScheduleError, match=f"root {root} is not in a world of 4 ranks"):
        schedule_of("broadcast", "chain", 4, root)


def test_schedules_are_kept_until_the_registry_changes(star: str) -> None:
    first = schedule_of("all_gather", star, 3)
    assert schedule_of("all_gather", star, 3) is first
    register("all_gather", "other_star", cost=FREE, chunks=lambda k: k)(star_all_gather)
    unregister("all_gather", "other_star")
    assert schedule_of("all_gather", star, 3) is not first
    assert schedule_of("all_gather", star, 3) == first


@pytest.mark.parametrize("entry", EVERY, ids=lambda entry: f"{entry.collective}-{entry.name}")
def test_one_rank_copies(entry: Algorithm) -> None:
    schedule = schedule_of(entry.collective, entry.name, 1)
    (step,) = schedule.steps(0)
    assert step == Step(*(copy(out(chunk), inp(chunk)) for chunk in range(schedule.num_chunks)))
    proof = verify(schedule)
    assert (proof.rounds, proof.messages_max) == (0, 0)
    assert proof.traffic == proof.reduced == 0
