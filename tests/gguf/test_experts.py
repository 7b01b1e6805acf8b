"""GGUF files of models with experts: each expert's matrices are parts of one tensor, and stay as they are."""

from __future__ import annotations

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
from tests.gguf.test_stored import config_of
from tests.helpers.gguf_files import add_vocabulary, write_experts
from tests.helpers.tiny_models import BASE, random_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not library.available(), reason="no native kernels are built"),
]
EXPERTS, CHOSEN, INNER = 4, 2, 256
KINDS = {"Q4_0": Type.INT4, "Q4_1": Type.INT4_MIN, "Q8_0": Type.Q8_0, "Q4_K": Type.Q4_K, "F16": Type.INT8}
PARTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


@pytest.fixture(scope="module")
def model() -> Any:
    sizes = BASE | {"hidden_size": 256, "intermediate_size": INNER, "num_attention_heads": 8}
    experts: dict[str, Any] = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": INNER}
    return random_model(tf.Qwen3MoeConfig(**sizes, **experts, head_dim=32, norm_topk_prob=True))


def write(path: Path, model: Any, kind: str) -> dict[str, torch.Tensor]:
    """kind: of the experts. Returns the weights that the file holds, by the model's names."""
    config, writer = model.config, gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(CHOSEN)
    writer.add_expert_feed_forward_length(INNER)
    add_vocabulary(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    held: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            held[name] = write_experts(writer, name, tensor.numpy(), kind)
            continue
        values = tensor.float().numpy()
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", values)
        held[name] = tensor
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_the_model_that_it_was_made_of(kind: str, model: Any, tmp_path: Path) -> None:
    held = write(tmp_path / "tiny.gguf", model, kind)
    config = config_of(tmp_path / "tiny.gguf", quantization="int4")
    experts = load_model(config).model.model.layers[1].mlp.experts
    assert isinstance(experts, NativeExperts)
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


def test_plain_values_are_put_together(model: Any, tmp_path: Path) -> None:
    held = write(tmp_path / "tiny.gguf", model, "F32")
    config = config_of(tmp_path / "tiny.gguf", dtype="float32", kernels="torch")
    loaded = load_model(config).model.state_dict()
    for name, values in held.items():
        if ".experts." in name:
            assert torch.equal(loaded[name], values), name


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
