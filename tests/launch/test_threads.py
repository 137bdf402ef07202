"""Which failure of ranks in threads is raised."""

from __future__ import annotations

import pytest

import ringcoll
from ringcoll.errors import PeerLostError


def test_the_first_failure_is_raised_and_not_what_follows_from_it() -> None:
    def main(group: ringcoll.LocalGroup) -> None:
        if group.rank() == 2:
            raise ArithmeticError("no sums on Sundays")
        ringcoll.barrier(group)

    with pytest.raises(ArithmeticError, match="no sums on Sundays"):
        ringcoll.run_threads(main, 3)


def test_a_lost_peer_is_raised_where_nothing_else_has_failed() -> None:
    def main(group: ringcoll.LocalGroup) -> None:
        if group.rank() == 0:
            ringcoll.barrier(group)  # the other rank ends without it

    with pytest.raises(PeerLostError, match="rank 1"):
        ringcoll.run_threads(main, 2)
