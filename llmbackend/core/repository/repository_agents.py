"""Repository agents: finds and loads them, and asks those that a model names whether it may load.

For: the repository (LOAD, before a model is read to its end). Does not know: what agents do, what a model is. Owner of
loaded agents. Invariant: an agent is initialised while a model uses it and finalised when none does.
Source: repo_agent.cc in Triton's core.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.core.config.model_config import read_config
from llmbackend.core.errors import TritonError, internal, invalid_argument
from llmbackend.core.module_files import import_file

from .agent_chain import AgentChain
from .loaded_agent import LoadedAgent, LoadedAgentModel
from .model_files import config_path

log = logging.getLogger(__name__)

BUNDLED_DIRECTORY = Path(__file__).parents[2] / "repoagents"
DEFAULT_DIRECTORY = Path("/opt/tritonserver/repoagents")


class AgentManager:
    """Finds agents in `directory`, then among the bundled ones."""

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
        """Asks the agents that `config` names, in order, whether the model in `directory` may load.

        Raises TritonError when one can not be found or refuses; then those asked before have been told LOAD_FAIL."""
        chain = AgentChain(self.give_up)
        original, current = config, config
        try:
            for index, wanted in enumerate(original.model_repository_agents.agents):
                if index:
                    directory = chain.location
                    current = _config_at(directory, config_name)
                agent = self._acquire(wanted.name)
                chain.add(LoadedAgentModel(agent, wanted.parameters, current, directory))
        except TritonError as error:
            chain.close()
            raise internal(error.message) from None
        return chain

    def give_up(self, agent: LoadedAgent) -> None:
        """A model does not use the agent any more; without any it is finalised."""
        with self._lock:
            agent.users -= 1
            if agent.users:
                return
            del self._agents[agent.name]
            agent.call_at_end("Finalize")

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
        try:
            module = import_file(file)
        except Exception as error:
            log.exception("unable to load repository agent %s", file)
            raise internal(f"unable to load shared library: {type(error).__name__}: {error}") from None
        agent = LoadedAgent(name, file, module)
        try:
            agent.call("Initialize")
        except TritonError:
            agent.call_at_end("Finalize")
            raise
        return agent

    def _find(self, name: str) -> Path:
        if not name or Path(name).name != name:
            raise invalid_argument(f"repo agent name '{name}' escapes the repository agent directory")
        for directory in self._directories:
            for file_name in (f"tritonrepoagent_{name}.py", "repoagent.py"):
                file = directory / name / file_name
                if file.is_file():
                    return file
        raise invalid_argument(
            f"unable to find 'tritonrepoagent_{name}.py' for repo agent '{name}', searched: {self._directories[0]}"
        )


def _config_at(directory: Path, config_name: str) -> ModelConfig:
    try:
        return read_config(config_path(directory, config_name))
    except TritonError:
        return ModelConfig()
