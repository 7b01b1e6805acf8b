"""The contract between the host and a repository agent: what an agent sees, and what it must export.

For: authors of agents and the host; an agent may import this module and nothing else of the host. Does not know: how
models are loaded. Source: Triton's `tritonrepoagent.h` (API 0.1), names kept; a C function
`TRITONREPOAGENT_ModelXDoY(agent, model, …)` is the method `model.do_y(…)` here.

A repository agent is asked before a model is loaded and told what becomes of it: it may check the model's files, or
bring them from elsewhere. A model names its agents in config.pbtxt:

    model_repository_agents { agents [ { name: "checksum" parameters { key: "MD5:1/model.py" value: "0123…" } } ] }

The agent `NAME` is the Python module `<--repoagent-directory>/NAME/tritonrepoagent_NAME.py` (or `repoagent.py` there)
with these functions; only ModelAction is required:

    TRITONREPOAGENT_Initialize(agent: Agent) -> None                       when its first model is about to load
    TRITONREPOAGENT_Finalize(agent: Agent) -> None                         when its last model is gone
    TRITONREPOAGENT_ModelInitialize(agent: Agent, model: AgentModel) -> None
    TRITONREPOAGENT_ModelFinalize(agent: Agent, model: AgentModel) -> None
    TRITONREPOAGENT_ModelAction(agent: Agent, model: AgentModel, action: Action) -> None

A function fails by raising TritonError (any other exception counts as INTERNAL). A failed Initialize, ModelInitialize
or LOAD makes the load fail; what fails later is logged, and changes nothing. The actions of one model are

    LOAD → LOAD_COMPLETE → UNLOAD → UNLOAD_COMPLETE      or      LOAD → LOAD_FAIL

LOAD and UNLOAD reach the agents of a model in the order of its configuration, the others in reverse. UNLOAD_COMPLETE
comes when the last request of the last version has ended and the versions are finalised.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from .errors import ErrorCode, TritonError, internal, invalid_argument, unavailable, unsupported

__all__ = [
    "API_VERSION",
    "Action",
    "Agent",
    "AgentModel",
    "ErrorCode",
    "ModelConfig",
    "TritonError",
    "internal",
    "invalid_argument",
    "unavailable",
    "unsupported",
]

API_VERSION = (0, 1)


class Action(Enum):
    LOAD = "TRITONREPOAGENT_ACTION_LOAD"
    LOAD_COMPLETE = "TRITONREPOAGENT_ACTION_LOAD_COMPLETE"
    LOAD_FAIL = "TRITONREPOAGENT_ACTION_LOAD_FAIL"
    UNLOAD = "TRITONREPOAGENT_ACTION_UNLOAD"
    UNLOAD_COMPLETE = "TRITONREPOAGENT_ACTION_UNLOAD_COMPLETE"


class Agent(Protocol):
    """A loaded agent. `state` is its own slot, None until it sets it."""

    state: Any

    @property
    def name(self) -> str: ...
    @property
    def api_version(self) -> tuple[int, int]: ...


class AgentModel(Protocol):
    """One load of one model, from ModelInitialize to ModelFinalize. `state` is the agent's own slot."""

    state: Any

    @property
    def parameters(self) -> Mapping[str, str]:
        """The agent's parameters in the model's configuration."""

    @property
    def config(self) -> ModelConfig:
        """A copy of the configuration as it is written, before defaults are filled in; for an agent that follows one
        that moved the model, of the one in the new place (empty when there is none)."""

    @property
    def location(self) -> Path:
        """The model's directory (TRITONREPOAGENT_ModelRepositoryLocation): always a local one here."""

    def acquire_location(self) -> Path:
        """An empty directory for this load's files, the same at each call; it is removed after ModelFinalize."""

    def release_location(self) -> None:
        """Removes the acquired directory now. Raises TritonError UNAVAILABLE when there is none."""

    def update_location(self, location: Path) -> None:
        """Has the model loaded from `location` instead (TRITONREPOAGENT_ModelRepositoryUpdate).

        Raises TritonError INVALID_ARG outside of action LOAD."""
