"""The flags with which a server was started, as operators see them over the network. Values are shown only for flags
known to contain no secret."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer

from .engine import number_arguments

HIDDEN: Final = "(not shown)"
_SHOWN_TEXTS: Final = frozenset(
    {
        "model", "model_tag", "served_model_name", "model_control_mode", "load_model", "model_config_name", "dtype",
        "device", "tokenizer", "generation_config", "tool_call_parser", "reasoning_parser", "kv_cache_dtype",
        "quantization", "kernels", "load_format", "transport", "engine_python", "lora_modules", "server_id",
        "rate_limit", "rate_limit_resource", "host", "http_address", "grpc_address", "metrics_address",
        "metrics_config", "trusted_proxies", "log_format", "log_file", "log_level", "trace_file", "trace_level",
        "grpc_infer_response_compression_level", "lora_separator", "lora_folder", "allowed_origins", "allowed_hosts",
        "allowed_methods", "allowed_headers",
    }
) | number_arguments()  # fmt: skip
_MAX_CHARACTERS: Final = 500


def given_flags(context: typer.Context) -> Mapping[str, str]:
    """Flag, or MODEL, → value, for those that differ from their defaults, in the order of the help."""
    found = {}
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if value not in (None, (), [], parameter.get_default(context)):
            is_argument = parameter.param_type_name == "argument"
            flag = str(getattr(parameter, "metavar", "")) if is_argument else parameter.opts[0]
            found[flag] = _shown(parameter.name or "", value)
    return found


def _shown(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(_shown(name, item) for item in value)[:_MAX_CHARACTERS]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | Path) or name in _SHOWN_TEXTS:
        return str(value)[:_MAX_CHARACTERS]
    return HIDDEN
