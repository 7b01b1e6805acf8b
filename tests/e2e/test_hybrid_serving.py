"""A whole server of a model with recurrent layers: the same tokens on every protocol, in company, behind a prefix that
is known, with drafts, and over the death of its engine."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoTokenizer

from llmbackend.engine.kernels import library
from tests.e2e.test_few_descriptors import engine_pids
from tests.e2e.test_laws import mixed_jobs, run_streams
from tests.helpers.recurrent_models import make_recurrent, spread_model
from tests.helpers.server_process import ROOT, ServerProcess, running_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

ENGINE = {
    "dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "num_kv_blocks": 10, "max_num_batched_tokens": 64,
    "block_size": 32, "speculative_config": {"num_speculative_tokens": 4, "prompt_lookup_min": 1},
}  # fmt: skip
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPT = "What is continuous batching?"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The version directory of a repository's model; few blocks, so that requests are preempted."""
    version = tmp_path_factory.mktemp("repository") / "hybrid" / "1"
    shutil.copytree(ROOT / "model_repository" / "demo" / "1", version)
    make_recurrent(version)
    (version / "model.json").write_text(json.dumps({"model": ".", **ENGINE}))
    (version.parent / "config.pbtxt").write_text('backend: "llm"\n')
    return version


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with running_server("--model-repository", str(checkpoint.parents[1])) as running:
        yield running


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[int]:
    """By transformers."""
    model = type(spread_model("qwen3_5")).from_pretrained(checkpoint)
    ids = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt").input_ids
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return [int(token) for token in output[0, ids.shape[1] :]]


def generated(server: ServerProcess, prompt: str, **sampling: Any) -> Iterator[dict[str, Any]]:
    """Events of generate_stream, as they come."""
    body = {"text_input": prompt, "stream": True, "return_output_ids": True, "parameters": GREEDY | sampling}
    url = f"http://{server.http}/v2/models/hybrid/generate_stream"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            if line:
                yield json.loads(line.removeprefix("data: "))


def tokens_of(events: Iterable[dict[str, Any]]) -> list[int]:
    """An event of one token has it as a number."""
    return [int(token) for event in events for token in np.atleast_1d(event["output_ids"])]


def openai_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0)


def test_every_protocol_gives_transformers_tokens(server: ServerProcess, expected: list[int]) -> None:
    assert tokens_of(generated(server, PROMPT)) == expected
    assert run_streams(server.grpc, "hybrid", [(PROMPT, GREEDY)]) == [tuple(expected)]
    with openai_of(server) as client:
        extra = {"ignore_eos": True, "return_token_ids": True}
        done = client.completions.create(model="hybrid", prompt=PROMPT, max_tokens=24, temperature=0, extra_body=extra)
    assert done.choices[0].model_extra is not None and done.choices[0].model_extra["token_ids"] == expected


def test_company_preemption_and_drafts_change_no_token(server: ServerProcess) -> None:
    jobs = mixed_jobs(seed=3, count=24)
    together = run_streams(server.grpc, "hybrid", jobs)
    assert server.metric("vllm:num_preemptions_total", "hybrid") > 0
    assert server.metric("vllm:spec_decode_num_draft_tokens_total", "hybrid") > 0
    assert together == [run_streams(server.grpc, "hybrid", [job])[0] for job in jobs]
    server.wait_until_idle("hybrid")


def test_a_known_prefix_is_not_computed_again(server: ServerProcess) -> None:
    prompt = PROMPT * 12
    fresh = tokens_of(generated(server, prompt))
    before = server.metric("vllm:prefix_cache_hits_total", "hybrid")
    assert tokens_of(generated(server, prompt)) == fresh
    assert server.metric("vllm:prefix_cache_hits_total", "hybrid") > before


def test_a_chat_keeps_to_its_schema(server: ServerProcess) -> None:
    properties = {"city": {"enum": ["Rome", "Oslo"]}}
    city = {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}
    schema: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": city}}
    with openai_of(server) as client:
        answer = client.chat.completions.create(
            model="hybrid", messages=[{"role": "user", "content": PROMPT}], response_format=schema, temperature=0
        )
    assert json.loads(answer.choices[0].message.content or "")["city"] in ("Rome", "Oslo")


def test_a_killed_engine_loses_no_token(server: ServerProcess) -> None:
    whole = tokens_of(generated(server, PROMPT, max_tokens=200))
    events = generated(server, PROMPT, max_tokens=200)
    begun = tokens_of([next(events)])
    (engine,) = engine_pids(server)
    os.kill(engine, signal.SIGKILL)
    assert begun + tokens_of(events) == whole
    assert engine_pids(server) != [engine]
