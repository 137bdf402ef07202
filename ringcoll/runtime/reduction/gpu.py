"""Reductions on a GPU: kernels, compiled and launched by CuPy.

Problem: reduce vectors on a GPU as fast as its memory can be read and written, for every operator
and dtype, wherever the vectors start. The kernel itself is ``reduce.cuh``; here its types and sizes
are filled in (`Kernel`) for the places of the vectors (`aligned`), which needs no GPU: tests
compile every kernel, and run it on a CPU. Cost: a launch; each operand is read once, each result is
written once.

CuPy comes with the extra ``ringcoll[cuda13]`` or ``ringcoll[cuda12]``. The launch gets addresses of
torch's memory, of any dtype, and torch's current stream: nothing is copied, and the host waits for
nothing. The first use compiles a kernel, in some tenths of a second; CuPy keeps the compiled kernel
on disk (``CUPY_CACHE_DIR``).
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from importlib import import_module, resources
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcoll.errors import MissingExtraError
from ringcoll.runtime.reduction.engine import Engine, run_all
from ringcoll.runtime.reduction.names import OPERATORS
from ringcoll.runtime.reduction.operators import SIGNED_TWIN, Reduction

MOST_SOURCES = 16
"""Largest number of operands of a launch, which holds all of them in registers at once."""

# Options of the compiler. Without fused multiply-add, results are those of a CPU bit for bit.
OPTIONS = ("--std=c++17", "--fmad=false")

# Number of accesses under way in a thread. Reckoned, not measured: 4.8 TB/s (the data sheet of an
# H200) for a latency of 1 us is 36 KiB for each of its 132 multiprocessors; 768 threads ask for 96
# KiB.
_LOADS = 8
_MOST_UNROLLED = 4
_MOST_ELEMENTS = 32  # of a vector in a thread: more elements do not fit in its registers
_MOST_HELD = 64  # of all sources, so that three blocks find room; tried with NVRTC 13.0 and 13.5
_ACCESS_NBYTES = 16  # the widest access
_MOST_BLOCKS = (1 << 31) - 1

_NAMED = (
    "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128 "
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64"
)
_C_TYPES: dict[torch.dtype, str] = {getattr(torch, name): name for name in _NAMED.split()}
_C_TYPES[torch.bool] = "uint8"
_NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_NBYTES = {name: dtype.itemsize for dtype, name in _C_TYPES.items()}


def c_type(dtype: torch.dtype) -> str | None:
    """Name of a dtype in the kernels; ``None`` if the kernels do not know the dtype."""
    return _C_TYPES.get(dtype)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Types and sizes of a kernel; see the struct of that name in ``reduce.cuh``.

    Parameters
    ----------
    op
        ``Sum``, ``Product``, ``Min``, ``Max``, ``Band``, ``Bor`` or ``Bxor``.
    finish
        ``Plain``, ``Divide`` or ``Multiply``: the last operation on the total.
    first, rest
        Types of the first source, and of all other sources.
    into, copy
        Types of the first result, and of the second.
    sources, results
        Number of sources, at least 1, and of results, 1 or 2.
    rounded
        Type to which the total is rounded before it is stored; "" for no such rounding.
    run
        Elements of an access.
    """

    op: str
    finish: str
    first: str
    rest: str
    into: str
    copy: str
    sources: int
    results: int
    rounded: str = ""
    run: int = 1

    @property
    def work(self) -> str:
        """Type of the computation: the widest type of all, but no narrower than float32."""
        widest = max(
            (self.first, self.rest, self.into, self.copy),
            key=lambda name: (_NBYTES[name], name not in _NARROW),
        )
        return "float32" if widest in _NARROW else widest

    @property
    def pack(self) -> int:
        """Elements that a thread moves at a time."""
        used = {self.first, self.rest, self.into, self.copy}
        return _ACCESS_NBYTES // max(_NBYTES[name] for name in used)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 256

    @property
    def unroll(self) -> int:
        """Packs of each source that a thread has under way."""
        return max(1, min(_MOST_UNROLLED, _LOADS // self.sources, _MOST_ELEMENTS // self.pack))

    @property
    def resident(self) -> int:
        """Blocks for which a multiprocessor has to have room.

        The number is for the compiler, which would otherwise save registers for more blocks, and
        wait for a load before it asks for the next. For sm_100 NVRTC 13.5 even spilled registers of
        some kernels. Other kernels do not fit if there are to be three blocks, or even two.
        """
        elements = self.sources * self.pack
        is_float8 = self.first.startswith("float8") or self.rest.startswith("float8")
        if self.sources <= _LOADS and elements <= _MOST_HELD and not is_float8:
            return 3
        return 2 if elements <= 2 * _MOST_HELD else 1

    def parameters(self) -> list[str]:
        """Parameters of the kernel, in C++."""
        vectors = [f"const void* source{i}" for i in range(self.sources)]
        vectors += [f"void* into{i}" for i in range(self.results)]
        return [*vectors, "long long numel", "long long head", "double real", "double imag"]

    def definition(self, name: str = "ringcoll_reduce") -> str:
        """The kernel in CUDA C++; `header` comes before it."""
        types = (self.work, self.first, self.rest, self.into, self.copy, self.rounded or self.work)
        words = ", ".join(f"ringcoll::{word}" for word in (self.op, self.finish, *types))
        sizes = (self.sources, self.results, self.pack, self.run, self.unroll, self.threads)
        sources = ", ".join(f"source{i}" for i in range(self.sources))
        results = ", ".join(f"into{i}" for i in range(self.results))
        return f"""
extern "C" __global__ void __launch_bounds__({self.threads}, {self.resident}) {name}(
    {", ".join(self.parameters())}) {{
    typedef ringcoll::Kernel<
        {words},
        {", ".join(map(str, sizes))}> Chosen;
    ringcoll::Arguments<Chosen> arguments = {{
        {{{sources}}}, {{{results}}}, numel, head, real, imag}};
    ringcoll::reduce<Chosen>(arguments);
}}
"""


@lru_cache(maxsize=1)
def header() -> str:
    """The common source of all kernels, in CUDA C++: ``reduce.cuh``."""
    large = torch.tensor([1000.0], device="cpu").to(torch.float8_e4m3fn).view(torch.uint8).item()
    text = resources.files(__package__).joinpath("reduce.cuh").read_text(encoding="utf-8")
    return f"#define RINGCOLL_LARGE_E4M3 {large}\n{text}"


def aligned(places: Sequence[tuple[int, int]], pack: int) -> tuple[int, int] | None:
    """The longest run that fits all vectors, and the number of elements before the first run.

    Places are the addresses of vectors, with the sizes of their elements, in bytes.

    >>> aligned([(4096, 4), (8192, 4)], 4)
    (4, 0)
    >>> aligned([(4100, 4), (8196, 4)], 4)  # both one element off
    (4, 3)
    >>> aligned([(4096, 4), (8200, 4)], 4)  # two elements apart
    (2, 0)
    """
    if any(address % itemsize for address, itemsize in places):
        return None
    run = pack
    while True:
        heads = {-(address // itemsize) % run for address, itemsize in places}
        if len(heads) == 1:
            return run, heads.pop()
        run //= 2


class Launch(NamedTuple):
    """A kernel that fits its vectors, and the numbers for its launch."""

    kernel: Kernel
    blocks: int
    arguments: tuple[int | float, ...]


def launch_of(
    kernel: Kernel, into: Sequence[Tensor], sources: Sequence[Tensor], factor: complex = 0.0
) -> Launch | None:
    """Fit a kernel to vectors; ``None`` if one of them is not aligned to its own elements.

    Parameters
    ----------
    kernel
        Kernel with any run.
    into, sources
        Flat contiguous tensors, all with the same number of elements.
    factor
        Number by which the total is divided, or multiplied.
    """
    vectors, numel = (*sources, *into), into[0].numel()
    assert all(vector.numel() == numel for vector in vectors)
    pointers = [vector.data_ptr() for vector in vectors]
    itemsizes = [vector.itemsize for vector in vectors]
    fit = aligned([*zip(pointers, itemsizes, strict=True)], kernel.pack)
    if fit is None:
        return None
    run, head = fit[0], min(fit[1], numel)
    packs, tile = (numel - head) // kernel.pack, kernel.threads * kernel.unroll
    blocks = max(1, min(-(-packs // tile), _MOST_BLOCKS))
    numbers = (float(factor.real), float(factor.imag))
    return Launch(replace(kernel, run=run), blocks, (*pointers, numel, head, *numbers))


# --- the engine ---------------------------------------------------------------------------

bound: Counter[str] = Counter()
"""How often this process has bound reductions to kernels, and to torch's operators instead."""

_MOST_RESULTS = 2
_MOST_CHARACTERS = 300  # of an error of CuPy: its first line
# Names of operators in the kernels: for numbers, and for bool.
_SUMS = {"avg": "Sum", "premul_sum": "Sum"}
_OPS = {name: name.capitalize() for name in OPERATORS.values()} | _SUMS
_BOOL_OPS = {**_OPS, "sum": "Bor", "max": "Bor", "product": "Band", "min": "Band"}
_choosing = threading.Lock()
_chosen: dict[str, Engine] = {}


# CuPy's launcher reads the attribute ``ptr`` of a stream only.
_stream = cache(lambda handle: SimpleNamespace(ptr=handle))


def _unusable() -> str:
    """The reason why CuPy cannot be used, in one line; an empty text if CuPy can be used."""
    major = (torch.version.cuda or "13").partition(".")[0]
    advice = f"pip install 'ringcoll[cuda{major}]'"
    try:
        cupy = import_module("cupy")
    except ImportError as error:
        return f"CuPy is not installed ({_in_one_line(error)}): {advice}"
    except Exception as error:  # noqa: BLE001  # a broken installation raises anything
        return f"CuPy cannot be imported ({_in_one_line(error)}): {advice}"
    try:
        cuda = cupy.cuda.runtime.runtimeGetVersion() // 1000
        if str(cuda) != major:
            return f"CuPy is built for CUDA {cuda}, torch for CUDA {torch.version.cuda}: {advice}"
        # A kernel needs NVRTC, CUDA's headers, a folder for the compiled kernel, and a driver that
        # is new enough.
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
    with warnings.catch_warnings():  # CuPy's, even if the user makes them errors; process-wide
        warnings.simplefilter("ignore")
        if not (reason := _unusable()):
            return CupyEngine(import_module("cupy"), required=wanted == "cupy")
    if wanted == "cupy":
        raise MissingExtraError(reason)
    return Engine(reason)


def _warn(reason: str) -> None:
    message = f"reductions on the GPU are done by torch: {reason}"
    warnings.warn(message, RuntimeWarning, stacklevel=4)


class CupyEngine(Engine):
    """The kernels of ``reduce.cuh``, by the module ``cupy``; torch's operators without a kernel.

    A kernel that cannot be compiled is an error if kernels are ``required``. Otherwise torch's
    operators do its work, with a warning for the first such kernel.
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
        if len(sources) > MOST_SOURCES:
            first = self.bind(reduction, into[:1], sources[:MOST_SOURCES], None)
            rest = (into[0], *sources[MOST_SOURCES:])
            return run_all([first, self.bind(reduction, into, rest, world_size, narrow)])
        results = (*into, *([] if narrow is None else [narrow]))
        rounds = world_size is not None or narrow is not None
        kernel = _kernel(reduction, results, sources, world_size, rounds)
        if kernel and (run := self.launch(kernel, results, sources, float(world_size or 0))):
            return run
        bound["torch"] += 1
        return super().bind(reduction, into, sources, world_size, narrow)

    def round(self, narrow: Tensor, tensor: Tensor) -> Callable[[], object]:
        """Make a function that converts a tensor; see `Engine.round`."""
        wire, wide = c_type(narrow.dtype), c_type(tensor.dtype)
        if wire is not None and wide is not None:
            kernel = Kernel("Sum", "Plain", wide, wide, wire, wide, 1, 2, rounded=wire)
            if run := self.launch(kernel, (narrow, tensor), (tensor,)):
                return run
        return super().round(narrow, tensor)

    def encode(self, reduction: Reduction, flat: Tensor) -> Tensor:
        """Convert a rank's input; see `Engine.encode`.

        The kernel rounds the input to the wire dtype after the scaling only; torch's operators
        round before the scaling, too.
        """
        factor = reduction.operator.factor
        dtypes = flat.dtype, reduction.work_dtype, reduction.wire_dtype
        source, work, wire = map(c_type, dtypes)
        # The host would have to wait for a factor on the GPU. Without a factor torch is as fast.
        if isinstance(factor, int | float | complex) and source and work and wire:
            finish = "Scale" if reduction.operator.has_real_factor else "Multiply"
            kernel = Kernel("Sum", finish, source, source, work, work, 1, 1, rounded=wire)
            into = torch.empty_like(flat, dtype=reduction.work_dtype)
            if run := self.launch(kernel, (into,), (flat,), factor):
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
        """Make a function that launches a kernel on torch's current stream; see `launch_of`.

        ``None`` if a vector is not aligned to its own elements, if the kernel would have to be
        loaded while a CUDA graph is captured, or if it cannot be compiled. The function keeps the
        tensors alive, and does nothing on the host but the launch. The tensors' device has to be
        the current device when the function is called.
        """
        fitted = launch_of(kernel, into, sources, factor)
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
        raw = self._compiled.get(kernel)
        if raw is None:
            program = header() + kernel.definition()
            raw = self._cupy.RawKernel(program, "ringcoll_reduce", options=OPTIONS)
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
        c_type(
            reduction.dtype if unsigned and vector.dtype is reduction.work_dtype else vector.dtype
        )
        for vector in (sources[0], sources[-1], into[0], into[-1])
    )
    is_rounded = rounds and reduction.wire_dtype is not reduction.work_dtype
    rounded = c_type(reduction.wire_dtype) if is_rounded else ""
    if op is None or first is None or rest is None or target is None or copy is None:
        return None
    if rounded is None or len({source.dtype for source in sources[1:]}) > 1:
        return None
    finish = "Divide" if world_size is not None and operator.name == "avg" else "Plain"
    return Kernel(op, finish, first, rest, target, copy, len(sources), len(into), rounded=rounded)
