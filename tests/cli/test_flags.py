"""What is typed reaches the ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringcoll.tools.bench import OVER_RANKS
from ringcoll.tools.cli import measuring, tune
from tests.cli.conftest import Run


class Reached(Exception):  # noqa: N818  # no error
    """The ranks would be started now."""


def reached(run: Run, monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[Any, ...]:
    """The arguments with which a command is about to start its ranks."""

    def stop(*arguments: Any, **keywords: Any) -> None:
        raise Reached(*arguments)

    monkeypatch.setattr(measuring, "on_ranks", stop)
    monkeypatch.setattr(tune, "_measure", stop)
    with pytest.raises(Reached) as caught:
        run(*words)
    return caught.value.args


def test_bench(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("-c", "0", "-z", "1", "-a", "1", "--segment-bytes", "4K")
    _, request = reached(run, monkeypatch, "bench", "all_reduce", "-k", "2", *words)
    assert (request.check, request.blocking, request.segment_bytes) == (False, 1, 4096)
    assert request.over_ranks == OVER_RANKS[1]


@pytest.mark.parametrize(
    "words, sizes",
    [
        ("-b 4 -e 1K", [4 << power for power in range(9)]),
        ("-b 4 -e 1K -i 255", [4, 259, 514, 769, 1024]),
        ("-b 4 -e 1K -i 1M", [4]),
        ("-b 4 -e 1K -f 1", [4]),
        ("-b 4 -e 1K -f 16", [4, 64, 1024]),
        ("-b 1K -e 1K", [1024]),
        ("-b 1M -e 3M", [1 << 20, 2 << 20, 3 << 20]),
    ],
)
def test_sizes_of_bench(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: str, sizes: list[int]
) -> None:
    _, request = reached(run, monkeypatch, "bench", "all_reduce", *words.split())
    assert list(request.nbytes) == sizes


def test_trace(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("-k", "2", "--op", "max", "--segment-bytes", "4K")
    _, request = reached(run, monkeypatch, "trace", "all_reduce", *words)
    assert (request.workload.op, request.segment_bytes) == ("max", 4096)


@pytest.mark.parametrize(
    "typed, op",
    [("product", "prod"), ("MPI_PROD", "prod"), ("premul_sum", "mulsum"), ("MAX", "max")],
)
def test_operators_and_dtypes_in_all_spellings(
    run: Run, monkeypatch: pytest.MonkeyPatch, typed: str, op: str
) -> None:
    words = ("all_reduce", "--op", typed, "-d", "float16")
    assert reached(run, monkeypatch, "trace", *words)[1].workload.op == op
    request = reached(run, monkeypatch, "bench", *words)[1]
    assert (request.ops, request.dtypes) == ((op,), ("half",))
    for command in ("bench", "trace"):
        refused = run(command, "all_reduce", "--op", "mean")
        assert (refused.exit_code, "'mean' is none of sum, prod, " in refused.stderr) == (2, True)


def test_train(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    _, request = reached(run, monkeypatch, "train", "--seed", "7", "--lr", "0.25")
    assert (request.task.seed, request.task.lr) == (7, 0.25)


def test_tune(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    words = ("--transport", "gloo", "-o", str(tmp_path / "tuning.json"))
    *_, transport = reached(run, monkeypatch, "tune", *words)
    assert transport == "gloo"


def test_tune_on_a_gpu(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ("--device", "cuda", "--cuda-transport", "gloo", "-o", str(tmp_path / "tuning.json"))
    plan, _, transport = reached(run, monkeypatch, "tune", *words)
    assert (plan.device, transport) == ("cuda", "gloo")
    refused = run("tune", "--device", "cuda", "--transport", "gloo")
    assert refused.exit_code == 2
    assert "--transport says nothing about tensors with --device cuda" in refused.stderr
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = run("tune", "--device", "cuda")
    assert "torch finds no GPU here" in refused.stderr
