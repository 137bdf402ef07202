"""Functions for ranks: the same calls with the interpreter in C, with Python, and with both in one group."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives import communicator
from ringcoll.runtime.transport import SHORT, Message, compiled

__all__ = ["after_a_strange_message", "in_a_row", "maxima", "moving", "random_calls"]

_CPU = torch.device("cpu")
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.bool),
)
_OPERATORS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
_NUMELS = (0, 1, 2, 3, 255, 1000, 4096, 9000, 9216, 30_000, 65_536, 100_001, 300_000, 700_003)
_ALGORITHMS = (
    "auto",
    "ring",
    "recursive_doubling",
    "rabenseifner",
    "two_shot",
    "double_tree",
    "direct",
)


def with_interpreter(name: str) -> None:
    """Let groups that are made from now on use an interpreter."""
    os.environ["RINGCOLL_INTERPRETER"] = name
    compiled.cache_clear()


def random_bits(random: Random, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits: also NaN, infinities, -0.0, and the largest numbers."""
    generator = torch.Generator().manual_seed(random.randrange(1 << 40))
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    nbytes = numel * dtype.itemsize
    raw = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype) if numel else torch.empty(0, dtype=dtype)


def digest(tensor: torch.Tensor) -> int:
    """A number that is the same for the same bits; all NaNs count as one, as their bits mean nothing."""
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    elif tensor.is_complex():
        return digest(torch.view_as_real(tensor))
    return zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def random_calls(interpreters: list[str], seed: int, rounds: int) -> tuple[list[Any], int]:
    """Digests of the results of random calls, and how many operations had a program that was interpreted."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with_interpreter(interpreters[rank])
    group: Any = dist.new_group()
    common, digests = Random(seed), list[Any]()
    for _ in range(rounds):
        dtype, operator = common.choice(_DTYPES), common.choice(_OPERATORS)
        numel, algorithm = common.choice(_NUMELS), common.choice(_ALGORITHMS)
        kind, prepared = (
            common.choice(["all_reduce", "all_gather", "broadcast", "all_to_all"]),
            common.random() < 0.5,
        )
        segment_bytes = common.choice([None, None, 1 << 16, 1 << 18])
        own = Random(seed * 1000 + rank)
        if kind == "all_reduce":
            tensors = [random_bits(own, numel, dtype)]
            function: Any = ringcoll.all_reduce
            arguments: tuple[Any, ...] = (*tensors, operator)
            options = {"algorithm": algorithm, "segment_bytes": segment_bytes}
        elif kind == "broadcast":
            tensors = [random_bits(own, numel, dtype)]
            function, arguments, options = (
                ringcoll.broadcast,
                (*tensors, 0),
                {"segment_bytes": segment_bytes},
            )
        else:
            part = random_bits(own, numel, dtype)
            whole = random_bits(own, numel * size, dtype)
            names = (ringcoll.all_gather_into_tensor, ringcoll.all_to_all_single)
            function = names[kind == "all_to_all"]
            arguments = (torch.zeros_like(whole), whole if kind == "all_to_all" else part)
            tensors, options = [arguments[0]], {}
        before = [tensor.clone() for tensor in tensors]
        try:
            call = function.plan(*arguments, group=group, **options) if prepared else None
            for _ in range(6):
                for tensor, first in zip(tensors, before, strict=True):
                    tensor.copy_(first)
                call() if call is not None else function(*arguments, group=group, **options)
                digests.append(
                    (kind, str(dtype), operator, numel, [digest(tensor) for tensor in tensors])
                )
        except ArgumentError as error:  # on all ranks alike
            digests.append(type(error).__name__)
    member = communicator(group, _CPU)
    bound = [
        binding
        for operation in member.operations.values()
        for binding in operation.bindings.values()
    ]
    num_interpreted = sum(binding.program.interpreted is not None for binding in bound)
    dist.destroy_process_group(group)
    return digests, num_interpreted


def _counted(function: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        counts.append(1)
        return function(*arguments)

    return counted


def after_a_strange_message(nbytes: int, lent: bool) -> list[str]:
    """A message that nobody has asked for lies before those of a call, and is asked for afterwards."""
    rank, wrong = dist.get_rank(), list[str]()
    with_interpreter("c")
    group: Any = dist.new_group()
    strange = (torch.arange(nbytes) * 7 + rank).to(torch.uint8)
    handed_over = 0
    for numel in (3, 20_000, 500_000):
        tensor = torch.arange(float(numel)) + rank
        call = ringcoll.all_reduce.plan(tensor, group=group, algorithm="ring")
        call()
        member = communicator(group, _CPU)
        transport: Any = member.transport
        operation: Any = call.operation
        (binding,) = operation.bindings.values()
        interpreted: Any = binding.program.interpreted
        counts = list[int]()
        interpreted._handles = _counted(interpreted._handles, counts)
        for turn in range(4):
            tensor.copy_(torch.arange(float(numel)) + rank)
            dist.barrier()
            sent: list[Any] = []
            if rank == 0 and turn != 3:
                sent = transport.post([], [Message(1, strange, 77)])
            call()
            if not torch.equal(tensor, 2 * torch.arange(float(numel)) + 1):
                wrong.append(f"{numel}, turn {turn}: {tensor[:3]}")
            if rank == 1 and turn != 3:
                into = torch.zeros(nbytes, dtype=torch.uint8)
                (handle,) = transport.post([Message(0, into, 77, lent)], [])
                transport.wait(handle, 20.0)
                came = into
                if lent and nbytes > SHORT:
                    view = transport.view(handle, torch.uint8)
                    came = into if view is None else view.clone()
                    if view is None:
                        transport.read(handle, 0, into)
                    transport.release(handle)
                if not torch.equal(came, (torch.arange(nbytes) * 7).to(torch.uint8)):
                    wrong.append(f"{numel}, turn {turn}: the message, {came[:3]}")
            for handle in sent:
                transport.wait(handle, 20.0)
        handed_over += len(counts)
    if rank == 1 and not handed_over:
        wrong.append("Python never had to go on")
    dist.destroy_process_group(group)
    return wrong


def maxima() -> list[bool]:
    """Prepared calls that Python has a part in, each between two instructions of the interpreter's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with_interpreter("c")
    group: Any = dist.new_group()
    right = []
    for algorithm in ("two_shot", "ring", "recursive_doubling", "direct"):
        tensor = torch.empty(1000)
        call = ringcoll.all_reduce.plan(tensor, "max", group=group, algorithm=algorithm)
        for turn in range(6):
            tensor.copy_(torch.arange(1000.0) * (1 if rank == turn % size else -1))
            call()
            right.append(torch.equal(tensor, torch.arange(1000.0)))
    dist.destroy_process_group(group)
    return right


def moving(rounds: int) -> list[str]:
    """Tensors at more places than bindings are kept for, which come back; and one whose memory moves."""
    rank, size, wrong = dist.get_rank(), dist.get_world_size(), list[str]()
    with_interpreter("c")
    group: Any = dist.new_group()
    places = [torch.zeros(50) for _ in range(rounds)]
    for turn, place in enumerate([*places, *places[::3], *places[:5] * 4]):
        for _ in range(6):
            place.fill_(rank + turn)
            ringcoll.all_reduce(place, group=group)
            if place[-1].item() != size * turn + size * (size - 1) / 2:
                wrong.append(f"{turn}: {place[-1]}")
        if turn % 40 == 39:  # which needs more memory, so that all bindings are let go
            ringcoll.all_reduce(torch.ones(1000 * turn), group=group, algorithm="ring")
    tensor = torch.zeros(20_000)
    call = ringcoll.all_reduce.plan(tensor, group=group)
    for turn in range(20):
        if turn == 10:
            tensor.share_memory_()
        tensor.fill_(rank + turn)
        call()
        if tensor[7].item() != size * turn + size * (size - 1) / 2:
            wrong.append(f"moved, {turn}: {tensor[7]}")
    if call.quick is None:
        wrong.append("the call was never made as a whole")
    dist.destroy_process_group(group)
    return wrong


def in_a_row() -> dict[str, Any]:
    """Whole calls, and what is counted and remembered of them; what keeps them from being made so."""
    size = dist.get_world_size()
    with_interpreter("c")
    group: Any = dist.new_group()
    one, two = torch.ones(2), torch.ones(3)
    calls = [ringcoll.all_reduce.plan(tensor, group=group) for tensor in (one, two)]
    for call in calls:
        call(), call()
    member = communicator(group, _CPU)
    made = [call.quick is not None for call in calls]
    ran = list[int]()
    member._perform = _counted(member._perform, ran)  # type: ignore[method-assign]
    before = member.num_issued, member.nbytes_sent
    for _ in range(5):
        for call in calls:
            call()
    after = member.num_issued - before[0], (member.nbytes_sent - before[1]) // 5
    runs = [words.name for _, words in tuple(member.progress._runs)[-4:] if words is not None]
    about: dict[str, Any] = {
        "made": made,
        "counted": after,
        "runs": runs,
        "last": member.progress.last[0],
    }
    about["issued"], about["right"] = member.num_issued, one[0].item() == float(size**7)
    ran.clear()
    with torch.autograd.profiler.profile() as seen:
        calls[0]()
    about["profiled"] = (
        len(ran),
        any("ringcoll:all_reduce" in event.name for event in seen.function_events),
    )
    ran.clear()
    member.tracer = SimpleNamespace(
        begin=lambda *_: None, end=lambda: None, traced=lambda operation, binding, tag: binding
    )
    calls[0]()
    member.tracer = None
    about["traced"] = len(ran)
    ran.clear()
    storage = one.untyped_storage()
    storage.resize_(0)
    try:
        calls[0]()
    except ArgumentError as error:
        about["freed"] = str(error)
    about["others"] = _ends(calls[1])
    ringcoll.close(group)
    about["closed"] = _ends(calls[1])
    return about


def _ends(call: Any) -> str:
    try:
        call()
    except ringcoll.errors.RingcollError as error:
        return type(error).__name__
    return "done"
