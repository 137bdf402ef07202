"""The conformance suite of faults: ranks that die, stop, leave or lack something; see `tests.programs.deaths`."""

from __future__ import annotations

import signal
from importlib.util import find_spec
from typing import Any

import pytest

from tests.programs import mortal
from tests.programs.deaths import ENDINGS, Told, judge, run_ending
from tests.programs.mortal import Ended, run_mortals

TRANSPORTS = ("shared", "gloo", "ucx")
KILLED = Ended(-signal.SIGKILL, 10.0)
TOLD = Told("PeerLostError", "rank 0 lost rank 1, in all_reduce, call 1", True, 10.5, 1)
IDLE, ALL_DESTROY = "killed while the group is idle", "killed as all destroy the group"
STOPPED = "stopped (SIGSTOP)"


@pytest.mark.parametrize(
    "name,told,wanted",
    [
        (IDLE, [TOLD, KILLED, TOLD], "right"),
        (IDLE, [TOLD, KILLED, TOLD._replace(kind="", text="")], "silent"),
        (IDLE, [TOLD, KILLED, TOLD._replace(is_typed=False)], "untyped"),
        (IDLE, [TOLD, KILLED, TOLD._replace(text="rank 2, in all_reduce")], "unnamed"),
        (IDLE, [TOLD, KILLED, TOLD._replace(text="rank 1")], "unnamed"),
        (IDLE, [TOLD, KILLED, TOLD._replace(peer=0)], "unnamed"),
        (IDLE, [TOLD, KILLED, TOLD._replace(at_s=16.0)], "late"),
        (IDLE, [TOLD, KILLED, Ended(-6)], "crashes"),
        (IDLE, [TOLD, KILLED, Ended(-6, TOLD)], "crashes"),
        (IDLE, [TOLD, KILLED, Ended(None)], "hangs"),
        (IDLE, [TOLD, KILLED, RuntimeError("before it could tell")], "crashes"),
        (ALL_DESTROY, [TOLD, KILLED, TOLD], "false alarm"),
        (ALL_DESTROY, [Told("", "", True, 11.0), KILLED, Told("", "", True, 11.0)], "right"),
        (STOPPED, [TOLD._replace(at_s=2.1)] * 3, "right"),
        (STOPPED, [TOLD._replace(at_s=2.1), KILLED, TOLD._replace(at_s=2.1)], "crashes"),
        (STOPPED, [TOLD._replace(at_s=9.1)] * 3, "late"),
    ],
)
def test_what_is_right(name: str, told: list[Any], wanted: str):
    assert judge(ENDINGS[name], told) == wanted


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("name", ENDINGS)
def test_ranks_come_to_an_end(name: str):
    """Each over one transport, which take turns; benchmarks/faults.py tries all of them."""
    number = [*ENDINGS].index(name)
    turn = TRANSPORTS[number % len(TRANSPORTS) :] + TRANSPORTS[: number % len(TRANSPORTS)]
    has_ucx = find_spec("ucxx") is not None
    ending = ENDINGS[name]
    transport = next(over for over in turn if over not in ending.but and (over != "ucx" or has_ucx))
    told = run_ending(name, transport)
    assert judge(ending, told) in ("right", "late"), (transport, told)  # the machine may be busy


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "transport,name",
    [("ucx", "no descriptors are left"), ("gloo", "no descriptors are left")],
)  # fmt: skip
def test_what_a_rank_lacks_is_an_error_of_the_library(transport: str, name: str):
    """They were errors of the system, or of UCX."""
    if transport == "ucx" and find_spec("ucxx") is None:
        pytest.skip("ucxx is not installed")
    told = run_ending(name, transport)
    assert told[1].kind in ("TransportError", "PeerLostError"), told
    assert judge(ENDINGS[name], told) in ("right", "late"), told


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_of_gloos_group_that_dies_before_the_first_call_is_told(victim: int) -> None:
    """Also the one that has the store; torch's group knows no processes."""
    results = run_mortals(mortal.dies_before_its_first_call, 3, victim, store_dies=victim == 0)
    for rank in {0, 1, 2} - {victim}:
        kind, peer, seconds = results[rank]
        assert (kind, peer) == ("PeerLostError", victim)
        assert seconds < 15, "the limit is 30 s"
