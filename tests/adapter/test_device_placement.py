"""Which device an engine gets, by the kind of its instance group and what the model's arguments say."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from llmbackend.adapter.device_placement import DevicePlacement
from llmbackend.core.backend_api import InstanceGroupKind, TritonError
from llmbackend.engine.config import EngineConfig

Kind = InstanceGroupKind


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMBACKEND_GPUS", "0,1,2,3")
    monkeypatch.setattr(metadata, "version", lambda _name: "2.11.0")


def device(kind: Kind, gpu: int = 0, placement: DevicePlacement | None = None, **arguments: Any) -> str:
    config = EngineConfig(**{"model": "org/name", "device": "auto"} | arguments)
    return (placement or DevicePlacement()).place(config, "m_0_0", kind, gpu).device


def test_the_instances_kind_decides_the_device() -> None:
    assert device(Kind.GPU, 2) == "cuda:2" and device(Kind.GPU, 1, device="cpu") == "cuda:1"
    assert device(Kind.CPU) == "cpu" and device(Kind.MODEL) == "cuda:0"
    assert device(Kind.MODEL, device="cpu") == "cpu" and device(Kind.MODEL, device="cuda:3") == "cuda:3"


def test_auto_is_the_processor_without_gpus_or_without_a_torch_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda _name: "2.11.0+cpu")
        assert device(Kind.MODEL) == "cpu" and device(Kind.MODEL, device="cuda") == "cuda:0"
        assert device(Kind.MODEL, engine_python="/other/python") == "cuda:0"
    monkeypatch.setenv("LLMBACKEND_GPUS", "")
    assert device(Kind.MODEL) == "cpu"


def test_engines_over_several_gpus_share_the_host() -> None:
    placement = DevicePlacement()
    wide = [device(Kind.MODEL, placement=placement, tensor_parallel_size=2) for _ in range(3)]
    assert wide == ["cuda:0", "cuda:2", "cuda:0"]
    for _ in range(2):
        placement.leave(EngineConfig(model="m", device="cuda:0", tensor_parallel_size=2))
    assert device(Kind.MODEL, placement=placement, tensor_parallel_size=2) == "cuda:0"


def test_models_share_the_gpus_of_the_host() -> None:
    """An engine over two GPUs counts on both, and so does one on the GPU of its instance."""
    placement = DevicePlacement()
    assert device(Kind.MODEL, placement=placement, model="a", tensor_parallel_size=2) == "cuda:0"
    assert device(Kind.GPU, 2, placement, model="b") == "cuda:2"
    assert device(Kind.MODEL, placement=placement, model="c") == "cuda:3"
    placement.leave(EngineConfig(model="a", device="cuda:0", tensor_parallel_size=2))
    assert [device(Kind.MODEL, placement=placement, model="d") for _ in range(2)] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (Kind.GPU, {"tensor_parallel_size": 2}, "'tensor_parallel_size' is 2: KIND_GPU is for models on a single GPU"),
        (Kind.MODEL, {"tensor_parallel_size": 5}, "'tensor_parallel_size' is 5, expected at most 4, the GPUs of this"),
        (Kind.CPU, {"device": "cuda"}, "'device' is 'cuda', but the instance group of 'm_0_0' is KIND_CPU"),
    ],
)
def test_contradictions_are_refused(kind: Kind, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TritonError, match=message):
        device(kind, **arguments)
