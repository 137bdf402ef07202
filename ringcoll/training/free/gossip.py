"""Gossip: each rank averages its model with those of a few neighbours, after each step.

Problem: an all-reduce of the gradients in every step needs a fast network, and ends when the
slowest rank has come. In gossip a rank never meets all others. After each step of its own optimizer
it replaces its parameters x by a weighted average with those of its neighbours,
``x_i <- sum_j W_ij x_j``. The *mixing matrix* W is doubly stochastic: rows that add up to 1 make a
rank's result an average, and columns that add up to 1 keep the average over all ranks, so that
nothing of any gradient is lost. The difference between the ranks shrinks in each step by a factor
of at least rho; ``1 - rho`` is the *spectral gap*.

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

Source: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019 (directed
graphs; with doubly stochastic matrices their weights of push-sum stay 1); Ying et al., "Exponential
Graph is Provably Efficient for Decentralized Deep Training", NeurIPS 2021 (one peer, exactness).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ringcoll.training.arguments import GRAPHS, require
from ringcoll.training.messages import Messages
from ringcoll.training.model_on_ranks import FlatParameters, begin_alike

Matrix = tuple[tuple[Fraction, ...], ...]
"""Row i holds the weights with which rank i adds up the parameters of all ranks."""


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
