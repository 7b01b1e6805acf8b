"""How this package calls Ray's actors: their namespace, what keeps them, and answers on an event loop.

For: the agent. Does not know: what is asked. Invariant: actors belong to the cluster, not to the machine that made
them.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from ray._private.state import available_resources_per_node

NAMESPACE: Final = "llmbackend"
DETACHED: Final[dict[str, Any]] = {
    "lifetime": "detached",
    "get_if_exists": True,
    "max_restarts": -1,
    "namespace": NAMESPACE,
    "max_concurrency": 1000,
}


def free_resources() -> dict[str, dict[str, float]]:
    """Of each node, by its id. Ray's public functions tell what is free in the whole cluster only."""
    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


async def answer(reference: Any) -> Any:
    """Raises RayError."""
    return await asyncio.wrap_future(reference.future())
