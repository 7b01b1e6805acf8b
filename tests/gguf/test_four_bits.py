"""Weights that a GGUF file has in Q4_0 or Q4_1 are multiplied as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers as tf

from llmbackend.adapter.gguf_models import with_directories
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import Type
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.model.gguf_model import StoredFourBits
from llmbackend.engine.model.loader import load_model
from tests.helpers.gguf_files import write_model
from tests.helpers.tiny_models import BASE, random_model

KINDS = {"Q4_0": Type.INT4, "Q4_1": Type.INT4_MIN}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> object:
    """Heads of 32 have a native program; queries and keys are ordered by pairs in the file."""
    return random_model(tf.LlamaConfig(**BASE, head_dim=32, tie_word_embeddings=True))


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_are_those_of_the_file(kind: str, model: object, tmp_path: Path) -> None:
    held = write_model(tmp_path / "tiny.gguf", model, kind)
    stored = StoredFourBits([tmp_path / "tiny.gguf"])
    names = [name.removesuffix(".weight") for name in held if "proj" in name]
    assert len(names) > 7
    for name in names:
        matrix = stored.read(name)
        assert stored.type_of(name) is KINDS[kind]
        scales = np.repeat(matrix.scales.astype(np.float32), 32, axis=1)
        zeros = -8 * scales if matrix.mins is None else np.repeat(matrix.mins.astype(np.float32), 32, axis=1)
        assert np.array_equal(matrix.numbers * scales + zeros, held[f"{name}.weight"].float().numpy())
    assert stored.type_of("model.norm") is None
    assert stored.type_of("nothing") is None


@pytest.mark.skipif(not library.available(), reason="no native kernels are built")
@pytest.mark.parametrize("kind", KINDS)
def test_layers_keep_them(kind: str, model: object, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", model, kind)
    config = with_directories(EngineConfig(model=str(tmp_path / "tiny.gguf"), transport="inline"))
    assert config.quantization == "int4"
    loaded = load_model(config)
    stored = StoredFourBits([tmp_path / "tiny.gguf"])
    for layer in loaded.model.model.layers:
        for part, names in ((layer.self_attn, ("q_proj", "k_proj", "v_proj", "o_proj")), (layer.mlp, ("gate_proj",))):
            assert {getattr(part, name).packed.type for name in names} == {KINDS[kind]}
    packed = loaded.model.model.layers[1].self_attn.k_proj.packed
    expected = stored.read("model.layers.1.self_attn.k_proj").panels().tobytes()
    assert loaded.store is not None
    begin = packed.address - loaded.store.memory.ctypes.data
    assert loaded.store.memory[begin : begin + len(expected)].tobytes() == expected
    assert loaded.model.lm_head.packed.type is Type.INT8
    assert "int4 linear layers, one native program" in make_runner(config).info.description


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("Q8_0", {}), ("Q4_0", {"dtype": "float32"}), ("Q4_0", {"quantization": "int8"}), ("Q4_1", {"enable_lora": True})],
)
def test_what_is_asked_for_comes_first(kind: str, arguments: dict[str, object], model: object, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", model, kind)
    config = with_directories(EngineConfig(model=str(tmp_path / "tiny.gguf"), **arguments))  # type: ignore[arg-type]
    assert config.quantization == arguments.get("quantization")


def test_a_gpu_gets_plain_weights(model: object, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", model, "Q4_0")
    left_open = EngineConfig(model=str(tmp_path / "tiny.gguf"), device="auto")
    assert with_directories(left_open, has_gpu=lambda: False).quantization == "int4"
    assert with_directories(left_open, has_gpu=lambda: True).quantization is None
    assert with_directories(EngineConfig(model=left_open.model, device="cuda")).quantization is None
    with pytest.raises(ValueError, match="'quantization' is 'int4', expected 'int8', 'fp8' or null on a GPU"):
        EngineConfig(model="m", device="cuda:1", quantization="int4")
