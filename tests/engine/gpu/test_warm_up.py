"""All kernels that an engine may need are compiled when it starts: a request waits for no compiler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from tests.helpers.gpu.int4_checkpoints import save_int4
from tests.helpers.gpu.specialisations import compiled_after_start
from tests.helpers.gpu.tiny_models import SIZES, save


@pytest.mark.timeout(600)  # another process imports torch and transformers
def test_no_request_makes_the_engine_compile(tmp_path: Path) -> None:
    """Sections of the step's message are 22 numbers long before they are padded: no multiple of 16 bytes."""
    sizes = SIZES | {"max_position_embeddings": 1024, "num_hidden_layers": 1}
    save(tf.LlamaConfig(**sizes), tmp_path, torch.bfloat16)
    drafting: dict[str, Any] = {"enforce_eager": True, "batch_invariant": True, "enable_lora": True}
    drafting |= {"speculative_config": {"prompt_lookup_max": 5}}
    assert compiled_after_start(tmp_path, {}, drafting) == [[], []]


@pytest.mark.timeout(600)
def test_nor_does_one_of_a_model_with_experts(tmp_path: Path) -> None:
    sizes = SIZES | {"max_position_embeddings": 1024, "num_hidden_layers": 1}
    save(tf.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2), tmp_path, torch.bfloat16)
    assert compiled_after_start(tmp_path, {"enforce_eager": True}) == [[]]


@pytest.mark.timeout(600)
def test_nor_does_one_of_a_checkpoint_in_4_bits(tmp_path: Path) -> None:
    sizes = SIZES | {"max_position_embeddings": 1024, "num_hidden_layers": 1}
    save_int4(tf.Qwen2Config(**sizes), tmp_path, "awq")
    options = {"enforce_eager": True, "dtype": "bfloat16"}
    assert compiled_after_start(tmp_path / "int4", options) == [[]]
