"""Figures of each instance: rates, means, shares of its limits, made of a feed's state.

For: the screen, and `--once --json`. Does not know: terminals. Invariant: rates are over the window, so that they fall
to 0 when nothing runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .feed_state import FeedState, Instance, Key


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one instance.

    output_tokens_per_s, prompt_tokens_per_s  in the window
    step_ms       mean duration of a step in the window; None = there was none
    max_num_seqs, num_blocks  limits; None = a backend without them
    """

    model: str
    version: str
    instance: str
    state: str
    reason: str
    loading: str
    pid: int | None
    num_restarts: int
    recovery_ms: float | None
    num_running: int
    num_waiting: int
    max_num_seqs: int | None
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    steps_per_s: float
    step_ms: float | None
    used_blocks: int
    cached_blocks: int
    num_blocks: int | None


def figures(state: FeedState, now_s: float) -> list[Figures]:
    """Of all instances, sorted by name."""
    return [_figures(key, instance, state, now_s) for key, instance in sorted(state.instances.items())]


def _figures(key: Key, instance: Instance, state: FeedState, now_s: float) -> Figures:
    steps, window_s = instance.recent(now_s), state.window_s(now_s)
    return Figures(
        *key,
        state=instance.state,
        reason=instance.reason,
        loading=instance.loading,
        pid=instance.pid,
        num_restarts=instance.num_restarts,
        recovery_ms=instance.recovery_ms,
        num_running=instance.num_running,
        num_waiting=instance.num_waiting,
        max_num_seqs=instance.limits.get("max_num_seqs"),
        output_tokens_per_s=sum(step.output_tokens for step in steps) / window_s,
        prompt_tokens_per_s=sum(step.prompt_tokens for step in steps) / window_s,
        steps_per_s=len(steps) / window_s,
        step_ms=sum(step.duration_ms for step in steps) / len(steps) if steps else None,
        used_blocks=instance.used_blocks,
        cached_blocks=instance.cached_blocks,
        num_blocks=instance.limits.get("num_blocks"),
    )


def as_object(state: FeedState, now_s: float) -> dict[str, Any]:
    """Everything, for one line of JSON."""
    instances = []
    for each in figures(state, now_s):
        requests = state.instances[each.model, each.version, each.instance].requests.values()
        instances.append({**asdict(each), "requests": [asdict(request) for request in requests]})
    return {
        "time": state.time,
        "server": dict(state.server),
        "scope": state.scope,
        "num_dropped": state.num_dropped,
        "instances": instances,
    }
