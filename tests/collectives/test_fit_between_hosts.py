"""Hosts of which one has a slow link: measured, fitted, and used under DDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringcoll.lab.search import fit, least_time, registered_times
from ringcoll.lab.simulation import topology_of
from ringcoll.runtime.user_files import write_fit
from tests.fakes.hosts import HostRanks, Hosts, reason_why_not_slow
from tests.programs import fitted

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(bool(reason_why_not_slow()), reason=reason_why_not_slow()),
]
WHERE = (0, 1, 2, 0, 1, 2)


def test_from_the_links_to_a_schedule_that_trains(tmp_path: Path) -> None:
    file = str(tmp_path / "cluster.fit")
    with (
        Hosts(3, mbit_per_s={0: 1000, 1: 1000, 2: 200}) as hosts,
        HostRanks(hosts, WHERE, timeout_s=120.0) as pool,
    ):
        found = pool.run(fitted.probed, 5.0)
        measured = found[0][0]
        assert all(each == measured for each, _ in found)
        topology = topology_of(measured)
        best = fit("all_reduce", topology, sizes=[1 << 22], exact=False)
        (one,) = best.ranges
        # How near to the bound depends on the latency that a busy machine has; tests/search/test_fitting.py holds it.
        least = least_time("all_reduce", topology).seconds(1 << 22)
        usual = registered_times("all_reduce", topology, 1 << 22)[0]
        assert least <= one.winner.seconds <= usual.seconds
        write_fit(Path(file), best.fitted("2026-11-28T00:00:00"))
        for results in pool.run(fitted.time_both, file, [1 << 22], 1):  # asserts the sums
            ((_, _, (without, with_fit)),) = results
            assert "fitted on 2026-11-28" in with_fit[1]
            assert "fitted on" not in without[1]
        losses = pool.run(fitted.ddp_losses, None, 6)
        by_fit = pool.run(fitted.ddp_losses, file, 6)
    for (own, usual), (other, words) in zip(losses, by_fit, strict=True):
        assert own == other
        assert "fitted on" not in usual
        assert "fitted on 2026-11-28" in words
        assert words == by_fit[0][1]
