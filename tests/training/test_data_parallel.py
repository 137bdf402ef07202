"""The trainers give what torch's DistributedDataParallel gives, on real processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringcoll import run_threads, testing
from ringcoll.errors import ArgumentError
from ringcoll.training import BucketedDataParallel, StepReport, assign_buckets, average_gradients
from tests.cases.effort import effort
from tests.programs import training
from tests.programs.training import Setting, Trained

pytestmark = pytest.mark.processes

TRAINERS = ("per-parameter", "bucketed", "hook")
NATIVE = Setting("native")

# Largest parameter of the model, about 1, times the rounding errors of some steps.
FLOAT32 = 1e-6
# Each of 4 steps moves a parameter by 0.1 times 1 + 0.9 + ... gradients, which are below 4
# here; what is sent is rounded to 2^-11 or 2^-8 of it, once a rank at most.
ROUNDED = {torch.float16: 4 * 4 * 2.0**-11, torch.bfloat16: 4 * 4 * 2.0**-8}


def far(one: Trained, other: Trained) -> float:
    pairs = zip(one.params, other.params, strict=True)
    return max(float((mine - theirs).abs().max()) for mine, theirs in pairs)


def alike(ranks: list[Trained]) -> bool:
    return all(
        torch.equal(mine, theirs)
        for rank in ranks[1:]
        for mine, theirs in zip(rank.params, ranks[0].params, strict=True)
    )


class TestAgainstNative:
    @pytest.mark.parametrize("world_size", [2, 3, 4])
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_same_parameters_after_some_steps(self, trainer, world_size):
        native = testing.ranks(world_size, backend="gloo").run(training.train, NATIVE)
        ours = testing.ranks(world_size, backend="gloo").run(training.train, Setting(trainer))
        assert alike(ours)
        # Two numbers have one sum; of more, the order matters in the last bits.
        assert far(ours[0], native[0]) <= (0 if world_size == 2 else FLOAT32)

    @pytest.mark.parametrize("set_to_none", [True, False])
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_accumulation(self, trainer, set_to_none):
        setting = Setting(trainer, accumulate=3, set_to_none=set_to_none)
        native = testing.ranks(2, backend="gloo").run(
            training.train, replace(setting, trainer="native")
        )
        ours = testing.ranks(2, backend="gloo").run(training.train, setting)
        assert alike(ours)
        assert far(ours[0], native[0]) <= FLOAT32  # the sum over parts is rounded, too

    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_parts_that_some_ranks_leave_out(self, trainer):
        setting = Setting(trainer, branches=("left+right", "left", "right"))
        native = testing.ranks(3, backend="gloo").run(
            training.train, replace(setting, trainer="native")
        )
        ours = testing.ranks(3, backend="gloo").run(training.train, setting)
        assert alike(ours)
        assert far(ours[0], native[0]) <= FLOAT32

    @pytest.mark.parametrize("trainer", ["per-parameter", "bucketed"])
    def test_a_part_that_no_rank_uses_gets_zeros(self, trainer):
        for rank in testing.ranks(2, backend="gloo").run(
            training.train, Setting(trainer, branches=("left",))
        ):
            zero = [i for i, grad in enumerate(rank.grads) if grad is not None and not grad.any()]
            assert [rank.params[i].shape for i in zero] == [(5, 7), (2, 2), (2,)]
            assert sum(grad is None for grad in rank.grads) == 2, "what is frozen has none"

    @pytest.mark.parametrize("wire", [None, torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("algorithm", ["ring", "tree", "recursive_doubling", "direct"])
    def test_hook_with_algorithms_and_wire_dtypes(self, algorithm, wire):
        native = testing.ranks(4, backend="gloo").run(training.train, NATIVE)
        ours = testing.ranks(4, backend="gloo").run(
            training.train, Setting("hook", algorithm, wire)
        )
        assert alike(ours)
        difference = far(ours[0], native[0])
        assert difference <= ROUNDED.get(wire, FLOAT32)
        assert (difference > FLOAT32) == (wire is not None), "the wire dtype was not used"

    @pytest.mark.parametrize("trainer", ["per-parameter", "bucketed"])
    @pytest.mark.parametrize("wire", [torch.float16, torch.bfloat16], ids=str)
    def test_wire_dtypes(self, trainer, wire):
        native = testing.ranks(3, backend="gloo").run(training.train, NATIVE)
        ours = testing.ranks(3, backend="gloo").run(training.train, Setting(trainer, "tree", wire))
        assert alike(ours)
        assert FLOAT32 < far(ours[0], native[0]) <= ROUNDED[wire]

    def test_float16_ends_later_than_a_sum_would(self):
        largest = torch.tensor([60000.0, -60000.0])

        def rank_main(group):
            param = torch.nn.Parameter(torch.zeros(2))
            param.grad = largest - 32 * group.rank()
            average_gradients([param], group, wire_dtype=torch.float16)
            return param.grad.tolist()

        averages = run_threads(rank_main, 4)
        assert averages == [averages[0]] * 4
        # float16 has steps of 32 there; one rounding of each rank's part, and of each sum.
        assert torch.allclose(torch.tensor(averages[0]), largest - 48, rtol=0, atol=32 * 3)

    @pytest.mark.parametrize("trainer", ["native", *TRAINERS])
    def test_on_groups_of_the_own_backend(self, trainer):
        native = testing.ranks(2, backend="gloo").run(training.train, NATIVE)
        ours = testing.ranks(2, backend="gloo").run(
            training.train, Setting(trainer, "tree", backend="ringcoll")
        )
        assert alike(ours)
        assert far(ours[0], native[0]) == 0


class TestBuckets:
    def test_all_ranks_send_in_one_order_whatever_they_use(self):
        branches = ("left+right", "right", "left")
        found = testing.ranks(3, backend="gloo").run(training.order_of_buckets, branches)
        assert len({tuple(early + late) for early, late, _ in found}) == 1
        assert all(len(early + late) == buckets for early, late, buckets in found)
        # The last layer is before, the unused one after it: nothing passes that.
        assert [early for early, _, _ in found] == [[3, 15]] * 3

    def test_what_can_leave_early_does(self):
        report = testing.ranks(2, backend="gloo").run(training.train, Setting("bucketed"))[0].report
        assert report is not None
        assert report.nbytes == 4 * (6 * 7 + 7 + 7 * 5 + 5 + 7 * 5 + 5 + 5 + 6 + 5 * 3 + 3)
        assert report.communication_s > 0
        assert report.waited_s > 0
        assert 0 <= report.overlap <= 1
        assert StepReport(8, 2.0, 0.5).overlap == 0.75
        assert StepReport(8, 0.0, 0.5).overlap == 0.0
        assert StepReport(8, 1.0, 1.5).overlap == 0.0

    @effort(200)
    @given(
        lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
        wide=st.sets(st.integers(0, 29)),
        limit=st.integers(1, 300),
        first=st.integers(1, 300),
    )
    def test_every_parameter_is_in_one_bucket(self, lengths, wide, limit, first):
        params = [
            torch.empty(n, dtype=torch.float64 if i in wide else torch.float32)
            for i, n in enumerate(lengths)
        ]
        buckets = assign_buckets(params, limit, first)
        assert [i for bucket in buckets for i in bucket] == list(reversed(range(len(params))))
        for number, bucket in enumerate(buckets):
            wanted = first if number == 0 else limit
            assert bucket, "nothing to send"
            assert len({params[i].dtype for i in bucket}) == 1
            assert len(bucket) == 1 or sum(params[i].nbytes for i in bucket[:-1]) < wanted
            complete = sum(params[i].nbytes for i in bucket) >= wanted
            last = number == len(buckets) - 1
            assert complete or last or params[bucket[0]].dtype != params[bucket[-1] - 1].dtype


@pytest.fixture(scope="module")
def caught():
    return testing.ranks(2, backend="gloo").run(training.bad_calls)


class TestErrors:
    @pytest.mark.parametrize(
        "name,kind,text",
        [
            ("nothing to train", "ArgumentError", "no parameter needs a gradient"),
            ("no bytes", "ArgumentError", "argument 'bucket_bytes': must be positive"),
            ("not dense", "ArgumentError", "embedding.weight is not dense"),
            ("not dense, per parameter", "ArgumentError", "embedding.weight is not dense"),
            ("twice", "BackwardError", "call finish() after each backward, or use no_sync()"),
            ("twice through one graph", "BackwardError", "a second gradient of"),
        ],
    )
    def test_bad_calls(self, caught, name, kind, text):
        for rank in caught:
            assert rank[name].kind == kind
            assert text in rank[name].text

    @pytest.mark.parametrize(
        "what,odd_rank,expected,got",
        [
            ("shape", 1, "1.weight: parameter (1, 3)", "1.weight: parameter (1, 4)"),
            ("dtype", 2, "1.weight: parameter (1, 3) torch.float32", "(1, 3) torch.float64"),
            ("missing", 2, "1.bias: parameter (1,)", "got nothing"),
            ("frozen", 1, "requires_grad=True", "requires_grad=False"),
            ("everything", 1, "0.weight: parameter (3, 2)", "got nothing"),
            ("buffer", 2, "expected nothing", "extra: buffer (2,)"),
        ],
    )
    def test_models_that_differ(self, what, odd_rank, expected, got):
        for caught, works in testing.ranks(3, backend="gloo").run(
            training.differing_models, what, odd_rank
        ):
            assert caught.kind == "ArgumentError"
            assert f"rank {odd_rank} has another module than rank 0" in caught.text
            before, _, after = caught.text.partition(", got ")
            assert expected in before
            assert got.removeprefix("got ") in after
            assert works

    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_a_failing_operation_is_an_error_of_the_step(self, trainer):
        for caught in testing.ranks(2, backend="gloo").run(training.disagreeing, trainer):
            assert caught.kind == ("RuntimeError" if trainer == "hook" else "MismatchError")
            assert "MismatchError" in caught.text or trainer != "hook"
            assert "algorithm ring" in caught.text
            assert "algorithm binomial_tree" in caught.text


@pytest.mark.parametrize("level", [True, "any_world_size"])
def test_gradients_of_reproducible_averages(level):
    """The option reaches the all-reduces: of another order, or exact."""
    contributions = [2.0**30, 1.0, -(2.0**30), 1.0]

    def rank_main(group):
        number = contributions[group.rank()]
        linear = nn.Linear(1, 3, bias=False)
        model = BucketedDataParallel(linear, group, reproducible=level)
        (model(torch.ones(1, 1)).sum() * number).backward()
        model.finish()
        averaged = nn.Parameter(torch.zeros(3))
        averaged.grad = torch.full((3,), number)
        average_gradients([averaged], group, reproducible=level)
        with pytest.raises(ArgumentError, match="ring"):
            average_gradients([averaged], group, algorithm="ring", reproducible=level)
        gradients: list[Any] = [linear.weight.grad, averaged.grad]
        return [gradient.flatten().tolist() for gradient in gradients]

    wanted = [0.25 if level is True else 0.5] * 3
    assert run_threads(rank_main, 4) == [[wanted, wanted]] * 4
