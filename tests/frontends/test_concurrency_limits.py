"""The limits of open inferences, when another process of the server takes room at the same moment."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from llmbackend.core.errors import unavailable
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.messages import InferenceRequest
from llmbackend.frontends.access.rate_limit import Account, Limits
from llmbackend.frontends.access.request_identity import REQUEST_IDENTITY, AccessMetrics, RequestIdentity
from llmbackend.frontends.errors import LimitReachedError
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.frontends.limits import InferenceLimits
from llmbackend.frontends.shared_counts import LocalCounts

REQUEST = InferenceRequest("m")
KEY = Account("one", Limits(concurrency=1))


class ContestedCounts(LocalCounts):
    """Another process adds one to `name` after this process has read it, or just before it adds to it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._contested = name

    def held(self, name: str) -> int:
        held = super().held(name)
        self._add_other(name)
        return held

    def add(self, name: str, change: int) -> int:
        self._add_other(name)
        return super().add(name, change)

    def _add_other(self, name: str) -> None:
        if name == self._contested:
            self._contested = ""
            super().add(name, 1)


async def begin(gate: InferenceGate, is_submitted: bool) -> None:
    if is_submitted:
        gate.submit(REQUEST)
    else:
        await gate.send(REQUEST)


@pytest.mark.parametrize("is_submitted", [True, False])
def test_the_last_place_of_the_server_goes_to_one_process(is_submitted: bool) -> None:
    server = Mock(InferenceServer)
    gate = InferenceGate(server, InferenceLimits(max_concurrent_requests=1), ContestedCounts("inferences"))
    with pytest.raises(LimitReachedError, match="the server is at its limit of 1 concurrent requests"):
        asyncio.run(begin(gate, is_submitted))
    assert gate.open_inferences == 1, "that of the other process"
    server.infer_async.assert_not_called()
    server.infer_accepted.assert_not_called()
    gate.close()


@pytest.mark.parametrize("is_submitted", [True, False])
def test_the_last_place_of_a_key_goes_to_one_process(is_submitted: bool) -> None:
    async def begin_with_key() -> None:
        REQUEST_IDENTITY.set(RequestIdentity(KEY, "http", AccessMetrics(CollectorRegistry())))
        await begin(gate, is_submitted)

    server = Mock(InferenceServer)
    gate = InferenceGate(server, counts=ContestedCounts("inferences of one"))
    with pytest.raises(LimitReachedError, match="API key 'one' is at its limit of 1 concurrent requests"):
        asyncio.run(begin_with_key())
    assert (gate.open_inferences, gate.open_inferences_of(KEY)) == (0, 1)
    server.infer_async.assert_not_called()
    server.infer_accepted.assert_not_called()
    gate.close()


@pytest.mark.parametrize("is_submitted", [True, False])
def test_what_the_host_refuses_takes_no_place(is_submitted: bool) -> None:
    server = Mock(InferenceServer)
    server.infer_async.side_effect = server.infer_accepted.side_effect = unavailable("no")
    gate = InferenceGate(server)
    with pytest.raises(Exception, match="no"):
        asyncio.run(begin(gate, is_submitted))
    assert gate.open_inferences == 0
    gate.close()
