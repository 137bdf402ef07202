"""``ringcoll train`` as it is typed."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ringcoll.bench.environment import oversubscribed
from ringcoll.bench.training import (
    NATIVE,
    Comparison,
    Contender,
    Epoch,
    TrainingResult,
)
from ringcoll.cli import measuring
from tests.programs.started import run_program

ROOT = Path(__file__).parents[2]
SMALL = ("--epochs", "1", "--layers", "2", "--width", "16", "--bucket-bytes", "1K")


@pytest.fixture
def on_pool(pool, monkeypatch):
    """Let the command use the tests' own pool of ranks instead of starting some."""

    def on_ranks(function, *args, world_size, backend, on_report):
        return pool(world_size, backend).run(function, *args, on_report=on_report)[0]

    monkeypatch.setattr(measuring, "on_ranks", on_ranks)


@pytest.mark.processes
@pytest.mark.usefixtures("on_pool")
class TestOnRanks:
    @pytest.mark.slow
    def test_all_trainers_end_where_native_does(self, run):
        names = "per-parameter,bucketed,torch-ddp,torch-ddp-hook"
        result = run("train", "--trainer", names, *SMALL)
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert lines[0].startswith("64-16-10 perceptron on 1438 pictures of digits, 22 steps")
        table = [line for line in lines if " KiB " in line]
        contenders = [
            f"{trainer}, {algorithm}"
            for trainer in names.split(",")
            for algorithm in ("ring", "tree")
        ]
        assert [line.partition("  ")[0] for line in table] == [*contenders, "native"]
        assert {line.split()[-2] for line in table} == {"0"}, "between ranks"
        assert "Every contender ends with the parameters of native, to the last bit." in lines
        assert set(oversubscribed(2)) <= set(lines)

    def test_trainers_that_split_the_model(self, run):
        names = ("tensor", "pipeline:gpipe", "pipeline:1f1b", "pipeline:zero_bubble")
        result = run("train", "--trainer", ",".join(names), *SMALL)
        assert result.exit_code == 0, result.output
        rows = [line for line in result.stdout.splitlines() if line.startswith(names)]
        assert [row.split()[0] for row in rows] == list(names)
        assert {row.split()[-2] for row in rows} == {"0"}, "between ranks"
        assert max(float(row.split()[-1]) for row in rows) < 1e-5, "from native"

    def test_an_algorithm_of_the_user(self, run, star):
        result = run("train", "--trainer", "torch-ddp", "--algorithm", f"{star}:star", *SMALL)
        assert result.exit_code == 0, result.output
        assert "torch-ddp, star" in result.stdout

    def test_as_data(self, run):
        words = ("--trainer", "bucketed", "--trainer", "torch-ddp-hook", "--wire", "float16")
        result = run("train", "--algorithm", "double-tree", *words, *SMALL, "--json")
        assert result.exit_code == 0
        found = json.loads(result.stdout)
        assert found["world_size"] == 2
        assert found["settings"]["wire"] == "float16"
        assert (found["wrong"], len(found["findings"])) == ([], 3)
        names = [(one["trainer"], one["algorithm"]) for one in found["results"]]
        assert names == [
            ("bucketed", "double_tree"),
            ("torch-ddp-hook", "double_tree"),
            ("torch-ddp", "native"),
        ]
        bucketed, hook, native = found["results"]
        numel = 64 * 16 + 16 + 16 * 10 + 10
        assert [one["nbytes_per_step"] for one in found["results"]] == [
            2 * numel,
            2 * numel,
            4 * numel,
        ]
        assert [one["between_ranks"] for one in found["results"]] == [0, 0, 0]
        assert 0 < bucketed["from_native"] < bucketed["moved"]
        assert 0 <= bucketed["overlap"] <= 1
        assert hook["overlap"] is native["overlap"] is None
        assert native["from_native"] == 0
        assert native["step"]["samples"] == 1438 // 2 // 32
        assert 0 < native["epochs"][0]["accuracy"] < 1


@pytest.mark.parametrize(
    "words,said",
    [
        ("--trainer nonsense", "'nonsense' is none of per-parameter, bucketed"),
        ("--trainer ,", "name at least one"),
        ("--algorithm nonsense", "unknown algorithm 'nonsense'"),
        ("--algorithm ring,native", "native takes part in any case"),
        ("--wire float8", "'float8' is not one of"),
        ("--backend mpi", "'mpi' is not one of"),
        ("--epochs 0", "0 is not in the range"),
        ("-k 3 --trainer tensor --width 32", "'width': the ranks do not divide it (expected a mul"),
        ("-k 4 --trainer pipeline:gpipe --layers 3", "'layers': a stage would have no layer"),
        (
            "-k 2 --trainer pipeline:1f1b --batch 3",
            "'batch': the 4 micro-batches do not divide it for 2",
        ),
        ("-k 3 --batch 480", "more samples than there are (expected at most 479, got 480)"),
    ],
)
def test_bad_calls_are_explained_before_anything_starts(run, monkeypatch, words, said):
    monkeypatch.setattr(measuring, "Ranks", None)
    result = run("train", *words.split())
    assert result.exit_code == 2
    assert said in result.output


def test_without_scikit_learn(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr(measuring, "Ranks", None)
    result = run("train")
    assert result.exit_code == 2
    assert "pip install 'ringcoll[train]'" in result.output


GOOD = TrainingResult(
    contender=Contender("bucketed", "ring"),
    epochs=(Epoch(Contender("bucketed", "ring"), 1, 0.5, 0.9),),
    steps_s=(1.0, 2.0),
    nbytes=8,
    overlap=0.5,
    between_ranks=0.0,
    first=Comparison(0.0, 0.1, 1.0),
    end=Comparison(0.0, 0.5, 1.0),
)
BAD = {
    "ranks differ by 1e-09": replace(GOOD, between_ranks=1e-9),
    "ranks differ by nan": replace(GOOD, between_ranks=float("nan")),
    "after the first step 0.01 from native": replace(GOOD, first=Comparison(0.01, 0.1, 1.0)),
    "at the end 0.2 from native": replace(GOOD, end=Comparison(0.2, 0.5, 1.0)),
    "at the end nan from native": replace(GOOD, end=Comparison(float("nan"), 0.5, 1.0)),
}


@pytest.mark.parametrize("said", BAD)
def test_what_is_wrong_ends_in_status_1(run, monkeypatch, said):
    monkeypatch.setattr(measuring, "on_ranks", lambda *args, **options: [BAD[said]])
    result = run("train")
    assert result.exit_code == 1
    assert f"WRONG: bucketed, ring: {said}" in result.stdout
    assert json.loads(run("train", "--json").stdout)["wrong"]


def test_differences_within_the_tolerance(run, monkeypatch):
    native = replace(GOOD, contender=NATIVE)
    within = replace(GOOD, end=Comparison(0.04, 0.5, 1.0), first=Comparison(1e-7, 0.1, 1.0))
    monkeypatch.setattr(measuring, "on_ranks", lambda *args, **options: [within, native])
    result = run("train")
    assert result.exit_code == 0
    assert "Largest difference from native: 0.04, allowed 0.05" in result.stdout


@pytest.mark.slow
@pytest.mark.processes
def test_under_torchrun_only_rank_0_prints():
    done = run_program(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "ringcoll.cli", "train", "--algorithm", "ring", *SMALL, "--json",
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # once, and nothing else
    assert [one["from_native"] for one in found["results"]] == [0, 0, 0]
