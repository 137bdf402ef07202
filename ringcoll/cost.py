"""What an algorithm costs, and what no algorithm can beat.

Problem: compare algorithms before they run, with each other and with the best
that is possible.

The model: a message of m bytes takes ``alpha + m * beta`` seconds, reducing m
bytes takes ``m * gamma``. A rank sends one message and receives one message at a
time, both at once (one-ported, full duplex). All amounts of data are fractions
of n, the whole data: the vector, or all blocks of one rank.

Lower bounds for k ranks; what the busiest rank sends, receives and reduces:

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
==================  ============  =============  =============  ===========

Why: in a round, a rank's data reach at most twice as many ranks as before. Each
element of an all-reduce has to move k - 1 times to be reduced, k - 1 times to be
known, and to be reduced k - 1 times, on k ranks that at best share this equally.

Sources: E. Chan, M. Heimlich, A. Purkayastha and R. van de Geijn, "Collective
communication: theory, practice, and experience", Concurrency and Computation 19
(2007); P. Patarasuk and X. Yuan, J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, zip_longest
from math import isqrt

from ringcoll.algorithms.registry import Algorithm
from ringcoll.contracts import contract
from ringcoll.errors import ArgumentError
from ringcoll.schedule import Recv, RecvReduce, Reduce, Schedule, Send, Step
from ringcoll.verify import Proof

__all__ = [
    "Bound",
    "Counts",
    "Distance",
    "Machine",
    "best_num_segments",
    "broadcast_rounds",
    "distance",
    "formula_counts",
    "lower_bound",
    "seconds_on_hosts",
    "wavefront_counts",
]


@dataclass(frozen=True, slots=True)
class Bound:
    """What no algorithm for a collective can go below.

    Parameters
    ----------
    rounds
        Steps in which anything is sent.
    sent, received, reduced
        What the busiest rank sends, receives and reduces, in n.
    """

    rounds: int
    sent: Fraction
    received: Fraction
    reduced: Fraction

    @property
    def traffic(self) -> Fraction:
        """The bound on `ringcoll.verify.Proof.traffic`: the busier direction counts."""
        return max(self.sent, self.received)


_Share = Callable[[int], Fraction]  # number of ranks -> amount of data, in n


def _none(k: int) -> Fraction:
    return Fraction(0)


def _whole(k: int) -> Fraction:
    return Fraction(k > 1)


def _own(k: int) -> Fraction:
    return Fraction(k > 1, k)


def _others(k: int) -> Fraction:
    return Fraction(k - 1, k)


def _others_twice(k: int) -> Fraction:
    return 2 * _others(k)


_BOUNDS: dict[str, tuple[_Share, _Share, _Share]] = {  # sent, received, reduced
    "all_reduce": (_others_twice, _others_twice, _others),
    "reduce_scatter": (_others, _others, _others),
    "all_gather": (_others, _others, _none),
    "broadcast": (_whole, _whole, _none),
    "reduce": (_whole, _whole, _others),
    "gather": (_own, _others, _none),
    "scatter": (_others, _own, _none),
    "all_to_all": (_others, _others, _none),
    "barrier": (_whole, _whole, _others),
}


def _at_least_one(**arguments: int) -> None:
    for argument, value in arguments.items():
        if value < 1:
            raise ArgumentError(
                "the number is too low", argument=argument, expected="at least 1", got=value
            )


def _rounds_to_reach_all(world_size: int, ports: int) -> int:
    rounds, reached = 0, 1
    while reached < world_size:
        rounds, reached = rounds + 1, reached * (ports + 1)
    return rounds


def lower_bound(collective: str, world_size: int, *, ports: int = 1) -> Bound:
    """Say what no algorithm for a collective can go below.

    Parameters
    ----------
    collective
        Name of the collective.
    world_size
        Number of ranks k, at least 1.
    ports
        Messages that a rank may send, and receive, at the same time. With p of
        them the rounds are at least log k to the base p + 1.

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
    amounts = (share(world_size) for share in _BOUNDS[contract(collective).collective])
    return Bound(_rounds_to_reach_all(world_size, ports), *amounts)


def broadcast_rounds(world_size: int, num_segments: int) -> int:
    """Fewest rounds of a broadcast whose root sends one segment in each.

    The last segment leaves the root in round ``num_segments``, and from then on
    needs as long as any other: ``num_segments - 1 + ceil(lg k)``. A reduction,
    being a broadcast backwards, needs as many.

    Raises
    ------
    ArgumentError
        ``world_size`` or ``num_segments`` is below 1.

    References
    ----------
    A. Bar-Noy and S. Kipnis, "Broadcasting multiple messages in simultaneous
    send/receive systems", Discrete Applied Mathematics 55 (1994).

    Examples
    --------
    >>> broadcast_rounds(8, 1), broadcast_rounds(8, 10), broadcast_rounds(1, 10)
    (3, 12, 0)
    """
    _at_least_one(world_size=world_size, num_segments=num_segments)
    return num_segments - 1 + _rounds_to_reach_all(world_size, 1) if world_size > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a message, a byte on its way and a reduced byte cost.

    Parameters
    ----------
    alpha_s
        Seconds a message takes, however short.
    beta_s_per_byte
        Seconds a byte takes on a link.
    gamma_s_per_byte
        Seconds a rank needs to reduce a byte with another.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """What is paid for: the terms of the alpha-beta-gamma cost.

    Parameters
    ----------
    rounds
        Steps, or waves, in which anything is sent.
    traffic
        Sum over them of the most that any rank sends or receives, in n.
    reduced
        Sum over them of the most that any rank reduces, in n.
    """

    rounds: int
    traffic: Fraction
    reduced: Fraction

    def seconds(self, nbytes: int, machine: Machine) -> float:
        """``rounds * alpha + (traffic * beta + reduced * gamma) * n`` for n bytes.

        The source is R. Hockney's model, "The communication challenge for MPP",
        Parallel Computing 20 (1994), with gamma as R. Thakur et al. add it.

        Examples
        --------
        >>> counts = Counts(rounds=14, traffic=Fraction(7, 4), reduced=Fraction(7, 8))
        >>> machine = Machine(alpha_s=5e-6, beta_s_per_byte=1e-9, gamma_s_per_byte=2e-10)
        >>> round(counts.seconds(8_000_000, machine), 6)
        0.01547
        """
        data = self.traffic * nbytes * machine.beta_s_per_byte
        arithmetic = self.reduced * nbytes * machine.gamma_s_per_byte
        return self.rounds * machine.alpha_s + data + arithmetic


def formula_counts(
    algorithm: Algorithm, world_size: int, hosts: Sequence[int] | None = None
) -> Counts:
    """Evaluate the formulas that an algorithm is registered with.

    Parameters
    ----------
    algorithm, world_size
        The algorithm, and the number of ranks.
    hosts
        The host number of every rank, for an algorithm that needs them; by default there
        are two.

    Raises
    ------
    ArgumentError
        ``world_size`` is below 1.
    ScheduleError
        ``hosts`` is not one number for each rank.

    Examples
    --------
    >>> from ringcoll.algorithms import find
    >>> counts = formula_counts(find("all_reduce", "ring"), 8)
    >>> counts.rounds, str(counts.traffic), str(counts.reduced)
    (14, '7/4', '7/8')
    """
    _at_least_one(world_size=world_size)
    cost, world = algorithm.cost, algorithm.world(world_size, hosts)
    return Counts(cost.rounds(world), cost.traffic(world), cost.reduced(world))


def seconds_on_hosts(
    schedule: Schedule, nbytes: int, hosts: Sequence[int], *, inside: Machine, across: Machine
) -> float:
    """Estimate a schedule's time where hosts have links of their own.

    Inside a host each rank has a link, as in `Counts.seconds`. To other hosts, all ranks of a
    host share one, and its busier direction counts. A step takes as long as the slower of
    the two takes, as both work at the same time; to which reducing comes.

    Parameters
    ----------
    schedule
        Any schedule, run in one segment.
    nbytes
        Size n of the whole data.
    hosts
        The host number of every rank.
    inside, across
        What a message and a byte cost inside a host and between hosts, and what
        ``inside.gamma_s_per_byte`` says for reducing.

    Raises
    ------
    ArgumentError
        ``hosts`` is not one number for each rank.

    Examples
    --------
    A ring of 4 ranks sends 3/2 of the vector out of each of two hosts, in 6 messages;
    the hierarchy sends all of it once, in one.

    >>> from ringcoll.algorithms import schedule_of
    >>> inside = Machine(alpha_s=1e-6, beta_s_per_byte=1e-10)
    >>> across = Machine(alpha_s=1e-4, beta_s_per_byte=1e-8)
    >>> for name in ("ring", "hierarchical"):
    ...     schedule = schedule_of("all_reduce", name, 4)
    ...     hosts = (0, 0, 1, 1)
    ...     print(round(seconds_on_hosts(schedule, 10**6, hosts, inside=inside, across=across), 6))
    0.0156
    0.010202
    """
    if len(hosts) != schedule.world_size:
        raise ArgumentError(
            "one host for each rank is needed",
            argument="hosts",
            expected=schedule.world_size,
            got=len(hosts),
        )
    bytes_of_chunk = nbytes / _chunks_of_n(schedule)
    programs = [schedule.steps(rank) for rank in range(schedule.world_size)]
    total_s = 0.0
    for steps in zip_longest(*programs, fillvalue=Step()):
        near, far, reduced = _step_on_hosts(steps, hosts)
        near_s = inside.alpha_s + near * bytes_of_chunk * inside.beta_s_per_byte
        far_s = across.alpha_s + far * bytes_of_chunk * across.beta_s_per_byte
        total_s += max(near_s if near else 0.0, far_s if far else 0.0)
        total_s += reduced * bytes_of_chunk * inside.gamma_s_per_byte
    return total_s


def _step_on_hosts(steps: Sequence[Step], hosts: Sequence[int]) -> tuple[int, int, int]:
    """Chunks on the busiest link inside, on the busiest across, and most reduced by a rank."""
    near, far, most_reduced = Counter[tuple[int, bool]](), Counter[tuple[int, bool]](), 0
    for rank, step in enumerate(steps):
        reduced = 0
        for operation in step:
            match operation:
                case Send(peer, refs) if hosts[peer] == hosts[rank]:
                    near[rank, True] += len(refs)
                    near[peer, False] += len(refs)
                case Send(peer, refs):
                    far[hosts[rank], True] += len(refs)
                    far[hosts[peer], False] += len(refs)
                case RecvReduce(_, into):
                    reduced += len(into)
                case Reduce(_, sources):
                    reduced += len(sources) - 1
                case _:
                    pass
        most_reduced = max(most_reduced, reduced)
    return max(near.values(), default=0), max(far.values(), default=0), most_reduced


@dataclass(frozen=True, slots=True)
class _Running:
    """What one rank has sent, received and reduced before each step, in chunks."""

    sent: list[int]
    received: list[int]
    reduced: list[int]


def _running(schedule: Schedule, rank: int) -> _Running:
    sent, received, reduced = [], [], []
    for step in schedule.steps(rank):
        out_going = coming = joined = 0
        for operation in step:
            match operation:
                case Send(_, refs):
                    out_going += len(refs)
                case Recv(_, refs):
                    coming += len(refs)
                case RecvReduce(_, into):
                    coming += len(into)
                    joined += len(into)
                case Reduce(_, sources):
                    joined += len(sources) - 1
                case _:
                    pass
        sent.append(out_going)
        received.append(coming)
        reduced.append(joined)
    return _Running(
        *(list(accumulate(amounts, initial=0)) for amounts in (sent, received, reduced))
    )


def _within(running: list[int], first: int, last: int) -> int:
    """What is done in the steps from first to before last; a rank may have ended earlier."""
    end = len(running) - 1
    return running[min(last, end)] - running[min(first, end)]


def wavefront_counts(schedule: Schedule, num_segments: int) -> Counts:
    """Count what a schedule costs when it is run in segments.

    With T steps and S segments, segment j does step w - j in wave w, so there are
    T + S - 1 waves; in a wave a rank does up to S of its steps, each on 1/S of the
    data. If B n is the most that any rank sends or receives in all steps, the
    whole takes at most::

        (T + S - 1) * (alpha + B * n / S * beta)

    which is least for S = sqrt((T - 1) * B * n * beta / alpha)::

        (T - 1) * alpha + B * n * beta + 2 * sqrt((T - 1) * B * n * alpha * beta)

    What is counted here is exact: a wave costs what its busiest rank does in it,
    and the first and last ones, in which only some of the steps are under way,
    cost less. For the chain (T = k - 1, B = 1) both are the same.

    Parameters
    ----------
    schedule
        Any schedule; segments need nothing from the algorithm.
    num_segments
        Number of segments S, at least 1. One is the schedule itself.

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
    >>> from ringcoll.algorithms import schedule_of
    >>> for num_segments in (1, 10, 1000):
    ...     counts = wavefront_counts(schedule_of("all_reduce", "double_tree", 8), num_segments)
    ...     print(counts.rounds, float(counts.traffic))
    6 5.0
    15 2.3
    1005 2.003
    """
    _at_least_one(num_segments=num_segments)
    return _wavefront(schedule, _profile(schedule), num_segments)


def _profile(schedule: Schedule) -> list[_Running]:
    return [_running(schedule, rank) for rank in range(schedule.world_size)]


def _num_steps(ranks: list[_Running]) -> int:
    return max(len(rank.sent) for rank in ranks) - 1


def _wavefront(schedule: Schedule, ranks: list[_Running], num_segments: int) -> Counts:
    num_steps = _num_steps(ranks)
    # Segments beyond the number of steps only repeat the wave in which all are under way.
    distinct = min(num_segments, num_steps)
    windows = Counter(
        (max(0, wave - distinct + 1), min(wave + 1, num_steps))
        for wave in range(num_steps + distinct - 1)
    )
    windows[0, num_steps] += num_segments - distinct
    rounds = traffic = reduced = 0
    for window, waves in windows.items():
        most_sent = max(_within(rank.sent, *window) for rank in ranks)
        most_received = max(_within(rank.received, *window) for rank in ranks)
        rounds += waves * (most_sent > 0)
        traffic += waves * max(most_sent, most_received)
        reduced += waves * max(_within(rank.reduced, *window) for rank in ranks)
    parts_of_n = num_segments * _chunks_of_n(schedule)
    return Counts(rounds, Fraction(traffic, parts_of_n), Fraction(reduced, parts_of_n))


def _chunks_of_n(schedule: Schedule) -> int:
    """Chunks in the whole data: in the vector, or in all blocks of one rank."""
    rules, world_size = contract(schedule.collective), schedule.world_size
    per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
    return per_block * (world_size if rules.num_blocks(world_size) > 1 else 1)


def best_num_segments(schedule: Schedule, nbytes: int, machine: Machine) -> int:
    """Find the number of segments with which a schedule is done soonest.

    From S = T segments on, what `wavefront_counts` counts is ``c + e/S``: c for
    the waves in which all steps are under way, e for the first and last ones. So
    ``sqrt(e / alpha)`` segments are best there, and nearly so with fewer than T.

    Parameters
    ----------
    schedule
        Any schedule.
    nbytes
        Size n of the whole data. A segment has at least one byte.
    machine
        What a message and a byte cost.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> machine = Machine(alpha_s=1e-5, beta_s_per_byte=1e-9)
    >>> chain = schedule_of("broadcast", "chain", 17)
    >>> [best_num_segments(chain, nbytes, machine) for nbytes in (10, 10**4, 10**6, 10**8)]
    [1, 4, 39, 387]
    """
    ranks = _profile(schedule)

    def total_s(num_segments: int) -> float:
        return _wavefront(schedule, ranks, num_segments).seconds(nbytes, machine)

    def data_s(num_segments: int) -> float:
        counts = _wavefront(schedule, ranks, num_segments)
        return replace(counts, rounds=0).seconds(nbytes, machine)

    num_steps, most = _num_steps(ranks), max(1, nbytes)
    edges_s = 2 * num_steps * (data_s(num_steps) - data_s(2 * num_steps))
    if edges_s <= 0:
        return 1
    if edges_s >= machine.alpha_s * most**2:
        return most
    best = isqrt(int(edges_s / machine.alpha_s))
    return min({1, max(1, best), best + 1}, key=lambda num: (total_s(num), num))


@dataclass(frozen=True, slots=True)
class Distance:
    """How many times its lower bound a schedule costs; 1 is the best possible.

    Parameters
    ----------
    rounds, traffic, reduced
        Counted over bound. 1 where nothing is needed and nothing is done.
    """

    rounds: Fraction
    traffic: Fraction
    reduced: Fraction


def distance(proof: Proof) -> Distance:
    """Compare what was counted on a schedule with the lower bounds.

    The rounds are held against the bound for as many ports as the schedule uses.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.verify import verify
    >>> ring = distance(verify(schedule_of("all_reduce", "ring", 8)))
    >>> float(ring.traffic), float(ring.reduced), round(float(ring.rounds), 2)
    (1.0, 1.0, 4.67)
    """
    world_size = proof.schedule.world_size
    bound = lower_bound(proof.schedule.collective, world_size, ports=max(1, proof.ports))
    return Distance(
        _ratio(Fraction(proof.rounds), Fraction(bound.rounds)),
        _ratio(proof.traffic, bound.traffic),
        _ratio(proof.reduced, bound.reduced),
    )


def _ratio(counted: Fraction, bound: Fraction) -> Fraction:
    if not bound:
        assert not counted, "something is done where nothing is needed"
        return Fraction(1)
    return counted / bound
