"""Reading, completing and showing model configurations (golden 04, 08, 57)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmbackend.core.backend_api import InstanceGroupKind
from llmbackend.core.config.model_config import fill_backend, parse_json, parse_text, set_defaults, set_instance_groups
from llmbackend.core.config.model_config_rules import validate_config, validate_tensors
from llmbackend.core.config_readers import config_to_json
from llmbackend.core.errors import ErrorCode, TritonError
from tests.helpers.core_host import ECHO_BACKEND, Repository, serving

IDENTITY = """
name: "identity" backend: "python" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
dynamic_batching { max_queue_delay_microseconds: 1000 }
"""
IDENTITY_JSON = (
    '{"name":"identity","platform":"","backend":"python","runtime":"","version_policy":{"latest":{"num_versions":1}},'
    '"max_batch_size":8,"input":[{"name":"INPUT0","data_type":"TYPE_FP32","format":"FORMAT_NONE","dims":[4],'
    '"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,"is_non_linear_format_io":false}],'
    '"output":[{"name":"OUTPUT0","data_type":"TYPE_FP32","dims":[4],"label_filename":"","is_shape_tensor":false,'
    '"is_non_linear_format_io":false}],"batch_input":[],"batch_output":[],"optimization":{"priority":'
    '"PRIORITY_DEFAULT","input_pinned_memory":{"enable":true},"output_pinned_memory":{"enable":true},'
    '"gather_kernel_buffer_threshold":0,"eager_batching":false},"dynamic_batching":{"preferred_batch_size":[8],'
    '"max_queue_delay_microseconds":1000,"preserve_ordering":false,"priority_levels":0,"default_priority_level":0,'
    '"priority_queue_policy":{}},"instance_group":[{"name":"identity_0","kind":"KIND_CPU","count":1,"gpus":[],'
    '"secondary_devices":[],"profile":[],"passive":false,"host_policy":""}],"default_model_filename":"model.py",'
    '"cc_model_filenames":{},"metric_tags":{},"parameters":{},"model_warmup":[]}'
)


def completed(text: str, directory: Path = Path("/nonexistent")) -> dict[str, object]:
    config = parse_text(text, "test")
    fill_backend(config, directory)
    set_defaults(config)
    set_instance_groups(config, [])
    return config_to_json(config)


def test_json_equals_that_of_triton_to_the_byte() -> None:
    assert json.dumps(completed(IDENTITY), separators=(",", ":")) == IDENTITY_JSON


def test_json_of_maps_submessages_and_64_bit_numbers() -> None:
    shown = completed(
        'name: "m" backend: "b" parameters { key: "k" value { string_value: "v" } } metric_tags { key: "a" value: "1" }'
        " model_transaction_policy { decoupled: true } version_policy { specific { versions: [ 5000000000 ] } }"
    )
    assert shown["parameters"] == {"k": {"string_value": "v"}} and shown["metric_tags"] == {"a": "1"}
    assert shown["model_transaction_policy"] == {"decoupled": True}
    assert shown["version_policy"] == {"specific": {"versions": [5000000000]}}
    assert list(shown)[-1] == "model_transaction_policy" and "dynamic_batching" not in shown


def test_keys_of_an_override_may_be_bare_words() -> None:
    """As protobuf's parser in C++ takes them; what stands in strings is left alone."""
    batching = "{direct: {}, max_sequence_idle_microseconds : 5}"
    text = f'{{name: "m", sequence_batching: {batching}, default_model_filename: "a: \\"b: c"}}'
    config = parse_json(text)
    assert config.sequence_batching.HasField("direct") and config.default_model_filename == 'a: "b: c'
    assert config.sequence_batching.max_sequence_idle_microseconds == 5
    for wrong in ("{name: m}", "{name: 'm", "{1name: 5}", '{"name: "m"}'):
        with pytest.raises(TritonError, match="Invalid config override"):
            parse_json(wrong)


def test_an_override_in_json_reads_as_the_text_form_does() -> None:
    assert parse_json(json.dumps(completed(IDENTITY)))
    assert config_to_json(parse_json(IDENTITY_JSON)) == json.loads(IDENTITY_JSON)


def test_a_parse_error_names_file_line_and_field() -> None:
    with pytest.raises(TritonError) as caught:
        parse_text('name: "m"\nnonsense: 1', "some/config.pbtxt")
    assert "some/config.pbtxt: 2:" in caught.value.message and "nonsense" in caught.value.message


def test_instance_groups_are_named() -> None:
    config = parse_text('name: "m" backend: "b" instance_group [ {}, { name: "own" count: 3 }, { gpus: 1 } ]', "t")
    set_instance_groups(config, [(InstanceGroupKind.MODEL, 9)])
    shown = [(group.name, group.count, group.Kind.Name(group.kind)) for group in config.instance_group]
    assert shown == [("m_0", 1, "KIND_CPU"), ("own", 3, "KIND_CPU"), ("m_2", 1, "KIND_CPU")]
    config = parse_text('name: "m" backend: "b"', "t")
    set_instance_groups(config, [])
    assert [group.name for group in config.instance_group] == ["m"]


def test_a_python_based_runtime_of_pytorch_looks_for_its_file_itself() -> None:
    for runtime, filename in (("", "model.pt"), ("model.py", "")):
        shown = completed(f'name: "m" backend: "pytorch" runtime: "{runtime}"')
        assert (shown["platform"], shown["default_model_filename"]) == ("pytorch_libtorch", filename)


def test_old_platform_names_fill_the_backend() -> None:
    assert completed('name: "m" platform: "onnxruntime_onnx"')["backend"] == "onnxruntime"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must specify 'backend' for 'm'"),
        ('backend: "b" max_batch_size: -1', "'max_batch_size' must be non-negative value"),
        ('backend: "b" input { data_type: TYPE_FP32 dims: 1 }', "model input must specify 'name' for m"),
        ('backend: "b" input { name: "X" dims: 1 }', "model input 'X' must specify 'data_type' for m"),
        (
            'backend: "b" input { name: "X" data_type: TYPE_FP32 dims: 1 format: FORMAT_NCHW }',
            "model input NHWC/NCHW require 3 dims for m",
        ),
        ('backend: "b" output { name: "Y" data_type: TYPE_FP32 }', "model output 'Y' must specify 'dims' for m"),
        ('backend: "b" input { name: "X" data_type: TYPE_FP32 dims: 0 }', "dimension must be integer >= 1, or -1"),
        (
            'backend: "b" input { name: "X" data_type: TYPE_FP32 dims: 1 } input { name: "X" data_type: TYPE_FP32 '
            "dims: 2 }",
            "model input 'X' is given twice with different values",
        ),
        (
            'backend: "b" max_batch_size: 2 dynamic_batching { preferred_batch_size: 4 }',
            "dynamic batching preferred size must be <= max batch size for 'm', got 4 > 2",
        ),
        ('backend: "b" dynamic_batching { preferred_batch_size: -1 }', "preferred size must be positive"),
        ('backend: "b" instance_group { count: -1 }', "has invalid count -1"),
        ('backend: "b" version_policy { latest {} }', "must have 'num_versions' >= 1"),
        ('backend: "b" version_policy { specific {} }', "must list at least one version"),
    ],
)
def test_rules_name_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(TritonError) as caught:
        config = parse_text(f'name: "m" {text}', "t")
        validate_config(config)
        validate_tensors(config)
    assert caught.value.code is ErrorCode.INVALID_ARG and message in caught.value.message


AUTO_COMPLETING = (
    ECHO_BACKEND
    + """
from tritonclient.grpc import model_config_pb2 as pb
from tests.helpers.core_host import STAGE

def TRITONBACKEND_ModelInitialize(model):
    STAGE.kept.append(model)
    if not model.auto_complete_config:
        return
    config = model.config
    config.max_batch_size = 4
    config.input.add(name="X", data_type=pb.TYPE_FP32, dims=[-1])
    config.output.add(name="Y", data_type=pb.TYPE_FP32, dims=[-1])
    config.dynamic_batching.max_queue_delay_microseconds = 7
    config.model_transaction_policy.decoupled = True
    config.backend = "not taken"
    config.default_model_filename = "not taken"
    model.set_config(config)
"""
)


def test_auto_complete_takes_only_what_triton_takes(repository: Repository) -> None:
    from tests.helpers.core_host import STAGE

    repository.backend("auto", AUTO_COMPLETING)
    repository.model("m", "auto", io="")
    with serving(repository, "m") as server:
        config = server.model_config("m")
        assert (config.max_batch_size, config.backend, config.default_model_filename) == (4, "auto", "")
        assert config.model_transaction_policy.decoupled
        assert list(config.dynamic_batching.preferred_batch_size) == [4]
        metadata = server.model_metadata("m")
        assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in metadata.inputs] == [("X", "FP32", (-1, -1))]
        config.max_batch_size = 99
        assert server.model_config("m").max_batch_size == 4  # what one gets is a copy
        with pytest.raises(TritonError) as caught:
            STAGE.kept[0].set_config(config)
        assert caught.value.code is ErrorCode.UNSUPPORTED


def test_auto_complete_can_be_switched_off(repository: Repository) -> None:
    repository.backend("auto", AUTO_COMPLETING)
    repository.model("m", "auto", io="")
    (repository.models / "bare" / "1").mkdir(parents=True)
    with serving(repository, "m", auto_complete_config=False) as server:
        assert server.model_config("m").max_batch_size == 0
        with pytest.raises(TritonError, match="failed to poll"):
            server.load_model("bare")
