"""The kernels against torch on the CPU, element by element, to the last bit.

For every operator and dtype: two sources at every offset from an aligned address, alike and
apart, in place and out of place; 3, 8 and 20 sources; a second result; finished totals; wire dtypes;
PREMUL_SUM's scaling; and rounding alone. The bytes around each result must not change. Both zeros
count as the same number, and so do all NaNs.

The reference is the engine `TORCH` on copies of the same vectors on the CPU. (On a GPU torch divides by a
number by multiplying with its inverse.) A complex total, which torch divides by way of a
product, is divided part by part. Complex numbers are whole ones: torch's product may
multiply and add in one rounding.

In each row an element of a right result is spoiled, and the comparison must report it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.on_gpu.rows import Row, Settings, missing
from ringcoll.errors import ArgumentError, MissingExtraError, RingcollError
from ringcoll.runtime import Ranks, cores, report
from ringcoll.runtime.launch import rendezvous
from ringcoll.runtime.reduction import TORCH, Engine, Reduction, gpu, premul_sum, resolve
from ringcoll.tools.bench import DTYPES

__all__ = [
    "ALL",
    "TABLE",
    "Case",
    "cases",
    "check",
    "correctness",
    "differing",
    "numbers",
    "rows",
    "table",
]

ALL = "everything together"
"""The row of totals."""
TABLE = "Kernels: correctness against torch on the CPU"

_OPS = ("sum", "avg", "premul_sum", "product", "min", "max", "band", "bor", "bxor")
_WIRES = {
    torch.float64: (torch.float32, torch.float16, torch.bfloat16),
    torch.float32: (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    torch.float16: (torch.float16, torch.float8_e4m3fn, torch.float8_e5m2),
    torch.bfloat16: (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    torch.float8_e4m3fn: (torch.float8_e4m3fn,),
    torch.float8_e5m2: (torch.float8_e5m2,),
    torch.complex128: (torch.complex64,),
}
_PACK_NBYTES = 16
# (sources, results). Not all of them for every operator: a kernel takes 0.2 s to compile.
_ALL_FORMS = tuple(product((2, 3, 8, 20), (1, 2)))
_SOME_FORMS = ((2, 2), (3, 1), (20, 1))
_WORLD_SIZE = 3
_NUMEL = 2 * 8192 + 37  # two tiles of the widest kernel, and a tail
_SHORT = (1, 5)
_MARGIN_NBYTES = 64
_GARBAGE = 0xA5
_WORKERS = 12  # each has a CUDA context of its own, of half a GiB
_LIMIT_S = 150.0


@dataclass(frozen=True, slots=True)
class Case:
    """One reduction to be checked.

    Parameters
    ----------
    sources, results
        How many there are.
    offsets
        Elements by which the vectors, sources first, start after an aligned address.
    in_place
        Whether the first result is the first source.
    final
        Whether the total is finished.
    numel
        Elements of each vector.
    narrow
        Whether all vectors are in the wire dtype, into which the total is rounded once.
    """

    sources: int
    results: int
    offsets: tuple[int, ...]
    in_place: bool = False
    final: bool = False
    numel: int = _NUMEL
    narrow: bool = False


def _places(total: int, pack: int) -> Iterator[tuple[int, ...]]:
    """Offsets of so many vectors: alike, and apart."""
    for offset in range(pack + 1):
        yield (offset,) * total
        yield tuple((offset * index + (index > 1)) % (pack + 1) for index in range(total))


def cases(itemsize: int, *, thorough: bool, narrow: int = 0) -> Iterator[Case]:
    """What is checked for each operator, dtype and wire dtype.

    Parameters
    ----------
    itemsize
        Bytes of an element of the widest vector.
    thorough
        Whether in all forms, or in some.
    narrow
        Bytes of an element in the wire dtype, if kernels are to run on such alone.
    """
    pack = _PACK_NBYTES // itemsize
    for offsets, in_place in product(_places(3, pack), (False, True)):
        yield Case(2, 1, offsets, in_place=in_place)
    for offset, numel in product((0, 1, pack - 1), _SHORT):
        yield Case(2, 1, (offset,) * 3, numel=numel)
    for offset in (0, 1):
        yield Case(2, 1, (offset,) * 3, final=True)
        yield Case(2, 2, (offset,) * 4, final=True)
    for sources, results in _ALL_FORMS if thorough else _SOME_FORMS:
        total = sources + results
        yield Case(sources, results, (1,) * total)
        yield Case(sources, results, tuple(i % 2 for i in range(total)), in_place=True)
    if narrow:
        for sources, offsets in product((2, 8), _places(10, _PACK_NBYTES // narrow)):
            some = offsets[: sources + 2]
            yield Case(sources, 2, some, in_place=True, final=True, narrow=True)


def table() -> Iterator[tuple[str, str, torch.dtype, torch.dtype | None]]:
    """(operator, dtype's name, dtype, wire dtype) of everything that is defined."""
    for op, (name, dtype) in product(_OPS, DTYPES.items()):
        for wire in (None, *(_WIRES.get(dtype, ()) if op in ("sum", "avg") else ())):
            try:
                _resolved(op, dtype, wire)
            except ArgumentError:
                continue
            yield op, name, dtype, wire


def _resolved(op: str, dtype: torch.dtype, wire: torch.dtype | None) -> Reduction:
    if op != "premul_sum":
        return resolve(op, dtype, wire_dtype=wire)
    # The factor of complex numbers is such that products of whole ones are exact.
    factor: Any = 0.5 - 4j if dtype.is_complex else 0.3
    return resolve(premul_sum(factor), dtype, wire_dtype=wire)


def check(reduction: Reduction, case: Case, engine: Engine, device: torch.device) -> int:
    """Count elements that are wrong, and bytes around the results that were written.

    Raises
    ------
    RingcollError
        An element that was spoiled on purpose was not found.
    """
    whole_numbers = 1 if reduction.operator.name == "product" else 50
    dtypes = _dtypes(reduction, case)
    values = [numbers(case.numel, dtype, seed, whole_numbers) for seed, dtype in enumerate(dtypes)]
    placed = [
        _Placed(vector, offset, device) for vector, offset in zip(values, case.offsets, strict=True)
    ]
    finished = _WORLD_SIZE if case.final else None
    sources, expected = values[: case.sources], values[case.sources :]
    totals = [vector.to(reduction.work_dtype) for vector in expected] if case.narrow else expected
    TORCH.bind(_reference(reduction), totals, sources, finished)()
    expected = [total.to(reduction.wire_dtype) for total in totals] if case.narrow else expected
    operands, results = placed[: case.sources], placed[case.sources :]
    if case.in_place:
        results[0] = operands[0]
    for result in results[case.in_place :]:
        result.overwrite()
    into, from_ = ([place.vector for place in places] for places in (results, operands))
    engine.bind(reduction, into, from_, finished)()
    wrong = 0
    for result, wanted in zip(results, expected, strict=True):
        wrong += differing(result.vector.cpu(), wanted)
        _must_be_found(wanted)
        wrong += result.written_around()
    return wrong


def check_encoding(reduction: Reduction, engine: Engine, device: torch.device) -> int:
    """Count wrong elements of inputs that are converted, and scaled."""
    wrong = 0
    for offset in range(_PACK_NBYTES // reduction.dtype.itemsize + 1):
        values = numbers(_NUMEL, reduction.dtype, offset, 50)
        wanted = TORCH.encode(reduction, values)
        vector = _Placed(values, offset, device).vector
        wrong += differing(engine.encode(reduction, vector).cpu(), wanted)
    return wrong


def check_rounding(reduction: Reduction, engine: Engine, device: torch.device) -> int:
    """Count wrong elements of partial results that are rounded to the wire dtype."""
    wrong = 0
    for offsets in _places(2, _PACK_NBYTES // reduction.work_dtype.itemsize):
        wide = numbers(_NUMEL, reduction.work_dtype, offsets[0], 50)
        narrow = torch.zeros(_NUMEL, dtype=reduction.wire_dtype)
        placed = [
            _Placed(vector, offset, device)
            for vector, offset in zip((narrow, wide), offsets, strict=True)
        ]
        TORCH.round(narrow, wide)()
        engine.round(*(place.vector for place in placed))()
        for place, wanted in zip(placed, (narrow, wide), strict=True):
            wrong += differing(place.vector.cpu(), wanted) + place.written_around()
    return wrong


def _dtypes(reduction: Reduction, case: Case) -> list[torch.dtype]:
    """Of all vectors: partial results are in the work dtype, what is sent in the wire dtype."""
    work, wire = reduction.work_dtype, reduction.wire_dtype
    if case.narrow:
        work = wire
    return [work, *[wire] * (case.sources - 1), work, *[wire] * (case.results - 1)]


def _reference(reduction: Reduction) -> Reduction:
    """The same, but a complex total is divided part by part."""
    if not reduction.work_dtype.is_complex or reduction.operator.name != "avg":
        return reduction

    def finish(total: Tensor, world_size: int) -> object:
        torch.view_as_real(total).div_(world_size)
        return total.copy_(total.to(reduction.wire_dtype))

    return replace(reduction, finish=finish)


def numbers(numel: int, dtype: torch.dtype, seed: int, whole_numbers: int = 50) -> Tensor:
    """Every bit pattern there is, so every kind of number; of wide floats, some of each kind."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        bounds = -whole_numbers, whole_numbers + 1
        parts = torch.randint(*bounds, (numel, 2), generator=generator)
        return torch.view_as_complex(parts.to(dtype.to_real()))
    if dtype is torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).to(dtype)
    if dtype in (torch.float64, torch.float32):
        values = torch.randn(numel, generator=generator, dtype=dtype)
        special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e30])
        places = torch.randint(0, 12, (numel,), generator=generator)
        return torch.where(places < 6, special[places.clamp(max=5)].to(dtype), values)
    nbytes = numel * dtype.itemsize
    return torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8).view(dtype)


class _Placed:
    """A copy of a vector on a device, some elements after an aligned address."""

    def __init__(self, values: Tensor, offset: int, device: torch.device) -> None:
        start = _MARGIN_NBYTES + offset * values.itemsize
        nbytes = values.numel() * values.itemsize
        # What torch allocates is aligned to 64 bytes at least.
        total = start + nbytes + _MARGIN_NBYTES
        self._whole = torch.full((total,), _GARBAGE, dtype=torch.uint8, device=device)
        self._bytes = self._whole[start : start + nbytes]
        self.vector = self._bytes.view(values.dtype)
        self.vector.copy_(values)

    def overwrite(self) -> None:
        """Forget the vector."""
        self._bytes.fill_(_GARBAGE)

    def written_around(self) -> int:
        """Bytes before and after the vector that have changed; forgets the vector."""
        self.overwrite()
        return int((self._whole != _GARBAGE).sum())


def differing(result: Tensor, wanted: Tensor) -> int:
    """Count elements that are not the same number; all NaNs are the same, and both zeros."""
    if wanted.dtype.is_complex:
        parts = (torch.view_as_real(numbers) for numbers in (result, wanted))
        different = _different(*parts).any(-1)
    else:
        different = _different(result, wanted)
    return int(different.sum())


def _different(result: Tensor, wanted: Tensor) -> Tensor:
    if not wanted.dtype.is_floating_point:
        return result != wanted
    if wanted.itemsize == 1:  # torch compares no floats of 8 bits
        result, wanted = result.float(), wanted.float()
    return (result != wanted) & ~(result.isnan() & wanted.isnan())


def _must_be_found(wanted: Tensor) -> None:
    spoiled, middle = wanted.clone(), wanted.numel() // 2
    is_one = wanted[middle : middle + 1].to(torch.complex128) == 1
    spoiled[middle : middle + 1] = (~is_one).to(wanted.dtype)
    if differing(spoiled, wanted) != 1:
        raise RingcollError(f"a spoiled element of {wanted.dtype} was not found")


def rows(
    part: slice,
    engine: Engine,
    device: torch.device,
    *,
    rehearsal: bool = False,
    emit: Callable[[Row], object],
) -> None:
    """Check a part of the table: a row for each operator and dtype."""
    for op, name, dtype, wire in [*table()][part]:
        reduction = _resolved(op, dtype, wire)
        thorough = wire is not None or op in ("sum", "max")
        # torch's operators would round after each addition: they are no stand-in for these.
        narrow = dtype.itemsize if wire is dtype and engine is not TORCH else 0
        some = [*cases(reduction.work_dtype.itemsize, thorough=thorough, narrow=narrow)]
        if rehearsal:
            some = [replace(case, numel=min(case.numel, 99)) for case in some[::7]]
        what = f"{op} {name}" + (f", {wire} on the wire".replace("torch.", "") if wire else "")
        checks = [partial(check, reduction, case, engine, device) for case in some]
        if reduction.scale is not None:
            checks.append(partial(check_encoding, reduction, engine, device))
        if reduction.wire_dtype is not reduction.work_dtype:
            checks.append(partial(check_rounding, reduction, engine, device))
        first, wrong, by_torch = gpu.bound["cupy"], [], 0
        try:
            for run in checks:
                before = gpu.bound.copy()
                wrong.append(run())
                by = gpu.bound - before
                by_torch += by["torch"] > 0 or not by["cupy"]
        except Exception as error:  # noqa: BLE001  # CuPy's own kinds, too: a row each
            emit(missing(TABLE, what, error))
            continue
        cells = {
            "what": what,
            "cases": len(wrong),
            "wrong elements": sum(wrong),
            "wrong cases": sum(map(bool, wrong)),
            "by kernels": gpu.bound["cupy"] - first,
            "by torch": by_torch,
        }
        emit(Row(TABLE, cells))


def _on_rank(workers: int, settings: Settings) -> None:
    engine: Engine = TORCH
    if not settings.rehearsal:
        torch.cuda.set_device(settings.place)
        engine = gpu.engine("cupy")
    step = 13 * workers if settings.rehearsal else workers
    part = slice(rendezvous()[1], None, step)
    rows(part, engine, settings.place, rehearsal=settings.rehearsal, emit=report)


def correctness(settings: Settings, emit: Callable[[Row], object]) -> None:
    """Check the whole table, in several processes: most of the time is the compiler's."""
    if not settings.rehearsal:
        try:
            gpu.engine("cupy")
        except MissingExtraError as error:
            emit(missing(TABLE, "everything", error))
            return
    workers = max(1, min(_WORKERS, cores() - 2))
    totals: Counter[str] = Counter()

    def on_report(row: Row) -> None:
        emit(row)
        totals.update({k: v for k, v in row.cells.items() if isinstance(v, int)})

    with Ranks(workers, backend=None, timeout_s=_LIMIT_S) as ranks:
        ranks.run(_on_rank, workers, settings, on_report=on_report)
    emit(Row(TABLE, {"what": ALL, **totals}))
