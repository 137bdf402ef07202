"""``ringcoll new``: the skeleton of an algorithm, and its test.

Each collective has a program in ``skeletons``, in which ``NAME`` stands for the algorithm.
"""

from __future__ import annotations

import keyword
from importlib.util import find_spec
from pathlib import Path

import click

from ringcoll.algorithms import ALIASES, algorithms
from ringcoll.cli.command import command
from ringcoll.cli.output import print_json, print_text
from ringcoll.cli.parameters import collective_name, json_option
from ringcoll.schedule import contract

_EXAMPLES = """
ringcoll new all_reduce star
ringcoll new broadcast my_broadcast
"""

_SKELETONS = Path(__file__).with_name("skeletons")

_HEAD = '''\
"""An algorithm for COLLECTIVE.

Every rank runs NAME, and yields steps. A step is all that the rank does at the same time.
Steps are global: what a rank sends in its third step, its peer receives in the peer's third
step. A rank that has nothing to do in a step yields Step().

inp(c) is chunk c of the input, out(c) chunk c of the output, and tmp(s, c) slot s of the scratch
memory that `slots=` of register asks for, with data as long as chunk c.

    ringcoll show NAME.py:NAME COLLECTIVE -k 4
    ringcoll verify NAME.py:NAME
    ringcoll bench COLLECTIVE -k 2 --algorithms NAME.py:NAME,native
"""

from fractions import Fraction

from ringcoll.algorithms import Cost, register
'''

_TEST = '''\
"""NAME does what COLLECTIVE promises."""

import NAME
import pytest

from ringcoll.algorithms import schedule_of
from ringcoll.schedule import verify


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8, 13])
def test_NAME_is_proved(world_size):
    assert callable(NAME.NAME)
    for root in ROOTS:
        proof = verify(schedule_of("COLLECTIVE", "NAME", world_size, root))  # raises if wrong
        assert proof.schedule.algorithm == "NAME"
'''


@command(examples=_EXAMPLES)
@click.argument("collective", type=collective_name)
@click.argument("name")
@json_option
def new(collective: str, name: str, as_json: bool) -> None:
    """Write NAME.py, an algorithm for COLLECTIVE, and test_NAME.py into the current folder.

    The algorithm is right as it is written, and is there to be changed. No file is
    overwritten.
    """
    _check(collective, name)
    roots = "range(world_size)" if contract(collective).rooted else "[0]"
    program = (_SKELETONS / f"{collective}.txt").read_text(encoding="utf-8")
    files = {Path(f"{name}.py"): _HEAD + program, Path(f"test_{name}.py"): _TEST}
    for path in files:
        if path.exists() or path.is_symlink():
            raise click.UsageError(f"{path} exists; choose another name, or remove the file")
    written: list[Path] = []
    try:
        for path, text in files.items():
            named = text.replace("NAME", name).replace("COLLECTIVE", collective)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(named.replace("ROOTS", roots))
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


def _check(collective: str, name: str) -> None:
    """Make sure that an algorithm can have a name, and a module the same name."""
    if not (_SKELETONS / f"{collective}.txt").exists():
        raise click.BadParameter(f"{collective} has no skeleton", param_hint="COLLECTIVE")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise click.BadParameter(
            f"{name!r} cannot be the name of a Python function", param_hint="NAME"
        )
    taken = {entry.name for entry in algorithms(collective)} | {*ALIASES, "auto", "native"}
    if name in taken:
        raise click.BadParameter(
            f"{collective} already has an algorithm {name!r}", param_hint="NAME"
        )
    if not Path(f"{name}.py").exists() and find_spec(name) is not None:
        raise click.BadParameter(f"there is a Python module {name!r}", param_hint="NAME")
