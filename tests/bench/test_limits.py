"""The limits that every library is measured against."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ringcoll import testing
from ringcoll.tools.bench import (
    LIMITS,
    BenchRequest,
    Result,
    Timing,
    Workload,
    added_numel,
    efficiencies,
    exchanged_nbytes,
    on_rank,
)
from ringcoll.tools.cli import cli
from ringcoll.tools.cli.nccl_tests_table import limit_lines


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
    (line,) = limit_lines(results)
    assert "ring 0.50, native 0.25" in line
    assert not efficiencies(results[:2])


@pytest.mark.processes
@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "barrier"])
def test_limits_are_timed_beside_the_contenders(collective: str):
    request = BenchRequest(
        collective, ("auto", *LIMITS), (4096,), dtypes=("int32", "f8e4m3"), most=4
    )
    results = testing.ranks(2, backend="gloo").run(on_rank, request)[0]
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
             "--transport", "ucx", "--algorithms", "auto,native", "-J", str(file)]  # fmt: skip
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
