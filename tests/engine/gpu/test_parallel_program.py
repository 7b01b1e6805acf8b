"""The parts of a model on several ranks compute together what the model computes alone.

The ranks are threads of this process that meet at a barrier; processes and torch.distributed are those of
test_parallel_engine.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from llmbackend.engine.errors import UnshardableError
from llmbackend.engine.gpu.parallel.collectives import StageGroup
from llmbackend.engine.model.projections import Mlp
from tests.helpers.gpu.tiny_models import FAMILIES, SIZES, save
from tests.helpers.gpu.tiny_programs import all_logits, load, on_ranks, part_of, program_of_rank, prompts

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("family", "size"), [("llama", 2), ("llama tied", 4), ("qwen2", 2), ("qwen3", 2), ("gemma2", 2), ("phi3", 2)]
)
def test_ranks_compute_what_the_model_computes(family: str, size: int, tmp_path: Path) -> None:
    """Four ranks have two KV heads, so that neighbours hold the same one; 96 tokens divide by all of them."""
    model = save(FAMILIES[family], tmp_path)
    loaded = load(tmp_path)
    first, *others = on_ranks(size, lambda ranks: all_logits(program_of_rank(loaded, ranks), prompts()))
    for tokens, logits, *same in zip(prompts(), first, *others, strict=True):
        with torch.inference_mode():
            expected = model(tokens[None].long()).logits[0]
        torch.testing.assert_close(logits, expected, atol=1e-3 * expected.abs().max().item(), rtol=0)
        assert all(torch.equal(logits, one) for one in same)  # or the ranks would sample differently


def test_a_vocabulary_that_does_not_divide_is_filled_up(tmp_path: Path) -> None:
    import transformers as tf

    config = tf.LlamaConfig(**SIZES | {"vocab_size": 97})
    model = save(config, tmp_path)
    loaded = load(tmp_path)
    [logits, _] = on_ranks(2, lambda ranks: all_logits(program_of_rank(loaded, ranks), prompts()))
    with torch.inference_mode():
        expected = model(prompts()[0][None].long()).logits[0]
    assert logits[0].shape == expected.shape
    torch.testing.assert_close(logits[0], expected, atol=1e-3 * expected.abs().max().item(), rtol=0)


def test_each_rank_holds_its_part_and_nothing_of_the_others(tmp_path: Path) -> None:
    save(FAMILIES["llama tied"], tmp_path)
    loaded = load(tmp_path)
    assert loaded.decoder is not None
    parts = on_ranks(2, lambda ranks: part_of(loaded, ranks))
    for decoder, shapes in parts:
        assert [shape.num_kv_heads for shape in shapes.values()] == [1, 1, 1]
        for part, whole in zip(decoder.layers, loaded.decoder.layers, strict=True):
            assert part.attending.qkv.weight.n * 2 == whole.attending.qkv.weight.n
            assert isinstance(part.mlp, Mlp) and isinstance(whole.mlp, Mlp)
            assert part.mlp.down.weight.k * 2 == whole.mlp.down.weight.k
        head: Any = decoder.head.weight
        assert head.local.tensor.untyped_storage().data_ptr() == decoder.embedding.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("family", "size", "why"),
    [("llama", 3, "it has 4 attention heads"), ("olmo2", 2, "it normalizes queries and keys over all heads")],
)
def test_what_does_not_divide_is_refused_by_name(family: str, size: int, why: str, tmp_path: Path) -> None:
    save(FAMILIES[family], tmp_path)
    loaded = load(tmp_path)

    def refusal(ranks: StageGroup) -> str:
        with pytest.raises(UnshardableError) as caught:
            part_of(loaded, ranks)
        return str(caught.value)

    expected = f"engine argument 'tensor_parallel_size' is {size}, which the model does not support: {why}"
    assert set(on_ranks(size, refusal)) == {expected}
