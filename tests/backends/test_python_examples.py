"""Each example of Triton's python backend loads and answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmbackend.core.tensors import Tensor
from tests.helpers.python_examples import (
    ADD_SUB,
    AUTO_COMPLETE,
    BLS_ASYNC,
    BLS_CONFIG,
    BLS_DECOUPLED_ASYNC,
    BLS_DECOUPLED_SYNC,
    BLS_SYNC,
    CUSTOM_METRICS,
    DECOUPLED,
    INSTANCE_KIND,
    PAIR_CONFIG,
    PREPROCESSING,
    PREPROCESSING_CONFIG,
    SQUARE,
    SQUARE_CONFIG,
)
from tests.helpers.python_host import Host
from tests.helpers.python_models import values

pytestmark = pytest.mark.slow

A, B = np.arange(4, dtype=np.float32), np.full(4, 10, dtype=np.float32)
PAIR = [Tensor.of("INPUT0", A), Tensor.of("INPUT1", B)]
SUMS = {"OUTPUT0": (A + B).tolist(), "OUTPUT1": (A - B).tolist()}


def square(count: int) -> list[Tensor]:
    return [Tensor.of("IN", np.array([count], dtype=np.int32))]


def pair_config(name: str) -> str:
    return PAIR_CONFIG.replace("@", name)


@pytest.mark.parametrize(("name", "code"), [("add_sub", ADD_SUB), ("resnet50", INSTANCE_KIND), ("jax", ADD_SUB)])
def test_a_plain_model(host: Host, name: str, code: str) -> None:
    host.load(name, pair_config(name), code)
    assert values(host.infer(name, PAIR).one()) == SUMS


def test_models_that_call_others(host: Host) -> None:
    host.load("add_sub", pair_config("add_sub"), ADD_SUB)
    host.load("bls_sync", BLS_CONFIG.replace("@", "bls_sync"), BLS_SYNC)
    host.load("bls_async", BLS_CONFIG.replace("@", "bls_async"), BLS_ASYNC)
    assert values(host.infer("bls_sync", [Tensor.text("MODEL_NAME", "add_sub"), *PAIR]).one()) == SUMS
    assert values(host.infer("bls_async", PAIR).one()) == SUMS
    error = host.infer("bls_sync", [Tensor.text("MODEL_NAME", "undefined_model"), *PAIR]).one().error
    assert error is not None
    assert "Failed for execute the inference request. Model 'undefined_model' is not ready." in str(error)


def test_decoupled_models_and_models_that_call_them(host: Host) -> None:
    host.load("square", SQUARE_CONFIG + DECOUPLED, SQUARE)
    assert [values(response) for response in host.infer("square", square(3)).all()] == [{"OUT": [3]}] * 3
    host.load("sync", SQUARE_CONFIG, BLS_DECOUPLED_SYNC)
    host.load("async", SQUARE_CONFIG, BLS_DECOUPLED_ASYNC)
    assert values(host.infer("sync", square(5)).one()) == {"OUT": [25]}
    assert values(host.infer("async", square(5)).one()) == {"OUT": [50]}
    assert values(host.infer("async", square(0)).one()) == {"OUT": [0]}


@pytest.mark.parametrize("max_batch_size", [0, 4])
def test_a_model_without_a_configuration(host: Host, max_batch_size: int) -> None:
    batching = "auto_complete_model_config.set_dynamic_batching()" if max_batch_size else "pass"
    code = AUTO_COMPLETE.replace("MAX_BATCH_SIZE", str(max_batch_size)).replace("BATCHING", batching)
    host.load("m", "", code)
    config = host.server.model_config("m")
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (max_batch_size, bool(max_batch_size))
    shape: Any = (1, 4) if max_batch_size else (4,)
    inputs = [Tensor.of(tensor.name, tensor.data.reshape(shape)) for tensor in PAIR]
    expected = {name: np.reshape(value, shape).tolist() for name, value in SUMS.items()}
    assert values(host.infer("m", inputs).one()) == expected


def test_a_model_with_custom_metrics(host: Host) -> None:
    host.load("custom_metrics", pair_config("custom_metrics"), CUSTOM_METRICS)
    labels = {"model": "custom_metrics", "version": "1"}
    sample = host.server.metrics_registry.get_sample_value
    assert sample("requests_process_latency_ns", labels) == 0
    assert values(host.infer("custom_metrics", PAIR).one()) == SUMS
    assert (sample("requests_process_latency_ns", labels) or 0) > 0


def test_preprocessing_under_a_rate_limiter(host: Host) -> None:
    host.load("preprocess", PREPROCESSING_CONFIG, PREPROCESSING)
    image = np.arange(12, dtype=np.uint8).reshape(1, 12)
    (output,) = host.infer("preprocess", [Tensor.of("INPUT_0", image)]).one().outputs
    assert output.shape == (1, 3, 2, 2) and output.data.dtype == np.float32
    assert output.data[0, :, 1, 0].tolist() == pytest.approx([6 / 255, 7 / 255, 8 / 255])
