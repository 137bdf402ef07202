"""What measures on a GPU, gone through without one, so that no typo wastes the time on one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
    rounding,
    rows,
)
from benchmarks.on_gpu.rows import NOT_RUN, Row, Settings
from benchmarks.on_gpu.stages import STAGES
from ringcoll.cli.app import cli
from ringcoll.errors import MissingExtraError, RingcollError
from ringcoll.reduction import TORCH, gpu, resolve
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


@pytest.mark.parametrize("name", ["bandwidth", "host_time", "correctness"])
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
    with (tree / "ringcoll" / "_version.py").open("a") as file:
        file.write('\n__version__ = "of the copy"\n')
    elsewhere.mkdir()
    done = run_program(
        sys.executable, str(script), "--dry-run", "--stages", "facts",
        cwd=elsewhere,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "| ringcoll | of the copy |" in (elsewhere / "gpu-run" / "run.md").read_text()


def test_without_a_gpu_it_says_what_it_takes(script: ModuleType, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(script, monkeypatch, "--out", str(tmp_path / "out")) == 1
    assert "ringcoll[cuda13]" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_stages_that_there_are_not(script: ModuleType, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(script, monkeypatch, "--stages", "facts,pigeons")
    assert "'pigeons' is none of facts" in capsys.readouterr().err


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
    first, last = script._run_apart("facts", tmp_path, [], limit_s)
    assert first.cells == {"what": "kept"}
    assert told in last.cells[NOT_RUN]


def test_a_stage_for_which_there_is_no_time(script: Any, tmp_path: Path):
    (row,) = script._run_apart("facts", tmp_path, [], -1.0)
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
    (found,) = clock.alternate([made], 4, warm_s=0)
    assert found.samples == 4
    assert found.p50_s == pytest.approx(1e-3, rel=1e-9), "without what the host needs"
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
    for found in clock.alternate([clock.Timer(sample, "graph")] * 2, 5):
        assert (found.samples, found.max_s) == (5, 1.0)


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
    found += bandwidth.shapes(REHEARSAL)
    entries = [("sum", "half", torch.float16, None), ("max", "half", torch.float16, None)]
    monkeypatch.setattr(correctness, "table", lambda: iter(entries))
    correctness.rows(slice(None), engine, CPU, rehearsal=True, emit=found.append)
    assert {row.table for row in found} == {bandwidth.KERNELS, bandwidth.SHAPES, correctness.TABLE}
    assert {row.cells[NOT_RUN] for row in found} == {"error: identifier is undefined"}


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
    row = bandwidth._measured(case, 4096, engine, bandwidth._copies(4096, CPU), CPU, 2)
    assert row.cells["by"] == "kernel"
    assert case.nbytes(1024) == 3 * 4096
    vectors = case.vectors(3 * 4096 + 5, CPU)
    expected = vectors.sources[0] + vectors.sources[1]
    tuned = bandwidth._kernel(case, 128, 2, 8)
    assert "__launch_bounds__(128, 8)" in tuned.definition()
    bandwidth._launching(engine, tuned, vectors)()
    assert torch.equal(vectors.into[0], expected)
    assert not bandwidth._is_usual(tuned)
    assert bandwidth._is_usual(replace(tuned, threads=256, unroll=4, resident=3))


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


def test_ranks_on_one_gpu_see_one_and_gloo_waits_for_no_further_ucx(
    monkeypatch: pytest.MonkeyPatch,
):
    pools: list[Any] = []
    monkeypatch.setattr(collectives._Pool, "measure", lambda pool, emit: pools.append(pool))
    monkeypatch.setattr(collectives, "copy_bandwidth", lambda nbytes, device: 1.0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    collectives.shared(Settings("cuda"), print)
    assert {pool.variables for pool in pools} == {(("CUDA_VISIBLE_DEVICES", "3"),)}
    found = [(pool.world_size, pool.transport) for pool in pools]
    assert found[:3] == [(4, "ucx"), (4, "gloo"), (2, "ucx")]
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


def perfect() -> list[Row]:
    """Rows with which every goal is just met."""
    kernels = {"nbytes": 1 << 28, "by": "kernel", "/ torch": 1.0}
    errors = {
        rounding.TORCH_SUM: 0.25,
        rounding.DEFAULT: 0.25,
        rounding.DIRECT: 0.25,
        rounding.BFLOAT16_RING: 0.5,
    }
    ring = {
        "what": "", "collective": "all_reduce", "ranks": 4, "over": "ucx", "nbytes": 1 << 28,
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
        (correctness.TABLE, {"by torch": 1}, 1),
        (bandwidth.KERNELS, {"/ torch": 0.999}, 2),
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
