"""The engine's arguments as flags of `llmbackend serve`, for the only model of `--model`.

Independent of what an argument means. Invariants: every engine argument of a model.json (adapter.engine_args) is a flag
with vLLM's name and the same type and default; flags that are not set are not passed on; errors name flags.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec
import typer

from llmbackend.adapter.engine_args import LORA_MODULES, OWN_PARAMETERS
from llmbackend.adapter.foreign_engine_args import (
    FORMER_NAMES,
    NO_EFFECT,
    ONLY_VALUE,
    ONLY_VALUE_BECAUSE,
    STORED_QUANTIZATION,
    STORED_QUANTIZATION_BECAUSE,
    SWITCHES,
)
from llmbackend.core.errors import TritonError
from llmbackend.engine.config import EngineConfig

from ...server.settings import SingleModel
from ...server.start_failure import advice, as_flags, flag_of
from ..command_line import bad_option, one_of, switch_of
from ..vllm_notation import whole_number

_MODEL: Final = "--model: weights and text"
_MEMORY: Final = "--model: memory and batches"
_COMPUTE: Final = "--model: device and computation"
_LORA: Final = "--model: LoRA adapters"
_PROCESS: Final = "--model: the engine's process"
_QUEUE: Final = "--model: request limits"
_OTHER: Final = "--model: other engine arguments"
_INERT: Final = "--model: vLLM arguments that have no effect here"

_HELP: Final[Mapping[str, tuple[str, str]]] = {
    "tokenizer": (_MODEL, "Directory or hub id of the tokenizer; default: the model's."),
    "skip_tokenizer_init": (_MODEL, "No tokenizer: requests and answers are token ids."),
    "chat_template": (_MODEL, "File of a chat template (Jinja), or the template itself; default: the model's."),
    "tool_call_parser": (_MODEL, "Format of the model's tool calls (vLLM's names); default: from its chat template."),
    "reasoning_parser": (_MODEL, "Format of the model's reasoning (vLLM's names); default: from its chat template."),
    "chat_template_content_format": (_MODEL, "A message's content for the template: openai = a list of parts."),
    "default_chat_template_kwargs": (_MODEL, 'Variables of the template, as JSON: {"enable_thinking": false}.'),
    "trust_request_chat_template": (_MODEL, "Allow requests to bring their own chat template (chat_template)."),
    "max_logprobs": (_MODEL, "Maximum number of log probabilities per position; -1 = all."),
    "generation_config": (_MODEL, "Sampling defaults: auto = the model's, vllm = none, or a folder with the file."),
    "override_generation_config": (_MODEL, "Sampling defaults, as JSON; max_new_tokens limits all requests."),
    "trust_remote_code": (_MODEL, "Run code from the checkpoint."),
    "dtype": (_MODEL, "Data type of weights and activations."),
    "quantization": (_MODEL, "Quantization of plain weights to 8 or 4 bits while loading."),
    "load_format": (_MODEL, "safetensors, or dummy for random weights."),
    "weight_cache_dir": (_MODEL, "Folder of packed weights for faster starts; default: ~/.cache/llmbackend/weights."),
    "weight_cache_size": (_MODEL, "Maximum size of that folder in GiB; 0 = store none. (default: 32)"),
    "max_model_len": (_MODEL, "Context limit in tokens (32k, 32K), or auto; default: the model's."),
    "seed": (_MODEL, "Seed of random weights."),
    "max_num_seqs": (_MEMORY, "Maximum number of requests per step. (default: 64; 256 on a GPU)"),
    "max_num_batched_tokens": (_MEMORY, "Token budget per step. (default: 512; 8192 on a GPU)"),
    "step_target_ms": (_MEMORY, "Maximum duration of a step that mixes prefills and decodes, ms; 0 = no limit."),
    "long_prefill_token_threshold": (_MEMORY, "Prompts longer than this leave half of each step to shorter ones."),
    "kv_cache_memory_bytes": (_MEMORY, "KV cache memory (4G); default on CPU: 1 GiB, or more for --max-model-len."),
    "kv_cache_dtype": (_MEMORY, "Data type of the KV cache; 8 bits on a GPU."),
    "gpu_memory_utilization": (_MEMORY, "Fraction of a GPU's memory to use."),
    "num_kv_blocks": (_MEMORY, "KV cache size in blocks instead of bytes."),
    "block_size": (_MEMORY, "Tokens per KV block."),
    "enable_prefix_caching": (_MEMORY, "Reuse the KV cache of prompts with the same prefix."),
    "kv_events_config": (_MEMORY, 'KV cache events for external routers: {"enable_kv_cache_events": true}.'),
    "kv_offloading_size": (_MEMORY, "Host memory for KV blocks that do not fit on a GPU, GiB."),
    "num_host_kv_blocks": (_MEMORY, "Host memory for KV blocks that do not fit on a GPU, in blocks."),
    "device": (_COMPUTE, "cpu, cuda, cuda:N, or auto: a GPU if there is one. (default: auto)"),
    "tensor_parallel_size": (_COMPUTE, "Number of tensor-parallel ranks."),
    "pipeline_parallel_size": (_COMPUTE, "Number of pipeline stages."),
    "num_threads": (_COMPUTE, "CPU threads; 0 = one per usable CPU, one fewer with 8 or more."),
    "cluster_resources": (_COMPUTE, 'Ray resources of an engine: {"CPU": 4, "node:10.0.0.2": 0.01}.'),
    "speculative_config": (_COMPUTE, 'N-gram speculation: {"method": "ngram", "num_speculative_tokens": 4}.'),
    "structured_outputs_config": (_COMPUTE, 'Structured output: {"disable_any_whitespace": true}.'),
    "async_scheduling": (_COMPUTE, "Schedule the next step while one runs; default: if possible."),
    "enforce_eager": (_COMPUTE, "No native program on CPU, no graphs on a GPU."),
    "cudagraph_capture_sizes": (_COMPUTE, "Sizes of CUDA graphs in tokens, as a JSON list."),
    "batch_invariant": (_COMPUTE, "Make results independent of the batch, on a GPU."),
    "kernels": (_COMPUTE, "Set to torch to use no Triton kernels."),
    "enable_lora": (_LORA, "Serve LoRA adapters of the model."),
    "lora_modules": (_LORA, "A LoRA adapter, listed as a model by the OpenAI API; repeatable."),
    "max_loras": (_LORA, "Maximum number of adapters in GPU memory."),
    "max_cpu_loras": (_LORA, "Maximum number of adapters in CPU memory; others are read when requests name them."),
    "max_lora_rank": (_LORA, "Maximum rank of an adapter."),
    "transport": (_PROCESS, "inline: the engine runs in the server's process."),
    "engine_python": (_PROCESS, "The Python that runs the engine; default: the server's."),
    "step_timeout_s": (_PROCESS, "Seconds after which a step counts as hung."),
    "load_timeout_s": (_PROCESS, "Seconds after which loading counts as hung."),
    "idle_unload_s": (_PROCESS, "Seconds without requests after which the engine ends until the next one; 0 = never."),
    "max_engine_failures": (_PROCESS, "Consecutive engine failures after which the model is given up."),
    "max_queue_size": (_QUEUE, "Maximum queue length; further requests get 503. (default: 4096)"),
    "max_prompt_tokens": (_QUEUE, "Maximum prompt length in tokens; default: the context length."),
    "max_output_tokens": (_QUEUE, "Upper bound to which max_tokens is reduced; default: the context length."),
    "max_messages_bytes": (_QUEUE, "Maximum size of a chat's `messages`, bytes."),
    "request_timeout_s": (_QUEUE, "Seconds after which a request is ended; default: none."),
    "stall_timeout_s": (_QUEUE, "Seconds with work but without a step until not ready. (default: 60)"),
}
"""Argument → its group and text in --help. Other arguments become flags without a text."""

GIVEN_ELSEWHERE = frozenset(
    {
        "model", "served_model_name", "download_dir", "enable_log_requests", "hf_token", "log_level",
        "max_num_queued_reqs", "otlp_traces_endpoint", "revision", "shutdown_timeout", "stream_interval",
        "tokenizer_revision",
    }
)  # fmt: skip
"""Arguments that are flags of the server rather than the engine."""
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {"num_kv_blocks": ("--num-gpu-blocks-override",)}
_WHOLE_NUMBERS = ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes")
_SPECULATION: Final = {"spec_method": "method", "spec_model": "model", "spec_tokens": "num_speculative_tokens"}
"""vLLM's short flags for keys of --speculative-config."""


class EngineFlags:
    """The flags that were set, by argument name. Values are text, or booleans for switches."""

    def __init__(self, **flags: Any) -> None:
        self._given = {name: value for name, value in flags.items() if value is not None and value != []}

    @classmethod
    def parameters(cls) -> dict[str, inspect.Parameter]:
        """One parameter per flag."""
        found = {field.name: _flag(field) for field in msgspec.structs.fields(EngineConfig)}
        found |= {name: _text_flag(name, _QUEUE, "NUMBER", "") for name in OWN_PARAMETERS}
        found |= {name: _former_flag(name) for name in FORMER_NAMES}
        found |= {name: _text_flag(name, _COMPUTE, "VALUE", "A key of --speculative-config.") for name in _SPECULATION}
        found |= {name: _inert_flag(name) for name in (*sorted(NO_EFFECT), *ONLY_VALUE)}
        return {
            name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in found.items()
            if name not in GIVEN_ELSEWHERE
        }

    def get(self, name: str) -> Any:
        """None = not set."""
        return self._given.get(name)

    def with_values(self, values: Mapping[str, Any]) -> EngineFlags:
        return EngineFlags(**{**self._given, **values})

    def with_defaults(self, values: Mapping[str, Any]) -> EngineFlags:
        """values: of flags that were not set."""
        return EngineFlags(**{**values, **self._given})

    def warnings(self) -> tuple[str, ...]:
        """One text for each flag that was set and has no effect here."""
        return tuple(self._without_effect().values())

    def _without_effect(self) -> dict[str, str]:
        """The warning by argument."""
        found = {name: f"{flag_of(name)} has no effect here: {why}" for name, why in NO_EFFECT.items()}
        if (stored := self._given.get("quantization")) in STORED_QUANTIZATION:
            found["quantization"] = f"--quantization {stored} has no effect here: {STORED_QUANTIZATION_BECAUSE}"
        return {name: found[name] for name in self._given if name in found}

    def model(self, model: str, names: Sequence[str] = ()) -> SingleModel | None:
        """The checkpoint with these flags; None without `model`. names: the names under which it is served. Raises
        BadParameter that names the flag."""
        if not model:
            if self._given:
                message = "is an engine argument of --model; models of a repository have theirs in model.json"
                first = flag_of(next(iter(self._given)))
                raise typer.BadParameter(f"{first} {message}", param_hint=first)
            return None
        without_effect = self._without_effect()
        given = {name: value for name, value in self._given.items() if name not in without_effect}
        if LORA_MODULES in given:
            given[LORA_MODULES] = _lora_modules(given[LORA_MODULES])
        for name in _WHOLE_NUMBERS:
            if name in given:
                given[name] = whole_number(given[name])
        if short := {_SPECULATION[name]: given.pop(name) for name in _SPECULATION if name in given}:
            if "speculative_config" in given:
                raise bad_option("--speculative-config", "give either --speculative-config or --spec-…, not both")
            given["speculative_config"] = json.dumps(short)
        _check_parsers(given)
        try:
            return SingleModel.checked(model, names, given)
        except (TritonError, ValueError) as error:
            text = as_flags(str(error))
            flag = next(iter(re.findall(r"--[\w-]+", text)), "--model")
            raise typer.BadParameter(f"{text.rstrip('.')}. {advice(text, 'See --help.')}", param_hint=flag) from None


def _check_parsers(given: Mapping[str, Any]) -> None:
    """Raises BadParameter for an unknown parser."""
    if not given.keys() & {"tool_call_parser", "reasoning_parser"}:
        return  # importing the frontend takes half a second
    from llmbackend.frontends.generation.parsers import REASONING_FORMATS, TOOL_CALL_FORMATS

    for parser, formats in (("tool_call_parser", TOOL_CALL_FORMATS), ("reasoning_parser", REASONING_FORMATS)):
        name, flag = given.get(parser, ""), flag_of(parser)
        if name and name not in formats:
            message = f"{flag} is '{name}', expected one of: {', '.join(sorted(formats))}"
            raise typer.BadParameter(message, param_hint=flag)


def _flag(field: msgspec.structs.FieldInfo) -> Any:
    name, kinds = field.name, _kinds(field.type)
    panel, help_text = _HELP.get(name, (_OTHER, ""))
    is_hidden = name.startswith("mock_") or name == "fault_directory"
    if bool in kinds:
        default = "" if field.default is None else f"(default: {'on' if field.default else 'off'})"
        text = f"{help_text} {default}".strip()
        option = typer.Option(switch_of(name), help=text, rich_help_panel=panel, hidden=is_hidden, show_default=False)
        return Annotated[bool | None, option]
    if name == LORA_MODULES:
        option = typer.Option(flag_of(name), metavar="NAME=PATH", help=help_text, rich_help_panel=panel)
        return Annotated[list[str] | None, option]
    shown = help_text
    has_default = isinstance(field.default, int | float) or (isinstance(field.default, str) and field.default)
    if has_default and "(default: " not in help_text:
        shown += f" (default: {field.default})"
    return _text_flag(name, panel, _metavar(kinds), shown.strip(), hidden=is_hidden)


def _text_flag(name: str, panel: str, metavar: str, help_text: str, hidden: bool = False) -> Any:
    help_text = help_text or _HELP.get(name, ("", ""))[1]
    option = typer.Option(
        flag_of(name),
        *_OTHER_NAMES.get(name, ()),
        metavar=metavar,
        help=help_text,
        rich_help_panel=panel,
        hidden=hidden,
        autocompletion=one_of(*metavar.split("|")) if "|" in metavar else None,
    )
    return Annotated[str | None, option]


def _former_flag(name: str) -> Any:
    """A structured-output flag under its former vLLM name."""
    text = "vLLM's former name; see --structured-outputs-config."
    if "_disable_" in name:
        option = typer.Option(switch_of(name), help=text, hidden=True)
        return Annotated[bool | None, option]
    return _text_flag(name, _COMPUTE, "NAME", text, hidden=True)


def only_text(name: str) -> str:
    """The help of an argument in ONLY_VALUE."""
    return f"Only {' or '.join(json.dumps(value) for value in ONLY_VALUE[name])}: {ONLY_VALUE_BECAUSE[name]}."


def _inert_flag(name: str) -> Any:
    only = ONLY_VALUE.get(name)
    text = f"No effect: {NO_EFFECT[name]}." if only is None else only_text(name)
    if name in SWITCHES:
        option = typer.Option(switch_of(name), help=text, rich_help_panel=_INERT, hidden=True)
        return Annotated[bool | None, option]
    return _text_flag(name, _INERT, "VALUE", text, hidden=True)


def _kinds(kind: Any) -> tuple[Any, ...]:
    """The permitted types of a value, without None."""
    parts = get_args(kind) if get_origin(kind) not in (None, Literal, tuple, dict) else (kind,)
    return tuple(part for part in parts if part is not type(None))


def number_arguments() -> frozenset[str]:
    """Names of the arguments whose values are numbers."""
    fields = msgspec.structs.fields(EngineConfig)
    return frozenset(
        {*OWN_PARAMETERS, *(field.name for field in fields if {int, float}.issuperset(_kinds(field.type)))}
    )


def _metavar(kinds: tuple[Any, ...]) -> str:
    choices = [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    if choices:
        return "|".join(choices)
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}.get(kinds[0], "JSON")


def _lora_modules(items: list[str]) -> Mapping[str, str]:
    """`name=path`, or vLLM's JSON object with `name` and `path`."""
    modules: dict[str, str] = {}
    for item in items:
        name, _, path = item.partition("=")
        if item.lstrip().startswith("{"):
            try:
                value = json.loads(item)
                name, path = value["name"], value["path"]
            except (ValueError, KeyError, TypeError):
                name = path = ""
        if not (isinstance(name, str) and isinstance(path, str) and name and path):
            message = f"--lora-modules is '{item}', expected NAME=PATH"
            raise typer.BadParameter(message, param_hint="--lora-modules")
        modules[name] = str(Path(path).expanduser().resolve())
    return modules
