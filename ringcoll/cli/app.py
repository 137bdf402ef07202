"""The group of commands: how commands are found, described, and end.

A new command is a module with a click command, an entry in `COMMANDS`, and a name in `SECTIONS`.

Exit status: 0 if all is well, 1 if something that was checked is wrong, 2 if the command
could not do what it was asked to do, 130 if Ctrl-C ended it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from traceback import walk_tb
from typing import Any, NamedTuple

import click

from ringcoll._version import __version__
from ringcoll.cli.command import SETTINGS, write_examples
from ringcoll.errors import RingcollError

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended; shells use the same number."""


class CommandEntry(NamedTuple):
    """A command as the group knows it, which does not import it.

    ``target`` is ``module:attribute``, ``summary`` and ``example`` are one line each.
    """

    target: str
    summary: str
    example: str


COMMANDS = {
    "compare": CommandEntry(
        "ringcoll.cli.compare:compare",
        "Ring, tree and native side by side, on real processes.",
        "ringcoll compare",
    ),
    "bench": CommandEntry(
        "ringcoll.cli.bench:bench",
        "One collective, in the table of nccl-tests.",
        "ringcoll bench all_reduce -b 8 -e 128M -f 2",
    ),
    "tune": CommandEntry(
        "ringcoll.cli.tune:tune",
        "Measure this machine, so that auto chooses by what was measured.",
        "ringcoll tune -k 4",
    ),
    "explain": CommandEntry(
        "ringcoll.cli.explain:explain",
        "Which algorithm auto stands for, what else there is, and why.",
        "ringcoll explain all_reduce -k 8 -b 1M",
    ),
    "run": CommandEntry(
        "ringcoll.cli.run:run",
        "A script on ranks of this host, which may go on without the dead.",
        "ringcoll run --resilient -k 4 train.py",
    ),
    "train": CommandEntry(
        "ringcoll.cli.train:train",
        "A small training run: ring, tree and native side by side.",
        "ringcoll train",
    ),
    "trace": CommandEntry(
        "ringcoll.cli.trace:trace",
        "Where the time goes: a picture of all ranks, and its summary.",
        "ringcoll trace all_reduce -k 4 -b 1M --algorithm ring",
    ),
    "simulate": CommandEntry(
        "ringcoll.cli.simulate:simulate_command",
        "How long an algorithm takes on a network that is not here, and why.",
        "ringcoll simulate ring -k 16 --topology torus:4x4 --size 1M",
    ),
    "search": CommandEntry(
        "ringcoll.cli.search:search",
        "Schedules that suit a network, and how long they take.",
        "ringcoll search all_gather --topology dgx1",
    ),
    "list": CommandEntry(
        "ringcoll.cli.listing:list_algorithms",
        "The algorithms of each collective.",
        "ringcoll list",
    ),
    "show": CommandEntry(
        "ringcoll.cli.show:show",
        "An algorithm, step by step and rank by rank.",
        "ringcoll show ring all_reduce -k 4",
    ),
    "plot": CommandEntry(
        "ringcoll.cli.plot:plot",
        "Figures: where one algorithm overtakes another.",
        "ringcoll plot crossover -k 16 -o crossover.svg",
    ),
    "export": CommandEntry(
        "ringcoll.cli.export:export",
        "An algorithm in the format of MSCCL, MSCCL++, GOAL or Chakra.",
        "ringcoll export ring -k 8 --format msccl -o ring.xml",
    ),
    "new": CommandEntry(
        "ringcoll.cli.new:new",
        "Write an algorithm of your own to begin with, and its test.",
        "ringcoll new all_reduce star",
    ),
    "verify": CommandEntry(
        "ringcoll.cli.prove:verify",
        "Prove that algorithms are right, and what they cost.",
        "ringcoll verify --world-sizes 1-64",
    ),
    "order": CommandEntry(
        "ringcoll.cli.order:order",
        "In which order each element is summed.",
        "ringcoll order ring -k 5 --size 1000",
    ),
    "pareto": CommandEntry(
        "ringcoll.cli.pareto:pareto",
        "Which algorithms no other algorithm beats in every way.",
        "ringcoll pareto all_reduce -k 24",
    ),
    "dump": CommandEntry(
        "ringcoll.cli.dump:dump",
        "What hangs, and where: what each rank of a running program does.",
        "ringcoll dump",
    ),
    "doctor": CommandEntry(
        "ringcoll.cli.doctor:doctor",
        "What will be used on this machine, why, and what to expect.",
        "ringcoll doctor -k 4",
    ),
    "info": CommandEntry(
        "ringcoll.cli.info:info",
        "Versions and machine, for a bug report.",
        "ringcoll info",
    ),
}


# Every command stands in one of them.
SECTIONS = {
    "Look": ("list", "show", "explain", "simulate", "plot", "search", "export", "new"),
    "Prove": ("verify", "order", "pareto"),
    "Measure": ("compare", "bench", "tune", "trace"),
    "Train": ("train", "run"),
    "Debug": ("dump", "doctor", "info"),
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
        width = max(map(len, COMMANDS))
        for heading, names in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", COMMANDS[name].summary) for name in names])
        write_examples(formatter, "\n".join(entry.example for entry in COMMANDS.values()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()  # what does not fit on a disk is said here, and not at the end
        except (RingcollError, TimeoutError) as error:  # or ranks were not done in time
            raise _CannotDoError(str(error)) from error
        except OSError as error:  # of a file, of the output, or of a limit of the system
            _give_up_output()
            name = error.filename or ("the output" if _is_of_output(error) else "")
            reason = error.strerror or str(error)
            raise _CannotDoError(f"{name}: {reason}" if name else reason) from error
        except KeyboardInterrupt:
            click.echo("\ninterrupted; all ranks were ended", err=True)
            raise click.exceptions.Exit(INTERRUPTED) from None
        return result


def _is_of_output(error: OSError) -> bool:
    """Whether a function that prints raised the error."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    prints = ("click.utils", "rich.console", "ringcoll.cli.output", __name__)
    return frame.f_globals["__name__"] in prints


def _give_up_output() -> None:
    """Keep Python from writing the rest of the output, if it cannot be written, when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError):  # again, and yet it closes
            sys.stdout.close()


@click.group(cls=_Commands, context_settings=SETTINGS)
@click.version_option(__version__, "-V", "--version", message="ringcoll %(version)s")
def cli() -> None:
    """Collective communication rebuilt from send and recv.

    Every algorithm is data: it can be drawn, proved and measured. Each command
    explains itself with -h, and prints JSON with --json. An algorithm of your own is
    named module:algorithm or path/file.py:algorithm; a schedule in a file, such as
    MSCCL's XML, by the file.
    """


def main() -> None:
    """Run the command line; the entry point of the ``ringcoll`` script."""
    cli(prog_name="ringcoll")
