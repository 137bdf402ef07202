"""Errors are caught by kind, carry what they name, and survive being sent to another process."""

from __future__ import annotations

import pickle

import pytest

from ringcoll import errors

EVERY = (
    errors.ArgumentError("no", rank=1, argument="op", expected="a sum", got=3),
    errors.CollectiveTimeoutError("late", peer=2),
    errors.CorruptMessageError("flipped", peer=1),
    errors.GroupBrokenError("broken"),
    errors.GroupChangedError("call again"),
    errors.MismatchError("differ", peer=1, mine="a", theirs="b"),
    errors.PeerLostError("gone", peer=0),
    errors.ScheduleError("bad"),
    errors.SharingError("too little memory"),
    errors.TooLargeError("too many ranks"),
    errors.TraceError("nothing written"),
    errors.TrainingError("a loss is not finite"),
    errors.TransportError("stuck"),
    errors.UnknownAlgorithmError("who"),
    errors.UnsupportedWorldSizeError("odd"),
    errors.VerificationError("wrong", rank=0, step=3, peer=1, chunk=2, expected=1, got=2, grid="x"),
    errors.VerificationError("wrong"),
    errors.RulesError("bad", text="a:b", start=2, length=1, source="RINGCOLL_ALGORITHM"),
    errors.RulesError("bad"),
    errors.TuningFileError("broken", path="tuning.json"),
    errors.BackwardError("call finish()"),
    errors.CaptureError("run it once"),
    errors.NestedCallError("make it afterwards"),
    errors.MissingExtraError("ringcoll[plot]"),
)


@pytest.mark.parametrize("error", EVERY, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error: errors.RingcollError):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


def test_every_error_is_here():
    classes = {item for item in vars(errors).values() if isinstance(item, type)}
    own = {item for item in classes if issubclass(item, errors.RingcollError)}
    assert {getattr(errors, name) for name in errors.__all__} == own
    assert {type(error) for error in EVERY} == own - {errors.RingcollError}


@pytest.mark.parametrize(
    "kind,builtin",
    [
        (errors.ArgumentError, ValueError),
        (errors.ArgumentError, TypeError),
        (errors.ScheduleError, ValueError),
        (errors.TransportError, RuntimeError),
        (errors.SharingError, MemoryError),
        (errors.CollectiveTimeoutError, TimeoutError),
        (errors.CorruptMessageError, RuntimeError),
        (errors.MismatchError, RuntimeError),
        (errors.RulesError, ValueError),
        (errors.TuningFileError, ValueError),
        (errors.BackwardError, RuntimeError),
        (errors.CaptureError, RuntimeError),
        (errors.TrainingError, RuntimeError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_errors_are_also_builtin_ones(kind: type[Exception], builtin: type[Exception]):
    assert issubclass(kind, builtin)
    assert issubclass(kind, errors.RingcollError)


def test_a_message_starts_with_the_place_if_there_is_one():
    assert str(errors.VerificationError("wrong", rank=1, step=2)) == "rank 1, step 2: wrong"
    assert str(errors.VerificationError("wrong")) == "wrong"


def test_bad_rules_are_underlined():
    error = errors.RulesError("no such thing", text="all:bad", start=4, length=3)
    assert str(error) == "no such thing\n  all:bad\n      ^^^"
