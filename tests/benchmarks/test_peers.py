"""MPI libraries beside ours, in one run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return import_module("peers")


def test_libraries_are_found(
    script: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(script, "FOLDER", tmp_path)
    place = tmp_path / "mpich" / "bin"
    place.mkdir(parents=True)
    (place / "mpiexec").touch(0o755)
    library = {"MPI4PY_LIBMPI": str(tmp_path / "mpich" / "lib")}
    assert script.found()["mpich"] == (place / "mpiexec", library)
    monkeypatch.setattr(sys, "argv", ["peers.py", "--libraries", "pigeons"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "not here: pigeons; make peers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_every_collective_of_a_library_is_right(script: Any, tmp_path: Path) -> None:
    if not script.found():
        pytest.skip("no MPI library is here: make peers")
    path = tmp_path / "record.json"
    collectives = "all_reduce,reduce_scatter,all_gather,broadcast,all_to_all"
    words = (
        f"--collectives {collectives} -k 3 --sizes 1200 --algorithms auto --seconds 0.1 --cycles 1"
    )
    command = [sys.executable, str(FOLDER / "peers.py"), *words.split(), "--json", str(path)]
    subprocess.run(command, check=True, timeout=110, capture_output=True)
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
    right = [table for table in tables if table["caption"].endswith("wrong elements.")]
    assert len(right) == 5
    for table in right:
        (row,) = table["rows"]
        wrong = dict(zip(table["columns"], row, strict=True))
        for name in ("auto", "native", *script.found()):
            assert wrong[name] == 0, (table["caption"], name)
