"""A model's engine handles, and the routing of requests to engines that have a prefix of their prompts.

Invariant: with a single engine, nothing is hashed or stored.
"""

from __future__ import annotations

from collections.abc import Sequence

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.llm_manager import LlmManager
from llmbackend.engine.memory.prefix_cache import prefix_hashes
from llmbackend.engine.messages import BlockChanges, ModelInfo

from .infer_task import InferTask
from .placement import Placement, PlacementState, PrefixIndex
from .task_map import EngineAssignment


class EngineHandle:
    """One instance's engine, as seen by its model."""

    info: ModelInfo
    """Set when the engine has loaded its model."""

    def __init__(self, index: int, config: EngineConfig, manager: LlmManager) -> None:
        self.index = index
        self.config = config
        self.manager = manager
        self.wakes_at_ns = 0
        """When it looks again for requests that it left to other engines. Owner: its loop."""
        self.assignment = EngineAssignment(manager.wake, lambda: manager.capacity, 1 << index)

    def why_not_ready(self) -> str:
        """Why the engine should get no requests; "" if it is ready."""
        try:
            self.manager.check_ready()
        except RuntimeError as error:
            return str(error)
        return ""


class PrefixRouting:
    """For one model. Thread-safe except for `follow`, which its owner locks."""

    def __init__(self, is_enabled: bool) -> None:
        """is_enabled: whether the engines have prefix caches"""
        self._is_enabled = is_enabled
        self._index = PrefixIndex()
        self.placement = Placement(self._index)

    def follow(self, engines: Sequence[EngineHandle]) -> None:
        """Sets the model's engines. If there are several, they report their blocks."""
        sizes = {engine.info.block_size for engine in engines}
        is_wanted = self._is_enabled and len(engines) > 1 and len(sizes) == 1
        self.placement.block_size = sizes.pop() if is_wanted else 0
        for engine in engines:
            engine.manager.follow_prefixes(is_wanted)

    def changed(self, engine: EngineHandle, changes: BlockChanges) -> None:
        """Called when an engine's prefix cache has changed."""
        self._index.apply(engine.assignment.bit, changes)

    def ended(self, engine: EngineHandle) -> None:
        """Called when the engine and its KV are gone."""
        self._index.forget(engine.assignment.bit)

    def place(self, tasks: Sequence[InferTask]) -> None:
        """Before the tasks of a request are queued, gives them the block hashes of their prompts."""
        block_size = self.placement.block_size
        if not block_size:
            return
        hashes: dict[int, Sequence[int]] = {}
        for task in tasks:
            request = task.infer_request
            if request.sampling.prompt_logprobs is not None:
                continue  # its prompt must be computed completely
            token_ids = request.prompt_token_ids
            if task.output_token_ids:  # its client got them from another host
                task.placement = PlacementState(
                    prefix_hashes(request.prefix_salt, (*token_ids, *task.output_token_ids), block_size)
                )
                continue
            if id(token_ids) not in hashes:
                hashes[id(token_ids)] = prefix_hashes(request.prefix_salt, token_ids, block_size)
            task.placement = PlacementState(hashes[id(token_ids)])

    def prompt_computed(self, task: InferTask, now_ns: int) -> None:
        """Called when an engine has produced the task's first token."""
        if self.placement.block_size:
            num_tokens = task.num_prompt_tokens - task.num_cached_tokens
            self.placement.prompt_computed(num_tokens, (now_ns - task.times.taken_ns) * 1e-9)
