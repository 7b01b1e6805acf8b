"""The rounds that make up `make chaos`, and their servers.

Used by the command line. Independent of how a round works. Invariant: seeds are fixed, and a round that was not run is
not in the table.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .agents.api_requests import make_api_specs
from .agents.model import LORA_SEPARATOR, adapters_of, agents_model
from .agents.requests import make_agent_specs
from .engine_rounds import (
    EngineRound,
    break_engine,
    cancel_while_restarting,
    give_up,
    kill_while_starting,
    poison,
    was_preempted,
)
from .faults import (
    ESCAPE,
    EXCEPTION,
    EXIT,
    HANG,
    KILL,
    KILL_WITH_FORK_SERVER,
    MALFORMED,
    NAN_LOGITS,
    OUT_OF_MEMORY,
    SEGFAULT,
    STOP,
    Fault,
)
from .host_deaths import host_deaths
from .host_rounds import disconnects, reload, sigterm
from .memory_limit import can_be_limited
from .server import ModelSetup, demo, mock
from .slow_readers import slow_readers
from .specs import Lengths, StreamSpec, make_specs, resumed
from .stage import Stage, open_stage
from .system_rounds import clock_jumps, failing_syncs, memory_runs_out, slow_syncs
from .table import Row, print_report, print_row

RoundFunction = Callable[[Stage], Awaitable[Row]]
MOCK_LENGTHS = Lengths(prompt_words=(1, 24), output_tokens=(40, 220))
DEMO_LENGTHS = Lengths(prompt_words=(1, 24), output_tokens=(30, 120))
MEMORY_MIB = 1536
QUICK_LENGTHS = Lengths(prompt_words=(1, 12), output_tokens=(15, 60))


@dataclass(frozen=True)
class Round:
    """model: that it breaks; "" = more than one."""

    name: str
    run: RoundFunction
    model: str = ""


@dataclass(frozen=True)
class Act:
    """Rounds that share a server."""

    models: Sequence[ModelSetup]
    specs: Sequence[StreamSpec]
    rounds: Sequence[Round]
    arguments: Sequence[str] = ()
    has_system_faults: bool = False
    memory_mib: int = 0


def hurt(model: str, fault: Fault, times: int, seed: int, **more: bool | int | str | tuple[float, float]) -> Round:
    round_ = EngineRound(model, fault, times, seed, **more)  # type: ignore[arg-type]
    return Round(f"{fault.name}{round_.beside} {model}", lambda stage: break_engine(stage, round_), model)


def acts() -> list[Act]:
    return [
        _mock_act(),
        _demo_act(),
        _agents_act(),
        _hybrid_act(),
        _experts_act(),
        _resumed_act(),
        _host_deaths_act(),
        _system_act(),
        *_memory_acts(),
        *(_sigterm_act(kill) for kill in (False, True)),
    ]


def _mock_act() -> Act:
    """`num_kv_blocks` is less than 40 long streams need: preemption is part of what goes on."""
    common: dict[str, Any] = {"mock_step_ms": 15, "step_timeout_s": 2.0, "block_size": 8}
    models = [
        mock("mock", num_kv_blocks=900, **common),
        mock("pair", instances=2, **common),
        mock("wide", max_model_len=16384),
    ]
    rounds = [
        hurt("mock", KILL, 40, seed=11),
        Round("SIGKILL twice mock", lambda stage: kill_while_starting(stage, "mock", seed=12)),
        hurt("mock", KILL_WITH_FORK_SERVER, 4, seed=27),
        hurt("mock", STOP, 3, seed=13),
        hurt("mock", HANG, 3, seed=14),
        hurt("mock", EXCEPTION, 5, seed=15),
        hurt("mock", ESCAPE, 4, seed=16),
        hurt("mock", SEGFAULT, 4, seed=17),
        hurt("mock", EXIT, 4, seed=18),
        hurt("mock", OUT_OF_MEMORY, 5, seed=19),
        hurt("mock", NAN_LOGITS, 5, seed=20, fails=True),
        hurt("mock", MALFORMED, 4, seed=21),
        Round("poison mock", lambda stage: poison(stage, "mock", seed=22)),
        hurt("pair", KILL, 6, seed=23),
        Round("cancel while restarting mock", lambda stage: cancel_while_restarting(stage, "mock", seed=24)),
        Round("disconnects mock", lambda stage: disconnects(stage, "mock", seed=25)),
        Round("slow readers mock", lambda stage: slow_readers(stage, "mock", "wide")),
        Round("reload mock", lambda stage: reload(stage, "mock", seed=26)),
    ]
    specs = [*make_specs(1, 48, "mock", MOCK_LENGTHS), *make_specs(2, 48, "pair", MOCK_LENGTHS)]
    return Act(models, specs, rounds)


def _demo_act() -> Act:
    models = [demo("demo", step_timeout_s=10.0), demo("fragile", max_engine_failures=2)]
    specs = [*make_specs(2, 40, "demo", DEMO_LENGTHS), *make_specs(3, 8, "fragile", DEMO_LENGTHS)]
    rounds = [
        hurt("demo", KILL, 8, seed=31, concurrency=36),
        hurt("demo", KILL_WITH_FORK_SERVER, 1, seed=35, concurrency=36),
        hurt("demo", EXCEPTION, 2, seed=32, concurrency=36),
        hurt("demo", SEGFAULT, 1, seed=33, concurrency=36),
        hurt("demo", NAN_LOGITS, 2, seed=34, concurrency=36, fails=True),
        Round("give up fragile", lambda stage: give_up(stage, "fragile", "demo", "1/model.safetensors")),
    ]
    return Act(models, specs, rounds)


def _agents_act() -> Act:
    """Few blocks: preemption is part of what goes on."""
    models = [agents_model("agents", step_timeout_s=10.0, num_kv_blocks=400)]
    rounds = [
        hurt("agents", KILL, 10, seed=51, concurrency=36),
        hurt("agents", EXCEPTION, 3, seed=52, concurrency=36),
        hurt("agents", HANG, 1, seed=53, concurrency=36),
        hurt("agents", OUT_OF_MEMORY, 2, seed=54, concurrency=36),
        Round("cancel while restarting agents", lambda stage: cancel_while_restarting(stage, "agents", seed=55)),
        Round("disconnects agents", lambda stage: disconnects(stage, "agents", seed=56)),
    ]
    return Act(models, mixed_agent_specs(5, "agents"), rounds, ("--lora-separator", LORA_SEPARATOR))


def mixed_agent_specs(seed: int, model: str) -> list[StreamSpec]:
    """Chats with adapters and requests of the other APIs in turns."""
    chats = make_agent_specs(seed, 56, model, adapters_of(model))
    others = make_api_specs(seed + 1, 63, model)
    return [spec for both in itertools.zip_longest(chats, others) for spec in both if spec is not None]


def hybrid(name: str) -> ModelSetup:
    """Delta nets and attention. A slot of states for fewer sequences than there are streams, few blocks, and drafts:
    sequences wait, are preempted, and go back to a state before guesses."""
    from tests.helpers.recurrent_models import make_recurrent  # imports torch

    drafts = {"num_speculative_tokens": 4}
    sizes = {"max_num_seqs": 24, "num_kv_blocks": 72, "max_num_batched_tokens": 64}
    return demo(name, make_recurrent, step_timeout_s=10.0, speculative_config=drafts, **sizes)


def _hybrid_act() -> Act:
    rounds = [
        hurt("hybrid", KILL, 12, seed=81, concurrency=36),
        hurt("hybrid", KILL_WITH_FORK_SERVER, 1, seed=82, concurrency=36),
        hurt("hybrid", EXCEPTION, 3, seed=83, concurrency=36),
        hurt("hybrid", HANG, 1, seed=84, concurrency=36),
        hurt("hybrid", OUT_OF_MEMORY, 2, seed=85, concurrency=36),
        Round("cancel while restarting hybrid", lambda stage: cancel_while_restarting(stage, "hybrid", seed=86)),
        Round("disconnects hybrid", lambda stage: disconnects(stage, "hybrid", seed=87)),
        Round("preempted hybrid", lambda stage: was_preempted(stage, "hybrid")),
    ]
    return Act([hybrid("hybrid")], make_specs(10, 48, "hybrid", DEMO_LENGTHS), rounds)


def _experts_act() -> Act:
    """Experts and adapters in flight; few blocks, drafts."""
    from tests.helpers.recurrent_models import make_experts  # imports torch

    models = [agents_model("experts", make_experts, step_timeout_s=10.0, num_kv_blocks=400)]
    rounds = [
        hurt("experts", KILL, 10, seed=91, concurrency=36),
        hurt("experts", KILL_WITH_FORK_SERVER, 1, seed=92, concurrency=36),
        hurt("experts", EXCEPTION, 2, seed=93, concurrency=36),
        hurt("experts", HANG, 1, seed=94, concurrency=36),
        Round("disconnects experts", lambda stage: disconnects(stage, "experts", seed=95)),
    ]
    return Act(models, mixed_agent_specs(12, "experts"), rounds, ("--lora-separator", LORA_SEPARATOR))


def _resumed_act() -> Act:
    """Every connection breaks every few events, and its client comes back."""
    models = [mock("mock", mock_step_ms=15, block_size=8, num_kv_blocks=900), agents_model("agents")]
    rounds = [
        hurt("mock", KILL, 6, seed=61, beside=", connections cut"),
        hurt("agents", KILL, 3, seed=62, concurrency=36, beside=", connections cut"),
    ]
    specs = resumed([*make_specs(7, 96, "mock", MOCK_LENGTHS), *make_agent_specs(8, 28, "agents", ())])
    return Act(models, specs, rounds)


def _host_deaths_act() -> Act:
    rounds = [Round("SIGKILL host agents", lambda stage: host_deaths(stage, "agents", seed=71))]
    specs = [spec for spec in make_api_specs(9, 63, "agents") if spec.protocol == "background"]
    return Act([agents_model("agents")], specs, rounds)


def _system_act() -> Act:
    """With a response store on disk."""
    rounds = [
        Round("clock jumps agents", lambda stage: clock_jumps(stage, "agents", seed=81)),
        Round("fsync fails agents", lambda stage: failing_syncs(stage, "agents", seed=82)),
        Round("slow disk agents", lambda stage: slow_syncs(stage, "agents", seed=83)),
    ]
    chats, others = make_agent_specs(10, 28, "agents", ()), make_api_specs(11, 42, "agents")
    specs = [*chats, *others, *resumed(chats)]
    store = ("--response-store", "sqlite:{directory}/responses.sqlite")
    return Act([agents_model("agents")], specs, rounds, store, has_system_faults=True)


def _memory_acts() -> list[Act]:
    if not can_be_limited():
        print("-- no control group can be made: no rounds in which memory runs out", flush=True)
        return []
    rounds = [
        Round("memory runs out mock", lambda stage: memory_runs_out(stage, "mock", seed=91)),
        Round("memory runs out agents", lambda stage: memory_runs_out(stage, "agents", seed=92)),
    ]
    models = [mock("mock", mock_step_ms=15, block_size=8, num_kv_blocks=900), agents_model("agents")]
    specs = [*make_specs(12, 48, "mock", MOCK_LENGTHS), *make_agent_specs(13, 28, "agents", ())]
    return [Act(models, specs, rounds, memory_mib=MEMORY_MIB)]


def _sigterm_act(kill: bool) -> Act:
    models = [mock("mock", mock_step_ms=15)]
    round_ = Round(f"SIGTERM{' kill' * kill} mock", lambda stage: sigterm(stage, "mock", seed=41, kill=kill))
    return Act(models, make_specs(4, 40, "mock", MOCK_LENGTHS), [round_])


def _quick_act() -> Act:
    rounds = [
        hurt("mock", KILL, 6, seed=11, pause_s=(0.05, 0.3)),
        hurt("mock", HANG, 1, seed=14),
        hurt("mock", EXCEPTION, 1, seed=15),
        Round("poison mock", lambda stage: poison(stage, "mock", seed=22, times=1)),
    ]
    models = [mock("mock", mock_step_ms=8, step_timeout_s=1.5, block_size=8, num_kv_blocks=500)]
    specs = [*make_specs(1, 40, "mock", QUICK_LENGTHS), *resumed(make_specs(2, 24, "mock", QUICK_LENGTHS))]
    return Act(models, specs, rounds)


async def run_chaos(*, quick: bool, only: str = "") -> int:
    """Prints each round, the table and the last line; the exit code."""
    rows: list[Row] = []
    for act in [_quick_act()] if quick else acts():
        rounds = [one for one in act.rounds if only.lower() in one.name.lower()]
        if rounds:
            await play(act, rounds, rows)
    return print_report(rows)


async def play(act: Act, rounds: Sequence[Round], rows: list[Row]) -> None:
    began_s = time.monotonic()
    async with open_stage(act.models, act.specs, act.arguments, act.has_system_faults, act.memory_mib) as stage:
        print(f"-- {len(act.specs)} requests run undisturbed in {time.monotonic() - began_s:.0f} s", flush=True)
        for one in rounds:
            began_s = time.monotonic()
            row = await one.run(stage)
            rows.append(row)
            print_row(row, time.monotonic() - began_s)
