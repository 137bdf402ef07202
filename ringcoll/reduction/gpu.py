"""Reductions on a GPU, with the kernels of ``reduce.cuh``, compiled and launched by CuPy.

Installed with the extra ``ringcoll[cuda13]`` or ``ringcoll[cuda12]``. CuPy is given addresses
of torch's memory, of whatever dtype, and torch's current stream; nothing is copied for it, and
the host waits for nothing. A kernel is compiled when it is first needed, in some tenths of a
second, and then found in CuPy's cache on disk (``CUPY_CACHE_DIR``).
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcoll.errors import MissingExtraError
from ringcoll.reduction import kernels
from ringcoll.reduction.engine import Engine, TorchEngine, run_all
from ringcoll.reduction.kernels import Kernel
from ringcoll.reduction.operators import SIGNED_TWIN, Reduction

__all__ = ["CupyEngine", "bound", "engine"]

bound: Counter[str] = Counter()
"""How often this process has bound work to kernels, and to torch's operators instead."""

_MOST_RESULTS = 2
_choosing = threading.Lock()
_chosen: dict[str, Engine] = {}


class _Stream(NamedTuple):
    """A stream as CuPy's launcher takes it: of anything with a ``ptr``."""

    ptr: int


@cache
def _stream(handle: int) -> _Stream:
    return _Stream(handle)


def _unusable() -> str:
    """Why CuPy cannot be used; nothing if it can."""
    major = (torch.version.cuda or "13").partition(".")[0]
    advice = f"pip install 'ringcoll[cuda{major}]'"
    try:
        cupy: Any = import_module("cupy")
    except ImportError as error:
        return f"CuPy is not installed ({error}): {advice}"
    except Exception as error:  # noqa: BLE001  # whatever a broken installation raises
        return f"CuPy cannot be imported ({error}): {advice}"
    try:
        theirs = cupy.cuda.runtime.runtimeGetVersion() // 1000
        if str(theirs) != major:
            return f"CuPy is built for CUDA {theirs}, torch for CUDA {torch.version.cuda}: {advice}"
        # It takes NVRTC, a folder for what it makes, and a driver that is new enough.
        _ = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing").kernel
    except Exception as error:  # noqa: BLE001  # of CuPy's own kinds
        return f"CuPy does not work here: {error}"
    return ""


def engine(wanted: str = "auto", device: torch.device | None = None) -> Engine:
    """What reduces CUDA tensors in this process.

    Parameters
    ----------
    wanted
        ``"cupy"``, ``"torch"``, or ``"auto"``: CuPy where it works, otherwise torch, with a
        warning.
    device
        On which CuPy is tried; the current one if there is none.

    Raises
    ------
    MissingExtraError
        CuPy is wanted, and cannot be used.
    """
    found = _chosen.get(wanted)
    if found is not None:
        return found
    there = torch.cuda.is_available()
    with _choosing, torch.cuda.device(device) if there and device else nullcontext():
        if there and torch.cuda.is_current_stream_capturing():
            # To try would end the capture; whoever captures is told to run it once before.
            return TorchEngine("it was first asked for while a CUDA graph was captured")
        if wanted not in _chosen:
            _chosen[wanted] = _choose(wanted)
        return _chosen[wanted]


def _choose(wanted: str) -> Engine:
    assert wanted in ("auto", "cupy", "torch"), wanted
    if wanted == "torch":
        return TorchEngine("it was asked for")
    reason = _unusable()
    if not reason:
        return CupyEngine(import_module("cupy"))
    if wanted == "cupy":
        raise MissingExtraError(reason)
    warnings.warn(
        f"reductions on the GPU are done by torch: {reason}", RuntimeWarning, stacklevel=4
    )
    return TorchEngine(reason)


# Operators as kernels have them: of numbers, and of bool.
_OPS = {
    "sum": "Sum",
    "avg": "Sum",
    "premul_sum": "Sum",
    "product": "Product",
    "min": "Min",
    "max": "Max",
    "band": "Band",
    "bor": "Bor",
    "bxor": "Bxor",
}
_BOOL_OPS = {**_OPS, "sum": "Bor", "max": "Bor", "product": "Band", "min": "Band"}


class CupyEngine:
    """The kernels of ``reduce.cuh``; torch's operators for what these do not know.

    Parameters
    ----------
    cupy
        The module.
    """

    reason = "CuPy works here"

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self.name = f"cupy {getattr(cupy, '__version__', '')}"
        self._compiled: dict[Kernel, Any] = {}
        self._loaded: dict[tuple[Kernel, int | None], Any] = {}
        self._loading = threading.Lock()
        self._torch = TorchEngine("no kernel is made for it")

    def bind(
        self,
        reduction: Reduction,
        into: Sequence[Tensor],
        sources: Sequence[Tensor],
        world_size: int | None,
        narrow: Tensor | None = None,
    ) -> Callable[[], object]:
        """Make ready to reduce vectors; see `Engine.bind`."""
        most = kernels.MOST_SOURCES
        if len(sources) > most:
            first = self.bind(reduction, into[:1], sources[:most], None)
            rest = (into[0], *sources[most:])
            return run_all([first, self.bind(reduction, into, rest, world_size, narrow)])
        results = (*into, *([] if narrow is None else [narrow]))
        rounds = world_size is not None or narrow is not None
        found = _described(reduction, results, sources, world_size, rounds)
        made = None if found is None else self.launch(found[0], results, sources, found[1])
        if made is None:
            bound["torch"] += 1
            return self._torch.bind(reduction, into, sources, world_size, narrow)
        return made

    def round(self, narrow: Tensor, tensor: Tensor) -> Callable[[], object]:
        """Make ready to convert; see `Engine.round`."""
        wire, wide = kernels.c_type(narrow.dtype), kernels.c_type(tensor.dtype)
        made = None
        if wire is not None and wide is not None:
            kernel = Kernel("Sum", "Plain", wide, wide, wire, wide, 1, 2, rounded=wire)
            made = self.launch(kernel, (narrow, tensor), (tensor,))
        return self._torch.round(narrow, tensor) if made is None else made

    def encode(self, reduction: Reduction, flat: Tensor) -> Tensor:
        """Convert a rank's input; see `Engine.encode`.

        It is rounded to the wire dtype once, after it was scaled; torch's way is to round
        it before as well.
        """
        factor = reduction.operator.factor
        given, work = kernels.c_type(flat.dtype), kernels.c_type(reduction.work_dtype)
        wire = kernels.c_type(reduction.wire_dtype)
        # A factor on the GPU is not to be waited for; and without one, torch does as well.
        if isinstance(factor, int | float | complex) and given and work and wire:
            kernel = Kernel("Sum", "Multiply", given, given, work, work, 1, 1, rounded=wire)
            into = torch.empty_like(flat, dtype=reduction.work_dtype)
            run = self.launch(kernel, (into,), (flat,), factor)
            if run is not None:
                run()
                return into
        return self._torch.encode(reduction, flat)

    def launch(
        self,
        kernel: Kernel,
        into: Sequence[Tensor],
        sources: Sequence[Tensor],
        factor: complex = 0.0,
    ) -> Callable[[], object] | None:
        """Make ready to launch a kernel on torch's current stream.

        Parameters
        ----------
        kernel, into, sources, factor
            See `ringcoll.reduction.kernels.launch_of`.

        Returns
        -------
        callable or None
            None where a vector is not aligned to its own elements, or the kernel would have to
            be loaded while a CUDA graph is captured. The callable keeps the tensors alive,
            and takes none of the host's time but that of the launch. It is to be called with
            the tensors' device as the current one.
        """
        fitted = kernels.launch_of(kernel, into, sources, factor)
        device = into[0].device
        function = None if fitted is None else self._function(fitted.kernel, device)
        if fitted is None or function is None:
            return None
        bound["cupy"] += 1
        block, grid = (fitted.kernel.threads,), (fitted.blocks,)
        keep = (tuple(into), tuple(sources))
        return partial(_launch, function, grid, block, fitted.arguments, device, keep)

    def _function(self, kernel: Kernel, device: torch.device) -> Any:
        """The kernel, compiled, and loaded into a device; none if that cannot be done now."""
        key = kernel, device.index
        found = self._loaded.get(key)
        if found is None and not _capturing(device):
            with self._loading, torch.cuda.device(device):
                raw = self._compiled.get(kernel)
                if raw is None:
                    program = kernels.header() + kernel.definition()
                    raw = self._cupy.RawKernel(program, "ringcoll_reduce", options=kernels.OPTIONS)
                    self._compiled[kernel] = raw
                found = self._loaded[key] = raw.kernel  # that of the current device
        return found


def _launch(
    function: Any,
    grid: tuple[int],
    block: tuple[int],
    arguments: tuple[int | float, ...],
    device: torch.device,
    keep: object,  # tensors, whose addresses are among the arguments
) -> None:
    function(grid, block, arguments, 0, _stream(_current_stream(device)))


def _current_stream(device: torch.device) -> int:
    # As torch's compiler does, for the same reason: a `torch.cuda.Stream` takes 2 us to make.
    handle: int = torch._C._cuda_getCurrentRawStream(device.index)
    return handle


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _described(
    reduction: Reduction,
    into: Sequence[Tensor],
    sources: Sequence[Tensor],
    world_size: int | None,
    rounds: bool,
) -> tuple[Kernel, complex] | None:
    """The kernel for a reduction, and what the total is divided by; none if there is none."""
    operator = reduction.operator
    if operator.user is not None or len(into) > _MOST_RESULTS:
        return None
    ops = _BOOL_OPS if reduction.work_dtype is torch.bool else _OPS
    op = ops[operator.name]
    # Signed numbers that stand for unsigned ones of as many bits; see `resolve`.
    unsigned = reduction.dtype in SIGNED_TWIN and op not in ("Min", "Max")
    types = []
    for one in (sources[0], sources[-1], into[0], into[-1]):
        twin = unsigned and one.dtype is reduction.work_dtype
        types.append(kernels.c_type(reduction.dtype if twin else one.dtype))
    first, rest, target, copy = types
    if first is None or rest is None or target is None or copy is None:
        return None
    if len({one.dtype for one in sources[1:]}) > 1:
        return None
    finish = "Divide" if world_size is not None and operator.name == "avg" else "Plain"
    rounded = ""
    if rounds and reduction.wire_dtype is not reduction.work_dtype:
        rounded = kernels.c_type(reduction.wire_dtype) or "unknown"
    if rounded == "unknown":
        return None
    kernel = Kernel(op, finish, first, rest, target, copy, len(sources), len(into), rounded=rounded)
    return kernel, float(world_size or 0)
