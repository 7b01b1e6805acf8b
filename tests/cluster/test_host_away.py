"""A machine of a cluster whose host is away: what its frontends still answer, and how they refuse the rest."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from llmbackend.frontends.host_forwarding import HOST_IS_GONE
from trials.chaos.cluster.hosts_cluster import hosts_cluster
from trials.chaos.cluster.returning import Address
from trials.chaos.server import mock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

KNOWN_PATHS = (
    *("/v2/health/live", "/v2/health/ready", "/health", "/health/ready", "/ping", "/v2"),
    *("/v2/models/mock", "/v2/models/mock/versions/1", "/v2/models/mock/ready", "/v1/models", "/v1/models/mock"),
)
UNKNOWN = {"error": "Request for unknown model: 'none' is not found"}
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "seed": 1}
OPENAI = {"message": HOST_IS_GONE, "type": "service_unavailable_error", "param": None, "code": "unavailable"}
ANTHROPIC = {"type": "overloaded_error", "message": HOST_IS_GONE}
PASSED_ON: tuple[tuple[str, str, Any, dict[str, str], Any], ...] = (
    ("GET", "/v2/models/stats", None, {}, HOST_IS_GONE),
    ("GET", "/v2/models/mock/config", None, {}, HOST_IS_GONE),
    ("POST", "/v2/repository/index", {}, {}, HOST_IS_GONE),
    ("POST", "/v2/repository/models/mock/load", {}, {}, HOST_IS_GONE),
    ("GET", "/metrics", None, {}, HOST_IS_GONE),
    ("POST", "/v1/responses", {"model": "mock", "input": "a"}, {}, OPENAI),
    ("GET", "/v1/responses/resp_1", None, {}, OPENAI),
    ("POST", "/v1/chat/completions", CHAT, {"idempotency-key": "k"}, OPENAI),
    ("POST", "/v1/chat/completions", CHAT | {"stream": True}, {"x-resumable-stream": "true"}, OPENAI),
    ("POST", "/v1/messages", CHAT, {"idempotency-key": "k"}, ANTHROPIC),
)
PASSED_ON_RPCS = (
    ("ModelStatistics", pb.ModelStatisticsRequest(name="mock")),
    ("ModelConfig", pb.ModelConfigRequest(name="mock")),
    ("RepositoryIndex", pb.RepositoryIndexRequest()),
    ("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="mock")),
)
KNOWN_RPCS = (
    ("ServerLive", pb.ServerLiveRequest()),
    ("ServerReady", pb.ServerReadyRequest()),
    ("ModelReady", pb.ModelReadyRequest(name="mock")),
    ("ServerMetadata", pb.ServerMetadataRequest()),
    ("ModelMetadata", pb.ModelMetadataRequest(name="mock")),
)


class Machine:
    """A client of one machine."""

    def __init__(self, address: Address) -> None:
        self.http = httpx.AsyncClient(base_url=f"http://{address.http}", timeout=60)
        self._channel = grpc.aio.insecure_channel(address.grpc)
        self.rpcs = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self.health = health_pb2_grpc.HealthStub(self._channel)

    async def known(self) -> dict[str, Any]:
        """What it answers to each question that any host could answer."""
        pages = {path: await self.http.get(path) for path in KNOWN_PATHS}
        found: dict[str, Any] = {path: (page.status_code, _timeless(page)) for path, page in pages.items()}
        found |= {name: await getattr(self.rpcs, name)(request) for name, request in KNOWN_RPCS}
        return found | {"health": await self.health.Check(health_pb2.HealthCheckRequest())}

    async def close(self) -> None:
        await self.http.aclose()
        await self._channel.close()


def _timeless(page: httpx.Response) -> Any:
    """Without the time at which a model was seen first, which each process has for itself."""
    if not page.content:
        return None
    body = page.json()
    for model in (body, *body.get("data", ())):
        model.pop("created", None)
    return body


async def _check_refusals(machine: Machine) -> None:
    for method, path, body, headers, error in PASSED_ON:
        answer = await machine.http.request(method, path, json=body, headers=headers)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
        assert answer.json()["error"] == error, path
    for name, request in PASSED_ON_RPCS:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(machine.rpcs, name)(request)
        _check_refusal(caught.value)
    stream = machine.rpcs.ModelStreamInfer(_resumable())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [_ async for _ in stream]
    _check_refusal(caught.value)


def _check_refusal(error: grpc.aio.AioRpcError) -> None:
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, HOST_IS_GONE)
    assert dict(error.trailing_metadata() or ())["retry-after"] == "1"


async def _resumable() -> Any:
    request = pb.ModelInferRequest(model_name="mock")
    request.parameters["resumable"].bool_param = True
    yield request


async def test_a_machine_without_its_host_says_what_is_ready_serves_inference_and_refuses_the_rest() -> None:
    async with hosts_cluster([mock("mock")], 2) as cluster:
        await cluster.until_whole()
        first, second = (Machine(machine.address) for machine in cluster.machines)
        before = await first.known()
        assert {path: before[path][0] for path in KNOWN_PATHS} == dict.fromkeys(KNOWN_PATHS, 200)
        chat = (await first.http.post("/v1/chat/completions", json=CHAT)).json()
        await cluster.machines[0].host.stop()

        assert await first.known() == before
        again = (await first.http.post("/v1/chat/completions", json=CHAT)).json()
        assert again["choices"] == chat["choices"]
        await _check_refusals(first)
        unknown = await first.http.get("/v2/models/none")
        assert (unknown.status_code, unknown.json()) == (404, UNKNOWN)

        await cluster.machines[1].host.stop()
        assert (await second.http.get("/v2/health/live")).status_code == 200, "its processes start the host again"
        assert (await second.http.get("/v2/health/ready")).status_code == 400
        assert not (await second.rpcs.ServerReady(pb.ServerReadyRequest())).ready
        for machine in (first, second):
            await machine.close()
