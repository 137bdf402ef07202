"""Calls that are prepared once and run often.

A call is checked, an algorithm chosen, a plan bound to memory and to the transport; only
then does anything move. For a few bytes all that takes longer than moving them. So it can be
done in advance (`Collective.plan`), and for all-reduces that look like an earlier one it
has been done (`repeat`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, cast

import torch
from torch import Tensor

from ringcoll import stage
from ringcoll.algorithms import generation
from ringcoll.call import Builder
from ringcoll.communicator import Call, Communicator
from ringcoll.groups import communicator
from ringcoll.work import Work

__all__ = ["Collective", "Persistent", "Repeat", "collective", "repeat"]

P = ParamSpec("P")


class Collective(Protocol[P]):
    """A public function: called, it runs; `plan` makes a persistent operation of it."""

    build: Callable[P, Builder]
    """Checks the arguments, and runs nothing."""
    shortcut: Callable[P, Repeat | None] | None
    """Asked first; see `repeat`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Work | None:
        """Run it."""
        ...

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Persistent:
        """Make ready to call the function with these arguments again and again.

        Everything is checked, decided and bound once. The tensors are kept, and each run
        works on what is in them at the time. All ranks must run the operation as often,
        and in the same order among the group's other operations.

        Parameters
        ----------
        *args, **kwargs
            Those of the function; ``async_op`` says whether each run returns a work at once.

        Examples
        --------
        >>> import torch, ringcoll
        >>> def rank_main(group):
        ...     tensor = torch.zeros(3)
        ...     operation = ringcoll.all_reduce.plan(tensor, group=group)
        ...     for step in range(2):
        ...         tensor.fill_(step + group.rank())
        ...         operation()
        ...     return tensor.tolist()
        >>> ringcoll.run_threads(rank_main, 2)
        [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
        """
        ...


def collective(build: Callable[P, Builder]) -> Collective[P]:
    """Make a public function of one that checks arguments, with its name and docstring."""

    @functools.wraps(build)
    def run(*args: P.args, **kwargs: P.kwargs) -> Work | None:
        shortcut = made.shortcut
        found = shortcut(*args, **kwargs) if shortcut is not None else None
        return (found or build(*args, **kwargs)).run()

    def plan(*args: P.args, **kwargs: P.kwargs) -> Persistent:
        with torch.inference_mode(False):  # it may be run outside of that mode
            builder = build(*args, **kwargs)
        builder.keep()
        return Persistent(builder)

    made: Any = run  # a function has no such attributes, as far as types go
    made.build, made.plan, made.shortcut = build, plan, None
    return cast("Collective[P]", run)


class Persistent:
    """An operation that is bound to its tensors; see `Collective.plan`."""

    def __init__(self, builder: Builder) -> None:
        self._member, self._call = builder.communicator, builder.call
        self._async_op = builder.async_op

    def __call__(self) -> Work | None:
        """Run it once.

        Returns
        -------
        Work or None
            The work, if ``async_op`` was asked for.
        """
        return self._member.run(self._call, async_op=self._async_op)


_SHORT_NBYTES = 32 << 10  # a copy of so much takes as long as binding an instruction or two
_MOST_REPEATED = 256  # kinds of calls that a group remembers


class Repeat:
    """A call that was bound before; see `repeat`."""

    def __init__(
        self, member: Communicator, kept: Call, own: Tensor, tensor: Tensor, async_op: bool
    ) -> None:
        self._member, self._async_op = member, async_op
        is_short = tensor.nbytes <= _SHORT_NBYTES
        self._call = Call(
            kept.name,
            kept.decide,
            kept.device,
            kept.reduction,
            _through(own, tensor, kept.open, async_op) if is_short else kept.open,
            kept.timeout_s,
            [tensor],
            keeper=kept.keeper,
            engine=kept.engine,
        )

    def run(self) -> Work | None:
        """Run the call."""
        return self._member.run(self._call, async_op=self._async_op)


def _through(
    own: Tensor, tensor: Tensor, open_own: Callable[[], stage.Opened], async_op: bool
) -> Callable[[], stage.Opened]:
    """Open memory of the group's own, to which a tensor is copied, and the result back."""
    # Detached: autograd may come to need the tensor's gradient while it is in use.
    user = tensor.detach() if async_op or tensor.requires_grad else tensor

    def open_() -> stage.Opened:
        own.copy_(user)
        inputs, outputs, finish = open_own()

        def bring_home() -> None:
            if finish is not None:
                finish()
            user.copy_(own)

        return inputs, outputs, bring_home

    return open_


def _own(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory as a tensor's, which is not kept alive by it."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def repeat(
    signature: tuple[object, ...],
    tensor: Any,  # what users give, as yet unchecked
    group: Any,
    async_op: bool,
    build: Callable[[Tensor], Builder | None],
) -> Repeat | None:
    """Do with a tensor what was done with one like it before.

    Checking, choosing and binding cost more than moving a few bytes, so they are done once.
    For short tensors the operation is bound to memory of the group's own, and every call
    copies the user's tensor to it, and the result back. For others it is bound to the
    tensor's address, where training has its gradients again and again; nothing of the
    user's is kept alive.

    Parameters
    ----------
    signature
        All arguments but the tensor, so far as they matter.
    tensor, group, async_op
        As for `all_reduce`.
    build
        Makes the call on a tensor of the same kind; none if it cannot be repeated.

    Returns
    -------
    Repeat or None
        Nothing where the tensor is not plain.
    """
    if (
        type(tensor) not in (Tensor, torch.nn.Parameter)  # others may not be what they seem
        or not stage.is_dense(tensor)
        or not tensor.is_cpu
        or not tensor.nbytes
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return None
    member = communicator(group, tensor.device)
    is_short = tensor.nbytes <= _SHORT_NBYTES
    address = None if is_short else tensor.data_ptr()
    key = (signature, tensor.shape, tensor.dtype, generation(), address)
    try:
        found = member.repeated.get(key)
    except TypeError:  # an argument that no dictionary takes: to be complained about elsewhere
        return None
    if found is None:
        with torch.inference_mode(False):  # it may be used again outside of that mode
            own = _own(tensor) if is_short else _alias(tensor)
            builder = build(own)
        if builder is None or not (is_short or builder.is_plain):
            return None
        builder.keep()
        if len(member.repeated) >= _MOST_REPEATED:
            member.repeated.clear()
        found = member.repeated[key] = builder.call, own
    return Repeat(member, *found, tensor, async_op)
