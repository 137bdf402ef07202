"""A backend whose algorithms are fitted to a network, under torch's own trainers."""

from pathlib import Path

import pytest

from ringcoll.lab.search import fit
from ringcoll.lab.simulation import topology_from_text
from ringcoll.runtime.user_files import write_fit
from tests.programs import fitted

pytestmark = pytest.mark.processes

CABLES = "0 -- 2 10 1\n2 -- 1 10 1\n1 -- 3 10 1\n3 -- 0 1 1\n"  # a ring with a slow cable, out of rank order


def test_fsdp2_gathers_and_scatters_by_the_fit(pool, tmp_path: Path) -> None:
    """Its losses, in whole numbers, are the same to the last bit."""
    file, found = tmp_path / "ring.fit", None
    for collective in ("all_gather", "reduce_scatter"):
        best = fit(collective, topology_from_text(CABLES), sizes=[1 << 18], exact=False)
        found = best.fitted("2026-11-28T00:00:00", found)
    assert found is not None
    write_fit(file, found)
    ranks = pool(4)
    without, with_fit = (ranks.run(fitted.fsdp_losses, given, 4) for given in (None, str(file)))
    names = {rule.collective: rule.algorithm for rule in found.rules}
    for (losses, _), (same, reasons) in zip(without, with_fit, strict=True):
        assert losses == same
        assert len(set(losses)) == 4
        for name, reason in zip(
            (names["all_gather"], names["reduce_scatter"]), reasons, strict=True
        ):
            assert "fitted on 2026-11-28" in reason
            assert name in reason
