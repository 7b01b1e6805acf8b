"""Older families whose attention is written into their modules, in the options that their configs have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from llmbackend.engine.attention.own_attention import implementation_of
from llmbackend.engine.kernels import library
from tests.helpers.families import Family, Result, tried
from tests.helpers.native_models import check_same_tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    "changes",
    [
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": True},
        {"multi_query": False, "num_kv_heads": 4, "parallel_attn": False, "bias": True},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_falcon(changes: dict[str, Any], tmp_path: Path) -> None:
    """Keys and values for some heads, for one, for all."""
    assert tried(Family("falcon", changes={"alibi": False, **changes}), tmp_path).how == "modules"


ALIBI = {
    "bloom": Family("bloom"),
    "bloom, 6 heads": Family("bloom", changes={"n_head": 6, "hidden_size": 384}),
    "mpt": Family("mpt", changes={"attn_config": {"clip_qkv": 1.0}}),
    "mpt, 6 heads": Family("mpt", changes={"n_heads": 6, "d_model": 384}),
    "falcon": Family("falcon", changes={"alibi": True}),
    "falcon, shared keys": Family("falcon", changes={"alibi": True, "new_decoder_architecture": True}),
}


@pytest.mark.parametrize("name", ALIBI)
def test_scores_have_a_bias_by_distance(name: str, tmp_path: Path) -> None:
    """Numbers of heads that are no power of two have slopes of two series."""
    assert tried(ALIBI[name], tmp_path).how == "modules"


def test_what_falcon_adds_twice(tmp_path: Path) -> None:
    """Attention "eager" of transformers: if that is mended, `implementation_of` is needless."""
    config = tf.FalconConfig(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=4, alibi=True)
    torch.manual_seed(1)
    model, ids = tf.FalconForCausalLM(config).eval(), torch.arange(9)[None]
    logits = {}
    for name in ("eager", implementation_of(config)):
        model.set_attn_implementation(name)
        logits[name] = model(ids).logits
    assert not torch.allclose(logits["eager"], logits["sdpa"], atol=1e-3)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_biases_by_distance_do_not_know_the_batch(kernels: str, tmp_path: Path) -> None:
    if kernels == "auto" and not library.available():
        pytest.skip("no native kernels are built here")
    tf.BloomConfig(
        vocab_size=512, hidden_size=128, n_layer=2, n_head=4, seq_length=192, initializer_range=0.1, eos_token_id=511,
        architectures=["BloomForCausalLM"],
    ).save_pretrained(tmp_path)  # fmt: skip
    conditions: dict[str, dict[str, Any]] = {
        "small chunks, preemption": {"max_num_batched_tokens": 17, "num_kv_blocks": 9},
        "no prefix cache": {"enable_prefix_caching": False},
        "larger blocks": {"block_size": 64},
    }
    how = {"dtype": "bfloat16", "kernels": kernels, "max_model_len": 192}
    check_same_tokens(tmp_path, how, conditions)


def test_a_window_that_only_the_mask_has_is_refused(tmp_path: Path) -> None:
    """Phi 3.5 MoE states one as long as its context, which is none."""
    longest = {"sliding_window": 96}
    (tmp_path / "longest").mkdir()
    assert tried(Family("phimoe", changes=longest), tmp_path / "longest").how == "modules"
    found = tried(Family("phimoe", changes={"sliding_window": 8}), tmp_path)
    assert found == Result("refused", found.why) and "sliding windows are not passed" in found.why
