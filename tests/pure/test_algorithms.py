"""Every algorithm is right and costs what the literature says, for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache

import pytest

from ringcoll.algorithms import Algorithm, algorithms, binary_tree, find, ring, schedule_of
from ringcoll.algorithms.direct import direct_all_reduce
from ringcoll.algorithms.recursive import Fold, recursive_doubling_all_reduce
from ringcoll.compose import in_place, parallel, renumber, unfinished
from ringcoll.contracts import contract
from ringcoll.cost import distance, lower_bound
from ringcoll.draw import primitives
from ringcoll.errors import VerificationError
from ringcoll.schedule import (
    Buffer,
    Copy,
    Operation,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    copy,
    inp,
    out,
    tmp,
)
from ringcoll.verify import Proof, bitwise_equal, verify

EVERY = tuple(algorithms())
WORLDS = (*range(1, 25), 33, 64)


def name_of(algorithm: Algorithm) -> str:
    return f"{algorithm.collective}-{algorithm.name}"


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


def any_number(world_size: int) -> bool:
    return True


def amount(
    rounds: int, traffic: Fraction | int, reduced: Fraction | int = 0
) -> tuple[int, Fraction, Fraction]:
    return rounds, Fraction(traffic), Fraction(reduced)


def share(k: int) -> Fraction:
    return Fraction(k - 1, k)


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
    ("reduce_scatter", "ring"): (any_number, lambda k, lg: amount(k - 1, share(k), share(k))),
    ("reduce_scatter", "pairwise"): (any_number, lambda k, lg: amount(k - 1, share(k), share(k))),
    ("reduce_scatter", "recursive_halving"): (
        powers_of_two,
        lambda k, lg: amount(lg, share(k), share(k)),
    ),
    ("reduce_scatter", "direct"): (any_number, lambda k, lg: amount(k > 1, share(k), share(k))),
    ("all_gather", "ring"): (any_number, lambda k, lg: amount(k - 1, share(k))),
    ("all_gather", "bruck"): (any_number, lambda k, lg: amount(lg, share(k))),
    ("all_gather", "recursive_doubling"): (powers_of_two, lambda k, lg: amount(lg, share(k))),
    ("all_to_all", "pairwise"): (any_number, lambda k, lg: amount(k - 1, share(k))),
    ("all_to_all", "bruck"): (powers_of_two, lambda k, lg: amount(lg, Fraction(lg, 2))),
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
    ("barrier", "dissemination"): (any_number, lambda k, lg: amount(lg, lg, lg)),
}


def test_every_algorithm_has_its_formula_here() -> None:
    assert {(algorithm.collective, algorithm.name) for algorithm in EVERY} == set(FORMULAS)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_cost(algorithm: Algorithm, world_size: int) -> None:
    applies, formula = FORMULAS[algorithm.collective, algorithm.name]
    cost = algorithm.cost
    for proof in proofs(algorithm, world_size):
        counted = (proof.rounds, proof.traffic, proof.reduced)
        assert counted == (
            cost.rounds(algorithm.world(world_size)),
            cost.traffic(algorithm.world(world_size)),
            cost.reduced(algorithm.world(world_size)),
        )
        if applies(world_size):
            assert counted == formula(world_size, (world_size - 1).bit_length())


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_never_below_the_lower_bounds(algorithm: Algorithm, world_size: int) -> None:
    for proof in proofs(algorithm, world_size):
        bound = lower_bound(algorithm.collective, world_size, ports=max(1, proof.ports))
        assert proof.rounds >= bound.rounds
        assert proof.sent_max >= bound.sent
        assert proof.traffic >= bound.traffic
        assert proof.reduced >= bound.reduced
        far = distance(proof)
        assert min(far.rounds, far.traffic, far.reduced) >= 1


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
    found = {proof.rank_order for k in (2, 3, 5, 8, 13, 24) for proof in proofs(algorithm, k)}
    assert found == {True} if claimed else False in found


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "reduce"])
def test_direct_is_a_left_fold(collective: str, world_size: int) -> None:
    for proof in proofs(find(collective, "direct"), world_size):
        assert proof.left_fold


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_all_ranks_get_the_same_bits(algorithm: Algorithm) -> None:
    if contract(algorithm.collective).at_least_once:
        return
    for world_size in WORLDS:
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
    world_size = 5
    foreign = {
        ref.chunk
        for rank in range(world_size)
        for step in algorithm.schedule(world_size).steps(rank)
        for operation in step
        for ref in refs_of(operation)
        if rank not in divmod(ref.chunk, world_size)
    }
    assert bool(foreign) == algorithm.equal_blocks


@pytest.mark.parametrize("algorithm", EVERY, ids=name_of)
def test_stated_scratch_is_used(algorithm: Algorithm) -> None:
    """At most one slot more is stated than the root that needs most of them uses."""
    world_size = 8
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


# --- trees ----------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", range(1, 301))
def test_binary_tree_is_a_tree(world_size: int) -> None:
    labels = range(1, world_size + 1)
    top = [label for label in labels if binary_tree.parent(label, world_size) is None]
    assert len(top) == 1
    below = {label: binary_tree.children(label, world_size) for label in labels}
    assert all(len(found) <= 2 for found in below.values())
    for label in labels:
        above = binary_tree.parent(label, world_size)
        if above is None:
            assert binary_tree.depth(label, world_size) == 0
            continue
        assert label in below[above]
        assert binary_tree.depth(label, world_size) == binary_tree.depth(above, world_size) + 1
    assert sum(map(len, below.values())) == world_size - 1
    deepest = max(binary_tree.depth(label, world_size) for label in labels)
    assert deepest == binary_tree.height(world_size) == world_size.bit_length() - 1


@pytest.mark.parametrize("world_size", range(1, 301))
def test_binary_tree_is_in_order(world_size: int) -> None:
    """Left of a label are lower ones only, right of it higher ones: operands keep their order."""

    def walk(label: int) -> list[int]:
        below = binary_tree.children(label, world_size)
        lower = [found for child in below if child < label for found in walk(child)]
        higher = [found for child in below if child > label for found in walk(child)]
        return [*lower, label, *higher]

    (top,) = (
        label for label in range(1, world_size + 1) if binary_tree.parent(label, world_size) is None
    )
    assert walk(top) == list(range(1, world_size + 1))


@pytest.mark.parametrize("world_size", range(2, 301))
def test_inner_ranks_of_the_two_trees_are_disjoint(world_size: int) -> None:
    inner: list[set[int]] = []
    for chunk in range(2):
        ranks = set()
        for rank in range(world_size):
            steps = binary_tree.tree_all_reduce(rank, world_size, chunk=chunk, turn=chunk)
            if any(isinstance(op, RecvReduce) for step in steps for op in step):
                ranks.add(rank)
        inner.append(ranks)
    assert not inner[0] & inner[1]
    assert all(len(ranks) == world_size // 2 for ranks in inner)


@pytest.mark.parametrize("world_size", [*range(2, 41), 64, 100, 255, 300])
def test_double_tree_sends_no_more_than_twice_the_vector(world_size: int) -> None:
    proof = verify(schedule_of("all_reduce", "double_tree", world_size))
    assert proof.sent_max <= 2
    assert proof.messages_max <= 4
    assert proof.ports <= 3
    single = verify(schedule_of("all_reduce", "binary_tree", world_size))
    assert proof.sent_mean == single.sent_mean == Fraction(2 * (world_size - 1), world_size)


# --- composing ------------------------------------------------------------------------


def hierarchical(rank: int, world_size: int, *, per_host: int = 3) -> Program:
    """All-reduce on hosts: inside each one, then across, then inside."""
    host, local = divmod(rank, per_host)

    def inside(peer: int) -> int:
        return host * per_host + peer

    def across(peer: int) -> int:
        return peer * per_host + local

    scatter = ring.reduce_scatter_phase(local, per_host, lambda chunk, step: out(chunk), out(local))
    between = recursive_doubling_all_reduce(host, world_size // per_host)
    yield from unfinished(renumber(scatter, peer=inside))
    yield from in_place(renumber(between, peer=across, chunk=lambda chunk: local))
    yield from renumber(ring.all_gather_phase(local, per_host), peer=inside)


def schedule_by(program: Callable[[int], Program], world_size: int, num_chunks: int) -> Schedule:
    return Schedule("all_reduce", "composed", world_size, num_chunks, 0, program)


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_hierarchical_all_reduce(hosts: int) -> None:
    world_size = 3 * hosts
    proof = verify(schedule_by(lambda rank: hierarchical(rank, world_size), world_size, 3))
    between = proof_of("all_reduce", "recursive_doubling", hosts)
    assert proof.rounds == 2 + between.rounds + 2
    assert proof.traffic == Fraction(4, 3) + between.traffic / 3
    assert proof.same_everywhere


def test_hierarchical_all_reduce_needs_one_completion() -> None:
    """The reduce-scatter inside a host completes nothing, so an average is not divided there."""

    def marked_twice(rank: int) -> Program:
        host, local = divmod(rank, 3)
        scatter = ring.reduce_scatter_phase(local, 3, lambda chunk, step: out(chunk), out(local))
        yield from renumber(scatter, peer=lambda peer: host * 3 + peer)

    with pytest.raises(VerificationError, match="is marked final") as caught:
        verify(schedule_by(marked_twice, 6, 3))
    assert caught.value.got == "chunk 0 from ranks 0, 1, 2"


def test_parallel_runs_side_by_side() -> None:
    """A ring for the first chunks and a tree for the last one, in as many steps as the longer."""

    def program(rank: int) -> Program:
        tree = find("all_reduce", "binomial_tree").program(rank, 5)
        return parallel(
            ring.ring_all_reduce(rank, 5), renumber(tree, chunk=lambda chunk: chunk + 5)
        )

    proof = verify(schedule_by(program, 5, 6))
    assert proof.rounds == 8
    assert proof.order(2) == proof_of("all_reduce", "ring", 5).order(2)
    assert proof.order(5) == proof_of("all_reduce", "binomial_tree", 5).order(0)


def test_parallel_over_the_same_chunks_fails() -> None:
    def program(rank: int) -> Program:
        return parallel(ring.ring_all_reduce(rank, 3), ring.ring_all_reduce(rank, 3))

    with pytest.raises(VerificationError):
        verify(schedule_by(program, 3, 3))


def test_renumber_turns_a_ring() -> None:
    """Ranks renumbered by a rotation: the same traffic, another order of operands."""

    def program(rank: int) -> Program:
        turned = find("all_reduce", "binomial_tree").program((rank - 2) % 5, 5)
        return renumber(turned, peer=lambda peer: (peer + 2) % 5)

    proof = verify(schedule_by(program, 5, 1))
    straight = proof_of("all_reduce", "binomial_tree", 5)
    assert proof.traffic == straight.traffic
    assert not bitwise_equal(proof, straight)
    turned = [(item + 2) % 5 if isinstance(item, int) else item for item in straight.order(0)]
    assert list(proof.order(0)) == turned


def test_renumber_moves_slots_and_nothing_else() -> None:
    def moved(rank: int) -> Program:
        return renumber(direct_all_reduce(rank, 3), slot=lambda slot: slot + 4)

    verify(Schedule("all_reduce", "moved", 3, 1, 7, moved))
    for step in moved(1):
        for operation in step:
            for ref in refs_of(operation):
                assert ref in {inp(0), out(0), tmp(4, 0), tmp(6, 0)}


def test_in_place_and_unfinished_change_what_they_say() -> None:
    before = list(ring.ring_all_gather(1, 3))
    after = list(in_place(before))
    assert after[0][0] == copy(out(1), out(1))
    assert after[1] == before[1]
    joined = list(unfinished(ring.ring_reduce_scatter(1, 3)))
    marks = [op.final for step in joined for op in step if isinstance(op, RecvReduce)]
    assert marks == [False, False]
    assert list(unfinished(joined)) == joined
