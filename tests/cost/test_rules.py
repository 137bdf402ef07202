"""Rules: what is read is what was written, and errors point at the place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.errors import RulesError
from ringcoll.schedules import CONTRACTS
from ringcoll.schedules.algorithms import algorithms
from ringcoll.schedules.cost.rules import AUTO, EVERY, Range, Rule, in_text, parse_rules


def ranges(least: int) -> st.SearchStrategy[Range]:
    sizes = st.one_of(st.integers(least, 10**6), st.integers(least, 99).map(lambda n: n << 20))
    return st.builds(
        lambda first, more: Range(first, None if more is None else first + more),
        sizes,
        st.none() | st.integers(1, 10**7),
    )


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    collective = draw(st.sampled_from([EVERY, *CONTRACTS]))
    names = {entry.name for entry in algorithms(None if collective == EVERY else collective)}
    algorithm = draw(st.sampled_from(sorted(names | {AUTO})))
    segment = st.none() if algorithm == AUTO else st.none() | st.integers(1, 1 << 30)
    return Rule(
        collective=collective,
        nbytes=draw(ranges(0)),
        algorithm=algorithm,
        segment_bytes=draw(segment),
        world_size=draw(ranges(1)),
        hosts=draw(ranges(1)),
    )


@given(st.lists(rules(), max_size=5))
def test_what_is_written_is_read(found: list[Rule]) -> None:
    assert parse_rules(in_text(found)) == tuple(found)


@given(st.text(alphabet="all_reduce:0-64KMring@*;=k hostinf9", max_size=40))
def test_any_text_is_read_or_refused_at_a_place(text: str) -> None:
    caught: RulesError | None = None
    try:
        found = parse_rules(text)
    except RulesError as error:
        caught = error
    if caught is None:
        assert parse_rules(in_text(found)) == found
    else:
        assert caught.text == text
        assert 0 <= caught.start <= caught.start + caught.length <= len(text)


@pytest.mark.parametrize(
    "text, message, marked",
    [
        ("all_sum:*:ring", "no such collective", "all_sum"),
        ("all_reduce:*", "a rule has a collective", "all_reduce:*"),
        ("all_reduce:*:pairwise", "no such algorithm of all_reduce", "pairwise"),
        ("rong", "no such algorithm;", "rong"),
        ("*:*:ring; *:*: rong ", "no such algorithm;", "rong"),
        ("*:64K-4K:ring", "the range is empty", "64K-4K"),
        ("*:4K-4K:ring", "the range is empty", "4K-4K"),
        ("*:1-2-3:ring", "two ends", "1-2-3"),
        ("*:4Q:ring", "not a number", "4Q"),
        ("*:-4:ring", "not a number", "-4"),
        ("*:inf-4:ring", "not a number", "inf"),
        ("*::ring", "not a number", ""),
        ("*:*:ring@", "not a number", ""),
        ("*:*:ring@0", "at least one byte", "0"),
        ("*:*:ring@1@2", "one size of them", "ring@1@2"),
        ("*:*:auto@4K", "no segments", "auto@4K"),
        ("*:*:@4K", "not the name", "@4K"),
        ("*:*:ring:p=4", "a condition is", "p=4"),
        ("*:*:ring:k=0", "at least one", "0"),
        ("*:*:ring:k=4:k=4", "given twice", "k=4"),
        ("*:*:ring:hosts=3-2", "the range is empty", "3-2"),
    ],
)
def test_errors_point_at_the_place(text: str, message: str, marked: str) -> None:
    with pytest.raises(RulesError, match=message) as caught:
        parse_rules(text)
    error = caught.value
    assert text[error.start : error.start + error.length] == marked
    assert str(error).splitlines()[-1] == " " * (2 + error.start) + "^" * max(1, error.length)


def test_rules_match_by_bytes_and_ranks() -> None:
    found = parse_rules("all_reduce:0-1K:auto;all_reduce:1K-64K:tree:k=2-4;ring")

    def matching(nbytes: int, world_size: int) -> list[str]:
        return [one.algorithm for one in found if one.matches("all_reduce", nbytes, world_size, 1)]

    assert matching(1023, 4) == [AUTO, "ring"]
    assert matching(1024, 4) == ["binomial_tree", "ring"]
    assert matching(1024, 5) == ["ring"]
    assert matching(64 << 10, 4) == ["ring"]


def test_a_rule_that_cannot_run_does_not_match() -> None:
    (ring,) = parse_rules("ring")
    assert not ring.matches("barrier", 1, 4, 1)
    assert ring.matches("all_gather", 1, 4, 1)
    (unknown,) = parse_rules("all_reduce:*:of_another_program", known_only=False)
    assert not unknown.matches("all_reduce", 1, 4, 1)


def test_hosts_and_world_sizes_contain_both_ends() -> None:
    (rule,) = parse_rules("*:*:ring:k=4-8:hosts=2")
    matching = [k for k in range(1, 12) if rule.matches("all_reduce", 1, k, 2)]
    assert matching == [4, 5, 6, 7, 8]
    assert [h for h in range(1, 5) if rule.matches("all_reduce", 1, 4, h)] == [2]


def test_a_single_size_stands_for_itself() -> None:
    (rule,) = parse_rules("all_reduce:4K:ring")
    assert [n for n in (4095, 4096, 4097) if n in rule.nbytes] == [4096]
    assert str(rule) == "all_reduce:4K:ring"


def test_an_empty_range_cannot_be_made() -> None:
    with pytest.raises(RulesError, match="empty"):
        Range(3, 3)
