"""What a notebook shows of schedules, proofs and simulated runs: their picture, and words below."""

from __future__ import annotations

from functools import singledispatch
from html import escape

from ringcoll.errors import ArgumentError, RingcollError, TooLargeError, VerificationError
from ringcoll.pictures.player import proof_in_words
from ringcoll.pictures.step_pictures import steps_picture
from ringcoll.pictures.time_pictures import time_picture
from ringcoll.schedule import Proof, Schedule, grid, verify
from ringcoll.simulation import SimulatedRun

_MOST_STEPS = 32  # of more, the picture would be longer than a screen: the grid is shown


@singledispatch
def shown_in_notebook(value: object) -> str:
    """HTML of a schedule, a proof or a simulated run; of anything else, its text.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> shown_in_notebook(schedule_of("all_reduce", "ring", 4))[:28]
    '<img src="data:image/svg+xml'
    """
    return _text(str(value))


def _text(words: str) -> str:
    return f"<pre>{escape(words)}</pre>"


@shown_in_notebook.register
def _(schedule: Schedule) -> str:
    try:
        proof = verify(schedule)
    except VerificationError as error:
        return _drawn(schedule) + _text(str(error))
    except TooLargeError as error:
        return _text(f"{schedule!r}\n{error}")
    return _of_proof(proof)


@shown_in_notebook.register
def _of_proof(proof: Proof) -> str:
    schedule = proof.schedule
    drawn = _drawn(schedule) if isinstance(schedule, Schedule) else _text(grid(schedule))
    return drawn + f"<p>{escape(proof_in_words(proof))}</p>"


def _drawn(schedule: Schedule) -> str:
    try:
        steps = sum(1 for _ in zip(schedule.program(0), range(_MOST_STEPS + 1), strict=False))
        if steps <= _MOST_STEPS:
            return steps_picture(schedule)._repr_html_()
        return _text(grid(schedule))
    except RingcollError as error:
        return _text(f"{schedule!r}\n{error}")


@shown_in_notebook.register
def _(run: SimulatedRun) -> str:
    try:
        picture = "" if run.spans is None else time_picture(run)._repr_html_()
    except ArgumentError:
        picture = ""
    return picture + _text(str(run))
