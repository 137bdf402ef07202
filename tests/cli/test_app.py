"""The group: help, versions, and what is imported when."""

import re
import shlex
import subprocess
import sys

import click
import pytest

from ringcoll import __version__
from ringcoll.cli.app import COMMANDS, cli

CHEAP = ("list", "show", "info")  # commands whose examples are quick to run


def help_of(command: click.Command) -> str:
    return command.get_help(click.Context(command))


def examples(page: str) -> list[str]:
    return [line.strip() for line in page.splitlines() if line.startswith("    ringcoll ")]


def command(name: str) -> click.Command:
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def test_help_lists_every_command_with_an_example(run):
    result = run("--help")
    assert result.exit_code == 0
    for name, entry in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(entry.summary)}$", result.stdout, re.MULTILINE)
        assert f"\n  {entry.example}\n" in result.stdout + "\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself_with_examples_and_takes_json(name):
    page = help_of(command(name))
    assert len(command(name).get_short_help_str(80)) > 10
    assert "--json" in page
    assert COMMANDS[name].example in examples(page)


@pytest.mark.parametrize(
    "example", [line for name in CHEAP for line in examples(help_of(command(name)))]
)
def test_examples_do_what_they_say(run, example):
    words = shlex.split(example.partition(">")[0])
    result = run(*words[1:])
    assert result.exit_code == 0
    assert result.stdout


def test_pages_fit_a_terminal():
    pages = [help_of(cli), *(help_of(command(name)) for name in COMMANDS)]
    assert max(len(line) for page in pages for line in page.splitlines()) <= 80


def test_version(run):
    assert run("--version").stdout == f"ringcoll {__version__}\n"


def test_an_unknown_command_is_one_line(run):
    result = run("prove")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("Error: No such command 'prove'")


def call(*lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "words",
    [["--help"], ["list"], ["show", "ring", "all_reduce"], ["verify", "ring", "--json"]],
    ids=" ".join,
)
def test_what_needs_no_tensors_runs_without_torch(words):
    result = call(
        "import sys",
        "sys.modules['torch'] = None",
        f"sys.argv = ['ringcoll', *{words}]",
        "from ringcoll.cli import main",
        "main()",
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout


def test_the_library_imports_nothing_of_the_command_line():
    result = call(
        "import sys, ringcoll",
        "print(sorted({'click', 'rich', 'ringcoll.cli', 'matplotlib'} & set(sys.modules)))",
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_module_is_a_program():
    result = subprocess.run(
        [sys.executable, "-m", "ringcoll.cli", "--version"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.returncode) == (f"ringcoll {__version__}\n", 0)
