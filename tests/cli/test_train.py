"""``ringcoll train`` as it is typed."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.runtime import launch
from ringcoll.tools.bench import oversubscribed
from ringcoll.tools.cli import measuring
from ringcoll.tools.cli.train import (
    NATIVE_TRAINER,
    Comparison,
    Contender,
    Epoch,
    TrainingResult,
    loss_curves,
)
from ringcoll.training import ModelStates
from tests.programs.started import run_program

ROOT = Path(__file__).parents[2]
SMALL = ("--epochs", "1", "--layers", "2", "--width", "16", "--bucket-bytes", "1K")
NUMEL = 64 * 16 + 16 + 16 * 10 + 10  # parameters of that model


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
        table = [line for line in lines if " KiB  " in line]
        contenders = [
            f"{trainer}, {algorithm}"
            for trainer in names.split(",")
            for algorithm in ("ring", "tree")
        ]
        assert [line.partition("  ")[0] for line in table] == [*contenders, "native"]
        assert {line.split()[-2] for line in table} == {"0"}, "between ranks"
        assert "Every contender ends with the parameters of native, to the last bit." in lines
        assert set(oversubscribed(2)) <= set(lines)

    def test_systems_that_end_where_native_does(self, run):
        names = ("one-process", "tensor", "pipeline:gpipe", "pipeline:1f1b")
        result = run("train", "--trainer", ",".join(names), *SMALL)
        assert result.exit_code == 0, result.output
        rows = [line for line in result.stdout.splitlines() if line.startswith(names)]
        assert [row.split()[0] for row in rows] == list(names)
        assert {row.split()[-2] for row in rows} == {"0"}, "between ranks"
        assert max(float(row.split()[-1]) for row in rows) < 1e-5, "from native"

    def test_systems_that_end_elsewhere_have_learned(self, run, tmp_path):
        names = ["gossip:ring", "local-sgd", "server:async"]
        picture = tmp_path / "loss.svg"
        words = ("--trainer", ",".join(names), "--picture", str(picture))
        result = run("train", *words, *SMALL, "--json")
        assert result.exit_code == 0, result.output
        results = json.loads(result.stdout)["results"]
        assert [result["trainer"] for result in results] == [*names, "torch-ddp"]
        sent = {result["trainer"]: result["nbytes_sent_per_step"] for result in results}
        assert sent["local-sgd"] < sent["torch-ddp"] == 4 * NUMEL
        assert picture.read_text().startswith("<?xml")

    def test_a_sharded_optimizer_brings_adamw_and_holds_less(self, run):
        words = ("--trainer", "sharded:3", "--bucket-bytes", "256K")
        result = run("train", *words, *SMALL[:-2], "--json")
        assert result.exit_code == 0, result.output
        document = json.loads(result.stdout)
        assert document["settings"]["optimizer"] == "adamw"
        sharded, native = (sum(each["memory_nbytes"].values()) for each in document["results"])
        assert native == 16 * NUMEL
        assert sharded == pytest.approx(native / 2, rel=0.02)  # AdamW counts steps, 4 bytes

    def test_a_transformer_where_a_trainer_needs_it(self, run):
        words = ("--trainer", "3d:1x1x2,context", "--epochs", "1", "--layers", "1", "--width", "16")
        result = run("train", *words, "--batch", "64")
        assert result.exit_code == 0, result.output
        lines = result.stdout.splitlines()
        assert lines[0].startswith("transformer of 1 blocks, 16 wide on 1024 pieces of text")

    def test_a_loss_that_is_not_finite_ends_all_ranks(self, run):
        result = run("train", "--trainer", "tensor", "--lr", "1e30", *SMALL)
        assert result.exit_code == 2
        assert "is not finite in step " in result.output

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
        numel = NUMEL
        sent = [one["nbytes_sent_per_step"] for one in found["results"]]
        assert sent[-1] == 4 * numel
        assert sent[:-1] == pytest.approx([2 * numel] * 2, rel=0.02)  # and a barrier an epoch
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
        ("--trainer nonsense", "'nonsense' is none of one-process, per-parameter, bucketed"),
        ("--trainer gossip:star", "'gossip:star' is none of "),
        ("--trainer 3d:2x2", "'3d:2x2' is none of "),
        ("--trainer tensor:2", "'tensor:2' is none of "),
        ("-k 4 --trainer 3d:2x2x2", "the mesh has other places (expected 8, got 4)"),
        ("--trainer context --model perceptron", "context needs another (expected transformer,"),
        ("--trainer sharded:1 --optimizer sgd", "sharded:1 needs another (expected adamw,"),
        ("-k 1 --trainer server:sync", "a server needs workers (expected at least 2, got 1)"),
        ("-k 3 --trainer sequence", "they do not divide the heads (expected a divisor of 4"),
        ("-k 5 --trainer context", "they do not share the sequences evenly"),
        ("--picture nowhere.nothing", "'nowhere.nothing' has the ending '.nothing'"),
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
            "'batch': the 4 micro-batches do not divide it",
        ),
        ("-k 3 --batch 480", "more samples than there are (expected at most 479, got 480)"),
    ],
)
def test_bad_calls_are_explained_before_anything_starts(run, monkeypatch, words, said):
    monkeypatch.setattr(launch, "Ranks", None)
    result = run("train", *words.split())
    assert result.exit_code == 2
    assert said in result.output


def test_without_scikit_learn(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setattr(launch, "Ranks", None)
    result = run("train")
    assert result.exit_code == 2
    assert "pip install 'ringcoll[train]'" in result.output


GOOD = TrainingResult(
    contender=Contender("bucketed", "ring"),
    epochs=(Epoch(Contender("bucketed", "ring"), 1, 0.5, 0.9),),
    start_loss=2.0,
    steps_s=(1.0, 2.0),
    nbytes_sent=8,
    memory=ModelStates(4, 4, 0),
    overlap=0.5,
    bubble=None,
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
IDLE = replace(GOOD, contender=Contender("gossip:ring", "auto"), start_loss=0.5, first=None)


@pytest.mark.parametrize("said", BAD)
def test_what_is_wrong_ends_in_status_1(run, monkeypatch, said):
    monkeypatch.setattr(measuring, "on_ranks", lambda *args, **options: [BAD[said]])
    result = run("train")
    assert result.exit_code == 1
    assert f"WRONG: bucketed, ring: {said}" in result.stdout
    assert json.loads(run("train", "--json").stdout)["wrong"]


def test_a_contender_that_has_learned_nothing_is_wrong(run, monkeypatch):
    monkeypatch.setattr(measuring, "on_ranks", lambda *args, **options: [IDLE])
    result = run("train")
    assert result.exit_code == 1
    said = "WRONG: gossip:ring: it has learned nothing: loss 0.5000, at first 0.5000"
    assert said in result.stdout


def test_differences_within_the_tolerance(run, monkeypatch):
    native = replace(GOOD, contender=NATIVE_TRAINER)
    within = replace(GOOD, end=Comparison(0.04, 0.5, 1.0), first=Comparison(1e-7, 0.1, 1.0))
    monkeypatch.setattr(measuring, "on_ranks", lambda *args, **options: [within, native])
    result = run("train")
    assert result.exit_code == 0
    assert "Largest difference from native: 0.04, allowed 0.05" in result.stdout


CURVES = {
    "lock-step": [(0.5, 1, 2.0), (1.5, 2, 1.0), (2.5, 3, 0.5)],
    "gossip": [(0.25, 1, 2.25), (0.5, 2, 1.5)],
}


@pytest.fixture
def panels():
    return pytest.importorskip("matplotlib.figure").Figure().subplots(1, 2)


def test_a_loss_is_drawn_over_steps_and_over_time(panels):
    loss_curves(panels, CURVES)
    for axes, column in zip(panels, (1, 0), strict=True):
        for line, (name, points) in zip(axes.lines, CURVES.items(), strict=True):
            assert line.get_label() == name
            assert list(line.get_xdata()) == [point[column] for point in points]
            assert list(line.get_ydata()) == [point[2] for point in points]
    assert len({line.get_color() for line in panels[0].lines}) == len(CURVES)
    assert panels[0].get_ylim() == panels[1].get_ylim()


def test_losses_need_two_panels(panels):
    with pytest.raises(ArgumentError, match=r"expected 2 axes, got 1"):
        loss_curves(panels[:1], CURVES)


def test_losses_are_written_to_a_file(run, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    native = replace(GOOD, contender=NATIVE_TRAINER)
    monkeypatch.setattr(measuring, "on_ranks", lambda *args, **options: [GOOD, native])
    assert run("train", "--picture", str(tmp_path / "losses.svg")).exit_code == 0
    text = (tmp_path / "losses.svg").read_text()
    words = ("bucketed, ring", "native", "step", "time (s)")
    assert all(f"<!-- {word} -->" in text for word in words)


@pytest.mark.slow
@pytest.mark.processes
def test_under_torchrun_only_rank_0_prints():
    done = run_program(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "ringcoll.tools.cli", "train", "--algorithm", "ring", *SMALL, "--json",
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # once, and nothing else
    assert [one["from_native"] for one in found["results"]] == [0, 0, 0]
