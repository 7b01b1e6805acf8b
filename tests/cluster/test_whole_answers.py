"""Answers that are sent whole, under SIGKILL of the host that makes them: the same answers, and nothing done twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import httpx
import pytest
import tritonclient.grpc.aio as triton_grpc

from tests.helpers.server_process import ROOT
from trials.chaos.agents.model import thinking_template
from trials.chaos.agents.requests import PLAN_SCHEMA, TOOLS
from trials.chaos.clients.grpc_stream import outputs_of_result, request_of, results
from trials.chaos.cluster.hosts_cluster import HostsCluster, hosts_cluster
from trials.chaos.cluster.machine import Machine
from trials.chaos.cluster.processes import until_in_thread
from trials.chaos.server import ModelSetup, mock
from trials.chaos.specs import StreamSpec

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SEEDED: dict[str, Any] = {"max_tokens": 60, "temperature": 0.9, "seed": 11}
CHAT: dict[str, Any] = {"model": "mock", "messages": [{"role": "user", "content": "Plan a day in Rome"}], **SEEDED}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "plan", "schema": PLAN_SCHEMA}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT | {"n": 3, "logprobs": True, "top_logprobs": 2}),
    "tools": ("/v1/chat/completions", CHAT | {"tools": list(TOOLS), "tool_choice": "required", "max_tokens": 200}),
    "schema": ("/v1/chat/completions", CHAT | {"response_format": SCHEMA, "max_tokens": 200}),
    "completions": ("/v1/completions", {"model": "mock", "prompt": "Rome is", "n": 2, "logprobs": 2, **SEEDED}),
    "messages": ("/v1/messages", {"model": "mock", "max_tokens": 60, "messages": CHAT["messages"], "temperature": 0}),
    "generate": ("/v2/models/mock/generate", {"text_input": "Rome is", "parameters": SEEDED}),
    "infer": (
        "/v2/models/whole/infer",
        {
            "inputs": [
                {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Rome is"]},
                {"name": "sampling_parameters", "shape": [1], "datatype": "BYTES", "data": [json.dumps(SEEDED)]},
                {"name": "return_logprobs", "shape": [1], "datatype": "BOOL", "data": [True]},
            ]
        },
    ),
}
GENERATIONS = 3 + 2 + (len(ASKED) - 2) + 2 + 2
"""Choices of two answers, the other answers above, two over gRPC, and two that are passed on."""
UNDER_WAY = 5
"""Generations that an engine has when the host dies."""
SUCCESS = "vllm:request_success_total"
OF_ONE_ANSWER = {"id", "created", "created_at", "completed_at", "conversation", "cached_tokens"}
"""Choices of one request share its prompt if one has computed it when the next one begins."""


def models() -> list[ModelSetup]:
    template = thinking_template(ROOT / "model_repository" / "demo" / "1")
    parsers: dict[str, Any] = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "chat_template": template}
    engine: dict[str, Any] = {"mock_step_ms": 50, "max_model_len": 4096, "enable_prefix_caching": False}
    whole = mock("whole", **engine)
    return [mock("mock", **engine, **parsers), ModelSetup("whole", arguments=whole.arguments, is_decoupled=False)]


def same(answer: Any) -> Any:
    """What two answers to one request have in common."""
    if isinstance(answer, dict):
        return {name: same(value) for name, value in answer.items() if name not in OF_ONE_ANSWER}
    return [same(one) for one in answer] if isinstance(answer, list) else answer


class Client:
    """Of the frontends of one machine."""

    def __init__(self, machine: Machine) -> None:
        self.http = httpx.AsyncClient(base_url=f"http://{machine.address.http}", timeout=120)
        self._grpc = triton_grpc.InferenceServerClient(machine.address.grpc)
        self.refused: list[str] = []

    async def close(self) -> None:
        await self.http.aclose()
        await self._grpc.close()

    async def ask_all(self, turn: int) -> dict[str, Any]:
        """Whole answers of every protocol, all at the same time. turn: another number each time"""
        conversation = (await self.http.post("/v1/conversations", json={})).json()["id"]
        asks: dict[str, Awaitable[Any]] = {name: self._ask(*asked) for name, asked in ASKED.items()}
        asks |= {"ModelInfer": self._infer(), "ModelStreamInfer": self._stream_infer()}
        asks |= {"responses": self._respond(conversation), "keyed": self._ask_keyed(f"key {turn}")}
        return dict(zip(asks, await asyncio.gather(*asks.values()), strict=True))

    async def _ask(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        answer = await self.http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, (path, answer.text)
        return same(answer.json())

    async def _passed_on(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
        """Sent again while the host is away, as its client is told."""
        while (answer := await self.http.post(path, json=body, headers=headers)).status_code == 503:
            assert answer.headers["retry-after"] == "1"
            self.refused.append(path)
            await asyncio.sleep(0.2)
        assert answer.status_code == 200, (path, answer.text)
        return answer

    async def _ask_keyed(self, key: str) -> Any:
        """The third time it is replayed."""
        path, headers = "/v1/chat/completions", {"idempotency-key": key}
        first = await self._passed_on(path, CHAT, headers)
        again = await self._passed_on(path, CHAT, headers)
        assert again.headers["idempotent-replayed"] == "true" and again.content == first.content
        return same(first.json())

    async def _respond(self, conversation: str) -> Any:
        """The conversation then has each item once."""
        body = {"model": "mock", "input": "Plan a day", "max_output_tokens": 60, "temperature": 0}
        answer = await self._passed_on("/v1/responses", body | {"conversation": conversation}, {})
        response = answer.json()
        stored = await self.http.get(f"/v1/responses/{response['id']}")
        assert stored.json() == response
        items = (await self.http.get(f"/v1/conversations/{conversation}/items")).json()["data"]
        assert len(items) == 1 + len(response["output"])
        return same(response)

    async def _infer(self) -> Any:
        request = request_of(self._spec("whole"))
        result = await self._grpc.infer(request["model_name"], request["inputs"])
        return outputs_of_result(result)

    async def _stream_infer(self) -> Any:
        found = [outputs_of_result(one) async for one in results(self._grpc, request_of(self._spec("mock")))]
        return [one for one in found if one]

    @staticmethod
    def _spec(model: str) -> StreamSpec:
        return StreamSpec(1, "grpc", model, "Rome is", json.dumps(SEEDED), streams=False, logprobs=2)


async def under_kill(cluster: HostsCluster, client: Client, turn: int) -> dict[str, Any]:
    first, _ = cluster.machines
    asking = asyncio.create_task(client.ask_all(turn))
    await until_in_thread(lambda: first.metric("vllm:num_requests_running") >= UNDER_WAY, "answers are under way")
    first.host.kill()
    return await asking


async def test_whole_answers_are_the_same_when_their_host_is_killed_and_nothing_is_done_twice() -> None:
    async with hosts_cluster(models(), 2) as cluster:
        await cluster.until_whole()
        first, second = cluster.machines
        client = Client(first)
        expected = await client.ask_all(0)
        assert not client.refused
        before = await asyncio.to_thread(second.metric, SUCCESS)

        seen = await under_kill(cluster, client, 1)
        assert [name for name in expected if seen[name] != expected[name]] == []
        await cluster.until_whole()
        moved = await asyncio.to_thread(second.metric, SUCCESS) - before
        made_again = await asyncio.to_thread(first.metric, SUCCESS)
        assert moved and made_again and moved + made_again <= GENERATIONS, "no host counted what another answered"
        assert set(client.refused) == {"/v1/responses", "/v1/chat/completions"}
        assert (await client.http.get("/load")).json() == {"server_load": 0}
        assert not await cluster.still_busy()
        await client.close()
