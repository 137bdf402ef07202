"""Every collective on memory that can only be read, wherever it is only read."""

from __future__ import annotations

import mmap
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll

K, ROOT = 2, 1
RUNS = 5  # until the places of the tensors are known
Give = Callable[[Tensor], Tensor]


def read_only(tensor: Tensor) -> Tensor:
    """A copy of a tensor in a file that is mapped for reading."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        memory = mmap.mmap(file.fileno(), len(data), access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what is tried here
        return torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)


def every_other(tensor: Tensor) -> Tensor:
    """A copy of a vector in every other element of such memory."""
    return read_only(torch.stack([tensor, tensor], -1)).unbind(-1)[0]


def check_calls(group: Any, rank: int, numel: int, dtype: torch.dtype, way: str) -> None:
    """Make every call several times, ``way`` is blocking, asynchronous, prepared or strided."""
    give: Give = every_other if way == "strided" else read_only

    def of(peer: int, block: int = 0) -> Tensor:
        """The data of a rank: small whole numbers, exact in every dtype."""
        return (torch.arange(numel) % 5 + 3 * peer + 7 * block).to(dtype)

    def new(rows: int = 1) -> Tensor:
        return torch.zeros(rows * numel, dtype=dtype)

    def check(
        name: str, arguments: list[Any], results: dict[Tensor, Tensor], **options: Any
    ) -> None:
        function: Any = getattr(ringcoll, name)
        call = function.plan(*arguments, group=group, **options) if way == "prepared" else None
        for _ in range(RUNS):
            if call is not None:
                call()
            elif way == "asynchronous":
                function(*arguments, group=group, async_op=True, **options).wait()
            else:
                function(*arguments, group=group, **options)
            for output, expected in results.items():
                assert torch.equal(output, expected), (name, way, output, expected)

    is_root, block_sums = rank == ROOT, of(0, rank) + of(1, rank)
    one, total = give(of(rank)), of(0) + of(1)
    rows = [give(of(rank, block)) for block in range(K)]
    joined = give(torch.cat([of(rank, block) for block in range(K)]))
    inputs, columns = [of(0), of(1)], [of(peer, rank) for peer in range(K)]

    def at_root(tensors: list[Tensor]) -> list[Tensor] | None:
        return tensors if is_root else None

    def in_place(own: Tensor) -> list[Tensor]:
        """Where a rank has its own part already."""
        return [own if peer == rank else new() for peer in range(K)]

    def pairs(outputs: list[Tensor], expected: list[Tensor]) -> dict[Tensor, Tensor]:
        return dict(zip(outputs, expected, strict=True))

    sent = one if is_root else new()
    check("broadcast", [sent, ROOT], {sent: of(ROOT)})
    for part in (new(), rows[rank] if is_root else new()):
        check("scatter", [part, at_root(rows), ROOT], {part: of(ROOT, rank)})
    for outputs in ([new(), new()], in_place(one)):
        check("all_gather", [outputs, one], pairs(outputs, inputs))
        results = pairs(outputs, inputs) if is_root else {}
        check("gather", [one, at_root(outputs), ROOT], results)
    for outputs in ([new(), new()], in_place(rows[rank])):
        check("all_to_all", [outputs, rows], pairs(outputs, columns))
    out, whole = new(), new(K)
    check("all_gather_single", [whole, one], {whole: torch.cat(inputs)})
    check("all_to_all_single", [whole, joined], {whole: torch.cat(columns)})
    check("reduce_scatter", [out, rows], {out: block_sums})
    check("reduce_scatter_single", [out, joined], {out: block_sums})
    check("all_reduce", [one], {out: total, one: of(rank)}, out=out)
    check("scan", [one], {out: sum(inputs[: rank + 1], start=new()), one: of(rank)}, out=out)
    if is_root:
        check("reduce", [one, ROOT], {out: total}, out=out)
    else:
        check("reduce", [one, ROOT], {one: of(rank)})
    own = new() if rank else one  # rank 0 has no result
    for _ in range(RUNS):
        if rank:
            own.copy_(of(rank))
        ringcoll.exscan(own, group=group)
        assert torch.equal(own, of(0))
    outputs = in_place(one)
    check("all_gather_coalesced", [[[each] for each in outputs], [one]], pairs(outputs, inputs))


def check_messages(rank: int, messages: Any) -> None:
    """Send from such memory by ``isend`` and ``irecv`` of a group, or of torch."""
    values = torch.arange(5.0) + 10 * rank
    for tensor in (read_only(values), read_only(values.repeat(9000))):
        got = torch.zeros_like(tensor)
        for work in (messages.irecv(got, 1 - rank), messages.isend(tensor, 1 - rank)):
            work.wait()
        assert torch.equal(got, tensor + 10 * (1 - 2 * rank))


def on_read_only_memory() -> None:
    """All of this on a rank of a pool, in the default group."""
    rank = dist.get_rank()
    for numel in (4, 3000, 150_000):
        for way in ("blocking", "asynchronous", "prepared", "strided"):
            check_calls(None, rank, numel, torch.float32, way)
    check_messages(rank, dist)
