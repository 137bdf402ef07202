"""What was fitted to a network: rules, and the schedules that they name.

Rank 0 publishes it with the group's table, so all ranks have the same; the name of a schedule that was found
holds a hash of its text. A schedule is proved on each rank before it runs, as all that does not come with the
library is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from ringcoll._version import __version__
from ringcoll.algorithms import register_schedule
from ringcoll.cost.rules import Rule, parse_rules
from ringcoll.errors import RingcollError, TuningFileError
from ringcoll.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Rules that were fitted to a network.

    Parameters
    ----------
    world_size
        Number of ranks.
    hosts
        Host of each rank, by a number; hosts are numbered in the order of their first ranks. ``None`` if the network
        does not say it.
    graph
        The network, in the text of `ringcoll.simulation.topology_from_text`.
    date
        Date and time of the fit, in ISO format.
    rules
        Rules: an algorithm for each range of sizes.
    reasons
        A sentence for each rule.
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
        """Refuse a fit that is not for these ranks and hosts, or of another version of the library.

        Raises
        ------
        TuningFileError
            It is for something else; the message says for what.
        """
        layout = numbered(hosts)
        for what, own, here in (
            ("version of ringcoll", self.version, __version__),
            ("number of ranks", self.world_size, len(hosts)),
            ("layout of ranks on hosts", self.hosts or layout, layout),
        ):
            if own != here:
                raise TuningFileError(f"the fit is for another {what}: expected {here}, got {own}")

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
        """Make a fit from the values of `to_json`, and register its schedules.

        Raises
        ------
        TuningFileError
            The values are no fit.
        """
        try:
            schedules = tuple((str(name), str(text)) for name, text in values["schedules"].items())
            for name, text in schedules:
                _adopt(name, text)
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
    """A hash of what a schedule does, by whatever name."""
    text = replace(schedule, algorithm="fitted").to_text()
    return sha256(text.encode()).hexdigest()[:16]


def _adopt(name: str, text: str) -> None:
    """Register the schedule in a text as an algorithm, once; its name says what it does."""
    schedule = Schedule.from_text(text)
    if not name.endswith(f"_{digest_of(schedule)}"):
        raise TuningFileError(f"{name} is not the name of its schedule: the text was changed")
    register_schedule(schedule, name)
