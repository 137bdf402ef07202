"""Tasks: models with their data and optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringcoll.errors import ArgumentError
from ringcoll.training import LEARNING_RATES, MODELS, Task, Text, Transformer, text_examples
from ringcoll.training import examples as examples_module


@pytest.mark.parametrize("model", MODELS)
def test_a_task_makes_the_same_model_every_time(model: str):
    task = Task(model, Task.load(model), layers=2, width=16)
    first, second = task.make().state_dict(), task.make().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = Task(model, task.examples, layers=2, width=16, seed=1).make().state_dict()
    assert any(not torch.equal(first[name], other[name]) for name in first)
    outputs = task.make()(task.examples.test_inputs[:3])
    assert outputs.argmax(-1).shape == task.examples.test_targets[:3].shape


def test_a_text_is_learned_from_another_part_than_it_is_tested_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(examples_module, "load_text", lambda: Text(torch.arange(1000), ""))
    examples = text_examples(context=24, num_train=40, num_test=9)
    assert [tuple(tokens.shape) for tokens in examples] == [(40, 24), (40, 24), (9, 24), (9, 24)]
    assert torch.equal(examples.train_inputs + 1, examples.train_targets)
    assert torch.equal(examples.test_inputs + 1, examples.test_targets)
    assert examples.train_targets.max() < 800 <= examples.test_inputs.min()


def test_the_vocabulary_holds_every_character_and_is_a_multiple_of_16():
    task = Task("transformer", Task.load("transformer"), width=16)
    assert task.shape.vocabulary % 16 == 0
    assert max(int(tokens.max()) for tokens in task.examples) < task.shape.vocabulary
    assert isinstance(task.make(), Transformer)
    with pytest.raises(ArgumentError, match="heads"):
        Task("transformer", task.examples, width=10).make()


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_optimizers_by_name(name: str):
    (param,) = params = [torch.nn.Parameter(torch.ones(2))]
    optimizer = Task("perceptron", Task.load("perceptron"), optimizer=name, lr=0.5).make_optimizer(
        params, lr=0.25
    )
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["lr"] == 0.25
    param.grad = torch.ones(2)
    optimizer.step()
    assert (param < 1).all()


@pytest.mark.parametrize(
    "options, text",
    [
        ({"model": "perceptrn"}, "'model': not known .*got perceptrn"),
        ({"optimizer": "adam"}, "'optimizer': not known .*got adam"),
        ({"width": 0}, "'width': must be positive"),
        ({"lr": float("nan")}, "'lr': not a learning rate"),
        ({"lr": float("inf")}, "'lr': not a learning rate"),
    ],
)
def test_tasks_that_do_not_exist(options: dict[str, Any], text: str):
    examples = Task.load("perceptron")
    with pytest.raises(ArgumentError, match=text):
        Task(**({"model": "perceptron", "examples": examples} | options))


def test_without_a_learning_rate_it_is_that_of_the_optimizer():
    examples = Task.load("perceptron")
    for name, lr in LEARNING_RATES.items():
        assert Task("perceptron", examples, optimizer=name).learning_rate == lr
