"""Flags of Triton and of vLLM's server that have no effect here or are refused, with the reasons. vLLM's engine
arguments are in `adapter/foreign_engine_args.py`.

Invariants: a flag has no effect only if no client can see a difference, or if its warning says what is missing; one
that would change answers is accepted only with values that change nothing.
Sources: Triton's command_line_parser.cc; vLLM's FrontendArgs 0.33.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from ...server.start_failure import flag_of
from ..command_line import bad_option, switch_of

_MEMORY = "tensors are in host memory, and each engine manages its own GPU memory"
_GRPC = "gRPC runs on one event loop, which creates objects as needed"
_FRONTEND = "this frontend does not exist; KServe v2, generate and OpenAI are served"
_LOG = "requests are logged only with --log-requests, and never their content"
_SUPERVISOR = "several machines are one server with --cluster"
_COHERE = "Cohere's API is not served"

TRITON: Final[Mapping[str, str]] = {
    "enable_peer_access": "the host copies nothing between GPUs",
    "http_thread_count": "HTTP runs on one event loop",
    "grpc_infer_thread_count": _GRPC,
    "grpc_infer_allocation_pool_size": _GRPC,
    "grpc_max_response_pool_size": _GRPC,
    "allow_gpu_metrics": "GPU metrics are not collected",
    "pinned_memory_pool_byte_size": _MEMORY,
    "cuda_memory_pool_byte_size": _MEMORY,
    "cuda_virtual_address_size": _MEMORY,
    "model_load_gpu_limit": _MEMORY,
    "buffer_manager_thread_count": "tensors are not copied on the way to a backend",
    "allow_sagemaker": _FRONTEND,
    "sagemaker_port": _FRONTEND,
    "sagemaker_safe_port_range": _FRONTEND,
    "sagemaker_thread_count": _FRONTEND,
    "allow_vertex_ai": _FRONTEND,
    "vertex_ai_port": _FRONTEND,
    "vertex_ai_thread_count": _FRONTEND,
    "vertex_ai_default_model": _FRONTEND,
}
VLLM_SWITCHES: Final[Mapping[str, str]] = {
    "disable_uvicorn_access_log": _LOG,
    "enable_flash_late_interaction": "only models that generate text are served",
    "enable_log_deltas": _LOG,
    "enable_offline_docs": "/docs loads its page from a public address",
    "enable_prompt_tokens_details": "usage always has prompt_tokens_details",
    "enable_scale_out": "/v1/chat/completions/render and /v1/completions/render are always served",
    "enable_ssl_refresh": "SIGHUP makes the server reload its certificates",
    "enable_server_load_tracking": "GET /load is always served",
    "exclude_tools_when_tool_choice_none": "with 'tool_choice': 'none' the prompt has no tools",
    "log_error_stack": "server errors are logged with a stack trace",
    "trust_request_mm_kwargs": "only text is served",
    "cohere_is_reasoning_model": _COHERE,
}
VLLM_VALUES: Final[Mapping[str, str]] = {
    "cohere_format": _COHERE,
    "data_parallel_supervisor_port": _SUPERVISOR,
    "disable_access_log_for_endpoints": _LOG,
    "dp_supervisor_probe_failure_threshold": _SUPERVISOR,
    "dp_supervisor_probe_interval_s": _SUPERVISOR,
    "dp_supervisor_probe_timeout_s": _SUPERVISOR,
    "max_log_len": _LOG,
    "uvicorn_log_level": "HTTP writes to the server's log: see --log-level",
}
REASONS: Final[Mapping[str, str]] = {**TRITON, **VLLM_SWITCHES, **VLLM_VALUES}
"""Flag without effect → why."""
REFUSED_SWITCHES: Final[Mapping[str, str]] = {
    "grpc": "vLLM's own gRPC service is not served; --grpc-port opens that of KServe v2",
    "headless": "several machines are one server with --cluster",
    "enable_log_outputs": "answers are never logged",
    "tokens_only": "all APIs are served; --http-restricted-api restricts them",
}
REFUSED_VALUES: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "anthropic_disabled_thinking_effort": (("auto",), "the chat template decides"),
    "response_role": (("assistant",), "the OpenAI API defines no other role for an answer"),
    "tool_parser_plugin": (("",), "third-party code is not loaded; --tool-call-parser selects a known format"),
    "tool_server": ((), "the server runs no tools; clients do"),
    "tool_strict_level": (("auto",), "a request's 'strict' and 'tool_choice' determine what is enforced"),
}
"""Flag → the values that change nothing, and why no other is accepted."""


class InertFlags:
    """Those that were set. If a flag has no effect, any value is accepted."""

    def __init__(self, **flags: Any) -> None:
        self._given = {name: value for name, value in flags.items() if value is not None}

    @classmethod
    def parameters(cls) -> dict[str, inspect.Parameter]:
        panel = "Triton and vLLM flags that have no effect here"
        found: dict[str, Any] = {}
        for name in (*TRITON, *VLLM_VALUES):
            option = typer.Option(help=f"No effect: {REASONS[name]}.", metavar="VALUE", rich_help_panel=panel)
            found[name] = Annotated[list[str] | None, option]
        for name in (*VLLM_SWITCHES, *REFUSED_SWITCHES):
            option = typer.Option(switch_of(name), help=_help(name), hidden=True)
            found[name] = Annotated[bool | None, option]
        for name in REFUSED_VALUES:
            found[name] = Annotated[list[str] | None, typer.Option(help=_help(name), hidden=True)]
        return {
            name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in found.items()
        }

    def warnings(self) -> tuple[str, ...]:
        """One text for each flag that was set. Raises BadParameter for a refused one."""
        for name, value in self._given.items():
            allowed, reason = REFUSED_VALUES.get(name, ((), REFUSED_SWITCHES.get(name, "")))
            if reason and value is not False and not set(value if isinstance(value, list) else ["on"]) <= set(allowed):
                shown = f" is '{value[-1]}', which" if isinstance(value, list) else ""
                raise bad_option(flag_of(name), f"{flag_of(name)}{shown} is not supported: {reason}")
        return tuple(f"{flag_of(name)} has no effect: {REASONS[name]}" for name in self._given if name in REASONS)


def _help(name: str) -> str:
    if name in REASONS:
        return f"No effect: {REASONS[name]}."
    return f"Not supported: {REFUSED_SWITCHES.get(name) or REFUSED_VALUES[name][1]}."
