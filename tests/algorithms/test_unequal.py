"""One rank is slow, or late: OptCC, R2CCL and StragglAR are right, fast where they should be, above the bounds."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ringcoll
from ringcoll.errors import UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.lab.simulation import Link, Topology, crossbar, simulate
from ringcoll.schedules import Proof, Send, Written, verify
from ringcoll.schedules.algorithms import find, schedule_of
from ringcoll.schedules.algorithms.unequal import _powers

NAMES = ("optcc", "stragglar", "r2ccl")
HALF = Fraction(1, 2)


def is_defined(name: str, k: int) -> bool:
    return find("all_reduce", name).restriction(k) is None


def proof_of(name: str, k: int) -> Proof:
    return verify(schedule_of("all_reduce", name, k))


def chunks_sent(schedule: Written, rank: int) -> list[int]:
    """Chunks that a rank sends in each step."""
    steps = schedule.steps(rank)
    return [sum(len(op.refs) for op in step if isinstance(op, Send)) for step in steps]


# --- right ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", range(1, 34))
def test_proved_with_the_stated_cost(name: str, k: int) -> None:
    if name == "stragglar" and k & (k - 1):
        with pytest.raises(UnsupportedWorldSizeError, match="it needs a power of 2"):
            proof_of(name, k)
    else:
        assert proof_of(name, k).same_everywhere


@pytest.mark.slow
@settings(max_examples=60)
@given(st.sampled_from(NAMES), st.integers(1, 17), st.integers(0, 16))
def test_any_rank_may_be_the_odd_one(name: str, k: int, odd: int) -> None:
    """The cost does not depend on the rank, and the last rank is the default."""
    odd %= k
    if is_defined(name, k):
        proof, usual = proof_of(f"{name}={odd}", k), proof_of(name, k)
        assert proof.same_everywhere
        assert (proof.rounds, proof.traffic) == (usual.rounds, usual.traffic)
        assert proof.sent_max == usual.sent_max
        last, schedule = proof_of(f"{name}={k - 1}", k).schedule, usual.schedule
        assert [[*last.steps(rank)] for rank in range(k)] == [
            [*schedule.steps(rank)] for rank in range(k)
        ]


@pytest.mark.parametrize("name", NAMES)
def test_an_odd_rank_that_is_not_there(name: str) -> None:
    with pytest.raises(UnsupportedWorldSizeError, match=f"{name}=4 .* 4 ranks: there is no rank 4"):
        schedule_of("all_reduce", f"{name}=4", 4)
    with pytest.raises(
        UnknownAlgorithmError, match=f"rank, such as {name}=7, .* got '{name}=last'"
    ):
        find("all_reduce", f"{name}=last")


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 4, 5, 8])
@pytest.mark.parametrize("name", NAMES)
def test_exact_sums_by_any_odd_rank(name: str, k: int) -> None:
    if not is_defined(name, k):
        return
    expected = sum(torch.arange(101) * (rank + 1) + 7**rank for rank in range(k))

    def main(group: ringcoll.LocalGroup) -> list[bool]:
        same = []
        for odd in range(k):
            own = torch.arange(101) * (group.rank() + 1) + 7 ** group.rank()
            ringcoll.all_reduce(own, group=group, algorithm=f"{name}={odd}")
            same.append(torch.equal(own, expected))
        return same

    assert ringcoll.run_threads(main, k) == [[True] * k] * k


# --- a slow rank ----------------------------------------------------------------------------


def beside_slow(k: int, slow: int, share: Fraction = HALF) -> Topology:
    """A crossbar on which one rank has a share of the bandwidth, which is one byte a second."""
    bandwidths = [share if rank == slow else Fraction(1) for rank in range(k)]
    up = [Link(rank, "switch", bandwidth) for rank, bandwidth in enumerate(bandwidths)]
    down = [Link("switch", rank, bandwidth) for rank, bandwidth in enumerate(bandwidths)]
    return Topology(
        world_size=k, links=(*up, *down), router=lambda source, target: (source, k + target)
    )


def least_time(k: int, share: Fraction) -> Fraction:
    """The bound on an all-reduce of one byte if one rank has a share of the bandwidth of the others.

    Each element leaves the slow rank at least once. Each has to move k - 1 times to be reduced, and
    k - 1 times to be known; all ranks together send k - 1 + share bytes a second.
    """
    return max(1 / share, 2 * (k - 1) / (k - 1 + share))


def seconds(name: str, k: int, slow: int, share: Fraction = HALF) -> Fraction:
    """Simulated time per byte."""
    nbytes = 840 * k
    schedule = schedule_of("all_reduce", name, k)
    run = simulate(schedule, nbytes, beside_slow(k, slow, share))
    assert isinstance(run.seconds, Fraction)
    return run.seconds / nbytes


@pytest.mark.parametrize("k", [2, 3, 5, 8, 13])
def test_the_bound_is_tight_for_a_ring_of_equals_only(k: int) -> None:
    assert (
        seconds("ring", k, 0, Fraction(1)) == least_time(k, Fraction(1)) == Fraction(2 * k - 2, k)
    )
    assert seconds("ring", k, 0) == 2 * seconds("ring", k, 0, Fraction(1))
    assert (seconds("ring", k, 0) > least_time(k, HALF)) == (k > 2)


@pytest.mark.slow
@pytest.mark.parametrize("k", [2, 3, 4, 5, 7, 8, 13, 33])
def test_optcc_beside_a_slow_rank(k: int) -> None:
    """2 is the bound, and filling the pipeline takes a quarter of it."""
    assert least_time(k, HALF) == 2
    for slow in {0, k // 2, k - 1}:
        time = seconds(f"optcc={slow}", k, slow)
        assert 2 < time <= Fraction(51, 20)
        assert (time < seconds("ring", k, slow)) == (k > 2)
        assert k == 2 or seconds(f"optcc={slow}", k, (slow + 1) % k) > time  # another rank is slow


@pytest.mark.parametrize("k", [2, 3, 4, 5, 7, 8, 13, 33])
def test_no_port_of_optcc_has_two_messages(k: int) -> None:
    """A chunk for the slow rank takes as long as a piece of two chunks among the others."""
    proof = proof_of("optcc", k)
    assert proof.ports == 1
    schedule, pieces = proof.schedule, 4 * (k - 1)
    assert chunks_sent(schedule, k - 1) == [1] * 2 * pieces + [0] * 2 * (k - 1)
    others = [chunks_sent(schedule, rank) for rank in range(k - 1)]
    assert all(set(sent) <= {0, 1, 2} and sent.count(1) == 8 for sent in others)
    assert sum(sent.count(2) for sent in others) == pieces * 2 * (k - 2)
    together = [sum(step) for step in zip(*others, chunks_sent(schedule, k - 1), strict=True)]
    assert together[2 * (k - 1) : 2 * pieces] == [2 * (k - 2) + 2] * 2 * (pieces - k + 1)


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, 4, 5, 7, 8, 13, 33])
def test_r2ccl_beside_a_slow_rank(k: int) -> None:
    """Two rings take 4(k - 1)/(2k - 1), the broadcast 2(k - 1 + ceil(lg k))/(2k - 1), some more if ranks run ahead."""
    lg = (k - 1).bit_length()
    rings, broadcast = Fraction(4 * (k - 1), 2 * k - 1), Fraction(2 * (k - 1 + lg), 2 * k - 1)
    for slow in {0, k // 2, k - 1}:
        time = seconds(f"r2ccl={slow}", k, slow)
        assert (
            least_time(k, HALF) < rings + broadcast <= time <= rings + broadcast * Fraction(11, 10)
        )
        assert (time < seconds("ring", k, slow)) == (k >= 7)


@pytest.mark.parametrize("k", [2, 3, 4, 5, 7, 8, 13, 33])
def test_two_chunks_for_one_of_the_slow_rank(k: int) -> None:
    schedule = schedule_of("all_reduce", "r2ccl", k)
    steps = 2 * (k - 1)
    assert chunks_sent(schedule, k - 1)[:steps] == [1] * steps
    for rank in range(k - 1):
        assert chunks_sent(schedule, rank)[:steps] == [2] * (steps - 2) + [1, 1]
    assert sum(chunks_sent(schedule, k - 1)[steps:]) >= k - 1


# --- a late rank ----------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 4, 8, 16, 32])
def test_stragglar_after_a_late_rank_has_come(k: int) -> None:
    """(k - 2 + lg k)/(k - 1) a byte; the bound is 1, as each element has to leave the late rank.

    Up to lg k ranks have nothing to wait for but the late one, whose port their first messages share.
    """
    lg, nbytes = k.bit_length() - 1, 840 * k
    for late in {0, k - 1}:

        def after(name: str, late: int = late) -> Fraction:
            network = crossbar(k, bandwidth=Fraction(1))
            run = simulate(schedule_of("all_reduce", name, k), nbytes, network, late={late: nbytes})
            return Fraction(run.seconds) / nbytes - 1

        time = after(f"stragglar={late}")
        in_step, shared = Fraction(k - 2 + lg, k - 1), Fraction(max(0, lg - 2), k - 1)
        assert 1 <= in_step <= time <= in_step + shared
        assert after("ring") == Fraction(2 * (k - 1), k)
        assert (time < after("ring")) == (k > 2)


@pytest.mark.parametrize("k", [2, 4, 8, 16, 32, 64])
def test_the_late_rank_meets_every_other_one(k: int) -> None:
    """It does nothing while the others reduce and scatter, and then gets a chunk of each."""
    proof = proof_of("stragglar", k)
    steps = [*proof.schedule.steps(k - 1)]
    assert proof.ports == 1
    assert not any(steps[: k - 2])
    peers = [op.peer for step in steps[k - 2 : 2 * k - 3] for op in step if isinstance(op, Send)]
    assert peers == [*range(k - 1)]


@pytest.mark.parametrize("bits", range(1, 9))
def test_powers_in_a_row_make_up_all_numbers(bits: int) -> None:
    powers = _powers(bits)
    assert sorted(powers) == [*range(1, 1 << bits)]
    for first in range(len(powers)):
        sums = {0}
        for power in (powers[(first + more) % len(powers)] for more in range(bits)):
            sums |= {number ^ power for number in sums}
        assert len(sums) == 1 << bits
