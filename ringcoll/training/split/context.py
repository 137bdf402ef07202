"""Ring attention: each rank keeps a share of the sequences.

Problem: attention looks from every token at every token before it, so
activations grow with the length of the sequence. Each rank keeps the queries of its own tokens.
Keys and values of all tokens come by: in each of k steps a rank works on the keys and values that
it has, while they are on their way to the next rank::

    step    0     1     2     3
    rank 0  kv 0  kv 3  kv 2  kv 1
    rank 1  kv 1  kv 0  kv 3  kv 2
    rank 2  kv 2  kv 1  kv 0  kv 3
    rank 3  kv 3  kv 2  kv 1  kv 0

The softmax is put together step by step: with ``m`` the largest score so far, ``s`` the sum of
``exp(score - m)``, and ``o`` the sum of ``exp(score - m) v``, a step with a larger score scales
``s`` and ``o`` down. Backward goes round once more, with gradients of the keys and values
travelling beside them, and is at home after k steps. It needs ``m + log s`` only, and computes the
scores anew.

With a causal mask a rank that holds the last tokens would have all the work, and the first one
next to nothing. So the sequence is cut into 2k pieces, and rank r holds pieces r and 2k - 1 - r
(`places`): each rank then has as many pairs of tokens as any other in every step but its own.

A rank sends 2 (k - 1) / k of all keys and values forward, and twice as much backward.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", ICLR
2024; Dao et al., "FlashAttention", NeurIPS 2022 (the softmax in steps, and its backward); Brandon
et al., "Striped Attention", 2023 (the imbalance of causal masks).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.group import Work
from ringcoll.training.arguments import require
from ringcoll.training.models import Attention, Transformer


def places(tokens: int, rank: int, world_size: int) -> Tensor:
    """Positions of the tokens that a rank holds: pieces r and 2k - 1 - r of 2k.

    If 2k does not divide the tokens, `ArgumentError` is raised.

    >>> [places(8, rank, 2).tolist() for rank in range(2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    require(tokens % (2 * world_size) == 0, "tokens",
            "the tokens do not divide evenly into two pieces a rank",
            f"a multiple of {2 * world_size}", tokens, rank)  # fmt: skip
    pieces = torch.arange(tokens, device="cpu").chunk(2 * world_size)
    return torch.cat([pieces[rank], pieces[2 * world_size - 1 - rank]])


class _Ring:
    """Sends a tensor to the next rank, and receives the one of the rank before."""

    def __init__(self, group: Any) -> None:
        member = as_group(group)
        self.group, self.rank, self.size = group, member.rank(), member.size()

    def pass_on(self, tensor: Tensor) -> tuple[Tensor, Work]:
        """Start a step; the tensor that arrives, and the work to wait for."""
        arriving = torch.empty_like(tensor)
        outgoing, incoming = [0] * self.size, [0] * self.size
        outgoing[(self.rank + 1) % self.size] = incoming[self.rank - 1] = len(tensor)
        work = api.all_to_all_single(arriving, tensor, incoming, outgoing, self.group, True)
        assert work is not None
        return arriving, work

    def is_hidden(self, step: int, tokens: int) -> Tensor:
        """Which of the keys that a rank has in a step are later than its queries."""
        source = (self.rank - step) % self.size
        queries = places(tokens * self.size, self.rank, self.size)
        keys = places(tokens * self.size, source, self.size)
        return queries[:, None] < keys[None, :]


class _RingAttention(Function):
    """Causal attention, forward and backward, round a ring."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, group: Any) -> Tensor:
        ring, scale = _Ring(group), queries.shape[-1] ** -0.5
        travelling = torch.stack([keys, values])
        shape = queries.shape[:-1]
        largest = queries.new_full(shape, float("-inf"))
        sums, output = queries.new_zeros(shape), torch.zeros_like(queries)
        for step in range(ring.size):
            is_last = step == ring.size - 1
            arriving, work = (travelling, None) if is_last else ring.pass_on(travelling)
            scores = queries @ travelling[0].transpose(-2, -1) * scale
            scores = scores.masked_fill(ring.is_hidden(step, shape[-1]), float("-inf"))
            before, largest = largest, torch.maximum(largest, scores.amax(-1))
            fading, powers = (before - largest).exp(), (scores - largest[..., None]).exp()
            sums = sums * fading + powers.sum(-1)
            output = output * fading[..., None] + powers @ travelling[1]
            if work is not None:
                work.wait()
            travelling = arriving
        output = output / sums[..., None]
        ctx.group = group
        ctx.save_for_backward(queries, keys, values, output, largest + sums.log())
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, output, log_sums = ctx.saved_tensors
        (grad,) = grads
        ring, scale = _Ring(ctx.group), queries.shape[-1] ** -0.5
        # The derivative of the softmax: a score's gradient is its share times what it has above
        # the mean of its row, which is the product of the output and its gradient.
        means = (grad * output).sum(-1, keepdim=True)
        grad_queries = torch.zeros_like(queries)
        travelling = torch.stack([keys, values])
        grads_of = torch.zeros_like(travelling)  # those of the keys and values that are here
        for step in range(ring.size):
            arriving, work = ring.pass_on(travelling)
            scores = queries @ travelling[0].transpose(-2, -1) * scale
            shares = (scores - log_sums[..., None]).exp()
            shares = shares.masked_fill(ring.is_hidden(step, queries.shape[-2]), 0.0)
            grad_scores = shares * (grad @ travelling[1].transpose(-2, -1) - means) * scale
            grad_queries += grad_scores @ travelling[0]
            grads_of[0] += grad_scores.transpose(-2, -1) @ queries
            grads_of[1] += shares.transpose(-2, -1) @ grad
            grads_arriving, grads_work = ring.pass_on(grads_of)
            work.wait()
            grads_work.wait()
            travelling, grads_of = arriving, grads_arriving
        return grad_queries, grads_of[0], grads_of[1], None


def ring_attention(queries: Tensor, keys: Tensor, values: Tensor, group: Any = None) -> Tensor:
    """Causal attention over a sequence of which each rank holds `places`.

    Queries, keys and values are (batch, heads, tokens / k, width of a head): those of this rank's
    tokens. The result is that of `causal_attention` for them.
    """
    output: Tensor = _RingAttention.apply(queries, keys, values, group)  # type: ignore[no-untyped-call]
    return output


def context_parallel(model: Transformer, group: Any = None) -> Transformer:
    """Let each rank of a group run a transformer on its `places` of the sequences.

    Every rank holds the whole model; the average of the ranks' losses is the loss, so gradients
    are averaged over the group as in data-parallel training. The model is changed in place; its
    context is the length of all sequences.
    """
    member = as_group(group)
    model.embedding.places = places(model.shape.context, member.rank(), member.size())
    for module in model.modules():
        if isinstance(module, Attention):
            module.attention = partial(ring_attention, group=group)
    return model
