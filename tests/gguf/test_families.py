"""A GGUF file of each family gives the tokens of the model that it was converted from."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.weight_cache.cache import key_of
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.families import model_tensors
from llmbackend.gguf.files import read_parts
from llmbackend.gguf.model_directory import gguf_files, model_directory
from tests.helpers.gguf_files import random_blocks, write_fields, write_model
from tests.helpers.recurrent_models import RECURRENT, SIZES
from tests.helpers.tiny_models import BASE, FAMILIES, MIXED, UNTIED, WINDOW, engine_tokens, expected_tokens, prompts
from tests.helpers.tiny_models import random_model as tiny_model

pytestmark = pytest.mark.slow

THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    **THETA, "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
PHI_LONG = {
    **THETA, "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 7.0],
    "partial_rotary_factor": 0.5,
}  # fmt: skip
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def copy_of(family: str, **changes: Any) -> Any:
    config = copy.deepcopy(RECURRENT[family])
    config.update(changes)
    return config


CONFIGS: dict[str, Any] = {
    "llama": FAMILIES["llama"],
    "llama, tied": tf.LlamaConfig(**BASE, tie_word_embeddings=True),
    "llama, its own width of heads": tf.LlamaConfig(**BASE, head_dim=32),
    "llama, biases": tf.LlamaConfig(**BASE, attention_bias=True, mlp_bias=True),
    "llama 3.2": tf.LlamaConfig(**BASE, rope_parameters=LLAMA3),
    "llama, other rotary factors": tf.LlamaConfig(**BASE, rope_parameters={**LLAMA3, "high_freq_factor": 3.0}),
    "mistral": tf.MistralConfig(**BASE, sliding_window=None),
    "qwen2": FAMILIES["qwen2"],
    "qwen2, yarn": tf.Qwen2Config(
        **BASE,
        rope_parameters={**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "qwen3": FAMILIES["qwen3"],
    "gemma2": tf.Gemma2Config(**BASE, **WINDOW, query_pre_attn_scalar=16, attn_logit_softcapping=2.0),
    "gemma3": FAMILIES["gemma3"],
    "gemma3, stretched": tf.Gemma3TextConfig(
        **BASE, **UNTIED, **WINDOW, **MIXED, query_pre_attn_scalar=16, rope_parameters=GEMMA_ROPES
    ),
    "phi3": FAMILIES["phi3"],
    "phi3, window": tf.Phi3Config(**BASE, sliding_window=8),
    "phi3, longrope": tf.Phi3Config(
        **{**BASE, "max_position_embeddings": 128}, original_max_position_embeddings=64, rope_parameters=PHI_LONG
    ),
    "granite": tf.GraniteConfig(
        **BASE, logits_scaling=3.0, attention_multiplier=0.2, residual_multiplier=0.7, embedding_multiplier=1.5
    ),
    "smollm3": tf.SmolLM3Config(**{**BASE, "num_hidden_layers": 5}),
    "lfm2": RECURRENT["lfm2"],
    "qwen3.5": RECURRENT["qwen3_5"],
    "qwen3.5, as many keys as values": tf.Qwen3_5TextConfig(
        **SIZES, num_hidden_layers=4, head_dim=64, linear_key_head_dim=32, linear_value_head_dim=48,
        linear_num_key_heads=2, linear_num_value_heads=2, tie_word_embeddings=True,
    ),
    "qwen3.5, experts": RECURRENT["qwen3_5_moe"],
    "granite hybrid": RECURRENT["granitemoehybrid"],
    "granite hybrid, experts": RECURRENT["granitemoehybrid with experts"],
    "bamba": RECURRENT["bamba"],
    "falcon-h1": copy_of("falcon_h1", attention_bias=False, mamba_proj_bias=False, projectors_bias=False),
    "falcon-h1, norms": RECURRENT["falcon_h1 with norms"],
    "nemotron-h": copy_of("nemotron_h", layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"]),
    "nemotron-h, experts": copy_of(
        "nemotron_h", layers_block_type=["linear_attention", "moe", "full_attention", "moe"]
    ),
}  # fmt: skip


def directory_of(path: Path) -> Path:
    return model_directory(gguf_files(path), path.parent / "made")


def expected(config: Any, weights: dict[str, torch.Tensor]) -> list[list[int]]:
    """Greedy tokens of transformers' float32 model with these weights."""
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    return [expected_tokens(model, prompt) for prompt in prompts()]


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_computes_as_before_its_conversion(family: str, tmp_path: Path) -> None:
    model = tiny_model(CONFIGS[family])
    write_model(tmp_path / "tiny.gguf", model)
    tokens, _ = engine_tokens(directory_of(tmp_path / "tiny.gguf"))
    assert tokens == expected(CONFIGS[family], model.state_dict())


@pytest.mark.parametrize(
    "family",
    ["llama", "gemma3", "phi3", "granite", "smollm3", "qwen3", "lfm2", "qwen3.5", "granite hybrid", "nemotron-h"],
)
def test_quantised_weights_are_those_of_the_file(family: str, tmp_path: Path) -> None:
    weights = write_model(tmp_path / "tiny.gguf", tiny_model(CONFIGS[family]), "Q8_0")
    tokens, _ = engine_tokens(directory_of(tmp_path / "tiny.gguf"), dtype="float32")
    assert tokens == expected(CONFIGS[family], weights)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    model = tiny_model(CONFIGS["qwen3.5"])
    layers = model.config.num_hidden_layers
    norms = {f"blk.{layers}.{name}.weight": np.ones(128) for name in ("attn_norm", "nextn.enorm")}
    fields = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": layers + 1}
    write_model(tmp_path / "tiny.gguf", model, extra=fields, tensors=norms)
    tokens, _ = engine_tokens(directory_of(tmp_path / "tiny.gguf"))
    assert tokens == expected(CONFIGS["qwen3.5"], model.state_dict())


@pytest.mark.parametrize(
    ("family", "fields", "error"),
    [
        ("qwen3.5", {"qwen35.ssm.time_step_rank": 5}, "'qwen35.ssm.time_step_rank' is 5, expected a multiple of 2"),
        ("qwen3.5", {"qwen35.ssm.inner_size": 190}, "'qwen35.ssm.inner_size' is 190, expected a multiple of 4"),
        ("qwen3.5", {"qwen35.attention.recurrent_layers": [True]}, "is a list of 1, expected a list of 4 numbers"),
        (
            "bamba",
            {"granitehybrid.rope.dimension_count": 64},
            "'granitehybrid.rope.dimension_count' is 64, expected 32",
        ),
        (
            "nemotron-h",
            {"nemotron_h.ssm.inner_size": 190},
            "'nemotron_h.ssm.inner_size' is 190, expected a multiple of 6",
        ),
        ("granite hybrid", {"granitehybrid.ssm.inner_size": 320}, "is 320, expected a multiple of 128"),
        ("lfm2", {"lfm2.attention.head_count_kv": [0, 0, 0, 0]}, "is a list of 4, expected a number from 1 to"),
        ("lfm2", {"lfm2.attention.head_count_kv": 1}, "'lfm2.attention.head_count_kv' is 1, expected a list of 4"),
        ("lfm2", {"lfm2.shortconv.l_cache": 0}, "'lfm2.shortconv.l_cache' is 0, expected a number from 1 to 64"),
    ],
)
def test_fields_of_recurrent_layers_are_checked(
    family: str, fields: dict[str, Any], error: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "tiny.gguf", tiny_model(CONFIGS[family]), extra=fields)
    with pytest.raises(GgufError, match=re.escape(error)):
        directory_of(tmp_path / "tiny.gguf")


def test_a_growing_state_is_refused(tmp_path: Path) -> None:
    """A decay that is not negative has no logarithm."""
    model = tiny_model(CONFIGS["qwen3.5"])
    model.model.layers[0].linear_attn.A_log.data.fill_(float("nan"))
    write_model(tmp_path / "tiny.gguf", model)
    with pytest.raises(ValueError, match="differ from its own by nan"):
        engine_tokens(directory_of(tmp_path / "tiny.gguf"))


def test_heads_that_cannot_take_turns_are_refused(tmp_path: Path) -> None:
    shape = {"ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 64, "ssm.state_size": 16}
    fields = {"general.architecture": "qwen35", "qwen35.attention.head_count": 2}
    fields |= {f"qwen35.{name}": value for name, value in shape.items()}
    file = write_fields(tmp_path / "odd.gguf", fields, {"blk.0.attn_qkv.weight": np.zeros((120, 8))})
    with pytest.raises(GgufError, match="has 120 rows, expected 64 and a multiple of 32"):
        model_tensors(read_parts([file]))


def test_parts_are_one_model(tmp_path: Path) -> None:
    model = tiny_model(CONFIGS["llama"])
    write_model(tmp_path / "tiny.gguf", model, shards=7)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(parts) > 2
    for named in (tmp_path, parts[0], parts[-1]):
        made = model_directory(gguf_files(named), tmp_path / "made")
        assert sorted(path.name for path in made.glob("*.gguf")) == [path.name for path in parts]
    tokens, _ = engine_tokens(made)
    assert tokens == expected(CONFIGS["llama"], model.state_dict())


def test_int8_is_quantised_from_the_files_values(tmp_path: Path) -> None:
    config = CONFIGS["llama"]
    weights = write_model(tmp_path / "tiny.gguf", tiny_model(config), "Q4_0")
    plain = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(weights)
    plain.save_pretrained(tmp_path / "plain")
    options = {"dtype": "float32", "quantization": "int8"}
    assert engine_tokens(directory_of(tmp_path / "tiny.gguf"), **options) == engine_tokens(
        tmp_path / "plain", **options
    )


def test_packed_weights_are_those_of_one_file(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_model(file, tiny_model(CONFIGS["llama"]))
    first = key_of(EngineConfig(model=str(directory_of(file))))
    assert key_of(EngineConfig(model=str(directory_of(file)))) == first
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert key_of(EngineConfig(model=str(directory_of(file)))).digest != first.digest


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_written_types_are_read(kind: str, tmp_path: Path) -> None:
    from llmbackend.gguf.tensors import GgufTensors

    weights = write_model(tmp_path / "tiny.gguf", tiny_model(CONFIGS["llama"]), kind)
    tensors = GgufTensors([tmp_path / "tiny.gguf"], torch.float32)
    assert tensors.keys() == weights.keys()
    assert all(torch.equal(tensors[name], weights[name]) for name in weights)
    half = GgufTensors([tmp_path / "tiny.gguf"], torch.bfloat16)
    assert all(torch.equal(half[name], weights[name].bfloat16()) for name in weights)
    assert f"({len([w for w in weights.values() if w.dim() > 1])} {kind}, " in half.description


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_other_types_are_read(kind: str, tmp_path: Path) -> None:
    """Rows enough for several pieces, in a file that has nothing else."""
    import gguf

    from llmbackend.gguf.tensors import GgufTensors
    from tests.helpers.gguf_files import dequantized

    raw, number = random_blocks(kind, 1100, 512), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "qwen2")
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GgufTensors([tmp_path / "one.gguf"], torch.float32)["model.embed_tokens.weight"]
    assert torch.equal(read, torch.from_numpy(dequantized(raw, number)))
