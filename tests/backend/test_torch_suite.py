"""Torch's own tests of its backends pass, those of them that gloo passes and some more.

``tests/cases/torch_suite_on_gloo.json`` holds, by world size, what becomes of each of them with gloo; see
`tests.programs.torch_suite` for how it is made.
"""

from __future__ import annotations

import json
import os
import sys
import unittest
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.runtime.launch import RankError, rendezvous
from tests.programs.torch_suite import (
    LIMIT_S,
    PASSED,
    RECORD,
    Pool,
    gates,
    no_native_collective,
    outcome_of,
)

_RECORD = json.loads(RECORD.read_text())
_WORLD_SIZES = (2, 3)

# Tests that gloo passes and that are not run: why. There are none.
EXCEPTIONS: dict[str, str] = {}

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(
        version("torch").split("+")[0] != _RECORD["torch"],
        reason=f"what gloo passes is known of torch {_RECORD['torch']}",
    ),
]


def to_run(world_size: int) -> list[str]:
    """The tests that gloo does not skip, be it that it passes them or not."""
    outcomes: dict[str, str] = _RECORD[str(world_size)]
    return [
        name
        for name, outcome in sorted(outcomes.items())
        if not outcome.startswith("skipped: ") and name not in EXCEPTIONS
    ]


CASES = [(world_size, name) for world_size in _WORLD_SIZES for name in to_run(world_size)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.mark.timeout(LIMIT_S + 60)  # starting the ranks anew included
@pytest.mark.parametrize("world_size,name", CASES)
def test_it_passes(ranks, tmp_path, world_size: int, name: str):
    try:
        outcomes = ranks.run(name, "ringcoll", world_size, tmp_path)
    except RankError as error:
        pytest.fail(f"rank {error.rank}:\n{error.details}", pytrace=False)
    assert outcomes == {PASSED}


@pytest.mark.parametrize("world_size", _WORLD_SIZES[::-1])  # the pool that is there first
def test_none_is_left_out_unseen(ranks, tmp_path, world_size: int):
    outcomes: dict[str, str] = _RECORD[str(world_size)]
    there = ranks.ranks(world_size).run(gates, str(tmp_path))
    assert there == [there[0]] * world_size
    assert set(there[0]) == set(outcomes)
    closed = {name: f"skipped: {reason}" for name, reason in there[0].items() if reason}
    assert closed == {name: outcomes[name] for name in closed}
    passed = {name for name, outcome in outcomes.items() if outcome == PASSED}
    failed = {name for name, outcome in outcomes.items() if outcome.startswith("failed: ")}
    assert len(passed) >= 97
    # Their parts are of different sizes, which gloo does not take in lists of tensors.
    assert failed == {
        "test_all_to_all",
        "test_all_to_all_complex",
        "test_all_to_all_full_group",
        *(["test_all_to_all_group"] if world_size > 2 else []),
    }
    assert set(EXCEPTIONS) <= passed
    assert all(EXCEPTIONS.values())
    assert set(to_run(world_size)) == (passed | failed) - set(EXCEPTIONS)


def outcomes_of_skips() -> list[str]:
    def skips() -> None:
        raise unittest.SkipTest("by exception")

    def ends() -> None:
        sys.exit(73)  # TEST_SKIPS["small_worldsize"]

    return [outcome_of(call) for call in (skips, ends, lambda: None)]


def ending() -> None:
    outcome_of(lambda: sys.exit(10))


def with_a_native_collective(number: int, native: bool) -> None:
    store, rank, world_size = rendezvous()
    try:
        with no_native_collective():
            dist.init_process_group(
                "ringcoll",
                store=dist.PrefixStore(f"native {number}", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=30),
            )
            tensor = torch.ones(1)
            (dist.send if rank else dist.recv)(tensor, 1 - rank)
            group: Any = dist.group.WORLD
            (group._get_backend(torch.device("cpu")) if native else group).allreduce(
                [tensor]
            ).wait()
    finally:
        dist.destroy_process_group()


def state() -> list[Any]:
    return [
        dict(os.environ),
        dist.get_debug_level().name,
        str(torch.get_default_dtype()),
        torch.get_num_threads(),
        dist.is_initialized(),
    ]


def test_what_tests_change_is_put_back(ranks, tmp_path: Path):
    before = ranks.ranks(2).run(state)
    for number, name in enumerate(("test_ddp_logging_data_cpu", "test_all_gather_object_subgroup")):
        directory = tmp_path / str(number)
        directory.mkdir()
        assert ranks.run(name, "ringcoll", 2, directory) == {PASSED}
    assert ranks.ranks(2).run(state) == before


def test_skips_are_told_from_passing_and_from_failing(ranks):
    assert ranks.ranks(2).run(outcomes_of_skips) == 2 * [
        ["skipped: by exception", "skipped: Skipped due to small world size.", PASSED]
    ]
    with pytest.raises(RankError, match="AssertionError: the test ends its process with 10"):
        ranks.ranks(2).run(ending)


def test_a_native_collective_is_seen(ranks):
    assert ranks.ranks(2).run(with_a_native_collective, 0, False) == [None, None]
    with pytest.raises(RankError, match="has run 2 operations, of which 1 are"):
        ranks.ranks(2).run(with_a_native_collective, 1, True)
