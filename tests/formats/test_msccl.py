"""MSCCL's XML: what is written is right in any order of thread blocks, what is read is proved and runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from itertools import pairwise

import pytest
import torch

import ringcoll
from ringcoll.errors import ScheduleError, VerificationError
from ringcoll.lab.formats import from_msccl, to_msccl
from ringcoll.lab.formats.places import Places
from ringcoll.schedules import (
    Recv,
    RecvReduce,
    Schedule,
    Send,
    Step,
    contract,
    copy,
    inp,
    out,
    recv_reduce,
    send,
    tally_of,
    tmp,
    verify,
)
from ringcoll.schedules.algorithms import Algorithm, find, schedule_of
from tests.cases.algorithms import EVERY, name_of, worlds_of
from tests.cases.foreign import run_msccl

HELD = [entry for entry in EVERY if entry.collective not in ("barrier", "scan", "exscan")]
RING = find("all_reduce", "ring")
every_algorithm = pytest.mark.parametrize("entry", HELD, ids=name_of)


def built(entry: Algorithm, world_size: int) -> Schedule:
    root = world_size // 2 if contract(entry.collective).rooted else 0
    return entry.schedule(world_size, root)


@cache
def written(entry: Algorithm, world_size: int) -> str:
    return to_msccl(built(entry, world_size), max_steps=256)


# --- what is written ---------------------------------------------------------------------

NUMBER = r'"-?\d+"'
GRAMMAR = {
    "algo": (
        r'<algo name="[\w.-]+" proto="(?:Simple|LL|LL128)" nchannels="\d+" nchunksperloop="\d+" '
        r'ngpus="\d+" coll="[a-z]+" inplace="[01]" outofplace="1" minBytes="0" maxBytes="0"'
        r'(?: root="\d+")?>'
    ),
    "gpu": r'  <gpu id="\d+" i_chunks="\d+" o_chunks="\d+" s_chunks="\d+">',
    "tb": rf'    <tb id="\d+" send={NUMBER} recv={NUMBER} chan="\d+">',
    "step": (
        r'      <step s="\d+" type="(?:s|r|rrc|cpy|re|nop)" srcbuf="[ios]" '
        rf'srcoff={NUMBER} dstbuf="[ios]" dstoff={NUMBER} cnt="\d+" depid={NUMBER} deps={NUMBER} '
        r'hasdep="[01]"/>'
    ),
    "end": r" *</(?:tb|gpu|algo)>",
}


@every_algorithm
def test_each_line_is_of_the_grammar(entry: Algorithm) -> None:
    """That of the parser, written by hand: double quotes, one space before each attribute."""
    for world_size in worlds_of(entry, 1, 2, 5):
        for line in written(entry, world_size).splitlines():
            assert any(re.fullmatch(pattern, line) for pattern in GRAMMAR.values()), line


@every_algorithm
def test_thread_blocks_may_run_in_any_order(entry: Algorithm) -> None:
    for world_size in worlds_of(entry, 1, 2, 4, 5):
        for shared in {False, contract(entry.collective).in_place}:
            run_msccl(written(entry, world_size), world_size, shared=shared)


def test_a_wait_that_is_left_out_is_found() -> None:
    text = re.sub(r'depid="\d+" deps="\d+"', 'depid="-1" deps="-1"', written(RING, 4))
    wrong = 0
    for seed in range(20):
        try:
            run_msccl(text, seed, shared=True)
        except AssertionError:
            wrong += 1
    assert wrong > 10


def test_a_step_that_others_wait_for_says_so() -> None:
    for gpu in written(RING, 5).split("<gpu")[1:]:
        blocks = gpu.split("<tb")[1:]
        waited = {
            (int(block), int(step))
            for block, step in re.findall(r'depid="(\d+)" deps="(\d+)"', gpu)
        }
        marked = {
            (number, int(step))
            for number, block in enumerate(blocks)
            for step in re.findall(r'<step s="(\d+)".*hasdep="1"', block)
        }
        assert waited == marked != set()


def test_limits_are_errors_that_say_so() -> None:
    ring = schedule_of("all_reduce", "ring", 40)
    with pytest.raises(ScheduleError, match="more than 64 steps: msccl-executor-nccl runs at most"):
        to_msccl(ring)
    assert to_msccl(ring, max_steps=256)
    with pytest.raises(ScheduleError, match="MSCCL has no barrier"):
        to_msccl(schedule_of("barrier", "dissemination", 4))
    far = Schedule("broadcast", "far", 2000, 1, 0, far_program)
    with pytest.raises(ScheduleError, match=r"distance of 1999 ranks: MSCCL has 32 channels"):
        to_msccl(far)


def far_program(rank: int) -> list[Step]:
    if rank == 0:
        return [Step(copy(out(0), inp(0)), send(1999, inp(0)))]
    return [Step(Recv(0, (out(0),)))] if rank == 1999 else [Step()]


def test_many_peers_are_divided_among_channels() -> None:
    text = to_msccl(schedule_of("all_gather", "direct", 40))
    assert 'nchannels="2"' in text
    for gpu in text.split("<gpu")[1:]:
        for way in ("send", "recv"):
            channels = re.findall(rf'<tb [^>]*{way}="\d+"[^>]*chan="(\d+)"', gpu)
            assert max(map(channels.count, channels)) <= 32
            assert len(channels) == 39
    verify(from_msccl(text))


def test_a_long_message_is_cut() -> None:
    def program(rank: int) -> list[Step]:
        if rank == 0:
            copies = (copy(out(chunk), inp(chunk)) for chunk in range(150))
            return [Step(*copies, send(1, *map(inp, range(150))))]
        return [Step(Recv(0, tuple(map(out, range(150)))))]

    text = to_msccl(Schedule("broadcast", "long", 2, 150, 0, program), max_steps=256)
    assert re.findall(r'type="s".*cnt="(\d+)"', text) == ["71", "71", "8"]


def test_a_program_that_exchanges_places_is_refused() -> None:
    """A step here reads the state before it; a thread block does one thing after the other."""
    first = Step(copy(tmp(0, 0), inp(0)), copy(tmp(1, 0), inp(0)), copy(out(0), inp(0)))
    swap = Step(copy(tmp(0, 0), tmp(1, 0)), copy(tmp(1, 0), tmp(0, 0)))
    schedule = Schedule("all_reduce", "swap", 1, 1, 2, lambda rank: [first, swap])
    with pytest.raises(ScheduleError, match="rank 0 exchanges places in step 1"):
        to_msccl(schedule)


# --- there and back ----------------------------------------------------------------------


@pytest.mark.slow
@every_algorithm
def test_what_is_written_is_read(entry: Algorithm) -> None:
    for world_size in worlds_of(entry, 1, 2, 3, 5, 8):
        check_read(built(entry, world_size), from_msccl(written(entry, world_size)))


def check_read(before: Schedule, after: Schedule) -> None:
    proof = verify(after)
    assert after._header()[:4] + after._header()[5:] == before._header()[:4] + before._header()[5:]
    assert tally_of(after).sent == tally_of(before).sent
    assert sum(tally_of(after).sends) == num_runs(before)
    assert proof.rounds <= verify(before).rounds, "nothing waits without a reason"
    if contract(before.collective).reduces:
        for chunk, order in proof.orders.items():
            assert sorted(x for x in order if x != "+") == [*range(before.world_size)], chunk


def num_runs(schedule: Schedule) -> int:
    """Messages of a schedule, each cut where its chunks do not lie side by side at both ends."""
    places = Places.of(schedule)
    total = 0
    programs = [[*schedule.steps(rank)] for rank in range(schedule.world_size)]
    for rank, program in enumerate(programs):
        for number, step in enumerate(program):
            sent: dict[int, list[Send]] = {}
            for operation in step:
                if isinstance(operation, Send):
                    sent.setdefault(operation.peer, []).append(operation)
            for peer, sends in sent.items():
                receives = [
                    operation
                    for operation in programs[peer][number]
                    if isinstance(operation, Recv | RecvReduce) and operation.peer == rank
                ]
                for one, other in zip(sends, receives, strict=True):
                    ends = [(rank, one.refs)]
                    if isinstance(other, Recv):
                        ends += [(peer, other.refs)]
                    else:
                        ends += [(peer, other.into), (peer, other.local)]
                    columns = [[places.index(end, ref) for ref in refs] for end, refs in ends]
                    total += 1 + sum(
                        any((a[0], a[1] + 1) != b for a, b in pairs)
                        for pairs in zip(*map(pairwise, columns), strict=True)
                    )
    return total


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_64_ranks() -> None:
    text = to_msccl(schedule_of("all_reduce", "ring", 64), max_steps=256)
    assert verify(from_msccl(text)).rounds == 126


# --- what is read --------------------------------------------------------------------------

PIPELINE = """\
<!-- A ring as NCCL does it, written by hand. -->
<algo name="by hand" proto="Simple" nchannels="1" nchunksperloop="3" ngpus="3" coll="allreduce" inplace="1">
  <gpu id="0" i_chunks="3" o_chunks="0" s_chunks="0">
    <tb id="0" send="1" recv="2" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="rrs" srcbuf="i" srcoff="2" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="2" type="rrcs" srcbuf="i" srcoff="1" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="3" type="rcs" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="4" type="r" srcbuf="i" srcoff="2" dstbuf="i" dstoff="2" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="1" i_chunks="3" o_chunks="0" s_chunks="0">
    <tb id="0" send="2" recv="0" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="1" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="rrs" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="2" type="rrcs" srcbuf="i" srcoff="2" dstbuf="i" dstoff="2" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="3" type="rcs" srcbuf="i" srcoff="0" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="4" type="r" srcbuf="i" srcoff="2" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
  <gpu id="2" i_chunks="3" o_chunks="0" s_chunks="1">
    <tb id="1" send="0" recv="-1" chan="0">
      <step s="0" type="s" srcbuf="i" srcoff="2" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="1" type="s" srcbuf="s" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="0" deps="0" hasdep="1"/>
      <step s="2" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" depid="0" deps="2" hasdep="0"/>
      <step s="3" type="s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>
      <step s="4" type="s" srcbuf="i" srcoff="2" dstbuf="o" dstoff="0" cnt="1" depid="0" deps="3" hasdep="0"/>
    </tb>
    <tb id="0" send="-1" recv="1" chan="0">
      <step s="0" type="rrc" srcbuf="i" srcoff="1" dstbuf="s" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
      <step s="1" type="nop" srcbuf="i" srcoff="-1" dstbuf="o" dstoff="-1" cnt="0" depid="1" deps="1" hasdep="0"/>
      <step s="2" type="rrc" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="1"/>
      <step s="3" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="2" cnt="1" depid="1" deps="0" hasdep="1"/>
      <step s="4" type="r" srcbuf="i" srcoff="0" dstbuf="i" dstoff="1" cnt="1" depid="-1" deps="-1" hasdep="0"/>
    </tb>
  </gpu>
</algo>
"""


def test_an_algorithm_written_by_hand_is_proved_and_runs() -> None:
    schedule = from_msccl(PIPELINE)
    proof = verify(schedule)
    assert (schedule.algorithm, proof.rounds, proof.messages_max) == ("by_hand", 4, 4)

    def rank_main(group: ringcoll.LocalGroup) -> list[float]:
        tensor = torch.tensor([float(10 ** group.rank() * (index + 1)) for index in range(7)])
        ringcoll.all_reduce(tensor, group=group, algorithm=schedule)
        return tensor.tolist()

    assert ringcoll.run_threads(rank_main, 3) == [[111.0 * n for n in range(1, 8)]] * 3


def replaced(old: str, new: str) -> str:
    assert old in PIPELINE
    return PIPELINE.replace(old, new, 1)


MALFORMED = {
    "": "line 1: no XML",
    "<algo": "line 1: no XML",
    "<algo>": "line 1: no XML: no element found",
    "<gpu/>": "line 1: <gpu>, expected <algo>",
    "<algo name='x'/>": "line 1: <algo>: has no attribute 'coll'",
    replaced("<gpu id", "<gpus/><gpu id"): "line 3: <gpus> inside <algo>, expected <gpu>",
    replaced("<step", "<!-- --><tb/><step"): "line 5: <tb> inside <tb>, expected <step>",
    replaced('"s" srcbuf="i" srcoff="0" dstbuf="o" dstoff="0" cnt="1" depid="-1" deps="-1" hasdep="0"/>',
             '"s"><x/></step>'): "line 5: <x> inside <step>, expected nothing",
    replaced("<step", "words<step"): "line 5: text 'words' inside <tb>",
    replaced("</gpu>", ""): "line 12: <gpu> inside <gpu>, expected <tb>",
    replaced('coll="allreduce"', 'coll="alltoallv"'): 'line 2: <algo>: coll="alltoallv" is none of',
    replaced('ngpus="3"', 'ngpus="4"'): "there are 3 gpus",
    replaced('ngpus="3"', 'ngpus="0"'): 'ngpus="0" is not a number from 1',
    replaced('nchunksperloop="3"', 'nchunksperloop="3x"'): 'nchunksperloop="3x" is not a number',
    replaced('nchunksperloop="3"', f'nchunksperloop="{"9" * 5000}"'): "is not a number from 1",
    replaced('nchunksperloop="3"', f'nchunksperloop="{"9" * 18}"'): "too large for the steps",
    replaced('inplace="1"', 'inplace="2"'): 'inplace="2" is not a number from 0 to 1',
    replaced('id="0" i_chunks', 'id="1" i_chunks'): 'line 3: <gpu>: id="1", expected "0"',
    replaced('<tb id="0"', '<tb id="2"'): 'line 4: <tb>: id="2", expected "0"',
    replaced('send="1"', 'send="0"'): "line 4: <tb>: a peer is the rank itself",
    replaced('send="1"', 'send="3"'): 'send="3" is not a number from -1 to 2',
    replaced('send="1"', 'send="-1"'): "line 5: <step>: the thread block has no peer to send to",
    replaced('recv="-1" chan="0"', 'recv="1" chan="0"'): "another thread block has the connection",
    replaced('<step s="1"', '<step s="2"'): 'line 6: <step>: s="2", expected "1"',
    replaced('type="rrs"', 'type="x"'): 'line 6: <step>: type="x" is none of s, r,',
    replaced('srcbuf="i"', 'srcbuf="x"'): 'srcbuf="x" is none of i, o, s',
    replaced('srcoff="0"', 'srcoff="3"'): "1 chunks from srcoff 3 are not in the 3 chunks of buffer i",
    replaced('srcoff="0"', 'srcoff="-1"'): 'srcoff="-1" is not a number from 0',
    replaced('cnt="1"', 'cnt="0"'): "0 chunks from srcoff 0 are not",
    replaced('cnt="1"', 'cnt="2"'): "receives 1 chunks, but rank 0, thread block 0, step 0 (line 5) sends 2",
    replaced('cnt="1"', f'cnt="{10**9}"'): "the steps name 10000000",
    replaced('depid="0" deps="0"', 'depid="0" deps="9"'): "waits for step 9 of thread block 0, which rank 2",
    replaced('depid="0" deps="0"', 'depid="0" deps="x"'): 'deps="x" is not a number from 0',
    replaced('hasdep="1"', 'hasdep="2"'): 'hasdep="2" is not a number from 0 to 1',
    replaced('chan="0"', 'chan="1"'): "rank 0 sends 4 messages to rank 1 on channel 1, but rank 1 receives 0",
    replaced('dstbuf="s" dstoff="0"', 'dstbuf="s" dstoff="1"'): "are not in the 1 chunks of buffer s",
    replaced('srcbuf="s" srcoff="0"', 'srcbuf="s" srcoff="0"').replace('dstbuf="s"', 'dstbuf="i"'):
        "rank 2, thread block 1, step 1 (line 24) reads scratch 0, which was never written",
    replaced('"rrs" srcbuf="i" srcoff="2"', '"rrs" srcbuf="i" srcoff="1"'): "adds chunk 2 to chunk 1",
}  # fmt: skip


@pytest.mark.parametrize("text, said", MALFORMED.items(), ids=[*map(str, range(len(MALFORMED)))])
def test_what_is_malformed_is_named(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(said)):
        from_msccl(text)


LAUGHS = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10 if n else "lol"}">' for n in range(12))


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    "document_type",
    [
        f"<!DOCTYPE algo [{LAUGHS}]>",
        '<!DOCTYPE algo [<!ENTITY file SYSTEM "file:///etc/passwd">]>',
        '<!DOCTYPE algo SYSTEM "http://127.0.0.1/x.dtd">',
        "<!DOCTYPE algo>",
    ],
)
def test_entities_and_document_types_are_refused(document_type: str) -> None:
    for name in ("&l11;", "&file;", "plain"):
        text = document_type + PIPELINE.partition("-->\n")[2].replace("by hand", name)
        with pytest.raises(ScheduleError, match="line 1: a document type"):
            from_msccl(text)


def test_an_undefined_entity_is_refused() -> None:
    with pytest.raises(ScheduleError, match="undefined entity"):
        from_msccl(PIPELINE.replace("by hand", "&lol;"))


def block(number: int, send_to: int, source: int, channel: int, *steps: str) -> str:
    """A thread block; a step is ``type src dst`` and perhaps ``depid deps``: ``"s i0 o0 1 0"``."""
    lines = []
    for index, step in enumerate(steps):
        kind, src, dst, *wait = step.split()
        depid, deps = wait or ("-1", "-1")
        lines.append(
            f'<step s="{index}" type="{kind}" srcbuf="{src[0]}" srcoff="{src[1:]}" dstbuf="{dst[0]}" '
            f'dstoff="{dst[1:]}" cnt="1" depid="{depid}" deps="{deps}" hasdep="0"/>'
        )
    return (
        f'<tb id="{number}" send="{send_to}" recv="{source}" chan="{channel}">{"".join(lines)}</tb>'
    )


def algorithm(collective: str, chunks: int, *gpus: list[str], in_place: int = 0) -> str:
    inside = "".join(
        f'<gpu id="{rank}" i_chunks="9" o_chunks="9" s_chunks="9">{"".join(blocks)}</gpu>'
        for rank, blocks in enumerate(gpus)
    )
    return (
        f'<algo name="x" proto="LL" nchannels="1" nchunksperloop="{chunks}" ngpus="{len(gpus)}" '
        f'coll="{collective}" inplace="{in_place}">{inside}</algo>'
    )


@pytest.mark.processes
def test_a_schedule_has_one_text() -> None:
    """Names have other hashes in each process, and sets another order."""
    code = (
        "from ringcoll.lab import to_msccl; from ringcoll.schedules import schedule_of\n"
        "print(to_msccl(schedule_of('all_reduce', 'circulant', 8)))"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert len(set(texts)) == 1


def test_a_deadlock_is_named() -> None:
    """Each rank receives before it sends."""
    text = algorithm(
        "allreduce", 1,
        [block(0, 1, 1, 0, "rrc i0 o0", "s i0 i0")],
        [block(0, 0, 0, 0, "rrc i0 o0", "s i0 i0")],
    )  # fmt: skip
    with pytest.raises(ScheduleError) as caught:
        from_msccl(text)
    message = str(caught.value)
    assert message.endswith("this is a deadlock")
    for place in ("rank 0, thread block 0, step 0 (line 1)", "rank 1, thread block 0, step 1"):
        assert place in message


def test_a_step_that_waits_for_itself_is_a_deadlock() -> None:
    with pytest.raises(ScheduleError, match=r"step 0 \(line 1\) waits for .* this is a deadlock"):
        from_msccl(algorithm("allreduce", 1, [block(0, -1, -1, 0, "cpy i0 o0 0 0")]))


def test_messages_that_pass_each_other_are_kept_in_slots() -> None:
    """Rank 0 sends `a`, then what depends on rank 1's message; rank 1 takes `a` last of all."""
    text = algorithm(
        "allgather", 2,
        [block(0, 1, -1, 0, "cpy i0 s0", "s s0 o0"),
         block(1, 1, 1, 1, "r o1 s0 0 1", "s s0 o0", "cpy s0 o1", "cpy i0 o0")],
        [block(0, 0, 0, 1, "s i0 o0", "r i0 s0", "cpy i0 o1"),
         block(1, -1, 0, 0, "r i0 s0 0 1", "cpy s0 o0")],
    )  # fmt: skip
    run_msccl(text, 0, shared=False)
    schedule = from_msccl(text)
    verify(schedule)
    assert schedule.num_slots == 3
    assert tally_of(schedule).sends == [2, 1]


def test_an_input_that_is_needed_after_its_output_is_kept() -> None:
    """Right with two buffers, and made right with one."""
    text = algorithm(
        "allreduce", 1,
        [block(0, 1, 1, 0, "rrc i0 o0", "s i0 i0")],
        [block(0, 0, 0, 0, "s i0 i0", "rrc i0 o0")],
    )  # fmt: skip
    run_msccl(text, 0, shared=False)
    with pytest.raises(AssertionError):
        run_msccl(text, 0, shared=True)
    schedule = from_msccl(text)
    verify(schedule)
    assert copy(tmp(0, 0), inp(0)) in next(iter(schedule.steps(0)))
    assert tally_of(schedule).sends == [1, 1]


def test_reductions_of_a_place_share_a_step_and_keep_their_order() -> None:
    text = algorithm(
        "reduce", 1,
        [block(0, -1, 1, 0, "rrc i0 o0"), block(1, -1, 2, 0, "rrc o0 o0 0 0")],
        [block(0, 0, -1, 0, "s i0 o0")],
        [block(0, 0, -1, 0, "s i0 o0")],
    )  # fmt: skip
    schedule = from_msccl(text)
    assert verify(schedule).rounds == 1
    assert [*schedule.steps(0)] == [
        Step(
            recv_reduce(1, out(0), inp(0), received_left=False, final=False),
            recv_reduce(2, out(0), out(0), received_left=False, final=True),
        )
    ]


def test_a_message_that_completes_some_of_its_chunks_is_cut() -> None:
    text = algorithm(
        "allreduce", 2,
        [block(0, 1, 1, 0, "rrc i0 i0", "s i0 i0", "s i1 i1", "r i1 i1")],
        [block(0, 0, 0, 0, "s i0 i0", "r i0 i0", "rrc i1 i1", "s i1 i1")],
        in_place=1,
    )  # fmt: skip
    verify(from_msccl(text))
    both = text.replace('"0" dstbuf="i" dstoff="0" cnt="1"', '"0" dstbuf="i" dstoff="0" cnt="2"')
    with pytest.raises(VerificationError, match="ends wrong"):
        verify(from_msccl(both))


def test_data_in_the_output_of_another_chunk_goes_to_a_slot() -> None:
    text = algorithm(
        "allgather", 2,
        [block(0, 1, 1, 0, "cpy i0 o1", "s o1 o0", "r o0 s0"),
         block(1, -1, -1, 0, "cpy o1 o0 0 1", "cpy s0 o1 0 2")],
        [block(0, 0, 0, 0, "s i0 i0", "r o0 o0", "cpy i0 o1")],
    )  # fmt: skip
    run_msccl(text, 3, shared=False)
    schedule = from_msccl(text)
    verify(schedule)
    assert schedule.num_slots == 2


def test_a_wrong_algorithm_is_a_proof_that_fails() -> None:
    text = algorithm("allreduce", 1, [block(0, -1, -1, 0, "cpy i0 o0")], [])
    with pytest.raises(VerificationError, match="ends wrong"):
        verify(from_msccl(text))
