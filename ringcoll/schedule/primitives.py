"""Schedules in NCCL's vocabulary."""

from __future__ import annotations

from ringcoll.schedule.ir import Copy, Recv, RecvReduce, Reduce, Send, Step
from ringcoll.schedule.schedule import Schedule


def primitives(schedule: Schedule, rank: int) -> list[str]:
    """A rank's program in NCCL's vocabulary.

    The receive of one step and the send of the next become one primitive where
    they concern the same place: ``recvReduceSend`` passes on a partial result,
    ``recvReduceCopySend`` keeps and passes on a complete result, ``recvCopySend``
    keeps and passes on data that are not reduced.

    Returns
    -------
    list of str
        A line for each moment; the primitives of a moment are joined by ``" | "``.

    References
    ----------
    "Demystifying NCCL", arXiv 2507.04786, table V.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> primitives(schedule_of("all_reduce", "ring", 3), 0)
    ['send', 'recvReduceSend', 'recvReduceCopySend', 'recvCopySend', 'recv']
    """
    moments: list[str] = []
    arrived: list[tuple[str, frozenset[tuple[object, int]]]] = []
    for step in (*schedule.steps(rank), Step()):
        waiting = list(arrived)
        arrived, words = [], []
        copied = {operation.source.place for operation in step if isinstance(operation, Copy)}
        for operation in step:
            match operation:
                case Send():
                    places = frozenset(ref.place for ref in operation.refs)
                    source = next((item for item in waiting if item[1] == places), None)
                    if source is not None:
                        waiting.remove(source)
                        words.append(source[0] + "Send")
                    else:
                        words.append("copySend" if places <= copied else "send")
                        copied -= places
                case Recv():
                    arrived.append(("recvCopy", frozenset(ref.place for ref in operation.refs)))
                case RecvReduce():
                    word = "recvReduceCopy" if operation.final else "recvReduce"
                    arrived.append((word, frozenset(ref.place for ref in operation.into)))
                case Reduce():
                    words.append("reduceCopy" if operation.final else "reduce")
                case Copy():
                    pass
        kept = ["recv" if word == "recvCopy" else word for word, _ in waiting]
        words = [*kept, *words, *["copy"] * len(copied)]
        if words:
            moments.append(" | ".join(words))
    return moments
