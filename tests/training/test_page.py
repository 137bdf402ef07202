"""The examples of docs/training.md run as they stand."""

from __future__ import annotations

import pytest

from tests.cases.pages import ROOT, blocks

PAGE = ROOT / "docs" / "training.md"


@pytest.mark.parametrize(
    "text", [block.text for block in blocks(PAGE) if block.language == "python"]
)
def test_an_example_runs(text: str) -> None:
    assert "assert" in text
    exec(compile(text, str(PAGE), "exec"), {"__name__": "__main__"})
