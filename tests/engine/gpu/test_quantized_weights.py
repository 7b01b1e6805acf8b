"""Weights in 8 bits: how far they are from what they stand for, and models that compute with them, on CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.gpu.program import library_matmul
from llmbackend.engine.gpu.weights.dense import Quantization, QuantizedLinear, QuantizedWeight
from llmbackend.engine.model.loader import load_model
from tests.helpers.gpu.tiny_models import FAMILIES, SIZES, save
from tests.helpers.gpu.tiny_programs import BLOCK_SIZE, all_logits, load, on_ranks, program, program_of_rank, prompts

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS: tuple[Quantization, ...] = ("fp8", "int8")


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """With rows of very different sizes, and one of zeros."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, rows)[:, None]
    sizes[rows // 2] = 0
    return torch.randn(rows, columns, generator=draw) * sizes


def product(weight: QuantizedWeight, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(x), weight.n), 77.0, dtype=x.dtype)
    weight.multiply(library_matmul, x, bias, out)
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_as_near_as_8_bits_allow(kind: Quantization) -> None:
    exact = matrix(48, 64, 1)
    weight = QuantizedWeight.of(exact, kind)
    stored = weight.data.float() * weight.scale[:, None]
    half_a_step = weight.scale[:, None] / 2
    if kind == "fp8":  # three bits behind the point, and fewer below the smallest normal number
        half_a_step = torch.maximum(exact.abs() / 16, weight.scale[:, None] * 2.0**-10)
    assert ((stored - exact).abs() <= half_a_step * 1.001).all()
    assert weight.data.dtype.itemsize == 1 and weight.scale.shape == (48,)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_product_is_that_of_the_numbers_it_rounded_to(kind: Quantization, rows: int) -> None:
    weight, x = QuantizedWeight.of(matrix(48, 64, 2), kind), matrix(rows, 64, 3)
    bias = torch.arange(48.0)
    seen = QuantizedWeight.of(x, kind)
    exact = (seen.data.double() * seen.scale[:, None]) @ (weight.data.double() * weight.scale[:, None]).t() + bias
    torch.testing.assert_close(product(weight, x, bias), exact.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_is_its_own(kind: Quantization) -> None:
    """A token's result is the same beside others, and a broken token changes no other."""
    weight, x = QuantizedWeight.of(matrix(48, 64, 4), kind), matrix(9, 64, 5)
    together = product(weight, x)
    torch.testing.assert_close(product(weight, x[3:4]), together[3:4], rtol=1e-4 if kind == "fp8" else 0, atol=0)
    broken = x.clone()
    broken[2, 7], broken[5, 1] = float("nan"), float("inf")
    spoilt = product(weight, broken)
    others = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(spoilt[others], together[others])
    assert not spoilt[[2, 5]].isfinite().all(dim=-1).any()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_and_neighbours_are_of_one_memory(kind: Quantization) -> None:
    whole = QuantizedWeight.of(matrix(48, 64, 6), kind)
    above, below = whole.part(0, 16), whole.part(16, 32)
    joined = above.joined(below)
    assert joined is not None and joined.n == 48 and joined.data.data_ptr() == whole.data.data_ptr()
    assert torch.equal(joined.scale, whole.scale) and below.joined(above) is None
    x = matrix(3, 64, 7)
    rows = torch.tensor([40, 2, 7])
    assert torch.equal(product(whole.rows(rows), x), product(whole, x)[:, rows])
    assert torch.equal(product(above.above(below), x), product(whole, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama tied", "qwen2", "gemma2", "phi3"])
def test_models_in_8_bits_are_near_those_in_32(kind: Quantization, family: str, tmp_path: Path) -> None:
    model = save(FAMILIES[family], tmp_path)
    loaded = load(tmp_path, quantization=kind)
    built = program(loaded)
    built.verify(loaded.checked, BLOCK_SIZE)
    layer = loaded.model.model.layers[0]
    assert isinstance(layer.mlp.down_proj, QuantizedLinear) and isinstance(layer.self_attn.o_proj, QuantizedLinear)
    for tokens, logits in zip(prompts()[:2], all_logits(built, prompts()), strict=False):
        with torch.inference_mode():
            exact = model(tokens[None].long()).logits[0]
        assert torch.nn.functional.cosine_similarity(logits.flatten(), exact.flatten(), dim=0) > 0.97
        assert not torch.allclose(logits, exact, atol=1e-4)  # it is quantised


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_have_parts_of_quantised_weights(kind: Quantization, tmp_path: Path) -> None:
    save(FAMILIES["qwen2"], tmp_path)
    loaded = load(tmp_path, quantization=kind)
    alone = all_logits(program(loaded), prompts())
    first, second = on_ranks(2, lambda ranks: all_logits(program_of_rank(loaded, ranks), prompts()))
    for one, part, same in zip(alone, first, second, strict=True):
        assert torch.equal(part, same)
        assert torch.nn.functional.cosine_similarity(part.flatten(), one.flatten(), dim=0) > 0.97


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    save(FAMILIES["llama"], tmp_path)
    with pytest.raises(ValueError, match="'quantization' is 'fp8', expected 'int8', 'int4' or null on device 'cpu'"):
        load_model(EngineConfig(model=str(tmp_path), quantization="fp8", transport="inline"))
    with pytest.raises(ValueError, match="expected 'int8' or null where 'batch_invariant' is true"):
        load(tmp_path, quantization="fp8", batch_invariant=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantization_config.config_groups is {}, expected one or more groups"):
        load_model(EngineConfig(model=str(tmp_path), transport="inline"))


def test_a_checkpoint_in_fp8_is_read_as_what_it_stands_for(tmp_path: Path) -> None:
    """With scales for blocks of 128 by 128, as DeepSeek and Qwen publish them."""
    config = tf.LlamaConfig(**SIZES | {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4})
    model = save(config, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name, weight in list(weights.items()):
        if "_proj" in name:
            blocks = weight.reshape(weight.shape[0] // 128, 128, weight.shape[1] // 128, 128)
            scale = blocks.abs().amax(dim=(1, 3)) / 448
            weights[name] = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
            weights[f"{name}_scale_inv"] = scale
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    stored = json.loads((tmp_path / "config.json").read_text())
    stored["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    loaded = load(tmp_path)
    assert loaded.dtype == torch.float32
    for tokens, logits in zip(prompts()[:2], all_logits(program(loaded), prompts()), strict=False):
        with torch.inference_mode():
            exact = model(tokens[None].long()).logits[0]
        assert torch.nn.functional.cosine_similarity(logits.flatten(), exact.flatten(), dim=0) > 0.97
