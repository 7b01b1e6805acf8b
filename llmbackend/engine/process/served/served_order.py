"""What the command `served_engine` reads and writes, one JSON object per line, and the record file it leaves.

Used by the command, and by whatever starts served engines or finds running ones. Invariants: every existing order is
valid; the record names the engine's latest process, and is void once its command has ended.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from llmbackend.fork_server.process_resources import started_ticks

from ...config import EngineConfig
from ...rank_order import RankMeeting
from ..engine_link import EngineOrder
from .locating import ENGINE_HEARTBEAT_TIMEOUT_S


class ServedEngineOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of standard input. Raises ValueError naming field, value and what was expected.

    config               of the engine, as its hosts know it; `transport` is "process"
    paths                folders in it -> folders with the same files on this machine, if they differ
    secrets_folder       see ClusterSecrets
    host                 the only address to listen at
    port                 0 = any; the same for all processes of this engine
    incarnation          of its first process, incremented for each later one; 0 = milliseconds of Unix time, which grow
                         from one command to the next
    node                 the machine, for people
    heartbeat_timeout_s  a host that is silent for longer is dropped
    outlives_parent      whether the engine continues when standard input ends
    orphan_timeout_s     then: how long it lives without any host
    meeting              where the other ranks of a split model connect if started elsewhere; None = they are forked
    runners              name of a module like engine/make_runner.py
    record_file          where the command keeps its EngineRecord while it runs; "" = nowhere
    """

    config: EngineConfig
    secrets_folder: str
    host: str = "127.0.0.1"
    port: int = 0
    incarnation: int = 0
    node: str = ""
    heartbeat_timeout_s: float = ENGINE_HEARTBEAT_TIMEOUT_S
    outlives_parent: bool = False
    orphan_timeout_s: float = 30.0
    meeting: RankMeeting | None = None
    paths: dict[str, str] = {}
    runners: str = "llmbackend.engine.make_runner"
    record_file: str = ""

    def __post_init__(self) -> None:
        for name in ("heartbeat_timeout_s", "orphan_timeout_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"'{name}' is {value:g}, expected a number above 0")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"'port' is {self.port}, expected 0 to 65535")
        if self.config.transport != "process":
            raise ValueError(f"'transport' is '{self.config.transport}', expected 'process' in a served engine")


def with_paths(config: EngineConfig, paths: Mapping[str, str]) -> EngineConfig:
    """paths: see ServedEngineOrder."""
    adapters = {name: paths.get(path, path) for name, path in config.lora_modules.items()}
    return msgspec.structs.replace(config, model=paths.get(config.model, config.model), lora_modules=adapters)


class ServedProcessOrder(EngineOrder, frozen=True, kw_only=True):
    """An EngineOrder, whose endpoint is the keeper's, that also says how to serve hosts.

    config               of the engine, as its hosts know it
    listen_endpoint      what the listening socket is bound to: tcp://host:port
    secrets_folder       see ClusterSecrets
    incarnation          of this process
    node                 the machine, for people
    heartbeat_timeout_s  a host that is silent for longer is dropped
    """

    config: EngineConfig
    listen_endpoint: str
    secrets_folder: str
    incarnation: int
    node: str
    heartbeat_timeout_s: float


class KeptState(msgspec.Struct, frozen=True):
    """Engine → keeper, about once a second, between two steps, and after the first step.

    num_hosts    attached hosts
    has_stepped  whether this process has finished a step
    """

    num_hosts: int
    has_stepped: bool = False


class ServedEngineNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of standard output: a process of the engine was started, or none can be.

    port         where it listens, until the command ends
    incarnation  of the process
    pid          of the process
    error        why the command ends
    """

    port: int = 0
    incarnation: int = 0
    pid: int = 0
    error: str = ""


class EngineRecord(msgspec.Struct, frozen=True):
    """pid    of the command that keeps the engine
    start  start time of that process, because pids are reused
    news   its latest"""

    pid: int
    start: int
    news: ServedEngineNews


def write_record(file: Path, news: ServedEngineNews) -> None:
    """Writes the record of this process. Raises OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    written = file.with_suffix(".new")
    written.write_bytes(msgspec.json.encode(EngineRecord(os.getpid(), started_ticks(os.getpid()), news)))
    written.replace(file)


def read_record(file: Path) -> EngineRecord | None:
    """The record of an engine that is still running; None = there is none."""
    try:
        record = msgspec.json.decode(file.read_bytes(), type=EngineRecord)
    except (OSError, msgspec.DecodeError):
        return None
    return record if started_ticks(record.pid) == record.start else None
