"""Attention to some of the positions is plain attention where these are all, and is refused where they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmbackend.engine.kernels import library
from tests.helpers.families import MAX_MODEL_LEN, Family, tried

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not library.available(), reason="no native kernels are built here"),
]

BLOCKS = {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 32}
MODELS = {
    "an indexer in each layer": (Family("deepseek_v32", changes={"index_topk": 96}), "native"),
    "layers that share a choice": (Family("glm_moe_dsa", changes={"index_topk": 96, "index_topk_freq": 2}), "native"),
    "beside windows": (Family("dots3_note_text", changes={"index_topk": 96}), "modules"),
    "with sinks": (Family("hy_v4", changes={"index_topk": 96}), "modules"),
    "with gates": (Family("axk2", changes={"index_topk": 96}), "modules"),
    "blocks": (Family("minimax_m3_vl_text", changes={**BLOCKS, "index_topk_blocks": 3}), "modules"),
    "chunks": (Family("llama4_text", changes={"attention_chunk_size": 96}), "modules"),
    "queries that grow": (Family("llama4_text", changes={"floor_scale": 97}), "modules"),
}
LESS = {
    "positions": (Family("deepseek_v32", changes={"index_topk": 95}), 95),
    "blocks": (Family("minimax_m3_vl_text", changes={**BLOCKS, "index_topk_blocks": 2}), 64),
    "chunks": (Family("llama4_text", changes={"attention_chunk_size": 80}), 80),
    "queries that grow": (Family("llama4_text", changes={"floor_scale": 96}), 95),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_positions_are_read(name: str, tmp_path: Path) -> None:
    """With the tokens of transformers, which asks the indexer."""
    family, how = MODELS[name]
    assert tried(family, tmp_path).how == how


@pytest.mark.parametrize("name", LESS)
def test_a_model_that_may_read_less_is_refused(name: str, tmp_path: Path) -> None:
    family, most = LESS[name]
    found = tried(family, tmp_path)
    assert found.how == "refused"
    assert f"of up to {most} tokens, and max_model_len is {MAX_MODEL_LEN}: " in found.why
    assert f"--max-model-len {most})" in found.why
