"""Keys of a store: how ranks wait for each other's texts, and read them.

A rank trusts the others of its group, and the store. A text of another version, or of a stranger,
which cannot be read, is a `TransportError`, which `parse_json` raises.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any

import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.rendezvous.lines import Address

_FIRST_PAUSE_S, _PAUSE_S = 0.0001, 0.02  # between two looks into a store


def wait_for_keys(
    store: dist.Store,
    keys: list[str],
    deadline: float,
    given_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until a store has some keys, and return whether it has them.

    The wait looks into the store, with growing pauses between the looks: a wait in the store itself
    would block the store for other threads. It ends at ``deadline``, as ``time.monotonic`` counts,
    or when ``given_up`` says that it is in vain.
    """
    pause_s = _FIRST_PAUSE_S
    while not store.check(keys):
        if given_up() or time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S)
    return True


def read_text(store: dist.Store, key: str) -> str:
    """The text under a key of a store; bytes that are no text are replaced."""
    return store.get(key).decode(errors="replace")


def read_texts(store: Any, keys: list[str]) -> list[str]:  # torch's stubs lack two methods
    """The texts under keys that a store has, in one look if the store can do that."""
    if not store.has_extended_api():
        return [read_text(store, key) for key in keys]
    return [text.decode(errors="replace") for text in store.multi_get(keys)]


def read_json(
    store: dist.Store, key: str, parse: Callable[[Any], Any] = lambda value: value
) -> Any:
    """The value under a key of a store, which a rank has written as JSON; see `parse_json`."""
    return parse_json(key, read_text(store, key), parse)


def parse_json(key: str, text: str, parse: Callable[[Any], Any] = lambda value: value) -> Any:
    """The value that a rank has written under a key, as ``parse`` reads it; or `TransportError`."""
    try:
        return parse(json.loads(text))
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        words = f"no rank writes what the store has under {key!r}: {text[:80]!r}"
        raise TransportError(words) from error


def fields_of(value: Any, *kinds: type | UnionType) -> list[Any]:
    """The values of a list in JSON; `TypeError` or `ValueError` if one is not of its kind.

    >>> fields_of(["a0", 3], str, int)
    ['a0', 3]
    """
    fields = [*value]
    for field, kind in zip(fields, kinds, strict=True):
        if not isinstance(field, kind):
            raise TypeError(f"{field!r:.80} is no {kind}")
    return fields


def address_of(value: Any) -> Address:
    """A host and a port, from JSON; `TypeError` or `ValueError` if no socket can take them."""
    host, port = fields_of(value, str, int)
    host.encode("ascii" if host.isascii() else "idna")
    if "\0" in host or not 0 <= port < 1 << 16:
        raise ValueError(f"{host!r:.80} and {port} are no address")
    return host, port


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Some ranks, as in a sentence: ``rank 1, rank 3``."""
    return ", ".join(f"rank {rank}" for rank in ranks)


def absent_error(rank: int, absent: Sequence[int], timeout_s: float) -> CollectiveTimeoutError:
    """The error of a rank that has waited in vain for others to meet it."""
    return CollectiveTimeoutError(
        f"rank {rank} waited the whole timeout of {timeout_s:g} s for {ranks_in_words(absent)} to "
        "use the group for the first time",
        peer=absent[0] if absent else None,
    )


def await_ranks(
    store: dist.Store,
    rank: int,
    keys: Mapping[int, str],
    deadline: float,
    timeout_s: float,
    given_up: Callable[[], bool],
    *,
    last_key: str = "",
) -> None:
    """Wait until the store has the key of each rank, or the last key, which follows all of them.

    Raises `CollectiveTimeoutError` after the deadline, and `PeerLostError` if ``given_up`` has
    returned ``True``.
    """
    if not wait_for_keys(store, [last_key] if last_key else [*keys.values()], deadline, given_up):
        if given_up():
            raise PeerLostError(f"rank {rank} gave up meeting the others")
        absent = [peer for peer, key in keys.items() if not store.check([key])]
        raise absent_error(rank, absent, timeout_s)


def read_from_ranks(
    store: dist.Store,
    name: str,
    rank: int,
    peers: Sequence[int],
    timeout_s: float,
    given_up: Callable[[], bool],
    parse: Callable[[Any], Any],
    *,
    since_s: float | None = None,
) -> dict[int, Any]:
    """Read what each of some ranks has put into the store as JSON, under ``NAME/RANK``.

    The time limit counts from ``since_s``, a time of ``time.monotonic``; by default from now.
    Raises as `await_ranks`, and `TransportError` for a text that is not JSON that ``parse`` reads.
    """
    keys = {peer: f"{name}/{peer}" for peer in peers}
    deadline = (time.monotonic() if since_s is None else since_s) + timeout_s
    await_ranks(store, rank, keys, deadline, timeout_s, given_up)
    texts = zip(keys.items(), read_texts(store, [*keys.values()]), strict=True)
    return {peer: parse_json(key, text, parse) for (peer, key), text in texts}


def fresh_group_name(store: dist.Store, rank: int, world_size: int, limit_s: float) -> str:
    """A text that all ranks of a group get, and no earlier group at the store has got.

    All ranks call it. A store may outlive its ranks (``torchrun --max-restarts``, a file), and the
    keys that they have left there look like those of the next ranks, wherever a rank was killed.
    So each rank asks with a word that it draws, and rank 0 answers to that word, by its own word:
    no rank reads an answer to an earlier group. Rank 0 goes on, as words of earlier groups are
    replaced, until each rank has written, under a key with rank 0's word, that it has the answer.

    Raises `CollectiveTimeoutError` if a rank does not come within ``limit_s`` seconds.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + limit_s
    missing = [0] if rank else [*range(1, world_size)]
    if rank:
        store.set(f"word/{rank}", own)
        if wait_for_keys(store, [f"answer/{own}"], deadline):
            word = read_text(store, f"answer/{own}")
            store.set(f"heard/{word}/{rank}", "")
            return word
    elif _heard_by(store, own, missing, deadline):
        return own
    text = f"rank {rank} waited {limit_s:g} s for {ranks_in_words(missing)} to make the group"
    raise CollectiveTimeoutError(text, peer=missing[0])


def _heard_by(store: dist.Store, own: str, missing: list[int], deadline: float) -> bool:
    """Answer to the ranks that are missing until all have heard it: see `fresh_group_name`."""
    answered_words = dict[int, str]()
    pause_s = _FIRST_PAUSE_S
    while True:
        for peer in missing:
            if store.check([f"word/{peer}"]):
                word = read_text(store, f"word/{peer}")
                if answered_words.get(peer) != word:
                    store.set(f"answer/{word}", own)
                    answered_words[peer] = word
        missing[:] = [peer for peer in missing if not store.check([f"heard/{own}/{peer}"])]
        if not missing or time.monotonic() > deadline:
            return not missing
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S)
