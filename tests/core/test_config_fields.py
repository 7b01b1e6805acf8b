"""Each field of the ModelConfig message is acted on, warned of once, or refused: also those that a new version adds."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig

import llmbackend
from llmbackend.core.config.model_config import parse_text, set_defaults
from llmbackend.core.config.model_config_rules import validate_config
from llmbackend.core.errors import TritonError
from llmbackend.core.models.served_config import IGNORED_FIELDS, warn_of_ignored_fields
from tests.helpers.core_host import ECHO_BACKEND, Repository, send, serving

PACKAGE = Path(llmbackend.__file__).parent
ACTED_ON = {
    "backend": "core/backend_manager.py core/models/model.py core/config/model_config.py",
    "batch_input": "backends/array_backend.py",
    "batch_output": "backends/array_backend.py",
    "default_model_filename": "backends/pytorch/backend.py",
    "dynamic_batching": "core/scheduling/dynamic_batcher.py core/models/model.py waiting/queue_policy.py",
    "ensemble_scheduling": "core/scheduling/ensembles/graph.py",
    "input": "core/config/model_config_rules.py core/models/served_config.py core/requests/request_validation.py "
    "core/scheduling/dynamic_batcher.py",
    "instance_group": "core/models/instance_set.py core/models/model_instance.py core/scheduling/rate_limiter.py",
    "max_batch_size": "core/models/served_config.py",
    "metric_tags": "core/metrics/model_metrics.py",
    "model_metrics": "core/metrics/model_metrics.py",
    "model_repository_agents": "core/repository/repository_agents.py",
    "model_transaction_policy": "core/models/served_config.py",
    "model_warmup": "core/models/warmup.py",
    "name": "core/models/served_config.py",
    "optimization.input_pinned_memory": "core/config/model_config.py",
    "optimization.output_pinned_memory": "core/config/model_config.py",
    "output": "core/config/model_config_rules.py core/models/served_config.py core/requests/responses.py",
    "parameters": "core/models/served_config.py",
    "platform": "core/config/model_config.py",
    "response_cache": "core/config/model_config_rules.py core/models/model.py",
    "runtime": "core/models/served_config.py",
    "sequence_batching": "core/scheduling/sequences/inputs.py core/scheduling/sequences/strategies.py "
    "core/scheduling/sequences/batcher.py",
    "version_policy": "core/repository/model_repository.py core/config/model_config_rules.py",
}
"""Field → the files that read it. Of a message, each field must occur in one of them."""
REFUSED = {
    "input.is_shape_tensor": "shape tensors are only supported for TensorRT platform",
    "output.is_shape_tensor": "shape tensors are only supported for TensorRT platform",
    "input.is_non_linear_format_io": "Non-linear IO format is only supported for TensorRT platform",
    "output.is_non_linear_format_io": "Non-linear IO format is only supported for TensorRT platform",
}


def leaves(descriptor: Descriptor, prefix: str = "") -> Iterator[str]:
    """The paths of all fields that are no messages of their own; a map is one field, unless it is of messages."""
    for field in descriptor.fields:
        path, message = f"{prefix}{field.name}", value_message(field)
        if message is None or not message.fields:
            yield path
        else:
            yield from leaves(message, f"{path}.")


def value_message(field: FieldDescriptor) -> Descriptor | None:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return message.fields_by_name["value"].message_type
    return message


def is_below(path: str, fields: Any) -> str:
    return next((field for field in fields if f"{path}.".startswith(f"{field}.")), "")


def is_read(path: str) -> bool:
    field = is_below(path, ACTED_ON)
    texts = ((PACKAGE / file).read_text() for file in ACTED_ON.get(field, "").split())
    return any(re.search(rf"\b{path.rpartition('.')[2]}\b", text) for text in texts)


@pytest.mark.parametrize("path", list(leaves(ModelConfig.DESCRIPTOR)))
def test_a_field_is_acted_on_or_named(path: str) -> None:
    assert is_below(path, IGNORED_FIELDS) or path in REFUSED or is_read(path), f"nothing reads '{path}'"


def set_field(message: Message, path: list[str]) -> None:
    """Any value but the default one."""
    field: Any = message.DESCRIPTOR.fields_by_name[path[0]]
    child: Any = getattr(message, path[0])
    if len(path) > 1:
        set_field(child.add() if field.is_repeated else child, path[1:])
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        child["key"] = "value"
    elif field.message_type is not None and field.is_repeated:
        child.add()
    elif field.message_type is not None:
        child.SetInParent()
    elif field.is_repeated:
        child.append("value")
    elif field.type == field.TYPE_STRING:
        setattr(message, path[0], "value")
    else:
        setattr(message, path[0], 1)


@pytest.mark.parametrize("path", list(IGNORED_FIELDS))
def test_an_ignored_field_gives_one_warning(path: str, caplog: pytest.LogCaptureFixture) -> None:
    config = parse_text('name: "m" backend: "b" instance_group { } instance_group { }', "test")
    set_defaults(config)
    warn_of_ignored_fields(config)
    assert not caplog.records
    set_field(config, path.split("."))
    warn_of_ignored_fields(config)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"model 'm': '{path}' in the model configuration has no effect: " in caplog.text


@pytest.mark.parametrize("path", list(REFUSED))
def test_a_refused_field_names_what_is_wrong(path: str) -> None:
    config = parse_text('name: "m" backend: "b"', "test")
    set_field(config, path.split("."))
    with pytest.raises(TritonError, match=REFUSED[path]):
        validate_config(config)


def test_a_loaded_model_warns_of_each_ignored_field(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    repository.backend("echo", ECHO_BACKEND)
    config = """
        model_operations { op_library_filename: "x" }
        optimization { cuda { graphs: true } execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }
        instance_group { profile: "0" } instance_group { profile: "1" }
    """
    repository.model("m", "echo", config)
    with caplog.at_level(logging.WARNING), serving(repository, "m") as server:
        assert send(server, "m").responses()[0].error is None
    named = re.findall(r"model 'm': '([\w.]+)' in the model configuration has no effect", caplog.text)
    expected = [
        "instance_group.profile",
        "model_operations",
        "optimization.cuda",
        "optimization.execution_accelerators",
    ]
    assert named == expected
    assert "the backend runs models with its own framework only, not with tensorrt (gpu)" in caplog.text
