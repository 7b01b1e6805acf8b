"""The program of the accelerator path computes what transformers computes, from weights that are there once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf

from llmbackend.engine.errors import ProgramUnsupportedError
from llmbackend.engine.gpu.ops.ops import StepLayout
from llmbackend.engine.gpu.weights.dense import DenseWeight
from tests.helpers.gpu.tiny_models import FAMILIES, WITH_EXPERTS, save
from tests.helpers.gpu.tiny_programs import (
    BLOCK_SIZE,
    LENGTHS,
    STEPS,
    all_logits,
    block_table,
    layout,
    load,
    program,
    prompts,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def row_by_row(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """A product whose rows do not depend on their number."""
    torch.sum(x[:, None] * weight, dim=-1, out=out)
    if bias is not None:
        out.add_(bias)


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_EXPERTS])
def test_a_program_computes_what_transformers_computes(family: str, tmp_path: Path) -> None:
    model = save((FAMILIES | WITH_EXPERTS)[family], tmp_path)
    loaded = load(tmp_path)
    built = program(loaded)
    built.verify(loaded.checked, BLOCK_SIZE)
    for tokens, logits in zip(prompts(), all_logits(built, prompts()), strict=True):
        with torch.inference_mode():
            expected = model(tokens[None].long()).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-3 * expected.abs().max().item(), rtol=0)


def test_padding_tokens_change_no_other_token(tmp_path: Path) -> None:
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
    qkv, head = layer.attending.qkv.weight, decoder.head.weight
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
    program(loaded).verify(loaded.checked, BLOCK_SIZE)


def test_what_a_description_misses_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(FAMILIES["llama"], tmp_path)
    layer = tf.models.llama.modeling_llama.LlamaDecoderLayer
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda self, *args, **kwargs: forward(self, *args, **kwargs) * 1.1)
    loaded = load(tmp_path)
    with pytest.raises(ProgramUnsupportedError, match="logits differ from the modules'"):
        program(loaded).verify(loaded.checked, BLOCK_SIZE)


def test_a_step_without_samples_skips_the_head(tmp_path: Path) -> None:
    save(FAMILIES["llama"], tmp_path)
    built, tokens = program(load(tmp_path)), prompts()
    step = layout(tokens, (0,) * len(tokens), STEPS[0], 0)
    silent = StepLayout(**{name: getattr(step, name) for name in StepLayout.__slots__} | {
        "sampled_tokens": step.sampled_tokens[:0]})  # fmt: skip
    assert built.forward(silent, block_table()).shape == (0, 96)


@pytest.mark.parametrize("changes", [{"sampled_tokens": torch.zeros(65)}, {"token_ids": torch.zeros(65)}])
def test_a_step_larger_than_the_buffers_is_refused(changes: dict[str, torch.Tensor], tmp_path: Path) -> None:
    save(FAMILIES["llama"], tmp_path)
    step = layout(prompts(), (0,) * len(LENGTHS), STEPS[0], 0)
    too_large = StepLayout(**{name: getattr(step, name) for name in StepLayout.__slots__} | changes)
    with pytest.raises(RuntimeError, match="exceeds the program's buffers"):
        program(load(tmp_path)).forward(too_large, block_table())
