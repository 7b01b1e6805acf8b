"""Hosts that die, fall silent or end under streams: another host goes on behind what was delivered."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbackend.core.errors import ErrorCode, TritonError
from llmbackend.core.messages import InferenceRequest, InferenceResponse
from llmbackend.core.tensors import Tensor
from llmbackend.frontends.inference_gate import InferenceGate
from llmbackend.remote.remote_server import RemoteServer
from tests.helpers.mock_llm_host import ENGINE, MODEL
from tests.helpers.waiting import eventually_async
from tests.remote.linked_host import attached
from tests.remote.processes import HostProcess, hosts, relayed

STREAMS = 12
TOKENS = 60
STEP_MS = 20


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    version = tmp_path / "models" / MODEL / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text('backend: "llm"\n')
    (version / "model.json").write_text(json.dumps(ENGINE | {"mock_step_ms": STEP_MS}))
    return tmp_path / "models"


def stream_request(index: int) -> InferenceRequest:
    """Different kinds in turn; the seed is the host's own."""
    sampling: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0.9}
    sampling |= [{}, {"n": 2}, {"logprobs": 2}][index % 3]
    flags = ["stream", "return_finish_reason", "return_num_output_tokens"]
    flags += [[], ["return_sequence_index"], ["return_logprobs"]][index % 3]
    return InferenceRequest(
        MODEL,
        id=f"stream {index}",
        inputs=(
            Tensor.text("text_input", f"prompt {index}"),
            Tensor.text("sampling_parameters", json.dumps(sampling)),
            *(Tensor.of(name, np.array([True])) for name in flags),
        ),
    )


class Stream:
    """One request and what has come of it."""

    def __init__(self, gate: InferenceGate, request: InferenceRequest) -> None:
        self.responses: list[InferenceResponse] = []
        self.task = asyncio.create_task(self._read(gate, request))

    async def _read(self, gate: InferenceGate, request: InferenceRequest) -> None:
        inference = await gate.send(request)
        try:
            while (item := await inference.next()) is not None:
                if item[0] is not None:
                    self.responses.append(item[0])
        finally:
            inference.close()

    @property
    def errors(self) -> list[str]:
        return [str(one.error) for one in self.responses if one.error is not None]

    @property
    def tokens(self) -> dict[int, int]:
        """How many of each choice."""
        found: dict[int, int] = {}
        for response in self.responses:
            values = {tensor.name: tensor.data.ravel()[0] for tensor in response.outputs}
            index = int(values.get("sequence_index", 0))
            found[index] = found.get(index, 0) + int(values.get("num_output_tokens", 0))
        return found


async def disturbed(server: RemoteServer, disturb: Callable[[], Awaitable[None]]) -> list[Stream]:
    """Streams whose host is disturbed once all of them have begun; each to its end."""
    gate = InferenceGate(server)
    streams = [Stream(gate, stream_request(index)) for index in range(STREAMS)]
    await eventually_async(lambda: all(len(stream.responses) > 3 for stream in streams))
    assert not any(stream.task.done() for stream in streams), "they are over too soon"
    await disturb()
    await asyncio.gather(*(stream.task for stream in streams))
    gate.close()
    return streams


def check_whole(streams: list[Stream]) -> None:
    for index, stream in enumerate(streams):
        assert stream.errors == []
        choices = 2 if index % 3 == 1 else 1
        assert stream.tokens == dict.fromkeys(range(choices), TOKENS), index


async def kill(host: HostProcess) -> None:
    host.kill()


def test_a_killed_host_loses_no_stream(repository: Path, tmp_path: Path) -> None:
    async def run(first: HostProcess, second: HostProcess) -> None:
        async with attached(first.endpoint, second.endpoint) as server:
            await eventually_async(lambda: len(server._attached_hosts()) == 2)
            check_whole(await disturbed(server, lambda: kill(first)))

    with hosts(repository, f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b") as (first, second):
        asyncio.run(run(first, second))


def test_a_partition_loses_no_stream_and_delivers_nothing_twice(repository: Path, tmp_path: Path) -> None:
    async def run(first: HostProcess, second: HostProcess) -> None:
        async with relayed(first.endpoint, tmp_path) as relay:

            async def cut() -> None:
                relay.cut()

            async with attached(relay.endpoint, second.endpoint, heartbeat_timeout_s=1.0) as server:
                await eventually_async(lambda: len(server._attached_hosts()) == 2)
                check_whole(await disturbed(server, cut))

    with hosts(repository, f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b") as (first, second):
        asyncio.run(run(first, second))


def test_streams_move_from_a_host_that_ends(repository: Path, tmp_path: Path) -> None:
    async def run(first: HostProcess, second: HostProcess) -> None:
        async def end() -> None:
            first.tell_to_end()

        async with attached(first.endpoint, second.endpoint) as server:
            await eventually_async(lambda: len(server._attached_hosts()) == 2)
            check_whole(await disturbed(server, end))
            await eventually_async(lambda: first.process.poll() is not None)

    with hosts(repository, f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b") as (first, second):
        asyncio.run(run(first, second))


def test_a_stream_waits_for_a_host_that_comes_back_and_fails_when_none_does(repository: Path, tmp_path: Path) -> None:
    endpoint, other = f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"  # nobody is at the second

    async def run(first: HostProcess) -> None:
        async with attached(endpoint, other) as server:
            server._wait_for_host_s = 300.0
            with contextlib.ExitStack() as later:

                async def restart() -> None:
                    first.kill()
                    await eventually_async(lambda: not server.is_ready())
                    (again,) = await asyncio.to_thread(later.enter_context, hosts(repository, endpoint))
                    assert again.process.poll() is None

                check_whole(await disturbed(server, restart))
                server._wait_for_host_s = 0.2
                later.close()
            gate = InferenceGate(server)
            waiting = Stream(gate, stream_request(0))
            with pytest.raises(TritonError, match="no host took the request within") as caught:
                await waiting.task
            assert caught.value.code is ErrorCode.UNAVAILABLE
            gate.close()

    with hosts(repository, endpoint) as (first,):
        asyncio.run(run(first))
