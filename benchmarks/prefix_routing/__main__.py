"""`python -m benchmarks.prefix_routing`: see docs/prefix_routing.md."""

from __future__ import annotations

import argparse
import dataclasses

from . import comparison
from .engines import EngineSettings
from .simulation import Simulation, SimulationSettings
from .trace import Trace, TraceSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulate", action="store_true", help="many engines and hosts, in virtual time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", type=int, help="default: 4, of --simulate 1000")
    parser.add_argument("--hosts", type=int, default=100, help="of --simulate")
    parser.add_argument("--conversations", type=int, help="default: 400, of --simulate 8000")
    parser.add_argument("--kv-blocks", type=int, nargs="+", default=[1024, 4096], help="of each engine, 16 tokens each")
    arguments = parser.parse_args()
    if arguments.simulate:
        _simulate(arguments)
    else:
        _compare(arguments)


def _compare(arguments: argparse.Namespace) -> None:
    engines = arguments.engines or 4
    trace = TraceSettings(
        seed=arguments.seed,
        num_conversations=arguments.conversations or 400,
        conversations_per_s=2.5 * engines / 4,
    )
    conversations = list(Trace(trace).conversations())
    for num_blocks in arguments.kv_blocks:
        settings = dataclasses.replace(EngineSettings(), num_kv_blocks=num_blocks)
        print(
            f"\n{len(conversations)} conversations, {sum(len(one.turns) for one in conversations)} turns, {engines} "
            f"engines, {num_blocks * settings.block_size} tokens of KV each\n"
        )
        print(comparison.table(comparison.compare(conversations, engines, settings)))


def _simulate(arguments: argparse.Namespace) -> None:
    defaults = SimulationSettings()
    engines = arguments.engines or defaults.num_engines
    trace = dataclasses.replace(
        defaults.trace,
        seed=arguments.seed,
        num_conversations=arguments.conversations or defaults.trace.num_conversations,
        conversations_per_s=defaults.trace.conversations_per_s * engines / defaults.num_engines,
    )
    simulation = Simulation(dataclasses.replace(defaults, num_engines=engines, num_hosts=arguments.hosts, trace=trace))
    simulation.run()
    print(simulation.summary())


if __name__ == "__main__":
    main()
