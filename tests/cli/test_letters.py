"""A letter stands for one option in all commands, and pages of help need no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import click
import pytest

from ringcoll.tools.cli import cli
from ringcoll.tools.cli.app import COMMANDS
from tests.cli.conftest import Run

LETTERS = {
    "-V": "--version",
    "-a": "--average",
    "-b": "--bytes",
    "-c": "--collective",
    "-d": "--datatype",
    "-e": "--maxbytes",
    "-f": "--stepfactor",
    "-i": "--stepbytes",
    "-J": "--output_file",
    "-k": "--world-size",
    "-n": "--iters",
    "-o": "--output",
    "-r": "--root",
    "-w": "--warmup_iters",
    "-z": "--blocking",
}
OF_NCCL_TESTS = {("bench", "-c"): "--check", ("bench", "-o"): "--op"}
"""Programs that read nccl-tests pass these to ``ringcoll bench``."""

CONTEXT = click.Context(cli)
OPTIONS = [
    (name, option)
    for name, command in [("", cli), *((name, cli.get_command(CONTEXT, name)) for name in COMMANDS)]
    if command is not None
    for option in command.params
    if isinstance(option, click.Option)
]


def test_a_letter_stands_for_one_option_in_all_commands() -> None:
    seen = set()
    for name, option in OPTIONS:
        for letter in (word for word in option.opts if not word.startswith("--")):
            expected = OF_NCCL_TESTS.get((name, letter), LETTERS[letter])
            assert expected in option.opts, f"{name} {letter}"
            seen.add(letter)
    assert seen == set(LETTERS)


@pytest.mark.parametrize("long", ["--world-size", "--root", "--bytes", "--collective"])
def test_an_option_has_its_letter_in_all_commands(long: str) -> None:
    letter = next(letter for letter, name in LETTERS.items() if name == long)
    having = [(name, option.opts) for name, option in OPTIONS if long in option.opts]
    assert having
    for name, words in having:
        assert letter in words, name


def test_every_file_to_write_is_the_output() -> None:
    """``-o`` is the operator in ``bench``, but ``--output`` is the file there, too."""
    for name in ("bench", *(name for name, option in OPTIONS if "-o" in option.opts)):
        assert any("--output" in option.opts for command, option in OPTIONS if command == name)


def test_bench_has_the_flags_of_nccl_tests() -> None:
    words = {word for name, option in OPTIONS if name == "bench" for word in option.opts}
    assert words >= {f"-{letter}" for letter in "beifnwcodrza"} | {"--minbytes", "--maxbytes"}


@pytest.mark.processes
def test_no_page_of_help_imports_torch() -> None:
    program = """
import json, sys
sys.modules["torch"] = None
from click.testing import CliRunner
from ringcoll.tools.cli import cli
pages = {name: CliRunner().invoke(cli, [name, "--help"]) for name in sys.argv[1:]}
print(json.dumps({name: repr(page.exception) for name, page in pages.items() if page.exit_code}))
"""
    result = subprocess.run(
        [sys.executable, "-c", program, *COMMANDS],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env=dict(os.environ),
    )
    assert json.loads(result.stdout) == {}


@pytest.mark.parametrize(
    "words, hint",
    [
        ("bench all_reduce --algorithms ring@golo", "gloo"),
        ("bench all_reduce --transport golo", "gloo"),
        ("bench all_reduce -d flaot", "float"),
        ("bench all_reduce -o sun", "sum"),
        ("tune --collectives all_educe", "all_reduce"),
        ("train --trainer bucketd", "bucketed"),
        ("train --model transfomer", "transformer"),
        ("trace bucketd", "bucketed"),
        ("trace pipeline:gpip", "gpipe"),
        ("explain all_reduce --topology fat_tre:4", "fat_tree"),
        ("simulate ring --topology rng", "ring"),
        ("search all_reduce --topology ring -k 4 --method exct", "exact"),
        ("export ring --format mscl", "msccl"),
    ],
)
def test_the_nearest_value_is_suggested(run: Run, words: str, hint: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].endswith(f"; did you mean {hint!r}?")


def test_a_value_that_is_near_to_nothing_is_refused_without_a_suggestion(run: Run) -> None:
    for words in ("train --model xyz", "explain all_reduce --topology xyz", "trace xyz"):
        result = run(*words.split())
        assert result.exit_code == 2
        assert "did you mean" not in result.stderr
