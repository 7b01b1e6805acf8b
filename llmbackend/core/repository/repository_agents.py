"""Finds and loads repository agents, and calls them on every load and unload of a model that names them.

An agent stays loaded as long as a model uses it. Source: repo_agent.cc and TritonRepoAgentModelList in Triton's core.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.fork_server.process_resources import OwnedFolder

from ..c_api.library import CompiledAgent
from ..config.model_config import read_config
from ..errors import TritonError, internal, invalid_argument, unavailable
from ..files import call_entry_point, import_file, load_library
from ..repoagent_api import API_VERSION, Action
from .model_files import config_path

log = logging.getLogger(__name__)

BUNDLED_DIRECTORY = Path(__file__).parents[2] / "repoagents"
DEFAULT_DIRECTORY = Path("/opt/tritonserver/repoagents")
_FORWARD = (Action.LOAD, Action.UNLOAD)
"""Sent to the first agent first; other actions to the last one first."""
_NEXT: dict[Action | None, tuple[Action, ...]] = {
    None: (Action.LOAD,),
    Action.LOAD: (Action.LOAD_COMPLETE, Action.LOAD_FAIL),
    Action.LOAD_COMPLETE: (Action.UNLOAD,),
    Action.UNLOAD: (Action.UNLOAD_COMPLETE,),
}
"""The last action of an agent → the actions that may follow it."""
_REMAINING: dict[Action | None, tuple[Action, ...]] = {
    Action.LOAD: (Action.LOAD_FAIL,),
    Action.LOAD_COMPLETE: (Action.UNLOAD, Action.UNLOAD_COMPLETE),
    Action.UNLOAD: (Action.UNLOAD_COMPLETE,),
}
"""The last action of an agent → the actions that must follow before the agent is finalised."""


class LoadedAgent:
    """repoagent_api.Agent, and the agent's functions."""

    api_version = API_VERSION

    def __init__(self, name: str, file: Path, module: ModuleType | CompiledAgent) -> None:
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
        """Calls TRITONREPOAGENT_<function> if the module has it. Raises TritonErrors only."""
        entry_point: Callable[..., None] | None = getattr(self._module, f"TRITONREPOAGENT_{function}", None)
        if entry_point is not None:
            call_entry_point(f"repository agent '{self.name}'", entry_point, self, *arguments)

    def call_logged(self, function: str, *arguments: Any) -> None:
        """Like `call`, but logs errors instead of raising them."""
        try:
            self.call(function, *arguments)
        except TritonError as error:
            log.error("repository agent '%s' (%s): %s", self.name, function, error.status)


class LoadedAgentModel:
    """repoagent_api.AgentModel: one load of a model, for one agent."""

    def __init__(self, agent: LoadedAgent, parameters: Mapping[str, str], config: ModelConfig, location: Path) -> None:
        self.state: Any = None
        self.agent = agent
        self.parameters = dict(parameters)
        self.location = location
        self.last: Action | None = None
        self._config = config
        self._acquired: OwnedFolder | None = None

    @property
    def config(self) -> ModelConfig:
        return copy.deepcopy(self._config)

    def acquire_location(self) -> Path:
        if self._acquired is None:
            self._acquired = OwnedFolder("agent")
        location = self._acquired.path / "model"
        location.mkdir(exist_ok=True)
        return location

    def release_location(self) -> None:
        if self._acquired is None:
            raise unavailable("No mutable location to be deleted")
        self._acquired.remove()
        self._acquired = None

    def update_location(self, location: Path) -> None:
        if self.last is not Action.LOAD:
            raise invalid_argument(
                f"location can only be updated during {Action.LOAD.value}, current action type is "
                f"{self.last.value if self.last is not None else 'not set'}"
            )
        self.location = Path(location)

    def may_follow(self, action: Action) -> bool:
        return action in _NEXT.get(self.last, ())

    def act(self, action: Action) -> None:
        """Raises the agent's TritonError, or INTERNAL for an action that may not follow the last one."""
        if not self.may_follow(action):
            before = f" from {self.last.value}" if self.last is not None else ""
            raise internal(f"Unexpected lifecycle state transition{before} to {action.value}")
        self.last = action
        self.agent.call("ModelAction", self, action)

    def finish(self) -> None:
        """Sends the remaining actions, then calls ModelFinalize."""
        for action in _REMAINING.get(self.last, ()):
            try:
                self.act(action)
            except TritonError as error:
                log.error("Inform %s: %s", action.value, error.status)
        self.agent.call_logged("ModelFinalize", self)
        if self._acquired is not None:
            self.release_location()


class AgentChain:
    """The agents of one load of a model, shared by all its versions. Thread-safe; agents are called one at a time."""

    def __init__(self, release: Callable[[LoadedAgent], None]) -> None:
        """release: called once per agent, when the model no longer uses it."""
        self._release = release
        self._lock = threading.RLock()
        self._models: list[LoadedAgentModel] = []
        self._versions: int | None = None
        self._unloaded = 0
        self._is_closed = False

    @property
    def location(self) -> Path:
        """The directory from which to load the model, as decided by the last agent."""
        return self._models[-1].location

    def add(self, model: LoadedAgentModel) -> None:
        """Initialises an agent for this model and sends it LOAD. Raises the agent's TritonError."""
        self._models.append(model)
        model.agent.call("ModelInitialize", model)
        model.act(Action.LOAD)

    def load_ended(self, succeeded: bool, versions: int) -> None:
        """versions: how many were created; `version_unloaded` is called for each of them."""
        with self._lock:
            self._tell(Action.LOAD_COMPLETE if succeeded else Action.LOAD_FAIL)
            self._versions = versions
            self._close_if_unused()

    def unloading(self) -> None:
        """Called when a version is taken out of service; only the first call has an effect."""
        with self._lock:
            self._tell(Action.UNLOAD)

    def version_unloaded(self) -> None:
        """A version was finalised."""
        with self._lock:
            self._unloaded += 1
            self._close_if_unused()

    def close_unless_loaded(self) -> None:
        """Closes the chain of a load that failed before `load_ended`."""
        with self._lock:
            if self._versions is None:
                self.close()

    def close(self) -> None:
        """Finalises and releases the agents in reverse order."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._tell(Action.UNLOAD_COMPLETE)
            for model in reversed(self._models):
                model.finish()
                self._release(model.agent)

    def _close_if_unused(self) -> None:
        if self._versions is not None and self._unloaded >= self._versions:
            self.close()

    def _tell(self, action: Action) -> None:
        for model in self._models if action in _FORWARD else reversed(self._models):
            if not model.may_follow(action):
                continue  # this is not the first version to be unloaded, or the load failed
            try:
                model.act(action)
            except TritonError as error:
                log.error("Agent model returns error on %s: %s", action.value, error.status)


class AgentManager:
    """Searches for agents in `directory` (Triton's by default), then among the bundled ones."""

    def __init__(self, directory: Path | None) -> None:
        self._directories: Sequence[Path] = (directory or DEFAULT_DIRECTORY, BUNDLED_DIRECTORY)
        self._lock = threading.Lock()
        self._agents: dict[str, LoadedAgent] = {}

    def __len__(self) -> int:
        return len(self._agents)

    def table(self) -> list[tuple[str, str]]:
        """Name and file of every agent in use."""
        with self._lock:
            return sorted((agent.name, str(agent.file)) for agent in self._agents.values())

    def load(self, config: ModelConfig, directory: Path, config_name: str) -> AgentChain:
        """Sends LOAD for the model in `directory` to the agents named in `config`, in order.

        Raises TritonError INTERNAL if an agent is not found or refuses the load; the agents before it get LOAD_FAIL."""
        chain = AgentChain(self._release)
        current = config
        try:
            for index, wanted in enumerate(config.model_repository_agents.agents):
                if index:
                    directory = chain.location
                    current = _config_at(directory, config_name)
                agent = self._acquire(wanted.name)
                chain.add(LoadedAgentModel(agent, wanted.parameters, current, directory))
        except TritonError as error:
            chain.close()
            raise internal(error.message) from None
        return chain

    def _release(self, agent: LoadedAgent) -> None:
        """Called when a model no longer uses the agent; the agent is finalised after the last one."""
        with self._lock:
            agent.users -= 1
            if agent.users:
                return
            del self._agents[agent.name]
            agent.call_logged("Finalize")

    def _acquire(self, name: str) -> LoadedAgent:
        with self._lock:
            agent = self._agents.get(name)
            if agent is None:
                agent = self._load(name)
                self._agents[name] = agent
            agent.users += 1
            return agent

    def _load(self, name: str) -> LoadedAgent:
        file = self._find(name)
        agent = LoadedAgent(name, file, load_library("shared library", file, partial(_load_file, file)))
        try:
            agent.call("Initialize")
        except TritonError:
            agent.call_logged("Finalize")
            raise
        return agent

    def _find(self, name: str) -> Path:
        if not name or Path(name).name != name:
            raise invalid_argument(f"repo agent name '{name}' escapes the repository agent directory")
        for directory in self._directories:
            for file_name in (f"libtritonrepoagent_{name}.so", f"tritonrepoagent_{name}.py", "repoagent.py"):
                file = directory / name / file_name
                if file.is_file():
                    return file
        raise invalid_argument(
            f"unable to find 'libtritonrepoagent_{name}.so' or 'tritonrepoagent_{name}.py' for repo agent '{name}', "
            f"searched: {self._directories[0]}"
        )


def _load_file(file: Path) -> ModuleType | CompiledAgent:
    return CompiledAgent(file) if file.suffix == ".so" else import_file(file)


def _config_at(directory: Path, config_name: str) -> ModelConfig:
    try:
        return read_config(config_path(directory, config_name))
    except TritonError:
        return ModelConfig()
