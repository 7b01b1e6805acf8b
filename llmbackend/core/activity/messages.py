"""What happens in a server while someone watches: the events of `/v2/engine/events`, and the state before them.

For: backends and the host, which report these events, and the frontends, which send them. Does not know: who watches,
how events are written. Invariants: all are frozen, and their fields are those of the JSON that clients see
(docs/engine_events.md); none holds a text, a prompt or a token.
"""

from __future__ import annotations

import json
from typing import Final, Literal, Protocol

import msgspec

EventKind = Literal["requests", "steps", "blocks", "engine", "load", "model", "log"]
EVENT_KINDS: Final[frozenset[EventKind]] = frozenset({"requests", "steps", "blocks", "engine", "load", "model", "log"})
MAX_ID_CHARACTERS: Final = 256
"""Of a client's request id in an event; clients may send ids of any length."""
RowKind = Literal["prefill", "decode", "recompute"]
StepRow = tuple[int, RowKind, int, int, int]
"""Request; kind; tokens computed, with drafts; drafts accepted; tokens that the request got."""
BlockState = Literal["free", "cached", "used"]
BlockRun = tuple[int, int, BlockState, int | None, int]
"""First block; number of blocks; state; a request that holds them, None = no one, or one that is not shown; how many
hold them."""


class RequestActivity(msgspec.Struct, frozen=True, kw_only=True):
    """A request in flight.

    request        its number, unique in the server's life
    id             that its client gave it, or the beginning of it; "" = none
    key            name of the API key that it came with; "" = none
    received       Unix time
    prompt_tokens  of all its prompts; None = its backend counts none
    max_tokens     that it may get; None = as above
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
    """A request that has ended. Counts are None where its backend counts no tokens.

    time             Unix time
    finish_reason    "stop", "length", "abort", "error"; "" = not known
    cached_tokens    of its prompts, that the prefix cache had
    num_preemptions  while someone watched
    """

    request: int
    time: float
    finish_reason: str
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    num_preemptions: int = 0


class RequestsReceived(msgspec.Struct, frozen=True):
    """Requests that the instance has from now on: new ones, and such that another instance had."""

    received: tuple[RequestActivity, ...]


class RequestEnded(msgspec.Struct, frozen=True):
    ended: RequestEnd


class StepParts(msgspec.Struct, frozen=True):
    """Milliseconds: before its computation, that itself, after its results were there."""

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
    preempted    requests whose blocks were taken back for it
    waiting      requests that the engine has and does not run yet, and why
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
    """Which block holds what.

    time       Unix time
    runs       in the order of the blocks
    truncated  there were more runs than are sent
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
    num_restarts  engines that have ended and were followed by another one
    recovery_ms   of a "ready" behind a lost engine: how long there was none
    """

    time: float
    state: str
    reason: str = ""
    pid: int | None = None
    num_restarts: int = 0
    recovery_ms: float | None = None


class LoadActivity(msgspec.Struct, frozen=True, kw_only=True):
    """How far a load has come.

    time   Unix time
    stage  what is being done, for people
    total  of how much; 0 = unknown
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
    """What an engine takes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int


class InstanceDescription(msgspec.Struct, frozen=True, kw_only=True):
    """An instance now.

    state, pid, num_restarts  as in EngineActivity
    limits                    None = not known, or it has no such limits
    path                      what computes, in one word of its backend, such as "native"; "" = not known
    """

    state: str
    pid: int | None = None
    num_restarts: int = 0
    limits: InstanceLimits | None = None
    path: str = ""
    requests: tuple[RequestActivity, ...] = ()


Activity = (
    RequestsReceived | RequestEnded | StepActivity | BlocksActivity | EngineActivity | LoadActivity | ModelActivity
)
"""What a backend or the host reports of a model."""
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
    """Compact, with the members in the order of the fields; lone surrogates, which an id may hold, become '?'."""
    try:
        return _encode(message)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(message), ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


class InstanceActivity(Protocol):
    """Where a backend tells those who watch the server what an instance does. Any thread; it never blocks."""

    @property
    def kinds(self) -> frozenset[EventKind]:
        """What is watched; empty = nothing, which is the rule: then make no reports."""

    def report(self, activity: Activity) -> None:
        """No effect while no viewer watches this kind of event."""


class _NoActivity:
    kinds: frozenset[EventKind] = frozenset()

    def report(self, activity: Activity) -> None:
        """Nobody watches."""


NO_ACTIVITY: Final[InstanceActivity] = _NoActivity()
"""Of a host that nobody can watch."""
