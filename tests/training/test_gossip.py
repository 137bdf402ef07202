"""Gossip is multiplication by doubly stochastic matrices, with the stated rate."""

from __future__ import annotations

import threading
from fractions import Fraction
from math import cos, pi, prod

import pytest
import torch
from torch import nn

from ringcoll import run_threads
from ringcoll.errors import ArgumentError, CollectiveTimeoutError
from ringcoll.training import Gossip, check_mixing, mixing_matrix, period, spectral_gap
from ringcoll.training.arguments import GRAPHS
from tests.programs.out_of_step import REFERENCES, TRAINERS, close

WORLDS = (1, 2, 3, 4, 5, 7, 8, 13, 16, 17)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_matrix_is_doubly_stochastic(graph: str, world_size: int):
    steps = period(graph, world_size)
    matrices = [mixing_matrix(graph, world_size, step) for step in range(2 * steps)]
    for matrix in matrices:
        check_mixing(matrix)
    assert matrices[:steps] == matrices[steps:]
    peers = max(sum(weight > 0 for weight in row) for row in matrices[0]) - 1
    assert peers == min(world_size - 1, {"ring": 2, "exponential": 1}[graph])


@pytest.mark.parametrize(
    "rows, message",
    [
        ([[1, 0], [0.5, 0.25]], "row 1 is not an average"),
        ([[1.5, -0.5], [-0.5, 1.5]], "row 0 is not an average.*got 3/2, -1/2"),
        ([[1, 0], [1, 0]], "column 0 is not an average"),
        ([[0.5, 0.5]], "row 0 is not an average.*expected 1 weights"),
        ([[1, 0], [1]], "row 1 is not an average.*expected 2 weights"),
    ],
)
def test_and_others_are_refused(rows, message):
    with pytest.raises(ArgumentError, match=message):
        check_mixing([[Fraction(weight) for weight in row] for row in rows])


@pytest.mark.parametrize("world_size", [3, 4, 5, 7, 8, 13])
def test_the_spectral_gap_in_closed_form(world_size: int):
    # The matrices are circulant: their eigenvalues are sums over the distances.
    modes = range(1, world_size)
    ring = max(abs(1 + 2 * cos(2 * pi * j / world_size)) / 3 for j in modes)
    assert spectral_gap("ring", world_size) == pytest.approx(1 - ring, abs=1e-12)
    steps = period("exponential", world_size)
    factors = [
        prod(abs(cos(pi * j * 2**step / world_size)) for step in range(steps)) for j in modes
    ]
    if world_size in (4, 8):
        assert spectral_gap("exponential", world_size) == 1, "halves and quarters are exact"
        assert max(factors) < 1e-15
    else:
        expected = 1 - max(factors) ** (1 / steps)
        assert spectral_gap("exponential", world_size) == pytest.approx(expected, abs=1e-12)


def mixed(world_size: int, graph: str, steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parameters of all ranks, small integers, before and after some steps of gossip."""

    def rank_main(group):
        module = nn.Linear(3, 2).double()
        gossip = Gossip(module, group, graph)
        with torch.no_grad():
            for number, param in enumerate(module.parameters()):
                values = torch.arange(param.numel(), dtype=torch.float64).view_as(param)
                param.copy_((values + 10 * number) * (1 + group.rank()) ** 2 % 31)
        before = nn.utils.parameters_to_vector(module.parameters()).detach().clone()
        for _ in range(steps):
            gossip.mix()
        after = nn.utils.parameters_to_vector(module.parameters()).detach()
        assert gossip.nbytes_sent == steps * before.nbytes * min(
            world_size - 1, {"ring": 2, "exponential": 1}[graph]
        )
        return before, after

    before, after = zip(*run_threads(rank_main, world_size), strict=True)
    return torch.stack(before), torch.stack(after)


@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 16])
def test_the_exponential_graph_is_exact_after_log2_k_steps(world_size: int):
    before, after = mixed(world_size, "exponential", world_size.bit_length() - 1)
    # Integers below 31 and their 16ths have few bits, so nothing is rounded.
    assert torch.equal(after, before.mean(0).expand_as(after))
    if world_size > 2:
        _, early = mixed(world_size, "exponential", world_size.bit_length() - 2)
        assert not torch.equal(early, after)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_average_is_kept_and_approached_at_the_stated_rate(graph: str, world_size: int):
    steps = 3 * period(graph, world_size)
    before, after = mixed(world_size, graph, steps)
    assert torch.allclose(after.mean(0), before.mean(0), rtol=1e-13, atol=0)
    rho = 1 - spectral_gap(graph, world_size)
    deviation, at_first = ((x - before.mean(0)).norm() for x in (after, before))
    assert deviation <= rho**steps * at_first + 1e-12 * before.norm()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("graph", GRAPHS)
def test_training_is_the_simulated_training(graph: str, world_size: int):
    trained = run_threads(lambda group: TRAINERS[graph](group, 7), world_size)
    for ours, expected in zip(trained, REFERENCES[graph](world_size, 7), strict=True):
        assert close(ours, expected)
    other = REFERENCES["ring" if graph == "exponential" else "exponential"](world_size, 7)
    assert close(trained[0], other[0]) == (world_size <= 2), "the graphs are different"


def test_bad_arguments():
    def rank_main(group):
        module = nn.Linear(2, 1)
        with pytest.raises(ArgumentError, match=r"'graph': not a graph \(expected ring or expo"):
            Gossip(module, group, "star")
        with pytest.raises(ArgumentError, match=r"'timeout_s'.*expected > 0 s, got 0"):
            Gossip(module, group, timeout_s=0)
        with pytest.raises(ArgumentError, match="'module': no parameter needs a gradient"):
            Gossip(nn.ReLU(), group)
        with pytest.raises(ArgumentError, match=r"one dtype.*torch.float32 on cpu, torch.float64"):
            Gossip(nn.Sequential(module, nn.Linear(1, 1).double()), group)

    run_threads(rank_main, 2)


def test_a_neighbour_that_does_not_come():
    over = threading.Barrier(2)  # who returns has left, which is another error

    def rank_main(group):
        gossip = Gossip(nn.Linear(2, 1), group, timeout_s=0.05)
        if group.rank() == 0:
            with pytest.raises(
                CollectiveTimeoutError, match="rank 0 waited to receive from rank 1"
            ):
                gossip.mix()
        over.wait(30)

    run_threads(rank_main, 2)
