"""From the group that a user names, torch's or an `OwnGroup`, to this rank's communicator.

`share` moves the memory of tensors to where the other ranks of the host can read it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcoll.errors import (
    NESTED,
    ArgumentError,
    NestedCallError,
    RingcollError,
    SharingError,
    TransportError,
)
from ringcoll.runtime.group import Call, Communicator, Work, in_use
from ringcoll.runtime.machine import seconds_of, whole
from ringcoll.runtime.process import keep_in_forks
from ringcoll.runtime.rendezvous import ask_store, common_connection
from ringcoll.runtime.tensors import is_plain, with_memory
from ringcoll.runtime.transport import (
    Handle,
    Message,
    as_asked,
    can_move,
    catalogue,
    is_long,
    movable,
    move,
    streams,
)
from ringcoll.runtime.watch import Lives, Names

ANY_GPU = torch.device("cuda")
"""The current GPU of a process, whichever that is."""

messages_in_flight: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""Works of sends and receives; ``tensor`` of each is in use, and ``None`` after a wait for it."""

_DEFAULT_TIMEOUT_S = 1800.0  # torch's own default
# By group, without keeping it alive. A plain dictionary, because a look-up has to be quick.
_known: dict[weakref.ref[Any], dict[str, Communicator]] = {}
_making = threading.RLock()  # a function for a signal may make a call
_unfinished: weakref.WeakSet[Any] = weakref.WeakSet()  # groups whose communicator is being made
# Arguments of `use`: names of transports by type of device, and the other arguments by name.
_asked: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_times_closed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def peer_of(
    argument: str, peer: Any, rank: int, world_size: int, *, may_be_self: bool = False
) -> int:
    """The other rank of a message, as a number; gloo crashes on a rank that is not there.

    >>> peer_of("dst", 1, rank=0, world_size=2)
    1
    """
    peer = whole(peer)
    if isinstance(peer, int) and 0 <= peer < world_size and (peer != rank or may_be_self):
        return peer
    expected = f"{'a' if may_be_self else 'another'} rank of the group, in 0 to {world_size - 1}"
    raise ArgumentError("not a rank to exchange messages with", argument, expected, peer, rank)


@dataclass(eq=False, slots=True, weakref_slot=True)
class MessageWork:
    """A message of an `OwnGroup` on its way; ``tensor`` is in use until a wait for it has ended."""

    member: Communicator
    handle: Handle
    tensor: Tensor | None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is complete, at most the group's time limit by default."""
        limit_s = self.member.timeout_s if timeout is None else seconds_of(timeout)
        self.member.transport.wait(self.handle, limit_s)
        self.tensor = None
        return True


class OwnGroup:
    """One rank of a group that torch does not know: the group brings its communicator.

    `isend` and `irecv` are as those of ``torch.distributed``, in which a process group of torch has
    them. They follow the group's first collective, in which the ranks meet, and no operation runs
    meanwhile. Two ends that expect other lengths do not match, and their tags are apart from those
    of operations as the tags of two operations are.
    """

    retries = False  # whether calls go through `retried`

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def rank(self) -> int:
        """Rank of this process or thread."""
        return self.communicator.rank

    def size(self) -> int:
        """Number of ranks."""
        return self.communicator.world_size

    def on(self, device: torch.device) -> Communicator:
        """The communicator for tensors on a device."""
        return self.communicator

    def retried(self, make: Callable[[OwnGroup], Call], async_op: bool) -> Work | None:
        """Run a call that ``make`` makes for a group, in a way of the group's own."""
        raise NotImplementedError

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> MessageWork:
        """Start to send a contiguous tensor, which stays as it is until the message is complete."""
        return self._start(tensor, dst, tag, is_receive=False)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> MessageWork:
        """Start to receive into a contiguous tensor; messages of a tag arrive in order."""
        return self._start(tensor, src, tag, is_receive=True)

    def _start(self, tensor: Tensor, peer: int, tag: int, *, is_receive: bool) -> MessageWork:
        peer = peer_of("src" if is_receive else "dst", peer, self.rank(), self.size())
        tensor = with_memory(tensor, self.rank(), is_written=is_receive)
        if not is_plain(tensor):
            expected = "a contiguous tensor, no conjugate or negative view"
            got = f"strides {tensor.stride()}"
            raise ArgumentError(
                "cannot be sent or received into", "tensor", expected, got, self.rank()
            )
        member = self.on(tensor.device)
        member.check_usable()
        own = zlib.crc32(f"message {tag} of {tensor.nbytes} bytes".encode()) & 0x7FFFFFFF
        # As bytes: torch cannot copy every dtype. `data` has its own version, as in torch's
        # receives.
        messages = [Message(peer, tensor.data.view(-1).view(torch.uint8), own)]
        receives, sends = (messages, []) if is_receive else ([], messages)
        (handle,) = member.transport.post(receives, sends)
        work = MessageWork(member, handle, tensor)
        messages_in_flight[work] = None
        return work

    def close(self, drain_s: float = 0.0) -> None:
        """Release the group's resources, on all its ranks; the group cannot be used any more.

        ``drain_s`` is the time limit, in seconds, for operations that nobody has waited for yet.
        """
        self.communicator.close(drain_s)


class StoreGroup(OwnGroup):
    """One rank of a group for CPU tensors, whose ranks meet at a store.

    Parameters
    ----------
    store
        Store that all ranks see, and that nobody else uses.
    rank, world_size
        This rank, and number of ranks.
    timeout_s
        Time limit, in seconds, of operations that have no time limit of their own.
    transport, verify_messages
        As for `use`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        transport: str | None = None,
        *,
        verify_messages: bool | None = None,
    ) -> None:
        # A long wait on the user's connection would block it.
        common = ask_store(store, timeout_s, lambda: common_connection(store))
        lives = Lives(common, rank, world_size)
        where = lives, timeout_s, torch.device("cpu"), transport
        super().__init__(member_at(*where, verify_messages=verify_messages))

    def on(self, device: torch.device) -> Communicator:
        """The communicator for tensors on a device, which has to be the CPU."""
        if device.type != "cpu":
            raise ArgumentError(
                "this group is for CPU tensors", "tensor", "cpu", device, self.rank()
            )
        return self.communicator


def member_at(
    lives: Lives,
    timeout_s: float,
    device: torch.device,
    asked: str | None,
    *,
    prefix: str = "ringcoll",
    token: str = "",
    verify_messages: bool | None = None,
    fit: str | None = None,
) -> Communicator:
    """A rank's end of a group whose ranks meet at the store of lives, for tensors on a device."""
    rank, world_size = lives.rank, lives.world_size
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            "tensors on this device cannot be sent", "tensor", "cpu or cuda", device, rank
        )
    store = dist.PrefixStore(prefix, lives.store)
    if device == ANY_GPU:
        device = torch.device("cuda", streams.current_device())
    name = catalogue.resolved(device.type, asked, rank, device)
    # The same prefix for every transport: there the ranks see that they have different transports.
    meeting, monitor = dist.PrefixStore("transport", store), dist.PrefixStore("monitor", store)
    try:
        transport = catalogue.entry(name).make(meeting, rank, world_size, device, timeout_s)
    except OSError as error:  # no descriptors are left, for instance
        raise TransportError(f"rank {rank} cannot have the transport {name}: {error}") from error
    transport.is_automatic = catalogue.named(device.type, asked, rank) == "auto"
    transport = as_asked(transport, verify_messages=verify_messages)
    sends = None if device.type == "cpu" else device
    return Communicator(transport, monitor, timeout_s, sends, lives, fit, token)


def as_group(group: Any) -> OwnGroup | dist.ProcessGroup:
    """The group of an argument ``group``; see `communicator`.

    Raises
    ------
    ArgumentError
        The argument is not a group, there is no default group, or this process is not a member.
    """
    group = dist.GroupMember.WORLD if group is None else group
    if group is None:
        message = "there is no default group; call torch.distributed.init_process_group first"
        raise ArgumentError(message, "group")
    if isinstance(group, OwnGroup):
        return group
    no_member = "this process is not a member of the group"
    if not isinstance(group, dist.ProcessGroup):
        message = no_member if group == dist.GroupMember.NON_GROUP_MEMBER else "not a process group"
        expected = "a process group that this process is a member of"
        raise ArgumentError(message, "group", expected, repr(group))
    if group.rank() < 0:
        rank, ranks = dist.get_rank(), dist.get_process_group_ranks(group)
        raise ArgumentError(no_member, "group", f"one of the ranks {ranks}", f"rank {rank}", rank)
    return group


def communicator(group: Any, device: torch.device) -> Communicator:
    """The communicator of a group for tensors on a device; the first call makes it.

    The call waits for nobody; the ranks meet when the first operation runs.

    Parameters
    ----------
    group
        A process group of torch, a `LocalGroup`, or ``None`` for the default group.
    device
        Device of the tensors.

    Raises
    ------
    ArgumentError
        There is no default group, this process is not a member, tensors of that device
        cannot be sent, or the group's CUDA tensors were on another GPU so far.
    """
    if isinstance(group, OwnGroup):
        member = group.on(device)
    else:
        group = dist.GroupMember.WORLD if group is None else group
        try:
            member = _known[weakref.ref(group)][device.type]
        except (KeyError, TypeError):  # a new group, or no group at all
            member = _introduce(group, device)
    if member.device is not None and device not in (member.device, ANY_GPU):
        message = "the CUDA tensors of a group have to be on one device"
        raise ArgumentError(message, "tensor", member.device, device, member.rank)
    return member


def known(group: Any, tensor: Tensor) -> Communicator | None:
    """The communicator that a group already has for tensors on a device, or ``None``.

    Nothing is checked: a communicator for CUDA tensors may be for another GPU.
    """
    if isinstance(group, OwnGroup):
        return None if group.retries else group.on(tensor.device)
    try:  # asking for the type of the device takes longer than all the rest
        return _known[weakref.ref(group)]["cpu" if tensor.is_cpu else tensor.device.type]
    except (KeyError, TypeError):  # as above
        return None


def _introduce(group: Any, device: torch.device) -> Communicator:
    group = as_group(group)
    with _making:
        forget = lambda reference: _known.pop(reference, None)  # noqa: E731
        members = _known.setdefault(weakref.ref(group, forget), {})
        if device.type not in members:
            if group in _unfinished:
                raise NestedCallError(f"rank {group.rank()}: a call {NESTED}")
            _unfinished.add(group)
            try:
                member = members[device.type] = _make(group, device)
            finally:
                _unfinished.discard(group)
            # When torch lets go of the group, its threads, connections and memory end, too. At
            # the end of the process, the communicators close themselves.
            weakref.finalize(keep_in_forks(group), member.close).atexit = False
    return members[device.type]


def group_rank(group: Any, rank: int | None, in_group: int | None, what: str) -> int:
    """The root's rank in the group, from that or its global rank; ``what`` is its argument."""
    group = as_group(group)
    own, size = group.rank(), group.size()
    if (rank is None) == (in_group is None):
        message, got = "exactly one of the two must be given", f"{rank} and {in_group}"
        raise ArgumentError(message, f"{what}, group_{what}", "one rank", got, own)
    root, members, expected = whole(in_group), [*range(size)], f"0 to {size - 1}"
    if rank is not None:
        root = whole(rank)
        if isinstance(group, dist.ProcessGroup):
            members = dist.get_process_group_ranks(group)
            expected = f"one of {members}"
    if not isinstance(root, int) or root not in members:
        argument = f"group_{what}" if rank is None else what
        raise ArgumentError("the root is not in the group", argument, expected, root, own)
    return members.index(root)


def _make(group: dist.ProcessGroup, device: torch.device) -> Communicator:
    # `close` makes the group as new, so it must not see its old keys in the store.
    prefix = f"ringcoll/{device.type}/{_times_closed.get(group, 0)}"
    rank, world_size, limit_s = group.rank(), group.size(), time_limit_s(group)
    life, lives = getattr(group, "life", ""), getattr(group, "lives", None)
    if lives is None:
        store = group.get_group_store()
        # A long wait on the user's connection would block it.
        own = lambda: common_connection(store, _life_at(store, world_size))  # noqa: E731
        lives = Lives(ask_store(store, limit_s, own), rank, world_size)
    asked = _asked.get(group, {})
    options = {name: asked[name] for name in asked.keys() - {"cpu", "cuda"}}
    where = lives, limit_s, device, asked.get(device.type)
    member = member_at(*where, prefix=prefix, token=life and f"{life}/{prefix}", **options)
    reference = weakref.ref(group)
    member.monitor.notices.names_of = lambda: names_of(reference())
    with contextlib.suppress(RuntimeError):  # it has no backend for the CPU
        if isinstance(group._get_backend(torch.device("cpu")), dist.ProcessGroupGloo):
            lives.native = reference
    return member


def names_of(group: dist.ProcessGroup | None) -> Names:
    """How a group of torch is called; one that torch has not made has no ranks of the program.

    >>> names_of(None).of(3)
    'rank 3'
    """
    if group is None or group is dist.GroupMember.WORLD:
        return Names()
    ranks, name = list[int](), group.group_desc
    with contextlib.suppress(KeyError, ValueError):
        ranks = dist.get_process_group_ranks(group)
        if ranks == [*range(dist.get_world_size())]:
            ranks = []
    return Names(ranks, "" if name == "undefined" else name)


def _life_at(store: dist.Store, world_size: int) -> str:
    """As `fresh_group_name`, for a connected group of torch; empty if its backend is not gloo.

    Nobody is waited for: the addresses that gloo writes into the store differ from life to life.
    """
    keys = [f"cpu//0/{rank}" for rank in range(world_size)]
    with contextlib.suppress(dist.DistError):  # the store is gone: its next user says so
        if "TORCH_GLOO_LAZY_INIT" not in os.environ and store.check(keys):
            return sha256(b"".join(map(store.get, keys))).hexdigest()
    return ""


def time_limit_s(group: OwnGroup | dist.ProcessGroup) -> float:
    """Time limit, in seconds, of the group's operations that have no time limit of their own."""
    if isinstance(group, OwnGroup):
        return group.communicator.timeout_s
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if options is not None and options._timeout > timedelta(0):
            return seconds_of(options._timeout)
    return _DEFAULT_TIMEOUT_S


def use(
    group: Any = None,
    *,
    transport: str | None = None,
    cuda_transport: str | None = None,
    verify_messages: bool | None = None,
    fit: str | None = None,
) -> None:
    """Choose how tensors of a group travel, before the first operation on such tensors.

    Parameters
    ----------
    group
        A process group of torch, by default the default group; all its ranks have to choose
        alike.
    transport
        Transport of CPU tensors: ``"shared"`` (memory that the ranks of a host share; UCX or gloo
        between hosts), ``"gloo"``, ``"ucx"`` (with ``ringcoll[ucx]``), or ``"auto"``:
        shared memory on Linux and x86-64, otherwise UCX where it is installed, otherwise gloo. The
        environment's ``RINGCOLL_TRANSPORT`` overrides it.
    cuda_transport
        Transport of CUDA tensors: ``"nccl"``, ``"ucx"``, ``"gloo"`` (by way of host memory), or
        ``"auto"``: NCCL where torch has it, otherwise UCX or gloo. The environment's
        ``RINGCOLL_CUDA_TRANSPORT`` overrides it.
    verify_messages
        Whether each message of a collective has a checksum, with which its receiver finds what was
        changed, lost or doubled on its way, and raises `CorruptMessageError`; not over NCCL. The
        environment's ``RINGCOLL_VERIFY_MESSAGES`` overrides it.
    fit
        A file of ``ringcoll fit`` for these ranks and hosts, which rank 0 reads: ``"auto"`` takes
        the algorithms that were fitted to the network. By default the file of ``RINGCOLL_TUNING``,
        if that is such a file.

    Raises
    ------
    ArgumentError
        There is no transport of that name, nothing was chosen, the group is in use, or
        the group is not a process group of torch.
    MissingExtraError
        The transport is not installed.
    """
    group = as_group(group)
    rank = group.rank()
    if isinstance(group, OwnGroup):
        expected = "a process group of torch"
        raise ArgumentError(
            "its transport is not to be chosen", "group", expected, repr(group), rank
        )
    further = {"verify_messages": verify_messages, "fit": fit}
    chosen = {name: value for name, value in further.items() if value is not None}
    for kind, asked in (("cpu", transport), ("cuda", cuda_transport)):
        if asked is not None:
            if catalogue.named(kind, asked, rank) != "auto":
                catalogue.resolved(kind, asked, rank)
            chosen[kind] = asked
    if not chosen:
        arguments = "transport, cuda_transport, verify_messages, fit"
        raise ArgumentError("nothing was chosen", arguments, "at least one of them", "none", rank)
    members = members_of(group)
    if members and not any(member.num_issued for member in members):
        close(group)  # the ranks have met, as was chosen before
    in_use = set(_known.get(weakref.ref(group), {}))
    if chosen.keys() <= {"cpu", "cuda"}:
        in_use &= chosen.keys()
    if in_use:
        message = "the group is in use; ringcoll.close(group), on all ranks, makes it as new"
        raise ArgumentError(message, "group", "one without operations so far", group, rank)
    _asked[group] = {**_asked.get(group, {}), **chosen}


def abort(group: Any) -> None:
    """Make all operations on a group fail, here and at the peers that take part in them."""
    for member in members_of(group):
        member.abort()


def members_of(group: Any) -> list[Communicator]:
    """The communicators that a group has so far."""
    if isinstance(group, OwnGroup):
        return [group.communicator]
    return [*_known.get(weakref.ref(group), {}).values()]


def bytes_sent(group: Any = None) -> int:
    """Bytes that this rank has sent in the group's operations so far, up to the last `close`.

    Parameters
    ----------
    group
        As for `ringcoll.all_reduce`.

    Returns
    -------
    int
        Bytes on the wire of the operations that are complete; signatures and the messages by which
        ranks meet are not counted, nor are the user's own messages from rank to rank.

    Raises
    ------
    ArgumentError
        As for `ringcoll.all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     ringcoll.all_reduce(torch.ones(300), group=group, algorithm="ring")
    ...     return ringcoll.bytes_sent(group)
    >>> ringcoll.run_threads(rank_main, 3)  # 2 (k - 1) / k of 1200 bytes
    [1600, 1600, 1600]
    """
    return sum(member.nbytes_sent for member in members_of(as_group(group)))


def close(group: Any = None, *, drain_s: float = 0.0) -> None:
    """Release what the library holds for a group; the group may be used again afterwards.

    All ranks of the group have to close it before any rank uses it again. The group is then like
    a fresh group, even if it was broken.

    Parameters
    ----------
    group
        As for `ringcoll.all_reduce`.
    drain_s
        Time limit, in seconds, for operations that nobody has waited for yet.
    """
    group = as_group(group)
    if isinstance(group, OwnGroup):
        group.close(drain_s)
        return
    members = _known.pop(weakref.ref(group), {})
    _times_closed[group] = _times_closed.get(group, 0) + 1
    for member in members.values():
        with contextlib.suppress(RingcollError):
            member.close(drain_s)


_log = logging.getLogger("ringcoll")
_without_room: weakref.WeakSet[Communicator] = weakref.WeakSet()
_WHILE_S = 0.0005  # between looks whether memory is in use

What = TypeVar("What", Tensor, nn.Module)


def share(what: What) -> What:
    """Move memory to where the other ranks of the host can read it in place.

    All views of a tensor move with it: the values, and every tensor that shares its storage, stay
    as they are, at another address. Operations that are under way on them are waited for, and so
    are those before them in their groups. Another library that holds an address has to ask for it
    anew.

    Parameters
    ----------
    what
        CPU tensor, or module: its parameters, gradients and buffers move, but for storages of less
        than 32 KiB, which are sent so quickly that they stay.

    Returns
    -------
    Tensor or Module
        The same object.

    Raises
    ------
    ArgumentError
        The memory cannot be moved: it is numpy's or another library's, or not on the CPU, or a
        message of ``isend`` or ``irecv`` uses it that nobody has waited for. Nothing was moved.
    SharingError
        There is too little memory, for a single tensor of ``/dev/shm``, or a quarter of the files
        that the process may open are such memory already. Tensors that have moved before stay
        there; no value has changed.

    Examples
    --------
    >>> import torch, ringcoll
    >>> weight = torch.arange(3.0)
    >>> view = weight[1:]
    >>> ringcoll.share(weight).add_(1)
    tensor([1., 2., 3.])
    >>> view
    tensor([2., 3.])
    """
    _share(what, of_many=False)
    return what


def _share(what: Tensor | nn.Module, *, of_many: bool) -> None:
    """See `share`; ``of_many``: whether more is going to move."""
    storages = movable(what)
    places = {storage._cdata for storage in storages}
    for ref in messages_in_flight.keyrefs():
        tensor = getattr(ref(), "tensor", None)
        if tensor is not None and tensor.untyped_storage()._cdata in places:
            message = "a send or a receive is under way on the memory"
            expected = "memory whose messages have been waited for"
            got = f"a tensor of shape {tuple(tensor.shape)} in a message"
            raise ArgumentError(message, "what", expected, got)
    while places and in_use(places):
        time.sleep(_WHILE_S)
    move(storages, of_many=of_many or len(storages) > 1)


def share_for(group: Any, tensor: Tensor) -> None:
    """Move a long CPU tensor to shared memory, unless it is there or cannot move.

    All ranks call it with tensors of one length: the first time they meet. A rank that has too
    little memory, or too many open files, goes on with the tensor where it is, as the others count
    on it.

    Raises
    ------
    ArgumentError
        The ranks are on several hosts.
    """
    if not is_long(tensor):
        return
    member = communicator(group, tensor.device)
    hosts = set(member.meet())
    if len(hosts) > 1:
        expected, got = "False, or ranks of one host", f"True on {len(hosts)} hosts"
        raise ArgumentError(
            "memory cannot be shared between hosts", "share", expected, got, member.rank
        )
    # Another part of the storage may be in use: by another group, or by a message of the user's.
    is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    if is_whole and can_move(tensor) and member not in _without_room:
        try:
            _share(tensor, of_many=True)
        except SharingError as error:
            _without_room.add(member)
            _log.warning("rank %d: tensors are not shared any more: %s", member.rank, error)
        except ArgumentError:
            return  # a message is under way on it
