"""Parts of pb_utils that need no host."""

from __future__ import annotations

import json

import numpy as np
import pytest

from llmbackend.backends.python import pb_utils
from llmbackend.backends.python.config_json import config_from_dict, config_to_dict, config_to_json
from llmbackend.core.backend_api import ModelConfig


def test_tensor_of_text_holds_bytes_whatever_it_was_made_of() -> None:
    for array in (np.array(["é", "b"]), np.array([b"\xc3\xa9", b"b"]), np.array(["é", b"b"], dtype=object)):
        assert pb_utils.Tensor("t", array).as_numpy().tolist() == [b"\xc3\xa9", b"b"]


def test_tensor_refuses_what_triton_has_no_type_for() -> None:
    with pytest.raises(ValueError, match="tensor 't' has numpy dtype complex128"):
        pb_utils.Tensor("t", np.zeros(1, dtype=np.complex128))
    with pytest.raises(TypeError, match="Tensor 't' needs a numpy array, got list"):
        pb_utils.Tensor("t", [1])  # type: ignore[arg-type]


def test_dlpack_shares_memory_both_ways() -> None:
    array = np.arange(4, dtype=np.float32)
    shared = pb_utils.Tensor.from_dlpack("t", pb_utils.Tensor("s", array).to_dlpack())
    array[0] = 9
    assert shared.as_numpy().tolist() == [9, 1, 2, 3]
    assert np.from_dlpack(pb_utils.Tensor("s", array)).tolist() == [9, 1, 2, 3]
    with pytest.raises(ValueError, match="BYTES"):
        pb_utils.Tensor("s", np.array([b"x"], dtype=object)).to_dlpack()


def test_byte_tensors_survive_serialising() -> None:
    array = np.array([b"ab", b"", b"\xff\x00"], dtype=object)
    encoded = pb_utils.serialize_byte_tensor(array)
    assert encoded is not None
    assert pb_utils.deserialize_bytes_tensor(encoded.item()).tolist() == array.tolist()
    for cut in (b"\x01", b"\x05\x00\x00\x00abc"):
        with pytest.raises(ValueError):
            pb_utils.deserialize_bytes_tensor(cut)


def test_datatype_helpers_agree_with_each_other() -> None:
    for config_type, numpy_type in pb_utils.TRITON_STRING_TO_NUMPY.items():
        assert pb_utils.triton_string_to_numpy(config_type) is numpy_type
        number = pb_utils.numpy_to_triton_type(numpy_type)
        assert np.dtype(pb_utils.triton_to_numpy_type(number)) == np.dtype(numpy_type)
    assert pb_utils.np_to_triton_dtype(np.dtype("U4")) == "BYTES"
    assert pb_utils.np_to_triton_dtype(np.complex128) is None


def test_error_codes_are_checked() -> None:
    assert pb_utils.TritonError("m").code() == pb_utils.TritonError.INTERNAL
    with pytest.raises(ValueError, match="got 99"):
        pb_utils.TritonError("m", 99)
    with pytest.raises(TypeError, match="error of an InferenceResponse must be a TritonError, got str"):
        pb_utils.InferenceResponse(error="no")  # type: ignore[arg-type]


def test_what_is_not_built_fails_by_name() -> None:
    with pytest.raises(RuntimeError, match=r"pb_utils\.InferenceRequest .* is not supported"):
        pb_utils.InferenceRequest(model_name="x")
    with pytest.raises(RuntimeError, match=r"pb_utils\.is_model_ready is not supported"):
        pb_utils.is_model_ready("x")
    assert not hasattr(pb_utils, "PreferredMemory")
    with pytest.raises(RuntimeError, match="MetricFamily must be used in initialize"):
        pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER)


def test_config_json_has_numbers_and_defaults_and_comes_back() -> None:
    config = ModelConfig(name="m", max_batch_size=4)
    config.input.add(name="X", data_type="TYPE_FP32", dims=[-1, 4])
    config.version_policy.specific.versions.extend([1, 3])
    config.dynamic_batching.max_queue_delay_microseconds = 5
    config.dynamic_batching.priority_queue_policy[1].max_queue_size = 2
    config.parameters["k"].string_value = "v"
    fields = config_to_dict(config)
    assert json.loads(config_to_json(config)) == fields
    assert fields["input"][0]["dims"] == [-1, 4] and fields["output"] == []
    assert fields["version_policy"] == {"specific": {"versions": [1, 3]}}
    assert fields["dynamic_batching"]["max_queue_delay_microseconds"] == 5
    assert config_from_dict(fields) == config
    assert pb_utils.get_input_config_by_name(fields, "X") == fields["input"][0]
    assert pb_utils.get_output_config_by_name(fields, "X") is None
    assert not pb_utils.using_decoupled_model_transaction_policy(fields)
