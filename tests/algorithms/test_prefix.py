"""Scan and exscan: the contract of a prefix, its algorithms, and who refuses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from math import ceil, log2

import pytest
import torch

from ringcoll.errors import (
    ArgumentError,
    ScheduleError,
    UnknownAlgorithmError,
    VerificationError,
)
from ringcoll.lab.formats import to_msccl, to_mscclpp
from ringcoll.lab.search import demand_of
from ringcoll.runtime.reduction import predicted_result
from ringcoll.schedules import (
    OperandOrder,
    Program,
    Schedule,
    Step,
    copy,
    history,
    inp,
    out,
    recv,
    recv_reduce,
    send,
    verify,
)
from ringcoll.schedules.algorithms import Algorithm, algorithms, find, order_of, schedule_of
from ringcoll.schedules.cost import lower_bound
from ringcoll.tools.testing import given_collective

PREFIXES = tuple(entry for name in ("scan", "exscan") for entry in algorithms(name, variants=True))
every_prefix = pytest.mark.parametrize(
    "entry", PREFIXES, ids=lambda entry: f"{entry.collective}-{entry.name}"
)


def wanted(collective: str, rank: int) -> frozenset[int]:
    """The ranks whose vectors a rank has to end with."""
    return frozenset(range(rank + 1 if collective == "scan" else rank))


@every_prefix
def test_every_rank_ends_with_the_ranks_before_it_in_their_order(entry: Algorithm) -> None:
    for world_size in range(1, 34):
        proof = verify(entry.schedule(world_size))
        assert order_of(proof.schedule) >= entry.order >= OperandOrder.RANK
        *_, held = history(proof.schedule)
        for rank, chunks in enumerate(held[1:], 1):
            # A rank may also keep, in scratch memory, what it has sent.
            assert wanted(entry.collective, rank) <= chunks[0] <= wanted("scan", rank)
        if world_size > 2:
            last = [item for item in proof.order(0) if item != "+"]
            assert last == sorted(wanted(entry.collective, world_size - 1))


def test_what_the_chain_and_the_doubling_cost() -> None:
    for k in range(2, 65):
        lg = ceil(log2(k))
        chain, doubling = (
            verify(schedule_of("scan", name, k)) for name in ("linear", "recursive_doubling")
        )
        assert (chain.rounds, chain.traffic, chain.reduced) == (k - 1, k - 1, k - 1)
        assert (doubling.rounds, doubling.traffic, doubling.reduced) == (lg, lg, lg)
        assert chain.left_fold


def inclusive_rounds(k: int, inclusive: int) -> int:
    """Rounds q of arXiv 2604.25667: the least with k - 1 <= (2^i - 1) 2^(q - i)."""
    return next(
        q
        for q in range(64)
        if k - 1 <= (2**q - 1 if q <= inclusive else (2**inclusive - 1) * 2 ** (q - inclusive))
    )


@pytest.mark.parametrize("inclusive", [1, 2, 3, 4, 6, 9])
def test_rounds_of_the_exclusive_doubling(inclusive: int) -> None:
    for k in range(2, 65):
        proof = verify(schedule_of("exscan", f"recursive_doubling={inclusive}", k))
        assert proof.rounds == proof.traffic == inclusive_rounds(k, inclusive)
        # W in each round but the first, and V in each round with V but the first.
        assert proof.reduced <= max(0, proof.rounds + min(inclusive, proof.rounds) - 2)
        if inclusive == 1:
            assert proof.rounds == 1 + ceil(log2(k - 1))
            assert proof.reduced == proof.rounds - 1
        if inclusive == 2:  # arXiv 2507.04785: ceil(lg(k - 1) + lg(4/3)), here in whole numbers
            rounds = (-(-4 * (k - 1) // 3) - 1).bit_length()
            assert proof.rounds == max(1, rounds)


@pytest.mark.slow
def test_the_default_has_the_fewest_rounds_and_then_the_fewest_reductions() -> None:
    for k in range(2, 65):
        proof = verify(schedule_of("exscan", "recursive_doubling", k))
        assert proof.rounds == lower_bound("exscan", k).rounds == ceil(log2(k))
        others = [verify(schedule_of("exscan", f"recursive_doubling={i}", k)) for i in range(1, 8)]
        fast = [other.reduced for other in others if other.rounds == proof.rounds]
        assert proof.reduced == min(fast)


def test_there_has_to_be_a_round_with_the_own_vector() -> None:
    with pytest.raises(
        UnknownAlgorithmError, match=r"takes a number of inclusive rounds, .* 1, and"
    ):
        find("exscan", "recursive_doubling=0")


def test_bounds() -> None:
    for k in (2, 3, 8):
        scan, exscan = lower_bound("scan", k), lower_bound("exscan", k)
        assert (scan.sent, scan.received, scan.reduced) == (1, 1, Fraction(k - 1, k))
        assert (exscan.sent, exscan.received, exscan.reduced) == (1, 1, Fraction(k - 2, k))
    assert lower_bound("exscan", 1).traffic == 0


# --- what has to fail ---------------------------------------------------------------------


def failure(
    collective: str, world_size: int, program: Callable[[int], Program], num_slots: int = 2
) -> VerificationError:
    with pytest.raises(VerificationError) as caught:
        verify(Schedule(collective, "broken", world_size, 1, num_slots, program))
    return caught.value


@pytest.mark.parametrize("world_size", [3, 4, 8])
@pytest.mark.parametrize("own, other", [("scan", "exscan"), ("scan", "all_reduce")])
def test_another_promise_is_not_kept(own: str, other: str, world_size: int) -> None:
    for first, second in ((own, other), (other, own)):
        schedule = schedule_of(first, "recursive_doubling", world_size)
        with pytest.raises(VerificationError):
            verify(replace(schedule, collective=second, stated_cost=None))


def test_too_much_and_too_little_are_told_by_rank() -> None:
    def too_much(rank: int) -> Program:  # both ranks have both vectors
        yield Step(send(1 - rank, inp(0)), recv_reduce(1 - rank, out(0), inp(0), final=bool(rank)))

    def too_little(rank: int) -> Program:
        yield Step(copy(out(0), inp(0)))

    error = failure("scan", 2, too_much)
    assert (error.rank, error.expected) == (0, "every rank below 1 exactly once")
    assert error.got == "chunk 0 from ranks 0, 1"
    error = failure("scan", 3, too_little)
    assert (error.rank, error.expected) == (1, "every rank below 2 exactly once")


def test_a_vector_that_comes_twice_fails() -> None:
    def twice(rank: int) -> Program:
        if rank == 0:
            yield Step(copy(out(0), inp(0)), send(1, inp(0)))
            yield Step(send(1, inp(0)))
        else:
            yield Step(recv_reduce(0, out(0), inp(0), final=True))
            yield Step(recv_reduce(0, out(0), out(0), final=True))

    assert failure("scan", 2, twice).got == "chunk 0 from ranks 0 (2 times), 1"


def test_rank_0_has_no_output_to_write_to() -> None:
    def writes(rank: int) -> Program:
        if rank == 0:
            yield Step(copy(out(0), inp(0)), send(1, inp(0)))
        else:
            yield Step(recv(0, out(0)))

    error = failure("exscan", 2, writes)
    assert (error.rank, error.message) == (0, "writes out[0], which is not in its output")


def test_an_input_that_is_overwritten_too_early_shows_in_place() -> None:
    def overwrites(rank: int) -> Program:
        """Vectors move to the next rank, and rank 1 sends its own one when it has none."""
        yield Step(
            *(() if rank else (send(1, inp(0)),)), *((recv(0, out(0)),) if rank == 1 else ())
        )
        if rank == 1:
            yield Step(send(2, out(0)))
            yield Step(send(2, inp(0)))
        elif rank == 2:
            yield Step(recv(1, out(0)))
            yield Step(recv_reduce(1, out(0), out(0), received_left=False))
        else:
            yield Step()

    assert "share memory" in failure("exscan", 3, overwrites).message


def test_the_order_counts_on_every_rank() -> None:
    """The last rank is in order here, and rank 1 is not."""

    def turned(rank: int) -> Program:
        if rank == 0:
            yield Step(copy(out(0), inp(0)), send(1, inp(0)))
            yield Step(send(2, inp(0)))
        elif rank == 1:
            yield Step(recv_reduce(0, out(0), inp(0), received_left=False), send(2, inp(0)))
        else:
            yield Step(recv_reduce(1, out(0), inp(0)))
            yield Step(recv_reduce(0, out(0), out(0)))

    proof = verify(Schedule("scan", "turned", 3, 1, 0, turned))
    assert [item for item in proof.order(0) if item != "+"] == [0, 1, 2]
    assert not proof.rank_order
    assert order_of(proof.schedule) is OperandOrder.ANY


def test_partial_results_of_a_prefix_may_be_results_elsewhere() -> None:
    assert not any(verify(entry.schedule(3)).at_once for entry in PREFIXES)


# --- who refuses a prefix -----------------------------------------------------------------


@pytest.mark.parametrize("collective", ["scan", "exscan"])
def test_who_refuses_a_prefix_says_so(collective: str) -> None:
    schedule = find(collective, "recursive_doubling").schedule(4)
    with pytest.raises(ArgumentError, match="the collective is not searched for"):
        demand_of(collective, 4)
    with pytest.raises(ScheduleError, match=f"MSCCL has no {collective}"):
        to_msccl(schedule)
    with pytest.raises(ScheduleError, match=collective):
        to_mscclpp(schedule)
    with pytest.raises(ArgumentError, match="reduce in different orders"):
        predicted_result(verify(schedule), [torch.ones(2)] * 4)
    with pytest.raises(ArgumentError, match="no definition here"):
        given_collective(collective)
