"""Collectives on real processes that may share a GPU, over UCX and by way of host memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from ringcoll.runtime.launch import Ranks
from tests.cases.batches import Batch, batches, check_batch
from tests.cases.calls import STYLES
from tests.cases.effort import effort
from tests.cases.optional import optional
from tests.programs.on_device import (
    CHECKS,
    HOST_CHECKS,
    check_on_rank,
    losses_of_all_data,
    losses_of_rank,
)

pytestmark = pytest.mark.processes

gpu = pytest.mark.gpu
TRANSPORTS = [optional(name) for name in ("gloo", "ucx")]


def ranks_for(pool: Any, world_size: int, device: str, name: str, backend: str = "gloo") -> Ranks:
    """Ranks whose tensors of a device travel by a transport."""
    given: dict[str, str] = {"cuda_transport" if device == "cuda" else "transport": name}
    found: Ranks = pool(world_size, backend, **given)
    return found


@pytest.fixture(params=[("cpu", 2), *(pytest.param(("cuda", k), marks=gpu) for k in (2, 3, 4))])
def where(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The device of the tensors, and how many ranks there are."""
    device, world_size = request.param
    if device == "cuda":
        request.getfixturevalue("compiled")
    return device, world_size


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_batches_of_calls_on_several_groups(pool, where: tuple[str, int], transport: str):
    device, world_size = where
    ranks = ranks_for(pool, world_size, device, transport)

    @effort(25 if device == "cuda" else 5, shrink=False)
    @given(batches(world_size, STYLES, device))
    def tried(batch: Batch) -> None:
        check_batch(ranks, batch, native=False)

    tried()


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_checks(pool, where: tuple[str, int], transport: str, name: str):
    device, world_size = where
    ranks = ranks_for(pool, world_size, device, transport)
    assert ranks.run(check_on_rank, name, device) == [[]] * world_size


@gpu
@pytest.mark.parametrize("name", HOST_CHECKS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_checks_of_transports_by_the_host(pool, compiled, transport: str, name: str):
    ranks = ranks_for(pool, 2, "cuda", transport)
    assert ranks.run(check_on_rank, name, "cuda") == [[]] * 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_training_is_that_of_one_process_with_all_data(pool, device: str, transport: str):
    """torch's DistributedDataParallel, on the library's backend."""
    ranks = ranks_for(pool, 2, device, transport, "ringcoll")
    losses = ranks.run(losses_of_rank, device)
    means = [sum(step) / 2 for step in zip(*losses, strict=True)]
    (whole, _) = ranks.run(losses_of_all_data, 2, device)
    # Sums of float64 in another order; each step is made of some hundred of them.
    assert means == pytest.approx(whole, rel=1e-10)
    assert losses[0] != losses[1]
    assert means[0] > means[-1]
