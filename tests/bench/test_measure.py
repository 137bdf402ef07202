"""Measuring on real processes: every collective, against native; #wrong; refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ringcoll.runtime.user_files import UserModule
from ringcoll.schedules import CONTRACTS, contract
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.bench import BenchRequest, Result, Workload, on_rank, shape
from tests.fakes import wrong_algorithm

pytestmark = pytest.mark.processes

SHORT: dict[str, Any] = {"warmup": 0, "most": 2}


@pytest.mark.slow
@pytest.mark.parametrize("collective", CONTRACTS)
def test_everything_is_right_in_both_modes(pool, collective):
    names = [*(entry.name for entry in algorithms(collective, 3)), "auto"]
    names += [] if contract(collective).is_prefix else ["native"]
    request = BenchRequest(collective, tuple(names), (0, 4, 40_004), roots=(2,), **SHORT)
    results = pool(3).run(on_rank, request)[0]
    sizes = 1 if collective == "barrier" else 3
    assert [result.contender for result in results] == names * sizes
    for result in results:
        assert result.refused is None
        assert result.wrong == 0
        assert (result.in_place is None) == (collective == "all_to_all")
        assert result.out_of_place is not None
        assert len(result.out_of_place.samples_s) * result.out_of_place.turn == 2
        assert result.timed is (result.in_place or result.out_of_place)


def test_all_ranks_have_the_same_results(pool):
    request = BenchRequest("all_reduce", ("ring", "native"), (64,), scouts=("direct",), **SHORT)
    first, *others = pool(3).run(on_rank, request)
    assert all(results == first for results in others)


@pytest.mark.parametrize("dtypes,ops", [(("half", "f8e4m3", "uint64"), ("sum", "avg", "max"))])
def test_dtypes_and_operators(pool, dtypes, ops):
    request = BenchRequest("all_reduce", ("ring", "native"), (96,), dtypes=dtypes, ops=ops, **SHORT)
    results = pool(3).run(on_rank, request)[0]
    assert [result.workload.dtype for result in results[::2]] == [d for d in dtypes for _ in ops]
    assert all(result.wrong == 0 for result in results if result.contender == "ring")


def test_what_native_refuses_is_said(pool):
    request = BenchRequest("all_reduce", ("ring", "native"), (64,), dtypes=("f8e5m2",), **SHORT)
    ring, native = pool(2).run(on_rank, request)[0]
    assert (ring.wrong, ring.refused) == (0, None)
    assert native.refused
    assert (native.timed, native.wrong) == (None, None)
    prefix = BenchRequest("exscan", ("persistent", "native"), (64,), **SHORT)
    own, native = pool(2).run(on_rank, prefix)[0]
    assert (own.wrong, own.refused) == (0, None)
    assert native.refused is not None
    assert "has no scan" in native.refused
    # The group that refused is not broken by it.
    request = replace(request, dtypes=("float",))
    assert pool(2).run(on_rank, request)[0][1].wrong == 0


def test_a_wrong_algorithm_is_found_out(pool):
    request = BenchRequest("all_reduce", (wrong_algorithm.NAME, "ring"), (4, 4096), **SHORT)
    results = pool(2).run(wrong_algorithm.measure_wrong, request)[0]
    for bad, good in zip(results[::2], results[1::2], strict=True):
        assert bad.out_of_place.wrong > 0
        assert bad.in_place.wrong > 0
        assert bad.wrong == bad.out_of_place.wrong + bad.in_place.wrong
        assert good.wrong == 0
    # Rank 0's share is missing from half of the result, and rank 1 is sent that half.
    assert (results[0].in_place.wrong, results[2].in_place.wrong) == (2, 1024)


def test_without_check_nothing_is_called_right(pool):
    request = BenchRequest("all_reduce", ("ring",), (64,), check=False, **SHORT)
    (result,) = pool(2).run(on_rank, request)[0]
    assert result.wrong is None
    assert result.timed is not None


@pytest.mark.parametrize(
    "blocking,turns,over_ranks", [(0, 4, "rank0"), (1, 8, "avg"), (2, 4, "min"), (2, 4, "max")]
)
def test_ways_to_time(pool, blocking, turns, over_ranks):
    request = BenchRequest(
        "broadcast", ("auto", "native"), (64,), most=8, blocking=blocking, over_ranks=over_ranks
    )
    for result in pool(2).run(on_rank, request)[0]:
        assert result.wrong == 0
        assert result.timed.turn * len(result.timed.samples_s) == 8
        assert len(result.timed.samples_s) >= turns
        assert all(sample > 0 for sample in result.timed.samples_s)


def test_reports_come_from_rank_0_as_soon_as_they_are_there(pool):
    reports: list[list[Result]] = []
    request = BenchRequest("all_reduce", ("ring", "tree"), (4, 8), **SHORT)
    results = pool(2).run(on_rank, request, on_report=reports.append)[0]
    assert [one for report in reports for one in report] == results
    assert [len(report) for report in reports] == [2, 2]


def test_scouts_send_their_fastest(pool):
    scouts = ("direct", "recursive_doubling")
    request = BenchRequest("all_reduce", ("ring", "native"), (4, 64), scouts=scouts, seconds=0.2)
    results = pool(2).run(on_rank, request)[0]
    for ring, native, best in zip(results[::3], results[1::3], results[2::3], strict=True):
        assert (ring.scouted, native.scouted, best.scouted) == (False, False, True)
        assert best.contender in scouts
        assert best.wrong == 0
        assert len(ring.timed.samples_s) >= request.least


def test_modules_that_register_algorithms_are_imported(pool):
    module = UserModule("tests.fakes.wrong_algorithm", str(Path(__file__).parents[2]))
    request = BenchRequest("all_reduce", ("ring",), (4,), modules=(module,), **SHORT)
    assert pool(2).run(on_rank, request)[0][0].wrong == 0


def test_sizes_are_those_of_nccl_tests():
    blocks = shape(Workload("reduce_scatter", 1000, "double"), 3)
    assert (blocks.count, blocks.nbytes) == (41, 984)  # 125 elements, 41 for each
    assert (blocks.send_numel, blocks.recv_numel) == (123, 41)
    vector = shape(Workload("reduce", 1000, "half"), 3)
    assert (vector.count, vector.nbytes, vector.send_numel, vector.recv_numel) == (
        500, 1000, 500, 500,
    )  # fmt: skip
    for collective in ("reduce", "gather", "scan", "exscan"):  # rank 0 of an exscan has no output
        assert shape(Workload(collective, 1200, "half"), 3).recv_numel == 600
