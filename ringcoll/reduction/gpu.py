"""Reductions on a GPU, with the kernels of ``reduce.cuh``, compiled and launched by CuPy.

CuPy comes with the extra ``ringcoll[cuda13]`` or ``ringcoll[cuda12]``. The launch gets addresses
of torch's memory, of any dtype, and torch's current stream: nothing is copied, and the host waits
for nothing. The first use compiles a kernel, in some tenths of a second; CuPy keeps the compiled
kernel on disk (``CUPY_CACHE_DIR``).
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
from ringcoll.reduction.engine import Engine, run_all
from ringcoll.reduction.kernels import Kernel
from ringcoll.reduction.operators import OPERATORS, SIGNED_TWIN, Reduction

bound: Counter[str] = Counter()
"""How often this process has bound reductions to kernels, and to torch's operators instead."""

_MOST_RESULTS = 2
_MOST_CHARACTERS = 300  # of an error of CuPy: its first line
_choosing = threading.Lock()
_chosen: dict[str, Engine] = {}


class _Stream(NamedTuple):
    """A stream for CuPy's launcher, which reads the attribute ``ptr`` only."""

    ptr: int


@cache
def _stream(handle: int) -> _Stream:
    return _Stream(handle)


def _import_cupy() -> Any:
    """Import CuPy; the warnings of an import are nobody's, even where the user makes them errors."""
    with warnings.catch_warnings():  # it is process-wide: an import is short, and happens once
        warnings.simplefilter("ignore")
        return import_module("cupy")


def _unusable() -> str:
    """The reason why CuPy cannot be used, in one line; an empty text if CuPy can be used."""
    major = (torch.version.cuda or "13").partition(".")[0]
    advice = f"pip install 'ringcoll[cuda{major}]'"
    try:
        cupy = _import_cupy()
    except ImportError as error:
        return f"CuPy is not installed ({_in_one_line(error)}): {advice}"
    except Exception as error:  # noqa: BLE001  # a broken installation raises anything
        return f"CuPy cannot be imported ({_in_one_line(error)}): {advice}"
    try:
        cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
        if str(cuda) != major:
            return f"CuPy is built for CUDA {cuda}, torch for CUDA {torch.version.cuda}: {advice}"
        # A kernel needs NVRTC, CUDA's headers, a folder for the compiled kernel, and a driver that
        # is new enough. CuPy warns of some of it; that must not be an error here.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _ = cupy.RawKernel('extern "C" __global__ void nothing() {}', "nothing").kernel
    except Exception as error:  # noqa: BLE001  # CuPy has many kinds of its own
        text = _in_one_line(error)
        return f"CuPy does not work here: {text}" + (f": {advice}" if "header" in text else "")
    return ""


def _in_one_line(error: Exception) -> str:
    """The first line of an error that says something, not too long: compilers say a lot."""
    lines = filter(None, map(str.strip, str(error).splitlines()))
    text = next(lines, "") or type(error).__name__
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def engine(wanted: str = "auto", device: torch.device | None = None) -> Engine:
    """The engine that reduces CUDA tensors in this process.

    Parameters
    ----------
    wanted
        ``"cupy"``, ``"torch"``, or ``"auto"``: CuPy where CuPy works, otherwise torch, with a
        warning.
    device
        Device on which CuPy is tried; by default the current device.

    Raises
    ------
    MissingExtraError
        CuPy is wanted, and cannot be used.
    """
    if wanted in _chosen:
        return _chosen[wanted]
    has_gpu = torch.cuda.is_available()
    with _choosing, torch.cuda.device(device) if has_gpu and device else nullcontext():
        if has_gpu and torch.cuda.is_current_stream_capturing():
            # A trial would end the capture. The message of the capture asks for a run before it.
            return Engine("it was first asked for while a CUDA graph was captured")
        if wanted not in _chosen:
            chosen = _chosen[wanted] = _choose(wanted)
            if wanted == "auto" and not isinstance(chosen, CupyEngine):
                _warn(chosen.reason)  # after it is kept: where warnings are errors, this raises
        return _chosen[wanted]


def _choose(wanted: str) -> Engine:
    assert wanted in ("auto", "cupy", "torch"), wanted
    if wanted == "torch":
        return Engine("it was asked for")
    reason = _unusable()
    if not reason:
        return CupyEngine(_import_cupy(), required=wanted == "cupy")
    if wanted == "cupy":
        raise MissingExtraError(reason)
    return Engine(reason)


def _warn(reason: str) -> None:
    message = f"reductions on the GPU are done by torch: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=4)


# Names of operators in the kernels: for numbers, and for bool.
_OPS = {name: name.capitalize() for name in OPERATORS.values()} | {
    "avg": "Sum",
    "premul_sum": "Sum",
}
_BOOL_OPS = {**_OPS, "sum": "Bor", "max": "Bor", "product": "Band", "min": "Band"}


class CupyEngine(Engine):
    """The kernels of ``reduce.cuh``, by the module ``cupy``; torch's operators without a kernel.

    Parameters
    ----------
    cupy
        The module.
    required
        Whether a kernel that cannot be compiled is an error. Otherwise torch's operators do its
        work, with a warning for the first such kernel.
    """

    def __init__(self, cupy: Any, *, required: bool = False) -> None:
        super().__init__("CuPy works here")
        self._cupy, self._required = cupy, required
        self.name = f"cupy {getattr(cupy, '__version__', '')}"
        self._compiled: dict[Kernel, Any] = {}
        self._loaded: dict[tuple[Kernel, int | None], Any] = {}
        self._failed: set[tuple[Kernel, int | None]] = set()
        self._loading = threading.Lock()

    def bind(
        self,
        reduction: Reduction,
        into: Sequence[Tensor],
        sources: Sequence[Tensor],
        world_size: int | None,
        narrow: Tensor | None = None,
    ) -> Callable[[], object]:
        """Make a function that reduces vectors; see `Engine.bind`."""
        most = kernels.MOST_SOURCES
        if len(sources) > most:
            first = self.bind(reduction, into[:1], sources[:most], None)
            rest = (into[0], *sources[most:])
            return run_all([first, self.bind(reduction, into, rest, world_size, narrow)])
        results = (*into, *([] if narrow is None else [narrow]))
        rounds = world_size is not None or narrow is not None
        kernel = _kernel(reduction, results, sources, world_size, rounds)
        run = kernel and self.launch(kernel, results, sources, float(world_size or 0))
        if run:
            return run
        bound["torch"] += 1
        return super().bind(reduction, into, sources, world_size, narrow)

    def round(self, narrow: Tensor, tensor: Tensor) -> Callable[[], object]:
        """Make a function that converts a tensor; see `Engine.round`."""
        wire, wide = kernels.c_type(narrow.dtype), kernels.c_type(tensor.dtype)
        if wire is not None and wide is not None:
            kernel = Kernel("Sum", "Plain", wide, wide, wire, wide, 1, 2, rounded=wire)
            run = self.launch(kernel, (narrow, tensor), (tensor,))
            if run is not None:
                return run
        return super().round(narrow, tensor)

    def encode(self, reduction: Reduction, flat: Tensor) -> Tensor:
        """Convert a rank's input; see `Engine.encode`.

        The kernel rounds the input to the wire dtype after the scaling only; torch's operators
        round before the scaling, too.
        """
        operator = reduction.operator
        factor = operator.factor
        source, work = kernels.c_type(flat.dtype), kernels.c_type(reduction.work_dtype)
        wire = kernels.c_type(reduction.wire_dtype)
        # The host would have to wait for a factor on the GPU. Without a factor torch is as fast.
        if isinstance(factor, int | float | complex) and source and work and wire:
            finish = "Scale" if operator.has_real_factor else "Multiply"
            kernel = Kernel("Sum", finish, source, source, work, work, 1, 1, rounded=wire)
            into = torch.empty_like(flat, dtype=reduction.work_dtype)
            run = self.launch(kernel, (into,), (flat,), factor)
            if run is not None:
                run()
                return into
        return super().encode(reduction, flat)

    def launch(
        self,
        kernel: Kernel,
        into: Sequence[Tensor],
        sources: Sequence[Tensor],
        factor: complex = 0.0,
    ) -> Callable[[], object] | None:
        """Make a function that launches a kernel on torch's current stream; see `kernels.launch_of`.

        Returns
        -------
        callable or None
            ``None`` if a vector is not aligned to its own elements, if the kernel would have to be
            loaded while a CUDA graph is captured, or if it cannot be compiled. The callable keeps the tensors alive,
            and does nothing on the host but the launch. The tensors' device has to be the
            current device when the callable is called.
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
        """The kernel, compiled and loaded into a device; ``None`` if it cannot be loaded now."""
        key = kernel, device.index
        function = self._loaded.get(key)
        if function is None and key not in self._failed and not _capturing(device):
            with self._loading, torch.cuda.device(device):
                try:
                    function = self._loaded[key] = self._load(kernel)
                except Exception as error:
                    if self._required:
                        raise
                    is_first = not self._failed
                    self._failed.add(key)
                    if is_first:
                        _warn(f"CuPy cannot compile a kernel: {_in_one_line(error)}")
        return function

    def _load(self, kernel: Kernel) -> Any:
        """Compile a kernel, once, and load it into the current device."""
        raw = self._compiled.get(kernel)
        if raw is None:
            program = kernels.header() + kernel.definition()
            raw = self._cupy.RawKernel(program, "ringcoll_reduce", options=kernels.OPTIONS)
            self._compiled[kernel] = raw
        return raw.kernel


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


def _kernel(
    reduction: Reduction,
    into: Sequence[Tensor],
    sources: Sequence[Tensor],
    world_size: int | None,
    rounds: bool,
) -> Kernel | None:
    """The kernel for a reduction, or ``None`` if no kernel can do it."""
    operator = reduction.operator
    if operator.user is not None or len(into) > _MOST_RESULTS:
        return None
    ops = _BOOL_OPS if reduction.work_dtype is torch.bool else _OPS
    op = ops.get(operator.name)
    # Signed numbers may stand for unsigned numbers of as many bits; see `resolve`.
    unsigned = reduction.dtype in SIGNED_TWIN and op not in ("Min", "Max")
    first, rest, target, copy = (
        kernels.c_type(
            reduction.dtype if unsigned and vector.dtype is reduction.work_dtype else vector.dtype
        )
        for vector in (sources[0], sources[-1], into[0], into[-1])
    )
    rounded: str | None = ""
    if rounds and reduction.wire_dtype is not reduction.work_dtype:
        rounded = kernels.c_type(reduction.wire_dtype)
    if op is None or first is None or rest is None or target is None or copy is None:
        return None
    if rounded is None or len({source.dtype for source in sources[1:]}) > 1:
        return None
    finish = "Divide" if world_size is not None and operator.name == "avg" else "Plain"
    return Kernel(op, finish, first, rest, target, copy, len(sources), len(into), rounded=rounded)
