"""Bandwidth of the kernels, against a copy on the device, and against torch.

Every byte that has to be read or written counts once: three vectors for a sum in place, four
for a sum that is copied along the way, nine for a sum of eight sources. A copy counts twice its
size, moves as many bytes as the kernel, and random ones: memory that is all zeros takes less power.
It is timed in a CUDA graph and without a graph, and the faster way is the limit. Buffers take turns,
so that no buffer is in the L2 cache.

Ratios are medians over pairs of samples (`clock.paired`), with the bounds between which the true median
lies: ``from`` and ``to``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.on_gpu.clock import Ratio, Timer, alternate, paired, rotation, timer
from benchmarks.on_gpu.rows import Row, Settings, missing
from ringcoll.errors import MissingExtraError
from ringcoll.runtime.reduction import (
    TORCH,
    CupyEngine,
    Engine,
    Kernel,
    c_type,
    gpu,
    launch_of,
    resolve,
)
from ringcoll.tools.bench import DTYPES, as_size, summarize

__all__ = [
    "EVERY_DTYPE",
    "KERNELS",
    "MISALIGNED",
    "SHAPES",
    "Case",
    "Tuned",
    "bandwidth",
    "copy_bandwidth",
    "every_dtype",
    "misaligned_cases",
    "shapes",
]

KERNELS = "Kernels: bandwidth against a copy and torch"
EVERY_DTYPE = "Kernels: sum of every dtype, aligned and misaligned"
SHAPES = "Kernels: shapes of launches"

_ROUNDS, _QUICK_ROUNDS = 15, 5
_DTYPE_ROUNDS = 9
_FOLLOWING_WARM_S = 0.1  # of cases and shapes that follow each other soon
_LARGE_NBYTES = 1 << 28
_RANKS = 8  # by which an average is divided


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel to be timed.

    Parameters
    ----------
    name
        The name of the reduction.
    sources, results
        Dtypes of the vectors.
    offsets
        Elements by which each vector, sources first, starts after an aligned address.
    in_place
        Whether the first result is the first source.
    wire
        The wire dtype, where the total is finished and rounded to it.
    """

    name: str
    sources: tuple[torch.dtype, ...]
    results: tuple[torch.dtype, ...]
    offsets: tuple[int, ...] = ()
    in_place: bool = True
    wire: torch.dtype | None = None

    def nbytes(self, numel: int) -> int:
        """Count the bytes that are read and written."""
        return numel * sum(dtype.itemsize for dtype in (*self.sources, *self.results))

    def vectors(self, numel: int, device: torch.device) -> _Vectors:
        """Make vectors of small random numbers."""
        dtypes = (*self.sources, *self.results)
        offsets = self.offsets or (0,) * len(dtypes)
        vectors = [
            _vector(numel, dtype, offset, device, small=self.in_place)
            for dtype, offset in zip(dtypes, offsets, strict=True)
        ]
        sources, into = vectors[: len(self.sources)], vectors[len(self.sources) :]
        return _Vectors([sources[0], *into[1:]] if self.in_place else into, sources)

    def bind(self, engine: Engine, vectors: _Vectors) -> Callable[[], object]:
        """Make ready to reduce."""
        reduction = resolve("sum", self.results[0], wire_dtype=self.wire)
        return engine.bind(reduction, *vectors, None if self.wire is None else _RANKS)


class _Vectors(NamedTuple):
    into: list[Tensor]
    sources: list[Tensor]


def _vector(
    numel: int, dtype: torch.dtype, offset: int, device: torch.device, *, small: bool
) -> Tensor:
    """Random numbers; small ones stay finite if they are added up a million times."""
    total = numel + offset  # torch aligns what it allocates to 512 bytes
    if not (dtype.is_floating_point or dtype.is_complex):
        return _random_bytes(
            total * dtype.itemsize, device, 2 if dtype is torch.bool else 256
        ).view(dtype)[offset:]
    wide = dtype if dtype.is_complex or dtype is torch.float64 else torch.float32
    normal = torch.randn(total, dtype=wide, device=device)
    return (normal.mul_(1e-6) if small else normal).to(dtype)[offset:]


def _random_bytes(nbytes: int, device: torch.device, end: int = 256) -> Tensor:
    return torch.randint(end, (nbytes,), dtype=torch.uint8, device=device)


_F32, _BF16 = torch.float32, torch.bfloat16
CASES = (
    Case("sum float32", (_F32,) * 2, (_F32,)),
    Case("sum bfloat16", (_BF16,) * 2, (_BF16,)),
    Case("sum + copy float32", (_F32,) * 2, (_F32,) * 2),
    Case("8-way sum float32", (_F32,) * 8, (_F32,), in_place=False),
    Case("float32 + bfloat16 -> both", (_F32, _BF16), (_F32, _BF16), wire=_BF16),
    Case("sum float32, one element off", (_F32,) * 2, (_F32,), offsets=(1, 1, 1)),
    Case("sum float32, aligned differently", (_F32,) * 2, (_F32,), offsets=(0, 1, 0)),
)

_NAMES = dict.fromkeys(("f8e4m3", "f8e5m2", "bfloat16", "float", "half", *DTYPES))  # goals first
_ALIGNMENTS = {"": (0, 0, 0), ", one element off": (1, 1, 1), ", aligned differently": (0, 1, 0)}
MISALIGNED = tuple(filter(None, _ALIGNMENTS))
"""How the names of cases with misaligned operands end."""


def _sizes(settings: Settings) -> tuple[int, ...]:
    if settings.rehearsal:
        return (1 << 12, 1 << 13)
    powers = (20, 28, 30) if settings.quick else (20, 22, 24, 26, 28, 30, 31)
    return tuple(1 << power for power in powers)


def _every_dtype() -> Iterator[Case]:
    for name, (where, offsets) in product(_NAMES, _ALIGNMENTS.items()):
        dtype = DTYPES[name]
        yield Case(f"sum {name}{where}", (dtype,) * 2, (dtype,), offsets, in_place=False)


def misaligned_cases() -> tuple[str, ...]:
    """The names of the sums of misaligned operands, of every dtype."""
    return tuple(case.name for case in _every_dtype() if any(case.offsets))


def _copies(nbytes: int, device: torch.device) -> list[Timer]:
    """Copies in a CUDA graph, where the device may have another way to copy, and without a graph."""
    sets = rotation(2 * nbytes, device)
    pairs = [[_random_bytes(nbytes, device) for _ in range(2)] for _ in range(sets)]
    runs = [partial(into.copy_, source) for into, source in pairs]
    return [timer(runs, 2 * nbytes, device, captured=captured) for captured in (True, False)]


def _faster(samples: Sequence[Sequence[float]]) -> int:
    """Number of the contender with the smallest median."""
    return min(range(len(samples)), key=lambda number: summarize(samples[number]).p50_s)


def copy_bandwidth(nbytes: int, device: torch.device, rounds: int = _ROUNDS) -> float:
    """Bytes that a copy within a device reads and writes in a second."""
    samples = alternate(_copies(nbytes, device), rounds)
    return 2 * nbytes / summarize(samples[_faster(samples)]).p50_s


def bandwidth(settings: Settings) -> Iterator[Row]:
    """Time all kernels at all sizes."""
    engine = _engine(settings)
    if isinstance(engine, Row):
        yield engine
        return
    rounds = _QUICK_ROUNDS if settings.quick or settings.rehearsal else _ROUNDS
    for nbytes in reversed(_sizes(settings)):  # the most important sizes first
        for case in CASES:
            yield _row(KERNELS, case, nbytes, engine, settings.place, rounds)


def every_dtype(settings: Settings) -> Iterator[Row]:
    """Time the sum of two vectors of every dtype, aligned and misaligned, at one size."""
    engine = _engine(settings, EVERY_DTYPE)
    if isinstance(engine, Row):
        yield engine
        return
    nbytes = 1 << 12 if settings.rehearsal else _LARGE_NBYTES
    rounds = _QUICK_ROUNDS if settings.quick or settings.rehearsal else _DTYPE_ROUNDS
    for case in _every_dtype():
        if not settings.rehearsal or _torch_adds(case.results[0], settings.place):
            warm_s = _FOLLOWING_WARM_S
            yield _row(EVERY_DTYPE, case, nbytes, engine, settings.place, rounds, warm_s=warm_s)


def _torch_adds(dtype: torch.dtype, device: torch.device) -> bool:
    ones = torch.ones(2, device=device).to(dtype)
    try:
        torch.add(ones, ones)
    except RuntimeError:
        return False
    return True


def _engine(settings: Settings, table: str = KERNELS) -> Engine | Row:
    if settings.rehearsal:
        return TORCH
    try:
        return gpu.engine("cupy")
    except MissingExtraError as error:
        return missing(table, "everything", error)


def _row(
    table: str,
    case: Case,
    nbytes: int,
    engine: Engine,
    device: torch.device,
    rounds: int,
    **options: float,
) -> Row:
    try:
        return Row(table, _measured(case, nbytes, engine, device, rounds, **options))
    except Exception as error:  # noqa: BLE001  # CuPy's own kinds, too: a row each
        return missing(table, f"{case.name}, {as_size(nbytes)}", error)


def _measured(
    case: Case,
    nbytes: int,
    engine: Engine,
    device: torch.device,
    rounds: int,
    **options: float,
) -> dict[str, object]:
    numel = nbytes // case.results[0].itemsize
    moved = case.nbytes(numel)
    sets = [case.vectors(numel, device) for _ in range(rotation(moved, device))]
    before = gpu.bound.copy()
    ours = timer([case.bind(engine, vectors) for vectors in sets], moved, device)
    bound = gpu.bound - before
    copies = _copies(moved // 2, device)
    contenders = [ours, *copies]
    if _torch_adds(case.results[0], device):
        contenders.append(timer([case.bind(TORCH, vectors) for vectors in sets], moved, device))
    kernel_s, *others = alternate(contenders, rounds, **options)
    fastest = _faster(others[: len(copies)])
    copy_s, kernel, copy = others[fastest], summarize(kernel_s), summarize(others[fastest])
    cells: dict[str, object] = {
        "what": case.name,
        "size": as_size(nbytes),
        "nbytes": nbytes,
        "by": "kernel" if bound["cupy"] else "torch",
        "time (us)": kernel.p50_s * 1e6,
        "GB/s": moved / kernel.p50_s / 1e9,
        "spread": kernel.spread,
        "copy GB/s": 2 * (moved // 2) / copy.p50_s / 1e9,
        "copy spread": copy.spread,
        "copy by": copies[fastest].how,
        **_ratio_cells("/ copy", paired(kernel_s, copy_s)),
    }
    for torch_s in others[len(copies) :]:  # of a dtype that torch can add
        torchs = summarize(torch_s)
        cells |= {
            "torch GB/s": moved / torchs.p50_s / 1e9,
            "torch spread": torchs.spread,
            **_ratio_cells("/ torch", paired(kernel_s, torch_s)),
        }
    how = ", ".join(dict.fromkeys(contender.how for contender in contenders))
    return cells | {"pairs": rounds, "buffers": len(sets), "timed by": how}


def _ratio_cells(name: str, ratio: Ratio) -> dict[str, object]:
    return {name: ratio.median, f"{name} from": ratio.low, f"{name} to": ratio.high}


@dataclass(frozen=True, slots=True)
class Tuned(Kernel):
    """A kernel with another shape of its launch; see the properties of `Kernel`."""

    threads: int = 256
    unroll: int = 4
    resident: int = 3


_TUNED = CASES[:4]
_THREADS, _UNROLL, _BLOCKS = (128, 256, 512, 1024), (1, 2, 4, 8), (1, 2, 3, 4, 8)
_MOST_THREADS = 2048  # of a multiprocessor
_MOST_LOADS = 32  # of a thread: 128 of its 255 registers
_SHOWN = 8


def shapes(settings: Settings) -> Iterator[Row]:
    """Try out shapes of launches with ``--tune``: the best shapes, and the library's shape."""
    if not settings.tune:
        yield missing(SHAPES, "everything", "it was not asked for: --tune")
        return
    engine = _engine(settings, SHAPES)
    if isinstance(engine, Row):
        yield engine
        return
    device = settings.place
    nbytes = 1 << 12 if settings.rehearsal else _LARGE_NBYTES
    limit = copy_bandwidth(nbytes, device)
    for case in _TUNED:
        numel = nbytes // case.results[0].itemsize
        vectors = case.vectors(numel, device)
        tried = []
        for shape in _some_shapes(settings, len(case.sources)):
            tuned = _kernel(case, *shape)
            try:
                run = _launching(engine, tuned, vectors)
                sampled = timer([run], case.nbytes(numel), device)
                (times,) = alternate([sampled], _QUICK_ROUNDS, warm_s=_FOLLOWING_WARM_S)
            except Exception as error:  # noqa: BLE001  # the device has too few registers
                yield missing(SHAPES, f"{case.name}, {shape}", error)
                continue
            summary = summarize(times)
            tried.append((case.nbytes(numel) / summary.p50_s, tuned, summary.spread))
        tried.sort(key=lambda shape: -shape[0])
        usual = [shape for shape in tried[_SHOWN:] if _is_usual(shape[1])]
        for speed, tuned, spread in (*tried[:_SHOWN], *usual):
            yield Row(
                SHAPES,
                {
                    "what": case.name,
                    "size": as_size(nbytes),
                    "threads": tuned.threads,
                    "packs a thread": tuned.unroll,
                    "blocks": tuned.resident,
                    "GB/s": speed / 1e9,
                    "spread": spread,
                    "/ copy": speed / limit,
                    "the library's": "yes" if _is_usual(tuned) else "",
                },
            )


def _some_shapes(settings: Settings, sources: int) -> Iterator[tuple[int, int, int]]:
    threads = _THREADS[1:2] if settings.rehearsal else _THREADS
    for shape in product(threads, _UNROLL, _BLOCKS):
        if shape[0] * shape[2] <= _MOST_THREADS and sources * shape[1] <= _MOST_LOADS:
            yield shape


def _kernel(case: Case, threads: int, unroll: int, blocks: int) -> Tuned:
    first, rest, into, copy = (
        c_type(dtype) or ""
        for dtype in (case.sources[0], case.sources[-1], case.results[0], case.results[-1])
    )
    sizes = len(case.sources), len(case.results)
    return Tuned(
        "Sum",
        "Plain",
        first,
        rest,
        into,
        copy,
        *sizes,
        threads=threads,
        unroll=unroll,
        resident=blocks,
    )


def _is_usual(tuned: Tuned) -> bool:
    plain = Kernel(*(getattr(tuned, name) for name in Kernel.__dataclass_fields__))
    return (plain.threads, plain.unroll, plain.resident) == (
        tuned.threads,
        tuned.unroll,
        tuned.resident,
    )


def _launching(engine: Engine, kernel: Tuned, vectors: _Vectors) -> Callable[[], object]:
    if isinstance(engine, CupyEngine):
        launch = engine.launch(kernel, *vectors)
    else:  # a rehearsal: all but the launch
        fitted = launch_of(kernel, *vectors)
        launch = None if fitted is None or not fitted.kernel.definition() else lambda: None
    if launch is None:
        raise RuntimeError("the vectors are not aligned to their elements")
    return launch
