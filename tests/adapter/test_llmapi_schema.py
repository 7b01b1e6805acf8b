"""How requests of TensorRT-LLM's LLM API are read, where a real server cannot easily show it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.adapter.schemas import schema_for
from llmbackend.adapter.schemas.llmapi import INPUTS, OUTPUTS
from llmbackend.adapter.schemas.schema import LlmInputs
from llmbackend.adapter.schemas.vllm import INPUTS as VLLM_INPUTS
from llmbackend.core.backend_api import Tensor, TritonError
from tests.helpers.llmapi_repository import config_text

EXPLICIT = 'backend: "llm" parameters { key: "tensor_schema" value { string_value: "llmapi" } }'


def config_of(pbtxt: str) -> ModelConfig:
    config: ModelConfig = text_format.Parse(pbtxt, ModelConfig())
    return schema_for(config).complete(config)


def read(pbtxt: str = EXPLICIT, **arrays: Any) -> LlmInputs:
    values = {"text_input": np.array([b"a"], np.object_), **arrays}
    tensors = {name: Tensor.of(name, np.asarray(value)) for name, value in values.items()}
    request: Any = SimpleNamespace(inputs=tensors, requested_outputs=tuple(OUTPUTS))
    [inputs] = schema_for(config_of(pbtxt)).read(request)
    return inputs


def test_the_layouts_own_declarations_fit_and_the_rest_is_added() -> None:
    declared = text_format.Parse(config_text("tensorrt_llm"), ModelConfig())
    completed = config_of(config_text("tensorrt_llm"))
    assert [one.name for one in completed.input[: len(declared.input)]] == [one.name for one in declared.input]
    assert all(one.optional for one in completed.input)
    added = {one.name for one in completed.input[len(declared.input) :]}
    assert added == {"sampling_param_logits_post_processor_name"} | VLLM_INPUTS.keys() - INPUTS.keys()
    assert completed.output[: len(declared.output)] == list(declared.output)
    with pytest.raises(TritonError, match="input 'INPUT0' is not one of the llm backend's"):
        config_of('backend: "python" input { name: "INPUT0" data_type: TYPE_INT32 dims: 1 }')


def test_defaults_are_those_of_the_llm_api() -> None:
    inputs = read()
    assert inputs.sampling == {"max_tokens": 32, "temperature": 0.0}
    assert inputs.options.outputs == {"text_output"}
    assert inputs.options.prepend_prompt
    hot = read(sampling_param_top_p=[np.float32(0.5)], sampling_param_seed=np.array([2**64 - 1], np.uint64))
    assert hot.sampling == {"max_tokens": 32, "top_p": 0.5, "seed": 2**63 - 1}


def test_an_adapter_is_chosen_by_its_name_alone() -> None:
    name, path = np.array([b"poet"], np.object_), np.array([b"/adapters/other"], np.object_)
    inputs = read(lora_name=name, lora_path=path, lora_id=np.array([3], np.uint64))
    assert inputs.sampling["lora_name"] == "poet"
