"""Inside torch's DistributedDataParallel nothing is lost either, even when torch moves the buckets."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from ringcoll import run_threads, testing
from ringcoll.errors import ArgumentError
from ringcoll.training import CompressedBuckets, CompressedGradients, Int8
from tests.programs import compressed
from tests.programs.compressed import COMPRESSORS, SHAPES, VECTOR, Averaged, gradients
from tests.programs.out_of_step import flat, initial, loss_on_all

by_compressor = pytest.mark.parametrize("name", COMPRESSORS)
STEPS = 4


def largest_difference(ranks: list[list[Averaged]]) -> float:
    """By how much the averages and the last residuals miss the sum of the gradients, at most."""
    misses = []
    for name in SHAPES:
        wanted = [
            gradients(SHAPES, rank, step)[name] / len(ranks)
            for rank in range(len(ranks))
            for step in range(STEPS)
        ]
        sent = [step.averages[name] for step in ranks[0]]
        kept = [steps[-1].residuals[name] / len(ranks) for steps in ranks]
        missed = torch.stack([*sent, *kept]).sum(0) - torch.stack(wanted).sum(0)
        misses.append(float(missed.abs().max()))
    return max(misses)


@pytest.mark.processes
@pytest.mark.parametrize(
    "name, backend", [("top-k", "gloo"), ("int8", "gloo"), ("PowerSGD", "ringcoll")]
)
def test_what_is_not_sent_is_kept_when_the_buckets_change(name: str, backend: str):
    ranks = testing.ranks(2, backend=backend).run(compressed.average, name, SHAPES, STEPS)
    for steps in ranks:
        layouts = [step.buckets for step in steps]
        assert layouts[0] != layouts[1] == layouts[-1]
        assert sorted(sum(layouts[1], ())) == sorted(SHAPES)
        for step, expected in zip(steps, ranks[0], strict=True):
            assert all(torch.equal(step.averages[name], expected.averages[name]) for name in SHAPES)
            assert 0 < step.report.nbytes < step.report.plain_nbytes
            lost = sum(float(kept.square().sum()) for kept in step.residuals.values())
            assert step.report.lost_norm == pytest.approx(lost**0.5)
    # Rounding errors, of sums of some 10 numbers of about 1.
    assert largest_difference(ranks) < 1e-13 * 10
    for steps in ranks:  # were the residual of the first layout lost, the sums would not fit
        first = steps[0]
        for param in SHAPES:
            steps[-1].residuals[param] -= first.residuals[param]
    assert largest_difference(ranks) > 1e-3


@pytest.mark.processes
@by_compressor
def test_the_hook_averages_as_the_compressor_does(name: str):
    """A bucket of a single vector is what `CompressedGradients` averages: equal to the last bit."""

    def rank_main(group):
        module = compressed.Backwards(VECTOR)
        plain = CompressedGradients(module, partial(COMPRESSORS[name], group=group))
        averages, reports = [], []
        for step in range(STEPS):
            module.zero_grad()
            torch.autograd.backward(module(gradients(VECTOR, group.rank(), step)))
            reports.append(plain.average())
            averages.append(module.only.grad)
        return averages, reports

    simulated = run_threads(rank_main, 2)
    for steps, (averages, reports) in zip(
        testing.ranks(2, backend="gloo").run(compressed.average, name, VECTOR, STEPS),
        simulated,
        strict=True,
    ):
        assert [step.report for step in steps] == reports
        for step, average in zip(steps, averages, strict=True):
            assert torch.equal(step.averages["only"], average)


@pytest.mark.processes
@by_compressor
def test_a_model_learns(name: str):
    assert loss_on_all(flat(initial(0)), 2) > 0.45
    first, second = testing.ranks(2, backend="gloo").run(compressed.learn, name, 150)
    assert torch.equal(first, second)
    assert loss_on_all(first, 2) < 0.15


@pytest.mark.processes
def test_an_error_of_a_compressor_is_an_error_of_backward():
    for first, second in testing.ranks(2, backend="gloo").run(compressed.fail):
        assert first.kind == ""
        assert second.kind == "ArgumentError"
        assert "expected the first step, got the second step" in second.text


@pytest.mark.slow
def test_bad_arguments():
    def rank_main(group):
        shared = Int8(group=group)
        for made, got in (("int8", "str"), (None, "NoneType"), (shared, "the same Compressor")):
            with pytest.raises(ArgumentError, match=f"'make'.*in each call, got {got}"):
                CompressedBuckets(partial(getattr, SimpleNamespace(made=made), "made"))

    run_threads(rank_main, 1)
