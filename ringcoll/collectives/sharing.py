"""Memory of a group's tensors moves to where the other ranks of the host can read it."""

from __future__ import annotations

import logging
import time
import weakref
from typing import Any, TypeVar

from torch import Tensor, nn

from ringcoll.collectives.groups import communicator, messages_in_flight, refused
from ringcoll.errors import ArgumentError, SharingError
from ringcoll.group import Communicator, in_use
from ringcoll.transport import can_move, is_long, movable, move

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
        ``/dev/shm`` has too little room, or there are too many open files. What has moved before
        stays there; no value has changed.

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
    storages = movable(what)
    places = {storage._cdata for storage in storages}
    for ref in messages_in_flight.keyrefs():
        tensor = getattr(ref(), "tensor", None)
        if tensor is not None and tensor.untyped_storage()._cdata in places:
            message = "a send or a receive is under way on the memory"
            expected = "memory whose messages have been waited for"
            got = f"a tensor of shape {tuple(tensor.shape)} in a message"
            raise refused(message, "what", expected, got)
    while places and in_use(places):
        time.sleep(_WHILE_S)
    move(storages)
    return what


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
        raise refused("memory cannot be shared between hosts", "share", expected, got, member.rank)
    # Of a storage, another part may be in use: by another group, or by a message of the user's.
    is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    if is_whole and can_move(tensor) and member not in _without_room:
        try:
            share(tensor)
        except SharingError as error:
            _without_room.add(member)
            _log.warning("rank %d: tensors are not shared any more: %s", member.rank, error)
        except ArgumentError:
            return  # a message is under way on it
