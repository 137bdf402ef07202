"""The choice of an algorithm: the one that ``algorithm="auto"`` stands for in one call.

All ranks must choose alike. So the choice depends only on values that the collective's contract
makes equal on all ranks, and on the group's table, which rank 0 has published
(`ringcoll.cost.table`). The rules of the table come first: forced ones, then measured ones. If no
rule matches, the choice is the algorithm with the least predicted time.

Rules that say which algorithm to use: collective, range of bytes, algorithm.

Problem: a person who has measured, or a file of measurements, says in one line of text which
algorithm runs when; and an error message points at the place of a typing error. The order of the
fields is that of the score strings of UCC ("Unified Collective Communication",
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
from functools import lru_cache
from typing import NamedTuple

from ringcoll.algorithms import ALIASES, algorithms, find, named, registry
from ringcoll.cost.predict import MODEL_ERROR, Prediction, fastest, predict, predictions, preferred
from ringcoll.cost.table import BUILT_IN, Table
from ringcoll.errors import ArgumentError, RulesError, UnknownAlgorithmError
from ringcoll.schedule import CONTRACTS, OperandOrder, Schedule, contract

# Over gloo a message costs some 60 us and a byte some 0.5 ns, so that a segment should be well
# above 100 KiB; 1 MiB was the best of 256 KiB, 512 KiB and 1 MiB at 4 to 64 MiB.
PIPELINED_SEGMENT_BYTES = 1 << 20
"""Bytes of a segment of CPU tensors, for a pipelined algorithm that is asked for by name."""

# Not measured yet. A message and a launch cost some 17 us together, and a byte on its way between
# GPUs some 0.02 ns (the catalogue's costs of NCCL): 1 MiB would take as long as they do, 4 MiB four
# times as long.
CUDA_SEGMENT_BYTES = 4 << 20
"""The same for CUDA tensors."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithm that ``"auto"`` stands for in one call.

    Parameters
    ----------
    collective, nbytes, world_size
        The call.
    algorithm, reason
        Name of the chosen algorithm, and the reason for the choice in words.
    segment_bytes
        Bytes of a segment; ``None`` if the algorithm is not pipelined.
    predictions
        Predictions for all algorithms that may run, the fastest first.
    table
        The table that the choice rests on.
    """

    collective: str
    nbytes: int
    world_size: int
    algorithm: str
    segment_bytes: int | None
    reason: str
    predictions: tuple[Prediction, ...]
    table: Table

    @property
    def predicted(self) -> Prediction | None:
        """The prediction for the chosen algorithm; ``None`` if there is no prediction for it."""
        return next((row for row in self.predictions if row.algorithm == self.algorithm), None)

    def __str__(self) -> str:
        has_segments = self.segment_bytes is not None
        segments = f" in segments of {self.segment_bytes} bytes" if has_segments else ""
        return (
            f"{self.collective} of {self.nbytes} bytes on {self.world_size} ranks over "
            f"{self.table.transport}: {self.algorithm}{segments}; {self.reason}"
        )


def pipelined_segment_bytes(device: str = "cpu") -> int:
    """Bytes of a segment if nothing better is known, by the type of the tensors' device."""
    return CUDA_SEGMENT_BYTES if device == "cuda" else PIPELINED_SEGMENT_BYTES


def segment_bytes_of(collective: str, algorithm: str | Schedule, device: str) -> int | None:
    """Bytes of a segment for an algorithm that is asked for by name, or as a schedule.

    ``None`` for ``"auto"``, which chooses them itself, and for an algorithm that is not pipelined.

    Examples
    --------
    >>> [segment_bytes_of("all_reduce", name, "cuda") for name in ("double_tree", "ring", "auto")]
    [4194304, None, None]
    >>> segment_bytes_of("all_reduce", "double_tree", "cpu")
    1048576
    """
    name = algorithm.algorithm if isinstance(algorithm, Schedule) else algorithm
    if name == AUTO or not any(entry.pipelined for entry in named(name, collective)):
        return None
    return pipelined_segment_bytes(device)


def choose(
    collective: str,
    nbytes: int,
    world_size: int,
    table: Table,
    order: OperandOrder = OperandOrder.ANY,
    *,
    explained: bool = True,
) -> Choice:
    """Choose the algorithm that ``"auto"`` stands for; all ranks choose alike.

    Parameters
    ----------
    collective, world_size
        Name of the collective, and number of ranks.
    nbytes
        Bytes of the whole data: the vector, or all blocks of one rank.
    table
        Costs and rules of the group.
    order
        The order of operands that the reduction operator needs.
    explained
        Whether the choice has the predictions of all algorithms, and not those of the fastest only.

    Raises
    ------
    ScheduleError, ArgumentError
        There is no such collective; or none of its algorithms keeps the order.
    """
    return _choose(collective, nbytes, world_size, table, order, registry.revision, explained)


@lru_cache(maxsize=512)  # of some 5 KiB each, with their predictions
def _choose(
    collective: str,
    nbytes: int,
    world_size: int,
    table: Table,
    order: OperandOrder,
    revision: int,
    explained: bool,
) -> Choice:
    about = collective, nbytes, world_size, table.parameters
    if explained:
        every = predictions(*about)
        candidates = tuple(row for row in every if find(collective, row.algorithm).order >= order)
    else:
        candidates = fastest(*about, order)
    if not candidates:
        raise ArgumentError(f"no algorithm for {collective} reduces in {order}", argument="op")
    picked = _pick(collective, nbytes, world_size, table, order, candidates)
    return Choice(collective, nbytes, world_size, *picked, candidates, table)


def _pick(
    collective: str,
    nbytes: int,
    world_size: int,
    table: Table,
    order: OperandOrder,
    candidates: tuple[Prediction, ...],
) -> tuple[str, int | None, str]:
    """Name of the algorithm, bytes of a segment, and the reason."""
    if not contract(collective).common_lengths:
        # Each rank knows other lengths, so the choice must not depend on them.
        able = algorithms(collective, world_size)
        first = next(entry for entry in able if not entry.equal_blocks)
        return first.name, None, "no rank knows all lengths, which other algorithms need"
    for rules, reason_of in table.layers():
        for rule in rules:
            if not rule.matches(collective, nbytes, world_size, table.hosts):
                continue
            if rule.algorithm == AUTO:
                break
            if find(collective, rule.algorithm).order < order:
                continue
            segment_bytes = _segment_bytes(rule, collective, nbytes, world_size, table)
            return rule.algorithm, segment_bytes, reason_of(rule)
    best = preferred(candidates, table.parameters)
    reason = "the least predicted time"
    if best is not candidates[0]:
        reason = f"few waits, within {MODEL_ERROR:.0%} of the least predicted time"
    if order is not OperandOrder.ANY:
        reason += f" of those that reduce in {order}"
    return best.algorithm, best.segment_bytes, f"{reason} (costs: {table.origin})"


def _segment_bytes(
    rule: Rule, collective: str, nbytes: int, world_size: int, table: Table
) -> int | None:
    """Bytes of a segment by a rule; by the prediction if the rule does not say it."""
    entry = find(collective, rule.algorithm)
    if rule.segment_bytes is not None or not entry.pipelined:
        return rule.segment_bytes
    if table.source == BUILT_IN or not entry.built_in:
        return pipelined_segment_bytes(table.device)
    return predict(entry, nbytes, world_size, table.parameters).segment_bytes


def segment_count(
    schedule: Schedule,
    longest_nbytes: int,
    segment_bytes: int | None,
    longest_numel: int,
    usual: int | None = None,
    slice_bytes: int = 0,
) -> int:
    """Number of segments, from the longest chunk and the wanted bytes of a segment.

    If nobody has said these, they are the ``usual`` ones, or those of the algorithm, and at most
    those of a slice.
    """
    if segment_bytes is None:
        segment_bytes = usual or segment_bytes_of(schedule.collective, schedule, "cpu")
        if slice_bytes:
            segment_bytes = min(segment_bytes or slice_bytes, slice_bytes)
        if segment_bytes is None:
            return 1
    wanted = -(-longest_nbytes // max(1, segment_bytes))
    return max(1, min(wanted, longest_numel))


AUTO = "auto"
"""The algorithm of a rule that leaves the choice to the model."""
EVERY = "*"
"""The collective of a rule that is for all of them."""
FORCED = "RINGCOLL_ALGORITHM"
"""The source of rules that were forced: the variable of the environment."""

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
    """One rule; its ``str`` is what `parse_rules` reads.

    Parameters
    ----------
    collective, algorithm
        Their full names, or `EVERY` and `AUTO`.
    nbytes
        Sizes of the whole data, the vector or all blocks of a rank, in bytes.
    segment_bytes
        Size of a segment; ``None`` for what suits the algorithm.
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
            nbytes=self.sizes(fields[1]),
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
        first, last = self.ends(rest[0])
        if first < 1:
            raise self.fail("there is at least one", rest[0])
        return name.text, self.range(first, None if last is None else last + 1, rest[0])

    def sizes(self, span: _Span) -> Range:
        if span.text == EVERY:
            return Range()
        first, end = self.ends(span)
        return self.range(first, end if "-" in span.text else first + 1, span)

    def range(self, first: int, end: int | None, span: _Span) -> Range:
        if end is not None and end <= first:
            raise self.fail("the range is empty", span)
        return Range(first, end)

    def ends(self, span: _Span) -> tuple[int, int | None]:
        """The two numbers of a range; twice the same for a single one."""
        first, *rest = span.split("-")
        if len(rest) > 1:
            raise self.fail("a range has two ends", span)
        low = self.size(first or span)
        if not rest:
            return low, low
        return low, None if rest[0].text == _INF else self.size(rest[0] or span)

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
