"""Experts in mxfp4 are multiplied as a checkpoint has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.kernels import library
from llmbackend.engine.kernels.operations import Type
from llmbackend.engine.make_runner import make_runner
from llmbackend.engine.model.kept_matrices import StoredMxfp4
from llmbackend.engine.model.loader import load_model
from llmbackend.engine.model.native_experts import NativeExperts
from tests.engine.test_decoder_program import MIXED, SIZES, greedy
from tests.helpers.gpu.mxfp4_checkpoints import save_mxfp4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built"),
]
WIDER: dict[str, Any] = {**SIZES, "hidden_size": 256, "intermediate_size": 128}
CONFIG = tf.GptOssConfig(**WIDER, **MIXED, head_dim=64, num_local_experts=4, num_experts_per_tok=2)


def test_numbers_and_scales_are_those_of_the_file() -> None:
    draw = torch.Generator().manual_seed(3)
    tensors = {}
    for name, n in (("gate_up_proj", 12), ("down_proj", 5)):
        tensors[f"m.experts.{name}_blocks"] = torch.randint(0, 256, (3, n, 7, 16), dtype=torch.uint8, generator=draw)
        tensors[f"m.experts.{name}_scales"] = torch.randint(100, 140, (3, n, 7), dtype=torch.uint8, generator=draw)
    stored, native = StoredMxfp4(tensors), library.load()
    assert native is not None
    for part, name, rows in (
        ("gate_proj", "gate_up_proj", slice(0, None, 2)),
        ("up_proj", "gate_up_proj", slice(1, None, 2)),
        ("down_proj", "down_proj", slice(None)),
    ):
        blocks, scales = (tensors[f"m.experts.{name}_{kind}"] for kind in ("blocks", "scales"))
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
        for expert in range(3):
            matrix = stored.read(f"m.experts.{expert}.{part}")
            values = native.unpack_blocks(matrix.type, matrix.blocks)
            assert np.array_equal(values, expected[expert][rows].numpy())
    assert stored.type_of("m.experts.0.up_proj") is Type.MXFP4
    assert stored.type_of("m.self_attn.q_proj") is None and stored.type_of("x.experts.0.up_proj") is None


def test_a_program_multiplies_by_them(tmp_path: Path) -> None:
    plain = save_mxfp4(CONFIG, tmp_path)
    packed = tmp_path / "mxfp4"
    config = EngineConfig(model=str(packed), transport="inline", quantization="int4", num_threads=1)
    experts = load_model(config).model.model.layers[0].mlp.experts
    assert isinstance(experts, NativeExperts) and experts.gate is not None
    assert {experts.gate.first.type, experts.up.first.type, experts.down.first.type} == {Type.MXFP4}
    assert make_runner(config).info.path == "native"
    prompt = tuple((7 * i + 3) % 128 for i in range(20))
    tokens, logprobs = greedy(packed, prompt, 8, quantization="int4", dtype="float32")
    model = tf.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(logprobs), expected, atol=0.15 * float(logits.std()))
