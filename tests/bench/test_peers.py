"""Other libraries beside ours, and the limits that all of them are measured against."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringcoll import mpiexec
from ringcoll.bench import Request, Result, Timing, Workload, on_rank, peers
from ringcoll.bench.efficiency import efficiencies, lines
from ringcoll.bench.limits import LIMITS, added_numel, exchanged_nbytes
from ringcoll.cli.app import cli
from ringcoll.errors import ArgumentError, MissingExtraError
from ringcoll.select import COLLECTIVES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / peers.FOLDER


def installed(name: str) -> None:
    try:
        peers.find(name, FOLDER)
    except MissingExtraError as error:
        pytest.skip(str(error))


def test_the_script_needs_neither_torch_nor_this_library():
    source = (ROOT / "ringcoll" / "bench" / "mpi_peer.py").read_text(encoding="utf-8")
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
    assert {"mpi4py", "numpy"} <= imported
    assert not imported & {"torch", "ringcoll", ""}


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
def test_every_collective_of_a_peer(name: str, world_size: int):
    installed(name)
    for collective in COLLECTIVES:
        request = Request(collective, (), (8, 1200), roots=(world_size - 1,), most=4)
        results = peers.measure_peer(name, request, world_size, FOLDER)
        assert [result.workload for result in results] == request.workloads
        for result in results:
            assert result.contender == name
            assert result.wrong == 0, (collective, result)
            assert result.timed is not None
            assert all(seconds > 0 for seconds in result.timed.samples_s)


@pytest.mark.processes
@pytest.mark.parametrize("name", peers.MPI_PEERS)
def test_dtypes_and_operators_of_a_peer(name: str):
    installed(name)
    dtypes, ops = ("double", "int16", "bfloat16"), ("sum", "max", "avg")
    request = Request("all_reduce", (), (64,), dtypes=dtypes, ops=ops, most=1)
    refused = 0
    for result in peers.measure_peer(name, request, 2, FOLDER):
        strange = result.workload.dtype == "bfloat16" or result.workload.op == "avg"
        assert (result.refused is not None) == strange
        assert result.wrong == (None if strange else 0)
        refused += strange
    assert refused == 5


def test_a_peer_that_fails_says_so(tmp_path: Path):
    place = tmp_path / "mpich" / "bin"
    place.mkdir(parents=True)
    for program in ("python", "mpiexec"):
        (place / program).write_text("#!/bin/sh\necho 'no such luck' >&2\nexit 3\n")
        (place / program).chmod(0o755)
    with pytest.raises(mpiexec.MpiexecError, match="no such luck") as caught:
        peers.measure_peer("mpich", Request("barrier", (), (0,)), 2, tmp_path)
    assert caught.value.status == 3


# --- limits ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "collective,sent,added",
    [
        ("all_reduce", 6000, 750),
        ("reduce_scatter", 3000, 750),
        ("all_gather", 3000, 0),
        ("broadcast", 4000, 0),
        ("reduce", 4000, 750),
        ("barrier", 0, 0),
    ],
)
def test_what_has_to_be_done(collective: str, sent: int, added: int):
    workload = Workload(collective, 4000)
    assert exchanged_nbytes(workload, 4) == sent
    assert added_numel(workload, 4) == added


def result(contender: str, seconds: float) -> Result:
    timing = Timing((seconds,), 1, 0)
    return Result(Workload("all_reduce", 64), contender, 4, 16, 64, in_place=timing)


def test_efficiency_is_the_limit_over_the_time():
    results = [
        result("ring", 8e-6),
        result("native", 16e-6),
        result("exchange", 3e-6),
        result("add", 1e-6),
        result("copy", 2e-6),
        replace(result("pigeons", 1.0), in_place=None, refused="no seed"),
    ]
    (found,) = efficiencies(results)
    assert found.of == pytest.approx({"ring": 0.5, "native": 0.25})
    assert (found.exchange_s, found.add_s, found.copy_s) == (3e-6, 1e-6, 2e-6)
    (line,) = lines(results)
    assert "ring 0.50, native 0.25" in line
    assert not efficiencies(results[:2])


@pytest.mark.processes
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "barrier"])
def test_limits_are_timed_beside_the_contenders(pool, collective: str):
    request = Request(collective, ("auto", *LIMITS), (4096,), dtypes=("int32", "f8e4m3"), most=4)
    results = pool(2).run(on_rank, request)[0]
    for one in results:
        if one.contender in LIMITS:
            assert one.wrong is None
        assert (one.timed is not None) == (one.refused is None)
    refused = [one for one in results if one.refused is not None]
    assert {(one.contender, one.workload.dtype) for one in refused} <= {("add", "f8e4m3")}
    assert len(efficiencies(results)) == len(request.workloads)


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
