"""The page that plays schedules, in a browser: every control, what it shows, and what it says of wrong schedules."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from PIL import Image, ImageChops, ImageStat

from ringcoll.lab.pictures import film, player_page
from ringcoll.lab.simulation import simulate, topology_named
from ringcoll.schedules import Schedule, Step, Written
from ringcoll.schedules.algorithms import algorithms, on_hosts, register, schedule_of, unregister
from tests.player.conftest import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
DOCS = ROOT / "docs"
MOST_BYTES = 700 * 1024
STEP = "#stages section:nth-of-type(1) .step"
SECOND = "#stages section:nth-of-type(2) .step"
PROOF = "#stages section:nth-of-type(1) .proof"
CELLS = "#stages section:nth-of-type(1) .cells canvas"
TIMES = "#stages section:nth-of-type(1) .timeline canvas"


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    path = tmp_path_factory.mktemp("pages") / "ring.html"
    ring, tree = (schedule_of("all_reduce", name, 4) for name in ("ring", "tree"))
    path.write_text(player_page(ring, tree), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def nobody_complains(browser):
    yield
    assert browser("complaints") == []


def page_of(tmp_path, *played, **settings):
    path = tmp_path / "page.html"
    path.write_text(player_page(*played, **settings), encoding="utf-8")
    assert path.stat().st_size <= MOST_BYTES
    return path


def at(browser):
    return browser("text", on="#now")


def seconds_of(browser, stage=1):
    """What the picture of time says that the model takes."""
    label = browser(
        "attribute", on=f"#stages section:nth-of-type({stage}) .timeline canvas", name="aria-label"
    )
    ((number, unit),) = re.findall(r"model ([\d.]+) (\w+)", label)
    return float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]


def test_buttons_step_through(browser, ring):
    browser("open", path=str(ring))
    assert browser("texts", on="h2")[:2] == [
        "ring all_reduce, 4 ranks",
        "binomial_tree all_reduce, 4 ranks",
    ]
    assert browser("text", on=PROOF).startswith(
        "Proved. 6 rounds; no algorithm needs fewer than 2. Each rank sends 1.5 vectors, the least possible."
    )
    assert at(browser) == "step 0 of 0 to 5"
    assert browser("text", on=STEP) == (
        "Step 0, of 0 to 5: 4 messages. Rank 0 sends chunk 3 to rank 1, which adds it. "
        "Rank 1 sends chunk 0 to rank 2, which adds it. Rank 2 sends chunk 1 to rank 3, which adds it. "
        "Rank 3 sends chunk 2 to rank 0, which adds it."
    )
    browser("click", on="#forth")
    assert at(browser) == "step 1 of 0 to 5"
    browser("click", on="#last")
    assert at(browser) == "the end"
    assert browser("text", on=STEP) == "Done, after 6 steps. Every rank has what it was promised."
    browser("click", on="#back")
    assert at(browser) == "step 5 of 0 to 5"
    # The tree has four steps, on the same clock.
    assert browser("text", on=SECOND) == "Done, after 4 steps. Every rank has what it was promised."
    browser("click", on="#first")
    assert at(browser) == "step 0 of 0 to 5"


def test_keys_do_what_buttons_do(browser, ring):
    browser("open", path=str(ring))
    for key, then in [("ArrowRight", "step 1 of 0 to 5"), ("End", "the end"), ("ArrowLeft", "step 5 of 0 to 5"),
                      ("Home", "step 0 of 0 to 5")]:  # fmt: skip
        browser("press", key=key)
        assert at(browser) == then
    browser("press", key=" ")
    assert browser("text", on="#play") == "Pause"
    browser("wait", code="!document.getElementById('now').textContent.startsWith('step 0')")
    browser("press", key=" ")
    assert browser("text", on="#play") == "Play"


def test_all_controls_are_reached_by_the_keyboard_alone(browser, ring):
    browser("open", path=str(ring))
    reached = []
    for _ in range(40):
        browser("press", key="Tab")
        reached.append(browser("focused"))
    wanted = ["first", "back", "play", "forth", "last", "scrub", "clock", "speed", "alpha", "bandwidth",
              "reduction", "nbytes", "slow", "dead", "fault"]  # fmt: skip
    places = [reached.index(name) for name in wanted]
    assert places == sorted(places)
    assert "CANVAS" in reached


def test_it_plays_to_the_end_and_again(browser, ring):
    browser("open", path=str(ring), hash="#at=5")
    browser("select", on="#speed", value="8")
    browser("click", on="#play")
    browser("wait", code="document.getElementById('now').textContent === 'the end'")
    assert browser("text", on="#play") == "Play"
    browser("select", on="#speed", value="1")
    browser("click", on="#play")
    browser("wait", code="document.getElementById('now').textContent.match(/^step [1-5]/)")
    browser("click", on="#play")


def test_without_motion_whole_steps_are_shown(browser, ring):
    browser("open", path=str(ring), still=True)
    browser("select", on="#speed", value="2")
    browser("click", on="#play")
    browser("wait", code="document.getElementById('now').textContent === 'step 3 of 0 to 5'")
    assert browser("count", on=".network rect") == 0  # no parcel is on its way
    browser("click", on="#play")


def test_scrubbing_and_dragging(browser, ring):
    browser("open", path=str(ring))
    browser("slide", on="#scrub", value=500)
    assert at(browser) == "step 3 of 0 to 5"
    browser("pointer", on=TIMES, x=100, y=40, drag=200)
    assert browser("value", on="#clock") == "time"
    assert re.fullmatch(r"[\d.]+ us of [\d.]+ us", at(browser))


def test_a_touch_steps_and_fits_a_phone(browser, ring):
    browser("open", path=str(ring), width=390, height=800, touch=True)
    browser("tap", on="#forth")
    assert at(browser) == "step 1 of 0 to 5"
    assert browser("evaluate", code="document.documentElement.scrollWidth") <= 390
    small = browser("evaluate", code="[...document.querySelectorAll('button, select')].filter((node) => "
                    "node.offsetParent && node.getBoundingClientRect().height < 44).length")  # fmt: skip
    assert small == 0


def test_arrows_are_the_messages_of_the_step(browser, ring):
    browser("open", path=str(ring), hash="#at=3.5")
    titles = browser("texts", on="#stages section:nth-of-type(1) .network .move title")
    assert titles == [
        f"Rank {rank} sends chunk {rank} to rank {(rank + 1) % 4}." for rank in range(4)
    ]
    assert browser("count", on="#stages section:nth-of-type(1) .network .add") == 0
    assert browser("count", on="#stages section:nth-of-type(1) .network rect") == 4


def test_links_say_what_they_have_carried(browser, ring):
    browser("open", path=str(ring), hash="#at=2")
    assert browser("texts", on="#stages section:nth-of-type(1) .load title") == [
        f"rank {rank} to rank {(rank + 1) % 4}: 2 messages, 2 chunks" for rank in range(4)
    ]


def test_provenance_by_pointer_and_by_keys(browser, ring):
    browser("open", path=str(ring), hash="#at=2")
    browser("pointer", on=CELLS, x=34 + 3 * 52 + 10, y=34 + 2 * 52 + 10)  # rank 2, chunk 3
    said = browser("text", on="#cell")
    assert said == "Rank 2 has of chunk 3 the contributions of ranks 0-2: 3 of 4."
    browser("click", on="#last")
    assert browser("text", on="#cell") == (
        "Rank 2 has of chunk 3 the contributions of ranks 0-3: 4 of 4. "
        "Order of summation: ((x0 + x1) + x2) + x3."
    )
    browser("evaluate", code=f"document.querySelector({CELLS!r}).focus()")
    browser("press", key="ArrowUp")
    assert browser("text", on="#cell").startswith("Rank 1 has of chunk 3 ")
    assert at(browser) == "the end"  # the arrow keys chose a cell, and no step


@pytest.mark.parametrize(
    "name", ["ring", "recursive_doubling", "tree", "rabenseifner", "circulant"]
)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_times_are_those_of_the_simulator(browser, tmp_path, name, world_size):
    schedule = schedule_of("all_reduce", name, world_size)
    path = page_of(tmp_path, schedule)
    for alpha_us, rate, reduction, nbytes in [(1.0, 10.0, 100.0, 1 << 20), (50.0, 1.0, 1.0, 4096)]:
        words = f"#alpha={alpha_us}&bandwidth={rate}&reduction={reduction}&nbytes={nbytes}"
        browser("open", path=str(path), hash=words)
        network = topology_named(
            "crossbar", world_size, bandwidth=rate * 1e9, latency_s=alpha_us * 1e-6
        )
        network = replace(network, gamma_s_per_byte=1e-9 / reduction)
        expected = float(simulate(schedule, nbytes, network).seconds)
        # The page shows three digits; a rank there takes what it adds after all of its messages.
        assert seconds_of(browser) == pytest.approx(expected, rel=0.01)


def test_sliders_move_times_and_crossings(browser, ring):
    browser("open", path=str(ring))
    before, crossing = seconds_of(browser), browser("text", on="#crossings")
    assert re.match(r"From [\d.]+ KiB on \w+ is faster than \w+\.", crossing)
    browser("slide", on="#alpha", value=3)  # ten to this power, in microseconds
    assert browser("text", on="#alpha-said") == "1 ms"
    # Six messages one after the other, instead of six times a microsecond.
    assert seconds_of(browser) - before == pytest.approx(6 * 999e-6, rel=0.01)
    assert browser("text", on="#crossings") != crossing
    browser("slide", on="#bandwidth", value=0)
    assert browser("text", on="#bandwidth-said") == "1 GB/s"
    browser("slide", on="#reduction", value=1)
    assert browser("text", on="#reduction-said") == "10 GB/s"
    browser("slide", on="#nbytes", value=6)
    assert browser("text", on="#nbytes-said") == "977 KiB"


def test_crossings_are_where_costs_are_equal(browser, tmp_path):
    ring, tree = (schedule_of("all_reduce", name, 16) for name in ("ring", "tree"))
    browser(
        "open", path=str(page_of(tmp_path, ring, tree)), hash="#alpha=1&bandwidth=10&reduction=100"
    )
    found = re.findall(
        r"From ([\d.]+) (\wi?B|KiB|MiB) on (\w+) is faster than (\w+)",
        browser("text", on="#crossings"),
    )
    assert found
    entries = {entry.name: entry.counts(16) for entry in algorithms("all_reduce") if not entry.restriction(16)
               and not entry.needs_hosts}  # fmt: skip
    for number, unit, after, before in found:
        size = float(number) * {"B": 1, "KiB": 1024, "MiB": 1 << 20}[unit]
        fast, slow = (
            cost.rounds * 1e-6
            + float(cost.traffic) * size / 10e9
            + float(cost.reduced) * size / 100e9
            for cost in (entries[after], entries[before])
        )
        assert fast == pytest.approx(slow, rel=0.01)


def test_the_address_keeps_what_is_set(browser, ring):
    browser("open", path=str(ring))
    browser("slide", on="#alpha", value=2)
    browser("select", on="#dead", value="1")
    browser("click", on="#forth")
    browser("wait", code="location.hash.includes('at=1')")
    address = browser("evaluate", code="location.hash")
    assert "alpha=100" in address
    assert "dead=1" in address
    browser("open", path=str(ring), hash=address)
    assert (at(browser), browser("value", on="#dead"), browser("text", on="#alpha-said")) == (
        "step 1 of 0 to 5", "1", "100 us",
    )  # fmt: skip


@pytest.mark.parametrize(
    "address",
    [
        "#at=nonsense&clock=moon&x=1",
        "#at=1e999",
        "#fault=99&slow=77&dead=1.5",
        "#bandwidth=0&reduction=-1&alpha=-2",
        "#__proto__=1&constructor=2",
        "#nbytes=&&=",
        "#at=-5",
    ],
)
def test_a_strange_address_does_no_harm(browser, ring, address):
    browser("open", path=str(ring), hash=address)
    assert at(browser) in ("step 0 of 0 to 5", "the end")
    assert browser("text", on="#trouble") == ""
    assert "NaN" not in browser("evaluate", code="document.getElementById('curves').innerHTML")


def test_a_slow_rank_holds_up_the_others(browser, ring):
    browser("open", path=str(ring))
    before = seconds_of(browser)
    browser("select", on="#slow", value="2")
    assert browser("value", on="#clock") == "time"
    assert (
        browser("text", on="#trouble").splitlines()[0]
        == "ring: Rank 2 takes four times as long for everything."
    )
    # Every chunk passes rank 2: each of the six steps waits for it in the end.
    assert 2 * before < seconds_of(browser) <= 4 * before * 1.01  # three digits are shown


def test_a_dead_rank_stops_those_that_wait_for_it(browser, ring):
    browser("open", path=str(ring), hash="#at=1.5")
    browser("select", on="#dead", value="1")
    assert browser("text", on="#trouble").startswith(
        "ring: Rank 1 has ended. Ranks 0, 2, 3 would wait for ever, for it or for each other."
    )
    # Rank 1 neither sends nor takes anything: of the first step two messages arrive, and of the second one does.
    assert browser("texts", on="#stages section:nth-of-type(1) .network .add title") == [
        "Rank 3 sends chunk 1 to rank 0, which adds it."
    ]
    assert browser("text", on=STEP) == (
        "Step 1, of 0 to 5: 1 of 4 messages. Rank 3 sends chunk 1 to rank 0, which adds it. "
        "The others will never arrive."
    )
    assert browser("count", on="#stages section:nth-of-type(1) .network .dead") == 1
    browser("click", on="#last")
    browser("evaluate", code=f"document.querySelector({CELLS!r}).focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown"):
        browser("press", key=key)
    assert (
        browser("text", on="#cell") == "Rank 2 has of chunk 0 the contributions of rank 2: 1 of 4."
    )


def test_a_fault_on_purpose_is_shown_with_the_words_of_the_proof(browser, ring):
    schedule = schedule_of("all_reduce", "ring", 4)
    browser("open", path=str(ring))
    faults = browser("texts", on="#fault option")
    assert faults[0] == "none"
    assert len(faults) == 10
    place = faults.index("step 0: rank 0 and rank 1 forget their message")
    browser("select", on="#fault", value=str(place))
    assert browser("text", on=PROOF) == "The proof fails."

    def forgetful(rank):
        for number, step in enumerate(Written.steps(schedule, rank)):
            peer = {0: 1, 1: 0}.get(rank) if number == 0 else None
            yield Step(*(op for op in step if getattr(op, "peer", None) != peer or peer is None))

    wrong = Schedule("all_reduce", "ring", 4, schedule.num_chunks, schedule.num_slots, forgetful)
    assert browser("text", on="#trouble") == f"ring: {film(wrong).failure}"
    browser("select", on="#dead", value="2")
    assert "The schedule is played as far as its own fault only." in browser("text", on="#trouble")
    browser("select", on="#dead", value="-1")
    browser("click", on="#last")
    assert browser("count", on=".network .bad") == 1
    browser("select", on="#fault", value="0")
    assert browser("text", on=PROOF).startswith("Proved")
    assert not browser("visible", on="#trouble")


def test_a_wrong_schedule_is_played_as_far_as_it_goes(browser, tmp_path):
    schedule = schedule_of("all_reduce", "ring", 4)

    def short(rank):
        yield from list(Written.steps(schedule, rank))[:-1]

    wrong = film(
        Schedule("all_reduce", "short <script>alert(1)</script>", 4, 4, schedule.num_slots, short)
    )
    browser("open", path=str(page_of(tmp_path, wrong)), hash="#at=99")
    assert browser("text", on=PROOF) == "The proof fails."
    assert browser("text", on="#trouble") == str(wrong.failure)
    assert browser("text", on=STEP).startswith(
        f"The proof fails: {str(wrong.failure).splitlines()[0]}"
    )
    assert browser("count", on=".network .bad") == 1
    assert not browser("visible", on="#fault")
    assert browser("text", on="h1") == "short <script>alert(1)</script> all_reduce, 4 ranks"


def test_a_simulated_run_brings_its_times_and_links(browser, tmp_path):
    schedule = schedule_of("all_reduce", "ring", 8)
    run = simulate(schedule, 1 << 16, topology_named("ring", 8), trace=True)
    browser("open", path=str(page_of(tmp_path, run)), hash="#clock=time&times=trace")
    assert browser("texts", on="#times option") == [
        "the sliders",
        f"simulated on {run.topology.name}",
    ]
    loads = run.loads()
    assert browser("texts", on="#links td:first-child") == [load.link.name for load in loads]
    assert browser("texts", on="#links td:last-child") == [
        f"{float(load.share):.0%}".replace("%", " %") for load in loads
    ]
    (shown,) = re.findall(r"of ([\d.]+) us", at(browser))
    assert float(shown) == pytest.approx(float(run.seconds) * 1e6, rel=0.01)
    assert browser("text", on="#nbytes-said") == "64 KiB"


def test_the_simulated_network_is_drawn_with_the_load_of_its_links(browser, tmp_path):
    """Two hosts, a tree: in step 1 messages go from 2 to 0 and from 6 to 4, in step 2 from 4 to 0, through the core."""
    schedule = schedule_of("all_reduce", "tree", 8)
    run = simulate(schedule, 1 << 20, topology_named("hosts:4", 8), trace=True)
    path = page_of(tmp_path, run)
    loads = {load.link.name: float(load.share) for load in run.loads()}
    for step, busy in [(0.5, 8), (1.5, 4), (2.5, 4)]:
        browser("open", path=str(path), hash=f"#at={step}")
        assert browser("count", on="#cables .busy") == busy
        used = [title.split(":")[0] for title in browser("texts", on="#cables .busy title")]
        inside = {f"{rank} -> host {rank // 4}" for rank in range(8)}
        inside |= {f"host {rank // 4} -> {rank}" for rank in range(8)}
        across = {"host 0 -> core", "core -> host 0", "host 1 -> core", "core -> host 1"}
        assert set(used) <= inside | across
        assert ("host 1 -> core" in used) == (step == 2.5) == ("core -> host 0" in used)
    texts = browser("texts", on="#cables text")
    assert texts[:8] == [str(rank) for rank in range(8)]
    assert sorted(texts[8:]) == ["core", "host 0", "host 1"]
    browser("click", on="#last")
    widths = browser(
        "evaluate",
        code="[...document.querySelectorAll('#cables .load')].map((path) =>"
        " [path.textContent.split(':')[0], Number(path.getAttribute('stroke-width'))])",
    )
    # 1.5 pixels for a link that has carried nothing, 12 for one that was full all the time.
    assert {name: (width - 1.5) / 10.5 for name, width in widths} == pytest.approx(loads)
    browser("click", on="#first")
    assert browser("attribute", on="#cables .load", name="stroke-width") == "1.5"
    assert "the network hosts of 4 ranks: 8 ranks, 3 switches" in browser(
        "attribute", on="#cables svg", name="aria-label"
    )


@pytest.mark.parametrize(
    "network, world_size",
    [("ring", 8), ("torus:4x4", 16), ("dragonfly:2:4:1", 40), ("crossbar", 64), ("dgx1", 8)],
)
def test_every_network_is_drawn_whole(browser, tmp_path, network, world_size):
    schedule = schedule_of("all_reduce", "ring", world_size)
    run = simulate(schedule, 1 << 20, topology_named(network, world_size), trace=True)
    browser("open", path=str(page_of(tmp_path, run)), hash="#at=1.5")
    assert browser("count", on="#cables path") == len(run.loads())
    nodes = {node for link in run.topology.links for node in (link.source, link.target)}
    assert browser("count", on="#cables rect") == len(nodes)
    busy = {
        run.topology.links[index].name
        for rank in range(world_size)
        for index in run.topology.route(rank, (rank + 1) % world_size)
    }
    assert {title.split(":")[0] for title in browser("texts", on="#cables .busy title")} == busy
    assert not browser("axe")


def test_a_network_that_carries_nothing_is_drawn(browser, tmp_path):
    schedule = schedule_of("all_reduce", "ring", 4)
    run = simulate(schedule, 0, topology_named("ring", 4), trace=True)
    browser("open", path=str(page_of(tmp_path, run)), hash="#at=0.5")
    assert browser("count", on="#cables rect") == 4
    assert browser("count", on="#cables path") == 0


def test_the_conditions_of_a_simulated_run_are_said(browser, tmp_path):
    schedule = schedule_of("all_reduce", "ring", 4)
    network = topology_named("crossbar", 4, bandwidth=5e9, latency_s=3e-6)
    plain = simulate(schedule, 1 << 20, network, trace=True)
    browser("open", path=str(page_of(tmp_path, plain)), hash="#clock=time")
    # The sliders begin at the costs of the network: the model says what the simulator says.
    assert seconds_of(browser) == pytest.approx(float(plain.seconds), rel=0.01)
    odd = simulate(
        schedule, 1 << 20, network, segments=2, slowness={3: 4}, late={1: 50e-6}, trace=True
    )
    browser("open", path=str(page_of(tmp_path, odd)))
    assert browser("texts", on="#times option")[1] == (
        "simulated on crossbar, in 2 segments, rank 3 4 x slower, rank 1 50 us late"
    )


def test_one_rank_has_nothing_to_send(browser, tmp_path):
    browser("open", path=str(page_of(tmp_path, schedule_of("all_reduce", "ring", 1))))
    assert browser("text", on="h1") == "ring all_reduce, 1 rank"
    assert not browser("visible", on="#curves")
    assert browser("text", on=STEP) in (
        "One rank has nothing to send.", "Done, after 0 steps. Every rank has what it was promised.",
        "Done, after 1 step. Every rank has what it was promised.",
    )  # fmt: skip


def test_algorithms_that_are_wrong_do_not_hinder_a_page_of_others(browser, tmp_path):
    @register("all_reduce", "raising")
    def raising(rank, world_size):
        yield Step()
        raise RuntimeError("on purpose")

    @register("all_reduce", "odd")
    def odd(rank, world_size):
        yield 5

    try:
        for beside in ("raising", "odd"):
            path = page_of(
                tmp_path, schedule_of("all_reduce", "ring", 4), schedule_of("all_reduce", beside, 4)
            )
            browser("open", path=str(path), hash="#at=99")
            assert browser("text", on="#stages section:nth-of-type(2) .proof") == "The proof fails."
            assert browser("texts", on="#curves .name")[0] != beside
            assert beside not in browser("text", on="#curves")
    finally:
        unregister("all_reduce", "raising")
        unregister("all_reduce", "odd")


def test_measured_times_stand_beside_the_model(browser, tmp_path):
    schedule = schedule_of("all_reduce", "ring", 4)
    trace = simulate(schedule, 1 << 20, topology_named("ring", 4), trace=True).picture()
    browser("open", path=str(page_of(tmp_path, schedule, trace=trace)))
    label = browser("attribute", on=TIMES, name="aria-label")
    assert re.fullmatch(r"Ranks over time of ring: model [\d.]+ us, measured [\d.]+ us", label)
    assert browser("text", on="#nbytes-said") == "1 MiB"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("address", ["", "#fault=2&at=2", "#dead=1&at=3"])
def test_nothing_hinders_who_does_not_see_or_point(browser, ring, dark, address):
    browser("open", path=str(ring), hash=address, dark=dark)
    assert [found for found in browser("axe") if found[1] in ("serious", "critical")] == []


LARGE = [("all_reduce", "ring"), ("all_reduce", "recursive_doubling"), ("all_reduce", "direct"),
         ("all_to_all", "bruck"), ("all_to_all", "pairwise"), ("broadcast", "binomial_tree"), ("barrier", "dissemination")]  # fmt: skip


@pytest.mark.parametrize("collective, name", LARGE)
@pytest.mark.parametrize("world_size", [3, 16, 64])
def test_of_all_sizes(browser, tmp_path, collective, name, world_size):
    if world_size == 3 and name == "recursive_doubling":
        world_size = 2
    schedule = schedule_of(collective, name, world_size)
    path = page_of(tmp_path, schedule)
    browser("open", path=str(path))
    browser("press", key="ArrowRight")
    browser("press", key="End")
    assert at(browser) == "the end"
    assert browser("count", on=".network .rank") == world_size


def test_hosts_stand_apart(browser, tmp_path):
    entry = next(entry for entry in algorithms("all_reduce") if entry.name == "hierarchical")
    hosts = on_hosts(8, 2)
    browser("open", path=str(page_of(tmp_path, entry.schedule(8, 0, hosts), hosts=hosts)))
    assert (
        browser("attribute", on=".network svg", name="aria-label")
        == "hierarchical all_reduce on 8 ranks, drawn as a hosts"
    )


def difference(first, second):
    """The mean difference of two pictures, from 0 to 255; of other sizes, the most that is possible."""
    if first.size != second.size:
        return 255.0
    return ImageStat.Stat(ImageChops.difference(first, second)).mean[0]


def test_the_picture_in_the_docs_shows_this_page(browser, ring, tmp_path):
    path = tmp_path / "player.png"
    browser("open", path=str(ring), hash="#at=2.4&rank=1&chunk=2", height=1000)
    browser("screenshot", path=str(path), whole=False)
    with Image.open(path) as taken, Image.open(DOCS / "player.png") as shown:
        now, then = taken.convert("L"), shown.convert("L")
    assert difference(now, then) < 6, f"docs/player.png is out of date: the new one is {path}"
    browser("click", on="#last")
    browser("screenshot", path=str(path), whole=False)
    with Image.open(path) as taken:
        assert difference(taken.convert("L"), then) > 0.5  # another step is another picture
