"""Algorithms by name: ``ringcoll list``, ``ringcoll new`` and ``ringcoll export``.

They tell which algorithms there are, begin another one, and write one for another system. Each
collective has a program for beginners in ``skeletons``, in which ``NAME`` stands for the algorithm.
"""

from __future__ import annotations

import keyword
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from ringcoll.errors import ScheduleError
from ringcoll.runtime.machine import is_reference, replace_file
from ringcoll.schedules import CONTRACTS, Schedule, contract, verify
from ringcoll.schedules.algorithms import ALIASES, Algorithm, algorithms
from ringcoll.tools.cli import options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import echo, grouped, print_json, print_table, print_text
from ringcoll.tools.cli.prove import cost_cells, findings_at, header


@command(
    "list",
    examples="""
        ringcoll list
        ringcoll list all_reduce
        ringcoll list --all
        ringcoll list star.py:star
    """,
)
@click.argument("collective", required=False, shell_complete=options.collective_name.shell_complete)
@click.option("--all", "every", is_flag=True,
              help="List every algorithm, with costs and source, in a wide table.")  # fmt: skip
@options.json_option
def list_algorithms(collective: str | None, every: bool, as_json: bool) -> None:
    """List the algorithms of COLLECTIVE, or of all collectives.

    Without --all, those are listed that run on any number of ranks and that are no second
    choices: where two algorithms are predicted to take the same time, "auto" prefers them. A
    short name that also finds an algorithm is given in parentheses.

    In the table of --all, rounds and traffic, in units of the whole data, are those of k ranks; a
    factor says how many times the lower bound each is. Traffic is what the busiest rank sends or
    receives, added up over the steps. With module:algorithm or path/file.py:algorithm in place of
    COLLECTIVE, that algorithm of yours is listed in this table. --json has every algorithm.

    A name with = chooses the parameter of an algorithm that has one, such as circulant=64 for
    64 blocks. Names with + are a hierarchy of all_reduce, reduce_scatter or all_gather, such as
    ring+bruck: the first runs inside each host, the second across; a third is for groups of hosts.
    """
    every = every or is_reference(collective or "")
    if collective is None:
        entries = [entry for name in CONTRACTS for entry in algorithms(name)]
    elif is_reference(collective):
        entries = options.named_algorithms(collective)[0]
    else:
        entries = list(algorithms(options.collective_name.convert(collective, None, None)))
    if as_json:
        print_json(
            [
                {
                    "collective": entry.collective,
                    "algorithm": entry.name,
                    "summary": entry.summary,
                    "pipelined": entry.pipelined,
                    "equal_blocks": entry.equal_blocks,
                    "restriction": entry.needs,
                    "parameter": entry.parameter and entry.parameter.name,
                    "source": entry.source,
                    "at": _proved(entry),
                }
                for entry in entries
            ]
        )
        return
    if not every:
        _print_usual(entries)
        return
    wrong = ("", "", "", "", "wrong")
    rows = (
        (entry.collective, _names(entry), entry.needs)
        + (cost_cells(facts) if (facts := _proved(entry)) else wrong)
        + (entry.summary, entry.source)
        for entry in entries
    )
    costs = ("k", "rounds", "/bound", "traffic", "/bound")
    columns = ("collective", "algorithm", "restriction", *costs, "how", "source")
    print_table(columns, grouped(rows, apart=False), left=3, prose=2)


def _print_usual(entries: Sequence[Algorithm]) -> None:
    """Print what is listed without ``--all``, a heading for each collective."""
    usual = [entry for entry in entries if not (entry.second_choice or entry.needs)]
    width = max((len(_names(entry)) for entry in usual), default=0)
    for collective, group in groupby(usual, lambda entry: entry.collective):
        echo(collective)
        for entry in group:
            name = f"  {_names(entry):{width}}  "
            text = textwrap.fill(
                _how(entry), 80, break_on_hyphens=False,
                initial_indent=name, subsequent_indent=" " * len(name),
            )  # fmt: skip
            echo(text or name.rstrip())
        echo()
    print_text(
        f"{len(usual)} of {len(entries)} algorithms; all of them, with costs: ringcoll list --all",
        "Steps and costs of one: ringcoll show ring all_reduce",
    )


def _short(entry: Algorithm) -> list[str]:
    """The short names that also find the algorithm."""
    return [alias for alias, name in ALIASES.items() if name == entry.name]


def _names(entry: Algorithm) -> str:
    short = _short(entry)
    return f"{entry.name} ({', '.join(short)})" if short else entry.name


def _how(entry: Algorithm) -> str:
    """The summary, without the names that stand beside it."""
    title, _, text = entry.summary.partition(": ")
    names = {f"{name}_{entry.collective}" for name in (entry.name, *_short(entry))}
    if text and title.lower().replace("-", "_").replace(" ", "_") in names:
        return text[0].upper() + text[1:]
    return entry.summary


def _proved(entry: Algorithm) -> dict[str, Any] | None:
    """The proof for 8 ranks, or for a few more; ``None`` if the algorithm is wrong."""
    fitting = (k for k in range(8, 65) if not entry.restriction(k))
    try:
        proof = verify(entry.schedule(next(fitting, 1)))
    except ScheduleError:
        return None
    return findings_at(proof)


# --- new --------------------------------------------------------------------------------

_SKELETONS = Path(__file__).with_name("skeletons")


@command(
    examples="""
        ringcoll new all_reduce star
        ringcoll new broadcast my_broadcast
    """
)
@options.collective_argument
@click.argument("name")
@options.json_option
def new(collective: str, name: str, as_json: bool) -> None:
    """Write NAME.py, an algorithm for COLLECTIVE, and test_NAME.py into the current folder.

    The algorithm is right as it is written, and is there to be changed. No file is
    overwritten.
    """
    _check(collective, name)
    roots = "range(world_size)" if contract(collective).rooted else "[0]"
    files = {
        Path(f"{name}.py"): _skeleton("head") + _skeleton(collective),
        Path(f"test_{name}.py"): _skeleton("test"),
    }
    for path in files:
        if path.exists() or path.is_symlink():
            raise click.UsageError(f"{path} exists; choose another name, or remove the file")
    written: list[Path] = []
    try:
        for path, skeleton in files.items():
            text = skeleton.replace("NAME", name).replace("COLLECTIVE", collective)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text.replace("ROOTS", roots))
    except OSError as error:  # the disk is full; the error of a write names no file
        for path in written:
            path.unlink()
        error.filename = error.filename or str(path)
        raise
    if as_json:
        print_json({"files": [str(path.absolute()) for path in files]})
        return
    first, second = files
    print_text(
        f"Wrote {first} and {second}. Next:",
        f"  ringcoll show {first}:{name} {collective}",
        f"  ringcoll verify {first}:{name}",
        f"  python -m pytest {second}",
    )


def _skeleton(name: str) -> str:
    return (_SKELETONS / f"{name}.txt").read_text(encoding="utf-8")


def _check(collective: str, name: str) -> None:
    """Make sure that an algorithm can have a name, and a module the same name."""
    if not (_SKELETONS / f"{collective}.txt").exists():
        raise click.BadParameter(f"{collective} has no skeleton", param_hint="COLLECTIVE")
    wrong = ""
    if not name.isidentifier() or keyword.iskeyword(name):
        wrong = f"{name!r} cannot be the name of a Python function"
    elif name in {entry.name for entry in algorithms(collective)} | {*ALIASES, "auto", "native"}:
        wrong = f"{collective} already has an algorithm {name!r}"
    elif not Path(f"{name}.py").exists() and find_spec(name) is not None:
        wrong = f"there is a Python module {name!r}"
    if wrong:
        raise click.BadParameter(wrong, param_hint="NAME")


# --- export -----------------------------------------------------------------------------

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
