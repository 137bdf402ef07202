"""What all ranks of a group go by when they choose an algorithm.

A `Table` is decided on by rank 0 and published: it is the same on all ranks, to the last
bit. It holds what messages cost, and rules of two kinds: those that somebody has forced,
and those that were found by measuring the algorithms themselves.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ringcoll.choice.predict import Parameters
from ringcoll.choice.rules import Rule, in_text, parse_rules
from ringcoll.errors import ArgumentError, RingcollError, TuningFileError

__all__ = ["BUILT_IN", "Table", "across_hosts", "built_in", "built_in_parameters"]

BUILT_IN = "built-in"
"""The source of tables for which nothing was measured."""

# Measured with `ringcoll compare` over gloo, 2 and 4 ranks on 2 cores: there the tree,
# in which few ranks are busy at once, was the fastest all-reduce up to 1 MiB, the ring
# from 16 MiB on; at 4 MiB runs disagreed. The second ones for a collective are for
# operators whose operands must stay in rank order. For NCCL they say nothing.
_RULES = parse_rules(
    "all_reduce:0-4M:binomial_tree;all_reduce:*:ring;all_reduce:*:rabenseifner;"
    "reduce_scatter:0-32K:direct;reduce_scatter:*:ring;reduce_scatter:*:direct;"
    "all_gather:0-1M:bruck;all_gather:*:ring;"
    "broadcast:0-1M:binomial_tree;broadcast:*:scatter_all_gather;"
    "reduce:0-1M:binomial_tree;reduce:*:reduce_scatter_gather;reduce:*:direct;"
    "gather:0-32K:binomial_tree;gather:*:linear;"
    "scatter:0-32K:binomial_tree;scatter:*:linear;"
    "all_to_all:*:pairwise;barrier:*:dissemination"
)

# With links of 200 Mbit/s between two hosts of two ranks, 1 MiB over gloo: 1.4 to 2.6 times as
# fast as the ring, 1.7 to 3.2 times as the tree (`benchmarks/hosts.py`). Few bytes were not measured.
_ACROSS_HOSTS = parse_rules("all_reduce:32K-inf:hierarchical:hosts=2-inf")

# Two ranks on one host, by `measure` on 2 cores: alpha, beta, gamma, further messages.
# For NCCL, which has not been measured, an order of magnitude.
_COSTS: dict[str, tuple[float, float, float, float]] = {
    "gloo": (60e-6, 0.5e-9, 0.15e-9, 30e-6),
    "ucx": (6e-6, 0.1e-9, 0.15e-9, 3e-6),
    "nccl": (10e-6, 0.02e-9, 0.001e-9, 2e-6),
    "local": (30e-6, 0.1e-9, 0.15e-9, 10e-6),
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Table:
    """What ranks go by; compared by identity, so that it is quick to look up.

    Parameters
    ----------
    transport, world_size, hosts
        What it is for.
    parameters
        What messages, bytes and reductions cost.
    tuned
        Rules that were measured, or are built in.
    forced
        Rules that come before all others.
    source
        Where parameters and ``tuned`` come from, for people: `BUILT_IN`, "measured", or
        the name of a file.
    announces
        Whether decisions are told to the log; one rank of a group is enough.
    """

    transport: str
    world_size: int
    parameters: Parameters
    hosts: int = 1
    tuned: tuple[Rule, ...] = ()
    forced: tuple[Rule, ...] = ()
    source: str = BUILT_IN
    announces: bool = True

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads: values that JSON can hold, floats exactly."""
        return {
            "transport": self.transport,
            "world_size": self.world_size,
            "hosts": self.hosts,
            "parameters": asdict(self.parameters),
            "tuned": in_text(self.tuned),
            "forced": in_text(self.forced),
            "source": self.source,
        }

    def dumps(self) -> str:
        """`to_json` as text."""
        return json.dumps(self.to_json())

    @classmethod
    def from_json(cls, found: Any) -> Table:
        """Make a table of what `to_json` gave; rules may name algorithms unknown here.

        Raises
        ------
        TuningFileError
            It is something else.
        """
        try:
            return cls(
                transport=_text(found["transport"]),
                world_size=_number(found["world_size"]),
                hosts=_number(found["hosts"]),
                parameters=Parameters(**found["parameters"]),
                tuned=parse_rules(_text(found["tuned"]), known_only=False),
                forced=parse_rules(_text(found.get("forced", "")), known_only=False),
                source=_text(found.get("source", "")),
            )
        except (KeyError, TypeError, AttributeError, RingcollError) as error:
            raise TuningFileError(f"not a table of costs and rules: {error!r}") from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError("not a number of ranks or hosts", expected=">= 1", got=value)
    return value


def across_hosts(world_size: int, hosts: int) -> tuple[Rule, ...]:
    """Rules for when some hosts have several ranks: what costs are equal for says nothing then."""
    return _ACROSS_HOSTS if 1 < hosts < world_size else ()


def built_in_parameters(
    transport: str, world_size: int, hosts: int = 1, cores: int | None = None
) -> Parameters:
    """Costs for when nothing was measured.

    Parameters
    ----------
    transport
        Its name; one that is not known is taken for gloo.
    world_size, hosts
        Numbers of ranks and of hosts.
    cores
        Cores of a host, which its ranks have to share; ``None`` for enough of them.

    Examples
    --------
    >>> costs = built_in_parameters("gloo", 8, cores=2)
    >>> costs.crowded_alpha_s / costs.alpha_s
    4.0
    """
    alpha_s, beta_s, gamma_s, overhead_s = _COSTS.get(transport, _COSTS["gloo"])
    crowd = max(1.0, -(-world_size // hosts) / cores) if cores else 1.0
    return Parameters(
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s,
        gamma_s_per_byte=gamma_s,
        overhead_s=overhead_s,
        crowded_alpha_s=crowd * alpha_s,
        crowded_beta_s_per_byte=crowd * beta_s,
        crowded_gamma_s_per_byte=crowd * gamma_s,
    )


def built_in(transport: str, world_size: int, *, hosts: int = 1, cores: int | None = None) -> Table:
    """The table for when nothing was measured: fixed rules, but for NCCL; costs for the model."""
    return Table(
        transport=transport,
        world_size=world_size,
        hosts=hosts,
        parameters=built_in_parameters(transport, world_size, hosts, cores),
        tuned=(*across_hosts(world_size, hosts), *(() if transport == "nccl" else _RULES)),
    )
