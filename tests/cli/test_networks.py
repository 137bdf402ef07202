"""A network and an algorithm are named in one way in every command."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from ringcoll.lab.search import registered_times
from ringcoll.lab.simulation import simulate, topology_from_text, topology_named
from ringcoll.schedules.algorithms import schedule_of
from ringcoll.tools.cli import measuring
from ringcoll.tools.cli.networks import is_network_file, network_in
from tests.cli.conftest import Run

CLUSTER = """
# six ranks on two hosts
0 -- left 50 0.5
1 -- left 50 0.75
2 -- left 50 1
3 -- right 50 1.25
4 -- right 50 1.5
5 -> right 25 1.75
right -> 5 20 2
left -- right 12.5 5
"""
ON_NETWORKS = (
    "simulate ring",
    "search all_gather --method greedy --chunks 1",
    "explain all_reduce",
    "plot pareto all_reduce",
    "plot crossover -o c.svg",
)


@pytest.fixture
def cluster(own_folder: Path) -> Path:
    path = Path("cluster.txt")
    path.write_text(CLUSTER, encoding="utf-8")
    return path


def found(run: Run, *words: str) -> dict[str, object]:
    result = run(*words, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


def error_of(run: Run, words: str) -> str:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return str(result.stderr.splitlines()[-1])


class TestNetworks:
    @pytest.mark.slow
    @pytest.mark.parametrize("words", ON_NETWORKS)
    @pytest.mark.parametrize("network", ["--graph cluster.txt", "--topology torus:2x3"])
    def test_every_command_takes_its_ranks_from_the_network(
        self, run: Run, cluster: Path, words: str, network: str
    ) -> None:
        once = run(*words.split(), *network.split(), "--json")
        assert once.exit_code == 0, once.output
        again = run(*words.split(), *network.split(), "-k", "6", "--json")
        assert once.stdout == again.stdout

    @pytest.mark.parametrize("words", ON_NETWORKS)
    @pytest.mark.parametrize(
        "network, said",
        [
            ("--graph cluster.txt -k 8", "cluster.txt has 6 ranks (expected 6, got 8)"),
            ("--graph cluster.txt -k 5", "cluster.txt has 6 ranks (expected 6, got 5)"),
            ("--graph cluster.txt --topology ring", "give either --topology or --graph"),
            ("--graph cluster.txt --bandwidth 5", "numbers go with --topology"),
            ("--topology torus:2x3 -k 5", "torus:2x3 has 6 ranks"),
            ("--topology star", "not a topology"),
            ("--graph none.txt", "none.txt cannot be read: No such file"),
            ("--graph apart.txt", "apart.txt: the topology is not connected: no route from rank 0 to rank 2"),
            ("--graph one_way.txt", "one_way.txt: the topology is not connected: no route from rank 1 to rank 0"),
            ("--graph no_bandwidth.txt", "no_bandwidth.txt: line 2: the bandwidth is out of range (expected"),
            ("--graph no_latency.txt", "no_latency.txt: line 3: the link has no latency"),
            ("--graph empty.txt", "empty.txt: the graph has no link"),
            ("--graph binary.txt", "binary.txt cannot be read"),
            ("--graph schedule.txt", "schedule.txt: line 1: the line is no link"),
        ],
    )  # fmt: skip
    def test_bad_networks_are_one_sentence_before_any_work(
        self, run: Run, cluster: Path, words: str, network: str, said: str
    ) -> None:
        texts = {
            "apart": "0 -- 1 5 0\n2 -- 3 5 0",
            "one_way": "0 -> 1 5 0",
            "no_bandwidth": "0 -- 1 5 0\n1 -- 2 0 0",
            "no_latency": "# latencies are missing\n0 -- 1 5 0\n1 -- 2 5",
            "empty": "",
            "schedule": schedule_of("all_reduce", "ring", 6).to_text(),
        }
        for name, text in texts.items():
            Path(f"{name}.txt").write_text(text, encoding="utf-8")
        Path("binary.txt").write_bytes(b"\xff\xfe")
        error = error_of(run, f"{words} {network}")
        assert said in error
        assert error.startswith("Error: ")
        assert not Path("c.svg").exists()

    def test_a_bandwidth_without_a_network(self, run: Run) -> None:
        for words in ("--latency 3", "--bandwidth 3", "--alpha 3", "--gamma 3"):
            assert "numbers go with --topology" in error_of(run, f"explain all_reduce {words}")
        assert "give either --topology or --graph" in error_of(run, "search all_gather -k 4")

    def test_the_times_are_those_of_the_simulator(self, run: Run, cluster: Path) -> None:
        graph = topology_from_text(CLUSTER)
        told = found(run, "simulate", "tree", "--graph", str(cluster), "-b", "3M")
        seconds = simulate(schedule_of("all_reduce", "tree", 6), 3 << 20, graph).seconds
        assert told["seconds"] == pytest.approx(float(seconds), rel=1e-12)
        costly = replace(graph, alpha_s=3e-6, gamma_s_per_byte=2e-9)
        told = found(
            run,
            "simulate",
            "tree",
            "--graph",
            str(cluster),
            "-b",
            "3M",
            "--alpha",
            "3",
            "--gamma",
            "2",
        )
        seconds = simulate(schedule_of("all_reduce", "tree", 6), 3 << 20, costly).seconds
        assert told["seconds"] == pytest.approx(float(seconds), rel=1e-12)
        drawn = found(
            run,
            "plot",
            "crossover",
            "--graph",
            "cluster.txt",
            "-b",
            "1K",
            "-e",
            "4K",
            "-o",
            "c.svg",
        )
        curves = drawn["curves"]
        assert isinstance(curves, dict)
        ring = schedule_of("all_reduce", "ring", 6)
        assert curves["ring"] == [
            [nbytes, pytest.approx(float(simulate(ring, nbytes, graph).seconds), rel=1e-12)]
            for nbytes in (1024, 2048, 4096)
        ]
        assert drawn["title"] == "all_reduce on 6 ranks, cluster.txt"

    def test_numbers_of_a_topology(self, run: Run) -> None:
        words = ("--topology", "hosts:2", "-k", "4", "--bandwidth", "40", "--across-latency", "7")
        told = found(run, "explain", "all_reduce", *words, "-b", "1M")
        network = topology_named("hosts:2", 4, bandwidth=40e9, across_latency_s=7e-6)
        rows = told["simulated"]
        assert isinstance(rows, list)
        listed = {row["algorithm"] for row in told["predictions"]}  # type: ignore[attr-defined]
        assert {row["algorithm"] for row in rows} == listed
        seconds = [row["seconds"] for row in rows]
        assert seconds == sorted(seconds)
        times = registered_times("all_reduce", network, 1 << 20)
        expected = {time.algorithm: (time.seconds, time.segments) for time in times}
        plain = {row["algorithm"]: (row["seconds"], row["segments"]) for row in rows}
        assert len(plain.keys() & expected.keys()) > 5
        assert all(plain[name] == expected[name] for name in plain.keys() & expected.keys())

    @pytest.mark.slow
    def test_explain_and_pareto_print_simulated_times(self, run: Run, cluster: Path) -> None:
        times = registered_times("all_reduce", topology_from_text(CLUSTER), 1 << 20)
        for words in (["explain"], ["plot", "pareto"]):
            plain = run(*words, "all_reduce", "-k", "6").stdout
            told = run(*words, "all_reduce", "--graph", "cluster.txt").stdout
            assert told.startswith(plain)
            title, *lines = told.removeprefix(plain).strip().splitlines()
            assert title == "simulated on cluster, each in its best number of segments:"
            best = next(time for time in times if time.algorithm in plain)
            assert lines[0].split() == [f"{best.seconds * 1e6:.1f}", "us", best.algorithm]
            assert len(lines) > 5


class TestAlgorithms:
    @pytest.fixture
    def best(self, run: Run, cluster: Path) -> str:
        """A file with a schedule that is not registered, on as many ranks as the network has."""
        words = ("search", "all_reduce", "--graph", str(cluster), "--method", "greedy")
        assert run(*words, "--chunks", "1", "-o", "best.txt").exit_code == 0
        return "best.txt"

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "words",
        [
            "simulate {}",
            "show {}",
            "show {} -o best.svg",
            "show ring -k 6 --beside {} -o best.html",
            "verify {} --order",
            "verify {}",
            "export {}",
            "explain all_reduce --algorithm {}",
            "plot crossover --algorithms ring,{} -o best.svg",
        ],
    )
    def test_a_file_says_how_many_ranks(self, run: Run, best: str, words: str) -> None:
        for network in ("", " --graph cluster.txt"):
            if network and words.split(maxsplit=1)[0] not in ("simulate", "explain", "plot"):
                continue
            result = run(*(words.format(best) + network).split())
            assert result.exit_code == 0, result.output
            assert result.stdout
        if words.startswith("plot"):
            assert "best.txt</text>" in Path("best.svg").read_text(encoding="utf-8")

    @pytest.mark.parametrize("words", ["simulate {}", "explain all_reduce --algorithm {}"])
    def test_a_file_for_another_network(self, run: Run, best: str, words: str) -> None:
        Path("two.txt").write_text("0 -- 1 5 1", encoding="utf-8")
        error = error_of(run, words.format(best) + " --graph two.txt")
        assert "two.txt has 2 ranks (expected 2, got 6)" in error

    @pytest.mark.slow
    def test_a_file_is_explained_on_a_network(self, run: Run, best: str) -> None:
        told = found(
            run, "explain", "all_reduce", "--algorithm", best, "--graph", "cluster.txt", "-b", "8M"
        )
        rows = told["simulated"]
        assert isinstance(rows, list)
        name = next(row["algorithm"] for row in rows if row["algorithm"].startswith("greedy"))
        assert name in {row["algorithm"] for row in told["predictions"]}  # type: ignore[attr-defined]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "words",
        [
            "bench all_reduce -k 6 --algorithms {}",
            "bench --vs native -k 6 --algorithms {}",
            "train -k 6 --algorithms {}",
            "trace all_reduce -k 6 --algorithm {}",
        ],
    )
    def test_where_ranks_are_started_a_file_goes_to_them(
        self, run: Run, best: str, monkeypatch: pytest.MonkeyPatch, words: str
    ) -> None:
        class StartedError(Exception):
            pass

        def on_ranks(function: object, request: object, **settings: object) -> None:
            raise StartedError(repr(request))

        monkeypatch.setattr(measuring, "on_ranks", on_ranks)
        with pytest.raises(StartedError, match=str(Path(best).absolute())):
            run(*words.format(best).split())

    @pytest.mark.processes
    def test_a_traced_file_is_played(self, run: Run, cluster: Path) -> None:
        assert (
            run("export", "linear", "-k", "2", "--format", "text", "-o", "mine.txt").exit_code == 0
        )
        Path("mine.txt").write_text(Path("mine.txt").read_text().replace("linear", "mine"))
        words = ("-k", "2", "-b", "1K", "--algorithm", "mine.txt", "-n", "1", "-o", "mine.html")
        assert run("trace", "all_reduce", *words).exit_code == 0
        assert "mine all_reduce" in Path("mine.html").read_text(encoding="utf-8")

    def test_tune_says_where_a_file_may_stand(self, run: Run, best: str) -> None:
        error = error_of(run, f"tune -k 6 --algorithms {best} -o t.json")
        assert "RINGCOLL_ALGORITHM='all_reduce:1M-inf:best.txt'" in error


class TestShow:
    def test_a_table_of_links(self, run: Run, cluster: Path) -> None:
        lines = [line.split() for line in run("show", "cluster.txt").stdout.splitlines()]
        assert lines[0] == ["link", "GB/s", "us"]
        assert ["1", "--", "left", "50", "0.75"] in lines
        assert ["5", "->", "right", "25", "1.75"] in lines
        assert ["right", "->", "5", "20", "2"] in lines
        assert len(lines) == 9
        data = found(run, "show", "cluster.txt")
        assert (data["network"], data["world_size"]) == ("cluster", 6)
        assert isinstance(data["links"], dict)
        assert data["links"]["left -- right"] == [12.5, 5.0]

    @pytest.mark.parametrize("ending", ["svg", "html"])
    def test_a_picture(self, run: Run, cluster: Path, ending: str) -> None:
        path = Path(f"c.{ending}")
        assert run("show", "cluster.txt", "-o", str(path)).stdout == f"{path.resolve()}\n"
        text = path.read_text(encoding="utf-8")
        picture = ET.fromstring(text[text.index("<svg") :])  # ours
        said = [node.text for node in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert {"left", "right", *map(str, range(6))} <= {*said}
        assert said.count("50 GB/s") == 5
        assert said.count("12.5 GB/s") == said.count("5 us") == 1

    def test_a_picture_of_pixels(self, run: Run, cluster: Path) -> None:
        pytest.importorskip("typst")
        assert run("show", "cluster.txt", "-o", "c.png").exit_code == 0
        assert Path("c.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        "words, said",
        [
            ("cluster.txt all_reduce", "which goes with --output and --json only"),
            ("cluster.txt --grid -o c.svg", "which goes with --output and --json only"),
            ("cluster.txt -k 6", "which goes with --output and --json only"),
            ("cluster.txt -o c.gif", "a network does not move"),
            ("wrong.txt", "wrong.txt: line 2: the bandwidth is out of range"),
            ("wide.txt -o c.svg", "too many ranks to draw (expected at most 64, got 65)"),
        ],
    )
    def test_what_cannot_be_shown(self, run: Run, cluster: Path, words: str, said: str) -> None:
        Path("wrong.txt").write_text("0 -- 1 5 0\n1 -- 2 0 0", encoding="utf-8")
        Path("wide.txt").write_text("\n".join(f"{k} -- hub 1 1" for k in range(65)))
        assert said in error_of(run, f"show {words}")
        assert not Path("c.svg").exists()

    def test_networks_and_schedules_are_told_apart_by_what_they_hold(
        self, own_folder: Path
    ) -> None:
        texts = {
            "graph": CLUSTER,
            "arrow": "  a->1 5 0\n1->0 1 1\n",
            "schedule": schedule_of("all_reduce", "ring", 3).to_text(),
            "xml": "<algo>\n0 -- 1 5 0\n",
            "comment": "# 0 -- 1 5 0\n",
            "none": "",
        }
        for name, text in texts.items():
            Path(f"{name}.txt").write_text(text, encoding="utf-8")
        Path("folder.txt").mkdir()
        Path("graph.xml").write_text(CLUSTER, encoding="utf-8")
        names = [*texts, "folder", "not_there"]
        assert [name for name in names if is_network_file(f"{name}.txt")] == ["graph", "arrow"]
        assert not is_network_file("graph.xml")
        assert not is_network_file("~no_such_user/graph.txt")
        assert network_in(Path("graph.txt")).world_size == 6
