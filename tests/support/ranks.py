"""Functions that run on the ranks of a pool of processes."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from tests.support.cases import Case, expected, fingerprint, prepare, verdict
from tests.support.data import COMPLEX
from tests.support.reference import Answer, bits, mismatch

__all__ = ["GROUPS", "Outcome", "accepted_by_gloo", "fresh_group", "join", "run_batch"]

# By world size: the members of each group, in the order of their ranks in it.
GROUPS: dict[int, dict[str, tuple[int, ...]]] = {
    2: {"world": (0, 1), "backwards": (1, 0), "one": (1,)},
    3: {"world": (0, 1, 2), "ends": (0, 2), "mixed": (2, 0, 1)},
    4: {"world": (0, 1, 2, 3), "evens": (0, 2), "odds": (1, 3), "mixed": (3, 0, 2)},
}

_groups: dict[str, Any] = {}

Outcome = tuple[list[str], str] | None
"""What is wrong, and a hash of the outputs; ``None`` where a rank is not a member."""


def join() -> None:
    """Make the groups; called once on every rank of a pool."""
    for name, members in GROUPS[dist.get_world_size()].items():
        _groups[name] = (
            None if name == "world" else dist.new_group(list(members), sort_ranks=False)
        )


def fresh_group(timeout_s: float = 60.0, members: Sequence[int] | None = None) -> Any:
    """A new group, of all ranks unless members are given."""
    ranks = list(range(dist.get_world_size()) if members is None else members)
    return dist.new_group(ranks, timeout=_seconds(timeout_s))


def _seconds(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


def position(name: str) -> int | None:
    """The rank of this process in a group."""
    members = GROUPS[dist.get_world_size()][name]
    return members.index(dist.get_rank()) if dist.get_rank() in members else None


def accepted_by_gloo(case: Case, world_size: int) -> bool:
    """Whether torch's own collective over gloo takes a case, and is known to be right.

    Found by trying (torch 2.13.0): no float8, int16, uint16 and wider unsigned; AVG of
    floats only; PRODUCT, MIN, MAX of complex numbers, and their gather, are refused;
    uneven lists are refused; strided tensors are reduced wrongly; sums in bfloat16 are
    faulty; bool is reduced as if it were a number.
    """
    reduces = case.collective in ("all_reduce", "reduce", "reduce_scatter")
    plain = {torch.float64, torch.float32, torch.float16, *COMPLEX}
    plain |= {torch.int8, torch.int32, torch.int64, torch.uint8}
    if case.style not in ("flat", "offset") or case.wire_dtype is not None:
        return False
    if len(set(case.lengths)) > 1 and not (
        case.collective == "all_to_all" and case.form == "single"
    ):
        return False
    if case.collective == "barrier":
        return True
    if not reduces:
        plain |= {torch.bfloat16, torch.bool}
        return case.dtype in plain and not (case.collective == "gather" and case.dtype.is_complex)
    if case.dtype is torch.float16 and case.kind != "exact":
        return False  # it adds in float16
    if case.op == "avg" and not (case.dtype.is_floating_point or case.dtype.is_complex):
        return False
    if case.dtype.is_complex and case.op not in ("sum", "avg"):
        return False
    return case.dtype in plain and case.op not in ("premul_sum",) and "user" not in case.op


def _against_native(case: Case, ours: Any, group: Any, rank: int, world_size: int) -> list[str]:
    """Run torch's own collective, and compare."""
    theirs = prepare(case, rank, world_size, native=True)
    work = theirs.start(dist, group)
    if work is not None:
        work.wait()
    wrong = []
    for index, (mine, native, answer) in enumerate(
        zip(ours.outputs, theirs.outputs, expected(case, rank, world_size), strict=True)
    ):
        what = f"rank {rank}, output {index}, against torch"
        # Both are within the bound of the exact result.
        wide = torch.complex128 if native.is_complex() else torch.float64
        allowed = (
            Answer(native)
            if answer.bound is None
            else Answer(native.reshape(-1).to(wide), 2 * answer.bound)
        )
        wrong.append(mismatch(mine, allowed, what))
    return [item for item in wrong if item]


def run_batch(batch: Sequence[tuple[str, Case]], native: bool) -> list[Outcome]:
    """Make the calls one after the other, with asynchronous ones in flight, then check all."""
    calls = []
    for name, case in batch:
        rank = position(name)
        if rank is None:
            calls.append(None)
            continue
        world_size = len(GROUPS[dist.get_world_size()][name])
        prepared = prepare(case, rank, world_size)
        calls.append((prepared, prepared.start(ringcoll, _groups[name]), rank, world_size))
    outcomes: list[Outcome] = []
    for call, (name, case) in zip(calls, batch, strict=True):
        if call is None:
            outcomes.append(None)
            continue
        prepared, work, rank, world_size = call
        if work is not None:
            work.wait()
        wrong = verdict(prepared, rank, world_size)
        if native and accepted_by_gloo(case, world_size):
            wrong += _against_native(case, prepared, _groups[name], rank, world_size)
        outcomes.append((wrong, fingerprint(prepared)))
    return outcomes
