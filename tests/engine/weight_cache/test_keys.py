"""The key of an image: the same for the same model, another one for whatever changes what is packed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import llmbackend
from llmbackend.engine.config import EngineConfig
from llmbackend.engine.cpu.native_runner import why_modules
from llmbackend.engine.kernels import library
from llmbackend.engine.weight_cache import cache
from llmbackend.engine.weight_cache.cache import NoKeyError, key_of
from tests.helpers.packed_models import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


def key(checkpoint: Path, **arguments: Any) -> str:
    return key_of(EngineConfig(model=str(checkpoint), **arguments)).digest


def test_a_key_is_the_same_for_the_same_model_wherever_its_folder_is_named_from(checkpoint: Path) -> None:
    first = key_of(EngineConfig(model=str(checkpoint)))
    assert first == key_of(EngineConfig(model=f"{checkpoint}/../model", max_num_seqs=3, num_threads=1))
    assert first.file_name == f"model-{first.digest}.image"


@pytest.mark.parametrize(
    "arguments",
    [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"max_model_len": 16}, {"trust_remote_code": True}],
    ids=str,
)
def test_arguments_that_change_what_is_packed_change_the_key(checkpoint: Path, arguments: dict[str, Any]) -> None:
    assert key(checkpoint, **arguments) != key(checkpoint)


def _rewrite_in_place(checkpoint: Path) -> None:
    """Other values of the same size, with the time of the old ones."""
    weights = checkpoint / "model.safetensors"
    status = weights.stat()
    with weights.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(b"\2" * 64)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))


def _replace_by_rename(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    status = weights.stat()
    other = write_checkpoint(checkpoint.parent / "other", value=2) / "model.safetensors"
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(weights)


def _rename_a_tensor(checkpoint: Path) -> None:
    write_checkpoint(checkpoint, name="Weight")


def _change_the_config(checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace("llama", "qwen2"))


def _add_a_generation_config(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 7}')


@pytest.mark.parametrize(
    "change",
    [_rewrite_in_place, _replace_by_rename, _rename_a_tensor, _change_the_config, _add_a_generation_config],
)
def test_a_checkpoint_that_was_replaced_has_another_key(checkpoint: Path, change: Callable[[Path], None]) -> None:
    size = (checkpoint / "model.safetensors").stat().st_size
    before = key(checkpoint)
    change(checkpoint)
    assert (checkpoint / "model.safetensors").stat().st_size == size
    assert key(checkpoint) != before


def test_other_kernels_or_another_processor_change_the_key(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key(checkpoint)
    with monkeypatch.context() as patch:
        patch.setattr(library, "available", lambda: ("generic",))
        assert key(checkpoint) != before
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_processor", lambda: "another")
        assert key(checkpoint) != before
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    for path in Path(library.__file__).parent.glob("_*.so"):
        shutil.copy(path, kernels)
    monkeypatch.setattr(library, "__file__", str(kernels / "library.py"))
    assert key(checkpoint) != before


@pytest.mark.parametrize(("package", "version"), [("torch", "other"), ("transformers", "other")])
def test_other_libraries_change_the_key(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, package: str, version: str
) -> None:
    before, version_of = key(checkpoint), cache._version
    monkeypatch.setattr(cache, "_version", lambda name: version if name == package else version_of(name))
    assert key(checkpoint) != before


@pytest.mark.parametrize(
    "file", ["engine/cpu/linear.py", "engine/gpu/ops/ops.py", "engine/gpu/weights/int4.py", "gguf/orders.py"]
)
def test_other_code_changes_the_key(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    package, copied = Path(llmbackend.__file__).parent, tmp_path / "llmbackend"
    for name in ("engine", "gguf"):
        shutil.copytree(package / name, copied / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "native"))
    monkeypatch.setattr(cache, "__file__", str(copied / "engine" / "weight_cache" / "cache.py"))
    before = key(checkpoint)
    assert key(checkpoint) == before
    with (copied / file).open("a") as source:
        source.write("# changed")
    assert key(checkpoint) != before


def test_some_models_have_no_key(checkpoint: Path) -> None:
    with pytest.raises(NoKeyError, match="dummy"):
        key(checkpoint, load_format="dummy")
    with pytest.raises(NoKeyError, match=r"(not a folder|no snapshot)"):
        key(checkpoint / "missing")
    config = checkpoint / "config.json"
    config.write_text(config.read_text().replace("{", '{"auto_map": {"AutoConfig": "other/repository--a.B"}, ', 1))
    with pytest.raises(NoKeyError, match="its own code"):
        key(checkpoint, trust_remote_code=True)


def test_a_hub_id_has_the_key_of_its_snapshot_where_no_newer_one_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--some--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots").mkdir()
    write_checkpoint(repository / "snapshots" / "abc")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    config = EngineConfig(model="some/model")
    with pytest.raises(NoKeyError, match="HF_HUB_OFFLINE=1"):
        key_of(config)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    first = key_of(config)
    assert first.file_name.startswith("some_model-")
    write_checkpoint(repository / "snapshots" / "def", value=2)
    (repository / "refs" / "main").write_text("def")
    assert key_of(config).digest != first.digest
    with pytest.raises(NoKeyError, match="no snapshot"):
        key_of(EngineConfig(model="other/model"))
    monkeypatch.setenv("HF_HUB_CACHE", "~no-such-user/hub")
    with pytest.raises(NoKeyError, match="no snapshot in ~no-such-user/hub"):
        key_of(config)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, ""),
        ({"model": "mock"}, "mock"),
        ({"device": "cuda"}, "device is 'cuda'"),
        ({"enable_lora": True}, ""),
        ({"kernels": "torch"}, "kernels is 'torch'"),
        ({"enforce_eager": True}, "enforce_eager"),
    ],
)
def test_why_arguments_rule_out_a_program(arguments: dict[str, Any], reason: str) -> None:
    config = msgspec.structs.replace(EngineConfig(model="m"), **arguments)
    assert reason in why_modules(config)
    assert bool(why_modules(config)) == bool(reason)
