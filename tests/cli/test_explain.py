"""``ringcoll explain``."""

import json

import pytest

from ringcoll.runtime.transport import costs_of
from ringcoll.runtime.user_files import Tuned, update_tables
from ringcoll.schedules.cost import Table, crowded_parameters, parse_rules


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("ALGORITHM", "TRANSPORT"):
        monkeypatch.delenv(f"RINGCOLL_{name}", raising=False)
    monkeypatch.setenv("RINGCOLL_TUNING", "off")


def test_the_choice_and_the_alternatives(run):
    result = run("explain", "all-reduce", "-k", "8", "-b", "64K", "--transport", "ucx")
    assert result.exit_code == 0
    first, second, *rest = result.stdout.splitlines()
    name = first.rpartition(": ")[2]
    assert first == f"all_reduce of 65536 bytes on 8 ranks, 1 host, ucx: {name}"
    assert second == "why: the least predicted time (costs: built-in)"
    assert next(line for line in rest if line.startswith("*")).split()[1] == name
    assert "a group measures its own" in result.stdout


def test_over_nccl_nothing_is_measured(run):
    result = run("explain", "all_reduce", "-k", "2", "--transport", "nccl")
    assert result.exit_code == 0
    assert "2 ranks, 1 host, nccl: " in result.stdout
    assert result.stdout.splitlines()[1] == "why: the least predicted time (costs: built-in)"
    assert "a group measures its own" not in result.stdout


def test_json_agrees(run):
    words = ("explain", "broadcast", "-k", "5", "-b", "16M", "--hosts", "5", "--transport", "gloo")
    found = json.loads(run(*words, "--json").stdout)
    assert run(*words).stdout.startswith(
        f"broadcast of 16777216 bytes on 5 ranks, 5 hosts, gloo: {found['algorithm']}\n"
    )
    (row,) = (row for row in found["predictions"] if row["algorithm"] == found["algorithm"])
    assert row["seconds"] <= 1.2 * found["predictions"][0]["seconds"]
    assert found["forced"] == ""
    assert found["costs"]["alpha_s"] == found["costs"]["crowded_alpha_s"]


def test_the_variable_counts(run, monkeypatch):
    monkeypatch.setenv("RINGCOLL_ALGORITHM", "all_reduce:0-1M:ring")
    assert json.loads(run("explain", "all_reduce", "-b", "4", "--json").stdout)["algorithm"] == (
        "ring"
    )
    monkeypatch.setenv("RINGCOLL_ALGORITHM", "all_reduce:0-1M:rong")
    result = run("explain", "all_reduce")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: RINGCOLL_ALGORITHM: no such algorithm of all_reduce")
    assert result.stderr.splitlines()[-1].strip() == "^^^^"


def test_a_tuned_group(run, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "tuning.json"
    table = Table(
        transport="gloo",
        world_size=4,
        parameters=crowded_parameters(costs_of("gloo"), 4),
        tuned=parse_rules("all_reduce:*:direct:k=4"),
    )
    update_tables(path, Tuned.now(table))
    monkeypatch.setenv("RINGCOLL_TUNING", str(path))
    words = ("explain", "all_reduce", "--transport", "gloo", "--json")
    found = json.loads(run(*words, "-k", "4").stdout)
    assert (found["algorithm"], found["source"]) == ("direct", str(path))
    other = json.loads(run(*words, "-k", "5").stdout)
    assert other["source"] == "built-in"


def test_tensors_on_a_gpu_have_a_table_of_their_own(run, monkeypatch, tmp_path):
    path = tmp_path / "tuning.json"
    for device, rule in (("cpu", "direct"), ("cuda", "double_tree")):
        table = Table(
            transport="gloo",
            world_size=4,
            parameters=crowded_parameters(costs_of("gloo"), 4),
            tuned=parse_rules(rule),
            device=device,
        )
        update_tables(path, Tuned.now(table))
    monkeypatch.setenv("RINGCOLL_TUNING", str(path))
    words = ("explain", "all_reduce", "-k", "4", "--transport", "gloo", "--device", "cuda")
    found = json.loads(run(*words, "--json").stdout)
    assert (found["algorithm"], found["device"]) == ("double_tree", "cuda")
    assert "measured with CUDA tensors)" in run(*words).stdout
    assert "measured with CPU tensors)" in run(*words[:-2]).stdout
    over_nccl = json.loads(run("explain", "all_reduce", "--transport", "nccl", "--json").stdout)
    assert over_nccl["device"] == "cuda"
    refused = run("explain", "all_reduce", "--transport", "nccl", "--device", "cpu")
    assert refused.exit_code == 2
    assert "nccl carries no CPU tensors" in refused.stderr


def test_an_algorithm_of_the_user_is_predicted_beside_the_others(run, star):
    words = ("explain", "all_reduce", "-k", "4", "-b", "1M", "--json")
    usual = json.loads(run(*words).stdout)
    found = json.loads(run(*words, "--algorithm", f"{star}:star").stdout)
    assert found["algorithm"] == usual["algorithm"]
    names = [prediction["algorithm"] for prediction in found["predictions"]]
    assert sorted(names) == sorted(["star", *(one["algorithm"] for one in usual["predictions"])])
    seconds = [prediction["seconds"] for prediction in found["predictions"]]
    assert seconds == sorted(seconds)
    assert run(*words, "--algorithm", "ring").exit_code == 0
    result = run(*words, "--algorithm", "hierarchical")
    assert "depends on hosts" in result.stderr


def test_no_such_collective_or_transport(run):
    assert run("explain", "all_sum").exit_code == 2
    assert run("explain", "all_reduce", "--transport", "pigeons").exit_code == 2
    assert run("explain", "all_reduce", "-b", "much").exit_code == 2
