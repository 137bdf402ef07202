"""Torch's own tests of its distributed backends, run on the ranks of a pool.

They are the methods of ``DistributedTest._DistTestBase`` in torch's wheel. Torch starts
processes for each of them; here the ranks of one pool run all, each with a default group
of its own, on a part of the store that nobody else uses. What a test leaves behind in its
process is put back.

Which tests are run for which backend torch decides by names and world sizes:

- The module is imported under gloo's name, as most of that is decided then.
- Tests that only MPI's name opens are opened too: `closed`.
- Tests of groups of ranks 1 and 2 are run with 3 ranks; torch wants 8, except of MPI.

What stays closed is what the tests assert of the profiler: that an operation's event has
the backend's name, where that is one of a list.

`main` finds out which tests gloo itself passes, and writes it down::

    python -m tests.programs.torch_suite --backend gloo --world-size 2
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import sys
import tempfile
import time
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from ringcoll.runtime.launch import RankError, Ranks, rendezvous
from ringcoll.training.backend import PointToPoint, ProcessGroup

__all__ = [
    "LIMIT_S",
    "PASSED",
    "RECORD",
    "Pool",
    "gates",
    "no_native_collective",
    "outcome_of",
    "run",
]

PASSED = "passed"
LIMIT_S = 100.0  # of one test
RECORD = Path(__file__).parents[1] / "cases" / "torch_suite_on_gloo.json"
_SUITE = "torch.testing._internal.distributed.distributed_test"

# Their bodies choose CPU tensors where the backend's name is gloo or mpi, and else GPUs.
_CPU_BY_NAME = "test_accumulate_gradients_no_sync"


def _environment(directory: str) -> None:
    """Set what torch's module reads, when it is imported and later."""
    _, _, world_size = rendezvous()
    os.environ.update(
        BACKEND="gloo",
        INIT_METHOD=f"file://{directory}/init_dir/shared_init_file",
        MASTER_ADDR="127.0.0.1",
        TEMP_DIR=directory,
        WORLD_SIZE=str(world_size),
    )


@functools.cache
def _module() -> Any:
    """Torch's module; what it decides by the backend's name is decided as for gloo."""
    common: Any = importlib.import_module("torch.testing._internal.common_distributed")
    for backends in common.DistTestCases.backend_feature.values():
        if "gloo" in backends:
            backends.add("ringcoll")
    module = importlib.import_module(_SUITE)
    gc.freeze()  # what is looked through after every test is then small
    return module


@functools.cache
def _suite() -> Any:
    """A class with all the tests, whose barrier waits instead of looking every 0.1 s."""
    module = _module()

    class Suite(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        meeting: dist.Store
        barriers = 0

        def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
            self.barriers += 1
            here = f"barrier/{self.barriers}"
            if self.meeting.add(here, 1) == (wait_for or dist.get_world_size()):
                self.meeting.set(f"{here}/all", "")
            self.meeting.wait([f"{here}/all"], timedelta(seconds=max(timeout, 30)))

    return Suite


def closed(name: str) -> str | None:
    """Why torch does not run a test under gloo's name, if it does not.

    That only MPI runs all-to-all on CPU tensors is a table that was not kept up: gloo
    can do it. Those tests count as open.
    """
    function = getattr(_suite(), name)
    if not getattr(function, "__unittest_skip__", False):
        return None
    reason: str = function.__unittest_skip_why__
    return None if reason.startswith("Only MPI supports") else reason


def gates(directory: str) -> dict[str, str]:
    """All tests of torch's module, and why torch does not run them, or ""; runs on a rank."""
    with _put_back():
        _environment(directory)
        names = [name for name in dir(_suite()) if name.startswith("test_")]
        return {name: closed(name) or "" for name in names}


def run(name: str, backend: str, directory: str, number: int) -> str:
    """Run one test, on every rank.

    Parameters
    ----------
    name
        Of the test.
    backend
        Of the default group.
    directory
        An empty one, the same for all ranks, and for this run only.
    number
        Of the run: different for each on the same pool.

    Returns
    -------
    str
        `PASSED`, or "skipped: " and the reason.

    Raises
    ------
    Exception
        What the test raises.
    AssertionError
        Also if a group of the library's has run a native collective.
    """
    faulthandler.dump_traceback_later(LIMIT_S - 5, exit=False)
    try:
        with _put_back():
            return _run(name, backend, directory, dist.PrefixStore(str(number), rendezvous()[0]))
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run(name: str, backend: str, directory: str, store: dist.Store) -> str:
    _, rank, world_size = rendezvous()
    _environment(directory)
    module: Any = _module()
    reason = closed(name)
    if reason is not None:
        return f"skipped: {reason}"
    module.INIT_METHOD = os.environ["INIT_METHOD"]
    module.BACKEND = "gloo" if name.startswith(_CPU_BY_NAME) else backend
    os.environ["BACKEND"] = "mpi" if world_size > 2 else backend
    test = _suite()(name)
    test.rank, test.file_name = rank, f"{directory}/init_dir/of_the_test"
    test.meeting = dist.PrefixStore("test", store)
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
    with contextlib.ExitStack() as stack:
        if backend == "ringcoll":
            stack.enter_context(no_native_collective())
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=seconds),
        )
        test._barrier()
        importlib.import_module("torch.testing._internal.common_utils").set_rng_seed()
        outcome = outcome_of(getattr(test, name))
        test._barrier(wait_for=world_size)
    dist.destroy_process_group()
    return outcome


def outcome_of(call: Callable[[], None]) -> str:
    """Call a test; skipping, which torch does in two ways, is no failure."""
    try:
        call()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as end:
        common: Any = importlib.import_module("torch.testing._internal.common_distributed")
        reasons: dict[Any, str] = {
            skip.exit_code: skip.message for skip in common.TEST_SKIPS.values()
        }
        if end.code not in reasons:
            raise AssertionError(f"the test ends its process with {end.code}") from end
        return f"skipped: {reasons[end.code]}"
    return PASSED


@contextlib.contextmanager
def no_native_collective() -> Iterator[None]:
    """Check that the groups' native part does nothing but send and receive for the user.

    It counts its operations, of both kinds; those that are asked of it are counted here.
    """
    groups: list[Any] = []
    messages: Counter[int] = Counter()
    initialise, channel = ProcessGroup.__init__, PointToPoint.of

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        groups.append(self)

    def counting(self: Any, tensor: torch.Tensor) -> Any:
        messages[id(self)] += 1
        return channel(self, tensor)

    with (
        mock.patch.object(ProcessGroup, "__init__", noting),
        mock.patch.object(PointToPoint, "of", counting),
    ):
        yield
    for group in groups:
        ran = sum(native._get_sequence_number_for_group() for native in group._messages.groups())
        assert ran == messages[id(group._messages)], (
            f"the native part of a group of {group.size()} has run {ran} operations, "
            f"of which {messages[id(group._messages)]} are the test's sends and receives"
        )


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Undo what tests change in their process."""
    environment = dict(os.environ)
    dtype, level, threads = (
        torch.get_default_dtype(),
        dist.get_debug_level(),
        torch.get_num_threads(),
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        dist.set_debug_level(level)
        torch._dynamo.reset()
        gc.collect()  # modules that are wrapped hold on to groups


class Pool:
    """Ranks without a group, one world size at a time, that are replaced when they end."""

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._runs = 0

    def ranks(self, world_size: int) -> Ranks:
        """The ranks of a pool of that size; those of another size are ended."""
        ranks = self._ranks
        if ranks is not None and (
            ranks.world_size != world_size or not all(item.is_alive() for item in ranks.processes)
        ):
            ranks.close()
            ranks = None
        if ranks is None:
            ranks = self._ranks = Ranks(world_size, backend=None, timeout_s=LIMIT_S)
        return ranks

    def run(self, name: str, backend: str, world_size: int, directory: Path) -> set[str]:
        """Run one test; the outcomes are all different ones that the ranks have."""
        (directory / "test_dir").mkdir()
        (directory / "init_dir").mkdir()
        self._runs += 1
        ranks = self.ranks(world_size)
        return set(ranks.run(run, name, backend, str(directory), self._runs))

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.close()


def main() -> None:
    """Run all tests on a backend, and write down the outcomes if it is gloo."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", nargs="*", help="names; by default all")
    options = parser.parse_args()
    pool = Pool()
    outcomes: dict[str, str] = {}
    try:
        with tempfile.TemporaryDirectory() as directory:
            everything = pool.ranks(options.world_size).run(gates, directory)[0]
        for name in options.only or everything:
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as directory:
                try:
                    found = pool.run(name, options.backend, options.world_size, Path(directory))
                    outcome = found.pop() if len(found) == 1 else f"failed: {sorted(found)}"
                except TimeoutError as error:
                    outcome = f"failed: {error}"
                except RankError as error:
                    outcome = "failed: " + ": ".join(error.failures[error.rank]).splitlines()[0]
                    if options.only:
                        sys.stdout.write(f"{error.details}\n")
            outcomes[name] = outcome
            sys.stdout.write(f"{time.monotonic() - began:6.2f} s  {name}: {outcome}\n")
            sys.stdout.flush()
    finally:
        pool.close()
    if options.backend == "gloo" and not options.only:
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        record["torch"] = torch.__version__.split("+")[0]
        record[str(options.world_size)] = outcomes
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    # Functions are sent to the ranks by the name of their module.
    importlib.import_module("tests.programs.torch_suite").main()
