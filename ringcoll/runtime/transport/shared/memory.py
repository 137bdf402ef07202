"""Memory that the ranks of one host share: how it is made, and where things lie in it.

Linux only. The memory has no name (``memfd_create``), so that a process that is killed leaves
nothing behind; processes of the same user open it by the number of its owner and descriptor. What
processes tell each other by it rests on these facts:

- A store of eight aligned bytes through a ``memoryview`` is one store. x86-64 keeps stores in
  order, and loads in order; only a store followed by a load of another place may change places,
  unless a `fence` is between them. On other machines (`is_ordered`) any two may.
- A futex is a word on which a process sleeps in the kernel until another process wakes it.
- ``process_vm_readv`` copies from another process of the same user, where the kernel allows it.

A rank writes to its own memory only, but for the bell that wakes a peer; all ranks of its host map
the memory (`ringcoll.runtime.transport.shared.channel` says how messages travel in it)::

    control    the bell, what the rank sleeps for, how its end of the group is
    acks       for each peer, by entry: number of the last message that was taken from that entry
    can read   for each peer: whether this rank can read the memory of its process
    rings      for each peer, 16 entries: number, length, kind, tag, and a short message itself
    pieces     places for pieces of long messages, so many for each peer
    board      two places for messages to all ranks: tag, and the message
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ringcoll.runtime.machine import FUTEX

WORD = 8
"""Bytes of a word."""
DEPTH = 16
"""Entries of a ring, a power of two."""
ENTRY = 36 << 10
"""Bytes of an entry, whole pages."""
HEAD = 32
"""Bytes at the begin of an entry: number, length and kind, address or length of a piece, tag.
Behind them, of a mapped message: offset in its region, and the region's descriptor and identity."""
SHORT = ENTRY - HEAD
"""Bytes of the longest message that travels in an entry."""
PIECE, PIECES = 512 << 10, 3
"""Bytes of a piece of a long message, and places with pieces that a peer has not read yet."""
EXCHANGED, PLACE = 256 << 10, 260 << 10
"""Bytes of the longest message to all ranks, and of a place of the board, whole pages."""
BELL, SLEEPS, STATE, EXCHANGES = 0, 8, 16, 24
"""Numbers of the words of the control block, each on a cache line of its own."""
_CONTROL = 256  # bytes
NUMBER = 2
"""The word of a rank's own, of which only its interpreters know, that counts its exchanges."""
AWAKE, ASLEEP, FOR_ROOM, WHOM = 0, 1, 2, 2
"""A rank sleeps for nothing, or for a message of the peer above ``WHOM`` bits; with ``FOR_ROOM``
also for room in a ring, or the end of a send."""
OPEN, BROKEN, CLOSED = 0, 1, 2
"""States of a rank's end of the group."""

_WAIT, _WAKE = 0, 1  # of futex(2)
_NAME = "ringcoll"  # of the memory, in /proc
_LINK = Path(f"/memfd:{_NAME} (deleted)")
_EVERYONE = 0x7FFFFFFF
_READ, _WRITE, _SHARED = 1, 2, 1  # of mmap
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate
_FAILED = ctypes.c_size_t(-1).value
_libc = ctypes.CDLL(None, use_errno=True)  # its functions let go of Python's lock
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_fence: Any = threading.RLock()  # its `_is_owned` has no type


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


# With the types of its arguments, a call takes half the time.
_futex = ctypes.CDLL(None).syscall
_futex.argtypes = (
    *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
    *(ctypes.POINTER(_Time), ctypes.c_void_p, ctypes.c_int),
)


class _Bytes(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def is_ordered() -> bool:
    """Whether the machine keeps stores in order, and loads in order, without fences."""
    return platform.machine() in ("x86_64", "AMD64")


def fence() -> None:
    """Let no later load or store come before an earlier one: a lock is taken and given back."""
    with _fence:
        pass


def free_fence() -> None:
    """Let go of the lock of `fence` if an interrupt of this thread has left it taken."""
    while _fence._is_owned():
        _fence.release()


def futex_wait(address: int, seen: int, limit_s: float) -> None:
    """Sleep until another process wakes, while the 32-bit word at an address is what was seen."""
    _futex(FUTEX, address, _WAIT, seen, _time(limit_s), None, 0)


def futex_wake(address: int) -> None:
    """Wake all that sleep on a word."""
    _futex(FUTEX, address, _WAKE, _EVERYONE, None, None, 0)


@functools.lru_cache(maxsize=16)
def _time(seconds: float) -> _Time:
    """A time as the kernel takes it, which it only reads; most sleeps have the same limit."""
    return _Time(int(seconds), int(seconds % 1 * 1e9))


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def read_process(pid: int, source: int, into: int, nbytes: int) -> None:
    """Copy from the memory of another process."""
    while nbytes > 0:
        here, there = _Bytes(into, nbytes), _Bytes(source, nbytes)
        count = _libc.process_vm_readv(
            ctypes.c_int(pid), ctypes.byref(here), 1, ctypes.byref(there), 1, 0
        )
        if count <= 0:
            raise _last_error()
        source, into, nbytes = source + count, into + count, nbytes - count


def forbids_reading() -> str:
    """Why no process may read another one's memory here, as far as it can be told; or nothing."""
    word = ctypes.c_uint64(1)
    copy = ctypes.c_uint64()
    try:
        read_process(os.getpid(), ctypes.addressof(word), ctypes.addressof(copy), 8)
    except OSError as error:  # a container may forbid it to all
        return f"process_vm_readv: {error}"
    try:
        scope = int(_PTRACE_SCOPE.read_text(encoding="ascii"))
    except (OSError, ValueError):  # this kernel has no such rule
        return ""
    return f"kernel.yama.ptrace_scope is {scope}" if scope else ""


class Identity(NamedTuple):
    """The identity of memory among all files: ``device`` and ``inode``; and its length."""

    device: int
    inode: int
    nbytes: int


def identity(file: int | Path) -> Identity:
    """The identity of a file, by its descriptor or path. Raises ``OSError`` if there is none."""
    about = os.fstat(file) if isinstance(file, int) else file.stat()
    return Identity(about.st_dev, about.st_ino, about.st_size)


def release_pages(descriptor: int) -> None:
    """Give back all of the memory behind a descriptor; processes that map it then read zeros."""
    nbytes = os.fstat(descriptor).st_size + mmap.PAGESIZE  # of the last page only all of it goes
    _libc.fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_long(0), ctypes.c_long(nbytes))


def reserve(nbytes: int) -> int:
    """The descriptor of memory that takes no room yet; ``OSError`` if no descriptors are left."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class SharedMemory:
    """Memory that several processes map: as bytes, and as 8-byte words; and its address here."""

    def __init__(self, descriptor: int, nbytes: int, *, is_written: bool = True) -> None:
        access = _READ | _WRITE if is_written else _READ
        # Python's own mmap would keep a descriptor open for each mapping.
        address = _libc.mmap(None, nbytes, access, _SHARED, descriptor, 0)
        if address == _FAILED:
            raise _last_error()
        mapped = (ctypes.c_char * nbytes).from_address(address)
        # It lives as long as a view of it. At the end of the process, the kernel unmaps it.
        weakref.finalize(mapped, _libc.munmap, address, nbytes).atexit = False
        self.data = memoryview(mapped).cast("B")
        self.words = self.data[: nbytes // 8 * 8].cast("Q")
        self.address: int = address

    @classmethod
    def create(cls, nbytes: int, taken: int) -> tuple[SharedMemory, int]:
        """Make memory, of which the first bytes ``taken`` are allocated at once.

        Return it, and a descriptor, which the caller closes when all have opened the memory. Raises
        ``OSError`` if there is not so much memory.
        """
        descriptor = reserve(nbytes)
        try:
            return cls.allocate(descriptor, nbytes, taken), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def allocate(cls, descriptor: int, nbytes: int, taken: int) -> SharedMemory:
        """Map the first bytes of what `reserve` has made; otherwise as `create`."""
        os.posix_fallocate(descriptor, 0, taken)
        return cls(descriptor, nbytes)

    @classmethod
    def open(
        cls,
        pid: int,
        descriptor: int,
        expected: Identity,
        *,
        nbytes: int | None = None,
        is_written: bool = True,
    ) -> SharedMemory:
        """Open memory of another process, or its first ``nbytes``, by process and descriptor.

        Raises ``OSError`` if the process has ended, belongs to another user, or has closed the
        descriptor; if the kernel does not allow it; or if the memory is to be written, and `create`
        has not made it.
        """
        name = Path(f"/proc/{pid}/fd/{descriptor}")
        # By a wrong number, a file could be written that the user has open somewhere.
        if is_written and name.readlink() != _LINK:
            raise OSError(f"{name} is no memory to be shared")
        # Another file that has the number by now is not opened: to open a device is an action.
        if identity(name) != expected:
            raise OSError(f"{name} is other memory by now")
        own = os.open(name, (os.O_RDWR if is_written else os.O_RDONLY) | os.O_CLOEXEC)
        try:
            if identity(own) != expected:
                raise OSError(f"{name} is other memory by now")
            return cls(own, expected.nbytes if nbytes is None else nbytes, is_written=is_written)
        finally:
            os.close(own)


@functools.cache
def missing_means() -> str:
    """The means to share memory that this machine lacks; empty if there is nothing."""
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "Linux 5.3 or later, with memfd_create and pidfd_open"
    if FUTEX < 0:
        return "x86-64 or aarch64"
    try:
        os.close(os.pidfd_open(os.getpid()))
        _, descriptor = SharedMemory.create(4096, 4096)
        try:
            SharedMemory.open(os.getpid(), descriptor, identity(descriptor))
        finally:
            os.close(descriptor)
    except OSError as error:
        return f"a kernel that lets processes share memory and watch each other: {error}"
    return ""


class SharedLayout:
    """The layout of a rank's memory, in bytes; ``ranks`` are those of the host.

    The memory up to ``num_taken`` is needed, that of pieces and of the board perhaps never.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        end = _CONTROL + len(ranks) * DEPTH * WORD
        first = -(-(end + len(ranks) * WORD) // ENTRY) * ENTRY
        self.num_taken = first + len(ranks) * DEPTH * ENTRY
        self.board = self.num_taken + len(ranks) * PIECES * PIECE
        self.nbytes = self.board + 2 * PLACE
        places = {rank: place for place, rank in enumerate(ranks)}
        self.acks = {rank: _CONTROL + n * DEPTH * WORD for rank, n in places.items()}
        self.can_read = {rank: end + n * WORD for rank, n in places.items()}
        self.rings = {rank: first + n * DEPTH * ENTRY for rank, n in places.items()}
        self.pieces, self.num_pieces = self.num_taken, len(ranks) * PIECES
