"""Costs of links and schedules, lower bounds on the cost of a collective, and the Pareto front.

Problem: compare algorithms before they run, with each other and with the best
that is possible.

The model: a message of m bytes takes ``alpha + m * beta`` seconds, reducing m
bytes takes ``m * gamma``. A rank sends one message and receives one message at a
time, both at once (one-ported, full duplex). All amounts of data are fractions
of n, the whole data: the vector, or all blocks of one rank.

Lower bounds for k ranks, with the data that the busiest rank sends, receives and reduces:

==================  ============  =============  =============  ===========
collective          rounds        sent / n       received / n   reduced / n
==================  ============  =============  =============  ===========
all_reduce          ceil(lg k)    2(k - 1)/k     2(k - 1)/k     (k - 1)/k
reduce_scatter      ceil(lg k)    (k - 1)/k      (k - 1)/k      (k - 1)/k
all_gather          ceil(lg k)    (k - 1)/k      (k - 1)/k      0
broadcast           ceil(lg k)    1              1              0
reduce              ceil(lg k)    1              1              (k - 1)/k
gather              ceil(lg k)    1/k            (k - 1)/k      0
scatter             ceil(lg k)    (k - 1)/k      1/k            0
all_to_all          ceil(lg k)    (k - 1)/k      (k - 1)/k      0
barrier             ceil(lg k)    1              1              (k - 1)/k
scan                ceil(lg k)    1              1              (k - 1)/k
exscan              ceil(lg k)    1              1              (k - 2)/k
==================  ============  =============  =============  ===========

Why: in a round, a rank's data reach at most twice as many ranks as before. Each
element of an all-reduce has to move k - 1 times to be reduced, k - 1 times to be
known, and to be reduced k - 1 times, on k ranks that at best share this equally.
For a prefix, rank 0's vector has to go to all; k - 1 results are sums, or k - 2 of an exscan.

Sources: E. Chan, M. Heimlich, A. Purkayastha and R. van de Geijn, "Collective
communication: theory, practice, and experience", Concurrency and Computation 19
(2007); P. Patarasuk and X. Yuan, J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, zip_longest
from typing import NamedTuple

from ringcoll.errors import ArgumentError
from ringcoll.schedules.ir import (
    Counts,
    Proof,
    Schedule,
    Send,
    Step,
    chunks_of_data,
    contract,
    count,
)


class LinkCosts(NamedTuple):
    """The costs of a message, of a byte on its way and of a reduced byte.

    Parameters
    ----------
    alpha_s
        Seconds that a message takes, however short.
    beta_s_per_byte
        Seconds that a byte takes on a link.
    gamma_s_per_byte
        Seconds that a rank needs to reduce a byte with another.
    overhead_s
        Seconds for each further message that a rank posts in the same step.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    overhead_s: float = 0.0

    def seconds(
        self,
        nbytes: float,
        rounds: float,
        traffic: Fraction | float,
        reduced: Fraction | float = 0.0,
        further: float = 0.0,
    ) -> float:
        """``rounds * alpha + further * overhead + (traffic * beta + reduced * gamma) * nbytes``.

        The source is R. Hockney's model, "The communication challenge for MPP", Parallel Computing
        20 (1994), with gamma as R. Thakur et al. add it.

        Parameters
        ----------
        nbytes
            Size n of the whole data.
        rounds, traffic, reduced
            The terms of `ringcoll.schedules.ir.counting.Counts`.
        further
            Messages that a rank posts in a step after its first.

        Examples
        --------
        >>> from ringcoll.schedules.algorithms import find
        >>> link = LinkCosts(alpha_s=5e-6, beta_s_per_byte=1e-9, gamma_s_per_byte=2e-10)
        >>> round(link.seconds(8_000_000, *find("all_reduce", "ring").counts(8)), 6)
        0.01547
        """
        messages_s = rounds * self.alpha_s + further * self.overhead_s
        return messages_s + nbytes * (
            traffic * self.beta_s_per_byte + reduced * self.gamma_s_per_byte
        )


@dataclass(frozen=True, slots=True)
class Bound:
    """The cost that no algorithm for a collective can go below.

    Parameters
    ----------
    rounds
        Steps in which a rank sends.
    sent, received, reduced
        Data that the busiest rank sends, receives and reduces, in n.
    """

    rounds: int
    sent: Fraction
    received: Fraction
    reduced: Fraction

    @property
    def traffic(self) -> Fraction:
        """The bound on `Proof.traffic`: the busier direction counts."""
        return max(self.sent, self.received)


class Distance(NamedTuple):
    """A cost as multiples of the lower bounds; ``None`` where the bound is 0.

    Parameters
    ----------
    rounds, traffic, reduced
        Cost over bound; 1 is the least that is possible.
    """

    rounds: Fraction | None
    traffic: Fraction | None
    reduced: Fraction | None

    def __str__(self) -> str:
        factors = (
            f"{float(factor):.2f}x the {name}"
            for name, factor in zip(self._fields, self, strict=True)
            if factor is not None
        )
        return ", ".join(factors).replace("the reduced", "the reduced data") or "all are 0"


def _at_least_one(**arguments: int) -> None:
    for argument, value in arguments.items():
        if value < 1:
            raise ArgumentError("the number is too low", argument, "at least 1", value)


def lower_bound(collective: str, world_size: int, *, ports: int = 1) -> Bound:
    """Compute the cost that no algorithm for a collective can go below.

    Parameters
    ----------
    collective
        Name of the collective.
    world_size
        Number of ranks k, at least 1.
    ports
        Messages that a rank may send, and receive, at the same time. With p of them the rounds are
        at least log k to the base p + 1.

    Raises
    ------
    ScheduleError
        There is no such collective.
    ArgumentError
        ``world_size`` or ``ports`` is below 1.

    Examples
    --------
    >>> bound = lower_bound("all_reduce", 8)
    >>> bound.rounds, str(bound.sent), str(bound.reduced)
    (3, '7/4', '7/8')
    >>> lower_bound("all_reduce", 8, ports=7).rounds
    1
    """
    _at_least_one(world_size=world_size, ports=ports)
    rounds, reached = 0, 1
    while reached < world_size:
        rounds, reached = rounds + 1, reached * (ports + 1)
    return Bound(rounds, *contract(collective).least(world_size))


def bound_of(proof: Proof) -> Bound:
    """The lower bounds for a schedule: for as many ports as the schedule uses."""
    schedule = proof.schedule
    return lower_bound(schedule.collective, schedule.world_size, ports=max(1, proof.ports))


def distance(proof: Proof) -> Distance:
    """How far a schedule is from the lower bounds, on rounds, traffic and reduced data together.

    Examples
    --------
    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import verify
    >>> print(distance(verify(schedule_of("all_reduce", "ring", 8))))
    4.67x the rounds, 1.00x the traffic, 1.00x the reduced data
    """
    bound = bound_of(proof)
    amounts = ((getattr(proof, name), getattr(bound, name)) for name in Distance._fields)
    return Distance(*(Fraction(cost) / least if least else None for cost, least in amounts))


def seconds_on_hosts(
    schedule: Schedule, nbytes: int, hosts: Sequence[int], *, inside: LinkCosts, across: LinkCosts
) -> float:
    """Estimate a schedule's time where hosts have links of their own.

    Inside a host each rank has a link, as in `LinkCosts.seconds`. All ranks of a host share a link
    to other hosts, and the busier direction of the link counts. Both kinds of links work at the
    same time, so that the slower one counts; the time of the reduction is added.

    Parameters
    ----------
    schedule
        Any schedule, run in one segment.
    nbytes
        Size n of the whole data.
    hosts
        The host number of every rank.
    inside, across
        Costs of a link inside a host and between hosts; a reduced byte costs
        ``inside.gamma_s_per_byte``.

    Raises
    ------
    ArgumentError
        ``hosts`` is not one number for each rank.

    Examples
    --------
    A ring of 4 ranks sends 3/2 of the vector out of each of two hosts, in 6 messages;
    the hierarchy sends the vector once, in one message.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> inside = LinkCosts(alpha_s=1e-6, beta_s_per_byte=1e-10)
    >>> across = LinkCosts(alpha_s=1e-4, beta_s_per_byte=1e-8)
    >>> for name in ("ring", "hierarchical"):
    ...     schedule = schedule_of("all_reduce", name, 4)
    ...     hosts = (0, 0, 1, 1)
    ...     print(round(seconds_on_hosts(schedule, 10**6, hosts, inside=inside, across=across), 6))
    0.0156
    0.010202
    """
    if len(hosts) != schedule.world_size:
        raise ArgumentError(
            "each rank needs the number of its host", "hosts", schedule.world_size, len(hosts)
        )
    bytes_of_chunk = nbytes / chunks_of_data(schedule)
    programs = [schedule.steps(rank) for rank in range(schedule.world_size)]
    total_s = 0.0
    for steps in zip_longest(*programs, fillvalue=Step()):
        near, far = _busiest_links(steps, hosts)
        reduced = max(count(step)[-1] for step in steps)
        total_s += max(
            inside.seconds(bytes_of_chunk, near > 0, near),
            across.seconds(bytes_of_chunk, far > 0, far),
        ) + inside.seconds(bytes_of_chunk, 0, 0, reduced)
    return total_s


def _busiest_links(steps: Sequence[Step], hosts: Sequence[int]) -> tuple[int, int]:
    """Chunks on the busiest link inside a host, and on the busiest between hosts."""
    near, far = Counter[tuple[int, bool]](), Counter[tuple[int, bool]]()
    for rank, step in enumerate(steps):
        for operation in step:
            if isinstance(operation, Send):
                here, there = hosts[rank], hosts[operation.peer]
                is_near = here == there
                links, source, target = (
                    (near, rank, operation.peer) if is_near else (far, here, there)
                )
                links[source, True] += len(operation.refs)
                links[target, False] += len(operation.refs)
    return max(near.values(), default=0), max(far.values(), default=0)


def wavefront_counts(schedule: Schedule, num_segments: int) -> Counts:
    """Count the cost of a schedule that is run in segments.

    With T steps and S segments, segment j does step w - j in wave w, so there are T + S - 1 waves;
    in a wave a rank does up to S of its steps, each on 1/S of the data. If B n is the most that any
    rank sends or receives in all steps, the whole takes at most::

        (T + S - 1) * (alpha + B * n / S * beta)

    which is least for S = sqrt((T - 1) * B * n * beta / alpha)::

        (T - 1) * alpha + B * n * beta + 2 * sqrt((T - 1) * B * n * alpha * beta)

    The counts are exact: a wave costs what its busiest rank does in it, and the first and last
    waves, in which only some of the steps are under way, cost less. For the chain (T = k - 1, B =
    1) both are the same.

    Parameters
    ----------
    schedule
        Any schedule; segments need nothing from the algorithm.
    num_segments
        Number of segments S, at least 1; with 1 the schedule runs as it is.

    Raises
    ------
    ArgumentError
        ``num_segments`` is below 1.

    References
    ----------
    P. Sanders, J. Speck and J. L. Träff, Parallel Computing 35 (2009): for
    T - 1 = 2 lg k and B = 1 the last formula is the cost of their broadcast,
    ``n beta + 2 lg k alpha + sqrt(8 lg k n alpha beta)``.

    Examples
    --------
    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> for num_segments in (1, 10, 1000):
    ...     counts = wavefront_counts(schedule_of("all_reduce", "double_tree", 8), num_segments)
    ...     print(counts.rounds, float(counts.traffic))
    6 5.0
    15 2.3
    1005 2.003
    """
    _at_least_one(num_segments=num_segments)
    ranks = [_running(schedule, rank) for rank in range(schedule.world_size)]
    num_steps = max(len(sent) for sent, _, _ in ranks) - 1
    # Segments beyond the number of steps only repeat the wave in which all are under way.
    distinct = min(num_segments, num_steps)
    windows = Counter(
        (max(0, wave - distinct + 1), min(wave + 1, num_steps))
        for wave in range(num_steps + distinct - 1)
    )
    windows[0, num_steps] += num_segments - distinct
    rounds = traffic = reduced = 0
    for window, waves in windows.items():
        most_sent, most_received, most_reduced = (
            max(_within(rank[amount], *window) for rank in ranks) for amount in range(3)
        )
        rounds += waves * (most_sent > 0)
        traffic += waves * max(most_sent, most_received)
        reduced += waves * most_reduced
    pieces = num_segments * chunks_of_data(schedule)
    return Counts(rounds, Fraction(traffic, pieces), Fraction(reduced, pieces))


def _running(schedule: Schedule, rank: int) -> list[list[int]]:
    """Chunks that a rank has sent, received and reduced before each step, and after the last."""
    steps = [count(step)[2:] for step in schedule.steps(rank)]
    amounts = zip(*steps, strict=True) if steps else ((), (), ())
    return [list(accumulate(chunks, initial=0)) for chunks in amounts]


def _within(running: list[int], first: int, last: int) -> int:
    """Chunks in the steps from first to before last; a rank may have ended earlier."""
    end = len(running) - 1
    return running[min(last, end)] - running[min(first, end)]


def dominates(first: Counts, second: Counts) -> bool:
    """Whether the first cost is nowhere above the second, and somewhere below.

    >>> from fractions import Fraction
    >>> cheap, dear = Counts(3, Fraction(2), Fraction(1)), Counts(3, Fraction(3), Fraction(1))
    >>> dominates(cheap, dear), dominates(dear, cheap), dominates(cheap, cheap)
    (True, False, False)
    """
    no_higher = (
        first.rounds <= second.rounds,
        first.traffic <= second.traffic,
        first.reduced <= second.reduced,
    )
    return first != second and all(no_higher)


def dominators(costs: Mapping[str, Counts]) -> dict[str, tuple[str, ...]]:
    """Find the algorithms that dominate each algorithm; those without any are the Pareto front.

    Rounds, traffic and reduced data pull in different directions, and their price depends on the
    machine and on the size of the data. An algorithm *dominates* another if it costs no more in
    each of the three, and less in at least one: then it is the faster of the two wherever only
    alpha, beta and gamma count.

    Parameters
    ----------
    costs
        Cost of each algorithm, by its name, all for the same collective and world size.

    Returns
    -------
    dict
        For each name the names *on the front* that dominate it; none for those that are on the
        front. Algorithms of equal cost do not dominate each other.

    Examples
    --------
    >>> from ringcoll.schedules.algorithms import find
    >>> names = ("ring", "recursive_doubling", "binomial_tree")
    >>> dominators({name: find("all_reduce", name).counts(8) for name in names})
    {'ring': (), 'recursive_doubling': (), 'binomial_tree': ('recursive_doubling',)}
    """
    front = {
        name
        for name, cost in costs.items()
        if not any(dominates(other, cost) for other in costs.values())
    }
    return {
        name: tuple(other for other in costs if other in front and dominates(costs[other], cost))
        for name, cost in costs.items()
    }


def cost_in_sentences(proof: Proof) -> Iterator[str]:
    """Describe a proved schedule's rounds, data, memory and reductions beside the lower bounds.

    Examples
    --------
    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import verify
    >>> print(next(cost_in_sentences(verify(schedule_of("all_gather", "ring", 4)))))
    3 rounds; no algorithm needs fewer than 2. Each rank sends 3 blocks, the least possible. No
    extra memory.
    """
    rules, bound = contract(proof.schedule.collective), bound_of(proof)
    noun = "token" if rules.at_least_once else "vector" if rules.of_vector else "block"
    unit = rules.blocks_of_rank(proof.schedule.world_size)
    if not proof.rounds:
        yield "Nothing is sent."
        return

    def data(value: Fraction, least: Fraction) -> str:
        words = in_number(value * unit, noun)
        if value == least:
            return f"{words}, the least possible"
        return words + (f"; no algorithm needs less than {in_number(least * unit)}" * bool(least))

    ports = f" with {proof.ports} messages at once each way" * (proof.ports > 1)
    if proof.rounds == bound.rounds:
        cost = f"{in_number(proof.rounds, 'round')}, the fewest possible{ports}."
    else:
        cost = f"{proof.rounds} rounds; no algorithm{ports} needs fewer than {bound.rounds}."
    who = "Each" if proof.sent_mean == proof.sent_max else "The busiest"
    cost += f" {who} rank sends {data(proof.sent_max, bound.sent)}."
    if proof.traffic != proof.sent_max:
        traffic = data(proof.traffic, bound.traffic)
        cost += f" Round by round, the busiest rank sends or receives {traffic}."
    slots = proof.schedule.num_slots
    memory = f"Extra memory for {in_number(slots, 'chunk')}" if slots else "No extra memory"
    yield f"{cost} {memory}."
    if bound.reduced and not rules.at_least_once:
        yield f"No rank reduces more than {data(proof.reduced, bound.reduced)}."


def in_number(value: Fraction | int, noun: str = "") -> str:
    """Write an amount with at most three decimals, and its noun.

    >>> in_number(Fraction(3, 2), "vector"), in_number(1, "block"), in_number(Fraction(2, 3))
    ('1.5 vectors', '1 block', '0.667')
    """
    number = f"{float(value):.3f}".rstrip("0").rstrip(".")
    return f"{number} {noun}{'s' * (value != 1)}" if noun else number
