"""Where some layers have a window and others see all, a request gives back the former's KV blocks; tokens stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.gpu import make_gpu_runner
from llmbackend.engine.kv_groups import KVGroups, layer_groups
from llmbackend.engine.messages import InferRequest, SamplingParams
from tests.helpers.gpu.fake_device import FakeDevice
from tests.helpers.gpu.gpu_engines import GreedyOnDevice, config_for, gpu_runner
from tests.helpers.gpu.tiny_models import SIZES, save

SEES_WINDOW, SEES_ALL = "sliding_attention", "full_attention"
MODELS: dict[str, tuple[Any, KVGroups]] = {
    "gemma3": (
        tf.Gemma3TextConfig(**SIZES | {"num_hidden_layers": 6}, head_dim=32, sliding_window=9,
                            tie_word_embeddings=False, layer_types=[SEES_WINDOW] * 5 + [SEES_ALL]),
        KVGroups(1, 5, 9),
    ),
    "qwen3": (  # one to one, as gpt-oss
        tf.Qwen3Config(**SIZES | {"num_hidden_layers": 4}, head_dim=32, use_sliding_window=True, sliding_window=9,
                       layer_types=[SEES_WINDOW, SEES_ALL] * 2),
        KVGroups(1, 1, 9),
    ),
}  # fmt: skip


def requests() -> list[InferRequest]:
    """Two begin alike."""
    return [
        InferRequest(
            request_id=str(i),
            prompt_token_ids=(*range(i % 2, 12), i, *range(3 * i)),
            sampling=SamplingParams(max_tokens=44, temperature=0.0),
        )
        for i in range(3)
    ]


def run(path: Path, groups: KVGroups, num_kv_blocks: int, **options: Any) -> tuple[dict[str, list[int]], int, int]:
    """On a device whose steps overlap: tokens, the most blocks held at once, and preemptions."""
    config = config_for(
        path,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        block_size=4,
        num_kv_blocks=num_kv_blocks,
        cudagraph_capture_sizes=(1, 2, 3, 16),
        **options,
    )
    runner = gpu_runner(config, FakeDevice(), sampling=GreedyOnDevice())
    assert runner.info.kv_groups == groups
    core, most = EngineCore(config, runner), 0
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests()}
    for request in requests():
        core.add(request)
    while core.has_work:
        result = core.step()
        for output in result.outputs:
            assert not output.error
            tokens[output.request_id] += output.token_ids
        most = max(most, core.info.num_blocks - core._kv_cache.num_free_blocks)
    core.check()
    core.close()
    return tokens, most, result.stats.num_preemptions


@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_rows_that_keep_all(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_config, groups = MODELS[family]
    save(hf_config, tmp_path)
    of_windows, most, _ = run(tmp_path, groups, 40 * groups.count)
    assert most <= 3 * groups.max_blocks(63, 32, 4)  # two steps are in flight
    prompts = [len(request.prompt_token_ids) for request in requests()]
    few = sum(groups.max_blocks(length + 1, 16, 4) for length in prompts)
    in_few_blocks, _, num_preemptions = run(tmp_path, groups, few, enforce_eager=True)
    assert num_preemptions > 0
    layers = layer_groups([0] * hf_config.num_hidden_layers, 128, True)
    monkeypatch.setattr(make_gpu_runner, "layer_groups", lambda *_: layers)
    expected, _, _ = run(tmp_path, KVGroups(), 120)
    assert of_windows == in_few_blocks == expected
    assert all(len(set(token_ids)) > 5 for token_ids in expected.values())


def test_blocks_that_are_copied_to_host_memory_are_of_all_layers(tmp_path: Path) -> None:
    save(MODELS["gemma3"][0], tmp_path)
    config = config_for(tmp_path, num_host_kv_blocks=8)
    runner = gpu_runner(config)
    assert runner.info.kv_groups == KVGroups()
    runner.close()
