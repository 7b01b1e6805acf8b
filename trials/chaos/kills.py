"""`make kills`: kills engines under every kind of stream until a given number of kills is reached, possibly over many
nights.

Used by the command line. Independent of how a stream is judged. Invariants: each pass has its own server, requests and
kill times, derived from its number; results are written to the state file after every pass, so an interrupted run loses
at most one pass.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .agents.model import LORA_SEPARATOR, agents_model
from .agents.requests import make_agent_specs
from .chaos import DEMO_LENGTHS, MOCK_LENGTHS, Act, Round, hurt, hybrid, mixed_agent_specs
from .faults import KILL, KILL_WITH_FORK_SERVER
from .server import demo, mock
from .specs import make_specs, resumed
from .stage import Stage, open_stage
from .table import Row, print_row

PAUSE_S = (0.02, 0.3)
_MOCK: dict[str, Any] = {"mock_step_ms": 15, "block_size": 8, "num_kv_blocks": 900}


@dataclass
class Seen:
    """Of all passes so far. problems: the first of each pass that had some."""

    passes: int = 0
    kills: int = 0
    streams: int = 0
    lost: int = 0
    repeated: int = 0
    changed: int = 0
    kills_by_round: dict[str, int] = field(default_factory=dict)
    slowest_recovery_s: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def add(self, rows: Sequence[Row], seconds: float) -> None:
        self.passes += 1
        self.seconds += seconds
        for row in rows:
            self.kills += row.injected
            self.kills_by_round[row.fault] = self.kills_by_round.get(row.fault, 0) + row.injected
            for name in ("streams", "lost", "repeated", "changed"):
                setattr(self, name, getattr(self, name) + getattr(row, name))
            self.slowest_recovery_s = max([self.slowest_recovery_s, *row.recoveries_s])
            self.problems += [f"pass {self.passes}, {row.fault}: {problem}" for problem in row.problems[:1]]

    def __str__(self) -> str:
        tokens = self.lost + self.repeated + self.changed
        return f"kills: {self.kills} kills, {self.streams} streams, {tokens} lost, {len(self.problems)} problems"


def read(path: Path) -> Seen:
    return Seen(**json.loads(path.read_text())) if path.exists() else Seen()


def write(path: Path, seen: Seen) -> None:
    """Whole, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(seen), indent=1))
    part.rename(path)


async def run_kills(target: int, path: Path, minutes: float) -> int:
    """Until `target` kills, or for as long; the exit code."""
    seen, until_s = read(path), time.monotonic() + 60 * minutes
    while seen.kills < target and time.monotonic() < until_s:
        began_s = time.monotonic()
        rows = await play(act(seen.passes))
        seen.add(rows, time.monotonic() - began_s)
        write(path, seen)
        print(seen, flush=True)
    return 1 if seen.problems else 0


async def play(act: Act) -> list[Row]:
    """Engines of different models die at the same time; the rounds of one model follow one another."""
    by_model = [list(rounds) for _, rounds in itertools.groupby(act.rounds, key=lambda one: one.model)]
    async with open_stage(act.models, act.specs, act.arguments) as stage:
        return list(itertools.chain(*await asyncio.gather(*(_play(stage, rounds) for rounds in by_model))))


async def _play(stage: Stage, rounds: Sequence[Round]) -> list[Row]:
    rows = []
    for one in rounds:
        began_s = time.monotonic()
        rows.append(await one.run(stage))
        print_row(rows[-1], time.monotonic() - began_s)
    return rows


def act(number: int) -> Act:
    makers = (_plain, _agents, _resumed, _small, _recurrent)
    return makers[number % len(makers)](1000 * (number + 1))


def _plain(seed: int) -> Act:
    """One engine, and a pair; fewer blocks than the streams need."""
    rounds = [
        hurt("mock", KILL, 120, seed, pause_s=PAUSE_S),
        hurt("mock", KILL_WITH_FORK_SERVER, 12, seed + 1, pause_s=PAUSE_S),
        hurt("pair", KILL, 120, seed + 2, pause_s=PAUSE_S),
    ]
    specs = [*make_specs(seed, 48, "mock", MOCK_LENGTHS), *make_specs(seed + 1, 48, "pair", MOCK_LENGTHS)]
    return Act([mock("mock", **_MOCK), mock("pair", instances=2, **_MOCK)], specs, rounds)


def _agents(seed: int) -> Act:
    """Four APIs, tools, schemas, reasoning, adapters, drafts."""
    rounds = [hurt("agents", KILL, 100, seed, pause_s=PAUSE_S, concurrency=36)]
    model = agents_model("agents", num_kv_blocks=400)
    return Act([model], mixed_agent_specs(seed, "agents"), rounds, ("--lora-separator", LORA_SEPARATOR))


def _resumed(seed: int) -> Act:
    """Every connection breaks every few events, and its client comes back."""
    specs = resumed([*make_specs(seed, 96, "mock", MOCK_LENGTHS), *make_agent_specs(seed + 1, 28, "agents", ())])
    rounds = [
        hurt("mock", KILL, 120, seed, pause_s=PAUSE_S, beside=", connections cut"),
        hurt("agents", KILL, 60, seed + 1, pause_s=PAUSE_S, concurrency=36, beside=", connections cut"),
    ]
    return Act([mock("mock", **_MOCK), agents_model("agents")], specs, rounds)


def _small(seed: int) -> Act:
    """Real weights."""
    rounds = [hurt("demo", KILL, 120, seed, pause_s=PAUSE_S, concurrency=36)]
    return Act([demo("demo")], make_specs(seed, 40, "demo", DEMO_LENGTHS), rounds)


def _recurrent(seed: int) -> Act:
    """Slots of states for fewer sequences than there are streams, and drafts."""
    rounds = [hurt("hybrid", KILL, 100, seed, pause_s=PAUSE_S, concurrency=36)]
    return Act([hybrid("hybrid")], make_specs(seed, 48, "hybrid", DEMO_LENGTHS), rounds)
