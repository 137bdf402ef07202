"""Which collectives have an order of reduction."""

from __future__ import annotations

import pytest

from ringcoll.errors import ScheduleError
from ringcoll.schedules import CONTRACTS, check_reduces


@pytest.mark.parametrize("collective", CONTRACTS)
def test_only_sums_of_data_have_an_order(collective: str) -> None:
    if collective in {"all_reduce", "reduce", "reduce_scatter", "scan", "exscan"}:
        check_reduces(collective)
    else:  # a barrier reduces tokens, any number of times
        with pytest.raises(ScheduleError, match=f"{collective} reduces no data"):
            check_reduces(collective)
