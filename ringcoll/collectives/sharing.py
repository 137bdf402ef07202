"""Memory of a group's tensors moves to where the other ranks of the host can read it."""

from __future__ import annotations

import logging
import weakref
from typing import Any

from torch import Tensor

from ringcoll.collectives.groups import communicator
from ringcoll.errors import ArgumentError, SharingError
from ringcoll.runtime.communicator import Communicator
from ringcoll.system.shared_tensors import can_move, is_long, share

__all__ = ["share_for"]

_log = logging.getLogger("ringcoll")
_without_room: weakref.WeakSet[Communicator] = weakref.WeakSet()


def share_for(group: Any, tensor: Tensor) -> None:
    """Move a long CPU tensor to shared memory, unless it is there or cannot move.

    All ranks call it with tensors of one length: the first time they meet. A rank that has too little
    memory, or too many open files, goes on with the tensor where it is, as the others count on it.

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
        raise ArgumentError(
            "memory cannot be shared between hosts",
            rank=member.rank,
            argument="share",
            expected="False, or ranks of one host",
            got=f"True on {len(hosts)} hosts",
        )
    # Of a storage, another part may be in use: by another group, or by a message of the user's.
    is_whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    if is_whole and can_move(tensor) and member not in _without_room:
        with member.at_rest():  # an operation may use the same memory
            try:
                share(tensor)
            except SharingError as error:
                _without_room.add(member)
                _log.warning("rank %d: tensors are not shared any more: %s", member.rank, error)
