"""A reader of small XML: elements, one inside the other, with attributes and no text.

Problem: files come from elsewhere. A document type, and with it every entity, is refused before
anything is expanded; so are elements that are not expected, and text between elements. Errors name
the line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn
from xml.parsers import expat

from ringcoll.errors import ScheduleError

_DIGITS = 18
_DEPTH = 64


@dataclass
class Element:
    """An element, and those inside it."""

    name: str
    attributes: dict[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def error(self, message: str) -> ScheduleError:
        """An error at this element."""
        return ScheduleError(f"line {self.line}: <{self.name}>: {message}")

    def word(self, attribute: str) -> str:
        """The value of an attribute."""
        if attribute not in self.attributes:
            raise self.error(f"has no attribute {attribute!r}")
        return self.attributes[attribute]

    def number(self, attribute: str, least: int = 0, most: int | None = None) -> int:
        """The value of an attribute as a number."""
        text = self.word(attribute)
        digits = text.removeprefix("-")
        is_number = digits.isascii() and digits.isdigit() and len(digits) <= _DIGITS
        value = int(text) if is_number else least - 1
        if value < least or (most is not None and value > most):
            to = "" if most is None else f" to {most}"
            raise self.error(f'{attribute}="{text[:40]}" is not a number from {least}{to}')
        return value

    def expect(self, attribute: str, value: int) -> None:
        """Raise unless an attribute has this value."""
        if self.number(attribute) != value:
            raise self.error(
                f'{attribute}="{self.attributes[attribute]}", expected "{value}": numbers go from 0 '
                "up, without a gap"
            )

    def each(self, name: str) -> Iterator[Element]:
        """The elements of a name, inside this one, at any depth."""
        for child in self.children:
            if child.name == name:
                yield child
            yield from child.each(name)


def parse_xml(text: str, inside: Mapping[str, str]) -> Element:
    """Read a document; ``inside`` has the names that may stand inside each name, and inside ``""`` that of the root."""
    parser = expat.ParserCreate()
    path: list[Element] = []
    roots: list[Element] = []

    def refuse(message: str) -> NoReturn:
        raise ScheduleError(f"line {parser.CurrentLineNumber}: {message}")

    def start(name: str, attributes: dict[str, str]) -> None:
        known = inside[path[-1].name if path else ""].split()
        if name not in known:
            where = f" inside <{path[-1].name}>" if path else ""
            expected = " or ".join(f"<{each}>" for each in known) or "nothing"
            refuse(f"<{name}>{where}, expected {expected}")
        if len(path) == _DEPTH:
            refuse(f"more than {_DEPTH} elements inside each other")
        element = Element(name, attributes, parser.CurrentLineNumber)
        (path[-1].children if path else roots).append(element)
        path.append(element)

    def words(data: str) -> None:
        if data.strip():
            refuse(f"text {data.strip()[:20]!r} inside <{path[-1].name}>, expected elements")

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda name: path.pop()
    parser.CharacterDataHandler = words
    parser.StartDoctypeDeclHandler = lambda *_: refuse(
        "a document type (<!DOCTYPE ...>), which may define entities, is refused"
    )
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise ScheduleError(f"line {error.lineno}: no XML: {error}") from None
    except UnicodeEncodeError as error:
        raise ScheduleError(f"no XML: {error}") from None
    return roots[0]
