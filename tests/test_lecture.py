"""The lecture: its exercises, and the slides of its pictures."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ringcoll.errors import VerificationError
from ringcoll.tools.cli import cli
from tests.cases.algorithms import registered_meanwhile
from tests.cases.pages import ROOT, links, spans, write_files

LECTURE = ROOT / "notebooks" / "lecture.ipynb"
SLIDES = ROOT / "docs" / "slides"
COMMANDS = {
    command.rsplit(" ", 1)[1]: command
    for command in spans(SLIDES / "README.md")
    if command.startswith("ringcoll ") and " -o " in command
}


def cells(kind: str) -> list[Any]:
    import nbformat  # here, so that other tests are collected where it is missing

    return [cell for cell in nbformat.read(LECTURE, as_version=4).cells if cell.cell_type == kind]


def defining(*words: str) -> str:
    """The sources of the cells that have these words, one cell each."""
    sources = [cell.source for cell in cells("code")]
    found = [[source for source in sources if word in source] for word in words]
    assert all(len(matches) == 1 for matches in found)
    return "\n".join(matches[0] for matches in found)


@pytest.fixture
def names() -> dict[str, Any]:
    """What a student has at hand in the exercises."""
    names: dict[str, Any] = {}
    exec(defining("import torch\n\nimport ringcoll", "def as_schedule(", "def check("), names)
    return names


def answers() -> list[str]:
    hidden = [
        match
        for cell in cells("markdown")
        for match in re.findall(
            r"<details><summary>Answer</summary>\n(.*?)</details>", cell.source, re.DOTALL
        )
    ]
    return [
        "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        for text in hidden
    ]


def printed(source: str, names: dict[str, Any]) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(source, names)
    return output.getvalue()


def test_there_are_five_exercises_with_answers() -> None:
    text = "\n".join(cell.source for cell in cells("markdown"))
    assert re.findall(r"^### (\d)\. ", text, re.MULTILINE) == list("12345")
    assert len(answers()) == text.count("<details>") == 5


def test_the_answers_are_proved_and_run(names: dict[str, Any]) -> None:
    ring, two_rings, *_ = answers()
    assert printed(ring, names) == (
        "proved on 2 to 8 ranks. On 4 ranks: 6 steps, each rank sends 1.5 vectors\n"
    )
    assert printed(two_rings, names) == (
        "proved on 2 to 8 ranks. On 4 ranks: 6 steps, each rank sends 1.5 vectors\n"
    )


@pytest.mark.parametrize(
    "right, wrong, message",
    [
        ("range(1, world_size)", "range(2, world_size)", "carries other chunks"),
        ("range(world_size - 1)", "range(world_size - 2)", "ends wrong"),
        ("recv(prev_rank", "recv(next_rank", "nothing is sent to match the receive"),
        (
            "recv_reduce(prev_rank, out(chunk), inp(chunk))",
            "recv(prev_rank, out(chunk))",
            "ends wrong",
        ),
        ("send(next_rank, held), recv(", "recv(", "nothing is sent"),
    ],
)
def test_a_wrong_ring_is_refused(
    right: str, wrong: str, message: str, names: dict[str, Any]
) -> None:
    answer = answers()[0]
    assert right in answer
    with pytest.raises(VerificationError, match=message):
        exec(answer.replace(right, wrong), names)


def test_the_ring_that_is_to_be_completed_is_refused(names: dict[str, Any]) -> None:
    exercise = defining("# here your second half begins")
    assert "expected every rank exactly once, got nothing" in printed(exercise, names)
    second_half = answers()[0].partition("    for step in range(world_size - 1)")
    completed = exercise.replace(
        "    # here your second half begins", "".join(second_half[1:]).partition("\n\n")[0]
    )
    assert printed(completed, names).startswith("proved on 2 to 8 ranks.")


def test_the_numbers_in_the_answers_are_what_they_print(names: dict[str, Any]) -> None:
    exec(defining("def crossover("), names)
    _, _, slower, good, _ = answers()
    text = " ".join(" ".join(cell.source for cell in cells("markdown")).split())
    assert f"It prints `{printed(slower, names).strip()}`" in text
    assert "It prints `{}` and `{}`".format(*printed(good, names).splitlines()) in text


@pytest.mark.parametrize("file", sorted(path.name for path in SLIDES.glob("*.svg")))
def test_a_slide_is_what_its_command_draws(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(SLIDES / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    with registered_meanwhile():
        result = CliRunner().invoke(cli, shlex.split(COMMANDS[file])[1:])
    assert result.exit_code == (1 if file == "impatient_ring.svg" else 0), result.output
    assert (tmp_path / file).read_bytes() == (SLIDES / file).read_bytes()


def test_every_slide_is_shown_with_its_command() -> None:
    shown = [link for link in links(SLIDES / "README.md") if link.endswith(".svg")]
    assert shown == list(COMMANDS)
    assert sorted(shown) == sorted(path.name for path in SLIDES.glob("*.svg"))


def test_the_slides_are_the_pictures_of_the_lecture() -> None:
    """All of them, in order; the two pictures more are measured."""
    pictures = [
        output.data["text/html"]
        for cell in cells("code")
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    slides = [b64encode((SLIDES / file).read_bytes()).decode() for file in COMMANDS]
    *drawn, measured, overlap = pictures
    assert [any(slide in picture for slide in slides) for picture in drawn] == [True] * len(drawn)
    assert [sum(slide in picture for picture in drawn) for slide in slides] == [1] * len(slides)
    assert not any(slide in picture for slide in slides for picture in (measured, overlap))
