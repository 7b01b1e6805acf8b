"""The state of a server's engines and requests, reconstructed from its event feed.

Used by the screen and `--once`. Independent of connections and terminals. Invariants: a snapshot replaces everything
but the steps of processes that are still the same; events about unknown instances or requests are accepted, because
events just after a snapshot may repeat its content; the number of stored steps is bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

WINDOW_S: Final = 5.0
"""Rates are computed over this period."""
_MAX_STEPS: Final = 20_000
MAX_ENDED: Final = 100
"""Number of finished requests that are still shown."""
Key = tuple[str, str, str]
"""Model, version, instance."""


@dataclass(slots=True)
class Request:
    number: int
    """Assigned by the server."""
    id: str = ""
    key_name: str = ""
    received: float = 0.0
    """Unix seconds."""
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    state: str = "waiting"
    """waiting, running, or how it ended."""
    reason: str = ""
    output_tokens: int = 0
    num_preemptions: int = 0
    ended: float = 0.0
    """Unix seconds; 0 = not ended."""


@dataclass(frozen=True, slots=True)
class StepSample:
    at_s: float
    """When its event arrived, by the local clock."""
    duration_ms: float
    output_tokens: int
    prompt_tokens: int


@dataclass(slots=True)
class Instance:
    state: str = ""
    reason: str = ""
    pid: int | None = None
    num_restarts: int = 0
    recovery_ms: float | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    loading: str = ""
    """Stage and progress of its load."""
    num_running: int = 0
    num_waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    requests: dict[int, Request] = field(default_factory=dict)
    steps: deque[StepSample] = field(default_factory=lambda: deque(maxlen=_MAX_STEPS))

    def recent(self, now_s: float) -> list[StepSample]:
        """The steps within the window."""
        while self.steps and self.steps[0].at_s < now_s - WINDOW_S:
            self.steps.popleft()
        return list(self.steps)


class FeedState:
    def __init__(self) -> None:
        self.server: Mapping[str, Any] = {}
        self.scope = ""
        self.time = 0.0
        """The server's time at the last event; unix seconds."""
        self.instances: dict[Key, Instance] = {}
        self.ended: deque[tuple[Key, Request]] = deque(maxlen=MAX_ENDED)
        """The latest finished requests, newest last."""
        self.num_dropped = 0
        """Events that the server omitted because they came too fast for this viewer."""
        self.since_s = 0.0
        """When the first snapshot arrived, by the local clock."""
        self._clock_s = 0.0
        """The server's clock minus the local one."""

    @property
    def has_snapshot(self) -> bool:
        return bool(self.server)

    def apply(self, name: str, data: Mapping[str, Any], now_s: float) -> None:
        """now_s: the time of a monotonic clock."""
        self.time = max(self.time, float(data.get("time") or 0.0))
        if name == "snapshot":
            self._snapshot(data, now_s)
        elif name == "requests":
            self._requests(data)
        elif name == "steps":
            instance = self._instance(data)
            for step in data.get("steps", ()):
                self._step(instance, step, now_s)
        elif name == "engine":
            self._engine(data)
        elif name == "load":
            self._load(data)
        elif name == "dropped":
            self.num_dropped += int(data.get("events", 0))

    def server_time(self, now_s: float) -> float:
        """The server's clock, unix seconds, according to its last snapshot."""
        return now_s + self._clock_s

    def window_s(self, now_s: float) -> float:
        return max(min(WINDOW_S, now_s - self.since_s), 1e-3)

    def _snapshot(self, data: Mapping[str, Any], now_s: float) -> None:
        self.since_s = self.since_s or now_s
        self._clock_s = float(data["time"]) - now_s
        self.server, self.scope = data["server"], data.get("scope", "")
        before, self.instances = self.instances, {}
        for row in data.get("instances", ()):
            key = _key(row)
            instance = self.instances[key] = Instance(
                state=row["state"],
                pid=row.get("pid"),
                num_restarts=row.get("num_restarts", 0),
                limits=row.get("limits") or {},
            )
            if (known := before.get(key)) is not None and known.pid == instance.pid:
                instance.steps = known.steps
                instance.reason = known.reason if known.state == instance.state else ""
            instance.requests = {each["request"]: _request(each) for each in row.get("requests", ())}
            self._count(instance)

    def _instance(self, data: Mapping[str, Any]) -> Instance:
        return self.instances.setdefault(_key(data), Instance(state="ready"))

    def _requests(self, data: Mapping[str, Any]) -> None:
        key, instance = _key(data), self._instance(data)
        for row in data.get("received", ()):
            for other in self.instances.values():
                other.requests.pop(row["request"], None)
            instance.requests[row["request"]] = _request(row)
        for row in data.get("ended", ()):
            request = instance.requests.pop(row["request"], None)
            if request is not None:
                request.state, request.ended = row.get("finish_reason") or "done", float(row.get("time", 0.0))
                request.output_tokens = row.get("output_tokens", request.output_tokens)
                request.num_preemptions = row.get("num_preemptions", 0)
                self.ended.append((key, request))
        self._count(instance)

    def _step(self, instance: Instance, step: Mapping[str, Any], now_s: float) -> None:
        prompt_tokens = output_tokens = 0
        for number, kind, num_tokens, _, num_output, *_ in step.get("rows", ()):
            prompt_tokens += num_tokens if kind != "decode" else 0
            output_tokens += num_output
            if (request := instance.requests.get(number)) is not None:
                request.state, request.reason = "running", ""
                request.output_tokens += num_output
        for number, reason in step.get("waiting", ()):
            if (request := instance.requests.get(number)) is not None:
                request.state, request.reason = "waiting", reason
        for number in step.get("preempted", ()):
            if (request := instance.requests.get(number)) is not None:
                request.num_preemptions += 1
        instance.num_running, instance.num_waiting = step["num_running"], step["num_waiting"]
        blocks = step.get("blocks") or {}
        instance.used_blocks, instance.cached_blocks = blocks.get("used", 0), blocks.get("cached", 0)
        instance.steps.append(StepSample(now_s, float(step["duration_ms"]), output_tokens, prompt_tokens))
        self.time = max(self.time, float(step.get("time", 0.0)))

    def _engine(self, data: Mapping[str, Any]) -> None:
        if data["state"] == "stopped":
            self.instances.pop(_key(data), None)
            return
        instance = self._instance(data)
        instance.state, instance.reason, instance.pid = data["state"], data.get("reason", ""), data.get("pid")
        instance.num_restarts = data.get("num_restarts", 0)
        instance.recovery_ms = data.get("recovery_ms")
        instance.loading = ""

    def _load(self, data: Mapping[str, Any]) -> None:
        text = str(data.get("stage", ""))
        if total := data.get("total"):
            text += f" {100 * int(data.get('done', 0)) // int(total)} %"
        self._instance(data).loading = text

    @staticmethod
    def _count(instance: Instance) -> None:
        """For idle engines and backends without steps, whose events contain no counts."""
        running = sum(request.state == "running" for request in instance.requests.values())
        instance.num_running, instance.num_waiting = running, len(instance.requests) - running
        if not instance.requests:
            instance.used_blocks = 0


def _key(data: Mapping[str, Any]) -> Key:
    return str(data.get("model", "")), str(data.get("version", "")), str(data.get("instance", ""))


def _request(row: Mapping[str, Any]) -> Request:
    return Request(
        number=row["request"],
        id=row.get("id", ""),
        key_name=row.get("key", ""),
        received=float(row.get("received", 0.0)),
        prompt_tokens=row.get("prompt_tokens"),
        max_tokens=row.get("max_tokens"),
        state=row.get("state", "waiting"),
        reason=row.get("reason", ""),
        output_tokens=row.get("output_tokens", 0),
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one instance. Rates are those of the window; limits are None for a backend without limits."""

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
    """Mean; None = no step."""
    used_blocks: int
    cached_blocks: int
    num_blocks: int | None


def figures(state: FeedState, now_s: float) -> list[Figures]:
    """The figures of all instances, sorted by name."""
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
