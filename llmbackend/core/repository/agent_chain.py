"""The agents of one load of a model: told of its life, in order.

For: repository_agents.py, which makes it, the repository (where is the model?) and the life cycle (what became of it).
Does not know: how agents are found. Invariant: a load and an unload are told forwards, their ends backwards; however
the load ends, every agent is told so once and given up. Source: TritonRepoAgentModelList in Triton's core.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from llmbackend.core.errors import TritonError
from llmbackend.core.repoagent_api import Action

from .loaded_agent import LoadedAgent, LoadedAgentModel

log = logging.getLogger(__name__)

_FORWARD = (Action.LOAD, Action.UNLOAD)


class AgentChain:
    """The agents of one load of a model, shared by its versions. Any thread; agents are called one at a time."""

    def __init__(self, give_up: Callable[[LoadedAgent], None]) -> None:
        """give_up: called once for each agent, when the model does not use it any more."""
        self._give_up = give_up
        self._lock = threading.RLock()
        self._models: list[LoadedAgentModel] = []
        self._versions: int | None = None
        self._unloaded = 0
        self._is_closed = False

    @property
    def location(self) -> Path:
        """Where the model is to be loaded from: what the last agent says."""
        return self._models[-1].location

    def add(self, model: LoadedAgentModel) -> None:
        """One more agent: initialises it for this model and asks it for LOAD. Raises its TritonError."""
        self._models.append(model)
        model.agent.call("ModelInitialize", model)
        model.act(Action.LOAD)

    def load_ended(self, succeeded: bool, versions: int) -> None:
        """`versions` were made, whose ends `version_unloaded` will tell."""
        with self._lock:
            self._tell(Action.LOAD_COMPLETE if succeeded else Action.LOAD_FAIL)
            self._versions = versions
            self._close_if_unused()

    def unloading(self) -> None:
        """A version is taken out of service; only the first one counts."""
        with self._lock:
            self._tell(Action.UNLOAD)

    def version_unloaded(self) -> None:
        """A version was finalised."""
        with self._lock:
            self._unloaded += 1
            self._close_if_unused()

    def abandon(self) -> None:
        """Ends a load that never came to its end; nothing otherwise."""
        with self._lock:
            if self._versions is None:
                self.close()

    def close(self) -> None:
        """Ends the life of every agent model, in reverse order, and gives up the agents."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._tell(Action.UNLOAD_COMPLETE)
            for model in reversed(self._models):
                model.finish()
                self._give_up(model.agent)

    def _close_if_unused(self) -> None:
        if self._versions is not None and self._unloaded >= self._versions:
            self.close()

    def _tell(self, action: Action) -> None:
        for model in self._models if action in _FORWARD else reversed(self._models):
            if not model.may_be_told(action):
                continue  # the second version that is unloaded, or one whose load failed
            try:
                model.act(action)
            except TritonError as error:
                log.error("Agent model returns error on %s: %s", action.value, error.status)
