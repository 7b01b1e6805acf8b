"""The contract between the host and a repository agent: what an agent exports, and what the host offers it.

An agent imports no other module of the host. Source: Triton's `tritonrepoagent.h` (API 0.1). A C function
`TRITONREPOAGENT_ModelXDoY(agent, model, …)` is the method `model.do_y(…)` here.

A repository agent acts before a model is loaded, and is notified of how the load ended. It may check the model's files
or provide others. A model names its agents in config.pbtxt:

    model_repository_agents { agents [ { name: "checksum" parameters { key: "MD5:1/model.py" value: "0123…" } } ] }

Functions
    The agent NAME is the Python module `<--repoagent-directory>/NAME/tritonrepoagent_NAME.py` (or `repoagent.py` there)
    with the functions below, or the shared library `libtritonrepoagent_NAME.so` there with those of Triton's C API.
    Only TRITONREPOAGENT_ModelAction is required.

    TRITONREPOAGENT_Initialize(agent: Agent) -> None
        Before its first model is loaded.
    TRITONREPOAGENT_Finalize(agent: Agent) -> None
        After its last model.
    TRITONREPOAGENT_ModelInitialize(agent: Agent, model: AgentModel) -> None
        At the beginning of each load of a model.
    TRITONREPOAGENT_ModelFinalize(agent: Agent, model: AgentModel) -> None
        After the last action of that load.
    TRITONREPOAGENT_ModelAction(agent: Agent, model: AgentModel, action: Action) -> None
        One action of that load.

Actions
    One load of a model has the actions LOAD, LOAD_COMPLETE, UNLOAD, UNLOAD_COMPLETE, or LOAD, LOAD_FAIL.
    - LOAD and UNLOAD are sent to the agents of a model in the order of its configuration, the others in reverse order.
    - UNLOAD_COMPLETE is sent when the last request of the last version has ended and all versions are finalised.

Failure
    - A function fails by raising TritonError. Any other exception counts as INTERNAL.
    - If Initialize, ModelInitialize or the action LOAD fails, the load fails. Later failures are only logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from .errors import ErrorCode, TritonError, internal, invalid_argument, unavailable, unsupported

__all__ = [
    "API_VERSION", "Action", "Agent", "AgentModel", "ErrorCode", "ModelConfig", "TritonError", "internal",
    "invalid_argument", "unavailable", "unsupported",
]  # fmt: skip

API_VERSION = (0, 1)


class Action(Enum):
    LOAD = "TRITONREPOAGENT_ACTION_LOAD"
    LOAD_COMPLETE = "TRITONREPOAGENT_ACTION_LOAD_COMPLETE"
    LOAD_FAIL = "TRITONREPOAGENT_ACTION_LOAD_FAIL"
    UNLOAD = "TRITONREPOAGENT_ACTION_UNLOAD"
    UNLOAD_COMPLETE = "TRITONREPOAGENT_ACTION_UNLOAD_COMPLETE"


class Agent(Protocol):
    state: Any
    """For the agent's own use; initially None."""

    @property
    def name(self) -> str: ...
    @property
    def api_version(self) -> tuple[int, int]: ...


class AgentModel(Protocol):
    """One load of one model, from ModelInitialize to ModelFinalize."""

    state: Any
    """For the agent's own use; initially None."""

    @property
    def parameters(self) -> Mapping[str, str]:
        """The agent's parameters in the model's configuration."""

    @property
    def config(self) -> ModelConfig:
        """A copy of the configuration file's content, without defaults. If another agent has moved the model, the file
        in the new directory is read. Empty if there is no file."""

    @property
    def location(self) -> Path:
        """The model's local directory (TRITONREPOAGENT_ModelRepositoryLocation)."""

    def acquire_location(self) -> Path:
        """A new directory for this load's files; the same one on every call. It is removed after ModelFinalize."""

    def release_location(self) -> None:
        """Removes the acquired directory now. Raises TritonError UNAVAILABLE if there is none."""

    def update_location(self, location: Path) -> None:
        """Loads the model from `location` instead (TRITONREPOAGENT_ModelRepositoryUpdate). Raises TritonError
        INVALID_ARG outside the action LOAD."""
