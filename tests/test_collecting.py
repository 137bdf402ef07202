"""Tests for a GPU do no harm without one, and say that they have not run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ringcoll.runtime.reduction import Kernel
from tests.cases.kernel_table import KERNELS
from tests.programs import gpu_kernels

ROOT = Path(__file__).parents[1]
ON_GPU = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").glob("*/test_*_on_gpu.py")]

# Whoever asks for a GPU, or starts a process, while tests are collected fails there. Nor is
# more needed than what tests for a GPU use.
COLLECT = """
import multiprocessing, subprocess, sys
import pytest, torch

def refuse(*arguments, **options):
    raise RuntimeError("not while tests are collected")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, refuse)
subprocess.Popen.__init__ = multiprocessing.process.BaseProcess.start = refuse
sys.modules.update(dict.fromkeys(["nbformat", "nbclient"]))
known = "-Wignore::pytest.PytestAssertRewriteWarning"  # torch has made the backend known
status = pytest.main([known, "--collect-only", "-q", "-m", "gpu", *sys.argv[1:]])
assert status == 0, status
assert "cupy" not in sys.modules
assert not torch.cuda.is_initialized()
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    # As on a machine without a GPU, whether or not this is one.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.processes
def test_collecting_touches_no_gpu_and_starts_nothing():
    done = python("-c", COLLECT, *ON_GPU, "tests/test_notebooks.py")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+)(/\d+)? tests collected", done.stdout)
    assert found is not None, done.stdout
    assert 100 < int(found[1]) < 500


def test_compiling_in_advance_ends_before_a_test_would(monkeypatch: pytest.MonkeyPatch):
    now, made = 0.0, []

    class Engine:
        def __init__(self, cupy: Any, *, required: bool) -> None: ...

        def _function(self, kernel: Kernel, device: torch.device) -> None:
            nonlocal now
            now += 1.0
            made.append(kernel)

    monkeypatch.setattr(gpu_kernels, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(gpu_kernels, "CupyEngine", Engine)
    monkeypatch.setattr(gpu_kernels, "import_module", lambda name: None)
    monkeypatch.setattr(gpu_kernels, "rendezvous", lambda: (None, 1, 4))
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: None)
    kernels = KERNELS * 10
    gpu_kernels.compile_share(kernels[:100])
    assert len(made) == 25
    gpu_kernels.compile_share(kernels)
    assert 50 < len(made) - 25 < 70 < len(kernels) / 4


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("only", ["gpu", "gpu or not gpu"])
def test_what_has_not_run_is_counted_before_the_closing_line(only: str):
    done = python(
        "-m", "pytest", "-m", only, "-k", "second_copy or (in_and_out and functions)", *ON_GPU
    )
    assert done.returncode == 0, done.stdout
    *_, closing = done.stdout.rstrip().splitlines()
    # What `.ci/run` looks for.
    assert re.fullmatch(r"=+ .*(passed|skipped).* in .*=+", closing), closing
    told = re.findall(r"^gpu: (\d+) tests were not run: no CUDA device$", done.stdout, re.MULTILINE)
    skipped = re.search(r"(\d+) skipped", closing)
    assert skipped is not None, closing
    assert told == [skipped[1]]
