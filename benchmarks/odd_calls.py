"""Odd calls: what a call with an unusual tensor, dtype, flag, option or argument ends in.

A call is drawn from a seed and its number, the same on all ranks: a function of ringcoll, or of
torch.distributed on the backend; a kind of tensor (subclass, layout, flag, memory), for an input or for
an output; a dtype; and options, some of them nonsense. It ends in one of these ways:

*right*: all ranks have the values that exact arithmetic gives, inputs are as they were, and no tensor's
version has moved; *refused*: every rank got the same kind of error, and an all-reduce after it is right;
*wrong*; *broken*: the group cannot be used any more; *crash*: a process ended.

Ranks are threads of a process, and processes. After a call that breaks them, others go on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import threading
import warnings
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.fakes

import numpy as np
import torch
import torch.distributed as dist
from common import LOOPBACK, Table, environment, introduce, parser, write
from torch import Tensor
from torch.nn import Parameter

import ringcoll
from ringcoll.errors import TransportError
from ringcoll.runtime import serve_store
from ringcoll.runtime.reduction import MOVED
from tests.fakes.without_memory import WITHOUT, Wrapper, pending

OUTCOMES = ("right", "refused", "wrong", "broken", "crash")
RANKS = {"threads": 3, "processes": 2}
LIMIT_S = 40.0
PERIOD = 5  # after so many elements values come again
_DTYPES = sorted(
    {dtype for name in dir(torch) if isinstance(dtype := getattr(torch, name), torch.dtype)},
    key=str,
)
_USUAL = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64, torch.bool]
_OPS = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]


class Named(Tensor):
    """A subclass without behaviour of its own."""


class NotMadeError(Exception):
    """There is no such tensor, of this kind and dtype."""


# --- tensors ------------------------------------------------------------------------------------


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """The values of a tensor, in a view of other memory."""
    memory.copy_(tensor)
    return memory


def _shared(tensor: Tensor) -> Tensor:
    return _like(tensor, ringcoll.empty_shared(tensor.numel(), dtype=tensor.dtype))


def _moved(tensor: Any) -> Any:
    return tensor.share_memory_()


def _quantized(tensor: Tensor) -> Tensor:
    return torch.quantize_per_tensor(tensor.float(), 0.5, 1, torch.qint8)


def _inference(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


def _complex_only(make: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def of(tensor: Tensor) -> Tensor:
        if not tensor.is_complex():
            raise NotMadeError
        return make(tensor)

    return of


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda tensor: tensor,
    "strided": lambda tensor: _like(tensor, tensor.new_zeros(3 * len(tensor) + 1)[1::3]),
    "column": lambda tensor: _like(tensor, tensor.new_zeros(len(tensor), 2)[:, 1]),
    "offset": lambda tensor: _like(tensor, tensor.new_zeros(len(tensor) + 5)[5:]),
    "expanded": lambda tensor: tensor[:1].expand(len(tensor)),
    "two-dimensional": lambda tensor: tensor.view(-1, 1),
    "requires grad": lambda tensor: tensor.requires_grad_(),
    "not a leaf": lambda tensor: tensor.requires_grad_() * 1,
    "parameter": Parameter,
    "buffer": torch.nn.Buffer,
    "inference": _inference,
    "conjugate": _complex_only(lambda tensor: tensor.conj().resolve_conj().conj()),
    "conjugate view": _complex_only(lambda tensor: tensor.conj().clone().conj()),
    "imaginary part": lambda tensor: _like(tensor, torch.complex(tensor, tensor).conj().imag),
    "negative": lambda tensor: torch._neg_view(tensor.neg()),
    "subclass": lambda tensor: tensor.as_subclass(Named),
    "wrapper": Wrapper,
    "pending": lambda tensor: pending(tensor, 0.01),
    "lazy clone": torch._lazy_clone,
    "shared": _shared,
    "moved": _moved,
    "of numpy": lambda tensor: torch.from_numpy(tensor.numpy()),
    "sparse": lambda tensor: tensor.to_sparse(),
    "compressed": lambda tensor: tensor.view(-1, 1).to_sparse_csr(),
    "quantized": _quantized,
    "nested": lambda tensor: torch.nested.nested_tensor([tensor, tensor]),
    "a list": lambda tensor: tensor.tolist(),
    "a tuple of it": lambda tensor: (tensor,),
    "an array": lambda tensor: tensor.numpy(),
    "nothing": lambda tensor: None,
    "text": lambda tensor: "tensor",
    **WITHOUT,
}
"""What is made of a flat tensor."""


def contents(tensor: Any) -> Tensor | None:
    """A copy of the elements of a tensor, flat, or ``None`` if it has no elements to look at."""
    if isinstance(tensor, Wrapper):
        tensor = tensor.behind
    if not isinstance(tensor, Tensor) or tensor.is_quantized:  # of those torch itself may crash
        return None
    try:
        plain = tensor.to_dense() if tensor.layout is not torch.strided else tensor
        plain = plain.detach()
        if plain.dtype not in MOVED:  # torch compares its bytes only
            plain = plain.contiguous().view(torch.uint8)
        return plain.clone().resolve_conj().resolve_neg().reshape(-1)
    except (RuntimeError, NotImplementedError):
        return None


def data(rank: int, numel: int, dtype: torch.dtype, salt: int, *, constant: bool = False) -> Tensor:
    """The contribution of a rank: small numbers, different by rank and, unless ``constant``, by index."""
    numbers = (7 * torch.arange(numel) + 3 * rank + salt) % PERIOD + 1
    if constant:
        numbers = numbers[:1].repeat(numel)
    if dtype is torch.bool:
        return numbers % 3 == 0
    if dtype.is_complex:
        return torch.complex(numbers.float(), (numbers % 3).float()).to(dtype)
    try:
        return numbers.to(dtype)
    except (RuntimeError, NotImplementedError):  # its bits, then
        bits = torch.int16 if dtype.itemsize == 2 else torch.uint8
        return numbers.to(torch.int32 if dtype.itemsize == 4 else bits).view(dtype)


def reduced(op: str, parts: list[Tensor], factor: float) -> Tensor:
    """What an operator gives, in exact arithmetic, rounded once."""
    dtype, k, numel = parts[0].dtype, len(parts), len(parts[0])
    firsts = [part[:PERIOD] for part in parts]
    columns = list(zip(*(part.to(torch.complex128 if dtype.is_complex else torch.float64).tolist()
                         for part in firsts), strict=True))  # fmt: skip
    whole = not (dtype.is_floating_point or dtype.is_complex)
    values: list[Any] = []
    for column in columns:
        numbers = [int(one) for one in column] if whole else [*column]
        function: Any = {
            "sum": sum, "avg": sum, "product": math.prod, "premul_sum": sum,
            "min": lambda n: min(n, key=_real),
            "max": lambda n: max(n, key=_real),
            "band": lambda n: _bits(n, int.__and__), "bor": lambda n: _bits(n, int.__or__),
            "bxor": lambda n: _bits(n, int.__xor__),
        }[op]  # fmt: skip
        value: Any = function(numbers)
        if op == "avg":
            value = int(Fraction(value, k)) if whole else value / k
        values.append(value * factor if op == "premul_sum" else value)
    values = [values[index % PERIOD] for index in range(numel)]
    if dtype is torch.bool:
        values = [bool(value) for value in values]
    wide = torch.complex128 if dtype.is_complex else None if whole else torch.float64
    return torch.tensor(values, dtype=wide).to(dtype)


def _real(number: complex) -> float:
    return number.real


def _bits(numbers: list[int], function: Callable[[int, int], int]) -> int:
    first, *rest = numbers
    for number in rest:
        first = function(first, number)
    return first


def same(found: Tensor, wanted: Tensor) -> bool:
    """Whether a result is the wanted one, to a rounding or two of its dtype."""
    if wanted.dtype not in MOVED:
        wanted = wanted.view(torch.uint8)
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return False
    if found.is_floating_point() or found.is_complex():
        eps = torch.finfo(found.dtype).eps
        wide = torch.complex128 if found.is_complex() else torch.float64
        return torch.allclose(found.to(wide), wanted.to(wide), rtol=4 * eps, atol=0)
    return torch.equal(found, wanted)


# --- calls --------------------------------------------------------------------------------------


@dataclass
class Draw:
    """One call: how it is made, and what must be where afterwards."""

    name: str = ""
    words: list[str] = field(default_factory=list)
    run: Callable[[], Any] = lambda: None
    outputs: list[tuple[Any, Tensor]] = field(default_factory=list)
    inputs: list[tuple[Any, Tensor]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.words)})"


class World:
    """One rank of the ranks that make the calls."""

    def __init__(self, group: Any, rank: int, size: int, on_backend: bool) -> None:
        self.group, self.rank, self.size, self.on_backend = group, rank, size, on_backend

    def alive(self) -> bool:
        """Whether the group still gives right values."""
        value = torch.full((3,), self.rank + 1.0)
        ringcoll.all_reduce(value, group=self.group, timeout=LIMIT_S)
        return value.tolist() == [self.size * (self.size + 1) / 2] * 3


FUNCTIONS = (
    *("all_reduce", "all_reduce, out", "all_reduce_coalesced", "reduce", "broadcast", "all_gather"),
    *(
        "all_gather_single",
        "all_gather_coalesced",
        "all_gather_single_coalesced",
        "gather",
        "scatter",
    ),
    *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced", "all_to_all"),
    *("all_to_all_single", "barrier", "monitored_barrier", "messages"),
)
ON_BACKEND = ("objects", "batch", "object lists")
GARBAGE: tuple[Any, ...] = ("nonsense", -1, 1.5, [], object(), b"x", None, True)


def draw(world: World, rng: random.Random) -> Draw:
    """Draw a call; all ranks draw the same."""
    k, rank, one = world.size, world.rank, Draw()
    through_dist = world.on_backend and rng.random() < 0.5
    names = FUNCTIONS + (ON_BACKEND if through_dist else ())
    one.name = name = rng.choice(names)
    if through_dist and name.endswith("coalesced") and name != "all_reduce_coalesced":
        raise NotMadeError
    dtype = rng.choice(_USUAL if rng.random() < 0.6 else _DTYPES)
    kind = rng.choice(["plain", *KINDS])
    odd_output = rng.random() < 0.5
    numel = rng.choice([1, 2, 3, 7, 100, 9000, 20_000])
    salt, is_async = rng.randrange(5), rng.random() < 0.3
    one.words = [str(dtype), kind, "output" if odd_output else "input", f"{numel} elements"]
    options: dict[str, Any] = {"group": None if world.on_backend else world.group}
    reduces = "reduce" in name
    op: Any = "sum"
    factor = 1.0
    if reduces:
        op = rng.choice(["sum", *_OPS, "premul_sum"])
        factor = 2.0 if op == "premul_sum" else 1.0
        given: Any = rng.choice([op, op.upper()]) if not through_dist else None
        if op == "premul_sum":
            given = rng.choice([ringcoll.premul_sum(2.0), ringcoll.premul_sum(torch.tensor([2.0]))])
        if through_dist:
            given = getattr(dist.ReduceOp, op.upper()) if op != "premul_sum" else dist.ReduceOp.SUM
            op, factor = ("sum", 1.0) if op == "premul_sum" else (op, factor)
        if rng.random() < 0.05:
            given = rng.choice(GARBAGE)
            op = "sum"
            one.words.append(f"op {given!r:.20}")
        options["op"] = given
        one.words.append(op)
    if through_dist:
        one.words.append("torch.distributed")
    elif name not in ("barrier", "monitored_barrier", "messages"):
        if rng.random() < 0.25:
            options["algorithm"] = rng.choice(["ring", "tree", "direct", "pairwise", *GARBAGE])
        if rng.random() < 0.15 and "all_to_all" not in name:
            options["segment_bytes"] = rng.choice([64 * numel, 1 << 20, *GARBAGE[:-1]])
        if rng.random() < 0.15 and reduces:
            options["wire_dtype"] = rng.choice([torch.bfloat16, torch.float32, *_DTYPES, *GARBAGE])
        if rng.random() < 0.15 and reduces:
            options["reproducible"] = rng.choice([True, "any_world_size", *GARBAGE])
        limits = [9, timedelta(seconds=9), np.int64(9), np.float32(9), 0, math.nan, *GARBAGE]
        if rng.random() < 0.15:
            options["timeout"] = rng.choice([limit for limit in limits if limit is not True])
        one.words += [
            f"{key} {str(value)[:20]}"
            for key, value in options.items()
            if key not in ("group", "op")
        ]
    if name not in ("monitored_barrier", "messages", *ON_BACKEND):
        options["async_op"] = is_async
        one.words += ["asynchronous"] * is_async
    is_plan = not through_dist and rng.random() < 0.15 and "barrier" not in name
    one.words += ["prepared"] * is_plan

    def api(function: str) -> Callable[..., Any]:
        if through_dist:
            torch_names = {
                "all_gather_single": "all_gather_into_tensor",
                "reduce_scatter_single": "reduce_scatter_tensor",
            }
            torch_function: Callable[..., Any] = getattr(dist, torch_names.get(function, function))
            return torch_function
        public = getattr(ringcoll, function)

        def prepared(*arguments: Any, **keywords: Any) -> Any:
            return public.plan(*arguments, **keywords)()

        return prepared if is_plan else public  # type: ignore[no-any-return]

    def own(r: int, n: int) -> Tensor:
        return data(r, n, dtype, salt, constant=kind == "expanded")

    def made(values: Tensor, *, odd: bool) -> Any:
        if not odd:
            return values
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return KINDS[kind](values)

    def source(n: int = numel, r: int = rank, *, odd: bool | None = None) -> Any:
        tensor = made(own(r, n), odd=not odd_output if odd is None else odd)
        seen = contents(tensor) if kind not in WITHOUT and kind != "pending" else None
        if seen is not None:
            one.inputs.append((tensor, seen))
        return tensor

    def target(wanted: Tensor, *, odd: bool | None = None) -> Any:
        tensor = made(torch.zeros_like(wanted), odd=odd_output if odd is None else odd)
        one.outputs.append((tensor, wanted))
        return tensor

    def in_place(wanted: Tensor, values: Tensor) -> Any:
        tensor = made(values, odd=True)
        if kind == "expanded":
            wanted = wanted[:1].expand(len(wanted))
        one.outputs.append((tensor, wanted))
        return tensor

    def total(n: int = numel) -> Tensor:
        try:
            return reduced(op, [own(r, n) for r in range(k)], factor)
        except (RuntimeError, TypeError, ValueError):
            return own(rank, n)  # there is no result, so the call must be refused

    root = rng.randrange(k)
    everything = torch.cat([own(r, numel) for r in range(k)])
    here = rank == root
    call = api(name.partition(",")[0]) if name not in ("messages", *ON_BACKEND) else None
    arguments: list[Any] = []
    if name in ("all_reduce", "broadcast", "reduce"):
        values = {"broadcast": own(root, numel)}.get(name)
        wanted = total() if values is None else values
        if name == "reduce" and not here:
            wanted = own(rank, numel)
        if name == "reduce" and kind == "expanded":  # only the root refuses it
            raise NotMadeError
        arguments = [in_place(wanted, own(rank, numel))]
        options |= {"broadcast": {"src": root}, "reduce": {"dst": root}}.get(name, {})
    elif name == "all_reduce, out":
        if through_dist:
            raise NotMadeError
        arguments, options["out"] = [source()], target(total())
        if options["out"] is None:  # then the result is in the input
            raise NotMadeError
    elif name == "all_reduce_coalesced":
        short = made(own(rank, 2), odd=False)
        one.outputs.append((short, total(2)))
        arguments = [[short, in_place(total(), own(rank, numel))]]
    elif name in ("all_gather", "gather"):
        tensor = source(odd=True if name == "gather" else None)
        lists = [
            target(own(r, numel), odd=odd_output and r == 1 and name != "gather") for r in range(k)
        ]
        if name == "gather":
            options["dst"] = root
            if not here:
                one.outputs.clear()
        arguments = [lists, tensor] if name == "all_gather" else [tensor, lists if here else None]
    elif name == "all_gather_single":
        arguments = [target(everything), source()]
    elif name == "all_gather_single_coalesced":
        arguments = [[target(everything)], [source()]]
    elif name == "all_gather_coalesced":
        arguments = [[[target(own(r, numel), odd=False)] for r in range(k)], [source(odd=True)]]
    elif name == "scatter":
        wanted = own(rank, numel)
        arguments = [target(wanted, odd=True)]
        arguments.append([source(r=r, odd=False) for r in range(k)] if here else None)
        options["src"] = root
    elif name == "reduce_scatter":
        blocks = [source(odd=False) for _ in range(k - 1)]
        arguments = [target(total()), [*blocks, source()]]
    elif name in ("reduce_scatter_single", "reduce_scatter_single_coalesced"):
        wanted = total(k * numel)[rank * numel : (rank + 1) * numel]
        arguments = [target(wanted), source(k * numel)]
        if name.endswith("coalesced"):
            arguments = [[each] for each in arguments]
    elif name == "all_to_all":
        arguments = [
            [target(own(r, numel), odd=odd_output and r == 0) for r in range(k)],
            [source(odd=not odd_output and r == 0) for r in range(k)],
        ]
    elif name == "all_to_all_single":
        sizes = rng.choice([None, [numel] * k, torch.tensor([numel] * k), (numel,) * k, [1.5] * k])
        wanted = torch.cat([own(r, k * numel)[rank * numel : (rank + 1) * numel] for r in range(k)])
        arguments = [target(wanted), source(k * numel), sizes, sizes]
    elif name == "barrier":
        if rng.random() < 0.3:
            options["device_ids"] = rng.choice(GARBAGE)
    elif name == "monitored_barrier":
        options["timeout"] = timedelta(seconds=9)
    elif name in ("messages", "batch"):
        to, frm = (rank + 1) % k, (rank - 1) % k
        sent, got = source(), target(own(frm, numel))
        tag = rng.choice([0, 1, 77])

        def exchange() -> None:
            starts: list[Any]
            works: list[Any]
            if name == "batch":
                messages = [dist.P2POp(dist.irecv, got, frm), dist.P2POp(dist.isend, sent, to)]
                works = dist.batch_isend_irecv(messages)
            elif world.on_backend:
                # Whatever is refused is refused before the other message is under way.
                starts = [(dist.irecv, got, frm), (dist.isend, sent, to)]
                works = [
                    start(t, peer, tag=tag) for start, t, peer in starts[:: 1 if odd_output else -1]
                ]
            else:
                starts = [(world.group.irecv, got, frm), (world.group.isend, sent, to)]
                works = [
                    start(t, peer, tag) for start, t, peer in starts[:: 1 if odd_output else -1]
                ]
            for work in works:
                work.wait()

        one.run = exchange
        return one
    elif name == "objects":
        things = [None] * k
        thing = {"rank": rank, "salt": salt}

        def gather_objects() -> None:
            dist.all_gather_object(things, thing)
            assert things == [{"rank": r, "salt": salt} for r in range(k)]

        one.run = gather_objects
        return one
    elif name == "object lists":
        listed: list[Any] = [salt, "text"] if here else [None, None]

        def broadcast_objects() -> None:
            dist.broadcast_object_list(listed, root)
            assert listed == [salt, "text"]

        one.run = broadcast_objects
        return one

    def run() -> None:
        assert call is not None
        work = call(*arguments, **options)
        if work is not None and hasattr(work, "wait"):
            work.wait()

    one.run = run
    return one


def outcome(world: World, seed: int, number: int) -> tuple[str, str]:
    """Make a call; the outcome on this rank, and words about it."""
    try:
        return _outcome(world, seed, number)
    except Exception as error:  # noqa: BLE001  # of this script
        return "wrong", f"the script: {error!r:.300}"


def _outcome(world: World, seed: int, number: int) -> tuple[str, str]:
    one = None
    for attempt in range(20):
        with contextlib.suppress(NotMadeError, RuntimeError, TypeError, ValueError, SystemError):
            one = draw(world, random.Random(f"{seed} {number} {attempt}"))
            break
    if one is None:
        return "wrong", "the script: nothing could be drawn"
    own = lambda tensor: {id(tensor), id(getattr(tensor, "_base", None))} - {id(None)}  # noqa: E731
    written = {part for tensor, _ in one.outputs for part in own(tensor)}
    versions = []
    for tensor, _ in one.inputs:
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):  # it has no version
            if not written & own(tensor):  # views share their version
                versions.append((tensor, tensor._version))
    try:
        one.run()
    except AssertionError as error:
        return "wrong", f"{one}: {error!r:.200}"
    except Exception as error:  # noqa: BLE001  # it is what is asked
        if isinstance(error, TransportError):
            return "broken", f"{one}: {error!r:.300}"
        try:
            lives = world.alive()
        except Exception as after:  # noqa: BLE001  # likewise
            return "broken", f"{one}: {error!r:.200}; then {after!r:.300}"
        return ("refused" if lives else "broken"), f"{one}: {error!r:.150}"
    for tensor, wanted in one.outputs:
        found = contents(tensor)
        if isinstance(tensor, tuple):
            (found,) = map(contents, tensor)
        if found is None or not same(found, wanted):
            return "wrong", f"{one}: {found!s:.100} is not {wanted!s:.100}"
    for tensor, before in one.inputs:
        found = contents(tensor)
        if found is None or not same(found, before):
            return "wrong", f"{one}: an input has changed"
    if any(tensor._version != before for tensor, before in versions):
        return "wrong", f"{one}: the version of an input has moved"
    return "right", str(one)


# --- ranks --------------------------------------------------------------------------------------


def tell(*facts: object) -> None:
    """Write a line; lines of several threads do not mix."""
    os.write(sys.stdout.fileno(), f"{json.dumps(facts)}\n".encode())


def work(world: World, seed: int, first: int, last: int) -> None:
    """Make calls until one breaks the group; tell about each in a line of JSON."""
    for number in range(first, last):
        told = outcome(world, seed, number)
        tell(number, world.rank, *told)
        if told[0] == "broken":
            break


def on_threads(seed: int, first: int, last: int) -> None:
    """Ranks that are threads of this process; they go from call to call together."""
    k = RANKS["threads"]
    barrier = threading.Barrier(k)
    stops: list[int] = []

    def main(group: ringcoll.LocalGroup) -> None:
        world = World(group, group.rank(), k, on_backend=False)
        for number in range(first, last):
            told = outcome(world, seed, number)
            tell(number, group.rank(), *told)
            if told[0] == "broken":
                stops.append(number)
            barrier.wait(60)
            if stops:
                break

    with contextlib.suppress(Exception):
        ringcoll.run_threads(main, k, timeout_s=LIMIT_S)
    os._exit(0)


def on_processes(rank: int, port: int, seed: int, first: int, last: int) -> None:
    """One rank that is a process."""
    k = RANKS["processes"]
    store = dist.TCPStore(LOOPBACK, port, None, False)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("ringcoll", store=store, rank=rank, world_size=k, timeout=limit)
    work(World(None, rank, k, on_backend=True), seed, first, last)
    os._exit(0)


def lines_of(kind: str, arguments: Namespace, first: int, last: int) -> Iterator[list[Any]]:
    """Run ranks; what they tell, and ``[number, rank, "crash", ...]`` of a rank that has ended badly."""
    words = ["--seed", str(arguments.seed), "--span", f"{first},{last}", "--as", kind]
    store = serve_store(LOOPBACK)
    with contextlib.ExitStack() as stack:
        processes = []
        for rank in range(RANKS[kind] if kind == "processes" else 1):
            said = stack.enter_context(tempfile.TemporaryFile("w+"))
            command = [sys.executable, __file__, *words, "--rank", f"{rank},{store.port}"]
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.DEVNULL)
            processes.append((process, said))
        for rank, (process, said) in enumerate(processes):
            process.wait()
            said.seek(0)
            told = [json.loads(line) for line in said if line.startswith("[")]
            yield from told
            if process.returncode < 0:
                done = min(map(len, _by_rank(told)), default=0)
                yield [first + done, rank, "crash", f"signal {-process.returncode}"]


def _by_rank(told: list[list[Any]]) -> list[list[Any]]:
    return [[line for line in told if line[1] == rank] for rank in {line[1] for line in told}]


def run(kind: str, arguments: Namespace) -> dict[int, tuple[str, str]]:
    """Make all calls on ranks of one kind: outcome and words of each, by number."""
    found: dict[int, tuple[str, str]] = {}
    first = 0
    while first < arguments.calls:
        told: dict[int, list[tuple[str, str]]] = {}
        for number, _, what, about in lines_of(kind, arguments, first, arguments.calls):
            told.setdefault(number, []).append((what, about))
        for number, each in sorted(told.items()):
            worst = max(each, key=lambda one: OUTCOMES.index(one[0]))
            names = {what for what, _ in each}
            is_whole = len(each) == RANKS[kind] or "crash" in names
            if names == {"right", "refused"}:
                worst = "broken", f"only some ranks refuse it: {worst[1]}"
            found[number] = worst if is_whole else ("broken", f"a rank says nothing: {worst[1]}")
            if found[number][0] in {"wrong", "broken", "crash", *arguments.show.split(",")}:
                print(f"{kind} {number}: {': '.join(found[number])}", file=sys.stderr, flush=True)
        first = max(told, default=first) + 1
    return found


def main() -> None:
    """Draw and make calls; fail if one is wrong, breaks a group or ends a process."""
    options = parser(__doc__)
    options.add_argument("--calls", type=int, default=3000, help="calls, on each kind of ranks")
    options.add_argument("--seed", type=int, default=0, help="what decides what is drawn")
    options.add_argument("--ranks", choices=(*RANKS, "both"), default="both", help="kind of ranks")
    options.add_argument("--show", default="", help="outcomes of which every call is printed: a,b")
    options.add_argument("--as", dest="worker", help="for ranks that the script starts")
    options.add_argument("--span", help="likewise")
    options.add_argument("--rank", help="likewise")
    arguments = options.parse_args()
    if arguments.worker:
        warnings.simplefilter("ignore")
        span = [int(number) for number in arguments.span.split(",")]
        rank, port = map(int, arguments.rank.split(","))
        if arguments.worker == "threads":
            on_threads(arguments.seed, *span)
        on_processes(rank, port, arguments.seed, *span)
    facts = environment(max(RANKS.values()))
    introduce(facts)
    rows, bad = [], 0
    for kind in RANKS if arguments.ranks == "both" else (arguments.ranks,):
        found = run(kind, arguments)
        counts = Counter(what for what, _ in found.values())
        rows.append([kind, RANKS[kind], *(counts[what] for what in OUTCOMES)])
        bad += sum(counts[what] for what in ("wrong", "broken", "crash"))
    columns = {"ranks": "text", "k": "count", **dict.fromkeys(OUTCOMES, "count")}
    table = Table(columns, rows, "Calls by what they ended in.")
    table.show()
    write(arguments.json, __doc__, facts, [table])
    if bad:
        sys.exit(1)


if __name__ == "__main__":
    main()
