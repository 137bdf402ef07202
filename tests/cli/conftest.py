"""Call the command line in this process; algorithms that are wrong, or restricted."""

from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
from click.testing import CliRunner, Result

from ringcoll.algorithms import Cost, register, unregister
from ringcoll.algorithms.ring import all_gather_phase, ring_all_reduce
from ringcoll.cli.app import cli
from ringcoll.schedule import Program, Step, copy, inp, out, recv, send

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Call ``ringcoll`` with these words; anything but a plain exit is raised."""

    def call(*words: str, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(cli, words, input=stdin, prog_name="ringcoll")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call


_COST = Cost(rounds=lambda k: 0, traffic=lambda k: Fraction(0))


@pytest.fixture
def short_ring() -> Iterator[None]:
    """An all-reduce named ``short_ring`` that leaves out the last step; right for one rank only."""

    @register("all_reduce", "short_ring", cost=_COST, chunks=lambda k: k)
    def short_ring(rank: int, world_size: int) -> Program:
        steps = ring_all_reduce(rank, world_size)
        for _ in range(2 * (world_size - 1) - 1):
            yield next(steps)

    yield
    unregister("all_reduce", "short_ring")


@pytest.fixture
def only_powers() -> Iterator[None]:
    """An all-gather named ``only_powers`` that is restricted to powers of two."""

    @register(
        "all_gather",
        "only_powers",
        cost=_COST,
        chunks=lambda k: k,
        restriction=lambda k: "it halves the world" if k & (k - 1) else None,
    )
    def only_powers(rank: int, world_size: int) -> Program:
        yield Step(copy(out(rank), inp(rank)))
        yield from all_gather_phase(rank, world_size)

    yield
    unregister("all_gather", "only_powers")


@pytest.fixture
def wrong_root() -> Iterator[None]:
    """A broadcast named ``wrong_root`` that is wrong for root 3 of 5, and right otherwise."""

    @register("broadcast", "wrong_root", cost=_COST)
    def wrong_root(rank: int, world_size: int, root: int) -> Program:
        others = [peer for peer in range(world_size) if peer != root]
        if (world_size, root) == (5, 3):
            others.remove(0)
        if rank == root:
            yield Step(copy(out(0), inp(0)), *(send(peer, inp(0)) for peer in others))
        elif rank in others:
            yield Step(recv(root, out(0)))

    yield
    unregister("broadcast", "wrong_root")
