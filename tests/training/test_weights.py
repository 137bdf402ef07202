"""Weighted averages: ranks with unequal batches get the gradient of the mean loss over all samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ringcoll import run_threads, testing
from ringcoll.errors import ArgumentError, MismatchError
from ringcoll.training import (
    BucketedDataParallel,
    HookOptions,
    ShardedAdamW,
    all_reduce_hook,
    average_gradients,
    check_same,
)
from ringcoll.training.data import buckets
from ringcoll.training.data.averages import Weighing
from tests.cases.effort import effort
from tests.programs import training
from tests.training.reference import far, perceptron, samples

# Samples of each rank, step by step: of 2, 3 and 4 ranks, some without any.
COUNTS: list[list[tuple[int, ...]]] = [
    [(3, 5), (8, 0), (1, 15), (7, 9)],
    [(1, 0, 7), (4, 2, 2), (0, 0, 16), (5, 6, 5)],
    [(3, 0, 1, 4), (1, 2, 3, 2), (0, 1, 7, 8), (4, 4, 4, 4)],
]
TRAINERS = ("per-parameter", "bucketed")


class Bucket:
    """What torch gives to a communication hook."""

    def __init__(self, gradients: Tensor, number: int) -> None:
        self.gradients, self.number = gradients, number

    def buffer(self) -> Tensor:
        return self.gradients

    def index(self) -> int:
        return self.number


def hooked(tensors: Sequence[Tensor], state: HookOptions) -> None:
    """Average tensors as the buckets of one step of DistributedDataParallel."""
    futures = [
        all_reduce_hook(state, Bucket(tensor, number))  # type: ignore[arg-type]
        for number, tensor in enumerate(tensors)
    ]
    for tensor, future in zip(tensors, futures, strict=True):
        assert future.wait() is tensor


def averaged(tensors: Sequence[Tensor], group: Any, **options: Any) -> list[Tensor]:
    """The averages of copies of tensors: of parameters, or of buckets."""
    params = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors]
    for param, tensor in zip(params, tensors, strict=True):
        param.grad = tensor.clone()
    average_gradients(params, group, **options)
    return [param.grad for param in params if param.grad is not None]


def averaged_by_hook(tensors: Sequence[Tensor], group: Any, **options: Any) -> list[Tensor]:
    copies = [tensor.clone() for tensor in tensors]
    hooked(copies, HookOptions(group, **options))
    return copies


WAYS: tuple[Callable[..., list[Tensor]], ...] = (averaged, averaged_by_hook)


class TestAgainstOneProcess:
    @pytest.mark.parametrize("counts", COUNTS)
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_the_mean_over_all_samples(self, trainer: str, counts: list[tuple[int, ...]]) -> None:
        """On k ranks with n samples at most, a gradient of float32 differs from the mean of the inputs by at most
        (n + 1) roundings of a rank's mean, k + 2 of the average, and those of second order."""

        def rows(step: int) -> Tensor:
            total = sum(counts[step])
            return torch.arange(total * 5.0).view(total, 5).mul(step + 1).remainder(97)

        def rank_main(group: Any) -> list[Tensor]:
            linear = nn.Linear(5, 3, bias=False)
            bucketed = BucketedDataParallel(linear, group) if trainer == "bucketed" else None
            grads = []
            for step, numbers in enumerate(counts):
                linear.zero_grad()
                inputs = rows(step).split(numbers)[group.rank()]
                if bucketed is not None:
                    bucketed.weight = len(inputs)
                outputs = (bucketed or linear)(inputs)
                torch.autograd.backward(outputs.sum(1).mean())  # NaN for a rank without samples
                if bucketed is None:
                    average_gradients(linear, group, weight=torch.tensor(len(inputs)))
                else:
                    bucketed.finish()
                assert linear.weight.grad is not None
                grads.append(linear.weight.grad.clone())
            return grads

        unit, world_size = 2.0**-24, len(counts[0])
        expected = [rows(step).double().mean(0).expand(3, 5) for step in range(len(counts))]
        results = run_threads(rank_main, world_size)
        for grads in results:
            for grad, mean, first, numbers in zip(grads, expected, results[0], counts, strict=True):
                bound = (max(numbers) + world_size + 4) * unit * mean  # no input is negative
                assert torch.equal(grad, first)
                assert ((grad.double() - mean).abs() <= bound).all()

    @pytest.mark.parametrize("counts", COUNTS)
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_a_perceptron_of_several_buckets(
        self, trainer: str, counts: list[tuple[int, ...]]
    ) -> None:
        """In float64 to a relative 1e-10 after some steps of AdamW, as all trainers in lock-step."""
        steps = [counts[step % len(counts)] for step in range(8)]

        def train(model: nn.Module, rank: int | None, group: Any) -> nn.Module:
            call = model
            weight = torch.zeros((), dtype=torch.int64)
            if trainer == "bucketed" and rank is not None:
                call = BucketedDataParallel(model, group, bucket_bytes=600, weight=weight)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            if isinstance(call, BucketedDataParallel):
                call.finish_before(optimizer)
            for step, numbers in enumerate(steps):
                inputs, targets = samples(step, sum(numbers))
                if rank is not None:
                    inputs, targets = (each.split(numbers)[rank] for each in (inputs, targets))
                weight.fill_(len(inputs))
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(call(inputs), targets)
                if len(inputs) or step % 2:  # backward may be left out without samples
                    torch.autograd.backward(loss)
                if trainer == "per-parameter" and rank is not None:
                    average_gradients(model, group, weight=len(inputs))
                optimizer.step()
            return model

        def rank_main(group: Any) -> nn.Module:
            model = train(perceptron(), group.rank(), group)
            check_same(model, group)
            return model

        alone = train(perceptron(), None, None)
        for model in run_threads(rank_main, len(counts[0])):
            pairs = zip(model.parameters(), alone.parameters(), strict=True)
            assert far(pairs) < 1e-10

    @pytest.mark.parametrize("counts", COUNTS)
    @pytest.mark.parametrize("stage", [1, 2, 3])
    def test_a_sharded_optimizer(self, stage: int, counts: list[tuple[int, ...]]) -> None:
        """In float64 to a relative 1e-10 after some steps of AdamW, as all trainers in lock-step."""
        steps = [counts[step % len(counts)] for step in range(8)]

        def train(model: nn.Module, rank: int | None, group: Any) -> dict[str, Tensor]:
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
            if rank is not None:
                optimizer = ShardedAdamW(model, group, stage=stage, lr=1e-2, bucket_bytes=600)
            for step, numbers in enumerate(steps):
                inputs, targets = samples(step, sum(numbers))
                if rank is None:
                    optimizer.zero_grad()
                else:
                    inputs, targets = (each.split(numbers)[rank] for each in (inputs, targets))
                    optimizer.weight = len(inputs)
                loss = nn.functional.cross_entropy(model(inputs), targets)  # NaN without samples
                torch.autograd.backward(loss)
                optimizer.step()
            if rank is None:
                return dict(model.named_parameters())
            found: dict[str, Tensor] = optimizer.state_dict()["parameters"]
            return found

        alone = train(perceptron(), None, None)
        for found in run_threads(
            lambda group: train(perceptron(), group.rank(), group), len(counts[0])
        ):
            assert found.keys() == alone.keys()
            assert far((found[name], alone[name]) for name in alone) < 1e-10

    def test_a_refused_weight_can_be_mended(self) -> None:
        def rank_main(group: Any) -> float:
            model = nn.Linear(1, 1, bias=False)
            optimizer = ShardedAdamW(model, group, stage=1, weight=0)
            loss = model(torch.ones(1, 1)).sum()
            with pytest.raises(ArgumentError, match="the ranks cannot be weighed"):
                torch.autograd.backward(loss)
            optimizer.weight = 1 + group.rank()
            optimizer.step()
            return float(optimizer.state_dict()["step"])

        assert run_threads(rank_main, 2) == [1.0, 1.0]

    def test_a_refused_weight_of_buckets_can_be_mended(self) -> None:
        def rank_main(group: Any) -> float:
            model = BucketedDataParallel(nn.Linear(1, 1, bias=False), group, weight=0)
            loss = model(torch.full((1, 1), 4.0 * group.rank())).sum()
            with pytest.raises(ArgumentError, match="the ranks cannot be weighed"):
                torch.autograd.backward(loss)
            model.weight = 1 + 2 * group.rank()
            model.finish()
            grad = next(model.parameters()).grad
            assert grad is not None
            return float(grad)  # (1 * 0 + 3 * 4) / 4

        assert run_threads(rank_main, 2) == [3.0, 3.0]

    @pytest.mark.processes
    def test_inside_distributed_data_parallel(self) -> None:
        counts = [(1, 5), (4, 0), (3, 3)]
        first, second = testing.ranks(2, backend="gloo").run(training.weighted, counts)
        assert all(map(torch.equal, first[:-1], second[:-1]))
        # 40 products are added in a gradient of the first layer, over 6 samples; none is above 10.
        assert (first[0] - first[-1]).abs().max() <= 1000 * 2.0**-53 * 10
        assert first[-1].abs().max() < 10


class TestBound:
    @pytest.mark.slow
    @pytest.mark.parametrize("way", WAYS)
    @effort(30)
    @given(data=st.data())
    def test_of_float32(self, way: Callable[..., list[Tensor]], data: st.DataObject) -> None:
        world_size = data.draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13]))
        weight = st.one_of(st.integers(0, 100), st.floats(0, 1e6))
        weights = data.draw(st.lists(weight, min_size=world_size, max_size=world_size))
        if not sum(weights) > 1e-200:
            weights[-1] = 3
        seed = data.draw(st.integers(0, 1000))

        def grads_of(rank: int) -> list[Tensor]:
            generator = torch.Generator().manual_seed(seed + 7919 * rank)
            return [torch.randn(numel, generator=generator) for numel in (5, 1)]

        def rank_main(group: Any) -> list[Tensor]:
            return way(grads_of(group.rank()), group, weight=weights[group.rank()])

        results = run_threads(rank_main, world_size)
        total, unit = sum(map(Fraction, weights)), Fraction(1, 2**24)
        for number in range(2):
            for index in range((5, 1)[number]):
                terms = [
                    Fraction(own) * Fraction(float(grads_of(rank)[number][index])) / total
                    for rank, own in enumerate(weights)
                ]
                bound = (world_size + 2) * unit * sum(map(abs, terms)) + Fraction(2**-149)
                for result in results:
                    assert torch.equal(result[number], results[0][number])
                    assert abs(Fraction(float(result[number][index])) - sum(terms)) <= bound

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        "options",
        [{}, {"reproducible": "any_world_size"}, {"algorithm": "tree"}, {"algorithm": "ring"}],
    )
    @pytest.mark.parametrize("world_size", [1, 2, 4, 8])
    def test_equal_weights_change_no_bit_where_the_division_is_exact(
        self, way: Callable[..., list[Tensor]], options: dict[str, Any], world_size: int
    ) -> None:
        def rank_main(group: Any) -> tuple[list[Tensor], list[Tensor]]:
            generator = torch.Generator().manual_seed(group.rank())
            tensors = [torch.randn(9, generator=generator), torch.randn(4, generator=generator)]
            return way(tensors, group, weight=7, **options), way(tensors, group, **options)

        for weighted, plain in run_threads(rank_main, world_size):
            assert all(map(torch.equal, weighted, plain))

    @pytest.mark.parametrize("way", WAYS)
    def test_float16_on_the_wire_does_not_overflow(self, way: Callable[..., list[Tensor]]) -> None:
        def rank_main(group: Any) -> float:
            tensor = torch.full((3,), 40000.0 - 64 * group.rank())
            weight = (0, 0, 1, 0)[group.rank()]
            return way([tensor], group, weight=weight, wire_dtype=torch.float16)[0][1].item()

        assert run_threads(rank_main, 4) == [40000.0 - 128] * 4


class TestErrors:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize(
        "weights, sums",
        [
            ((0, 0, 0), "0.0 in sum"),
            ((1, -1, 3), "nan in sum"),
            ((math.nan, 1, 1), "nan in sum"),
            ((1, 1, math.inf), "nan in sum"),
            ((1.5e308, 1.5e308, 1), "inf in sum"),
        ],
    )
    def test_all_ranks_raise(
        self, way: Callable[..., list[Tensor]], weights: tuple[float, ...], sums: str
    ) -> None:
        def rank_main(group: Any) -> tuple[str, bool]:
            own = weights[group.rank()]
            with pytest.raises(
                ArgumentError, match="argument 'weight': the ranks cannot be weighed"
            ) as caught:
                way([torch.ones(3)], group, weight=own)
            assert f"got {float(own)} here" in str(caught.value)
            assert f"rank {group.rank()}: " in str(caught.value)
            (again,) = way([torch.ones(3)], group, weight=2)  # the group is as it was
            return str(caught.value), torch.equal(again, torch.ones(3))

        for text, works in run_threads(rank_main, 3):
            assert sums in text
            assert works

    def test_buckets_raise_in_backward(self) -> None:
        def rank_main(group: Any) -> str:
            model = BucketedDataParallel(nn.Linear(2, 1), group, weight=-group.rank())
            loss = model(torch.ones(1, 2)).sum()
            with pytest.raises(ArgumentError, match="the ranks cannot be weighed") as caught:
                loss.backward()
            return str(caught.value)

        texts = run_threads(rank_main, 2)
        assert "got -0.0 here" in texts[0] or "got 0.0 here" in texts[0]
        assert "got -1.0 here" in texts[1]

    def test_a_weight_on_some_ranks_only(self) -> None:
        def rank_main(group: Any) -> None:
            weight = None if group.rank() else 1
            with pytest.raises(MismatchError):
                averaged([torch.ones(3)], group, weight=weight)

        run_threads(rank_main, 2)


class TestOneNumberAStep:
    def test_buckets_share_it_and_accumulation_needs_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun = []

        class Counted(Weighing):
            def __init__(self, weight: float | Tensor, group: Any) -> None:
                begun.append((group.rank(), float(weight)))
                super().__init__(weight, group)

        monkeypatch.setattr(buckets, "Weighing", Counted)

        def rank_main(group: Any) -> list[float]:
            model = BucketedDataParallel(
                nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 1, bias=False)), group, bucket_bytes=4
            )  # fmt: skip
            averages = []
            for step in range(2):
                model.weight = step + 1 + 2 * group.rank()
                model.zero_grad()
                with model.no_sync():
                    torch.autograd.backward(model(torch.ones(1, 1)).sum() * 0)
                torch.autograd.backward(model(torch.ones(1, 1)).sum())
                before = list(model.parameters())[1].detach() * (1 + group.rank())
                model.finish()
                averages.append(float(before.sum()))
            return averages

        run_threads(rank_main, 2)
        assert sorted(begun) == [(0, 1.0), (0, 2.0), (1, 3.0), (1, 4.0)]

    def test_hooks_share_it(self) -> None:
        def rank_main(group: Any) -> list[list[float]]:
            weight = torch.tensor(0.0)
            state = HookOptions(group, weight=weight)
            found = []
            for step in range(3):
                weight.fill_((1, 3)[group.rank()] if step < 2 else 1 - group.rank())
                tensors = [
                    torch.full((2,), 8.0 * (group.rank() + step)),
                    torch.ones(1) * group.rank(),
                ]
                hooked(tensors, state)
                assert len(state.of_step) == 1
                found.append([tensor[0].item() for tensor in tensors])
            return found

        assert run_threads(rank_main, 2) == [[[6.0, 0.75], [14.0, 0.75], [16.0, 0.0]]] * 2
