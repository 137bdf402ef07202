"""Arguments and options that several commands take."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from math import isfinite, log
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from ringcoll.errors import ScheduleError, TooLargeError, UnknownAlgorithmError
from ringcoll.runtime.user_files import (
    UserModule,
    algorithm_in,
    algorithms_named,
    is_reference,
    is_schedule_file,
    read_schedule,
)
from ringcoll.schedules import CONTRACTS, LARGEST_WORLD, Proof, Schedule, contract, estimated, moved
from ringcoll.schedules import verify as prove
from ringcoll.schedules.algorithms import ALIASES, Algorithm, algorithms, find, named, on_hosts
from ringcoll.schedules.cost import in_number
from ringcoll.tools.bench import parse_size
from ringcoll.tools.cli.app import did_you_mean
from ringcoll.tools.cli.output import progress

_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
_MOST_SIZES = 10_000

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def joined(*decorators: Decorator) -> Decorator:
    """Join options and arguments, in the order in which pages of help show them."""
    return lambda function: reduce(lambda command, add: add(command), decorators[::-1], function)


def typed(ctx: click.Context) -> set[str]:
    """The names of the parameters that the user has typed."""
    typed_here = click.core.ParameterSource.COMMANDLINE
    return {name for name in ctx.params if ctx.get_parameter_source(name) is typed_here}


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
csv_option = click.option("--csv", "as_csv", is_flag=True, help="Print the table as CSV.")
world_size_option = click.option(
    "-k", "--world-size", type=click.IntRange(1, LARGEST_WORLD),
    help="Number of ranks; without it that of a file, or 4.",
)  # fmt: skip
hosts_option = click.option(
    "--hosts", "num_hosts", type=click.IntRange(1, LARGEST_WORLD),
    help="Number of hosts among which the ranks are divided, for an algorithm that needs "
    "to know it; 2.",
)  # fmt: skip
root_option = click.option(
    "-r", "--root", type=click.IntRange(min=0), help="Root of a rooted collective; 0."
)


class OneOf(click.Choice[str]):
    """One of some names; an error says which is the nearest."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        """Say what is expected."""
        message = super().get_invalid_choice_message(value, ctx)
        return message.rstrip(".") + did_you_mean(str(value), self.choices)


def seed_option(about: str) -> Decorator:
    """Make the option for the seed of a search."""
    return click.option(
        "--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, show_default=True, help=about
    )


def nbytes_of(text: str) -> int:
    """Read a number of bytes, such as 64K, or say what is wrong with the text."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


nbytes_of.__name__ = "size"  # as pages of help show the type


def size_option(*names: str, default: str | None = None, **settings: Any) -> Decorator:
    """Make an option that takes a number of bytes."""
    return click.option(*names, type=nbytes_of, default=default, show_default=True, **settings)


def bytes_option(*names: str) -> Decorator:
    """Make the option for the size of a workload, with further names."""
    about = "Size of the vector, or of all blocks of a rank."
    return size_option("-b", "--bytes", *names, "nbytes", default="1M", help=about)


def ranks_option(about: str, usual: int | None = None) -> Decorator:
    """Make the option for the number of ranks."""
    return click.option(
        "-k", "--ranks", "--world-size", "ranks", type=click.IntRange(1, LARGEST_WORLD),
        default=usual, show_default=True, help=about,
    )  # fmt: skip


def sizes_options(least: str, most: str, factor: int, step: str | None = None) -> Decorator:
    """Make the options for the smallest and largest size, and the way from one to the next.

    A command that has a step, as nccl-tests do, takes the factor 1 for none.
    """
    about, least_factor, steps = "From one size to the next.", 2, []
    if step is not None:
        steps = [size_option("-i", "--stepbytes", default=step, help=about)]
        about, least_factor = f"{about[:-1]}; above 1 it replaces -i.", 1
    return joined(
        size_option("-b", "--minbytes", "--bytes", "minbytes", default=least,
                    help="Smallest size."),
        size_option("-e", "--maxbytes", default=most, help="Largest size."),
        *steps,
        click.option(
            "-f", "--stepfactor", type=click.IntRange(min=least_factor), default=factor,
            show_default=True, help=about,
        ),
    )  # fmt: skip


def sizes_between(least: int, most: int, factor: int, step: int = 0) -> tuple[int, ...]:
    """The sizes between two, by a factor if it is above 1, otherwise by a step."""
    if most < least:
        raise click.UsageError("the largest size (-e) is below the smallest (-b)")
    if factor <= 1 and step and (most - least) // step >= _MOST_SIZES:
        raise click.UsageError(
            f"there are more than {_MOST_SIZES} sizes: take a larger step (-i), or -f 2"
        )
    if factor <= 1:
        return tuple(range(least, most + 1, step)) if step else (least,)
    sizes = [least]
    while least and sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


class FiniteRange(click.FloatRange):
    """A number in a range, and neither infinite nor no number at all."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read a number."""
        number = super().convert(value, param, ctx)
        return number if isfinite(number) else self.fail(f"{value!r} is not finite", param, ctx)


def names_in(text: str, option: str | None = None) -> list[str]:
    """The names in a text, separated by commas; an option's callback need not name the option.

    >>> names_in("ring, tree,", "--algorithms")
    ['ring', 'tree']
    """
    names = [*filter(None, map(str.strip, text.split(",")))]
    if not names:
        raise click.BadParameter("name at least one", param_hint=option)
    return names


def world_sizes(text: str, lowest: int = 1) -> tuple[int, ...]:
    """Read numbers and ranges, such as ``1-8,13,64``; sorted, each number once.

    >>> world_sizes("8,1-3,2")
    (1, 2, 3, 8)
    """
    numbers: set[int] = set()
    for piece in map(str.strip, text.split(",")):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise click.BadParameter(f"{piece!r} is neither a number nor a range like 1-8")
        first = int(match[1])
        last = int(match[2] or first)
        if not lowest <= first <= last <= LARGEST_WORLD:
            raise click.BadParameter(
                f"{piece!r} is not within {lowest} to {LARGEST_WORLD}, lowest first"
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def rank_numbers(text: str) -> tuple[int, ...]:
    """Read ranks as `world_sizes` reads numbers; the first rank is 0."""
    return world_sizes(text, 0)


class _CollectiveName(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.5
    """The name of a collective; ``all-reduce`` is read as ``all_reduce``."""

    name = "collective"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name = value.replace("-", "_")
        if name in CONTRACTS:
            return name
        before = "" if ctx is None else ctx.params.get("algorithm") or ""
        if ctx is not None and before.replace("-", "_") in CONTRACTS:
            hint = f"did you mean `{ctx.command_path} {value} {before}`?"
            raise click.UsageError(f"the algorithm comes first; {hint}", ctx)
        if named(name):
            expected = ", ".join(CONTRACTS)
            raise ScheduleError(f"{value!r} is an algorithm; expected a collective: {expected}")
        try:
            return contract(name).collective
        except ScheduleError as error:
            raise ScheduleError(f"{error}{did_you_mean(name, CONTRACTS)}") from None

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the name of a collective, for which the algorithm before it is defined."""
        fitting = {entry.collective for entry in named(ctx.params.get("algorithm") or "")}
        return [
            CompletionItem(name)
            for name in CONTRACTS
            if name.startswith(incomplete.replace("-", "_")) and name in (fitting or CONTRACTS)
        ]


collective_name = _CollectiveName()


def complete_algorithms(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the last algorithm of ``ring,tree`` or ``ring+tree``; a file if none fits."""
    word = re.split(r"[,+]", incomplete)[-1]
    before = incomplete.removesuffix(word)
    collective = ctx.params["collective"] if "collective" in typed(ctx) else None
    known = {entry.name for entry in algorithms(collective)}
    known |= {short for short, full in ALIASES.items() if full in known}
    fitting = [CompletionItem(before + name) for name in sorted(known) if name.startswith(word)]
    return fitting or [CompletionItem(incomplete, type="file")]


algorithm_argument = click.argument("algorithm", shell_complete=complete_algorithms)
collective_argument = click.argument("collective", type=collective_name)
usual_collective = click.argument("collective", type=collective_name, default="all_reduce")


def _typed_collective(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Take the collective of the option, which is read first, or of the argument; not two."""
    if isinstance(param, click.Option):
        ctx.meta["ringcoll.collective"] = value
        return value
    asked = ctx.meta.get("ringcoll.collective")
    if None not in (asked, value) and asked != value:
        raise click.UsageError(f"there are two collectives: {value} and --collective {asked}")
    return value or asked or "all_reduce"


collective_after_algorithm = joined(
    click.option("-c", "--collective", "asked", type=collective_name, metavar="NAME",
                 expose_value=False, is_eager=True, callback=_typed_collective,
                 help="The collective, as COLLECTIVE."),
    click.argument("collective", type=collective_name, required=False, callback=_typed_collective),
)  # fmt: skip
"""The collective of a command whose first argument is an algorithm."""
schedule_options = joined(
    algorithm_argument, collective_after_algorithm, world_size_option, hosts_option, root_option
)
"""The arguments and options of `asked_schedule`."""


def named_algorithms(
    text: str, collective: str | None = None
) -> tuple[list[Algorithm], tuple[UserModule, ...]]:
    """Find the algorithms of a name, of ``module:algorithm``, which is imported, or of a file.

    At least one algorithm is returned, for the collective or for any, and the module to import on
    every rank, if there is one. `UnknownAlgorithmError` lists the known names, and the nearest.
    """
    if is_schedule_file(text):
        entry = algorithm_in(text)
        if collective not in (None, entry.collective):
            raise UnknownAlgorithmError(
                f"{text!r} is for {entry.collective}, and not for {collective}"
            )
        return [entry], ()
    if is_reference(text):
        module, entries = algorithms_named(text)
        fitting = [entry for entry in entries if collective in (None, entry.collective)]
        if not fitting:
            own = ", ".join(entry.collective for entry in entries)
            raise UnknownAlgorithmError(f"{text!r} is for {own}, and not for {collective}")
        return fitting, (module,)
    name = text.replace("-", "_")
    if fitting := named(name, collective):
        return fitting, ()
    known = dict.fromkeys(entry.name for entry in algorithms(collective))
    known |= {short: None for short, full in ALIASES.items() if full in known}
    if "+" in name or "=" in name:
        find(collective or "all_reduce", name)  # says which of its names is unknown
    target = "" if collective is None else f" for {collective}"
    hint = f"; {text!r} is a collective" if name in CONTRACTS else did_you_mean(name, known)
    raise UnknownAlgorithmError(
        f"unknown algorithm {text!r}{target}; known: {', '.join(known)}{hint}"
    )


def ranks_in_files(*names: str | None) -> int | None:
    """The number of ranks of the first file of a schedule among the names of algorithms."""
    files = (read_schedule(name).world_size for name in names if name and is_schedule_file(name))
    return next(files, None)


def check_root(collective: str, root: int | None) -> bool:
    """Refuse a root, if it was typed, of a collective that has none; whether there is a root."""
    rooted = contract(collective).rooted
    if root is not None and not rooted:
        raise click.UsageError(f"{collective} has no root")
    return rooted


def asked_schedule(
    algorithm: str,
    collective: str,
    world_size: int | None = None,
    root: int | None = None,
    num_hosts: int | None = None,
) -> tuple[Algorithm, Schedule, str]:
    """The algorithm that the user asks for (see `named_algorithms`), its schedule, both in words.

    A number is ``None`` if the user typed no number.
    """
    rooted = check_root(collective, root)
    (entry, *_), _ = named_algorithms(algorithm, collective)
    world_size = world_size or ranks_in_files(algorithm) or 4
    if num_hosts is not None and not entry.needs_hosts:
        raise click.UsageError(f"{entry.name} {collective} is the same on any number of hosts")
    hosts = on_hosts(world_size, num_hosts or 2)
    schedule = entry.schedule(world_size, root or 0, hosts)
    title = f"{entry.name} {collective} on {in_number(world_size, 'rank')}"
    title += f", root {schedule.root}" * rooted
    title += f", {in_number(max(hosts) + 1, 'host')}" * entry.needs_hosts
    return entry, schedule, title


@contextmanager
def ranks_that_would_do(
    entry: Algorithm, schedule: Schedule, num_hosts: int | None
) -> Iterator[None]:
    """Add to an error about the size of a schedule how many ranks would do, about.

    That is estimated from how the work grows up to 128 ranks.
    """
    try:
        yield
    except TooLargeError as error:
        tried = range(2, min(128, schedule.world_size) + 1)
        numbers = [k for k in tried if not entry.restriction(k)]
        if "=" in entry.name or not error.most or not numbers:  # fewer ranks may not help
            raise
        more = numbers[-1]
        fewer = max([k for k in numbers if 2 * k <= more], default=more)
        smaller = {k: entry.schedule(k, hosts=on_hosts(k, num_hosts or 2)) for k in (fewer, more)}
        work = {k: estimated(own, moved, 8 * error.most) / 8 for k, own in smaller.items()}
        hint = ""
        if fewer < more and 0 < work[fewer] < work[more] < error.most:
            power = log(work[more] / work[fewer]) / log(more / fewer)
            ranks = int(0.9 * more * (error.most / work[more]) ** (1 / power))
            ranks = next((k for k in range(ranks, more, -1) if not entry.restriction(k)), more)
            hint = f"; {ranks} ranks would do" if ranks < schedule.world_size else ""
        raise TooLargeError(f"{error}{hint}") from None


def proved(entry: Algorithm, schedule: Schedule, num_hosts: int | None = None) -> Proof:
    """Prove a schedule that is not too large, with a clock on the terminal."""
    with (
        ranks_that_would_do(entry, schedule, num_hosts),
        progress(1, f"proving {entry.name} {entry.collective}"),
    ):
        return prove(schedule)


def new_file(*suffixes: str) -> Callable[..., Path | None]:
    """Make a callback that checks a file to write, which may have these endings, or any."""

    def check(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
        if path is None:
            return None
        folder, there, is_folder, wrong = path.absolute().parent, False, False, ""
        try:
            path.lstat()
            there, is_folder = path.exists(), path.is_dir()
        except FileNotFoundError:
            pass
        except OSError as error:  # the name is too long, say
            raise click.BadParameter(f"{path}: {error.strerror}") from error
        if not folder.is_dir():
            wrong = f"there is no folder {folder}"
        elif is_folder:
            wrong = f"{str(path)!r} is a folder"
        elif not os.access(path if there else folder, os.W_OK):
            wrong = f"{path} cannot be written"
        elif suffixes and path.suffix.lower() not in suffixes:
            expected = ", ".join(suffixes)
            wrong = f"{path.name!r} has the ending {path.suffix!r}, expected {expected}"
        if wrong:
            raise click.BadParameter(wrong)
        return path

    return check


def new_picture(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Make sure, before anything is measured, that a picture can be drawn and written."""
    if path is None:
        return None
    from ringcoll.tools.bench import suffixes  # it imports torch

    return new_file(*suffixes())(ctx, param, path)


def file_option(*names: str, **settings: Any) -> Decorator:
    """Make an option for a file to write, which is checked before hours are spent on it."""
    settings.setdefault("callback", new_file())
    return click.option(*names, type=click.Path(dir_okay=False, path_type=Path), **settings)
