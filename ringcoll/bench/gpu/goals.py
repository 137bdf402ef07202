"""What has to be reached on an H200, and whether it was: from the rows of all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ringcoll.bench.gpu import bandwidth, collectives, correctness, host_time, rounding
from ringcoll.bench.gpu.rows import NOT_RUN, Row

__all__ = ["TABLE", "goals"]

TABLE = "What has to be reached"

_LARGE_NBYTES = 1 << 28


def goals(rows: Sequence[Row]) -> Iterator[Row]:
    """A row for each goal: what was wanted, what was measured, and the verdict."""
    yield from _correct(rows)
    for what in ("sum float32", "sum bfloat16"):
        yield _at_least(f"{what}, against a copy", 0.92, _of_kernel(rows, what, "/ copy"))
        yield _at_least(f"{what}, against torch.add", 1.0, _of_kernel(rows, what, "/ torch"))
    for what in ("sum + copy float32", "8-way sum float32"):
        yield _at_least(f"{what}, against a copy", 0.90, _of_kernel(rows, what, "/ copy"))
    launches = [
        one["median (us)"]
        for one in _cells(rows, host_time.TABLE)
        if one["what"] == host_time.LAUNCH and one["by"].startswith("cupy")
    ]
    yield _at_most("host time of a launch, 4 KiB (us)", 10.0, launches)
    yield _at_least("all-reduce, 4 ranks on one GPU, 256 MiB: copy limit / time", 0.5, _best(rows))
    yield from _rounded(rows)


def _cells(rows: Sequence[Row], table: str) -> list[dict[str, Any]]:
    """What was measured; rows of what did not run are left out."""
    return [row.cells for row in rows if row.table == table and NOT_RUN not in row.cells]


def _of_kernel(rows: Sequence[Row], what: str, ratio: str) -> list[float]:
    """Ratios of the sizes that count, if it was a kernel that ran."""
    return [
        one[ratio]
        for one in _cells(rows, bandwidth.KERNELS)
        if one["what"] == what and one["nbytes"] >= _LARGE_NBYTES and one["by"] == "kernel"
    ]


def _best(rows: Sequence[Row]) -> list[float]:
    """The fastest algorithm, held against the lowest limit there is."""
    found = [
        one
        for one in _cells(rows, collectives.SHARED)
        if (one["collective"], one["ranks"], one["over"]) == ("all_reduce", 4, "ucx")
        and one["nbytes"] == _LARGE_NBYTES
        and one["in-place #wrong"] == 0
    ]
    if not found:
        return []
    limit = min(one["copy limit (us)"] for one in found)
    return [limit / min(one["in-place time (us)"] for one in found)]


def _correct(rows: Sequence[Row]) -> Iterator[Row]:
    wanted = "no wrong element, all rows run, all by kernels"
    what = "kernels equal torch on the CPU"
    found = _cells(rows, correctness.TABLE)
    missing = sum(row.table == correctness.TABLE and NOT_RUN in row.cells for row in rows)
    complete = any(one["what"] == correctness.ALL for one in found)
    own = [one for one in found if one["what"] != correctness.ALL]
    if not sum(one["by kernels"] for one in own):  # torch was held against itself
        yield _row(what, wanted, "nothing", NOT_RUN)
        return
    names = ("wrong elements", "cases", "by torch")
    wrong, cases, by_torch = (sum(one[name] for one in own) for name in names)
    measured = (
        f"{wrong} wrong in {cases} cases, {by_torch} of them by torch, {missing} rows not run"
    )
    if not complete:
        measured += ", and others not reached"
    yield _row(what, wanted, measured, _verdict(complete and not (wrong or by_torch or missing)))


def _rounded(rows: Sequence[Row]) -> Iterator[Row]:
    found = {
        one["what"]: one[rounding.MEAN]
        for one in _cells(rows, rounding.TABLE)
        if one["on"] != "cpu" and (one["by"] == "kernel" or one["what"] == rounding.TORCH_SUM)
    }
    for name in (rounding.DEFAULT, rounding.DIRECT):
        what = f"bfloat16, k = 8, {name}: mean error (ulp)"
        if not {name, rounding.TORCH_SUM, rounding.BFLOAT16_RING} <= found.keys():
            yield _row(what, "that of torch.sum", "nothing", NOT_RUN)
            continue
        torchs, half = found[rounding.TORCH_SUM], found[rounding.BFLOAT16_RING] / 2
        wanted = f"that of torch.sum, {torchs:.4g}, and at most half a bfloat16 ring's: {half:.4g}"
        met = found[name] <= torchs * 1.001 and found[name] <= half  # sums in another order
        yield _row(what, wanted, f"{found[name]:.4g}", _verdict(met))


def _at_least(what: str, wanted: float, found: Sequence[float]) -> Row:
    return _compared(what, f"at least {wanted:g}", found, min, lambda one: one >= wanted)


def _at_most(what: str, wanted: float, found: Sequence[float]) -> Row:
    return _compared(what, f"at most {wanted:g}", found, max, lambda one: one <= wanted)


def _compared(
    what: str,
    wanted: str,
    found: Sequence[float],
    worst: Callable[[Sequence[float]], float],
    reached: Callable[[float], bool],
) -> Row:
    """The worst of what was measured counts."""
    if not found:
        return _row(what, wanted, "nothing", NOT_RUN)
    measured = worst(found)
    return _row(what, wanted, f"{measured:.4g}", _verdict(reached(measured)))


def _verdict(reached: bool) -> str:
    return "met" if reached else "not met"


def _row(goal: str, wanted: str, measured: str, verdict: str) -> Row:
    return Row(TABLE, {"goal": goal, "wanted": wanted, "measured": measured, "verdict": verdict})
