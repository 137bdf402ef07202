"""Not one native collective is called, by any public function."""

from __future__ import annotations

import pytest
import torch

from ringcoll.schedules import contract
from ringcoll.schedules.algorithms import algorithms
from tests.cases.calls import Case
from tests.programs.ranks import GROUPS, without_native

pytestmark = pytest.mark.processes


def averages(collective: str) -> bool:
    """Whether a collective has AVG: it reduces, and no prefixes."""
    rules = contract(collective)
    return rules.reduces and not rules.is_prefix


def calls(world_size: int) -> list[tuple[str, Case]]:
    """The whole public API: every algorithm, form and option, on old and new groups."""
    sizes = {name: len(members) for name, members in GROUPS[world_size].items()}
    sizes["new"] = world_size
    batch = [
        (
            name,
            Case(
                entry.collective,
                entry.name,
                form=form,
                lengths=(k + 1,),
                root=k - 1 if contract(entry.collective).rooted else 0,
                async_op=async_op,
                in_place=async_op and contract(entry.collective).in_place,
                dtype=torch.float32,
                op="avg" if averages(entry.collective) else "sum",
                segment_bytes=8 if async_op else None,
            ),
        )
        for name, k in sizes.items()
        for entry in algorithms(world_size=k)
        for form in ("list", "single")
        for async_op in (False, True)
    ]
    batch += [("new", Case(entry.collective)) for entry in algorithms()]
    batch += [
        ("new", Case("all_reduce", op="user_affine")),
        ("new", Case("all_reduce", op="user_skewed")),
    ]
    return batch


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_no_public_function_calls_a_native_collective(pool, world_size: int):
    batch = calls(world_size)
    assert {case.collective for _, case in batch} == {entry.collective for entry in algorithms()}
    for rank, (working, outcomes, counted) in enumerate(
        pool(world_size).run(without_native, batch)
    ):
        assert not working, f"could be called all the same: {working}"
        assert counted == 0, "a native group has counted collectives"
        done = [outcome for outcome in outcomes if outcome is not None]
        assert [found for found, _ in done if found] == []
        assert len(done) >= len(batch) / 3, f"rank {rank} took part in too few"
