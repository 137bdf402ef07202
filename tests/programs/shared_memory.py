"""Messages through shared memory, as functions that the ranks of a pool run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import PeerLostError, TransportError
from ringcoll.runtime.collectives import StoreGroup, communicator
from ringcoll.runtime.launch import report
from ringcoll.runtime.transport import (
    EXCHANGED,
    PIECE,
    PIECES,
    SHORT,
    AroundTransport,
    Message,
    SharedMemory,
    SharedTransport,
)
from ringcoll.runtime.transport.shared import channel as shared_channel
from ringcoll.runtime.transport.shared import memory as shared_memory
from ringcoll.runtime.transport.shared import transport as shared
from tests.programs.transports import LIMIT_S, transport_of_all

# Around the ends of the ways in which messages travel.
LENGTHS = (
    0,
    1,
    7,
    4096,
    SHORT - 1,
    SHORT,
    SHORT + 1,
    100_000,
    256 << 10,
    (512 << 10) + 13,
    1 << 20,
)


def content(source: int, number: int, nbytes: int) -> torch.Tensor:
    """Bytes that no other message has, as far as that goes."""
    return (torch.arange(nbytes) * 31 + 1000 * source + number).to(torch.uint8)


def random_messages(transport_name: str, seed: int, rounds: int) -> list[str]:
    """Messages of all lengths to all peers, posted and waited for in random order."""
    transport = transport_of_all(transport_name)
    rank, size = transport.rank, transport.world_size
    wrong: list[str] = []
    for turn in range(rounds):
        common, own = Random(seed + turn), Random(1000 * rank + turn)
        # The same on all ranks: who sends what to whom; order is kept for each pair and tag.
        plan = [
            (source, target, common.randrange(3), number, common.choice(LENGTHS))
            for number in range(40)
            for source in range(size)
            for target in [common.choice([peer for peer in range(size) if peer != source])]
        ]
        arriving = [item for item in plan if item[1] == rank]
        leaving = [item for item in plan if item[0] == rank]
        received = [torch.full((item[4],), 99, dtype=torch.uint8) for item in arriving]
        receives = [
            Message(source, tensor, tag)
            for (source, _, tag, _, _), tensor in zip(arriving, received, strict=True)
        ]
        sends = [Message(target, content(rank, n, length), tag)
                 for _, target, tag, n, length in leaving]  # fmt: skip
        handles: list[Any] = []
        while receives or sends:  # in posts of random sizes, so that some messages come early
            first, last = own.randrange(6), own.randrange(6)
            handles += transport.post(receives[:first], sends[:last])
            receives, sends = receives[first:], sends[last:]
        own.shuffle(handles)
        for handle in handles:
            transport.wait(handle, LIMIT_S)
        for (source, _, _, number, length), tensor in zip(arriving, received, strict=True):
            if not torch.equal(tensor, content(source, number, length)):
                wrong.append(f"round {turn}: message {number} of {length} bytes from {source}")
    transport.close()
    return wrong


def spread_messages(transport_name: str, seed: int, rounds: int) -> tuple[list[str], int, int, int]:
    """Each rank sends a tensor to all others, who are late now and then, and keep what is lent for a while.

    Returns
    -------
    wrong, at_first, pieces, written
        What was wrong; how often a piece was written for as many as there are places for, each to all others;
        the pieces of all later messages, and how many of them were written.
    """
    transport = transport_of_all(transport_name)
    assert isinstance(transport, SharedTransport)
    rank, size = transport.rank, transport.world_size
    others = [peer for peer in range(size) if peer != rank]
    wrong: list[str] = []
    pieces = 0
    assert transport.pieces is not None
    dist.barrier()
    sent = [content(rank, n, PIECE) for n in range(PIECES)]
    into = {
        (peer, n): torch.zeros(PIECE, dtype=torch.uint8) for n in range(PIECES) for peer in others
    }
    receives = [Message(key[0], tensor, 0) for key, tensor in into.items()]
    sends = [Message(peer, tensor, 0) for tensor in sent for peer in others]
    for handle in transport.post(receives, sends):
        transport.wait(handle, LIMIT_S)
    wrong += [
        f"message {key}" for key, got in into.items() if not torch.equal(got, content(*key, PIECE))
    ]
    at_first = transport.pieces.num_written
    for turn in range(rounds):
        common, own = Random(seed + turn), Random(1000 * rank + turn)
        nbytes = common.choice([SHORT + 8, PIECE - 8, PIECE, PIECE + 8, 3 * PIECE + 16]) // 8 * 8
        number = common.randrange(1, 5)
        sent = [content(rank, n, nbytes) for n in range(number)]
        into = {(peer, n): torch.full((nbytes,), 99, dtype=torch.uint8)
                for n in range(number) for peer in others}  # fmt: skip
        lent = {key: own.random() < 0.7 for key in into}
        time.sleep(own.choice([0, 0, 0.002]))
        receives = [Message(key[0], into[key], 0, lent[key]) for key in into]
        sends = [Message(peer, tensor, 0) for tensor in sent for peer in others]
        handles = transport.post(receives, sends)
        pieces += number * len(others) * -(-nbytes // PIECE)
        for key, handle in zip(into, handles, strict=False):
            transport.wait(handle, LIMIT_S)
            came: torch.Tensor | None = into[key]
            if lent[key]:
                time.sleep(own.choice([0, 0.001]))
                came = transport.view(handle, torch.uint8)
            if came is None or not torch.equal(came, content(*key, nbytes)):
                wrong.append(f"round {turn}: message {key} of {nbytes} bytes, lent {lent[key]}")
            if lent[key]:
                transport.release(handle)
        for handle in handles[len(into) :]:
            transport.wait(handle, LIMIT_S)
        for tensor in sent:
            tensor.zero_()
    written = transport.pieces.num_written - at_first
    transport.close()
    return wrong, at_first, pieces, written


def exchanges(transport_name: str, seed: int, rounds: int) -> list[str]:
    """Messages of each rank to all others, of other lengths each, among messages of pairs; ranks are late now and then."""
    transport = transport_of_all(transport_name)
    rank, size = transport.rank, transport.world_size
    others = [peer for peer in range(size) if peer != rank]
    wrong: list[str] = []
    bound: dict[tuple[int, ...], tuple[Any, ...]] = {}
    for turn in range(rounds):
        common, own = Random(seed + turn), Random(1000 * rank + turn)
        lengths = tuple(common.choice([0, 1, 8, 1000, EXCHANGED]) for _ in range(size))
        if lengths not in bound:  # later turns run what was bound before
            into = {peer: torch.full((lengths[peer],), 99, dtype=torch.uint8) for peer in others}
            sent = torch.zeros(lengths[rank], dtype=torch.uint8)
            lent = [own.random() < 0.5 for _ in others]
            receives = [Message(peer, into[peer], 3, is_lent)
                        for peer, is_lent in zip(others, lent, strict=True)]  # fmt: skip
            bound[lengths] = into, sent, lent, transport.bind_exchange(receives, sent, 3)
        into, sent, lent, exchange = bound[lengths]
        sent.copy_(content(rank, turn, lengths[rank]))
        time.sleep(own.choice([0, 0, 0, 0.002]))
        if common.random() < 0.3:
            ahead, behind = (rank + 1) % size, (rank - 1) % size
            came = torch.zeros(100, dtype=torch.uint8)
            pair = [Message(behind, came, 3)], [Message(ahead, content(rank, turn, 100), 3)]
            for handle in transport.post(*pair):
                transport.wait(handle, LIMIT_S)
            if not torch.equal(came, content(behind, turn, 100)):
                wrong.append(f"turn {turn}: a message of a pair")
        handles = exchange(turn)
        waited = list(range(len(handles)))
        own.shuffle(waited)
        for index in waited:
            transport.wait(handles[index], LIMIT_S)
        for position, peer in enumerate(others):
            is_lent = lent[position]
            tensor = exchange.view(position, exchange.place) if is_lent else into[peer]
            if not torch.equal(tensor, content(peer, turn, lengths[peer])):
                wrong.append(f"turn {turn}: of rank {peer}, {lengths[peer]} bytes, lent {is_lent}")
    transport.close()
    return wrong


def exchange_of_others() -> str:
    """What a rank is told if the ranks do not agree on an exchange."""
    transport = transport_of_all("shared")
    peer, into = 1 - transport.rank, torch.zeros(4)
    handles = transport.bind_exchange([Message(peer, into, 5)], torch.ones(4), 5)(transport.rank)
    try:
        transport.wait(handles[0], 0.3)
    except TransportError as error:
        assert not into.any(), "nothing is written"
        return str(error)
    return "nothing"


def with_faults_on_a_rank() -> tuple[list[float], int]:
    """A sum where the messages of rank 1 alone are disturbed, and up to which length there are exchanges."""
    group = dist.new_group()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setenv("RINGCOLL_FAULTS", "seed=1,delay=0.5")
        ringcoll.use(group, transport="shared")
        tensor = torch.arange(3.0) + dist.get_rank()
        ringcoll.all_reduce(tensor, group=group, algorithm="direct", timeout=LIMIT_S)
    return tensor.tolist(), communicator(group, torch.device("cpu")).transport.exchanges_to


def with_fences(transport_name: str, rounds: int) -> tuple[list[str], set[str]]:
    """`random_messages` with the fences of other processors; what was wrong, and what fences were seen between."""
    seen: set[str] = set()

    def noting() -> None:
        frame = sys._getframe(1)
        known, name = frame.f_locals, frame.f_code.co_name
        if name in ("start", "_put") and "at" in known:
            words, at = known["words"], known["at"]
            if words[at] != known["number"] and words[at + 3] == known["send"].tag:
                seen.add("before a number is stored")
        elif name == "take" and known["self"].has_come():
            seen.add("after a number was seen")
        shared_memory.fence()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_channel, "FENCES", True)
        patch.setattr(shared_channel, "fence", noting)
        return random_messages(transport_name, 5, rounds), seen


def lent_messages(transport_name: str) -> list[object]:
    """A send is over when its loan is; until then the receiver reads what it likes, in any order."""
    transport = transport_of_all(transport_name)
    rank, numel = transport.rank, 50_000
    found: list[object] = [transport.lends_from == SHORT + 1]
    if rank == 0:
        (sending,) = transport.post([], [Message(1, torch.arange(numel), 0)])
        begin = time.monotonic()
        transport.wait(sending, LIMIT_S)
        found.append(time.monotonic() - begin > 0.2)
    else:
        into = torch.full((numel,), -1)
        (receiving,) = transport.post([Message(0, into, 0, lent=True)], [])
        transport.wait(receiving, LIMIT_S)
        time.sleep(0.3)
        scratch = torch.empty(100, dtype=torch.int64)
        for start in (900, 0, numel - 100):
            transport.read(receiving, start, scratch)
            found.append(scratch.tolist() == list(range(start, start + 100)))
        transport.release(receiving)
    transport.close()
    return found


def ways() -> list[bool]:
    """Whether a send was over at once, as its message was copied: for lengths below and at the limit, and another limit."""
    transport = transport_of_all("shared")
    found = []
    for transport.direct_from in (100_000, 200_000):
        for nbytes in (99_999, 100_000, 199_999, 200_000):
            into = torch.zeros(nbytes, dtype=torch.uint8)
            peer = 1 - transport.rank
            sent = content(transport.rank, nbytes, nbytes)
            receiving, sending = transport.post([Message(peer, into, 0)], [Message(peer, sent, 0)])
            found.append(sending is None)
            transport.wait(receiving, LIMIT_S)
            transport.wait(sending, LIMIT_S)
            assert torch.equal(into, content(peer, nbytes, nbytes))
    transport.close()
    return found


def measured_ways() -> list[int | None]:
    """The length from which on messages are read: before the ranks have met, as measured, and afterwards."""
    group = dist.new_group()
    ringcoll.use(group, transport="shared")
    own = communicator(group, torch.device("cpu"))
    before = own.transport.direct_from
    ringcoll.all_reduce(torch.ones(1), group=group)
    assert own.table is not None
    return [before, own.table.parameters.direct_from, own.transport.direct_from]


def lengths_that_differ() -> str:
    """What a rank is told that asks for fewer bytes than are sent."""
    transport = transport_of_all("shared")
    found = "nothing"
    try:
        if transport.rank == 0:
            handles = transport.post([], [Message(1, torch.zeros(5), 0)])
        else:
            handles = transport.post([Message(0, torch.zeros(4), 0)], [])
        transport.wait(handles[0], LIMIT_S)
    except TransportError as error:
        found = str(error)
    dist.barrier()
    transport.close()
    return found


def dies_with_a_loan(when: str) -> None:
    """Rank 1 is killed: before it reads what rank 0 sends, or while rank 0 reads what it sends."""
    transport = transport_of_all("shared")
    big = torch.zeros(1 << 20)
    if transport.rank == 1:
        if when == "reading":
            (handle,) = transport.post([Message(0, big, 0, lent=True)], [])
            transport.wait(handle, LIMIT_S)
        else:
            transport.post([], [Message(0, big, 0)])
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        if when == "reading":
            (handle,) = transport.post([], [Message(1, big, 0)])
            transport.wait(handle, LIMIT_S)
        else:
            (handle,) = transport.post([Message(1, big, 0, lent=True)], [])
            transport.wait(handle, LIMIT_S)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                transport.read(handle, 0, torch.empty(1000))
                transport.release(handle)
                (handle,) = transport.post([Message(1, big, 1, lent=True)], [])
                transport.wait(handle, LIMIT_S)
    except PeerLostError as error:
        report((str(error), error.peer, time.monotonic() - begin))


def gives_up_while_it_sends() -> str:
    """Rank 0 does not trust what it reads when rank 1 has given up; in words, what it is told."""
    transport = transport_of_all("shared")
    big = torch.zeros(1 << 20)
    if transport.rank == 1:
        transport.post([], [Message(0, big, 0)])
        time.sleep(0.3)
        transport.abort()
        big.fill_(7)  # as its owner may, then
        dist.barrier()
        dist.barrier()  # until then the memory is there
        return ""
    (handle,) = transport.post([Message(1, torch.zeros(1 << 20), 0, lent=True)], [])
    transport.wait(handle, LIMIT_S)
    dist.barrier()
    try:
        transport.read(handle, 0, torch.empty(1000))
        transport.release(handle)
    except PeerLostError as error:
        return str(error)
    finally:
        dist.barrier()
    return "nothing"


def mapped() -> int:
    """Shared memory of groups that this process has mapped."""
    return sum(
        "memfd:ringcoll" in line for line in Path("/proc/self/maps").read_text().splitlines()
    )


def memory_comes_and_goes(num_groups: int) -> list[int]:
    """Mappings after each of two rounds of groups."""
    found = []
    for _ in range(2):
        for _ in range(num_groups):
            group = dist.new_group()
            ringcoll.use(group, transport="shared")
            ringcoll.all_reduce(torch.ones(20_000), group=group, algorithm="two_shot")
            dist.barrier()
            ringcoll.close(group)
            dist.destroy_process_group(group)
        found.append(mapped())
    return found


def without(what: str) -> str:
    """The error of a rank on a machine that refuses memory, or the memory of other processes."""

    def refuse(*arguments: object, **options: object) -> Any:
        raise PermissionError(1, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        if what == "memory":
            patch.setattr(shared, "free_bytes", lambda: 1000)
        else:
            patch.setattr(SharedMemory, what, refuse)
        transport = SharedTransport(
            dist.PrefixStore(f"without {what}", dist.distributed_c10d._get_default_store()),
            dist.get_rank(),
            dist.get_world_size(),
        )
        found = "nothing"
        try:
            transport.connect(5.0)
        except TransportError as error:
            found = str(error)
        transport.close()
    return found


def one_cannot_open(asked: str | None, verify_messages: bool) -> str:
    """A sum, and over which transport, where rank 1 cannot open the memory of others; or the error."""

    own = SharedMemory.open

    def refuse(pid: int, *arguments: Any, **options: Any) -> SharedMemory:
        if pid != os.getpid():
            raise PermissionError(1, "Operation not permitted")
        return own(pid, *arguments, **options)

    name = f"cannot open {asked} {verify_messages}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(SharedMemory, "open", refuse)
        size, verify = dist.get_world_size(), verify_messages
        group = StoreGroup(store, rank, size, 20.0, asked, verify_messages=verify)
        tensor = torch.full((100_000,), rank + 1.0)
        try:
            ringcoll.all_reduce(tensor, group=group)
        except TransportError as error:
            return f"{type(error).__name__}: {error}"
        finally:
            over: Any = group.communicator.transport
            while isinstance(over, AroundTransport):
                over = over.below
            table = group.communicator.table
            group.close()
    (total,) = tensor.unique().tolist()
    assert table is not None
    assert table.transport == over.name
    return f"{total} over {over.name}{', verified' * over.verifies}"


def closed_by_another_thread() -> str:
    """A rank that sleeps is told when another of its threads closes the transport."""
    transport = transport_of_all("shared")
    (handle,) = transport.post([Message(1 - transport.rank, torch.zeros(1), 0)], [])
    threading.Timer(0.3, transport.close).start()
    try:
        transport.wait(handle, LIMIT_S)
    except PeerLostError as error:
        return str(error)
    return "nothing"
