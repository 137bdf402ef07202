"""What a transport has to do with CUDA tensors, on a GPU, which ranks may share."""

from __future__ import annotations

import threading

import pytest
import torch

from ringcoll.runtime.launch import Ranks
from ringcoll.runtime.transport import Hub, StagedTransport
from tests.cases.optional import optional
from tests.programs.real_cuda import ON_GPU, Busy, gpu
from tests.programs.transports import CONFORMANCE, conforms

pytestmark = pytest.mark.gpu


@pytest.mark.processes
@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("transport", [optional(name) for name in ON_GPU])
def test_between_processes(pool, transport: str, name: str, world_size: int):
    ranks: Ranks = pool(world_size)
    assert ranks.run(conforms, transport, name) == [""] * world_size


@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("how", ["local", "staged"])
def test_between_threads(how: str, name: str, world_size: int):
    found = ["not done"] * world_size
    ends = [
        Busy(StagedTransport(end, gpu(0), segment_bytes=10_007) if how == "staged" else end, gpu(0))
        for end in Hub(world_size).transports()
    ]

    def main(rank: int) -> None:
        ends[rank].connect(10)
        with torch.cuda.stream(torch.cuda.Stream(gpu(0))):
            found[rank] = CONFORMANCE[name](ends[rank])

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [""] * world_size


@pytest.mark.gpu(count=2)
def test_the_device_that_is_kept_busy_is_that_of_the_messages():
    """So the tests above would fail if a transport did not wait for it."""
    ends = [Busy(end, torch.device("cuda", 1)) for end in Hub(1).transports()]
    torch.cuda.synchronize(1)
    with torch.cuda.device(0):
        ends[0].connect(10)
        ends[0].bind([], [])(0)
    assert not torch.cuda.current_stream(1).query()
