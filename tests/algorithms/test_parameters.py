"""Algorithms with a parameter: blocks of a circulant graph, rounds saved, a radix; and two roots."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcoll.errors import UnknownAlgorithmError
from ringcoll.schedules import verify
from ringcoll.schedules.algorithms import find, schedule_of
from ringcoll.schedules.algorithms.circulant_blocks import base_block, distances, received, sent
from ringcoll.schedules.cost import wavefront_counts

# --- blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [*range(2, 34), 63, 64, 65, 127, 200])
def test_the_conditions_of_the_paper(k: int) -> None:
    """Section 2 of arXiv 2407.18004: what is received is new, and what is sent was received."""
    rounds = (k - 1).bit_length()
    earlier = set(range(-rounds, 0))
    assert len(distances(k)) == rounds + 1
    assert sent(0, k) == list(range(rounds))  # the root sends a new block in each round
    for v in range(1, k):
        own, receives = base_block(v, k), received(v, k)
        assert set(receives) == (earlier - {own - rounds}) | {own}
        for number, block in enumerate(sent(v, k)):
            assert block == own - rounds or block in receives[:number]


@settings(max_examples=40)
@given(st.integers(2, 40), st.integers(1, 24), st.integers(0, 39), st.booleans())
def test_any_number_of_blocks_in_the_fewest_rounds(
    k: int, blocks: int, root: int, reduces: bool
) -> None:
    collective = "reduce" if reduces else "broadcast"
    proof = verify(schedule_of(collective, f"circulant={blocks}", k, root % k))
    fewest = blocks - 1 + (k - 1).bit_length()
    assert (proof.rounds, proof.traffic) == (fewest, Fraction(fewest, blocks))
    assert proof.ports == 1
    assert proof.reduced == (proof.traffic if reduces else 0)
    assert proof.sent_max <= proof.traffic


# --- saved rounds -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3, 4, 6, 8, 12, 13, 16, 24, 40, 64])
def test_every_number_of_saved_rounds(k: int) -> None:
    """2 ceil(lg k) - r rounds; with m = k / 2^r, (2 (m - 1) + r) / m of the vector."""
    lg = (k - 1).bit_length()
    for saved in range(lg + 1):
        entry = find("all_reduce", f"generalized={saved}")
        if k % 2**saved:
            assert entry.restriction(k) == f"{2**saved} has to divide the number of ranks"
            continue
        proof, m = verify(entry.schedule(k)), k // 2**saved
        assert proof.rounds == 2 * lg - saved
        assert proof.traffic == Fraction(2 * (m - 1) + saved, m)
        assert proof.same_everywhere


@pytest.mark.parametrize("k", [2, 4, 8, 16, 32])
def test_the_ends_are_known_algorithms(k: int) -> None:
    lg = k.bit_length() - 1
    for saved, name in ((0, "rabenseifner"), (lg, "recursive_doubling")):
        known = find("all_reduce", name).counts(k)
        assert find("all_reduce", f"generalized={saved}").counts(k) == known


# --- a radix ------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.sampled_from(["broadcast", "reduce", "gather", "scatter"]),
    st.integers(2, 70),
    st.integers(2, 12),
    st.integers(0, 69),
)
def test_trees_of_any_radix(collective: str, k: int, radix: int, root: int) -> None:
    """The proof compares the stated cost with the counted one, too."""
    proof = verify(schedule_of(collective, f"knomial_tree={radix}", k, root % k))
    assert radix ** (proof.rounds - 1) < k <= radix**proof.rounds
    assert proof.ports == min(radix, k) - 1
    if collective in ("gather", "scatter"):
        assert proof.traffic == Fraction(k - 1, k)


@pytest.mark.parametrize("collective", ["broadcast", "reduce", "gather", "scatter"])
def test_radix_2_is_the_binomial_tree(collective: str) -> None:
    for k in (2, 5, 8, 13):
        known = find(collective, "binomial_tree").counts(k)
        assert find(collective, "knomial_tree=2").counts(k) == known


@pytest.mark.parametrize(
    "k, radix, own",
    [(64, 2, [2] * 6), (64, 8, [8, 8]), (64, 64, [64]), (60, 6, [6, 5, 2]), (14, 4, [2, 7])],
)
def test_multiplying_by_any_radix(k: int, radix: int, own: list[int]) -> None:
    """A round for each factor, up to the radix where k has such a factor."""
    proof = verify(schedule_of("all_reduce", f"recursive_multiplying={radix}", k))
    assert (proof.rounds, proof.traffic) == (len(own), sum(factor - 1 for factor in own))
    assert proof.rank_order
    assert proof.same_everywhere


@pytest.mark.parametrize(
    "collective, name",
    [
        ("broadcast", "knomial_tree"),
        ("gather", "knomial_tree"),
        ("all_reduce", "recursive_multiplying"),
        ("all_to_all", "bruck"),
    ],
)
@pytest.mark.parametrize("radix", [0, 1])
def test_a_radix_that_is_none(collective: str, name: str, radix: int) -> None:
    with pytest.raises(UnknownAlgorithmError, match=r"takes a number of radix, .* at least 2"):
        find(collective, f"{name}={radix}")


# --- two roots ------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [4, 8, 16, 31, 64])
def test_up_and_down_at_once(k: int) -> None:
    """In segments 3 n each way, as the paper says: two children and a parent, or the other root."""
    schedule = schedule_of("all_reduce", "dual_root", k)
    at_once = wavefront_counts(schedule, 1000)
    assert at_once.rounds == 1000 + verify(schedule).rounds - 1
    assert at_once.traffic == pytest.approx(3 if k > 4 else 2, abs=0.05)
