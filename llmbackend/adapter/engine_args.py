"""Reads a model's arguments: those of its engines, and those of its queue and requests.

Used by ModelState and the command line's flags. Independent of requests, running engines and instances' devices
(device_placement.py). Invariant: no argument is silently ignored; each is used, accepted with a warning that it has no
effect here, or refused by name.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from llmbackend.core.backend_api import SERVED_MODEL_NAME, Model, invalid_argument, shown
from llmbackend.core.gpus import supported_gpus
from llmbackend.engine.config import AUTO_CONTEXT, GPU_DEFAULTS, EngineConfig
from llmbackend.engine.errors import CheckpointError
from llmbackend.engine.llm_manager import STALL_TIMEOUT_S
from llmbackend.engine.model.checkpoint_files import bad_checkpoint, check_directory

from .device_placement import AUTO
from .foreign_engine_args import (
    GPU_ONLY,
    NO_EFFECT,
    ONLY_VALUE,
    ONLY_VALUE_BECAUSE,
    STORED_QUANTIZATION,
    STORED_QUANTIZATION_BECAUSE,
    translate_tensorrtllm,
    with_present_names,
)
from .gguf_models import is_gguf_model, with_directories
from .limits import MAX_MESSAGES_BYTES
from .llmapi_config import MODEL_FILE, ModelYaml, llmapi_arguments
from .schemas import TENSOR_SCHEMA, is_tensorrtllm

logger = logging.getLogger(__name__)

_FIELD_TYPES = {field.name: field.type for field in msgspec.structs.fields(EngineConfig)}
_PATH_FIELDS = ("model", "tokenizer", "generation_config")
_OBJECT_FIELDS = (
    "speculative_config", "cudagraph_capture_sizes", "kv_events_config", "lora_modules", "override_generation_config",
    "default_chat_template_kwargs",
    "cluster_resources",
)  # fmt: skip
"""Fields that are JSON objects or lists, written as JSON text in config.pbtxt."""
_ALIASES = {"num_gpu_blocks_override": "num_kv_blocks"}
_VALUE_ALIASES: dict[str, dict[Any, Any]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"auto": "safetensors"},
    "max_model_len": {"auto": AUTO_CONTEXT},
}
_TRITON_PARAMETERS: dict[str, str] = {
    "ENABLE_VLLM_HEALTH_CHECK": "readiness always follows the engine's health",
    "EXECUTION_ENV_PATH": "this backend runs in the server's own environment",
    "FORCE_CPU_ONLY_INPUT_TENSORS": "inputs are always in host memory",
    "GPU_DEVICE_IDS": "use instance_group.gpus",
    "gpu_device_ids": "use instance_group.gpus",
    "model_instance_number": "use instance_group.count",
    "npu_device_ids": "use instance_group.gpus",
}
REPORT_METRICS = "REPORT_CUSTOM_METRICS"
DISABLE_LOG_STATS = "disable_log_stats"
"""Has an effect in a model.json and in config.pbtxt only, and is in NO_EFFECT for all other sources."""
ENGINE_CONFIG_PATH = "engine_config_path"
ENGINE_PYTHON = "LLMBACKEND_ENGINE_PYTHON"
"""Environment variable with the default of the engine argument engine_python."""
LORA_MODULES = "lora_modules"
MULTI_LORA_FILE = "multi_lora.json"
LORA_NAMES = "lora_names"
"""The config.pbtxt parameter in which a loaded model publishes the names of its adapters."""
SAMPLING_DEFAULTS = "sampling_defaults"
"""The config.pbtxt parameter in which a loaded model publishes its own sampling defaults, as a JSON object."""
LORA_MODELS = "lora_models"
"""The config.pbtxt parameter in which a loaded model publishes the adapters that the OpenAI API lists as models: those
of the engine argument lora_modules (vLLM's rule), but not those of a multi_lora.json (Triton's rule)."""
TEXT_PARAMETERS = ("chat_template", "tool_call_parser", "reasoning_parser")
"""Engine arguments that a loaded model publishes as config.pbtxt parameters, for frontends that parse its output; for
the chat template, its text."""
_OTHER_PARAMETERS = frozenset(
    {SERVED_MODEL_NAME, ENGINE_CONFIG_PATH, TENSOR_SCHEMA, LORA_NAMES, LORA_MODELS, SAMPLING_DEFAULTS}
    | {REPORT_METRICS, DISABLE_LOG_STATS}
)
"""Parameters that are not engine arguments."""
_MINDIE_FIELDS: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("ModelDeployConfig",), "maxSeqLen", "max_model_len"),
    (("ModelDeployConfig", "ModelConfig"), "modelWeightPath", "model"),
    (("ModelDeployConfig", "ModelConfig"), "trustRemoteCode", "trust_remote_code"),
    (("ScheduleConfig",), "cacheBlockSize", "block_size"),
    (("ScheduleConfig",), "maxBatchSize", "max_num_seqs"),
    (("ScheduleConfig",), "maxPrefillTokens", "max_num_batched_tokens"),
)


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """A model's arguments. The numeric ones are config.pbtxt parameters."""

    engine: EngineConfig
    """Common to all instances, before the instance's kind decides the device (DevicePlacement)."""
    given: frozenset[str] = frozenset()
    """Names of the engine arguments that were set explicitly."""
    max_queue_size: int = 4096
    """Maximum number of requests in the model's queue; further ones are refused with UNAVAILABLE."""
    max_prompt_tokens: int = 0
    """Longer prompts are refused; 0 = limited only by the context length."""
    max_output_tokens: int = 0
    """max_tokens is reduced to it; 0 = limited only by the context length."""
    max_messages_bytes: int = MAX_MESSAGES_BYTES
    """Maximum length of the JSON text in the input `messages`."""
    request_timeout_s: float = 0.0
    """A request older than this ends with UNAVAILABLE; 0 = no limit."""
    stall_timeout_s: float = STALL_TIMEOUT_S
    """An engine that has work but finishes no step for this long is not ready."""
    adapters_are_models: bool = False
    """Whether the OpenAI API lists each adapter as a model."""
    reports_metrics: bool = True
    """Whether this model exports `vllm:` metrics."""
    is_llmapi: bool = False
    """Whether the model has TensorRT-LLM's llmapi layout, in which KIND_CPU refers to the process of model.py."""

    def with_device_defaults(self, config: EngineConfig) -> EngineConfig:
        """The arguments of an instance whose device is known."""
        if config.device == "cpu":
            return config
        return msgspec.structs.replace(
            config, **{name: value for name, value in GPU_DEFAULTS.items() if name not in self.given}
        )


OWN_PARAMETERS: dict[str, Callable[[str], float]] = {
    field.name: int if field.type == "int" else float
    for field in fields(ModelArguments)
    if field.type in ("int", "float")
}
"""The fields that are config.pbtxt parameters."""


def read_model_arguments(model: Model, model_yaml: ModelYaml | None = None) -> ModelArguments:
    """Collects the arguments of a model version. model_yaml: only in TensorRT-LLM's llmapi layout.

    Sources, in increasing precedence: defaults, the version directory's checkpoint, a MindIE config.json
    (`engine_config_path`), the version directory's `model.json` (vLLM's engine arguments, as vllm_backend reads them)
    or `model_yaml`, `parameters` of config.pbtxt.

    Raises TritonError INVALID_ARG that names file, argument and value.
    """
    parameters = {name: value.string_value for name, value in model.config.parameters.items()}
    if is_tensorrtllm(model.config):
        parameters = translate_tensorrtllm(parameters)
    arguments: dict[str, Any] = {"device": AUTO}
    if ENGINE_PYTHON in os.environ:
        arguments["engine_python"] = os.environ[ENGINE_PYTHON]
    version_directory = model.version_directory
    if (version_directory / "config.json").is_file() or is_gguf_model(version_directory):
        arguments["model"] = str(version_directory)
    if ENGINE_CONFIG_PATH in parameters:
        arguments |= _read_mindie_config(model.directory, parameters[ENGINE_CONFIG_PATH])
    if model_yaml is not None:
        given = llmapi_arguments(model_yaml, version_directory)
        parameters = {name: str(given.pop(name)) for name in OWN_PARAMETERS.keys() & given.keys()} | parameters
        arguments |= _convert(given, f"'{MODEL_FILE}' in '{version_directory}'", version_directory)
    path = version_directory / "model.json"
    model_json = _read_object(path) if path.is_file() else {}
    arguments |= _convert_model_json(model_json, version_directory)
    arguments |= _read_parameters(parameters, version_directory)
    if not arguments.get("model"):
        raise invalid_argument(
            f"'model.json' containing vllm engine args must be provided in '{version_directory}' "
            "(looked for config.json of a Hugging Face checkpoint, a GGUF file, model.json, model.yaml, and the "
            f"parameters 'model' and '{ENGINE_CONFIG_PATH}' of config.pbtxt)"
        )
    engine = _with_directories(_engine_config(arguments))
    if (gpu_only := GPU_ONLY & arguments.keys()) and (engine.device == "cpu" or not supported_gpus()):
        logger.warning("'%s': no effect on a CPU: %s", version_directory, ", ".join(sorted(gpu_only)))
    return ModelArguments(
        engine,
        frozenset(arguments),
        adapters_are_models=LORA_MODULES in parameters or LORA_MODULES in model_json,
        reports_metrics=_reports_metrics(parameters, model_json),
        is_llmapi=model_yaml is not None,
        **read_own_parameters(parameters),
    )


def read_given_arguments(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Engine arguments from a command line or a program, as text or as in a model.json, checked individually and
    together. directory: base of relative paths. Raises TritonError INVALID_ARG that names argument and value."""
    arguments = _convert(values, "arguments", directory)
    _engine_config(arguments)
    return arguments


# --- a checkpoint's files ---------------------------------------------------------------------------------------------


def check_checkpoint(engine: EngineConfig) -> None:
    """Checks that a local directory contains a checkpoint whose files match its config.json. The engine would detect
    this only seconds later, after importing torch and transformers. Raises TritonError INVALID_ARG."""
    engine = _with_directories(engine)
    model, path = engine.model, Path(engine.model)
    if not _is_directory(model, path):
        return
    if "build_config" in _read_object(path / "config.json"):
        raise invalid_argument(
            f"engine argument 'model' is '{model}', an engine built by TensorRT-LLM, which only TensorRT-LLM can run: "
            "give the Hugging Face checkpoint that it was built from"
        )
    if engine.load_format == "dummy":
        return
    try:
        check_directory(path)
    except CheckpointError as error:
        raise invalid_argument(str(bad_checkpoint(model, error))) from None


def _is_directory(model: str, path: Path) -> bool:
    """Whether the engine argument 'model' is a checkpoint directory rather than a hub id or a name."""
    try:
        if not path.exists() and (path.is_absolute() or model.startswith(".") or len(path.parts) > 2):
            raise invalid_argument(f"engine argument 'model' is '{model}', which does not exist")
        if path.exists() and not path.is_dir():
            raise invalid_argument(
                f"engine argument 'model' is '{model}', which is neither a directory nor a GGUF file"
            )
        if not path.is_dir():
            return False
        if not (path / "config.json").is_file():
            raise invalid_argument(f"engine argument 'model' is '{model}', which has no config.json: not a checkpoint")
        next(path.iterdir(), None)
    except OSError as error:
        raise invalid_argument(
            f"engine argument 'model' is '{model}', which cannot be read: {error.strerror}"
        ) from None
    return True


def _with_directories(engine: EngineConfig) -> EngineConfig:
    """Raises TritonError INVALID_ARG."""
    try:
        return with_directories(engine, has_gpu=lambda: bool(supported_gpus()))
    except ValueError as error:
        raise invalid_argument(str(error)) from None


def _engine_config(arguments: Mapping[str, Any]) -> EngineConfig:
    try:
        return EngineConfig(**arguments)
    except (ValueError, TypeError) as error:
        raise invalid_argument(str(error)) from error


# --- where arguments come from ----------------------------------------------------------------------------------------


def _convert_model_json(model_json: Mapping[str, Any], version_directory: Path) -> dict[str, Any]:
    values = {name: value for name, value in model_json.items() if name != DISABLE_LOG_STATS}
    arguments = _convert(values, f"'model.json' in '{version_directory}'", version_directory)
    if LORA_MODULES in arguments:
        return arguments
    if arguments.get("enable_lora"):
        arguments[LORA_MODULES] = _read_multi_lora(version_directory)
    elif (version_directory / MULTI_LORA_FILE).is_file():
        logger.warning("'%s' in '%s' is not read: enable_lora is not set", MULTI_LORA_FILE, version_directory)
    return arguments


def _read_multi_lora(version_directory: Path) -> dict[str, str]:
    """Folders of LoRA adapters by name. Relative ones are resolved in the version directory."""
    path = version_directory / MULTI_LORA_FILE
    if not path.is_file():
        raise invalid_argument(f"Triton backend cannot find {path}.")
    folders = _read_object(path)
    for name, folder in folders.items():
        if not isinstance(folder, str) or not (version_directory / folder).is_dir():
            raise invalid_argument(f"'{path}': LoRA '{name}' is {shown(folder)}, expected an existing folder")
    return {name: str((version_directory / folder).resolve()) for name, folder in folders.items()}


def _read_parameters(parameters: Mapping[str, str], version_directory: Path) -> dict[str, Any]:
    values: dict[str, str] = {}
    for name, value in parameters.items():
        if name in _TRITON_PARAMETERS:
            _check_triton_parameter(name, value)
        elif name not in _OTHER_PARAMETERS and name not in OWN_PARAMETERS:
            values[name] = value
    return _convert(values, "config.pbtxt parameters", version_directory)


def _reports_metrics(parameters: Mapping[str, str], model_json: Mapping[str, Any]) -> bool:
    """As in vllm_backend, except that metrics are on by default."""
    is_disabled = str(model_json.get(DISABLE_LOG_STATS, parameters.get(DISABLE_LOG_STATS))).lower() == "true"
    return not is_disabled and parameters.get(REPORT_METRICS, "true").lower() == "true"


def _check_triton_parameter(name: str, value: str) -> None:
    if name == "model_instance_number" and value != "1":
        raise invalid_argument(f"parameter '{name}' is '{value}', expected 1: {_TRITON_PARAMETERS[name]}")
    logger.warning("parameter '%s' has no effect: %s", name, _TRITON_PARAMETERS[name])


def read_own_parameters(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Reads the adapter's parameters from config.pbtxt. Raises TritonError INVALID_ARG."""
    values: dict[str, Any] = {}
    for name in OWN_PARAMETERS.keys() & parameters.keys():
        read, text = OWN_PARAMETERS[name], parameters[name]
        try:
            value = read(text)
        except (ValueError, OverflowError):
            value = -1
        if not 0 < value < math.inf:
            expected = "an integer of at least 1" if read is int else "a number of seconds above 0"
            raise invalid_argument(f"parameter '{name}' is '{text}', expected {expected}")
        values[name] = value
    return values


def _read_mindie_config(model_directory: Path, text: str) -> dict[str, Any]:
    """The fields of a MindIE config.json that apply here; the others configure MindIE's own server."""
    path = Path(text)
    path = path if path.is_absolute() else model_directory / path
    backend = _read_object(path)
    backend = backend.get("BackendConfig", backend)
    values: dict[str, Any] = {}
    for sections, source, target in _MINDIE_FIELDS:
        section = _section(backend, sections)
        if source in section:
            values[target] = section[source]
    return _convert(values, f"'{path}'", path.parent)


def _section(config: Mapping[str, Any], names: tuple[str, ...]) -> Mapping[str, Any]:
    value: Any = config
    for name in names:
        value = value.get(name, {}) if isinstance(value, dict) else {}
        if isinstance(value, list):
            value = value[0] if value else {}
    return value if isinstance(value, dict) else {}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid_argument(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise invalid_argument(f"'{path}' is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise invalid_argument(f"'{path}' must hold a JSON object, got {shown(value)}")
    return value


# --- their values -----------------------------------------------------------------------------------------------------


def _convert(values: Mapping[str, Any], source: str, directory: Path) -> dict[str, Any]:
    """Converts engine arguments to their types; paths are relative to `directory`. Warns of arguments without
    effect."""
    arguments: dict[str, Any] = {}
    values = with_present_names(values, source)
    without_effect = [name for name in values if name in NO_EFFECT]
    if without_effect:
        reasons = "; ".join(f"{name} ({NO_EFFECT[name]})" for name in sorted(without_effect))
        logger.warning("%s: no effect here: %s", source, reasons)
    for name, value in values.items():
        if name in NO_EFFECT:
            continue
        if name == "quantization" and isinstance(value, str) and value in STORED_QUANTIZATION:
            logger.warning("%s: no effect here: quantization '%s' (%s)", source, value, STORED_QUANTIZATION_BECAUSE)
            continue
        if name in ONLY_VALUE:
            _check_only_value(name, value, source)
            continue
        field = _ALIASES.get(name, name)
        arguments[field] = _typed(name, field, value, source)
        if field in _PATH_FIELDS:
            arguments[field] = _resolve(name, arguments[field], directory, source)
        if field == "chat_template":
            arguments[field] = _resolve_template(name, arguments[field], directory, source)
    return arguments


def _check_only_value(name: str, value: Any, source: str) -> None:
    allowed = ONLY_VALUE[name]
    if value in allowed or str(value).lower() in {str(item).lower() for item in allowed}:
        return
    only = " or ".join(json.dumps(item) for item in allowed)
    raise invalid_argument(
        f"{source}: engine argument '{name}' is {shown(value)}, only {only} is supported: {ONLY_VALUE_BECAUSE[name]}"
    )


def _typed(name: str, field: str, value: Any, source: str) -> Any:
    expected = _FIELD_TYPES.get(field)
    if expected is None:
        raise invalid_argument(
            f"{source}: unknown engine argument '{name}', expected one of: {', '.join(_FIELD_TYPES)}"
        )
    if isinstance(value, str):
        value = _VALUE_ALIASES.get(field, {}).get(value, value)
    try:
        if isinstance(value, str) and field in _OBJECT_FIELDS:
            value = msgspec.json.decode(value)
        return msgspec.convert(value, expected, strict=False)
    except (msgspec.DecodeError, UnicodeError) as error:  # JSON strings may contain half of a surrogate pair
        choices = _choices(expected)
        why = f", expected {' or '.join(choices)}" if choices else f": {error}"
        raise invalid_argument(f"{source}: engine argument '{name}' is {shown(value)}{why}") from None


def _choices(kind: Any) -> list[str]:
    """The allowed values of a field with a Literal type."""
    if get_origin(kind) is Literal:
        return [f"'{value}'" for value in get_args(kind)]
    parts = [_choices(part) for part in get_args(kind) if part is not type(None)]
    return [*parts[0], "null"] if len(parts) == 1 and parts[0] else []


def _resolve(name: str, value: str, directory: Path, source: str) -> str:
    """An absolute path if `value` exists in `directory`; otherwise `value`, which may be a hub id or a name."""
    path = Path(value)
    try:
        if value and not path.is_absolute() and (directory / path).exists():
            # A hub's cache stores files under other names, so neighbouring parts of a model could not be found by name.
            found = directory / path
            return str(found.absolute() if found.is_file() else found.resolve())
        is_missing_path = value.startswith(("/", ".")) and not path.exists()
    except OSError as error:  # the name is too long, or a directory is not readable
        raise invalid_argument(f"{source}: engine argument '{name}' is {shown(value)}: {error.strerror}") from None
    if is_missing_path:
        raise invalid_argument(f"{source}: engine argument '{name}' is '{value}', which does not exist")
    return value


def _resolve_template(name: str, value: str, directory: Path, source: str) -> str:
    """The absolute path of a file, or a template: as in vLLM, a text that contains a brace or a line break."""
    if not value or any(character in value for character in "{}\n"):
        return value
    path = directory / value
    if not path.is_file():
        raise invalid_argument(
            f"{source}: engine argument '{name}' is {shown(value)}, expected an existing file or a Jinja template"
        )
    return str(path.resolve())
