"""Training out of lock-step, on the ranks of a group and simulated in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.launch import report
from ringcoll.training import (
    Gossip,
    LocalSGD,
    Messages,
    ParameterServer,
    ServerWorker,
    mixing_matrix,
)
from tests.programs.faults import Caught, catch

__all__ = ["REFERENCES", "TRAINERS", "close", "initial", "loss_on_all"]

INPUTS, OUTPUTS, BATCH, EVERY = 5, 3, 4, 3
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
_TRUTH = torch.linspace(-1, 1, INPUTS * OUTPUTS, dtype=torch.float64).view(INPUTS, OUTPUTS)


def initial(rank: int) -> nn.Sequential:
    """A model in float64 with a frozen layer; another one on each rank."""
    layers = nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, OUTPUTS)
    layers[2].requires_grad_(requires_grad=False)
    module = nn.Sequential(*layers).double()
    generator = torch.Generator().manual_seed(rank)  # torch's own is shared by the threads
    with torch.no_grad():
        for param in module.parameters():
            param.uniform_(-0.4, 0.4, generator=generator)
    return module


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def flat(module: nn.Module) -> Tensor:
    return parameters_to_vector(trainable(module)).detach().clone()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Data that differ by rank and step, and that a linear map explains."""
    generator = torch.Generator().manual_seed(1 + rank + 1000 * step)
    inputs = torch.randn(BATCH, INPUTS, generator=generator, dtype=torch.float64)
    return inputs, (inputs @ _TRUTH).sin()


def backward(module: nn.Module, rank: int, step: int) -> None:
    module.zero_grad()
    inputs, targets = batch(rank, step)
    torch.autograd.backward(nn.functional.mse_loss(module(inputs), targets))


def loss_on_all(params: Tensor, world_size: int) -> float:
    """The loss of trained parameters on the first batches of all ranks."""
    module = initial(0)
    vector_to_parameters(params, trainable(module))
    batches = [batch(rank, step) for rank in range(world_size) for step in range(20)]
    inputs, targets = (torch.cat(column) for column in zip(*batches, strict=True))
    return float(nn.functional.mse_loss(module(inputs), targets).detach())


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(trainable(module), lr=0.1, momentum=0.5)


def close(ours: Tensor, expected: Tensor) -> bool:
    """Equal but for rounding, at most 1e-10 of the largest parameter."""
    return float((ours - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


# --- on the ranks of a group ----------------------------------------------------------


def on_rank(
    make: Callable[[nn.Module, Any], Callable[[], object]], group: Any, steps: int
) -> Tensor:
    """Train, and return this rank's parameters; ``make`` says what follows the optimizer's step."""
    rank = as_group(group).rank()
    module = initial(rank)
    after_step = make(module, group)
    optimizer = sgd(module)
    for step in range(steps):
        backward(module, rank, step)
        optimizer.step()
        after_step()
    return flat(module)


def with_gossip(graph: str) -> Callable[[Any, int], Tensor]:
    return lambda group, steps: on_rank(lambda m, g: Gossip(m, g, graph).mix, group, steps)


def with_local_sgd(group: Any, steps: int) -> Tensor:
    return on_rank(lambda m, g: LocalSGD(m, g, every=EVERY).step, group, steps)


def with_outer(group: Any, steps: int) -> Tensor:
    def make(module: nn.Module, group: Any) -> Callable[[], object]:
        outer = partial(torch.optim.SGD, lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        return LocalSGD(module, group, every=EVERY, outer=outer).step

    return on_rank(make, group, steps)


def with_server(group: Any, steps: int, staleness: int | None = None) -> Tensor:
    """Train with a server; the workers return the parameters of their last reply."""
    rank = as_group(group).rank()
    module = initial(rank)
    if rank == 0:
        ParameterServer(module, sgd(module), group, staleness=staleness, timeout_s=60.0).serve()
        return flat(module)
    with ServerWorker(module, group, timeout_s=60.0) as worker:
        for step in range(steps):
            backward(module, rank, step)
            worker.step()
    return flat(module)


TRAINERS: dict[str, Callable[[Any, int], Tensor]] = {
    "ring": with_gossip("ring"),
    "exponential": with_gossip("exponential"),
    "local SGD": with_local_sgd,
    "outer optimizer": with_outer,
    "server": with_server,
}


def by_name(name: str, steps: int) -> Tensor:
    """Train in the default group."""
    return TRAINERS[name](None, steps)


# --- simulated ------------------------------------------------------------------------


def _alone(
    world_size: int, steps: int, together: Callable[[int, list[Tensor]], list[Tensor] | None]
) -> list[Tensor]:
    """k models in turn; ``together`` maps the parameters of all ranks after each step."""
    modules = [initial(0) for _ in range(world_size)]
    optimizers = [sgd(module) for module in modules]
    for step in range(steps):
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            backward(module, rank, step)
            optimizer.step()
        mixed = together(step, [flat(module) for module in modules])
        for module, vector in zip(modules, mixed or (), strict=bool(mixed)):
            vector_to_parameters(vector.clone(), trainable(module))
    return [flat(module) for module in modules]


def gossiping(graph: str, world_size: int, steps: int) -> list[Tensor]:
    def together(step: int, vectors: list[Tensor]) -> list[Tensor]:
        rows = [list(map(float, row)) for row in mixing_matrix(graph, world_size, step)]
        return list(torch.tensor(rows, dtype=torch.float64) @ torch.stack(vectors))

    return _alone(world_size, steps, together)


def meeting(lr: float, momentum: float, world_size: int, steps: int) -> list[Tensor]:
    """Every H steps Nesterov's method, by its formula; with 1 and 0 that is the average."""
    anchor, velocity = flat(initial(0)), torch.zeros_like(flat(initial(0)))

    def together(step: int, vectors: list[Tensor]) -> list[Tensor] | None:
        nonlocal anchor, velocity
        if (step + 1) % EVERY:
            return None
        difference = anchor - torch.stack(vectors).mean(0)
        velocity = momentum * velocity + difference
        anchor = anchor - lr * (difference + momentum * velocity)
        return [anchor] * world_size

    return _alone(world_size, steps, together)


def serving(world_size: int, steps: int, steps_of_the_last: int | None = None) -> list[Tensor]:
    """Data parallel; the last worker may leave earlier."""
    module = initial(0)
    optimizer = sgd(module)
    for step in range(steps):
        gradients = []
        is_gone = steps_of_the_last is not None and step >= steps_of_the_last
        for rank in range(1, world_size - is_gone):
            backward(module, rank, step)
            gradients.append([param.grad for param in trainable(module)])
            module.zero_grad(set_to_none=True)
        for param, *grads in zip(trainable(module), *gradients, strict=True):
            param.grad = torch.stack([grad for grad in grads if grad is not None]).mean(0)
        optimizer.step()
    return [flat(module)] * world_size


REFERENCES: dict[str, Callable[..., list[Tensor]]] = {
    "ring": lambda k, steps: gossiping("ring", k, steps),
    "exponential": lambda k, steps: gossiping("exponential", k, steps),
    "local SGD": lambda k, steps: meeting(1.0, 0.0, k, steps),
    "outer optimizer": lambda k, steps: meeting(OUTER_LR, OUTER_MOMENTUM, k, steps),
    "server": serving,
}


# --- messages -------------------------------------------------------------------------


def around(group: Any) -> list[list[float]]:
    """Each rank sends to all others, twice; received in another order."""
    messages = Messages(group, 30.0)
    rank, others = messages.rank, [r for r in range(messages.world_size) if r != messages.rank]
    first, second = torch.full((3,), 10.0 * rank), torch.full((5,), 10.0 * rank + 1)
    waits = [messages.send(tensor, dst) for tensor in (first, second) for dst in others]
    numbers: list[list[float]] = []
    for sources, numel in ((reversed(others), 3), (others, 5)):
        for src in sources:
            tensor = torch.zeros(numel)
            messages.recv(tensor, src)
            numbers.append(tensor.tolist())
    for wait in waits:
        wait()
    return numbers


def late(group: Any) -> Caught:
    """Wait for a message of rank 1 that does not come."""
    return catch(lambda: Messages(group, 0.05).recv(torch.zeros(1), 1))


def late_on_rank_0() -> Caught | None:
    """Rank 0 waits for rank 1, which does not send."""
    group = dist.new_group()  # an error is the end of a group's messages
    return None if dist.get_rank() else late(group)


def leave_alone() -> None:
    """Rank 1 ends its process while rank 0 waits for a message."""
    messages = Messages(None, 30.0)
    around(None)  # the ranks are connected
    if messages.rank == 1:
        time.sleep(0.2)
        os._exit(3)
    messages.recv(torch.zeros(1), 1)


def lose_a_worker(staleness: int | None, steps: int) -> None:
    """Rank 2 of 3 ends its process in the middle; the server reports what came of it."""
    rank, module = dist.get_rank(), initial(0)
    if rank == 0:
        server = ParameterServer(
            module, sgd(module), staleness=staleness, forgets_lost=True, timeout_s=30.0
        )
        caught = catch(server.serve)
        report((caught.kind, server.lost, server.num_updates, flat(module)))
        return
    with ServerWorker(module, timeout_s=30.0) as worker:
        for step in range(steps):
            if rank == 2 and step == steps // 2:
                os._exit(3)
            backward(module, rank, step)
            worker.step()
