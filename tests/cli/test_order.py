"""The order of sums, in words and as data."""

import json

import pytest

from ringcoll.schedules import Program, Step, contract, inp, out, recv_reduce, send, verify
from ringcoll.schedules.algorithms import register, unregister
from tests.cases.algorithms import each_on

RING = """\
ring all_reduce on 5 ranks
chunk 0, elements 0-2: (((x1 + x2) + x3) + x4) + x0
chunk 1, elements 3-4: (((x2 + x3) + x4) + x0) + x1
chunk 2, elements 5-6: (((x3 + x4) + x0) + x1) + x2
chunk 3, elements 7-8: (((x4 + x0) + x1) + x2) + x3
chunk 4, elements 9-10: (((x0 + x1) + x2) + x3) + x4
"""


def test_the_page(run):
    result = run("verify", "--order", "ring", "-k", "5", "--size", "11")
    assert (result.exit_code, result.stdout) == (0, RING)
    result = run("verify", "--order", "ring", "-k", "5")
    assert [line.partition(":")[0] for line in result.stdout.splitlines()[1:]] == [
        f"chunk {chunk}" for chunk in range(5)
    ]


@pytest.mark.parametrize(
    "words, line",
    [
        (["two_shot", "-k", "4", "--size", "10"], "chunks 0-3, elements 0-9: ((x0 + x1) + x2) + x3"),
        (["ring", "-k", "4", "--size", "2", "--chunk", "1"], "chunk 1, element 1: ((x2 + x3) + x0) + x1"),
        (["ring", "-k", "4", "--size", "2", "--chunk", "2"], "chunk 2, no elements: ((x3 + x0) + x1) + x2"),
        (["ring", "-k", "1", "--size", "0"], "chunk 0, no elements: x0"),
        (["ring", "-c", "reduce-scatter", "-k", "2", "--size", "6", "--chunk", "1"],
         "chunk 1, elements 3-5: x0 + x1"),
        (["tree", "-c", "reduce", "-k", "3", "--root", "1"], "chunk 0: (x1 + x2) + x0"),
        (["hierarchical", "-k", "3", "--hosts", "3", "--chunk", "0"], "chunk 0: (x1 + x2) + x0"),
    ],
)  # fmt: skip
def test_one_line(run, words, line):
    result = run("verify", "--order", *words)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:] == [line]


@pytest.mark.parametrize("entry, world_size", each_on(1, 5))
def test_json_is_the_order_of_the_proof(run, entry, world_size):
    words = ("verify", "--order", entry.name, "-c", entry.collective, "-k", str(world_size))
    rules = contract(entry.collective)
    if not rules.reduces or rules.at_least_once:
        result = run(*words)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"Error: {entry.collective} reduces no data")
        return
    numel = 7 * world_size
    data = json.loads(run(*words, "--size", str(numel), "--json").stdout)
    assert data["same_everywhere"]
    sums = data["sums"]
    postfix = {chunk: tuple(line["postfix"]) for line in sums for chunk in line["chunks"]}
    assert postfix == verify(entry.schedule(world_size)).orders
    assert len({tuple(line["postfix"]) for line in sums}) == len(sums)
    elements = [
        element
        for line in sums
        for first, last in line["elements"]
        for element in range(first, last + 1)
    ]
    has_result = (entry.collective, world_size) != ("exscan", 1)
    assert sorted(elements) == list(range(numel if has_result else 0))


def test_elements_that_are_not_side_by_side(run):
    @register("all_reduce", "turns", chunks=lambda k: 4)
    def turns(rank: int, world_size: int) -> Program:
        yield Step(
            *(
                operation
                for chunk in range(4)
                for operation in (
                    send(1 - rank, inp(chunk)),
                    recv_reduce(
                        1 - rank, out(chunk), inp(chunk), received_left=rank == chunk % 3 % 2
                    ),
                )
            )
        )

    try:
        page = run("verify", "--order", "turns", "-k", "2", "--size", "9").stdout
    finally:
        unregister("all_reduce", "turns")
    assert page.splitlines()[1:] == [
        "chunks 0,2-3, elements 0-2,5-8: x1 + x0",
        "chunk 1, elements 3-4: x0 + x1",
    ]


def test_ranks_that_differ_are_no_secret(run):
    @register("all_reduce", "swapped")
    def swapped(rank: int, world_size: int) -> Program:
        yield Step(
            send(1 - rank, inp(0)), recv_reduce(1 - rank, out(0), inp(0), received_left=True)
        )

    try:
        page = run("verify", "--order", "swapped", "-k", "2").stdout
        data = json.loads(run("verify", "--order", "swapped", "-k", "2", "--json").stdout)
    finally:
        unregister("all_reduce", "swapped")
    assert "The order differs between ranks; this is the order on one of them." in page
    assert (data["same_everywhere"], data["order"]) == (False, "differs")


@pytest.mark.parametrize(
    "words, message",
    [
        (["rong"], "unknown algorithm 'rong' for all_reduce; known: "),
        (["ring", "-c", "all_educe"], "unknown collective 'all_educe'; known: all_reduce, "),
        (["tree", "-c", "reduce", "--root", "4"], "root 4 is not in a world of 4 ranks"),
        (["ring", "--root", "0"], "all_reduce has no root"),
        (["ring", "--hosts", "2"], "ring all_reduce is the same on any number of"),
        (["ring", "--chunk", "4"], "--chunk: ring all_reduce on 4 ranks has chunks 0 to 3, got 4"),
        (["ring", "--chunk", "-1"], "Invalid value for '--chunk'"),
        (["ring", "--size", "-1"], "Invalid value for '--size'"),
        (["ring", "--size", "1k"], "Invalid value for '--size'"),
        (["ring", "-k", "0"], "Invalid value for '-k' / '--world-sizes'"),
        (["ring", "-c", "reduce_scatter", "--size", "7"], "reduce_scatter on 4 ranks cannot divide 7"),
        ([], "--order goes with ALGORITHM, a file or a name"),
        (["ring", "-k", "2-4"], "--order is for one number of ranks"),
    ],
)  # fmt: skip
def test_errors_are_one_clear_line(run, words, message):
    result = run("verify", "--order", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"Error: {message}")


@pytest.mark.parametrize("option", ["--chunk", "--size", "--root", "--hosts"])
def test_options_of_the_order_ask_for_it(run, option):
    result = run("verify", "ring", option, "2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == f"Error: {option} goes with --order"


def test_a_wrong_algorithm_has_no_order(run, short_ring):
    result = run("verify", "--order", "short_ring", "-k", "3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "rank 0, step 2" in result.stderr
