"""Reductions as an engine is asked to do them, to be compared with torch's own on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ringcoll.runtime.reduction import (
    MOST_SOURCES,
    TORCH,
    CupyEngine,
    Engine,
    Kernel,
    Reduction,
    bound,
    launch_of,
    resolve,
)
from ringcoll.tools.testing import inputs as data
from tests.cases.kernel_checks import bits
from tests.cases.strategies import operators

__all__ = ["DTYPES", "EngineCase", "Listing", "engine_cases", "listing", "wrong"]

DTYPES = (*data.INTEGERS, *data.FLOATS, *data.COMPLEX, torch.bool)
_WIRES = (torch.bfloat16, torch.float8_e4m3fn)
_NUMEL = 1003


@dataclass(frozen=True)
class EngineCase:
    """A reduction of ``count`` vectors; ``narrow``: all but the first are in the wire dtype.

    ``world_size`` is given where the total is to be finished, ``results`` is 2 for
    a total that is copied, in the wire dtype.
    """

    op: str
    dtype: torch.dtype
    wire_dtype: torch.dtype | None
    count: int
    world_size: int | None
    results: int
    narrow: bool

    def reduction(self) -> Reduction:
        return resolve(self.op, self.dtype, wire_dtype=self.wire_dtype)


def engine_cases(dtype: torch.dtype) -> Iterator[EngineCase]:
    """All that a dtype can be asked for, up to more vectors than a kernel takes."""
    wires = [None, *(_WIRES if dtype.is_floating_point else ())]
    for op, wire in product(operators(dtype), wires):
        if op.startswith(("user", "premul")):  # torch's in any case; scaled before
            continue
        reduction = resolve(op, dtype, wire_dtype=wire)
        narrows = {False, reduction.wire_dtype is not reduction.work_dtype}
        k = 4 if dtype.is_complex else 3  # torch divides complex numbers with two roundings
        shapes = [(2, None, 1), (2, k, 2), (3, None, 2), (MOST_SOURCES + 1, k, 1)]
        for narrow, (count, world_size, results) in product(sorted(narrows), shapes):
            yield EngineCase(op, dtype, wire, count, world_size, results, narrow)


def _sources(case: EngineCase, reduction: Reduction) -> list[Tensor]:
    # Of complex numbers, whole ones: torch may multiply and add in one rounding.
    kind = "exact" if case.dtype.is_complex else "special"
    found = []
    for rank in range(case.count):
        given = data.values(case.dtype, _NUMEL, rank=rank, kind=kind, op=case.op)
        vector = reduction.encode(given).clone()
        found.append(vector.to(reduction.wire_dtype) if case.narrow and rank else vector)
    return found


def _results(case: EngineCase, reduction: Reduction, device: str) -> list[Tensor]:
    dtypes = [reduction.work_dtype, reduction.wire_dtype][: case.results]
    return [torch.zeros(_NUMEL, dtype=dtype, device=device) for dtype in dtypes]


def wrong(engine: Engine, case: EngineCase, device: str = "cpu") -> str:
    """What an engine does otherwise than torch on the CPU; nothing if it is right."""
    reduction = case.reduction()
    sources = _sources(case, reduction)
    wanted, found = _results(case, reduction, "cpu"), _results(case, reduction, device)
    theirs = [one.clone().to(device) for one in sources]
    in_place = case.count % 2 == 0
    if in_place:
        wanted[0], found[0] = sources[0], theirs[0]
    TORCH.bind(reduction, wanted, sources, case.world_size)()
    engine.bind(reduction, found, theirs, case.world_size)()
    for index, (mine, right) in enumerate(zip(found, wanted, strict=True)):
        if bits(mine) != bits(right):
            return f"result {index} of {case}"
    return ""


class Listing(CupyEngine):
    """The engine, which notes the kernels that it is asked for.

    Attributes
    ----------
    seen
        All of them.
    run
        What runs them; nothing is done as long as there is none.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.seen: set[Kernel] = set()
        self.run: Callable[..., Kernel] | None = None

    def launch(
        self,
        kernel: Kernel,
        into: Sequence[Tensor],
        sources: Sequence[Tensor],
        factor: complex = 0.0,
    ) -> Callable[[], object] | None:
        """Make ready to run a kernel."""
        fitted = launch_of(kernel, into, sources, factor)
        if fitted is None:
            return None
        bound["cupy"] += 1
        self.seen.add(fitted.kernel)
        if self.run is None:
            return lambda: None
        return partial(self.run, kernel, into, sources, factor)


def listing() -> Listing:
    """An engine that has been asked for everything, and has done nothing."""
    engine = Listing()
    for dtype in DTYPES:
        for case in engine_cases(dtype):
            wrong(engine, case)  # it is
    return engine
