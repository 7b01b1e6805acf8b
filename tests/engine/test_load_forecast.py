"""A forecast says, without weights, what the load then does: path, reasons, KV memory, weights in memory."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.native_runner import NativeRunner
from llmbackend.engine.cpu.packed_decoder import PackedModel
from llmbackend.engine.load_forecast import LoadForecast, forecast
from llmbackend.engine.load_progress import collecting
from llmbackend.engine.model.module_runner import pack_or_run
from tests.helpers.tiny_models import FAMILIES, random_model

pytestmark = pytest.mark.slow

_SMALL_BYTES = 4096
"""Alignment and the like, by which the memory of packed weights may be less than was asked for."""


def checkpoint(directory: Path, family: str) -> Path:
    """With heads that fit the native layout."""
    config: Any = copy.deepcopy(FAMILIES[family])
    for name, value in (("hidden_size", 128), ("head_dim", 32), ("n_embd", 128)):
        if hasattr(config, name):
            setattr(config, name, value)
    random_model(config).save_pretrained(directory)
    return directory


def loaded(config: EngineConfig) -> tuple[Any, str, int]:
    """What the load gives: the engine's info, why it runs as modules, bytes of packed weights."""
    with collecting() as start:
        made = pack_or_run(config)
    why = next((note for note in start.notes if note.startswith("transformers modules")), "")
    runner: Any = NativeRunner(config, made) if isinstance(made, PackedModel) else made
    weight_bytes = len(made.memories.resident) if isinstance(made, PackedModel) else 0
    runner.close()
    return runner.info, why.removeprefix("transformers modules, because "), weight_bytes


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("llama", {}),
        ("llama", {"dtype": "bfloat16", "quantization": "int8", "max_num_seqs": 4, "max_model_len": 64}),
        ("qwen2", {"dtype": "bfloat16", "quantization": "int4"}),
        ("llama", {"dtype": "float16"}),
        ("llama", {"enforce_eager": True, "dtype": "bfloat16"}),
        ("gemma3", {}),
        ("phi3", {"dtype": "bfloat16"}),
        ("gpt2", {}),
        ("mixtral", {}),
        ("cohere", {"num_kv_blocks": 7}),
    ],
)
def test_a_forecast_is_what_the_load_does(tmp_path: Path, family: str, arguments: dict[str, Any]) -> None:
    directory = checkpoint(tmp_path, family)
    config = EngineConfig(model=str(directory), transport="inline", weight_cache_size=0, **arguments)
    told = forecast(config)
    info, why, weight_bytes = loaded(config)
    assert told.path == ("transformers modules" if why else "native program")
    assert told.why_not_faster == why
    assert (told.num_kv_blocks, told.block_size) == (info.num_blocks, info.block_size)
    assert (told.max_model_len, told.vocab_size, told.dtype) == (info.max_model_len, info.vocab_size, info.dtype)
    if not why:
        assert told.kv_bytes_per_token == info.kv_bytes_per_token
        assert 0 <= told.weight_bytes - weight_bytes <= _SMALL_BYTES


def test_nothing_is_read_of_the_weights(tmp_path: Path) -> None:
    """The file's data may be anything."""
    directory = checkpoint(tmp_path, "llama")
    file = directory / "model.safetensors"
    data = bytearray(file.read_bytes())
    header_bytes = 8 + int.from_bytes(data[:8], "little")
    before = forecast(EngineConfig(model=str(directory)))
    data[header_bytes:] = bytes(len(data) - header_bytes)
    file.write_bytes(data)
    after = forecast(EngineConfig(model=str(directory)))
    assert _without_kernels(after) == _without_kernels(before)
    assert before.num_parameters == sum(each.numel() for each in _parameters(directory))


def _without_kernels(told: LoadForecast) -> dict[str, Any]:
    """Kernels are measured, and the cache goes by the file's times."""
    return {name: getattr(told, name) for name in told.__struct_fields__ if name not in ("kernels", "weight_cache")}


def _parameters(directory: Path) -> list[torch.nn.Parameter]:
    import transformers

    return list(transformers.AutoModelForCausalLM.from_pretrained(directory).parameters())


@pytest.mark.parametrize(
    "arguments", [{"max_model_len": 10**6}, {"quantization": "fp8"}, {"kernels": "torch", "quantization": "int8"}]
)
def test_what_would_not_load_raises_as_the_load_does(tmp_path: Path, arguments: dict[str, Any]) -> None:
    config = EngineConfig(model=str(checkpoint(tmp_path, "llama")), transport="inline", **arguments)
    with pytest.raises(ValueError) as from_forecast:
        forecast(config)
    with pytest.raises(ValueError) as from_load:
        pack_or_run(config)
    assert str(from_forecast.value) == str(from_load.value)
