"""A model that is split over ranks is the model of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives import functions
from ringcoll.training import (
    Transformer,
    TransformerShape,
    conjugate,
    mlp,
    tensor_parallel,
)
from tests.training.reference import SHAPE, far, perceptron, samples, tokens, train, transformer

WORLD_SIZES = (1, 2, 4, 8)
Case = tuple[Tensor, Tensor]


def piece(whole: Tensor, like: Tensor, rank: int) -> Tensor:
    """The piece of a parameter that a rank should hold."""
    for dim, (size, held) in enumerate(zip(whole.shape, like.shape, strict=True)):
        if size != held:
            return whole.narrow(dim, rank * held, held)
    return whole


def pieces(model: nn.Module, whole: nn.Module, rank: int) -> list[Case]:
    wholes = dict(whole.named_parameters())
    return [(param, piece(wholes[name], param, rank)) for name, param in model.named_parameters()]


# --- conjugate pairs ------------------------------------------------------------------


def as_one(
    function: Callable[..., Tensor], world_size: int, is_whole: bool, dim: int
) -> tuple[Tensor, Tensor]:
    """Both products, of integers: of outputs and their gradients, of inputs and theirs."""
    rows, columns = 2 * world_size, 3
    shape = (rows, columns) if dim == 0 else (columns, rows)

    def main(group: LocalGroup) -> list[tuple[Tensor, Tensor]]:
        rank = group.rank()
        generator = torch.Generator().manual_seed(rank)
        held = list(shape)
        if not is_whole:
            held[dim] = 2
        inputs = torch.randint(-9, 9, held, generator=generator).double().requires_grad_()
        output = function(inputs, group)
        grad = torch.randint(-9, 9, output.shape, generator=generator).double()
        torch.autograd.backward(output, grad)
        assert inputs.grad is not None
        return [(inputs.detach(), inputs.grad), (grad, output.detach())]

    ranks = run_threads(main, world_size)
    ahead = sum(float((grad * output).sum()) for _, (grad, output) in ranks)
    back = sum(float((inputs * grad).sum()) for (inputs, grad), _ in ranks)
    return torch.tensor(ahead), torch.tensor(back)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "function, is_whole, dim",
    [
        (partial(conjugate.gathered_to_add, dim=0), False, 0),
        (partial(conjugate.gathered_to_add, dim=1), False, 1),
        (partial(conjugate.reduced_and_split, dim=0), True, 0),
        (partial(conjugate.reduced_and_split, dim=1), True, 1),
    ],
)
def test_backward_is_the_transpose_of_forward(
    function: Callable[..., Tensor], is_whole: bool, dim: int, world_size: int
):
    """``<dy, A x> = <A^T dy, x>`` over all ranks together."""
    ahead, back = as_one(function, world_size, is_whole, dim)
    assert torch.equal(ahead, back)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pairs_by_hand(world_size: int):
    def main(group: LocalGroup) -> list[Tensor]:
        rank = group.rank()
        results = []
        for function, shape in (
            (conjugate.copied, (2,)), (conjugate.reduced, (2,)),
            (conjugate.gathered, (2,)), (conjugate.split, (2 * world_size,)),
        ):  # fmt: skip
            inputs = (torch.arange(float(shape[0])) + 10 * rank).requires_grad_()
            output = function(inputs, group)
            torch.autograd.backward(output, torch.arange(float(len(output))) + 100 * rank)
            assert inputs.grad is not None
            results += [output.detach(), inputs.grad]
        return results

    ranks = range(world_size)
    for rank, results in enumerate(run_threads(main, world_size)):
        base, long = torch.arange(2.0), torch.arange(2.0 * world_size)
        total = sum(ranks)
        expected = [
            base + 10 * rank, world_size * base + 100 * total,
            world_size * base + 10 * total, base + 100 * rank,
            torch.cat([base + 10 * peer for peer in ranks]), (long + 100 * rank)[2 * rank :][:2],
            (long + 10 * rank)[2 * rank :][:2], torch.cat([base + 100 * peer for peer in ranks]),
        ]  # fmt: skip
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(result, wanted)


# --- models ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [*WORLD_SIZES, 3])
@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_a_split_perceptron_is_that_of_one_process(layers: int, world_size: int):
    whole = perceptron(layers)
    expected = train(whole, samples, loss=functional.cross_entropy)

    def main(group: LocalGroup) -> tuple[list[float], float]:
        model = tensor_parallel(perceptron(layers), group)
        losses = train(model, samples, loss=functional.cross_entropy)
        return losses, far(pieces(model, whole, group.rank()))

    for losses, distance in run_threads(main, world_size):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert distance < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sequence", [False, True])
def test_a_split_transformer_is_that_of_one_process(sequence: bool, world_size: int):
    whole = transformer()
    expected = train(whole, tokens)

    def main(group: LocalGroup) -> tuple[list[float], float]:
        model = tensor_parallel(transformer(), group, sequence=sequence)
        losses = train(model, tokens)
        return losses, far(pieces(model, whole, group.rank()))

    for losses, distance in run_threads(main, world_size):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert distance < 1e-10


def without_biases(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            module.bias = None  # type: ignore[assignment]
    return model


def with_bare_norms() -> nn.Module:
    model = without_biases(transformer())
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, nn.LayerNorm(SHAPE.width, elementwise_affine=False))
    return model


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "make, sequence",
    [
        (lambda: without_biases(perceptron()), False),
        (lambda: without_biases(transformer()), False),
        (lambda: without_biases(transformer()), True),
        (with_bare_norms, True),
    ],
    ids=["perceptron", "transformer", "by tokens", "norms without parameters"],
)
def test_layers_without_bias_have_the_gradients_of_one_process(
    make: Callable[[], nn.Module], sequence: bool, world_size: int
):
    def gradients(model: nn.Module) -> dict[str, Tensor]:
        if isinstance(model, nn.Sequential):
            train(model, samples, 1, functional.cross_entropy)
        else:
            train(model, tokens, 1)
        found = {name: param.grad for name, param in model.named_parameters()}
        assert not any(name.endswith("bias") for name in found)
        return {name: grad for name, grad in found.items() if grad is not None}

    expected = gradients(make())

    def main(group: LocalGroup) -> float:
        got = gradients(tensor_parallel(make(), group, sequence=sequence))
        assert got.keys() == expected.keys()
        return far((got[name], piece(expected[name], got[name], group.rank())) for name in got)

    assert max(run_threads(main, world_size)) < 1e-10


# --- what is sent and kept ------------------------------------------------------------


class Counting:
    """The public functions, with the elements that go through them counted by name."""

    def __init__(self, functions: Any, counts: dict[str, int]) -> None:
        self._functions, self._counts = functions, counts

    def __getattr__(self, name: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            whole = max(arg.numel() for arg in args if isinstance(arg, Tensor))
            self._counts[name] = self._counts.get(name, 0) + whole
            return getattr(self._functions, name)(*args, **kwargs)

        return counted


@pytest.mark.parametrize("sequence", [False, True])
def test_a_block_sends_what_the_formula_says(sequence: bool, monkeypatch: pytest.MonkeyPatch):
    """Twice the activations forward and twice backward, as all-reduces; or those in two halves."""
    found = []
    for layers in (1, 2):
        counts: dict[str, int] = {}
        monkeypatch.setattr(conjugate, "api", Counting(functions, counts))
        shape = TransformerShape(vocabulary=16, context=16, width=32, heads=8, layers=layers)

        def main(group: LocalGroup, shape: TransformerShape = shape) -> None:
            model = tensor_parallel(transformer(shape), group, sequence=sequence)
            train(model, tokens, 1)

        run_threads(main, 2)
        monkeypatch.undo()
        found.append(counts)
    more = {name: (found[1][name] - found[0][name]) // 2 for name in found[1]}  # of 2 ranks
    activations = 4 * 16 * 32
    if sequence:
        # In a block two norms of two vectors, and two biases, are added up besides.
        assert more.pop("all_reduce") == 6 * 32
        assert more == {
            "all_gather_single": 4 * activations, "reduce_scatter_single": 4 * activations,
        }  # fmt: skip
    else:
        assert more == {"all_reduce": 4 * activations}


def test_a_rank_holds_its_share_of_the_parameters():
    whole = sum(param.numel() for param in transformer().parameters())

    def main(group: LocalGroup) -> int:
        model = tensor_parallel(transformer(), group)
        return sum(param.numel() for param in model.parameters())

    (held, *others) = run_threads(main, 8)
    assert set(others) == {held}
    # Whole are tokens and positions, the norms, and the biases that are added after a sum.
    width, layers = SHAPE.width, SHAPE.layers
    kept = (
        (SHAPE.vocabulary + SHAPE.context) * width + (4 * layers + 2) * width + 2 * layers * width
    )
    assert held == kept + (whole - kept) // 8


# --- what cannot be split -------------------------------------------------------------


@pytest.mark.parametrize(
    "model, world_size, message",
    [
        (
            partial(Transformer, TransformerShape(16, 8, 24, 6, 1)),
            4,
            "heads do not divide.* of 4, got 6",
        ),
        (partial(mlp, 2, 15, 0), 2, "width of the layer's output does not.* of 2, got 15"),
        (lambda: nn.Sequential(*mlp(2, 8, 0), *mlp(2, 9, 0)), 2, "width.* of 2, got 9"),
        (partial(nn.Linear, 3, 3), 2, "cannot be split.*got .*Linear"),
    ],
)
def test_what_cannot_be_split_is_refused_on_all_ranks(
    model: Callable[[], nn.Module], world_size: int, message: str
):
    def main(group: LocalGroup) -> None:
        refused = model()
        before = str(refused)
        with pytest.raises(ArgumentError, match=message):
            tensor_parallel(refused, group)
        assert str(refused) == before

    run_threads(main, world_size)
