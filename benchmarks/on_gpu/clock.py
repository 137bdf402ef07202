"""The time that a GPU takes for a call, without the time of the host.

A kernel on a megabyte takes a microsecond, and its launch several. So as many calls as take a
millisecond are captured in a CUDA graph, and events around its replay measure their time.
Calls that cannot be captured are timed one by one. The GPU is kept busy until all calls are enqueued.
Contenders take turns, in an order that changes: a GPU that heats up slows all contenders. Samples
until its clocks have gone up do not count. Two contenders are compared by the pairs of their samples
of the same round, so that what changes from round to round changes both.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ringcoll.tools.bench import Summary, summarize

__all__ = ["Ratio", "Timer", "alternate", "host_samples", "paired", "rotation", "timer"]

_CACHES = 4  # buffers take turns until they are so many times what the L2 cache holds
_SAMPLE_S = 1e-3  # of a sample: much longer than the time between two events without work
_LAUNCH_S = 2e-6  # of a kernel within a graph; taken to tell how many make up a sample
_BYTES_PER_S = 3e12  # the same
_AHEAD_CYCLES = 1_000_000  # half a millisecond: a graph of some hundred kernels is enqueued in less
_TAIL = 0.025  # of both sides: 95 % lie between
_WARM_S = 0.3  # of work, after which a GPU that was idle runs at the clocks that it keeps


class Timer(NamedTuple):
    """A measurement: ``sample()`` is the time of one call in seconds."""

    sample: Callable[[], float]
    how: str
    """``"graph"``, ``"events"``, or ``"host"`` where there is no GPU."""


class Ratio(NamedTuple):
    """How many times as fast: the median over pairs of samples, and where the true median lies.

    The true median is between ``low`` and ``high`` with a probability of 95 %; with fewer than 6
    pairs, which cannot say that, these are the smallest and the largest ratio.
    """

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.low:.4g} to {self.high:.4g})"


def paired(ours_s: Sequence[float], theirs_s: Sequence[float]) -> Ratio:
    """Compare two contenders by their samples of the same rounds; above 1 ours is the faster one.

    The bounds are those of the sign test: of n ratios, each is above the true median as a coin
    shows heads.

    Examples
    --------
    >>> print(paired([1.0, 2.0, 4.0], [2.0, 4.0, 4.0]))
    2 (1 to 2)
    """
    ratios = sorted(theirs / ours for ours, theirs in zip(ours_s, theirs_s, strict=True))
    number, tail, left_out = len(ratios), 0.0, 0
    while (tail := tail + math.comb(number, left_out) / 2**number) <= _TAIL:
        left_out += 1
    outer = max(0, left_out - 1)
    return Ratio(statistics.median(ratios), ratios[outer], ratios[-1 - outer])


def rotation(nbytes: int, device: torch.device) -> int:
    """Number of sets of so many bytes that take turns, so that no buffer is in the L2 cache."""
    if device.type != "cuda":
        return 2
    cached = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, -(-_CACHES * cached // nbytes))


def timer(
    runs: Sequence[Callable[[], object]],
    nbytes: int,
    device: torch.device,
    *,
    captured: bool = True,
) -> Timer:
    """Make ready to time calls that take turns, one for each set of buffers.

    Parameters
    ----------
    runs
        The calls; each may run any number of times.
    nbytes
        Bytes that one call reads and writes.
    device
        The device of the buffers.
    captured
        Whether to time a CUDA graph of the calls, where that is possible.
    """
    call_s = nbytes / _BYTES_PER_S + _LAUNCH_S
    rounds = max(1, round(_SAMPLE_S / call_s / len(runs))) if device.type == "cuda" else 1
    calls = [*runs] * rounds
    if device.type != "cuda":
        return Timer(lambda: _on_host(calls), "host")
    for run in runs:  # kernels are loaded, and memory allocated, before the capture
        run()
    torch.cuda.synchronize(device)
    if captured:
        try:
            graph = torch.cuda.CUDAGraph()
            # A capture that fails leaves its own stream behind as the current one.
            with torch.cuda.stream(torch.cuda.current_stream(device)), torch.cuda.graph(graph):
                _all(calls)
            return Timer(lambda: _between_events(graph.replay) / len(calls), "graph")
        except RuntimeError:
            torch.cuda.synchronize(device)
    return Timer(lambda: _between_events(lambda: _all(calls)) / len(calls), "events")


def _all(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _on_host(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    _all(calls)
    return (time.perf_counter() - start) / len(calls)


def _between_events(run: Callable[[], object]) -> float:
    event: Any = torch.cuda.Event  # torch has no types for it
    begin, end = (event(enable_timing=True) for _ in range(2))
    keep_busy: Any = torch.cuda._sleep  # the same
    keep_busy(_AHEAD_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3  # it is in milliseconds


def alternate(
    timers: Sequence[Timer], rounds: int, *, warm_s: float = _WARM_S
) -> list[tuple[float, ...]]:
    """Take samples of contenders in turns; those of the first ``warm_s`` do not count.

    Returns
    -------
    list
        The samples of each contender, in seconds, in the order of the rounds.
    """
    order, shuffler = list(range(len(timers))), random.Random(0)  # no secret

    def one_round() -> list[float]:
        shuffler.shuffle(order)
        times = {index: timers[index].sample() for index in order}
        return [times[index] for index in range(len(timers))]

    warm = time.perf_counter() + (0.0 if timers[0].how == "host" else warm_s)
    one_round()
    while time.perf_counter() < warm:
        one_round()
    samples = [one_round() for _ in range(rounds)]
    return [*zip(*samples, strict=True)]


def host_samples(
    run: Callable[[], object], device: torch.device, *, calls: int, rounds: int
) -> Summary:
    """Time of the host for a call; so few calls at once that the GPU's queue of 1024 is never full."""
    samples = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(calls):
            run()
        spent = time.perf_counter() - start
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            samples.append(spent / calls)
    return summarize(samples)
