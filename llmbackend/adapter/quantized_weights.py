"""Decides whether quantized weights (2 to 8 bits) stay quantized on a CPU. They do unless engine arguments say
otherwise.

Used when engine arguments are read. Independent of how such weights are laid out. Invariant: only file headers are
read. A hub id is not inspected before its download, and keeps its 4 bits only with quantization=int4.
"""

from __future__ import annotations

from pathlib import Path

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import CheckpointError
from llmbackend.engine.kernels.library import available
from llmbackend.engine.model.checkpoint_files import has_four_bits
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.model_directory import gguf_files
from llmbackend.gguf.stored import FileMatrices


def keeps_quantized_weights(config: EngineConfig) -> bool:
    """Whether the model has weights in 2 to 8 bits that native kernels can multiply, and the configuration leaves their
    storage open."""
    is_open = config.quantization is None and config.dtype == "auto" and config.kernels != "torch"
    if not is_open or config.device.startswith("cuda") or config.load_format == "dummy":
        return False
    try:
        files = gguf_files(Path(config.model))
        found = FileMatrices(files).count > 0 if files else has_four_bits(Path(config.model))
    except (GgufError, CheckpointError, OSError):  # later steps report it better
        return False
    return found and bool(available())
