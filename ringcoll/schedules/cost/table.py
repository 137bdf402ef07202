"""The table of costs and rules that all ranks of a group share.

Rank 0 decides on a `Table` and publishes it: the table is the same on all ranks, to the last bit.
It holds the costs of messages, and rules of three kinds: forced rules, rules that were fitted to a
network, and rules that come from measurements of the algorithms.

Fitted rules come with the schedules that they name (`Fitted`): the name of such a schedule holds a
hash of its text. Each rank proves a schedule before it runs, unless it comes with the library.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any

from ringcoll._package import __version__
from ringcoll.errors import ArgumentError, RingcollError, TuningFileError
from ringcoll.schedules.algorithms import algorithms, register_schedule
from ringcoll.schedules.cost.counts import LinkCosts
from ringcoll.schedules.cost.predict import Parameters
from ringcoll.schedules.cost.rules import Range, Rule, in_text, parse_rules
from ringcoll.schedules.ir import Schedule

FORCED = "RINGCOLL_ALGORITHM"
"""The source of rules that were forced: the variable of the environment."""
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
