"""GGUF files of models with experts: each expert's matrices are parts of one tensor, and stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as tf

from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.operations import Type
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.native_experts import NativeExperts
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.families import model_tensors
from llmbackend.gguf.files import read_parts
from llmbackend.gguf.model_directory import gguf_files, model_directory
from tests.gguf.test_stored import config_of
from tests.helpers.gguf_files import write_model
from tests.helpers.tiny_models import BASE, engine_tokens, expected_tokens, prompts, random_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not library.available(), reason="no native kernels are built"),
]
EXPERTS, CHOSEN, INNER = 4, 2, 256
KINDS = {"Q4_0": Type.INT4, "Q4_1": Type.INT4_MIN, "Q8_0": Type.Q8_0, "Q4_K": Type.Q4_K, "F16": Type.INT8}
SIZES: dict[str, Any] = {
    **BASE, "hidden_size": 256, "intermediate_size": INNER, "num_attention_heads": 4, "num_experts_per_tok": CHOSEN,
}  # fmt: skip
LOCAL: dict[str, Any] = {**SIZES, "num_local_experts": EXPERTS, "head_dim": 64}
MODELS: dict[str, Any] = {
    "qwen3_moe": tf.Qwen3MoeConfig(
        **SIZES, num_experts=EXPERTS, moe_intermediate_size=INNER, head_dim=64, norm_topk_prob=True
    ),
    "qwen2_moe": tf.Qwen2MoeConfig(
        **SIZES, num_experts=EXPERTS, moe_intermediate_size=INNER, shared_expert_intermediate_size=INNER
    ),
    "olmoe": tf.OlmoeConfig(**SIZES, num_experts=EXPERTS),
    "mixtral": tf.MixtralConfig(**LOCAL, sliding_window=None),
    "gpt_oss": tf.GptOssConfig(**LOCAL, sliding_window=8),
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {family: random_model(config) for family, config in MODELS.items()}


@pytest.fixture(scope="module")
def model(models: dict[str, Any]) -> Any:
    return models["qwen3_moe"]


@pytest.mark.parametrize("family", MODELS)
def test_a_family_computes_as_before_its_conversion(family: str, models: dict[str, Any], tmp_path: Path) -> None:
    write_model(tmp_path / "tiny.gguf", models[family])
    folder = model_directory(gguf_files(tmp_path / "tiny.gguf"), tmp_path / "made")
    tokens, _ = engine_tokens(folder, dtype="float32")
    assert tokens == [expected_tokens(models[family], prompt) for prompt in prompts()]


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_stay_as_the_file_has_them(family: str, kind: str, models: dict[str, Any], tmp_path: Path) -> None:
    def kind_of(name: str) -> str:
        return kind if ".experts." in name else "Q8_0" if "proj" in name else "F32"

    model = tf.AutoModelForCausalLM.from_config(MODELS[family], dtype=torch.float32).eval()
    held = write_model(tmp_path / "tiny.gguf", models[family], kind_of)
    model.load_state_dict(held)
    config = config_of(tmp_path / "tiny.gguf", quantization="int4")
    experts = load_model(config).model.model.layers[1].mlp.experts
    assert {each.first.type for each in (experts.gate, experts.up, experts.down)} == {Type[kind]}
    assert make_runner(config).info.path == "native"
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    chosen = torch.tensor([[0, 1], [2, 3], [1, 3], [0, 2], [3, 0]])
    shares = torch.rand(5, CHOSEN, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = model.model.layers[1].mlp.experts(x, chosen, shares)
    error = experts(x, chosen, shares) - expected  # activations are rounded to 8 bits
    assert float(error.norm()) < 0.03 * float(expected.norm())


def of_experts(kind: str) -> Callable[[str], str]:
    return lambda name: kind if ".experts." in name else "F32"


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_the_model_that_it_was_made_of(kind: str, model: Any, tmp_path: Path) -> None:
    held = write_model(tmp_path / "tiny.gguf", model, of_experts(kind))
    config = config_of(tmp_path / "tiny.gguf", quantization="int4")
    experts = load_model(config).model.model.layers[1].mlp.experts
    assert isinstance(experts, NativeExperts) and experts.gate is not None
    assert {each.first.type for each in (experts.gate, experts.up, experts.down)} == {KINDS[kind]}
    assert make_runner(config).info.path == "native"
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(7, 256, generator=generator)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(7)])
    shares = torch.rand(7, CHOSEN, generator=generator)
    gate_up, down = (held[f"model.layers.1.mlp.experts.{name}"][chosen] for name in ("gate_up_proj", "down_proj"))
    gate, up = torch.einsum("tk,trnk->trn", x, gate_up).chunk(2, dim=-1)
    inner = torch.nn.functional.silu(gate) * up
    expected = torch.einsum("trn,trwn,tr->tw", inner, down, shares)
    error = experts(x, chosen, shares) - expected  # activations are rounded to 8 bits
    assert float(error.norm()) < 0.03 * float(expected.norm())


def test_experts_that_are_no_matrices_are_refused(model: Any, tmp_path: Path) -> None:
    path, writer = tmp_path / "odd.gguf", gguf.GGUFWriter(tmp_path / "odd.gguf", "qwen3moe")
    writer.add_head_count(2)
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GgufError, match=r"'blk\.0\.ffn_up_exps\.weight' is \[4, 8\], expected a matrix for each"):
        model_tensors(read_parts([path]))
