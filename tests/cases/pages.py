"""The project's Markdown pages, and what is in them; and the data in a page that plays."""

from __future__ import annotations

import json
import re
import zlib
from base64 import b64decode
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "PAGES",
    "README",
    "ROOT",
    "Block",
    "anchors",
    "blocks",
    "data_of",
    "links",
    "spans",
    "write_files",
]

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = tuple(
    sorted(
        page
        for folder in (
            ".",
            "docs",
            "docs/algorithms",
            "docs/rooms",
            "docs/slides",
            "docs/site",
            "examples",
            "benchmarks",
        )
        for page in (ROOT / folder).glob("*.md")
    )
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of code: its language, empty if it has none, and its text."""

    language: str
    text: str

    @property
    def file_name(self) -> str:
        """The name of the file in its first line, such as ``# grid.py`` or ``# net.txt``; empty if there is none."""
        match = re.match(r"# (\w+\.(?:py|txt))\b", self.text)
        return match[1] if match else ""


_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(*match.groups()) for match in _BLOCK.finditer(page.read_text(encoding="utf-8"))]


def write_files(page: Path, folder: Path) -> None:
    """Write the programs and networks of a page that begin with their name, such as ``# grid.py``, to a folder."""
    for block in blocks(page):
        if block.file_name:
            (folder / block.file_name).write_text(block.text, encoding="utf-8")


def _prose(page: Path) -> str:
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> Iterator[str]:
    """What stands between single backticks, on one line each."""
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", _prose(page)):
        yield " ".join(match[1].split())


def links(page: Path) -> Iterator[str]:
    """The targets of the page's links and pictures."""
    for match in re.finditer(r"\]\(([^)\s]+)\)", _prose(page)):
        yield match[1]


def anchors(page: Path) -> set[str]:
    """The names by which the page's headings are linked to."""
    return {
        re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    }


def data_of(page: str) -> Any:
    """What a page plays."""
    (packed,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    return json.loads(zlib.decompress(b64decode(packed)))
