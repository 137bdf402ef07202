"""What uses torch.distributed gets gloo's results, and runs nothing native for them."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor

from ringcoll.runtime.launch import RankError, Ranks
from tests.programs.users.harness import differences, loaded, run_alone, run_program
from tests.programs.users.table import FAMILIES, TABLE

pytestmark = [pytest.mark.processes, pytest.mark.slow]

_PROGRAMS = Path(__file__).parents[1] / "programs" / "users"
_CASES = [
    pytest.param(name, world_size, id=f"{name}-{world_size}")
    for world_size in (2, 3, 4)  # one after the other: one pool of processes at a time
    for name, user in TABLE.items()
    if world_size in user.worlds
]


class _Pool:
    """The ranks of one world size, started again after a failure."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._turns = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, world_size: int, function: Callable[..., bytes], *arguments: Any
    ) -> list[dict[str, Tensor]]:
        """What it returns on every rank."""
        if self._ranks is not None and not self._usable(world_size):
            self.close()
        if self._ranks is None:
            self._ranks = Ranks(world_size, backend=None, timeout_s=90.0, threads=1)
        try:
            return [loaded(answer) for answer in self._ranks.run(function, *arguments)]
        except RankError as error:
            error.add_note(error.details)
            raise

    def program(
        self, world_size: int, name: str, backend: str, *, foreign: bool = False
    ) -> list[dict[str, Tensor]]:
        """What a program returns on every rank."""
        turn = str(next(self._turns))
        return self.run(world_size, run_program, name, backend, turn, foreign)

    def _usable(self, world_size: int) -> bool:
        assert self._ranks is not None
        return self._ranks.world_size == world_size and all(
            process.is_alive() for process in self._ranks.processes
        )

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


@pytest.fixture(scope="module")
def pool() -> Iterator[_Pool]:
    with _Pool() as pool:
        yield pool


@pytest.fixture(scope="module")
def references() -> Iterator[_Pool]:
    """Processes in which no operation of this library runs: what breaks there is not its doing."""
    with _Pool() as pool:
        yield pool


def _wanted(references: _Pool, name: str, world_size: int) -> list[dict[str, Tensor]]:
    """What a program should return, from processes that may die of themselves, but not twice.

    Torch 2.13 ends the threads of its group for gloo when the last reference to it goes. On one
    of them, where a callback had it, that aborts the process: "Resource deadlock avoided".
    """
    user = TABLE[name]

    def ask() -> list[dict[str, Tensor]]:
        if user.reference is not None:
            return references.run(world_size, run_alone, user.reference)
        return references.program(world_size, name, "gloo", foreign=user.foreign)

    try:
        return ask()
    except RankError as error:
        # The others fail, too: they lose a peer.
        if "ProcessDied" not in {kind for kind, _ in error.failures.values()}:
            raise
        return ask()


@pytest.mark.parametrize("name, world_size", _CASES)
def test_as_on_gloo(pool: _Pool, references: _Pool, name: str, world_size: int) -> None:
    user = TABLE[name]
    ours = pool.program(world_size, name, "ringcoll", foreign=user.foreign)
    wanted = _wanted(references, name, world_size)
    wrong = [
        line
        for rank, (mine, theirs) in enumerate(zip(ours, wanted, strict=True))
        for line in differences(mine, theirs, user.allowed(world_size), rank)
    ]
    assert not wrong, "\n".join(wrong)


class _Dying(_Pool):
    """Processes that fail at first, then do nothing."""

    def __init__(self, kinds: Sequence[str], times: int) -> None:
        super().__init__()
        failures = {rank: (kind, "on purpose") for rank, kind in enumerate(kinds)}
        self._failures = [RankError(0, failures, "")] * times

    def run(
        self, world_size: int, function: Callable[..., bytes], *arguments: Any
    ) -> list[dict[str, Tensor]]:
        if self._failures:
            raise self._failures.pop()
        return [{}] * world_size


@pytest.mark.parametrize("name", ["data_parallel.buffers", "data_parallel.hook_power_sgd"])
@pytest.mark.parametrize(
    "kinds, times, lost",
    [
        (["ProcessDied"], 1, False),
        (["RuntimeError", "ProcessDied"], 1, False),
        (["ProcessDied"], 2, True),
        (["RuntimeError", "ValueError"], 1, True),
    ],
)
def test_a_reference_whose_process_died_is_asked_once_more(
    name: str, kinds: list[str], times: int, lost: bool
) -> None:
    references = _Dying(kinds, times)
    if lost:
        with pytest.raises(RankError, match=kinds[0]):
            _wanted(references, name, 2)
    else:
        assert _wanted(references, name, 2) == [{}, {}]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_programs_are_in_the_table(family: str) -> None:
    tree = ast.parse((_PROGRAMS / f"{family}.py").read_text())
    programs = {
        f"{family}.{item.name}"
        for item in tree.body
        if isinstance(item, ast.FunctionDef)
        and not item.name.startswith("_")
        and [argument.arg for argument in item.args.args] == ["rank", "world_size"]
    }
    references = {user.reference for user in TABLE.values()}
    assert programs - references == {name for name in TABLE if name.startswith(f"{family}.")}


@pytest.mark.parametrize(
    "name",
    [
        "native.through_the_inner_group",
        "native.in_a_sub_group",
        "native.in_a_group_that_is_gone",
        "native.in_a_group_of_another_backend",
    ],
)
def test_what_is_native_is_noticed(pool: _Pool, name: str) -> None:
    with pytest.raises(RankError) as caught:
        pool.program(2, name, "ringcoll")
    assert caught.value.kind == "NativeCollectiveError"


def test_what_the_base_class_runs_is_noticed_or_not_native(pool: _Pool) -> None:
    """From torch 2.15 on, its trampoline knows `reduce`, and the call comes to this library."""
    kind = ""
    try:
        ranks = pool.program(2, "native.through_the_base_class", "ringcoll")
    except RankError as error:
        kind = error.kind
    if kind != "NativeCollectiveError":
        assert (kind, [rank["own"].item() for rank in ranks]) == ("", [1, 1])


def test_messages_alone_are_not_native(pool: _Pool) -> None:
    first, second = pool.program(2, "native.messages_only", "ringcoll")
    assert first["got"].item() == 2
    assert second["got"].item() == 1


_WANTED = {"a": torch.tensor([1.0, 100.0]), "b": torch.tensor([3, 4])}


@pytest.mark.parametrize(
    "change, tolerance, wrong",
    [
        ({}, 0.0, None),
        ({"a": torch.tensor([1.00005, 100.0])}, 1e-6, None),  # of the largest element
        ({"a": torch.tensor([1.00005, 100.0])}, 0.0, "off by"),
        ({"a": torch.tensor([1.001, 100.0])}, 1e-6, "off by"),
        ({"a": torch.tensor([1.0, float("nan")])}, 1e-6, "off by nan"),
        ({"a": torch.tensor([1.0])}, 1e-6, r"\(1,\), not"),
        ({"b": torch.tensor([3.0, 4.0])}, 1e-6, "float32"),
        ({"b": torch.tensor([3, 5])}, 1e-6, "off by 1 "),
        ({"c": torch.tensor(0)}, 1e-6, "returned"),
    ],
)
def test_differences(change: dict[str, Tensor], tolerance: float, wrong: str | None) -> None:
    found = differences({**_WANTED, **change}, _WANTED, tolerance, rank=1)
    assert len(found) == (wrong is not None)
    if wrong is not None:
        assert re.search(wrong, found[0])


def test_nothing_is_no_result() -> None:
    assert differences({}, {}, 1.0, rank=0)


def test_what_is_expected_has_to_be_finite() -> None:
    bad = {"a": torch.tensor([1.0, float("inf")])}
    assert differences(bad, bad, 1.0, rank=0)
