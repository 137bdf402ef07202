"""What docs/extending.md says about adding an algorithm is true."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

import ringcoll
from ringcoll.errors import ArgumentError
from ringcoll.lab.search import demand_of
from ringcoll.lab.simulation import simulate, topology_named
from ringcoll.runtime.collectives import Arguments, compiled, start
from ringcoll.runtime.operation import Operation
from ringcoll.schedules import CONTRACTS, Contract, Program, Step, inp, out, recv, send, verify
from ringcoll.schedules.algorithms import (
    ALIASES,
    algorithms,
    find,
    on_hosts,
    register,
    schedule_of,
    unregister,
)
from ringcoll.schedules.cost import lower_bound
from ringcoll.tools.bench import Workload, shape
from ringcoll.tools.bench.contenders import Shape
from tests.fakes.added_transport import over_added_transport

PACKAGE = Path(ringcoll.__file__).parent
PAGE = PACKAGE.parent / "docs" / "extending.md"
TEXT = PAGE.read_text(encoding="utf-8")


def blocks(language: str, section: str = "Add an algorithm") -> list[str]:
    """The code of a section."""
    section = TEXT.partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, flags=re.DOTALL)


def test_the_example_does_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    try:
        for block in blocks("python"):
            exec(compile(block, str(PAGE), "exec"), names)
        test = names["test_star"]
        assert callable(test)
        test()
        assert find("all_reduce", "star").summary.startswith("Star all-reduce")
    finally:
        unregister("all_reduce", "star")
    (expected,) = blocks("text")
    assert capsys.readouterr().out == expected


def test_the_operator_does_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    (code,), (expected,) = (blocks(kind, "Add an operator") for kind in ("python", "text"))
    exec(compile(code, str(PAGE), "exec"), names)
    assert capsys.readouterr().out == expected

    def main(group: ringcoll.LocalGroup) -> None:
        with pytest.raises(ArgumentError, match=r"rank order.*expected .*rabenseifner"):
            ringcoll.all_reduce(torch.ones(2), names["first_nonzero"], group, algorithm="ring")

    ringcoll.run_threads(main, 2)


# --- three all-reduces in one file ------------------------------------------------------------

THREE = PACKAGE.parent / "tests" / "cases" / "three_all_reduces.py"


@pytest.fixture
def three() -> Iterator[list[str]]:
    """The names of the three all-reduces, once their file is imported."""
    before = {entry.name for entry in algorithms("all_reduce")}
    runpy.run_path(str(THREE))
    names = [entry.name for entry in algorithms("all_reduce") if entry.name not in before]
    yield names
    for name in names:
        unregister("all_reduce", name)


def test_three_all_reduces_of_at_most_20_lines_each(three: list[str]) -> None:
    functions = [
        node
        for node in ast.parse(THREE.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    assert [f"{name}_all_reduce" for name in three] == [node.name for node in functions]
    assert len(three) == 3
    for node in functions:
        first = node.decorator_list[0].lineno
        assert node.end_lineno is not None
        assert node.end_lineno - first + 1 <= 20


def test_each_of_the_three_is_proved_and_runs_by_its_name(three: list[str]) -> None:
    def main(group: ringcoll.LocalGroup) -> list[list[float]]:
        totals = [torch.arange(5.0) + 10 * group.rank() for _ in (*three, "hierarchy")]
        for total, name in zip(totals, (*three, "+".join(three)), strict=True):
            ringcoll.all_reduce(total, group=group, algorithm=name)
        return [total.tolist() for total in totals]

    for name in three:
        for world_size in (1, 2, 3, 4, 5, 7, 8, 13):
            verify(schedule_of("all_reduce", name, world_size))
    verify(find("all_reduce", "+".join(three)).schedule(12, hosts=on_hosts(12, 6)))
    assert not find("all_reduce", f"ring+{three[0]}").built_in
    for totals in ringcoll.run_threads(main, 3):
        assert totals == [[30.0, 33.0, 36.0, 39.0, 42.0]] * 4


# --- one of each, from outside the package ------------------------------------------------


def shift(tensor: torch.Tensor, result: torch.Tensor, group: Any) -> Any:
    """Give each rank the tensor of the rank before it: a collective that the package lacks."""
    return start(_shift, group, (tensor, result), ("neighbour", None), False, None)


@compiled("shift", "tensor", "result")
def _shift(call: Arguments) -> Operation:
    tensor, result = call.tensors
    call.like(result, tensor, "result")
    return call.operation((0,), (1,), [tensor.numel()] * call.world_size)


def test_a_collective_from_outside() -> None:
    CONTRACTS["shift"] = Contract(
        "shift",
        num_blocks=lambda k: k,
        inputs=lambda rank, k, root: (rank,),
        outputs=lambda rank, k, root: ((rank - 1) % k,),
        busbw_factor=lambda k: Fraction(1),
        least=lambda k: (Fraction(1, k), Fraction(1, k), Fraction(0)),
    )
    try:

        @register("shift", "neighbour", chunks=lambda k: k)
        def neighbour_shift(rank: int, world_size: int) -> Program:
            """Neighbour shift: every rank sends to the next one."""
            before = (rank - 1) % world_size
            yield Step(send((rank + 1) % world_size, inp(rank)), recv(before, out(before)))

        for world_size in (2, 3, 5):
            proof = verify(schedule_of("shift", "neighbour", world_size))
            assert proof.rounds == 1
            assert proof.traffic == lower_bound("shift", world_size).traffic
            written = schedule_of("shift", "neighbour", world_size)
            assert simulate(written, 1000, topology_named("crossbar", world_size)).seconds > 0
            assert shape(Workload("shift", 40), world_size) == Shape(10, 40, 10, 10)
            assert demand_of("shift", world_size).owners == tuple(range(world_size))

        def main(group: ringcoll.LocalGroup) -> list[float]:
            tensor, result = torch.arange(3.0) + 10 * group.rank(), torch.zeros(3)
            for _ in range(2):
                shift(tensor, result, group)
            with pytest.raises(ArgumentError, match="another shape"):
                shift(tensor, torch.zeros(4), group)
            return result.tolist()

        assert ringcoll.run_threads(main, 3) == [[20, 21, 22], [0, 1, 2], [10, 11, 12]]
        unregister("shift", "neighbour")
    finally:
        del CONTRACTS["shift"]


@pytest.mark.processes
def test_a_transport_from_outside(pool: Any) -> None:
    for names, total in pool(2).run(over_added_transport):
        assert names == ("AddedTransport", "added")
        assert total == [3.0, 5.0]


def test_the_page_names_every_argument_of_an_entry() -> None:
    entry = find("all_reduce", "ring")
    arguments = {field.name for field in fields(entry) if field.init}
    arguments -= {"collective", "name", "program"}
    assert not {name for name in arguments if f"`{name}`" not in TEXT}


def test_files_that_the_page_names_are_there() -> None:
    files = re.findall(r"`((?:ringcoll|docs|tests)/[\w/]+\.\w+)`", TEXT)
    assert len(files) >= 4
    assert not {file for file in files if not (PACKAGE.parent / file).exists()}


# --- the entry says everything: no other module knows an algorithm by name -----------------

NAMES = {entry.name for entry in algorithms()} | set(ALIASES)


def names_in(source: str) -> set[str]:
    """Names of algorithms among the strings of a module; docstrings do not count."""
    tree = ast.parse(source)
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return NAMES & {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    }


def test_the_names_of_algorithms_are_seen() -> None:
    assert names_in('if name == "pairwise": pass') == {"pairwise"}
    assert names_in('"""ring"""\ndef f():\n    "ring"') == set()


@pytest.mark.parametrize(
    "room",
    [
        "schedules/ir",
        "schedules/cost",
        "runtime/machine",
        "runtime/user_files",
        "runtime/reduction",
        "runtime/transport",
    ],
)
def test_no_other_room_knows_an_algorithm_by_name(room: str) -> None:
    files = list((PACKAGE / room).rglob("*.py"))
    assert files
    named = {file.name: names_in(file.read_text(encoding="utf-8")) for file in files}
    assert not {file: names for file, names in named.items() if names}
