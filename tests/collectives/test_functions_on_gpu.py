"""Collectives on ranks that are threads, against what one process makes of all their inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringcoll import LocalGroup, run_threads
from ringcoll.runtime.group import communicator
from ringcoll.schedules import contract
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.testing import inputs as data
from tests.cases.algorithms import worlds_of
from tests.cases.calls import STYLES, Case
from tests.cases.effort import effort
from tests.cases.strategies import cases, operators
from tests.fakes import fake_streams
from tests.programs.on_device import CHECKS, HOST_CHECKS, run_check
from tests.programs.threads import Planned, run_case

some_ranks = st.sampled_from([1, 2, 3, 4])
drawn_cases = some_ranks.flatmap(lambda k: st.tuples(cases(k, longest=300), st.just(k)))


def examples(device: str, on_gpu: int) -> int:
    """As many as there is time for on a GPU; on the CPU, other tests have tried the rest."""
    return on_gpu if device == "cuda" else 20


def test_every_function(device: str):
    @effort(examples(device, 300))
    @given(drawn_cases)
    def tried(drawn: tuple[Case, int]) -> None:
        case, world_size = drawn
        run_case(replace(case, device=device), world_size)

    tried()


def test_every_function_as_a_persistent_operation(device: str):
    @effort(examples(device, 100))
    @given(drawn_cases)
    def tried(drawn: tuple[Case, int]) -> None:
        case, world_size = drawn
        run_case(replace(case, device=device), world_size, Planned())

    tried()


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_every_operator_and_dtype(device: str, collective: str):
    """No luck of the draw; long enough for vectors, and for a head and a tail."""
    for seed, dtype in enumerate((*data.INTEGERS, *data.FLOATS, *data.COMPLEX, torch.bool)):
        for op in operators(dtype):
            kind = "rough" if seed % 2 else "exact"
            case = Case(collective, op=op, dtype=dtype, lengths=(301,), kind=kind, seed=seed)
            run_case(replace(case, device=device), 3)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_algorithm(device: str, world_size: int):
    for entry in algorithms(world_size=world_size):
        rules = contract(entry.collective)
        for in_place in sorted({False, rules.in_place}):
            case = Case(
                entry.collective,
                entry.name,
                lengths=(1001,),
                dtype=torch.float32,
                kind="rough",
                root=world_size - 1 if rules.rooted else 0,
                in_place=in_place,
                async_op=not in_place,
                device=device,
            )
            run_case(case, world_size)


@pytest.mark.parametrize("style", STYLES)
def test_every_layout(device: str, style: str):
    for collective in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "gather"):
        for dtype in (torch.complex64, torch.bfloat16):
            numel = 1 if style == "scalar" else 6
            case = Case(collective, form="single", style=style, dtype=dtype, lengths=(numel,))
            run_case(replace(case, device=device), 3)


@pytest.mark.slow
@pytest.mark.parametrize("wire_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wire_dtypes(device: str, dtype: torch.dtype, wire_dtype: torch.dtype):
    """Within the bound of the wire dtype, and the same bits on all ranks."""
    for entry in algorithms("all_reduce"):
        case = Case(
            "all_reduce",
            entry.name,
            dtype=dtype,
            wire_dtype=wire_dtype,
            kind="rough",
            lengths=(301,),
            device=device,
        )
        for world_size in worlds_of(entry, 4):
            run_case(case, world_size)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_checks(device: str, name: str, world_size: int):
    results = run_threads(lambda group: run_check(name, group, device), world_size)
    assert [item for found in results for item in found] == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", HOST_CHECKS)
def test_checks_of_transports_by_the_host(name: str):
    # One rank: capturing would disturb the streams of others.
    assert run_threads(lambda group: run_check(name, group, "cuda"), 1) == [[]]


@pytest.mark.parametrize("name", CHECKS)
def test_the_checks_find_that_nothing_was_done(monkeypatch: pytest.MonkeyPatch, name: str):
    def no_instructions(program: Iterable[Any], *arguments: object) -> None:
        """Run nothing."""

    monkeypatch.setattr(communicator, "drive", no_instructions)
    results = run_threads(lambda group: run_check(name, group, "cpu"), 3)
    assert any(results)


# The stand-in knows no sparse tensors, and nothing of a future's futures.
ORDERED = [name for name in CHECKS if name not in ("bad_calls", "futures")]


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERED)
@pytest.mark.parametrize("on_host", [False, True], ids=["nccl", "host"])
def test_the_checks_order_their_streams(on_host: bool, name: str):
    """With a stand-in for CUDA, which sees what nothing orders: in the checks, or beneath them."""
    with fake_streams.in_place() as cuda:

        def main(group: LocalGroup) -> list[str]:
            return run_check(name, group, "cpu", cuda)

        assert fake_streams.run(cuda, 2, main, on_host=on_host) == [[], []]
        assert cuda.races == []
