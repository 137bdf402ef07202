"""Versions and machine."""

import json
import os
import platform
from types import SimpleNamespace

import torch

from ringcoll import __version__
from ringcoll.runtime.transport import catalogue, streams
from ringcoll.tools.cli import versions


def test_json_says_what_is_running(run):
    facts = json.loads(run("doctor", "--report", "--json").stdout)
    assert facts["ringcoll"] == __version__
    assert facts["torch"] == torch.__version__
    assert facts["python"].endswith(platform.python_version())
    assert 1 <= facts["cores"] <= os.cpu_count()
    assert ("gloo" in facts["backends"]) == torch.distributed.is_gloo_available()


def test_what_reduces_on_a_gpu(run, monkeypatch):
    assert (json.loads(run("doctor", "--report", "--json").stdout)["gpu_reduction"] is None) == (
        torch.cuda.device_count() == 0
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setenv("RINGCOLL_REDUCTION", "torch")
    facts = json.loads(run("doctor", "--report", "--json").stdout)
    assert facts["gpu_reduction"] == "torch: it was asked for"
    assert facts["devices"] == ["GPU 0"]


def test_what_carries_tensors_and_in_which_version(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(
        streams, "cuda", SimpleNamespace(nccl=SimpleNamespace(version=lambda: (2, 29)))
    )
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(versions, "output_of", lambda *command: " ".join(command[:2]))
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "gloo")
    catalogue._automatic.cache_clear()
    found = json.loads(run("doctor", "--report", "--json").stdout)
    assert found["nccl"] == "2.29"
    assert found["driver"] == "nvidia-smi --query-gpu=driver_version"
    assert (found["transport"], found["cuda_transport"]) == ("gloo", "nccl")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setattr(streams, "cuda", SimpleNamespace())
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "pigeons")
    monkeypatch.setenv("RINGCOLL_CUDA_TRANSPORT", "nccl")
    found = json.loads(run("doctor", "--report", "--json").stdout)
    assert found["nccl"] is None
    assert "got pigeons" in found["transport"]
    assert "this torch has no NCCL" in found["cuda_transport"]
    catalogue._automatic.cache_clear()


def test_the_lines_say_the_same(run):
    facts = json.loads(run("doctor", "--report", "--json").stdout)
    result = run("doctor", "--report")
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(lines) == list(facts)
    assert lines["torch"] == facts["torch"]
    assert lines["cores"] == str(facts["cores"])
    assert lines["backends"] == ", ".join(facts["backends"])
    assert result.exit_code == 0
