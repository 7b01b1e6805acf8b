"""Engine arguments that name GGUF files get the directory that is made of them; hostile templates are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.adapter.engine_args import check_checkpoint, read_given_arguments, read_model_arguments
from llmbackend.adapter.gguf_models import hold_directories, with_directories
from llmbackend.adapter.text import template_trial
from llmbackend.adapter.text.template_trial import TemplateRefusedError, check_template
from llmbackend.adapter.text.tokenizer_loading import TokenizerLoader, may_be_rebuilt
from llmbackend.core.backend_api import TritonError
from llmbackend.engine.config import EngineConfig
from llmbackend.gguf import model_directory
from llmbackend.gguf.model_directory import is_made_of_gguf
from tests.helpers.gguf_files import llama_fields, write_fields

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLMBACKEND_WEIGHT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, **changes: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = np.zeros((3, 8))
    return write_fields(path, llama_fields(**changes), {"token_embd.weight": rows, "output_norm.weight": rows[0]})


def engine_of(directory: Path, model_json: dict[str, Any] | None = None) -> EngineConfig:
    (directory / "1").mkdir(exist_ok=True, parents=True)
    if model_json is not None:
        (directory / "1" / "model.json").write_text(json.dumps(model_json))
    model: Any = SimpleNamespace(config=ModelConfig(name="m"), directory=directory, version_directory=directory / "1")
    return read_model_arguments(model).engine


def test_a_version_directory_may_hold_a_gguf_file(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "m" / "1" / "anything.gguf")
    directory = Path(engine_of(tmp_path / "m").model)
    assert directory.parent == cache / "gguf"
    assert (directory / "anything.gguf").resolve() == file.resolve()
    check_checkpoint(EngineConfig(model=str(directory)))


class User:
    """Of a model's directory."""


def test_directories_in_use_are_not_removed(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_directory, "MAX_DIRECTORIES", 1)

    def directory(name: str) -> Path:
        write(tmp_path / name / "1" / f"{name}.gguf")
        return Path(engine_of(tmp_path / name).model)

    user, used = User(), directory("used")
    hold_directories(EngineConfig(model=str(used)), user)
    other = directory("other")
    assert used.is_dir() and other.is_dir()
    del user
    last = directory("last")
    assert list((cache / "gguf").iterdir()) == [last]


def test_model_and_tokenizer_may_be_gguf_files(tmp_path: Path, cache: Path) -> None:
    write(tmp_path / "m" / "1" / "files" / "a.gguf")
    engine = engine_of(tmp_path / "m", {"model": "files/a.gguf", "tokenizer": "files"})
    assert is_made_of_gguf(Path(engine.model))
    assert engine.tokenizer == engine.model
    assert with_directories(engine) == engine


def test_a_link_keeps_its_name(tmp_path: Path, cache: Path) -> None:
    """As in a hub's cache, whose files are links to others without an ending."""
    write(tmp_path / "blobs" / "0123abcd")
    (tmp_path / "small.gguf").symlink_to(tmp_path / "blobs" / "0123abcd")
    arguments = read_given_arguments({"model": "small.gguf"}, tmp_path)
    assert arguments["model"] == str(tmp_path / "small.gguf")
    directory = Path(with_directories(EngineConfig(**arguments)).model)
    assert directory.name.startswith("small-")


def test_what_is_wrong_is_said_with_the_arguments_name(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "bad.gguf", llama__block_count=0)
    expected = f"engine argument 'model' is '{file}', a checkpoint that cannot be served: its field 'llama.block_count'"
    for check in (check_checkpoint, lambda engine: engine_of(tmp_path / "m", {"model": engine.model})):
        with pytest.raises(TritonError) as caught:
            check(EngineConfig(model=str(file)))
        assert caught.value.message.startswith(expected)
    (tmp_path / "other.gguf").write_bytes(b"not one")
    with pytest.raises(TritonError, match="which is neither a directory nor a GGUF file"):
        check_checkpoint(EngineConfig(model=str(tmp_path / "other.gguf")))
    write(tmp_path / "third.gguf")
    with pytest.raises(TritonError, match="it contains 3 GGUF models, expected 1"):
        check_checkpoint(EngineConfig(model=str(tmp_path)))


def test_without_a_cache_the_directory_is_the_processs_own(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "m.gguf")
    directory = Path(with_directories(EngineConfig(model=str(file), weight_cache_size=0)).model)
    assert is_made_of_gguf(directory)
    assert not cache.exists()


def test_transformers_does_not_judge_the_tokenizer(tmp_path: Path, cache: Path) -> None:
    """It would replace that of a Qwen2 by its own class, whatever the file says."""
    fields = llama_fields(tokenizer__chat_template=TEMPLATE)
    qwen = {name.replace("llama.", "qwen2."): value for name, value in fields.items()} | {
        "general.architecture": "qwen2"
    }
    tensors = {"token_embd.weight": np.zeros((3, 8)), "output_norm.weight": np.zeros(8)}
    file = write_fields(tmp_path / "m.gguf", qwen, tensors)
    engine = with_directories(EngineConfig(model=str(file)))
    assert not may_be_rebuilt(Path(engine.model))
    loader = TokenizerLoader(engine)
    assert loader.chat_template == TEMPLATE
    assert loader.verified().encode("abab", add_special_tokens=False) == [2, 2]


# --- chat templates ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        TEMPLATE,
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ bos_token }}" + TEMPLATE,
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TEMPLATE,
    ],
)
def test_an_ordinary_template_passes(source: str) -> None:
    check_template(source, {"bos_token": "<s>"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 1 s"),
        ("{{ 'x' * 10 ** 11 }}", "it takes more than 2048 MiB"),
        ("{{ 'x' * 2000000 }}", "it turns a short conversation into 2000000 characters"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "than 1 s"),
        ("{% for message in messages %}", "does not compile"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "does not compile"),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "2048 MiB|too much memory",  # or the time ends first, on a busy machine
        ),
    ],
)
def test_a_template_that_takes_too_much_is_refused(source: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_trial, "CPU_S", 1)
    with pytest.raises(TemplateRefusedError, match=expected):
        check_template(source, {})


@pytest.mark.slow
def test_a_file_with_such_a_template_is_refused(tmp_path: Path, cache: Path) -> None:
    file = write(tmp_path / "m.gguf", tokenizer__chat_template="{{ 'x' * 10 ** 11 }}")
    with pytest.raises(ValueError, match=r"its field 'tokenizer.chat_template' is refused: it takes more than"):
        with_directories(EngineConfig(model=str(file)))
