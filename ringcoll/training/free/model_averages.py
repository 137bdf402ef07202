"""Averages of models: gossip with a few neighbours, and local SGD, every H steps.

Problem: an all-reduce of the gradients in every step needs a fast network, and ends when the
slowest rank has come. Here each rank takes steps of its own optimizer, and models are averaged.
`slowed` makes a rank slow on purpose.

In *gossip* a rank never meets all others. After each step it replaces its parameters x by a
weighted average with those of its neighbours, ``x_i <- sum_j W_ij x_j``. The *mixing matrix* W is
doubly stochastic: rows that add up to 1 make a rank's result an average, and columns that add up to
1 keep the average over all ranks, so that nothing of any gradient is lost. By how much the ranks
still differ shrinks in each step by a factor of at least rho; ``1 - rho`` is the *spectral gap*.

Ring: rank i averages with i - 1 and i + 1, each with weight 1/3. Two messages a step; the gap
shrinks like 1/k^2. One-peer exponential graph: in step t rank i averages with i + 2^t, each with
weight 1/2. One message a step::

    rank      0  1  2  3  4  5  6  7
    step 0    1  2  3  4  5  6  7  0     i + 1
    step 1    2  3  4  5  6  7  0  1     i + 2
    step 2    4  5  6  7  0  1  2  3     i + 4, and then from the beginning

For k a power of two, log2 k such steps give the exact average. For another k the graph has
ceil(log2 k) different steps, with the distances modulo k; every matrix is doubly stochastic all the
same, and the average is approached at the rate of `spectral_gap` instead of reached.

The weights are data: `mixing_matrix` returns exact fractions, and `check_mixing` proves them.

>>> [round(spectral_gap("ring", k), 3) for k in (2, 3, 4, 8, 16)]
[1.0, 1.0, 0.667, 0.195, 0.051]
>>> [round(spectral_gap("exponential", k), 3) for k in (2, 3, 4, 6, 8, 16)]
[1.0, 0.5, 1.0, 0.4, 1.0, 1.0]

In *local SGD* each rank takes H steps of its own optimizer, the *inner* one, and only then the
ranks meet: 1/H of the bytes is sent, and a rank that is late for once delays the others only if it
is late over H steps.

All ranks keep the parameters a of their last meeting. At the next meeting rank i has x_i. The ranks
average ``d = mean_i(a - x_i)``, an *outer* optimizer takes one step on a with d as its gradient;
then all ranks go on from a. The usual outer optimizer is SGD of learning rate 1: the average, as
``a - d = mean_i(x_i)``.

The difference is averaged by an all-reduce, which gives the same bits on all ranks: so a, and the
outer optimizer's state, are the same everywhere without being sent. The states of the inner
optimizers stay on their ranks. The cost: the bytes of the parameters, all-reduced once in H steps;
a copy of the parameters, and the outer optimizer's state.

Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019 (directed
graphs; with doubly stochastic matrices their weights of push-sum stay 1); Ying et al., "Exponential
Graph is Provably Efficient for Decentralized Deep Training", NeurIPS 2021 (one peer, exactness);
Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.training.messages import Messages
from ringcoll.training.model_on_ranks import FlatParameters, begin_alike, require, trained
from ringcoll.training.names import GRAPHS

Matrix = tuple[tuple[Fraction, ...], ...]
"""Row i holds the weights with which rank i adds up the parameters of all ranks."""

OuterOptimizer = Callable[[list[Tensor]], Optimizer]
"""Makes the outer optimizer from the parameters of the last meeting."""


def period(graph: str, world_size: int) -> int:
    """Number of steps after which the matrices repeat."""
    require(graph in GRAPHS, "graph", "not a graph", " or ".join(GRAPHS), graph)
    return 1 if graph == "ring" else max(1, (world_size - 1).bit_length())


@lru_cache(maxsize=256)
def mixing_matrix(graph: str, world_size: int, step: int) -> Matrix:
    """The weights of one step, for all k ranks: (k, k).

    Neighbours that are the same rank count once: on two ranks the ring's weights are 1/2.

    >>> for row in mixing_matrix("exponential", 4, 1):
    ...     print(*row)
    1/2 0 1/2 0
    0 1/2 0 1/2
    1/2 0 1/2 0
    0 1/2 0 1/2
    """
    turn = step % period(graph, world_size)
    distances = (-1, 0, 1) if graph == "ring" else (0, 1 << turn)
    rows, ranks = [], range(world_size)
    for rank in ranks:
        sources = {(rank + distance) % world_size for distance in distances}
        weight = Fraction(1, len(sources))
        rows.append(tuple(weight if source in sources else Fraction(0) for source in ranks))
    return tuple(rows)


def check_mixing(matrix: Sequence[Sequence[Fraction]]) -> None:
    """Prove that a matrix is doubly stochastic, exactly; raise `ArgumentError` otherwise."""
    k = len(matrix)
    for name, lines in (("row", matrix), ("column", zip(*matrix, strict=True))):
        for number, weights in enumerate(lines):
            is_average = len(weights) == k and min(weights) >= 0 and sum(weights) == 1
            require(is_average, "matrix", f"{name} {number} is not an average",
                    f"{k} weights >= 0 that add up to 1", ", ".join(map(str, weights)))  # fmt: skip


def spectral_gap(graph: str, world_size: int) -> float:
    """``1 - rho``: deviations from the average shrink to rho of their norm in each step, or below.

    The matrices of a period are multiplied; rho is the geometric mean of a step. 1 means that the
    average is exact after a period. Raises as `period`.
    """
    steps = period(graph, world_size)
    product = torch.eye(world_size, dtype=torch.float64, device="cpu")
    for step in range(steps):
        rows = [[float(weight) for weight in row] for row in mixing_matrix(graph, world_size, step)]
        product = torch.tensor(rows, dtype=torch.float64, device="cpu") @ product
    deviation = float(torch.linalg.matrix_norm(product - 1 / world_size, 2))
    return 1 - float(deviation ** (1 / steps))


class Gossip:
    """Averages the parameters of a module with those of this rank's neighbours.

    ::

        gossip = Gossip(model, graph="exponential")  # rank 0's parameters go to all ranks
        for inputs, targets in batches:              # of this rank
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
            gossip.mix()

    The ranks' parameters stay different; `mix` keeps their average. All ranks call `mix` equally
    often. A rank waits for its neighbours only. ``nbytes_sent`` counts the bytes of `mix` so far.

    Parameters
    ----------
    module
        Module; the same parameters on all ranks, of one dtype, on one device.
    graph
        Neighbours of a rank: ``"ring"``, the next and the previous rank in every step, or
        ``"exponential"``, in step t the rank that is ``2**t`` further.
    timeout_s
        Time limit of the wait for a neighbour, in seconds.
    """

    def __init__(
        self, module: nn.Module, group: Any = None, graph: str = "ring", *, timeout_s: float = 300.0
    ) -> None:
        self._messages = Messages(group, timeout_s)
        k = self._messages.world_size
        self._matrices = [mixing_matrix(graph, k, step) for step in range(period(graph, k))]
        for matrix in self._matrices:
            check_mixing(matrix)
        self._params = FlatParameters(module)
        self._step = self.nbytes_sent = 0
        begin_alike(module, group)

    def mix(self) -> None:
        """Average with the neighbours of this step.

        A neighbour that has left raises `PeerLostError`, one that does not come
        `CollectiveTimeoutError`.
        """
        rank, matrix = self._messages.rank, self._matrices[self._step % len(self._matrices)]
        own = self._params.read()
        peers = [peer for peer in range(len(matrix)) if peer != rank]
        sends = [self._messages.send(own, dst) for dst in peers if matrix[dst][rank]]
        average, incoming = own * float(matrix[rank][rank]), torch.empty_like(own)
        for src in peers:
            if matrix[rank][src]:
                self._messages.recv(incoming, src)
                average.add_(incoming, alpha=float(matrix[rank][src]))
        for wait in sends:
            wait()
        self._params.write(average)
        self._step += 1
        self.nbytes_sent += len(sends) * own.nbytes


class LocalSGD:
    """Averages the parameters of a module every H steps.

    ::

        averaging = LocalSGD(model, every=8)         # rank 0's parameters go to all ranks
        for inputs, targets in batches:              # of this rank
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
            averaging.step()

    ``nbytes_sent`` counts the bytes that this rank has sent so far, as a ring sends them.

    Parameters
    ----------
    module
        Module; the same parameters on all ranks, any shapes and dtypes.
    every
        Number of steps H from one meeting to the next, at least 1.
    outer
        Makes the outer optimizer; by default SGD of learning rate 1, which is the average.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        every: int,
        outer: OuterOptimizer | None = None,
    ) -> None:
        k, never = as_group(group).size(), "the ranks would never meet"
        require(every >= 1, "every", never, "at least 1 step", every, as_group(group).rank())
        self._params = list(trained(module).values())
        begin_alike(module, group)
        self._group, self._every, self._steps = group, every, 0
        self._anchors = [param.detach().clone() for param in self._params]  # of the last meeting
        self._outer = (outer or partial(SGD, lr=1.0))(self._anchors)
        self._nbytes = 2 * (k - 1) * sum(anchor.nbytes for anchor in self._anchors) // k
        self.nbytes_sent = 0

    def kept(self) -> list[Tensor]:
        """Parameters and the outer optimizer's state, kept until the next meeting."""
        values = [value for state in self._outer.state.values() for value in state.values()]
        return [*self._anchors, *(value for value in values if isinstance(value, Tensor))]

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step of the inner optimizer; meet the other ranks in every H-th step.

        It returns whether the ranks have met, so that all have the same parameters.
        """
        self._steps += 1
        if self._steps % self._every:
            return False
        differences = []
        for anchor, param in zip(self._anchors, self._params, strict=True):
            anchor.grad = anchor - param
            differences.append(anchor.grad)
        api.all_reduce_coalesced(differences, dist.ReduceOp.AVG, self._group)
        self._outer.step()
        for anchor, param in zip(self._anchors, self._params, strict=True):
            param.copy_(anchor)
        self.nbytes_sent += self._nbytes
        return True


@contextmanager
def slowed(
    factor: float,
    *,
    least_s: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[None]:
    """Make a block last longer, by sleeping at its end.

    ::

        with slowed(2.0 if rank == 3 else 1.0, least_s=0.01):
            loss(model(inputs), targets).backward()

    Parameters
    ----------
    factor
        Time of the block over the time that it takes by itself, at least 1.
    least_s
        Time, in seconds, that the block takes by itself at least. With a time far above the time of
        computing, ranks that share a core are as fast as ranks with a core each.
    clock, sleep
        Clock, and how to wait, in seconds.
    """
    for argument, value, least in (("factor", factor, 1), ("least_s", least_s, 0)):
        message = "a block cannot last shorter than it does"
        require(value >= least, argument, message, f"at least {least}", value)
    begin_s = clock()
    yield
    took_s = clock() - begin_s
    remaining_s = factor * max(took_s, least_s) - took_s
    if remaining_s > 0:
        sleep(remaining_s)
