"""Statistics and bandwidths against numbers worked out by hand."""

import pytest

from ringcoll.tools.bench import algbw, busbw, spread_in_words, summarize


def test_hand_computed_statistics():
    summary = summarize([0.004, 0.001, 0.002, 0.003])
    assert summary.samples == 4
    assert (summary.min_s, summary.max_s) == (0.001, 0.004)
    assert summary.avg_s == pytest.approx(0.0025)
    assert summary.stdev_s == pytest.approx((5 / 4) ** 0.5 * 1e-3)  # of 1, 2, 3, 4: sqrt(5 / 4)
    assert summary.p50_s == pytest.approx(0.0025)
    assert summary.p25_s == pytest.approx(0.00175)
    assert summary.p75_s == pytest.approx(0.00325)
    assert summary.spread == pytest.approx(1.5 / 2.5)


def test_high_percentiles_are_measured_values():
    summary = summarize([float(number) for number in range(1, 201)])
    assert (summary.p95_s, summary.p99_s) == (190.0, 198.0)
    assert summarize([float(number) for number in range(1, 21)]).p95_s == 19.0
    assert summarize([1.0, 2.0, 3.0]).p99_s == 3.0


def test_one_sample_has_no_spread():
    summary = summarize([0.5])
    assert (summary.p25_s, summary.p50_s, summary.p99_s) == (0.5, 0.5, 0.5)
    assert (summary.spread, summary.stdev_s) == (0.0, 0.0)


def test_between_two_samples_quartiles_are_interpolated():
    summary = summarize([3.0, 1.0])
    assert (summary.p25_s, summary.p50_s, summary.p75_s) == (1.5, 2.0, 2.5)


def test_few_samples_are_marked():
    assert spread_in_words(summarize([1.0, 2.0, 3.0, 4.0])) == "~60%"
    assert spread_in_words(summarize([1.0, 2.0, 3.0, 4.0, 5.0])) == "67%"


def test_times_of_nothing_divide_nothing():
    summary = summarize([0.0, 0.0, 0.0, 1.0])
    assert (summary.p50_s, summary.spread) == (0.0, 0.0)
    assert algbw(8, 0.0) == busbw("all_reduce", 2, 8, 0.0) == 0.0


def test_the_line_that_nccl_tests_published():
    # 2 x V100 over PCIe: 33554432 bytes in 2943.25 us, and 2953.54 us in place
    for microseconds, published in ((2943.25, "11.40"), (2953.54, "11.36")):
        seconds = microseconds * 1e-6
        assert f"{algbw(33554432, seconds):.2f}" == published
        assert f"{busbw('all_reduce', 2, 33554432, seconds):.2f}" == published


@pytest.mark.parametrize(
    "collective,factor",
    [
        ("all_reduce", 2 * 3 / 4),
        ("reduce_scatter", 3 / 4),
        ("all_gather", 3 / 4),
        ("all_to_all", 3 / 4),
        ("gather", 3 / 4),
        ("scatter", 3 / 4),
        ("broadcast", 1.0),
        ("reduce", 1.0),
    ],
)
def test_factors_on_four_ranks(collective, factor):
    assert busbw(collective, 4, 8_000_000_000, 2.0) == pytest.approx(4.0 * factor)


def test_two_formulas_of_a_lecture_give_the_same_numbers():
    k, nbytes, seconds = 5, 1_000_000, 0.25
    lecture = nbytes * 2 * (k - 1) / (k * seconds) / 1e9
    assert busbw("all_reduce", k, nbytes, seconds) == pytest.approx(lecture)
    output = nbytes // k
    lecture = output * (k - 1) / seconds / 1e9  # of the k blocks, over all ranks, by k ranks
    assert busbw("reduce_scatter", k, nbytes, seconds) == pytest.approx(lecture)
