"""``ringcoll bench`` as it is typed, with ``--vs native`` and without."""

import csv
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ringcoll.runtime import launch
from ringcoll.tools import bench
from ringcoll.tools.bench import device, oversubscribed, reports
from ringcoll.tools.cli import cli, measuring
from ringcoll.tools.cli.app import INTERRUPTED
from tests.fakes import wrong_algorithm
from tests.programs.started import of_session, run_program, started
from tests.programs.warm import ProgramWithWarmRanks

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}


def call(*words):
    result = CliRunner().invoke(cli, words, prog_name="ringcoll")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def on_pool(pool, monkeypatch):
    """Let commands use the tests' own pool of ranks instead of starting some."""

    def on_ranks(function, request, *, world_size, backend, on_report, on_start=None, kind="cpu"):
        ranks = pool(world_size, backend)
        if on_start is not None:
            on_start(ranks.run(device, kind))
        return ranks.run(function, request, on_report=on_report)[0]

    monkeypatch.setattr(measuring, "on_ranks", on_ranks)


@pytest.mark.usefixtures("on_pool")
class TestBench:
    def test_one_block_for_each_algorithm(self, tmp_path):
        file = tmp_path / "found.json"
        result = call(
            "bench", "all-reduce", "-k", "2", "-b", "8", "-e", "32", "-f", "2", "-n", "2",
            "--algorithms", "ring,native", "-J", str(file),
        )  # fmt: skip
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        blocks = [line for line in lines if line.startswith("# Algorithm: ")]
        assert blocks == ["# Algorithm: ring", "# Algorithm: native"]
        rows = [line.split() for line in lines if not line.startswith("#")]
        assert [row[0] for row in rows] == ["8", "16", "32"] * 2
        assert all(row[8::4] == ["0", "0"] for row in rows)
        assert sum(line.startswith("# Avg bus bandwidth    : ") for line in lines) == 2
        assert lines[-1] == f"# Writing JSON output to {file}"
        found = json.loads(file.read_text(encoding="utf-8"))
        assert [one["size"] for one in found["results"]] == [8, 8, 16, 16, 32, 32]
        assert found["config"]["nranks"] == 2
        assert [device["rank"] for device in found["config"]["devices"]] == [0, 1]

    @pytest.mark.slow
    def test_all_types_operators_and_roots(self):
        words = ("bench", "reduce", "-k", "2", "-b", "64", "-e", "64", "-n", "1", "-w", "0")
        found = json.loads(call(*words, "-d", "all", "-o", "all", "-r", "all", "--json").stdout)[
            "results"
        ]
        assert len({one["type"] for one in found}) == 12
        assert {one["redop"] for one in found} == {"sum", "prod", "max", "min", "avg", "mulsum"}
        assert {one["root"] for one in found} == {"0", "1"}
        # 6 operators, but a scaled sum is for floats only: 6 of the 12 types
        assert len(found) == 2 * (12 * 5 + 6)
        assert all(one["in_place"]["nwrong"] == 0 for one in found)

    def test_steps_and_factors(self):
        words = ("bench", "broadcast", "-k", "2", "-b", "8", "-e", "24", "-n", "1", "--json")

        def sizes(*more):
            return [one["size"] for one in json.loads(call(*words, *more).stdout)["results"]]

        assert sizes("-i", "8") == [8, 16, 24]
        assert sizes("-f", "2", "-i", "8") == [8, 16]
        assert sizes() == [8, 16]  # by factors of 2, where nccl-tests' step of 1 MiB leaves one

    def test_a_wrong_algorithm_ends_in_status_1(self, monkeypatch):
        for module in (bench, reports):  # the door takes what the room has
            monkeypatch.setattr(module, "wrong_in", lambda results: 5)
        result = call("bench", "barrier", "-k", "2", "-n", "1")
        assert result.exit_code == 1
        assert "# Out of bounds values : 5 FAILED" in result.stdout

    def test_a_refused_algorithm_ends_in_status_1(self):
        words = ("bench", "all_reduce", "-k", "2", "-b", "64", "-e", "64", "-n", "1")
        result = call(*words, "-o", "mulsum", "--algorithms", "ring,native")
        assert result.exit_code == 1
        assert "# not available: torch.distributed makes PREMUL_SUM" in result.stdout
        assert "# Out of bounds values : 0 OK" in result.stdout

    def test_few_samples_are_marked(self):
        words = ("bench", "broadcast", "-k", "2", "-b", "64", "-e", "64", "-f", "2", "-n")
        few = "2 medians are of fewer than 5 samples, and rough"
        assert f"# Few samples          : {few}\n" in call(*words, "4").stdout
        assert "Few samples" not in call(*words, "50", "-z", "1").stdout

    def test_as_csv(self):
        words = ("bench", "reduce", "-k", "2", "-b", "64", "-e", "128", "-f", "2", "-n", "1")
        text = call(*words, "--algorithms", "direct,native", "--csv").stdout
        rows = list(csv.DictReader(text.splitlines()))
        assert [row["algorithm"] for row in rows] == ["direct", "direct", "native", "native"] * 2
        assert [row["size"] for row in rows] == ["64"] * 4 + ["128"] * 4
        assert {row["mode"] for row in rows} == {"out_of_place", "in_place"}
        assert {(row["wrong"], row["error"]) for row in rows} == {("0", "")}
        assert all(float(row["time_us"]) > 0 for row in rows)

    @pytest.mark.usefixtures("own_folder")
    def test_an_algorithm_of_the_user(self):
        assert call("new", "all_gather", "own_gather").exit_code == 0
        words = ("bench", "all_gather", "-k", "2", "-b", "64", "-e", "64", "-n", "1", "--json")
        result = call(*words, "--algorithms", "own_gather.py:own_gather,ring")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)["results"]
        assert [one["algorithm"] for one in found] == ["own_gather", "ring"]
        assert {one["in_place"]["nwrong"] for one in found} == {0}

    def test_beside_native_it_says_who_wins(self, tmp_path):
        picture = tmp_path / "curves.svg"
        result = call(
            "bench", "--vs", "native", "-k", "3", "-b", "4", "-e", "64", "-f", "16", "--seconds", "0",
            "--picture", str(picture),
        )  # fmt: skip
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert lines[-1] == str(picture)
        assert picture.read_text(encoding="utf-8").startswith("<?xml")
        for word in ("Lowest median: ", "Ring against tree: ", "Ring against double tree: "):
            assert any(line.startswith(word) for line in lines), word
        assert any("right to the last bit, on all 3 ranks" in line for line in lines)
        assert set(oversubscribed(3)) <= set(lines)
        rows = [line for line in lines if re.search(r"\d%", line)]
        # Two sizes; ring, tree, double tree, the first two over gloo, native, best of the rest.
        assert len(rows) == 14
        assert [row.split()[-7:-6] for row in rows if "over gloo" in row] == [["gloo"]] * 4
        assert sum("*" in row for row in rows) >= 2
        assert sum("+" in row for row in rows) == 2

    def test_beside_native_as_data(self):
        words = ("all_gather", "-k", "2", "-b", "1", "-e", "64", "--seconds", "0", "--json")
        result = call("bench", "--vs", "native", *words)
        found = json.loads(result.stdout)
        assert found["picture"] is None
        assert found["out_of_bounds"]["count"] == 0
        assert "right to the last bit, on all 2 ranks" in found["findings"][-1]
        assert found["environment"]["world_size"] == 2
        assert [one["size"] for one in found["results"]] == [16] * 4 + [64] * 4  # 1 is too few
        assert {one["algorithm"] for one in found["results"][1::4]} == {"ring@gloo"}
        native = found["results"][3::4]
        assert {one["algorithm"] for one in native} == {"native"}
        assert [one["in_place"]["speed_against_native"] for one in native] == [1.0, 1.0]
        assert {one["out_of_place"] for one in found["results"]} == {None}

    def test_beside_native_as_csv(self):
        words = ("bench", "--vs", "native", "-k", "2", "-b", "4", "-e", "4", "--seconds", "0")
        text = call(*words, "--algorithms", "ring", "--csv").stdout
        row, native = csv.DictReader(text.splitlines())
        assert (row["algorithm"], row["size"], row["wrong"]) == ("ring", "4", "0")
        speed = float(native["time_us"]) / float(row["time_us"])
        assert float(row["speed_against_native"]) == pytest.approx(speed)

    def test_contenders_over_another_transport(self):
        words = ("bench", "all_reduce", "-k", "2", "-b", "400K", "-e", "400K", "-n", "2", "--json")
        names = ["ring@gloo", "persistent@ucx", "shared_tensors"]
        result = call(*words, "--algorithms", ",".join(names))
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)["results"]
        assert [one["algorithm"] for one in found] == names
        assert {one["in_place"]["nwrong"] for one in found} == {0}

    def test_chosen_contenders(self):
        words = ("bench", "--vs", "native", "-k", "2", "-b", "4", "-e", "4", "--seconds", "0")
        found = json.loads(call(*words, "--algorithms", "ring,auto", "--json").stdout)["results"]
        assert [one["algorithm"] for one in found] == ["ring", "auto", "native"]
        assert not any(one["best_of_the_rest"] for one in found)


@pytest.mark.parametrize(
    "words,said",
    [
        ("bench nonsense", "unknown collective 'nonsense'"),
        ("bench all_reduce --algorithms nonsense", "unknown algorithm 'nonsense'"),
        ("bench all_reduce --algorithms ,", "name at least one"),
        ("bench all_reduce --algorithms ring@nonsense", "got nonsense"),
        (
            "bench all_reduce --transport ucx --algorithms ring@gloo",
            "all of this run goes over ucx: leave --transport and RINGCOLL_TRANSPORT away",
        ),
        ("bench all_reduce -b 3X", "is not a size"),
        ("bench all_reduce -b 8 -e 4", "below the smallest"),
        ("bench all_reduce -o band", "operator band is not defined for float"),
        ("bench all_reduce -o nonsense", "is none of sum"),
        ("bench reduce -k 2 -r 2", "rank 2 is not one of 2"),
        ("bench reduce -r x", "neither a rank nor"),
        (
            "bench all_reduce --algorithms no.such.module:ring",
            "there is no module 'no.such.module'",
        ),
        ("bench all_reduce -J no/such/folder/found.json", "there is no folder"),
        ("bench all_reduce --transport mpi", "'mpi' is not one of"),
        ("bench --picture no/such/folder/curves.png", "there is no folder"),
        ("bench --picture curves.doc", "has the ending '.doc', expected"),
        ("bench --vs native --transport mpi", "'mpi' is not one of"),
        ("bench all_reduce --cuda-transport gloo", "--cuda-transport says nothing about"),
        ("bench all_reduce --device cuda --transport gloo", "--transport says nothing about"),
        ("bench barrier --vs native", "at no size is there an element"),
        ("bench --vs nonsense", "'nonsense' is not 'native'"),
        ("bench --vs native -d all", "--vs and --picture are for one datatype"),
    ],
)
def test_bad_calls_are_explained_before_anything_starts(words, said, monkeypatch):
    monkeypatch.setattr(launch, "Ranks", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(os, "environ", {**os.environ})  # where options put transports
    result = call(*words.split())
    assert result.exit_code == 2
    assert said in result.output


def test_without_matplotlib_nothing_is_measured(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(launch, "Ranks", None)
    result = call("bench", "--vs", "native", "--picture", "curves.png")
    assert result.exit_code == 2
    assert "ringcoll[plot]" in result.output


def ringcoll(*words, **options):
    return run_program(
        sys.executable, "-m", "ringcoll.tools.cli", *words, env=ENVIRONMENT, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words,said",
    [
        ("bench all_reduce -n 2", "# Out of bounds values : 2048 FAILED"),
        ("bench --vs native --seconds 0", "WRONG results: forgetful ring at 4 KiB (2048"),
    ],
)
def test_an_imported_algorithm_that_is_wrong(words, said):
    done = ringcoll(
        *words.split(), "-k", "2", "-b", "4K", "-e", "4K",
        "--algorithms", f"tests.fakes.registers_wrong_algorithm:{wrong_algorithm.NAME}",
        by=ProgramWithWarmRanks,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert said in done.stdout


@pytest.mark.slow
def test_under_torchrun_only_rank_0_prints():
    done = run_program(
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "ringcoll.tools.cli", "bench", "all_reduce", "-b", "8", "-e", "64", "-f", "8", "-n", "2",
        "--json",
        env=ENVIRONMENT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # once, and nothing else
    assert found["config"]["nranks"] == 2
    assert [one["size"] for one in found["results"]] == [8, 64]
    assert found["out_of_bounds"]["count"] == 0


def test_torchrun_decides_how_many(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    result = call("bench", "all_reduce", "-k", "2")
    assert result.exit_code == 2
    assert "3 have been started" in result.output


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("moment", ["starting", "measuring"])
def test_interrupt_leaves_no_process(moment):
    terminal, theirs = pty.openpty()  # the progress bar is drawn on terminals only
    seen = bytearray()
    reader = threading.Thread(target=read_all, args=(terminal, seen))
    reader.start()
    command = ["ringcoll.tools.cli", "bench", "--vs", "native", "--seconds", "600"]
    try:
        with started(
            sys.executable, "-m", *command,
            env=ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "200"},
            stdout=subprocess.DEVNULL, stderr=theirs,
        ) as process:  # fmt: skip
            os.close(theirs)
            wait_until(lambda: len(of_session(process.pid)) >= 5)
            if moment == "measuring":
                # The first size takes longer than connecting.
                wait_until(lambda: all(connected(pid) for pid in children(process.pid)))
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
            assert process.wait(60) == INTERRUPTED
            wait_until(lambda: not of_session(process.pid))
    finally:
        reader.join(60)
        os.close(terminal)
    assert b"interrupted; all ranks were ended" in seen
    assert b"Traceback" not in seen


def read_all(terminal, seen):
    """Read what is written to a terminal, until nobody has it open."""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            return
        if not piece:
            return
        seen += piece


def children(session):
    """The ranks: processes of a session that were forked from multiprocessing's server."""
    processes = of_session(session)
    servers = {
        pid for pid in processes if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }
    return [
        pid
        for pid in servers
        if int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) in servers
    ]


def connected(pid):
    """Whether a process has as many sockets as a rank that has joined its group."""
    try:
        links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return sum(link.startswith("socket:") for link in links) >= 8
