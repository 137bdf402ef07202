"""A transformer on a mesh of ranks is that of one process."""

from __future__ import annotations

from typing import Any

import pytest

from ringcoll import testing
from tests.programs import meshes
from tests.training.reference import far, tokens, train, transformer

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    "sizes, options",
    [
        ((2, 2, 2), {}),
        ((1, 2, 2), {"schedule": "gpipe"}),
        ((2, 1, 2), {"sequence": True}),
        ((1, 2, 2), {"sequence": True, "schedule": "gpipe"}),
        ((2, 2, 1), {}),
    ],
)
def test_a_transformer_on_a_mesh_is_that_of_one_process(
    sizes: tuple[int, int, int], options: dict[str, Any]
):
    whole = transformer(meshes.SHAPE)
    expected = train(whole, lambda step: tokens(step, 8, meshes.SHAPE))
    world_size = sizes[0] * sizes[1] * sizes[2]
    for losses, params in testing.ranks(world_size).run(meshes.trained, sizes, options):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert far(zip(params, whole.parameters(), strict=True)) < 1e-10


def test_the_table_says_which_ranks_share_what():
    (text, *others) = testing.ranks(4).run(meshes.table, (2, 1, 2))
    assert set(others) == {text}
    assert [line.split("  ")[0].strip() for line in text.splitlines()] == [
        "data", "pipeline", "tensor",
    ]  # fmt: skip
    assert text.splitlines()[0].startswith("data      0 2  1 3")
    assert text.splitlines()[2].startswith("tensor    0 1  2 3")


def test_what_does_not_fit_the_mesh():
    for size, batch, layers, unknown in testing.ranks(4).run(meshes.refused, (2, 2, 1)):
        assert "expected a product of 4, got 3 x 2 x 1" in size
        assert "'inputs': the data axis does not divide the batch" in batch
        assert "'num_stages': a stage would have no layers (expected 1 to 1, got 2)" in layers
        assert "'schedule': there is no such schedule" in unknown
        assert "gpipe, 1f1b, got 2f2b" in unknown
        assert all(text.startswith("ArgumentError") for text in (size, batch, layers, unknown))
