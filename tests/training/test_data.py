"""The data that are trained on are the same everywhere, and no rank sees another's."""

from __future__ import annotations

import sys

import pytest
import torch

from ringcoll.errors import ArgumentError, MissingExtraError
from ringcoll.training import batches, load_digits, load_text, windows


def test_the_digits_are_standardised_and_always_the_same():
    digits = load_digits()
    assert [len(part) for part in digits] == [1438, 1438, 359, 359]
    assert torch.equal(digits.train_inputs, load_digits().train_inputs)
    inked = digits.train_inputs.std(0) > 0
    assert digits.train_inputs.mean(0).abs().max() < 1e-5
    assert int(inked.sum()) > 50
    assert digits.train_inputs.std(0).max() < 1.001


def test_every_rank_and_step_has_samples_of_its_own():
    seen = torch.stack([batches(100, 7, 4, rank, 3) for rank in range(3)])
    assert seen.shape == (3, 4, 7)
    assert len(seen.unique()) == seen.numel()
    again = batches(100, 7, 5, 0, 3)
    assert not torch.equal(seen[0], again), "each epoch has another order"
    with pytest.raises(ArgumentError, match=r"'batch'.*expected at most 33, got 34"):
        batches(100, 34, 4, 0, 3)


def test_the_text_is_read_by_characters():
    text = load_text()
    assert len(text.tokens) > 200_000
    assert int(text.tokens.max()) == len(text.characters) - 1
    assert list(text.characters) == sorted(set(text.characters))
    assert "statement" in text.read(text.tokens[:20_000])
    assert torch.equal(text.tokens, load_text().tokens)


def test_a_window_is_followed_by_what_follows_in_the_text():
    text = load_text()
    inputs, targets = windows(text, 50, 9, seed=3)
    assert inputs.shape == targets.shape == (9, 50)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert text.read(inputs[4]) in text.read(text.tokens)
    assert torch.equal(inputs, windows(text, 50, 9, seed=3)[0])
    assert not torch.equal(inputs, windows(text, 50, 9, seed=4)[0])
    assert windows(text, len(text.tokens) - 1, 1, seed=0)[0].shape[1] == len(text.tokens) - 1
    with pytest.raises(ArgumentError, match="the text is too short"):
        windows(text, len(text.tokens), 1, seed=0)


@pytest.mark.parametrize(
    "module, load, message",
    [
        ("sklearn.datasets", load_digits, r"pip install 'ringcoll\[train\]'"),
        ("pydoc_data.topics", load_text, "pydoc_data"),
    ],
)
def test_missing_data_are_named(monkeypatch: pytest.MonkeyPatch, module, load, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=message):
        load()
