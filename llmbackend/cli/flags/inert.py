"""Triton's flags without effect here: accepted, so that a command line written for Triton starts this server, with one
warning for each that was given.

For: the command line. Does not know: other flags. Invariant: a flag is here only if no client can see a difference, or
if its warning says that what it would turn on is missing.
Source: Triton's command_line_parser.cc.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

_MEMORY = "tensors are kept in ordinary memory, and each engine manages its GPU memory by itself"
_GRPC = "gRPC runs on one event loop, which makes objects as it needs them"
_FRONTEND = "this front end is not built; KServe v2, generate and OpenAI are served"

REASONS = {
    "enable_peer_access": "the host copies nothing between GPUs",
    "http_thread_count": "HTTP runs on one event loop",
    "grpc_infer_thread_count": _GRPC,
    "grpc_infer_allocation_pool_size": _GRPC,
    "grpc_max_response_pool_size": _GRPC,
    "allow_gpu_metrics": "metrics of GPUs are not collected",
    "pinned_memory_pool_byte_size": _MEMORY,
    "cuda_memory_pool_byte_size": _MEMORY,
    "cuda_virtual_address_size": _MEMORY,
    "model_load_gpu_limit": _MEMORY,
    "buffer_manager_thread_count": "tensors are not copied on the way to a backend",
    "cache_directory": "the caches local and redis are built in, and Triton's libraries can not be loaded",
    "allow_sagemaker": _FRONTEND,
    "sagemaker_port": _FRONTEND,
    "sagemaker_safe_port_range": _FRONTEND,
    "sagemaker_thread_count": _FRONTEND,
    "allow_vertex_ai": _FRONTEND,
    "vertex_ai_port": _FRONTEND,
    "vertex_ai_thread_count": _FRONTEND,
    "vertex_ai_default_model": _FRONTEND,
}


def _ignored(name: str) -> Any:
    return typer.Option(help=f"No effect: {REASONS[name]}.", metavar="VALUE")


@dataclass(frozen=True)
class InertFlags:
    """Any value is taken, and any number of times."""

    PANEL: ClassVar = "Flags of Triton without effect here"

    enable_peer_access: Annotated[list[str] | None, _ignored("enable_peer_access")] = None
    http_thread_count: Annotated[list[str] | None, _ignored("http_thread_count")] = None
    grpc_infer_thread_count: Annotated[list[str] | None, _ignored("grpc_infer_thread_count")] = None
    grpc_infer_allocation_pool_size: Annotated[list[str] | None, _ignored("grpc_infer_allocation_pool_size")] = None
    grpc_max_response_pool_size: Annotated[list[str] | None, _ignored("grpc_max_response_pool_size")] = None
    allow_gpu_metrics: Annotated[list[str] | None, _ignored("allow_gpu_metrics")] = None
    pinned_memory_pool_byte_size: Annotated[list[str] | None, _ignored("pinned_memory_pool_byte_size")] = None
    cuda_memory_pool_byte_size: Annotated[list[str] | None, _ignored("cuda_memory_pool_byte_size")] = None
    cuda_virtual_address_size: Annotated[list[str] | None, _ignored("cuda_virtual_address_size")] = None
    model_load_gpu_limit: Annotated[list[str] | None, _ignored("model_load_gpu_limit")] = None
    buffer_manager_thread_count: Annotated[list[str] | None, _ignored("buffer_manager_thread_count")] = None
    cache_directory: Annotated[list[str] | None, _ignored("cache_directory")] = None
    allow_sagemaker: Annotated[list[str] | None, _ignored("allow_sagemaker")] = None
    sagemaker_port: Annotated[list[str] | None, _ignored("sagemaker_port")] = None
    sagemaker_safe_port_range: Annotated[list[str] | None, _ignored("sagemaker_safe_port_range")] = None
    sagemaker_thread_count: Annotated[list[str] | None, _ignored("sagemaker_thread_count")] = None
    allow_vertex_ai: Annotated[list[str] | None, _ignored("allow_vertex_ai")] = None
    vertex_ai_port: Annotated[list[str] | None, _ignored("vertex_ai_port")] = None
    vertex_ai_thread_count: Annotated[list[str] | None, _ignored("vertex_ai_thread_count")] = None
    vertex_ai_default_model: Annotated[list[str] | None, _ignored("vertex_ai_default_model")] = None

    def warnings(self) -> tuple[str, ...]:
        """One text for each flag that was given."""
        given = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None]
        return tuple(f"--{name.replace('_', '-')} has no effect: {REASONS[name]}" for name in given)
