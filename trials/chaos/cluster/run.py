"""The rounds that make up `make cluster`, and their clusters.

Used by the command line. Independent of how a round works. Invariant: seeds are fixed unless specified, and a round
that was not run is not in the table.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from llmbackend.engine.process.served.locating import ENGINE_HEARTBEAT_TIMEOUT_S
from tests.helpers.server_process import ROOT

from ..agents.api_requests import make_api_specs
from ..agents.model import agents_model, thinking_template
from ..agents.requests import make_agent_specs
from ..server import ModelSetup, mock
from ..specs import Lengths, StreamSpec, make_specs, resumed
from .frontends_cluster import frontends_cluster
from .hosts_cluster import hosts_cluster
from .kills import Kind
from .rounds import KillRound
from .stage import Cluster, open_stage
from .table import ClusterRow, print_report, print_row

LONGEST_TOKENS = 150
"""Of an answer: one that thinks for 1,000 tokens would hold up the end of each round."""
KILLED_LIMIT_S = 1.0
"""Of the pause of 99 % of kills, on the mock model, on a machine that does nothing else."""


RAY_KINDS = (Kind.NODE, Kind.ACTOR, Kind.ENGINE, Kind.HOST, Kind.FRONTEND)
ALL_KINDS = (Kind.ENGINE, Kind.HOST, Kind.FRONTEND, Kind.CUT)


@dataclass(frozen=True)
class Act:
    """Rounds that share a cluster."""

    cluster: Callable[[], contextlib.AbstractAsyncContextManager[Cluster]]
    specs: Sequence[StreamSpec]
    rounds: Sequence[KillRound]


@dataclass(frozen=True)
class Choice:
    """only: rounds whose name contains this. kills: how many in all; 0 = as many as the rounds say. demo: the bundled
    model in place of the mock one. quick: a few kills on one machine, and no promise of pauses."""

    only: str = ""
    kills: int = 0
    seed: int = 1
    demo: bool = False
    quick: bool = False

    @property
    def model(self) -> ModelSetup:
        return self.with_engines(2)

    def with_engines(self, engines: int) -> ModelSetup:
        if self.demo:
            return replace(agents_model("agents", step_timeout_s=10.0, num_kv_blocks=400), instances=engines)
        return mock(
            "mock",
            instances=engines,
            mock_step_ms=20,
            block_size=8,
            num_kv_blocks=4000,
            max_model_len=4096,
            chat_template=thinking_template(ROOT / "model_repository" / "demo" / "1"),
            tool_call_parser="hermes",
            reasoning_parser="qwen3",
        )

    @property
    def specs(self) -> list[StreamSpec]:
        """Of every protocol, with schemas, tools, reasoning and seeds."""
        name, lengths = self.model.name, Lengths(prompt_words=(1, 24), output_tokens=(30, 110))
        plain = make_specs(self.seed, 40, name, lengths)
        agents = make_agent_specs(self.seed + 1, 35, name, ())
        specs = [*plain, *agents, *make_api_specs(self.seed + 2, 42, name), *resumed([*plain, *agents])]
        in_turns = [spec for place in range(7) for spec in specs[place::7]]
        return [spec for spec in in_turns if _max_tokens(spec) <= LONGEST_TOKENS]


def _max_tokens(spec: StreamSpec) -> int:
    return int(spec.sampling.get("max_tokens") or spec.sampling.get("max_output_tokens", 0))


def acts(choice: Choice) -> list[Act]:
    limit_s = None if choice.demo else KILLED_LIMIT_S
    cut_limit_s = None if choice.demo else ENGINE_HEARTBEAT_TIMEOUT_S + KILLED_LIMIT_S
    one_machine = [
        KillRound("one machine: frontends", [Kind.FRONTEND], 40, choice.seed + 10, limit_s),
        KillRound("one machine: engines", [Kind.ENGINE], 60, choice.seed + 11, limit_s),
        KillRound("one machine: all at once", [Kind.FRONTEND, Kind.ENGINE], 20, choice.seed + 12, one_at_a_time=False),
    ]
    hosts = [
        KillRound("three hosts: engines", [Kind.ENGINE], 200, choice.seed + 20, limit_s),
        KillRound("three hosts: cuts", [Kind.CUT], 40, choice.seed + 21, cut_limit_s),
        KillRound("three hosts: hosts cut off", [Kind.PARTITION], 10, choice.seed + 25),
        KillRound("three hosts: hosts", [Kind.HOST], 40, choice.seed + 22, limit_s),
        KillRound("three hosts: frontends", [Kind.FRONTEND], 40, choice.seed + 23, limit_s),
        KillRound("three hosts: all at once", ALL_KINDS, 60, choice.seed + 24, one_at_a_time=False),
    ]
    return [
        Act(lambda: frontends_cluster([choice.model]), choice.specs, one_machine),
        Act(
            lambda: hosts_cluster([choice.with_engines(4)]),
            choice.specs,
            hosts,
        ),
        *_on_ray(choice),
    ]


def _on_ray(choice: Choice) -> list[Act]:
    """No pause is promised: on a computer for two machines, a Ray node that starts takes what streams need."""
    if find_spec("ray") is None:
        print("-- Ray is not installed: no rounds on its nodes", flush=True)
        return []
    rounds = [
        KillRound("Ray nodes: all but the head", RAY_KINDS, 20, choice.seed + 30),
        KillRound("Ray nodes: the head", [Kind.HEAD], 2, choice.seed + 31),
    ]
    return [Act(lambda: _ray_cluster(choice.model), choice.specs, rounds)]


def _ray_cluster(model: ModelSetup) -> contextlib.AbstractAsyncContextManager[Cluster]:
    from .ray_cluster import ray_cluster

    return ray_cluster(model)


def _quick_act(choice: Choice) -> Act:
    rounds = [
        KillRound(
            "one machine",
            [Kind.FRONTEND, Kind.ENGINE, Kind.ENGINE],
            4,
            choice.seed,
            concurrency=16,
            one_at_a_time=False,
        )
    ]
    return Act(lambda: frontends_cluster([choice.model]), choice.specs[::4], rounds)


async def run_cluster(choice: Choice) -> int:
    """Prints each round, the table and the last line; the exit code."""
    chosen = [
        (act, rounds)
        for act in ([_quick_act(choice)] if choice.quick else acts(choice))
        if (rounds := [one for one in act.rounds if choice.only.lower() in one.name.lower()])
    ]
    of_all = sum(one.times for _, rounds in chosen for one in rounds)
    print(f"-- load average of the last minute: {os.getloadavg()[0]:.1f}, on {os.cpu_count()} processors", flush=True)
    rows: list[ClusterRow] = []
    for act, rounds in chosen:
        await _play(act, [_scaled(one, choice.kills, of_all) for one in rounds], rows)
    return print_report(rows)


def _scaled(round_: KillRound, kills: int, of_all: int) -> KillRound:
    return replace(round_, times=max(round(round_.times * kills / of_all), 1)) if kills else round_


async def _play(act: Act, rounds: Sequence[KillRound], rows: list[ClusterRow]) -> None:
    began_s = time.monotonic()
    async with open_stage(act.cluster(), act.specs) as stage:
        print(f"-- {len(act.specs)} requests run undisturbed in {time.monotonic() - began_s:.0f} s", flush=True)
        for one in rounds:
            began_s = time.monotonic()
            row = await one.run(stage)
            rows.append(row)
            print_row(row, time.monotonic() - began_s)
