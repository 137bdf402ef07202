"""Streams, futures and graphs on a true GPU, which is kept busy so that a missing wait shows."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup
from ringcoll.errors import CaptureError
from ringcoll.runtime.collectives import groups
from ringcoll.runtime.transport import NcclTransport
from ringcoll.training.backend import process_group as backend
from tests.programs.stream_program import expected_results, stream_program

pytestmark = pytest.mark.gpu

_BUSY_CYCLES = 20_000_000  # some 10 ms


class Busy:
    """``torch.cuda``, with streams that are late."""

    stream = staticmethod(torch.cuda.stream)

    def Stream(self) -> torch.cuda.Stream:  # noqa: N802
        return torch.cuda.Stream()

    def current_stream(self) -> torch.cuda.Stream:
        torch.cuda._sleep(_BUSY_CYCLES)
        return torch.cuda.current_stream()

    def looked_after(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_everything_is_ordered(world_size: int):
    def main(group: LocalGroup) -> list[Any]:
        stream = torch.cuda.Stream()
        with torch.device("cuda", 0), torch.cuda.stream(stream):
            return stream_program(group, Busy())

    assert ringcoll.run_threads(main, world_size) == [expected_results(world_size)] * world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_future_is_ordered(world_size: int):
    def main(group: LocalGroup) -> list[float]:
        with torch.cuda.stream(torch.cuda.Stream()):
            tensor = torch.zeros(1000, device="cuda:0")
            torch.cuda._sleep(_BUSY_CYCLES)
            tensor += 1
            work = ringcoll.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            doubled = work.get_future().then(lambda done: done.value()[0] * 2)
            found: list[float] = doubled.wait().unique().tolist()
            return found

    assert ringcoll.run_threads(main, world_size) == [[2.0 * world_size]] * world_size


def test_over_threads_nothing_is_captured():
    def main(group: LocalGroup) -> None:
        tensor = torch.ones(10, device="cuda:0")
        ringcoll.all_reduce(tensor, group=group)
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor += 1  # torch warns of an empty graph
            with pytest.raises(CaptureError):
                ringcoll.all_reduce(tensor, group=group)
        ringcoll.all_reduce(tensor, group=group)

    ringcoll.run_threads(main, 1)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL")
def test_a_rank_alone_over_nccl():
    """It sends nothing; but it connects, compares, and works in streams and in a graph."""
    group = backend.ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=60))
    ringcoll.use(group, cuda_transport="nccl")
    strided = torch.zeros(1000, 2, device="cuda:0")[:, 1]
    factor = ringcoll.premul_sum(2.0)

    def both() -> None:
        ringcoll.all_reduce(strided, factor, group=group)
        work = ringcoll.all_reduce(strided, factor, group=group, async_op=True)
        assert work is not None
        work.wait()

    assert isinstance(groups.communicator(group, strided.device).transport, NcclTransport)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        strided += 1
        with pytest.raises(CaptureError, match="Run it once before"):
            both()
    strided.fill_(1)
    both()
    assert strided.unique().tolist() == [4.0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    strided.fill_(3)
    graph.replay()
    ringcoll.all_reduce(strided, group=group)  # between replays
    graph.replay()
    assert strided.unique().tolist() == [48.0]
    assert not [one for one in threading.enumerate() if one.name.startswith("ringcoll-0")]
    ringcoll.close(group)
