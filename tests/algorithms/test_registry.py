"""The registry: looking up, refusing, and adding an algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import wraps
from typing import Any

import pytest

from ringcoll.errors import (
    RulesError,
    ScheduleError,
    UnknownAlgorithmError,
    UnsupportedWorldSizeError,
    VerificationError,
)
from ringcoll.schedules import (
    CONTRACTS,
    OperandOrder,
    Program,
    Schedule,
    Step,
    copy,
    inp,
    out,
    recv,
    send,
    verify,
)
from ringcoll.schedules.algorithms import (
    ALIASES,
    Algorithm,
    Cost,
    Parameter,
    algorithms,
    find,
    mark_built_in,
    named,
    order_of,
    register,
    registry,
    required,
    schedule_of,
    unregister,
    where_possible,
)
from ringcoll.schedules.cost import (
    LinkCosts,
    Table,
    choose,
    crowded_parameters,
    parse_rules,
    predictions,
)

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
    register("all_gather", "star", chunks=lambda k: k)(star_all_gather)
    yield "star"
    unregister("all_gather", "star")


def test_a_new_algorithm(star: str) -> None:
    entry = find("all_gather", star)
    assert entry in tuple(algorithms("all_gather"))
    assert entry.summary.startswith("Every rank tells every other one")
    proof = verify(schedule_of("all_gather", star, 5))
    assert (proof.rounds, proof.traffic, proof.reduced) == entry.counts(5)
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
    assert str(caught.value).endswith("known: bruck, retri, torus, bine, pairwise")


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

    register("all_gather", "pairs", chunks=lambda k: k, restriction=even)(star_all_gather)
    try:
        verify(schedule_of("all_gather", "pairs", 4))
        with pytest.raises(UnsupportedWorldSizeError) as caught:
            schedule_of("all_gather", "pairs", 5)
        assert str(caught.value) == (
            "pairs all_gather cannot run on 5 ranks: the ranks are paired off"
        )
    finally:
        unregister("all_gather", "pairs")


def listed(rank: int, world_size: int) -> Program:
    return [Step(copy(out(rank), inp(rank)))]  # type: ignore[return-value]


def listed_at_the_end(rank: int, world_size: int) -> Program:
    """To Python, a generator may return a value; what it returns is lost."""
    if rank:
        return [Step(send(0, inp(rank)))]  # type: ignore[return-value]
    yield Step(copy(out(rank), inp(rank)))


def without_return(rank: int, world_size: int) -> None:
    """A program that was not written yet."""


@pytest.mark.parametrize(
    "program, returned, rank",
    [
        (listed, "an object of type list", 0),
        (listed_at_the_end, "an object of type list", 1),
        (without_return, "None", 0),
    ],
)
def test_a_program_that_does_not_yield(
    program: Callable[[int, int], Any], returned: str, rank: int
) -> None:
    register("all_gather", "no_yield", chunks=lambda k: k)(program)
    try:
        with pytest.raises(VerificationError) as caught:
            verify(schedule_of("all_gather", "no_yield", 3))
        assert caught.value.message.startswith(f"the program returned {returned}; ")
        assert "yields its steps one by one, as in `yield Step(...)`" in caught.value.message
        assert (caught.value.rank, caught.value.step) == (rank, 0)
        with pytest.raises(ScheduleError, match="the program returned"):
            schedule_of("all_gather", "no_yield", 3).to_text()
    finally:
        unregister("all_gather", "no_yield")


def test_a_cost_that_is_not_stated_is_counted_once(star: str) -> None:
    entry = find("all_gather", star)
    assert entry.cost is None
    called: list[int] = []

    def program(rank: int, world_size: int) -> Program:
        called.append(rank)
        return star_all_gather(rank, world_size)

    counted = replace(entry, program=program)
    assert counted.counts(4) == counted.counts(4) == (1, Fraction(3, 4), Fraction(0))
    assert called == [0, 1, 2, 3]
    assert counted.counts(5) == (1, Fraction(4, 5), Fraction(0))


def test_a_stated_cost_that_is_wrong() -> None:
    def rounds(k: int) -> int:
        return 1 if k < 4 else 2

    cost = Cost(rounds=rounds, traffic=lambda k: Fraction(k - 1, k))
    register("all_gather", "dear", chunks=lambda k: k, cost=cost)(star_all_gather)
    try:
        for world_size in (1, 2, 3):
            verify(schedule_of("all_gather", "dear", world_size))
        with pytest.raises(VerificationError, match="rounds is stated as 2 and counted as 1"):
            verify(schedule_of("all_gather", "dear", 4))
    finally:
        unregister("all_gather", "dear")


def test_what_an_entry_is_without_further_words() -> None:
    register("all_reduce", "plain")(star_all_gather)
    try:
        entry = find("all_reduce", "plain")
    finally:
        unregister("all_reduce", "plain")
    assert (entry.chunks(5), entry.slots(5), entry.restriction(5)) == (1, 0, None)
    flags = entry.pipelined, entry.equal_blocks, entry.needs_hosts, entry.second_choice
    assert flags == (False, False, False, False)
    assert entry.order is OperandOrder.ANY
    assert (entry.cost, entry.across_hosts_from, entry.parameter) == (None, None, None)


# --- where an algorithm can run -----------------------------------------------------------


def test_algorithms_that_are_not_defined_for_so_many_ranks_are_left_out() -> None:
    def names(*world: int) -> set[str]:
        return {entry.name for entry in algorithms("all_reduce", *world)}

    assert names() >= {"ring", "swing", "trivance"}
    assert names() > names(8) >= {"ring", "swing"}
    assert names() > names(9) >= {"ring", "trivance"}
    assert "trivance" not in names(8)
    assert "swing" not in names(9)
    assert not any("=" in name for name in names())
    assert any("=" in entry.name for entry in algorithms("all_reduce", variants=True))


def test_a_name_in_one_collective_or_in_all() -> None:
    assert {entry.collective for entry in named("tree")} >= {"all_reduce", "broadcast", "reduce"}
    assert [entry.name for entry in named("tree", "broadcast")] == ["binomial_tree"]
    assert named("nobody's") == named("ring", "all_to_all") == []


def test_what_is_asked_for_has_to_run() -> None:
    for name in ("auto", "ring", "tree"):
        assert required("all_reduce", name, 6) == name
    with pytest.raises(
        UnsupportedWorldSizeError, match=r"^swing all_reduce cannot run on 6 ranks:"
    ):
        required("all_reduce", "swing", 6)
    with pytest.raises(UnknownAlgorithmError):
        required("broadcast", "swing", 8)
    schedule = schedule_of("all_reduce", "ring", 4)
    assert required("all_reduce", schedule, 4) is schedule
    with pytest.raises(UnknownAlgorithmError) as unknown:
        required("broadcast", schedule, 4)
    assert str(unknown.value) == "ring is a schedule for all_reduce, not for broadcast"
    with pytest.raises(UnsupportedWorldSizeError) as unsupported:
        required("all_reduce", schedule, 5)
    assert str(unsupported.value) == (
        "ring all_reduce cannot run on 5 ranks: it is a schedule for 4"
    )


def test_what_is_asked_for_in_one_collective_leaves_the_others_free() -> None:
    assert where_possible("all_reduce", "auto", 6) == "auto"
    assert where_possible("all_reduce", "ring", 6) == "ring"
    assert where_possible("all_to_all", "ring", 6) == "auto"
    assert where_possible("all_reduce", "swing", 8) == "swing"
    with pytest.raises(UnsupportedWorldSizeError, match=r"^swing all_reduce cannot run on 6"):
        where_possible("broadcast", "swing", 6)
    with pytest.raises(UnknownAlgorithmError):
        where_possible("broadcast", "nobody's", 6)
    schedule = schedule_of("all_reduce", "ring", 4)
    assert where_possible("all_reduce", schedule, 4) is schedule
    assert where_possible("broadcast", schedule, 4) == "auto"
    with pytest.raises(UnsupportedWorldSizeError):
        where_possible("broadcast", schedule, 5)


# --- a name that comes to mean something else ---------------------------------------------


def everything_known_of(name: str) -> tuple[object, ...]:
    """What each cache of the pure rooms says of an algorithm of three ranks."""
    schedule = schedule_of("all_reduce", name, 3)
    costs = crowded_parameters(LinkCosts(1e-5, 1e-9), 3)
    rule = f"all_reduce:*:{name}"
    table = Table(
        transport="any", world_size=3, parameters=costs, forced=parse_rules(rule, known_only=False)
    )
    by_time = {row.algorithm: row.seconds for row in predictions("all_reduce", 4, 3, costs)}
    return (
        schedule.to_text(),
        find("all_reduce", name).counts(3),
        order_of(schedule),
        by_time[name],
        choose("all_reduce", 1 << 20, 3, table).segment_bytes,
    )


def test_a_name_that_is_registered_anew_is_seen_by_every_cache() -> None:
    ring, tree = find("all_reduce", "ring"), find("all_reduce", "binary_tree")
    known: list[tuple[object, ...]] = []
    for entry in (ring, tree, ring):
        register("all_reduce", "turncoat", chunks=entry.chunks, pipelined=entry.pipelined)(
            entry.program
        )
        mark_built_in(find("all_reduce", "turncoat"))  # for the predictions
        known.append(everything_known_of("turncoat"))
        unregister("all_reduce", "turncoat")
        with pytest.raises(UnknownAlgorithmError):
            schedule_of("all_reduce", "turncoat", 3)
        assert "turncoat" not in {
            row.algorithm
            for row in predictions("all_reduce", 4, 3, crowded_parameters(LinkCosts(1e-5, 1e-9), 3))
        }
    first, second, third = known
    assert all(before != after for before, after in zip(first, second, strict=True))
    assert third == first


@pytest.fixture
def changed_ring() -> Iterator[None]:
    """The ring is registered anew: with another program under its face, or as it was."""
    entries = dict(registry._REGISTRY)
    yield
    registry._REGISTRY.clear()
    registry._REGISTRY.update(entries)
    registry._changed()


@pytest.mark.parametrize("is_wrapped", [True, False])
@pytest.mark.usefixtures("changed_ring")
def test_only_the_librarys_own_entries_count_as_built_in(is_wrapped: bool) -> None:
    """Neither a name nor a module's name decides, but the entry itself."""
    before = find("all_reduce", "ring")
    usual = schedule_of("all_reduce", "hierarchical", 8, hosts=(0,) * 4 + (1,) * 4).to_text()
    assert before.built_in
    assert find("all_reduce", "generalized=2").built_in
    assert find("all_reduce", "ring+two_shot").built_in
    assert not replace(before, program=star_all_gather).built_in

    @wraps(before.program)
    def traced(rank: int, world_size: int) -> Program:
        yield from find("all_reduce", "direct").program(rank, world_size)

    unregister("all_reduce", "ring")
    chosen = find("all_reduce", "direct") if is_wrapped else before
    again = register("all_reduce", "ring", chunks=chosen.chunks, slots=chosen.slots)
    again(traced if is_wrapped else before.program)
    assert find("all_reduce", "ring").program.__module__ == "ringcoll.schedules.algorithms.ring"
    for name in ("ring", "ring+two_shot", "two_shot+ring", "two_shot+ring+two_shot"):
        assert not find("all_reduce", name).built_in, name
    assert find("all_reduce", "two_shot+two_shot").built_in
    # What the library makes of its ring is made of its own.
    assert (
        schedule_of("all_reduce", "hierarchical", 8, hosts=(0,) * 4 + (1,) * 4).to_text() == usual
    )
    rows = predictions("all_reduce", 4, 3, crowded_parameters(LinkCosts(1e-5, 1e-9), 3))
    assert "ring" not in {row.algorithm for row in rows}


@pytest.mark.usefixtures("changed_ring")
def test_a_program_that_replaces_all_of_the_library_has_a_choice() -> None:
    """As a tool that wraps every algorithm does."""
    costs = crowded_parameters(LinkCosts(1e-5, 1e-9), 4)
    usual = {row.algorithm for row in predictions("barrier", 1, 4, costs)}
    for entry in tuple(algorithms("barrier")):
        unregister("barrier", entry.name)
        register("barrier", entry.name, chunks=entry.chunks, slots=entry.slots)(entry.program)
    found = {row.algorithm for row in predictions("barrier", 1, 4, costs)}
    assert not any(entry.built_in for entry in algorithms("barrier"))
    assert {entry.name for entry in algorithms("barrier", 4)} & usual
    assert found >= {entry.name for entry in algorithms("barrier", 4) if not entry.needs_hosts}


def test_every_change_has_a_revision_of_its_own(star: str) -> None:
    before = registry.revision
    unregister("all_gather", star)
    between = registry.revision
    register("all_gather", star, chunks=lambda k: k)(star_all_gather)
    assert len({before, between, registry.revision}) == 3


@pytest.mark.parametrize("world_size", [0, -3])
def test_a_world_without_ranks(world_size: int) -> None:
    with pytest.raises(UnsupportedWorldSizeError, match=f"at least 1, .*got {world_size}"):
        schedule_of("all_reduce", "ring", world_size)


def test_the_root_is_rank_0_unless_it_is_said() -> None:
    assert schedule_of("broadcast", "chain", 4) == schedule_of("broadcast", "chain", 4, 0)
    assert schedule_of("broadcast", "chain", 4) != schedule_of("broadcast", "chain", 4, 1)


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
    chunks = range(schedule.num_chunks if entry.collective != "exscan" else 0)  # it has no output
    assert step == Step(*(copy(out(chunk), inp(chunk)) for chunk in chunks))
    proof = verify(schedule)
    assert (proof.rounds, proof.messages_max) == (0, 0)
    assert proof.traffic == proof.reduced == 0


# --- parameters -------------------------------------------------------------------------


def test_a_parameter_is_chosen_in_the_name() -> None:
    plain, four = find("broadcast", "circulant"), find("broadcast", "circulant=4")
    assert (plain.name, four.name) == ("circulant", "circulant=4")
    assert (plain.schedule(5).num_chunks, four.schedule(5).num_chunks) == (16, 4)
    assert find("broadcast", "circulant=4") is find("broadcast", "circulant=04") is four
    assert (four.source, four.built_in) == (plain.source, True)
    assert plain.counts(5) != four.counts(5)
    assert verify(four.schedule(5)).rounds == four.counts(5)[0]
    with pytest.raises(UnknownAlgorithmError, match="'circulant=4' has no entry for broadcast"):
        unregister("broadcast", "circulant=4")
    assert Schedule.from_text(four.schedule(3).to_text()) == four.schedule(3)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("ring=4", "ring broadcast has no parameter, got 'ring=4'"),
        ("rong=4", "unknown algorithm 'rong' for broadcast; known: "),
        ("circulant=", "circulant broadcast takes a number of blocks, such as circulant=16"),
        ("circulant=-1", "circulant broadcast takes a number of blocks"),
        (
            "circulant=0",
            "circulant broadcast takes a number of blocks, such as circulant=16, at least 1",
        ),
        ("circulant=4=4", "circulant broadcast takes a number of blocks"),
        (f"circulant={'9' * 5000}", "circulant broadcast takes a number of blocks"),
    ],
)
def test_a_parameter_that_is_refused(name: str, reason: str) -> None:
    register("broadcast", "ring")(star_all_gather)
    try:
        with pytest.raises(UnknownAlgorithmError) as caught:
            find("broadcast", name)
        assert str(caught.value).startswith(reason)
    finally:
        unregister("broadcast", "ring")


def test_a_parameter_that_the_ranks_do_not_allow() -> None:
    entry = find("all_reduce", "generalized=2")
    for refused in (entry.schedule, entry.counts):
        with pytest.raises(UnsupportedWorldSizeError, match=r"generalized=2 .* on 6 ranks: 4 has"):
            refused(6)


def test_a_parameter_of_a_user() -> None:
    @register(
        "all_gather",
        "rotated",
        chunks=lambda k, turns: k,
        parameter=Parameter("turns", default=lambda k: k - 1, tried=(2,)),
    )
    def rotated(rank: int, world_size: int, turns: int) -> Program:
        """Rotated: the neighbours at a distance first."""
        others = [(rank + turns + i) % world_size for i in range(world_size)]
        yield Step(
            copy(out(rank), inp(rank)),
            *(send(peer, inp(rank)) for peer in others if peer != rank),
            *(recv(peer, out(peer)) for peer in others if peer != rank),
        )

    try:
        for name in ("rotated", "rotated=0", "rotated=3"):
            assert verify(schedule_of("all_gather", name, 5)).rounds == 1
        first = {schedule_of("all_gather", f"rotated={turns}", 5).to_text() for turns in range(5)}
        assert len(first) == 5
        names = [entry.name for entry in algorithms("all_gather", variants=True)]
        assert names[-2:] == ["rotated", "rotated=2"]
        with pytest.raises(UnknownAlgorithmError, match=r"such as rotated=7, .*got 'rotated=x'"):
            find("all_gather", "rotated=x")
    finally:
        unregister("all_gather", "rotated")
    with pytest.raises(UnknownAlgorithmError):
        find("all_gather", "rotated=3")


@pytest.mark.parametrize("name", ["a+b", "a=1"])
def test_signs_that_join_names(name: str) -> None:
    with pytest.raises(ScheduleError, match=r"cannot be named .* are signs in names"):
        register("all_gather", name)


def test_names_with_signs_are_names_everywhere() -> None:
    (rule,) = parse_rules("broadcast:1M-inf:circulant=64@256K")
    assert (rule.algorithm, str(rule)) == ("circulant=64", "broadcast:1M-inf:circulant=64@256K")
    (joined,) = parse_rules("tree+ring")
    assert joined.algorithm == "binomial_tree+ring"
    assert joined.matches("all_reduce", 8, 4, 2)
    assert not joined.matches("broadcast", 8, 4, 2)
    with pytest.raises(RulesError, match="no such algorithm"):
        parse_rules("all_reduce:*:ring+rong")
    assert where_possible("all_reduce", "ring+two_shot", 4) == "ring+two_shot"
    assert where_possible("broadcast", "ring+two_shot", 4) == "auto"
    assert required("reduce", "circulant=8", 4) == "circulant=8"
    with pytest.raises(UnknownAlgorithmError, match="unknown algorithm 'rong'"):
        required("all_reduce", "ring+rong", 4)


def test_auto_considers_several_values() -> None:
    costs = crowded_parameters(LinkCosts(1e-5, 1e-9), 8)
    names = {row.algorithm for row in predictions("broadcast", 1 << 26, 8, costs)}
    assert {"circulant", "circulant=4", "circulant=64"} <= names
    odd = {row.algorithm for row in predictions("all_reduce", 1 << 20, 6, costs)}
    assert "generalized" in odd
    assert not {"generalized=2", "generalized=3"} & odd
