"""A parameter server: one rank holds the model, the others compute gradients.

Problem: in an all-reduce everybody waits for the slowest. A server can let fast workers go on.
Rank 0 is the server; it has the parameters and the optimizer. A worker sends a gradient, and gets
the parameters back::

    worker    backward --gradient-->           ... waits ...          --parameters--> next step
    server                          step(), and then the reply, when the worker may go on

Synchronous (``staleness=None``)
    The server waits for a gradient of each worker, takes one step with their average, and replies
    to all. The same as data-parallel training on k - 1 ranks.
Bounded staleness
    The server takes a step with each gradient as it comes. The *clock* of a worker is the number of
    its gradients. A worker gets its reply, and may begin its next step, only while its clock is at
    most ``staleness`` ahead of the slowest worker's. With 0 all workers begin a step together;
    without a bound a gradient could be computed on parameters that are arbitrarily old.

The server serves the worker that comes first. A worker that has finished says so, and does not hold
up the others any more. That a worker has died is noticed at once. Then the training ends with an
error, or, with ``forgets_lost``, goes on with the others.

Cost: a worker sends and receives the parameters' bytes once a step, the server k - 1 times.

Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
Server", NeurIPS 2013; Li et al., "Scaling Distributed Machine Learning with the Parameter Server",
OSDI 2014.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.optim import Optimizer

from ringcoll.errors import PeerLostError
from ringcoll.runtime.watch import phase
from ringcoll.training.arguments import require
from ringcoll.training.messages import Arrivals, Messages
from ringcoll.training.model_on_ranks import FlatParameters, begin_alike

SERVER = 0
"""Rank of the server."""


def _check_role(messages: Messages, *, is_server: bool) -> None:
    rank, world_size = messages.rank, messages.world_size
    require((rank == SERVER) == is_server and world_size > 1, "group",
            f"this rank cannot be {'the server' if is_server else 'a worker'}",
            "at least 2 ranks, of which rank 0 is the server and all others are workers",
            f"rank {rank} of {world_size}", rank)  # fmt: skip


class ParameterServer:
    """The server, on rank 0 of at least 2 ranks.

    ::

        if dist.get_rank() == 0:
            ParameterServer(model, optimizer, staleness=2).serve()
        else:
            with ServerWorker(model) as worker:          # gets the server's parameters
                for inputs, targets in batches:
                    model.zero_grad()
                    loss(model(inputs), targets).backward()
                    worker.step()                        # sends gradients, gets parameters

    ``lost`` has the ranks of the workers that were lost, ``num_updates`` the number of steps of the
    optimizer, ``nbytes_sent`` the bytes of parameters that were sent to workers so far.

    Parameters
    ----------
    module
        Module; the same parameters on all ranks, of one dtype, on one device.
    optimizer
        Optimizer of the module's parameters.
    staleness
        Number of steps that a worker may be ahead of the slowest worker; ``None`` for synchronous
        training, with the average of all workers' gradients.
    forgets_lost
        Whether a worker that was lost counts as a worker that has left; otherwise `serve` raises.
    timeout_s
        Time limit of the wait for a worker, in seconds.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        group: Any = None,
        *,
        staleness: int | None = None,
        forgets_lost: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        self._messages = Messages(group, timeout_s)
        _check_role(self._messages, is_server=True)
        require(staleness is None or staleness >= 0, "staleness", "must not be negative",
                "at least 0 steps, or None", staleness, SERVER)  # fmt: skip
        self._params, self._optimizer = FlatParameters(module), optimizer
        self._staleness = staleness
        self._ignored = (PeerLostError,) if forgets_lost else ()
        self._arrivals = Arrivals(self._messages, pad(self._params.read(), (0, 1)))
        self.lost: list[int] = []
        self.num_updates = self.nbytes_sent = 0
        begin_alike(module, group)

    def serve(self, on_update: Callable[[], object] = lambda: None) -> None:
        """Serve until all workers have left; call ``on_update`` after each step of the optimizer.

        A worker that was lost raises `PeerLostError`, one that is late `CollectiveTimeoutError`.
        Then the workers wait for this rank's process to end, or for their time limit.
        """
        clocks = dict.fromkeys(range(1, self._messages.world_size), 0)
        waiting: dict[int, Tensor] = {}  # gradients of the workers that wait for a reply
        for worker in clocks:
            self._arrivals.expect(worker)
        while clocks:
            worker, gradient = self._next()
            if gradient is None:
                del clocks[worker]
            else:
                clocks[worker] += 1
                waiting[worker] = gradient
            if self._staleness is None:  # a step with the average, when all workers have come
                every = [waiting[rank] for rank in sorted(waiting)]
                gradient = torch.stack(every).mean(0) if len(every) == len(clocks) > 0 else None
            if gradient is not None:
                with phase("update"):
                    self._params.set_grads(gradient)
                    self._optimizer.step()
                self.num_updates += 1
                on_update()
            limit = min(clocks.values(), default=0) + (self._staleness or 0)
            params = self._params.read()
            for rank in [rank for rank in waiting if clocks[rank] <= limit]:
                self._arrivals.expect(rank, params)
                self.nbytes_sent += params.nbytes
                del waiting[rank]

    def _next(self) -> tuple[int, Tensor | None]:
        """The next worker, and its gradient, before a 1; ``None`` if it has left (0) or is lost."""
        worker, message = self._arrivals.take()
        if isinstance(message, self._ignored):
            self.lost.append(worker)
            return worker, None
        if isinstance(message, Exception):
            raise message
        return worker, message[:-1] if message[-1] else None


class ServerWorker:
    """A worker of a `ParameterServer`, on each rank but 0; a context that ends with `leave`.

    A block that ends with an exception does not leave: the server then waits for this rank. The
    module's parameters and buffers become the server's. ``nbytes_sent`` counts the bytes that this
    rank has sent so far; ``timeout_s`` limits the wait for the server's reply.
    """

    def __init__(self, module: nn.Module, group: Any = None, *, timeout_s: float = 300.0) -> None:
        self._messages = Messages(group, timeout_s)
        _check_role(self._messages, is_server=False)
        self._params = FlatParameters(module)
        self._incoming = self._params.read()
        self.nbytes_sent = 0
        begin_alike(module, group)

    def step(self) -> None:
        """Send the gradients; wait until the server replies with parameters, and take them.

        A server that has left raises `PeerLostError`, one that is late `CollectiveTimeoutError`.
        """
        self._send(self._params.grads(), 1.0)
        self._messages.recv(self._incoming, SERVER)
        self._params.write(self._incoming)

    def leave(self) -> None:
        """Say that this worker has finished; raises as `step`."""
        self._send(torch.zeros_like(self._incoming), 0.0)

    def _send(self, gradient: Tensor, is_gradient: float) -> None:
        message = torch.cat([gradient, gradient.new_tensor([is_gradient])])
        self._messages.send(message, SERVER)()
        self.nbytes_sent += message.nbytes

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if kind is None or kind is GeneratorExit:  # a loop over a generator was left
            self.leave()
