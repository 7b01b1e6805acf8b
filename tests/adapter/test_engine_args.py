"""Engine arguments: where they come from, which wins, and that none is dropped in silence."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.adapter.engine_args import ModelArguments, read_given_arguments, read_model_arguments
from llmbackend.core.backend_api import ErrorCode, TritonError
from llmbackend.engine.config import StructuredOutputsConfig


def read(directory: Path, **parameters: str) -> ModelArguments:
    config = ModelConfig(name="m")
    for name, value in parameters.items():
        config.parameters[name].string_value = value
    model: Any = SimpleNamespace(config=config, directory=directory, version_directory=directory / "1")
    return read_model_arguments(model)


def refusal(directory: Path, **parameters: str) -> str:
    with pytest.raises(TritonError) as caught:
        read(directory, **parameters)
    assert caught.value.code is ErrorCode.INVALID_ARG
    return caught.value.message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "1").mkdir()
    return tmp_path


def model_json(directory: Path, **arguments: Any) -> None:
    (directory / "1" / "model.json").write_text(json.dumps(arguments))


def test_a_checkpoint_in_the_version_directory_is_the_model(model: Path) -> None:
    (model / "1" / "config.json").write_text("{}")
    assert read(model).engine.model == str(model / "1")


def test_model_json_holds_vllms_engine_arguments(model: Path) -> None:
    model_json(model, model="mock", dtype="half", max_model_len="512", num_gpu_blocks_override=9, load_format="auto")
    engine = read(model).engine
    assert (engine.model, engine.dtype, engine.max_model_len, engine.num_kv_blocks) == ("mock", "float16", 512, 9)
    assert engine.load_format == "safetensors"


def test_prefix_caching_is_on_unless_turned_off(model: Path) -> None:
    model_json(model, model="mock")
    assert read(model).engine.enable_prefix_caching
    assert not read(model, enable_prefix_caching="false").engine.enable_prefix_caching


def test_pbtxt_parameters_win_over_model_json_and_that_over_a_checkpoint(model: Path) -> None:
    (model / "1" / "config.json").write_text("{}")
    model_json(model, block_size=8, max_num_seqs=3)
    engine = read(model, max_num_seqs="5", trust_remote_code="true").engine
    assert (engine.model, engine.block_size) == (str(model / "1"), 8)
    assert (engine.max_num_seqs, engine.trust_remote_code) == (5, True)


def test_relative_paths_are_relative_to_the_version_directory(model: Path) -> None:
    (model / "weights").mkdir()
    model_json(model, model="../weights", tokenizer="../weights")
    engine = read(model).engine
    assert engine.model == engine.tokenizer == str((model / "weights").resolve())
    model_json(model, model="org/name")
    assert read(model).engine.model == "org/name"
    model_json(model, model="./nowhere")
    assert "'model' is './nowhere', which does not exist" in refusal(model)


def test_speculative_config_is_vllms_json(model: Path) -> None:
    wanted = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    model_json(model, model="mock", speculative_config=wanted)
    from_json = read(model).engine.speculative_config
    assert from_json == read(model, speculative_config=json.dumps(wanted)).engine.speculative_config
    assert from_json is not None
    assert (from_json.num_speculative_tokens, from_json.lookup_max, from_json.lookup_min) == (3, 4, 2)
    assert read(model, speculative_config="null").engine.speculative_config is None
    one_given = read(model, speculative_config='{"prompt_lookup_max": 5}').engine.speculative_config
    assert one_given is not None
    assert (one_given.lookup_max, one_given.lookup_min) == (5, 5)


def test_structured_outputs_config_is_vllms_json_and_its_former_arguments(model: Path) -> None:
    wanted = {"backend": "guidance", "disable_any_whitespace": True, "reasoning_parser": "qwen3"}
    model_json(model, model="mock", structured_outputs_config=wanted)
    engine = read(model).engine
    assert engine.reasoning_parser == "qwen3"
    assert engine.structured_outputs_config == StructuredOutputsConfig(backend="guidance", disable_any_whitespace=True)
    model_json(model, model="mock", guided_decoding_backend="auto", guided_decoding_disable_any_whitespace=True)
    assert read(model).engine.structured_outputs_config == StructuredOutputsConfig(disable_any_whitespace=True)


def test_nothing_to_serve_says_what_was_looked_for(model: Path) -> None:
    message = refusal(model)
    assert f"'model.json' containing vllm engine args must be provided in '{model / '1'}'" in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"modle": "x"}, "unknown engine argument 'modle', expected one of: model,"),
        ({"max_num_seqs": "many"}, "engine argument 'max_num_seqs' is 'many'"),
        ({"max_num_seqs": 0}, "'max_num_seqs' is 0, expected at least 1"),
        ({"step_timeout_s": 0}, "'step_timeout_s' is 0, expected a number above 0"),
        ({"load_timeout_s": "inf"}, "'load_timeout_s' is inf, expected a number above 0"),
        ({"mock_step_ms": "nan"}, "'mock_step_ms' is nan, expected a number of at least 0"),
        ({"dtype": "int8"}, "'dtype' is 'int8', expected 'auto' or 'float32' or 'bfloat16' or 'float16'"),
        ({"pipeline_parallel_size": 0}, "'pipeline_parallel_size' is 0, expected at least 1"),
        ({"pipeline_parallel_size": 2}, "'pipeline_parallel_size' is 2, expected 1 if 'model' is 'mock'"),
        ({"data_parallel_size": 2}, "'data_parallel_size' is 2, only 1 is supported"),
        ({"calculate_kv_scales": True}, "only false is supported: scales of keys and values are 1"),
        ({"tensor_parallel_size": 0}, "'tensor_parallel_size' is 0, expected at least 1"),
        ({"quantization": "int3"}, "'quantization' is 'int3', expected 'int8' or 'int4' or 'fp8' or null"),
        ({"speculative_config": {"method": "eagle"}}, "'speculative_config' is {'method': 'eagle'}"),
        ({"speculative_config": {"method": "eagle"}}, "Invalid enum value 'eagle' - at `$.method`"),
        ({"speculative_config": {"model": "x"}}, "Object contains unknown field `model`"),
        ({"speculative_config": {"num_speculative_tokens": 0}}, "'num_speculative_tokens' is 0, expected at least 1"),
        (
            {"speculative_config": {"prompt_lookup_min": 3, "prompt_lookup_max": 2}},
            "'prompt_lookup_min' is 3, expected",
        ),
        ({"structured_outputs_config": {"backend": "xgrammar"}}, "Invalid enum value 'xgrammar' - at `$.backend`"),
        ({"structured_outputs_config": {"enable_in_reasoning": True}}, "'enable_in_reasoning' is true, expected false"),
        ({"structured_outputs_config": "["}, "engine argument 'structured_outputs_config' is not JSON"),
        ({"guided_decoding_backend": "outlines"}, "Invalid enum value 'outlines'"),
        ({"speculative_config": "ngram"}, "engine argument 'speculative_config' is 'ngram'"),
        ({"enable_lora": True}, "Triton backend cannot find "),
        ({"max_lora_rank": 0}, "'max_lora_rank' is 0, expected at least 1"),
        ({"gpu_memory_utilization": 1.5}, "'gpu_memory_utilization' is 1.5, expected a number above 0 and up to 1"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "'kv_cache_dtype' is 'fp8_e5m2', expected 'auto' or 'fp8' or 'fp8_e4m3'"),
        ({"cudagraph_capture_sizes": [0]}, "'cudagraph_capture_sizes' is 0, expected at least 1"),
        ({"lora_modules": {"doll": "/x"}}, "'lora_modules' is set, expected 'enable_lora' to be true"),
    ],
)
def test_a_bad_engine_argument_is_named(model: Path, arguments: dict[str, Any], expected: str) -> None:
    model_json(model, **{"model": "mock", **arguments})
    assert expected in refusal(model)


@pytest.mark.parametrize(("text", "expected"), [("{", "is not JSON"), ("[]", "must hold a JSON object")])
def test_a_broken_model_json_is_named(model: Path, text: str, expected: str) -> None:
    (model / "1" / "model.json").write_text(text)
    message = refusal(model)
    assert expected in message
    assert "model.json" in message


def test_arguments_without_effect_are_accepted_with_one_warning(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_json(model, model="mock", ray_workers_use_nsight=False, swap_space=4, tensor_parallel_size=1)
    with caplog.at_level(logging.WARNING):
        read(model)
    assert len(caplog.records) == 1
    assert "ray_workers_use_nsight (several machines" in caplog.text and "swap_space (each engine" in caplog.text


def test_arguments_for_gpus_are_used_there_and_accepted_with_a_warning_elsewhere(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_json(model, model="mock", gpu_memory_utilization=0.5, cudagraph_capture_sizes=[1, 2, 8])
    with caplog.at_level(logging.WARNING):
        engine = read(model, device="cpu", kv_cache_dtype="fp8").engine
    assert "no effect on a CPU: cudagraph_capture_sizes, gpu_memory_utilization" in caplog.text
    assert (engine.gpu_memory_utilization, engine.cudagraph_capture_sizes) == (0.5, (1, 2, 8))
    assert engine.kv_cache_dtype == "fp8"
    assert read(model, cudagraph_capture_sizes="[4]").engine.cudagraph_capture_sizes == (4,)


def test_parameters_of_triton_and_mindie_are_known(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_json(model, model="mock")
    arguments = read(
        model, ENABLE_VLLM_HEALTH_CHECK="true", npu_device_ids="0;1", model_instance_number="1", max_queue_size="7"
    )
    assert arguments.max_queue_size == 7
    assert "'ENABLE_VLLM_HEALTH_CHECK' has no effect" in caplog.text
    caplog.clear()
    assert not read(model, disable_log_stats="true").reports_metrics
    model_json(model, model="mock", disable_log_stats=True)
    assert not read(model).reports_metrics and not caplog.text
    assert "disable_log_stats" not in read_given_arguments({"model": "mock", "disable_log_stats": True}, model)
    assert "no effect here: disable_log_stats" in caplog.text
    assert "unknown engine argument 'tool_parser'" in refusal(model, tool_parser="x")
    assert "'model_instance_number' is '2', expected 1" in refusal(model, model_instance_number="2")
    assert "'max_queue_size' is '-1'" in refusal(model, max_queue_size="-1")


def test_a_mindie_config_is_understood_and_model_json_wins_over_it(model: Path) -> None:
    (model / "weights").mkdir()
    backend = {
        "ModelDeployConfig": {
            "maxSeqLen": 2560,
            "ModelConfig": [{"modelWeightPath": str(model / "weights"), "trustRemoteCode": False}],
        },
        "ScheduleConfig": {"cacheBlockSize": 128, "maxBatchSize": 200, "maxPrefillTokens": 8192},
    }
    (model / "mindie.json").write_text(json.dumps({"ServerConfig": {}, "BackendConfig": backend}))
    model_json(model, max_num_seqs=4)
    engine = read(model, engine_config_path="mindie.json").engine
    assert (engine.model, engine.max_model_len, engine.block_size) == (str(model / "weights"), 2560, 128)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (4, 8192)
    assert "cannot be read" in refusal(model, engine_config_path="nowhere.json")


def test_an_engine_on_a_gpu_has_the_defaults_of_gpus_where_the_model_does_not_say(model: Path) -> None:
    model_json(model, model="mock", max_num_seqs=8)
    arguments = read(model)
    on_cpu, on_gpu = (msgspec.structs.replace(arguments.engine, device=device) for device in ("cpu", "cuda:1"))
    assert arguments.with_device_defaults(on_cpu) == on_cpu
    config = arguments.with_device_defaults(on_gpu)
    assert (config.device, config.max_num_seqs, config.max_num_batched_tokens) == ("cuda:1", 8, 8192)
