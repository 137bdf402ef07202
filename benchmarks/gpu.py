"""Everything about the GPU in one command: correctness, bandwidth, host time, collectives.

It takes no arguments, and at most 8 minutes on one H200. Every stage runs in a process of its own, with a
time limit; its rows are kept even if it fails. The record, ``run.md``, which is a section for gpu.md, and
``run.json``, is written anew as rows come, so that it is complete up to then whenever the script is
ended. It goes to a new folder: ``--out``, or that name with a number if the folder exists, so that no
run overwrites the results of another run. At the end stand the goals and whether they were met.

Exit status: 0 if every goal that was measured was met; 1 if a goal was not met, or there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import chain, count
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it need not be installed

from benchmarks.on_gpu import goals
from benchmarks.on_gpu.rows import Row, Settings, load, markdown, missing, store
from benchmarks.on_gpu.stages import MOST_S, STAGES, USUAL
from ringcoll.runtime import replace_file

_ROOT = sys.path[0]
_LOOK_S = 1.0  # between two looks for new rows of a stage that runs
_LAST_WORDS = 1500  # characters at the end of the log of a stage that failed

NEEDED = f"""There is no GPU that torch {torch.__version__} can use, so nothing can be measured here.

It takes:
  - an NVIDIA GPU (sm_80 or newer) with its driver, and torch built for CUDA
  - CuPy for the same CUDA: pip install 'ringcoll[cuda13]' (or cuda12)
  - ucxx for CUDA IPC between processes: pip install 'ringcoll[ucx]'
  - python benchmarks/gpu.py, or make bench-gpu PYTHON=/path/to/that/python

If CuPy or ucxx is missing, a row of the results says so, and the rest is measured.
--dry-run goes through everything on the CPU with tiny sizes, which measures nothing."""


def main() -> int:
    """Run all stages, or one stage as a child of this script."""
    options = _options()
    settings = Settings(
        "cpu" if options.dry_run else "cuda", options.quick, options.tune, options.commit
    )
    if options.child:
        STAGES[options.child].run(settings, lambda row: store(options.rows, row))
        return 0
    if not options.dry_run and not torch.cuda.is_available():
        print(NEEDED, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the stage, too
    options.out = _new_folder(options.out)
    rows = _run_all(options, settings)
    print("\n".join(markdown(goals.goals(rows))))
    print(f"\n{(options.out / 'run.md').resolve()}")
    failed = any(row.cells["verdict"] == "not met" for row in goals.goals(rows))
    return int(failed and not options.dry_run)


def _options() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument(
        "--stages",
        type=_stages,
        help=f"some of {','.join(STAGES)}; facts in any case; without it all but the shapes",
    )
    arguments.add_argument(
        "--out",
        type=Path,
        default=Path("gpu-run"),
        help="folder of results; a number is added to the name if the folder exists",
    )
    arguments.add_argument("--quick", action="store_true", help="fewer sizes, less time")
    arguments.add_argument("--tune", action="store_true", help="also try out shapes of launches")
    arguments.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny sizes")
    arguments.add_argument("--commit", default="", help="name of the commit, if git cannot say it")
    arguments.add_argument("--child", choices=list(STAGES), help=argparse.SUPPRESS)
    arguments.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    return arguments.parse_args()


def _stages(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in STAGES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(STAGES)}")
    return names


def _new_folder(wanted: Path) -> Path:
    folders = chain([wanted], (wanted.with_name(f"{wanted.name}-{n}") for n in count(2)))
    new = next(folder for folder in folders if not folder.exists())
    new.mkdir(parents=True)
    return new


def _run_all(options: argparse.Namespace, settings: Settings) -> list[Row]:
    """Run the chosen stages; the record is written as rows come."""
    asked = options.stages or [*USUAL, *(["shapes"] if settings.tune else [])]
    names = list(dict.fromkeys(["facts", *asked]))
    reserved_s = {name: STAGES[name].limit_s for name in names}
    deadline = time.monotonic() + max(MOST_S, sum(reserved_s.values()))
    rows: list[Row] = []
    for name in names:
        start = time.monotonic()
        del reserved_s[name]
        limit_s = deadline - start - sum(reserved_s.values())  # what the others need is theirs
        record = partial(_write_under_way, options.out, settings, tuple(rows), name)
        new_rows = _run_apart(name, options.out, sys.argv[1:], limit_s, record)
        rows += new_rows
        _write(options.out, settings, rows)
        print("\n".join(markdown(new_rows)))
        print(f"\n{name}: {time.monotonic() - start:.0f} s", flush=True)
    return rows


def _write_under_way(
    folder: Path, settings: Settings, before: tuple[Row, ...], name: str, so_far: list[Row]
) -> None:
    rest = missing(STAGES[name].table, "the rest", "it was under way")
    _write(folder, settings, [*before, *so_far, rest])


def _run_apart(
    name: str,
    folder: Path,
    arguments: list[str],
    limit_s: float,
    record: Callable[[list[Row]], object],
) -> list[Row]:
    """Run a stage in a process of its own; a failure is a row."""
    file, log, stage = folder / f"{name}.jsonl", folder / f"{name}.log", STAGES[name]
    if limit_s <= 0:
        return [missing(stage.table, "everything", "there was no time left")]
    command = [sys.executable, __file__, *arguments, "--child", name, "--rows", str(file)]
    with log.open("w", encoding="utf-8") as output:
        child = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=_environment()
        )
        reason = _wait(child, limit_s, lambda: record(load(file)))
    rows = load(file)
    if reason:
        last_words = log.read_text(encoding="utf-8", errors="replace")[-_LAST_WORDS:]
        rows.append(missing(stage.table, "the rest", f"{reason}: {last_words}"))
    return rows or [missing(stage.table, "everything", "it found nothing")]


def _environment() -> dict[str, str]:
    """The environment of a stage: processes that it starts do not have the path of this script."""
    paths = (_ROOT, os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _wait(child: subprocess.Popen[bytes], limit_s: float, meanwhile: Callable[[], object]) -> str:
    """Wait for a stage, and end the processes that it left; return the reason of a failure, or ""."""
    deadline = time.monotonic() + limit_s
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = child.wait(min(left_s, _LOOK_S))
                return f"it ended with status {status}" if status else ""
            meanwhile()
        return f"it was ended after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # the stage has a session of its own
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _write(folder: Path, settings: Settings, rows: list[Row]) -> None:
    facts = {row.cells["what"]: row.cells["found"] for row in rows if "found" in row.cells}
    reached = list(goals.goals(rows))
    title = f"## {facts.get('date', 'no date')}, {facts.get('GPU', 'no GPU')}"
    about = "A rehearsal on the CPU: no time in it means anything." if settings.rehearsal else ""
    command = f"`python benchmarks/gpu.py {' '.join(sys.argv[1:])}`"
    text = [title, "", command, *filter(None, [about]), *markdown([*reached, *rows]), ""]
    replace_file(folder / "run.md", "\n".join(text))
    document = {
        "settings": asdict(settings),
        "goals": [row.cells for row in reached],
        "rows": [asdict(row) for row in rows],
    }
    replace_file(folder / "run.json", json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
