"""``ringcoll export``: an algorithm in the format of another system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringcoll.cli.command import command
from ringcoll.cli.output import print_json
from ringcoll.cli.parameters import (
    FiniteRange,
    algorithm_argument,
    asked_schedule,
    collective_name,
    file_option,
    hosts_option,
    json_option,
    proved,
    root_option,
    size_option,
    world_size_option,
)
from ringcoll.cli.report import header
from ringcoll.formats import to_chakra, to_goal, to_msccl, to_mscclpp
from ringcoll.machine import replace_files
from ringcoll.schedule import Schedule

_EXAMPLES = """
  ringcoll export ring -k 8 --format msccl -o ring.xml
  ringcoll export ring -c all_gather -k 4 --format mscclpp
  ringcoll export swing -k 16 --format goal -b 1M -o swing.goal
  ringcoll export tree -k 8 --format chakra -b 1M -o tree
  ringcoll export star.py:star -k 4 --format text
"""
_FORMATS = {
    "msccl": "XML of MSCCL, RCCL and ASTRA-sim",
    "mscclpp": "execution plan of MSCCL++, JSON",
    "goal": "GOAL, for LogGOPSim and ATLAHS",
    "chakra": "traces of Chakra, for ASTRA-sim: a file for each rank",
    "text": "the library's own text",
}


@command("export", examples=_EXAMPLES, terms={"Formats": _FORMATS})
@algorithm_argument
@click.option("-c", "--collective", type=collective_name, default="all_reduce", show_default=True,
              metavar="NAME", help="The collective.")  # fmt: skip
@world_size_option
@hosts_option
@root_option
@click.option("--format", "kind", type=click.Choice(list(_FORMATS)), default="msccl",
              show_default=True, help="The format, as below.")  # fmt: skip
@file_option("-o", "--output", "file", help="Write to this file, and not to the terminal; for "
             "chakra the first part of the files' names.")  # fmt: skip
@size_option("-b", "--bytes", "--size", "size",
             help="Size of the vector, or of all blocks of a rank, for goal and chakra; 1M.")  # fmt: skip
@click.option("--gamma", type=FiniteRange(min=0), metavar="NUMBER",
              help="Nanoseconds to reduce a byte, for goal and chakra; 0.")  # fmt: skip
@click.option("--max-steps", type=click.IntRange(min=1),
              help="Steps of a thread block of msccl; 64. MSCCL and RCCL run 256.")  # fmt: skip
@json_option
def export(
    algorithm: str,
    collective: str,
    world_size: int | None,
    num_hosts: int | None,
    root: int | None,
    kind: str,
    file: Path | None,
    size: int | None,
    gamma: float | None,
    max_steps: int | None,
    as_json: bool,
) -> None:
    """Write ALGORITHM for COLLECTIVE in the format of another system.

    ALGORITHM is a name of `ringcoll list`, or module:algorithm or path/file.py:algorithm, or a file
    of a schedule. The schedule is proved first. What msccl, mscclpp and text write is read again
    wherever an algorithm is named: `ringcoll bench all_reduce -k 8 --algorithms ring.xml`.
    """
    if (size is not None or gamma is not None) and kind not in ("goal", "chakra"):
        raise click.UsageError(f"--bytes and --gamma are for goal and chakra, not for {kind}")
    if max_steps is not None and kind != "msccl":
        raise click.UsageError(f"--max-steps is for msccl, not for {kind}")
    if kind == "chakra" and file is None:
        raise click.UsageError("chakra has a file for each rank: name them with --output")
    entry, schedule, title = asked_schedule(algorithm, collective, world_size, root, num_hosts)
    proved(entry, schedule, num_hosts)
    nbytes = 1 << 20 if size is None else size
    contents = _contents(schedule, kind, nbytes, gamma or 0.0, max_steps or 64)
    names = [] if file is None else [file]
    if kind == "chakra" and file is not None:
        names = [Path(f"{file}.{rank}.et") for rank in range(schedule.world_size)]
    replace_files(dict(zip(names, contents, strict=False)))
    if as_json:
        facts: dict[str, Any] = {"format": kind, "files": [*map(str, names)]}
        text = contents[0] if not names and isinstance(contents[0], str) else None
        print_json(header(schedule) | facts | {"text": text})
    elif names:
        total = sum(map(len, contents))
        files = str(names[0]) if len(names) == 1 else f"{names[0]} to {names[-1]}"
        click.echo(f"Wrote {title} to {files}, {total} bytes.")
    else:
        click.echo(contents[0], nl=False)


def _contents(
    schedule: Schedule, kind: str, nbytes: int, gamma_ns: float, max_steps: int
) -> list[str] | list[bytes]:
    """The contents of the files."""
    if kind == "chakra":
        return to_chakra(schedule, nbytes, gamma_us_per_byte=gamma_ns / 1000)
    if kind == "goal":
        return [to_goal(schedule, nbytes, gamma_ns_per_byte=gamma_ns)]
    if kind == "msccl":
        return [to_msccl(schedule, max_steps=max_steps)]
    return [to_mscclpp(schedule) if kind == "mscclpp" else schedule.to_text()]
