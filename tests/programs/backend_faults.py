"""Faults under ``init_process_group("ringcoll")``: functions that run on its ranks."""

# No postponed annotations: torch looks at those of hooks.
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard

from ringcoll.runtime.launch import report
from tests.programs.faults import catch

__all__ = ["HOOKS", "TRAINERS"]


class _Deadly(torch.autograd.Function):
    """The identity, whose backward ends the process."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 8))


def _ddp(**options: Any) -> nn.Module:
    # So small that there are several buckets.
    return nn.parallel.DistributedDataParallel(_model(), bucket_cap_mb=0.01, **options)


def _ddp_with_hook() -> nn.Module:
    model: Any = _ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return nn.Sequential(model)


def _fsdp2() -> nn.Module:
    model: Any = _model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model  # type: ignore[no-any-return]


TRAINERS: dict[str, Callable[[], nn.Module]] = {
    "ddp": _ddp,
    "ddp, unused parameters": lambda: _ddp(find_unused_parameters=True),
    "ddp, hook": _ddp_with_hook,
    "fsdp2": _fsdp2,
}


def train_until_death(trainer: str, dying: int) -> None:
    """Train; in the third step one rank dies in the middle of its backward pass."""
    rank = dist.get_rank()
    model = TRAINERS[trainer]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for step in range(5):
            optimizer.zero_grad()
            batch = torch.full((4, 64), float(rank + step), requires_grad=True)
            output = model(batch)
            if rank == dying and step == 2:
                output = _Deadly.apply(output)
            output.square().mean().backward()
            optimizer.step()

    caught = catch(steps)
    caught.next_kind = catch(dist.barrier).kind
    report((rank, caught))


def die_while_nobody_waits(dying: int) -> None:
    """Nobody waits for the operation in which a rank is lost, but the next one says so."""
    rank = dist.get_rank()
    logged: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record.getMessage())

    logging.getLogger("ringcoll").addHandler(Handler())
    dist.barrier()
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1000), async_op=True)
    deadline = time.monotonic() + 10
    while not logged and time.monotonic() < deadline:
        time.sleep(0.01)
    caught = catch(lambda: dist.broadcast(torch.ones(3), 0))
    caught.theirs = "\n".join(logged)
    report((rank, caught))


def die_while_receiving(dying: int) -> None:
    """The user's own receive, from the rank that dies."""
    dist.barrier()
    if dist.get_rank() == dying:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    report((dist.get_rank(), catch(lambda: dist.recv(torch.empty(4), dying, tag=7))))


# --- callbacks ------------------------------------------------------------------------


def _raising(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)

    def callback(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        raise ArithmeticError("no gradients today")

    future: torch.futures.Future[Tensor] = work.get_future().then(callback)
    return future


def _blocking(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Rounds in two steps, as PowerSGD does: the second collective is run by the callback."""
    work = dist.all_reduce(bucket.buffer().zero_(), async_op=True)

    def callback(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        (tensor,) = future.value()
        second = torch.full_like(tensor, dist.get_rank() + 1)
        dist.all_reduce(second)
        again = dist.all_reduce(second, async_op=True).get_future().wait()
        return tensor.copy_(again[0])

    future: torch.futures.Future[Tensor] = work.get_future().then(callback)
    return future


HOOKS = {"raises": _raising, "blocks": _blocking}


def hooked_step(hook: str) -> Any:
    """One step of DDP, with one bucket and a hook; what was raised, or the gradients."""
    model: Any = nn.parallel.DistributedDataParallel(_model())
    model.register_comm_hook(None, HOOKS[hook])
    batch = torch.full((4, 64), float(dist.get_rank()))
    caught = catch(lambda: model(batch).square().mean().backward())
    tensor = torch.ones(3)
    dist.all_reduce(tensor)  # the group works
    assert tensor.tolist() == [dist.get_world_size()] * 3
    if caught.kind:
        return caught
    return {float(value) for parameter in model.parameters() for value in parameter.grad.unique()}


def power_sgd() -> list[float]:
    """The largest difference between ranks after steps of PowerSGD, one bucket."""
    model: Any = nn.parallel.DistributedDataParallel(_model())
    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        seed = torch.Generator().manual_seed(10 * step + dist.get_rank())
        batch = torch.randn(16, 64, generator=seed)
        model(batch).square().mean().backward()
        optimizer.step()
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    return [float((other - flat).abs().max()) for other in others]


# --- time limits ----------------------------------------------------------------------


def _fresh(limit_s: float) -> Any:
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    dist.barrier(group)
    return group


def time_limits() -> dict[str, Any]:
    """Time limits of 1 s, given in every way there is: what the others meet when the last rank does not come.

    Each has a group and a thread of its own, so that they wait at once.
    """
    short = timedelta(seconds=1)

    def reduce(group: Any) -> None:
        dist.all_reduce(torch.ones(3), group=group)

    def options(group: Any) -> None:
        given = dist.AllreduceOptions()
        given.timeout = short
        group.allreduce([torch.ones(3)], given).wait()

    def wait(group: Any) -> None:
        dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(short)

    ways: dict[str, tuple[Callable[[Any], Any], Any]] = {
        "options": (options, _fresh(60)),
        "wait": (wait, _fresh(60)),
        "set_timeout": (reduce, _fresh(60)),
        "_set_pg_timeout": (reduce, _fresh(60)),
        "barrier": (lambda group: dist.barrier(group, timeout=short), _fresh(60)),
        "new_group": (reduce, _fresh(1)),
    }
    ways["set_timeout"][1].set_timeout(short)
    dist.distributed_c10d._set_pg_timeout(short, ways["_set_pg_timeout"][1])
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(3.0)
        return dict.fromkeys(ways)
    with ThreadPoolExecutor(len(ways)) as executor:
        begun = {
            how: executor.submit(catch, partial(function, group))
            for how, (function, group) in ways.items()
        }
    return {how: caught.result() for how, caught in begun.items()}


# --- order ----------------------------------------------------------------------------


def many_at_once(count: int) -> tuple[bool, int, int]:
    """Issue many operations; whether they end in order, wrong results, threads at most."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors = [torch.tensor([float(index + rank)]) for index in range(count)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    in_order, threads, done = True, 0, 0
    while done < count:
        time.sleep(0.02)
        states = [work.is_completed() for work in works]
        reached = states.index(False) if False in states else count
        # Those seen a moment later may be complete as well, but never with a gap.
        in_order &= states[reached:].count(True) == 0 or works[reached].is_completed()
        threads = max(threads, threading.active_count())
        done = reached
    step = sum(range(world_size))
    wrong = sum(tensor.item() != world_size * index + step for index, tensor in enumerate(tensors))
    return in_order, wrong, threads
