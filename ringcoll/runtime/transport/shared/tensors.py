"""Tensors that the other processes of the host can map, so that nobody has to copy them.

::

    gradients = ringcoll.empty_shared(1 << 20)  # new memory
    ringcoll.share(model)                       # memory that is there moves, with all views of it

A *region* is the memory of such tensors: it has an identity that no other memory on the host has,
and a descriptor by which processes of the same user open it. A rank that sends from a region tells
its peer both, and the place; the peer maps the region once, and reads there.

- A region lives as long as a tensor of this process uses it. Peers let go of their mappings when
  they map further regions (`PeerRegions`); the pages of `empty_shared` are given back at once,
  whoever maps them.
- What peers have mapped stays readable whatever its owner does: to read it never ends a process.
- torch's ``share_memory_`` moves a storage under all of its views; it takes memory of ``/dev/shm``.
  Regions of `empty_shared` have no name, and need none of ``/dev/shm``.
- A region is an open file. Many storages that move share one, the *segment*: those of a module, and
  those that the library moves by itself. Three quarters of the files are left to others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.errors import ArgumentError, SharingError
from ringcoll.runtime.machine import free_bytes
from ringcoll.runtime.tensors import with_memory
from ringcoll.runtime.transport.shared.memory import Identity, SharedMemory, identity, release_pages

_LEAST = 32 << 10  # bytes from which on a storage is worth a region: shorter messages are copied
_SHM = "/dev/shm"  # noqa: S108  # nothing is written there
_FEW, _MUCH = 16, 64 << 20  # mappings of a peer, and new bytes of them, that nobody looks through

_num_forks = 0


def _count_fork() -> None:
    global _num_forks  # noqa: PLW0603
    _num_forks += 1


os.register_at_fork(before=_count_fork)


class SharedRegion:
    """Memory of tensors of this process that peers can map."""

    __slots__ = ("descriptor", "identity", "nbytes", "start", "storage")

    def __init__(self, start: int, descriptor: int, storage: Any = None) -> None:
        self.start, self.descriptor = start, descriptor  # the address here, and what a peer opens
        self.identity = identity(descriptor)  # by which a peer knows that it is the right memory
        self.nbytes = self.identity.nbytes
        self.storage = None if storage is None else weakref.ref(storage)  # if it is torch's

    def is_here(self) -> bool:
        """Whether the memory still is at its address; torch may move what is torch's."""
        if self.storage is None:
            return True
        storage = self.storage()
        return storage is not None and storage.data_ptr() == self.start


class _Regions:
    """The regions of this process. Memory may end in any thread, so there is no lock."""

    def __init__(self) -> None:
        self.now = object()  # another one after each change
        self.known: set[SharedRegion] = set()
        self._sorted: tuple[object, list[int], list[SharedRegion]] = (self.now, [], [])

    def add(self, region: SharedRegion, owner: object) -> None:
        """Take in a region, until its owner ends."""
        self.known.add(region)
        self.now = object()
        is_own = region.storage is None
        ending = weakref.finalize(owner, self._end, region, _num_forks, is_own=is_own)
        ending.atexit = False  # the kernel knows better

    def _end(self, region: SharedRegion, num_forks: int, *, is_own: bool) -> None:
        self.known.discard(region)
        self.now = object()
        if not is_own:  # torch may have given it to further processes, and closes the descriptor
            return
        if num_forks == _num_forks:  # no process that was forked off uses it
            release_pages(region.descriptor)
        os.close(region.descriptor)

    def find(self, address: int, nbytes: int) -> SharedRegion | None:
        """The region that has all of some bytes of this process's memory, if one has."""
        seen, starts, regions = self._sorted
        now = self.now
        if seen is not now:
            regions = sorted(self.known.copy(), key=lambda region: region.start)
            starts = [region.start for region in regions]
            self._sorted = now, starts, regions
        index = bisect_right(starts, address) - 1
        if index < 0:
            return None
        region = regions[index]
        is_inside = address + nbytes <= region.start + region.nbytes
        return region if is_inside and region.is_here() else None

    def check_files(self) -> None:
        """Raise ``OSError`` if this process should open no further file for memory."""
        limit, num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(self.known)
        if 4 * num_files >= limit:
            reason = f"{num_files} of the {limit} files that this process may open are such memory"
            raise OSError(errno.EMFILE, f"{reason}: `ulimit -n` raises the limit")


_regions = _Regions()
region_of = _regions.find


def regions_now() -> object:
    """An object that is another one as soon as a region has come or gone."""
    return _regions.now


# Mapped memory keeps its inode, so that no other memory gets the same identity.
_mapped: weakref.WeakValueDictionary[Identity, SharedMemory] = weakref.WeakValueDictionary()


class PeerRegions:
    """Regions of another process, mapped here when first needed; groups share them."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[Identity, tuple[int, SharedMemory]] = {}
        self._enough, self._new_nbytes = _FEW, 0

    def map(self, descriptor: int, expected: Identity) -> SharedMemory:
        """Map a region, unless it is mapped."""
        known = self._mapped.get(expected)
        if known is not None:
            return known[1]
        self._new_nbytes += expected.nbytes
        if len(self._mapped) >= self._enough or self._new_nbytes > _MUCH:
            self._forget_ended()
        memory = _mapped.get(expected)
        if memory is None:
            memory = SharedMemory.open(self._pid, descriptor, expected, is_written=False)
            _mapped[expected] = memory
        self._mapped[expected] = descriptor, memory
        return memory

    def _forget_ended(self) -> None:
        """Let go of regions that their owner has let go of."""
        for expected, (descriptor, _) in tuple(self._mapped.items()):
            try:
                is_there = identity(Path(f"/proc/{self._pid}/fd/{descriptor}")) == expected
            except OSError:
                is_there = False
            if not is_there:
                del self._mapped[expected]
        self._enough, self._new_nbytes = max(_FEW, 2 * len(self._mapped)), 0


def empty_shared(*size: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Make a tensor that the other ranks of the host can read in place; its values are zeros.

    A collective on such tensors copies nothing from one rank to another before it is reduced, and
    copies results once. It is an ordinary CPU tensor otherwise, but its storage cannot be resized.

    Parameters
    ----------
    size
        Shape: numbers, or one sequence of numbers, as for ``torch.empty``.
    dtype
        Dtype; ``None`` for torch's default.

    Returns
    -------
    Tensor
        Contiguous tensor, on the CPU.

    Raises
    ------
    ArgumentError
        The dtype is a quantized one.
    SharingError
        The machine cannot share so much memory; nothing is allocated.

    Examples
    --------
    >>> import ringcoll
    >>> ringcoll.empty_shared(2, 3).shape
    torch.Size([2, 3])
    """
    shape = torch.empty(*size, dtype=dtype, device="meta")  # torch checks the arguments
    if shape.is_quantized:  # torch reads a quantizer that such a view of memory does not have
        raise ArgumentError("cannot be shared", "dtype", "no quantized", dtype)
    if not shape.nbytes:
        return torch.empty(shape.shape, dtype=shape.dtype, device="cpu")
    try:
        free = free_bytes()
        if shape.nbytes > free:  # the kernel would end a process, perhaps this one
            raise OSError(errno.ENOMEM, f"only {free} bytes are free")
        memory = _create(shape.nbytes, shape.nbytes)[0]
    except (OSError, AttributeError) as error:
        raise SharingError(
            f"{shape.nbytes} bytes of memory cannot be shared: {error}; use torch.empty"
        ) from error
    flat = torch.frombuffer(memory.data, dtype=shape.dtype, count=shape.numel())
    return flat.view(shape.shape)


def _create(nbytes: int, taken: int) -> tuple[SharedMemory, int]:
    """Make a region; its first bytes ``taken`` are allocated. Return its memory and descriptor."""
    _regions.check_files()
    memory, descriptor = SharedMemory.create(nbytes, taken)
    try:
        _regions.add(SharedRegion(memory.address, descriptor), memory.data.obj)
    except BaseException:
        os.close(descriptor)
        raise
    return memory, descriptor


def lasting_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a flat tensor that lives long and is sent often; in shared memory if possible."""
    if device.type == "cpu" and numel * dtype.itemsize >= _LEAST:
        with contextlib.suppress(SharingError):
            return empty_shared(numel, dtype=dtype)
    return torch.zeros(numel, dtype=dtype, device=device)


def is_long(tensor: Tensor) -> bool:
    """Whether a tensor is one that shared memory is good for: a long one on the CPU."""
    is_on_cpu = tensor.device.type == "cpu" and tensor.layout is torch.strided
    return is_on_cpu and tensor.nbytes >= _LEAST


def can_move(tensor: Tensor) -> bool:
    """Whether a tensor is not in shared memory, and torch can move it there."""
    try:
        return bool(movable(tensor))
    except ArgumentError:
        return False


def movable(what: object) -> list[torch.UntypedStorage]:
    """The storages of a tensor or module that are to move; `ArgumentError` if one cannot."""
    if isinstance(what, nn.Module):
        tensors: list[Any] = [*what.parameters(), *what.buffers()]
        tensors += [tensor.grad for tensor in tensors if tensor.grad is not None]
        least = _LEAST
    else:
        tensors, least = [what], 1
    storages = {storage.data_ptr(): storage for storage in map(_movable, tensors)}
    return [
        storage
        for place, storage in storages.items()
        if storage.nbytes() >= least and region_of(place, storage.nbytes()) is None
    ]


def _movable(tensor: object) -> torch.UntypedStorage:
    """The storage of a tensor, which torch can move, or does not have to."""

    def refusal(expected: str, got: str) -> ArgumentError:
        return ArgumentError("cannot be shared", "what", expected, got)

    if not isinstance(tensor, Tensor):
        raise refusal("a tensor or a module", type(tensor).__name__)
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise refusal("strided tensors on the CPU", f"{tensor.layout} on {tensor.device}")
    storage = with_memory(tensor, argument="what").untyped_storage()
    if region_of(storage.data_ptr(), storage.nbytes()) is not None:
        return storage
    strategy = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    is_named = strategy == "file_system" or storage.filename is not None  # a file that is mapped
    if storage.is_shared() and is_named:
        raise refusal(
            "memory that torch has not shared by a file's name", "such memory: clone() it"
        )
    if not storage.is_shared() and not storage.resizable():
        got = "memory of numpy, or of another library: clone() it"
        raise refusal("memory that torch has allocated", got)
    # Torch calls a copy of a file shared, `torch.from_file(shared=False)`, without a descriptor.
    if storage.is_shared() and storage._share_fd_cpu_()[0] < 0:
        raise refusal("memory that torch has allocated", "a file that is mapped: clone() it")
    return storage


_SEGMENT, _ALIGNMENT = 64 << 20, 64  # bytes; only what is used of a segment takes memory
# Segments with room, each a weak reference to its memory, descriptor, bytes in use, and number of
# forks: a process that is forked off must not take the same memory. A segment in use is taken out.
_segments: list[tuple[weakref.ref[Any], int, int, int]] = []


def _move_to_segment(storage: torch.UntypedStorage, expected_nbytes: int) -> None:
    """Move a storage to a segment, a new one if need be, with room for all that is expected."""
    nbytes, used, whole = storage.nbytes(), 0, None
    with contextlib.suppress(IndexError):
        known, descriptor, used, num_forks = _segments.pop()
        whole = known() if num_forks == _num_forks else None
    if whole is None or used + nbytes > len(whole):
        memory, descriptor = _create(max(expected_nbytes, _SEGMENT), nbytes)
        whole, used = memory.data.obj, 0
    else:
        os.posix_fallocate(descriptor, used, nbytes)
    there = torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=used).untyped_storage()
    end = used + -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    _segments.append((weakref.ref(whole), descriptor, end, _num_forks))
    there.copy_(storage)
    storage._swap_data_ptr_(there)  # type: ignore[attr-defined]  # under all views of it


def move(storages: Iterable[torch.UntypedStorage], *, of_many: bool) -> None:
    """Move storages to memory that other processes can map.

    If they are ``of_many``, they lie in a segment, and torch does not know that it is shared.
    """
    storages = list(storages)
    moving = [storage for storage in storages if not storage.is_shared()]
    nbytes = sum(storage.nbytes() for storage in moving)
    limits = {"memory": free_bytes()} | ({} if of_many else {_SHM: shutil.disk_usage(_SHM).free})
    try:
        for where, free in limits.items():
            if nbytes > free:  # before anything moves
                raise OSError(f"{nbytes} bytes of {where} are needed, {free} are free")
        for storage in storages:
            if of_many and not storage.is_shared():
                _move_to_segment(storage, nbytes + _ALIGNMENT * len(moving))
                continue
            if not storage.is_shared():
                _regions.check_files()
            descriptor, _ = storage._share_fd_cpu_()
            _regions.add(SharedRegion(storage.data_ptr(), descriptor, storage), storage)
    except (OSError, RuntimeError) as error:
        raise SharingError(
            f"memory cannot be shared: {error}; ringcoll.empty_shared makes tensors without {_SHM}"
        ) from error
