"""Pictures of schedules: what is drawn is what the schedule does, for every algorithm."""

from __future__ import annotations

import base64
import math
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.lab.pictures import (
    MOST_RANKS,
    Film,
    film,
    moving_picture,
    step_pictures,
    steps_picture,
)
from ringcoll.lab.pictures.step_pictures import DrawnMessage, Scenery
from ringcoll.lab.pictures.svg import layout_of, network_layout, width_of
from ringcoll.lab.simulation import topology_named
from ringcoll.schedules import (
    Program,
    Schedule,
    Send,
    Step,
    contract,
    inp,
    out,
    recv,
    recv_reduce,
    send,
)
from ringcoll.schedules.algorithms import Algorithm, algorithms, on_hosts, schedule_of

SVG = "{http://www.w3.org/2000/svg}"
EVERY = [
    pytest.param(entry, world_size, id=f"{entry.collective}-{entry.name}-{world_size}")
    for entry in algorithms()
    for world_size in (1, 2, 3, 5, 8)
    if not entry.restriction(world_size)
]


def drawn(entry: Algorithm, world_size: int) -> Schedule:
    return entry.schedule(world_size, 0, on_hosts(world_size, 2 if world_size > 1 else 1))


def of_class(picture: str, tag: str, name: str) -> list[ET.Element]:
    root = ET.fromstring(picture)  # it is ours
    return [node for node in root.iter(f"{SVG}{tag}") if node.get("class") == name]


@pytest.mark.slow
@pytest.mark.parametrize("entry, world_size", EVERY)
def test_every_message_is_an_arrow_and_every_end_is_complete(
    entry: Algorithm, world_size: int
) -> None:
    schedule = drawn(entry, world_size)
    scenes = film(schedule)
    sends = sum(
        isinstance(operation, Send)
        for rank in range(world_size)
        for step in schedule.steps(rank)
        for operation in step
    )
    assert scenes.failure is None
    assert sum(map(len, scenes.messages)) == sends
    picture = steps_picture(scenes)
    arrows = of_class(picture, "path", "add") + of_class(picture, "path", "move")
    in_text = len({message.is_reduced for step in scenes.messages for message in step})
    assert len(arrows) == sends + in_text
    rules = contract(schedule.collective)
    per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
    for rank, held in enumerate(scenes.held[-1]):
        for block in rules.outputs(rank, world_size, schedule.root):
            owner = rules.owner(block, world_size, schedule.root)
            for chunk in range(block * per_block, (block + 1) * per_block):
                wanted = (
                    set(range(rules.contributors(rank, world_size))) if rules.reduces else {owner}
                )
                # In an exscan, a rank may also keep what it has sent, with its own vector.
                own = {rank} if schedule.collective == "exscan" else set()
                assert wanted <= held[chunk] <= wanted | own


@pytest.mark.slow
@pytest.mark.parametrize("entry, world_size", EVERY)
def test_what_a_rank_holds_has_come_to_it(entry: Algorithm, world_size: int) -> None:
    """A rank only gets contributions that a sender of a step has had; parts may wait beside each other."""
    scenes = film(drawn(entry, world_size))
    known = [{chunk: set(ranks) for chunk, ranks in held.items()} for held in scenes.held[0]]
    for number, messages in enumerate(scenes.messages):
        sent = [
            (message.target, chunk, scenes.held[number][message.source][chunk])
            for message in messages
            for chunk in message.chunks
        ]
        for target, chunk, ranks in sent:
            known[target].setdefault(chunk, set()).update(ranks)
        for rank, held in enumerate(scenes.held[number + 1]):
            for chunk, ranks in held.items():
                assert ranks <= known[rank][chunk], (number, rank, chunk)


@pytest.mark.parametrize("entry, world_size", EVERY)
def test_no_card_hides_another(entry: Algorithm, world_size: int) -> None:
    for hosts in (None, on_hosts(world_size, 2) if world_size > 1 else None):
        scenery = Scenery(film(drawn(entry, world_size)), hosts)
        wide, high = scenery.card
        for first, second in combinations(scenery.places, 2):
            apart = first - second
            assert abs(apart.real) > wide or abs(apart.imag) > high
        for place in scenery.places:
            assert wide / 2 - 0.01 <= place.real <= scenery.width - wide / 2 + 0.01
            assert high / 2 - 0.01 <= place.imag <= scenery.height - high / 2 + 0.01


def test_the_ring_in_numbers() -> None:
    scenes = film(schedule_of("all_reduce", "ring", 3))
    assert scenes.messages[0] == (
        DrawnMessage(0, 1, (2,), True),
        DrawnMessage(1, 2, (0,), True),
        DrawnMessage(2, 0, (1,), True),
    )
    assert [len(step) for step in scenes.messages] == [3] * 4
    assert [message.is_reduced for step in scenes.messages for message in step] == [True] * 6 + [
        False
    ] * 6
    assert scenes.held[1][1] == {0: {1}, 1: {1}, 2: {0, 1}}
    picture = steps_picture(schedule_of("all_reduce", "ring", 3))
    texts = [node.text for node in ET.fromstring(picture).iter(f"{SVG}text")]  # ours
    assert texts[0] == "ring all_reduce on 3 ranks"
    captions = [text for text in texts if text and text.startswith("step")]
    assert captions == [f"step {n}: 3 messages, {'added' if n < 2 else 'copied'}" for n in range(4)]
    assert texts.count("done") == 1
    assert texts.count("+2") == 2
    titles = [node.text for node in ET.fromstring(picture).iter(f"{SVG}title")]  # ours
    assert titles.count("rank 0 to rank 1: chunks 2") == 2, "added in step 0, copied in step 3"


@pytest.mark.parametrize(
    "collective, name, world_size, layout",
    [
        ("all_reduce", "ring", 4, "ring"),
        ("all_reduce", "tree", 7, "tree"),
        ("broadcast", "chain", 5, "line"),
        ("all_reduce", "recursive_doubling", 4, "hypercube"),
        ("all_reduce", "recursive_doubling", 8, "hypercube"),
        ("all_reduce", "recursive_doubling", 16, "hypercube"),
        ("all_reduce", "direct", 5, "circle"),
        ("all_reduce", "ring", 1, "ring"),
        ("all_reduce", "ring", 2, "ring"),
    ],
)
def test_the_layout_fits(collective: str, name: str, world_size: int, layout: str) -> None:
    scenes = film(schedule_of(collective, name, world_size))
    found = layout_of(world_size, scenes.links, 0)
    assert found.name == layout
    assert len(set(found.places)) == world_size


@pytest.mark.parametrize("links", [{(0, 1), (0, 2), (1, 2)}, {(1, 2), (1, 3), (2, 3)}])
def test_a_circle_beside_a_rank_without_messages_is_no_tree(links: set[tuple[int, int]]) -> None:
    assert layout_of(4, links).name == "circle"  # as many links as a tree has


def test_a_tree_stands_on_its_root_and_children_below_their_parents() -> None:
    scenes = film(schedule_of("broadcast", "tree", 13, 5))
    found = layout_of(13, scenes.links, 5)
    assert found.name == "tree"
    assert [rank for rank in range(13) if found.places[rank][1] == 0] == [5]
    for low, high in scenes.links:
        assert abs(found.places[low][1] - found.places[high][1]) == 1
    for depth in {y for _, y in found.places}:
        xs = sorted(x for x, y in found.places if y == depth)
        assert all(right - left >= 1 for left, right in pairwise(xs))


def test_ranks_of_a_host_stand_together() -> None:
    hosts = (0, 0, 0, 1, 1, 1, 2, 2, 2)
    found = layout_of(9, set(), hosts=hosts)
    assert found.name == "hosts"
    near = [
        math.dist(found.places[a], found.places[b])
        for a, b in combinations(range(9), 2)
        if hosts[a] == hosts[b]
    ]
    far = [
        math.dist(found.places[a], found.places[b])
        for a, b in combinations(range(9), 2)
        if hosts[a] != hosts[b]
    ]
    assert max(near) < min(far)


@pytest.mark.parametrize(
    "network, world_size",
    [("crossbar", 1), ("crossbar", 5), ("hosts:1", 4), ("hosts:4", 9), ("fat_tree:8:2", 64), ("dgx1", 8),
     ("dragonfly:2:4:1", 40), ("dgx_h100", 16), ("torus:4x8", 32), ("ring", 2), ("tpu_v4:4x4x4", 64)],
)  # fmt: skip
def test_nodes_of_a_network_do_not_cover_each_other(network, world_size):
    links = topology_named(network, world_size).links
    places = network_layout(world_size, [(link.source, link.target) for link in links])
    assert set(range(world_size)) <= places.keys()
    assert places.keys() == {node for link in links for node in (link.source, link.target)}
    assert min(math.dist(*pair) for pair in combinations(places.values(), 2)) > 0.3


def test_ranks_of_a_switch_lie_side_by_side_and_the_switch_before_them():
    """Ranks of even and of odd numbers have a switch each; rails reach all ranks, and lie evenly."""
    cables = [(rank, f"leaf {rank % 2}") for rank in range(8)]
    places = network_layout(8, [*cables, ("leaf 0", "core"), ("core", "leaf 1")])
    assert list(places)[:8] == [0, 2, 4, 6, 1, 3, 5, 7]
    for leaf in range(2):
        near = sorted(range(8), key=lambda rank: math.dist(places[rank], places[f"leaf {leaf}"]))[
            :4
        ]
        assert {rank % 2 for rank in near} == {leaf}
    rails = network_layout(4, [(rank, f"rail {rail}") for rank in range(4) for rail in range(3)])
    inner = [math.hypot(*rails[f"rail {rail}"]) for rail in range(3)]
    assert inner == pytest.approx([inner[0]] * 3)
    assert 0 < inner[0] < math.hypot(*rails[0])


def test_cells_are_filled_as_far_as_ranks_have_contributed() -> None:
    picture = steps_picture(schedule_of("all_reduce", "ring", 4), step=1)
    root = ET.fromstring(picture)  # it is ours
    heights: dict[int, set[float]] = {}
    for group in root.iter(f"{SVG}g"):
        rect, title = group.find(f"{SVG}rect"), group.find(f"{SVG}title")
        if rect is not None and title is not None:
            heights.setdefault(len(str(title.text).partition("ranks ")[2].split(", ")), set()).add(
                float(rect.get("height", 0))
            )
    assert heights == {1: {7.5}, 2: {15.0}}, "of 30, for 4 ranks"


@pytest.mark.parametrize("step", [-1, 7, 100])
def test_there_is_no_such_step(step: int) -> None:
    with pytest.raises(ArgumentError, match=r"argument 'step': no such step \(expected 0 to 6"):
        steps_picture(schedule_of("all_reduce", "ring", 4), step=step)


def test_too_many_ranks_and_steps_are_said_before_any_work() -> None:
    with pytest.raises(
        ArgumentError, match=r"so many ranks cannot be drawn .expected at most 64, got 65"
    ):
        steps_picture(schedule_of("all_reduce", "ring", MOST_RANKS + 1))
    with pytest.raises(ArgumentError, match="so many steps cannot be drawn"):
        film(Schedule("barrier", "long", 1, 1, 0, lambda rank: iter([Step()] * 600)))


# --- schedules that are wrong -------------------------------------------------------------


def wrong(program: object) -> Film:
    return film(Schedule("all_reduce", "wrong", 2, 1, 0, program))  # type: ignore[arg-type]


def never_received(rank: int) -> Program:
    yield Step(send(1 - rank, inp(0)), recv_reduce(1 - rank, out(0), inp(0)))
    yield Step(send(0, out(0))) if rank else Step()


def twice(rank: int) -> Program:
    for number in range(2):
        yield Step(
            send(1 - rank, inp(0)), recv_reduce(1 - rank, out(0), out(0) if number else inp(0))
        )


def nothing(rank: int) -> Program:
    yield Step()


def raises(rank: int) -> Program:
    yield Step(send(1 - rank, inp(0)), recv(1 - rank, out(0)))
    raise ZeroDivisionError("of the user")


@pytest.mark.parametrize(
    "program, words, held",
    [
        (never_received, "the message is never received", 2),
        (twice, "out[0] ends wrong", 3),
        (nothing, "out[0] ends wrong", 2),
        (raises, "the program raised ZeroDivisionError: of the user", 2),
    ],
)
def test_a_wrong_schedule_is_drawn_as_far_as_it_goes(
    program: object, words: str, held: int
) -> None:
    scenes = wrong(program)
    assert scenes.failure is not None
    assert words in scenes.failure.message
    assert len(scenes.held) == held
    for picture in (steps_picture(scenes), moving_picture(scenes)):
        (bad,) = of_class(picture, "rect", "bad")
        assert bad is not None
        (said,) = of_class(picture, "text", "badtext")
        assert words in str(said.text)
        assert ">wrong</text>" in picture


ODD = {
    "a rank that is not there": Step(send(7, inp(0))),
    "a negative rank": Step(send(-1, inp(0))),
    "the rank itself": Step(send(0, inp(0)), recv(0, out(0))),
    "a rank that is no number": Step(send("one", inp(0))),  # type: ignore[arg-type]
    "a receive from nowhere": Step(recv(9, out(0))),
    "no reference": Step(send(1, 0)),  # type: ignore[arg-type]
    "a chunk that is not there": Step(send(1, inp(5))),
    "no operation": Step("send"),  # type: ignore[arg-type]
    "no step": (send(1, inp(0)),),
    "nothing at all": None,
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("late", [False, True])
def test_odd_steps_are_drawn_as_far_as_they_go(name: str, late: bool) -> None:
    def program(rank: int) -> Program:
        if late:
            yield Step()
        yield ODD[name] if rank == 0 else Step()  # type: ignore[misc]

    scenes = wrong(program)
    assert scenes.failure is not None
    assert scenes.failure.step in (int(late), None)
    for picture in (steps_picture(scenes), moving_picture(scenes), steps_picture(scenes, step=0)):
        ET.fromstring(picture)
    assert len(of_class(steps_picture(scenes), "text", "badtext")) == 1


def test_a_program_without_an_end_and_one_that_is_none() -> None:
    def endless(rank: int) -> Program:
        while True:
            yield Step()

    with pytest.raises(ArgumentError, match="so many steps cannot be drawn"):
        wrong(endless)
    scenes = wrong(lambda rank: 5)
    assert scenes.failure is not None
    assert "TypeError" in scenes.failure.message
    assert len(of_class(steps_picture(scenes), "text", "badtext")) == 1


def test_a_right_schedule_has_no_bad_place() -> None:
    assert not of_class(steps_picture(schedule_of("all_reduce", "ring", 2)), "rect", "bad")


# --- pictures that move -------------------------------------------------------------------


def test_one_scene_a_step_and_the_end_where_nothing_moves() -> None:
    picture = moving_picture(schedule_of("all_reduce", "ring", 4))
    scenes = of_class(picture, "g", "scene")
    assert len(scenes) == 6 + 1
    style = next(ET.fromstring(picture).iter(f"{SVG}style")).text or ""  # it is ours
    assert ".scene { opacity: 0;" in style
    assert "#scene6 { opacity: 1 }" in style
    assert "prefers-reduced-motion: reduce" in style
    delays = [line for line in style.splitlines() if "animation-delay" in line]
    assert [line.partition("animation-delay: ")[2] for line in delays] == [
        f"{-1.6 * left:.1f}s }}" for left in range(7, 0, -1)
    ]
    parcels = of_class(picture, "rect", "parcel")
    assert len(parcels) == 6 * 4
    paths = {node.get("d") for kind in ("add", "move") for node in of_class(picture, "path", kind)}
    for parcel in parcels:
        style_of = parcel.get("style") or ""
        assert style_of.partition("'")[2].rstrip("')") in paths, "a parcel moves along its arrow"


def test_pictures_have_words_for_who_does_not_see_them() -> None:
    root = ET.fromstring(steps_picture(schedule_of("all_gather", "ring", 3)))  # ours
    assert root.get("role") == "img"
    assert root.get("aria-label") == "ring all_gather on 3 ranks"
    assert root.find(f"{SVG}title") is not None


def test_names_are_escaped_and_titles_have_room() -> None:
    schedule = Schedule("barrier", "<a&b>" * 20, 1, 1, 0, lambda rank: iter([Step()]))
    picture = steps_picture(schedule)
    root = ET.fromstring(picture)  # it is ours
    assert float(root.get("width", 0)) >= width_of("<a&b>" * 20)


def test_a_notebook_shows_it_as_an_image() -> None:
    picture = moving_picture(schedule_of("all_reduce", "tree", 3))
    before, _, rest = picture._repr_html_().partition("base64,")
    assert before == '<img src="data:image/svg+xml;'
    assert base64.b64decode(rest.partition('"')[0]).decode() == picture


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_that_is_written_has_room(world_size: int) -> None:
    for draw in (steps_picture, moving_picture):
        root = ET.fromstring(draw(schedule_of("all_reduce", "ring", world_size)))  # ours
        width = float(root.get("width", 0))
        foot = [node for node in root.iter(f"{SVG}text") if node.get("text-anchor") == "start"]
        for node in foot:
            assert float(node.get("x", 0)) + width_of(node.text or "", 18) <= width


@pytest.mark.parametrize("towards", [(8, 0), (0, 8), (-8, 0), (0, -8), (3, 4), (-6, 8), (5, -12)])
def test_arrows_there_and_back_lie_apart(towards: tuple[int, int]) -> None:
    """Each is bent to its left, by a tenth of its length; a larger y is further down."""
    begin = complex(100.0, 50.0)
    end = begin + 30 * complex(*towards)
    scenery: Any = SimpleNamespace(places=[begin, end], _edge=lambda centre, to, beyond: centre)
    there = Scenery.way(scenery, DrawnMessage(0, 1, (0,), False))
    back = Scenery.way(scenery, DrawnMessage(1, 0, (0,), False))
    x, y = towards
    for way, sign in ((there, 1), (back, -1)):
        off = way[1] - (begin + end) / 2
        assert (off.real, off.imag) == pytest.approx((sign * 0.1 * 30 * y, -sign * 0.1 * 30 * x))
        assert abs(off) == pytest.approx(0.1 * 30 * math.hypot(x, y))


@pytest.mark.parametrize("world_size, rows", [(2, 1), (3, 2), (4, 3), (7, 4)])
def test_a_page_is_as_high_as_its_rows(world_size: int, rows: int) -> None:
    """Of 3, 5, 7 and 13 pictures, 3 or, of many, 4 stand beside each other."""
    schedule = schedule_of("all_reduce", "ring", world_size)

    def height(picture: str) -> float:
        return float(ET.fromstring(picture).attrib["height"])  # ours

    row = Scenery(film(schedule)).height + step_pictures._LINE + step_pictures._GAP
    first, whole = height(steps_picture(schedule, step=0)), height(steps_picture(schedule))
    assert whole - first == pytest.approx((rows - 1) * row, abs=1)
