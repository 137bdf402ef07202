"""``ringcoll export``: an algorithm in the format of another system."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from ringcoll.runtime.machine import replace_file
from ringcoll.schedules import Schedule
from ringcoll.tools.cli import options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import echo, print_json
from ringcoll.tools.cli.prove import header

_FORMATS = {
    "msccl": "XML of MSCCL and RCCL",
    "mscclpp": "execution plan of MSCCL++, JSON",
    "text": "the library's own text",
}


@command(
    "export",
    examples="""
        ringcoll export ring -k 8 --format msccl -o ring.xml
        ringcoll export ring all_gather -k 4 --format mscclpp
        ringcoll export star.py:star -k 4 --format text
    """,
    terms={"Formats": _FORMATS},
)
@options.schedule_options
@click.option("--format", "kind", type=options.OneOf(list(_FORMATS)), default="msccl",
              show_default=True, help="The format, as below.")  # fmt: skip
@options.file_option("-o", "--output", "file",
                     help="Write to this file, and not to the terminal.")  # fmt: skip
@click.option("--max-steps", type=click.IntRange(min=1),
              help="Steps of a thread block of msccl; 64. MSCCL and RCCL run 256.")  # fmt: skip
@options.json_option
def export(
    kind: str, file: Path | None, max_steps: int | None, as_json: bool, **asked: Any
) -> None:
    """Write ALGORITHM for COLLECTIVE (all_reduce) in the format of another system.

    ALGORITHM is a name of `ringcoll list`, or module:algorithm or path/file.py:algorithm, or a file
    of a schedule. The schedule is proved first. What is written is read again wherever an algorithm
    is named: `ringcoll bench all_reduce -k 8 --algorithms ring.xml`.
    """
    if max_steps is not None and kind != "msccl":
        raise click.UsageError(f"--max-steps is for msccl, not for {kind}")
    entry, schedule, title = options.asked_schedule(**asked)
    options.proved(entry, schedule, asked["num_hosts"])
    from ringcoll.lab.formats import to_msccl, to_mscclpp

    writers: dict[str, Callable[[Schedule], str]] = {
        "msccl": partial(to_msccl, max_steps=max_steps or 64),
        "mscclpp": to_mscclpp,
        "text": Schedule.to_text,
    }
    text = writers[kind](schedule)
    if file is not None:
        replace_file(file, text)
    if as_json:
        written = {"files": [str(file)], "text": None} if file else {"files": [], "text": text}
        print_json(header(schedule) | {"format": kind} | written)
    elif file is not None:
        echo(f"Wrote {title} to {file}, {len(text)} bytes.")
    else:
        echo(text, nl=False)
