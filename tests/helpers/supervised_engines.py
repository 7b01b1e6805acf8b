"""Loaded engines under a supervisor, and their processes.

Used by tests of starts and restarts. Independent of which models.
"""

from __future__ import annotations

from llmbackend.engine.messages import ModelInfo
from llmbackend.engine.process.supervisor import ForkedEngines, Supervisor
from llmbackend.engine.process.transport import ProcessTransport


def load(supervisor: Supervisor) -> ModelInfo:
    while supervisor.info is None:
        supervisor.receive(is_busy=False)
    return supervisor.info


def pid_of(supervisor: Supervisor) -> int:
    transport = supervisor._transport
    assert isinstance(transport, ProcessTransport) and transport._process is not None
    return transport._process.pid


def server_pid_of(supervisor: Supervisor) -> int:
    source = supervisor._source
    assert isinstance(source, ForkedEngines)
    assert source.fork_server is not None and source.fork_server._server is not None
    return source.fork_server._server.process.pid
