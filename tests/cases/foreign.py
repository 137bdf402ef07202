"""Other systems' programs, run here as their own executors run them: thread blocks in any order.

Written from the sources of those executors, and not from `ringcoll.lab.formats`: it proves what is
written. Each element of memory is a multiset of (rank, index of the input); a thread block does its
next step if what it waits for is there, and chance decides which block is next.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from random import Random
from typing import Any
from xml.etree import ElementTree as ET

__all__ = ["run_msccl", "run_mscclpp"]

Address = tuple[str, int]
Program = Iterator[bool]
"""Of a thread block: yields ``False`` while it waits, and ``True`` behind each step."""


class Machine:
    """The memory of all ranks, with input and output apart or in one place."""

    def __init__(self, collective: str, world_size: int, per_block: int, root: int, shared: bool):
        self.collective, self.world_size, self.per_block = collective, world_size, per_block
        self.root, self.shared = root, shared
        whole = world_size * per_block
        sizes = {
            "all_reduce": (per_block, per_block), "broadcast": (per_block, per_block),
            "reduce": (per_block, per_block), "all_gather": (per_block, whole),
            "reduce_scatter": (whole, per_block), "gather": (per_block, whole),
            "scatter": (whole, per_block), "all_to_all": (whole, whole),
        }  # fmt: skip
        self.in_size, self.out_size = sizes[collective]
        self.memory: list[dict[Address, Counter[tuple[int, int]]]] = []
        for rank in range(world_size):
            has_input = collective not in ("broadcast", "scatter") or rank == root
            self.memory.append({})
            for index in range(self.in_size if has_input else 0):
                self.memory[rank][self.address(rank, "i", index)] = Counter([(rank, index)])

    def address(self, rank: int, letter: str, index: int) -> Address:
        """The memory behind a place."""
        assert 0 <= index < {"i": self.in_size, "o": self.out_size}.get(letter, 1 << 30)
        if not self.shared or letter == "s":
            return letter, index
        offset = rank * self.per_block
        if letter == "i" and self.collective in ("all_gather", "gather"):
            return "io", index + offset
        if letter == "o" and self.collective in ("reduce_scatter", "scatter"):
            return "io", index + offset
        return "io", index

    def read(self, rank: int, letter: str, first: int, count: int) -> list[Counter[Any]]:
        cells = self.memory[rank]
        places = [self.address(rank, letter, first + index) for index in range(count)]
        return [Counter(cells[place]) for place in places]

    def write(self, rank: int, letter: str, first: int, values: list[Counter[Any]]) -> None:
        for index, value in enumerate(values):
            self.memory[rank][self.address(rank, letter, first + index)] = value

    def expected(self, rank: int, index: int) -> Counter[tuple[int, int]] | None:
        """What an element of the output must be."""
        block, rest = divmod(index, self.per_block)
        everyone = range(self.world_size)
        match self.collective:
            case "all_reduce":
                return Counter((other, index) for other in everyone)
            case "reduce":
                return Counter((other, index) for other in everyone) if rank == self.root else None
            case "reduce_scatter":
                return Counter((other, rank * self.per_block + index) for other in everyone)
            case "all_gather":
                return Counter([(block, rest)])
            case "gather":
                return Counter([(block, rest)]) if rank == self.root else None
            case "scatter":
                return Counter([(self.root, rank * self.per_block + index)])
            case "broadcast":
                return Counter([(self.root, index)])
        return Counter([(block, rank * self.per_block + rest)])

    def check(self) -> None:
        """Compare all outputs with what they must be."""
        for rank in range(self.world_size):
            for index in range(self.out_size):
                wanted = self.expected(rank, index)
                if wanted is not None:
                    got = self.memory[rank][self.address(rank, "o", index)]
                    assert got == wanted, (rank, index)


def run(random: Random, programs: list[Program]) -> None:
    """Run thread blocks to their ends; a program that only waits moves no further by itself."""
    waiting = list(programs)
    while waiting:
        random.shuffle(waiting)
        moved = False
        for program in list(waiting):
            for _ in range(random.randint(1, 4)):
                state = next(program, None)
                if state is None:
                    waiting.remove(program)
                moved = moved or state is not False
                if not state:
                    break
        assert moved, "a deadlock"


def _sum(one: list[Counter[Any]], other: list[Counter[Any]]) -> list[Counter[Any]]:
    return [a + b for a, b in zip(one, other, strict=True)]


# --- MSCCL ------------------------------------------------------------------------------

_MSCCL = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter",
          "alltoall": "all_to_all"}  # fmt: skip


def run_msccl(text: str, seed: int, *, shared: bool) -> None:
    """Run an algorithm of MSCCL, and check its result."""
    algo = ET.fromstring(text)
    world_size, coll = int(algo.attrib["ngpus"]), algo.attrib["coll"]
    collective = _MSCCL.get(coll, coll)
    per_block = int(algo.attrib["nchunksperloop"])
    if collective not in ("all_reduce", "broadcast", "reduce"):
        per_block //= world_size
    machine = Machine(collective, world_size, per_block, int(algo.attrib.get("root", 0)), shared)
    wires: dict[tuple[int, int, int], deque[list[Counter[Any]]]] = {}
    done: dict[tuple[int, int], int] = {}
    programs = [
        _thread_block(machine, wires, done, int(gpu.attrib["id"]), block)
        for gpu in algo
        for block in gpu
    ]
    run(Random(seed), programs)
    assert not any(wires.values()), "messages that nobody receives"
    machine.check()


def _thread_block(
    machine: Machine,
    wires: dict[tuple[int, int, int], deque[list[Counter[Any]]]],
    done: dict[tuple[int, int], int],
    rank: int,
    block: Any,
) -> Program:
    number, send, recv, channel = (
        int(block.attrib[name]) for name in ("id", "send", "recv", "chan")
    )
    done[rank, number] = -1
    for index, step in enumerate(block):
        facts = step.attrib
        assert int(facts["s"]) == index
        waits = (rank, int(facts["depid"])), int(facts["deps"])
        while waits[0][1] >= 0 and done.get(waits[0], -1) < waits[1]:
            yield False
        kind, count = facts["type"], int(facts["cnt"])
        source = facts["srcbuf"], int(facts["srcoff"])
        target = facts["dstbuf"], int(facts["dstoff"])
        values: list[Counter[Any]] = []
        if kind.startswith("r") and kind != "re":
            wire = wires.setdefault((recv, rank, channel), deque())
            while not wire:
                yield False
            values = wire.popleft()
            if kind.startswith("rr"):
                values = _sum(values, machine.read(rank, *source, count))
            if kind != "rrs":
                machine.write(rank, *target, values)
        if kind in ("s", "cpy", "re"):
            values = machine.read(rank, *source, count)
        if kind == "re":
            values = _sum(values, machine.read(rank, *target, count))
        if kind in ("cpy", "re"):
            machine.write(rank, *target, values)
        if kind in ("s", "rcs", "rrs", "rrcs"):
            wires.setdefault((rank, send, channel), deque()).append(values)
        done[rank, number] = index
        yield True


# --- MSCCL++ ----------------------------------------------------------------------------


def run_mscclpp(text: str, collective: str, seed: int) -> None:
    """Run an execution plan with one channel for each pair of ranks, and check its result."""
    plan = json.loads(text)
    gpus = plan["gpus"]
    side = "output_chunks" if collective == "all_gather" else "input_chunks"
    per_block = gpus[0][side]
    if collective != "all_reduce":
        per_block //= len(gpus)
    machine = Machine(collective, len(gpus), per_block, 0, plan["inplace"])
    signals: Counter[tuple[int, int]] = Counter()
    programs = [
        _plan_block(machine, signals, gpu, block) for gpu in gpus for block in gpu["threadblocks"]
    ]
    run(Random(seed), programs)
    assert not +signals, "signals that nobody waits for"
    machine.check()


def _plan_block(
    machine: Machine, signals: Counter[tuple[int, int]], gpu: Any, block: Any
) -> Program:
    rank = gpu["id"]
    peers = gpu["channels"][0]["connected_to"] if gpu["channels"] else []

    def place(run: Any) -> tuple[int, str, int]:
        if "type" in run:
            return rank, run["type"], run["index"]
        refs = block["remote_buffer_refs"][0]["remote_buffer_ids"]
        remote = gpu["remote_buffers"][refs[run["buffer_id"]]]
        return remote["rank"], remote["type"], run["index"]

    def read(run: Any) -> list[Counter[Any]]:
        return machine.read(*place(run), run["size"])

    for operation in block["ops"]:
        name = operation["name"]
        ids = block["channels"][0]["channel_ids"] if block["channels"] else []
        for each in operation.get("channel_ids", ()):
            peer = peers[ids[each]]
            if name in ("signal", "rlxsignal"):
                signals[rank, peer] += 1
            else:
                while not signals[peer, rank]:
                    yield False
                signals[peer, rank] -= 1
        if name in ("put", "copy"):
            (source,), (target,) = operation["src_buff"], operation["dst_buff"]
            machine.write(*place(target), read(source))
        elif name == "re":
            first, *others = operation["src_buff"]
            total = read(first)
            for other in others:
                total = _sum(total, read(other))
            machine.write(*place(operation["dst_buff"][0]), total)
        yield True
