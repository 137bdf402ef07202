"""Numbers and ranges."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.cli.parameters import as_ranges, collective_name, world_sizes


@pytest.mark.parametrize(
    "text, expected",
    [
        ("4", (4,)),
        ("1-4", (1, 2, 3, 4)),
        ("8, 1-3 ,2", (1, 2, 3, 8)),
        ("1,2,8-16", (1, 2, 8, 9, 10, 11, 12, 13, 14, 15, 16)),
        ("65536", (65536,)),
    ],
)
def test_numbers_and_ranges_are_read_sorted_and_once(text, expected):
    assert world_sizes(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1..4", "1,,2", "0", "0-4", "4-1", "65537"])
def test_anything_else_is_refused(text):
    with pytest.raises(click.BadParameter, match=r"range like 1-8|not within 1 to 65536"):
        world_sizes(text)


@given(st.sets(st.integers(1, 100), min_size=1))
def test_what_is_written_reads_back(sizes):
    assert world_sizes(as_ranges(sorted(sizes))) == tuple(sorted(sizes))


def test_collectives_may_be_spelled_as_in_prose():
    assert collective_name("all-to-all") == "all_to_all"
