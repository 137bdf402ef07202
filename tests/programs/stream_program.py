"""A program whose results are right only if streams wait for each other as they should."""

from __future__ import annotations

import time
from typing import Any

import torch

import ringcoll
from ringcoll import Work

__all__ = ["expected_results", "stream_program"]


def _begun(work: Work | None) -> Work:
    assert work is not None
    return work


def stream_program(group: Any, cuda: Any) -> list[float]:
    """Operations of many kinds, from two streams, with the caller's own work in between.

    Parameters
    ----------
    group
        The ranks.
    cuda
        A `tests.fakes.fake_streams.FakeCuda`, or the true thing with the same methods.
    """
    rank, size, found = group.rank(), group.size(), []
    other = cuda.Stream()
    for numel in (3, 40, 1000):
        # On the caller's stream.
        tensor = torch.full((numel,), float(rank))
        ringcoll.all_reduce(tensor, group=group, algorithm="ring")
        found.append(tensor[0].item())
        # Aside, while the caller goes on with something else.
        tensor = torch.full((numel,), float(rank))
        apart = torch.zeros(numel)
        work = _begun(ringcoll.all_reduce(tensor, group=group, async_op=True, algorithm="ring"))
        apart.add_(1)
        work.wait()
        found.append(tensor[-1].item())
        # With copies in another dtype.
        tensor = torch.full((numel,), float(rank), dtype=torch.bfloat16)
        work = _begun(
            ringcoll.all_reduce(
                tensor, group=group, async_op=True, algorithm="ring", wire_dtype=torch.bfloat16
            )
        )
        work.wait()
        found.append(tensor[-1].item())
        # The next one at once, on another stream, where the last has left its memory.
        tensor = torch.full((numel,), float(rank))
        work = _begun(
            ringcoll.all_reduce(tensor, group=group, async_op=True, algorithm="recursive_doubling")
        )
        while numel == 40 and not work.done:  # then the next does not need the group's thread
            time.sleep(0.01)
        other.wait_event(cuda.current_stream().record_event())
        with cuda.stream(other):
            second = torch.full((numel,), float(rank))
            ringcoll.all_reduce(second, group=group, algorithm="recursive_doubling")
            found.append(second[-1].item())
            gathered = torch.empty(size * 2)
            ringcoll.all_gather_single(gathered, torch.full((2,), float(rank)), group=group)
            found.append(gathered.sum().item())
            strided = cuda.looked_after(torch.zeros(numel, 2))[:, 0]
            strided.fill_(rank)
            two = _begun(
                ringcoll.all_reduce_coalesced(
                    [strided, torch.full((2,), rank)], group=group, async_op=True
                )
            )
        work.wait()
        found.append(tensor[0].item())
        two.wait()
        found.append(strided[0].item())
    return found


def expected_results(size: int) -> list[float]:
    """What it returns on every one of so many ranks."""
    total = size * (size - 1) / 2
    return [total, total, total, total, 2 * total, total, total] * 3
