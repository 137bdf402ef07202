"""What a notebook shows: a picture of a schedule, a proof, a run; words where no picture is possible."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from html import escape

import pytest

from ringcoll import run_threads
from ringcoll import trace as traced_block
from ringcoll.errors import ArgumentError
from ringcoll.lab.pictures import last_run, steps_picture, time_picture
from ringcoll.lab.simulation import simulate, topology_named
from ringcoll.runtime.collectives import all_reduce, explain
from ringcoll.schedules import Schedule, Written, grid, verify
from ringcoll.schedules.algorithms import schedule_of


def pictures_of(shown: str) -> list[str]:
    return [
        base64.b64decode(data).decode()
        for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', shown)
    ]


def test_a_schedule_and_its_proof_are_their_picture_and_a_sentence() -> None:
    ring = schedule_of("all_reduce", "ring", 4)
    for value in (ring, verify(ring)):
        shown = value._repr_html_()
        assert pictures_of(shown) == [steps_picture(ring)]
        assert shown.endswith(
            "<p>Proved. 6 rounds; no algorithm needs fewer than 2. Each rank sends 1.5 vectors, the least possible. "
            "No extra memory. No rank reduces more than 0.75 vectors, the least possible.</p>"
        )


def test_a_wrong_schedule_is_its_picture_and_the_words_of_the_proof() -> None:
    ring = schedule_of("all_reduce", "ring", 3)

    def short(rank):
        yield from list(Written.steps(ring, rank))[:-1]

    wrong = Schedule("all_reduce", "short", 3, ring.num_chunks, ring.num_slots, short)
    shown = wrong._repr_html_()
    assert pictures_of(shown) == [steps_picture(wrong)]
    assert "ends wrong" in shown.partition("<pre>")[2]


@pytest.mark.parametrize(
    "world_size, words", [(20, "step  rank 0"), (65, "step  rank 0"), (5000, "too large")]
)
def test_what_is_too_large_for_a_picture_is_text(world_size: int, words: str) -> None:
    shown = schedule_of("all_reduce", "ring", world_size)._repr_html_()
    assert words in shown
    assert not pictures_of(shown)
    if world_size == 20:
        assert escape(grid(schedule_of("all_reduce", "ring", 20))) in shown


def test_a_simulated_run_is_its_times() -> None:
    ring, network = schedule_of("all_reduce", "ring", 4), topology_named("ring", 4)
    run = simulate(ring, 4096, network, trace=True)
    assert pictures_of(run._repr_html_()) == [time_picture(run)]
    assert escape(str(run)) in run._repr_html_()
    plain = simulate(ring, 4096, network)
    assert plain._repr_html_() == f"<pre>{escape(str(plain))}</pre>"


def test_an_explanation_is_its_table() -> None:
    explanations = run_threads(lambda group: explain("all_reduce", 1024, group=group), 2)
    assert explanations[0]._repr_html_() == f"<pre>{escape(str(explanations[0]))}</pre>"


@pytest.mark.processes
def test_a_schedule_is_shown_where_nothing_but_it_was_imported() -> None:
    code = (
        "from ringcoll.schedules.algorithms import schedule_of; import sys; "
        "print(schedule_of('all_reduce', 'ring', 2)._repr_html_()[:9], 'torch' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout == "<img src= False\n"


def test_a_recorded_block_is_its_last_operation(tmp_path) -> None:
    import torch

    path = tmp_path / "trace.json"

    def rank_main(group):
        with traced_block(path, group) as recording:
            for length in (4, 4096):
                all_reduce(torch.ones(length), group=group, algorithm="ring")
        return recording

    recording = run_threads(rank_main, 3)[0]
    written = json.loads(path.read_text())
    (picture,) = pictures_of(recording._repr_html_() or "")
    assert picture == time_picture(written)
    run = last_run(written)
    assert (run.name, run.world_size) == ("ring all_reduce", 3)
    # The second operation, not the first: each rank sends four thirds of 4,096 elements of 4 bytes, in 4 messages.
    assert len(run.messages) == 3 * 4
    assert sum(message.nbytes for message in run.messages) == 4 * 4096 * 4
    assert all(0 <= message.begin <= message.end <= run.duration for message in run.messages)
    for text in ("", "{", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": 3}'):
        path.write_text(text)
        assert recording._repr_html_() is None, text
    path.unlink()
    assert recording._repr_html_() is None


def test_the_last_run_of_a_trace_is_found_by_name() -> None:
    ring = simulate(
        schedule_of("all_reduce", "ring", 4), 4096, topology_named("ring", 4), trace=True
    )
    trace = ring.picture()
    assert last_run(trace) == last_run(trace, "ring all_reduce")
    with pytest.raises(
        ArgumentError, match=r"expected tree all_reduce, got ring all_reduce on 4 ranks"
    ):
        last_run(trace, "tree all_reduce")
    with pytest.raises(ArgumentError, match="no operation"):
        last_run({"traceEvents": [], "otherData": {}})
    for bad in ({}, {"traceEvents": 3, "otherData": {}}, {"traceEvents": [3], "otherData": {}}):
        with pytest.raises(ArgumentError, match="not a trace"):
            last_run(bad)
