"""Call the command line in this process; algorithms that are wrong, or restricted."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ringcoll.runtime.user_files import algorithms as user_algorithms
from ringcoll.schedules import Program, Step, copy, inp, out, recv, send
from ringcoll.schedules.algorithms import algorithms, register, unregister
from ringcoll.schedules.algorithms.ring import all_gather_phase, ring_all_reduce
from ringcoll.tools.cli import cli

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


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, for modules of a user; their algorithms are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) == str(tmp_path / f"{name}.py"):
            for entry in [entry for entry in algorithms() if entry.program.__module__ == name]:
                unregister(entry.collective, entry.name)
            del sys.modules[name]
    user_algorithms._registered_by.cache_clear()


@pytest.fixture
def star(run: Run, own_folder: Path) -> str:
    """The file that ``ringcoll new all_reduce star`` writes, in the current folder."""
    assert run("new", "all_reduce", "star").exit_code == 0
    return "star.py"


@pytest.fixture
def short_ring() -> Iterator[None]:
    """An all-reduce named ``short_ring`` that leaves out the last step; right for one rank only."""

    @register("all_reduce", "short_ring", chunks=lambda k: k)
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
        chunks=lambda k: k,
        restriction=lambda k: "it halves the world" if k & (k - 1) else None,
    )
    def only_powers(rank: int, world_size: int) -> Program:
        yield Step(copy(out(rank), inp(rank)))
        yield from all_gather_phase(rank, world_size, out(rank))

    yield
    unregister("all_gather", "only_powers")


@pytest.fixture
def only_large() -> Iterator[None]:
    """An all-reduce named ``only_large`` that is restricted to 3,000 ranks, where it is too large to prove."""

    @register(
        "all_reduce",
        "only_large",
        chunks=lambda k: k,
        restriction=lambda k: "it wants 3000" if k != 3000 else None,
    )
    def only_large(rank: int, world_size: int) -> Program:
        yield from ring_all_reduce(rank, world_size)

    yield
    unregister("all_reduce", "only_large")


@pytest.fixture
def wrong_root() -> Iterator[None]:
    """A broadcast named ``wrong_root`` that is wrong for root 3 of 5, and right otherwise."""

    @register("broadcast", "wrong_root")
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


@pytest.fixture
def wrong_on_hosts() -> Iterator[None]:
    """An all-reduce named ``wrong_on_hosts`` that is right on one host, and leaves out a step on several."""

    @register("all_reduce", "wrong_on_hosts", needs_hosts=True, chunks=len)
    def wrong_on_hosts(rank: int, hosts: tuple[int, ...]) -> Program:
        steps = [*ring_all_reduce(rank, len(hosts))]
        yield from steps if len({*hosts}) == 1 else steps[:-1]

    yield
    unregister("all_reduce", "wrong_on_hosts")
