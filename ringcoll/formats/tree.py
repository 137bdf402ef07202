"""A reader of JSON whose errors name the place, such as ``gpus[0].threadblocks[1].ops[3]``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ringcoll.errors import ScheduleError

_MOST = 10**18


@dataclass(frozen=True)
class Node:
    """A value, and its place in the document."""

    value: Any
    path: str = ""

    def error(self, message: str) -> ScheduleError:
        """An error at this place."""
        return ScheduleError(f"{self.path or 'the document'}: {message}")

    def has(self, key: str) -> bool:
        """Whether this is an object with the key."""
        return isinstance(self.value, dict) and key in self.value

    def __getitem__(self, key: str) -> Node:
        """The value of a key; the error names the key if there is none."""
        if not self.has(key):
            raise self.error(f"has no {key!r}")
        return Node(self.value[key], f"{self.path}.{key}" if self.path else key)

    def items(self, key: str) -> list[Node]:
        """The items of a list; none if there is no such key."""
        if not self.has(key):
            return []
        node = self[key]
        if not isinstance(node.value, list):
            raise node.error("is not a list")
        return [Node(value, f"{node.path}[{index}]") for index, value in enumerate(node.value)]

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


def parse_json(text: str) -> Node:
    """Read a document."""
    try:
        return Node(json.loads(text))
    except json.JSONDecodeError as error:
        raise ScheduleError(f"line {error.lineno}: no JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of 5000 digits; brackets in brackets
        raise ScheduleError(f"no JSON: {error}") from None
