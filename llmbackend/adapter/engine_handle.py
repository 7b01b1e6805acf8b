"""One engine of a model, as the model knows it.

For: ModelState and what chooses among its engines. Does not know: requests, instances.
"""

from __future__ import annotations

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.llm_manager import LlmManager
from llmbackend.engine.messages import ModelInfo

from .task_map import EngineAssignment


class EngineHandle:
    """One instance's LlmManager, and what its model knows about it."""

    info: ModelInfo
    """Set when the engine has loaded its model."""

    def __init__(self, index: int, config: EngineConfig, manager: LlmManager) -> None:
        self.index = index
        self.config = config
        self.manager = manager
        self.wakes_at_ns = 0
        """When it looks again for requests that it left to others. Owner: its loop."""
        self.assignment = EngineAssignment(manager.wake, lambda: manager.room, 1 << index)

    def why_not_ready(self) -> str:
        """Why the engine should get no requests; "" when it is ready."""
        try:
            self.manager.check_ready()
        except RuntimeError as error:
            return str(error)
        return ""
