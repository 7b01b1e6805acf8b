"""The native program where some layers have a window and others see all: the bits of one that keeps all blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.native_runner import NativeRunner
from llmbackend.engine.cpu.packed_decoder import PackedDecoder, PackedModel
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.kernels import library
from llmbackend.engine.kv_groups import KVGroups, layer_groups
from llmbackend.engine.load_forecast import forecast
from llmbackend.engine.messages import InferRequest, SamplingParams, StepOutput
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.packing import pack_model
from tests.engine.test_decoder_program import SIZES, save

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

LONG = SIZES | {"max_position_embeddings": 512}
SEES_WINDOW, SEES_ALL = "sliding_attention", "full_attention"
MODELS: dict[str, tuple[Any, KVGroups]] = {
    "gemma3": (
        tf.Gemma3TextConfig(**LONG | {"num_hidden_layers": 6}, head_dim=32, sliding_window=40,
                            layer_types=[SEES_WINDOW] * 5 + [SEES_ALL]),
        KVGroups(1, 5, 40),
    ),
    "gemma2": (
        tf.Gemma2Config(**LONG | {"num_hidden_layers": 4}, head_dim=32, sliding_window=40, attn_logit_softcapping=2.0,
                        layer_types=[SEES_WINDOW, SEES_ALL] * 2),
        KVGroups(1, 1, 40),
    ),
}  # fmt: skip


def config_of(path: Path, **options: Any) -> EngineConfig:
    options = {"num_threads": 1, "max_num_batched_tokens": 64, "step_target_ms": 0, "max_num_seqs": 2} | options
    return EngineConfig(model=str(path), transport="inline", **options)


def requests() -> list[InferRequest]:
    """The third begins like the first, and is long behind that."""
    prompts = [[*range(100)], [7, *range(20)], [*range(70), 9, *range(80)]]
    return [
        InferRequest(
            request_id=str(i),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=36, temperature=0.0, ignore_eos=True, logprobs=1),
        )
        for i, prompt in enumerate(prompts)
    ]


def run(config: EngineConfig, model: PackedModel) -> tuple[list[StepOutput], int, int, int]:
    """The outputs, the most blocks that were held at once, preemptions, and tokens found in the prefix cache."""
    core, most = EngineCore(config, NativeRunner(config, model)), 0
    outputs: list[StepOutput] = []
    for request in requests():
        core.add(request)
    while core.has_work:
        result = core.step()
        outputs += result.outputs
        most = max(most, core.info.num_blocks - core._kv_cache.num_free_blocks)
        core.check()
    core.close()
    return outputs, most, result.stats.num_preemptions, result.stats.prefix_cache_hits


def by_request(outputs: list[StepOutput]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for output in outputs:
        assert not output.error
        found.setdefault(output.request_id, []).extend(zip(output.token_ids, output.logprobs, strict=True))
    return found


@pytest.mark.parametrize("family", MODELS)
def test_tokens_and_logprobs_are_those_of_rows_that_keep_all(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    hf_config, groups = MODELS[family]
    save(hf_config, tmp_path)
    model = pack_model(config_of(tmp_path), load_model(config_of(tmp_path)))
    plenty, few = (
        config_of(tmp_path, num_kv_blocks=200),
        config_of(tmp_path, num_kv_blocks=groups.max_blocks(190, 1, 32)),
    )
    assert NativeRunner(plenty, model).info.kv_groups == groups
    outputs, most, num_preemptions, num_hits = run(plenty, model)
    assert num_hits >= 64 and not num_preemptions
    assert most <= 2 * groups.max_blocks(190, 64, 32)
    in_few_blocks, _, num_preemptions, _ = run(few, model)
    assert num_preemptions > 0
    with monkeypatch.context() as patch:
        one = layer_groups([0] * len(model.decoder.layers), 512, True)
        patch.setattr(PackedDecoder, "layer_groups", one)
        assert NativeRunner(plenty, model).info.kv_groups == KVGroups()
        expected, _, _, _ = run(plenty, model)
    assert by_request(outputs) == by_request(in_few_blocks) == by_request(expected)


def test_memory_is_counted_by_blocks_of_a_group(tmp_path: Path) -> None:
    hf_config, groups = MODELS["gemma3"]
    save(hf_config, tmp_path)
    config = config_of(tmp_path, kv_cache_memory_bytes=3 << 20)
    model = pack_model(config, load_model(config))
    info = NativeRunner(config, model).info
    bytes_per_block = 32 * 2 * 2 * 32 * 4  # of the one layer that sees all
    assert info.num_blocks == (3 << 20) // bytes_per_block == 192
    assert info.kv_bytes_per_token == 6 * bytes_per_block // 32
    forecasted = forecast(msgspec.structs.replace(config, max_num_seqs=99))
    assert (forecasted.num_kv_blocks, forecasted.kv_bytes) == (192, 3 << 20)
    assert forecasted.full_length_requests == 192 // groups.max_blocks(512, 64, 32)
