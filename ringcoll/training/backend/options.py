"""Options of a group of the backend: ``pg_options=``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from ringcoll.runtime.reduction import Reproducible, check_level
from ringcoll.runtime.transport import catalogue
from ringcoll.runtime.user_files import as_algorithm, is_rules, rules_in
from ringcoll.schedules import Schedule, contract
from ringcoll.schedules.algorithms import required, where_possible

NAME = "ringcoll"
# pybind11's class has no types.
_BackendOptions: Any = torch._C._distributed_c10d.Backend.Options


@dataclass
class Options(_BackendOptions):  # type: ignore[misc]
    """Options of a group: ``pg_options=`` of ``init_process_group`` and ``new_group``.

    As of all options of torch's backends, device meshes read ``_timeout``, the time limit of the
    groups that they make; it may be set.

    Parameters
    ----------
    algorithm
        Name of an algorithm, for the collectives that have an algorithm of that name; a
        `Schedule`, or the path of a file that holds one, for its collective; ``FILE.py:NAME``;
        rules by collective and size (``"all_reduce:0-64K:tree;ring"``, docs/choice.md); or a
        mapping from collective (``"all_reduce"``) to one of these. See
        `ringcoll.runtime.user_files.algorithms`.
    segment_bytes, wire_dtype
        As for the functions of `ringcoll.runtime.collectives.functions`; the wire dtype is used for
        sums of floating-point tensors only.
    reproducible
        As for the functions of `ringcoll.runtime.collectives.functions`, for all collectives that
        reduce.
    transport, cuda_transport, verify_messages, fit
        As for `ringcoll.use`.
    share
        Whether long CPU tensors move to shared memory when they are first all-reduced: see
        `ringcoll.share`. For programs whose tensors live long, as the buckets of
        ``DistributedDataParallel`` do, with the ranks on one host. Memory that cannot move, such
        as numpy's, and a part of a storage, is sent as it is. Operations of the group are waited
        for before memory moves; other groups, and sends and receives, must not be using the same
        tensor.

    Examples
    --------
    >>> from ringcoll.training.backend import Options
    >>> Options(algorithm="ring").algorithm_of("all_gather", 4)
    'ring'
    >>> Options(algorithm="ring").algorithm_of("barrier", 4)
    'auto'
    """

    algorithm: str | Schedule | Mapping[str, str | Schedule] = "auto"
    segment_bytes: int | None = None
    wire_dtype: torch.dtype | None = None
    reproducible: Reproducible = False
    transport: str = "auto"
    cuda_transport: str = "auto"
    share: bool = False
    verify_messages: bool = False
    fit: str | None = None

    def __post_init__(self) -> None:
        super().__init__(NAME)
        catalogue.named("cpu", self.transport)
        catalogue.named("cuda", self.cuda_transport)
        check_level(self.reproducible)
        if isinstance(self.algorithm, Mapping):  # the program may go on to change its own
            object.__setattr__(self, "algorithm", dict(self.algorithm))

    def __reduce__(self) -> tuple[Any, ...]:
        values = tuple(getattr(self, field.name) for field in fields(self))
        return Options, values, (None, {"_timeout": self._timeout})  # set as an attribute

    def algorithm_of(self, collective: str, world_size: int) -> str | Schedule:
        """Name of the algorithm for a collective, or the schedule, or the file that holds it.

        Raises
        ------
        UnknownAlgorithmError, UnsupportedWorldSizeError
            The mapping names an algorithm that the collective does not have, or that cannot run
            on so many ranks.
        """
        asked, fitting = self.algorithm, where_possible
        if not isinstance(asked, str | Schedule):
            asked, fitting = asked.get(collective, "auto"), required
        named = as_algorithm(asked)
        if isinstance(named, str) and is_rules(named):
            rules_in(named)  # raises if there is anything wrong with them
            return named
        fits = fitting(collective, named, world_size)
        return asked if fits is named else fits  # a file is read anew at each call

    def keywords(self, collective: str, world_size: int) -> dict[str, Any]:
        """Keyword arguments for the public functions of a collective."""
        keywords: dict[str, Any] = {"algorithm": self.algorithm_of(collective, world_size)}
        rules = contract(collective)
        if self.segment_bytes is not None and rules.can_be_cut:
            keywords["segment_bytes"] = self.segment_bytes
        if self.reproducible and rules.reduces and not rules.at_least_once:
            keywords["reproducible"] = self.reproducible
        return keywords
