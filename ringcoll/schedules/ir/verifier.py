"""Prove that a schedule keeps the contract of its collective.

Problem: show, before a byte is sent, that every rank ends with every
contribution that it is promised exactly once, and that nothing can block or be overwritten.

Every rank's program is run on symbols. A symbol stands for one chunk and knows
which ranks have contributed to it, and in which order. The model of execution
is: post everything of a step, then wait for it. Under it, a send that has its
receive in the same step is enough for freedom from deadlock, with buffered and
with rendezvous sends alike.

Checked for each allowed aliasing of input and output: sends and receives pair
up, in order and length; nothing is read before it is written; each place has one
writer per step; the input is never written to; only the stated scratch is used;
exactly the reductions that complete a chunk are marked final; the outputs hold
what the contract asks for; a stated cost is the cost that is counted. Reductions
that leave ``final`` to the library get the mark on the way.

A ring on 1024 ranks has four million operations, so the inner loops avoid
allocation where they can.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice, takewhile, zip_longest
from math import isclose

from ringcoll.errors import ScheduleError, VerificationError
from ringcoll.schedules.ir.contracts import contract
from ringcoll.schedules.ir.counting import Counts, Tally, check_end, check_work, chunks_of_data
from ringcoll.schedules.ir.drawing import grid
from ringcoll.schedules.ir.steps import (
    Buffer,
    Copy,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Send,
    Shown,
    Step,
    Written,
    out,
)

_GLOBAL_STEPS = (
    "steps are global: all ranks count the same steps, and a rank that waits yields an empty Step()"
)
_END = Step()  # known by identity
_DRAWN_WORLD = 16  # ranks up to which a grid without a mark can be read
_LEAST_DRAWN_STEPS = 1 << 12  # that a grid has at least, of a program with so many
_MANY = 10**6  # contributions of a rank that are not counted one by one any more

Order = tuple[int | str, ...]
"""An order of reduction in postfix: ``(0, 1, "+", 2, "+")`` is (x0 + x1) + x2."""


class _Symbols:
    """Symbolic values: interned trees of contributions."""

    def __init__(self) -> None:
        self.chunk: list[int] = []
        self.contributors: list[int] = []  # bit r is set if rank r has contributed
        self.repeated: list[bool] = []  # whether any rank has contributed twice
        self._left: list[int] = []  # the operands, or -1 and the rank for a leaf
        self._right: list[int] = []
        self._joined: dict[tuple[int, int], int] = {}

    def _new(self, left: int, right: int, chunk: int, contributors: int, twice: bool) -> int:
        self.chunk.append(chunk)
        self.contributors.append(contributors)
        self.repeated.append(twice)
        self._left.append(left)
        self._right.append(right)
        return len(self.chunk) - 1

    def leaf(self, rank: int, chunk: int) -> int:
        """A chunk of the input of a rank; to be called once for each chunk."""
        return self._new(-1, rank, chunk, 1 << rank, False)

    def join(self, left: int, right: int) -> int:
        """The reduction of two values of the same chunk."""
        number = self._joined.get((left, right))
        if number is None:
            ours, theirs = self.contributors[left], self.contributors[right]
            twice = bool(ours & theirs) or self.repeated[left] or self.repeated[right]
            number = self._new(left, right, self.chunk[left], ours | theirs, twice)
            self._joined[left, right] = number
        return number

    def end_step(self) -> None:
        """Forget which values were joined: ranks that agree mostly do so in the same step."""
        self._joined.clear()

    def order(self, value: int) -> Order:
        """The order in which contributions were reduced, in postfix."""
        result: list[int | str] = []
        stack: list[int | str] = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                result.append(item)
                continue
            left, right = self._left[item], self._right[item]
            if left < 0:
                result.append(right)
            else:
                stack += ["+", right, left]
        return tuple(result)

    def same_order(self, first: int, second: int) -> bool:
        """Whether two values are reduced in the same order; their orders are not written out."""
        compared: set[tuple[int, int]] = set()
        stack = [(first, second)]
        while stack:
            pair = ours, theirs = stack.pop()
            if ours == theirs or pair in compared:
                continue
            compared.add(pair)
            left, right = self._left[ours], self._right[ours]
            other_left, other_right = self._left[theirs], self._right[theirs]
            if left >= 0 and other_left >= 0:
                stack += [(left, other_left), (right, other_right)]
            elif (left, right) != (other_left, other_right):
                return False
        return True

    def describe(self, value: int) -> str:
        """Contributions in words, for an error message."""
        counts = Counter[int]()
        # Operands have lower numbers. The order itself may be 2**n long after n steps.
        uses = {value: 1}
        for number in range(value, -1, -1):
            times = uses.pop(number, 0)
            if not times:
                continue
            left, right = self._left[number], self._right[number]
            if left < 0:
                counts[right] += times
            else:
                uses[left] = min(_MANY, uses.get(left, 0) + times)
                uses[right] = min(_MANY, uses.get(right, 0) + times)
        ranks = ", ".join(
            f"{rank}" if times == 1 else f"{rank} ({'many' if times >= _MANY else times} times)"
            for rank, times in sorted(counts.items())
        )
        return f"chunk {self.chunk[value]} from ranks {ranks}"


@dataclass(frozen=True)
class Proof(Shown):
    """The results of a verification. Amounts of data are fractions of n, the whole data.

    Parameters
    ----------
    schedule
        The schedule that was proved.
    rounds
        Steps in which a rank sends.
    traffic, reduced
        Sums over the steps of the most that any rank sends or receives, and
        reduces, in the step.
    sent_mean, sent_max
        Data sent by a rank.
    messages_mean, messages_max
        Messages sent by a rank.
    ports
        Most messages that one rank sends, or receives, in one step.
    in_flight
        Most messages that one rank has to post in one step.
    staged
        (rank, step) pairs where a place is written that the same step reads.
    same_everywhere
        Whether all ranks that hold a chunk of the same contributors reduced it in the same
        order, and so have it bitwise equal.
    at_once
        Whether each reduction has the operands of all ranks, so that there are no partial results;
        never in a prefix.
    """

    schedule: Written
    rounds: int
    traffic: Fraction
    reduced: Fraction
    sent_mean: Fraction
    sent_max: Fraction
    messages_mean: Fraction
    messages_max: int
    ports: int
    in_flight: int
    staged: frozenset[tuple[int, int]]
    same_everywhere: bool
    at_once: bool
    _results: dict[tuple[int, int], int] = field(repr=False)  # by chunk and number of contributors
    _symbols: _Symbols = field(repr=False)

    def order(self, chunk: int) -> Order:
        """The order in which a chunk is reduced, in postfix; of a prefix, on the last rank."""
        last, rules = self.schedule.world_size - 1, contract(self.schedule.collective)
        return self._symbols.order(self._results[chunk, rules.contributors(last, last + 1)])

    @property
    def rank_order(self) -> bool:
        """Whether operands stay in rank order, as a non-commutative operator needs."""
        return self._each_once and all(
            [item for item in self._symbols.order(value) if item != "+"] == list(range(ranks))
            for (_, ranks), value in self._results.items()
        )

    @property
    def left_fold(self) -> bool:
        """Whether it is ((x0 + x1) + x2) + ..., as a non-associative operator needs."""
        fold: list[int | str] = [0]
        for rank in range(1, self.schedule.world_size):
            fold += [rank, "+"]
        return self._each_once and all(
            list(self._symbols.order(value)) == fold[: 2 * ranks - 1]
            for (_, ranks), value in self._results.items()
        )

    @property
    def _each_once(self) -> bool:
        """Whether the ranks have one order, and in it no rank twice, so that the order is short."""
        repeated = self._symbols.repeated
        return self.same_everywhere and not any(repeated[value] for value in self._results.values())

    @property
    def orders(self) -> dict[int, Order]:
        """`order` of every chunk."""
        return {chunk: self.order(chunk) for chunk in sorted({chunk for chunk, _ in self._results})}


def bitwise_equal(first: Proof, second: Proof) -> bool:
    """Whether two all-reduces give the same bits for every element, on every rank.

    They do if the contributions to every element are reduced in the same order. Where
    the two cut the vector into different numbers of chunks, all chunks must have the same
    order: chunk i of the first can meet chunk i of the second (in a vector shorter than
    both numbers) and, in a long vector, every chunk at the same height.
    """
    if not (first.same_everywhere and second.same_everywhere):
        return False
    if first.schedule.num_chunks == second.schedule.num_chunks:
        return first.orders == second.orders
    return len({*first.orders.values(), *second.orders.values()}) == 1


def _chunks_of(blocks: Sequence[int], per_block: int) -> Sequence[int]:
    """The chunks of some blocks; a range where possible, because a range is searched at once."""
    if per_block == 1 and isinstance(blocks, range):
        return blocks
    chunks = [block * per_block + chunk for block in blocks for chunk in range(per_block)]
    if chunks and chunks[-1] - chunks[0] == len(chunks) - 1:
        return range(chunks[0], chunks[-1] + 1)
    return chunks


class _Verifier:
    """One run of all programs on symbols, under one aliasing of input and output.

    A place is a number: the chunk for the input, num_chunks + chunk for the
    output, 2 * num_chunks + slot for scratch. In place, an output chunk that the
    rank also has as input gets the input's number.
    """

    def __init__(self, schedule: Written, *, in_place: bool) -> None:
        self.schedule, self.in_place = schedule, in_place
        self.rules = contract(schedule.collective)
        self.symbols = _Symbols()
        self.num_chunks = schedule.num_chunks
        self.memory: list[dict[int, int]] = []
        self.outputs: list[Sequence[int]] = []
        self.shared: list[frozenset[int]] = []  # chunks that are both input and output
        world_size, root = schedule.world_size, schedule.root
        per_block = self.rules.chunks_per_block(schedule.num_chunks, world_size)
        for rank in range(world_size):
            inputs = _chunks_of(self.rules.inputs(rank, world_size, root), per_block)
            outputs = _chunks_of(self.rules.outputs(rank, world_size, root), per_block)
            self.memory.append({chunk: self.symbols.leaf(rank, chunk) for chunk in inputs})
            self.outputs.append(outputs)
            both = frozenset(inputs).intersection(outputs)
            # Ranks with equal sets share one object, which the processor's cache likes.
            self.shared.append(self.shared[0] if self.shared and self.shared[0] == both else both)
        numbers = [self.rules.contributors(rank, world_size) for rank in range(world_size)]
        sets = {number: (1 << number) - 1 for number in {*numbers}}  # many ranks share one
        self.complete = [sets[number] for number in numbers]
        # A set contract has no last reduction: a complete chunk may be received again.
        self.completes = self.rules.reduces and not self.rules.at_least_once
        self.aliasing_matters = False
        self.has_partial_results = False
        self.step = 0
        self.tally = Tally(world_size)
        self.staged: set[tuple[int, int]] = set()
        self.finals: set[tuple[int, int, int]] = set()  # as in `Written._finals`
        self.sets: dict[int, frozenset[int]] = {}  # of `held`: contributors by their bits

    def place(self, rank: int, ref: Ref) -> int:
        buffer, chunk, slot = ref
        if type(chunk) is not int or type(slot) is not int:
            raise TypeError(f"{ref!r} has a number that is no integer")  # see `check_references`
        if buffer is Buffer.INPUT:
            return chunk
        if buffer is Buffer.OUTPUT:
            if self.in_place and chunk in self.shared[rank]:
                return chunk
            return self.num_chunks + chunk
        return 2 * self.num_chunks + slot

    def fail(self, message: str, rank: int, **details: object) -> VerificationError:
        return VerificationError(
            message,
            rank=rank,
            step=self.step,
            grid=grid(self.drawable, self.schedule.world_size, mark=(rank, self.step)),
            **details,  # type: ignore[arg-type]  # peer, chunk, expected, got: see the class
        )

    def drawable(self, rank: int, world_size: int) -> Program:
        """The steps of a rank, as they are written, up to a fault of its program."""
        most = max(_LEAST_DRAWN_STEPS, 2 * self.step)  # the program may have no end
        with suppress(Exception):
            steps = islice(self.schedule.program(rank), most)
            yield from takewhile(lambda step: isinstance(step, Step), steps)

    def started(self, rank: int) -> Program:
        """The steps of a rank; an error in the call of its program is raised by the first step."""
        yield from self.schedule.program(rank)

    def run(self) -> Proof:
        for _ in self.walk():
            pass
        return self.conclude()

    def walk(self) -> Iterator[int]:
        """Do step after step; yield the number of each when it is done."""
        programs = {rank: self.started(rank) for rank in range(self.schedule.world_size)}
        while True:
            steps: list[tuple[int, Step]] = []
            for rank, program in [*programs.items()]:
                try:
                    step = next(program, _END)
                except Exception as error:
                    raise self.fail(_in_words(error), rank) from error
                if step is _END:
                    del programs[rank]
                    continue
                if not isinstance(step, Step):
                    raise self.fail(f"the program yielded {step!r}, which is not a Step", rank)
                if step:
                    steps.append((rank, step))
            if not programs:
                break
            if steps:
                try:
                    self.do(steps)
                except (AttributeError, TypeError, ValueError):
                    self.check_references(steps)
                    raise
            self.step += 1
            yield self.step - 1
            check_end(self.schedule, self.step)

    def do(self, steps: list[tuple[int, Step]]) -> None:
        """Do one step of all ranks."""
        self.tally.add(steps)
        mail: _Mail = {}
        for rank, step in steps:
            for operation in step:
                if type(operation) is Send:
                    self.check_peer(rank, operation.peer)
                    if type(operation.refs) is not tuple:  # readers look for equal messages
                        raise TypeError("the chunks of a message are a tuple")
                    if not operation.refs:
                        raise self.fail("the message has no chunk", rank, peer=operation.peer)
                    values = [self.read(rank, ref) for ref in operation.refs]
                    mail.setdefault((rank, operation.peer), []).append((operation, values))
        writes = [(rank, self.do_rank(rank, step, mail)) for rank, step in steps]
        for (source, target), letters in mail.items():
            if letters:
                raise self.unmatched(source, target, letters[0][0].refs, is_sent=True)
        for rank, written in writes:
            self.memory[rank].update(written)
        self.symbols.end_step()

    def do_rank(self, rank: int, step: Step, mail: _Mail) -> dict[int, int]:
        """Do the receives and reductions of one rank; return the values that it writes."""
        written: dict[int, int] = {}
        accumulating: set[int] = set()
        for index, operation in enumerate(step):
            # A `match` takes five times as long.
            if type(operation) is Send:
                continue
            if type(operation) is Recv:
                values = self.take(rank, operation.peer, operation.refs, mail)
                for ref, value in zip(operation.refs, values, strict=True):
                    self.write(rank, ref, value, written)
            elif type(operation) is RecvReduce:
                peer, into, local = operation.peer, operation.into, operation.local
                if len(local) != len(into):
                    raise self.fail("as many local as target chunks are needed", rank)
                received_left = peer < rank if operation.unstated_order else operation.received_left
                values = self.take(rank, peer, into, mail)
                totals: list[int] = []
                for ref, mine, value in zip(into, local, values, strict=True):
                    place = self.place(rank, ref)
                    if place in accumulating and self.place(rank, mine) == place:
                        own = written.pop(place)
                        self.check_class(rank, mine, own)
                    else:
                        own = self.read(rank, mine)
                    pair = (value, own) if received_left else (own, value)
                    self.check_class(rank, mine, value)
                    total = self.symbols.join(*pair)
                    totals.append(total)
                    self.write(rank, ref, total, written)
                    accumulating.add(place)
                self.check_final(rank, index, operation, into, totals)
            elif type(operation) is Copy:
                # Also to the place that it is read from: both of its ends have to be right.
                self.write(rank, operation.into, self.read(rank, operation.source), written)
            elif type(operation) is Reduce:
                target, sources = operation.into, operation.sources
                if not sources:
                    raise self.fail("there is nothing to reduce", rank, chunk=target.chunk)
                total = self.read(rank, sources[0])
                for ref in sources[1:]:
                    value = self.read(rank, ref)
                    self.check_class(rank, sources[0], value)
                    total = self.symbols.join(total, value)
                # A single operand is only copied: it was complete before, or is not now.
                self.check_final(
                    rank, index, operation, (target,), [total], reduced=len(sources) > 1
                )
                self.write(rank, target, total, written)
            else:
                raise self.fail(f"{operation!r} is not an operation", rank)
        # A message of one chunk that stands alone reads the place that it writes, or another.
        if len(step) > 1 or type(step[0]) is Reduce or len(written) > 1:
            self.mark_staged(rank, step, written)
        return written

    def mark_staged(self, rank: int, step: Step, written: dict[int, int]) -> None:
        """Note a step that reads a place that it writes, also if input and output share memory."""
        shared = self.shared[rank] if self.rules.in_place else ()
        for operation in step:
            updated = operation.into if type(operation) is RecvReduce else ()
            for ref, target in zip_longest(operation.reads, updated):
                place = self.place(rank, ref)
                if ref.buffer is Buffer.INPUT and ref.chunk in shared:
                    place += self.num_chunks  # where the output of that chunk is
                if place in written and (target is None or place != self.place(rank, target)):
                    self.staged.add((rank, self.step))
                    return

    def take(self, rank: int, peer: int, into: tuple[Ref, ...], mail: _Mail) -> list[int]:
        """The values of the next message from a peer."""
        self.check_peer(rank, peer)
        letters = mail.get((peer, rank))
        if not letters:
            raise self.unmatched(peer, rank, into, is_sent=False)
        operation, values = letters.pop(0)
        sent, expected = [ref.chunk for ref in operation.refs], [ref.chunk for ref in into]
        if sent != expected:
            raise self.fail(
                "the message carries other chunks than the receive expects",
                rank,
                peer=peer,
                expected=expected,
                got=sent,
            )
        return values

    def unmatched(
        self, source: int, target: int, refs: tuple[Ref, ...], *, is_sent: bool
    ) -> VerificationError:
        """The error of a message with one end in this step, at its source or at its target."""

        def messages(rank: int, peer: int, *kinds: type) -> list[int]:
            return [
                sum(isinstance(op, kinds) and getattr(op, "peer", None) == peer for op in step)
                for step in self.drawable(rank, self.schedule.world_size)
            ]

        ends = messages(source, target, Send), messages(target, source, Recv, RecvReduce)
        surplus = [sends - receives for sends, receives in zip_longest(*ends, fillvalue=0)]
        others = (step for step, more in enumerate(surplus) if more * surplus[self.step] < 0)
        nearest = min(others, key=lambda step: abs(step - self.step), default=None)
        rank, peer = (source, target) if is_sent else (target, source)
        here, there = ("sent", "received") if is_sent else ("received", "sent")
        if nearest is not None:
            reason = f"the message is {here} in step {self.step}, but {there} in step {nearest}; "
            reason += _GLOBAL_STEPS
        elif is_sent:
            reason = "the message is never received"
        else:
            reason = "nothing is sent to match the receive"
        return self.fail(reason, rank, peer=peer, chunk=refs[0].chunk if refs else None)

    def check_peer(self, rank: int, peer: int) -> None:
        if type(peer) is not int or not 0 <= peer < self.schedule.world_size or peer == rank:
            raise self.fail(
                "the peer is not another rank of the world",
                rank,
                peer=peer,
                expected=f"0 to {self.schedule.world_size - 1}, not {rank}",
                got=peer,
            )

    def check_class(self, rank: int, ref: Ref, value: int) -> None:
        if self.symbols.chunk[value] != ref.chunk:
            raise self.fail(
                f"{ref} holds data of another length class",
                rank,
                chunk=ref.chunk,
                expected=f"chunk {ref.chunk}",
                got=f"chunk {self.symbols.chunk[value]}",
            )

    def check_references(self, steps: list[tuple[int, Step]]) -> None:
        """Raise if an operation has something else where a reference belongs."""
        for rank, step in steps:
            for operation in step:
                for name in ("reads", "writes"):
                    refs = getattr(operation, name, ())
                    for ref in refs if type(refs) is tuple else (refs,):
                        if not (isinstance(ref, Ref) and type(ref.chunk) is type(ref.slot) is int):
                            raise self.fail(
                                f"{type(operation).__name__} has no reference to a chunk",
                                rank,
                                expected="inp(chunk), out(chunk) or tmp(slot, chunk)",
                                got=repr(ref),
                            )

    def check_final(
        self,
        rank: int,
        index: int,
        operation: RecvReduce | Reduce,
        into: tuple[Ref, ...],
        totals: list[int],
        *,
        reduced: bool = True,
    ) -> None:
        """Check that a reduction is marked final if it completes its chunks; or mark it."""
        completed = 0
        for ref, total in zip(into, totals, strict=True):
            complete = reduced and self.symbols.contributors[total] == self.complete[rank]
            if reduced and not complete:
                self.has_partial_results = True
            if complete == operation.final or not self.completes:
                continue
            completed += 1
            if not operation.unstated_final:
                raise self.fail(
                    f"the reduction of {ref} is {'' if operation.final else 'not '}marked final",
                    rank,
                    chunk=ref.chunk,
                    expected="the mark where, and only where, a chunk is complete",
                    got=self.symbols.describe(total),
                )
        if completed:
            if completed < len(into):
                raise self.fail(
                    "the message completes some of its chunks, and others not; send the former "
                    "as a message of their own, or state `final`",
                    rank,
                )
            self.finals.add((rank, self.step, index))

    def read(self, rank: int, ref: Ref) -> int:
        memory = self.memory[rank]
        value = memory.get(self.place(rank, ref))
        if value is None or ref.slot < 0:
            what = "is not in its input" if ref.buffer is Buffer.INPUT else "was never written"
            raise self.fail(f"reads {ref}, which {what}", rank, chunk=ref.chunk)
        if self.symbols.chunk[value] != ref.chunk:
            self.check_class(rank, ref, value)
        if ref.buffer is Buffer.INPUT and self.num_chunks + ref.chunk in memory:
            # Had the two shared memory, the input would not be there any more.
            self.aliasing_matters = True
        return value

    def write(self, rank: int, ref: Ref, value: int, written: dict[int, int]) -> None:
        if ref.buffer is Buffer.INPUT:
            raise self.fail(f"writes {ref}, but the input must survive", rank, chunk=ref.chunk)
        if ref.buffer is Buffer.OUTPUT and ref.chunk not in self.outputs[rank]:
            raise self.fail(f"writes {ref}, which is not in its output", rank, chunk=ref.chunk)
        if ref.buffer is Buffer.SCRATCH and not 0 <= ref.slot < self.schedule.num_slots:
            raise self.fail(
                f"writes {ref} outside the stated scratch",
                rank,
                chunk=ref.chunk,
                expected=f"{self.schedule.num_slots} slots",
                got=f"slot {ref.slot}",
            )
        if self.symbols.chunk[value] != ref.chunk:
            self.check_class(rank, ref, value)
        place = self.place(rank, ref)
        if place in written:
            raise self.fail(f"{ref} has two writers in one step", rank, chunk=ref.chunk)
        written[place] = value

    def held(self) -> Held:
        """The chunks of each rank, and the ranks that have contributed to them: see `history`."""
        symbols = self.symbols
        every = range(self.schedule.world_size)
        held: list[dict[int, frozenset[int]]] = []
        for memory in self.memory:
            masks: dict[int, int] = {}
            for value in memory.values():
                chunk, mask = symbols.chunk[value], symbols.contributors[value]
                if mask.bit_count() >= masks.get(chunk, 0).bit_count():
                    masks[chunk] = mask
            for mask in masks.values():
                if mask not in self.sets:
                    self.sets[mask] = frozenset(rank for rank in every if mask >> rank & 1)
            held.append({chunk: self.sets[masks[chunk]] for chunk in sorted(masks)})
        return tuple(held)

    def conclude(self) -> Proof:
        """Compare the outputs with the contract and sum up."""
        schedule, rules, symbols = self.schedule, self.rules, self.symbols
        world_size = schedule.world_size
        per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
        self.step = max(0, self.step - 1)
        results: dict[tuple[int, int], int] = {}
        same = True
        for rank in range(world_size):
            ranks = rules.contributors(rank, world_size)
            for chunk in self.outputs[rank]:
                value = self.memory[rank].get(self.place(rank, out(chunk)))
                owner = rules.owner(chunk // per_block, world_size, schedule.root)
                if (
                    value is None
                    or symbols.chunk[value] != chunk
                    or symbols.contributors[value]
                    != (self.complete[rank] if rules.reduces else 1 << owner)
                    or (symbols.repeated[value] and not rules.at_least_once)
                ):
                    everyone = "every rank" + f" below {ranks}" * (ranks < world_size)
                    wanted = f"the data of rank {owner}"
                    raise self.fail(
                        f"out[{chunk}] ends wrong"
                        + (" when input and output share memory" if self.in_place else ""),
                        rank,
                        chunk=chunk,
                        expected=f"{everyone} exactly once" if rules.reduces else wanted,
                        got="nothing" if value is None else symbols.describe(value),
                    )
                first = results.setdefault((chunk, ranks), value)
                same = same and symbols.same_order(first, value)
        tally, chunks = self.tally, chunks_of_data(schedule)
        counts = tally.counts(chunks)
        self.check_cost(counts)
        return Proof(
            schedule=schedule,
            **counts._asdict(),
            sent_mean=Fraction(sum(tally.sent), chunks * world_size),
            sent_max=Fraction(max(tally.sent), chunks),
            messages_mean=Fraction(sum(tally.sends), world_size),
            messages_max=max(tally.sends),
            ports=tally.ports,
            in_flight=tally.in_flight,
            staged=frozenset(self.staged),
            same_everywhere=same,
            at_once=not (self.has_partial_results or rules.is_prefix),
            _results=results,
            _symbols=symbols,
        )

    def check_cost(self, counted: Counts) -> None:
        """Compare the counted cost with the stated cost, if there is one."""
        schedule, world_size = self.schedule, self.schedule.world_size
        numbers: Sequence[Fraction | int] = counted
        stated: Sequence[Fraction | int] = schedule.stated_cost or counted
        for name, number, other in zip(Counts._fields, numbers, stated, strict=True):
            if not isclose(number, other):  # a formula may compute with floats
                raise VerificationError(
                    f"the cost of {schedule.collective} {schedule.algorithm} on {world_size} "
                    f"ranks: {name} is stated as {other} and counted as {number}; correct the "
                    "stated cost, or leave it out to have it counted",
                    grid=grid(self.drawable, world_size) if world_size <= _DRAWN_WORLD else "",
                )


_Mail = dict[tuple[int, int], list[tuple[Send, list[int]]]]
"""Messages under way in a step, by (source, target), with their values."""


def verify(schedule: Written) -> Proof:
    """Prove a schedule, under every aliasing that its contract allows.

    Returns
    -------
    Proof
        The counted cost, and the orders of reduction.

    Raises
    ------
    TooLargeError
        The ranks move too many chunks: see `ringcoll.schedules.ir.counting.check_work`.
    VerificationError
        The schedule does not keep its contract, or its stated cost is not the counted
        cost. The error names rank, step, peer, chunk, what was expected and what
        happens, and shows the grid with the bad place marked.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> proof = verify(schedule_of("all_reduce", "ring", 4))
    >>> proof.rounds, str(proof.sent_max)
    (6, '3/2')
    >>> proof.order(0)
    (1, 2, '+', 3, '+', 0, '+')
    """
    check_work(schedule)
    with without_collection():
        first = _Verifier(schedule, in_place=False)
        proof = first.run()
        if first.aliasing_matters and first.rules.in_place:
            # Otherwise no input is read once its output is written: sharing changes nothing.
            _Verifier(schedule, in_place=True).run()
    return proof


def finals_of(schedule: Written) -> frozenset[tuple[int, int, int]]:
    """The rank, step and index of reductions that complete a chunk without stating it."""
    check_work(schedule)
    with without_collection():
        verifier = _Verifier(schedule, in_place=False)
        verifier.run()
    return frozenset(verifier.finals)


Held = tuple[dict[int, frozenset[int]], ...]
"""For each rank and each chunk that it has: the ranks that have contributed to it."""


def history(schedule: Written) -> Iterator[Held]:
    """Yield what each rank holds before the first step, and after each step.

    Of a chunk that a rank has at several places, the most complete one counts.

    Raises
    ------
    TooLargeError
        The ranks move too many chunks.
    VerificationError
        The schedule does not keep its contract; what is right has been yielded before.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> for held in history(schedule_of("all_reduce", "ring", 2)):
    ...     print([{chunk: sorted(ranks) for chunk, ranks in of_rank.items()} for of_rank in held])
    [{0: [0], 1: [0]}, {0: [1], 1: [1]}]
    [{0: [0, 1], 1: [0]}, {0: [1], 1: [0, 1]}]
    [{0: [0, 1], 1: [0, 1]}, {0: [0, 1], 1: [0, 1]}]
    """
    check_work(schedule)
    verifier = _Verifier(schedule, in_place=False)
    yield verifier.held()
    for _ in verifier.walk():
        yield verifier.held()
    verifier.conclude()


@contextmanager
def without_collection() -> Iterator[None]:
    """Stop the collector, which would look at millions of objects that are all in use."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _in_words(error: Exception) -> str:
    """The exception of a program in words, with the line that raised it."""
    if isinstance(error, ScheduleError):
        return str(error)
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    assert trace is not None
    file = trace.tb_frame.f_code.co_filename.rpartition("/")[2]
    return f"the program raised {type(error).__name__}: {error} (line {trace.tb_lineno} of {file})"
