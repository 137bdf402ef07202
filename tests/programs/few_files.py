"""A rank that may open no further file, or one."""

from __future__ import annotations

import contextlib
import os
import resource

import torch.distributed as dist

from ringcoll.errors import TransportError
from ringcoll.runtime.rendezvous import own_connection, serve_store


def private_store(num_left: int) -> str:
    """What a rank is told that wants a connection of its own and may open so many files."""
    server = serve_store()
    store = dist.TCPStore(server.host, server.port, None, False)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    own = [os.dup(0) for _ in range(20)]  # so that no lower number is free
    told = ""
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(own) + 1, most[1]))
        with contextlib.suppress(OSError):
            while True:
                own.append(os.dup(0))
        for _ in range(num_left):
            os.close(own.pop())
        try:
            own_connection(store)
        except TransportError as error:
            told = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
        for descriptor in own:
            os.close(descriptor)
    assert own_connection(store) is not store
    return told
