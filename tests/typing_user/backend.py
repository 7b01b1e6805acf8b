"""A backend (docs/backend_authors.md)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmbackend.core.backend_api import (
    Backend,
    ExecutionPolicy,
    MemoryUsage,
    Model,
    ModelInstance,
    Request,
    ResponseFlag,
    Tensor,
    TritonError,
    check_api_version,
    invalid_argument,
    process_memory,
    responses_together,
)

BUILT_FOR_API = (1, 19)
LLMBACKEND_API_VERSION = (1, 0)


def TRITONBACKEND_Initialize(backend: Backend) -> None:
    check_api_version(backend, BUILT_FOR_API)
    backend.execution_policy = ExecutionPolicy.BLOCKING


def TRITONBACKEND_ModelInitialize(model: Model) -> None:
    if not model.config.input:  # pyright: ignore[reportUnknownMemberType]  tritonclient's classes have no types
        raise invalid_argument(f"model '{model.name}' has no input, expected TEXT")


def TRITONBACKEND_ModelInstanceExecute(instance: ModelInstance, requests: Sequence[Request]) -> None:
    start_ns = time.monotonic_ns()
    with responses_together():
        for request in requests:
            _answer(request)
    end_ns = time.monotonic_ns()
    instance.report_batch_statistics(len(requests), start_ns, start_ns, end_ns, end_ns)


def LLMBACKEND_ModelInstanceMemoryUsage(instance: ModelInstance) -> Sequence[MemoryUsage]:
    return process_memory(1)


def LLMBACKEND_ModelForecast(model: Model) -> Mapping[str, Any]:
    return {"memory_bytes": 0}


def _answer(request: Request) -> None:
    factory = request.response_factory()
    text: str = request.inputs["TEXT"].data.ravel()[0].decode()
    error: TritonError | None = None
    factory.send([Tensor.text("REVERSED", text[::-1])], ResponseFlag.FINAL)
    factory.close()
    assert error is None
    request.release()
