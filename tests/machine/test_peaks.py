"""Peaks of memory between two moments."""

import mmap
from pathlib import Path

import pytest
import torch

from ringcoll.runtime.machine import facts

CPU = torch.device("cpu")
NBYTES = 64 << 20


def test_a_peak_is_that_since_the_call_before():
    measure = facts.peaks_of(CPU)
    if measure is None:
        pytest.skip("this kernel does not let a process measure its peak again")
    measure()
    before = measure()
    # Of the kernel: a tensor may get memory that malloc has kept of earlier tests.
    with mmap.mmap(-1, NBYTES) as memory:
        for page in range(0, NBYTES, mmap.PAGESIZE):
            memory[page] = 1
    assert measure() - before > 0.9 * NBYTES
    assert measure() - before < 0.1 * NBYTES


def test_where_it_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(facts, "_PROCESS", str(tmp_path))
    assert facts.peaks_of(CPU) is None
    (tmp_path / "status").write_text("Name: other")  # a system without this number
    assert facts.peaks_of(CPU) is None
