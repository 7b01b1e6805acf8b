"""A started host with the real `llm` backend and its mock engine, for tests of frontends with a language model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmbackend.core.inference_server import InferenceServer
from llmbackend.core.server_options import ServerOptions

MODEL = "mock_llm"
BLOCK_TOKENS, BLOCKS = 8, 256
ENGINE = {
    "model": "mock",
    "transport": "inline",
    "max_model_len": 256,
    "block_size": BLOCK_TOKENS,
    "num_kv_blocks": BLOCKS,
}


def mock_llm_host(
    root: Path, engine: Mapping[str, Any] | None = None, kind: type[InferenceServer] = InferenceServer, **options: Any
) -> InferenceServer:
    version = root / "llm_models" / MODEL / "1"
    version.mkdir(parents=True)
    (version / "model.json").write_text(json.dumps(ENGINE | dict(engine or {})))
    (version.parent / "config.pbtxt").write_text('backend: "llm"\n')
    server = kind(ServerOptions(model_repositories=(root / "llm_models",), **options))
    server.start()
    return server
