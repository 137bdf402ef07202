"""Devices: what can be run on the CPU, too, is; so these tests are themselves tested without a GPU."""

from __future__ import annotations

import pytest

from tests.support.gpu_kernels import compile_all


@pytest.fixture(scope="session")
def compiled() -> None:
    """Kernels in CuPy's cache: some hundreds, at some tenths of a second each."""
    assert compile_all() > 500


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where the tensors are."""
    if request.param == "cuda":
        request.getfixturevalue("compiled")
    return str(request.param)
