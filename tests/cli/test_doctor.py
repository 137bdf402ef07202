"""What will be used, and why."""

import json
from dataclasses import replace

import pytest

from ringcoll.errors import MissingExtraError
from ringcoll.runtime.machine import cores, settings
from ringcoll.runtime.transport import catalogue, ucx
from ringcoll.runtime.transport.shared import memory as shared_memory
from ringcoll.runtime.user_files import tuning
from ringcoll.schedules.cost import LinkCosts, Table, crowded_parameters
from ringcoll.tools.cli import doctor


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("RINGCOLL_TRANSPORT", raising=False)
    monkeypatch.setenv("RINGCOLL_TUNING", "off")
    catalogue._automatic.cache_clear()
    yield
    catalogue._automatic.cache_clear()


def test_the_transport_is_the_one_of_the_backend(run):
    facts = json.loads(run("doctor", "--json").stdout)
    assert facts["transports"]["cpu"]["transport"] == catalogue.resolved("cpu")
    assert facts["problems"] == []
    assert [row["nbytes"] for row in facts["expected"]] == [4, 65536, 16777216]
    assert all(row["predicted_s"] > 0 for row in facts["expected"])


def test_what_is_not_installed_is_the_reason(run, monkeypatch):
    def check():
        raise MissingExtraError("pip install 'ringcoll[ucx]'")

    monkeypatch.setattr(ucx, "check", check)
    result = run("doctor")
    assert result.exit_code == 0
    assert result.stdout.startswith(
        "CPU tensors: shared (the first that is installed of shared, gloo; "
        "ucx is not installed: pip install 'ringcoll[ucx]'; programs run in "
    )


@pytest.mark.parametrize("scope, said", [("1", True), ("0", False), (None, False)])
def test_memory_that_nobody_may_read_is_slower(run, monkeypatch, tmp_path, scope, said):
    file = tmp_path / "scope"
    if scope is not None:
        file.write_text(scope)
    monkeypatch.setattr(shared_memory, "_PTRACE_SCOPE", file)
    stdout = run("doctor").stdout
    assert ("; long messages are copied in pieces: kernel.yama.ptrace_scope is 1" in stdout) == said


def test_a_kernel_that_forbids_the_call_is_named(run, monkeypatch):
    def refuse(*arguments):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(shared_memory, "read_process", refuse)
    assert "in pieces: process_vm_readv: [Errno 1] Operation" in run("doctor").stdout


def test_what_interprets_programs(run, monkeypatch):
    compiled = "ringcoll.runtime.transport.shared.transport.compiled"
    monkeypatch.setattr(compiled, lambda: (None, "no compiler was there"))
    assert "programs run in Python: no compiler was there" in run("doctor").stdout
    monkeypatch.setattr(compiled, lambda: (object(), ""))
    assert "; programs run in C)\n" in run("doctor").stdout


def test_a_variable_is_the_reason(run, monkeypatch):
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "gloo")
    assert run("doctor").stdout.startswith("CPU tensors: gloo (RINGCOLL_TRANSPORT asks for it)\n")
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "pigeons")
    result = run("doctor")
    assert result.exit_code == 1
    assert "PROBLEM: argument 'RINGCOLL_TRANSPORT': no such transport" in result.stdout


def test_cores_against_ranks(run, monkeypatch):
    assert (
        f"{cores() + 1} ranks share {cores()} core" in run("doctor", "-k", str(cores() + 1)).stdout
    )
    monkeypatch.setattr(doctor, "cores", lambda: 8)
    assert "8 ranks, 8 cores: each rank has a core of its own" in run("doctor", "-k", "8").stdout


def test_what_a_group_has_measured_lately_is_shown(run, monkeypatch, tmp_path):
    monkeypatch.delenv("RINGCOLL_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = run("doctor", "-k", "3").stdout
    assert "costs: built-in" in before
    assert "`ringcoll tune -k 3` measures" in before
    costs = replace(
        crowded_parameters(LinkCosts(4e-6, 1e-9, 1e-10), 3, cores=1), direct_from=1 << 17
    )
    tuning.remember(
        settings.measured_file(), Table(transport="shared", world_size=3, parameters=costs)
    )
    after = run("doctor", "-k", "3").stdout
    assert f"costs: {settings.measured_file()}" in after
    assert "a message takes 4 us, and 12 us if all ranks send at once" in after
    assert "from 128 KiB on it is read in its sender's memory" in after
    assert (
        json.loads(run("doctor", "-k", "3", "--json").stdout)["measured"]["direct_from"] == 1 << 17
    )
    assert "costs: built-in" in run("doctor", "-k", "2").stdout


def test_costs_are_shown_for_a_message_and_a_mebibyte(capsys):
    costs = replace(
        crowded_parameters(LinkCosts(4e-6, 1e-9, 2.5e-10), 3, cores=1),
        crowded_alpha_s=7e-6,
        crowded_beta_s_per_byte=4e-9,
        slice_bytes=1 << 19,
    )
    doctor.print_costs(costs)
    words = " ".join(capsys.readouterr().out.split())
    assert "a message takes 4 us, and 7 us if all ranks send at once" in words
    of_bytes = [f"{factor * 2**20 / 1e9 * 1e3:.2f}" for factor in (1, 4, 0.25)]
    assert of_bytes == ["1.05", "4.19", "0.26"]
    assert "1 MiB takes 1.05 ms and 4.19 ms more, and to add it 262 us" in words
    assert "operations on long data run in slices of 512 KiB" in words
    assert "in its sender's memory" not in words
