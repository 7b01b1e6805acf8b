"""The first law, on CPU bit by bit: a request's tokens and logprobs do not depend on its neighbours, on the chunks of
its prompt or on preemption, in float32 and in bfloat16, where a difference of one rounding would show in near-ties."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.infer_request import InferRequest, SamplingParams, TokenLogprobs
from llmbackend.engine.model_runner import ModelRunner

Story = list[TokenLogprobs]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def requests() -> list[InferRequest]:
    generator = torch.Generator().manual_seed(2)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 7, "top_p": 0.95},
        {"temperature": 1.0, "seed": 8},
        {"temperature": 0.0, "repetition_penalty": 1.3},
        {"temperature": 0.7, "seed": 9, "top_k": 20, "presence_penalty": 0.4},
    ]
    return [
        InferRequest(
            request_id=str(i),
            prompt_token_ids=tuple(torch.randint(0, 512, (length,), generator=generator).tolist()),
            sampling=SamplingParams(max_tokens=16, ignore_eos=True, logprobs=1, **kinds[i % len(kinds)]),
        )
        for i, length in enumerate((45, 3, 17, 1, 70, 32, 33, 8))
    ]


def run(path: Path, wanted: list[InferRequest], dtype: Any, **options: Any) -> tuple[dict[str, Story], int]:
    """Each request's tokens with their logprobs, and the number of preemptions."""
    config = EngineConfig(
        model=str(path), load_format="dummy", transport="inline", dtype=dtype, block_size=8, **options
    )
    core = EngineCore(config, ModelRunner(config))
    stories: dict[str, Story] = {}
    for request in wanted:
        core.add(request)
    preemptions = 0
    while core.has_work:
        result = core.step()
        preemptions = result.stats.num_preemptions
        for output in result.outputs:
            assert not output.error
            stories.setdefault(output.request_id, []).extend(output.logprobs)
    core.close()
    return stories, preemptions


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_same_request_same_tokens(dtype: str, kv_heads: int, tmp_path: Path) -> None:
    config = tf.Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        max_position_embeddings=128,
        initializer_range=0.1,
    )
    config.save_pretrained(tmp_path)
    together, _ = run(tmp_path, requests(), dtype)
    assert all(len(story) == 16 for story in together.values())
    for request in requests():
        assert run(tmp_path, [request], dtype, max_num_seqs=1)[0][request.request_id] == together[request.request_id]
    cramped, preemptions = run(tmp_path, requests(), dtype, num_kv_blocks=14, max_num_batched_tokens=9)
    assert preemptions > 0
    assert cramped == together
