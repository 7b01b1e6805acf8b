"""ORCA: a model's load in a header of its answer, for load balancers that route by it.

For: /infer and generate. Does not know: the LLM; it reads the family of metrics that Triton reads, whoever reports it.
Invariant: costs a request that does not ask for it one look at its headers; a model that reports no KV cache gets no
header. Source: Triton's orca_http.cc: request header `endpoint-load-metrics-format: text|json`. By design different:
the load is that of the request's own model, where Triton takes whichever model it reads last.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import orjson
from starlette.requests import Request

from llmbackend.core.inference_server import InferenceServer

from .http_fields import header

FORMAT_HEADER: Final = b"endpoint-load-metrics-format"
LOAD_HEADER: Final = "endpoint-load-metrics"
KV_CACHE_FAMILY: Final = "nv_trt_llm_kv_cache_block_metrics"
_BLOCK_TYPE: Final = "kv_cache_block_type"


def load_headers(server: InferenceServer, request: Request, model: str) -> dict[str, str]:
    """The header that `request` asks for, if it does and the model reports its load."""
    style = header(request, FORMAT_HEADER)
    text = _load(server, model, style.lower()) if style else ""
    return {LOAD_HEADER: text} if text else {}


def _load(server: InferenceServer, model: str, style: str) -> str:
    if style not in ("text", "json"):
        return ""
    found: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for sample in server.metric_samples(KV_CACHE_FAMILY):
        if sample.labels.get("model", model) == model and _BLOCK_TYPE in sample.labels:
            found[sample.labels.get("version", "")][sample.labels[_BLOCK_TYPE]] = sample.value
    versions = [blocks for blocks in found.values() if {"tokens_per", "used", "max"} <= blocks.keys()]
    if not versions:
        return ""
    most = sum(blocks["max"] for blocks in versions)
    utilization = sum(blocks["used"] for blocks in versions) / most if most else 0.0
    capacity = int(sum(blocks["max"] * blocks["tokens_per"] for blocks in versions))
    if style == "json":
        named = {"kv_cache_utilization": utilization, "max_token_capacity": capacity}
        return f"JSON {orjson.dumps({'named_metrics': named}).decode()}"
    prefix = "named_metrics."
    return f"TEXT {prefix}kv_cache_utilization={utilization:f}, {prefix}max_token_capacity={capacity}"
