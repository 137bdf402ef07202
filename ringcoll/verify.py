"""Prove that a schedule keeps the contract of its collective.

Problem: show, before a byte is sent, that every rank ends with every
contribution exactly once, and that nothing can block or be overwritten.

Every rank's program is run on symbols. A symbol stands for one chunk and knows
which ranks have contributed to it, and in which order; equal symbols are one
object, so that comparing results is comparing numbers. The model of execution
is: post everything of a step, then wait for it. Under it, a send that has its
receive in the same step is enough for freedom from deadlock, with buffered and
with rendezvous sends alike.

Checked for each allowed aliasing of input and output: sends and receives pair
up, in order and length; nothing is read before it is written; each place has one
writer per step; the input is never written to; only the stated scratch is used;
exactly the reductions that complete a chunk are marked final; the outputs hold
what the contract asks for.

A ring on 1024 ranks has four million operations, so the inner loops avoid
allocation where they can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ringcoll.contracts import Contract, contract
from ringcoll.draw import grid
from ringcoll.errors import VerificationError
from ringcoll.schedule import (
    Buffer,
    Copy,
    Operation,
    Program,
    Recv,
    RecvReduce,
    Reduce,
    Ref,
    Schedule,
    Send,
    Step,
)

__all__ = ["Proof", "bitwise_equal", "verify"]

Order = tuple[int | str, ...]
"""An order of reduction in postfix: ``(0, 1, "+", 2, "+")`` is (x0 + x1) + x2."""


class _Symbols:
    """Symbolic values: interned trees of contributions."""

    def __init__(self) -> None:
        self.chunk: list[int] = []
        self.contributors: list[int] = []  # bit r is set if rank r has contributed
        self.repeated: list[bool] = []  # whether any rank has contributed twice
        self._parts: list[tuple[int, int]] = []  # (left, right), or (-1, rank) for a leaf
        self._known: dict[tuple[int, int, int], int] = {}

    def _new(self, key: tuple[int, int, int], chunk: int, contributors: int, twice: bool) -> int:
        number = len(self.chunk)
        self._known[key] = number
        self.chunk.append(chunk)
        self.contributors.append(contributors)
        self.repeated.append(twice)
        self._parts.append((key[0], key[1]))
        return number

    def leaf(self, rank: int, chunk: int) -> int:
        """What a rank had in its input."""
        key = (-1, rank, chunk)
        number = self._known.get(key)
        return self._new(key, chunk, 1 << rank, False) if number is None else number

    def join(self, left: int, right: int) -> int:
        """The reduction of two values of the same chunk."""
        key = (left, right, -1)
        number = self._known.get(key)
        if number is None:
            ours, theirs = self.contributors[left], self.contributors[right]
            twice = bool(ours & theirs) or self.repeated[left] or self.repeated[right]
            number = self._new(key, self.chunk[left], ours | theirs, twice)
        return number

    def order(self, value: int) -> Order:
        """The order in which contributions were reduced, in postfix."""
        result: list[int | str] = []
        stack: list[int | str] = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                result.append(item)
                continue
            left, right = self._parts[item]
            if left < 0:
                result.append(right)
            else:
                stack += ["+", right, left]
        return tuple(result)

    def describe(self, value: int) -> str:
        """Contributions in words, for an error message."""
        order = self.order(value)
        counts: dict[int, int] = {}
        for item in order:
            if isinstance(item, int):
                counts[item] = counts.get(item, 0) + 1
        ranks = ", ".join(
            f"{rank}" if times == 1 else f"{rank} ({times} times)"
            for rank, times in sorted(counts.items())
        )
        return f"chunk {self.chunk[value]} from ranks {ranks}"


@dataclass(frozen=True)
class Proof:
    """What verification found out. Amounts of data are fractions of n, the whole data.

    Parameters
    ----------
    schedule
        The schedule that was proved.
    rounds
        Steps in which anything is sent.
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
        Whether all ranks that hold a chunk reduced it in the same order, and so
        have it bitwise equal.
    """

    schedule: Schedule
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
    _results: dict[int, int] = field(repr=False)
    _symbols: _Symbols = field(repr=False)

    def order(self, chunk: int) -> Order:
        """The order in which a chunk's contributions are reduced, in postfix."""
        return self._symbols.order(self._results[chunk])

    @property
    def rank_order(self) -> bool:
        """Whether operands stay in rank order, as a non-commutative operator needs."""
        return self.same_everywhere and all(
            [item for item in order if item != "+"] == list(range(self.schedule.world_size))
            for order in self.orders.values()
        )

    @property
    def left_fold(self) -> bool:
        """Whether it is ((x0 + x1) + x2) + ..., as a non-associative operator needs."""
        fold: list[int | str] = [0]
        for rank in range(1, self.schedule.world_size):
            fold += [rank, "+"]
        return self.same_everywhere and all(order == tuple(fold) for order in self.orders.values())

    @property
    def orders(self) -> dict[int, Order]:
        """`order` of every chunk."""
        return {chunk: self.order(chunk) for chunk in sorted(self._results)}


def bitwise_equal(first: Proof, second: Proof) -> bool:
    """Whether two all-reduces give the same bits for every element, on every rank.

    They do if every element's contributions are reduced in the same order. Where
    the two cut the vector into different numbers of chunks, that takes one order
    for all: chunk i of the one can meet chunk i of the other (in a vector shorter
    than both numbers) and, in a long one, all that lie at the same height.
    """
    if not (first.same_everywhere and second.same_everywhere):
        return False
    if first.schedule.num_chunks == second.schedule.num_chunks:
        return first.orders == second.orders
    return len({*first.orders.values(), *second.orders.values()}) == 1


def _chunks_of(blocks: Sequence[int], per_block: int) -> Sequence[int]:
    if per_block == 1:
        return blocks
    return tuple(block * per_block + part for block in blocks for part in range(per_block))


class _World:
    """The symbolic memory of all ranks under one aliasing of input and output.

    A place is a number: the chunk for the input, num_chunks + chunk for the
    output, 2 * num_chunks + slot for scratch. In place, an output chunk that the
    rank also has as input gets the input's number.
    """

    def __init__(
        self, schedule: Schedule, rules: Contract, in_place: bool, symbols: _Symbols
    ) -> None:
        self.symbols, self.in_place = symbols, in_place
        self.num_chunks = schedule.num_chunks
        self.memory: list[dict[int, int]] = []
        self.shared: list[frozenset[int]] = []
        world_size, root = schedule.world_size, schedule.root
        per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
        for rank in range(world_size):
            inputs = _chunks_of(rules.inputs(rank, world_size, root), per_block)
            outputs = _chunks_of(rules.outputs(rank, world_size, root), per_block)
            self.memory.append({chunk: symbols.leaf(rank, chunk) for chunk in inputs})
            self.shared.append(frozenset(inputs).intersection(outputs) if in_place else frozenset())

    def place(self, rank: int, ref: Ref) -> int:
        buffer, chunk, slot = ref
        if buffer is Buffer.INPUT:
            return chunk
        if buffer is Buffer.OUTPUT:
            return chunk if chunk in self.shared[rank] else self.num_chunks + chunk
        return 2 * self.num_chunks + slot


class _Verifier:
    """One run of all programs, on one symbolic world for each aliasing."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.rules = contract(schedule.collective)
        self.symbols = _Symbols()
        self.worlds = [
            _World(schedule, self.rules, in_place, self.symbols)
            for in_place in self.rules.aliasings
        ]
        per_block = self.rules.chunks_per_block(schedule.num_chunks, schedule.world_size)
        self.outputs = [
            _chunks_of(self.rules.outputs(rank, schedule.world_size, schedule.root), per_block)
            for rank in range(schedule.world_size)
        ]
        self.everyone = (1 << schedule.world_size) - 1
        self.step = 0
        self.sent = [0] * schedule.world_size
        self.messages = [0] * schedule.world_size
        self.rounds = self.traffic = self.reduced = self.ports = self.in_flight = 0
        self.staged: set[tuple[int, int]] = set()

    def fail(self, message: str, rank: int, **details: object) -> VerificationError:
        try:
            drawing = grid(self.schedule, mark=(rank, self.step))
        except Exception:  # noqa: BLE001  # the program is wrong further on as well
            drawing = ""
        return VerificationError(
            message,
            rank=rank,
            step=self.step,
            grid=drawing,
            **details,  # type: ignore[arg-type]  # peer, chunk, expected, got: see the class
        )

    def started(self, rank: int) -> Program:
        """The steps of a rank; what fails in calling its program fails at the first step."""
        yield from self.schedule.steps(rank)

    def run(self) -> Proof:
        world_size = self.schedule.world_size
        programs: list[Program | None] = [self.started(rank) for rank in range(world_size)]
        while True:
            steps: list[tuple[int, Step]] = []
            running = False
            for rank, program in enumerate(programs):
                if program is None:
                    continue
                try:
                    step = next(program, None)
                except Exception as error:
                    raise self.fail(f"the program raised {error!r}", rank) from error
                if step is None:
                    programs[rank] = None
                    continue
                if not isinstance(step, Step):
                    raise self.fail(f"the program yielded {step!r}, which is not a Step", rank)
                running = True
                if step:
                    steps.append((rank, step))
            if not running:
                break
            if steps:
                self.do(steps)
            self.step += 1
        return self.conclude()

    def do(self, steps: list[tuple[int, Step]]) -> None:
        """Do one step of all ranks."""
        mail: dict[tuple[int, int], list[tuple[Send, list[list[int]]]]] = {}
        for rank, step in steps:
            posted = sent = 0
            for operation in step:
                if type(operation) is Send:
                    self.check_peer(rank, operation.peer)
                    payload = [
                        [self.read(world, rank, ref) for ref in operation.refs]
                        for world in self.worlds
                    ]
                    mail.setdefault((rank, operation.peer), []).append((operation, payload))
                    sent += len(operation.refs)
                    posted += 1
            self.sent[rank] += sent
            self.messages[rank] += posted
        busiest = hardest = 0
        writes: list[tuple[int, list[dict[int, int]]]] = []
        for rank, step in steps:
            received, reduced, written = self.do_rank(rank, step, mail)
            writes.append((rank, written))
            sends = [op for op in step if type(op) is Send]
            receives = sum(type(op) in (Recv, RecvReduce) for op in step)
            busiest = max(busiest, received, sum(len(op.refs) for op in sends))
            hardest = max(hardest, reduced)
            self.ports = max(self.ports, len(sends), receives)
            self.in_flight = max(self.in_flight, len(sends) + receives)
        for (source, target), letters in mail.items():
            if letters:
                raise self.fail(
                    "the message is never received",
                    source,
                    peer=target,
                    chunk=letters[0][0].refs[0].chunk if letters[0][0].refs else None,
                )
        for rank, written in writes:
            for world, values in zip(self.worlds, written, strict=True):
                world.memory[rank].update(values)
        self.rounds += bool(mail)
        self.traffic += busiest
        self.reduced += hardest

    def do_rank(
        self,
        rank: int,
        step: Step,
        mail: dict[tuple[int, int], list[tuple[Send, list[list[int]]]]],
    ) -> tuple[int, int, list[dict[int, int]]]:
        """Do what one rank receives and computes; returns chunks received, reduced, and writes."""
        received = reduced = 0
        written: list[dict[int, int]] = [{} for _ in self.worlds]
        accumulating: set[tuple[int, int]] = set()
        for operation in step:
            match operation:
                case Send():
                    continue
                case Recv(peer, into):
                    arrived = self.take(rank, peer, into, mail)
                    received += len(into)
                    for index, values in enumerate(arrived):
                        for ref, value in zip(into, values, strict=True):
                            self.write(index, rank, ref, value, written)
                case RecvReduce(peer, into, local, received_left, final):
                    if len(local) != len(into):
                        raise self.fail("as many local as target chunks are needed", rank)
                    arrived = self.take(rank, peer, into, mail)
                    received += len(into)
                    reduced += len(into)
                    for index, values in enumerate(arrived):
                        world = self.worlds[index]
                        for ref, mine, value in zip(into, local, values, strict=True):
                            place = world.place(rank, ref)
                            chained = (index, place) in accumulating
                            if chained and world.place(rank, mine) == place:
                                own = written[index].pop(place)
                                self.check_class(rank, mine, own)
                            else:
                                own = self.read(world, rank, mine)
                            pair = (value, own) if received_left else (own, value)
                            self.check_class(rank, mine, value)
                            joined = self.symbols.join(*pair)
                            self.check_final(rank, ref, joined, final)
                            self.write(index, rank, ref, joined, written)
                            accumulating.add((index, place))
                case Copy(into_ref, source):
                    for index, world in enumerate(self.worlds):
                        if world.place(rank, into_ref) != world.place(rank, source):
                            value = self.read(world, rank, source)
                            self.write(index, rank, into_ref, value, written)
                case Reduce(into_ref, sources, final):
                    if not sources:
                        raise self.fail("there is nothing to reduce", rank, chunk=into_ref.chunk)
                    reduced += len(sources) - 1
                    for index, world in enumerate(self.worlds):
                        total = self.read(world, rank, sources[0])
                        for ref in sources[1:]:
                            value = self.read(world, rank, ref)
                            self.check_class(rank, sources[0], value)
                            total = self.symbols.join(total, value)
                        self.check_final(rank, into_ref, total, final)
                        self.write(index, rank, into_ref, total, written)
                case _:
                    raise self.fail(f"{operation!r} is not an operation", rank)
        self.mark_staged(rank, step, written)
        return received, reduced, written

    def mark_staged(self, rank: int, step: Step, written: list[dict[int, int]]) -> None:
        for world, values in zip(self.worlds, written, strict=True):
            for operation in step:
                for ref, own in _reads(operation):
                    place = world.place(rank, ref)
                    if place in values and (own is None or world.place(rank, own) != place):
                        self.staged.add((rank, self.step))
                        return

    def take(
        self,
        rank: int,
        peer: int,
        into: tuple[Ref, ...],
        mail: dict[tuple[int, int], list[tuple[Send, list[list[int]]]]],
    ) -> list[list[int]]:
        """The values of the next message from a peer, for each world."""
        self.check_peer(rank, peer)
        letters = mail.get((peer, rank))
        if not letters:
            raise self.fail(
                "nothing is sent to match the receive",
                rank,
                peer=peer,
                chunk=into[0].chunk if into else None,
            )
        operation, payload = letters.pop(0)
        if len(operation.refs) != len(into) or any(
            theirs.chunk != mine.chunk for theirs, mine in zip(operation.refs, into, strict=True)
        ):
            raise self.fail(
                "the message carries other chunks than the receive expects",
                rank,
                peer=peer,
                expected=[ref.chunk for ref in into],
                got=[ref.chunk for ref in operation.refs],
            )
        return payload

    def check_peer(self, rank: int, peer: int) -> None:
        if not 0 <= peer < self.schedule.world_size or peer == rank:
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

    def check_final(self, rank: int, ref: Ref, value: int, final: bool) -> None:
        # A set contract has no last reduction: what is complete may be heard again.
        if not self.rules.reduces or self.rules.at_least_once:
            return
        if final != (self.symbols.contributors[value] == self.everyone):
            raise self.fail(
                f"the reduction of {ref} is {'' if final else 'not '}marked final",
                rank,
                chunk=ref.chunk,
                expected="the mark where, and only where, a chunk is complete",
                got=self.symbols.describe(value),
            )

    def read(self, world: _World, rank: int, ref: Ref) -> int:
        value = world.memory[rank].get(world.place(rank, ref))
        if value is None or ref.slot < 0:
            what = "is not in its input" if ref.buffer is Buffer.INPUT else "was never written"
            raise self.fail(f"reads {ref}, which {what}", rank, chunk=ref.chunk)
        if self.symbols.chunk[value] != ref.chunk:
            self.check_class(rank, ref, value)
        return value

    def write(
        self, index: int, rank: int, ref: Ref, value: int, written: list[dict[int, int]]
    ) -> None:
        world = self.worlds[index]
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
        place = world.place(rank, ref)
        if place in written[index]:
            raise self.fail(f"{ref} has two writers in one step", rank, chunk=ref.chunk)
        written[index][place] = value

    def conclude(self) -> Proof:
        """Compare the outputs with the contract and sum up."""
        schedule, rules, symbols = self.schedule, self.rules, self.symbols
        world_size = schedule.world_size
        per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
        self.step = max(0, self.step - 1)
        results: dict[int, int] = {}
        same = True
        for world in self.worlds:
            for rank in range(world_size):
                for chunk in self.outputs[rank]:
                    place = chunk if chunk in world.shared[rank] else world.num_chunks + chunk
                    value = world.memory[rank].get(place)
                    owner = rules.owner(chunk // per_block, world_size, schedule.root)
                    wanted = self.everyone if rules.reduces else 1 << owner
                    if (
                        value is None
                        or symbols.chunk[value] != chunk
                        or symbols.contributors[value] != wanted
                        or (symbols.repeated[value] and not rules.at_least_once)
                    ):
                        raise self.fail(
                            f"out[{chunk}] ends wrong"
                            + (" when input and output share memory" if world.in_place else ""),
                            rank,
                            chunk=chunk,
                            expected="every rank exactly once"
                            if rules.reduces
                            else f"the data of rank {owner}",
                            got="nothing" if value is None else symbols.describe(value),
                        )
                    same &= results.setdefault(chunk, value) == value
        data_chunks = per_block * (world_size if rules.num_blocks(world_size) > 1 else 1)
        chunk_share = Fraction(1, data_chunks)
        return Proof(
            schedule=schedule,
            rounds=self.rounds,
            traffic=self.traffic * chunk_share,
            reduced=self.reduced * chunk_share,
            sent_mean=sum(self.sent) * chunk_share / world_size,
            sent_max=max(self.sent) * chunk_share,
            messages_mean=Fraction(sum(self.messages), world_size),
            messages_max=max(self.messages),
            ports=self.ports,
            in_flight=self.in_flight,
            staged=frozenset(self.staged),
            same_everywhere=same,
            _results=results,
            _symbols=symbols,
        )


def _reads(operation: Operation) -> Iterator[tuple[Ref, Ref | None]]:
    """What an operation reads, each with the target that it may update where it stands."""
    match operation:
        case Send():
            yield from ((ref, None) for ref in operation.refs)
        case Copy():
            yield operation.source, None
        case Reduce():
            yield from ((ref, None) for ref in operation.sources)
        case RecvReduce():
            yield from zip(operation.local, operation.into, strict=True)
        case Recv():
            pass


def verify(schedule: Schedule) -> Proof:
    """Prove a schedule, under every aliasing that its contract allows.

    Returns
    -------
    Proof
        What it costs, and in which order it reduces.

    Raises
    ------
    VerificationError
        It does not keep its contract. The error names rank, step, peer, chunk,
        what was expected and what was found, and shows the grid with the bad
        place marked.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> proof = verify(schedule_of("all_reduce", "ring", 4))
    >>> proof.rounds, str(proof.sent_max)
    (6, '3/2')
    >>> proof.order(0)
    (1, 2, '+', 3, '+', 0, '+')
    """
    return _Verifier(schedule).run()
