"""Schedules made of schedules: in sequence, in parallel, on some ranks, in finer chunks."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache

import pytest

from ringcoll.errors import VerificationError
from ringcoll.schedules import (
    Copy,
    Operation,
    Program,
    Proof,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    Step,
    bitwise_equal,
    copy,
    in_place,
    inp,
    out,
    parallel,
    recv,
    recv_reduce,
    reduce,
    renumber,
    send,
    split,
    tmp,
    unfinished,
    verify,
)
from ringcoll.schedules.algorithms import find, schedule_of
from ringcoll.schedules.algorithms.ring import all_gather_phase, reduce_scatter_phase


@cache
def proof_of(collective: str, name: str, world_size: int, root: int = 0) -> Proof:
    return verify(schedule_of(collective, name, world_size, root))


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


def hierarchical(rank: int, world_size: int, *, per_host: int = 3) -> Program:
    """All-reduce on hosts: inside each one, then across, then inside."""
    host, local = divmod(rank, per_host)

    def inside(peer: int) -> int:
        return host * per_host + peer

    def across(peer: int) -> int:
        return peer * per_host + local

    scatter = reduce_scatter_phase(local, per_host, lambda chunk, step: out(chunk), out(local))
    between = find("all_reduce", "recursive_doubling").program(host, world_size // per_host)
    yield from unfinished(renumber(scatter, peer=inside))
    yield from in_place(renumber(between, peer=across, chunk=lambda chunk: local))
    yield from renumber(all_gather_phase(local, per_host, out(local)), peer=inside)


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
        scatter = reduce_scatter_phase(local, 3, lambda chunk, step: out(chunk), out(local))
        yield from renumber(scatter, peer=lambda peer: host * 3 + peer)

    with pytest.raises(VerificationError, match="is marked final") as caught:
        verify(schedule_by(marked_twice, 6, 3))
    assert caught.value.got == "chunk 0 from ranks 0, 1, 2"


def test_parallel_runs_side_by_side() -> None:
    """A ring for the first chunks and a tree for the last one, in as many steps as the longer."""

    def program(rank: int) -> Program:
        tree = find("all_reduce", "binomial_tree").program(rank, 5)
        return parallel(
            find("all_reduce", "ring").program(rank, 5),
            renumber(tree, chunk=lambda chunk: chunk + 5),
        )

    proof = verify(schedule_by(program, 5, 6))
    assert proof.rounds == 8
    assert proof.order(2) == proof_of("all_reduce", "ring", 5).order(2)
    assert proof.order(5) == proof_of("all_reduce", "binomial_tree", 5).order(0)


def test_parallel_over_the_same_chunks_fails() -> None:
    def program(rank: int) -> Program:
        return parallel(
            find("all_reduce", "ring").program(rank, 3), find("all_reduce", "ring").program(rank, 3)
        )

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
        return renumber(find("all_reduce", "direct").program(rank, 3), slot=lambda slot: slot + 4)

    verify(Schedule("all_reduce", "moved", 3, 1, 7, moved))
    for step in moved(1):
        for operation in step:
            for ref in refs_of(operation):
                assert ref in {inp(0), out(0), tmp(4, 0), tmp(6, 0)}


def test_in_place_and_unfinished_change_what_they_say() -> None:
    before = list(find("all_gather", "ring").program(1, 3))
    after = list(in_place(before))
    assert before[0][0] == copy(out(1), inp(1))  # which would be a copy of a place to itself
    assert after[0] == Step(send(2, out(1)), recv(0, out(0)))
    assert after[1] == before[1]
    elsewhere = list(in_place(before, source=inp, target=lambda chunk: tmp(chunk + 4, chunk)))
    assert elsewhere[0] == Step(copy(tmp(5, 1), inp(1)), send(2, inp(1)), recv(0, tmp(4, 0)))
    assert list(in_place(elsewhere, source=inp)) == elsewhere  # scratch memory stays where it is
    joined = list(unfinished(find("reduce_scatter", "ring").program(1, 3)))
    marks = [op.final for step in joined for op in step if isinstance(op, RecvReduce)]
    assert marks == [False, False]
    assert list(unfinished(joined)) == joined


# --- splitting ------------------------------------------------------------------------


def test_split_makes_chunks_finer_and_messages_no_more() -> None:
    program = [
        Step(
            send(1, inp(0), out(1)),
            recv(2, out(2)),
            recv_reduce(1, out(0), inp(0), received_left=True, final=True),
            copy(out(1), inp(2)),
            reduce(out(0), inp(0), inp(1), final=True),
        ),
        Step(),
    ]
    first, second = split(program, lambda chunk: (2 * chunk, 2 * chunk + 1))
    assert first == Step(
        send(1, inp(0), inp(1), out(2), out(3)),
        recv(2, out(4), out(5)),
        recv_reduce(1, (out(0), out(1)), (inp(0), inp(1)), received_left=True, final=True),
        copy(out(2), inp(4)),
        copy(out(3), inp(5)),
        reduce(out(0), inp(0), inp(2), final=True),
        reduce(out(1), inp(1), inp(3), final=True),
    )
    assert second == Step()


@pytest.mark.parametrize("name", ["ring", "double_tree", "binomial_tree", "rabenseifner"])
def test_a_split_algorithm_is_the_algorithm(name: str) -> None:
    whole = schedule_of("all_reduce", name, 6)
    assert whole.num_slots == 0
    finer = Schedule(
        "all_reduce",
        "finer",
        6,
        3 * whole.num_chunks,
        0,
        lambda rank: split(whole.steps(rank), lambda c: range(3 * c, 3 * c + 3)),
    )
    before, after = verify(whole), verify(finer)
    assert (after.rounds, after.traffic) == (before.rounds, before.traffic)
    assert after.messages_max == before.messages_max
    for chunk in range(finer.num_chunks):
        assert after.order(chunk) == before.order(chunk // 3)
