"""What of a model.yaml of TensorRT-LLM's llmapi layout is followed, and what is named as without effect."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.adapter.device_placement import DevicePlacement
from llmbackend.adapter.engine_args import ModelArguments, read_model_arguments
from llmbackend.adapter.llmapi_config import complete_policy, read_model_yaml
from llmbackend.adapter.schemas import schema_for
from llmbackend.core.backend_api import InstanceGroupKind, TritonError

PYTHON = 'backend: "python"'


def write(directory: Path, text: str = "", **keys: Any) -> None:
    (directory / "1").mkdir(exist_ok=True)
    (directory / "1" / "model.yaml").write_text(text or yaml.safe_dump({"model": "mock"} | keys))


def arguments(directory: Path, pbtxt: str = PYTHON, **keys: Any) -> ModelArguments:
    write(directory, **keys)
    config = text_format.Parse(pbtxt, ModelConfig())
    model: Any = SimpleNamespace(config=config, directory=directory, version_directory=directory / "1")
    return read_model_arguments(model, read_model_yaml(model.version_directory))


def triton_config(directory: Path, pbtxt: str = PYTHON, **section: Any) -> ModelConfig:
    write(directory, triton_config=section)
    config: ModelConfig = text_format.Parse(pbtxt, ModelConfig())
    complete_policy(config, read_model_yaml(directory / "1"))
    return schema_for(config).complete(config)


def test_keys_that_mean_something_here_are_followed(tmp_path: Path) -> None:
    read = arguments(
        tmp_path,
        model="org/name",
        tokenizer="other/tokenizer",
        dtype="bfloat16",
        trust_remote_code=True,
        tensor_parallel_size=2,
        pipeline_parallel_size=1,
        max_seq_len=1000,
        max_batch_size=8,
        max_num_tokens=256,
        max_input_len=700,
        kv_cache_config={"enable_block_reuse": False, "max_tokens": 1000, "tokens_per_block": 16},
    )
    engine = read.engine
    assert (engine.model, engine.tokenizer, engine.dtype) == ("org/name", "other/tokenizer", "bfloat16")
    assert (engine.trust_remote_code, engine.tensor_parallel_size) == (True, 2)
    assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens) == (1000, 8, 256)
    assert (engine.enable_prefix_caching, engine.block_size, engine.num_kv_blocks) == (False, 16, 63)
    assert read.max_prompt_tokens == 700


def test_ngram_speculation_is_followed(tmp_path: Path) -> None:
    config = {"decoding_type": "NGram", "max_draft_len": 3, "max_matching_ngram_size": 2}
    drafts = arguments(tmp_path, speculative_config=config).engine.speculative_config
    assert drafts is not None
    assert (drafts.num_speculative_tokens, drafts.prompt_lookup_max) == (3, 2)


def test_the_others_are_named_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read = arguments(
            tmp_path,
            backend="pytorch",
            cuda_graph_config={"enable_padding": True},
            kv_cache_config={"free_gpu_memory_fraction": 0.5, "host_cache_size": 1 << 30},
            logits_post_processors={"json_only": "my_company.processors:json_guard"},
            speculative_config={"decoding_type": "Eagle", "speculative_model": "x/y", "max_draft_len": 4},
            attn_backend=None,
            triton_config={"max_batch_size": 0, "decoupled": True, "multimodal": True},
        )
    assert read.engine.speculative_config is None
    [record] = caplog.records
    assert record.getMessage().partition("no effect here: ")[2].split(", ") == [
        "backend",
        "cuda_graph_config.enable_padding",
        "kv_cache_config.free_gpu_memory_fraction",
        "kv_cache_config.host_cache_size",
        "logits_post_processors.json_only",
        "speculative_config.decoding_type",
        "speculative_config.max_draft_len",
        "speculative_config.speculative_model",
        "triton_config.multimodal",
    ]


def test_parameters_of_config_pbtxt_win(tmp_path: Path) -> None:
    text = ""
    for name, value in {
        "max_model_len": 64,
        "max_prompt_tokens": 9,
        "max_queue_size": 3,
        "gpu_device_ids": "0",
    }.items():
        text += f' parameters {{ key: "{name}" value {{ string_value: "{value}" }} }}'
    read = arguments(tmp_path, PYTHON + text, max_seq_len=1000, max_input_len=700)
    assert (read.engine.max_model_len, read.max_prompt_tokens, read.max_queue_size) == (64, 9, 3)


def test_adapters_have_the_names_of_their_folders(tmp_path: Path) -> None:
    read = arguments(tmp_path, lora_config={"lora_dir": ["pirate", "/adapters/poet"], "max_lora_rank": 8})
    assert (read.engine.enable_lora, read.engine.max_lora_rank) == (True, 8)
    assert read.engine.lora_modules == {"pirate": str(tmp_path / "1" / "pirate"), "poet": "/adapters/poet"}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"model": None}, "looked for config.json of a Hugging Face checkpoint, a GGUF file, model.json, model.yaml"),
        ({"max_seq_len": "long"}, "engine argument 'max_model_len' is 'long'"),
        ({"max_input_len": 0}, "parameter 'max_prompt_tokens' is '0', expected an integer of at least 1"),
        ({"kv_cache_config": {"max_tokens": -1}}, "parameter 'kv_cache_config.max_tokens' is '-1'"),
    ],
)
def test_a_wrong_value_is_refused_by_name(tmp_path: Path, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(TritonError) as caught:
        arguments(tmp_path, **keys)
    assert text in caught.value.message


@pytest.mark.parametrize(("text", "error"), [("- a\n", "must hold a YAML mapping"), ("a: [", "is not YAML")])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, error: str) -> None:
    write(tmp_path, text)
    with pytest.raises(TritonError, match=error):
        read_model_yaml(tmp_path / "1")


def test_triton_config_says_what_config_pbtxt_does_not(tmp_path: Path) -> None:
    assert not triton_config(tmp_path).model_transaction_policy.decoupled
    config = triton_config(tmp_path, decoupled=True, max_batch_size=8)
    assert (config.model_transaction_policy.decoupled, config.max_batch_size) == (True, 0)
    policy = " model_transaction_policy { decoupled: false } max_batch_size: 4"
    config = triton_config(tmp_path, PYTHON + policy, decoupled=True)
    assert (config.model_transaction_policy.decoupled, config.max_batch_size) == (False, 0)


def test_kind_cpu_leaves_the_engine_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmbackend.adapter.device_placement.supported_gpus", lambda: (0, 1))
    monkeypatch.setattr("llmbackend.adapter.device_placement.metadata.version", lambda _: "2.11")
    instance = "x", InstanceGroupKind.CPU, 0
    read = arguments(tmp_path, model="org/name")
    assert read.is_llmapi
    placement = DevicePlacement()
    assert [placement.place(read.engine, *instance, is_llmapi=True).device for _ in range(2)] == ["cuda:0", "cuda:1"]
    assert DevicePlacement().place(read.engine, *instance).device == "cpu"
