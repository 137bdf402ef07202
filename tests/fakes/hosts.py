"""Several hosts on this machine: name spaces that share nothing, joined by a switch.

Each host has a network, process ids, shared memory, mounts and a host name of its own::

    host 0: eth0 10.77.0.1 ---+
                              +--- switch 10.77.0.254
    host 1: eth0 10.77.0.2 ---+

No name space has a name, and none outlives the processes in it: each is held by a process
that ends when the one that made it ends, in whatever way, and all interfaces go with it.
Nothing is added to the machine's own network.

It takes root and ``ip``; a link's rate takes the kernel's ``tbf``. Delays would take
``netem``, which not every kernel has: nothing here needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch.distributed as dist

from ringcoll.runtime.launch import Ranks
from ringcoll.runtime.launch.processes import _join_and_obey
from ringcoll.runtime.rendezvous import serve_store

__all__ = ["APART", "SWITCH", "HostRanks", "Hosts", "Place", "reason_why_not"]

APART = ("net", "ipc", "pid", "mount", "uts")
"""Kinds of name spaces, as ``unshare`` calls them."""

_NETWORK = "10.77.0"
SWITCH = f"{_NETWORK}.254"
"""The address of the switch."""
_FILES = {"mount": "mnt"}  # in /proc/PID/ns they have other names
_PR_SET_PDEATHSIG = 1
_CLONE_FS = 0x200


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


class Place(NamedTuple):
    """A host, for processes that enter it: who holds its name spaces, their kinds, and its address."""

    pid: int
    kinds: tuple[str, ...]
    address: str

    def enter(self) -> None:
        """Move this process, which has one thread, into the host; pid: its children."""
        directory = Path.cwd()
        _enter(self.pid, [kind for kind in self.kinds if kind != "mount"])
        if "mount" in self.kinds:  # last: the others are found in the /proc of here
            _libc().unshare(_CLONE_FS)  # another thread's directory would forbid it
            _enter(self.pid, ["mount"])
            os.chdir(directory)


def _enter(pid: int, kinds: Sequence[str]) -> None:
    """Move the calling thread into another process's name spaces; pid: its children."""
    opened = [os.open(f"/proc/{pid}/ns/{_FILES.get(kind, kind)}", os.O_RDONLY) for kind in kinds]
    for file in opened:
        if _libc().setns(file, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


class _Space:
    """A process that holds name spaces open until its input ends."""

    def __init__(
        self, kinds: Sequence[str], script: str = "true", network_of: _Space | None = None
    ) -> None:
        self.kinds = tuple(kinds)
        lent = ["nsenter", "-t", f"{network_of.pid}", "-n"] if network_of is not None else []
        options = [f"--{kind}" for kind in dict.fromkeys(kinds)]
        if "pid" in kinds:
            options += ["--fork", "--mount-proc"] if "mount" in kinds else ["--fork"]
        commands = f"set -e; {script}; echo ready; exec cat"
        self.process = subprocess.Popen(
            [*lent, "unshare", *options, "sh", "-c", commands],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the process that made it
        )
        try:
            self.pid: int = self._holder()
        except BaseException:
            self.close()
            raise

    def _holder(self) -> int:
        """The process that holds the name spaces, once it has made them."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if self.process.stdout.readline() != "ready\n":
            raise OSError(self.process.stderr.read().strip())
        pid = self.process.pid
        if "pid" not in self.kinds:
            return pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if len(children) != 1:
            raise OSError("the holder of the name spaces is not found")
        return int(children[0])

    def ip(self, *arguments: str) -> None:
        """Run ``ip`` in the network of this space."""
        _call("nsenter", "-t", f"{self.pid}", "-n", "ip", *arguments)

    def tc(self, *arguments: str) -> None:
        """Run ``tc`` in the network of this space."""
        _call("nsenter", "-t", f"{self.pid}", "-n", "tc", *arguments)

    def close(self) -> None:
        """Let go of the name spaces; what runs in them is killed with its process ids."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended by itself
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _script(names: Sequence[str], number: int, apart: Sequence[str], own: str) -> str:
    """What a host does first."""
    name = names[number]
    lines = ["ip link set lo up"]
    if "uts" in apart:
        lines.append(f"hostname {name}")
    if "mount" in apart:
        lines.append("mount -t tmpfs tmpfs /dev/shm")
        addresses = {each: f"{_NETWORK}.{index + 1}" for index, each in enumerate(names)}
        addresses |= {"switch": SWITCH, name: own or f"{_NETWORK}.{number + 1}"}
        lines_of_hosts = [f"{address} {each}\\n" for each, address in addresses.items()]
        told = f"127.0.0.1 localhost\\n{''.join(lines_of_hosts)}"
        lines.append("mount -t tmpfs tmpfs /media")
        lines.append(f"printf '{told}' > /media/hosts")
        lines.append("mount --bind /media/hosts /etc/hosts")
    return "; ".join(lines)


class Hosts:
    """Hosts on one switch.

    Parameters
    ----------
    number
        How many.
    names
        Their host names; the first one is every host's by default.
    apart
        The kinds of name spaces that each has for itself. Without ``"net"`` all of them
        have the network of the first, as containers may have that of their machine.
    own
        The address to which a host's name resolves on the host itself; by default that on the switch.
    mbit_per_s
        Rate of each host's link, in each direction; by default as fast as the machine. A mapping
        has the rates of some hosts.
    """

    def __init__(
        self,
        number: int,
        *,
        names: Sequence[str] | None = None,
        apart: Sequence[str] = APART,
        own: str = "",
        mbit_per_s: float | Mapping[int, float] | None = None,
    ) -> None:
        self.number, self.apart = number, tuple(apart)
        self._spaces: list[_Space] = []
        names = ["host"] * number if names is None else names
        rates = (
            mbit_per_s
            if isinstance(mbit_per_s, Mapping)
            else dict.fromkeys(range(number), mbit_per_s)
        )
        try:
            self.switch = self._add(_Space(["net"]))
            self.switch.ip("link", "add", "bridge", "type", "bridge")
            self.switch.ip("addr", "add", f"{SWITCH}/24", "dev", "bridge")
            self.switch.ip("link", "set", "bridge", "up")
            self.switch.ip("link", "set", "lo", "up")
            self.hosts: list[_Space] = []
            for index in range(number):
                if "net" in apart or not index:
                    host = self._add(_Space(["net", *apart], _script(names, index, apart, own)))
                    self._plug_in(index, host, rates.get(index))
                else:
                    first = self.hosts[0]
                    host = self._add(_Space(apart, _script(names, index, apart, own), first))
                self.hosts.append(host)
        except BaseException:
            self.close()
            raise

    def _add(self, space: _Space) -> _Space:
        self._spaces.append(space)
        return space

    def _plug_in(self, index: int, host: _Space, mbit_per_s: float | None) -> None:
        port = f"port{index}"
        link = ["link", "add", port, "type", "veth", "peer", "name", "eth0"]
        self.switch.ip(*link, "netns", f"{host.pid}")
        self.switch.ip("link", "set", port, "master", "bridge", "up")
        host.ip("addr", "add", f"{_NETWORK}.{index + 1}/24", "dev", "eth0")
        host.ip("link", "set", "eth0", "up")
        if mbit_per_s is not None:
            self._limit(index, host, mbit_per_s, "add")

    def _limit(self, index: int, host: _Space, mbit_per_s: float, change: str) -> None:
        for space, device in ((self.switch, f"port{index}"), (host, "eth0")):
            rate = ["tbf", "rate", f"{mbit_per_s}mbit", "burst", "128kb", "latency", "200ms"]
            space.tc("qdisc", change, "dev", device, "root", *rate)

    def limit(self, host: int, mbit_per_s: float) -> None:
        """Change the rate of a host's link, which has one from the beginning."""
        self._limit(host, self.hosts[host], mbit_per_s, "change")

    def place(self, host: int) -> Place:
        """A host, as a process can enter it."""
        space, index = self.hosts[host], host if "net" in self.apart else 0
        return Place(space.pid, ("net", *space.kinds), f"{_NETWORK}.{index + 1}")

    def store(self) -> dist.TCPStore:
        """Serve a store at the switch, which all hosts reach."""
        store: dist.TCPStore = _in_network(self.switch.pid, functools.partial(serve_store, SWITCH))
        return store

    def unplug(self, host: int) -> None:
        """Take a host off the switch: what is sent to or from it is lost, and nobody told."""
        self.switch.ip("link", "set", f"port{host}", "down")

    def close(self) -> None:
        """Remove everything."""
        for space in reversed(self._spaces):
            space.close()
        self._spaces.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _in_network(pid: int, function: Callable[[], Any]) -> Any:
    """Call a function in another process's network; sockets that it opens stay there."""
    results: list[Any] = []

    def main() -> None:
        try:
            _enter(pid, ["net"])  # of this thread, which ends
            results.append(function())
        except BaseException as error:  # noqa: BLE001  # raised below
            results.append(error)

    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
    (result,) = results
    if isinstance(result, BaseException):
        raise result
    return result


class HostRanks(Ranks):
    """A pool of ranks, as `ringcoll.runtime.launch.processes.Ranks`, on several hosts.

    Parameters
    ----------
    hosts
        The hosts.
    where
        The host of each rank.
    backend, timeout_s
        As for `ringcoll.runtime.launch.processes.Ranks`.
    environment
        Variables that all ranks get; by default torch's gloo is told the interface.
    """

    def __init__(
        self,
        hosts: Hosts,
        where: Sequence[int],
        *,
        backend: str | None = "gloo",
        timeout_s: float = 60.0,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.world_size, self.timeout_s = len(where), timeout_s
        self._store = hosts.store()
        told = {"GLOO_SOCKET_IFNAME": "eth0"} if environment is None else environment
        inherited = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"}

        def arguments(rank: int, theirs: Connection) -> tuple[object, ...]:
            meeting = (self._store.port, rank, self.world_size, timeout_s)
            return (
                hosts.place(where[rank]),
                (SWITCH, meeting, backend, 1, theirs),
                inherited | told,
            )

        self._start(_main, arguments)


def _main(
    place: Place,
    rank: tuple[str, tuple[int, int, int, float], str | None, int, Connection],
    environment: dict[str, str],
) -> None:
    """What a rank's process does: start another one on its host, and end as that ends."""
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    place.enter()
    child = os.fork()  # only children get other process ids
    if child:
        rank[-1].close()
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
            os.kill(os.getpid(), -code)
        os._exit(code)
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        _join_and_obey(*rank)
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


@functools.cache
def reason_why_not() -> str:
    """Why this machine cannot have several hosts; empty if it can."""
    if sys.platform != "linux":
        return "only Linux has name spaces"
    if os.geteuid():
        return "making network name spaces takes root"
    for command in ("ip", "unshare", "nsenter", "mount"):
        if shutil.which(command) is None:
            return f"there is no command {command}"
    try:
        with Hosts(1) as hosts:
            _in_network(hosts.switch.pid, lambda: None)
            return ""
    except OSError as error:
        return f"name spaces cannot be made: {error}"


@functools.cache
def reason_why_not_slow() -> str:
    """Why links cannot be slowed down; empty if they can."""
    if reason := reason_why_not():
        return reason
    if shutil.which("tc") is None:
        return "there is no command tc"
    try:
        with Hosts(1, mbit_per_s=100):
            return ""
    except OSError as error:
        return f"the kernel has no tbf: {error}"
