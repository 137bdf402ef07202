"""Trainers by name."""

from __future__ import annotations

from typing import Any

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.training import (
    TRAINERS,
    Gradients,
    check_trainer,
    find_trainer,
    trainer_names,
    usual_task,
)


def test_every_name_is_found_and_explained():
    for name in trainer_names():
        base, _, options = name.partition(":")
        for option in options.split("|"):
            entry, found = find_trainer(f"{base}:{option}" if option else base)
            assert (entry, found) == (TRAINERS[base], option)
        assert TRAINERS[base].about, "what `ringcoll train --help` says"
        assert bool(TRAINERS[base].placeholder) == bool(options), "what may follow the colon"


@pytest.mark.parametrize(
    "name",
    ["", "nonsense", "tensor:1", "pipeline", "pipeline:2f2b", "sharded:4", "3d:2x0x2", "3d:8"],
)
def test_other_names_are_refused_with_a_list(name: str):
    with pytest.raises(ArgumentError, match=r"server:sync\|async, got ") as caught:
        find_trainer(name)
    assert caught.value.got == name


@pytest.mark.slow
@pytest.mark.parametrize(
    "names, options, expected",
    [
        (["bucketed"], {}, ("perceptron", 256, 32, "sgd", 0.02)),
        (["bucketed", "3d:2x2x2"], {}, ("transformer", 64, 8, "sgd", 0.02)),
        (["sharded:2", "context"], {"batch": 3}, ("transformer", 64, 3, "adamw", 0.002)),
        (["sharded:2"], {"optimizer": "sgd", "lr": 0.5}, ("perceptron", 256, 32, "sgd", 0.5)),
        (["context"], {"model": "perceptron", "width": 9}, ("perceptron", 9, 32, "sgd", 0.02)),
    ],
)
def test_a_task_is_what_the_trainers_need(
    names: list[str], options: dict[str, Any], expected: tuple[object, ...]
):
    task = usual_task(names, **options)
    assert (task.model, task.width, task.batch, task.optimizer, task.lr) == expected


@pytest.mark.parametrize(
    "name, options, world_size, gradients, text",
    [
        ("sharded:1", {"optimizer": "sgd"}, 2, Gradients(), "sharded:1 needs another"),
        ("context", {"model": "perceptron"}, 2, Gradients(), "context needs another"),
        ("server:async", {}, 1, Gradients(), "a server needs workers"),
        ("sequence", {}, 3, Gradients(), "they do not divide the heads"),
        ("bucketed", {}, 2, Gradients(algorithm=None), "bucketed does not average natively"),
    ],
)
def test_a_task_that_a_trainer_cannot_train_is_refused(
    name: str, options: dict[str, Any], world_size: int, gradients: Gradients, text: str
):
    with pytest.raises(ArgumentError, match=text):
        check_trainer(name, usual_task([name], **options), world_size, gradients)


def test_buckets_have_bytes():
    with pytest.raises(ArgumentError, match=r"'bucket_bytes': must be positive .*got 0"):
        Gradients(bucket_bytes=0)
