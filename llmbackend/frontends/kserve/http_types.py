"""The paths of models under /v2, and the types of KServe's JSON, for /openapi.json.

Invariant: what a type allows is accepted, what it forbids is refused (`make fuzz` sends both). Requests may have
additional members, which Triton ignores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Required

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, with_config
from starlette.exceptions import HTTPException
from starlette.requests import Request
from typing_extensions import TypedDict  # pydantic accepts typing.TypedDict only from Python 3.12 on

from llmbackend.core.messages import TensorMetadata

from ..http.routing import ENCODED_SLASH, Count, whole_number

MODEL_PATHS: Final = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
_MAX_VERSION: Final = 10**18 - 1


def model_paths(action: str = "") -> tuple[str, ...]:
    return tuple(path + action for path in MODEL_PATHS)


def model_name_of(request: Request) -> str:
    """The name in the request's path, which may contain slashes."""
    name: str = request.path_params["name"]
    return name.replace(ENCODED_SLASH, "/")


def model_of(request: Request) -> tuple[str, int]:
    """(name, version) in the path; version -1: none. Raises HTTPException 404 if the version is not a number."""
    name, version = model_name_of(request), request.path_params.get("version")
    if version is None:
        return name, -1
    if (number := whole_number(version, 0, _MAX_VERSION)) is None:
        raise HTTPException(404)
    return name, number


Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BF16", "BYTES",
]  # fmt: skip
Scalar = str | int | float | bool
_Base64 = Annotated[str, WithJsonSchema({"type": "string", "contentEncoding": "base64"})]


class ModelMetadata(TypedDict):
    name: str
    versions: Sequence[str]
    platform: str
    inputs: Sequence[TensorMetadata]
    outputs: Sequence[TensorMetadata]


@with_config(extra="allow")
class ModelConfig(TypedDict):
    name: str
    backend: str


class Duration(TypedDict):
    count: Count
    ns: Count


@with_config(extra="allow")
class ModelStatistics(TypedDict, total=False):
    name: Required[str]
    version: Required[str]
    last_inference: Count
    inference_count: Required[Count]
    execution_count: Required[Count]
    inference_stats: Required[dict[str, Duration]]
    response_stats: dict[str, dict[str, Duration]]
    batch_stats: list[dict[str, Any]]
    memory_usage: list[dict[str, Any]]


class Statistics(TypedDict):
    model_stats: list[ModelStatistics]


class RepositoryIndexRequest(TypedDict, total=False):
    ready: bool


class LoadRequest(TypedDict, total=False):
    parameters: Annotated[
        dict[str, str],
        WithJsonSchema(
            {
                "type": "object",
                "description": "`config`: a ModelConfig as JSON text, instead of the one on disk. `file:<path>`: "
                "base64 of a file of the model directory; with it `config` is required.",
                "properties": {"config": {"type": "string"}},
                "patternProperties": {"^file:": {"type": "string", "contentEncoding": "base64"}},
                "additionalProperties": False,
            }
        ),
    ]


class UnloadParameters(TypedDict, total=False):
    unload_dependents: bool


class UnloadRequest(TypedDict, total=False):
    parameters: UnloadParameters


class TraceSetting(TypedDict, total=False):
    trace_level: list[Literal["OFF", "TIMESTAMPS", "TENSORS"]] | None
    trace_rate: str | None
    trace_count: str | None
    log_frequency: str | None


@with_config(extra="allow")
class TraceSettings(TypedDict):
    trace_level: list[str]
    trace_rate: str
    trace_count: str
    trace_mode: str


class LogSetting(TypedDict, total=False):
    log_info: bool | None
    log_warning: bool | None
    log_error: bool | None
    log_verbose_level: Annotated[int, Field(ge=0, le=2147483647)] | None
    log_format: Literal["default", "ISO8601"] | None


class LogSettings(TypedDict):
    log_file: str
    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: Count
    log_format: str


class StopRequest(TypedDict):
    id: Annotated[str, Field(min_length=1)]


class Stopped(TypedDict):
    id: str
    cancelled: Count


class SystemRegion(TypedDict):
    name: str
    key: str
    offset: Count
    byte_size: Count


class CudaRegion(TypedDict):
    name: str
    device_id: Count
    byte_size: Count


class SystemRegistration(TypedDict, total=False):
    key: Required[Annotated[str, Field(description="The name of the memory in /dev/shm, with a slash or without.")]]
    offset: Count
    byte_size: Required[Count]


class CudaHandle(TypedDict):
    b64: _Base64


class CudaRegistration(TypedDict):
    raw_handle: CudaHandle
    device_id: Count
    byte_size: Count


class Placement(TypedDict, total=False):
    shared_memory_region: str
    shared_memory_offset: Count
    shared_memory_byte_size: Count


class InputParameters(Placement, total=False):
    binary_data_size: Count


class InferInput(TypedDict, total=False):
    name: Required[str]
    datatype: Required[Datatype]
    shape: Required[list[Count]]
    parameters: InputParameters
    data: Annotated[
        Any, Field(description="Nested or flat, row-major; instead of `binary_data_size` or `shared_memory_region`.")
    ]


class RequestedOutputParameters(Placement, total=False):
    binary_data: bool
    classification: Annotated[
        Count, Field(description="Number of largest elements to return, each as text: `value:index[:label]`.")
    ]


class InferRequestedOutput(TypedDict, total=False):
    name: Required[str]
    parameters: RequestedOutputParameters


class _WithScalars(BaseModel):
    model_config = ConfigDict(extra="allow", defer_build=True)
    __pydantic_extra__: dict[str, Scalar]


class RequestParameters(_WithScalars):
    """Keys that start with `triton_` are reserved; the model gets all others."""

    sequence_id: str | Count = ""
    sequence_start: bool = False
    sequence_end: bool = False
    priority: Count = 0
    timeout: Count = Field(0, description="Microseconds.")
    binary_data_output: bool = False


class InferRequest(TypedDict, total=False):
    id: str
    parameters: RequestParameters
    inputs: Required[list[InferInput]]
    outputs: list[InferRequestedOutput]


@with_config(extra="allow")
class InferOutput(TypedDict):
    name: str
    datatype: Datatype
    shape: list[Count]


@with_config(extra="allow")
class InferResponse(TypedDict, total=False):
    id: str
    model_name: Required[str]
    model_version: Required[str]
    parameters: dict[str, Any]
    outputs: Required[list[InferOutput]]


class GenerateRequest(_WithScalars):
    """A key that names an input of the model becomes that tensor, any other a request parameter; those that
    start with `triton_` are reserved. Listed are inputs of the `llm` backend, whose parameters are sampling parameters
    with vLLM's names."""

    id: str = ""
    text_input: str | Annotated[list[str], Field(min_length=1, max_length=1)] = ""
    messages: str = Field("", description="A conversation as JSON text, instead of `text_input`.")
    input_ids: int | list[int] = 0
    sampling_parameters: str = Field("", description="JSON text, instead of `parameters`.")
    stream: bool = Field(False, description="Several responses; for generate_stream.")
    exclude_input_in_output: bool = False
    return_finish_reason: bool = False
    return_cumulative_logprob: bool = False
    return_logprobs: bool = False
    return_num_input_tokens: bool = False
    return_num_output_tokens: bool = False
    return_output_ids: bool = False
    return_num_cached_tokens: bool = False
    parameters: dict[str, Scalar] = {}


@with_config(extra="allow")
class GenerateResponse(TypedDict, total=False):
    """The model's outputs by name, a tensor of one element as a scalar; or `error`, which Triton sends with status 200
    unless the model answers exactly once."""

    model_name: str
    model_version: str
    id: str
    error: str
