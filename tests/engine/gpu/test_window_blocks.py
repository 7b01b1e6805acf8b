"""A model all of whose layers have a window takes as many KV blocks as the window, and gives the same tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import transformers as tf

from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.kv_groups import KVGroups
from llmbackend.engine.messages import InferRequest, SamplingParams
from tests.helpers.gpu.fake_device import FakeDevice
from tests.helpers.gpu.gpu_engines import GreedyOnDevice, config_for, gpu_runner
from tests.helpers.gpu.tiny_models import SIZES, save


def test_tokens_are_the_same_and_memory_is_bounded(tmp_path: Path) -> None:
    """On a device whose steps overlap."""
    save(tf.MistralConfig(**SIZES, sliding_window=9), tmp_path)
    config = config_for(tmp_path, max_num_seqs=2, block_size=4, max_num_batched_tokens=12, num_kv_blocks=40)
    requests = [
        InferRequest(
            request_id=str(i),
            prompt_token_ids=tuple(range(i, i + 30)),
            sampling=SamplingParams(max_tokens=50, temperature=0.0),
        )
        for i in range(2)
    ]
    runner = gpu_runner(config, FakeDevice(), sampling=GreedyOnDevice())
    assert runner.info.kv_groups == KVGroups(0, 1, 9)
    bounded, most = run(EngineCore(config, runner), requests)
    assert most <= 20
    runner = gpu_runner(config, FakeDevice(), sampling=GreedyOnDevice())
    runner._info = msgspec.structs.replace(runner.info, kv_groups=KVGroups())
    expected, all_blocks = run(EngineCore(config, runner), requests)
    assert bounded == expected
    assert all_blocks >= 38


def run(core: EngineCore, requests: list[InferRequest]) -> tuple[dict[str, list[int]], int]:
    """The tokens of each request, and the most blocks that were held at a time."""
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    most = 0
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step().outputs:
            assert not output.error
            tokens[output.request_id] += output.token_ids
        most = max(most, core.info.num_blocks - core._kv_cache.num_free_blocks)
    core.check()
    core.close()
    return tokens, most
