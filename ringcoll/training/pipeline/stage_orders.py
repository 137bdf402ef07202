"""The orders in which the ranks of a pipeline work: GPipe, 1F1B, interleaved 1F1B, zero-bubble.

Each is a function that returns a `PipelineSchedule`. With the costs F = 1, B = 2, I = 1, W = 1 of
`UNIT_COSTS`, and messages that cost nothing:

=============  ==================  ===================================  ====================
schedule       idle share          activations that rank r keeps        idle share holds for
=============  ==================  ===================================  ====================
`gpipe`        (p-1) / (m + p-1)   m                                    all m
`one_f_one_b`  (p-1) / (m + p-1)   min(m, p-r)                          all m
`interleaved`  (p-1) / (vm + p-1)  at most (v-1) p + 2 (p-r-1) + 1      multiples m of p
`zero_bubble`  (p-1) / (3m + p-1)  min(m, p)                            m >= p
=============  ==================  ===================================  ====================

Here v is the number of stages per rank; a stage of `interleaved` has 1/v of the layers of a rank.

Source: Huang et al., "GPipe", NeurIPS 2019; Narayanan et al., "PipeDream", SOSP 2019 (1F1B);
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", SC 2021 (1F1B with a flush after each batch; section 2.2: interleaved 1F1B); Qi et
al., "Zero Bubble Pipeline Parallelism", ICLR 2024 (section 2: ZB-H1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

from ringcoll.training.pipeline.pipeline_schedule import Action, Kind, PipelineSchedule, check_sizes


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[tuple[Action, ...]], warmup: int
) -> Iterator[Action]:
    """Some forwards, then a backward after each forward, then the other backwards."""
    yield from forwards[:warmup]
    for number, backward in enumerate(backwards, start=warmup):
        yield from forwards[number : number + 1]
        yield from backward


def _of_stage(kind: Kind, stage: int, num_microbatches: int) -> list[Action]:
    return [Action(kind, stage, microbatch) for microbatch in range(num_microbatches)]


def _with_warmups(name: str, p: int, m: int, warmups: Sequence[int]) -> PipelineSchedule:
    """A stage on each rank, which begins with its warm-up and then alternates."""
    check_sizes(world_size=p, num_microbatches=m)
    programs = tuple(
        tuple(
            _alternate(
                _of_stage(Kind.FORWARD, rank, m),
                [(action,) for action in _of_stage(Kind.BACKWARD, rank, m)],
                warmup,
            )
        )
        for rank, warmup in enumerate(warmups)
    )
    activations = tuple(min(m, warmup + 1) for warmup in warmups)
    return PipelineSchedule(name, p, m, activations, programs)


def gpipe(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """All forwards, then all backwards; a size that is not positive raises `ScheduleError`.

    >>> from ringcoll.training import grid
    >>> print(grid(gpipe(4, 2)))
    rank 0  0F0 0F1 .   .   .   .   .   .   .   .   .   0B0 -   0B1 -
    rank 1  .   1F0 1F1 .   .   .   .   .   .   1B0 -   1B1 -   .   .
    rank 2  .   .   2F0 2F1 .   .   .   2B0 -   2B1 -   .   .   .   .
    rank 3  .   .   .   3F0 3F1 3B0 -   3B1 -   .   .   .   .   .   .
    """
    warmups = [num_microbatches] * world_size
    return _with_warmups("gpipe", world_size, num_microbatches, warmups)


def one_f_one_b(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B: after a warm-up, a backward after each forward; as idle as `gpipe`, with less memory.

    Rank r begins with p - r - 1 forwards: so many stages lie between it and the first backward.

    >>> from ringcoll.training import grid
    >>> print(grid(one_f_one_b(4, 4)))
    rank 0  0F0 0F1 0F2 0F3 .   .   .   .   .   .   0B0 -   .   0B1 -   .   0B2 -   .   0B3 -
    rank 1  .   1F0 1F1 1F2 .   .   .   .   1B0 -   1F3 1B1 -   .   1B2 -   .   1B3 -   .   .
    rank 2  .   .   2F0 2F1 .   .   2B0 -   2F2 2B1 -   2F3 2B2 -   .   2B3 -   .   .   .   .
    rank 3  .   .   .   3F0 3B0 -   3F1 3B1 -   3F2 3B2 -   3F3 3B3 -   .   .   .   .   .   .
    """
    return _with_warmups("1f1b", world_size, num_microbatches, range(world_size)[::-1])


def interleaved(
    world_size: int, num_microbatches: int, *, stages_per_rank: int = 2
) -> PipelineSchedule:
    """1F1B with v stages per rank: idle for 1/v of the time, v times as many messages.

    A rank takes p micro-batches through its first stage, then the same micro-batches through its
    second stage, and so on. If p does not divide m, the schedule is that of the next multiple of
    p, without the actions of the micro-batches that do not exist: what is left keeps its order, so
    nothing new can block.

    >>> from ringcoll.training import grid
    >>> print(grid(interleaved(2, 2)))
    rank 0  0F0 0F1 2F0 2F1 .   .   2B0 -   .   2B1 -   0B0 -   0B1 -
    rank 1  .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1B0 -   1B1 -   .   .
    """
    check_sizes(
        world_size=world_size, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    num_stages = world_size * stages_per_rank
    rounds = range(0, num_microbatches, world_size)
    warmups = [
        (stages_per_rank - 1) * world_size + 2 * (world_size - rank - 1)
        for rank in range(world_size)
    ]
    programs = []
    for rank, warmup in enumerate(warmups):
        stages = range(rank, num_stages, world_size)
        forwards = [
            Action(Kind.FORWARD, stage, first + place)
            for first, stage, place in product(rounds, stages, range(world_size))
        ]
        backwards = [
            (Action(Kind.BACKWARD, stage, first + place),)
            for first, stage, place in product(rounds, reversed(stages), range(world_size))
        ]
        padded = _alternate(forwards, backwards, warmup)
        programs.append(tuple(action for action in padded if action.microbatch < num_microbatches))
    activations = tuple(min(num_microbatches * stages_per_rank, warmup + 1) for warmup in warmups)
    return PipelineSchedule(
        "interleaved", num_stages, num_microbatches, activations, tuple(programs)
    )


def zero_bubble(world_size: int, num_microbatches: int) -> PipelineSchedule:
    """ZB-H1: 1F1B whose gradients of weights are put off, to fill the time of waiting.

    Only the gradient of a stage's input is awaited by another rank. Rank r puts the gradients of
    its weights off by r micro-batches. So each rank keeps at most p activations, as many as rank 0
    of `one_f_one_b`, and is idle for a third of the time.

    >>> from ringcoll.training import grid
    >>> print(grid(zero_bubble(4, 4)))
    rank 0  0F0 0F1 0F2 0F3 .   .   .   0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1  .   1F0 1F1 1F2 .   .   1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3
    rank 2  .   .   2F0 2F1 .   2I0 2F2 2I1 2F3 2I2 2W0 2I3 2W1 2W2 2W3
    rank 3  .   .   .   3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3W1 3W2 3W3
    """
    check_sizes(world_size=world_size, num_microbatches=num_microbatches)
    programs = []
    for rank in range(world_size):
        of_weights = _of_stage(Kind.BACKWARD_WEIGHTS, rank, num_microbatches)
        backwards = [
            (action, *of_weights[max(0, number - rank) : max(0, number - rank + 1)])
            for number, action in enumerate(_of_stage(Kind.BACKWARD_INPUTS, rank, num_microbatches))
        ]
        backwards.append(tuple(of_weights[max(0, num_microbatches - rank) :]))
        forwards = _of_stage(Kind.FORWARD, rank, num_microbatches)
        programs.append(tuple(_alternate(forwards, backwards, world_size - rank - 1)))
    activations = (min(num_microbatches, world_size),) * world_size
    return PipelineSchedule(
        "zero_bubble", world_size, num_microbatches, activations, tuple(programs)
    )


SCHEDULES: Mapping[str, Callable[..., PipelineSchedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zero_bubble": zero_bubble,
}
"""The generators by name; each takes the number of ranks and the number of micro-batches."""
