"""Memory that can only be read: a file that is mapped for reading.

What a collective only reads may lie there, also as the place of a result that the rank has already.
Where memory has to be written, the call is refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError
from tests.cases.optional import optional
from tests.programs.read_only import (
    RUNS,
    K,
    check_calls,
    check_messages,
    every_other,
    on_read_only_memory,
    read_only,
)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["blocking", "asynchronous", "prepared", "strided"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8])
def test_what_is_only_read_may_be_read_only(dtype: torch.dtype, way: str) -> None:
    def main(group: LocalGroup) -> None:
        for numel in (4, 30_000):
            check_calls(group, group.rank(), numel, dtype, way)
        check_messages(group.rank(), group)

    run_threads(main, K)


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared", "gloo", optional("ucx")])
def test_what_is_only_read_may_be_read_only_over_every_transport(pool, transport: str) -> None:
    pool(K, transport=transport).run(on_read_only_memory)


def like(odd: Tensor) -> Tensor:
    return torch.zeros(odd.shape)


Function = Callable[[LocalGroup, Any], object]
# By the argument, and how it is called, with memory that would be written on both ranks.
WRITTEN: dict[tuple[str, str], Function] = {
    ("tensor", "all_reduce"): lambda group, odd: ringcoll.all_reduce(odd, group=group),
    ("tensor", "async"): lambda group, odd: ringcoll.all_reduce(odd, "sum", group, True),
    ("tensor", "prepared"): lambda group, odd: ringcoll.all_reduce.plan(odd, group=group),
    ("out", "all_reduce"): lambda group, odd: ringcoll.all_reduce(like(odd), group=group, out=odd),
    ("tensors", "coalesced"): lambda group, odd: ringcoll.all_reduce_coalesced(
        [like(odd), odd], group=group
    ),
    ("tensor_list", "all_gather"): lambda group, odd: ringcoll.all_gather(
        [like(odd), odd], like(odd), group
    ),
    ("output_tensor", "all_gather_single"): lambda group, odd: ringcoll.all_gather_single(
        odd, like(odd[::2]), group
    ),
    ("output", "reduce_scatter"): lambda group, odd: ringcoll.reduce_scatter(
        odd, [like(odd), like(odd)], group=group
    ),
    ("output_tensor_list", "all_to_all"): lambda group, odd: ringcoll.all_to_all(
        [odd, like(odd)], [like(odd), like(odd)], group
    ),
    ("tensor", "scan"): lambda group, odd: ringcoll.scan(odd, group=group),
}


@pytest.mark.parametrize("numel", [4, 30_000])
@pytest.mark.parametrize("make", [read_only, every_other])
def test_memory_that_has_to_be_written_and_cannot_be_is_refused(
    make: Callable[[Tensor], Tensor], numel: int
) -> None:
    def main(group: LocalGroup) -> None:
        values = torch.full((numel,), group.rank() + 1.0)
        for (argument, _), function in WRITTEN.items():
            odd = make(values)
            with pytest.raises(ArgumentError, match="would be written") as caught:
                function(group, odd)
            assert (caught.value.rank, caught.value.argument) == (group.rank(), argument)
            assert odd.eq(values).all()
            value = values.clone()
            ringcoll.all_reduce(value, group=group)
            assert value.eq(3.0).all()
        # Such a call was seen before, with other memory.
        for _ in range(RUNS):
            ringcoll.all_reduce(values.clone(), group=group)
        with pytest.raises(ArgumentError, match="would be written"):
            ringcoll.all_reduce(make(values), group=group)

    run_threads(main, K)


def test_a_receive_into_it_is_refused() -> None:
    def main(group: LocalGroup) -> None:
        with pytest.raises(ArgumentError, match="would be written"):
            group.irecv(read_only(torch.zeros(4)), 1 - group.rank())

    run_threads(main, K)
