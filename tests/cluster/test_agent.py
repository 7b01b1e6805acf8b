"""The agent's end of the link to its host: over the real socket, with a host's locator, without Ray."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmbackend.cluster.agent import Agent
from llmbackend.cluster.host_process import AgentLocator
from llmbackend.cluster.messages import AgentOrder, EngineLocation, HostAddress, Versions, engine_key
from llmbackend.engine.config import EngineConfig
from tests.helpers.waiting import eventually

CONFIG = EngineConfig(model="mock")
KEY = engine_key(1, CONFIG)


class LocalAgent(Agent):
    """In no cluster. It watches an engine, as the host before this one asked it to."""

    def __init__(self, path: Path) -> None:
        versions = Versions(**dict.fromkeys(Versions.__struct_fields__, "1"))
        super().__init__(AgentOrder(str(path), "", "127.0.0.1", HostAddress("me", ""), versions, ""))
        watch: Any = SimpleNamespace(state=EngineLocation(KEY, endpoint="tcp://127.0.0.1:7", incarnation=3))
        self._engines[KEY] = watch

    async def join(self) -> str:
        return ""

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        async with await asyncio.start_unix_server(self._serve_host, self._order.socket):
            ready.set()
            await stop.wait()

    @property
    def has_host(self) -> bool:
        return self._host is not None


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[LocalAgent]:
    agent, loop, ready, stop = (
        LocalAgent(tmp_path / "agent"),
        asyncio.new_event_loop(),
        threading.Event(),
        asyncio.Event(),
    )
    thread = threading.Thread(target=loop.run_until_complete, args=(agent.serve(ready, stop),))
    thread.start()
    assert ready.wait(60)
    yield agent
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_a_host_that_is_started_again_is_told_of_engines_when_it_asks_for_them(
    agent: LocalAgent, tmp_path: Path
) -> None:
    """It is connected before it loads a model, and takes no news of engines that it has not asked for."""
    locator = AgentLocator(tmp_path / "agent")
    try:
        eventually(lambda: agent.has_host)
        eventually(lambda: locator.locate(1, CONFIG) is not None)
        found = locator.locate(1, CONFIG)
        assert found is not None and (found.endpoint, found.incarnation) == ("tcp://127.0.0.1:7", 3)
    finally:
        locator.close()
        eventually(lambda: not agent.has_host)
