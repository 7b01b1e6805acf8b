"""The events of `/v2/engine/events`, which backends and the host report, and the state before them.

All are frozen; their fields are those of the JSON for clients (docs/engine_events.md). None has a text, prompt or
token.
"""

from __future__ import annotations

import json
from typing import Final, Literal, Protocol

import msgspec

EventKind = Literal["requests", "steps", "blocks", "engine", "load", "model", "log"]
EVENT_KINDS: Final[frozenset[EventKind]] = frozenset({"requests", "steps", "blocks", "engine", "load", "model", "log"})
MAX_ID_CHARACTERS: Final = 256
"""Longest part of a client's request id in an event."""
RowKind = Literal["prefill", "decode", "recompute"]
StepRow = tuple[int, RowKind, int, int, int]
"""Request; kind; tokens computed, with drafts; drafts accepted; tokens of the request."""
BlockState = Literal["free", "cached", "used"]
BlockRun = tuple[int, int, BlockState, int | None, int]
"""First block; number of blocks; state; a request that uses them, None = none, or one that is not shown; how many use
them."""


class RequestActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A request in flight.

    request        its number, unique in the server's process
    id             its client's id, shortened; "" = none
    key            name of its API key; "" = none
    received       Unix time
    prompt_tokens  of all its prompts; None = its backend counts none
    max_tokens     None = as above
    reason         why it waits; "" = it does not
    output_tokens  so far
    """

    request: int
    id: str = ""
    key: str = ""
    received: float
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    state: Literal["waiting", "running"] = "running"
    reason: str = ""
    output_tokens: int = 0


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A request that has ended. Counts are None when its backend counts no tokens.

    time             Unix time
    finish_reason    "stop", "length", "abort", "error"; "" = unknown
    cached_tokens    of its prompts, from the prefix cache
    num_preemptions  while there were viewers
    """

    request: int
    time: float
    finish_reason: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    num_preemptions: int = 0


class RequestsReceived(msgspec.Struct, frozen=True):
    """Requests that the instance got: new ones, and others from another instance."""

    received: tuple[RequestActivity, ...]


class RequestEnded(msgspec.Struct, frozen=True):
    ended: RequestEnd


class StepParts(msgspec.Struct, frozen=True):
    """Milliseconds: before the computation, of it, and after it."""

    schedule: float
    run: float
    commit: float


class BlockCounts(msgspec.Struct, frozen=True):
    used: int
    cached: int
    free: int


class StepActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an engine.

    step         counts from 1 in each engine
    time         when it began, Unix time
    rows         in the order of the batch; a request with several prompts or choices has several
    preempted    requests whose blocks were freed for it
    waiting      requests that the engine does not run yet, and why
    num_running  in the engine
    num_waiting  in the engine and in the model's queue
    """

    step: int
    time: float
    duration_ms: float
    parts_ms: StepParts
    rows: tuple[StepRow, ...]
    preempted: tuple[int, ...]
    waiting: tuple[tuple[int, str], ...]
    num_running: int
    num_waiting: int
    blocks: BlockCounts


class BlocksActivity(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of blocks.

    time       Unix time
    runs       in the order of the blocks
    truncated  whether there are more runs
    """

    time: float
    num_blocks: int
    runs: tuple[BlockRun, ...]
    truncated: bool = False


class EngineActivity(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's state has changed.

    time          of the change, Unix time
    state         "starting", "ready", "recovering", "failed", "asleep", "stopped"
    reason        why the last engine ended; "" = none has
    pid           of its process; None = it has none now, or none of its own
    num_restarts  engines that were replaced
    recovery_ms   of a "ready" after a lost engine: how long there was none
    """

    time: float
    state: str
    reason: str = ""
    pid: int | None = None
    num_restarts: int = 0
    recovery_ms: float | None = None


class LoadActivity(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a load.

    time   Unix time
    stage  for people
    total  0 = unknown
    """

    time: float
    stage: str
    done: int
    total: int


class ModelActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A version's state has changed: LOADING, READY, UNLOADING or UNAVAILABLE."""

    time: float
    state: str
    reason: str = ""


class LogActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A record of the server's log. time: Unix time. level: INFO, …"""

    time: float
    level: str
    text: str


class InstanceLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int


class InstanceDescription(msgspec.Struct, frozen=True, kw_only=True):
    """An instance now.

    state, pid, num_restarts  as in EngineActivity
    limits                    None = unknown, or it has none
    path                      its backend's word for what computes, such as "native"; "" = unknown
    path_reason               why nothing faster computes; "" = unknown, or there is nothing faster
    """

    state: str
    pid: int | None = None
    num_restarts: int = 0
    limits: InstanceLimits | None = None
    path: str = ""
    path_reason: str = ""
    requests: tuple[RequestActivity, ...] = ()


Activity = (
    RequestsReceived | RequestEnded | StepActivity | BlocksActivity | EngineActivity | LoadActivity | ModelActivity
)
_encode: Final = msgspec.json.Encoder().encode
KIND_OF: Final[dict[type[Activity | LogActivity], EventKind]] = {
    RequestsReceived: "requests",
    RequestEnded: "requests",
    StepActivity: "steps",
    BlocksActivity: "blocks",
    EngineActivity: "engine",
    LoadActivity: "load",
    ModelActivity: "model",
    LogActivity: "log",
}


def to_json(message: msgspec.Struct) -> bytes:
    """Compact, in the order of the fields; lone surrogates, which an id may have, become '?'."""
    try:
        return _encode(message)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(message), ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


class InstanceActivity(Protocol):
    """Where a backend reports the activity of an instance. Thread-safe; never blocks."""

    @property
    def kinds(self) -> frozenset[EventKind]:
        """The watched kinds; usually none: then make no reports."""

    def report(self, activity: Activity) -> None:
        """No effect while no viewer watches this kind of event."""


class _NoActivity:
    kinds: frozenset[EventKind] = frozenset()

    def report(self, activity: Activity) -> None: ...


NO_ACTIVITY: Final[InstanceActivity] = _NoActivity()
"""Used by a host without viewers."""
