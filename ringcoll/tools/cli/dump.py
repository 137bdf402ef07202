"""``ringcoll dump``: the state of the ranks of a program that hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ringcoll.errors import ArgumentError
from ringcoll.runtime.machine import process_state
from ringcoll.runtime.watch import (
    FOREIGN,
    answering,
    ask,
    doing,
    in_words,
    read_record,
    related,
    report,
)
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.options import json_option
from ringcoll.tools.cli.output import print_json, print_table, print_text

_ANSWER_S = 2.0  # a thread that is woken answers in milliseconds, on a busy machine later
_COMMAND_LENGTH = 60  # characters

Records = list[dict[str, Any]]


@command(
    examples="""
        ringcoll dump
        ringcoll dump 4711
        ringcoll dump records/
    """
)
@click.argument("target", required=False)
@json_option
def dump(target: str | None, as_json: bool) -> None:
    """Say what the ranks of a program do that hangs, and where in their code they are.

    TARGET is the number of a process: any rank, or what has started the ranks. All ranks on
    this host are asked, and go on undisturbed. A folder is that of RINGCOLL_DUMP, to which
    ranks write that have failed. Without TARGET, the processes of this user that can be asked are
    listed.
    """
    silent: dict[int, str] = {}
    if target is None or target.isdecimal():
        records, silent = _asked()
        if target is not None:
            records, silent = _of_job(int(target), records, silent)
    else:
        records = _read(Path(target))
    if as_json:
        print_json({"records": records, "silent": silent})
    elif target is None:
        _list(records, silent)
    else:
        print_text(*report(records, silent))


def _asked() -> tuple[Records, dict[int, str]]:
    """The records of all processes of this user, and the reasons of those that do not answer."""
    answers, silent = ask(answering(), _ANSWER_S)
    records = []
    for pid, text in answers.items():
        try:
            records.append(read_record(text))
        except ArgumentError as error:  # another version
            silent[pid] = f"answers what cannot be read: {error}"
    return records, silent


def _of_job(pid: int, records: Records, silent: dict[int, str]) -> tuple[Records, dict[int, str]]:
    asked = {record["pid"] for record in records}
    groups = [group for record in records for group in record["groups"]]
    known = asked.union(silent, *(group["pids"].values() for group in groups))
    pids = {pid} if pid in known else {other for other in known if pid in _ancestors(other)}
    chosen, named = related(records, pids)
    if not chosen:
        reasons = [f"process {other} {silent[other]}" for other in sorted(pids & silent.keys())]
        raise ArgumentError(
            "; ".join(reasons)
            or "neither this process nor those that it has started are in a group",
            argument="TARGET",
            expected="a process that `ringcoll dump` lists",
            got=pid,
        )
    return chosen, {other: silent.get(other) or in_words(other) for other in named - asked}


def _ancestors(pid: int) -> set[int]:
    ancestors: set[int] = set()
    while pid > 1:
        try:
            pid = process_state(pid).parent
        except (OSError, ValueError):
            break
        ancestors.add(pid)
    return ancestors


def _read(folder: Path) -> Records:
    """The records of a folder."""
    try:
        files = sorted(folder.glob("*.json") if folder.is_dir() else [folder])
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    except OSError as error:
        raise ArgumentError(str(error), argument="TARGET") from error
    records = [read_record(text) for text in texts]
    if not records:
        raise ArgumentError(f"no records are in {folder}", argument="TARGET")
    return records


def _list(records: Records, silent: dict[int, str]) -> None:
    rows = [
        (
            str(record["pid"]),
            f"{group['rank']} of {group['world_size']}",
            doing(group).partition(": ")[0],  # without the text of an error
            record["command"][:_COMMAND_LENGTH],
        )
        for record in records
        for group in record["groups"]
    ]
    rows += [(str(pid), "", why, "") for pid, why in silent.items() if why != FOREIGN]
    if not rows:
        print_text("No process of this user has a group of more than one rank.")
        return
    print_table(("process", "rank", "state", "command"), rows, left=4, prose=1)
