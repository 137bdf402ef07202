"""``ringcoll tune``, and ranks that agree on what it wrote, as real processes."""

from __future__ import annotations

import json
import logging
import os

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

from ringcoll.runtime.collectives import groups
from ringcoll.runtime.group.agreement import agree
from ringcoll.runtime.launch import Ranks, rendezvous
from ringcoll.runtime.transport import costs_of, resolved
from ringcoll.runtime.user_files import read_tables
from ringcoll.schedules.cost import choose, crowded_parameters, predictions
from ringcoll.tools.bench.tuner import Finding, TuningPlan, promising, rules_from, workloads
from ringcoll.tools.cli import cli

pytestmark = pytest.mark.processes


def finding(nbytes: int, best: str, auto: str, ratio: float = 2.0) -> Finding:
    return Finding("all_reduce", nbytes, best, auto, {auto: ratio, best: 1.0})


def test_rules_say_only_what_the_model_does_not_know():
    found = [
        finding(4, "direct", "ring"),
        finding(1 << 10, "ring", "ring"),
        finding(1 << 14, "direct", "ring", ratio=1.05),  # within the noise
        finding(1 << 18, "double_tree", "ring"),
        finding(1 << 20, "double_tree", "ring"),
    ]
    assert [str(rule) for rule in rules_from(found, 3, 2)] == [
        "all_reduce:0-64:direct:k=3:hosts=2",
        "all_reduce:64K-inf:double_tree@1M:k=3:hosts=2",
    ]
    assert rules_from([], 3) == ()
    assert rules_from([finding(4, "ring", "ring")], 3) == ()


def test_rules_for_cuda_tensors_have_segments_of_their_size():
    found = [finding(1 << 20, "double_tree", "ring")]
    (rule,) = rules_from(found, 4, device="cuda")
    assert str(rule) == "all_reduce:*:double_tree@4M:k=4:hosts=1"


def test_where_there_is_no_choice_nothing_is_measured():
    plan = TuningPlan(("all_reduce", "all_gather", "all_to_all", "barrier"), (4, 1 << 10), 1.0)
    assert workloads(plan, 4) == {"all_reduce": (4, 1 << 10), "all_gather": (1 << 10,)}


def test_algorithms_of_a_user_are_measured_beside_the_choice_of_the_model():
    costs = crowded_parameters(costs_of("gloo"), 4)
    plan = TuningPlan(("all_reduce", "all_to_all"), (4,), 1.0, costs, {"all_reduce": ("own",)})
    assert workloads(plan, 4) == {"all_reduce": (4,)}
    best = predictions("all_reduce", 4, 4, costs)[0].algorithm
    assert plan.contenders("all_reduce", 4, 4) == ("own", best)


def test_what_is_hopeless_is_not_measured():
    costs = crowded_parameters(costs_of("gloo"), 8)
    many = promising("all_reduce", 64 << 20, 8, costs)
    assert "direct" not in many
    assert set(many) < set(promising("all_reduce", 64 << 20, 8, None))
    best = predictions("all_reduce", 64 << 20, 8, costs)[0].algorithm
    assert best in many


def agreed(prefix: str) -> tuple[str, list[str]]:
    """On a rank: the table, and what it would choose."""
    groups_barrier()
    transport = groups.communicator(None, torch.device("cpu")).transport
    table = agree(transport, dist.PrefixStore(prefix, rendezvous()[0]), 60.0)
    sizes = (4, 1 << 12, 1 << 20, 1 << 26)
    return table.dumps(), [
        choose("all_reduce", n, transport.world_size, table).algorithm for n in sizes
    ]


def groups_barrier() -> None:
    import ringcoll

    ringcoll.barrier()


def with_rule_of_its_own(text: str) -> None:
    if dist.get_rank() == 1:
        os.environ["RINGCOLL_ALGORITHM"] = text


def test_processes_agree(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RINGCOLL_TUNING", "off")
    with Ranks(2, timeout_s=60.0) as ranks:
        first, second = ranks.run(agreed, "first")
        assert first == second
        assert json.loads(first[0])["source"] == "measured"
        # Rank 0 has measured, and so they do not again.
        again, _ = ranks.run(agreed, "again")
        assert again == first
        # What another rank wants does not count.
        ranks.run(with_rule_of_its_own, "ring")
        assert ranks.run(agreed, "third") == [first, second]


def test_tune_then_use_it(monkeypatch: pytest.MonkeyPatch, tmp_path):
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("RINGCOLL_TUNING", str(path))
    monkeypatch.setenv("RINGCOLL_ALGORITHM", "ring")  # is not what is measured
    words = ["tune", "-k", "2", "--seconds", "0.5", "-b", "64", "-e", "4K", "-f", "64"]
    words += ["--collectives", "all_reduce,barrier", "--json"]
    result = CliRunner().invoke(cli, words, prog_name="ringcoll", catch_exceptions=False)
    assert result.exit_code == 0
    told = json.loads(result.stdout)
    (tuned,) = read_tables(path)
    assert told["file"] == str(path)
    assert (told["device"], tuned.table.device) == ("cpu", "cpu")
    assert [one["nbytes"] for one in told["results"]] == [64, 4096]
    for one in told["results"]:
        best = min(one["medians_s"], key=one["medians_s"].get)
        assert one["best"] == best
        rules = [
            rule.algorithm
            for rule in tuned.table.tuned
            if rule.matches("all_reduce", one["nbytes"], 2, 1)
        ]
        assert rules[:1] == ([best] if one["ratio"] > 1.1 else [])
    monkeypatch.delenv("RINGCOLL_ALGORITHM")
    with Ranks(2, timeout_s=60.0) as ranks:
        first, second = ranks.run(agreed, "tuned")
    assert first == second
    assert json.loads(first[0])["source"] == str(path)


def test_tune_in_words(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RINGCOLL_TUNING", raising=False)
    path = tmp_path / "tuning.json"
    words = ["tune", "-k", "2", "--seconds", "0", "-b", "1K", "-e", "1K", "-o", str(path)]
    words += ["--collectives", "gather"]
    result = CliRunner().invoke(cli, words, prog_name="ringcoll", catch_exceptions=False)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"2 processes over {resolved('cpu')}, ")
    assert lines[2].split() == ["collective", "size", "fastest", "median", "model", "ratio"]
    assert lines[3].split()[:3] == ["gather", "1", "KiB"]
    assert lines[-1] == str(path)


def test_a_foreign_file_is_not_overwritten(tmp_path):
    path = tmp_path / "notes.json"
    path.write_text('{"mine": 1}')
    words = ["tune", "-o", str(path)]
    result = CliRunner().invoke(cli, words, prog_name="ringcoll")
    assert result.exit_code == 2
    assert f"Error: {path}: not a file of `ringcoll tune`" in result.stderr
    assert path.read_text() == '{"mine": 1}'


def test_without_a_file_to_write(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RINGCOLL_TUNING", "off")
    result = CliRunner().invoke(cli, ["tune"], prog_name="ringcoll")
    assert result.exit_code == 2
    assert "--output" in result.stderr
    assert logging.getLogger("ringcoll").level == logging.NOTSET


@pytest.mark.parametrize("option", ["--collectives", "--algorithms"])
def test_tune_without_a_name(option: str, tmp_path):
    words = ["tune", "-k", "2", "-o", str(tmp_path / "tuning.json"), option, " ,"]
    result = CliRunner().invoke(cli, words, prog_name="ringcoll")
    assert result.exit_code == 2
    assert f"{option}: name at least one" in result.output
