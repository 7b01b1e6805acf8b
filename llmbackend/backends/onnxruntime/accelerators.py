"""ONNX Runtime's execution providers for an instance, and which of the configured accelerators are supported.

Only `openvino` on the CPU is supported, if the installed onnxruntime has its provider; its parameters are that
provider's options. Source: Triton's ONNX Runtime backend, which refuses unsupported accelerators.
"""

from __future__ import annotations

import logging
from typing import Any

import onnxruntime

from llmbackend.core.backend_api import ACCELERATORS_FIELD, InstanceGroupKind, ModelConfig, accelerator_names

_log = logging.getLogger(__name__)
_OPENVINO = "OpenVINOExecutionProvider"
_NAME = "openvino (cpu)"
_ABSENT = (
    f'the installed onnxruntime has no {_OPENVINO}; backend: "openvino" with default_model_filename: "model.onnx" '
    "runs the file with OpenVINO"
)
_UNKNOWN = "the backend supports only openvino on the CPU"


def has_openvino() -> bool:
    return _OPENVINO in onnxruntime.get_available_providers()


def warn_of_accelerators(config: ModelConfig) -> None:
    """Logs one WARNING that names all unsupported accelerators."""
    reasons = {}
    for name in accelerator_names(config):
        if name != _NAME:
            reasons[name] = _UNKNOWN
        elif not has_openvino():
            reasons[name] = _ABSENT
    if reasons:
        why = "; ".join(dict.fromkeys(reasons.values()))
        _log.warning(
            "model '%s': '%s' has no effect for %s: %s", config.name, ACCELERATORS_FIELD, ", ".join(reasons), why
        )


def providers(config: ModelConfig, kind: InstanceGroupKind, device_id: int) -> list[Any]:
    """The providers of a session in order of preference."""
    found: list[Any] = ["CPUExecutionProvider"]
    for accelerator in config.optimization.execution_accelerators.cpu_execution_accelerator:
        if accelerator.name == "openvino" and has_openvino():
            found.insert(0, (_OPENVINO, {"device_type": "CPU", **accelerator.parameters}))
    if kind is InstanceGroupKind.GPU:
        found.insert(0, ("CUDAExecutionProvider", {"device_id": device_id}))
    return found
