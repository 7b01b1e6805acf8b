"""`llmbackend bench --profile`: tables of where the time of a prompt and of decode steps is spent.

Used by the `bench` command. Independent of how operations are timed or counted. Invariant: an engine without a native
program is refused, with what it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from llmbackend.adapter.gguf_models import with_directories
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.native_runner import NativeRunner, why_modules
from llmbackend.engine.cpu.step_profile import EngineProfile, RoleTime, profile_runner
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.offline import make_served_runner


def run_profile(json_path: Path | None = None, as_served: bool = False, **arguments: Any) -> EngineProfile:
    """Prints the tables; `json_path` gets their figures as JSON. `arguments`: those of EngineConfig. `as_served`: see
    `run_bench`. Raises ValueError if there is no native program, and whatever loading a model raises."""
    config = with_directories(msgspec.convert(arguments, EngineConfig))
    if reason := why_modules(config):
        raise _no_program(reason)
    runner = make_served_runner(config) if as_served else make_runner(config)
    try:
        if not isinstance(runner, NativeRunner):
            raise _no_program(runner.info.description)
        profile = profile_runner(runner, config.max_num_batched_tokens, config.max_num_seqs)
    finally:
        runner.close()
    print("\n".join(tables(profile)))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    return profile


def _no_program(reason: str) -> ValueError:
    return ValueError(f"--profile times the operations of a native program, and there is none here: {reason}")


def tables(profile: EngineProfile) -> Iterator[str]:
    """Lines."""
    unit = "GOP/s" if profile.weights.startswith("int") else "GFLOP/s"
    yield profile.description
    for step in profile.steps:
        yield f"\n{step.title}: {step.whole_s * 1e3:,.1f} ms, {step.num_tokens / step.whole_s:,.0f} tokens/s"
        yield _line("operation", "ms", "share", unit, "weights GB/s", "KV GB/s")
        for role in step.roles:
            yield _of_role(role, step.seconds)
        rate = step.operations / step.seconds
        yield _line("all operations", f"{step.seconds * 1e3:,.3f}", f"{1:.1%}", _billions(rate))
        yield f"{rate / profile.peak_rate:.1%} of the peak of {_billions(profile.peak_rate)} {unit}"


def _of_role(role: RoleTime, step_s: float) -> str:
    rates = (_billions(amount / role.seconds) for amount in (role.operations, role.weight_bytes, role.kv_bytes))
    return _line(role.role, f"{role.seconds * 1e3:,.3f}", f"{role.seconds / step_s:.1%}", *rates)


def _billions(rate: float) -> str:
    """The rate in billions; "" for 0."""
    value = rate / 1e9
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value else ""


def _line(name: str, *cells: str) -> str:
    widths = (10, 8, 10, 14, 9)
    return f"{name:<18}{''.join(f'{cell:>{width}}' for cell, width in zip(cells, widths, strict=False))}".rstrip()
