"""Calls a repository agent in a shared library, `libtritonrepoagent_<name>.so`, like one in Python.

Source: TRITONREPOAGENT_* in Triton's tritonrepoagent.h.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ..repoagent_api import Action, Agent, AgentModel
from .library import address_of, api, load, raise_error

_PREFIX: Final = "TRITONREPOAGENT_"
_ACTIONS: Final = tuple(Action)
"""In the order of TRITONREPOAGENT_ActionType."""


class CompiledAgent:
    """TRITONREPOAGENT_ModelAction is absent if the library does not export it."""

    def __init__(self, file: Path) -> None:
        """Raises TritonError: INTERNAL with the loader's message, UNSUPPORTED without the C API."""
        self._api = api()
        self._library = load(file)
        if self._address("ModelAction"):
            self.TRITONREPOAGENT_ModelAction = self._act

    def TRITONREPOAGENT_Initialize(self, agent: Agent) -> None:
        agent.state = self._api.new_agent()
        self._call_agent("Initialize", agent)

    def TRITONREPOAGENT_Finalize(self, agent: Agent) -> None:
        self._call_agent("Finalize", agent)
        agent.state = None

    def TRITONREPOAGENT_ModelInitialize(self, agent: Agent, model: AgentModel) -> None:
        model.state = self._api.new_agent_model(model, tuple(sorted(model.parameters.items())))
        self._call_model("ModelInitialize", agent, model)

    def TRITONREPOAGENT_ModelFinalize(self, agent: Agent, model: AgentModel) -> None:
        self._call_model("ModelFinalize", agent, model)
        model.state = None

    def _act(self, agent: Agent, model: AgentModel, action: Action) -> None:
        self._call_model("ModelAction", agent, model, _ACTIONS.index(action))

    def _address(self, name: str) -> int:
        return address_of(self._library, name, _PREFIX)

    def _call_agent(self, name: str, agent: Agent) -> None:
        if address := self._address(name):
            raise_error(self._api.call(address, agent.state))

    def _call_model(self, name: str, agent: Agent, model: AgentModel, action: int = -1) -> None:
        if (address := self._address(name)) and model.state is not None:
            raise_error(self._api.call_agent(address, agent.state, model.state, action))
