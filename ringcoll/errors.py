"""The exceptions of the library.

Every error that a user can meet derives from `RingcollError`, and from the built-in exception
with the same meaning (`ValueError`, `TimeoutError`, ...), so that code without knowledge of this
library can catch the error.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "BackwardError",
    "CaptureError",
    "CollectiveTimeoutError",
    "CorruptMessageError",
    "GroupBrokenError",
    "GroupChangedError",
    "MismatchError",
    "MissingExtraError",
    "NestedCallError",
    "PeerLostError",
    "RingcollError",
    "RulesError",
    "ScheduleError",
    "SharingError",
    "TooLargeError",
    "TraceError",
    "TrainingError",
    "TransportError",
    "TuningFileError",
    "UnknownAlgorithmError",
    "UnsupportedWorldSizeError",
    "VerificationError",
]


FORKED = "this process was forked off a rank; it needs a group of its own"
"""The message to a process that uses its parent's group."""

NESTED = (
    "was made within another operation of the same group (by a function for a signal, an operator, "
    "a finalizer), which cannot go on before that function returns; make it afterwards"
)
"""The end of the message of a `NestedCallError`."""


def printable(text: str) -> str:
    r"""The text, with an escape such as ``\x1b`` for every character that is not for print.

    A name in a file may come from anyone: such characters clear a terminal, turn the direction of
    writing, forge a line, or are no XML.

    >>> printable("ring\x1b[2J")
    'ring\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


class RingcollError(Exception):
    """Base class of every error raised by ringcoll."""


class ArgumentError(RingcollError, ValueError, TypeError):
    """An argument of a public call is not acceptable; nothing was sent.

    Parameters
    ----------
    message
        Description of the fault, in a sentence.
    argument
        Name of the argument.
    expected, got
        Acceptable values, and the actual value.
    rank
        Rank of the caller in the group; ``None`` if there is no group.

    Examples
    --------
    >>> print(ArgumentError("not a tag", "tag", "0 to 9", 10, rank=2))
    rank 2: argument 'tag': not a tag (expected 0 to 9, got 10)
    """

    def __init__(
        self,
        message: str,
        argument: str | None = None,
        expected: object = None,
        got: object = None,
        rank: int | None = None,
    ) -> None:
        self.message = message
        self.rank = rank
        self.argument = argument
        self.expected = expected
        self.got = got
        where = "" if rank is None else f"rank {rank}: "
        what = "" if argument is None else f"argument {argument!r}: "
        detail = "" if expected is None else f" (expected {expected}, got {got})"
        super().__init__(f"{where}{what}{message}{detail}")


class ScheduleError(RingcollError, ValueError):
    """A schedule cannot be built, parsed or run."""


class UnknownAlgorithmError(ScheduleError):
    """No algorithm of that name is registered for the collective."""


class UnsupportedWorldSizeError(ScheduleError):
    """The algorithm is not defined for this number of ranks."""


class TooLargeError(RingcollError, ValueError):
    """More work or memory than is spent on a call; nothing was begun. ``most`` is the most work."""

    def __init__(self, message: str, *, most: int = 0) -> None:
        self.most = most
        super().__init__(message)


class VerificationError(ScheduleError):
    """A schedule does not keep the contract of its collective.

    Parameters
    ----------
    message
        Description of the fault.
    rank, step, peer, chunk
        Place of the fault; ``None`` for a number that does not apply.
    expected, got
        Content that the contract asks for, and content that the schedule produces.
    grid
        Step-by-rank drawing with the bad place marked, or an empty string.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        peer: int | None = None,
        chunk: int | None = None,
        expected: object = None,
        got: object = None,
        grid: str = "",
    ) -> None:
        self.message = message
        self.rank, self.step, self.peer, self.chunk = rank, step, peer, chunk
        self.expected, self.got, self.grid = expected, got, grid
        named = {"rank": rank, "step": step, "peer": peer, "chunk": chunk}
        where = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        detail = "" if expected is None else f" (expected {expected}, got {got})"
        place = f"{where}: " if where else ""
        super().__init__(f"{place}{message}{detail}" + (f"\n{grid}" if grid else ""))


class RulesError(RingcollError, ValueError):
    """Rules that choose algorithms cannot be read, or name something that does not exist.

    Parameters
    ----------
    message
        Description of the fault.
    text
        Text of the rules.
    start, length
        Place of the fault in the text, in characters; the message underlines the place.
    source
        Source of the text, such as a variable of the environment.
    """

    def __init__(
        self, message: str, *, text: str = "", start: int = 0, length: int = 0, source: str = ""
    ) -> None:
        self.message, self.text = message, text
        self.start, self.length, self.source = start, length, source
        title = f"{source}: {message}" if source else message
        line = "".join(c if c.isprintable() else " " for c in text)
        mark = " " * start + "^" * max(1, length)
        super().__init__(f"{title}\n  {line}\n  {mark}" if text else title)


class TuningFileError(RingcollError, ValueError):
    """A file is no file of measurements, or cannot be read; ``path`` is its path."""

    def __init__(self, message: str, *, path: str = "") -> None:
        self.path = path
        super().__init__(f"{path}: {message}" if path else message)


class TransportError(RingcollError, RuntimeError):
    """Bytes could not be moved between two ranks.

    ``peer`` is the other rank, in the group, or ``None`` if it is not known.
    """

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(message)


class SharingError(RingcollError, MemoryError):
    """Memory cannot be shared with other processes: too little, or the kernel forbids it."""


class PeerLostError(TransportError):
    """A peer died, or closed its connection, while this rank waited for the peer."""


class CollectiveTimeoutError(TransportError, TimeoutError):
    """A peer did not arrive within the time limit."""


class CorruptMessageError(TransportError):
    """A message is not what its sender, ``peer``, has sent: its checksum differs."""


class MismatchError(RingcollError, RuntimeError):
    """Two ranks of a group called different operations.

    ``mine`` and ``theirs`` describe both calls, ``peer`` is the other rank.
    """

    def __init__(
        self, message: str, *, peer: int | None = None, mine: str = "", theirs: str = ""
    ) -> None:
        self.peer, self.mine, self.theirs = peer, mine, theirs
        super().__init__(message)


class GroupBrokenError(TransportError):
    """The group failed in an earlier operation, and is useless; ``peer`` is that of the failure."""


class NestedCallError(RingcollError, RuntimeError):
    """A call was made within an operation of its group that would have to be over first."""


class GroupChangedError(RingcollError, RuntimeError):
    """Ranks of a group were lost, and a call may need other shapes or another root: call again."""


class MissingExtraError(RingcollError, ImportError):
    """A package is missing that an extra of ringcoll installs."""


class BackwardError(RingcollError, RuntimeError):
    """Gradients arrived that could not be taken; the message says what to do."""


class CaptureError(RingcollError, RuntimeError):
    """An operation cannot be captured in a CUDA graph; nothing was enqueued."""


class TrainingError(RingcollError, RuntimeError):
    """Training cannot go on, on any rank; the message says where and in which step."""


class TraceError(RingcollError, RuntimeError):
    """A trace could not be taken or written; the group can still be used."""


def described(error: BaseException) -> str:
    """The name of an error's class, and the error's text if it has one."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")
