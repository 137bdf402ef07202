"""A pipeline trains as one process does, with every schedule; what is wrong, all ranks say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ringcoll import LocalGroup, all_reduce, run_threads, testing
from ringcoll.errors import ArgumentError, RingcollError
from ringcoll.training import (
    SCHEDULES,
    Pipeline,
    PipelineSchedule,
    gpipe,
    mlp,
    one_f_one_b,
    peak_activations,
    stages,
    tie,
)
from tests.programs import pipelines
from tests.programs.pipelines import MODELS, Trained, in_pipeline, in_process

STEPS = 3
# float64 rounds to 1.1e-16; some thousand additions in another order lose 1e-13 of the largest.
RELATIVE = 1e-10


def assert_same(ranks: Sequence[Trained], schedule: PipelineSchedule, name: str) -> None:
    """All stages have the gradients and parameters of one process, and all ranks its losses."""
    steps = len(ranks[0].losses)
    alone = in_process(name, schedule.world_size, schedule.num_microbatches, steps)
    for mine in ranks:
        assert mine.losses == ranks[0].losses
        assert mine.losses == pytest.approx(alone.losses, rel=RELATIVE, abs=0)
    for expected, by_rank in (
        (alone.grads, [rank.grads for rank in ranks]),
        (alone.params, [rank.params for rank in ranks]),
    ):
        got = {stage: tensors for rank in by_rank for stage, tensors in rank.items()}
        assert sorted(got) == list(range(schedule.world_size))
        largest = max(float(tensor.abs().max()) for part in expected.values() for tensor in part)
        for stage, tensors in expected.items():
            for wanted, tensor in zip(tensors, got[stage], strict=True):
                assert tensor.shape == wanted.shape
                assert float((tensor - wanted).abs().max()) <= RELATIVE * largest


def train(name: str, schedule: PipelineSchedule, steps: int = STEPS) -> list[Trained]:
    def rank_main(group: LocalGroup) -> Trained:
        return in_pipeline(group, name, schedule, steps)

    return run_threads(rank_main, schedule.world_size)


class TestAgainstOneProcess:
    @pytest.mark.slow
    @pytest.mark.parametrize("world_size", [2, 3, 4, 8])
    @pytest.mark.parametrize("schedule_name", SCHEDULES)
    def test_after_twenty_steps(self, schedule_name, world_size):
        schedule = SCHEDULES[schedule_name](world_size, 4)
        assert_same(train("mlp", schedule, 20), schedule, "mlp")

    def test_a_transformer_after_twenty_steps(self):
        schedule = one_f_one_b(2, 4)
        assert_same(train("transformer", schedule, 20), schedule, "transformer")

    @pytest.mark.slow
    @pytest.mark.parametrize("num_microbatches", [1, 4, 7])
    @pytest.mark.parametrize("world_size", [1, 2, 3, 4])
    @pytest.mark.parametrize("schedule_name", SCHEDULES)
    @pytest.mark.parametrize("name", MODELS)
    def test_same_gradients_and_parameters(self, name, schedule_name, world_size, num_microbatches):
        schedule = SCHEDULES[schedule_name](world_size, num_microbatches)
        ranks = train(name, schedule)
        assert_same(ranks, schedule, name)
        peaks = [rank.report.peak_activations for rank in ranks if rank.report is not None]
        assert peaks == list(peak_activations(schedule))

    @pytest.mark.processes
    def test_on_processes_of_the_own_backend(self):
        cases = [(name, make(2, 4)) for name in MODELS for make in SCHEDULES.values()]
        by_rank = testing.ranks(2).run(pipelines.on_processes, cases, 2)
        for (name, schedule), ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
            assert_same(ranks, schedule, name)


class Scale(nn.Module):
    """Multiplication by a number, in which gradients are known."""

    def __init__(self, value: float, function: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.tensor(value)), function

    def forward(self, inputs: Tensor) -> Any:
        return self.function(self.weight * inputs)


class Constant(Scale):
    """A stage that does not use its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.weight * torch.ones(1)


def gradient(module: Scale) -> float:
    assert module.weight.grad is not None
    return module.weight.grad.item()


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets.view(-1, *[1] * (outputs.ndim - 1))).mean()


def scaled(
    schedule: PipelineSchedule, *batches: tuple[Tensor, Tensor], modules: Any = Scale
) -> list[tuple[list[float], float, Any]]:
    """Losses, the last gradient and the report of each rank that multiplies by rank + 2."""

    def rank_main(group: LocalGroup) -> tuple[list[float], float, Any]:
        module = modules(group.rank() + 2.0)
        pipeline = Pipeline(module, mean, schedule, group)
        losses = []
        for inputs, targets in batches:
            module.zero_grad()
            losses.append(pipeline.step(inputs, targets).item())
        return losses, gradient(module), pipeline.last_step

    return run_threads(rank_main, schedule.world_size)


class TestSteps:
    def test_batches_of_other_shapes_and_dtypes(self):
        batches = [
            (torch.arange(4.0), torch.ones(4)),
            (torch.arange(4.0), torch.ones(4)),
            (torch.arange(12.0).view(6, 2), torch.ones(6)),
            (torch.arange(8.0, dtype=torch.float64), torch.ones(8)),
            (torch.arange(4).to(torch.bfloat16), torch.ones(4)),
        ]
        expected = [6 * float(inputs.double().mean()) for inputs, _ in batches]
        for name in SCHEDULES:
            for losses, _, _ in scaled(SCHEDULES[name](2, 2), *batches):
                assert losses == expected

    def test_gradients_are_added_to_those_before(self):
        def rank_main(group):
            module = Scale(group.rank() + 2.0)
            pipeline = Pipeline(module, mean, gpipe(2, 2), group)
            for _ in range(3):
                pipeline.step(torch.ones(2), torch.ones(2))
            return gradient(module)

        assert run_threads(rank_main, 2) == [3 * 3.0, 3 * 2.0]

    def test_targets_meet_their_inputs(self):
        inputs, targets = torch.arange(4.0), torch.tensor([1.0, 10.0, 100.0, 1000.0])
        for losses, _, _ in scaled(one_f_one_b(2, 4), (inputs, targets)):
            assert losses == [6 * 3210 / 4]

    def test_the_report(self):
        for rank, (_, _, report) in enumerate(
            scaled(one_f_one_b(2, 4), (torch.ones(4), torch.ones(4)))
        ):
            assert report.peak_activations == 2 - rank
            assert 0 < report.waited_s <= report.total_s

    def test_results_and_gradients_that_are_not_contiguous(self):
        def turned(value):
            return Scale(value, lambda x: x.transpose(0, 1).transpose(0, 1)[:, ::2])

        inputs = torch.arange(16.0).view(4, 4)
        for losses, _, _ in scaled(gpipe(2, 2), (inputs, torch.ones(4)), modules=turned):
            assert losses == [6 * float(inputs[:, 0].mean())]

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_frozen_stages(self, name):
        def rank_main(group, frozen):
            module = Scale(group.rank() + 2.0)
            module.requires_grad_(requires_grad=group.rank() not in frozen)
            loss = Pipeline(module, mean, SCHEDULES[name](3, 2), group).step(
                torch.ones(2), torch.ones(2)
            )
            grad = module.weight.grad
            return loss.item(), None if grad is None else grad.item()

        for frozen in ([1], [0], [0, 1]):
            expected = [(24.0, None if r in frozen else 24.0 / (r + 2)) for r in range(3)]
            assert run_threads(partial(rank_main, frozen=frozen), 3) == expected

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_a_stage_that_does_not_use_its_input(self, name):
        def rank_main(group):
            module = (Scale, Constant)[group.rank()](group.rank() + 2.0)
            Pipeline(module, mean, SCHEDULES[name](2, 2), group).step(torch.ones(2), torch.ones(2))
            return gradient(module)

        assert run_threads(rank_main, 2) == [0.0, 1.0]


def caught_on_all(rank_main: Callable[[LocalGroup], object], world_size: int) -> list[Any]:
    """The error of each rank; the group works afterwards."""

    def catching(group: LocalGroup) -> RingcollError:
        with pytest.raises(RingcollError) as caught:
            rank_main(group)
        tensor = torch.ones(1)
        all_reduce(tensor, group=group)
        assert tensor.item() == world_size
        return caught.value

    return run_threads(catching, world_size)


class TestErrors:
    @pytest.mark.parametrize(
        "batch,argument,got",
        [
            ((torch.ones(5), torch.ones(5)), "inputs", 5),
            ((torch.ones(0), torch.ones(0)), "inputs", 0),
            ((torch.ones(()), torch.ones(4)), "inputs", 0),
            ((None, torch.ones(4)), "inputs", 0),
            ((torch.ones(4), torch.ones(8)), "targets", 8),
            ((torch.ones(4), None), "targets", 0),
        ],
        ids=["remainder", "empty", "no dimension", "no inputs", "other targets", "no targets"],
    )
    def test_a_batch_that_cannot_be_used(self, batch, argument, got):
        def rank_main(group):
            pipeline = Pipeline(Scale(2.0), mean, gpipe(2, 4), group)
            good = torch.ones(4), torch.ones(4)
            pipeline.step(*good)
            inputs = batch[0] if group.rank() == 0 else good[0]
            targets = batch[1] if group.rank() == 1 else good[1]
            try:
                pipeline.step(inputs, targets)
            finally:
                assert pipeline.step(*good).item() == 4.0

        for rank, error in enumerate(caught_on_all(rank_main, 2)):
            assert isinstance(error, ArgumentError)
            assert (error.rank, error.argument, error.got) == (rank, argument, got)
            assert "the number of samples is wrong" in str(error)

    @pytest.mark.parametrize(
        "what,stage,got",
        [
            ("stage 1 is no module", [], "expected a module, got a list"),
            ("stage 1 is no module", [Scale(1.0)], "expected a module, got a list"),
            ("stage 1 is no module", None, "expected a module, got a NoneType"),
            ("stage 1 has no layers", nn.ReLU(), "got ReLU()"),
            ("stage 1 has no layers", nn.Sequential(), "got Sequential()"),
        ],
        ids=["empty list", "list", "no stage", "no layers", "empty"],
    )
    def test_a_wrong_stage_on_a_rank(self, what, stage, got):
        def rank_main(group):
            mine = stage if group.rank() == 1 else Scale(2.0)
            Pipeline(mine, mean, gpipe(3, 2), group)

        for rank, error in enumerate(caught_on_all(rank_main, 3)):
            assert isinstance(error, ArgumentError)
            assert error.rank == rank
            assert ("rank 1 cannot take part" in str(error)) == (rank != 1)
            assert f"rank 1: argument 'stage': {what}" in str(error)
            assert got in str(error)

    def test_another_schedule_on_a_rank(self):
        def rank_main(group):
            schedule = (one_f_one_b if group.rank() == 1 else gpipe)(2, 2)
            Pipeline(Scale(2.0), mean, schedule, group)

        for error in caught_on_all(rank_main, 2):
            assert isinstance(error, ArgumentError)
            assert "rank 1 has another schedule than rank 0" in str(error)
            assert str(error.expected).startswith("gpipe stages=2 microbatches=2")
            assert str(error.got).startswith("1f1b stages=2 microbatches=2")

    def test_a_schedule_with_another_number_of_ranks_on_a_rank(self):
        def rank_main(group):
            Pipeline(Scale(2.0), mean, gpipe(2 + group.rank(), 2), group)

        for rank, error in enumerate(caught_on_all(rank_main, 2)):
            assert ("rank 1 cannot take part" in str(error)) == (rank == 0)
            assert "rank 1: argument 'schedule': the number of ranks is wrong" in str(error)

    def test_a_schedule_for_other_ranks(self):
        def rank_main(group):
            Pipeline(Scale(2.0), mean, gpipe(3, 2), group)

        for error in caught_on_all(rank_main, 2):
            assert "the number of ranks is wrong (expected 2, got 3)" in str(error)

    @pytest.mark.parametrize(
        "result,text",
        [
            (lambda x: (x, x), "stage 0 returned no tensor (expected a tensor, got tuple)"),
            (lambda x: x.detach().long(), "the result of stage 0 cannot be sent"),
            (lambda x: x.view(-1, *[1] * 8), "the result of stage 0 cannot be sent"),
            (lambda x: x[: int(x.detach()[0])], "is not as for the micro-batch before"),
        ],
        ids=["no tensor", "integers", "dimensions", "other shape"],
    )
    def test_a_result_that_cannot_be_sent(self, result, text):
        with pytest.raises(ArgumentError) as caught:
            scaled(
                gpipe(2, 2),
                (torch.tensor([0.5, 0.5, 1.0, 1.0]), torch.ones(4)),
                modules=lambda value: Scale(value, result if value == 2.0 else lambda x: x),
            )
        assert text in str(caught.value)
        assert (caught.value.rank, caught.value.argument) == (0, "stage")


class TestTie:
    def test_gradients_are_summed_on_the_ranks_that_hold_a_copy(self):
        held = {0: 1.0, 2: 10.0, 3: None}

        def rank_main(group):
            if group.rank() not in held:
                return None
            param = nn.Parameter(torch.zeros(2, 3))
            value = held[group.rank()]
            param.grad = None if value is None else torch.full((3, 2), value).t()
            tie(param, [3, 0, 2], group)
            assert param.grad is not None
            return param.grad.tolist()

        expected = [[11.0] * 3] * 2
        assert run_threads(rank_main, 4) == [expected, None, expected, expected]

    def test_copies_stay_equal_to_the_last_bit(self):
        def rank_main(group):
            generator = torch.Generator().manual_seed(group.rank())
            param = nn.Parameter(torch.zeros(1000))
            param.grad = torch.randn(1000, generator=generator)
            tie(param, range(3), group)
            return param.grad

        first, *others = run_threads(rank_main, 3)
        assert all(torch.equal(first, other) for other in others)

    def test_a_rank_alone_keeps_its_gradient(self):
        def rank_main(group):
            param = nn.Parameter(torch.zeros(2))
            param.grad = torch.tensor([1.0, 2.0])
            tie(param, [group.rank()], group)
            return param.grad.tolist()

        assert run_threads(rank_main, 2) == [[1.0, 2.0]] * 2

    @pytest.mark.parametrize("ranks", [[1], [], [0, 0], [0, 2], [-1, 0]], ids=str)
    def test_ranks_that_cannot_share(self, ranks):
        def rank_main(group):
            with pytest.raises(ArgumentError, match="cannot share a parameter") as caught:
                tie(nn.Parameter(torch.zeros(1)), ranks, group)
            assert (caught.value.argument, caught.value.got) == ("ranks", ranks)

        run_threads(lambda group: group.rank() or rank_main(group), 2)


class TestMessages:
    def test_sends_are_released_while_the_step_runs(self):
        """At most p activations before the first gradient, and p gradients after the last forward."""
        most: dict[int, int] = {}

        def rank_main(group):
            cut = stages(mlp(4, 3, 0, inputs=2, outputs=2), 4)[group.rank()]
            pipeline = Pipeline(cut, lambda x, _: x.mean(), one_f_one_b(4, 20), group)
            pipeline.step(torch.ones(20, 2), torch.ones(20))  # now the shapes are known
            mailbox: Any = pipeline._mailbox
            post = mailbox.send

            def counting(*arguments):
                post(*arguments)
                most[group.rank()] = max(
                    most.get(group.rank(), 0), sum(map(len, mailbox._pending.values()))
                )

            mailbox.send = counting
            pipeline.step(torch.ones(20, 2), torch.ones(20))

        run_threads(rank_main, 4)
        assert max(most.values()) <= 2 * 4, most
