"""The steps of a schedule: side by side, one of them, or one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ringcoll.errors import ArgumentError
from ringcoll.pictures.layouts import Point, layout_of
from ringcoll.pictures.scenes import DrawnMessage, Film, film
from ringcoll.pictures.svg import COLOURS, FONT, Picture, document, element, moved, text, width_of
from ringcoll.schedule import Schedule, as_runs, contract

_CELL = 30.0  # a chunk that a rank holds, with its number
_MOST_CELLS = 8  # chunks of a rank that are drawn with their numbers; more are drawn as a share
_APART = 76.0  # between the cards of ranks, so that arrows and what stands on them have room
_FEW_RANKS = 16  # of more ranks, the cards come nearer
_MOST_LABELS = 32  # messages of a step whose chunks stand on their arrows
_GAP = 34.0  # between pictures of steps, and around them
_LINE = 1.5 * FONT
_SECONDS = 1.6  # that a step takes in a moving picture
_STEPS_IN_ROW = 3


class Scenery:
    """The ranks of a film at their places, and what is drawn of them in a step."""

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
        self.width, self.height = (
            (max(places) - min(places)) * unit + side
            for places, unit, side in zip((xs, ys), apart, self.card, strict=True)
        )
        self.places: list[Point] = [
            (
                (x - min(xs)) * apart[0] + self.card[0] / 2,
                (y - min(ys)) * apart[1] + self.card[1] / 2,
            )
            for x, y in zip(xs, ys, strict=True)
        ]
        rules = contract(schedule.collective)
        self.complete = (
            schedule.world_size if rules.reduces else 1
        )  # ranks that contribute to a result

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
        for rank, (x, y) in enumerate(self.places):
            left, top = x - wide / 2, y - high / 2
            drawn += [
                element("rect", x=left, y=top, width=wide, height=high, rx=8, class_="rank"),
                text(x, top + _LINE / 2 + 2, str(rank), "title"),
                *self._holds(x - self.bar / 2, top + _LINE, held[rank]),
            ]
        failure = self.film.failure
        if failure is not None and failure.rank is not None and number == len(self.film.messages):
            x, y = self.places[failure.rank]
            drawn.append(
                element("rect", x=x - wide / 2 - 5, y=y - high / 2 - 5, width=wide + 10, height=high + 10,
                        rx=12, class_="bad")
            )  # fmt: skip
        return drawn

    def _holds(self, left: float, y: float, held: dict[int, frozenset[int]]) -> list[str]:
        """What a rank holds: a cell a chunk, filled as far as ranks have contributed to it."""
        num_chunks = self.film.schedule.num_chunks
        if not self.shows_cells:
            done = sum(len(ranks) for ranks in held.values())
            share = done / (self.complete * num_chunks)
            return [
                element("rect", x=left, y=y, width=self.bar, height=_CELL / 2, class_="cell"),
                element(
                    "rect",
                    x=left,
                    y=y,
                    width=self.bar * min(1.0, share),
                    height=_CELL / 2,
                    fill=COLOURS[0],
                ),
            ]
        drawn = []
        for chunk in range(num_chunks):
            at = left + chunk * _CELL
            share = len(held.get(chunk, ())) / self.complete
            full = _CELL * share
            drawn.append(element("rect", x=at, y=y, width=_CELL, height=_CELL, class_="cell"))
            if share:
                drawn.append(
                    element("rect", x=at, y=y + _CELL - full, width=_CELL, height=full,
                            fill=COLOURS[chunk % len(COLOURS)])
                )  # fmt: skip
                who = ", ".join(map(str, sorted(held[chunk])))
                drawn[-1] = element(
                    "g", [drawn[-1], element("title", f"chunk {chunk}: ranks {who}")]
                )
                drawn.append(
                    text(at + _CELL / 2, y + _CELL / 2 + 1, str(chunk), "small cellnumber")
                )
            if share == 1:
                drawn.append(element("rect", x=at, y=y, width=_CELL, height=_CELL, class_="done"))
        return drawn

    def way(self, message: DrawnMessage) -> tuple[Point, Point, Point]:
        """Begin, middle and end of an arrow: bent to the right, so that those of both ways lie apart."""
        (x, y), (to_x, to_y) = self.places[message.source], self.places[message.target]
        length = math.hypot(to_x - x, to_y - y) or 1.0
        along, across = ((to_x - x) / length, (to_y - y) / length), 0.1 * length
        middle = (x + to_x) / 2 + along[1] * across, (y + to_y) / 2 - along[0] * across
        return self._edge((x, y), middle, 3), middle, self._edge((to_x, to_y), middle, 6)

    def _edge(self, centre: Point, to: Point, beyond: float) -> Point:
        """Where the way from the middle of a card to a place leaves the card."""
        (x, y), (wide, high) = centre, self.card
        along_x, along_y = to[0] - x, to[1] - y
        share = min(
            (wide / 2 + beyond) / abs(along_x) if along_x else math.inf,
            (high / 2 + beyond) / abs(along_y) if along_y else math.inf,
            1.0,
        )
        return x + along_x * share, y + along_y * share

    def arrows(self, number: int) -> list[str]:
        """The messages of a step; the chunks stand on their arrows where there is room."""
        drawn, labels = [], []
        messages = self.film.messages[number]
        for message in messages:
            (x, y), (at_x, at_y), (to_x, to_y) = self.way(message)
            kind = "add" if message.is_reduced else "move"
            said = (
                f"rank {message.source} to rank {message.target}: chunks {as_runs(message.chunks)}"
            )
            drawn.append(
                element(
                    "path",
                    element("title", said),
                    d=_bend(((x, y), (at_x, at_y), (to_x, to_y))),
                    class_=kind,
                    marker_end=f"url(#{kind})",
                )
            )
            if len(messages) <= _MOST_LABELS:
                words = ("+" if message.is_reduced else "") + as_runs(message.chunks)
                middle = (x + 2 * at_x + to_x) / 4, (y + 2 * at_y + to_y) / 4
                labels.append(text(*middle, words, "label"))
        return drawn + labels

    def scene(self, number: int, *, moving: bool = False) -> list[str]:
        """A step: what the ranks hold before it, and its messages; behind the last step, the end."""
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
            drawn.append(
                element("rect", x=-9, y=-9, width=18, height=18, rx=4, fill=colour, class_="parcel",
                        style=f"offset-path: path('{_bend(self.way(message))}')")
            )  # fmt: skip
        return drawn


def _bend(way: tuple[Point, Point, Point]) -> str:
    """An arrow as the data of a path."""
    begin, middle, end = (f"{x:.1f} {y:.1f}" for x, y in way)
    return f"M{begin} Q{middle} {end}"


def _about(schedule: Schedule) -> str:
    return f"{schedule.algorithm} {schedule.collective} on {schedule.world_size} ranks"


def _below(scenery: Scenery) -> tuple[list[str], float]:
    """What is wrong, in the words of the proof, or what the arrows mean; and its width."""
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


def _film(schedule: Schedule | Film) -> Film:
    return schedule if isinstance(schedule, Film) else film(schedule)


def steps_picture(
    schedule: Schedule | Film, *, hosts: Sequence[int] | None = None, step: int | None = None
) -> Picture:
    """Draw the steps of a schedule side by side, each with what the ranks hold before it.

    Parameters
    ----------
    schedule
        At most `MOST_RANKS` ranks; or its `film`. A wrong schedule is drawn as far as it goes, with the bad place marked and
        the words of the proof.
    hosts
        Number of the host of each rank.
    step
        The only step to draw, from 0; by default all of them, and the end.

    Returns
    -------
    Picture
        An SVG document: a `str`, which a notebook shows.

    Raises
    ------
    ArgumentError
        There are too many ranks or steps, or there is no such step.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> picture = steps_picture(schedule_of("all_reduce", "ring", 4))
    >>> picture[:4], picture.count("step ")
    ('<svg', 6)
    """
    scenery = Scenery(_film(schedule), hosts)
    count = len(scenery.film.messages)
    if step is not None and not 0 <= step <= count:
        raise ArgumentError("no such step", argument="step", expected=f"0 to {count}", got=step)
    numbers = range(count + 1) if step is None else [step]
    in_row = min(len(numbers), max(_STEPS_IN_ROW, round(math.sqrt(len(numbers)))))
    wide, high = (
        max(scenery.width, width_of(scenery.caption(0))) + _GAP,
        scenery.height + _LINE + _GAP,
    )
    drawn = []
    for index, number in enumerate(numbers):
        row, column = divmod(index, in_row)
        x = _GAP + column * wide + (wide - _GAP - scenery.width) / 2
        drawn.append(moved(x, _GAP + _LINE + row * high, scenery.scene(number)))
    return _page(
        scenery,
        in_row * wide + _GAP,
        _GAP + _LINE + (len(numbers) + in_row - 1) // in_row * high,
        drawn,
    )


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
    scenery = Scenery(_film(schedule), hosts)
    scenes = len(scenery.film.messages) + 1
    total = scenes * _SECONDS
    width = max(scenery.width, width_of(scenery.caption(0))) + 2 * _GAP
    x = (width - scenery.width) / 2
    drawn = [
        moved(
            x,
            _GAP + _LINE,
            [element("g", scenery.scene(number, moving=True), class_="scene", id=f"scene{number}")],
        )
        for number in range(scenes)
    ]
    share = 100 / scenes
    style = (
        f"@keyframes shown {{ 0%, {share:.3f}% {{ opacity: 1 }} {share + 0.001:.3f}%, 100% {{ opacity: 0 }} }}\n"
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
