"""torch's default device and dtype change nothing: the library names those of all that it makes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import ringcoll
from ringcoll import LocalGroup, run_threads, testing, training
from ringcoll.training import ShardedAdamW
from tests.programs import default_device

PACKAGE = Path(ringcoll.__file__).parent
# Functions of torch whose result is on the default device (`torch.utils._device`).
FACTORIES = {
    *("arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "range", "zeros"),
    *("scalar_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices"),
    "triu_indices",
}
TRAINERS = [
    ":".join(filter(None, (name, entry.options[-1] if entry.options else "1x2x1")))
    for name, entry in training.TRAINERS.items()
]


def without_device(source: str) -> list[str]:
    """The calls of factories that name no device."""
    return [
        f"{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in FACTORIES) == ("torch", True)
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]


@pytest.mark.slow
def test_every_factory_names_its_device():
    found = {
        str(path.relative_to(PACKAGE)): calls
        for path in PACKAGE.rglob("*.py")
        if (calls := without_device(path.read_text()))
    }
    assert not found


def test_a_factory_without_a_device_is_found():
    assert without_device("import torch\nx = torch.zeros(3)\n") == ["2: torch.zeros(3)"]
    assert not without_device("x = torch.zeros(3, device='cpu')\ny = torch.empty(2, **options)")


@pytest.mark.processes
def test_calls_make_nothing_on_the_default_device():
    for rank, found in enumerate(testing.ranks(2).run(default_device.called, "meta")):
        assert found["sparse"].tolist() == [1, 1, 2, 0]
        assert found["half"].tolist() == [1.5] * 5
        assert found["odd"].tolist() == [3] * 5
        assert found["strided"].tolist() == [[3.0, 3.0]] * 4
        assert found["got"].tolist() == ([0, 1, 1, 2] if rank == 0 else [2, 3, 3, 4])


@pytest.mark.processes
@pytest.mark.parametrize("name", TRAINERS)
def test_training_is_the_same_under_any_default_device(name: str):
    usual = testing.ranks(2).run(default_device.trained, None, [name])
    assert testing.ranks(2).run(default_device.trained, "meta", [name]) == usual
    assert all(torch.tensor(found[name], device="cpu").isfinite().all() for found in usual)


@pytest.mark.processes
@pytest.mark.parametrize("name", TRAINERS)
def test_training_is_the_same_under_any_default_dtype(name: str):
    usual = testing.ranks(2).run(default_device.trained_in, torch.float32, name)
    for dtype in (torch.bfloat16, torch.float64):
        assert testing.ranks(2).run(default_device.trained_in, dtype, name) == usual


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_that_goes_on_counts_its_steps(stage: int, dtype: torch.dtype):
    """16 bits have no 257 (bfloat16), or no 2049 (float16)."""

    def main(group: LocalGroup) -> list[int]:
        model = torch.nn.Linear(3, 2, bias=False, dtype=torch.float32)
        optimizer = ShardedAdamW(model, group, stage=stage)
        counts = []
        for before in (0, 256, 2048, 1 << 24):
            optimizer.load_state_dict(optimizer.state_dict() | {"step": before})
            for _ in range(3):
                model(torch.ones(1, 3, dtype=torch.float32)).sum().backward()
                optimizer.step()
            counts.append(optimizer.state_dict()["step"] - before)
        return counts

    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert run_threads(main, 2) == [[3] * 4] * 2
    finally:
        torch.set_default_dtype(usual)
