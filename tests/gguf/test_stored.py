"""Weights that a GGUF file has in few bits are multiplied as they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers as tf

from llmbackend.adapter.gguf_models import with_directories
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.engine_core import EngineCore
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.library import BLOCKS
from llmbackend.engine.kernels.operations import Type
from llmbackend.engine.kernels.weights import FourBits, StoredBlocks
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.messages import InferRequest, SamplingParams, TokenLogprobs
from llmbackend.engine.model.gguf_model import KeptLayers
from llmbackend.engine.model.loader import load_model
from tests.engine.test_decoder_program import greedy
from tests.helpers.gguf_files import dequantized, quantized, write_model
from tests.helpers.lora_adapters import write_adapter
from tests.helpers.recurrent_models import SIZES
from tests.helpers.tiny_models import BASE, random_model

FOUR_BITS = {"Q4_0": Type.INT4, "Q4_1": Type.INT4_MIN}
KINDS = FOUR_BITS | {kind.name: kind for kind in BLOCKS}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not library.available(), reason="no native kernels are built"),
]


@pytest.fixture(scope="module")
def model() -> object:
    """Heads of 32 have a native program; queries and keys are ordered by pairs in the file."""
    sizes = BASE | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    return random_model(tf.LlamaConfig(**sizes, head_dim=32, tie_word_embeddings=True))


def q4_k_m(name: str) -> str:
    """As llama.cpp's mixture: some values and outputs of the MLP in more bits, and so is the embedding."""
    if "embed" in name or ("layers.1" in name and ("v_proj" in name or "down_proj" in name)):
        return "Q6_K"
    return "Q5_0" if "layers.2.self_attn.o_proj" in name else "Q4_K"


def config_of(path: Path, **arguments: object) -> EngineConfig:
    return with_directories(EngineConfig(model=str(path), transport="inline", **arguments))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_matrices_in_four_bits_are_those_of_the_file(kind: str, model: object, tmp_path: Path) -> None:
    held = write_model(tmp_path / "tiny.gguf", model, kind)
    stored = KeptLayers([tmp_path / "tiny.gguf"])
    names = [name.removesuffix(".weight") for name in held if "proj" in name]
    assert len(names) > 7
    for name in names:
        matrix = stored.read(name)
        assert isinstance(matrix, FourBits) and stored.type_of(name) is KINDS[kind]
        assert np.array_equal(values_of(matrix, kind), held[f"{name}.weight"].float().numpy())
    assert stored.type_of("model.norm") is None
    assert stored.type_of("nothing") is None


@pytest.mark.parametrize("kind", [kind.name for kind in BLOCKS])
def test_blocks_are_those_of_the_file(kind: str, model: object, tmp_path: Path) -> None:
    held = write_model(tmp_path / "tiny.gguf", model, kind)
    stored = KeptLayers([tmp_path / "tiny.gguf"])
    for name in (f"model.layers.0.self_attn.{part}_proj" for part in "qv"):
        matrix = stored.read(name)
        assert isinstance(matrix, StoredBlocks) and stored.type_of(name) is matrix.type is KINDS[kind]
        assert matrix.shape == held[f"{name}.weight"].shape
        values = dequantized(matrix.blocks, quantized(np.zeros((32, 256)), kind)[1])
        assert np.array_equal(values, held[f"{name}.weight"].float().numpy())
    head = stored.read("lm_head")
    assert isinstance(head, StoredBlocks) and head.shape == (128, 256)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_keep_them(kind: str, model: object, tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", model, kind)
    config = config_of(tmp_path / "tiny.gguf")
    assert config.quantization == "int4"
    loaded = load_model(config)
    for layer in loaded.model.model.layers:
        kept = [getattr(layer.self_attn if "mlp" not in name else layer.mlp, name, None) for name in PROJECTIONS]
        assert {each.packed.type for each in kept if each is not None} == {KINDS[kind]}
    assert loaded.model.lm_head.packed.type is KINDS[kind]
    assert "int4 linear layers, one native program" in make_runner(config).info.description


@pytest.mark.parametrize("kind", [*KINDS, q4_k_m])
def test_logits_are_those_of_the_values(kind: str | Callable[[str], str], model: object, tmp_path: Path) -> None:
    """Activations are rounded to 8 bits."""
    held = write_model(tmp_path / "tiny.gguf", model, kind)
    dense = random_model(model.config)  # type: ignore[attr-defined]
    dense.load_state_dict({name: values.to(torch.float32) for name, values in held.items()}, strict=False)
    dense.tie_weights()
    config, prompt = config_of(tmp_path / "tiny.gguf"), tuple(3 * i % 128 for i in range(12))
    tokens, logprobs = greedy(Path(config.model), prompt, 8, quantization=config.quantization, dtype="float32")
    with torch.inference_mode():
        logits = dense(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(logprobs), expected, atol=0.1 * float(logits.std()))


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", q4_k_m])
def test_adapters_change_them(kind: str | Callable[[str], str], model: object, tmp_path: Path) -> None:
    """As if they were added to the values of the file."""
    held = write_model(tmp_path / "tiny.gguf", model, kind)
    dense = random_model(model.config)  # type: ignore[attr-defined]
    dense.load_state_dict({name: values.to(torch.float32) for name, values in held.items()}, strict=False)
    dense.tie_weights()
    merged = write_adapter(dense, PROJECTIONS, tmp_path / "doll", 3)
    config = config_of(tmp_path / "tiny.gguf", enable_lora=True, lora_modules={"doll": str(tmp_path / "doll")})
    assert config.quantization == "int4"
    prompt = tuple(3 * i % 128 for i in range(12))
    core = EngineCore(config, make_runner(config))
    for name in ("", "doll"):
        sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0)
        core.add(InferRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, lora_name=name))
    found: dict[str, TokenLogprobs] = {}
    while core.has_work:
        found |= {output.request_id: output.logprobs[0] for output in core.step().outputs}
    core.close()
    for name, modules in (("", dense), ("doll", merged)):
        with torch.inference_mode():
            logits = modules(torch.tensor([prompt])).logits[0, -1]
        expected = float(torch.log_softmax(logits, -1)[found[name].token_id])
        assert found[name].logprob == pytest.approx(expected, abs=0.1 * float(logits.std())), name


def test_types_may_differ_within_a_layer(model: object, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "tiny.gguf", model, q4_k_m)
    with caplog.at_level(logging.INFO):
        runner = make_runner(config_of(tmp_path / "tiny.gguf"))
    assert "linear layers: 18 kept Q4_K, 3 kept Q6_K, 1 kept Q5_0" in caplog.text
    assert "one native program" in runner.info.description


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [("F16", {}), ("Q4_0", {"dtype": "float32"}), ("Q4_K", {"quantization": "int8"})],
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


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
def test_heads_that_take_turns_are_put_in_the_models_order(kind: str, tmp_path: Path) -> None:
    """Blocks of a head's columns move with it; where a block has columns of two heads, the matrix becomes int8."""
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 256}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    model = random_model(
        tf.Qwen3_5TextConfig(
            **sizes, **heads, num_hidden_layers=2, head_dim=128, linear_key_head_dim=64, linear_value_head_dim=64,
            layer_types=["linear_attention", "full_attention"],
        )
    )  # fmt: skip
    held = write_model(tmp_path / "tiny.gguf", model, kind)
    stored = KeptLayers([tmp_path / "tiny.gguf"])
    outer = "model.layers.0.linear_attn"
    for name in (f"{outer}.{part}" for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj")):
        assert (stored.type_of(name) is None) == (kind == "Q4_K" and name.endswith("out_proj"))
        if stored.type_of(name) is not None:
            assert np.array_equal(values_of(stored.read(name), kind), held[f"{name}.weight"].numpy())
    config = config_of(tmp_path / "tiny.gguf")
    assert make_runner(config).info.path == "native"


def values_of(matrix: FourBits | StoredBlocks, kind: str) -> npt.NDArray[np.float32]:
    if isinstance(matrix, StoredBlocks):
        return dequantized(matrix.blocks, gguf.GGMLQuantizationType[kind])
    scales = np.repeat(matrix.scales.astype(np.float32), 32, axis=1)
    zeros = -8 * scales if matrix.mins is None else np.repeat(matrix.mins.astype(np.float32), 32, axis=1)
    return matrix.numbers * scales + zeros
