"""Memory of a group's tensors moves to where the other ranks of the host can read it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ringcoll.collectives.groups import communicator
from ringcoll.errors import ArgumentError
from ringcoll.system.shared_tensors import can_move, is_long, share

__all__ = ["share_for"]


def share_for(group: Any, tensor: Tensor) -> None:
    """Move a long CPU tensor to shared memory, unless it is there or cannot move.

    All ranks call it with tensors of one length: the first time they meet.

    Raises
    ------
    ArgumentError
        The ranks are on several hosts.
    SharingError
        There is too little memory, or there are too many open files.
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
    if can_move(tensor):
        with member.at_rest():  # an operation may use the same memory
            share(tensor)
