"""Tensor-parallel training on the public functions: each layer is split over the ranks.

Problem: a layer is too large for one rank. Its matrix is split, each rank multiplies by its piece,
and a collective puts the results together. With ``y = x W^T`` there are two ways to split:

====== ==================== ============================= =====================================
split  rank r holds         forward                       backward
====== ==================== ============================= =====================================
column rows r of W          ``y_r = x W_r^T``             ``dx = sum_r dy_r W_r``: all-reduce
row    columns r of W       ``y = sum_r x_r W_r^T``:      ``dx_r = dy W_r``
                            all-reduce
====== ==================== ============================= =====================================

A column layer followed by a row layer needs no collective between them, as what one leaves split
the other one takes split. So a perceptron, and attention by heads, cost one all-reduce forward
and one backward, each of the layer's activations: batch x tokens x width numbers. The collectives
between the layers are in `ringcoll.training.split.conjugate`.

*Sequence parallel*: between the split layers (layer norms, the ways around) every rank would do
the same work on the same activations. Instead each rank keeps the activations of its share of the
tokens; `gathered_to_add` enters a split layer in place of `copied`, and `reduced_and_split` leaves
it in place of `reduced`. As many bytes travel, and 1/k of those activations is kept.

*Data, pipeline and tensor parallel at once*: a model is too large for one rank, and there is more
data than one copy of the model can take. The ranks stand in a box of data x pipeline x tensor, a
`Mesh`. A rank's lines along the three axes are its groups::

    2 x 2 x 2                 tensor: the ranks that share each layer
     data 0     data 1        pipeline: the ranks that hold the stages, one behind the other
    0 1  2 3   4 5  6 7       data: the ranks that hold the same parameters
    stage:0  1    0    1

Ranks beside each other share a tensor axis: that axis sends most, and with k ranks on a host it
stays inside the host. Each axis is a system of its own, unchanged: layers are split by
`tensor_parallel`, the split model is cut into `stages` that a `Pipeline` runs, and gradients are
averaged along the data axis. Embedding and scores share one matrix: its gradients of the first and
the last stage are added up.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", 2019; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models", MLSys 2023 (sequence parallel); Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC 2021 (the mesh).

Attention over a split sequence: attention looks from every token at every token before it, so
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

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional

from ringcoll.collectives import as_group
from ringcoll.collectives import functions as api
from ringcoll.errors import ArgumentError
from ringcoll.group import Work
from ringcoll.training.data.parallel import average_gradients
from ringcoll.training.model_on_ranks import require
from ringcoll.training.pipeline.pipeline_schedule import SCHEDULES
from ringcoll.training.pipeline.runner import Pipeline
from ringcoll.training.split import conjugate
from ringcoll.training.task import Attention, Perceptron, Transformer, stages
from ringcoll.watch import phase

_Collective = Callable[[Tensor], Tensor]  # a pair of `conjugate`, on the ranks of a group


def shard_of(tensor: Tensor, group: Any, dim: int, what: str) -> Tensor:
    """Copy of this rank's piece of a tensor; ``what`` is the dimension's name for the error."""
    member = as_group(group)
    require(tensor.shape[dim] % member.size() == 0, "model",
            f"the {what} does not divide evenly among the ranks",
            f"a multiple of {member.size()}", tensor.shape[dim], member.rank())  # fmt: skip
    piece = conjugate.slice_of(tensor.detach(), group, dim)
    return piece.clone(memory_format=torch.contiguous_format)


class ColumnLinear(nn.Module):
    """Rows r of a linear layer's matrix; the output is split. Its input has been `copied`."""

    def __init__(self, whole: nn.Linear, group: Any) -> None:
        super().__init__()
        width = "width of the layer's output"
        self.weight = nn.Parameter(shard_of(whole.weight, group, 0, width))
        self.bias = None
        if whole.bias is not None:
            self.bias = nn.Parameter(shard_of(whole.bias, group, 0, width))

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs / k)."""
        return functional.linear(inputs, self.weight, self.bias)


class RowLinear(nn.Module):
    """Columns r of a linear layer's matrix; the input is split, and ``leave`` adds outputs up.

    With ``share`` the ranks add the bias to different tokens, so that its gradients are added up.
    """

    def __init__(
        self, whole: nn.Linear, group: Any, leave: _Collective, *, share: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(shard_of(whole.weight, group, 1, "width of the layer's input"))
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self._leave, self._group, self._share = leave, group, share

    def forward(self, inputs: Tensor) -> Tensor:
        """(..., inputs / k) to (..., outputs)."""
        bias = conjugate.copied(self.bias, self._group) if self._share else self.bias
        return self._leave(functional.linear(inputs, self.weight)) + bias


class SharedNorm(nn.Module):
    """A layer norm of which each rank applies a copy to its own tokens."""

    def __init__(self, whole: nn.LayerNorm, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().clone())
        self.bias = nn.Parameter(whole.bias.detach().clone())
        self._eps, self._group = whole.eps, group

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, tokens / k, width) to the same."""
        weight, bias = (conjugate.copied(item, self._group) for item in (self.weight, self.bias))
        return functional.layer_norm(inputs, weight.shape, weight, bias, self._eps)


def _local(tokens: Tensor, held: int, group: Any) -> tuple[Tensor, Tensor]:
    """Places of tokens in this rank's part of a vocabulary, 0 for others; and which are in it."""
    local = tokens - as_group(group).rank() * held
    is_mine = (local >= 0) & (local < held)
    return local.where(is_mine, 0), is_mine


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank holds the vectors of a part of the vocabulary."""

    def __init__(self, whole: nn.Embedding, group: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(shard_of(whole.weight, group, 0, "vocabulary"))
        self._group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """(...) to (..., width): this rank's vectors, zeros for other tokens, added up."""
        local, is_mine = _local(tokens, len(self.weight), self._group)
        vectors = functional.embedding(local, self.weight)
        return conjugate.reduced(vectors * is_mine[..., None], self._group)


def _before(module: nn.Module, function: _Collective) -> None:
    module.register_forward_pre_hook(lambda _, inputs: (function(inputs[0]),))


def tensor_parallel(model: nn.Module, group: Any = None, *, sequence: bool = False) -> nn.Module:
    """Split the layers of a model, in place, and return it: this rank keeps its pieces.

    If the ranks do not divide the heads, a width, or the vocabulary, `ArgumentError` is raised.

    Parameters
    ----------
    model
        A `Transformer`, of which attention is split by heads, perceptrons by width, embedding
        and scores by vocabulary: it returns this rank's scores, for `vocabulary_loss`. Or an
        ``nn.Sequential``, of which linear layers are split in turn by column and by row; a last
        one that is alone stays whole. All ranks give the same weights.
    sequence
        Whether activations between the split layers are split by tokens; for a `Transformer`.
    """
    size = as_group(group).size()
    enter: _Collective = partial(conjugate.copied, group=group)
    leave: _Collective = partial(conjugate.reduced, group=group)
    if isinstance(model, nn.Sequential):
        children = model.named_children()
        linear = [(name, layer) for name, layer in children if isinstance(layer, nn.Linear)]
        pieces: dict[str, nn.Module] = {}  # all of them first: an error leaves the model as it is
        for (wide, column), (narrow, row) in zip(linear[::2], linear[1::2], strict=False):
            pieces[wide] = ColumnLinear(column, group)
            pieces[narrow] = RowLinear(row, group, leave)
            _before(pieces[wide], enter)
        for name, layer in pieces.items():
            setattr(model, name, layer)
        return model
    if not isinstance(model, Transformer):
        raise ArgumentError("cannot be split", argument="model",
                            expected="a Transformer or nn.Sequential", got=type(model))  # fmt: skip
    require(model.shape.heads % size == 0, "model",
            "the heads do not divide evenly among the ranks",
            f"a multiple of {size}", model.shape.heads, as_group(group).rank())  # fmt: skip
    if sequence:
        enter = partial(conjugate.gathered_to_add, group=group)
        leave = partial(conjugate.reduced_and_split, group=group)
    tokens = VocabularyEmbedding(model.embedding.tokens, group)
    scores = ColumnLinear(model.head.scores, group)
    scores.weight = tokens.weight  # tied, as before
    model.embedding.tokens, model.head.scores = tokens, scores  # type: ignore[assignment]
    _before(scores, enter)
    if sequence:
        model.embedding.register_forward_hook(
            lambda _, inputs, output: conjugate.split(output, group, 1)
        )
    for module in list(model.modules()):
        if isinstance(module, Attention):
            for name in ("query", "key", "value"):
                setattr(module, name, ColumnLinear(getattr(module, name), group))
            module.output = RowLinear(module.output, group, leave, share=sequence)  # type: ignore[assignment]
            _before(module, enter)
        elif isinstance(module, Perceptron):
            module.widen = ColumnLinear(module.widen, group)  # type: ignore[assignment]
            module.narrow = RowLinear(module.narrow, group, leave, share=sequence)  # type: ignore[assignment]
            _before(module, enter)
        for name, child in list(module.named_children()):
            if sequence and isinstance(child, nn.LayerNorm):
                setattr(module, name, SharedNorm(child, group))
    return model


class _VocabularyLoss(Function):
    """Cross-entropy of scores that are split by vocabulary, (rows, vocabulary / k)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, group: Any) -> Tensor:
        largest = scores.amax(-1)
        api.all_reduce(largest, dist.ReduceOp.MAX, group)
        powers = (scores - largest[:, None]).exp()
        local, is_mine = _local(targets, scores.shape[-1], group)
        target_scores = scores.gather(1, local[:, None])[:, 0] * is_mine
        sums = torch.stack([powers.sum(-1), target_scores])
        api.all_reduce(sums, group=group)
        ctx.save_for_backward(powers / sums[0][:, None], local, is_mine)
        return (sums[0].log() + largest - sums[1]).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        shares, local, is_mine = ctx.saved_tensors
        grad = shares.clone()  # softmax, minus one at the target
        grad[torch.arange(len(local), device=local.device), local] -= is_mine.to(grad.dtype)
        return grad * (grads[0] / len(local)), None, None


def vocabulary_loss(scores: Tensor, targets: Tensor, group: Any = None) -> Tensor:
    """Mean cross-entropy; no rank ever holds all scores.

    Scores are (..., vocabulary / k), this rank's part; targets are (...), tokens of the whole
    vocabulary. Two all-reduces: of the largest score of each token, and of two sums a token.
    """
    flat = scores.flatten(0, -2)
    loss: Tensor = _VocabularyLoss.apply(flat, targets.flatten(), group)  # type: ignore[no-untyped-call]
    return loss


AXES = ("data", "pipeline", "tensor")
_USES = {
    "data": "all-reduce of gradients, and of the loss",
    "pipeline": "messages of activations and their gradients, broadcast of the loss",
    "tensor": "all-reduce of activations forward and backward, in each layer",
}


class Mesh:
    """The groups of one rank in a box of data x pipeline x tensor ranks.

    ``sizes`` and ``place`` have the number of ranks, and the place of this rank, by the name of the
    axis; ``groups`` has the group of the ranks along each axis through this rank.

    Parameters
    ----------
    data, pipeline, tensor
        Number of ranks along each axis. Their product is the size of the default group, of which
        all ranks make a mesh alike; otherwise `ArgumentError` is raised.
    backend
        Backend of the groups; that of the default group if ``None``.
    """

    def __init__(
        self, data: int, pipeline: int, tensor: int, *, backend: str | None = None
    ) -> None:
        self.sizes = dict(zip(AXES, (data, pipeline, tensor), strict=True))
        world_size = dist.get_world_size()
        require(data * pipeline * tensor == world_size, "data, pipeline, tensor",
                "the mesh has another number of places than there are ranks",
                f"a product of {world_size}", f"{data} x {pipeline} x {tensor}",
                dist.get_rank())  # fmt: skip
        box = torch.arange(world_size, device="cpu").view(data, pipeline, tensor)
        place = (box == dist.get_rank()).nonzero()[0].tolist()
        self.place = dict(zip(AXES, place, strict=True))
        self.groups: dict[str, Any] = {}
        self.lines: dict[str, list[list[int]]] = {}
        for dim, axis in enumerate(AXES):  # all ranks make all groups, in the same order
            self.lines[axis] = box.movedim(dim, -1).flatten(0, 1).tolist()
            for line in self.lines[axis]:
                group = dist.new_group(line, backend=backend)
                if dist.get_rank() in line:
                    self.groups[axis] = group

    def table(self) -> str:
        """Which collectives run in which groups, in words."""
        lines = [
            (axis, "  ".join(" ".join(map(str, line)) for line in self.lines[axis]), _USES[axis])
            for axis in AXES
        ]
        widths = [max(len(row[column]) for row in lines) for column in range(2)]
        return "\n".join(
            f"{axis:{widths[0]}}  {ranks:{widths[1]}}  {use}" for axis, ranks, use in lines
        )

    def close(self) -> None:
        """Destroy the groups."""
        for group in self.groups.values():
            dist.destroy_process_group(group)


class ParallelTransformer:
    """A rank's share of a transformer that is trained on a mesh.

    With eight ranks::

        mesh = Mesh(2, 2, 2)
        trained = ParallelTransformer(Transformer(shape), mesh)
        optimizer = torch.optim.AdamW(trained.params)
        for inputs, targets in batches:  # the same on all ranks
            optimizer.zero_grad()
            loss = trained.step(inputs, targets)
            optimizer.step()

    Parameters
    ----------
    model
        The whole model, the same on all ranks; it is split in place.
    num_microbatches
        Micro-batches of a step, on each place of the data axis.
    schedule
        Name of the pipeline's schedule, one of `SCHEDULES`. With ``"interleaved"`` a rank has two
        stages, so that the transformer has at least two blocks for each rank of the pipeline axis.
    sequence
        As for `tensor_parallel`.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        *,
        num_microbatches: int = 4,
        schedule: str = "1f1b",
        sequence: bool = False,
    ) -> None:
        self.model, self.mesh = model, mesh
        require(schedule in SCHEDULES, "schedule", "there is no such schedule",
                ", ".join(SCHEDULES), schedule, dist.get_rank())  # fmt: skip
        size, place = mesh.sizes["pipeline"], mesh.place["pipeline"]
        plan = SCHEDULES[schedule](size, num_microbatches)
        tensor_parallel(model, mesh.groups["tensor"], sequence=sequence)
        self.stages = stages(model, plan.num_stages)[place::size]
        self.params = [param for stage in self.stages for param in stage.parameters()]
        self.pipeline = Pipeline(
            self.stages,
            partial(vocabulary_loss, group=mesh.groups["tensor"]),
            plan,
            mesh.groups["pipeline"],
            tied=model.head.scores.weight,
        )

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradients of a batch; an optimizer's step on ``params`` follows.

        The batch is that of all ranks, (batch, tokens); each place of the data axis takes a share,
        and `ArgumentError` is raised if there is none. The loss is the mean over the whole batch,
        the same on all ranks.
        """
        size, place = self.mesh.sizes["data"], self.mesh.place["data"]
        require(len(inputs) % size == 0, "inputs", "the data axis does not divide the batch",
                f"a multiple of {size}", len(inputs), dist.get_rank())  # fmt: skip
        loss = self.pipeline.step(inputs.chunk(size)[place], targets.chunk(size)[place])
        with phase("average"):
            average_gradients(self.params, self.mesh.groups["data"])
            api.all_reduce(loss, dist.ReduceOp.AVG, self.mesh.groups["data"])
        return loss


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
