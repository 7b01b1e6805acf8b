"""A server of one shape with random weights.

Used by the sections that measure or harm a whole server. Independent of what is asked of it. Invariants: leaving ends
the server; its tokenizer knows only bytes, so that a prompt has as many tokens as characters and nothing needs
training.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import write_tokenizer
from benchmarks.stream_servers import Server, start_tree

from .engines import ENGINE, MAX_MODEL_LEN
from .section import Section
from .shapes import SHAPES

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "bench"


@contextlib.contextmanager
def serving(section: Section, **arguments: Any) -> Iterator[Server]:
    """`arguments`: of the engine; the section's options win over them."""
    server = start_tree(ROOT, _repository(section, arguments))
    try:
        yield server
    finally:
        server.stop()


def _repository(section: Section, arguments: dict[str, Any]) -> Path:
    repository = section.scratch / f"repository-{section.program}-{section.shape}-{section.label}"
    shape = SHAPES[section.shape]
    version = shape.write(repository / NAME / "1")
    write_tokenizer(version, shape.vocab_size, learns=False)
    max_model_len = min(MAX_MODEL_LEN, shape.max_position_embeddings)
    values = {**ENGINE, "max_model_len": max_model_len, **arguments, **section.options}
    model = {"model": str(version), "load_format": "dummy", "device": section.device, **values}
    (version / "model.json").write_text(json.dumps(model))
    (repository / NAME / "config.pbtxt").write_text('backend: "llm"\n')
    return repository
