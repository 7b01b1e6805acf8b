"""Model statistics as Triton's JSON: every field present, numbers as numbers, keys in Triton's order.

For: the stats endpoints. Does not know: who counts. Source: Triton's statistics extension; order as recorded from
Triton 2.51.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tritonclient.grpc.service_pb2 import ModelStatistics

_INFER = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_BATCH = ("compute_input", "compute_infer", "compute_output")
_RESPONSE = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


def statistics_to_json(models: Iterable[ModelStatistics]) -> dict[str, Any]:
    return {"model_stats": [_model(model) for model in models]}


def _model(model: Any) -> dict[str, Any]:
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": model.last_inference,
        "inference_count": model.inference_count,
        "execution_count": model.execution_count,
        "inference_stats": _durations(model.inference_stats, _INFER),
        "response_stats": {
            key: _durations(model.response_stats[key], _RESPONSE) for key in sorted(model.response_stats)
        },
        "batch_stats": [{"batch_size": row.batch_size} | _durations(row, _BATCH) for row in model.batch_stats],
        "memory_usage": [{"type": row.type, "id": row.id, "byte_size": row.byte_size} for row in model.memory_usage],
    }


def _durations(message: Any, names: tuple[str, ...]) -> dict[str, dict[str, int]]:
    return {name: {"count": getattr(message, name).count, "ns": getattr(message, name).ns} for name in names}
