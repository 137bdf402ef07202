"""Readers of documents that come from elsewhere: small XML, and JSON; errors name the place.

Small XML is elements, one inside the other, with attributes and no text. A document type, and with
it every entity, is refused before anything is expanded; so are elements that are not expected, and
text between elements. Errors name the line. Errors in JSON name a place such as
``gpus[0].threadblocks[1].ops[3]``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn
from xml.parsers import expat

from ringcoll.errors import ScheduleError

_DIGITS = 18  # of a number in XML
_MOST = 10**18  # a number in JSON
_DEPTH = 64  # of elements inside each other


@dataclass
class XmlElement:
    """An element, and those inside it."""

    name: str
    attributes: dict[str, str]
    line: int
    children: list[XmlElement] = field(default_factory=list)

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
                f'{attribute}="{self.attributes[attribute]}", expected "{value}": numbers go from '
                "0 up, without a gap"
            )

    def each(self, name: str) -> Iterator[XmlElement]:
        """The elements of a name, inside this one, at any depth."""
        for child in self.children:
            if child.name == name:
                yield child
            yield from child.each(name)


def parse_xml(text: str, inside: Mapping[str, str]) -> XmlElement:
    """Read XML; ``inside`` has the names that may stand inside each name; in ``""``, the root."""
    parser = expat.ParserCreate()
    path: list[XmlElement] = []
    roots: list[XmlElement] = []

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
        element = XmlElement(name, attributes, parser.CurrentLineNumber)
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


@dataclass(frozen=True)
class JsonValue:
    """A value, and its place in the document."""

    value: Any
    path: str = ""

    def error(self, message: str) -> ScheduleError:
        """An error at this place."""
        return ScheduleError(f"{self.path or 'the document'}: {message}")

    def has(self, key: str) -> bool:
        """Whether this is an object with the key."""
        return isinstance(self.value, dict) and key in self.value

    def __getitem__(self, key: str) -> JsonValue:
        if not self.has(key):
            raise self.error(f"has no {key!r}")
        return JsonValue(self.value[key], f"{self.path}.{key}" if self.path else key)

    def items(self, key: str) -> list[JsonValue]:
        """The items of a list; none if there is no such key."""
        if not self.has(key):
            return []
        node = self[key]
        if not isinstance(node.value, list):
            raise node.error("is not a list")
        return [JsonValue(value, f"{node.path}[{index}]") for index, value in enumerate(node.value)]

    def number(self, least: int = 0, most: int = _MOST) -> int:
        """The value, if it is a number within bounds."""
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.error(f"{str(self.value)[:40]!r} is not a number from {least} to {most}")
        return self.value

    def word(self) -> str:
        """The value, if it is a text."""
        if not isinstance(self.value, str):
            raise self.error(f"{str(self.value)[:40]!r} is not a text")
        return self.value

    def flag(self) -> bool:
        """The value, if it is true or false."""
        if not isinstance(self.value, bool):
            raise self.error(f"{str(self.value)[:40]!r} is neither true nor false")
        return self.value


def parse_json(text: str) -> JsonValue:
    """Read JSON."""
    try:
        return JsonValue(json.loads(text))
    except json.JSONDecodeError as error:
        raise ScheduleError(f"line {error.lineno}: no JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits; brackets in brackets
        raise ScheduleError(f"no JSON: {error}") from None
