"""Checkpoints in 4 bits (compressed-tensors, GPTQ, AWQ): the tokens are those of the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.gpu.weights import int4
from llmbackend.engine.gpu.weights.dense import QuantizedLinear
from llmbackend.engine.gpu.weights.int4 import Int4Weight
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.module_runner import make_model_runner
from llmbackend.engine.model.unloaded_model import unloaded_model
from tests.helpers.gpu.gpu_engines import config_for, gpu_runner, mixed_requests, tokens_of
from tests.helpers.gpu.int4_checkpoints import config_of, save_int4, write_config
from tests.helpers.gpu.tiny_models import FAMILIES, SIZES, WITH_EXPERTS
from tests.helpers.gpu.tiny_programs import BLOCK_SIZE, all_logits, load, on_ranks, program, program_of_rank, prompts

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS = ("compressed-tensors", "gptq", "awq")
SMALL = tf.Qwen2Config(**SIZES | {"num_hidden_layers": 1, "intermediate_size": 128})


@pytest.mark.parametrize(
    ("family", "method", "group_size"),
    [
        ("llama", "compressed-tensors", 32),
        ("llama tied", "gptq", 64),
        ("qwen2", "awq", 32),
        ("qwen2", "gptq", -1),
        ("phi3", "compressed-tensors", -1),
        ("gemma3", "awq", 64),
    ],
)
def test_logits_are_those_of_the_weights_it_stands_for(
    family: str, method: str, group_size: int, tmp_path: Path
) -> None:
    plain = load(save_int4(FAMILIES[family], tmp_path, method, group_size))
    loaded = load(tmp_path / "int4", dtype="float32")
    layer = loaded.model.model.layers[0]
    assert isinstance(layer.mlp.down_proj, QuantizedLinear) and isinstance(layer.mlp.down_proj.quantized, Int4Weight)
    built = program(loaded)
    built.verify(loaded.checked, BLOCK_SIZE)
    expected = all_logits(program(plain), prompts())
    for found, logits in zip(all_logits(built, prompts()), expected, strict=True):
        assert torch.equal(found, logits)


@pytest.mark.parametrize("method", METHODS)
def test_requests_get_the_tokens_of_the_weights_it_stands_for(method: str, tmp_path: Path) -> None:
    """On a fake device that runs work as late as it may, with graphs, chunks and steps in flight."""
    plain = save_int4(SMALL, tmp_path, method)
    requests, found = mixed_requests(3, seed=2), []
    for path in (plain, tmp_path / "int4"):
        config = config_for(path, dtype="float32", max_num_seqs=2, max_num_batched_tokens=16)
        found.append(tokens_of(config, gpu_runner(config), requests)[0])
    assert found[0] == found[1]


@pytest.mark.timeout(600)  # of interpreted kernels
def test_the_kernel_gives_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = save_int4(SMALL, tmp_path, "awq")
    small: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32, "num_kv_blocks": 3}
    options = {"dtype": "float32", "block_size": 16, "enforce_eager": True, **small}
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    request = InferRequest(request_id="r", prompt_token_ids=tuple(range(5, 20)), sampling=sampling)
    config = config_for(plain, **options)
    expected, _ = tokens_of(config, gpu_runner(config), [request])
    monkeypatch.setattr(int4, "has_kernel", lambda device: True)
    config = config_for(tmp_path / "int4", **options)
    assert tokens_of(config, gpu_runner(config, triton=True), [request])[0] == expected


def test_on_a_cpu_its_layers_become_plain_ones(tmp_path: Path) -> None:
    plain = save_int4(SMALL, tmp_path, "awq")
    requests, found = mixed_requests(2, seed=4, greedy=True), []
    for path in (plain, tmp_path / "int4"):
        config = config_for(path, dtype="float32", device="cpu")
        found.append(tokens_of(config, make_model_runner(config), requests)[0])
    assert found[0] == found[1]


def test_ranks_have_parts_of_it(tmp_path: Path) -> None:
    plain = load(save_int4(SMALL, tmp_path, "gptq"))
    loaded = load(tmp_path / "int4", dtype="float32")
    expected = all_logits(program(plain), prompts())
    for part in on_ranks(2, lambda ranks: all_logits(program_of_rank(loaded, ranks), prompts())):
        for found, logits in zip(part, expected, strict=True):
            torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3 * logits.abs().max().item())


def test_the_second_version_of_gptq_has_its_zeros_as_they_are(tmp_path: Path) -> None:
    plain = load(save_int4(FAMILIES["llama"], tmp_path, "gptq", version=2))
    layers = zip(plain.model.model.layers, load(tmp_path / "int4", dtype="float32").model.model.layers, strict=True)
    for a, b in layers:
        assert torch.equal(b.mlp.up_proj.quantized.dense(torch.float32), a.mlp.up_proj.weight)


def test_what_its_settings_ask_for_beyond_is_refused_by_name(tmp_path: Path) -> None:
    save_int4(FAMILIES["llama"], tmp_path, "gptq")
    refused: list[tuple[dict[str, Any], str]] = [
        (config_of("gptq", 32, bits=8), r"quantization_config.bits is 8, expected 4"),
        (config_of("gptq", 24), r"quantization_config.group_size is 24, expected -1 or a multiple of 32"),
        (config_of("gptq", 32, checkpoint_format="marlin"), r"checkpoint_format is 'marlin', expected 'gptq' or"),
        (config_of("gptq", 64), r"has 2 groups of 64 inputs, expected groups of 64"),
        (config_of("awq", 32, version="gemv"), r"quantization_config.version is 'gemv', expected 'gemm'"),
        (config_of("compressed-tensors", 32, num_bits=8), r"group_0.weights.num_bits is 8, expected 4"),
        (config_of("compressed-tensors", 32, strategy="block"), r"strategy is 'block', expected 'group' or 'channel'"),
        (config_of("compressed-tensors", 32) | {"format": "int-quantized"}, r"is 'int-quantized', expected 'pack-"),
        (
            {"quant_method": "bitsandbytes"},
            r"quantised by 'bitsandbytes', expected unquantised ones, or fp8, mxfp4, comp",
        ),
    ]
    for settings, text in refused:
        write_config(tmp_path, settings)
        with pytest.raises(ValueError, match=text):
            load(tmp_path / "int4")


def test_what_its_files_hold_beyond_is_refused_by_name(tmp_path: Path) -> None:
    save_int4(FAMILIES["llama"], tmp_path, "gptq")
    file = tmp_path / "int4" / "model.safetensors"
    tensors, layer = load_file(file), "model.layers.1.mlp.down_proj"
    turned = tensors[f"{layer}.g_idx"].flip(0).contiguous()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({f"{layer}.g_idx": turned}, f"the columns of '{layer}' are grouped by their activations"),
        ({f"{layer}.scales": None}, f"missing: {layer}.scales"),
        ({f"{layer}.bias": torch.ones(64)}, f"unexpected: {layer}.bias"),
        ({f"{layer}.qweight": tensors[f"{layer}.qweight"][:4].clone()}, r"down_proj.weight is \[64, 32\] and not"),
        ({f"{layer}.qweight": tensors[f"{layer}.qweight"].float()}, "is of type F32 and shape .* expected an I32"),
        ({"model.norm.weight": None}, "missing: model.norm.weight"),
    ]
    for changes, text in wrong:
        save_file({name: t for name, t in (tensors | changes).items() if t is not None}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=text):
            load(tmp_path / "int4")


def test_engine_arguments_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_int4(FAMILIES["llama"], tmp_path, "awq")
    with pytest.raises(ValueError, match=r"'quantization' is 'int8', expected null for .* weights are in 4 bits"):
        load(tmp_path / "int4", quantization="int8")


def test_experts_in_4_bits_are_refused_by_name(tmp_path: Path) -> None:
    save_int4(FAMILIES["llama"], tmp_path, "awq")
    config = WITH_EXPERTS["mixtral"].to_dict()
    stored = json.loads((tmp_path / "int4" / "config.json").read_text())
    stored = config | {"architectures": ["MixtralForCausalLM"], "quantization_config": stored["quantization_config"]}
    (tmp_path / "int4" / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"its tensors do not fit its config.json: missing: .*experts"):
        load(tmp_path / "int4")


def test_it_is_forecast_without_its_weights(tmp_path: Path) -> None:
    plain = save_int4(FAMILIES["qwen2"], tmp_path, "gptq")
    forecasts = [
        unloaded_model(EngineConfig(model=str(path), transport="inline")) for path in (plain, tmp_path / "int4")
    ]
    assert forecasts[0].num_parameters == forecasts[1].num_parameters
    assert forecasts[1].why_modules == forecasts[0].why_modules


def test_dense_weights_of_a_cpu_are_of_the_models_type(tmp_path: Path) -> None:
    save_int4(FAMILIES["llama"], tmp_path, "awq")
    loaded = load_model(EngineConfig(model=str(tmp_path / "int4"), transport="inline", dtype="bfloat16"))
    assert loaded.dtype == torch.bfloat16
