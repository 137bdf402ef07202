"""Rules that say which algorithm runs when, and their text.

Problem: a person with measurements, or a file of them, says in one line of text which algorithm
runs when; and an error message points at the place of a typing error. The order of the fields is
that of the score strings of UCC ("Unified Collective Communication",
https://github.com/openucx/ucc)::

    rules  = rule { ";" rule }
    rule   = collective ":" bytes ":" choice { ":" condition }  |  choice
    choice = algorithm [ "@" segment ]
    condition = "k=" range  |  "hosts=" range

``collective`` is a name, or ``*`` for all. ``bytes`` is ``from-to``, of which the first belongs to
the range and the second does not; ``inf`` has no end; a single size stands for itself; ``*`` is
every size. Sizes are numbers with K, M, G or T, powers of 1024. The ranges of conditions, world
sizes and hosts, contain both their ends. A rule that is only a choice is for every collective and
size.

The first rule that matches is used. A rule does not match if the collective does not have its
algorithm, or not for so many ranks. ``auto`` as algorithm is the model's choice, so that
``all_reduce:0-1K:auto;ring`` forces the ring, but not for short vectors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ringcoll.errors import RulesError, UnknownAlgorithmError
from ringcoll.schedules.algorithms import ALIASES, algorithms, find, named
from ringcoll.schedules.ir import CONTRACTS

AUTO = "auto"
"""The algorithm of a rule that leaves the choice to the model."""
EVERY = "*"
"""The collective of a rule that is for all of them."""

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d{1,18})([KMGT]?)", re.IGNORECASE | re.ASCII)
_NAME = re.compile(r"[A-Za-z_][\w+=]*(~[0-9.-]+)?")
_INF = "inf"


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from ``first`` to before ``end``; ``None`` is no end. Its ``str`` has sizes in bytes.

    Raises `RulesError` if the range is empty, or its first number is below 0.

    >>> 3 in Range(2, 4), 4 in Range(2, 4), 10**9 in Range(2)
    (True, False, True)
    """

    first: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        if self.first < 0 or (self.end is not None and self.end <= self.first):
            raise RulesError("the range is empty", text=f"{self.first}-{self.end}")

    def __str__(self) -> str:
        if self == Range():
            return EVERY
        first = _size_in_text(self.first)
        if self.end == self.first + 1:
            return first
        return f"{first}-{_INF if self.end is None else _size_in_text(self.end)}"

    def __contains__(self, number: int) -> bool:
        return number >= self.first and (self.end is None or number < self.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule; `parse_rules` reads its ``str``.

    Parameters
    ----------
    collective, algorithm
        Their full names, or `EVERY` and `AUTO`.
    nbytes
        Sizes of the whole data, the vector or all blocks of a rank, in bytes.
    segment_bytes
        Size of a segment; ``None`` for the size that suits the algorithm.
    world_size, hosts
        Numbers of ranks and of hosts.

    Examples
    --------
    >>> print(Rule(algorithm="ring", segment_bytes=1 << 18, nbytes=Range(64 << 10)))
    *:64K-inf:ring@256K
    """

    collective: str = EVERY
    nbytes: Range = Range()
    algorithm: str = AUTO
    segment_bytes: int | None = None
    world_size: Range = Range(1)
    hosts: Range = Range(1)

    def __str__(self) -> str:
        fields = [self.collective, str(self.nbytes), self.algorithm]
        if self.segment_bytes is not None:
            fields[-1] += f"@{_size_in_text(self.segment_bytes)}"
        for name, numbers in (("k", self.world_size), ("hosts", self.hosts)):
            if numbers != Range(1):
                fields.append(f"{name}={_numbers_in_text(numbers)}")
        return ":".join(fields)

    def matches(self, collective: str, nbytes: int, world_size: int, hosts: int) -> bool:
        """Whether it is for such a call, and its algorithm can run there."""
        return (
            self.collective in (EVERY, collective)
            and nbytes in self.nbytes
            and world_size in self.world_size
            and hosts in self.hosts
            and (self.algorithm == AUTO or _runs(collective, self.algorithm, world_size))
        )


def _runs(collective: str, algorithm: str, world_size: int) -> bool:
    try:
        return find(collective, algorithm).restriction(world_size) is None
    except UnknownAlgorithmError:
        return False


def in_text(rules: Iterable[Rule]) -> str:
    """Write rules as `parse_rules` reads them.

    >>> in_text(parse_rules("tree; all_reduce:65536-1M:ring"))
    '*:*:binomial_tree;all_reduce:64K-1M:ring'
    """
    return ";".join(map(str, rules))


def parse_rules(text: str, *, known_only: bool = True) -> tuple[Rule, ...]:
    """Read rules.

    Parameters
    ----------
    text
        Rules as at the top of this module. Spaces around fields, and empty rules, do not count.
    known_only
        Whether names of algorithms must be known: by the rule's collective, or for `EVERY` by any.
        If not, rules with others never match.

    Raises
    ------
    RulesError
        The text is not a list of rules; the error points at the place.

    Examples
    --------
    >>> for rule in parse_rules("all_reduce:0-64K:recursive_doubling:k=4-8;all_reduce:*:ring@1M"):
    ...     print(rule)
    all_reduce:0-64K:recursive_doubling:k=4-8
    all_reduce:*:ring@1M
    >>> parse_rules("all_reduce:64K-4K:ring")
    Traceback (most recent call last):
        ...
    ringcoll.errors.RulesError: the range is empty
      all_reduce:64K-4K:ring
                 ^^^^^^
    """
    reader = _Reader(text, known_only)
    return tuple(reader.rule(span) for span in _Span(text, 0).split(";") if span)


class _Span(NamedTuple):
    """A span of the text without the spaces around it, and where it begins."""

    text: str
    start: int

    def __bool__(self) -> bool:
        return bool(self.text)

    def split(self, separator: str) -> Iterator[_Span]:
        start = self.start
        for piece in self.text.split(separator):
            yield _Span(piece.strip(), start + len(piece) - len(piece.lstrip()))
            start += len(piece) + len(separator)


class _Reader:
    """A reader of one text."""

    def __init__(self, text: str, known_only: bool) -> None:
        self.text, self.known_only = text, known_only

    def fail(self, message: str, span: _Span) -> RulesError:
        return RulesError(message, text=self.text, start=span.start, length=len(span.text))

    def rule(self, span: _Span) -> Rule:
        fields = list(span.split(":"))
        if len(fields) == 1:
            fields = [_Span(EVERY, span.start), _Span(EVERY, span.start), span]
        if len(fields) < 3:
            raise self.fail("a rule has a collective, a range of bytes and an algorithm", span)
        collective = self.collective(fields[0])
        algorithm, segment_bytes = self.choice(fields[2], collective)
        conditions: dict[str, Range] = {}
        for field in fields[3:]:
            name, numbers = self.condition(field)
            if name in conditions:
                raise self.fail("the condition is given twice", field)
            conditions[name] = numbers
        return Rule(
            collective=collective,
            nbytes=Range() if fields[1].text == EVERY else self.range(fields[1]),
            algorithm=algorithm,
            segment_bytes=segment_bytes,
            world_size=conditions.get("k", Range(1)),
            hosts=conditions.get("hosts", Range(1)),
        )

    def collective(self, span: _Span) -> str:
        name = span.text.replace("-", "_")
        if name != EVERY and name not in CONTRACTS:
            known = ", ".join(CONTRACTS)
            raise self.fail(f"no such collective; known: {known}, or {EVERY} for all", span)
        return name

    def choice(self, span: _Span, collective: str) -> tuple[str, int | None]:
        first, *rest = span.split("@")
        if not _NAME.fullmatch(first.text):
            raise self.fail("not the name of an algorithm", first or span)
        own = None if collective == EVERY else collective
        entries = named(first.text, own)
        name = entries[0].name if entries else ALIASES.get(first.text, first.text)
        if self.known_only and not entries and name != AUTO:
            of = "" if own is None else f" of {collective}"
            listed = ", ".join([*sorted({entry.name for entry in algorithms(own)}), AUTO])
            raise self.fail(f"no such algorithm{of}; known: {listed}", first)
        if not rest:
            return name, None
        if name == AUTO or len(rest) > 1:
            raise self.fail("auto has no segments, others one size of them", span)
        if segment_bytes := self.size(rest[0]):
            return name, segment_bytes
        raise self.fail("a segment has at least one byte", rest[0])

    def condition(self, span: _Span) -> tuple[str, Range]:
        name, *rest = span.split("=")
        if name.text not in ("k", "hosts") or len(rest) != 1:
            raise self.fail("a condition is k=4, k=2-8, hosts=1 or the like", span)
        numbers = self.range(rest[0], with_last=True)
        if numbers.first < 1:
            raise self.fail("there is at least one", rest[0])
        return name.text, numbers

    def range(self, span: _Span, *, with_last: bool = False) -> Range:
        first, *rest = span.split("-")
        if len(rest) > 1:
            raise self.fail("a range has two ends", span)
        low = self.size(first or span)
        if not rest:
            return Range(low, low + 1)
        if rest[0].text == _INF:
            return Range(low)
        end = self.size(rest[0] or span) + with_last
        if end <= low:
            raise self.fail("the range is empty", span)
        return Range(low, end)

    def size(self, span: _Span) -> int:
        match = _SIZE.fullmatch(span.text)
        if match is None:
            raise self.fail("not a number such as 4, 64K or 16M", span)
        return int(match[1]) << 10 * _POWERS[match[2].upper()]


def _size_in_text(nbytes: int) -> str:
    for unit, power in reversed(_POWERS.items()):
        if nbytes and nbytes % (1 << 10 * power) == 0:
            return f"{nbytes >> 10 * power}{unit}"
    return str(nbytes)


def _numbers_in_text(numbers: Range) -> str:
    if numbers.end == numbers.first + 1:
        return str(numbers.first)
    return f"{numbers.first}-{_INF if numbers.end is None else numbers.end - 1}"
