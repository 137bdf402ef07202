"""Every notebook runs from top to bottom, with short settings.

A notebook has one cell tagged ``parameters`` that says ``quick = False``; here it
says ``quick = True``. What is committed are the outputs of a full run.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ONLY_JUPYTER = ("lecture", "ring_vs_tree")  # need nothing beyond ringcoll and Jupyter
EXTRAS = ("cloudpickle", "matplotlib", "sklearn")
NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def read(path):
    import nbformat  # here, so that other tests are collected where it is missing

    return nbformat.read(path, as_version=4)


def parameters(notebook):
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    return cell


def without_extras(folder):
    """An environment in which no import of an extra package works."""
    for name in EXTRAS:
        package = folder / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"raise ImportError('{name} is not there')\n")
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), before]))}


@pytest.mark.processes
def test_extras_can_be_taken_away(tmp_path):
    environment = without_extras(tmp_path)
    for name in EXTRAS:
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr.endswith(f"ImportError: {name} is not there\n")


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path):
    from nbclient import NotebookClient

    notebook = read(path)
    cell = parameters(notebook)
    assert "quick = False" in cell.source
    cell.source = cell.source.replace("quick = False", "quick = True")
    # What it writes, it writes into its working directory.
    folder = tmp_path / "written"
    folder.mkdir()
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources)
    only_jupyter = path.stem in ONLY_JUPYTER
    client.execute(env=without_extras(tmp_path / "blocked") if only_jupyter else {**os.environ})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_as_run_in_full_and_in_order(path):
    notebook = read(path)
    assert "quick = False" in parameters(notebook).source
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert any(cell.outputs for cell in code)
    assert not [out for cell in code for out in cell.outputs if out.output_type == "error"]
