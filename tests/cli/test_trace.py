"""``ringcoll trace`` as it is typed."""

import json

import pytest

from ringcoll.transport import catalogue
from tests.cases.pictures import check

SMALL = ("-k", "2", "-b", "4K", "-n", "3", "-w", "1")


@pytest.mark.processes
class TestOnRanks:
    def test_a_table_and_a_file(self, run, tmp_path):
        path = tmp_path / "picture.json"
        result = run("trace", "all-reduce", *SMALL, "--algorithm", "ring", "-o", str(path))
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        assert lines[0] == (
            f"all_reduce of 4 KiB on 2 ranks over {catalogue.resolved('cpu')}, 3 times after 1"
        )
        (header,) = [line for line in lines if line.startswith("rank ")]
        columns = ["rank", "operations", "total", "waiting", "moving", "reducing", "python"]
        assert header.split() == [*columns, "sent", "received", "messages"]
        call = "3 x all_reduce(sum, float32, 1024 elements, algorithm ring)"
        rows = [line for line in lines if call in line]
        assert [row.split()[0] for row in rows] == ["0", "1"]
        assert {tuple(row.split()[-5:]) for row in rows} == {("12", "KiB", "12", "KiB", "6")}
        assert f"Wrote {path}" in result.stdout
        check(json.loads(path.read_text()))

    def test_as_data(self, run, tmp_path):
        path = tmp_path / "picture.json"
        words = ("trace", "broadcast", *SMALL, "--root", "1", "-d", "half", "-o", str(path))
        result = run(*words, "--transport", "ucx", "--json")
        assert result.exit_code == 0
        found = json.loads(result.stdout)
        assert found["transport"] == "ucx"
        assert found["file"] == str(path)
        assert found["environment"]["world_size"] == 2
        sent = [calls["total"]["sent_bytes"] for calls in found["ranks"]]
        assert sent == [0, 3 * 4096]
        assert len(found["clocks"]) == 2
        check(json.loads(path.read_text()))

    def test_an_algorithm_of_the_user(self, run, star):
        result = run("trace", "all_reduce", *SMALL, "--algorithm", f"{star}:star")
        assert result.exit_code == 0, result.output
        assert "algorithm star" in result.stdout

    @pytest.mark.parametrize("collective", ["all_to_all", "barrier", "reduce_scatter"])
    def test_other_collectives(self, run, tmp_path, collective):
        path = tmp_path / "picture.json"
        assert run("trace", collective, *SMALL, "-o", str(path)).exit_code == 0
        check(json.loads(path.read_text()))


@pytest.mark.parametrize(
    "words, complaint",
    [
        (("all_reduce", "--root", "0"), "all_reduce has no root"),
        (("broadcast", "-k", "2", "--root", "2"), "rank 2 is not one of 2"),
        (("all_reduce", "--algorithm", "native"), "one algorithm of ringcoll's"),
        (("all_reduce", "--algorithm", "ring,tree"), "one algorithm of ringcoll's"),
        (("all_reduce", "--algorithm", "ding"), "unknown algorithm 'ding'"),
        (("all_deduce",), "all_deduce"),
        (("all_reduce", "-b", "lots"), "not a size"),
        (("all_reduce", "-o", "no/such/folder/trace.json"), "there is no folder"),
    ],
)
def test_what_cannot_be_done_is_told_at_once(run, words, complaint):
    result = run("trace", *words)
    assert result.exit_code == 2
    assert complaint in result.stderr
