"""Over NCCL: against its own collectives, beside them, and in CUDA graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given

from ringcoll.runtime.launch import Ranks
from ringcoll.schedules import CONTRACTS
from tests.cases.batches import Batch, batches, check_batch
from tests.cases.calls import Case
from tests.cases.effort import effort
from tests.programs.on_device import (
    CHECKS,
    NCCL_CHECKS,
    around_a_ring,
    check_on_rank,
    left_waiting,
    losses_of_all_data,
    losses_of_rank,
    told_at_first,
)
from tests.programs.ranks import NCCL_DTYPES, accepted_by_nccl

pytestmark = pytest.mark.processes

_MOST_RANKS = 4
FLOATS = [dtype for dtype in NCCL_DTYPES if dtype.is_floating_point]
gpu = pytest.mark.gpu


def may_share() -> bool:
    """Whether NCCL connects ranks that share a GPU."""
    allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return allowed and torch.cuda.nccl.version() >= (2, 30)


@pytest.fixture(params=["alone", "together"])
def ranks(request: pytest.FixtureRequest, pool, compiled) -> Ranks:
    """One rank; and as many as there are GPUs, or two on one GPU where NCCL allows it."""
    world_size = 1
    if request.param == "together":
        world_size = min(_MOST_RANKS, torch.cuda.device_count())
        if world_size == 1 and not may_share():
            pytest.skip("one GPU, and an NCCL that does not connect ranks that share it")
        world_size = max(2, world_size)
    found: Ranks = pool(world_size, "nccl", cuda_transport="nccl")
    return found


# Mostly what NCCL takes as well.
CONTIGUOUS = ("flat", "flat", "flat", "offset", "strided")
OPS = ("sum", "product", "min", "max", "avg", "premul_sum")


def every_call() -> Iterator[Case]:
    """One of every collective, operator and dtype that NCCL has, exact and rough."""
    yield Case("barrier", device="cuda")
    names = [name for name in CONTRACTS if name != "barrier"]
    every = product(names, OPS, NCCL_DTYPES, ("exact", "rough"))
    for seed, (name, op, dtype, kind) in enumerate(every):
        form = "single" if seed % 4 > 1 else "list"
        case = Case(name, form=form, op=op, dtype=dtype, lengths=(301,), kind=kind, seed=seed)
        if accepted_by_nccl(case) and (op == "sum" or CONTRACTS[name].reduces):
            yield replace(case, device="cuda")


@gpu
def test_every_operator_and_dtype(ranks: Ranks):
    """No luck of the draw."""
    calls = [("world", case) for case in every_call()]
    for start in range(0, len(calls), 20):
        check_batch(ranks, calls[start : start + 20])


@gpu
def test_batches_of_calls_on_several_groups(ranks: Ranks):
    @effort(60, shrink=False)
    @given(batches(ranks.world_size, CONTIGUOUS, "cuda"))
    def tried(batch: Batch) -> None:
        check_batch(ranks, batch)

    tried()


@gpu
@pytest.mark.parametrize("name", [*CHECKS, *NCCL_CHECKS])
def test_checks(ranks: Ranks, name: str):
    assert ranks.run(check_on_rank, name, "cuda") == [[]] * ranks.world_size


@gpu
def test_training_is_that_of_one_process_with_all_data(pool, compiled):
    """One rank at least; `tests/collectives/test_processes_on_gpu.py` has several on one GPU."""
    world_size = max(1, min(_MOST_RANKS, torch.cuda.device_count()))
    ranks = pool(world_size, "ringcoll", cuda_transport="nccl")
    losses = ranks.run(losses_of_rank, "cuda")
    means = [sum(step) / world_size for step in zip(*losses, strict=True)]
    whole = ranks.run(losses_of_all_data, world_size, "cuda")[0]
    assert means == pytest.approx(whole, rel=1e-10)


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=gpu)])
def test_batches_of_the_users_own_messages(pool, kind: str):
    world_size = 3 if kind == "cpu" else max(1, min(_MOST_RANKS, torch.cuda.device_count()))
    found = pool(world_size, "ringcoll").run(around_a_ring, kind)
    assert found == [[float((rank - 1) % world_size)] for rank in range(world_size)]


@gpu
def test_ranks_that_share_a_gpu_are_told_what_to_do(pool):
    if may_share():
        pytest.skip("this NCCL connects ranks that share a GPU")
    for text in pool(2, cuda_transport="nccl").run(told_at_first):
        shared = "ranks 0, 1 share one GPU"
        for part in (shared, "NCCL", "2.30", "NCCL_MULTI_RANK_GPU_ENABLE", "ucx", "gloo"):
            assert part in text, text


@gpu
def test_a_rank_that_does_not_come_is_named(ranks: Ranks):
    """By all others, whose processes live."""
    last = ranks.world_size - 1
    for rank, text in enumerate(ranks.run(left_waiting)):
        assert (f"rank {last}" in text and "timed out after its timeout of 2 s" in text) == (
            rank != last
        ), text


def test_the_oracle_is_asked_often_enough():
    """By every call of the list above, and by an eighth at least of those that are drawn."""
    calls = [*every_call()]
    reducing = ("all_reduce", "reduce", "reduce_scatter")
    assert {case.collective for case in calls} == CONTRACTS.keys()
    assert {(case.collective, case.op) for case in calls} >= {*product(reducing, OPS)}
    assert {(case.op, case.dtype) for case in calls} >= {*product(OPS[:5], FLOATS)}
    asked = [0, 0]

    @effort(300)
    @given(batches(2, CONTIGUOUS, "cuda"))
    def count(batch: Batch) -> None:
        for _, case in batch:
            asked[accepted_by_nccl(case)] += 1

    count()
    assert asked[True] > sum(asked) / 8, asked
