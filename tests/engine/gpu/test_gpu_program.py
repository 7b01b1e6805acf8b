"""The program of the accelerator path computes what transformers computes, from weights that are there once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tiny_models import FAMILIES, save
from torch import nn

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.decoder_description import UnrecognisedError
from llmbackend.engine.gpu.dense_weights import DenseWeight, Matmul
from llmbackend.engine.gpu.ops import PADDING_SLOT, LayerCache, StepLayout
from llmbackend.engine.gpu.program import GpuProgram, library_matmul
from llmbackend.engine.gpu.proof import prove
from llmbackend.engine.gpu.torch_ops import TorchOps
from llmbackend.engine.loader import LoadedModel, load_model

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK_SIZE, NUM_BLOCKS = 8, 24
LENGTHS = (40, 23, 9, 1)
STEPS = ((7, 0, 9, 0), (1, 20, 0, 1), (31, 2, 0, 0), (1, 1, 0, 0))
"""How many tokens of each sequence a step computes."""


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), transport="inline", **options), dense=True)


def caches(loaded: LoadedModel, dtype: torch.dtype | None = None) -> dict[nn.Module, LayerCache]:
    """KV memory with garbage in it."""

    def memory(num_kv_heads: int, dim: int) -> torch.Tensor:
        return torch.full((NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, dim), 77.0).to(dtype or loaded.dtype)

    return {
        module: LayerCache(memory(shape.num_kv_heads, shape.key_dim), memory(shape.num_kv_heads, shape.value_dim))
        for module, shape in loaded.layer_shapes.items()
    }


def program(loaded: LoadedModel, kv_dtype: torch.dtype | None = None, matmul: Matmul = library_matmul) -> GpuProgram:
    assert loaded.decoder is not None, loaded.why_modules
    return GpuProgram(loaded.decoder, caches(loaded, kv_dtype), TorchOps(), 64, 64, matmul)


def row_by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """A product whose rows do not depend on their number."""
    torch.sum(x[:, None] * weight, dim=-1, out=out)
    if bias is not None:
        out.add_(bias)


def block_table() -> torch.Tensor:
    """Blocks of each row, in no order."""
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).to(torch.int32)
    return order.reshape(len(LENGTHS), -1)


def layout(tokens: list[torch.Tensor], done: tuple[int, ...], chunks: tuple[int, ...], padding: int) -> StepLayout:
    """Chunks of sequences, and samples at each of their tokens; `padding` sequences behind them."""
    table, parts = block_table(), [i for i, chunk in enumerate(chunks) if chunk]
    positions = [torch.arange(done[i], done[i] + chunks[i], dtype=torch.int32) for i in parts]
    slots = [table[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in zip(parts, positions, strict=True)]
    count, none = sum(chunks), torch.zeros(padding, dtype=torch.int32)
    lens = [chunks[i] for i in parts] + [1] * padding
    return StepLayout(
        rows=torch.cat((torch.tensor(parts, dtype=torch.int32), none)),
        query_start=torch.tensor([0, *lens]).cumsum(0).to(torch.int32),
        seq_lens=torch.cat((torch.tensor([done[i] + chunks[i] for i in parts], dtype=torch.int32), none)),
        token_ids=torch.cat([*(tokens[i][done[i] : done[i] + chunks[i]] for i in parts), none]),
        positions=torch.cat((*positions, none)),
        slots=torch.cat((*slots, none + PADDING_SLOT)),
        sampled_tokens=torch.arange(count, dtype=torch.int32),
        sampled_rows=none,
        max_query_len=max(lens),
        max_seq_len=BLOCK_SIZE * table.shape[1] if padding else max(done[i] + chunks[i] for i in parts),
    )


def all_logits(program: GpuProgram, tokens: list[torch.Tensor], padding: int = 0) -> list[torch.Tensor]:
    """Of every token of every sequence, computed in the chunks of STEPS."""
    done: tuple[int, ...] = (0,) * len(tokens)
    found: list[list[torch.Tensor]] = [[] for _ in tokens]
    for chunks in STEPS:
        logits = program.forward(layout(tokens, done, chunks, padding), block_table()).float()
        ends = torch.tensor([0, *chunks]).cumsum(0).tolist()
        for sequence, (start, end) in zip(found, pairwise(ends), strict=True):
            sequence.append(logits[start:end].clone())
        done = tuple(a + b for a, b in zip(done, chunks, strict=True))
    assert done == LENGTHS
    return [torch.cat(sequence) for sequence in found]


def prompts() -> list[torch.Tensor]:
    return [torch.tensor([(7 * i + 5 * n + 3) % 96 for i in range(n)], dtype=torch.int32) for n in LENGTHS]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = save(FAMILIES[family], tmp_path)
    loaded = load(tmp_path)
    built = program(loaded)
    prove(built, loaded.checked, BLOCK_SIZE)
    for tokens, logits in zip(prompts(), all_logits(built, prompts()), strict=True):
        with torch.inference_mode():
            expected = model(tokens[None].long()).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-3 * expected.abs().max().item(), rtol=0)


def test_tokens_that_pad_disturb_nobody(tmp_path: Path) -> None:
    """Nor does a bound on the length that is larger than any sequence, as in a captured graph."""
    save(FAMILIES["gemma3"], tmp_path)
    loaded = load(tmp_path)
    plain = all_logits(program(loaded, matmul=row_by_row), prompts())
    padded = all_logits(program(loaded, matmul=row_by_row), prompts(), padding=3)
    assert all(torch.equal(a, b) for a, b in zip(plain, padded, strict=True))


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    save(FAMILIES["llama tied"], tmp_path)
    loaded = load(tmp_path)
    decoder = loaded.decoder
    assert decoder is not None
    layer, modules = decoder.layers[0], loaded.model.model.layers[0]
    qkv, head = layer.attention.qkv.weight, decoder.head.weight
    assert isinstance(qkv, DenseWeight)
    assert isinstance(head, DenseWeight)
    assert qkv.n == 4 * 16 + 2 * 2 * 16
    for name, start in (("q_proj", 0), ("k_proj", 64), ("v_proj", 96)):
        weight = getattr(modules.self_attn, name).weight
        assert weight.data_ptr() == qkv.tensor[start].data_ptr()
        assert weight.untyped_storage().nbytes() == qkv.tensor.numel() * 4
    assert modules.mlp.gate_proj.weight.data_ptr() + 96 * 64 * 4 == modules.mlp.up_proj.weight.data_ptr()
    assert head.tensor.data_ptr() == decoder.embedding.data_ptr()


def test_keys_and_values_of_8_bits_lie_close(tmp_path: Path) -> None:
    save(FAMILIES["qwen2"], tmp_path)
    loaded = load(tmp_path)
    wide, narrow = all_logits(program(loaded), prompts()), all_logits(program(loaded, torch.float8_e4m3fn), prompts())
    scale = max(logits.abs().max().item() for logits in wide)
    differences = [(a - b).abs().max().item() for a, b in zip(wide, narrow, strict=True)]
    assert 0 < max(differences) < 0.3 * scale


def test_bfloat16_passes_the_proof(tmp_path: Path) -> None:
    save(FAMILIES["qwen3"], tmp_path, torch.bfloat16)
    loaded = load(tmp_path)
    prove(program(loaded), loaded.checked, BLOCK_SIZE)


def test_what_a_description_misses_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(FAMILIES["llama"], tmp_path)
    layer = tf.models.llama.modeling_llama.LlamaDecoderLayer
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 1.1)
    loaded = load(tmp_path)
    with pytest.raises(UnrecognisedError, match="logits differ from the modules'"):
        prove(program(loaded), loaded.checked, BLOCK_SIZE)


def test_a_step_without_samples_skips_the_head(tmp_path: Path) -> None:
    save(FAMILIES["llama"], tmp_path)
    built, tokens = program(load(tmp_path)), prompts()
    step = layout(tokens, (0,) * len(tokens), STEPS[0], 0)
    silent = StepLayout(**{name: getattr(step, name) for name in StepLayout.__slots__} | {
        "sampled_tokens": step.sampled_tokens[:0], "sampled_rows": step.sampled_rows[:0]})  # fmt: skip
    assert built.forward(silent, block_table()).shape == (0, 96)


@pytest.mark.parametrize("changes", [{"sampled_tokens": torch.zeros(65)}, {"token_ids": torch.zeros(65)}])
def test_a_step_larger_than_the_buffers_is_refused(changes: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save(FAMILIES["llama"], tmp_path)
    step = layout(prompts(), (0,) * len(LENGTHS), STEPS[0], 0)
    too_large = StepLayout(**{name: getattr(step, name) for name in StepLayout.__slots__} | changes)
    with pytest.raises(RuntimeError, match="has no room"):
        program(load(tmp_path)).forward(too_large, block_table())
