"""The engine that uses the kernels: what it takes them for, and what it does without them.

Where whole collectives run, the kernels do so on the CPU, on CPU tensors.
"""

from __future__ import annotations

import builtins
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, UserOp, run_threads
from ringcoll.errors import ArgumentError, MissingExtraError
from ringcoll.runtime.collectives import arguments as call
from ringcoll.runtime.machine import settings
from ringcoll.runtime.reduction import MOST_SOURCES, TORCH, CupyEngine, Engine, gpu, resolve
from ringcoll.tools.testing import inputs as data
from tests.cases.calls import Case, fingerprint, prepare, verdict
from tests.cases.effort import effort
from tests.cases.kernel_table import plain
from tests.cases.strategies import cases, operators
from tests.fakes.host_kernels import COMPILER, HOST_STREAM, HostEngine

needs_compiler = pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")
_LONG = 1 << 17  # short tensors are copied to memory of the operation's own
DTYPES = (*data.INTEGERS, *data.FLOATS, *data.COMPLEX, torch.bool)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostEngine]:
    """The engine, everywhere where torch's operators reduce CPU tensors."""
    patch = pytest.MonkeyPatch()
    engine = HostEngine(tmp_path_factory.mktemp("engine"))
    patch.setattr(gpu, "_current_stream", lambda device: HOST_STREAM)
    patch.setattr(call, "TORCH", engine)
    yield engine
    patch.undo()


# (dtype, operator, wire dtype): one kernel of each kind is enough, and compiled here.
KINDS = [
    (torch.float32, "sum", None),
    (torch.bfloat16, "avg", None),
    (torch.bfloat16, "sum", torch.bfloat16),
    (torch.int16, "max", None),
    (torch.uint16, "avg", None),
    (torch.bool, "sum", None),
    (torch.float16, "premul_sum", None),
]


@st.composite
def reductions(draw: st.DrawFn, world_size: int) -> Case:
    drawn = draw(cases(world_size, collectives=("all_reduce", "reduce", "reduce_scatter")))
    dtype, op, wire = draw(st.sampled_from(KINDS))
    kind = "rough" if wire is not None else drawn.kind
    styles = {"conj": "flat", "neg": "flat"}
    style = styles.get(drawn.style, drawn.style)
    return replace(drawn, dtype=dtype, op=op, wire_dtype=wire, kind=kind, style=style)


@pytest.mark.slow
@needs_compiler
@effort(150)
@given(st.sampled_from([2, 3, 4]).flatmap(lambda k: st.tuples(reductions(k), st.just(k))))
def test_collectives_on_kernels(host: HostEngine, drawn: tuple[Case, int]) -> None:
    case, world_size = drawn

    def main(group: LocalGroup) -> tuple[list[str], str]:
        prepared = prepare(case, group.rank(), world_size)
        work = prepared.start(ringcoll, group)
        if work is not None:
            work.wait()
        return verdict(prepared, group.rank(), world_size), fingerprint(prepared)

    results = run_threads(main, world_size, timeout_s=60)
    assert [wrong for found, _ in results for wrong in found] == []
    if case.collective == "all_reduce":
        assert len({hashed for _, hashed in results}) == 1, "ranks differ"


@needs_compiler
@pytest.mark.parametrize("start", [0, 1, 3])
@pytest.mark.parametrize(
    "algorithm, wire, wanted",
    [
        ("ring", None, {(2, 1, "float32", "float32")}),
        ("direct", None, {(4, 1, "float32", "float32")}),
        ("ring", torch.bfloat16, {(2, 2, "bfloat16", "float32"), (1, 2, "float32", "float32")}),
    ],
)
def test_which_kernels_run(
    host: HostEngine, algorithm: str, wire: Any, wanted: set[tuple[int, int, str, str]], start: int
) -> None:
    """One a step for the ring, one for all operands where they come at once; and one to send.

    Working memory is aligned as the user's tensor, wherever that starts: accesses are wide.
    """
    host.kernels.clear()
    values = torch.arange(float(_LONG)) % 60

    def main(group: LocalGroup) -> Tensor:
        tensor = torch.empty(_LONG + start)[start:]
        tensor.copy_(values + group.rank())
        ringcoll.all_reduce(tensor, group=group, algorithm=algorithm, wire_dtype=wire)
        return tensor

    results = run_threads(main, 4)
    assert all(torch.equal(one, values * 4 + 6) for one in results)
    used = {(one.sources, one.results, one.first, one.rest) for one in host.kernels}
    assert used == wanted
    assert {one.run for one in host.kernels} == {4}, "all are aligned alike"


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_operator_is_that_of_torch(host: HostEngine, dtype: torch.dtype) -> None:
    ops = [op for op in operators(dtype) if not op.startswith("user")]
    for op in ops:
        named = ringcoll.premul_sum(0.5) if op == "premul_sum" else op
        reduction = resolve(named, dtype)
        inputs = [reduction.encode(data.values(dtype, 33, rank=rank, op=op)) for rank in range(3)]
        for finished in (None, 4):  # torch divides complex numbers less exactly
            into = [torch.empty_like(inputs[0]) for _ in range(2)]
            wanted = [torch.empty_like(inputs[0]) for _ in range(2)]
            bound = gpu.bound["cupy"]
            host.bind(reduction, into, inputs, finished)()
            assert gpu.bound["cupy"] == bound + 1
            TORCH.bind(reduction, wanted, inputs, finished)()
            for got, want in zip(into, wanted, strict=True):
                assert torch.equal(got, want), op


def test_torch_computes_an_operator_without_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(gpu._OPS, "max")
    before = gpu.bound.copy()
    left, right = torch.tensor([1.0, 5.0]), torch.tensor([4.0, 2.0])
    CupyEngine(None).bind(resolve("max", torch.float32), [left], [left, right], None)()
    assert left.tolist() == [4.0, 5.0]
    assert gpu.bound - before == {"torch": 1}


@needs_compiler
def test_inputs_are_scaled_in_one_launch(host: HostEngine) -> None:
    """From a dtype to that of partial results, scaled and rounded; or by torch, in steps."""
    given = data.values(torch.bfloat16, 100, rank=1, kind="rough")
    for wire in (None, torch.float16):
        reduction = resolve(ringcoll.premul_sum(0.3), torch.bfloat16, wire_dtype=wire)
        before = gpu.bound["cupy"]
        assert torch.equal(host.encode(reduction, given), TORCH.encode(reduction, given))
        assert gpu.bound["cupy"] == before + 1
    late = resolve(ringcoll.premul_sum(torch.tensor(0.3)), torch.bfloat16)  # not to be waited for
    before = gpu.bound["cupy"]
    assert torch.equal(host.encode(late, given), TORCH.encode(late, given))
    assert gpu.bound["cupy"] == before


@needs_compiler
def test_more_sources_than_a_kernel_takes(host: HostEngine) -> None:
    reduction = resolve("avg", torch.float32)
    inputs = [torch.full((9,), float(rank)) for rank in range(2 * MOST_SOURCES + 3)]
    into = torch.empty(9)
    host.kernels.clear()
    host.bind(reduction, [into], inputs, len(inputs))()
    assert torch.equal(into, torch.full((9,), (len(inputs) - 1) / 2))
    assert {one.sources for one in host.kernels} == {MOST_SOURCES, 5}


def test_torch_does_the_rest(host: HostEngine) -> None:
    ones, twos = torch.ones(8), torch.full((8,), 2.0)
    astray = torch.frombuffer(bytearray(40), dtype=torch.float32, count=8, offset=2)
    odd = torch.float8_e4m3fnuz  # unknown to the kernels
    calls = [
        (resolve(UserOp(torch.add), torch.float32), [torch.empty(8)], [ones, twos]),
        (resolve("sum", torch.float32), [astray], [ones, twos]),
        (resolve("sum", torch.float32), [torch.empty(8) for _ in range(3)], [ones, twos]),
        (resolve("sum", odd, wire_dtype=odd), [torch.empty(8)], [ones, twos.to(odd)]),
    ]
    for reduction, into, sources in calls:
        before = gpu.bound["torch"]
        host.bind(reduction, into, sources, None)()
        assert gpu.bound["torch"] == before + 1
        assert all(torch.equal(one, torch.full((8,), 3.0)) for one in into)


class FakeCupy:
    """As much of CuPy as the engine uses; launches are noted."""

    __version__ = "0.0"

    def __init__(
        self,
        runtime: int = 13020,
        error: Exception | None = None,
        broken: str = "",
        warns: bool = False,
    ) -> None:
        self.broken, self.warns = broken, warns
        self.launches: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[str, str, tuple[str, ...]]] = []

        def version() -> int:
            if error is not None:
                raise error
            return runtime

        self.cuda = SimpleNamespace(runtime=SimpleNamespace(runtimeGetVersion=version))

    def RawKernel(self, code: str, name: str, options: tuple[str, ...] = ()) -> Any:  # noqa: N802
        if self.warns:
            warnings.warn("a header is old", UserWarning, stacklevel=1)
        if self.broken:
            raise RuntimeError(self.broken)
        self.compiled.append((code, name, options))
        return SimpleNamespace(kernel=lambda *told: self.launches.append(told))


def test_what_cupy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses, lengths, and torch's stream; a kernel is compiled once."""
    cupy = FakeCupy()
    engine = CupyEngine(cupy)
    monkeypatch.setattr(gpu, "_current_stream", lambda device: 99)
    monkeypatch.setattr(gpu, "_capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode(False))
    left, right = torch.zeros(2, 5000)
    run = engine.bind(resolve("sum", torch.float32), [left], [left, right], None)
    engine.bind(resolve("avg", torch.float32), [right], [left, right], None)
    run()
    run()
    ((code, name, options),) = cupy.compiled
    expected = replace(plain("Sum", torch.float32), run=4)
    assert code == gpu.header() + expected.definition()
    assert name == "ringcoll_reduce"
    assert options == gpu.OPTIONS
    first, second = cupy.launches
    assert first == second
    grid, block, arguments, shared, stream = first
    assert (grid, block, shared, stream.ptr) == ((2,), (256,), 0, 99)
    pointers = left.data_ptr(), right.data_ptr(), left.data_ptr()
    assert arguments == (*pointers, 5000, 0, 0.0, 0.0)


def test_no_kernel_is_loaded_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would end it; one that is there is used, and torch does what it would have done."""
    cupy = FakeCupy()
    engine = CupyEngine(cupy)
    capturing = False
    monkeypatch.setattr(gpu, "_current_stream", lambda device: 99)
    monkeypatch.setattr(gpu, "_capturing", lambda device: capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode(False))
    left, right = torch.ones(2, 5000)
    engine.bind(resolve("sum", torch.float32), [left], [left, right], None)
    capturing = True
    engine.bind(resolve("sum", torch.float32), [left], [left, right], None)()
    assert len(cupy.compiled) == len(cupy.launches) == 1
    engine.bind(resolve("max", torch.float32), [left], [left, 2 * right], None)()
    assert len(cupy.compiled) == len(cupy.launches) == 1
    assert torch.equal(left, 2 * right)


@pytest.fixture
def fresh() -> Iterator[None]:
    gpu._chosen.clear()
    yield
    gpu._chosen.clear()


NO_HEADERS = "Failed to find CUDA headers\n  in: /usr/local/cuda\nSet CUDA_PATH"
PIP = "pip install 'ringcoll[cuda13]'"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "cupy, told",
    [
        (None, "CuPy is not installed"),
        (FakeCupy(runtime=12090), "CuPy is built for CUDA 12, torch for CUDA 13.0"),
        (FakeCupy(error=RuntimeError("no driver")), "CuPy does not work here: no driver"),
        (FakeCupy(broken="no NVRTC"), "CuPy does not work here: no NVRTC"),
        (
            FakeCupy(broken=NO_HEADERS),
            f"CuPy does not work here: Failed to find CUDA headers: {PIP}",
        ),
        (FakeCupy(broken="x" * 1000), "CuPy does not work here: " + "x" * 300 + "..."),
    ],
)
def test_without_cupy(monkeypatch: pytest.MonkeyPatch, cupy: Any, told: str) -> None:
    def find(name: str) -> Any:
        assert name == "cupy"
        if cupy is None:
            raise ModuleNotFoundError("No module named 'cupy'")
        return cupy

    monkeypatch.setattr(gpu, "import_module", find)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(RuntimeWarning, match="done by torch") as seen:
        engine = gpu.engine()
    (warning,) = seen
    assert type(engine) is Engine
    for text in (str(warning.message), engine.reason):
        assert told in text
        installs = "pip install 'ringcoll[cuda13]'" in text
        assert installs == ("does not work" not in told or "header" in told), "where it would help"
        assert "\n" not in text
    assert gpu.engine() is engine, "and it is said once"
    with pytest.raises(MissingExtraError) as caught:
        gpu.engine("cupy")
    assert told in str(caught.value)


@pytest.mark.usefixtures("fresh")
def test_with_cupy(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    monkeypatch.setattr(gpu, "import_module", lambda name: FakeCupy())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert gpu.engine().name == "cupy 0.0"
    assert gpu.engine("torch").name == "torch"
    assert not recwarn.list


@pytest.mark.usefixtures("fresh")
def test_warnings_of_cupy_are_not_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Any:
        warnings.warn("a library is old", FutureWarning, stacklevel=1)
        return FakeCupy(warns=True)

    monkeypatch.setattr(gpu, "import_module", find)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpu.engine().name == "cupy 0.0"
        with pytest.raises(UserWarning):
            warnings.warn("of the user", stacklevel=1)  # the user's own filters are as before


@pytest.mark.usefixtures("fresh")
def test_a_warning_that_is_an_error_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "import_module", lambda name: FakeCupy(broken="no NVRTC"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="no NVRTC"):
            gpu.engine()
        assert gpu.engine().name == "torch"


@pytest.mark.parametrize("required", [False, True])
def test_a_kernel_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch, required: bool) -> None:
    """torch does its work, and that is said once; or it is an error, if kernels are required."""
    monkeypatch.setattr(gpu, "_capturing", lambda device: False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.inference_mode(False))
    engine = CupyEngine(FakeCupy(broken="error: no such instruction\nand more"), required=required)
    left, right = torch.ones(2, 5000)

    def reduce(*ops: str) -> None:
        for op in ops:
            engine.bind(resolve(op, torch.float32), [left], [left, right], None)()

    if required:
        with pytest.raises(RuntimeError, match="no such instruction"):
            reduce("sum")
        return
    with pytest.warns(RuntimeWarning, match="by torch: CuPy cannot compile.*instruction$") as seen:
        reduce("sum", "sum", "product")
    assert len(seen) == 1
    assert left.tolist() == [3.0] * 5000


@pytest.mark.usefixtures("fresh")
def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def find(name: str) -> FakeCupy:
        tried.append(name)
        return FakeCupy()

    monkeypatch.setattr(gpu, "import_module", find)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert gpu.engine().name == "torch"
    assert tried == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert gpu.engine().name == "cupy 0.0", "and it is not kept in mind"


def test_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGCOLL_REDUCTION", raising=False)
    assert settings.reduction() == "auto"
    monkeypatch.setenv("RINGCOLL_REDUCTION", "torch")
    assert settings.reduction() == "torch"
    monkeypatch.setenv("RINGCOLL_REDUCTION", "numpy")
    with pytest.raises(ArgumentError, match=r"RINGCOLL_REDUCTION.*auto, cupy, torch"):
        settings.reduction()


def test_cupy_is_not_imported_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def find(name: str, *rest: Any, **more: Any) -> Any:
        assert not name.startswith("cupy")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", find)
    assert (
        run_threads(lambda group: ringcoll.all_reduce(torch.ones(3), group=group), 2) == [None] * 2
    )
