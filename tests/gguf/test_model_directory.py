"""The directory that is made of a GGUF file: what it says, when it is made anew, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmbackend.gguf import model_directory as module
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.families import FAMILIES
from llmbackend.gguf.files import files_in
from llmbackend.gguf.model_directory import gguf_files, is_made_of_gguf, model_directory, source_of
from tests.helpers.gguf_files import llama_fields, write_fields

Tensors = dict[str, Any]


def tensors(**more: Any) -> Tensors:
    return {"token_embd.weight": np.zeros((3, 8)), "output_norm.weight": np.zeros(8), **more}


def made(path: Path, changes: dict[str, Any] | None = None, more: Tensors | None = None) -> Path:
    fields = llama_fields() | (changes or {})
    write_fields(
        path / "m.gguf", {name: value for name, value in fields.items() if value is not None}, more or tensors()
    )
    return model_directory(gguf_files(path / "m.gguf"), path / "made")


def config(path: Path, changes: dict[str, Any] | None = None, more: Tensors | None = None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made(path, changes, more) / "config.json").read_text())
    return found


def refusal(path: Path, changes: dict[str, Any] | None = None, more: Tensors | None = None) -> str:
    with pytest.raises(GgufError) as caught:
        made(path, changes, more)
    assert not list((path / "made").iterdir())
    return str(caught.value)


def of(architecture: str, **fields: Any) -> dict[str, Any]:
    """The fields of llama_fields under another name, and more."""
    own = {
        f"{architecture}.{name.partition('.')[2]}": value for name, value in llama_fields().items() if "llama." in name
    }
    without = {name: None for name in llama_fields() if name.startswith("llama.")}
    more = {f"{architecture}.{name.replace('__', '.')}": value for name, value in fields.items()}
    return {**without, **own, **more, "general.architecture": architecture}


def test_the_directory_has_what_a_checkpoint_has(tmp_path: Path) -> None:
    changes = {
        "tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "{{ tools }}",
        "tokenizer.ggml.eos_token_id": 1,
        "general.sampling.temp": 0.6, "general.sampling.top_k": 20,
    }  # fmt: skip
    directory = made(tmp_path, changes)
    assert is_made_of_gguf(directory)
    assert directory.name.startswith("m-")
    assert (directory / "m.gguf").resolve() == (tmp_path / "m.gguf").resolve()
    assert (directory / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (directory / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ tools }}"
    generation = json.loads((directory / "generation_config.json").read_text())
    assert generation == {"eos_token_id": [1], "temperature": 0.6, "top_k": 20}
    assert json.loads((directory / "tokenizer_config.json").read_text())["eos_token"] == "b"
    assert gguf_files(directory) == []


@pytest.mark.parametrize("name", ["sha256-0123abcd", "Model.GGUF", "m.gguf"])
def test_a_file_of_any_name_is_found_in_its_directory(name: str, tmp_path: Path) -> None:
    """ollama's blobs have no suffix."""
    file = write_fields(tmp_path / name, llama_fields(), tensors())
    directory = model_directory(gguf_files(file), tmp_path / "made")
    (found,) = files_in(directory)
    assert found.resolve() == file.resolve()
    assert source_of(str(directory)) == str(file)


def test_hyperparameters_have_transformers_names(tmp_path: Path) -> None:
    found = config(tmp_path, {"llama.attention.head_count_kv": 1, "llama.rope.freq_base": 5e5})
    expected = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 3, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "dtype": "float32",
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert not config(tmp_path, None, tensors(**{"output.weight": np.zeros((3, 8))}))["tie_word_embeddings"]


def test_the_largest_gemmas_divide_logits_by_another_width(tmp_path: Path) -> None:
    small = of("gemma2", attention__key_length=16)
    assert config(tmp_path, small)["query_pre_attn_scalar"] == 16
    assert config(tmp_path, small | {"gemma2.block_count": 46})["query_pre_attn_scalar"] == 4
    assert config(tmp_path, of("gemma3", block_count=62, attention__key_length=16))["query_pre_attn_scalar"] == 4


def test_gemma_3_without_fields_has_its_familys_values(tmp_path: Path) -> None:
    found = config(tmp_path, of("gemma3", block_count=7, attention__sliding_window=32))
    assert found["rope_parameters"]["full_attention"]["rope_theta"] == 1e6
    assert found["rope_parameters"]["sliding_attention"]["rope_theta"] == 1e4
    assert found["layer_types"] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert set(config(tmp_path, of("gemma3"))["layer_types"]) == {"full_attention"}


def test_a_changed_file_gets_another_directory(tmp_path: Path) -> None:
    first = made(tmp_path)
    assert model_directory(gguf_files(tmp_path / "m.gguf"), tmp_path / "made") == first
    before = (tmp_path / "m.gguf").stat()
    os.utime(tmp_path / "m.gguf", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    second = model_directory(gguf_files(tmp_path / "m.gguf"), tmp_path / "made")
    assert second != first
    shutil.copy(tmp_path / "m.gguf", tmp_path / "other.gguf")
    assert model_directory([tmp_path / "other.gguf"], tmp_path / "made") != second


def test_the_least_recently_used_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DIRECTORIES", 3)
    found = []
    for number in range(5):
        write_fields(tmp_path / f"m{number}.gguf", llama_fields(), tensors())
        found.append(model_directory([tmp_path / f"m{number}.gguf"], tmp_path / "made"))
        os.utime(found[-1], (number, number))
    assert sorted((tmp_path / "made").iterdir()) == sorted(found[2:])


def test_a_directory_without_some_of_its_files_is_made_again(tmp_path: Path) -> None:
    directory = made(tmp_path)
    names = sorted(path.name for path in directory.iterdir())
    (directory / "config.json").unlink()
    assert model_directory(gguf_files(tmp_path / "m.gguf"), directory.parent) == directory
    assert sorted(path.name for path in directory.iterdir()) == names
    assert list(directory.parent.iterdir()) == [directory]


def test_many_at_once_make_one_directory(tmp_path: Path) -> None:
    write_fields(tmp_path / "m.gguf", llama_fields(), tensors())
    with ThreadPoolExecutor(8) as threads:
        found = set(threads.map(lambda _: model_directory([tmp_path / "m.gguf"], tmp_path / "made"), range(16)))
    assert list((tmp_path / "made").iterdir()) == list(found)


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    expected = f"its architecture is 'mamba', expected one of: {', '.join(FAMILIES)}"
    assert refusal(tmp_path, of("mamba")) == expected


def test_experts_are_refused_in_other_families(tmp_path: Path) -> None:
    fields = of("qwen2") | {"qwen2.expert_count": 8}
    assert refusal(tmp_path, fields) == "its architecture is 'qwen2' with experts, which is not supported"


def test_a_template_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    def refuse(_source: str, _tokens: dict[str, str]) -> None:
        raise ValueError("it loops")

    write_fields(tmp_path / "m.gguf", llama_fields() | {"tokenizer.chat_template": "{{ x }}"}, tensors())
    with pytest.raises(GgufError, match=r"its field 'tokenizer.chat_template' is refused: it loops"):
        model_directory([tmp_path / "m.gguf"], tmp_path / "made", refuse)
    assert not list((tmp_path / "made").iterdir())


WRONG: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "no layers": ({"llama.block_count": None}, {}, "'llama.block_count' is missing, expected a number from 1 to 1024"),
    "no layer": ({"llama.block_count": 0}, {}, "'llama.block_count' is 0, expected a number from 1 to 1024"),
    "many layers": ({"llama.block_count": 1 << 30}, {}, "'llama.block_count' is 1073741824, expected a number from"),
    "a width that is a text": ({"llama.embedding_length": "8"}, {}, "'llama.embedding_length' is '8', expected a"),
    "widths that differ by layer": (
        {"llama.feed_forward_length": [8, 16]},
        {},
        "'llama.feed_forward_length' is a list of 2",
    ),
    "heads that do not divide": ({"llama.attention.head_count": 3}, {}, "'llama.attention.head_count' is 3, expected"),
    "key heads that do not divide": ({"llama.attention.head_count_kv": 3}, {}, "head_count_kv' is 3, expected a divi"),
    "values of another width": ({"llama.attention.value_length": 5}, {}, "value_length' is 5, expected 4, as of keys"),
    "a part of a head is rotated": ({"llama.rope.dimension_count": 2}, {}, "rope.dimension_count' is 2, expected 4"),
    "an unknown scaling": ({"llama.rope.scaling.type": "ntk"}, {}, "'llama.rope.scaling.type' is 'ntk', expected none"),
    "a part of a head is rotated beside experts": (
        {"llama.expert_count": 8, "llama.expert_used_count": 2, "llama.rope.dimension_count": 2},
        {},
        "'llama.rope.dimension_count' is 2, expected 4",
    ),
    "no layers but those that draft": (
        {"llama.block_count": 1, "llama.nextn_predict_layers": 1},
        {},
        "'llama.nextn_predict_layers' is 1, expected a number from 0 to 0",
    ),
    "a base that is infinite": (
        {"llama.rope.freq_base": float("inf")},
        {},
        "'llama.rope.freq_base' is inf, expected a",
    ),
    "experts, none chosen": ({"llama.expert_count": 8}, {}, "'llama.expert_used_count' is missing, expected"),
    "few rotary factors": ({}, {"rope_freqs.weight": np.ones(3)}, "'rope_freqs.weight' has 3 numbers, expected 2"),
    "rotary factors of 0": ({}, {"rope_freqs.weight": np.zeros(2)}, "'rope_freqs.weight' has numbers that are not"),
    "a matrix of rotary factors": ({}, {"rope_freqs.weight": np.ones((2, 2))}, "'rope_freqs.weight' is F32 [2, 2]"),
    "more tokens than rows": ({}, {"token_embd.weight": np.zeros((2, 8))}, "has 3 entries, but its tensor 'token_emb"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_hyperparameter_is_named(kind: str, tmp_path: Path) -> None:
    changes, more, expected = WRONG[kind]
    assert expected in refusal(tmp_path, changes, {**tensors(), **more})


def test_a_file_without_an_embedding_is_refused(tmp_path: Path) -> None:
    assert "its tensor 'token_embd.weight' is missing" in refusal(tmp_path, None, {"output_norm.weight": np.zeros(8)})
