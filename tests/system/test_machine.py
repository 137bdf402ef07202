"""Which ranks are on one host."""

from __future__ import annotations

from ringcoll.system.machine import hosts_of, place


def test_places_that_differ_in_anything_are_several_hosts():
    parts = place().split()
    assert place() == place()
    for index in range(len(parts)):
        other = " ".join("other" if number == index else part for number, part in enumerate(parts))
        assert hosts_of([other, place(), other, place()]) == (0, 1, 0, 1)
