"""Drawing one algorithm."""

import html
import json
import re
import struct
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageSequence

from ringcoll.lab.pictures import grid_picture, moving_picture, player_page, steps_picture
from ringcoll.lab.simulation import simulate, topology_named
from ringcoll.runtime.machine import json_text
from ringcoll.schedules import Schedule, grid
from ringcoll.schedules.algorithms import find, on_hosts, schedule_of
from ringcoll.tools.cli import show
from tests.cases.algorithms import each_on

RING = """\
ring all_reduce on 4 ranks
Ring all-reduce: a ring reduce-scatter, then a ring all-gather.

6 rounds; no algorithm needs fewer than 2. Each rank sends 1.5 vectors, the least possible. No extra memory.
No rank reduces more than 0.75 vectors, the least possible.
The order of reduction is the same on all ranks:
  chunk 0: ((x1 + x2) + x3) + x0
  chunk 1: ((x2 + x3) + x0) + x1
  chunk 2: ((x3 + x0) + x1) + x2
  chunk 3: ((x0 + x1) + x2) + x3

>r:c  send chunk c to rank r
<r:c  receive chunk c from rank r
+r:c  receive chunk c from rank r and reduce it with the own
!     behind a reduction: it completes the chunk

step  rank 0      rank 1      rank 2      rank 3
   0  >1:3 +3:2   >2:0 +0:3   >3:1 +1:0   >0:2 +2:1
   1  >1:2 +3:1   >2:3 +0:2   >3:0 +1:3   >0:1 +2:0
   2  >1:1 +3:0!  >2:2 +0:1!  >3:3 +1:2!  >0:0 +2:3!
   3  >1:0 <3:3   >2:1 <0:0   >3:2 <1:1   >0:3 <2:2
   4  >1:3 <3:2   >2:0 <0:3   >3:1 <1:0   >0:2 <2:1
   5  >1:2 <3:1   >2:3 <0:2   >3:0 <1:3   >0:1 <2:0
"""


def test_the_ring_on_four_ranks(run):
    result = run("show", "ring", "all_reduce", "-k", "4")
    assert (result.exit_code, result.stdout) == (0, RING)


@pytest.mark.parametrize(
    "words, sentences",
    [
        (
            "tree all_reduce -k 8",
            "6 rounds; no algorithm needs fewer than 3. The busiest rank sends 3 vectors; no algorithm "
            "needs less than 1.75. Round by round, the busiest rank sends or receives 6 vectors; no "
            "algorithm needs less than 1.75. No extra memory.\n"
            "No rank reduces more than 3 vectors; no algorithm needs less than 0.875.\n"
            "The order of reduction is the same on all ranks, with the operands in rank order:\n"
            "  chunk 0: ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))",
        ),
        (
            "bruck all_gather -k 5",
            "3 rounds, the fewest possible. Each rank sends 4 blocks, the least possible. No extra "
            "memory.",
        ),
        (
            "pairwise all_to_all -k 4",
            "3 rounds; no algorithm needs fewer than 2. Each rank sends 3 blocks, the least possible. "
            "No extra memory.",
        ),
        (
            "linear gather -k 4",
            "1 round, the fewest possible with 3 messages at once each way. The busiest rank sends "
            "1 block, the least possible. Round by round, the busiest rank sends or receives 3 "
            "blocks, the least possible. No extra memory.",
        ),
        (
            "dissemination barrier -k 5",
            "3 rounds, the fewest possible. Each rank sends 3 tokens; no algorithm needs less than 1. "
            "No extra memory.",
        ),
        (
            "direct all_reduce -k 9",
            "1 round, the fewest possible with 8 messages at once each way. Each rank sends 8 vectors; "
            "no algorithm needs less than 1.778. Extra memory for 9 chunks.\n"
            "No rank reduces more than 8 vectors; no algorithm needs less than 0.889.\n"
            "The order of reduction is the same on all ranks, from left to right.",
        ),
        (
            "recursive_doubling scan -k 4",
            "2 rounds, the fewest possible. The busiest rank sends 2 vectors; no algorithm needs less "
            "than 1. No extra memory.\n"
            "No rank reduces more than 2 vectors; no algorithm needs less than 0.75.\n"
            "The order of reduction is that of ranks, with the operands in rank order; on the last rank:\n"
            "  chunk 0: (x0 + x1) + (x2 + x3)",
        ),
        ("ring all_gather -k 1", "Nothing is sent."),
    ],
)
def test_costs_are_told_in_sentences(run, words, sentences):
    page = run("show", *words.split()).stdout
    assert page.split("\n\n")[1] == sentences


def primitives_of_the_ring(world_size: int) -> list[str]:
    """Table V of "Demystifying NCCL", arXiv 2507.04786."""
    return [
        "send",
        *["recvReduceSend"] * (world_size - 2),
        "recvReduceCopySend",
        *["recvCopySend"] * (world_size - 2),
        "recv",
    ]


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 13])
def test_the_program_of_the_ring_is_the_published_table(run, world_size):
    words = ("show", "ring", "all_reduce", "-k", str(world_size), "--primitives")
    for rank in {0, 1, world_size - 1}:
        lines = run(*words, "--rank", str(rank)).stdout.splitlines()
        assert lines[:2] == [f"ring all_reduce on {world_size} ranks: rank {rank}", ""]
        assert lines[2:] == [
            f"{number:4}  {word}" for number, word in enumerate(primitives_of_the_ring(world_size))
        ]
        data = json.loads(run(*words, "--rank", str(rank), "--json").stdout)
        assert data["primitives"] == primitives_of_the_ring(world_size)
        assert data["rank"] == rank


@pytest.mark.parametrize("entry, world_size", each_on(1, 5))
def test_every_algorithm_can_be_drawn(run, entry, world_size):
    words = ("show", entry.name, entry.collective, "-k", str(world_size))
    result = run(*words)
    assert result.exit_code == 0
    assert result.stdout.endswith(f"\n\n{grid(entry.schedule(world_size))}\n")
    text = run(*words, "--text").stdout
    assert Schedule.from_text(text) == entry.schedule(world_size)
    assert run(*words, "--primitives").exit_code == 0
    assert run(*words, "--program").exit_code == 0


def test_the_program_of_the_ring(run):
    """What docs/transports.md shows; each send is waited for, each message is used once."""
    lines = run("show", "ring", "all_reduce", "-k", "3", "--program").stdout.splitlines()
    assert lines[0] == "ring all_reduce on 3 ranks: rank 0, each chunk an element"
    page = (Path(__file__).parents[2] / "docs/transports.md").read_text(encoding="utf-8")
    assert "\n".join(lines[2:]) in page
    words = ["show", "ring", "all_reduce", "-k", "3", "--program", "--rank", "2", "--json"]
    program = json.loads(run(*words).stdout)["program"]
    sent, taken, asked, come = (
        [line.split()[at].strip(":") for line in program if line.startswith(start)]
        for start, at in (("send", 1), ("wait until", 2), ("receive", 1), ("wait for", 2))
    )
    assert sorted(sent) == sorted(taken)
    assert sorted(asked) == sorted(come)
    assert len(sent) == len(asked) == 4
    assert sum("complete" in line for line in program) == 1


@pytest.mark.parametrize("num_hosts", [1, 2, 3, 8])
def test_an_algorithm_for_hosts_is_drawn_on_some(run, num_hosts):
    words = ("show", "hierarchical", "all_reduce", "-k", "8", "--hosts", str(num_hosts))
    schedule = schedule_of("all_reduce", "hierarchical", 8, hosts=on_hosts(8, num_hosts))
    result = run(*words)
    assert result.exit_code == 0
    plural = "s" if num_hosts > 1 else ""
    title = f"hierarchical all_reduce on 8 ranks, {num_hosts} host{plural}"
    assert result.stdout.splitlines()[0] == title
    assert result.stdout.endswith(f"\n\n{grid(schedule)}\n")
    assert Schedule.from_text(run(*words, "--text").stdout) == schedule
    assert run(*words, "--primitives").stdout.splitlines()[0] == f"{title}: rank 0"


def test_json_agrees_with_the_schedule(run):
    data = json.loads(run("show", "tree", "reduce", "-k", "5", "--root", "3", "--json").stdout)
    schedule = schedule_of("reduce", "tree", 5, 3)
    assert data["ok"]
    assert (data["collective"], data["algorithm"]) == ("reduce", "binomial_tree")
    assert (data["world_size"], data["root"], data["num_slots"]) == (5, 3, schedule.num_slots)
    assert data["rounds"] == data["rounds_at_least"] == 3
    for rank, steps in enumerate(data["steps"]):
        assert [" ; ".join(step) for step in steps] == list(map(str, schedule.steps(rank)))


def test_only_symbols_that_occur_are_explained(run):
    page = run("show", "bruck", "all_gather").stdout
    assert "=c" in page
    assert "+r:c" not in page
    assert "completes" not in page
    assert "order" not in page


def test_the_prose_spelling_and_the_short_name_are_understood(run):
    short, full = (run("show", name, "all-reduce", "-k", "3") for name in ("tree", "binomial_tree"))
    assert short.stdout == full.stdout
    assert short.stdout.startswith("binomial_tree all_reduce on 3 ranks\n")


def test_a_wrong_algorithm_is_drawn_with_the_bad_place_marked(run, short_ring):
    result = run("show", "short_ring", "all_reduce", "-k", "3")
    assert result.exit_code == 1
    assert result.stdout.startswith("short_ring all_reduce on 3 ranks is wrong\n")
    assert result.stdout.count("**") == 2
    data = json.loads(run("show", "short_ring", "all_reduce", "-k", "3", "--json").stdout)
    assert not data["ok"]
    assert "out[" in data["error"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["rong", "all_reduce"], "unknown algorithm 'rong' for all_reduce; known: "),
        (["ring", "all_educe"], "unknown collective 'all_educe'; known: all_reduce, "),
        (["tree", "broadcast", "--root", "4"], "root 4 is not in a world of 4 ranks"),
        (["ring", "all_reduce", "--root", "0"], "all_reduce has no root"),
        (["ring", "all_reduce", "--primitives", "--rank", "4"], "rank 4 is not in a world of 4"),
        (["ring", "all_reduce", "--rank", "1"], "--rank goes with --primitives and --program"),
        (["ring", "all_reduce", "--program", "--rank", "4"], "--rank: rank 4 is not in ring"),
        (["ring", "all_reduce", "--program", "--text"], "--program goes with neither"),
        (["ring", "all_reduce", "--text", "--json"], "--text goes with neither"),
        (["ring", "all_reduce", "-k", "0"], "Invalid value for '-k' / '--world-size'"),
        (["ring", "all_reduce", "--hosts", "2"], "ring all_reduce is the same on any number of"),
        (
            ["ring", "all_reduce", "--ranks", "2-4"],
            "--ranks: rank 4 is not in ring all_reduce on 4",
        ),
        (["ring", "all_reduce", "--ranks", "1", "--text"], "--ranks goes with the grid"),
        (["ring", "all_reduce", "--ranks", "a"], "Invalid value for '--ranks': 'a' is neither"),
        ([], "Missing argument 'ALGORITHM'"),
    ],
)
def test_errors_are_one_clear_line(run, words, message):
    result = run("show", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"Error: {message}")


def test_some_ranks_of_a_long_grid(run):
    page = run("show", "ring", "all_reduce", "-k", "16", "--ranks", "0-1,15").stdout
    full = grid(schedule_of("all_reduce", "ring", 16)).splitlines()
    drawn = page[page.index("\nstep") + 1 :].splitlines()
    assert drawn[0].split() == ["step", "rank", "0", "rank", "1", "rank", "15"]
    assert len(drawn) == len(full) == 31
    for line, whole in zip(drawn[1:], full[1:], strict=True):
        assert line.split() == [*whole.split()[:5], *whole.split()[-2:]]  # two operations a cell


def test_a_terminal_that_is_too_narrow_gets_a_hint(run, monkeypatch):
    words = ("show", "ring", "all_reduce", "-k", "16")
    assert "--ranks" not in run(*words).stdout
    monkeypatch.setattr(show, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert "--ranks 0-3 draws some" in run(*words).stdout
    assert "--ranks" not in run(*words, "--ranks", "0-3").stdout


def test_an_algorithm_of_the_user(run, star):
    for reference in (f"{star}:star", "star:star", str(Path.cwd() / "star.py:star")):
        assert run("show", reference, "all_reduce").stdout.startswith("star all_reduce on 4 ranks")
    result = run("show", f"{star}:star", "reduce")
    assert result.stderr == f"Error: '{star}:star' is for all_reduce, and not for reduce\n"


def test_a_restricted_size_names_the_restriction(run, only_powers):
    result = run("show", "only_powers", "all_gather", "-k", "6")
    assert result.exit_code == 2
    assert result.stderr == (
        "Error: only_powers all_gather cannot run on 6 ranks: it halves the world\n"
    )


# --- pictures -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ring.svg", "ring.html", "ring.png", "ring.pdf", "RING.SVG"])
def test_a_picture_is_written(run, tmp_path, name):
    path = tmp_path / name
    result = run("show", "ring", "all_reduce", "-k", "3", "-o", str(path))
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    content = path.read_bytes()
    picture = steps_picture(schedule_of("all_reduce", "ring", 3)).encode()
    match path.suffix.lower():
        case ".svg":
            assert content == picture
        case ".html":
            page = player_page(
                schedule_of("all_reduce", "ring", 3), settings={"at": 0, "playing": 0}
            )
            assert content.decode() == page
        case ".pdf":
            assert content.startswith(b"%PDF-")
            assert b"%%EOF" in content[-8:]
        case _:
            assert content.startswith(b"\x89PNG")
            width, height = struct.unpack(">II", content[16:24])
            assert f'width="{width}" height="{height}"'.encode() in picture


def test_the_grid_as_a_picture(run, short_ring, tmp_path):
    path, ring = tmp_path / "grid.svg", schedule_of("all_reduce", "ring", 3)
    result = run("show", "ring", "all_reduce", "-k", "3", "--grid", "-o", str(path))
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    content = path.read_text(encoding="utf-8")
    assert content == grid_picture(ring)
    shown = [words for words in re.findall(r">([^<>\n]+)</text>", content) if words]
    drawn = [html.unescape(words) for words in shown[1:]]  # behind the title
    assert drawn == grid(ring).split()
    result = run("show", "short_ring", "all_reduce", "-k", "3", "--grid", "-o", str(path))
    assert result.exit_code == 1
    assert "ends wrong" in path.read_text(encoding="utf-8")
    assert (
        path.read_text(encoding="utf-8").count('class="badtext"') >= 2
    )  # the place, and the words


def test_a_gif_shows_every_step_and_the_end(run, tmp_path):
    path = tmp_path / "ring.gif"
    result = run("show", "ring", "all_reduce", "-k", "3", "-o", str(path))
    assert (result.exit_code, result.stdout) == (0, f"{path}\n")
    with Image.open(path) as gif:
        shown = [frame.convert("RGB").tobytes() for frame in ImageSequence.Iterator(gif)]
    assert len(shown) == 5
    assert len(set(shown)) == 5


def test_a_page_begins_where_it_is_told_to(run, tmp_path):
    path, ring = tmp_path / "page.html", schedule_of("all_reduce", "ring", 4)
    tree = schedule_of("all_reduce", "tree", 4)
    words = ("show", "ring", "all_reduce", "-k", "4", "-o", str(path))
    run(*words, "--step", "2", "--beside", "tree")
    assert path.read_text() == player_page(ring, tree, settings={"at": 2, "playing": 0})
    run(*words, "--moving")
    assert path.read_text() == player_page(ring, settings={"at": 0, "playing": 1})
    trace = simulate(ring, 4096, topology_named("ring", 4), trace=True).picture()
    (tmp_path / "trace.json").write_text(json_text(trace))
    run(*words, "--trace", str(tmp_path / "trace.json"))
    assert path.read_text() == player_page(ring, trace=trace, settings={"at": 0, "playing": 0})


def test_one_step_or_one_after_the_other(run, tmp_path):
    path, schedule = tmp_path / "tree.svg", schedule_of("all_reduce", "tree", 5)
    run("show", "tree", "all_reduce", "-k", "5", "-o", str(path), "--step", "1")
    assert path.read_text() == steps_picture(schedule, step=1)
    run("show", "tree", "all_reduce", "-k", "5", "-o", str(path), "--moving")
    assert path.read_text() == moving_picture(schedule)


def test_hosts_stand_apart(run, tmp_path):
    path, hosts = tmp_path / "hosts.svg", on_hosts(6, 3)
    run("show", "hierarchical", "all_reduce", "-k", "6", "--hosts", "3", "-o", str(path))
    schedule = find("all_reduce", "hierarchical").schedule(6, 0, hosts)
    assert path.read_text() == steps_picture(schedule, hosts=hosts)


def test_a_wrong_algorithm_is_drawn_as_far_as_it_goes(run, short_ring, tmp_path):
    path = tmp_path / "wrong.svg"
    result = run("show", "short_ring", "all_reduce", "-k", "3", "-o", str(path))
    assert result.exit_code == 1
    assert result.stdout.startswith(f"{path}\n")
    assert "ends wrong" in result.stdout
    assert 'class="badtext"' in path.read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["-o", "x.jpg"], "expected .svg, .html, .png, .pdf, .gif"),
        (["-o", "x.pdf", "--moving"], "a .pdf does not move"),
        (["-o", "x.gif", "--step", "1"], "a .gif shows all steps"),
        (
            ["-o", "x.svg", "--beside", "tree"],
            "--beside and --trace go with --output and a file .html",
        ),
        (["-o", "x.html", "--beside", "trea"], "did you mean"),
        (["-o", "x.html", "--trace", "/dev/zero"], "/dev/zero: it is no file"),
        (["-o", "x.html", "--trace", __file__], "test_show.py is not a trace"),
        (["-o", "nowhere/x.svg"], "there is no folder"),
        (["-o", "x.svg", "--text"], "--output goes with"),
        (["-o", "x.svg", "--json"], "--output goes with"),
        (["-o", "x.svg", "--ranks", "0"], "--output goes with"),
        (["-o", "x.svg", "--step", "1", "--moving"], "one step does not move"),
        (["-o", "x.svg", "--step", "9"], "there are steps 0 to 5, and 6, the end"),
        (
            ["-o", "x.svg", "-k", "100"],
            "so many ranks cannot be drawn (expected at most 64, got 100)",
        ),
        (["-o", "x.svg", "--grid", "--step", "1"], "--grid draws all steps"),
        (["-o", "x.html", "--grid"], "--grid draws all steps"),
        (["--grid"], "go with --output"),
        (["--moving"], "go with --output"),
        (["--step", "1"], "go with --output"),
    ],
)
def test_pictures_that_cannot_be_drawn(run, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    result = run("show", "ring", "all_reduce", "-k", "4", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module, ending", [("typst", "png"), ("typst", "pdf"), ("PIL", "gif")])
def test_without_what_makes_a_picture(run, tmp_path, monkeypatch, module, ending):
    monkeypatch.setitem(sys.modules, module, None)
    result = run("show", "ring", "all_reduce", "-o", str(tmp_path / f"x.{ending}"))
    assert result.exit_code == 2
    assert "pip install 'ringcoll[pictures]'" in result.stderr
    assert not list(tmp_path.iterdir())
