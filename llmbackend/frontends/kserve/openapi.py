"""KServe v2 and Triton's extensions as OpenAPI: one operation for each path, and the schemas that they share.

For: `frontends/openapi.py`, which matches these with the application's routes. Does not know: handlers. Invariant: what
a schema allows is accepted, what it forbids is refused (`make fuzz` sends both kinds). Objects of /infer are open,
since Triton ignores members that it does not know.
"""

from __future__ import annotations

from typing import Any, Final

from ..http.openapi_parts import (
    array,
    body,
    closed,
    json_response,
    open_object,
    operation,
    optional,
    plain_response,
    ref,
    refusals,
)

_DATATYPES: Final = (
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BF16", "BYTES",
)  # fmt: skip
_RETURNED: Final = (
    "finish_reason", "cumulative_logprob", "logprobs",
    "num_input_tokens", "num_output_tokens", "output_ids", "num_cached_tokens",
)  # fmt: skip
"""Outputs of the `llm` backend that a request may ask for."""
_STRING: Final = {"type": "string"}
_BOOLEAN: Final = {"type": "boolean"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_SCALAR: Final = {"type": ["string", "integer", "number", "boolean"]}
_PLACE: Final = {
    "shared_memory_region": _STRING,
    "shared_memory_offset": {**_COUNT, "default": 0},
    "shared_memory_byte_size": _COUNT,
}
_TEXT: Final = {"anyOf": [_STRING, {"type": "array", "items": _STRING, "minItems": 1, "maxItems": 1}]}

SCHEMAS: Final[dict[str, Any]] = {
    "Error": open_object({"error": _STRING}, required=["error"]),
    "ServerMetadata": closed({"name": _STRING, "version": _STRING, "extensions": array(_STRING)}),
    "ModelMetadata": closed(
        {
            "name": _STRING,
            "versions": array(_STRING),
            "platform": _STRING,
            "inputs": array(ref("TensorMetadata")),
            "outputs": array(ref("TensorMetadata")),
        }
    ),
    "TensorMetadata": closed(
        {"name": _STRING, "datatype": _STRING, "shape": array({"type": "integer", "minimum": -1})}
    ),
    "ModelConfig": open_object({"name": _STRING, "backend": _STRING}, required=["name", "backend"]),
    "Duration": closed({"count": _COUNT, "ns": _COUNT}),
    "ModelStatistics": open_object(
        {
            "name": _STRING,
            "version": _STRING,
            "last_inference": _COUNT,
            "inference_count": _COUNT,
            "execution_count": _COUNT,
            "inference_stats": {"type": "object", "additionalProperties": ref("Duration")},
            "response_stats": {
                "type": "object",
                "additionalProperties": {"type": "object", "additionalProperties": ref("Duration")},
            },
            "batch_stats": array({"type": "object"}),
            "memory_usage": array({"type": "object"}),
        },
        required=["name", "version", "inference_count", "execution_count", "inference_stats"],
    ),
    "Statistics": closed({"model_stats": array(ref("ModelStatistics"))}),
    "RepositoryIndexRequest": open_object({"ready": {"type": "boolean", "default": False}}),
    "RepositoryIndex": array(
        closed({"name": _STRING, "version": _STRING, "state": _STRING, "reason": _STRING}, required=["name"])
    ),
    "LoadRequest": open_object(
        {
            "parameters": {
                "type": "object",
                "description": "`config`: a ModelConfig as JSON text, instead of the one on disk. `file:<path>`: "
                "base64 of a file of the model directory; with it `config` is required.",
                "properties": {"config": _STRING},
                "patternProperties": {"^file:": {"type": "string", "contentEncoding": "base64"}},
                "additionalProperties": False,
            }
        }
    ),
    "UnloadRequest": open_object({"parameters": open_object({"unload_dependents": _BOOLEAN})}),
    "TraceSetting": open_object(
        {
            "trace_level": optional(array({"enum": ["OFF", "TIMESTAMPS", "TENSORS"]})),
            "trace_rate": optional(_STRING),
            "trace_count": optional(_STRING),
            "log_frequency": optional(_STRING),
        }
    ),
    "TraceSettings": {
        "type": "object",
        "properties": {"trace_level": array(_STRING)},
        "additionalProperties": _STRING,
        "required": ["trace_level", "trace_rate", "trace_count", "trace_mode"],
    },
    "LogSetting": open_object(
        {
            "log_info": optional(_BOOLEAN),
            "log_warning": optional(_BOOLEAN),
            "log_error": optional(_BOOLEAN),
            "log_verbose_level": optional({"type": "integer", "minimum": 0, "maximum": 2147483647}),
            "log_format": optional({"enum": ["default", "ISO8601"]}),
        }
    ),
    "LogSettings": closed(
        {
            "log_file": _STRING,
            "log_info": _BOOLEAN,
            "log_warning": _BOOLEAN,
            "log_error": _BOOLEAN,
            "log_verbose_level": _COUNT,
            "log_format": _STRING,
        }
    ),
    "StopRequest": open_object({"id": {"type": "string", "minLength": 1}}, required=["id"]),
    "StopResponse": open_object({"id": _STRING, "cancelled": _COUNT}, required=["id", "cancelled"]),
    "SystemSharedMemoryStatus": array(closed({"name": _STRING, "key": _STRING, "offset": _COUNT, "byte_size": _COUNT})),
    "CudaSharedMemoryStatus": array(closed({"name": _STRING, "device_id": _COUNT, "byte_size": _COUNT})),
    "SystemSharedMemoryRegistration": open_object(
        {
            "key": {**_STRING, "description": "The name of the memory in /dev/shm, with a slash before it or without."},
            "offset": {**_COUNT, "default": 0},
            "byte_size": _COUNT,
        },
        required=["key", "byte_size"],
    ),
    "CudaSharedMemoryRegistration": open_object(
        {
            "raw_handle": open_object({"b64": {**_STRING, "contentEncoding": "base64"}}, required=["b64"]),
            "device_id": _COUNT,
            "byte_size": _COUNT,
        },
        required=["raw_handle", "device_id", "byte_size"],
    ),
    "InferRequest": open_object(
        {
            "id": _STRING,
            "parameters": {
                "type": "object",
                "description": "Keys that start with `triton_` are reserved. Others are handed to the model.",
                "properties": {
                    "sequence_id": {"type": ["string", "integer"], "minimum": 0},
                    "sequence_start": _BOOLEAN,
                    "sequence_end": _BOOLEAN,
                    "priority": _COUNT,
                    "timeout": {**_COUNT, "description": "Microseconds."},
                    "binary_data_output": _BOOLEAN,
                },
                "additionalProperties": _SCALAR,
            },
            "inputs": array(ref("InferInput")),
            "outputs": array(ref("InferRequestedOutput")),
        },
        required=["inputs"],
    ),
    "InferInput": open_object(
        {
            "name": _STRING,
            "datatype": {"enum": list(_DATATYPES)},
            "shape": array(_COUNT),
            "parameters": open_object({"binary_data_size": _COUNT, **_PLACE}),
            "data": {
                "description": "Nested or flat, row-major; instead of `binary_data_size` or `shared_memory_region`."
            },
        },
        required=["name", "datatype", "shape"],
    ),
    "InferRequestedOutput": open_object(
        {
            "name": _STRING,
            "parameters": open_object(
                {
                    "binary_data": _BOOLEAN,
                    "classification": {
                        **_COUNT,
                        "description": "So many largest elements, each as text: `value:index[:label]`.",
                    },
                    **_PLACE,
                }
            ),
        },
        required=["name"],
    ),
    "InferResponse": open_object(
        {
            "id": _STRING,
            "model_name": _STRING,
            "model_version": _STRING,
            "parameters": {"type": "object"},
            "outputs": array(
                open_object(
                    {"name": _STRING, "datatype": {"enum": list(_DATATYPES)}, "shape": array(_COUNT)},
                    required=["name", "datatype", "shape"],
                )
            ),
        },
        required=["model_name", "model_version", "outputs"],
    ),
    "GenerateRequest": {
        "type": "object",
        "description": "A key that is the name of an input of the model becomes that tensor, any other a request "
        "parameter. The inputs named here are those of the `llm` backend, whose parameters are sampling parameters "
        "(vLLM's names); another model has its own.",
        "properties": {
            "id": _STRING,
            "text_input": _TEXT,
            "messages": {"type": "string", "description": "A conversation as JSON text, instead of `text_input`."},
            "input_ids": {"type": ["integer", "array"], "items": {"type": "integer"}},
            "sampling_parameters": {"type": "string", "description": "JSON text, instead of `parameters`."},
            "stream": {"type": "boolean", "description": "Several responses; for generate_stream."},
            "exclude_input_in_output": _BOOLEAN,
            **{f"return_{name}": _BOOLEAN for name in _RETURNED},
            "parameters": {"type": "object", "additionalProperties": _SCALAR},
        },
        "additionalProperties": _SCALAR,
    },
    "GenerateResponse": {
        "description": "The model's outputs by name, a tensor of one element as a scalar; or `error`, which Triton "
        "sends with status 200 when the model answers not exactly once.",
        "type": "object",
        "properties": {"model_name": _STRING, "model_version": _STRING, "id": _STRING, "error": _STRING},
        "anyOf": [{"required": ["model_name", "model_version"]}, {"required": ["error"]}],
    },
}

_EVENTS: Final = plain_response("One event per response: `data: <GenerateResponse>`.", "text/event-stream")
_INFER_BODY: Final = {
    "required": True,
    "content": {
        "application/json": {"schema": ref("InferRequest")},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
}
_INFER_PARAMETERS: Final = [
    {
        "name": "Inference-Header-Content-Length",
        "in": "header",
        "description": "Bytes of the JSON part of the body; raw tensors follow it. 0: the body is one raw tensor.",
        "schema": _COUNT,
    },
    {"name": "Content-Encoding", "in": "header", "schema": {"enum": ["identity", "gzip", "deflate"]}},
    {"name": "Accept-Encoding", "in": "header", "schema": _STRING},
]
_INFERRED: Final = {
    "description": "The response; raw tensors behind the JSON when an output was asked for as binary.",
    "content": {
        "application/json": {"schema": ref("InferResponse")},
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
    },
}
_MODEL: Final = refusals("Error", 400, 404, 503)
_MODEL_BODY: Final = refusals("Error", 400, 404, 429, 500, 501, 503)
_REPOSITORY: Final = refusals("Error", 400, 500, 501, 503)
_SHARED_MEMORY: Final = refusals("Error", 400, 500, 501, 503)
_SETTING: Final = refusals("Error", 400, 404, 500, 501, 503)
_TRACE_PATHS: Final = {"/v2/trace/setting": "the server", "/v2/models/{name}/trace/setting": "one model"}
_EMPTY: Final = plain_response("Yes.", "text/plain")
_NO: Final = plain_response("No; for a model with an `Error` that says so.", "text/plain")
_DONE: Final = plain_response("Done; the body is empty.", "application/json")

OPERATIONS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("GET", "/v2/health/live"): operation("Is the server alive?", {"200": _EMPTY, "400": _NO} | refusals("Error", 503)),
    ("GET", "/v2/health/ready"): operation(
        "Does the server take work? Under strict readiness: is every model ready?",
        {"200": _EMPTY, "400": _NO} | refusals("Error", 503),
    ),
    ("GET", "/v2/models/{name}/ready"): operation(
        "Is the model ready?", {"200": _EMPTY, "400": _NO} | refusals("Error", 404, 503)
    ),
    ("GET", "/v2"): operation("Server metadata", {"200": json_response("ServerMetadata")}),
    ("GET", "/v2/models/stats"): operation("Statistics of every model", {"200": json_response("Statistics")}),
    ("GET", "/v2/models/{name}"): operation("Model metadata", {"200": json_response("ModelMetadata")} | _MODEL),
    ("GET", "/v2/models/{name}/config"): operation(
        "The model's configuration, completed", {"200": json_response("ModelConfig")} | _MODEL
    ),
    ("GET", "/v2/models/{name}/stats"): operation(
        "Statistics of one model", {"200": json_response("Statistics")} | _MODEL
    ),
    ("POST", "/v2/repository/index"): operation(
        "The models of the repository and their states",
        {"200": json_response("RepositoryIndex")} | refusals("Error", 400, 500),
        body=body("RepositoryIndexRequest", required=False),
    ),
    ("POST", "/v2/repository/models/{name}/load"): operation(
        "Load or reload a model", {"200": _DONE} | _REPOSITORY, body=body("LoadRequest", required=False)
    ),
    ("POST", "/v2/repository/models/{name}/unload"): operation(
        "Unload a model", {"200": _DONE} | _REPOSITORY, body=body("UnloadRequest", required=False)
    ),
    ("GET", "/v2/systemsharedmemory/status"): operation(
        "The registered regions of system shared memory",
        {"200": json_response("SystemSharedMemoryStatus")} | refusals("Error", 404),
    ),
    ("GET", "/v2/cudasharedmemory/status"): operation(
        "The registered regions of CUDA shared memory: none",
        {"200": json_response("CudaSharedMemoryStatus")} | refusals("Error", 404),
    ),
    ("POST", "/v2/systemsharedmemory/register"): operation(
        "Register a region, which the path must name",
        {"200": _DONE} | _SHARED_MEMORY,
        body=body("SystemSharedMemoryRegistration"),
    ),
    ("POST", "/v2/cudasharedmemory/register"): operation(
        "Refused: this server maps no memory of GPUs",
        {"200": _DONE} | _SHARED_MEMORY,
        body=body("CudaSharedMemoryRegistration"),
    ),
    **{
        ("POST", f"/v2/{kind}sharedmemory/unregister"): operation(
            "Forget a region, once no running request writes to it", {"200": _DONE} | _SHARED_MEMORY
        )
        for kind in ("system", "cuda")
    },
    **{
        ("GET", path): operation(f"The trace settings of {whose}", {"200": json_response("TraceSettings")} | _SETTING)
        for path, whose in _TRACE_PATHS.items()
    },
    **{
        ("POST", path): operation(
            f"Change the trace settings of {whose}; null takes a setting back",
            {"200": json_response("TraceSettings")} | _SETTING,
            body=body("TraceSetting"),
        )
        for path, whose in _TRACE_PATHS.items()
    },
    ("GET", "/v2/logging"): operation("The log settings", {"200": json_response("LogSettings")}),
    ("POST", "/v2/logging"): operation(
        "Change the log settings", {"200": json_response("LogSettings")} | _SETTING, body=body("LogSetting")
    ),
    ("POST", "/v2/models/{name}/infer"): operation(
        "One request, one response", {"200": _INFERRED} | _MODEL_BODY, body=_INFER_BODY, parameters=_INFER_PARAMETERS
    ),
    ("POST", "/v2/models/{name}/generate"): operation(
        "One request, one response, as flat JSON",
        {"200": json_response("GenerateResponse")} | _MODEL_BODY,
        body=body("GenerateRequest"),
    ),
    ("POST", "/v2/models/{name}/generate_stream"): operation(
        "One request, a stream of responses",
        {"200": _EVENTS} | refusals("Error", 400, 404, 429, 500, 501, 503, streaming=True),
        body=body("GenerateRequest"),
    ),
    **{
        ("POST", f"/v2/models/{{name}}/{name}"): operation(
            "Stop running requests by their id",
            {"200": json_response("StopResponse")} | _MODEL_BODY,
            body=body("StopRequest"),
        )
        for name in ("stop", "stopInfer")
    },
}
