"""Run steps of messages in SimGrid; a script for the Python that has SimGrid's module.

    python3 -P simgrid_peer.py < REQUEST

REQUEST is JSON: ``alpha_s``, the seconds before the sends of a step; ``capacities`` and ``latencies`` of the links; ``routes``, lists of [source, target, links];
and ``programs``, for each rank a list of steps, each a list of sends, [peer, bytes], and a list
of peers from which messages come. Prints JSON: ``version``, and ``seconds`` at which the last
rank ends.

SimGrid's model is set to bare flows: no TCP window, no factors on bandwidth and latency, no cross traffic.
A message moves when it is posted: each rank is the receiver of its mailboxes from the beginning.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from simgrid import Actor, Comm, Engine, LinkInRoute, Mailbox, NetZone, simgrid_version, this_actor

CONFIGURATION = (
    "network/model:CM02",
    "network/TCP-gamma:0",
    "network/crosstraffic:0",
    "network/latency-factor:1",
    "network/bandwidth-factor:1",
)


def mailbox(source: int, target: int) -> Any:
    """The mailbox of the messages from one rank to another."""
    return Mailbox.by_name(f"{source} to {target}")


def rank_process(rank: int, steps: list[Any], alpha_s: float) -> None:
    """Do the steps of a rank."""
    for source in {source for _, sources in steps for source in sources}:
        mailbox(source, rank).set_receiver(Actor.self())
    for sends, sources in steps:
        received = [mailbox(source, rank).get_async() for source in sources]
        if sends and alpha_s:
            this_actor.sleep_for(alpha_s)
        sent = [mailbox(rank, peer).put_async(0, nbytes) for peer, nbytes in sends]
        Comm.wait_all([*(message for message, _ in received), *sent])


def main() -> None:
    """Read, run, print."""
    request = json.load(sys.stdin)
    engine = Engine(["simgrid_peer"])
    for words in CONFIGURATION:
        Engine.set_config(words)
    zone = NetZone.create_full_zone("network")
    hosts = [zone.create_host(f"rank {rank}", 1e9) for rank in range(len(request["programs"]))]
    links = [
        zone.create_link(f"link {number}", capacity).set_latency(latency).seal()
        for number, (capacity, latency) in enumerate(
            zip(request["capacities"], request["latencies"], strict=True)
        )
    ]
    for source, target, route in request["routes"]:
        ends = (hosts[source].netpoint, hosts[target].netpoint)
        zone.add_route(*ends, None, None, [LinkInRoute(links[index]) for index in route], False)
    zone.seal()
    for rank, steps in enumerate(request["programs"]):
        Actor.create(f"rank {rank}", hosts[rank], rank_process, rank, steps, request["alpha_s"])
    engine.run()
    print(json.dumps({"version": str(simgrid_version), "seconds": Engine.clock}))


if __name__ == "__main__":
    main()
