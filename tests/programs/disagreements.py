"""The conformance suite of faults, first half: ranks that do not call the same.

A `Kind` is data: the calls of most ranks, and those of the rank that deviates. `run_kinds` makes them on a
rank, over any transport, and `judge` says what became of a kind. The second half, ranks that die or
stop, is `tests.programs.deaths`.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, UserOp, premul_sum
from ringcoll.errors import RingcollError
from ringcoll.runtime.collectives import OwnGroup, communicator
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.transport import Hub, streams
from ringcoll.schedules import CONTRACTS, Schedule, Step, inp, out, recv, reduce, send, tmp
from tests.fakes.fake_nccl import World
from tests.fakes.fake_streams import FakeCuda, in_place, over_nccl
from tests.programs.threads import together

__all__ = [
    "KINDS",
    "Call",
    "Kind",
    "Met",
    "judge",
    "kinds_over",
    "on_threads",
    "run_kinds",
    "run_on_threads",
]

WORLD_SIZE = 3
ODD = 1  # the rank that deviates
SHORT, LONG = 1, 1 << 18  # elements of float32: 4 B and 1 MiB
_LIMIT_S = 20.0  # of operations whose disagreement has to be found, so that no time limit helps
_ABSENT_S = 1.0  # of operations that only the time limit ends
_MESSAGE_S = 3.0  # of a message of the user's own, whose limit is that of the group's making
PROMPT_S = 5.0  # for a disagreement, and after a time limit, on a busy machine


class OddError(Exception):
    """An error of the program on one rank, which is none of the library's."""


# --- calls ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """A call: the name of a function of the library, or of one of `_OTHERS`, and its arguments.

    ``numel`` is the length of the vector, or of each block. ``uneven`` makes one block longer than its
    peer expects. ``group`` is the number of the group.
    """

    name: str
    numel: int = SHORT
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    uneven: int = 0
    group: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Call:
        """The call with other arguments; those that it has no field for are options."""
        own = {name: value for name, value in changes.items() if name in Call.__slots__}
        options = {name: value for name, value in changes.items() if name not in own}
        return replace(self, **own, options={**self.options, **options})


Made = tuple[list[Tensor], Callable[[], object]]
"""The outputs of a call, and what makes it."""

_BLANK = -1


def _own(call: Call, rank: int, numel: int | None = None) -> Tensor:
    """What a rank sends: small integers that differ by rank and index."""
    numel = call.numel if numel is None else numel
    return (torch.arange(numel) % 7 + 10 * (rank + 1)).to(getattr(torch, call.dtype))


def _blank(call: Call, numel: int | None = None) -> Tensor:
    numel = call.numel if numel is None else numel
    return torch.full((numel,), _BLANK, dtype=getattr(torch, call.dtype))


def _operators() -> dict[str, Any]:
    return {
        "premul_sum": premul_sum(2.0),
        "plus": UserOp(torch.add, commutative=True, name="plus"),
        "minus": UserOp(torch.sub, commutative=True, name="minus"),
        "adds": UserOp(_adding([]), commutative=True),
        "raises": UserOp(_adding([OddError("no sums on Sundays")]), commutative=True),
    }


def _adding(errors: list[Exception]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that raises errors, if there are any; ranks do not compare lists."""

    def plus(left: Tensor, right: Tensor) -> Tensor:
        for error in errors:
            raise error
        return left + right

    return plus


def _raise(*_: object) -> Any:
    raise OddError("no sums on Sundays")


def _mine(call: Call, k: int) -> Schedule:
    """A program of the user's own, of which some ranks have another version, ``call.options``."""
    is_newer = call.options["algorithm"] == "mine, newer"
    peers = range(k)

    def program(rank: int) -> Iterator[Step]:
        if call.options["algorithm"] == "mine, raises":
            raise OddError("no program on Sundays")
        others = [peer for peer in peers if peer != rank]
        sends = [send(peer, inp(0 if reduces else rank)) for peer in others]
        if reduces:  # all send to all; versions add in another order
            yield Step(*sends, *(recv(peer, tmp(peer, 0)) for peer in others))
            parts = [inp(0) if peer == rank else tmp(peer, 0) for peer in peers]
            yield Step(reduce(out(0), *(reversed(parts) if is_newer else parts)))
            return
        receives = [recv(peer, out(peer)) for peer in others]
        own = reduce(out(rank), inp(rank))
        if is_newer:  # its own block in a step of its own
            yield Step(*sends, *receives)
            yield Step(own)
        else:
            yield Step(*sends, *receives, own)

    reduces = call.name == "all_reduce"
    return Schedule(call.name, "mine", k, 1 if reduces else k, k, program)


def _options(call: Call, k: int) -> dict[str, Any]:
    options = dict(call.options)
    if "wire_dtype" in options:
        options["wire_dtype"] = getattr(torch, options["wire_dtype"])
    if str(options.get("algorithm")).startswith("mine"):
        options["algorithm"] = _mine(call, k)
    return options


def _make(call: Call, rank: int, groups: Sequence[Any]) -> Made:
    """Make a call ready on a rank."""
    if call.name in _OTHERS:
        return _OTHERS[call.name](call, rank, groups)
    group, k = groups[call.group], WORLD_SIZE
    blocks, after = range(k), (rank + 1) % k
    options = {"group": group, **_options(call, k)}
    reducing = {"op": _operators().get(call.op, call.op), **options}
    x, y = _own(call, rank), _blank(call)
    run = partial(getattr(ringcoll, call.name))
    longer = [call.numel + (call.uneven if peer == after else 0) for peer in blocks]
    match call.name:
        case "all_reduce":
            return [y], partial(run, x, out=y, **reducing)
        case "reduce":
            outs = [y] if rank == call.root else []
            return outs, partial(run, x, group_dst=call.root, out=y, **reducing)
        case "broadcast":
            y = x if rank == call.root else y
            return [y], partial(run, y, group_src=call.root, **options)
        case "all_gather":
            outs = [_blank(call, numel) for numel in longer]
            return outs, partial(run, outs, x, **options)
        case "all_gather_single":
            y = _blank(call, k * call.numel)
            return [y], partial(run, y, x, **options)
        case "gather":
            outs = [_blank(call) for _ in blocks] if rank == call.root else []
            return outs, partial(run, x, outs or None, group_dst=call.root, **options)
        case "scatter":
            sources = [_own(call, rank + peer) for peer in blocks] if rank == call.root else None
            return [y], partial(run, y, sources, group_src=call.root, **options)
        case "reduce_scatter":
            parts = [*_own(call, rank, sum(longer)).split(longer)]
            return [y], partial(run, y, parts, **reducing)
        case "reduce_scatter_single":
            return [y], partial(run, y, _own(call, rank, k * call.numel), **reducing)
        case "all_to_all":
            outs = [_blank(call, numel) for numel in longer]
            return outs, partial(run, outs, [_own(call, rank) for _ in blocks], **options)
        case "all_to_all_single":
            y, x = _blank(call, sum(longer)), _own(call, rank, k * call.numel)
            return [y], partial(run, y, x, longer, [call.numel] * k, **options)
        case "all_reduce_coalesced":
            lengths = options.pop("lengths")
            tensors = [_own(call, rank, n) for n in lengths]
            return tensors, partial(run, tensors, reducing["op"], group)
        case "all_gather_coalesced":
            lengths = options.pop("lengths")
            lists = [[_blank(call, n) for n in lengths] for _ in blocks]
            inputs = [_own(call, rank, n) for n in lengths]
            return [t for part in lists for t in part], partial(run, lists, inputs, group)
        case "all_gather_single_coalesced" | "reduce_scatter_single_coalesced":
            lengths = options.pop("lengths")
            gathers = call.name.startswith("all_gather")
            wide = [_blank(call, k * n) if gathers else _own(call, rank, k * n) for n in lengths]
            thin = [_own(call, rank, n) if gathers else _blank(call, n) for n in lengths]
            first, second = (wide, thin) if gathers else (thin, wide)
            return first, partial(run, first, second, group=group)
        case "barrier":
            return [], partial(run, **options)
    raise AssertionError(call)


def _asynchronous(call: Call, rank: int, groups: Sequence[Any]) -> Made:
    named = replace(call, name=call.options["of"], options={"async_op": True})
    outs, run = _make(named, rank, groups)

    def wait() -> None:
        work: Any = run()
        work.wait()

    return outs, wait


def _planned(call: Call, rank: int, groups: Sequence[Any]) -> Made:
    group, x, y = groups[call.group], _own(call, rank), _blank(call)

    def run() -> None:
        ringcoll.all_reduce.plan(x, group=group, out=y)()

    return [y], run


def _message(call: Call, rank: int, groups: Sequence[Any]) -> Made:
    """A message of the user's own: to the next rank, or from it."""
    group, peer = groups[call.group], (rank + 1) % WORLD_SIZE
    tensor = _own(call, rank) if call.name == "send" else _blank(call)

    def run() -> None:
        if isinstance(group, OwnGroup):
            own: Any = group.isend if call.name == "send" else group.irecv
            own(tensor, peer).wait(timedelta(seconds=_ABSENT_S))
        elif call.name == "send":
            dist.send(tensor, group=group, group_dst=peer)
        else:
            dist.recv(tensor, group=group, group_src=peer)

    return [], run


def _closed(call: Call, rank: int, groups: Sequence[Any]) -> Made:
    group = groups[call.group]
    return [], lambda: ringcoll.close(group)


_OTHERS: dict[str, Callable[[Call, int, Sequence[Any]], Made]] = {
    "asynchronous": _asynchronous,
    "planned": _planned,
    "send": _message,
    "recv": _message,
    "nothing": lambda call, rank, groups: ([], lambda: None),
    "raises": lambda call, rank, groups: ([], _raise),
    "closes": _closed,
}


# --- kinds ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of disagreement.

    Parameters
    ----------
    name
        Name, unique.
    differs
        What the calls differ in: the row of the table.
    usual, odd
        The calls of the other ranks, and those of rank `ODD`, in order.
    ends
        What ends it: ``"compared"``, the calls are compared; ``"limit"``, the time limit, as a rank does
        not come; ``"told"``, a rank that fails or leaves tells; ``"right"``, nothing, as the calls
        agree in effect; ``"unknown"``, perhaps nothing, as some rank waits for nobody.
    has_met
        Whether the group was in use before.
    """

    name: str
    differs: str
    usual: tuple[Call, ...]
    odd: tuple[Call, ...]
    ends: str = "compared"
    has_met: bool = True

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of all ranks."""
        return (*self.usual, *self.odd)

    @property
    def limit_s(self) -> float:
        """Time limit of the operations, in seconds."""
        return _ABSENT_S if self.ends in ("limit", "unknown") else _LIMIT_S

    @property
    def has_messages(self) -> bool:
        """Whether messages of the user's own are among the calls."""
        return any(call.name in ("send", "recv") for call in self.calls)


_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_WITH_DATA = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_single", "gather", "scatter",
    "reduce_scatter", "reduce_scatter_single", "all_to_all", "all_to_all_single",
)  # fmt: skip
_ALGORITHMS = {
    "all_reduce": [("ring", "binomial_tree"), ("direct", "two_shot"), ("ring", "double_tree")],
    "reduce": [("binomial_tree", "direct")],
    "broadcast": [("binomial_tree", "linear"), ("chain", "scatter_all_gather")],
    "all_gather": [("ring", "direct"), ("ring", "bruck")],
    "gather": [("linear", "binomial_tree")],
    "scatter": [("linear", "binomial_tree")],
    "reduce_scatter": [("ring", "direct"), ("ring", "pairwise")],
    "all_to_all": [("pairwise", "bruck")],
}
_PAIRS = (
    ("all_reduce", "reduce"), ("all_reduce", "barrier"), ("all_reduce", "broadcast"),
    ("all_gather", "reduce_scatter"), ("all_gather", "all_to_all"), ("broadcast", "scatter"),
    ("broadcast", "reduce"), ("gather", "reduce"), ("gather", "scatter"), ("barrier", "scatter"),
    ("all_to_all", "reduce_scatter"), ("all_gather_single", "all_reduce"),
)  # fmt: skip
_SIZES = {"4 B": SHORT, "1 MiB": LONG}


def _of_one_call() -> Iterator[Kind]:
    """One call, in which one thing differs."""

    def kind(differs: str, what: str, usual: Call, odd: Call, ends: str = "compared") -> Kind:
        return Kind(f"{differs}: {what}", differs, (usual,), (odd,), ends)

    for size, numel in _SIZES.items():
        for one, other in _PAIRS:
            what = f"{one}, {other}, {size}"
            yield kind("collective", what, Call(one, numel), Call(other, numel))
    for size, numel in _SIZES.items():
        for name in _ROOTED:
            call = Call(name, numel)
            yield kind("root", f"{name}, {size}", call, call.but(root=ODD))
    for name in _REDUCING:
        yield kind("operator", f"{name}, max", Call(name), Call(name, op="max"))
        yield kind("operator", f"{name}, avg, 1 MiB", Call(name, LONG), Call(name, LONG, op="avg"))
    factors = Call("all_reduce", op="premul_sum"), Call("all_reduce")
    yield kind("operator", "all_reduce, premul_sum", *factors)
    users = Call("all_reduce", op="plus"), Call("all_reduce", op="minus")
    yield kind("operator", "all_reduce, the user's", *users)
    for name in _WITH_DATA:
        yield kind("dtype", f"{name}, of one width", Call(name), Call(name, dtype="int32"))
        yield kind("length", name, Call(name), Call(name, SHORT + 1))
        yield kind("length", f"{name}, 1 MiB", Call(name, LONG), Call(name, LONG + 1))
    wide = Call("all_reduce", LONG), Call("all_reduce", LONG // 2, dtype="float64")
    yield kind("dtype", "all_reduce, of as many bytes", *wide)
    yield kind("length", "all_reduce, none", Call("all_reduce"), Call("all_reduce", 0))
    for name in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_single"):
        yield kind("length of a block", name, Call(name, 4), Call(name, 4, uneven=1))
    for name, pairs in _ALGORITHMS.items():
        for one, other in pairs:
            call = Call(name, 12)
            usual, odd = call.but(algorithm=one), call.but(algorithm=other)
            yield kind("algorithm", f"{name}, {one}, {other}", usual, odd)
    for name in ("all_reduce", "all_gather"):
        call = Call(name, 12)
        usual, odd = call.but(algorithm="mine"), call.but(algorithm="mine, newer")
        yield kind("schedule of one name", name, usual, odd)
    for name, algorithm in {
        "all_reduce": "ring", "reduce": "binomial_tree", "broadcast": "chain",
        "all_gather": "ring", "reduce_scatter": "ring",
    }.items():  # fmt: skip
        call = Call(name, LONG).but(algorithm=algorithm, segment_bytes=1 << 16)
        yield kind("segment size", name, call, call.but(segment_bytes=1 << 17))
    for name in _REDUCING:
        yield kind("wire dtype", name, Call(name), Call(name).but(wire_dtype="bfloat16"))
    lengths = (3, 5)
    fused, gathered = Call("all_reduce_coalesced"), Call("all_gather_coalesced")
    yield kind("coalescing", "one vector", fused.but(lengths=lengths), Call("all_reduce", 8))
    swapped = fused.but(lengths=lengths[::-1])
    yield kind("coalescing", "order of tensors", fused.but(lengths=lengths), swapped)
    fewer = fused.but(lengths=(3,))
    yield kind("coalescing", "number of tensors", fused.but(lengths=lengths), fewer)
    swapped = gathered.but(lengths=lengths[::-1])
    yield kind("coalescing", "order of parts", gathered.but(lengths=lengths), swapped)
    single = Call("all_gather_single_coalesced").but(lengths=(4, 4))
    apart = Call("reduce_scatter_single_coalesced").but(lengths=(4, 4))
    yield kind("coalescing", "gather, scatter", single, apart)
    asynchronous = Call("asynchronous").but(of="all_reduce")
    yield kind("asynchronous", "length", asynchronous, asynchronous.but(numel=2))
    yield kind("asynchronous", "operator", asynchronous, asynchronous.but(op="max"))
    yield kind("planned", "length", Call("planned"), Call("planned", 2))
    reduced, barrier = Call("all_reduce"), Call("barrier")
    # What is no disagreement has to go on.
    harmless = "agreement in effect"
    yield kind(harmless, "a plan, a call", reduced, Call("planned"), "right")
    yield kind(harmless, "asynchronous, blocking", reduced, asynchronous, "right")
    yield kind(harmless, "list, tensor", Call("all_gather"), Call("all_gather_single"), "right")
    lists = Call("reduce_scatter"), Call("reduce_scatter_single")
    yield kind(harmless, "list, tensor, reduced", *lists, "right")
    # Nobody comes who could be compared with.
    for what, odd in {"send": Call("send"), "recv": Call("recv")}.items():
        for usual in (reduced, Call("all_gather", LONG), barrier):
            yield kind("message against collective", f"{what}, {usual.name}", usual, odd, "limit")
    yield kind("another group", "two groups", reduced, reduced.but(group=1), "limit")
    failing = "a rank raises"
    yield kind(failing, "its own error", reduced, Call("raises"), "limit")
    yield kind(failing, "bad argument", reduced, Call("all_reduce", op="nonsense"), "limit")
    lost = Call("all_reduce", 12).but(algorithm="mine, raises")
    yield kind(failing, "in its program", lost.but(algorithm="mine"), lost, "limit")
    raising = Call("all_reduce", op="adds"), Call("all_reduce", op="raises")
    yield kind(failing, "in its operator", *raising, "told")
    ring = [call.but(numel=LONG, algorithm="ring") for call in raising]
    yield kind(failing, "in its operator, 1 MiB", ring[0], ring[1], "told")
    for size, numel in _SIZES.items():
        call = Call("all_reduce", numel)
        yield kind("a rank closes the group", size, call, Call("closes"), "told")
        yield kind("a rank skips a call", f"the last, {size}", call, Call("nothing"), "limit")


def _of_several_calls() -> Iterator[Kind]:
    """Calls whose order or number differs, and first calls of a group."""
    total, largest = Call("all_reduce"), Call("all_reduce", op="max")
    orders = {
        "all_reduce, barrier": (total, Call("barrier")),
        "sum, max": (total, largest),
        "sum, max, 1 MiB": (total.but(numel=LONG), largest.but(numel=LONG)),
        "lengths": (total, total.but(numel=2)),
        "dtypes": (total, total.but(dtype="int32")),
        "broadcast, reduce": (Call("broadcast"), Call("reduce")),
        "broadcasts": (Call("broadcast"), Call("broadcast", root=2)),
        "gather, scatter": (Call("gather"), Call("scatter")),
        "all_gather, reduce_scatter": (Call("all_gather"), Call("reduce_scatter")),
    }
    for what, calls in orders.items():
        yield Kind(f"order: {what}", "order", calls, calls[::-1])
    asynchronous = tuple(Call("asynchronous").but(of="all_reduce", op=op) for op in ("sum", "max"))
    yield Kind("order: asynchronous", "order", asynchronous, asynchronous[::-1])
    groups = total, total.but(group=1)
    yield Kind("another group: order of two", "another group", groups, groups[::-1], "limit")
    skips = {
        "barrier": (Call("barrier"), total),
        "broadcast": (Call("broadcast"), total),
        "broadcast, 1 MiB": (Call("broadcast", LONG), total),
        "gather": (Call("gather"), Call("barrier")),
        "all_reduce, 1 MiB": (total.but(numel=LONG), Call("barrier")),
    }
    for what, calls in skips.items():
        yield Kind(f"a rank skips a call: {what}", "a rank skips a call", calls, calls[1:])
    alike = (total,) * 3
    yield Kind(
        "a rank skips a call: one of three", "a rank skips a call", alike, alike[1:], "limit"
    )
    first = "first call of a group"
    for what, odd in {
        "operator": total.but(op="max"),
        "length": total.but(numel=2),
        "collective": Call("barrier"),
        "root": Call("broadcast", root=ODD),
    }.items():
        usual = Call("broadcast") if what == "root" else total
        yield Kind(f"{first}: {what}", first, (usual,), (odd,), has_met=False)
    yield Kind(f"{first}: absent", first, (total,), (Call("nothing"),), "limit", has_met=False)
    yield Kind(f"{first}: groups", first, groups, groups[::-1], "limit", has_met=False)
    last = "last call of a program, nobody waits"
    for name in ("broadcast", "reduce"):
        call = Call(name).but(algorithm={"broadcast": "linear", "reduce": "direct"}[name])
        yield Kind(f"{last}: {name}", last, (call,), (call.but(dtype="int32"),), "unknown")


KINDS: dict[str, Kind] = {kind.name: kind for kind in (*_of_one_call(), *_of_several_calls())}


# --- on a rank ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Met:
    """What a rank met in its calls: an error or none, and then, after none, in one more call.

    ``is_right`` is whether the outputs are those of the rank's own calls, had all ranks made them.
    """

    error: str
    text: str
    is_typed: bool
    seconds: float
    is_right: bool = True
    is_next: bool = False  # the error came in the call after


def _caught(call: Callable[[], object]) -> Met:
    begin = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is judged
        is_typed = isinstance(error, RingcollError | OddError)
        return Met(type(error).__name__, str(error), is_typed, time.monotonic() - begin)
    return Met("", "", True, time.monotonic() - begin)


def _calls_of(kind: Kind, rank: int, is_odd: bool, groups: Sequence[Any]) -> Made:
    made = [_make(call, rank, groups) for call in (kind.odd if is_odd else kind.usual)]

    def run() -> None:
        for _, call in made:
            call()

    return [tensor for outputs, _ in made for tensor in outputs], run


def _finish(run: Callable[[], object], groups: Sequence[Any]) -> None:
    """Make calls, and wait for the results, as whoever reads them does.

    Over NCCL that is a wait for the stream. It says nothing of failures: the log has them, and the next call.
    """
    run()
    for group in groups:
        member = communicator(group, torch.device("cpu"))
        if not member.transport.waits_on_host:
            streams.cuda.current_stream().synchronize()
            if member.broken is not None:
                raise copy(member.broken)


@cache
def _answers(name: str, is_odd: bool, transport: str) -> list[list[Tensor]] | None:
    """The outputs on every rank if all ranks make the same calls; ``None`` if they cannot."""
    kind = KINDS[name]

    def main(rank: int, groups: Sequence[Any]) -> list[Tensor]:
        outputs, run = _calls_of(kind, rank, is_odd, groups)
        _finish(run, groups)
        return outputs

    found = on_threads(main, _LIMIT_S, transport)
    return None if any(isinstance(item, Exception) for item in found) else found


def _limit(group: Any, limit_s: float) -> None:
    """Set the time limit of a group; ranks that meet on a busy machine have more time."""
    communicator(group, torch.device("cpu")).timeout_s = limit_s
    if not isinstance(group, OwnGroup):
        group.set_timeout(timedelta(seconds=limit_s))


def _meets(kind: Kind, rank: int, groups: Sequence[Any], transport: str = "threads") -> Met:
    """Make the calls of a kind; see `Met`. Right answers are those of ``transport``, among threads."""
    for group in groups if kind.has_met else ():
        ringcoll.barrier(group)
    for group in groups:
        _limit(group, kind.limit_s)
    is_odd = rank == ODD
    outputs, run = _calls_of(kind, rank, is_odd, groups)
    met = _caught(lambda: _finish(run, groups))
    if met.error:
        return met
    if outputs:
        answers = _answers(kind.name, is_odd, transport)
        same = answers is not None and all(map(torch.equal, outputs, answers[rank]))
        met = replace(met, is_right=same)
    if kind.ends == "unknown" or (
        is_odd and (kind.ends == "limit" or kind.odd[0].name == "closes")
    ):
        return met
    total = torch.tensor([1.0])
    last = partial(ringcoll.all_reduce, total, group=groups[0], algorithm="ring")
    then = _caught(lambda: _finish(last, groups))
    right = met.is_right and (bool(then.error) or total.item() == WORLD_SIZE)
    return replace(then, is_right=right, is_next=bool(then.error))


def run_kinds(names: Sequence[str], transport: str) -> list[Met]:
    """Make the calls of some kinds at once, on groups of their own of the backend ``ringcoll``."""
    rank = dist.get_rank()
    made = []
    for name in names:
        kind = KINDS[name]
        count = 1 + max(call.group for call in kind.calls)
        limit = timedelta(seconds=_MESSAGE_S if kind.has_messages else _LIMIT_S)
        options = ringcoll.Options(transport=transport)
        made.append(
            [
                dist.new_group(timeout=limit, backend="ringcoll", pg_options=options)
                for _ in range(count)
            ]
        )
    found = together(len(names), lambda at: _meets(KINDS[names[at]], rank, made[at]), 3 * _LIMIT_S)
    dist.barrier()
    for groups in made:
        for group in groups:
            dist.destroy_process_group(group)
    for item in found:
        if isinstance(item, Exception):
            raise item
    return found


# --- on threads -----------------------------------------------------------------------


_standing_in = threading.Lock()
_stand_ins: list[tuple[FakeCuda, contextlib.ExitStack]] = []  # one for all that use it at a time
_users: list[object] = []


@contextlib.contextmanager
def _cuda(transport: str) -> Iterator[FakeCuda | None]:
    """The stand-in for CUDA, if the transport is the stand-in for NCCL."""
    if transport != "nccl":
        yield None
        return
    with _standing_in:
        if not _users:
            stack = contextlib.ExitStack()
            _stand_ins.append((stack.enter_context(in_place()), stack))
        _users.append(None)
        cuda = _stand_ins[0][0]
    try:
        yield cuda
    finally:
        with _standing_in:
            _users.pop()
            if not _users:
                _stand_ins.pop()[1].close()


def on_threads(
    main: Callable[[int, Sequence[Any]], Any], limit_s: float, transport: str = "threads"
) -> list[Any]:
    """Run a function on ranks that are threads, with two groups; what it returned or raised."""
    members: list[list[Communicator]] = [[] for _ in range(WORLD_SIZE)]
    with _cuda(transport) as cuda:

        def rank_main(rank: int) -> Any:
            with cuda.watching() if cuda else contextlib.nullcontext():
                return main(rank, [LocalGroup(member) for member in members[rank]])

        for _ in range(2):
            hub, world, store = Hub(WORLD_SIZE), World(WORLD_SIZE), dist.HashStore()
            for rank, end in enumerate(hub.transports()):
                below: Any = end
                if cuda is not None:
                    below = over_nccl(cuda, world, rank, dist.PrefixStore("meet", store))
                monitor = dist.PrefixStore("monitor", store)
                members[rank].append(Communicator(below, monitor, limit_s))
        try:
            return together(WORLD_SIZE, rank_main, 3 * _LIMIT_S)
        finally:
            for member in (member for own in members for member in own):
                member.close()
            assert cuda is None or cuda.strays == []


def run_on_threads(name: str, transport: str = "threads") -> list[Met]:
    """Make the calls of a kind on ranks that are threads, over their transport or a stand-in for NCCL."""
    kind = KINDS[name]
    found = on_threads(
        lambda rank, groups: _meets(kind, rank, groups, transport), _LIMIT_S, transport
    )
    for item in found:
        if isinstance(item, Exception):
            raise item
    return found


# --- judgement ------------------------------------------------------------------------

_OPERATION = re.compile("|".join([*CONTRACTS, "call \\d+"]))
_OWN_FAULTS = ("a rank raises", "a rank closes the group")  # it knows which rank it is
_PEER = re.compile(r"rank \d+")


def names_operation(text: str) -> bool:
    """Whether an error's text names a collective, or the number of an operation."""
    return _OPERATION.search(text) is not None


def judge(kind: Kind, met: Sequence[Met | None]) -> str:
    """What became of a kind, in a word: ``"right"``, ``"next"`` or what is wrong; the worst of all ranks.

    ``"next"`` is an error on some rank in the call after, as it waited for nobody before.
    """
    words = [_judged(kind, rank, item) for rank, item in enumerate(met)]
    wrong = [word for word in words if word not in ("right", "next", "nothing")]
    if wrong:
        return wrong[0]
    if kind.ends == "right":
        return "right" if set(words) == {"nothing"} else "false alarm"
    if kind.ends == "unknown":
        return "cannot be known" if "nothing" in words else "right"
    if kind.ends in ("limit", "told"):  # the rank that is not there meets nothing
        words.pop(ODD)
    if "nothing" in words:
        return "silent"
    if kind.ends == "compared":
        if not any(item and item.error == "MismatchError" for item in met):
            return "no mismatch"
        return "next" if "next" in words else "right"
    return "right"


def _judged(kind: Kind, rank: int, met: Met | None) -> str:
    if met is None:
        return "hangs or crashes"
    if not met.is_right:
        return "wrong value"
    if not met.error:
        return "nothing"
    if not met.is_typed:
        return "untyped"
    is_own = rank == ODD and (kind.differs in _OWN_FAULTS or kind.has_messages)
    if not is_own and not (_PEER.search(met.text) and names_operation(met.text)):
        return "unnamed"
    if met.seconds > PROMPT_S + (kind.limit_s if kind.ends == "limit" else 0.0):
        return "late"
    return "next" if met.is_next else "right"


def kinds_over(transport: str) -> list[str]:
    """The kinds that are tried over a transport; docs/reliability.md says what is not, and why."""
    if transport != "nccl":
        return [*KINDS]
    return [name for name, kind in KINDS.items() if not kind.has_messages]
