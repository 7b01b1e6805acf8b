"""Checkpoints with experts in mxfp4: the tokens are those of the weights that transformers reads in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import UnshardableError
from llmbackend.engine.gpu.weights.experts import Int4Experts, QuantizedExperts
from llmbackend.engine.messages import InferRequest, SamplingParams
from llmbackend.engine.model.decoder_description import Experts
from llmbackend.engine.model.int4_formats import Mxfp4Format
from llmbackend.engine.model.module_runner import make_model_runner
from llmbackend.engine.model.unloaded_model import unloaded_model
from tests.helpers.gpu.gpu_engines import config_for, gpu_runner, mixed_requests, tokens_of
from tests.helpers.gpu.mxfp4_checkpoints import save_mxfp4
from tests.helpers.gpu.tiny_models import CHOICES, SIZES, WITH_EXPERTS
from tests.helpers.gpu.tiny_programs import (
    BLOCK_SIZE,
    all_logits,
    load,
    on_ranks,
    part_of,
    program,
    program_of_rank,
    prompts,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 9}
SMALL = tf.GptOssConfig(**SIZES | CHOICES | ONE_LAYER | {"intermediate_size": 128}, head_dim=32, num_local_experts=4)


def test_logits_are_those_of_the_weights_it_stands_for(tmp_path: Path) -> None:
    plain = load(save_mxfp4(WITH_EXPERTS["gpt_oss"], tmp_path))
    loaded = load(tmp_path / "mxfp4", dtype="float32")
    experts = loaded.model.model.layers[0].mlp.experts
    assert isinstance(experts, QuantizedExperts) and isinstance(experts.projection("down_proj").weight, Int4Experts)
    built = program(loaded)
    built.verify(loaded.checked, BLOCK_SIZE)
    for found, logits in zip(all_logits(built, prompts()), all_logits(program(plain), prompts()), strict=True):
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-4 * logits.abs().max().item())


def test_every_number_and_scale_is_read_as_transformers_does() -> None:
    draw = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (3, 5, 7, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(1, 255, (3, 5, 7), dtype=torch.uint8, generator=draw)
    blocks[0, :, :, 0] = torch.arange(35).view(5, 7) * 7
    scales[0, 0, :3] = torch.tensor([0, 127, 254])
    tensors = {"m.down_proj_blocks": blocks, "m.down_proj_scales": scales}
    read = Mxfp4Format().read_experts(tensors, "m", "down_proj", torch.device("cpu"), exact=False)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(torch.stack([read.matrix(expert, torch.float32) for expert in range(3)]), expected)


def test_requests_get_the_tokens_of_the_weights_it_stands_for(tmp_path: Path) -> None:
    """On a fake device that runs work as late as it may, with graphs, chunks and steps in flight; and on a CPU."""
    plain = save_mxfp4(SMALL, tmp_path)
    requests, found = mixed_requests(3, seed=2), []
    for path in (plain, tmp_path / "mxfp4"):
        config = config_for(path, dtype="float32", max_num_seqs=2, max_num_batched_tokens=16)
        found.append(tokens_of(config, gpu_runner(config), requests)[0])
        config = config_for(path, dtype="float32", device="cpu")
        found.append(tokens_of(config, make_model_runner(config), requests)[0])
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.timeout(600)  # of interpreted kernels
def test_the_kernel_gives_the_same_tokens(tmp_path: Path) -> None:
    plain = save_mxfp4(SMALL, tmp_path)
    small: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 32, "num_kv_blocks": 3}
    options = {"dtype": "float32", "block_size": 16, "enforce_eager": True, **small}
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    request = InferRequest(request_id="r", prompt_token_ids=tuple(range(5, 20)), sampling=sampling)
    expected, _ = tokens_of(config := config_for(plain, **options), gpu_runner(config), [request])
    config = config_for(tmp_path / "mxfp4", **options)
    assert tokens_of(config, gpu_runner(config, triton=True), [request])[0] == expected


def test_ranks_have_columns_of_every_expert(tmp_path: Path) -> None:
    plain = load(save_mxfp4(SMALL, tmp_path))
    loaded = load(tmp_path / "mxfp4", dtype="float32")
    expected = all_logits(program(plain), prompts())
    for decoder, _ in on_ranks(2, lambda ranks: part_of(loaded, ranks)):
        mlp = decoder.layers[0].mlp
        assert isinstance(mlp, Experts) and isinstance(mlp.down.weight, Int4Experts) and mlp.down.weight.k == 64
    for part in on_ranks(2, lambda ranks: all_logits(program_of_rank(loaded, ranks), prompts())):
        for found, logits in zip(part, expected, strict=True):
            torch.testing.assert_close(found, logits, rtol=1e-3, atol=1e-3 * logits.abs().max().item())


def test_columns_that_cut_a_group_are_refused_by_name(tmp_path: Path) -> None:
    save_mxfp4(WITH_EXPERTS["gpt_oss"], tmp_path)
    loaded = load(tmp_path / "mxfp4", dtype="float32")

    def refusal(ranks: Any) -> str:
        with pytest.raises(UnshardableError) as caught:
            part_of(loaded, ranks)
        return str(caught.value)

    assert all("a 4-bit matrix of 96 columns" in text for text in on_ranks(2, refusal))


def test_what_its_files_hold_beyond_is_refused_by_name(tmp_path: Path) -> None:
    save_mxfp4(SMALL, tmp_path)
    file, name = tmp_path / "mxfp4" / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(file)
    blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({f"{name}_scales": None}, f"missing: {name}_scales"),
        ({f"{name}_scales": scales[:, :3].clone()}, rf"'{name}_scales' is of type U8 .* expected U8 and \[4, 64, 4\]"),
        ({f"{name}_blocks": blocks.int()}, rf"'{name}_blocks' is of type I32 .* expected U8 and \[experts,"),
        ({f"{name}_blocks": None, f"{name}_scales": None}, f"missing: {name}"),
        (
            {f"{name}_blocks": blocks[:, :, :2].clone(), f"{name}_scales": scales[:, :, :2].clone()},
            rf"{name} is \[4, 64, 64\] and not \[4, 128, 64\]",
        ),
    ]
    for changes, text in wrong:
        save_file({key: t for key, t in (tensors | changes).items() if t is not None}, file, {"format": "pt"})
        with pytest.raises(ValueError, match=text):
            load(tmp_path / "mxfp4")
        with pytest.raises(ValueError, match=text):
            unloaded_model(EngineConfig(model=str(tmp_path / "mxfp4"), transport="inline"))


def test_engine_arguments_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    save_mxfp4(SMALL, tmp_path)
    with pytest.raises(ValueError, match=r"'quantization' is 'int8', expected null for .* weights are in 4 bits"):
        load(tmp_path / "mxfp4", quantization="int8")
