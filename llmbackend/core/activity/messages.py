"""The events of `/v2/engine/events`, which backends and the host report, and the initial state that precedes them.

All are frozen, and their fields are those of the JSON sent to clients (docs/engine_events.md). None contains text,
prompts or tokens.
"""

from __future__ import annotations

import json
from typing import Final, Literal, Protocol

import msgspec

EventKind = Literal["requests", "steps", "blocks", "engine", "load", "model", "log"]
EVENT_KINDS: Final[frozenset[EventKind]] = frozenset({"requests", "steps", "blocks", "engine", "load", "model", "log"})
MAX_ID_CHARACTERS: Final = 256
"""A longer id of a client's request is cut to this length in events."""
RowKind = Literal["prefill", "decode", "recompute"]
StepRow = tuple[int, RowKind, int, int, int]
"""The request's number, the kind, the tokens computed (with drafts), the drafts accepted, the request's tokens."""
BlockState = Literal["free", "cached", "used"]
BlockRun = tuple[int, int, BlockState, int | None, int]
"""The first block, the number of blocks, their state, a request that uses them (None = no shown request does), and the
number of requests that use them."""


class RequestActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A request in flight.

    request        its number, unique in the server's process
    id             the client's id for it, shortened; "" = none
    key            the name of its API key; "" = none
    received       Unix time
    prompt_tokens  the tokens of all its prompts; None = its backend counts no tokens
    max_tokens     None = its backend counts no tokens
    reason         why it waits; "" = it does not wait
    output_tokens  the tokens made so far
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
    """A finished request. Counts are None when its backend counts no tokens.

    time             Unix time
    finish_reason    "stop", "length", "abort", "error", "refused" (no engine took it); "" = unknown
    cached_tokens    prompt tokens found in the prefix cache
    num_preemptions  counted only while there were viewers
    """

    request: int
    time: float
    finish_reason: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    num_preemptions: int = 0


class RequestsReceived(msgspec.Struct, frozen=True):
    """New requests of the instance, including those moved from another instance."""

    received: tuple[RequestActivity, ...]


class RequestEnded(msgspec.Struct, frozen=True):
    ended: RequestEnd


class StepParts(msgspec.Struct, frozen=True):
    """The milliseconds before, during and after the computation."""

    schedule: float
    run: float
    commit: float


class BlockCounts(msgspec.Struct, frozen=True):
    used: int
    cached: int
    free: int


class StepActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One step of an engine.

    step         the number of the step; each engine counts from 1
    time         the Unix time at which it began
    rows         in the order of the batch; a request with several prompts or choices has several
    preempted    requests whose blocks were freed for it
    waiting      requests that the engine does not run yet, and why
    num_running  requests that the engine runs
    num_waiting  requests that wait in the engine or in the model's queue
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
    """Which requests own the KV blocks.

    time       Unix time
    runs       in block order
    truncated  whether there are more runs
    """

    time: float
    num_blocks: int
    runs: tuple[BlockRun, ...]
    truncated: bool = False


class EngineActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A change of an engine's state.

    time          the Unix time of the change
    state         "starting", "ready", "recovering", "failed", "asleep", "stopped"
    reason        why the last engine ended; "" = no engine has ended
    pid           the engine's process id; None = no process at present, or none of its own
    num_restarts  how often the engine has been replaced
    recovery_ms   with "ready" after an engine was lost: how long there was no engine
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
    stage  text for people
    total  0 = unknown
    """

    time: float
    stage: str
    done: int
    total: int


class ModelActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A change of a version's state: LOADING, READY, UNLOADING or UNAVAILABLE."""

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
    """The present state of an instance.

    state, pid, num_restarts  as in EngineActivity
    limits                    None = unknown, or there are no limits
    path                      the backend's name for the active implementation, such as "native"; "" = unknown
    path_reason               why a faster implementation is not used; "" = unknown, or there is none
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
    """Compact JSON with the fields in declaration order. Lone surrogates, which an id may contain, become '?'."""
    try:
        return _encode(message)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(message), ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


class InstanceActivity(Protocol):
    """Through which a backend reports an instance's activity. Thread-safe; never blocks."""

    @property
    def kinds(self) -> frozenset[EventKind]:
        """The watched kinds; usually none, and then nothing needs to be reported."""

    def report(self, activity: Activity) -> None:
        """Does nothing while no viewer watches this kind of event."""


class _NoActivity:
    kinds: frozenset[EventKind] = frozenset()

    def report(self, activity: Activity) -> None: ...


NO_ACTIVITY: Final[InstanceActivity] = _NoActivity()
"""Used by a host without viewers."""
