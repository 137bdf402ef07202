"""The table and the JSON of nccl-tests, read back."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from ringcoll.tools.bench import (
    BenchRequest,
    Result,
    Timing,
    Workload,
    average_busbw,
    csv_records,
    document,
    environment,
)
from ringcoll.tools.cli import nccl_tests_table

DEVICE = {
    "rank": 0, "group": 0, "pid": 1234, "hostname": "host", "device": 0, "device_kind": "cpu",
    "device_info": "a CPU",
    "threads": 1,
}  # fmt: skip


def result(out_of_place=2943.25, in_place=2953.54, wrong=0, **changes):
    """The line that nccl-tests published: 2 x V100 over PCIe."""
    fields: dict[str, Any] = {
        "workload": Workload("all_reduce", 33554432),
        "contender": "ring",
        "world_size": 2,
        "count": 8388608,
        "nbytes": 33554432,
        "out_of_place": None if out_of_place is None else Timing((out_of_place * 1e-6,), 1, wrong),
        "in_place": None if in_place is None else Timing((in_place * 1e-6,), 1, wrong),
    }
    return Result(**fields | changes)


def test_the_published_line():
    assert " ".join(nccl_tests_table.line(result()).split()) == (
        "33554432 8388608 float sum -1 2943.25 11.40 11.40 0 2953.54 11.36 11.36 0"
    )


def test_columns_stand_under_their_names():
    names, units = list(nccl_tests_table.header("ring"))[-2:]
    line = nccl_tests_table.line(result())
    ends = [match.end() for match in re.finditer(r"\S+", line)]
    assert names.startswith("# ")
    assert [match.end() for match in re.finditer(r"\S+", names[1:])] == [end - 1 for end in ends]
    assert names[1:].split() == [
        "size", "count", "type", "redop", "root",
        *["time", "algbw", "busbw", "#wrong"] * 2,
    ]  # fmt: skip
    assert units[1:].split() == ["(B)", "(elements)", *["(us)", "(GB/s)", "(GB/s)"] * 2]


def test_a_script_for_nccl_tests_reads_a_block():
    request = BenchRequest("all_reduce", ("ring",), (33554432,))
    lines = [
        *nccl_tests_table.preamble(request, environment(2), [DEVICE]),
        *nccl_tests_table.header("ring"),
        nccl_tests_table.line(result()),
        nccl_tests_table.line(result(in_place=None)),
        *nccl_tests_table.footer(request, [result(), result(in_place=None)]),
    ]
    data = [line.split() for line in lines if not line.startswith("#")]
    assert [len(row) for row in data] == [13, 13]
    assert data[1][9:] == ["N/A"] * 4
    text = "\n".join(lines)
    found = re.findall(r"^# Out of bounds values : (\d+) (\w+)", text, re.MULTILINE)
    assert found == [("0", "OK")]
    (average,) = re.findall(r"# Avg bus bandwidth    : ([\d.]+)", text)
    assert float(average) == pytest.approx((2 * 11.4004 + 11.3607) / 3, rel=1e-4)
    assert "#  Rank  0 Group  0 Pid   1234 on       host device  0 [cpu] a CPU" in lines


def test_steps_are_named():
    def step(*sizes):
        request = BenchRequest("all_reduce", ("ring",), sizes)
        (line,) = (
            line
            for line in nccl_tests_table.preamble(request, environment(2), [])
            if "step" in line
        )
        return re.findall(r"step: (\S+)", line)[0]

    assert step(8) == "0(bytes)"
    assert step(8, 16, 32) == "2(factor)"
    assert step(8, 16, 24) == "8(bytes)"
    assert step(0, 8, 16) == "8(bytes)"


def test_wrong_elements_fail():
    request = BenchRequest("all_reduce", ("ring",), (33554432,))
    bad = result(wrong=3)
    assert nccl_tests_table.line(bad).split()[8::4] == ["3", "3"]
    assert "# Out of bounds values : 6 FAILED" in list(
        nccl_tests_table.footer(request, [bad, result()])
    )


def test_what_was_not_checked_or_refused_is_no_number():
    assert nccl_tests_table.line(result(wrong=None)).split()[8::4] == ["N/A", "N/A"]
    refused = result(None, None, refused="no such dtype")
    assert nccl_tests_table.line(refused).split()[5:] == ["N/A"] * 8
    request = BenchRequest("all_reduce", ("native",), (33554432,))
    assert "# not available: no such dtype" in list(nccl_tests_table.footer(request, [refused]))
    assert average_busbw([refused]) == 0


@pytest.mark.parametrize(
    "value,width,text",
    [
        (0.004, 6, "0.00"),
        (999.994, 6, "999.99"),
        (9999.94, 6, "9999.9"),
        (99999.4, 6, "99999"),
        (1234567.0, 6, "1e+06"),
        (99999.94, 7, "99999.9"),
    ],
)
def test_numbers_fit_their_column(value, width, text):
    written = nccl_tests_table._number(value, width)
    assert written.strip() == text
    assert len(written) == width


def test_json_has_what_nccl_tests_has():
    request = BenchRequest("all_reduce", ("ring", "native"), (33554432,))
    facts = environment(2)
    refused = result(None, None, contender="native", refused="no such dtype")
    found = json.loads(json.dumps(document(request, facts, [DEVICE], [result(), refused])))
    assert set(found) >= {
        "version", "start_time", "args", "env", "config", "results", "out_of_bounds",
        "average_bus_bandwidth", "end_time", "errors",
    }  # fmt: skip
    assert found["version"] == 2
    assert found["environment"]["cores"] >= 1
    assert found["config"]["devices"] == [DEVICE]
    assert found["out_of_bounds"] == {"count": 0, "okay": "true"}
    assert found["average_bus_bandwidth"]["bandwidth"] == pytest.approx(11.3805, rel=1e-4)
    assert found["errors"] == ["native: no such dtype"]
    first, second = found["results"]
    head = {"algorithm": "ring", "size": 33554432, "count": 8388608, "type": "float",
            "redop": "sum", "root": "-1", "actual_iterations": 1}  # fmt: skip
    assert first.items() >= head.items()
    assert first["out_of_place"]["time"] == pytest.approx(2943.25)
    assert first["out_of_place"]["alg_bw"] == pytest.approx(11.4004, rel=1e-4)
    assert first["in_place"]["nwrong"] == 0
    per_iteration = first["in_place_per_iter"]
    for key in ("min_us", "max_us", "avg_us", "p50_us", "p95_us", "p99_us"):
        assert per_iteration[key] == pytest.approx(2953.54)
    assert per_iteration["stdev_us"] == 0
    assert len(per_iteration["times_us"]) == 1
    assert second["out_of_place"] is None
    assert second["error"] == "no such dtype"


def test_the_environment_holds_no_secrets(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    facts = environment(3)
    assert facts["variables"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert "secret" not in json.dumps(facts)
    assert facts["oversubscribed"] == (facts["cores"] < 3)
    assert facts["cpu"]
    assert len(facts["load_average"]) == 3


def test_samples_and_sizes_of_a_record_are_those_of_the_run() -> None:
    request = BenchRequest("all_reduce", ("ring",), (8, 64, 4096))
    timing = Timing((1e-6, 2e-6, 3e-6, 6e-6), 5, 0)
    found = document(request, environment(2), [DEVICE], [result(out_of_place=None, in_place=None)])
    assert found["config"]["minimum_bytes"] == 8
    assert found["config"]["maximum_bytes"] == 4096
    measured = replace(result(), out_of_place=timing)
    (record,) = document(request, environment(2), [DEVICE], [measured])["results"]
    assert record["out_of_place_per_iter"] == {
        **{f"{name}_us": pytest.approx(getattr(timing.summary, f"{name}_s") * 1e6)
           for name in ("min", "max", "avg", "p25", "p50", "p75", "p95", "p99", "stdev")},
        "cv_pct": pytest.approx(100 * timing.summary.stdev_s / 3e-6),
        "iterations_per_sample": 5,
        "times_us": pytest.approx([1.0, 2.0, 3.0, 6.0]),
    }  # fmt: skip
    (line,) = (
        line for line in nccl_tests_table.preamble(request, environment(2), []) if "step" in line
    )
    assert "minBytes 8 maxBytes 4096 " in line


def test_csv_has_a_row_for_each_way() -> None:
    refused = result(None, None, contender="native", refused="no such dtype")
    *rows, last = csv_records([result(), refused])
    assert (last["algorithm"], last["error"]) == ("native", "no such dtype")
    assert [(row["algorithm"], row["mode"]) for row in rows] == [
        ("ring", "out_of_place"),
        ("ring", "in_place"),
    ]
    assert [row["time_us"] for row in rows] == pytest.approx([2943.25, 2953.54])
