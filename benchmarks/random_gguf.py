"""Writes a GGUF file of a model with random blocks, without needing a (large) checkpoint.

    python -m benchmarks.random_gguf llama3-8b-shape|moe-3b-shape FILE.gguf q4_0|q4_k_m|q8_0
    python -m benchmarks.random_gguf gpt-oss-20b-shape FILE.gguf mxfp4

Used by models.py. Independent of engines. Invariants: tensors have the types that llama.cpp's quantiser chooses for
such a model; a kind always means the same file; at most one tensor is in memory.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoints import (
    CHAT_TEMPLATE,
    CONTEXT_TOKENS,
    EOS_ID,
    PAD_ID,
    SPECIAL_TOKENS,
    TRAINED_TOKENS,
    write_tokenizer,
)

WEIGHT_DEVIATION = 0.02
_MEAN_SCALE, _MEAN_NUMBER, _NUMBER_DEVIATION = 31.5, 7.5, 4.6
"""Of random bits: of a 6-bit scale, and of a 4-bit number."""
_STEP = WEIGHT_DEVIATION / _NUMBER_DEVIATION
ROUTER, OF_EXPERTS = "ffn_gate_inp", "_exps"
FILE_TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15, "mxfp4": 38}
"""Numbers of llama.cpp's llama_ftype."""
FLOATS = {
    "Q4_0": {0: _STEP},
    "Q4_K": {0: _STEP / _MEAN_SCALE, 2: _STEP / _MEAN_SCALE * _MEAN_NUMBER},
    "Q6_K": {208: WEIGHT_DEVIATION / (64 * 18.5)},
    "Q8_0": {0: WEIGHT_DEVIATION / 74},
    "MXFP4": {},
}
"""The float16 numbers of a block, by their byte; all other bytes may have any value, but for MXFP4's first."""
MXFP4_EXPONENT = 127 - 9
"""Of the scale, a power of two; the numbers' deviation is 2.6. With larger weights a rounding that chooses another
expert changes a random model's logits by half, and its self-check fails."""


@dataclass(frozen=True)
class Shape:
    """Of a Llama, or with experts of a Qwen3-MoE or gpt-oss."""

    architecture: str = "llama"
    context_tokens: int = CONTEXT_TOKENS["llama3-8b-shape"]
    hidden: int = 4096
    mlp: int = 14336
    """Of an expert, where there are some."""
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 128256
    experts: int = 0
    chosen: int = 0
    """Of a token."""

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """Name, rows, columns."""
        yield "token_embd", self.vocabulary, self.hidden
        q, kv = self.head_dim * self.heads, self.head_dim * self.kv_heads
        ending = OF_EXPERTS if self.experts else ""
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_q", q, self.hidden
            yield f"blk.{layer}.attn_k", kv, self.hidden
            yield f"blk.{layer}.attn_v", kv, self.hidden
            yield f"blk.{layer}.attn_output", self.hidden, q
            if self.experts:
                yield f"blk.{layer}.{ROUTER}", self.experts, self.hidden
            yield f"blk.{layer}.ffn_gate{ending}", self.mlp, self.hidden
            yield f"blk.{layer}.ffn_up{ending}", self.mlp, self.hidden
            yield f"blk.{layer}.ffn_down{ending}", self.hidden, self.mlp
        yield "output", self.vocabulary, self.hidden

    def vectors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Name and shape of norms, biases and sinks."""
        yield "output_norm.weight", (self.hidden,)
        is_gpt_oss = self.architecture == "gpt-oss"
        for layer in range(self.layers):
            yield f"blk.{layer}.attn_norm.weight", (self.hidden,)
            yield f"blk.{layer}.{'post_attention_norm' if is_gpt_oss else 'ffn_norm'}.weight", (self.hidden,)
            if is_gpt_oss:
                yield f"blk.{layer}.attn_sinks.weight", (self.heads,)
            elif self.experts:
                yield f"blk.{layer}.attn_q_norm.weight", (self.head_dim,)
                yield f"blk.{layer}.attn_k_norm.weight", (self.head_dim,)
        if is_gpt_oss:
            for name, rows, _ in self.matrices():
                if name.startswith("blk."):
                    yield f"{name}.bias", (rows,) if self.count_of(name) == 1 else (self.experts, rows)

    def count_of(self, name: str) -> int:
        """Matrices in this tensor."""
        return self.experts if name.endswith(OF_EXPERTS) else 1


SHAPES = {
    "llama3-8b-shape": Shape(),
    "moe-3b-shape": Shape(
        "qwen3moe", CONTEXT_TOKENS["moe-3b-shape"], hidden=1536, mlp=512, layers=18, heads=12, kv_heads=4,
        vocabulary=32000, experts=64, chosen=8,
    ),
    "gpt-oss-20b-shape": Shape(
        "gpt-oss", CONTEXT_TOKENS["gpt-oss-20b-shape"], hidden=2880, mlp=2880, layers=24, heads=64, kv_heads=8,
        head_dim=64, vocabulary=201088, experts=32, chosen=4,
    ),
}  # fmt: skip


def type_of(name: str, kind: str, layers: int) -> str:
    """The rule of llama.cpp's quantiser: of Q4_K_M, some layers' values and last products get more bits."""
    if name.endswith(ROUTER):
        return "F32"
    if kind == "mxfp4":
        return "MXFP4" if name.endswith(OF_EXPERTS) else "Q8_0"
    if kind == "q8_0":
        return "Q8_0"
    if name == "output":
        return "Q6_K"
    if kind == "q4_0":
        return "Q4_0"
    if not name.removesuffix(OF_EXPERTS).endswith((".attn_v", ".ffn_down")):
        return "Q4_K"
    layer = int(name.split(".")[1])
    gets_more = layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2
    return "Q6_K" if gets_more else "Q4_K"


def random_matrix(rng: np.random.Generator, rows: int, columns: int, type_name: str) -> np.ndarray:
    """As bytes."""
    if type_name == "F32":
        return rng.normal(0, WEIGHT_DEVIATION, (rows, columns)).astype("<f4").view(np.uint8)
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    data = rng.integers(0, 256, (rows * columns // block, block_bytes), np.uint8)
    if type_name == "MXFP4":
        data[:, 0] = MXFP4_EXPONENT
    for place, value in FLOATS[type_name].items():
        data[:, place : place + 2] = np.array([value], np.float16).view(np.uint8)
    return data.reshape(rows, -1)


def write_random_gguf(path: Path, kind: str, shape: Shape) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

    writer: Any = GGUFWriter(path, shape.architecture)
    _add_fields(writer, shape)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(2)
    matrices = [(name, rows, columns, type_of(name, kind, shape.layers)) for name, rows, columns in shape.matrices()]
    for name, rows, columns, type_name in matrices:
        raw_type = GGMLQuantizationType[type_name]
        block, block_bytes = GGML_QUANT_SIZES[raw_type]
        row_bytes, count = columns // block * block_bytes, shape.count_of(name)
        size = (rows, row_bytes) if count == 1 else (count, rows, row_bytes)
        writer.add_tensor_info(f"{name}.weight", size, np.dtype(np.uint8), count * rows * row_bytes, raw_type)
    for name, dimensions in shape.vectors():
        writer.add_tensor_info(name, dimensions, np.dtype(np.float32), 4 * math.prod(dimensions))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for name, rows, columns, type_name in matrices:
        writer.write_tensor_data(random_matrix(rng, shape.count_of(name) * rows, columns, type_name))
    for name, dimensions in shape.vectors():
        writer.write_tensor_data(np.full(dimensions, 0.01 if name.endswith(".bias") else 1.0, np.float32))
    writer.close()


def _add_fields(writer: Any, shape: Shape) -> None:
    from gguf import RopeScalingType

    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(5e5)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
        writer.add_expert_feed_forward_length(shape.mlp)
    if shape.architecture == "gpt-oss":
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(32.0)
        writer.add_rope_scaling_orig_ctx_len(4096)
    writer.add_vocab_size(shape.vocabulary)
    _add_tokenizer(writer, shape.vocabulary)


def _add_tokenizer(writer: Any, vocabulary: int) -> None:
    """That of checkpoints; for a vocabulary that is too small for it, a token for each byte."""
    with tempfile.TemporaryDirectory() as directory:
        write_tokenizer(Path(directory), vocabulary, learns=vocabulary >= TRAINED_TOKENS)
        model = json.loads((Path(directory) / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    if not merges:  # a file must have one
        tokens[-1], merges = "Ġt", ["Ġ t"]
    control, normal = 3, 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control] * len(SPECIAL_TOKENS) + [normal] * (vocabulary - len(SPECIAL_TOKENS)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(PAD_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_chat_template(CHAT_TEMPLATE)


if __name__ == "__main__":
    write_random_gguf(Path(sys.argv[2]), sys.argv[3], SHAPES[sys.argv[1]])
