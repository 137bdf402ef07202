"""Settings of the user: variables of the environment, numbers, and time limits.

No other module reads the environment's variables of the library:

============================  ======================================================
``RINGCOLL_TRANSPORT``        the transport of CPU tensors, whatever the program asks for
``RINGCOLL_CUDA_TRANSPORT``   the same for CUDA tensors
``RINGCOLL_ALGORITHM``        rules that force algorithms: see `ringcoll.schedules.cost.rules`
``RINGCOLL_TUNING``           a file of ``ringcoll tune`` or ``ringcoll fit``; ``off``: no
                              measurement is read or kept
``RINGCOLL_REDUCTION``        the engine for CUDA tensors: ``auto``, ``cupy`` or ``torch``
``RINGCOLL_INTERPRETER``      what runs programs over shared memory: ``auto``, ``c`` or
                              ``python``
``RINGCOLL_VERIFY_MESSAGES``  ``1``: messages have checksums; ``0``: none has
``RINGCOLL_FAULTS``           faults on purpose: see `ringcoll.runtime.transport.faulty`
``RINGCOLL_HANG_NOTICE``      seconds after which a rank says that it waits, 10 by default;
                              ``off``: never
``RINGCOLL_DUMP``             a folder: each rank whose group breaks writes its record to it
``RINGCOLL_DEBUG``            the log's level, ``info`` or ``debug``; ``detail`` also compares calls
============================  ======================================================

``torchrun`` sets ``TORCHELASTIC_ERROR_FILE``, in which it looks for the error of a rank. Torch's
allocator reads ``PYTORCH_ALLOC_CONF``, and its older name ``PYTORCH_CUDA_ALLOC_CONF``.

A torch program that never makes a group of the library imports this module: it needs no other room
but errors, until it reads rules.
"""

from __future__ import annotations

import logging
import math
import os
from datetime import timedelta
from operator import index
from pathlib import Path
from typing import Any

from ringcoll.errors import ArgumentError, TuningFileError

FOREVER_S = 2.0**31
"""A time limit that nobody lives to see: 68 years. Clocks that count nanoseconds in 64 bits hold
it, and Python's locks; both end before `timedelta.max`."""

TRANSPORT_VARIABLES = {"cpu": "RINGCOLL_TRANSPORT", "cuda": "RINGCOLL_CUDA_TRANSPORT"}
"""The variable that forces a transport, by the type of the tensors' device."""
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_TUNING, _REDUCTION = "RINGCOLL_TUNING", "RINGCOLL_REDUCTION"
INTERPRETERS = "RINGCOLL_INTERPRETER"
VERIFY_MESSAGES, FAULTS = "RINGCOLL_VERIFY_MESSAGES", "RINGCOLL_FAULTS"
DUMP, HANG_NOTICE = "RINGCOLL_DUMP", "RINGCOLL_HANG_NOTICE"
_DEBUG, _DETAIL = "RINGCOLL_DEBUG", "detail"

_log = logging.getLogger("ringcoll")


def seconds_of(limit: Any, argument: str = "timeout", rank: int | None = None) -> float:
    """A time limit in seconds, at most `FOREVER_S`; ``inf`` and whatever is longer mean for ever.

    Raises `ArgumentError` if it is not a positive time.
    """
    try:
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
    except OverflowError:
        seconds = FOREVER_S if limit > 0 else 0.0  # a whole number that is too large for a float
    except (RuntimeError, TypeError, ValueError):
        seconds = 0.0
    if isinstance(limit, str | bytes) or not seconds > 0:
        raise ArgumentError("must be positive", argument, "> 0 s", limit, rank)
    return min(seconds, FOREVER_S)


def whole(number: Any) -> Any:
    """A whole number as an ``int``; anything else stays as it is, and its user refuses it."""
    if number is None or type(number) is int:
        return number
    try:
        return index(number)
    except (RuntimeError, TypeError):
        return number


def forced_transport(kind: str) -> str | None:
    """The transport that the environment forces for tensors of ``"cpu"`` or ``"cuda"``."""
    return os.environ.get(TRANSPORT_VARIABLES[kind]) or None


def ranks_may_share_gpus(nccl_version: tuple[int, ...]) -> bool:
    """Whether NCCL connects ranks that share a GPU: since 2.30, if NCCL's variable allows it."""
    return nccl_version >= (2, 30) and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"


def expandable_segments() -> str:
    """The setting by which torch's allocator expands segments, as ``NAME=VALUE``, or ``""``."""
    for name in _ALLOCATOR:
        for setting in os.environ.get(name, "").split(","):
            key, _, value = setting.partition(":")
            if (key.strip(), value.strip()) == ("expandable_segments", "True"):
                return f"{name}={setting.strip()}"
    return ""


def reduction() -> str:
    """Name of the engine that reduces CUDA tensors: ``"cupy"``, ``"torch"``, or ``"auto"``.

    Raises `ArgumentError` for another value.
    """
    return _one_of(_REDUCTION, "auto", "cupy", "torch")


def interpreter() -> str:
    """What runs programs over shared memory: ``"c"``, ``"python"``, or ``"auto"``.

    Raises `ArgumentError` for another value.
    """
    return _one_of(INTERPRETERS, "auto", "c", "python")


def _one_of(variable: str, *names: str) -> str:
    name = os.environ.get(variable, "") or names[0]
    if name not in names:
        expected = f"one of {', '.join(names)}"
        raise ArgumentError("it has no such value", variable, expected, name)
    return name


def forced_text() -> str:
    """The text of ``RINGCOLL_ALGORITHM``; empty if the variable is not set."""
    from ringcoll.schedules.cost import FORCED

    return os.environ.get(FORCED, "").strip()


def tuning_file() -> tuple[Path | None, bool]:
    """The file of ``ringcoll tune``, and whether ``RINGCOLL_TUNING`` names it.

    The file is ``None`` for ``RINGCOLL_TUNING=off``. By default it is in the user's cache. Raises
    `TuningFileError` if the variable names the home of a user who is not there.
    """
    asked = os.environ.get(_TUNING, "")
    if not asked:
        return _cached("tuning.json"), False
    try:
        return (None if asked == "off" else Path(asked).expanduser()), True
    except RuntimeError as error:  # of a user who is not there
        raise TuningFileError(f"{_TUNING}: {error}", path=asked) from error


def measured_file() -> Path | None:
    """The file of what groups have measured; ``None`` for ``RINGCOLL_TUNING=off``."""
    return None if os.environ.get(_TUNING, "") == "off" else _cached("measured.json")


def _cached(name: str) -> Path | None:
    """A file in the user's cache; ``None`` for a user without a home."""
    cache = os.environ.get("XDG_CACHE_HOME", "")  # by its standard ignored unless absolute
    if not cache.startswith("/"):
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:
            return None
    return Path(cache) / "ringcoll" / name


def without_tuning() -> None:
    """Use no tuning file and no forced rules from now on, in this process and its children."""
    from ringcoll.schedules.cost import FORCED

    os.environ[_TUNING] = "off"
    os.environ.pop(FORCED, None)


def verifies_messages() -> bool | None:
    """Whether messages have checksums; ``None`` if that is left to the program.

    Raises `ArgumentError` for another value than 0 and 1.
    """
    text = os.environ.get(VERIFY_MESSAGES, "")
    if text not in ("", "0", "1"):
        raise ArgumentError("not 0 or 1", VERIFY_MESSAGES, "0 or 1", text)
    return text == "1" if text else None


def faults() -> str:
    """The text of ``RINGCOLL_FAULTS``; empty if the variable is not set."""
    return os.environ.get(FAULTS, "")


def dump_folder() -> Path | None:
    """The folder of ``RINGCOLL_DUMP``, or ``None``."""
    name = os.environ.get(DUMP)
    return Path(name) if name else None


def hang_notice_s() -> float:
    """Seconds after which a rank that waits says so; infinite for ``RINGCOLL_HANG_NOTICE=off``.

    Raises `ArgumentError` if the variable is no positive number.
    """
    text = os.environ.get(HANG_NOTICE, "") or "10"
    try:
        seconds = math.inf if text == "off" else float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        expected = "a positive number of seconds, or off"
        raise ArgumentError("not a time", HANG_NOTICE, expected, text)
    return seconds


def compares_calls() -> bool:
    """Whether the ranks of a group are to compare each call before they send anything."""
    return os.environ.get(_DEBUG, "").lower() == _DETAIL


def error_file() -> Path | None:
    """The file in which ``torchrun`` looks for the error of this process, or ``None``."""
    name = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(name) if name else None


def log_as_asked() -> None:
    """Set the level of the log ``ringcoll`` to that of ``RINGCOLL_DEBUG``."""
    asked = os.environ.get(_DEBUG, "").lower()
    if not asked:
        return
    if asked not in ("info", "debug", _DETAIL):  # the program can still run
        _log.warning("%s is %r, and not info, debug or detail", _DEBUG, asked)
        return
    _log.setLevel("DEBUG" if asked == _DETAIL else asked.upper())
    if not _log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ringcoll[%(process)d] %(message)s"))
        _log.addHandler(handler)
