"""Reads model configurations from config.pbtxt and JSON overrides, and completes unset fields.

Source: GetNormalizedModelConfig, AutoCompleteBackendFields in Triton's core; golden transcripts 04, 08, 57.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from ..backend_api import InstanceGroupKind
from ..errors import internal, invalid_argument

CONFIG_FILE_NAME = "config.pbtxt"
_ERROR_CHARACTERS = 500
_SEQUENCE_IDLE_US = 1_000_000
_TWO_ON_CPU = ("tensorflow", "onnxruntime")
"""Backends whose models have two instances per group on the CPU by default (Triton's SetDefaultInstanceCount)."""
_STRING_OR_KEY = re.compile(r'"(?:[^"\\]|\\.)*"|(?P<key>[A-Za-z_]\w*)(?=\s*:)', re.ASCII | re.DOTALL)


def parse_text(text: str, source: str) -> ModelConfig:
    """Parses a text-format protobuf. Raises TritonError INTERNAL naming `source`, line, column and field."""
    config = ModelConfig()
    try:
        text_format.Parse(text, config)
    except (text_format.ParseError, ValueError, RecursionError) as error:
        raise internal(f"failed to read text proto from {source}: {_first_line(error)}") from None
    return config


def read_config(path: Path) -> ModelConfig:
    """Raises TritonError INTERNAL if the file cannot be read or parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise internal(f"failed to read {path}: {error}") from None
    return parse_text(text, str(path))


def parse_json(text: str | bytes) -> ModelConfig:
    """The ModelConfig of a load override. Raises TritonError INVALID_ARG that says what is wrong."""
    config = ModelConfig()
    try:
        json_format.ParseDict(_json(text), config)
    except (ValueError, AttributeError, TypeError, RecursionError, json_format.ParseError) as error:
        raise invalid_argument(f"Invalid config override: {_first_line(error)}") from None
    return config


def _json(text: str | bytes) -> Any:
    """As in protobuf's C++ parser, keys need not be quoted. orjson rejects lone surrogates and NaN."""
    try:
        return orjson.loads(text)
    except ValueError:
        quoted = _STRING_OR_KEY.sub(_quote_key, text if isinstance(text, str) else text.decode())
        return orjson.loads(quoted)


def _quote_key(found: re.Match[str]) -> str:
    return f'"{found["key"]}"' if found["key"] else found[0]


def _first_line(error: BaseException) -> str:
    """Shortened, because parsers quote their input, which may have megabytes."""
    return (str(error).splitlines() or [type(error).__name__])[0][:_ERROR_CHARACTERS]


@dataclass(frozen=True, slots=True)
class _ModelLayout:
    """How models of a backend are stored in a repository.

    platforms: names from before the field `backend` existed; the first one is filled in
    filename: the file or directory in each version directory
    """

    backend: str
    platforms: tuple[str, ...]
    filename: str


_LAYOUTS = (
    _ModelLayout("tensorflow", ("tensorflow_savedmodel",), "model.savedmodel"),
    _ModelLayout("tensorflow", ("tensorflow_graphdef",), "model.graphdef"),
    _ModelLayout("tensorrt", ("tensorrt_plan",), "model.plan"),
    _ModelLayout("onnxruntime", ("onnxruntime_onnx",), "model.onnx"),
    _ModelLayout("openvino", (), "model.xml"),
    _ModelLayout("pytorch", ("pytorch_libtorch", "libtorch"), "model.pt"),
    _ModelLayout("pytorch", (), "model.pt2"),
    _ModelLayout("python", (), "model.py"),
)


def fill_backend(config: ModelConfig, directory: Path) -> None:
    """Fills in `backend`, `platform` and `default_model_filename` of the model in `directory`, whose name must be set.
    Raises TritonError INVALID_ARG if neither configuration, files nor name determine the backend."""
    if config.HasField("ensemble_scheduling"):
        return
    versions = [version for version in directory.glob("[1-9]*") if version.is_dir()]
    layout = _layout_of(config, {path.name for version in versions for path in version.iterdir()})
    if layout is not None:
        config.backend = config.backend or layout.backend
        config.platform = config.platform or next(iter(layout.platforms), "")
        if (config.backend, config.runtime) != ("pytorch", "model.py"):  # that runtime looks for the file itself
            config.default_model_filename = config.default_model_filename or layout.filename
    elif not (config.backend or config.platform or config.default_model_filename):
        _fill_from_name(config)


def _layout_of(config: ModelConfig, files: Collection[str]) -> _ModelLayout | None:
    known = [layout for layout in _LAYOUTS if config.backend in ("", layout.backend)]
    if config.platform:
        fitting = [layout for layout in known if config.platform in layout.platforms]
    elif config.default_model_filename:
        fitting = [layout for layout in known if config.default_model_filename == layout.filename]
    else:
        fitting = [layout for layout in known if layout.filename in files]
    if not fitting and config.backend:
        fitting = known
    return next(iter(fitting), None)


def _fill_from_name(config: ModelConfig) -> None:
    """A model named `<any>.<backend>` belongs to that backend."""
    _, dot, backend = config.name.partition(".")
    if not dot:
        raise invalid_argument(
            f"Invalid model name: Could not determine backend for model '{config.name}' with no backend in model "
            f"configuration. Expected model name of the form 'model.<backend_name>'."
        )
    config.backend = backend
    config.default_model_filename = f"model.{backend}"


def set_defaults(config: ModelConfig) -> None:
    """Sets the defaults that Triton shows in /config, except those of instance groups."""
    if not config.version_policy.WhichOneof("policy_choice"):
        config.version_policy.latest.num_versions = 1
    if not config.HasField("ensemble_scheduling"):
        config.optimization.input_pinned_memory.enable = True
        config.optimization.output_pinned_memory.enable = True
    if config.HasField("dynamic_batching"):
        batching = config.dynamic_batching
        if not batching.preferred_batch_size and config.max_batch_size > 0:
            batching.preferred_batch_size.append(config.max_batch_size)
    _set_sequence_defaults(config)


def _set_sequence_defaults(config: ModelConfig) -> None:
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    batching.max_sequence_idle_microseconds = batching.max_sequence_idle_microseconds or _SEQUENCE_IDLE_US
    if batching.HasField("oldest") and not batching.oldest.preferred_batch_size and config.max_batch_size > 0:
        batching.oldest.preferred_batch_size.append(config.max_batch_size)


def set_instance_groups(
    config: ModelConfig, preferred: Sequence[tuple[InstanceGroupKind, int]], gpus: Sequence[int] = ()
) -> None:
    """Completes names, kinds, counts and GPUs of instance groups (NormalizeInstanceGroup in Triton's core).

    preferred: the backend's kinds and counts for a model without groups
    gpus: the host's GPU ids

    A model without groups gets one with the model's name; an unnamed group becomes `<model>_<index>`. KIND_AUTO becomes
    KIND_GPU if all GPUs that the group lists exist (and there are any); KIND_GPU without a list gets all GPUs.
    Ensembles have no groups.
    """
    if config.HasField("ensemble_scheduling"):
        return
    counts = {ModelInstanceGroup.Kind.Value(kind.value): count for kind, count in reversed(preferred)}
    if not config.instance_group:
        usable = [kind for kind in reversed(counts) if gpus or kind != ModelInstanceGroup.KIND_GPU]
        config.instance_group.add(name=config.name, kind=usable[0] if usable else ModelInstanceGroup.KIND_AUTO)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        if group.kind == ModelInstanceGroup.KIND_AUTO:
            on_gpus = bool(gpus) and set(group.gpus) <= set(gpus)
            group.kind = ModelInstanceGroup.KIND_GPU if on_gpus else ModelInstanceGroup.KIND_CPU
        default = 2 if group.kind == ModelInstanceGroup.KIND_CPU and config.backend in _TWO_ON_CPU else 1
        group.count = group.count or max(counts.get(group.kind, 0), 0) or default
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)


def merge_auto_complete(config: ModelConfig, proposed: ModelConfig) -> None:
    """See Model.set_config. Unlike Triton, also merges unset parameters, through which a backend informs frontends."""
    config.max_batch_size = proposed.max_batch_size
    del config.input[:]
    config.input.extend(proposed.input)
    del config.output[:]
    config.output.extend(proposed.output)
    if config.WhichOneof("scheduling_choice") is None:
        choice = proposed.WhichOneof("scheduling_choice")
        if choice is not None:
            getattr(config, choice).CopyFrom(getattr(proposed, choice))
    if proposed.HasField("model_transaction_policy"):
        config.model_transaction_policy.CopyFrom(proposed.model_transaction_policy)
    for name in proposed.parameters.keys() - config.parameters.keys():
        config.parameters[name].CopyFrom(proposed.parameters[name])
    set_defaults(config)
