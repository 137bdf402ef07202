"""The group: help, versions, and what is imported when."""

import errno
import re
import shlex
import subprocess
import sys

import click
import pytest

from ringcoll import __version__
from ringcoll.cli.app import COMMANDS, INTERRUPTED, SECTIONS, cli
from ringcoll.cli.command import SETTINGS, DescribedCommand

CHEAP = (
    "list",
    "show",
    "order",
    "simulate",
    "search",
    "export",
    "info",
    "doctor",
)  # commands whose examples are quick to run


def help_of(command: click.Command) -> str:
    return command.get_help(click.Context(command, **SETTINGS))


def examples(page: str) -> list[str]:
    return [line.strip() for line in page.splitlines() if line.startswith("  ringcoll ")]


def command(name: str) -> DescribedCommand:
    found = cli.get_command(click.Context(cli), name)
    assert isinstance(found, DescribedCommand)
    return found


def test_help_lists_every_command_with_an_example(run):
    result = run("--help")
    assert result.exit_code == 0
    for name, entry in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(entry.summary)}$", result.stdout, re.MULTILINE)
        assert f"\n  {entry.example}\n" in result.stdout + "\n"


def test_every_command_stands_in_one_section(run):
    headings = re.findall(r"^(\w+):$|^  (\w+)  ", run("--help").stdout, re.MULTILINE)
    sections: dict[str, list[str]] = {}
    for heading, name in headings:
        if heading:
            names = sections.setdefault(heading, [])
        elif name:
            names.append(name)
    shown = {heading: names for heading, names in sections.items() if heading in SECTIONS}
    assert shown == {heading: [*names] for heading, names in SECTIONS.items()}
    assert sorted(name for names in shown.values() for name in names) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself_with_examples_and_takes_json(name):
    page = help_of(command(name))
    assert len(command(name).get_short_help_str(80)) > 10
    assert "--json" in page or name == "run", "which prints what a script prints"
    assert COMMANDS[name].example in examples(page)


@pytest.mark.parametrize(
    "example", [line for name in CHEAP for line in examples(help_of(command(name)))]
)
def test_examples_do_what_they_say(run, star, example):
    words = shlex.split(example.partition(">")[0])
    result = run(*words[1:])
    assert result.exit_code == 0
    assert result.stdout


@pytest.fixture
def wide_page(monkeypatch, capsys):
    """Gives the page of help of a command on a terminal with so many columns."""

    def page(columns, *words):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as caught:
            cli([*words, "-h"], prog_name="ringcoll")
        assert caught.value.code == 0
        return capsys.readouterr().out

    return page


@pytest.mark.parametrize("columns", [60, 80, 100])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_pages_fit_a_terminal(wide_page, name, columns):
    page = wide_page(columns, *filter(None, [name]))
    lines = page.splitlines()
    assert max(map(len, lines)) <= columns
    assert "\\b" not in page
    assert name == "info" or max(map(len, lines)) > columns - 15, "the width is used"


def test_a_long_example_is_continued_as_a_shell_reads_it(wide_page):
    text = wide_page(60, "bench").partition("Examples:\n")[2].replace(" \\\n", " ")
    assert [shlex.split(line) for line in text.splitlines()] == [
        shlex.split(line) for line in command("bench").examples.strip().splitlines()
    ]


def test_the_trainers_are_laid_out(wide_page):
    page = wide_page(80, "train")
    assert "\n  torch-ddp       DistributedDataParallel on a group of --backend\n" in page


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_ends_every_command_alike(run, monkeypatch, name):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DescribedCommand, "invoke", interrupted)
    words = {
        "show": ["ring", "all_reduce"],
        "order": ["ring"],
        "simulate": ["ring"],
        "export": ["ring"],
        "plot": ["crossover"],
        "new": ["all_reduce", "star"],
        "run": [__file__],
    }
    needed = (
        ["all_reduce"]
        if name in ("bench", "explain", "pareto", "search", "trace")
        else words.get(name, [])
    )
    result = run(name, *needed)
    assert result.exit_code == INTERRUPTED == 130
    assert result.stderr == "\ninterrupted; all ranks were ended\n"


@pytest.mark.parametrize(
    "error, said",
    [
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (ConnectionRefusedError("nobody listens"), "nobody listens"),
        (PermissionError(errno.EACCES, "Permission denied", "a.txt"), "a.txt: Permission denied"),
    ],
)
def test_an_error_of_the_system_is_not_told_as_one_of_the_output(run, monkeypatch, error, said):
    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(DescribedCommand, "invoke", failing)
    result = run("list")
    assert (result.exit_code, result.stderr) == (2, f"Error: {said}\n")


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


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["list"],
        ["show", "ring", "all_reduce"],
        ["order", "ring"],
        ["pareto", "all_reduce"],
        ["verify", "ring", "--json"],
    ],
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


@pytest.mark.processes
def test_help_imports_nothing_that_takes_long():
    slow = "{'asyncio', 'numpy', 'rich', 'ssl', 'torch', 'wrapt'}"
    result = call(
        "import sys",
        "sys.argv = ['ringcoll', '--help']",
        "from ringcoll.cli import main",
        "try:",
        "    main()",
        "finally:",
        f"    print(sorted({slow} & set(sys.modules)), file=sys.stderr)",
    )
    assert (result.returncode, result.stderr) == (0, "[]\n")


@pytest.mark.processes
def test_the_library_imports_nothing_of_the_command_line():
    result = call(
        "import sys, ringcoll",
        "print(sorted({'click', 'rich', 'ringcoll.cli', 'matplotlib'} & set(sys.modules)))",
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.processes
def test_module_is_a_program():
    result = subprocess.run(
        [sys.executable, "-m", "ringcoll.cli", "--version"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (result.stdout, result.returncode) == (f"ringcoll {__version__}\n", 0)
