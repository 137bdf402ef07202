"""The pool of processes on which tests run, and what the processes are sent.

There is one pool, as large as the largest test so far; a smaller test uses the first ranks. It
starts with the first test, outlives tests that fail, and is started anew after a rank has died or
has not come back. The ranks keep their default group from call to call; they make another one after
a failure, and where a test has made or ended groups.

A rank finds a test's function by its module's file and its name, and loads the module with the
assertions that pytest writes. A function without a name of its own is sent by cloudpickle.

A rank answers with a value or a failure. A rank that fails leaves its groups, so that ranks that
wait for it fail soon, too. The failure that came first in time is the cause. Its exception is
raised by the parent; the ranks' tracebacks stand above it, the first rank's first.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import reduce
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from itertools import takewhile
from types import CodeType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.launch import RankError, Ranks, by_value, pickled, rendezvous, report
from ringcoll.machine import stacks

_START_S = 120.0  # for ranks to start, and to load a test's module
_MORE_S = 2.0  # for the group's own error to come before the pool's, which knows less

Named = tuple[str, str, str]  # module, file, qualified name
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Copy = TypeVar("Copy")


class Group(NamedTuple):
    """The default group of a test."""

    backend: str
    world_size: int
    timeout_s: float


class _Call(NamedTuple):
    group: Group
    number: int  # of the group; ranks that have another one make it
    function: Named | bytes
    arguments: bytes
    path: list[str]


class _Answer(NamedTuple):
    value: bytes
    printed: str
    intact: bool  # whether the default group is there, and no other


def join(group: Group, rank: int, store: dist.Store) -> None:
    """Make the default group."""
    dist.init_process_group(
        group.backend,
        store=store,
        rank=rank,
        world_size=group.world_size,
        timeout=timedelta(seconds=group.timeout_s),
    )
    dist.barrier()  # ranks that have met learn soon that one of them has left


def _named(function: Any) -> Named | None:
    """Where a rank finds a function; ``None`` if it cannot be found by name."""
    module = sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if file is None or _body(module, function.__qualname__) is not function:
        return None
    return function.__module__, os.path.abspath(file), function.__qualname__  # noqa: PTH100


def _body(module: Any, name: str) -> Any:
    """A function of a module; of a test that `ranks` has wrapped, what is inside."""
    function = reduce(lambda value, part: getattr(value, part, None), name.split("."), module)
    return getattr(function, "ringcoll_ranks", (None, function))[1]


def _packed(function: Callable[..., Any]) -> Named | bytes:
    try:
        named = _named(function)
    except AttributeError:  # no function, but an object that can be called
        named = None
    return named or by_value(function, function) or pickled(function)


def copied(arguments: Sequence[Arguments], copy: Callable[[Any], Copy]) -> Copy:
    """Copy a test's arguments for the ranks, or name one that cannot be copied."""
    __tracebackhide__ = True
    try:
        return copy(arguments)
    except Exception as error:  # noqa: BLE001  # of any class that pickles itself
        fault, name = error, "arguments"
    for args, options in arguments:
        for key, value in (*enumerate(args), *options.items()):
            try:
                copy(value)
            except Exception as error:  # noqa: BLE001  # of any class that pickles itself
                fault, name = error, str(key)
    raise ArgumentError(
        f"a fixture or argument cannot be sent to the ranks: {fault}; make it in the test",
        argument=name,
    ) from None


def _raise_cause(error: RankError, failures: Sequence[Failure], world_size: int) -> NoReturn:
    """Raise the death of a rank; if no rank died, the exception of the rank that failed first."""
    __tracebackhide__ = True
    own = {failure.rank: (failure.kind, failure.text) for failure in failures}
    for rank, (kind, _) in error.failures.items():
        if kind == "ProcessDied":
            raise RankError(rank, error.failures | own, "") from None
    raise_first(failures, world_size)
    raise error from None


class _Pool:
    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._files: set[str] = set()  # that the ranks have loaded
        self._group: Group | None = None  # that the ranks have; ``None`` if they have to make one
        self._number = 0

    def close(self) -> None:
        """End the processes; the next call starts others."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def ready(self, world_size: int, function: Named | bytes) -> Ranks:
        """Processes that have loaded a function's module, which is not part of a test's time."""
        ranks = self._ranks
        largest = max(world_size, ranks.world_size if ranks else 0)
        if ranks is None or ranks.world_size < largest or not ranks.alive:
            self.close()
            self._files, self._group = set(), None
            ranks = Ranks(largest, backend=None, timeout_s=_START_S, outlives_errors=True)
            self._ranks = ranks
        if isinstance(function, tuple) and function[1] not in self._files:
            failures: list[Failure] = []
            try:
                ranks.run(_prepare, function, sys.path, on_report=failures.append)
            except RankError as error:
                _raise_cause(error, failures, largest)
            self._files.add(function[1])
        return ranks

    def warm(self, world_size: int, function: Callable[..., Any]) -> None:
        """Start the processes that a test needs, before its time counts."""
        self.ready(world_size, _packed(function))

    def run(
        self, group: Group, function: Callable[..., Any], arguments: Sequence[Arguments]
    ) -> list[Any]:
        """Call a function on the ranks, with each rank's arguments; returns what each returned."""
        __tracebackhide__ = True
        packed = _packed(function)
        sent = copied(arguments, pickled)
        ranks = self.ready(group.world_size, packed)
        if group != self._group:
            self._group, self._number = group, self._number + 1
        call = _Call(group, self._number, packed, sent, sys.path)
        reports: list[Failure | tuple[int, str]] = []
        try:
            answers: list[_Answer] = ranks.run(
                _on_rank, call, on_report=reports.append, timeout_s=group.timeout_s + _MORE_S
            )[: group.world_size]
        except BaseException as error:
            self._group = None
            error = error.with_traceback(None)  # a test is not about this library
            if isinstance(error, TimeoutError):
                shown = [item for item in reports if not isinstance(item, Failure)]
                cause = "\n".join(f"rank {rank} is here:\n{stack}" for rank, stack in sorted(shown))
                raise error from RanksTraceback(cause)
            if isinstance(error, RankError):
                failures = [item for item in reports if isinstance(item, Failure)]
                _raise_cause(error, failures, group.world_size)
            raise error from None
        if not all(answer.intact for answer in answers):
            self._group = None
        for rank, answer in enumerate(answers):
            for line in answer.printed.splitlines():
                print(f"[rank {rank}] {line}")  # noqa: T201  # for pytest, which captures it
        return [pickle.loads(answer.value) for answer in answers]


POOL = _Pool()


_joined = 0  # number of the default group


class _FailedError(Exception):
    """The rank has reported how its test failed."""


class _WithAssertions(SourceFileLoader):
    """Load a module with assertions as pytest writes them: they show the values."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source, self.path)
        with contextlib.suppress(ImportError, TypeError):
            from _pytest.assertion.rewrite import rewrite_asserts  # there is no public name

            rewrite_asserts(tree, source)
        code: CodeType = self.source_to_code(tree, self.path)
        return code


def _load(name: str, file: str) -> Any:
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == file:
        return module
    with contextlib.suppress(ImportError):
        import_module(name.rpartition(".")[0] or name)  # for relative imports
    spec = spec_from_file_location(name, file, loader=_WithAssertions(name, file))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _prepare(function: Named, path: list[str]) -> None:
    def load() -> None:
        sys.path[:] = path
        _load(*function[:2])

    outcome = attempt(rendezvous()[1], load)
    if isinstance(outcome, Failure):
        report(outcome)
        raise _FailedError


def _bound(call: _Call, rank: int) -> Callable[[], Any]:
    if isinstance(call.function, bytes):
        function = pickle.loads(call.function)
    else:
        module, file, name = call.function
        function = _body(_load(module, file), name)
    args, options = pickle.loads(call.arguments)[rank]
    return lambda: function(*args, **options)


def _on_rank(call: _Call) -> _Answer | None:
    """Run a test, on a rank of the pool."""
    global _joined  # noqa: PLW0603  # of the process, as torch's default group is
    store, rank, _ = rendezvous()
    if call.number != _joined:
        leave()
        _joined = call.number
    if rank >= call.group.world_size:
        return None
    main = threading.get_ident()

    def show() -> None:
        frames = takewhile(lambda frame: frame.file != __file__, stacks().get(main, ()))
        lines = traceback.format_list([traceback.FrameSummary(*frame) for frame in frames])
        report((rank, "".join(reversed(lines))))

    def test() -> Any:
        sys.path[:] = call.path
        if not dist.is_initialized():
            join(call.group, rank, dist.PrefixStore(f"test/{call.number}", store))
        return _bound(call, rank)()

    clock = threading.Timer(call.group.timeout_s + _MORE_S / 2, show)
    clock.start()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            outcome = attempt(rank, test)
    finally:
        clock.cancel()
    if isinstance(outcome, Failure):
        if printed.getvalue():
            outcome = outcome._replace(trace=f"{outcome.trace}printed:\n{printed.getvalue()}")
        report(outcome)
        leave()
        raise _FailedError
    groups = len(dist.distributed_c10d._world.pg_map)  # the public list has only names
    return _Answer(outcome, printed.getvalue(), groups == 1)


_OF_PYTEST = {"Failed": "fail", "Skipped": "skip", "XFailed": "xfail"}  # they cannot be pickled


class Failure(NamedTuple):
    """A rank's exception, as it travels to the parent."""

    time_s: float  # of the clock that all processes of a host share
    rank: int
    kind: str
    text: str
    trace: str
    error: bytes  # pickled; empty if that is not possible


class RanksTraceback(Exception):  # noqa: N818  # the cause of an error, which shows where it was raised
    """Tracebacks of ranks."""


def leave() -> None:
    """End the groups of this rank, whatever state they are in."""
    with contextlib.suppress(Exception):
        if dist.is_initialized():
            dist.destroy_process_group()


def attempt(rank: int, function: Callable[[], Any]) -> bytes | Failure:
    """Call a function on a rank; its value is pickled, so that memory is not shared."""
    try:
        value = function()
        try:
            return pickled(value)
        except Exception as error:  # noqa: BLE001  # of any class that pickles itself
            raise TypeError(f"the value that the test returns cannot be sent: {error}") from None
    except BaseException as error:  # noqa: BLE001  # the parent raises the error
        now_s = time.monotonic()
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals["__name__"].startswith(
            "ringcoll.testing."
        ):
            trace = trace.tb_next
        lines = traceback.format_exception(type(error), error, trace)
        # Frames refer to groups, which end when nothing refers to them.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        written = b""
        with contextlib.suppress(Exception):
            pickle.loads(pickled(error))
            written = pickled(error)
        return Failure(now_s, rank, type(error).__name__, str(error), "".join(lines), written)


def raise_first(failures: Sequence[Failure], world_size: int) -> None:
    """Raise the exception of the rank that failed first, if a rank failed."""
    __tracebackhide__ = True
    if not failures:
        return
    first, *others = sorted(failures)
    text = f"rank {first.rank} of {world_size}:\n{first.trace}"
    for other in others:
        summary = f"{other.kind}: {other.text}".strip().partition("\n")[0]
        text += f"\nrank {other.rank} failed after it: {summary}"
    cause = RanksTraceback(text)
    error: BaseException
    if first.kind in _OF_PYTEST:
        import pytest

        error = getattr(pytest, _OF_PYTEST[first.kind]).Exception(first.text)
    elif first.error:
        error = pickle.loads(first.error)
    else:
        by_rank = {failure.rank: (failure.kind, failure.text) for failure in failures}
        error = RankError(first.rank, by_rank, first.trace)
    raise error from cause
