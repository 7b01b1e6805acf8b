"""Agents' conversations on several real engine cores, in virtual time: hits against one cache over all, and balance."""

from __future__ import annotations

import dataclasses

from benchmarks.prefix_routing import comparison
from benchmarks.prefix_routing.engines import EngineSettings
from benchmarks.prefix_routing.policies import LeastLoaded, Prefixes, RoundRobin
from benchmarks.prefix_routing.simulation import Simulation, SimulationSettings
from benchmarks.prefix_routing.trace import Trace, TraceSettings


def test_nearly_all_that_one_cache_over_all_engines_would_have_is_found() -> None:
    trace = TraceSettings(num_conversations=24, output_tokens=(2, 8), conversations_per_s=5.0)
    conversations = list(Trace(trace).conversations())
    settings = dataclasses.replace(EngineSettings(), num_kv_blocks=2048)
    one = comparison.run(conversations, RoundRobin, 1, settings.times(4))
    ours = comparison.run(conversations, Prefixes, 4, settings)
    other = comparison.run(conversations, LeastLoaded, 4, settings)
    assert ours.hit_rate >= 0.95 * one.hit_rate
    assert other.hit_rate < 0.9 * one.hit_rate
    assert ours.imbalance < 2.0


def test_hosts_that_share_many_engines_find_prefixes_and_leave_no_request() -> None:
    trace = TraceSettings(num_conversations=60, num_tenants=5, output_tokens=(50, 350), conversations_per_s=4.0)
    simulation = Simulation(SimulationSettings(num_engines=40, num_hosts=5, trace=trace))
    simulation.run()
    assert simulation.hit_tokens >= 0.9 * simulation.all_hit_tokens
    for engine in simulation.engines:
        assert simulation.index.num_blocks(engine.bit) == len(engine.cache)
    assert not any(host.index._computing for host in simulation.hosts)
