"""The messages between a host and a remote engine that local engines do not need, and a host's counters.

Used at both ends of a remote link. A host's first message is a Hello; all later ones are EngineInputs, in which
`shutdown` means that the host leaves. An engine's message has two parts, a head and a body: the head is empty for an
EngineStarted, WELCOME for a Welcome, and a packed Head for a StepResult. Invariants: every release can read a Hello and
its refusal; the counters of all hosts of an engine add up to what it did while hosts were attached: each host counts
its own tokens, and exactly one counts everything else.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

import llmbackend

from ...config import EngineConfig
from ...messages import EngineStats

PROTOCOL_VERSION: Final = 1
"""Incremented with each change of a message between hosts and engines."""
STARTED: Final = b""
WELCOME: Final = b"welcome"
_HEAD: Final = struct.Struct("<?IQQ")

_OF_ONE_MACHINE: Final = frozenset(
    {
        *("device", "engine_python", "num_threads", "weight_cache_dir", "weight_cache_size", "fault_directory"),
        *("step_timeout_s", "load_timeout_s", "max_engine_failures"),
    }
)
"""Engine arguments that may differ between an engine and its hosts: none affects tokens or limits."""


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Host → engine, once.

    protocol  PROTOCOL_VERSION
    release   of llmbackend
    host_id   for people and logs
    config    the host's EngineConfig, as JSON
    """

    protocol: int
    release: str
    host_id: str
    config: bytes = b""


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Engine → host, on accepting the host.

    incarnation       of the engine's process
    monotonic_ns      the engine's clock, which times request events
    boot_id           differs between machines, and so between clocks; "" = unknown
    knows_vocabulary  whether another host has sent the vocabulary, which is large
    """

    incarnation: int
    monotonic_ns: int
    boot_id: str
    knows_vocabulary: bool = False


class Head(NamedTuple):
    """What a StepResult means for its host.

    counts              whether this host counts the growth of the engine's own counters; exactly one host does
    num_requests_of_others
    prompt_tokens       of this host's requests, since it was attached
    generation_tokens   of this host's requests, since it was attached
    """

    counts: bool
    num_requests_of_others: int
    prompt_tokens: int
    generation_tokens: int

    def pack(self) -> bytes:
        return _HEAD.pack(*self)

    @classmethod
    def unpack(cls, data: bytes) -> Head:
        """Raises struct.error."""
        return cls(*_HEAD.unpack(data))


def hello(host_id: str, config: EngineConfig) -> Hello:
    return Hello(
        protocol=PROTOCOL_VERSION,
        release=llmbackend.__version__,
        host_id=host_id,
        config=msgspec.json.encode(config),
    )


def refusal(said: Hello, config: EngineConfig, node: str) -> str:
    """Why an engine with `config` refuses this host, naming the differences on both sides; "" = it does not."""
    where = f"the engine on {node}" if node else "the engine"
    if (said.protocol, said.release) != (PROTOCOL_VERSION, llmbackend.__version__):
        return (
            f"host '{said.host_id}' runs llmbackend {said.release} (protocol {said.protocol}), {where} llmbackend "
            f"{llmbackend.__version__} (protocol {PROTOCOL_VERSION}): all machines of a cluster must run the "
            "same release"
        )
    ours, theirs = msgspec.to_builtins(config), msgspec.json.decode(said.config)
    differing = [
        f"'{name}' is {_shown(theirs.get(name))} on host '{said.host_id}' and {_shown(value)} in {where}"
        for name, value in ours.items()
        if name not in _OF_ONE_MACHINE and theirs.get(name) != value
    ]
    return f"engine argument {'; '.join(differing)}: they must be equal" if differing else ""


def boot_id() -> str:
    """Of the running operating system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_COUNTED_BY_ONE: Final = (
    *("num_preemptions", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_invariant_breaches"),
    *("num_offloaded_blocks", "num_reloaded_blocks", "prefix_cache_queries", "prefix_cache_hits"),
)


class SharedCounters:
    def __init__(self) -> None:
        self._latest = EngineStats()
        self._head = Head(False, 0, 0, 0)
        self._sums = dict.fromkeys(_COUNTED_BY_ONE, 0)
        self._has_seen = False

    def add(self, head: Head, stats: EngineStats) -> None:
        """Called for each message. stats: the engine's."""
        if head.counts and self._has_seen:
            for name in _COUNTED_BY_ONE:
                self._sums[name] += getattr(stats, name) - getattr(self._latest, name)
        self._latest, self._head, self._has_seen = stats, head, True

    def stats(self, stats: EngineStats) -> EngineStats:
        """The engine's statistics with this host's counters."""
        head = self._head
        return msgspec.structs.replace(
            stats, prompt_tokens=head.prompt_tokens, generation_tokens=head.generation_tokens, **self._sums
        )
