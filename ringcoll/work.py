"""What an asynchronous operation returns."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import CollectiveTimeoutError

__all__ = ["Work"]


class Work(dist.Work):
    """An operation on its way, as torch's own collectives return it.

    Errors are raised by `wait`, in the thread that waits.
    """

    def __init__(self, description: str, results: list[Tensor]) -> None:
        super().__init__()
        self._description, self._results = description, results
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation.

        Parameters
        ----------
        timeout
            Time limit of this wait; the operation has its own in any case.

        Raises
        ------
        CollectiveTimeoutError
            The limit was exceeded; the operation goes on.
        RingcollError
            The operation failed.
        """
        if not self._done.wait(timeout.total_seconds() if timeout else None):
            raise CollectiveTimeoutError(f"{self._description} is not complete after {timeout}")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is over, well or badly."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The error it ended with, if it did."""
        return self._error

    def result(self) -> list[Tensor]:
        """The tensors that hold the result, once it is complete."""
        return self._results

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of `result`; its callbacks never run on the communication thread."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done.is_set():
                    self._settle(self._future)
            return self._future

    def complete(self, error: BaseException | None) -> None:
        """Say that it is over."""
        with self._lock:
            self._error = error
            self._done.set()
            future = self._future
        if future is not None:
            # A thread of its own: a callback may block in another collective.
            threading.Thread(target=self._settle, args=(future,), daemon=True).start()

    def _settle(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)  # type: ignore[arg-type]
