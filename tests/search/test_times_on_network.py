"""Times of schedules in many segments, which are not simulated to their end."""

import pytest

from ringcoll.lab.search import bounds
from ringcoll.lab.search.bounds import MIN_SPEEDUP, TimesOnNetwork
from ringcoll.lab.search.front import trees_of
from ringcoll.lab.simulation import dragonfly, simulate, topology_from_text, torus
from ringcoll.schedules import estimated_messages
from ringcoll.schedules.algorithms import schedule_of

HOSTS = "".join(f"{rank} -- h{rank % 3} 5 1\n" for rank in range(6))
NETWORKS = {
    "hosts": topology_from_text(f"{HOSTS}h0 -- net 0.125 20\nh1 -- net 0.125 20\nh2 -- net 0.025 20\n"),
    "torus": torus((3, 3), bandwidth=1e10, latency_s=1e-6).without(0, 1),
    "dragonfly": dragonfly(8, ranks_per_router=2, routers_per_group=2, global_links=1, bandwidth=1e10,
                           latency_s=1e-6, global_bandwidth=2e9, global_latency_s=3e-6),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_time_of_a_steady_pipeline_follows_from_short_runs(name, collective, monkeypatch):
    topology, nbytes = NETWORKS[name], 1 << 24
    monkeypatch.setattr(bounds, "_EXACT_MESSAGES", 0)
    for schedule in trees_of(collective, topology, 4):
        messages = estimated_messages(schedule, 1 << 18)
        times = TimesOnNetwork(topology)
        found = times.best(schedule, nbytes, messages)
        exact = simulate(schedule, nbytes, topology, segments=found.segments)
        assert found.seconds == pytest.approx(float(exact.seconds), rel=0.01)
        assert all(segments <= 16 for _, _, segments in times._runs)


def test_a_pipeline_that_is_longer_than_the_short_runs_is_simulated(monkeypatch):
    monkeypatch.setattr(bounds, "_EXACT_MESSAGES", 0)
    topology = topology_from_text("".join(f"{rank} -- {rank + 1} 1 9\n" for rank in range(19)))
    chain = schedule_of("broadcast", "chain", 20)  # 19 steps
    times = TimesOnNetwork(topology)
    found = times.best(chain, 1 << 20, 19)
    exact = simulate(chain, 1 << 20, topology, segments=found.segments)
    assert found.segments > 16
    assert found.seconds == float(exact.seconds)


def test_what_the_busiest_link_needs_is_not_cut_further():
    topology = NETWORKS["hosts"]
    times = TimesOnNetwork(topology)
    ring = schedule_of("all_gather", "ring", 6)
    whole = times.run(ring, 1 << 24)
    assert times.best(ring, 1 << 24, 30).segments == 1
    assert whole.seconds <= MIN_SPEEDUP * whole.busiest_s
    assert len(times._runs) == 1


def test_runs_are_made_once():
    times = TimesOnNetwork(NETWORKS["torus"])
    ring = schedule_of("all_gather", "ring", 9)
    assert times.run(ring, 1 << 20, 4) is times.run(ring, 1 << 20, 4)
    assert len(times._runs) == 1
