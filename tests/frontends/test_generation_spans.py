"""Spans of generations: queue, prefill, decode, preemption, recovery and grammar, with GenAI's attributes, from a real
server with a real engine process to a real OTLP receiver."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.helpers.server_process import ServerProcess, running_server, write_mock_model
from tests.helpers.waiting import eventually

pytest.importorskip("opentelemetry.sdk")
from tests.helpers.otlp_collector import Collector, attributes, collecting, events

pytestmark = pytest.mark.slow

BLOCK_TOKENS, NUM_BLOCKS, CHUNK_TOKENS = 8, 24, 32
SECRET = "tangerine"


@dataclass(frozen=True)
class Traced:
    server: ServerProcess
    collector: Collector

    def ask(self, **body: Any) -> tuple[str, httpx.Response]:
        """A completion that its client traces; the id of the trace, and the answer."""
        trace_id = secrets.token_hex(16)
        parent = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
        url = f"http://{self.server.http}/v1/completions"
        return trace_id, httpx.post(url, json={"model": "mock", **body}, headers=parent, timeout=60)

    def spans(self, trace_id: str) -> list[Any]:
        """All spans of a trace, whose root is sent last."""
        found: list[Any] = []

        def is_whole() -> bool:
            found[:] = [span for span in self.collector.spans if span.trace_id.hex() == trace_id]
            return any(span.name == "InferRequest" for span in found)

        eventually(is_whole)
        return sorted(found, key=lambda span: span.start_time_unix_nano)

    def named(self, trace_id: str, name: str) -> Any:
        (span,) = [span for span in self.spans(trace_id) if span.name == name]
        return span


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    models = tmp_path_factory.mktemp("spans") / "models"
    engine: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_blocks": NUM_BLOCKS,
        "max_num_batched_tokens": CHUNK_TOKENS,
    }
    write_mock_model(models, max_model_len=180, mock_step_ms=2, **engine)
    with collecting() as collector:
        sink = (f"opentelemetry,url={collector.url}", "opentelemetry,bsp_schedule_delay=20")
        settings = ("level=TIMESTAMPS", "rate=0", "mode=opentelemetry", *sink)
        flags = [flag for each in settings for flag in ("--trace-config", each)]
        with running_server("--model-repository", str(models), *flags) as server:
            yield Traced(server, collector)


def test_a_generation_is_a_queue_a_prefill_in_chunks_and_a_decode(traced: Traced) -> None:
    prompt = f"{SECRET} " * 8
    trace_id, answer = traced.ask(prompt=prompt, max_tokens=12, temperature=0.5, seed=3, ignore_eos=True)
    usage = answer.json()["usage"]
    root, model = traced.named(trace_id, "InferRequest"), traced.named(trace_id, "mock")
    assert answer.headers["traceparent"] == f"00-{trace_id}-{root.span_id.hex()}-01"
    names = [span.name for span in traced.spans(trace_id) if span.parent_span_id == model.span_id]
    assert sorted(names) == ["compute", "decode", "prefill", "prepare", "queue"]
    queue, prefill, decode = (traced.named(trace_id, name) for name in ("queue", "prefill", "decode"))
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
    num_chunks = -(-usage["prompt_tokens"] // CHUNK_TOKENS)
    assert attributes(prefill) == {
        "llmbackend.prompt_tokens": usage["prompt_tokens"],
        "llmbackend.cached_tokens": 0,
        "llmbackend.chunks": num_chunks,
    }
    assert events(prefill) == ["chunk"] * num_chunks and num_chunks > 1
    assert sum(attributes(event)["llmbackend.tokens"] for event in prefill.events) == usage["prompt_tokens"]
    assert attributes(decode) == {"llmbackend.output_tokens": 12, "llmbackend.steps": 12}
    told = {name: value for name, value in attributes(model).items() if name.startswith("gen_ai.")}
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "llmbackend",
        "gen_ai.request.model": "mock",
        "gen_ai.response.model": "mock",
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.output_tokens": 12,
    }
    assert SECRET.encode() not in b"".join(span.SerializeToString() for span in traced.spans(trace_id))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ],
)
def test_conversations_of_every_api_are_chats(traced: Traced, path: str, body: dict[str, Any]) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    answer = httpx.post(f"http://{traced.server.http}{path}", json={"model": "mock", **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["traceparent"].startswith(f"00-{trace_id}-")
    assert attributes(traced.named(trace_id, "mock"))["gen_ai.operation.name"] == "chat"
    assert traced.named(trace_id, "decode")


def test_a_client_that_goes_away_aborts_the_generation(traced: Traced) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    body = {"model": "mock", "prompt": "a b c", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"http://{traced.server.http}/v1/completions", json=body, headers=headers) as stream:
        next(stream.iter_lines())
    told = attributes(traced.named(trace_id, "mock"))
    assert told["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < told["gen_ai.usage.output_tokens"] < 150


def test_cached_tokens_are_no_chunk_and_choices_are_told_apart(traced: Traced) -> None:
    prompt = "the same beginning of sixty-four tokens or a few more than that ok"
    for _ in range(2):
        trace_id, answer = traced.ask(prompt=prompt, max_tokens=3, n=2, ignore_eos=True)
    model, spans = traced.named(trace_id, "mock"), traced.spans(trace_id)
    prefills = [attributes(span) for span in spans if span.name == "prefill"]
    assert {told["llmbackend.choice"] for told in prefills} == {0, 1}
    assert all(told["llmbackend.cached_tokens"] == 64 and told["llmbackend.chunks"] == 1 for told in prefills)
    told = attributes(model)
    assert told["gen_ai.request.choice.count"] == 2 and told["gen_ai.response.finish_reasons"] == ["length"] * 2
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (len(prompt), 6)
    assert told["gen_ai.usage.cache_read.input_tokens"] == 64
    assert answer.json()["usage"]["prompt_tokens"] == len(prompt)


def test_preemption_and_grammar(traced: Traced) -> None:
    bodies = [{"prompt": letter * 80, "max_tokens": 90, "ignore_eos": True} for letter in "xyz"]
    with ThreadPoolExecutor(len(bodies)) as threads:
        asked = list(threads.map(lambda body: traced.ask(**body), bodies))
    spans = [span for trace_id, _ in asked for span in traced.spans(trace_id) if span.name == "preemption"]
    assert spans and all(attributes(span) == {"llmbackend.reason": "no free KV blocks"} for span in spans)
    assert all(span.start_time_unix_nano < span.end_time_unix_nano for span in spans)
    trace_id, answer = traced.ask(prompt="a", max_tokens=20, structured_outputs={"choice": ["yes", "no"]})
    assert answer.json()["choices"][0]["text"] in ("yes", "no")
    check, compile_ = traced.named(trace_id, "check grammar"), traced.named(trace_id, "compile grammar")
    assert check.end_time_unix_nano <= compile_.start_time_unix_nano <= compile_.end_time_unix_nano


def test_the_death_of_an_engine_is_a_recovery(traced: Traced) -> None:
    trace_id = secrets.token_hex(16)
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    body = {"model": "mock", "prompt": "a b c", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"http://{traced.server.http}/v1/completions", json=body, headers=headers) as stream:
        for number, _ in enumerate(stream.iter_lines()):
            if number == 4:
                (fork_server,) = psutil.Process(traced.server.process.pid).children()
                os.kill(fork_server.children()[0].pid, signal.SIGKILL)
    recovery, decode = traced.named(trace_id, "recovery"), traced.named(trace_id, "decode")
    told = attributes(recovery)
    assert told["llmbackend.causes"] == ["killed"] and 0 < told["llmbackend.output_tokens"] < 60
    assert decode.start_time_unix_nano < recovery.start_time_unix_nano < recovery.end_time_unix_nano
    assert recovery.end_time_unix_nano < decode.end_time_unix_nano
    assert attributes(decode)["llmbackend.output_tokens"] == 60


def test_an_error_is_the_status_of_the_models_span(traced: Traced) -> None:
    trace_id, answer = traced.ask(prompt="a", max_tokens=3, structured_outputs={"regex": "("})
    assert answer.status_code == 400
    model = traced.named(trace_id, "mock")
    assert model.status.code == model.status.STATUS_CODE_ERROR
    assert attributes(model)["error.type"] == "INVALID_ARG"


def test_a_stream_of_grpc_is_traced_and_a_request_that_nobody_traces_is_not(traced: Traced) -> None:
    request = pb.ModelInferRequest(model_name="mock")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    trace_id = secrets.token_hex(16)
    parent = (("traceparent", f"00-{trace_id}-b7ad6b7169203331-01"),)
    with grpc.insecure_channel(traced.server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        responses = list(stub.ModelStreamInfer(iter([request]), metadata=parent))
        assert not responses[-1].error_message
    assert attributes(traced.named(trace_id, "mock"))["gen_ai.usage.input_tokens"] == 1
    url = f"http://{traced.server.http}/v1/completions"
    assert "traceparent" not in httpx.post(url, json={"model": "mock", "prompt": "a", "max_tokens": 1}).headers
