"""Every algorithm is right and costs what the literature says, for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from math import isqrt, log

import pytest

from ringcoll.schedules import (
    Buffer,
    Copy,
    Operation,
    Proof,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Send,
    contract,
    inp,
    primitives,
    verify,
)
from ringcoll.schedules.algorithms import Algorithm, algorithms, find, schedule_of
from ringcoll.schedules.algorithms.recursive import Fold
from ringcoll.schedules.cost import lower_bound
from tests.cases.algorithms import EVERY, each_on, name_of, worlds_of

WORLDS = (*range(1, 18), 24, 27, 33, 64)


def roots(algorithm: Algorithm, world_size: int) -> list[int]:
    if not contract(algorithm.collective).rooted:
        return [0]
    if world_size > 24:
        return [world_size - 2]
    return sorted({0, world_size // 2, world_size - 1})


@cache
def proof_of(collective: str, name: str, world_size: int, root: int = 0) -> Proof:
    return verify(schedule_of(collective, name, world_size, root))


def proofs(algorithm: Algorithm, world_size: int) -> list[Proof]:
    return [
        proof_of(algorithm.collective, algorithm.name, world_size, root)
        for root in roots(algorithm, world_size)
    ]


# --- the formulas of the literature, written out again --------------------------------


Formula = Callable[[int, int], tuple[int, Fraction, Fraction]]
"""Rounds, traffic and reduced data from k and ceil(lg k)."""


def powers_of_two(world_size: int) -> bool:
    return world_size & (world_size - 1) == 0


def powers_of_four(world_size: int) -> bool:
    return world_size in (1, 4, 16, 64)


def any_number(world_size: int) -> bool:
    return True


def amount(
    rounds: int, traffic: Fraction | int, reduced: Fraction | int = 0
) -> tuple[int, Fraction, Fraction]:
    return rounds, Fraction(traffic), Fraction(reduced)


def share(k: int) -> Fraction:
    return Fraction(k - 1, k)


def blocks_of_16(lg: int, *, reduces: bool = False) -> tuple[int, Fraction, Fraction]:
    rounds = 15 + lg if lg else 0
    return amount(rounds, Fraction(rounds, 16), Fraction(rounds * reduces, 16))


FORMULAS: dict[tuple[str, str], tuple[Callable[[int], bool], Formula]] = {
    ("all_reduce", "ring"): (
        any_number,
        lambda k, lg: amount(2 * (k - 1), 2 * share(k), share(k)),
    ),
    ("all_reduce", "bidirectional_ring"): (
        any_number,
        lambda k, lg: amount(2 * (k - 1), 2 * share(k), share(k)),
    ),
    ("all_reduce", "recursive_doubling"): (powers_of_two, lambda k, lg: amount(lg, lg, lg)),
    ("all_reduce", "rabenseifner"): (
        powers_of_two,
        lambda k, lg: amount(2 * lg, 2 * share(k), share(k)),
    ),
    ("all_reduce", "binomial_tree"): (any_number, lambda k, lg: amount(2 * lg, 2 * lg, lg)),
    # For 2^h ranks the root has one child, every other inner rank two.
    ("all_reduce", "binary_tree"): (
        lambda k: powers_of_two(k) and k > 1,
        lambda k, lg: amount(2 * lg, 2 * (2 * lg - 1), 2 * lg - 1),
    ),
    ("all_reduce", "double_tree"): (
        lambda k: powers_of_two(k) and k > 1,
        lambda k, lg: amount(2 * lg, 2 * lg - 1, Fraction(2 * lg - 1, 2)),
    ),
    # On two hosts: half of the ranks reduce and gather, and one exchange goes across.
    ("all_reduce", "hierarchical"): (
        lambda k: k % 2 == 0,
        lambda k, lg: amount(k - 1, 2 * share(k), 1),
    ),
    ("all_reduce", "direct"): (any_number, lambda k, lg: amount(k > 1, k - 1, k - 1)),
    ("all_reduce", "two_shot"): (
        any_number,
        lambda k, lg: amount(2 * (k > 1), 2 * share(k), share(k)),
    ),
    ("all_reduce", "linear"): (any_number, lambda k, lg: amount(2 * (k > 1), 2 * (k - 1), k - 1)),
    ("all_reduce", "multi_ring"): (
        any_number,
        lambda k, lg: amount(2 * (k - 1), 2 * share(k), share(k)),
    ),
    ("all_reduce", "torus_ring"): (
        lambda k: isqrt(k) ** 2 == k > 4,
        lambda k, lg: amount(4 * (isqrt(k) - 1), 2 * share(k), share(k)),
    ),
    ("all_reduce", "circulant"): (
        any_number,
        lambda k, lg: amount(2 * lg, 2 * share(k), share(k)),
    ),
    ("all_reduce", "swing"): (powers_of_two, lambda k, lg: amount(2 * lg, 2 * share(k), share(k))),
    ("all_reduce", "trivance"): (
        lambda k: k in (1, 3, 9, 27),
        lambda k, lg: amount(2 * round(log(k, 3)), 2 * share(k), share(k)),
    ),
    ("all_reduce", "swing_latency"): (powers_of_two, lambda k, lg: amount(lg, lg, lg)),
    ("all_reduce", "trivance_latency"): (
        lambda k: k in (1, 3, 9, 27),
        lambda k, lg: amount(round(log(k, 3)), 2 * round(log(k, 3)), 2 * round(log(k, 3))),
    ),
    ("all_reduce", "bine"): (powers_of_two, lambda k, lg: amount(2 * lg, 2 * share(k), share(k))),
    ("all_reduce", "bine_tree"): (powers_of_two, lambda k, lg: amount(2 * lg, 2 * lg, lg)),
    ("reduce_scatter", "bine"): (powers_of_two, lambda k, lg: amount(lg, share(k), share(k))),
    ("all_gather", "bine"): (powers_of_two, lambda k, lg: amount(lg, share(k))),
    ("all_to_all", "bine"): (powers_of_two, lambda k, lg: amount(lg, Fraction(lg, 2))),
    ("broadcast", "bine_tree"): (powers_of_two, lambda k, lg: amount(lg, lg)),
    ("reduce", "bine_tree"): (powers_of_two, lambda k, lg: amount(lg, lg, lg)),
    ("gather", "bine_tree"): (powers_of_two, lambda k, lg: amount(lg, share(k))),
    ("scatter", "bine_tree"): (powers_of_two, lambda k, lg: amount(lg, share(k))),
    ("reduce_scatter", "pat"): (any_number, lambda k, lg: amount(lg, share(k), share(k))),
    ("all_gather", "pat"): (any_number, lambda k, lg: amount(lg, share(k))),
    ("all_gather", "sparbit"): (any_number, lambda k, lg: amount(lg, share(k))),
    ("reduce_scatter", "pat_2_trees"): (
        lambda k: k > 1,
        lambda k, lg: amount(2 ** (lg - 1), share(k), share(k)),
    ),
    ("all_gather", "pat_2_trees"): (
        lambda k: k > 1,
        lambda k, lg: amount(2 ** (lg - 1), share(k)),
    ),
    ("all_reduce", "bcube"): (
        powers_of_four,
        lambda k, lg: amount(lg, 2 * share(k), share(k)),
    ),
    ("all_reduce", "recursive_multiplying"): (
        powers_of_four,
        lambda k, lg: amount(lg // 2, Fraction(3 * lg, 2), Fraction(3 * lg, 2)),
    ),
    # 16 blocks.
    ("broadcast", "circulant"): (any_number, lambda k, lg: blocks_of_16(lg)),
    ("reduce", "circulant"): (any_number, lambda k, lg: blocks_of_16(lg, reduces=True)),
    # One round less than the least traffic takes, if k is even.
    ("all_reduce", "generalized"): (
        any_number,
        lambda k, lg: (
            amount(2 * lg, 2 * share(k), share(k)) if k % 2 else amount(2 * lg - 1, 2 * share(k), 1)
        ),
    ),
    # 4(k - 1) pieces of two chunks: whole pieces move in all but four steps.
    ("all_reduce", "optcc"): (
        lambda k: k > 3,
        lambda k, lg: amount(
            10 * (k - 1), Fraction(5 * k - 6, 2 * (k - 1)), Fraction(9 * k - 11, 4 * (k - 1))
        ),
    ),
    ("all_reduce", "stragglar"): (
        lambda k: powers_of_two(k) and k > 1,
        lambda k, lg: amount(
            2 * k - 4 + lg, Fraction(2 * k - 4 + lg, k - 1), Fraction(2 * k - 3, k - 1)
        ),
    ),
    # The traffic is counted by hand: the broadcast has steps in which one rank sends two chunks.
    ("all_reduce", "r2ccl"): (
        lambda k: k in (4, 8, 13),
        lambda k, lg: amount(
            3 * (k - 1) + lg,
            Fraction({4: 16, 8: 41, 13: 69}[k], 2 * k - 1),
            Fraction(3 * k - 4, 2 * k - 1),
        ),
    ),
    # Each root has one child, every other inner rank two; the roots exchange.
    ("all_reduce", "dual_root"): (
        lambda k: powers_of_two(k) and k > 2,
        lambda k, lg: amount(2 * lg - 1, 4 * lg - 5, 2 * lg - 2),
    ),
    ("reduce_scatter", "circulant"): (any_number, lambda k, lg: amount(lg, share(k), share(k))),
    ("all_gather", "circulant"): (any_number, lambda k, lg: amount(lg, share(k))),
    ("all_gather", "neighbor_exchange"): (
        lambda k: k % 2 == 0,
        lambda k, lg: amount(k // 2, share(k)),
    ),
    ("reduce_scatter", "ring"): (any_number, lambda k, lg: amount(k - 1, share(k), share(k))),
    ("reduce_scatter", "pairwise"): (any_number, lambda k, lg: amount(k - 1, share(k), share(k))),
    ("reduce_scatter", "recursive_halving"): (
        powers_of_two,
        lambda k, lg: amount(lg, share(k), share(k)),
    ),
    ("reduce_scatter", "direct"): (any_number, lambda k, lg: amount(k > 1, share(k), share(k))),
    ("all_gather", "ring"): (any_number, lambda k, lg: amount(k - 1, share(k))),
    ("all_gather", "direct"): (any_number, lambda k, lg: amount(k > 1, share(k))),
    ("all_gather", "bruck"): (any_number, lambda k, lg: amount(lg, share(k))),
    ("all_gather", "recursive_doubling"): (powers_of_two, lambda k, lg: amount(lg, share(k))),
    # On two hosts one exchange goes across; of hosts of m + 1 and m ranks, one ring is all there is.
    ("all_gather", "hierarchical"): (
        any_number,
        lambda k, lg: amount(k - 1 if k % 2 else k // 2, share(k)),
    ),
    ("reduce_scatter", "hierarchical"): (
        any_number,
        lambda k, lg: amount(k - 1 if k % 2 else k // 2, share(k), share(k)),
    ),
    ("all_to_all", "retri"): (
        lambda k: k in (1, 3, 9, 27),
        lambda k, lg: amount(round(log(k, 3)), Fraction(2 * round(log(k, 3)), 3)),
    ),
    ("all_to_all", "torus"): (
        lambda k: isqrt(k) ** 2 == k,
        lambda k, lg: amount(2 * (isqrt(k) - 1), 2 * share(isqrt(k))),
    ),
    ("all_to_all", "pairwise"): (any_number, lambda k, lg: amount(k - 1, share(k))),
    ("all_to_all", "bruck"): (powers_of_two, lambda k, lg: amount(lg, Fraction(lg, 2))),
    ("broadcast", "linear"): (any_number, lambda k, lg: amount(k > 1, k - 1)),
    ("broadcast", "binomial_tree"): (any_number, lambda k, lg: amount(lg, lg)),
    ("broadcast", "scatter_all_gather"): (
        any_number,
        lambda k, lg: amount(lg + k - 1, 2 * share(k)),
    ),
    ("broadcast", "chain"): (any_number, lambda k, lg: amount(k - 1, k - 1)),
    ("reduce", "binomial_tree"): (any_number, lambda k, lg: amount(lg, lg, lg)),
    ("reduce", "reduce_scatter_gather"): (
        any_number,
        lambda k, lg: amount(lg + k - 1, 2 * share(k), share(k)),
    ),
    ("reduce", "direct"): (any_number, lambda k, lg: amount(k > 1, k - 1, k - 1)),
    ("gather", "binomial_tree"): (any_number, lambda k, lg: amount(lg, share(k))),
    ("gather", "linear"): (any_number, lambda k, lg: amount(k > 1, share(k))),
    ("scatter", "binomial_tree"): (any_number, lambda k, lg: amount(lg, share(k))),
    ("scatter", "linear"): (any_number, lambda k, lg: amount(k > 1, share(k))),
    ("broadcast", "knomial_tree"): (
        powers_of_four,
        lambda k, lg: amount(lg // 2, Fraction(3 * lg, 2)),
    ),
    ("reduce", "knomial_tree"): (
        powers_of_four,
        lambda k, lg: amount(lg // 2, Fraction(3 * lg, 2), Fraction(3 * lg, 2)),
    ),
    ("gather", "knomial_tree"): (any_number, lambda k, lg: amount((lg + 1) // 2, share(k))),
    ("scatter", "knomial_tree"): (any_number, lambda k, lg: amount((lg + 1) // 2, share(k))),
    ("barrier", "dissemination"): (any_number, lambda k, lg: amount(lg, lg, lg)),
    ("scan", "recursive_doubling"): (any_number, lambda k, lg: amount(lg, lg, lg)),
    ("scan", "linear"): (any_number, lambda k, lg: amount(k - 1, k - 1, k - 1)),
    # All rounds but the last are sent with the own vector, too: the most, where k is a power of two.
    ("exscan", "recursive_doubling"): (
        lambda k: powers_of_two(k) and k > 2,
        lambda k, lg: amount(lg, lg, 2 * lg - 2),
    ),
}


def test_every_algorithm_has_its_formula_here() -> None:
    assert {(algorithm.collective, algorithm.name) for algorithm in EVERY} == set(FORMULAS)


def test_there_are_many_ways_to_reduce() -> None:
    assert len([*algorithms("all_reduce")]) >= 24


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_every_algorithm_is_right_on_up_to_64_ranks(algorithm: Algorithm) -> None:
    """The proof also compares the stated cost with the counted one.

    Above 16 ranks each algorithm is proved for one number of ranks in twenty, algorithms in turn, and for
    the largest one; ``ringcoll verify --world-sizes 1-64`` and benchmarks/verify_speed.py prove all.
    """
    turn = EVERY.index(algorithm) % 20
    defined = [k for k in range(1, 65) if not algorithm.restriction(k)]
    assert len(defined) >= 4
    sizes = [k for k in defined if k <= 16 or k % 20 == turn]
    for world_size in {*sizes, defined[-1]}:
        proof_of(algorithm.collective, algorithm.name, world_size, roots(algorithm, world_size)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_cost(algorithm: Algorithm) -> None:
    applies, formula = FORMULAS[algorithm.collective, algorithm.name]
    assert algorithm.cost is not None
    for world_size in worlds_of(algorithm, *WORLDS):
        for proof in proofs(algorithm, world_size):
            counted = (proof.rounds, proof.traffic, proof.reduced)
            assert counted == algorithm.counts(world_size), world_size
            if applies(world_size):
                expected = formula(world_size, (world_size - 1).bit_length())
                assert counted == expected, world_size


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_never_below_the_lower_bounds(algorithm: Algorithm) -> None:
    for world_size in worlds_of(algorithm, *WORLDS):
        for proof in proofs(algorithm, world_size):
            bound = lower_bound(algorithm.collective, world_size, ports=max(1, proof.ports))
            assert proof.rounds >= bound.rounds, world_size
            assert proof.sent_max >= bound.sent, world_size
            assert proof.traffic >= bound.traffic, world_size
            assert proof.reduced >= bound.reduced, world_size


@pytest.mark.parametrize("world_size", [3, 5, 6, 7, 9, 12, 13, 24, 33])
def test_folded_worlds(world_size: int) -> None:
    """Two steps and about one vector each way more than for the power of two below."""
    fold = Fold(world_size)
    size, lg = fold.size, fold.rounds
    doubling = proof_of("all_reduce", "recursive_doubling", world_size)
    counted = (doubling.rounds, doubling.traffic, doubling.reduced)
    assert counted == amount(lg + 2, lg + 2, lg + 1)
    long = proof_of("all_reduce", "rabenseifner", world_size)
    counted = (long.rounds, long.traffic, long.reduced)
    assert counted == amount(2 * lg + 2, 2 * share(size) + 2, share(size) + 1)


def test_a_fold_accounts_for_every_rank() -> None:
    for world_size in range(1, 130):
        fold = Fold(world_size)
        acting = [rank for rank in range(world_size) if not fold.sits_out(rank)]
        assert len(acting) == fold.size
        assert [fold.rank(index) for index in range(fold.size)] == acting
        assert [fold.index(rank) for rank in acting] == list(range(fold.size))
        for index, rank in enumerate(acting):
            pair = [rank - 1, rank] if fold.acts_for(rank) else [rank]
            assert list(fold.ranks(index, index + 1)) == pair


# --- what the docstrings claim --------------------------------------------------------


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_rank_order_where_it_is_claimed(algorithm: Algorithm) -> None:
    if not contract(algorithm.collective).reduces:
        return
    claimed = "rank order" in (algorithm.program.__doc__ or "")
    sizes = worlds_of(algorithm, 2, 3, 5, 8, 13, 24)
    found = {proof.rank_order for k in sizes for proof in proofs(algorithm, k)}
    assert found == {True} if claimed else False in found


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(
    "name",
    [
        "all_reduce direct",
        "all_reduce linear",
        "all_reduce two_shot",
        "reduce_scatter direct",
        "reduce direct",
    ],
)
def test_what_goes_straight_is_a_left_fold(name: str, world_size: int) -> None:
    for proof in proofs(find(*name.split()), world_size):
        assert proof.left_fold
        assert proof.at_once


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_all_ranks_get_the_same_bits(algorithm: Algorithm) -> None:
    if contract(algorithm.collective).at_least_once:
        return
    for world_size in worlds_of(algorithm, *WORLDS):
        assert all(proof.same_everywhere for proof in proofs(algorithm, world_size))


def refs_of(operation: Operation) -> tuple[Ref, ...]:
    match operation:
        case Send(_, refs) | Recv(_, refs):
            return refs
        case RecvReduce(_, into, local):
            return into + local
        case Copy(into_ref, source):
            return (into_ref, source)
        case Reduce(into_ref, sources):
            return (into_ref, *sources)


@pytest.mark.parametrize("algorithm", tuple(algorithms("all_to_all")), ids=name_of)
def test_only_known_lengths_are_needed(algorithm: Algorithm) -> None:
    """Unless blocks are equal, a rank of an all-to-all touches only its own ones."""
    assert not contract("all_to_all").common_lengths
    foreign = {
        ref.chunk
        for world_size in worlds_of(algorithm, 4, 5)
        for rank in range(world_size)
        for step in algorithm.schedule(world_size).steps(rank)
        for operation in step
        for ref in refs_of(operation)
        if rank not in divmod(ref.chunk, world_size)
    }
    assert bool(foreign) == algorithm.equal_blocks


@pytest.mark.parametrize("algorithm, world_size", each_on(8))
def test_stated_scratch_is_used(algorithm: Algorithm, world_size: int) -> None:
    """At most one slot more is stated than the root that needs most of them uses."""
    used = {
        ref.slot
        for root in roots(algorithm, world_size)
        for rank in range(world_size)
        for step in algorithm.schedule(world_size, root).steps(rank)
        for operation in step
        for ref in refs_of(operation)
        if ref.buffer is Buffer.SCRATCH
    }
    needed = max(used, default=-1) + 1
    assert needed <= algorithm.slots(algorithm.world(world_size)) <= needed + 1


# --- the ring -------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", range(2, 25))
def test_ring_all_reduce_by_the_book(world_size: int) -> None:
    """2(k-1) steps; in each, every rank sends one k-th to the next and hears the one before."""
    schedule = schedule_of("all_reduce", "ring", world_size)
    for rank in range(world_size):
        steps = list(schedule.steps(rank))
        assert len(steps) == 2 * (world_size - 1)
        sent = [operation for step in steps for operation in step if isinstance(operation, Send)]
        assert [operation.peer for operation in sent] == [(rank + 1) % world_size] * len(steps)
        amount_sent = Fraction(sum(len(op.refs) for op in sent), schedule.num_chunks)
        assert amount_sent == Fraction(2 * (world_size - 1), world_size)
        for step in steps:
            _, arriving = step
            assert isinstance(arriving, Recv | RecvReduce)
            assert arriving.peer == (rank - 1) % world_size
    proof = proof_of("all_reduce", "ring", world_size)
    assert proof.sent_mean == proof.sent_max == 2 * share(world_size)
    assert schedule.num_slots == 0


@pytest.mark.parametrize("world_size", range(2, 10))
def test_ring_in_the_primitives_of_nccl(world_size: int) -> None:
    """ "Demystifying NCCL", arXiv 2507.04786, table V."""
    table = [
        "send",
        *["recvReduceSend"] * (world_size - 2),
        "recvReduceCopySend",
        *["recvCopySend"] * (world_size - 2),
        "recv",
    ]
    assert len(table) == 2 * world_size - 1
    schedule = schedule_of("all_reduce", "ring", world_size)
    for rank in range(world_size):
        assert primitives(schedule, rank) == table


@pytest.mark.parametrize("world_size", range(2, 10))
def test_both_directions_of_a_bidirectional_ring(world_size: int) -> None:
    schedule = schedule_of("all_reduce", "bidirectional_ring", world_size)
    for rank in range(world_size):
        for step in schedule.steps(rank):
            sent = {op.refs[0].chunk // world_size: op.peer for op in step if isinstance(op, Send)}
            assert sent == {0: (rank + 1) % world_size, 1: (rank - 1) % world_size}


@pytest.mark.parametrize("world_size", [4, 5, 8, 13])
@pytest.mark.parametrize("name", ["bruck", "circulant", "recursive_doubling"])
def test_only_the_first_message_of_an_all_gather_is_read_from_the_input(
    name: str, world_size: int
) -> None:
    """A message of places in two buffers would be copied before it is sent."""
    schedule = schedule_of("all_gather", name, world_size)
    for rank in range(world_size):
        messages = [operation for step in schedule.steps(rank) for operation in step]
        first, *later = [message for message in messages if isinstance(message, Send)]
        assert first.refs == (inp(rank),) or name == "recursive_doubling"
        assert all(ref.buffer is Buffer.OUTPUT for message in later for ref in message.refs)
