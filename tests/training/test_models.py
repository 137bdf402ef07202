"""The models are what they say, and stages of them are the same models."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from ringcoll.errors import ArgumentError
from ringcoll.training import (
    Transformer,
    TransformerShape,
    causal_attention,
    mlp,
    next_token_loss,
    stages,
)
from ringcoll.training.models import Attention

SHAPE = TransformerShape(vocabulary=11, context=6, width=12, heads=3, layers=5)


def test_the_perceptron_has_as_many_layers_as_asked_for():
    for layers in (1, 2, 4):
        model = mlp(layers, 9, seed=0)
        assert sum(isinstance(module, nn.Linear) for module in model) == layers
        assert model(torch.zeros(2, 64)).shape == (2, 10)
    weights = [mlp(2, 9, seed).state_dict()["0.weight"] for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_attention_is_torch_s():
    torch.manual_seed(0)
    queries, keys, values = torch.randn(3, 2, 4, 7, 5, dtype=torch.float64)
    expected = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
    assert torch.allclose(causal_attention(queries, keys, values), expected, rtol=0, atol=1e-12)


def test_attention_by_heads_is_that_of_torch_s_module():
    torch.manual_seed(0)
    mine = Attention(12, 3).double()
    theirs = nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64)
    parts = (mine.query, mine.key, mine.value)
    state = {
        "in_proj_weight": torch.cat([part.weight for part in parts]),
        "in_proj_bias": torch.cat([part.bias for part in parts]),
        "out_proj.weight": mine.output.weight,
        "out_proj.bias": mine.output.bias,
    }
    theirs.load_state_dict(state)
    inputs = torch.randn(2, 6, 12, dtype=torch.float64)
    mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected, _ = theirs(inputs, inputs, inputs, attn_mask=mask, need_weights=False)
    assert torch.allclose(mine(inputs), expected, rtol=0, atol=1e-12)


def test_a_token_never_sees_a_later_one():
    model = Transformer(SHAPE, seed=1).double()
    tokens = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(2))
    before = model(tokens)
    tokens[:, 4] = (tokens[:, 4] + 1) % 11
    after = model(tokens)
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4:], after[:, 4:])


def test_the_embedding_is_tied():
    model = Transformer(SHAPE)
    assert model.head.scores.weight is model.embedding.tokens.weight
    assert len(list(model.parameters())) == 2 + 16 * SHAPE.layers + 2
    loss = next_token_loss(model(torch.zeros(1, 6, dtype=torch.long)), torch.ones(1, 6).long())
    assert 2 < loss.item() < 3  # about ln(11) at first


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_stages_are_the_model_cut_into_pieces(num_stages: int):
    for model, data, layers in (
        (Transformer(SHAPE), torch.arange(6)[None], 5),
        (mlp(5, 7, seed=0), torch.rand(2, 64), 5),
    ):
        cut = stages(model, num_stages)
        inner = data
        for stage in cut:
            inner = stage(inner)
        assert torch.equal(inner, model(data))
        assert len(cut) == num_stages
        held = {id(param) for stage in cut for param in stage.parameters()}
        assert held == {id(param) for param in model.parameters()}
        for wrong in (0, layers + 1):
            with pytest.raises(ArgumentError, match="'num_stages': a stage would have no layers"):
                stages(model, wrong)


def test_heads_that_do_not_share_the_width():
    with pytest.raises(ArgumentError, match=r"'heads'.*expected a divisor of 64, got 5"):
        TransformerShape(vocabulary=3, heads=5)
