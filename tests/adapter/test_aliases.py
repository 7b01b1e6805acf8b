"""Repositories of vllm_backend and of TensorRT-LLM, served by the same backend under their own backend names."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import text_format
from prometheus_client import generate_latest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.adapter.engine_args import ModelArguments, check_checkpoint, read_model_arguments
from llmbackend.core.backend_api import TritonError
from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions
from llmbackend.engine.config import EngineConfig
from tests.helpers.llm_host import ENGINE, LlmHost

GPU_TREE = """
parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }
parameters { key: "gpt_model_type" value { string_value: "inflight_fused_batching" } }
parameters { key: "batch_scheduler_policy" value { string_value: "guaranteed_no_evict" } }
parameters { key: "kv_cache_free_gpu_mem_fraction" value { string_value: "0.9" } }
parameters { key: "max_beam_width" value { string_value: "1" } }
parameters { key: "max_attention_window_size" value { string_value: "${max_attention_window_size}" } }
parameters { key: "medusa_choices" value { string_value: "" } }
parameters { key: "enable_kv_cache_reuse" value { string_value: "False" } }
parameters { key: "max_tokens_in_paged_kv_cache" value { string_value: "100" } }
parameters { key: "executor_worker_path" value { string_value: "/opt/tritonserver/backends/tensorrtllm/x" } }
"""


def arguments(directory: Path, pbtxt: str, **model_json: Any) -> ModelArguments:
    (directory / "1").mkdir(exist_ok=True)
    if model_json:
        (directory / "1" / "model.json").write_text(json.dumps(model_json))
    config = text_format.Parse(pbtxt, ModelConfig())
    model: Any = SimpleNamespace(config=config, directory=directory, version_directory=directory / "1")
    return read_model_arguments(model)


def refusal(directory: Path, pbtxt: str, **model_json: Any) -> str:
    with pytest.raises(TritonError) as caught:
        arguments(directory, pbtxt, **model_json)
    return caught.value.message


@pytest.mark.parametrize("backend", ["vllm", "tensorrtllm"])
def test_a_repository_of_another_backend_is_served_unchanged(tmp_path: Path, backend: str) -> None:
    version = tmp_path / "mock_llm" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({**ENGINE, "disable_log_requests": "true", "swap_space": 4}))
    group = "instance_group [ { count: 1 kind: KIND_MODEL } ]"
    (version.parent / "config.pbtxt").write_text(f'backend: "{backend}"\n{group}\n{GPU_TREE * (backend != "vllm")}')
    server = InferenceServer(ServerOptions(model_repositories=(tmp_path,), model_control_mode="none"))
    server.start()
    try:
        assert server.model_is_ready("mock_llm")
        if backend == "vllm":
            call = LlmHost(server).infer(text_input="hi ", sampling={"temperature": "0", "max_tokens": "5"})
            assert call.text.startswith("hi ")
            wrong = LlmHost(server).infer(text_input="hi ", sampling={"temperature": "-1"})
            assert wrong.error is not None and wrong.error.message.startswith("Error generating stream: sampling param")
            no_lora = LlmHost(server).infer(text_input="hi ", sampling={"lora_name": "doll"})
            assert no_lora.error is not None and no_lora.error.message == "LoRA feature is not enabled."
    finally:
        assert server.stop(20)


@pytest.mark.parametrize(
    ("parameter", "engine_arguments", "is_reported"),
    [
        (None, {}, True),
        ("true", {}, True),
        ("false", {}, False),
        (None, {"disable_log_stats": True}, False),
        ("true", {"disable_log_stats": "true"}, False),
        ("true", {"disable_log_stats": "false"}, True),
    ],
)
def test_a_repository_says_whether_vllms_metrics_are_reported(
    tmp_path: Path, parameter: str | None, engine_arguments: dict[str, Any], is_reported: bool
) -> None:
    version = tmp_path / "mock_llm" / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps({**ENGINE, **engine_arguments}))
    config = f'parameters {{ key: "REPORT_CUSTOM_METRICS" value {{ string_value: "{parameter}" }} }}'
    (version.parent / "config.pbtxt").write_text(f'backend: "vllm"\n{config if parameter else ""}\n')
    server = InferenceServer(ServerOptions(model_repositories=(tmp_path,), model_control_mode="none"))
    server.start()
    try:
        assert LlmHost(server).infer(text_input="hi ").text
        text = generate_latest(server.metrics_registry).decode()
        assert ('vllm:prompt_tokens_total{engine="0",model="mock_llm"' in text) == is_reported
        assert ('vllm:time_to_first_token_seconds_count{engine="0",model="mock_llm"' in text) == is_reported
        assert 'nv_inference_request_success{model="mock_llm"' in text
    finally:
        assert server.stop(20)


def test_vllms_sample_model_is_understood(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = arguments(
            tmp_path,
            'backend: "vllm"',
            model="mock",
            disable_log_requests="true",
            gpu_memory_utilization=0.5,
            enforce_eager="true",
            num_scheduler_steps=8,
            max_loras=4,
            enable_lora="false",
            hf_overrides={},
        ).engine
    assert engine.enforce_eager
    assert "disable_log_requests (the log" in caplog.text and "num_scheduler_steps (steps are bounded" in caplog.text
    assert "no effect on a CPU: gpu_memory_utilization, max_loras" in caplog.text


def test_multi_lora_json_is_read_where_lora_is_turned_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "1" / "weights").mkdir(parents=True)
    lora_file = tmp_path / "1" / "multi_lora.json"
    told = refusal(tmp_path, 'backend: "vllm"', model="mock", enable_lora="true")
    assert told == f"Triton backend cannot find {lora_file}."
    lora_file.write_text('{"doll": "./weights"}')
    engine = arguments(tmp_path, 'backend: "vllm"', model="mock", enable_lora="true").engine
    assert engine.lora_modules == {"doll": str((tmp_path / "1" / "weights").resolve())}
    lora_file.write_text('{"doll": "./elsewhere"}')
    told = refusal(tmp_path, 'backend: "vllm"', model="mock", enable_lora="true")
    assert "LoRA 'doll' is './elsewhere', expected an existing folder" in told
    engine = arguments(tmp_path, 'backend: "vllm"', model="mock", enable_lora="false").engine
    assert not engine.lora_modules
    assert "'multi_lora.json'" in caplog.text and "is not read: enable_lora is not set" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hf_overrides", {"rope_theta": 1}),
        ("rope_scaling", {"factor": 2}),
        ("tokenizer_mode", "mistral"),
        ("nnodes", 2),
    ],
)
def test_an_argument_that_would_change_tokens_is_refused_by_name(tmp_path: Path, name: str, value: Any) -> None:
    assert f"engine argument '{name}' is" in refusal(tmp_path, 'backend: "vllm"', model="mock", **{name: value})


def test_tensorrtllms_parameters_map_to_engine_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "weights").mkdir()
    paths = """
      parameters { key: "gpt_model_path" value { string_value: "../weights" } }
      parameters { key: "tokenizer_dir" value { string_value: "../weights" } }
    """
    with caplog.at_level(logging.WARNING):
        engine = arguments(tmp_path, f'backend: "tensorrtllm" {GPU_TREE} {paths}').engine
    assert engine.model == engine.tokenizer == str((tmp_path / "weights").resolve())
    assert (engine.enable_prefix_caching, engine.num_kv_blocks) == (False, 4)
    assert "no effect here: FORCE_CPU_ONLY_INPUT_TENSORS, batch_scheduler_policy, executor_worker_path" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_beam_width", "4", "'max_beam_width' is '4', only 1 is supported"),
        ("decoding_mode", "medusa", "'decoding_mode' is 'medusa', only auto or top_k or top_p or top_k_top_p is"),
        ("eagle_choices", "{{0}}", "'eagle_choices' is '{{0}}', no value is supported"),
        ("max_tokens_in_paged_kv_cache", "many", "'max_tokens_in_paged_kv_cache' is 'many', expected an integer"),
        ("no_such_parameter", "1", "unknown engine argument 'no_such_parameter'"),
    ],
)
def test_a_parameter_that_cannot_be_followed_is_refused(tmp_path: Path, name: str, value: str, told: str) -> None:
    given = f'parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
    assert told in refusal(tmp_path, f'backend: "tensorrtllm" {given}', model="mock")


def test_an_engine_that_tensorrtllm_built_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"pretrained_config": {}, "build_config": {}}')
    with pytest.raises(TritonError, match="an engine built by TensorRT-LLM"):
        check_checkpoint(EngineConfig(model=str(tmp_path)))
