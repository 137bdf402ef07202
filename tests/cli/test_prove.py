"""Proving algorithms and schedules."""

import json

import pytest

from ringcoll.schedules import as_runs
from ringcoll.schedules.algorithms import algorithms, find, schedule_of


def rows(page: str) -> dict[tuple[str, str], list[str]]:
    """The cells behind collective and algorithm, in lines that have all of them."""
    found, collective = {}, ""
    for line in page.partition("\n\n")[0].splitlines()[1:]:
        words = line.split()
        if not line.startswith(" "):
            collective = words.pop(0)
        found[collective, words[0]] = words[1:]
    return found


@pytest.mark.slow
def test_every_algorithm_is_proved(run):
    result = run("verify")
    assert result.exit_code == 0
    table = rows(result.stdout)
    assert set(table) == {(entry.collective, entry.name) for entry in algorithms()}
    for name, cells in table.items():
        sizes = [k for k in range(1, 17) if not find(*name).restriction(k)]
        assert cells[:2] == [as_runs(sizes), str(sizes[-1])]
    assert f"\n{len(table)} proved, 0 wrong, in " in result.stdout


def test_the_table_of_one_algorithm(run):
    page = run("verify", "ring", "--world-sizes", "1-8").stdout
    lines = [line.rpartition(" ")[0].rstrip() for line in page.splitlines()[:4]]  # less the time
    assert lines == [
        "collective      algorithm  proved for k  at k  rounds  /bound  traffic  /bound"
        "  reduced  /bound   sent  in flight  order",
        "all_reduce      ring       1-8              8      14   4.67x    1.750   1.00x"
        "    0.875   1.00x"
        "  1.750          2  fixed",
        "reduce_scatter  ring       1-8              8       7   2.33x    0.875   1.00x"
        "    0.875   1.00x"
        "  0.875          2  fixed",
        "all_gather      ring       1-8              8       7   2.33x    0.875   1.00x"
        "    0.000        "
        "  0.875          2",
    ]


def test_json_agrees_with_the_table(run):
    words = ("verify", "--world-sizes", "1-3,5,8")
    data, table = json.loads(run(*words, "--json").stdout), rows(run(*words).stdout)
    assert data["ok"]
    assert len(data["results"]) == len(table)
    for result in data["results"]:
        assert (result["ok"], result["error"]) == (True, None)
        name = result["collective"], result["algorithm"]
        reasons = {k: find(*name).restriction(k) for k in (1, 2, 3, 5, 8)}
        sizes = [k for k, reason in reasons.items() if reason is None]
        assert result["proved"] == sizes
        assert set(result["unsupported"]) == {str(k) for k in set(reasons) - set(sizes)}
        for k, message in result["unsupported"].items():
            assert message.endswith(f"cannot run on {k} ranks: {reasons[int(k)]}")
        at = result["at"]
        assert table[name][:-1] == [
            as_runs(sizes),
            str(sizes[-1]),
            str(at["rounds"]),
            f"{at['rounds'] / at['rounds_at_least']:.2f}x",
            f"{at['traffic']:.3f}",
            f"{at['traffic'] / at['traffic_at_least']:.2f}x",
            f"{at['reduced']:.3f}",
            *([f"{at['reduced'] / at['reduced_at_least']:.2f}x"] if at["reduced_at_least"] else []),
            f"{at['sent_max']:.3f}",
            str(at["in_flight"]),
            *(at["order"] or "").split(),
        ]
        assert at["rounds"] >= at["rounds_at_least"]
        assert at["traffic"] >= at["traffic_at_least"]
        assert at["reduced"] >= at["reduced_at_least"]


@pytest.mark.parametrize(
    "algorithm, order",
    [
        ("direct", "left to right"),
        ("recursive_doubling", "rank order"),
        ("ring", "fixed"),
    ],
)
def test_the_order_of_reduction_is_told(run, algorithm, order):
    words = ("verify", algorithm, "--collective", "all_reduce", "--world-sizes", "4", "--json")
    (result,) = json.loads(run(*words).stdout)["results"]
    assert result["at"]["order"] == order


def test_one_collective_and_a_short_name(run):
    table = rows(run("verify", "--collective", "all-to-all", "--world-sizes", "1-5").stdout)
    assert set(table) == {
        ("all_to_all", name) for name in ("bruck", "retri", "torus", "bine", "pairwise")
    }
    table = rows(run("verify", "tree", "--collective", "gather", "--world-sizes", "3").stdout)
    assert set(table) == {("gather", "binomial_tree")}


def test_a_world_of_one_rank(run):
    result = run("verify", "--world-sizes", "1")
    assert result.exit_code == 0
    assert all(cells[:3] == ["1", "1", "0"] for cells in rows(result.stdout).values())


def test_a_wrong_algorithm_ends_with_status_1_and_the_marked_grid(run, short_ring):
    result = run("verify", "--collective", "all_reduce", "--world-sizes", "1-4")
    assert result.exit_code == 1
    table, _, remarks = result.stdout.partition("\n\n")
    assert "1, WRONG at 2" in table
    cells = rows(result.stdout)
    for entry in algorithms("all_reduce"):  # all others are proved
        if entry.name != "short_ring":
            sizes = [k for k in range(1, 5) if not entry.restriction(k)]
            assert cells[entry.collective, entry.name][0] == as_runs(sizes)
    assert remarks.startswith("not for k = 3: swing all_reduce cannot run on 3 ranks")
    assert "\n\nshort_ring all_reduce on 2 ranks is wrong: rank 0, step 0, chunk 1:" in remarks
    assert "\nstep  rank 0" in remarks
    assert remarks.count("**") == 2
    assert f"\n{len(cells) - 1} proved, 1 wrong, in " in remarks


def test_a_wrong_algorithm_as_json(run, short_ring):
    result = run("verify", "short_ring", "--world-sizes", "2-4", "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    (found,) = data["results"]
    assert (data["ok"], found["ok"], found["proved"], found["at"]) == (False, False, [], None)
    assert found["error"]["world_size"] == 2
    assert (found["error"]["rank"], found["error"]["chunk"]) == (0, 1)
    assert found["error"]["message"].startswith("out[1] ends wrong")
    assert found["error"]["grid"].count("**") == 2


def test_every_root_of_a_small_world_is_proved(run, wrong_root):
    result = run("verify", "wrong_root", "--world-sizes", "1-6")
    assert result.exit_code == 1
    assert "1-4, WRONG at 5" in result.stdout


def test_several_hosts_are_proved(run, wrong_on_hosts):
    result = run("verify", "wrong_on_hosts", "--world-sizes", "1-6")
    assert result.exit_code == 1
    assert "1, WRONG at 2" in result.stdout


def test_restricted_sizes_are_reported_and_no_error(run, only_powers):
    result = run("verify", "only_powers", "--world-sizes", "1-8")
    assert result.exit_code == 0
    assert rows(result.stdout)["all_gather", "only_powers"][:2] == ["1-2,4,8", "8"]
    assert (
        "\nnot for k = 3,5-7: only_powers all_gather cannot run on 3 ranks: it halves the world\n"
        in result.stdout
    )
    data = json.loads(run("verify", "only_powers", "--world-sizes", "1-8", "--json").stdout)
    assert list(data["results"][0]["unsupported"]) == ["3", "5", "6", "7"]


def test_only_restricted_sizes_are_an_error_if_the_algorithm_was_named(run, only_powers):
    result = run("verify", "only_powers", "--world-sizes", "3,5")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "Error: only_powers all_gather cannot run on 3 ranks: it halves the world\n"
    )
    others = run("verify", "--collective", "all_gather", "--world-sizes", "3,5")
    assert others.exit_code == 0
    assert rows(others.stdout)["all_gather", "only_powers"][0] == "none"


def test_the_message_names_the_size_that_was_asked_for(run, only_large):
    """Also where the algorithm does not run on 1 rank."""
    result = run("verify", "only_large", "--world-sizes", "3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: only_large all_reduce cannot run on 3 ranks: it wants 3000\n"
    others = run("verify", "--collective", "all_reduce", "--world-sizes", "3")
    assert others.exit_code == 0
    assert rows(others.stdout)["all_reduce", "only_large"][0] == "none"


@pytest.mark.parametrize(
    "words, message",
    [
        (["rong"], "unknown algorithm 'rong'; known: "),
        (["chain", "--collective", "all_reduce"], "unknown algorithm 'chain' for all_reduce; "),
        (["--collective", "sum"], "unknown collective 'sum'; known: all_reduce, "),
        (
            ["--world-sizes", "0-4"],
            "Invalid value for '-k' / '--world-sizes' / '--world-size': '0-4' is not within",
        ),
        (["--schedule", "no/such/file"], "no/such/file cannot be read: No such file"),
    ],
)
def test_errors_are_one_clear_line(run, words, message):
    result = run("verify", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"Error: {message}")


def test_a_schedule_from_a_file(run, tmp_path):
    file = tmp_path / "schedule.txt"
    file.write_text(schedule_of("all_reduce", "ring", 6).to_text())
    result = run("verify", "--schedule", str(file))
    assert result.exit_code == 0
    assert rows(result.stdout)["all_reduce", "ring"][:3] == ["6", "6", "10"]


def test_a_schedule_from_standard_input(run):
    text = run("show", "bruck", "all_gather", "-k", "5", "--text").stdout
    result = run("verify", "--schedule", "-", "--json", stdin=text)
    (found,) = json.loads(result.stdout)["results"]
    assert (found["algorithm"], found["proved"]) == ("bruck", [5])


def test_a_wrong_schedule_from_a_file(run):
    text = schedule_of("all_reduce", "ring", 3).to_text()
    damaged = text.replace("send in[2] to 1", "send in[1] to 1", 1)
    assert damaged != text
    result = run("verify", "--schedule", "-", stdin=damaged)
    assert result.exit_code == 1
    assert "ring all_reduce on 3 ranks is wrong: rank 1, step 0, peer 0" in result.stdout
    assert result.stdout.count("**") == 2


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "line 1: expected 'schedule COLLECTIVE"),
        ("schedule all_reduce a world_size=1 num_chunks=1 num_slots=0 root=0\nrank 0\n  jump\n",
         "line 3: 'jump' is not an operation"),
        ("schedule nope a world_size=1 num_chunks=1 num_slots=0 root=0\nrank 0\n  -\n",
         "unknown collective 'nope'"),
    ],
)  # fmt: skip
def test_a_malformed_schedule_names_the_line(run, text, message):
    result = run("verify", "--schedule", "-", stdin=text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {message}")


def test_a_file_goes_with_no_other_choice(run):
    for words in (["ring"], ["--collective", "reduce"], ["--world-sizes", "3"]):
        result = run("verify", *words, "--schedule", "-", stdin="")
        assert result.exit_code == 2
        assert "--schedule goes with no other choice" in result.stderr
