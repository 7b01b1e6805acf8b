"""A program that embeds an engine and a server (docs/embedding.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import assert_type

import llmbackend
from llmbackend import (
    DEMO_MODEL,
    DEMO_REPOSITORY,
    Completion,
    Engine,
    Generation,
    Logprob,
    Prompt,
    SamplingParams,
    Server,
    TritonError,
    Usage,
)


def texts(prompts: Sequence[Prompt]) -> list[str]:
    sampling = SamplingParams(max_tokens=8, temperature=0, stop=["\n"], structured_outputs={"choice": ["a", "b"]})
    try:
        with Engine(DEMO_MODEL, max_model_len=1024) as engine:
            assert_type(engine, Engine)
            found = engine.generate(prompts, sampling)
            assert_type(found, list[Generation])
            assert_type(engine.stream(prompts[0]), Iterator[Completion])
            return [generation.text for generation in found]
    except TritonError as error:
        assert_type(error.message, str)
        assert_type(error.param, str | None)
        raise


def summary(generation: Generation) -> str:
    first = generation.completions[0]
    assert_type(first, Completion)
    usage: Usage | None = first.usage
    tokens = 0 if usage is None else usage.completion_tokens
    return f"{first.text} {first.finish_reason} {tokens}"


def likely(logprob: Logprob) -> bool:
    return logprob.logprob is not None and logprob.logprob > -1.0


async def parts(engine: Engine, prompt: Prompt) -> AsyncIterator[str]:
    for generation in await engine.generate_async([prompt]):
        yield generation.text
    async for part in engine.stream_async(prompt):
        assert_type(part, Completion)
        yield part.text


def address(arguments: Sequence[str]) -> str:
    assert_type(DEMO_REPOSITORY, Path)
    with Server(model_repository=DEMO_REPOSITORY, arguments=arguments, stop_timeout_s=5) as server:
        assert_type(server, Server)
        return f"{server.http_url} {server.grpc_url} {server.metrics_url} {llmbackend.__version__}"
