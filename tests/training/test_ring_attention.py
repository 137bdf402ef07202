"""Attention round a ring is attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError
from ringcoll.training import (
    TransformerShape,
    average_gradients,
    causal_attention,
    context_parallel,
    next_token_loss,
    places,
    ring_attention,
)
from ringcoll.training.split.context import _Ring
from tests.training.reference import far, tokens, train, transformer

WORLD_SIZES = (1, 2, 3, 4, 8)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("tokens_each", [2, 6])
def test_it_is_causal_attention_forward_and_backward(tokens_each: int, world_size: int):
    length = tokens_each * world_size
    generator = torch.Generator().manual_seed(length)
    # Large scores: the softmax must not overflow, nor lose a row whose keys come late.
    parts = [20 * torch.randn(2, 3, length, 5, generator=generator).double() for _ in range(3)]
    grad = torch.randn(2, 3, length, 5, generator=generator).double()
    whole = [tensor.clone().requires_grad_() for tensor in parts]
    expected = causal_attention(*whole)
    torch.autograd.backward(expected, grad)

    def main(group: LocalGroup) -> list[tuple[Any, Any]]:
        mine = places(length, group.rank(), world_size)
        held = [tensor[:, :, mine].clone().requires_grad_() for tensor in parts]
        output = ring_attention(held[0], held[1], held[2], group)
        torch.autograd.backward(output, grad[:, :, mine])
        pairs: list[tuple[Any, Any]] = [(output, expected)] + [
            (tensor.grad, reference.grad) for tensor, reference in zip(held, whole, strict=True)
        ]
        return [(tensor.detach(), reference.detach()[:, :, mine]) for tensor, reference in pairs]

    for pairs in run_threads(main, world_size):
        for result, wanted in pairs:
            assert torch.allclose(result, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_the_work_is_shared_evenly(world_size: int):
    """Pairs of tokens that are not hidden, on each rank in each step."""
    tokens_each = 6

    def main(group: LocalGroup) -> list[int]:
        ring = _Ring(group)
        return [int((~ring.is_hidden(step, tokens_each)).sum()) for step in range(world_size)]

    counts = run_threads(main, world_size)
    assert len({tuple(steps[1:]) for steps in counts}) == 1
    assert {count for steps in counts for count in steps[1:]} <= {tokens_each**2 // 2}
    assert {steps[0] for steps in counts} == {tokens_each * (tokens_each + 1) // 2}


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_transformer_on_split_sequences_is_that_of_one_process(world_size: int):
    whole = transformer()
    expected = train(whole, tokens)

    def main(group: LocalGroup) -> tuple[list[float], float]:
        model = context_parallel(transformer(), group)
        mine = places(model.shape.context, group.rank(), world_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(20):
            inputs, targets = tokens(step)
            optimizer.zero_grad()
            loss = next_token_loss(model(inputs[:, mine]), targets[:, mine])
            torch.autograd.backward(loss)
            average_gradients(model, group)
            optimizer.step()
            mean = loss.detach()
            ringcoll.all_reduce(mean, "avg", group)
            losses.append(mean.item())
        return losses, far(zip(model.parameters(), whole.parameters(), strict=True))

    for losses, distance in run_threads(main, world_size):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert distance < 1e-10


def test_tokens_that_do_not_divide_are_refused():
    def main(group: LocalGroup) -> None:
        model = transformer(TransformerShape(vocabulary=16, context=10, width=8, heads=2, layers=1))
        with pytest.raises(ArgumentError, match=r"'tokens'.*expected a multiple of 4, got 10"):
            context_parallel(model, group)

    run_threads(main, 2)
