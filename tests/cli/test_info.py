"""Versions and machine."""

import json
import os
import platform

import torch

from ringcoll import __version__


def test_json_says_what_is_running(run):
    facts = json.loads(run("info", "--json").stdout)
    assert facts["ringcoll"] == __version__
    assert facts["torch"] == torch.__version__
    assert facts["python"].endswith(platform.python_version())
    assert 1 <= facts["cores"] <= os.cpu_count()
    assert ("gloo" in facts["backends"]) == torch.distributed.is_gloo_available()


def test_the_lines_say_the_same(run):
    facts = json.loads(run("info", "--json").stdout)
    result = run("info")
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert list(lines) == list(facts)
    assert lines["torch"] == facts["torch"]
    assert lines["cores"] == str(facts["cores"])
    assert lines["backends"] == ", ".join(facts["backends"])
    assert result.exit_code == 0
