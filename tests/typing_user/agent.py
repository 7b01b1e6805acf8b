"""A repository agent."""

from __future__ import annotations

from llmbackend.core.repoagent_api import Action, Agent, AgentModel, invalid_argument


def TRITONREPOAGENT_Initialize(agent: Agent) -> None:
    assert agent.api_version >= (0, 1), agent.name


def TRITONREPOAGENT_ModelAction(agent: Agent, model: AgentModel, action: Action) -> None:
    if action is Action.LOAD and not model.parameters:
        raise invalid_argument(f"agent '{agent.name}' has no parameters")
