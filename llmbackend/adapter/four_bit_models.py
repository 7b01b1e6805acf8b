"""Engine arguments that name a model in 4 bits: on a CPU it keeps them, unless the arguments say how weights are kept.

For: whoever reads engine arguments. Does not know: how such weights are laid out. Invariant: costs no more than reading
headers. Of a hub id nothing is known before it is downloaded: it keeps its 4 bits where `quantization` is int4.
"""

from __future__ import annotations

from pathlib import Path

from llmbackend.engine.config import EngineConfig
from llmbackend.engine.errors import CheckpointError
from llmbackend.engine.kernels.library import available
from llmbackend.engine.model.checkpoint_files import has_four_bits
from llmbackend.gguf.errors import GgufError
from llmbackend.gguf.model_directory import gguf_files
from llmbackend.gguf.stored import StoredMatrices


def keeps_four_bits(config: EngineConfig) -> bool:
    """Whether the model has weights in 4 bits that native kernels multiply, and the configuration leaves open how they
    are kept."""
    is_open = config.quantization is None and config.dtype == "auto" and config.kernels != "torch"
    if not is_open or config.enable_lora or config.device.startswith("cuda") or config.load_format == "dummy":
        return False
    try:
        files = gguf_files(Path(config.model))
        found = StoredMatrices(files).count > 0 if files else has_four_bits(Path(config.model))
    except (GgufError, CheckpointError, OSError):  # which later steps say better
        return False
    return found and bool(available())
