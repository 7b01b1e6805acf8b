"""A repository agent, and one load of a model as an agent sees it: shells with an opaque state slot.

For: agent_chain.py and repository_agents.py. Does not know: other agents, where agents are found. Owner of the
directory that an agent acquires for a model. Invariant: every agent model that was initialised sees the actions in
their order, ends in LOAD_FAIL or UNLOAD_COMPLETE, and is finalised once. Source: repo_agent.cc in Triton's core.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.errors import TritonError, internal, invalid_argument, unavailable
from llmbackend.core.repoagent_api import API_VERSION, Action

log = logging.getLogger(__name__)

_AFTER: dict[Action | None, tuple[Action, ...]] = {
    None: (Action.LOAD,),
    Action.LOAD: (Action.LOAD_COMPLETE, Action.LOAD_FAIL),
    Action.LOAD_COMPLETE: (Action.UNLOAD,),
    Action.UNLOAD: (Action.UNLOAD_COMPLETE,),
}
_ENDING: dict[Action | None, tuple[Action, ...]] = {
    Action.LOAD: (Action.LOAD_FAIL,),
    Action.LOAD_COMPLETE: (Action.UNLOAD, Action.UNLOAD_COMPLETE),
    Action.UNLOAD: (Action.UNLOAD_COMPLETE,),
}
"""What an agent that was last told this must still be told before it is finalised."""


class LoadedAgent:
    """An agent as it sees itself (repoagent_api.Agent)."""

    api_version = API_VERSION

    def __init__(self, name: str, file: Path, module: ModuleType) -> None:
        self.state: Any = None
        self.name = name
        self.file = file
        self.users = 0
        self._module = module
        if not callable(getattr(module, "TRITONREPOAGENT_ModelAction", None)):
            raise invalid_argument(
                f"unable to find required entrypoint 'TRITONREPOAGENT_ModelAction' in repo agent library '{file}'"
            )

    def call(self, function: str, *arguments: Any) -> None:
        """TRITONREPOAGENT_<function>, if the module has it. Any exception of it comes out as a TritonError."""
        entry_point: Callable[..., None] | None = getattr(self._module, f"TRITONREPOAGENT_{function}", None)
        if entry_point is None:
            return
        try:
            entry_point(self, *arguments)
        except TritonError as error:
            raise TritonError(error.message, error.code) from None
        except (Exception, SystemExit) as error:
            log.exception("TRITONREPOAGENT_%s of repository agent '%s' failed", function, self.name)
            raise internal(f"{type(error).__name__}: {error}") from None

    def call_at_end(self, function: str, *arguments: Any) -> None:
        """As `call`, when there is nobody left to tell of an error."""
        try:
            self.call(function, *arguments)
        except TritonError as error:
            log.error("repository agent '%s' (%s): %s", self.name, function, error.status)


class LoadedAgentModel:
    """One load of a model as one of its agents sees it (repoagent_api.AgentModel)."""

    def __init__(self, agent: LoadedAgent, parameters: Mapping[str, str], config: ModelConfig, location: Path) -> None:
        self.state: Any = None
        self.agent = agent
        self.parameters = dict(parameters)
        self.location = location
        self.last: Action | None = None
        self._config = config
        self._acquired: Path | None = None

    @property
    def config(self) -> ModelConfig:
        copy = ModelConfig()
        copy.CopyFrom(self._config)
        return copy

    def acquire_location(self) -> Path:
        if self._acquired is None:
            self._acquired = Path(tempfile.mkdtemp(prefix="llmbackend-agent-"))
        return self._acquired

    def release_location(self) -> None:
        if self._acquired is None:
            raise unavailable("No mutable location to be deleted")
        shutil.rmtree(self._acquired, ignore_errors=True)
        self._acquired = None

    def update_location(self, location: Path) -> None:
        if self.last is not Action.LOAD:
            raise invalid_argument(
                f"location can only be updated during {Action.LOAD.value}, current action type is "
                f"{self.last.value if self.last is not None else 'not set'}"
            )
        self.location = Path(location)

    def may_be_told(self, action: Action) -> bool:
        return action in _AFTER.get(self.last, ())

    def act(self, action: Action) -> None:
        """Raises the agent's TritonError, or INTERNAL for an action that does not follow the last one."""
        if not self.may_be_told(action):
            before = f" from {self.last.value}" if self.last is not None else ""
            raise internal(f"Unexpected lifecycle state transition{before} to {action.value}")
        self.last = action
        self.agent.call("ModelAction", self, action)

    def finish(self) -> None:
        """What the agent must still be told, then ModelFinalize."""
        for action in _ENDING.get(self.last, ()):
            try:
                self.act(action)
            except TritonError as error:
                log.error("Inform %s: %s", action.value, error.status)
        self.agent.call_at_end("ModelFinalize", self)
        if self._acquired is not None:
            self.release_location()
