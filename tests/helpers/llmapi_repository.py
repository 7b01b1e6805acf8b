"""A model repository of TensorRT-LLM's llmapi layout, as its users have it: only `model:` names another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

INPUTS = {
    "TYPE_STRING dims: [ -1 ]": "text_input image_url sampling_param_stop",
    "TYPE_STRING dims: [ 1 ]": "lora_name lora_path lora_ckpt_source",
    "TYPE_BOOL dims: [ 1 ]": """
        streaming sampling_param_exclude_input_from_output sampling_param_return_perf_metrics return_finish_reason
        return_stop_reason return_cumulative_logprob stop""",
    "TYPE_INT32 dims: [ 1 ]": "sampling_param_best_of sampling_param_top_k sampling_param_max_tokens",
    "TYPE_FP32 dims: [ 1 ]": """
        sampling_param_temperature sampling_param_top_p sampling_param_frequency_penalty
        sampling_param_presence_penalty""",
    "TYPE_UINT64 dims: [ 1 ]": "sampling_param_seed lora_id",
}
OUTPUTS = {
    "TYPE_STRING dims: [ -1 ]": "text_output finish_reason stop_reason",
    "TYPE_FP32 dims: [ -1 ]": "cumulative_logprob kv_cache_hit_rate",
    "TYPE_INT32 dims: [ -1 ]": """
        kv_cache_reused_block kv_cache_missed_block kv_cache_alloc_new_blocks kv_cache_alloc_total_blocks""",
    "TYPE_INT64 dims: [ 1 ]": "arrival_time_ns first_scheduled_time_ns first_token_time_ns last_token_time_ns",
    "TYPE_FP32 dims: [ 1 ]": "acceptance_rate",
    "TYPE_INT32 dims: [ 1 ]": "total_accepted_draft_tokens total_draft_tokens",
}
MODEL_PY = "import tensorrt_llm\n"
"""Cannot be run here."""


def config_text(name: str) -> str:
    inputs = _tensors("input", INPUTS).replace('"text_input" optional: true', '"text_input"')
    group = "instance_group [ { count: 1 kind: KIND_CPU } ]"
    return f'name: "{name}"\nbackend: "python"\n{group}\n{inputs}\n{_tensors("output", OUTPUTS)}\n'


def _tensors(kind: str, table: dict[str, str]) -> str:
    optional = " optional: true" if kind == "input" else ""
    return "\n".join(
        f'{kind} [ {{ name: "{name}"{optional} data_type: {type_and_dims} }} ]'
        for type_and_dims, names in table.items()
        for name in names.split()
    )


def write_llmapi_model(
    repository: Path, model: str, name: str = "tensorrt_llm", *, decoupled: bool = False, **keys: Any
) -> None:
    """keys: of model.yaml, besides those of the template."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    values = {
        "model": model,
        "backend": "pytorch",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        **keys,
        "triton_config": {"max_batch_size": 0, "decoupled": decoupled},
    }
    (version / "model.yaml").write_text(f"# ======= TRTLLM =======\n{yaml.safe_dump(values, sort_keys=False)}")
    (version / "model.py").write_text(MODEL_PY)
    (version / "helpers.py").write_text("")
    (version.parent / "config.pbtxt").write_text(config_text(name))
