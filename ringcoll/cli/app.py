"""The group of commands: how they are found, helped with, and fail.

A new command is a module with a click command, and one line in `COMMANDS`.

Exit status: 0 when all is well, 1 when something that was checked is wrong, 2
when the command could not do what it was asked to.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import click

from ringcoll import __version__
from ringcoll.errors import RingcollError

__all__ = ["COMMANDS", "Entry", "cli"]


class Entry(NamedTuple):
    """What the group knows of a command without importing it.

    ``target`` is ``module:attribute``, ``summary`` and ``example`` are one line each.
    """

    target: str
    summary: str
    example: str


COMMANDS = {
    "compare": Entry(
        "ringcoll.cli.compare:compare",
        "Ring, tree and native side by side, on real processes.",
        "ringcoll compare",
    ),
    "bench": Entry(
        "ringcoll.cli.bench:bench",
        "One collective, in the table of nccl-tests.",
        "ringcoll bench all_reduce -b 8 -e 128M -f 2",
    ),
    "tune": Entry(
        "ringcoll.cli.tune:tune",
        "Measure this machine, so that auto chooses by what was measured.",
        "ringcoll tune -k 4",
    ),
    "explain": Entry(
        "ringcoll.cli.explain:explain",
        "Which algorithm auto stands for, what else there is, and why.",
        "ringcoll explain all_reduce -k 8 -b 1M",
    ),
    "train": Entry(
        "ringcoll.cli.train:train",
        "A small training run: ring, tree and native side by side.",
        "ringcoll train",
    ),
    "trace": Entry(
        "ringcoll.cli.trace:trace",
        "Where the time goes: a picture of all ranks, and its summary.",
        "ringcoll trace all_reduce -k 4 -b 1M --algorithm ring",
    ),
    "list": Entry(
        "ringcoll.cli.listing:list_algorithms",
        "The algorithms of each collective.",
        "ringcoll list",
    ),
    "show": Entry(
        "ringcoll.cli.show:show",
        "An algorithm, step by step and rank by rank.",
        "ringcoll show ring all_reduce -k 4",
    ),
    "verify": Entry(
        "ringcoll.cli.prove:verify",
        "Prove that algorithms are right, and what they cost.",
        "ringcoll verify --world-sizes 1-64",
    ),
    "info": Entry(
        "ringcoll.cli.info:info",
        "Versions and machine, for a bug report.",
        "ringcoll info",
    ),
}


class _CannotDoError(click.ClickException):
    """An error of the library, printed as one line, without traceback."""

    exit_code = 2


class _Commands(click.Group):
    """A group that imports the module of a command when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name].target.split(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])
        with formatter.section("Examples"):
            for entry in COMMANDS.values():
                formatter.write_text(entry.example)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except RingcollError as error:
            raise _CannotDoError(str(error)) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="ringcoll %(version)s")
def cli() -> None:
    """Collective communication rebuilt from send and recv.

    Every algorithm is data: it can be drawn, proved and measured. Each command
    explains itself with --help, and prints JSON with --json.
    """
