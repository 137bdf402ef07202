"""Trainers by name."""

from __future__ import annotations

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.training import trainers
from ringcoll.training.trainers import TRAINERS, find_trainer, trainer_names


def test_every_name_is_found_and_explained():
    for name in trainer_names():
        base, _, options = name.partition(":")
        for option in options.split("|"):
            system, found = find_trainer(f"{base}:{option}" if option else base)
            assert (system, found) == (TRAINERS[base].system, option)
        assert base in (trainers.__doc__ or ""), "the table of the module"


@pytest.mark.parametrize(
    "name",
    ["", "nonsense", "tensor:1", "pipeline", "pipeline:2f2b", "sharded:4", "3d:2x0x2", "3d:8"],
)
def test_other_names_are_refused_with_a_list(name: str):
    with pytest.raises(ArgumentError, match=r"server:sync\|async, got ") as caught:
        find_trainer(name)
    assert caught.value.got == name
