"""The goals on an H200, and whether they were met: from the rows of all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.on_gpu import bandwidth, collectives, correctness, host_time, rounding
from benchmarks.on_gpu.rows import NOT_RUN, Row

__all__ = ["TABLE", "goals"]

TABLE = "What has to be reached"

_LARGE_NBYTES = 1 << 28


def goals(rows: Sequence[Row]) -> Iterator[Row]:
    """Compare each goal with the measurement: a row of wanted, measured, verdict."""
    yield from _correct(rows)
    for what in ("sum float32", "sum bfloat16"):
        yield _at_least(f"{what}, against a copy", 0.92, _of_kernel(rows, what, "/ copy"))
        yield _at_least(f"{what}, against torch.add", 1.0, _of_kernel(rows, what, "/ torch"))
    for what in ("sum + copy float32", "8-way sum float32"):
        yield _at_least(f"{what}, against a copy", 0.90, _of_kernel(rows, what, "/ copy"))
    launches = [
        cells["median (us)"]
        for cells in _cells(rows, host_time.TABLE)
        if cells["what"] == host_time.LAUNCH and cells["by"].startswith("cupy")
    ]
    yield _at_most("host time of a launch, 4 KiB (us)", 10.0, launches)
    yield _at_least(
        "all-reduce, 4 ranks on cells GPU, 256 MiB: copy limit / time", 0.5, _best(rows)
    )
    yield from _rounded(rows)


def _cells(rows: Sequence[Row], table: str) -> list[dict[str, Any]]:
    """The cells of a table's rows, without rows of parts that did not run."""
    return [row.cells for row in rows if row.table == table and NOT_RUN not in row.cells]


def _of_kernel(rows: Sequence[Row], what: str, ratio: str) -> list[float]:
    """Ratios of a case at the large sizes, if a kernel reduced."""
    return [
        cells[ratio]
        for cells in _cells(rows, bandwidth.KERNELS)
        if cells["what"] == what and cells["nbytes"] >= _LARGE_NBYTES and cells["by"] == "kernel"
    ]


def _best(rows: Sequence[Row]) -> list[float]:
    """The lowest copy limit over the time of the fastest algorithm."""
    results = [
        cells
        for cells in _cells(rows, collectives.SHARED)
        if (cells["collective"], cells["ranks"], cells["over"]) == ("all_reduce", 4, "ucx")
        and cells["nbytes"] == _LARGE_NBYTES
        and cells["in-place #wrong"] == 0
    ]
    if not results:
        return []
    limit = min(cells["copy limit (us)"] for cells in results)
    return [limit / min(cells["in-place time (us)"] for cells in results)]


def _correct(rows: Sequence[Row]) -> Iterator[Row]:
    wanted = "no wrong element, all rows run, all by kernels"
    what = "kernels equal torch on the CPU"
    checked = _cells(rows, correctness.TABLE)
    missing = sum(row.table == correctness.TABLE and NOT_RUN in row.cells for row in rows)
    complete = any(cells["what"] == correctness.ALL for cells in checked)
    own = [cells for cells in checked if cells["what"] != correctness.ALL]
    if not sum(cells["by kernels"] for cells in own):  # torch was compared with itself
        yield _row(what, wanted, "nothing", NOT_RUN)
        return
    names = ("wrong elements", "cases", "by torch")
    wrong, cases, by_torch = (sum(cells[name] for cells in own) for name in names)
    measured = (
        f"{wrong} wrong in {cases} cases, {by_torch} of them by torch, {missing} rows not run"
    )
    if not complete:
        measured += ", and others not reached"
    yield _row(what, wanted, measured, _verdict(complete and not (wrong or by_torch or missing)))


def _rounded(rows: Sequence[Row]) -> Iterator[Row]:
    means = {
        cells["what"]: cells[rounding.MEAN]
        for cells in _cells(rows, rounding.TABLE)
        if cells["on"] != "cpu" and (cells["by"] == "kernel" or cells["what"] == rounding.TORCH_SUM)
    }
    for name in (rounding.DEFAULT, rounding.DIRECT):
        what = f"bfloat16, k = 8, {name}: mean error (ulp)"
        if not {name, rounding.TORCH_SUM, rounding.BFLOAT16_RING} <= means.keys():
            yield _row(what, "that of torch.sum", "nothing", NOT_RUN)
            continue
        torchs, half = means[rounding.TORCH_SUM], means[rounding.BFLOAT16_RING] / 2
        wanted = f"that of torch.sum, {torchs:.4g}, and at most half a bfloat16 ring's: {half:.4g}"
        met = means[name] <= torchs * 1.001 and means[name] <= half  # sums in another order
        yield _row(what, wanted, f"{means[name]:.4g}", _verdict(met))


def _at_least(what: str, wanted: float, measured: Sequence[float]) -> Row:
    return _compared(what, f"at least {wanted:g}", measured, min, lambda worst: worst >= wanted)


def _at_most(what: str, wanted: float, measured: Sequence[float]) -> Row:
    return _compared(what, f"at most {wanted:g}", measured, max, lambda worst: worst <= wanted)


def _compared(
    what: str,
    wanted: str,
    measured: Sequence[float],
    worst: Callable[[Sequence[float]], float],
    reached: Callable[[float], bool],
) -> Row:
    """Compare the worst measurement with the goal."""
    if not measured:
        return _row(what, wanted, "nothing", NOT_RUN)
    value = worst(measured)
    return _row(what, wanted, f"{value:.4g}", _verdict(reached(value)))


def _verdict(reached: bool) -> str:
    return "met" if reached else "not met"


def _row(goal: str, wanted: str, measured: str, verdict: str) -> Row:
    return Row(TABLE, {"goal": goal, "wanted": wanted, "measured": measured, "verdict": verdict})
