"""The network between the ranks of a group, measured by messages between all pairs of ranks.

Every measurement is a stream of messages. The receiver answers each message with the size of a
later one, or with 0 when it has measured enough, so messages get as long as some milliseconds take.
The receiver's clock counts, so bytes that lie in buffers do not. With one message at a time, the
time between two is a round trip. `ringcoll.lab.simulation.trials` says which pairs send, and
`ringcoll.lab.simulation.topology_of` which network explains the numbers.

All ranks get all numbers after each trial, by Bruck's all-gather, in which nobody is done before
all have begun.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringcoll.errors import CollectiveTimeoutError
from ringcoll.lab.simulation import Measurements, Pair, Sample, Topology, Trial, topology_of, trials
from ringcoll.runtime.collectives import barrier, communicator
from ringcoll.runtime.machine import seconds_of
from ringcoll.runtime.transport import Message, Transport

_TAG = 0x7E57C059  # of 31 bits; nothing else is under way meanwhile
_SHORT, _LEAST, _MOST = 8, 1 << 15, 1 << 22  # bytes of a message
_MESSAGE_S = 0.005
_UNDER_WAY = 4  # long messages of a stream

Wait = Callable[..., None]


class _Prober:
    """A rank that takes part in a measurement."""

    def __init__(self, transport: Transport, limit_s: float) -> None:
        self.transport, self.rank, self.limit_s = transport, transport.rank, limit_s
        self.memory = torch.zeros(2, _MOST, dtype=torch.uint8, device="cpu")
        self.size = torch.zeros(1, dtype=torch.int64, device="cpu")

    def ready(self, source: int, target: int, data: Tensor) -> Callable[[], Wait]:
        """Make a message of this rank ready; the function posts it, and returns one that waits."""
        is_send, peer = source == self.rank, source + target - self.rank
        message = [Message(peer, data, _TAG)]
        post = self.transport.bind(*(([], message) if is_send else (message, [])))

        def start() -> Wait:
            (handle,) = post(0)
            return partial(wait, handle)

        def wait(handle: object, share: float = 1.0) -> None:
            limit_s = share * self.limit_s
            try:
                if handle is not None:
                    self.transport.wait(handle, limit_s)
            except CollectiveTimeoutError as error:
                text = f"nothing came from rank {source} to rank {target} for {limit_s:g} s"
                raise CollectiveTimeoutError(text, peer=peer) from error

        return start

    def greet(self) -> None:
        """Exchange a message with all ranks, which sets paths up.

        A rank that lacks a path gives up before the others.
        """
        others = [peer for peer in range(self.transport.world_size) if peer != self.rank]
        receives = [self.ready(peer, self.rank, self.memory[0, :_SHORT])() for peer in others]
        sends = [self.ready(self.rank, peer, self.memory[1, :_SHORT])() for peer in others]
        for wait in [*receives, *sends]:
            wait(share=0.5)

    def trial(self, trial: Trial) -> dict[Pair, Sample]:
        """Take part in a trial, and return the numbers of all its pairs."""
        own = Sample(0.0)
        for source, target in trial.pairs:
            if self.rank == source:
                self._send_stream(target, trial)
            elif self.rank == target:
                own = self._receive_stream(source, trial)
        world_size, known = self.transport.world_size, 1
        rows = torch.tensor([own] * world_size, dtype=torch.float64, device="cpu")
        while known < world_size:  # row r is that of the rank r further
            more = min(known, world_size - known)
            ahead, back = ((self.rank + way) % world_size for way in (known, -known))
            receive_rows = self.ready(ahead, self.rank, rows[known : known + more].view(-1))()
            self.ready(self.rank, back, rows[:more].view(-1))()()
            receive_rows()
            known += more
        numbers = rows.roll(self.rank, 0).tolist()
        return {pair: Sample(*numbers[pair[1]]) for pair in trial.pairs}

    def _stream(self, source: int, target: int, trial: Trial) -> Callable[[int], Wait]:
        """A function that posts a message of a stream, again only after a wait for it."""
        memory = self.memory[int(source == self.rank)]
        if trial.is_short:
            short = self.ready(source, target, memory[:_SHORT])
            return lambda nbytes: short()
        return lambda nbytes: self.ready(source, target, memory[:nbytes])()

    def _send_stream(self, peer: int, trial: Trial) -> None:
        send = self._stream(self.rank, peer, trial)
        receive_size = self.ready(peer, self.rank, self.size)
        under_way = deque(map(send, _unasked_sizes(trial)))
        while under_way:
            under_way.popleft()()
            receive_size()()
            if nbytes := int(self.size):
                under_way.append(send(nbytes))

    def _receive_stream(self, peer: int, trial: Trial) -> Sample:
        receive = self._stream(peer, self.rank, trial)
        send_size = self.ready(self.rank, peer, self.size)
        sizes = deque(_unasked_sizes(trial))
        coming, size = deque(map(receive, sizes)), sizes[0]
        arrivals = [(time.perf_counter(), 0)]
        while coming:
            coming.popleft()()
            if size:  # what is under way at the end does not count
                arrivals.append((time.perf_counter(), arrivals[-1][1] + sizes.popleft()))
            if size and not trial.nbytes:
                rate = arrivals[-1][1] / max(arrivals[-1][0] - arrivals[0][0], 1e-6)
                size = min(2 * size, max(_LEAST, int(rate * _MESSAGE_S)), _MOST)
            if trial.is_enough(arrivals):
                size = 0
            else:
                sizes.append(size)
                coming.append(receive(size))
            self.size.fill_(size)
            send_size()()
        return trial.sample(arrivals)


def _unasked_sizes(trial: Trial) -> list[int]:
    """Bytes of the messages that are not asked for."""
    nbytes = min(trial.nbytes or _LEAST, _MOST)
    return [nbytes] * (1 if trial.is_short else _UNDER_WAY)


def probe_pairs(
    transport: Transport,
    budget_s: float,
    limit_s: float,
    in_turn: Callable[[Callable[[], object]], object] = lambda turn: turn(),
) -> Measurements:
    """Measure all pairs of ranks over a connected transport; all ranks call it, and get the same.

    Each message has the time limit; the measurement takes about ``budget_s``. ``in_turn`` calls the
    function of each trial. Errors are those of `ringcoll.probe`.
    """
    prober, plan = _Prober(transport, limit_s), trials(transport.hosts, budget_s)
    numbers: list[dict[Pair, Sample] | None] = [None]

    def measure() -> None:
        numbers.append(prober.trial(trial))

    in_turn(prober.greet)
    while True:
        try:
            trial = plan.send(numbers.pop())
        except StopIteration as end:
            measurements: Measurements = end.value
            return measurements
        in_turn(measure)


_LIMIT_S = 10.0  # of a message


def measurements(group: Any = None, budget_s: float = 20.0) -> Measurements:
    """What `probe` measures, as numbers of pairs of ranks.

    Examples
    --------
    >>> import ringcoll
    >>> measured = ringcoll.run_threads(lambda group: measurements(group, 0.5), 2)[0]
    >>> sorted(measured.latency_s)
    [(0, 1), (1, 0)]
    """
    budget_s, member = seconds_of(budget_s, "budget_s"), communicator(group, torch.device("cpu"))
    barrier(group)  # ranks may come as late as to any operation
    in_turn = partial(member.in_turn, name="probe")
    limit_s = min(_LIMIT_S, member.timeout_s)
    between_ranks = probe_pairs(member.transport, budget_s, limit_s, in_turn)
    assert member.table is not None
    return replace(between_ranks, rank_costs=member.table.parameters.of_rank)


def probe(group: Any = None, budget_s: float = 20.0) -> Topology:
    """Measure the network between a group's ranks: hosts, their cards, and the switches between.

    All ranks of the group call this; each gets the same topology. The messages are those of the
    group's transport for CPU tensors. Nothing else should run on these hosts meanwhile.

    Parameters
    ----------
    group
        As for `ringcoll.all_reduce`.
    budget_s
        Seconds to spend; hundreds of hosts take longer.

    Returns
    -------
    Topology
        The network as `ringcoll.simulate` takes it; `ringcoll.lab.simulation.topology_text` writes
        it.

    Raises
    ------
    CollectiveTimeoutError
        Nothing came from a rank to another; the message names both.
    PeerLostError
        A rank was lost.

    Examples
    --------
    >>> import ringcoll
    >>> network = ringcoll.run_threads(lambda group: ringcoll.probe(group, 0.5), 2)[0]
    >>> [link.name for link in network.links]
    ['0 -> host0', 'host0 -> 0', '1 -> host0', 'host0 -> 1']
    """
    return topology_of(measurements(group, budget_s))
