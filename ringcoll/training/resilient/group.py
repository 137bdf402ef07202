"""A group that tries operations again, without the ranks that have died.

An operation is complete when all ranks know that all ranks have its result: a barrier follows it.
If a rank dies, then either nobody has passed the barrier, and all try again on the inputs that they
have kept; or a rank has, and so every rank has the result. So all ranks return the same result.

Functions below begin a resilient group, and join it from another process.
"""

from __future__ import annotations

import gc
import io
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcoll.errors import (
    ArgumentError,
    GroupBrokenError,
    GroupChangedError,
    PeerLostError,
    TransportError,
)
from ringcoll.runtime.collectives import OwnGroup, StoreGroup, as_group, time_limit_s
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.group import Call, Communicator, Queue, Work
from ringcoll.runtime.machine import own_address, place, seconds_of
from ringcoll.runtime.process import at_end, call_in_thread
from ringcoll.runtime.rendezvous import (
    ask_store,
    common_connection,
    fresh_group_name,
    read_from_ranks,
    store_host,
)
from ringcoll.runtime.watch import Lives, tell
from ringcoll.schedules import contract
from ringcoll.training import data_parallel
from ringcoll.training.resilient.membership import Membership
from ringcoll.training.resilient.succession import Member, View

__all__ = ["Change", "ResilientGroup", "data_parallel", "join", "packed", "start", "unpacked"]

_log = logging.getLogger("ringcoll")
_LOOK_S = 0.02  # between two looks into the mailbox
_LEAVING_S = 10.0  # for operations for which the program has not waited

MakeCall = Callable[[OwnGroup], Call]


@dataclass(frozen=True)
class Change:
    """A change of a group's members.

    Parameters
    ----------
    epoch
        Number of changes so far.
    lost
        Ranks that were lost, in the group before the change.
    joined
        Number of ranks that have joined; they are the last ranks.
    world_size
        Number of ranks now.
    agreed_s, formed_s
        Seconds until the ranks had agreed, and until they were connected.
    """

    epoch: int
    lost: tuple[int, ...]
    joined: int
    world_size: int
    agreed_s: float
    formed_s: float

    def __str__(self) -> str:
        without = f"without ranks {[*self.lost]}" if self.lost else "with all its ranks"
        joined = f" and {self.joined} new" if self.joined else ""
        return f"the group goes on {without}{joined}, with {self.world_size} ranks"


def packed(holders: Sequence[Any], step: int) -> Tensor:
    """The states of models and optimizers, and a step, as a tensor of bytes."""
    buffer = io.BytesIO()
    torch.save({"step": step, "states": [holder.state_dict() for holder in holders]}, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8)


def unpacked(data: Tensor, holders: Sequence[Any]) -> int:
    """Load states that `packed` has packed; return the step.

    Of pickles, only tensors and numbers are read.
    """
    content = torch.load(io.BytesIO(data.numpy().data), map_location="cpu", weights_only=True)
    for holder, state in zip(holders, content["states"], strict=True):
        holder.load_state_dict(state)
    return int(content["step"])


def _close(making: Future[StoreGroup]) -> None:
    if making.exception() is None:
        making.result().close()


class _Attempt(NamedTuple):
    """A call in the queue: how it is made for a group, and made for the group of its beginning."""

    make: MakeCall
    inner: OwnGroup
    first: Call
    work: Work


class ResilientGroup(OwnGroup):
    """A group whose operations go on without the ranks that die; see `start` and `join`.

    It is the value for ``group=`` of the public functions. `ringcoll.all_reduce` and
    `ringcoll.barrier` are tried again when a rank is lost, so that an average is one over the ranks
    that are left. The other collectives have shapes or roots that depend on who is there: when a
    rank is lost, their tensors are put back, and all ranks get a `GroupChangedError` and may call
    again. Ranks keep their order.
    """

    retries = True

    def __init__(
        self,
        membership: Membership,
        view: View,
        timeout_s: float,
        transport: str,
        verify_messages: bool | None,
        *,
        has_state: bool,
    ) -> None:
        self._membership, self._timeout_s = membership, timeout_s
        self._transport, self._verify_messages = transport, verify_messages
        self.changes: list[Change] = []
        self._done = view.done  # operations that are complete on all ranks
        self._has_changed = False  # since the last operation that is complete
        self._has_news = True  # of newcomers, which `admit` has not told yet
        self._has_state = has_state
        self._kept: list[Tensor] = []
        self._failure: BaseException | None = None
        self._issuing = threading.RLock()
        self._queue: Queue[_Attempt] = Queue("ringcoll-resilient", self._complete)
        membership.take(view)
        self._inner = self._formed()
        leaving = weakref.finalize(self, membership.leave)
        leaving.atexit = False  # the program's own functions come first
        at_end(leaving)

    # --- facts ------------------------------------------------------------------------------

    @property
    def communicator(self) -> Communicator:  # type: ignore[override]
        """The rank's end of the present group."""
        return self._inner.communicator

    def on(self, device: torch.device) -> Communicator:
        """The communicator for tensors on a device."""
        return self._inner.on(device)

    @property
    def address(self) -> str:
        """Where this rank can be asked to let others `join`, as ``HOST:PORT``."""
        return self._membership.own.address

    @property
    def epoch(self) -> int:
        """Number of changes of the group, from 1 on."""
        return self._membership.view.epoch

    # --- operations -------------------------------------------------------------------------

    def retried(self, make: MakeCall, async_op: bool) -> Work | None:
        """Run a call, and again if ranks are lost; ``make`` checks it for a group and prepares it.

        Raises
        ------
        ArgumentError
            The call is wrong; or its tensors are not on the CPU.
        GroupChangedError
            A rank was lost, and the call may be another now; its tensors are as before.
        GroupBrokenError
            The other ranks have gone on without this rank, or may have; or an operation has failed
            for another reason before.
        """
        with self._issuing:
            inner = self._inner
            first = make(inner)
            work = Work(first.operation.name, first.results, self._queue.help)
            self._queue.items.append(_Attempt(make, inner, first, work))
        self._queue.call_thread()
        if async_op:
            self._queue.serve_alone()
            return work
        work.wait()
        return None

    def _complete(self, item: _Attempt) -> None:
        error: BaseException | None = None
        try:
            self._run(item)
        except GroupChangedError as raised:
            error = raised
        except BaseException as raised:  # noqa: BLE001  # `Work.wait` raises it
            error = self._failure = self._failure or raised
            self._membership.leave()  # the others need not wait for this rank
        item.work.complete(error)

    def _run(self, item: _Attempt) -> None:
        if self._failure is not None:
            raise GroupBrokenError(f"nothing can run any more: {self._failure}")
        name, written = item.first.operation.name, item.first.written
        rules = contract(name)
        has_same_shapes = rules.of_vector and not rules.rooted  # for every number of ranks
        self._keep(written)
        has_result = False
        while True:
            if self._has_changed and not has_same_shapes:
                self._has_changed = False
                lost, now = [*self.changes[-1].lost], self.changes[-1].world_size
                raise GroupChangedError(
                    f"the group has lost ranks {lost} and has {now} ranks now, this one is rank "
                    f"{self.rank()}: {name} may need other shapes or another root; call it again"
                )
            try:
                if not has_result:
                    call = item.first if item.inner is self._inner else item.make(self._inner)
                    call()
                    has_result = True
                if name != "barrier":
                    api.barrier(self._inner)
                self._done += 1
                self._has_changed = False
                break
            except TransportError as error:
                done = self._change(error)
                if done > self._done:  # a rank has passed the barrier, so all have come to it
                    assert has_result or name == "barrier"
                    self._done = done
                    break
                self._put_back(written)
                has_result = False

    def _keep(self, written: Sequence[Tensor]) -> None:
        """Keep the tensors that an operation will overwrite, in memory shared by all operations."""
        for number, tensor in enumerate(written):
            if number == len(self._kept) or self._kept[number].numel() < tensor.nbytes:
                memory = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu")
                self._kept[number : number + 1] = [memory]
            self._copy_of(tensor, number).copy_(tensor.detach())

    def _put_back(self, written: Sequence[Tensor]) -> None:
        for number, tensor in enumerate(written):
            with torch.inference_mode(tensor.is_inference()):
                tensor.detach().copy_(self._copy_of(tensor, number))

    def _copy_of(self, tensor: Tensor, number: int) -> Tensor:
        return self._kept[number][: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    # --- changes ----------------------------------------------------------------------------

    def _change(self, error: BaseException | None, newcomers: Sequence[Member] = ()) -> int:
        """Agree on the members, and form their group; return the number of complete operations."""
        old = self._membership.view.members
        begin_s = time.monotonic()
        while True:
            if error is not None:
                self._inner.communicator.abort()  # wakes the ranks that do not know yet
            view = self._membership.change(self._done, newcomers, self._timeout_s)
            agreed_s = time.monotonic()
            before, newcomers = self._inner, ()
            try:
                self._inner = self._formed()
                break
            except TransportError as failed:  # another one has died
                error = failed
            finally:
                before.close()
        lost = tuple(rank for rank, member in enumerate(old) if member not in view.members)
        joined = len(view.members) - len(old) + len(lost)
        times = agreed_s - begin_s, time.monotonic() - agreed_s
        self.changes.append(Change(view.epoch, lost, joined, len(view.members), *times))
        _log.warning("%s%s", self.changes[-1], f": {error}" if error else "")
        # Old groups are in cycles of references, with connections and memory. Python would free
        # such cycles late or never, as training makes few objects.
        gc.collect()
        self._has_changed = self._has_changed or bool(lost)
        self._has_news = self._has_news or joined > 0
        return view.done

    def _formed(self) -> StoreGroup:
        """Connect the members of the view; in vain if others begin to change it meanwhile."""
        # The process at whose door the members meet may be stopped: a rank that waits for it has
        # to hear that the others go on.
        making = call_in_thread(self._connected)
        while not wait([making], _LOOK_S).done:
            if self._membership.has_news():
                making.add_done_callback(_close)
                raise PeerLostError("others could not connect", peer=0)
        return making.result()

    def _connected(self) -> StoreGroup:
        view = self._membership.view
        meeting = self._membership.meeting_place(self._timeout_s)
        store = dist.PrefixStore(f"group/{view.epoch}", meeting)
        rank = view.members.index(self._membership.own)
        for peer, member in enumerate(view.members):  # some may die before they tell
            tell(store, peer, member.process)
        size, verify = len(view.members), self._verify_messages
        inner = StoreGroup(
            store, rank, size, self._timeout_s, self._transport, verify_messages=verify
        )
        try:
            api.barrier(inner)
        except TransportError:
            inner.close()
            raise
        return inner

    # --- newcomers --------------------------------------------------------------------------

    def admit(self) -> bool:
        """Let processes that have asked for it join; all ranks call this between two operations.

        Returns
        -------
        bool
            Whether ranks have come since the last call, so that they need the others' state: see
            `send_state`. A rank's first call returns true.
        """
        if not self._has_news:
            newcomers = self._membership.newcomers() if self.rank() == 0 else []
            count = torch.tensor([len(newcomers)], device="cpu")
            api.all_reduce(count, dist.ReduceOp.MAX, self)
            if count.item():
                with self._issuing:
                    self._done = self._change(None, newcomers)
        has_news, self._has_news = self._has_news, False
        return has_news

    def send_state(self, *holders: nn.Module | torch.optim.Optimizer, step: int = 0) -> int:
        """Give all ranks the state of rank 0, which has been here for longest; all ranks call this.

        Parameters
        ----------
        *holders
            Models and optimizers, in the same order on all ranks; what ``state_dict`` returns is
            sent.
        step
            Number of the training step.

        Returns
        -------
        int
            Rank 0's ``step``.

        Raises
        ------
        PeerLostError
            All ranks that had a state are lost.
        """
        while True:
            epoch, is_source = self.epoch, self.rank() == 0 and self._has_state
            data = packed(holders, step) if is_source else None
            length = torch.tensor([0 if data is None else data.numel()], device="cpu")
            try:
                api.all_reduce(length, dist.ReduceOp.MAX, self)
                if epoch != self.epoch:
                    continue
                if not length.item():
                    raise PeerLostError("no rank is left that has a state to send", peer=0)
                if data is None:
                    data = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
                api.broadcast(data, group=self, group_src=0)
            except GroupChangedError:
                continue
            self._has_state = True
            return step if is_source else unpacked(data, holders)

    def close(self, drain_s: float = 0.0) -> None:
        """Leave the group; the other ranks go on without this rank."""
        self._queue.close(drain_s or _LEAVING_S)
        self._failure = self._failure or GroupBrokenError("this rank has left the group")
        self._membership.leave()
        self._inner.close(drain_s)


def start(
    group: Any = None,
    *,
    transport: str = "auto",
    verify_messages: bool | None = None,
    host: str | None = None,
) -> ResilientGroup:
    """Make a resilient group of the ranks of a process group; all of them call this.

    Parameters
    ----------
    group
        A process group of torch; by default the default group. It may be of any backend, and is not
        used any more: its store may die with rank 0. Its time limit is that of the operations, and
        how long a rank that lives, but does not come, is waited for.
    transport
        As for `ringcoll.use`.
    verify_messages
        As for `ringcoll.use`. An operation in which a message was changed is tried again.
    host
        Address of this machine on which new ranks can be asked to be let in, and ranks agree; by
        default the loopback interface, or that on which other hosts' ranks are reached.

    Returns
    -------
    ResilientGroup
        The value for ``group=`` of the public functions.

    Raises
    ------
    ArgumentError
        The group is no process group of torch.
    CollectiveTimeoutError
        Some rank did not come.
    PeerLostError
        A rank has died before the group was formed.

    Examples
    --------
    ::

        dist.init_process_group("ringcoll")
        group = resilient.start()                  # a new rank: resilient.join("127.0.0.1:4711")
        step = 0
        while step < 1000:
            if group.admit():                      # ranks have come: all get rank 0's state
                step = group.send_state(model, optimizer, step=step)
            loss = loss_of(model(batch(step, group.rank(), group.size())))
            loss.backward()
            for param in model.parameters():       # who is there, also if ranks die meanwhile
                ringcoll.all_reduce(param.grad, dist.ReduceOp.AVG, group)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    """
    group = as_group(group)
    if isinstance(group, OwnGroup):
        raise ArgumentError(
            "cannot be made resilient", "group", "a process group of torch", group, group.rank()
        )
    rank, world_size, timeout_s = group.rank(), group.size(), time_limit_s(group)
    outer = dist.PrefixStore("ringcoll/resilient", group.get_group_store())
    own = lambda: common_connection(outer, fresh_group_name(outer, rank, world_size, timeout_s))  # noqa: E731
    store = ask_store(outer, timeout_s, own)
    lives = Lives(store, rank, world_size)
    lives.tell()

    def of_all(name: str, value: object, parse: Callable[[Any], Any]) -> list[Any]:
        store.set(f"{name}/{rank}", json.dumps(value))
        ranks, has_lost = range(world_size), lambda: bool(lives.ended())
        meet = partial(read_from_ranks, store, name, rank, ranks, timeout_s, has_lost, parse)
        values = ask_store(store, timeout_s, meet)
        return [values[peer] for peer in ranks]

    places = of_all("place", [place(), store_host(store)], tuple)
    if host is None:
        is_local = all(where == places[0][0] for where, _ in places)
        host = "127.0.0.1" if is_local else own_address(places[0][1])
    membership = Membership(host)
    view = View(1, 0, tuple(of_all("member", membership.own, Member.of)))
    return ResilientGroup(membership, view, timeout_s, transport, verify_messages, has_state=True)


def join(
    address: str,
    *,
    timeout_s: float = 1800.0,
    transport: str = "auto",
    verify_messages: bool | None = None,
    host: str | None = None,
) -> ResilientGroup:
    """Join a resilient group, at the next step at which its ranks call `ResilientGroup.admit`.

    Parameters
    ----------
    address
        `ResilientGroup.address` of any of its ranks, such as ``"127.0.0.1:4711"``.
    timeout_s
        Time limit of the wait and of each operation, in seconds.
    transport, verify_messages, host
        As for `start`; all ranks choose alike.

    Returns
    -------
    ResilientGroup
        The group, in which this process is the last rank, or one of the last ranks.

    Raises
    ------
    ArgumentError
        The address is none.
    PeerLostError, CollectiveTimeoutError
        No rank of the group can be reached; the ranks did not let this process join.
    """
    timeout_s = seconds_of(timeout_s, "timeout_s")
    peer, _, port = address.rpartition(":")
    if not peer or not port.isdecimal():
        raise ArgumentError("no address", "address", "HOST:PORT", address)
    membership = Membership(own_address(peer) if host is None else host)
    view = membership.join(peer, int(port), timeout_s)
    return ResilientGroup(membership, view, timeout_s, transport, verify_messages, has_state=False)
