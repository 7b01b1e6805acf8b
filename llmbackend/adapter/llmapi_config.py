"""Reads `model.yaml` of TensorRT-LLM's llmapi layout: engine arguments, and the section for Triton.

Used by engine_args.py and backend.py. Independent of tensors, and of config.pbtxt apart from its transaction policy and
batch size. Invariant: each key is either applied or named in one warning.
Source: the llmapi model of TensorRT-LLM's triton_backend, and the arguments of its LLM class.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmbackend.core.backend_api import ModelConfig, invalid_argument, shown
from llmbackend.core.gpus import supported_gpus

from .foreign_engine_args import num_kv_blocks

logger = logging.getLogger(__name__)

ModelYaml = Mapping[str, Any]
"""The content of a `model.yaml`."""
MODEL_FILE = "model.yaml"
_TRITON_CONFIG = "triton_config"
_KV_TOKENS = "kv_cache_config.max_tokens"
_HOST_CACHE = "kv_cache_config.host_cache_size"
_LORA_FOLDERS = "lora_config.lora_dir"
_ARGUMENT_OF = {
    "dtype": "dtype",
    "enable_lora": "enable_lora",
    "kv_cache_config.dtype": "kv_cache_dtype",
    "kv_cache_config.enable_block_reuse": "enable_prefix_caching",
    "kv_cache_config.max_gpu_total_bytes": "kv_cache_memory_bytes",
    "kv_cache_config.tokens_per_block": "block_size",
    "load_format": "load_format",
    "lora_config.max_lora_rank": "max_lora_rank",
    "lora_config.max_loras": "max_loras",
    "max_batch_size": "max_num_seqs",
    "max_input_len": "max_prompt_tokens",
    "max_num_tokens": "max_num_batched_tokens",
    "max_seq_len": "max_model_len",
    "model": "model",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "tensor_parallel_size": "tensor_parallel_size",
    "tokenizer": "tokenizer",
    "trust_remote_code": "trust_remote_code",
}
"""Key of model.yaml → engine argument, or parameter of config.pbtxt."""
_NGRAM_FIELD_OF = {
    "speculative_config.max_draft_len": "num_speculative_tokens",
    "speculative_config.max_matching_ngram_size": "prompt_lookup_max",
}
_DECODING_TYPE = "speculative_config.decoding_type"
_READ_FOR_TRITON = frozenset({f"{_TRITON_CONFIG}.decoupled", f"{_TRITON_CONFIG}.max_batch_size"})


def read_model_yaml(version_directory: Path) -> ModelYaml:
    """Raises TritonError INVALID_ARG if the file is not a YAML mapping."""
    import yaml

    path = version_directory / MODEL_FILE
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid_argument(f"'{path}' cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise invalid_argument(f"'{path}' is not YAML: {error}") from error
    if not isinstance(value, dict):
        raise invalid_argument(f"'{path}' must hold a YAML mapping, got {shown(value)}")
    return value


def llmapi_arguments(model_yaml: ModelYaml, version_directory: Path) -> dict[str, Any]:
    """Engine arguments and parameters under their names here, with the file's values. Warns once about the keys that
    have no effect."""
    values = _flat(model_yaml)
    arguments = {_ARGUMENT_OF[key]: value for key, value in values.items() if key in _ARGUMENT_OF}
    followed = {*_ARGUMENT_OF, *_READ_FOR_TRITON, _KV_TOKENS, _LORA_FOLDERS}
    if str(values.get(_DECODING_TYPE)).lower() == "ngram":
        fields = {name: values[key] for key, name in _NGRAM_FIELD_OF.items() if values.get(key)}
        arguments["speculative_config"] = {"method": "ngram", **fields}
        followed |= {_DECODING_TYPE, *_NGRAM_FIELD_OF}
    if supported_gpus() and isinstance(size_bytes := values.get(_HOST_CACHE), int):
        arguments["kv_offloading_size"] = size_bytes / (1 << 30)
        followed.add(_HOST_CACHE)
    if _KV_TOKENS in values:
        arguments["num_kv_blocks"] = num_kv_blocks(_KV_TOKENS, values[_KV_TOKENS], arguments.get("block_size"))
    if _LORA_FOLDERS in values:
        arguments |= {"enable_lora": True, "lora_modules": _adapters(values[_LORA_FOLDERS], version_directory)}
    if others := sorted(values.keys() - followed):
        logger.warning("'%s': no effect here: %s", version_directory / MODEL_FILE, ", ".join(others))
    return arguments


def complete_policy(config: ModelConfig, model_yaml: ModelYaml) -> None:
    """Completes `config` with model.yaml's section for Triton; config.pbtxt takes precedence."""
    section = model_yaml.get(_TRITON_CONFIG)
    if not config.HasField("model_transaction_policy"):
        config.model_transaction_policy.decoupled = isinstance(section, dict) and bool(section.get("decoupled"))


def _adapters(folders: Any, version_directory: Path) -> dict[str, str]:
    """By the folder's name, which requests give as `lora_name`."""
    paths = [version_directory / str(folder) for folder in (folders if isinstance(folders, list) else [folders])]
    return {path.name: str(path) for path in paths}


def _flat(values: ModelYaml) -> dict[str, Any]:
    """Flattens keys of sections to `section.key`; a null value counts as a missing key."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= {f"{key}.{inner}": item for inner, item in value.items() if item is not None}
        elif value is not None:
            flat[str(key)] = value
    return flat
