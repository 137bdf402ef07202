"""What a rank listens on, which shared files it has open, and what it tells through the store."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import RingcollError
from ringcoll.runtime.launch import rendezvous
from ringcoll.runtime.transport import GlooTransport, Message, catalogue

__all__ = [
    "Opened",
    "all_reduced",
    "connected",
    "listening",
    "on_no_interface",
    "own_segments",
    "tensor_result",
]


class Opened(NamedTuple):
    """What a rank has opened, and what is in the store at which it meets the others.

    ``listening`` are addresses of hosts, and paths; ``files`` maps paths in ``/dev/shm`` to
    modes; ``segments`` are the modes of shared memory of System V; ``told`` maps keys of the store to values.
    """

    listening: list[str]
    files: dict[str, int]
    segments: list[int]
    told: dict[str, str]


def listening() -> list[str]:
    """The hosts' addresses, paths and names without files (``@``), on which this process listens."""
    hosts = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not stat.S_ISSOCK(entry.stat().st_mode):
                continue
            opened = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # closed meanwhile
            continue
        with opened:
            is_known = opened.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
            if is_known and opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                address = opened.getsockname()
                if isinstance(address, bytes):
                    address = address.decode().replace("\0", "@")
                hosts.add(str(address[0] if isinstance(address, tuple) else address))
    return sorted(hosts)


def _files() -> dict[str, int]:
    files = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            name, mode = str(entry.readlink()), stat.S_IMODE(entry.stat().st_mode)
        except OSError:
            continue
        if name.startswith("/dev/shm"):
            files[name] = mode
    return files


def own_segments() -> list[int]:
    """Modes of the segments of System V's shared memory that this process has made and that still exist."""
    lines = [line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()]
    mode, made_by = map(lines[0].index, ("perms", "cpid"))
    return [int(line[mode], 8) for line in lines[1:] if line[made_by] == str(os.getpid())]


def connected(transport: str) -> Opened:
    """Connect ranks without a default group over a transport, and exchange a message."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    store, rank, world_size = rendezvous()
    store = dist.PrefixStore(f"listeners/{transport}", store)
    make = catalogue.entry(transport).make
    own = make(store, rank, world_size, torch.device("cpu"), 60.0)
    own.connect(60.0)
    peer = 1 - rank
    tensors = torch.zeros(2, 100_000)
    for handle in own.post([Message(peer, tensors[0], 1)], [Message(peer, tensors[1], 1)]):
        own.wait(handle, 60.0)
    opened = Opened(listening(), _files(), own_segments(), {})
    for handle in own.post([Message(peer, tensors[0], 2)], [Message(peer, tensors[1], 2)]):
        own.wait(handle, 60.0)  # both have looked
    own.close()
    return opened


def all_reduced(transport: str) -> Opened:
    """All-reduce on the default group, and return all that is in the store then."""
    ringcoll.use(None, transport=transport)
    ringcoll.all_reduce(torch.full((1000,), 77.0))
    store = rendezvous()[0]
    told = {key: store.get(key).decode(errors="replace") for key in store.list_keys()}
    ringcoll.barrier()
    return Opened(listening(), _files(), own_segments(), told)


def on_no_interface() -> str:
    """Connect over gloo, which is told an interface that is not there; the error."""
    os.environ["GLOO_SOCKET_IFNAME"] = "no_such_interface"
    store, rank, world_size = rendezvous()
    store = dist.PrefixStore("no interface", store)
    try:
        GlooTransport(store, rank, world_size).connect(60.0)
    except RingcollError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]
    return "connected"


def tensor_result() -> torch.Tensor:
    """A tensor, which travels to the parent through shared memory."""
    return torch.ones(1000)
