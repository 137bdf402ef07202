"""The result of an asynchronous call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import CollectiveTimeoutError
from ringcoll.machine import seconds_of
from ringcoll.transport import Mark, future

_making_futures = threading.Lock()


class Work(dist.Work):
    """An operation on its way, as torch's own collectives return it.

    `wait` raises the operation's error, in the thread that waits. On CUDA tensors the operation is
    over for the host when all is enqueued; `wait` then makes the current stream wait for the rest.

    ``results`` are the tensors that will hold the result. A thread that is about to wait calls
    ``help_``, which may run the operation in that thread.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.ones(1)
    ...     work = ringcoll.all_reduce(tensor, group=group, async_op=True)
    ...     work.wait()
    ...     return tensor.item()
    >>> ringcoll.run_threads(rank_main, 2)
    [2.0, 2.0]
    """

    def __init__(
        self,
        description: str,
        results: Sequence[Tensor],
        help_: Callable[[Work], None] | None = None,
    ) -> None:
        super().__init__()
        self._description, self._results, self._help = description, list(results), help_
        self.done = False
        self._gate = threading.Lock()  # held until the operation is over
        self._gate.acquire()
        self._error: BaseException | None = None
        self._end: Mark | None = None
        self._base: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation.

        Parameters
        ----------
        timeout
            Time limit of this wait, beside the operation's time limit; zero, as in torch's
            C++ code, is no limit.

        Raises
        ------
        CollectiveTimeoutError
            The limit was exceeded; the operation goes on.
        GroupBrokenError
            The process was forked off since the call.
        RingcollError
            The operation failed.
        """
        if not self.done:
            help_ = self._help
            if help_ is not None and not timeout:
                help_(self)
            limit_s = seconds_of(timeout) if timeout else -1
            if not self._gate.acquire(timeout=limit_s):
                raise CollectiveTimeoutError(f"{self._description} is not complete after {timeout}")
            self._gate.release()
        if self._error is not None:
            raise self._error
        if self._end is not None:
            self._end.join()
        return True

    def is_completed(self) -> bool:
        """Whether the operation is over, with or without an error."""
        return self.done and (self._end is None or self._end.is_over())

    def is_success(self) -> bool:
        """Whether the operation is over, without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """The operation's error, or ``None``."""
        return self._error if self._error is not None or self._end is None else self._end.error

    def result(self) -> list[Tensor]:
        """The tensors that hold the result when the operation is complete."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of `result`; its callbacks never hold up other operations."""
        with _making_futures:
            if self._future is None:
                self._base = future(self._results)
                # `set_exception` would make C++ code, such as that of
                # DistributedDataParallel, take the exception for the value; a callback
                # that raises makes a future that has failed for C++ too.
                self._future = self._base.then(self._outcome)
                if self.done:
                    self._base.set_result(None)
            return self._future

    def complete(self, error: BaseException | None, end: Mark | None = None) -> bool:
        """End the operation, and wake all threads that wait; return whether `settle` has to follow.

        ``end`` is the point in the operation's stream after which its work is done.
        """
        with _making_futures:
            self._error, self._end, self.done = error, end, True
            self._help = None
            self._gate.release()
            return self._base is not None

    def settle(self) -> None:
        """Complete the future; the user's callbacks run here."""
        assert self._base is not None
        self._base.set_result(None)

    def _outcome(self, base: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        if self._end is not None:
            # The future's own stream is current here, and what the future holds is in
            # order from here on (``ivalue_inl.h``, ``Future::invokeCallback``).
            self._end.join()
        return self._results
