"""Run one program in the processes of a pool, and watch that nothing native runs.

Problem: torch's C++ calls the collectives of a process group through a trampoline, and
where that does not know one, silently runs the one of the inner group, which is meant
for the user's sends and receives only. So every inner group that is made during a
program has its operations counted: what remains after the sends and receives is native.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

import ringcoll.training.backend.process_group
from ringcoll.runtime.launch import rendezvous
from ringcoll.training.backend import PointToPoint

__all__ = [
    "NativeCollectiveError",
    "differences",
    "folder",
    "loaded",
    "run_alone",
    "run_program",
    "watched",
]

_TIMEOUT = timedelta(seconds=40)


class NativeCollectiveError(Exception):
    """A collective ran that is not this library's."""


@contextlib.contextmanager
def watched(*, foreign: bool = False) -> Iterator[None]:
    """Raise at the end if a native collective ran within a group of this library.

    Parameters
    ----------
    foreign
        Whether groups of other backends may be made; their collectives are native.

    Raises
    ------
    NativeCollectiveError
        One ran, or could have.
    """
    group_class: Any = ringcoll.training.backend.process_group.ProcessGroup
    make, channel_of = group_class.__init__, PointToPoint.of
    make_any = c10d._new_process_group_helper
    inner: list[Any] = []
    messages: Counter[int] = Counter()
    others: list[str] = []
    lock = threading.Lock()

    def noting_make(self: Any, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        inner.append(self._messages.gloo)

    def counting_channel(self: Any, tensor: Tensor) -> Any:
        channel = channel_of(self, tensor)
        with lock:
            messages[id(channel)] += 1
        return channel

    def noting_any(*arguments: Any, **options: Any) -> Any:
        made = make_any(*arguments, **options)
        if isinstance(made[0], dist.ProcessGroup) and not isinstance(made[0], group_class):
            others.append(str(made[0].name()))
        return made

    group_class.__init__, PointToPoint.of = noting_make, counting_channel  # type: ignore[method-assign]
    c10d._new_process_group_helper = noting_any
    try:
        yield
    finally:
        group_class.__init__, PointToPoint.of = make, channel_of  # type: ignore[method-assign]
        c10d._new_process_group_helper = make_any
    for number, channel in enumerate(inner):
        native = channel._get_sequence_number_for_group() - messages[id(channel)]
        if native:
            raise NativeCollectiveError(
                f"group {number} of {len(inner)} ran {native} collectives of its inner group"
            )
    if others and not foreign:
        raise NativeCollectiveError(f"groups of other backends were made: {others}")


def _program(name: str) -> Callable[[int, int], dict[str, Tensor]]:
    """The program of a name, called with the rank and the world size."""
    family, _, function = name.partition(".")
    module = importlib.import_module(f"tests.programs.users.{family}")
    found: Callable[[int, int], dict[str, Tensor]] = getattr(module, function)
    return found


def run_alone(name: str) -> bytes:
    """Run a program that needs no world, but knows what one would have given."""
    _, rank, world_size = rendezvous()
    torch.manual_seed(0)
    return _saved(_program(name)(rank, world_size))


def run_program(name: str, backend: str, turn: str, foreign: bool) -> bytes:
    """Run a program in a world of its own; on every rank of a pool.

    Parameters
    ----------
    name
        What to run: the module and the function.
    backend
        Of the default group.
    turn
        A word that no other run of this pool has had.
    foreign
        See `watched`.

    Returns
    -------
    bytes
        The results, for `loaded`.
    """
    store, rank, world_size = rendezvous()
    with watched(foreign=foreign or backend != "ringcoll"):
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(turn, store),
            rank=rank,
            world_size=world_size,
            timeout=_TIMEOUT,
        )
        torch.manual_seed(0)
        # If this raises, the pool is ended: destroying a group could wait for the others.
        results = _program(name)(rank, world_size)
        if dist.is_initialized():
            dist.destroy_process_group()
    return _saved(results)


def _saved(results: dict[str, Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save({name: value.detach().clone() for name, value in results.items()}, file)
    return file.getvalue()


def loaded(data: bytes) -> dict[str, Tensor]:
    """What `run_program` has returned."""
    found: dict[str, Tensor] = torch.load(io.BytesIO(data), weights_only=True)
    return found


def differences(
    ours: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float, rank: int
) -> list[str]:
    """What is not as it should be in one rank's results, in words."""
    if not ours or list(ours) != list(wanted):
        return [f"rank {rank} returned {list(ours)}, not {list(wanted)}"]
    return [
        f"rank {rank}, {name}: {wrong}"
        for name in ours
        if (wrong := _difference(ours[name], wanted[name], tolerance))
    ]


def _difference(ours: Tensor, wanted: Tensor, tolerance: float) -> str:
    if ours.shape != wanted.shape or ours.dtype != wanted.dtype:
        return f"{ours.dtype} {tuple(ours.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
    if not wanted.isfinite().all():
        return "the expected values are not finite"
    if ours.equal(wanted):
        return ""
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    off = (ours.to(wide) - wanted.to(wide)).abs().max().item()
    largest = wanted.to(wide).abs().max().item()
    if off <= tolerance * largest:
        return ""
    return f"off by {off:g} where the largest is {largest:g}"


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A directory that all ranks see, removed in the end."""
    made: list[Any] = [None]
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 0:
            made = [stack.enter_context(tempfile.TemporaryDirectory())]
        dist.broadcast_object_list(made, src=0)
        yield Path(made[0])
        dist.barrier()
