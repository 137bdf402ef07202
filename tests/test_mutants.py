"""The list of accepted mutants, and what makes them; `make mutants` runs them."""

from __future__ import annotations

import tomllib

import pytest

from tests.mutants.accepted import ACCEPTED, ROOT, Change, accepted, normal

CONFIG = tomllib.loads((ROOT / "tests/mutants/mutants.toml").read_text(encoding="utf-8"))
REASONS = accepted(ACCEPTED.read_text(encoding="utf-8"))


def test_accepted_lines_are_still_there() -> None:
    texts = {file: normal((ROOT / file).read_text(encoding="utf-8")) for file in CONFIG["files"]}
    gone = [change for change in REASONS if change.was not in texts[change.file]]
    assert not gone, "remove these entries from accepted.toml"


def test_the_files_and_their_tests_exist() -> None:
    for file, settings in CONFIG["files"].items():
        tests = [name.format(file=file).partition("::")[0] for name in settings["tests"]]
        assert [name for name in (file, *tests) if not (ROOT / name).exists()] == []


def test_an_entry_stands_for_each_of_its_changes() -> None:
    text = """
    [["a.py"]]
    in = "f"
    was = "x  +  1"
    now = ["x - 1", "x + 2"]
    why = "a reason"
    """
    assert accepted(text) == {
        Change("a.py", "f", "x + 1", "x - 1"): "a reason",
        Change("a.py", "f", "x + 1", "x + 2"): "a reason",
    }


ENTRY = '[["a.py"]]\nin = "f"\nwas = "x"\nnow = "y"\n'


@pytest.mark.parametrize(
    "text, words",
    [
        (ENTRY, "needs in, was, now and why"),
        (f"{ENTRY}why = ' '", "no reason"),
        (f"{ENTRY}why = 'a'\nbecause = 'b'", "needs in, was, now and why"),
        (f"{ENTRY}why = 'a'\n{ENTRY}why = 'b'", "listed twice"),
    ],
)
def test_an_entry_needs_a_reason(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        accepted(text)
