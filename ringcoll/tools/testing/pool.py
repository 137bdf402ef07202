"""The pool of processes on which tests run, and the calls and answers between pytest and ranks.

There is one pool, as large as the largest test so far; a smaller test uses the first ranks. It
starts with the first test, outlives tests that fail, and is started anew after a rank has died or
has not come back. The ranks keep their default group from call to call; they make another one after
a failure, and where a test has made or ended groups.

A rank finds a test's function by its module's file and its name, and so the classes of the test's
arguments: with ``--import-mode=importlib``, Python finds no ``conftest``, or another one. A module
has assertions that pytest writes if it has them in pytest's process. A function without a name of
its own is sent by cloudpickle. The filters of warnings and the level of the root logger are those
of pytest's process at the time of the call.

A rank answers with a value or a failure. A rank that fails leaves its groups, so that ranks that
wait for it fail soon, too. The failure that came first in time is the cause. Its exception is
raised by the parent; the ranks' tracebacks stand above it, the first rank's first.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import logging
import os
import pickle
import pickletools
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import reduce
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.runtime.launch import RankError, Ranks, by_value, pickled, rendezvous, report
from ringcoll.runtime.process import thread_stacks
from ringcoll.tools.testing import plugin

_START_S = 120.0  # for ranks to start, and to load a test's module
MORE_S = 2.0
"""Seconds for the group's own error to come before the pool's, which knows less."""

_LIBRARY = f"{Path(__file__).parents[2]}{os.sep}"


class Source(NamedTuple):
    """The place of a module; a package has a ``path``, and without ``__init__`` no file."""

    name: str
    file: str | None
    path: tuple[str, ...] | None
    rewritten: bool  # by pytest, so that assertions show the values


Named = tuple[Source, str]  # module, qualified name
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Copy = TypeVar("Copy")


class Group(NamedTuple):
    """The default group of a test."""

    backend: str
    world_size: int
    timeout_s: float


class _PoolCall(NamedTuple):
    group: Group
    number: int  # of the group; ranks that have another one make it
    function: Named | bytes
    arguments: bytes
    sources: list[Source]  # of what the function and the arguments are made of
    path: list[str]
    filters: bytes  # of warnings
    log_level: int
    full_trace: bool


class _RankAnswer(NamedTuple):
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


def _source(name: str) -> Source:
    module = sys.modules[name]
    file, path = getattr(module, "__file__", None), getattr(module, "__path__", None)
    loader = type(getattr(module, "__loader__", None))
    return Source(
        name,
        file and os.path.abspath(file),  # noqa: PTH100
        None if path is None else tuple(path),
        loader.__module__.startswith("_pytest."),
    )


def _body(module: Any, name: str) -> Any:
    """A function of a module; of a test that `ranks` has wrapped, what is inside."""
    function = reduce(lambda value, part: getattr(value, part, None), name.split("."), module)
    return getattr(function, "ringcoll_ranks", (None, function))[1]


def _packed(function: Callable[..., Any]) -> Named | bytes:
    """The place of a function; its bytes if a rank cannot find it by name."""
    name = getattr(function, "__qualname__", "")  # an object that can be called has none
    module = sys.modules.get(function.__module__)
    if name and getattr(module, "__file__", None) and _body(module, name) is function:
        return _source(function.__module__), name
    return by_value(function, function) or pickled(function)


def _sources(*pickles: bytes, modules: Collection[str] = ()) -> list[Source]:
    """The places of modules, and of those that pickles name, each after its packages."""
    opcodes = itertools.chain.from_iterable(map(pickletools.genops, pickles))
    texts = {*modules, *(text for _, text, _ in opcodes if type(text) is str)}
    names = {
        ".".join(parts[: number + 1])
        for parts in (text.split(".") for text in texts & sys.modules.keys())
        for number in range(len(parts))
    }
    return [_source(name) for name in sorted(names & sys.modules.keys() - {"__main__"})]


def _filters() -> bytes:
    """The filters of warnings of this process, but for classes that no rank can have."""
    kept = []
    for each in warnings.filters:
        with contextlib.suppress(Exception):
            pickle.dumps(each)
            kept.append(each)
    return pickle.dumps(kept)


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


def _raise_cause(
    error: RankError, failures: Sequence[Failure], world_size: int, hanging: str = ""
) -> NoReturn:
    """Raise the death of a rank; if no rank died, the exception of the rank that failed first."""
    __tracebackhide__ = True
    own = {failure.rank: (failure.kind, failure.text) for failure in failures}
    for rank, (kind, _) in error.failures.items():
        if kind == "ProcessDied":
            raise RankError(rank, error.failures | own, "") from None
    raise_first(failures, world_size, hanging)
    raise error from None


class _Pool:
    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._loaded: set[Source] = set()  # modules of functions that the ranks have loaded
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
            self._loaded, self._group = set(), None
            ranks = Ranks(largest, backend=None, timeout_s=_START_S, outlives_errors=True)
            self._ranks = ranks
        if isinstance(function, tuple) and function[0] not in self._loaded:
            failures: list[Failure] = []
            try:
                sources = _sources(modules=[function[0].name])
                ranks.run(_prepare, sources, sys.path, on_report=failures.append)
            except RankError as error:
                _raise_cause(error, failures, largest)
            self._loaded.add(function[0])
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
        sources = _sources(sent, *([packed] if isinstance(packed, bytes) else ()))
        call = _PoolCall(
            group, self._number, packed, sent, sources, sys.path, _filters(), logging.root.level,
            plugin.full_trace,
        )  # fmt: skip
        reports: list[Failure | tuple[int, str]] = []
        try:
            answers: list[_RankAnswer] = ranks.run(
                _on_rank, call, on_report=reports.append, timeout_s=group.timeout_s + MORE_S
            )[: group.world_size]
        except BaseException as error:
            self._group = None
            error = error.with_traceback(None)  # a test is not about this library
            hanging = where(dict(item for item in reports if not isinstance(item, Failure)))
            if isinstance(error, TimeoutError):
                raise error from RanksTraceback(hanging)
            if isinstance(error, RankError):
                failures = [item for item in reports if isinstance(item, Failure)]
                _raise_cause(error, failures, group.world_size, hanging)
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


def _load(source: Source) -> Any:
    """The module that pytest's process has under a name, also if others have that name."""
    name, file, path, rewritten = source
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None) == file:
        return module
    if not rewritten:  # Python may find it
        with contextlib.suppress(ImportError, ValueError):
            if (spec := find_spec(name)) is None or file in (spec.origin, None):
                return import_module(name)
    kind = _WithAssertions if rewritten else SourceFileLoader
    spec = spec_from_file_location(name, file, loader=kind(name, file)) if file else None
    spec = spec or ModuleSpec(name, None, is_package=True)
    if path is not None:
        spec.submodule_search_locations = [*path]
    sys.modules[name] = module = module_from_spec(spec)
    if spec.loader is not None:
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


def _prepare(sources: list[Source], path: list[str]) -> None:
    def load() -> None:
        sys.path[:] = path
        for source in sources:
            _load(source)

    outcome = attempt(rendezvous()[1], load)
    if isinstance(outcome, Failure):
        report(outcome)
        raise _FailedError


def _bound(call: _PoolCall, rank: int) -> Callable[[], Any]:
    for source in call.sources:
        _load(source)
    if isinstance(call.function, bytes):
        function = pickle.loads(call.function)
    else:
        source, name = call.function
        function = _body(_load(source), name)
    args, options = pickle.loads(call.arguments)[rank]
    return lambda: function(*args, **options)


def _on_rank(call: _PoolCall) -> _RankAnswer | None:
    """Run a test, on a rank of the pool."""
    global _joined  # noqa: PLW0603  # of the process, as torch's default group is
    store, rank, _ = rendezvous()
    if call.number != _joined:
        leave()
        _joined = call.number
    if rank >= call.group.world_size:
        return None
    main = threading.get_ident()

    def test() -> Any:
        sys.path[:] = call.path
        if not dist.is_initialized():
            join(call.group, rank, dist.PrefixStore(f"test/{call.number}", store))
        run = _bound(call, rank)
        logging.root.setLevel(call.log_level)
        with warnings.catch_warnings():
            warnings.resetwarnings()
            warnings.filters.extend(pickle.loads(call.filters))  # type: ignore[attr-defined]
            return run()

    clock = threading.Timer(
        call.group.timeout_s + MORE_S / 2, lambda: report((rank, stack_of(main)))
    )
    clock.start()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            outcome = attempt(rank, test, full_trace=call.full_trace)
    finally:
        clock.cancel()
    if isinstance(outcome, Failure):
        if printed.getvalue():
            outcome = outcome._replace(trace=f"{outcome.trace}printed:\n{printed.getvalue()}")
        report(outcome)
        leave()
        raise _FailedError
    groups = len(dist.distributed_c10d._world.pg_map)  # the public list has only names
    return _RankAnswer(outcome, printed.getvalue(), groups == 1)


# Exceptions of pytest, which cannot be pickled.
_PYTEST_OUTCOMES = {"Failed": "fail", "Skipped": "skip", "XFailed": "xfail"}


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


def attempt(rank: int, function: Callable[[], Any], *, full_trace: bool = False) -> bytes | Failure:
    """Call a function on a rank; its value is pickled, so that memory is not shared."""
    try:
        value = function()
        try:
            return pickled(value)
        except Exception as error:  # noqa: BLE001  # of any class that pickles itself
            raise TypeError(f"the value that the test returns cannot be sent: {error}") from None
    except BaseException as error:  # noqa: BLE001  # the parent raises the error
        now_s = time.monotonic()
        described = traceback.TracebackException.from_exception(error)
        link: traceback.TracebackException | None = described
        while link is not None and not full_trace:
            link.stack[:] = [line for line in link.stack if not line.filename.startswith(_LIBRARY)]
            link = link.__cause__ or link.__context__
        lines = described.format()
        # Frames refer to groups, which end when nothing refers to them.
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = error.__context__ = error.__cause__ = None
        written = b""
        with contextlib.suppress(Exception):
            pickle.loads(pickled(error))
            written = pickled(error)
        return Failure(now_s, rank, type(error).__name__, str(error), "".join(lines), written)


def stack_of(thread: int | None) -> str:
    """The frames of a thread above those of this library that call its test."""
    frames = thread_stacks().get(thread or 0, ())
    room = str(Path(__file__).parent)
    lines = itertools.takewhile(lambda frame: not frame.file.startswith(room), frames)
    return "".join(traceback.format_list([traceback.FrameSummary(*each) for each in lines][::-1]))


def where(stacks: dict[int, str]) -> str:
    """Sentences on the places at which ranks hang."""
    return "\n".join(f"rank {rank} is here:\n{stack}" for rank, stack in sorted(stacks.items()))


def raise_first(failures: Sequence[Failure], world_size: int, hanging: str = "") -> None:
    """Raise the exception of the rank that failed first, if a rank failed."""
    __tracebackhide__ = True
    if not failures:
        return
    first, *others = sorted(failures)
    text = f"rank {first.rank} of {world_size}:\n{first.trace}"
    for other in others:
        summary = f"{other.kind}: {other.text}".strip().partition("\n")[0]
        text += f"\nrank {other.rank} failed after it: {summary}"
    cause = RanksTraceback(f"{text}\n{hanging}" if hanging else text)
    error: BaseException
    if first.kind in _PYTEST_OUTCOMES:
        import pytest

        error = getattr(pytest, _PYTEST_OUTCOMES[first.kind]).Exception(first.text)
    elif first.error:
        error = pickle.loads(first.error)
    else:
        by_rank = {failure.rank: (failure.kind, failure.text) for failure in failures}
        error = RankError(first.rank, by_rank, first.trace)
    raise error from cause
