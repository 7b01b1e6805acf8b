"""With batch_invariant what a request gets, its logprobs too, is the same bit by bit, however its prompt was cut and
whichever requests share its batches; and what cannot keep that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers as tf

from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.gpu.gpu_runner import HostSampling
from llmbackend.engine.gpu.make_gpu_runner import choose
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.loader import load_model
from tests.helpers.gpu.gpu_engines import config_for, gpu_runner
from tests.helpers.gpu.tiny_models import SIZES, save


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(tf.Qwen2Config(**SIZES | {"num_hidden_layers": 1}), path, torch.float32)
    return path


def request(name: str, prompt_len: int) -> InferRequest:
    sampling = SamplingParams(max_tokens=2, temperature=0.0, logprobs=3)
    prompt = tuple((7 * i + 5 * prompt_len) % 96 for i in range(prompt_len))
    return InferRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)


def outcome(model: Path, requests: list[InferRequest], **options: Any) -> list[Any]:
    """Tokens and logprobs of the first request."""
    config = config_for(model, max_num_seqs=2, block_size=16, enforce_eager=True, batch_invariant=True, **options)
    core = EngineCore(config, gpu_runner(config, sampling=HostSampling(2, 96, ()), triton=True))
    for each in requests:
        core.add(each)
    outputs = [output for _ in range(50) if core.has_work for output in core.step().outputs]
    assert not core.has_work
    core.close()
    found = [output for output in outputs if output.request_id == requests[0].request_id]
    assert not any(output.error for output in found)
    return [(output.token_ids, output.logprobs) for output in found if output.token_ids]


def test_neither_chunks_nor_neighbours_change_a_bit(model: Path) -> None:
    alone = outcome(model, [request("a", 19)])
    assert [len(logprobs) for _, logprobs in alone] == [1, 1]
    assert outcome(model, [request("a", 19), request("b", 5)], max_num_batched_tokens=13) == alone


def test_several_devices_are_refused(model: Path) -> None:
    loaded = load_model(config_for(model, block_size=16), dense=True)
    config = config_for(model, block_size=16, batch_invariant=True)
    config = msgspec.structs.replace(config, tensor_parallel_size=2, transport="process")
    with pytest.raises(ValueError, match="'tensor_parallel_size' is 2, expected 1 with batch_invariant"):
        choose(config, loaded, triton=True)
