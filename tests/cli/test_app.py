"""The group: help, versions, and what is imported when."""

import errno
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from ringcoll import __version__
from ringcoll.tools.cli.app import COMMANDS, INTERRUPTED, SECTIONS, SETTINGS, DescribedCommand, cli

CHEAP = (
    "list",
    "show",
    "simulate",
    "search",
    "export",
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


def test_help_lists_every_command(run):
    result = run("--help")
    assert result.exit_code == 0
    for name, summary in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", result.stdout, re.MULTILINE)


def test_examples_of_the_group_are_examples_of_their_commands(run):
    names = [example.split()[1] for example in examples(run("--help").stdout)]
    assert len(names) >= len(SECTIONS)
    for section in SECTIONS.values():
        assert section.keys() & {*names}
    for example in examples(run("--help").stdout):
        assert example in examples(help_of(command(example.split()[1])))


def test_every_command_stands_in_one_section(run):
    headings = re.findall(r"^([\w ]+):$|^  (\w+)  ", run("--help").stdout, re.MULTILINE)
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
    assert examples(page)
    assert all(f"ringcoll {name}" in line for line in examples(page) if "torchrun" not in line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [line for name in CHEAP for line in examples(help_of(command(name)))]
)
def test_examples_do_what_they_say(run, star, example):
    Path("cluster.txt").write_text("0 -- leaf 50 1\nleaf -- 1 5 2\n", encoding="utf-8")
    assert run("export", "tree", "-k", "2", "--format", "text", "-o", "best.txt").exit_code == 0
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
    assert max(map(len, lines)) > columns - 15, "the width is used"


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
        "simulate": ["ring"],
        "export": ["ring"],
        "plot": ["pareto"],
        "new": ["all_reduce", "star"],
        "run": [__file__],
    }
    needed = (
        ["all_reduce"]
        if name in ("bench", "explain", "fit", "search", "trace")
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


@pytest.mark.parametrize(
    "words, now",
    [
        (["compare", "-k", "8", "--picture", "a.png"], "bench --vs native"),
        (["info", "--help"], "doctor --report"),
        (["order", "ring"], "verify ALGORITHM --order"),
        (["pareto"], "plot pareto"),
    ],
)
def test_the_old_name_of_a_command_answers_with_the_new_one(run, words, now):
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: `{words[0]}` is gone; type `ringcoll {now}`\n"
    assert now.split()[0] in COMMANDS
    assert words[0] not in COMMANDS


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
        ["verify", "ring", "--order"],
        ["plot", "pareto", "all_reduce"],
        ["verify", "ring", "--json"],
        ["dump", "--help"],  # in a module whose other command needs torch
        ["doctor", "--help"],
    ],
    ids=" ".join,
)
def test_what_needs_no_tensors_runs_without_torch(words):
    result = call(
        "import sys",
        "sys.modules['torch'] = None",
        f"sys.argv = ['ringcoll', *{words}]",
        "from ringcoll.tools.cli import main",
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
        "from ringcoll.tools.cli import main",
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
        "print(sorted({'click', 'rich', 'ringcoll.tools.cli', 'matplotlib'} & set(sys.modules)))",
    )
    assert (result.stdout, result.stderr) == ("[]\n", "")


def started(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The end of ``python -m ringcoll``."""
    return subprocess.run(
        [sys.executable, "-m", "ringcoll", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **variables},
    )


@pytest.mark.processes
def test_the_package_is_a_program(run):
    """It has the same commands, and calls itself as it was called."""
    assert started("--version").stdout == f"ringcoll {__version__}\n"
    page = started("--help").stdout
    own = run("--help").stdout.replace("Usage: ringcoll", "Usage: python -m ringcoll")
    assert page.split() == own.split(), "which may be as wide as another terminal"
    shown = started("show", "ring", "all_reduce")
    assert (shown.returncode, shown.stdout) == (0, run("show", "ring", "all_reduce").stdout)
    wrong = started("show")
    assert wrong.returncode == 2
    assert "Try 'python -m ringcoll show --help' for help." in wrong.stderr


# --- completion ---------------------------------------------------------------------------


def completed(text: str) -> list[str]:
    """What the last word of a line may become; ``file`` for the name of a file."""
    *words, last = text.split(" ")
    items = ShellComplete(cli, {}, "ringcoll", "").get_completions(words, last)
    return [item.value if item.type == "plain" else item.type for item in items]


@pytest.mark.parametrize(
    "text, words",
    [
        ("t", ["tune", "trace", "train"]),
        ("--com", ["--completion"]),
        ("--completion ", ["bash", "zsh", "fish"]),
        ("show hier", ["hierarchical"]),
        ("show tr", ["tree", "trivance", "trivance_latency"]),
        ("show two_shot ", ["all_reduce"]),
        ("show hierarchical ", ["all_reduce", "reduce_scatter", "all_gather"]),
        ("show bruck all-", ["all_gather", "all_to_all"]),
        ("show unknown re", ["reduce_scatter", "reduce"]),
        ("show star.py:st", ["file"]),
        ("show ring all_reduce --pr", ["--primitives", "--program"]),
        ("list b", ["broadcast", "barrier"]),
        ("explain all_to_all --algorithm p", ["pairwise", "pat", "pat_2_trees"]),
        ("verify swing_", ["swing_latency"]),
        ("plot crossover all_gather --algorithms ring,br", ["ring,bruck"]),
        ("simulate ring+two_", ["ring+two_shot"]),
        ("verify dou", ["double_tree"]),
        ("export recursive_m", ["recursive_multiplying"]),
    ],
)
def test_words_are_completed(text, words):
    assert completed(text) == words


@pytest.mark.parametrize("name", ["bench all_reduce", "bench --vs native", "train", "tune"])
def test_names_are_completed_where_ranks_will_run(name):
    assert completed(f"{name} --algorithms binary") == ["binary_tree"]
    assert completed("trace all_reduce --algorithm binary") == ["binary_tree"]
    assert completed("trace all_r") == ["all_reduce"]


COMPLETIONS = {
    "bash": ("complete -o nosort -F _ringcoll_completion ringcoll", "plain,show\n"),
    "zsh": ("compdef _ringcoll_completion ringcoll", f"plain\nshow\n{COMMANDS['show']}\n"),
    "fish": (
        'complete --no-files --command ringcoll --arguments "(_ringcoll_completion)";',
        f"plain,show\t{COMMANDS['show']}\n",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("shell", COMPLETIONS)
def test_the_script_of_each_shell(shell):
    script = started("--completion", shell)
    line, answer = COMPLETIONS[shell]
    assert (script.returncode, script.stderr) == (0, "")
    assert line in script.stdout
    assert f"_RINGCOLL_COMPLETE={shell}_complete" in script.stdout
    asked = {"_RINGCOLL_COMPLETE": f"{shell}_complete", "COMP_WORDS": "ringcoll sh"}
    answered = started(**asked, COMP_CWORD="sh" if shell == "fish" else "1")
    assert (answered.returncode, answered.stdout, answered.stderr) == (0, answer, "")


@pytest.mark.processes
def test_bash_completes_by_the_script(tmp_path):
    """The function that bash calls for the key Tab leaves the words in COMPREPLY."""
    (tmp_path / "ringcoll").write_text(f'#!/bin/sh\nexec {sys.executable} -m ringcoll "$@"\n')
    (tmp_path / "ringcoll").chmod(0o755)
    program = """
        eval "$(ringcoll --completion bash)"
        COMP_WORDS=(ringcoll show tr)
        COMP_CWORD=2
        _ringcoll_completion ringcoll
        echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert (done.stdout, done.stderr) == ("tree trivance trivance_latency\n", "")


def test_an_unknown_shell_is_one_line(run):
    result = run("--completion", "tcsh")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "Error: Invalid value for '--completion': 'tcsh' is not one of 'bash', 'zsh', 'fish'."
    )


@pytest.mark.parametrize("word, nearest", [("shwo", "show"), ("verfiy", "verify"), ("xyzw", None)])
def test_the_nearest_command_is_suggested(run, word, nearest):
    result = run(word)
    assert result.exit_code == 2
    assert (f"did you mean {nearest!r}?" in result.stderr) is (nearest is not None)


@pytest.mark.parametrize("command", ["show", "export", "simulate"])
def test_the_collective_is_an_argument_or_an_option(run, command):
    words = run(command, "tree", "reduce", "-k", "2")
    assert words.exit_code == 0
    assert run(command, "tree", "-c", "reduce", "-k", "2").stdout == words.stdout
    assert (
        run(command, "tree", "--collective", "reduce", "reduce", "-k", "2").stdout == words.stdout
    )
    assert "two collectives" in run(command, "tree", "reduce", "-c", "all_reduce").stderr
