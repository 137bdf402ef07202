"""The catalogue of transports: one entry each; nothing else lists them.

A transport is one file and one entry. The file has a function ``check()``, which raises
`MissingExtraError` if the transport is not installed (`ArgumentError` if no extra installs it), and
``make(store, rank, world_size, device, timeout_s)``. It may have ``check_automatic()``, which
raises `ArgumentError` if ``"auto"`` is not to stand for it on this machine; and
``check_device(device)``, which raises `ArgumentError` if the transport is installed, but cannot
send a CUDA device's memory. Settings, `ringcoll.use`, choices of commands, messages about extras
and the costs for when nothing was measured are read from the entry. The catalogue imports no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from ringcoll.errors import ArgumentError, RingcollError
from ringcoll.runtime.machine import TRANSPORT_VARIABLES, forced_transport
from ringcoll.schedules.cost import LinkCosts

_log = logging.getLogger("ringcoll")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """All that the rest of the library has to know of a transport.

    Parameters
    ----------
    module
        The module with ``check`` and ``make``, and perhaps ``check_device`` and ``remark``.
    sends
        Types of devices whose memory it sends: ``"cpu"``, ``"cuda"``.
    stages
        Whether CUDA tensors may pass through host memory on their way.
    costs
        Costs of messages and bytes between two ranks of one host, unless they are measured.
    extra
        The extra of the package that installs the transport; ``None`` if torch brings it.
    automatic
        Whether ``"auto"`` may stand for the transport. ``"auto"`` stands for the first of these
        that is installed.
    """

    name: str
    module: str
    sends: tuple[str, ...]
    costs: LinkCosts
    stages: bool = False
    extra: str | None = None
    automatic: bool = True

    def carries(self, kind: str) -> bool:
        """Whether tensors of a type of device can be sent at all."""
        return kind in self.sends or (kind == "cuda" and self.stages)

    def check(self) -> None:
        """Raise `MissingExtraError` if it is not installed; `ArgumentError` if it has no extra."""
        self._function("check")()

    def check_automatic(self) -> None:
        """As `check`, and whether ``"auto"`` may stand for the transport here."""
        self.check()
        self._function("check_automatic", _accept)()

    def check_device(self, device: Any) -> None:
        """Raise `ArgumentError` if it cannot send the memory of a device in this process."""
        if device is not None and device.type == "cuda":
            self._function("check_device", _accept)(device)

    @property
    def remark(self) -> str:
        """What a user may want to know of the transport here; empty if there is nothing."""
        return str(self._function("remark", str)())

    @property
    def make(self) -> Callable[..., Any]:
        """Makes a transport, from (store, rank, world_size, device, timeout_s)."""
        return self._function("make")

    def _function(self, name: str, *default: Callable[..., Any]) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(import_module(self.module), name, *default)
        return function


def _accept(*device: Any) -> None:
    """The check of a module that has none."""


# Costs: alpha, beta, gamma, further messages. Two ranks on one host, by `ringcoll tune` on 2
# cores. For NCCL, which has not been measured, an order of magnitude.
_ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            name="nccl",
            module="ringcoll.runtime.transport.nccl",
            sends=("cuda",),
            costs=LinkCosts(10e-6, 0.02e-9, 0.001e-9, 2e-6),
        ),
        Entry(
            name="shared",
            module="ringcoll.runtime.transport.shared.transport",
            sends=("cpu",),
            costs=LinkCosts(3e-6, 0.1e-9, 0.15e-9, 2e-6),
        ),
        Entry(
            name="ucx",
            module="ringcoll.runtime.transport.ucx",
            sends=("cpu", "cuda"),
            costs=LinkCosts(6e-6, 0.1e-9, 0.15e-9, 3e-6),
            extra="ucx",
        ),
        Entry(
            name="gloo",
            module="ringcoll.runtime.transport.gloo",
            sends=("cpu",),
            stages=True,
            costs=LinkCosts(60e-6, 0.5e-9, 0.15e-9, 30e-6),
        ),
    )
}
_GONE = {
    "mpi": "MPI as a transport is gone: ranks that mpiexec or srun has started use any of these"
}
_LOCAL = LinkCosts(30e-6, 0.1e-9, 0.15e-9, 10e-6)  # between threads of one process


def add(new: Entry) -> None:
    """Add a transport from outside the package; every process of a group has to.

    Raises `ArgumentError` if there is a transport of that name.
    """
    if new.name in (*_ENTRIES, "auto", "local"):
        raise ArgumentError("there is such a transport", "name", "a new name", new.name)
    _ENTRIES[new.name] = new


def entries() -> tuple[Entry, ...]:
    """All transports, in the order in which ``"auto"`` tries them."""
    return tuple(_ENTRIES.values())


def names(kind: str) -> tuple[str, ...]:
    """Names of the transports that carry tensors of ``"cpu"`` or ``"cuda"``."""
    return tuple(entry.name for entry in entries() if entry.carries(kind))


def entry(name: str) -> Entry:
    """The entry of a transport; `ArgumentError` if there is none."""
    if name not in _ENTRIES:
        what = _GONE.get(name, "no such transport")
        raise ArgumentError(what, "transport", _listed(_ENTRIES), name)
    return _ENTRIES[name]


def lacking(name: str) -> str:
    """Why a transport cannot be used here; empty if it can, or if there is none of that name."""
    try:
        if name in _ENTRIES:
            _ENTRIES[name].check()
    except RingcollError as error:
        return str(error)
    return ""


def costs_of(name: str) -> LinkCosts:
    """Costs unless they are measured; an unlisted transport gets the costs of gloo."""
    if name == "local":
        return _LOCAL
    return _ENTRIES.get(name, _ENTRIES["gloo"]).costs


def _listed(known: Any) -> str:
    return f"one of {', '.join(known)}"


def _argument(kind: str) -> str:
    return "transport" if kind == "cpu" else "cuda_transport"


def named(kind: str, asked: str | None, rank: int | None = None) -> str:
    """Name the transport for tensors of ``"cpu"`` or ``"cuda"``; ``"auto"`` stays ``"auto"``.

    ``asked`` is the choice of the program, which the environment overrides. Raises `ArgumentError`,
    with the rank, if there is no transport of that name for such tensors.
    """
    asked = "auto" if asked is None else asked
    forced = forced_transport(kind)
    known = ("auto", *names(kind))
    for what, name in ((_argument(kind), asked), (TRANSPORT_VARIABLES[kind], forced)):
        if name is not None and name not in known:
            raise ArgumentError(
                _GONE.get(name, "no such transport"), what, _listed(known), name, rank
            )
    return forced or asked


@cache
def _automatic(kind: str, but: str = "", device: Any = None) -> str:
    unusable: list[tuple[str, RingcollError]] = []
    for entry in entries():
        if not entry.automatic or not entry.carries(kind) or entry.name == but:
            continue
        try:
            entry.check_automatic()
        except RingcollError as error:
            _log.debug('"auto" does not stand for %s: %s', entry.name, error)
            continue
        try:
            entry.check_device(device)
        except RingcollError as error:  # it is installed: somebody may count on it
            unusable.append((entry.name, error))
            continue
        for name, reason in unusable:
            _log.warning('"auto" stands for %s on %s, not %s: %s', entry.name, device, name, reason)
        return entry.name
    raise AssertionError("gloo is always there")


def beside(name: str, kind: str) -> Entry:
    """The transport that ``"auto"`` would stand for if the transport ``name`` were not there."""
    return _ENTRIES[_automatic(kind, name)]


def resolved(
    kind: str, asked: str | None = None, rank: int | None = None, device: Any = None
) -> str:
    """As `named`, also for ``"auto"``; ``device`` is ``None`` if it is not in use yet.

    If different transports are installed for different ranks, the ranks see it when they meet.
    Raises `MissingExtraError` if the transport is not installed, and `ArgumentError` if torch does
    not bring it, or it cannot send the memory of the device.
    """
    name = named(kind, asked, rank)
    if name == "auto":
        return _automatic(kind, device=device)
    try:
        entry(name).check()
        entry(name).check_device(device)
    except ArgumentError as error:  # no extra helps
        forced = forced_transport(kind)
        expected = _listed(other for other in ("auto", *names(kind)) if other != name)
        argument = TRANSPORT_VARIABLES[kind] if forced else _argument(kind)
        raise ArgumentError(str(error), argument, expected, name, rank) from None
    return name
