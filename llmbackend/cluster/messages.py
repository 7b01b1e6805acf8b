"""Frozen messages between a host and its machine's agent, and between agents and engines' actors.

Invariant: a key alone identifies an engine; hosts that load equal configurations compute equal keys.
"""

from __future__ import annotations

import hashlib

import msgspec

from llmbackend.engine.config import EngineConfig

from .model_manifest import ModelManifest


def engine_key(index: int, config: EngineConfig) -> str:
    """The engine's name in the cluster; models with equal configurations share engines."""
    digest = hashlib.sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()
    return f"engine-{digest[:24]}-{index}"


class WantedEngine(msgspec.Struct, frozen=True):
    index: int
    config: EngineConfig

    @property
    def key(self) -> str:
        return engine_key(self.index, self.config)


class Wants(msgspec.Struct, frozen=True, tag=True):
    """Host → agent: all engines that the host needs, sent whenever this changes."""

    engines: tuple[WantedEngine, ...]


class HostServing(msgspec.Struct, frozen=True, tag=True):
    """Host → agent: where frontends of other machines reach it."""

    endpoint: str


class EngineLocation(msgspec.Struct, frozen=True, tag=True):
    """Agent → host, actor → agent: where an engine is.

    version      increases with each change
    endpoint     tcp://host:port; "" = not up
    incarnation  identifies its process
    node         the name of its machine, for display
    error        why it is not up, for display; "" = it is starting
    is_final     whether waiting is useless, so that a first load should fail
    """

    key: str
    version: int = 0
    endpoint: str = ""
    incarnation: int = 0
    node: str = ""
    error: str = ""
    is_final: bool = False


class HostAddress(msgspec.Struct, frozen=True):
    """A host of the cluster. endpoint: where frontends on other machines reach it; "" = nowhere."""

    id: str
    endpoint: str


class Peers(msgspec.Struct, frozen=True, tag=True):
    """Agent → host: the other hosts of the cluster."""

    peers: tuple[HostAddress, ...]


FromHost = Wants | HostServing
FromAgent = EngineLocation | Peers


class EngineSpec(msgspec.Struct, frozen=True):
    """What an engine's actor runs. models: the folders that `config` names, on the machine that asked first."""

    key: str
    config: EngineConfig
    models: tuple[ModelManifest, ...] = ()


class Versions(msgspec.Struct, frozen=True):
    """Must be equal on all machines of a cluster."""

    llmbackend: str
    python: str
    ray: str

    def __str__(self) -> str:
        return f"llmbackend {self.llmbackend}, Python {self.python}, Ray {self.ray}"


class AgentOrder(msgspec.Struct, frozen=True):
    """The agent's standard input.

    socket     path of the Unix socket where it listens for its host
    address    host:port of the cluster's head
    bind       this machine's address
    host       the host on this machine
    versions   the versions on this machine
    key_name   identifies the CURVE key without revealing it
    """

    socket: str
    address: str
    bind: str
    host: HostAddress
    versions: Versions
    key_name: str


class AgentNews(msgspec.Struct, frozen=True):
    """The agent's report of its start. error: why this machine cannot join the cluster; "" = it has joined."""

    error: str = ""
