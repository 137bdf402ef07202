"""The group of commands: how commands are found, describe themselves, and end.

A new command is a click command in a module of the same name, and a line in `SECTIONS`. A page of
help has text, definitions and examples, as wide as the terminal.

Exit status: 0 if all is well, 1 if something that was checked is wrong, 2 if the command
could not do what it was asked to do, 130 if Ctrl-C ended it.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from traceback import walk_tb
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from ringcoll._package import __version__
from ringcoll.errors import ArgumentError, RingcollError, printable

INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended; shells use the same number."""
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The settings of click for the group and every command."""
_COMPLETE = "_RINGCOLL_COMPLETE"  # as click reads it; scripts of `--completion` set it

SECTIONS = {
    "Look": {
        "list": "The algorithms of each collective.",
        "show": "An algorithm, step by step and rank by rank, and what it costs.",
        "explain": 'Which algorithm "auto" chooses, and why.',
        "simulate": "How long an algorithm takes on a network that is not here.",
        "plot": "Figures: crossovers of algorithms over the size; the Pareto front.",
    },
    "Measure": {
        "bench": "One collective, in the table of nccl-tests, or beside native.",
        "tune": 'Measure this machine, so that "auto" chooses by what was measured.',
        "probe": "The network of these ranks: hosts, cards and links, as a file.",
        "trace": "Where the time goes: a picture of all ranks, and its summary.",
    },
    "Train": {
        "train": "A small training run: ring, tree and native side by side.",
        "run": "Start the ranks of a script; they may go on when some die.",
    },
    "Find trouble": {
        "doctor": "What is used on this machine, and why; versions, for a bug report.",
        "dump": "What hangs, and where: what each rank of a running program does.",
    },
    "Invent": {
        "new": "Begin an algorithm of your own: a file that works, and its test.",
        "verify": "Prove that algorithms are right, what they cost, how they sum.",
        "search": "Schedules that suit a network, and how long they take.",
        "fit": "The fastest schedules on a network, by size, for groups to use.",
        "export": "An algorithm in the format of MSCCL or MSCCL++.",
    },
}
"""The commands by heading, with a line on each."""
COMMANDS = {name: summary for section in SECTIONS.values() for name, summary in section.items()}
_RENAMED = {
    "compare": "bench --vs native",
    "info": "doctor --report",
    "order": "verify ALGORITHM --order",
    "pareto": "plot pareto",
}
"""The commands that are gone, and their successors."""

_EXAMPLES = """
ringcoll list all_reduce
ringcoll show ring all_reduce -k 4
ringcoll bench --vs native
ringcoll train
ringcoll doctor -k 4
ringcoll new all_reduce star
ringcoll verify star.py:star
"""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The nearest of the known names, as the end of an error; empty if none is near."""
    close = get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def nearest(error: Exception) -> str:
    """The name that was meant, as `did_you_mean` says it, if an error is about a name."""
    if not isinstance(error, ArgumentError) or not error.message.startswith(("no such", "not a ")):
        return ""
    got, known = (re.findall(r"[a-z][\w-]*", str(names)) for names in (error.got, error.expected))
    return next((did_you_mean(word, known) for word in got if word not in known), "")


class DescribedCommand(click.Command):
    """A command whose page of help has definitions, under headings, and examples, one a line."""

    def __init__(
        self,
        name: str,
        *,
        examples: str,
        terms: Mapping[str, Mapping[str, str]] = {},
        **options: Any,
    ) -> None:
        settings = SETTINGS | options.pop("context_settings", {})
        super().__init__(name, context_settings=settings, **options)
        self.examples, self.terms = examples, terms

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the definitions and the examples, below the options."""
        for heading, definitions in self.terms.items():
            with formatter.section(heading):
                formatter.write_dl(list(definitions.items()))
        write_examples(formatter, self.examples)


command = partial(click.command, cls=DescribedCommand)


def write_examples(formatter: click.HelpFormatter, examples: str) -> None:
    """Write calls of commands; a call that is too long is continued as a shell reads it."""
    with formatter.section("Examples"):
        for example in examples.strip().splitlines():
            lines = textwrap.wrap(
                example.strip(),
                formatter.width - formatter.current_indent - len("  \\"),
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            indent = " " * formatter.current_indent
            formatter.write(" \\\n".join(indent + line for line in lines) + "\n")


class _CannotDoError(click.ClickException):
    """An error of the library, printed as one line, without traceback."""

    exit_code = 2


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Replace the characters in errors that are not for print; users and files bring them."""
    try:
        yield
    except click.ClickException as error:
        vars(error)["message"] = "\n".join(map(printable, error.message.split("\n")))
        raise


class _Commands(click.Group):
    """A group that imports the module of a command when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"ringcoll.tools.cli.{cmd_name}")
        commands = (value for value in vars(module).values() if isinstance(value, click.Command))
        return next(command for command in commands if command.name == cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in _RENAMED:
            raise _CannotDoError(f"`{args[0]}` is gone; type `ringcoll {_RENAMED[args[0]]}`")
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = did_you_mean(args[0], COMMANDS)
            raise click.UsageError(f"No such command {args[0]!r}{hint}", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for heading, entries in SECTIONS.items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{width}}", entries[name]) for name in entries])
        write_examples(formatter, _EXAMPLES)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name, or an option, without importing a command."""
        return [
            CompletionItem(name, help=summary)
            for name, summary in COMMANDS.items()
            if name.startswith(incomplete)
        ] + click.Command.shell_complete(self, ctx, incomplete)

    def make_context(self, *args: Any, **settings: Any) -> click.Context:
        with _printable_errors():
            return super().make_context(*args, **settings)

    @_printable_errors()
    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            if sys.stdout is not None:
                sys.stdout.flush()  # a full disk is an error here, and not at Python's end
        except (RingcollError, TimeoutError) as error:  # or ranks were not done in time
            raise _CannotDoError(f"{error}{nearest(error)}") from error
        except OSError as error:  # of a file, of the output, or of a limit of the system
            try:
                sys.stdout.flush()
            except OSError:  # or Python would write the rest of the output when it ends
                with suppress(OSError):  # again, and yet it closes
                    sys.stdout.close()
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
    prints = ("click.utils", "rich.console", "ringcoll.tools.cli.output", __name__)
    return frame.f_globals["__name__"] in prints


def _print_completion(ctx: click.Context, param: click.Parameter, shell: str | None) -> None:
    if shell is not None and not ctx.resilient_parsing:
        complete = get_completion_class(shell)
        assert complete is not None
        click.echo(complete(ctx.command, {}, "ringcoll", _COMPLETE).source())
        ctx.exit()


@click.group(cls=_Commands, context_settings=SETTINGS)
@click.version_option(__version__, "-V", "--version", message="ringcoll %(version)s")
@click.option("--completion", type=click.Choice(["bash", "zsh", "fish"]), is_eager=True,
              expose_value=False, callback=_print_completion,
              help='Print a script for completion, and exit. In ~/.bashrc: eval "$(ringcoll '
              '--completion bash)"; with zsh the same in ~/.zshrc. In ~/.config/fish/config.fish: '
              "ringcoll --completion fish | source.")  # fmt: skip
def cli() -> None:
    """Collective communication rebuilt from send and recv.

    A collective, such as all_reduce, is an operation of all ranks; an algorithm, such as ring, is
    a way to do it with messages between two ranks. Every algorithm is data: it can be drawn,
    proved, simulated, measured and used in training.

    Each command explains itself with -h, and prints JSON with --json. In all of them -k is the
    number of ranks, -b the size (the smallest of several), -c the collective, -r the root, and -o
    the file to write; but bench has -c and -o of nccl-tests. An algorithm of your own is
    named module:algorithm or path/file.py:algorithm; a schedule in a file, such as MSCCL's XML, by
    the file.
    """


def main(prog_name: str = "ringcoll") -> None:
    """Run the command line; the entry point of the ``ringcoll`` script."""
    cli(prog_name=prog_name, complete_var=_COMPLETE)
