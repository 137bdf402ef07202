"""The player: one page that plays schedules in a browser, without a network.

The page is built from `player/` (TypeScript) into ``player.html``; here the data are made that it
plays. It runs no schedule of its own: messages, contents of ranks, proofs and faults are those of
the library. Only times by alpha, beta and gamma are computed in the page, as they move with its
sliders.

A notebook shows schedules, proofs and simulated runs as their picture, with words below.
"""

from __future__ import annotations

import json
import zlib
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from typing import Any

from ringcoll.errors import ArgumentError, RingcollError, TooLargeError, VerificationError
from ringcoll.lab.pictures.step_pictures import Film, as_film, film, steps_picture
from ringcoll.lab.pictures.svg import escape, layout_of, network_layout
from ringcoll.lab.pictures.time_pictures import last_run, time_picture
from ringcoll.lab.simulation import SimulatedRun
from ringcoll.schedules import (
    Counts,
    Held,
    Operation,
    Program,
    Proof,
    Recv,
    RecvReduce,
    Schedule,
    Send,
    Step,
    Written,
    as_runs,
    chunks_by_order,
    chunks_of_data,
    contract,
    grid,
    infix,
    tally_of,
    verify,
)
from ringcoll.schedules.algorithms import algorithms
from ringcoll.schedules.cost import cost_in_sentences, dominators, in_number

Played = Schedule | Film | SimulatedRun
Json = dict[str, Any]

_MANY_RANKS = 16  # from here on fewer faults are offered, and proofs are shown without their grid
_MOST_CURVES = 8
_MOST_ORDERS = 1 << 16  # characters of all orders of summation


class Page(str):
    """An HTML page, which a notebook shows in a frame."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        data = b64encode(self.encode()).decode()
        source = f"data:text/html;base64,{data}"
        return f'<iframe src="{source}" width="100%" height="760" style="border: 0"></iframe>'


def player_page(
    schedule: Played,
    beside: Played | None = None,
    *,
    hosts: Sequence[int] | None = None,
    trace: Mapping[str, Any] | None = None,
    settings: Mapping[str, object] | None = None,
) -> Page:
    """Make a page that plays a schedule: steps, contents of ranks, times, costs, faults on purpose.

    Parameters
    ----------
    schedule
        At most `MOST_RANKS` ranks; or its `film`; or a simulated run with ``trace=True``, whose
        times and links are shown beside those of the sliders. A wrong schedule is played as far as
        it goes, with the words of the proof.
    beside
        A second one, on the same clock.
    hosts
        Number of the host of each rank, to draw the ranks of a host together.
    trace
        Measured times: what ``ringcoll trace`` writes, of the same algorithm, as an object. Its
        last operation counts.
    settings
        Where the page begins, by the words of its address: ``at`` (a step), ``clock`` ("steps" or
        "time"), ``alpha`` (microseconds), ``bandwidth`` and ``reduction`` (GB/s), ``nbytes``,
        ``slow``, ``dead``; ``playing=1`` starts it.

    Raises
    ------
    ArgumentError
        There are too many ranks or steps, the trace is of something else, or the run has no trace.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> ring, tree = (schedule_of("all_reduce", name, 4) for name in ("ring", "tree"))
    >>> page = player_page(ring, tree)
    >>> page[:15], "https://" in page
    ('<!doctype html>', False)
    """
    played = (schedule,) if beside is None else (schedule, beside)
    films = [as_film(each.schedule if isinstance(each, SimulatedRun) else each) for each in played]
    proofs = [None if shown.failure else verify(shown.schedule) for shown in films]
    run = schedule if isinstance(schedule, SimulatedRun) else None
    if run is not None and trace is None:
        trace = run.picture()
    names = [f"{shown.schedule.algorithm} {shown.schedule.collective}" for shown in films]
    world_size = films[0].schedule.world_size
    title = f"{' and '.join(names)}, {in_number(world_size, 'rank')}"
    data: Json = {
        "scenes": [_scene(shown, proof, hosts) for shown, proof in zip(films, proofs, strict=True)],
        "faults": list(_faults(films[0])),
        "curves": _curves(films[0].schedule, [proof for proof in proofs if proof is not None]),
        "times": None if trace is None else _times(films[0], trace, run),
        "network": None if run is None else _network(run, films[0]),
    }
    begin: Json = {}
    if run is not None and run.topology.links:
        # The sliders begin with the costs of the network's first link, and of its reductions.
        network, link = run.topology, run.topology.links[0]
        gamma = float(network.gamma_s_per_byte)
        begin = {
            "alpha": float(network.alpha_s + link.latency_s) * 1e6,
            "bandwidth": float(link.bandwidth) * 1e-9,
            "reduction": 1e-9 / gamma if gamma else 1e5,  # the end of the slider
        }
    if data["times"] is not None:
        begin["nbytes"] = data["times"].pop("nbytes")
    data["settings"] = {name: str(value) for name, value in (begin | dict(settings or {})).items()}
    # Packed, the data of 64 ranks are a tenth as long; and no name of an algorithm can end the
    # script.
    packed = zlib.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), 9)
    text = b64encode(packed).decode()
    template = files("ringcoll.lab.pictures").joinpath("player.html").read_text(encoding="utf-8")
    page = template.replace("{{ title }}", escape(title)).replace("{{ data }}", text)
    return Page(page)


def _scene(shown: Film, proof: Proof | None, hosts: Sequence[int] | None) -> Json:
    """A schedule at its places."""
    schedule = shown.schedule
    layout = layout_of(schedule.world_size, shown.links, schedule.root, hosts)
    return {
        "name": schedule.algorithm,
        "collective": schedule.collective,
        "worldSize": schedule.world_size,
        "numChunks": schedule.num_chunks,
        "chunksOfData": max(1, chunks_of_data(schedule)),
        "complete": schedule.world_size if contract(schedule.collective).reduces else 1,
        "layout": layout.name,
        "places": [[round(x, 3), round(y, 3)] for x, y in layout.places],
        **_story(shown, proof),
    }


def _story(shown: Film, proof: Proof | None) -> Json:
    """The messages, the changes at the ranks, and the words of the proof."""
    sets: dict[frozenset[int], int] = {}
    steps = [
        {
            "messages": [
                [source, target, as_runs(sorted(chunks)), int(is_reduced)]
                for source, target, chunks, is_reduced in messages
            ],
            "local": shown.local[number],
            "changes": _changes(*shown.held[number : number + 2], sets=sets)
            if number + 1 < len(shown.held)
            else [],
        }
        for number, messages in enumerate(shown.messages)
    ]
    nothing: Held = tuple({} for _ in range(shown.schedule.world_size))
    start = _changes(nothing, shown.held[0], sets=sets) if shown.held else []
    failure = shown.failure
    is_wide = shown.schedule.world_size > _MANY_RANKS
    return {
        "steps": steps,
        "start": start,
        "sets": [as_runs(sorted(ranks)) for ranks in sets],
        "proof": "The proof fails." if proof is None else proof_in_words(proof),
        "orders": {} if proof is None else _orders(proof),
        "failure": None
        if failure is None
        else {
            "words": str(failure).removesuffix(f"\n{failure.grid}" if is_wide else ""),
            "rank": failure.rank,
            "step": failure.step,
            "chunk": failure.chunk,
        },
    }


def _changes(before: Held, now: Held, *, sets: dict[frozenset[int], int]) -> list[list[int]]:
    """The gains of each rank: rank, chunk, and the number of the set of contributions."""
    return [
        [rank, chunk, sets.setdefault(ranks, len(sets))]
        for rank, (old, new) in enumerate(zip(before, now, strict=True))
        for chunk, ranks in new.items()
        if old.get(chunk) != ranks
    ]


def proof_in_words(proof: Proof) -> str:
    """The facts that are proved, in sentences."""
    return " ".join(["Proved.", *cost_in_sentences(proof)])


def _orders(proof: Proof) -> dict[int, str]:
    """The order of summation of each chunk, as far as there is room."""
    rules = contract(proof.schedule.collective)
    if not rules.reduces or rules.at_least_once or not proof.same_everywhere:
        return {}
    orders: dict[int, str] = {}
    room = _MOST_ORDERS
    for order, chunks in chunks_by_order(proof).items():
        text = infix(order)
        room -= len(text) * len(chunks)
        if room < 0:
            break
        orders |= dict.fromkeys(chunks, text)
    return orders


def _curves(first: Schedule, proofs: Sequence[Proof]) -> list[Json]:
    """Costs of what is proved, and of the library's algorithms that no other beats."""
    world_size = first.world_size
    if world_size == 1:
        return []
    costs: dict[str, Counts] = {}
    for entry in algorithms(first.collective):
        if entry.built_in and not entry.needs_hosts and not entry.restriction(world_size):
            schedule = entry.schedule(world_size)
            tally = tally_of(schedule)
            # With many messages at once it would win: here they cost nothing beside each other.
            if tally.ports <= 1:
                costs[entry.name] = tally.counts(chunks_of_data(schedule))
    shown = {
        proof.schedule.algorithm: Counts(proof.rounds, proof.traffic, proof.reduced)
        for proof in proofs
        if proof.schedule.collective == first.collective and proof.schedule.world_size == world_size
    }
    for name, others in dominators(costs).items():
        if not others and costs[name] not in shown.values():
            shown[name] = costs[name]
    return [
        {
            "name": name,
            "rounds": cost.rounds,
            "traffic": float(cost.traffic),
            "reduced": float(cost.reduced),
        }
        for name, cost in list(shown.items())[:_MOST_CURVES]
    ]


def _conditions(run: SimulatedRun) -> str:
    """The network, and the segments and the slow and late ranks, if there are any."""
    parts = [str(run.topology.name)]
    if run.segments > 1:
        parts.append(f"in {run.segments} segments")
    parts += [f"rank {rank} {float(by):g} x slower" for rank, by in run.slowness.items()]
    parts += [f"rank {rank} {float(by) * 1e6:g} us late" for rank, by in run.late.items()]
    return ", ".join(parts)


def _network(run: SimulatedRun, shown: Film) -> Json:
    """The simulated network: its nodes, what its links have carried, and each message's way."""
    network, loads = run.topology, run.loads()
    ends = [(link.source, link.target) for link in network.links]
    places = network_layout(network.world_size, ends)
    switches = [node for node in places if isinstance(node, str)]
    nodes = [*range(network.world_size), *switches]
    number = {node: index for index, node in enumerate(nodes)}
    by_link = {load.link: index for index, load in enumerate(loads)}
    pairs = {message[:2] for step in shown.messages for message in step}
    return {
        "name": network.name,
        "switches": switches,
        "places": [[round(x, 3) for x in places[node]] for node in nodes],
        "links": [
            {
                "name": load.link.name,
                "source": number[load.link.source],
                "target": number[load.link.target],
                "nbytes": float(load.nbytes),
                "share": None if load.share is None else float(load.share),
            }
            for load in loads
        ],
        "routes": {
            f"{source} {target}": [by_link[link] for link in way if link in by_link]
            for source, target in sorted(pairs)
            if source != target
            and (way := [network.links[index] for index in network.route(source, target)])
        },
    }


def _times(shown: Film, trace: Mapping[str, Any], run: SimulatedRun | None) -> Json:
    """The messages of a trace's last operation; each has its begin and end in microseconds."""
    schedule = shown.schedule
    traced = last_run(trace, f"{schedule.algorithm} {schedule.collective}")
    if traced.world_size != schedule.world_size:
        expected = f"{schedule.world_size} ranks"
        got = f"{traced.world_size} ranks"
        raise ArgumentError("the trace is of other ranks", "trace", expected, got)
    chunks = sum(len(message.chunks) for step in shown.messages for message in step)
    sent = sum(message.nbytes for message in traced.messages)
    return {
        "title": "measured" if run is None else f"simulated on {_conditions(run)}",
        "seconds": traced.duration * 1e-6,
        "messages": [
            [step, source, target, round(begin, 3), round(end, 3)]
            for step, source, target, begin, end, _ in traced.messages
        ],
        # The size of the whole data, from the chunks that were sent.
        "nbytes": round(sent * chunks_of_data(schedule) / chunks) if chunks else 0,
    }


def _faults(shown: Film) -> Iterator[Json]:
    """Faults on purpose, each with its story up to the place where the proof fails."""
    if shown.failure is not None:
        return
    schedule = shown.schedule
    sending = [number for number, messages in enumerate(shown.messages) if messages]
    if not sending or schedule.world_size < 2:
        return
    first, middle, last = sending[0], sending[len(sending) // 2], sending[-1]
    few = schedule.world_size > _MANY_RANKS
    for step in [middle] if few else sorted({first, middle, last}):
        source, target = shown.messages[step][0][:2]
        for title, changed in _changed(schedule, step, source, target):
            wrong = film(changed)
            if wrong.failure is not None:
                yield {"title": title, **_story(wrong, None)}


def _changed(
    schedule: Schedule, step: int, source: int, target: int
) -> Iterator[tuple[str, Schedule]]:
    """Schedules in which a message of a step is not sent, is forgotten by both, or goes astray."""
    wrong = min({*range(schedule.world_size)} - {source, target}, default=target)
    where = f"step {step}: rank {source}"
    faults = {
        "unsent": f"{where} does not send to rank {target}",
        "forgotten": f"{where} and rank {target} forget their message",
        "astray": f"{where} sends to rank {wrong} instead of rank {target}",
    }

    def changed(rank: int, operation: Operation, fault: str) -> Operation | None:
        match operation:
            case Send(peer=peer, refs=refs) if (rank, peer) == (source, target):
                return Send(wrong, refs) if fault == "astray" else None
            case Recv(peer=peer) | RecvReduce(peer=peer) if (peer, rank) == (source, target):
                return None if fault == "forgotten" else operation
        return operation

    for fault, title in faults.items():

        def program(rank: int, fault: str = fault) -> Program:
            for number, operations in enumerate(Written.steps(schedule, rank)):
                kept = (changed(rank, operation, fault) for operation in operations)
                is_changed = number == step
                yield Step(*(op for op in kept if op is not None)) if is_changed else operations

        yield title, replace(schedule, program=program, stated_cost=None)


_MOST_STEPS = 32  # of more, the picture would be longer than a screen: the grid is shown


def shown_in_notebook(value: object) -> str:
    """HTML of a schedule, a proof or a simulated run; of anything else, its text.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> shown_in_notebook(schedule_of("all_reduce", "ring", 4))[:28]
    '<img src="data:image/svg+xml'
    """
    match value:
        case Schedule():
            try:
                return shown_in_notebook(verify(value))
            except VerificationError as error:
                return _drawn(value) + _text(str(error))
            except TooLargeError as error:
                return _text(f"{value!r}\n{error}")
        case Proof(schedule=schedule):
            drawn = _drawn(schedule) if isinstance(schedule, Schedule) else _text(grid(schedule))
            return drawn + f"<p>{escape(proof_in_words(value))}</p>"
        case SimulatedRun(spans=tuple()):
            with suppress(ArgumentError):  # there are too many ranks or messages
                return time_picture(value)._repr_html_() + _text(str(value))
    return _text(str(value))


def _text(words: str) -> str:
    return f"<pre>{escape(words)}</pre>"


def _drawn(schedule: Schedule) -> str:
    try:
        steps = sum(1 for _ in zip(schedule.program(0), range(_MOST_STEPS + 1), strict=False))
        if steps <= _MOST_STEPS:
            return steps_picture(schedule)._repr_html_()
        return _text(grid(schedule))
    except RingcollError as error:
        return _text(f"{schedule!r}\n{error}")
