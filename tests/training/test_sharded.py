"""The sharded optimizer is AdamW on one process, and holds what the formulas say."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from ringcoll import run_threads, testing
from ringcoll.errors import ArgumentError, BackwardError, MismatchError
from ringcoll.runtime.collectives import functions as api
from ringcoll.training import (
    ModelStates,
    ShardedAdamW,
    Transformer,
    TransformerShape,
    mlp,
    model_state_bytes,
)
from tests.programs import training
from tests.programs.sharded import (
    BUCKET_BYTES,
    KINDS,
    OPTIONS,
    STEPS,
    Loss,
    on_process,
    params_of,
    perceptron,
    perceptron_loss,
    train,
    transformer,
    transformer_loss,
)

STAGES = (1, 2, 3)
FEW = 5  # steps, where the first test has 20

# All but the case that takes longest, and says nothing that the others do not say.
CASES = [
    case
    for case in product(("mlp", "transformer"), (1, 2, 3, 4, 8), (None, 0.05))
    if case != ("transformer", 8, None)
]

# A sum over ranks rounds otherwise than a sum over samples: some 1e-16 of a gradient, and a step
# changes a parameter by at most lr * error / eps = 1e-12 more.
CLOSE = 1e-10


def alone(
    model: nn.Module, loss: Loss, steps: int = FEW, max_norm: float | None = None
) -> tuple[dict[str, Tensor], list[float]]:
    """Train on one process, on the whole batch; parameters, and norms of the gradients."""
    model, norms = copy.deepcopy(model), []
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    for step in range(steps):
        for param in model.parameters():  # what is unused has a gradient of zeros
            param.grad = torch.zeros_like(param) if param.requires_grad else None
        torch.autograd.backward(loss(model, step, 0, 1))
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return {name: param.detach() for name, param in model.named_parameters()}, norms


def model_of(kind: str) -> tuple[nn.Module, Loss]:
    make, loss = KINDS[kind]
    return make(), loss


@cache
def reference(kind: str, max_norm: float | None) -> dict[str, Tensor]:
    """The parameters after 20 steps on one process, which do change, and clip if they have to."""
    expected, norms = alone(*model_of(kind), STEPS, max_norm)
    assert max_norm is None or min(norms) > max_norm
    assert distance(expected, alone(*model_of(kind), 1)[0]) > 0.01
    return expected


def sharded(
    model: nn.Module, loss: Loss, world_size: int, steps: int = FEW, **options: Any
) -> list[dict[str, Tensor]]:
    """Train on threads; parameters of every rank. Rank r begins r apart from rank 0."""
    models = [copy.deepcopy(model) for _ in range(world_size)]
    for rank, other in enumerate(models):
        for param in other.parameters():
            param.data.add_(rank)

    def rank_main(group: Any) -> dict[str, Tensor]:
        mine = models[group.rank()]
        optimizer = ShardedAdamW(mine, group, **{"bucket_bytes": BUCKET_BYTES} | OPTIONS | options)
        assert len(optimizer._buckets) > 2
        train(optimizer, mine, loss, group, range(steps))
        return params_of(optimizer, mine)

    return run_threads(rank_main, world_size)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest element of the parameter."""
    assert ours.keys() == theirs.keys()
    pairs = [(ours[name], theirs[name]) for name in ours]
    return max(
        0.0 if torch.equal(a, b) else float((a - b).abs().max() / b.abs().max()) for a, b in pairs
    )


def same(ranks: Sequence[dict[str, Tensor]]) -> bool:
    return all(torch.equal(rank[name], ranks[0][name]) for rank in ranks for name in ranks[0])


class TestAgainstOneProcess:
    @pytest.mark.slow
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("kind, world_size, max_norm", CASES)
    def test_same_parameters_after_20_steps(self, kind, world_size, stage, max_norm):
        expected = reference(kind, max_norm)
        ranks = sharded(*model_of(kind), world_size, STEPS, stage=stage, max_norm=max_norm)
        assert same(ranks)
        assert distance(ranks[0], expected) <= CLOSE

    @pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
    @pytest.mark.parametrize("stage", STAGES)
    def test_a_bucket_for_each_parameter_and_one_for_all(self, stage, bucket_bytes):
        model = transformer()
        expected, _ = alone(model, transformer_loss)
        models = [copy.deepcopy(model) for _ in range(3)]

        def rank_main(group):
            mine = models[group.rank()]
            options = {"stage": stage, "bucket_bytes": bucket_bytes}
            optimizer = ShardedAdamW(mine, group, **options, **OPTIONS)
            train(optimizer, mine, transformer_loss, group, range(FEW))
            return len(optimizer._buckets), params_of(optimizer, mine)

        results = run_threads(rank_main, 3)
        num_params = len(list(model.parameters()))
        assert results[0][0] == (num_params if bucket_bytes == 1 else 1)
        assert same([params for _, params in results])
        assert distance(results[0][1], expected) <= CLOSE

    def test_a_norm_below_the_limit_changes_nothing(self):
        model = perceptron()
        for stage in STAGES:
            free, limited = (
                sharded(model, perceptron_loss, 2, stage=stage, max_norm=limit)[0]
                for limit in (None, 1e6)
            )
            assert same([free, limited])

    def test_the_norm_is_that_of_torch(self):
        model = perceptron()
        _, norms = alone(model, perceptron_loss, 1, max_norm=1.0)
        models = [copy.deepcopy(model) for _ in range(3)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, max_norm=1.0, bucket_bytes=BUCKET_BYTES)
            assert optimizer.last_norm is None
            train(optimizer, mine, perceptron_loss, group, [0])
            optimizer.gather()
            return optimizer.last_norm

        for norm in run_threads(rank_main, 3):
            assert norm == pytest.approx(norms[0], rel=CLOSE)

    @pytest.mark.parametrize("stage", STAGES)
    def test_accumulation_is_a_larger_batch(self, stage):
        model = transformer()
        expected, _ = alone(model, transformer_loss)
        models = [copy.deepcopy(model) for _ in range(2)]

        def rank_main(group):
            mine, rank = models[group.rank()], group.rank()
            optimizer = ShardedAdamW(mine, group, stage=stage, bucket_bytes=BUCKET_BYTES, **OPTIONS)
            for step in range(FEW):
                with optimizer.no_sync():  # batches 0 and 2 of 6
                    for part in (0, 1):
                        share = transformer_loss(mine, step, 3 * rank + part, 6) / 3
                        torch.autograd.backward(share)
                last = transformer_loss(mine, step, 3 * rank + 2, 6) / 3
                torch.autograd.backward(last)
                optimizer.step()
            return params_of(optimizer, mine)

        ranks = run_threads(rank_main, 2)
        assert same(ranks)
        assert distance(ranks[0], expected) <= CLOSE

    @pytest.mark.parametrize("stage", STAGES)
    def test_schedules_of_the_learning_rate(self, stage):
        model = perceptron()
        reference = copy.deepcopy(model)
        adamw = torch.optim.AdamW(reference.parameters(), **OPTIONS)
        schedule = torch.optim.lr_scheduler.ExponentialLR(adamw, 0.7)
        for step in range(5):
            adamw.zero_grad()
            torch.autograd.backward(perceptron_loss(reference, step, 0, 1))
            adamw.step()
            schedule.step()
        models = [copy.deepcopy(model) for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=stage, bucket_bytes=BUCKET_BYTES, **OPTIONS)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer.adamw, 0.7)
            for step in range(5):
                train(optimizer, mine, perceptron_loss, group, [step])
                schedule.step()
            return params_of(optimizer, mine)

        expected = {name: param.detach() for name, param in reference.named_parameters()}
        assert distance(run_threads(rank_main, 2)[0], expected) <= CLOSE


class Unused(nn.Module):
    """A layer that is used by some, a layer that nobody uses, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes = nn.Linear(6, 5), nn.Linear(5, 5)
        self.never, self.frozen = nn.Linear(3, 4), nn.Linear(5, 5)
        self.norm, self.last = nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, inputs: Tensor, branch: bool) -> Tensor:
        hidden = self.frozen(self.first(inputs).tanh())
        result: Tensor = self.last(self.sometimes(hidden) if branch else hidden)
        return result


class TestUnused:
    @pytest.mark.parametrize("stage", STAGES)
    def test_what_all_ranks_leave_out_has_zeros(self, stage):
        self.check(stage, [False, False, False])

    @pytest.mark.parametrize("stage", [1, 2])
    def test_what_some_ranks_leave_out(self, stage):
        self.check(stage, [True, False, True])

    def check(self, stage: int, branches: list[bool]) -> None:
        torch.manual_seed(0)
        model = Unused().double()

        def of_rank(model: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
            branch = branches[rank]
            return perceptron_loss(Branch(model, branch), step, rank, world_size)

        def of_all(model: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
            return torch.stack([of_rank(model, step, r, 3) for r in range(3)]).mean()

        expected, _ = alone(model, of_all)
        ranks = sharded(model, of_rank, 3, stage=stage, bucket_bytes=200)
        assert same(ranks)
        assert distance(ranks[0], expected) <= CLOSE
        assert torch.equal(ranks[2]["frozen.weight"], model.frozen.weight)

    def test_stage_3_says_that_ranks_call_other_modules(self):
        models = [Unused() for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=3, bucket_bytes=1)
            mine(torch.ones(2, 6), group.rank() == 0).sum().backward()
            optimizer.step()

        with pytest.raises(MismatchError):
            run_threads(rank_main, 2, timeout_s=20.0)


class Branch(nn.Module):
    """A model with its second argument chosen."""

    def __init__(self, model: nn.Module, branch: bool) -> None:
        super().__init__()
        self.model, self.branch = model, branch

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.model(inputs, self.branch)
        return result


class ReadsItsChild(nn.Module):
    """A module that reads the parameters of a module beneath it, and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        attended, _ = self.inner(inputs[:, None], inputs[:, None], inputs[:, None])
        result: Tensor = self.last(attended[:, 0])
        return result


class TestOtherModules:
    @pytest.mark.parametrize("stage", STAGES)
    def test_a_module_that_reads_its_child(self, stage):
        torch.manual_seed(0)
        model = ReadsItsChild().double()
        expected, _ = alone(model, perceptron_loss)
        ranks = sharded(model, perceptron_loss, 2, stage=stage, bucket_bytes=100)
        assert distance(ranks[0], expected) <= CLOSE

    @pytest.mark.parametrize("stage", STAGES)
    def test_layers_that_are_computed_again_in_backward(self, stage):
        model = Recomputed(transformer())
        expected, _ = alone(model, transformer_loss)
        ranks = sharded(model, transformer_loss, 2, stage=stage)
        assert distance(ranks[0], expected) <= CLOSE

    @pytest.mark.parametrize("stage", STAGES)
    def test_a_forward_that_fails_and_forwards_without_gradients(self, stage):
        model = perceptron()
        expected, _ = alone(model, perceptron_loss)
        models = [copy.deepcopy(model) for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=stage, bucket_bytes=BUCKET_BYTES, **OPTIONS)
            for step in range(FEW):
                with pytest.raises(RuntimeError, match="shape"):
                    mine(torch.ones(2, 7, dtype=torch.float64))
                with torch.no_grad():
                    before = perceptron_loss(mine, step, group.rank(), 2)
                after = perceptron_loss(mine, step, group.rank(), 2)
                assert torch.equal(before, after)
                torch.autograd.backward(after)
                optimizer.step()
            return params_of(optimizer, mine)

        assert distance(run_threads(rank_main, 2)[0], expected) <= CLOSE


class Recomputed(nn.Module):
    """A transformer that keeps no activations of its blocks."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        inner: Any = self.model.embedding(tokens)  # type: ignore[operator]
        for block in self.model.blocks:  # type: ignore[union-attr]
            inner = checkpoint(block, inner, use_reentrant=False)
        scores: Tensor = self.model.head(inner)  # type: ignore[operator]
        return scores


class TestMixedPrecision:
    @pytest.mark.parametrize("world_size", [1, 2])
    @pytest.mark.parametrize("stage", STAGES)
    def test_master_copies(self, stage, world_size):
        """Of two numbers there is one sum: the average, in float32, is exact in its bits."""
        model = perceptron().float()
        masters: nn.Module = copy.deepcopy(model)
        adamw = torch.optim.AdamW(masters.parameters(), **OPTIONS)
        for step in range(FEW):
            copies = [copy.deepcopy(masters).bfloat16() for _ in range(world_size)]
            for rank, narrow in enumerate(copies):
                torch.autograd.backward(perceptron_loss(narrow, step, rank, world_size))
            for master, *params in zip(
                masters.parameters(), *(each.parameters() for each in copies), strict=True
            ):
                total = torch.stack([each.grad.float() for each in params]).sum(0)
                master.grad = (total / world_size).bfloat16().float()
            adamw.step()
        models = [copy.deepcopy(model) for _ in range(world_size)]

        def rank_main(group):
            mine = models[group.rank()]
            options = {"stage": stage, "bucket_bytes": BUCKET_BYTES, "mixed": torch.bfloat16}
            optimizer = ShardedAdamW(mine, group, **options, **OPTIONS)
            train(optimizer, mine, perceptron_loss, group, range(FEW))
            return optimizer.state_dict()["parameters"], params_of(optimizer, mine)

        expected = {name: param.detach() for name, param in masters.named_parameters()}
        for own, narrow in run_threads(rank_main, world_size):
            assert same([expected, own])
            assert same([{name: param.bfloat16() for name, param in own.items()}, narrow])


class TestOverlap:
    @pytest.mark.parametrize("stage", STAGES)
    def test_buckets_leave_during_backward(self, stage):
        models = [perceptron() for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=stage, bucket_bytes=1)
            numbers: list[int] = []

            def note(_module: nn.Module, _inputs: object, output: Tensor) -> None:
                output.register_hook(lambda _: numbers.append(optimizer._launched))

            mine[0].register_forward_hook(note)
            train(optimizer, mine, perceptron_loss, group, [0])
            optimizer.gather()
            return numbers, len(optimizer._buckets)

        # Before the gradients of the first layer are there, all others are on their way.
        assert run_threads(rank_main, 2) == [([6], 8)] * 2

    @pytest.mark.parametrize("stage", [1, 2])
    def test_a_layer_waits_for_its_own_parameters_only(self, stage):
        models = [perceptron() for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=stage, bucket_bytes=1)
            train(optimizer, mine, perceptron_loss, group, [0])
            waiting: list[int] = []
            for layer in mine[::2]:
                layer.register_forward_hook(
                    lambda *_: waiting.append(
                        sum(bucket.gathering is not None for bucket in optimizer._buckets)
                    )
                )
            perceptron_loss(mine, 0, 0, 2)
            return waiting

        assert run_threads(rank_main, 2) == [[6, 4, 2, 0]] * 2

    def test_stage_3_gathers_ahead_and_frees(self):
        models = [perceptron() for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=3, bucket_bytes=150)
            whole: list[list[int]] = []

            def note(*_: object) -> None:
                whole.append([i for i, b in enumerate(reversed(optimizer._buckets)) if b.is_whole])

            for layer in mine[::2]:
                layer.register_forward_hook(note)
            for step in range(2):
                whole.append([])
                torch.autograd.backward(perceptron_loss(mine, step, 0, 2))
                note()
                optimizer.step()
                note()
            return whole

        # A layer is a bucket here. In the first forward nothing is known to be next.
        first = [[], [0], [1], [2], [3], [], []]
        second = [[], [0, 1], [1, 2], [2, 3], [2, 3], [], []]
        assert run_threads(rank_main, 2) == [first + second] * 2

    def test_stage_3_frees_what_was_gathered_after_its_backward(self):
        """What backward is done with is in use no more."""
        models = [perceptron() for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=3, bucket_bytes=150)
            torch.autograd.backward(perceptron_loss(mine, 0, 0, 2))
            optimizer.gather()
            with torch.no_grad():
                mine[0](mine[0].weight.new_zeros(1, mine[0].in_features))
            return [i for i, b in enumerate(reversed(optimizer._buckets)) if b.is_whole]

        assert run_threads(rank_main, 2) == [[0]] * 2

    def test_stage_3_shows_nothing_between_steps(self):
        models = [perceptron() for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=3, bucket_bytes=BUCKET_BYTES)
            shapes = [param.shape for param in mine.parameters()]
            for step in range(2):
                assert all(param.isnan().all() for param in mine.parameters())
                assert [param.shape for param in mine.parameters()] == shapes
                train(optimizer, mine, perceptron_loss, group, [step])
            held = optimizer.memory()
            optimizer.gather()
            assert not any(param.isnan().any() for param in mine.parameters())
            assert optimizer.memory().parameters > held.parameters

        run_threads(rank_main, 2)


class TestStates:
    @pytest.mark.slow
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("max_norm", [None, 0.05])
    def test_saved_by_4_ranks_and_continued_by_2(self, stage, max_norm):
        model = transformer()
        expected, _ = alone(model, transformer_loss, max_norm=max_norm)

        def run(world_size, steps, state, **options):
            models = [copy.deepcopy(model) for _ in range(world_size)]

            def rank_main(group):
                mine = models[group.rank()]
                optimizer = ShardedAdamW(
                    mine,
                    group,
                    max_norm=max_norm,
                    **{"bucket_bytes": BUCKET_BYTES} | OPTIONS | options,
                )
                if state is not None:
                    optimizer.load_state_dict(state)
                train(optimizer, mine, transformer_loss, group, steps)
                return optimizer.state_dict(), params_of(optimizer, mine)

            states, params = zip(*run_threads(rank_main, world_size), strict=True)
            assert same(params)
            for kind in ("parameters", "exp_avg", "exp_avg_sq"):
                assert same([each[kind] for each in states])
                assert states[0][kind].keys() == expected.keys()
            assert same([states[0]["parameters"], params[0]])
            return states[0]

        whole = run(4, range(FEW), None, stage=stage)
        assert whole["step"] == FEW
        half = run(4, range(2), None, stage=stage)
        again = run(4, range(2, FEW), half, stage=stage)
        for kind in ("parameters", "exp_avg", "exp_avg_sq"):
            assert same([whole[kind], again[kind]]), "as without a break, to the last bit"
        other = {"stage": stage % 3 + 1, "bucket_bytes": 1500}  # another stage, other buckets
        for options in ({"stage": stage}, other):
            continued = run(2, range(2, FEW), half, **options)
            assert continued["step"] == FEW
            assert distance(continued["parameters"], expected) <= CLOSE
            assert distance(continued["parameters"], whole["parameters"]) <= CLOSE

    def test_a_state_before_the_first_step(self):
        model = perceptron()

        def rank_main(group):
            optimizer = ShardedAdamW(copy.deepcopy(model), group)
            state = optimizer.state_dict()
            optimizer.load_state_dict(state)
            optimizer.gather()
            return state

        for state in run_threads(rank_main, 2):
            assert state["step"] == 0
            assert same([dict(model.named_parameters()), state["parameters"]])
            assert not any(tensor.any() for tensor in state["exp_avg"].values())

    @pytest.mark.parametrize(
        "damage, text",
        [
            (lambda state: state["exp_avg"].pop("0.bias"), "exp_avg, 0.bias: (17,), got nothing"),
            (
                lambda state: state["parameters"].update(more=torch.ones(1)),
                "parameters, more: nothing, got (1,)",
            ),
            (
                lambda state: state["exp_avg_sq"].update({"0.bias": torch.ones(2)}),
                "exp_avg_sq, 0.bias: (17,), got (2,)",
            ),
        ],
    )
    def test_a_state_of_another_model(self, damage, text):
        def rank_main(group):
            optimizer = ShardedAdamW(perceptron(), group)
            state = optimizer.state_dict()
            damage(state)
            optimizer.load_state_dict(state)

        with pytest.raises(ArgumentError, match="argument 'state'") as caught:
            run_threads(rank_main, 1)
        assert text in str(caught.value)


class TestMemory:
    @pytest.mark.slow
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_who_drops_model_and_optimizer_gets_their_memory_back(self, stage):
        """torch's hooks, into which Python's collector does not look, hold neither."""

        def rank_main(group):
            model = mlp(2, 8, seed=0)
            optimizer = ShardedAdamW(model, group, stage=stage, bucket_bytes=1000)
            torch.autograd.backward(model(torch.ones(1, 64)).sum())
            optimizer.step()
            dropped = weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer._buckets[0])
            del model, optimizer
            gc.collect()
            return [each() for each in dropped]

        assert run_threads(rank_main, 2) == [[None] * 3] * 2

    def test_the_formulas_are_those_of_the_paper(self):
        mixed = [model_state_bytes(7, 5, stage, mixed=torch.bfloat16).total for stage in range(4)]
        assert mixed == pytest.approx([7 * each for each in (16, 4 + 12 / 5, 2 + 14 / 5, 16 / 5)])
        plain = [model_state_bytes(7, 5, stage).total for stage in range(4)]
        assert plain == pytest.approx([7 * each for each in (16, 8 + 8 / 5, 4 + 12 / 5, 16 / 5)])
        assert model_state_bytes(1, 1, 0, dtype=torch.float64) == ModelStates(8, 8, 16)

    @pytest.mark.slow
    @pytest.mark.parametrize("mixed", [None, torch.bfloat16])
    @pytest.mark.parametrize("stage", STAGES)
    @pytest.mark.parametrize("kind, world_size", [("mlp", 1), ("mlp", 8), ("transformer", 3)])
    def test_measured_at_real_sizes(self, kind, world_size, stage, mixed):
        shape = TransformerShape(vocabulary=300, context=32, width=96, heads=4, layers=2)
        model = mlp(4, 384, seed=0) if kind == "mlp" else Transformer(shape)
        numel = sum(param.numel() for param in model.parameters())
        expected = model_state_bytes(numel, world_size, stage, mixed=mixed)
        models = [copy.deepcopy(model) for _ in range(world_size)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=stage, bucket_bytes=1 << 18, mixed=mixed)
            for step in range(2):
                dtype = mixed or torch.float32
                inputs = torch.ones(1, 64, dtype=dtype)
                tokens = torch.arange(9).reshape(1, 9) + step
                torch.autograd.backward(mine(inputs if kind == "mlp" else tokens).sum())
                optimizer.finish()
                held = optimizer.memory()
                optimizer.step()
                after = optimizer.memory()
            optimizer.gather()
            return held, after

        for held, after in run_threads(rank_main, world_size):
            assert held.parameters == pytest.approx(expected.parameters, rel=0.02)
            assert held.gradients == pytest.approx(expected.gradients, rel=0.02)
            assert held.optimizer == pytest.approx(expected.optimizer, rel=0.02)
            assert held.total == pytest.approx(expected.total, rel=0.02)
            assert after.gradients == (held.gradients if stage == 1 else 0)
            assert after.optimizer == held.optimizer

    def test_padding_counts(self):
        def rank_main(group):
            model = nn.Linear(2, 1, bias=False)
            optimizer = ShardedAdamW(model, group, stage=1)
            torch.autograd.backward(model(torch.ones(1, 2)).sum())
            optimizer.finish()
            return optimizer.memory()

        # 2 elements in shards of 1 on 3 ranks: 3 elements are held.
        assert run_threads(rank_main, 3)[0] == ModelStates(12, 12, 0)

    def test_few_gradients_are_whole_at_a_time(self):
        model = mlp(20, 16, seed=0)
        models = [copy.deepcopy(model) for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=2, bucket_bytes=1000)
            whole = []
            for param in mine.parameters():
                param.register_post_accumulate_grad_hook(
                    lambda _: whole.append(
                        sum(bucket.grad is not None for bucket in optimizer._buckets)
                    )
                )
            torch.autograd.backward(mine(torch.ones(1, 64)).sum())
            optimizer.step()
            optimizer.gather()
            return max(whole), len(optimizer._buckets)

        assert run_threads(rank_main, 2) == [(3, 19)] * 2

    def test_nothing_keeps_whole_gradients(self):
        models = [mlp(4, 128, seed=0) for _ in range(2)]

        def rank_main(group):
            mine = models[group.rank()]
            optimizer = ShardedAdamW(mine, group, stage=2, bucket_bytes=1 << 14)
            whole: list[StorageWeakRef] = []
            for param in mine.parameters():
                param.register_post_accumulate_grad_hook(
                    lambda param: whole.append(StorageWeakRef(param.grad.untyped_storage()))
                )
            torch.autograd.backward(mine(torch.ones(1, 64)).sum())
            optimizer.finish()
            alive = sum(not storage.expired() for storage in whole)
            optimizer.step()
            optimizer.gather()
            return len(whole), alive

        assert run_threads(rank_main, 2) == [(8, 0)] * 2


class TestErrors:
    @pytest.mark.parametrize(
        "options, text",
        [
            ({"stage": 4}, "rank 1: argument 'stage': cannot be used (expected 1, 2 or 3, got 4)"),
            ({"stage": 0}, "expected 1, 2 or 3, got 0"),
            ({"bucket_bytes": 0}, "argument 'bucket_bytes': cannot be used (expected > 0, got 0)"),
            ({"max_norm": 0.0}, "argument 'max_norm': cannot be used (expected > 0, or None"),
            ({"mixed": torch.int8}, "argument 'mixed': cannot be used (expected a floating-point"),
        ],
    )
    def test_bad_options(self, options, text):
        check_refused(lambda rank: nn.Linear(2, 1), options, text, odd_rank=1)

    def test_nothing_to_train(self):
        text = "argument 'module': cannot be used (expected parameters that need a gradient, got"
        check_refused(lambda rank: nn.ReLU(), {}, text)

    def test_a_parameter_that_is_not_floating_point(self):
        text = "expected a floating-point dtype of parameter weight, got torch.complex64"
        check_refused(lambda rank: nn.Linear(2, 1, dtype=torch.complex64), {}, text)

    def test_models_that_differ_in_number_of_elements(self):
        text = "rank 1 has another module than rank 0 (expected weight: parameter (3, 2)"
        check_refused(lambda rank: nn.Linear(2, 3 + rank), {}, text)

    def test_options_that_adamw_refuses(self):
        def rank_main(group):
            ShardedAdamW(nn.Linear(2, 1), group, lr=-1.0)

        with pytest.raises(ValueError, match="Invalid learning rate"):
            run_threads(rank_main, 2)

    def test_a_gradient_that_is_not_dense(self):
        def rank_main(group):
            model = training.Sparse()
            _optimizer = ShardedAdamW(model, group)
            torch.autograd.backward(model().sum())

        with pytest.raises(ArgumentError, match=r"embedding\.weight is not dense"):
            run_threads(rank_main, 2)

    @pytest.mark.parametrize("stage", STAGES)
    def test_a_second_backward(self, stage):
        def rank_main(group):
            model = nn.Linear(2, 1)
            optimizer = ShardedAdamW(model, group, stage=stage)
            torch.autograd.backward(model(torch.ones(1, 2)).sum())
            with pytest.raises(BackwardError, match=r"call step\(\) after each backward that is"):
                optimizer.no_sync().__enter__()
            with pytest.raises(BackwardError, match=r"a second gradient of .* arrived"):
                torch.autograd.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            torch.autograd.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            optimizer.gather()

        run_threads(rank_main, 2)


def check_refused(
    make: Callable[[int], nn.Module],
    options: dict[str, Any],
    text: str,
    odd_rank: int | None = None,
) -> None:
    """Every rank raises, and the group can be used afterwards: nothing was sent."""

    def rank_main(group: Any) -> str:
        with pytest.raises(ArgumentError) as caught:
            ShardedAdamW(make(group.rank()), group, **options)
        tensor = torch.ones(1)
        api.all_reduce(tensor, group=group)
        assert tensor.item() == group.size()
        return str(caught.value)

    refusals = run_threads(rank_main, 2)
    assert all(
        text in refusal for refusal in (refusals if odd_rank is None else [refusals[odd_rank]])
    )


@pytest.mark.processes
@pytest.mark.parametrize("stage", STAGES)
def test_on_processes_and_the_own_backend(stage):
    expected, _ = alone(transformer(), transformer_loss, STEPS, 0.05)
    ranks = testing.ranks(2).run(on_process, stage, 0.05)
    assert same(ranks)
    assert distance(ranks[0], expected) <= CLOSE
