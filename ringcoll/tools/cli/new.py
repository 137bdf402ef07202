"""``ringcoll new``: a file with an algorithm of one's own, and its test.

Each collective has a program for beginners in ``skeletons``, in which ``NAME`` stands for the
algorithm.
"""

from __future__ import annotations

import keyword
from importlib.util import find_spec
from pathlib import Path

import click

from ringcoll.schedules import contract
from ringcoll.schedules.algorithms import ALIASES, algorithms
from ringcoll.tools.cli import options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import print_json, print_text

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
