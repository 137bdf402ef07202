"""The costs of a group's messages, measured in some ten milliseconds.

The measurement uses the messages of `ringcoll.runtime.transport.base.Transport` only:

- Rank 0 and the last rank send a short and a long message back and forth (alpha and beta, as R.
  Hockney defines them), and several short messages in one step (overhead). The others wait.
- All ranks send at once (crowded alpha and beta): long messages to the next rank, short ones to the
  ranks 1, 2, 4, ... further, so that no rank is done before all have begun. (Ranks that share a
  core, and send to the next rank only, run many rounds ahead while they have the core.)
- All ranks add two vectors (gamma).

Messages are bound once, as those of a plan are. A long message in the memory of a host is too long
for caches, as are the data of a program between two calls: with messages of 1 MiB, predictions from
64 KiB on were 0.5 to 0.6 of the measured times. On a busy machine an exchange now and then takes
milliseconds longer. So the fastest exchange of two ranks counts; of all ranks the median exchange
counts, as the message of the fastest exchange had come before the rank asked for it.

Where a transport has two ways for a long message (`Transport.direct_from`), the two ranks first
send each other messages both ways, from 512 KiB down, and long ones whole and in slices
(`Transport.slice_bytes`). Rank 0 tells which way was quicker; the costs are those of that way. (If
all ranks sent, ranks that share cores would wait for each other at random.)

Costs of CUDA tensors are measured with CUDA tensors. Every step waits for the stream, as a rank
that reduces a message does. The host reads no message, which would take longer than the message. A
group measures by itself over transports with tags only; ``ringcoll tune`` measures NCCL.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from itertools import count
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ringcoll.errors import CollectiveTimeoutError
from ringcoll.runtime.operation import BoundInstruction, Posting, Program, Wait, run
from ringcoll.runtime.transport import Handle, Message, Transport, settle
from ringcoll.schedules.cost import Parameters

_TAG = 0x7E57C057  # of 31 bits; nothing else is under way meanwhile
_SHORT, _LONG = 8, 1 << 20  # bytes
_LONG_IN_MEMORY = 1 << 23  # both ranks' messages, sent and received, take 32 MiB
_LONG_IN_CACHE = 1 << 20
_LONG_ON_GPU = 1 << 24  # a GPU sends 1 MiB in less time than a message takes
_BUDGET_S = 0.012  # for each quantity; as long as a single round, if that takes longer
_MOST, _FEW = 50, 3  # rounds with short messages, and with long messages
_WAYS = (512 << 10, 256 << 10, 128 << 10, 64 << 10)  # bytes of messages that are sent both ways
_SLICED = 1 << 21  # bytes that are sent whole, and in slices
_SLICES = (1, 2)  # parts of the longest slice
_SWAPS = 6  # rounds of these
_CLEARLY = 0.75  # of the time in slices that a whole message has to take to be the quicker one
_AT_ONCE = 4  # messages in one step
_ADDED = 1 << 18  # bytes; what is added stays in a core's cache, as a chunk would
_ADDED_ON_GPU = 1 << 25  # bytes; it takes longer than the launch
_ADDITIONS = 20
CPU = torch.device("cpu")
_NOBODY: Any = SimpleNamespace(wait=None)  # watches the waits


class _Exchange:
    def __init__(
        self, transport: Transport, timeout_s: float, device: torch.device = CPU, long: int = _LONG
    ) -> None:
        self.transport, self.timeout_s, self.device = transport, timeout_s, device
        self.on_gpu = _is_gpu(device)
        self.long = _LONG_ON_GPU if self.on_gpu else long
        self.rank, self.world_size = transport.rank, transport.world_size
        self._deadline = time.monotonic() + timeout_s
        self.out = torch.zeros(self.long, dtype=torch.uint8, device=device)
        self.into = torch.zeros(self.long, dtype=torch.uint8, device=device)

    def ready(self, receives: list[Message], sends: list[Message]) -> Callable[[], None]:
        """Make a step ready, as a plan does: the function posts its messages, and waits."""
        return self.waiting(self.transport.bind(receives, sends), receives, sends)

    def waiting(
        self, start: Callable[[int], list[Handle]], receives: list[Message], sends: list[Message]
    ) -> Callable[[], None]:
        """A step that starts messages, and waits for them, as a plan's program does."""
        both = enumerate([*receives, *sends])
        waits = [Wait(n, message.peer, 0, n < len(receives)) for n, message in both]
        items: list[BoundInstruction] = [Posting(start, receives, sends), *waits]
        program = Program(items, self.transport.interpret(items, {}))

        def step() -> None:
            if time.monotonic() >= self._deadline:
                raise CollectiveTimeoutError(
                    f"rank {self.rank} could not measure within {self.timeout_s:g} s"
                )
            run(program, 0, self.transport.wait, self._deadline, _NOBODY)
            if self.on_gpu:
                settle([self.device])

        return step

    def sending(self, peer: int, nbytes: int, number: int = 1) -> Callable[[], None]:
        """A step that sends messages of so many bytes."""
        return self.ready([], _messages([peer] * number, self.out, nbytes))

    def receiving(self, peer: int, nbytes: int, number: int = 1) -> Callable[[], None]:
        """A step that receives messages of so many bytes."""
        return self.ready(_messages([peer] * number, self.into, nbytes), [])

    def shifting(self, distance: int, nbytes: int, number: int = 1) -> Callable[[], None]:
        """A step with messages to ranks so far ahead and beyond, and as many from behind."""
        k = self.world_size
        ways = [(distance - 1 + more) % (k - 1) + 1 for more in range(number)]
        receives = _messages([(self.rank - way) % k for way in ways], self.into, nbytes)
        sends = _messages([(self.rank + way) % k for way in ways], self.out, nbytes)
        return self.ready(receives, sends)

    def tell(self, peers: Iterable[int], word: int) -> None:
        """Send a number below 256."""
        self.out[0] = word
        for peer in peers:
            self.sending(peer, _SHORT)()

    def hear(self) -> int:
        """Receive the number that rank 0 tells."""
        self.receiving(0, _SHORT)()
        return int(self.into[0])


def _messages(peers: Iterable[int], memory: Tensor, nbytes: int) -> list[Message]:
    """A message for each peer, in one piece of memory after the other."""
    starts = zip(peers, count(0, nbytes), strict=False)
    return [Message(peer, memory[start : start + nbytes], _TAG) for peer, start in starts]


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _times(
    exchange: _Exchange, peers: Iterable[int], function: Callable[[], object], most: int
) -> list[float]:
    """Seconds of an exchange, again and again; rank 0 tells its peers how often."""
    function()  # sets the path up
    expected_s = _timed(function)
    if exchange.rank:
        rounds = exchange.hear()
    else:
        rounds = min(most, max(1, most // 5, int(_BUDGET_S / max(expected_s, 1e-6))))
        exchange.tell(peers, rounds)
    return [_timed(function) for _ in range(rounds)]


def _message_s(exchange: _Exchange, nbytes: int, most: int, number: int = 1) -> float:
    """Seconds of a message, or of several in one step, between two ranks: half a round trip."""
    last = exchange.world_size - 1  # with several hosts, on another host than rank 0
    if exchange.rank not in (0, last):
        return 0.0
    peer = last - exchange.rank
    give = exchange.sending(peer, nbytes, number)
    take = exchange.receiving(peer, nbytes, number)
    first, then = (take, give) if exchange.rank else (give, take)

    def there_and_back() -> None:
        first()
        then()

    return min(_times(exchange, [last], there_and_back, most)) / 2


def _crowded_s(
    exchange: _Exchange, distances: Iterable[int], nbytes: int, most: int, number: int = 1
) -> float:
    """Seconds of messages while all ranks send them, then some to a rank at another distance."""
    steps = [exchange.shifting(distance, nbytes, number) for distance in distances]

    def all_at_once() -> None:
        for step in steps:
            step()

    return median(_times(exchange, range(1, exchange.world_size), all_at_once, most)) / len(steps)


def _swap_s(exchange: _Exchange, nbytes: int, number: int = 1) -> float:
    """Seconds of an exchange of two ranks, each of which is as busy as in a collective."""
    last = exchange.world_size - 1
    if exchange.rank not in (0, last):
        return 0.0
    peers = [last - exchange.rank] * number
    both = (_messages(peers, memory, nbytes) for memory in (exchange.into, exchange.out))
    swap, fresh = exchange.ready(*both), exchange.out[: number * nbytes].bitwise_not_

    def write_and_swap() -> None:
        fresh()  # the message lies in the sender's cache, as a new sum does
        swap()

    return min(_times(exchange, [last], write_and_swap, _SWAPS))


def _exchange_s(exchange: _Exchange) -> float:
    transport = exchange.transport
    others = [peer for peer in range(transport.world_size) if peer != transport.rank]
    receives = [_messages([peer], exchange.into, _SHORT)[0] for peer in others]
    start = transport.bind_exchange(receives, exchange.out[:_SHORT], _TAG)
    sends = _messages(others, exchange.out[:_SHORT], 0)
    step = exchange.waiting(start, receives, sends)
    return median(_times(exchange, others, step, _MOST))


def _agreed(exchange: _Exchange, number: int) -> int:
    """Rank 0's number, which is below 256; all ranks have to send alike."""
    if exchange.rank:
        return exchange.hear()
    exchange.tell(range(1, exchange.world_size), number)
    return number


def _ways(exchange: _Exchange, crowd: float) -> tuple[int, int]:
    """Bytes from which a message is read at its sender's sooner than copied twice, and of slices.

    The latter are 0 if a long message is sent whole sooner.
    """
    transport, times = exchange.transport, []
    # Longer ones would have to be copied in turns, as there are few places for pieces.
    direct_from = _WAYS[0] + 1
    for nbytes in _WAYS:
        for transport.direct_from in (nbytes, nbytes + 1):
            times.append(_swap_s(exchange, nbytes))
        if not _agreed(exchange, times[-2] <= times[-1]):
            break
        direct_from = nbytes
    longest = transport.slice_bytes
    if longest is None:
        return direct_from, 0
    transport.direct_from = direct_from
    whole_s = _swap_s(exchange, _SLICED)
    transport.direct_from = max(direct_from, longest + 1)
    # A collective gains more: a slice is read where it lies, and written once for several ranks.
    sliced = [(whole_s / _CLEARLY, 0)]
    sliced += [(_swap_s(exchange, longest // by, by * _SLICED // longest), by) for by in _SLICES]
    if by := _agreed(exchange, min(sliced)[1]):
        # A message that is not cut, such as a block whose length only two ranks know, may go in
        # pieces as well. Where ranks share cores, each piece may wait for its turn.
        direct_from = transport.direct_from
        transport.direct_from = sys.maxsize
        copied_s = _swap_s(exchange, _SLICED)
        if _agreed(exchange, crowd == 1 and copied_s < whole_s):
            direct_from = sys.maxsize
        return direct_from, longest // by
    return direct_from, 0


def _additions(device: torch.device, nbytes: int) -> list[float]:
    left, right = (torch.ones(nbytes // 4, dtype=torch.float32, device=device) for _ in range(2))

    def add() -> None:
        left.add_(right)
        if _is_gpu(device):
            settle([device])

    return [_timed(add) for _ in range(_ADDITIONS)]


def _adding(device: torch.device, crowd: float) -> tuple[float, float]:
    """Seconds to add a byte to another byte: undisturbed, and while all ranks add."""
    if not _is_gpu(device):
        gamma_s = min(_additions(device, _ADDED)) / _ADDED
        return gamma_s, crowd * gamma_s
    launch_s, times = min(_additions(device, _ADDED)), _additions(device, _ADDED_ON_GPU)
    more = _ADDED_ON_GPU - _ADDED
    # All ranks add now, so the fastest addition is one that no other rank of the GPU has disturbed.
    gamma_s, crowded_s = (max(0.0, time - launch_s) / more for time in (min(times), median(times)))
    return gamma_s, crowded_s


def measure(
    transport: Transport,
    timeout_s: float,
    *,
    hosts: int = 1,
    cores: int | None = None,
    device: torch.device = CPU,
) -> Parameters:
    """Measure what messages, bytes and additions cost on a device; all ranks take part.

    The transport is connected, and has no messages under way; for CPU tensors it has tags. The
    ranks of a host share its ``cores``. Only rank 0's costs count: rank 0 alone knows how long a
    message takes between two ranks.
    """
    has_ways = transport.direct_from is not None and hosts == 1  # on all ranks, or on none
    exchange = _Exchange(transport, timeout_s, device, _LONG_IN_MEMORY if has_ways else _LONG)
    crowd = max(1.0, -(-exchange.world_size // hosts) / cores) if cores else 1.0
    direct_from = slice_bytes = 0
    if has_ways:
        direct_from, slice_bytes = _ways(exchange, crowd)
        transport.direct_from = direct_from
    gamma_s, crowded_gamma_s = _adding(device, crowd)
    nbytes = exchange.long
    long = slice_bytes or nbytes, _FEW, nbytes // (slice_bytes or nbytes)
    short_s, long_s = _message_s(exchange, _SHORT, _MOST), _message_s(exchange, *long)
    several_s = _message_s(exchange, _SHORT, _MOST, _AT_ONCE)
    distances = [1 << power for power in range((exchange.world_size - 1).bit_length())]
    crowded_s = _crowded_s(exchange, distances, _SHORT, _MOST)
    # Where ranks share cores, all ranks at once measure it better: two ranks mostly sleep.
    crowded_several_s = _crowded_s(exchange, distances, _SHORT, _MOST, _AT_ONCE)
    further_s = min(several_s - short_s, (crowded_several_s - crowded_s) / crowd)
    crowded_long_s = _crowded_s(exchange, [1], *long)
    cached_s = crowded_cached_s = 0.0  # of a byte
    if slice_bytes:
        few = slice_bytes, _MOST, _LONG_IN_CACHE // slice_bytes
        cached_s = max(gamma_s, (_message_s(exchange, *few) - short_s) / _LONG_IN_CACHE)
        crowded_cached_s = (_crowded_s(exchange, [1], *few) - crowded_s) / _LONG_IN_CACHE
    # A message reads and writes each byte, as an addition does. A crowd makes nothing faster.
    beta_s = max(gamma_s, (long_s - short_s) / nbytes)
    return Parameters(
        alpha_s=short_s,
        beta_s_per_byte=beta_s,
        gamma_s_per_byte=gamma_s,
        # A further message costs no more than a single message.
        overhead_s=min(short_s, max(0.0, further_s) / (_AT_ONCE - 1)),
        crowded_alpha_s=max(short_s, crowded_s),
        crowded_beta_s_per_byte=max(beta_s, (crowded_long_s - crowded_s) / nbytes),
        crowded_gamma_s_per_byte=crowded_gamma_s,
        direct_from=direct_from,
        slice_bytes=slice_bytes,
        exchanges_to=transport.exchanges_to,
        exchange_s=_exchange_s(exchange) if transport.exchanges_to else 0.0,
        cached_beta_s_per_byte=cached_s,
        crowded_cached_beta_s_per_byte=max(cached_s, crowded_cached_s),
    )
