"""``ringcoll trace`` as it is typed."""

import json

import pytest

from ringcoll.runtime.transport import catalogue
from ringcoll.tools.cli import measuring
from tests.cases.pages import README, data_of
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

    @pytest.mark.parametrize("name", ["times.svg", "times.html"])
    def test_a_picture_or_a_page(self, run, star, tmp_path, name):
        path = tmp_path / name
        result = run("trace", "all_reduce", *SMALL, "--algorithm", f"{star}:star", "-o", str(path))
        assert result.exit_code == 0, result.output
        assert result.stdout.endswith(f"Wrote {path}.\n")
        content = path.read_text()
        if name.endswith(".svg"):
            assert "star all_reduce, over " in content
            # Rank 1 sends its vector to rank 0, and gets the total, in the last of the operations.
            assert content.count('class="message"') == 2
        else:
            (times,) = [data_of(content)["times"]]
            assert [message[:3] for message in times["messages"]] == [[0, 1, 0], [1, 0, 1]]
            assert data_of(content)["settings"]["nbytes"] == "4096"
        assert list(tmp_path.glob("times*")) == [path]  # no trace lies beside it

    def test_a_step_of_training_as_a_picture(self, run, tmp_path):
        path = tmp_path / "overlap.svg"
        assert "`ringcoll trace torch-ddp -k 2 -o overlap.svg`" in README.read_text(
            encoding="utf-8"
        )
        result = run("trace", "torch-ddp", "-k", "2", "-n", "2", "-o", str(path))
        assert result.exit_code == 0, result.output
        content = path.read_text()
        for phase in ("forward", "backward", "update"):
            assert content.count(f"<title>rank 0, {phase}: ") == 1
        assert (
            content.count('class="communicates"') >= 2 * 3 + 1
        )  # buckets of both ranks, and the legend
        assert list(tmp_path.glob("overlap*")) == [path]

    def test_a_page_of_a_trainer_is_refused_before_any_work(self, run, tmp_path):
        result = run("trace", "bucketed", "-o", str(tmp_path / "overlap.html"))
        assert result.exit_code == 2
        assert "a page plays a collective" in result.stderr

    @pytest.mark.parametrize("collective", ["all_to_all", "barrier", "reduce_scatter"])
    def test_other_collectives(self, run, tmp_path, collective):
        path = tmp_path / "picture.json"
        assert run("trace", collective, *SMALL, "-o", str(path)).exit_code == 0
        check(json.loads(path.read_text()))


# By trainer: ranks, the phases of rank 0, and a phase in which a rank waits for another; "?" where
# messages may have come before a rank waits for them.
ALWAYS = {"step", "forward", "backward", "update", "total"}
TRAINERS = {
    "one-process": (2, ALWAYS | {"average"}, None),
    "bucketed": (2, ALWAYS | {"average"}, "?"),
    "torch-ddp": (2, ALWAYS, "?"),
    "torch-ddp-hook": (2, ALWAYS, "?"),
    "tensor": (2, ALWAYS | {"average"}, "forward"),
    "context": (2, ALWAYS | {"average"}, "average"),
    "pipeline:1f1b": (2, ALWAYS, "backward"),
    "sharded:3": (2, ALWAYS | {"average"}, "?"),
    "gossip:ring": (2, ALWAYS | {"average"}, "average"),
    "local-sgd": (2, ALWAYS | {"average"}, "average"),
    "server:sync": (2, {"serve", "update", "total"}, "serve"),
    "3d:1x2x2": (4, ALWAYS | {"average"}, "forward"),
}


@pytest.mark.processes
@pytest.mark.parametrize("trainer", TRAINERS)
def test_trainers(run, pool, monkeypatch, tmp_path, trainer):
    def on_ranks(function, *args, world_size, backend):
        return pool(world_size, backend).run(function, *args)[0]

    monkeypatch.setattr(measuring, "on_ranks", on_ranks)
    world_size, names, waiting = TRAINERS[trainer]
    path = tmp_path / "picture.json"
    num_steps = 8 if trainer == "local-sgd" else 2
    words = ("-k", str(world_size), "-n", str(num_steps), "-w", "1", "-o", str(path), "--json")
    result = run("trace", trainer, *words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    document = json.loads(path.read_text())
    check(document)
    assert found["phases"] == document["otherData"]["phases"]
    assert found["findings"] == document["otherData"]["findings"]
    first, *others = found["phases"]
    assert len(others) == world_size - 1
    assert set(first) == names
    outermost = "serve" if "serve" in names else "step"
    assert first[outermost]["times"] == (1 if outermost == "serve" else num_steps)
    assert others[0]["step"]["times"] == num_steps
    waited = {
        name
        for phases in found["phases"]
        for name, times in phases.items()
        if times["waiting_for_s"]
    }
    assert waiting in {*waited, "?"} if waiting else not waited
    peaks = [times["peak_nbytes"] for phases in found["phases"] for times in phases.values()]
    assert set(map(type, peaks)) in ({int}, {type(None)})
    assert found["findings"][-1].startswith("peak memory: ") == (peaks[0] is not None)


@pytest.mark.processes
def test_phases_in_words(run, pool, monkeypatch, tmp_path):
    def on_ranks(function, *args, world_size, backend):
        assert backend == "ringcoll"
        return pool(world_size, backend).run(function, *args)[0]

    monkeypatch.setattr(measuring, "on_ranks", on_ranks)
    path = tmp_path / "picture.json"
    words = ("-k", "2", "-n", "3", "-w", "0", "--algorithm", "ring", "-o", str(path))
    result = run("trace", "per-parameter", *words)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("per-parameter trains a perceptron with sgd on 2 ranks over ")
    assert lines[0].endswith(", 3 steps after 0")
    (header,) = [line for line in lines if line.startswith("rank  ")]
    assert header.split()[:4] == ["rank", "phase", "times", "total"]
    rows = [line.split()[:3] for line in lines if line[:2] in ("0 ", "1 ")]
    phases = ["step", "forward", "backward", "average", "update", "total"]
    assert [row[:2] for row in rows] == [[rank, name] for rank in "01" for name in phases]
    assert [row[2] for row in rows] == ["3", "3", "3", "3", "3", "15"] * 2
    assert f"Wrote {path}" in result.stdout
    algorithms = {
        event["args"]["algorithm"]
        for event in json.loads(path.read_text())["traceEvents"]
        if event.get("cat") == "operation"
    }
    assert algorithms == {"ring"}


@pytest.mark.parametrize(
    "words, complaint",
    [
        (("all_reduce", "--root", "0"), "all_reduce has no root"),
        (("broadcast", "-k", "2", "--root", "2"), "rank 2 is not one of 2"),
        (("all_reduce", "--algorithm", "native"), "one algorithm of ringcoll's"),
        (("all_reduce", "--algorithm", "ring,tree"), "one algorithm of ringcoll's"),
        (("all_reduce", "--algorithm", "ding"), "unknown algorithm 'ding'"),
        (("all_deduce",), "all_deduce"),
        (("nonsense",), "or a trainer: one-process, per-parameter, "),
        (("pipeline:nonsense",), "'pipeline:nonsense' is none of one-process, "),
        (("tensor", "-b", "4K"), "the trainer tensor cannot use --bytes"),
        (("bucketed", "--op", "sum"), "the trainer bucketed cannot use --op"),
        (("gossip:ring", "-d", "half"), "the trainer gossip:ring cannot use --datatype"),
        (("local-sgd", "--root", "0"), "the trainer local-sgd cannot use --root"),
        (("3d:1x1x1", "--segment-bytes", "4"), "the trainer 3d:1x1x1 cannot use --segment-bytes"),
        (("tensor", "--algorithm", "ring"), "the trainer tensor cannot use --algorithm"),
        (("bucketed", "--algorithm", "native"), "one algorithm of ringcoll's"),
        (("3d:2x2x2", "-k", "4"), "the mesh has other places"),
        (("pipeline:gpipe", "-k", "5"), "a stage would have no layer"),
        (("all_reduce", "-b", "lots"), "not a size"),
        (("all_reduce", "-o", "no/such/folder/trace.json"), "there is no folder"),
    ],
)
def test_what_cannot_be_done_is_told_at_once(run, words, complaint):
    result = run("trace", *words)
    assert result.exit_code == 2
    assert complaint in result.stderr
