"""The pages of results are what the committed records say, and a file that is no record is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import common, results
from benchmarks.common import Table

TABLE = Table(
    {"what": "text", "size": "bytes", "median": "seconds", "spread": "share", "/ peer": "ratio"},
    [("ours", 65536, 12.34e-6, 0.126, 0.5), ("peer", 65536, 0.25, None, 1)],
    "What the table shows.",
)


def environment(*command: str) -> dict[str, Any]:
    return {
        "command": list(command),
        "cores": 2,
        "cpu": "some processor",
        "load_average": [0.5, 1.0, 2.0],
        "python": "3.11.7",
        "started": "2026-01-02T03:04:05+00:00",
        "torch": "2.13.0",
        "transport": "ucx",
        "variables": {"OMP_NUM_THREADS": "1", "RINGCOLL_ALGORITHM": "all_reduce:*:ring;auto"},
    }


def test_the_pages_are_what_the_records_say() -> None:
    pages = results.pages()
    assert {path: path.read_text(encoding="utf-8") for path in pages} == pages
    assert {*results.PAGES.iterdir()} == pages.keys() - {results.PAGE}


def test_the_first_page_is_short_and_shows_all_that_it_promises() -> None:
    text = results.PAGE.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 220
    for shown in results.HIGHLIGHTS:
        assert f"## {shown.title}" in text
        record = results.read(results.FOLDER / f"{shown.record}.json")
        (table,) = (one for one in record.tables if one.caption.startswith(shown.caption))
        names = {row[0] for row in table.rows}
        assert names >= set(shown.rows)
        for row, cells in zip(table.rows, table.cells(), strict=True):
            chosen = dict(zip(table.columns, cells, strict=True))
            line = f"| {' | '.join(chosen[column] for column in shown.columns)} |"
            assert (line in text) or (shown.rows and row[0] not in shown.rows)
        assert shown.picture is None or (results.FOLDER / shown.picture).is_file()


def test_every_picture_of_a_record_is_there() -> None:
    for path in results.FOLDER.glob("*.json"):
        for name in results.read(path).pictures:
            assert (results.FOLDER / name).is_file()


def test_a_section_of_what_a_script_has_written(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    command = ("/somewhere/benchmarks/some.py", "-k", "2", "--json", str(path), "--seconds", "1")
    about = "What it costs.\n\nWhat was asked,\nin full.\n"
    common.write(path, about, environment(*command), [TABLE], pictures=["some-2.png"])
    assert results.section(results.read(path)) == (
        "# What it costs (some)\n\n"
        "```\nRINGCOLL_ALGORITHM='all_reduce:*:ring;auto' "
        "python benchmarks/some.py -k 2 --seconds 1\n```\n\n"
        "What was asked,\nin full.\n\n"
        "2026-01-02; some processor, 2 cores, load 0.5, torch 2.13.0, Python 3.11.7, over ucx.\n\n"
        "What the table shows.\n\n"
        "| what | size | median | spread | / peer |\n"
        "| --- | --- | --- | --- | --- |\n"
        "| ours | 64 KiB | 12.3 us | 13% | 0.50 |\n"
        "| peer | 64 KiB | 250 ms | - | 1.00 |\n\n"
        "![What it costs](../records/some-2.png)\n"
    )


def test_a_script_without_a_file_writes_nothing(tmp_path: Path) -> None:
    common.write(None, "What it costs.", environment("some.py"), [TABLE])
    assert not list(tmp_path.iterdir())


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    TABLE.show()
    assert capsys.readouterr().out == (
        "\nWhat the table shows.\n"
        "what    size   median  spread  / peer\n"
        "ours  64 KiB  12.3 us     13%    0.50\n"
        "peer  64 KiB   250 ms       -    1.00\n"
    )


def test_facts_that_were_not_recorded_are_left_out() -> None:
    facts = environment("some.py") | {"load_average": None, "python": None}
    assert common.introduction(facts) == "some processor, 2 cores, torch 2.13.0, over ucx"


def without(field: str) -> Callable[[dict[str, Any]], object]:
    return lambda record: record.pop(field)


def of_a_table(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda record: record["tables"][0].update(fields)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (without("title"), r"expected 'title', a str, got None"),
        (without("environment"), r"expected 'environment', a dict, got None"),
        (
            lambda record: record["environment"].pop("cpu"),
            r"an environment with .*cpu, .*, got \['command', 'cores', 'load_average'",
        ),
        (lambda record: record["tables"].clear(), r"expected at least one table, got \[\]"),
        (lambda record: record["tables"].append(1), r"expected tables with columns, .*, got 1"),
        (of_a_table(columns={"what": "parsecs"}), r"kinds text, .*, got {'what': 'parsecs'}"),
        (of_a_table(rows=[["ours"]]), r"expected 5 values a row, got \['ours'\]"),
        (of_a_table(rows=[["ours", 1, "fast", 1, 1]]), r"a value of the kind seconds, got 'fast'"),
    ],
)
def test_a_broken_record_is_named(
    spoil: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.json"
    common.write(path, "What it costs.", environment("some.py"), [TABLE])
    record = json.loads(path.read_text(encoding="utf-8"))
    spoil(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(results.RecordError, match=rf"broken\.json: not a record; .*{message}"):
        results.pages(tmp_path)


@pytest.mark.parametrize("text, message", [("[1]", r"expected an object"), ("{", "JSON")])
def test_the_script_refuses_other_files(
    text: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.json").write_text(text, encoding="utf-8")
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results, "PAGES", tmp_path / "results")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results.py"])
    assert results.main() == 1
    assert message in capsys.readouterr().err
    assert not results.PAGE.exists()
    (tmp_path / "broken.json").unlink()
    assert results.main() == 0
    assert results.PAGE.read_text(encoding="utf-8") == results.INTRODUCTION
