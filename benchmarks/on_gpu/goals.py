"""The goals on an H200, and whether they were met: from the rows of all stages.

A ratio is a median over pairs of samples. The kernels count as no slower than `torch.add` if 1 is not above
the bounds between which the true median lies: two kernels that both wait for the memory are as fast,
and either may come first by a thousandth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.on_gpu import bandwidth, collectives, correctness, host_time, rounding
from benchmarks.on_gpu.rows import NOT_RUN, Row
from ringcoll.tools.bench import as_size

__all__ = ["TABLE", "goals"]

TABLE = "What has to be reached"

_LARGE_NBYTES = 1 << 28
_FLOAT8 = ("f8e4m3", "f8e5m2")


def goals(rows: Sequence[Row]) -> Iterator[Row]:
    """Compare each goal with the measurement: a row of wanted, measured, verdict."""
    yield from _correct(rows)
    for what in ("sum float32", "sum bfloat16"):
        large = _large(rows, bandwidth.KERNELS, what)
        yield _ratio(f"{what}, against a copy", 0.92, large, "/ copy", "/ copy")
        yield _ratio(f"{what}, against torch.add", 1.0, large, "/ torch", "/ torch to")
    for what in ("sum + copy float32", "8-way sum float32"):
        large = _large(rows, bandwidth.KERNELS, what)
        yield _ratio(f"{what}, against a copy", 0.90, large, "/ copy", "/ copy")
    for name in _FLOAT8:
        what = f"sum {name}"
        large = _large(rows, bandwidth.EVERY_DTYPE, what)
        yield _ratio(f"{what}, against a copy", 0.80, large, "/ copy", "/ copy")
    yield _misaligned(rows)
    launches = [
        cells["median (us)"]
        for cells in _cells(rows, host_time.TABLE)
        if cells["what"] == host_time.LAUNCH and cells["by"].startswith("cupy")
    ]
    yield _at_most("host time of a launch, 4 KiB (us)", 10.0, launches)
    yield _shared(rows)
    yield from _rounded(rows)


def _cells(rows: Sequence[Row], table: str) -> list[dict[str, Any]]:
    """The cells of a table's rows, without rows of parts that did not run."""
    return [row.cells for row in rows if row.table == table and NOT_RUN not in row.cells]


def _large(rows: Sequence[Row], table: str, what: str) -> list[dict[str, Any]]:
    """The cells of a case at the large sizes, if a kernel reduced."""
    return [cells for cells in _by_kernels(rows, table) if cells["what"] == what]


def _by_kernels(rows: Sequence[Row], table: str) -> list[dict[str, Any]]:
    return [
        cells
        for cells in _cells(rows, table)
        if cells["nbytes"] >= _LARGE_NBYTES and cells["by"] == "kernel"
    ]


def _ratio(
    what: str, wanted: float, measured: Sequence[dict[str, Any]], ratio: str, decides: str
) -> Row:
    """Compare the worst ratio with the goal, by the cell that decides."""
    if not measured:
        return _row(what, f"at least {wanted:g}", "nothing", NOT_RUN)
    worst = min(measured, key=lambda cells: float(cells[decides]))
    return _row(
        what, f"at least {wanted:g}", _shown(worst, ratio), _verdict(worst[decides] >= wanted)
    )


def _shown(cells: dict[str, Any], ratio: str) -> str:
    low, high = cells[f"{ratio} from"], cells[f"{ratio} to"]
    return f"{cells[ratio]:.4g} ({low:.4g} to {high:.4g}), {as_size(cells['nbytes'])}"


def _misaligned(rows: Sequence[Row]) -> Row:
    """Compare the slowest sum of misaligned operands; every dtype has to have run."""
    what, wanted = "sum of misaligned operands, every dtype, against a copy", 0.80
    tables = (bandwidth.KERNELS, bandwidth.EVERY_DTYPE)
    measured = [
        cells
        for table in tables
        for cells in _by_kernels(rows, table)
        if cells["what"].endswith(bandwidth.MISALIGNED)
    ]
    if not measured:
        return _row(what, f"at least {wanted:g}", "nothing", NOT_RUN)
    worst = min(measured, key=lambda cells: float(cells["/ copy"]))
    ran = {cells["what"] for cells in measured}
    others = [case for case in bandwidth.misaligned_cases() if case not in ran]
    shown = f"{_shown(worst, '/ copy')}, {worst['what']}"
    shown += f"; not run, or by torch: {', '.join(others)}" if others else ""
    return _row(
        what, f"at least {wanted:g}", shown, _verdict(worst["/ copy"] >= wanted and not others)
    )


def _shared(rows: Sequence[Row]) -> Row:
    """Compare the copy limit with the fastest algorithm, without MPS or with MPS."""
    what, wanted = "all-reduce, 4 ranks on one GPU, 256 MiB: copy limit / time", 0.5
    best: dict[str, float] = {}
    for way, words in (("no", "without MPS"), ("yes", "with MPS")):
        results = [
            cells
            for cells in _cells(rows, collectives.SHARED)
            if (cells["collective"], cells["ranks"], cells["over"]) == ("all_reduce", 4, "ucx")
            and cells["nbytes"] == _LARGE_NBYTES
            and cells["MPS"] == way
            and cells["in-place #wrong"] == 0
        ]
        if results:
            limit = min(cells["copy limit (us)"] for cells in results)
            best[words] = limit / min(cells["in-place time (us)"] for cells in results)
    if not best:
        return _row(what, f"at least {wanted:g}", "nothing", NOT_RUN)
    shown = ", ".join(f"{ratio:.4g} {words}" for words, ratio in best.items())
    return _row(what, f"at least {wanted:g}", shown, _verdict(max(best.values()) >= wanted))


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


def _at_most(what: str, wanted: float, measured: Sequence[float]) -> Row:
    """Compare the largest measurement with the goal."""
    if not measured:
        return _row(what, f"at most {wanted:g}", "nothing", NOT_RUN)
    worst = max(measured)
    return _row(what, f"at most {wanted:g}", f"{worst:.4g}", _verdict(worst <= wanted))


def _verdict(reached: bool) -> str:
    return "met" if reached else "not met"


def _row(goal: str, wanted: str, measured: str, verdict: str) -> Row:
    return Row(TABLE, {"goal": goal, "wanted": wanted, "measured": measured, "verdict": verdict})
