"""Everything that the engine of CUDA tensors is asked for, with its kernels run on the CPU."""

from __future__ import annotations

import pytest
import torch

from ringcoll.runtime.reduction import bound
from tests.cases.engine_cases import DTYPES, Listing, engine_cases, listing, wrong
from tests.fakes.host_kernels import COMPILER, HostKernels


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Listing:
    """An engine with all kernels that will be asked for, compiled together."""
    found = listing()
    found.run = HostKernels(tmp_path_factory.mktemp("kernels"), [*found.seen])
    return found


@pytest.mark.slow  # the kernels are compiled first
@pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_that_is_reduced_is_what_torch_makes_of_it(made: Listing, dtype: torch.dtype):
    before = bound["torch"]
    for case in engine_cases(dtype):
        assert not wrong(made, case)
    assert bound["torch"] == before, "a kernel is missing"


def test_an_engine_that_does_nothing_is_found():
    for dtype in DTYPES:
        assert any(wrong(Listing(), case) for case in engine_cases(dtype)), dtype
