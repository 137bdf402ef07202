"""Run notebooks in full, and write their outputs: ``python notebooks/execute.py [PATH ...]``."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient


def execute(path: Path) -> None:
    """Run a notebook in a folder of its own; if a cell fails, the file stays as it is."""
    notebook = nbformat.read(path, as_version=4)
    with TemporaryDirectory() as folder:
        NotebookClient(
            notebook,
            timeout=3600,
            kernel_name="python3",
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
    notebook.metadata["language_info"] = {"name": "python"}  # of any version
    nbformat.write(notebook, path)


for path in map(Path, sys.argv[1:] or sorted(Path(__file__).parent.glob("*.ipynb"))):
    print(path.name, flush=True)
    execute(path)
