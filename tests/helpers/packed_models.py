"""Packed models of random bytes, and checkpoints that only the weight cache reads. Without torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.packed_decoder import (
    Memories,
    PackedAttention,
    PackedDecoder,
    PackedLayer,
    PackedMlp,
    PackedModel,
)
from llmbackend.engine.cpu.packed_parts import ArrayAt, Bytes, MatrixAt, PackedNorm, PackedProjection
from llmbackend.engine.kernels.library import aligned

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, POSITIONS = 64, 2, 1, 32, 96, 20_000, 1024


class _Places:
    """Hands out neighbouring places of both memories."""

    def __init__(self) -> None:
        self.ends = {"resident": 0, "mapped": 0}

    def array(self, *shape: int, mapped: bool = False) -> ArrayAt:
        place = ArrayAt("mapped" if mapped else "resident", 0, shape)
        return ArrayAt(place.memory, self._take(place.memory, place.size_bytes), shape)

    def norm(self) -> PackedNorm:
        return PackedNorm(self.array(WIDTH), 1e-6)

    def projection(self, n: int, k: int) -> PackedProjection:
        matrix = MatrixAt(0, n, k, "float32")
        return PackedProjection(MatrixAt(self._take("resident", matrix.size_bytes), n, k, "float32"), None)

    def _take(self, memory: str, size_bytes: int) -> int:
        offset = self.ends[memory]
        self.ends[memory] += aligned(size_bytes)
        return offset


def packed_model(seed: int = 0) -> PackedModel:
    """Of some megabytes, more than one chunk of each memory."""
    places = _Places()
    attention = PackedAttention(
        qkv=(places.projection((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),),
        out=places.projection(WIDTH, HEADS * HEAD_DIM),
        q_norm=None, k_norm=None, norm_whole=False, cos_sin=places.array(POSITIONS, HEAD_DIM, mapped=True),
        num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, scaling=0.2, sliding_window=0, softcap=0.0, sinks=None,
    )  # fmt: skip
    mlp = PackedMlp(
        places.projection(INNER, WIDTH), places.projection(INNER, WIDTH), places.projection(WIDTH, INNER), "silu"
    )
    layer = PackedLayer(
        attention_norm=places.norm(), attention=attention, attention_out_norm=None, mlp_norm=places.norm(), mlp=mlp,
        mlp_out_norm=None, residual_factor=1.0,
    )  # fmt: skip
    decoder = PackedDecoder(
        model_type="llama", vocab_size=VOCAB, max_model_len=POSITIONS, eos_token_ids=(2,), dtype="float32",
        kernel_variant="generic", linear_kind="generic float32", kernel_report="generic",
        embedding=places.array(VOCAB, WIDTH, mapped=True),
        embedding_factor=1.0, layers=(layer,), norm=places.norm(), head=places.projection(VOCAB, WIDTH),
        logit_factor=1.0, logit_softcap=0.0,
    )  # fmt: skip
    random = np.random.default_rng(seed)
    resident, mapped = (random.integers(0, 256, size, np.uint8) for size in places.ends.values())
    return PackedModel(decoder, Memories(resident, mapped))


def new_memory(size_bytes: int) -> Bytes:
    return np.zeros(size_bytes, np.uint8)


def same(first: PackedModel | None, second: PackedModel) -> bool:
    """Whether both hold the same; an image's memories are whole pages."""
    if first is None or first.decoder != second.decoder:
        return False
    pairs = ((first.memories.resident, second.memories.resident), (first.memories.mapped, second.memories.mapped))
    return all(np.array_equal(read[: len(packed)], packed) and not read[len(packed) :].any() for read, packed in pairs)


def write_checkpoint(directory: Path, name: str = "weight", value: int = 1) -> Path:
    """A folder with the files that a key is made of."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCAB}))
    header = json.dumps({name: {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes([value]) * 64
    (directory / "model.safetensors").write_bytes(data)
    return directory


def config_of(checkpoint: Path, cache: Path, size_gib: float | None = None) -> EngineConfig:
    return EngineConfig(model=str(checkpoint), weight_cache_dir=str(cache), weight_cache_size=size_gib)
