"""A host's end of the link to its agent: over the real socket, with an agent of the test's own."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from llmbackend.cluster.host_process import AgentLocator
from llmbackend.cluster.messages import (
    EngineLocation,
    FromAgent,
    FromHost,
    HostAddress,
    HostServing,
    Peers,
    Wants,
    engine_key,
)
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import EngineDeadError
from tests.helpers.waiting import eventually

CONFIG = EngineConfig(model="mock")
KEY = engine_key(1, CONFIG)


class ScriptedAgent:
    """An agent that says what the test tells it to."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(30)
        self._host: socket.socket | None = None

    def accept(self) -> None:
        self._host, _ = self._listener.accept()
        self._host.settimeout(30)
        self._lines = self._host.makefile("rb")

    def receive(self) -> FromHost:
        message: FromHost = msgspec.json.decode(self._lines.readline(), type=FromHost)
        return message

    def send(self, message: FromAgent) -> None:
        assert self._host is not None
        self._host.sendall(msgspec.json.encode(message) + b"\n")

    def close(self) -> None:
        if self._host is not None:
            self._lines.close()
            self._host.close()
        self._listener.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent"


@pytest.fixture
def agent(path: Path) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(path)
    yield agent
    agent.close()


@pytest.fixture
def locator(path: Path, agent: ScriptedAgent) -> Iterator[AgentLocator]:
    locator = AgentLocator(path)
    agent.accept()
    assert agent.receive() == Wants(())
    yield locator
    locator.close()


def state(**fields: object) -> EngineLocation:
    return msgspec.convert({"type": "EngineLocation", "key": KEY, **fields}, EngineLocation)


def test_an_engine_is_asked_for_once_and_found_when_the_agent_says_where(
    agent: ScriptedAgent, locator: AgentLocator
) -> None:
    woken: list[str] = []
    locator.on_change(lambda: woken.append("woken"))
    assert locator.locate(1, CONFIG) is None
    assert locator.locate(1, CONFIG) is None
    said = agent.receive()
    assert isinstance(said, Wants)
    assert [engine.key for engine in said.engines] == [KEY]
    agent.send(state(version=1, endpoint="tcp://10.0.0.1:7", incarnation=5, node="a"))
    eventually(lambda: woken)
    address = locator.locate(1, CONFIG)
    assert address is not None
    assert (address.endpoint, address.incarnation, address.node) == ("tcp://10.0.0.1:7", 5, "a")
    locator.release(1, CONFIG)
    assert agent.receive() == Wants(())


def test_what_waiting_does_not_help_is_an_error(agent: ScriptedAgent, locator: AgentLocator) -> None:
    woken: list[str] = []
    locator.on_change(lambda: woken.append("woken"))
    locator.locate(1, CONFIG)
    agent.send(state(version=1, error="on its way again"))
    eventually(lambda: woken)
    assert locator.locate(1, CONFIG) is None
    agent.send(state(version=2, error="the cluster is full", is_final=True))
    eventually(lambda: len(woken) == 2)
    with pytest.raises(EngineDeadError, match="the cluster is full") as caught:
        locator.locate(1, CONFIG)
    assert caught.value.kind == "load"


def test_the_next_agent_is_told_what_is_wanted_and_engines_stay_where_they_were(
    path: Path, agent: ScriptedAgent, locator: AgentLocator
) -> None:
    locator.locate(1, CONFIG)
    agent.receive()
    agent.send(state(version=1, endpoint="tcp://10.0.0.1:7", incarnation=5))
    eventually(lambda: locator.locate(1, CONFIG))
    agent.close()
    assert locator.locate(1, CONFIG) is not None
    next_agent = ScriptedAgent(path)
    try:
        next_agent.accept()
        said = next_agent.receive()
        assert isinstance(said, Wants)
        assert [engine.key for engine in said.engines] == [KEY]
    finally:
        next_agent.close()


def test_a_host_says_where_it_is_and_hears_of_others(path: Path, agent: ScriptedAgent, locator: AgentLocator) -> None:
    told: list[tuple[HostAddress, ...]] = []
    locator.serve("tcp://10.0.0.1:8", told.append)
    assert agent.receive() == HostServing("tcp://10.0.0.1:8")
    peers = (HostAddress("b-1", "tcp://10.0.0.2:9"),)
    agent.send(Peers(peers))
    eventually(lambda: told == [peers])
    agent.close()
    next_agent = ScriptedAgent(path)
    try:
        next_agent.accept()
        assert [next_agent.receive(), next_agent.receive()] == [Wants(()), HostServing("tcp://10.0.0.1:8")]
    finally:
        next_agent.close()


def test_an_agent_that_reads_nothing_delays_no_caller(agent: ScriptedAgent, locator: AgentLocator) -> None:
    """More is asked for than the socket's buffers hold."""
    num_engines = 60

    def ask() -> None:
        for index in range(num_engines):
            locator.locate(index, CONFIG)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(30)
    is_blocked = asking.is_alive()
    if is_blocked:
        agent.close()  # lets the thread end
    assert not is_blocked
    messages = [agent.receive() for _ in range(num_engines)]
    assert [len(message.engines) for message in messages if isinstance(message, Wants)] == [*range(1, num_engines + 1)]


def test_whoever_hears_of_other_hosts_may_use_the_locator(agent: ScriptedAgent, locator: AgentLocator) -> None:
    told: list[object] = []
    locator.serve("tcp://10.0.0.1:8", lambda peers: told.append(locator.locate(1, CONFIG)))
    assert agent.receive() == HostServing("tcp://10.0.0.1:8")
    agent.send(Peers(()))
    said = agent.receive()
    assert isinstance(said, Wants) and [engine.key for engine in said.engines] == [KEY]
    eventually(lambda: told == [None])
