"""Rules that say which algorithm to use, and the table of costs and rules that all ranks share.

Problem: a person with measurements, or a file of them, says in one line of text which algorithm
runs when; and an error message points at the place of a typing error. The order of the
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

Rank 0 decides on a `Table` and publishes it: the table is the same on all ranks, to the last bit.
It holds the costs of messages, and rules of three kinds: forced rules, rules that were fitted to a
network, and rules that come from measurements of the algorithms.

With fitted rules come the schedules that they name (`Fitted`): the name of a schedule that was
found holds a hash of its text. A schedule is proved on each rank before it runs, as all that does
not come with the library is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from ringcoll._package import __version__
from ringcoll.errors import (
    ArgumentError,
    RingcollError,
    RulesError,
    TuningFileError,
    UnknownAlgorithmError,
)
from ringcoll.schedules.algorithms import ALIASES, algorithms, find, named, register_schedule
from ringcoll.schedules.cost.counts import LinkCosts
from ringcoll.schedules.cost.predict import Parameters
from ringcoll.schedules.ir import CONTRACTS, Schedule

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


BUILT_IN = "built-in"
"""The source of tables for which nothing was measured."""
MEASURED = "measured"
"""The source of tables that were measured for a group."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Rules that were fitted to a network.

    Parameters
    ----------
    world_size, date
        Number of ranks; date and time of the fit, in ISO format.
    hosts
        Host of each rank, by a number; hosts are numbered in the order of their first ranks.
        ``None`` if the network does not say it.
    graph
        The network, in the text of `ringcoll.lab.simulation.topology_from_text`.
    rules, reasons
        An algorithm for each range of sizes, and a sentence for each rule.
    schedules
        Texts of the schedules that were found, by the names that the rules have for them.
    """

    world_size: int
    hosts: tuple[int, ...] | None
    graph: str
    date: str
    rules: tuple[Rule, ...]
    reasons: tuple[str, ...]
    schedules: tuple[tuple[str, str], ...] = ()
    version: str = __version__

    def reason(self, rule: Rule) -> str:
        """Why a rule was made, in words."""
        return f"fitted on {self.date[:10]}: {self.reasons[self.rules.index(rule)]}"

    def check(self, hosts: tuple[int, ...]) -> None:
        """Refuse a fit for other ranks or hosts, or of another version, by a `TuningFileError`."""
        layout = numbered(hosts)
        for fact, own, here in (
            ("version of ringcoll", self.version, __version__),
            ("number of ranks", self.world_size, len(hosts)),
            ("layout of ranks on hosts", self.hosts or layout, layout),
        ):
            if own != here:
                raise TuningFileError(f"the fit is for another {fact}: expected {here}, got {own}")

    def to_json(self) -> dict[str, Any]:
        """The values that `from_json` reads."""
        return {
            "world_size": self.world_size,
            "hosts": self.hosts,
            "graph": self.graph,
            "date": self.date,
            "ringcoll": self.version,
            "rules": [
                {"rule": str(rule), "reason": reason}
                for rule, reason in zip(self.rules, self.reasons, strict=True)
            ],
            "schedules": dict(self.schedules),
        }

    @classmethod
    def from_json(cls, values: Any) -> Fitted:
        """Make a fit from `to_json`'s values, and register its schedules; or `TuningFileError`."""
        try:
            schedules = tuple((str(name), str(text)) for name, text in values["schedules"].items())
            for name, text in schedules:
                schedule = Schedule.from_text(text)
                if not name.endswith(f"_{digest_of(schedule)}"):
                    message = f"{name} is not the name of its schedule: the text was changed"
                    raise TuningFileError(message)
                register_schedule(schedule, name)
            rules = [parse_rules(str(row["rule"])) for row in values["rules"]]
            numbers = [values["world_size"], *(values["hosts"] or ())]
            if not all(type(number) is int for number in numbers):
                raise TypeError(f"{numbers} are no numbers of ranks and hosts")
            return cls(
                world_size=values["world_size"],
                hosts=values["hosts"] and tuple(values["hosts"]),
                graph=str(values["graph"]),
                date=str(values["date"]),
                rules=tuple(rule for (rule,) in rules),
                reasons=tuple(str(row["reason"]) for row in values["rules"]),
                schedules=schedules,
                version=str(values["ringcoll"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, RingcollError) as error:
            raise TuningFileError(f"not a fit to a network: {error!r}") from error


def numbered(hosts: tuple[Any, ...]) -> tuple[int, ...]:
    """Number hosts in the order of their first ranks.

    >>> numbered(("b", "b", "a", "b"))
    (0, 0, 1, 0)
    """
    numbers: dict[Any, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def digest_of(schedule: Schedule) -> str:
    """A hash of the steps of a schedule, whatever its name is."""
    text = replace(schedule, algorithm="fitted").to_text()
    return sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """The costs and rules of a group; compared by identity, so that the look-up is quick.

    Parameters
    ----------
    transport, world_size, hosts
        The transport, number of ranks and number of hosts that the table is for.
    parameters, tuned
        Costs of messages, bytes and reductions; rules that were measured, or are built in.
    forced, forced_by
        Rules that come before all others, and where they stand.
    source
        Where parameters and ``tuned`` come from, for people: `BUILT_IN`, "measured", or the name of
        a file.
    device
        Type of the device of the tensors with which costs and ``tuned`` were measured: ``"cpu"`` or
        ``"cuda"``. If nothing was measured, of the tensors that the table is for.
    fit
        What was fitted to the network of the group; its rules come after the forced ones.
    announces
        Whether decisions are written to the log; one rank of a group is enough.
    """

    transport: str
    world_size: int
    parameters: Parameters
    hosts: int = 1
    tuned: tuple[Rule, ...] = ()
    forced: tuple[Rule, ...] = ()
    source: str = BUILT_IN
    device: str = "cpu"
    fit: Fitted | None = None
    announces: bool = True
    forced_by: str = FORCED

    @property
    def origin(self) -> str:
        """The origin of the costs, and the tensors with which they were measured, in words."""
        if self.source == BUILT_IN:
            return self.source
        measured = f"measured with {self.device.upper()} tensors"
        return measured if self.source == MEASURED else f"{self.source}, {measured}"

    def layers(self) -> Iterator[tuple[tuple[Rule, ...], Callable[[Rule], str]]]:
        """All rules, in the order in which they count, with functions that give their reasons."""
        yield self.forced, lambda rule: f"by the rule {rule} ({self.forced_by})"
        if self.fit is not None:
            yield self.fit.rules, self.fit.reason
        yield self.tuned, lambda rule: f"by the rule {rule} ({self.origin})"

    def to_json(self) -> dict[str, Any]:
        """The values that `from_json` reads, as JSON can hold them, floats exactly."""
        return {
            "transport": self.transport,
            "world_size": self.world_size,
            "hosts": self.hosts,
            "parameters": asdict(self.parameters),
            "tuned": in_text(self.tuned),
            "forced": in_text(self.forced),
            "source": self.source,
            "device": self.device,
            "fit": self.fit and self.fit.to_json(),
        }

    def dumps(self) -> str:
        """`to_json` as text."""
        return json.dumps(self.to_json())

    @classmethod
    def from_json(cls, values: Any) -> Table:
        """Make a table from the values of `to_json`; rules may name algorithms unknown here.

        Raises `TuningFileError` if the values are no table.
        """
        try:
            return cls(
                transport=_text(values["transport"]),
                world_size=_number(values["world_size"]),
                hosts=_number(values["hosts"]),
                parameters=Parameters(**values["parameters"]),
                tuned=parse_rules(_text(values["tuned"]), known_only=False),
                forced=parse_rules(_text(values.get("forced", "")), known_only=False),
                source=_text(values.get("source", "")),
                device=_device(values.get("device", "cpu")),
                fit=Fitted.from_json(values["fit"]) if values.get("fit") else None,
            )
        except (KeyError, TypeError, AttributeError, RingcollError) as error:
            raise TuningFileError(f"not a table of costs and rules: {error!r}") from error


@lru_cache(maxsize=256)
def under_rules(table: Table, rules: tuple[Rule, ...]) -> Table:
    """The table with the rules of a call before its own; the same table for the same rules."""
    return replace(table, forced=rules, forced_by="of the call") if rules else table


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _device(value: Any) -> str:
    if value not in ("cpu", "cuda"):
        raise ArgumentError("not a type of device", expected="cpu or cuda", got=value)
    return _text(value)


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError("not a number of ranks or hosts", expected=">= 1", got=value)
    return value


def _across_hosts(world_size: int, hosts: int) -> tuple[Rule, ...]:
    """Rules for when some hosts have several ranks: predictions know links of one kind only."""
    if not 1 < hosts < world_size:
        return ()
    return tuple(
        Rule(
            collective=entry.collective,
            nbytes=Range(entry.across_hosts_from),
            algorithm=entry.name,
            hosts=Range(2),
        )
        for entry in algorithms()
        if entry.across_hosts_from is not None and entry.built_in
    )


def crowded_parameters(
    link: LinkCosts, world_size: int, hosts: int = 1, cores: int | None = None
) -> Parameters:
    """Costs of a group for which only a link was measured.

    Parameters
    ----------
    link, world_size, hosts
        Costs of a link between two ranks; numbers of ranks and of hosts.
    cores
        Cores of a host, which its ranks have to share; ``None`` for enough of them.

    Examples
    --------
    >>> costs = crowded_parameters(LinkCosts(6e-5, 5e-10), 8, cores=2)
    >>> costs.crowded_alpha_s / costs.alpha_s
    4.0
    """
    crowd = max(1.0, -(-world_size // hosts) / cores) if cores else 1.0
    return Parameters(
        **link._asdict(),
        crowded_alpha_s=crowd * link.alpha_s,
        crowded_beta_s_per_byte=crowd * link.beta_s_per_byte,
        crowded_gamma_s_per_byte=crowd * link.gamma_s_per_byte,
    )


def built_in(
    transport: str,
    link: LinkCosts,
    world_size: int,
    *,
    hosts: int = 1,
    cores: int | None = None,
    device: str = "cpu",
) -> Table:
    """The table for when nothing was measured: the costs of the transport's catalogue entry."""
    return Table(
        transport=transport,
        world_size=world_size,
        hosts=hosts,
        parameters=crowded_parameters(link, world_size, hosts, cores),
        tuned=_across_hosts(world_size, hosts),
        device=device,
    )
