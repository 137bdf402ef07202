"""Pictures of a schedule's steps: side by side, one of them, one after the other, and the grid.

A film is what they show: the messages of each step, and what the ranks hold between steps. The grid
has what every rank does in every step, for a slide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from ringcoll.errors import ArgumentError, VerificationError
from ringcoll.lab.pictures.svg import (
    COLOURS,
    FONT,
    MOST_RANKS,
    Picture,
    document,
    element,
    layout_of,
    moved,
    rect,
    text,
    tooltip,
    width_of,
)
from ringcoll.schedules import (
    Held,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    Step,
    Written,
    as_runs,
    contract,
    grid,
    history,
    verify,
)

MOST_STEPS = 512
"""Steps that a picture can show."""

_CELL = 30.0  # a chunk that a rank holds, with its number
_MOST_CELLS = 8  # chunks of a rank that are drawn with their numbers; more are drawn as a share
_APART = 76.0  # between the cards of ranks, so that arrows and what stands on them have room
_FEW_RANKS = 16  # of more ranks, the cards come nearer
_MOST_LABELS = 32  # messages of a step whose chunks stand on their arrows
_GAP = 34.0  # between pictures of steps, and around them
_LINE = 1.5 * FONT
_SECONDS = 1.6  # that a step takes in a moving picture
_STEPS_IN_ROW = 3
_LETTER = 0.62 * FONT  # width of a character in a monospaced font
_EDGE = 30.0  # around the grid
_GRID_KINDS = {">": "sending", "<": "taking", "+": "adding", "S": "adding", "=": "taking"}
_GRID_STYLE = """
.cells text { font-family: "DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, monospace; \
white-space: pre }
.sending { fill: #0072b2 } .taking { fill: #00795a } .adding { fill: #b84500 }
.band { fill: #8b949e; opacity: 0.12 }
@media (prefers-color-scheme: dark) { .sending { fill: #56b4e9 } .taking { fill: #2bc495 } \
.adding { fill: #ff8c42 } }
"""


class DrawnMessage(NamedTuple):
    """A message of a step; ``is_reduced`` says that the target adds it to its own data."""

    source: int
    target: int
    chunks: tuple[int, ...]
    is_reduced: bool


@dataclass(frozen=True)
class Film:
    """A schedule, step by step.

    Parameters
    ----------
    schedule
        The schedule.
    messages
        The messages of each step.
    local
        Of each step the ranks that reduce chunks without a message, and how many.
    held
        What the ranks hold before the first step, and after each step that is right.
    failure
        What is wrong with the schedule; ``None`` if nothing is.
    """

    schedule: Schedule
    messages: tuple[tuple[DrawnMessage, ...], ...]
    local: tuple[tuple[tuple[int, int], ...], ...]
    held: tuple[Held, ...]
    failure: VerificationError | None

    @property
    def links(self) -> set[tuple[int, int]]:
        """The pairs of ranks that exchange messages, the lower rank first."""
        pairs = (sorted(message[:2]) for step in self.messages for message in step)
        return {(low, high) for low, high in pairs if low != high}


def film(schedule: Schedule) -> Film:
    """Run a schedule on symbols, for a picture; a wrong schedule runs as far as it goes.

    Raises
    ------
    ArgumentError
        It has more ranks or steps than a picture can show.
    TooLargeError
        The ranks move too many chunks.
    """
    if schedule.world_size > MOST_RANKS:
        raise too_many("ranks", MOST_RANKS, schedule.world_size)
    held: list[Held] = []
    failure = None
    try:
        for state in history(schedule):
            held.append(state)
            if len(held) > MOST_STEPS + 1:
                raise too_many("steps", MOST_STEPS, "more")
    except VerificationError as error:
        failure = error
    count = len(held) - 1 if failure is None else (failure.step or 0) + 1
    programs = [_steps(schedule, rank, count) for rank in range(schedule.world_size)]
    steps = list(zip_longest(*programs, fillvalue=Step()))
    messages, local = tuple(map(_messages, steps)), tuple(map(_local, steps))
    return Film(schedule, messages, local, tuple(held), failure)


def _local(steps: Iterable[Step]) -> tuple[tuple[int, int], ...]:
    """The ranks that reduce in a step without a message, and the chunks that they add."""
    added = (
        (rank, sum(len(op.sources) - 1 for op in step if isinstance(op, Reduce)))
        for rank, step in enumerate(steps)
    )
    return tuple((rank, chunks) for rank, chunks in added if chunks)


def too_many(what: str, most: int, got: object) -> ArgumentError:
    """The error about more than a picture can show."""
    return ArgumentError(f"so many {what} cannot be drawn", "schedule", f"at most {most}", got)


def _steps(schedule: Schedule, rank: int, most: int) -> list[Step]:
    """The first steps of a rank, as written: reductions of a wrong schedule have no facts."""
    steps: list[Step] = []
    try:
        for step in Written.steps(schedule, rank):
            if len(steps) == most or not isinstance(step, Step):
                break
            steps.append(step)
    except Exception:  # noqa: BLE001  # the program of a user, at the fault that the proof names
        return steps
    return steps


def _messages(steps: Sequence[Step]) -> tuple[DrawnMessage, ...]:
    """Pair the sends of a step with receives; operations of peers that are no rank are left out."""
    ranks = range(len(steps))
    reduced: dict[tuple[int, int], list[bool]] = {}
    for rank, step in enumerate(steps):
        for operation in step:
            if isinstance(operation, Recv | RecvReduce) and operation.peer in ranks:
                is_reduced = isinstance(operation, RecvReduce)
                reduced.setdefault((operation.peer, rank), []).append(is_reduced)
    messages = []
    for rank, step in enumerate(steps):
        for operation in step:
            if isinstance(operation, Send) and operation.peer in ranks:
                queue = reduced.get((rank, operation.peer)) or [False]
                refs: tuple[object, ...] = operation.refs  # of a wrong schedule, anything
                chunks = tuple(ref.chunk for ref in refs if isinstance(ref, Ref))
                messages.append(DrawnMessage(rank, operation.peer, chunks, queue.pop(0)))
    return tuple(messages)


class Scenery:
    """The ranks of a film at their places, and the elements that show them in a step."""

    def __init__(self, scenes: Film, hosts: Sequence[int] | None = None) -> None:
        schedule = scenes.schedule
        self.film = scenes
        layout = layout_of(schedule.world_size, scenes.links, schedule.root, hosts)
        self.shows_cells = schedule.num_chunks <= _MOST_CELLS
        self.bar = _CELL * schedule.num_chunks if self.shows_cells else 2 * _CELL
        # The card of a rank: its number above what it holds.
        self.card = max(self.bar, 2 * _CELL) + 12, _LINE + _CELL + 6
        xs, ys = zip(*layout.places, strict=True)
        is_small = schedule.world_size <= _FEW_RANKS
        apart = [side + (_APART if is_small else _APART / 3) for side in self.card]
        (across, down), (wide, high) = apart, self.card
        self.width = (max(xs) - min(xs)) * across + wide
        self.height = (max(ys) - min(ys)) * down + high
        self.places = [
            complex((x - min(xs)) * across + wide / 2, (y - min(ys)) * down + high / 2)
            for x, y in layout.places
        ]
        rules = contract(schedule.collective)
        # Ranks that contribute to a result.
        self.complete = schedule.world_size if rules.reduces else 1

    def caption(self, number: int) -> str:
        """The step in words."""
        steps = self.film.messages
        if number == len(steps):
            return "wrong" if self.film.failure else "done"
        count = len(steps[number])
        if not count:
            return f"step {number}: no message"
        added = sum(message.is_reduced for message in steps[number])
        what = "added" if added == count else "copied" if not added else f"{added} added"
        return f"step {number}: {count} message{'s' * (count > 1)}, {what}"

    def ranks(self, number: int) -> list[str]:
        """The ranks, with what they hold before a step."""
        held = self.film.held[min(number, len(self.film.held) - 1)]
        drawn = []
        wide, high = self.card
        for rank, place in enumerate(self.places):
            x, left, top = place.real, place.real - wide / 2, place.imag - high / 2
            drawn += [
                rect(left, top, wide, high, rx=8, class_="rank"),
                text(x, top + _LINE / 2 + 2, str(rank), "title"),
                *self._holds(x - self.bar / 2, top + _LINE, held[rank]),
            ]
        failure = self.film.failure
        if failure is not None and failure.rank is not None and number == len(self.film.messages):
            place = self.places[failure.rank]
            corner = place.real - wide / 2 - 5, place.imag - high / 2 - 5
            drawn.append(rect(*corner, wide + 10, high + 10, rx=12, class_="bad"))
        return drawn

    def _holds(self, left: float, y: float, held: dict[int, frozenset[int]]) -> list[str]:
        """The chunks of a rank: a cell each, filled as far as ranks have contributed to it."""
        num_chunks = self.film.schedule.num_chunks
        if not self.shows_cells:
            done = sum(len(ranks) for ranks in held.values())
            share = done / (self.complete * num_chunks)
            return [
                rect(left, y, self.bar, _CELL / 2, class_="cell"),
                rect(left, y, self.bar * min(1.0, share), _CELL / 2, fill=COLOURS[0]),
            ]
        drawn = []
        for chunk in range(num_chunks):
            at = left + chunk * _CELL
            share = len(held.get(chunk, ())) / self.complete
            full = _CELL * share
            drawn.append(rect(at, y, _CELL, _CELL, class_="cell"))
            if share:
                colour = COLOURS[chunk % len(COLOURS)]
                filled = rect(at, y + _CELL - full, _CELL, full, fill=colour)
                who = ", ".join(map(str, sorted(held[chunk])))
                title = tooltip(f"chunk {chunk}: ranks {who}")
                middle = at + _CELL / 2, y + _CELL / 2 + 1
                drawn.append(element("g", [filled, title]))
                drawn.append(text(*middle, str(chunk), "small cellnumber"))
            if share == 1:
                drawn.append(rect(at, y, _CELL, _CELL, class_="done"))
        return drawn

    def way(self, message: DrawnMessage) -> tuple[complex, complex, complex]:
        """Begin, middle and end of an arrow: bent to the left, so that both ways lie apart."""
        begin, end = self.places[message.source], self.places[message.target]
        middle = (begin + end) / 2 - 0.1j * (end - begin)
        return self._edge(begin, middle, 3), middle, self._edge(end, middle, 6)

    def _edge(self, centre: complex, to: complex, beyond: float) -> complex:
        """Where the way from the middle of a card to a place leaves the card."""
        along, (wide, high) = to - centre, self.card
        share = min(
            (wide / 2 + beyond) / abs(along.real) if along.real else math.inf,
            (high / 2 + beyond) / abs(along.imag) if along.imag else math.inf,
            1.0,
        )
        return centre + along * share

    def arrows(self, number: int) -> list[str]:
        """The messages of a step; the chunks stand on their arrows where there is room."""
        drawn, labels = [], []
        messages = self.film.messages[number]
        for message in messages:
            way, chunks = self.way(message), as_runs(message.chunks)
            kind = "add" if message.is_reduced else "move"
            words = f"rank {message.source} to rank {message.target}: chunks {chunks}"
            look = {"class_": kind, "marker_end": f"url(#{kind})"}
            drawn.append(element("path", tooltip(words), d=_bend(way), **look))
            if len(messages) <= _MOST_LABELS:
                spot = (way[0] + 2 * way[1] + way[2]) / 4
                labels.append(
                    text(spot.real, spot.imag, f"{'+' * message.is_reduced}{chunks}", "label")
                )
        return drawn + labels

    def scene(self, number: int, *, moving: bool = False) -> list[str]:
        """A step: what the ranks hold before it, and its messages; or, behind the last, the end."""
        drawn = [text(self.width / 2, FONT / 2, self.caption(number), "title")]
        inner = self.ranks(number)
        if number < len(self.film.messages):
            inner = self.arrows(number) + inner + (self._parcels(number) if moving else [])
        return [*drawn, moved(0, _LINE, inner)]

    def _parcels(self, number: int) -> list[str]:
        """The chunks of a step, which move along their arrows."""
        drawn = []
        for message in self.film.messages[number]:
            colour = COLOURS[message.chunks[0] % len(COLOURS)] if message.chunks else COLOURS[-1]
            path = f"offset-path: path('{_bend(self.way(message))}')"
            drawn.append(rect(-9, -9, 18, 18, rx=4, fill=colour, class_="parcel", style=path))
        return drawn


def _bend(way: tuple[complex, complex, complex]) -> str:
    """An arrow as the data of a path."""
    begin, middle, end = (f"{place.real:.1f} {place.imag:.1f}" for place in way)
    return f"M{begin} Q{middle} {end}"


def _about(schedule: Schedule) -> str:
    return f"{schedule.algorithm} {schedule.collective} on {schedule.world_size} ranks"


def _below(scenery: Scenery) -> tuple[list[str], float]:
    """The fault in the words of the proof, or the meaning of the arrows; and its width."""
    failure = scenery.film.failure
    if failure is not None:
        where = "" if failure.rank is None else f"rank {failure.rank}: "
        words = f"wrong: {where}{failure.message}"
        return [text(_GAP, 0, words, "badtext", "start")], _GAP + width_of(words)
    kinds = {message.is_reduced for step in scenery.film.messages for message in step}
    meanings = [("add", "+1: chunk 1 is added")] * (True in kinds)
    meanings += [("move", "1: chunk 1 is copied")] * (False in kinds)
    drawn, at = [], _GAP
    for kind, words in meanings:
        drawn.append(element("path", d=f"M{at:.0f} 0 h48", class_=kind, marker_end=f"url(#{kind})"))
        drawn.append(text(at + 58, 0, words, "small", "start"))
        at += 78 + width_of(words, FONT - 2)
    return drawn, at


def as_film(schedule: Schedule | Film) -> Film:
    """The film of a schedule."""
    return schedule if isinstance(schedule, Film) else film(schedule)


def steps_picture(
    schedule: Schedule | Film, *, hosts: Sequence[int] | None = None, step: int | None = None
) -> Picture:
    """Draw the steps of a schedule side by side, each with what the ranks hold before it.

    Parameters
    ----------
    schedule
        At most `MOST_RANKS` ranks; or its `film`. A wrong schedule is drawn as far as it goes, with
        the bad place marked and the words of the proof.
    hosts
        Number of the host of each rank.
    step
        The only step to draw, from 0; by default all of them, and the end.

    Raises
    ------
    ArgumentError
        There are too many ranks or steps, or there is no such step.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> picture = steps_picture(schedule_of("all_reduce", "ring", 4))
    >>> picture[:4], picture.count("step ")
    ('<svg', 6)
    """
    scenery = Scenery(as_film(schedule), hosts)
    count = len(scenery.film.messages)
    if step is not None and not 0 <= step <= count:
        raise ArgumentError("no such step", "step", f"0 to {count}", step)
    numbers = range(count + 1) if step is None else [step]
    in_row = min(len(numbers), max(_STEPS_IN_ROW, round(math.sqrt(len(numbers)))))
    wide = max(scenery.width, width_of(scenery.caption(0))) + _GAP
    high = scenery.height + _LINE + _GAP
    drawn = []
    for index, number in enumerate(numbers):
        row, column = divmod(index, in_row)
        x = _GAP + column * wide + (wide - _GAP - scenery.width) / 2
        drawn.append(moved(x, _GAP + _LINE + row * high, scenery.scene(number)))
    rows = -(-len(numbers) // in_row)
    return _page(scenery, in_row * wide + _GAP, _GAP + _LINE + rows * high, drawn)


def _page(
    scenery: Scenery, width: float, height: float, drawn: list[str], style: str = ""
) -> Picture:
    about = _about(scenery.film.schedule)
    foot, foot_width = _below(scenery)
    page_width = max(width, width_of(about) + 2 * _GAP, foot_width + _GAP)
    drawn = [
        text(page_width / 2, _GAP, about, "title"),
        moved((page_width - width) / 2, 0, drawn),
        moved(0, height + FONT / 2, foot),
    ]
    return document(page_width, height + _LINE + _GAP / 2, drawn, about, style)


def moving_picture(schedule: Schedule | Film, *, hosts: Sequence[int] | None = None) -> Picture:
    """Draw the steps of a schedule one after the other; the arguments are those of `steps_picture`.

    Where pictures do not move, or should not (``prefers-reduced-motion``), the end is shown.
    """
    scenery = Scenery(as_film(schedule), hosts)
    scenes = len(scenery.film.messages) + 1
    total = scenes * _SECONDS
    width = max(scenery.width, width_of(scenery.caption(0))) + 2 * _GAP
    x = (width - scenery.width) / 2
    drawn = []
    for number in range(scenes):
        scene = scenery.scene(number, moving=True)
        group = element("g", scene, class_="scene", id=f"scene{number}")
        drawn.append(moved(x, _GAP + _LINE, [group]))
    share = 100 / scenes
    style = (
        f"@keyframes shown {{ 0%, {share:.3f}% {{ opacity: 1 }} "
        f"{share + 0.001:.3f}%, 100% {{ opacity: 0 }} }}\n"
        f"@keyframes travel {{ 0%, {0.15 * share:.3f}% {{ offset-distance: 0% }} "
        f"{0.85 * share:.3f}%, 100% {{ offset-distance: 100% }} }}\n"
        f".scene {{ opacity: 0; animation: shown {total:.1f}s linear infinite }}\n"
        f"#scene{scenes - 1} {{ opacity: 1 }}\n"
        f".parcel {{ offset-rotate: 0deg; animation: travel {total:.1f}s linear infinite }}\n"
    )
    for number in range(scenes):
        delay = f"animation-delay: {(number - scenes) * _SECONDS:.1f}s"
        style += f"#scene{number}, #scene{number} .parcel {{ {delay} }}\n"
    style += "@media (prefers-reduced-motion: reduce) { .scene, .parcel { animation: none } }\n"
    return _page(scenery, width, _GAP + 2 * _LINE + scenery.height + _GAP / 2, drawn, style)


def grid_picture(schedule: Schedule) -> Picture:
    """Draw the grid of `ringcoll.schedules.grid`; sends, receptions and additions have own colours.

    Parameters
    ----------
    schedule
        At most `MOST_RANKS` ranks. If it is wrong, the bad place is marked, and the words of the
        proof stand below.

    Raises
    ------
    ArgumentError
        There are too many ranks or steps.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> picture = grid_picture(schedule_of("all_reduce", "ring", 4))
    >>> picture.count('class="band"'), "+3:2" in picture
    (3, True)
    """
    if schedule.world_size > MOST_RANKS:
        raise too_many("ranks", MOST_RANKS, schedule.world_size)
    words = ""
    try:
        verify(schedule)
        lines = grid(schedule).splitlines()
    except VerificationError as error:
        lines = error.grid.splitlines()
        words = str(error).removesuffix(f"\n{error.grid}")
    if len(lines) > MOST_STEPS:
        raise too_many("steps", MOST_STEPS, len(lines))
    width = max(map(len, [*lines, words])) * _LETTER
    drawn = []
    for number, line in enumerate(lines):
        y = _EDGE + 2.2 * FONT + number * _LINE
        if number % 2:
            drawn.append(rect(_EDGE / 2, y - _LINE / 2, width + _EDGE, _LINE, class_="band"))
        for match in re.finditer(r"\S+", line):
            token = match.group()
            kind = (
                "badtext" if "**" in token else _GRID_KINDS.get(token[0], "") if number else "title"
            )
            drawn.append(text(_EDGE + match.start() * _LETTER, y, token, kind, "start"))
    about = _about(schedule)
    height = 2 * _EDGE + (len(lines) + 1) * _LINE
    if words:
        drawn.append(text(_EDGE, height, words, "badtext", "start"))
        height += _LINE
    inner = [text(_EDGE, _EDGE, about, "title", "start"), element("g", drawn, class_="cells")]
    return document(width + 2 * _EDGE, height + _EDGE / 2, inner, about, _GRID_STYLE)
