"""The configurations in configs/ and the page about the backend say what the code does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from llmbackend.adapter.engine_args import read_model_arguments
from llmbackend.adapter.schemas.vllm import INPUTS, OUTPUTS
from llmbackend.engine.config import EngineConfig

ROOT = Path(__file__).parents[2]


def arguments_of(directory: Path) -> Any:
    config = text_format.Parse((directory / "config.pbtxt").read_text(), ModelConfig())
    assert config.backend == "llm"
    model: Any = SimpleNamespace(config=config, directory=directory, version_directory=directory / "1")
    return read_model_arguments(model)


@pytest.mark.parametrize(("name", "max_num_seqs", "max_model_len"), [("llm", 64, 4096), ("mindie", 200, 2560)])
def test_bundled_configurations_are_understood(
    tmp_path: Path, name: str, max_num_seqs: int, max_model_len: int
) -> None:
    checkpoint = tmp_path / "checkpoint"
    for directory in (tmp_path / "1", checkpoint):
        directory.mkdir()
    for source in (ROOT / "configs" / name).iterdir():
        target = tmp_path / "1" if source.name == "model.json" else tmp_path
        (target / source.name).write_text(source.read_text().replace("/path/to/checkpoint", str(checkpoint)))
    engine = arguments_of(tmp_path).engine
    assert engine.model == str(checkpoint)
    assert (engine.max_num_seqs, engine.max_model_len) == (max_num_seqs, max_model_len)


def test_the_page_names_every_tensor_and_every_argument() -> None:
    page = (ROOT / "docs" / "llm_backend.md").read_text()
    arguments = [field.name for field in msgspec.structs.fields(EngineConfig) if not field.name.startswith("mock_")]
    missing = [name for name in (*INPUTS, *OUTPUTS, *arguments) if f"`{name}`" not in page]
    assert not missing
