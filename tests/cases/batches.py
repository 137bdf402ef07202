"""Batches of calls on ranks that are processes: made, run, and judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from ringcoll.runtime.launch import Ranks
from tests.cases.calls import STYLES, Case
from tests.cases.strategies import cases
from tests.programs.ranks import GROUPS, Outcome, run_batch

__all__ = ["OFTEN_FLAT", "Batch", "batches", "check_batch"]

Batch = list[tuple[str, Case]]
"""Names of groups, and calls on them."""

# torch's own collectives are asked where tensors are contiguous only.
OFTEN_FLAT = (*("flat",) * 6, *STYLES)


@st.composite
def batches(
    draw: st.DrawFn, world_size: int, styles: Sequence[str] = OFTEN_FLAT, device: str = "cpu"
) -> Batch:
    """Some calls on several groups of so many ranks."""
    batch = []
    for _ in range(draw(st.integers(1, 5))):
        name = draw(st.sampled_from(sorted(GROUPS[world_size])))
        case = draw(cases(len(GROUPS[world_size][name]), styles=styles))
        batch.append((name, replace(case, device=device)))
    return batch


def check_batch(ranks: Ranks, batch: Batch, *, native: bool = True) -> None:
    """Run a batch on all ranks, and compare the ranks with each other."""
    world_size = ranks.world_size
    results: list[list[Outcome]] = ranks.run(run_batch, batch, native)
    for index, (name, case) in enumerate(batch):
        outcomes = [result[index] for result in results]
        members = [outcome for outcome in outcomes if outcome is not None]
        assert len(members) == len(GROUPS[world_size][name])
        wrong = [item for found, _ in members for item in found]
        assert not wrong, (wrong, name, case)
        if case.collective in ("all_reduce", "all_gather", "broadcast"):
            assert len({hashed for _, hashed in members}) == 1, ("ranks differ", name, case)
