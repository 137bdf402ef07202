"""What collectives have to do with tensors of a device, as functions that all ranks run together.

Each is called with a group and a device, and returns what is wrong, in words. On a
GPU, what is sent is written by kernels that come after a long one, on streams of several kinds;
on the CPU the same functions run without streams.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringcoll
from ringcoll.errors import ArgumentError, RingcollError
from tests.cases.calls import USER_OPS
from tests.programs.ranks import fresh_group

__all__ = [
    "CHECKS",
    "HOST_CHECKS",
    "NCCL_CHECKS",
    "around_a_ring",
    "check_on_rank",
    "losses_of_all_data",
    "losses_of_rank",
    "run_check",
    "told_at_first",
]

_BUSY_CYCLES = 4_000_000  # some 2 ms: longer than a short operation takes that does not wait


class Place:
    """A rank, the device of its tensors, and ``torch.cuda``, or what stands for it, if it has streams."""

    def __init__(self, group: Any, device: torch.device, cuda: Any = None) -> None:
        self.group, self.device = group, device
        self.cuda = torch.cuda if cuda is None and device.type == "cuda" else cuda
        self.rank = dist.get_rank() if group is None else group.rank()
        self.world_size = dist.get_world_size() if group is None else group.size()
        self.wrong: list[str] = []

    @property
    def sum_of_ranks(self) -> int:
        return self.world_size * (self.world_size - 1) // 2

    def full(self, numel: int, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((numel,), value, dtype=dtype, device=self.device)

    def busy(self) -> None:
        """Let the current stream take its time."""
        if self.cuda is torch.cuda:
            torch.cuda._sleep(_BUSY_CYCLES)

    def stream(self) -> Any:
        """A stream, after all that was enqueued on the current one; none where there are none."""
        if self.cuda is None:
            return None
        made = self.cuda.Stream()
        made.wait_event(self.cuda.current_stream().record_event())
        return made

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """Use a stream, after all that was enqueued on the current one; which comes after it."""
        if stream is None:
            yield
            return
        stream.wait_event(self.cuda.current_stream().record_event())
        with self.cuda.stream(stream):
            yield
            end = stream.record_event()
        self.cuda.current_stream().wait_event(end)

    def expect(self, what: str, found: Tensor, value: float) -> None:
        if not bool((found == value).all()):
            got = found.reshape(-1)[:4].tolist()
            self.wrong.append(f"rank {self.rank}: {what} is {got}, expected {value}")


def _wait(work: Any) -> None:
    assert work is not None
    assert work.wait()


def many_in_flight(place: Place) -> None:
    """Written late, waited for in reverse; short and long ones, chained where they share memory."""
    tensors = [place.full(3 + 997 * (n % 4), -1) for n in range(16)]
    works = []
    for n, tensor in enumerate(tensors):
        place.busy()
        tensor.fill_(n + place.rank)
        works.append(ringcoll.all_reduce(tensor, group=place.group, async_op=True))
        if n % 4 == 3:
            works.append(ringcoll.all_reduce(tensor, group=place.group, async_op=True))
    for work in reversed(works):
        _wait(work)
    for n, tensor in enumerate(tensors):
        total = place.world_size * n + place.sum_of_ranks
        place.expect(f"sum {n}", tensor, total * (place.world_size if n % 4 == 3 else 1))


def waited_for_on_another_stream(place: Place) -> None:
    """What is enqueued on the stream on which `wait` was called comes after the operation."""
    tensor, seen = place.full(5000, 0), place.full(5000, 0)
    second = place.stream()
    with place.on(place.stream()):
        place.busy()
        tensor.fill_(place.rank + 1)
        work = ringcoll.all_reduce(tensor, group=place.group, async_op=True)
        # Not after the first one's end: only the operation says what it comes after.
        with contextlib.nullcontext() if second is None else place.cuda.stream(second):
            _wait(work)
            seen.copy_(tensor)
            tensor.fill_(7)
            ringcoll.all_reduce(tensor, group=place.group)
    with place.on(second):
        place.expect("what was seen", seen, place.sum_of_ranks + place.world_size)
        place.expect("what was written then", tensor, 7 * place.world_size)


def alternating_streams(place: Place) -> None:
    """Blocking operations of a group come one after the other, whatever stream is current."""
    streams = [place.stream(), place.stream()]
    tensors = [place.full(2000, -1) for _ in range(6)]
    for n, tensor in enumerate(tensors):
        stream = streams[n % 2]
        with place.on(stream):
            place.busy()
            tensor.fill_(n * place.rank)
            ringcoll.all_reduce(tensor, group=place.group, wire_dtype=torch.bfloat16)
        place.expect(f"sum {n}", tensor, n * place.sum_of_ranks)


def futures(place: Place) -> None:
    """A callback sees the result, and what it gives is in order for who waits."""
    tensor = place.full(3000, -1)
    place.busy()
    tensor.fill_(place.rank)
    work = ringcoll.all_reduce(tensor, group=place.group, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda done: [done.value()[0] * 2])
    place.expect("the future's", doubled.wait()[0], 2 * place.sum_of_ranks)
    _wait(work)
    place.expect("the tensor", tensor, place.sum_of_ranks)


def persistent(place: Place) -> None:
    """Operations that are prepared once, from several streams, with a wire dtype and without."""
    aside = place.stream()
    for async_op in (False, True):
        tensor, narrow = place.full(1001, -1), place.full(40, -1, torch.bfloat16)
        operations = [
            ringcoll.all_reduce.plan(tensor, group=place.group, async_op=async_op),
            ringcoll.all_reduce.plan(
                narrow, "max", place.group, async_op, wire_dtype=torch.bfloat16
            ),
        ]
        for turn in range(6):
            with place.on(aside) if turn // 2 % 2 else contextlib.nullcontext():
                place.busy()
                tensor.fill_(turn + place.rank)
                narrow.fill_(turn + place.rank)
                for work in [operation() for operation in operations]:
                    if async_op:
                        _wait(work)
            total = place.world_size * turn + place.sum_of_ranks
            place.expect(f"sum in turn {turn}", tensor, total)
            place.expect(f"maximum in turn {turn}", narrow, turn + place.world_size - 1)


def coalesced(place: Place) -> None:
    """Several tensors in one call, some of them strided."""
    k, rank = place.world_size, place.rank
    for async_op in (False, True):
        strided = place.full(60, rank).view(20, 3)[:, 1]
        tensors = [place.full(5, rank), strided, place.full(30_000, 2 * rank)]
        works = [ringcoll.all_reduce_coalesced(tensors, "sum", place.group, async_op)]
        outs = [place.full(4 * k, -1), place.full(k, -1)]
        parts = [place.full(4, rank), place.full(1, 3 * rank)]
        works.append(
            ringcoll.all_gather_single_coalesced(outs, parts, place.group, async_op=async_op)
        )
        shares = [place.full(2, -1), place.full(1, -1)]
        wholes = [place.full(2 * k, rank), place.full(k, 1)]
        works.append(
            ringcoll.reduce_scatter_single_coalesced(
                shares, wholes, "sum", place.group, async_op=async_op
            )
        )
        for work in works:
            if async_op:
                _wait(work)
        for tensor, factor in zip(tensors, (1, 1, 2), strict=True):
            place.expect("a coalesced sum", tensor, factor * place.sum_of_ranks)
        for peer in range(k):
            place.expect("a gathered part", outs[0][4 * peer : 4 * peer + 4], peer)
            place.expect("a gathered part", outs[1][peer], 3 * peer)
        place.expect("a share", shares[0], place.sum_of_ranks)
        place.expect("a share", shares[1], k)


def in_and_out_of_place(place: Place) -> None:
    """Parts of one tensor as input and output, and an output of another layout."""
    k, rank = place.world_size, place.rank
    whole = place.full(1000 * k, -1)
    own = whole[1000 * rank : 1000 * (rank + 1)]
    own.fill_(rank)
    ringcoll.all_gather_single(whole, own, place.group)
    for peer in range(k):
        place.expect(f"part {peer}", whole[1000 * peer : 1000 * (peer + 1)], peer)
    whole.fill_(rank)
    ringcoll.reduce_scatter_single(own, whole, group=place.group)
    place.expect("the share", own, place.sum_of_ranks)
    memory = place.full(4002, -1)
    given, out = place.full(2000, rank), memory[1:4001:2]
    ringcoll.all_reduce(given, group=place.group, out=out, algorithm="ring")
    place.expect("the output", out, place.sum_of_ranks)
    place.expect("the input", given, rank)
    place.expect("what is beside the output", memory[::2], -1)


def factors(place: Place) -> None:
    """PREMUL_SUM with factors that differ by rank: numbers, and tensors on either device."""
    factor = 2.0 + place.rank
    for given in (factor, torch.tensor(factor), torch.tensor([factor], device=place.device)):
        for dtype in (torch.float32, torch.float16, torch.complex64):
            tensor = place.full(100, 10, dtype)
            ringcoll.all_reduce(tensor, ringcoll.premul_sum(given), place.group)
            total = 10 * (2 * place.world_size + place.sum_of_ranks)
            place.expect(f"the sum of {dtype}", tensor, total)


def operators_of_the_users(place: Place) -> None:
    """torch's operators do them, wherever the tensors are: commutative, and in rank order only."""
    tensor = place.full(100, place.rank + 1, torch.int64)
    ringcoll.all_reduce(tensor, USER_OPS["user_sum"], place.group, algorithm="ring")
    place.expect("the sum", tensor, place.sum_of_ranks + place.world_size)
    tensor.fill_(place.rank)
    last = ringcoll.UserOp(lambda left, right: right.clone(), name="the last")
    ringcoll.all_reduce(tensor, last, place.group)
    place.expect("the last", tensor, place.world_size - 1)


def wire_dtypes(place: Place) -> None:
    """Numbers that the wire dtype has arrive as they are, and others are rounded to it."""
    for dtype, wire in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, None),
        (torch.float64, torch.float32),
    ):
        for algorithm in ("ring", "tree", "direct"):
            tensor = place.full(777, place.rank, dtype)
            ringcoll.all_reduce(tensor, group=place.group, algorithm=algorithm, wire_dtype=wire)
            place.expect(f"{algorithm}, {dtype} by {wire}", tensor, place.sum_of_ranks)
    tensor = place.full(50, 1 + 2.0**-10)
    ringcoll.all_reduce(tensor, "max", place.group, wire_dtype=torch.bfloat16)
    place.expect("what bfloat16 does not have", tensor, 1)


def long_vectors(place: Place) -> None:
    """Several MiB, in segments, by several algorithms; every element differs."""
    numel = 1_500_007
    index = torch.arange(numel, device=place.device, dtype=torch.int32)
    wanted = index * place.world_size + place.sum_of_ranks
    for algorithm in ("auto", "ring", "tree", "double_tree", "rabenseifner"):
        for segment_bytes in (None, 1 << 20):
            if algorithm == "rabenseifner" and segment_bytes:
                continue
            tensor = index + place.rank
            ringcoll.all_reduce(
                tensor, group=place.group, algorithm=algorithm, segment_bytes=segment_bytes
            )
            place.expect(f"{algorithm} minus what is wanted", tensor - wanted, 0)


def tensors_that_nobody_keeps(place: Place) -> None:
    """Inputs are dropped, and their memory is asked for again, while they are still to be sent."""
    outs = [place.full(40_000, -1) for _ in range(8)]
    works = []
    for n, out in enumerate(outs):
        place.busy()
        given = place.full(40_000, n * place.rank)
        works.append(
            ringcoll.all_reduce(given, group=place.group, out=out, async_op=True, algorithm="ring")
        )
        del given
        place.full(40_000, 99)
    for work in works:
        _wait(work)
    for n, out in enumerate(outs):
        place.expect(f"sum {n}", out, n * place.sum_of_ranks)


def all_to_all_and_roots(place: Place) -> None:
    """What only moves: from and to every root, after a busy stream."""
    k, rank = place.world_size, place.rank
    given = torch.arange(k, device=place.device).repeat_interleave(500) + 100 * rank
    found = torch.full_like(given, -1)
    place.busy()
    ringcoll.all_to_all_single(found, given, group=place.group)
    for peer in range(k):
        place.expect("a piece", found[500 * peer : 500 * (peer + 1)], 100 * peer + rank)
    for root in range(k):
        tensor = place.full(900, -1)
        place.busy()
        tensor.fill_(rank)
        ringcoll.broadcast(tensor, group=place.group, group_src=root)
        place.expect("the root's", tensor, root)
        tensor.fill_(rank)
        ringcoll.reduce(tensor, group=place.group, group_dst=root)
        place.expect("the sum", tensor, place.sum_of_ranks if rank == root else rank)


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _unwarned() -> Iterator[None]:
    """Let torch say nothing of kinds of tensors that are new, or old; filters are all threads'."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _quantised(device: torch.device) -> Tensor:
    with _unwarned():
        return torch.quantize_per_tensor(torch.zeros(3, device=device), 0.1, 0, torch.qint8)


def _in_rows(device: torch.device) -> Tensor:
    with _unwarned():
        return torch.eye(3, device=device).to_sparse_csr()


def bad_calls(place: Place) -> None:
    """Each is refused before anything moves, and the group can go on."""
    device, group, k = place.device, place.group, place.world_size
    elsewhere = torch.device("cpu" if device.type == "cuda" else "meta")
    here, there = torch.ones(4, device=device), torch.ones(4, device=elsewhere)
    sparse = torch.eye(3, device=device).to_sparse()
    calls: dict[str, Callable[[], object]] = {
        "an output elsewhere": lambda: ringcoll.all_reduce(here, group=group, out=there),
        "an input elsewhere": lambda: ringcoll.all_gather_single(
            torch.ones(4 * k, device=device), there, group
        ),
        "one of a list elsewhere": lambda: ringcoll.all_gather(
            [there, *(torch.ones(4, device=device) for _ in range(k - 1))], here, group
        ),
        "coalesced, one elsewhere": lambda: ringcoll.all_reduce_coalesced(
            [here, there], group=group
        ),
        "a sparse tensor": lambda: ringcoll.broadcast(sparse, group=group, group_src=0),
        "the maximum of sparse tensors": lambda: ringcoll.all_reduce(sparse, "max", group),
        "sparse rows": lambda: ringcoll.all_reduce(_in_rows(device), group=group),
        "a quantised tensor": lambda: ringcoll.all_reduce(_quantised(device), group=group),
        "bits of floats": lambda: ringcoll.all_reduce(here, "band", group),
        "the maximum of complex numbers": lambda: ringcoll.all_reduce(here + 0j, "max", group),
        "scaled integers": lambda: ringcoll.all_reduce(here.int(), ringcoll.premul_sum(2.0), group),
        "integers by a wire of floats": lambda: ringcoll.all_reduce(
            here.int(), group=group, wire_dtype=torch.bfloat16
        ),
    }
    for what, call in calls.items():
        try:
            call()
        except ArgumentError as error:
            if f"rank {place.rank}" not in str(error):
                place.wrong.append(f"{what}: no rank is named: {error}")
        else:
            place.wrong.append(f"rank {place.rank}: {what} is not refused")
    place.expect("what was not to be changed", here, 1)
    ringcoll.all_reduce(here, group=group)
    place.expect("the sum afterwards", here, k)


CHECKS: dict[str, Callable[[Place], None]] = {
    check.__name__: check
    for check in (
        many_in_flight,
        waited_for_on_another_stream,
        alternating_streams,
        futures,
        persistent,
        coalesced,
        in_and_out_of_place,
        factors,
        operators_of_the_users,
        wire_dtypes,
        long_vectors,
        tensors_that_nobody_keeps,
        all_to_all_and_roots,
        bad_calls,
    )
}


# --- CUDA graphs, and NCCL: on a GPU only -----------------------------------------------


def _refused_in_a_capture(place: Place, group: Any, tensor: Tensor, part: str) -> None:
    """A call is refused, with words of which one part is given; what else is captured runs."""
    count, told = place.full(1, 0), "nothing"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        count.add_(1)
        try:
            ringcoll.all_reduce(tensor, group=group)
        except RingcollError as error:
            told = f"{type(error).__name__}: {error}"
    if not (told.startswith("CaptureError: ") and part in told):
        place.wrong.append(f"rank {place.rank}: told in a capture: {told}")
    for _ in range(3):
        graph.replay()
    place.expect("how often the rest has run", count, 3)


def nothing_is_captured_over_the_host(place: Place) -> None:
    """Before the first operation and after it."""
    for _ in range(2):
        tensor = place.full(8, 1)
        _refused_in_a_capture(place, place.group, tensor, 'cuda_transport="nccl"')
        place.expect("what was not to be changed", tensor, 1)
        ringcoll.all_reduce(tensor, group=place.group)
        place.expect("the sum afterwards", tensor, place.world_size)


HOST_CHECKS: dict[str, Callable[[Place], None]] = {
    check.__name__: check for check in (nothing_is_captured_over_the_host,)
}


def nothing_is_captured_that_has_not_run(place: Place) -> None:
    """In a group of its own: before the first call, and before the first one of its kind."""
    group = fresh_group()
    for tensor in (place.full(8, 1), place.full(9, 1)):
        _refused_in_a_capture(place, group, tensor, "Run it once before")
        place.expect("what was not to be changed", tensor, 1)
        ringcoll.all_reduce(tensor, group=group)
        place.expect("the sum afterwards", tensor, place.world_size)


def captured_and_replayed(place: Place) -> None:
    """Blocking, asynchronous and persistent operations in one graph, with inputs that change."""
    k, rank, numel = place.world_size, place.rank, 70_001
    for dtype, wire in ((torch.float32, None), (torch.bfloat16, torch.bfloat16)):
        source, tensor, other, kept = (place.full(numel, 0, dtype) for _ in range(4))
        options: dict[str, Any] = {"group": place.group, "wire_dtype": wire}
        operation = ringcoll.all_reduce.plan(kept, **options)
        ringcoll.all_reduce(tensor, **options)
        _wait(ringcoll.all_reduce(other, async_op=True, **options))
        operation()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.copy_(source)
            other.copy_(source)
            ringcoll.all_reduce(tensor, **options)
            work = ringcoll.all_reduce(other, async_op=True, **options)
            kept.copy_(source)
            _wait(work)
            operation()
            tensor.add_(1)
        for turn in range(4):
            place.busy()
            source.fill_(turn + rank)
            graph.replay()
            total = k * turn + place.sum_of_ranks
            place.expect(f"turn {turn}, blocking", tensor, total + 1)
            place.expect(f"turn {turn}, asynchronous", other, total)
            place.expect(f"turn {turn}, persistent", kept, total)
            # Between replays the same group carries other operations.
            ringcoll.all_reduce(tensor, **options)


def beside_nccl_itself(place: Place) -> None:
    """The user's own collectives over NCCL, in flight together with the library's."""
    ours = [place.full(1000 * (n + 1), n + place.rank) for n in range(10)]
    theirs = [one.clone() for one in ours]
    works = []
    for mine, native in zip(ours, theirs, strict=True):
        works.append(ringcoll.all_reduce(mine, group=place.group, async_op=True))
        works.append(dist.all_reduce(native, async_op=True))
    for work in works:
        _wait(work)
    for n, (mine, native) in enumerate(zip(ours, theirs, strict=True)):
        place.expect("the library's sum", mine, place.world_size * n + place.sum_of_ranks)
        place.expect("NCCL's sum", native, place.world_size * n + place.sum_of_ranks)


NCCL_CHECKS: dict[str, Callable[[Place], None]] = {
    check.__name__: check
    for check in (
        nothing_is_captured_that_has_not_run,
        captured_and_replayed,
        beside_nccl_itself,
    )
}


def told_at_first() -> str:
    """The error of a first operation, all ranks of which use the first GPU; empty if there is none."""
    try:
        ringcoll.all_reduce(torch.ones(4, device="cuda:0"))
    except RingcollError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def left_waiting() -> str:
    """The error of a rank over NCCL that the last rank leaves waiting; empty for that rank."""
    group, last = fresh_group(), dist.get_world_size() - 1
    tensor = torch.ones(1000, device=own_device("cuda"))
    ringcoll.all_reduce(tensor, group=group, algorithm="ring")
    torch.cuda.synchronize()
    if dist.get_rank() == last:
        time.sleep(10)
        return ""
    ringcoll.all_reduce(tensor, group=group, algorithm="ring", timeout=timedelta(seconds=2))
    torch.cuda.synchronize()  # comes back once the communicator is aborted
    try:
        ringcoll.all_reduce(tensor, group=group, algorithm="ring")
    except RingcollError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def around_a_ring(kind: str) -> list[float]:
    """Long messages of the user's, in a batch, from each rank to the next; what has come."""
    place, rank, world_size = Place(None, own_device(kind)), dist.get_rank(), dist.get_world_size()
    sent = torch.full((1 << 20,), float(rank), device=place.device)
    got = torch.zeros_like(sent)
    messages = [
        dist.P2POp(dist.isend, sent, (rank + 1) % world_size),
        dist.P2POp(dist.irecv, got, (rank - 1) % world_size),
    ]
    works = dist.batch_isend_irecv(messages)
    aside = place.stream()
    with contextlib.nullcontext() if aside is None else place.cuda.stream(aside):
        for work in works:
            _wait(work)
    for work in works:
        _wait(work)  # that was for another stream
    return list(got.unique().tolist())


# --- on a rank ------------------------------------------------------------------------


def own_device(kind: str) -> torch.device:
    """The device of this rank; of several GPUs it is the current one."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    )


def run_check(name: str, group: Any, kind: str, cuda: Any = None) -> list[str]:
    """Run a check on a rank; with streams, also on a current one that is not the default one."""
    place = Place(group, own_device(kind), cuda)
    check = {**CHECKS, **HOST_CHECKS, **NCCL_CHECKS}[name]
    check(place)
    aside = place.stream()
    if aside is not None:
        with place.on(aside):
            check(place)
    return place.wrong


def check_on_rank(name: str, kind: str) -> list[str]:
    """Run a check on the processes of a pool, in their default group."""
    return run_check(name, None, kind)


# --- training -------------------------------------------------------------------------

_STEPS, _BATCH = 5, 8


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(6, 33), nn.Tanh(), nn.Linear(33, 3))
    return layers.double().to(device)


def _data(step: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * rank + step)
    made = [torch.randn(_BATCH, width, generator=random, dtype=torch.float64) for width in (6, 3)]
    return made[0].to(device), made[1].to(device)


def losses_of_rank(kind: str) -> list[float]:
    """Train under torch's DistributedDataParallel; the losses of this rank's part of the data."""
    device = own_device(kind)
    model = _model(device)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(_STEPS):
        inputs, targets = _data(step, dist.get_rank(), device)
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return losses


def losses_of_all_data(world_size: int, kind: str) -> list[float]:
    """Train one model on the data of all ranks; the losses are the means of the ranks'."""
    device = own_device(kind)
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(_STEPS):
        parts = [_data(step, rank, device) for rank in range(world_size)]
        inputs, targets = (torch.cat(one) for one in zip(*parts, strict=True))
        loss = nn.functional.mse_loss(model(inputs), targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return losses
