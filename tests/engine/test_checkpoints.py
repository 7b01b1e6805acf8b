"""Checkpoints whose files, config and model do not fit together are refused by name, before they take memory."""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from llmbackend.adapter.engine_args import check_checkpoint
from llmbackend.core.backend_api import TritonError
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import CheckpointError
from llmbackend.engine.model.checkpoint_check import check_loading_info, check_tensors
from llmbackend.engine.model.checkpoint_files import (
    TensorHeader,
    check_directory,
    check_numbers,
    read_headers,
    weight_files,
)
from llmbackend.engine.model.loader import load_model, open_checkpoint
from llmbackend.engine.model.located_files import files_of
from tests.helpers.families import Family, save_model
from tests.helpers.recurrent_models import RECURRENT
from tests.helpers.tiny_models import FAMILIES

pytestmark = pytest.mark.slow

Weights = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"


def save(path: Path, family: str = "llama", **changes: Any) -> Path:
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(path)
    return edit_config(path, **changes) if changes else path


def edit_config(path: Path, **changes: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))
    return path


def edit_weights(path: Path, edit: Callable[[Weights], object]) -> Path:
    weights = load_file(path / "model.safetensors")
    edit(weights)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


def headers(path: Path) -> dict[str, TensorHeader]:
    return read_headers([path / "model.safetensors"])


def load(path: Path) -> Any:
    return load_model(EngineConfig(model=str(path), transport="inline"))


def refusal(path: Path) -> str:
    with pytest.raises(ValueError, match="a checkpoint that cannot be served: ") as caught:
        load(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text.partition("cannot be served: ")[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_compared_with_its_checkpoint(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    save(tmp_path, family)
    check_tensors(type(tf.AutoModelForCausalLM.from_config(FAMILIES[family])), FAMILIES[family], headers(tmp_path))
    assert "were not compared" not in caplog.text


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    edit_weights(save(tmp_path), lambda weights: weights.pop(UP))
    assert refusal(tmp_path) == f"its tensors do not fit its config.json: missing: {UP}"


def test_many_missing_weights_are_named_in_part(tmp_path: Path) -> None:
    def drop_layer(weights: Weights) -> None:
        for name in [name for name in weights if ".layers.1." in name]:
            del weights[name]

    edit_weights(save(tmp_path), drop_layer)
    text = refusal(tmp_path)
    assert text.count("model.layers.1.") == 5
    assert text.endswith(" and 4 more")


def test_an_unexpected_weight_is_named(tmp_path: Path) -> None:
    """A bias that the config does not mention changes what the model computes."""
    edit_weights(save(tmp_path), lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}))
    text = refusal(tmp_path)
    assert text == "its tensors do not fit its config.json: unexpected: model.layers.0.self_attn.q_proj.bias"


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    edit_weights(save(tmp_path), lambda weights: weights.update({UP: torch.ones(90, 64)}))
    assert refusal(tmp_path).endswith(f"of another shape: {UP} is [90, 64] and not [96, 64]")


@pytest.mark.parametrize("part", ["experts.2.up_proj.weight", "experts.2."])
def test_a_weight_missing_among_experts_is_named(part: str, tmp_path: Path) -> None:
    """transformers stacks the experts of a layer, and cannot where one lacks a weight."""

    def drop(weights: Weights) -> None:
        for name in [name for name in weights if f"layers.1.mlp.{part}" in name]:
            del weights[name]

    edit_weights(save(tmp_path, "qwen3_moe"), drop)
    assert "model.layers.1.mlp.experts" in refusal(tmp_path)


def test_what_checkpoints_carry_in_vain_is_harmless(tmp_path: Path) -> None:
    """Tied heads are saved once, old checkpoints hold buffers, others layers that draft."""
    save(tmp_path / "tied", "gpt2", tie_word_embeddings=True)
    edit_weights(
        tmp_path / "tied",
        lambda weights: (
            weights.pop("lm_head.weight"),
            weights.update(
                {
                    "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64),
                    "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
                }
            ),
        ),
    )
    load(tmp_path / "tied")
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "mtp.fc.weight": torch.ones(2, 2)}
    load(edit_weights(save(tmp_path / "old"), lambda weights: weights.update(extra)))


def test_scales_of_keys_and_values_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = "model.layers.0.self_attn.k_scale"
    edit_weights(save(tmp_path), lambda weights: weights.update({name: torch.full((1,), 0.5)}))
    open_checkpoint(EngineConfig(model=str(tmp_path)))
    assert not caplog.records
    open_checkpoint(EngineConfig(model=str(tmp_path), kv_cache_dtype="fp8"))
    assert (
        f"kv_cache_dtype is 'fp8': scales of keys and values are 1, those of the checkpoint are not used: {name}"
        in (caplog.text)
    )


def test_layers_that_draft_are_harmless_if_the_config_counts_them(tmp_path: Path) -> None:
    """They follow those of the model, as in DeepSeek V3."""
    save_model(Family("deepseek_v3"), 64, tmp_path)

    def add(weights: Weights) -> None:
        layer = {name: weights[name] for name in weights if name.startswith("model.layers.1.")}
        weights |= {name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in layer.items()}
        weights |= {f"model.layers.2.{name}.weight": torch.ones(256) for name in ("enorm", "hnorm")}
        weights["model.layers.2.eh_proj.weight"] = torch.ones(256, 512)

    load(edit_config(edit_weights(tmp_path, add), num_nextn_predict_layers=1))
    edit_config(tmp_path, num_nextn_predict_layers=0)
    assert "unexpected: model.layers.2." in refusal(tmp_path)


def test_parts_for_images_may_be_there_or_not() -> None:
    nothing: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    vision = {"model.vision_tower.layers.0.mlp.fc1.weight", "visual.blocks.3.norm.weight"}
    for key in ("missing_keys", "unexpected_keys"):
        check_loading_info(nothing | {key: vision}, tf.LlamaConfig(), multimodal=True)
        with pytest.raises(CheckpointError, match=r"visual\.blocks\.3\.norm\.weight"):
            check_loading_info(nothing | {key: vision}, tf.LlamaConfig(), multimodal=False)


def test_weights_in_8_bits_need_their_scales(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    edit_weights(save(tmp_path), lambda weights: weights.update({name: weights[name].to(torch.float8_e4m3fn)}))
    assert "states no quantization_config, expected one for weights in 8 bits: " + name in refusal(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert refusal(tmp_path).endswith(f"missing: the scales of {name}")


@pytest.mark.parametrize("field", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"])
def test_a_config_that_describes_another_model_costs_nothing(field: str, tmp_path: Path) -> None:
    huge: dict[str, Any] = {field: 1_000_000_000}
    save(tmp_path, **huge)
    assert f"its config.json states {field} 1000000000, but " in refusal(tmp_path)


def test_a_width_that_the_model_does_not_use_refuses_nothing(tmp_path: Path) -> None:
    config = copy.deepcopy(RECURRENT["nemotron_h"])
    config.layers_block_type = ["linear_attention", "full_attention"]
    tf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load(edit_config(tmp_path, intermediate_size=1_000_000_000, moe_intermediate_size=1_000_000_000))


def test_the_host_refuses_it_before_it_starts_an_engine(tmp_path: Path) -> None:
    save(tmp_path, num_hidden_layers=1_000_000_000)
    with pytest.raises(TritonError, match=r"its config\.json states num_hidden_layers 1000000000"):
        check_checkpoint(EngineConfig(model=str(tmp_path)))
    check_checkpoint(EngineConfig(model=str(edit_config(tmp_path, num_hidden_layers=3))))


def test_numbers_count_where_they_are_nested(tmp_path: Path) -> None:
    tensors = read_headers([save(tmp_path) / "model.safetensors"])
    check_numbers({"text_config": {"num_hidden_layers": 3, "n_routed_experts": 64}}, tensors)
    with pytest.raises(CheckpointError, match="states depth 5000, but its tensors belong to 3 layers or experts"):
        check_numbers({"vision_config": {"depth": 5000}}, tensors)


@pytest.mark.parametrize("has_others", [False, True])
def test_config_json_may_name_the_weights(has_others: bool, tmp_path: Path) -> None:
    whole = load(save(tmp_path)).model.state_dict()
    edit_config(tmp_path, transformers_weights="own.safetensors")
    (tmp_path / "model.safetensors").rename(tmp_path / "own.safetensors")
    if has_others:
        save_file({UP: torch.zeros(1)}, tmp_path / "model.safetensors")
    assert weight_files(tmp_path) == files_of(EngineConfig(model=str(tmp_path))) == [tmp_path / "own.safetensors"]
    found = load(tmp_path).model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items() if not tensor.is_meta)
    for outside in ("../own.safetensors", str(tmp_path / "own.safetensors")):
        edit_config(tmp_path, transformers_weights=outside)
        assert "expected a file inside of its directory" in refusal(tmp_path)


def test_an_index_whose_files_are_missing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tf.AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    load(tmp_path)
    shards[1].unlink()
    assert refusal(tmp_path) == f"its model.safetensors.index.json names files that are missing: {shards[1].name}"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    index["weight_map"]["x"] = "../../etc/passwd"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names files outside of its directory: ../../etc/passwd" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "its model.safetensors.index.json cannot be read: " in refusal(tmp_path)


def headers_of(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


HOSTILE = {
    b"": "states a header of 0 bytes",
    b"short": "states a header of 0 bytes",
    headers_of(b"{}", length=2**63): f"states a header of {2**63} bytes",
    headers_of(b"{}", length=90_000_000): "states a header of 90000000 bytes",
    headers_of(b"{" * 100): "not safetensors",
    headers_of(b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', b"8 bytes."): "the file is truncated",
    headers_of(
        b'{"a":{"dtype":"F32","shape":[1000000,1000000,1000000],"data_offsets":[0,8]}}', b"8 bytes."
    ): "expected 4",
    headers_of(b'{"a":{"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]}}', b"8 bytes."): "an impossible shape",
    headers_of(b'{"a":{"dtype":"F9","shape":[2],"data_offsets":[0,8]}}', b"8 bytes."): "the unknown type 'F9'",
}


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_headers(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors") as caught:
        check_directory(tmp_path)
    assert HOSTILE[content] in str(caught.value)
