"""The conformance suite of faults: ranks that disagree, over every transport; see `tests.programs.disagreements`.

``benchmarks/faults.py`` tries all of it, and writes the table of docs/reliability.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import ringcoll
from ringcoll import LocalGroup, testing
from ringcoll.errors import PeerLostError, TransportError
from ringcoll.runtime.group import communicator
from tests.programs.disagreements import (
    KINDS,
    ODD,
    WORLD_SIZE,
    Met,
    judge,
    kinds_over,
    on_threads,
    run_kinds,
    run_on_threads,
)

AT_ONCE = 8
SAMPLED = 10  # one of so many kinds over transports that take longer
FINE = ("right", "next", "cannot be known", "late")  # the machine may be busy

TEXT = "rank 0 called barrier and rank 1 called all_reduce, call 1"
MISMATCH = Met("MismatchError", TEXT, True, 0.4)
LATER = replace(MISMATCH, is_next=True)
LIMIT = replace(MISMATCH, error="CollectiveTimeoutError", seconds=1.1)
NOTHING = Met("", "", True, 0.0)
COMPARED, ABSENT = "operator: reduce, max", "a rank skips a call: the last, 4 B"
HARMLESS, LAST = (
    "agreement in effect: a plan, a call",
    "last call of a program, nobody waits: reduce",
)


@pytest.mark.parametrize(
    "name,met,wanted",
    [
        (COMPARED, [MISMATCH] * 3, "right"),
        (COMPARED, [MISMATCH, MISMATCH, LATER], "next"),
        (COMPARED, [MISMATCH, NOTHING, MISMATCH], "silent"),
        (COMPARED, [LIMIT] * 3, "no mismatch"),
        (COMPARED, [MISMATCH, MISMATCH, None], "hangs or crashes"),
        (COMPARED, [MISMATCH, MISMATCH, replace(MISMATCH, is_typed=False)], "untyped"),
        (COMPARED, [MISMATCH, MISMATCH, replace(MISMATCH, seconds=6.0)], "late"),
        (COMPARED, [MISMATCH, MISMATCH, replace(MISMATCH, text="rank 1")], "unnamed"),
        (COMPARED, [MISMATCH, MISMATCH, replace(MISMATCH, text="all_reduce")], "unnamed"),
        (COMPARED, [MISMATCH, MISMATCH, replace(LATER, is_right=False)], "wrong value"),
        (ABSENT, [LIMIT, NOTHING, LIMIT], "right"),
        (ABSENT, [NOTHING, NOTHING, LIMIT], "silent"),
        (ABSENT, [replace(LIMIT, seconds=20.0), NOTHING, LIMIT], "late"),
        (HARMLESS, [NOTHING] * 3, "right"),
        (HARMLESS, [NOTHING, NOTHING, MISMATCH], "false alarm"),
        (LAST, [NOTHING] * 3, "cannot be known"),
        (LAST, [replace(NOTHING, is_right=False)] * 3, "wrong value"),
    ],
)
def test_what_is_right(name: str, met: Sequence[Met | None], wanted: str):
    assert judge(KINDS[name], met) == wanted


def test_there_are_kinds_of_everything():
    assert len(KINDS) > 100
    assert {kind.differs for kind in KINDS.values()} >= {
        "collective", "operator", "root", "dtype", "length", "order", "algorithm",
        "schedule of one name", "segment size", "wire dtype", "coalescing", "another group",
        "message against collective", "a rank skips a call", "a rank raises",
    }  # fmt: skip
    assert {kind.ends for kind in KINDS.values()} == {
        "compared", "limit", "told", "right", "unknown",
    }  # fmt: skip


def verdicts(names: Sequence[str], met: Sequence[Sequence[Met | None]]) -> dict[str, object]:
    """What is wrong, with what was met."""
    judged = {name: judge(KINDS[name], items) for name, items in zip(names, met, strict=True)}
    return {
        name: (judged[name], items)
        for name, items in zip(names, met, strict=True)
        if judged[name] not in FINE
    }


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["threads", "nccl"])
def test_every_kind_among_threads(transport: str):
    names = kinds_over(transport)
    with ThreadPoolExecutor(AT_ONCE) as executor:
        met = [*executor.map(lambda name: run_on_threads(name, transport), names)]
    assert verdicts(names, met) == {}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("start", range(0, len(KINDS), AT_ONCE))
def test_every_kind_over_shared_memory(start: int):
    names = [*KINDS][start : start + AT_ONCE]
    met = testing.ranks(WORLD_SIZE).run(run_kinds, names, "shared")
    assert verdicts(names, [*zip(*met, strict=True)]) == {}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("transport", ["gloo", "ucx"])
def test_some_kinds_over(transport: str):
    if transport == "ucx":
        pytest.importorskip("ucxx")
    names = [*KINDS][transport == "ucx" :: SAMPLED]
    for start in range(0, len(names), AT_ONCE // 2):
        batch = names[start : start + AT_ONCE // 2]
        met = testing.ranks(WORLD_SIZE).run(run_kinds, batch, transport)
        assert verdicts(batch, [*zip(*met, strict=True)]) == {}


# --- what the suite has found ---------------------------------------------------------


@pytest.mark.parametrize("transport", ["threads", "nccl"])
def test_a_rank_that_closes_the_group_tells_the_others(transport: str):
    """Long before the time limit, also where ranks wait in the store to compare calls."""

    def main(rank: int, groups: Sequence[LocalGroup]) -> None:
        ringcoll.barrier(groups[0])
        if rank == ODD:
            groups[0].close()
        else:
            ringcoll.all_reduce(torch.ones(3), group=groups[0])

    for rank, error in enumerate(on_threads(main, 600.0, transport)):
        if rank != ODD:
            assert isinstance(error, PeerLostError), error
            assert f"rank {ODD}" in str(error)
            assert "all_reduce" in str(error)


def test_a_rank_may_leave_after_a_call_that_others_still_compare():
    """It has told its call, and then that it has left."""
    left = threading.Event()

    def main(rank: int, groups: Sequence[LocalGroup]) -> float:
        ringcoll.barrier(groups[0])
        if rank != ODD:
            assert left.wait(20)
        x = torch.ones(1)
        comparison = groups[0].communicator._comparison
        if rank == ODD:
            comparison._store.set(f"call/2/{rank}", "the same\n")
            groups[0].close()
            left.set()
        else:
            comparison.compare("the same", 20.0, capturing=False)
        return float(x)

    assert on_threads(main, 20.0, "nccl") == [1.0] * WORLD_SIZE


def test_memory_that_torch_cannot_allocate_is_an_error_of_the_library(
    monkeypatch: pytest.MonkeyPatch,
):
    def main(group: LocalGroup) -> None:
        if group.rank() == 1:
            monkeypatch.setattr(group.communicator.memory, "take", lack)
        ringcoll.all_reduce(torch.ones(1 << 16), group=group, algorithm="ring", wire_dtype=half)

    def lack(*_: object) -> torch.Tensor:
        raise RuntimeError(f"DefaultCPUAllocator: {communicator._NO_MEMORY}: you tried too much")

    half = torch.bfloat16
    with pytest.raises(
        TransportError, match=r"rank 1 failed with .*, in call 1 of the group \(all_reduce"
    ):
        ringcoll.run_threads(main, 2, timeout_s=20)
