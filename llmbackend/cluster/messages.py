"""What a host and its machine's agent tell each other, and what the agent and engines' actors do: frozen messages.

For: the locator, the agent, engine actors. Does not know: sockets, Ray. Invariant: an engine is known by its key alone,
which is the same on all hosts that load the same configuration.
"""

from __future__ import annotations

import hashlib
from typing import Final

import msgspec

from llmbackend.engine.config import EngineConfig

from .model_manifest import ModelManifest

KEY_BYTES: Final = 12


def engine_key(index: int, config: EngineConfig) -> str:
    """The engine's name in the cluster: equal configurations are served by the same engines."""
    digest = hashlib.sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()
    return f"engine-{digest[: 2 * KEY_BYTES]}-{index}"


class WantedEngine(msgspec.Struct, frozen=True):
    index: int
    config: EngineConfig

    @property
    def key(self) -> str:
        return engine_key(self.index, self.config)


class Wants(msgspec.Struct, frozen=True, tag=True):
    """Host → agent: all engines that the host needs, each time something changes."""

    engines: tuple[WantedEngine, ...]


class HostServing(msgspec.Struct, frozen=True, tag=True):
    """Host → agent: where frontends of other machines reach it."""

    endpoint: str


class EngineLocation(msgspec.Struct, frozen=True, tag=True):
    """Agent → host, actor → agent: where an engine is.

    version      grows with each change
    endpoint     tcp://host:port; "" = it is not up
    incarnation  of its process
    node         for people: which machine
    error        why it is not up, for people; "" = it is on its way
    is_final     whether waiting does not help, so that a first load should fail
    """

    key: str
    version: int = 0
    endpoint: str = ""
    incarnation: int = 0
    node: str = ""
    error: str = ""
    is_final: bool = False


class HostAddress(msgspec.Struct, frozen=True):
    """A host of the cluster. endpoint: where frontends of other machines reach it; "" = nowhere."""

    id: str
    endpoint: str
    release: str
    node: str = ""


class Peers(msgspec.Struct, frozen=True, tag=True):
    """Agent → host: the other hosts of the cluster."""

    peers: tuple[HostAddress, ...]


FromHost = Wants | HostServing
FromAgent = EngineLocation | Peers


class EngineSpec(msgspec.Struct, frozen=True):
    """What an engine's actor is made of. models: the folders that `config` names, on the machine that asks first."""

    key: str
    config: EngineConfig
    models: tuple[ModelManifest, ...] = ()


class Versions(msgspec.Struct, frozen=True):
    """What all machines of a cluster must have in common."""

    llmbackend: str
    python: str
    ray: str

    def __str__(self) -> str:
        return f"llmbackend {self.llmbackend}, Python {self.python}, Ray {self.ray}"


class AgentOrder(msgspec.Struct, frozen=True):
    """The agent's standard input.

    socket     the Unix socket at which it listens for its host
    address    of the cluster's head, host:port
    bind       of this machine
    host       what other machines are told of this one's host
    versions   of this machine
    key_name   which CURVE key it has, without saying the key
    """

    socket: str
    address: str
    bind: str
    host: HostAddress
    versions: Versions
    key_name: str


class AgentNews(msgspec.Struct, frozen=True):
    """A line of the agent's standard output. error: why this machine cannot be part of the cluster; "" = it is."""

    error: str = ""
