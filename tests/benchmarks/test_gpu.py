"""What measures on a GPU, gone through without one, so that no typo wastes the time on one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from benchmarks.on_gpu import (
    bandwidth,
    clock,
    collectives,
    correctness,
    goals,
    host_time,
    mps,
    rounding,
    rows,
)
from benchmarks.on_gpu.rows import NOT_RUN, Row, Settings
from benchmarks.on_gpu.stages import MOST_S, STAGES, USUAL
from ringcoll.errors import MissingExtraError, RingcollError
from ringcoll.runtime.reduction import TORCH, gpu, resolve
from ringcoll.tools.bench import DTYPES, summarize
from ringcoll.tools.cli import cli
from tests.fakes.host_kernels import COMPILER, HOST_STREAM, HostEngine
from tests.programs.started import run_program

CPU = torch.device("cpu")
REHEARSAL = Settings("cpu", tune=True)
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
MODES = ("out-of-place", "in-place")


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_current_stream", lambda device: HOST_STREAM)


def compiles(test: Any) -> Any:
    """Runs kernels on the CPU."""
    skip = pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")
    return skip(pytest.mark.usefixtures("stream")(test))


def cells(found: list[Row], table: str) -> list[dict[str, Any]]:
    return [row.cells for row in found if row.table == table]


# --- every stage ----------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("name", STAGES)
def test_a_rehearsal_of_every_stage(name: str):
    found: list[Row] = []
    STAGES[name].run(REHEARSAL, found.append)
    assert {row.table for row in found} == {STAGES[name].table}
    table = cells(found, STAGES[name].table)
    assert all(one.get(f"{mode} #wrong", 0) == 0 for one in table for mode in MODES)
    text = "\n".join(rows.markdown(found))
    assert text.count("\n| ") == len(found) + 2  # names, and a line beneath them
    # Nothing of it says anything about a GPU.
    assert {row.cells["verdict"] for row in goals.goals(found)} == {NOT_RUN}
    expected = {"nccl": ["several GPUs: ring, tree, auto and native"]}
    assert [row.cells["what"] for row in found if NOT_RUN in row.cells] == expected.get(name, [])


@pytest.mark.parametrize("name", ["bandwidth", "every_dtype", "host_time", "correctness"])
def test_without_cupy_a_row_says_so(name: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(wanted: str) -> None:
        raise MissingExtraError("CuPy is not installed: pip install")

    monkeypatch.setattr(gpu, "engine", refuse)
    monkeypatch.setattr(Settings, "place", CPU)
    found: list[Row] = []
    STAGES[name].run(Settings("cuda"), found.append)
    assert "CuPy is not installed: pip install" in found[0].cells[NOT_RUN]
    (shapes,) = bandwidth.shapes(Settings("cuda"))
    assert "--tune" in shapes.cells[NOT_RUN]


# --- the script -----------------------------------------------------------------------


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script: Any, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
    status: int = script.main()
    return status


@pytest.mark.processes
def test_the_script(script: ModuleType, monkeypatch, tmp_path: Path, capsys):
    out = tmp_path / "out"
    words = ("--dry-run", "--out", str(out), "--commit", "abc")
    assert run(script, monkeypatch, *words, "--stages", "host_time") == 0
    document = json.loads((out / "run.json").read_text())
    assert document["settings"]["device"] == "cpu"
    found = {row["table"] for row in document["rows"]}
    assert found == {STAGES["facts"].table, STAGES["host_time"].table}
    assert {goal["verdict"] for goal in document["goals"]} == {NOT_RUN}
    text = (out / "run.md").read_text()
    assert "| commit | abc |" in text
    assert "A rehearsal on the CPU" in text
    assert goals.TABLE in capsys.readouterr().out
    assert script._new_folder(out) == tmp_path / "out-2"
    assert script._new_folder(out) == tmp_path / "out-3"


@pytest.mark.processes
def test_the_script_needs_no_installed_library(tmp_path: Path):
    tree, elsewhere = tmp_path / "tree", tmp_path / "elsewhere"
    shutil.copytree(ROOT / "ringcoll", tree / "ringcoll")
    (tree / "benchmarks").mkdir()
    script = shutil.copy(SCRIPT, tree / "benchmarks")
    shutil.copytree(ROOT / "benchmarks" / "on_gpu", tree / "benchmarks" / "on_gpu")
    with (tree / "ringcoll" / "_package.py").open("a") as file:
        file.write('\n__version__ = "of the copy"\n')
    elsewhere.mkdir()
    done = run_program(
        sys.executable, str(script), "--dry-run", "--stages", "facts",
        cwd=elsewhere,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| ringcoll | of the copy |" in (elsewhere / "gpu-run" / "run.md").read_text()


@pytest.mark.processes
def test_the_script_needs_no_arguments(script: Any, monkeypatch, tmp_path: Path):
    started: list[tuple[str, float]] = []

    def run_apart(name: str, folder: Path, arguments: list[str], limit_s: float, record: Any):
        started.append((name, limit_s))
        return [rows.missing(STAGES[name].table, "everything", "a stand-in")]

    monkeypatch.setattr(script, "_run_apart", run_apart)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(script.signal, "signal", lambda *given: None)
    monkeypatch.chdir(tmp_path)
    assert run(script, monkeypatch) == 0
    assert [name for name, _ in started] == [*USUAL]
    assert json.loads((tmp_path / "gpu-run" / "run.json").read_text())["settings"] == {
        "device": "cuda", "quick": False, "tune": False, "commit": "",
    }  # fmt: skip
    # Each stage may use the time that the stages before it left, and no stage another one's.
    now = MOST_S - sum(STAGES[name].limit_s for name in USUAL)
    assert now >= 0, "they fit in 8 minutes"
    for name, limit_s in started:
        now += STAGES[name].limit_s
        assert now - 60 < limit_s <= now
    started.clear()
    assert run(script, monkeypatch, "--tune") == 0
    assert [name for name, _ in started] == [*USUAL, "shapes"]


@pytest.mark.processes
def test_the_record_is_complete_while_a_stage_runs(script: Any, monkeypatch, tmp_path: Path):
    """It is read by the stage itself, which ends when its first row is there."""
    reading = tmp_path / "reading.py"
    reading.write_text(READS.format(ROW))
    monkeypatch.setattr(script, "__file__", str(reading))
    facts = Row(STAGES["facts"].table, {"what": "GPU", "found": "of a test"})
    record = partial(script._write_under_way, tmp_path, REHEARSAL, (facts,), "host_time")
    (row,) = script._run_apart("host_time", tmp_path, [], 60.0, record)
    assert row.cells == {"what": "kept"}
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert [row["cells"].get(NOT_RUN) for row in seen["rows"]] == [None, None, "it was under way"]
    assert {goal["verdict"] for goal in seen["goals"]} == {NOT_RUN}
    assert "of a test" in (tmp_path / "run.md").read_text()


@pytest.mark.processes
def test_a_run_that_is_ended_ends_its_stage_and_keeps_the_record(tmp_path: Path):
    started = tmp_path / "started"
    command = [sys.executable, "-c", ENDED, str(started), str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        try:
            deadline = time.monotonic() + 60
            while not started.exists() or not (tmp_path / "out" / "run.md").exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.terminate()
            assert process.wait(60) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert "it was under way" in (tmp_path / "out" / "run.md").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


# The script, with a stage in whose place a process sleeps.
ENDED = """import pathlib, sys
sys.path.insert(0, "")
from benchmarks import gpu
started, out = sys.argv[1:]
sleeper = pathlib.Path(out).with_name("sleeper.py")
sleeper.write_text(
    "import os, time\\n"
    f"with open({started + '.new'!r}, 'w') as file: file.write(str(os.getpid()))\\n"
    f"os.replace({started + '.new'!r}, {started!r})\\n"
    "time.sleep(100)\\n"
)
gpu.__file__ = str(sleeper)
sys.argv = ["gpu.py", "--dry-run", "--out", out]
sys.exit(gpu.main())
"""


def test_without_a_gpu_it_says_what_it_takes(script: ModuleType, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(script, monkeypatch, "--out", str(tmp_path / "out")) == 1
    assert "ringcoll[cuda13]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_stages_that_there_are_not(script: ModuleType, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(script, monkeypatch, "--stages", "facts,pigeons")
    assert "'pigeons' is none of facts" in capsys.readouterr().err


READS = """import pathlib, sys, time
out = pathlib.Path(sys.argv[-1])
out.write_text('{}\\n')
deadline = time.monotonic() + 50
record = out.with_name("run.json")
while "kept" not in (text := record.read_text() if record.exists() else ""):
    if time.monotonic() > deadline:
        sys.exit("no record")
    time.sleep(0.05)
out.with_name("seen.json").write_text(text)
"""
WRITES = "import json, os, sys, time\nopen(sys.argv[-1], 'w').write('{}\\n{{\"table\": ')\n"
ROW = json.dumps({"table": "a", "cells": {"what": "kept"}})


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "end, told",
    [
        ("sys.exit(os.environ['PYTHONPATH'])", f"status 1: {ROOT}{os.pathsep}more"),
        ("os.abort()", "it ended with status -6"),
        ("raise SystemExit('no luck')", "it ended with status 1: no luck"),
        ("time.sleep(600)", "it was ended after"),
    ],
)
def test_a_stage_that_fails_keeps_what_it_has_found(
    script: Any, monkeypatch, tmp_path: Path, end: str, told: str
):
    failing = tmp_path / "failing.py"
    failing.write_text(WRITES.format(ROW) + end)
    monkeypatch.setattr(script, "__file__", str(failing))
    monkeypatch.setenv("PYTHONPATH", "more")
    limit_s = 10.0 if "sleep" in end else 60.0  # time for Python to start, on a busy machine
    first, last = script._run_apart("facts", tmp_path, [], limit_s, print)
    assert first.cells == {"what": "kept"}
    assert told in last.cells[NOT_RUN]


def test_a_stage_for_which_there_is_no_time(script: Any, tmp_path: Path):
    (row,) = script._run_apart("facts", tmp_path, [], -1.0, print)
    assert row.cells[NOT_RUN] == "there was no time left"


# --- time -----------------------------------------------------------------------------


class FakeGpu:
    """A GPU on which each call takes a millisecond; a graph may be refused.

    The host is slow: what it enqueues comes a tenth of a millisecond later.
    """

    def __init__(self, *, captures: bool) -> None:
        self.host_ms, self.gpu_ms, self.captures, self.capturing = 0.0, 0.0, captures, False
        self.stream = "default"
        self.graphs: list[int] = []

    def enqueue(self, for_ms: float) -> None:
        assert self.stream == "default"
        self.host_ms += 0.1
        self.gpu_ms = max(self.gpu_ms, self.host_ms) + for_ms

    def call(self) -> None:
        if self.capturing:
            self.graphs[-1] += 1
        else:
            self.enqueue(1.0)

    def event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=-1.0, synchronize=self.synchronize)

        def record() -> None:
            event.at = max(self.gpu_ms, self.host_ms)

        event.record = record
        event.elapsed_time = lambda end: end.at - event.at
        return event

    def synchronize(self, device: Any = None) -> None:
        self.host_ms = max(self.gpu_ms, self.host_ms)

    def graph(self) -> Any:
        self.graphs.append(0)
        return SimpleNamespace(replay=lambda: self.enqueue(self.graphs[-1]))

    @contextmanager
    def capture(self, graph: Any) -> Iterator[None]:
        """As torch's: after a capture that has failed its stream is still the current one."""
        self.stream, self.capturing = "capture", True
        yield
        self.capturing = False
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.stream = "default"

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_events_around_a_graph_or_calls(
    monkeypatch: pytest.MonkeyPatch, captures: bool, captured: bool
):
    fake = FakeGpu(captures=captures)
    properties = SimpleNamespace(L2_cache_size=1000)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.graph)
    monkeypatch.setattr(torch.cuda, "graph", fake.capture)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.stream)
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: fake.enqueue(cycles / 2e6))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda", 0)
    assert [clock.rotation(nbytes, device) for nbytes in (1000, 3000, 9000)] == [4, 2, 1]
    made = clock.timer([fake.call] * 3, 1000, device, captured=captured)
    assert made.how == ("graph" if captures and captured else "events")
    (times,) = clock.alternate([made], 4, warm_s=0)
    assert times == pytest.approx([1e-3] * 4, rel=1e-9), "without what the host needs"
    if made.how == "graph":
        assert fake.graphs[-1] % 3 == 0
        assert fake.graphs[-1] > 100  # a sample lasts much longer than a call
    found = clock.host_samples(fake.call, device, calls=2, rounds=3)
    assert found.samples == 3


def test_what_a_cold_gpu_does_is_left_out(monkeypatch: pytest.MonkeyPatch):
    now = 0.0

    def sample() -> float:
        nonlocal now
        now += 0.01
        return 1.0 if now > 0.25 else 3.0

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    for times in clock.alternate([clock.Timer(sample, "graph")] * 2, 5):
        assert times == (1.0,) * 5


def test_contenders_are_compared_by_samples_of_the_same_round():
    """A GPU that is slow in every other round slows both; the ratio does not see it."""
    rounds: dict[str, int] = {"ours": 0, "theirs": 0}

    def sampled(name: str, seconds: float) -> clock.Timer:
        def sample() -> float:
            rounds[name] += 1
            return seconds * (2.0 if rounds[name] % 2 else 1.0)

        return clock.Timer(sample, "host")

    ours, theirs = clock.alternate([sampled("ours", 2.0), sampled("theirs", 3.0)], 16)
    assert summarize(ours).spread > 0.5
    assert clock.paired(ours, theirs) == (1.5, 1.5, 1.5)
    assert str(clock.paired(ours, theirs)) == "1.5 (1.5 to 1.5)"


@pytest.mark.parametrize(
    "pairs, left_out", [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (15, 3), (30, 9)]
)
def test_the_bounds_are_those_of_the_sign_test(pairs: int, left_out: int):
    ratio = clock.paired([2.0] * pairs, [2.0 * number for number in range(pairs, 0, -1)])
    assert ratio == ((pairs + 1) / 2, 1 + left_out, pairs - left_out)


def test_samples_without_a_pair_are_no_ratio():
    with pytest.raises(ValueError, match="zip"):
        clock.paired([1.0, 1.0], [1.0])


def test_copies_and_operands_are_random_bytes(monkeypatch: pytest.MonkeyPatch):
    copied: list[Any] = []
    monkeypatch.setattr(bandwidth, "timer", lambda runs, *given, **options: copied.extend(runs))
    bandwidth._copies(1 << 16, CPU)
    for run in copied:
        for buffer in run.args:
            assert len(buffer.unique()) == 256
    for case in bandwidth._every_dtype():
        _, sources = case.vectors(1 << 12, CPU)
        dtype, offset = sources[1].dtype, case.offsets[1]
        assert sources[1].storage_offset() == offset
        values = torch.view_as_real(sources[1]) if dtype.is_complex else sources[1]
        if dtype.is_floating_point or dtype.is_complex:
            assert bool(values.double().isfinite().all())
        wanted = 2 if dtype is torch.bool else 16
        assert len(values.double().unique()) >= wanted, case.name


def test_the_faster_way_to_copy_is_the_limit(monkeypatch: pytest.MonkeyPatch):
    ways = [clock.Timer(lambda: 4.0, "host"), clock.Timer(lambda: 2.0, "host")]
    monkeypatch.setattr(bandwidth, "timer", lambda *given, captured: ways[not captured])
    assert bandwidth.copy_bandwidth(1000, CPU, 2) == 1000.0


# --- kernels --------------------------------------------------------------------------


CHECKED = [
    ("sum", torch.bfloat16, torch.bfloat16),
    ("avg", torch.complex64, None),
    ("max", torch.int16, None),
    ("band", torch.bool, None),
]


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("op, dtype, wire", CHECKED, ids=str)
def test_right_kernels_are_found_right(tmp_path: Path, op: str, dtype, wire):
    reduction = resolve(op, dtype, wire_dtype=wire)
    engine = HostEngine(tmp_path)
    for sources, results, final in ((2, 1, True), (20, 2, False)):
        total = sources + results
        for offsets in ((1,) * total, tuple(i % 3 for i in range(total))):
            case = correctness.Case(
                sources, results, offsets, in_place=final, final=final, numel=700
            )
            before = gpu.bound["cupy"]
            assert correctness.check(reduction, case, engine, CPU) == 0
            assert gpu.bound["cupy"] == before + (1 if sources == 2 else 2)


WRONG = [
    ("threadIdx.x < a.head + tail", "threadIdx.x < tail", {"sum", "max"}),
    ("right != right || less(left, right)", "less(left, right)", {"max"}),
    ("a.numel - tail +", "a.numel - tail + 1 +", {"sum", "max"}),  # writes beyond the end
    ("0x7FFF + ((bits >> 16) & 1)", "0x8000", {"sum"}),
]


@compiles
@pytest.mark.parametrize("old, new, wrong", WRONG, ids=[one[1] for one in WRONG])
def test_wrong_kernels_are_found_wrong(tmp_path: Path, old: str, new: str, wrong: set[str]):
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    engine = HostEngine(tmp_path, change)
    for op in ("sum", "max"):
        reduction = resolve(op, torch.bfloat16, wire_dtype=torch.bfloat16)
        case = correctness.Case(2, 1, (3, 3, 3), final=True, numel=4003, narrow=op == "sum")
        found = correctness.check(reduction, case, engine, CPU)
        assert (found > 0) == (op in wrong), op


@compiles
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_kernels_on_narrow_numbers_alone(tmp_path: Path, dtype):
    reduction = resolve("avg", dtype, wire_dtype=dtype)
    some = [case for case in correctness.cases(4, thorough=False, narrow=2) if case.narrow]
    assert {case.sources for case in some} == {2, 8}
    engine = HostEngine(tmp_path)
    for case in some[:3] + some[-2:]:
        shorter = replace(case, numel=333)
        assert correctness.check(reduction, shorter, engine, CPU) == 0


@pytest.mark.slow
@compiles
def test_a_row_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entry = ("sum", "half", torch.float16, torch.float16)
    monkeypatch.setattr(correctness, "table", lambda: iter([entry] * 2))
    found: list[Row] = []
    engine = HostEngine(tmp_path)
    correctness.rows(slice(1), engine, CPU, rehearsal=True, emit=found.append)
    (row,) = found
    assert row.cells["what"] == "sum half, float16 on the wire"
    assert row.cells["wrong elements"] == 0
    assert row.cells["by kernels"] >= row.cells["cases"] > 5


@compiles
def test_what_torch_has_done_instead_of_a_kernel_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entry = ("premul_sum", "float", torch.float32, None)
    monkeypatch.setattr(correctness, "table", lambda: iter([entry]))
    engine = HostEngine(tmp_path)
    monkeypatch.setattr(engine, "encode", TORCH.encode)
    found: list[Row] = []
    correctness.rows(slice(1), engine, CPU, rehearsal=True, emit=found.append)
    monkeypatch.setattr(engine, "launch", lambda *given: None)
    correctness.rows(slice(1), engine, CPU, rehearsal=True, emit=found.append)
    assert [row.cells["by torch"] for row in found] == [1, found[1].cells["cases"]]


class CompileError(Exception):
    """As CuPy's: no `RuntimeError`."""


def test_a_kernel_that_fails_costs_a_row(monkeypatch: pytest.MonkeyPatch):
    def refuse(*given: Any, **options: Any) -> None:
        raise CompileError("error: identifier is undefined")

    engine = HostEngine(Path())
    monkeypatch.setattr(engine, "launch", refuse)
    monkeypatch.setattr(bandwidth, "_engine", lambda *given: engine)
    found = [*bandwidth.bandwidth(REHEARSAL)]
    assert len(found) == 2 * len(bandwidth.CASES)
    found += bandwidth.every_dtype(REHEARSAL)
    found += bandwidth.shapes(REHEARSAL)
    entries = [("sum", "half", torch.float16, None), ("max", "half", torch.float16, None)]
    monkeypatch.setattr(correctness, "table", lambda: iter(entries))
    correctness.rows(slice(None), engine, CPU, rehearsal=True, emit=found.append)
    tables = {bandwidth.KERNELS, bandwidth.EVERY_DTYPE, bandwidth.SHAPES, correctness.TABLE}
    assert {row.table for row in found} == tables
    assert {row.cells[NOT_RUN] for row in found} == {"error: identifier is undefined"}


@pytest.mark.slow
@compiles
@pytest.mark.parametrize("dtype", [torch.float16, torch.complex64], ids=str)
def test_scaling_and_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype):
    monkeypatch.setattr(correctness, "_NUMEL", 99)
    scaling = correctness._resolved("premul_sum", dtype, None)
    wide = torch.complex128 if dtype.is_complex else torch.float32
    narrowing = correctness._resolved("sum", wide, dtype)
    engine = HostEngine(tmp_path)
    before = gpu.bound["cupy"]
    assert correctness.check_encoding(scaling, engine, CPU) == 0
    assert correctness.check_rounding(narrowing, engine, CPU) == 0
    assert gpu.bound["cupy"] > before + 3
    monkeypatch.setattr(engine, "encode", lambda reduction, flat: flat.to(reduction.work_dtype))
    monkeypatch.setattr(engine, "round", lambda narrow, wide: lambda: None)
    assert correctness.check_encoding(scaling, engine, CPU) > 0
    assert correctness.check_rounding(narrowing, engine, CPU) > 0


def test_every_operator_and_dtype_is_in_the_table():
    found = {(op, dtype, wire) for op, _, dtype, wire in correctness.table()}
    assert len(found) == len([*correctness.table()])
    for dtype in (torch.float8_e5m2, torch.bfloat16, torch.complex128, torch.uint64, torch.bool):
        assert ("sum", dtype, None) in found
    assert ("sum", torch.float32, torch.float8_e4m3fn) in found
    assert ("bxor", torch.uint16, None) in found
    assert ("min", torch.complex64, None) not in found
    some = [*correctness.cases(4, thorough=True)]
    assert {(case.sources, case.results) for case in some} >= {(2, 1), (20, 2), (8, 1), (3, 2)}
    assert {case.offsets[0] for case in some} >= set(range(5))


def test_a_checker_that_sees_nothing_is_found_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(correctness, "differing", lambda found, wanted: 0)
    case = correctness.Case(2, 1, (0, 0, 0), numel=9)
    with pytest.raises(RingcollError, match="spoiled element"):
        correctness.check(resolve("sum", torch.float32), case, TORCH, CPU)


@compiles
def test_a_kernel_and_its_shapes_are_measured(tmp_path: Path):
    case = bandwidth.CASES[0]
    engine = HostEngine(tmp_path)
    measured = bandwidth._measured(case, 4096, engine, CPU, 2)
    assert measured["by"] == "kernel"
    assert case.nbytes(1024) == 3 * 4096
    vectors = case.vectors(3 * 4096 + 5, CPU)
    expected = vectors.sources[0] + vectors.sources[1]
    tuned = bandwidth._kernel(case, 128, 2, 8)
    assert "__launch_bounds__(128, 8)" in tuned.definition()
    bandwidth._launching(engine, tuned, vectors)()
    assert torch.equal(vectors.into[0], expected)
    assert not bandwidth._is_usual(tuned)
    assert bandwidth._is_usual(replace(tuned, threads=256, unroll=4, resident=3))


@compiles
def test_every_dtype_is_measured_aligned_and_misaligned(tmp_path: Path):
    """torch adds no floats of 8 bits, and the row has no ratio to torch."""
    cases = {case.name: case for case in bandwidth._every_dtype()}
    assert [*cases][:2] == ["sum f8e4m3", "sum f8e4m3, one element off"]
    assert {case.results[0] for case in cases.values()} == {*DTYPES.values()}
    assert len(bandwidth.misaligned_cases()) == 2 * len(DTYPES) == 2 * len(cases) / 3
    engine = HostEngine(tmp_path)
    for name, has_torch in (("sum f8e4m3, aligned differently", False), ("sum bfloat16", True)):
        row = bandwidth._row(bandwidth.EVERY_DTYPE, cases[name], 4096, engine, CPU, 7)
        assert row.cells["by"] == "kernel"
        assert row.cells["/ copy from"] <= row.cells["/ copy"] <= row.cells["/ copy to"]
        assert ("/ torch" in row.cells) == has_torch


def test_what_is_measured_is_what_is_shown(monkeypatch: pytest.MonkeyPatch):
    """Kernel, two ways to copy and torch, by samples that drift from round to round."""
    drift = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5]
    microseconds = [12.0, 10.0, 11.0, 24.0]
    moved: list[int] = []

    def alternate(timers: Any, rounds: int, **options: Any) -> list[tuple[float, ...]]:
        return [tuple(us * 1e-6 * factor for factor in drift) for us in microseconds]

    def timer(runs: Any, nbytes: int, *given: Any, **options: Any) -> clock.Timer:
        moved.append(nbytes)
        return clock.Timer(lambda: 1.0, "host")

    monkeypatch.setattr(bandwidth, "alternate", alternate)
    monkeypatch.setattr(bandwidth, "timer", timer)
    shown = bandwidth._measured(bandwidth.CASES[0], 4096, TORCH, CPU, 6)
    assert moved == [3 * 4096] * 4, "the copy moves as many bytes as the sum"
    assert (shown["by"], shown["pairs"]) == ("torch", 6)
    assert shown["time (us)"] == pytest.approx(27.0)
    for name in ("/ copy", "/ copy from", "/ copy to"):
        assert shown[name] == pytest.approx(10 / 12)
    for name in ("/ torch", "/ torch from", "/ torch to"):
        assert shown[name] == pytest.approx(2.0)
    assert shown["GB/s"] == pytest.approx(3 * 4096 / 27e-6 / 1e9)
    assert shown["copy GB/s"] == pytest.approx(3 * 4096 / 22.5e-6 / 1e9)


# --- MPS ------------------------------------------------------------------------------

# It listens where the variable says, as the daemon does; a client is a file "server".
CONTROL = """#!{python}
import os, pathlib, sys, time
folder = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", {usual!r}))
control = folder / "control"
if sys.argv[1:] == ["-f"]:
    if {broken!r}:
        sys.exit("no permission")
    control.write_text("listens")
    deadline = time.monotonic() + 60
    while control.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    sys.exit()
if not control.exists():
    if {polite!r}:
        print("Cannot find MPS control daemon process")
        sys.exit()
    sys.exit("Cannot find MPS control daemon process")
command = sys.stdin.read().strip()
if command == "quit":
    control.unlink()
elif command == "get_server_list":
    print(*(path.name for path in folder.glob("server*")))
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a stand-in for the program that controls MPS, and returns the usual folder of pipes."""
    usual, programs = tmp_path / "usual", tmp_path / "programs"
    usual.mkdir()
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)

    def make(*, broken: bool = False, polite: bool = False) -> Path:
        program = programs / "nvidia-cuda-mps-control"
        text = CONTROL.format(python=sys.executable, usual=str(usual), broken=broken, polite=polite)
        program.write_text(text)
        program.chmod(0o755)
        return usual

    return make


def test_no_mps_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mps.state().startswith("does not run (")
    assert not mps.is_used({})
    with pytest.raises(mps.MpsError, match="nvidia-cuda-mps-control"), mps.with_mps():
        pass
    found: list[Row] = []
    collectives.shared_with_mps(Settings("cuda"), found.append)
    assert [row.cells["what"] for row in found] == ["everything with MPS"]


@pytest.mark.processes
@pytest.mark.parametrize("polite", [False, True])
def test_mps_is_started_and_ended(control: Any, polite: bool):
    """Whether the program says with its status, or in words only, that no daemon listens."""
    control(polite=polite)
    assert "Cannot find MPS control daemon" in mps.state()
    with mps.with_mps() as variables:
        folder = Path(variables["CUDA_MPS_PIPE_DIRECTORY"])
        assert not mps.is_used(variables), "no process has used it yet"
        (folder / "server 17").touch()
        assert mps.is_used(variables)
        assert mps.state().startswith("does not run"), "others do not find it"
    assert not folder.exists()
    assert not mps.is_used(variables)


@pytest.mark.processes
def test_mps_that_runs_already_is_used_and_left_alone(control: Any):
    usual = control()
    (usual / "control").touch()
    (usual / "server 17").touch()
    assert mps.state() == "runs, servers: server 17"
    with mps.with_mps() as variables:
        assert variables == {}
    with mps.without_mps() as variables:
        assert not mps.is_used(variables)
        assert Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert (usual / "control").exists()


@pytest.mark.processes
def test_mps_that_cannot_be_started_is_said(control: Any):
    control(broken=True)
    with pytest.raises(mps.MpsError, match="does not start: no permission"), mps.with_mps():
        pass


# --- collectives ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "collective, algorithm, world_size, moved",
    [
        ("all_reduce", "ring", 4, 7 * 3),
        ("all_reduce", "ring", 1, 0),
        ("reduce_scatter", "ring", 4, 5 * 3),
        ("all_gather", "ring", 8, 2 * 7),
        # Each rank gets all others' vectors, reads them and its own, and writes the sum. Ranks 2
        # and 3 copy it: a total may not lie where the third operand and those after it are.
        ("all_reduce", "direct", 4, 4 * (2 * 3 + 4 + 1) + 2 * 2),
    ],
)
def test_what_has_to_be_moved(collective: str, algorithm: str, world_size: int, moved: float):
    nbytes = 1 << 16
    assert collectives.moved_nbytes(collective, algorithm, world_size, nbytes) == moved * nbytes


@pytest.mark.processes
def test_another_transport_than_was_asked_for_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    nobody_reads = {"cpu": "RINGCOLL_NOBODY_READS_THIS"}
    monkeypatch.setattr(collectives, "TRANSPORT_VARIABLES", nobody_reads)
    requests = collectives._requests(REHEARSAL, {"all_reduce": ("ring",)}, (64,), 0.1)
    found: list[Row] = []
    collectives._Pool("table", 2, "gloo", "gloo", requests, 10.0).measure(found.append)
    assert [row.cells[NOT_RUN] for row in found] == ["tensors travelled over {'shared'}"]


def test_ranks_on_one_gpu_see_one_with_mps_and_without(monkeypatch: pytest.MonkeyPatch):
    @contextmanager
    def with_mps() -> Iterator[dict[str, str]]:
        yield {"CUDA_MPS_PIPE_DIRECTORY": "/of/mps"}

    monkeypatch.setattr(mps, "with_mps", with_mps)
    monkeypatch.setattr(mps, "is_used", lambda variables: "/of/mps" in variables.values())
    pools: list[Any] = []
    monkeypatch.setattr(collectives._Pool, "measure", lambda pool, emit: pools.append(pool))
    monkeypatch.setattr(collectives, "copy_bandwidth", lambda nbytes, device: 1.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    collectives.shared(Settings("cuda"), print)
    found = [(pool.world_size, pool.transport) for pool in pools]
    assert found[:3] == [(4, "ucx"), (4, "gloo"), (2, "ucx")]
    assert len(found) == len({*found}) == 6
    collectives.shared_with_mps(Settings("cuda"), print)
    assert [(pool.world_size, pool.transport) for pool in pools[6:]][:2] == [(4, "ucx"), (2, "ucx")]
    assert {dict(pool.variables)["CUDA_VISIBLE_DEVICES"] for pool in pools} == {"3"}
    pipes = [dict(pool.variables)["CUDA_MPS_PIPE_DIRECTORY"] for pool in pools]
    assert [pipe == "/of/mps" for pipe in pipes] == [False] * 6 + [True] * 4
    assert [pool.uses_mps() for pool in pools] == [False] * 6 + [True] * 4
    assert max(pool.limit_s for pool in pools) <= 30


@pytest.mark.processes
def test_ranks_that_fail_are_a_row():
    requests = collectives._requests(REHEARSAL, {"all_reduce": ("pigeons",)}, (64,), 0.1)
    found: list[Row] = []
    collectives._Pool("table", 2, "gloo", "gloo", requests, 10.0).measure(found.append)
    assert len(found) == 1
    assert "pigeons" in found[0].cells[NOT_RUN]


def test_bench_on_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(cli, ["bench", "all_reduce", "--device", "cuda"])
    assert result.exit_code == 2
    assert "torch finds no GPU here" in result.stderr


# --- goals ----------------------------------------------------------------------------


MISALIGNED = "sum float32, aligned differently"


def perfect() -> list[Row]:
    """Rows with which every goal is just met."""
    kernels = {
        "nbytes": 1 << 28, "by": "kernel", "/ copy from": 0.1, "/ copy to": 1.1,
        "/ torch": 0.998, "/ torch from": 0.99, "/ torch to": 1.0,
    }  # fmt: skip
    errors = {
        rounding.TORCH_SUM: 0.25,
        rounding.DEFAULT: 0.25,
        rounding.DIRECT: 0.25,
        rounding.BFLOAT16_RING: 0.5,
    }
    ring = {
        "what": "", "collective": "all_reduce", "ranks": 4, "over": "ucx", "nbytes": 1 << 28, "MPS": "yes",
        "copy limit (us)": 1000.0, "in-place time (us)": 2000.0, "in-place #wrong": 0,
    }  # fmt: skip
    checked = {"wrong elements": 0, "cases": 70, "by kernels": 70, "by torch": 0}
    rounded = {"on": "cuda:0", "by": "kernel"}
    return [
        Row(correctness.TABLE, {"what": "sum half", **checked}),
        Row(correctness.TABLE, {"what": correctness.ALL, **checked}),
        *(
            Row(bandwidth.KERNELS, {"what": f"sum {name}", "/ copy": 0.92, **kernels})
            for name in ("float32", "bfloat16")
        ),
        *(
            Row(bandwidth.KERNELS, {"what": what, "/ copy": 0.9, **kernels})
            for what in ("sum + copy float32", "8-way sum float32")
        ),
        *(
            Row(bandwidth.EVERY_DTYPE, {"what": what, "/ copy": 0.8, **kernels})
            for what in ("sum f8e4m3", "sum f8e5m2", *bandwidth.misaligned_cases())
        ),
        Row(bandwidth.KERNELS, {"what": MISALIGNED, "/ copy": 0.9, **kernels}),
        Row(host_time.TABLE, {"what": host_time.LAUNCH, "by": "cupy 14", "median (us)": 10.0}),
        Row(collectives.SHARED, ring),
        *(
            Row(rounding.TABLE, {"what": what, rounding.MEAN: mean, **rounded})
            for what, mean in errors.items()
        ),
    ]


def verdicts(found: list[Row]) -> list[str]:
    return [row.cells["verdict"] for row in goals.goals(found)]


def test_all_goals_met():
    assert verdicts(perfect()) == ["met"] * len(verdicts(perfect()))
    assert verdicts([]) == [NOT_RUN] * len(verdicts(perfect()))


@pytest.mark.parametrize(
    "table, changed, number",
    [
        (correctness.TABLE, {"wrong elements": 1}, 1),
        (bandwidth.KERNELS, {"/ copy": 0.89}, 4),
        (bandwidth.KERNELS, {"/ copy": 0.79}, 5),
        (bandwidth.EVERY_DTYPE, {"/ copy": 0.79}, 3),
        (bandwidth.EVERY_DTYPE, {"by": "torch"}, 1),
        (bandwidth.EVERY_DTYPE, {NOT_RUN: "out of memory"}, 1),
        (correctness.TABLE, {"by torch": 1}, 1),
        (bandwidth.KERNELS, {"/ torch to": 0.999}, 2),
        (host_time.TABLE, {"median (us)": 10.1}, 1),
        (collectives.SHARED, {"in-place time (us)": 2001.0}, 1),
        (rounding.TABLE, {rounding.MEAN: 0.3}, 2),
    ],
)
def test_goals_that_were_not_met(table: str, changed: dict[str, float], number: int):
    found = [
        replace(row, cells=row.cells | changed) if row.table == table else row for row in perfect()
    ]
    assert verdicts(found).count("not met") == number


@pytest.mark.parametrize(
    "table, changed, number",
    [
        (correctness.TABLE, {"by kernels": 0}, 1),  # torch checked against itself
        (bandwidth.KERNELS, {"by": "torch"}, 6),
        (bandwidth.KERNELS, {"nbytes": 1 << 20}, 6),
        (bandwidth.KERNELS, {NOT_RUN: "out of memory"}, 6),
        (host_time.TABLE, {"by": "torch"}, 1),
        (collectives.SHARED, {"over": "gloo"}, 1),
        (collectives.SHARED, {"in-place #wrong": 3}, 1),
        (rounding.TABLE, {"on": "cpu"}, 2),
        (rounding.TABLE, {"by": "torch"}, 2),
    ],
)
def test_what_does_not_count_for_a_goal(table: str, changed: dict[str, Any], number: int):
    found = [
        replace(row, cells=row.cells | changed) if row.table == table else row for row in perfect()
    ]
    assert verdicts(found).count(NOT_RUN) == number


def test_ranks_that_share_a_gpu_are_shown_with_mps_and_without():
    found = perfect()
    (ring,) = (row for row in found if row.table == collectives.SHARED)
    without = Row(ring.table, ring.cells | {"MPS": "no", "in-place time (us)": 8000.0})
    goal = "all-reduce, 4 ranks on one GPU, 256 MiB: copy limit / time"
    for some, verdict, measured in (
        ([*found, without], "met", "0.125 without MPS, 0.5 with MPS"),
        ([without], "not met", "0.125 without MPS"),
    ):
        (row,) = (row for row in goals.goals(some) if row.cells["goal"] == goal)
        assert (row.cells["verdict"], row.cells["measured"]) == (verdict, measured)


def test_a_ratio_is_shown_with_its_bounds():
    shown = {row.cells["goal"]: row.cells["measured"] for row in goals.goals(perfect())}
    assert shown["sum float32, against torch.add"] == "0.998 (0.99 to 1), 256 MiB"
    misaligned = shown["sum of misaligned operands, every dtype, against a copy"]
    assert misaligned == "0.8 (0.1 to 1.1), 256 MiB, sum f8e4m3, one element off"


def test_a_dtype_that_did_not_run_is_named():
    found = [row for row in perfect() if row.cells["what"] != "sum int8, one element off"]
    assert verdicts(found).count("not met") == 1
    shown = [row.cells["measured"] for row in goals.goals(found)]
    assert any(text.endswith("not run, or by torch: sum int8, one element off") for text in shown)


def test_a_part_of_the_table_that_did_not_run_is_no_success():
    found = [*perfect(), rows.missing(correctness.TABLE, "sum half", "no such kernel")]
    assert verdicts(found).count("not met") == 1
    ended = [row for row in perfect() if row.cells["what"] != correctness.ALL]
    assert verdicts(ended).count("not met") == 1


def test_rows_are_kept_and_shown(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    assert rows.load(path) == []
    found = [Row("a", {"what": "x", "GB/s": 1234.5}), rows.missing("a", "y", "a |\n b")]
    for row in found:
        rows.store(path, row)
    assert rows.load(path) == found
    assert [*rows.markdown(reversed(found))][3:] == [
        "| what | GB/s | not run |",
        "| --- | --- | --- |",
        "| y |  | a \\| b |",
        "| x | 1234 |  |",
    ]
