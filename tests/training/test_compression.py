"""What is not sent is kept, within stated bounds, and the same average is on all ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ringcoll import run_threads
from ringcoll.errors import ArgumentError
from ringcoll.training import (
    CompressedGradients,
    Compressor,
    Int8,
    PowerSGD,
    Sent,
    TopK,
    average_gradients,
)
from ringcoll.training.data.hooks import gram_schmidt
from tests.cases.effort import effort

COMPRESSORS = {
    "top-k": partial(TopK, 0.1),
    "int8": partial(Int8, 8),
    "rank 2": partial(PowerSGD, 2),
}
SHAPES = {"bucket": (101,), "matrix": (12, 9), "convolution": (6, 5, 2, 2)}

by_compressor = pytest.mark.parametrize("make", COMPRESSORS.values(), ids=COMPRESSORS.keys())
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def gradient(shape: tuple[int, ...], rank: int, step: int) -> torch.Tensor:
    """Normal numbers that differ by rank, step and index."""
    generator = torch.Generator().manual_seed(1 + rank + 100 * step)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def run(make, shape, world_size: int, steps: int, **options):
    """Average gradients for some steps: for each rank its averages, residuals, and reports."""

    def rank_main(group):
        compressor: Compressor = make(group=group, **options)
        averages, residuals, reports = [], [], []
        for step in range(steps):
            tensor = gradient(shape, group.rank(), step)
            reports.append(compressor.average(tensor))
            averages.append(tensor)
            assert compressor.residual is not None
            residuals.append(compressor.residual)
        return torch.stack(averages), torch.stack(residuals), reports

    return run_threads(rank_main, world_size)


def stacked(shape, world_size: int, steps: int) -> torch.Tensor:
    """The gradients, (ranks, steps, ...)."""
    rows = [[gradient(shape, r, step) for step in range(steps)] for r in range(world_size)]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@by_shape
@by_compressor
def test_what_was_sent_and_what_is_kept_are_the_gradients(make, shape, world_size: int):
    steps = 12
    ranks = run(make, shape, world_size, steps)
    gradients = stacked(shape, world_size, steps)
    averages, residuals, _ = zip(*ranks, strict=True)
    assert all(torch.equal(average, averages[0]) for average in averages)
    # In each step and on each rank: sent = gradient + old residual - new residual.
    kept = torch.stack(residuals)
    before = torch.cat([torch.zeros_like(kept[:, :1]), kept[:, :-1]], dim=1)
    sent = gradients + before - kept
    assert torch.allclose(averages[0], sent.mean(0), rtol=0, atol=1e-13 * 10)
    # So over all steps the sums differ by the last residual alone.
    total = gradients.mean(0).sum(0) - kept[:, -1].mean(0)
    assert torch.allclose(averages[0].sum(0), total, rtol=0, atol=1e-12)


@by_shape
@by_compressor
def test_the_residual_stays_within_its_bound(make, shape):
    """So the average of what was sent approaches that of the gradients like 1 / steps."""
    steps, world_size = 40, 2
    ranks = run(make, shape, world_size, steps)
    gradients = stacked(shape, world_size, steps)
    numel = gradients[0, 0].numel()
    for (_, residuals, reports), own in zip(ranks, gradients, strict=True):
        for residual, report in zip(residuals, reports, strict=True):
            assert report.lost_norm == float(residual.norm())
            assert report.relative_error == pytest.approx(report.lost_norm / report.norm)
        q = {
            "TopK": (1 - -(-numel // 10) / numel) ** 0.5,
            # In each piece the error is at most 1/254 of the largest element; float32 scales.
            "Int8": numel**0.5 / 254 * (1 + 1e-6),
            # Power iteration has no bound of its own: the largest loss that was reported.
            "PowerSGD": max(report.relative_error for report in reports),
        }[make.func.__name__]
        assert max(report.relative_error for report in reports) <= q
        assert q < 1
        largest = max(float(tensor.norm()) for tensor in own)
        assert float(residuals[-1].norm()) <= q / (1 - q) * largest


def test_without_error_feedback_the_same_elements_are_never_sent():
    small = torch.tensor([3.0, 1.0, -2.0, 0.5], dtype=torch.float64)

    def rank_main(group, error_feedback: bool):
        compressor = TopK(0.25, group, error_feedback=error_feedback)
        total = torch.zeros_like(small)
        for _ in range(40):
            tensor = small * (1 + group.rank())
            compressor.average(tensor)
            total += tensor
        return total / 40

    with_it = run_threads(partial(rank_main, error_feedback=True), 3)[0]
    without = run_threads(partial(rank_main, error_feedback=False), 3)[0]
    assert without.tolist() == [6.0, 0.0, 0.0, 0.0]
    # The bound on the residual, q / (1 - q) |g|, over 40 steps.
    q, largest = 0.75**0.5, 3 * float(small.norm())
    assert float((with_it - 2 * small).norm()) <= q / (1 - q) * largest / 40


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "make, shape, own_nbytes",
    [
        # 11 of 101 elements, of 8 bytes and of 4 for the index
        (partial(TopK, 0.1), (101,), lambda k: (k - 1) * 11 * 12),
        (partial(TopK, 1.0), (101,), lambda k: (k - 1) * 101 * 12),
        # 101 numbers in 13 pieces; 1 piece at least
        (partial(Int8, 8), (101,), lambda k: (k - 1) * (101 + 13 * 4)),
        (partial(Int8), (101,), lambda k: (k - 1) * (101 + 4)),
        # (12 + 9) * 2 numbers, and 10 x 11 for a vector
        (partial(PowerSGD, 2), (12, 9), lambda k: 2 * (k - 1) * 21 * 2 * 8 // k),
        (partial(PowerSGD, 1), (101,), lambda k: 2 * (k - 1) * (10 + 11) * 8 // k),
        # 7 * 21 is more than 12 * 9
        (partial(PowerSGD, 7), (12, 9), lambda k: 2 * (k - 1) * 12 * 9 * 8 // k),
    ],
)
def test_bytes(make, shape, own_nbytes, world_size: int):
    for _, _, reports in run(make, shape, world_size, 2):
        assert [report.nbytes for report in reports] == [own_nbytes(world_size)] * 2
        numel = gradient(shape, 0, 0).numel()
        assert reports[0].plain_nbytes == 2 * (world_size - 1) * numel * 8 // world_size


@pytest.mark.parametrize(
    "make, shape", [(partial(TopK, 1.0), (101,)), (partial(PowerSGD, 7), (12, 9))]
)
def test_with_everything_sent_nothing_is_lost(make, shape):
    for averages, residuals, reports in run(make, shape, 3, 3):
        assert torch.allclose(averages, stacked(shape, 3, 3).mean(0), rtol=0, atol=1e-14)
        assert not residuals.any()
        assert reports[0].relative_error == 0


@by_shape
def test_int8_loses_half_a_unit_of_each_piece_at_most(shape):
    gradients = stacked(shape, 3, 1)[:, 0].flatten(1)
    for (_, residuals, _), own in zip(
        run(COMPRESSORS["int8"], shape, 3, 1), gradients, strict=True
    ):
        pairs = zip(residuals[0].flatten().split(8), own.split(8), strict=True)
        shares = [float(lost.abs().max() / piece.abs().max()) for lost, piece in pairs]
        assert 0.4 / 127 < max(shares) <= 0.5 / 127 * (1 + 1e-6)  # scales are float32


def test_int8_is_exact_on_multiples_of_its_scale():
    def rank_main(group):
        tensor = torch.tensor([127.0, -3, 5, 0, 254, -254, 2, 4, 0, 0]) * (1 + group.rank())
        compressor = Int8(4, group)
        compressor.average(tensor)
        assert compressor.residual is not None
        return tensor.tolist(), compressor.residual.abs().sum().item()

    expected = [3 / 2 * x for x in (127.0, -3, 5, 0, 254, -254, 2, 4, 0, 0)]
    assert run_threads(rank_main, 2) == [(expected, 0.0)] * 2


class TestPowerSGD:
    @pytest.mark.parametrize("true_rank", [0, 1, 2, 3])
    def test_a_mean_of_that_rank_is_exact(self, true_rank: int):
        generator = torch.Generator().manual_seed(3)
        left, right = (
            torch.randn(n, true_rank, generator=generator, dtype=torch.float64) for n in (12, 9)
        )

        def rank_main(group):
            compressor, averages = PowerSGD(2, group), []
            for step in range(3):
                tensor = (1 + step + group.rank()) * left @ right.T
                report = compressor.average(tensor)
                averages.append(tensor)
            return torch.stack(averages), report

        for averages, report in run_threads(rank_main, 3):
            expected = torch.stack([(2 + step) * left @ right.T for step in range(3)])
            # Rounding errors, of matrices of norm about 40, after a step of Gram-Schmidt.
            assert torch.allclose(averages, expected, rtol=0, atol=1e-11) == (true_rank <= 2)
            assert (report.relative_error < 1e-12) == (true_rank <= 2)

    def test_columns_that_had_nothing_to_send_come_back(self):
        rows = torch.arange(64, dtype=torch.float64).view(8, 8)
        matrices = torch.zeros_like(rows), torch.ones_like(rows), rows  # of rank 0, 1 and 2

        def rank_main(group):
            compressor, averages = PowerSGD(2, group), []
            for matrix in matrices:
                averages.append(matrix.clone())
                compressor.average(averages[-1])
            return averages

        for averages in run_threads(rank_main, 2):
            for average, matrix in zip(averages, matrices, strict=True):
                # Rounding errors, of a matrix of norm about 300.
                assert torch.allclose(average, matrix, rtol=0, atol=1e-10)

    @effort(100)
    @given(
        rows=st.integers(1, 20),
        columns=st.integers(1, 6),
        true_rank=st.integers(0, 6),
        seed=st.integers(0, 1000),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def test_gram_schmidt(self, rows: int, columns: int, true_rank: int, seed: int, dtype):
        generator = torch.Generator().manual_seed(seed)
        left, right = (
            torch.randn(n, true_rank, generator=generator, dtype=dtype) for n in (rows, columns)
        )
        matrix = left @ right.T
        basis = matrix.clone()
        gram_schmidt(basis)
        kept = basis.any(0)
        assert int(kept.sum()) <= min(rows, columns, true_rank)
        tolerance = 100 * torch.finfo(dtype).eps
        assert torch.allclose(basis.T @ basis, torch.diag(kept.to(dtype)), rtol=0, atol=tolerance)
        # What is not in the span is what was left out as rounding: sqrt(eps) of a column.
        lost = (matrix - basis @ (basis.T @ matrix)).norm()
        assert lost <= 10 * torch.finfo(dtype).eps ** 0.5 * matrix.norm()


def test_all_gradients_of_a_module():
    def rank_main(group):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3), nn.Linear(2, 2)).double()
        inputs = gradient((5, 6), group.rank(), 0)
        pairs = []
        for compressed in (False, True):
            module.zero_grad()
            torch.autograd.backward(module[1](module[0](inputs)).square().sum())
            if compressed:
                report = CompressedGradients(module, partial(TopK, 1.0, group)).average()
            else:
                average_gradients(module, group)
            pairs.append([param.grad for param in module.parameters()])
        for plain, ours in zip(*pairs, strict=True):
            assert plain is not None
            assert ours is not None
            assert torch.allclose(plain, ours, rtol=0, atol=1e-12)
        assert not ours.any(), "a parameter without a gradient takes part with zeros"
        return report

    numel = 6 * 4 + 4 + 4 * 3 + 3 + 2 * 2 + 2
    for report in run_threads(rank_main, 2):
        assert report[:2] == (numel * 12, numel * 8)
        assert report.relative_error == 0
        assert report.norm > 0
    assert Sent(1, 2, 0.0, 0.0).relative_error == 0


def test_narrow_dtypes_are_compressed_in_float32():
    def rank_main(group):
        tensor = gradient((101,), group.rank(), 0).bfloat16()
        compressor = TopK(0.5, group)
        compressor.average(tensor)
        assert compressor.residual is not None
        return tensor.dtype, compressor.residual.dtype

    assert run_threads(rank_main, 2) == [(torch.bfloat16, torch.float32)] * 2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda group: TopK(0.0, group), r"rank 0: .*'fraction'.*above 0, at most 1, got 0.0"),
        (lambda group: TopK(1.5, group), r"'fraction': not a share.*got 1.5"),
        (lambda group: TopK(float("nan"), group), r"'fraction': not a share.*got nan"),
        (lambda group: Int8(0, group), r"'piece': must be positive.*at least 1 element, got 0"),
        (lambda group: PowerSGD(0, group), r"'rank': must be positive.*at least 1 column, got 0"),
        (lambda group: Int8(group=group).average(torch.zeros(0)), "floating numbers, at least 1"),
        (lambda group: Int8(group=group).average(torch.ones(2).int()), "got torch.int32 of shape"),
        (
            lambda group: CompressedGradients(nn.ReLU(), partial(Int8, group=group)),
            "no parameter needs a gradient",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        run_threads(call, 1)


def test_a_compressor_belongs_to_one_shape():
    def rank_main(group):
        compressor = Int8(group=group)
        compressor.average(torch.ones(3))
        with pytest.raises(ArgumentError, match=r"of shape \(3,\), got torch.float32 of shape"):
            compressor.average(torch.ones(4))

    run_threads(rank_main, 2)
