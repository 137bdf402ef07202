"""Text and progress on terminals of some widths."""

import io
import re
import sys

import pytest

from ringcoll.tools.cli import output

TEXT = "The fastest of ringcoll runs at 0.51 times to 2.20 times the speed of native. " * 3


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_text_wraps_to_the_terminal(monkeypatch, capsys, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(output, "on_terminal", lambda: True)
    output.print_text(TEXT.strip(), "Short.")
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "Short."
    assert " ".join(lines) == TEXT.strip()
    assert columns - 15 < max(map(len, lines)) <= columns


def test_elsewhere_a_sentence_is_a_line(capsys):
    output.print_text(TEXT, "")
    assert capsys.readouterr().out == f"{TEXT}\n\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_progress_survives_a_narrow_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with output.progress(20, "starting ranks") as advance:
        for step in range(20):
            advance(f"step {step}: " + "ring 12.3 us  " * 10)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    lines = [line for line in re.split(r"[\r\n]+", plain) if line.strip()]
    assert max(map(len, lines)) <= columns
    assert "20/20" in lines[-1]
    assert lines[-1].startswith("step 19: ring")


def test_csv_has_a_line_of_names(capsys):
    output.print_csv([{"a": 1, "b": None}, {"a": "x,y", "c": 2}])
    assert capsys.readouterr().out == 'a,b,c\n1,,\n"x,y",,2\n'


def test_a_table_stands_at_the_left_edge_and_only_its_prose_breaks(monkeypatch, capsys):
    rows = [["ring", "12", "one two three"], ["tree", "3", "four"]]
    output.print_table(["name", "us", "why"], rows, left=1, prose=1)
    assert capsys.readouterr().out == (
        "name  us  why\n"
        "ring  12  one two three\n"
        "tree   3  four\n"
    )  # fmt: skip
    output.print_table(["name", "us"], [["ring", "12"], ["tree", "3"]], left=1)
    assert capsys.readouterr().out == "name  us\nring  12\ntree   3\n"
