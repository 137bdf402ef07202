"""The step-by-rank grid as a picture, for a slide: what every rank does in every step."""

from __future__ import annotations

import re

from ringcoll.errors import VerificationError
from ringcoll.pictures.scenes import MOST_RANKS, MOST_STEPS, too_many
from ringcoll.pictures.svg import FONT, Picture, document, element, text
from ringcoll.schedule import Schedule, grid, verify

_WIDE = 0.62 * FONT  # of a character in a monospaced font
_LINE = 1.5 * FONT
_GAP = 30.0
_KINDS = {">": "sending", "<": "taking", "+": "adding", "S": "adding", "=": "taking"}
_STYLE = """
.cells text { font-family: "DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, monospace; white-space: pre }
.sending { fill: #0072b2 } .taking { fill: #00795a } .adding { fill: #b84500 }
.band { fill: #8b949e; opacity: 0.12 }
@media (prefers-color-scheme: dark) { .sending { fill: #56b4e9 } .taking { fill: #2bc495 } .adding { fill: #ff8c42 } }
"""


def grid_picture(schedule: Schedule) -> Picture:
    """Draw the grid of `ringcoll.schedule.grid`, sends, receptions and additions in colours of their own.

    Parameters
    ----------
    schedule
        At most `MOST_RANKS` ranks. If it is wrong, the bad place is marked, and the words of the proof stand below.

    Returns
    -------
    Picture
        An SVG document.

    Raises
    ------
    ArgumentError
        There are too many ranks or steps.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
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
    width = max(map(len, [*lines, words])) * _WIDE
    drawn = []
    for number, line in enumerate(lines):
        y = _GAP + 2.2 * FONT + number * _LINE
        if number % 2:
            drawn.append(element("rect", x=_GAP / 2, y=y - _LINE / 2, width=width + _GAP, height=_LINE, class_="band"))  # fmt: skip
        for match in re.finditer(r"\S+", line):
            token = match.group()
            kind = "badtext" if "**" in token else _KINDS.get(token[0], "") if number else "title"
            drawn.append(text(_GAP + match.start() * _WIDE, y, token, kind, "start"))
    about = f"{schedule.algorithm} {schedule.collective} on {schedule.world_size} ranks"
    height = 2 * _GAP + (len(lines) + 1) * _LINE
    if words:
        drawn.append(text(_GAP, height, words, "badtext", "start"))
        height += _LINE
    title = text(_GAP, _GAP, about, "title", "start")
    return document(
        width + 2 * _GAP,
        height + _GAP / 2,
        [title, element("g", drawn, class_="cells")],
        about,
        _STYLE,
    )
